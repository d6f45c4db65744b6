"""Generators and the discriminator: sizes, ranges, start weights, and batch normalisation without counters."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foogd.core.errors import InputError
from foogd.core.flat import Layout
from foogd.core.random import generator, with_seed
from foogd.nets import FeatureGenerator, ImageDiscriminator, ImageGenerator

SHAPES = [(1, 28, 28), (3, 16, 16), (3, 32, 32), (3, 64, 64), (3, 224, 224), (2, 20, 45), (1, 1, 1)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def every_net() -> list[tuple[nn.Module, tuple[Tensor, ...]]]:
    """Each kind of net with six inputs."""
    return [
        (FeatureGenerator(7, 3, latent=5, hidden=16), (normal(6, 5), torch.arange(6) % 3)),
        (ImageGenerator((3, 16, 12), latent=8, width=4), (normal(6, 8),)),
        (ImageDiscriminator((3, 16, 12), width=4), (normal(6, 3, 16, 12).sigmoid(),)),
    ]


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("classes", "width", "expected"), [(10, 128, 105_088), (100, 128, 151_168), (200, 512, 399_360)]
)
def test_the_feature_generator_has_the_published_size(classes: int, width: int, expected: int) -> None:
    net = FeatureGenerator(width, classes)
    assert parameters(net) == expected
    assert net(normal(4, net.latent), torch.arange(4)).shape == (4, width)


def test_the_image_generator_has_the_published_size_and_layers() -> None:
    net = ImageGenerator((3, 32, 32))
    assert parameters(net) == 3_576_704
    convolutions = [layer for layer in net.modules() if isinstance(layer, nn.ConvTranspose2d)]
    assert [layer.in_channels for layer in convolutions] == [100, 512, 256, 128, 64]
    assert convolutions[-1].out_channels == 3
    assert [layer.stride[0] for layer in convolutions] == [1, 2, 2, 2, 2]
    assert net.net(normal(2, 100)[:, :, None, None]).shape == (2, 3, 64, 64)


@pytest.mark.parametrize(
    ("shape", "side"),
    [((1, 28, 28), 64), ((3, 16, 16), 32), ((3, 17, 17), 64), ((3, 8, 5), 16), ((3, 4, 8), 16), ((3, 64, 64), 64),
     ((3, 20, 300), 64), ((1, 1, 1), 8)],
)  # fmt: skip
def test_the_square_is_twice_the_longer_side_and_at_most_64(shape: tuple[int, int, int], side: int) -> None:
    net = ImageGenerator(shape, latent=8, width=4)
    assert net.net(normal(2, 8)[:, :, None, None]).shape == (2, shape[0], side, side)


@pytest.mark.parametrize("shape", SHAPES)
def test_images_have_their_shape_and_lie_between_0_and_1(shape: tuple[int, int, int]) -> None:
    net = with_seed(generator(0), lambda: ImageGenerator(shape, latent=8, width=8)).eval()
    latent = normal(8, 8).mul(1e8).requires_grad_()
    images = net(latent)
    assert images.shape == (8, *shape)
    assert images.min() >= 0
    assert images.max() <= 1
    assert images.std() > 0.03
    (grad,) = torch.autograd.grad(images.square().sum(), latent)
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_discriminator_gives_one_logit_an_image(shape: tuple[int, int, int]) -> None:
    net = with_seed(generator(0), lambda: ImageDiscriminator(shape, width=4))
    logits = net(normal(4, *shape).sigmoid().requires_grad_())
    assert logits.shape == (4,)
    assert len(set(logits.tolist())) == 4
    logits.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in net.parameters())


def test_the_discriminator_mirrors_the_generator() -> None:
    down = [layer for layer in ImageDiscriminator((3, 64, 64)).modules() if isinstance(layer, nn.Conv2d)]
    up = [layer for layer in ImageGenerator((3, 64, 64)).modules() if isinstance(layer, nn.ConvTranspose2d)]
    assert [layer.in_channels for layer in down] == [layer.out_channels for layer in reversed(up)]
    assert [(layer.stride, layer.padding) for layer in down] == [
        (layer.stride, layer.padding) for layer in reversed(up)
    ]
    norms = [layer.num_features for layer in ImageDiscriminator((3, 64, 64)).modules() if is_norm(layer)]
    assert norms == [128, 256, 512]  # none after the first convolution
    assert [layer.bias is not None for layer in down] == [True, False, False, False, True]
    assert [ImageDiscriminator((1, side, 3), width=2).side for side in (3, 8, 9, 28, 32, 33, 224)] == [
        8, 8, 16, 32, 32, 64, 64,
    ]  # fmt: skip


def is_norm(layer: nn.Module) -> bool:
    return isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d))


# --- what they compute ------------------------------------------------------------------------------------------------


def test_the_square_is_averaged_down_and_interpolated_up() -> None:
    for height, width in ((28, 28), (16, 16), (224, 224), (20, 300)):
        net = ImageGenerator((2, height, width), latent=8, width=4)
        latent = normal(3, 8)
        square = (net.net(latent[:, :, None, None]) + 1) / 2
        side = square.shape[2]
        smaller = F.adaptive_avg_pool2d(square, (min(height, side), min(width, side)))
        expected = F.interpolate(smaller, size=(height, width), mode="bilinear")
        torch.testing.assert_close(net(latent), expected)
        assert expected.std() > 0.005


def test_the_discriminator_is_a_chain_of_leaky_convolutions_of_centred_images() -> None:
    net = with_seed(generator(0), lambda: ImageDiscriminator((3, 16, 16), width=4)).eval()
    weights = [layer for layer in net.modules() if isinstance(layer, nn.Conv2d)]
    for layer in weights:
        nn.init.normal_(layer.weight, 0.0, 0.2, generator=generator(1))
    x = normal(5, 3, 16, 16).sigmoid()
    first = F.leaky_relu(weights[0](2 * x - 1), 0.2)
    norm = next(layer for layer in net.modules() if is_norm(layer))
    second = F.leaky_relu(norm(weights[1](first)), 0.2)
    torch.testing.assert_close(net(x), weights[2](second)[:, 0, 0, 0])
    assert net(x).std() > 0.1


def test_the_feature_generator_follows_the_label_and_the_noise() -> None:
    net = FeatureGenerator(6, 4, latent=5, hidden=32).eval()
    eps, y = normal(4, 5), torch.arange(4)
    first, _, _, last = net.net
    one_hot = F.one_hot(y, 4).float()
    expected = last(F.relu(first(torch.cat([eps, one_hot], 1)) / (1 + 1e-5) ** 0.5))
    torch.testing.assert_close(net(eps, y), expected)
    assert (net(eps, y) != net(eps, y.flip(0))).any(1).all()
    assert (net(eps, y) != net(eps.flip(0), y)).any(1).all()


def test_a_generator_can_be_trained_to_fool_a_discriminator() -> None:
    make, judge = with_seed(
        generator(0), lambda: (ImageGenerator((1, 8, 8), latent=8, width=8), ImageDiscriminator((1, 8, 8), width=8))
    )
    latent, real = normal(16, 8), torch.full((16, 1, 8, 8), 0.9)
    judging = torch.optim.Adam(judge.parameters(), 2e-2)
    for _ in range(40):
        judging.zero_grad()
        loss = F.softplus(-judge(real)).mean() + F.softplus(judge(make(latent).detach())).mean()
        loss.backward()
        judging.step()
    assert loss.item() < 0.5  # it tells them apart
    before = F.softplus(-judge(make(latent))).mean().item()
    making = torch.optim.Adam(make.parameters(), 5e-3)
    for _ in range(20):
        making.zero_grad()
        F.softplus(-judge(make(latent))).mean().backward()
        making.step()
    assert F.softplus(-judge(make(latent))).mean().item() < 0.7 * before


# --- start weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ImageGenerator, ImageDiscriminator])
def test_start_weights_are_those_of_dcgan(kind: type[nn.Module]) -> None:
    net = with_seed(generator(0), lambda: kind((3, 32, 32)))
    for layer in net.modules():
        if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
            error = 5 * 0.02 / layer.weight.numel() ** 0.5
            assert abs(layer.weight.mean()) < error
            assert abs(layer.weight.std() - 0.02) < error
        elif isinstance(layer, nn.BatchNorm2d):
            assert abs(layer.weight.mean() - 1) < 5 * 0.02 / layer.num_features**0.5
            assert 0.01 < layer.weight.std() < 0.03
    biases = [value for name, value in net.named_parameters() if name.endswith("bias")]
    assert biases
    assert not any(value.any() for value in biases)


def test_the_start_repeats_with_its_seed_and_leaves_the_global_stream() -> None:
    before = torch.random.get_rng_state()
    for make in (
        lambda: FeatureGenerator(4, 3),
        lambda: ImageGenerator((1, 8, 8), width=4),
        lambda: ImageDiscriminator((1, 8, 8), width=4),
    ):
        one, two, other = (with_seed(generator(seed), make) for seed in (1, 1, 2))
        same = [torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True)]
        assert all(same)
        assert not torch.equal(next(one.parameters()), next(other.parameters()))
    assert torch.equal(torch.random.get_rng_state(), before)


# --- batch normalisation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(3))
def test_there_are_no_integer_buffers_and_the_statistics_work(index: int) -> None:
    net, inputs = every_net()[index]
    assert any(is_norm(layer) for layer in net.modules())
    assert all(buffer.is_floating_point() for buffer in net.buffers())
    assert all(value.is_floating_point() for value in net.state_dict().values())
    assert not Layout.of(nn.ModuleDict({"generator": net}), lambda name: False).integer_names
    start = {name: buffer.clone() for name, buffer in net.named_buffers()}
    net.train()(*inputs)
    moved = [not torch.equal(buffer, start[name]) for name, buffer in net.named_buffers()]
    assert moved
    assert all(moved)
    still = {name: buffer.clone() for name, buffer in net.named_buffers()}
    net.eval()(*inputs)
    assert all(torch.equal(buffer, still[name]) for name, buffer in net.named_buffers())


@pytest.mark.parametrize("index", range(3))
def test_in_eval_mode_an_output_does_not_depend_on_its_batch(index: int) -> None:
    net, inputs = every_net()[index]
    net.train()(*inputs)
    whole = net.eval()(*inputs)
    single = torch.cat([net(*(value[i : i + 1] for value in inputs)) for i in range(6)])
    torch.testing.assert_close(whole, single, rtol=0, atol=1e-6)
    together = net.train()(*inputs)
    apart = torch.cat([net(*(value[half] for value in inputs)) for half in (slice(0, 3), slice(3, 6))])
    assert (together - apart).abs().max() > 1e-6


@pytest.mark.parametrize("index", range(3))
def test_nets_copy_save_and_load(index: int) -> None:
    net, inputs = every_net()[index]
    net.train()(*inputs)
    expected = net.eval()(*inputs)
    twin = copy.deepcopy(net)
    assert torch.equal(twin(*inputs), expected)
    assert all(buffer.is_floating_point() for buffer in twin.buffers())
    counters = {f"{name}.num_batches_tracked": torch.tensor(7) for name, layer in net.named_modules() if is_norm(layer)}
    for state in (net.state_dict(), dict(net.state_dict()), {**net.state_dict(), **counters}):
        for fresh in (every_net()[index][0], copy.deepcopy(every_net()[index][0])):
            keys = set(state)
            fresh.load_state_dict(state)
            assert torch.equal(fresh.eval()(*inputs), expected)
            assert all(buffer.is_floating_point() for buffer in fresh.buffers())
            assert set(state) == keys


@pytest.mark.parametrize("index", range(3))
def test_nets_run_forward_and_backward_on_meta(index: int) -> None:
    net, inputs = every_net()[index]
    out = net.to("meta").train()(*(value.to("meta") for value in inputs))
    out.sum().backward()
    assert out.is_meta


@pytest.mark.parametrize("kind", [ImageGenerator, ImageDiscriminator])
@pytest.mark.parametrize("shape", [(3, 0, 8), (0, 8, 8), (8, 8)])
def test_impossible_shapes_are_refused(kind: type[nn.Module], shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="image shape is"):
        kind(shape)
