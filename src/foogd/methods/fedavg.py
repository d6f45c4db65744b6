"""FedAvg (McMahan et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor
from torch.nn.functional import cross_entropy

from ..core.fields import setting
from ..core.types import Batch, Context, Nets, both_views
from .base import Method


@final
@dataclass(frozen=True)
class FedAvg(Method):
    """Local training by cross-entropy, averaged by number of samples; with `views` 2 also on augmented images."""

    views: int = setting(1, "2: cross-entropy on the augmented view too", choices=(1, 2))

    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"

    def losses(self, nets: Nets, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        batch = both_views(batch)
        return {"model": cross_entropy(nets["head"](batch.features), batch.y)}
