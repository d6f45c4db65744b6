"""What the framework itself costs: rounds without training, next to a bare loop that only copies and averages.

    python benchmarks/overhead.py [--rounds 15]

Time: seconds a round with 10 clients, WideResNet-40-2 plus score network, `FOOGD(FedAvg())`, `local_epochs=0`. The bare
loop is what one writes by hand with `state_dict`s, for each client: `client.load_state_dict(server)` (download),
`{name: value.clone()}` of the client's `state_dict` (upload), and `total[name] += weight * value` (average; integer
counters from the first client). It uses one client module for all, checks nothing, draws nothing and keeps no state of
clients. Both take turns in one process, and medians are compared. Limit: 1.5 times the bare loop.

Memory: the peak of a fresh process that runs 2 such rounds with 200 clients, less that of one with 10 clients.
Limit: 300 MB.

Ends with exit code 1 where a limit is exceeded.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from foogd import FOOGD, Config, FedAvg, Federation, ImageStore, simulate
from foogd.engine.eager import EagerEngine
from foogd.runs import environment
from foogd.simulate import initial_state, run_round

CLIENTS, MANY = 10, 200
RATIO_LIMIT, MEMORY_LIMIT_MB = 1.5, 300.0
IMAGES = 8  # a client
CONFIG = Config(backbone="wrn40-2", local_epochs=0, rounds=2, device="cpu")


def noise_federation(clients: int) -> Federation:
    """Colour images of 32 × 32 pixels of noise, a few a client; nothing is learnt from them."""
    stream = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (clients * IMAGES, 32, 32, 3), generator=stream, dtype=torch.uint8)
    store = ImageStore(images, torch.arange(len(images)) % 10, name="noise")
    mean, std = store.channel_moments()
    return Federation("noise", store, torch.arange(len(images)).split(IMAGES), (), mean, std)


def bare_round(server: dict[str, Tensor], client: nn.Module, weights: list[float]) -> dict[str, Tensor]:
    """Copy to each client, copy back, average."""
    total: dict[str, Tensor] = {}
    for weight in weights:
        client.load_state_dict(server)
        update = {name: value.clone() for name, value in client.state_dict().items()}
        for name, value in update.items():
            if name not in total:
                total[name] = value * weight if value.is_floating_point() else value
            elif value.is_floating_point():
                total[name] += weight * value
    return total


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def time_rounds(rounds: int, warm_up: int = 3) -> tuple[list[float], list[float], int]:
    """Seconds of the framework's rounds and of the bare loop's, in turns, and the number of values in the model."""
    engine = EagerEngine(FOOGD(FedAvg()), noise_federation(CLIENTS), CONFIG)
    state = initial_state(engine)
    client = engine.nets()
    server = {name: value.clone() for name, value in client.state_dict().items()}
    weights = [1 / CLIENTS] * CLIENTS

    def framework() -> None:
        nonlocal state
        result = run_round(engine, state, state.server.round)
        if result.refused or not torch.equal(result.state.server.shared, state.server.shared):
            raise SystemExit("a round without training changed the model: the benchmark is void")
        state = result.state

    def bare() -> None:
        nonlocal server
        server = bare_round(server, client, weights)

    times: tuple[list[float], list[float]] = ([], [])
    for number in range(warm_up + rounds):
        # The comparison above is no part of a round, so the framework's own clock is not used but the check is timed
        # on its own and taken off.
        for work, kept in zip((framework, bare), times, strict=True):
            taken = seconds(work)
            if number >= warm_up:
                kept.append(taken)
    return *times, engine.layout.shared_size


def peak_mb(clients: int) -> float:
    """Peak memory of a fresh process with so many clients, in MB."""
    command = [sys.executable, str(Path(__file__).resolve()), "--peak-of", str(clients)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
