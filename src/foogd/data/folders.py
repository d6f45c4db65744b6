"""Folders of images, also by site, by domain or by a table."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..core.errors import InputError
from .cifar import chosen_corruptions, place_names
from .readers import SEVERITIES, OnBad, Progress, decode_all, file_bytes, make_store
from .store import ImageStore

PACS_DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".ppm", ".pgm", ".gif", ".tif", ".tiff"})

_HELD_OUT = ("test", "val", "valid", "validation")


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
        text = file_bytes(annotations).decode("utf-8", "replace")
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
    chosen = chosen_corruptions(folder, found, corruption, severity)
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
    return _read_files(folder, files, classes, None, size, on_bad, progress, skipped, domains, place_names(found))


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
    images, kept = decode_all(
        len(files), lambda i: str(files[i][0]), lambda i: str(files[i][0]), size, on_bad, progress, skipped
    )
    return make_store(
        images,
        np.array([label for _, label in files], dtype=np.int64)[kept],
        classes=classes,
        name=folder.name,
        domains=None if domains is None else np.array(domains, dtype=np.int64)[kept],
        domain_names=domain_names,
        test=None if test is None else np.array(test, dtype=bool)[kept],
        skipped=len(files) - len(kept),
    )
