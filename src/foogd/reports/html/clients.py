"""Sections about clients: who holds what, how well each is served, what travels and how long it takes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from ...data.federation import client_labels
from ..collection import Collection, Scene
from ..curves import client_accuracies
from .blocks import NOTHING, by_scene, charts, figure, fine, lead, styles
from .charts import heat_chart, strip_chart
from .markup import Html, join
from .tables import Shown, table

MIB = 2**20
MOST_CLASSES = 24  # more do not fit as numbers


def partition(collection: Collection) -> Html:
    """Training images by client and class."""

    def one(scene: Scene) -> Html:
        record = next((r for g in scene.groups for r in g.records if r.partition.get("counts")), None)
        if record is None:
            return NOTHING
        counts = np.array(record.partition["counts"])
        names = record.partition.get("classes") or [str(c) for c in range(counts.shape[1])]
        seeds = {r.seed for g in scene.groups for r in g.records}
        stay = all(group.clients_stay for group in scene.groups)
        text = f"Seed {record.seed}; other seeds share the images out in another way."
        text = text if len(seeds) > 1 and not stay else ""
        if counts.shape[1] > MOST_CLASSES:
            note = f"{counts.shape[0]} clients, {counts.shape[1]} classes, at most {counts.max()} images. {text}"
            return charts([figure("Training images", heat_chart("training images by client and class", counts), note)])
        labels = client_labels(record.partition.get("client_names", ()), len(counts))
        return join(_counts(counts, names, labels), fine(text) if text else None)

    body = by_scene(collection, one)
    return (
        join(lead("Training images of each client by class. A fuller shade is more images."), body) if body else NOTHING
    )


def _counts(counts: np.ndarray, names: Sequence[str], labels: Sequence[str]) -> Html:
    largest = max(1, int(counts.max()))
    rows = [
        [
            Shown(labels[client], client),
            Shown(str(sum(row)), sum(row)),
            *(Shown(str(n) if n else "·", n, tint=100 * n / largest) for n in row),
        ]
        for client, row in enumerate(counts.tolist())
    ]
    return table(["client", "all", *map(str, names)], rows, class_="dense")


def clients(collection: Collection) -> Html:
    """Every client's accuracy, a line a method."""
    style = styles(collection)

    def one(scene: Scene) -> Html:
        figures = []
        alone = all(group.clients_stay or len(group.records) == 1 for group in scene.groups)
        marks = "a client" if alone else "for each client and seed"
        for split, title in (("in", "ACC-IN"), ("in-c", "ACC-IN-C")):
            rows = []
            for group in scene.groups:
                values = client_accuracies(group, split)
                mean = scene.report.values(method=group.label, metric="accuracy", split=split)
                if values and mean:
                    rows.append((group.label, style[group.label], values, 100 * statistics.fmean(mean)))
            if any(len(values) > 1 for _, _, values, _ in rows):
                chart = strip_chart(f"{title} of every client", rows, x_label=f"{title} of a client, %")
                figures.append(figure(f"{title}, %", chart, f"one mark {marks}; upright: the weighted mean"))
        return charts(figures)

    body = by_scene(collection, one)
    text = "A mean over clients hides who is served badly."
    return join(lead(text), body) if body else NOTHING


def cost(collection: Collection) -> Html:
    """Communication and seconds a round."""

    def one(scene: Scene) -> Html:
        rows = []
        for group in scene.groups:
            lines = [line for record in group.records for line in record.rounds]
            if not lines:
                continue
            runs, participants = len(group.records), sum(len(line["participants"]) for line in lines) or 1
            down, up = (sum(line[key] for line in lines) / MIB for key in ("bytes_down", "bytes_up"))
            seconds = [line["seconds"] for line in lines]
            places = (r.environment.get("gpu") or r.environment.get("device") or "?" for r in group.records)
            rows.append(
                [
                    Shown(group.label),
                    Shown(", ".join(dict.fromkeys(map(str, places)))),
                    Shown(f"{down / participants:.2f}", down / participants),
                    Shown(f"{up / participants:.2f}", up / participants),
                    Shown(f"{(down + up) / runs:,.0f}", (down + up) / runs),
                    Shown(f"{statistics.median(seconds):.2f}", statistics.median(seconds)),
                    Shown(duration(sum(seconds) / runs), sum(seconds) / runs),
                ]
            )
        heads = ("method", "device", "MiB down", "MiB up", "MiB in all", "s a round", "training")
        return table(heads, rows, words=2) if rows else NOTHING

    body = by_scene(collection, one)
    text = (
        "Down and up: one participant in one round. In all: everything that travelled in a run. Seconds: the median "
        "round, with whatever else the machine did."
    )
    return join(lead(text), body) if body else NOTHING


def duration(seconds: float) -> str:
    """Seconds in the unit that people would use."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
