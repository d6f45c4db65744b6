"""Networks: backbones by name, the score network, generators, and dropout with its own random stream."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..core.errors import InputError
from ..core.plugins import load_object
from ..core.random import with_seed
from .anchored import AnchoredScore
from .cnn import SmallCNN
from .dropout import Dropout, bind_dropout, own_dropout
from .generator import FeatureGenerator, ImageDiscriminator, ImageGenerator
from .resnet import ResNet18
from .score import ScoreNet, ScoreNetwork, frozen
from .wrn import WideResNet

__all__ = [
    "BACKBONES",
    "AnchoredScore",
    "Dropout",
    "FeatureGenerator",
    "ImageDiscriminator",
    "ImageGenerator",
    "ResNet18",
    "ScoreNet",
    "ScoreNetwork",
    "SmallCNN",
    "WideResNet",
    "bind_dropout",
    "frozen",
    "make_backbone",
    "own_dropout",
]

ImageShape = tuple[int, int, int]
"""Channels, height, width."""

BACKBONES: dict[str, Callable[[ImageShape], nn.Module]] = {
    "wrn40-2": lambda shape: WideResNet(shape[0], depth=40, widen=2),
    "wrn16-1": lambda shape: WideResNet(shape[0], depth=16, widen=1),
    "resnet18": lambda shape: ResNet18(shape[0], stem="7x7"),
    "resnet18-3x3": lambda shape: ResNet18(shape[0], stem="3x3"),
    "cnn": lambda shape: SmallCNN(shape[0]),
}


def make_backbone(spec: str | Callable[..., nn.Module], image_shape: ImageShape, stream: torch.Generator) -> nn.Module:
    """The backbone that `spec` names (a name, a callable or "file.py:fn"), with start weights seeded by `stream`.

    Its attribute `feature_width` is d; where a user's module has none, it is set to the width of its output.
    """
    make = _find(spec) if isinstance(spec, str) else spec
    name = spec if isinstance(spec, str) else getattr(spec, "__name__", repr(spec))

    def start() -> nn.Module:
        module = make(image_shape) if _takes_shape(make) else make()
        if not isinstance(module, nn.Module):
            raise InputError(f'the backbone "{name}" gave a {type(module).__name__}, but a torch.nn.Module is needed.')
        own_dropout(module)
        found, width = _output_width(module, image_shape, name), getattr(module, "feature_width", None)
        if width is None:
            module.feature_width = found  # type: ignore[assignment]
        elif width != found:
            raise InputError(f'the backbone "{name}" says feature_width = {width}, but its output has width {found}.')
        return module

    # The trial pass belongs to the seeded part, since lazy layers draw their weights in it.
    return with_seed(stream, start)


def _find(spec: str) -> Callable[..., nn.Module]:
    if spec in BACKBONES:
        return BACKBONES[spec]
    if ":" not in spec:
        raise InputError(f'the backbone "{spec}" is unknown, but {", ".join(BACKBONES)} or file.py:fn is allowed.')
    make = load_object(spec, "backbone")
    if not callable(make):
        raise InputError(f'the backbone "{spec}" is a {type(make).__name__}, but a function or class is needed.')
    return make


def _takes_shape(make: Callable[..., nn.Module]) -> bool:
    # Not *args, which every module class without a constructor of its own inherits and refuses.
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(parameter.kind in kinds for parameter in inspect.signature(make).parameters.values())


@torch.no_grad()
def _output_width(module: nn.Module, image_shape: ImageShape, name: str) -> int:
    """The width of the features of two black images, found without touching the module's state."""
    first = next(module.parameters(), None)
    images = torch.zeros(2, *image_shape, device=None if first is None else first.device)
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        out = module(images)
    except (RuntimeError, ValueError) as error:
        message = " ".join(str(error).split())
        raise InputError(
            f'the backbone "{name}" cannot take images of shape {tuple(images.shape)}, which it must: {message}'
        ) from error
    for part, training in modes.items():
        part.training = training
    if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != 2:
        shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise InputError(f'the backbone "{name}" maps 2 images to {shape}, but features of shape (2, d) are needed.')
    return out.shape[1]
