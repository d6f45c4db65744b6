"""FOOGD() against the paper, equation by equation, with sums, kernels and derivatives written out."""

import math
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from foogd import FOOGD, AnchoredFOOGD, simulate
from foogd.core.random import Streams, generator
from foogd.core.types import Context, Output
from foogd.detectors.registry import resolve_detector
from foogd.engine.batches import BatchMaker
from foogd.engine.eager import EagerEngine, build_nets
from foogd.functional import median_bandwidth
from foogd.methods import foogd
from foogd.simulate import initial_state, run_round

METHOD = FOOGD(score_width=16)
SIZE, WIDTH = 7, 5


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def speaking(score):
    """A score network as in the middle of training: its last layer is not 0."""
    for value in score.net[3].parameters():
        torch.nn.init.normal_(value, std=0.3, generator=generator(1))
    return score


@pytest.fixture
def score():
    found = METHOD.score_network(WIDTH, 3).double()
    z = normal(40, WIDTH, seed=8).exp()
    found.measure(found.moments(z, torch.zeros(40, dtype=torch.int64)))
    return speaking(found)


@pytest.fixture
def u():
    """A batch of features in the space of the score network."""
    return normal(SIZE, WIDTH, seed=2) + 0.4


LABELS = torch.arange(SIZE) % 3


# Eq. 4


def eq4(score, u, levels, v):
    """Each vector's σ²·½‖s(ũ, σ) − ∇ log q(ũ | u)‖² with q = N(u, σ²I), in the mean."""
    total = 0.0
    for one, level, noise in zip(u, levels.tolist(), v, strict=True):
        noisy = (one + level * noise).requires_grad_()
        log_density = torch.distributions.MultivariateNormal(one, level**2 * torch.eye(WIDTH).to(u)).log_prob(noisy)
        (target,) = torch.autograd.grad(log_density, noisy)
        total += level**2 * 0.5 * (score(noisy.detach()[None], level)[0] - target).square().sum().item()
    return total / len(u)


def ladder_of(method):
    steps = (math.log(method.sigma_max) - math.log(method.sigma_min)) / (method.sigma_levels - 1)
    return [method.sigma_min * math.exp(k * steps) for k in range(method.sigma_levels)]


def eq4_draws(method, u):
    """The levels and the noise that the method draws."""
    stream, ladder = Streams(3)("dsm"), torch.tensor(ladder_of(method), dtype=u.dtype)
    levels = ladder[torch.randint(len(ladder), (len(u),), generator=stream)]
    return levels, torch.randn(u.shape, generator=stream, dtype=u.dtype)


def test_equation_4_is_score_matching_at_a_level_for_each_vector_with_the_weight_of_its_square(score, u):
    levels, v = eq4_draws(METHOD, u)
    assert len(set(levels.tolist())) > 2
    assert METHOD.denoising(score, u, Streams(3)).item() == pytest.approx(eq4(score, u, levels, v), rel=1e-10)


@pytest.mark.parametrize("level", ladder_of(METHOD))
def test_equation_4_holds_at_every_level_of_the_ladder(level, score, u):
    alone = replace(METHOD, sigma=level, sigma_levels=1)
    v = torch.randn(u.shape, generator=Streams(3)("dsm"), dtype=u.dtype)
    found = alone.denoising(score, u, Streams(3)).item()
    assert found == pytest.approx(eq4(score, u, torch.full((SIZE,), level), v), rel=1e-6)


def test_the_levels_of_equation_4_are_equally_likely(u):
    asked = Counter()

    def zero(v, sigma):
        asked.update(sigma.tolist())
        return torch.zeros_like(v)

    rng = Streams(0)
    for _ in range(400):
        METHOD.denoising(zero, u, rng)
    assert sorted(asked) == pytest.approx(ladder_of(METHOD), rel=1e-9)
    share = asked.total() / METHOD.sigma_levels
    assert max(abs(count - share) for count in asked.values()) < 5 * share**0.5


# Eq. 6, 7 and 8


def eq6(score, method):
    """T Langevin steps from N(0, I)."""
    stream = Streams(3)("langevin")
    v = torch.randn(SIZE, WIDTH, generator=stream, dtype=torch.float64)
    for _ in range(method.steps):
        w = torch.randn(SIZE, WIDTH, generator=stream, dtype=torch.float64)
        v = v + method.step / 2 * score(v, method.sigma) + math.sqrt(method.step) * w
    return v


def eq7(a, b):
    """The squared MMD with h = half and one times the mean squared distance of two vectors."""
    union = torch.cat([a, b]).detach()
    distances = [float((p - q).square().sum()) for i, p in enumerate(union) for j, q in enumerate(union) if i != j]
    mean = sum(distances) / len(distances)

    def kernel(x, y, h):
        return sum(torch.exp(-(p - q).square().sum() / h) for p in x for q in y) / (len(x) * len(y))

    return sum(kernel(a, a, h) - 2 * kernel(a, b, h) + kernel(b, b, h) for h in (mean / 2, mean))


def test_equation_6_generates_from_a_normal_start(score, u):
    start = torch.randn(SIZE, WIDTH, generator=(rng := Streams(3))("langevin"), dtype=torch.float64)
    torch.testing.assert_close(METHOD.generate(score, start, LABELS, rng("langevin")), eq6(score, METHOD))


def test_equation_7_compares_generated_features_with_the_batch_and_teaches_the_network(score, u):
    method = replace(METHOD, lambda_m=1.0)
    found, wanted = method.sm3d(score, u, LABELS, Streams(3)), eq7(u, eq6(score, method))
    assert found.item() == pytest.approx(wanted.item(), rel=1e-9)
    parameters = list(score.parameters())
    slopes = zip(torch.autograd.grad(found, parameters), torch.autograd.grad(wanted, parameters), strict=True)
    for one, two in slopes:
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-9)
        assert bool(one.any())


@pytest.mark.parametrize("lambda_m", [METHOD.lambda_m, 0.2])
def test_equation_8_mixes_score_matching_and_mmd(lambda_m, score, u):
    method = replace(METHOD, lambda_m=lambda_m)
    levels, v = eq4_draws(method, u)
    wanted = (1 - lambda_m) * eq4(score, u, levels, v) + lambda_m * eq7(u, eq6(score, method)).item()
    assert method.sm3d(score, u, LABELS, Streams(3)).item() == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(("lambda_m", "drawn"), [(0.0, {"dsm"}), (1.0, {"langevin"}), (0.5, {"dsm", "langevin"})])
def test_terms_of_weight_zero_are_left_out(lambda_m, drawn, score, u):
    asked, rng = set(), Streams(3)
    method = replace(METHOD, lambda_m=lambda_m)
    assert torch.isfinite(method.sm3d(score, u, LABELS, lambda purpose: asked.add(purpose) or rng(purpose)))
    assert asked == drawn


# Eq. 11 and 12


def eq11(score, z):
    """The mean of k(a,b)s(a)·s(b) + s(a)·∇_b k + s(b)·∇_a k + tr ∇_a∇_b k over all pairs, derivatives by autograd."""
    h, total = float(median_bandwidth(z)), 0.0
    s = score(z).detach()
    for i, one in enumerate(z.detach()):
        for j, other in enumerate(z.detach()):
            a, b = one.clone().requires_grad_(), other.clone().requires_grad_()
            k = torch.exp(-(a - b).square().sum() / h)
            of_a, of_b = torch.autograd.grad(k, (a, b), create_graph=True)
            trace = sum(torch.autograd.grad(of_a[d], b, retain_graph=True)[0][d] for d in range(len(a)))
            total += (k * (s[i] @ s[j]) + s[i] @ of_b + s[j] @ of_a + trace).item()
    return total / len(z) ** 2


def test_equation_11_is_the_stein_term_in_units_of_the_level(score, u):
    wanted = METHOD.sigma**2 * eq11(lambda v: score(v, METHOD.sigma), u)
    assert METHOD.stein(score, u).item() == pytest.approx(wanted, rel=1e-9)


def made(method, federation, config, count=8):
    """Nets, a batch of the first client as local training sees it, and what the client knows."""
    nets = build_nets(method, federation, config).train()
    speaking(nets["score"])
    own = federation.train_indices[0]
    maker = BatchMaker.of(method, federation, config, torch.device("cpu"))
    batch = method.embed(nets, maker.training(own[:count], own, Streams(0)))
    return nets, batch, Context(0, 1, tuple(method.groups), federation.class_counts(0), nets, {}, {}, Streams(1))


def test_equation_12_is_cross_entropy_on_the_originals_and_the_stein_term(federation, config):
    nets, batch, ctx = made(METHOD, federation, config)
    score, level = nets["score"], METHOD.sigma
    z, z_hat = nets["backbone"](torch.cat([batch.x, batch.x_hat])).split(len(batch.x))
    assert not torch.allclose(z, z_hat, rtol=1e-2)
    originals = cross_entropy(nets["head"](z), batch.y)
    stein = level**2 * eq11(lambda u: score(u, level), score.scale(z_hat))
    assert METHOD.lambda_a * stein > 1e-4
    found = METHOD.losses(nets, batch, ctx)
    assert found["model"].item() == pytest.approx(originals.item() + METHOD.lambda_a * stein, rel=1e-5)


@pytest.mark.parametrize("method", [METHOD, AnchoredFOOGD(score_width=16)], ids=["published", "anchored"])
def test_the_stein_term_moves_the_backbone_and_never_the_score_network(method, federation, config):
    nets, batch, ctx = made(method, federation, config)
    term = method.stein(nets["score"], nets["score"].scale(batch.z_hat))
    whole = method.losses(nets, batch, ctx)["model"]
    for loss in (term, whole):
        parameters = list(nets["score"].parameters())
        reached = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
        assert all(slope is None for slope in reached)
    assert torch.autograd.grad(term, batch.z_hat, retain_graph=True)[0].abs().sum() > 0
    assert any(bool(slope.any()) for slope in torch.autograd.grad(term, list(nets["backbone"].parameters())))


# Eq. 3


def test_equation_3_averages_both_nets_by_numbers_of_images(federation, config, with_train_indices):
    own = [indices[: 12 + 20 * client] for client, indices in enumerate(federation.train_indices)]
    uneven = with_train_indices(federation, own)
    engine = EagerEngine(METHOD, uneven, config)
    start, train, sent = initial_state(engine), engine.train, []

    def heard(*args):
        for update in train(*args):
            sent.append(update)
            yield update

    engine.train = heard
    result = run_round(engine, start, 0)
    assert not result.refused
    images = [len(indices) for indices in own]
    assert len(set(images)) == 3
    found = engine.layout.named(result.state.server.shared)
    rows = [engine.layout.named(update.shared) for update in sent]
    assert {"backbone", "head", "score"} == {name.partition(".")[0] for name in found}
    for name, value in found.items():
        wanted = sum(n / sum(images) * row[name].double() for n, row in zip(images, rows, strict=True))
        torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found["score.net.3.weight"], sum(row["score.net.3.weight"] for row in rows) / 3)


# Eq. 9


def test_equation_9_is_the_norm_of_one_output_for_each_image(federation, config):
    nets, batch, _ = made(METHOD, federation, config)
    nets.eval()
    z, score, seen = batch.z.detach(), nets["score"], []
    score.net.register_forward_hook(lambda net, args, out: seen.append(len(out)))
    found = resolve_detector("score_norm")(Output(z, nets["head"](z)), METHOD.readout(nets)).detach()
    assert seen == [len(z)]  # one output of the network for an image, and no image needs another one
    for one, value in zip(z, found, strict=True):
        s = score(score.scale(one[None]), METHOD.sigma)[0].detach()
        assert float(value) == pytest.approx(math.sqrt(sum(x**2 for x in s.tolist())), rel=1e-5)


def test_detection_reads_the_score_at_the_methods_level_or_at_another(federation, config):
    method = FOOGD(sigma=0.2, score_width=16)
    nets, batch, _ = made(method, federation, config)
    nets["score"].centre.add_(0.5)  # a space that has measured something
    z = batch.z.detach()
    for told in (method.readout(nets), method.generic_readout(nets)):
        assert torch.equal(told.score(z), nets["score"](nets["score"].scale(z), 0.2))
        assert torch.equal(told.score(z, 0.5), nets["score"](nets["score"].scale(z), 0.5))
        assert torch.equal(told.score_space(z), nets["score"].scale(z))
        assert told.class_score is None


# What the score network may not know


def unlabelled(method, federation, config):
    """Losses, sums and scores of a batch, and of the same images with their labels permuted."""
    for order in (slice(None), torch.arange(7, -1, -1)):
        nets, batch, ctx = made(method, federation, config)
        permuted = batch._replace(y=batch.y[order])
        sums = method.survey(nets, permuted, ctx)
        nets["score"].measure({name.removeprefix("score."): value for name, value in sums.items()})
        loss = method.losses(nets, permuted, ctx)["score"]
        yield permuted.y, loss.detach(), sums, method.readout(nets).score(batch.z.detach()).detach()


def test_no_label_reaches_the_score_network(federation, config):
    (y, *here), (other, *there) = unlabelled(METHOD, federation, config)
    assert not torch.equal(y, other)
    (loss, sums, scores), (loss_too, sums_too, scores_too) = here, there
    assert torch.equal(loss, loss_too)
    assert torch.equal(scores, scores_too)
    assert sums.keys() == sums_too.keys()
    assert all(torch.equal(value, sums_too[name]) for name, value in sums.items())


def test_labels_do_reach_the_anchored_one(federation, config):
    (_, *here), (_, *there) = unlabelled(AnchoredFOOGD(score_width=16), federation, config)
    assert not torch.equal(here[0], there[0])
    assert not torch.equal(here[1]["score.sum"], there[1]["score.sum"])
    assert not torch.equal(here[2], there[2])


@pytest.mark.parametrize(("method", "same"), [(FOOGD, True), (AnchoredFOOGD, False)])
def test_a_whole_run_with_permuted_labels_gives_the_same_score_network_on_a_fixed_backbone(
    method, same, federation, config
):
    labels = federation.train.labels.clone()
    for own in federation.train_indices:
        labels[own] = labels[own.flip(0)]
    assert not torch.equal(labels, federation.train.labels)
    permuted = replace(federation, train=replace(federation.train, labels=labels))
    rows = []
    for data in (federation, permuted):
        engine = EagerEngine(method(train_base=False, score_width=16, steps=2), data, config)
        *_, last = simulate(engine.method, data, config, engine)
        rows.append(engine.layout.named(last.state.server.shared)["score.net.0.weight"])
    assert torch.equal(*rows) == same


# What a reader opens first


def test_the_file_of_the_paper_is_short_and_has_few_settings():
    assert len(fields(FOOGD)) <= 16
    assert len(Path(foogd.__file__).read_text().splitlines()) <= 280
    for item in fields(FOOGD):
        assert item.name == "base" or item.metadata["help"], item.name
