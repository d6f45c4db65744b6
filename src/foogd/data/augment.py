"""Augmentations of whole batches, on the batch's device and without a loop over images."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.errors import InputError
from ..core.types import Rng

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped


def fourier_mix(
    x: Float[Tensor, "b c h w"], partner: Float[Tensor, "b c h w"], lam: Float[Tensor, " b"] | float
) -> Float[Tensor, "b c h w"]:
    """Images with the phase of `x` and the amplitude (1-λ)|F(x)| + λ|F(partner)|, clamped to [0, 1] (FACT)."""
    if x.shape != partner.shape:
        raise InputError(f"partner has shape {tuple(partner.shape)}; it must have that of x, {tuple(x.shape)}.")
    share = lam.reshape(-1, 1, 1, 1) if isinstance(lam, Tensor) else lam
    precision = torch.promote_types(x.dtype, torch.float32)  # no transform knows bfloat16
    transform, inverse = (_dft, _inverse_dft) if x.is_cuda else (_fft, _inverse_fft)
    own = transform(x.to(precision))
    amplitude = own.abs()
    # Where the amplitude is 0 the phase is taken as 0, as angle(0) would be.
    unit = torch.where(amplitude > 0, own / torch.where(amplitude > 0, amplitude, 1.0), 1.0)
    other = transform(partner.to(precision)).abs()
    mixed: Tensor = inverse((1 - share) * own + share * other * unit, x.shape[-2], x.shape[-1])
    return mixed.clamp(0, 1).to(x.dtype)


def flip_crop(x: Shaped[Tensor, "b c h w"], rng: Rng, *, flip: bool, pad: int) -> Shaped[Tensor, "b c h w"]:
    """Each image mirrored left to right with probability ½ and cropped at a random place after padding with zeros.

    Draws from `rng("flip")` and `rng("crop")`; with `flip=False` and `pad=0` it returns `x` and draws nothing.
    """
    if pad < 0:
        raise InputError(f"pad is {pad}; it must be 0 or more.")
    if not flip and pad == 0:
        return x
    b, c, h, w = x.shape
    rows = torch.arange(h, device=x.device).expand(b, h)
    columns = torch.arange(w, device=x.device).expand(b, w)
    if flip:
        stream = rng("flip")
        mirrored = (torch.rand(b, generator=stream, device=stream.device) < 0.5).to(x.device)
        columns = torch.where(mirrored[:, None], w - 1 - columns, columns)
    if pad:
        stream = rng("crop")
        offsets = torch.randint(2 * pad + 1, (2, b), generator=stream, device=stream.device).to(x.device)
        rows, columns = rows + offsets[0, :, None], columns + offsets[1, :, None]
        x = F.pad(x, (pad, pad, pad, pad))
    image = torch.arange(b, device=x.device)[:, None, None, None]
    channel = torch.arange(c, device=x.device)[None, :, None, None]
    return x[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


def _fft(x: Tensor) -> Tensor:
    spectrum: Tensor = torch.fft.rfft2(x)
    return spectrum


def _inverse_fft(spectrum: Tensor, height: int, width: int) -> Tensor:
    image: Tensor = torch.fft.irfft2(spectrum, s=(height, width))
    return image


# On a GPU the transform is two matrix products: cuFFT fails next to CUDA graphs that replay on several streams, and for
# images of this size the products are as fast.


def _dft(x: Tensor) -> Tensor:
    """The half spectrum of `torch.fft.rfft2` by matrix products."""
    height, width = x.shape[-2:]
    across, down = _waves(width, x.dtype, x.device), _waves(height, x.dtype, x.device)
    return down @ (x.to(across.dtype) @ across[:, : width // 2 + 1])


def _inverse_dft(spectrum: Tensor, height: int, width: int) -> Tensor:
    """The real image of a half spectrum, as `torch.fft.irfft2` gives it, by matrix products."""
    dtype = spectrum.real.dtype
    across, down = _waves(width, dtype, spectrum.device), _waves(height, dtype, spectrum.device)
    # A column of the half spectrum stands for its mirror image too, but for the first and, of an even width, the last.
    half = width // 2 + 1
    twice = torch.full((half, 1), 2.0, dtype=dtype, device=spectrum.device)
    twice[0] = 1.0
    twice[(width + 1) // 2 :] = 1.0
    image: Tensor = (down.conj() @ spectrum) @ (twice * across[:half].conj())
    return image.real / (height * width)


@cache  # a graph may still read what a smaller cache would drop
def _waves(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The symmetric matrix exp(-2πi jk/n)."""
    k = torch.arange(n, dtype=torch.float64, device=device)
    angle = (k[:, None] * k).remainder(n) * (-2 * math.pi / n)
    return torch.complex(angle.cos(), angle.sin()).to(dtype.to_complex())
