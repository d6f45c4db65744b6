"""Engine, aggregation and simulator: what a round does, and what it must never do."""

import gc
import math
import weakref
from dataclasses import dataclass, replace
from typing import final

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout

from foogd import Config, FedAvg, FedRoD, InputError, simulate
from foogd.core.random import Streams, derive_seed, generator
from foogd.core.types import Phase, ServerState, Update
from foogd.engine.aggregate import Drift, WeightedMean, private_refusal, refusal
from foogd.engine.batches import BatchMaker, epoch_positions
from foogd.engine.eager import EagerEngine, build_nets
from foogd.methods import make_method, method_names
from foogd.methods.base import Method
from foogd.simulate import RunState, initial_state, run_round, sample_clients


def last(method, federation, config, engine=None):
    *_, result = simulate(method, federation, config, engine)
    return result


# Batches


@pytest.mark.parametrize(("samples", "batch"), [(10, 4), (8, 4), (3, 8), (1, 4), (65, 64)])
def test_an_epoch_sees_every_sample_and_fills_the_last_batch_from_the_start(samples, batch):
    config = Config(batch_size=batch)
    positions = epoch_positions(samples, config, generator(0, "order"))
    flat = positions.flatten()
    assert positions.shape == (math.ceil(samples / batch), batch)
    assert sorted(flat[:samples].tolist()) == list(range(samples))
    assert torch.equal(flat, flat[:samples].repeat(batch)[: len(flat)])


def test_drop_last_leaves_the_incomplete_batch_out():
    positions = epoch_positions(10, Config(batch_size=4, drop_last=True), generator(0, "order"))
    assert positions.shape == (2, 4)
    assert len(set(positions.flatten().tolist())) == 8


def test_partners_come_from_the_clients_own_data(federation, config):
    seen = []

    @final
    @dataclass(frozen=True)
    class Watching(Method):
        views = 2

        def view(self, x, partner, rng):
            seen.append(partner)
            return x

        def losses(self, nets, batch, ctx):
            return {"model": cross_entropy(nets["head"](batch.z), batch.y)}

    own = federation.train_indices[1]
    images = federation.train.batch(own)
    maker = BatchMaker.of(Watching(), federation, config, torch.device("cpu"))
    maker.training(own[:16], own, Streams(0))
    for partner in torch.cat(seen):
        assert (images == partner).flatten(1).all(1).any()


def test_streams_are_independent_of_each_other_and_repeat():
    one, two = Streams(3, 1, 2), Streams(3, 1, 2)
    torch.rand(5, generator=one("a"))
    assert torch.equal(torch.rand(4, generator=one("b")), torch.rand(4, generator=two("b")))
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert len({derive_seed(s, r, c, p) for s in range(3) for r in range(3) for c in range(3) for p in "ab"}) == 54


# Aggregation


def layout_of(federation, config, method):
    return EagerEngine(method, federation, config).layout


def test_the_mean_is_the_weighted_mean(federation, config, rng):
    layout = layout_of(federation, config, FedAvg())
    rows = torch.randn(7, layout.shared_size, generator=rng)
    weights = [3.0, 100.0, 1.0, 50.0, 7.0, 2.0, 900.0]
    fold = WeightedMean(layout)
    for client, (row, weight) in enumerate(zip(rows, weights, strict=True)):
        fold.add(Update(client, weight, row))
    wanted = (rows.double() * torch.tensor(weights).double()[:, None]).sum(0) / sum(weights)
    found = fold.finish(ServerState(rows[0])).shared
    assert torch.allclose(found.double(), wanted, atol=1e-6, rtol=1e-5)


def test_equal_rows_give_exactly_that_row(federation, config, rng):
    layout = layout_of(federation, config, FedAvg())
    row = torch.randn(layout.shared_size, generator=rng)
    fold = WeightedMean(layout)
    for client in range(9):
        fold.add(Update(client, 1.0 + client**2, row.clone()))
    assert torch.equal(fold.finish(ServerState(row)).shared, row)


def test_the_fold_keeps_no_row(federation, config, rng):
    layout = layout_of(federation, config, FedAvg())
    fold, alive = WeightedMean(layout), []
    for client in range(5):
        row = torch.randn(layout.shared_size, generator=rng)
        alive.append(weakref.ref(row))
        fold.add(Update(client, 1.0, row))
        del row
    gc.collect()
    assert [ref() for ref in alive] == [None] * 5


def test_drift_is_the_distance_of_the_clients_from_their_mean(federation, config, rng):
    layout = layout_of(federation, config, FedAvg())
    start = 100 * torch.randn(layout.shared_size, generator=rng)  # far away: nothing may be lost to cancellation
    rows = start + torch.randn(5, layout.shared_size, generator=rng)
    weights = torch.tensor([3.0, 100.0, 1.0, 50.0, 7.0])
    drift = Drift(layout, start)
    for client, row in enumerate(rows):
        drift.add(Update(client, float(weights[client]), row))
    found = drift.finish()
    assert set(found) == {"backbone", "head"}
    share = (weights / weights.sum()).double()
    mean = (share[:, None] * rows.double()).sum(0)
    for net, value in found.items():
        names = [n for n in layout.shared_names if n.startswith(f"{net}.") and ".running_" not in n]
        places = torch.cat([torch.arange(layout.slices[n].offset, layout.slices[n].stop) for n in names])
        wanted = (share * (rows.double() - mean)[:, places].square().sum(1)).sum().sqrt()
        assert value == pytest.approx(float(wanted), rel=1e-5)


def test_one_client_and_none_have_no_drift(federation, config, rng):
    layout = layout_of(federation, config, FedAvg())
    row = torch.randn(layout.shared_size, generator=rng)
    alone = Drift(layout, torch.zeros_like(row))
    assert alone.finish() == {}
    alone.add(Update(0, 2.0, row))
    assert alone.finish() == {"backbone": 0.0, "head": 0.0}


def test_exact_pooling_joins_means_and_variances(federation, config, rng):
    layout = layout_of(federation, config, FedAvg())
    means, variances = layout.pooled_moments
    samples = [torch.randn(size, len(means), generator=rng) * 2 + shift for size, shift in ((30, -3.0), (70, 1.0))]
    fold = WeightedMean(layout, exact_bn=True)
    for client, sample in enumerate(samples):
        row = torch.zeros(layout.shared_size)
        row[means], row[variances] = sample.mean(0), sample.var(0, correction=0)
        fold.add(Update(client, float(len(sample)), row))
    found = fold.finish(ServerState(torch.zeros(layout.shared_size))).shared
    together = torch.cat(samples)
    assert torch.allclose(found[means], together.mean(0), atol=1e-5)
    assert torch.allclose(found[variances], together.var(0, correction=0), rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda row: row * math.nan, "not finite"),
        (lambda row: torch.where(torch.arange(len(row)) == 3, math.inf, row), "1 of its"),
        (lambda row: row[:-1], "shape"),
        (lambda row: row.double(), "dtype"),
    ],
)
def test_bad_updates_are_refused_with_a_reason(change, word):
    server = ServerState(torch.zeros(10))
    assert refusal(Update(0, 1.0, torch.zeros(10)), server) is None
    assert word in refusal(Update(0, 1.0, change(torch.zeros(10))), server)


def test_a_bad_upload_or_weight_is_refused():
    server = ServerState(torch.zeros(3))
    assert "feature" in refusal(Update(0, 1.0, torch.zeros(3), extra={"feature": torch.tensor([math.nan])}), server)
    for weight in (0.0, -1.0, math.inf, math.nan):
        assert "weight" in refusal(Update(0, weight, torch.zeros(3)), server)
    counted = replace(server, integers={"steps": torch.zeros((), dtype=torch.int64)})
    assert "integer" in refusal(Update(0, 1.0, torch.zeros(3), integers={"other": torch.zeros(())}), counted)


@final
class Poisoned:
    """An engine in which some clients send something else."""

    def __init__(self, inner, change):
        self.inner, self.change = inner, change
        self.method, self.federation = inner.method, inner.federation
        self.config, self.layout = inner.config, inner.layout

    def nets(self):
        return self.inner.nets()

    def server_nets(self):
        return self.inner.server_nets()

    def pretrain(self, nets):
        self.inner.pretrain(nets)

    def personalise(self, server, clients):
        return self.inner.personalise(server, clients)

    def survey(self, server, clients, round):
        return self.inner.survey(server, clients, round)

    def train(self, server, clients, round):
        for update in self.inner.train(server, clients, round):
            yield replace(update, shared=self.change.get(update.client, lambda row: row)(update.shared))


def test_a_poisoned_update_counts_for_nothing_and_the_rest_goes_on(federation, config, with_train_indices):
    engine = Poisoned(EagerEngine(FedRoD(), federation, config), {1: lambda row: row * math.nan})
    start = initial_state(engine)
    result = run_round(engine, start, 0)
    assert list(result.refused) == [1]
    assert torch.equal(result.state.clients[1].personal, start.clients[1].personal)
    assert not torch.equal(result.state.clients[0].personal, start.clients[0].personal)
    empty = federation.train_indices[1][:0]
    without = with_train_indices(federation, [federation.train_indices[0], empty, federation.train_indices[2]])
    honest = EagerEngine(FedRoD(), without, config)
    alone = run_round(honest, initial_state(honest), 0)
    assert torch.equal(result.state.server.shared, alone.state.server.shared)


@final
@dataclass(frozen=True)
class Exploding(Method):
    """Private values that are not finite after a step, while what travels is."""

    @property
    def groups(self):
        return {"model": ("backbone", "head"), "personal": ("personal_head",)}

    def build(self, backbone, num_classes, rng):
        return FedRoD().build(backbone, num_classes, rng)

    def personal(self, name):
        return name.startswith("personal_head.")

    def losses(self, nets, batch, ctx):
        return {**FedRoD().losses(nets, batch, ctx), "personal": nets["personal_head"].weight.sum() * math.inf}


def test_private_values_that_are_not_finite_are_not_kept(federation, config):
    engine = EagerEngine(Exploding(), federation, config)
    start = initial_state(engine)
    result = run_round(engine, start, 0)
    assert set(result.refused) == {0, 1, 2}
    assert "loss 'personal' is nan" in result.refused[0]
    client = replace(start.clients[0], personal=torch.full_like(start.clients[0].personal, math.nan))
    assert "private values" in private_refusal(client)
    assert private_refusal(start.clients[0]) is None
    assert all(torch.isfinite(client.personal).all() for client in result.state.clients)


def test_a_round_in_which_all_are_refused_changes_nothing(federation, config):
    engine = Poisoned(EagerEngine(FedAvg(), federation, config), {c: lambda row: row[:5] for c in range(3)})
    start = initial_state(engine)
    result = run_round(engine, start, 0)
    assert len(result.refused) == 3
    assert torch.equal(result.state.server.shared, start.server.shared)
    assert result.state.server.round == 1


# Rounds


@pytest.mark.parametrize("name", method_names())
def test_without_epochs_no_bit_changes(name, federation, config):
    method = make_method(name)
    engine = EagerEngine(method, federation, replace(config, local_epochs=0))
    start = initial_state(engine)
    result = run_round(engine, start, 0)
    measured = {"score.centre", "score.spread"}
    old, new = (engine.layout.named(state.server.shared) for state in (start, result.state))
    for value in old.keys() - measured:  # what is measured is not learnt
        assert torch.equal(old[value], new[value]), value


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_client_equals_central_training_bit_for_bit(momentum, federation, config, with_train_indices):
    """An independent loop: .backward() and torch.optim on a plain net."""
    config = replace(config, momentum=momentum, rounds=1, local_epochs=2)
    everyone = torch.cat(federation.train_indices)
    single = with_train_indices(federation, [everyone])
    single = replace(single, tests=())
    found = last(FedAvg(), single, config).state.server.shared

    nets = build_nets(FedAvg(), single, config)
    optimiser = torch.optim.SGD(nets.parameters(), lr=config.lr, momentum=momentum, weight_decay=config.weight_decay)
    order = generator(config.seed, 0, 0, "order")
    mean, std = torch.tensor(single.mean).view(1, -1, 1, 1), torch.tensor(single.std).view(1, -1, 1, 1)
    nets.train()
    for _ in range(2):
        for positions in epoch_positions(len(everyone), config, order):
            images = (single.train.batch(everyone[positions]) - mean) / std
            loss = cross_entropy(nets["head"](nets["backbone"](images)), single.train.labels[everyone[positions]])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    layout = EagerEngine(FedAvg(), single, config).layout
    assert torch.equal(found, layout.pack(nets)[0])


def test_the_server_row_is_the_sample_weighted_mean_of_the_clients(federation, config):
    engine = EagerEngine(FedAvg(), federation, config)
    start = initial_state(engine)
    updates = list(engine.train(start.server, [replace(c) for c in start.clients], 0))
    weights = torch.tensor([len(i) for i in federation.train_indices]).double()
    wanted = (torch.stack([u.shared for u in updates]).double() * weights[:, None]).sum(0) / weights.sum()
    found = run_round(engine, start, 0).state.server.shared
    assert torch.allclose(found.double(), wanted, atol=1e-6)
    names = engine.layout.named(found)
    running = [name for name in names if name.endswith("running_mean")]
    assert running, "the net of this test has batch normalisation"
    old = engine.layout.named(start.server.shared)
    assert all(not torch.equal(names[name], old[name]) for name in running)


def test_integer_buffers_stay_integers(federation, config):
    state = last(FedAvg(), federation, config).state
    assert state.server.integers
    for name, value in state.server.integers.items():
        assert value.dtype == torch.int64, name
        steps = sum(math.ceil(len(federation.train_indices[0]) / config.batch_size) for _ in range(config.rounds))
        assert int(value) == steps


def test_clients_without_data_are_skipped(federation, config, with_train_indices):
    first, second, third = federation.train_indices
    without = with_train_indices(federation, [first, second[:0], third])
    result = last(FedAvg(), without, config)
    assert result.participants == (0, 2)
    with pytest.raises(InputError, match="no client has training data"):
        last(FedAvg(), with_train_indices(federation, [torch.empty(0, dtype=torch.int64)] * 3), config)


def test_partial_participation_is_seeded_sorted_and_averages_participants_only(federation, config):
    config = replace(config, participation=0.6, rounds=8)
    engine = EagerEngine(FedAvg(), federation, config)
    seen = [result.participants for result in simulate(FedAvg(), federation, config, engine)]
    again = [result.participants for result in simulate(FedAvg(), federation, config, engine)]
    assert seen == again
    assert all(len(chosen) == 2 and list(chosen) == sorted(chosen) for chosen in seen)
    assert len(set(seen)) > 1
    start = initial_state(engine)
    chosen = sample_clients(start.clients, 0.6, config.seed, 0)
    updates = list(engine.train(start.server, [replace(c) for c in chosen], 0))
    fold = WeightedMean(engine.layout)
    for update in updates:
        fold.add(update)
    assert torch.equal(fold.finish(start.server).shared, run_round(engine, start, 0).state.server.shared)


def test_the_global_generator_is_neither_used_nor_changed(federation, config):
    torch.manual_seed(1)
    one = last(make_method("fedavg+foogd"), federation, config).state.server.shared
    torch.manual_seed(2)
    before = torch.get_rng_state()
    two = last(make_method("fedavg+foogd"), federation, config).state.server.shared
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one, two)


class Careless(nn.Module):
    """A user's net that draws from torch's global generator."""

    feature_width = 8

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3 * 16 * 16, 8)

    def forward(self, x):
        return dropout(self.layer(x.flatten(1)), 0.5, self.training).relu()


def test_even_a_careless_net_repeats_and_does_not_depend_on_the_order_of_clients(federation, config):
    config = replace(config, backbone=lambda shape: Careless())
    engine = EagerEngine(FedAvg(), federation, config)
    start = initial_state(engine)
    one = {u.client: u.shared for u in engine.train(start.server, [replace(c) for c in start.clients], 0)}
    two = {u.client: u.shared for u in engine.train(start.server, [replace(c) for c in reversed(start.clients)], 0)}
    assert all(torch.equal(one[client], two[client]) for client in one)


def test_kept_momentum_changes_later_rounds_and_is_part_of_the_state(federation, config):
    kept = last(FedAvg(), federation, replace(config, keep_momentum=True)).state
    fresh = last(FedAvg(), federation, config).state
    assert not torch.equal(kept.server.shared, fresh.server.shared)
    assert kept.clients[0].optimiser
    assert not fresh.clients[0].optimiser
    first = next(simulate(FedAvg(), federation, replace(config, keep_momentum=True))).state
    assert torch.equal(first.server.shared, next(simulate(FedAvg(), federation, config)).state.server.shared)


def test_simulate_is_a_generator_that_goes_on_from_any_state(federation, config):
    config = replace(config, rounds=4)
    results = list(simulate(FedRoD(), federation, config))
    assert [result.round for result in results] == [1, 2, 3, 4]
    rest = list(simulate(FedRoD(), federation, config, start=results[1].state))
    assert [result.round for result in rest] == [3, 4]
    assert torch.equal(rest[-1].state.server.shared, results[-1].state.server.shared)


def test_earlier_results_stay_as_they_were(federation, config):
    results = simulate(FedRoD(), federation, replace(config, rounds=3))
    first = next(results)
    shared, personal = first.state.server.shared.clone(), first.state.clients[0].personal.clone()
    list(results)
    assert torch.equal(first.state.server.shared, shared)
    assert torch.equal(first.state.clients[0].personal, personal)


def test_traffic_counts_the_travelling_values(federation, config):
    engine = EagerEngine(FedRoD(), federation, config)
    result = next(simulate(FedRoD(), federation, config, engine))
    wanted = 3 * (4 * engine.layout.shared_size + 8 * len(engine.layout.integer_names))
    assert result.bytes_down == result.bytes_up == wanted


# The hooks that later methods use


@final
@dataclass(frozen=True)
class Hooked(Method):
    """Uses every hook: a survey, a published mean, two phases, an upload, memory, and a server that adds things up."""

    def init_server(self, nets, rng):
        return {"seen": torch.zeros(()), "mean_feature": torch.zeros(nets["head"].in_features)}

    @property
    def groups(self):
        return {"body": ("backbone",), "model": ("head",)}

    def phases(self, round, rounds, epochs):
        return (Phase(("body", "model"), epochs), Phase(("model",), 1))

    def survey(self, nets, batch, ctx):
        assert not nets["backbone"].training
        return {"sum": batch.z.sum(0), "count": torch.tensor(float(len(batch.y)))}

    def begin(self, server, surveys):
        total, count = sum(s.sums["sum"] for s in surveys), sum(s.sums["count"] for s in surveys)
        return replace(server, extra={**server.extra, "mean_feature": total / count})

    def losses(self, nets, batch, ctx):
        assert set(ctx.server) == {"seen", "mean_feature"}
        loss = cross_entropy(nets["head"](batch.z), batch.y)
        if "body" not in ctx.groups:
            assert not nets["backbone"].training
            return {"model": loss}
        pairs = zip(nets.parameters(), ctx.received.parameters(), strict=True)
        pull = sum((new - old).square().sum() for new, old in pairs)
        return {"model": loss, "body": loss + 0.1 * pull}

    def finish(self, nets, batches, ctx):
        seen = torch.tensor(float(sum(len(batch.y) for batch in batches)))
        return {"seen": seen}, {"rounds": ctx.memory.get("rounds", torch.zeros(())) + 1}

    def aggregate(self, server, mean, extras, nets, rng):
        return replace(mean, extra={**mean.extra, "seen": server.extra["seen"] + sum(e.sums["seen"] for e in extras)})


def test_every_hook_of_a_method_is_called(federation, config):
    engine = EagerEngine(Hooked(), federation, config)
    start = initial_state(engine)
    result = last(Hooked(), federation, config, engine)
    images = sum(len(i) for i in federation.train_indices)
    assert float(result.state.server.extra["seen"]) == images * config.rounds
    assert [float(client.memory["rounds"]) for client in result.state.clients] == [config.rounds] * 3
    nets = engine.nets().eval()
    mean, std = torch.tensor(federation.mean).view(1, -1, 1, 1), torch.tensor(federation.std).view(1, -1, 1, 1)
    everyone = torch.cat(federation.train_indices)
    wanted = nets["backbone"]((federation.train.batch(everyone) - mean) / std).mean(0)
    surveyed = Hooked().begin(start.server, list(engine.survey(start.server, start.clients, 0))).extra["mean_feature"]
    assert torch.allclose(surveyed, wanted, atol=1e-5)


def test_a_phase_moves_its_own_groups_only(federation, config):
    @final
    @dataclass(frozen=True)
    class HeadOnly(Method):
        def phases(self, round, rounds, epochs):
            return (Phase(("model",), 1),)

        @property
        def groups(self):
            return {"body": ("backbone",), "model": ("head",)}

        def losses(self, nets, batch, ctx):
            return {"model": cross_entropy(nets["head"](batch.z), batch.y)}

    engine = EagerEngine(HeadOnly(), federation, config)
    start = initial_state(engine)
    state = last(HeadOnly(), federation, config, engine).state
    old, new = engine.layout.named(start.server.shared), engine.layout.named(state.server.shared)
    for name in old:
        assert torch.equal(old[name], new[name]) == name.startswith("backbone."), name


def test_a_run_state_starts_from_given_values(federation, config):
    finished = last(FedAvg(), federation, config)
    engine = EagerEngine(FedAvg(), federation, replace(config, seed=5))
    values = {name: v.clone() for name, v in engine.layout.named(finished.state.server.shared).items()}
    start = initial_state(engine, values)
    assert isinstance(start, RunState)
    assert torch.equal(start.server.shared, finished.state.server.shared)
    with pytest.raises(InputError, match="for the command line"):
        next(simulate(FedAvg(), federation, replace(config, init="runs/a")))
    with pytest.raises(InputError, match="same backbone"):
        initial_state(engine, {"head.weight": values["head.weight"]})
    name = next(name for name in values if name.startswith("backbone."))
    with pytest.raises(InputError, match="shape"):
        initial_state(engine, {**values, name: values[name].flatten()[:1]})
