"""The distance to training features: KNN."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Self, final

import torch
from torch import Tensor

from ..core.errors import InputError
from ..core.fields import setting
from ..core.types import Output, Readout
from .base import Detector
from .sums import fitted, unit_length

if TYPE_CHECKING:
    from jaxtyping import Float

DISTANCES = 2**24
"""How many distances the nearest-neighbour search holds at a time."""

SAMPLE = 1000
"""About how many training features say how far neighbours are apart: the mean of more would hardly differ."""


@final
@dataclass(frozen=True)
class KNN(Detector):
    """The distance of z/‖z‖ to its k-th nearest unit feature among the client's own training data.

    k = min(`k`, ⌊n/2⌋), at least 1. The features stay where they are: every client has its own detector.
    """

    description: ClassVar[str] = "distance to the client's k-th nearest training feature"
    paper: ClassVar[str] = "Sun et al. 2022"
    passes: ClassVar[int] = 1
    local: ClassVar[bool] = True

    k: int = setting(50, "which neighbour; at most half of the training features", ge=1)
    bank: Tensor | None = field(default=None, repr=False, compare=False)

    def statistics(self, outputs: Output, y: Tensor, readout: Readout) -> dict[str, Tensor]:
        return {"bank": unit_length(outputs.z.detach())}

    def fit(self, total: Mapping[str, Tensor]) -> Self:
        return replace(self, bank=bank_of(self, total))

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        bank = fitted(self, self.bank)
        return nearest(unit_length(outputs.z), bank, place_of(self.k, bank))


def bank_of(detector: Detector, total: Mapping[str, Tensor]) -> Tensor:
    bank = total.get("bank")
    if bank is None or len(bank) == 0:
        name = type(detector).__name__
        raise InputError(f"{name} cannot be fitted: the client has no training features of its own.")
    return bank


def place_of(k: int, bank: Tensor) -> int:
    """Which neighbour: where there are few features, the k-th would be among the farthest."""
    return max(min(k, len(bank) // 2), 1)


def nearest(u: Float[Tensor, "n d"], bank: Float[Tensor, "m d"], k: int) -> Float[Tensor, " n"]:
    """The distance to the k-th nearest point of the bank."""
    bank = bank.to(u.device).double()
    squares = bank.square().sum(dim=1)
    found = []
    for part in torch.split(u.double(), max(DISTANCES // len(bank), 1)):
        distances = part.square().sum(dim=1, keepdim=True) + squares - 2 * part @ bank.T
        found.append(distances.topk(k, dim=1, largest=False).values[:, -1].clamp_min(0.0).sqrt())
    return torch.cat(found)
