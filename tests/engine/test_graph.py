"""The graph engine agrees with the eager one on a GPU, whatever the number of slots."""

from dataclasses import dataclass, replace
from typing import final

import pytest
import torch
from torch.nn.functional import cross_entropy

from foogd import Config, Method, simulate
from foogd.data.synthetic import tiny_federation
from foogd.engine.eager import EagerEngine
from foogd.engine.graph import Arrangement, GraphEngine, make_engine
from foogd.methods import make_method, possible_names
from foogd.simulate import initial_state, run_round

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a GPU, and torch finds none here")


@pytest.fixture
def exact():
    """No TF32 and deterministic kernels, so that two orders of launching differ by rounding at most."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.deterministic
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before[:2]
    torch.backends.cudnn.deterministic = before[2]


def config_of(**changes):
    # 60 samples a client in batches of 16: 4 steps a round, 8 in all.
    base = Config(rounds=2, local_epochs=1, batch_size=16, lr=0.05, flip=True, crop=2, device="cuda", precision="fp32")
    return replace(base, **changes)


def states(engine):
    state = initial_state(engine)
    for round in range(engine.config.rounds):
        result = run_round(engine, state, round)
        assert not result.refused
        state = result.state
    return result


def assert_close(one, other, tolerance):
    worst = (one.state.server.shared - other.state.server.shared).abs().max()
    assert float(worst) <= tolerance, f"the rows differ by {float(worst):.2e}"
    for mine, theirs in zip(one.state.clients, other.state.clients, strict=True):
        if mine.personal.numel():
            assert float((mine.personal - theirs.personal).abs().max()) <= tolerance
        assert mine.memory.keys() == theirs.memory.keys()
    for name, value in one.state.server.extra.items():
        assert torch.allclose(value, other.state.server.extra[name], rtol=1e-3, atol=tolerance), name
    for name, value in one.state.server.integers.items():
        assert torch.equal(value, other.state.server.integers[name]), name
    for group, loss in one.losses.items():
        assert loss == pytest.approx(other.losses[group], rel=1e-3, abs=1e-4), group


AGREEING = ("fedavg", "fedrod", "fedavg+foogd", "fedrod+foogd", "fedln", "fediir")


@needs_gpu
@pytest.mark.parametrize("name", AGREEING)
@pytest.mark.parametrize("backbone", ["cnn", "wrn16-1"])
def test_graph_and_eager_agree_over_a_few_steps(name, backbone, exact):
    federation, config = tiny_federation(), config_of(backbone=backbone)
    graph = GraphEngine(make_method(name), federation, config)
    found = states(graph)
    assert graph.fallback is None
    assert_close(found, states(EagerEngine(make_method(name), federation, config)), 1e-5)


OTHERS = [(name, {}) for name in possible_names() if name not in AGREEING]


@needs_gpu
@pytest.mark.parametrize(("name", "own"), [*OTHERS, ("fedavg+foogd", {"profile": "anchored"})])
def test_every_method_runs_as_a_graph(name, own, exact):
    federation, config = tiny_federation(), config_of()
    graph = GraphEngine(make_method(name, own), federation, config)
    found = states(graph)
    assert graph.fallback is None, graph.fallback
    assert_close(found, states(EagerEngine(make_method(name, own), federation, config)), 1e-4)


@needs_gpu
@pytest.mark.parametrize("name", ["fedavg+foogd", "scaffold"])
def test_results_do_not_depend_on_the_number_of_slots(name, exact):
    federation, config = tiny_federation(clients=5), config_of()
    rows = []
    for slots in (1, 2, 5):
        rows.append(states(GraphEngine(make_method(name), federation, config, slots=slots)).state.server.shared)
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


@needs_gpu
def test_uneven_clients_partial_participation_and_kept_momentum(exact):
    federation = tiny_federation(clients=4)
    indices = [own[: 20 + 13 * client] for client, own in enumerate(federation.train_indices)]
    federation = replace(federation, train_indices=tuple(indices))
    config = config_of(participation=0.5, keep_momentum=True, momentum=0.9, local_epochs=2, rounds=2)
    method = make_method("fedrod+foogd")
    graph = GraphEngine(method, federation, config, slots=2)
    found, wanted = states(graph), states(EagerEngine(method, federation, config))
    assert found.participants == wanted.participants
    assert_close(found, wanted, 1e-4)


@final
@dataclass(frozen=True)
class Looking(Method):
    """Looks at a value, which no graph can record."""

    def losses(self, nets, batch, ctx):
        loss = cross_entropy(nets["head"](batch.z), batch.y)
        return {"model": loss * (2.0 if float(loss) > 1e6 else 1.0)}


@final
@dataclass(frozen=True)
class Counting(Method):
    """Reads the round without saying so."""

    def losses(self, nets, batch, ctx):
        return {"model": cross_entropy(nets["head"](batch.z), batch.y) * (1 + ctx.round)}


@needs_gpu
@pytest.mark.parametrize(("method", "reason"), [(Looking(), "captur"), (Counting(), "ctx.round")])
def test_what_cannot_be_captured_falls_back_to_eager_and_says_why(method, reason, exact):
    federation, config = tiny_federation(), config_of()
    graph = GraphEngine(method, federation, config)
    found = states(graph)
    assert reason in graph.fallback
    assert_close(found, states(EagerEngine(method, federation, config)), 1e-5)


@needs_gpu
def test_bf16_learns_and_keeps_float32_where_it_matters():
    federation = tiny_federation()
    config = config_of(precision="bf16", rounds=8, flip=False, crop=0)
    method = make_method("fedavg+foogd")
    graph = GraphEngine(method, federation, config)
    *_, last = simulate(method, federation, config, graph)
    assert last.state.server.shared.dtype == torch.float32
    nets = graph.nets()
    x = torch.rand(4, 3, 16, 16, device="cuda")
    assert nets["backbone"](x).dtype == torch.float32
    assert last.losses["model"] < 0.3


@needs_gpu
def test_a_gpu_takes_graphs_by_itself():
    federation = tiny_federation()
    assert isinstance(make_engine(make_method("fedavg"), federation, config_of(engine="auto")), GraphEngine)
    assert isinstance(make_engine(make_method("fedavg"), federation, config_of(engine="eager")), EagerEngine)


def test_without_a_gpu_the_engine_is_eager_and_a_graph_engine_falls_back():
    federation, config = tiny_federation(), Config(rounds=1, batch_size=16, device="cpu")
    assert isinstance(make_engine(make_method("fedavg"), federation, config), EagerEngine)
    graph = GraphEngine(make_method("fedavg"), federation, replace(config, engine="graph"))
    assert graph.fallback == "graphs need a GPU"
    found, wanted = states(graph), states(EagerEngine(make_method("fedavg"), federation, config))
    assert torch.equal(found.state.server.shared, wanted.state.server.shared)


@pytest.mark.parametrize(
    ("name", "own"), [*((name, {}) for name in possible_names()), ("fedavg+foogd", {"profile": "anchored"})]
)
def test_slots_and_schedule_change_nothing(name, own):
    """The graph engine's own work without graphs: what enters a slot, in which order, and what leaves it."""
    federation = tiny_federation(clients=4, per_client=40)
    indices = [own[: 10 + 9 * client] for client, own in enumerate(federation.train_indices)]
    federation = replace(federation, train_indices=tuple(indices))
    config = Config(rounds=2, batch_size=16, lr=0.05, participation=0.75, flip=True, crop=1, momentum=0.9, device="cpu")
    wanted = states(EagerEngine(make_method(name, own), federation, config))
    for slots in (1, 3):
        found = states(GraphEngine(make_method(name, own), federation, config, slots=slots, rehearse=True))
        assert torch.equal(found.state.server.shared, wanted.state.server.shared)
        assert torch.equal(found.state.server.frozen, wanted.state.server.frozen)
        assert found.losses == pytest.approx(wanted.losses, rel=1e-5)
        for mine, theirs in zip(found.state.clients, wanted.state.clients, strict=True):
            assert torch.equal(mine.personal, theirs.personal)
            assert all(torch.equal(mine.memory[key], theirs.memory[key]) for key in theirs.memory)
        assert (found.bytes_up, found.bytes_down) == (wanted.bytes_up, wanted.bytes_down)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["scaffold", "fedthe"])
def test_first_participations_in_late_rounds_change_nothing(name, seed):
    """Clients with and without memory share a round, so a slot needs graphs of both kinds."""
    federation = tiny_federation(clients=4, per_client=20)
    config = Config(rounds=3, batch_size=10, lr=0.05, participation=0.5, flip=True, seed=seed, device="cpu")
    wanted = states(EagerEngine(make_method(name), federation, config))
    found = states(GraphEngine(make_method(name), federation, config, slots=2, rehearse=True))
    assert torch.equal(found.state.server.shared, wanted.state.server.shared)


def test_a_round_without_participants_trains_nobody():
    federation, config = tiny_federation(), Config(rounds=1, batch_size=16, device="cpu")
    engine = GraphEngine(make_method("fedavg"), federation, config, rehearse=True)
    assert list(engine.train(initial_state(engine).server, [], 0)) == []


class Careless(torch.nn.Module):
    """A backbone that draws from torch's global generator, which slots would share."""

    feature_width = 48

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(48, 48)

    def forward(self, x):
        z = torch.nn.functional.avg_pool2d(x, 4).flatten(1)
        return torch.nn.functional.dropout(self.layer(z).relu(), 0.1, self.training)


def test_global_draws_fall_back_to_eager():
    federation, config = tiny_federation(), Config(rounds=1, batch_size=16, device="cpu", backbone=Careless)
    engine = GraphEngine(make_method("fedavg"), federation, config, rehearse=True)
    found, wanted = states(engine), states(EagerEngine(make_method("fedavg"), federation, config))
    assert "global generator" in engine.fallback
    assert torch.equal(found.state.server.shared, wanted.state.server.shared)


@final
@dataclass(frozen=True)
class StepCounting(Method):
    """Reads how many steps there will be, which differs from client to client."""

    def losses(self, nets, batch, ctx):
        return {"model": cross_entropy(nets["head"](batch.z), batch.y) / ctx.steps["model"]}


def test_losses_that_read_the_steps_fall_back_to_eager():
    federation, config = tiny_federation(), Config(rounds=1, batch_size=16, device="cpu")
    engine = GraphEngine(StepCounting(), federation, config, rehearse=True)
    found, wanted = states(engine), states(EagerEngine(StepCounting(), federation, config))
    assert "ctx.steps" in engine.fallback
    assert torch.equal(found.state.server.shared, wanted.state.server.shared)


def test_a_row_can_be_arranged_channels_last_and_back():
    config = Config(backbone="wrn16-1", batch_size=16, device="cpu")
    engine = EagerEngine(make_method("fedavg+foogd"), tiny_federation(), config)
    engine.precision = "bf16"  # of the arrangement alone
    arrangement = Arrangement(engine)
    nets = engine.nets()
    row = engine.layout.pack(nets)[0]
    arranged = arrangement.of(row)
    assert not torch.equal(arranged, row)
    assert torch.equal(arrangement.back(arranged), row)
    wanted = {name: value.clone() for name, value in nets.state_dict().items()}
    engine.layout.bind(nets, arranged, torch.empty(0))
    arrangement.bind(nets, arranged)
    for name, value in nets.state_dict().items():
        assert torch.equal(value, wanted[name]), name
    assert nets["backbone"].blocks[0].conv1.weight.is_contiguous(memory_format=torch.channels_last)
