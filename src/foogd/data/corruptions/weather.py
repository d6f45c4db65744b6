"""Fog, frost and snow."""

from __future__ import annotations

import importlib.util
import math
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.errors import InputError
from ..decode import FORMATS
from . import filters

if TYPE_CHECKING:
    from jaxtyping import Float

PHOTOGRAPHS = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg", "frost6.jpg")
GREY = (0.299, 0.587, 0.114)


def fog(x: Float[Tensor, "n c h w"], rng: torch.Generator, density: float, decay: float) -> Float[Tensor, "n c h w"]:
    """(x + density·plasma)·m / (m + density), where m is the largest value of the image."""
    n, _, h, w = x.shape
    brightest = x.amax((1, 2, 3), keepdim=True)
    clouds = plasma(n, max(h, w), decay, rng, x.device)[:, None, :h, :w]
    return (x + density * clouds) * brightest / (brightest + density)


def frost(
    x: Float[Tensor, "n c h w"],
    rng: torch.Generator,
    share: float,
    strength: float,
    scale: float,
    photographs: int,
) -> Float[Tensor, "n c h w"]:
    """share·x + strength·a random crop of one of the first photographs, which are resized by `scale`."""
    n, c, h, w = x.shape
    pixels, heights, widths = (part.to(x.device) for part in _photographs(photographs, scale, h, w))
    first = (heights * widths).cumsum(0) - heights * widths
    which = torch.randint(photographs, (n,), generator=rng, device=x.device)
    top, left = torch.rand((2, n), generator=rng, device=x.device)
    top, left = (top * (heights[which] - h)).long(), (left * (widths[which] - w)).long()
    row = top[:, None, None] + torch.arange(h, device=x.device)[:, None]
    column = left[:, None, None] + torch.arange(w, device=x.device)
    crop = (first[which][:, None, None] + row * widths[which][:, None, None] + column).flatten()
    ice = pixels[:, crop].reshape(3, n, h, w).transpose(0, 1)
    return share * x + strength * (grey(ice) if c == 1 else ice)


def snow(
    x: Float[Tensor, "n c h w"],
    rng: torch.Generator,
    mean: float,
    std: float,
    zoom: float,
    threshold: float,
    radius: int,
    sigma: float,
    share: float,
) -> Float[Tensor, "n c h w"]:
    """share·x + (1-share)·max(x, 1.5·grey(x) + 0.5), plus a layer of flakes and the same layer turned by 180°.

    The layer is N(mean, std²), enlarged by `zoom`, 0 below `threshold`, and blurred along an angle from -135° to -45°.
    """
    n, _, h, w = x.shape
    layer = torch.randn((n, 1, h, w), generator=rng, device=x.device) * std + mean
    layer = filters.along_axes(layer, filters.zoom_matrix(h, zoom), filters.zoom_matrix(w, zoom))
    layer = torch.where(layer < threshold, 0.0, layer).clamp(0, 1)
    angle = -(torch.rand(n, generator=rng, device=x.device) + 0.5) * (math.pi / 2)
    layer = (filters.motion(layer, radius, sigma, angle) * 255).round() / 255
    whitened = share * x + (1 - share) * torch.maximum(x, grey(x) * 1.5 + 0.5)
    return whitened + layer + layer.flip(2, 3)


def plasma(n: int, side: int, decay: float, rng: torch.Generator, device: torch.device) -> Float[Tensor, "n size size"]:
    """n square maps in [0, 1] by diamond-square on a torus; the size is the power of two at or above `side`.

    A new point is the mean of four neighbours plus noise uniform in ±a²; a starts at 100 and is divided by `decay`
    after every halving of the step.
    """
    size = 2 ** max(math.ceil(math.log2(side)), 1)
    # In float64, as the noise of the last steps is a millionth of that of the first.
    field = torch.zeros((n, size, size), device=device, dtype=torch.float64)
    step, wobble = size, 100.0
    while step >= 2:
        half = step // 2

        def between(total: Tensor, wobble: float = wobble) -> Tensor:
            noise = torch.rand(total.shape, generator=rng, device=device, dtype=total.dtype) * 2 - 1
            return total / 4 + wobble**2 * noise

        corners = field[:, ::step, ::step]
        pairs = corners + corners.roll(-1, 1)
        centres = between(pairs + pairs.roll(-1, 2))
        field[:, half::step, half::step] = centres
        field[:, ::step, half::step] = between(centres + centres.roll(1, 1) + corners + corners.roll(-1, 2))
        field[:, half::step, ::step] = between(centres + centres.roll(1, 2) + corners + corners.roll(-1, 1))
        step, wobble = half, wobble / decay
    field = field - field.amin((1, 2), keepdim=True)
    return (field / field.amax((1, 2), keepdim=True)).float()


def grey(x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n 1 h w"]:
    """The luminance of colour images; grey ones stay."""
    if x.shape[1] == 1:
        return x
    return (x * torch.tensor(GREY, device=x.device)[:, None, None]).sum(1, keepdim=True)


@lru_cache(maxsize=4)
def _photographs(count: int, scale: float, h: int, w: int) -> tuple[Tensor, Tensor, Tensor]:
    # All pixels (3×P) of the photographs one after the other, and the heights and widths.
    resized = []
    for name in PHOTOGRAPHS[:count]:
        photo = _decoded(name).permute(2, 0, 1)[None]
        # Larger than the image, so that there is a choice of crops.
        enough = max(scale, (h + 1) / photo.shape[2], (w + 1) / photo.shape[3])
        size = (math.ceil(photo.shape[2] * enough), math.ceil(photo.shape[3] * enough))
        resized.append(F.interpolate(photo, size=size, mode="bilinear").round()[0] / 255)
    heights, widths = (torch.tensor([photo.shape[axis] for photo in resized]) for axis in (1, 2))
    return torch.cat([photo.flatten(1) for photo in resized], 1), heights, widths


def _decoded(name: str) -> Float[Tensor, "h w 3"]:
    found = importlib.util.find_spec("imagecorruptions")
    folders = [] if found is None else [Path(place) / "frost" for place in found.submodule_search_locations or ()]
    paths = [folder / name for folder in folders if (folder / name).is_file()]
    if not paths or importlib.util.find_spec("PIL") is None:
        raise InputError("frost needs photographs that are not installed: `pip install foogd[frost]` brings them.")
    from PIL import Image

    with Image.open(paths[0], formats=FORMATS) as picture:
        return torch.from_numpy(np.asarray(picture.convert("RGB"), dtype=np.float32).copy())
