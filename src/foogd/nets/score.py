"""The score network s(z): an estimate of the gradient of the log density of features (FOOGD, section 3)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..types import Score

if TYPE_CHECKING:
    from jaxtyping import Float, Int

MOMENTUM = 0.1  # as in batch normalisation


class ScoreNetwork(nn.Module, ABC):
    """What FOOGD asks of a score network: s(u, σ) in a space of its own, and the way from features z to that space.

    With `log_share` features are first compressed to sign(z)·log(1 + |z|/c), where c is this share of their mean
    size: features behind a ReLU are skewed, and what is unusual about an input often shows in channels that are almost
    silent. With `standardise` they are then shifted and scaled. The statistics are float buffers, which travel and are
    averaged like those of batch normalisation; a space that needs none has none.
    """

    running_mean: Tensor
    running_var: Tensor
    running_size: Tensor

    def __init__(self, feature_width: int, standardise: bool = False, log_share: float = 0.0) -> None:
        super().__init__()
        self.standardise, self.log_share = standardise, log_share
        if standardise:
            self.register_buffer("running_mean", torch.zeros(feature_width))
            self.register_buffer("running_var", torch.ones(feature_width))
        if log_share > 0:
            self.register_buffer("running_size", torch.ones(()))

    @abstractmethod
    def forward(
        self, z: Float[Tensor, "b d"], sigma: float | Float[Tensor, " b"] | None = None
    ) -> Float[Tensor, "b d"]:
        """The score at points of the network's space, of the density that noise of level sigma has smoothed."""

    def given(
        self, z: Float[Tensor, "b d"], sigma: float | Float[Tensor, " b"], y: Int[Tensor, " b"]
    ) -> Float[Tensor, "b d"]:
        """The score of the features of class y; of all features, where a network knows no classes."""
        out: Tensor = self(z, sigma)
        return out

    @torch.no_grad()
    def observe(self, z: Float[Tensor, "b d"]) -> None:
        """Move the running statistics towards those of a batch; nothing happens in eval mode."""
        if not self.training:
            return
        if self.log_share > 0:
            self.running_size.lerp_(z.abs().mean(), MOMENTUM)
        if self.standardise:
            z = self._compressed(z)
            self.running_mean.lerp_(z.mean(0), MOMENTUM)
            self.running_var.lerp_(z.var(0, correction=0), MOMENTUM)

    def _compressed(self, z: Tensor) -> Tensor:
        if self.log_share == 0:
            return z
        return z.sign() * torch.log1p(z.abs() / (self.log_share * self.running_size + 1e-12))

    def scale(self, z: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        """The features in the network's space, by the running statistics, which are constants here."""
        z = self._compressed(z)
        if not self.standardise:
            return z
        # Features that are almost always 0 would blow up, so no variance counts as less than 1 % of the mean one.
        var = torch.maximum(self.running_var, 0.01 * self.running_var.mean())
        return (z - self.running_mean) / torch.sqrt(var + 1e-12)


@final
class ScoreNet(ScoreNetwork):
    """s(u) = net(u), or s(u, σ) = net(u, log σ)/σ where conditioned; net = Linear-LayerNorm-ELU-Linear."""

    def __init__(
        self,
        feature_width: int,
        width: int = 1024,
        conditioned: bool = False,
        standardise: bool = False,
        log_share: float = 0.0,
    ) -> None:
        super().__init__(feature_width, standardise, log_share)
        self.conditioned = conditioned
        self.net = nn.Sequential(
            nn.Linear(feature_width + conditioned, width),
            nn.LayerNorm(width),
            nn.ELU(),
            nn.Linear(width, feature_width),
        )

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


@final
class MixtureScore(ScoreNetwork):
    """The score of a mixture of one Gaussian a class, N(μ_c, diag(v_c) + σ²I), all classes with the same weight.

    s(u, σ) = Σ_c w_c(u) (μ_c − u)/(v_c + σ²), where w_c is the probability of the class at u. Noise of any level is
    exact, the field is a gradient, and far from all classes its norm grows with the distance.
    """

    def __init__(
        self, feature_width: int, classes: int, standardise: bool = False, log_share: float = 0.0
    ) -> None:
        super().__init__(feature_width, standardise, log_share)
        self.mean = nn.Parameter(torch.zeros(classes, feature_width))
        self.log_var = nn.Parameter(torch.zeros(classes, feature_width))

    def forward(
        self, z: Float[Tensor, "b d"], sigma: float | Float[Tensor, " b"] | None = None
    ) -> Float[Tensor, "b d"]:
        if isinstance(sigma, Tensor):
            var = self.log_var.exp() + sigma.to(z).square().reshape(-1, 1, 1)
            pull = (self.mean - z[:, None]) / var
            log_density = -0.5 * (pull * (self.mean - z[:, None]) + var.log()).sum(2)
            return (torch.softmax(log_density, 1)[:, :, None] * pull).sum(1)
        # One noise level for all points: three matrix products, and no array of points × classes × features.
        var = self.log_var.exp() + (sigma or 0.0) ** 2
        pulled, ease = self.mean / var, 1 / var
        constant = (self.mean * pulled + var.log()).sum(1)
        weight = torch.softmax(z @ pulled.T - 0.5 * (z.square() @ ease.T + constant), 1)
        return weight @ pulled - z * (weight @ ease)

    def given(
        self, z: Float[Tensor, "b d"], sigma: float | Float[Tensor, " b"], y: Int[Tensor, " b"]
    ) -> Float[Tensor, "b d"]:
        square = sigma.to(z).square().reshape(-1, 1) if isinstance(sigma, Tensor) else sigma**2
        return (self.mean[y] - z) / (self.log_var[y].exp() + square)


def frozen(score: ScoreNetwork) -> Score:
    """The same function with detached parameters: gradients reach its input and never the network."""
    state = {name: value.detach() for name, value in score.state_dict(keep_vars=True).items()}

    def call(z: Tensor, sigma: float | Tensor | None = None) -> Tensor:
        out: Tensor = functional_call(score, state, (z, sigma))
        return out

    return call
