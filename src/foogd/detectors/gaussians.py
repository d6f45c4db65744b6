"""Gaussians on the features: Mahalanobis and one Gaussian for all classes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Self, final

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ..core.fields import setting
from ..core.types import Output, Readout
from .base import Detector
from .sums import Moments, Whitening, fitted, moments, named_sums

if TYPE_CHECKING:
    from jaxtyping import Float


@final
@dataclass(frozen=True)
class Mahalanobis(Detector):
    """min_c (z−μ_c)ᵀ Σ⁻¹ (z−μ_c) over the classes that were seen, with one Σ for all of them.

    Clients send Σz for each class, so the server learns how many images of each class they have.
    """

    description: ClassVar[str] = "distance to the nearest class mean, one covariance for all"
    paper: ClassVar[str] = "Lee et al. 2018"
    passes: ClassVar[int] = 1

    shrinkage: float = setting(1e-6, "how far the covariance goes towards its mean variance", ge=0.0, le=1.0)
    whitening: Whitening | None = field(default=None, repr=False, compare=False)
    means: Tensor | None = field(default=None, repr=False, compare=False)

    def statistics(self, outputs: Output, y: Tensor, readout: Readout) -> dict[str, Tensor]:
        z = outputs.z.detach().double()
        members = one_hot(y.long(), outputs.logits.shape[1]).to(z)
        return {"counts": members.sum(dim=0), "sums": members.T @ z, "outer": z.T @ z}

    def fit(self, total: Mapping[str, Tensor]) -> Self:
        counts, sums, outer = named_sums(self, total, "counts", "sums", "outer")
        n, seen = counts.sum(), counts > 0
        means = sums[seen] / counts[seen].unsqueeze(1)
        within = (outer - sums[seen].T @ means) / n
        whitening = Whitening.of(sums.sum(dim=0) / n, within, outer.diagonal().mean() / n, self.shrinkage)
        return replace(self, whitening=whitening, means=whitening(means))

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        z, means = fitted(self, self.whitening)(outputs.z), fitted(self, self.means)
        # Differences, not scalar products: classes can be far apart compared with their width.
        exact = "donot_use_mm_for_euclid_dist"
        return torch.cdist(z, means.to(z.device), compute_mode=exact).square().amin(dim=1)


@final
@dataclass(frozen=True)
class Gaussian(Detector):
    """−log N(z; μ, Σ), minus the log density of one Gaussian for all training features, in nats.

    n, Σz and Σzzᵀ are all that clients send, and their sums give what pooled features would have given.
    """

    description: ClassVar[str] = "minus the log density of one Gaussian on the features"
    paper: ClassVar[str] = "after Sehwag et al. 2021"
    passes: ClassVar[int] = 1

    shrinkage: float = setting(1e-6, "how far the covariance goes towards its mean variance", ge=0.0, le=1.0)
    whitening: Whitening | None = field(default=None, repr=False, compare=False)

    def statistics(self, outputs: Output, y: Tensor, readout: Readout) -> dict[str, Tensor]:
        return moments(outputs.z)

    def fit(self, total: Mapping[str, Tensor]) -> Self:
        n, first, outer = named_sums(self, total, "n", "sum", "outer")
        mean, covariance = Moments.of(n, first, outer)
        whitening = Whitening.of(mean, covariance, outer.diagonal().mean() / n, self.shrinkage)
        return replace(self, whitening=whitening)

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        whitening = fitted(self, self.whitening)
        squared = whitening(outputs.z).square().sum(dim=1)
        return 0.5 * (squared + whitening.log_determinant + outputs.z.shape[1] * math.log(2 * math.pi))
