"""Rows: one number each, with its scope, and how scores and predictions become rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..config import Config
from ..data.federation import TestSet
from ..detectors.base import Detector
from ..metrics import Ordered, aupr, auroc, fpr_at_tpr, threshold_at_tpr
from ..simulate import RunState


@dataclass(frozen=True)
class Row:
    """One number with everything that says what it is.

    `scope` is "client" (one client), "weighted" (mean over clients with `weight`) or "pooled" (all clients' samples
    together). `metric` is accuracy, accuracy_generic, auroc, fpr95, aupr, rejected, accuracy_accepted, auroc_joint or,
    where a run set training images aside, rejected_calibrated: the share above the threshold that they give.
    """

    run: str
    method: str
    seed: int
    round: int
    scope: str
    client: int | None
    dataset: str
    split: str
    corruption: str | None
    severity: int | None
    detector: str | None
    metric: str
    value: float
    weight: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Answers:
    """What each client's model says about its part of one test set, in the order of `test.indices`."""

    test: TestSet
    correct: Mapping[int, Tensor]  # client → right or wrong, one a sample; empty for OUT
    generic: Mapping[int, Tensor]
    scores: Mapping[str, Mapping[int, Tensor]]  # detector → client → outlier scores
    predictions: Mapping[int, Tensor] = field(default_factory=dict)  # client → predicted classes
    features: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # client → positions, their features


@dataclass(frozen=True)
class Fitted:
    """Detectors fitted for a federation: those that serve everyone, and those that each client has for itself."""

    common: Mapping[str, Detector]
    own: Mapping[int, Mapping[str, Detector]]
    sums: Mapping[str, Sequence[Mapping[str, Tensor]]]  # detector → one set of sums a pass, to fit it again from
    own_sums: Mapping[int, Mapping[str, Sequence[Mapping[str, Tensor]]]]

    @property
    def names(self) -> set[str]:
        """The detectors that someone can use."""
        return {*self.common, *(name for own in self.own.values() for name in own)}


@dataclass(frozen=True)
class Evaluation:
    """The rows of one state, and what was made on the way and a model for use needs too."""

    rows: list[Row]
    state: RunState  # with the private nets as they were tested
    fitted: Fitted
    calibration: Mapping[str, Mapping[int, Tensor]]  # detector → client → scores of the images that were set aside
    generic_calibration: Mapping[str, Mapping[int, Tensor]]  # the same by the model that has no private part
    answers: Sequence[Answers] = ()  # of each test set, sample by sample


@dataclass(frozen=True)
class Asked:
    """All that rows are made from: the answers of some clients about every test set."""

    answers: Sequence[Answers]
    calibration: Mapping[str, Mapping[int, Tensor]]
    generic_calibration: Mapping[str, Mapping[int, Tensor]]
    generic_clean: Mapping[str, Mapping[int, Tensor]] | None  # scores of IN by the model that has no private part


def blank_row(config: Config, round: int, run: str, method: str) -> Row:
    """A row that says which run and round it is of, and nothing yet."""
    return Row(
        run=run, method=method, seed=config.seed, round=round, scope="", client=None, dataset="", split="",
        corruption=None, severity=None, detector=None, metric="", value=0.0, weight=0.0,
    )  # fmt: skip


def make_rows(blank: Row, asked: Asked, *, private: bool) -> list[Row]:
    """All rows from the answers; `private` says whether the method has a private part."""
    return [
        *_accuracy_rows(blank, asked.answers, private),
        *_detection_rows(blank, asked.answers, asked.generic_clean),
        *_calibrated_rows(blank, asked.answers, asked.calibration, asked.generic_calibration),
    ]


def _accuracy_rows(blank: Row, answers: Sequence[Answers], private: bool) -> Iterator[Row]:
    for answer in answers:
        if answer.test.split == "out" or not answer.correct:
            continue
        base = _about(blank, answer.test)
        yield from _scoped(
            replace(base, metric="accuracy"),
            {client: float(right.double().mean()) for client, right in answer.correct.items()},
            {client: len(right) for client, right in answer.correct.items()},
            float(torch.cat(list(answer.correct.values())).double().mean()),
        )
        if private and answer.generic:
            everyone = torch.cat(list(answer.generic.values()))
            value = float(everyone.double().mean())
            yield replace(base, metric="accuracy_generic", scope="pooled", value=value, weight=len(everyone))


def _detection_rows(
    blank: Row, answers: Sequence[Answers], generic_clean: Mapping[str, Mapping[int, Tensor]] | None
) -> Iterator[Row]:
    """Per detector: AUROC, FPR95 and AUPR against each OUT set, and the joint view of Eq. 1 and 2.

    `generic_clean` are the scores of IN by the model without a private part, where an unseen domain is tested by it.
    """
    clean = next((answer for answer in answers if answer.test.split == "in"), None)
    if clean is None or not clean.correct:
        return
    shifted = [answer for answer in answers if answer.test.split == "in-c" and answer.correct]
    for detector, inside in clean.scores.items():
        if any(bool(part.isnan().any()) for answer in answers for part in answer.scores[detector].values()):
            continue  # a model that has diverged still has an accuracy, but no ranking; `no_numbers` says so
        base = replace(blank, detector=detector)
        sizes = {client: len(values) for client, values in inside.items()}
        taus = {client: threshold_at_tpr(values) for client, values in inside.items()}
        tau = threshold_at_tpr(torch.cat(list(inside.values())))
        for answer in (clean, *shifted):
            if answer.test.unseen and generic_clean is not None:
                known_in = generic_clean[detector]
                own_taus = {client: threshold_at_tpr(values) for client, values in known_in.items()}
                yield from _acceptance_rows(
                    _about(base, answer.test), answer, detector, own_taus, threshold_at_tpr(_pool(known_in))
                )
            else:
                yield from _acceptance_rows(_about(base, answer.test), answer, detector, taus, tau)
        # Scores of two models have no common scale.
        comparable = [answer for answer in shifted if not answer.test.unseen or generic_clean is None]
        known: dict[int, Tensor] = {}
        if comparable:
            for client, values in inside.items():
                parts = [a.scores[detector][client] for a in comparable if client in a.correct]
                known[client] = torch.cat([values, *parts])
        # Sorted once for all metrics and OUT sets.
        in_order, known_order = _order(inside), _order(known)
        all_in, all_known = Ordered(_pool(inside)), Ordered(_pool(known)) if known else None
        for answer in answers:
            outside = {client: values for client, values in answer.scores[detector].items() if client in inside}
            if answer.test.split != "out" or not outside:
                continue
            about = _about(base, answer.test)
            out_order = _order(answer.scores[detector])
            all_out = _pooled_order(answer.scores[detector], out_order)
            for metric, function in (("auroc", auroc), ("fpr95", fpr_at_tpr), ("aupr", aupr)):
                found = {client: function(in_order[client], out_order[client]) for client in outside}
                yield from _scoped(replace(about, metric=metric), found, sizes, function(all_in, all_out))
            if all_known is not None:
                found = {client: auroc(known_order[client], out_order[client]) for client in outside}
                yield from _scoped(replace(about, metric="auroc_joint"), found, sizes, auroc(all_known, all_out))


def _order(parts: Mapping[int, Tensor]) -> dict[int, Ordered]:
    """The scores of each client sorted; clients that share a tensor, as they do where a model is shared, share it."""
    found: dict[int, Ordered] = {}
    for values in parts.values():
        if id(values) not in found:
            found[id(values)] = Ordered(values)
    return {client: found[id(values)] for client, values in parts.items()}


def _pooled_order(parts: Mapping[int, Tensor], order: Mapping[int, Ordered]) -> Ordered:
    """All clients' scores sorted, without the copies where all have the same."""
    one, *others = parts.values()
    if all(other is one or torch.equal(other, one) for other in others):  # the same however the scores came here
        return Ordered.repeated(next(iter(order.values())), len(parts))
    return Ordered(_pool(parts))


def _calibrated_rows(
    blank: Row,
    answers: Sequence[Answers],
    calibration: Mapping[str, Mapping[int, Tensor]],
    generic: Mapping[str, Mapping[int, Tensor]],
) -> Iterator[Row]:
    """The share rejected at a client's own threshold, which no test image had a part in; pooled: at everyone's.

    On an unseen domain both the scores and the thresholds are those of the model without a private part.
    """
    for detector, own in calibration.items():
        found = [part for answer in answers for part in answer.scores[detector].values()]
        sets = {False: own, True: generic[detector]}
        if not own or any(bool(part.isnan().any()) for part in (*own.values(), *sets[True].values(), *found)):
            continue
        for answer in answers:
            scores, aside = answer.scores[detector], sets[answer.test.unseen]
            tau = threshold_at_tpr(_pool(aside))
            taus = {client: threshold_at_tpr(values) for client, values in aside.items()}
            rejected = {client: values > taus.get(client, tau) for client, values in scores.items()}
            if rejected:
                yield from _scoped(
                    replace(_about(blank, answer.test), detector=detector, metric="rejected_calibrated"),
                    {client: float(values.double().mean()) for client, values in rejected.items()},
                    {client: len(values) for client, values in rejected.items()},
                    float((_pool(scores) > tau).double().mean()),
                )


def _acceptance_rows(
    about: Row, answer: Answers, detector: str, taus: Mapping[int, float], tau: float
) -> Iterator[Row]:
    """The share rejected at tau (95 % of IN accepted) and the accuracy on what is accepted."""
    scores = answer.scores[detector]
    rejected = {client: values > taus[client] for client, values in scores.items() if client in taus}
    if not rejected:
        return
    pooled = _pool(scores) > tau
    sizes = {client: len(values) for client, values in rejected.items()}
    yield from _scoped(
        replace(about, metric="rejected"),
        {client: float(values.double().mean()) for client, values in rejected.items()},
        sizes,
        float(pooled.double().mean()),
    )
    accepted = {client: answer.correct[client][~values] for client, values in rejected.items()}
    accepted = {client: right for client, right in accepted.items() if len(right)}
    everyone = _pool({client: answer.correct[client] for client in scores})[~pooled]
    if accepted and len(everyone):
        yield from _scoped(
            replace(about, metric="accuracy_accepted"),
            {client: float(right.double().mean()) for client, right in accepted.items()},
            {client: len(right) for client, right in accepted.items()},
            float(everyone.double().mean()),
        )


def _scoped(base: Row, values: Mapping[int, float], weights: Mapping[int, int], pooled: float) -> Iterator[Row]:
    """One row a client, their weighted mean, and the pooled value."""
    for client, value in values.items():
        yield replace(base, scope="client", client=client, value=value, weight=float(weights[client]))
    total = float(sum(weights[client] for client in values))
    mean = sum(value * weights[client] for client, value in values.items()) / total
    yield replace(base, scope="weighted", value=mean, weight=total)
    yield replace(base, scope="pooled", value=pooled, weight=total)


def _pool(parts: Mapping[int, Tensor]) -> Tensor:
    return torch.cat([parts[client] for client in sorted(parts)])


def _about(base: Row, test: TestSet) -> Row:
    return replace(base, dataset=test.name, split=test.split, corruption=test.corruption, severity=test.severity)


def no_numbers(found: Evaluation) -> dict[str, str]:
    """For each detector some of whose scores are NaN, what it lacks and of which set how many scores are."""
    asides = (found.calibration, found.generic_calibration)
    counted: dict[str, list[tuple[str, int, int]]] = {}  # detector → set, NaN, all
    sets = [(answer.test.key, answer.scores) for answer in found.answers]
    for key, scores in (*sets, *(("the images set aside", aside) for aside in asides)):
        for detector, parts in scores.items():
            wrong = sum(int(part.isnan().sum()) for part in parts.values())
            if wrong:
                counted.setdefault(detector, []).append((key, wrong, sum(map(len, parts.values()))))
    tested = {key for key, _ in sets}
    sentences = {}
    for detector, ((key, wrong, count), *others) in counted.items():
        more = len({name for name, _, _ in others} - {key})
        lacks = "has no rows" if key in tested else "has no rows of a threshold"
        rest = f", and some for {more} other set{'s' if more > 1 else ''}" if more else ""
        sentences[detector] = f"Detector {detector} {lacks}: {wrong} of its {count} scores for {key} are NaN{rest}."
    return sentences
