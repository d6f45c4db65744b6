"""FedLN: FedAvg with the loss of LogitNorm (Wei et al., ICML 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from ..core.fields import setting
from ..core.types import Batch, Context, Nets, both_views
from ..functional import logit_norm
from .base import Method


@final
@dataclass(frozen=True)
class FedLN(Method):
    """Cross-entropy of logits scaled to the length 1/tau in training, so that confidence is not learned as length.

    L = CE(v / (tau·(‖v‖ + 10⁻⁷)), y). Tests read the raw logits v.
    """

    views: int = setting(1, "2: the loss on the augmented view too", choices=(1, 2))
    tau: float = setting(0.04, "temperature: logits have length 1/tau in the loss", gt=0.0)

    paper: ClassVar[str] = "Wei et al., ICML 2022"

    def losses(self, nets: Nets, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        batch = both_views(batch)
        return {"model": logit_norm(nets["head"](batch.features), batch.y, tau=self.tau)}
