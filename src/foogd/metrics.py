"""Accuracy and detection metrics, one definition each: larger scores mean OUT, and results are Python floats.

Scores are tensors or arrays. They are compared in float64, counts are integers, and ties never depend on the order of
the samples. A set without samples, or with a score that is not a number, is an `InputError`.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, final

import numpy as np
import torch
from torch import Tensor

from .core.errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    Labels = Int[Tensor, " n"] | Int[np.ndarray, " n"]
    Logits = Float[Tensor, "n classes"] | Float[np.ndarray, "n classes"]


@final
class Ordered:
    """Scores that were checked and sorted once, for several metrics; `copies` says how often each of them counts."""

    values: Float[Tensor, " n"]
    copies: int

    def __init__(self, scores: Float[Tensor, " n"] | Float[np.ndarray, " n"], copies: int = 1) -> None:
        self.values, self.copies = _sorted(scores, "given").values, copies

    @classmethod
    def repeated(cls, one: Ordered, copies: int) -> Ordered:
        """The same scores, each of them so many times."""
        found = object.__new__(cls)
        found.values, found.copies = one.values, one.copies * copies
        return found

    def __len__(self) -> int:
        return len(self.values)


if TYPE_CHECKING:
    Scores = Float[Tensor, " n"] | Float[np.ndarray, " n"] | Ordered


def accuracy(logits: Logits, y: Labels) -> float:
    """The share of samples whose largest logit is at the label."""
    predicted, labels = torch.as_tensor(logits), torch.as_tensor(y)
    if predicted.ndim != 2 or labels.shape != predicted.shape[:1]:
        raise InputError(
            f"accuracy needs logits of shape (n, classes) and n labels, but got shapes {tuple(predicted.shape)} "
            f"and {tuple(labels.shape)}."
        )
    if not len(labels):
        raise InputError("accuracy needs at least one sample, but got none.")
    if torch.isnan(predicted).any():
        raise InputError("the logits contain nan, but accuracy needs numbers.")
    return int((predicted.argmax(dim=1) == labels.to(predicted.device)).sum()) / len(labels)


def auroc(in_scores: Scores, out_scores: Scores) -> float:
    """P(OUT score > IN score) + ½ P(equal): the area under the ROC curve with OUT as the positive class."""
    # How often each score counts on its side changes no share.
    inside, outside = _sorted(in_scores, "IN").values, _sorted(out_scores, "OUT").values
    below = torch.searchsorted(inside, outside).sum() + torch.searchsorted(inside, outside, right=True).sum()
    return int(below) / (2 * len(inside) * len(outside))


def threshold_at_tpr(in_scores: Scores, tpr: float = 0.95) -> float:
    """τ, the ⌈tpr·n⌉-th smallest IN score: inputs with a score of at most τ are accepted."""
    inside = _sorted(in_scores, "IN")
    if inside.copies != 1:
        inside = Ordered(inside.values.repeat_interleave(inside.copies))
    if not 0 < tpr <= 1:
        raise InputError(f"tpr is {tpr}, but it must be above 0 and at most 1.")
    # As a float, 0.95 · n can lie just above a whole number, which would move the rank by one.
    rank = math.ceil(Fraction(repr(float(tpr))) * len(inside))
    return float(inside.values[rank - 1])


def needed_for_tpr(tpr: float) -> int:
    """The fewest IN scores of which one can lie above τ, ⌈1 / (1 - tpr)⌉; for 1 any number does, as none shall."""
    left = 1 - Fraction(repr(float(tpr)))
    return math.ceil(1 / left) if left else 1


def fpr_at_tpr(in_scores: Scores, out_scores: Scores, tpr: float = 0.95) -> float:
    """The share of OUT accepted (score ≤ τ) when the share `tpr` of IN is: FPR95, with IN as the positive class."""
    tau = threshold_at_tpr(in_scores, tpr)
    outside = _sorted(out_scores, "OUT").values
    return int(torch.searchsorted(outside, tau, right=True)) / len(outside)


def aupr(in_scores: Scores, out_scores: Scores) -> float:
    """Average precision with OUT as the positive class: the mean, over OUT, of the precision at that sample's score.

    Samples with equal scores share one threshold, as in scikit-learn's `average_precision_score`.
    """
    known, other = _sorted(in_scores, "IN"), _sorted(out_scores, "OUT")
    inside, outside = known.values, other.values
    hits = other.copies * (len(outside) - torch.searchsorted(outside, outside))
    alarms = known.copies * (len(inside) - torch.searchsorted(inside, outside))
    return float((hits.double() / (hits + alarms)).mean())


def fpr95_swapped(in_scores: Scores, out_scores: Scores) -> float:
    """The share of IN rejected when 5 % of OUT are accepted.

    What OpenOOD and pytorch-ood call FPR95, and what the paper's code computes for MSP. This is not our FPR95, for the
    two classes have changed places: use `fpr_at_tpr`.
    """
    return fpr_at_tpr(-_sorted(out_scores, "OUT").values, -_sorted(in_scores, "IN").values)


def _sorted(scores: Scores, name: str) -> Ordered:
    if isinstance(scores, Ordered):
        return scores
    values = torch.as_tensor(scores).detach().to(torch.float64).flatten()
    if not len(values):
        raise InputError(f"the metric needs at least one {name} score, but got none.")
    if torch.isnan(values).any():
        raise InputError(f"the {name} scores contain nan, but a metric needs numbers.")
    found = object.__new__(Ordered)
    found.values, found.copies = values.sort().values, 1
    return found
