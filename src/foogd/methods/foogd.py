"""FOOGD (Liao et al., NeurIPS 2024) around any base method: a score network that detects and aligns views.

Three profiles name the settings that decide a result. `fixed` is the default and what the equations mean; `paper`
takes the text literally; `released` repeats the authors' code, its errors included. What each changes, and why, stands
beside the values in `PROFILES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from ..data.augment import fourier_mix_released
from ..engine.arena import ServerNets
from ..engine.rng import with_seed
from ..functional import dsm, dsm_noise_target, ksd, ksd_released, langevin, median_bandwidth, mmd
from ..nets.learning import set_training
from ..nets.score import AnchoredScore, MeasuredScore, ScoreNet, ScoreNetwork, frozen
from ..types import (
    Batch,
    ClassScore,
    Context,
    Nets,
    Optimiser,
    Output,
    Phase,
    Readout,
    Rng,
    Score,
    ServerState,
    Survey,
    both_views,
)
from .base import Method, feature_width, need_losses
from .fedavg import FedAvg


@final
@dataclass(frozen=True)
class FOOGD(Method):
    """Score matching with MMD for detection (SM3D) and a Stein term for alignment (SAG), on top of a base method."""

    base: Method = field(default_factory=FedAvg)
    lambda_m: float = field(default=0.5, metadata={"ge": 0.0, "le": 1.0, "help": "MMD share of the score loss, Eq. 8"})
    lambda_a: float = field(default=0.01, metadata={"ge": 0.0, "help": "weight of sigma^ksd_power KSD, Eq. 12"})
    ce_on: str = field(default="both", metadata={"choices": ("ori", "both"), "help": "which views the base loss sees"})
    train_base: bool = field(default=True, metadata={"help": "false: only the score network learns"})

    score_net: str = field(
        default="anchored",
        metadata={
            "choices": ("anchored", "mlp"),
            "help": "a network, and what it adds to: one Gaussian a class, or nothing",
        },
    )
    score_width: int = field(default=1024, metadata={"ge": 1, "help": "hidden width of the score network"})
    standardise: bool = field(default=True, metadata={"help": "score in the space of standardised features"})
    log_share: float = field(
        default=0.1, metadata={"ge": 0.0, "help": "c/size where features enter as log(1 + |z|/c); 0: as they are"}
    )
    whiten: float = field(
        default=0.3, metadata={"ge": 0.0, "help": "shortens directions of variance v by 1/sqrt(1 + whiten v); 0: none"}
    )
    conditioned: bool = field(default=True, metadata={"help": "the score network knows its noise level"})
    score_features: str = field(
        default="eval", metadata={"choices": ("eval", "train"), "help": "the pass that feeds the score network"}
    )
    joint_views: bool = field(default=True, metadata={"help": "both views in one pass, sharing BN statistics"})

    sigma: float = field(default=0.4, metadata={"gt": 0.0, "help": "noise level of KSD, Langevin and detection"})
    draws: int = field(default=8, metadata={"ge": 0, "help": "pairs of noise that detection averages over; 0: none"})
    trust: float = field(
        default=0.5,
        metadata={"ge": 0.0, "le": 1.0, "help": "share of the learnt part that detection adds to Gaussians"},
    )
    sigma_min: float = field(default=0.1, metadata={"gt": 0.0, "help": "smallest noise level of the ladder"})
    sigma_max: float = field(default=1.0, metadata={"gt": 0.0, "help": "largest noise level of the ladder"})
    sigma_levels: int = field(default=10, metadata={"ge": 1, "help": "levels of the ladder; 1: `sigma` alone"})
    dsm_target: str = field(
        default="score", metadata={"choices": ("score", "noise"), "help": "what the network regresses on; noise: -v"}
    )
    anneal_power: float = field(default=2.0, metadata={"ge": 0.0, "help": "weight sigma^p of a noise level in DSM"})

    step: float = field(default=0.1, metadata={"gt": 0.0, "help": "Langevin step, relative to the feature variance"})
    steps: int = field(default=10, metadata={"ge": 1, "help": "Langevin steps"})
    mmd_kernels: int = field(default=2, metadata={"choices": (1, 2), "help": "1: median; 2: {1/2, 1} x mean"})
    ksd_pairs: str = field(
        default="aug", metadata={"choices": ("aug", "cross"), "help": "Stein term within z_hat, or as released"}
    )
    ksd_power: float = field(default=2.0, metadata={"ge": 0.0, "help": "weight sigma^p of the Stein term"})
    ksd_log: bool = field(default=True, metadata={"help": "log(1 + Stein term): no blow-up far from training features"})
    view_clip: int = field(default=255, metadata={"choices": (225, 255), "help": "225: clip and truncate as released"})

    score_optimiser: str = field(default="adam", metadata={"choices": ("adam", "sgd"), "help": "of the score network"})
    score_lr: float = field(default=0.001, metadata={"gt": 0.0, "help": "learning rate of the score network"})
    score_momentum: float = field(default=0.0, metadata={"ge": 0.0, "lt": 1.0, "help": "momentum of SGD for the score"})
    score_clip: float = field(default=5.0, metadata={"ge": 0.0, "help": "largest gradient norm of the score; 0: none"})

    paper: ClassVar[str] = "Liao et al., NeurIPS 2024"
    travels: ClassVar[str] = (
        "what the base sends; the score network both ways; sums over each class's features and over pairs of them up"
    )
    keeps: ClassVar[str] = "what the base keeps"
    passes: ClassVar[str] = (
        "the backbone on two views; an eval pass for the score network; Langevin steps on features; "
        "one pass over the client's images before training"
    )

    @property
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        return {**(self.base.groups if self.train_base else {}), "score": ("score",)}

    @property
    def frozen(self) -> frozenset[str]:
        if self.train_base:
            return self.base.frozen
        return self.base.frozen | {net for nets in self.base.groups.values() for net in nets}

    @property
    def views(self) -> int:
        # The neutral element needs no second view: then the base method sees what it sees alone, bit for bit.
        if not self.train_base:
            return 1
        return 2 if self.lambda_a > 0 or self.ce_on == "both" else self.base.views

    def build(self, backbone: nn.Module, num_classes: int, rng: Rng) -> Nets:
        nets = self.base.build(backbone, num_classes, rng)
        nets["score"] = with_seed(rng("score"), lambda: self.score_network(feature_width(backbone), num_classes))
        return nets

    def score_network(self, width: int, num_classes: int) -> ScoreNetwork:
        """A fresh score network for features of this width."""
        how = self.conditioned, self.standardise, self.log_share
        if self.score_net == "anchored":
            return AnchoredScore(width, num_classes, self.score_width, *how, self.whiten, self.trust)
        return ScoreNet(width, self.score_width, *how)

    @property
    def measured(self) -> bool:
        """Whether moments of features are measured before each round and each test."""
        return self.score_net != "mlp"

    def optimiser(self, group: str, default: Optimiser) -> Optimiser:
        if group != "score":
            return self.base.optimiser(group, default)
        return Optimiser(
            lr=self.score_lr, momentum=self.score_momentum, kind=self.score_optimiser, clip=self.score_clip
        )

    def phases(self, round: int, rounds: int, epochs: int) -> Sequence[Phase]:
        if not self.train_base:
            return (Phase(("score",), epochs),)
        # The score network learns whenever the features that it describes do.
        return tuple(
            replace(phase, groups=(*phase.groups, "score")) if self.body in phase.groups else phase
            for phase in self.base.phases(round, rounds, epochs)
        )

    @property
    def body(self) -> str:
        """The base's group that trains the backbone; the Stein term joins its loss."""
        return next(group for group, nets in self.base.groups.items() if "backbone" in nets)

    def view(self, x: Tensor, partner: Tensor, rng: Rng) -> Tensor:
        if self.view_clip == 255:
            return self.base.view(x, partner, rng)
        lam = torch.rand(len(x), generator=rng("view"), device=x.device, dtype=x.dtype)
        return fourier_mix_released(x, partner, lam)

    def embed(self, nets: Nets, batch: Batch) -> Batch:
        if not self.train_base:
            with torch.no_grad():
                return self.base.embed(nets, batch)
        if batch.x_hat is None or self.joint_views:
            return self.base.embed(nets, batch)
        first = self.base.embed(nets, batch._replace(x_hat=None))
        z_hat = self.base.embed(nets, Batch(batch.x_hat, batch.y)).features
        return first._replace(x_hat=batch.x_hat, z_hat=z_hat)

    def losses(self, nets: Nets, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        score = nets["score"]
        assert isinstance(score, ScoreNetwork)
        losses: dict[str, Tensor] = {}
        if self.train_base:
            own = [group for group in ctx.groups if group in self.base.groups]
            losses.update(need_losses(self.base, self.base.losses(nets, self.seen_by_base(batch), ctx), own))
            if self.lambda_a > 0 and self.body in losses:  # a term of weight 0 is left out, not added: 0·nan is nan
                losses[self.body] = losses[self.body] + self.lambda_a * self.stein(score, batch)
        if "score" in ctx.groups:
            z = self.clean_features(nets, batch)
            score.observe(z)
            losses["score"] = self.sm3d(score, score.scale(z), batch.y, ctx)
        return losses

    def seen_by_base(self, batch: Batch) -> Batch:
        """The batch as the base's loss gets it; a base with two views of its own gets both as they are."""
        if self.base.views == 2:
            return batch
        return both_views(batch) if self.ce_on == "both" else batch._replace(x_hat=None, z_hat=None)

    def stein(self, score: ScoreNetwork, batch: Batch) -> Tensor:
        """sigma^p·KSD of the augmented features under the score, Eq. 11; it never reaches the score network.

        KSD has the unit 1/length². With p = 2, the weight that DSM has too, lengths count in units of sigma, and one
        lambda_a serves any noise level and scale of features. With `ksd_log` it is log(1 + that), which has the same
        minimum: its gradient fades where features are far from those that the score knows, as they are in round 1.
        """
        fixed, u_hat = frozen(score), score.scale(batch.features_hat)
        weight = math.pow(self.sigma, self.ksd_power)
        if self.ksd_pairs == "aug":
            term = weight * ksd(lambda u: fixed(u, self.sigma), u_hat)
        else:
            u = score.scale(batch.features)
            term = weight * ksd_released(fixed(u, self.sigma), fixed(u_hat, self.sigma), u, u_hat)
        return torch.log1p(term) if self.ksd_log else term

    def sm3d(self, score: ScoreNetwork, u: Tensor, y: Tensor, ctx: Context) -> Tensor:
        """(1 - lambda_m)·DSM + lambda_m·MMD, Eq. 8, on features in the score network's space.

        Where the score network knows classes, samples are of those of the batch: samples of classes that a client does
        not have would be pulled towards those that it has.
        """
        terms = []
        if self.lambda_m < 1:
            terms.append((1 - self.lambda_m) * self.denoising(score, u, ctx.rng))
        if self.lambda_m > 0:
            start = torch.randn(u.shape, generator=ctx.rng("langevin"), device=u.device, dtype=u.dtype)
            stream = ctx.rng("langevin")
            generated = langevin(
                lambda v: score.given(v, self.sigma, y), start, step=self.step, steps=self.steps, rng=stream
            )
            both = torch.cat([u, generated])
            bandwidths = None if self.mmd_kernels == 2 else (median_bandwidth(both),)
            terms.append(self.lambda_m * mmd(u, generated, bandwidths=bandwidths))
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total

    def denoising(self, score: ScoreNetwork, u: Tensor, rng: Rng) -> Tensor:
        """The DSM loss, Eq. 4, over the ladder of noise levels: ½ sigma^p ‖s(u + sigma v, sigma) + v/sigma‖²."""
        sigma: Tensor | float = self.sigma
        if self.sigma_levels > 1:
            ladder = torch.logspace(
                math.log10(self.sigma_min),
                math.log10(self.sigma_max),
                self.sigma_levels,
                device=u.device,
                dtype=u.dtype,
            )
            level = torch.randint(self.sigma_levels, (len(u),), generator=rng("dsm"), device=u.device)
            sigma = ladder[level]
        if self.dsm_target == "noise":
            return dsm_noise_target(
                lambda v: score(v, sigma), u, sigma=sigma, rng=rng("dsm"), power=self.anneal_power
            )
        return dsm(lambda v: score(v, sigma), u, sigma=sigma, rng=rng("dsm"), power=self.anneal_power)

    def clean_features(self, nets: Nets, batch: Batch) -> Tensor:
        """The features that the score network learns; by default of an eval pass, as detection will see them.

        Where the base makes a strong view of its own, they are those of the images behind it.
        """
        plain = batch.x_plain is not None
        if not plain and (self.score_features == "train" or not nets["backbone"].training):
            return batch.features.detach()
        training = nets["backbone"].training
        nets["backbone"].eval()
        with torch.no_grad():
            x = batch.x if batch.x_plain is None else batch.x_plain
            z = self.base.embed(nets, Batch(x, batch.y)).features
        set_training(nets["backbone"], training)
        return z

    def score_of(self, nets: Nets) -> Score:
        """z ↦ s(z) at the level for detection, or at another one."""
        score = nets["score"]
        assert isinstance(score, ScoreNetwork)

        def at(z: Tensor, sigma: float | None = None) -> Tensor:
            return score.steadied(score.scale(z), self.sigma if sigma is None else sigma, self.draws)

        return at

    def class_score_of(self, nets: Nets) -> ClassScore | None:
        """The same for some classes alone, where the score network knows classes."""
        score = nets["score"]
        if not isinstance(score, AnchoredScore):
            return None

        def at(z: Tensor, classes: Tensor, sigma: float | None = None) -> Tensor:
            return score.steadied(score.scale(z), self.sigma if sigma is None else sigma, self.draws, classes.to(z))

        return at

    def readout(self, nets: Nets) -> Readout:
        return self._with_scores(self.base.readout(nets), nets)

    def generic_readout(self, nets: Nets) -> Readout:
        return self._with_scores(self.base.generic_readout(nets), nets)

    def _with_scores(self, readout: Readout, nets: Nets) -> Readout:
        score = nets["score"]
        assert isinstance(score, ScoreNetwork)
        return replace(
            readout, score=self.score_of(nets), class_score=self.class_score_of(nets), score_space=score.scale
        )

    # Moments of features, where the score network adds to a density; they are asked for beside what the base asks.
    @property
    def surveys(self) -> bool:
        return self.measured or self._base_surveys

    @property
    def _base_surveys(self) -> bool:
        return self.base.surveys and self.train_base

    @property
    def surveys_samples(self) -> bool:
        return self.base.surveys_samples if self._base_surveys else True

    @property
    def settles(self) -> bool:
        return self.measured or self.base.settles

    def survey(self, nets: Nets, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        sums = self.base.survey(nets, batch, ctx) if self._base_surveys else {}
        score = nets["score"]
        if isinstance(score, MeasuredScore):
            sums |= {f"score.{name}": value for name, value in score.moments(batch.features, batch.y).items()}
        return sums

    def begin(self, server: ServerState, surveys: Sequence[Survey]) -> ServerState:
        return self.base.begin(server, surveys if self._base_surveys else ())

    def settle(self, server: ServerState, surveys: Sequence[Survey], nets: ServerNets) -> ServerState:
        if self.base.settles:
            server = self.base.settle(server, surveys, nets)
        if not self.measured:
            return server
        found = nets.load(server)
        score = found["score"]
        assert isinstance(score, MeasuredScore)
        # In the order of clients: a fold, like the mean of the rows.
        names = [name.removeprefix("score.") for name in surveys[0].sums if name.startswith("score.")]
        score.anchor({name: reduce(torch.add, [answer.sums[f"score.{name}"] for answer in surveys]) for name in names})
        return nets.store(server, found)

    # The rest is the base method's.

    @property
    def adapts(self) -> bool:
        return self.base.adapts

    @property
    def effort(self) -> float:
        return self.base.effort - self.base.views + self.views + 1.5  # the score network and its eval pass

    @property
    def reads_round(self) -> bool:
        return self.base.reads_round

    @property
    def test_batch(self) -> int | None:
        return self.base.test_batch

    @property
    def disclosed(self) -> frozenset[str]:
        return self.base.disclosed

    @property
    def pools_data(self) -> bool:
        return self.base.pools_data

    def personal(self, name: str) -> bool:
        return self.base.personal(name)

    def private_names(self, nets: Nets) -> frozenset[str]:
        return self.base.private_names(nets)

    def weight(self, default: float) -> float:
        return self.base.weight(default)

    def pretrain(self, nets: Nets, epoch: Callable[[], Iterable[Batch]], ctx: Context) -> None:
        self.base.pretrain(nets, epoch, ctx)

    @property
    def neutral_start(self) -> bool:
        return self.base.neutral_start

    @property
    def own_first_view(self) -> bool:
        return self.base.own_first_view

    def first_view(self, x: Tensor, rng: Rng) -> Tensor:
        return self.base.first_view(x, rng)

    def extend(self, nets: Nets, batch: Batch, ctx: Context) -> Batch:
        return self.base.extend(nets, batch, ctx) if self.train_base else batch

    def before_test(self) -> Sequence[Phase]:
        return self.base.before_test() if self.train_base else ()

    def init_server(self, nets: Nets, rng: Rng) -> dict[str, Tensor]:
        return self.base.init_server(nets, rng)

    def finish(self, nets: Nets, batches: Iterable[Batch], ctx: Context) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return self.base.finish(nets, batches, ctx)

    def aggregate(
        self, server: ServerState, mean: ServerState, extras: Sequence[Survey], nets: ServerNets, rng: Rng
    ) -> ServerState:
        return self.base.aggregate(server, mean, extras, nets, rng)

    def logits(self, nets: Nets, z: Tensor) -> Tensor:
        return self.base.logits(nets, z)

    def generic_logits(self, nets: Nets, z: Tensor) -> Tensor:
        return self.base.generic_logits(nets, z)

    def predictor(self, nets: Nets, ctx: Context) -> Callable[[Tensor], Output]:
        return self.base.predictor(nets, ctx)


PROFILES: Mapping[str, Mapping[str, Any]] = {
    # What the equations mean: the target is the score, both samples of the Stein term are augmented, the Langevin
    # step fits the scale of the features, detection and training see the same (eval) features. Ours are: the score is
    # anchored at one Gaussian a class, on logarithmic features whose loudest directions are shortened, and detection
    # adds half of what was learnt, averaged over noise (docs/research.md shows why); the Stein term is weighted by
    # sigma² as DSM is, enters as a logarithm, and weighs a fifth of what is printed; Adam makes the score network's
    # learning independent of the scale of its loss.
    "fixed": {},
    # The text as printed: cross-entropy on originals (Alg. 3), one sigma, one Gaussian kernel, raw features, DSM
    # without a weight (Eq. 4). Sigma and the Langevin step are not printed. Sigma is 1 because the text can be run with
    # it: at 0.1 the raw Stein term outweighs the cross-entropy (docs/research.md, section 16).
    "paper": {
        "lambda_a": 0.05,
        "ksd_log": False,
        "ce_on": "ori",
        "score_net": "mlp",
        "standardise": False,
        "log_share": 0.0,
        "whiten": 0.0,
        "sigma": 1.0,
        "draws": 0,
        "conditioned": False,  # with one sigma, s(z, sigma) is a function of z
        "sigma_levels": 1,
        "anneal_power": 0.0,
        "mmd_kernels": 1,
        "ksd_power": 0.0,
        "score_optimiser": "sgd",
        "score_lr": 0.01,
        "score_clip": 0.0,
    },
    # The authors' code: target -v instead of -v/sigma, 100 ascending levels for one unconditioned network, cross
    # pairs with half of the gradient, train-mode features, Langevin time 0.1 on raw features, clip at 225, and
    # defaults that switch MMD and the Stein term off. lr, momentum, weighting by batches, partners from all clients
    # and the ImageNet constants in training belong to the run, not to the method, and are set with it.
    "released": {
        "lambda_m": 0.0,
        "lambda_a": 0.0,
        "ce_on": "both",
        "score_net": "mlp",
        "standardise": False,
        "log_share": 0.0,
        "whiten": 0.0,
        "sigma": 0.1,
        "sigma_min": 0.01,
        "draws": 0,
        "conditioned": False,
        "score_features": "train",
        "sigma_levels": 100,
        "dsm_target": "noise",
        "step": 0.01,
        "ksd_pairs": "cross",
        "ksd_power": 0.0,
        "ksd_log": False,
        "view_clip": 225,
        "score_optimiser": "sgd",
        "score_lr": 0.01,
        "score_clip": 0.0,
        "lr": 0.01,
        "momentum": 0.0,
        "weight_decay": 0.0,
        "weighting": "batches",
        "partners": "all",
        "train_constants": "imagenet",
    },
}
"""Flat settings by profile: those of the method, and for `released` also those of the run."""


def profile(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A profile's settings of the method and of the run: `FOOGD(base, **of_method)`, `Config(**of_run)`."""
    values = PROFILES[name]
    own = {key: value for key, value in values.items() if key in FOOGD.__dataclass_fields__}
    return own, {key: value for key, value in values.items() if key not in own}


def nearest_profile(values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The profile with which most of these settings agree, and its value of each one that differs from it."""
    own = {item.name: item.default for item in fields(FOOGD) if item.name != "base"}
    rest = {
        name: {key: known[key] for key, value in values.items() if key in known and known[key] != value}
        for name, known in ((name, own | dict(PROFILES[name])) for name in PROFILES)
    }
    return min(rest.items(), key=lambda pair: len(pair[1]))  # `fixed` comes first and wins a tie
