"""A small convolutional network for small images, fast enough to train a federation on a processor."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import Tensor, nn

from .dropout import Dropout
from .fused import norm_act

if TYPE_CHECKING:
    from jaxtyping import Float


@final
class SmallCNN(nn.Module):
    """Four times conv 3×3, BN and ReLU (strides 2, 2, 1, 2), then average pooling: 4·width non-negative features."""

    def __init__(self, channels: int = 1, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.feature_width = 4 * width
        widths = (channels, width // 2, width, 2 * width, 4 * width)
        self.stages = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(fan_in, fan_out, 3, stride, padding=1, bias=False),
                    nn.BatchNorm2d(fan_out),
                    nn.ReLU(),
                    Dropout(dropout),
                )
                for (fan_in, fan_out), stride in zip(pairwise(widths), (2, 2, 1, 2), strict=True)
            )
        )

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d"]:
        # Channels-last is faster on a processor; the result is the same up to rounding.
        x = x.contiguous(memory_format=torch.channels_last)
        for conv, norm, _, dropout in cast(Iterable[Iterable[Any]], self.stages):
            x = norm_act(norm, conv(x), dropout)
        return x.mean((2, 3))
