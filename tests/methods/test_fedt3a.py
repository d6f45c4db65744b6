"""FedT3A: prototypes of a test stream in place of the linear head."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from foogd import FedAvg, simulate
from foogd.core.random import Streams, generator, with_seed
from foogd.core.types import Context
from foogd.data.synthetic import tiny_federation
from foogd.detectors.registry import DETECTORS
from foogd.engine.eager import EagerEngine
from foogd.evaluation.evaluator import Evaluator, evaluate
from foogd.methods import make_method
from foogd.methods.fedt3a import FedT3A, Supports, prototypes, surest, warm_up


def final(method, federation, config):
    engine = EagerEngine(method, federation, config)
    *_, result = simulate(method, federation, config, engine)
    return engine, result.state


def numbers(engine, state):
    rows = evaluate(engine, state, {name: DETECTORS[name] for name in ("msp", "energy")})
    return [(r.scope, r.client, r.dataset, r.corruption, r.detector, r.metric, r.value) for r in rows]


def unit(v):
    return v / v.norm(dim=-1, keepdim=True).clamp_min(1e-12)  # a feature may be 0


@pytest.fixture
def nets():
    """Eight non-negative features of tiny images, which the head spreads over all classes."""
    backbone = nn.Sequential(nn.Flatten(), with_seed(generator(0, "body"), lambda: nn.Linear(12, 8)), nn.ReLU())
    head = with_seed(generator(0, "head"), lambda: nn.Linear(8, 5))
    return nn.ModuleDict({"backbone": backbone, "head": head}).requires_grad_(False)


@pytest.fixture
def images():
    return 3 * torch.randn(40, 3, 2, 2, generator=torch.Generator().manual_seed(1))


def stream(method, nets, batches):
    ctx = Context(1, 1, (), torch.ones(5), nets, {}, {}, Streams(0))
    with torch.no_grad():
        predict = method.predictor(nets, ctx)
        return [predict(x) for x in batches]


def by_the_book(nets, batches, keep):
    """The rule, one sample and one class at a time."""
    head = nets["head"]
    book = [(w, int(head(w).argmax()), float(entropy_of(head(w)))) for w in head.weight]
    outputs = []
    for x in batches:
        z = nets["backbone"](x)
        book += [(u, int(head(u).argmax()), float(entropy_of(head(u)))) for u in z]
        rows = []
        for c in range(head.out_features):
            own = sorted((item for item in book if item[1] == c), key=lambda item: item[2])[:keep]
            rows.append(unit(sum((unit(u) for u, _, _ in own), torch.zeros(head.in_features))))
        outputs.append(z @ torch.stack(rows).T)
    return outputs


def entropy_of(logits):
    return torch.distributions.Categorical(logits=logits).entropy()


def test_it_trains_as_fedavg_and_without_adaptation_evaluates_as_fedavg(federation, config):
    config = replace(config, rounds=1)
    plain, fixed = final(FedAvg(), federation, config), final(FedT3A(adapt=False), federation, config)
    assert torch.equal(plain[1].server.shared, fixed[1].server.shared)
    assert numbers(*plain) == numbers(*fixed)
    adapted = final(FedT3A(), federation, config)
    assert torch.equal(plain[1].server.shared, adapted[1].server.shared)
    assert numbers(*plain) != numbers(*adapted)
    both = final(make_method("fedt3a+aug"), federation, config)[1].server.shared
    assert torch.equal(both, final(FedAvg(views=2), federation, config)[1].server.shared)


def test_without_adaptation_the_predictor_is_the_head(nets, images):
    assert (FedT3A().adapts, FedT3A(adapt=False).adapts) == (True, False)
    (output,) = stream(FedT3A(adapt=False), nets, [images])
    z = nets["backbone"](images)
    assert torch.equal(output.z, z)
    assert torch.equal(output.logits, nets["head"](z))


@pytest.mark.parametrize("keep", [1, 2, 3, 100])
@pytest.mark.parametrize("size", [1, 7, 40])
def test_a_stream_follows_the_rule(keep, size, nets, images):
    assert len(nets["head"](nets["backbone"](images)).argmax(1).unique()) == 4  # one class has its row alone
    batches = images.split(size)
    for output, wanted, x in zip(
        stream(FedT3A(filter=keep), nets, batches), by_the_book(nets, batches, keep), batches, strict=True
    ):
        assert torch.equal(output.z, nets["backbone"](x))
        assert torch.allclose(output.logits, wanted, atol=1e-5)


def test_a_batch_sees_itself_and_the_order_of_batches_matters(nets, images):
    whole = stream(FedT3A(filter=2), nets, [images])[0].logits
    parts = torch.cat([output.logits for output in stream(FedT3A(filter=2), nets, images.split(10))])
    turned = torch.cat([output.logits for output in stream(FedT3A(filter=2), nets, images.flip(0).split(10))]).flip(0)
    assert not torch.allclose(whole, parts, atol=1e-4)
    assert not torch.allclose(turned, parts, atol=1e-4)


def test_where_each_row_is_of_its_class_the_warm_up_alone_is_the_unit_rows_and_not_the_head(nets):
    rough = warm_up(nets["head"])
    assert torch.equal(rough.label, nets["head"](nets["head"].weight).argmax(1))
    assert torch.allclose(rough.entropy, entropy_of(nets["head"](nets["head"].weight)), atol=1e-6)
    z = torch.rand(50, 5, generator=torch.Generator().manual_seed(0))
    head = nn.Linear(5, 5).requires_grad_(False)
    head.bias.zero_()
    for lengths, same in ((torch.full((5,), 3.0), True), (torch.arange(2.0, 7.0), False)):
        head.weight.copy_(torch.diag(lengths) + 0.1)
        start = warm_up(head)
        assert torch.equal(start.label, torch.arange(5))
        logits = z @ prototypes(start, classes=5).T
        assert torch.allclose(logits, z @ unit(head.weight).T, atol=1e-6)
        assert torch.equal(logits.argmax(1), head(z).argmax(1)) == same


def test_a_row_that_the_head_gives_to_another_class_stands_for_that_one_and_its_own_is_empty():
    head = nn.Linear(2, 3).requires_grad_(False)
    head.weight.copy_(torch.tensor([[1.0, 0.0], [4.0, 1.0], [0.0, 3.0]]))
    head.bias.zero_()
    assert head(head.weight).argmax(1).tolist() == [1, 1, 2]
    found = prototypes(surest(warm_up(head), limit=100, classes=3), classes=3)
    rows = unit(head.weight)
    assert torch.allclose(found, torch.stack([torch.zeros(2), unit(rows[0] + rows[1]), rows[2]]))


def test_a_class_without_a_prototype_has_the_logit_0_until_an_image_of_it_comes():
    head = nn.Linear(2, 3).requires_grad_(False)
    head.weight.copy_(torch.tensor([[1.0, 0.0], [2.0, -1.0], [0.0, 1.0]]))
    head.bias.copy_(torch.tensor([0.0, 0.0, -10.0]))  # nothing is of class 2 but what is far up
    nets = nn.ModuleDict({"backbone": nn.Flatten(), "head": head})
    up, right = torch.tensor([[0.0, 20.0]]), torch.tensor([[3.0, 0.5], [1.0, 1.0]])
    first, second, third = stream(FedT3A(), nets, [right, up, right])
    assert bool((first.logits[:, 2] == 0).all())
    assert torch.isfinite(first.logits).all()
    assert float(second.logits[0, 2]) == 20.0
    assert torch.equal(third.logits[:, 2], right[:, 1])


def test_for_fixed_supports_the_class_does_not_depend_on_the_length_of_a_feature(rng):
    supports = Supports(torch.randn(30, 8, generator=rng), torch.arange(30) % 4, torch.rand(30, generator=rng))
    c = prototypes(supports, classes=4)
    assert torch.allclose(c.norm(dim=1), torch.ones(4))
    z = torch.randn(20, 8, generator=rng)
    assert torch.equal((z @ c.T).argmax(1), (17.0 * z @ c.T).argmax(1))


@pytest.mark.parametrize("limit", [1, 3, 50])
def test_a_class_keeps_its_surest_supports_and_of_equals_the_earlier(limit, rng):
    label = torch.randint(3, (60,), generator=rng)  # of 4 classes one is empty
    level = torch.randint(5, (60,), generator=rng).float()  # many ties
    place = torch.arange(60.0)[:, None]
    kept = surest(Supports(place, label, level), limit=limit, classes=4)
    wanted = []
    for c in range(4):
        wanted += sorted((i for i in range(60) if label[i] == c), key=lambda i: (float(level[i]), i))[:limit]
    assert kept.u[:, 0].tolist() == sorted(wanted)
    assert torch.equal(kept.label, label[kept.u[:, 0].long()])
    assert torch.equal(kept.entropy, level[kept.u[:, 0].long()])
    assert int(torch.bincount(kept.label).max()) <= limit


def test_with_one_support_the_prototype_is_the_unit_vector_of_the_surest(rng):
    supports = Supports(torch.randn(9, 4, generator=rng), torch.arange(9) % 3, torch.rand(9, generator=rng))
    found = prototypes(surest(supports, limit=1, classes=3), classes=3)
    for c in range(3):
        own = [i for i in range(9) if i % 3 == c]
        best = min(own, key=lambda i: float(supports.entropy[i]))
        assert torch.allclose(found[c], unit(supports.u[best]))


def test_every_stream_starts_afresh_and_leaves_the_nets_alone(nets, images):
    before = {name: value.clone() for name, value in nets.state_dict().items()}
    one, two = (stream(FedT3A(), nets, images.split(16)) for _ in range(2))
    for first, second in zip(one, two, strict=True):
        assert torch.equal(first.logits, second.logits)
    assert all(torch.equal(value, before[name]) for name, value in nets.state_dict().items())


def test_out_images_do_not_touch_the_stream_of_in_images(config):
    config = replace(config, rounds=1)

    def accuracies(federation):
        engine, state = final(FedT3A(), federation, config)
        return [r.value for r in evaluate(engine, state, {}) if r.metric == "accuracy"]

    assert accuracies(tiny_federation()) == accuracies(tiny_federation(outs=False))


def test_the_evaluation_gives_it_batches_of_its_own_size(federation, config):
    config = replace(config, rounds=1)
    small, large = (final(FedT3A(test_batch=size), federation, config) for size in (3, 128))
    assert torch.equal(small[1].server.shared, large[1].server.shared)

    def scores(engine, state):  # metrics of a few images may agree by chance
        return Evaluator(engine, {"energy": DETECTORS["energy"]}).evaluation(state).answers[0].scores["energy"][0]

    assert not torch.allclose(scores(*small), scores(*large), atol=1e-3)
    assert torch.equal(scores(*small), scores(*small))
