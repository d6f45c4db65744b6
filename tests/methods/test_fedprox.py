"""FedProx: a pull towards the received model, which is 0 there."""

from dataclasses import replace

import pytest
import torch

from foogd.core.random import Streams
from foogd.core.types import Context
from foogd.engine.batches import BatchMaker
from foogd.engine.eager import EagerEngine, build_nets
from foogd.methods import FedAvg, FedProx, make_method
from foogd.methods.foogd import FOOGD
from foogd.simulate import initial_state, run_round, simulate


def last(method, federation, config):
    *_, result = simulate(method, federation, config)
    return result.state.server


def apart(federation, config, method):
    """Nets, a batch, and other nets as those that were received."""
    nets = build_nets(method, federation, config).train()
    received = build_nets(method, federation, replace(config, seed=1)).eval()
    own = federation.train_indices[0]
    batch = BatchMaker.of(method, federation, config, torch.device("cpu")).training(own[:16], own, Streams(0))
    ctx = Context(0, 1, ("model",), federation.class_counts(0), received, {}, {}, Streams(1))
    return nets, method.embed(nets, batch), ctx


@pytest.mark.parametrize("backbone", ["cnn", "wrn16-1"])  # the second has dropout
def test_without_its_term_it_is_fedavg_bit_for_bit(backbone, federation, config):
    config = replace(config, backbone=backbone, rounds=2 if backbone == "cnn" else 1)
    plain, other = last(FedAvg(), federation, config), last(FedProx(mu=0.0), federation, config)
    assert torch.equal(plain.shared, other.shared)
    assert plain.integers.keys() == other.integers.keys()
    assert not torch.equal(plain.shared, last(FedProx(mu=0.5), federation, config).shared)


def test_with_two_views_it_is_fedavg_with_two_views(federation, config):
    config = replace(config, rounds=1)
    plain, other = (last(method, federation, config) for method in (FedAvg(views=2), FedProx(views=2, mu=0.0)))
    assert torch.equal(plain.shared, other.shared)


def test_a_term_of_weight_zero_is_left_out(federation, config):
    nets, batch, ctx = apart(federation, config, FedProx())
    with torch.no_grad():
        ctx.received["head"].weight.fill_(float("nan"))
    assert torch.equal(FedProx(mu=0.0).losses(nets, batch, ctx)["model"], FedAvg().losses(nets, batch, ctx)["model"])


@pytest.mark.parametrize("mu", [0.01, 1e4])
def test_the_first_step_is_that_of_fedavg_for_any_mu(mu, federation, config):
    one_step = replace(config, rounds=1, batch_size=60, momentum=0.0)
    assert torch.equal(last(FedAvg(), federation, one_step).shared, last(FedProx(mu=mu), federation, one_step).shared)


def test_the_term_is_half_mu_times_the_squared_distance_of_the_parameters(federation, config):
    nets, batch, ctx = apart(federation, config, FedProx())
    with torch.no_grad():
        for buffer in ctx.received.buffers():
            buffer.add_(7)  # statistics of batch normalisation do not count
    for parameter in ctx.received.parameters():
        assert parameter.requires_grad
    plain = FedAvg().losses(nets, batch, ctx)["model"]
    term = FedProx(mu=0.3).losses(nets, batch, ctx)["model"] - plain
    pairs = list(zip(nets.parameters(), ctx.received.parameters(), strict=True))
    wanted = 0.15 * sum(float((a - b).detach().double().square().sum()) for a, b in pairs)
    assert float(term.detach()) == pytest.approx(wanted, rel=1e-4)
    reached = torch.autograd.grad(term, list(ctx.received.parameters()), retain_graph=True, allow_unused=True)
    assert all(gradient is None for gradient in reached), "what was received is a constant"
    for (a, b), gradient in zip(pairs, torch.autograd.grad(term, list(nets.parameters())), strict=True):
        assert torch.allclose(gradient, 0.3 * (a - b), atol=1e-5)


def test_a_larger_mu_keeps_the_model_nearer(federation, config):
    config = replace(config, rounds=1, local_epochs=5, momentum=0.0, weight_decay=0.0)
    distances = []
    for mu in (0.0, 1.0, 10.0):
        engine = EagerEngine(FedProx(mu=mu), federation, config)
        start = initial_state(engine)
        end = run_round(engine, start, 0).state
        old, new = (engine.layout.named(state.server.shared) for state in (start, end))
        names = [name for name, _ in engine.nets().named_parameters()]
        distances.append(sum(float((old[name] - new[name]).square().sum()) for name in names) ** 0.5)
    assert distances[0] > 1.2 * distances[1] > 3 * distances[2]


def test_inside_foogd_the_score_network_is_free(federation, config):
    method = FOOGD(FedProx(mu=100.0))
    nets, batch, ctx = apart(federation, config, method)
    loss = method.losses(nets, batch, replace(ctx, groups=tuple(method.groups)))["model"]
    reached = torch.autograd.grad(loss, list(nets["score"].parameters()), allow_unused=True)
    assert all(gradient is None for gradient in reached)


def test_traffic_is_that_of_fedavg(federation, config):
    engine = EagerEngine(FedProx(), federation, config)
    start = initial_state(engine)
    result = run_round(engine, start, 0)
    model = 4 * start.server.shared.numel() + 8 * len(start.server.integers)
    assert result.bytes_up == result.bytes_down == 3 * model
    assert not any(client.memory for client in result.state.clients)


def test_its_names_make_it():
    assert make_method("fedprox") == FedProx(mu=0.01)
    assert make_method("fedprox+aug", {"mu": 1.0}) == FedProx(views=2, mu=1.0)
