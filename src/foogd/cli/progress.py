"""How training and evaluation tell how far they are."""

from __future__ import annotations

import time
from typing import final

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from ..experiments.pool import Progressed
from ..runs.run import Run
from ..runs.trackers import tracked
from ..simulate import RoundResult
from ..tables.results import Report
from .common import console, rich_table

SILENCE = 20.0  # seconds after which an evaluation whose output is a file says how far it is


def progress_bar() -> Progress:
    """A live line with the time left on a terminal; nothing where the output is a file."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        console=console,
        disable=not console.is_terminal,
    )


def cost(run: Run) -> float:
    """About how much longer a round of this method takes than one of FedAvg, to order runs and guess the time left."""
    return run.method.effort


def train(run: Run, progress: Progress, tracker: str = "", seconds: int = 0) -> bool:
    """Train what is left of a run, with progress and an estimate of the time left; whether it is finished.

    After `seconds` it ends with the round that it is in; 0: it does not.
    """
    total = run.config.rounds
    task = progress.add_task(run.shown_name, total=total, completed=run.finished_rounds(), left="")
    began = time.perf_counter()
    rounds = tracked(run, tracker, EvaluationProgress(progress, run))
    for number, result in enumerate(rounds, start=1):
        ahead = (time.perf_counter() - began) / number * (total - result.round)
        progress.update(task, completed=result.round, left=f"about {ahead:.0f} s left")
        report_round(run, result, f"about {ahead:.0f} s left")
        if number == 1 and run.fallback is not None:
            console.print(f"  steps are not replayed as graphs: {escape(run.fallback)}", highlight=False)
        if seconds and time.perf_counter() - began >= seconds and result.round < total:
            rounds.close()
            return False
    return True


@final
class EvaluationProgress:
    """What an evaluation tells how far it is: a bar while it lasts, or, where the output is a file, some lines."""

    def __init__(self, progress: Progress, run: Run) -> None:
        self._progress, self._about = progress, f"{run.shown_name} seed {run.config.seed}"
        self._task: TaskID | None = None
        self._start, self._told = (0.0, 0), 0.0

    def __call__(self, images: int, total: int) -> None:
        now = time.perf_counter()
        if self._task is None:
            self._task = self._progress.add_task(f"{self._about}: images evaluated", total=total, left="")
            self._start = now, images  # how long the first ones took is not known
            self._told = now
        began, before = self._start
        left = f"about {(now - began) / (images - before) * (total - images):.0f} s left" if images > before else ""
        self._progress.update(self._task, completed=images, left=left)
        if not console.is_terminal and now - self._told >= SILENCE:
            self._told = now
            console.print(f"{self._about}: {images} of {total} images evaluated; {left}", highlight=False)
        if images >= total:
            self._progress.remove_task(self._task)
            self._task = None  # the next evaluation has a bar of its own


def report_round(run: Run, result: RoundResult | Progressed, left: str) -> None:
    """One line a round; refused updates below it."""
    losses = ", ".join(f"{group} {value:.3f}" for group, value in result.losses.items())
    text = f"{run.shown_name} seed {run.config.seed}: round {result.round}/{run.config.rounds}, "
    console.print(f"{text}{result.seconds:.1f} s, loss {losses}; {left}", highlight=False)
    for client, reason in result.refused.items():
        console.print(f"  the update of client {client} was refused: {escape(reason)}", highlight=False)


def show(report: Report) -> None:
    """The results on the screen."""
    console.print(rich_table(report.joint()))
    console.print(rich_table(report.headline()))
