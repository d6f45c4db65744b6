"""FOOGD (Liao et al., NeurIPS 2024) around any base method: what its equations and algorithms say, in their order.

A score network learns the gradient of the log density of the features (SM3D), a Stein term pulls augmented features to
that density (SAG), the server averages both nets, and the norm of the score tells OUT from IN. What the paper does not
print, and why it is as it is here: the table in docs/methods.md.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from ..core.fields import setting
from ..core.flat import ServerNets
from ..core.learning import set_training
from ..core.random import with_seed
from ..core.types import Batch, Context, Nets, Optimiser, Phase, Readout, Rng, Score, ServerState, Survey, both_views
from ..functional import dsm, ksd, langevin, mmd
from ..nets.score import ScoreNet, ScoreNetwork, frozen
from .base import feature_width, need_losses
from .wrapper import Wrapper


@dataclass(frozen=True)
class ScoreWrapper(Wrapper, ABC):
    """Algorithms 1 to 3 around a base method; which score network, and how it is asked, is left open."""

    lambda_m: float = setting(0.5, "MMD share of the score loss, Eq. 8", ge=0.0, le=1.0)
    lambda_a: float = setting(0.05, "weight of the Stein term, Eq. 12", ge=0.0)
    ce_on: str = setting("ori", "views in the base loss, Alg. 3", choices=("ori", "both"))
    train_base: bool = setting(True, "false: only the score network learns")
    score_width: int = setting(1024, "hidden width of the score network", ge=1)
    sigma: float = setting(0.5, "noise level of Eq. 6, 9 and 11, in spreads", gt=0.0)
    sigma_min: float = setting(0.1, "smallest noise level of Eq. 4, in spreads", gt=0.0)
    sigma_max: float = setting(3.0, "largest noise level of Eq. 4, in spreads", gt=0.0)
    sigma_levels: int = setting(10, "noise levels of Eq. 4; 1: `sigma` alone", ge=1)
    step: float = setting(0.5, "Langevin step, Eq. 6", gt=0.0)
    steps: int = setting(10, "Langevin steps T, Eq. 6", ge=1)
    score_lr: float = setting(0.001, "rate of Adam for the score network", gt=0.0)
    score_clip: float = setting(5.0, "largest gradient norm of the score; 0: none", ge=0.0)

    paper: ClassVar[str] = "Liao et al., NeurIPS 2024"
    keeps: ClassVar[str] = "what the base keeps"
    passes: ClassVar[str] = (
        "the backbone on two views; an eval pass for the score network; Langevin steps on features; "
        "one pass over the client's images before training"
    )

    @abstractmethod
    def score_network(self, width: int, num_classes: int) -> ScoreNetwork:
        """A fresh score network for features of this width."""

    @abstractmethod
    def generate(self, score: ScoreNetwork, start: Tensor, y: Tensor, rng: torch.Generator) -> Tensor:
        """Langevin samples, Eq. 6."""

    # The nets, and who learns when (Algorithm 1)

    def build(self, backbone: nn.Module, num_classes: int, rng: Rng) -> Nets:
        nets = self.base.build(backbone, num_classes, rng)
        nets["score"] = with_seed(rng("score"), lambda: self.score_network(feature_width(backbone), num_classes))
        return nets

    @property
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        return {**(self.base.groups if self.train_base else {}), "score": ("score",)}

    @property
    def frozen(self) -> frozenset[str]:
        if self.train_base:
            return self.base.frozen
        return self.base.frozen | {net for nets in self.base.groups.values() for net in nets}

    @property
    def body(self) -> str:
        """The base's group that trains the backbone; the Stein term joins its loss."""
        return next(group for group, nets in self.base.groups.items() if "backbone" in nets)

    @property
    def views(self) -> int:
        # The neutral element needs no second view: then the base method sees what it sees alone, bit for bit.
        if not self.train_base:
            return 1
        return 2 if self.lambda_a > 0 or self.ce_on == "both" else self.base.views

    @property
    def effort(self) -> float:
        return self.base.effort - self.base.views + self.views + 1.5  # the score network and its eval pass

    def optimiser(self, group: str, default: Optimiser) -> Optimiser:
        if group != "score":
            return self.base.optimiser(group, default)
        return Optimiser(lr=self.score_lr, kind="adam", clip=self.score_clip)

    def phases(self, round: int, rounds: int, epochs: int) -> Sequence[Phase]:
        if not self.train_base:
            return (Phase(("score",), epochs),)
        # The score network learns whenever the features that it describes do.
        return tuple(
            replace(phase, groups=(*phase.groups, "score")) if self.body in phase.groups else phase
            for phase in self.base.phases(round, rounds, epochs)
        )

    # Local training (Algorithms 2 and 3)

    def embed(self, nets: Nets, batch: Batch) -> Batch:
        if self.train_base:
            return self.base.embed(nets, batch)
        with torch.no_grad():
            return self.base.embed(nets, batch)

    def extend(self, nets: Nets, batch: Batch, ctx: Context) -> Batch:
        return self.base.extend(nets, batch, ctx) if self.train_base else batch

    def losses(self, nets: Nets, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        score = nets["score"]
        assert isinstance(score, ScoreNetwork)
        losses: dict[str, Tensor] = {}
        if self.train_base:
            own = [group for group in ctx.groups if group in self.base.groups]
            losses.update(need_losses(self.base, self.base.losses(nets, self.seen_by_base(batch), ctx), own))
            # Eq. 12. A term of weight 0 is left out, not added: 0·nan is nan.
            if self.lambda_a > 0 and self.body in losses:
                term = self.stein(score, score.scale(batch.features_hat))
                losses[self.body] = losses[self.body] + self.lambda_a * term
        if "score" in ctx.groups:
            losses["score"] = self.sm3d(score, score.scale(self.clean_features(nets, batch)), batch.y, ctx.rng)
        return losses

    def seen_by_base(self, batch: Batch) -> Batch:
        """The batch as the base's loss gets it; a base with two views of its own gets both as they are."""
        if self.base.views == 2:
            return batch
        return both_views(batch) if self.ce_on == "both" else batch._replace(x_hat=None, z_hat=None)

    def clean_features(self, nets: Nets, batch: Batch) -> Tensor:
        """The features that the score network learns: of an eval pass without gradients, as detection will see them.

        Where the base makes a strong view of its own, they are those of the images behind it.
        """
        if batch.x_plain is None and not nets["backbone"].training:
            return batch.features.detach()
        training = nets["backbone"].training
        nets["backbone"].eval()
        with torch.no_grad():
            x = batch.x if batch.x_plain is None else batch.x_plain
            z = self.base.embed(nets, Batch(x, batch.y)).features
        set_training(nets["backbone"], training)
        return z

    def stein(self, score: ScoreNetwork, u_hat: Tensor) -> Tensor:
        """sigma²·KSD of augmented features, Eq. 11: lengths count in units of the noise level. The score is fixed."""
        fixed = frozen(score)
        return self.sigma**2 * ksd(lambda u: fixed(u, self.sigma), u_hat)

    def sm3d(self, score: ScoreNetwork, u: Tensor, y: Tensor, rng: Rng) -> Tensor:
        """(1 - lambda_m)·DSM + lambda_m·MMD, Eq. 8, on features in the score network's space."""
        terms = []
        if self.lambda_m < 1:
            terms.append((1 - self.lambda_m) * self.denoising(score, u, rng))
        if self.lambda_m > 0:
            start = torch.randn(u.shape, generator=rng("langevin"), device=u.device, dtype=u.dtype)
            terms.append(self.lambda_m * mmd(u, self.generate(score, start, y, rng("langevin"))))  # Eq. 7
        return reduce(torch.add, terms)

    def denoising(self, score: ScoreNetwork, u: Tensor, rng: Rng) -> Tensor:
        """Eq. 4 with a noise level for each feature vector, drawn from the ladder; level sigma weighs sigma²."""
        sigma: Tensor | float = self.sigma
        if self.sigma_levels > 1:
            ends = math.log10(self.sigma_min), math.log10(self.sigma_max)
            ladder = torch.logspace(*ends, self.sigma_levels, device=u.device, dtype=u.dtype)
            sigma = ladder[torch.randint(self.sigma_levels, (len(u),), generator=rng("dsm"), device=u.device)]
        return dsm(lambda v: score(v, sigma), u, sigma=sigma, rng=rng("dsm"))

    # Detection (Eq. 9)

    @abstractmethod
    def score_of(self, nets: Nets) -> Score:
        """z ↦ s(z) at the level for detection, or at another one."""

    def readout(self, nets: Nets) -> Readout:
        return self.with_scores(self.base.readout(nets), nets)

    def generic_readout(self, nets: Nets) -> Readout:
        return self.with_scores(self.base.generic_readout(nets), nets)

    def with_scores(self, readout: Readout, nets: Nets) -> Readout:
        """What the base shows to detectors, and the score."""
        score = nets["score"]
        assert isinstance(score, ScoreNetwork)
        return replace(readout, score=self.score_of(nets), score_space=score.scale)

    # The space of the score network: sums over all clients' features, measured before each round and each test

    @property
    def surveys(self) -> bool:
        return True

    @property
    def settles(self) -> bool:
        return True

    @property
    def _base_surveys(self) -> bool:
        return self.base.surveys and self.train_base

    @property
    def surveys_samples(self) -> bool:
        return self.base.surveys_samples if self._base_surveys else True

    def survey(self, nets: Nets, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        score = nets["score"]
        assert isinstance(score, ScoreNetwork)
        sums = self.base.survey(nets, batch, ctx) if self._base_surveys else {}
        return sums | {f"score.{name}": value for name, value in score.moments(batch.features, batch.y).items()}

    def begin(self, server: ServerState, surveys: Sequence[Survey]) -> ServerState:
        return self.base.begin(server, surveys if self._base_surveys else ())

    def settle(self, server: ServerState, surveys: Sequence[Survey], nets: ServerNets) -> ServerState:
        if self.base.settles:
            server = self.base.settle(server, surveys, nets)
        found = nets.load(server)
        score = found["score"]
        assert isinstance(score, ScoreNetwork)
        # In the order of clients: a fold, like the mean of the rows.
        names = [name for name in surveys[0].sums if name.startswith("score.")]
        sums = {name: reduce(torch.add, [answer.sums[name] for answer in surveys]) for name in names}
        score.measure({name.removeprefix("score."): value for name, value in sums.items()})
        return nets.store(server, found)

    def before_test(self) -> Sequence[Phase]:
        return self.base.before_test() if self.train_base else ()


@final
@dataclass(frozen=True)
class FOOGD(ScoreWrapper):
    """Score matching with MMD for detection (SM3D) and a Stein term for alignment (SAG), on top of a base method."""

    travels: ClassVar[str] = "what the base sends; the score network both ways; sums over features up (d + 2 numbers)"

    def score_network(self, width: int, num_classes: int) -> ScoreNetwork:
        return ScoreNet(width, self.score_width)

    def generate(self, score: ScoreNetwork, start: Tensor, y: Tensor, rng: torch.Generator) -> Tensor:
        """Eq. 6 from N(0, I); no label is read."""
        return langevin(lambda u: score(u, self.sigma), start, step=self.step, steps=self.steps, rng=rng)

    def score_of(self, nets: Nets) -> Score:
        score = nets["score"]
        assert isinstance(score, ScoreNetwork)

        def at(z: Tensor, sigma: float | None = None) -> Tensor:
            out: Tensor = score(score.scale(z), self.sigma if sigma is None else sigma)
            return out

        return at
