"""Generators of features and of images, and the discriminator that image generators learn from."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Norm = TypeVar("Norm", nn.BatchNorm1d, nn.BatchNorm2d)

START_SIDE = 4  # of the map that the first layer makes of the latent
LARGEST_SIDE = 64  # that of DCGAN itself; larger images are resized


@final
class FeatureGenerator(nn.Module):
    """Features of a class: [ε ; onehot(y)] → Linear → BN → ReLU → Linear, as in FOSTER (Yu et al., ICLR 2023)."""

    def __init__(self, feature_width: int, num_classes: int, latent: int = 64, hidden: int = 512) -> None:
        super().__init__()
        self.latent = latent
        self.num_classes = num_classes
        self.net = nn.Sequential(
            nn.Linear(latent + num_classes, hidden),
            _uncounted(nn.BatchNorm1d(hidden)),
            nn.ReLU(),
            nn.Linear(hidden, feature_width),
        )

    def forward(self, eps: Float[Tensor, "n latent"], y: Int[Tensor, " n"]) -> Float[Tensor, "n d"]:
        one_hot = y[:, None] == torch.arange(self.num_classes, device=y.device)
        out: Tensor = self.net(torch.cat([eps, one_hot.to(eps.dtype)], dim=1))
        return out


@final
class ImageGenerator(nn.Module):
    """Images in [0, 1] from a latent by transposed convolutions: the DCGAN of Radford et al., ICLR 2016.

    A first layer makes a map of 4×4, each further one doubles its side until it is at least twice the longer side of
    the image, but at most 64: 100-512-256-128-64-3 and 64×64 for images of 3×32×32. The square is then averaged down
    or, where the image is larger, interpolated up to the image's height and width.
    """

    def __init__(self, shape: tuple[int, int, int], latent: int = 100, width: int = 64) -> None:
        super().__init__()
        channels, height, breadth = _image_shape(shape)
        self.latent = latent
        self.size = (height, breadth)
        doublings = _doublings(2 * max(height, breadth))
        widths = [width * 2**power for power in reversed(range(doublings))]
        layers: list[nn.Module] = [nn.ConvTranspose2d(latent, widths[0], START_SIDE, bias=False)]
        for before, after in pairwise([*widths, channels]):
            layers += [_uncounted(nn.BatchNorm2d(before)), nn.ReLU()]
            layers += [nn.ConvTranspose2d(before, after, 4, stride=2, padding=1, bias=False)]
        self.net = nn.Sequential(*layers, nn.Tanh())
        _start(self)

    def forward(self, latent: Float[Tensor, "n latent"]) -> Float[Tensor, "n c h w"]:
        square: Tensor = self.net(latent[:, :, None, None])
        return _resized((square + 1) / 2, *self.size)


@final
class ImageDiscriminator(nn.Module):
    """One logit an image, high for real ones: the mirror of `ImageGenerator`, with strided convolutions.

    Images in [0, 1] are resized to a square whose side is 8, 16, 32 or 64, the first that is not smaller than the
    longer side; each layer halves it down to 4×4, and the last one sums that up. The layers without BN, the first and
    the last, have a bias.
    """

    def __init__(self, shape: tuple[int, int, int], width: int = 64) -> None:
        super().__init__()
        channels, height, breadth = _image_shape(shape)
        halvings = _doublings(max(height, breadth))
        self.side = START_SIDE * 2**halvings
        widths = [width * 2**power for power in range(halvings)]
        layers: list[nn.Module] = []
        for before, after in pairwise([channels, *widths]):
            first = not layers
            layers.append(nn.Conv2d(before, after, 4, stride=2, padding=1, bias=first))
            if not first:
                layers.append(_uncounted(nn.BatchNorm2d(after)))
            layers.append(nn.LeakyReLU(0.2))
        self.net = nn.Sequential(*layers, nn.Conv2d(widths[-1], 1, START_SIDE), nn.Flatten(0))
        _start(self)

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, " n"]:
        out: Tensor = self.net(2 * _resized(x, self.side, self.side) - 1)
        return out


def _image_shape(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape) < 1:
        raise InputError(f"the image shape is {shape}, but channels, height and width of at least 1 are needed.")
    return shape


def _doublings(side: int) -> int:
    """How often 4 must be doubled to reach `side`: at least once, and not beyond 64."""
    return min(max((side - 1).bit_length(), 3), LARGEST_SIDE.bit_length() - 1) - 2


def _resized(x: Tensor, height: int, width: int) -> Tensor:
    """Averages where the images become smaller and bilinear interpolation where they become larger."""
    x = F.adaptive_avg_pool2d(x, (min(height, x.shape[2]), min(width, x.shape[3])))
    if x.shape[2:] == (height, width):
        return x
    return F.interpolate(x, size=(height, width), mode="bilinear", align_corners=False)


def _start(net: nn.Module) -> None:
    """The start of DCGAN: weights from N(0, 0.02²), those of batch normalisation from N(1, 0.02²), biases 0."""
    for layer in net.modules():
        if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d)):
            nn.init.normal_(layer.weight, 1.0 if isinstance(layer, nn.BatchNorm2d) else 0.0, 0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def _uncounted(norm: Norm) -> Norm:
    """The layer without its counter of batches, an integer that neither averages nor fits into a row of floats."""
    norm.num_batches_tracked = None
    norm.register_load_state_dict_pre_hook(_drop_counter)  # type: ignore[no-untyped-call]
    return norm


def _drop_counter(
    norm: nn.Module, state: dict[str, Any], prefix: str, *_: Mapping[str, Any] | bool | list[str]
) -> None:
    # torch adds the counter to states without a version (a plain dict), and others' files have one.
    state.pop(f"{prefix}num_batches_tracked", None)
