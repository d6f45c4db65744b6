"""The command `foogd settings`, and the tables that docs/settings.md is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Annotated, Any, NamedTuple

import typer
from rich.markup import escape
from rich.table import Table as RichTable

from ..config import Config
from ..core.errors import InputError
from ..core.fields import allowed, hints_of, quoted
from ..data.corrupt import CORRUPTIONS
from ..engine.aggregate import RULES
from ..methods import FOOGD, METHODS, PROFILES, AnchoredFOOGD
from ..methods.base import Method
from ..nets import BACKBONES
from ..presets.loader import PROFILE, nearest
from ..runs.files import to_toml
from .common import console, say

COLUMNS = ("setting", "default", "allowed", "meaning")
ELSEWHERE = (
    "A method has settings of its own, which are given in the same way: `foogd methods` lists them. `profile` of "
    f"+foogd chooses what it means: {', '.join(PROFILES)}."
)

# Names of what other modules register.
_NAMES = {
    "corruptions": f"a list of some of {quoted(CORRUPTIONS)}",
    "backbone": f"one of {quoted(BACKBONES)}, or file.py:fn",
    "aggregation": f"one of {quoted(RULES)}, or one for each group",
}


class Setting(NamedTuple):
    """A line of the tables."""

    name: str
    default: str
    allowed: str
    meaning: str


Groups = dict[str, list[Setting]]


def run_groups() -> Groups:
    """The settings of every run, by the groups in which `Config` has them."""
    groups: Groups = {}
    for item, line in zip(fields(Config), _lines(Config()), strict=True):
        group = item.metadata.get("group")
        if group is not None:
            groups[group] = []
        list(groups.values())[-1].append(line)
    return groups


def method_groups() -> Groups:
    """The settings of the methods, by the methods that have them."""
    classes: dict[str, type[Method]] = {**METHODS, "+foogd": FOOGD, "+foogd with profile=anchored": AnchoredFOOGD}
    owners: dict[Setting, list[str]] = {}
    for title, cls in classes.items():
        for line in _lines(cls()):
            owners.setdefault(line, []).append(title)
    name, default, meaning = PROFILE
    owners[Setting(name, _toml(default), f"one of {quoted(PROFILES)}", meaning)] = ["+foogd"]
    groups: Groups = {}
    for line, titles in owners.items():
        groups.setdefault(f"Of {', '.join(titles)}", []).append(line)
    return groups


def add_settings_command(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(settings)


def settings(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Only these, of methods too; default: all of a run.")
    ] = None,
) -> None:
    """List the settings of a run: default, what is allowed, meaning. Example: foogd settings rounds clients"""
    groups = run_groups()
    if names:
        groups |= method_groups()
        known = {line.name for lines in groups.values() for line in lines}
        for name in names:
            if name not in known:
                where = "foogd settings lists those of a run, foogd methods those of methods"
                raise InputError(f"setting {name!r} is not known{nearest(name, known)}: {where}")
        chosen = {title: [line for line in lines if line.name in names] for title, lines in groups.items()}
        _show({title: lines for title, lines in chosen.items() if lines})
        return
    say("Change one with --set NAME=VALUE, or write NAME = VALUE in a TOML file. A preset has values of its own.\n")
    _show(groups)
    say(ELSEWHERE.replace("`", ""))


def _lines(owner: Config | Method) -> Iterable[Setting]:
    """One line for each setting that an object of settings explains."""
    hints = hints_of(type(owner))
    for item in fields(owner):  # type: ignore[arg-type]  # methods are dataclasses
        if "help" in item.metadata:
            words = item.metadata.get("words") or (_NAMES.get(item.name) if isinstance(owner, Config) else None)
            default = _toml(getattr(owner, item.name))
            yield Setting(item.name, default, words or allowed(hints[item.name], item), item.metadata["help"])


def _toml(value: Any) -> str:
    return to_toml({"x": value}).removeprefix("x = ").rstrip("\n")


def _show(groups: Mapping[str, list[Setting]]) -> None:
    longest = max(len(line.name) for lines in groups.values() for line in lines)
    for title, lines in groups.items():
        # Shares of the screen, so that the columns of all groups stand below each other.
        grid = RichTable(title=escape(title), title_justify="left", box=None, pad_edge=False, expand=True)
        grid.add_column(COLUMNS[0], width=longest, no_wrap=True)
        for column, share in zip(COLUMNS[1:], (3, 3, 4), strict=True):
            grid.add_column(column, ratio=share, overflow="fold")
        for line in lines:
            grid.add_row(*(escape(cell) for cell in line))
        console.print(grid, highlight=False)
        say("")
