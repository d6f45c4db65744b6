"""The share of a feature outside of a subspace: ViM, and the span of the training features."""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self, final

import torch
from torch import Tensor

from ..core.fields import setting
from ..core.types import Output, Readout
from ..nets.score import of_equal_length
from .base import Detector, energy, linear_logits
from .sums import NOISE, Moments, eigenvectors, fitted, given_readout, linear_head, moments, named_sums, pseudo_inverse

if TYPE_CHECKING:
    from jaxtyping import Float


@final
@dataclass(frozen=True)
class ViM(Detector):
    """α · ‖Rᵀ(z − u)‖ − logsumexp(g), with u = −W⁺b the point of no logits.

    R spans what the largest eigenvectors of E[(z−u)(z−u)ᵀ] leave over; eigenvectors without variance are never among
    those. α makes the residuals as large as the largest logits: |E max_c g_c| / E‖Rᵀ(z − u)‖ over the training data, in
    a second pass. A residual below 1e-6 of ‖z − u‖ counts as that much, so that α stays finite.
    """

    description: ClassVar[str] = "energy and the residual outside of the principal space"
    paper: ClassVar[str] = "Wang et al. 2022"
    passes: ClassVar[int] = 2

    share: float = setting(0.5, "share of the dimensions in the principal space", ge=0.0, lt=1.0)
    moments: Moments | None = field(default=None, repr=False, compare=False)
    alpha: float | None = field(default=None, repr=False, compare=False)
    space: _Space | None = field(default=None, repr=False, compare=False)

    def applies(self, readout: Readout | None) -> bool:
        return readout is not None and readout.weight is not None

    def statistics(self, outputs: Output, y: Tensor, readout: Readout) -> dict[str, Tensor]:
        if self.moments is None:
            return moments(outputs.z)
        space = self._space(readout)
        shifted = outputs.z.detach().double() - space.origin
        return {
            "n": shifted.new_tensor(float(len(shifted))),
            "max_logit": linear_logits(outputs, readout).detach().double().amax(dim=1).sum(),
            "residual": (shifted @ space.residual).norm(dim=1).sum(),
            "length": shifted.norm(dim=1).sum(),
        }

    def fit(self, total: Mapping[str, Tensor]) -> Self:
        if self.moments is None:
            return replace(self, moments=Moments.of(*named_sums(self, total, "n", "sum", "outer")))
        _, top, residual, length = named_sums(self, total, "n", "max_logit", "residual", "length")
        alpha = float(top.abs() / torch.maximum(residual, 1e-6 * length)) if float(length) != 0 else 0.0
        return replace(self, alpha=alpha, space=None)

    def prepared(self, readout: Readout) -> Self:
        head, known = linear_head(self, readout), fitted(self, self.moments)
        origin = -pseudo_inverse(head.weight) @ head.bias
        offset = known.mean.to(origin.device) - origin
        values, vectors = eigenvectors(known.covariance.to(origin.device) + torch.outer(offset, offset))
        # Among directions without variance the choice would be rounding's, so all of them belong to the residual.
        varied = int((values > NOISE * values.sum()).sum())
        principal = min(int(self.share * len(values)), varied)
        return replace(self, space=_Space(origin, vectors[:, : len(values) - principal]))

    def _space(self, readout: Readout | None) -> _Space:
        return self.space or fitted(self, self.prepared(given_readout(self, readout)).space)

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        alpha, space = fitted(self, self.alpha), self._space(readout)
        residual = (outputs.z.double() - space.origin) @ space.residual
        scores: Tensor = alpha * residual.norm(dim=1) + energy(linear_logits(outputs, readout))
        return scores


@dataclass(frozen=True)
class _Spanned(Detector, ABC):
    """What `Span` and `SpanOwn` have in common: all but whose features they know."""

    paper: ClassVar[str] = "ours, after Wang et al. 2022"
    passes: ClassVar[int] = 1

    sigma: float = setting(0.1, "noise level, where features have the length √d", gt=0.0)
    inverse: Tensor | None = field(default=None, repr=False, compare=False)

    def statistics(self, outputs: Output, y: Tensor, readout: Readout) -> dict[str, Tensor]:
        return span_sums(outputs.z)

    def fit(self, total: Mapping[str, Tensor]) -> Self:
        return replace(self, inverse=span_inverse(self, total, self.sigma))

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        return out_of_span(outputs.z, fitted(self, self.inverse), self.sigma)


@final
@dataclass(frozen=True)
class Span(_Spanned):
    """‖(M + σ²I)⁻¹u‖ with u = √d z/‖z‖ and M = E uuᵀ over all training features: the norm of N(0, M + σ²I)'s score.

    A trained backbone lets the features of C classes span little more than C directions. Along a direction of spread λ
    a feature counts 1/(λ + σ²), so what is heard is the share of it that points out of the span of training features;
    a share, because all have one length. n and Σuuᵀ are all that clients send; no label is needed.
    """

    description: ClassVar[str] = "the share of a feature that points out of what training features span"


@final
@dataclass(frozen=True)
class SpanOwn(_Spanned):
    """`Span` of the client's own training features.

    A client that has few classes asks whether an image is like what it has seen itself, so images of classes that only
    others have count as OUT, as they do for KNN. What it keeps is one matrix, and no features.
    """

    description: ClassVar[str] = "span of the client's own training features"
    local: ClassVar[bool] = True


def span_sums(z: Tensor) -> dict[str, Tensor]:
    u = of_equal_length(z.detach().double())
    return {"n": u.new_tensor(float(len(u))), "outer": u.T @ u}


def span_inverse(detector: Detector, total: Mapping[str, Tensor], sigma: float) -> Float[Tensor, "d d"]:
    """(M + σ²I)⁻¹."""
    n, outer = named_sums(detector, total, "n", "outer")
    spread, axes = eigenvectors(outer / n)
    inverse: Tensor = axes / (spread + sigma**2) @ axes.T
    return inverse


def out_of_span(z: Tensor, inverse: Float[Tensor, "d d"], sigma: float) -> Float[Tensor, " n"]:
    """‖(M + σ²I)⁻¹u‖; features that are all 0 have no direction, and count as wholly out of the span."""
    u = of_equal_length(z.detach().double())
    norms: Tensor = (u @ inverse.to(z.device)).norm(dim=1)
    return torch.where((u == 0).all(dim=1), math.sqrt(z.shape[1]) / sigma**2, norms)


class _Space(NamedTuple):
    origin: Float[Tensor, " d"]
    residual: Float[Tensor, "d r"]
