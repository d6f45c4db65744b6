"""Dropout whose randomness is an argument: its masks come from a generator that the engine binds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from ..core.errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Float


@final
class Dropout(nn.Module):
    """x ↦ x·m/(1−p) with m ~ Bernoulli(1−p) in train mode, the identity in eval mode (Srivastava et al. 2014)."""

    generator: torch.Generator | None

    def __init__(self, p: float, channelwise: bool = False) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise InputError(f"dropout is {p}, but a share of at least 0 and below 1 is allowed.")
        self.p = p
        self.channelwise = channelwise
        self.generator = None

    def forward(self, x: Float[Tensor, "b ..."]) -> Float[Tensor, "b ..."]:
        if not self.training or self.p == 0:
            return x
        if self.generator is None and not x.is_meta:
            # Falling back to torch's global generator would make results depend on who ran before.
            raise RuntimeError("dropout has no random stream: call bind_dropout(nets, stream) before training")
        keep = x.new_empty(*x.shape[:2], *[1] * (x.ndim - 2)) if self.channelwise else torch.empty_like(x)
        keep.bernoulli_(1 - self.p, generator=self.generator)
        return x * keep.div_(1 - self.p)

    def __deepcopy__(self, memo: dict[int, Any]) -> Dropout:
        # A copy draws from the same stream: the stream belongs to the engine, and cloning it would repeat its masks.
        copy = Dropout(self.p, self.channelwise).train(self.training)
        copy.generator = self.generator
        memo[id(self)] = copy
        return copy

    def extra_repr(self) -> str:
        return f"p={self.p}" + (", channelwise=True" if self.channelwise else "")


def bind_dropout(nets: nn.Module, stream: torch.Generator | None) -> None:
    """Let every `Dropout` below `nets` draw its masks from `stream`."""
    for module in nets.modules():
        if isinstance(module, Dropout):
            module.generator = stream


def own_dropout(module: nn.Module) -> None:
    """Replace torch's dropout layers below `module` by ours, in place; functional calls cannot be reached."""
    for path, parent in list(module.named_modules()):
        if _draws_globally(parent):
            raise InputError(
                f'the layer "{path}" ({type(parent).__name__}) draws from torch\'s global random generator: '
                "set its dropout to 0 or use nn.Dropout layers."
            )
        for name, child in parent._modules.items():
            if isinstance(child, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)):
                parent._modules[name] = Dropout(child.p, not isinstance(child, nn.Dropout)).train(child.training)


def _draws_globally(module: nn.Module) -> bool:
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        return module.dropout > 0
    return isinstance(module, (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU))
