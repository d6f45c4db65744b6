"""Several runs at once: one process each, with results that do not depend on how many work side by side."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import Config
from .errors import InputError
from .methods.base import Method
from .runs import Run

Read = Callable[[Path], tuple[Config, Method]]


@dataclass(frozen=True)
class Progressed:
    """One finished round of one of the runs."""

    folder: Path
    round: int
    seconds: float
    losses: Mapping[str, float]
    refused: Mapping[int, str]


def train_all(folders: Sequence[Path], read: Read, workers: int) -> Iterator[Progressed]:
    """Train what is left of these runs, `workers` at a time; yields after each round of any of them."""
    if not folders:
        return
    context = multiprocessing.get_context("spawn")
    with multiprocessing.Manager() as manager:
        events = manager.Queue()
        with ProcessPoolExecutor(max(1, workers), mp_context=context, initializer=_stop_at_once) as pool:
            waiting: set[Future[None]] = {pool.submit(_train, folder, read, events) for folder in folders}
            try:
                while waiting or not events.empty():
                    with contextlib.suppress(queue.Empty):
                        yield events.get(timeout=0.2)
                    for future in [future for future in waiting if future.done()]:
                        waiting.remove(future)
                        future.result()
            except BrokenProcessPool:
                raise InputError("a worker process was killed: run the command again; it goes on from there") from None
            finally:
                pool.shutdown(wait=True, cancel_futures=True)


def _stop_at_once() -> None:
    # Files are replaced as a whole, so a worker may end at any moment; Python would print where it was.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _train(folder: Path, read: Read, events: Any) -> None:
    for result in Run.open(folder, read).train():
        events.put(Progressed(folder, result.round, result.seconds, dict(result.losses), dict(result.refused)))
