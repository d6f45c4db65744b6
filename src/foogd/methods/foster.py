"""FOSTER (Yu et al., ICLR 2023): classes that only other clients have, made up in feature space, as outliers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..core.errors import InputError
from ..core.fields import setting
from ..core.flat import ServerNets
from ..core.random import with_seed
from ..core.types import Batch, Context, Nets, Output, Readout, Rng, ServerState, Survey, both_views
from ..functional import outlier_exposure
from ..nets.generator import FeatureGenerator
from .base import Method, feature_width, linear_head, linear_readout

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

LR_DECAY = 0.98  # of the generator's learning rate, a round
WEIGHT_DECAY = 1e-2
RIDGE = 1e-4  # added to the tied covariance
ABSENT = -1e4  # the logit of a class that the client does not have: probability 0, and finite for every detector


@final
@dataclass(frozen=True)
class FOSTER(Method):
    """Private heads, and outlier exposure on generated features of the classes that a client lacks.

    Client: CE(h_k(f(x)), y) + beta·OE(h_k(z̃)), z̃ = G(ε, ỹ) with ỹ uniform over the classes that it lacks, without a
    gradient for G. Where it lacks none, and as long as nobody has trained G (in the first round), the loss is CE alone.

    Server: f is averaged. The heads are uploaded too, and show the server which classes a client has. On the mean h̄ of
    this round's heads the server trains the generator, min CE(h̄(G(ε, y)), y) with ε ~ N(0, I) and y uniform over all
    classes, for as many steps as the clients made on average (each uploads its count), with a new Adam each round. G
    and h̄ are sent down; h̄ is also the head for someone who has no private one.

    z̃ is one of the `select` least likely of many candidates of its class. The paper's client keeps a queue of generated
    features behind their mean and covariance; here they are generated anew at each step: the generator is known.
    """

    views: int = setting(1, "2: cross-entropy on the augmented view too", choices=(1, 2))
    beta: float = setting(0.1, "weight of outlier exposure; 0: private heads only", ge=0.0)
    draws: int = setting(0, "generated features a step; 0: as many as images", ge=0)
    external_if_count: int = setting(0, "a client lacks the classes of which it has at most so many images", ge=0)
    select: int = setting(1, "least likely candidates kept a class; 0: no selection", ge=0)
    candidates: int = setting(1000, "candidates a class that `select` picks from", ge=2)
    restrict_to_local_classes: bool = setting(False, "a client predicts only the classes that it has")
    generator_lr: float = setting(1e-4, "learning rate of the generator", gt=0.0)
    generator_batch: int = setting(1000, "features a step of the generator", ge=2)

    paper: ClassVar[str] = "Yu et al., ICLR 2023"
    travels: ClassVar[str] = "the model, both ways (private heads up, their mean down), and a feature generator down"
    keeps: ClassVar[str] = "its head"
    passes: ClassVar[str] = "the generator and the head on generated features; the server trains the generator"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.select > self.candidates:
            raise InputError(f"select = {self.select} is not allowed: there are {self.candidates} candidates a class")

    @property
    def frozen(self) -> frozenset[str]:
        return frozenset({"generic_head", "generator"})

    @property
    def neutral_start(self) -> bool:
        return False  # a head that never learnt

    @property
    def disclosed(self) -> frozenset[str]:
        return frozenset({"head.weight", "head.bias"})

    @property
    def adapts(self) -> bool:
        return self.restrict_to_local_classes

    def build(self, backbone: nn.Module, num_classes: int, rng: Rng) -> Nets:
        nets = super().build(backbone, num_classes, rng)
        nets["generic_head"] = linear_head(backbone, num_classes, rng("head"))  # the mean of heads that start alike
        nets["generator"] = with_seed(rng("generator"), lambda: FeatureGenerator(feature_width(backbone), num_classes))
        return nets

    def init_server(self, nets: Nets, rng: Rng) -> dict[str, Tensor]:
        if self.beta == 0:
            return {}
        return {"generator_steps": torch.zeros((), device=next(nets["generator"].parameters()).device)}

    def personal(self, name: str) -> bool:
        return name.startswith("head.")

    def external(self, class_counts: Float[Tensor, " classes"]) -> Bool[Tensor, " classes"]:
        """The classes that a client lacks."""
        return class_counts <= self.external_if_count

    def losses(self, nets: Nets, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        batch = both_views(batch)
        loss = cross_entropy(nets["head"](batch.features), batch.y)
        if self.beta > 0:
            external = self.external(ctx.class_counts)
            z = self.outliers(nets, external, self.draws or len(batch.y), ctx.rng("external"))
            exposure = outlier_exposure(nets["head"](z))
            # A number from the server, not the round: a step that is recorded once serves all rounds.
            used = external.any() & (ctx.server["generator_steps"] > 0)
            loss = loss + self.beta * torch.where(used, exposure, 0.0)
        return {"model": loss}

    @torch.no_grad()
    def outliers(
        self, nets: Nets, external: Bool[Tensor, " classes"], count: int, stream: torch.Generator
    ) -> Float[Tensor, "count d"]:
        """Generated features of classes drawn uniformly from the external ones."""
        generator = nets["generator"].eval()
        assert isinstance(generator, FeatureGenerator)
        y = uniform_classes(external, count, stream)
        if self.select == 0:
            features: Tensor = generator(_latents(generator, count, stream, external.device), y)
            return features
        kept = least_likely(generator, external, self.candidates, self.select, stream)
        return kept[y, torch.randint(self.select, (count,), generator=stream, device=y.device)]

    def finish(self, nets: Nets, batches: Iterable[Batch], ctx: Context) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        upload = {f"head.{name}": value.clone() for name, value in nets["head"].state_dict().items()}
        steps = torch.tensor(ctx.steps.get("model", 0), dtype=torch.int32, device=ctx.class_counts.device)
        return {**upload, "steps": steps}, dict(ctx.memory)

    def aggregate(
        self, server: ServerState, mean: ServerState, extras: Sequence[Survey], nets: ServerNets, rng: Rng
    ) -> ServerState:
        iterations = round(sum(int(extra.sums["steps"]) for extra in extras) / len(extras))
        if iterations == 0:  # no head has learnt anything
            return mean
        trained = nets.load(mean)
        head, generator = trained["generic_head"], trained["generator"]
        assert isinstance(generator, FeatureGenerator)
        head.load_state_dict(mean_head(extras))
        if self.beta > 0:
            lr = self.generator_lr * LR_DECAY**server.round
            train_generator(generator, head, iterations, batch=self.generator_batch, lr=lr, stream=rng("generator"))
            steps = mean.extra["generator_steps"] + iterations
            mean = replace(mean, extra={**mean.extra, "generator_steps": steps})
        return nets.store(mean, trained)

    def generic_logits(self, nets: Nets, z: Tensor) -> Tensor:
        out: Tensor = nets["generic_head"](z)
        return out

    def generic_readout(self, nets: Nets) -> Readout:
        return linear_readout(lambda z: self.generic_logits(nets, z), nets["generic_head"])

    def predictor(self, nets: Nets, ctx: Context) -> Callable[[Tensor], Output]:
        if not self.restrict_to_local_classes or ctx.unknown:
            return super().predictor(nets, ctx)
        absent = ctx.class_counts <= 0  # not `external`: a class with a single image can be right
        absent = absent & ~absent.all()  # someone without training data may predict every class

        def predict(x: Tensor) -> Output:
            z = nets["backbone"](x)
            return Output(z, self.logits(nets, z).masked_fill(absent, ABSENT))

        return predict


def uniform_classes(allowed: Bool[Tensor, " classes"], count: int, stream: torch.Generator) -> Int[Tensor, " count"]:
    """Classes drawn uniformly from the allowed ones, by the inverse of their distribution function.

    Where none is allowed it is the last class, so that nothing here needs to look at a value.
    """
    below = allowed.cumsum(0)
    position = torch.rand(count, 1, generator=stream, device=allowed.device) * below[-1]
    return (below <= position).sum(dim=1).clamp_max(len(allowed) - 1)


def least_likely(
    generator: FeatureGenerator,
    external: Bool[Tensor, " classes"],
    candidates: int,
    select: int,
    stream: torch.Generator,
) -> Float[Tensor, "classes select d"]:
    """For each class the least likely of candidates from N(μ_c, Σ), as in VOS (Du et al., ICLR 2022).

    μ_c is the mean of generated features, Σ the covariance around it over the external classes, plus 1e-4·I.
    """
    classes = len(external)
    y = torch.arange(classes, device=external.device).repeat_interleave(candidates)
    z: Tensor = generator(_latents(generator, len(y), stream, external.device), y).unflatten(0, (classes, candidates))
    mean = z.mean(dim=1, keepdim=True)
    rest = ((z - mean) * external[:, None, None]).flatten(0, 1).double()
    covariance = rest.T @ rest / (candidates * external.sum().clamp_min(1))
    ridge = RIDGE * torch.eye(z.shape[2], device=z.device, dtype=covariance.dtype)
    root: Tensor = torch.linalg.cholesky_ex(covariance + ridge).L.to(z.dtype)
    # The point μ + L·e has the log density const − ½‖e‖², so the longest e is the least likely one.
    e = torch.randn(z.shape, generator=stream, device=z.device, dtype=z.dtype)
    far = e.square().sum(dim=2).topk(select, dim=1).indices
    kept = e.gather(1, far[:, :, None].expand(-1, -1, z.shape[2]))
    return mean + kept @ root.T


def mean_head(extras: Sequence[Survey]) -> dict[str, Tensor]:
    """The weighted mean of the uploaded heads, by the same fold as the mean of the rows."""
    mean: dict[str, Tensor] = {}
    total = 0.0
    for extra in extras:
        total += extra.weight
        for name in ("weight", "bias"):
            value = extra.sums[f"head.{name}"]
            mean[name] = torch.lerp(mean[name], value, extra.weight / total) if name in mean else value
    return mean


def train_generator(
    generator: FeatureGenerator,
    head: nn.Module,
    iterations: int,
    *,
    batch: int,
    lr: float,
    stream: torch.Generator,
) -> None:
    """min over G of E CE(head(G(ε, y)), y) with ε ~ N(0, I) and y uniform over all classes, by Adam, in place."""
    generator.train().requires_grad_(True)
    head.requires_grad_(False)
    adam = torch.optim.Adam(generator.parameters(), lr=lr, weight_decay=WEIGHT_DECAY)
    device = next(generator.parameters()).device
    for _ in range(iterations):
        y = torch.randint(generator.num_classes, (batch,), generator=stream, device=device)
        with torch.enable_grad():
            loss = cross_entropy(head(generator(_latents(generator, batch, stream, device), y)), y)
            gradients = torch.autograd.grad(loss, list(generator.parameters()))
        for parameter, gradient in zip(generator.parameters(), gradients, strict=True):
            parameter.grad = gradient
        adam.step()
    generator.eval()


def _latents(generator: FeatureGenerator, count: int, stream: torch.Generator, device: torch.device) -> Tensor:
    return torch.randn(count, generator.latent, generator=stream, device=device)
