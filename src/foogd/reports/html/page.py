"""The page: template, style and script in one file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from string import Template
from typing import Any

from ... import __version__
from ...data.partition import AUTHORS
from ..collection import Collection, Record, shown
from ..grouping import sortable
from ..narrative import headline
from ..tsne import MAPS
from .markup import Html, h, join
from .results import summary
from .sections import sections


def html_report(
    collection: Collection, *, title: str = "", maps: int = MAPS, tell: Callable[[str], None] = lambda text: None
) -> str:
    """The whole page as text; the same runs give the same page."""
    parts = sections(collection, most_maps=maps, tell=tell)
    links = [h("li", h("a", part.title, href=f"#{part.key}")) for part in parts]
    body = [h("section", h("h2", part.title), part.body, id=part.key) for part in parts]
    heading = title or headline(collection)
    return Template(_file("page.html")).substitute(
        title=join(f"{heading} · foogd"),
        heading=join(heading),
        facts=facts(collection),
        summary=summary(collection),
        links=join(links),
        body=join(body),
        style=_file("style.css"),
        script=_file("script.js"),
        version=join(__version__),
    )


def facts(collection: Collection) -> Html:
    """One line about what was run."""
    records = collection.records
    seeds = {record.seed for record in records}
    words = [
        _count(len(records), "run"),
        _count(len(seeds), "seed"),
        _values([record.clients for record in records if record.clients], "{} clients"),
        *_partition(records),
        _values([record.settings["rounds"] for record in records], "{} rounds"),
        _values([record.settings["backbone"] for record in records], "{}"),
    ]
    return h("ul", [h("li", word) for word in words if word], class_="facts")


def _partition(records: Sequence[Record]) -> list[str]:
    """How the data came to the clients; on Flower no setting has a say in it."""
    split = [record.settings for record in records if not record.flower]
    if all(settings["partition"] == "dirichlet" for settings in split):
        drawn = ("", AUTHORS)
        words = _values([s["alpha"] if s["proportions"] in drawn else s["proportions"] for s in split], "Dirichlet {}")
    else:
        words = _values([settings["partition"] for settings in split], "{} partition")
    return [words, "nodes with their own data" if any(record.flower for record in records) else ""]


def _values(values: Iterable[Any], words: str) -> str:
    by_text = {shown(value): value for value in values}
    found = sorted(by_text, key=lambda text: sortable(by_text[text]))
    if found in (["1"], ["1.0"]):
        words = words.removesuffix("s")  # 1 round, 1 client
    return words.format(", ".join(found) if len(found) <= 4 else f"{found[0]} … {found[-1]}") if found else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _file(name: str) -> str:
    return (resources.files("foogd.reports.html") / name).read_text()
