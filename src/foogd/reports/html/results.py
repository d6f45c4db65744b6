"""Sections of numbers: the paper's table, all detectors, the joint view, shifted images."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from ...tables.grid import Cell, Grid, Measure, detector_name
from ...tables.paper import NOTE, departures, published
from ..collection import Collection, Scene
from ..curves import corruption_values, severities, severity_curve, shifts
from ..grids import domain_means, every, images_tested, joint_grid, paper_grid, scene_grid, threshold_grid
from ..narrative import AT_IN, AT_SET_ASIDE, Finding, findings, spoken
from .blocks import NOTHING, by_scene, charts, figure, fine, lead, method_legend, styles, switch
from .charts import Series, line_chart
from .markup import Html, h, join
from .tables import EMPTY, Shown, grid_table, marked, number_text, published_text, table

_MARKED = "What † stands for is said below the results."


def summary(collection: Collection) -> Html:
    """What was found, in words."""
    return h("dl", [_finding(one) for one in findings(collection)], class_="findings")


def _finding(one: Finding) -> Html:
    text = one.text.replace(" %", "\u00a0%").replace(" ± ", "\u00a0±\u00a0")
    return h("div", h("dt", one.title), h("dd", text), class_=one.tone)


def results(collection: Collection) -> Html:
    """The paper's layout, a table for each setting, with published numbers below measured ones."""
    grids = [(scene.title, paper_grid(scene)) for scene in collection.scenes] + domain_means(collection)
    images = [images_tested(scene) for scene in collection.scenes]
    # Said once where all tables rest on the same images, else below each table.
    alike = len(set(images)) == 1
    below = [*(["" for _ in images] if alike else images), *("" for _ in grids[len(images) :])]
    tables = [
        h("div", h("h3", title) if title else None, grid_table(grid), fine(text) if text else None)
        for (title, grid), text in zip(grids, below, strict=True)
    ]
    found = dict.fromkeys((line.method, line.footnote, at) for at, grid in grids for line in grid.lines if line.marks)
    reasons = Counter(method for method, _ in {(method, why) for method, why, _ in found})
    marks: dict[str, dict[str, None]] = {}
    for method, why, at in found:  # a method that is marked for several reasons is named with its table
        marks.setdefault(why, {})[f"{method} ({at})" if reasons[method] > 1 and at else method] = None
    several = any(len(group.records) > 1 for group in collection.groups)
    text = (
        f"In %, weighted over clients by their test images{', mean ± deviation over seeds' if several else ''}. Each "
        "method with the detector that the paper uses for it: the score norm for FOOGD, MSP for all others. FPR95 is "
        "the share of OUT that passes where 95 % of IN do. The best of a column is bold; a click on a head sorts."
    )
    notes = [fine(images[0])] if alike and images[0] else []
    notes += [fine(NOTE)] if any(grid.has_published for _, grid in grids) else []
    notes += [fine(f"† {', '.join(methods)}: {why}.") for why, methods in marks.items()]
    return join(lead(text), h("div", tables, class_="stack"), notes)


def detectors(collection: Collection) -> Html:
    """Every detector asked of every method, one table a measure and OUT set."""

    def one(scene: Scene) -> Html:
        report = scene.report
        if len(report.detectors()) < 2:
            return NOTHING
        panels = []
        for out in report.out_sets():
            for metric in ("auroc", "fpr95"):
                measure = Measure(metric, "out", out, detected=True)
                grid = scene_grid(scene, [measure], every)
                cells = {(line.method, line.detector): line.cells[0] for line in grid.lines}
                marks = {line.method: line.footnote for line in grid.lines if line.marks}
                rows = []
                for method in report.methods():
                    shades = [_shaded(cells.get((method, name)), measure) for name in report.detectors()]
                    rows.append([Shown(marked(method, marks.get(method, ""))), *shades])
                heads = ["method", *(detector_name(name).replace("-", "\u2011") for name in report.detectors())]
                panels.append((f"{measure.title} against {out}", table(heads, rows, class_="matrix")))
        return switch("Measure", panels)

    body = by_scene(collection, one)
    text = (
        "Detectors read a trained model, so every one can be asked of every method. A fuller shade is better. "
        f"{_MARKED if '†' in body else ''}"
    )
    return join(lead(text), body) if body else NOTHING


def _shaded(cell: Cell | None, measure: Measure) -> Shown:
    if cell is None or not cell.values:
        return EMPTY
    good = 100 - cell.mean if measure.smaller_is_better else cell.mean
    content = join(number_text(cell.mean, cell.deviation), published_text(cell))
    return Shown(content, cell.mean, best=cell.best, tint=2 * (good - 50))


def joint(collection: Collection) -> Html:
    """The joint view of Eq. 1 and 2."""

    def one(scene: Scene) -> Html:
        usual = joint_grid(scene)
        if usual is None:
            return NOTHING
        panels = [("as in the paper", join(grid_table(usual), _deployed(threshold_grid(scene))))]
        whole = scene_grid(scene, usual.columns, every)
        if len(whole.lines) > len(usual.lines):
            panels.append(("all", join(grid_table(whole), _deployed(threshold_grid(scene, every)))))
        return switch("Detectors", panels)

    body = by_scene(collection, one)
    text = (
        "Classification and detection at once (Eq. 1 and 2 of the paper). In %, weighted over clients: "
        f"{AT_IN}. IN-C shows known classes, so what is rejected of it is lost; accuracy is that of what passes. "
        "The last column asks the detector to tell OUT from IN and IN-C together."
    )
    return join(lead(text), body) if body else NOTHING


def _deployed(grid: Grid | None) -> Html:
    """What thresholds reject that could be set before any test image is seen; nothing where there are none."""
    if grid is None:
        return NOTHING
    text = f"In %, weighted over clients: {AT_SET_ASIDE}. Of images like those, 5 % would be rejected."
    return h("div", h("h3", "Thresholds in deployment"), lead(text), grid_table(grid), class_="deployed")


def corruptions(collection: Collection) -> Html:
    """Accuracy on each kind of shift, by method and by severity."""
    style = styles(collection)

    def one(scene: Scene) -> Html:
        kinds, levels = shifts(scene), severities(scene)
        if not kinds:
            return NOTHING
        parts = [_by_method(scene, kinds)]
        if len(levels) > 1:
            lines = [Series(g.label, severity_curve(scene, g.label, levels), style[g.label]) for g in scene.groups]
            chart = line_chart("accuracy by severity", lines, x_label="severity")
            note = "mean over corruptions; 0 is the clean test set"
            parts.append(charts([figure("Accuracy by severity, %", chart, note)], method_legend(scene, style)))
            parts.append(h("h3", "By corruption and severity"))
            heat = [(group.label, _by_severity(scene, group.label, kinds, levels)) for group in scene.groups]
            parts.append(switch("Method", heat))
        return join(parts)

    body = by_scene(collection, one)
    text = "Accuracy in %, weighted over clients; first the mean over severities. The best of a line is bold. "
    text += _MARKED if "†" in body else ""
    return join(lead(text), body) if body else NOTHING


def _by_method(scene: Scene, kinds: Sequence[str]) -> Html:
    methods = scene.report.methods()
    settings = {group.label: {} if group.flower else group.settings for group in scene.groups}
    # What is not finished is no better than what is.
    ready = [method for method in methods if method not in scene.unfinished] or methods
    rows, compared = [], set()
    for kind in kinds:
        cells = {}
        for method in methods:
            values = corruption_values(scene, method, kind)
            printed = published(settings[method], metric="accuracy", split="in-c", corruption=kind) if values else None
            cells[method] = Cell(tuple(values), printed)
            compared |= {method} if printed else set()
        found = [f"{cells[method].mean:.1f}" for method in ready if cells[method].values]
        several = sum(bool(cell.values) for cell in cells.values()) > 1
        best = max(found, key=float, default="") if several else ""
        row = [Shown(spoken(kind))]
        for method, cell in cells.items():
            if cell.values:
                content = join(number_text(cell.mean, cell.deviation), published_text(cell))
                row.append(Shown(content, cell.mean, best=method in ready and f"{cell.mean:.1f}" == best))
            else:
                row.append(EMPTY)
        rows.append(row)
    away = {
        group.label for group in scene.groups
        if group.unfinished or (group.label in compared and departures(group.settings))
    }  # fmt: skip
    return table(["shift", *(f"{method}†" if method in away else method for method in methods)], rows)


def _by_severity(scene: Scene, method: str, kinds: Sequence[str], levels: Sequence[int]) -> Html:
    rows = []
    for kind in kinds:
        row = [Shown(spoken(kind))]
        for level in levels:
            values = corruption_values(scene, method, kind, level)
            mean = 100 * statistics.fmean(values) if values else 0.0
            row.append(Shown(f"{mean:.1f}", mean, tint=mean) if values else EMPTY)
        rows.append(row)
    return table(["corruption", *(f"severity {level}" for level in levels)], rows, class_="dense")
