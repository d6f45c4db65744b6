"""FedIIR: the survey of gradients, their running mean, and the penalty on the distance to it."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from foogd.core.random import Streams
from foogd.core.types import Context
from foogd.engine.batches import BatchMaker
from foogd.engine.eager import EagerEngine, build_nets
from foogd.methods import FedAvg, FedIIR, make_method
from foogd.methods.foogd import FOOGD
from foogd.simulate import initial_state, run_round, simulate


class Plain(nn.Module):
    """A backbone without batch normalisation and dropout."""

    feature_width = 8

    def __init__(self, shape):
        super().__init__()
        self.conv = nn.Conv2d(shape[0], 8, 3, 2)

    def forward(self, x):
        return torch.relu(self.conv(x)).mean((2, 3))


def made(method, federation, config):
    """Nets with a head that is no zero, a training batch, and a context with a mean gradient that is none either."""
    nets = build_nets(method, federation, config).train()
    nn.init.normal_(nets["head"].bias, generator=torch.Generator().manual_seed(3))
    own = federation.train_indices[0]
    batch = BatchMaker.of(method, federation, config, torch.device("cpu")).training(own[:16], own, Streams(0))
    server = method.init_server(nets, Streams(2))
    server = {"gradient": torch.randn(server["gradient"].shape, generator=torch.Generator().manual_seed(4))}
    ctx = Context(0, 1, ("model",), federation.class_counts(0), nets, server, {}, Streams(1))
    return nets, method.embed(nets, batch), ctx


def gradient_at(engine, state, clients):
    """The mean over all batches of some clients of autograd's gradient for the head, in eval mode."""
    nets = engine.nets().eval()
    engine.layout.bind(nets, state.server.shared.clone(), state.clients[0].personal)
    batches = BatchMaker.of(engine.method, engine.federation, engine.config, torch.device("cpu"))
    found = []
    for client in clients:
        for part in torch.split(engine.federation.train_indices[client], engine.config.batch_size):
            batch = batches.plain(part)
            loss = cross_entropy(nets["head"](nets["backbone"](batch.x)), batch.y)
            found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(nets["head"].parameters()))]))
    return torch.stack(found).mean(0)


@pytest.mark.parametrize("backbone", ["cnn", "wrn16-1"])  # the second has dropout
def test_without_its_penalty_it_is_fedavg_bit_for_bit(backbone, federation, config):
    config = replace(config, backbone=backbone, rounds=2 if backbone == "cnn" else 1)
    ends = []
    for method in (FedAvg(), FedIIR(penalty=0.0), FedIIR(penalty=1.0)):
        *_, result = simulate(method, federation, config)
        ends.append(result.state.server)
    assert torch.equal(ends[0].shared, ends[1].shared)
    assert all(torch.equal(ends[0].integers[name], ends[1].integers[name]) for name in ends[0].integers)
    assert not torch.equal(ends[0].shared, ends[2].shared)


def test_a_penalty_of_weight_zero_is_left_out(federation, config):
    method = FedIIR(penalty=0.0)
    nets, batch, ctx = made(method, federation, config)
    ctx.server["gradient"].fill_(float("nan"))
    assert torch.equal(method.losses(nets, batch, ctx)["model"], FedAvg().losses(nets, batch, ctx)["model"])


def test_the_surveyed_gradient_is_that_of_autograd(federation, config):
    nets, batch, ctx = made(FedIIR(), federation, config)
    loss = cross_entropy(nets["head"](batch.z), batch.y)
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(nets["head"].parameters()))])
    answer = FedIIR().survey(nets, batch, ctx)
    assert torch.allclose(answer["gradient"], wanted, atol=1e-6)
    assert float(answer["batches"]) == 1


@pytest.mark.parametrize("penalty", [1e-3, 2.0])
def test_the_loss_and_its_gradient_are_those_of_a_second_derivative(penalty, federation, config):
    method = FedIIR(penalty=penalty)
    nets, batch, ctx = made(method, federation, config)
    found = method.losses(nets, batch, ctx)["model"]
    loss = cross_entropy(nets["head"](batch.z), batch.y)
    own = torch.autograd.grad(loss, list(nets["head"].parameters()), create_graph=True)
    weight, bias = ctx.server["gradient"].split([nets["head"].weight.numel(), nets["head"].bias.numel()])
    apart = (own[0] - weight.view_as(own[0])).square().sum() + (own[1] - bias).square().sum()
    wanted = loss + penalty * apart
    torch.testing.assert_close(found, wanted)
    parameters = list(nets.parameters())
    mine = torch.autograd.grad(found, parameters, retain_graph=True)
    theirs = torch.autograd.grad(wanted, parameters)
    for one, two in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)


def test_two_views_are_one_larger_batch(federation, config):
    method = FedIIR(views=2, penalty=1.0)
    nets, batch, ctx = made(method, federation, config)
    assert batch.z_hat is not None
    joined = batch._replace(y=batch.y.repeat(2), z=torch.cat([batch.z, batch.z_hat]), z_hat=None)
    assert torch.equal(method.losses(nets, batch, ctx)["model"], method.losses(nets, joined, ctx)["model"])


def test_one_client_with_one_full_batch_has_no_penalty_at_its_first_step(federation, config, with_train_indices):
    alone = with_train_indices(federation, [federation.train_indices[0]])
    config = replace(config, backbone=Plain, batch_size=60)

    def penalty(ema):
        method = FedIIR(ema=ema, penalty=1.0)
        engine = EagerEngine(method, alone, config)
        state = initial_state(engine)
        server = method.begin(state.server, list(engine.survey(state.server, list(state.clients), 0)))
        nets, own = engine.nets().train(), alone.train_indices[0]
        batch = BatchMaker.of(method, alone, config, torch.device("cpu")).training(own.flip(0), own, Streams(0))
        ctx = Context(0, 1, ("model",), alone.class_counts(0), nets, server.extra, {}, Streams(1))
        batch = method.embed(nets, batch)
        return float((method.losses(nets, batch, ctx)["model"] - FedAvg().losses(nets, batch, ctx)["model"]).detach())

    assert penalty(0.0) == pytest.approx(0.0, abs=1e-6)
    assert penalty(0.95) > 1e-3


def test_the_mean_gradient_is_a_running_one_over_batches(federation, config, with_train_indices):
    """Clients of 60, 23 and 5 images and batches of 16: 4, 2 and 1 batches, each of the same weight."""
    sizes = (60, 23, 5)
    uneven = with_train_indices(federation, [own[:n] for own, n in zip(federation.train_indices, sizes, strict=True)])
    engine = EagerEngine(FedIIR(), uneven, config)
    state = initial_state(engine)
    assert not state.server.extra["gradient"].any()
    wanted = torch.zeros_like(state.server.extra["gradient"])
    for round in range(3):
        now = gradient_at(engine, state, range(3))
        wanted = 0.95 * wanted + 0.05 * now
        state = run_round(engine, state, round).state
        torch.testing.assert_close(state.server.extra["gradient"], wanted, rtol=1e-4, atol=1e-7)
        if round == 0:
            torch.testing.assert_close(state.server.extra["gradient"], 0.05 * now, rtol=1e-4, atol=1e-7)


def test_only_participants_are_asked(federation, config):
    engine = EagerEngine(FedIIR(ema=0.0), federation, replace(config, participation=0.34))
    state = initial_state(engine)
    result = run_round(engine, state, 0)
    assert len(result.participants) == 1
    wanted = gradient_at(engine, state, result.participants)
    torch.testing.assert_close(result.state.server.extra["gradient"], wanted, rtol=1e-4, atol=1e-7)


def test_training_uses_the_mean_gradient_of_its_own_round(federation, config):
    engine = EagerEngine(FedIIR(penalty=1.0), federation, replace(config, rounds=1))
    state = initial_state(engine)
    found = run_round(engine, state, 0).state.server
    server = engine.method.begin(state.server, list(engine.survey(state.server, list(state.clients), 0)))
    rows = [update.shared for update in engine.train(server, [replace(client) for client in state.clients], 0)]
    torch.testing.assert_close(found.shared, torch.stack(rows).mean(0), rtol=1e-5, atol=1e-6)
    stale = next(engine.train(state.server, [replace(state.clients[0])], 0)).shared
    assert not torch.equal(rows[0], stale)


def test_the_survey_leaves_no_trace(federation, config):
    config = replace(config, backbone="wrn16-1")
    method = FedIIR()
    engine = EagerEngine(method, federation, config)
    state = initial_state(engine)
    before = next(engine.train(state.server, [replace(state.clients[0])], 0))
    row, counters = state.server.shared.clone(), {name: v.clone() for name, v in state.server.integers.items()}
    assert len(list(engine.survey(state.server, list(state.clients), 0))) == 3
    assert torch.equal(state.server.shared, row)
    assert all(torch.equal(state.server.integers[name], value) for name, value in counters.items())
    after = next(engine.train(state.server, [replace(state.clients[0])], 0))
    assert torch.equal(before.shared, after.shared)
    nets = engine.nets().eval()
    own = {name: value.clone() for name, value in nets.state_dict().items()}
    batch = BatchMaker.of(method, federation, config, torch.device("cpu")).plain(federation.train_indices[0][:9])
    with torch.no_grad():
        method.survey(nets, method.embed(nets, batch), Context(0, 1, (), torch.ones(5), nets, {}, {}, Streams(0)))
    assert all(torch.equal(value, own[name]) for name, value in nets.state_dict().items())


def test_without_answers_the_mean_gradient_stays(federation, config):
    state = initial_state(EagerEngine(FedIIR(), federation, config))
    assert FedIIR().begin(state.server, []) is state.server


@pytest.mark.parametrize("wrapped", [False, True])
def test_traffic_is_the_model_and_the_gradient_of_the_head(wrapped, federation, config):
    method = FOOGD(FedIIR()) if wrapped else FedIIR()
    engine = EagerEngine(method, federation, config)
    start = initial_state(engine)
    result = run_round(engine, start, 0)
    model = 4 * start.server.shared.numel() + 8 * len(start.server.integers)
    head = 4 * 5 * (128 + 1)
    moments = 8 * (128 + 2) if wrapped else 0  # of the score network's space: images, their sum, their square
    assert result.bytes_up == 3 * (model + head + 4 + moments)
    assert result.bytes_down == 3 * (model + head)


def test_its_names_make_it():
    assert make_method("fediir") == FedIIR(ema=0.95, penalty=1e-3)
    assert make_method("fediir+aug", {"penalty": 0.01}) == FedIIR(views=2, penalty=0.01)
