"""The commands `foogd report` and `foogd figures`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..core.errors import InputError
from ..reports.collection import find_runs
from ..reports.grouping import collect
from ..reports.tsne import MAPS, lacking
from ..reports.writers import csv_report, latex_report, markdown_report
from ..runs.files import need_file, need_folder, write_atomic
from .common import say, whole_number

FORMATS = {".html": "html", ".htm": "html", ".md": "md", ".csv": "csv", ".tex": "latex"}
Places = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of them.")]
Maps = Annotated[
    str | None,
    typer.Option(metavar="N", help=f"Most maps of features (t-SNE), which need scikit-learn; 0: none; default {MAPS}."),
]


def add_report_commands(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(report)
    app.command()(figures)


def report(
    runs: Places,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write: .html, .md, .csv or .tex.")] = Path(
        "report.html"
    ),
    form: Annotated[
        str | None, typer.Option("--format", help="html, md, csv or latex; default: by the suffix.")
    ] = None,
    title: Annotated[str, typer.Option(help="Title of the page.")] = "",
    maps: Maps = None,
) -> None:
    """Results of runs side by side, as one page. Example: foogd report runs/demo --out report.html"""
    if form is not None and form not in FORMATS.values():
        raise InputError(f"--format {form!r} is not allowed: use {', '.join(dict.fromkeys(FORMATS.values()))}")
    chosen = form or FORMATS.get(out.suffix.lower())
    if chosen is None:
        raise InputError(f"--out {str(out)!r} does not say a format: end it in {', '.join(FORMATS)}, or give --format")
    most = most_maps(maps)
    need_file(out)
    collection = collect(find_runs(runs, say))
    if chosen == "html":
        from ..reports.html import html_report

        text = html_report(collection, title=title, maps=most, tell=say)
    else:
        text = {"md": markdown_report, "csv": csv_report, "latex": latex_report}[chosen](collection)
    data = text.encode()
    write_atomic(out, data)
    for note in collection.notes:
        say(note)
    count, size = len(collection.records), len(data) / 2**10
    amount = f"{size:.1f} KiB" if size < 2**10 else f"{size / 2**10:.1f} MiB"
    say(f"{count} run{'' if count == 1 else 's'} in {out} ({amount})")


def figures(
    runs: Places,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the figures.")] = Path("figures"),
    vector: Annotated[str, typer.Option(help="Vector format beside PNG: pdf or svg.")] = "pdf",
    maps: Maps = None,
) -> None:
    """Figures of runs in files, vector and PNG. Example: foogd figures runs/demo --out figures"""
    if vector not in ("pdf", "svg"):
        raise InputError(f"--vector {vector!r} is not allowed: use pdf or svg")
    most = most_maps(maps)
    need_folder(out)
    from ..reports.figures import all_figures, save_figure

    count = 0
    collection = collect(find_runs(runs, say))
    for name, figure in all_figures(collection, maps=most, tell=say):
        save_figure(out / name, figure, vector)
        count += 1
    for note in collection.notes:
        say(note)
    say(f"{count} figure{'' if count == 1 else 's'} in {out}, each as {vector.upper()} and PNG")


def most_maps(asked: str | None) -> int:
    """How many maps `--maps` allows; whoever asks for some is told at once where scikit-learn is not installed."""
    if asked is None:
        return MAPS
    most = whole_number("--maps", asked, 0)
    if most and (why := lacking()) is not None:
        raise InputError(f"--maps {most} is not possible: {why}")
    return most
