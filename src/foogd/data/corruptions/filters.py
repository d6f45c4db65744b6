"""Linear filters and resampling on batches; along one axis they are a matrix, so that both axes are two products."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int

MARGIN = 1e-3  # of a grey level: keeps float32 from losing a level where published code cuts off to whole ones
TRUNCATE = 4.0  # a Gaussian filter ends at this many sigma, as in skimage.filters.gaussian
_NEGLIGIBLE = 1e-4  # share of a one-sided Gaussian that may be left out: 0.03 grey levels at most

Border = Callable[[Tensor, int], Tensor]


def nearest(index: Int[Tensor, ...], size: int) -> Int[Tensor, ...]:
    """Beyond the border the last pixel counts: a a | a b c | c c."""
    return index.clamp(0, size - 1)


def mirrored(index: Int[Tensor, ...], size: int) -> Int[Tensor, ...]:
    """Beyond the border the image is mirrored at the edge: b a | a b c | c b."""
    index = index % (2 * size)
    return torch.minimum(index, 2 * size - 1 - index)


def mirrored_at_pixel(index: Int[Tensor, ...], size: int) -> Int[Tensor, ...]:
    """Beyond the border the image is mirrored at the last pixel: c b | a b c | b a."""
    period = max(2 * size - 2, 1)
    index = index % period
    return torch.minimum(index, period - index)


def padded(x: Float[Tensor, "n c h w"], rows: int, columns: int, border: Border) -> Float[Tensor, "n c hp wp"]:
    """x with `rows` and `columns` more on either side."""
    h, w = x.shape[-2:]
    x = x[..., border(torch.arange(-rows, h + rows), h).to(x.device), :]
    return x[..., border(torch.arange(-columns, w + columns), w).to(x.device)]


def along_axes(
    x: Float[Tensor, "n c h w"], rows: Float[Tensor, "hout h"], columns: Float[Tensor, "wout w"]
) -> Float[Tensor, "n c hout wout"]:
    """rows · x · columnsᵀ for every channel of every image."""
    # Products with the small matrix on the right are one large product each; on the left they are many small ones.
    x = x @ columns.to(x).T
    return (x.transpose(-1, -2).contiguous() @ rows.to(x).T).transpose(-1, -2)


def gaussian(
    x: Float[Tensor, "n c h w"], sigma: float, truncate: float = TRUNCATE, border: Border = nearest
) -> Float[Tensor, "n c h w"]:
    """A Gaussian filter over both axes that ends at `truncate` sigma."""
    if int(truncate * sigma + 0.5) == 0:
        return x
    h, w = x.shape[-2:]
    return along_axes(x, _gaussian_matrix(h, sigma, truncate, border), _gaussian_matrix(w, sigma, truncate, border))


def convolved(x: Float[Tensor, "n c h w"], kernel: Float[Tensor, "a b"], border: Border) -> Float[Tensor, "n c h w"]:
    """Correlation of every channel with one kernel of odd sides."""
    a, b = kernel.shape
    flat = padded(x, a // 2, b // 2, border).flatten(0, 1).unsqueeze(1)
    # cuDNN would round the images to ten bits, a tenth of a grey level.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return F.conv2d(flat, kernel.to(x)[None, None]).reshape(x.shape)


def motion(
    x: Float[Tensor, "n c h w"], radius: int, sigma: float, angle: Float[Tensor, " n"]
) -> Float[Tensor, "n c h w"]:
    """Σ_i k_i · x moved by i pixels along `angle` (radians), k_i ∝ exp(-i²/2σ²), i = 0 … 2·radius (ImageMagick).

    Moves are rounded to whole pixels, and beyond the border the last pixel counts.
    """
    n, c, h, w = x.shape
    weights = torch.exp(-0.5 * (torch.arange(2 * radius + 1, dtype=torch.float64) / sigma) ** 2)
    weights = weights / weights.sum()
    taps = int((weights.flip(0).cumsum(0).flip(0) > _NEGLIGIBLE).sum())
    rows, columns = torch.arange(h, device=x.device), torch.arange(w, device=x.device)
    sine, cosine = angle.sin(), angle.cos()
    flat, result = x.flatten(2), torch.zeros_like(x).flatten(2)
    for i, weight in enumerate((weights[:taps] / weights[:taps].sum()).tolist()):
        down = torch.ceil(i * sine - 0.5).long()[:, None]
        right = torch.ceil(i * cosine - 0.5).long()[:, None]
        source = nearest(rows + down, h)[:, :, None] * w + nearest(columns + right, w)[:, None, :]
        result.add_(flat.gather(2, source.reshape(n, 1, h * w).expand(n, c, h * w)), alpha=weight)
    return result.reshape(x.shape)


def zoom_matrix(size: int, factor: float) -> Float[Tensor, "size size"]:
    """The bilinear enlargement of the central ceil(size/factor) pixels, cut to `size` pixels from the middle."""
    central = math.ceil(size / factor)
    enlarged = round(central * factor)
    first = (size - central) // 2
    position = torch.arange(enlarged, dtype=torch.float64) * ((central - 1) / max(enlarged - 1, 1))
    left = position.floor().long().clamp(max=max(central - 2, 0))
    share = position - left
    matrix = torch.zeros(enlarged, size, dtype=torch.float64)
    row = torch.arange(enlarged)
    matrix[row, first + left] = 1 - share
    matrix[row, first + (left + 1).clamp(max=central - 1)] += share
    trim = (enlarged - size) // 2
    return matrix[trim : trim + size]


def box_matrix(size: int, target: int) -> Float[Tensor, "target size"]:
    """Row i averages the pixels whose centres lie in the i-th of `target` equal cells; enlarging takes the nearest."""
    scale = size / target
    half = max(scale, 1.0) / 2
    matrix = torch.zeros(target, size, dtype=torch.float64)
    for i in range(target):
        centre = (i + 0.5) * scale
        first = max(math.floor(centre - half + 0.5), 0)
        last = min(math.floor(centre + half + 0.5), size)
        matrix[i, first:last] = 1 / (last - first)
    return matrix


def _gaussian_matrix(size: int, sigma: float, truncate: float, border: Border) -> Tensor:
    radius = int(truncate * sigma + 0.5)
    offsets = torch.arange(-radius, radius + 1)
    weights = torch.exp(-0.5 * (offsets.double() / sigma) ** 2)
    source = border(torch.arange(size)[:, None] + offsets, size)
    return torch.zeros(size, size, dtype=torch.float64).scatter_add_(
        1, source, (weights / weights.sum()).expand(size, -1).contiguous()
    )
