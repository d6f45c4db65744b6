"""SCAFFOLD: control variates, what they are worth, and where they lead."""

from dataclasses import dataclass, field, replace
from typing import final

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from foogd.core.random import Streams
from foogd.core.types import Context, Optimiser
from foogd.engine.batches import BatchMaker
from foogd.engine.eager import EagerEngine, build_nets
from foogd.methods import SCAFFOLD, FedAvg, Method, make_method
from foogd.methods.base import flat_parameters
from foogd.methods.foogd import FOOGD
from foogd.methods.scaffold import effective_steps
from foogd.presets.loader import resolve
from foogd.simulate import initial_state, run_round, simulate

MODEL = ("backbone", "head")


@final
@dataclass(frozen=True)
class UniformFedAvg(Method):
    inner: Method = field(default_factory=FedAvg)

    def weight(self, default):
        return 1.0

    def losses(self, nets, batch, ctx):
        return self.inner.losses(nets, batch, ctx)


class Pixels(nn.Module):
    """A few average pixels as features: with a linear head, cross-entropy is convex."""

    feature_width = 12

    def forward(self, x):
        return nn.functional.adaptive_avg_pool2d(x, 2).flatten(1)


@pytest.fixture
def uneven(federation, with_train_indices):
    sizes = (60, 33, 17)
    return with_train_indices(federation, [own[:n] for own, n in zip(federation.train_indices, sizes, strict=True)])


def started(method, federation, config):
    engine = EagerEngine(method, federation, config)
    return engine, initial_state(engine)


def rounds(method, federation, config):
    return [result.state for result in simulate(method, federation, config)]


def gradient(engine, state, client, weight_decay=0.0):
    """The gradient of a client's loss on all its images at the server's model, by autograd, in train mode."""
    nets = engine.nets().train()
    engine.layout.bind(nets, state.server.shared.clone(), state.clients[0].personal)
    batches = BatchMaker.of(engine.method, engine.federation, engine.config, torch.device("cpu"))
    batch = batches.plain(engine.federation.train_indices[client])
    loss = cross_entropy(nets["head"](nets["backbone"](batch.x)), batch.y)
    found = torch.autograd.grad(loss, list(nets.parameters()))
    return torch.cat([g.flatten() for g in found]) + weight_decay * flat_parameters(nets, MODEL).detach()


@pytest.mark.parametrize(("weights", "plain"), [("uniform", UniformFedAvg()), ("samples", FedAvg())])
def test_round_one_is_fedavg_bit_for_bit(weights, plain, uneven, config):
    usual = rounds(plain, uneven, config)
    found = rounds(SCAFFOLD(client_weights=weights), uneven, config)
    assert torch.equal(usual[0].server.shared, found[0].server.shared)
    assert all(torch.equal(value, found[0].server.integers[name]) for name, value in usual[0].server.integers.items())
    assert not torch.equal(usual[1].server.shared, found[1].server.shared)


def test_with_two_views_round_one_is_fedavg_with_two_views(federation, config):
    config = replace(config, rounds=1)  # clients of one size, so that FedAvg's weights are uniform too
    (usual,), (found,) = (rounds(method, federation, config) for method in (FedAvg(views=2), SCAFFOLD(views=2)))
    assert torch.equal(usual.server.shared, found.server.shared)


@pytest.mark.parametrize("share", [1.0, 0.67])
def test_the_servers_variate_is_the_mean_of_the_clients(share, uneven, config):
    for state in rounds(SCAFFOLD(), uneven, replace(config, rounds=3, participation=share)):
        c = state.server.extra["variate"]
        own = [client.memory.get("variate", torch.zeros_like(c)) for client in state.clients]
        assert c.norm() > 0
        torch.testing.assert_close(torch.stack(own).mean(0), c, rtol=1e-4, atol=1e-6)


def test_the_gradient_is_corrected_by_the_difference_of_the_variates(federation, config, rng):
    method = SCAFFOLD()
    nets = build_nets(method, federation, config).train()
    received = build_nets(method, federation, replace(config, seed=1)).eval()
    own = federation.train_indices[0]
    batch = BatchMaker.of(method, federation, config, torch.device("cpu")).training(own[:16], own, Streams(0))
    batch = method.embed(nets, batch)
    size = flat_parameters(nets, MODEL).numel()
    c, c_k = torch.randn(size, generator=rng), torch.randn(size, generator=rng)

    def gradient_with(server, memory):
        ctx = Context(0, 1, ("model",), federation.class_counts(0), received, server, memory, Streams(1))
        loss = method.losses(nets, batch, ctx)["model"]
        reached = torch.autograd.grad(loss, list(received.parameters()), retain_graph=True, allow_unused=True)
        assert all(found is None for found in reached), "what was received is a constant"
        found = torch.autograd.grad(loss, list(nets.parameters()), retain_graph=True)
        return torch.cat([g.flatten() for g in found])

    plain = gradient_with({"variate": torch.zeros(size)}, {})
    assert torch.equal(gradient_with({"variate": c}, {}), plain + c)
    assert torch.equal(gradient_with({"variate": c}, {"variate": c_k}), plain + (c - c_k))


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 0.01)])
def test_after_one_step_a_variate_is_the_gradient_at_the_received_model(momentum, weight_decay, federation, config):
    """Of the loss with its weight decay, and in the second round too, where the step was a corrected one."""
    config = replace(config, batch_size=60, momentum=momentum, weight_decay=weight_decay)
    engine, state = started(SCAFFOLD(), federation, config)
    for round in range(2):
        wanted = [gradient(engine, state, client, weight_decay) for client in range(3)]
        state = run_round(engine, state, round).state
        for client, expected in zip(state.clients, wanted, strict=True):
            torch.testing.assert_close(client.memory["variate"], expected, rtol=1e-3, atol=2e-5)
        torch.testing.assert_close(state.server.extra["variate"], torch.stack(wanted).mean(0), rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_steps_with_momentum_count_for_more(momentum, steps):
    wanted = sum(momentum**i for s in range(1, steps + 1) for i in range(s))
    assert effective_steps(steps, momentum) == pytest.approx(wanted, rel=1e-12)
    assert effective_steps(steps, 0.0) == steps


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_constant_gradient_is_found_exactly(momentum, federation, config, rng):
    method = SCAFFOLD()
    received = build_nets(method, federation, config)
    nets = build_nets(method, federation, config)
    parameters = list(nets.parameters())
    size = sum(parameter.numel() for parameter in parameters)
    g, c, c_k = (torch.randn(size, generator=rng) for _ in range(3))
    optimiser = torch.optim.SGD(parameters, lr=0.05, momentum=momentum)
    for _ in range(6):
        pieces = (g + c - c_k).split([parameter.numel() for parameter in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter).clone()
        optimiser.step()
    ctx = Context(
        0, 1, ("model",), federation.class_counts(0), received, {"variate": c}, {"variate": c_k, "other": g},
        Streams(0), optimiser=Optimiser(0.05, momentum), steps={"model": 6, "score": 99},
    )  # fmt: skip
    with torch.no_grad():
        upload, memory = method.finish(nets, [], ctx)
    torch.testing.assert_close(memory["variate"], g, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(upload["variate"], g - c_k, rtol=1e-4, atol=1e-4)
    assert memory["other"] is g
    assert torch.equal(ctx.memory["variate"], c_k)


def test_identical_clients_do_not_drift(federation, config, with_train_indices):
    """The same images, one full batch a step: nothing to correct, so it is FedAvg up to rounding."""
    own = federation.train_indices[0]
    same = with_train_indices(federation, [own, own, own])
    config = replace(config, rounds=2, local_epochs=3, batch_size=60, momentum=0.0, weight_decay=0.0)
    for usual, found in zip(rounds(FedAvg(), same, config), rounds(SCAFFOLD(), same, config), strict=True):
        torch.testing.assert_close(usual.server.shared, found.server.shared, rtol=1e-3, atol=1e-4)
        c = found.server.extra["variate"]
        for client in found.clients:
            assert (client.memory["variate"] - c).norm() < 1e-3 * c.norm()


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_it_ends_at_the_minimum_of_the_mean_loss_where_fedavg_does_not(
    momentum, federation, config, with_train_indices
):
    """A convex problem with weight decay, two classes a client, many local steps: the mean gradient must vanish."""
    labels = federation.train.labels
    own = [torch.nonzero((labels == k) | (labels == k + 1)).flatten()[:24] for k in (0, 1, 3)]
    skewed = with_train_indices(federation, own)
    config = replace(
        config, backbone=Pixels, rounds=12, local_epochs=6, batch_size=24, lr=0.5 * (1 - momentum), momentum=momentum,
        weight_decay=0.2,
    )  # fmt: skip

    def rest(method):
        engine = EagerEngine(method, skewed, config)
        state = initial_state(engine)
        *_, result = simulate(method, skewed, config, engine, start=state)
        gradients = [gradient(engine, result.state, client, 0.2) for client in range(3)]
        return float(torch.stack(gradients).mean(0).norm())

    assert rest(SCAFFOLD()) < 0.01 * rest(UniformFedAvg())


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_servers_step_moves_parameters_and_not_statistics(wrapped, uneven, config):
    def end(eta_g):
        method = SCAFFOLD(eta_g=eta_g)
        engine, start = started(FOOGD(method) if wrapped else method, uneven, config)
        state = run_round(engine, start, 0).state
        return engine, (engine.layout.named(s.server.shared) for s in (start, state)), state.server

    engine, (old, mean), server = end(1.0)
    _, (_, moved), other = end(1.5)
    trained = {name for name, _ in engine.nets().named_parameters() if name.startswith(MODEL)}
    for name, value in mean.items():
        if name in trained:
            torch.testing.assert_close(moved[name], old[name] + 1.5 * (value - old[name]), rtol=1e-5, atol=1e-6)
            assert not torch.equal(moved[name], value), name
        else:
            assert torch.equal(moved[name], value), name
    assert torch.equal(server.extra["variate"], other.extra["variate"])
    assert all(torch.equal(value, other.integers[name]) for name, value in server.integers.items())
    assert other.round == server.round == 1
    assert other.frozen_round == server.frozen_round


def test_the_servers_variate_counts_those_who_did_not_take_part(federation, config):
    engine, state = started(SCAFFOLD(), federation, replace(config, participation=0.34))
    result = run_round(engine, state, 0)
    (who,) = result.participants
    own = result.state.clients[who].memory["variate"]
    torch.testing.assert_close(result.state.server.extra["variate"], own / 3)
    assert not any(client.memory for client in result.state.clients if client.id != who)


def test_variates_share_no_memory(federation, config):
    state = rounds(SCAFFOLD(), federation, config)[-1]
    kept = [client.memory["variate"] for client in state.clients] + [state.server.extra["variate"]]
    assert len({value.data_ptr() for value in kept}) == 4


def test_without_a_step_nothing_changes(federation, config):
    engine, state = started(SCAFFOLD(), federation, replace(config, local_epochs=0))
    result = run_round(engine, state, 0)
    assert torch.equal(result.state.server.shared, state.server.shared)
    assert not result.state.server.extra["variate"].any()
    assert not any(client.memory for client in result.state.clients)


@pytest.mark.parametrize("eta_g", [1.0, 0.5])
def test_inside_foogd_with_a_fixed_base_there_is_nothing_to_correct(eta_g, federation, config):
    engine, state = started(FOOGD(SCAFFOLD(eta_g=eta_g), train_base=False), federation, config)
    result = run_round(engine, state, 0)
    assert not result.refused
    assert not result.state.server.extra["variate"].any()
    assert torch.equal(result.state.server.frozen, state.server.frozen)
    assert result.state.server.frozen_round == 0


@pytest.mark.parametrize("backbone", ["cnn", "wrn16-1"])
def test_traffic_is_the_model_and_one_vector_of_trained_parameters_each_way(backbone, federation, config):
    engine, start = started(SCAFFOLD(), federation, replace(config, backbone=backbone))
    result = run_round(engine, start, 0)
    model = 4 * start.server.shared.numel() + 8 * len(start.server.integers)
    trained = 4 * sum(parameter.numel() for parameter in engine.nets().parameters())
    assert result.bytes_up == result.bytes_down == 3 * (model + trained)


def test_its_names_make_it():
    assert make_method("scaffold") == SCAFFOLD(eta_g=1.0, client_weights="uniform")
    assert make_method("scaffold+aug", {"eta_g": 0.5}) == SCAFFOLD(views=2, eta_g=0.5)
    _, method = resolve({"method": "scaffold"}, {"client_weights": "samples"})
    assert method == SCAFFOLD(client_weights="samples")
