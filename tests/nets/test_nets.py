"""Backbones, score network and dropout: sizes, randomness, and what users' own networks may do."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from foogd.core.errors import InputError
from foogd.core.random import generator
from foogd.nets import (
    BACKBONES,
    AnchoredScore,
    ResNet18,
    ScoreNet,
    ScoreNetwork,
    SmallCNN,
    WideResNet,
    frozen,
    make_backbone,
)
from foogd.nets.dropout import Dropout, bind_dropout, own_dropout

SHAPE = (3, 16, 16)


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def buffers(module: nn.Module) -> int:
    return sum(b.numel() for b in module.buffers())


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("classes", "expected"), [(10, 2_243_546), (100, 2_255_156)])
def test_wrn_has_the_published_size(classes: int, expected: int) -> None:
    net = WideResNet()
    assert parameters(net) + parameters(nn.Linear(net.feature_width, classes)) == expected
    assert buffers(net) == 5_445
    assert sum(isinstance(m, nn.BatchNorm2d) for m in net.modules()) == 37


@pytest.mark.parametrize(("classes", "expected"), [(7, 11_180_103), (200, 11_279_112)])
def test_resnet_has_the_published_size(classes: int, expected: int) -> None:
    net = ResNet18()
    assert parameters(net) + parameters(nn.Linear(net.feature_width, classes)) == expected
    assert buffers(net) == 9_620


@pytest.mark.parametrize(
    ("width", "hidden", "released"), [(128, 1024, 265_344), (128, 512, 132_736), (512, 1024, 1_052_160)]
)
def test_score_net_has_the_released_size_and_one_input_more(width: int, hidden: int, released: int) -> None:
    score = ScoreNet(width, hidden)
    assert parameters(score) == released + hidden
    assert buffers(score) == width + 1


def test_wrn_start_weights_have_the_stated_scale() -> None:
    net = make_backbone("wrn40-2", SHAPE, generator(0))
    for conv in (m for m in net.modules() if isinstance(m, nn.Conv2d)):
        k, out = conv.kernel_size[0], conv.out_channels
        ratio = conv.weight.square().mean() / (2 / (k * k * out))
        assert abs(ratio - 1) < 5 * (2 / conv.weight.numel()) ** 0.5


@pytest.mark.parametrize("name", sorted(BACKBONES))
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 16, 16), (1, 37, 30)])
def test_features_are_flat_and_non_negative(name: str, shape: tuple[int, int, int]) -> None:
    net = make_backbone(name, shape, generator(1)).eval()
    z = net(torch.randn(2, *shape, generator=generator(2)))
    assert z.shape == (2, net.feature_width)
    assert z.min() >= 0
    assert z.max() > 0


@pytest.mark.parametrize("name", sorted(BACKBONES))
def test_backbones_run_forward_and_backward_on_meta(name: str) -> None:
    with torch.device("meta"):
        net = make_backbone(name, SHAPE, generator(1)).train()
        z = net(torch.empty(4, *SHAPE))
        z.sum().backward()
    assert z.is_meta
    assert z.shape == (4, net.feature_width)
    assert all(p.grad is not None and p.grad.is_meta for p in net.parameters())


def test_score_net_runs_on_meta() -> None:
    with torch.device("meta"):
        score = ScoreNet(8, 16)
        z = torch.empty(4, 8)
        score.measure(score.moments(z, torch.empty(4, dtype=torch.int64)))
        for sigma in (0.1, torch.empty(4)):
            assert score(score.scale(z), sigma).shape == (4, 8)
            assert frozen(score)(score.scale(z), sigma).is_meta


def test_every_image_gets_the_features_of_its_own() -> None:
    net = make_backbone("cnn", (1, 28, 28), generator(1)).eval()
    x = torch.randn(5, 1, 28, 28, generator=generator(2))
    torch.testing.assert_close(torch.cat([net(x[i : i + 1]) for i in range(5)]), net(x))


@pytest.mark.parametrize("make", [lambda: WideResNet(depth=17), lambda: ResNet18(stem="5x5"), lambda: Dropout(1.0)])
def test_impossible_sizes_are_refused(make: object) -> None:
    with pytest.raises(InputError, match="allowed"):
        make()  # type: ignore[operator]


# --- start weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cnn", "wrn16-1"])
def test_start_weights_depend_on_the_stream_alone(name: str) -> None:
    torch.manual_seed(1)
    first = make_backbone(name, SHAPE, generator(7)).state_dict()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again = make_backbone(name, SHAPE, generator(7)).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    other = make_backbone(name, SHAPE, generator(8)).state_dict()
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert any(not torch.equal(first[k], other[k]) for k in first)


@pytest.mark.parametrize("name", sorted(BACKBONES))
def test_eval_mode_leaves_the_state_untouched(name: str) -> None:
    net = make_backbone(name, SHAPE, generator(7)).eval()
    before = copy.deepcopy(net.state_dict())
    net(torch.randn(4, *SHAPE, generator=generator(2)))
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())


def test_building_does_not_count_as_training() -> None:
    net = make_backbone("wrn16-1", SHAPE, generator(7))
    assert all(m.training for m in net.modules())
    assert int(net.bn.num_batches_tracked) == 0
    assert torch.equal(net.bn.running_mean, torch.zeros(64))


# --- dropout ---------------------------------------------------------------------------------------------------------


def dropped(p: float, seed: int = 0, channelwise: bool = False, shape: tuple[int, ...] = (200, 50, 4, 4)) -> Tensor:
    layer = Dropout(p, channelwise)
    bind_dropout(layer, generator(seed))
    return layer(torch.ones(shape))


@pytest.mark.parametrize("p", [0.1, 0.3, 0.8])
def test_dropout_keeps_the_expectation(p: float) -> None:
    out = dropped(p)
    assert abs(out.mean() - 1) < 5 * (p / (1 - p) / out.numel()) ** 0.5
    assert abs((out == 0).double().mean() - p) < 5 * (p * (1 - p) / out.numel()) ** 0.5
    kept = out[out > 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - p)))


def test_dropout_is_the_identity_at_zero_and_in_eval_mode() -> None:
    x = torch.randn(4, 3)
    assert torch.equal(Dropout(0.0)(x), x)
    assert torch.equal(Dropout(0.5).eval()(x), x)


def test_dropout_masks_come_from_the_bound_stream_alone() -> None:
    torch.manual_seed(1)
    first = dropped(0.5)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(dropped(0.5), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(dropped(0.5, seed=3), first)


def test_the_stream_moves_on() -> None:
    layer = Dropout(0.5)
    bind_dropout(layer, generator(0))
    x = torch.ones(64)
    assert not torch.equal(layer(x), layer(x))


def test_unbound_dropout_refuses_to_draw() -> None:
    with pytest.raises(RuntimeError, match="bind_dropout"):
        Dropout(0.5)(torch.ones(3))
    assert Dropout(0.5)(torch.empty(3, device="meta")).is_meta


def test_channelwise_dropout_drops_whole_channels() -> None:
    out = dropped(0.4, channelwise=True)
    per_channel = out.flatten(2)
    assert torch.equal(per_channel.amin(2), per_channel.amax(2))
    assert 0.35 < (per_channel[..., 0] == 0).float().mean() < 0.45


def test_the_gradient_passes_through_the_same_mask() -> None:
    layer = Dropout(0.5)
    bind_dropout(layer, generator(0))
    x = torch.ones(100, requires_grad=True)
    out = layer(x)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


def test_dropout_is_copied_but_never_stored() -> None:
    net = nn.Sequential(nn.Linear(3, 3), Dropout(0.5, channelwise=True))
    bind_dropout(net, generator(0))
    twin = copy.deepcopy(net).eval()
    assert net[1].training
    assert not twin[1].training
    assert (twin[1].p, twin[1].channelwise) == (0.5, True)
    assert set(net.state_dict()) == {"0.weight", "0.bias"}
    bind_dropout(twin, None)
    assert net[1].generator is not None


def test_own_dropout_replaces_the_layers_of_a_users_net() -> None:
    shared = nn.Dropout(0.2)
    net = nn.Sequential(nn.Linear(4, 8), shared, nn.Sequential(nn.Dropout2d(0.4).eval(), shared), nn.ReLU())
    own_dropout(net)
    assert not any(type(m).__module__ == "torch.nn.modules.dropout" for m in net.modules())
    assert [(m.p, m.channelwise, m.training) for m in (net[1], net[2][0], net[2][1])] == [
        (0.2, False, True),
        (0.4, True, False),
        (0.2, False, True),
    ]
    bind_dropout(net, generator(0))
    state = torch.get_rng_state()
    net(torch.ones(3, 4))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("layer", [nn.AlphaDropout(0.1), nn.RReLU(), nn.LSTM(4, 4, 2, dropout=0.1)])
def test_layers_with_randomness_out_of_reach_are_refused(layer: nn.Module) -> None:
    with pytest.raises(InputError, match="global random generator"):
        own_dropout(nn.Sequential(nn.Linear(4, 4), layer))


# --- the score network -----------------------------------------------------------------------------------------------


def moved(score: ScoreNet) -> ScoreNet:
    """The network with a last layer that says something, and a space that is not where it started."""
    with torch.no_grad():
        for value in score.net[3].parameters():
            value.normal_(generator=generator(11))
        score.centre.normal_(generator=generator(12))
        score.spread.fill_(0.7)
    return score


@pytest.mark.parametrize("sigma", [0.05, 1.0, 4.0])
def test_before_it_has_learnt_the_score_is_that_of_one_gaussian_in_its_space(sigma: float) -> None:
    score, z = ScoreNet(6, 32), 5 * torch.randn(9, 6, generator=generator(0))
    score.measure(score.moments(z, torch.zeros(9, dtype=torch.int64)))
    u = score.scale(z).requires_grad_()
    blurred = torch.distributions.MultivariateNormal(torch.zeros(6), (1 + sigma**2) * torch.eye(6))
    (wanted,) = torch.autograd.grad(blurred.log_prob(u).sum(), u)
    for level in (sigma, torch.full((9,), sigma)):
        torch.testing.assert_close(score(u, level), wanted, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(moved(score)(u, sigma), wanted, atol=1e-2)


def test_the_network_says_what_the_gaussian_lacks() -> None:
    score, u = moved(ScoreNet(6, 32)), torch.randn(5, 6, generator=generator(0))
    for sigma in (0.1, 2.0):
        size = 1 + sigma**2
        raw = score.net(torch.cat([u / size**0.5, torch.full((5, 1), sigma).log()], 1))
        torch.testing.assert_close(score(u, sigma), -u / size + raw / (sigma * size**0.5))


def test_levels_of_a_batch_are_answered_as_one_by_one() -> None:
    score, u = moved(ScoreNet(6, 32)), torch.randn(5, 6, generator=generator(0))
    levels = torch.tensor([0.01, 0.1, 0.5, 1.0, 3.0])
    one_by_one = torch.cat([score(u[i : i + 1], float(levels[i])) for i in range(5)])
    torch.testing.assert_close(score(u, levels), one_by_one, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(score(u, torch.tensor(0.1)), score(u, 0.1))
    assert not torch.allclose(score(u, 0.1), score(u, 0.5), atol=1e-2)


def test_the_space_has_mean_0_and_mean_variance_1_however_images_are_divided() -> None:
    score, draw = ScoreNet(6, 32), generator(5)
    z = (2 * torch.randn(400, 6, generator=draw)).exp() * torch.tensor([3.0, 1.0, 1.0, 0.1, 0.0, 1.0])
    before = score.scale(z)
    torch.testing.assert_close(before.norm(dim=1), torch.full((400,), 6**0.5))  # not measured yet: of equal length
    score.measure(divided(score, z, torch.zeros(400, dtype=torch.int64)))
    u = score.scale(z).double()
    torch.testing.assert_close(u.mean(0), torch.zeros(6).double(), rtol=0, atol=1e-5)
    assert float(u.var(0, correction=0).mean()) == pytest.approx(1.0, abs=1e-5)
    torch.testing.assert_close(u.float() * score.spread + score.centre, before)  # one unit for all dimensions


def test_the_length_of_an_images_features_changes_no_score() -> None:
    score, z = moved(ScoreNet(6, 32)), torch.randn(5, 6, generator=generator(0))
    factors = torch.tensor([1e-3, 0.5, 3.0, 70.0, 1e4])[:, None]
    torch.testing.assert_close(score(score.scale(factors * z), 0.5), score(score.scale(z), 0.5), rtol=1e-4, atol=1e-4)
    turned = score.scale(z.flip(1))
    assert not torch.allclose(score(turned, 0.5), score(score.scale(z), 0.5), atol=0.1)


@pytest.mark.parametrize("z", [torch.zeros(4, 6), torch.ones(4, 6), torch.eye(6)[:1]], ids=["0", "equal", "one"])
def test_features_without_any_spread_leave_everything_finite(z: Tensor) -> None:
    score, z = moved(ScoreNet(6, 32)), z.requires_grad_()
    score.measure(score.moments(z, torch.zeros(len(z), dtype=torch.int64)))
    out = score(score.scale(z), 0.5)
    (slope,) = torch.autograd.grad(out.sum(), z)
    assert all(torch.isfinite(value).all() for value in (*score.state_dict().values(), out, slope))


def test_measuring_takes_no_gradient() -> None:
    score, z = ScoreNet(3, 8), torch.randn(64, 3, requires_grad=True)
    sums = score.moments(z, torch.zeros(64, dtype=torch.int64))
    score.measure(sums)
    assert not any(value.requires_grad for value in (*sums.values(), score.centre, score.spread))


@pytest.mark.parametrize("score", [ScoreNet(6, 32), AnchoredScore(6, 3, 32)], ids=["published", "anchored"])
def test_frozen_gives_the_input_gradient_and_spares_the_parameters(score: ScoreNetwork) -> None:
    with torch.no_grad():
        score.net[3].weight.normal_(generator=generator(1))
    sigma = 0.2
    z = torch.randn(5, 6, generator=generator(0)).requires_grad_()
    (live,) = torch.autograd.grad(score(score.scale(z), sigma).square().sum(), z)
    out = frozen(score)(score.scale(z), sigma)
    assert torch.equal(out, score(score.scale(z), sigma))
    out.square().sum().backward()
    assert torch.equal(z.grad, live)
    assert all(p.grad is None and p.requires_grad for p in score.parameters())
    no_input = frozen(score)(z.detach(), sigma)
    assert not no_input.requires_grad


# --- users' own backbones --------------------------------------------------------------------------------------------

PLUGIN = """
import torch
from torch import nn

class Flat(nn.Module):
    def __init__(self, fan_in, d, **attributes):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(fan_in, d), nn.BatchNorm1d(d), nn.Dropout(0.5), nn.ReLU())
        for name, value in attributes.items():
            setattr(self, name, value)
    def forward(self, x):
        return self.net(x)

def with_shape(image_shape):
    c, h, w = image_shape
    return Flat(c * h * w, 12)

def without_shape():
    return Flat(3 * 16 * 16, 12, feature_width=12)

def keyword_only(*, d=9):
    return Flat(3 * 16 * 16, d)

def lazy(shape):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(5))

def lies(shape):
    return Flat(3 * 16 * 16, 12, feature_width=64)

def unpooled(shape):
    return nn.Conv2d(3, 8, 3)

def pair(shape):
    return nn.LSTM(16, 16)

def other_size(shape):
    return Flat(7, 12)

def no_module(shape):
    return 3

NUMBER = 3
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "own_nets.py"
    path.write_text(PLUGIN)
    return path


@pytest.mark.parametrize(("fn", "width"), [("with_shape", 12), ("without_shape", 12), ("keyword_only", 9), ("lazy", 5)])
def test_a_users_backbone_is_built_seeded_and_measured(plugin: Path, fn: str, width: int) -> None:
    net = make_backbone(f"{plugin}:{fn}", SHAPE, generator(3))
    assert net.feature_width == width
    assert not any(isinstance(m, nn.Dropout) for m in net.modules())
    assert all(m.training for m in net.modules())
    torch.manual_seed(99)
    again = make_backbone(f"{plugin}:{fn}", SHAPE, generator(3)).state_dict()
    assert all(torch.equal(v, again[k]) for k, v in net.state_dict().items())
    bind_dropout(net, generator(0))
    assert net(torch.randn(4, *SHAPE)).shape == (4, width)


@pytest.mark.parametrize(
    ("fn", "complaint"),
    [
        ("lies", "feature_width = 64.*12"),
        ("unpooled", r"\(2, 8, 14, 14\)"),
        ("other_size", r"\(2, 3, 16, 16\)"),
        ("pair", r"\(2, 3, 16, 16\)"),
        ("no_module", "int"),
        ("NUMBER", "int"),
    ],
)
def test_a_wrong_backbone_is_refused_in_one_sentence(plugin: Path, fn: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        make_backbone(f"{plugin}:{fn}", SHAPE, generator(3))


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InputError) as caught:
        make_backbone("vgg", SHAPE, generator(3))
    assert all(name in str(caught.value) for name in ("vgg", "file.py:fn", *BACKBONES))


def test_a_callable_is_a_backbone_too() -> None:
    net = make_backbone(lambda shape: SmallCNN(shape[0], width=8, dropout=0.1), SHAPE, generator(3))
    assert net.feature_width == 32


def test_a_tuple_of_features_is_refused() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.flatten(1), x.flatten(1)

    with pytest.raises(InputError, match="tuple"):
        make_backbone(Pair, SHAPE, generator(3))


# The score that is anchored at one Gaussian a class


def anchored(classes: int = 4, width: int = 6) -> AnchoredScore:
    score = AnchoredScore(width, classes, 16)
    with torch.no_grad():
        score.anchor_mean.copy_(2 * torch.randn(classes, width, generator=generator(1)))
        score.anchor_var.copy_((0.5 * torch.randn(classes, width, generator=generator(2))).exp())
    return score


def gaussian_score(score: AnchoredScore, u: Tensor, sigma: float, classes: list[int]) -> Tensor:
    """The gradient of the log density of the mixture of these classes, by automatic differentiation."""
    u = u.clone().requires_grad_()
    parts = [
        torch.distributions.Independent(
            torch.distributions.Normal(score.anchor_mean[c], (score.anchor_var[c] + sigma**2).sqrt()), 1
        ).log_prob(u)
        for c in classes
    ]
    (wanted,) = torch.autograd.grad(torch.logsumexp(torch.stack(parts), 0).sum(), u)
    return wanted


@pytest.mark.parametrize("sigma", [0.05, 0.3, 2.0])
def test_before_it_has_learnt_an_anchored_score_is_the_gradient_of_a_mixture(sigma: float) -> None:
    score, u = anchored(), 2 * torch.randn(9, 6, generator=generator(3))
    wanted = gaussian_score(score, u, sigma, [0, 1, 2, 3])
    assert torch.allclose(score(u, sigma), wanted, atol=1e-4)
    assert torch.allclose(score(u, torch.full((9,), sigma)), wanted, atol=1e-4)
    assert torch.allclose(score.steadied(u, sigma, 8), wanted, atol=1e-4)
    some = torch.tensor([1.0, 0.0, 0.0, 1.0])
    assert torch.allclose(score.steadied(u, sigma, 8, some), gaussian_score(score, u, sigma, [0, 3]), atol=1e-4)
    score.anchor_known.mul_(1 - 1e-6)[2] = 0.0
    assert torch.allclose(score(u, sigma), gaussian_score(score, u, sigma, [0, 1, 3]), atol=1e-4)


def test_the_score_given_a_class_is_that_of_its_gaussian() -> None:
    score, u, y = anchored(), torch.randn(5, 6, generator=generator(4)), torch.tensor([0, 3, 1, 1, 2])
    sigma = torch.tensor([0.1, 0.5, 1.0, 2.0, 0.2])
    for row in range(5):
        wanted = gaussian_score(score, u[row : row + 1], float(sigma[row]), [int(y[row])])[0]
        assert torch.allclose(score.given(u, sigma, y)[row], wanted, atol=1e-5)


def divided(score: ScoreNetwork, z: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The sums of all features, as three clients with few and many images would send them."""
    parts = [score.moments(z[some], y[some]) for some in torch.arange(len(z)).split([130, 1, len(z) - 131])]
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def test_anchors_are_the_moments_of_the_classes_however_images_are_divided() -> None:
    draw = generator(5)
    z, y = (2 * torch.randn(400, 6, generator=draw)).exp(), torch.randint(3, (400,), generator=draw)
    score = AnchoredScore(6, 4, 16, log_share=0.1)
    score.measure(divided(score, z, y))
    u = score.scale(z).double()
    assert torch.allclose(u.mean(0), torch.zeros(6).double(), atol=1e-4)
    assert torch.allclose(u.var(0, correction=0), torch.ones(6).double(), atol=1e-3)
    within = torch.stack([u[y == c].var(0, correction=0) * (y == c).sum() for c in range(3)]).sum(0) / 400
    for c in range(3):
        n = int((y == c).sum())
        assert torch.allclose(score.anchor_mean[c].double(), u[y == c].mean(0), atol=1e-4)
        wanted = (n * u[y == c].var(0, correction=0) + 10 * within) / (n + 10)
        assert torch.allclose(score.anchor_var[c].double(), wanted, rtol=1e-3)
    assert score.anchor_known.tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize("whiten", [0.3, 1.0, 1e3])
def test_whitening_shortens_the_directions_in_which_classes_spread(whiten: float) -> None:
    draw = generator(5)
    y = torch.randint(3, (4000,), generator=draw)
    mixing = torch.randn(6, 6, generator=draw)
    z = 5 * torch.randn(4, 6, generator=draw)[y] + torch.randn(4000, 6, generator=draw) @ mixing
    plain, score = (AnchoredScore(6, 4, 16, whiten=w) for w in (0.0, whiten))
    for one in (plain, score):
        one.measure(divided(one, z, y))
    u, v = plain.scale(z).double(), score.scale(z).double()

    def covariance(x: Tensor) -> Tensor:
        return sum(torch.cov(x[y == c].T, correction=0) * (y == c).sum() for c in range(3)) / 4000

    inside, turned = covariance(u), covariance(v)
    # (I + wT)^(-1/2) has the eigenvectors of T, and T there the eigenvalues t/(1 + wt).
    turn = score.anchor_turn.double()
    assert torch.allclose(turn @ turn @ (torch.eye(6) + whiten * inside), torch.eye(6).double(), atol=2e-3)
    assert torch.allclose(turn, turn.T, atol=1e-6)
    t = torch.linalg.eigvalsh(inside)
    assert torch.allclose(torch.linalg.eigvalsh(turned), t / (1 + whiten * t), rtol=1e-2)
    for c in range(3):
        assert torch.allclose(score.anchor_mean[c].double(), v[y == c].mean(0), atol=1e-3)
    # These classes have one covariance, so the variance of each is that of all.
    assert torch.allclose(score.anchor_var[:3].double(), turned.diagonal().expand(3, 6), rtol=0.1)


def test_a_class_that_spreads_twice_as_far_does_so_in_the_whitened_space() -> None:
    draw = generator(6)
    y = torch.randint(2, (20_000,), generator=draw)
    z = torch.randn(20_000, 5, generator=draw) @ torch.randn(5, 5, generator=draw) * (1 + y[:, None])
    score = AnchoredScore(5, 2, 16, whiten=1.0)
    score.measure(divided(score, z, y))
    u = score.scale(z)
    wanted = torch.stack([u[y == c].var(0, correction=0) for c in range(2)])
    assert torch.allclose(score.anchor_var, wanted, rtol=0.05)


def test_few_or_equal_images_leave_a_whitened_space_finite() -> None:
    score = AnchoredScore(5, 3, 16, whiten=1.0)
    z = torch.randn(2, 5, generator=generator(7))
    z[:, 1] = 3.0
    for some in (z[:1], z, z[[0, 0, 0]]):
        score.measure(score.moments(some, torch.zeros(len(some), dtype=torch.int64)))
        assert all(torch.isfinite(value).all() for value in score.state_dict().values())
        assert torch.isfinite(score(score.scale(z), 0.3)).all()


def test_detection_trusts_what_was_learnt_by_its_share() -> None:
    scores = [AnchoredScore(6, 4, 16, trust=trust) for trust in (0.0, 0.5, 1.0)]
    for one in scores:
        torch.manual_seed(1)
        nn.init.normal_(one.net[3].weight)
        one.net[0].load_state_dict(scores[0].net[0].state_dict())
    u = torch.randn(5, 6, generator=generator(8))
    none, half, all_of_it = (one.steadied(u, 0.3, 4) for one in scores)
    assert torch.equal(none, scores[0]._pull(u, 0.3))
    assert torch.allclose(half, (none + all_of_it) / 2, atol=1e-5)
    assert not torch.allclose(half, none, atol=1e-2)
    assert torch.equal(scores[0](u, 0.3), scores[2](u, 0.3))  # training hears all of it


def test_far_from_all_classes_the_anchored_score_grows_and_points_back() -> None:
    """What a network alone does not promise, and what detection relies on."""
    score = anchored()
    for value in score.net.parameters():
        nn.init.normal_(value, std=0.1, generator=generator(6))
    direction = nn.functional.normalize(torch.randn(20, 6, generator=generator(7)), dim=1)
    near, far = score.steadied(30 * direction, 0.5, 8), score.steadied(300 * direction, 0.5, 8)
    assert (far.norm(dim=1) > 5 * near.norm(dim=1)).all()
    assert (nn.functional.cosine_similarity(far, -direction) > 0.5).all()


def test_what_was_learnt_is_averaged_over_noise_on_both_sides() -> None:
    torch.manual_seed(0)
    score, u = AnchoredScore(6, 1, 16), torch.randn(5, 6, generator=generator(8))
    score.net = nn.Sequential(nn.Linear(7, 16), nn.LayerNorm(16), nn.ELU(), nn.Linear(16, 6))  # that has learnt
    gaussian = -u / (1 + 0.5**2)

    def learnt(v: Tensor) -> Tensor:
        return score(v, 0.5) + v / (1 + 0.5**2)

    assert torch.equal(score.steadied(u, 0.5, 0), score(u, 0.5))
    many = torch.stack([learnt(u + 0.5 * torch.randn(6, generator=generator(9 + k))) for k in range(2000)]).mean(0)
    assert torch.allclose(score.steadied(u, 0.5, 1000) - gaussian, many, atol=0.05)
    assert not torch.allclose(many, learnt(u), atol=0.1)
    assert torch.allclose(score.steadied(u, 0.5, 4)[:2], score.steadied(u[:2], 0.5, 4), atol=1e-6)  # of what is beside
    v = 0.5 * torch.randn(1, 6, generator=torch.Generator().manual_seed(0))  # the pair of a single draw
    assert torch.allclose(score.steadied(u, 0.5, 1) - gaussian, (learnt(u + v) + learnt(u - v)) / 2, atol=1e-5)
    nn.init.zeros_(score.net[3].weight)  # a network that says the same everywhere
    assert torch.allclose(score.steadied(u, 0.5, 4), score(u, 0.5), atol=1e-6)


def test_features_that_are_almost_always_0_do_not_blow_up() -> None:
    score = AnchoredScore(4, 1, 32)
    score.running_var.copy_(torch.tensor([1.0, 1.0, 2.0, 0.0]))
    torch.testing.assert_close(score.scale(torch.ones(2, 4))[:, 3], torch.full((2,), 10.0))
    score.running_var.zero_()
    assert score.scale(torch.zeros(2, 4)).isfinite().all()


def test_logarithmic_features_keep_their_order_and_sign_and_have_a_finite_slope_at_0() -> None:
    score = AnchoredScore(3, 1, 8, log_share=0.1)
    z = torch.tensor([[-2.0, 0.0, 3.0], [-1.0, 0.5, 4.0], [0.0, 0.0, 0.0]], requires_grad=True)
    u = score.scale(z)
    sizes = z.detach().abs().mean(1, keepdim=True)[:2]
    wanted = z.detach()[:2].sign() * torch.log1p(z.detach()[:2].abs() / (0.1 * sizes))
    assert torch.allclose(u.detach()[:2], wanted, rtol=1e-4)
    assert torch.equal(u.detach()[2], torch.zeros(3))
    assert torch.allclose(score.scale(7 * z)[:2], u[:2], rtol=1e-4)  # the size of an image's features does not matter
    (slope,) = torch.autograd.grad(u[:2].sum(), z)
    assert torch.isfinite(slope).all()
