"""Median and trimmed mean by group, and the bound on updates, in the simulator as on Flower."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from foogd import Config, FedAvg, simulate
from foogd.data.synthetic import tiny_federation
from foogd.engine.aggregate import Robust, WeightedMean, make_fold, median, net_rules, refusal, trimmed_mean
from foogd.engine.eager import EagerEngine
from foogd.errors import InputError
from foogd.methods import make_method
from foogd.simulate import initial_state
from foogd.types import Update

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


@pytest.mark.parametrize(("count", "trim"), [(1, 0.4), (4, 0.25), (5, 0.2), (5, 0.1), (10, 0.3), (3, 0.0)])
def test_the_trimmed_mean_is_scipys(count, trim):
    values = torch.randn(count, 50, generator=torch.Generator().manual_seed(count))
    np.testing.assert_allclose(trimmed_mean(values, trim), stats.trim_mean(values.numpy(), trim), rtol=1e-5, atol=1e-6)


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
    assert refusal(update, server) is None
    assert refusal(update, server, 3.01) is None
    assert "moved the model by 3; the bound is 2.9" in refusal(update, server, 2.9)


def test_a_run_whose_updates_are_all_beyond_the_bound_stays_where_it_is():
    federation = tiny_federation(per_client=30, outs=False)
    config = replace(CONFIG, update_bound=1e-6)
    engine = EagerEngine(FedAvg(), federation, config)
    result = next(simulate(FedAvg(), federation, config, engine))
    assert set(result.refused) == set(range(federation.clients))
    assert torch.equal(result.state.server.shared, initial_state(engine).server.shared)
    assert not any(client.trained for client in result.state.clients)
