"""The command line: `foogd run | evaluate | predict | demo | methods | detectors | data`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.markup import escape

from .. import __version__
from ..core.errors import InputError
from ..core.plugins import lacks_memory
from ..experiments.pool import Evaluating, train_all
from ..experiments.sweep import rate_note
from ..methods import method_names
from ..presets.loader import parse_assignments, read_preset, read_run_config, resolve
from ..runs.environment import environment
from ..runs.federation import skipped_sentence
from ..runs.files import CONFIG, read_rows, resume_command, write_atomic
from ..runs.reevaluate import check_tests, retest
from ..runs.run import Run
from ..runs.trackers import check_tracker
from ..tables.results import Report
from .catalogue import detectors, methods
from .common import SHOWN, Set, console, make_app, open_or_create, remark, say, whole_number
from .data import data_app, decode
from .flower import flower_app
from .predict import predict
from .progress import EvaluationProgress, cost, progress_bar, report_round, show, train
from .report import add_report_commands
from .settings import add_settings_command
from .sweep import add_study_commands

UsageError: Any = typer.BadParameter.__base__  # typer has no public name for it
DEMO_METHODS = ("fedavg", "fedavg+aug", "fedrod", "fedavg+foogd", "fedrod+foogd")

app = make_app("foogd", "Federated learning that keeps classifying shifted data and detects what nobody trained on.")
app.add_typer(data_app, name="data")
app.add_typer(flower_app, name="flower")
add_study_commands(app)
add_report_commands(app)
add_settings_command(app)
for command in (predict, methods, detectors):
    app.command()(command)


def show_version(asked: bool) -> None:
    """What a report of a fault should name."""
    if asked:
        about = environment(torch.device("cpu"))
        commit = f", commit {about['commit']}" if about["commit"] else ""
        say(f"foogd {__version__}, torch {about['versions']['torch']}, Python {about['python']}{commit}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the versions and exit.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Options of the command itself; its help stands where the app is made."""


@app.command()
def run(
    preset: Annotated[str, typer.Argument(help="Name of a preset, or a TOML file.")],
    method: Annotated[str | None, typer.Option(help="Method: a name, or file.py:Class.")] = None,
    data: Annotated[str | None, typer.Option(help="IN data: a name, or file.py:fn.")] = None,
    backbone: Annotated[str | None, typer.Option(help="Backbone: a name, or file.py:fn.")] = None,
    settings: Set = None,
    init: Annotated[str | None, typer.Option(metavar="RUN_DIR", help="Start from the weights of this run.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Run folder; default runs/METHOD-SEED.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    seed: Annotated[str | None, typer.Option(metavar="N", help="Seed of weights, partition and all draws.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out, if it exists.")] = False,
    seconds: Annotated[str, typer.Option(metavar="N", help="End with the round in which they are used up.")] = "0",
    tracker: Annotated[str, typer.Option(help="tensorboard, wandb or mlflow.")] = "",
) -> None:
    """Train one method and evaluate it. Example: foogd run demo --method fedavg+foogd --seed 1 --out runs/a"""
    check_tracker(tracker)
    limit = whole_number("--seconds", seconds, 0)
    named = {"method": method, "data": data, "backbone": backbone, "init": init, "device": device}
    overrides = parse_assignments([*(settings or []), *([] if seed is None else [f"seed={seed}"])])
    overrides |= {key: value for key, value in named.items() if value is not None}
    config, built = resolve(read_preset(preset), overrides)
    remark(rate_note(preset, overrides))
    folder = out or Path("runs") / f"{config.method.replace('/', '_')}-{config.seed}"
    note = "" if folder.exists() else decode(config)
    this = open_or_create(folder, config, built) if resume else Run.create(folder, config, built)
    remark(note)
    if config.on_bad == "skip" and this.federation.skipped:
        console.print(escape(skipped_sentence(this.federation.skipped)), highlight=False)
    with progress_bar() as progress:
        finished = train(this, progress, tracker, limit)
    if not finished:
        done = f"{limit} s are used up after round {this.finished_rounds()} of {config.rounds}"
        say(f"{done}; go on with: {resume_command(folder)}")
        return
    report = this.report(read_rows(folder))
    show(report)
    for sentence in (*this.leaked(), *this.left_out(), *this.unranked(report.rows)):
        say(sentence)
    console.print(f"Run folder: {escape(str(folder))}", highlight=False)


@app.command()
def evaluate(
    run_dir: Annotated[Path, typer.Argument(help="A run folder.")],
    detector: Annotated[list[str] | None, typer.Option(help="A name, or file.py:fn; may be repeated.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Other tests, as in out=svhn; needs --out; may be repeated."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Run folder for the other tests.")] = None,
) -> None:
    """Evaluate a trained run again, with other detectors too. Example: foogd evaluate runs/a --detector ash

    With --out the same model is tested on other images, in a run folder of its own: foogd evaluate runs/a --set
    'corruptions=["fog","snow"]' --out runs/a-weather
    """
    this = Run.open(run_dir, read_run_config)
    if out is not None or settings:
        retest_in(this, out, parse_assignments(settings or []), detector or [])
        return
    with progress_bar() as progress:
        rows = this.evaluate(detector or (), EvaluationProgress(progress, this))
    show(this.report(rows))
    for sentence in this.unranked(rows, detector or ()):
        say(sentence)
    if (done := this.finished_rounds()) < this.config.rounds:
        say(f"{run_dir} is not finished: these are the numbers of round {done} of {this.config.rounds}.")


def retest_in(this: Run, out: Path | None, changed: dict[str, Any], detectors: list[str]) -> None:
    """Test the model of a run on something else, in a folder of its own."""
    if out is None:
        raise InputError("--set needs --out: a run keeps its own tests, and others get a folder of their own")
    changed |= {"detectors": detectors} if detectors else {}
    if not changed:
        raise InputError("--out needs --set or --detector: say what the model is to be tested on, or by what")
    check_tests(changed)
    config, _ = resolve(read_preset(str(this.folder / CONFIG)), changed)
    other = retest(this, out, config)
    with progress_bar() as progress:
        train(other, progress)
    report = other.report(read_rows(out))
    show(report)
    for sentence in (*other.leaked(), *other.left_out(), *other.unranked(report.rows)):
        say(sentence)
    console.print(f"Run folder: {escape(str(out))}", highlight=False)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the runs; finished rounds are kept.")] = Path(
        "runs/demo"
    ),
    seeds: Annotated[str, typer.Option(metavar="N", help="Number of seeds, from 0.")] = "1",
    methods: Annotated[str, typer.Option(help="Methods, separated by commas; or all.")] = ",".join(DEMO_METHODS),
    preset: Annotated[str, typer.Option(help="Name of a preset, or a TOML file.")] = "demo",
    workers: Annotated[str, typer.Option(metavar="N", help="Runs side by side; 0: one a core.")] = "0",
    settings: Set = None,
) -> None:
    """Train the methods on the embedded data and print one table. Example: foogd demo --seeds 3 --out runs/demo"""
    began = time.perf_counter()
    count, side_by_side = whole_number("--seeds", seeds, 1), whole_number("--workers", workers, 0)
    names = method_names() if methods == "all" else [name.strip() for name in methods.split(",") if name.strip()]
    if not names:
        raise InputError(f"--methods {methods!r} names no method: use some of {', '.join(method_names())}")
    found = {}
    for number in range(count):
        for name in names:
            overrides = {**parse_assignments(settings or []), "method": name, "seed": number}
            found[out / f"{name.replace('/', '_')}-{number}"] = resolve(read_preset(preset), overrides)
    # All settings are read before the first folder is made.
    remark(rate_note(preset, parse_assignments(settings or [])))
    new = [config for folder, (config, _) in found.items() if not folder.exists()]
    note = decode(new[0]) if new else ""  # all runs have the same data
    runs = {folder: open_or_create(folder, *both) for folder, both in found.items()}
    remark(note)
    # The longest first, so that no core waits at the end.
    order = sorted((f for f in runs if not runs[f].is_finished()), key=lambda folder: -cost(runs[folder]))
    with progress_bar() as progress:
        left = sum((this.config.rounds - this.finished_rounds()) * cost(this) for this in runs.values())
        task = progress.add_task("all runs", total=left, left="")
        done = 0.0
        evaluations = {folder: EvaluationProgress(progress, runs[folder]) for folder in order}
        for event in train_all(order, read_run_config, side_by_side or os.cpu_count() or 1):
            this = runs[event.folder]
            if isinstance(event, Evaluating):
                evaluations[event.folder](event.images, event.total)
                continue
            done += cost(this)
            ahead = (time.perf_counter() - began) / done * (left - done)
            progress.update(task, completed=done, left=f"about {ahead:.0f} s left")
            report_round(this, event, f"about {ahead:.0f} s left for all")
    report = Report.of(row for folder, this in runs.items() for row in this.report(read_rows(folder)).rows)
    show(report.only(SHOWN))
    text = [f"# {preset}: {len(names)} methods, {count} seed(s)", ""]
    short = report.only(SHOWN)
    matrices = [report.matrix(name, metric) for name in report.out_sets() for metric in ("auroc", "fpr95")]
    for table in (short.headline(), *matrices, short.joint(), report.headline(), report.headline("pooled")):
        words = (0,) if table in matrices else (0, 1)
        text += [f"({table.title})", "", table.markdown(words), ""]
    write_atomic(out / "table.md", "\n".join(text).encode())
    seconds = time.perf_counter() - began
    path = escape(str(out / "table.md"))
    console.print(f"{len(runs)} runs in {seconds:.0f} s; the tables are in {path}", highlight=False)


STOPPED = 130


def main() -> None:
    """Entry point: bad input ends with one sentence and exit code 2."""
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="foogd", standalone_mode=False)
    except UsageError as error:
        # Some versions of typer and click have a hint each, one of them in the message already.
        text = error.message if "Did you mean" in error.message else error.format_message()
        about = " ".join(text.split())
        command = error.ctx.command_path if error.ctx else "foogd"
        fail(f"{about.rstrip('.')}; see {command} --help")
    except InputError as error:
        fail(str(error))
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        fail(f"{name}{error.strerror or error}")
    except (KeyboardInterrupt, typer.Abort):
        code = STOPPED
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        fail("there is not enough memory: make batch_size, eval_batch or the nets smaller; finished rounds are kept")
    if code == STOPPED:
        text = "stopped; finished rounds are kept: run goes on with --resume, demo and sweep with the same words again"
        print(f"foogd: {text}", file=sys.stderr)
        sys.exit(STOPPED)


def fail(sentence: str) -> NoReturn:
    print(f"foogd: {' '.join(sentence.split())}", file=sys.stderr)
    sys.exit(2)
