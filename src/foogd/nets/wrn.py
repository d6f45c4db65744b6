"""Wide residual networks (Zagoruyko & Komodakis, 2016): the backbone of the CIFAR experiments."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, final

from torch import Tensor, nn

from ..core.errors import InputError
from .dropout import Dropout
from .fused import norm_act

if TYPE_CHECKING:
    from jaxtyping import Float


def _conv(fan_in: int, fan_out: int, size: int, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(fan_in, fan_out, size, stride, size // 2, bias=False)
    nn.init.normal_(conv.weight, 0.0, math.sqrt(2 / (size * size * fan_out)))
    return conv


@final
class PreActivationBlock(nn.Module):
    """BN-ReLU-conv-BN-ReLU-dropout-conv plus a shortcut, which is a 1×1 convolution where the width changes."""

    def __init__(self, fan_in: int, fan_out: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(fan_in)
        self.conv1 = _conv(fan_in, fan_out, 3, stride)
        self.bn2 = nn.BatchNorm2d(fan_out)
        self.dropout = Dropout(dropout)
        self.conv2 = _conv(fan_out, fan_out, 3)
        self.shortcut = None if fan_in == fan_out else _conv(fan_in, fan_out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        activated = norm_act(self.bn1, x)
        out = self.conv2(norm_act(self.bn2, self.conv1(activated), self.dropout))
        # The 1×1 shortcut starts at the activated input, the identity at the raw one.
        skip = x if self.shortcut is None else self.shortcut(activated)
        total: Tensor = skip + out
        return total


@final
class WideResNet(nn.Module):
    """WRN-depth-widen up to its pooled features of width 64·widen; the classifier is a separate net."""

    def __init__(self, channels: int = 3, depth: int = 40, widen: int = 2, dropout: float = 0.3) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise InputError(f"the depth of a wide residual network is {depth}, but 6n + 4 (10, 16, … 40) is allowed.")
        self.feature_width = 64 * widen
        widths = [16, 16 * widen, 32 * widen, 64 * widen]
        self.stem = _conv(channels, 16, 3)
        self.blocks = nn.Sequential(
            *(
                PreActivationBlock(
                    fan_in=widths[stage - 1] if first else widths[stage],
                    fan_out=widths[stage],
                    stride=2 if first and stage > 1 else 1,
                    dropout=dropout,
                )
                for stage in (1, 2, 3)
                for first in [True] + [False] * ((depth - 4) // 6 - 1)
            )
        )
        self.bn = nn.BatchNorm2d(self.feature_width)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d"]:
        return norm_act(self.bn, self.blocks(self.stem(x))).mean((2, 3))
