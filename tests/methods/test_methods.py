"""FedAvg, FedRoD, FOOGD and what wraps a method: the properties that their specifications promise."""

import inspect
import math
from dataclasses import dataclass, fields, replace
from typing import final, get_type_hints
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from foogd import FOOGD, AnchoredFOOGD, FedAvg, FedRoD, InputError, Method, simulate
from foogd.core.random import Streams
from foogd.core.types import Batch, Context, Phase
from foogd.engine.batches import BatchMaker
from foogd.engine.eager import EagerEngine, build_nets
from foogd.evaluation.evaluator import evaluate
from foogd.methods import METHODS, PROFILES, make_method, method_fields, method_names, method_settings
from foogd.methods.wrapper import Wrapper
from foogd.nets.score import ScoreNet
from foogd.simulate import initial_state, run_round, settled
from foogd.testing import check_method


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


# A wrapper that adds nothing


@final
@dataclass(frozen=True)
class Same(Wrapper):
    """Its base, wrapped."""


HOOKS = sorted(name for name in vars(Method) if not name.startswith("_") and name not in Method.__annotations__)


def test_a_wrapper_has_every_hook_of_a_method_and_no_other():
    assert {"losses", "survey", "weight", "own_first_view", "groups"} < set(HOOKS)
    assert sorted(name for name in vars(Wrapper) if not name.startswith("_")) == HOOKS


@pytest.mark.parametrize("name", HOOKS)
def test_a_wrapper_asks_its_base_the_same_question_and_gives_its_answer(name):
    hook, base = vars(Method)[name], Mock()
    if isinstance(hook, property):
        assert getattr(Same(base), name) is getattr(base, name)
        return
    given = [object() for _ in list(inspect.signature(hook).parameters)[1:]]
    answer = getattr(Same(base), name)(*given)
    getattr(base, name).assert_called_once_with(*given)
    if get_type_hints(hook)["return"] is not type(None):
        assert answer is getattr(base, name).return_value


@pytest.mark.parametrize("name", [*METHODS, "fedavg+aug", "fedrod+foogd"])
def test_a_wrapper_that_adds_nothing_is_its_base_bit_for_bit(name, federation, config):
    base = make_method(name, {"score_width": 16, "steps": 2} if name.endswith("+foogd") else {})
    results, rows = [], []
    for method in (base, Same(base)):
        engine = EagerEngine(method, federation, config)
        *_, last = simulate(method, federation, config, engine)
        results.append(last)
        rows.append([row.value for row in evaluate(engine, last.state, {})])
    one, two = (result.state for result in results)
    assert torch.equal(one.server.shared, two.server.shared)
    assert all(torch.equal(value, two.server.extra[key]) for key, value in one.server.extra.items())
    for mine, theirs in zip(one.clients, two.clients, strict=True):
        assert torch.equal(mine.personal, theirs.personal)
        assert all(torch.equal(value, theirs.memory[key]) for key, value in mine.memory.items())
    assert results[0].losses == results[1].losses
    assert (results[0].bytes_up, results[0].bytes_down) == (results[1].bytes_up, results[1].bytes_down)
    assert len(rows[0]) > 3
    assert rows[0] == rows[1]


@pytest.mark.parametrize("base", ["fedln", "fedt3a", "fediir", "fedthe", "fedprox", "scaffold", "fedbn", "foster"])
def test_foogd_without_its_terms_is_its_base_bit_for_bit(base, federation, config):
    plain, private = named(make_method(base), federation, config)
    neutral = {"lambda_a": 0.0, "score_width": 32, "steps": 2}
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
    wrapped, wrapped_private = named(FOOGD(base, lambda_a=0.0), federation, config)
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
    wrapped, _ = named(make_method(f"{base}+foogd", {"lambda_a": 0.0, "ce_on": "both"}), federation, config)
    for name, value in plain.items():
        assert torch.equal(value, wrapped[name]), name


def test_the_stein_term_changes_the_backbone(federation, config):
    without, _ = named(make_method("fedavg+foogd", {"lambda_a": 0.0}), federation, config)
    with_term, _ = named(make_method("fedavg+foogd"), federation, config)
    assert not torch.equal(without["head.weight"], with_term["head.weight"])


def test_views_are_built_only_where_they_are_needed():
    assert FOOGD().views == 2
    assert FOOGD(lambda_a=0.0).views == 1
    assert FOOGD(lambda_a=0.0, ce_on="both").views == 2
    assert FOOGD(train_base=False).views == 1


def test_with_a_fixed_base_only_the_score_network_moves(federation, config):
    method = FOOGD(FedRoD(), train_base=False)
    engine, start = _engine_and_start(method, federation, config)
    result = run_round(engine, start, 0)
    old, new = (engine.layout.named(s.server.shared) for s in (start, result.state))
    for name in old:
        assert torch.equal(old[name], new[name]) != name.startswith("score."), name
    assert set(result.losses) == {"score"}
    assert result.state.server.integers.keys() == start.server.integers.keys()
    for name, value in result.state.server.integers.items():
        assert torch.equal(value, start.server.integers[name]), name


MEASURED = {
    "published": {"centre", "spread"},
    "anchored": {"anchor_mean", "anchor_var", "anchor_turn", "running_mean", "running_var"},
}


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("base", ["fedavg", "fediir", "fedbn"])
def test_the_space_of_the_score_is_that_of_all_images_at_the_model_that_is_tested(base, profile, federation, config):
    method = make_method(f"{base}+foogd", {"profile": profile, "score_width": 16, "steps": 2})
    engine, start = _engine_and_start(method, federation, config)
    trained = run_round(engine, start, 0).state
    tested = settled(engine, trained)
    begun = settled(engine, start)  # clients train in the space of the model that they were sent
    sent, kept = (engine.layout.named(s.server.shared) for s in (begun, trained))
    names = {f"score.{name}" for name in MEASURED[profile]}
    assert all(torch.allclose(kept[name], sent[name], atol=1e-6) for name in names)
    old, new = (engine.layout.named(s.server.shared) for s in (trained, tested))
    assert {name for name in old if not torch.equal(old[name], new[name])} == names
    assert all(torch.equal(tested.server.extra[name], value) for name, value in trained.server.extra.items())
    if base == "fedbn":  # the clients' own normalisation has a part in the features
        return
    nets = engine.server_nets().load(tested.server).eval()
    again = method.score_network(nets["backbone"].feature_width, federation.num_classes)
    everyone = engine.batches.plain(torch.cat([client.indices for client in tested.clients]))
    with torch.no_grad():
        again.measure(again.moments(nets["backbone"](everyone.x), everyone.y))
    for name in MEASURED[profile]:
        assert torch.allclose(new[f"score.{name}"], getattr(again, name), rtol=1e-3, atol=1e-4), name


def test_the_anchored_stein_term_stays_bounded_far_from_the_training_features():
    """The gradient that once made WideResNets diverge in round 1: features that no anchor knows."""
    sizes = {}
    for method in (AnchoredFOOGD(), FOOGD()):
        score = method.score_network(6, 3)
        z = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
        for far in (10.0, 1000.0):
            u_hat = (far * z).requires_grad_()
            (slope,) = torch.autograd.grad(method.stein(score, u_hat), u_hat)
            sizes[type(method), far] = float(slope.norm())
    assert sizes[AnchoredFOOGD, 1000.0] < sizes[AnchoredFOOGD, 10.0] < 1.0
    assert sizes[FOOGD, 1000.0] > sizes[FOOGD, 10.0]


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
    wrapped, _ = named(FOOGD(TwoPhases(), lambda_a=0.0), federation, config)
    assert all(torch.equal(value, wrapped[name]) for name, value in plain.items())
    moved, _ = named(FOOGD(TwoPhases()), federation, config)
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


def test_the_score_loss_has_no_gradient_for_the_backbone(federation, config):
    method = FOOGD()
    nets, batch, ctx = made(method, federation, config)
    loss = method.losses(nets, batch, ctx)["score"]
    reached = torch.autograd.grad(loss, list(nets["backbone"].parameters()), allow_unused=True)
    assert all(gradient is None for gradient in reached)


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


def test_score_matching_learns_the_score_of_a_gaussian_that_is_not_the_one_it_starts_from():
    """Features N(0, diag(v)): after training s(u, sigma) is near -u/(v + sigma²) at every level of the ladder."""
    method = FOOGD(lambda_m=0.0, sigma_min=0.3, sigma_max=1.0)
    torch.manual_seed(0)
    score, v = ScoreNet(2, 64), torch.tensor([0.25, 1.75])
    optimiser = torch.optim.Adam(score.parameters(), lr=2e-3)
    rng = Streams(0)
    u = v.sqrt() * torch.randn(500, 2, generator=rng("test"))

    def error(sigma):
        wanted = -u / (v + sigma**2)
        return float((score(u, sigma) - wanted).detach().norm(dim=1).mean() / wanted.norm(dim=1).mean())

    before = {sigma: error(sigma) for sigma in (0.3, 0.5, 1.0)}
    for _ in range(1000):
        loss = method.denoising(score, v.sqrt() * torch.randn(256, 2, generator=rng("data")), rng)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    for sigma, start in before.items():
        assert error(sigma) < min(0.2, start / 2), sigma


def test_the_stein_weight_makes_lambda_a_independent_of_the_scale_of_features():
    """Features and sigma times c, an exact score: sigma²·KSD stays the same."""
    z = torch.randn(40, 5, generator=torch.Generator().manual_seed(0)) + 1.0

    class Exact(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.size = scale

        def forward(self, u, sigma):
            return -u / self.size**2

    def term(scale):
        return float(FOOGD(sigma=0.1 * scale).stein(Exact(scale), z * scale))

    assert term(1.0) == pytest.approx(term(7.0), rel=1e-4)


CHANGES = {
    "lambda_m": 0.3, "lambda_a": 0.5, "ce_on": ("ori", "both"), "train_base": False, "score_width": 32, "sigma": 0.31,
    "sigma_min": 0.05, "sigma_max": 5.0, "sigma_levels": 1, "step": 0.02, "steps": 3, "score_lr": 0.01,
    "score_clip": 0.01, "log_share": 0.0, "whiten": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("cls", [FOOGD, AnchoredFOOGD])
def test_every_setting_has_an_effect_on_training(cls, federation, config):
    config = replace(config, rounds=1)
    usual, _ = named(cls(), federation, config)
    at_tests = {"base", "draws", "trust"}
    for item in fields(cls):
        if item.name in at_tests:
            continue
        value = CHANGES[item.name]
        value = next(one for one in value if one != item.default) if isinstance(value, tuple) else value
        other, _ = named(cls(**{item.name: value}), federation, config)
        same = usual.keys() == other.keys() and all(torch.equal(usual[name], other[name]) for name in usual)
        assert not same, item.name


@pytest.mark.parametrize("setting", [{"draws": 0}, {"trust": 0.0}])
def test_what_the_anchored_variant_sets_for_tests_changes_detection_alone(setting, federation, config):
    trained, scores = [], []
    for method in (AnchoredFOOGD(score_width=16), AnchoredFOOGD(score_width=16, **setting)):
        engine = EagerEngine(method, federation, replace(config, rounds=1))
        *_, last = simulate(method, federation, engine.config, engine)
        trained.append(last.state.server.shared)
        nets = engine.server_nets().load(last.state.server).eval()
        z = torch.rand(20, nets["head"].in_features, generator=torch.Generator().manual_seed(0))
        scores.append(method.readout(nets).score(z))
    assert torch.equal(*trained)
    assert not torch.equal(*scores)


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


def test_a_profile_is_a_class_of_its_own():
    for profile, cls in {"published": FOOGD, "anchored": AnchoredFOOGD}.items():
        assert PROFILES[profile] is cls
        assert make_method("fedrod+foogd", {"profile": profile, "lambda_m": 0.1}) == cls(FedRoD(), lambda_m=0.1)
        assert method_settings(cls(FedRoD()))["profile"] == profile
    assert make_method("fedrod+foogd") == FOOGD(FedRoD())
    assert method_fields("fedrod+foogd", "anchored").keys() - method_fields("fedrod+foogd").keys() == {
        "log_share", "whiten", "draws", "trust"
    }  # fmt: skip
    with pytest.raises(InputError, match="no setting 'trust'"):
        make_method("fedrod+foogd", {"trust": 0.5})


def test_foogd_wraps_a_method_that_it_does_not_know(federation, config):
    @final
    @dataclass(frozen=True)
    class Smooth(Method):
        smoothing: float = 0.1

        def losses(self, nets, batch, ctx):
            return {"model": cross_entropy(nets["head"](batch.z), batch.y, label_smoothing=self.smoothing)}

    plain, _ = named(Smooth(), federation, config)
    wrapped, _ = named(FOOGD(Smooth(), lambda_a=0.0), federation, config)
    assert all(torch.equal(value, wrapped[name]) for name, value in plain.items())
