"""Readers: one function a format, from files as users have them to an ImageStore.

Readers that decode images take four options: `size` (shorter side, then the centre as a square), `on_bad` ("error": the
first bad image is named; "skip": bad images are left out), `skipped` (a list that gets a line for each one left out)
and `progress` (called with the images done and their number).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..core.errors import InputError
from .decode import decode_many
from .store import ImageStore

Progress = Callable[[int, int], None]
OnBad = Literal["error", "skip"]

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SEVERITIES = (1, 2, 3, 4, 5)


def file_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None


_ASK_SIZE = "ask for a size, as in FOLDER@64, so that all are made alike"


def decode_all(
    count: int,
    item: Callable[[int], bytes | str],
    name: Callable[[int], str],
    size: int | None,
    on_bad: OnBad,
    progress: Progress | None,
    skipped: list[str] | None,
) -> tuple[Any, Any]:
    """All images in one array, and the indices of those that are in it."""
    if on_bad not in ("error", "skip"):
        raise InputError(f"on_bad is {on_bad!r}; it must be 'error' or 'skip'.")
    if size is not None and size < 1:
        raise InputError(f"the size of the images, after @, is {size}; at least 1 is needed.")
    wanted: tuple[int, int] | None = None
    while True:
        images, kept, bad, sizes = _one_pass(count, item, name, size, on_bad, progress, wanted)
        common = max(sizes, key=lambda pair: sizes[pair], default=None)
        if common is None:
            raise InputError(f"none of the {count} images can be read; the first: {bad[0]}.")
        if 2 * sizes[common] < sizes.total():
            # Too many to be exceptions: what would be left is not the set that was asked for.
            raise InputError(
                f"the images have {len(sizes)} sizes, and the most frequent, {common[1]}×{common[0]} pixels, is that "
                f"of {sizes[common]} of {sizes.total()} ({bad[-1]}); {_ASK_SIZE}."
            )
        if common == images.shape[1:3] or sizes[common] == sizes[images.shape[1:3]]:
            break
        wanted = common  # the first image was an exception: its size is not that of the set
    if skipped is not None:
        skipped += bad
    return images[: len(kept)], np.array(kept, dtype=np.int64)


def _one_pass(
    count: int,
    item: Callable[[int], bytes | str],
    name: Callable[[int], str],
    size: int | None,
    on_bad: OnBad,
    progress: Progress | None,
    wanted: tuple[int, int] | None,
) -> tuple[Any, list[int], list[str], Counter[tuple[int, int]]]:
    images: Any = np.zeros((0, 0, 0, 3), dtype=np.uint8) if wanted is None else np.empty((count, *wanted, 3), np.uint8)
    first = 0
    kept: list[int] = []
    bad: list[str] = []
    sizes: Counter[tuple[int, int]] = Counter()
    for chunk, decoded in decode_many(count, item, size):
        for index, pixels in zip(chunk, decoded, strict=True):
            if isinstance(pixels, str):
                if on_bad == "error":
                    raise InputError(f"{name(index)} cannot be read: {pixels}.")
                bad.append(f"{name(index)}: {pixels}")
                continue
            height, width = pixels.shape[:2]
            if not sizes and wanted is None:
                images, first = np.empty((count, height, width, 3), np.uint8), index
            sizes[height, width] += 1
            if pixels.shape != images.shape[1:]:
                if on_bad == "error":
                    raise InputError(
                        f"{name(first)} has {images.shape[2]}×{images.shape[1]} pixels and {name(index)} has "
                        f"{width}×{height}; {_ASK_SIZE}."
                    )
                bad.append(f"{name(index)}: it has {width}×{height} pixels, unlike the others")
                continue
            images[len(kept)] = pixels
            kept.append(index)
        if progress is not None:
            progress(chunk.stop, count)
    return images, kept, bad, sizes


def make_store(images: Any, labels: Any, **more: Any) -> ImageStore:
    """An ImageStore of numpy's arrays, which its fields, declared as tensors, also take."""
    return ImageStore(images, labels, **more)


def named(
    store: ImageStore, name: str, classes: tuple[str, ...] = (), domain_names: tuple[str, ...] = ()
) -> ImageStore:
    """The same store under the name by which results report it, with these classes and domains where it names none."""
    return replace(store, name=name, classes=store.classes or classes, domain_names=store.domain_names or domain_names)


def split_size(spec: str) -> tuple[str, int | None]:
    """`name@64` is a name and a size in pixels."""
    match = re.fullmatch(r"(.+)@(\d{1,5})", spec)
    return (match[1], int(match[2])) if match else (spec, None)
