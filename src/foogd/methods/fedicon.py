"""FedICON (Tan et al., NeurIPS 2023): contrast first, then a classifier, then adaptation to the test stream."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..core.fields import setting
from ..core.learning import learnable
from ..core.types import Batch, Context, Nets, Optimiser, Output, Phase, Readout, Rng
from ..data.views import contrastive_view
from ..functional import simclr, supcon
from .base import Method, joined_readout, linear_head, linear_readout

FEWEST = 32  # test images of a step, but for a smaller `test_batch`; fewer are only predicted


@final
@dataclass(frozen=True)
class FedICON(Method):
    """Supervised contrast of two strong views, a classifier in the last rounds, and a contrastive step a test batch.

    The private classifier is the shared one plus a private linear map that starts at 0: for plain SGD that is the same
    as a copy of the shared classifier that learns on. Features are contrasted as they are, without a projection.
    The body learns at the run's rate, like that of every method: at the published 0.005, few rounds teach it little.
    The classifier starts late and at a low rate, so its rounds have at least the published five epochs.
    """

    temperature: float = setting(0.1, "of the contrast, in training and tests", gt=0.0)
    body_lr: float = setting(0.0, "learning rate of the contrast; 0: the run's; published: 0.005", ge=0.0)
    head_rounds: int = setting(5, "last rounds, for the classifier; at most a quarter of all", ge=1)
    head_epochs: int = setting(5, "least epochs of the classifier in each of these rounds", ge=1)
    head_lr: float = setting(0.01, "learning rate of the shared classifier", gt=0.0)
    personal_epochs: int = setting(5, "epochs of the private part before a test", ge=0)
    personal_lr: float = setting(0.01, "learning rate of the private part", gt=0.0)

    tta: str = setting("simclr", "simclr: a step on each test batch lowers its contrast", choices=("simclr", "none"))
    tta_lr: float = setting(0.005, "learning rate of the steps on test batches", gt=0.0)
    episodic: bool = setting(False, "true: a test batch forgets the steps before it")
    test_batch: int = setting(128, "test images in a step", ge=1)

    paper: ClassVar[str] = "Tan et al., NeurIPS 2023"
    keeps: ClassVar[str] = "nothing; before a test it trains a private classifier"
    passes: ClassVar[str] = "two views an image; in tests two more, and one backward pass"

    @property
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        return {"body": ("backbone",), "head": ("head",), "personal": ("personal_head",)}

    @property
    def views(self) -> int:
        return 2

    @property
    def adapts(self) -> bool:
        return self.tta != "none"

    def build(self, backbone: nn.Module, num_classes: int, rng: Rng) -> Nets:
        nets = super().build(backbone, num_classes, rng)
        private = linear_head(backbone, num_classes, rng("personal_head"))
        nn.init.zeros_(private.weight)
        nets["personal_head"] = private
        return nets

    def personal(self, name: str) -> bool:
        return name.startswith("personal_head.")

    def optimiser(self, group: str, default: Optimiser) -> Optimiser:
        if group == "personal":
            return Optimiser(lr=self.personal_lr)  # weight decay would draw a copy to 0, but the map to the shared one
        lr = self.head_lr if group == "head" else self.body_lr or default.lr
        return replace(default, lr=lr)

    def phases(self, round: int, rounds: int, epochs: int) -> Sequence[Phase]:
        contrast, classify = Phase(("body",), epochs), Phase(("head",), epochs and max(epochs, self.head_epochs))
        if rounds == 1:
            return (contrast, classify)
        last = max(1, min(self.head_rounds, rounds // 4))
        return (contrast,) if round < rounds - last else (classify,)

    def before_test(self) -> Sequence[Phase]:
        return (Phase(("personal",), self.personal_epochs),)

    def first_view(self, x: Tensor, rng: Rng) -> Tensor:
        return contrastive_view(x, lambda purpose: rng(f"first {purpose}"))

    def view(self, x: Tensor, partner: Tensor, rng: Rng) -> Tensor:
        return contrastive_view(x, rng)

    def embed(self, nets: Nets, batch: Batch) -> Batch:
        # A classifier on a fixed body learns from the first view alone.
        return super().embed(nets, batch if nets["backbone"].training else batch._replace(x_hat=None))

    def losses(self, nets: Nets, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        z, y = batch.features, batch.y
        if "body" in ctx.groups:
            both = torch.cat([z, batch.features_hat])
            return {"body": supcon(both, torch.cat([y, y]), temperature=self.temperature)}
        generic = nets["head"](z.detach())
        if "head" in ctx.groups:
            return {"head": cross_entropy(generic, y)}
        return {"personal": cross_entropy(generic.detach() + nets["personal_head"](z.detach()), y)}

    def logits(self, nets: Nets, z: Tensor) -> Tensor:
        out: Tensor = nets["head"](z) + nets["personal_head"](z)
        return out

    def generic_logits(self, nets: Nets, z: Tensor) -> Tensor:
        out: Tensor = nets["head"](z)
        return out

    def readout(self, nets: Nets) -> Readout:
        return joined_readout(lambda z: self.logits(nets, z), nets["head"], nets["personal_head"])

    def generic_readout(self, nets: Nets) -> Readout:
        return linear_readout(lambda z: self.generic_logits(nets, z), nets["head"])

    def predictor(self, nets: Nets, ctx: Context) -> Callable[[Tensor], Output]:
        if self.tta == "none" or not learnable(nets["backbone"]):
            return super().predictor(nets, ctx)
        # In eval mode: with statistics of the batch, a prediction would depend on what else is in it.
        own = nn.ModuleDict({**dict(nets.items()), "backbone": copy.deepcopy(nets["backbone"]).eval()})
        own["backbone"].requires_grad_(False)
        parameters = learnable(own["backbone"])
        for parameter in parameters:
            parameter.requires_grad_(True)
        start = [parameter.detach().clone() for parameter in parameters]
        optimiser = torch.optim.SGD(parameters, lr=self.tta_lr)

        classify = self.generic_logits if ctx.unknown else self.logits

        def predict(x: Tensor) -> Output:
            if len(x) >= min(FEWEST, self.test_batch):
                with torch.enable_grad():
                    self.test_loss(own, x, ctx).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                optimiser.zero_grad()
            # Features are those of the body as it was trained: along a stream adapted ones drift away from all that
            # detectors were fitted on, and a long stream would look like OUT by its length alone.
            output = Output(nets["backbone"](x), classify(own, own["backbone"](x)))
            if self.episodic:
                for parameter, value in zip(parameters, start, strict=True):
                    parameter.data.copy_(value)
            return output

        return predict

    def test_loss(self, nets: Nets, x: Tensor, ctx: Context) -> Tensor:
        """What a step on a test batch lowers: the contrast of two views of each image."""
        images = (x * ctx.std + ctx.mean).clamp(0, 1)
        views = torch.cat([self.first_view(images, ctx.rng), self.view(images, images, ctx.rng)])
        z, z_hat = nets["backbone"]((views - ctx.mean) / ctx.std).chunk(2)
        return simclr(z, z_hat, temperature=self.temperature)
