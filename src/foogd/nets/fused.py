"""Batch normalisation, ReLU and dropout as one step on a GPU at the speed of its memory; elsewhere the plain layers."""

from __future__ import annotations

import functools
import subprocess
import warnings
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .dropout import Dropout


def norm_act(norm: nn.BatchNorm2d, x: Tensor, dropout: Dropout | None = None) -> Tensor:
    """dropout(relu(norm(x))), by fused kernels where x is a channels-last batch in bfloat16 on a GPU in train mode."""
    if not _fits(norm, x, dropout):
        out = F.relu(norm(x))
        return out if dropout is None else dropout(out)
    p, seed = 0.0, None
    if dropout is not None and _drops(dropout):
        # One number from the stream; the kernels derive the mask of every element from it, forward and backward.
        p = dropout.p
        seed = torch.randint(2**63 - 1, (1,), generator=dropout.generator, device=x.device)
    fused: Tensor = NormAct.apply(  # type: ignore[no-untyped-call]
        x,
        norm.weight,
        norm.bias,
        norm.running_mean,
        norm.running_var,
        norm.num_batches_tracked,
        norm.momentum,
        norm.eps,
        p,
        seed,
    )
    return fused


class NormAct(torch.autograd.Function):
    """The fused step; for the backward pass it keeps x, the batch statistics and the seed, and no mask."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        counter: Tensor | None,
        momentum: float,
        eps: float,
        p: float,
        seed: Tensor | None,
    ) -> Tensor:
        kernels = _kernels(x.device)
        assert kernels is not None
        y, mean, rstd = kernels.forward(
            x, weight, bias, running_mean, running_var, counter, float(momentum), float(eps), p, seed
        )
        ctx.save_for_backward(x, weight, bias, mean, rstd, seed)
        ctx.p, ctx.kernels = p, kernels
        out: Tensor = y
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd, seed = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x, grad_weight, grad_bias = ctx.kernels.backward(grad, x, weight, bias, mean, rstd, ctx.p, seed, needs_x)
        return grad_x, grad_weight if needs_weight else None, grad_bias if needs_bias else None, *[None] * 7


def _fits(norm: nn.BatchNorm2d, x: Tensor, dropout: Dropout | None) -> bool:
    """Whether the kernels can stand in for the layers here."""
    if not (_on_gpu(x) and x.dtype == torch.bfloat16 and x.ndim == 4):
        return False
    if type(norm) is not nn.BatchNorm2d or not norm.training or norm.momentum is None:
        return False
    if norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks:
        return False
    values = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    if any(value is None or not _plain(value, x, torch.float32) for value in values):
        return False
    if norm.num_batches_tracked is not None and not _plain(norm.num_batches_tracked, x, torch.int64):
        return False
    if dropout is not None and _drops(dropout) and (dropout.channelwise or dropout.generator is None):
        return False
    # One value a channel is an error, which the plain layer reports; places are counted in 32 bits.
    if not (x.shape[1] == norm.num_features and x.numel() > x.shape[1] > 0 and x.numel() < 2**31):
        return False
    return x.is_contiguous(memory_format=torch.channels_last) and _kernels(x.device) is not None


def _drops(dropout: Dropout) -> bool:
    return dropout.training and dropout.p > 0


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _plain(value: Tensor, x: Tensor, dtype: torch.dtype) -> bool:
    return value.dtype == dtype and value.device == x.device and value.is_contiguous()


@functools.cache
def _kernels(device: torch.device) -> ModuleType | None:
    """The kernels where they run; None without Triton, without the C compiler that it needs, or on an old GPU."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return None
    try:
        from . import kernels
    except ImportError:
        return None
    one = torch.ones(16, device=device)
    x = torch.zeros(2, 16, 2, 2, device=device, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    try:
        kernels.forward(x, one, one, one.clone(), one.clone(), None, 0.1, 1e-5, 0.0, None)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        text = " ".join(str(error).split())
        warnings.warn(f"Triton does not work here ({text}): the plain layers are used, which are slower.", stacklevel=2)
        return None
    return kernels
