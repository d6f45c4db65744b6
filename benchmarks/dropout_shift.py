"""How far features of an untrained backbone move from training to the test: dropout goes off, or constants change.

python benchmarks/dropout_shift.py --root data

Batch normalisation counts the moments of noisy features where dropout is on, and divides quiet ones by them in a test.
A net that has learnt little can be elsewhere in a test than in training, whatever its training loss: a linear head that
knows the features of training is asked about test images in both modes. CPU, five minutes.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from foogd.data.sources import load_source
from foogd.data.store import ImageStore
from foogd.engine.batches import IMAGENET
from foogd.nets import make_backbone
from foogd.nets.dropout import Dropout, bind_dropout
from foogd.report import Table

BATCH, UPDATES = 128, 96


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--root", default="data")
    words.add_argument("--data", default="cifar10")
    words.add_argument("--backbone", default="wrn40-2")
    words.add_argument("--images", type=int, default=4096, help="training images; a quarter as many are tested")
    words.add_argument("--seed", type=int, default=0)
    args = words.parse_args()
    store = load_source(args.data, Path(args.root))
    order = torch.randperm(len(store), generator=torch.Generator().manual_seed(args.seed))
    train, test = store.select(order[: args.images]), store.select(order[args.images :][: args.images // 4])
    lines = [line(args.backbone, train, test, dropout, args.seed) for dropout in (True, False)]
    heads = ("dropout", "two images", "training to test", "ImageNet's constants to the data's own")
    print(Table("", (*heads, "right in training mode, in %", "in a test"), tuple(lines)).markdown(words=(0,)))


@torch.no_grad()
def line(backbone: str, train: ImageStore, test: ImageStore, dropout: bool, seed: int) -> tuple[str, ...]:
    """Mean distances between features (of two images, in training and test, with other constants), and accuracies."""
    net = make_backbone(backbone, train.shape, torch.Generator().manual_seed(seed))
    bind_dropout(net, torch.Generator().manual_seed(seed))
    layers = [module for module in net.modules() if isinstance(module, Dropout)]
    for module in layers if not dropout else ():
        module.p = 0.0

    def features(store: ImageStore, constants: tuple[tuple[float, ...], ...] = IMAGENET) -> Tensor:
        mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in constants)
        parts = torch.arange(len(store)).split(BATCH)
        return torch.cat([net((store.batch(part) - mean) / std) for part in parts])

    net.train()
    for _ in range(math.ceil(UPDATES * BATCH / len(train))):  # the running moments forget their start
        known = features(train)
    noisy = features(test)
    net.eval()
    quiet, other = features(test), features(test, train.channel_moments())
    half = len(quiet) // 2
    pairs = (quiet[:half], quiet[half : 2 * half]), (noisy, quiet), (quiet, other)
    head = linear_head(known, train.labels, train.num_classes)
    right = (float(((with_constant(z) @ head).argmax(1) == test.labels).double().mean()) for z in (noisy, quiet))
    distances = (f"{float((a - b).norm(dim=1).mean()):.2f}" for a, b in pairs)
    rate = max((module.p for module in layers), default=0)
    return f"{rate:g}", *distances, *(f"{100 * share:.1f}" for share in right)


def linear_head(z: Tensor, y: Tensor, classes: int) -> Tensor:
    """Ridge regression on the classes, with a constant."""
    x = with_constant(z)
    ridge = x.var(0).mean() * len(x) * 1e-3 * torch.eye(x.shape[1], dtype=x.dtype)
    return torch.linalg.solve(x.T @ x + ridge, x.T @ torch.nn.functional.one_hot(y.long(), classes).double())


def with_constant(z: Tensor) -> Tensor:
    return torch.cat([z, torch.ones(len(z), 1)], 1).double()


if __name__ == "__main__":
    main()
