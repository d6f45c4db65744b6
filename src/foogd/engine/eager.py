"""The reference engine: one client after the other, on any device. Every other engine must agree with it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, final

import torch
from torch import Tensor, nn

from ..config import Config
from ..data.federation import Federation
from ..methods.base import Method
from ..nets import make_backbone
from ..nets.dropout import bind_dropout
from ..types import Batch, ClientState, Context, Nets, Optimiser, Phase, ServerState, Survey, Update
from .arena import Layout
from .batches import BatchMaker, epoch_positions, steps_per_epoch
from .rng import Streams, derive_seed, generator


class Engine(Protocol):
    """Runs the clients' part of a round."""

    method: Method
    federation: Federation
    config: Config
    layout: Layout

    def nets(self) -> Nets: ...

    def survey(self, server: ServerState, clients: Sequence[ClientState], round: int) -> list[Survey]: ...

    def train(self, server: ServerState, clients: Sequence[ClientState], round: int) -> Iterator[Update]: ...


def build_nets(method: Method, federation: Federation, config: Config) -> Nets:
    """A method's nets with start weights that depend on the seed and on nothing else."""
    streams = Streams(config.seed, "init")
    backbone = make_backbone(config.backbone, federation.shape, streams("backbone"))
    return method.build(backbone, federation.num_classes, streams)


def resolve_device(name: str) -> torch.device:
    """The device of a run: `auto` takes the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def fits(federation: Federation, device: torch.device, resident: str) -> bool:
    """Whether the images live on the device; `auto` leaves at least half of a GPU's free memory to training."""
    if device.type != "cuda" or resident != "auto":
        return resident != "host"
    return federation.bytes <= torch.cuda.mem_get_info(device)[0] / 2


@final
class EagerEngine:
    """Trains clients one by one on one set of nets whose values live in one flat row."""

    def __init__(self, method: Method, federation: Federation, config: Config) -> None:
        self.method, self.config = method, config
        self.device = resolve_device(config.device)
        if self.device.type == "cpu":
            # Sums depend on the number of threads in their last bits, so a run says how many it uses.
            torch.set_num_threads(config.threads)
        self.federation = federation.to(self.device) if fits(federation, self.device, config.resident) else federation
        self._nets = build_nets(method, federation, config).to(self.device)
        self.layout = Layout.of(self._nets, method.personal)
        self._shared, self._personal, _ = self.layout.pack(self._nets)
        self.layout.bind(self._nets, self._shared, self._personal)
        self._counters = self.layout.integer_buffers(self._nets)  # found once: the search takes as long as a copy
        self._received = copy.deepcopy(self._nets).requires_grad_(False).eval()
        self._received_shared: Tensor | None = None
        self._received_personal = self._personal.clone()
        self._batches = BatchMaker.of(method, self.federation, config, self.device)

    def nets(self) -> Nets:
        """A fresh, independent set of nets with the start weights of the run."""
        return build_nets(self.method, self.federation, self.config).to(self.device)

    def survey(self, server: ServerState, clients: Sequence[ClientState], round: int) -> list[Survey]:
        """What the clients answer at the received weights before training; [] where the method asks nothing."""
        if not self.method.surveys:
            return []
        answers = []
        for client in clients:
            ctx = self._arrive(server, client, round, ())
            self._nets.eval()
            sums: dict[str, Tensor] = {}
            for indices in torch.split(client.indices.to(self.device), self.config.batch_size):
                batch = self.method.embed(self._nets, self._batches.plain(indices))
                for name, value in self.method.survey(self._nets, batch, ctx).items():
                    sums[name] = sums[name] + value.detach() if name in sums else value.detach()
            if sums:
                answers.append(Survey(client.id, self._weight(client), sums))
        return answers

    def train(self, server: ServerState, clients: Sequence[ClientState], round: int) -> Iterator[Update]:
        """Local training of each client in turn; a client's state is replaced, never written into."""
        for client in clients:
            yield self._train_client(server, client, round)

    def _train_client(self, server: ServerState, client: ClientState, round: int) -> Update:
        phases = self.method.phases(round, self.config.rounds, self.config.local_epochs)
        ctx = self._arrive(server, client, round, phases[0].groups if phases else ())
        order = generator(self.config.seed, round, client.id, "order")
        own = client.indices.to(self.device)
        bind_dropout(self._nets, ctx.rng("dropout"))
        totals: dict[str, Tensor] = {}
        steps: dict[str, int] = {}
        # A user's net may draw from torch's global generator; it too must depend on (seed, round, client) alone.
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(derive_seed(self.config.seed, round, client.id, "global"))
            for phase in phases:
                ctx = _in_phase(ctx, phase)
                optimisers = self._optimisers(phase, client)
                for _ in range(phase.epochs):
                    for positions in epoch_positions(len(own), self.config, order):
                        batch = self._batches.training(own[positions.to(self.device)], own, ctx.rng)
                        losses = local_step(self.method, self._nets, batch, ctx, optimisers)
                        for group, loss in losses.items():
                            totals[group] = totals[group] + loss if group in totals else loss
                            steps[group] = steps.get(group, 0) + 1
                if self.config.keep_momentum:
                    client.optimiser = {**client.optimiser, **_momentum(optimisers)}
            self._nets.eval()
            with torch.no_grad():
                # The plain batches are made as `finish` asks for them: most methods never do.
                parts = torch.split(own, self.config.batch_size)
                plain = (self.method.embed(self._nets, self._batches.plain(part)) for part in parts)
                extra, memory = self.method.finish(self._nets, plain, ctx)
        client.memory, client.personal = memory, self._personal.clone()
        return Update(
            client=client.id,
            weight=self._weight(client),
            shared=self._shared.clone(),
            extra=extra,
            integers={name: counter.clone() for name, counter in self._counters.items()},
            losses={group: float(total) / steps[group] for group, total in totals.items()},
        )

    def _arrive(self, server: ServerState, client: ClientState, round: int, groups: tuple[str, ...]) -> Context:
        """The server's values and the client's own in the nets, and what the client may know."""
        self._shared.copy_(server.shared)
        self._personal.copy_(client.personal)
        for name, counter in self._counters.items():
            counter.copy_(server.integers[name])
        self._received_personal.copy_(client.personal)
        if self._received_shared is not server.shared:  # once a round, for binding takes as long as copying
            self.layout.bind(self._received, server.shared, self._received_personal)
            self._received_shared = server.shared
        return Context(
            round=round,
            rounds=self.config.rounds,
            groups=groups,
            class_counts=client.class_counts.to(self.device),
            received=self._received,
            server=server.extra,
            memory=client.memory,
            rng=Streams(self.config.seed, round, client.id, device=self.device),
        )

    def _optimisers(self, phase: Phase, client: ClientState) -> dict[str, GroupOptimiser]:
        """Nets that learn in this phase in train mode with gradients, all others in eval mode without."""
        learning = {name for group in phase.groups for name in self.method.groups[group]}
        for name in sorted(self._nets, key=learning.__contains__):  # last those that learn, for nets may be tied
            self._nets[name].train(name in learning).requires_grad_(name in learning)
        default = Optimiser(self.config.lr, self.config.momentum, self.config.weight_decay)
        optimisers = {}
        for group in phase.groups:
            parameters = [p for name in self.method.groups[group] for p in self._nets[name].parameters()]
            kept = {k: v for k, v in client.optimiser.items() if k.startswith(f"{group}/")}
            optimisers[group] = GroupOptimiser(parameters, self.method.optimiser(group, default), kept)
        return optimisers

    def _weight(self, client: ClientState) -> float:
        if self.config.weighting == "batches":
            return float(steps_per_epoch(len(client.indices), self.config))
        return float(len(client.indices))


@final
class GroupOptimiser:
    """torch's optimiser for one parameter group, fed with gradients instead of `.grad` left by a backward pass."""

    def __init__(self, parameters: list[nn.Parameter], spec: Optimiser, kept: Mapping[str, Tensor]) -> None:
        self.parameters, self._clip = parameters, spec.clip
        self._inner: torch.optim.Optimizer
        if spec.kind == "adam":
            self._inner = torch.optim.Adam(parameters, lr=spec.lr, weight_decay=spec.weight_decay)
        else:
            self._inner = torch.optim.SGD(
                parameters, lr=spec.lr, momentum=spec.momentum, weight_decay=spec.weight_decay
            )
        for key, value in kept.items():
            self._inner.state[parameters[int(key.split("/")[1])]] = {"momentum_buffer": value.clone()}

    def step(self, gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        if self._clip > 0:
            nn.utils.clip_grad_norm_(self.parameters, self._clip)
        self._inner.step()
        self._inner.zero_grad(set_to_none=True)

    def momentum(self) -> dict[int, Tensor]:
        """The momentum of each parameter that has one, by position."""
        found = {}
        for position, parameter in enumerate(self.parameters):
            buffer = self._inner.state.get(parameter, {}).get("momentum_buffer")
            if buffer is not None:
                found[position] = buffer.clone()
        return found


def local_step(
    method: Method, nets: Nets, batch: Batch, ctx: Context, optimisers: Mapping[str, GroupOptimiser]
) -> dict[str, Tensor]:
    """One local step: embed once, one loss a group, gradients of each loss for its own group only, then all steps."""
    losses = method.losses(nets, method.embed(nets, batch), ctx)
    groups = list(optimisers)
    gradients = {
        group: torch.autograd.grad(
            losses[group],
            optimisers[group].parameters,
            retain_graph=group != groups[-1],
            allow_unused=True,
            materialize_grads=True,
        )
        for group in groups
    }
    for group in groups:
        optimisers[group].step(gradients[group])
    return {group: losses[group].detach() for group in groups}


def _in_phase(ctx: Context, phase: Phase) -> Context:
    return Context(**{**ctx.__dict__, "groups": phase.groups})


def _momentum(optimisers: Mapping[str, GroupOptimiser]) -> dict[str, Tensor]:
    return {
        f"{group}/{position}": value
        for group, optimiser in optimisers.items()
        for position, value in optimiser.momentum().items()
    }
