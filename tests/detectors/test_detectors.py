"""Detectors: direction, invariances, closed forms, and how a user's own is found."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from sklearn.covariance import EmpiricalCovariance, ShrunkCovariance
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.neighbors import NearestNeighbors
from torch import Tensor, nn

from foogd import Config, FedAvg, evaluate
from foogd.core.errors import InputError
from foogd.core.plugins import load_object
from foogd.core.types import Output, Readout
from foogd.data.synthetic import tiny_federation
from foogd.detectors.base import Detector
from foogd.detectors.gaussians import Gaussian, Mahalanobis
from foogd.detectors.logits import MSP, Energy, GradNorm, MaxLogit
from foogd.detectors.neighbours import KNN
from foogd.detectors.pruning import ASH, DICE, ReAct
from foogd.detectors.registry import DETECTORS, FunctionDetector, resolve_detector
from foogd.detectors.score import ScoreEnergy, ScoreNear, ScoreNorm, ScoreOwn, ScoreSpan, ScoreSpanAll
from foogd.detectors.subspace import Span, SpanOwn, ViM
from foogd.detectors.sums import histogram, histogram_percentile
from foogd.engine.eager import EagerEngine
from foogd.metrics import auroc
from foogd.simulate import initial_state
from foogd.testing import check_detector

CLASSES, D = 5, 40


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def model() -> Readout:
    """A head that reads class c from its own block of features, and the exact score of N(mean, I) around them."""
    weight = torch.zeros(CLASSES, D)
    for c in range(CLASSES):
        weight[c, c * 8 : (c + 1) * 8] = 1.0

    def score(z: Tensor, sigma: float | None = None) -> Tensor:
        return -z / (1 + (sigma or 0.0) ** 2)

    def class_score(z: Tensor, classes: Tensor, sigma: float | None = None) -> Tensor:
        return score(z)

    return Readout(lambda z: z @ weight.T, weight, torch.zeros(CLASSES), score, class_score, score_space=lambda z: z)


def outputs(n: int = 60, seed: int = 0) -> Output:
    z = torch.rand(n, D, generator=stream(seed))
    return Output(z, model().head(z))


def separable() -> tuple[Output, Output]:
    """IN: the eight features of one class are active. OUT: eight features of all classes are, faintly."""
    z_in = 0.02 * torch.rand(400, D, generator=stream(0))
    for i in range(400):
        c = i % CLASSES
        z_in[i, c * 8 : (c + 1) * 8] += 2.0
    z_out = 0.02 * torch.rand(200, D, generator=stream(1))
    z_out[:, ::5] += 0.3
    head = model().head
    return Output(z_in, head(z_in)), Output(z_out, head(z_out))


def totals(detector: Detector, parts: Sequence[tuple[Output, Tensor, Readout]]) -> tuple[Detector, list[dict]]:
    """The detector, fitted on the sums of all parts, and the sums of each pass."""
    sums: list[dict[str, Tensor]] = []
    for _ in range(detector.passes):
        found = [detector.statistics(*part) for part in parts]
        sums.append({key: sum(part[key] for part in found[1:]) + found[0][key] for key in found[0]})
        detector = detector.fit(sums[-1])
    return detector, sums


def fitted(detector: Detector, data: Output, readout: Readout | None = None) -> Detector:
    """Fitted on all data at once, with classes in turn."""
    labels = torch.arange(len(data.z)) % CLASSES
    return totals(detector, [(data, labels, readout or model())])[0]


def all_detectors() -> list[Detector]:
    return [*DETECTORS.values(), ASH("s", 90), MSP(10.0), Energy(10.0)]


def learning_detectors() -> list[Detector]:
    return [detector for detector in DETECTORS.values() if detector.passes]


def name_of(detector: Detector) -> str:
    return repr(detector)


@pytest.mark.parametrize("detector", [d for d in all_detectors() if d != ScoreNorm()], ids=name_of)
def test_larger_means_more_out(detector: Detector) -> None:
    inside, outside = separable()
    detector = fitted(detector, inside)
    assert auroc(detector(inside, model()), detector(outside, model())) > 0.99


def test_the_score_norm_grows_away_from_the_mode() -> None:
    near, far = outputs(), outputs()._replace(z=outputs().z + 10.0)
    assert auroc(ScoreNorm()(near, model()), ScoreNorm()(far, model())) == 1.0


@pytest.mark.parametrize("detector", all_detectors(), ids=name_of)
def test_a_score_belongs_to_its_image(detector: Detector) -> None:
    detector = fitted(detector, outputs(90, seed=1))
    data, order = outputs(), torch.randperm(60, generator=stream(3))
    scores = detector(data, model())
    assert scores.shape == (60,)
    shuffled = detector(Output(data.z[order], data.logits[order]), model())
    torch.testing.assert_close(shuffled, scores[order], rtol=1e-6, atol=0)
    alone = torch.cat([detector(Output(data.z[i : i + 1], data.logits[i : i + 1]), model()) for i in range(5)])
    torch.testing.assert_close(alone, scores[:5], rtol=1e-5, atol=0)  # a float32 head rounds by the size of a batch


@pytest.mark.parametrize("detector", all_detectors(), ids=name_of)
def test_scores_are_finite_and_arguments_unchanged(detector: Detector) -> None:
    detector = fitted(detector, outputs(90, seed=1))
    for z in (outputs().z * 1e4, torch.zeros(4, D), torch.full((4, D), 1e4), -outputs().z):
        data = Output(z, model().head(z) + torch.tensor([1e4, -1e4, 0.0, 0.0, 0.0]))
        before = data.z.clone(), data.logits.clone()
        assert torch.isfinite(detector(data, model())).all()
        assert torch.equal(data.z, before[0])
        assert torch.equal(data.logits, before[1])


def test_msp_is_the_largest_probability_and_ignores_a_shift() -> None:
    data = outputs()
    torch.testing.assert_close(MSP()(data).float(), -torch.softmax(data.logits, 1).amax(1))
    torch.testing.assert_close(MSP(2.0)(data).float(), -torch.softmax(data.logits / 2, 1).amax(1))
    shifted = Output(data.z, data.logits.double() + 7.0)
    torch.testing.assert_close(MSP()(shifted), MSP()(data), rtol=0, atol=1e-12)


def test_msp_ranks_confident_images_that_are_equal_in_float32() -> None:
    logits = torch.zeros(3, CLASSES)
    logits[:, 0] = torch.tensor([20.0, 25.0, 30.0])
    assert (torch.softmax(logits, 1).amax(1) == 1).all()
    scores = MSP()(Output(torch.zeros(3, D), logits))
    assert scores[0] > scores[1] > scores[2]


def test_energy_and_max_logit_follow_a_shift() -> None:
    data = outputs()
    shifted = Output(data.z, data.logits.double() + 7.0)
    for detector in (Energy(), Energy(3.0), MaxLogit()):
        torch.testing.assert_close(detector(shifted), detector(data).double() - 7.0, rtol=0, atol=1e-10)


def test_energy_lies_between_the_max_logit_and_its_bound() -> None:
    data = outputs()
    gap = MaxLogit()(data) - Energy()(data)
    assert (gap > 0).all()
    assert (gap <= math.log(CLASSES)).all()
    torch.testing.assert_close(Energy(1e-3)(data), MaxLogit()(data).double(), rtol=0, atol=2e-3)


def test_ash_without_pruning() -> None:
    """p leaves the features, s multiplies them by e, b replaces each by the mean of its vector."""
    data, readout = outputs(), model()

    def energy_of(z: Tensor) -> Tensor:
        return Energy()(Output(z, readout.head(z)))

    torch.testing.assert_close(ASH("p", 0)(data, readout), Energy()(data), rtol=0, atol=1e-12)
    torch.testing.assert_close(ASH("s", 0)(data, readout), energy_of(math.e * data.z), rtol=1e-5, atol=0)
    flat = data.z.mean(1, keepdim=True).expand_as(data.z)
    torch.testing.assert_close(ASH("b", 0)(data, readout), energy_of(flat), rtol=1e-5, atol=0)


@pytest.mark.parametrize("variant", ["p", "b", "s"])
@pytest.mark.parametrize("percentile", [10, 33, 65, 90, 99.9])
def test_ash_keeps_the_largest_entries(variant: str, percentile: float) -> None:
    seen: list[Tensor] = []

    def head(z: Tensor) -> Tensor:
        seen.append(z)
        return z[:, :CLASSES]

    z = outputs(7).z
    ASH(variant, percentile)(Output(z, z[:, :CLASSES]), Readout(head))
    k = max(D - round(D * percentile / 100), 1)
    for row, pruned in zip(z.numpy(), seen[0].numpy(), strict=True):
        kept = np.sort(np.argsort(row)[-k:])
        expected = np.zeros(D)
        expected[kept] = {
            "p": row[kept],
            "b": np.full(k, row.sum() / k),
            "s": row[kept] * np.exp(row.sum() / row[kept].sum()),
        }[variant]
        np.testing.assert_allclose(pruned, expected, rtol=1e-4)
        assert (pruned != 0).sum() == k


def test_ash_keeps_exactly_k_of_equal_entries() -> None:
    seen: list[Tensor] = []
    readout = Readout(lambda z: seen.append(z) or z)
    ASH("p", 75)(Output(torch.ones(3, 8), torch.ones(3, 8)), readout)
    assert seen[0].sum(1).tolist() == [2.0, 2.0, 2.0]


def test_the_default_ash_is_the_papers() -> None:
    assert DETECTORS["ash"] == ASH("b", 65)
    assert (DETECTORS["ash_p"], DETECTORS["ash_s"]) == (ASH("p", 60), ASH("s", 95))


@pytest.mark.parametrize(("variant", "percentile"), [("x", 65), ("p", -1), ("p", 100), ("b", math.nan)])
def test_ash_refuses_other_settings(variant: str, percentile: float) -> None:
    with pytest.raises(InputError, match=r"is not allowed: it must be"):
        ASH(variant, percentile)


def test_gradnorm_is_the_gradient_of_the_last_layer() -> None:
    head = nn.Linear(D, CLASSES).double()
    z = torch.randn(9, D, generator=stream(), dtype=torch.float64)
    scores = GradNorm()(Output(z, head(z)))
    for i in range(9):
        loss = -torch.log_softmax(head(z[i]), 0).sum()
        (grad,) = torch.autograd.grad(loss, head.weight)
        assert float(scores[i].detach()) == pytest.approx(-float(grad.abs().sum()), rel=1e-10)


def test_score_norm_asks_for_its_noise_level() -> None:
    data, norm = outputs(), outputs().z.norm(dim=1)
    torch.testing.assert_close(ScoreNorm()(data, model()).float(), norm)
    torch.testing.assert_close(ScoreNorm(sigma=1.0)(data, model()).float(), norm / 2)


def test_detectors_say_whether_they_apply() -> None:
    plain = Readout(model().head)
    lacking = {name for name, detector in DETECTORS.items() if not detector.applies(plain)}
    scores = {"score_norm", "score_energy", "score_own", "score_near", "score_span", "score_span_all"}
    assert lacking == scores | {"dice", "vim"}
    assert all(d.applies(model()) for d in DETECTORS.values())
    heads = scores | {"ash", "ash_p", "ash_s", "react", "dice", "vim"}
    assert {name for name, d in DETECTORS.items() if not d.applies(None)} == heads
    for readout in (None, plain):
        with pytest.raises(InputError, match="score network"):
            ScoreNorm()(outputs(), readout)
    for detector in (ASH(), *(fitted(d, outputs()) for d in (ReAct(), DICE(), ViM()))):
        with pytest.raises(InputError, match=f"{type(detector).__name__} needs the model's head"):
            detector(outputs())
    for detector in (fitted(DICE(), outputs()), fitted(ViM(), outputs())):
        with pytest.raises(InputError, match="needs the weights of a linear head"):
            detector(outputs(), plain)


def test_every_detector_describes_itself() -> None:
    assert list(DETECTORS) == [
        "msp", "max_logit", "energy", "ash", "ash_p", "ash_s", "react", "dice", "vim", "knn", "mahalanobis",
        "gradnorm", "score_norm", "score_energy", "score_own", "score_near", "score_span", "score_span_all",
        "gaussian", "span", "span_own",
    ]  # fmt: skip
    for detector in DETECTORS.values():
        assert detector.description
        assert "\n" not in detector.description
        assert detector.paper
        assert detector.passes >= 0
        assert detector.local == isinstance(detector, KNN | ScoreOwn | ScoreNear | ScoreSpan | SpanOwn)
        learnt = [f.name for f in fields(detector) if "help" not in f.metadata]
        assert bool(learnt) == bool(detector.passes)
        assert all(getattr(detector, name) is None for name in learnt)


@pytest.mark.parametrize(
    ("make", "allowed"),
    [
        (lambda: MSP(0.0), "temperature = 0.0 is not allowed: it must be a number above 0.0"),
        (lambda: Energy(-1.0), "above 0.0"),
        (lambda: ScoreNorm(sigma=0.0), "above 0.0"),
        (lambda: ReAct(101.0), "percentile = 101.0 is not allowed: it must be a number at least 0.0 and at most 100.0"),
        (lambda: DICE(100.0), "at least 0.0 and below 100.0"),
        (lambda: ViM(1.0), "at least 0.0 and below 1.0"),
        (lambda: KNN(0), "at least 1"),
        (lambda: Mahalanobis(math.nan), "shrinkage = nan is not allowed: it must be a number at least 0.0"),
        (lambda: Gaussian(-1e-6), "at least 0.0 and at most 1.0"),
    ],
)
def test_settings_outside_of_their_limits_are_refused(make, allowed: str) -> None:
    with pytest.raises(InputError, match=re.escape(allowed)):
        make()


def test_detectors_without_training_passes_need_no_fit() -> None:
    data = outputs()
    for detector in DETECTORS.values():
        if detector.passes == 0:
            assert detector.statistics(data, torch.zeros(60, dtype=torch.long), model()) == {}
            assert detector.fit({}) is detector


# ---------------------------------------------------------------------------------- detectors that learn from features


def one_minus(z: Tensor, classes: Tensor, sigma: float | None = None) -> Tensor:
    return 1 - z


def same(z: Tensor) -> Tensor:
    return z


def linear(seed: int = 0) -> Readout:
    """A linear head in float64 with all its weights, and a score."""
    weight = torch.randn(CLASSES, D, generator=stream(seed), dtype=torch.float64) / 4
    bias = torch.randn(CLASSES, generator=stream(seed + 100), dtype=torch.float64)
    return Readout(lambda z: z @ weight.T + bias, weight, bias, lambda z, sigma=None: 1 - z, one_minus, same)


def features(n: int, seed: int = 0, readout: Readout | None = None) -> tuple[Output, Tensor]:
    """Correlated features of both signs around class means far from 0, and their labels."""
    draw = stream(seed)
    axes = torch.linalg.qr(torch.randn(D, D, generator=stream(99), dtype=torch.float64)).Q
    widths = torch.logspace(0.5, -1, D, dtype=torch.float64)
    means = 2 * torch.randn(CLASSES, D, generator=stream(98), dtype=torch.float64)
    labels = torch.randint(CLASSES, (n,), generator=draw)
    z = 3 + means[labels] + torch.randn(n, D, generator=draw, dtype=torch.float64) * widths @ axes
    return Output(z, (readout or linear()).head(z)), labels


def cut(data: Output, labels: Tensor, sizes: Sequence[int], readout: Readout) -> list[tuple[Output, Tensor, Readout]]:
    pieces = zip(data.z.split(list(sizes)), data.logits.split(list(sizes)), labels.split(list(sizes)), strict=True)
    return [(Output(z, logits), y, readout) for z, logits, y in pieces]


@pytest.mark.parametrize("detector", [d for d in learning_detectors() if not d.local], ids=name_of)
def test_how_the_data_is_cut_does_not_matter(detector: Detector) -> None:
    (data, labels), (test, _), readout = features(300), features(80, seed=1), linear()
    whole, _ = totals(detector, [(data, labels, readout)])
    expected = whole(test, readout)
    for sizes in ([300], [1, 299], [150, 0, 150], [7] * 42 + [6]):
        parts, _ = totals(detector, cut(data, labels, sizes, readout))
        torch.testing.assert_close(parts(test, readout), expected, rtol=1e-10, atol=1e-10)
    order = labels.argsort(stable=True)  # each client has one class
    by_class = cut(Output(data.z[order], data.logits[order]), labels[order], labels.bincount().tolist(), readout)
    torch.testing.assert_close(totals(detector, by_class)[0](test, readout), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("detector", learning_detectors(), ids=name_of)
def test_stored_sums_give_the_detector_again(detector: Detector, tmp_path: Path) -> None:
    (data, labels), (test, _), readout = features(300), features(80, seed=1), linear()
    first, sums = totals(detector, [(data, labels, readout)])
    again = detector
    for number, total in enumerate(sums):
        np.savez(tmp_path / f"{number}.npz", **{key: value.numpy() for key, value in total.items()})
        with np.load(tmp_path / f"{number}.npz", allow_pickle=False) as stored:
            again = again.fit({key: torch.from_numpy(stored[key]) for key in stored.files})
    assert torch.equal(again(test, readout), first(test, readout))
    assert torch.equal(first.prepared(readout)(test, readout), first(test, readout))


@pytest.mark.parametrize("detector", learning_detectors(), ids=name_of)
def test_use_before_fitting_is_refused(detector: Detector) -> None:
    data, labels = features(30)
    for _ in range(detector.passes):
        with pytest.raises(InputError, match=rf"^{type(detector).__name__} was used before it was fitted: [^\n]*\.$"):
            detector(data, linear())
        with pytest.raises(InputError, match="cannot be fitted"):
            detector.fit({})
        nothing = detector.statistics(Output(data.z[:0], data.logits[:0]), labels[:0], linear())
        with pytest.raises(InputError, match="no training features"):
            detector.fit(nothing)
        detector = detector.fit(detector.statistics(data, labels, linear()))
    assert torch.isfinite(detector(data, linear())).all()


@pytest.mark.parametrize("detector", learning_detectors(), ids=name_of)
@pytest.mark.parametrize(
    "damage",
    [
        lambda z: z * 0,
        lambda z: z * 1e4,
        lambda z: -z.abs(),
        lambda z: z * (torch.arange(D) % 3 > 0),  # dead features
        lambda z: z * 0 + 5,
        lambda z: z[:, :1].expand(-1, D),  # rank 1
        lambda z: z[:1],
        lambda z: z[:CLASSES],
        lambda z: z[: CLASSES + 2],
    ],
    ids=["zero", "large", "negative", "dead", "constant", "rank one", "one sample", "one a class", "few"],
)
def test_poor_training_features_give_finite_scores(detector: Detector, damage) -> None:
    readout, (data, _), (test, _) = linear(), features(60), features(20, seed=1)
    for dtype in (torch.float32, torch.float64):
        z, weight, bias = damage(data.z).to(dtype), readout.weight.to(dtype), readout.bias.to(dtype)
        head = replace(readout, head=lambda z, w=weight, b=bias: z @ w.T + b, weight=weight, bias=bias)
        y = torch.arange(len(z)) % (CLASSES - 1)  # nobody has the last class
        learnt, _ = totals(detector, [(Output(z, head.head(z)), y, head)])
        for scale in (0.0, 1.0, 1e4):
            x = test.z.to(dtype) * scale
            assert torch.isfinite(learnt(Output(x, head.head(x)), head)).all()


@pytest.mark.parametrize("detector", learning_detectors(), ids=name_of)
def test_a_model_that_has_diverged_scores_nan_and_does_not_stop_the_evaluation(detector: Detector) -> None:
    z, weight = torch.full((8, D), math.nan), torch.full((CLASSES, D), math.nan)
    readout = Readout(lambda z: z @ weight.T, weight, weight[:, 0], lambda z, sigma=None: -z, one_minus, same)
    data = Output(z, readout.head(z))
    learnt, _ = totals(detector, [(data, torch.zeros(8, dtype=torch.long), readout)])
    assert learnt(data, readout).isnan().all()


@pytest.mark.parametrize("percentile", [0.0, 2.5, 10.0, 90.0, 99.0, 100.0])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("shift", [0.0, 3.0, -9.0], ids="shift {}".format)
def test_the_threshold_of_react_is_the_percentile(percentile: float, scale: float, shift: float) -> None:
    z = scale * (shift + torch.randn(500, D, generator=stream(), dtype=torch.float64))
    expected = np.percentile(z.numpy(), percentile)
    assert histogram_percentile(histogram(z), percentile) == pytest.approx(expected, rel=1e-3)


def test_the_threshold_of_react_among_zeros_and_between_two_values() -> None:
    half = torch.randn(500, D, generator=stream()).clamp_min(0.0)
    assert histogram_percentile(histogram(half), 40.0) == 0.0
    assert histogram_percentile(histogram(half), 90.0) == pytest.approx(np.percentile(half.numpy(), 90), rel=1e-3)
    two = torch.tensor([[-1.0, 3.0]])
    for percentile in (0.0, 30.0, 75.0, 100.0):
        expected = np.percentile(two.numpy(), percentile)
        assert histogram_percentile(histogram(two), percentile) == pytest.approx(expected, abs=3e-3)
    extreme = torch.tensor([[-math.inf, -1e30, 0.0, 1e-30, 1e30, math.inf, math.nan]])
    assert int(histogram(extreme).sum()) == 7


def test_react_is_the_energy_of_clipped_features() -> None:
    (data, labels), readout = features(300), linear()
    react, _ = totals(ReAct(80.0), [(data, labels, readout)])
    assert react.threshold == pytest.approx(np.percentile(data.z.numpy(), 80), rel=1e-3)
    clipped = torch.minimum(data.z, torch.tensor(react.threshold))
    torch.testing.assert_close(react(data, readout), -torch.logsumexp(readout.head(clipped), 1))
    assert torch.equal(replace(react, threshold=math.inf)(data, readout), Energy()(data))


def test_dice_keeps_the_largest_contributions() -> None:
    (data, labels), (test, _), readout = features(300), features(50, seed=1), linear()
    weight, bias, z = readout.weight.numpy(), readout.bias.numpy(), test.z.numpy()
    contribution = data.z.numpy().mean(0) * weight
    for percentile in (0.0, 50.0, 90.0, 99.99):
        dice, _ = totals(DICE(percentile), [(data, labels, readout)])
        kept = max(weight.size - round(weight.size * percentile / 100), 1)
        mask = contribution >= np.sort(contribution.ravel())[-kept]
        assert mask.sum() == kept
        expected = -np.log(np.exp(z @ (weight * mask).T + bias).sum(1))
        np.testing.assert_allclose(dice(test, readout).numpy(), expected, rtol=1e-10)
    everything, _ = totals(DICE(0.0), [(data, labels, readout)])
    torch.testing.assert_close(everything(test, readout), Energy()(test), rtol=0, atol=1e-10)


def brute_force_vim(data: Output, test: Output, readout: Readout, share: float) -> np.ndarray:
    weight, bias, z = readout.weight.numpy(), readout.bias.numpy(), data.z.numpy()
    origin = -np.linalg.pinv(weight) @ bias
    scatter = EmpiricalCovariance(assume_centered=True).fit(z - origin).covariance_
    values, vectors = np.linalg.eig(scatter)
    residual = vectors.real[:, np.argsort(-values.real)[int(share * D) :]]
    alpha = (z @ weight.T + bias).max(1).mean() / np.linalg.norm((z - origin) @ residual, axis=1).mean()
    virtual = alpha * np.linalg.norm((test.z.numpy() - origin) @ residual, axis=1)
    return virtual - np.log(np.exp(test.logits.numpy()).sum(1))


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.975])
def test_vim_is_the_residual_and_the_energy(share: float) -> None:
    (data, labels), (test, _), readout = features(300), features(50, seed=1), linear()
    vim, _ = totals(ViM(share), [(data, labels, readout)])
    known = brute_force_vim(data, test, readout, share)
    np.testing.assert_allclose(vim(test, readout).numpy(), known, rtol=1e-9, atol=1e-9)


def test_score_energy_joins_the_norm_of_the_score_with_the_energy() -> None:
    (data, labels), (test, _) = features(300), features(50, seed=1)
    readout = replace(linear(), score=lambda z, sigma=None: 3 * z if sigma is None else z / sigma)
    joined, _ = totals(ScoreEnergy(), [(data, labels, readout)])
    norms, tops = 3 * data.z.numpy(), data.logits.numpy().max(1)
    alpha = abs(tops.mean()) / np.linalg.norm(norms, axis=1).mean()
    wanted = alpha * 3 * np.linalg.norm(test.z.numpy(), axis=1) - np.log(np.exp(test.logits.numpy()).sum(1))
    np.testing.assert_allclose(joined(test, readout).numpy(), wanted, rtol=1e-9)
    level, _ = totals(ScoreEnergy(sigma=0.5), [(data, labels, readout)])  # the scale of a score does not matter
    np.testing.assert_allclose(level(test, readout).numpy(), wanted, rtol=1e-9)
    with pytest.raises(InputError, match="score network"):
        joined(test, replace(linear(), score=None))


def test_score_own_is_score_energy_of_the_clients_own_classes() -> None:
    (data, labels), (test, _) = features(300), features(50, seed=1)
    shift = torch.arange(float(CLASSES), dtype=torch.float64)

    def class_score(z: Tensor, classes: Tensor, sigma: float | None = None) -> Tensor:
        return (z - (shift * classes).sum()) / (sigma or 1.0)

    readout = replace(linear(), score=lambda z, sigma=None: z, class_score=class_score)
    mine = labels < 2
    data = Output(data.z[mine], data.logits[mine])
    fitted = ScoreOwn().fit(ScoreOwn().statistics(data, labels[mine], readout))
    assert fitted.own is not None
    assert fitted.own.tolist() == [1.0, 1.0] + [0.0] * (CLASSES - 2)
    logits, norms = readout.head(test.z)[:, :2].numpy(), np.linalg.norm(test.z.numpy() - 1.0, axis=1)
    alpha = abs(readout.head(data.z)[:, :2].numpy().max(1).mean()) / np.linalg.norm(data.z.numpy() - 1.0, axis=1).mean()
    wanted = alpha * norms - np.log(np.exp(logits).sum(1))
    np.testing.assert_allclose(fitted(test, readout).numpy(), wanted, rtol=1e-9)
    assert not ScoreOwn().applies(replace(readout, class_score=None))
    with pytest.raises(InputError, match="knows classes"):
        fitted(test, replace(readout, class_score=None))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_score_near_joins_distance_score_and_energy(share: float) -> None:
    (data, labels), (test, _) = features(300), features(50, seed=1)

    def class_score(z: Tensor, classes: Tensor, sigma: float | None = None) -> Tensor:
        return (z - classes.sum()) / (sigma or 1.0)

    readout = replace(linear(), class_score=class_score, score_space=lambda z: z[:, :3] * 2)
    mine = labels < 2
    data, labels = Output(data.z[mine], data.logits[mine]), labels[mine]
    detector = ScoreNear(k=7, share=share)
    near = detector.fit(detector.statistics(data, labels, readout))
    bank, seen = 2 * data.z[:, :3].numpy(), 2 * test.z[:, :3].numpy()

    def kth(points: np.ndarray, place: int) -> np.ndarray:
        return np.sort(np.linalg.norm(points[:, None] - bank, axis=2), axis=1)[:, place]

    def norms(z: Tensor) -> np.ndarray:
        return np.linalg.norm(z.numpy() - 2.0, axis=1)  # two classes

    logits, alpha = readout.head(test.z).numpy(), abs(readout.head(data.z).numpy().max(1).mean())
    wanted = alpha * (
        (1 - share) * kth(seen, 6) / kth(bank, 7).mean()  # of a feature of the bank, place 0 is itself
        + share * norms(test.z) / norms(data.z).mean()
    ) - np.log(np.exp(logits).sum(1))
    np.testing.assert_allclose(near(test, readout).numpy(), wanted, rtol=1e-6)
    level = replace(detector, sigma=0.5)  # the scale of a score does not matter
    level = level.fit(level.statistics(data, labels, readout))
    np.testing.assert_allclose(level(test, readout).numpy(), wanted, rtol=1e-6)


def test_score_near_asks_for_features_and_a_score_that_knows_classes() -> None:
    data, labels = features(30)
    near = ScoreNear().fit(ScoreNear().statistics(data, labels, linear()))
    for lacks in ("score_space", "class_score"):
        without = replace(linear(), **{lacks: None})
        assert not ScoreNear().applies(without)
        with pytest.raises(InputError, match="score network"):
            near(data, without)
    with pytest.raises(InputError, match="no training features"):
        ScoreNear().fit(ScoreNear().statistics(Output(data.z[:0], data.logits[:0]), labels[:0], linear()))


@pytest.mark.parametrize("count", [1, 2, 2500])
def test_score_near_takes_few_features_and_many(count: int) -> None:
    data, labels = features(count)
    near = ScoreNear().fit(ScoreNear().statistics(data, labels, linear()))
    assert bool(near(features(20, seed=1)[0], linear()).isfinite().all())
    assert near.of_distance is not None
    assert (near.of_distance > 0) == (count > 1)  # a feature alone has no neighbour


def test_with_little_noise_the_score_of_given_points_is_as_long_as_the_way_to_the_nearest() -> None:
    """What `ScoreNear` relies on: σ²·‖∇ log Σ_i exp(−‖u − u_i‖²/2σ²)‖ → min_i ‖u − u_i‖."""
    stream = torch.Generator().manual_seed(0)
    points = torch.randn(200, 8, generator=stream, dtype=torch.float64)
    u = torch.randn(40, 8, generator=stream, dtype=torch.float64).requires_grad_()
    sigma = 0.002
    log_density = torch.logsumexp(-torch.cdist(u, points).square() / (2 * sigma**2), 1)
    (score,) = torch.autograd.grad(log_density.sum(), u)
    flat = torch.ones(200, CLASSES, dtype=torch.float64)
    readout = Readout(lambda z: flat[: len(z)], class_score=one_minus, score_space=same)
    near = ScoreNear(k=1, share=0.0)
    near = near.fit(near.statistics(Output(points, flat), torch.zeros(200, dtype=torch.long), readout))
    assert near.of_distance is not None
    distance = (near(Output(u.detach(), flat[:40]), readout) + 1 + np.log(CLASSES)) / near.of_distance
    torch.testing.assert_close(sigma**2 * score.norm(dim=1), distance, rtol=0.02, atol=0.0)


def test_vim_has_no_residual_in_the_principal_space() -> None:
    """Features on a plane through the point of no logits; only what leaves the plane has a residual."""
    readout = linear()
    origin = -torch.linalg.pinv(readout.weight) @ readout.bias
    torch.testing.assert_close(readout.head(origin[None]), torch.zeros(1, CLASSES, dtype=torch.float64))
    plane = torch.linalg.qr(torch.randn(D, D, generator=stream(), dtype=torch.float64)).Q
    wide, narrow = plane[:, : D // 2], plane[:, D // 2 :]
    draw = torch.randn(400, D, generator=stream(1), dtype=torch.float64)
    z = origin + 3 * draw[:, : D // 2] @ wide.T
    data = Output(z, readout.head(z))
    vim, _ = totals(ViM(), [(data, torch.zeros(400, dtype=torch.long), readout)])
    vim = replace(vim, alpha=1.0)
    torch.testing.assert_close(vim(data, readout), Energy()(data), rtol=0, atol=1e-6)
    off = z + draw[:, D // 2 :] @ narrow.T
    far = Output(off, readout.head(off))
    torch.testing.assert_close(vim(far, readout) - Energy()(far), draw[:, D // 2 :].norm(dim=1), rtol=1e-6, atol=0)


def test_vim_does_not_choose_among_directions_without_variance() -> None:
    """With fewer directions than the principal space has room for, an outlier outside of them is still seen in full."""
    readout = linear()
    origin = -torch.linalg.pinv(readout.weight) @ readout.bias
    z = origin + torch.randn(200, 6, generator=stream(), dtype=torch.float64) @ torch.eye(D, dtype=torch.float64)[:6]
    vim, _ = totals(ViM(), [(Output(z, readout.head(z)), torch.zeros(200, dtype=torch.long), readout)])
    off = z.clone()
    off[:, 6:] += 1.0
    far = Output(off, readout.head(off))
    residual = replace(vim, alpha=1.0)(far, readout) - Energy()(far)
    torch.testing.assert_close(residual, torch.full((200,), math.sqrt(D - 6), dtype=torch.float64))


def test_vim_takes_rounding_for_no_residual() -> None:
    readout = linear()
    z = torch.arange(1, 101, dtype=torch.float64)[:, None] * torch.ones(D, dtype=torch.float64)
    z = z - torch.linalg.pinv(readout.weight) @ readout.bias
    vim, sums = totals(ViM(), [(Output(z, readout.head(z)), torch.zeros(100, dtype=torch.long), readout)])
    assert float(sums[1]["residual"]) < 1e-9 * float(sums[1]["length"])
    assert vim.alpha == pytest.approx(1e6 * abs(float(sums[1]["max_logit"] / sums[1]["length"])))
    weight = readout.weight
    still = Readout(lambda z: z @ weight.T, weight)  # features that are all at the point of no logits
    vim, _ = totals(ViM(), [(Output(z * 0, still.head(z * 0)), torch.zeros(100, dtype=torch.long), still)])
    assert torch.equal(vim(Output(z, still.head(z)), still), Energy()(Output(z, still.head(z))))


def test_vim_asks_each_client_with_its_own_head() -> None:
    heads = [linear(1), linear(2)]
    parts = [(*features(100, seed=s, readout=head), head) for s, head in enumerate(heads)]
    vim, sums = totals(ViM(), parts)
    own = [replace(vim, alpha=1.0)(data, head) - Energy()(data) for data, _, head in parts]
    logits = torch.cat([data.logits.amax(1) for data, _, _ in parts])
    assert vim.alpha == pytest.approx(float(logits.mean() / torch.cat(own).mean()), rel=1e-9)
    assert vim.prepared(heads[0]).prepared(heads[1]).fit(sums[1]).space is None


def test_prepared_for_another_model_and_no_longer_bound_to_its_nets() -> None:
    (data, labels), (test, _) = features(300), features(50, seed=1)
    for detector in (DICE(), ViM()):
        learnt, _ = totals(detector, [(data, labels, linear(1))])
        first, second = learnt.prepared(linear(1)), learnt.prepared(linear(1)).prepared(linear(2))
        expected = learnt(test, linear(1)), learnt(test, linear(2))
        assert not torch.allclose(*expected)
        assert torch.equal(first(test, linear(1)), expected[0])
        assert torch.equal(second(test, linear(2)), expected[1])
        nets = linear(1)
        ready = learnt.prepared(nets)
        nets.weight.zero_()
        nets.bias.zero_()
        assert torch.equal(ready(test, linear(1)), expected[0])


@pytest.mark.parametrize("bias", [None, torch.zeros(CLASSES, dtype=torch.float64)], ids=["none", "zero"])
def test_a_head_without_bias_has_bias_zero(bias: Tensor | None) -> None:
    (data, labels), weight = features(300), linear().weight
    readout = Readout(lambda z: z @ weight.T, weight, bias)
    data = Output(data.z, readout.head(data.z))
    assert torch.equal(totals(DICE(0.0), [(data, labels, readout)])[0](data, readout), Energy()(data))
    vim, _ = totals(ViM(), [(data, labels, readout)])
    np.testing.assert_allclose(
        vim(data, readout).numpy(),
        brute_force_vim(data, data, replace(readout, bias=torch.zeros(CLASSES, dtype=torch.float64)), 0.5),
        rtol=1e-9,
    )


@pytest.mark.parametrize(("n", "k"), [(300, 50), (101, 50), (100, 50), (99, 49), (5, 2), (3, 1), (2, 1), (1, 1)])
def test_knn_is_the_distance_to_the_kth_neighbour(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (data, labels), (test, _), readout = features(n), features(40, seed=1), linear()
    knn, _ = totals(KNN(), [(data, labels, readout)])
    bank, z = (x.numpy() / np.linalg.norm(x.numpy(), axis=1, keepdims=True) for x in (data.z, test.z))
    distances, _ = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(bank).kneighbors(z)
    np.testing.assert_allclose(knn(test).numpy(), distances[:, -1], rtol=1e-9)
    torch.testing.assert_close(knn(Output(test.z * 7, test.logits)), knn(test))
    monkeypatch.setattr("foogd.detectors.neighbours.DISTANCES", 1000)
    torch.testing.assert_close(knn(test), torch.from_numpy(distances[:, -1]), rtol=1e-9, atol=0)


def test_knn_finds_its_own_features_also_in_float32() -> None:
    data = features(20)[0]
    data = Output(data.z.float(), data.logits)
    knn, _ = totals(KNN(1), [(data, torch.zeros(20, dtype=torch.long), linear())])
    assert float(knn(data).max()) < 1e-6


@pytest.mark.parametrize("bank", [{}, {"bank": torch.zeros(0, D)}], ids=["missing", "empty"])
def test_knn_without_features_is_refused(bank: dict[str, Tensor]) -> None:
    with pytest.raises(InputError, match="has no training features of its own"):
        KNN().fit(bank)


def clients(n: int = 400) -> tuple[Output, Tensor, list[tuple[Output, Tensor, Readout]]]:
    data, labels = features(n)
    return data, labels, cut(data, labels, [n // 4, n // 8, n - n // 4 - n // 8], linear())


def test_federated_mahalanobis_is_the_central_one() -> None:
    (data, labels, parts), (test, _) = clients(), features(50, seed=1)
    central = LinearDiscriminantAnalysis(solver="lsqr", store_covariance=True).fit(data.z.numpy(), labels.numpy())
    for shrinkage in (0.0, 1e-6, 0.1):
        scale = np.trace(central.covariance_) / D
        inverse = np.linalg.inv((1 - shrinkage) * central.covariance_ + shrinkage * scale * np.eye(D))
        away = test.z.numpy()[:, None] - central.means_
        expected = np.einsum("ncd,de,nce->nc", away, inverse, away).min(1)
        found, _ = totals(Mahalanobis(shrinkage), parts)
        np.testing.assert_allclose(found(test).numpy(), expected, rtol=1e-10)


def test_mahalanobis_knows_only_classes_that_somebody_has() -> None:
    data, labels = features(200)
    labels = labels.clamp_max(2)  # two classes without a sample, which are no clusters at 0
    found, _ = totals(Mahalanobis(), [(data, labels, linear())])
    assert len(found.means) == 3
    three = Output(data.z, data.logits[:, :3])
    torch.testing.assert_close(found(data), totals(Mahalanobis(), [(three, labels, linear())])[0](data))
    nowhere = Output(torch.zeros(1, D, dtype=torch.float64), torch.zeros(1, CLASSES))
    assert float(found(nowhere)) > float(found(data).max())


@pytest.mark.parametrize("shrinkage", [1e-6, 0.1])
def test_federated_gaussian_is_the_central_density(shrinkage: float) -> None:
    (data, _, parts), (test, _) = clients(), features(50, seed=1)
    central = ShrunkCovariance(shrinkage=shrinkage).fit(data.z.numpy())
    expected = -multivariate_normal(central.location_, central.covariance_).logpdf(test.z.numpy())
    found, _ = totals(Gaussian(shrinkage), parts)
    np.testing.assert_allclose(found(test).numpy(), expected, rtol=1e-10)


def test_dead_features_are_far_away_but_finite() -> None:
    """A feature that never varied has the shrunk variance, 1e-6 of the mean one."""
    data, labels = features(300)
    alive = torch.arange(D) < D // 2
    data = Output(data.z * alive, data.logits)
    awake = Output(data.z + 0.1 * ~alive, data.logits)
    gaussian, _ = totals(Gaussian(), [(data, labels, linear())])
    variance = data.z.var(dim=0, correction=0).mean()
    gap = gaussian(awake) - gaussian(data)
    torch.testing.assert_close(gap, (0.5 * 0.01 * (D // 2) / (1e-6 * variance)).expand(300), rtol=1e-5, atol=0)
    assert auroc(*(totals(Mahalanobis(), [(data, labels, linear())])[0](x) for x in (data, awake))) == 1.0


@dataclass(frozen=True)
class FromMean(Detector):
    """Closeness to the mean of the training features, between whose clusters OUT is; to break in one way at a time."""

    passes: ClassVar[int] = 1

    flaw: str = ""
    mean: Tensor | None = None
    sign: float = 1.0

    def statistics(self, outputs: Output, y: Tensor, readout: Readout) -> dict[str, Tensor]:
        n, first = torch.tensor(float(len(y))), outputs.z.double().sum(0)
        if self.flaw == "other names" and len(y) % 256:
            return {"n": n, f"sum of {float(outputs.z.sum())}": first}
        return {"n": torch.ones(()) if self.flaw == "no sum" else n, "sum": first}

    def fit(self, total):
        return replace(self, mean=total["sum"] / total["n"])

    def prepared(self, readout: Readout) -> Detector:
        return replace(self, sign=2.0) if self.flaw == "prepared differs" else self

    def applies(self, readout: Readout | None) -> bool:
        return self.flaw != "never"

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Tensor:
        if self.flaw == "ready at once" and self.mean is None:
            return outputs.z.sum(1)
        if self.flaw == "no numbers" and self.mean is not None:
            return torch.where(outputs.z[:, 0] > 1, torch.nan, outputs.z[:, 0])
        if self.mean is None and self.flaw != "careless":
            raise InputError("it was used before it was fitted.")
        sign = -self.sign if self.flaw == "upside down" else self.sign
        return -sign * (outputs.z - self.mean).norm(dim=1)


@pytest.mark.parametrize(
    ("flaw", "sentence"),
    [
        ("upside down", "larger must mean more OUT"),
        ("ready at once", "can be used after 0 of 1 passes"),
        ("careless", "before it is fitted it fails with TypeError"),
        ("no sum", "the sums of two halves"),
        ("other names", "have different names"),
        ("no numbers", r"\d+ of 256 scores on separable data are not finite"),
        ("prepared differs", "prepared for a model, it gives other scores"),
        ("never", "does not apply"),
    ],
)
def test_the_contract_says_what_is_broken(flaw: str, sentence: str) -> None:
    check_detector(FromMean())
    with pytest.raises(AssertionError, match=sentence):
        check_detector(FromMean(flaw))


@dataclass(frozen=True)
class WithoutPasses(FromMean):
    passes: ClassVar[int] = 0


@dataclass(frozen=True)
class OnItsOwn(MSP):
    local: ClassVar[bool] = True


@pytest.mark.parametrize(("kind", "found"), [(WithoutPasses, "its own statistics and fit"), (OnItsOwn, "local = True")])
def test_a_detector_that_learns_in_no_pass_is_refused(kind: type[Detector], found: str) -> None:
    sentence = f"the detector '.*' has {found}, but passes = 0: say how many passes"
    with pytest.raises(AssertionError, match=sentence):
        check_detector(kind)
    federation, config = tiny_federation(), Config(batch_size=16, device="cpu")
    engine = EagerEngine(FedAvg(), federation, config)
    with pytest.raises(InputError, match=sentence.replace("'.*'", "'mine'")):
        evaluate(engine, initial_state(engine), {"mine": kind()})


# ------------------------------------------------------------------------------------------------------- users' files

PLUGIN = """
from __future__ import annotations

import math
from dataclasses import dataclass
from torch import Tensor
from foogd.detect import MSP, Detector

LIMIT = 3
ready = MSP(2.0)

def negative_max(outputs):
    return -outputs.logits.amax(1)

def too_short(outputs):
    return outputs.logits[0]

def not_a_tensor(outputs):
    return [1.0]

@dataclass(frozen=True)
class Mine(Detector):
    scale: float = 2.0
    def __call__(self, outputs, readout=None):
        return -self.scale * outputs.logits.amax(1)

@dataclass(frozen=True)
class Demanding(Detector):
    scale: float
    def __call__(self, outputs, readout=None):
        return -self.scale * outputs.logits.amax(1)

class Unfinished(Detector):
    pass

class Untaught(Detector):
    def fit(self, total):
        return self
    def __call__(self, outputs, readout=None):
        return -outputs.logits.amax(1)

class Unrelated:
    pass

_hidden = 1
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    return path


def test_a_name_is_looked_up() -> None:
    assert resolve_detector("msp") is DETECTORS["msp"]
    with pytest.raises(InputError, match=r"no detector 'mps'; it must be one of msp, max_logit, .*file.py:name"):
        resolve_detector("mps")


def test_a_function_an_instance_and_a_class_are_detectors(plugin: Path) -> None:
    data = outputs()
    function = resolve_detector(f"{plugin}:negative_max")
    assert isinstance(function, FunctionDetector)
    assert function.applies(None)
    assert torch.equal(function(data), MaxLogit()(data))
    assert resolve_detector(f"{plugin}:ready") == MSP(2.0)
    mine = resolve_detector(f"{plugin}:Mine")
    assert torch.equal(mine(data), 2 * MaxLogit()(data))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("LIMIT", "of type int, but it must be a function, a Detector or its class"),
        ("Demanding", "cannot be made without arguments: .*scale"),
        ("Unfinished", "is abstract: it must define __call__"),
        ("Untaught", "has its own fit, but passes = 0: .*passes: ClassVar"),
        ("Unrelated", "must inherit from foogd.detect.Detector"),
        ("missing", "LIMIT, ready, negative_max, too_short, .*, Mine, Demanding, Unfinished, Untaught, Unrelated.$"),
        ("no name", "not of the form file.py:name"),
        ("", "not of the form file.py:name"),
    ],
)
def test_other_objects_are_refused(plugin: Path, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        resolve_detector(f"{plugin}:{name}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"), [("too_short", r"60 scores .* shape \(5,\)"), ("not_a_tensor", "returned list")]
)
def test_a_function_must_return_one_score_an_image(plugin: Path, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_detector(f"{plugin}:{name}")(outputs())


def test_a_function_takes_the_output_alone(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text("def wants_more(outputs, readout):\n    return outputs.z.sum(1)\n")
    with pytest.raises(InputError, match=r"wants_more.*\(outputs, readout\)"):
        resolve_detector(f"{tmp_path}/two.py:wants_more")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{re.escape(str(tmp_path))}/none.py for the detector does not exist"):
        resolve_detector(f"{tmp_path}/none.py:f")
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(InputError, match="for the detector does not exist"):
        resolve_detector(f"{tmp_path}/folder.py:f")
    with pytest.raises(InputError, match=r"not of the form file\.py:name"):
        resolve_detector("module:f")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:\n", "cannot be imported: SyntaxError: "),
        ("import nothing_of_that_name\n", "cannot be imported: ModuleNotFoundError: No module named"),
        ("raise RuntimeError('two\\nlines')\n", "cannot be imported: RuntimeError: two lines$"),
        ("raise SystemExit(3)\n", "cannot be imported: SystemExit: 3$"),
    ],
)
def test_a_file_that_cannot_be_imported_says_why_on_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as error:
        load_object(f"{path}:f", "method")
    assert "\n" not in str(error.value)
    path.write_text("f = 1\n")
    assert load_object(f"{path}:f", "method") == 1


def test_objects_of_one_file_share_their_classes(plugin: Path) -> None:
    mine = load_object(f"{plugin}:Mine", "detector")
    assert load_object(f"{plugin}:Mine", "detector") is mine
    assert isinstance(resolve_detector(f"{plugin}:Mine"), mine)


def test_a_changed_file_is_read_again_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "value.py"
    for value in (1, 2, 3):
        path.write_text(f"x = {value}\n")
        assert load_object(f"{path}:x", "data set") == value
    assert list(tmp_path.iterdir()) == [path]


def test_files_of_the_same_name_do_not_mix(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text("class X: pass\n")
    first, second = (load_object(f"{tmp_path}/{folder}/same.py:X", "method") for folder in ("a", "b"))
    assert first is not second


def test_a_file_without_names_says_so(tmp_path: Path) -> None:
    path = tmp_path / "empty.py"
    path.write_text("from __future__ import annotations\nimport math\n_x = 1\n")
    with pytest.raises(InputError, match="the public names defined there: none"):
        load_object(f"{path}:f", "backbone")


@pytest.mark.parametrize("detector", [Span(), SpanOwn(), Span(sigma=0.5)], ids=str)
def test_span_is_the_norm_of_the_score_of_one_gaussian_around_the_origin(detector: Detector) -> None:
    data, test = outputs(200, seed=1), outputs(12, seed=2)
    ready = fitted(detector, data)
    u = data.z.double() * (D**0.5 / data.z.double().norm(dim=1, keepdim=True))
    around = sum(torch.outer(row, row) for row in u) / len(u) + detector.sigma**2 * torch.eye(D).double()
    at = (test.z.double() * (D**0.5 / test.z.double().norm(dim=1, keepdim=True))).requires_grad_()
    density = torch.distributions.MultivariateNormal(torch.zeros(D).double(), around)
    (score,) = torch.autograd.grad(density.log_prob(at).sum(), at)
    torch.testing.assert_close(ready(test), score.norm(dim=1), rtol=1e-6, atol=1e-6)
    longer = Output(100 * test.z, 100 * test.logits)
    torch.testing.assert_close(ready(longer), ready(test), rtol=1e-5, atol=1e-5)


def test_span_of_the_client_knows_no_class_that_only_others_have() -> None:
    data = outputs(400, seed=3)
    labels = torch.arange(400) % CLASSES
    mine = labels < 2
    rows = [data.z[mine] + 3 * model().weight[labels[mine]], data.z[~mine] + 3 * model().weight[labels[~mine]]]
    parts = [(Output(z, z[:, :CLASSES]), y, model()) for z, y in zip(rows, (labels[mine], labels[~mine]), strict=True)]
    test, others = parts[0][0], parts[1][0]
    for mine_alone, of_all in ((SpanOwn(), Span()), (ScoreSpan(), ScoreSpanAll())):
        own, everyone = totals(mine_alone, parts[:1])[0], totals(of_all, parts)[0]
        assert auroc(own(test, model()), own(others, model())) > 0.99
        assert abs(auroc(everyone(test, model()), everyone(others, model())) - 0.5) < 0.2


@pytest.mark.parametrize("count", [3, 30, 200])
@pytest.mark.parametrize(("alone", "joined"), [(SpanOwn, ScoreSpan), (Span, ScoreSpanAll)])
def test_score_span_is_the_score_and_the_span_in_units_of_their_means(
    alone: type[SpanOwn | Span], joined: type[ScoreSpan | ScoreSpanAll], count: int
) -> None:
    data, test, sigma = outputs(count, seed=1), outputs(12, seed=2), 0.3
    norm, share, both = ScoreNorm(), fitted(alone(sigma=sigma), data), fitted(joined(sigma=sigma), data)
    # By brute force: each image measured by the span of all others.
    u = data.z.double() * (D**0.5 / data.z.double().norm(dim=1, keepdim=True))
    around, out = u.T @ u / count + sigma**2 * torch.eye(D).double(), []
    for row in u:
        out.append(float(torch.linalg.solve(around - torch.outer(row, row) / count, row).norm()))
    wanted = norm(test, model()) / norm(data, model()).mean() + share(test) / (sum(out) / count)
    torch.testing.assert_close(both(test, model()), wanted, rtol=1e-6, atol=1e-9)
    with pytest.raises(InputError, match=f"^{joined.name} needs a score network"):
        both(test, Readout(model().head))


def test_features_without_a_direction_are_out_of_every_span() -> None:
    nothing = Output(torch.zeros(2, D), torch.zeros(2, CLASSES))
    for detector in (Span(), SpanOwn(sigma=0.5)):
        ready = fitted(detector, outputs(50, seed=1))
        assert torch.allclose(ready(nothing), torch.full((2,), D**0.5 / detector.sigma**2).double())
        assert float(ready(outputs(30, seed=2)).max()) < float(ready(nothing)[0])
