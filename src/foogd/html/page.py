"""The page: template, style and script in one file."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from string import Template

from .. import __version__
from ..findings import headline
from ..records import Collection, shown, sortable
from .answers import MAPS
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
        _values(collection, "clients", "{} clients"),
        _partition(collection),
        _values(collection, "rounds", "{} rounds"),
        _values(collection, "backbone", "{}"),
    ]
    return h("ul", [h("li", word) for word in words if word], class_="facts")


def _partition(collection: Collection) -> str:
    if all(record.settings.get("partition") == "dirichlet" for record in collection.records):
        return _values(collection, "alpha", "Dirichlet {}")
    return _values(collection, "partition", "{} partition")


def _values(collection: Collection, key: str, words: str) -> str:
    values = {shown(r.settings[key]): r.settings[key] for r in collection.records if key in r.settings}
    found = sorted(values, key=lambda text: sortable(values[text]))
    if found in (["1"], ["1.0"]):
        words = words.removesuffix("s")  # 1 round, 1 client
    return words.format(", ".join(found) if len(found) <= 4 else f"{found[0]} … {found[-1]}") if found else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _file(name: str) -> str:
    return (resources.files("foogd.html") / name).read_text()
