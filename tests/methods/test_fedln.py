"""FedLN: the loss sees the direction of the logits, tests see the logits themselves."""

import math

import pytest
import torch
from scipy.special import log_softmax
from torch import nn

from foogd.core.types import Batch, Context
from foogd.engine.eager import EagerEngine, build_nets
from foogd.methods import FedAvg, FedLN, make_method
from foogd.simulate import initial_state, run_round


def loss_of(v, y, method):
    """The method's loss for given logits: its head is the identity."""
    head = nn.Linear(v.shape[1], v.shape[1])
    nn.init.eye_(head.weight)
    nn.init.zeros_(head.bias)
    nets = nn.ModuleDict({"head": head.to(v.dtype)})
    ctx = Context(0, 1, ("model",), torch.ones(v.shape[1]), nets, {}, {}, lambda purpose: torch.Generator())
    return method.losses(nets, Batch(v, y, z=v), ctx)["model"]


def logits_and_labels(rng, n=12, classes=5):
    v = torch.randn(n, classes, generator=rng, dtype=torch.float64)
    return v, torch.randint(classes, (n,), generator=rng)


@pytest.mark.parametrize("size", [1.0, 1e-7])  # at the second, the 1e-7 in the norm matters
def test_the_loss_is_cross_entropy_of_logits_of_length_one_over_tau(size, rng):
    v, y = logits_and_labels(rng)
    v = v * size
    scaled = (v / (0.04 * (v.square().sum(1, keepdim=True).sqrt() + 1e-7))).numpy()
    wanted = -log_softmax(scaled, axis=1)[range(len(y)), y.numpy()].mean()
    assert loss_of(v, y, FedLN()).item() == pytest.approx(wanted, rel=1e-9)


def test_the_loss_does_not_depend_on_the_length_of_the_logits(rng):
    v, y = logits_and_labels(rng)
    for scale in (0.1, 37.0):
        assert loss_of(scale * v, y, FedLN()).item() == pytest.approx(loss_of(v, y, FedLN()).item(), rel=1e-4)


def test_its_gradient_is_orthogonal_to_the_logits(rng):
    v, y = logits_and_labels(rng)
    v.requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(v, y, FedLN()), v)
    assert gradient.norm() > 0.1
    # Homogeneous of degree 0 but for the 1e-7 beside the norm.
    assert ((gradient * v).sum(1).abs() <= 1e-5 * gradient.norm(dim=1) * v.norm(dim=1)).all()


@pytest.mark.parametrize(("classes", "tau"), [(5, 0.04), (10, 0.3)])
def test_its_minimum_is_at_the_corners_of_a_simplex(classes, tau, rng):
    bound = math.log1p((classes - 1) * math.exp(-math.sqrt(classes / (classes - 1)) / tau))
    y = torch.arange(classes)
    corners = torch.eye(classes, dtype=torch.float64) - 1 / classes
    assert loss_of(corners, y, FedLN(tau=tau)).item() == pytest.approx(bound, rel=1e-4)
    for _ in range(20):
        near = corners + 0.2 * torch.randn(classes, classes, generator=rng, dtype=torch.float64)
        assert loss_of(near, y, FedLN(tau=tau)).item() > bound


def test_a_large_tau_leaves_no_difference_between_classes(rng):
    v, y = logits_and_labels(rng)
    assert loss_of(v, y, FedLN(tau=1e6)).item() == pytest.approx(math.log(5), abs=1e-5)


def test_tests_read_the_raw_logits(federation, config):
    method = FedLN()
    nets = build_nets(method, federation, config).eval()
    x = federation.train.batch(federation.train_indices[0][:8])
    ctx = Context(0, 1, (), federation.class_counts(0), nets, {}, {}, lambda purpose: torch.Generator())
    output = method.predictor(nets, ctx)(x)
    v = nets["head"](nets["backbone"](x))
    assert torch.equal(output.logits, v)
    assert torch.equal(method.readout(nets).head(output.z), v)
    assert torch.equal((v / (method.tau * v.norm(dim=1, keepdim=True))).argmax(1), v.argmax(1))


def test_two_views_are_one_larger_batch(rng):
    v, y = logits_and_labels(rng)
    head = nn.Linear(5, 5).double()
    nets = nn.ModuleDict({"head": head})
    ctx = Context(0, 1, ("model",), torch.ones(5), nets, {}, {}, lambda purpose: torch.Generator())
    both = FedLN().losses(nets, Batch(v, y, z=v, z_hat=v + 1), ctx)["model"]
    joined = FedLN().losses(nets, Batch(v, y.repeat(2), z=torch.cat([v, v + 1])), ctx)["model"]
    assert torch.equal(both, joined)


def test_only_the_loss_differs_from_fedavg(federation, config):
    results = {}
    for method in (FedAvg(), FedLN()):
        engine = EagerEngine(method, federation, config)
        results[type(method)] = run_round(engine, initial_state(engine), 0)
    plain, other = results[FedAvg], results[FedLN]
    assert (plain.bytes_up, plain.bytes_down) == (other.bytes_up, other.bytes_down)
    assert not torch.equal(plain.state.server.shared, other.state.server.shared)
    assert not any(client.memory for client in other.state.clients)


def test_its_names_make_it():
    assert make_method("fedln") == FedLN(tau=0.04)
    assert make_method("fedln+aug", {"tau": 0.01}) == FedLN(views=2, tau=0.01)
