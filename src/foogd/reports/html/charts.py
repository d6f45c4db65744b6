"""Small charts as inline SVG: colours from the page's style, and dashes and marks that also work in grey print."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from .markup import Html, h, join, number

WIDTH, HEIGHT = 340.0, 226.0
LEFT, RIGHT, TOP, BOTTOM = 42.0, 10.0, 12.0, 40.0
COLOURS = 8
DASHES = ("", "7 3", "2 3", "8 3 2 3", "12 3")
MARKS = ("circle", "square", "triangle", "diamond", "plus", "cross")


@final
@dataclass(frozen=True)
class Series:
    """Points with a name; `style` is the number of its colour, dash and mark."""

    name: str
    points: Sequence[tuple[float, float]]
    style: int
    kind: str = ""  # a style by meaning (in, inc, out0) instead of a number


@final
@dataclass(frozen=True)
class Scale:
    """A linear map from values to coordinates."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        return self.start + (self.end - self.start) * ((value - self.low) / span if span else 0.5)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between low and high."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [(first + i) * step for i in range(math.floor(high / step + 1e-9) - first + 1)]


def tick_text(value: float, step: float) -> str:
    """A tick with as many decimals as the ticks differ in."""
    if abs(value) >= 10_000 or (value and abs(value) < 1e-3):
        return f"{value:.0e}".replace("e-0", "e−").replace("e+0", "e").replace("-", "−")
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step else 0
    if step and abs(step * 10**decimals - round(step * 10**decimals)) > 1e-6:
        decimals += 1
    return f"{value:.{decimals}f}".replace("-", "−")


def _axes(
    x: Scale, y: Scale, x_label: str, y_label: str, *, whole: bool = False, y_ticks: bool = True,
    names: Mapping[float, str] | None = None,
) -> Html:  # fmt: skip
    """Grid lines, ticks and the names of the axes; `names` are the only ticks of the x axis where they are given."""
    parts: list[Html] = []
    marks = ticks(y.low, y.high, 4) if y_ticks else []
    for value in marks:
        at = y(value)
        parts.append(h("path", d=f"M{number(LEFT)} {number(at)}H{number(x.end)}", class_="grid"))
        step = marks[1] - marks[0] if len(marks) > 1 else 1.0
        parts.append(h("text", tick_text(value, step), x=LEFT - 6, y=at + 3.5, class_="tick end"))
    bottom = y.start
    parts.append(h("path", d=f"M{number(x.start)} {number(bottom)}H{number(x.end)}", class_="axis"))
    places = ticks(x.low, x.high, 5)
    if whole:
        places = [value for value in places if value == round(value)]
    step = places[1] - places[0] if len(places) > 1 else 1.0
    texts = names or {value: tick_text(value, step) for value in places}
    for value, text in texts.items():
        at = x(value)
        parts.append(h("path", d=f"M{number(at)} {number(bottom)}v4", class_="axis"))
        parts.append(h("text", text, x=at, y=bottom + 16, class_="tick middle"))
    parts.append(h("text", x_label, x=(x.start + x.end) / 2, y=bottom + 33, class_="name middle"))
    if y_label:
        parts.append(h("text", y_label, x=x.start, y=y.end - 9, class_="name start"))
    return join(parts)


def _svg(title: str, *children: Html, height: float = HEIGHT, class_: str = "") -> Html:
    box = f"0 0 {number(WIDTH)} {number(height)}"
    words = f"chart {class_}".strip()
    return h("svg", h("title", title), children, viewBox=box, class_=words, role="img", aria_label=title)


def mark_path(shape: str, x: float, y: float, r: float = 3.2) -> str:
    """The outline of a mark around a point."""
    a, b = number(x), number(y)
    n = number
    match shape:
        case "circle":
            return f"M{n(x - r)} {b}a{n(r)} {n(r)} 0 1 0 {n(2 * r)} 0a{n(r)} {n(r)} 0 1 0 {n(-2 * r)} 0"
        case "square":
            return f"M{n(x - r)} {n(y - r)}h{n(2 * r)}v{n(2 * r)}h{n(-2 * r)}z"
        case "triangle":
            return f"M{a} {n(y - r * 1.2)}l{n(r * 1.2)} {n(r * 2)}h{n(-r * 2.4)}z"
        case "diamond":
            out, back = n(r * 1.3), n(-r * 1.3)
            return f"M{a} {n(y - r * 1.3)}l{out} {out}l{back} {out}l{back} {back}z"
        case "plus":
            return f"M{n(x - r)} {b}h{n(2 * r)}M{a} {n(y - r)}v{n(2 * r)}"
        case _:
            return f"M{n(x - r)} {n(y - r)}l{n(2 * r)} {n(2 * r)}m0 {n(-2 * r)}l{n(-2 * r)} {n(2 * r)}"


def style_classes(style: int, kind: str = "") -> str:
    return f"k-{kind}" if kind else f"s{style % COLOURS}"


def dash_of(style: int) -> str | None:
    return DASHES[(style + style // COLOURS) % len(DASHES)] or None


def dot_swatch(kind: str) -> Html:
    """The mark of a kind of points on a map."""
    mark = "M12 5l4 4m0-4l-4 4" if kind.startswith("out") else "M14 7h0"
    inner = h("g", h("path", d=mark), class_=f"dots k-{kind}")
    return h("svg", inner, viewBox="7 0 14 14", class_="swatch dot", aria_hidden="true")


def swatch(style: int, kind: str = "", *, marks: bool = True) -> Html:
    """The line and mark of a series, for its legend."""
    dash = KIND_DASHES.get(kind) if kind else dash_of(style)
    shape = MARKS[(style + style // COLOURS) % len(MARKS)]
    line = h("path", d="M1 7H27", class_="line", stroke_dasharray=dash)
    mark = h("path", d=mark_path(shape, 14, 7), class_="mark") if marks and not kind else None
    return h("svg", line, mark, viewBox="0 0 28 14", class_=f"swatch {style_classes(style, kind)}", aria_hidden="true")


KIND_DASHES: dict[str, str | None] = {
    "in": None, "inc": "6 3", "out0": "2 2.5", "out1": "9 3 2 3", "out2": "4 2", "out3": "12 4", "out4": "1 3",
    "out5": "6 2 1 2",
}  # fmt: skip


def line_chart(
    title: str, series: Sequence[Series], *, x_label: str = "round", from_zero: bool = False, even: bool = False
) -> Html:
    """Lines with marks; one that has no finite point is left out.

    With `even` the values on the x axis have the same distance from each other, whatever they are.
    """
    drawn = [
        (one, points) for one in series if (points := [p for p in one.points if math.isfinite(p[0] + p[1])])
    ]  # fmt: skip
    steps = sorted({p[0] for _, points in drawn for p in points})
    if even:
        drawn = [(one, [(float(steps.index(a)), b) for a, b in points]) for one, points in drawn]
    xs = [p[0] for _, points in drawn for p in points]
    ys = [p[1] for _, points in drawn for p in points]
    if not xs:
        return Html("")
    low, high = min(ys), max(ys)
    pad = 0.06 * (high - low) or max(abs(high) * 0.1, 0.5)
    low, high = (0.0 if from_zero else low - pad), high + pad
    x = Scale(min(xs), max(xs), LEFT + 6, WIDTH - RIGHT - 4)
    y = Scale(low, high, HEIGHT - BOTTOM, TOP)
    names = {float(place): f"{value:g}" for place, value in enumerate(steps)} if even else None
    parts = [_axes(x, y, x_label, "", whole=all(v == round(v) for v in xs), names=names)]
    for one, points in drawn:
        places = [(x(a), y(b)) for a, b in points]
        inner = [h("path", d=_path(places), class_="line", stroke_dasharray=dash_of(one.style))]
        if len(places) <= 30:
            shape = MARKS[(one.style + one.style // COLOURS) % len(MARKS)]
            inner.append(h("path", d="".join(mark_path(shape, *place) for place in places), class_="mark"))
        inner.append(h("title", one.name))
        parts.append(h("g", inner, class_=style_classes(one.style, one.kind), data_series=one.name))
    return _svg(title, *parts)


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{number(a)} {number(b)}" for a, b in places)


def histogram(
    title: str, scores: Sequence[tuple[str, str, np.ndarray]], threshold: float | None, *, bins: int = 32
) -> Html:
    """Densities of several sets of scores as steps, (name, kind, scores) each, and the threshold as an upright line.

    The farthest half per cent on each side is counted in the outermost bins.
    """
    sets = [(name, kind, values[np.isfinite(values)]) for name, kind, values in scores]
    sets = [one for one in sets if len(one[2])]
    if not sets:
        return Html("")
    ends = [np.quantile(values, (0.005, 0.995)) for _, _, values in sets]
    low, high = float(min(e[0] for e in ends)), float(max(e[1] for e in ends))
    if threshold is not None and math.isfinite(threshold):
        low, high = min(low, threshold), max(high, threshold)
    if high <= low:
        low, high = low - 0.5, high + 0.5
    edges = np.linspace(low, high, bins + 1)
    shares = [np.histogram(np.clip(values, low, high), edges)[0] / len(values) for _, _, values in sets]
    top = max(float(share.max()) for share in shares)
    x = Scale(low, high, 14.0, WIDTH - RIGHT)
    y = Scale(0.0, top * 1.12, HEIGHT - BOTTOM, TOP)
    parts = [_axes(x, y, "score (larger: more OUT)", "", y_ticks=False)]
    for (name, kind, _), share in zip(sets, shares, strict=True):
        steps = [(float(x(edges[0])), y(0.0))]
        for left, right, value in zip(edges[:-1], edges[1:], share, strict=True):
            steps += [(x(float(left)), y(float(value))), (x(float(right)), y(float(value)))]
        steps.append((x(float(edges[-1])), y(0.0)))
        outline = _steps(steps)
        parts.append(
            h(
                "g", h("path", d=outline, class_="area"),
                h("path", d=outline, class_="line", stroke_dasharray=KIND_DASHES.get(kind)), h("title", name),
                class_=f"k-{kind}", data_series=name,
            )
        )  # fmt: skip
    if threshold is not None and math.isfinite(threshold):
        at = x(threshold)
        end = at > WIDTH * 0.62
        parts.append(h("path", d=f"M{number(at)} {number(TOP - 4)}V{number(y(0.0))}", class_="threshold"))
        words = "τ: 95 % of IN pass"
        anchor = "end" if end else "start"
        parts.append(h("text", words, x=at + (-5 if end else 5), y=TOP + 4, class_=f"tick note {anchor}"))
    return _svg(title, *parts)


def _steps(places: Sequence[tuple[float, float]]) -> str:
    """A path of upright and level pieces, which are shorter to write."""
    text, (a, b) = [f"M{number(places[0][0])} {number(places[0][1])}"], places[0]
    for c, d in places[1:]:
        if number(c) != number(a):
            text.append(f"H{number(c)}")
        if number(d) != number(b):
            text.append(f"V{number(d)}")
        a, b = c, d
    return "".join(text)


def roc_points(inside: np.ndarray, outside: np.ndarray, most: int = 60) -> list[tuple[float, float]]:
    """(share of IN rejected, share of OUT detected) for thresholds from strict to lax; at most so many corners."""
    inside, outside = np.sort(inside), np.sort(outside)
    cuts = np.unique(np.concatenate([inside, outside]))[::-1]
    false = 1 - np.searchsorted(inside, cuts, side="left") / len(inside)
    true = 1 - np.searchsorted(outside, cuts, side="left") / len(outside)
    x, y = np.concatenate([[0.0], false]), np.concatenate([[0.0], true])
    if len(x) > most:
        # Even steps along the curve, so that the steep start keeps its corners.
        way = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(x)) + np.abs(np.diff(y)))])
        keep = np.unique(np.searchsorted(way, np.linspace(0, way[-1], most)))
        x, y = x[keep], y[keep]
    return list(zip(x.tolist(), y.tolist(), strict=True))


def roc_chart(title: str, curves: Sequence[tuple[str, str, Sequence[tuple[float, float]]]]) -> Html:
    """ROC curves (name, kind, points), the diagonal of chance, and the place where 95 % of IN pass."""
    x = Scale(0.0, 1.0, LEFT, WIDTH - RIGHT - 6)
    y = Scale(0.0, 1.0, HEIGHT - BOTTOM, TOP + 12)
    parts = [
        _axes(x, y, "share of IN rejected", "share of OUT detected"),
        h("path", d=f"M{number(x(0))} {number(y(0))}L{number(x(1))} {number(y(1))}", class_="grid chance"),
        h("path", d=f"M{number(x(0.05))} {number(y(0))}V{number(y(1))}", class_="threshold"),
    ]
    for name, kind, points in curves:
        path = _path([(x(a), y(b)) for a, b in points])
        line = h("path", d=path, class_="line", stroke_dasharray=KIND_DASHES.get(kind))
        parts.append(h("g", line, h("title", name), class_=f"k-{kind}", data_series=name))
    return _svg(title, *parts)


def map_chart(
    title: str, points: np.ndarray, kinds: Sequence[str], classes: Sequence[int], names: Sequence[str]
) -> Html:
    """A map of points: round for IN, square for IN-C, crosses for OUT; coloured by kind or, by a switch, by class.

    `names[i]` is the legend's name of point i. A class below 0 stands for no class.
    """
    size, margin = WIDTH, 12.0
    low, high = points.min(0), points.max(0)
    scaled = margin + (points - low) / np.maximum(high - low, 1e-9) * (size - 2 * margin)
    paths: dict[tuple[str, str, int], list[str]] = {}
    for (a, b), kind, label, name in zip(scaled.tolist(), kinds, classes, names, strict=True):
        mark = f"M{number(a)} {number(b)}h0"
        if kind.startswith("out"):
            mark = f"M{number(a - 2)} {number(b - 2)}l4 4m0-4l-4 4"
        paths.setdefault((name, kind, label), []).append(mark)
    groups: dict[tuple[str, str], list[Html]] = {}
    for (name, kind, label), marks in paths.items():
        words = f"c{label % 10}" if label >= 0 else "c-none"
        groups.setdefault((name, kind), []).append(h("path", d="".join(marks), class_=words))
    order = sorted(groups, key=lambda key: {"inc": 0, "in": 1}.get(key[1], 2))
    drawn = [h("g", groups[key], class_=f"k-{key[1]} dots", data_series=key[0]) for key in order]
    return _svg(title, *drawn, height=size, class_="map")


def strip_chart(title: str, rows: Sequence[tuple[str, int, Sequence[float], float]], *, x_label: str) -> Html:
    """One dot a client and an upright mark at the mean, (name, style, values, mean) a row; in %."""
    every = [value for _, _, values, _ in rows for value in values]
    if not every:
        return Html("")
    gap = 34.0
    height = TOP + gap * len(rows) + BOTTOM
    low, high = min(every), max(every)
    pad = max(1.0, 0.04 * (high - low))
    x = Scale(max(0.0, low - pad), min(100.0, high + pad), 10.0, WIDTH - 12)
    y = Scale(0.0, 1.0, height - BOTTOM, TOP)
    parts = [_axes(x, y, x_label, "", y_ticks=False)]
    for index, (name, style, values, mean) in enumerate(rows):
        at = TOP + gap * index + 24
        shape = MARKS[(style + style // COLOURS) % len(MARKS)]
        dots = "".join(mark_path(shape, x(value), at, 3.4) for value in values)
        parts.append(
            h(
                "g", h("text", name, x=10, y=at - 10, class_="tick start"),
                h("path", d=f"M10 {number(at)}H{number(WIDTH - 12)}", class_="grid"),
                h("path", d=dots, class_="mark open"),
                h("path", d=f"M{number(x(mean))} {number(at - 8)}v16", class_="mean"),
                class_=style_classes(style), data_series=name,
            )
        )  # fmt: skip
    return _svg(title, *parts, height=height)


def heat_chart(title: str, counts: np.ndarray) -> Html:
    """Clients × classes as shades, for tables that are too wide to print numbers; five shades, darker is more."""
    rows, columns = counts.shape
    cell = (WIDTH - LEFT - RIGHT) / columns
    tall = max(6.0, min(14.0, 300.0 / rows))
    shares = counts / max(1, counts.max())
    paths: dict[int, list[str]] = {}
    for row in range(rows):
        for column in range(columns):
            level = math.ceil(5 * math.sqrt(shares[row, column]))
            if level:
                place = f"M{number(LEFT + column * cell)} {number(TOP + row * tall)}"
                paths.setdefault(level, []).append(f"{place}h{number(cell)}v{number(tall)}h{number(-cell)}z")
    parts = [h("path", d="".join(found), class_=f"heat h{level}") for level, found in sorted(paths.items())]
    height = TOP + tall * rows + BOTTOM
    every = max(1, rows // 10)
    for row in range(0, rows, every):
        parts.append(h("text", str(row), x=LEFT - 6, y=TOP + (row + 0.5) * tall + 3.5, class_="tick end"))
    x = Scale(0, columns, LEFT, WIDTH - RIGHT)
    y = Scale(0, 1, TOP + tall * rows, TOP)
    return _svg(title, *parts, _axes(x, y, "class", "client", y_ticks=False), height=height)
