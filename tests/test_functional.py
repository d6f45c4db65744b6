"""Losses and kernels against double loops, closed forms for Gaussians, and autograd."""

from __future__ import annotations

import math
from collections.abc import Callable

import beartype
import jaxtyping
import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foogd import functional
from foogd.core.errors import InputError
from foogd.functional import (
    balanced_softmax,
    dsm,
    entropy,
    head_gradient,
    ksd,
    langevin,
    logit_norm,
    median_bandwidth,
    mmd,
    outlier_exposure,
    rbf,
    simclr,
    supcon,
)


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=stream(seed), dtype=dtype)


def minus(z: Tensor) -> Tensor:
    """The score of N(0, I)."""
    return -z


# ---------------------------------------------------------------------------------------------------------- kernels


def test_rbf_equals_the_double_loop() -> None:
    a, b = normal(5, 3) + 100.0, normal(4, 3, seed=1) + 100.0
    expected = [[math.exp(-float(((x - y) ** 2).sum()) / 1.7) for y in b] for x in a]
    torch.testing.assert_close(rbf(a, b, 1.7), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-10)


def test_distances_keep_their_digits_far_from_the_origin() -> None:
    a = normal(32, 8, dtype=torch.float32)
    torch.testing.assert_close(rbf(a + 1000.0, a + 1000.0, 4.0), rbf(a, a, 4.0), rtol=0, atol=2e-3)
    assert float(rbf(a + 1000.0, a + 1000.0, 4.0).diagonal().min()) > 0.999


@pytest.mark.parametrize("n", [2, 3, 4, 7, 20])
def test_median_bandwidth_equals_numpy(n: int) -> None:
    a = normal(n, 3, seed=n).numpy()
    pairs = [((a[i] - a[j]) ** 2).sum() for i in range(n) for j in range(i + 1, n)]
    assert float(median_bandwidth(torch.from_numpy(a))) == pytest.approx(np.median(pairs) / np.log(n + 1), rel=1e-12)


def test_median_bandwidth_has_a_floor() -> None:
    a = torch.zeros(9, 2, dtype=torch.float64)
    a[0] = 30.0  # 28 of 36 distances are 0, so the median is
    spread = float((a - a.mean(0)).square().sum(1).mean())
    assert float(median_bandwidth(a)) == pytest.approx(1e-3 * spread + 1e-12, rel=1e-12)
    assert float(median_bandwidth(torch.ones(4, 2, dtype=torch.float64))) == pytest.approx(1e-12, rel=1e-6)
    assert float(median_bandwidth(torch.ones(1, 2, dtype=torch.float64))) == pytest.approx(1e-12, rel=1e-6)


def test_median_bandwidth_is_detached() -> None:
    assert not median_bandwidth(normal(6, 2).requires_grad_()).requires_grad


# -------------------------------------------------------------------------------------------------------------- MMD


def test_mmd_equals_the_double_loop() -> None:
    a, b, bandwidths = normal(5, 3), normal(7, 3, seed=1) * 2 + 1, [0.7, 3.0]

    def mean_kernel(x: Tensor, y: Tensor, h: float) -> float:
        return sum(math.exp(-float(((p - q) ** 2).sum()) / h) for p in x for q in y) / (len(x) * len(y))

    expected = sum(mean_kernel(a, a, h) - 2 * mean_kernel(a, b, h) + mean_kernel(b, b, h) for h in bandwidths)
    assert float(mmd(a, b, bandwidths=bandwidths)) == pytest.approx(expected, abs=1e-10)
    assert float(mmd(a, b, bandwidths=torch.tensor(bandwidths))) == pytest.approx(expected, abs=1e-7)


def test_the_bandwidths_of_mmd_are_half_and_one_times_the_mean_squared_distance() -> None:
    a, b = normal(5, 3), normal(7, 3, seed=1) * 2 + 1
    union = torch.cat([a, b])
    pairs = [float(((x - y) ** 2).sum()) for i, x in enumerate(union) for j, y in enumerate(union) if i != j]
    m = sum(pairs) / len(pairs)
    assert float(mmd(a, b)) == pytest.approx(float(mmd(a, b, bandwidths=[m / 2, m])), abs=1e-12)


def test_the_heuristic_bandwidth_is_not_differentiated() -> None:
    a, b = normal(5, 3).requires_grad_(), normal(7, 3, seed=1)
    union = torch.cat([a, b]).detach()
    m = 2 * float((union - union.mean(0)).square().sum()) / (len(union) - 1)
    (heuristic,) = torch.autograd.grad(mmd(a, b), a)
    (fixed,) = torch.autograd.grad(mmd(a, b, bandwidths=[m / 2, m]), a)
    torch.testing.assert_close(heuristic, fixed, rtol=0, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31), n=st.integers(1, 12), m=st.integers(1, 12), scale=st.sampled_from([1e-3, 1.0, 100.0])
)
def test_mmd_is_a_symmetric_bounded_distance(seed: int, n: int, m: int, scale: float) -> None:
    a = normal(n, 4, seed=seed, dtype=torch.float32) * scale
    b = normal(m, 4, seed=seed + 1, dtype=torch.float32) * scale + scale
    value = float(mmd(a, b))
    assert -1e-6 <= value <= 2 * 2
    assert value == pytest.approx(float(mmd(b, a)), abs=1e-5)
    assert abs(float(mmd(a, a.clone()))) <= 1e-6


@pytest.mark.parametrize("d", [1, 2])
def test_mmd_of_gaussians_has_its_closed_form(d: int) -> None:
    h, n, mean, deviation = 2.0, 3000, 1.0, 1.5
    a, b = normal(n, d), mean + deviation * normal(n, d, seed=1)

    def expectation(shift: float, variance: float) -> float:
        """E exp(−‖x‖²/h) for x ~ N(shift, variance·I)."""
        return ((1 + 2 * variance / h) ** -0.5 * math.exp(-(shift**2) / (h + 2 * variance))) ** d

    expected = expectation(0, 2) - 2 * expectation(mean, 1 + deviation**2) + expectation(0, 2 * deviation**2)
    assert float(mmd(a, b, bandwidths=[h])) == pytest.approx(expected, abs=0.015)
    assert expected > 0.05


# -------------------------------------------------------------------------------------------------------------- KSD


def stein_kernel_by_autograd(score: Callable[[Tensor], Tensor], a: Tensor, b: Tensor, h: float) -> float:
    """Eq. 11 for one pair, with the derivatives of the kernel from autograd."""
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    k = torch.exp(-((a - b) ** 2).sum() / h)
    grad_a, grad_b = torch.autograd.grad(k, (a, b), create_graph=True)
    trace = sum(torch.autograd.grad(grad_a[i], b, retain_graph=True)[0][i] for i in range(len(a)))
    s_a, s_b = score(a), score(b)
    return (k * (s_a @ s_b) + s_a @ grad_b + s_b @ grad_a + trace).item()


@pytest.mark.parametrize("bandwidth", [None, 2.3])
def test_ksd_equals_the_double_loop_over_autograd_derivatives(bandwidth: float | None) -> None:
    z, weight = normal(6, 3) + 2.0, normal(3, 3, seed=1)

    def score(z: Tensor) -> Tensor:
        return torch.tanh(z @ weight) - 0.5 * z

    h = float(median_bandwidth(z)) if bandwidth is None else bandwidth
    u = np.array([[stein_kernel_by_autograd(score, a, b, h) for b in z] for a in z])
    assert float(ksd(score, z, bandwidth=bandwidth)) == pytest.approx(u.mean(), abs=1e-10)
    off = (u.sum() - np.trace(u)) / (6 * 5)
    assert float(ksd(score, z, bandwidth=bandwidth, statistic="u")) == pytest.approx(off, abs=1e-10)


def test_ksd_takes_the_score_as_a_function_or_as_its_values() -> None:
    z = normal(8, 3)
    assert torch.equal(ksd(minus, z), ksd(-z, z))


def test_ksd_has_its_full_gradient() -> None:
    weight = normal(3, 3, seed=1)
    z = normal(5, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: ksd(lambda x: torch.tanh(x @ weight), z, bandwidth=1.5), (z,))


@pytest.mark.parametrize("d", [1, 4, 16])
def test_ksd_vanishes_under_the_true_score_and_grows_with_a_shift(d: int) -> None:
    def value(shift: float, seed: int) -> float:
        return float(ksd(minus, normal(500, d, seed=seed) + shift / d**0.5, statistic="u"))

    at_home = np.array([value(0.0, seed) for seed in range(20)])
    assert abs(at_home.mean()) < 4 * at_home.std(ddof=1) / 20**0.5 + 1e-12
    assert at_home.max() < value(1.0, 0) < value(2.0, 0) < value(4.0, 0)
    assert value(4.0, 0) > 100 * at_home.std()


@pytest.mark.parametrize("d", [1, 2, 8])
def test_ksd_of_a_shifted_gaussian_has_its_closed_form(d: int) -> None:
    """Between N(m, I) and the score of N(0, I) it is ‖m‖² E k(z, z') = ‖m‖² (1 + 4/h)^(−d/2)."""
    h, shift = 2.0 * d, 1.5
    value = float(ksd(minus, normal(3000, d) + shift / d**0.5, bandwidth=h, statistic="u"))
    assert value == pytest.approx(shift**2 * (1 + 4 / h) ** (-d / 2), rel=0.1)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31), n=st.integers(2, 20), d=st.integers(1, 6), scale=st.sampled_from([0.1, 1.0, 10.0]))
def test_the_v_statistic_is_never_negative(seed: int, n: int, d: int, scale: float) -> None:
    z, s = normal(n, d, seed=seed), scale * normal(n, d, seed=seed + 1)
    assert float(ksd(s, z)) >= -1e-9


def test_ksd_of_fewer_than_two_samples_is_zero_with_a_gradient() -> None:
    for n in (0, 1):
        z = torch.ones(n, 3, requires_grad=True)
        for statistic in ("v", "u"):
            value = ksd(minus, z, statistic=statistic)
            assert value.item() == 0.0
            assert torch.equal(torch.autograd.grad(value, z)[0], torch.zeros(n, 3))


def test_ksd_refuses_an_unknown_statistic() -> None:
    with pytest.raises(InputError, match="statistic is 'w'"):
        ksd(minus, normal(4, 2), statistic="w")


# ------------------------------------------------------------------------------------------- score matching, sampling


def best_slope(tau: float, sigma: float) -> float:
    """The slope w of the best linear score s(z) = w·z on N(0, τ²I): the loss is a parabola in w."""
    z = tau * normal(20000, 4)

    def at(w: float) -> float:
        return float(dsm(lambda z: w * z, z, sigma=sigma, rng=stream(7)))

    low, middle, high = at(-1.0), at(0.0), at(1.0)
    return (low - high) / (2 * (low + high - 2 * middle))


@pytest.mark.parametrize(("tau", "sigma"), [(1.0, 0.5), (2.0, 1.0), (0.5, 0.5)])
def test_dsm_learns_the_score_of_the_noised_density(tau: float, sigma: float) -> None:
    assert best_slope(tau, sigma) == pytest.approx(-1 / (tau**2 + sigma**2), rel=0.03)


def test_dsm_is_zero_for_the_conditional_score_and_half_the_dimension_for_a_zero_score() -> None:
    z = normal(2000, 6)
    assert float(dsm(lambda x: -(x - z) / 0.3**2, z, sigma=0.3, rng=stream())) == pytest.approx(0.0, abs=1e-20)
    assert float(dsm(torch.zeros_like, z, sigma=0.3, rng=stream())) == pytest.approx(3.0, rel=0.05)


def test_sigma_may_differ_between_samples() -> None:
    z, sigma = normal(5, 3), torch.tensor([0.1, 0.2, 0.5, 1.0, 2.0], dtype=torch.float64)
    v = torch.randn(5, 3, generator=stream(3), dtype=torch.float64)
    s = torch.tanh(z + sigma[:, None] * v)
    expected = sum(0.5 * float((sigma[i] * s[i] + v[i]).square().sum()) for i in range(5)) / 5
    assert float(dsm(torch.tanh, z, sigma=sigma, rng=stream(3))) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("step", [0.1, 0.5, 1.0])
def test_langevin_reaches_the_stationary_variance(step: float) -> None:
    z = langevin(minus, torch.zeros(50000, 1), step=step, steps=int(20 / step), rng=stream())
    assert float(z.var()) == pytest.approx(1 / (1 - step / 4), rel=0.025)
    assert float(z.mean()) == pytest.approx(0.0, abs=0.025)


def test_langevin_is_equation_6_and_leaves_its_start_alone() -> None:
    z0 = normal(4, 2)
    before = z0.clone()
    rng = stream(5)
    expected = z0
    for _ in range(3):
        w = torch.randn(4, 2, generator=rng, dtype=torch.float64)
        expected = expected + 0.2 / 2 * torch.tanh(expected) + math.sqrt(0.2) * w
    torch.testing.assert_close(langevin(torch.tanh, z0, step=0.2, steps=3, rng=stream(5)), expected, rtol=0, atol=1e-12)
    assert torch.equal(z0, before)
    assert torch.equal(langevin(torch.tanh, z0, step=0.2, steps=0, rng=stream(5)), z0)


def test_langevin_is_differentiable_in_the_parameters_of_the_score() -> None:
    z0 = normal(4, 2)

    def end(weight: Tensor) -> Tensor:
        z = langevin(lambda z: torch.tanh(z @ weight), z0, step=0.3, steps=5, rng=stream(5))
        return mmd(normal(6, 2, seed=9), z, bandwidths=[1.0])

    assert torch.autograd.gradcheck(end, (normal(2, 2, seed=1).requires_grad_(),))


def test_one_generator_state_gives_one_result() -> None:
    z = normal(6, 3)
    for draw in (
        lambda rng: dsm(minus, z, sigma=0.5, rng=rng),
        lambda rng: langevin(minus, z, step=0.1, steps=2, rng=rng),
    ):
        assert torch.equal(draw(stream(1)), draw(stream(1)))
        assert not torch.equal(draw(stream(1)), draw(stream(2)))


# --------------------------------------------------------------------------------------------------- classification


@pytest.mark.parametrize("count", [1, 3, 613, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_balanced_softmax_with_uniform_counts_is_cross_entropy_bit_for_bit(count: float, dtype: torch.dtype) -> None:
    logits = (3 * normal(16, 7, dtype=dtype)).requires_grad_()
    y = torch.arange(16) % 7
    balanced, plain = balanced_softmax(logits, y, torch.full((7,), count)), F.cross_entropy(logits, y)
    assert torch.equal(balanced, plain)
    assert torch.equal(torch.autograd.grad(balanced, logits)[0], torch.autograd.grad(plain, logits)[0])


def test_balanced_softmax_adds_the_log_of_the_counts() -> None:
    logits, y, counts = normal(8, 4), torch.arange(8) % 4, torch.tensor([1, 20, 300, 7])
    for smoothing in (0.0, 1.0):
        expected = F.cross_entropy(logits + torch.log(counts.double() + smoothing), y)
        found = balanced_softmax(logits, y, counts, smoothing=smoothing)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    scaled = balanced_softmax(logits, y, 17.3 * counts)
    torch.testing.assert_close(scaled, balanced_softmax(logits, y, counts), rtol=0, atol=1e-6)


def test_absent_classes_get_no_gradient() -> None:
    logits = normal(6, 4, dtype=torch.float32).requires_grad_()
    loss = balanced_softmax(logits, torch.tensor([0, 2, 2, 0, 0, 2]), torch.tensor([3.0, 0.0, 3.0, 0.0]))
    (grad,) = torch.autograd.grad(loss, logits)
    assert torch.isfinite(loss)
    assert torch.isfinite(grad).all()
    assert torch.equal(grad[:, [1, 3]], torch.zeros(6, 2))
    assert (grad[:, [0, 2]] != 0).all()


def test_logit_norm_depends_on_the_direction_only() -> None:
    v, y = normal(8, 5).requires_grad_(), torch.arange(8) % 5
    loss = logit_norm(v, y, tau=0.04)
    torch.testing.assert_close(logit_norm(37.0 * v, y, tau=0.04), loss, rtol=1e-5, atol=0)
    (grad,) = torch.autograd.grad(loss, v)
    assert (grad * v).sum(1).abs().max().item() < 1e-5 * (grad.norm() * v.norm()).item()
    assert logit_norm(v, y, tau=1e6).item() == pytest.approx(math.log(5), abs=1e-5)


@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize("tau", [0.5, 1.0])
def test_logit_norm_has_its_minimum_at_the_simplex(classes: int, tau: float) -> None:
    bound = math.log(1 + (classes - 1) * math.exp(-math.sqrt(classes / (classes - 1)) / tau))
    y = torch.arange(50) % classes
    simplex = F.one_hot(y, classes).double() - 1 / classes
    assert float(logit_norm(simplex, y, tau=tau)) == pytest.approx(bound, rel=1e-5)
    near = simplex + 0.3 * normal(50, classes)
    assert all(float(logit_norm(near[i : i + 1], y[i : i + 1], tau=tau)) > bound * (1 - 1e-5) for i in range(50))


def test_outlier_exposure_is_cross_entropy_to_uniform_with_minimum_log_c() -> None:
    logits = normal(9, 6)
    assert float(outlier_exposure(logits)) == pytest.approx(
        float(F.cross_entropy(logits, torch.full((9, 6), 1 / 6, dtype=torch.float64))), abs=1e-12
    )
    assert float(outlier_exposure(logits)) > math.log(6)
    flat = torch.full((9, 6), 4.2, dtype=torch.float64, requires_grad=True)
    loss = outlier_exposure(flat)
    assert loss.item() == pytest.approx(math.log(6), abs=1e-12)
    assert float(torch.autograd.grad(loss, flat)[0].abs().max()) < 1e-15


@pytest.mark.parametrize("scale", [0.0, 1.0, 50.0, 1000.0])
def test_entropy_equals_scipy_for_small_and_large_logits(scale: float) -> None:
    logits = scale * normal(9, 6)
    expected = scipy.stats.entropy(scipy.special.softmax(logits.numpy(), axis=1), axis=1)
    torch.testing.assert_close(entropy(logits), torch.from_numpy(expected), rtol=0, atol=1e-12)
    # The logits of a mixture are the logarithms of its probabilities.
    torch.testing.assert_close(entropy(logits.log_softmax(1)), entropy(logits), rtol=0, atol=1e-12)
    assert entropy(logits.bfloat16()).dtype == torch.float32


def test_entropy_has_its_gradient_and_takes_a_class_out_at_minus_infinity() -> None:
    assert torch.autograd.gradcheck(entropy, (normal(4, 5).requires_grad_(),))
    logits = normal(4, 3).requires_grad_()
    more = torch.cat([logits, torch.full((4, 1), -math.inf, dtype=torch.float64)], dim=1)
    with_class, without = entropy(more), entropy(logits)
    torch.testing.assert_close(with_class, without, rtol=0, atol=1e-15)
    (grad,), (expected,) = (torch.autograd.grad(h.sum(), logits) for h in (with_class, without))
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-15)


def test_head_gradient_equals_autograd() -> None:
    z, y, head = normal(7, 4), torch.arange(7) % 3, torch.nn.Linear(4, 3, dtype=torch.float64)
    expected = torch.autograd.grad(F.cross_entropy(head(z), y), (head.weight, head.bias))
    for mine, theirs in zip(head_gradient(z, head(z), y), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_head_gradient_is_differentiable_in_features_and_logits() -> None:
    z, logits, y = normal(5, 3).requires_grad_(), normal(5, 4, seed=1).requires_grad_(), torch.arange(5) % 4
    assert torch.autograd.gradcheck(lambda z, logits: head_gradient(z, logits, y), (z, logits))


def test_head_gradient_reaches_the_features_as_a_second_derivative_does() -> None:
    z, y, head = normal(5, 3).requires_grad_(), torch.arange(5) % 4, torch.nn.Linear(3, 4, dtype=torch.float64)
    weights = [normal(4, 3, seed=2), normal(4, seed=3)]
    twice = torch.autograd.grad(F.cross_entropy(head(z), y), (head.weight, head.bias), create_graph=True)
    (expected,) = torch.autograd.grad(sum((w * g).sum() for w, g in zip(weights, twice, strict=True)), z)
    closed = head_gradient(z, head(z), y)
    (mine,) = torch.autograd.grad(sum((w * g).sum() for w, g in zip(weights, closed, strict=True)), z)
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


def test_head_gradient_keeps_float32_under_autocast_and_for_half_precision_features() -> None:
    z, logits, y = normal(16, 8, dtype=torch.float32), normal(16, 4, dtype=torch.float32), torch.arange(16) % 4
    plain = head_gradient(z, logits, y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(map(torch.equal, head_gradient(z, logits, y), plain))
    half = z.bfloat16(), logits.bfloat16()
    widened = head_gradient(half[0].float(), half[1].float(), y)
    assert all(map(torch.equal, head_gradient(*half, y), widened))


# --------------------------------------------------------------------------------------------------------- contrast


def supcon_by_loops(u: Tensor, y: Tensor, temperature: float) -> float:
    rows = [row / row.norm() for row in u]
    anchors: list[float] = []
    for i, anchor in enumerate(rows):
        others = [j for j in range(len(rows)) if j != i]
        positives = [j for j in others if y[j] == y[i]]
        if positives:
            total = sum(math.exp(float(anchor @ rows[j]) / temperature) for j in others)
            logs = [float(anchor @ rows[j]) / temperature - math.log(total) for j in positives]
            anchors.append(-sum(logs) / len(logs))
    return sum(anchors) / len(anchors)


@pytest.mark.parametrize("temperature", [0.07, 0.5, 2.0])
@pytest.mark.parametrize("labels", [[0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1], [3, 3, 3, 3, 3, 3], [0, 1, 2, 2, 3, 2]])
def test_supcon_equals_the_double_loop(labels: list[int], temperature: float) -> None:
    u, y = 3 * normal(6, 4) + 0.5, torch.tensor(labels)
    expected = supcon_by_loops(u, y, temperature)
    assert float(supcon(u, y, temperature=temperature)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_simclr_is_cross_entropy_over_all_other_rows_with_the_other_view_as_the_class(temperature: float) -> None:
    u, u_hat = normal(5, 4), normal(5, 4, seed=1)
    both = F.normalize(torch.cat([u, u_hat]), dim=1)
    similarity = (both @ both.T / temperature).fill_diagonal_(-math.inf)
    expected = F.cross_entropy(similarity, (torch.arange(10) + 5) % 10)
    found = simclr(u, u_hat, temperature=temperature)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    unique = torch.tensor([4, 9, 0, 7, 2]).repeat(2)
    torch.testing.assert_close(supcon(torch.cat([u, u_hat]), unique, temperature=temperature), found, rtol=0, atol=0)


def test_supcon_depends_on_directions_only() -> None:
    u, y = normal(8, 5).requires_grad_(), torch.arange(8) % 3
    loss = supcon(u, y, temperature=0.1)
    scales = torch.logspace(-3, 3, 8, dtype=torch.float64)[:, None]
    torch.testing.assert_close(supcon(scales * u, y, temperature=0.1), loss, rtol=1e-12, atol=0)
    (grad,) = torch.autograd.grad(loss, u)
    assert (grad * u).sum(1).abs().max().item() < 1e-12
    assert float(grad.norm()) > 0.01


def test_supcon_has_its_gradient_and_does_not_depend_on_the_order_of_rows() -> None:
    u, y = normal(6, 3).requires_grad_(), torch.tensor([0, 0, 1, 1, 2, 1])
    assert torch.autograd.gradcheck(lambda u: supcon(u, y, temperature=0.5), (u,))
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    shuffled = supcon(u[order], y[order], temperature=0.5)
    torch.testing.assert_close(shuffled, supcon(u, y, temperature=0.5), rtol=0, atol=1e-12)


def test_rows_without_a_positive_are_no_anchors_but_stay_in_the_normaliser() -> None:
    u = normal(5, 4).requires_grad_()
    alone = supcon(u, torch.tensor([0, 0, 1, 2, 3]), temperature=0.5)
    assert alone.item() == pytest.approx(supcon_by_loops(u.detach(), torch.tensor([0, 0, 1, 2, 3]), 0.5), abs=1e-12)
    assert alone.item() > supcon(u[:2], torch.tensor([0, 0]), temperature=0.5).item() + 0.1
    (grad,) = torch.autograd.grad(alone, u)
    assert (grad.abs().sum(1) > 0).all()


@pytest.mark.parametrize("n", [0, 1, 4])
def test_supcon_without_any_anchor_is_zero_with_a_gradient(n: int) -> None:
    u = normal(n, 3, dtype=torch.bfloat16).requires_grad_()
    loss = supcon(u, torch.arange(n), temperature=0.07)
    assert loss.item() == 0.0
    assert loss.dtype == torch.float32
    assert torch.equal(torch.autograd.grad(loss, u)[0], torch.zeros_like(u))


def test_rows_of_zeros_and_far_apart_rows_give_finite_gradients() -> None:
    u = torch.eye(6, 4).mul(1e4).requires_grad_()  # the last two rows are 0
    loss = supcon(u, torch.tensor([0, 1, 0, 1, 0, 1]), temperature=0.01)
    (grad,) = torch.autograd.grad(loss, u)
    assert torch.isfinite(loss)
    assert torch.isfinite(grad).all()
    assert float(grad.abs().max()) < 1e3


# ---------------------------------------------------------------------------------------------------------- numerics


def pairs(z: Tensor) -> Tensor:
    """Labels 0 0 1 1 2 2 …"""
    return torch.arange(len(z), device=z.device) // 2


LOSSES: dict[str, Callable[[Tensor, torch.Generator | None], Tensor]] = {
    "rbf": lambda z, rng: rbf(z, z.flip(0), median_bandwidth(z)).mean(),
    "mmd": lambda z, rng: mmd(z, z.flip(0)),
    "mmd, one side": lambda z, rng: mmd(z, z.detach() + 1.0),
    "ksd v": lambda z, rng: ksd(minus, z),
    "ksd u": lambda z, rng: ksd(minus, z, statistic="u"),
    "dsm": lambda z, rng: dsm(minus, z, sigma=0.1, rng=rng),
    "dsm, one sigma a sample": lambda z, rng: dsm(minus, z, sigma=torch.full_like(z[:, 0], 0.1), rng=rng),
    "langevin": lambda z, rng: langevin(minus, z, step=0.1, steps=3, rng=rng).square().mean(),
    "langevin, step a tensor": lambda z, rng: langevin(minus, z, step=z.detach().var(), steps=3, rng=rng).sum(),
    "balanced_softmax": lambda z, rng: balanced_softmax(
        z, torch.zeros(len(z), dtype=torch.long, device=z.device), torch.ones(z.shape[1], device=z.device)
    ),
    "logit_norm": lambda z, rng: logit_norm(z, torch.zeros(len(z), dtype=torch.long, device=z.device), tau=0.04),
    "outlier_exposure": lambda z, rng: outlier_exposure(z),
    "entropy": lambda z, rng: entropy(z).mean(),
    "head_gradient": lambda z, rng: sum(g.square().sum() for g in head_gradient(z, z, pairs(z))),
    "supcon": lambda z, rng: supcon(z, pairs(z), temperature=0.07),
    "simclr": lambda z, rng: simclr(z, z.flip(0), temperature=0.07),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("value", [0.0, 0.1, 1.7, 1234.5])
def test_collapsed_features_give_finite_values_and_gradients(name: str, value: float) -> None:
    z = torch.full((128, 128), value, requires_grad=True)
    loss = LOSSES[name](z, stream())
    (grad,) = torch.autograd.grad(loss, z)
    assert torch.isfinite(loss)
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("n", [2, 7])
def test_everything_runs_on_meta(name: str, n: int) -> None:
    z = torch.empty(n, 5, device="meta", requires_grad=True)
    loss = LOSSES[name](z, None)
    assert loss.device.type == "meta"
    assert loss.shape == ()
    assert torch.autograd.grad(loss, z)[0].shape == z.shape


@pytest.mark.parametrize("name", LOSSES)
def test_arguments_are_not_changed(name: str) -> None:
    z = normal(6, 4)
    before = z.clone()
    LOSSES[name](z, stream())
    assert torch.equal(z, before)


@pytest.mark.parametrize("name", ["rbf", "mmd", "ksd v", "ksd u", "supcon", "simclr"])
def test_kernels_keep_float32_under_autocast_and_for_half_precision_features(name: str) -> None:
    z = normal(16, 8, dtype=torch.float32)
    plain = LOSSES[name](z, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(LOSSES[name](z, None), plain)
    half = z.bfloat16()
    torch.testing.assert_close(LOSSES[name](half, None), LOSSES[name](half.float(), None))


# ------------------------------------------------------------------------------------------------ shapes at run time


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable[..., Tensor]]:
    """A public function by name, with its annotations enforced."""
    monkeypatch.setattr(functional, "Float", jaxtyping.Float, raising=False)
    monkeypatch.setattr(functional, "Int", jaxtyping.Int, raising=False)

    def wrap(name: str) -> Callable[..., Tensor]:
        return jaxtyping.jaxtyped(typechecker=beartype.beartype)(getattr(functional, name))

    return wrap


Z, S = torch.zeros(6, 3), torch.zeros(5, 3)
Y = torch.zeros(6, dtype=torch.long)


@pytest.mark.parametrize(
    ("name", "right", "wrong", "keywords"),
    [
        ("rbf", (Z, S, 1.0), (Z, torch.zeros(5, 4), 1.0), {}),
        ("median_bandwidth", (Z,), (Z[0],), {}),
        ("mmd", (Z, S), (Z, torch.zeros(6, 4)), {}),
        ("ksd", (Z, Z), (S, Z), {}),
        ("ksd", (minus, Z), (minus, Z[0]), {"bandwidth": 1.0, "statistic": "u"}),
        ("dsm", (minus, Z), (minus, Z[0]), {"sigma": torch.ones(6), "rng": None}),
        ("dsm", (minus, Z), (minus, S), {"sigma": torch.ones(6), "rng": None}),
        ("langevin", (minus, Z), (minus, Z.long()), {"step": 0.1, "steps": 2, "rng": None}),
        ("langevin", (minus, Z), (lambda z: z[:, :1, None], Z), {"step": 0.1, "steps": 2, "rng": None}),
        ("balanced_softmax", (Z, Y, torch.ones(3)), (Z, Y, torch.ones(4)), {}),
        ("balanced_softmax", (Z, Y, torch.ones(3, dtype=torch.long)), (Z, Y[:5], torch.ones(3)), {}),
        ("logit_norm", (Z, Y), (Z, Y.float()), {"tau": 0.04}),
        ("outlier_exposure", (Z,), (Z[None],), {}),
        ("entropy", (Z,), (Z[0],), {}),
        ("supcon", (Z, Y), (Z, Y[:5]), {"temperature": 0.1}),
        ("simclr", (Z, Z), (Z, S), {"temperature": 0.1}),
    ],
)
def test_shapes_are_as_annotated(
    checked: Callable[[str], Callable[..., Tensor]],
    name: str,
    right: tuple[object, ...],
    wrong: tuple[object, ...],
    keywords: dict[str, object],
) -> None:
    function = checked(name)
    assert isinstance(function(*right, **keywords), Tensor)
    with pytest.raises(jaxtyping.TypeCheckError):
        function(*wrong, **keywords)
