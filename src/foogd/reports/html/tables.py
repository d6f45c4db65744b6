"""Tables of the page: numbers to the right, heads that sort, the best in bold, published numbers below measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from ...tables.grid import Cell, Grid, detector_name, signed
from .markup import Child, Html, h, join

RISES, FALLS = "↑", "↓"


@final
@dataclass(frozen=True)
class Shown:
    """What a cell shows, what it is sorted by where that is a number, and its shade from 0 to 100."""

    content: Child
    value: float | None = None
    best: bool = False
    tint: float | None = None


EMPTY = Shown("–")


def table(heads: Sequence[str], rows: Sequence[Sequence[Shown]], *, words: int = 1, class_: str = "") -> Html:
    """A table that sorts; its first `words` columns are text, the first of them names the line."""
    lines = []
    for row in rows:
        first, *rest = row
        cells = [h("th", first.content, scope="row", data_v=_key(first))]
        cells += [_cell(shown, words=index < words) for index, shown in enumerate(rest, start=1)]
        lines.append(h("tr", cells))
    top = h("tr", [head(text, words=index < words) for index, text in enumerate(heads)])
    return _scrolling(h("table", h("thead", top), h("tbody", lines), class_=f"sortable {class_}".strip()))


def _cell(shown: Shown, *, words: bool = False, first: bool = False) -> Html:
    names = {"words": words, "first": first, "best": shown.best, "tint": shown.tint is not None, "none": shown is EMPTY}
    classes = " ".join(name for name, on in names.items() if on)
    style = None if shown.tint is None else f"--t:{max(0.0, min(100.0, shown.tint)):.0f}%"
    key = "" if shown is EMPTY and not words else _key(shown)
    return h("td", shown.content, class_=classes or None, style=style, data_v=key)


def _key(shown: Shown) -> str | None:
    return None if shown.value is None else f"{shown.value:.6g}"


def grid_table(grid: Grid) -> Html:
    """A grid with a head of two lines where columns belong to data sets."""
    blocks = grid.blocks
    starts = {members[0] for _, members in blocks}
    heads = []
    if any(name for name, _ in blocks):
        over = [
            h("th", name or None, colspan=str(len(members)), class_="block" if name else "blank")
            for name, members in blocks
        ]
        heads.append(h("tr", h("th", class_="blank"), h("th", class_="blank aside"), over))
    names = [
        head(column.title, arrow=FALLS if column.smaller_is_better else RISES, first=index in starts)
        for index, column in enumerate(grid.columns)
    ]
    heads.append(h("tr", head("method", words=True), head("detector", words=True, aside=True), names))
    body = []
    for line in grid.lines:
        # A small screen has no room for a column of detectors: there they stand below the method.
        below = h("small", detector_name(line.detector), class_="below")
        count = grid.fewer_seeds(line)
        cells = [
            _cell(_measured(cell), first=index in starts) for index, cell in enumerate(line.cells)
        ]  # fmt: skip
        detector = h("td", detector_name(line.detector), class_="words aside")
        name = join(marked(line.method, line.footnote), h("small", f" ({count})") if count else None, below)
        body.append(h("tr", h("th", name, scope="row", data_v=line.method), detector, cells))
    return _scrolling(h("table", h("thead", heads), h("tbody", body), class_="sortable grid-table"))


def marked(method: str, footnote: str) -> Html:
    """A method's name, with a dagger where there is something to say about its numbers."""
    return join(h("span", method), h("sup", "†", title=footnote) if footnote else None)


def _measured(cell: Cell) -> Shown:
    if not cell.values:
        return EMPTY
    return Shown(join(number_text(cell.mean, cell.deviation), published_text(cell)), cell.mean, best=cell.best)


def number_text(mean: float, deviation: float | None) -> Html:
    """A mean with its deviation."""
    return h("span", h("b", f"{mean:.1f}"), None if deviation is None else h("i", f"± {deviation:.1f}"), class_="n")


def published_text(cell: Cell) -> Html | None:
    """The published number and how far the measured one is from it."""
    if cell.published is None or cell.difference is None:
        return None
    return h("small", f"paper {cell.published.mean:.1f}", h("em", signed(cell.difference)), class_="pub")


def head(text: str, *, words: bool = False, arrow: str = "", first: bool = False, aside: bool = False) -> Html:
    """A head that sorts its column."""
    names = {"words": words, "first": first, "aside": aside}
    sign = h("span", arrow, class_="arrow", title="larger is better" if arrow == RISES else "smaller is better")
    button = h("button", text, join("\u00a0", sign) if arrow else None, type="button")
    classes = " ".join(name for name, on in names.items() if on)
    return h("th", button, scope="col", class_=classes or None, aria_sort="none")


def _scrolling(content: Html) -> Html:
    """Wide tables move inside the page; the page itself does not."""
    return h("div", content, class_="scroll", tabindex="0")
