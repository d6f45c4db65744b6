"""HTML and SVG elements; text is always escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Child = str | Html | None
_VOID = frozenset({"br", "col", "hr", "input", "meta"})


def h(name: str, *children: Child | Iterable[Child], **attributes: str | float | bool | None) -> Html:
    """An element: `h("td", "a < b", class_="x", data_v=3)`; children that are None are left out."""
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        words.append(key if value is True else f'{key}="{escape(_plain(value), quote=True)}"')
    inner = join(*children)
    return Html(f"<{' '.join(words)}>" + ("" if name in _VOID else f"{inner}</{name}>"))


def join(*children: Child | Iterable[Child]) -> Html:
    """Children one after the other."""
    parts: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, str):
            parts.append(child if isinstance(child, Html) else escape(child, quote=False))
        else:
            parts.append(join(*child))
    return Html("".join(parts))


def _plain(value: str | float) -> str:
    return value if isinstance(value, str) else number(value)


def number(value: float) -> str:
    """A coordinate with at most one decimal, as short as it can be written."""
    text = f"{value:.1f}"
    text = text.removesuffix(".0")
    return "0" if text == "-0" else text
