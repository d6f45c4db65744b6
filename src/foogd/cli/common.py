"""What several commands share: the screen, options, tables, and how a run folder is opened."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable
from typer.core import TyperGroup

from ..config import Config
from ..core.errors import InputError
from ..methods import OURS
from ..methods.base import Method
from ..presets.loader import read_run_config
from ..runs.run import Run
from ..tables.grid import Table

# Detectors on the screen where many methods stand side by side.
SHOWN = ("msp", "energy", "span_own", "score_norm", "score_span")

# Commands in the order in which a user needs them; they are registered file by file.
ORDER = (
    "run", "evaluate", "predict", "report", "compare", "figures", "demo", "sweep", "methods", "detectors",
    "settings", "data", "flower",
)  # fmt: skip

console = Console(width=None if sys.stdout.isatty() else 140)  # a file has no width of its own

Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting; may be repeated.")
]


@final
class PlainGroup(TyperGroup):
    """Commands whose help is plain text: some versions of typer put a backslash before each bracket, meant for rich."""

    def list_commands(self, ctx: Any) -> list[str]:
        found = super().list_commands(ctx)
        return sorted(found, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))

    def get_command(self, ctx: Any, name: str) -> Any:
        found = super().get_command(ctx, name)
        if found is not None:
            written = type(found).get_help
            found.get_help = lambda ctx: written(found, ctx).replace("\\[", "[")  # type: ignore[method-assign]
        return found


def make_app(name: str, text: str, **more: Any) -> typer.Typer:
    """A group of commands; `text` is its help."""
    return typer.Typer(
        name=name,
        cls=PlainGroup,
        help=text,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        **more,
    )


def say(text: str) -> None:
    """A line of text as it is."""
    console.print(escape(text), highlight=False, soft_wrap=True)


def remark(*notes: str) -> None:
    """Sentences that a run goes on after, each once, where no table or pipe swallows them."""
    for note in dict.fromkeys(filter(None, notes)):
        print(f"foogd: {note}", file=sys.stderr)


def whole_number(option: str, text: str, least: int) -> int:
    """The number that an option gives; typer's own message would not say what was found."""
    if not (text.isdecimal() and text.isascii()) or int(text) < least:
        raise InputError(f"{option} {text!r} is not allowed: it must be a whole number at least {least}")
    return int(text)


def open_or_create(folder: Path, config: Config, method: Method) -> Run:
    """The run in this folder, which must have this configuration, or a new one; a kill may come before the folder."""
    if not folder.exists():
        return Run.create(folder, config, method)
    Run.open(folder, read_run_config).same_as(config, method)
    return Run(folder, config, method)


def rich_table(table: Table, words: int = 2, ruled: bool = True) -> RichTable:
    """A table on the screen: some columns of words, then numbers; if ruled, a line where the first word changes."""
    grid = RichTable(title=table.title, title_justify="left")
    for index, name in enumerate(table.columns):
        # On a narrow screen heads, detectors and deviations go to a second line; no name and no number is cut off.
        side: Any = "left" if index < words else "right"
        grid.add_column(escape(name), justify=side, no_wrap=index == 0, overflow="fold")
    last = None
    for row in table.rows:
        if ruled and last is not None and row[0] != last:
            grid.add_section()
        # A name is never cut, so that a long one leaves numbers no room.
        name = row[0].replace(f" ({OURS})", f"\n({OURS})")
        grid.add_row(*(escape(cell) for cell in (name, *row[1:])))
        last = row[0]
    return grid
