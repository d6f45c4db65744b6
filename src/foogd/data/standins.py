"""Small data for trying things out: samples of real data sets, and stand-ins where they are missing.

A stand-in has the file format, the classes and the domains of the data set whose name it bears, and made-up images. A
folder of stand-ins says so in a file, and every set that is read from there is called "NAME (stand-in)" in all results.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..engine.rng import derive_seed, generator
from ..errors import InputError
from .readers import CIFAR10_CLASSES, PACS_CLASSES, PACS_DOMAINS
from .store import ImageStore

MARK = "NOT-REAL-DATA.json"
SUFFIX = " (stand-in)"
_TEXT = "The images below this folder are made up. They have the file formats of the data sets whose names they bear."
_NOISE = 0.1  # standard deviation of the pixels around the pattern of their class


def marked(store: ImageStore, root: Path, name: str) -> ImageStore:
    """The store, under a name that says so where the data set of this name below the root is a stand-in."""
    if name not in stand_ins(root):
        return store
    return replace(store, name=f"{store.name}{SUFFIX}")


def stand_ins(root: Path) -> list[str]:
    """The data sets below a root folder that are stand-ins."""
    path = root / MARK
    if not path.is_file():
        return []
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["stand-ins"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read ({error}): delete the folder, it holds no real data") from None
    return list(names)


def make_stand_ins(root: Path, names: Iterable[str], *, train: int, test: int, out: int) -> None:
    """Write stand-ins of these data sets below the root: about so many training, test and OUT images each."""
    here = stand_ins(root)
    for name in names:
        if name in here:
            continue
        if name not in _WRITERS:
            raise InputError(f"there is no stand-in for {name!r}: those of {', '.join(_WRITERS)} can be made")
        _WRITERS[name](root / name, name, train, test, out)
        here.append(name)
        # After the images: a folder that is named here is whole.
        root.mkdir(parents=True, exist_ok=True)
        (root / MARK).write_text(json.dumps({"about": _TEXT, "stand-ins": here}, indent=2) + "\n", encoding="utf-8")


def sample(store: ImageStore, *, train: int, test: int) -> ImageStore:
    """About so many images of a store, the same share of each class and domain and at least one, drawn with seed 0."""
    groups = store.labels.cpu().clone()
    if store.domains is not None:
        groups += store.num_classes * store.domains.cpu()
    held = torch.zeros(len(store), dtype=torch.bool) if store.test is None else store.test.cpu()
    order = torch.randperm(len(store), generator=generator(0, "sample", store.name))
    chosen = []
    for part, wanted in ((~held, train), (held, test)):
        own = order[part[order]]
        for group in torch.unique(groups[own]).tolist():
            members = own[groups[own] == group]
            chosen.append(members[: max(1, round(wanted * len(members) / max(1, len(own))))])
    picked = torch.cat(chosen).sort().values
    return replace(store.select(picked), name=f"{store.name} (sample of {len(picked)})")


# Images


def _patterns(name: str, count: int, px: int, grain: int) -> Any:
    """One smooth pattern a class, `grain` cells wide; those of two sets have nothing in common."""
    coarse = torch.rand(count, 3, grain, grain, generator=generator(0, "stand-in", name))
    return F.interpolate(coarse, size=(px, px), mode="bilinear").permute(0, 2, 3, 1)


def _images(name: str, labels: Any, px: int, classes: int, grain: int = 4, tint: Any = None) -> Any:
    patterns = _patterns(name, classes, px, grain)[torch.as_tensor(labels)]
    noise = torch.randn(patterns.shape, generator=generator(0, "stand-in noise", name, len(labels)))
    pixels = (0.15 + 0.7 * patterns if tint is None else 0.15 + 0.5 * patterns + tint) + _NOISE * noise
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8).numpy()


def _even(count: int, classes: int) -> Any:
    """Labels of about so many images, the same number of each class and at least one, shuffled."""
    labels = np.arange(max(count // classes, 1) * classes) % classes
    return np.random.default_rng(derive_seed(0, "stand-in labels", count, classes)).permutation(labels)


def _save(path: Path, image: Any) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)


# Formats


def _cifar(folder: Path, name: str, train: int, test: int, out: int) -> None:
    ten = name == "cifar10"
    classes = 10 if ten else 100
    key = b"labels" if ten else b"fine_labels"
    names = CIFAR10_CLASSES if ten else tuple(f"class_{number}" for number in range(classes))
    y, y_test = _even(train, classes), _even(test, classes)
    x = _images(name, np.concatenate([y, y_test]), 32, classes)
    parts = [(f"data_batch_{n + 1}", rows) for n, rows in enumerate(np.array_split(np.arange(len(y)), 5))]
    parts = parts if ten else [("train", np.arange(len(y)))]
    folder.mkdir(parents=True, exist_ok=True)
    for file, rows in (*parts, ("test_batch" if ten else "test", len(y) + np.arange(len(y_test)))):
        labels = np.concatenate([y, y_test])[rows].tolist()
        data = np.ascontiguousarray(x[rows].transpose(0, 3, 1, 2).reshape(len(rows), -1))
        (folder / file).write_bytes(pickle.dumps({b"data": data, key: labels}, protocol=2))
    about = {b"label_names" if ten else b"fine_label_names": [text.encode() for text in names]}
    (folder / ("batches.meta" if ten else "meta")).write_bytes(pickle.dumps(about, protocol=2))


def _tinyimagenet(folder: Path, name: str, train: int, test: int, out: int) -> None:
    words = [f"n{number:08d}" for number in range(200)]
    y, y_test = _even(train, 200), _even(test, 200)
    x = _images(name, np.concatenate([y, y_test]), 64, 200)
    for number, label in enumerate(y):
        _save(folder / "train" / words[label] / "images" / f"{words[label]}_{number}.JPEG", x[number])
    lines = []
    for number, label in enumerate(y_test):
        _save(folder / "val" / "images" / f"val_{number}.JPEG", x[len(y) + number])
        lines.append(f"val_{number}.JPEG\t{words[label]}\t0\t0\t63\t63\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines), encoding="utf-8")
    (folder / "wnids.txt").write_text("\n".join(words) + "\n", encoding="utf-8")


def _pacs(folder: Path, name: str, train: int, test: int, out: int) -> None:
    classes = len(PACS_CLASSES)
    for number, domain in enumerate(PACS_DOMAINS):
        y = _even((train + test) // len(PACS_DOMAINS), classes)
        x = _images(name, y, 32, classes, tint=torch.tensor([0.1, -0.1, 0.05]) * (number - 1.5))
        for place, label in enumerate(y):
            _save(folder / domain / PACS_CLASSES[label] / f"pic_{place:03d}.png", x[place])


def _svhn(folder: Path, name: str, train: int, test: int, out: int) -> None:
    from scipy.io import savemat

    y = _even(out, 10)
    x = _images(name, y, 32, 10, grain=8)
    folder.mkdir(parents=True, exist_ok=True)
    digits = np.where(y == 0, 10, y).astype(np.uint8)[:, None]  # as in the release
    savemat(folder / "test_32x32.mat", {"X": x.transpose(1, 2, 3, 0), "y": digits}, do_compression=True)


def _textures(folder: Path, name: str, train: int, test: int, out: int) -> None:
    words = ("banded", "dotted", "grid", "woven")
    y = _even(out, len(words))
    x = _images(name, y, 48, len(words), grain=16)
    for place, label in enumerate(y):
        _save(folder / "images" / words[label] / f"{words[label]}_{place:04d}.jpg", x[place])


def _flat(folder: Path, name: str, train: int, test: int, out: int) -> None:
    x = _images(name, _even(out, 10), 32, 10, grain=3)
    for place, image in enumerate(x):
        _save(folder / f"{place}.png", image)


_WRITERS: dict[str, Callable[[Path, str, int, int, int], None]] = {
    "cifar10": _cifar,
    "cifar100": _cifar,
    "tinyimagenet": _tinyimagenet,
    "pacs": _pacs,
    "svhn": _svhn,
    "textures": _textures,
    "isun": _flat,
    "lsun_c": _flat,
    "lsun_r": _flat,
}
