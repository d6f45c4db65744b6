"""The score network s(z): an estimate of the gradient of the log density of features (FOOGD, section 3)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..types import Score

if TYPE_CHECKING:
    from jaxtyping import Float, Int

MOMENTUM = 0.1  # as in batch normalisation
LEAN = 10.0  # images
LOG_FLOOR = 0.25  # smallest variance of a logarithm that is scaled up
UNKNOWN = -1e30  # a log density that no class can have; -inf would be nan where no class is known


class ScoreNetwork(nn.Module, ABC):
    """What FOOGD asks of a score network: s(u, σ) in a space of its own, and the way from features z to that space.

    With `log_share` features first become sign(z)·log(1 + |z|/c), where c is this share of the mean size of the same
    image's features: features behind a ReLU are skewed, and what is unusual about an input often shows in channels that
    are almost silent. With `standardise` they are then shifted and scaled. The statistics are float buffers, which
    travel and are averaged like those of batch normalisation; a space that needs none has none.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, feature_width: int, standardise: bool = False, log_share: float = 0.0) -> None:
        super().__init__()
        self.standardise, self.log_share = standardise, log_share
        if standardise:
            self.register_buffer("running_mean", torch.zeros(feature_width))
            self.register_buffer("running_var", torch.ones(feature_width))

    @abstractmethod
    def forward(
        self, z: Float[Tensor, "b d"], sigma: float | Float[Tensor, " b"] | None = None
    ) -> Float[Tensor, "b d"]:
        """The score at points of the network's space, of the density that noise of level sigma has smoothed."""

    @abstractmethod
    def given(
        self, z: Float[Tensor, "b d"], sigma: float | Float[Tensor, " b"], y: Int[Tensor, " b"]
    ) -> Float[Tensor, "b d"]:
        """The score of the features of class y; of all features, where a network knows no classes."""

    @abstractmethod
    def steadied(
        self, z: Float[Tensor, "b d"], sigma: float, draws: int, classes: Float[Tensor, " c"] | None = None
    ) -> Float[Tensor, "b d"]:
        """The score at clean points, for detection: what was learnt is averaged over `draws` pairs of noise ±σv.

        Denoising score matching at level σ shows a network noisy points alone, and what it says at a clean point is a
        guess. `classes` (1: known) leaves other classes out, where a network knows classes.
        """

    @torch.no_grad()
    def observe(self, z: Float[Tensor, "b d"]) -> None:
        """Move the running statistics towards those of a batch; nothing happens in eval mode."""
        if self.training and self.standardise:
            z = self.compressed(z)
            self.running_mean.lerp_(z.mean(0), MOMENTUM)
            self.running_var.lerp_(z.var(0, correction=0), MOMENTUM)

    def compressed(self, z: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        """The features on their logarithmic scale, where there is one."""
        if self.log_share == 0:
            return z
        size = z.abs().mean(1, keepdim=True)
        return z.sign() * torch.log1p(z.abs() / (self.log_share * size + 1e-12))

    def scale(self, z: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        """The features in the network's space, by the running statistics, which are constants here."""
        return self._standardised(self.compressed(z))

    def _standardised(self, u: Tensor) -> Tensor:
        return (u - self.running_mean) / self._size() if self.standardise else u

    def _size(self) -> Tensor:
        # Features that are almost always 0 would blow up, so no variance counts as less than 1 % of the mean one. A
        # logarithm has a unit of its own, and differences that are small in it are not made large.
        floor = torch.clamp_min(0.01 * self.running_var.mean(), LOG_FLOOR if self.log_share > 0 else 1e-12)
        return torch.sqrt(torch.maximum(self.running_var, floor))


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
        self.net = two_layers(feature_width, width, conditioned)

    def forward(
        self, z: Float[Tensor, "b d"], sigma: float | Float[Tensor, " b"] | None = None
    ) -> Float[Tensor, "b d"]:
        return conditional(self.net, z, sigma, self.conditioned)

    def given(
        self, z: Float[Tensor, "b d"], sigma: float | Float[Tensor, " b"], y: Int[Tensor, " b"]
    ) -> Float[Tensor, "b d"]:
        out: Tensor = self(z, sigma)
        return out

    def steadied(
        self, z: Float[Tensor, "b d"], sigma: float, draws: int, classes: Float[Tensor, " c"] | None = None
    ) -> Float[Tensor, "b d"]:
        return averaged(lambda u: self(u, sigma), z, sigma, draws)


class MeasuredScore(ScoreNetwork, ABC):
    """The score of a density whose moments are measured, plus a network that learns what it lacks: s = pull + net.

    Where no training feature lies, a network alone says anything; the score of a Gaussian grows with the distance
    there. Its moments are not learnt: sums over all clients' images at the model of the server (`moments`) set them
    (`anchor`). The network starts at 0; for detection a share `trust` of it counts.
    """

    def __init__(
        self,
        feature_width: int,
        width: int = 1024,
        conditioned: bool = True,
        standardise: bool = False,
        log_share: float = 0.0,
        trust: float = 1.0,
    ) -> None:
        super().__init__(feature_width, standardise, log_share)
        self.conditioned, self.trust = conditioned, trust
        self.net = two_layers(feature_width, width, conditioned)
        for value in self.net[3].parameters():
            nn.init.zeros_(value)

    @abstractmethod
    def moments(self, z: Float[Tensor, "b d"], y: Int[Tensor, " b"]) -> dict[str, Tensor]:
        """What a batch of features adds to each of the sums that `anchor` gets."""

    @abstractmethod
    def anchor(self, sums: Mapping[str, Tensor]) -> None:
        """Set space and density by sums over all training features."""

    @abstractmethod
    def _pull(self, z: Tensor, sigma: float | Tensor, classes: Tensor | None = None) -> Tensor:
        """The score of the density alone."""

    def observe(self, z: Float[Tensor, "b d"]) -> None:
        """Nothing: the space belongs to the density, and is measured with it."""

    def forward(
        self, z: Float[Tensor, "b d"], sigma: float | Float[Tensor, " b"] | None = None
    ) -> Float[Tensor, "b d"]:
        return self._pull(z, 0.0 if sigma is None else sigma) + self._learnt(z, sigma)

    def steadied(
        self, z: Float[Tensor, "b d"], sigma: float, draws: int, classes: Float[Tensor, " c"] | None = None
    ) -> Float[Tensor, "b d"]:
        learnt = averaged(lambda u: self._learnt(u, sigma), z, sigma, draws)
        return self._pull(z, sigma, classes) + self.trust * learnt

    def _learnt(self, z: Tensor, sigma: float | Tensor | None) -> Tensor:
        return conditional(self.net, z, sigma, self.conditioned)


@final
class AnchoredScore(MeasuredScore):
    """The score of one Gaussian a class, N(μ_c, diag(v_c) + σ²I), all known classes with the same weight, plus a
    network that learns what they lack: s(u, σ) = Σ_c w_c(u) (μ_c − u)/(v_c + σ²) + net(u, σ).

    With `whiten` = w > 0 the space is multiplied by (I + wT)^(−1/2), T the covariance within classes: directions in
    which the images of a class differ much from each other are shortened, so that those in which they hardly differ
    are heard. The matrix is symmetric, and nearly the identity where T is small: features stay themselves.
    """

    anchor_mean: Tensor
    anchor_var: Tensor
    anchor_known: Tensor
    anchor_turn: Tensor

    def __init__(
        self,
        feature_width: int,
        classes: int,
        width: int = 1024,
        conditioned: bool = True,
        standardise: bool = False,
        log_share: float = 0.0,
        whiten: float = 0.0,
        trust: float = 1.0,
    ) -> None:
        super().__init__(feature_width, width, conditioned, standardise, log_share, trust)
        self.whiten = whiten
        self.register_buffer("anchor_mean", torch.zeros(classes, feature_width))
        self.register_buffer("anchor_var", torch.ones(classes, feature_width))
        self.register_buffer("anchor_known", torch.ones(classes))
        if whiten > 0:
            self.register_buffer("anchor_turn", torch.eye(feature_width))

    @torch.no_grad()
    def moments(self, z: Float[Tensor, "b d"], y: Int[Tensor, " b"]) -> dict[str, Tensor]:
        """Images, sums and squares of each class, and products of all pairs of features where the space is whitened."""
        u = self.compressed(z).double()
        of_class = nn.functional.one_hot(y, len(self.anchor_known)).double().T
        sums = {"images": of_class.sum(1), "sum": of_class @ u, "square": of_class @ u.square()}
        return sums | ({"outer": u.T @ u} if self.whiten > 0 else {})

    @torch.no_grad()
    def anchor(self, sums: Mapping[str, Tensor]) -> None:
        """Set space and Gaussians by sums over all training features. A class without images becomes unknown.

        The variance of a class with few images leans on that of all classes, as if `LEAN` of its images had that one.
        In a whitened space a class's variance is that of all classes there times its ratio to it before: exact would
        be products of pairs for every class, and a hundred classes would make them larger than the model.
        """
        images, total, square = sums["images"], sums["sum"], sums["square"]
        n, some = images.sum(), images[:, None].clamp_min(1.0)
        mean = total / some
        spread = (square / some - mean.square()).clamp_min(0.0)
        within = (images[:, None] * spread).sum(0) / n
        var = (images[:, None] * spread + LEAN * within) / (images[:, None] + LEAN)
        if self.standardise:
            centre = total.sum(0) / n
            self.running_mean.copy_(centre)
            self.running_var.copy_((square.sum(0) / n - centre.square()).clamp_min(0.0))
            mean, var = self._standardised(mean), var / self._size().square()
        if self.whiten > 0:
            size = self._size().double() if self.standardise else torch.ones_like(within)
            covariance = (sums["outer"] - total.T @ (total / some)) / n / torch.outer(size, size)
            spread_of, direction = torch.linalg.eigh(covariance)
            turn = direction * (1 + self.whiten * spread_of.clamp_min(0.0)).rsqrt() @ direction.T
            self.anchor_turn.copy_(turn)
            before, after = covariance.diagonal(), (turn @ covariance @ turn).diagonal()
            mean, var = mean.double() @ turn, var * torch.where(before > 1e-12, after / before, 1.0)
        self.anchor_mean.copy_(torch.where(images[:, None] > 0, mean, 0.0))
        # A feature that never changes within its class would pull without end.
        self.anchor_var.copy_(var.clamp_min(1e-4))
        self.anchor_known.copy_(images > 0)

    def scale(self, z: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        u = super().scale(z)
        return u @ self.anchor_turn if self.whiten > 0 else u

    def given(
        self, z: Float[Tensor, "b d"], sigma: float | Float[Tensor, " b"], y: Int[Tensor, " b"]
    ) -> Float[Tensor, "b d"]:
        square = sigma.to(z).square().reshape(-1, 1) if isinstance(sigma, Tensor) else sigma**2
        return (self.anchor_mean[y] - z) / (self.anchor_var[y] + square) + self._learnt(z, sigma)

    def _pull(self, z: Tensor, sigma: float | Tensor, classes: Tensor | None = None) -> Tensor:
        known = self.anchor_known if classes is None else self.anchor_known * classes
        missing = torch.where(known > 0.5, 0.0, UNKNOWN)  # a mean over clients is 1 but for rounding
        if isinstance(sigma, Tensor):
            var = self.anchor_var + sigma.to(z).square().reshape(-1, 1, 1)
            pull = (self.anchor_mean - z[:, None]) / var
            log_density = -0.5 * (pull * (self.anchor_mean - z[:, None]) + var.log()).sum(2)
            return (torch.softmax(log_density + missing, 1)[:, :, None] * pull).sum(1)
        # One noise level for all points: three matrix products, and no array of points × classes × features.
        var = self.anchor_var + sigma**2
        pulled, ease = self.anchor_mean / var, 1 / var
        constant = (self.anchor_mean * pulled + var.log()).sum(1)
        weight = torch.softmax(z @ pulled.T - 0.5 * (z.square() @ ease.T + constant) + missing, 1)
        return weight @ pulled - z * (weight @ ease)


def of_equal_length(z: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
    """Every feature vector at the length √d, as if its entries had a mean square of 1; 0 stays 0."""
    return math.sqrt(z.shape[1]) * nn.functional.normalize(z)


def two_layers(feature_width: int, width: int, conditioned: bool) -> nn.Sequential:
    """The network of the paper: Linear-LayerNorm-ELU-Linear, with one more input where it knows its noise level."""
    return nn.Sequential(
        nn.Linear(feature_width + conditioned, width), nn.LayerNorm(width), nn.ELU(), nn.Linear(width, feature_width)
    )


def conditional(
    net: nn.Module, z: Float[Tensor, "b d"], sigma: float | Float[Tensor, " b"] | None, conditioned: bool
) -> Float[Tensor, "b d"]:
    """net(z), or net(z, log σ)/σ where it knows its noise level."""
    out: Tensor
    if not conditioned:
        out = net(z)
        return out
    if sigma is None:
        raise ValueError("this score network is conditioned on the noise level: give it a sigma")
    if isinstance(sigma, Tensor):
        level = sigma.to(z).reshape(-1, 1).expand(len(z), 1)
        out = net(torch.cat([z, level.log()], 1)) / level
        return out
    # A filled tensor, not a converted number: copies from the host are not allowed while a CUDA graph is recorded.
    out = net(torch.cat([z, z.new_full((len(z), 1), math.log(sigma))], 1)) / sigma
    return out


def averaged(
    learnt: Callable[[Tensor], Tensor], z: Float[Tensor, "b d"], sigma: float, draws: int
) -> Float[Tensor, "b d"]:
    """The mean of `learnt` over `draws` pairs of noise ±σv, the same for all points and always; at z itself for 0."""
    if draws == 0:
        return learnt(z)
    noise = sigma * torch.randn(draws, z.shape[1], generator=torch.Generator().manual_seed(0)).to(z)
    total = torch.zeros_like(z)
    for v in noise:
        total = total + learnt(z + v) + learnt(z - v)
    return total / (2 * draws)


def frozen(score: ScoreNetwork) -> Score:
    """The same function with detached parameters: gradients reach its input and never the network."""
    state = {name: value.detach() for name, value in score.state_dict(keep_vars=True).items()}

    def call(z: Tensor, sigma: float | Tensor | None = None) -> Tensor:
        out: Tensor = functional_call(score, state, (z, sigma))
        return out

    return call
