"""The score network s(z): an estimate of the gradient of the log density of features (FOOGD, section 3)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..types import Score

if TYPE_CHECKING:
    from jaxtyping import Float

MOMENTUM = 0.1  # as in batch normalisation


@final
class ScoreNet(nn.Module):
    """s(u) = net(u), or s(u, σ) = net(u, log σ)/σ where conditioned; net = Linear-LayerNorm-ELU-Linear.

    With `standardise` the score lives in the standardised space: call `score(score.scale(z), sigma)`. The statistics
    are float buffers, which travel and are averaged like those of batch normalisation; without it there are none.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self, feature_width: int, width: int = 1024, conditioned: bool = False, standardise: bool = False
    ) -> None:
        super().__init__()
        self.conditioned = conditioned
        self.standardise = standardise
        self.net = nn.Sequential(
            nn.Linear(feature_width + conditioned, width),
            nn.LayerNorm(width),
            nn.ELU(),
            nn.Linear(width, feature_width),
        )
        if standardise:
            self.register_buffer("running_mean", torch.zeros(feature_width))
            self.register_buffer("running_var", torch.ones(feature_width))

    def forward(
        self, z: Float[Tensor, "b d"], sigma: float | Float[Tensor, " b"] | None = None
    ) -> Float[Tensor, "b d"]:
        out: Tensor
        if not self.conditioned:
            out = self.net(z)
            return out
        if sigma is None:
            raise ValueError("this score network is conditioned on the noise level: give it a sigma")
        if isinstance(sigma, Tensor):
            level = sigma.to(z).reshape(-1, 1).expand(len(z), 1)
            out = self.net(torch.cat([z, level.log()], 1)) / level
            return out
        # A filled tensor, not a converted number: copies from the host are not allowed while a CUDA graph is recorded.
        out = self.net(torch.cat([z, z.new_full((len(z), 1), math.log(sigma))], 1)) / sigma
        return out

    @torch.no_grad()
    def observe(self, z: Float[Tensor, "b d"]) -> None:
        """Move the running mean and (biased) variance towards those of a batch; nothing happens in eval mode."""
        if self.standardise and self.training:
            self.running_mean.lerp_(z.mean(0), MOMENTUM)
            self.running_var.lerp_(z.var(0, correction=0), MOMENTUM)

    def scale(self, z: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        """u = (z − mean)/std by the running statistics, which are constants here; z itself where not standardised."""
        if not self.standardise:
            return z
        # Features that are almost always 0 would blow up, so no variance counts as less than 1 % of the mean one.
        var = torch.maximum(self.running_var, 0.01 * self.running_var.mean())
        return (z - self.running_mean) / torch.sqrt(var + 1e-12)


def frozen(score: ScoreNet) -> Score:
    """The same function with detached parameters: gradients reach its input and never the network."""
    state = {name: value.detach() for name, value in score.state_dict(keep_vars=True).items()}

    def call(z: Tensor, sigma: float | Tensor | None = None) -> Tensor:
        out: Tensor = functional_call(score, state, (z, sigma))
        return out

    return call
