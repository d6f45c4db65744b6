"""FedBN: batch normalisation, found by its class, stays on the client."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from foogd.detectors.registry import DETECTORS
from foogd.engine.eager import EagerEngine, build_nets
from foogd.evaluation.evaluator import evaluate
from foogd.methods import FedAvg, FedBN, make_method
from foogd.methods.foogd import FOOGD
from foogd.nets import BACKBONES
from foogd.simulate import initial_state, run_round, simulate


class WithoutBN(nn.Module):
    """Convolution, group normalisation, pooling."""

    feature_width = 8

    def __init__(self, shape):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(shape[0], 8, 3, 2), nn.GroupNorm(2, 8), nn.ReLU())

    def forward(self, x):
        return self.layers(x).mean((2, 3))


def finished(method, federation, config):
    engine = EagerEngine(method, federation, config)
    *_, result = simulate(method, federation, config, engine)
    return engine, result


@pytest.mark.parametrize("backbone", ["cnn", "wrn16-1", "wrn40-2", "resnet18", "resnet18-3x3"])
def test_all_values_of_all_layers_are_private(backbone):
    nets = nn.ModuleDict({"backbone": BACKBONES[backbone]((3, 32, 32)), "head": nn.Linear(4, 2)})
    # Only batch normalisation has running statistics in these nets.
    owners = [name.removesuffix("running_mean") for name in nets.state_dict() if name.endswith("running_mean")]
    wanted = {owner + leaf for owner in owners for leaf in ("weight", "bias", "running_mean", "running_var")}
    found = FedBN().private_names(nets)
    assert found == wanted
    if backbone.startswith("resnet18"):
        assert sum("shortcut.1." in name for name in found) == 3 * 4
    if backbone == "wrn40-2":
        assert sum(p.numel() for name, p in nets.named_parameters() if name in found) == 5408


def test_layers_are_found_by_class_and_not_by_name():
    backbone = nn.Module()
    layers = {
        "one": nn.BatchNorm1d(2), "three": nn.BatchNorm3d(2), "lazy": nn.LazyBatchNorm2d(), "sync": nn.SyncBatchNorm(2),
        "bare": nn.BatchNorm2d(2, affine=False, track_running_stats=False), "downsample": nn.Sequential(
            nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)
        ), "bn": nn.Linear(2, 2), "bn2": nn.LayerNorm(2), "bn3": nn.GroupNorm(1, 2),
        "bn4": nn.InstanceNorm2d(2, affine=True, track_running_stats=True),
    }  # fmt: skip
    for name, layer in layers.items():
        backbone.add_module(name, layer)
    backbone.add_module("again", layers["one"])
    layers["lazy"](torch.zeros(1, 2, 2, 2))
    nets = nn.ModuleDict({"backbone": backbone, "score": nn.BatchNorm1d(2)})
    owners = {name.removeprefix("backbone.").rpartition(".")[0] for name in FedBN().private_names(nets)}
    assert owners == {"one", "again", "three", "lazy", "sync", "downsample.1"}
    itself = nn.ModuleDict({"backbone": nn.BatchNorm2d(3)})
    assert "backbone.running_var" in FedBN().private_names(itself)


def test_after_a_round_private_layers_differ_and_the_rest_is_common(federation, config):
    engine, result = finished(FedBN(), federation, replace(config, rounds=1))
    start = initial_state(engine)
    rows = [client.personal for client in result.state.clients]
    for name in FedBN().private_names(engine.nets()):
        values = [engine.layout.named(start.server.shared, row)[name] for row in (start.clients[0].personal, *rows)]
        for i, one in enumerate(values):
            assert all(not torch.equal(one, other) for other in values[:i]), name
    assert len({row.data_ptr() for row in rows}) == len(rows)
    shared = engine.layout.named(result.state.server.shared)
    assert set(shared) == set(engine.layout.slices) - FedBN().private_names(engine.nets())
    assert all(not torch.equal(value, engine.layout.named(start.server.shared)[name]) for name, value in shared.items())


def test_a_client_that_does_not_take_part_keeps_its_layers(federation, config):
    engine = EagerEngine(FedBN(), federation, replace(config, participation=0.34))
    state = initial_state(engine)
    for round in range(3):
        result = run_round(engine, state, round)
        for old, new in zip(state.clients, result.state.clients, strict=True):
            assert torch.equal(old.personal, new.personal) != (new.id in result.participants)
        state = result.state


def test_training_starts_from_the_clients_own_layers(federation, config):
    engine = EagerEngine(FedBN(), federation, replace(config, local_epochs=0))
    start = initial_state(engine)
    own = torch.rand_like(start.clients[0].personal)
    client = replace(start.clients[0], personal=own)
    next(engine.train(start.server, [client], 0))
    assert torch.equal(client.personal, own)


@pytest.mark.parametrize("views", [1, 2])
def test_without_batch_normalisation_it_is_fedavg_bit_for_bit(views, federation, config):
    config = replace(config, backbone=WithoutBN)
    methods = FedAvg(views=views), FedBN(views=views)
    plain, other = (finished(method, federation, config)[1].state for method in methods)
    assert torch.equal(plain.server.shared, other.server.shared)
    assert other.clients[0].personal.numel() == 0


def test_with_one_client_it_is_fedavg_bit_for_bit(federation, config, with_train_indices):
    alone = with_train_indices(federation, [federation.train_indices[0]])
    plain, usual = finished(FedAvg(), alone, config)
    bn, other = finished(FedBN(), alone, config)
    values = bn.layout.named(other.state.server.shared, other.state.clients[0].personal)
    for name, value in plain.layout.named(usual.state.server.shared).items():
        assert torch.equal(value, values[name]), name


def test_the_score_network_travels(federation, config):
    nets = build_nets(FOOGD(FedBN()), federation, config)
    names = {name for name in nets.state_dict() if name.startswith("score.")}
    assert {"score.centre", "score.spread", "score.net.1.weight"} <= names
    engine = EagerEngine(FOOGD(FedBN()), federation, config)
    assert names <= set(engine.layout.shared_names)
    assert set(engine.layout.personal_names) == FedBN().private_names(nets)


def test_an_unseen_client_gets_the_mean_of_the_private_layers(federation, config):
    strange = replace(federation, tests=tuple(replace(test, unseen=True) for test in federation.tests))
    engine, result = finished(FedBN(), strange, config)
    state = result.state
    nets = engine.nets().eval()
    mean = torch.stack([client.personal for client in state.clients]).mean(0)
    engine.layout.bind(nets, state.server.shared.clone(), mean)
    test = next(test for test in strange.tests if test.split == "in")
    indices = torch.cat(test.indices)
    constants = [torch.tensor(values).view(1, -1, 1, 1) for values in (strange.mean, strange.std)]
    with torch.no_grad():
        x = (test.store.batch(indices) - constants[0]) / constants[1]
        right = (nets["head"](nets["backbone"](x)).argmax(1) == test.store.labels[indices]).double().mean()
    rows = evaluate(engine, state, {"msp": DETECTORS["msp"]})
    found = next(r.value for r in rows if (r.metric, r.split, r.scope) == ("accuracy", "in", "pooled"))
    assert found == pytest.approx(float(right))


@pytest.mark.parametrize("backbone", ["cnn", "wrn16-1"])
def test_traffic_is_the_model_without_batch_normalisation(backbone, federation, config):
    config = replace(config, rounds=1, backbone=backbone)
    nets = build_nets(FedBN(), federation, config)
    layers = [module for module in nets.modules() if isinstance(module, nn.BatchNorm2d)]
    everything = sum(value.numel() for value in nets.state_dict().values() if value.is_floating_point())
    left_out = sum(4 * layer.num_features for layer in layers)  # weight, bias, mean, variance
    model = 4 * (everything - left_out) + 8 * len(layers)  # the counters of batches are in no row
    _, result = finished(FedBN(), federation, config)
    assert result.bytes_up == result.bytes_down == 3 * model


def test_its_names_make_it():
    assert make_method("fedbn") == FedBN()
    assert make_method("fedbn+aug") == FedBN(views=2)
