"""The grids of a report: which columns and lines, and how many images stand behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..data.federation import LEFT_OUT
from ..evaluation.rows import Row
from ..tables.grid import Grid, Measure
from ..tables.paper import DOMAINS, OF_NODES, departures
from ..tables.results import Report, paper_detector
from .collection import Collection, Scene


def scene_grid(
    scene: Scene,
    columns: Sequence[Measure],
    chosen: Callable[[str, Sequence[str]], Sequence[str]],
    scope: str = "weighted",
) -> Grid:
    """Numbers of a scene beside the published ones, with marks where these are not to be compared.

    What is printed is compared with means over clients, not with what is pooled.
    """
    return scene.report.grid(
        columns,
        chosen,
        settings={group.label: group.settings for group in scene.groups} if scope == "weighted" else None,
        departs={group.label: departures(group.settings) for group in scene.groups},
        unfinished=scene.unfinished,
        withheld={group.label: OF_NODES for group in scene.groups if group.flower},
        scope=scope,
    )


def every(method: str, known: Sequence[str]) -> Sequence[str]:
    """All detectors."""
    return known


def usual_detectors(method: str, known: Sequence[str]) -> list[str]:
    name = paper_detector(method, known)
    return [name] if name else []


def paper_grid(scene: Scene) -> Grid:
    """The results in the paper's layout: every method with the detector that the paper uses for it."""
    return scene_grid(scene, scene.report.paper_columns(), usual_detectors)


def domain_means(collection: Collection) -> list[tuple[str, Grid]]:
    """Title and means over the domains left out, where runs differ in `leave_out`; of seeds that have every domain."""
    alike: dict[str, list[Scene]] = {}
    for scene in collection.scenes:
        if dict(scene.setting).get("leave_out"):
            alike.setdefault(repr([pair for pair in scene.setting if pair[0] != "leave_out"]), []).append(scene)
    merged = [(scenes, _in_every(scenes)) for scenes in alike.values() if len(scenes) > 1]
    return [_domain_mean(scenes, report) for scenes, report in merged if report.rows]


def _domain_mean(scenes: Sequence[Scene], merged: Report) -> tuple[str, Grid]:
    """Title and numbers of one table of means; what a domain has no number of stays empty."""
    domains = [str(dict(scene.setting)["leave_out"]) for scene in scenes]
    groups = [group for scene in scenes for group in scene.groups]
    whole = Report.of(row for scene in scenes for row in scene.report.rows)
    # Averages are printed over all domains; over fewer there is nothing to compare with.
    over = {"leave_out": "all" if set(domains) == DOMAINS else "some"}
    grid = merged.grid(
        merged.paper_columns(),
        lambda method, known: usual_detectors(method, whole.known_detectors.get(method, [])),
        settings={g.label: {**g.settings, **over} for g in groups},
        departs={g.label: departures(g.settings) for g in groups},
        unfinished={g.label: g.unfinished for g in sorted(groups, key=lambda group: bool(group.unfinished))},
        withheld={g.label: OF_NODES for g in groups if g.flower},
    )
    rest = scenes[0].title_without("leave_out")
    return f"{rest}{', ' if rest else ''}mean over leave_out = {', '.join(domains)}", grid


def _in_every(scenes: Sequence[Scene]) -> Report:
    """The rows of what every scene has of a method and seed: their mean is the mean over scenes."""

    def about(row: Row) -> tuple[object, ...]:
        # What is shifted is another set in every scene: the domain left out.
        name = row.dataset if row.split == "out" else ""
        return row.method, row.seed, row.scope, row.metric, row.split, row.detector, name

    common = set.intersection(*({about(row) for row in scene.report.rows} for scene in scenes))
    return Report.of(row for scene in scenes for row in scene.report.rows if about(row) in common)


def joint_grid(scene: Scene) -> Grid | None:
    """The joint view with the paper's detectors; None where it was not measured."""
    columns = scene.report.joint_columns()
    return scene_grid(scene, columns, usual_detectors) if columns else None


def threshold_grid(
    scene: Scene, chosen: Callable[[str, Sequence[str]], Sequence[str]] = usual_detectors
) -> Grid | None:
    """What thresholds from images set aside reject, with the paper's detectors; None where none were set aside."""
    columns = scene.report.threshold_columns()
    grid = scene_grid(scene, columns, chosen)
    lines = tuple(line for line in grid.lines if any(cell.values for cell in line.cells))
    return replace(grid, lines=lines) if lines else None


def images_tested(scene: Scene) -> str:
    """How many test images stand behind a table's numbers, as far as its runs know; else empty."""
    records = [record for group in scene.groups for record in group.records]
    shown_to = {record.folder: 1 if record.flower else max(1, record.clients) for record in records}
    found: dict[str, dict[tuple[str | None, int | None], set[int]]] = {}
    outs: dict[str, set[int]] = {}
    for record in records:
        for row in record.rows:
            if row.scope != "weighted" or row.round != record.last_round:
                continue
            # Every client sees a domain left out and the OUT sets whole, so each image counts once for each of them.
            whole, rest = divmod(row.weight, shown_to[record.folder])
            if row.metric == "accuracy":
                unseen = (row.corruption or "").startswith(LEFT_OUT)
                name = f"of {row.dataset} (IN-C)" if unseen else row.split.upper()
                count = int(whole if unseen else row.weight)
                found.setdefault(name, {}).setdefault((row.corruption, row.severity), set()).add(count)
            elif (row.metric, row.split) == ("rejected_calibrated", "out") and not rest:
                outs.setdefault(row.dataset, set()).add(int(whole))
    told = []
    for name, kinds in found.items():
        many = f" in each of {len(kinds)} corruptions and severities" if len(kinds) > 1 else ""
        told.append(f"{_range(set.union(*kinds.values()))} {name}{many}")
    sentences = [f"Test images: {listed(told)}."] if told else []
    unknown = [f"{count} of {name}" for name, count in _out_images(scene, outs).items()]
    on_flower = any(group.flower for group in scene.groups)
    if unknown:
        sentences.append(f"OUT images: {listed(unknown)}{'' if on_flower else ', all of them for every client'}.")
    if sentences and on_flower:
        sentences.append("Images of all nodes are added up.")
    return " ".join(sentences)


def _out_images(scene: Scene, counted: Mapping[str, set[int]]) -> dict[str, str]:
    """For each OUT set how many images it has: from rows that count them, else from the answers that are kept."""
    found = {}
    for name in scene.report.out_sets():
        whole, kept = set(counted.get(name, ())), [0]
        for group in scene.groups:
            samples = group.answered.samples if group.answered is not None else None
            for one in samples.of("out") if samples is not None else ():
                if one.name == name and len(one):
                    images = len(set(one.index.tolist()))
                    kept.append(images)
                    # Of a large set a choice of images is kept, and places between them are empty.
                    whole |= {images} if int(one.index.max()) + 1 == images else set()
        if whole:
            found[name] = _range(whole)
        elif max(kept):
            found[name] = f"at least {max(kept):,}"
    return found


def _range(counts: set[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
