"""Evaluation: every method × every detector in one pass over the features, as rows in long form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from ..config import Config
from ..core.random import Streams, generator
from ..core.types import ClientState, Context, Output, Readout
from ..data.federation import Federation, TestSet
from ..data.readers import Progress
from ..detectors.base import Detector, check_passes, check_scores
from ..engine.eager import Engine
from ..methods.base import Method
from ..simulate import RunState, settled
from .rows import Answers, Asked, Evaluation, Fitted, Row, blank_row, make_rows

KEPT_FEATURES = 400  # samples of a test set whose features are kept, for pictures


Sums = Mapping[str, Sequence[Mapping[str, Tensor]]]
"""Detector → one set of sums a pass over the training features of all clients."""


@final
class Evaluator:
    """Runs a trained federation over its test sets."""

    def __init__(self, engine: Engine, detectors: Mapping[str, Detector], *, progress: Progress | None = None) -> None:
        """`progress` is told, during an evaluation, how many images of how many have been looked at."""
        for name, detector in detectors.items():
            check_passes(detector, name)
        self._engine, self._detectors = engine, detectors
        self._progress, self._seen, self._planned = progress, 0, 0
        self._scored: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}  # what the score network said, for features
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

    def _outputs(self, test: TestSet, state: RunState, *, adapt: bool) -> Iterator[tuple[ClientState, Tensor, Output]]:
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
            elif torch.equal(part, torch.arange(len(shared.z), device=part.device)):
                found = shared  # the very features: what is known of them for one client holds for all
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
        self._scored.clear()
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
                    total = mine.statistics(output, y, self._remembering(self._method.readout(self._nets)))
                    own_sums[client.id].setdefault(name, []).append(total)
                    mine = mine.fit(total)
                own[client.id][name] = mine
        return Fitted(common, own, sums, own_sums)

    def _remembering(self, readout: Readout) -> Readout:
        """The readout with a score network that is asked once about the same features: detectors ask in turn.

        Features are kept with what was said of them, so that their place in memory is not taken for that of others.
        """
        score, scored = readout.score, self._scored
        if score is None:
            return readout

        def ask(z: Tensor, sigma: Any = None) -> Tensor:
            key = (z.data_ptr(), z.shape, z.stride(), sigma)
            if key not in scored:
                scored[key] = z, score(z) if sigma is None else score(z, sigma)
            return scored[key][1]

        return replace(readout, score=ask)

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
                readout = self._remembering(self._method.readout(self._nets))
                for key, value in detector.statistics(output, y, readout).items():
                    total[key] = total[key] + value if key in total else value
            totals[name] = total
        return totals

    def _answers(self, test: TestSet, state: RunState, fitted: Fitted) -> Answers:
        correct, generic, predictions, features = {}, {}, {}, {}
        kept = dict(zip((client.id for client in state.clients), _kept_samples(test, self._config.seed), strict=True))
        self._scored.clear()
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
            readout = self._remembering(ask(self._nets))
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


def mean_private(clients: Sequence[ClientState]) -> Tensor:
    """The mean of the private values of the clients that have trained; of all, where none has."""
    rows = [client.personal for client in clients if client.trained] or [client.personal for client in clients]
    return torch.stack(rows).mean(0)


def anyone(client: ClientState, clients: Sequence[ClientState]) -> ClientState:
    """Someone whom the federation does not know, in the place of a client: no memory, and the classes of all."""
    counts = torch.stack([one.class_counts.to(client.class_counts.device) for one in clients]).sum(0)
    return replace(client, memory={}, class_counts=counts)


def evaluate(
    engine: Engine, state: RunState, detectors: Mapping[str, Detector], *, run: str = "", method: str = ""
) -> list[Row]:
    """All rows of a trained federation: method × detector × test set, per client, weighted and pooled."""
    return Evaluator(engine, detectors).evaluation(state, run=run, method=method).rows
