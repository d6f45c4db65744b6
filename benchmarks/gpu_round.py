"""Seconds a round on one GPU: our eager engine, a plain PyTorch loop with a DataLoader, and the graph engine.

python benchmarks/gpu_round.py                                    # the whole table, about 10 minutes on one H200
python benchmarks/gpu_round.py --programs graph --alphas 5.0      # one part of it

Sizes of CIFAR-10 (50,000 images of 32x32, ten classes; random pixels, for time does not depend on them), ten clients,
WideResNet-40-2 with dropout 0.3, batch 128, five local epochs. The plain loop is what most federated code does: for
each client a DataLoader with workers that augment image by image in numpy, eager steps in float32, one client after the
other. Slow programs are timed over one local epoch, or over some steps, and scaled to five epochs; the table says so.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from foogd import Config, Federation, ImageStore
from foogd.core.random import Streams, generator
from foogd.core.types import Batch, Phase
from foogd.engine.eager import EagerEngine, local_step
from foogd.engine.graph import GraphEngine
from foogd.methods import make_method
from foogd.nets import fused
from foogd.nets.dropout import bind_dropout
from foogd.runs.environment import source_commit
from foogd.simulate import initial_state, run_round

BATCH, EPOCHS, WORKERS = 128, 5, 12
KERNELS = fused._kernels


def federation_of(alpha: float, clients: int, images: int) -> Federation:
    held_out = max(10, images // 50)
    count = images + held_out
    pixels = torch.randint(256, (count, 32, 32, 3), generator=generator(0, "benchmark"), dtype=torch.uint8)
    test = torch.arange(count) >= images
    store = ImageStore(pixels, torch.arange(count) % 10, classes=tuple("0123456789"), name="noise", test=test)
    return Federation.build(store, clients=clients, alpha=alpha, seed=21, min_size=2)


def config_of(name: str, **changes: object) -> Config:
    base = {"backbone": "wrn40-2", "batch_size": BATCH, "local_epochs": EPOCHS, "lr": 0.1, "flip": True, "crop": 4}
    return Config(method=name, rounds=100, device="cuda", **{**base, **changes})  # type: ignore[arg-type]


class NumpyViews(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """One image at a time as the plain loop loads it: flip and crop, and for two views a Fourier mix, in numpy."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, views: int) -> None:
        self.images, self.labels, self.views = images, labels, views

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, int]:
        rng = np.random.default_rng()
        x = self.augment(self.images[index], rng)
        x_hat = x
        if self.views == 2:
            partner = self.augment(self.images[rng.integers(len(self.images))], rng)
            own = np.fft.fft2(x, axes=(0, 1))
            lam = rng.random()
            amplitude = (1 - lam) * np.abs(own) + lam * np.abs(np.fft.fft2(partner, axes=(0, 1)))
            x_hat = np.real(np.fft.ifft2(amplitude * np.exp(1j * np.angle(own)), axes=(0, 1))).clip(0, 255)
        return self.tensor(x), self.tensor(x_hat), int(self.labels[index])

    @staticmethod
    def augment(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        padded = np.pad(image, ((4, 4), (4, 4), (0, 0)))
        top, left = rng.integers(9, size=2)
        cut = padded[top : top + 32, left : left + 32].astype(np.float32)
        return cut[:, ::-1] if rng.random() < 0.5 else cut

    @staticmethod
    def tensor(image: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(((image / 255 - 0.5) / 0.25).transpose(2, 0, 1), dtype=np.float32)


def time_plain(name: str, federation: Federation, most_steps: int) -> tuple[float, str]:
    """Seconds of a round, scaled from some steps of the largest client."""
    method = make_method(name)
    engine = EagerEngine(method, federation, config_of(name, precision="fp32"))
    state = initial_state(engine)
    client = max(state.clients, key=lambda one: len(one.indices))
    own = client.indices.cpu().numpy()
    images, labels = federation.train.images.cpu().numpy()[own], federation.train.labels.cpu().numpy()[own]
    nets = engine.nets()
    ctx = engine.context(0, nets, {}, {}, Streams(0, device=engine.device), client.class_counts)
    bind_dropout(nets, ctx.rng("dropout"))
    phase = Phase(tuple(method.groups), 1)
    optimisers = engine.optimisers(nets, phase, {})
    ctx = type(ctx)(**{**ctx.__dict__, "groups": phase.groups})
    loader = torch.utils.data.DataLoader(
        NumpyViews(images, labels, method.views), BATCH, shuffle=True, num_workers=WORKERS, drop_last=True
    )
    done, began = 0, 0.0
    while done < most_steps:
        for x, x_hat, y in loader:
            if done == 5:  # the first steps choose kernels
                torch.cuda.synchronize()
                began = time.perf_counter()
            batch = Batch(x.cuda(), y.cuda(), x_hat.cuda() if method.views == 2 else None)
            for loss in local_step(method, nets, batch, ctx, optimisers).values():
                float(loss)  # such loops read the loss at each step
            done += 1
            if done >= most_steps:
                break
    torch.cuda.synchronize()
    step = (time.perf_counter() - began) / (done - 5)
    return step * round_steps(federation), f"{done - 5} steps, scaled"


def round_steps(federation: Federation) -> int:
    return EPOCHS * sum(-(-len(own) // BATCH) for own in federation.train_indices)


def time_eager(name: str, federation: Federation) -> tuple[float, str]:
    """Seconds of a round, scaled from one epoch of the client of median size."""
    method = make_method(name)
    engine = EagerEngine(method, federation, config_of(name, local_epochs=1))
    state = initial_state(engine)
    client = sorted(state.clients, key=lambda one: len(one.indices))[len(state.clients) // 2]
    for _ in range(2):  # the first time chooses kernels
        torch.cuda.synchronize()
        began = time.perf_counter()
        list(engine.train(state.server, [client], 0))
        torch.cuda.synchronize()
    steps = -(-len(client.indices) // BATCH)
    return (time.perf_counter() - began) / steps * round_steps(federation), f"{steps} steps, scaled"


def time_graph(name: str, federation: Federation, slots: int, precision: str) -> tuple[float, str]:
    method = make_method(name)
    engine = GraphEngine(method, federation, config_of(name, precision=precision), slots=slots)
    state = initial_state(engine)
    first = run_round(engine, state, 0)  # with the captures
    if engine.fallback:
        return float("nan"), engine.fallback
    second = run_round(engine, first.state, 1)
    engine.eager.config = engine.config = config_of(name, precision=precision, local_epochs=0)
    idle = run_round(engine, second.state, 2).seconds
    how = f"whole round, {idle:.2f} s of it outside of steps; first round {first.seconds:.1f} s with the captures"
    return second.seconds, how


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--programs", default="graph,eager,plain")
    words.add_argument("--methods", default="fedavg,fedavg+foogd")
    words.add_argument("--alphas", default="5.0,0.1")
    words.add_argument("--slots", default="8")
    words.add_argument("--precision", default="bf16")
    words.add_argument("--layers", default="fused", help="fused, plain or both, of the graph engine: BN, ReLU, dropout")
    words.add_argument("--clients", default="10")
    words.add_argument("--images", type=int, default=50_000)
    words.add_argument("--steps", type=int, default=60, help="steps of the plain loop that are timed")
    args = words.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a GPU, and torch finds none here")
    about = (torch.cuda.get_device_name(), f"torch {torch.__version__}", f"Python {sys.version.split()[0]}")
    print(", ".join((*about, f"commit {source_commit()}")))
    print(f"{args.images} images, WideResNet-40-2, batch {BATCH}, {EPOCHS} local epochs\n")
    print("| method | alpha | clients | program | s a round | steps | images/s | peak GiB | how |")
    print("| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | --- |")
    cases = itertools.product(args.programs.split(","), args.methods.split(","), args.alphas.split(","))
    for program, name, alpha in cases:
        for clients in map(int, args.clients.split(",")):
            federation = federation_of(float(alpha), clients, args.images)
            choices = [(slots, layers) for layers in args.layers.split(",") for slots in args.slots.split(",")]
            for slots, layers in choices if program == "graph" else [("", "fused")]:
                fused._kernels = KERNELS if layers == "fused" else lambda device: None  # type: ignore[assignment]
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                if program == "plain":
                    seconds, how = time_plain(name, federation, args.steps + 5)
                elif program == "eager":
                    seconds, how = time_eager(name, federation)
                else:
                    seconds, how = time_graph(name, federation, int(slots), args.precision)
                rate = round_steps(federation) * BATCH * make_method(name).views / seconds
                memory = torch.cuda.max_memory_allocated() / 2**30
                label = f"{program}, {slots} slots, {args.precision}, {layers} layers" if slots else program
                steps = round_steps(federation)
                numbers = (f"{seconds:.1f}", f"{steps:,}", f"{rate:,.0f}", f"{memory:.1f}")
                line = (name, str(alpha), str(clients), label, *numbers, how)
                print(f"| {' | '.join(line)} |", flush=True)


if __name__ == "__main__":
    main()
