"""The contract of a federated method: build nets, embed a batch once, return one loss a parameter group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..data.augment import fourier_mix
from ..engine.rng import with_seed
from ..types import Batch, Context, Nets, Optimiser, Output, Phase, Readout, Rng, ServerState, Survey


class Method(ABC):
    """A federated method. Its hyper-parameters are the fields of the final, frozen dataclass that implements it.

    Loop, optimisers, device, random seeds and data never appear here: an engine calls these functions.
    Only `losses` has no default.
    """

    paper: ClassVar[str] = ""
    """Where the method comes from, for `foogd methods`."""

    @property
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        """Parameter groups: name → the nets that its loss trains, with one optimiser each."""
        return {"model": ("backbone", "head")}

    @property
    def frozen(self) -> frozenset[str]:
        """Nets that are sent to the clients but not trained there."""
        return frozenset()

    @property
    def views(self) -> int:
        """1, or 2 where `losses` needs a second, augmented view of each image."""
        return 1

    @property
    def surveys(self) -> bool:
        """Whether clients are asked before training: where a method has a `survey` of its own."""
        return type(self).survey is not Method.survey

    @property
    def adapts(self) -> bool:
        """Whether outputs may depend on earlier test images: where a method has a `predictor` of its own."""
        return type(self).predictor is not Method.predictor

    def build(self, backbone: nn.Module, num_classes: int, rng: Rng) -> Nets:
        """The nets around a backbone; `rng(name)` seeds the start of each."""
        return nn.ModuleDict({"backbone": backbone, "head": linear_head(backbone, num_classes, rng("head"))})

    def personal(self, name: str) -> bool:
        """Whether the parameter or buffer `name` ("personal_head.weight") stays on its client."""
        return False

    def optimiser(self, group: str, default: Optimiser) -> Optimiser:
        """The optimiser of a group; `default` is the run's (lr, momentum, weight decay)."""
        return default

    def init_server(self, nets: Nets, rng: Rng) -> dict[str, Tensor]:
        """The first values that the server publishes beside the weights."""
        return {}

    def phases(self, round: int, rounds: int, epochs: int) -> Sequence[Phase]:
        """The stretches of local training in this round; as a rule one, in which all groups learn."""
        return (Phase(tuple(self.groups), epochs),)

    def survey(self, nets: Nets, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        """Sums over a batch at the received weights, before training; the engine adds up the client's batches."""
        return {}

    def begin(self, server: ServerState, surveys: Sequence[Survey]) -> ServerState:
        """The server's step between the surveys and the training of the same round."""
        return server

    def view(self, x: Tensor, partner: Tensor, rng: Rng) -> Tensor:
        """The second view of images in [0, 1]: amplitudes mixed with those of a partner image, phases kept."""
        lam = torch.rand(len(x), generator=rng("view"), device=x.device, dtype=x.dtype)
        return fourier_mix(x, partner, lam)

    def embed(self, nets: Nets, batch: Batch) -> Batch:
        """The one pass through the backbone; two views go through it together."""
        if batch.x_hat is None:
            return batch._replace(z=nets["backbone"](batch.x))
        z, z_hat = nets["backbone"](torch.cat([batch.x, batch.x_hat])).chunk(2)
        return batch._replace(z=z, z_hat=z_hat)

    @abstractmethod
    def losses(self, nets: Nets, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        """One scalar a group of the phase; a loss moves its own group only. Nothing here may look at a value."""

    def finish(self, nets: Nets, batches: Iterable[Batch], ctx: Context) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """After local training: what to upload beside the weights, and the client's new memory."""
        return {}, dict(ctx.memory)

    def aggregate(
        self, server: ServerState, mean: ServerState, extras: Sequence[Survey], nets: Callable[[], Nets], rng: Rng
    ) -> ServerState:
        """The next server state from the old one, the mean of the clients' rows, and what `finish` uploaded.

        `nets()` builds a set of nets for a server that trains something itself.
        """
        return mean

    def logits(self, nets: Nets, z: Tensor) -> Tensor:
        """The client's classification of features."""
        out: Tensor = nets["head"](z)
        return out

    def generic_logits(self, nets: Nets, z: Tensor) -> Tensor:
        """The classification for someone without private nets; the same as `logits` where nothing is private."""
        return self.logits(nets, z)

    def readout(self, nets: Nets) -> Readout:
        """What detectors may ask of the model."""
        return linear_readout(lambda z: self.logits(nets, z), nets["head"])

    def generic_readout(self, nets: Nets) -> Readout:
        """What detectors may ask of the model that has no private nets."""
        return self.readout(nets)

    def predictor(self, nets: Nets, ctx: Context) -> Callable[[Tensor], Output]:
        """A function from normalised images to features and logits; state for test-time adaptation lives in it."""

        def predict(x: Tensor) -> Output:
            z = nets["backbone"](x)
            return Output(z, self.logits(nets, z))

        return predict


def linear_head(backbone: nn.Module, num_classes: int, stream: torch.Generator) -> nn.Linear:
    """A linear classifier on a backbone's features with bias 0."""
    head = with_seed(stream, lambda: nn.Linear(feature_width(backbone), num_classes))
    nn.init.zeros_(head.bias)
    return head


def linear_readout(head: Callable[[Tensor], Tensor], linear: nn.Module) -> Readout:
    """A readout with the weights of a linear head; other heads have none to show."""
    if isinstance(linear, nn.Linear):
        return Readout(head, linear.weight.detach(), linear.bias.detach())
    return Readout(head)


def feature_width(backbone: nn.Module) -> int:
    """The width d of a backbone's features, from its attribute `feature_width`."""
    return int(backbone.feature_width)  # type: ignore[arg-type]
