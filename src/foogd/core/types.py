"""The types that methods, engines and evaluation share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Nets = nn.ModuleDict
"""The networks of one participant by name: "backbone", "head", "personal_head", "score", "generator"."""

Rng = Callable[[str], torch.Generator]
"""One stream of random numbers a purpose: `rng("dsm")` is the same generator each time it is asked for."""


class Batch(NamedTuple):
    """One batch of a client: normalised images, labels, and what `Method.embed` adds to them."""

    x: Float[Tensor, "b c h w"]
    y: Int[Tensor, " b"]
    x_hat: Float[Tensor, "b c h w"] | None = None
    z: Float[Tensor, "b d"] | None = None
    z_hat: Float[Tensor, "b d"] | None = None
    x_more: Float[Tensor, "m c h w"] | None = None  # images that the method itself adds (`Method.extend`)
    z_more: Float[Tensor, "m d"] | None = None
    x_plain: Float[Tensor, "b c h w"] | None = None  # the images behind x, where x is a view of the method's own

    @property
    def features(self) -> Float[Tensor, "b d"]:
        """`z`, for code that runs after `embed`."""
        if self.z is None:
            raise ValueError("the batch has no features yet: call Method.embed first")
        return self.z

    @property
    def features_hat(self) -> Float[Tensor, "b d"]:
        """`z_hat`, for code that runs after `embed` with two views."""
        if self.z_hat is None:
            raise ValueError("the batch has no features of a second view: the method needs views = 2")
        return self.z_hat


def both_views(batch: Batch) -> Batch:
    """The batch with the features of both views one after the other, as if it were twice as large."""
    if batch.z_hat is None:
        return batch
    return batch._replace(
        x=batch.x if batch.x_hat is None else torch.cat([batch.x, batch.x_hat]),
        y=torch.cat([batch.y, batch.y]),
        x_hat=None,
        z=torch.cat([batch.features, batch.z_hat]),
        z_hat=None,
    )


class Output(NamedTuple):
    """What a model says about n images; every detector reads this."""

    z: Float[Tensor, "n d"]
    logits: Float[Tensor, "n classes"]


class Score(Protocol):
    """z ↦ s(z), the estimated gradient of the log density; `sigma` picks one of several noise levels."""

    def __call__(self, z: Tensor, sigma: float | None = None) -> Tensor: ...


class ClassScore(Protocol):
    """(z, classes) ↦ s(z) of the features of some classes alone; `classes` is 1 for each of them, else 0."""

    def __call__(self, z: Tensor, classes: Tensor, sigma: float | None = None) -> Tensor: ...


@dataclass(frozen=True)
class Readout:
    """What a detector may ask of a model besides its output."""

    head: Callable[[Tensor], Tensor]
    weight: Float[Tensor, "classes d"] | None = None  # of the linear head that classifies, where it is linear
    bias: Float[Tensor, " classes"] | None = None
    score: Score | None = None  # None: the method trains no score network
    class_score: ClassScore | None = None  # None: the score network knows no classes
    score_space: Callable[[Tensor], Tensor] | None = None  # z ↦ u, where the score network looks at features


@dataclass(frozen=True)
class Optimiser:
    """The optimiser of one parameter group; it starts afresh at each participation."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    kind: str = "sgd"  # or "adam"
    clip: float = 0.0  # largest gradient norm of the group; 0 = no clipping
    betas: tuple[float, float] = (0.9, 0.999)  # of Adam


@dataclass(frozen=True)
class Phase:
    """One stretch of local training: which groups learn, and for how many epochs."""

    groups: tuple[str, ...]
    epochs: int
    received: bool = False  # features of the nets as they arrived, not of the client's own


@dataclass(frozen=True)
class Context:
    """What a client may know besides its batch."""

    round: int
    rounds: int
    groups: tuple[str, ...]  # the groups that learn in this phase
    class_counts: Float[Tensor, " classes"]
    received: Nets  # the server's nets as they arrived, frozen
    server: Mapping[str, Tensor]  # what the server published for this round
    memory: Mapping[str, Tensor]  # the client's own, kept between rounds, never sent
    rng: Rng  # streams seeded by (seed, round, client, purpose)
    mean: Float[Tensor, "1 c 1 1"] = field(default_factory=lambda: torch.zeros(1, 1, 1, 1))  # x = (image - mean)/std
    std: Float[Tensor, "1 c 1 1"] = field(default_factory=lambda: torch.ones(1, 1, 1, 1))
    optimiser: Optimiser = field(default_factory=lambda: Optimiser(lr=0.1))  # the run's; see `Method.optimiser`
    steps: Mapping[str, int] = field(default_factory=dict)  # local steps of each group in this participation
    unknown: bool = False  # in a test: someone whom the federation does not know, who has no private part


@dataclass(frozen=True)
class Survey:
    """What one client answered before training started: sums over its data at the received weights."""

    client: int
    weight: float
    sums: Mapping[str, Tensor]


@dataclass(frozen=True)
class Update:
    """What one client sends after local training: its flat row of travelling values and what the method adds."""

    client: int
    weight: float
    shared: Float[Tensor, " p"]
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    integers: Mapping[str, Tensor] = field(default_factory=dict)  # integer buffers (BN counters), outside the row
    losses: Mapping[str, float] = field(default_factory=dict)  # mean of each loss over the local steps, to report


@dataclass(frozen=True)
class Missing:
    """A client that was asked and sent nothing that can be used."""

    client: int
    reason: str


@dataclass(frozen=True)
class ServerState:
    """All that the server knows between rounds; `round` counts the finished ones."""

    shared: Float[Tensor, " p"]
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    integers: Mapping[str, Tensor] = field(default_factory=dict)
    round: int = 0
    frozen: Float[Tensor, " f"] = field(default_factory=lambda: torch.empty(0))  # what no client changes (`Layout`)
    frozen_round: int = 0  # the round after which they changed last: a client that holds them is not sent them again
    clients: int = 0  # of the federation, those that do not take part included


@dataclass
class ClientState:
    """All that a client keeps between rounds."""

    id: int
    personal: Float[Tensor, " q"]
    indices: Int[Tensor, " n"]
    class_counts: Float[Tensor, " classes"]
    memory: dict[str, Tensor] = field(default_factory=dict)
    optimiser: dict[str, Tensor] = field(default_factory=dict)  # momentum, where a run keeps it between rounds
    holds: int = -1  # `frozen_round` of the frozen nets that it was sent; -1: none yet
    counted: int = 0  # the round of its last update that counted; 0: none yet

    @property
    def trained(self) -> bool:
        """Whether an update of it has counted: before, its private values are those of the start."""
        return self.counted > 0
