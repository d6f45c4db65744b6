"""What several sections are built of: legends, figures, and menus that show one panel of several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..collection import Collection, Record, Scene
from .charts import dot_swatch, swatch
from .markup import Child, Html, h

NOTHING = Html("")


def lead(*text: Child) -> Html:
    """The sentence below a section's title."""
    return h("p", text, class_="lead")


def fine(*text: Child) -> Html:
    """A remark."""
    return h("p", text, class_="fine")


def legend(items: Iterable[tuple[str, Html]]) -> Html:
    """Buttons that show and hide a series in all charts around them; (name, swatch) each."""
    keys = [
        h("button", mark, name, type="button", class_="key", aria_pressed="true", data_key=name) for name, mark in items
    ]
    return h("div", keys, class_="legend", role="group", aria_label="show or hide")


def method_legend(scene: Scene, style: dict[str, int]) -> Html:
    """A legend of a table's methods; nothing where there is one only."""
    if len(scene.groups) < 2:
        return NOTHING
    return legend((group.label, swatch(style[group.label])) for group in scene.groups)


def kind_legend(kinds: dict[str, str], *, dots: bool = False) -> Html:
    """A legend of IN, IN-C and the OUT sets."""
    return legend((name, dot_swatch(kind) if dots else swatch(0, kind)) for name, kind in kinds.items())


def figure(title: Child, chart: Html, note: Child = None) -> Html:
    """A chart below its title; nothing where there is no chart."""
    if not chart:
        return NOTHING
    return h("figure", h("figcaption", h("strong", title), h("span", note, class_="note") if note else None), chart)


def charts(items: Iterable[Html], *keys: Html) -> Html:
    """Figures side by side with their legend."""
    found = [item for item in items if item]
    return h("div", h("div", found, class_="row"), keys, class_="charts") if found else NOTHING


def switch(name: str, panels: Sequence[tuple[str, Html]]) -> Html:
    """Panels of which a menu shows one; without a script all are shown, each with its name.

    Menus of the same name that know a choice follow each other.
    """
    panels = [(title, body) for title, body in panels if body]
    if len(panels) < 2:
        return panels[0][1] if panels else NOTHING
    options = [h("option", title, value=str(index)) for index, (title, _) in enumerate(panels)]
    menu = h("label", h("span", name), h("select", options, autocomplete="off", data_menu=name), class_="menu")
    bodies = [
        h("div", h("h4", title, class_="panel-title"), body, class_="panel", data_panel=str(index))
        for index, (title, body) in enumerate(panels)
    ]
    return h("div", menu, bodies, class_="switch")


def by_scene(collection: Collection, make: Callable[[Scene], Html]) -> Html:
    """One panel a setting, behind a menu."""
    return switch("Setting", [(scene.title or "all runs", make(scene)) for scene in collection.scenes])


def styles(collection: Collection) -> dict[str, int]:
    """A method's colour, dash and mark, the same on the whole page."""
    labels = dict.fromkeys(group.label for group in collection.groups)
    return {label: number for number, label in enumerate(labels)}


def kinds_of(records: Iterable[Record]) -> dict[str, str]:
    """The style of IN, IN-C and each OUT set by name."""
    outs = dict.fromkeys(one.name for record in records if record.samples for one in record.samples.of("out"))
    return {"IN": "in", "IN-C": "inc", **{name: f"out{index % 6}" for index, name in enumerate(outs)}}
