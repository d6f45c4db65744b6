"""The contract of a federated method: build nets, embed a batch once, return one loss a parameter group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.errors import InputError
from ..core.fields import check
from ..core.flat import ServerNets
from ..core.learning import learnable
from ..core.random import with_seed
from ..core.types import Batch, Context, Nets, Optimiser, Output, Phase, Readout, Rng, ServerState, Survey
from ..data.augment import fourier_mix


class Method(ABC):
    """A federated method. Its hyper-parameters are the fields of the final, frozen dataclass that implements it.

    Loop, optimisers, device, random seeds and data never appear here: an engine calls these functions.
    Only `losses` has no default.
    """

    paper: ClassVar[str] = ""
    """Where the method comes from, for `foogd methods`."""

    travels: ClassVar[str] = "the model, both ways"
    """What goes over the network in a round, in words."""

    keeps: ClassVar[str] = "nothing"
    """What stays on a client between rounds, in words."""

    passes: ClassVar[str] = "none"
    """What it computes beyond FedAvg's one pass over a batch, in words."""

    def __post_init__(self) -> None:
        """Check the settings; a method with a check of its own calls this one, too."""
        check(self)

    @property
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        """Parameter groups: name → the nets that its loss trains, with one optimiser each."""
        return {"model": ("backbone", "head")}

    @property
    def frozen(self) -> frozenset[str]:
        """Nets that only the server changes: a client is sent them when they are new to it, and never sends them."""
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
    def surveys_samples(self) -> bool:
        """Whether the sums of a survey do not depend on how images are put into batches: then batches are large."""
        return False

    @property
    def settles(self) -> bool:
        """Whether surveys set values in the nets: then the model is surveyed once more before it is tested."""
        return type(self).settle is not Method.settle

    @property
    def adapts(self) -> bool:
        """Whether outputs may depend on earlier test images: where a method has a `predictor` of its own."""
        return type(self).predictor is not Method.predictor

    @property
    def effort(self) -> float:
        """About how many images go through the backbone for each image of a batch, to guess the time of a run."""
        return float(self.views)

    @property
    def reads_round(self) -> bool:
        """Whether `losses` or `extend` read `ctx.round`; a step that is recorded once must not, unless it says so."""
        return False

    @property
    def test_batch(self) -> int | None:
        """Images that a predictor gets at a time, where its outputs depend on that; None: as many as the run says."""
        return None

    @property
    def disclosed(self) -> frozenset[str]:
        """Uploads of `finish` that may show private values to the server; all others are checked not to."""
        return frozenset()

    @property
    def pools_data(self) -> bool:
        """Whether the server sees all clients' images before round 1 (`pretrain`): possible in a simulation only."""
        return False

    def build(self, backbone: nn.Module, num_classes: int, rng: Rng) -> Nets:
        """The nets around a backbone; `rng(name)` seeds the start of each."""
        return nn.ModuleDict({"backbone": backbone, "head": linear_head(backbone, num_classes, rng("head"))})

    def personal(self, name: str) -> bool:
        """Whether the parameter or buffer `name` ("personal_head.weight") stays on its client."""
        return False

    def private_names(self, nets: Nets) -> frozenset[str]:
        """The parameters and buffers that stay on their client; where names do not tell, the nets do."""
        return frozenset(name for name in nets.state_dict() if self.personal(name))

    @property
    def neutral_start(self) -> bool:
        """Whether a client can be tested with private values that never trained; else it gets the mean of others'."""
        return True

    @property
    def own_first_view(self) -> bool:
        """Whether the first view is more than the images: where a method has a `first_view` of its own."""
        return type(self).first_view is not Method.first_view

    def weight(self, default: float) -> float:
        """The weight of a client in the mean; `default` is the run's, its number of samples as a rule."""
        return default

    def optimiser(self, group: str, default: Optimiser) -> Optimiser:
        """The optimiser of a group; `default` is the run's (lr, momentum, weight decay)."""
        return default

    def init_server(self, nets: Nets, rng: Rng) -> dict[str, Tensor]:
        """The first values that the server publishes beside the weights."""
        return {}

    def pretrain(self, nets: Nets, epoch: Callable[[], Iterable[Batch]], ctx: Context) -> None:
        """Where `pools_data`: the server's training before round 1, in place; `epoch()` yields all images once."""
        raise NotImplementedError(f"{type(self).__name__} pools data but has no `pretrain`")

    def phases(self, round: int, rounds: int, epochs: int) -> Sequence[Phase]:
        """The stretches of local training in this round; as a rule one, in which all groups learn."""
        return (Phase(tuple(self.groups), epochs),)

    def survey(self, nets: Nets, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        """Sums over a batch at the received weights, before training; the engine adds up the client's batches.

        Called without gradients, on nets in eval mode.
        """
        return {}

    def begin(self, server: ServerState, surveys: Sequence[Survey]) -> ServerState:
        """The server's step between the surveys and the training of the same round."""
        return server

    def settle(self, server: ServerState, surveys: Sequence[Survey], nets: ServerNets) -> ServerState:
        """The server with what the surveys set in its nets, before training and before a test."""
        return server

    def first_view(self, x: Tensor, rng: Rng) -> Tensor:
        """The first view of images in [0, 1]; as a rule the images as they are."""
        return x

    def view(self, x: Tensor, partner: Tensor, rng: Rng) -> Tensor:
        """The second view of images in [0, 1]: amplitudes mixed with those of a partner image, phases kept."""
        lam = torch.rand(len(x), generator=rng("view"), device=x.device, dtype=x.dtype)
        return fourier_mix(x, partner, lam)

    def extend(self, nets: Nets, batch: Batch, ctx: Context) -> Batch:
        """The training batch with images that the method makes itself in `x_more`; as a rule none."""
        return batch

    def embed(self, nets: Nets, batch: Batch) -> Batch:
        """The one pass through the backbone; two views and added images go through it together."""
        images = {"z": batch.x, "z_hat": batch.x_hat, "z_more": batch.x_more}
        found = {name: x for name, x in images.items() if x is not None}
        if len(found) == 1:
            return batch._replace(z=nets["backbone"](batch.x))
        features = nets["backbone"](torch.cat(list(found.values()))).split([len(x) for x in found.values()])
        return batch._replace(**dict(zip(found, features, strict=True)))

    @abstractmethod
    def losses(self, nets: Nets, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        """One scalar a group of the phase; a loss moves its own group only. Nothing here may look at a value."""

    def finish(self, nets: Nets, batches: Iterable[Batch], ctx: Context) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """After local training: what to upload beside the weights, and the client's new memory.

        Called without gradients, on nets in eval mode; `batches` are the client's images without augmentation, not yet
        embedded.
        """
        return {}, dict(ctx.memory)

    def aggregate(
        self, server: ServerState, mean: ServerState, extras: Sequence[Survey], nets: ServerNets, rng: Rng
    ) -> ServerState:
        """The next server state from the old one, the mean of the clients' rows, and what `finish` uploaded.

        `nets` is for a server that trains something itself: `nets.load(mean)`, then `nets.store(mean, ...)`.
        """
        return mean

    def before_test(self) -> Sequence[Phase]:
        """Local training of private nets on the final model, for the client's own use; the server never sees it."""
        return ()

    def logits(self, nets: Nets, z: Tensor) -> Tensor:
        """The client's classification of features."""
        out: Tensor = nets["head"](z)
        return out

    def generic_logits(self, nets: Nets, z: Tensor) -> Tensor:
        """The classification for someone without private nets; the same as `logits` where nothing is private.

        Private values in `nets` are then the mean over the clients.
        """
        return self.logits(nets, z)

    def readout(self, nets: Nets) -> Readout:
        """What detectors may ask of the model."""
        return linear_readout(lambda z: self.logits(nets, z), nets["head"])

    def generic_readout(self, nets: Nets) -> Readout:
        """What detectors may ask of the model that has no private nets."""
        return self.readout(nets)

    def predictor(self, nets: Nets, ctx: Context) -> Callable[[Tensor], Output]:
        """A function from normalised images to features and logits; state for test-time adaptation lives in it."""

        classify = self.generic_logits if ctx.unknown else self.logits

        def predict(x: Tensor) -> Output:
            z = nets["backbone"](x)
            return Output(z, classify(nets, z))

        return predict


def class_flaw(cls: type[Method]) -> str | None:
    """What is wrong with the class of a method, whatever it computes; None where nothing is."""
    if not is_dataclass(cls):
        return f"the class {cls.__name__} is no dataclass: a method needs @dataclass(frozen=True) above its class"
    hidden = [item.name for item in fields(cls) if callable(getattr(Method, item.name, None))]
    if hidden:
        return f"the field {hidden[0]!r} of {cls.__name__} hides the hook Method.{hidden[0]}: give it another name"
    return None


def losses_flaw(losses: Any, groups: Iterable[str]) -> str | None:
    """What is wrong with what `losses` returned for these groups; None where nothing is."""
    wanted = f"a dict with one scalar tensor for each of the groups {', '.join(map(repr, groups))} is needed"
    if not isinstance(losses, Mapping):
        found = "nothing (is there a return?)" if losses is None else f"a {type(losses).__name__}"
        return f"losses returned {found}, but {wanted}"
    for group in groups:
        if group not in losses:
            return f"losses have the keys {sorted(map(str, losses))}, but {wanted}"
        loss = losses[group]
        if not isinstance(loss, Tensor):
            return f"the loss of {group!r} is a {type(loss).__name__}; it must be a scalar tensor"
        if loss.numel() != 1:
            return f"the loss of {group!r} has shape {tuple(loss.shape)}; it must be a scalar"
    return None


def need_losses(method: Method, losses: Any, groups: Sequence[str]) -> dict[str, Tensor]:
    """What a method's `losses` returned, where it can be used for these groups."""
    flaw = losses_flaw(losses, groups)
    if flaw is not None:
        raise InputError(f"the method {type(method).__name__} cannot be trained: {flaw}; {HINT}")
    found: dict[str, Tensor] = losses
    return found


HINT = "foogd.testing.check_method tells more"


def linear_head(backbone: nn.Module, num_classes: int, stream: torch.Generator) -> nn.Linear:
    """A linear classifier on a backbone's features with bias 0."""
    head = with_seed(stream, lambda: nn.Linear(feature_width(backbone), num_classes))
    nn.init.zeros_(head.bias)
    return head


def linear_readout(head: Callable[[Tensor], Tensor], linear: nn.Module) -> Readout:
    """A readout with the weights of a linear head; other heads have none to show."""
    if isinstance(linear, nn.Linear):
        return Readout(head, linear.weight.detach(), None if linear.bias is None else linear.bias.detach())
    return Readout(head)


def joined_readout(
    head: Callable[[Tensor], Tensor], generic: nn.Module, private: nn.Module, share: float = 1.0
) -> Readout:
    """A readout of share·(generic + private), two linear heads that count as one."""
    assert isinstance(generic, nn.Linear)
    assert isinstance(private, nn.Linear)
    bias = generic.bias if private.bias is None else generic.bias + private.bias
    return Readout(head, share * (generic.weight + private.weight).detach(), share * bias.detach())


def feature_width(backbone: nn.Module) -> int:
    """The width d of a backbone's features, from its attribute `feature_width`."""
    return int(backbone.feature_width)  # type: ignore[arg-type]


def flat_parameters(nets: Nets, names: Iterable[str]) -> Tensor:
    """The parameters that learn in some nets as one vector, in the order of a group's optimiser; buffers are none."""
    return torch.cat([parameter.flatten() for name in names for parameter in learnable(nets[name])])


def image_shape(backbone: nn.Module) -> tuple[int, int, int]:
    """Channels, height and width of the images that a backbone was built for."""
    channels, height, width = backbone.image_shape  # type: ignore[misc]
    return int(channels), int(height), int(width)
