"""FedProx (Li et al., MLSys 2020): FedAvg with a pull towards the received model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor
from torch.nn.functional import cross_entropy

from ..core.fields import setting
from ..core.types import Batch, Context, Nets, both_views
from .base import Method, flat_parameters


@final
@dataclass(frozen=True)
class FedProx(Method):
    """A proximal term that holds each client's parameters w near the received ones w_t: (mu/2)·‖w − w_t‖².

    It is over trained parameters, not over the statistics of batch normalisation. Weight decay pulls towards 0 at the
    same time.
    """

    views: int = setting(1, "2: cross-entropy on the augmented view too", choices=(1, 2))
    mu: float = setting(0.01, "weight of the proximal term; 0: FedAvg", ge=0.0)

    paper: ClassVar[str] = "Li et al., MLSys 2020"

    def losses(self, nets: Nets, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        batch = both_views(batch)
        loss = cross_entropy(nets["head"](batch.features), batch.y)
        if self.mu > 0:
            group = self.groups["model"]
            moved = flat_parameters(nets, group) - flat_parameters(ctx.received, group).detach()
            loss = loss + 0.5 * self.mu * moved.square().sum()
        return {"model": loss}
