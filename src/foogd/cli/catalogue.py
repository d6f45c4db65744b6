"""The commands `foogd methods` and `foogd detectors`."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated

import typer
from rich.table import Table as RichTable

from ..detectors.base import Detector
from ..detectors.registry import DETECTORS
from ..flower.options import on_flower
from ..methods import FOOGD, METHODS, AnchoredFOOGD, make_method, method_names, method_settings, shown_name
from ..methods.base import Method
from ..presets.loader import PROFILE
from .common import console


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
