"""Common corruptions of images, after CIFAR-10-C, Tiny-ImageNet-C and ImageNet-C (Hendrycks and Dietterich 2019).

They work on whole batches, on any device. To add one: a function of (images, generator, constants…) in `corruptions/`,
its entry in `CORRUPTIONS`, its five constants in each table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..core.errors import InputError
from ..core.random import generator
from .corruptions.blur import defocus_blur, gaussian_blur, glass_blur, motion_blur, zoom_blur
from .corruptions.digital import brightness, contrast, elastic_transform, pixelate, saturate
from .corruptions.filters import MARGIN
from .corruptions.jpeg import jpeg_compression
from .corruptions.noise import gaussian_noise, impulse_noise, shot_noise, speckle_noise
from .corruptions.spatter import spatter
from .corruptions.weather import fog, frost, snow

Images = TypeVar("Images", Tensor, np.ndarray[Any, Any])

_CHUNK, _CHUNK_CPU = 8192, 128  # images that are widened to floats at a time; on a CPU they should fit its cache


def corrupt(images: Images, name: str, severity: int, seed: int, constants: str = "cifar") -> Images:
    """Images N×H×W×C of uint8 after the corruption `name` at severity 1 to 5; one seed repeats on one kind of device.

    `constants` names the table: "cifar" (up to 32 pixels), "tiny" (64 pixels) or "imagenet" (larger ones).
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
    chunk = _CHUNK_CPU if clean.device.type == "cpu" else _CHUNK
    for start in range(0, len(clean), chunk):
        x = clean[start : start + chunk].permute(0, 3, 1, 2).contiguous().float() / 255
        changed = CORRUPTIONS[name](x, stream, *table[severity - 1]).clamp(0, 1)
        # The published files cut off to whole grey levels.
        result[start : start + chunk] = (changed * 255 + MARGIN).floor().to(torch.uint8).permute(0, 2, 3, 1)
    return result if isinstance(images, Tensor) else result.numpy()


CORRUPTIONS: dict[str, Callable[..., Tensor]] = {
    "gaussian_noise": gaussian_noise,
    "shot_noise": shot_noise,
    "impulse_noise": impulse_noise,
    "speckle_noise": speckle_noise,
    "gaussian_blur": gaussian_blur,
    "glass_blur": glass_blur,
    "defocus_blur": defocus_blur,
    "motion_blur": motion_blur,
    "zoom_blur": zoom_blur,
    "fog": fog,
    "frost": frost,
    "snow": snow,
    "spatter": spatter,
    "contrast": contrast,
    "brightness": brightness,
    "saturate": saturate,
    "jpeg_compression": jpeg_compression,
    "pixelate": pixelate,
    "elastic_transform": elastic_transform,
}

# The published constants; "imagenet" as the package imagecorruptions-imaug has them. That differs from the files of
# ImageNet-C in two rows: frost has six photographs, enlarged by 1.1, instead of five in their own size, and
# elastic_transform has no affine map, and displacements of its own.
CONSTANTS: Mapping[str, Mapping[str, tuple[tuple[float, ...], ...]]] = {
    "cifar": {
        "gaussian_noise": ((0.04,), (0.06,), (0.08,), (0.09,), (0.1,)),
        "shot_noise": ((500,), (250,), (100,), (75,), (50,)),
        "impulse_noise": ((0.01,), (0.02,), (0.03,), (0.05,), (0.07,)),
        "speckle_noise": ((0.06,), (0.1,), (0.12,), (0.16,), (0.2,)),
        "gaussian_blur": ((0.4,), (0.6,), (0.7,), (0.8,), (1.0,)),
        "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
        "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
        "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
        "zoom_blur": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
        "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
        "frost": ((1, 0.2, 0.2, 5), (1, 0.3, 0.2, 5), (0.9, 0.4, 0.2, 5), (0.85, 0.4, 0.2, 5), (0.75, 0.45, 0.2, 5)),
        "snow": (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
        "spatter": (
            (0.62, 0.1, 0.7, 0.7, 0.5, 0),
            (0.65, 0.1, 0.8, 0.7, 0.5, 0),
            (0.65, 0.3, 1, 0.69, 0.5, 0),
            (0.65, 0.1, 0.7, 0.69, 0.6, 1),
            (0.65, 0.1, 0.5, 0.68, 0.6, 1),
        ),
        "contrast": ((0.75,), (0.5,), (0.4,), (0.3,), (0.15,)),
        "brightness": ((0.05,), (0.1,), (0.15,), (0.2,), (0.3,)),
        "saturate": ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
        "jpeg_compression": ((80,), (65,), (58,), (50,), (40,)),
        "pixelate": ((0.95,), (0.9,), (0.85,), (0.75,), (0.65,)),
        "elastic_transform": (
            (0, 0, 0.08),
            (0.05, 0.2, 0.07),
            (0.08, 0.06, 0.06),
            (0.1, 0.04, 0.05),
            (0.1, 0.03, 0.03),
        ),
    },
    "tiny": {
        "gaussian_noise": ((0.04,), (0.08,), (0.12,), (0.15,), (0.18,)),
        "shot_noise": ((250,), (100,), (50,), (30,), (15,)),
        "impulse_noise": ((0.01,), (0.02,), (0.05,), (0.08,), (0.14,)),
        "speckle_noise": ((0.15,), (0.2,), (0.25,), (0.3,), (0.35,)),
        "gaussian_blur": ((0.5,), (0.75,), (1.0,), (1.25,), (1.5,)),
        "glass_blur": ((0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2)),
        "defocus_blur": ((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)),
        "motion_blur": ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)),
        "zoom_blur": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
        "fog": ((0.4, 3), (0.7, 3), (1, 2.5), (1.5, 2), (2, 1.75)),
        "frost": ((1, 0.3, 0.3, 5), (0.9, 0.4, 0.3, 5), (0.8, 0.45, 0.3, 5), (0.75, 0.5, 0.3, 5), (0.7, 0.55, 0.3, 5)),
        "snow": (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.8),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.8),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.7),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.65),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.6),
        ),
        "spatter": (
            (0.62, 0.1, 0.7, 0.7, 0.6, 0),
            (0.65, 0.1, 0.8, 0.7, 0.6, 0),
            (0.65, 0.3, 1, 0.69, 0.6, 0),
            (0.65, 0.1, 0.7, 0.68, 0.6, 1),
            (0.65, 0.1, 0.5, 0.67, 0.6, 1),
        ),
        "contrast": ((0.4,), (0.3,), (0.2,), (0.1,), (0.05,)),
        "brightness": ((0.1,), (0.2,), (0.3,), (0.4,), (0.5,)),
        "saturate": ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (30, 0.2)),
        "jpeg_compression": ((65,), (58,), (50,), (40,), (25,)),
        "pixelate": ((0.9,), (0.8,), (0.7,), (0.6,), (0.5,)),
        "elastic_transform": (
            (0, 0, 0.08),
            (0.05, 0.3, 0.06),
            (0.1, 0.08, 0.06),
            (0.1, 0.03, 0.03),
            (0.16, 0.03, 0.02),
        ),
    },
    "imagenet": {
        "gaussian_noise": ((0.08,), (0.12,), (0.18,), (0.26,), (0.38,)),
        "shot_noise": ((60,), (25,), (12,), (5,), (3,)),
        "impulse_noise": ((0.03,), (0.06,), (0.09,), (0.17,), (0.27,)),
        "speckle_noise": ((0.15,), (0.2,), (0.35,), (0.45,), (0.6,)),
        "gaussian_blur": ((1.0,), (2.0,), (3.0,), (4.0,), (6.0,)),
        "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
        "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
        "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
        "zoom_blur": ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
        "fog": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
        "frost": ((1, 0.4, 1.1, 6), (0.8, 0.6, 1.1, 6), (0.7, 0.7, 1.1, 6), (0.65, 0.7, 1.1, 6), (0.6, 0.75, 1.1, 6)),
        "snow": (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
        "spatter": (
            (0.65, 0.3, 4, 0.69, 0.6, 0),
            (0.65, 0.3, 3, 0.68, 0.6, 0),
            (0.65, 0.3, 2, 0.68, 0.5, 0),
            (0.65, 0.3, 1, 0.65, 1.5, 1),
            (0.67, 0.4, 1, 0.65, 1.5, 1),
        ),
        "contrast": ((0.4,), (0.3,), (0.2,), (0.1,), (0.05,)),
        "brightness": ((0.1,), (0.2,), (0.3,), (0.4,), (0.5,)),
        "saturate": ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)),
        "jpeg_compression": ((25,), (18,), (15,), (10,), (7,)),
        "pixelate": ((0.6,), (0.5,), (0.4,), (0.3,), (0.25,)),
        "elastic_transform": (
            (0.0625, 0.01, 0),
            (0.08125, 0.01, 0),
            (0.10625, 0.01, 0),
            (0.125, 0.01, 0),
            (0.15, 0.01, 0),
        ),
    },
}
