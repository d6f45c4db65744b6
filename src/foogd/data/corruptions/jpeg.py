"""Baseline JPEG there and back without its entropy coding, which loses nothing (ITU-T T.81, as libjpeg does it)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

# ITU-T T.81, tables K.1 and K.2.
_LUMINANCE = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
_CHROMINANCE = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    (99, 99, 99, 99, 99, 99, 99, 99),
    (99, 99, 99, 99, 99, 99, 99, 99),
    (99, 99, 99, 99, 99, 99, 99, 99),
    (99, 99, 99, 99, 99, 99, 99, 99),
)
# JFIF: Y, Cb and Cr of R, G and B, and back from (Y, Cb - 128, Cr - 128).
_TO_YCC = ((0.299, 0.587, 0.114), (-0.168735892, -0.331264108, 0.5), (0.5, -0.418687589, -0.081312411))
_TO_RGB = ((1.0, 0.0, 1.402), (1.0, -0.344136286, -0.714136286), (1.0, 1.772, 0.0))


def jpeg_compression(x: Float[Tensor, "n c h w"], rng: torch.Generator, quality: int) -> Float[Tensor, "n c h w"]:
    """JPEG at `quality`: colour at half the resolution (4:2:0), 8×8 cosine transform, quantisation, and back."""
    levels = (x * 255).round()
    if x.shape[1] == 1:
        return _quantised(levels, _table(_LUMINANCE, quality)) / 255
    h, w = x.shape[-2:]
    ycc = torch.einsum("kc,nchw->nkhw", torch.tensor(_TO_YCC, device=x.device), levels)
    luma = _quantised(_whole(ycc[:, :1]), _table(_LUMINANCE, quality))
    chroma = _quantised(_halved(_whole(ycc[:, 1:] + 128)), _table(_CHROMINANCE, quality))
    ycc = torch.cat([luma, _doubled(chroma)[..., :h, :w] - 128], 1)
    return _whole(torch.einsum("ck,nkhw->nchw", torch.tensor(_TO_RGB, device=x.device), ycc)) / 255


def _table(base: tuple[tuple[int, ...], ...], quality: int) -> Float[Tensor, " 64"]:
    # libjpeg's scaling: 50 is the table itself, 100 is all ones.
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    return ((torch.tensor(base) * scale + 50) // 100).clamp(1, 255).float().flatten()


def _quantised(levels: Float[Tensor, "n c h w"], table: Float[Tensor, " 64"]) -> Float[Tensor, "n c h w"]:
    n, c, h, w = levels.shape
    levels = F.pad(levels, (0, -w % 8, 0, -h % 8), mode="replicate")
    rows, columns = levels.shape[-2] // 8, levels.shape[-1] // 8
    blocks = levels.reshape(n, c, rows, 8, columns, 8).transpose(3, 4).reshape(-1, 64)
    transform, table = _cosines().to(levels), table.to(levels)
    # libjpeg has coefficients in eighths, and rounds halves of the table's steps away from 0; such ties are frequent.
    eighths = ((blocks - 128) @ transform.T * 8).round()
    coefficients = eighths.sign() * ((eighths.abs() + 4 * table) / (8 * table)).floor() * table
    blocks = _whole(coefficients @ transform + 128)
    return blocks.reshape(n, c, rows, columns, 8, 8).transpose(3, 4).reshape(levels.shape)[..., :h, :w]


def _cosines() -> Float[Tensor, "64 64"]:
    # The orthonormal cosine transform of an 8×8 block, written as one matrix.
    k = torch.arange(8, dtype=torch.float64)
    line = torch.cos(math.pi / 8 * k[:, None] * (k + 0.5)) / 2
    line[0] /= math.sqrt(2)
    return torch.kron(line, line)


def _halved(levels: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h2 w2"]:
    # Means of 2×2; libjpeg rounds their halves down and up in turn along a row.
    levels = F.pad(levels, (0, levels.shape[-1] % 2, 0, levels.shape[-2] % 2), mode="replicate")
    sums = levels[..., ::2, ::2] + levels[..., 1::2, ::2] + levels[..., ::2, 1::2] + levels[..., 1::2, 1::2]
    bias = 1 + torch.arange(sums.shape[-1], device=levels.device) % 2
    return ((sums + bias) / 4).floor()


def _doubled(levels: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h2 w2"]:
    # libjpeg's "fancy" enlargement: 3/4 of the nearest and 1/4 of the next sample along each axis.
    rows = F.pad(levels, (0, 0, 1, 1), mode="replicate")
    sums = torch.stack([3 * levels + rows[..., :-2, :], 3 * levels + rows[..., 2:, :]], -2).flatten(-3, -2)
    columns = F.pad(sums, (1, 1, 0, 0), mode="replicate")
    left = ((3 * sums + columns[..., :-2] + 8) / 16).floor()
    right = ((3 * sums + columns[..., 2:] + 7) / 16).floor()
    return torch.stack([left, right], -1).flatten(-2)


def _whole(levels: Tensor) -> Tensor:
    return (levels + 0.5).floor().clamp(0, 255)
