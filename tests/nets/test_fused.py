"""The fused batch normalisation, ReLU and dropout: against exact references, and the plain layers where it cannot run.

The kernels are tested on a GPU, or on a CPU by Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foogd.core.random import generator
from foogd.nets import ResNet18, SmallCNN, WideResNet, fused
from foogd.nets.dropout import Dropout, bind_dropout
from foogd.nets.fused import NormAct, norm_act

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
TRITON = importlib.util.find_spec("triton") is not None and (GPU or os.environ.get("TRITON_INTERPRET") == "1")
needs_triton = pytest.mark.skipif(not TRITON, reason="needs Triton, and a GPU or TRITON_INTERPRET=1")
needs_gpu = pytest.mark.skipif(not (GPU and TRITON), reason="needs Triton and a GPU")

SHAPES = [(2, 16, 4, 4), (8, 32, 8, 8), (4, 48, 5, 7), (3, 160, 3, 3), (3, 5, 3, 3)]
LARGE = [(128, 64, 8, 8)]
BF16 = 2.0**-8 if GPU else 2.0**-7  # the largest relative error of bfloat16; the interpreter cuts bits off


def batch(shape: tuple[int, ...], mean: float = 0.0, seed: int = 0) -> Tensor:
    x = torch.randn(shape, generator=generator(seed)) + mean
    return x.to(DEVICE, torch.bfloat16, memory_format=torch.channels_last)


def layer(channels: int, seed: int = 1) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, momentum=0.2, device=DEVICE)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(channels, generator=generator(seed)) + 0.5)
        norm.bias.copy_(torch.randn(channels, generator=generator(seed, "bias")) / 2)
        norm.running_mean.copy_(torch.randn(channels, generator=generator(seed, "mean")))
    return norm


def followed_by_nan(x: Tensor) -> Tensor:
    """The same batch at the start of a larger one, so that a look beyond its end is seen."""
    return torch.cat([x, torch.full_like(x, torch.nan)]).contiguous(memory_format=torch.channels_last)[: len(x)]


def run(norm: nn.BatchNorm2d, x: Tensor, p: float = 0.0, seed: int | None = None) -> Tensor:
    source = None if seed is None else torch.full((1,), seed, device=DEVICE)
    state = norm.running_mean, norm.running_var, norm.num_batches_tracked
    return NormAct.apply(x, norm.weight, norm.bias, *state, norm.momentum, norm.eps, p, source)


def reference(norm: nn.BatchNorm2d, x: Tensor) -> tuple[Tensor, Tensor, nn.BatchNorm2d]:
    """The output in float64, the input as its leaf, and the layer with its new state."""
    exact, leaf = copy.deepcopy(norm).double(), x.detach().double().requires_grad_()
    return F.relu(exact(leaf)), leaf, exact


def assert_rounded(found: Tensor, exact: Tensor, slack: float = 1e-5) -> None:
    """Equal up to the rounding to bfloat16 and float32 errors relative to the largest value."""
    assert found.dtype == torch.bfloat16
    bound = exact.abs() * BF16 + slack * exact.abs().max()
    assert ((found.double() - exact).abs() <= bound).all()


# --- the kernels -----------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("mean", [0.0, 100.0])
@pytest.mark.parametrize("shape", SHAPES + LARGE)
def test_it_is_batch_norm_and_relu(shape: tuple[int, ...], mean: float) -> None:
    if mean and shape in LARGE and not GPU:
        pytest.skip("slow in the interpreter")
    x, norm = batch(shape, mean).requires_grad_(), layer(shape[1])
    out, leaf, exact = reference(norm, x)
    y = run(norm, x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert_rounded(y, out)
    torch.testing.assert_close(norm.running_mean.double(), exact.running_mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(norm.running_var.double(), exact.running_var, rtol=1e-5, atol=0)
    assert int(norm.num_batches_tracked) == 1
    grad = batch(shape, seed=2)
    y.backward(grad)
    out.backward(grad.double())
    assert_rounded(x.grad, leaf.grad, 1e-4)
    for mine, theirs in zip(norm.parameters(), exact.parameters(), strict=True):
        assert mine.grad.dtype == torch.float32
        largest = float(theirs.grad.abs().max())
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-4 * largest)


@needs_triton
def test_many_parts_are_joined_and_many_tiles_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    from foogd.nets import kernels

    for name, value in {"SUM_TILE": 256, "STRIP_TILE": 128, "SUM_PROGRAMS": 5, "STRIP_PROGRAMS": 3}.items():
        monkeypatch.setattr(kernels, name, value)
    # 207 rows: 13 tiles of 16 in 5 parts of 3, the last with 15 rows; strips of 52, the last with 51.
    shape = (23, 16, 3, 3)
    means = torch.arange(23, device=DEVICE)[:, None, None, None]  # parts with means of their own
    x, norm = followed_by_nan(batch(shape, 10.0) + means).requires_grad_(), layer(16)
    out, leaf, exact = reference(norm, x)
    y, grad = run(norm, x), followed_by_nan(batch(shape, seed=2))
    y.backward(grad)
    out.backward(grad.double())
    assert_rounded(y, out)
    assert_rounded(x.grad, leaf.grad, 1e-4)
    torch.testing.assert_close(norm.running_var.double(), exact.running_var, rtol=1e-5, atol=0)
    torch.testing.assert_close(norm.weight.grad.double(), exact.weight.grad, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(norm.bias.grad.double(), exact.bias.grad, rtol=1e-4, atol=1e-3)


@needs_triton
def test_a_constant_channel_and_a_nan() -> None:
    x, norm = batch((2, 16, 4, 4)), layer(16)
    x[:, 3] = 7.0
    x[0, 5, 0, 0] = torch.nan
    y = run(norm, x)
    torch.testing.assert_close(y[:, 3].float(), norm.bias[3].relu().bfloat16().float().expand(2, 4, 4))
    assert y[:, 5].isnan().all()
    assert y[:, 6:].isfinite().all()


@needs_triton
def test_two_runs_are_equal_bit_for_bit() -> None:
    def once() -> list[Tensor]:
        x, norm = batch((8, 32, 8, 8)).requires_grad_(), layer(32)
        y = run(norm, x, 0.3, seed=11)
        y.backward(batch((8, 32, 8, 8), seed=2))
        return [y, x.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


@needs_triton
@pytest.mark.parametrize("p", [0.3, 0.7])
@pytest.mark.parametrize("shape", [(8, 32, 8, 8), (4, 48, 5, 7), (3, 160, 3, 3), (3, 5, 3, 3)])
def test_dropout_scales_what_it_keeps_and_stops_the_gradient_elsewhere(shape: tuple[int, ...], p: float) -> None:
    x, norm = batch(shape).requires_grad_(), layer(shape[1])
    norm.bias.data.fill_(9.0)  # all are positive before dropout, so zeros are dropped ones
    out, leaf, exact = reference(norm, x)
    assert (out > 0).all()
    y = run(norm, x, p, seed=5)
    keep = (y != 0).double()
    assert abs(float(keep.mean()) - (1 - p)) < 4.5 * (p * (1 - p) / x.numel()) ** 0.5
    assert_rounded(y, out * keep / (1 - p))
    grad = batch(shape, seed=2)
    y.backward(grad)
    (out * keep / (1 - p)).backward(grad.double())
    assert_rounded(x.grad, leaf.grad, 1e-4)
    torch.testing.assert_close(norm.weight.grad.double(), exact.weight.grad, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(norm.bias.grad.double(), exact.bias.grad, rtol=1e-4, atol=1e-3)


@needs_triton
def test_the_gradient_passes_exactly_where_the_output_was_kept() -> None:
    # With a gradient of 1 in one place at a time, that of the bias says whether this place was kept.
    shape = (2, 16, 3, 3)
    norm, x = layer(16), batch(shape)
    norm.bias.data.fill_(9.0)
    y = run(norm, x, 0.5, seed=7)
    for n, i, j in [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 2, 2)]:
        grad = torch.zeros(shape, device=DEVICE, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
        grad[n, :, i, j] = 1
        (through,) = torch.autograd.grad(y, norm.bias, grad, retain_graph=True)
        assert torch.equal(through, 2.0 * (y[n, :, i, j] != 0))


@needs_triton
def test_masks_follow_the_seed_and_are_independent() -> None:
    norm, x = layer(32), batch((8, 32, 8, 8))
    norm.bias.data.fill_(9.0)
    masks = [run(norm, x, 0.5, seed=seed) != 0 for seed in (3, 3, 4, 3 + 2**32)]
    assert torch.equal(masks[0], masks[1])
    for other in masks[2:]:
        assert 0.45 < float((masks[0] == other).float().mean()) < 0.55
    # Neighbours in every direction, and the strips that share a call of the generator.
    rows = masks[0].permute(0, 2, 3, 1).reshape(-1, 32).float() - 0.5
    strips = zip(rows.chunk(4), rows.roll(128, 0).chunk(4), strict=True)
    for one, other in [(rows[1:], rows[:-1]), (rows[:, 1:], rows[:, :-1]), *strips]:
        assert abs(float((one * other).mean())) < 4.5 * 0.25 / one.numel() ** 0.5


@needs_triton
def test_no_dropout_is_the_same_as_a_share_of_zero() -> None:
    x = batch((4, 48, 5, 7))
    assert torch.equal(run(layer(48), x), run(layer(48), x, 0.0, seed=3))


@needs_triton
@pytest.mark.parametrize("needed", ["x", "weight", "bias"])
def test_each_gradient_alone(needed: str) -> None:
    def gradient(names: tuple[str, ...]) -> Tensor:
        x, norm = batch((8, 32, 8, 8)), layer(32).requires_grad_(False)
        leaves = {"x": x, "weight": norm.weight, "bias": norm.bias}
        for name in names:
            leaves[name].requires_grad_()
        run(norm, x).backward(batch((8, 32, 8, 8), seed=2))
        assert all((leaves[name].grad is not None) == (name in names) for name in leaves)
        return leaves[needed].grad

    assert torch.equal(gradient((needed,)), gradient(("x", "weight", "bias")))


@needs_triton
def test_gradients_of_any_layout_are_taken() -> None:
    x, norm = batch((8, 32, 8, 8)).requires_grad_(), layer(32)
    y, grad = run(norm, x), batch((8, 32, 8, 8), seed=2)
    (expected,) = torch.autograd.grad(y, x, grad, retain_graph=True)
    (other,) = torch.autograd.grad(y, x, grad.contiguous(), retain_graph=True)
    assert torch.equal(other, expected)
    pooled = torch.randn(8, 32, generator=generator(3)).to(DEVICE, torch.bfloat16)
    (spread,) = torch.autograd.grad(y.mean((2, 3)), x, pooled, retain_graph=True)
    (dense,) = torch.autograd.grad(y, x, (pooled / 64)[:, :, None, None].expand_as(y).clone())
    assert torch.equal(spread, dense)


@needs_triton
def test_a_second_derivative_is_refused() -> None:
    x, norm = batch((2, 16, 4, 4)).requires_grad_(), layer(16)
    (first,) = torch.autograd.grad(run(norm, x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


# --- when it is used -------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The inputs of the fused step, which may take batches of any device here."""
    seen: list[Tensor] = []
    true = NormAct.apply
    monkeypatch.setattr(fused, "_on_gpu", lambda x: not x.is_meta)
    monkeypatch.setattr(NormAct, "apply", lambda *args: (seen.append(args[0]), true(*args))[1])
    return seen


@needs_triton
def test_the_dispatcher_draws_its_seed_from_the_bound_stream(calls: list[Tensor]) -> None:
    dropout = Dropout(0.4)
    x, stream = batch((8, 32, 8, 8)), generator(3, device=DEVICE)
    bind_dropout(dropout, stream)
    norm = layer(32)
    norm.bias.data.fill_(9.0)
    first, second = norm_act(norm, x, dropout), norm_act(norm, x, dropout)
    assert not torch.equal(first == 0, second == 0)
    bind_dropout(dropout, generator(3, device=DEVICE))
    assert torch.equal(norm_act(norm, x, dropout), first)
    assert not (norm_act(norm, x, dropout.eval()) == 0).any()
    assert len(calls) == 4
    assert int(norm.num_batches_tracked) == 4


@needs_triton
def test_a_layer_without_a_counter_is_taken(calls: list[Tensor]) -> None:
    norm = layer(16)
    norm.num_batches_tracked = None
    norm_act(norm, batch((2, 16, 4, 4)))
    assert len(calls) == 1


@needs_triton
def test_whatever_does_not_fit_goes_the_plain_way(calls: list[Tensor]) -> None:
    x = batch((2, 16, 4, 4))
    hooked = layer(16)
    hooked.register_forward_hook(lambda *_: None)
    bound = Dropout(0.5, channelwise=True)
    bind_dropout(bound, generator(0, device=DEVICE))
    cases = [
        (layer(16), x.float(), None),
        (layer(16), x.contiguous(), None),
        (layer(16).eval(), x, None),
        (nn.BatchNorm2d(16, affine=False, device=DEVICE), x, None),
        (nn.BatchNorm2d(16, track_running_stats=False, device=DEVICE), x, None),
        (nn.BatchNorm2d(16, momentum=None, device=DEVICE), x, None),
        (layer(16).bfloat16(), x, None),
        (hooked, x, None),
        (layer(16), x, bound),
    ]
    for norm, images, dropout in cases:
        assert norm_act(norm, images, dropout).shape == x.shape
    assert norm_act(layer(16).to("meta"), x.to("meta")).is_meta
    with pytest.raises(ValueError, match="more than 1 value"):
        norm_act(layer(16), x[:1, :, :1, :1].contiguous(memory_format=torch.channels_last))
    with pytest.raises(RuntimeError, match="bind_dropout"):
        norm_act(layer(16), x, Dropout(0.5))
    assert not calls


def test_without_triton_the_plain_layers_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "foogd.nets.kernels", raising=False)
    monkeypatch.delattr("foogd.nets.kernels", raising=False)
    monkeypatch.setattr(fused, "_on_gpu", lambda x: True)
    fused._kernels.cache_clear()
    x, norm, plain = batch((2, 16, 4, 4)), layer(16), layer(16)
    assert torch.equal(norm_act(norm, x), F.relu(plain(x)))
    fused._kernels.cache_clear()


def test_importing_the_package_does_not_import_triton() -> None:
    code = "import sys, torch; before = 'triton' in sys.modules; import foogd, foogd.nets; "
    code += "assert before or 'triton' not in sys.modules; assert 'foogd.nets.kernels' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# --- the plain layers, bit for bit -----------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_it_is_the_plain_layers(dtype: torch.dtype, training: bool) -> None:
    norms = [nn.BatchNorm2d(16).train(training) for _ in range(2)]
    dropouts = [Dropout(0.3).train(training) for _ in range(2)]
    images = [torch.randn(4, 16, 5, 5, generator=generator(0)).to(dtype).requires_grad_() for _ in range(2)]
    for dropout in dropouts:
        bind_dropout(dropout, generator(1))
    outs = [
        norm_act(norms[0], images[0], dropouts[0]),
        dropouts[1](F.relu(norms[1](images[1]))),
    ]
    for out in outs:
        out.square().sum().backward()
    assert torch.equal(*outs)
    assert torch.equal(*(x.grad for x in images))
    for mine, theirs in zip(norms[0].state_dict().values(), norms[1].state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(norm_act(norms[0], images[0]), F.relu(norms[1](images[1])))


def plain_wrn(net: WideResNet, x: Tensor) -> Tensor:
    x = net.stem(x)
    for block in net.blocks:
        activated = F.relu(block.bn1(x))
        out = block.conv2(block.dropout(F.relu(block.bn2(block.conv1(activated)))))
        x = (x if block.shortcut is None else block.shortcut(activated)) + out
    return F.relu(net.bn(x)).mean((2, 3))


def plain_resnet(net: ResNet18, x: Tensor) -> Tensor:
    x = net.stem(x)
    for block in net.blocks:
        x = F.relu(block.bn2(block.conv2(F.relu(block.bn1(block.conv1(x))))) + block.shortcut(x))
    return x.mean((2, 3))


def plain_cnn(net: SmallCNN, x: Tensor) -> Tensor:
    return net.stages(x.contiguous(memory_format=torch.channels_last)).mean((2, 3))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (lambda: WideResNet(depth=16, widen=1, dropout=0.3), plain_wrn),
        (lambda: ResNet18(stem="7x7"), plain_resnet),
        (lambda: ResNet18(stem="3x3"), plain_resnet),
        (lambda: SmallCNN(3, width=8, dropout=0.2), plain_cnn),
    ],
)
def test_backbones_compute_what_their_layers_say(make: object, plain: object, training: bool) -> None:
    torch.manual_seed(0)
    nets = [make().train(training)]  # type: ignore[operator]
    nets.append(copy.deepcopy(nets[0]))
    x, outs = torch.randn(4, 3, 16, 16, generator=generator(2)), []
    for net, forward in zip(nets, (lambda net, x: net(x), plain), strict=True):
        bind_dropout(net, generator(1))
        outs.append(forward(net, x))  # type: ignore[operator]
        outs[-1].square().sum().backward()
    assert torch.equal(*outs)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(nets[0].buffers(), nets[1].buffers(), strict=True))


def test_the_names_of_the_values_are_as_ever() -> None:
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    cnn = {f"stages.{i}.{rest}" for i in range(4) for rest in ("0.weight", *(f"1.{name}" for name in norm))}
    assert set(SmallCNN().state_dict()) == cnn
    resnet, wrn = ResNet18().state_dict(), WideResNet(depth=16, widen=1).state_dict()
    assert {"stem.0.weight", *(f"stem.1.{name}" for name in norm), "blocks.0.bn1.weight"} <= set(resnet)
    assert {"stem.weight", "bn.weight", "blocks.0.bn1.running_var", "blocks.5.conv2.weight"} <= set(wrn)
    assert (len(resnet), len(wrn)) == (120, 80)


# --- on a GPU --------------------------------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize(
    "shape", [(128, 16, 32, 32), (128, 32, 32, 32), (256, 64, 16, 16), (37, 128, 8, 8), (64, 512, 4, 4)]
)
def test_fused_and_plain_agree_on_a_gpu(shape: tuple[int, ...]) -> None:
    images, grad = [batch(shape, 0.5).requires_grad_() for _ in range(2)], batch(shape, seed=2)
    norms = [layer(shape[1]) for _ in range(2)]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        outs = [norm_act(norms[0], images[0]), F.relu(norms[1](images[1]))]
    assert type(outs[0].grad_fn).__name__ == "NormActBackward"
    for out in outs:
        out.backward(grad)
    torch.testing.assert_close(outs[0], outs[1], rtol=2 * BF16, atol=1e-4)
    # Where the plain output rounds to another side of 0 the gradients differ, which is rare.
    unlike = (images[0].grad - images[1].grad).abs() > 4 * BF16 * images[1].grad.abs() + 1e-3
    assert float(unlike.float().mean()) < 1e-4
    torch.testing.assert_close(norms[0].running_mean, norms[1].running_mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norms[0].running_var, norms[1].running_var, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(norms[0].parameters(), norms[1].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-2, atol=1e-3 * float(theirs.grad.abs().max()))


@needs_gpu
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_recorded_graph_gives_the_same_bits(p: float) -> None:
    shape, stream = (128, 32, 32, 32), generator(5, device="cuda")
    dropout, norm, x = Dropout(p), layer(32), batch(shape).requires_grad_()
    bind_dropout(dropout, stream)
    grad, start = batch(shape, seed=2), copy.deepcopy(norm.state_dict())

    def step() -> list[Tensor]:
        y = norm_act(norm, x, dropout)
        return [y, *torch.autograd.grad(y, (x, norm.weight, norm.bias), grad)]

    def values(found: list[Tensor]) -> list[Tensor]:
        return [value.detach().clone() for value in (*found, norm.running_mean, norm.running_var)]

    def restart() -> None:
        norm.load_state_dict(start)
        stream.manual_seed(9)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    restart()
    eager = [values(step()) for _ in range(2)]
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(stream)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        recorded = step()
    restart()
    for expected in eager:
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(values(recorded), expected, strict=True))
    assert int(norm.num_batches_tracked) == 2
    assert p == 0 or not torch.equal(eager[0][0] == 0, eager[1][0] == 0)


@needs_gpu
@pytest.mark.parametrize("make", [lambda: WideResNet(depth=16, widen=2), lambda: ResNet18(), lambda: SmallCNN(3)])
def test_backbones_take_the_fused_step_under_autocast(make: object, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = make().cuda().to(memory_format=torch.channels_last)  # type: ignore[operator]
    plain = copy.deepcopy(net)
    for part in (*net.modules(), *plain.modules()):
        if isinstance(part, Dropout):
            part.p = 0.0
    x = torch.randn(32, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    seen: list[Tensor] = []
    true = NormAct.apply
    monkeypatch.setattr(NormAct, "apply", lambda *args: (seen.append(args[1]), true(*args))[1])
    with torch.autocast("cuda", dtype=torch.bfloat16):
        z = net(x)
        monkeypatch.setattr(fused, "_on_gpu", lambda x: False)
        expected = plain(x)
    # In ResNet-18 the last layers of the 8 blocks and of the 3 shortcuts have no ReLU of their own.
    norms = sum(isinstance(part, nn.BatchNorm2d) for part in net.modules())
    assert len(seen) == norms - 11 * isinstance(net, ResNet18)
    assert F.cosine_similarity(z.float().flatten(), expected.float().flatten(), dim=0) > 0.999
    direction = torch.randn(z.shape, generator=generator(1)).cuda()
    for out in (z, expected):
        (out.float() * direction).sum().backward()
    mine, theirs = (torch.cat([value.grad.flatten() for value in one.parameters()]) for one in (net, plain))
    assert F.cosine_similarity(mine, theirs, dim=0) > 0.95
