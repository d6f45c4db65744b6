"""FedTHE and FedTHE+: a private head that stands alone, and weights of the two heads for each test image."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cosine_similarity

import foogd.methods.fedthe as module
from foogd import FedRoD, simulate
from foogd.core.random import Streams, generator
from foogd.core.types import Context, Optimiser
from foogd.data.views import augmix
from foogd.detectors.registry import DETECTORS
from foogd.engine.eager import EagerEngine, build_nets
from foogd.evaluation.evaluator import evaluate
from foogd.methods.fedthe import FedTHE, head_weights, history, marginal_entropy
from foogd.simulate import initial_state, run_round


def final(method, federation, config):
    engine = EagerEngine(method, federation, config)
    *_, result = simulate(method, federation, config, engine)
    return engine, result.state


def second_round(method, federation, config):
    """The second round from the nets of the start: in the first one the private heads do not learn."""
    engine = EagerEngine(method, federation, replace(config, rounds=2))
    return engine, run_round(engine, initial_state(engine), 1).state


def context(nets, *, memory=None, server=None, rng=None, std=1.0, mean=0.0):
    d = nets["head"].in_features
    published = {"feature": torch.zeros(d) if server is None else server}
    constants = torch.full((1, 3, 1, 1), mean), torch.full((1, 3, 1, 1), std)
    return Context(1, 1, (), torch.ones(5), nets, published, memory or {}, rng or Streams(0), *constants)


@pytest.fixture
def nets(federation, config, images):
    """Features of ordinary size, and two heads that partly disagree."""
    made = build_nets(FedTHE(), federation, config).requires_grad_(False)
    for _ in range(30):
        made["backbone"](images)
    made["head"].weight.mul_(8)
    made["head"].bias.copy_(torch.linspace(-1, 1, 5))
    made["personal_head"].weight.copy_(torch.randn(5, 128, generator=torch.Generator().manual_seed(3)) / 2)
    return made.eval()


@pytest.fixture
def images():
    return torch.randn(24, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def own(nets, images):
    return {"feature": nets["backbone"](images[:8]).mean(0)}


def answers(method, nets, ctx, batches):
    with torch.no_grad():
        predict = method.predictor(nets, ctx)
        return torch.cat([predict(x).logits for x in batches])


# Training


@pytest.mark.parametrize("backbone", ["cnn", "wrn16-1"])  # the second has dropout
def test_the_shared_nets_learn_as_in_fedrod_bit_for_bit(backbone, federation, config):
    config = replace(config, backbone=backbone, flip=True, rounds=2)
    (engine, the), (other, rod) = (final(method, federation, config) for method in (FedTHE(), FedRoD()))
    mine, wanted = engine.layout.named(the.server.shared), other.layout.named(rod.server.shared)
    assert mine.keys() == wanted.keys()
    assert all(torch.equal(mine[name], wanted[name]) for name in wanted)
    assert all(torch.equal(the.server.integers[name], value) for name, value in rod.server.integers.items())
    rows = [client.personal for client in the.clients]
    assert all(bool((row != 0).any()) for row in rows)
    assert not torch.equal(rows[0], rows[1])


def test_the_private_head_has_no_bias_and_is_the_only_private_net(federation, config):
    nets = build_nets(FedTHE(), federation, config)
    assert FedTHE().private_names(nets) == {"personal_head.weight"}
    assert nets["personal_head"].bias is None
    assert not nets["personal_head"].weight.any()


def test_the_private_head_and_the_mean_feature_are_those_of_the_received_body(federation, config):
    """Both come from the body as it arrived: they do not depend on how fast the client's own body learns."""
    (_, slow), (engine, fast) = (second_round(FedTHE(), federation, replace(config, lr=lr)) for lr in (0.001, 0.1))
    assert not torch.equal(slow.server.shared, fast.server.shared)
    start = engine.nets().eval()
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (federation.mean, federation.std))
    for one, two in zip(slow.clients, fast.clients, strict=True):
        assert torch.equal(one.personal, two.personal)
        assert one.personal.any()
        with torch.no_grad():
            z = start["backbone"]((federation.train.batch(one.indices) - mean) / std)
        for client in (one, two):
            assert torch.allclose(client.memory["feature"], z.mean(0), atol=1e-5)


def test_the_private_head_waits_for_a_body_that_has_learned(federation, config):
    """Before it has statistics, batch normalisation passes features on as large as they come."""
    config = replace(config, backbone="wrn16-1", rounds=2)
    engine = EagerEngine(FedTHE(), federation, config)
    first = run_round(engine, initial_state(engine), 0)
    assert first.losses.keys() == {"model"}
    assert not any(client.personal.any() for client in first.state.clients)
    second = run_round(engine, first.state, 1)
    assert second.losses["personal"] < 2 * math.log(5)
    assert all(client.personal.any() for client in second.state.clients)


def test_the_private_head_takes_plain_sgd_steps_on_its_own_logits(federation, config):
    """One full batch: the first step from 0 is -lr · the gradient of cross-entropy at equal probabilities."""
    default = Optimiser(lr=0.3, momentum=0.9, weight_decay=0.1)
    assert FedTHE().optimiser("personal", default) == Optimiser(lr=0.01)
    assert FedTHE().optimiser("model", default) == default
    engine, state = second_round(FedTHE(personal_lr=0.5), federation, replace(config, batch_size=60))
    start = engine.nets().eval()
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (federation.mean, federation.std))
    for client in state.clients:
        with torch.no_grad():
            z = start["backbone"]((federation.train.batch(client.indices) - mean) / std)
        target = torch.nn.functional.one_hot(federation.train.labels[client.indices], 5)
        step = 0.5 * (target - 0.2).T @ z / len(z)
        assert torch.allclose(client.personal.view(5, -1), step, atol=1e-5)


def test_the_server_publishes_the_uniform_mean_of_the_features(federation, config, with_train_indices):
    first, second, third = federation.train_indices
    uneven = with_train_indices(federation, [first[:10], second, third])
    engine = EagerEngine(FedTHE(), uneven, config)
    state = initial_state(engine)
    assert torch.equal(state.server.extra["feature"], torch.zeros(128))
    state = run_round(engine, state, 0).state
    wanted = torch.stack([client.memory["feature"] for client in state.clients]).mean(0)
    assert torch.allclose(state.server.extra["feature"], wanted, atol=1e-6)
    assert wanted.norm() > 0


# History


@pytest.mark.parametrize("rate", [0.1, 0.6, 1.0])
def test_history_is_the_running_mean_of_the_stream(rate, rng):
    z, m = torch.randn(50, 4, generator=rng), torch.randn(4, generator=rng)
    before, wanted = m, []
    for row in z:
        m = rate * row + (1 - rate) * m
        wanted.append(m)
    assert torch.allclose(history(z, before, rate=rate), torch.stack(wanted), atol=1e-5)
    if rate == 1.0:
        assert torch.equal(history(z, before, rate=rate), z)


def test_no_image_is_left_out_where_a_batch_ends(nets, images, own):
    ctx = context(nets, memory=own, server=own["feature"].flip(0))
    whole = answers(FedTHE(), nets, ctx, [images])
    for size in (1, 5, 23):
        assert torch.allclose(answers(FedTHE(), nets, ctx, images.split(size)), whole, atol=1e-4)


def test_the_history_before_the_first_image_is_that_image(nets, images, own):
    ctx = context(nets, memory=own, server=own["feature"].flip(0))
    first = answers(FedTHE(), nets, ctx, [images[:1]])
    assert torch.allclose(first, answers(FedTHE(history_rate=1.0), nets, ctx, [images[:1]]), atol=1e-4)


def test_without_a_share_of_history_the_rate_does_not_matter(nets, images, own):
    ctx = context(nets, memory=own, server=own["feature"].flip(0))
    one, two = (answers(FedTHE(feature_share=1.0, history_rate=a), nets, ctx, [images]) for a in (0.1, 0.7))
    assert torch.equal(one, two)
    other = answers(FedTHE(history_rate=0.7), nets, ctx, [images])
    assert not torch.allclose(answers(FedTHE(), nets, ctx, [images]), other, atol=1e-3)


def test_an_image_counts_for_later_ones_only(nets, images, own):
    ctx = context(nets, memory=own, server=own["feature"].flip(0))
    changed = images.clone()
    changed[10] += 3.0
    one, two = (answers(FedTHE(), nets, ctx, [x]) for x in (images, changed))
    assert torch.allclose(one[:10], two[:10], atol=1e-4)
    assert not torch.allclose(one[11:], two[11:], atol=1e-3)
    alone = answers(FedTHE(feature_share=1.0), nets, ctx, [changed])
    assert torch.allclose(answers(FedTHE(feature_share=1.0), nets, ctx, [images])[11:], alone[11:], atol=1e-4)


# Weights of the heads


def by_adam(heads, distance, steps, lr):
    """One image at a time with torch's optimiser and autograd."""
    found = []
    for pair, d in zip(heads, distance, strict=True):
        s = cosine_similarity(pair[0].softmax(0), pair[1].softmax(0), dim=0)
        theta = torch.ones(2, dtype=heads.dtype, requires_grad=True)
        optimiser = torch.optim.Adam([theta], lr=lr)
        for _ in range(steps):
            optimiser.zero_grad()
            e = theta.softmax(0)
            mixed = torch.distributions.Categorical(logits=e[0] * pair[0] + e[1] * pair[1]).entropy()
            (s * mixed + (1 - s) * (e * d).sum()).backward()
            if theta.grad.norm() < 1e-5:
                break
            optimiser.step()
        found.append(theta.detach().softmax(0))
    return torch.stack(found)


def test_weights_are_those_of_adam_on_the_objective(rng):
    heads = 2 * torch.randn(12, 2, 6, generator=rng, dtype=torch.float64)
    distance = torch.rand(12, 2, generator=rng, dtype=torch.float64)
    heads[0, 1] = heads[0, 0]  # an image that stays as it is from the start
    heads[1], distance[1] = 1e-4 * heads[1], 0.3  # and one that is nearly still
    assert torch.allclose(head_weights(heads, distance, steps=20, lr=0.1), by_adam(heads, distance, 20, 0.1), atol=1e-9)
    # A saturated image stops on its way.
    far = torch.tensor([[0.0, 30.0]], dtype=torch.float64).expand(12, 2)
    stopped = head_weights(heads, far, steps=40, lr=1.0)
    assert torch.allclose(stopped, by_adam(heads, far, 40, 1.0), rtol=1e-6, atol=1e-12)


def test_images_do_not_influence_each_other(rng):
    heads, distance = torch.randn(16, 2, 6, generator=rng), torch.rand(16, 2, generator=rng)
    whole = head_weights(heads, distance, steps=20, lr=0.1)
    for i in range(16):
        alone = head_weights(heads[i : i + 1], distance[i : i + 1], steps=20, lr=0.1)
        assert torch.allclose(alone[0], whole[i], atol=1e-4)


def test_heads_that_agree_make_the_distances_count_for_nothing(rng):
    g = torch.randn(10, 6, generator=rng, dtype=torch.float64)  # 1 - s would be up to 10⁻⁷ else
    heads = torch.stack([g, g + 1.5], dim=1)  # the same probabilities: s = 1
    e = head_weights(heads, torch.tensor([[0.0, 50.0]]).to(g).expand(10, 2), steps=20, lr=0.1)
    assert torch.equal(e, torch.full_like(e, 0.5))


def test_heads_that_contradict_each_other_leave_it_to_the_distances():
    heads = torch.zeros(2, 2, 5)
    heads[:, 0, 0] = heads[:, 1, 1] = 40.0  # s = 0
    e = head_weights(heads, torch.tensor([[1.0, 2.0], [2.0, 1.0]]), steps=20, lr=0.1)
    assert e[0, 0] > 0.9
    assert e[1, 1] > 0.9


def test_at_equal_distances_the_entropy_decides():
    heads = torch.tensor([[[3.0, 0.0, 0.0], [0.5, 0.0, 0.0]]])
    e = head_weights(heads, torch.ones(1, 2), steps=20, lr=0.1)
    assert e[0, 0] > 0.6
    assert torch.allclose(e.sum(1), torch.ones(1))


def test_equal_heads_predict_as_each_alone(nets, images, own):
    nets["head"].bias.zero_()
    nets["personal_head"].weight.copy_(nets["head"].weight)
    ctx = context(nets, memory=own, server=own["feature"].flip(0))
    wanted = nets["head"](nets["backbone"](images))
    assert torch.allclose(answers(FedTHE(), nets, ctx, [images]), wanted, atol=1e-4)


def test_the_first_weight_is_the_shared_head_and_the_first_distance_the_mean_of_all(nets, images):
    """A client at whose own mean feature the image lies trusts its own head, another one the shared head."""
    nets["head"].weight.zero_()
    nets["head"].bias.copy_(torch.tensor([40.0, 0, 0, 0, 0]))
    z = nets["backbone"](images[:1])[0]
    nets["personal_head"].weight.zero_()
    nets["personal_head"].weight[1] = 40 * z / z.square().sum()
    near, far = z, z + 5.0
    at_home = answers(FedTHE(), nets, context(nets, memory={"feature": near}, server=far), [images[:1]])
    abroad = answers(FedTHE(), nets, context(nets, memory={"feature": far}, server=near), [images[:1]])
    assert int(at_home.argmax()) == 1
    assert int(abroad.argmax()) == 0


def test_a_client_that_never_took_part_uses_the_mean_of_all(nets, images, own):
    mean = own["feature"]
    alone = answers(FedTHE(), nets, context(nets, server=mean), [images])
    assert torch.equal(alone, answers(FedTHE(), nets, context(nets, server=mean, memory=own), [images]))
    nets["personal_head"].weight.zero_()
    generic = nets["head"](nets["backbone"](images)).argmax(1)
    assert torch.equal(answers(FedTHE(), nets, context(nets, server=mean), [images]).argmax(1), generic)


def test_without_adaptation_both_heads_count_one_half(nets, images, federation, config):
    config = replace(config, rounds=1)
    z = nets["backbone"](images)
    wanted = (nets["head"](z) + nets["personal_head"](z)) / 2
    assert torch.allclose(answers(FedTHE(adapt=False), nets, context(nets), [images]), wanted, atol=1e-5)
    fixed, still = FedTHE(adapt=False), FedTHE(adapt_steps=0)
    assert (fixed.adapts, still.adapts, FedTHE(adapt=False, memo_steps=1).adapts) == (False, True, True)
    rows = [
        [r.value for r in evaluate(*final(method, federation, config), {}) if r.metric.startswith("accuracy")]
        for method in (fixed, still)
    ]
    assert rows[0] == rows[1]


def test_detectors_are_told_the_mean_of_the_heads(nets, images):
    z = nets["backbone"](images)
    method = FedTHE()
    readout, generic = method.readout(nets), method.generic_readout(nets)
    assert torch.allclose(z @ readout.weight.T + readout.bias, readout.head(z), atol=1e-4)
    assert torch.allclose(readout.head(z), (nets["head"](z) + nets["personal_head"](z)) / 2, atol=1e-5)
    assert torch.equal(generic.head(z), nets["head"](z))
    assert torch.equal(generic.weight, nets["head"].weight)


# FedTHE+


def same_stream(purpose):
    """The same draws at each request."""
    return generator(0, purpose)


def test_the_marginal_entropy_is_that_of_the_mean_probabilities(rng):
    logits = torch.randn(16, 6, generator=rng)
    p = logits.softmax(1).mean(0)
    assert float(marginal_entropy(logits)) == pytest.approx(float(-(p * p.log()).sum()), rel=1e-5)


@pytest.mark.parametrize("steps", [1, 3])
def test_memo_takes_sgd_steps_on_all_nets_and_forgets_them(steps, nets, images):
    before = {name: value.clone() for name, value in nets.state_dict().items()}
    ctx = context(nets, rng=same_stream, std=0.25, mean=0.5)
    method = FedTHE(memo_steps=steps, memo_lr=0.01, memo_views=4)
    x, e = images[:1].clamp(-2, 2), torch.tensor([[0.3, 0.7]])
    with torch.no_grad():
        memo = method.memo(nets, ctx)
        memo(images[1:2], e)
        found = memo(x, e)

    own = copy.deepcopy(nets).requires_grad_(True)
    optimiser = torch.optim.SGD(own.parameters(), lr=0.01)

    def classify(batch):
        z = own["backbone"](batch)
        return 0.3 * own["head"](z) + 0.7 * own["personal_head"](z)

    views = (augmix((x * 0.25 + 0.5).repeat(4, 1, 1, 1), same_stream) - 0.5) / 0.25
    for _ in range(steps):
        optimiser.zero_grad()
        p = classify(views).softmax(1).mean(0)
        (-(p * p.log()).sum()).backward()
        optimiser.step()
    assert torch.allclose(found, classify(x), atol=1e-3)
    assert not torch.allclose(found, 0.3 * nets["head"](nets["backbone"](x)), atol=1e-2)
    z = nets["backbone"](x)
    assert not torch.allclose(found, 0.3 * nets["head"](z) + 0.7 * nets["personal_head"](z), atol=1e-2)
    assert all(torch.equal(value, before[name]) for name, value in nets.state_dict().items())


def test_an_image_leaves_nothing_behind_for_the_next(nets, images):
    ctx = context(nets, rng=same_stream)
    method = FedTHE(memo_steps=2, memo_lr=0.05, memo_views=4)
    e = torch.tensor([[0.5, 0.5]])
    with torch.no_grad():
        memo = method.memo(nets, ctx)
        first = memo(images[:1], e)
        memo(images[1:2], e)
        assert torch.equal(memo(images[:1], e), first)


def test_fedthe_plus_predicts_a_stream_and_leaves_the_nets_bit_identical(nets, images, own):
    before = {name: value.clone() for name, value in nets.state_dict().items()}
    ctx = context(nets, memory=own, server=own["feature"].flip(0))
    method = FedTHE(memo_steps=1, memo_lr=1e-9, memo_views=2)
    with torch.no_grad():
        output = method.predictor(nets, ctx)(images[:6])
    assert torch.equal(output.z, nets["backbone"](images[:6]))
    # With hardly a step it is FedTHE: each image gets its own weights.
    assert torch.allclose(output.logits, answers(FedTHE(), nets, ctx, [images[:6]]), atol=1e-3)
    moved = answers(replace(method, memo_lr=0.05), nets, ctx, [images[:6]])
    assert not torch.allclose(moved, output.logits, atol=1e-2)
    assert not any(parameter.requires_grad for parameter in nets.parameters())
    assert all(torch.equal(value, before[name]) for name, value in nets.state_dict().items())


def test_views_are_made_of_images_and_not_of_normalised_ones(nets, images, monkeypatch):
    seen = []

    def unchanged(x, rng):
        seen.append(x)
        return x

    monkeypatch.setattr(module, "augmix", unchanged)
    x = images[:1].clamp(-2, 2)
    with torch.no_grad():
        FedTHE(memo_steps=1).memo(nets, context(nets, std=0.25, mean=0.5))(x, torch.tensor([[0.5, 0.5]]))
    assert torch.allclose(seen[0], (x * 0.25 + 0.5).expand(16, -1, -1, -1))


def test_a_whole_run_with_every_detector_is_finite(federation, config):
    engine, state = final(FedTHE(), federation, config)
    rows = evaluate(engine, state, {name: DETECTORS[name] for name in ("msp", "energy")})
    assert {"accuracy", "accuracy_generic", "auroc"} <= {row.metric for row in rows}
    assert isinstance(engine.nets()["personal_head"], nn.Linear)
