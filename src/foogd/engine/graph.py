"""The fast engine: a client's whole local step is one CUDA graph, and several clients train at once, each in a slot.

A slot owns nets whose values are views into its rows, optimisers, random streams, a block of batch indices with a
counter on the device, and one graph a kind of phase, captured on the slot's own stream. For a client the host copies
the server's row in, zeroes the optimisers, seeds the streams and replays; it waits once for all clients. What is
computed is the eager engine's `local_step`; results do not depend on the number of slots.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast, final

import torch
from torch import Tensor

from ..config import Config
from ..core.flat import SHARED, ServerNets, Slice
from ..core.random import derive_seed, generator
from ..core.types import ClientState, Context, Nets, Phase, ServerState, Survey, Update
from ..data.federation import Federation
from ..methods.base import Method
from ..nets.dropout import bind_dropout
from .batches import epoch_positions, steps_per_epoch
from .eager import EagerEngine, fits, local_step, momentum_of, resolve_device, usable_device

if TYPE_CHECKING:
    from jaxtyping import Int

WARM_UP = 3  # eager steps before a capture: they create the optimisers' state and let cuDNN choose its kernels
KEPT_BYTES = 2**31  # rows of finished clients that wait for their turn in the mean


@final
class SlotStreams:
    """Random streams that live as long as their slot, as a graph needs them, and are seeded for each client."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._parts = device, cast(tuple[int | str, ...], (0,))
        self.streams: dict[str, torch.Generator] = {}

    def __call__(self, purpose: str) -> torch.Generator:
        if purpose not in self.streams:
            self.streams[purpose] = torch.Generator(device=self._device)
            self._seed(purpose)
        return self.streams[purpose]

    def become(self, *parts: int | str) -> None:
        """From now on the streams of (seed, round, client), from their start."""
        self._parts = parts
        self.restart()

    def restart(self) -> None:
        """All streams from their start again, as if nothing had been drawn."""
        for purpose in self.streams:
            self._seed(purpose)

    def _seed(self, purpose: str) -> None:
        seed, *rest = self._parts
        self.streams[purpose].manual_seed(derive_seed(int(seed), *rest, purpose))


@final
class Arrangement:
    """The order of a slot's row: under bf16 convolutions want their weights channels last, so those values are so.

    Weights, gradients and optimisers then have one layout, and no step converts between two.
    """

    def __init__(self, engine: EagerEngine) -> None:
        self._slices: list[tuple[str, Slice]] = []
        if engine.precision == "bf16":
            for name, place in engine.layout.slices.items():
                if place.row == SHARED and name.startswith("backbone.") and len(place.shape) == 4:
                    self._slices.append((name, place))
        self._order: Tensor | None = None
        if self._slices:
            self._order = torch.arange(engine.layout.shared_size, device=engine.device)
            for _, place in self._slices:
                own = self._order[place.offset : place.stop].clone().view(place.shape)
                self._order[place.offset : place.stop] = own.permute(0, 2, 3, 1).reshape(-1)
            self._back = torch.argsort(self._order)

    def bind(self, nets: Nets, row: Tensor) -> None:
        """Make the weights that are stored channels last views of their part of the row."""
        named = dict(nets.named_parameters())
        for name, place in self._slices:
            out, fan_in, height, width = place.shape
            part = row[place.offset : place.stop].view(out, height, width, fan_in).permute(0, 3, 1, 2)
            named[name].data = part.data

    def of(self, row: Tensor) -> Tensor:
        """The server's row in the order of a slot."""
        return row if self._order is None else row[self._order]

    def back(self, row: Tensor) -> Tensor:
        """A copy of a slot's row in the order of the server."""
        return row.clone() if self._order is None else row[self._back]


@final
class Slot:
    """One place where a client can train while others do the same."""

    def __init__(self, engine: EagerEngine, arrangement: Arrangement, most_steps: int, most_samples: int) -> None:
        self._engine, device = engine, engine.device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        layout = engine.layout
        self.nets = engine.training_nets()
        self.shared, self.personal, _ = layout.pack(self.nets)
        self.frozen = layout.pack_frozen(self.nets)
        layout.bind(self.nets, self.shared, self.personal, self.frozen)
        arrangement.bind(self.nets, self.shared)
        self.counters, self.counter_row = in_one_row(layout.integer_buffers(self.nets))
        self.received = copy.deepcopy(self.nets).requires_grad_(False).eval()
        self.received_shared, self.received_personal = self.shared.clone(), self.personal.clone()
        layout.bind(self.received, self.received_shared, self.received_personal, self.frozen)
        arrangement.bind(self.received, self.received_shared)
        _, self.received_counter_row = in_one_row(layout.integer_buffers(self.received))
        self.rng = SlotStreams(device)
        bind_dropout(self.nets, self.rng("dropout"))
        batch = engine.config.batch_size
        self.block = torch.zeros(most_steps, batch, dtype=torch.int64, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.own = torch.zeros(most_samples, dtype=torch.int64, device=device)
        self.samples = torch.ones((), dtype=torch.int64, device=device)
        self.class_counts = torch.ones(engine.federation.num_classes, device=device)
        self.server: dict[str, Tensor] = {}
        self.memory: dict[str, Tensor] = {}
        self._places: dict[Hashable, Tensor] = {}
        self._graphs: dict[Kind, Captured] = {}

    def on(self) -> AbstractContextManager[Any]:
        """What is launched inside goes to the slot's own stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def arrive(self, server: ServerState, sent: Sent, client: ClientState, round: int) -> Context:
        """The server's values and the client's own, and what the client may know."""
        self.shared.copy_(sent.row)
        self.frozen.copy_(server.frozen)
        self.personal.copy_(client.personal)
        self.received_shared.copy_(sent.row)
        self.received_personal.copy_(client.personal)
        self.counter_row.copy_(sent.counters)
        self.received_counter_row.copy_(sent.counters)
        self.server, self.memory = self._keep("server", server.extra), self._keep("memory", client.memory)
        self.class_counts.copy_(client.class_counts)
        self.own[: len(client.indices)].copy_(client.indices)
        self.samples.fill_(len(client.indices))
        self.rng.become(self._engine.config.seed, round, client.id)
        return self._engine.context(round, self.received, self.server, self.memory, self.rng, self.class_counts)

    def _keep(self, part: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values in tensors that stay where they are for good, as any graph of the slot may read them."""
        found = {}
        for name, value in values.items():
            key = (part, name, value.shape, value.dtype)
            if key not in self._places:
                self._places[key] = torch.empty_like(value)
            found[name] = self._places[key].copy_(value)
        return found

    def captured(self, phase: Phase, ctx: Context) -> Captured:
        """The graph of a step of this phase; recorded where the slot has none that fits."""
        round = ctx.round if self._engine.method.reads_round else None
        kind = Kind(phase.groups, phase.received, signature(self.server), signature(self.memory), round)
        if kind not in self._graphs:
            self._graphs = {other: found for other, found in self._graphs.items() if other.round == round}
            self._graphs[kind] = Captured(self._engine, self, phase, ctx)
        return self._graphs[kind]


class Sent(NamedTuple):
    """What the server sends to all clients of a round, as slots take it in: one copy each."""

    row: Tensor  # in the order of a slot
    counters: Tensor  # all integer buffers

    @classmethod
    def of(cls, server: ServerState, arrangement: Arrangement, names: Iterable[str]) -> Sent:
        flat = [server.integers[name].reshape(-1).to(server.shared.device, torch.int64) for name in names]
        counters = torch.cat(flat) if flat else torch.empty(0, dtype=torch.int64, device=server.shared.device)
        return cls(arrangement.of(server.shared), counters)


def in_one_row(buffers: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Integer buffers of nets as views of one row, so that all of them are copied at once: there may be hundreds."""
    if any(buffer.dtype != torch.int64 for buffer in buffers.values()):
        raise CannotCapture("it has integer buffers of another type than int64")
    flat = [buffer.reshape(-1) for buffer in buffers.values()]
    row = torch.cat(flat) if flat else torch.empty(0, dtype=torch.int64)
    views, start = {}, 0
    for name, buffer in buffers.items():
        views[name] = row[start : start + buffer.numel()].view(buffer.shape)
        buffer.data = views[name]
        start += buffer.numel()
    return views, row


def views_of(row: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parts of a row of integer buffers by name."""
    if all(value.ndim == 0 for value in like.values()):
        return dict(zip(like, row.unbind(), strict=True))  # one call: there may be hundreds
    parts = torch.split(row, [value.numel() for value in like.values()])
    return {name: part.view(value.shape) for (name, value), part in zip(like.items(), parts, strict=True)}


Signature = tuple[tuple[str, torch.Size, torch.dtype], ...]


def signature(values: Mapping[str, Tensor]) -> Signature:
    """Names, shapes and types: what a graph that reads these values depends on besides the values."""
    return tuple((name, value.shape, value.dtype) for name, value in values.items())


class Kind(NamedTuple):
    """What two local steps must have in common to be the same graph."""

    groups: tuple[str, ...]
    received: bool
    server: Signature
    memory: Signature
    round: int | None  # None: the method does not read it


@final
class Captured:
    """One kind of local step of a slot as a graph, with its optimisers and the sums of its losses."""

    def __init__(self, engine: EagerEngine, slot: Slot, phase: Phase, ctx: Context) -> None:
        self._engine, self._slot, self._phase = engine, slot, phase
        self.optimisers = engine.optimisers(slot.nets, phase, {})
        self.totals = {group: torch.zeros((), device=engine.device) for group in phase.groups}
        kept = slot.shared.clone(), slot.personal.clone()
        counters = slot.counter_row.clone()
        seen = guarded(ctx, reads_round=engine.method.reads_round)

        def step() -> None:
            indices = slot.block.index_select(0, slot.step).view(-1)
            batch = engine.batches.training(indices, slot.own, slot.rng, slot.samples)
            losses = local_step(engine.method, slot.nets, batch, seen, self.optimisers, received=phase.received)
            for group, loss in losses.items():
                self.totals[group].add_(loss)
            slot.step.add_(1)

        trial = torch.arange(slot.block.numel(), device=engine.device) % slot.samples
        slot.block.copy_(slot.own[trial].view_as(slot.block))
        before = _global_states(engine.device)
        for _ in range(WARM_UP):
            slot.step.zero_()
            step()
        if any(not torch.equal(old, new) for old, new in zip(before, _global_states(engine.device), strict=True)):
            raise CannotCapture("its nets draw from torch's global generator, which slots would share")
        slot.step.zero_()
        self.replay: Callable[[], None] = step
        if engine.device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            for stream in slot.rng.streams.values():
                graph.register_generator_state(stream)
            torch.cuda.synchronize(engine.device)
            with torch.cuda.graph(graph, pool=slot.pool, stream=slot.stream):
                step()
            self.replay = graph.replay
            slot.nets.eval()  # what is replayed does not look at modes, and setting them takes as long as a step
        # The trial steps leave no trace: a client whose turn it is goes on as if there had been none.
        slot.rng.restart()
        slot.shared.copy_(kept[0])
        slot.personal.copy_(kept[1])
        slot.counter_row.copy_(counters)

    def begin(self, block: Int[Tensor, "steps b"], kept: Mapping[str, Tensor]) -> None:
        """Everything as at the first step of a phase, with these batches to come."""
        if self._engine.device.type != "cuda":
            self._engine.set_modes(self._slot.nets, self._phase)
        self._slot.block[: len(block)].copy_(block)
        self._slot.step.zero_()
        for total in self.totals.values():
            total.zero_()
        for group, optimiser in self.optimisers.items():
            optimiser.restart({k: v for k, v in kept.items() if k.startswith(f"{group}/")})


class GuardedContext(Context):
    """A context whose steps, and whose round unless the method says that it reads it, may not be looked at.

    They differ from client to client and from round to round, but a graph keeps what it saw when it was recorded.
    """

    guarded: frozenset[str]

    def __getattribute__(self, name: str) -> Any:
        values = object.__getattribute__(self, "__dict__")
        if name in ("round", "steps") and name in values.get("guarded", ()):
            hint = " (Method.reads_round)" if name == "round" else ""
            raise CannotCapture(f"its losses read ctx.{name}, but it does not say so{hint}")
        return object.__getattribute__(self, name)


def guarded(ctx: Context, *, reads_round: bool) -> Context:
    """The context as a step that is recorded may see it."""
    copy = object.__new__(GuardedContext)
    copy.__dict__.update(ctx.__dict__)
    copy.__dict__["guarded"] = frozenset({"steps"} if reads_round else {"steps", "round"})
    return copy


def _global_states(device: torch.device) -> list[Tensor]:
    """The states of torch's global generators."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


class CannotCapture(RuntimeError):
    """Why a method's step cannot be a graph; the message names the operation."""


@final
class GraphEngine:
    """Trains several clients at once on one GPU by replaying graphs of the eager engine's step."""

    def __init__(
        self,
        method: Method,
        federation: Federation,
        config: Config,
        *,
        slots: int | None = None,
        rehearse: bool = False,
    ) -> None:
        """With `rehearse` the same schedule runs without recording anything, on any device: for tests without a GPU."""
        self.fallback = None if rehearse else why_not(federation, config)
        self.eager = EagerEngine(method, federation, config, graphs=self.fallback is None)
        self.method, self.config, self.layout = method, config, self.eager.layout
        self.federation, self.device = self.eager.federation, self.eager.device
        self._slots: list[Slot] = []
        self._count = slots or config.slots
        if self.device.type == "cuda" and not torch.backends.cudnn.deterministic:
            torch.backends.cudnn.benchmark = True  # shapes never change, so the fastest kernels are found once
        self._arrangement = Arrangement(self.eager)

    def nets(self) -> Nets:
        """A fresh, independent set of nets with the start weights of the run."""
        return self.eager.nets()

    def server_nets(self) -> ServerNets:
        """Nets for the server's own work."""
        return self.eager.server_nets()

    def pretrain(self, nets: Nets) -> None:
        """The server's training before round 1, step by step."""
        self.eager.pretrain(nets)

    def personalise(self, server: ServerState, clients: Sequence[ClientState]) -> list[ClientState]:
        """The clients with their private nets trained on the final model, step by step."""
        return self.eager.personalise(server, clients)

    def survey(self, server: ServerState, clients: Sequence[ClientState], round: int) -> Iterator[Survey]:
        """What the clients answer at the received weights before training."""
        return self.eager.survey(server, clients, round)

    def train(self, server: ServerState, clients: Sequence[ClientState], round: int) -> Iterator[Update]:
        """Local training of all clients; updates come in the order of `clients`."""
        if not clients:  # all were refused before training
            return
        if self.fallback is None:
            try:
                self._prepare(server, clients, round)
            except CannotCapture as error:
                self.fallback = str(error)
                self._slots = []
        if self.fallback is not None:
            yield from self.eager.train(server, clients, round)
            return
        row = max(1, server.shared.nbytes)
        window = max(len(self._slots), KEPT_BYTES // row)
        for start in range(0, len(clients), window):
            yield from self._train_some(server, clients[start : start + window], round)

    def _prepare(self, server: ServerState, clients: Sequence[ClientState], round: int) -> None:
        """Slots for the largest client, and a graph in each for every kind of phase of this round."""
        phases = self.eager.phases(round)
        most = max((len(own) for own in self.federation.train_indices), default=1)
        steps = max(1, *(phase.epochs for phase in phases)) * steps_per_epoch(most, self.config) if phases else 1
        if self._slots and len(self._slots[0].block) < steps:
            self._slots = []
        for _ in range(len(self._slots), min(self._count, len(clients))):
            self._slots.append(Slot(self.eager, self._arrangement, steps, most))
        sent = Sent.of(server, self._arrangement, self.layout.integer_names)
        self._synchronise()
        kinds = {signature(client.memory): client for client in clients}  # a client may have no memory yet
        for slot in self._slots:
            for client in kinds.values():
                with slot.on():
                    ctx = slot.arrive(server, sent, client, round)
                    for phase in phases:
                        if phase.epochs:
                            self._capture(slot, phase, ctx)
        self._synchronise()

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _capture(self, slot: Slot, phase: Phase, ctx: Context) -> Captured:
        try:
            return slot.captured(phase, replace(ctx, groups=phase.groups))
        except CannotCapture:
            raise
        except (RuntimeError, NotImplementedError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise CannotCapture(" ".join(str(error).split())) from error

    def _train_some(self, server: ServerState, clients: Sequence[ClientState], round: int) -> Iterator[Update]:
        """Clients onto slots, the longest first; one step of each slot in turn; one synchronisation at the end."""
        sent = Sent.of(server, self._arrangement, self.layout.integer_names)
        queues: list[list[ClientState]] = [[] for _ in self._slots]
        load = [0] * len(self._slots)
        for client in sorted(clients, key=lambda one: (-len(one.indices), one.id)):
            least = load.index(min(load))
            queues[least].append(client)
            load[least] += max(1, len(client.indices))
        done: dict[int, Callable[[], Update]] = {}
        running = []
        for slot, queue in zip(self._slots, queues, strict=True):
            if slot.stream is not None:
                slot.stream.wait_stream(torch.cuda.current_stream(self.device))
            running.append(self._work(slot, server, sent, queue, round, done))
        while running:
            running = [work for work in running if next(work, None) is not None]
        self._synchronise()
        for client in clients:
            yield done.pop(client.id)()

    def _work(
        self,
        slot: Slot,
        server: ServerState,
        sent: Sent,
        queue: Sequence[ClientState],
        round: int,
        done: dict[int, Callable[[], Update]],
    ) -> Iterator[bool]:
        """All steps of a slot's clients; hands back after each one, so that the host feeds all slots evenly."""
        phases = self.eager.phases(round)
        for client in queue:
            with slot.on():
                ctx = slot.arrive(server, sent, client, round)
                groups = phases[0].groups if phases else ()
                ctx = replace(ctx, groups=groups, steps=self.eager.steps(client, phases))
            order = generator(self.config.seed, round, client.id, "order")
            totals: dict[str, Tensor] = {}
            for phase in phases:
                if not phase.epochs:
                    continue
                epochs = [epoch_positions(len(client.indices), self.config, order) for _ in range(phase.epochs)]
                with slot.on():
                    # On the slot's stream like all that it reads: streams do not wait for each other.
                    block = client.indices[torch.cat(epochs).to(client.indices.device)]
                    captured = self._capture(slot, phase, ctx)
                    captured.begin(block, client.optimiser)
                for _ in range(len(block)):
                    with slot.on():
                        captured.replay()
                    yield True
                with slot.on():
                    for group, total in captured.totals.items():
                        totals[group] = totals[group] + total if group in totals else total.clone()
                    if self.config.keep_momentum:
                        client.optimiser = {**client.optimiser, **momentum_of(captured.optimisers)}
            with slot.on():
                done[client.id] = self._finished(slot, client, ctx, totals)

    def _finished(
        self, slot: Slot, client: ClientState, ctx: Context, totals: Mapping[str, Tensor]
    ) -> Callable[[], Update]:
        """The client's update; the losses are read once the device is done."""
        if self.device.type != "cuda":  # recorded steps leave the nets in eval mode
            slot.nets.eval()
        with torch.no_grad():
            parts = torch.split(client.indices.to(self.device), self.config.batch_size)
            extra, memory = self.method.finish(slot.nets, map(self.eager.batches.plain, parts), ctx)
        # What a method hands over may be the slot's own tensors, which the next client overwrites.
        extra = {name: value.clone() for name, value in extra.items()}
        client.memory = {name: value.clone() for name, value in memory.items()}
        client.personal = slot.personal.clone()
        shared = self._arrangement.back(slot.shared)
        integers = views_of(slot.counter_row.clone(), slot.counters)
        sums = torch.stack(list(totals.values())) if totals else None

        def update() -> Update:
            found = sums.tolist() if sums is not None else ()
            losses = {group: total / ctx.steps[group] for group, total in zip(totals, found, strict=True)}
            return Update(client.id, self.eager.weight(client), shared, extra, integers, losses)

        return update


def why_not(federation: Federation, config: Config) -> str | None:
    """Why this run cannot be captured at all, or None."""
    device = usable_device(config.device)
    if device.type != "cuda":
        return "graphs need a GPU"
    if not fits(federation, device, config.resident):
        return "the images stay on the host (resident)"
    return None


def make_engine(method: Method, federation: Federation, config: Config) -> EagerEngine | GraphEngine:
    """The engine that a configuration names; `auto` takes graphs where there is a GPU."""
    if config.engine == "graph" or (config.engine == "auto" and resolve_device(config.device).type == "cuda"):
        return GraphEngine(method, federation, config)
    return EagerEngine(method, federation, config)
