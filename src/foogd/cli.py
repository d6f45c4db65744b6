"""The command line: `foogd run | evaluate | predict | demo | methods | detectors | data`."""

from __future__ import annotations

import csv
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn, final

import torch
import typer
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table as RichTable

from . import __version__
from .cli_data import data_app, decode
from .cli_flower import flower_app
from .cli_parts import SHOWN, Set, console, make_app, open_or_create, remark, rich_table, say, whole_number
from .cli_report import add_report_commands
from .cli_settings import add_settings_command
from .cli_study import add_study_commands
from .data.federation import client_labels
from .data.readers import IMAGE_SUFFIXES, images_below
from .detect import DETECTORS, Detector
from .errors import InputError
from .flower.options import on_flower
from .methods import FOOGD, METHODS, AnchoredFOOGD, make_method, method_names, method_settings, shown_name
from .methods.base import Method
from .metrics import needed_for_tpr
from .model import as_images, load
from .plugins import lacks_memory
from .report import Report
from .retest import check_tests, retest
from .runs import CONFIG, Run, environment, read_rows, skipped_sentence, write_atomic
from .settings import PROFILE, parse_assignments, read_preset, read_run_config, resolve
from .simulate import RoundResult
from .study import Evaluating, Progressed, train_all
from .sweep import rate_note
from .trackers import check_tracker, tracked

UsageError: Any = typer.BadParameter.__base__  # typer has no public name for it
SILENCE = 20.0  # seconds after which an evaluation whose output is a file says how far it is
DEMO_METHODS = ("fedavg", "fedavg+aug", "fedrod", "fedavg+foogd", "fedrod+foogd")

app = make_app("foogd", "Federated learning that keeps classifying shifted data and detects what nobody trained on.")
app.add_typer(data_app, name="data")
app.add_typer(flower_app, name="flower")
add_study_commands(app)
add_report_commands(app)
add_settings_command(app)


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
    tracker: Annotated[str, typer.Option(help="tensorboard, wandb or mlflow.")] = "",
) -> None:
    """Train one method and evaluate it. Example: foogd run demo --method fedavg+foogd --seed 1 --out runs/a"""
    check_tracker(tracker)
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
        train(this, progress, tracker)
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


@app.command()
def predict(
    run_dir: Annotated[Path, typer.Argument(help="A finished run folder.")],
    files: Annotated[list[Path], typer.Argument(help="Images, or folders of images.")],
    client: Annotated[
        str | None, typer.Option(metavar="N", help="Answer as this client, or site by name; default: as nobody.")
    ] = None,
    detector: Annotated[str | None, typer.Option(help="The detector that decides; see foogd detectors.")] = None,
    tpr: Annotated[str, typer.Option(metavar="SHARE", help="Share of IN that the threshold accepts.")] = "0.95",
    on_bad: Annotated[str, typer.Option(help="What an image that cannot be read does: error or skip.")] = "error",
    form: Annotated[str, typer.Option("--format", help="table, json or csv.")] = "table",
) -> None:
    """Label, probability, score and verdict of images. Example: foogd predict runs/a image.png --format json"""
    if form not in ("table", "json", "csv"):
        raise InputError(f"--format {form!r} is not allowed: use table, json or csv")
    if on_bad not in ("error", "skip"):
        raise InputError(f"--on-bad {on_bad!r} is not allowed: use error or skip")
    accepted = share("--tpr", tpr)
    model = load(run_dir)
    chosen = None
    if client is not None:  # a site may be called by a number too: its name counts
        named = client in model.client_names or (model.client_names and not client.isdecimal())
        chosen = model.number_of(client) if named else whole_number("--client", client, 0)
    model.threshold(detector, client=chosen)  # what cannot be asked is found before images are read
    names, images = read_images(files, model.shape, skip=on_bad == "skip")
    found = model.predict(images, client=chosen, detector=detector, tpr=accepted)
    rows = [{"file": str(name), **row} for name, row in zip(names, found.rows(), strict=True)]
    labels = client_labels(model.client_names, model.clients)
    whose = "all clients" if found.calibrated_by is None else f"client {labels[found.calibrated_by]}"
    if form == "json":
        name = model.client_names[found.client] if found.client is not None and model.client_names else None
        about = {
            "run": str(run_dir),
            "client": found.client,
            "client_name": name,
            "detector": found.detector,
            "tpr": accepted,
            "calibrated": found.calibrated,
            "calibrated_by": found.calibrated_by,
            "images": rows,
        }
        print(json.dumps(about, indent=2))
    elif form == "csv":
        writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        rests = f"; the threshold rests on {found.calibrated} images of {whose}" if found.calibrated else ""
        grid = RichTable(title=f"{escape(found.detector)}, larger = more OUT{rests}", title_justify="left")
        for index, name in enumerate(("file", "label", "probability", "score", "threshold", "verdict")):
            grid.add_column(name, justify="left" if index < 2 else "right", overflow="fold")
        for row in rows:
            tau = "–" if row["threshold"] is None else f"{row['threshold']:.4g}"
            numbers = (f"{row['probability']:.3f}", f"{row['score']:.4g}", tau, row["verdict"] or "–")
            grid.add_row(escape(row["file"]), escape(row["label"]), *numbers)
        console.print(grid)
    if found.out is None:
        text = f"no verdict: {run_dir} set no images aside for a threshold; train with --set calibration=0.05"
        print(f"foogd: {text}", file=sys.stderr)
    elif found.calibrated < (needed := needed_for_tpr(accepted)):
        text = f"the threshold rests on {found.calibrated} images of {whose}: --tpr {tpr} needs at least {needed}"
        print(f"foogd: {text}; until then it is the largest score among them", file=sys.stderr)


def read_images(places: list[Path], shape: tuple[int, int, int], *, skip: bool) -> tuple[list[Path], torch.Tensor]:
    """The images of files and folders in a model's shape; with `skip` those that cannot be used are only named."""

    def attempt(read: Callable[[Path], Any], place: Path) -> Any:
        try:
            return read(place)
        except InputError as error:
            if not skip:
                raise
            print(f"foogd: {' '.join(str(error).split())}; it is left out", file=sys.stderr)
            return None

    names: list[Path] = []
    images: list[torch.Tensor] = []
    for place in places:
        for name in attempt(image_files, place) or ():
            pixels = attempt(partial(as_images, shape=shape), name)
            if pixels is not None:
                names.append(name)
                images.append(pixels)
    if not names:
        raise InputError("none of the images can be used: nothing is left to judge")
    return names, torch.cat(images)


def image_files(place: Path) -> list[Path]:
    """An image file itself, or all images below a folder that a run would train on."""
    if not place.is_dir():
        if not place.exists():
            raise InputError(f"{place} does not exist: give image files, or folders of them")
        return [place]
    found = images_below(place)
    if not found:
        raise InputError(f"{place} holds no images ({', '.join(sorted(IMAGE_SUFFIXES))})")
    return found


def share(option: str, text: str) -> float:
    """The share that an option gives."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise InputError(f"{option} {text!r} is not allowed: it must be a number above 0 and at most 1")
    return value


@app.command()
def methods(
    names: Annotated[bool, typer.Option("--names", help="Print the names alone, one a line.")] = False,
) -> None:
    """List the methods, what travels, and their settings. Example: foogd methods"""
    if names:
        print("\n".join(method_names()))
        return
    grid = RichTable("name", "what it adds", "what travels in a round", "on Flower", "source", box=None, pad_edge=False)
    for name, built in listed_methods().items():
        grid.add_row(name, summary_of(name, built), built.travels, on_flower(built), built.paper)
    console.print(grid)
    console.print("\nAny method takes +foogd, and one that has the setting views takes +aug.", highlight=False)
    console.print("+foogd is the paper's method; with --set profile=anchored it is a variant of ours.", highlight=False)
    owners: dict[str, type[Method]] = {**METHODS, "+foogd": FOOGD, "+foogd, profile=anchored": AnchoredFOOGD}
    for title, cls in owners.items():
        show_settings(f"{title} (--set key=value)", cls(), *([PROFILE] if cls is FOOGD else []))


def listed_methods() -> dict[str, Method]:
    """The methods by the names that people read; the anchored variant of FOOGD is one more."""
    ours = make_method("fedavg+foogd", {"profile": "anchored"})
    others = {name: make_method(name) for name in method_names()}
    return others | {shown_name(method_settings(ours), "fedavg+foogd"): ours}


def summary_of(name: str, built: Method) -> str:
    """One line about a method: the first of its class, and what a suffix makes of it."""
    name = name.partition(" ")[0]
    if name.endswith("+aug"):
        return f"{name.removesuffix('+aug')} that sees the augmented images too"
    text = first_line(type(built))
    return f"{name.removesuffix('+foogd')} with SM3D and SAG: {text[0].lower()}{text[1:]}" if "+" in name else text


def show_settings(title: str, owner: Method | Detector, *more: tuple[str, str, str]) -> None:
    """The settings of a method or a detector with their defaults, after `more`; nothing where it has none."""
    grid = RichTable("setting", "default", "meaning", box=None, pad_edge=False)
    for line in more:
        grid.add_row(*line)
    for item in fields(owner):  # type: ignore[arg-type]
        if item.metadata.get("help"):
            grid.add_row(item.name, str(getattr(owner, item.name)), item.metadata["help"])
    if grid.row_count:
        console.print(f"\nsettings of {title}", highlight=False)
        console.print(grid)


def sums_of(detector: Detector) -> str:
    """What a detector asks of the clients after training."""
    if not detector.passes:
        return "nothing"
    if detector.local:
        return "nothing: features stay on their client"
    return f"sums over features, {detector.passes} pass{'es' if detector.passes > 1 else ''}"


@app.command()
def detectors(
    names: Annotated[bool, typer.Option("--names", help="Print the names alone, one a line.")] = False,
) -> None:
    """List the detectors; a larger score always means more OUT. Example: foogd detectors"""
    if names:
        print("\n".join(DETECTORS))
        return
    grid = RichTable("name", "score", "what travels, once after training", "source", box=None, pad_edge=False)
    for name, detector in DETECTORS.items():
        grid.add_row(name, detector.description, sums_of(detector), detector.paper)
    console.print(grid)
    for name, detector in DETECTORS.items():
        show_settings(f"{name} (in Python: {type(detector).__name__}(...))", detector)


def first_line(cls: type) -> str:
    return (cls.__doc__ or "").strip().splitlines()[0]


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


def train(run: Run, progress: Progress, tracker: str = "") -> None:
    """Train what is left of a run, with progress and an estimate of the time left."""
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


if __name__ == "__main__":
    main()
