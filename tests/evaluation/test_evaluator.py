"""Evaluation agrees with a naive recomputation: one client, one test set and one plain forward pass at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import ClassVar, NamedTuple, final

import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor
from torch.nn.functional import cross_entropy

from foogd.config import Config
from foogd.core.random import generator
from foogd.core.types import Batch, Context, Nets, Output, Readout
from foogd.data.federation import Federation, TestSet, in_tests, out_tests
from foogd.data.synthetic import tiny_federation
from foogd.detectors.base import Detector
from foogd.detectors.logits import MSP, Energy
from foogd.detectors.registry import DETECTORS as by_name
from foogd.detectors.registry import FunctionDetector
from foogd.detectors.score import ScoreNorm
from foogd.engine.eager import EagerEngine
from foogd.evaluation.evaluator import evaluate
from foogd.evaluation.rows import Row
from foogd.methods import FOOGD, AnchoredFOOGD, FedAvg, FedRoD, Method
from foogd.nets.anchored import AnchoredScore
from foogd.nets.score import ScoreNet
from foogd.simulate import RunState, initial_state, settled, simulate

CLASSES = 4
CONFIG = Config(backbone="cnn", rounds=2, local_epochs=2, batch_size=8, lr=0.02, device="cpu", eval_batch=16)
DETECTORS: Mapping[str, Detector] = {"msp": MSP(), "energy": Energy(), "score_norm": ScoreNorm()}


# A federation with what evaluation must tell apart


@cache
def federation() -> Federation:
    """Unequal IN parts, one of them empty, two corruptions by two severities, one OUT set for all and one split."""
    base = tiny_federation(clients=4, classes=CLASSES, size=8, per_client=24)
    test, out = base.tests[0].store, base.tests[-1].store
    order = torch.randperm(len(test), generator=torch.Generator().manual_seed(3))
    parts = order.split([20, 9, 0, 19])
    other = replace(out, images=255 - test.images, labels=test.labels, name="negative")
    (split,) = out_tests([other], base.shape, clients=4)
    split = replace(split, indices=torch.arange(len(other)).split([10, 8, 13, 17]))
    return replace(
        base,
        tests=(
            *in_tests(test, parts, corruptions=("gaussian_noise", "contrast"), severities=(1, 5), seed=0),
            *out_tests([out], base.shape, clients=4),
            split,
        ),
    )


# Methods and detectors of these tests


@final
@dataclass(frozen=True)
class PrivateBackbone(Method):
    """Every client keeps its backbone; only the head travels."""

    def personal(self, name: str) -> bool:
        return name.startswith("backbone.")

    def losses(self, nets: Nets, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        return {"model": cross_entropy(nets["head"](batch.features), batch.y)}


@final
@dataclass(frozen=True)
class PrivateNorm(Method):
    """Batch normalisation stays on the client, as in FedBN."""

    def personal(self, name: str) -> bool:
        return name.startswith("backbone.stages.0.1.")

    def losses(self, nets: Nets, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        return {"model": cross_entropy(nets["head"](batch.features), batch.y)}


@final
@dataclass(frozen=True)
class Counting(Method):
    """A predictor with state: its n-th image has the feature n and the class n mod C."""

    made: list[int] = field(default_factory=list, compare=False)

    def losses(self, nets: Nets, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        return {"model": cross_entropy(nets["head"](batch.features), batch.y)}

    def predictor(self, nets: Nets, ctx: Context) -> Callable[[Tensor], Output]:
        number = len(self.made)
        self.made.append(0)

        def predict(x: Tensor) -> Output:
            count = self.made[number] + torch.arange(len(x))
            self.made[number] += len(x)
            z = torch.zeros(len(x), nets["head"].in_features)
            z[:, 0] = count
            return Output(z, torch.nn.functional.one_hot(count % CLASSES, CLASSES).float())

        return predict


@final
@dataclass(frozen=True)
class Position(Detector):
    """The first feature is the score: with `Counting`, the place of an image in its client's part."""

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Tensor:
        return outputs.z[:, 0]


@final
@dataclass(frozen=True)
class NearestMean(Detector):
    """Distance to the nearest class mean of all clients' training features; one pass."""

    passes: ClassVar[int] = 1
    means: Tensor | None = None
    fits: list[Tensor] = field(default_factory=list, compare=False)

    def statistics(self, outputs: Output, y: Tensor, readout: Readout) -> dict[str, Tensor]:
        members = torch.nn.functional.one_hot(y, CLASSES).double()
        return {"sum": members.T @ outputs.z.double(), "count": members.sum(0)}

    def fit(self, total: Mapping[str, Tensor]) -> NearestMean:
        self.fits.append(total["sum"] / total["count"][:, None])
        return replace(self, means=self.fits[-1])

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Tensor:
        assert self.means is not None
        return torch.cdist(outputs.z.double(), self.means).amin(1)


@final
@dataclass(frozen=True)
class Standardised(Detector):
    """Distance to the mean in units of the deviation: the first pass finds the mean, the second the deviation."""

    passes: ClassVar[int] = 2
    mean: Tensor | None = None
    fits: list[Tensor] = field(default_factory=list, compare=False)
    var: Tensor | None = None

    def statistics(self, outputs: Output, y: Tensor, readout: Readout) -> dict[str, Tensor]:
        z, n = outputs.z.double(), torch.tensor(float(len(y)), dtype=torch.float64)
        return {"sum": z.sum(0) if self.mean is None else (z - self.mean).square().sum(0), "n": n}

    def fit(self, total: Mapping[str, Tensor]) -> Standardised:
        self.fits.append(total["sum"] / total["n"])
        return replace(self, mean=self.fits[-1]) if self.mean is None else replace(self, var=self.fits[-1])

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Tensor:
        assert self.mean is not None
        assert self.var is not None
        return ((outputs.z.double() - self.mean) / (self.var + 1e-6).sqrt()).norm(dim=1)


@cache
def trained(name: str) -> tuple[EagerEngine, RunState]:
    """Two short rounds: enough that clients and nets differ, too few for perfect answers."""
    methods: dict[str, Method] = {
        "fedavg": FedAvg(),
        "fedrod": FedRoD(),
        "fedrod+foogd": FOOGD(FedRoD(), score_width=32, steps=3),
        "anchored": AnchoredFOOGD(FedRoD(), score_width=32, steps=3),
        "private backbone": PrivateBackbone(),
        "private norm": PrivateNorm(),
    }
    engine = EagerEngine(methods[name], federation(), CONFIG)
    *_, last = simulate(methods[name], federation(), CONFIG, engine)
    return engine, last.state


# The naive recomputation


class Key(NamedTuple):
    scope: str
    client: int | None
    dataset: str
    split: str
    corruption: str | None
    severity: int | None
    detector: str | None
    metric: str


Values, Weights = dict[int, float], dict[int, int]  # by client
Found = dict[Key, tuple[float, float]]  # value and weight


def found(rows: Sequence[Row]) -> Found:
    by_key = {Key(*(getattr(row, name) for name in Key._fields)): (row.value, row.weight) for row in rows}
    assert len(by_key) == len(rows), "two rows say the same thing"
    return by_key


def nets_of(engine: EagerEngine, state: RunState, client: int) -> Nets:
    """Fresh nets with the server's values and the client's own, copied one by one."""
    nets = engine.nets().eval()
    places = engine.layout.slices
    with torch.no_grad():
        for name, value in nets.state_dict().items():
            if name in state.server.integers:
                value.copy_(state.server.integers[name])
            else:
                row = state.server.shared if places[name].row == "shared" else state.clients[client].personal
                value.copy_(row[places[name].offset :][: value.numel()].view(value.shape))
    return nets


def naive_score(score: ScoreNet, z: Tensor) -> Tensor:
    """FOOGD's score at the noise level of detection, image by image."""
    sigma, found = FOOGD().sigma, []
    for row in z:
        u = (row * (len(row) / (row**2).sum()) ** 0.5 - score.centre) / score.spread
        size = (1 + sigma**2) ** 0.5
        learnt = score.net(torch.cat([u / size, torch.full((1,), sigma).log()])[None])[0]
        found.append(learnt / (sigma * size) - u / size**2)
    return torch.stack(found)


def naive_anchored_score(score: AnchoredScore, z: Tensor) -> Tensor:
    """The anchored variant's score at the noise level of detection, image by image and class by class."""
    sigma, found = 0.4, []
    size = score.running_var.clamp(min=max(0.01 * float(score.running_var.mean()), 0.25)).sqrt()
    noise = sigma * torch.randn(8, z.shape[1], generator=torch.Generator().manual_seed(0))
    for row in z:
        u = (row.sign() * (1 + row.abs() / (0.1 * row.abs().mean())).log() - score.running_mean) / size
        u = torch.stack([(u * column).sum() for column in score.anchor_turn.T])
        normals = [
            torch.distributions.Normal(mean, (var + sigma**2).sqrt())
            for mean, var in zip(score.anchor_mean, score.anchor_var, strict=True)
        ]
        chance = torch.stack([normal.log_prob(u).double().sum() for normal in normals]).softmax(0)
        pull = sum(p * (n.mean - u) / n.variance for p, n in zip(chance, normals, strict=True))
        level = torch.full((1,), sigma).log()
        learnt = [score.net(torch.cat([u + sign * v, level])[None])[0] / sigma for v in noise for sign in (1, -1)]
        found.append(pull + torch.stack(learnt).mean(0) / 2)
    return torch.stack(found)


def normalised(images: Tensor, federation: Federation) -> Tensor:
    x = images.permute(0, 3, 1, 2).float() / 255
    return (x - torch.tensor(federation.mean)[:, None, None]) / torch.tensor(federation.std)[:, None, None]


class Said(NamedTuple):
    """What one client's model says about its part of one test set."""

    right: Tensor
    right_generic: Tensor
    scores: dict[str, Tensor]


@torch.no_grad()
def said(engine: EagerEngine, state: RunState, test: TestSet, client: int) -> Said:
    nets = nets_of(engine, state, client)
    part = test.indices[client]
    z = nets["backbone"](normalised(test.store.images[part], engine.federation))
    generic = z @ nets["head"].weight.T + nets["head"].bias
    logits = generic
    if "personal_head" in nets:
        logits = generic + z @ nets["personal_head"].weight.T + nets["personal_head"].bias
    y = test.store.labels[part]
    scores = {
        "msp": -(logits.double() - torch.logsumexp(logits.double(), 1, keepdim=True)).exp().max(1).values,
        "energy": -torch.log(logits.double().exp().sum(1)),
    }
    if "score" in nets:
        by_hand = naive_score if isinstance(nets["score"], ScoreNet) else naive_anchored_score
        scores["score_norm"] = by_hand(nets["score"], z).norm(dim=1)
    return Said(logits.argmax(1) == y, generic.argmax(1) == y, scores)


def tau95(inside: Tensor) -> float:
    """The ceil(0.95 n)-th smallest IN score, in whole numbers."""
    rank = -(-95 * len(inside) // 100)
    return sorted(inside.tolist())[rank - 1]


def fpr95(inside: Tensor, outside: Tensor) -> float:
    tau = tau95(inside)
    return sum(score <= tau for score in outside.tolist()) / len(outside)


def labels_and_scores(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))]), torch.cat([inside, outside]).double()


METRICS = {
    "auroc": lambda inside, outside: roc_auc_score(*labels_and_scores(inside, outside)),
    "aupr": lambda inside, outside: average_precision_score(*labels_and_scores(inside, outside)),
    "fpr95": fpr95,
}


def share(flags: Tensor) -> float:
    return sum(flags.tolist()) / len(flags)


def naive(engine: EagerEngine, state: RunState, *, generic_rows: bool) -> Found:
    """Every row that evaluation should give for MSP, energy and the score norm."""
    tests, clients = engine.federation.tests, range(engine.federation.clients)
    answers = {t.key: {c: said(engine, state, t, c) for c in clients if len(t.indices[c])} for t in tests}
    rows: Found = {}

    def add(test: TestSet, detector: str | None, metric: str, values: Values, weights: Weights, pooled: float) -> None:
        about = (test.name, test.split, test.corruption, test.severity, detector, metric)
        for client, value in values.items():
            rows[Key("client", client, *about)] = value, weights[client]
        total = sum(weights[client] for client in values)
        rows[Key("weighted", None, *about)] = sum(v * weights[c] / total for c, v in values.items()), total
        rows[Key("pooled", None, *about)] = pooled, total

    clean = next(t for t in tests if t.split == "in")
    n_in = {client: len(clean.indices[client]) for client in clients if len(clean.indices[client])}
    known_tests = [t for t in tests if t.split != "out"]
    for test in known_tests:
        right = {client: answer.right for client, answer in answers[test.key].items()}
        add(test, None, "accuracy", {c: share(r) for c, r in right.items()}, n_in, share(torch.cat([*right.values()])))
        if generic_rows:
            generic = torch.cat([answer.right_generic for answer in answers[test.key].values()])
            about = (test.name, test.split, test.corruption, test.severity, None, "accuracy_generic")
            rows[Key("pooled", None, *about)] = share(generic), len(generic)

    for detector in answers[clean.key][0].scores:
        score = {key: {c: a.scores[detector] for c, a in by.items()} for key, by in answers.items()}
        inside = score[clean.key]
        pooled_in = torch.cat([*inside.values()])
        for test in known_tests:
            pooled_accepts = torch.cat([*score[test.key].values()]) <= tau95(pooled_in)
            accepts = {c: score[test.key][c] <= tau95(inside[c]) for c in n_in}
            add(test, detector, "rejected", {c: share(~a) for c, a in accepts.items()}, n_in, share(~pooled_accepts))
            right = {c: answers[test.key][c].right[a] for c, a in accepts.items() if a.any()}
            pooled_right = torch.cat([answers[test.key][c].right for c in n_in])[pooled_accepts]
            if not right or len(pooled_right) == 0:  # nothing was accepted, so there is no share of it
                continue
            add(
                test, detector, "accuracy_accepted", {c: share(r) for c, r in right.items()},
                {c: len(r) for c, r in right.items()}, share(pooled_right),
            )  # fmt: skip
        known = {c: torch.cat([score[test.key][c] for test in known_tests]) for c in n_in}
        for test in tests:
            if test.split != "out":
                continue
            outside = score[test.key]
            pooled_out = torch.cat([*outside.values()])
            for metric, compute in METRICS.items():
                values = {c: compute(inside[c], outside[c]) for c in n_in}
                add(test, detector, metric, values, n_in, compute(pooled_in, pooled_out))
            values = {c: METRICS["auroc"](known[c], outside[c]) for c in n_in}
            joint = METRICS["auroc"](torch.cat([*known.values()]), pooled_out)
            add(test, detector, "auroc_joint", values, n_in, joint)
    return rows


RANK = {"auroc", "aupr", "auroc_joint"}


def assert_same(rows: Found, wanted: Found) -> None:
    """The same rows with the same numbers; one pair that rounding puts the other way round may move a rank metric."""
    assert rows.keys() == wanted.keys()
    for key, (value, weight) in wanted.items():
        assert rows[key] == (pytest.approx(value, abs=2e-3 if key.metric in RANK else 1e-9), weight), key


# The tests


@pytest.mark.parametrize(
    ("name", "generic_rows"),
    [
        ("fedavg", False),
        ("fedrod+foogd", True),
        ("anchored", True),
        ("private backbone", False),
        ("private norm", False),
    ],
)
def test_every_row_agrees_with_a_naive_recomputation(name, generic_rows):
    engine, state = trained(name)
    wanted = naive(engine, settled(engine, state), generic_rows=generic_rows)
    values = {value for key, (value, _) in wanted.items() if key.scope == "client" and key.metric in METRICS}
    assert len(values) > 20, "the example is too easy: it would not notice a mixed-up client or test set"
    assert_same(found(evaluate(engine, state, DETECTORS)), wanted)


def test_a_client_without_in_test_images_has_no_row():
    engine, state = trained("fedavg")
    rows = evaluate(engine, state, DETECTORS)
    assert {row.client for row in rows if row.scope == "client"} == {0, 1, 3}


def test_every_corruption_and_severity_has_rows_of_its_own():
    engine, state = trained("fedavg")
    rows = [row for row in evaluate(engine, state, {"msp": MSP()}) if row.split == "in-c"]
    kinds = {(kind, severity) for kind in ("gaussian_noise", "contrast") for severity in (1, 5)}
    for metric in ("accuracy", "rejected", "accuracy_accepted"):
        for scope in ("weighted", "pooled"):
            hits = [row for row in rows if (row.metric, row.scope) == (metric, scope)]
            assert {(row.corruption, row.severity) for row in hits} == kinds
            assert len(hits) == len(kinds)


def test_the_share_of_in_that_is_rejected_is_at_most_five_percent():
    engine, state = trained("fedrod+foogd")
    shares = [row.value for row in evaluate(engine, state, DETECTORS) if (row.metric, row.split) == ("rejected", "in")]
    assert shares
    assert max(shares) <= 0.05


def test_score_norm_is_for_methods_with_a_score_network_only():
    rows = {name: evaluate(*trained(name), DETECTORS) for name in ("fedavg", "fedrod+foogd")}
    assert {row.detector for row in rows["fedavg"]} == {None, "msp", "energy"}
    assert {row.detector for row in rows["fedrod+foogd"]} == {None, *DETECTORS}


def test_rows_say_which_run_they_belong_to():
    engine, state = trained("fedavg")
    for row in evaluate(engine, state, {}, run="a", method="b"):
        assert (row.run, row.method, row.seed, row.round) == ("a", "b", CONFIG.seed, 2)


def test_the_generic_accuracy_of_fedrod_is_that_of_the_shared_head():
    engine, state = trained("fedrod")
    rows = found(evaluate(engine, state, {}))
    clean = engine.federation.tests[0]
    right = [said(engine, state, clean, client).right_generic for client in (0, 1, 3)]
    about = (clean.name, "in", None, None, None)
    assert rows[Key("pooled", None, *about, "accuracy_generic")] == (pytest.approx(share(torch.cat(right))), 48)
    assert rows[Key("pooled", None, *about, "accuracy")] != rows[Key("pooled", None, *about, "accuracy_generic")]
    assert not any(row.metric == "accuracy_generic" for row in evaluate(*trained("fedavg"), {}))


@pytest.mark.parametrize("name", ["fedavg", "fedrod+foogd", "private backbone"])
def test_rows_do_not_depend_on_the_size_of_a_pass(name):
    engine, state = trained(name)
    by_size = []
    for size in (7, 500):
        other = EagerEngine(engine.method, engine.federation, replace(CONFIG, eval_batch=size))
        by_size.append(found(evaluate(other, state, DETECTORS)))
    assert_same(*by_size)


@pytest.mark.parametrize("name", ["fedavg", "fedrod+foogd", "private backbone"])
def test_evaluating_twice_gives_identical_rows_and_leaves_the_state_alone(name):
    engine, state = trained(name)
    before = [state.server.shared.clone(), *(client.personal.clone() for client in state.clients)]
    assert evaluate(engine, state, DETECTORS) == evaluate(engine, state, DETECTORS)
    after = [state.server.shared, *(client.personal for client in state.clients)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_each_client_answers_with_its_own_backbone():
    engine, state = trained("private backbone")
    swapped = replace(state, clients=tuple(
        replace(client, personal=state.clients[0].personal) for client in state.clients
    ))  # fmt: skip
    own, foreign = (found(evaluate(engine, s, {"energy": Energy()})) for s in (state, swapped))

    def of_client(rows: Found, client: int) -> Found:
        return {key: value for key, value in rows.items() if key.client == client}

    assert of_client(own, 0) == of_client(foreign, 0)
    assert of_client(own, 1) != of_client(foreign, 1)
    assert of_client(own, 3) != of_client(foreign, 3)


# Detectors that are fitted


@torch.no_grad()
def training_features(engine: EagerEngine, state: RunState) -> tuple[Tensor, Tensor]:
    """Features and labels of all clients' training images in one batch, as a centralised fit would see them."""
    train = engine.federation.train
    return nets_of(engine, state, 0)["backbone"](normalised(train.images, engine.federation)).double(), train.labels


@pytest.mark.parametrize("name", ["fedavg", "fedrod"])
def test_a_fit_in_one_pass_over_clients_is_the_centralised_fit(name):
    engine, state = trained(name)
    engine = EagerEngine(engine.method, engine.federation, replace(CONFIG, eval_batch=500))
    detector = NearestMean()
    rows = found(evaluate(engine, state, {"nearest": detector}))
    z, y = training_features(engine, state)
    means = torch.stack([z[y == label].mean(0) for label in range(CLASSES)])
    assert len(detector.fits) == 1
    torch.testing.assert_close(detector.fits[0], means, rtol=1e-6, atol=1e-8)
    assert_detects(rows, engine, state, "nearest", lambda z: torch.cdist(z.double(), means).amin(1))


def test_a_fit_in_two_passes_over_clients_is_the_centralised_fit():
    engine, state = trained("fedavg")
    engine = EagerEngine(engine.method, engine.federation, replace(CONFIG, eval_batch=500))
    detector = Standardised()
    rows = found(evaluate(engine, state, {"standardised": detector}))
    z, _ = training_features(engine, state)
    mean, var = z.mean(0), z.var(0, correction=0)
    assert len(detector.fits) == 2
    torch.testing.assert_close(detector.fits[0], mean, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(detector.fits[1], var, rtol=1e-6, atol=1e-8)
    distance = Standardised(mean=mean, var=var)
    assert_detects(rows, engine, state, "standardised", lambda z: distance(Output(z, z)))


@torch.no_grad()
def assert_detects(
    rows: Found, engine: EagerEngine, state: RunState, name: str, score: Callable[[Tensor], Tensor]
) -> None:
    """The AUROC rows of each client are those of this score of its features."""

    def scores(test: TestSet, client: int) -> Tensor:
        images = normalised(test.store.images[test.indices[client]], engine.federation)
        return score(nets_of(engine, state, client)["backbone"](images))

    clean = engine.federation.tests[0]
    for test in engine.federation.tests:
        for client in (0, 1, 3):
            if test.split == "out":
                wanted = METRICS["auroc"](scores(clean, client), scores(test, client))
                value, _ = rows[Key("client", client, test.name, "out", None, None, name, "auroc")]
                assert value == pytest.approx(wanted, abs=2e-3)


def test_a_fit_on_features_of_private_backbones_sums_over_clients():
    engine, state = trained("private backbone")
    detector = NearestMean()
    evaluate(engine, state, {"nearest": detector})
    train = engine.federation.train
    with torch.no_grad():
        z = torch.cat([
            nets_of(engine, state, client)["backbone"](normalised(train.images[own], engine.federation)).double()
            for client, own in enumerate(engine.federation.train_indices)
        ])  # fmt: skip
    y = torch.cat([train.labels[own] for own in engine.federation.train_indices])
    means = torch.stack([z[y == label].mean(0) for label in range(CLASSES)])
    torch.testing.assert_close(detector.fits[0], means, rtol=1e-5, atol=1e-6)


# Test-time adaptation


def test_an_adapting_method_has_a_fresh_predictor_for_every_client_and_test_set():
    method = Counting()
    engine = EagerEngine(method, federation(), CONFIG)
    *_, last = simulate(method, federation(), replace(CONFIG, rounds=1), engine)
    rows = found(evaluate(engine, last.state, {"position": Position()}))
    seen = [len(part) for test in federation().tests for part in test.indices if len(part)]
    assert method.made == seen  # one predictor each, and it saw all of its part, over several passes
    for test in federation().tests:
        about = (test.name, test.split, test.corruption, test.severity)
        for client, n in ((0, 20), (1, 9), (3, 19)):
            part = test.indices[client]
            if test.split != "out":
                # A stream is shuffled, by the seed, so that the order of a store does not matter.
                order = torch.randperm(n, generator=generator(CONFIG.seed, client, test.key, "stream"))
                wanted = share(torch.argsort(order) % CLASSES == test.store.labels[part])
                assert rows[Key("client", client, *about, None, "accuracy")][0] == pytest.approx(wanted)
            else:
                wanted = METRICS["auroc"](torch.arange(n), torch.arange(len(part)))
                assert rows[Key("client", client, *about, "position", "auroc")][0] == pytest.approx(wanted)


def test_an_adapting_method_gives_identical_rows_twice():
    method = Counting()
    engine = EagerEngine(method, federation(), CONFIG)
    *_, last = simulate(method, federation(), replace(CONFIG, rounds=1), engine)
    assert evaluate(engine, last.state, DETECTORS) == evaluate(engine, last.state, DETECTORS)


# Incomplete tests


def without(test: TestSet, clients: Sequence[int]) -> TestSet:
    none = torch.empty(0, dtype=torch.int64)
    return replace(test, indices=tuple(none if c in clients else part for c, part in enumerate(test.indices)))


def evaluated(tests: Sequence[TestSet]) -> list[Row]:
    engine, state = trained("fedavg")
    other = EagerEngine(engine.method, replace(engine.federation, tests=tuple(tests)), CONFIG)
    return evaluate(other, state, {"msp": MSP()})


def with_parts_missing() -> Iterator[TestSet]:
    for test in federation().tests:
        if test.split == "out":
            yield without(test, [1])
        elif test.corruption == "contrast":
            yield without(test, [0])
        else:
            yield test


def test_clients_that_miss_a_test_set_have_no_rows_for_it_and_others_keep_theirs():
    rows = found(evaluated(list(with_parts_missing())))
    whole = found(evaluated(federation().tests))
    clients = [key for key in whole if key.scope == "client"]
    gone = {key for key in clients if (key.client, key.split) == (1, "out")}
    gone |= {key for key in clients if (key.client, key.corruption) == (0, "contrast")}
    assert gone
    assert {key for key in rows if key.scope == "client"} == set(clients) - gone
    for key in clients:
        if key not in gone and not (key.client == 0 and key.metric == "auroc_joint"):
            assert rows[key] == whole[key]


def test_without_any_in_test_image_nothing_can_be_detected():
    rows = evaluated([without(test, range(4)) if test.split == "in" else test for test in federation().tests])
    assert {row.metric for row in rows} == {"accuracy"}
    assert {row.split for row in rows} == {"in-c"}


@pytest.mark.parametrize("missing", [range(4), (0, 1, 3)])
def test_an_out_set_that_no_client_can_compare_with_its_in_images_has_no_row(missing):
    rows = evaluated([without(test, missing) if test.name == "negative" else test for test in federation().tests])
    assert {row.dataset for row in rows if row.split == "out"} == {"synthetic-out"}


def test_scores_that_are_no_numbers_cost_only_their_own_rows(federation, config):
    engine = EagerEngine(FedAvg(), federation, config)
    broken = FunctionDetector(lambda output: output.logits[:, 0] * float("nan"))
    rows = evaluate(engine, initial_state(engine), {"broken": broken, "msp": MSP()})
    assert {row.detector for row in rows} == {None, "msp"}


def test_the_score_network_is_asked_once_about_the_same_features(monkeypatch):
    asked = []
    forward = ScoreNet.forward

    def counted(self, u, sigma):
        asked.append((u.numpy().tobytes(), float(sigma)))
        return forward(self, u, sigma)

    engine = EagerEngine(FOOGD(FedAvg(), score_width=16), federation(), CONFIG)
    state = initial_state(engine)
    chosen = {name: by_name[name] for name in ("score_norm", "score_energy", "score_span", "score_span_all")}
    monkeypatch.setattr(ScoreNet, "forward", counted)
    evaluate(engine, state, chosen)
    assert len(asked) > len(federation().tests)
    assert len(set(asked)) == len(asked)
