"""Noise on every value by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float


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


def _normal(x: Tensor, rng: torch.Generator) -> Tensor:
    return torch.randn(x.shape, generator=rng, device=x.device)
