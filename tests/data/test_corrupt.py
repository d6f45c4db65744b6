import colorsys
import importlib.util
import io
import itertools
import math

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter

from foogd.core.errors import InputError
from foogd.data.corrupt import CONSTANTS, CORRUPTIONS, corrupt
from foogd.data.corruptions import blur, filters, spatter, weather
from foogd.data.corruptions.digital import elastic_transform, hsv_to_rgb, rgb_to_hsv

NOISES = ("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise")
RANDOM = (*NOISES, "glass_blur", "motion_blur", "fog", "frost", "snow", "spatter", "elastic_transform")
# Of these, severities differ in kind: saturate goes both ways, spatter from water to mud, frost hides what it covers.
MIXED = ("saturate", "glass_blur", "fog", "frost", "snow", "spatter", "elastic_transform")
TABLES = [(table, severity) for table in CONSTANTS for severity in range(1, 6)]


needs_photographs = pytest.mark.skipif(
    importlib.util.find_spec("imagecorruptions") is None, reason="the photographs of the extra `frost` are missing"
)


def each(names):
    return [pytest.param(name, marks=needs_photographs if name == "frost" else ()) for name in names]


def photos(n=4, h=32, w=32, c=3, seed=0):
    rng = np.random.default_rng(seed)
    smooth = gaussian_filter(rng.random((n, h, w, c)), (0, 2, 2, 0))
    smooth = (smooth - smooth.min()) / (smooth.max() - smooth.min())
    return np.round(smooth * 255).astype(np.uint8)


def flat(level, n=64):
    return np.full((n, 32, 32, 3), level, dtype=np.uint8)


def strength(name, table, severity):
    return CONSTANTS[table][name][severity - 1][0]


def test_every_table_has_five_severities_of_every_corruption():
    for table in CONSTANTS.values():
        assert set(table) == set(CORRUPTIONS)
        assert all(len(constants) == 5 for constants in table.values())


@pytest.mark.parametrize("table", CONSTANTS)
@pytest.mark.parametrize("shape", [(28, 28, 1), (32, 32, 3), (64, 48, 3), (17, 40, 1)])
@pytest.mark.parametrize("name", each(CORRUPTIONS))
def test_every_size_works_at_every_severity_and_leaves_a_picture(name, shape, table):
    images = photos(2, *shape)
    for severity in range(1, 6):
        out = corrupt(images, name, severity, 0, table)
        assert out.shape == images.shape
        assert out.std() > 0.5


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", each(CORRUPTIONS))
def test_same_kind_and_shape_come_back_and_only_random_ones_need_the_seed(name, channels):
    images = photos(c=channels, h=28, w=30)
    before = images.copy()
    out = corrupt(images, name, 3, 0)
    as_tensor = corrupt(torch.from_numpy(images), name, 3, 0)
    assert isinstance(out, np.ndarray)
    assert (out.dtype, out.shape) == (np.uint8, images.shape)
    assert isinstance(as_tensor, torch.Tensor)
    assert np.array_equal(as_tensor.numpy(), out)
    assert np.array_equal(images, before)
    assert np.array_equal(out, corrupt(images, name, 3, 1)) == (name not in RANDOM)
    assert np.array_equal(out, images) == (name == "saturate" and channels == 1)


@pytest.mark.parametrize("name", each(CORRUPTIONS))
def test_images_are_corrupted_one_by_one_also_beyond_one_chunk(name):
    few = photos(n=2, h=16, w=16)
    many = np.concatenate([few] * 150)
    out = corrupt(many, name, 5, 0)
    if name in RANDOM:
        assert len(np.unique(out.reshape(len(out), -1), axis=0)) > 60
    else:
        assert np.array_equal(out, np.concatenate([corrupt(few, name, 5, 0)] * 150))


@pytest.mark.parametrize("name", [name for name in CORRUPTIONS if name not in MIXED])
@pytest.mark.parametrize("table", CONSTANTS)
def test_higher_severity_changes_images_more(name, table):
    images = photos(n=32)
    change = [np.abs(corrupt(images, name, s, 0, table).astype(float) - images).mean() for s in range(1, 6)]
    assert change[0] > 0
    assert all(a <= b + 0.02 for a, b in itertools.pairwise(change)), change
    assert change[4] > change[0]


@pytest.mark.parametrize(("table", "severity"), [case for case in TABLES if case[0] != "imagenet"])
def test_noise_has_the_published_strength(table, severity):
    def moments(name, level):
        out = corrupt(flat(level), name, severity, 0, table).astype(float) / 255
        return out.mean(), out.std()

    cut = 0.5 / 255  # cutting off lowers the mean by half a level
    std = strength("gaussian_noise", table, severity)
    mean, spread = moments("gaussian_noise", 128)
    assert mean == pytest.approx(128 / 255 - cut, abs=2e-3)
    assert spread == pytest.approx(std, rel=0.03)
    photons = strength("shot_noise", table, severity)
    mean, spread = moments("shot_noise", 64)
    assert mean == pytest.approx(64 / 255 - cut, abs=3e-3)
    assert spread == pytest.approx((64 / 255 / photons) ** 0.5, rel=0.03)
    std = strength("speckle_noise", table, severity)
    mean, spread = moments("speckle_noise", 100)
    assert spread == pytest.approx(100 / 255 * std, rel=0.03)
    out = corrupt(flat(100), "impulse_noise", severity, 0, table)
    share = strength("impulse_noise", table, severity)
    assert set(np.unique(out)) == {0, 100, 255}
    assert (out == 255).mean() == pytest.approx(share / 2, rel=0.1)
    assert (out == 0).mean() == pytest.approx(share / 2, rel=0.1)
    hit = out != 100
    assert (hit.any(-1).mean()) > 1.5 * hit.mean()  # values, not whole pixels


@pytest.mark.parametrize(("table", "severity"), TABLES)
def test_blur_is_the_gaussian_filter_of_scipy(table, severity):
    images = photos(h=16, w=20)
    sigma = strength("gaussian_blur", table, severity)
    expected = gaussian_filter(images / 255, (0, sigma, sigma, 0), mode="nearest", truncate=4.0) * 255
    out = corrupt(images, "gaussian_blur", severity, 0, table)
    assert np.abs(out - np.floor(expected + 1e-3)).max() <= 1
    assert (out == np.floor(expected + 1e-3)).mean() > 0.999


@pytest.mark.parametrize(("table", "severity"), TABLES)
@pytest.mark.parametrize("shape", [(32, 32, 3), (28, 28, 1), (64, 48, 3)])
def test_pixelate_is_the_box_resize_of_pil(table, severity, shape):
    h, w, c = shape
    images = np.random.default_rng(severity).integers(0, 256, (3, *shape), dtype=np.uint8)
    factor = strength("pixelate", table, severity)
    out = corrupt(images, "pixelate", severity, 0, table)
    for image, mine in zip(images, out, strict=True):
        picture = Image.fromarray(image[..., 0] if c == 1 else image)
        small = picture.resize((int(w * factor), int(h * factor)), Image.Resampling.BOX)
        theirs = np.asarray(small.resize((w, h), Image.Resampling.BOX)).reshape(shape)
        assert np.abs(mine.astype(int) - theirs).max() <= 1


@pytest.mark.parametrize(("table", "severity"), TABLES)
def test_contrast_scales_around_the_mean_of_each_channel(table, severity):
    images = photos()
    x = images / 255
    mean = x.mean((1, 2), keepdims=True)
    expected = ((x - mean) * strength("contrast", table, severity) + mean) * 255
    assert np.abs(corrupt(images, "contrast", severity, 0, table) - np.floor(expected + 1e-3)).max() <= 1


def some_colours():
    rng = np.random.default_rng(0)
    corners = np.array([[r, g, b] for r in (0, 0.5, 1) for g in (0, 0.5, 1) for b in (0, 0.5, 1)])
    return np.concatenate([corners, rng.random((200, 3))])


def test_hsv_agrees_with_colorsys_both_ways():
    colours = some_colours()
    pixels = torch.from_numpy(colours.T.reshape(1, 3, -1, 1))
    there = rgb_to_hsv(pixels)[0, :, :, 0].T.numpy()
    np.testing.assert_allclose(there, [colorsys.rgb_to_hsv(*colour) for colour in colours], atol=1e-12)
    back = hsv_to_rgb(pixels)[0, :, :, 0].T.numpy()
    np.testing.assert_allclose(back, [colorsys.hsv_to_rgb(*colour) for colour in colours], atol=1e-12)
    np.testing.assert_allclose(hsv_to_rgb(rgb_to_hsv(pixels)), pixels, atol=1e-12)


@pytest.mark.parametrize(("table", "severity"), TABLES)
@pytest.mark.parametrize("name", ["brightness", "saturate"])
def test_brightness_and_saturation_are_those_of_colorsys(name, table, severity):
    pixels = np.round(some_colours() * 255).astype(np.uint8).reshape(1, -1, 1, 3)
    constants = CONSTANTS[table][name][severity - 1]
    out = corrupt(pixels, name, severity, 0, table)[0, :, 0]
    for pixel, mine in zip(pixels[0, :, 0] / 255, out, strict=True):
        h, s, v = colorsys.rgb_to_hsv(*pixel)
        if name == "brightness":
            v = min(v + constants[0], 1)
        else:
            s = min(s * constants[0] + constants[1], 1)
        expected = np.floor(np.array(colorsys.hsv_to_rgb(h, s, v)) * 255 + 1e-3)
        assert np.abs(mine - expected).max() <= 1


def test_grey_brightness_adds_to_the_value():
    ramp = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)
    expected = np.floor(np.minimum(ramp + 0.3 * 255, 255) + 1e-3)
    assert np.array_equal(corrupt(ramp, "brightness", 5, 0), expected)


def test_all_grey_levels_survive_where_nothing_changes():
    ramp = np.arange(256, dtype=np.uint8).reshape(256, 1, 1, 1).repeat(4, 1).repeat(4, 2).repeat(3, 3)
    for name in ("contrast", "gaussian_blur", "pixelate"):
        assert np.array_equal(corrupt(ramp, name, 4, 0), ramp)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("haze", 1, 0), "gaussian_noise, shot_noise"),
        (("contrast", 0, 0), "from 1 to 5"),
        (("contrast", 6, 0), "from 1 to 5"),
        (("contrast", 2.0, 0), "from 1 to 5"),
        (("contrast", 1, 0, "huge"), "cifar, tiny, imagenet"),
    ],
)
def test_unknown_choices_are_refused_with_the_known_ones(arguments, word):
    with pytest.raises(InputError, match=word):
        corrupt(photos(), *arguments)


@pytest.mark.parametrize("images", [photos().astype(np.float32), photos()[0], photos(c=2)])
def test_wrong_images_are_refused(images):
    with pytest.raises(InputError, match="uint8, N×H×W×1 or N×H×W×3"):
        corrupt(images, "contrast", 1, 0)


def test_missing_photographs_are_named_with_the_way_to_get_them(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    weather._photographs.cache_clear()
    with pytest.raises(InputError, match=r"pip install foogd\[frost\]"):
        corrupt(photos(), "frost", 1, 0)


@needs_photographs
def test_frost_on_black_is_the_photographs_and_grey_frost_their_luminance():
    black = flat(0, n=300)
    out = corrupt(black, "frost", 5, 0) / 255 / 0.45
    pixels, _, _ = weather._photographs(5, 0.2, 32, 32)
    assert out.max() <= 1
    # Of the five photographs, some are pale and some dark: the crops have the range of brightness of all of them.
    levels = out.mean((1, 2, 3))
    assert levels.min() < float(pixels.mean()) - 0.1
    assert levels.max() > float(pixels.mean()) + 0.1
    luminance = corrupt(black[..., :1], "frost", 5, 0)[..., 0]
    colours = corrupt(black, "frost", 5, 0) @ np.array([0.299, 0.587, 0.114])
    assert np.abs(luminance - colours).max() <= 1.5


@pytest.mark.parametrize("quality", [7, 25, 50, 80])
@pytest.mark.parametrize("shape", [(32, 32, 3), (28, 28, 1), (30, 45, 3), (64, 48, 3)])
def test_jpeg_is_that_of_pil(quality, shape):
    images = photos(20, *shape)
    x = torch.from_numpy(images).permute(0, 3, 1, 2) / 255
    out = (CORRUPTIONS["jpeg_compression"](x, None, quality) * 255).round().permute(0, 2, 3, 1).numpy()
    theirs = []
    for image in images:
        stored = io.BytesIO()
        Image.fromarray(image[..., 0] if shape[-1] == 1 else image).save(stored, "JPEG", quality=quality)
        theirs.append(np.asarray(Image.open(stored)).reshape(shape))
    assert np.abs(out - np.stack(theirs)).mean() < 0.5
    assert (out == np.stack(theirs)).mean() > 0.8


@pytest.mark.parametrize("reach", [1, 2, 4])
def test_glass_takes_pixels_one_after_the_other(reach):
    h, w = 14, 17
    x = torch.arange(2 * h * w, dtype=torch.float32).reshape(2, 1, h, w)
    out = blur._moved_within_reach(x, torch.Generator().manual_seed(0), reach)
    offsets = torch.randint(-reach, reach, (2, 2, h, w), generator=torch.Generator().manual_seed(0))
    expected = x.clone()
    for n, row, column in itertools.product(range(2), range(h - reach, reach, -1), range(w - reach, reach, -1)):
        dy, dx = offsets[:, n, row, column].tolist()
        expected[n, 0, row, column] = expected[n, 0, row + dy, column + dx]
    assert torch.equal(out, expected)
    assert not torch.equal(out, x)


@pytest.mark.parametrize("degrees", [0, 90, -135])
def test_motion_draws_a_one_sided_line(degrees):
    x = torch.zeros(1, 1, 21, 21)
    x[..., 10, 10] = 1
    out = filters.motion(x, 4, 2.0, torch.tensor([math.radians(degrees)]))[0, 0]
    weights = np.exp(-0.5 * (np.arange(9) / 2.0) ** 2)
    expected = torch.zeros(21, 21)
    for i, weight in enumerate(weights / weights.sum()):
        row = 10 - math.ceil(i * math.sin(math.radians(degrees)) - 0.5)
        column = 10 - math.ceil(i * math.cos(math.radians(degrees)) - 0.5)
        expected[row, column] += weight
    assert torch.allclose(out, expected, atol=1e-3)
    assert float(out.sum()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(("table", "severity"), TABLES)
def test_the_disk_has_the_area_of_its_radius_and_sum_one(table, severity):
    radius, sigma = CONSTANTS[table]["defocus_blur"][severity - 1]
    kernel = blur.disk(radius, sigma)
    assert float(kernel.sum()) == pytest.approx(1, abs=0.02)
    assert torch.allclose(kernel, kernel.T)
    assert torch.allclose(kernel, kernel.flip(0))
    if radius >= 3:
        assert 1 / float(kernel.max()) == pytest.approx(math.pi * radius**2, rel=0.1)


def test_zoom_keeps_the_centre_and_moves_the_rest_outwards():
    ramp = torch.arange(33.0)
    for factor in (1.0, 1.1, 1.5, 2.0):
        out = filters.zoom_matrix(33, factor).float() @ ramp
        assert float(out[16]) == pytest.approx(16, abs=0.6)
        assert float(out[20] - out[12]) == pytest.approx(8 / factor, rel=0.05)


def test_plasma_spans_zero_to_one_and_is_rougher_where_noise_decays_slowly():
    def maps(decay):
        return weather.plasma(50, 32, decay, torch.Generator().manual_seed(0), torch.device("cpu"))

    rough, smooth = maps(1.4), maps(3.0)
    for field in (rough, smooth):
        assert field.shape == (50, 32, 32)
        assert torch.equal(field.amin((1, 2)), torch.zeros(50))
        assert torch.equal(field.amax((1, 2)), torch.ones(50))
    assert rough.diff(dim=1).abs().mean() > 2 * smooth.diff(dim=1).abs().mean()


def test_distance_on_an_empty_map_is_far_and_around_one_pixel_is_near_the_euclidean():
    marked = torch.zeros(2, 1, 15, 19, dtype=torch.bool)
    marked[0, 0, 4, 6] = True
    near, none = spatter.distance(marked)[:, 0]
    rows, columns = torch.meshgrid(torch.arange(15.0), torch.arange(19.0), indexing="ij")
    exact = ((rows - 4) ** 2 + (columns - 6) ** 2).sqrt()
    assert torch.all((near - exact).abs() <= 0.03 * exact + 1e-5)
    assert torch.all(none >= 20)


def test_water_brightens_and_mud_takes_its_colour():
    clean = flat(100, n=20)
    assert (corrupt(clean, "spatter", 3, 0).astype(int) >= 100).all()
    out = corrupt(clean, "spatter", 5, 0)
    covered = (out != 100).any(-1)
    assert 0.05 < covered.mean() < 0.9
    assert np.abs(out[covered].mean(0) - [63, 42, 20]).max() < 12


def test_elastic_maps_keep_the_mean_place_and_move_by_the_amplitude():
    n, side = 200, 32
    place = torch.linspace(0, 1, side).expand(n, 1, side, side)

    def moves(amplitude, sigma, shift):
        rng = torch.Generator().manual_seed(0)
        return ((elastic_transform(place, rng, amplitude, sigma, shift) - place) * (side - 1))[..., 6:-6, 6:-6]

    assert float(moves(0.1, 0.0, 0.0).abs().max()) == pytest.approx(3.2, rel=0.02)  # uniform in ±amplitude·side
    affine = moves(0.0, 0.0, 0.05)
    assert abs(float(affine.mean())) < 0.15
    # Bilinear in place: second differences of an affine map vanish.
    assert float(affine.diff(n=2, dim=-1).abs().max()) < 1e-3
    assert 0.5 < float(affine.abs().amax((1, 2, 3)).mean()) < 2.5
    assert torch.equal(moves(0.0, 0.0, 0.0), torch.zeros_like(affine))
