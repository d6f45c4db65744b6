"""Sums over features, and what detectors make of them: moments, histograms, eigenvectors, a whitening."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..core.errors import InputError
from ..core.types import Readout
from .base import Detector

if TYPE_CHECKING:
    from jaxtyping import Float, Int

T = TypeVar("T")

SMALLEST, LARGEST, STEP = 1e-8, 1e8, 0.0019
"""ReAct's histogram: magnitudes between these two in bins of 0.19 %, for each sign, and one bin for what is smaller."""

BINS = math.ceil(math.log(LARGEST / SMALLEST) / STEP)

NOISE = 1e-12
"""Variances below this share of the mean square are what rounding leaves of zero."""


def classes_of(y: Tensor, logits: Tensor) -> Float[Tensor, " classes"]:
    """1 for the classes that are among these labels, 0 for all others."""
    return torch.bincount(y, minlength=logits.shape[1]).clamp_max(1).to(logits)


def moments(z: Float[Tensor, "n d"]) -> dict[str, Tensor]:
    """n, Σz and Σzzᵀ in float64: what a Gaussian needs, and nothing about a single image."""
    z = z.detach().double()
    return {"n": z.new_tensor(float(len(z))), "sum": z.sum(dim=0), "outer": z.T @ z}


def histogram(z: Float[Tensor, "n d"]) -> Int[Tensor, " bins"]:
    """How many entries are in each bin: negative ones from large to small, those near 0, positive ones."""
    z = z.float()
    level = (z.abs() / SMALLEST).log().div(STEP).floor() + 1  # 0: smaller than all bins
    signed = level.nan_to_num(0.0).clamp(0, BINS) * z.sign().nan_to_num(0.0)
    return torch.bincount((signed.long() + BINS).flatten(), minlength=2 * BINS + 1)


def histogram_percentile(counts: Int[Tensor, " bins"], percentile: float) -> float:
    """The percentile of the entries in a histogram, linear between neighbours in order; a bin is its middle."""
    upto = counts.cumsum(0)
    rank = (int(upto[-1]) - 1) * percentile / 100
    ends = [int(torch.searchsorted(upto, r, right=True)) - BINS for r in (math.floor(rank), math.ceil(rank))]
    low, high = (math.copysign(SMALLEST * math.exp((abs(i) - 0.5) * STEP), i) if i else 0.0 for i in ends)
    return low + (high - low) * (rank - math.floor(rank))


class LinearHead(NamedTuple):
    """A linear head in float64; copies, because the nets behind a readout take another client's values later."""

    weight: Float[Tensor, "classes d"]
    bias: Float[Tensor, " classes"]


class Moments(NamedTuple):
    mean: Float[Tensor, " d"]
    covariance: Float[Tensor, "d d"]

    @classmethod
    def of(cls, n: Tensor, first: Tensor, outer: Tensor) -> Moments:
        mean = first / n
        return cls(mean, outer / n - torch.outer(mean, mean))


class Whitening(NamedTuple):
    """z ↦ (z − centre) V Λ^(−1/2), whose squared length is the Mahalanobis distance to the centre."""

    centre: Float[Tensor, " d"]
    matrix: Float[Tensor, "d d"]
    log_determinant: float  # of the covariance

    @classmethod
    def of(cls, centre: Tensor, covariance: Tensor, mean_square: Tensor, shrinkage: float) -> Whitening:
        """The covariance shrunk to (1−s)·Σ + s·tr(Σ)/d·I; where all variances are 0, distances are Euclidean."""
        values, vectors = eigenvectors(covariance)
        values = (1 - shrinkage) * values + shrinkage * values.mean()
        values = values.clamp_min(float(NOISE * mean_square)) if float(mean_square) != 0 else torch.ones_like(values)
        return cls(centre, vectors / values.sqrt(), float(values.log().sum()))

    def __call__(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        return (z.double() - self.centre.to(z.device)) @ self.matrix.to(z.device)


def eigenvectors(matrix: Float[Tensor, "d d"]) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"]]:
    """Eigenvalues from small to large, none below 0, and eigenvectors; all nan after a model has diverged."""
    if not bool(torch.isfinite(matrix).all()):
        return torch.full_like(matrix[0], math.nan), torch.full_like(matrix, math.nan)
    values, vectors = torch.linalg.eigh(matrix)
    return values.clamp_min(0.0), vectors


def pseudo_inverse(weight: Float[Tensor, "classes d"]) -> Float[Tensor, "d classes"]:
    if not bool(torch.isfinite(weight).all()):
        return torch.full_like(weight.T, math.nan)
    inverse: Tensor = torch.linalg.pinv(weight)
    return inverse


def unit_length(z: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """z/‖z‖, and 0 where z is 0."""
    length = z.double().norm(dim=1, keepdim=True)
    return (z / torch.where(length > 0, length, 1.0)).to(z.dtype)


def linear_head(detector: Detector, readout: Readout) -> LinearHead:
    if readout.weight is None:
        raise InputError(f"{type(detector).__name__} needs the weights of a linear head, but the model has none.")
    weight = readout.weight.detach().to(torch.float64, copy=True)
    if readout.bias is None:
        return LinearHead(weight, weight.new_zeros(len(weight)))
    return LinearHead(weight, readout.bias.detach().to(torch.float64, copy=True))


def given_readout(detector: Detector, readout: Readout | None) -> Readout:
    if readout is None:
        raise InputError(f"{type(detector).__name__} needs the model's head, but no readout was given.")
    return readout


def fitted(detector: Detector, value: T | None) -> T:
    if value is None:
        times = "once" if detector.passes == 1 else f"{detector.passes} times"
        raise InputError(f"{type(detector).__name__} was used before it was fitted: call fit {times} first.")
    return value


def named_sums(detector: Detector, total: Mapping[str, Tensor], *names: str) -> list[Tensor]:
    """The statistics of these names, of which the first counts what was seen."""
    name = type(detector).__name__
    missing = [key for key in names if key not in total]
    if missing:
        raise InputError(f"{name} cannot be fitted: the statistics {', '.join(missing)} are missing.")
    found = [total[key] for key in names]
    if float(found[0].sum()) == 0:
        raise InputError(f"{name} cannot be fitted: there are no training features.")
    return found
