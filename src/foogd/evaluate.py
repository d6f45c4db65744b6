"""Evaluation: every method × every detector in one pass over the features, as rows in long form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from .config import Config
from .data.federation import Federation, TestSet
from .detect import Detector
from .engine.eager import Engine
from .engine.rng import Streams
from .methods.base import Method
from .metrics import aupr, auroc, fpr_at_tpr, threshold_at_tpr
from .simulate import RunState
from .types import ClientState, Context, Output, Readout


@dataclass(frozen=True)
class Row:
    """One number with everything that says what it is.

    `scope` is "client" (one client), "weighted" (mean over clients with `weight`) or "pooled" (all clients' samples
    together). `metric` is accuracy, accuracy_generic, auroc, fpr95, aupr, rejected, accuracy_accepted or auroc_joint.
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
class _Answers:
    """What each client's model says about its part of one test set."""

    test: TestSet
    correct: Mapping[int, Tensor]  # client → right or wrong, one a sample
    generic: Mapping[int, Tensor]
    scores: Mapping[str, Mapping[int, Tensor]]  # detector → client → outlier scores


@final
class Evaluator:
    """Runs a trained federation over its test sets."""

    def __init__(self, engine: Engine, detectors: Mapping[str, Detector]) -> None:
        self._engine, self._detectors = engine, detectors
        self._federation: Federation = engine.federation
        self._config: Config = engine.config
        self._method: Method = engine.method
        self._nets = engine.nets()
        self._shared, self._personal, _ = engine.layout.pack(self._nets)
        engine.layout.bind(self._nets, self._shared, self._personal)
        self._nets.eval().requires_grad_(False)
        shape = (1, -1, 1, 1)
        self._mean = torch.tensor(self._federation.mean, device=self._shared.device).view(shape)
        self._std = torch.tensor(self._federation.std, device=self._shared.device).view(shape)
        names = engine.layout.personal_names
        self._private = bool(names)
        self._private_features = any(name.startswith("backbone.") for name in names)

    @torch.no_grad()
    def rows(self, state: RunState, *, run: str = "", method: str = "") -> list[Row]:
        """All rows of one state; tests without a sample of a client yield no row for it."""
        self._load(state)
        detectors = self._fitted(state)
        answers = [self._answers(test, state, detectors) for test in self._federation.tests]
        blank = Row(
            run=run, method=method, seed=self._config.seed, round=state.server.round, scope="", client=None, dataset="",
            split="", corruption=None, severity=None, detector=None, metric="", value=0.0, weight=0.0,
        )  # fmt: skip
        return [*_accuracy_rows(blank, answers, self._private), *_detection_rows(blank, answers)]

    def _load(self, state: RunState) -> None:
        self._shared.copy_(state.server.shared)
        self._engine.layout.load_integers(self._nets, state.server.integers)

    def _become(self, client: ClientState) -> None:
        self._personal.copy_(client.personal)

    def _context(self, state: RunState, client: ClientState, purpose: str) -> Context:
        return Context(
            round=state.server.round,
            rounds=self._config.rounds,
            groups=(),
            class_counts=client.class_counts.to(self._shared.device),
            received=self._nets,
            server=state.server.extra,
            memory=client.memory,
            rng=Streams(self._config.seed, state.server.round, client.id, purpose, device=self._shared.device),
        )

    def _features(self, store: Any, indices: Tensor | None = None) -> Tensor:
        """The backbone's features of a store, or of some of its images."""
        order = torch.arange(len(store), device=self._shared.device) if indices is None else indices
        parts = torch.split(order, self._config.eval_batch)
        return torch.cat([self._nets["backbone"](self._images(store, part)) for part in parts])

    def _images(self, store: Any, indices: Tensor) -> Tensor:
        images: Tensor = (store.batch(indices).to(self._shared.device) - self._mean) / self._std
        return images

    def _outputs(
        self, store: Any, parts: Sequence[Tensor], state: RunState, purpose: str
    ) -> Iterator[tuple[int, Output]]:
        """Each client's output for its part of a store; features are computed once where all clients share them."""
        parts = [part.to(self._shared.device) for part in parts]
        shared = None
        if not (self._method.adapts or self._private_features):
            z = self._features(store)
            shared = Output(z, z) if self._private else Output(z, self._method.logits(self._nets, z))
        for client, part in zip(state.clients, parts, strict=True):
            if len(part) == 0:
                continue
            self._become(client)
            if shared is None:
                predict = self._method.predictor(self._nets, self._context(state, client, purpose))
                pieces = torch.split(part, self._config.eval_batch)
                outputs = [predict(self._images(store, piece)) for piece in pieces]
                yield client.id, Output(torch.cat([o.z for o in outputs]), torch.cat([o.logits for o in outputs]))
            elif self._private:
                z = shared.z[part]
                yield client.id, Output(z, self._method.logits(self._nets, z))
            else:
                yield client.id, Output(shared.z[part], shared.logits[part])

    def _fitted(self, state: RunState) -> dict[str, Detector]:
        """The detectors that apply, fitted on sums of statistics over the clients' training features."""
        readout = self._method.readout(self._nets)
        fitted = {name: detector for name, detector in self._detectors.items() if detector.applies(readout)}
        for name, detector in fitted.items():
            for _ in range(detector.passes):
                total: dict[str, Tensor] = {}
                train = self._federation.train
                for client, output in self._outputs(train, self._federation.train_indices, state, "fit"):
                    labels = train.labels[self._federation.train_indices[client].to(train.labels.device)]
                    labels = labels.to(output.z.device)
                    sums = detector.statistics(output, labels, self._method.readout(self._nets))
                    for key, value in sums.items():
                        total[key] = total[key] + value if key in total else value
                detector = detector.fit(total)
            fitted[name] = detector
        return fitted

    def _answers(self, test: TestSet, state: RunState, detectors: Mapping[str, Detector]) -> _Answers:
        correct, generic = {}, {}
        scores: dict[str, dict[int, Tensor]] = {name: {} for name in detectors}
        common: tuple[Tensor, dict[str, Tensor]] | None = None
        indices = {client.id: part for client, part in zip(state.clients, test.indices, strict=True)}
        purpose = f"{test.split}/{test.name}/{test.corruption}/{test.severity}"
        for client, output in self._outputs(test.store, test.indices, state, purpose):
            part = indices[client].to(output.logits.device)
            if test.unseen:  # nobody's private head was made for this domain
                output = Output(output.z, self._method.generic_logits(self._nets, output.z))
            if test.split != "out":
                labels = test.store.labels[part.to(test.store.labels.device)].to(part.device)
                correct[client] = (output.logits.argmax(1) == labels).cpu()
                if self._private:
                    generic[client] = (self._method.generic_logits(self._nets, output.z).argmax(1) == labels).cpu()
            if common is not None and torch.equal(common[0], part):
                own = common[1]
            else:
                ask = self._method.generic_readout if test.unseen else self._method.readout
                readout: Readout = ask(self._nets)
                own = {name: detector(output, readout).cpu() for name, detector in detectors.items()}
            if not (self._private or self._method.adapts):
                # Clients that share the model and see the same images, as in most OUT sets, share the scores too.
                common = (part, own)
            for name, values in own.items():
                scores[name][client] = values
        return _Answers(test, correct, generic, scores)


def _accuracy_rows(blank: Row, answers: Sequence[_Answers], private: bool) -> Iterator[Row]:
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
        if private:
            everyone = torch.cat(list(answer.generic.values()))
            value = float(everyone.double().mean())
            yield replace(base, metric="accuracy_generic", scope="pooled", value=value, weight=len(everyone))


def _detection_rows(blank: Row, answers: Sequence[_Answers]) -> Iterator[Row]:
    """Per detector: AUROC, FPR95 and AUPR against each OUT set, and the joint view of Eq. 1 and 2."""
    clean = next((answer for answer in answers if answer.test.split == "in"), None)
    if clean is None or not clean.correct:
        return
    shifted = [answer for answer in answers if answer.test.split == "in-c" and answer.correct]
    for detector, inside in clean.scores.items():
        if any(bool(part.isnan().any()) for answer in answers for part in answer.scores[detector].values()):
            continue  # a model that has diverged still has an accuracy, but no ranking
        base = replace(blank, detector=detector)
        sizes = {client: len(values) for client, values in inside.items()}
        taus = {client: threshold_at_tpr(values) for client, values in inside.items()}
        tau = threshold_at_tpr(torch.cat(list(inside.values())))
        for answer in (clean, *shifted):
            yield from _acceptance_rows(_about(base, answer.test), answer, detector, taus, tau)
        for answer in answers:
            outside = {client: values for client, values in answer.scores[detector].items() if client in inside}
            if answer.test.split != "out" or not outside:
                continue
            about = _about(base, answer.test)
            pooled_in, pooled_out = _pool(inside), _pool(answer.scores[detector])
            for metric, function in (("auroc", auroc), ("fpr95", fpr_at_tpr), ("aupr", aupr)):
                values = {client: function(inside[client], out) for client, out in outside.items()}
                yield from _scoped(replace(about, metric=metric), values, sizes, function(pooled_in, pooled_out))
            if shifted:
                known = {
                    client: torch.cat(
                        [inside[client], *(a.scores[detector][client] for a in shifted if client in a.correct)]
                    )
                    for client in inside
                }
                values = {client: auroc(known[client], out) for client, out in outside.items()}
                yield from _scoped(replace(about, metric="auroc_joint"), values, sizes, auroc(_pool(known), pooled_out))


def _acceptance_rows(
    about: Row, answer: _Answers, detector: str, taus: Mapping[int, float], tau: float
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
    everyone = _pool(answer.correct)[~pooled]
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


def evaluate(
    engine: Engine, state: RunState, detectors: Mapping[str, Detector], *, run: str = "", method: str = ""
) -> list[Row]:
    """All rows of a trained federation: method × detector × test set, per client, weighted and pooled."""
    return Evaluator(engine, detectors).rows(state, run=run, method=method)
