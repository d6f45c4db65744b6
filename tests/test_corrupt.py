import colorsys
import itertools

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter

from foogd.data.corrupt import CONSTANTS, CORRUPTIONS, corrupt, hsv_to_rgb, rgb_to_hsv
from foogd.errors import InputError

NOISES = ("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise")
TABLES = [(table, severity) for table in CONSTANTS for severity in range(1, 6)]


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


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_same_kind_and_shape_come_back_and_only_noise_needs_the_seed(name, channels):
    images = photos(c=channels, h=28, w=30)
    before = images.copy()
    out = corrupt(images, name, 3, 0)
    as_tensor = corrupt(torch.from_numpy(images), name, 3, 0)
    assert isinstance(out, np.ndarray)
    assert (out.dtype, out.shape) == (np.uint8, images.shape)
    assert isinstance(as_tensor, torch.Tensor)
    assert np.array_equal(as_tensor.numpy(), out)
    assert np.array_equal(images, before)
    assert np.array_equal(out, corrupt(images, name, 3, 1)) == (name not in NOISES)
    assert np.array_equal(out, images) == (name == "saturate" and channels == 1)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_images_are_corrupted_one_by_one_also_beyond_one_chunk(name):
    few = photos(n=2, h=8, w=8)
    many = np.concatenate([few] * 1300)
    out = corrupt(many, name, 5, 0)
    if name in NOISES:
        assert len(np.unique(out.reshape(len(out), -1), axis=0)) > 2000
    else:
        assert np.array_equal(out, np.concatenate([corrupt(few, name, 5, 0)] * 1300))


@pytest.mark.parametrize("name", [name for name in CORRUPTIONS if name != "saturate"])
@pytest.mark.parametrize("table", CONSTANTS)
def test_higher_severity_changes_images_more(name, table):
    images = photos(n=32)
    change = [np.abs(corrupt(images, name, s, 0, table).astype(float) - images).mean() for s in range(1, 6)]
    assert change[0] > 0
    assert all(a <= b + 0.02 for a, b in itertools.pairwise(change)), change
    assert change[4] > change[0]


@pytest.mark.parametrize(("table", "severity"), TABLES)
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
        (("contrast", 1, 0, "huge"), "cifar, tiny"),
    ],
)
def test_unknown_choices_are_refused_with_the_known_ones(arguments, word):
    with pytest.raises(InputError, match=word):
        corrupt(photos(), *arguments)


@pytest.mark.parametrize("images", [photos().astype(np.float32), photos()[0], photos(c=2)])
def test_wrong_images_are_refused(images):
    with pytest.raises(InputError, match="uint8, N×H×W×1 or N×H×W×3"):
        corrupt(images, "contrast", 1, 0)
