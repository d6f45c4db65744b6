"""What the Stein term does to the features of trained runs: how far two views are apart, and in how many directions.

python benchmarks/view_study.py RUN... [--data-root DATA] [--images 2000]

Test images and their Fourier views go through the final shared net of each run. All lengths are squared and in units
of the features' own variance (its trace), so runs can be compared. `views`: between an image and its view. `within`:
around the mean of the class. `directions`: (Σ λ)²/Σ λ² of the eigenvalues of a covariance, of all features and within
classes; 1 where everything lies on a line. A CPU takes a minute a run.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from foogd.data.augment import fourier_mix
from foogd.report import Table
from foogd.runs import Run, source_commit
from foogd.settings import read_run_config


def directions(centred: Tensor) -> float:
    """The participation ratio of the covariance: how many directions share the variance."""
    covariance = centred.T @ centred
    return float(covariance.trace() ** 2 / covariance.square().sum())


def study(folder: Path, data_root: str | None, images: int) -> tuple[str, ...]:
    config, method = read_run_config(folder / "config.toml")
    root = data_root or config.data_root
    config = replace(config, data_root=root, out=config.out[:1], corruptions=(), device="cpu")
    run = Run(folder, config, method)
    state, federation, nets = run.state(), run.federation, run.engine.nets()
    run.engine.layout.bind(nets, state.server.shared, state.clients[0].personal)
    nets.eval()
    test = next(one.store for one in federation.tests if one.split == "in")
    draw = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(test), generator=draw)[:images]
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (federation.mean, federation.std))
    first, second = [], []
    with torch.no_grad():
        for some in chosen.split(250):
            x = test.batch(some)
            partner = x[torch.randperm(len(x), generator=draw)]
            x_hat = fourier_mix(x, partner, torch.rand(len(x), generator=draw))
            for seen, features in ((x, first), (x_hat, second)):
                features.append(nets["backbone"]((seen - mean) / std).double())
    z, z_hat, y = torch.cat(first), torch.cat(second), test.labels[chosen]
    centred = z - z.mean(0)
    inside = torch.cat([z[y == c] - z[y == c].mean(0) for c in y.unique()])
    total = centred.square().sum(1).mean()
    apart = (z_hat - z).square().sum(1).mean() / total
    spread = inside.square().sum(1).mean() / total
    numbers = (apart, spread, apart / spread, directions(centred), directions(inside))
    return (folder.name, *(f"{float(number):.2f}" for number in numbers))


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("runs", type=Path, nargs="+")
    words.add_argument("--data-root")
    words.add_argument("--images", type=int, default=2000)
    args = words.parse_args()
    heads = ("run", "views", "within", "views / within", "directions", "directions within")
    print(f"commit {source_commit()}, {args.images} test images, seed 0")
    print(Table("", heads, tuple(study(run, args.data_root, args.images) for run in args.runs)).markdown(words=(0,)))


if __name__ == "__main__":
    main()
