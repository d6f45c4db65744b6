"""Seconds a round and memory of a run on Flower with three nodes on this machine: python benchmarks/flower_rounds.py

The model is tiny and each node has 40 images, so what is measured is Flower: processes, messages, polling. Memory is
the proportional share (PSS) of all processes that the run needs, the largest seen while a round runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from foogd.config import Config
from foogd.data.synthetic import tiny_federation
from foogd.flower.processes import free_port

FOOGD = str(Path(sys.executable).with_name("foogd"))
NODES = 3


def descendants(pid: int) -> list[int]:
    found, waiting = [pid], [pid]
    while waiting:
        for task in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                own = [int(word) for word in task.read_text().split()]
                found += own
                waiting += own
    return found


def memory(pids: list[int]) -> float:
    """MiB of these processes and of all below them."""
    total = 0
    for pid in {below for top in pids for below in descendants(top)}:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--method", default="fedavg+foogd")
    parser.add_argument("--backbone", default=Config.backbone)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        measure(Path(place), given)


def measure(place: Path, given: argparse.Namespace) -> None:
    federation = tiny_federation(clients=NODES, per_client=40)
    address = f"127.0.0.1:{free_port()}"
    make = [FOOGD, "flower", "init", "app", "--method", given.method]
    subprocess.run(make, cwd=place, check=True, capture_output=True)
    security = ("--address", address, "--insecure")
    commands = [("serve", *security)]
    for number, own in enumerate(federation.train_indices):
        folder = place / f"node-{number}"
        federation.train.select(own).save(folder / "train.npz")
        commands.append(("node", "--name", folder.name, "--data", str(folder), *security))
    processes = []
    try:
        for words in commands:
            log = (place / f"{len(processes)}.log").open("w")
            processes.append(subprocess.Popen([FOOGD, "flower", *words], cwd=place, stdout=log, stderr=log))
        settings = {"rounds": given.rounds, "backbone": given.backbone, "evaluate": "none", "batch_size": 16}
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        watch(place, processes, [FOOGD, "flower", "submit", "app", *security, *words], given.rounds)
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait()


def watch(place: Path, processes: list[subprocess.Popen[bytes]], command: list[str], rounds: int) -> None:
    largest: dict[int, float] = {}
    done = threading.Event()
    lines = place / "runs/flower/rounds.jsonl"

    def look() -> None:
        while not done.is_set():
            current = len(lines.read_text().splitlines()) + 1 if lines.is_file() else 1
            largest[current] = max(largest.get(current, 0.0), memory([process.pid for process in processes]))
            time.sleep(0.5)

    looking = threading.Thread(target=look)
    looking.start()
    began = time.monotonic()
    try:
        submitted = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    finally:
        done.set()
        looking.join()
    if submitted.returncode:
        sys.exit(submitted.stdout[-2000:] + submitted.stderr[-2000:])
    seconds = [json.loads(line)["seconds"] for line in lines.read_text().splitlines()]
    print(f"{rounds} rounds, {NODES} nodes, {os.cpu_count()} cores: {time.monotonic() - began:.0f} s in all")
    for number in (1, 2, rounds):
        print(f"round {number}: {seconds[number - 1]:.1f} s, at most {largest.get(number, 0.0):.0f} MiB")
    print(f"median of rounds 2 to {rounds}: {sorted(seconds[1:])[len(seconds[1:]) // 2]:.1f} s")


if __name__ == "__main__":
    main()
