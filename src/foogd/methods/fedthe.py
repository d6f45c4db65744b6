"""FedTHE and FedTHE+ (Jiang and Lin, ICLR 2023): two heads, weighed anew for each test image."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from ..core.fields import setting
from ..core.flat import ServerNets
from ..core.learning import learnable
from ..core.random import with_seed
from ..core.types import Batch, Context, Nets, Optimiser, Output, Phase, Readout, Rng, ServerState, Survey, both_views
from ..data.views import augmix
from ..functional import balanced_softmax, entropy
from .base import Method, feature_width, joined_readout, linear_readout

if TYPE_CHECKING:
    from jaxtyping import Float

STILL = 1e-5
"""The gradient norm below which the weights of a test image are left as they are."""
NETS = ("backbone", "head", "personal_head")


@final
@dataclass(frozen=True)
class FedTHE(Method):
    """A shared head and a private one that stands alone, weighed for each test image by entropy and history.

    The private head starts at 0: it depends on no draw, its problem is convex, and a client that has never taken part
    then predicts the class of the shared head, whatever the weights. It learns from the second round on.
    """

    views: int = setting(1, "2: losses on the augmented view too", choices=(1, 2))
    prior_smoothing: float = setting(0.0, "added to the class counts of the prior", ge=0.0)
    personal_lr: float = setting(0.01, "learning rate of the private head", gt=0.0)

    adapt: bool = setting(True, "false: both heads count one half for every image")
    adapt_steps: int = setting(20, "Adam steps on the weights of the two heads", ge=0)
    adapt_lr: float = setting(0.1, "learning rate of these steps", gt=0.0)
    history_rate: float = setting(0.1, "share of an image in the history: m = a z + (1-a) m", gt=0.0, le=1.0)
    feature_share: float = setting(0.3, "share of an image beside its history: b z + (1-b) m", ge=0.0, le=1.0)
    test_batch: int = setting(128, "test images at a time; no result depends on it", ge=1)

    memo_steps: int = setting(0, "FedTHE+: steps on all nets an image; published: 3", ge=0)
    memo_lr: float = setting(5e-4, "learning rate of these steps", gt=0.0)
    memo_views: int = setting(16, "AugMix views of an image in these steps", ge=1)

    paper: ClassVar[str] = "Jiang and Lin, ICLR 2023"
    travels: ClassVar[str] = "the model and one mean feature, both ways"
    keeps: ClassVar[str] = "a private head and its mean feature"
    passes: ClassVar[str] = "one epoch for the private head, one pass for the mean feature"

    @property
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        return {"model": ("backbone", "head"), "personal": ("personal_head",)}

    @property
    def adapts(self) -> bool:
        return self.adapt or self.memo_steps > 0

    def build(self, backbone: nn.Module, num_classes: int, rng: Rng) -> Nets:
        nets = super().build(backbone, num_classes, rng)
        width = feature_width(backbone)
        private = with_seed(rng("personal_head"), lambda: nn.Linear(width, num_classes, bias=False))
        nn.init.zeros_(private.weight)
        nets["personal_head"] = private
        return nets

    def personal(self, name: str) -> bool:
        return name.startswith("personal_head.")

    def optimiser(self, group: str, default: Optimiser) -> Optimiser:
        return Optimiser(lr=self.personal_lr) if group == "personal" else default

    def init_server(self, nets: Nets, rng: Rng) -> dict[str, Tensor]:
        backbone = nets["backbone"]
        return {"feature": torch.zeros(feature_width(backbone), device=next(backbone.parameters()).device)}

    def phases(self, round: int, rounds: int, epochs: int) -> Sequence[Phase]:
        model = Phase(("model",), epochs)
        # The private head goes with the body that all clients share, not with what a client makes of it. In the first
        # round that body has learned nothing, and its normalisation has no statistics yet: with WideResNet-40-2 the
        # loss of a head fitted to it was above 1,000, and three rounds later still worse than that of no head.
        return (model, Phase(("personal",), 1, received=True)) if round > 0 else (model,)

    def losses(self, nets: Nets, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        batch = both_views(batch)
        if "personal" in ctx.groups:
            return {"personal": cross_entropy(nets["personal_head"](batch.features.detach()), batch.y)}
        generic = nets["head"](batch.features)
        return {"model": balanced_softmax(generic, batch.y, ctx.class_counts, smoothing=self.prior_smoothing)}

    def finish(self, nets: Nets, batches: Iterable[Batch], ctx: Context) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        features = torch.cat([self.embed(ctx.received, batch).features for batch in batches])
        mean = {"feature": features.mean(0)}
        return mean, {**ctx.memory, **mean}

    def aggregate(
        self, server: ServerState, mean: ServerState, extras: Sequence[Survey], nets: ServerNets, rng: Rng
    ) -> ServerState:
        everyone = torch.stack([extra.sums["feature"] for extra in extras]).mean(0)
        return replace(mean, extra={**mean.extra, "feature": everyone})

    def logits(self, nets: Nets, z: Tensor) -> Tensor:
        out: Tensor = 0.5 * (nets["head"](z) + nets["personal_head"](z))
        return out

    def generic_logits(self, nets: Nets, z: Tensor) -> Tensor:
        out: Tensor = nets["head"](z)
        return out

    def readout(self, nets: Nets) -> Readout:
        return joined_readout(lambda z: self.logits(nets, z), nets["head"], nets["personal_head"], share=0.5)

    def generic_readout(self, nets: Nets) -> Readout:
        return linear_readout(lambda z: self.generic_logits(nets, z), nets["head"])

    def predictor(self, nets: Nets, ctx: Context) -> Callable[[Tensor], Output]:
        if not self.adapts or ctx.unknown:  # with one head there is nothing to weigh
            return super().predictor(nets, ctx)
        everyone = ctx.server["feature"]
        own = ctx.memory.get("feature", everyone)  # a client that has never taken part knows only the mean
        memo = self.memo(nets, ctx) if self.memo_steps > 0 else None
        latest: Tensor | None = None

        def predict(x: Tensor) -> Output:
            nonlocal latest
            z = nets["backbone"](x)
            heads = torch.stack([nets["head"](z), nets["personal_head"](z)], dim=1)
            if self.adapt:
                past = history(z, z[0] if latest is None else latest, rate=self.history_rate)
                latest = past[-1]
                t = self.feature_share * z + (1 - self.feature_share) * past
                distance = torch.stack([(t - everyone).norm(dim=1), (t - own).norm(dim=1)], dim=1)
                e = head_weights(heads, distance, steps=self.adapt_steps, lr=self.adapt_lr)
            else:
                e = torch.full_like(heads[:, :, 0], 0.5)
            if memo is None:
                return Output(z, _weighed(heads, e))
            # Features stay those of the shared body: nets that are changed for one image describe no other.
            return Output(z, torch.cat([memo(x[i : i + 1], e[i : i + 1]) for i in range(len(x))]))

        return predict

    def memo(self, nets: Nets, ctx: Context) -> Callable[[Tensor, Tensor], Tensor]:
        """FedTHE+: logits of one image after SGD steps on all nets, which forget them before the next image.

        The steps lower the entropy of the mean prediction over AugMix views at fixed weights of the heads (MEMO, Zhang
        et al., NeurIPS 2022).
        """
        own = nn.ModuleDict({name: copy.deepcopy(nets[name]) for name in NETS}).eval()
        parameters = [parameter.requires_grad_(True) for net in own.values() for parameter in learnable(net)]
        start = [parameter.detach().clone() for parameter in parameters]
        optimiser = torch.optim.SGD(parameters, lr=self.memo_lr)

        def classify(x: Tensor, e: Tensor) -> Tensor:
            z = own["backbone"](x)
            return _weighed(torch.stack([own["head"](z), own["personal_head"](z)], dim=1), e)

        def predict(x: Tensor, e: Tensor) -> Tensor:
            image = (x * ctx.std + ctx.mean).clamp(0, 1).expand(self.memo_views, -1, -1, -1)
            for _ in range(self.memo_steps):
                with torch.enable_grad():
                    logits = classify((augmix(image, ctx.rng) - ctx.mean) / ctx.std, e)
                    marginal_entropy(logits).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                optimiser.zero_grad()
            logits = classify(x, e)
            for parameter, value in zip(parameters, start, strict=True):
                parameter.data.copy_(value)
            return logits

        return predict


def history(z: Float[Tensor, "n d"], before: Float[Tensor, " d"], *, rate: float) -> Float[Tensor, "n d"]:
    """The running means m_i = a·z_i + (1−a)·m_{i−1} of a stream with `before` as m_0, all n at once."""
    place = torch.arange(len(z), device=z.device)
    age = (place[:, None] - place).clamp_min(0)
    share = (rate * torch.pow(1 - rate, age.to(z.dtype))).tril()
    return share @ z + torch.pow(1 - rate, (place + 1).to(z.dtype))[:, None] * before


def head_weights(
    heads: Float[Tensor, "n 2 classes"], distance: Float[Tensor, "n 2"], *, steps: int, lr: float
) -> Float[Tensor, "n 2"]:
    """e = softmax(θ) of each image after Adam steps from θ = (1, 1); images do not know each other.

    The objective is s·H(softmax(e_0 g + e_1 h)) + (1−s)·(e_0 d_0 + e_1 d_1), where s is the cosine of the probabilities
    that the heads g and h give. An image whose gradient is below 10⁻⁵ stays as it is.
    """
    probabilities = heads.softmax(dim=2)
    s = cosine_similarity(probabilities[:, 0], probabilities[:, 1], dim=1)[:, None]
    theta = torch.ones_like(distance)
    first, second = torch.zeros_like(theta), torch.zeros_like(theta)
    for step in range(1, steps + 1):
        e = theta.softmax(dim=1)
        log_p = _weighed(heads, e).log_softmax(dim=1)
        p = log_p.exp()
        of_entropy = -p * (log_p - (p * log_p).sum(dim=1, keepdim=True))  # ∂H/∂logits = −p·(log p + H)
        slope = s * (heads @ of_entropy[:, :, None])[:, :, 0] + (1 - s) * distance
        gradient = e * (slope - (e * slope).sum(dim=1, keepdim=True))
        first = torch.lerp(first, gradient, 0.1)
        second = torch.lerp(second, gradient.square(), 0.001)
        size = (second / (1 - 0.999**step)).sqrt() + 1e-8
        moving = gradient.norm(dim=1, keepdim=True) >= STILL
        theta = torch.where(moving, theta - lr * first / (1 - 0.9**step) / size, theta)
    return theta.softmax(dim=1)


def marginal_entropy(logits: Float[Tensor, "views classes"]) -> Float[Tensor, ""]:
    """H(p̄) of the mean probabilities p̄ over the views of one image."""
    mean = torch.logsumexp(logits.log_softmax(dim=1), dim=0) - math.log(len(logits))
    return entropy(mean[None])[0]


def _weighed(heads: Tensor, e: Tensor) -> Tensor:
    """e_0·g + e_1·h."""
    return (e[:, :, None] * heads).sum(dim=1)
