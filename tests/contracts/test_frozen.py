"""What a backbone's author froze keeps its bits, whoever trains, joins, tests or stores it; all else learns."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from foogd import Config, simulate
from foogd.detectors.registry import resolve_detector
from foogd.engine.eager import EagerEngine
from foogd.engine.graph import GraphEngine
from foogd.evaluation.evaluator import Evaluator, evaluate
from foogd.methods import METHODS, make_method, possible_names
from foogd.testing import CONTRACT, check_method


class Extractor(nn.Module):
    """Frozen at the front, and a batch normalisation and a bias behind; each pass checks that they are as built."""

    feature_width = 384
    frozen = ("first.", "norm.", "second.bias")

    def __init__(self, shape):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(shape[0], 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.5))
        self.second, self.norm = nn.Conv2d(16, 24, 3, 2, 1), nn.BatchNorm2d(24)
        self.scale = nn.Parameter(torch.ones(24, 1, 1))
        for norm in (self.first[1], self.norm):
            norm.running_mean.uniform_(-0.1, 0.1)
            norm.running_var.uniform_(0.5, 1.5)
        for name, value in self.named_parameters():
            value.requires_grad_(not name.startswith(self.frozen))
        self.start = {name: value.clone() for name, value in self.held().items()}

    def held(self):
        return {name: value for name, value in self.state_dict().items() if name.startswith(self.frozen)}

    def forward(self, x):
        for name, part in self.named_modules():
            assert not (part.training and f"{name}.".startswith(self.frozen)), f"{name} is in train mode"
        if not x.is_meta:
            for name, value in self.held().items():
                assert torch.equal(value, self.start[name]), f"{name} has moved"
        z = self.norm(self.second(self.first(x)).relu()) * self.scale
        return nn.functional.adaptive_avg_pool2d(z, 4).relu().flatten(1)


class Probe(Extractor):
    """Frozen as a whole: only what stands on it learns."""

    frozen = ("",)


@pytest.fixture
def config():
    return Config(
        rounds=2, batch_size=16, lr=0.05, momentum=0.9, weight_decay=0.1, keep_momentum=True, device="cpu",
        backbone=Extractor,
    )  # fmt: skip


def trained(engine):
    *_, last = simulate(engine.method, engine.federation, engine.config, engine)
    assert not last.refused
    return last


def assert_as_built(engine, server):
    """The frozen values of the server's backbone are those of a fresh one."""
    start = engine.nets()["backbone"].held()
    found = engine.server_nets().load(server)["backbone"].held()
    assert {"first.0.weight", "first.1.running_var", "first.1.num_batches_tracked", "second.bias"} <= found.keys()
    for name, value in found.items():
        assert torch.equal(value, start[name]), name


METHODS_AND_SETTINGS = [(name, {}) for name in possible_names() if not name.endswith("+aug")]
METHODS_AND_SETTINGS += [
    ("fedthe", {"memo_steps": 1, "memo_lr": 0.1, "memo_views": 2}),
    ("fedicon", {"tta_lr": 0.1, "test_batch": 32}),
    ("scaffold", {"eta_g": 0.5}),
    ("fedatol", {"bn": "real"}),
    ("fedavg+foogd", {"profile": "anchored"}),
]
ALONE = (*METHODS, "fedavg+foogd", "fedicon+foogd")


def method_of(name, own):
    return make_method(name, ({"score_width": 16, "steps": 2} if name.endswith("+foogd") else {}) | own)


@pytest.mark.parametrize(("name", "own"), METHODS_AND_SETTINGS)
def test_what_is_frozen_keeps_its_bits_and_the_rest_learns(name, own, federation, config):
    engine = EagerEngine(method_of(name, own), federation, config)
    last = trained(engine)
    Evaluator(engine, {"msp": resolve_detector("msp")}).evaluation(last.state)  # tests adapt: its passes check too
    assert_as_built(engine, last.state.server)
    start, found = engine.nets()["backbone"], engine.server_nets().load(last.state.server)["backbone"]
    for value in ("second.weight", "scale"):
        moved = (found.get_parameter(value) - start.get_parameter(value)).detach()
        assert float(moved.abs().mean()) > 1e-4, value


@pytest.mark.parametrize(("name", "own"), [(name, own) for name, own in METHODS_AND_SETTINGS if name in ALONE])
def test_a_backbone_can_be_frozen_as_a_whole(name, own, federation, config):
    engine = EagerEngine(method_of(name, own), federation, replace(config, backbone=Probe))
    last = trained(engine)
    Evaluator(engine, {"msp": resolve_detector("msp")}).evaluation(last.state)
    assert_as_built(engine, last.state.server)
    # Where a net keeps its start, nothing but the backbone may be to blame.
    head = engine.server_nets().load(last.state.server)["head"]
    private = any(name.startswith("head.") for name in engine.layout.personal_names)
    assert private or not torch.equal(head.weight, engine.nets()["head"].weight)


@pytest.mark.parametrize("name", ["fedavg", "fedbn", "fedthe", "fedavg+foogd"])
def test_what_stands_on_a_frozen_backbone_learns_separable_data(name, federation, config):
    config = replace(config, backbone=Probe, rounds=6, weight_decay=0.0)
    engine = EagerEngine(method_of(name, {}), federation, config)
    rows = evaluate(engine, trained(engine).state, {})
    right = {row.value for row in rows if (row.metric, row.split, row.scope) == ("accuracy", "in", "pooled")}
    assert min(right) > 0.9


@pytest.mark.parametrize("rules", [{"bn_pool": "exact"}, {"aggregation": "trimmed"}, {"aggregation": "median"}])
def test_what_is_frozen_is_sent_once_and_never_joined(rules, federation, config):
    """Sums of equal values are not always that value, so no rule may join them."""
    engine = EagerEngine(make_method("fedavg"), federation, replace(config, **rules))
    first, second = simulate(engine.method, federation, engine.config, engine)
    assert_as_built(engine, second.state.server)
    held = {f"backbone.{name}" for name, value in Extractor((3, 16, 16)).held().items() if value.is_floating_point()}
    assert set(engine.layout.frozen_names) == held
    clients = len(federation.train_indices)
    assert first.bytes_down - second.bytes_down == 4 * engine.layout.frozen_size * clients
    assert first.bytes_up == second.bytes_up == second.bytes_down


@pytest.mark.parametrize("backbone", [Extractor, Probe])
@pytest.mark.parametrize("name", ["fedavg", "fedicon", "fedavg+foogd", "scaffold"])
def test_slots_hold_what_is_frozen_too(name, backbone, federation, config):
    config = replace(config, backbone=backbone)
    wanted = trained(EagerEngine(method_of(name, {}), federation, config))
    engine = GraphEngine(method_of(name, {}), federation, config, slots=2, rehearse=True)
    found = trained(engine)
    assert engine.fallback is None
    assert_as_built(engine, found.state.server)
    assert torch.equal(found.state.server.shared, wanted.state.server.shared)
    assert found.losses == pytest.approx(wanted.losses, rel=1e-5)


@pytest.mark.parametrize("backbone", [Extractor, Probe])
@pytest.mark.parametrize("name", ["fedicon", "fedbn", "foster", "fedavg+foogd"])
def test_the_contract_holds_on_a_frozen_backbone(name, backbone):
    own = {"head_lr": 0.1, "body_lr": 0.005} if name == "fedicon" else {}
    check_method(method_of(name, own), config=replace(CONTRACT, backbone=backbone, rounds=12))
