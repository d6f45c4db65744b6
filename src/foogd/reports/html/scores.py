"""Sections of single answers: how scores are spread, ROC, maps of the features."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...metrics import auroc, fpr_at_tpr, threshold_at_tpr
from ...runs.predictions import Samples, SampleSet
from ...tables.grid import detector_name
from ...tables.results import paper_detector
from ..collection import Collection, Group, Record, Scene
from ..tsne import feature_map, lacking
from .blocks import NOTHING, by_scene, charts, figure, fine, kind_legend, kinds_of, lead, switch
from .charts import histogram, map_chart, roc_chart, roc_points
from .markup import Html, h, join


def scores(collection: Collection) -> Html:
    """Scores of IN, IN-C and OUT with the threshold, and ROC, for each method; a menu chooses the detector."""

    def one(scene: Scene) -> Html:
        have = [(group, record) for group in scene.groups if (record := group.answered) is not None]
        if not have:
            return NOTHING
        kinds = kinds_of(record for _, record in have)
        names = dict.fromkeys(name for _, r in have if r.samples is not None for name in r.samples.detectors())
        panels = [("as in the paper", _cards(have, kinds, paper_detector))]
        for name in names:
            only = _cards(have, kinds, lambda method, known, name=name: name if name in known else None)  # type: ignore[misc]
            panels.append((detector_name(name), only))
        missing = [group.label for group in scene.groups if group not in [found for found, _ in have]]
        note = fine(f"Without single answers: {', '.join(missing)}.") if missing else None
        body = switch("Detector", panels)
        return h("div", body, kind_legend(kinds), note, class_="charts") if body else NOTHING

    body = by_scene(collection, one)
    if not body:
        return lead(_without_answers(collection.records))
    text = (
        "How the scores of IN, IN-C and each OUT set are spread, with the threshold that 95 % of the IN test images "
        "pass; and ROC of IN against OUT, where the upright line marks 5 % of IN rejected. One seed a method, the "
        "images of all clients pooled and one threshold for all: AUROC, FPR95 and the share rejected may differ from "
        "those in the tables above, which are weighted over clients, each with a threshold of its own."
    )
    return join(lead(text), body)


def _without_answers(records: Sequence[Record]) -> Html:
    """Why there is nothing to draw, and what helps."""
    here = [record for record in records if not record.flower]
    words: list[str] = []
    if here:
        done = next((record for record in here if record.finished), here[0])
        words += [
            f"{'These runs' if here == records else 'Runs of the simulator'} hold no single answers (older runs, or "
            "unfinished ones). On a finished run, ",
            h("code", f"foogd evaluate {done.folder}"),
            " makes them. ",
        ]
    if len(here) < len(records):
        words.append("Runs on Flower have no single answers: labels and predictions of test images stay on the nodes.")
    return join(words)


def _cards(
    have: Sequence[tuple[Group, Record]],
    kinds: dict[str, str],
    choose: Callable[[str, Sequence[str]], str | None],
) -> Html:
    cards = []
    for group, record in have:
        name = choose(group.label, record.samples.detectors()) if record.samples is not None else None
        if record.samples is not None and name is not None:
            cards.append(_card(group.label, record.seed, record.samples, name, kinds))
    return h("div", cards, class_="cards") if any(cards) else NOTHING


def _card(label: str, seed: int, samples: Samples, name: str, kinds: dict[str, str]) -> Html:
    """Numbers in words, the histogram and the ROC of one method with one detector."""
    inside, shifted = (_pooled(sets, name) for sets in (samples.of("in"), samples.shifted()))
    outside = {one.name: one.pooled(name).double().numpy() for one in samples.of("out")}
    if not len(inside) or not all(np.isfinite(part).all() for part in (inside, shifted, *outside.values())):
        return NOTHING
    spread = [
        ("IN", "in", inside),
        *([("IN-C", "inc", shifted)] if len(shifted) else []),
        *((out, kinds[out], part) for out, part in outside.items()),
    ]
    tau = threshold_at_tpr(inside)
    lines = [
        h("tr", h("th", out, scope="row"), h("td", f"{100 * auroc(inside, part):.1f}"),
          h("td", f"{100 * fpr_at_tpr(inside, part):.1f}"))
        for out, part in outside.items()
    ]  # fmt: skip
    heads = h("thead", h("tr", h("th", "OUT"), h("th", "AUROC"), h("th", "FPR95")))
    share = f"{100 * float((shifted > tau).mean()):.1f}\u00a0%" if len(shifted) else ""
    rejected = f"Pooled: τ rejects {share} of IN-C." if share else None
    facts = h(
        "div", h("strong", label), h("span", f"{detector_name(name)}, seed {seed}. ", rejected, class_="note"),
        h("table", heads, h("tbody", lines), class_="small") if lines else None, class_="about",
    )  # fmt: skip
    title = f"scores of {label}, {detector_name(name)}"
    curves = [(out, kinds[out], roc_points(inside, part)) for out, part in outside.items()]
    roc = roc_chart(f"ROC of {label}, {detector_name(name)}", curves) if curves else None
    return h("div", facts, h("figure", histogram(title, spread, tau)), h("figure", roc) if roc else None, class_="card")


def _pooled(sets: Sequence[SampleSet], name: str) -> np.ndarray:
    parts = [one.pooled(name).double().numpy() for one in sets]
    return np.concatenate(parts) if parts else np.zeros(0)


def maps(collection: Collection, most: int, tell: Callable[[str], None]) -> Html:
    """t-SNE of features, coloured by kind or by class."""
    wanted = [(s, g, r) for s in collection.scenes for g in s.groups if (r := g.answered) is not None]
    if not wanted or most == 0:
        return NOTHING
    if (why := lacking()) is not None:
        tell(f"Left out: {why}")
        return lead(f"Left out: {why}.")
    kinds = kinds_of(record for _, _, record in wanted)
    drawn: dict[int, list[Html]] = {}
    for number, (scene, group, record) in enumerate(wanted[:most], start=1):
        tell(f"t-SNE {number} of {min(most, len(wanted))}: {group.label}")
        found = feature_map(record.samples) if record.samples is not None else None
        if found is not None:
            style = [kinds[name] for name in found.names]
            chart = map_chart(f"map of the features of {group.label}", found.places, style, found.labels, found.names)
            drawn.setdefault(id(scene), []).append(figure(group.label, chart, f"seed {record.seed}"))
    body = by_scene(collection, lambda scene: charts(drawn.get(id(scene), []), kind_legend(kinds, dots=True)))
    if not body:
        return NOTHING
    options = (h("option", "IN, IN-C, OUT", value="kind"), h("option", "class", value="class"))
    choice = h("label", h("span", "Colour"), h("select", options, data_paint=True, autocomplete="off"), class_="menu")
    left = len(wanted) - most
    more = f" {left} more were left out; --maps N draws more." if left > 0 else ""
    text = (
        "t-SNE of what the backbone makes of a few test images. Dots are IN, squares IN-C, crosses OUT. Distances "
        f"between far groups mean little. Classes share ten colours.{more}"
    )
    return join(lead(text), h("div", choice, body, class_="painted", data_paint="kind"))
