"""The reference engine: one client after the other, on any device. Every other engine must agree with it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, final

import torch
from torch import Tensor, nn

from ..config import Config
from ..core.errors import InputError
from ..core.flat import Layout, ServerNets
from ..core.learning import learnable, note_frozen, set_learning, with_learners
from ..core.random import Streams, derive_seed, generator
from ..core.types import Batch, ClientState, Context, Missing, Nets, Optimiser, Phase, Rng, ServerState, Survey, Update
from ..data.federation import Federation
from ..methods.base import HINT, Method, need_losses
from ..nets import make_backbone
from ..nets.dropout import bind_dropout
from ..nets.precision import in_bf16, resolve_precision
from .batches import BatchMaker, epoch_positions, steps_per_epoch


class Engine(Protocol):
    """Runs the clients' part of a round."""

    method: Method
    federation: Federation
    config: Config
    layout: Layout

    def nets(self) -> Nets: ...

    def server_nets(self) -> ServerNets: ...

    def pretrain(self, nets: Nets) -> None: ...

    def personalise(self, server: ServerState, clients: Sequence[ClientState]) -> list[ClientState]: ...

    def survey(self, server: ServerState, clients: Sequence[ClientState], round: int) -> Iterable[Survey | Missing]: ...

    def train(self, server: ServerState, clients: Sequence[ClientState], round: int) -> Iterator[Update | Missing]: ...


class Task(Protocol):
    """What nets are built for, a federation as a rule."""

    @property
    def shape(self) -> tuple[int, int, int]: ...

    @property
    def num_classes(self) -> int: ...


def build_nets(method: Method, task: Task, config: Config) -> Nets:
    """A method's nets with start weights that depend on the seed and on nothing else."""
    streams = Streams(config.seed, "init")
    backbone = make_backbone(config.backbone, task.shape, streams("backbone"))
    backbone.image_shape = task.shape  # type: ignore[assignment]  # for methods that make images themselves
    nets = method.build(backbone, task.num_classes, streams)
    note_frozen(nets)
    return nets


def resolve_device(name: str) -> torch.device:
    """The device of a run: `auto` takes the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def usable_device(name: str) -> torch.device:
    """The device of a run, which must be there."""
    device = resolve_device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device = {name!r} is not possible: torch finds no GPU here; use auto or cpu")
    return device


def fits(federation: Federation, device: torch.device, resident: str) -> bool:
    """Whether the images live on the device; `auto` leaves at least half of a GPU's free memory to training."""
    if device.type != "cuda" or resident != "auto":
        return resident != "host"
    return federation.bytes <= torch.cuda.mem_get_info(device)[0] / 2


@final
class EagerEngine:
    """Trains clients one by one on one set of nets whose values live in one flat row."""

    def __init__(self, method: Method, federation: Federation, config: Config, *, graphs: bool = False) -> None:
        """With `graphs` it serves an engine that records its steps, and its precision is that engine's."""
        self.method, self.config = method, config
        self.device = usable_device(config.device)
        if self.device.type == "cpu":
            # Sums depend on the number of threads in their last bits, so a run says how many it uses.
            torch.set_num_threads(config.threads)
        self.federation = federation.to(self.device) if fits(federation, self.device, config.resident) else federation
        self.precision = resolve_precision(config.precision, self.device, graphs=graphs)
        self._nets = self.training_nets()
        self.layout = Layout.of(self._nets, method.private_names(self._nets).__contains__, method.frozen)
        self._shared, self._personal, _ = self.layout.pack(self._nets)
        self._frozen = self.layout.pack_frozen(self._nets)
        self.layout.bind(self._nets, self._shared, self._personal, self._frozen)
        self._counters = self.layout.integer_buffers(self._nets)  # found once: the search takes as long as a copy
        self._received = copy.deepcopy(self._nets).requires_grad_(False).eval()
        self._received_shared: Tensor | None = None
        self._received_frozen: Tensor | None = None
        self._received_personal = self._personal.clone()
        self.batches = BatchMaker.of(method, self.federation, config, self.device)

    def nets(self) -> Nets:
        """A fresh, independent set of nets with the start weights of the run, in float32: for tests and for use."""
        return build_nets(self.method, self.federation, self.config).to(self.device)

    def training_nets(self) -> Nets:
        """The same in the precision of local steps."""
        nets = self.nets()
        if self.precision == "bf16":
            in_bf16(nets["backbone"])
        return nets

    def server_nets(self) -> ServerNets:
        """Nets for the server's own work."""
        return ServerNets(self.nets, self.layout)

    def pretrain(self, nets: Nets) -> None:
        """Let the method's server train on all images before round 1, where the method says that it does."""
        if not self.method.pools_data:
            return
        everyone = torch.cat([own.to(self.device) for own in self.federation.train_indices])
        order = generator(self.config.seed, "pretrain", "order")
        rng = Streams(self.config.seed, "pretrain", device=self.device)

        def epoch() -> Iterable[Batch]:
            for positions in epoch_positions(len(everyone), self.config, order):
                yield self.batches.training(everyone[positions.to(self.device)], everyone, rng)

        counts = torch.bincount(self.federation.train.labels[everyone], minlength=self.federation.num_classes)
        ctx = Context(
            round=0, rounds=self.config.rounds, groups=(), class_counts=counts.float(), received=nets, server={},
            memory={}, rng=rng, mean=self.batches.mean, std=self.batches.std, optimiser=self._default(),
        )  # fmt: skip
        self.method.pretrain(nets, epoch, ctx)

    def personalise(self, server: ServerState, clients: Sequence[ClientState]) -> list[ClientState]:
        """The clients with their private nets trained on the final model; the server's values stay as they are."""
        phases = with_learners(self.method.before_test(), self.method.groups, self._nets)
        if not phases:
            return list(clients)
        ready = []
        for client in clients:
            if len(client.indices):
                ctx = self._arrive(server, client, server.round, phases, "before_test")
                order = generator(self.config.seed, server.round, client.id, "before_test", "order")
                self._learn(replace(client), phases, ctx, order)
                client = replace(client, personal=self._personal.clone())
            ready.append(client)
        return ready

    @torch.no_grad()
    def survey(self, server: ServerState, clients: Sequence[ClientState], round: int) -> Iterator[Survey]:
        """What the clients answer at the received weights before training; nothing where the method asks nothing."""
        for client in clients if self.method.surveys else ():
            ctx = self._arrive(server, client, round)
            self._nets.eval()
            sums: dict[str, Tensor] = {}
            size = self.config.eval_batch if self.method.surveys_samples else self.config.batch_size
            for indices in torch.split(client.indices.to(self.device), size):
                batch = self.method.embed(self._nets, self.batches.plain(indices))
                for name, value in self.method.survey(self._nets, batch, ctx).items():
                    sums[name] = sums[name] + value if name in sums else value
            if sums:
                yield Survey(client.id, self.weight(client), sums)

    def train(self, server: ServerState, clients: Sequence[ClientState], round: int) -> Iterator[Update]:
        """Local training of each client in turn; a client's state is replaced, never written into."""
        for client in clients:
            yield self._train_client(server, client, round)

    def _train_client(self, server: ServerState, client: ClientState, round: int) -> Update:
        phases = self.phases(round)
        ctx = self._arrive(server, client, round, phases)
        losses = self._learn(client, phases, ctx, generator(self.config.seed, round, client.id, "order"))
        self._nets.eval()
        with torch.no_grad():
            # The plain batches are made as `finish` asks for them: most methods never do.
            parts = torch.split(client.indices.to(self.device), self.config.batch_size)
            extra, memory = self.method.finish(self._nets, map(self.batches.plain, parts), ctx)
        client.memory, client.personal = memory, self._personal.clone()
        return Update(
            client=client.id,
            weight=self.weight(client),
            shared=self._shared.clone(),
            extra=extra,
            integers={name: counter.clone() for name, counter in self._counters.items()},
            losses=losses,
        )

    def _learn(
        self, client: ClientState, phases: Sequence[Phase], ctx: Context, order: torch.Generator
    ) -> dict[str, float]:
        """The local steps of all phases on the nets as they are; the mean of each loss over its steps."""
        own = client.indices.to(self.device)
        bind_dropout(self._nets, ctx.rng("dropout"))
        totals: dict[str, Tensor] = {}
        # A user's net may draw from torch's global generator; it too must depend on (seed, round, client) alone.
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(derive_seed(self.config.seed, ctx.round, client.id, "global"))
            for phase in phases:
                ctx = replace(ctx, groups=phase.groups)
                optimisers = self.optimisers(self._nets, phase, client.optimiser)
                for _ in range(phase.epochs):
                    for positions in epoch_positions(len(own), self.config, order):
                        batch = self.batches.training(own[positions.to(self.device)], own, ctx.rng)
                        losses = local_step(self.method, self._nets, batch, ctx, optimisers, received=phase.received)
                        for group, loss in losses.items():
                            totals[group] = totals[group] + loss if group in totals else loss
                if self.config.keep_momentum:
                    client.optimiser = {**client.optimiser, **momentum_of(optimisers)}
        return {group: float(total) / ctx.steps[group] for group, total in totals.items()}

    def try_step(self, server: ServerState, client: ClientState) -> None:
        """One local step of each phase of the first round, to see what a method does before a run begins."""
        phases = self.phases(0)
        ctx = self._arrive(server, client, 0, phases)
        own = client.indices.to(self.device)
        bind_dropout(self._nets, ctx.rng("dropout"))
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            for phase in phases:
                optimisers = self.optimisers(self._nets, phase, client.optimiser)
                batch = self.batches.training(own[: self.config.batch_size], own, ctx.rng)
                step = replace(ctx, groups=phase.groups)
                local_step(self.method, self._nets, batch, step, optimisers, received=phase.received)

    def _arrive(
        self, server: ServerState, client: ClientState, round: int, phases: Sequence[Phase] = (), *purpose: str
    ) -> Context:
        """The server's values and the client's own in the nets, and what the client may know."""
        self._shared.copy_(server.shared)
        self._personal.copy_(client.personal)
        for name, counter in self._counters.items():
            counter.copy_(server.integers[name])
        self._received_personal.copy_(client.personal)
        if self._received_shared is not server.shared:  # once a round, for binding takes as long as copying
            self.layout.bind(self._received, server.shared, self._received_personal, self._frozen)
            self._received_shared = server.shared
        if self._received_frozen is not server.frozen:
            self._frozen.copy_(server.frozen)
            self._received_frozen = server.frozen
        rng = Streams(self.config.seed, round, client.id, *purpose, device=self.device)
        class_counts = client.class_counts.to(self.device)
        ctx = self.context(round, self._received, server.extra, client.memory, rng, class_counts)
        return replace(ctx, groups=phases[0].groups if phases else (), steps=self.steps(client, phases))

    def context(
        self,
        round: int,
        received: Nets,
        server: Mapping[str, Tensor],
        memory: Mapping[str, Tensor],
        rng: Rng,
        class_counts: Tensor,
    ) -> Context:
        """What a client may know, before it is clear what it does."""
        return Context(
            round=round,
            rounds=self.config.rounds,
            groups=(),
            class_counts=class_counts,
            received=received,
            server=server,
            memory=memory,
            rng=rng,
            mean=self.batches.mean,
            std=self.batches.std,
            optimiser=self._default(),
        )

    def phases(self, round: int) -> list[Phase]:
        """The local training of a round."""
        phases = self.method.phases(round, self.config.rounds, self.config.local_epochs)
        return with_learners(phases, self.method.groups, self._nets)

    def steps(self, client: ClientState, phases: Sequence[Phase]) -> dict[str, int]:
        """How many local steps each group takes in these phases."""
        epoch, steps = steps_per_epoch(len(client.indices), self.config), dict[str, int]()
        for phase in phases:
            steps |= {group: steps.get(group, 0) + phase.epochs * epoch for group in phase.groups}
        return steps

    def _default(self) -> Optimiser:
        return Optimiser(self.config.lr, self.config.momentum, self.config.weight_decay)

    def optimisers(self, nets: Nets, phase: Phase, kept: Mapping[str, Tensor]) -> dict[str, GroupOptimiser]:
        """The optimisers of a phase, on nets in the modes of the phase."""
        self.set_modes(nets, phase)
        optimisers = {}
        for group in phase.groups:
            parameters = [p for name in self.method.groups[group] for p in learnable(nets[name])]
            own = {k: v for k, v in kept.items() if k.startswith(f"{group}/")}
            spec = self.method.optimiser(group, self._default())
            # On a GPU the arithmetic is that of steps which can be recorded, so that both engines agree.
            optimisers[group] = GroupOptimiser(parameters, spec, own, capturable=self.device.type == "cuda")
        return optimisers

    def set_modes(self, nets: Nets, phase: Phase) -> None:
        """Nets that learn in this phase in train mode with gradients, all others in eval mode without."""
        learning = {name for group in phase.groups for name in self.method.groups[group]}
        for name in sorted(nets, key=learning.__contains__):  # last those that learn, for nets may be tied
            set_learning(nets[name], name in learning)

    def weight(self, client: ClientState) -> float:
        """The client's weight in the mean."""
        return self.method.weight(float(len(client.indices)))


@final
class GroupOptimiser:
    """torch's optimiser for one parameter group, fed with gradients instead of `.grad` left by a backward pass."""

    def __init__(
        self, parameters: list[nn.Parameter], spec: Optimiser, kept: Mapping[str, Tensor], *, capturable: bool = False
    ) -> None:
        self.parameters, self._clip, self._capturable = parameters, spec.clip, capturable
        self._inner: torch.optim.Optimizer
        if spec.kind == "adam":
            self._inner = torch.optim.Adam(
                parameters, lr=spec.lr, betas=spec.betas, weight_decay=spec.weight_decay, capturable=capturable
            )
        else:
            self._inner = torch.optim.SGD(
                parameters, lr=spec.lr, momentum=spec.momentum, weight_decay=spec.weight_decay, fused=capturable or None
            )
        for key, value in kept.items():
            self._inner.state[parameters[int(key.split("/")[1])]] = {"momentum_buffer": value.clone()}

    def step(self, gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            # The fused step wants gradients that lie in memory as their parameters do.
            same = not self._capturable or gradient.stride() == parameter.stride()
            parameter.grad = gradient if same else torch.empty_like(parameter).copy_(gradient)
        if self._clip > 0:
            nn.utils.clip_grad_norm_(self.parameters, self._clip)
        self._inner.step()
        self._inner.zero_grad(set_to_none=True)

    def restart(self, kept: Mapping[str, Tensor]) -> None:
        """The state as before the first step, in the tensors that a captured step uses: zeros, or the kept momentum."""
        momentum = {int(key.split("/")[1]): value for key, value in kept.items()}
        for position, parameter in enumerate(self.parameters):
            for name, value in self._inner.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    if name == "momentum_buffer" and position in momentum:
                        value.copy_(momentum[position])
                    else:
                        value.zero_()

    def momentum(self) -> dict[int, Tensor]:
        """The momentum of each parameter that has one, by position."""
        found = {}
        for position, parameter in enumerate(self.parameters):
            buffer = self._inner.state.get(parameter, {}).get("momentum_buffer")
            if buffer is not None:
                found[position] = buffer.clone()
        return found


def local_step(
    method: Method,
    nets: Nets,
    batch: Batch,
    ctx: Context,
    optimisers: Mapping[str, GroupOptimiser],
    *,
    received: bool = False,
) -> dict[str, Tensor]:
    """One local step: embed once, one loss a group, gradients of each loss for its own group only, then all steps.

    With `received` the features are those of the nets as they arrived.
    """
    body = ctx.received if received else nets
    groups = list(optimisers)
    found = method.losses(nets, method.embed(body, method.extend(body, batch, ctx)), ctx)
    losses = need_losses(method, found, groups)
    for group in groups:
        if not losses[group].requires_grad:
            name = type(method).__name__
            raise InputError(f"the method {name} cannot be trained: the loss of {group!r} has no gradient; {HINT}")
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


def momentum_of(optimisers: Mapping[str, GroupOptimiser]) -> dict[str, Tensor]:
    """The momentum of all groups by group and position."""
    return {
        f"{group}/{position}": value
        for group, optimiser in optimisers.items()
        for position, value in optimiser.momentum().items()
    }
