"""Energy after features or weights are pruned or clipped: ASH, ReAct, DICE."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Self, final

import torch
from torch import Tensor

from ..core.errors import InputError
from ..core.fields import setting
from ..core.types import Output, Readout
from .base import Detector, energy
from .sums import LinearHead, fitted, given_readout, histogram, histogram_percentile, linear_head, named_sums

if TYPE_CHECKING:
    from jaxtyping import Float


@final
@dataclass(frozen=True)
class ReAct(Detector):
    """The energy of g(min(z, c)), where c is a percentile of all training activations.

    The percentile comes from a histogram whose bins are fixed in advance, so that it does not depend on how the data is
    cut; c is right to 0.1 %, for magnitudes from 1e-8 to 1e8.
    """

    description: ClassVar[str] = "energy after clipping the features from above"
    paper: ClassVar[str] = "Sun et al. 2021"
    passes: ClassVar[int] = 1

    percentile: float = setting(90.0, "percentile of the training activations to clip at", ge=0.0, le=100.0)
    threshold: float | None = field(default=None, repr=False, compare=False)

    def applies(self, readout: Readout | None) -> bool:
        return readout is not None

    def statistics(self, outputs: Output, y: Tensor, readout: Readout) -> dict[str, Tensor]:
        return {"counts": histogram(outputs.z.detach())}

    def fit(self, total: Mapping[str, Tensor]) -> Self:
        (counts,) = named_sums(self, total, "counts")
        return replace(self, threshold=histogram_percentile(counts, self.percentile))

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        threshold = fitted(self, self.threshold)
        return energy(given_readout(self, readout).head(outputs.z.clamp_max(threshold)))


@final
@dataclass(frozen=True)
class DICE(Detector):
    """The energy of (M∘W)z + b, where the mask M keeps the entries with the largest contribution E[z]_j · W_cj.

    Of m entries m − round(m·percentile/100) are kept, at least one. The head is the one that classifies.
    """

    description: ClassVar[str] = "energy with the strongest weights of the head alone"
    paper: ClassVar[str] = "Sun & Li 2022"
    passes: ClassVar[int] = 1

    percentile: float = setting(90.0, "percentage of the head's weights that are set to 0", ge=0.0, lt=100.0)
    mean: Tensor | None = field(default=None, repr=False, compare=False)
    kept: LinearHead | None = field(default=None, repr=False, compare=False)

    def applies(self, readout: Readout | None) -> bool:
        return readout is not None and readout.weight is not None

    def statistics(self, outputs: Output, y: Tensor, readout: Readout) -> dict[str, Tensor]:
        z = outputs.z.detach().double()
        return {"n": z.new_tensor(float(len(z))), "sum": z.sum(dim=0)}

    def fit(self, total: Mapping[str, Tensor]) -> Self:
        n, first = named_sums(self, total, "n", "sum")
        return replace(self, mean=first / n, kept=None)

    def prepared(self, readout: Readout) -> Self:
        head, mean = linear_head(self, readout), fitted(self, self.mean)
        contribution = (mean.to(head.weight.device) * head.weight).flatten()
        k = max(len(contribution) - round(len(contribution) * self.percentile / 100), 1)
        order = contribution.argsort(descending=True, stable=True)
        mask = torch.zeros_like(contribution, dtype=torch.bool).scatter(0, order[:k], True)
        return replace(self, kept=head._replace(weight=torch.where(mask.view_as(head.weight), head.weight, 0.0)))

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        kept = self.kept or fitted(self, self.prepared(given_readout(self, readout)).kept)
        return energy(outputs.z.double() @ kept.weight.T + kept.bias)


@final
@dataclass(frozen=True)
class ASH(Detector):
    """The energy of g(z'), where z' keeps the largest entries of each feature vector.

    Of n entries k = n − round(n·percentile/100) survive, at least one; `variant` names what becomes of them.
    """

    description: ClassVar[str] = "energy after pruning the features"
    paper: ClassVar[str] = "Djurisic et al. 2023"

    variant: str = setting("b", "survivors stay (p), become equal (b), grow (s)", choices=("p", "b", "s"))
    percentile: float = setting(65.0, "percentage of the features that are set to 0", ge=0.0, lt=100.0)

    def applies(self, readout: Readout | None) -> bool:
        return readout is not None

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        if readout is None:
            raise InputError("ASH needs the model's head, but no readout was given.")
        n = outputs.z.shape[1]
        k = max(n - round(n * self.percentile / 100), 1)
        return energy(readout.head(ASH_VARIANTS[self.variant](outputs.z, k)))


def ash_p(z: Float[Tensor, "n d"], k: int) -> Float[Tensor, "n d"]:
    """Survivors stay as they are."""
    return torch.where(_survivors(z, k), z, 0.0)


def ash_b(z: Float[Tensor, "n d"], k: int) -> Float[Tensor, "n d"]:
    """Survivors all become s₁/k, with s₁ the sum of the features before pruning."""
    return torch.where(_survivors(z, k), z.sum(dim=1, keepdim=True) / k, 0.0)


def ash_s(z: Float[Tensor, "n d"], k: int) -> Float[Tensor, "n d"]:
    """Survivors are multiplied by exp(s₁/s₂), with the sums before and after pruning.

    ASH is made for features after a ReLU; where the survivors do not have a positive sum, they stay as they are.
    """
    pruned = ash_p(z, k)
    before, after = z.sum(dim=1, keepdim=True), pruned.sum(dim=1, keepdim=True)
    ratio = torch.where(after > 0, before / torch.where(after > 0, after, 1.0), 0.0)
    # s₁/s₂ is at most n/k; only when very few survive can it reach 60, and float32 ends at exp(88).
    return pruned * torch.exp(ratio.clamp_max(60.0))


def _survivors(z: Tensor, k: int) -> Tensor:
    """Where the k largest entries of each row are; of equal entries the first survive, on every device."""
    order = z.sort(dim=1, descending=True, stable=True).indices
    return torch.zeros_like(z, dtype=torch.bool).scatter(1, order[:, :k], True)


ASH_VARIANTS: dict[str, Callable[[Tensor, int], Tensor]] = {"p": ash_p, "b": ash_b, "s": ash_s}
