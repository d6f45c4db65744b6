"""FedATOL: generated images in local training, and the three ways to a generator."""

import math
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import cross_entropy

from foogd import FedAvg, simulate
from foogd.core.random import Streams
from foogd.core.types import Batch, Context, Phase, both_views
from foogd.data.store import ImageStore
from foogd.data.synthetic import tiny_federation
from foogd.engine.batches import BatchMaker
from foogd.engine.eager import EagerEngine, build_nets
from foogd.methods.fedatol import FedATOL, class_latents, gan_losses, outlier_latents
from foogd.methods.foogd import FOOGD
from foogd.nets import ImageDiscriminator, ImageGenerator, bind_dropout
from foogd.presets.loader import read_preset, resolve
from foogd.simulate import initial_state, run_round
from foogd.testing import check_method

OFF = {"aux_id": False, "lambda_ood": 0.0, "lambda_al": 0.0, "smoothing": 0.0, "clip": 0.0, "generator_width": 4}
SMALL = FedATOL(generator="random", generator_width=4)


@pytest.fixture
def few(federation):
    """The federation with 20 images a client."""
    return replace(federation, train_indices=tuple(own[:20] for own in federation.train_indices))


def trained(method, federation, config):
    engine = EagerEngine(method, federation, config)
    *_, result = simulate(method, federation, config, engine)
    return engine, result.state


def named(engine, state):
    values = engine.layout.named(state.server.shared, state.clients[0].personal, state.server.frozen)
    return {**values, **state.server.integers}


def made(method, federation, config, batch_size=12):
    """Nets, a batch with generated images and features, and its context."""
    nets = build_nets(method, federation, config).train()
    bind_dropout(nets, Streams(2)("dropout"))
    own = federation.train_indices[0]
    maker = BatchMaker.of(method, federation, config, torch.device("cpu"))
    ctx = Context(
        0, 5, ("model",), federation.class_counts(0), nets, {}, {}, Streams(1), mean=maker.mean, std=maker.std
    )
    batch = method.extend(nets, maker.training(own[:batch_size], own, Streams(0)), ctx)
    return nets, method.embed(nets, batch), ctx


# The neutral element


@pytest.mark.parametrize(("backbone", "views"), [("cnn", 1), ("cnn", 2), ("wrn16-1", 1)])  # the last has dropout
def test_with_everything_off_it_is_fedavg_bit_for_bit(backbone, views, few, config):
    config = replace(config, backbone=backbone, flip=True)
    plain = named(*trained(FedAvg(views), few, config))
    own = named(*trained(FedATOL(views, generator="random", **OFF), few, config))
    assert all(torch.equal(value, own[name]) for name, value in plain.items())
    _, batch, _ = made(FedATOL(generator="random", **OFF), few, config)
    assert batch.x_more is None


def test_wrapped_without_its_terms_foogd_is_fedatol(few, config):
    config = replace(config, rounds=1)
    plain = named(*trained(SMALL, few, config))
    wrapped = named(*trained(FOOGD(SMALL, lambda_a=0.0, ce_on="ori"), few, config))
    assert all(torch.equal(value, wrapped[name]) for name, value in plain.items())


@pytest.mark.parametrize(
    "setting",
    [{"mu": 2.0}, {"s": 1.0}, {"space": 2.0}, {"aux_id": False}, {"ood_ratio": 1}, {"lambda_ood": 0.5},
     {"lambda_al": 2.0}, {"temperature": 0.5}, {"smoothing": 0.1}, {"clip": 0.1}, {"bn": "real"},
     {"generator_width": 5}],
    ids=str,
)  # fmt: skip
def test_every_setting_has_an_effect(setting, few, config):
    config = replace(config, rounds=1)
    usual = named(*trained(SMALL, few, config))
    other = named(*trained(replace(SMALL, **setting), few, config))
    assert not torch.equal(usual["backbone.stages.0.0.weight"], other["backbone.stages.0.0.weight"])


# Latents and images


def test_latents_lie_where_they_should():
    stream = torch.Generator().manual_seed(0)
    means = 5.0 * (2 * torch.randint(2, (4, 100), generator=stream) - 1).float()
    y = torch.arange(4).repeat(50)
    near = class_latents(means, y, s=0.1, stream=stream)
    distance = near - means[y]
    assert float(distance.abs().max()) < 6 * 0.1
    assert float(distance.std()) == pytest.approx(0.1, rel=0.03)
    outer = outlier_latents(500, 10.0, stream=stream, device=torch.device("cpu"))
    assert outer.shape == (500, 100)
    assert float(outer.abs().max()) <= 10.0
    assert float(outer.std()) == pytest.approx(10 / math.sqrt(3), rel=0.02)
    assert abs(float(outer.mean())) < 0.2


def test_the_images_are_those_of_the_latents_and_normalised(federation, config):
    nets, batch, ctx = made(replace(SMALL, mu=3.0, s=0.2, space=3.0), federation, config)
    generator, seen = nets["generator"], Streams(1)("atol")
    near = class_latents(generator.means, batch.y, s=0.2, stream=seen)
    outer = outlier_latents(4 * 12, 0.5 * 3.0 * 3.0, stream=seen, device=torch.device("cpu"))
    images = generator.eval()(torch.cat([near, outer])).detach()
    assert torch.allclose(batch.x_more * ctx.std + ctx.mean, images, atol=1e-5)
    assert not batch.x_more.requires_grad
    assert float(images.min()) >= 0
    assert float(images.max()) <= 1


def test_class_means_are_signs_from_the_seed(federation, config):
    first, again = (build_nets(FedATOL(mu=3.0), federation, config)["generator"].means for _ in range(2))
    other = build_nets(FedATOL(mu=3.0), federation, replace(config, seed=1))["generator"].means
    assert first.shape == (5, 100)
    assert set(first.unique().tolist()) == {-3.0, 3.0}
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len({tuple(row.tolist()) for row in first}) == 5


def test_all_clients_have_the_same_class_means(few, config, monkeypatch):
    seen = []
    extend = FedATOL.extend

    def recording(self, nets, batch, ctx):
        seen.append((nets["generator"].means.clone(), float(ctx.class_counts[0])))
        return extend(self, nets, batch, ctx)

    monkeypatch.setattr(FedATOL, "extend", recording)
    trained(SMALL, few, config)
    assert len({client for _, client in seen}) == 3
    assert all(torch.equal(means, seen[0][0]) for means, _ in seen)


def test_the_generator_never_changes(few, config):
    engine = EagerEngine(SMALL, few, config)
    start = initial_state(engine)
    before = start.server.frozen.clone()
    *_, result = simulate(SMALL, few, config, engine, start=start)
    assert engine.layout.frozen_size > 500
    assert torch.equal(result.state.server.frozen, before)
    assert torch.equal(engine._frozen, before)
    assert {name.partition(".")[0] for name in engine.layout.frozen_names} == {"generator"}


def test_it_works_in_eval_mode(federation, config):
    method = replace(SMALL, ood_ratio=0, s=0.0)
    _, batch, ctx = made(method, federation, config)
    alone = method.extend(ctx.received.train(), Batch(batch.x[:1], batch.y[:1]), replace(ctx, rng=Streams(1)))
    assert torch.allclose(alone.x_more[0], batch.x_more[0], atol=1e-5)


@pytest.mark.parametrize("size", [16, 32])
def test_an_untrained_generator_does_not_make_the_same_grey_image_each_time(size, config):
    federation = tiny_federation(size=size)
    method = replace(SMALL, generator_width=8)
    nets = build_nets(method, federation, config)
    generator = nets["generator"].eval()
    y = torch.arange(5).repeat_interleave(20)
    with torch.no_grad():
        images = generator(class_latents(generator.means, y, s=0.1, stream=torch.Generator().manual_seed(0)))
        outer = generator(outlier_latents(100, 10.0, stream=torch.Generator(), device=torch.device("cpu")))
    assert 0.08 < float(images.std()) < 0.4
    assert 0.08 < float(outer.std()) < 0.4
    centres = images.view(5, 20, -1).mean(1)
    within = (images.view(5, 20, -1) - centres[:, None]).square().mean()
    assert float(within) < 0.05 * float((centres - centres.mean(0)).square().mean())


def test_sizes_are_those_of_the_paper(config):
    federation = tiny_federation(size=32)
    generator = build_nets(FedATOL(), federation, config)["generator"]
    assert sum(p.numel() for p in generator.parameters()) == 3_576_704
    assert FedATOL().width((3, 64, 64)) == 64
    assert FedATOL().width((3, 16, 16)) == 8
    assert FedATOL(generator_width=7).width((3, 16, 16)) == 7


def test_the_demo_has_a_generator_for_a_processor():
    _, method = resolve(read_preset("demo"), {"method": "fedatol"})
    assert method == FedATOL(generator_width=8, gan_rounds=3, gan_lr=1e-3)


# The loss


def by_hand(nets, method, z, y, auxiliary, outliers):
    """The loss of ATOL from its formulas, one sample at a time, in float64."""
    head = nets["head"].double()
    classes = head.out_features
    count = len(auxiliary)
    every, labels = torch.cat([z, auxiliary]).double(), [*y.tolist(), *y[:count].tolist()]
    total = 0.0
    for row, label in zip(head(every), labels, strict=True):
        log_p = row - torch.logsumexp(row, 0)
        target = torch.full((classes,), method.smoothing / classes, dtype=torch.float64)
        target[label] += 1 - method.smoothing
        total = total - (target * log_p).sum() / len(every)
    for row in head(outliers.double()):
        total = total + method.lambda_ood * (torch.logsumexp(row, 0) - row.mean()) / len(outliers)
    unit = every / every.norm(dim=1, keepdim=True)
    anchors = []
    for i in range(len(unit)):
        others = [a for a in range(len(unit)) if a != i]
        positives = [p for p in others if labels[p] == labels[i]]
        if positives:
            similar = unit @ unit[i] / method.temperature
            log_sum = torch.logsumexp(similar[others], 0)
            anchors.append(sum(log_sum - similar[p] for p in positives) / len(positives))
    return float((total + method.lambda_al * sum(anchors) / len(anchors)).detach())


@pytest.mark.parametrize("views", [1, 2])
def test_the_loss_is_the_one_of_the_paper(views, federation, config):
    method = replace(
        SMALL, views=views, lambda_ood=0.7, lambda_al=0.3, temperature=0.2, smoothing=0.4, ood_ratio=2
    )  # fmt: skip
    nets, batch, ctx = made(method, federation, config)
    assert len(batch.z_more) == 3 * 12
    found = float(method.losses(nets, batch, ctx)["model"].detach())
    both = both_views(batch)
    assert len(both.z) == 12 * views
    auxiliary, outliers = batch.z_more[:12], batch.z_more[12:]
    wanted = by_hand(nets, method, both.z, both.y, auxiliary, outliers)
    assert found == pytest.approx(wanted, rel=1e-5)


def test_outliers_cost_least_where_the_head_says_nothing(federation, config):
    method = replace(SMALL, aux_id=False, lambda_al=0.0, smoothing=0.0)
    nets, batch, ctx = made(method, federation, config)

    def exposure():
        loss = method.losses(nets, batch, ctx)["model"] - cross_entropy(nets["head"](batch.z), batch.y)
        return float(loss.detach())

    assert exposure() > math.log(5)
    torch.nn.init.zeros_(nets["head"].weight)
    assert exposure() == pytest.approx(math.log(5), rel=1e-6)


def test_the_loss_has_no_gradient_for_the_generator(federation, config):
    nets, batch, ctx = made(SMALL, federation, config)
    loss = SMALL.losses(nets, batch, ctx)["model"]
    reached = torch.autograd.grad(loss, list(nets["generator"].parameters()), allow_unused=True)
    assert all(gradient is None for gradient in reached)


def test_the_gradient_is_clipped(federation, config):
    """One step of plain SGD is then no longer than lr·clip."""
    config = replace(config, rounds=1, batch_size=60, momentum=0.0, weight_decay=0.0, lr=0.5)
    for clip in (0.01, 0.0):
        method = replace(SMALL, clip=clip)
        engine = EagerEngine(method, federation, config)
        start = initial_state(engine)
        update = next(engine.train(start.server, [replace(start.clients[0])], 0))
        old, new = (engine.layout.named(row) for row in (start.server.shared, update.shared))
        moved = [(new[n] - old[n]).flatten() for n in old if "running" not in n]
        assert (float(torch.cat(moved).norm()) <= 0.5 * 0.01 * 1.001) == (clip > 0)


def test_running_statistics_can_be_those_of_real_images(federation, config):
    def buffers(method):
        nets, batch, _ = made(method, federation, config)
        return dict(nets["backbone"].named_buffers()), batch.z

    plain, z = buffers(FedAvg())
    real, z_real = buffers(replace(SMALL, bn="real"))
    joint, z_joint = buffers(SMALL)
    assert all(torch.equal(value, real[name]) for name, value in plain.items())
    assert torch.equal(z, z_real)
    assert any(not torch.equal(value, joint[name]) for name, value in plain.items())
    assert not torch.equal(z, z_joint)


def test_with_separate_statistics_generated_images_still_train_the_backbone(federation, config):
    nets, batch, _ = made(replace(SMALL, bn="real"), federation, config)
    gradient = torch.autograd.grad(batch.z_more.square().sum(), next(nets["backbone"].parameters()))[0]
    assert float(gradient.abs().sum()) > 0
    own = nets["backbone"].train()(batch.x_more)
    assert torch.allclose(own, batch.z_more, atol=1e-5)


def test_traffic_is_fedavgs_and_the_generator_once(few, config):
    plain = list(simulate(FedAvg(), few, config))
    own = list(simulate(SMALL, few, config))
    generator = build_nets(SMALL, few, config)["generator"]
    size = 4 * sum(value.numel() for value in generator.state_dict().values())
    assert size == 4 * (sum(v.numel() for v in generator.images.state_dict().values()) + 5 * 100)
    assert [r.bytes_up for r in own] == [r.bytes_up for r in plain]
    assert own[0].bytes_down == plain[0].bytes_down + 3 * size
    assert own[1].bytes_down == plain[1].bytes_down


def test_a_client_whose_update_was_refused_holds_the_generator_all_the_same(few, config, monkeypatch):
    undisturbed = list(simulate(SMALL, few, config))
    module = sys.modules["foogd.simulate"]  # the package has a function of the same name
    monkeypatch.setattr(module, "refusal", lambda update, *_: "no" if update.client == 1 else None)
    refused = list(simulate(SMALL, few, config))
    assert [set(r.refused) for r in refused] == [{1}] * len(refused)
    assert [r.bytes_down for r in refused] == [r.bytes_down for r in undisturbed]


# Generators that learn


@pytest.fixture(scope="module")
def dark():
    """A federation of dark images."""
    federation = tiny_federation()
    train = federation.train
    pixels = (train.batch(torch.arange(len(train))) * 80).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
    store = ImageStore(pixels, train.labels, classes=train.classes, name="dark")
    mean, std = store.channel_moments()
    return replace(federation, train=store, mean=mean, std=std)


def brightness(engine, state, method):
    generator = engine.server_nets().load(state.server)["generator"].eval()
    with torch.no_grad():
        return float(generator(method.gan_latents(200, torch.Generator().manual_seed(0), torch.device("cpu"))).mean())


def test_each_player_of_the_gan_has_a_loss_of_its_own():
    shape, stream = (3, 16, 16), torch.Generator().manual_seed(0)
    generator, discriminator = ImageGenerator(shape, width=4), ImageDiscriminator(shape, width=4)
    real, latents = torch.rand(8, *shape, generator=stream), torch.randn(8, 100, generator=stream)
    losses = gan_losses(generator, discriminator, real, latents)
    found = {name: float(loss.detach()) for name, loss in losses.items()}
    fake = generator(latents)
    good, bad = (torch.sigmoid(discriminator(images)).detach() for images in (real, fake))
    assert found["generator"] == pytest.approx(float(-bad.log().mean()), rel=1e-4)
    assert found["discriminator"] == pytest.approx(float(-good.log().mean() - (1 - bad).log().mean()), rel=1e-4)
    players = {"generator": generator, "discriminator": discriminator}
    for name, loss in losses.items():
        for other, net in players.items():
            reached = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True, retain_graph=True)
            assert all((gradient is not None) == (name == other) for gradient in reached)


def test_a_central_gan_learns_from_all_images_before_the_first_round(dark, config):
    method = FedATOL(generator="central", generator_width=4, gan_epochs=6, gan_lr=5e-3)
    assert method.pools_data
    engine = EagerEngine(method, dark, config)
    assert set(engine.nets()) == {"backbone", "head", "generator"}  # no discriminator to send
    untrained = initial_state(engine, pretrain=False)
    start = initial_state(engine)
    assert not torch.equal(start.server.frozen, untrained.server.frozen)
    assert torch.equal(start.server.shared, untrained.server.shared)
    old, new = (engine.layout.named(s.server.shared, None, s.server.frozen) for s in (untrained, start))
    assert torch.equal(old["generator.means"], new["generator.means"])
    assert not torch.equal(old["generator.images.net.1.running_mean"], new["generator.images.net.1.running_mean"])
    data = float(dark.train.batch(torch.arange(len(dark.train))).mean())
    before, after = (abs(brightness(engine, s, method) - data) for s in (untrained, start))
    assert after < 0.5 * before
    result = run_round(engine, start, 0)
    assert torch.equal(result.state.server.frozen, start.server.frozen)
    plain = next(simulate(FedAvg(), dark, config))
    assert result.bytes_up == plain.bytes_up
    assert result.bytes_down == plain.bytes_down + 3 * 4 * engine.layout.frozen_size
    still = initial_state(EagerEngine(replace(method, gan_epochs=0), dark, config))
    assert torch.equal(still.server.frozen, untrained.server.frozen)


def test_clients_can_train_the_gan_together(dark, config):
    method = FedATOL(generator="fed_gan", gan_rounds=2, gan_lr=5e-3, **OFF)
    assert not method.pools_data
    assert not method.frozen
    config = replace(config, rounds=3, local_epochs=6)
    engine = EagerEngine(method, dark, config)
    states = [initial_state(engine), *(result.state for result in simulate(method, dark, config, engine))]
    values = [named(engine, state) for state in states]
    for name in ("generator.images.net.0.weight", "discriminator.net.0.weight"):
        changed = [not torch.equal(a[name], b[name]) for a, b in pairwise(values)]
        assert changed == [True, True, False], name
    for part in ("generator.", "discriminator."):
        later = [name for name in values[0] if name.startswith(part)]
        assert all(torch.equal(values[2][name], values[3][name]) for name in later)
    assert all(torch.equal(value["generator.means"], values[0]["generator.means"]) for value in values)
    assert all(not torch.equal(a["head.weight"], b["head.weight"]) for a, b in pairwise(values))
    data = float(dark.train.batch(torch.arange(len(dark.train))).mean())
    before, after = (abs(brightness(engine, states[t], method) - data) for t in (0, 2))
    assert after < 0.5 * before


def test_while_the_gan_learns_no_image_is_generated_for_the_model(federation, config):
    method = FedATOL(generator="fed_gan", generator_width=4)
    nets, batch, ctx = made(method, federation, config)
    assert batch.x_more is not None
    plain = Batch(batch.x, batch.y)
    assert method.extend(nets, plain, replace(ctx, groups=("generator", "discriminator"))) is plain


def test_the_gan_learns_on_latents_as_large_as_those_in_use():
    latents = FedATOL(mu=3.0).gan_latents(1000, torch.Generator().manual_seed(0), torch.device("cpu"))
    assert float(latents.std()) == pytest.approx(3.0, rel=0.02)


def test_the_first_statistics_leave_the_layers_as_they_were(federation, config):
    generator = build_nets(SMALL, federation, config)["generator"]
    norms = [layer for layer in generator.modules() if isinstance(layer, torch.nn.BatchNorm2d)]
    assert len(norms) == 3
    assert {norm.momentum for norm in norms} == {0.1}
    assert not any(module.training for module in generator.modules())


def test_phases_and_optimisers_of_the_gan(config):
    method = FedATOL(generator="fed_gan", gan_rounds=2, gan_lr=0.003, clip=0.5)
    model = Phase(("model",), 4)
    assert method.phases(1, 9, 4) == (Phase(("generator", "discriminator"), 4), model)
    assert method.phases(2, 9, 4) == (model,)
    assert FedATOL(generator="random").phases(0, 9, 4) == (model,)
    default = replace(Context.__dataclass_fields__["optimiser"].default_factory(), momentum=0.9)
    assert method.optimiser("model", default) == replace(default, clip=0.5)
    adam = method.optimiser("generator", default)
    assert (adam.kind, adam.lr, adam.betas, adam.clip) == ("adam", 0.003, (0.5, 0.999), 0.0)


@pytest.mark.parametrize(
    "method",
    [FedATOL(generator="fed_gan", gan_rounds=1, generator_width=4, ood_ratio=1),
     FedATOL(generator="central", gan_epochs=1, generator_width=4, ood_ratio=1)],
    ids=lambda method: method.generator,
)  # fmt: skip
def test_the_contract_holds_for_every_generator(method):
    check_method(method, tiny_federation(per_client=32))
