"""From a client's indices to normalised batches; the same in every engine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import Config
from ..core.types import Batch, Rng
from ..data.augment import flip_crop
from ..data.federation import Federation
from ..methods.base import Method


def steps_per_epoch(samples: int, config: Config) -> int:
    """Batches of one epoch over so many samples."""
    if config.drop_last:
        return max(1, samples // config.batch_size)
    return math.ceil(samples / config.batch_size)


def epoch_positions(samples: int, config: Config, stream: torch.Generator) -> Tensor:
    """A permutation cut into full batches [steps, B]; the last is filled up by wrapping around to its start."""
    order = torch.randperm(samples, generator=stream)
    steps = steps_per_epoch(samples, config)
    return order[torch.arange(steps * config.batch_size) % samples].view(steps, config.batch_size)


@dataclass(frozen=True)
class BatchMaker:
    """Images of the training store as batches of a method: augmented, normalised, with a second view on demand."""

    method: Method
    federation: Federation
    config: Config
    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, method: Method, federation: Federation, config: Config, device: torch.device) -> BatchMaker:
        return cls(method, federation, config, *_constants(federation.mean, federation.std, device))

    def training(self, indices: Tensor, own: Tensor, rng: Rng, count: Tensor | None = None) -> Batch:
        """The training batch at `indices`; partners come from `own`, the client's indices, or its first `count`."""
        config = self.config
        images = flip_crop(self._images(indices), rng, flip=config.flip, pad=config.crop)
        x, x_hat = self.method.first_view(images, rng), None
        if self.method.views == 2:
            # Not randint, whose bound a captured step could not change from client to client.
            share = torch.rand(len(indices), generator=rng("partner"), device=own.device, dtype=torch.float64)
            size = len(own) if count is None else count
            pick = (share * size).long().clamp(max=size - 1)
            x_hat = (self.method.view(images, self._images(own[pick]), rng) - self.mean) / self.std
        batch = Batch((x - self.mean) / self.std, self._labels(indices), x_hat)
        return batch._replace(x_plain=(images - self.mean) / self.std) if self.method.own_first_view else batch

    def plain(self, indices: Tensor) -> Batch:
        """The batch at `indices` without augmentation."""
        return Batch((self._images(indices) - self.mean) / self.std, self._labels(indices))

    # Where the images are too many for the GPU they stay on the host, and each batch is moved.
    def _images(self, indices: Tensor) -> Tensor:
        return self.federation.train.batch(indices).to(self.mean.device, non_blocking=True)

    def _labels(self, indices: Tensor) -> Tensor:
        labels = self.federation.train.labels
        return labels[indices.to(labels.device)].to(self.mean.device, non_blocking=True)


def _constants(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    shape = (1, -1, 1, 1)
    return torch.tensor(mean, device=device).view(shape), torch.tensor(std, device=device).view(shape)
