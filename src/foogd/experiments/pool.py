"""Several runs at once: one process each, with results that do not depend on how many work side by side."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, final

import torch

from ..config import Config
from ..core.errors import InputError
from ..data.readers import Progress
from ..engine.eager import resolve_device
from ..methods.base import Method
from ..runs.run import Run
from ..runs.trackers import tracked

Read = Callable[[Path], tuple[Config, Method]]


@final
@dataclass(frozen=True)
class Job:
    """A run to train; `after` is a run that must be finished first, because this one starts from its weights."""

    folder: Path
    after: Path | None = None


@final
@dataclass(frozen=True)
class Started:
    """A run was given to a process."""

    folder: Path


@final
@dataclass(frozen=True)
class Progressed:
    """One finished round of one of the runs."""

    folder: Path
    round: int
    seconds: float
    losses: Mapping[str, float]
    refused: Mapping[int, str]


@final
@dataclass(frozen=True)
class Evaluating:
    """How far the evaluation of one of the runs is, in images."""

    folder: Path
    images: int
    total: int


@final
@dataclass(frozen=True)
class Finished:
    """A run has nothing left to do."""

    folder: Path


@final
@dataclass(frozen=True)
class Failed:
    """A run ended before its time: why, in one sentence, and where, as Python tells it."""

    folder: Path
    reason: str
    trace: str = ""
    error: Exception | None = None


Event = Started | Progressed | Evaluating | Finished | Failed
PAUSE = 0.5  # seconds between two words of an evaluation: more would only keep the listener busy
KILLED = "a worker process was killed: run the command again; it goes on from there"


def possible_workers(wanted: int, devices: Sequence[str]) -> int:
    """How many runs may work side by side: as many as wanted; 0 is one a core, or one alone where a GPU is used."""
    if wanted:
        return wanted
    # Runs that share a GPU only wait for each other: one run fills it with several clients at once.
    on_gpu = any(resolve_device(device).type == "cuda" for device in devices) and torch.cuda.is_available()
    return 1 if on_gpu else os.cpu_count() or 1


def train_all(folders: Sequence[Path], read: Read, workers: int) -> Iterator[Progressed | Evaluating]:
    """Train what is left of these runs, `workers` at a time; ends with the first failure.

    Yields after each round, and now and then during an evaluation.
    """
    for event in work([Job(folder) for folder in folders], read, workers):
        if isinstance(event, Failed):
            raise event.error if event.error is not None else RuntimeError(event.trace or event.reason)
        if isinstance(event, Progressed | Evaluating):
            yield event


def work(
    jobs: Sequence[Job],
    read: Read,
    workers: int,
    *,
    prepare: Callable[[Path], None] | None = None,
    tracker: str = "",
) -> Iterator[Event]:
    """Train these runs in this order, `workers` at a time, each after the one that it starts from.

    `prepare` is called with the folder of a run just before it starts. A run that fails, or whose process is killed,
    does not stop the others; those that would start from it fail too.
    """
    pending = list(jobs)
    crew: list[_Worker] = []
    failed: set[Path] = set()
    try:
        while pending or any(worker.folder for worker in crew):
            busy = [worker for worker in crew if worker.folder]
            unfinished = {job.folder for job in pending} | {worker.folder for worker in busy}
            ready = [job for job in pending if job.after is None or job.after not in unfinished]
            assert ready or busy, "runs wait for each other"
            for job in ready[: max(1, workers) - len(busy)]:
                pending.remove(job)
                problem = _begin(job, failed, prepare)
                if problem is not None:
                    failed.add(job.folder)
                    yield problem
                    continue
                for idle in [worker for worker in crew if worker.folder is None]:
                    if idle.give(job.folder):
                        break
                    crew.remove(idle)  # it died with nothing to do
                    idle.end()
                else:
                    crew.append(fresh := _Worker(read, tracker))
                    fresh.give(job.folder)  # one that is dead already is noticed when it is heard
                yield Started(job.folder)
            for worker in _talking(crew):
                event = worker.hear()
                if isinstance(event, Failed):
                    failed.add(event.folder)
                    # What broke this run may have broken its process: an error of a GPU stays until the process ends.
                    crew.remove(worker)
                    worker.end()
                yield event
    finally:
        for worker in crew:
            worker.end()


def _begin(job: Job, failed: set[Path], prepare: Callable[[Path], None] | None) -> Failed | None:
    if job.after in failed:
        return Failed(job.folder, f"it starts from {job.after}, which failed")
    try:
        if prepare is not None:
            prepare(job.folder)
    except Exception as error:  # whatever is wrong with this run, the others go on
        return _failure(job.folder, error)
    return None


def _failure(folder: Path, error: Exception) -> Failed:
    plain = isinstance(error, InputError) and error.__cause__ is None  # else it came up in a file of the user
    trace = "" if plain else "".join(traceback.format_exception(error))
    words = " ".join(str(error).split()) or type(error).__name__
    reason = words if isinstance(error, InputError) else f"{type(error).__name__}: {words}"
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an error of a user's class may not travel between processes
        return Failed(folder, reason, trace)
    return Failed(folder, reason, trace, error)


@final
class _Worker:
    """A process that trains one run after the other."""

    def __init__(self, read: Read, tracker: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, read, tracker), daemon=True)
        self._process.start()
        theirs.close()  # so that its end is noticed here
        self.folder: Path | None = None

    def give(self, folder: Path) -> bool:
        """Hand it a run; whether it was there to take it."""
        self.folder = folder
        try:
            self.pipe.send(folder)
        except OSError:
            return False
        return True

    def hear(self) -> Event:
        assert self.folder is not None
        try:
            event: Event = self.pipe.recv()
        except (EOFError, OSError):
            event = Failed(self.folder, KILLED, error=InputError(KILLED))
        if isinstance(event, Finished | Failed):
            self.folder = None
        return event

    def end(self) -> None:
        # Files are replaced as a whole, so a worker may end at any moment.
        self._process.terminate()
        self._process.join()
        self.pipe.close()


def _talking(crew: Sequence[_Worker]) -> list[_Worker]:
    """The workers that have something to say; waits for the first."""
    by_pipe: dict[Any, _Worker] = {worker.pipe: worker for worker in crew if worker.folder}
    return [by_pipe[pipe] for pipe in wait(list(by_pipe))] if by_pipe else []


def _serve(pipe: Connection, read: Read, tracker: str) -> None:
    # Python would print where it was.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    while True:
        try:
            folder: Path = pipe.recv()
        except EOFError:  # whoever gave the work is gone
            return
        try:
            for result in tracked(Run.open(folder, read), tracker, _teller(pipe, folder)):
                pipe.send(Progressed(folder, result.round, result.seconds, dict(result.losses), dict(result.refused)))
            pipe.send(Finished(folder))
        except Exception as error:
            pipe.send(_failure(folder, error))


def _teller(pipe: Connection, folder: Path) -> Progress:
    told = -PAUSE

    def tell(images: int, total: int) -> None:
        nonlocal told
        now = time.monotonic()
        if images >= total or now - told >= PAUSE:
            told = now
            pipe.send(Evaluating(folder, images, total))

    return tell
