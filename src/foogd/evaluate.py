"""Evaluation: every method × every detector in one pass over the features, as rows in long form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor

from .config import Config
from .data.federation import Federation, TestSet
from .data.readers import Progress
from .detect import Detector
from .detector import check_passes, check_scores
from .engine.eager import Engine
from .engine.rng import Streams, generator
from .methods.base import Method
from .metrics import Ordered, aupr, auroc, fpr_at_tpr, threshold_at_tpr
from .simulate import RunState, settled
from .types import ClientState, Context, Output, Readout


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


KEPT_FEATURES = 400  # samples of a test set whose features are kept, for pictures


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


Sums = Mapping[str, Sequence[Mapping[str, Tensor]]]
"""Detector → one set of sums a pass over the training features of all clients."""


@final
class Evaluator:
    """Runs a trained federation over its test sets."""

    def __init__(
        self, engine: Engine, detectors: Mapping[str, Detector], *, progress: Progress | None = None
    ) -> None:
        """`progress` is told, during an evaluation, how many images of how many have been looked at."""
        for name, detector in detectors.items():
            check_passes(detector, name)
        self._engine, self._detectors = engine, detectors
        self._progress, self._seen, self._planned = progress, 0, 0
        self._federation: Federation = engine.federation
        self._config: Config = engine.config
        self._method: Method = engine.method
        self._nets = engine.nets()
        self._shared, self._personal, _ = engine.layout.pack(self._nets)
        self._frozen = engine.layout.pack_frozen(self._nets)
        engine.layout.bind(self._nets, self._shared, self._personal, self._frozen)
        self._nets.eval().requires_grad_(False)
        shape = (1, -1, 1, 1)
        self._mean = torch.tensor(self._federation.mean, device=self._shared.device).view(shape)
        self._std = torch.tensor(self._federation.std, device=self._shared.device).view(shape)
        names = engine.layout.personal_names
        self._private = bool(names)
        self._prepared: dict[tuple[str, int, bool], Detector] = {}
        self._private_features = any(name.startswith("backbone.") for name in names)

    def evaluation(self, state: RunState, *, run: str = "", method: str = "") -> Evaluation:
        """All rows of one state; tests without a sample of a client yield no row for it."""
        images = {client.id: len(client.indices) for client in state.clients}
        measured = self._method.settles and self._method.surveys
        self._seen, self._planned = 0, self._plan() + (sum(images.values()) if measured else 0)
        state = self.ready(settled(self._engine, state, lambda client: self._looked_at(images[client])))
        fitted = self.fitted(state)
        asked = self.asked(state, fitted)
        blank = blank_row(self._config, state.server.round, run, method)
        rows = make_rows(blank, asked, private=self._private)
        if self._progress is not None and self._planned:
            self._progress(self._planned, self._planned)  # the end, also where a client had nothing to measure
        return Evaluation(
            rows,
            state,
            fitted,
            asked.calibration,
            asked.generic_calibration,
            asked.answers,
        )

    def ready(self, state: RunState) -> RunState:
        """The state with the private values that are tested; what comes next is about this state."""
        ready = self._engine.personalise(state.server, state.clients)  # trains, so gradients must be on
        state = replace(state, clients=tuple(ready))
        if self._private and not self._method.neutral_start:
            mean = mean_private(state.clients)
            known = (c if c.trained else replace(c, personal=mean.clone()) for c in state.clients)
            state = replace(state, clients=tuple(known))
        with torch.no_grad():
            self._load(state)
        self._prepared.clear()
        return state

    @torch.no_grad()
    def asked(self, state: RunState, fitted: Fitted) -> Asked:
        """What the clients of a ready state say about all test sets."""
        answers = [self._answers(test, state, fitted) for test in self._federation.tests]
        aside, generic_aside, clean = self._further()
        calibration = self._answers(aside, state, fitted).scores if aside is not None else {}
        generic = self._answers(generic_aside, state, fitted).scores if generic_aside is not None else calibration
        generic_clean = self._answers(clean, state, fitted).scores if clean is not None else None
        return Asked(answers, calibration, generic, generic_clean)

    def _further(self) -> tuple[TestSet | None, TestSet | None, TestSet | None]:
        """What is asked besides the tests, None where it is not needed.

        The images set aside; where clients have private parts, the same images for the generic model; and for that
        model IN images, where there is an unseen domain.
        Someone unknown is judged by the generic model, so thresholds for it come from that model too.
        """
        aside, generic_aside, clean = self._federation.calibration_test, None, None
        if self._private:
            tests = self._federation.tests
            generic_aside = replace(aside, unseen=True) if aside is not None else None
            known = next((test for test in tests if test.split == "in"), None)
            if known is not None and any(test.unseen for test in tests):
                clean = replace(known, unseen=True)
        return aside, generic_aside, clean

    def _plan(self) -> int:
        """How many images an evaluation looks at, each as often as it does."""
        asked = [*self._federation.tests, *(test for test in self._further() if test is not None)]
        planned = sum(self._images_of(test, adapt=True) for test in asked)
        learning = any(detector.passes for detector in self.used().values())
        return planned + (self._images_of(self._training_set(), adapt=False) if learning else 0)

    def _images_of(self, test: TestSet, *, adapt: bool) -> int:
        seen = sum(map(len, test.indices))
        return len(test.store) if self._at_once(test, adapt=adapt) else seen

    def _at_once(self, test: TestSet, *, adapt: bool) -> bool:
        """Whether all clients share the features of a set: none adapts or has its own, and every image is seen."""
        own = (adapt and self._method.adapts) or self._private_features
        return not own and sum(map(len, test.indices)) >= len(test.store)

    def _looked_at(self, images: int) -> None:
        self._seen += images
        if self._progress is not None and self._seen < self._planned:  # the end is told when all scores are there
            self._progress(self._seen, self._planned)

    def _load(self, state: RunState) -> None:
        self._shared.copy_(state.server.shared)
        self._frozen.copy_(state.server.frozen)
        self._engine.layout.load_integers(self._nets, state.server.integers)

    def _become(self, client: ClientState) -> None:
        self._personal.copy_(client.personal)

    def _become_anyone(self, state: RunState) -> None:
        """Private values of someone whom the federation does not know: the mean over the clients that have trained."""
        if self._private:
            self._personal.copy_(mean_private(state.clients))

    def _context(self, state: RunState, client: ClientState, purpose: str, *, unseen: bool) -> Context:
        if unseen:
            client = anyone(client, state.clients)
        return Context(
            round=state.server.round,
            rounds=self._config.rounds,
            groups=(),
            class_counts=client.class_counts.to(self._shared.device),
            received=self._nets,
            server=state.server.extra,
            memory=client.memory,
            rng=Streams(self._config.seed, state.server.round, client.id, purpose, device=self._shared.device),
            mean=self._mean,
            std=self._std,
            unknown=unseen,
        )

    def _features(self, store: Any, indices: Tensor | None = None) -> Tensor:
        """The backbone's features of a store, or of some of its images."""
        order = torch.arange(len(store), device=self._shared.device) if indices is None else indices
        found = []
        for part in torch.split(order, self._config.eval_batch):
            found.append(self._nets["backbone"](self._images(store, part)))
            self._looked_at(len(part))
        return torch.cat(found)

    def _images(self, store: Any, indices: Tensor) -> Tensor:
        images: Tensor = (store.batch(indices).to(self._shared.device) - self._mean) / self._std
        # Convolutions of a GPU are made for this order of the values.
        return images.contiguous(memory_format=torch.channels_last) if images.is_cuda else images

    def _outputs(
        self, test: TestSet, state: RunState, *, adapt: bool
    ) -> Iterator[tuple[ClientState, Tensor, Output]]:
        """Each client's output for its part of a test set; features are computed once where all clients share them."""
        parts = [part.to(self._shared.device) for part in test.indices]
        streams = adapt and self._method.adapts
        shared = None
        if self._at_once(test, adapt=adapt):
            z = self._features(test.store)
            shared = Output(z, z) if self._private else Output(z, self._method.logits(self._nets, z))
        for client, part in zip(state.clients, parts, strict=True):
            if len(part) == 0:
                continue
            self._become(client)
            if test.unseen:
                self._become_anyone(state)
            if streams:
                ctx = self._context(state, client, test.key, unseen=test.unseen)
                predict = self._method.predictor(self._nets, ctx)
                # Stores are often in the order of classes, and a stream of one class after the other is another task.
                order = torch.randperm(len(part), generator=generator(self._config.seed, client.id, test.key, "stream"))
                stream = part[order.to(part.device)]
                pieces = torch.split(stream, self._method.test_batch or self._config.eval_batch)
                outputs = []
                for piece in pieces:
                    outputs.append(predict(self._images(test.store, piece)))
                    self._looked_at(len(piece))
                back = torch.argsort(order).to(part.device)
                found = Output(torch.cat([o.z for o in outputs])[back], torch.cat([o.logits for o in outputs])[back])
            elif shared is None or self._private:
                z = self._features(test.store, part) if shared is None else shared.z[part]
                found = Output(z, self._method.logits(self._nets, z))
            else:
                found = Output(shared.z[part], shared.logits[part])
            yield client, part, found

    def used(self) -> dict[str, Detector]:
        """The detectors that the model can serve, not fitted."""
        readout = self._method.readout(self._nets)
        return {name: detector for name, detector in self._detectors.items() if detector.applies(readout)}

    @torch.no_grad()
    def next_sums(self, state: RunState, sums: Sums) -> dict[str, dict[str, Tensor]]:
        """What the clients' training features add up to in the next pass of each detector that lacks one."""
        lacking = {
            name: refitted(detector, sums.get(name, ()))
            for name, detector in self.used().items()
            if not detector.local and len(sums.get(name, ())) < detector.passes
        }
        return self._sums(self._training(state), lacking) if lacking else {}

    @torch.no_grad()
    def fitted(self, state: RunState, sums: Sums | None = None) -> Fitted:
        """The detectors that apply, fitted on statistics of the clients' training features, without adaptation.

        Where the `sums` of all passes are given, those that serve everyone are fitted on them; one that lacks a pass is
        left out.
        """
        used = self.used()
        learning = any(detector.passes and (sums is None or detector.local) for detector in used.values())
        found = self._training(state) if learning else []
        common = {name: detector for name, detector in used.items() if not detector.local}
        if sums is None:
            gathered: dict[str, list[Mapping[str, Tensor]]] = {}
            while lacking := {n: d for n, d in common.items() if len(gathered.get(n, ())) < d.passes}:
                for name, total in self._sums(found, lacking).items():
                    gathered.setdefault(name, []).append(total)
                    common[name] = common[name].fit(total)
            sums = gathered
        else:
            whole = {name: sums.get(name, ()) for name in common}
            common = {n: refitted(d, whole[n]) for n, d in common.items() if len(whole[n]) == d.passes}
        own: dict[int, dict[str, Detector]] = {client.id: {} for client, _, _ in found}
        own_sums: dict[int, dict[str, list[dict[str, Tensor]]]] = {client.id: {} for client, _, _ in found}
        for name, detector in used.items():
            for client, output, y in found if detector.local else ():
                self._become(client)
                mine = detector
                for _ in range(detector.passes):
                    total = mine.statistics(output, y, self._method.readout(self._nets))
                    own_sums[client.id].setdefault(name, []).append(total)
                    mine = mine.fit(total)
                own[client.id][name] = mine
        return Fitted(common, own, sums, own_sums)

    def _training(self, state: RunState) -> list[tuple[ClientState, Output, Tensor]]:
        """Each client's output for its training images, and their labels."""
        train = self._training_set()
        found = self._outputs(train, state, adapt=False)
        labels = train.store.labels
        return [(client, output, labels[part.to(labels.device)].to(part.device)) for client, part, output in found]

    def _training_set(self) -> TestSet:
        return TestSet("train", "in", self._federation.train, self._federation.train_indices)

    def _sums(
        self, found: Sequence[tuple[ClientState, Output, Tensor]], detectors: Mapping[str, Detector]
    ) -> dict[str, dict[str, Tensor]]:
        """One pass of these detectors over the training features."""
        totals: dict[str, dict[str, Tensor]] = {}
        for name, detector in detectors.items():
            total: dict[str, Tensor] = {}
            for client, output, y in found:
                self._become(client)
                for key, value in detector.statistics(output, y, self._method.readout(self._nets)).items():
                    total[key] = total[key] + value if key in total else value
            totals[name] = total
        return totals

    def _answers(self, test: TestSet, state: RunState, fitted: Fitted) -> Answers:
        correct, generic, predictions, features = {}, {}, {}, {}
        kept = dict(zip((client.id for client in state.clients), _kept_samples(test, self._config.seed), strict=True))
        scores: dict[str, dict[int, Tensor]] = {name: {} for name in self._detectors if name in fitted.names}
        common: tuple[Tensor, dict[str, Tensor]] | None = None
        for client, part, output in self._outputs(test, state, adapt=True):
            if test.unseen and not self._method.adapts:  # nobody's private head was made for this domain
                output = Output(output.z, self._method.generic_logits(self._nets, output.z))
            predictions[client.id] = output.logits.argmax(1).cpu()
            if len(kept[client.id]):
                features[client.id] = kept[client.id], output.z[kept[client.id].to(output.z.device)].cpu()
            if test.split != "out":
                labels = test.store.labels[part.to(test.store.labels.device)].to(part.device)
                correct[client.id] = predictions[client.id] == labels.cpu()
                if self._private and not self._private_features:  # those are not what a generic model would see
                    generic[client.id] = (self._method.generic_logits(self._nets, output.z).argmax(1) == labels).cpu()
            ask = self._method.generic_readout if test.unseen else self._method.readout
            readout: Readout = ask(self._nets)
            everyone = -1 if test.unseen or not self._private else client.id  # whose model it is
            if common is None or not torch.equal(common[0], part):
                found = self._scores(fitted.common, output, readout, everyone, test.unseen)
                # Clients that share the model and see the same images, as in most OUT sets, share the scores too.
                common = None if self._private or self._method.adapts else (part, found)
            else:
                found = common[1]
            own = self._scores(fitted.own.get(client.id, {}), output, readout, client.id, test.unseen)
            for name, values in (found | own).items():
                scores[name][client.id] = values
        return Answers(test, correct, generic, scores, predictions, features)

    def _scores(
        self, detectors: Mapping[str, Detector], output: Output, readout: Readout, model: int, unseen: bool
    ) -> dict[str, Tensor]:
        """Scores of all detectors; what a detector computes once for a model is kept for the next test set."""
        scores = {}
        for name, detector in detectors.items():
            key = (name, model, unseen)
            if key not in self._prepared:
                self._prepared[key] = detector.prepared(readout)
            scores[name] = check_scores(self._prepared[key](output, readout), len(output.z), name).cpu()
        return scores


def _kept_samples(test: TestSet, seed: int) -> list[Tensor]:
    """For each client the positions in its part of the test set whose features are kept: its share of the budget."""
    sizes = [len(part) for part in test.indices]
    total = max(1, sum(sizes))
    kept = []
    for client, size in enumerate(sizes):
        share = -(-size * min(KEPT_FEATURES, total) // total)
        order = torch.randperm(size, generator=generator(seed, client, test.key, "kept"))
        kept.append(order[:share].sort().values)
    return kept


def refitted(detector: Detector, sums: Sequence[Mapping[str, Tensor]]) -> Detector:
    """The detector after the passes that these sums are of."""
    for total in sums:
        detector = detector.fit(total)
    return detector


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


def mean_private(clients: Sequence[ClientState]) -> Tensor:
    """The mean of the private values of the clients that have trained; of all, where none has."""
    rows = [client.personal for client in clients if client.trained] or [client.personal for client in clients]
    return torch.stack(rows).mean(0)


def anyone(client: ClientState, clients: Sequence[ClientState]) -> ClientState:
    """Someone whom the federation does not know, in the place of a client: no memory, and the classes of all."""
    counts = torch.stack([one.class_counts.to(client.class_counts.device) for one in clients]).sum(0)
    return replace(client, memory={}, class_counts=counts)


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


def evaluate(
    engine: Engine, state: RunState, detectors: Mapping[str, Detector], *, run: str = "", method: str = ""
) -> list[Row]:
    """All rows of a trained federation: method × detector × test set, per client, weighted and pooled."""
    return Evaluator(engine, detectors).evaluation(state, run=run, method=method).rows
