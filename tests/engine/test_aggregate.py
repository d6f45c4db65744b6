"""Median and trimmed mean by group, and the bound on updates, in the simulator as on Flower."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from foogd import Config, FedAvg, simulate
from foogd.core.errors import InputError
from foogd.core.types import Update
from foogd.data.federation import Federation
from foogd.data.synthetic import tiny_federation
from foogd.engine.aggregate import Bound, Robust, WeightedMean, make_fold, median, net_rules, trimmed_mean
from foogd.engine.eager import EagerEngine
from foogd.evaluation.evaluator import Evaluator
from foogd.methods import make_method
from foogd.simulate import initial_state, state_tensors

CONFIG = Config(rounds=1, batch_size=16, device="cpu", lr=0.05)


@pytest.fixture(scope="module")
def engine():
    return EagerEngine(make_method("fedavg+foogd"), tiny_federation(per_client=20), CONFIG)


def updates(server, count, seed=0):
    stream = torch.Generator().manual_seed(seed)
    rows = [torch.randn(len(server.shared), generator=stream) for _ in range(count)]
    integers = [{name: value + k for name, value in server.integers.items()} for k in range(count)]
    return [Update(k, float(k + 1), row, integers=integers[k]) for k, row in enumerate(rows)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_the_median_is_numpys(count):
    values = torch.randn(count, 50, generator=torch.Generator().manual_seed(count))
    np.testing.assert_allclose(median(values), np.median(values.numpy(), axis=0), rtol=1e-6)


@pytest.mark.parametrize(("count", "trim"), [(4, 0.25), (5, 0.2), (10, 0.3), (10, 0.1), (3, 0.49), (3, 0.0), (1, 0.0)])
def test_the_trimmed_mean_is_scipys(count, trim):
    values = torch.randn(count, 50, generator=torch.Generator().manual_seed(count))
    np.testing.assert_allclose(trimmed_mean(values, trim), stats.trim_mean(values.numpy(), trim), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("trim", [1e-9, 0.1, 0.49, math.nextafter(0.5, 0.0)])
@pytest.mark.parametrize("count", [3, 4, 5, 8, 9, 10, 14])
def test_a_trimmed_mean_leaves_out_at_least_one_at_each_end_and_never_all(count, trim):
    values = torch.arange(float(count))[:, None].repeat(1, 2)
    values[-1], values[0] = 3e38, -2e38
    found = trimmed_mean(values, trim)
    assert torch.equal(found, torch.full((2,), (count - 1) / 2))


@pytest.mark.parametrize("count", [1, 2])
def test_two_updates_have_no_trimmed_mean(count):
    with pytest.raises(InputError, match=f"a trimmed mean of {count} updates is not possible: it needs 3"):
        trimmed_mean(torch.ones(count, 4), 0.1)


class Sending:
    """An engine in which updates are changed on their way to the server."""

    def __init__(self, engine, change):
        self._engine, self._change, self.asked = engine, change, []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def train(self, server, clients, round):
        self.asked.append(round)
        for update in self._engine.train(server, clients, round):
            yield self._change(update)


def run(federation, config, method=None, change=None):
    """All rounds of a run, in which `change` may alter updates."""
    method = method or FedAvg()
    engine = EagerEngine(method, federation, config)
    return list(simulate(method, federation, config, engine if change is None else Sending(engine, change)))


def sent_by(client, **values):
    return lambda update: replace(update, **values) if update.client == client else update


def accuracy(federation, config, result):
    rows = Evaluator(EagerEngine(FedAvg(), federation, config), {}).evaluation(result.state, run="", method="").rows
    return next(row.value for row in rows if (row.split, row.scope, row.metric) == ("in", "pooled", "accuracy"))


@pytest.mark.parametrize(
    ("clients", "settings", "said"),
    [
        (2, {"aggregation": "trimmed"}, "2 clients with participation = 1 send 2"),
        (4, {"aggregation": "mean,model=trimmed", "participation": 0.5}, "4 clients with participation = 0.5 send 2"),
    ],
)
def test_a_run_whose_rounds_have_too_few_updates_to_trim_never_begins(clients, settings, said):
    federation, config = tiny_federation(clients=clients, per_client=20, outs=False), replace(CONFIG, **settings)
    engine = Sending(EagerEngine(FedAvg(), federation, config), lambda update: update)
    with pytest.raises(InputError) as caught:
        next(simulate(FedAvg(), federation, config, engine))
    assert not engine.asked
    sentence = str(caught.value)
    assert f"aggregation = {config.aggregation!r} with trim = 0.1 " in sentence
    assert "needs 3 a round" in sentence
    assert said in sentence
    assert "trim = 0, mean or median" in sentence
    assert len(run(federation, replace(config, trim=0.0))) == 1


def test_a_round_with_too_few_updates_left_to_trim_joins_nothing_and_says_so():
    federation, config = tiny_federation(per_client=20, outs=False), replace(CONFIG, aggregation="trimmed", rounds=2)
    lost = True

    def change(update):
        return replace(update, shared=update.shared * torch.nan) if lost and update.client == 1 else update

    results = simulate(method := FedAvg(), federation, config, Sending(EagerEngine(method, federation, config), change))
    first = next(results)
    start = initial_state(EagerEngine(method, federation, config))
    assert torch.equal(first.state.server.shared, start.server.shared)
    assert first.state.server.round == 1
    assert first.refused[0] == first.refused[2] == "aggregation = 'trimmed' needs 3 updates, and only 2 could be used"
    assert "not finite" in first.refused[1]
    assert first.spare == {0, 2}
    assert not any(client.trained for client in first.state.clients)
    assert (first.losses, first.drift) == ({}, {})
    lost = False
    second = next(results)
    assert not second.refused
    assert not torch.equal(second.state.server.shared, start.server.shared)
    assert bool(torch.isfinite(second.state.server.shared).all())


def test_a_rule_holds_for_its_group_only(engine):
    server = initial_state(engine).server
    some = updates(server, 5)
    rules = net_rules("mean,score=median", engine.method.groups, engine.layout.net_ranges())
    assert rules == {"backbone": "mean", "head": "mean", "score": "median"}
    fold, mean = Robust(engine.layout, rules, trim=0.1), WeightedMean(engine.layout)
    for update in some:
        fold.add(update)
        mean.add(update)
    found, plain = fold.finish(server), mean.finish(server)
    start, stop = engine.layout.net_ranges()["score"]
    rows = torch.stack([update.shared for update in some])
    assert torch.equal(found.shared[:start], plain.shared[:start])
    assert torch.equal(found.shared[start:stop], rows[:, start:stop].median(dim=0).values)
    assert stop == len(found.shared)
    assert found.round == server.round + 1
    assert all(torch.equal(found.integers[name], value) for name, value in some[0].integers.items())


@pytest.mark.parametrize("rule", ["median", "trimmed"])
def test_one_client_of_five_cannot_move_the_model_far(engine, rule):
    server = initial_state(engine).server
    honest = updates(server, 4)
    for size in (1e3, 1e30):
        fold = make_fold(replace(CONFIG, aggregation=rule, trim=0.2), engine.method, engine.layout)
        for update in (*honest, Update(4, 1e6, torch.full_like(server.shared, size), integers=honest[0].integers)):
            fold.add(update)
        rows = torch.stack([update.shared for update in honest])
        found = fold.finish(server).shared
        assert bool((found <= rows.max(0).values).all())
        assert bool((found >= rows.min(0).values).all())


def test_nothing_added_leaves_the_model(engine):
    server = initial_state(engine).server
    fold = make_fold(replace(CONFIG, aggregation="median"), engine.method, engine.layout)
    assert fold.finish(server).shared is server.shared


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("mode", "must be mean, median"), ("mean,median", "must be"), ("tail=median", "group .tail"), ("", "must be")],
)
def test_a_rule_that_is_not_known_is_refused(text, sentence):
    with pytest.raises(InputError, match=sentence):
        net_rules(text, {"model": ("backbone",)}, ["backbone"])


def test_the_simulator_joins_by_the_median():
    """One client's labels are nonsense and its weight is large; the median goes on as if it were one of three."""
    federation = tiny_federation(per_client=30, outs=False)
    found = {}
    for rule in ("mean", "median"):
        found[rule] = next(simulate(FedAvg(), federation, replace(CONFIG, aggregation=rule))).state.server.shared
    assert not torch.equal(found["mean"], found["median"])
    assert bool(torch.isfinite(found["median"]).all())


def test_the_bound_is_on_what_an_update_changes(engine):
    server = initial_state(engine).server
    step = torch.zeros_like(server.shared)
    step[:4] = 1.5  # a distance of 3
    update = Update(0, 1.0, server.shared + step, integers=server.integers)
    assert Bound(0.0, engine.layout, server.shared).refusal(update) is None
    assert Bound(3.01, engine.layout, server.shared).refusal(update) is None
    assert Bound(2.9, engine.layout, server.shared).refusal(update) == "it moved the model by 3; the bound is 2.9"


def test_a_huge_update_is_refused_by_default_and_the_run_is_that_of_the_others():
    """3e38 is finite, but its square is none in float32, nor is any model that it was joined to."""
    federation, config = tiny_federation(outs=False), replace(CONFIG, rounds=6)
    whole = run(federation, config)[0].state.server.shared
    attacked = run(federation, config, change=sent_by(2, shared=torch.full_like(whole, 3e38)))
    for result in attacked:
        assert result.refused.keys() == {2}
        distance, _, bound = result.refused[2].partition("; ")
        moved = float(distance.removeprefix("it moved the model by "))
        assert moved == pytest.approx(3e38 * math.sqrt(len(whole)), rel=0.01)
        assert bound.endswith(", 100 times the length of the model (update_bound = 'auto')")
    none = torch.empty(0, dtype=torch.int64)
    without = run(replace(federation, train_indices=(*federation.train_indices[:2], none)), config)
    assert torch.equal(attacked[-1].state.server.shared, without[-1].state.server.shared)
    assert accuracy(federation, config, attacked[-1]) > 0.9
    spoilt = run(federation, replace(config, update_bound=0.0), change=sent_by(2, shared=torch.full_like(whole, 3e38)))
    assert accuracy(federation, config, spoilt[-1]) < 0.4


@pytest.mark.parametrize(
    "name", ["fedavg", "fedrod", "fedavg+foogd", "scaffold", "fedbn", "fedln", "fediir", "fedicon", "foster"]
)
def test_honest_runs_keep_their_bits_under_strong_skew(name):
    store = tiny_federation(clients=5, outs=False).train
    federation = Federation.build(store, clients=5, alpha=0.05, seed=1)
    assert (federation.describe() == 0).float().mean() > 0.4
    method, config = make_method(name), replace(CONFIG, rounds=3, lr=0.1)
    bounded, free = (run(federation, replace(config, update_bound=bound), method)[-1] for bound in ("auto", 0.0))
    assert not bounded.refused
    mine, theirs = state_tensors(bounded.state), state_tensors(free.state)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_running_variances_may_grow_with_the_square_of_the_weights():
    """An honest run at a large rate, whose variances in the first round are 100 times as long as the model was."""
    federation, config = tiny_federation(outs=False), replace(CONFIG, lr=0.5)
    [result] = run(federation, config, make_method("fedln"))
    assert not result.refused
    engine = EagerEngine(FedAvg(), federation, config)
    start = initial_state(engine).server.shared
    huge = start.clone()
    huge[engine.layout.pooled_moments[1]] = 3e38
    assert Bound("auto", engine.layout, start).refusal(Update(0, 1.0, huge))


def test_a_model_of_zeros_may_learn_and_is_bounded(engine):
    zeros = torch.zeros(engine.layout.shared_size)
    bound = Bound("auto", engine.layout, zeros)
    step = zeros.clone()
    step[0] = 99.0
    assert bound.refusal(Update(0, 1.0, step)) is None
    assert "the bound is 100, 100 times" in bound.refusal(Update(0, 1.0, step + 3e38))


def test_a_run_whose_updates_are_all_beyond_the_bound_stays_where_it_is():
    federation = tiny_federation(per_client=30, outs=False)
    config = replace(CONFIG, update_bound=1e-6)
    engine = EagerEngine(FedAvg(), federation, config)
    result = next(simulate(FedAvg(), federation, config, engine))
    assert set(result.refused) == set(range(federation.clients))
    assert torch.equal(result.state.server.shared, initial_state(engine).server.shared)
    assert not any(client.trained for client in result.state.clients)
