"""The score network s(z): an estimate of the gradient of the log density of features (FOOGD, section 3)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..core.types import Score

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class ScoreNetwork(nn.Module, ABC):
    """What FOOGD asks of a score network: s(u, σ) in a space of its own, and the way from features z to that space.

    What sets the space is measured, not learnt: sums over all clients' images at the model of the server.
    """

    @abstractmethod
    def scale(self, z: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        """The features in the network's space; what was measured is constant here."""

    @abstractmethod
    def forward(self, u: Float[Tensor, "b d"], sigma: float | Float[Tensor, " b"]) -> Float[Tensor, "b d"]:
        """The score at points of the network's space, of the density that noise of level sigma has smoothed."""

    @abstractmethod
    def moments(self, z: Float[Tensor, "b d"], y: Int[Tensor, " b"]) -> dict[str, Tensor]:
        """What a batch of features adds to each of the sums that `measure` gets."""

    @abstractmethod
    def measure(self, sums: Mapping[str, Tensor]) -> None:
        """Set the space by sums over all training features."""


@final
class ScoreNet(ScoreNetwork):
    """The score of N(0, I), which noise of level σ makes N(0, (1 + σ²)I), and what a network adds to it.

    s(u, σ) = −u/(1 + σ²) + net(u/√(1 + σ²), log σ)/(σ√(1 + σ²)), with u = (√d·z/‖z‖ − m)/c: m is the mean over all
    features, and c² their mean variance a dimension. So the points that the network sees, and what it has to say,
    are of the same size at every noise level (Karras et al., NeurIPS 2022). It starts at 0.
    """

    centre: Tensor
    spread: Tensor

    def __init__(self, feature_width: int, width: int = 1024) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(feature_width))
        self.register_buffer("spread", torch.ones(1))
        self.net = two_layers(feature_width, width)
        for value in self.net[3].parameters():
            nn.init.zeros_(value)

    def scale(self, z: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        return (of_equal_length(z) - self.centre) / self.spread

    def forward(self, u: Float[Tensor, "b d"], sigma: float | Float[Tensor, " b"]) -> Float[Tensor, "b d"]:
        size = 1 + (sigma.to(u).reshape(-1, 1).square() if isinstance(sigma, Tensor) else sigma**2)
        root = size**0.5
        return conditional(self.net, u / root, sigma) / root - u / size

    @torch.no_grad()
    def moments(self, z: Float[Tensor, "b d"], y: Int[Tensor, " b"]) -> dict[str, Tensor]:
        u = of_equal_length(z).double()
        return {"images": u.new_full((), len(u)), "sum": u.sum(0), "square": u.square().sum()}

    @torch.no_grad()
    def measure(self, sums: Mapping[str, Tensor]) -> None:
        centre = sums["sum"] / sums["images"]
        variance = (sums["square"] / sums["images"] - centre.square().sum()) / len(centre)
        self.centre.copy_(centre)
        self.spread.fill_(variance.clamp_min(1e-12).sqrt())


def of_equal_length(z: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
    """Every feature vector at the length √d, as if its entries had a mean square of 1; 0 stays 0."""
    return math.sqrt(z.shape[1]) * nn.functional.normalize(z)


def two_layers(feature_width: int, width: int) -> nn.Sequential:
    """The network of the authors' code, with one more input: the logarithm of the noise level."""
    return nn.Sequential(
        nn.Linear(feature_width + 1, width), nn.LayerNorm(width), nn.ELU(), nn.Linear(width, feature_width)
    )


def conditional(net: nn.Module, u: Float[Tensor, "b d"], sigma: float | Float[Tensor, " b"]) -> Float[Tensor, "b d"]:
    """net(u, log σ)/σ."""
    out: Tensor
    if isinstance(sigma, Tensor):
        level = sigma.to(u).reshape(-1, 1).expand(len(u), 1)
        out = net(torch.cat([u, level.log()], 1)) / level
        return out
    # A filled tensor, not a converted number: copies from the host are not allowed while a CUDA graph is recorded.
    out = net(torch.cat([u, u.new_full((len(u), 1), math.log(sigma))], 1)) / sigma
    return out


def frozen(score: ScoreNetwork) -> Score:
    """The same function with detached parameters: gradients reach its input and never the network."""
    state = {name: value.detach() for name, value in score.state_dict(keep_vars=True).items()}

    def call(z: Tensor, sigma: float | Tensor | None = None) -> Tensor:
        out: Tensor = functional_call(score, state, (z, sigma))
        return out

    return call
