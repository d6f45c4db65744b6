"""Curves over rounds, severities and settings as numbers, for the page and for figures in files."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..tables.results import paper_detector
from .collection import Collection, Group, Scene, in_words

Points = list[tuple[float, float]]


def evaluated_curves(scene: Scene) -> dict[str, dict[str, Points]]:
    """measure → method → (round, mean in %) over the evaluated rounds; AUROC with the paper's detector."""
    chosen = {method: paper_detector(method, names) for method, names in scene.history.known_detectors.items()}
    found: dict[str, dict[str, dict[int, list[float]]]] = {}
    for row in scene.history.rows:
        if row.scope != "weighted":
            continue
        if row.metric == "accuracy":
            title = "ACC-IN, %" if row.split == "in" else "ACC-IN-C, %"
        elif row.metric == "auroc" and row.detector == chosen.get(row.method):
            title = "AUROC, mean over OUT sets, %"
        else:
            continue
        found.setdefault(title, {}).setdefault(row.method, {}).setdefault(row.round, []).append(row.value)
    return {
        title: {
            method: [(float(round), 100 * statistics.fmean(values)) for round, values in sorted(rounds.items())]
            for method, rounds in methods.items()
        }
        for title, methods in sorted(found.items())
    }


def round_curves(scene: Scene, read: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> dict[str, dict[str, Points]]:
    """key → method → (round, mean over runs) of what `read` finds in the lines of rounds.jsonl, as losses or drift."""
    found: dict[str, dict[str, Points]] = {}
    keys = dict.fromkeys(
        key for group in scene.groups for r in group.records for line in r.rounds for key in read(line)
    )
    for key in keys:
        for group in scene.groups:
            points = _means(group, lambda line, key=key: read(line).get(key))  # type: ignore[misc]
            if points:
                found.setdefault(key, {})[group.label] = points
    return found


def _means(group: Group, value: Callable[[Mapping[str, Any]], Any]) -> Points:
    found: dict[int, list[float]] = {}
    for record in group.records:
        for line in record.rounds:
            number = value(line)
            if isinstance(number, int | float) and math.isfinite(number):
                found.setdefault(line["round"], []).append(float(number))
    return [(float(round), statistics.fmean(values)) for round, values in sorted(found.items())]


def severity_curve(scene: Scene, method: str, levels: Sequence[int]) -> Points:
    """(severity, accuracy in %): the mean over corruptions, with the clean accuracy as severity 0."""
    clean = scene.report.values(method=method, metric="accuracy", split="in")
    points = [(0.0, 100 * statistics.fmean(clean))] if clean else []
    for level in levels:
        values = [row.value for row in scene.report.rows_of(method, "accuracy", "in-c") if row.severity == level]
        if values:
            points.append((float(level), 100 * statistics.fmean(values)))
    return points


def severities(scene: Scene) -> list[int]:
    """The severities that IN-C was tested at."""
    return sorted({row.severity for row in scene.report.rows if row.split == "in-c" and row.severity is not None})


def shifts(scene: Scene) -> list[str]:
    """The kinds of IN-C: corruptions, or domains that nobody trained on."""
    rows = (row for row in scene.report.rows if row.split == "in-c" and row.metric == "accuracy")
    return list(dict.fromkeys(row.corruption or row.dataset for row in rows))


def corruption_values(scene: Scene, method: str, shift: str, severity: int | None = None) -> list[float]:
    """Accuracy on one kind of IN-C, one value a seed: the mean over severities, or one of them."""
    by_seed: dict[int, list[float]] = {}
    for row in scene.report.rows_of(method, "accuracy", "in-c"):
        if (row.corruption or row.dataset) == shift and severity in (None, row.severity):
            by_seed.setdefault(row.seed, []).append(row.value)
    return [statistics.fmean(found) for _, found in sorted(by_seed.items())]


def client_accuracies(group: Group, split: str) -> list[float]:
    """Accuracy of each client in %, the mean over test sets: one value for each client and seed.

    Where clients are domains, a client is the same one in every seed, and its value is the mean over seeds.
    """
    found: dict[tuple[int, int], list[float]] = {}
    for record in group.records:
        for row in record.rows:
            if (row.scope, row.split, row.metric) == ("client", split, "accuracy") and row.client is not None:
                found.setdefault((0 if group.clients_stay else record.seed, row.client), []).append(row.value)
    return [100 * statistics.fmean(values) for _, values in sorted(found.items())]


def sensitivities(collection: Collection) -> dict[str, dict[str, dict[str, Points]]]:
    """setting → measure → line → (value, mean in %), for settings that runs have at least two numbers of."""
    found: dict[str, dict[str, dict[str, Points]]] = {}
    own = [
        (scene, group, dict((*group.setting, *group.variant))) for scene in collection.scenes for group in scene.groups
    ]
    for key in dict.fromkeys(key for _, _, settings in own for key, value in settings.items() if _is_number(value)):
        curves: dict[str, dict[str, Points]] = {}
        for scene, group, settings in own:
            if not _is_number(settings.get(key)):
                continue
            rest = [in_words(name, value) for name, value in settings.items() if name != key]
            for title, value in _usual_numbers(scene, group).items():
                line = curves.setdefault(title, {}).setdefault(", ".join([group.name, *rest]), [])
                line.append((float(settings[key]), value))
        curves = {
            title: {name: sorted(points) for name, points in lines.items() if len({p[0] for p in points}) > 1}
            for title, lines in curves.items()
        }
        curves = {title: lines for title, lines in curves.items() if lines}
        if curves:
            found[key] = curves
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _usual_numbers(scene: Scene, group: Group) -> dict[str, float]:
    """ACC-IN, ACC-IN-C and the mean AUROC over OUT sets of a group, with the paper's detector, in %."""
    detector = paper_detector(group.label, scene.report.known_detectors.get(group.label, []))
    wanted = (
        ("ACC-IN, %", "accuracy", "in", None),
        ("ACC-IN-C, %", "accuracy", "in-c", None),
        ("AUROC, mean over OUT sets, %", "auroc", "out", detector),
    )
    numbers = {}
    for title, metric, split, name in wanted:
        values = scene.report.values(method=group.label, metric=metric, split=split, detector=name)
        if values:
            numbers[title] = 100 * statistics.fmean(values)
    return numbers
