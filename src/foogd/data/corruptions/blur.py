"""Blurs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from . import filters

if TYPE_CHECKING:
    from jaxtyping import Float


def gaussian_blur(x: Float[Tensor, "n c h w"], rng: torch.Generator, sigma: float) -> Float[Tensor, "n c h w"]:
    """A Gaussian filter over both axes; beyond the border the nearest pixel counts."""
    return filters.gaussian(x, sigma)


def glass_blur(
    x: Float[Tensor, "n c h w"], rng: torch.Generator, sigma: float, reach: int, passes: int
) -> Float[Tensor, "n c h w"]:
    """A Gaussian filter; `passes` times, each pixel becomes one at an offset in {-reach … reach-1}²; the filter again.

    The published code means to swap the two pixels. Its assignment goes through views of one array, so that the pixel
    at the offset keeps its value; the published images were made so, and this function follows them.
    """
    x = (filters.gaussian(x, sigma) * 255 + filters.MARGIN).floor() / 255
    for _ in range(passes):
        x = _moved_within_reach(x, rng, reach)
    return filters.gaussian(x, sigma)


def defocus_blur(
    x: Float[Tensor, "n c h w"], rng: torch.Generator, radius: float, sigma: float
) -> Float[Tensor, "n c h w"]:
    """Convolution with a disk whose rim is smoothed by a small Gaussian; the border is mirrored at the last pixel."""
    return filters.convolved(x, disk(radius, sigma), filters.mirrored_at_pixel)


def motion_blur(
    x: Float[Tensor, "n c h w"], rng: torch.Generator, radius: int, sigma: float
) -> Float[Tensor, "n c h w"]:
    """A one-sided Gaussian line at an angle between -45° and 45°, one angle an image."""
    angle = (torch.rand(len(x), generator=rng, device=x.device) - 0.5) * (math.pi / 2)
    return filters.motion(x, radius, sigma, angle)


def zoom_blur(x: Float[Tensor, "n c h w"], rng: torch.Generator, end: float, step: float) -> Float[Tensor, "n c h w"]:
    """The mean of x and its central zooms by 1, 1 + step, … up to `end`."""
    h, w = x.shape[-2:]
    # numpy.arange as in the published code: by rounding, the end itself belongs to some of the ranges.
    factors = np.arange(1, end, step)
    total = x.clone()
    for factor in factors:
        total += filters.along_axes(x, filters.zoom_matrix(h, factor), filters.zoom_matrix(w, factor))
    return total / (len(factors) + 1)


def disk(radius: float, sigma: float) -> Float[Tensor, "side side"]:
    """A disk of sum 1 on a grid of at least 17×17, smoothed by 3×3 values of a Gaussian (5×5 beyond radius 8)."""
    reach, width = (8, 1) if radius <= 8 else (math.floor(radius), 2)
    grid = torch.arange(-reach, reach + 1, dtype=torch.float64)
    full = (grid[:, None] ** 2 + grid**2 <= radius**2).double()
    rim = torch.exp(-0.5 * (torch.arange(-width, width + 1, dtype=torch.float64) / sigma) ** 2)
    rim = rim / rim.sum()
    kernel = filters.convolved((full / full.sum())[None, None], rim[:, None] * rim, filters.mirrored_at_pixel)[0, 0]
    used = int(grid[kernel.amax(0) > 1e-9].max())  # rows and columns of zeros cost time only
    return kernel[reach - used : reach + used + 1, reach - used : reach + used + 1]


def _moved_within_reach(x: Tensor, rng: torch.Generator, reach: int) -> Tensor:
    # In turn from the bottom right, each pixel i takes the present value of pixel j. That is the first value of j, or,
    # where j had its turn before, what j took. So every pixel has a pointer, to `pixels + j` (a first value) or to `j`
    # (what j took), and following pointers doubles the steps followed, for all pixels of all images at once.
    n, c, h, w = x.shape
    pixels = h * w
    row = torch.arange(h, device=x.device)[:, None]
    column = torch.arange(w, device=x.device)
    has_turn = (row > reach) & (row <= h - reach) & (column > reach) & (column <= w - reach)
    dy, dx = torch.randint(-reach, reach, (2, n, h, w), generator=rng, device=x.device) * has_turn
    here = (row * w + column).flatten()
    there = (here + (dy * w + dx).flatten(1)).contiguous()
    had_turn = has_turn.flatten()[there] & (there > here)
    pointer = torch.where(had_turn, there, there + pixels)
    while bool((open_ := pointer < pixels).any()):
        pointer = torch.where(open_, pointer.gather(1, pointer.clamp(max=pixels - 1)), pointer)
    source = (pointer - pixels)[:, None].expand(n, c, pixels)
    return x.flatten(2).gather(2, source).reshape(x.shape)
