"""A score network on one Gaussian a class: ours, not in the paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn

from .score import ScoreNetwork, conditional, two_layers

if TYPE_CHECKING:
    from jaxtyping import Float, Int

LEAN = 10.0  # images
LOG_FLOOR = 0.25  # smallest variance of a logarithm that is scaled up
UNKNOWN = -1e30  # a log density that no class can have; -inf would be nan where no class is known


@final
class AnchoredScore(ScoreNetwork):
    """The score of one Gaussian a class, N(μ_c, diag(v_c) + σ²I), all known classes with the same weight, plus a
    network that learns what they lack: s(u, σ) = Σ_c w_c(u) (μ_c − u)/(v_c + σ²) + net(u, σ).

    Where no training feature lies, a network alone says anything; the score of a Gaussian grows with the distance
    there. The network starts at 0; for detection a share `trust` of it counts.

    With `log_share` features first become sign(z)·log(1 + |z|/c), where c is this share of the mean size of the same
    image's features: features behind a ReLU are skewed, and what is unusual about an input often shows in channels that
    are almost silent. They are then shifted and scaled, each dimension by its own mean and deviation.

    With `whiten` = w > 0 the space is multiplied by (I + wT)^(−1/2), T the covariance within classes: directions in
    which the images of a class differ much from each other are shortened, so that those in which they hardly differ
    are heard. The matrix is symmetric, and nearly the identity where T is small: features stay themselves.
    """

    running_mean: Tensor
    running_var: Tensor
    anchor_mean: Tensor
    anchor_var: Tensor
    anchor_known: Tensor
    anchor_turn: Tensor

    def __init__(
        self,
        feature_width: int,
        classes: int,
        width: int = 1024,
        log_share: float = 0.0,
        whiten: float = 0.0,
        trust: float = 1.0,
    ) -> None:
        super().__init__()
        self.log_share, self.whiten, self.trust = log_share, whiten, trust
        self.register_buffer("running_mean", torch.zeros(feature_width))
        self.register_buffer("running_var", torch.ones(feature_width))
        self.net = two_layers(feature_width, width)
        for value in self.net[3].parameters():
            nn.init.zeros_(value)
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
    def measure(self, sums: Mapping[str, Tensor]) -> None:
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
        centre = total.sum(0) / n
        self.running_mean.copy_(centre)
        self.running_var.copy_((square.sum(0) / n - centre.square()).clamp_min(0.0))
        mean, var = self._standardised(mean), var / self._size().square()
        if self.whiten > 0:
            size = self._size().double()
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
        u = self._standardised(self.compressed(z))
        return u @ self.anchor_turn if self.whiten > 0 else u

    def compressed(self, z: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        """The features on their logarithmic scale, where there is one."""
        if self.log_share == 0:
            return z
        size = z.abs().mean(1, keepdim=True)
        return z.sign() * torch.log1p(z.abs() / (self.log_share * size + 1e-12))

    def _standardised(self, u: Tensor) -> Tensor:
        return (u - self.running_mean) / self._size()

    def _size(self) -> Tensor:
        # Features that are almost always 0 would blow up, so no variance counts as less than 1 % of the mean one. A
        # logarithm has a unit of its own, and differences that are small in it are not made large.
        floor = torch.clamp_min(0.01 * self.running_var.mean(), LOG_FLOOR if self.log_share > 0 else 1e-12)
        return torch.sqrt(torch.maximum(self.running_var, floor))

    def forward(self, u: Float[Tensor, "b d"], sigma: float | Float[Tensor, " b"]) -> Float[Tensor, "b d"]:
        return self._pull(u, sigma) + conditional(self.net, u, sigma)

    def given(
        self, z: Float[Tensor, "b d"], sigma: float | Float[Tensor, " b"], y: Int[Tensor, " b"]
    ) -> Float[Tensor, "b d"]:
        """The score of the features of class y."""
        square = sigma.to(z).square().reshape(-1, 1) if isinstance(sigma, Tensor) else sigma**2
        return (self.anchor_mean[y] - z) / (self.anchor_var[y] + square) + conditional(self.net, z, sigma)

    def steadied(
        self, z: Float[Tensor, "b d"], sigma: float, draws: int, classes: Float[Tensor, " c"] | None = None
    ) -> Float[Tensor, "b d"]:
        """The score at clean points, for detection: what was learnt is averaged over `draws` pairs of noise ±σv.

        Denoising score matching at level σ shows a network noisy points alone, and what it says at a clean point is a
        guess. `classes` (1: known) leaves other classes out.
        """
        learnt = averaged(lambda u: conditional(self.net, u, sigma), z, sigma, draws)
        return self._pull(z, sigma, classes) + self.trust * learnt

    def _pull(self, z: Tensor, sigma: float | Tensor, classes: Tensor | None = None) -> Tensor:
        """The score of the Gaussians alone."""
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
