"""The backbone in bfloat16 on a GPU; its weights, its batch statistics and everything after it stay in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import InputError


def resolve_precision(name: str, device: torch.device, *, graphs: bool) -> str:
    """fp32 or bf16; `auto` takes bf16 where steps are graphs: launched one by one, casts cost more than they gain."""
    if name == "auto":
        return "bf16" if graphs and device.type == "cuda" else "fp32"
    if name == "bf16" and device.type != "cuda":
        raise InputError("precision = 'bf16' is not possible: it needs a GPU; use auto or fp32")
    return name


def in_bf16(backbone: nn.Module) -> nn.Module:
    """The same module with its forward pass under autocast and channels last, and float32 features as its output.

    It gets a class of its own, so that copies and the names of its values stay as they are.
    """
    cls: Any = type(backbone)

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            out: Tensor = cls.forward(self, x.contiguous(memory_format=torch.channels_last))
        return out.float()

    backbone.__class__ = type(f"{cls.__name__}InBf16", (cls,), {"forward": forward})
    return backbone
