"""The round loop: a generator of round results, and the state that a run can be stopped and continued with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .config import Config
from .core.errors import InputError
from .core.random import Streams, generator
from .core.types import ClientState, Missing, ServerState, Survey, Update
from .data.federation import Federation
from .engine.aggregate import Bound, Drift, least_updates, make_fold, private_refusal, refusal, survey_refusal
from .engine.eager import Engine
from .engine.graph import make_engine
from .methods.base import Method


@dataclass(frozen=True)
class RunState:
    """Everything between two rounds: the server and every client."""

    server: ServerState
    clients: tuple[ClientState, ...]


@dataclass(frozen=True)
class RoundResult:
    """One finished round; `round` counts from 1."""

    round: int
    state: RunState
    participants: tuple[int, ...]
    losses: Mapping[str, float]  # weighted over the clients that counted
    refused: Mapping[int, str]  # client → why its update did not count
    seconds: float
    bytes_down: int
    bytes_up: int
    drift: Mapping[str, float] = field(default_factory=dict)  # net → distance of the clients' models from their mean
    spare: frozenset[int] = frozenset()  # those of the refused whose updates were only too few


def simulate(
    method: Method,
    federation: Federation,
    config: Config,
    engine: Engine | None = None,
    *,
    start: RunState | None = None,
) -> Iterator[RoundResult]:
    """Train for `config.rounds` rounds, or for what is left of them from `start`; yields after each round."""
    if config.init and start is None:
        raise InputError(f"init = {config.init!r} is for the command line: give simulate a start (initial_state)")
    need_updates(config, sum(len(indices) > 0 for indices in federation.train_indices))
    engine = engine or make_engine(method, federation, config)
    state = start or initial_state(engine)
    for round in range(state.server.round, config.rounds):
        result = run_round(engine, state, round)
        state = result.state
        yield result


def initial_state(
    engine: Engine,
    init: Mapping[str, Tensor] | None = None,
    private: Sequence[Mapping[str, Tensor]] = (),
    *,
    pretrain: bool = True,
) -> RunState:
    """The start of a run; `init` and `private` replace values by name, as from a finished run and its clients.

    Without `pretrain` the server's own training before round 1 is left out: for its shape, not for its values.
    """
    nets, layout, config = engine.nets(), engine.layout, engine.config
    if init is not None:
        _replace_values(nets.state_dict(), init)
    if pretrain:
        engine.pretrain(nets)
    shared, personal, integers = layout.pack(nets)
    rows = [personal.clone() for _ in engine.federation.train_indices]
    if private and layout.personal_size:
        if len(private) != len(rows):
            found, here = len(private), len(rows)
            raise InputError(f"the run to start from has private values of {found} clients, this one has {here}")
        for row, values in zip(rows, private, strict=True):
            for name, place in layout.named(shared, row).items():
                if name in values and name in layout.personal_names:
                    place.copy_(values[name])
    extra = engine.method.init_server(nets, Streams(config.seed, "server", "init", device=shared.device))
    clients = tuple(
        ClientState(
            id=client,
            personal=rows[client],
            indices=indices,
            class_counts=engine.federation.class_counts(client),
        )
        for client, indices in enumerate(engine.federation.train_indices)
    )
    server = ServerState(shared, extra, integers, frozen=layout.pack_frozen(nets), clients=len(clients))
    return RunState(server, clients)


def _replace_values(values: Mapping[str, Tensor], init: Mapping[str, Tensor]) -> None:
    used = {name: value for name, value in init.items() if name in values}
    wanted = (name for name, value in values.items() if name.startswith("backbone.") and value.is_floating_point())
    missing = [name for name in wanted if name not in used]
    if missing:
        raise InputError(f"the run to start from has no value for {missing[0]}: use the same backbone")
    for name, value in used.items():
        if value.shape != values[name].shape:
            raise InputError(
                f"{name} has shape {tuple(value.shape)} in the run to start from and {tuple(values[name].shape)} "
                "here: use the same backbone and data"
            )
        values[name].copy_(value)


def sample_clients(clients: Sequence[ClientState], share: float, seed: int, round: int) -> list[ClientState]:
    """The participants of a round in the order of their ids; clients without data never take part."""
    able = sorted((client for client in clients if len(client.indices) > 0), key=lambda client: client.id)
    if not able:
        raise InputError("no client has training data")
    if share >= 1:
        return able
    chosen = torch.randperm(len(able), generator=generator(seed, round, "participants"))[: round_size(len(able), share)]
    return [able[position] for position in sorted(chosen.tolist())]


def round_size(able: int, share: float) -> int:
    """How many clients of those with data take part in a round; halves go up, so evenness decides nothing."""
    return max(1, int(share * able + 0.5))


def need_updates(config: Config, able: int) -> None:
    """Complain where no round can have as many updates as the rule needs."""
    least, count = least_updates(config), round_size(able, config.participation)
    if count < least:
        raise InputError(
            f"aggregation = {config.aggregation!r} with trim = {config.trim:g} leaves out an update at each end and "
            f"needs {least} a round, but {able} clients with participation = {config.participation:g} send {count}: "
            "use more of them, trim = 0, mean or median"
        )


def surveyed(
    engine: Engine,
    server: ServerState,
    clients: Sequence[ClientState],
    round: int,
    heard: Callable[[int], None] | None = None,
) -> tuple[list[Survey], dict[int, str], int]:
    """The clients' answers before training that can be used, why the others cannot, and the bytes that were sent.

    `heard` is told whose answer has come.
    """
    answers: list[Survey] = []
    refused: dict[int, str] = {}
    sent = 0
    for answer in engine.survey(server, clients, round):
        if heard is not None:
            heard(answer.client)
        if isinstance(answer, Missing):
            refused[answer.client] = answer.reason
            continue
        sent += _bytes(*answer.sums.values())
        reason = survey_refusal(answer)
        if reason is None:
            answers.append(answer)
        else:
            refused[answer.client] = reason
    return answers, refused, sent


def settled(engine: Engine, state: RunState, heard: Callable[[int], None] | None = None) -> RunState:
    """The state as it is tested: what a method measures at the server's model is measured at this one.

    `heard` is told which client has measured.
    """
    if not engine.method.settles:
        return state
    able = sample_clients(state.clients, 1.0, engine.config.seed, state.server.round)
    answers, _, _ = surveyed(engine, state.server, able, state.server.round, heard)
    if not answers:
        return state
    return replace(state, server=engine.method.settle(state.server, answers, engine.server_nets()))


def run_round(engine: Engine, state: RunState, round: int) -> RoundResult:
    """One round: sample, survey, train, check, fold in the order of client ids, aggregate."""
    began = time.perf_counter()
    config, method, server = engine.config, engine.method, state.server
    # Engines replace the tensors of a client and never write into them, so a shallow copy keeps the old state.
    clients = {client.id: replace(client) for client in state.clients}
    participants = sample_clients(list(clients.values()), config.participation, config.seed, round)
    answers, refused, bytes_up = surveyed(engine, server, participants, round)
    server = method.begin(server, answers)
    if answers and method.settles:
        server = method.settle(server, answers, engine.server_nets())
    bytes_down = 0
    for client in participants:
        bytes_down += _bytes(server.shared, *server.extra.values(), *server.integers.values())
        if client.holds != server.frozen_round:  # else it was sent the same values before
            bytes_down += _bytes(server.frozen)
            client.holds = server.frozen_round

    fold, bound = make_fold(config, method, engine.layout), Bound(config.update_bound, engine.layout, server.shared)
    before = {client.id: client for client in state.clients}
    drift = Drift(engine.layout, server.shared)
    counted: list[Update] = []
    for update in engine.train(server, [client for client in participants if client.id not in refused], round):
        if isinstance(update, Missing):
            refused[update.client] = update.reason
            clients[update.client] = replace(before[update.client])
            continue
        bytes_up += _bytes(update.shared, *update.extra.values(), *update.integers.values())
        reason = refusal(update, server) or bound.refusal(update) or private_refusal(clients[update.client])
        if reason is None:
            fold.add(update)
            drift.add(update)
            clients[update.client].counted = round + 1
            # The row and the counters have gone into the fold; memory must not grow with the number of clients.
            counted.append(replace(update, shared=update.shared.new_empty(0), integers={}))
        else:
            refused[update.client] = reason
            clients[update.client] = replace(before[update.client], holds=clients[update.client].holds)
    spare: frozenset[int] = frozenset()
    if 0 < len(counted) < (least := least_updates(config)):  # nothing is joined, as if nobody had sent anything
        reason = f"aggregation = {config.aggregation!r} needs {least} updates, and only {len(counted)} could be used"
        spare = frozenset(update.client for update in counted)
        refused |= dict.fromkeys(spare, reason)
        clients |= {client: replace(before[client], holds=clients[client].holds) for client in spare}
        counted, fold, drift = [], make_fold(config, method, engine.layout), Drift(engine.layout, server.shared)
    mean = fold.finish(server)
    if counted:
        extras = [Survey(update.client, update.weight, update.extra) for update in counted]
        rng = Streams(config.seed, round, "server", device=mean.shared.device)
        mean = method.aggregate(server, mean, extras, engine.server_nets(), rng)
        if mean.frozen is not server.frozen:
            mean = replace(mean, frozen_round=round + 1)
    return RoundResult(
        round=round + 1,
        state=RunState(mean, tuple(clients[client.id] for client in state.clients)),
        participants=tuple(client.id for client in participants),
        losses=_weighted_losses(counted),
        refused=refused,
        seconds=time.perf_counter() - began,
        bytes_down=bytes_down,
        bytes_up=bytes_up,
        drift=drift.finish(),
        spare=spare,
    )


def _weighted_losses(updates: Sequence[Update]) -> dict[str, float]:
    groups = sorted({group for update in updates for group in update.losses})
    means = {}
    for group in groups:
        having = [update for update in updates if group in update.losses]
        total = sum(update.weight for update in having)
        means[group] = sum(update.weight * update.losses[group] for update in having) / total
    return means


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def state_tensors(state: RunState) -> dict[str, Tensor]:
    """A run's state as named tensors, for a checkpoint; data indices are not part of it."""
    tensors = {"server.shared": state.server.shared}
    tensors |= {f"server.extra.{name}": value for name, value in state.server.extra.items()}
    tensors |= {f"server.integers.{name}": value for name, value in state.server.integers.items()}
    if state.server.frozen.numel():
        tensors["server.frozen"] = state.server.frozen
        tensors["server.frozen_round"] = torch.tensor(state.server.frozen_round)
        tensors["holds"] = torch.tensor([client.holds for client in state.clients])
    tensors["counted"] = torch.tensor([client.counted for client in state.clients])
    for client in state.clients:
        tensors[f"client.{client.id}.personal"] = client.personal
        tensors |= {f"client.{client.id}.memory.{name}": value for name, value in client.memory.items()}
        tensors |= {f"client.{client.id}.optimiser.{name}": value for name, value in client.optimiser.items()}
    # Copies: a file of tensors must not hold two that share memory.
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def restore_state(fresh: RunState, tensors: Mapping[str, Tensor], round: int) -> RunState:
    """The state that `state_tensors` described; `fresh` is the run's start, which knows shapes and data indices."""
    shared = fresh.server.shared
    saved = tensors.get("server.shared")
    if saved is None or saved.shape != shared.shape:
        found = "none" if saved is None else str(tuple(saved.shape))
        raise InputError(f"the checkpoint's server row is {found}, this configuration needs {tuple(shared.shape)}")

    def below(prefix: str) -> dict[str, Tensor]:
        found = {name: value for name, value in tensors.items() if name.startswith(prefix)}
        return {name.removeprefix(prefix): value.to(shared.device) for name, value in found.items()}

    server = replace(
        fresh.server,
        shared=saved.to(shared.device),
        extra=below("server.extra."),
        integers=below("server.integers."),
        round=round,
    )
    holds = torch.full((len(fresh.clients),), -1)
    if fresh.server.frozen.numel():
        frozen, since = tensors.get("server.frozen"), tensors.get("server.frozen_round")
        if frozen is None or since is None or frozen.shape != fresh.server.frozen.shape:
            raise InputError("the checkpoint has no fitting values of the nets that only the server changes")
        server = replace(server, frozen=frozen.to(shared.device), frozen_round=int(since))
        holds = tensors.get("holds", holds)
    clients = []
    # Checkpoints of before this was written down know at most who has trained.
    trained = tensors.get("trained", torch.ones(len(fresh.clients), dtype=torch.bool))
    counted = tensors.get("counted", trained.long() * round).tolist()
    for client, held, last in zip(fresh.clients, holds.tolist(), counted, strict=True):
        personal = tensors.get(f"client.{client.id}.personal")
        if personal is None or personal.shape != client.personal.shape:
            raise InputError(f"the checkpoint has no fitting private values of client {client.id}")
        clients.append(
            replace(
                client,
                personal=personal.to(shared.device),
                memory=below(f"client.{client.id}.memory."),
                optimiser=below(f"client.{client.id}.optimiser."),
                holds=held,
                counted=int(last),
            )
        )
    return RunState(server, tuple(clients))
