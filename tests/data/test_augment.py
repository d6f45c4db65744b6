import pytest
import torch

from foogd.core.errors import InputError
from foogd.core.random import Streams
from foogd.data import augment
from foogd.data.augment import flip_crop, fourier_mix


def images(b=6, c=3, h=9, w=7, seed=0, low=0.4, high=0.6):
    rng = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(b, c, h, w, generator=rng, dtype=torch.float64)


@pytest.mark.parametrize("size", [(8, 8), (9, 7), (7, 10), (1, 5)])
def test_fourier_mix_keeps_the_phase_and_mixes_the_amplitudes(size):
    x, partner = images(h=size[0], w=size[1]), images(h=size[0], w=size[1], seed=1)
    lam = torch.linspace(0.1, 0.9, len(x), dtype=x.dtype)
    mixed = torch.fft.fft2(fourier_mix(x, partner, lam))
    own, other = torch.fft.fft2(x), torch.fft.fft2(partner).abs()
    weight = lam.view(-1, 1, 1, 1)
    amplitude = (1 - weight) * own.abs() + weight * other
    assert torch.allclose(mixed.abs(), amplitude, atol=1e-9)
    assert torch.allclose(mixed, torch.polar(amplitude, own.angle()), atol=1e-9)


def test_fourier_mix_with_zero_is_the_identity_and_with_one_takes_the_whole_amplitude():
    x, partner = images(low=0.0, high=1.0).float(), images(seed=1).float()
    assert torch.allclose(fourier_mix(x, partner, 0.0), x, atol=1e-6)
    x = images().float()
    assert torch.allclose(torch.fft.fft2(fourier_mix(x, partner, 1.0)).abs(), torch.fft.fft2(partner).abs(), atol=1e-4)


def test_fourier_mix_treats_each_image_by_its_own_lambda():
    x, partner = images(), images(seed=1)
    lam = torch.rand(len(x), generator=torch.Generator().manual_seed(2), dtype=x.dtype)
    one_by_one = [fourier_mix(x[i : i + 1], partner[i : i + 1], float(lam[i])) for i in range(len(x))]
    assert torch.allclose(fourier_mix(x, partner, lam), torch.cat(one_by_one))


def test_fourier_mix_of_black_images_is_finite_and_inside_the_range():
    mixed = fourier_mix(torch.zeros(2, 1, 8, 8), torch.rand(2, 1, 8, 8), 0.7)
    assert mixed.isfinite().all()
    assert mixed.max() > 0.1
    strong = fourier_mix(images(low=0.0, high=1.0), images(low=0.0, high=1.0, seed=3), 0.9)
    assert strong.min() >= 0
    assert strong.max() <= 1


def test_fourier_mix_runs_without_values_and_refuses_other_shapes():
    x = torch.empty(4, 3, 9, 8, device="meta")
    assert fourier_mix(x, x, torch.empty(4, device="meta")).shape == x.shape
    half = images().bfloat16()
    assert fourier_mix(half, half.flip(0), 0.5).dtype == torch.bfloat16
    with pytest.raises(InputError, match="partner"):
        fourier_mix(torch.rand(2, 1, 4, 4), torch.rand(2, 3, 4, 4), 0.5)


def test_flip_crop_without_work_returns_the_batch_and_draws_nothing():
    def refuse(purpose):
        raise AssertionError(purpose)

    x = torch.rand(3, 1, 4, 4)
    assert flip_crop(x, refuse, flip=False, pad=0) is x


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_flip_mirrors_about_half_of_the_images_and_leaves_the_others(dtype):
    x = (torch.rand(400, 2, 5, 6) * 255).to(dtype)
    out = flip_crop(x, Streams(0), flip=True, pad=0)
    same = (out == x).flatten(1).all(1)
    mirrored = (out == x.flip(-1)).flatten(1).all(1)
    assert (same ^ mirrored).all()
    assert 150 < mirrored.sum() < 250
    assert out.dtype == dtype


def test_crop_cuts_every_window_of_the_zero_padded_image():
    x = torch.arange(1, 31, dtype=torch.float32).reshape(1, 1, 5, 6).expand(500, 1, 5, 6)
    out = flip_crop(x, Streams(1), flip=False, pad=2)
    padded = torch.nn.functional.pad(x[0, 0], (2, 2, 2, 2))
    windows = {padded[i : i + 5, j : j + 6].numpy().tobytes() for i in range(5) for j in range(5)}
    assert {image.contiguous().numpy().tobytes() for image in out[:, 0]} == windows


def test_flip_crop_repeats_with_its_seed_and_uses_one_stream_a_purpose():
    x = torch.rand(50, 3, 8, 8)
    once = flip_crop(x, Streams(3), flip=True, pad=2)
    assert torch.equal(once, flip_crop(x, Streams(3), flip=True, pad=2))
    assert not torch.equal(once, flip_crop(x, Streams(4), flip=True, pad=2))
    streams = Streams(3)
    cropped = flip_crop(x, streams, flip=False, pad=2)
    again = flip_crop(x, Streams(3), flip=True, pad=2)
    unflipped = [torch.equal(a, b) for a, b in zip(cropped, again, strict=True)]
    assert 10 < sum(unflipped) < 40  # the crop does not move when flips are switched on
    assert flip_crop(x.to("meta"), Streams(0), flip=True, pad=2).shape == x.shape
    with pytest.raises(InputError, match="pad"):
        flip_crop(x, Streams(0), flip=True, pad=-1)


@pytest.mark.parametrize("shape", [(32, 32), (28, 28), (15, 21), (16, 9), (1, 4)])
def test_the_transform_by_matrix_products_is_the_fast_one(shape, rng):
    x = torch.rand(3, 2, *shape, generator=rng, dtype=torch.float64)
    spectrum = torch.fft.rfft2(x)
    assert torch.allclose(augment._dft(x), spectrum, rtol=0, atol=1e-12 * x.numel())
    filtered = spectrum * torch.rand(spectrum.shape, generator=rng, dtype=torch.float64)
    wanted = torch.fft.irfft2(filtered, s=shape)
    assert torch.allclose(augment._inverse_dft(filtered, *shape), wanted, rtol=0, atol=1e-12)
    single = augment._inverse_dft(augment._dft(x.float()), *shape)
    assert torch.allclose(single, x.float(), rtol=0, atol=1e-5)
