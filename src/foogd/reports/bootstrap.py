"""The paired bootstrap: the same images are drawn for both sides, and each metric takes their weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, final

import numpy as np

from ..core.errors import InputError
from ..core.random import derive_seed
from ..runs.predictions import Samples, SampleSet

TITLES = {
    "accuracy": "accuracy",
    "fpr95": "FPR95",
    "auroc": "AUROC",
    "aupr": "AUPR",
    "rejected": "rejected",
    "accuracy_accepted": "accuracy of accepted",
    "auroc_joint": "AUROC IN+IN-C / OUT",
}

Key = tuple[str, str, str, str]  # metric, split, data set, detector ("" where there is none)
TPR = (19, 20)  # 0.95, in whole numbers
_CELLS = 1_000_000  # weights in memory at a time


@final
class Universe:
    """The images that both runs were tested on, in groups that are drawn together: IN with its copies, each OUT set."""

    def __init__(self, a: Samples, b: Samples, same_shift: bool) -> None:
        mine, other = ({one.key: one for one in side.sets} for side in (a, b))
        shifted = {key for key, one in mine.items() if one.split == "in-c" and not one.unseen}
        self.keys = [key for key in mine if key in other and (same_shift or key not in shifted)]
        self.group = {key: _group(mine[key]) for key in self.keys}
        found: dict[str, list[Any]] = {}
        for key in self.keys:
            common = _common(mine[key], other[key])
            found.setdefault(self.group[key], []).append(common)
        self.groups = {name: np.unique(np.concatenate(parts)) for name, parts in found.items()}

    def columns(self, one: SampleSet) -> tuple[Any, Any]:
        """Which samples of a set count, and the place of each of them in the weights of its group."""
        all_columns = self.groups[self.group[one.key]]
        index = one.index.numpy()
        place = np.searchsorted(all_columns, index).clip(max=max(len(all_columns) - 1, 0))
        kept = np.flatnonzero(all_columns[place] == index) if len(all_columns) else np.zeros(0, dtype=np.int64)
        return kept, place[kept]

    def whole(self) -> dict[str, Any]:
        """Every image once."""
        return {name: np.ones((1, len(columns)), dtype=np.int32) for name, columns in self.groups.items()}

    def resampled(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """How often each image was drawn in each resample, some resamples at a time."""
        rng = np.random.default_rng(derive_seed(seed, "bootstrap"))
        largest = max((len(columns) for columns in self.groups.values()), default=1)
        step = max(1, min(count, _CELLS // max(1, largest)))
        for start in range(0, count, step):
            size = min(step, count - start)
            weights = {}
            for name, columns in self.groups.items():
                n = len(columns)
                drawn = rng.integers(n, size=(size, n)) + n * np.arange(size)[:, None]
                weights[name] = np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n).astype(np.int32)
            yield weights


def _group(one: SampleSet) -> str:
    # Corrupted copies have the places of their originals; the images of a domain that nobody has are its own.
    return "in" if one.split == "in" or (one.split == "in-c" and not one.unseen) else one.key


def _common(mine: SampleSet, other: SampleSet) -> Any:
    """The places of the images that both runs answered about."""
    labels = [dict(zip(one.index.tolist(), one.labels.tolist(), strict=True)) for one in (mine, other)]
    common = sorted(labels[0].keys() & labels[1].keys())
    if not common:
        raise InputError(f"the runs are not comparable: they have no image of {mine.key} in common")
    if any(labels[0][index] != labels[1][index] for index in common):
        raise InputError(f"the runs are not comparable: their images of {mine.key} have different labels")
    return np.array(common, dtype=np.int64)


@final
class _Part:
    """What one client, or everyone together, says about one test set: sorted scores, and where its images lie."""

    def __init__(self, scores: Any, columns: Any, correct: Any, shared: bool = False) -> None:
        self.shared = shared  # by all clients
        order = np.argsort(scores, kind="stable")
        self.scores, self.columns = scores[order], columns[order]
        self.correct = None if correct is None else correct[order].astype(np.int32)

    def __len__(self) -> int:
        return len(self.scores)

    def weights(self, drawn: Any) -> Any:
        return drawn[:, self.columns]


def running_sums(weights: Any) -> Any:
    """For each resample the sums of the first 0, 1, … n weights."""
    total = np.zeros((len(weights), weights.shape[1] + 1), dtype=np.int32)
    np.cumsum(weights, axis=1, out=total[:, 1:])
    return total


def weighted_auroc(inside: Any, w: Any, outside: Any, v_sums: Any) -> Any:
    """P(OUT > IN) + ½ P(equal), for sorted scores and a row of weights for each resample."""
    left, right = np.searchsorted(outside, inside), np.searchsorted(outside, inside, side="right")
    twice_above = 2 * v_sums[:, -1:] - v_sums[:, left] - v_sums[:, right]
    pairs = w.sum(1, dtype=np.int64) * v_sums[:, -1]
    return (twice_above * w).sum(1, dtype=np.int64) / (2 * np.maximum(pairs, 1))


def weighted_aupr(inside: Any, w_sums: Any, outside: Any, v: Any, hits: Any) -> Any:
    """Average precision with OUT as the positive class; `hits` are the weights at or above each OUT score."""
    # float32 holds these counts exactly, and half the bytes are half the time.
    from_here = (w_sums[:, -1:] - w_sums).astype(np.float32)
    at = np.take(from_here, np.searchsorted(inside, outside), axis=1)
    at += hits
    np.maximum(at, 1, out=at)
    np.divide(hits, at, out=at)
    at *= v
    return at.sum(1, dtype=np.float64) / v.sum(1)


def hits_from(outside: Any, v_sums: Any) -> Any:
    """For each OUT score the weight of the scores that are at least as large; equal ones share one threshold."""
    return (v_sums[:, -1:] - v_sums[:, np.searchsorted(outside, outside)]).astype(np.float32)


def weighted_threshold(w_sums: Any) -> Any:
    """For each resample the place, among the sorted IN scores, of the ⌈0.95·n⌉-th smallest drawn one."""
    rank = -(-TPR[0] * w_sums[:, -1].astype(np.int64) // TPR[1])
    return (w_sums[:, 1:] >= rank[:, None]).argmax(1)


def mean_of_shares(shares: Sequence[Sequence[Any]]) -> Any:
    """The mean of parts by wholes, one value a resample; what accepts nothing says nothing, as in the rows of a run."""
    with np.errstate(invalid="ignore", divide="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nothing is accepted anywhere: no number
        return np.nanmean([top / bottom for top, bottom in shares], axis=0)


def accepted(inside: Any, tau: Any, scores: Any, sums: Any) -> Any:
    """The weight of the scores that are at most the threshold of each resample."""
    return sums[np.arange(len(tau)), np.searchsorted(scores, inside[tau], side="right")]


@final
class _Drawn:
    """The weights of a part in some resamples, and sums of them, made when they are first needed."""

    def __init__(self, part: _Part, drawn: Any) -> None:
        self.scores = part.scores
        self.weights = part.weights(drawn)

    @cached_property
    def sums(self) -> Any:
        return running_sums(self.weights)

    @cached_property
    def hits(self) -> Any:
        return hits_from(self.scores, self.sums)


@final
class Side:
    """One run: its answers on the common images, sorted once, and its metrics for any weights."""

    def __init__(self, samples: Samples, images: Universe, detectors: Sequence[str], scope: str) -> None:
        self._images = images
        self._sets = [one for one in samples.sets if one.key in images.keys]
        self._kept = {one.key: images.columns(one) for one in self._sets}
        clients = sorted({client for one in self._sets for client in one.clients})
        self._members: list[int | None] = list(clients) if scope == "weighted" else [None]
        self._detectors = detectors
        self._parts: dict[tuple[str, str, int | None], _Part] = {}
        self._joint: dict[tuple[str, int | None], _Part] = {}
        for one in self._sets:
            for name in detectors:
                # Clients that share the model and see the same images share their answers too.
                alike = bool((one.client < 0).all()) and one.scores[name].ndim == one.predictions.ndim == 1
                common = self._part(one, name, one.clients[0], shared=True) if alike and scope == "weighted" else None
                for member in self._members:
                    if member is None or member in one.clients:
                        self._parts[one.key, name, member] = common or self._part(one, name, member)

    def _part(self, one: SampleSet, detector: str, member: int | None, shared: bool = False) -> _Part:
        kept, columns = self._kept[one.key]
        scores, right = one.scores[detector].double().numpy(), one.correct
        correct = None if right is None else right.numpy()
        owner = one.client.numpy()[kept]
        if len(owner) and owner[0] < 0:
            # Every client answers about every image; the pool holds an image once for each of them.
            rows = range(len(one.clients)) if member is None else [one.clients.index(member)]
            many = np.broadcast_to(scores, (len(one.clients), len(one.index)))
            rights = None if correct is None else np.broadcast_to(correct, (len(one.clients), len(one.index)))
            return _Part(
                np.concatenate([many[row][kept] for row in rows]),
                np.concatenate([columns for _ in rows]),
                None if rights is None else np.concatenate([rights[row][kept] for row in rows]),
                shared,
            )
        own = np.ones(len(kept), dtype=bool) if member is None else owner == member
        return _Part(scores[kept][own], columns[own], None if correct is None else correct[kept][own])

    def measure(self, weights: Mapping[str, Any]) -> dict[Key, Any]:
        """Every metric, one value a resample."""
        found: dict[Key, Any] = {}
        for split in ("in", "in-c"):
            values = [self._accuracy(one, weights) for one in self._sets if one.split == split]
            if values:
                found["accuracy", split, self._name(split), ""] = np.mean(values, axis=0)
        for place, detector in enumerate(self._detectors):
            found |= self._detection(detector, str(place), weights)
        return found

    def _name(self, split: str) -> str:
        sets = [one for one in self._sets if one.split == split]
        return sets[0].name if len({one.name for one in sets}) == 1 else "all"

    def _accuracy(self, one: SampleSet, weights: Mapping[str, Any]) -> Any:
        kept, columns = self._kept[one.key]
        right = one.correct
        assert right is not None
        drawn = weights[self._images.group[one.key]][:, columns]
        share = right.numpy()[..., kept].astype(np.float64)
        share = share.mean(0) if share.ndim == 2 else share  # every client counts the same
        return (drawn * share).sum(1) / drawn.sum(1)

    def _detection(self, detector: str, place: str, weights: Mapping[str, Any]) -> dict[Key, Any]:
        clean = next(one for one in self._sets if one.split == "in")
        # A domain that nobody has is judged by the generic model, whose scores of IN are not kept.
        shifted = [one for one in self._sets if one.split == "in-c" and not one.unseen]
        outs = [one for one in self._sets if one.split == "out"]
        shares: dict[tuple[str, str], list[Any]] = {}

        def add(metric: str, one: SampleSet, top: Any, bottom: Any) -> None:
            """A mean over clients is a sum of parts by a sum of weights."""
            old = shares.get((metric, one.key), (0.0, 0.0))
            shares[metric, one.key] = [old[0] + top, old[1] + bottom]

        shared: dict[str, _Drawn] = {}  # what is the same for all clients is added up once

        def drawn_of(one: SampleSet, part: _Part) -> _Drawn:
            if part.shared and one.key in shared:
                return shared[one.key]
            found = _Drawn(part, weights[self._images.group[one.key]])
            if part.shared:
                shared[one.key] = found
            return found

        for member in self._members:
            part = self._parts.get((clean.key, detector, member))
            if part is None or not len(part):
                continue
            inside = drawn_of(clean, part)
            size, tau = inside.weights.sum(1), weighted_threshold(inside.sums)
            for one in (clean, *shifted):
                part = self._parts.get((one.key, detector, member))
                if part is not None and part.correct is not None:
                    drawn = drawn_of(one, part)
                    right = running_sums(drawn.weights * part.correct)
                    kept = accepted(inside.scores, tau, part.scores, drawn.sums)
                    add("rejected", one, drawn.sums[:, -1] - kept, drawn.sums[:, -1])
                    add("accuracy_accepted", one, accepted(inside.scores, tau, part.scores, right), kept)
            known = self._known(detector, member, clean, shifted)
            known_weights = known.weights(weights["in"])
            for one in outs:
                part = self._parts.get((one.key, detector, member))
                if part is not None and len(part):
                    out = drawn_of(one, part)
                    missed = accepted(inside.scores, tau, out.scores, out.sums) / out.sums[:, -1]
                    add("fpr95", one, missed * size, size)
                    add("auroc", one, weighted_auroc(inside.scores, inside.weights, out.scores, out.sums) * size, size)
                    area = weighted_aupr(inside.scores, inside.sums, out.scores, out.weights, out.hits)
                    add("aupr", one, area * size, size)
                    if shifted:
                        area = weighted_auroc(known.scores, known_weights, out.scores, out.sums)
                        add("auroc_joint", one, area * size, size)
        found: dict[Key, Any] = {}
        for metric in TITLES:
            # Over corruptions and severities the mean; every OUT set stands alone.
            for sets in ([clean], shifted, *([one] for one in outs)):
                some = [shares[metric, one.key] for one in sets if (metric, one.key) in shares]
                if some and not (metric == "rejected" and sets == [clean]):  # which is 5 % by definition
                    name = sets[0].name if sets[0].split == "out" else self._name(sets[0].split)
                    found[metric, sets[0].split, name, place] = mean_of_shares(some)
        return found

    def _known(self, detector: str, member: int | None, clean: SampleSet, shifted: Sequence[SampleSet]) -> _Part:
        """IN and IN-C together."""
        if (detector, member) not in self._joint:
            parts = [self._parts.get((one.key, detector, member)) for one in (clean, *shifted)]
            there = [part for part in parts if part is not None]
            self._joint[detector, member] = _Part(
                np.concatenate([part.scores for part in there]), np.concatenate([part.columns for part in there]), None
            )
        return self._joint[detector, member]
