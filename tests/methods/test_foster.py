"""FOSTER: private heads, a generator that only the server trains, and outlier exposure on what it makes."""

import math
from dataclasses import dataclass, replace
from typing import final

import pytest
import torch
from scipy.stats import chi2
from torch import nn
from torch.nn.functional import cross_entropy

from foogd import FedAvg, InputError, Method, simulate
from foogd.core.random import Streams
from foogd.core.types import Context, Survey, both_views
from foogd.detectors.registry import DETECTORS
from foogd.engine.batches import BatchMaker
from foogd.engine.eager import EagerEngine, build_nets
from foogd.evaluation.evaluator import evaluate
from foogd.methods import foster
from foogd.methods.foogd import FOOGD
from foogd.methods.foster import FOSTER, least_likely, mean_head, train_generator, uniform_classes
from foogd.simulate import initial_state, run_round
from foogd.testing import check_method


@pytest.fixture
def skewed(federation, with_train_indices):
    """Clients with the classes {0, 1}, {2, 3} and {0, 4}."""
    labels = federation.train.labels
    zeros, ones, others, fours = (indices_of(labels, own) for own in ([0], [1], [2, 3], [4]))
    first, second = zeros.chunk(2)
    return with_train_indices(federation, [torch.cat([first, ones]), others, torch.cat([second, fours])])


def indices_of(labels, classes):
    return torch.isin(labels, torch.tensor(classes)).nonzero().flatten()


@final
@dataclass(frozen=True)
class LocalHeads(Method):
    """FedAvg of the backbone alone."""

    views: int = 1

    def personal(self, name):
        return name.startswith("head.")

    def losses(self, nets, batch, ctx):
        batch = both_views(batch)
        return {"model": cross_entropy(nets["head"](batch.z), batch.y)}


def trained(method, federation, config):
    engine = EagerEngine(method, federation, config)
    *_, result = simulate(method, federation, config, engine)
    return engine, result.state


def same_model(one, two):
    """Whether two (engine, state) pairs have the same backbone, counters and private heads, bit for bit."""
    (first, a), (second, b) = one, two
    left, right = first.layout.named(a.server.shared), second.layout.named(b.server.shared)
    assert {name for name in left if name.startswith("backbone.")} == set(right)
    rows = [torch.equal(left[name], right[name]) for name in right]
    heads = [torch.equal(x.personal, y.personal) for x, y in zip(a.clients, b.clients, strict=True)]
    counters = [torch.equal(a.server.integers[name], value) for name, value in b.server.integers.items()]
    return all(rows + heads + counters)


def made(method, federation, config, client=0, batch_size=24, steps=7.0):
    nets = build_nets(method, federation, config).train()
    own = federation.train_indices[client]
    maker = BatchMaker.of(method, federation, config, torch.device("cpu"))
    batch = method.embed(nets, maker.training(own[:batch_size], own, Streams(0)))
    server = {"generator_steps": torch.tensor(steps)}
    ctx = Context(1, 5, ("model",), federation.class_counts(client), nets, server, {}, Streams(1))
    return nets, batch, ctx


# The neutral element


@pytest.mark.parametrize(("backbone", "views"), [("cnn", 1), ("cnn", 2), ("wrn16-1", 1)])
def test_without_exposure_it_is_fedavg_with_local_heads(backbone, views, skewed, config):
    config = replace(config, backbone=backbone, rounds=2)
    plain = trained(LocalHeads(views), skewed, config)
    assert same_model(trained(FOSTER(views, beta=0.0), skewed, config), plain)


def test_clients_that_lack_no_class_have_the_plain_loss(federation, config):
    assert all(bool((federation.class_counts(k) > 0).all()) for k in range(3))
    config = replace(config, rounds=3)
    plain = trained(LocalHeads(), federation, config)
    method = FOSTER(generator_batch=64)
    assert same_model(trained(method, federation, config), plain)
    assert same_model(trained(replace(method, select=2, candidates=10), federation, config), plain)
    assert not same_model(trained(replace(method, external_if_count=10), federation, config), plain)


def test_exposure_starts_in_the_second_round(skewed, config):
    for rounds in (1, 2):
        config = replace(config, rounds=rounds)
        engine, state = trained(FOSTER(), skewed, config)
        assert same_model((engine, state), trained(LocalHeads(), skewed, config)) == (rounds == 1)
        steps = sum(math.ceil(len(own) / 16) for own in skewed.train_indices) / 3
        assert float(state.server.extra["generator_steps"]) == rounds * round(steps)


def test_wrapped_without_its_terms_foogd_is_foster(skewed, config):
    base = FOSTER(generator_batch=64)
    engine, state = trained(base, skewed, config)
    other, wrapped = trained(FOOGD(base, lambda_a=0.0, ce_on="ori"), skewed, config)
    left = engine.layout.named(state.server.shared, state.clients[1].personal, state.server.frozen)
    right = other.layout.named(wrapped.server.shared, wrapped.clients[1].personal, wrapped.server.frozen)
    assert all(torch.equal(value, right[name]) for name, value in left.items())


# The loss


@pytest.mark.parametrize("select", [0, 2])
def test_exposure_reaches_the_head_and_nothing_else(select, skewed, config):
    method = FOSTER(select=select, candidates=20)

    def gradients(beta):
        nets, batch, ctx = made(replace(method, beta=beta), skewed, config)
        loss = replace(method, beta=beta).losses(nets, batch, ctx)["model"]
        return {
            name: torch.autograd.grad(loss, list(nets[name].parameters()), allow_unused=True, retain_graph=True)
            for name in nets
        }

    without, with_term = gradients(0.0), gradients(0.1)
    assert all(torch.equal(a, b) for a, b in zip(without["backbone"], with_term["backbone"], strict=True))
    assert all(not torch.equal(a, b) for a, b in zip(without["head"], with_term["head"], strict=True))
    for name in ("generator", "generic_head"):
        assert all(gradient is None for gradient in with_term[name])


@pytest.mark.parametrize(("draws", "views", "count"), [(0, 1, 24), (0, 2, 48), (7, 1, 7)])
def test_the_loss_is_cross_entropy_and_beta_times_exposure(draws, views, count, skewed, config):
    method = FOSTER(views, beta=0.3, draws=draws, select=0)
    nets, batch, ctx = made(method, skewed, config)
    seen = []
    nets["generator"].register_forward_hook(lambda net, arguments, out: seen.append((arguments[1], out)))
    loss = method.losses(nets, batch, ctx)["model"].detach()
    (y, z), both = seen[0], both_views(batch)
    assert len(z) == count
    assert not bool(torch.isin(y, torch.tensor([0, 1])).any())
    g = nets["head"](z).double()
    exposure = torch.stack([torch.log(torch.exp(row).sum()) - row.sum() / 5 for row in g]).mean()
    wanted = cross_entropy(nets["head"](both.z), both.y) + 0.3 * exposure
    assert float(loss) == pytest.approx(float(wanted.detach()), rel=1e-5)


def test_the_generator_works_in_eval_mode_and_keeps_its_statistics(skewed, config):
    method = FOSTER()
    nets, batch, ctx = made(method, skewed, config)
    before = {name: value.clone() for name, value in nets["generator"].state_dict().items()}
    method.losses(nets, batch, ctx)
    assert all(torch.equal(value, before[name]) for name, value in nets["generator"].state_dict().items())


def test_every_label_is_lacked_and_all_lacked_are_drawn_alike():
    allowed = torch.tensor([False, True, False, True, True, False])
    y = uniform_classes(allowed, 30_000, torch.Generator().manual_seed(0))
    shares = torch.bincount(y, minlength=6) / len(y)
    assert torch.allclose(shares, allowed / 3, atol=0.01)
    assert bool((shares[~allowed] == 0).all())
    for c in range(6):
        one = torch.arange(6) == c
        assert bool((uniform_classes(one, 100, torch.Generator()) == c).all())
    nothing = uniform_classes(torch.zeros(6, dtype=torch.bool), 10, torch.Generator())
    assert bool(((nothing >= 0) & (nothing < 6)).all())


@pytest.mark.parametrize(("u", "wanted"), [(0.0, 1), (1 - 2.0**-24, 4)])
def test_the_ends_of_the_unit_interval_are_classes_that_are_lacked_too(u, wanted, monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.full(shape, u))
    allowed = torch.tensor([False, True, False, True, True, False])
    assert uniform_classes(allowed, 3, torch.Generator()).tolist() == 3 * [wanted]


def test_no_client_ever_meets_a_class_that_it_has(skewed, config, monkeypatch):
    drawn = []
    real = foster.uniform_classes

    def recording(allowed, count, stream):
        drawn.append((allowed, real(allowed, count, stream)))
        return drawn[-1][1]

    monkeypatch.setattr(foster, "uniform_classes", recording)
    trained(FOSTER(), skewed, config)
    assert {tuple(allowed.tolist()) for allowed, _ in drawn} == {
        tuple(c not in own for c in range(5)) for own in ({0, 1}, {2, 3}, {0, 4})
    }
    assert all(bool(allowed[y].all()) for allowed, y in drawn)


@pytest.mark.parametrize("select", [0, 1])
@pytest.mark.parametrize("reason", ["nothing is lacked", "the generator is new"])
def test_without_exposure_there_is_no_nan(reason, select, federation, skewed, config):
    method = FOSTER(select=select, candidates=10)
    new = reason == "the generator is new"
    nets, batch, ctx = made(method, skewed if new else federation, config, steps=0.0 if new else 7.0)
    loss = method.losses(nets, batch, ctx)["model"]
    assert torch.equal(loss, cross_entropy(nets["head"](batch.z), batch.y))
    for gradient in torch.autograd.grad(loss, list(nets["head"].parameters())):
        assert bool(torch.isfinite(gradient).all())


# Selection


class Gaussians(nn.Module):
    """Features N(mean of the class, A Aᵀ), a wide class 0 apart."""

    latent, num_classes = 4, 3

    def __init__(self):
        super().__init__()
        self.means = 10 * torch.eye(3, 4)
        self.root = torch.diag(torch.tensor([1.0, 2.0, 0.5, 3.0]))
        self.root[1, 0] = 0.7

    def forward(self, eps, y):
        wide = torch.where(y == 0, 50.0, 1.0)[:, None]
        return self.means[y] + wide * eps @ self.root.T


def test_selection_keeps_the_least_likely_of_the_external_classes():
    model, external = Gaussians(), torch.tensor([False, True, True])
    kept = least_likely(model, external, 2000, 20, torch.Generator().manual_seed(0))
    assert kept.shape == (3, 20, 4)
    inverse = torch.linalg.inv(model.root @ model.root.T)
    for c in (1, 2):  # class 0, which the client has, is wide: it must not be part of the covariance
        rest = kept[c] - model.means[c]
        distances = torch.einsum("nd,de,ne->n", rest, inverse, rest)
        # The 20 largest of 2000 lie above the 99 % quantile, and their expected median is at 99.5 %.
        assert float(distances.min()) > 0.85 * chi2.ppf(0.99, 4)
        assert float(distances.median()) == pytest.approx(chi2.ppf(0.995, 4), rel=0.15)


def test_selected_outliers_are_those_of_the_drawn_classes(skewed, config):
    method = FOSTER(select=1, candidates=30)
    nets, _, ctx = made(method, skewed, config)
    nets["generator"].eval()
    external = method.external(ctx.class_counts)
    z = method.outliers(nets, external, 40, torch.Generator().manual_seed(3))
    stream = torch.Generator().manual_seed(3)
    y = uniform_classes(external, 40, stream)
    with torch.no_grad():
        kept = least_likely(nets["generator"], external, 30, 1, stream)
    assert torch.equal(z, kept[y, 0])


def test_more_cannot_be_selected_than_there_are():
    with pytest.raises(InputError, match="select = 5 is not allowed: there are 4 candidates"):
        FOSTER(select=5, candidates=4)


# The server


def test_the_generic_head_is_the_weighted_mean_of_the_uploaded_ones(skewed, config):
    engine = EagerEngine(FOSTER(), skewed, config)
    state = run_round(engine, initial_state(engine), 0).state
    sizes = torch.tensor([float(len(own)) for own in skewed.train_indices])
    heads = torch.stack([client.personal for client in state.clients])
    wanted = (sizes[:, None] * heads).sum(0) / sizes.sum()
    values = engine.layout.named(state.server.shared, state.clients[0].personal, state.server.frozen)
    found = torch.cat([values["generic_head.weight"].flatten(), values["generic_head.bias"]])
    assert torch.allclose(found, wanted, atol=1e-6)
    assert not torch.equal(heads[0], heads[1])
    one = [Survey(k, w, {"head.weight": heads[0], "head.bias": heads[0]}) for k, w in enumerate((1.0, 5.0, 0.3))]
    assert torch.equal(mean_head(one)["weight"], heads[0])


def test_the_generator_learns_what_the_mean_head_calls_its_classes(federation, config):
    _, state = trained(FOSTER(), federation, config)
    engine = EagerEngine(FOSTER(), federation, config)
    nets = engine.server_nets().load(state.server)
    generator, head = nets["generator"], nets["generic_head"]
    before = head.weight.clone()
    train_generator(generator, head, 120, batch=200, lr=5e-4, stream=torch.Generator().manual_seed(0))
    assert not generator.training
    y = torch.arange(5).repeat(100)
    z = generator(torch.randn(500, 64, generator=torch.Generator().manual_seed(1)), y)
    assert float((head(z).argmax(1) == y).double().mean()) > 0.9
    assert torch.equal(head.weight, before)


def test_the_generator_takes_the_mean_number_of_local_steps(skewed, config, monkeypatch):
    calls = []

    def recording(generator, head, iterations, *, batch, lr, stream):
        calls.append((iterations, batch, lr))

    monkeypatch.setattr(foster, "train_generator", recording)
    trained(FOSTER(generator_lr=0.01, generator_batch=50), skewed, replace(config, local_epochs=2, rounds=2))
    steps = [2 * math.ceil(len(own) / 16) for own in skewed.train_indices]
    assert calls == [(round(sum(steps) / 3), 50, pytest.approx(0.01 * 0.98**t)) for t in range(2)]


def test_the_server_trains_the_generator_and_the_clients_do_not(skewed, config):
    engine = EagerEngine(FOSTER(), skewed, config)
    start = initial_state(engine)
    state = run_round(engine, start, 0).state
    named = [engine.layout.named(s.server.shared, None, s.server.frozen) for s in (start, state)]
    for name in ("generator.net.0.weight", "generator.net.1.running_mean", "generic_head.weight"):
        assert not torch.equal(named[0][name], named[1][name]), name
    updates = engine.train(state.server, [replace(client) for client in state.clients], 1)
    frozen = state.server.frozen.clone()
    assert len(list(updates)) == 3
    assert torch.equal(engine._frozen, frozen)


def test_nothing_changes_without_a_local_step(skewed, config):
    config = replace(config, local_epochs=0, rounds=1)
    engine = EagerEngine(FOSTER(), skewed, config)
    start = initial_state(engine)
    state = run_round(engine, start, 0).state
    assert torch.equal(start.server.shared, state.server.shared)
    assert state.server.frozen is start.server.frozen


def test_traffic_is_fedavgs_and_the_generator_down(skewed, config):
    plain = list(simulate(FedAvg(), skewed, config))
    own = list(simulate(FOSTER(), skewed, config))
    nets = build_nets(FOSTER(), skewed, config)
    generator = 4 * sum(value.numel() for value in nets["generator"].state_dict().values())
    for one, other in zip(own, plain, strict=True):
        assert one.bytes_up == other.bytes_up + 3 * 4  # a count each
        assert one.bytes_down == other.bytes_down + 3 * (generator + 4)  # with the number of its steps


# Prediction


def test_private_heads_stay_apart_and_outsiders_get_the_mean(skewed, config):
    engine, state = trained(FOSTER(), skewed, config)
    assert len({client.personal.data_ptr() for client in state.clients}) == 3
    assert set(engine.layout.personal_names) == {"head.weight", "head.bias"}
    nets = engine.server_nets().load(state.server)
    z = torch.rand(6, nets["head"].in_features)
    assert torch.equal(FOSTER().generic_logits(nets, z), nets["generic_head"](z))
    assert torch.equal(FOSTER().logits(nets, z), nets["head"](z))
    assert torch.equal(FOSTER().generic_readout(nets).weight, nets["generic_head"].weight)
    assert torch.equal(FOSTER().generic_readout(nets).head(z), nets["generic_head"](z))


def test_predictions_can_be_restricted_to_the_clients_classes(skewed, config):
    assert not FOSTER().adapts
    method = FOSTER(restrict_to_local_classes=True, external_if_count=3)
    engine, state = trained(method, skewed, config)
    nets = engine.nets().eval()
    counts = torch.tensor([4.0, 1.0, 0.0, 0.0, 0.0])
    ctx = Context(2, 2, (), counts, nets, {}, {}, Streams(0))
    x = torch.rand(6, 3, 16, 16)
    with torch.no_grad():
        free = FOSTER().predictor(nets, ctx)(x)
        own = method.predictor(nets, ctx)(x)
        nobody = method.predictor(nets, replace(ctx, class_counts=torch.zeros(5)))(x)
    assert torch.allclose(own.logits.softmax(1)[:, :2], free.logits[:, :2].softmax(1))
    assert bool((own.logits.softmax(1)[:, 2:] == 0).all())
    assert bool(torch.isfinite(own.logits).all())
    assert torch.equal(nobody.logits, free.logits)
    used = {name: DETECTORS[name] for name in ("msp", "energy", "max_logit", "gradnorm", "ash", "vim", "knn")}
    rows = evaluate(engine, state, used)
    assert {row.detector for row in rows if row.metric == "auroc"} == set(used)
    assert all(math.isfinite(row.value) for row in rows)


@pytest.mark.parametrize(
    "setting",
    [{"beta": 1.0}, {"draws": 3}, {"external_if_count": 20}, {"select": 0}, {"generator_lr": 1e-2},
     {"generator_batch": 64}],
    ids=str,
)  # fmt: skip
def test_every_setting_has_an_effect(setting, skewed, config):
    usual = {"candidates": 20, "generator_batch": 100}
    assert not same_model(
        trained(FOSTER(**usual), skewed, config),
        trained(FOSTER(**{**usual, **setting}), skewed, config),
    )


def test_the_contract_holds_where_classes_are_missing(skewed):
    """Each client is tested on its own classes."""
    clean = next(test for test in skewed.tests if test.split == "in")
    own = tuple(indices_of(clean.store.labels, classes) for classes in ([0, 1], [2, 3], [0, 4]))
    check_method(FOSTER(generator_batch=100), replace(skewed, tests=(replace(clean, indices=own),)))
