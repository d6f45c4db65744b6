"""What the framework itself costs: rounds without training, next to a bare loop that only copies and averages.

    python benchmarks/overhead.py [--rounds 15]

Time: seconds a round with 10 clients, WideResNet-40-2 plus score network, `local_epochs=0`. The space of the score,
which FOOGD measures on all images before each round, is not measured. The bare loop is what one writes by hand with
`state_dict`s, for each client: a clone of every value of the server's (download), a clone of every value of the
client's (upload), and `total[name] += weight * value` (average; integer counters from the first client). It has no
modules and no optimisers, checks nothing, draws nothing and keeps nothing. Both take turns in one process, and medians
are compared. Limit: 1.5 times the bare loop.

Memory: the peak of a fresh process that runs 2 such rounds with 200 clients, less that of one with 10 clients.
Limit: 300 MB.

Ends with exit code 1 where a limit is exceeded.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from foogd import FOOGD, Config, FedAvg, Federation, ImageStore, simulate
from foogd.engine.eager import EagerEngine
from foogd.methods.wrapper import Wrapper
from foogd.runs.environment import environment
from foogd.simulate import initial_state, run_round

CLIENTS, MANY = 10, 200
RATIO_LIMIT, MEMORY_LIMIT_MB = 1.5, 300.0
IMAGES = 8  # a client
CONFIG = Config(backbone="wrn40-2", local_epochs=0, rounds=2, device="cpu")


@final
@dataclass(frozen=True)
class Unmeasured(Wrapper):
    """A method without its pass over all images before a round."""

    @property
    def surveys(self) -> bool:
        return False

    @property
    def settles(self) -> bool:
        return False


METHOD = Unmeasured(FOOGD(FedAvg()))


def noise_federation(clients: int) -> Federation:
    """Colour images of 32 × 32 pixels of noise, a few a client; nothing is learnt from them."""
    stream = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (clients * IMAGES, 32, 32, 3), generator=stream, dtype=torch.uint8)
    store = ImageStore(images, torch.arange(len(images)) % 10, name="noise")
    mean, std = store.channel_moments()
    return Federation("noise", store, torch.split(torch.arange(len(images)), IMAGES), (), mean, std)


def bare_round(server: dict[str, Tensor], weights: list[float]) -> dict[str, Tensor]:
    """Copy to each client, copy back, average."""
    total: dict[str, Tensor] = {}
    for weight in weights:
        client = {name: value.clone() for name, value in server.items()}
        update = {name: value.clone() for name, value in client.items()}
        for name, value in update.items():
            if name not in total:
                total[name] = weight * value if value.is_floating_point() else value
            elif value.is_floating_point():
                total[name] += weight * value
    return total


def time_rounds(rounds: int, warm_up: int = 3) -> tuple[list[float], list[float], int]:
    """Seconds of the framework's rounds and of the bare loop's, in turns, and the number of values in the model."""
    engine = EagerEngine(METHOD, noise_federation(CLIENTS), CONFIG)
    state = initial_state(engine)
    start = state.server.shared
    server = dict(engine.nets().state_dict())
    weights = [1 / CLIENTS] * CLIENTS
    framework, bare = [], []
    for _ in range(warm_up + rounds):
        began = time.perf_counter()
        state = run_round(engine, state, state.server.round).state
        between = time.perf_counter()
        server = bare_round(server, weights)
        ended = time.perf_counter()
        framework.append(between - began)
        bare.append(ended - between)
    if not torch.equal(state.server.shared, start):
        raise SystemExit("rounds without training changed the model, so their time says nothing")
    return framework[warm_up:], bare[warm_up:], len(start)


def peak_mb(clients: int) -> float:
    """Peak memory of a fresh process with so many clients, in MB."""
    command = [sys.executable, str(Path(__file__).resolve()), "--peak-of", str(clients)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def print_peak(clients: int) -> None:
    """Run the rounds of one memory measurement in this process and print its peak in MB."""
    for _ in simulate(METHOD, noise_federation(clients), CONFIG):
        pass
    print(own_peak_mb())


def own_peak_mb() -> float:
    """Peak resident memory of this process in MB."""
    status = Path("/proc/self/status")
    if status.exists():
        # On Linux ru_maxrss starts with the peak of the process that started this one: it survives exec.
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 2**10
    unit = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, kilobytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def main() -> int:
    parser = argparse.ArgumentParser(description="What the framework itself costs; exit code 1 where it is too much.")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds of each kind (default 15)")
    parser.add_argument("--peak-of", type=int, metavar="CLIENTS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_of is not None:
        print_peak(arguments.peak_of)
        return 0

    framework, bare, size = time_rounds(arguments.rounds)
    ours, theirs = statistics.median(framework), statistics.median(bare)
    few, many = peak_mb(CLIENTS), peak_mb(MANY)
    limits = (
        ("time, framework / bare loop", ours / theirs, RATIO_LIMIT, ""),
        (f"peak memory, {MANY} less {CLIENTS} clients", many - few, MEMORY_LIMIT_MB, " MB"),
    )

    about = environment(torch.device(CONFIG.device))
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    print(f"commit {about['commit']}; Python {about['python']}, {versions}")
    print(f"{about['platform']}; {about['device']}, {about['cores']} cores, {torch.get_num_threads()} threads")
    print(f"{CLIENTS} clients, {CONFIG.backbone} and score network ({size:,} values), no training, {len(bare)} rounds")
    print()
    print(f"{'':36}{'median':>10}{'fastest':>10}{'slowest':>10}")
    for name, times in (("framework, s a round", framework), ("bare loop, s a round", bare)):
        print(f"{name:36}{statistics.median(times):10.4f}{min(times):10.4f}{max(times):10.4f}")
    print(f"{'peak memory, MB':36}{f'{CLIENTS} clients: {few:.0f}':>20}{f'{MANY} clients: {many:.0f}':>20}")
    print()
    for name, value, limit, unit in limits:
        print(f"{name:36}{value:10.2f}{unit}  (limit {limit:g}{unit})  {'PASS' if value <= limit else 'FAIL'}")
    return int(any(value > limit for _, value, limit, _ in limits))


if __name__ == "__main__":
    raise SystemExit(main())
