"""SCAFFOLD (Karimireddy et al., ICML 2020): control variates against the drift of clients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..core.fields import setting
from ..core.flat import ServerNets
from ..core.types import Batch, Context, Nets, Rng, ServerState, Survey, both_views
from .base import Method, flat_parameters


@final
@dataclass(frozen=True)
class SCAFFOLD(Method):
    """Each local gradient is corrected by c − c_k, the difference of the mean and the client's own past gradient.

    A step is w ← w − lr·(g + c − c_k). After K steps c_k⁺ = c_k − c + (w_t − w)/(K·lr), the mean gradient on the way
    (option II), and c moves by the mean of c_k⁺ − c_k over all clients, those that did not take part included. The
    server moves by w_t + eta_g·(mean w − w_t). Only trained parameters have variates and a step eta_g; the statistics
    of batch normalisation are averaged.
    """

    views: int = setting(1, "2: cross-entropy on the augmented view too", choices=(1, 2))
    eta_g: float = setting(1.0, "step of the server; 1: the mean of the clients", gt=0.0)
    client_weights: str = setting("uniform", "samples: as the run weights clients", choices=("uniform", "samples"))

    paper: ClassVar[str] = "Karimireddy et al., ICML 2020"
    travels: ClassVar[str] = "the model and a vector as long as its trained parameters, both ways"
    keeps: ClassVar[str] = "its control variate, as long as the trained parameters"

    def weight(self, default: float) -> float:
        return 1.0 if self.client_weights == "uniform" else default

    def init_server(self, nets: Nets, rng: Rng) -> dict[str, Tensor]:
        return {"variate": torch.zeros_like(self._flat(nets).detach())}

    def losses(self, nets: Nets, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        batch = both_views(batch)
        correction = ctx.server["variate"]
        if "variate" in ctx.memory:
            correction = correction - ctx.memory["variate"]
        # Linear in w, so that its gradient is the correction itself; counted from w_t, so that it starts at 0.
        moved = self._flat(nets) - self._flat(ctx.received).detach()
        return {"model": cross_entropy(nets["head"](batch.features), batch.y) + (correction * moved).sum()}

    def finish(self, nets: Nets, batches: Iterable[Batch], ctx: Context) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        steps = ctx.steps.get("model", 0)
        if steps == 0:  # no gradient was seen, as with zero epochs or where only the score network learns
            return {}, dict(ctx.memory)
        optimiser = self.optimiser("model", ctx.optimiser)
        way = optimiser.lr * effective_steps(steps, optimiser.momentum)
        # Weight decay counts as gradient here, in c and c_k alike. Their difference cancels it, but for the distance
        # between the clients' weights, so that a step decays the weights once.
        change = (self._flat(ctx.received) - self._flat(nets)) / way - ctx.server["variate"]
        own = ctx.memory["variate"] + change if "variate" in ctx.memory else change
        return {"variate": change}, {**ctx.memory, "variate": own}

    @torch.no_grad()
    def aggregate(
        self, server: ServerState, mean: ServerState, extras: Sequence[Survey], nets: ServerNets, rng: Rng
    ) -> ServerState:
        variate = server.extra["variate"]
        for extra in extras:
            if "variate" in extra.sums:
                variate = variate + extra.sums["variate"] / server.clients
        mean = replace(mean, extra={**server.extra, "variate": variate})
        if self.eta_g == 1:
            return mean
        old, new = nets.load(server), nets.load(mean)
        for name in self.groups["model"]:
            for before, after in zip(old[name].parameters(), new[name].parameters(), strict=True):
                after.copy_(before + self.eta_g * (after - before))
        return replace(nets.store(mean, new), frozen=mean.frozen)  # those are not the clients' to move

    def _flat(self, nets: Nets) -> Tensor:
        return flat_parameters(nets, self.groups["model"])


def effective_steps(steps: int, momentum: float) -> float:
    """How many plain steps as many steps of SGD with momentum β are worth: Σ_{s=1..K} (1 − β^s)/(1 − β).

    Exact for a constant gradient and momentum that starts at 0, as it does unless a run keeps it between rounds.
    """
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
