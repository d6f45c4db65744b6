"""What a report's runs have shown, in plain sentences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from ..core.errors import InputError
from ..data.federation import client_labels
from ..methods import METHODS, make_method, method_fields, split_name
from ..presets.loader import profile_of
from ..runs.federation import skipped_sentence
from ..tables.grid import Cell, Measure, detector_name
from ..tables.results import Report, reported_detector
from .collection import Collection, Record, Scene, shown
from .grids import listed, paper_grid, usual_detectors

# Which threshold a number is measured at.
AT_IN = "each client's threshold lets 95 % of its IN test images pass"
AT_SET_ASIDE = "each client's threshold lets 95 % of its training images set aside pass; no test image has a part in it"
HARD = 80.0  # an AUROC below it is called hard, in %
NEAR = 2.0  # points from a published number that still count as near
FEW = 20  # images of an OUT set: with fewer, each of them moves FPR95 by more than 5 points


@final
@dataclass(frozen=True)
class Finding:
    """A heading of a few words and one or two sentences; `tone` is found, weak or note."""

    title: str
    text: str
    tone: str = "found"


@final
@dataclass(frozen=True)
class Entry:
    """One number with whose it is."""

    method: str
    detector: str
    cell: Cell
    unfinished: str = ""  # how far its runs are, where they are not finished

    @property
    def who(self) -> str:
        name = f"{self.method} with {detector_name(self.detector)}" if self.detector else self.method
        return f"{name} ({self.unfinished})" if self.unfinished else name


def findings(collection: Collection) -> list[Finding]:
    """The best of each measure, the price of a threshold, what is weak, and what to be careful with."""
    several = len(collection.scenes) > 1
    found = [one for scene in collection.scenes for one in (_short(scene) if several else _long(scene))]
    return [*found, *_weak(collection), *_against_the_paper(collection), *_cautions(collection)]


def _short(scene: Scene) -> Iterator[Finding]:
    """One finding a table, for reports with several."""
    report = scene.report
    clean, shifted = (_ranked(scene, Measure("accuracy", split)) for split in ("in", "in-c"))
    parts = [
        f"{ranked[0].who} classifies {ranked[0].cell.text()} % of the {words} images{_lead(ranked)}"
        for words, ranked in (("clean", clean), ("shifted", shifted))
        if ranked
    ]
    winners: dict[str, list[str]] = {}
    alone = True
    for name in report.out_sets():
        ranked = _ranked(scene, Measure("auroc", "out", name, detected=True))
        if ranked:
            alone = alone and len(ranked) == 1
            winners.setdefault(ranked[0].who, []).append(f"{name} ({ranked[0].cell.mean:.1f}{_beside(ranked)})")
    best = "" if alone else " best"
    parts += [f"{who} finds {listed(sets)}{best} (AUROC)" for who, sets in winners.items()]
    sentences = ["; ".join(parts) + "."] if parts else []
    sentences += [one.text for one in _price(scene)]
    if sentences:
        yield Finding(scene.title, " ".join(sentences))


def _long(scene: Scene) -> Iterator[Finding]:
    report = scene.report
    clean, shifted = (_ranked(scene, Measure("accuracy", split)) for split in ("in", "in-c"))
    if clean:
        text = f"{clean[0].who} classifies {clean[0].cell.text()} % of the clean test images"
        yield Finding("Clean images", f"{text}{_lead(clean)}.")
    if shifted:
        best = shifted[0]
        text = f"{best.who} keeps {best.cell.text()} % on corrupted or shifted images{_lead(shifted)}."
        own = next((entry for entry in clean if entry.method == best.method), None)
        if own is not None:
            lost = own.cell.mean - best.cell.mean
            where = f"{abs(lost):.1f} points {'below' if lost > 0 else 'above'}" if abs(lost) >= 0.05 else "the same as"
            text += f" That is {where} its clean accuracy."
        yield Finding("Shifted images", text)
    for name in report.out_sets():
        ranked = _ranked(scene, Measure("auroc", "out", name, detected=True))
        if not ranked:
            continue
        best = ranked[0]
        fpr = report.values(method=best.method, metric="fpr95", split="out", detector=best.detector, dataset=name)
        # The best of many, chosen by the test images themselves: the number of candidates belongs to it.
        text = f"{best.who} separates them: AUROC {best.cell.text()}"
        if len(ranked) > 1:
            text = f"Of {len(ranked)} pairs of method and detector, {best.who} separates them best: AUROC "
            text += best.cell.text() + _beside(ranked)
        if fpr:
            text += f", and {Cell(tuple(fpr)).text()} % of them pass where 95 % of IN do"
        reported = _of_the_paper(ranked)
        if reported and reported[0].who != best.who:
            text += f". Of the detectors that the paper uses, the best is {reported[0].who} ({reported[0].cell.text()})"
        yield Finding(f"Unknown images: {name}", f"{text}.")
    yield from _price(scene)


def ranking(report: Report, measure: Measure, unfinished: Mapping[str, str] | None = None) -> list[Entry]:
    """All numbers of a measure, the best first; what is `unfinished` only where nothing is finished."""
    grid = report.grid([measure], lambda method, known: known if measure.detected else [""], unfinished=unfinished)
    lines = [line for line in grid.lines if line.cells[0].values]
    ready = [line for line in lines if not line.unfinished] or lines
    entries = [Entry(line.method, line.detector, line.cells[0], line.unfinished) for line in ready]
    return sorted(entries, key=lambda entry: entry.cell.mean, reverse=not measure.smaller_is_better)


def _ranked(scene: Scene, measure: Measure) -> list[Entry]:
    return ranking(scene.report, measure, scene.unfinished)


def _of_the_paper(ranked: list[Entry]) -> list[Entry]:
    """Of each method the entry of the detector that the paper uses for it, where there is one."""
    return [entry for entry in ranked if entry.detector == reported_detector(entry.method)]


def _lead(ranked: list[Entry]) -> str:
    """How far the first is ahead of the second, and whether seeds differ by as much."""
    if len(ranked) < 2:
        return ""
    first, second = ranked[:2]
    if _is_level(ranked):
        return f", level with {second.who} ({second.cell.text()} %) within the deviation between seeds"
    lead = f"{abs(first.cell.mean - second.cell.mean):.1f}"
    return f", as much as {second.who}" if float(lead) == 0 else f", {lead} points more than {second.who}"


def _is_level(ranked: list[Entry]) -> bool:
    """Whether the first is no further ahead of the second than seeds are apart."""
    if len(ranked) < 2:
        return False
    first, second = (entry.cell for entry in ranked[:2])
    spread = math.hypot(first.deviation or 0.0, second.deviation or 0.0)
    return spread > 0 and abs(first.mean - second.mean) <= spread


def _beside(ranked: list[Entry]) -> str:
    """Who is level with the first, as far as seeds or printed numbers tell; else empty."""
    if len(ranked) < 2:
        return ""
    first, second = ranked[:2]
    level = _is_level(ranked) or f"{first.cell.mean:.1f}" == f"{second.cell.mean:.1f}"
    return f", level with {second.who}" if level else ""


def _price(scene: Scene) -> Iterator[Finding]:
    """What the threshold does to shifted images, for the detectors that the tables show."""
    # Chosen as in the tables, and not by the numbers that are told here.
    usual = {method: usual_detectors(method, known) for method, known in scene.report.known_detectors.items()}
    ranked = _ranked(scene, Measure("rejected", "in-c", detected=True))
    ranked = [entry for entry in ranked if entry.detector in usual[entry.method]]
    if not ranked:
        return
    least, most = ranked[0], ranked[-1]
    # The mean over clients, each with a threshold of its own: one for all pooled images rejects another share.
    text = (
        f"The threshold that 95 % of a client's IN test images pass rejects {least.cell.text()} % of IN-C for "
        f"{least.who}"
    )
    if most.who != least.who:
        text += f" and {most.cell.text()} % for {most.who}"
    text += ", weighted over clients. Without any effect of the shift it would be 5 %."
    yield Finding("The price of a threshold", " ".join([text, *_set_aside(scene.report, least, most)]))


def _set_aside(report: Report, *entries: Entry) -> Iterator[str]:
    """The same price at thresholds that no test image has a part in, where there are such."""
    told = []
    for entry in dict.fromkeys(entries):
        clean, shifted = (
            Cell(
                tuple(
                    report.values(
                        method=entry.method, metric="rejected_calibrated", split=split, detector=entry.detector
                    )
                )
            )
            for split in ("in", "in-c")
        )
        if clean.values and shifted.values:
            told.append(f"{clean.text()} % of IN and {shifted.text()} % of IN-C for {entry.who}")
    if told:
        yield f"Thresholds from training images set aside reject {listed(told)}."


def _weak(collection: Collection) -> Iterator[Finding]:
    """The hardest OUT set, detectors below chance, the corruption and the clients that suffer most."""
    several = len(collection.scenes) > 1
    hardest: list[tuple[float, str]] = []
    costs: list[tuple[float, str]] = []
    gaps: list[tuple[float, str]] = []
    pairs: list[Entry] = []
    for scene in collection.scenes:
        place = f" ({scene.title})" if several else ""
        for name in scene.report.out_sets():
            ranked = _ranked(scene, Measure("auroc", "out", name, detected=True))
            pairs += ranked
            if ranked:
                top = ranked[0].cell.mean
                hardest.append((top, f"The OUT set {name} stays hard to detect: the best AUROC is {top:.1f}{place}."))
        costs += _costs(scene, place)
        gaps += _gaps(scene, place)
    parts = [min(hardest)[1]] if hardest and min(hardest)[0] < HARD else []
    under = [entry for entry in pairs if entry.cell.mean < 50]
    if under:
        kinds = list(dict.fromkeys(detector_name(entry.detector) for entry in under))
        names = ", ".join(kinds[:4]) + (" and others" if len(kinds) > 4 else "")
        parts.append(f"In {len(under)} of {len(pairs)} cases a detector ranks OUT worse than chance ({names}).")
    parts += [min(costs)[1]] if costs else []
    parts += [max(gaps)[1]] if gaps and max(gaps)[0] > 0.1 else []
    if parts:
        yield Finding("Weak points", " ".join(parts), "weak")


def _costs(scene: Scene, place: str) -> list[tuple[float, str]]:
    """The corruption on which the method that is best on shifted images has the lowest accuracy."""
    shifted = _ranked(scene, Measure("accuracy", "in-c"))
    if not shifted:
        return []
    best = shifted[0].method
    by_kind: dict[str, list[float]] = {}
    for row in scene.report.rows_of(best, "accuracy", "in-c"):
        by_kind.setdefault(row.corruption or row.dataset, []).append(row.value)
    if len(by_kind) < 2:
        return []
    kind, values = min(by_kind.items(), key=lambda item: statistics.fmean(item[1]))
    mean = 100 * statistics.fmean(values)
    return [(mean, f"Of the shifts, {spoken(kind)} costs {best} most: {mean:.1f} % accuracy{place}.")]


def _gaps(scene: Scene, place: str) -> list[tuple[float, str]]:
    """How far the clients of each run are apart in accuracy."""
    found = []
    for group in scene.groups:
        for record in group.records:
            own = {
                row.client: row.value
                for row in record.rows
                if (row.scope, row.split, row.metric) == ("client", "in", "accuracy") and row.client is not None
            }
            if len(own) > 1:
                (worst, low), (best, high) = (choose(own.items(), key=lambda pair: pair[1]) for choose in (min, max))
                labels = client_labels(record.partition.get("client_names", ()), record.clients)
                one, other = (dict(enumerate(labels)).get(client, client) for client in (worst, best))
                text = (
                    f"Clients differ: with {group.label}, seed {record.seed}{place}, client {one} has "
                    f"{100 * low:.0f} % on its clean images and client {other} {100 * high:.0f} %."
                )
                found.append((high - low, text))
    return found


def spoken(name: str) -> str:
    """A name of the code as words."""
    return name.replace("_", " ")


def _against_the_paper(collection: Collection) -> Iterator[Finding]:
    cells, far, departing = [], 0, 0
    for scene in collection.scenes:
        grid = paper_grid(scene)
        for line in grid.lines:
            compared = [cell for cell in line.cells if cell.published is not None]
            if compared and line.marks:
                departing += 1
            elif compared:
                cells += compared
                far += sum(abs(cell.difference or 0.0) > NEAR for cell in compared)
    if cells:
        mean = statistics.fmean(abs(cell.difference or 0.0) for cell in cells)
        text = (
            f"{len(cells) - far} of {len(cells)} numbers lie within {NEAR:g} points of the published ones; "
            f"on average they are {mean:.1f} points away."
        )
        yield Finding("Against the paper", text)
    if departing:
        text = (
            f"{departing} lines with published numbers have other settings or are not finished (†): their differences "
            "say little."
        )
        yield Finding("Against the paper", text, "note")


def _cautions(collection: Collection) -> Iterator[Finding]:
    records = collection.records
    parts = []
    if all(len(group.records) == 1 for group in collection.groups):
        parts.append("Each method ran with one seed: small differences may be chance.")
    else:
        parts += [*_fewer_seeds(collection), *_without_numbers(collection)]
    adapting = list(dict.fromkeys(record.method for record in records if _adapts(record)))
    if adapting:
        one = len(adapting) == 1
        parts.append(
            f"{', '.join(adapting)} {'adapts' if one else 'adapt'} to the test stream, and every test set was a stream "
            f"of its own: what {'its' if one else 'their'} detectors tell apart may be streams rather than images."
        )
    if any(record.settings.get("generator") == "central" for record in records):
        parts.append("With generator=central the server trained on the images of all clients: no federation could.")
    unfinished = [record for record in records if not record.finished]
    if unfinished:
        some = ", ".join(f"{r.folder.name} ({r.last_round} of {r.settings['rounds']} rounds)" for r in unfinished[:3])
        more = f" and {len(unfinished) - 3} more" if len(unfinished) > 3 else ""
        parts.append(f"Not finished: {some}{more}; the last evaluated round is shown.")
    refused = {record.folder.name: sum(len(line["refused"]) for line in record.rounds) for record in records}
    refused = {name: count for name, count in refused.items() if count}
    if refused:
        parts.append(f"{sum(refused.values())} updates of clients were refused, in {len(refused)} of the runs.")
    leaks: dict[str, int] = {}
    for record in records:
        for name, count in record.partition.get("training_images_in_tests", {}).items():
            leaks[name] = max(leaks.get(name, 0), count)
    leaks = {name: count for name, count in leaks.items() if count}
    if leaks:
        named = ", ".join(f"{count} in {name}" for name, count in list(leaks.items())[:4])
        parts.append(f"Training images are in test sets: {named}.")
    skipped: dict[str, int] = {}
    for record in records:
        for name, count in record.partition.get("skipped", {}).items():
            skipped[name] = max(skipped.get(name, 0), count)
    if skipped:
        parts.append(skipped_sentence(skipped))
    few = _few_images(records)
    if few:
        named = ", ".join(f"{name} ({count})" for name, count in few.items())
        parts.append(f"OUT sets of fewer than {FEW} images, whose numbers mean little: {named}.")
    parts += collection.notes
    if parts:
        yield Finding("To keep in mind", " ".join(parts), "note")


def _few_images(records: Sequence[Record]) -> dict[str, int]:
    """The OUT sets with so few images that one of them moves AUROC by points, and how many they have."""
    found = {}
    for record in records:
        for one in record.samples.of("out") if record.samples is not None else ():
            images = len(set(one.index.tolist()))
            if 0 < images < FEW:
                found[one.name] = images
    return found


def _adapts(record: Record) -> bool:
    """Whether the run's method answered for an OUT image after it had seen others of its set.

    A method from a file of someone's own is not known here: a report runs no code of its runs.
    """
    if split_name(record.method)[0] not in METHODS:
        return False
    try:
        known = {"profile", *method_fields(record.method, profile_of(record.settings))}
        own = {key: value for key, value in record.settings.items() if key in known}
        method = make_method(record.method, own)
    except InputError:  # settings of another version, or changed by hand; their results can still be shown
        return False
    return method.adapts and any(row.split == "out" for row in record.rows)


def _fewer_seeds(collection: Collection) -> list[str]:
    """Which lines have fewer seeds than others."""
    counts = {
        f"{group.label} ({scene.title})" if scene.title else group.label: len(group.records)
        for scene in collection.scenes
        for group in scene.groups
    }
    most = max(counts.values())
    fewer = [f"{name} has {count}" for name, count in counts.items() if count < most]
    more = f" and {len(fewer) - 3} more have fewer" if len(fewer) > 3 else ""
    return [f"Not every line is a mean over {most} seeds: {', '.join(fewer[:3])}{more}."] if fewer else []


def _without_numbers(collection: Collection) -> list[str]:
    """Which runs lack a detector that other seeds of their line have: a model that has diverged gives no scores."""
    lacking = []
    for scene in collection.scenes:
        for group in scene.groups:
            own = [{row.detector for row in record.rows if row.round == record.last_round} for record in group.records]
            known = set.union(*own)
            for record, found in zip(group.records, own, strict=True):
                names = [detector_name(name) for name in record.settings["detectors"] if name in known - found]
                if names:
                    who = f"{group.label} ({scene.title})" if scene.title else group.label
                    lacking.append(f"{who}, seed {record.seed} ({_some(names)})")
    if not lacking:
        return []
    return [
        f"Detectors without numbers in some seeds, as where scores are NaN: {_some(lacking, '; ')}. Their means are "
        "over the other seeds alone, and may be too good."
    ]


def _some(words: Sequence[str], between: str = ", ") -> str:
    """The first three of the words, and how many more there are."""
    return between.join(words[:3]) + (f" and {len(words) - 3} more" if len(words) > 3 else "")


def headline(collection: Collection) -> str:
    """A title for the whole report."""
    methods = list(dict.fromkeys(group.name for group in collection.groups))
    # Of a path the name of the file is enough; a function is called file.py:name, a source may have a colon too.
    data = list(dict.fromkeys(shown(record.settings["data"]).rpartition("/")[2] for record in collection.records))
    what = methods[0] if len(methods) == 1 else f"{len(methods)} methods"
    return f"{what} on {', '.join(data[:3])}" + (" and others" if len(data) > 3 else "")
