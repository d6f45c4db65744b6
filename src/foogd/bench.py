"""How fast training is on this machine: seconds a round of FedAvg and FedAvg+FOOGD, by engine, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

import torch

from .config import Config
from .data.federation import Federation
from .data.store import ImageStore
from .engine.eager import EagerEngine, Engine
from .engine.graph import GraphEngine
from .engine.rng import generator
from .methods import make_method
from .report import Table
from .simulate import initial_state, run_round

METHODS = ("fedavg", "fedavg+foogd")
COLUMNS = ("method", "engine", "s a round", "images/s", "peak GPU GiB", "first round s")


@final
@dataclass(frozen=True)
class Size:
    """What is trained in a benchmark."""

    backbone: str
    shape: tuple[int, int, int]
    images: int
    batch: int
    epochs: int
    clients: int = 10
    alpha: float = 5.0


CIFAR = Size("wrn40-2", (3, 32, 32), 50_000, 128, 5)
SMALL = Size("cnn", (1, 28, 28), 2_000, 64, 1)


def noise_federation(size: Size) -> Federation:
    """Images of random pixels split over clients: time does not depend on what they show."""
    channels, height, width = size.shape
    held_out = max(10, size.images // 50)
    count = size.images + held_out
    pixels = torch.randint(
        256, (count, height, width, channels), generator=generator(0, "benchmark"), dtype=torch.uint8
    )
    test = torch.arange(count) >= size.images
    store = ImageStore(pixels, torch.arange(count) % 10, classes=tuple("0123456789"), name="noise", test=test)
    return Federation.build(store, clients=size.clients, alpha=size.alpha, seed=21, min_size=2)


def config_of(size: Size, **changes: object) -> Config:
    """The run of a benchmark."""
    base = Config(
        backbone=size.backbone, rounds=100, local_epochs=size.epochs, batch_size=size.batch, lr=0.1, flip=True, crop=4
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def seconds_a_round(engine: Engine) -> tuple[float, float]:
    """Seconds of the first round, in which kernels are chosen and graphs recorded, and of the second."""
    first = run_round(engine, initial_state(engine), 0)
    return first.seconds, run_round(engine, first.state, 1).seconds


def steps_a_round(federation: Federation, size: Size) -> int:
    """Local steps of all clients in one round."""
    return size.epochs * sum(-(-len(own) // size.batch) for own in federation.train_indices)


def measure(device: str = "auto") -> Iterator[Table]:
    """The table after each line of it, so that one can be shown while the next is measured."""
    on_gpu = device != "cpu" and torch.cuda.is_available()
    size = CIFAR if on_gpu else SMALL
    federation = noise_federation(size)
    where = torch.cuda.get_device_name() if on_gpu else f"CPU, {Config.threads} thread"
    title = f"{where}: {size.clients} clients, {size.images:,} images, {size.backbone}, batch {size.batch}"
    lines: list[tuple[str, ...]] = []
    for kind in ("graph", "eager") if on_gpu else ("eager",):
        for name in METHODS:
            method = make_method(name, {"score_features": "train"} if "+" in name else {})
            # One epoch of the slow engine says as much as five.
            epochs = size.epochs if kind == "graph" or not on_gpu else 1
            config = config_of(size, device="cuda" if on_gpu else "cpu", local_epochs=epochs, engine=kind)
            engine = None  # the one before must not count
            if on_gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            engine = (GraphEngine if kind == "graph" else EagerEngine)(method, federation, config)
            first, second = seconds_a_round(engine)
            scale = size.epochs / epochs
            rate = steps_a_round(federation, size) * size.batch * method.views / (second * scale)
            memory = f"{torch.cuda.max_memory_allocated() / 2**30:.1f}" if on_gpu else "–"
            scaled = " (1 epoch, scaled)" if scale > 1 else ""
            lines.append((name, kind + scaled, f"{second * scale:.2f}", f"{rate:,.0f}", memory, f"{first:.1f}"))
            yield Table(title, COLUMNS, tuple(lines))
