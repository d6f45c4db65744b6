"""Random streams: every draw belongs to (seed, round, client, purpose), so results do not depend on who runs first."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def derive_seed(seed: int, *parts: int | str) -> int:
    """A 63-bit seed from a run's seed and the names of the stream."""
    text = "/".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *parts: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator for the stream (seed, *parts)."""
    stream = torch.Generator(device=device)
    stream.manual_seed(derive_seed(seed, *parts))
    return stream


class Streams:
    """`streams(purpose)` is one generator a purpose, created on first use and continued afterwards."""

    def __init__(self, seed: int, *parts: int | str, device: torch.device | str = "cpu") -> None:
        self._seed, self._parts, self._device = seed, parts, device
        self._streams: dict[str, torch.Generator] = {}

    def __call__(self, purpose: str) -> torch.Generator:
        if purpose not in self._streams:
            self._streams[purpose] = generator(self._seed, *self._parts, purpose, device=self._device)
        return self._streams[purpose]


def with_seed(stream: torch.Generator, make: Callable[[], T]) -> T:
    """`make()` with torch's global generator seeded from `stream` and restored: for modules that draw their start."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(stream.initial_seed())  # the CPU's only: modules start on the CPU
        return make()
