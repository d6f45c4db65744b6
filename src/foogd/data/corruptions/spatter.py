"""Drops of water or mud on the lens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from . import filters
from .weather import grey

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

_WATER = (175 / 255, 238 / 255, 238 / 255)
_MUD = (63 / 255, 42 / 255, 20 / 255)
_FAINT, _CLEAR = 50, 150  # gradients of the edges: kept if they touch a clear one, kept
_FAR = 20  # pixels; a distance counts up to this


def spatter(
    x: Float[Tensor, "n c h w"],
    rng: torch.Generator,
    mean: float,
    std: float,
    sigma: float,
    threshold: float,
    strength: float,
    mud: int,
) -> Float[Tensor, "n c h w"]:
    """A layer N(mean, std²) blurred by `sigma`, 0 below `threshold`, seen as water or as mud.

    Water: x + strength·m·colour, with m from `water`. Mud: (1-m)·x + m·colour, where m is the layer's mask blurred by
    `strength`, and 0 below 0.8. An image on which no drop falls stays.
    """
    n, c, h, w = x.shape
    layer = filters.gaussian(torch.randn((n, 1, h, w), generator=rng, device=x.device) * std + mean, sigma)
    colour = torch.tensor(_MUD if mud else _WATER, device=x.device)[None, :, None, None]
    colour = grey(colour) if c == 1 else colour
    if mud:
        mask = filters.gaussian((layer > threshold).to(x.dtype), strength)
        mask = torch.where(mask < 0.8, 0.0, mask)
        return x * (1 - mask) + mask * colour
    layer = torch.where(layer < threshold, 0.0, layer)
    # The published code keeps the low eight bits, which matters for none but extreme draws.
    return x + strength * water((layer * 255 + filters.MARGIN).floor() % 256) * colour


def water(layer: Float[Tensor, "n 1 h w"]) -> Float[Tensor, "n 1 h w"]:
    """layer · relief, scaled to the maximum 1; layers are in grey levels 0 to 255.

    The relief is the distance to the next edge of a drop, up to 20 pixels, averaged over 3×3, equalised, filtered by
    the kernel of a light from the top left, and averaged over 3×3 again; each step in whole grey levels.
    """
    depth = distance(edges(layer)).clamp(max=_FAR)
    depth = (_mean3(depth) + filters.MARGIN).floor()
    light = torch.tensor([[-2.0, -1.0, 0.0], [-1.0, 1.0, 1.0], [0.0, 1.0, 2.0]])
    relief = filters.convolved(equalised(depth), light, filters.mirrored_at_pixel).clamp(0, 255)
    drops = layer * _mean3(relief).round()
    highest = drops.amax((1, 2, 3), keepdim=True)
    return drops / torch.where(highest > 0, highest, 1.0)


def edges(levels: Float[Tensor, "n 1 h w"]) -> Bool[Tensor, "n 1 h w"]:
    """Canny's edges: peaks of |∂x| + |∂y| across the edge, above 50 if they hang together with one above 150."""
    h, w = levels.shape[-2:]
    around = F.pad(levels, (1, 1, 1, 1), mode="replicate")
    across = around[..., 2:] - around[..., :-2]
    dx = across[..., :-2, :] + 2 * across[..., 1:-1, :] + across[..., 2:, :]
    down = around[..., 2:, :] - around[..., :-2, :]
    dy = down[..., :-2] + 2 * down[..., 1:-1] + down[..., 2:]
    size = dx.abs() + dy.abs()
    outside = F.pad(size, (1, 1, 1, 1))

    def at(row: int, column: int) -> Tensor:
        return outside[..., 1 + row : 1 + row + h, 1 + column : 1 + column + w]

    tangent = 2**0.5 - 1  # of 22.5°
    flat, steep = dy.abs() < tangent * dx.abs(), dy.abs() > (tangent + 2) * dx.abs()
    rising = dx * dy < 0
    one = torch.where(rising, at(-1, 1), at(-1, -1))
    other = torch.where(rising, at(1, -1), at(1, 1))
    peak = torch.where(
        flat,
        (size > at(0, -1)) & (size >= at(0, 1)),
        torch.where(steep, (size > at(-1, 0)) & (size >= at(1, 0)), (size > one) & (size > other)),
    )
    peak &= size > _FAINT
    kept = peak & (size > _CLEAR)
    while True:
        grown = peak & (F.max_pool2d(kept.to(levels.dtype), 3, 1, 1) > 0)
        if torch.equal(grown, kept):
            return kept
        kept = grown


def distance(marked: Bool[Tensor, "n 1 h w"]) -> Float[Tensor, "n 1 h w"]:
    """Length of the shortest path to a marked pixel by steps along an axis (1), diagonal (1.4) or knight's (2.1969)."""
    far = 4.0 * sum(marked.shape[-2:])
    field = torch.where(marked[:, 0], 0.0, far).transpose(0, 1)
    for _ in range(2):  # from the top left, then from the bottom right
        field = _swept(field, far).flip(0, 2)
    return field.transpose(0, 1)[:, None]


def equalised(levels: Float[Tensor, "n 1 h w"]) -> Float[Tensor, "n 1 h w"]:
    """Levels up to 20 spread over 0 to 255, so that their shares grow evenly; an image of one level stays."""
    flat = levels.flatten(1).long()
    counts = torch.zeros((len(flat), _FAR + 1), device=levels.device)
    counts.scatter_add_(1, flat, torch.ones_like(levels).flatten(1))
    lowest = counts.gather(1, flat.amin(1, keepdim=True))
    rest = flat.shape[1] - lowest
    spread = ((counts.cumsum(1) - lowest) * (255 / rest.clamp(min=1))).round()
    spread = torch.where(rest > 0, spread, torch.arange(_FAR + 1, device=levels.device, dtype=levels.dtype))
    return spread.gather(1, flat).reshape(levels.shape)


def _swept(field: Float[Tensor, "h n w"], far: float) -> Float[Tensor, "h n w"]:
    w = field.shape[-1]
    place = torch.arange(w, device=field.device, dtype=field.dtype)
    border = F.pad(torch.full_like(field[:1], far), (2, 2), value=far)[0]
    last, before = border, border
    rows = []
    for row in field:
        above = torch.minimum(last[:, 1:-3], last[:, 3:-1]) + 1.4
        knight = torch.minimum(last[:, :-4], last[:, 4:])
        knight = torch.minimum(knight, torch.minimum(before[:, 1:-3], before[:, 3:-1])) + 2.1969
        row = torch.minimum(torch.minimum(row, last[:, 2:-2] + 1), torch.minimum(above, knight))
        row = (row - place).cummin(1).values + place
        rows.append(row)
        before, last = last, F.pad(row, (2, 2), value=far)
    return torch.stack(rows)


def _mean3(x: Tensor) -> Tensor:
    h, w = x.shape[-2:]
    x = filters.padded(x, 1, 1, filters.mirrored_at_pixel)
    x = x[..., :h, :] + x[..., 1 : h + 1, :] + x[..., 2:, :]
    return (x[..., :w] + x[..., 1 : w + 1] + x[..., 2:]) / 9
