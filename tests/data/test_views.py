"""Random views: against PIL, the identity at strength 0, the stated ranges and rates, and one seed one result."""

import colorsys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from foogd.core.errors import InputError
from foogd.core.random import Streams
from foogd.data import load_source, views
from foogd.data.views import augmix, autocontrast, contrastive_view, equalize, posterize, solarize, warp

VIEWS = [contrastive_view, augmix]


def images(b=6, c=3, h=32, w=32, seed=0):
    """Smooth random images of whole grey levels, in [0, 1]."""
    rng = torch.Generator().manual_seed(seed)
    coarse = torch.rand(b, c, 6, 6, generator=rng, dtype=torch.float64)
    fine = torch.nn.functional.interpolate(coarse, size=(h, w), mode="bicubic").clamp(0, 1)
    return (fine * 255).round() / 255


def as_pil(image):
    """One image of C×H×W as PIL's."""
    array = (image * 255).round().byte().permute(1, 2, 0).numpy()
    return Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)


def levels(image):
    """The grey levels of an image of PIL as C×H×W."""
    array = np.asarray(image, dtype=np.float64)
    return torch.from_numpy(array.reshape(*array.shape[:2], -1)).permute(2, 0, 1)


def grey(x):
    return (x * x.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1, keepdim=True)


def amounts(b, **given):
    """The arguments of `warp` for b images, 0 where not given."""
    names = ("degrees", "shear_x", "shear_y", "translate_x", "translate_y")
    return {name: torch.full((b,), float(given.get(name, 0.0)), dtype=torch.float64) for name in names}


# --- all views --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 20, 33), (4, 9, 8), (1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_views_keep_shape_type_and_range_and_change_the_image(view, shape, dtype):
    x = torch.rand(8, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    before = x.clone()
    out = view(x, Streams(0))
    assert out.shape == x.shape
    assert out.dtype == dtype
    assert out.min() >= 0
    assert out.max() <= 1
    assert torch.equal(x, before)
    assert shape == (1, 1, 1) or (out != x).flatten(1).any(1).sum() >= 6


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_repeats_with_its_seed_and_the_next_one_differs(view):
    x = images()
    once, streams = view(x, Streams(3)), Streams(3)
    assert torch.equal(once, view(x, streams))
    assert not torch.equal(once, view(x, streams))
    assert not torch.equal(once, view(x, Streams(4)))


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_draws_from_one_stream_and_not_from_the_global_one(view):
    asked = []

    def rng(purpose):
        asked.append(purpose)
        return torch.Generator().manual_seed(0)

    before = torch.random.get_rng_state()
    view(images(), rng)
    assert asked == ["view"]
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("view", VIEWS)
def test_copies_of_one_image_get_different_views(view):
    out = view(images(1).expand(40, 3, 32, 32), Streams(0))
    same = (out[:, None] == out).flatten(2).all(2)
    assert same.float().mean() < 0.05


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("channels", [1, 3])
def test_views_run_without_values(view, channels):
    x = torch.empty(4, channels, 9, 8, device="meta")
    out = view(x, lambda purpose: None)
    assert out.is_meta
    assert out.shape == x.shape


@pytest.mark.parametrize("view", VIEWS)
def test_views_do_not_depend_on_the_memory_format(view):
    x = images(4, h=12, w=10)
    last = view(x.contiguous(memory_format=torch.channels_last), Streams(0))
    torch.testing.assert_close(last, view(x, Streams(0)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_real_images_stay_close_enough_to_be_told_apart(view):
    data = load_source("fashion", Path())
    x = data.images[:64].permute(0, 3, 1, 2).float() / 255
    out = view(x, Streams(0))
    own = (out - x).square().flatten(1).mean(1)
    other = (out - x.roll(1, 0)).square().flatten(1).mean(1)
    assert (own < other).float().mean() > 0.6
    assert (own > 1e-5).float().mean() > 0.85


# --- the contrastive view ---------------------------------------------------------------------------------------------


def boxes(b, h, w, seed=0):
    """Left, top, width and height of the crops that `contrastive_view` takes, read from views of coordinate ramps."""
    column = ((torch.arange(w, dtype=torch.float64) + 0.5) / w).expand(h, w)
    row = ((torch.arange(h, dtype=torch.float64) + 0.5) / h)[:, None].expand(h, w)
    ramps = torch.stack([column, row])
    # Two channels, of which one image in five keeps its colours; the others are jittered and say nothing of boxes.
    out = contrastive_view(ramps.expand(b, 2, h, w), Streams(seed))
    slope_x = (out[:, 0, :, 1:] - out[:, 0, :, :-1])[:, h // 2, w // 4 : -w // 4]
    slope_y = (out[:, 1, 1:] - out[:, 1, :-1])[:, h // 4 : -h // 4, w // 2]
    width, height = slope_x.mean(1) * w, slope_y.mean(1) * h
    middle = out[:, :, h // 2 - 1 : h // 2 + 1, w // 2 - 1 : w // 2 + 1].mean((2, 3))
    return width, height, middle


def unjittered(b, seed=0):
    """Which of b images keep their colours, by the tenth row of draws."""
    u = torch.rand(11, b, generator=Streams(seed)("view"), dtype=torch.float64)
    return u[9] >= 0.8


@pytest.mark.parametrize(("h", "w"), [(64, 64), (48, 64)])
def test_crops_have_the_stated_areas_and_aspects_and_lie_inside(h, w):
    width, height, middle = (value[unjittered(4000)] for value in boxes(4000, h, w))
    assert 700 < len(width) < 900
    area = (width * height).abs()
    assert area.min() > 0.2 - 1e-9
    assert area.max() < 1 + 1e-9
    assert abs(area.mean() - 0.6) < 0.03  # uniform from 0.2 to 1
    assert abs(area.var() - 0.8**2 / 12) < 0.006
    aspect = (width.abs() * w) / (height * h)
    assert aspect.min() > 3 / 4 - 1e-9
    assert aspect.max() < 4 / 3 + 1e-9
    assert aspect.log().std() > 0.1
    for centre, size in ((middle[:, 0], width.abs()), (middle[:, 1], height)):
        assert (centre - size / 2).min() > -1e-9
        assert (centre + size / 2).max() < 1 + 1e-9
        assert abs(centre.mean() - 0.5) < 0.02
    assert abs((width < 0).double().mean() - 0.5) < 0.06
    assert len(set(area.tolist())) == len(area)


def test_a_box_that_does_not_fit_keeps_its_area():
    width, height, _ = (value[unjittered(500)] for value in boxes(500, 16, 64))
    area = (width * height).abs()
    assert area.min() > 0.2 - 1e-9
    assert area.max() > 0.9
    assert height.max() < 1 + 1e-9
    assert width.abs().max() < 1 + 1e-9


def test_a_crop_is_the_box_resized_as_pil_does_it():
    x = images(1, 1, 24, 32)
    part = views._crop_resized(
        x,
        torch.tensor([0.25], dtype=torch.float64),
        torch.tensor([32 / 24], dtype=torch.float64),
        torch.tensor([0.5], dtype=torch.float64),
        torch.tensor([1.0], dtype=torch.float64),
        mirrored=torch.tensor([False]),
    )
    expected = as_pil(x[0]).resize((32, 24), Image.Resampling.BILINEAR, box=(8, 12, 24, 24))
    # PIL cuts the filter off at the box, here pixels beyond it count; inside they agree.
    assert (part[0] * 255 - levels(expected))[:, 2:-2, 2:-2].abs().max() <= 1


def test_the_whole_image_mirrored_is_the_flip():
    x, one = images(2, 3, 9, 8), torch.ones(2, dtype=torch.float64)
    whole = views._crop_resized(x, one, one, one, one, mirrored=torch.tensor([False, True]))
    torch.testing.assert_close(whole, torch.stack([x[0], x[1].flip(-1)]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_constant_image_stays_constant_under_crop_and_flip(channels):
    x = torch.full((200, channels, 16, 12), 0.6)
    out = contrastive_view(x, Streams(1))
    assert out.std((2, 3)).max() < 1e-6
    kept = (out - x).abs().flatten(1).amax(1) < 1e-6
    assert 20 < kept.sum() < 70  # one in five keeps its colours
    assert abs(out.min() / 0.6 - 0.2) < 0.05
    assert out.max() == 1  # 1.8 · 0.6 is cut off


def test_brightness_contrast_saturation_and_grey_are_those_of_pil():
    x, one, none = images(1), torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    image, strong, weak = as_pil(x[0]), 1.6, 0.4
    for factor in (strong, weak):
        changed = factor * one
        for mine, theirs in (
            (views._jittered(x, changed, one, one, none), ImageEnhance.Brightness(image)),
            (views._jittered(x, one, changed, one, none), ImageEnhance.Contrast(image)),
            (views._jittered(x, one, one, changed, none), ImageEnhance.Color(image)),
        ):
            assert (mine[0] * 255 - levels(theirs.enhance(factor))).abs().max() <= 2
            assert (mine - x).abs().max() > 0.1
    assert (views._grey(x)[0] * 255 - levels(image.convert("L"))).abs().max() <= 1


def test_the_jitter_works_in_the_stated_order():
    x, turn = images(4), torch.full((4,), 0.1, dtype=torch.float64)
    factors = [torch.full((4,), value, dtype=torch.float64) for value in (1.7, 0.3, 1.5)]
    one, none = torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    bright = views._jittered(x, factors[0], one, one, none)
    contrasty = views._jittered(bright, one, factors[1], one, none)
    saturated = views._jittered(contrasty, one, one, factors[2], none)
    turned = views._jittered(saturated, one, one, one, turn)
    torch.testing.assert_close(views._jittered(x, *factors, turn), turned, rtol=0, atol=1e-12)


def test_the_hue_turns_as_in_colorsys():
    x = torch.rand(4, 3, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[0, :, 0, 0], x[0, :, 0, 1], x[0, :2, 0, 2] = 0.3, torch.tensor([1.0, 1.0, 0.0]), 0.9  # grey, and ties
    turn = torch.tensor([0.0, 0.2, -0.2, 0.05], dtype=torch.float64)
    out = views._hue_turned(x, turn)
    for i in range(4):
        for j in range(5):
            for k in range(5):
                hue, saturation, value = colorsys.rgb_to_hsv(*x[i, :, j, k].tolist())
                expected = colorsys.hsv_to_rgb((hue + float(turn[i])) % 1, saturation, value)
                assert out[i, :, j, k].tolist() == pytest.approx(expected, abs=1e-9)


def test_colours_change_at_the_stated_rates():
    x = torch.tensor([0.5, 0.3, 0.2]).view(1, 3, 1, 1).expand(4000, 3, 4, 4)
    out = contrastive_view(x, Streams(0))[:, :, 0, 0]
    unchanged = (out - x[:, :, 0, 0]).abs().amax(1) < 1e-6
    is_grey = (out - out[:, :1]).abs().amax(1) < 1e-6
    assert abs(unchanged.float().mean() - 0.2 * 0.8) < 0.02
    assert abs(is_grey.float().mean() - 0.2) < 0.02
    left = unchanged | (is_grey & ((out[:, 0] - grey(x)[:, 0, 0, 0]).abs() < 1e-6))
    assert abs(left.float().mean() - 0.2) < 0.02


def test_the_jitter_has_the_stated_ranges_and_its_draws_are_independent(monkeypatch):
    seen = []

    def record(x, *settings):
        seen.extend(settings)
        return x

    monkeypatch.setattr(views, "_jittered", record)
    contrastive_view(torch.zeros(4000, 3, 2, 2), Streams(0))
    for values, middle, reach in zip(seen, (1, 1, 1, 0), (0.8, 0.8, 0.8, 0.2), strict=True):
        assert abs(values.min() - (middle - reach)) < 0.01 * reach
        assert abs(values.max() - (middle + reach)) < 0.01 * reach
        assert abs(values.mean() - middle) < 0.05 * reach
    assert (torch.corrcoef(torch.stack(seen)) - torch.eye(4)).abs().max() < 0.06


def test_only_three_channels_become_grey_or_change_their_hue():
    x = torch.tensor([0.1, 0.2, 0.3, 0.4]).view(1, 4, 1, 1).expand(500, 4, 6, 6)
    out = contrastive_view(x, Streams(0))[:, :, 0, 0]
    order = out.sort(dim=1).indices
    assert (order == torch.arange(4)).all()
    assert (out[:, 3] - out[:, 0]).min() > 0.01


# --- operations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 40, 24), (1, 8, 8), (1, 224, 224)])
@pytest.mark.parametrize("kind", ["smooth", "dark", "few levels"])
def test_point_operations_are_those_of_pil(shape, kind):
    x = images(4, *shape)
    if kind == "dark":
        x = (x * 100).round() / 255
    if kind == "few levels":
        x = (x * 3).round() * 60 / 255
    for i in range(4):
        image = as_pil(x[i])
        assert (autocontrast(x)[i] * 255 - levels(ImageOps.autocontrast(image))).abs().max() <= 1 + 1e-9
        assert (equalize(x)[i] * 255 - levels(ImageOps.equalize(image))).abs().max() < 1e-9
        bits = torch.tensor([1, 3, 4, 8])
        assert (posterize(x, bits)[i] * 255 - levels(ImageOps.posterize(image, int(bits[i])))).abs().max() < 1e-9
        threshold = torch.tensor([0, 128, 179, 256])
        mine = solarize(x, (threshold - 0.5) / 255)[i] * 255
        assert (mine - levels(ImageOps.solarize(image, int(threshold[i])))).abs().max() < 1e-9


@pytest.mark.parametrize("operation", [autocontrast, equalize])
def test_a_channel_of_one_value_stays_as_it_is(operation):
    x = images(2)
    x[0, 1], x[1, 2] = 0.4, 0.0
    out = operation(x)
    assert torch.equal(out[0, 1], x[0, 1])
    assert torch.equal(out[1, 2], x[1, 2])
    assert out.isfinite().all()
    assert (out[0, 0] != x[0, 0]).any()


def test_equalize_makes_the_histogram_flat():
    dark = torch.rand(1, 1, 200, 200, generator=torch.Generator().manual_seed(0)).pow(3)
    flat = equalize(dark).flatten()
    share = torch.histc(flat, bins=8, min=0, max=1) / flat.numel()
    assert (share - 1 / 8).abs().max() < 0.06
    assert (torch.histc(dark.flatten(), bins=8, min=0, max=1) / flat.numel())[0] > 0.4


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (2, 17, 30), (1, 224, 224)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 4e-5)])
def test_a_warp_by_nothing_is_the_identity(shape, dtype, tolerance):
    x = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
    nothing = {name: value.to(dtype) for name, value in amounts(3).items()}
    torch.testing.assert_close(warp(x, **nothing), x, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("h", "w"), [(32, 32), (40, 28)])
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("name", ["degrees", "shear_x", "shear_y", "translate_x", "translate_y"])
def test_geometric_operations_are_those_of_pil(name, sign, h, w):
    size = sign * {"degrees": 20, "shear_x": 0.25, "shear_y": 0.25, "translate_x": 5, "translate_y": 5}[name]
    x = images(2, 3, h, w)
    out = warp(x, **amounts(2, **{name: size}))
    inside = warp(torch.ones_like(x), **amounts(2, **{name: size}))[0] > 1 - 1e-9
    assert 0.5 < inside.double().mean() < 0.99
    matrices = {
        "shear_x": (1, size, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, size, 1, 0),
        "translate_x": (1, 0, size, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, size),
    }
    for i in range(2):
        image = as_pil(x[i])
        if name == "degrees":
            expected = image.rotate(size, Image.Resampling.BILINEAR)
        else:
            expected = image.transform((w, h), Image.Transform.AFFINE, matrices[name], Image.Resampling.BILINEAR)
        assert (out[i] * 255 - levels(expected))[inside].abs().max() <= 1.01
        assert (out[i] - x[i])[inside].abs().max() > 0.1


def test_a_warp_treats_each_image_by_its_own_amounts_and_is_black_outside():
    x = images(3, 1, 12, 12) * 0.5 + 0.5
    moved = amounts(3)
    moved["translate_x"] = torch.tensor([0.0, 3.0, -3.0], dtype=torch.float64)
    out = warp(x, **moved)
    torch.testing.assert_close(out[0], x[0], rtol=0, atol=1e-9)
    torch.testing.assert_close(out[1, :, :, :9], x[1, :, :, 3:], rtol=0, atol=1e-9)
    torch.testing.assert_close(out[2, :, :, 3:], x[2, :, :, :9], rtol=0, atol=1e-9)
    assert out[1, :, :, 9:].abs().max() < 1e-9
    assert out[2, :, :, :3].abs().max() < 1e-9


# --- AugMix -----------------------------------------------------------------------------------------------------------


def test_each_image_gets_the_operation_that_is_chosen_for_it():
    level, b = 6.0, len(views.OPERATIONS)
    x = (images(1).expand(b, 3, 32, 32) * 200).round() / 255
    strength, sign = torch.full((b,), level, dtype=torch.float64), torch.ones(b, dtype=torch.float64)
    out = views._operate(x, torch.arange(b), strength, -sign)
    one = x[:1]
    expected = {
        "autocontrast": autocontrast(one),
        "equalize": equalize(one),
        "posterize": posterize(one, torch.tensor([2])),  # 4 − ⌊2.4⌋
        "solarize": solarize(one, torch.tensor([(255.5 - 153) / 255], dtype=torch.float64)),  # ⌊153.6⌋
        "rotate": warp(one, **amounts(1, degrees=-18)),
        "shear_x": warp(one, **amounts(1, shear_x=-0.18)),
        "shear_y": warp(one, **amounts(1, shear_y=-0.18)),
        "translate_x": warp(one, **amounts(1, translate_x=-6)),  # ⌊6.4⌋
        "translate_y": warp(one, **amounts(1, translate_y=-6)),
    }
    assert set(expected) == set(views.OPERATIONS)
    for name, image, index in zip(views.OPERATIONS, out, range(b), strict=True):
        torch.testing.assert_close(image, expected[name][0], rtol=0, atol=1e-9, msg=f"{name} ({index})")
        assert (image - one[0]).abs().max() > 0.05, name


@pytest.mark.parametrize(("width", "alpha"), [(3, 1.0), (1, 1.0), (4, 0.3), (2, 5.0)])
def test_weights_are_dirichlet_and_beta(monkeypatch, width, alpha):
    """Where chain k turns channel k white and the others black, channel k of the mixture is (1−m)·w_k."""
    b = 4000

    def to_one_hot(x, operation, level, sign):
        return torch.eye(width, dtype=x.dtype).repeat_interleave(b, dim=0)[:, :, None, None].expand_as(x)

    monkeypatch.setattr(views, "_operate", to_one_hot)
    black = torch.zeros(b, width, 1, 1, dtype=torch.float64)
    out = augmix(black, Streams(0), width=width, alpha=alpha)[:, :, 0, 0]
    share = out.sum(1)  # 1 − m ~ Beta(α, α)
    weights = (out / share[:, None])[share > 1e-9]
    assert abs(share.mean() - 0.5) < 0.02
    assert abs(share.var() - 1 / (4 * (2 * alpha + 1))) < 0.01
    assert (weights.mean(0) - 1 / width).abs().max() < 0.02
    for column in weights.T if width > 1 else ():
        assert abs(torch.corrcoef(torch.stack([column, share[share > 1e-9]]))[0, 1]) < 0.06
    variance = (1 / width) * (1 - 1 / width) / (width * alpha + 1)
    assert (weights.var(0) - variance).abs().max() < 0.01


def test_chains_have_one_to_three_operations_at_levels_up_to_the_severity(monkeypatch):
    b, seen = 3000, []

    def count(x, operation, level, sign):
        seen.append((operation, level, sign))
        return x + 0.1

    monkeypatch.setattr(views, "_operate", count)
    out = augmix(torch.zeros(b, 1, 1, 1, dtype=torch.float64), Streams(0), severity=5.0, width=1, alpha=1e6).flatten()
    depth = (out * 20).round()  # m is ½ at this α
    assert set(depth.tolist()) == {1.0, 2.0, 3.0}
    assert all(abs((depth == k).double().mean() - 1 / 3) < 0.04 for k in (1, 2, 3))
    operation, level, sign = (torch.stack(values) for values in zip(*seen, strict=True))
    share = torch.bincount(operation.flatten(), minlength=9) / operation.numel()
    assert (share - 1 / 9).abs().max() < 0.01
    assert 0.1 <= level.min() < 0.12
    assert 4.98 < level.max() <= 5.0
    assert set(sign.flatten().tolist()) == {-1.0, 1.0}
    assert abs(sign.mean()) < 0.05
    assert (operation[0] != operation[1]).any()


def test_more_severity_is_a_larger_change():
    x = images(200)
    change = [float((augmix(x, Streams(0), severity=s) - x).abs().mean()) for s in (1, 3, 10)]
    assert change[0] < change[1] < change[2]


@pytest.mark.parametrize(
    ("setting", "value"), [("severity", 0.5), ("severity", 11), ("width", 0), ("alpha", 0.0), ("alpha", float("nan"))]
)
def test_augmix_refuses_settings_out_of_range(setting, value):
    with pytest.raises(InputError, match=f"{setting} is"):
        augmix(images(), Streams(0), **{setting: value})
