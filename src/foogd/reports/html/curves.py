"""Sections of curves: sensitivity to a setting, training, client drift."""

from __future__ import annotations

from ..collection import Collection, Scene
from ..curves import Points, evaluated_curves, round_curves, sensitivities
from ..narrative import spoken
from .blocks import NOTHING, by_scene, charts, figure, lead, legend, method_legend, styles, switch
from .charts import Series, line_chart, swatch
from .markup import Html, join


def sensitivity(collection: Collection) -> Html:
    """A setting on the x axis, across runs that differ in it."""
    panels = []
    for key, curves in sensitivities(collection).items():
        names = dict.fromkeys(name for lines in curves.values() for name in lines)
        style = {name: number for number, name in enumerate(names)}
        figures = [figure(title, _lines(title, lines, style, key, even=True)) for title, lines in curves.items()]
        keys = legend((name, swatch(number)) for name, number in style.items()) if len(style) > 1 else NOTHING
        panels.append((key, charts(figures, keys)))
    body = switch("Against", panels)
    text = "The same method with one setting at several values, everything else alike; means over seeds."
    return join(lead(text), body) if body else NOTHING


def training(collection: Collection) -> Html:
    """Accuracies and AUROC over the evaluated rounds, losses over all."""
    style = styles(collection)

    def one(scene: Scene) -> Html:
        figures = [
            figure(title, _lines(title, lines, style))
            for title, lines in evaluated_curves(scene).items()
            if any(len(points) > 1 for points in lines.values())
        ]
        losses = round_curves(scene, lambda line: line["losses"])
        figures += [
            figure(f"Loss: {spoken(key)}", _lines(f"loss {key}", lines, style)) for key, lines in losses.items()
        ]
        return charts(figures, method_legend(scene, style))

    body = by_scene(collection, one)
    return join(lead("Means over seeds. A name in the legend hides its line."), body) if body else NOTHING


def drift(collection: Collection) -> Html:
    """The distance of the clients' models from their mean."""
    style = styles(collection)

    def one(scene: Scene) -> Html:
        found = round_curves(scene, lambda line: line.get("drift", {}))
        figures = [
            figure(spoken(key), _lines(f"drift of {key}", lines, style, zero=True)) for key, lines in found.items()
        ]
        return charts(figures, method_legend(scene, style))

    body = by_scene(collection, one)
    text = "How far the clients' models lie from their mean when they come back; means over seeds."
    return join(lead(text), body) if body else NOTHING


def _lines(
    title: str,
    lines: dict[str, Points],
    style: dict[str, int],
    x_label: str = "round",
    *,
    zero: bool = False,
    even: bool = False,
) -> Html:
    series = [Series(name, points, style[name]) for name, points in lines.items()]
    return line_chart(f"{title} by {x_label}", series, x_label=x_label, from_zero=zero, even=even)
