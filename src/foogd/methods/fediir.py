"""FedIIR (Guo et al., ICML 2023): gradients of the head that agree between clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..core.fields import setting
from ..core.types import Batch, Context, Nets, Rng, ServerState, Survey, both_views
from ..functional import head_gradient
from .base import Method, flat_parameters


@final
@dataclass(frozen=True)
class FedIIR(Method):
    """A penalty on the distance between the head's gradient on a batch and its running mean over clients.

    L = CE + penalty·‖g_k − ḡ‖² with g_k the gradient of CE for the head's weight and bias. Each round starts with a
    survey: the clients send the sum of g_k over their batches at the received weights, and how many there were; the
    server divides the sums by the count of all and sets ḡ ← ema·ḡ + (1 − ema)·mean, with ḡ = 0 before round 1. The
    survey sees images as they are; with two views g_k is over both, so that the penalty counts their difference too.
    """

    views: int = setting(1, "2: losses on the augmented view too", choices=(1, 2))
    penalty: float = setting(1e-3, "weight of the gradient distance; 0: FedAvg", ge=0.0)
    ema: float = setting(0.95, "share of the old mean gradient kept", ge=0.0, lt=1.0)

    paper: ClassVar[str] = "Guo et al., ICML 2023"
    travels: ClassVar[str] = "the model both ways; the head's gradient and a count up, the mean gradient down"
    passes: ClassVar[str] = "one pass over the client's images before training, in an exchange of its own"

    @property
    def surveys(self) -> bool:
        return self.penalty > 0

    def init_server(self, nets: Nets, rng: Rng) -> dict[str, Tensor]:
        return {"gradient": torch.zeros_like(flat_parameters(nets, ("head",)).detach())}

    def survey(self, nets: Nets, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        z = batch.features
        return {"gradient": flat_gradient(z, nets["head"](z), batch.y), "batches": z.new_ones(())}

    def begin(self, server: ServerState, surveys: Sequence[Survey]) -> ServerState:
        if not surveys:
            return server
        # In the order of clients: a fold, like the mean of the rows.
        total, batches = surveys[0].sums["gradient"], surveys[0].sums["batches"]
        for answer in surveys[1:]:
            total, batches = total + answer.sums["gradient"], batches + answer.sums["batches"]
        kept = self.ema * server.extra["gradient"] + (1 - self.ema) * (total / batches)
        return replace(server, extra={**server.extra, "gradient": kept})

    def losses(self, nets: Nets, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        batch = both_views(batch)
        z, logits = batch.features, nets["head"](batch.features)
        loss = cross_entropy(logits, batch.y)
        if self.penalty > 0:
            # The closed form is differentiable itself, so the penalty needs no second derivative from autograd.
            apart = flat_gradient(z, logits, batch.y) - ctx.server["gradient"]
            loss = loss + self.penalty * apart.square().sum()
        return {"model": loss}


def flat_gradient(z: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """The gradient of the mean cross-entropy for a linear head, weight then bias, as one vector."""
    weight, bias = head_gradient(z, logits, y)
    return torch.cat([weight.flatten(), bias])
