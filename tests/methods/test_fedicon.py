"""FedICON: contrast, then a classifier, then a private one, then steps on test batches."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from foogd import FOOGD, InputError, simulate
from foogd.core.random import Streams, generator
from foogd.core.types import Batch, Context, Optimiser
from foogd.data.views import contrastive_view
from foogd.engine.batches import BatchMaker
from foogd.engine.eager import EagerEngine, build_nets
from foogd.evaluation.evaluator import evaluate
from foogd.functional import simclr
from foogd.methods import make_method
from foogd.methods.fedicon import FedICON
from foogd.simulate import initial_state, run_round


def context(nets, groups=(), rng=None, std=1.0, mean=0.0):
    constants = torch.full((1, 3, 1, 1), mean), torch.full((1, 3, 1, 1), std)
    return Context(1, 1, groups, torch.ones(5), nets, {}, {}, rng or Streams(0), *constants)


@pytest.fixture
def images():
    return torch.randn(32, 3, 16, 16, generator=torch.Generator().manual_seed(1)).clamp(-2, 2)


@pytest.fixture
def nets(federation, config, images):
    """Features of ordinary size and a private part."""
    made = build_nets(FedICON(), federation, config).requires_grad_(False)
    for _ in range(30):
        made["backbone"](images)
    made["personal_head"].weight.copy_(torch.randn(5, 128, generator=torch.Generator().manual_seed(3)))
    return made.eval()


@pytest.fixture
def batch(images, nets):
    z = nets["backbone"](images)
    return Batch(images[:16], torch.arange(16) % 5, images[16:], z[:16], z[16:])


def answers(method, nets, ctx, batches):
    with torch.no_grad():
        predict = method.predictor(nets, ctx)
        return [predict(x) for x in batches]


def values(engine, state):
    """What the server has by name, counters of batch normalisation too."""
    return {**engine.layout.named(state.server.shared), **state.server.integers}


# Training


@pytest.mark.parametrize(("rounds", "contrasts"), [(2, 1), (4, 3), (8, 6), (20, 15), (40, 35), (100, 95)])
def test_the_last_rounds_belong_to_the_classifier(rounds, contrasts):
    groups = [tuple(phase.groups for phase in FedICON().phases(r, rounds, 1)) for r in range(rounds)]
    assert groups == [(("body",),)] * contrasts + [(("head",),)] * (rounds - contrasts)


def test_one_round_has_both_phases_and_the_classifier_at_least_its_epochs():
    assert [(phase.groups, phase.epochs) for phase in FedICON().phases(0, 1, 2)] == [(("body",), 2), (("head",), 5)]
    assert [phase.epochs for phase in FedICON().phases(0, 1, 7)] == [7, 7]
    assert [phase.epochs for phase in FedICON(head_epochs=1).phases(0, 1, 0)] == [0, 0]


def test_each_phase_leaves_the_other_part_bit_identical(federation, config):
    config = replace(config, weight_decay=0.1, momentum=0.9)
    engine = EagerEngine(FedICON(), federation, config)
    start = initial_state(engine)
    first = run_round(engine, start, 0)
    second = run_round(engine, first.state, 1)
    assert (set(first.losses), set(second.losses)) == ({"body"}, {"head"})
    old, middle, new = (values(engine, state) for state in (start, first.state, second.state))
    for name in old:
        of_body = name.startswith("backbone.")
        assert torch.equal(old[name], middle[name]) != of_body, name
        assert torch.equal(middle[name], new[name]) == of_body, name
    assert all(not client.personal.any() for client in second.state.clients)


def test_the_contrast_is_over_both_views_of_all_images(nets, batch):
    loss = FedICON(temperature=0.3).losses(nets, batch, context(nets, ("body",)))
    assert set(loss) == {"body"}
    u = torch.cat([batch.z, batch.z_hat])
    u = u / u.norm(dim=1, keepdim=True)
    y = torch.cat([batch.y, batch.y]).tolist()
    terms = []
    for i in range(32):
        others = [a for a in range(32) if a != i]
        below = sum(float(torch.exp(u[i] @ u[a] / 0.3)) for a in others)
        same = [p for p in others if y[p] == y[i]]
        terms.append(-sum(float(torch.log(torch.exp(u[i] @ u[p] / 0.3) / below)) for p in same) / len(same))
    assert float(loss["body"]) == pytest.approx(sum(terms) / 32, rel=1e-4)
    scaled = batch._replace(z=7 * batch.z, z_hat=7 * batch.z_hat)
    again = FedICON(temperature=0.3).losses(nets, scaled, context(nets, ("body",)))
    assert float(again["body"]) == pytest.approx(float(loss["body"]), rel=1e-4)


def test_the_classifier_learns_from_the_first_view_alone(nets, batch):
    loss = FedICON().losses(nets, batch, context(nets, ("head",)))
    assert set(loss) == {"head"}
    assert torch.equal(loss["head"], cross_entropy(nets["head"](batch.z), batch.y))
    assert FedICON().embed(nets, batch).z_hat is batch.z_hat  # a fixed body embeds one view only
    fresh = batch._replace(z=None, z_hat=None)
    assert FedICON().embed(nets, fresh).z_hat is None
    assert FedICON().embed(nets.train(), fresh).z_hat is not None


def test_both_views_are_strong_and_draw_from_streams_of_their_own(federation, config):
    x = federation.train.batch(federation.train_indices[0][:8])
    first, second = FedICON().first_view(x, Streams(0)), FedICON().view(x, x, Streams(0))
    assert not torch.equal(first, second)
    assert torch.equal(second, contrastive_view(x, Streams(0)))
    streams = Streams(0)
    FedICON().view(x, x, streams)
    assert torch.equal(first, FedICON().first_view(x, streams))
    maker = BatchMaker.of(FedICON(), federation, config, torch.device("cpu"))
    own = federation.train_indices[0]
    made = maker.training(own[:8], own, Streams(0))
    assert torch.allclose(made.x, (first - maker.mean) / maker.std, atol=1e-5)
    assert torch.allclose(made.x_hat, (second - maker.mean) / maker.std, atol=1e-5)


def test_the_run_decides_the_optimiser_but_for_the_learning_rates():
    default = Optimiser(lr=0.3, momentum=0.9, weight_decay=1e-3)
    assert FedICON().optimiser("body", default) == default
    assert FedICON(body_lr=0.005).optimiser("body", default) == replace(default, lr=0.005)
    assert FedICON().optimiser("head", default) == replace(default, lr=0.01)
    assert FedICON().optimiser("personal", default) == Optimiser(lr=0.01)


def test_the_private_part_learns_as_a_private_copy_of_the_classifier(nets, batch):
    nets["personal_head"].weight.zero_()
    twin = copy.deepcopy(nets["head"]).requires_grad_(True)
    nets["personal_head"].requires_grad_(True)
    own = list(nets["personal_head"].parameters())
    step = FedICON(personal_lr=0.5).optimiser("personal", Optimiser(lr=0.3, momentum=0.9, weight_decay=0.1))
    assert (step.momentum, step.weight_decay) == (0.0, 0.0)
    for _ in range(20):
        loss = FedICON().losses(nets, batch, context(nets, ("personal",)))["personal"]
        wanted = cross_entropy(twin(batch.z), batch.y)
        assert torch.allclose(loss, wanted, rtol=1e-4)
        for parameters, value in ((own, loss), (list(twin.parameters()), wanted)):
            for parameter, gradient in zip(parameters, torch.autograd.grad(value, parameters), strict=True):
                parameter.data -= step.lr * gradient
    assert torch.allclose(FedICON().logits(nets, batch.z), twin(batch.z), atol=1e-4)
    assert not torch.allclose(FedICON().logits(nets, batch.z), FedICON().generic_logits(nets, batch.z), atol=1e-2)


def test_the_private_part_is_trained_anew_before_each_test(federation, config):
    method, config = FedICON(tta="none"), replace(config, rounds=1)
    engine = EagerEngine(method, federation, config)
    *_, result = simulate(method, federation, config, engine)
    ready = engine.personalise(result.state.server, result.state.clients)
    assert all(client.personal.any() for client in ready)
    assert not torch.equal(ready[0].personal, ready[1].personal)
    assert all(not client.personal.any() for client in result.state.clients)
    one, two = (evaluate(engine, result.state, {}) for _ in range(2))
    assert one == two
    assert {row.metric for row in one} >= {"accuracy", "accuracy_generic"}


def test_detectors_are_told_both_parts_of_the_classifier(nets, batch):
    readout, generic = FedICON().readout(nets), FedICON().generic_readout(nets)
    assert torch.allclose(batch.z @ readout.weight.T + readout.bias, readout.head(batch.z), atol=1e-4)
    assert torch.allclose(readout.head(batch.z), nets["head"](batch.z) + nets["personal_head"](batch.z), atol=1e-5)
    assert torch.equal(generic.head(batch.z), nets["head"](batch.z))


def test_foogd_adds_nothing_to_the_rounds_of_the_classifier(federation, config):
    method = FOOGD(FedICON())
    groups = [[phase.groups for phase in method.phases(round, 4, 1)] for round in range(4)]
    assert groups == [[("body", "score")]] * 3 + [[("head",)]]
    assert [phase.groups for phase in method.before_test()] == [("personal",)]
    plain, alone = (EagerEngine(m, federation, config) for m in (FedICON(), FOOGD(FedICON(), lambda_a=0.0)))
    ends = []
    for engine in (plain, alone):
        *_, result = simulate(engine.method, federation, config, engine)
        ends.append(values(engine, result.state))
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_it_has_no_augmented_twin():
    with pytest.raises(InputError, match="fedicon has no setting `views`"):
        make_method("fedicon+aug")


# Steps on test batches


def same_stream(purpose):
    """The same draws at each request."""
    return generator(0, purpose)


def test_without_steps_it_is_plain_evaluation(nets, images, federation, config):
    method = FedICON(tta="none")
    (output,) = answers(method, nets, context(nets), [images])
    z = nets["backbone"](images)
    assert torch.equal(output.z, z)
    assert torch.equal(output.logits, method.logits(nets, z))
    assert not method.adapts


def test_a_step_a_batch_then_the_clean_images(nets, images):
    """The rule with a copy of the nets and torch's SGD; what a batch has changed stays for the next."""
    before = {name: value.clone() for name, value in nets.state_dict().items()}
    method = FedICON(tta_lr=0.05, test_batch=16)
    batches = images.split(16)
    found = answers(method, nets, context(nets, std=0.25, mean=0.5), batches)

    own = copy.deepcopy(nets)
    moving = list(own["backbone"].parameters())
    for parameter in moving:
        parameter.requires_grad_(True)
    optimiser, streams = torch.optim.SGD(moving, lr=0.05), Streams(0)
    for x, output in zip(batches, found, strict=True):
        pair = [
            own["backbone"]((contrastive_view(x * 0.25 + 0.5, rng) - 0.5) / 0.25)
            for rng in (lambda purpose: streams(f"first {purpose}"), streams)
        ]
        optimiser.zero_grad()
        simclr(*pair, temperature=0.1).backward()
        optimiser.step()
        z = own["backbone"](x)
        assert torch.allclose(output.logits, method.logits(own, z), atol=1e-3)
        assert not torch.allclose(z, nets["backbone"](x), atol=1e-3)
        assert torch.equal(output.z, nets["backbone"](x))  # detectors see the features that they were fitted on
    assert all(torch.equal(value, before[name]) for name, value in nets.state_dict().items())
    assert not any(parameter.requires_grad for parameter in nets.parameters())


def test_statistics_of_batch_normalisation_stay_as_they_were_trained(nets, images):
    method = FedICON(tta_lr=1e-12)
    (output,) = answers(method, nets, context(nets), [2 + images])
    assert torch.allclose(output.logits, method.logits(nets, nets["backbone"](2 + images)), atol=1e-4)


def test_a_few_images_are_only_predicted(nets, images):
    method = FedICON(tta_lr=0.05)
    few, many = answers(method, nets, context(nets), [images[:31], images[:32]])
    assert torch.equal(few.logits, method.logits(nets, nets["backbone"](images[:31])))
    assert not torch.allclose(many.logits[:31], few.logits, atol=1e-3)


def test_someone_unknown_has_no_private_classifier(nets, images):
    nn.init.normal_(nets["personal_head"].weight)
    for tta in ("none", "simclr"):
        method = FedICON(tta=tta, tta_lr=1e-12)
        (output,) = answers(method, nets, replace(context(nets), unknown=True), [images])
        wanted = method.generic_logits(nets, nets["backbone"](images))
        assert torch.allclose(output.logits, wanted, atol=1e-4), tta


def test_episodes_forget_and_streams_do_not(nets, images):
    ctx = context(nets, rng=same_stream)
    one, two = answers(FedICON(episodic=True, tta_lr=0.05, test_batch=16), nets, ctx, [images, images])
    assert torch.equal(one.logits, two.logits)
    carried = answers(FedICON(tta_lr=0.05, test_batch=16), nets, ctx, [images, images])
    assert torch.equal(carried[0].logits, one.logits)
    assert not torch.allclose(carried[1].logits, one.logits, atol=1e-3)


def test_a_run_repeats_and_its_streams_do_not_touch_each_other(federation, config):
    method, config = FedICON(tta_lr=0.1, test_batch=16), replace(config, rounds=1)
    engines = [EagerEngine(method, replace(federation, tests=federation.tests[:n]), config) for n in (1, 2)]
    *_, result = simulate(method, federation, config, engines[0])
    alone, both = (evaluate(engine, result.state, {}) for engine in engines)
    assert alone == [row for row in both if row.corruption is None]
    assert len(both) > len(alone)
