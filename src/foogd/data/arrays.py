"""Arrays in .npz and .npy files, and packs of encoded images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import InputError
from .readers import OnBad, Progress, decode_all, make_store
from .store import ImageStore, said_by_numpy

_PAIRS = (("images", "labels"), ("x", "y"), ("X", "y"), ("data", "labels"), ("arr_0", "arr_1"))
_SPLIT_PAIRS = (
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
)


def read_npz(
    path: Path,
    *,
    size: int | None = None,
    on_bad: OnBad = "error",
    progress: Progress | None = None,
    skipped: list[str] | None = None,
) -> ImageStore:
    """Any .npz of images: foogd's own, a pack (buf, off, y), x/y, or x_train/y_train/x_test/y_test."""
    try:
        return _read_npz(path, size, on_bad, progress, skipped)
    except InputError as error:  # what is wrong with the arrays is found where nobody knows their file
        raise error if str(path) in str(error) else InputError(f"{path} cannot be used: {error}") from None


def _read_npz(
    path: Path, size: int | None, on_bad: OnBad, progress: Progress | None, skipped: list[str] | None
) -> ImageStore:
    arrays = _arrays(path)
    if {"buf", "off", "y"} <= arrays.keys():
        return read_packs([path], size=size, on_bad=on_bad, progress=progress, skipped=skipped)
    if size is not None:
        raise InputError(f"{path} holds arrays of pixels; a size can be asked of encoded images only.")
    for x, y, x_test, y_test in _SPLIT_PAIRS:
        if {x, y, x_test, y_test} <= arrays.keys():
            images = [_pixels(arrays[key], path, key) for key in (x, x_test)]
            if images[0].shape[1:] != images[1].shape[1:]:
                raise InputError(f"{path} has images of shape {images[0].shape[1:]} and {images[1].shape[1:]}.")
            labels = np.concatenate([_flat(arrays[key]) for key in (y, y_test)])
            test = np.arange(len(labels)) >= len(images[0])
            return make_store(np.concatenate(images), labels, name=path.stem, test=test)
    for x, y in _PAIRS:
        if {x, y} <= arrays.keys():
            return make_store(
                _pixels(arrays[x], path, x),
                _flat(arrays[y]),
                classes=tuple(arrays["classes"].tolist()) if "classes" in arrays else (),
                name=str(arrays["name"]) if "name" in arrays else path.stem,
                domains=arrays.get("domains"),
                test=arrays.get("test"),
                domain_names=tuple(arrays["domain_names"].tolist()) if "domain_names" in arrays else (),
            )
    held = ", ".join(sorted(arrays)) or "nothing"
    raise InputError(f"{path} holds {held}; images and labels, x and y, or buf, off and y are needed.")


def _pixels(images: Any, path: Path, key: str) -> Any:
    if images.ndim == 4 and images.shape[1] in (1, 3) and images.shape[3] not in (1, 3):
        raise InputError(f"{path} has {key} of shape {images.shape}, channels first; N×H×W×C is needed.")
    return images


def _flat(labels: Any) -> Any:
    return labels.reshape(-1) if labels.ndim == 2 and labels.shape[1] == 1 else labels


def read_packs(
    train: Sequence[Path],
    test: Sequence[Path] = (),
    *,
    size: int | None = None,
    on_bad: OnBad = "error",
    progress: Progress | None = None,
    skipped: list[str] | None = None,
) -> ImageStore:
    """Packs one after the other: .npz with `buf` (encoded images), `off` (offsets), `y` and perhaps `domain`."""
    packs = [_pack(path) for path in (*train, *test)]
    starts = np.cumsum([0, *(len(pack["y"]) for pack in packs)])
    names = [path.name for path in (*train, *test)]

    def place(index: int) -> tuple[int, int]:
        pack = int(np.searchsorted(starts, index, side="right")) - 1
        return pack, index - int(starts[pack])

    def item(index: int) -> bytes:
        pack, i = place(index)
        off = packs[pack]["off"]
        return bytes(packs[pack]["buf"][off[i] : off[i + 1]].data)

    def name(index: int) -> str:
        pack, i = place(index)
        return f"image {i} of {names[pack]}"

    images, kept = decode_all(int(starts[-1]), item, name, size, on_bad, progress, skipped)
    labels = np.concatenate([pack["y"] for pack in packs]).astype(np.int64)[kept]
    domains = None
    if all("domain" in pack for pack in packs):
        domains = np.concatenate([pack["domain"] for pack in packs]).astype(np.int64)[kept]
    mask = kept >= starts[len(train)] if test else None
    return make_store(
        images, labels, name=train[0].stem, domains=domains, test=mask, skipped=int(starts[-1]) - len(kept)
    )


def _pack(path: Path) -> Mapping[str, Any]:
    arrays = _arrays(path)
    missing = [key for key in ("buf", "off", "y") if key not in arrays]
    if missing:
        raise InputError(f"{path} lacks {', '.join(missing)}; a pack holds buf, off and y.")
    buf, off, y = arrays["buf"], arrays["off"], arrays["y"]
    if buf.dtype != np.uint8 or buf.ndim != 1 or off.dtype.kind not in "iu" or y.dtype.kind not in "iu":
        types = f"buf of type {buf.dtype}, off of {off.dtype} and y of {y.dtype}"
        raise InputError(f"{path} has {types}; bytes and whole numbers are needed.")
    if y.ndim != 1 or not len(y) or off.shape != (len(y) + 1,):
        raise InputError(f"{path} has {off.size} offsets for {y.size} labels; one more than labels is needed.")
    off = off.astype(np.int64)
    if off[0] != 0 or off[-1] != len(buf) or (np.diff(off) < 0).any():
        raise InputError(f"{path} has offsets that do not cut its {len(buf)} bytes into images.")
    domain = arrays.get("domain")
    if domain is not None and domain.shape != y.shape:
        raise InputError(f"{path} has {domain.shape} domains for {y.shape} labels.")
    return {**arrays, "off": off}


def _arrays(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"{path} is not a file.")
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}
    except Exception as error:  # numpy reads headers as Python text: a damaged one ends in anything
        raise InputError(f"{path} cannot be read as an .npz of plain arrays ({said_by_numpy(error)}).") from error


def npy(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"{path} is not a file.")
    try:
        # "c" (copy on write): torch warns about arrays that cannot be written to.
        return np.load(path, mmap_mode="c", allow_pickle=False)
    except Exception as error:  # as in _arrays
        raise InputError(f"{path} cannot be read as a plain .npy array ({said_by_numpy(error)}).") from error
