"""Two runs side by side: what differs in their settings, and in their results by a paired bootstrap over test images.

A resample draws test images with replacement, the same ones for both runs: IN images, each with its corrupted copies,
and the images of every OUT set. Metrics of resamples are metrics with whole weights, so nothing is sorted again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from ..core.errors import InputError
from ..methods import shown_name
from ..presets.loader import read_run_settings
from ..runs.files import CONFIG, ENVIRONMENT, FLOWER, PARTITION, need_run, read_json, read_rounds, resume_command
from ..runs.predictions import Samples, read_samples
from ..tables.grid import Table, detector_name
from .bootstrap import TITLES, Side, Universe

USUAL = ("msp", "energy", "score_norm", "score_span_all")


@final
@dataclass(frozen=True)
class Difference:
    """One metric of two runs: its values, the 95 % interval of b − a, and how many resamples agree with its sign."""

    metric: str
    split: str
    dataset: str
    detectors: tuple[str, str]
    a: float
    b: float
    low: float
    high: float
    same_sign: float

    @property
    def difference(self) -> float:
        return self.b - self.a

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


@final
@dataclass(frozen=True)
class Comparison:
    """What two run folders have in common and what not."""

    settings: tuple[tuple[str, str, str], ...]
    environment: tuple[tuple[str, str, str], ...]
    results: tuple[Difference, ...]
    notes: tuple[str, ...]
    scope: str
    resamples: int
    images: int
    names: tuple[str, str]  # of the methods, as people read them

    def settings_table(self) -> Table:
        lines = (*self.settings, *((f"({key})", a, b) for key, a, b in self.environment))
        return Table("what differs", ("setting", "A", "B"), lines)

    def results_table(self) -> Table:
        lines = []
        for one in self.results:
            names = " : ".join(dict.fromkeys(detector_name(name) for name in one.detectors if name)) or "–"
            about = TITLES[one.metric] + ("" if one.metric == "auroc_joint" else f" {one.split.upper()}")
            numbers = (100 * value for value in (one.a, one.b, one.difference, one.low, one.high))
            a, b, difference, low, high = numbers
            mark = "*" if one.clear else ""
            lines.append(
                (about, names, one.dataset, f"{a:.1f}", f"{b:.1f}", f"{difference:+.1f}{mark}",
                 f"{low:+.1f} … {high:+.1f}", f"{one.same_sign:.0%}")
            )  # fmt: skip
        columns = ("metric", "detector", "data", "A", "B", "B − A", "95 % interval", "same sign")
        title = (
            f"in %, {self.scope} over clients; paired bootstrap over {self.images:,} test images, {self.resamples:,} "
            "resamples; * the interval leaves out 0"
        )
        return Table(title, columns, tuple(lines))


def compare_runs(
    a: Path,
    b: Path,
    *,
    detectors: Sequence[str | tuple[str, str]] | None = None,
    scope: str = "weighted",
    resamples: int = 1000,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Compare two run folders; `detectors` are names, or pairs (of a, of b) that may be written as "a:b".

    By default they are the usual ones that both have, or all. `tell` is told when the long part begins.
    """
    if scope not in ("weighted", "pooled"):
        raise InputError(f"scope {scope!r} is not known: use weighted or pooled")
    first, second = _settings(a), _settings(b)
    samples = _samples(a), _samples(b)
    notes = _check_comparable((a, b), samples, (first, second))
    known = [_usable(side) for side in samples]
    both = [name for name in known[0] if name in known[1]]
    usual = [name for name in both if name in USUAL] or both
    asked = list(detectors) if detectors is not None else [(name, name) for name in usual]
    pairs = [detector_pair(one, *known) if isinstance(one, str) else one for one in asked]
    if detectors is None and len(usual) < len(both):
        notes.append(f"not shown: {', '.join(name for name in both if name not in usual)} (--detector NAME shows one)")
    for pair in pairs:
        for folder, names, name in zip((a, b), known, pair, strict=True):
            if name not in names:
                held = ", ".join(names) or "none"
                raise InputError(f"{folder} has no scores of detector {name!r}: it has those of {held}")
    environments = _environment(a), _environment(b)
    tell("Resampling the test images ...")
    results = compare_samples(
        *samples, pairs=pairs, scope=scope, resamples=resamples, seed=seed, same_shift=_same_shift(first, second)
    )
    return Comparison(
        settings=_differing(first, second),
        environment=_differing(*environments),
        results=tuple(results),
        notes=tuple(notes),
        scope=scope,
        resamples=resamples,
        images=sum(len(columns) for columns in Universe(*samples, _same_shift(first, second)).groups.values()),
        names=(shown_name(first), shown_name(second)),
    )


def detector_pair(text: str, first: Collection[str], second: Collection[str]) -> tuple[str, str]:
    """`msp` for both runs, or `msp:score_norm` for the first and the second, by the detectors that each has.

    Detectors of files have a colon too: `my.py:fn`, `msp:my.py:fn`, `my.py:fn:msp`, `my.py:fn:my.py:fn`. The end of a
    path is enough where it leaves no doubt.
    """
    cuts = [place for place, letter in enumerate(text) if letter == ":"]
    ways = [(text, text), *((text[:cut], text[cut + 1 :]) for cut in cuts)]
    ways = [way for way in ways if all(_is_name(name) for name in way)]
    if not ways:
        raise InputError(f"--detector {text!r} is not of the form NAME or A:B, where a name may be file.py:fn")
    found = [(_held(a, first), _held(b, second)) for a, b in ways]
    whole = [(a, b) for a, b in found if a is not None and b is not None]
    if whole:
        return whole[0]
    # What fits best is what was meant; the caller says what is missing of it.
    best = max(range(len(ways)), key=lambda place: (sum(name is not None for name in found[place]), place))
    (a, b), (held_a, held_b) = ways[best], found[best]
    return held_a or a, held_b or b


def _is_name(text: str) -> bool:
    """Whether a detector may be called so."""
    file, _, name = text.rpartition(":")
    if ":" in text:
        return file.endswith(".py") and name.isidentifier()
    return bool(text) and not text.endswith(".py")


def _held(name: str, known: Collection[str]) -> str | None:
    """The one of the known detectors that is called so, or whose path ends so."""
    if name in known:
        return name
    ends = [other for other in known if ".py:" in name and other.endswith(f"/{name}")]
    return ends[0] if len(ends) == 1 else None


def _settings(folder: Path) -> dict[str, Any]:
    need_run(folder)
    return read_run_settings(folder / CONFIG)


def _samples(folder: Path) -> Samples:
    found = read_samples(folder)
    if found is None and (folder / FLOWER).is_file():
        raise InputError(
            f"{folder} was trained on Flower: labels and predictions of its test images stay on the nodes, so it "
            "cannot be compared image by image; foogd report shows it beside other runs"
        )
    if found is None:
        raise InputError(f"{folder} has no answers about single images: {_how_to_answer(folder)}")
    keys = [one.key for one in found.sets]
    twice = [key for key in keys if keys.count(key) > 1]
    if twice:  # earlier versions let an OUT set have the name of the IN data
        raise InputError(f"{folder} has two test sets called {twice[0]!r}, which cannot be told apart: train it again")
    return found


def _how_to_answer(folder: Path) -> str:
    """What makes the answers that a run lacks: they are kept after the last round."""
    done, wanted = len(read_rounds(folder)), _settings(folder)["rounds"]
    if isinstance(wanted, int) and done < wanted:
        return f"it is at round {done} of {wanted}, finish it with {resume_command(folder)}"
    return f"make them with foogd evaluate {folder}"


def _usable(samples: Samples) -> list[str]:
    """The detectors whose scores are numbers everywhere."""
    return [
        name for name in samples.detectors() if not any(bool(one.scores[name].isnan().any()) for one in samples.sets)
    ]


def _environment(folder: Path) -> dict[str, Any]:
    path = folder / ENVIRONMENT
    about = read_json(path) if path.is_file() else {}
    flat = {key: value for key, value in about.items() if not isinstance(value, Mapping)}
    versions = about.get("versions", {})
    if not isinstance(versions, Mapping):
        raise InputError(f"{path} is damaged: versions is of the type {type(versions).__name__}")
    return flat | {f"version of {name}": value for name, value in versions.items()}


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...]:
    keys = [key for key in dict.fromkeys([*first, *second]) if first.get(key) != second.get(key)]
    return tuple((key, str(first.get(key, "–")), str(second.get(key, "–"))) for key in keys)


def _same_shift(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether corruptions of one name and severity mean the same in both runs."""
    return first.get("constants") == second.get("constants")


def _check_comparable(
    folders: tuple[Path, Path], samples: tuple[Samples, Samples], settings: tuple[Mapping[str, Any], Mapping[str, Any]]
) -> list[str]:
    """Notes about what is left out; an error where nothing can be compared image by image."""
    inside = [side.of("in") for side in samples]
    for folder, sets in zip(folders, inside, strict=True):
        if not sets:
            raise InputError(f"{folder} has no answers about IN images, so there is nothing to compare")
    names = [sets[0].name for sets in inside]
    if names[0] != names[1]:
        about = f"{folders[0]} was tested on {names[0]}, {folders[1]} on {names[1]}"
        raise InputError(f"the runs are not comparable: {about}")
    hashes = [read_json(folder / PARTITION).get("content_hash") for folder in folders]
    if hashes[0] != hashes[1]:
        raise InputError(
            f"the runs are not comparable: {folders[0]} and {folders[1]} call their data {names[0]}, but trained on "
            "different images, so their test images differ too"
        )
    keys = [{one.key for one in side.sets} for side in samples]
    alone = sorted(keys[0] ^ keys[1])
    notes = [f"only in one of the runs, and left out: {', '.join(alone)}"] if alone else []
    if not _same_shift(*settings):
        notes.append("the strength of the corruptions (constants) differs: IN-C is left out")
    if settings[0].get("seed") != settings[1].get("seed"):
        notes.append("the seeds differ: the interval is about test images, not about other seeds or partitions")
    return notes


def compare_samples(
    a: Samples,
    b: Samples,
    *,
    pairs: Sequence[tuple[str, str]],
    scope: str = "weighted",
    resamples: int = 1000,
    seed: int = 0,
    same_shift: bool = True,
) -> list[Difference]:
    """Every metric of both, with the interval of its difference over resampled test images."""
    images = Universe(a, b, same_shift)
    sides = [Side(side, images, [pair[place] for pair in pairs], scope) for place, side in enumerate((a, b))]
    exact = [side.measure(images.whole()) for side in sides]
    keys = [key for key in exact[0] if key in exact[1]]
    drawn: dict[Any, list[Any]] = {key: [] for key in keys}
    for weights in images.resampled(resamples, seed):
        values = [side.measure(weights) for side in sides]
        for key in keys:
            drawn[key].append(values[1][key] - values[0][key])
    results = []
    for key in keys:
        metric, split, dataset, place = key
        differences = np.concatenate(drawn[key])
        differences = differences[~np.isnan(differences)]  # a resample may accept nothing
        before, after = float(exact[0][key][0]), float(exact[1][key][0])
        low, high = np.quantile(differences, (0.025, 0.975)) if len(differences) else (math.nan, math.nan)
        agree = float(np.mean(np.sign(differences) == np.sign(after - before))) if len(differences) else math.nan
        names = pairs[int(place)] if place else ("", "")
        results.append(Difference(metric, split, dataset, names, before, after, float(low), float(high), agree))
    return results
