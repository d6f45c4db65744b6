"""The files of CIFAR-10, CIFAR-100, their -C sets and SVHN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import InputError
from .arrays import npy
from .matlab import read_matlab
from .readers import CIFAR10_CLASSES, SEVERITIES, file_bytes, make_store
from .safe_pickle import read_plain_pickle
from .store import ImageStore, one_line


def read_cifar_python(folder: Path) -> ImageStore:
    """CIFAR-10 or CIFAR-100 in the release for Python: pickled dictionaries, read without pickle's full powers."""
    if any((folder / name).exists() for name in ("data_batch_1", "test_batch", "batches.meta")):
        train, test = [f"data_batch_{number}" for number in range(1, 6)], ["test_batch"]
        key, meta, names = b"labels", "batches.meta", b"label_names"
    else:
        train, test = ["train"], ["test"]
        key, meta, names = b"fine_labels", "meta", b"fine_label_names"
    classes: tuple[str, ...] = ()
    if (folder / meta).is_file():
        held = _unpickled(folder / meta).get(names)
        if not isinstance(held, list) or not all(isinstance(name, bytes | str) for name in held):
            raise InputError(f"{folder / meta} has no list {names.decode()}.")
        classes = tuple(name.decode() if isinstance(name, bytes) else name for name in held)
    images, labels = [], []
    for name in (*train, *test):
        path = folder / name
        content = _unpickled(path)
        data, y = content.get(b"data"), content.get(key)
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
            shape = f"{data.dtype} of shape {data.shape}" if isinstance(data, np.ndarray) else type(data).__name__
            raise InputError(f"{path} has {shape} as its data; N×3072 uint8 is needed.")
        if not isinstance(y, list) or len(y) != len(data) or not all(isinstance(label, int) for label in y):
            raise InputError(f"{path} has no list {key.decode()} with a number for each of its {len(data)} images.")
        images.append(data)
        labels.append(np.array(y, dtype=np.int64))
    return _cifar(images, labels, len(train), classes)


def read_cifar_binary(folder: Path) -> ImageStore:
    """CIFAR-10 or CIFAR-100 in the binary release: records of one or two label bytes and 3072 pixel bytes."""
    if any((folder / name).exists() for name in ("data_batch_1.bin", "test_batch.bin")):
        train, test, label_bytes = [f"data_batch_{number}.bin" for number in range(1, 6)], ["test_batch.bin"], 1
        names = folder / "batches.meta.txt"
    else:
        train, test, label_bytes = ["train.bin"], ["test.bin"], 2  # coarse, then fine
        names = folder / "fine_label_names.txt"
    classes = tuple(names.read_text(encoding="utf-8").split()) if names.is_file() else ()
    images, labels = [], []
    for name in (*train, *test):
        data = np.frombuffer(file_bytes(folder / name), dtype=np.uint8)
        record = label_bytes + 3072
        if data.size == 0 or data.size % record:
            raise InputError(f"{folder / name} has {data.size} bytes; a whole number of records of {record} is needed.")
        records = data.reshape(-1, record)
        images.append(records[:, label_bytes:])
        labels.append(records[:, label_bytes - 1].astype(np.int64))
    return _cifar(images, labels, len(train), classes)


def _cifar(images: list[Any], labels: list[Any], train_files: int, classes: tuple[str, ...]) -> ImageStore:
    counts = [len(part) for part in images]
    test = np.arange(sum(counts)) >= sum(counts[:train_files])
    pixels = np.concatenate(images).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    y = np.concatenate(labels)
    if not classes and y.max() < 10 and train_files == 5:
        classes = CIFAR10_CLASSES
    return make_store(np.ascontiguousarray(pixels), y, classes=classes, test=test)


def read_cifar_c(folder: Path, corruption: str | None = None, severity: int | None = None) -> ImageStore:
    """CIFAR-10-C or CIFAR-100-C: of one corruption, or of all, at one severity or at all five.

    An official file stacks the severities 1 to 5. `domains` is the place of the corruption (by name) times 5 plus the
    severity minus 1. The images of one corruption stay in their file and are mapped into memory.
    """
    found = [path.stem for path in sorted(folder.glob("*.npy")) if path.stem != "labels"]
    labels = npy(folder / "labels.npy")
    chosen = chosen_corruptions(folder, found, corruption, severity)
    images, domains = [], []
    for name in chosen:
        path = folder / f"{name}.npy"
        data = npy(path)
        if data.dtype != np.uint8 or data.ndim != 4 or len(data) != len(labels) or len(data) % len(SEVERITIES):
            raise InputError(
                f"{path} holds {data.dtype} of shape {data.shape}; uint8 images for {len(labels)} labels, "
                f"a fifth a severity, are needed."
            )
        each = len(data) // len(SEVERITIES)
        rows = slice(None) if severity is None else slice((severity - 1) * each, severity * each)
        images.append(data[rows])
        domains.append(found.index(name) * len(SEVERITIES) + np.repeat(np.arange(5), each)[rows])
    y = np.concatenate([labels[rows]] * len(chosen)).astype(np.int64)
    pixels = images[0] if len(images) == 1 else np.concatenate(images)
    return make_store(pixels, y, domains=np.concatenate(domains), domain_names=place_names(found))


def place_names(corruptions: list[str]) -> tuple[str, ...]:
    return tuple(f"{name}/{level}" for name in corruptions for level in SEVERITIES)


def chosen_corruptions(folder: Path, found: list[str], corruption: str | None, severity: int | None) -> list[str]:
    if not found:
        raise InputError(f"{folder} holds no corruptions.")
    if corruption is not None and corruption not in found:
        raise InputError(f"{folder} has no corruption {corruption!r}; it holds {', '.join(found)}.")
    if severity is not None and severity not in SEVERITIES:
        raise InputError(f"severity is {severity}; it must be 1, 2, 3, 4 or 5.")
    return found if corruption is None else [corruption]


def _unpickled(path: Path) -> dict[bytes, Any]:
    data = file_bytes(path)
    if not data:
        raise InputError(f"{path} is empty.")
    try:
        return read_plain_pickle(data)
    except InputError as error:
        raise InputError(f"{path} is refused: it asks for {one_line(error)}; only plain arrays are read.") from None
    except Exception as error:  # a damaged pickle may do anything that its instructions can
        raise InputError(f"{path} is damaged or no pickle ({type(error).__name__}: {one_line(error)}).") from error


def read_svhn(*files: Path) -> ImageStore:
    """SVHN's cropped digits in MATLAB files; the label 10 means the digit 0. A file named test… is the test part."""
    images, labels, test = [], [], []
    for path in files:
        try:
            content = read_matlab(file_bytes(path))
        except InputError as error:
            raise InputError(f"{path} cannot be read: {error}.") from None
        missing = [key for key in ("X", "y") if key not in content]
        if missing:
            raise InputError(f"{path} has no array {' and '.join(missing)}; SVHN's files hold X and y.")
        x, y = content["X"], content["y"].reshape(-1)
        if x.dtype != np.uint8 or x.ndim != 4 or x.shape[2] != 3 or x.shape[3] != len(y):
            about = f"X of shape {x.shape} ({x.dtype}) and {len(y)} labels"
            raise InputError(f"{path} has {about}; H×W×3×N uint8 is needed.")
        if len(y) == 0 or y.min() < 1 or y.max() > 10:
            raise InputError(f"{path} has no labels from 1 to 10.")
        images.append(x.transpose(3, 0, 1, 2))
        labels.append(y.astype(np.int64) % 10)
        test.append(np.full(len(y), path.name.startswith("test")))
    mask = np.concatenate(test)
    return make_store(
        np.ascontiguousarray(np.concatenate(images)),
        np.concatenate(labels),
        classes=tuple("0123456789"),
        test=mask if mask.any() and not mask.all() else None,
    )
