"""Changes of contrast and colour, coarse pixels and elastic deformations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from . import filters

if TYPE_CHECKING:
    from jaxtyping import Float


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
        levels = (levels @ filters.box_matrix(levels.shape[-1], width).to(x).T + 0.5).floor()
        levels = (filters.box_matrix(levels.shape[-2], height).to(x) @ levels + 0.5).floor()
    return levels / 255


def elastic_transform(
    x: Float[Tensor, "n c h w"], rng: torch.Generator, amplitude: float, sigma: float, shift: float
) -> Float[Tensor, "n c h w"]:
    """A random affine map, then a displacement field: uniform in ±1, blurred by `sigma`, times `amplitude`.

    The affine map moves three corners of a central square, two thirds of the image wide, by up to `shift` along each
    axis. All three constants are shares of the shorter side.
    """
    n, _, h, w = x.shape
    side = min(h, w)
    if shift > 0:
        moves = (torch.rand((n, 3, 2), generator=rng, device=x.device) * 2 - 1) * (shift * side)
        # OpenCV mirrors at the last pixel in the affine map, scipy at the edge in the displacement.
        x = _sampled(x, _affine_source(moves, h, w), mirrored_at_pixel=True)
    if amplitude > 0:
        noise = torch.rand((n, 2, h, w), generator=rng, device=x.device) * 2 - 1
        field = filters.gaussian(noise, sigma * side, truncate=3.0, border=filters.mirrored) * (amplitude * side)
        x = _sampled(x, _pixels(h, w, x.device) + field.permute(0, 2, 3, 1), mirrored_at_pixel=False)
    return x


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


def _pixels(h: int, w: int, device: torch.device) -> Float[Tensor, "h w 2"]:
    # Coordinates (x, y) of every pixel.
    y, x = torch.meshgrid(torch.arange(h, device=device), torch.arange(w, device=device), indexing="ij")
    return torch.stack([x, y], -1).float()


def _affine_source(moves: Float[Tensor, "n 3 2"], h: int, w: int) -> Float[Tensor, "n h w 2"]:
    # The affine map takes P_k to P_k + move_k for the corners P_1 = (+s, +s), P_2 = (+s, -s), P_3 = (-s, -s) around the
    # centre. Its columns follow from the edges P_1 - P_2 = (0, 2s) and P_2 - P_3 = (2s, 0). A pixel's source is the
    # inverse.
    s = max(min(h, w) // 3, 1)
    centre = torch.tensor([w // 2, h // 2], device=moves.device, dtype=moves.dtype)
    first, second, third = moves.unbind(1)
    unit = torch.eye(2, device=moves.device)
    columns = torch.stack([unit[0] + (second - third) / (2 * s), unit[1] + (first - second) / (2 * s)], -1)
    offset = third - s + columns.sum(-1) * s  # of the centre, from P_3
    points = _pixels(h, w, moves.device) - centre - offset[:, None, None]
    (a, b), (c, d) = (row.unbind(-1) for row in columns.unbind(-2))
    u, v = points.unbind(-1)
    a, b, c, d = (value[:, None, None] for value in (a, b, c, d))
    determinant = a * d - b * c
    return torch.stack([(d * u - b * v) / determinant, (a * v - c * u) / determinant], -1) + centre


def _sampled(
    x: Float[Tensor, "n c h w"], source: Float[Tensor, "n h w 2"], mirrored_at_pixel: bool
) -> Float[Tensor, "n c h w"]:
    # Bilinear values at the pixel coordinates `source`; grid_sample's corner convention is its kind of mirror, too.
    h, w = x.shape[-2:]
    size = torch.tensor([w, h], device=x.device)
    if mirrored_at_pixel:
        grid = 2 * source / (size - 1).clamp(min=1) - 1
    else:
        grid = (2 * source + 1) / size - 1
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=mirrored_at_pixel)
