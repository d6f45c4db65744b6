"""Random views of whole batches of images in [0, 1], on the batch's device and without a loop over images.

Nothing here looks at a value, so everything runs on `device="meta"`; CUDA graphs need the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.errors import InputError
from ..core.types import Rng

if TYPE_CHECKING:
    from jaxtyping import Float, Int

AREA = (0.2, 1.0)
"""The share of the image that a crop keeps."""
ASPECT = 4 / 3
"""The width of a crop is at most this many times its height, and the reverse."""
JITTER = 0.8
"""Brightness, contrast and saturation change by factors in 1 ± this."""
HUE = 0.2
"""The hue turns by at most this share of the colour circle."""

MAX_DEPTH = 3  # operations in a chain of AugMix
OPERATIONS = (
    "autocontrast", "equalize", "posterize", "solarize", "rotate", "shear_x", "shear_y", "translate_x", "translate_y"
)  # fmt: skip


def contrastive_view(x: Float[Tensor, "b c h w"], rng: Rng) -> Float[Tensor, "b c h w"]:
    """A random crop resized to the full image, mirrored, with jittered colours or in grey (Chen et al., ICML 2020).

    Crops keep 20 to 100 % of the area at an aspect of 3/4 to 4/3. Half of the images are mirrored. 80 % get new
    brightness, contrast, saturation (factors of 0.2 to 1.8) and hue (± 0.2 turns), in this order; then 20 % become
    grey. Where there are not three channels, only brightness and contrast change. Draws from `rng("view")`.
    """
    u = torch.rand(11, len(x), generator=rng("view"), device=x.device, dtype=_precision(x))
    area = AREA[0] + (AREA[1] - AREA[0]) * u[0]
    out = _crop_resized(x.to(u.dtype), area, ASPECT ** (2 * u[1] - 1), u[2], u[3], mirrored=u[4] < 0.5)
    factors = 1 + JITTER * (2 * u[5:8] - 1)
    jittered = _jittered(out, factors[0], factors[1], factors[2], HUE * (2 * u[8] - 1))
    out = torch.where(_each(u[9] < 0.8), jittered, out)
    if x.shape[1] == 3:
        out = torch.where(_each(u[10] < 0.2), _grey(out), out)
    return out.clamp(0, 1).to(x.dtype)


def augmix(
    x: Float[Tensor, "b c h w"], rng: Rng, *, severity: float = 3.0, width: int = 3, alpha: float = 1.0
) -> Float[Tensor, "b c h w"]:
    """AugMix (Hendrycks et al., ICLR 2020): m·x + (1−m)·Σ_k w_k chain_k(x), w ~ Dirichlet(α), m ~ Beta(α, α).

    Each of the `width` chains is 1 to 3 operations, drawn for each image with a level in [0.1, severity]. At level 10
    an image turns by 30°, is sheared by 0.3 or moved by a third, loses all bits, or is solarised from black on.
    Draws from `rng("view")`.
    """
    if not 1 <= severity <= 10:
        raise InputError(f"severity is {severity}; it must be from 1 to 10.")
    if width < 1:
        raise InputError(f"width is {width}; it must be 1 or more.")
    if not alpha > 0:
        raise InputError(f"alpha is {alpha}; it must be above 0.")
    stream, kind, b = rng("view"), _precision(x), len(x)
    depth = torch.randint(1, MAX_DEPTH + 1, (width * b,), generator=stream, device=x.device)
    operation = torch.randint(len(OPERATIONS), (MAX_DEPTH, width * b), generator=stream, device=x.device)
    level = 0.1 + (severity - 0.1) * torch.rand(operation.shape, generator=stream, device=x.device, dtype=kind)
    sign = 2 * torch.randint(2, operation.shape, generator=stream, device=x.device, dtype=kind) - 1
    # Dirichlet and beta variables are shares of gamma variables.
    gamma = _gamma(torch.full((width + 2, b), alpha, device=x.device, dtype=kind), stream)
    clean = x.to(kind)
    chains = clean.repeat(width, 1, 1, 1)
    for step in range(MAX_DEPTH):
        changed = _operate(chains, operation[step], level[step], sign[step])
        chains = torch.where(_each(step < depth), changed, chains)
    weights = gamma[:width] / gamma[:width].sum(dim=0)
    mixture = (weights.view(width, b, 1, 1, 1) * chains.reshape(width, *x.shape)).sum(dim=0)
    m = _each(gamma[-1] / (gamma[-1] + gamma[-2]))
    return (m * clean + (1 - m) * mixture).clamp(0, 1).to(x.dtype)


# -------------------------------------------------------------------------------------------------------- operations


def autocontrast(x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
    """Each channel stretched to the whole range [0, 1]; a channel of one value stays as it is."""
    low, high = x.amin(dim=(2, 3), keepdim=True), x.amax(dim=(2, 3), keepdim=True)
    return torch.where(high > low, (x - low) / torch.where(high > low, high - low, 1.0), x)


def equalize(x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
    """Each channel with its histogram of 256 grey levels made flat, by the integer rule of PIL's `ImageOps.equalize`.

    A channel of one grey level, or of so few pixels that the rule has a step of 0, stays as it is.
    """
    level = _levels(x).long().flatten(2)
    count = level.new_zeros(*level.shape[:2], 256).scatter_add_(2, level, torch.ones_like(level))
    last = count.gather(2, level.amax(dim=2, keepdim=True))
    step = (level.shape[2] - last).div(255, rounding_mode="floor")
    below = count.cumsum(dim=2) - count
    table = (below + step.div(2, rounding_mode="floor")).div(step.clamp_min(1), rounding_mode="floor").clamp_max(255)
    flat = (table.gather(2, level).to(x.dtype) / 255).view(x.shape)
    return torch.where((step > 0)[..., None], flat, x)


def posterize(x: Float[Tensor, "b c h w"], bits: Int[Tensor, " b"]) -> Float[Tensor, "b c h w"]:
    """Grey levels of which only the upper bits are kept, as many (0 to 8) as `bits` says for each image."""
    lost = 8 - _each(bits)
    return (_levels(x).to(bits.dtype) >> lost << lost).to(x.dtype) / 255


def solarize(x: Float[Tensor, "b c h w"], threshold: Float[Tensor, " b"]) -> Float[Tensor, "b c h w"]:
    """Values at or above each image's threshold inverted to 1 − x; a threshold above 1 inverts nothing."""
    return torch.where(x < _each(threshold), x, 1 - x)


def warp(
    x: Float[Tensor, "b c h w"],
    *,
    degrees: Float[Tensor, " b"],
    shear_x: Float[Tensor, " b"],
    shear_y: Float[Tensor, " b"],
    translate_x: Float[Tensor, " b"],
    translate_y: Float[Tensor, " b"],
) -> Float[Tensor, "b c h w"]:
    """Bilinear samples at other places, black outside: each image turned, then sheared, then moved by its own amounts.

    A positive angle turns the image anticlockwise about its centre. Then the value at (x, y), in pixels from the upper
    left corner, comes from (x + shear_x·y + translate_x, y + shear_y·x + translate_y).
    """
    h, w = x.shape[2:]
    column, row = _centres(x)
    right = column + _plane(shear_x) * row + _plane(translate_x) - w / 2
    down = row + _plane(shear_y) * column + _plane(translate_y) - h / 2
    angle = torch.deg2rad(_plane(degrees))
    cos, sin = torch.cos(angle), torch.sin(angle)
    return _sampled(x, cos * right - sin * down, sin * right + cos * down, beyond="zeros")


def _operate(x: Tensor, operation: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Each image after the operation that is chosen for it, with the strengths of the published AugMix."""
    h, w = x.shape[2:]

    def chosen(name: str) -> Tensor:
        return operation == OPERATIONS.index(name)

    def amount(name: str, at_ten: float, whole: bool = True) -> Tensor:
        size = level * (at_ten / 10)
        return torch.where(chosen(name), sign * (size.floor() if whole else size), 0.0)

    out = warp(
        x,
        degrees=amount("rotate", 30),
        shear_x=amount("shear_x", 0.3, whole=False),
        shear_y=amount("shear_y", 0.3, whole=False),
        translate_x=amount("translate_x", w / 3),
        translate_y=amount("translate_y", h / 3),
    )
    out = torch.where(_each(chosen("autocontrast")), autocontrast(x), out)
    out = torch.where(_each(chosen("equalize")), equalize(x), out)
    out = torch.where(_each(chosen("posterize")), posterize(x, 4 - (level * 0.4).int()), out)
    threshold = (255.5 - (level * 25.6).floor()) / 255  # between two grey levels, so that rounding cannot decide
    return torch.where(_each(chosen("solarize")), solarize(x, threshold), out)


# -------------------------------------------------------------------------------------------------- crops and colours


def _crop_resized(x: Tensor, area: Tensor, aspect: Tensor, across: Tensor, down: Tensor, *, mirrored: Tensor) -> Tensor:
    """Boxes of a share of the area and an aspect, at a share of the free way from the corner, as large as x."""
    h, w = x.shape[2:]
    # Where the box would not fit into the image, its aspect gives way and its area does not.
    shape = torch.minimum(torch.maximum(aspect * (h / w), area), 1 / area)
    width, height = _plane(torch.sqrt(area * shape)), _plane(torch.sqrt(area / shape))
    column, row = _centres(x)
    right = width * torch.where(_plane(mirrored), w / 2 - column, column - w / 2)
    middle_x, middle_y = (1 - width) * (_plane(across) - 0.5) * w, (1 - height) * (_plane(down) - 0.5) * h
    # Beyond the outermost pixel centres their values count: a box at the edge reaches up to half a pixel further.
    return _sampled(x, right + middle_x, height * (row - h / 2) + middle_y, beyond="border")


def _jittered(x: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor, turn: Tensor) -> Tensor:
    """Brightness, contrast, saturation and hue changed in this order, the result of each cut off at 0 and 1."""
    x = (_each(brightness) * x).clamp(0, 1)
    colour = x.shape[1] == 3
    mean = (_grey(x) if colour else x).mean(dim=(1, 2, 3))
    x = torch.lerp(_each(mean).expand_as(x), x, _each(contrast)).clamp(0, 1)
    if not colour:
        return x
    x = torch.lerp(_grey(x), x, _each(saturation)).clamp(0, 1)
    return _hue_turned(x, turn)


def _grey(x: Tensor) -> Tensor:
    """The luma of ITU-R BT.601 in all three channels."""
    return (0.299 * x[:, :1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:]).expand_as(x)


def _hue_turned(x: Tensor, turn: Tensor) -> Tensor:
    """The colours of x with the hue of HSV turned by a share of the circle."""
    red, green, blue = x.unbind(dim=1)
    value, chroma = x.amax(dim=1), x.amax(dim=1) - x.amin(dim=1)
    unit = torch.where(chroma > 0, chroma, 1.0)
    sextant = torch.where(
        value == red,
        (green - blue) / unit,
        torch.where(value == green, (blue - red) / unit + 2, (red - green) / unit + 4),
    )
    hue = sextant + 6 * turn.view(-1, 1, 1)

    def channel(start: int) -> Tensor:
        distance = (start + hue).remainder(6)
        return value - chroma * torch.minimum(distance, 4 - distance).clamp(0, 1)

    return torch.stack([channel(5), channel(3), channel(1)], dim=1)


# ------------------------------------------------------------------------------------------------------ shared parts


def _precision(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _gamma(alpha: Tensor, stream: torch.Generator) -> Tensor:
    # torch 2.11 cannot draw gamma variables without values.
    return alpha if alpha.is_meta else torch._standard_gamma(alpha, generator=stream)


def _each(value: Tensor) -> Tensor:
    """One value an image, in a shape that fits the images."""
    return value.view(-1, 1, 1, 1)


def _plane(value: Tensor) -> Tensor:
    return value.view(-1, 1, 1)


def _centres(x: Tensor) -> tuple[Tensor, Tensor]:
    """Where the centres of the columns and rows of pixels lie, from the upper left corner."""
    h, w = x.shape[2:]
    column = torch.arange(w, device=x.device, dtype=x.dtype) + 0.5
    return column, (torch.arange(h, device=x.device, dtype=x.dtype) + 0.5)[:, None]


def _sampled(x: Tensor, right: Tensor, down: Tensor, *, beyond: str) -> Tensor:
    """Bilinear samples at so many pixels right of and below the centre of the image."""
    # Places are products of numbers, not of matrices, which torch may be told to compute with ten bits.
    h, w = x.shape[2:]
    grid = torch.stack([(right * (2 / w)).expand(len(x), h, w), (down * (2 / h)).expand(len(x), h, w)], dim=3)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode=beyond, align_corners=False)


def _levels(x: Tensor) -> Tensor:
    """The whole grey levels, 0 to 255."""
    return (x * 255).round().clamp(0, 255)
