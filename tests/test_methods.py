"""FedAvg, FedRoD and FOOGD: the properties that their specifications promise."""

import math
from dataclasses import dataclass, replace
from typing import final

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from foogd import FOOGD, Config, FedAvg, FedRoD, InputError, Method, simulate
from foogd.engine.batches import BatchMaker
from foogd.engine.eager import EagerEngine, build_nets
from foogd.engine.rng import Streams
from foogd.methods import PROFILES, make_method, method_fields, method_names, method_settings, profile
from foogd.nets.score import ScoreNet
from foogd.simulate import initial_state, run_round, settled
from foogd.testing import check_method
from foogd.types import Batch, Context, Phase


def last(method, federation, config):
    *_, result = simulate(method, federation, config)
    return result.state


def named(method, federation, config):
    """Final travelling values by name, and the clients' private ones."""
    engine = EagerEngine(method, federation, config)
    *_, result = simulate(method, federation, config, engine)
    state = result.state
    values = engine.layout.named(state.server.shared, state.clients[0].personal)
    return {**values, **state.server.integers}, [client.personal for client in state.clients]


@pytest.mark.parametrize("base", ["fedln", "fedt3a", "fediir", "fedthe", "fedprox", "scaffold", "fedbn", "foster"])
def test_foogd_without_its_terms_is_its_base_bit_for_bit(base, federation, config):
    plain, private = named(make_method(base), federation, config)
    neutral = {"lambda_a": 0.0, "ce_on": "ori", "score_width": 32, "steps": 2}
    wrapped, kept = named(make_method(f"{base}+foogd", neutral), federation, config)
    for name, value in plain.items():
        assert torch.equal(value, wrapped[name]), name
    assert all(torch.equal(one, two) for one, two in zip(private, kept, strict=True))


# FedRoD


def balanced(federation, with_train_indices, per_class=6):
    """The same number of images of each class on every client."""
    labels = federation.train.labels
    by_class = [torch.nonzero(labels == c).flatten() for c in range(federation.num_classes)]
    count = min(per_class, min(len(c) for c in by_class) // 3)
    parts = [torch.cat([c[k * count : (k + 1) * count] for c in by_class]) for k in range(3)]
    return with_train_indices(federation, parts)


def test_fedrod_with_uniform_counts_trains_the_shared_nets_as_fedavg(federation, config, with_train_indices):
    even = balanced(federation, with_train_indices)
    assert len(set(even.describe().flatten().tolist())) == 1
    plain, _ = named(FedAvg(), even, config)
    both, private = named(FedRoD(), even, config)
    for name, value in plain.items():
        assert torch.equal(value, both[name]), name
    assert any(bool((row != 0).any()) for row in private)


def test_fedrod_with_skewed_counts_does_not(federation, config):
    plain, _ = named(FedAvg(), federation, config)
    both, _ = named(FedRoD(), federation, config)
    assert not torch.equal(plain["head.weight"], both["head.weight"])


def test_a_zero_private_head_predicts_as_the_generic_one(federation, config, rng):
    nets = build_nets(FedRoD(), federation, config)
    z = torch.rand(20, nets["head"].in_features, generator=rng)
    assert torch.equal(FedRoD().logits(nets, z), FedRoD().generic_logits(nets, z))
    readout = FedRoD().readout(nets)
    assert torch.allclose(z @ readout.weight.T + readout.bias, readout.head(z), atol=1e-5)


def test_private_heads_differ_and_share_no_memory(federation, config):
    state = last(FedRoD(), federation, config)
    rows = [client.personal for client in state.clients]
    assert not torch.equal(rows[0], rows[1])
    assert len({row.data_ptr() for row in rows}) == len(rows)


def test_absent_classes_make_no_nan(federation, config, with_train_indices):
    labels = federation.train.labels
    lonely = torch.nonzero(labels == 0).flatten()
    skewed = with_train_indices(federation, [lonely, *federation.train_indices[1:]])
    result = run_round(*_engine_and_start(FedRoD(), skewed, config), 0)
    assert not result.refused
    assert all(math.isfinite(loss) for loss in result.losses.values())


def _engine_and_start(method, federation, config):
    engine = EagerEngine(method, federation, config)
    return engine, initial_state(engine)


# FOOGD: the neutral element


@pytest.mark.parametrize("backbone", ["cnn", "wrn16-1"])  # the second has dropout
@pytest.mark.parametrize("base", [FedAvg(), FedRoD()])
def test_without_its_terms_foogd_is_its_base_bit_for_bit(base, backbone, federation, config):
    config = replace(config, backbone=backbone)
    plain, private = named(base, federation, config)
    wrapped, wrapped_private = named(FOOGD(base, lambda_a=0.0, ce_on="ori"), federation, config)
    for name, value in plain.items():
        assert torch.equal(value, wrapped[name]), name
    for one, two in zip(private, wrapped_private, strict=True):
        assert torch.equal(one, two)
    start = build_nets(FOOGD(base), federation, config).state_dict()
    assert not torch.equal(wrapped["score.net.0.weight"], start["score.net.0.weight"]), "the score network must learn"


@pytest.mark.parametrize("base", ["fedavg", "fedrod"])
def test_with_both_views_and_no_stein_term_foogd_is_the_augmented_base(base, federation, config):
    config = replace(config, backbone="wrn16-1", flip=True, crop=2)
    plain, _ = named(make_method(f"{base}+aug"), federation, config)
    wrapped, _ = named(make_method(f"{base}+foogd", {"lambda_a": 0.0}), federation, config)
    for name, value in plain.items():
        assert torch.equal(value, wrapped[name]), name


def test_the_stein_term_changes_the_backbone(federation, config):
    without, _ = named(make_method("fedavg+foogd", {"lambda_a": 0.0}), federation, config)
    with_term, _ = named(make_method("fedavg+foogd"), federation, config)
    assert not torch.equal(without["head.weight"], with_term["head.weight"])


def test_views_are_built_only_where_they_are_needed():
    assert FOOGD(lambda_a=0.0, ce_on="ori").views == 1
    assert FOOGD(lambda_a=0.0, ce_on="both").views == 2
    assert FOOGD(lambda_a=0.1, ce_on="ori").views == 2
    assert FOOGD(train_base=False).views == 1


def test_with_a_fixed_base_only_the_score_network_moves(federation, config):
    method = FOOGD(FedRoD(), train_base=False)
    engine, start = _engine_and_start(method, federation, config)
    result = run_round(engine, start, 0)
    old, new = (engine.layout.named(s.server.shared) for s in (start, result.state))
    for name in old:
        # Which classes are known is measured, and stays as it was: somebody has each of them.
        moves = name.startswith("score.") and name != "score.anchor_known"
        assert torch.equal(old[name], new[name]) != moves, name
    assert set(result.losses) == {"score"}
    assert result.state.server.integers.keys() == start.server.integers.keys()
    for name, value in result.state.server.integers.items():
        assert torch.equal(value, start.server.integers[name]), name


@pytest.mark.parametrize("base", ["fedavg", "fediir", "fedbn"])
def test_anchors_are_the_moments_of_all_images_at_the_model_that_is_tested(base, federation, config):
    method = make_method(f"{base}+foogd", {"score_width": 16, "steps": 2})
    engine, start = _engine_and_start(method, federation, config)
    trained = run_round(engine, start, 0).state
    tested = settled(engine, trained)
    begun = settled(engine, start)  # clients train against the anchors of the model that they were sent
    sent, kept = (engine.layout.named(s.server.shared) for s in (begun, trained))
    assert torch.allclose(kept["score.anchor_mean"], sent["score.anchor_mean"], atol=1e-6)
    old, new = (engine.layout.named(s.server.shared) for s in (trained, tested))
    moved = {name for name in old if not torch.equal(old[name], new[name])}
    measured = {"anchor_mean", "anchor_var", "anchor_turn", "running_mean", "running_var"}
    assert moved == {f"score.{name}" for name in measured}
    assert all(torch.equal(tested.server.extra[name], value) for name, value in trained.server.extra.items())
    if base == "fedbn":  # the clients' own normalisation has a part in the features
        return
    nets = engine.server_nets().load(tested.server).eval()
    again = method.score_network(nets["backbone"].feature_width, federation.num_classes)
    everyone = engine.batches.plain(torch.cat([client.indices for client in tested.clients]))
    with torch.no_grad():
        again.anchor(again.moments(nets["backbone"](everyone.x), everyone.y))
    for name in measured:
        assert torch.allclose(new[f"score.{name}"], getattr(again, name), rtol=1e-3, atol=1e-4), name


def test_the_stein_term_stays_bounded_far_from_the_training_features(federation, config):
    """The gradient that once made WideResNets diverge in round 1: features that no anchor knows."""
    sizes = {}
    for logarithm in (True, False):
        method = FOOGD(ksd_log=logarithm, log_share=0.0, standardise=False)
        score = method.score_network(6, 3)
        z = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
        for far in (10.0, 1000.0):
            z_hat = (far * z).requires_grad_()
            batch = Batch(z, torch.zeros(32, dtype=torch.int64), z=z, z_hat=z_hat)
            (slope,) = torch.autograd.grad(method.stein(score, batch), z_hat)
            sizes[logarithm, far] = float(slope.norm())
    assert sizes[True, 1000.0] < sizes[True, 10.0] < 1.0
    assert sizes[False, 1000.0] > sizes[False, 10.0]


@final
@dataclass(frozen=True)
class TwoPhases(Method):
    """A base with groups of other names, of which the second phase trains one only."""

    @property
    def groups(self):
        return {"body": ("backbone",), "top": ("head",)}

    def phases(self, round, rounds, epochs):
        return (Phase(("body", "top"), epochs), Phase(("top",), 1))

    def losses(self, nets, batch, ctx):
        loss = cross_entropy(nets["head"](batch.z), batch.y)
        top = cross_entropy(nets["head"](batch.z.detach()), batch.y)
        body = cross_entropy(torch.func.functional_call(nets["head"], _detached(nets["head"]), (batch.z,)), batch.y)
        assert loss.shape == ()
        return {"body": body, "top": top} if "body" in ctx.groups else {"top": top}


def _detached(net):
    return {name: value.detach() for name, value in net.state_dict(keep_vars=True).items()}


def test_foogd_wraps_a_base_with_phases_and_other_groups(federation, config):
    check_method(FOOGD(TwoPhases(), score_width=64, steps=3))
    plain, _ = named(TwoPhases(), federation, config)
    wrapped, _ = named(FOOGD(TwoPhases(), lambda_a=0.0, ce_on="ori"), federation, config)
    assert all(torch.equal(value, wrapped[name]) for name, value in plain.items())
    moved, _ = named(FOOGD(TwoPhases(), ce_on="ori"), federation, config)
    assert not torch.equal(plain["backbone.stages.0.0.weight"], moved["backbone.stages.0.0.weight"])


@pytest.mark.parametrize("ce_on", ["ori", "both"])
def test_a_base_with_two_views_of_its_own_keeps_them(ce_on, federation, config):
    base = FedAvg(views=2)
    plain, _ = named(base, federation, config)
    wrapped, _ = named(FOOGD(base, lambda_a=0.0, ce_on=ce_on), federation, config)
    assert all(torch.equal(value, wrapped[name]) for name, value in plain.items())


# FOOGD: its terms


def made(method, federation, config, batch_size=24):
    nets = build_nets(method, federation, config).train()
    own = federation.train_indices[0]
    maker = BatchMaker.of(method, federation, config, torch.device("cpu"))
    batch = method.embed(nets, maker.training(own[:batch_size], own, Streams(0)))
    ctx = Context(0, 1, tuple(method.groups), federation.class_counts(0), nets, {}, {}, Streams(1))
    return nets, batch, ctx


@pytest.mark.parametrize("pairs", ["aug", "cross"])
def test_the_stein_term_has_no_gradient_for_the_score_network(pairs, federation, config):
    method = FOOGD(ksd_pairs=pairs)
    nets, batch, _ = made(method, federation, config)
    term = method.stein(nets["score"], batch)
    reached = torch.autograd.grad(term, list(nets["score"].parameters()), allow_unused=True, retain_graph=True)
    assert all(gradient is None for gradient in reached)
    assert torch.autograd.grad(term, batch.z_hat)[0].abs().sum() > 0


def test_the_score_loss_has_no_gradient_for_the_backbone(federation, config):
    method = FOOGD()
    nets, batch, ctx = made(method, federation, config)
    loss = method.losses(nets, batch, ctx)["score"]
    reached = torch.autograd.grad(loss, list(nets["backbone"].parameters()), allow_unused=True)
    assert all(gradient is None for gradient in reached)


@pytest.mark.parametrize(("lambda_m", "drawn"), [(0.0, {"dsm"}), (1.0, {"langevin"}), (0.5, {"dsm", "langevin"})])
def test_terms_of_weight_zero_are_left_out(lambda_m, drawn, federation, config):
    method = FOOGD(lambda_m=lambda_m)
    nets, batch, ctx = made(method, federation, config)
    asked = set()

    def rng(purpose):
        asked.add(purpose)
        return ctx.rng(purpose)

    loss = method.sm3d(nets["score"], nets["score"].scale(batch.z.detach()), batch.y, replace(ctx, rng=rng))
    assert asked == drawn
    assert torch.isfinite(loss)


def test_the_score_loss_mixes_its_two_terms(federation, config):
    def loss(lambda_m):
        method = FOOGD(lambda_m=lambda_m)
        nets, batch, ctx = made(method, federation, config)
        return float(method.sm3d(nets["score"], nets["score"].scale(batch.z.detach()), batch.y, ctx).detach())

    assert loss(0.3) == pytest.approx(0.7 * loss(0.0) + 0.3 * loss(1.0), rel=1e-5)


def test_score_features_come_from_an_eval_pass_that_leaves_no_trace(federation, config):
    config = replace(config, backbone="wrn16-1")
    method = FOOGD()
    nets = build_nets(method, federation, config).train()
    images = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    batch = Batch(images, torch.zeros(8, dtype=torch.int64))
    before = {name: value.clone() for name, value in nets["backbone"].state_dict().items()}
    z = method.clean_features(nets, batch)
    assert nets["backbone"].training
    for name, value in nets["backbone"].state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(z, nets["backbone"].eval()(batch.x))


def test_sm3d_learns_the_score_of_a_gaussian():
    """Features N(0, I): after training, s(u, sigma) is near -u/(1+sigma²) at every level it was trained on."""
    method = FOOGD(lambda_m=0.0, standardise=False, sigma_min=0.3)
    torch.manual_seed(0)
    score = ScoreNet(2, 64, conditioned=True)
    optimiser = torch.optim.Adam(score.parameters(), lr=2e-3)
    rng = Streams(0)
    for _ in range(1500):
        u = torch.randn(256, 2, generator=rng("data"))
        loss = method.denoising(score, u, rng)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    u = torch.randn(500, 2, generator=rng("test"))
    for sigma in (0.5, 1.0):
        wanted = -u / (1 + sigma**2)
        error = (score(u, sigma) - wanted).norm(dim=1).mean() / wanted.norm(dim=1).mean()
        assert error < 0.2, (sigma, float(error))


def test_the_stein_weight_makes_lambda_a_independent_of_the_scale_of_features():
    """Features and sigma times c, an exact score: sigma²·KSD stays the same."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(40, 5, generator=generator) + 1.0

    class Exact(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.scale_ = scale

        def forward(self, u, sigma=None):
            return -u / self.scale_**2

        def scale(self, u):
            return u

    def term(scale):
        batch = Batch(z, torch.zeros(40, dtype=torch.int64), z=z * scale, z_hat=z * scale)
        return float(FOOGD(sigma=0.1 * scale).stein(Exact(scale), batch))

    assert term(1.0) == pytest.approx(term(7.0), rel=1e-4)


def test_detection_reads_the_score_at_the_chosen_level(federation, config):
    method = FOOGD(sigma=0.2)
    nets, batch, _ = made(method, federation, config)
    nets.eval()
    readout, z = method.readout(nets), batch.z.detach()
    assert torch.equal(readout.score(z), nets["score"](nets["score"].scale(z), 0.2))
    assert torch.equal(readout.score(z, 0.5), nets["score"](nets["score"].scale(z), 0.5))
    nets["score"].running_mean.add_(0.5)  # a space that has measured something
    for told in (readout, method.generic_readout(nets)):
        assert torch.equal(told.score_space(z), nets["score"].scale(z))
    assert not torch.equal(readout.score_space(z), nets["score"].compressed(z))


def test_the_released_view_is_clipped_and_truncated(federation, config):
    own = FOOGD(**{key: value for key, value in PROFILES["released"].items() if key in FOOGD.__dataclass_fields__})
    x = federation.train.batch(federation.train_indices[0][:8])
    view = own.view(x, x.flip(0), Streams(0))
    assert float(view.max()) <= 225 / 255 + 1e-6
    assert torch.allclose(view * 255, (view * 255).round(), atol=1e-3)
    assert float(FOOGD().view(x, x.flip(0), Streams(0)).max()) > 225 / 255


@pytest.mark.parametrize(
    "setting",
    [{"joint_views": False}, {"score_features": "train"}, {"dsm_target": "noise"}, {"ksd_pairs": "cross"},
     {"mmd_kernels": 1}, {"sigma_levels": 1}, {"conditioned": False}, {"standardise": False}, {"anneal_power": 0.0},
     {"score_optimiser": "sgd"}, {"ksd_power": 0.0}, {"view_clip": 225}, {"steps": 3}, {"step": 0.02}],
    ids=str,
)  # fmt: skip
def test_every_setting_has_an_effect(setting, federation, config):
    config = replace(config, rounds=1)
    usual, _ = named(make_method("fedavg+foogd"), federation, config)
    other, _ = named(make_method("fedavg+foogd", setting), federation, config)
    assert usual.keys() != other.keys() or any(not torch.equal(usual[name], other[name]) for name in usual)


# Names and settings


def test_names_make_the_methods_of_the_paper():
    assert make_method("fedavg") == FedAvg()
    assert make_method("fedavg+aug") == FedAvg(views=2)
    assert make_method("fedrod+foogd", {"lambda_m": 0.1, "prior_smoothing": 1.0}) == FOOGD(
        FedRoD(prior_smoothing=1.0), lambda_m=0.1
    )
    assert {"fedavg", "fedrod", "fedavg+foogd", "fedrod+foogd", "fedavg+aug"} <= set(method_names())


def test_unknown_names_and_settings_are_one_sentence():
    with pytest.raises(InputError, match=r"'fedsgd' is not known: use fedavg"):
        make_method("fedsgd")
    with pytest.raises(InputError, match=r"no setting 'lambda_m': it has views"):
        make_method("fedavg", {"lambda_m": 0.1})
    with pytest.raises(InputError, match="views"):
        make_method("fedavg+foogd", {"views": 2})


@pytest.mark.parametrize("name", method_names())
def test_settings_rebuild_the_method(name):
    method = make_method(name)
    known = method_fields(name)
    assert make_method(name, {key: value for key, value in method_settings(method).items() if key in known}) == method


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_can_be_used_from_python(name):
    of_method, of_run = profile(name)
    method, config = FOOGD(FedRoD(), **of_method), Config(**of_run)
    assert all(getattr(method, key) == value for key, value in of_method.items())
    assert all(getattr(config, key) == value for key, value in of_run.items())


def test_profiles_name_settings_that_exist():
    for values in PROFILES.values():
        for key in values:
            assert key in FOOGD.__dataclass_fields__ or key in Config.__dataclass_fields__, key


def test_foogd_wraps_a_method_that_it_does_not_know(federation, config):
    @final
    @dataclass(frozen=True)
    class Smooth(Method):
        smoothing: float = 0.1

        def losses(self, nets, batch, ctx):
            return {"model": cross_entropy(nets["head"](batch.z), batch.y, label_smoothing=self.smoothing)}

    plain, _ = named(Smooth(), federation, config)
    wrapped, _ = named(FOOGD(Smooth(), lambda_a=0.0, ce_on="ori"), federation, config)
    assert all(torch.equal(value, wrapped[name]) for name, value in plain.items())
