"""The commands about several runs: `foogd sweep | compare`."""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, final

import typer
from rich.live import Live
from rich.markup import escape
from rich.table import Table as RichTable

from ..config import Config
from ..core.errors import InputError
from ..experiments.pool import Evaluating, Event, Failed, Job, Progressed, Started, possible_workers, work
from ..experiments.scales import FAILURES, RUNS, SCALES, TABLE, Plan, training_time, with_data
from ..experiments.sweep import plan, rate_note, read_sweep, sweep_names
from ..experiments.sweep_tables import shortened, sweep_reports, sweep_tables, tables_text
from ..methods.base import Method
from ..presets.loader import parse_assignments, read_run_config
from ..reports.compare import compare_runs
from ..runs.checks import check_together
from ..runs.files import need_file, need_folder, write_atomic
from ..runs.run import Run
from ..runs.trackers import check_tracker
from .common import SHOWN, Set, console, open_or_create, remark, rich_table, say, whole_number
from .data import decode

SECONDS = 10.0  # between two lines about rounds where the output is a file


def add_study_commands(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.command()(sweep)
    app.command()(compare)


def sweep(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A sweep of the package, or a TOML file.")] = None,
    scale: Annotated[str, typer.Option(help="tiny: a minute; small: on a processor; full: as it stands.")] = "full",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Its folder; default runs/NAME, or runs/NAME-SCALE at a scale.")
    ] = None,
    workers: Annotated[str, typer.Option(metavar="N", help="Runs side by side; 0: one a core, one on a GPU.")] = "0",
    tracker: Annotated[str, typer.Option(help="tensorboard, wandb or mlflow.")] = "",
    settings: Set = None,
    listed: Annotated[bool, typer.Option("--list", help="List the sweeps of the package.")] = False,
    planned: Annotated[bool, typer.Option("--plan", help="Only print the runs.")] = False,
) -> None:
    """Train many runs and make their tables; the same words go on. Example: foogd sweep cifar10 --scale tiny"""
    if listed:
        show_sweeps()
        return
    if name is None:
        raise InputError("name a sweep: foogd sweep --list shows them, or give a TOML file")
    title = Path(name).stem if name.endswith(".toml") else name
    beside = Path(name).parent if name.endswith(".toml") else None
    content, overrides = read_sweep(name), parse_assignments(settings or [])
    this = plan(title, content, scale, overrides, beside=beside)
    folder = out or Path("runs") / (this.name if scale == "full" else f"{this.name}-{scale}")
    side_by_side = whole_number("--workers", workers, 0)
    check_tracker(tracker)
    need_folder(folder)
    # Whatever is wrong with a setting is said before anything is made. Runs name each other, their data and plug-ins by
    # full paths, so that the same sweep is found again from anywhere.
    place = folder.resolve()
    found = resolve_all(this, place)
    named = {**content.get("set", {}), **overrides}
    remark(*(rate_note(content["base"], {**named, **point.settings}) for point in this.points))
    if planned:
        for point in this.points:
            say(f"{point.name}" + (f", after {point.start}" if point.start else ""))
        if (guess := training_time(this)) is not None:
            say(f"About {duration(guess[0])} of training on {guess[1]}; tests are not counted (docs/paper.md).")
        return
    for point in this.points:
        with this.naming(point):
            Run(place / RUNS / point.name, *found[place / RUNS / point.name])
    configs = [config for config, _ in found.values()]
    if SCALES[scale].train and not (place / RUNS).exists():
        with tempfile.TemporaryDirectory() as trial:
            try_out(this, Path(trial), configs)
    this = with_data(this, place, configs)
    found = resolve_all(this, place)
    notes = [
        decode(config) for config in {(c.data, c.sites, c.out, c.data_root): c for c, _ in found.values()}.values()
    ]
    check_runs(this, found)
    remark(*notes)
    for sentence in this.warnings:
        console.print(escape(sentence), style="bold red", highlight=False)
    failures = train_sweep(this, folder, found, side_by_side, tracker)
    finish(this, folder, failures)
    if failures:
        sys.exit(1)


def resolve_all(this: Plan, place: Path) -> dict[Path, tuple[Config, Method]]:
    """Configuration and method of each run, by its folder."""
    return {place / RUNS / point.name: this.resolved(point, place) for point in this.points}


def try_out(this: Plan, trial: Path, configs: Sequence[Config]) -> None:
    """Check the runs with the data of their scale in a folder that does not stay."""
    tried = with_data(this, trial, configs)
    # What is decoded from samples would be kept below the folder of the real data.
    found = {
        place: (replace(config, data_root=str(trial)), method)
        for place, (config, method) in resolve_all(tried, trial).items()
    }
    check_runs(tried, found)


def check_runs(this: Plan, found: Mapping[Path, tuple[Config, Method]]) -> None:
    """Find what is wrong with data, clients and nets of the runs that are not there yet."""
    runs = []
    for point, (place, (config, method)) in zip(this.points, found.items(), strict=True):
        if not place.exists():
            # The run that this one starts from is yet to be trained.
            runs.append(Run(place, config if point.start is None else replace(config, init=""), method))
    try:
        check_together(runs)
    except InputError as error:
        raise InputError(f"sweep {this.name}, {error}") from None


def compare(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="A finished run folder.")],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="Another one, tested on the same images.")],
    detector: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|A:B", help="A name or file.py:fn, or one for each run; may be repeated."),
    ] = None,
    scope: Annotated[str, typer.Option(help="weighted over clients, or pooled.")] = "weighted",
    resamples: Annotated[str, typer.Option(metavar="N", help="Resamples of the test images.")] = "1000",
    seed: Annotated[str, typer.Option(metavar="N", help="Seed of the resamples.")] = "0",
    out: Annotated[Path | None, typer.Option(metavar="FILE.md", help="Write the tables to this file too.")] = None,
) -> None:
    """What differs between two runs, image by image. Example: foogd compare runs/a runs/b --detector msp:score_norm"""
    if out is not None:
        need_file(out)
        if out.suffix not in (".md", ".txt"):
            raise InputError(f"--out {str(out)!r} is not possible: the tables are Markdown, so use .md or .txt")
    found = compare_runs(
        run_a,
        run_b,
        detectors=detector,
        scope=scope,
        resamples=whole_number("--resamples", resamples, 10),
        seed=whole_number("--seed", seed, 0),
        tell=say,
    )
    sides = tuple(f"{run}, {name}" for run, name in zip((run_a, run_b), found.names, strict=True))
    say(f"A: {sides[0]}\nB: {sides[1]}")
    tables = [found.settings_table(), found.results_table()]
    for table in tables:
        console.print(rich_table(table, words=3, ruled=table is tables[1]))
    for note in found.notes:
        say(f"Note: {note}.")
    if out is not None:
        text = [f"# {run_a} (A) and {run_b} (B)", "", f"A: {sides[0]}\n", f"B: {sides[1]}\n"]
        text += [f"Note: {note}.\n" for note in found.notes]
        for table in tables:
            text += [f"({table.title})", "", table.markdown((0, 1, 2)), ""]
        write_atomic(out, "\n".join(text).encode())
        say(f"Tables: {out}")


def show_sweeps() -> None:
    """The sweeps of the package in the order of the paper, with what each repeats there and how many runs it has."""

    def place(name: str) -> tuple[bool, bool, int]:
        paper = str(found[name].get("paper", ""))
        return not paper, not paper.startswith("Table"), int("".join(re.findall(r"\d+", paper)[:1]) or 0)

    grid = RichTable("in the paper", "name", "runs", "what it is", box=None, pad_edge=False)
    found = {name: read_sweep(name) for name in sweep_names()}
    for name in sorted(found, key=place):
        content = found[name]
        words = (content.get("paper", "–"), name, str(len(plan(name, content).points)), content.get("about", ""))
        grid.add_row(*map(escape, words))
    console.print(grid, highlight=False)
    say("\nTry one in about a minute: foogd sweep NAME --scale tiny")


def train_sweep(
    this: Plan, folder: Path, found: Mapping[Path, tuple[Config, Method]], workers: int, tracker: str
) -> dict[str, str]:
    """Train what is left; the runs that failed, with the reason."""
    left, failures = [], {}
    runs = folder.resolve() / RUNS
    for point in this.points:
        place = runs / point.name
        try:
            run = Run.open(place, read_run_config) if place.exists() else None
            done = run is not None and run.is_finished()
        except InputError as error:  # one damaged folder does not stop the others
            failures[point.name] = str(error)
            continue
        if run is not None:
            run.same_as(*found[place])  # else another sweep was asked for: the runs and tables here stay as they are
        if not done:
            left.append(Job(place, None if point.start is None else runs / point.start))
    while True:  # also what starts from one that starts from a failed one, in whatever order they are listed
        lost = {job.folder.name: job.after.name for job in left if job.after is not None and job.after.name in failures}
        if not lost:
            break
        failures |= {name: f"it starts from {start}, which failed" for name, start in lost.items()}
        left = [job for job in left if job.folder.name not in lost]
    # Runs that others wait for go first, then the longest, so that no core waits at the end.
    awaited = {job.after for job in left}
    left.sort(key=lambda job: (job.folder not in awaited, -found[job.folder][1].effort))
    if not left:
        if not failures:
            (folder / FAILURES).unlink(missing_ok=True)
        return failures

    def prepare(place: Path) -> None:
        open_or_create(place, *found[place])

    count = possible_workers(workers, [config.device for config, _ in found.values()])
    say(f"{len(left)} of {len(found)} runs are left, {count} side by side, in {folder}")
    traces = {}
    with Screen({job.folder: found[job.folder] for job in left}) as screen:
        for event in work(left, read_run_config, count, prepare=prepare, tracker=tracker):
            screen.update(event)
            if isinstance(event, Failed):
                failures[event.folder.name] = event.reason
                traces[event.folder.name] = event.trace or event.reason
    if traces:
        text = "\n\n".join(f"{name}\n{trace}" for name, trace in traces.items())
        write_atomic(folder / FAILURES, text.encode())
    elif not failures:
        (folder / FAILURES).unlink(missing_ok=True)
    return failures


def finish(this: Plan, folder: Path, failures: Mapping[str, str]) -> None:
    """The tables, on the screen and in a file, and what comes next."""
    reports = sweep_reports(this, folder, failures)
    write_atomic(folder / TABLE, tables_text(this, sweep_tables(reports), failures).encode())
    short = shortened(this, reports, SHOWN)
    console.print(escape(this.title), style="bold", highlight=False, soft_wrap=True)
    for table in sweep_tables(short):
        console.print(rich_table(table))
    for sentence in this.warnings:
        console.print(escape(sentence), style="bold red", highlight=False)
    for name, reason in failures.items():
        console.print(escape(f"failed: {name}: {reason}"), style="red", highlight=False, soft_wrap=True)
    if failures:
        say(f"{len(failures)} of {len(this.points)} runs failed; the same words try them again.")
    say(f"Tables{'' if short == reports else ' of all detectors'}: {folder / TABLE}")
    say(f"Report: foogd report {folder / RUNS}/* --out {folder / 'report.html'}")


@final
class Screen:
    """A live table with the time left on a terminal; elsewhere a line when a run ends, and now and then one between."""

    def __init__(self, runs: Mapping[Path, tuple[Config, Method]]) -> None:
        self._runs = runs
        # A round of a method costs about its effort; what an earlier call has finished is not work of this one.
        self._cost = {place: config.rounds * method.effort for place, (config, method) in runs.items()}
        self._done: dict[Path, float] = dict.fromkeys(runs, 0.0)
        self._at: dict[Path, Progressed | None] = {}
        self._looked: dict[Path, Evaluating] = {}
        self._ended = self._failed = 0
        self._began = self._said = time.monotonic()
        self._live = Live(console=console, refresh_per_second=2, transient=True, get_renderable=self.table)

    def __enter__(self) -> Screen:
        for place, (config, method) in self._runs.items():
            if place.exists():
                done = Run(place, config, method).finished_rounds()
                self._cost[place] = (config.rounds - done) * method.effort
        if console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if console.is_terminal:
            self._live.stop()

    def update(self, event: Event) -> None:
        """Take note of an event, and say what is worth a line."""
        place = event.folder
        config, method = self._runs[place]
        if isinstance(event, Started):
            self._at[place] = None
        elif isinstance(event, Evaluating):
            self._looked[place] = event
            if not console.is_terminal and time.monotonic() - self._said > SECONDS:
                self._line(f"{place.name}: {event.images} of {event.total} images evaluated")
        elif isinstance(event, Progressed):
            self._looked.pop(place, None)
            self._at[place] = event
            self._done[place] += method.effort
            for client, reason in event.refused.items():
                say(f"  {place.name}: the update of client {client} was refused: {reason}")
            if not console.is_terminal and time.monotonic() - self._said > SECONDS:
                self._line(f"{place.name}: round {event.round}/{config.rounds}, {event.seconds:.1f} s")
        else:
            self._at.pop(place, None)
            self._looked.pop(place, None)
            self._done[place] = self._cost[place]
            self._ended += 1
            self._failed += isinstance(event, Failed)
            ending = f"FAILED: {event.reason}" if isinstance(event, Failed) else "finished"
            self._line(f"{place.name}: {ending}")

    def _line(self, text: str) -> None:
        self._said = time.monotonic()
        say(f"[{self._ended}/{len(self._runs)}] {text}; {self._left()}")

    def _left(self) -> str:
        done, whole = sum(self._done.values()), sum(self._cost.values())
        if not done:
            return "time left not known yet"
        ahead = (time.monotonic() - self._began) / done * (whole - done)
        return f"about {duration(ahead)} left"

    def table(self) -> RichTable:
        """The runs at work."""
        failed = f", {self._failed} failed" if self._failed else ""
        title = f"{self._ended} of {len(self._runs)} runs ended{failed}; {self._left()}"
        grid = RichTable("run", "round", "s a round", "loss", "evaluation", title=title, title_justify="left")
        for place, last in self._at.items():
            rounds = self._runs[place][0].rounds
            seen = self._looked.get(place)
            evaluated = f"{seen.images / seen.total:.0%}" if seen else "–"
            if last is None:
                grid.add_row(escape(place.name), f"–/{rounds}", "–", "–", evaluated)
            else:
                losses = escape(", ".join(f"{group} {value:.3f}" for group, value in last.losses.items()))
                grid.add_row(escape(place.name), f"{last.round}/{rounds}", f"{last.seconds:.1f}", losses, evaluated)
        return grid


def duration(seconds: float) -> str:
    """A time that people read at a glance."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
