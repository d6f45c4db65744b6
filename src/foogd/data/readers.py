"""Readers: one function a format, from files as users have them to an ImageStore.

Readers that decode images take four options: `size` (shorter side, then the centre as a square), `on_bad` ("error": the
first bad image is named; "skip": bad images are left out), `skipped` (a list that gets a line for each one left out)
and `progress` (called with the images done and their number).
"""

from __future__ import annotations

import csv
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ..errors import InputError
from .decode import as_rgb, decode_many, square_pixels
from .matlab import read_matlab
from .plain_pickle import read_plain_pickle
from .store import ImageStore, one_line, said_by_numpy

Progress = Callable[[int, int], None]
OnBad = Literal["error", "skip"]

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PACS_DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".ppm", ".pgm", ".gif", ".tif", ".tiff"})
SEVERITIES = (1, 2, 3, 4, 5)

_HELD_OUT = ("test", "val", "valid", "validation")
_PAIRS = (("images", "labels"), ("x", "y"), ("X", "y"), ("data", "labels"), ("arr_0", "arr_1"))
_SPLIT_PAIRS = (
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
)


# CIFAR


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
        data = np.frombuffer(_file_bytes(folder / name), dtype=np.uint8)
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
    return _store(np.ascontiguousarray(pixels), y, classes=classes, test=test)


def read_cifar_c(folder: Path, corruption: str | None = None, severity: int | None = None) -> ImageStore:
    """CIFAR-10-C or CIFAR-100-C: of one corruption, or of all, at one severity or at all five.

    An official file stacks the severities 1 to 5. `domains` is the place of the corruption (by name) times 5 plus the
    severity minus 1. The images of one corruption stay in their file and are mapped into memory.
    """
    found = [path.stem for path in sorted(folder.glob("*.npy")) if path.stem != "labels"]
    labels = _npy(folder / "labels.npy")
    chosen = _chosen_corruptions(folder, found, corruption, severity)
    images, domains = [], []
    for name in chosen:
        path = folder / f"{name}.npy"
        data = _npy(path)
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
    return _store(pixels, y, domains=np.concatenate(domains), domain_names=_places(found))


def _places(corruptions: list[str]) -> tuple[str, ...]:
    return tuple(f"{name}/{level}" for name in corruptions for level in SEVERITIES)


def _chosen_corruptions(folder: Path, found: list[str], corruption: str | None, severity: int | None) -> list[str]:
    if not found:
        raise InputError(f"{folder} holds no corruptions.")
    if corruption is not None and corruption not in found:
        raise InputError(f"{folder} has no corruption {corruption!r}; it holds {', '.join(found)}.")
    if severity is not None and severity not in SEVERITIES:
        raise InputError(f"severity is {severity}; it must be 1, 2, 3, 4 or 5.")
    return found if corruption is None else [corruption]


def _unpickled(path: Path) -> dict[bytes, Any]:
    data = _file_bytes(path)
    if not data:
        raise InputError(f"{path} is empty.")
    try:
        return read_plain_pickle(data)
    except InputError as error:
        raise InputError(f"{path} is refused: it asks for {one_line(error)}; only plain arrays are read.") from None
    except Exception as error:  # a damaged pickle may do anything that its instructions can
        raise InputError(f"{path} is damaged or no pickle ({type(error).__name__}: {one_line(error)}).") from error


# Arrays


def read_svhn(*files: Path) -> ImageStore:
    """SVHN's cropped digits in MATLAB files; the label 10 means the digit 0. A file named test… is the test part."""
    images, labels, test = [], [], []
    for path in files:
        try:
            content = read_matlab(_file_bytes(path))
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
    return _store(
        np.ascontiguousarray(np.concatenate(images)),
        np.concatenate(labels),
        classes=tuple("0123456789"),
        test=mask if mask.any() and not mask.all() else None,
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
            return _store(np.concatenate(images), labels, name=path.stem, test=test)
    for x, y in _PAIRS:
        if {x, y} <= arrays.keys():
            return _store(
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

    images, kept = _decode_all(int(starts[-1]), item, name, size, on_bad, progress, skipped)
    labels = np.concatenate([pack["y"] for pack in packs]).astype(np.int64)[kept]
    domains = None
    if all("domain" in pack for pack in packs):
        domains = np.concatenate([pack["domain"] for pack in packs]).astype(np.int64)[kept]
    mask = kept >= starts[len(train)] if test else None
    return _store(
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


def _npy(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"{path} is not a file.")
    try:
        # "c" (copy on write): torch warns about arrays that cannot be written to.
        return np.load(path, mmap_mode="c", allow_pickle=False)
    except Exception as error:  # as in _arrays
        raise InputError(f"{path} cannot be read as a plain .npy array ({said_by_numpy(error)}).") from error


def _file_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None


# Folders of images


def read_tree(
    folder: Path,
    *,
    size: int | None = None,
    on_bad: OnBad = "error",
    progress: Progress | None = None,
    skipped: list[str] | None = None,
) -> ImageStore:
    """A folder a class, perhaps below train and test (or val); images right in the folder are one class.

    Classes are numbered by name. Folders within a class belong to it.
    """
    inside = _subfolders(folder)
    parts = {path.name.lower(): path for path in inside}
    held_out = [name for name in _HELD_OUT if name in parts]
    loose = _images_in(folder)
    if loose and inside and any(images_below(path) for path in inside):
        raise InputError(f"{folder} has images beside folders of images; give each class a folder, or none.")
    if loose or not inside:
        files = [(path, 0) for path in loose]
        return _read_files(folder, files, ("all",), None, size, on_bad, progress, skipped)
    if "train" not in parts:
        classes = tuple(path.name for path in inside)
        files = [(path, label) for label, own in enumerate(inside) for path in images_below(own)]
        return _read_files(folder, files, classes, None, size, on_bad, progress, skipped)
    if len(held_out) != 1 or len(parts) != 2:
        raise InputError(
            f"{folder} has the folders {', '.join(parts)}; beside train only one of {', '.join(_HELD_OUT)} can be read."
        )
    halves = [parts["train"], parts[held_out[0]]]
    classes = tuple(sorted({path.name for half in halves for path in _subfolders(half)}))
    files, test = [], []
    for half in halves:
        own = [(path, classes.index(sub.name)) for sub in _subfolders(half) for path in images_below(sub)]
        files += own
        test += [half is halves[1]] * len(own)
    return _read_files(folder, files, classes, test, size, on_bad, progress, skipped)


def sites_taken_for_classes(folder: Path) -> str:
    """A sentence where the folders that `read_tree` takes for classes look like sites; else nothing.

    Sites hold the same classes, or nearly: at least half of the folders in them have a name that occurs in another one.
    """
    uppers = [path for path in _subfolders(folder) if _holds_images(path)]
    # Beside images of its own, a folder in a class is a part of that class; below train, classes are looked for.
    if _images_in(folder) or any(_images_in(path) or path.name.lower() == "train" for path in uppers):
        return ""
    inner = Counter(sub.name for upper in uppers for sub in _subfolders(upper) if _holds_images(sub))
    for name in [name for name in inner if name.lower() in ("train", *_HELD_OUT)]:
        del inner[name]  # parts of a data set, which nobody means as classes
    shared = sorted(name for name, count in inner.items() if count > 1)
    # One name everywhere is no choice of classes: TinyImageNet has CLASS/images.
    if len(inner) < 2 or 2 * sum(inner[name] for name in shared) < inner.total():
        return ""
    sentence = (
        f"{folder} is read with its folders as classes ({_first_few([path.name for path in uppers])}), but several of "
        f'them hold folders of the same names ({_first_few(shared)}): if they are sites, set sites = "folder".'
    )
    return " ".join(sentence.split())


def _first_few(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def read_flat(
    folder: Path,
    *,
    size: int | None = None,
    on_bad: OnBad = "error",
    progress: Progress | None = None,
    skipped: list[str] | None = None,
) -> ImageStore:
    """All images below a folder as one class: the OUT sets LSUN-C, LSUN-R and iSUN."""
    files = [(path, 0) for path in images_below(folder)]
    return _read_files(folder, files, ("all",), None, size, on_bad, progress, skipped)


def read_tinyimagenet(
    folder: Path,
    *,
    size: int | None = None,
    on_bad: OnBad = "error",
    progress: Progress | None = None,
    skipped: list[str] | None = None,
) -> ImageStore:
    """TinyImageNet: train/CLASS/images, and val with val_annotations.txt (or a folder a class) as the test part."""
    train = _subfolders(folder / "train")
    classes = tuple(path.name for path in train)
    files = [(path, label) for label, own in enumerate(train) for path in images_below(own)]
    count = len(files)
    annotations = folder / "val" / "val_annotations.txt"
    if annotations.is_file():
        text = _file_bytes(annotations).decode("utf-8", "replace")
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip():
                continue
            name, label = (*line.split("\t"), "", "")[:2]
            if label not in classes or not name or Path(name).name != name:
                raise InputError(f"{annotations} has {line[:60]!r} in line {number}; a file and a class are needed.")
            files.append((folder / "val" / "images" / name, classes.index(label)))
    else:
        for own in _subfolders(folder / "val"):
            if own.name not in classes:
                raise InputError(f"{folder / 'val'} has no val_annotations.txt, and {own.name} is no class of train.")
            files += [(path, classes.index(own.name)) for path in images_below(own)]
    if not count or len(files) == count:
        raise InputError(f"{folder} has {count} training and {len(files) - count} validation images; both are needed.")
    test = [index >= count for index in range(len(files))]
    return _read_files(folder, files, classes, test, size, on_bad, progress, skipped)


def read_tinyimagenet_c(
    folder: Path,
    corruption: str | None = None,
    severity: int | None = None,
    *,
    size: int | None = None,
    on_bad: OnBad = "error",
    progress: Progress | None = None,
    skipped: list[str] | None = None,
) -> ImageStore:
    """Tiny-ImageNet-C: CORRUPTION/SEVERITY/CLASS folders; `domains` as in `read_cifar_c`."""
    found = [path.name for path in _subfolders(folder) if (path / "1").is_dir()]
    chosen = _chosen_corruptions(folder, found, corruption, severity)
    places = [(name, level) for name in chosen for level in (SEVERITIES if severity is None else (severity,))]
    classes = tuple(sorted({sub.name for name, level in places for sub in _subfolders(folder / name / str(level))}))
    files, domains = [], []
    for name, level in places:
        own = [
            (path, classes.index(sub.name))
            for sub in _subfolders(folder / name / str(level))
            for path in images_below(sub)
        ]
        if not own:
            raise InputError(f"{folder / name / str(level)} holds no images.")
        files += own
        domains += [found.index(name) * len(SEVERITIES) + level - 1] * len(own)
    return _read_files(folder, files, classes, None, size, on_bad, progress, skipped, domains, _places(found))


def read_sites(
    folder: Path,
    *,
    size: int | None = None,
    on_bad: OnBad = "error",
    progress: Progress | None = None,
    skipped: list[str] | None = None,
) -> ImageStore:
    """SITE/CLASS folders of images: `domains` numbers the sites by name; a site need not have every class."""
    sites = _subfolders(folder)
    if _images_in(folder) or any(_images_in(site) for site in sites):
        raise InputError(f"{folder} has images outside of SITE/CLASS folders; each belongs into a class of a site.")
    held = [[(path, sub.name) for sub in _subfolders(site) for path in images_below(sub)] for site in sites]
    classes = tuple(sorted({name for own in held for _, name in own}))  # an empty folder is no class
    files: list[tuple[Path, int]] = []
    domains: list[int] = []
    for number, own in enumerate(held):
        files += [(path, classes.index(name)) for path, name in own]
        domains += [number] * len(own)
    names = tuple(site.name for site in sites)
    return _read_files(folder, files, classes, None, size, on_bad, progress, skipped, domains, names)


def read_table(
    path: Path,
    *,
    site: str = "",
    size: int | None = None,
    on_bad: OnBad = "error",
    progress: Progress | None = None,
    skipped: list[str] | None = None,
) -> ImageStore:
    """A CSV table with the columns file and label, perhaps split (train or test); the column `site` numbers the sites.

    Files are named relative to the table.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as text:
            reader = csv.DictReader(text)
            columns, rows = list(reader.fieldnames or ()), list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read as a table: {error}.") from None
    for column in ("file", "label", *([site] if site else [])):
        if column not in columns:
            raise InputError(f"{path} has no column {column!r}; it has {', '.join(columns) or 'none'}.")
    if not rows:
        raise InputError(f"{path} has no line below its columns; each image needs one.")
    for number, row in enumerate(rows, start=2):
        lacking = [column for column in columns if row[column] is None or (column != "split" and not row[column])]
        if lacking or None in row:
            raise InputError(f"{path} has no value for {(lacking or columns)[0]!r} in line {number}, or too many.")
        if "split" in columns and row["split"] not in ("train", "test"):
            raise InputError(f"{path} has the split {row['split']!r} in line {number}; train and test are possible.")
    classes = tuple(sorted({row["label"] for row in rows}))
    names = tuple(sorted({row[site] for row in rows})) if site else ()
    files = [(path.parent / row["file"], classes.index(row["label"])) for row in rows]
    test = [row["split"] == "test" for row in rows] if "split" in columns else None
    domains = [names.index(row[site]) for row in rows] if site else None
    return _read_files(path.parent, files, classes, test, size, on_bad, progress, skipped, domains, names)


def read_pacs(
    folder: Path,
    *,
    size: int | None = None,
    on_bad: OnBad = "error",
    progress: Progress | None = None,
    skipped: list[str] | None = None,
) -> ImageStore:
    """PACS: DOMAIN/CLASS folders; `domains` 0 to 3 are art_painting, cartoon, photo and sketch."""
    files, domains = [], []
    for number, domain in enumerate(PACS_DOMAINS):
        inside = _subfolders(folder / domain)
        strange = [path.name for path in inside if path.name not in PACS_CLASSES]
        if not inside or strange:
            held = ", ".join(strange) or "no folder"
            raise InputError(f"{folder / domain} holds {held}; the classes of PACS are {', '.join(PACS_CLASSES)}.")
        own = [(path, PACS_CLASSES.index(sub.name)) for sub in inside for path in images_below(sub)]
        files += own
        domains += [number] * len(own)
    return _read_files(folder, files, PACS_CLASSES, None, size, on_bad, progress, skipped, domains, PACS_DOMAINS)


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise InputError(f"{folder} cannot be read: {error.strerror}.") from None


def _images_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _is_image(path.name) and path.is_file())


def images_below(folder: Path) -> list[Path]:
    """All images below a folder in the order of their names, without hidden files and folders."""
    return sorted(_walk_images(folder))


def _holds_images(folder: Path) -> bool:
    return next(_walk_images(folder), None) is not None  # the first one is enough


def _walk_images(folder: Path) -> Iterator[Path]:
    for place, inside, names in os.walk(folder):
        inside[:] = [name for name in inside if not name.startswith(".")]
        yield from (Path(place, name) for name in names if _is_image(name))


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES and not name.startswith(".")  # noqa: PTH122 (speed)


def _read_files(
    folder: Path,
    files: Sequence[tuple[Path, int]],
    classes: tuple[str, ...],
    test: Sequence[bool] | None,
    size: int | None,
    on_bad: OnBad,
    progress: Progress | None,
    skipped: list[str] | None,
    domains: Sequence[int] | None = None,
    domain_names: tuple[str, ...] = (),
) -> ImageStore:
    if not files:
        raise InputError(f"{folder} holds no images ({', '.join(sorted(IMAGE_SUFFIXES))}).")
    images, kept = _decode_all(
        len(files), lambda i: str(files[i][0]), lambda i: str(files[i][0]), size, on_bad, progress, skipped
    )
    return _store(
        images,
        np.array([label for _, label in files], dtype=np.int64)[kept],
        classes=classes,
        name=folder.name,
        domains=None if domains is None else np.array(domains, dtype=np.int64)[kept],
        domain_names=domain_names,
        test=None if test is None else np.array(test, dtype=bool)[kept],
        skipped=len(files) - len(kept),
    )


_ASK_SIZE = "ask for a size, as in FOLDER@64, so that all are made alike"


def _decode_all(
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


def _store(images: Any, labels: Any, **more: Any) -> ImageStore:
    return ImageStore(images, labels, **more)


# Objects


def read_dataset(
    dataset: Any,
    *,
    size: int | None = None,
    on_bad: OnBad = "error",
    progress: Progress | None = None,
    skipped: list[str] | None = None,
) -> ImageStore:
    """Any map-style dataset of (image, label) or of images: PIL, uint8 arrays H×W×C, or tensors C×H×W.

    Float tensors must lie in [0, 1]: what was normalised already cannot be stored as bytes.
    """
    try:
        count = len(dataset)
    except TypeError:
        raise InputError(f"{type(dataset).__name__} has no length; a map-style dataset is needed.") from None
    images: list[Any] = []
    labels, bad = [], []
    for index in range(count):
        try:
            item = dataset[index]
            image, label = item[:2] if isinstance(item, tuple | list) and len(item) > 1 else (item, 0)
            if isinstance(image, tuple | list) and len(image) == 1:
                image = image[0]
            pixels, number = _item_pixels(image, size), int(label)
        except Exception as error:  # a user's dataset may raise anything
            reason = f"item {index}: {one_line(error)}"
            if on_bad == "error":
                raise InputError(f"{type(dataset).__name__} cannot be read, {reason.rstrip('.')}.") from error
            bad.append(reason)
            continue
        if images and pixels.shape != images[0].shape:
            reason = f"item {index}: its shape is {pixels.shape}, and that of the others {images[0].shape}"
            if on_bad == "error":
                raise InputError(f"{type(dataset).__name__} cannot be read, {reason}; ask for a size.")
            bad.append(reason)
            continue
        images.append(pixels)
        labels.append(number)
        if progress is not None and (index + 1) % 100 in (0, count % 100):
            progress(index + 1, count)
    if not images:
        raise InputError(f"{type(dataset).__name__} has no image that can be read{': ' + bad[0] if bad else ''}.")
    if skipped is not None:
        skipped += bad
    classes = getattr(dataset, "classes", None)
    named = isinstance(classes, list | tuple) and max(labels) < len(classes)
    return _store(
        np.stack(images),
        np.array(labels, dtype=np.int64),
        classes=tuple(str(name) for name in classes) if named and classes is not None else (),
        name=type(dataset).__name__,
        skipped=len(bad),
    )


def _item_pixels(image: Any, size: int | None) -> Any:
    from PIL import Image

    if isinstance(image, Image.Image):
        rgb = as_rgb(image)
        pixels = np.array(rgb.convert("L") if image.mode == "L" else rgb)
    elif isinstance(image, torch.Tensor):
        pixels = image.detach().cpu().numpy()
        if pixels.ndim == 3 and pixels.shape[0] in (1, 3):
            pixels = pixels.transpose(1, 2, 0)
    else:
        pixels = np.asarray(image)
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3):
        raise InputError(f"its shape is {pixels.shape}, and an image of 1 or 3 channels is needed")
    if pixels.dtype.kind == "f":
        if not (np.isfinite(pixels).all() and pixels.min() >= 0 and pixels.max() <= 1):
            raise InputError(f"its floats go from {pixels.min():.3g} to {pixels.max():.3g}, and 0 to 1 is needed")
        pixels = np.round(pixels * 255).astype(np.uint8)
    if pixels.dtype != np.uint8:
        raise InputError(f"its type is {pixels.dtype}, and uint8 is needed")
    return pixels if size is None else square_pixels(pixels, size)


def named(
    store: ImageStore, name: str, classes: tuple[str, ...] = (), domain_names: tuple[str, ...] = ()
) -> ImageStore:
    """The same store under the name by which results report it, with these classes and domains where it names none."""
    return replace(
        store, name=name, classes=store.classes or classes, domain_names=store.domain_names or domain_names
    )


def split_size(spec: str) -> tuple[str, int | None]:
    """`name@64` is a name and a size in pixels."""
    match = re.fullmatch(r"(.+)@(\d{1,5})", spec)
    return (match[1], int(match[2])) if match else (spec, None)
