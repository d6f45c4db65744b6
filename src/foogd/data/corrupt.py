"""Common corruptions of images, after CIFAR-10-C and Tiny-ImageNet-C (Hendrycks and Dietterich 2019), on whole batches.

To add one: a function of (images, generator, constants…), its entry in `CORRUPTIONS`, its five constants in each table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..engine.rng import generator
from ..errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Float

Images = TypeVar("Images", Tensor, np.ndarray[Any, Any])

_CHUNK = 2048  # images that are widened to floats at a time
_TRUNCATE = 4.0  # a Gaussian filter ends at this many sigma, as in skimage.filters.gaussian
_MARGIN = 1e-3  # of a grey level


def corrupt(images: Images, name: str, severity: int, seed: int, constants: str = "cifar") -> Images:
    """Images N×H×W×C of uint8 after the corruption `name` at severity 1 to 5; one seed repeats on one kind of device.

    `constants` names the table: "cifar" (up to 32 pixels) or "tiny" (64 pixels).
    """
    if name not in CORRUPTIONS:
        raise InputError(f"unknown corruption {name!r}; known are {', '.join(CORRUPTIONS)}.")
    if constants not in CONSTANTS:
        raise InputError(f"unknown constants {constants!r}; known are {', '.join(CONSTANTS)}.")
    table = CONSTANTS[constants][name]
    if not isinstance(severity, int) or severity not in range(1, len(table) + 1):
        raise InputError(f"severity is {severity!r}; whole numbers from 1 to {len(table)} are allowed.")
    clean = images if isinstance(images, Tensor) else torch.from_numpy(np.ascontiguousarray(images))
    if clean.dtype != torch.uint8 or clean.ndim != 4 or clean.shape[-1] not in (1, 3):
        raise InputError(
            f"images have type {clean.dtype} and shape {tuple(clean.shape)}; corrupt takes uint8, N×H×W×1 or N×H×W×3."
        )
    stream = generator(seed, name, severity, device=clean.device)
    result = torch.empty_like(clean)
    for start in range(0, len(clean), _CHUNK):
        x = clean[start : start + _CHUNK].permute(0, 3, 1, 2).float() / 255
        changed = CORRUPTIONS[name](x, stream, *table[severity - 1]).clamp(0, 1)
        # The published files cut off to whole grey levels; the margin keeps float32 from losing a level by rounding.
        result[start : start + _CHUNK] = (changed * 255 + _MARGIN).floor().to(torch.uint8).permute(0, 2, 3, 1)
    return result if isinstance(images, Tensor) else result.numpy()


def gaussian_noise(x: Float[Tensor, "n c h w"], rng: torch.Generator, std: float) -> Float[Tensor, "n c h w"]:
    """x + N(0, std²)."""
    return x + std * _normal(x, rng)


def shot_noise(x: Float[Tensor, "n c h w"], rng: torch.Generator, photons: float) -> Float[Tensor, "n c h w"]:
    """Poisson(x·photons) / photons."""
    return torch.poisson(x * photons, generator=rng) / photons


def impulse_noise(x: Float[Tensor, "n c h w"], rng: torch.Generator, share: float) -> Float[Tensor, "n c h w"]:
    """A share of all values set to 0 or 1, half each."""
    draw = torch.rand(x.shape, generator=rng, device=x.device)
    return torch.where(draw < share, (draw < share / 2).to(x.dtype), x)


def speckle_noise(x: Float[Tensor, "n c h w"], rng: torch.Generator, std: float) -> Float[Tensor, "n c h w"]:
    """x + x·N(0, std²)."""
    return x + x * std * _normal(x, rng)


def gaussian_blur(x: Float[Tensor, "n c h w"], rng: torch.Generator, sigma: float) -> Float[Tensor, "n c h w"]:
    """A Gaussian filter over both axes; beyond the border the nearest pixel counts."""
    radius = int(_TRUNCATE * sigma + 0.5)
    offsets = torch.arange(-radius, radius + 1, dtype=torch.float64)
    weights = torch.exp(-0.5 * (offsets / sigma) ** 2)
    kernel = (weights / weights.sum()).to(x)
    flat = x.reshape(-1, 1, *x.shape[-2:])
    flat = F.conv2d(F.pad(flat, (0, 0, radius, radius), mode="replicate"), kernel[None, None, :, None])
    flat = F.conv2d(F.pad(flat, (radius, radius, 0, 0), mode="replicate"), kernel[None, None, None, :])
    return flat.reshape(x.shape)


def contrast(x: Float[Tensor, "n c h w"], rng: torch.Generator, factor: float) -> Float[Tensor, "n c h w"]:
    """(x - m)·factor + m, where m is the mean of an image's channel."""
    mean = x.mean((2, 3), keepdim=True)
    return (x - mean) * factor + mean


def brightness(x: Float[Tensor, "n c h w"], rng: torch.Generator, offset: float) -> Float[Tensor, "n c h w"]:
    """The value of HSV plus `offset`; a grey image is its own value."""
    if x.shape[1] == 1:
        return x + offset
    h, s, v = rgb_to_hsv(x).unbind(1)
    return hsv_to_rgb(torch.stack([h, s, (v + offset).clamp(0, 1)], 1))


def saturate(
    x: Float[Tensor, "n c h w"], rng: torch.Generator, factor: float, offset: float
) -> Float[Tensor, "n c h w"]:
    """The saturation of HSV times `factor` plus `offset`; a grey image has none and stays."""
    if x.shape[1] == 1:
        return x
    h, s, v = rgb_to_hsv(x).unbind(1)
    return hsv_to_rgb(torch.stack([h, (s * factor + offset).clamp(0, 1), v], 1))


def pixelate(x: Float[Tensor, "n c h w"], rng: torch.Generator, factor: float) -> Float[Tensor, "n c h w"]:
    """A box resize to `factor` times the size and back, rounded to grey levels after each pass as in PIL."""
    h, w = x.shape[-2:]
    levels = x * 255
    for height, width in ((max(int(h * factor), 1), max(int(w * factor), 1)), (h, w)):
        levels = (levels @ _box(levels.shape[-1], width).to(x).T + 0.5).floor()
        levels = (_box(levels.shape[-2], height).to(x) @ levels + 0.5).floor()
    return levels / 255


def rgb_to_hsv(rgb: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 3 h w"]:
    """Hue, saturation and value, each in [0, 1], as `colorsys.rgb_to_hsv` for every pixel."""
    r, g, b = rgb.unbind(1)
    value, least = rgb.amax(1), rgb.amin(1)
    spread = value - least
    safe = torch.where(spread > 0, spread, 1.0)
    hue = torch.where(
        r == value,
        (g - b) / safe,
        torch.where(g == value, 2 + (b - r) / safe, 4 + (r - g) / safe),
    )
    hue = torch.where(spread > 0, (hue / 6) % 1.0, 0.0)
    return torch.stack([hue, spread / torch.where(value > 0, value, 1.0), value], 1)


def hsv_to_rgb(hsv: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 3 h w"]:
    """The inverse of `rgb_to_hsv`: v - v·s·clamp(min(q, 4 - q), 0, 1) with q = (k + 6h) mod 6 and k = 5, 3, 1."""
    h, s, v = hsv.unbind(1)
    channels = []
    for k in (5, 3, 1):
        q = (k + 6 * h) % 6
        channels.append(v - v * s * torch.minimum(q, 4 - q).clamp(0, 1))
    return torch.stack(channels, 1)


def _normal(x: Tensor, rng: torch.Generator) -> Tensor:
    return torch.randn(x.shape, generator=rng, device=x.device)


def _box(size: int, target: int) -> Tensor:
    # Row i averages the pixels whose centres lie in the i-th of `target` equal cells; enlarging takes the nearest.
    scale = size / target
    half = max(scale, 1.0) / 2
    matrix = torch.zeros(target, size, dtype=torch.float64)
    for i in range(target):
        centre = (i + 0.5) * scale
        first = max(math.floor(centre - half + 0.5), 0)
        last = min(math.floor(centre + half + 0.5), size)
        matrix[i, first:last] = 1 / (last - first)
    return matrix


CORRUPTIONS: dict[str, Callable[..., Tensor]] = {
    "gaussian_noise": gaussian_noise,
    "shot_noise": shot_noise,
    "impulse_noise": impulse_noise,
    "speckle_noise": speckle_noise,
    "gaussian_blur": gaussian_blur,
    "contrast": contrast,
    "brightness": brightness,
    "saturate": saturate,
    "pixelate": pixelate,
}

CONSTANTS: Mapping[str, Mapping[str, tuple[tuple[float, ...], ...]]] = {
    "cifar": {
        "gaussian_noise": ((0.04,), (0.06,), (0.08,), (0.09,), (0.10,)),
        "shot_noise": ((500,), (250,), (100,), (75,), (50,)),
        "impulse_noise": ((0.01,), (0.02,), (0.03,), (0.05,), (0.07,)),
        "speckle_noise": ((0.06,), (0.1,), (0.12,), (0.16,), (0.2,)),
        "gaussian_blur": ((0.4,), (0.6,), (0.7,), (0.8,), (1.0,)),
        "contrast": ((0.75,), (0.5,), (0.4,), (0.3,), (0.15,)),
        "brightness": ((0.05,), (0.1,), (0.15,), (0.2,), (0.3,)),
        "saturate": ((0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2)),
        "pixelate": ((0.95,), (0.9,), (0.85,), (0.75,), (0.65,)),
    },
    "tiny": {
        "gaussian_noise": ((0.04,), (0.08,), (0.12,), (0.15,), (0.18,)),
        "shot_noise": ((250,), (100,), (50,), (30,), (15,)),
        "impulse_noise": ((0.01,), (0.02,), (0.05,), (0.08,), (0.14,)),
        "speckle_noise": ((0.15,), (0.2,), (0.25,), (0.3,), (0.35,)),
        "gaussian_blur": ((0.5,), (0.75,), (1.0,), (1.25,), (1.5,)),
        "contrast": ((0.4,), (0.3,), (0.2,), (0.1,), (0.05,)),
        "brightness": ((0.1,), (0.2,), (0.3,), (0.4,), (0.5,)),
        "saturate": ((0.3, 0.0), (0.1, 0.0), (2.0, 0.0), (5.0, 0.1), (30.0, 0.2)),
        "pixelate": ((0.9,), (0.8,), (0.7,), (0.6,), (0.5,)),
    },
}
