"""ResNet-18 (He et al., 2016): the backbone of the TinyImageNet and PACS experiments."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast, final

from torch import Tensor, nn
from torch.nn import functional as F

from ..core.errors import InputError
from .fused import norm_act

if TYPE_CHECKING:
    from jaxtyping import Float


def _conv(fan_in: int, fan_out: int, size: int, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(fan_in, fan_out, size, stride, size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def stem_7x7(channels: int) -> nn.Sequential:
    """The ImageNet stem: it shrinks the image by 4 before the first block."""
    return nn.Sequential(_conv(channels, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))


def stem_3x3(channels: int) -> nn.Sequential:
    """A stem that keeps the resolution, for small images."""
    return nn.Sequential(_conv(channels, 64, 3), nn.BatchNorm2d(64), nn.ReLU())


STEMS: dict[str, Callable[[int], nn.Sequential]] = {"7x7": stem_7x7, "3x3": stem_3x3}


@final
class BasicBlock(nn.Module):
    """conv-BN-ReLU-conv-BN plus a shortcut, then ReLU."""

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(fan_in, fan_out, 3, stride)
        self.bn1 = nn.BatchNorm2d(fan_out)
        self.conv2 = _conv(fan_out, fan_out, 3)
        self.bn2 = nn.BatchNorm2d(fan_out)
        self.shortcut = (
            nn.Identity()
            if fan_in == fan_out
            else nn.Sequential(_conv(fan_in, fan_out, 1, stride), nn.BatchNorm2d(fan_out))
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(norm_act(self.bn1, self.conv1(x))))
        return F.relu(out + self.shortcut(x))


@final
class ResNet18(nn.Module):
    """ResNet-18 up to its 512 pooled features; the classifier is a separate net."""

    def __init__(self, channels: int = 3, stem: str = "7x7") -> None:
        super().__init__()
        if stem not in STEMS:
            raise InputError(f'the stem of ResNet-18 is "{stem}", but one of {", ".join(STEMS)} is allowed.')
        self.feature_width = 512
        self.stem = STEMS[stem](channels)
        self.blocks = nn.Sequential(
            *(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1)),
            *(BasicBlock(64, 128, 2), BasicBlock(128, 128, 1)),
            *(BasicBlock(128, 256, 2), BasicBlock(256, 256, 1)),
            *(BasicBlock(256, 512, 2), BasicBlock(512, 512, 1)),
        )

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b 512"]:
        conv, norm, _, *pool = self.stem
        started = norm_act(cast(nn.BatchNorm2d, norm), conv(x))
        for layer in pool:
            started = layer(started)
        out: Tensor = self.blocks(started).mean((2, 3))
        return out
