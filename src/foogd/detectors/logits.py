"""Detectors of the logits alone: MSP, max logit, energy, and the gradient of the last layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor

from ..core.fields import setting
from ..core.types import Output, Readout
from .base import Detector, energy, linear_logits

if TYPE_CHECKING:
    from jaxtyping import Float


@final
@dataclass(frozen=True)
class MSP(Detector):
    """−max_c p_c with p = softmax(g/T), in float64: in float32 all probabilities near 1 are the same number."""

    description: ClassVar[str] = "minus the largest softmax probability"
    paper: ClassVar[str] = "Hendrycks & Gimpel 2017"

    temperature: float = setting(1.0, "the logits are divided by it", gt=0.0)

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        return -torch.softmax(outputs.logits.double() / self.temperature, dim=1).amax(dim=1)


@final
@dataclass(frozen=True)
class MaxLogit(Detector):
    """−max_c g_c."""

    description: ClassVar[str] = "minus the largest logit"
    paper: ClassVar[str] = "Hendrycks et al. 2022"

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        return -outputs.logits.amax(dim=1)


@final
@dataclass(frozen=True)
class Energy(Detector):
    """−T · logsumexp(g/T)."""

    description: ClassVar[str] = "free energy of the logits"
    paper: ClassVar[str] = "Liu et al. 2020"

    temperature: float = setting(1.0, "the logits are divided by it", gt=0.0)

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        return energy(outputs.logits, self.temperature)


@final
@dataclass(frozen=True)
class GradNorm(Detector):
    """−‖C·p − 1‖₁ · ‖z‖₁, minus the L1 norm of the head's gradient of −Σ_c log p_c, in closed form."""

    description: ClassVar[str] = "minus the gradient norm of the last layer"
    paper: ClassVar[str] = "Huang et al. 2021"

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        p = torch.softmax(linear_logits(outputs, readout).double(), dim=1)
        return -(p.shape[1] * p - 1).abs().sum(dim=1) * outputs.z.double().abs().sum(dim=1)
