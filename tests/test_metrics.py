"""Metrics against scikit-learn and against definitions spelt out in loops."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from foogd.core.errors import InputError
from foogd.metrics import Ordered, accuracy, aupr, auroc, fpr95_swapped, fpr_at_tpr, needed_for_tpr, threshold_at_tpr

few_values = st.lists(st.integers(-3, 3), min_size=1, max_size=40)
floats = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40)
scores = few_values | floats


def joined(inside: np.ndarray, outside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Labels (OUT = 1) and scores, as scikit-learn wants them."""
    return np.r_[np.zeros(len(inside)), np.ones(len(outside))], np.r_[inside, outside]


@settings(max_examples=100, deadline=None)
@given(inside=scores, outside=scores)
def test_auroc_and_aupr_equal_scikit_learn(inside: list[float], outside: list[float]) -> None:
    a, b = np.array(inside, dtype=np.float64), np.array(outside, dtype=np.float64)
    assert auroc(a, b) == pytest.approx(roc_auc_score(*joined(a, b)), abs=1e-12)
    assert aupr(a, b) == pytest.approx(average_precision_score(*joined(a, b)), abs=1e-12)


@pytest.mark.parametrize("levels", [2, 20, 10**9])
def test_large_samples_with_ties_equal_scikit_learn(levels: int) -> None:
    rng = np.random.default_rng(levels)
    a, b = rng.integers(0, levels, 20000) / levels, (rng.integers(0, levels, 7000) / levels) ** 0.8
    assert auroc(a, b) == pytest.approx(roc_auc_score(*joined(a, b)), abs=1e-12)
    assert aupr(a, b) == pytest.approx(average_precision_score(*joined(a, b)), abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(inside=scores, outside=scores)
def test_auroc_is_the_share_of_pairs_in_the_right_order(inside: list[float], outside: list[float]) -> None:
    wins = sum((o > i) + 0.5 * (o == i) for i in inside for o in outside)
    assert auroc(np.array(inside), np.array(outside)) == pytest.approx(wins / (len(inside) * len(outside)), abs=1e-12)
    assert auroc(np.array(inside), np.array(outside)) + auroc(np.array(outside), np.array(inside)) == pytest.approx(1)


def test_larger_scores_mean_out() -> None:
    inside, outside = torch.arange(100.0), torch.arange(100.0) + 100
    assert (auroc(inside, outside), aupr(inside, outside), fpr_at_tpr(inside, outside)) == (1.0, 1.0, 0.0)
    assert (auroc(outside, inside), fpr_at_tpr(outside, inside)) == (0.0, 1.0)
    assert auroc(inside, inside) == 0.5


@pytest.mark.parametrize("n", [20, 60, 100, 180, 1000, 10000])
def test_the_threshold_is_not_moved_by_rounding(n: int) -> None:
    """0.95·n is whole for these n."""
    assert threshold_at_tpr(np.arange(1, n + 1)) == 95 * n // 100
    assert threshold_at_tpr(np.arange(1, n + 1), tpr=0.55) == 55 * n // 100
    assert threshold_at_tpr(np.arange(1, n + 1), tpr=1.0) == n


@settings(max_examples=200, deadline=None)
@given(inside=scores, outside=scores, percent=st.integers(1, 100))
def test_the_threshold_is_the_smallest_score_that_accepts_enough_of_in(
    inside: list[float], outside: list[float], percent: int
) -> None:
    needed = math.ceil(percent * len(inside) / 100 - 1e-9)
    tau = min(t for t in inside if sum(i <= t for i in inside) >= needed)
    assert threshold_at_tpr(np.array(inside), percent / 100) == tau
    expected = sum(o <= tau for o in outside) / len(outside)
    assert fpr_at_tpr(np.array(inside), np.array(outside), percent / 100) == expected


def test_the_threshold_rejects_five_percent_of_distinct_in_scores() -> None:
    inside = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert int((inside > threshold_at_tpr(inside)).sum()) == 50


def test_the_swapped_rate_exchanges_the_classes() -> None:
    inside, outside = np.arange(100.0), np.arange(100.0) + 30.0
    # 95 of the OUT scores are at least 35, and so are 65 of the IN scores.
    assert fpr95_swapped(inside, outside) == 0.65
    skewed = np.r_[np.full(90, 0.0), np.full(10, 50.0)]
    assert fpr_at_tpr(skewed, np.full(10, 20.0)) == 1.0
    assert fpr95_swapped(skewed, np.full(10, 20.0)) == pytest.approx(0.1)


@pytest.mark.parametrize("metric", [auroc, aupr, fpr_at_tpr, fpr95_swapped])
def test_kind_order_and_monotone_changes_of_scores_do_not_matter(metric: Callable[..., float]) -> None:
    rng = np.random.default_rng(0)
    a, b = np.rint(4 * rng.normal(size=50)), np.rint(4 * rng.normal(size=70) + 2)
    value = metric(a, b)
    assert type(value) is float
    assert 0 < value < 1
    assert metric(torch.from_numpy(a), torch.from_numpy(b)) == value
    assert metric(torch.tensor(a, requires_grad=True), b) == value
    assert metric(a[::-1].copy(), rng.permutation(b)) == value
    assert metric(np.exp(a), np.exp(b)) == value


def test_float32_scores_that_differ_in_the_last_bit_are_not_ties() -> None:
    one = torch.tensor([1.0])
    assert auroc(one, torch.nextafter(one, torch.tensor(2.0))) == 1.0


@pytest.mark.parametrize("metric", [auroc, aupr, fpr_at_tpr, fpr95_swapped])
def test_infinite_scores_rank_at_the_ends(metric: Callable[..., float]) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=30), rng.normal(size=30)
    big_a, big_b = a.copy(), b.copy()
    big_a[a.argmin()], big_b[b.argmax()] = -np.inf, np.inf
    a[a.argmin()], b[b.argmax()] = -100.0, 100.0
    assert metric(big_a, big_b) == metric(a, b)


@pytest.mark.parametrize("metric", [auroc, aupr, fpr_at_tpr, fpr95_swapped])
def test_empty_sets_and_nan_are_refused(metric: Callable[..., float]) -> None:
    some, none, bad = torch.ones(3), torch.ones(0), torch.tensor([1.0, math.nan])
    with pytest.raises(InputError, match="at least one IN score"):
        metric(none, some)
    with pytest.raises(InputError, match="at least one OUT score"):
        metric(some, none)
    with pytest.raises(InputError, match="IN scores contain nan"):
        metric(bad, some)
    with pytest.raises(InputError, match="OUT scores contain nan"):
        metric(some, bad)


@pytest.mark.parametrize("tpr", [0.0, -0.1, 1.01, math.nan])
def test_a_share_outside_its_range_is_refused(tpr: float) -> None:
    with pytest.raises(InputError, match="tpr is"):
        threshold_at_tpr(torch.ones(3), tpr)


def test_accuracy_counts_the_largest_logit() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [0.0, 9.0, 1.0], [0.0, 9.0, 1.0]])
    value = accuracy(logits, torch.tensor([2, 0, 1, 0]))
    assert value == 0.75
    assert type(value) is float
    assert accuracy(logits.numpy(), np.array([2, 0, 1, 0])) == 0.75


def test_accuracy_refuses_what_it_cannot_count() -> None:
    with pytest.raises(InputError, match="at least one sample"):
        accuracy(torch.ones(0, 3), torch.ones(0, dtype=torch.long))
    with pytest.raises(InputError, match=r"shapes \(4, 3\) and \(3,\)"):
        accuracy(torch.ones(4, 3), torch.ones(3, dtype=torch.long))
    with pytest.raises(InputError, match="nan"):
        accuracy(torch.full((2, 3), math.nan), torch.zeros(2, dtype=torch.long))


def test_scores_that_were_sorted_once_give_the_same_numbers(rng: torch.Generator) -> None:
    inside, outside = torch.randint(9, (57,), generator=rng).float(), torch.randint(4, 13, (31,), generator=rng).float()
    for metric in (auroc, fpr_at_tpr, aupr):
        assert metric(Ordered(inside), Ordered(outside)) == metric(inside, outside)
        many = Ordered.repeated(Ordered(outside), 3)
        assert metric(Ordered(inside), many) == pytest.approx(metric(inside, outside.repeat(3)), abs=1e-15)
        several = Ordered.repeated(Ordered(inside), 2)
        assert metric(several, outside) == pytest.approx(metric(inside.repeat(2), outside), abs=1e-15)


def test_how_many_scores_a_share_needs_is_not_a_matter_of_rounding():
    for tpr, wanted in ((0.5, 2), (0.8, 5), (0.9, 10), (0.95, 20), (0.97, 34), (0.99, 100), (0.999, 1000), (1.0, 1)):
        assert needed_for_tpr(tpr) == wanted
        scores = torch.arange(wanted, dtype=torch.float64)
        above = int((scores > threshold_at_tpr(scores, tpr)).sum())
        assert above == (1 if tpr < 1 else 0)
        if wanted > 1:
            assert threshold_at_tpr(scores[:-1], tpr) == scores[-2]
