"""A method around another one: every hook is the base's, and a wrapper says only what it changes."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from ..engine.arena import ServerNets
from ..types import Batch, Context, Nets, Optimiser, Output, Phase, Readout, Rng, ServerState, Survey
from .base import Method
from .fedavg import FedAvg


@dataclass(frozen=True)
class Wrapper(Method, ABC):
    """Forwards every hook of `Method` to `base`; a test compares the two lists."""

    base: Method = field(default_factory=FedAvg)

    @property
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        return self.base.groups

    @property
    def frozen(self) -> frozenset[str]:
        return self.base.frozen

    @property
    def views(self) -> int:
        return self.base.views

    @property
    def surveys(self) -> bool:
        return self.base.surveys

    @property
    def surveys_samples(self) -> bool:
        return self.base.surveys_samples

    @property
    def settles(self) -> bool:
        return self.base.settles

    @property
    def adapts(self) -> bool:
        return self.base.adapts

    @property
    def effort(self) -> float:
        return self.base.effort

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

    @property
    def neutral_start(self) -> bool:
        return self.base.neutral_start

    @property
    def own_first_view(self) -> bool:
        return self.base.own_first_view

    def build(self, backbone: nn.Module, num_classes: int, rng: Rng) -> Nets:
        return self.base.build(backbone, num_classes, rng)

    def personal(self, name: str) -> bool:
        return self.base.personal(name)

    def private_names(self, nets: Nets) -> frozenset[str]:
        return self.base.private_names(nets)

    def weight(self, default: float) -> float:
        return self.base.weight(default)

    def optimiser(self, group: str, default: Optimiser) -> Optimiser:
        return self.base.optimiser(group, default)

    def init_server(self, nets: Nets, rng: Rng) -> dict[str, Tensor]:
        return self.base.init_server(nets, rng)

    def pretrain(self, nets: Nets, epoch: Callable[[], Iterable[Batch]], ctx: Context) -> None:
        self.base.pretrain(nets, epoch, ctx)

    def phases(self, round: int, rounds: int, epochs: int) -> Sequence[Phase]:
        return self.base.phases(round, rounds, epochs)

    def survey(self, nets: Nets, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        return self.base.survey(nets, batch, ctx)

    def begin(self, server: ServerState, surveys: Sequence[Survey]) -> ServerState:
        return self.base.begin(server, surveys)

    def settle(self, server: ServerState, surveys: Sequence[Survey], nets: ServerNets) -> ServerState:
        return self.base.settle(server, surveys, nets)

    def first_view(self, x: Tensor, rng: Rng) -> Tensor:
        return self.base.first_view(x, rng)

    def view(self, x: Tensor, partner: Tensor, rng: Rng) -> Tensor:
        return self.base.view(x, partner, rng)

    def extend(self, nets: Nets, batch: Batch, ctx: Context) -> Batch:
        return self.base.extend(nets, batch, ctx)

    def embed(self, nets: Nets, batch: Batch) -> Batch:
        return self.base.embed(nets, batch)

    def losses(self, nets: Nets, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        return self.base.losses(nets, batch, ctx)

    def finish(self, nets: Nets, batches: Iterable[Batch], ctx: Context) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return self.base.finish(nets, batches, ctx)

    def aggregate(
        self, server: ServerState, mean: ServerState, extras: Sequence[Survey], nets: ServerNets, rng: Rng
    ) -> ServerState:
        return self.base.aggregate(server, mean, extras, nets, rng)

    def before_test(self) -> Sequence[Phase]:
        return self.base.before_test()

    def logits(self, nets: Nets, z: Tensor) -> Tensor:
        return self.base.logits(nets, z)

    def generic_logits(self, nets: Nets, z: Tensor) -> Tensor:
        return self.base.generic_logits(nets, z)

    def readout(self, nets: Nets) -> Readout:
        return self.base.readout(nets)

    def generic_readout(self, nets: Nets) -> Readout:
        return self.base.generic_readout(nets)

    def predictor(self, nets: Nets, ctx: Context) -> Callable[[Tensor], Output]:
        return self.base.predictor(nets, ctx)
