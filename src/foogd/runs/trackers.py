"""Trackers: what a run reports while it trains, to TensorBoard, Weights & Biases or MLflow.

Everything a tracker gets also stands in the run folder. A tracker that fails is left behind with one line of warning,
and training goes on. Nothing leaves the machine unless the environment asks for it: W&B is offline unless WANDB_MODE
says otherwise, MLflow writes below the run folder unless MLFLOW_TRACKING_URI is set.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, final

from ..core.errors import InputError
from ..data.readers import Progress
from ..evaluation.rows import Row
from ..simulate import RoundResult
from .files import ROWS, read_rows
from .run import Run

Values = Mapping[str, float]


class Tracker(ABC):
    """Gets the numbers of each round; may fail at any time."""

    @abstractmethod
    def log(self, round: int, values: Values) -> None:
        """The numbers of one round by name."""

    @abstractmethod
    def close(self) -> None:
        """Nothing comes any more."""


@final
class TensorBoard(Tracker):
    """Event files in RUN/tensorboard; see them with `tensorboard --logdir runs`."""

    def __init__(self, run: Run) -> None:
        module = importlib.import_module("torch.utils.tensorboard")
        # Rounds that a killed run did not finish are drawn again.
        self._writer: Any = module.SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.finished_rounds() + 1)
        lines = "\n".join(f"    {key} = {value}" for key, value in run.settings().items())
        self._writer.add_text("settings", lines, run.finished_rounds() + 1)

    def log(self, round: int, values: Values) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


@final
class WandB(Tracker):
    """A run of Weights & Biases with its files in RUN/wandb; offline unless WANDB_MODE says otherwise."""

    def __init__(self, run: Run) -> None:
        module = importlib.import_module("wandb")
        self._run: Any = module.init(
            project=os.environ.get("WANDB_PROJECT", "foogd"),
            name=run.folder.name,
            id=run.name.replace("+", "-"),
            config=run.settings(),
            dir=str(run.folder),
            mode=os.environ.get("WANDB_MODE", "offline"),
            resume="allow",
            reinit="finish_previous",  # a process of a sweep trains several runs
        )

    def log(self, round: int, values: Values) -> None:
        self._run.log(dict(values), step=round)

    def close(self) -> None:
        self._run.finish()


@final
class MLflow(Tracker):
    """A run of MLflow with its files in RUN/mlruns, or where MLFLOW_TRACKING_URI points."""

    def __init__(self, run: Run) -> None:
        module = importlib.import_module("mlflow.tracking")
        place = os.environ.get("MLFLOW_TRACKING_URI")
        if place is None:
            place = (run.folder.absolute() / "mlruns").as_uri()
            # Its newer versions ask for a data base unless told that files are meant.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client: Any = module.MlflowClient(tracking_uri=place)
        experiment = self._client.get_experiment_by_name("foogd")
        number = experiment.experiment_id if experiment else self._client.create_experiment("foogd")
        known = run.folder / "mlflow-run.txt"
        if known.is_file():
            self._id = known.read_text(encoding="utf-8").strip()
        else:
            self._id = self._client.create_run(number, run_name=run.folder.name).info.run_id
            for key, value in run.settings().items():
                self._client.log_param(self._id, key, str(value)[:500])
            known.write_text(f"{self._id}\n", encoding="utf-8")

    def log(self, round: int, values: Values) -> None:
        for name, value in values.items():
            self._client.log_metric(self._id, allowed_name(name), value, step=round)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def allowed_name(name: str) -> str:
    """The name with only letters that MLflow takes."""
    return "".join(letter if letter.isalnum() or letter in "_-./ " else "_" for letter in name)


TRACKERS: dict[str, tuple[str, Callable[[Run], Tracker]]] = {
    "tensorboard": ("tensorboard", TensorBoard),
    "wandb": ("wandb", WandB),
    "mlflow": ("mlflow", MLflow),
}
"""Trackers by name, with the package that each needs."""


def check_tracker(name: str) -> None:
    """Complain about a tracker that is not known, or whose package is not installed; "" is none."""
    if name and name not in TRACKERS:
        raise InputError(f"--tracker {name!r} is not known: use {', '.join(TRACKERS)}")
    if name and importlib.util.find_spec(TRACKERS[name][0]) is None:
        raise InputError(f'--tracker {name} needs the package {TRACKERS[name][0]}: pip install "foogd[{name}]"')


def tracked(run: Run, name: str, progress: Progress | None = None) -> Generator[RoundResult, None, None]:
    """Train what is left of a run, reporting each round to the tracker of this name; "" is none."""
    if not name or run.is_finished():
        yield from run.train(progress)
        return
    watcher = _Watcher(run, name)
    try:
        for result in run.train(progress):
            watcher.report(result)
            yield result
    finally:
        watcher.close()


@final
class _Watcher:
    """Feeds a tracker, and lets go of it at its first failure."""

    def __init__(self, run: Run, name: str) -> None:
        self._folder, self._name = run.folder, name
        self._tracker: Tracker | None = None
        self._stamp = 0
        self._try(lambda: self._start(run))

    def _start(self, run: Run) -> None:
        self._tracker = TRACKERS[self._name][1](run)

    def report(self, result: RoundResult) -> None:
        """The numbers of a round, and those of an evaluation where there was one."""
        if self._tracker is not None:
            tracker = self._tracker
            self._try(lambda: tracker.log(result.round, {**round_values(result), **self._evaluated(result.round)}))

    def _evaluated(self, round: int) -> dict[str, float]:
        path = self._folder / ROWS
        stamp = path.stat().st_mtime_ns if path.is_file() else 0
        if stamp == self._stamp:
            return {}
        self._stamp = stamp
        return row_values(row for row in read_rows(self._folder) if row.round == round)

    def close(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            self._try(tracker.close)

    def _try(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:  # whatever a tracker does, training goes on
            tracker, self._tracker = self._tracker, None
            words = " ".join(f"{type(error).__name__}: {error}".split())
            text = f"foogd: warning: {self._name} failed and is left out of {self._folder}: {words[:300]}"
            print(text, file=sys.stderr, flush=True)
            if tracker is not None:
                with contextlib.suppress(Exception):  # one warning is enough
                    tracker.close()


def round_values(result: RoundResult) -> dict[str, float]:
    """What a round reports: losses, seconds, bytes, refused updates, drift."""
    values = {f"loss/{group}": value for group, value in result.losses.items()}
    values |= {f"drift/{group}": value for group, value in result.drift.items()}
    values |= {"round/seconds": result.seconds, "round/refused": float(len(result.refused))}
    return values | {"round/bytes_up": float(result.bytes_up), "round/bytes_down": float(result.bytes_down)}


def row_values(rows: Iterator[Row]) -> dict[str, float]:
    """What an evaluation reports: every metric weighted over clients, of IN-C the mean over kinds and severities."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.scope == "weighted":
            about = row.dataset if row.split == "out" else row.split
            parts = (row.metric, about, *((row.detector,) if row.detector else ()))
            found.setdefault("/".join(parts), []).append(row.value)
    return {name: sum(values) / len(values) for name, values in found.items()}
