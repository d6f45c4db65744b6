"""A small federation of made-up images, for `check_method`, tests and first steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.errors import InputError
from ..core.random import generator
from .federation import Federation, in_tests, out_tests
from .partition import Partition
from .store import ImageStore

_NOISE = 0.08  # standard deviation of the pixels around their pattern
_CONTRAST = 0.3  # the patterns stay in 0.5 ± this, so that noise is rarely cut off


def tiny_federation(
    clients: int = 3,
    classes: int = 5,
    size: int = 16,
    seed: int = 0,
    per_client: int = 60,
    channels: int = 3,
    outs: bool = True,
) -> Federation:
    """A separable problem: each class is a pattern of its own plus noise, OUT images have other patterns.

    Every client holds every class, but in different proportions; its test has half as many images. The tests are IN,
    Gaussian noise of severity 3, and one OUT set.
    """
    if clients < 1 or classes < 2 or size < 8:
        raise InputError(f"clients is {clients}, classes {classes}, size {size}; at least 1, 2 and 8 are needed.")
    if per_client // 2 < classes:
        raise InputError(f"per_client is {per_client}; {classes} classes need at least {2 * classes} images a client.")
    patterns = _patterns(classes, channels, size, seed, "in")
    labels = torch.cat([_labels(client, classes, per_client) for client in range(clients)])
    test_labels = torch.cat([_labels(client, classes, per_client // 2) for client in range(clients)])
    train = _store(patterns, labels, seed, "train")
    test = _store(patterns, test_labels, seed, "test")
    own = Partition(torch.arange(len(labels)).chunk(clients))
    own_test = Partition(torch.arange(len(test_labels)).chunk(clients))
    sets = in_tests(test, own_test, corruptions=("gaussian_noise",), severities=(3,), seed=seed)
    if outs:
        out_labels = torch.arange(4 * per_client) % classes
        out = _store(_patterns(classes, channels, size, seed, "out"), out_labels, seed, "out")
        sets += out_tests([out], train.shape, clients=clients)
    mean, std = train.channel_moments()
    return Federation("synthetic", train, tuple(own), sets, mean, std)


def _labels(client: int, classes: int, count: int) -> Tensor:
    # Class weights 1, 2, … C, turned by one class a client; one image of each class comes first.
    weights = 1.0 + (torch.arange(classes) + client) % classes
    edges = torch.cumsum(weights, 0) / weights.sum() * (count - classes)
    rest = torch.searchsorted(edges, torch.arange(count - classes) + 0.5)
    return torch.cat([torch.arange(classes), rest.clamp(max=classes - 1)])


def _patterns(classes: int, channels: int, size: int, seed: int, role: str) -> Tensor:
    coarse = torch.rand(classes, channels, size // 4, size // 4, generator=generator(seed, "patterns", role))
    coarse = (coarse + coarse.flip(-1)) / 2  # alike on both sides: a flip keeps the class
    coarse = coarse - coarse.amin((2, 3), keepdim=True)
    coarse = coarse / coarse.amax((2, 3), keepdim=True).clamp(min=1e-6)
    tint = torch.rand(classes, channels, 1, 1, generator=generator(seed, "tints", role))
    smooth = F.interpolate(0.6 * coarse + 0.4 * tint, size=(size, size), mode="bilinear")
    return 0.5 + _CONTRAST * (2 * smooth - 1)


def _store(patterns: Tensor, labels: Tensor, seed: int, part: str) -> ImageStore:
    noise = torch.randn(len(labels), *patterns.shape[1:], generator=generator(seed, "noise", part))
    images = (patterns[labels] + _NOISE * noise).clamp(0, 1)
    names = tuple(f"pattern {label}" for label in range(len(patterns)))
    pixels = (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
    return ImageStore(pixels, labels, classes=names, name="synthetic-out" if part == "out" else "synthetic")
