"""Figures in files, readable in grey print and by colour-blind people."""

from __future__ import annotations

import hashlib
import io
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..methods import OURS
from .tsne import MAPS, feature_map, lacking

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .collection import Collection, Record, Scene

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b0568c", "#c98a00", "#56b4e9", "#4a4f57", "#8a5a3c")
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (1.5, 2)), (0, (7, 2, 1.5, 2)), (0, (10, 2)))
MARKS = "os^DPX"
KINDS: dict[str, tuple[str, Any]] = {"IN": ("#0072b2", "-"), "IN-C": ("#56b4e9", (0, (5, 2)))}
OUTS = ("#d55e00", "#b0568c", "#c98a00", "#6b4a2f", "#8a1c4a", "#7a7a00")
OUT_DASHES: tuple[Any, ...] = ((0, (1.5, 1.5)), (0, (7, 2, 1.5, 2)), (0, (3, 1.5)), (0, (9, 3)), (0, (1, 2.5)), "-")
STYLE: dict[Any, Any] = {
    "font.size": 8.5, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": "#888888", "xtick.color": "#444444", "ytick.color": "#444444", "axes.grid": True,
    "axes.axisbelow": True, "grid.color": "#e4e4e4", "grid.linewidth": 0.6, "lines.linewidth": 1.4,
    "lines.markersize": 4.5, "legend.frameon": False, "svg.hashsalt": "foogd", "pdf.fonttype": 42,
}  # fmt: skip
LONGEST = 80  # letters of a setting in the name of a file
WIDE = 3  # panels side by side


def save_figure(path: Path, figure: Figure, vector: str) -> None:
    """The figure as `path.pdf` (or svg) and `path.png`; the same figure gives the same bytes."""
    from matplotlib import rc_context

    from ..runs.files import write_atomic

    dates = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": None}
    for form in (vector, "png"):
        picture = io.BytesIO()
        with rc_context(STYLE):
            figure.savefig(picture, format=form, dpi=200, metadata=dates[form])
        write_atomic(path.with_name(f"{path.name}.{form}"), picture.getvalue())


def all_figures(
    collection: Collection, *, maps: int = MAPS, tell: Callable[[str], None] = lambda text: None
) -> Iterator[tuple[str, Figure]]:
    """Name and figure of everything that the runs have something for."""
    from matplotlib import rc_context

    from .curves import sensitivities

    several = len(collection.scenes) > 1
    if maps and any(_answered(scene) for scene in collection.scenes) and (why := lacking()) is not None:
        tell(f"Left out: {why}")
        maps = 0
    makers: tuple[tuple[str, Callable[[Scene], Figure | None]], ...] = (
        ("training", training_figure),
        ("scores", scores_figure),
        ("roc", roc_figure),
        ("severity", severity_figure),
        ("corruptions", corruptions_figure),
        ("corruption-severity", heat_figure),
    )
    with rc_context(STYLE):
        averages = averages_figure(collection)
    if averages is not None:
        yield "corruptions-average", averages
    for scene in collection.scenes:
        suffix = f"-{file_name(scene.title)}" if several else ""
        for name, make in makers:
            with rc_context(STYLE):
                figure = make(scene)
            if figure is not None:
                yield f"{name}{suffix}", figure
        if maps:
            with rc_context(STYLE):
                figure = map_figure(scene, maps, tell)
            if figure is not None:
                maps = max(0, maps - len(scene.groups))
                yield f"tsne{suffix}", figure
    for key, curves in sensitivities(collection).items():
        with rc_context(STYLE):
            figure = sensitivity_figure(key, curves)
        yield f"sensitivity-{file_name(key)}", figure


def file_name(text: str) -> str:
    """Words that are safe in the name of a file; long ones are cut, and stay apart by a few letters of their own."""
    name = re.sub(r"[^A-Za-z0-9.+=-]+", "_", text.replace(" = ", "=")).strip("_")
    if len(name) <= LONGEST:
        return name
    return f"{name[:LONGEST]}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


def _panels(count: int, size: tuple[float, float] = (2.5, 2.1)) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels."""
    from matplotlib.figure import Figure

    wide = min(count, WIDE)
    tall = math.ceil(count / wide)
    figure = Figure(figsize=(size[0] * max(wide, 1.4), size[1] * tall + 0.45), layout="constrained")
    axes = list(figure.subplots(tall, wide, squeeze=False).ravel())
    for spare in axes[count:]:
        spare.set_axis_off()
    return figure, axes[:count]


def _line(axes: Axes, points: Sequence[tuple[float, float]], number: int, name: str) -> None:
    turn = number + number // len(COLOURS)
    axes.plot(
        [x for x, _ in points], [y for _, y in points], color=COLOURS[number % len(COLOURS)], label=name,
        linestyle=DASHES[turn % len(DASHES)], marker=MARKS[turn % len(MARKS)] if len(points) <= 30 else None,
    )  # fmt: skip


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """One legend for all panels, below them, with as many columns as there is room for; the variant is always named."""
    found = {label: handle for one in axes for handle, label in zip(*one.get_legend_handles_labels(), strict=True)}
    if len(found) > 1 or any(OURS in name for name in found):
        inches = 0.55 + 0.075 * max(map(len, found))
        columns = max(1, min(len(found), int(figure.get_figwidth() / inches)))
        lines = math.ceil(len(found) / columns)
        figure.set_figheight(figure.get_figheight() + 0.19 * (lines - 1))  # else the panels would shrink
        figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=columns, handlelength=3.2)


def _in_lines(title: str) -> str:
    """The title of a panel, which is narrow."""
    return title.replace(f" ({OURS})", f"\n({OURS})")


def _curves_figure(
    panels: dict[str, dict[str, list[tuple[float, float]]]], x_label: str, *, even: bool = False
) -> Figure | None:
    """A panel a measure, a line a name; with `even`, values on the x axis have the same distance from each other."""
    from matplotlib.ticker import MaxNLocator

    panels = {title: lines for title, lines in panels.items() if any(len(points) > 1 for points in lines.values())}
    if not panels:
        return None
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    figure, axes = _panels(len(panels))
    for one, (title, lines) in zip(axes, panels.items(), strict=True):
        steps = sorted({x for points in lines.values() for x, _ in points})
        for name, points in lines.items():
            placed = [(float(steps.index(x)), y) for x, y in points] if even else points
            _line(one, placed, names.index(name), name)
        one.set_title(title)
        one.set_xlabel(x_label)
        if even:
            one.set_xticks(range(len(steps)), [f"{step:g}" for step in steps])
        elif all(step == round(step) for step in steps):
            one.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(figure, axes)
    return figure


def training_figure(scene: Scene) -> Figure | None:
    """Accuracies and AUROC over the evaluated rounds, losses over all."""
    from .curves import evaluated_curves, round_curves

    losses = round_curves(scene, lambda line: line["losses"])
    return _curves_figure({**evaluated_curves(scene), **{f"loss: {k}": v for k, v in losses.items()}}, "round")


def sensitivity_figure(key: str, curves: dict[str, dict[str, list[tuple[float, float]]]]) -> Figure:
    """Results against a setting."""
    figure = _curves_figure(curves, key, even=True)
    if figure is None:
        raise ValueError(f"there are no curves against {key}")
    return figure


def severity_figure(scene: Scene) -> Figure | None:
    """Accuracy by severity, the mean over corruptions."""
    from .curves import severities, severity_curve

    levels = severities(scene)
    if len(levels) < 2:
        return None
    lines = {group.label: severity_curve(scene, group.label, levels) for group in scene.groups}
    return _curves_figure({"mean accuracy over corruptions, %": lines}, "severity (0: clean)")


def corruptions_figure(scene: Scene) -> Figure | None:
    """Accuracy on each corruption and their average, a mark a method."""
    from matplotlib.figure import Figure

    from .curves import shifts
    from .narrative import spoken

    kinds = shifts(scene)
    if not kinds:
        return None
    figure = Figure(figsize=(5.4, 1.4 + 0.27 * (len(kinds) + 1)), layout="constrained")
    axes = figure.subplots()
    average = len(kinds) + 0.4
    for number, group in enumerate(scene.groups):
        means = _by_corruption(scene, group.label, kinds)
        values = [*means, float(np.nanmean(means))]
        turn = number + number // len(COLOURS)
        axes.scatter(
            values, [*range(len(kinds)), average], marker=MARKS[turn % len(MARKS)], s=34, alpha=0.85,
            color=COLOURS[number % len(COLOURS)], label=group.label, linewidths=0.6, edgecolors="white", zorder=3,
        )  # fmt: skip
    axes.set_yticks([*range(len(kinds)), average], [*map(spoken, kinds), "average"])
    axes.axhline(len(kinds) - 0.3, color="#888888", linewidth=0.6)
    axes.invert_yaxis()
    axes.set_xlabel("accuracy, mean over severities, %")
    _legend(figure, [axes])
    return figure


def _by_corruption(scene: Scene, method: str, kinds: Sequence[str]) -> list[float]:
    from .curves import corruption_values

    return [100 * float(np.mean(corruption_values(scene, method, kind) or [math.nan])) for kind in kinds]


def averages_figure(collection: Collection) -> Figure | None:
    """The average over corruptions, a panel a scene and a bar a method, where several scenes have corruptions."""
    from .curves import shifts

    scenes = [scene for scene in collection.scenes if len(shifts(scene)) > 1]
    if len(scenes) < 2:
        return None
    figure, axes = _panels(len(scenes), (3.4, 0.7 + 0.22 * max(len(scene.groups) for scene in scenes)))
    for one, scene in zip(axes, scenes, strict=True):
        kinds = shifts(scene)
        values = [float(np.nanmean(_by_corruption(scene, group.label, kinds))) for group in scene.groups]
        bars = one.barh(range(len(values)), values, color=COLOURS[0], height=0.7)
        one.bar_label(bars, fmt="%.1f", padding=2, fontsize=7.5)
        one.set_yticks(range(len(values)), [group.label for group in scene.groups])
        one.invert_yaxis()
        one.set_title(textwrap.fill(scene.title, 40))
        one.set_xlabel(f"accuracy, mean over {len(kinds)} kinds of IN-C, %")
    return figure


def heat_figure(scene: Scene) -> Figure | None:
    """Accuracy by corruption and severity, a panel a method; the numbers stand in the cells."""
    from .curves import corruption_values, severities, shifts
    from .narrative import spoken

    kinds, levels = shifts(scene), severities(scene)
    if not kinds or not levels:
        return None
    figure, axes = _panels(len(scene.groups), (2.7, 0.7 + 0.2 * len(kinds)))
    for place, (one, group) in enumerate(zip(axes, scene.groups, strict=True)):
        values = np.array(
            [
                [
                    100 * float(np.mean(corruption_values(scene, group.label, kind, level) or [math.nan]))
                    for level in levels
                ]
                for kind in kinds
            ]
        )
        one.imshow(values, cmap="Greys", vmin=0, vmax=190, aspect="auto")
        for (row, column), value in np.ndenumerate(values):
            if math.isfinite(value):
                one.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=7.5)
        one.set_title(_in_lines(group.label))
        one.set_xticks(range(len(levels)), [str(level) for level in levels])
        one.set_yticks(range(len(kinds)), [spoken(kind) for kind in kinds] if place % WIDE == 0 else [])
        one.grid(visible=False)
        one.set_xlabel("severity")
    return figure


def _answered(scene: Scene) -> list[tuple[str, Record]]:
    return [(group.label, record) for group in scene.groups if (record := group.answered) is not None]


def _out_styles(records: Sequence[Record]) -> dict[str, tuple[str, Any]]:
    names = dict.fromkeys(one.name for record in records if record.samples for one in record.samples.of("out"))
    return {name: (OUTS[n % len(OUTS)], OUT_DASHES[n % len(OUT_DASHES)]) for n, name in enumerate(names)}


def scores_figure(scene: Scene) -> Figure | None:
    """Scores of IN, IN-C and OUT with the threshold, a panel a method with the detector of the paper."""
    from ..metrics import threshold_at_tpr

    have = _answered(scene)
    panels = [(label, *found) for label, record in have if (found := _scores(label, record)) is not None]
    if not panels:
        return None
    styles = {**KINDS, **_out_styles([record for _, record in have])}
    figure, axes = _panels(len(panels))
    for one, (label, detector, sets) in zip(axes, panels, strict=True):
        ends = [np.quantile(values, (0.005, 0.995)) for values in sets.values()]
        low, high = min(e[0] for e in ends), max(e[1] for e in ends)
        edges = np.linspace(low, high if high > low else low + 1, 41)
        for name, values in sets.items():
            share = np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0] / len(values)
            colour, dash = styles[name]
            one.stairs(share, edges, color=colour, linestyle=dash, label=name, linewidth=1.3)
            one.stairs(share, edges, color=colour, fill=True, alpha=0.1)
        tau = threshold_at_tpr(sets["IN"])
        one.axvline(tau, color="black", linewidth=1, linestyle=(0, (4, 2)))
        one.annotate("τ", (tau, 1.0), xycoords=("data", "axes fraction"), ha="center", va="bottom", fontsize=8)
        one.set_title(_in_lines(f"{label}: {detector}"), pad=12)
        one.set_yticks([])
        one.grid(visible=False)
        one.spines["left"].set_visible(False)
        one.set_xlabel("score")
    _legend(figure, axes)
    return figure


def roc_figure(scene: Scene) -> Figure | None:
    """ROC of IN against each OUT set, a panel a method with the detector of the paper."""
    from ..metrics import auroc
    from .html.charts import roc_points

    have = _answered(scene)
    panels = [(label, *found) for label, record in have if (found := _scores(label, record)) is not None]
    styles = _out_styles([record for _, record in have])
    if not panels or not styles:
        return None
    figure, axes = _panels(len(panels), (2.5, 2.4))
    for one, (label, detector, sets) in zip(axes, panels, strict=True):
        one.plot([0, 1], [0, 1], color="#aaaaaa", linewidth=0.8, linestyle=(0, (1, 3)))
        for number, name in enumerate(name for name in sets if name in styles):
            points = roc_points(sets["IN"], sets[name], 200)
            colour, dash = styles[name]
            one.plot([x for x, _ in points], [y for _, y in points], color=colour, linestyle=dash, label=name)
            text = f"{100 * auroc(sets['IN'], sets[name]):.1f}"
            one.text(0.97, 0.05 + 0.1 * number, text, color=colour, ha="right", fontsize=8)
        one.set_title(_in_lines(f"{label}: {detector}"))
        one.set(xlabel="share of IN rejected", ylabel="share of OUT detected", xlim=(0, 1), ylim=(0, 1.01))
    _legend(figure, axes)
    return figure


def _scores(label: str, record: Record) -> tuple[str, dict[str, np.ndarray]] | None:
    """The paper's detector for a method and its scores of IN, IN-C and each OUT set."""
    from ..tables.grid import detector_name
    from ..tables.results import paper_detector

    samples = record.samples
    detector = paper_detector(label, samples.detectors()) if samples is not None else None
    if samples is None or detector is None:
        return None
    sets: dict[str, np.ndarray] = {}
    for name, found in (("IN", samples.of("in")), ("IN-C", samples.shifted())):
        parts = [one.pooled(detector).double().numpy() for one in found]
        if parts:
            sets[name] = np.concatenate(parts)
    sets |= {one.name: one.pooled(detector).double().numpy() for one in samples.of("out")}
    if "IN" not in sets or not all(len(values) and np.isfinite(values).all() for values in sets.values()):
        return None
    return detector_name(detector), sets


def map_figure(scene: Scene, most: int, tell: Callable[[str], None] = lambda text: None) -> Figure | None:
    """t-SNE of features, a panel a method: dots IN, squares IN-C, crosses OUT."""
    found = []
    have = _answered(scene)[:most]
    for label, record in have:
        tell(f"t-SNE of {label}")
        if record.samples is not None and (places := feature_map(record.samples)) is not None:
            found.append((label, places))
    if not found:
        return None
    outs = _out_styles([record for _, record in have])
    figure, axes = _panels(len(found), (2.5, 2.5))
    for one, (label, places) in zip(axes, found, strict=True):
        names = np.array(places.names)
        for name in ("IN-C", "IN", *outs):
            chosen = places.places[names == name]
            colour = KINDS[name][0] if name in KINDS else outs[name][0]
            mark, size = {"IN": ("o", 7.0), "IN-C": ("s", 6.0)}.get(name, ("x", 10.0))
            width = 0.8 if mark == "x" else 0.0
            one.scatter(
                chosen[:, 0], chosen[:, 1], s=size, marker=mark, color=colour, linewidths=width, alpha=0.75, label=name
            )
        one.set_title(_in_lines(label))
        one.set_xticks([])
        one.set_yticks([])
        for side in ("top", "right"):
            one.spines[side].set_visible(True)
    _legend(figure, axes)
    return figure
