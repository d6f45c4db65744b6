"""The forms in which a data set may lie in a folder: how each is found and read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from . import arrays, folders
from .store import ImageStore

Role = Literal["in", "in-c", "out"]
_DEPTH = 2  # archives are unpacked into folders of their own, sometimes into two


@final
@dataclass(frozen=True)
class Remote:
    """A file at its official address; `md5` is None where no published checksum is known."""

    address: str
    md5: str | None = None
    needed: bool = True  # else only `get --all` downloads it

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.address.partition("?")[0].rpartition("/")[2]


@final
@dataclass(frozen=True)
class Facts:
    """What a whole data set must show; None is not checked, and one number for classes holds for each of them.

    A set without a test part counts as training; of an IN-C set, the facts are those of one corruption.
    """

    train: int | None = None
    test: int | None = None
    classes: int | None = None
    train_classes: int | tuple[int, ...] | None = None
    test_classes: int | None = None
    domains: tuple[int, ...] | None = None
    px: int | None = None
    first_label: int | None = None
    corruptions: int | None = None


@final
@dataclass(frozen=True)
class Layout:
    """One form in which a data set may lie in a folder: how it is found there and how it is read."""

    kind: str
    find: Callable[[Path], tuple[Path, ...]]  # the files or folders that it is made of; () where it is not there
    read: Callable[..., ImageStore]  # (*found, [corruption, severity,] and, where images are decoded, size, on_bad, …)
    name: str  # the name under which results report it
    facts: Facts
    decodes: bool = True  # else it holds pixels
    anywhere: bool = True  # its file names are its own: it is also found right in the root folder
    classes: tuple[str, ...] = ()  # the names of classes and domains where the files do not say them
    domain_names: tuple[str, ...] = ()


@final
@dataclass(frozen=True)
class Entry:
    """A data set: what it is for, what it holds, under which terms, and where it comes from."""

    name: str
    role: Role
    images: str
    px: int
    licence: str
    description: str
    layouts: tuple[Layout, ...] = ()  # () is inside the package
    files: tuple[Remote, ...] = ()
    where: str = ""  # where to look when there is no stable address
    flip: bool = True  # whether a mirrored image still shows its class

    @property
    def embedded(self) -> bool:
        """Whether the images lie inside the package."""
        return not self.layouts


def locate(entry: Entry, root: Path) -> tuple[Layout, tuple[Path, ...]] | None:
    """The first form of the data set below ROOT/NAME, or right in ROOT where the file names are its own."""
    for layout in entry.layouts:
        found = layout.find(root / entry.name)
        if found:
            return layout, found
    for layout in entry.layouts:
        found = layout.find(root) if layout.anywhere else ()
        if found:
            return layout, found
    return None


# Finders


def folder_with(*names: str, every: bool = False) -> Callable[[Path], tuple[Path, ...]]:
    """The nearest folder that holds one of these names, or every one of them."""
    need = all if every else any

    def find(base: Path) -> tuple[Path, ...]:
        level = [base]
        for _ in range(_DEPTH + 1):
            for folder in level:
                if need((folder / name).exists() for name in names):
                    return (folder,)
            level = [path for folder in level for path in _inside(folder)]
        return ()

    return find


def _inside(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))[:1000]
    except OSError:
        return []


def files_named(*names: str) -> Callable[[Path], tuple[Path, ...]]:
    """All of these files where one of them is there, so that the reader can name what is missing."""

    def find(base: Path) -> tuple[Path, ...]:
        for folder in (base, *_inside(base)):
            if any((folder / name).is_file() for name in names):
                return tuple(folder / name for name in names)
        return ()

    return find


def _any_images(base: Path) -> tuple[Path, ...]:
    level = [base]
    for _ in range(_DEPTH + 2):
        if any(path.suffix.lower() in folders.IMAGE_SUFFIXES for folder in level[:3] for path in _peek(folder)):
            return (base,)
        level = [path for folder in level[:3] for path in _inside(folder)]
    return ()


def _peek(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _tree_root(base: Path) -> tuple[Path, ...]:
    """The folder of the classes: archives often wrap it in one more folder."""
    if not _any_images(base):
        return ()
    for _ in range(_DEPTH):
        inside = _inside(base)
        if len(inside) != 1 or not _inside(inside[0]):
            break
        base = inside[0]
    return (base,)


# Layouts


def pack(
    name: str, file: str, facts: Facts, classes: tuple[str, ...] = (), domain_names: tuple[str, ...] = ()
) -> Layout:
    return Layout(
        "pack",
        files_named(file),
        lambda path, **options: arrays.read_packs([path], **options),
        name,
        facts,
        classes=classes,
        domain_names=domain_names,
    )


def cifar_packs(train_a: Path, train_b: Path, test: Path, **options: Any) -> ImageStore:
    return arrays.read_packs([train_a, train_b], [test], **options)


def dtd(folder: Path, *, size: int | None = None, **options: Any) -> ImageStore:
    images = folder / "images" if (folder / "images").is_dir() else folder
    return folders.read_tree(images, size=size or 32, **options)  # its images have many sizes


def tree(name: str, facts: Facts) -> Layout:
    return Layout("folders", _tree_root, folders.read_tree, name, facts, anywhere=False)


def flat(name: str, facts: Facts) -> Layout:
    return Layout("folder of images", _any_images, folders.read_flat, name, facts, anywhere=False)


def array_files(name: str, facts: Facts | None = None) -> Layout:
    return Layout("arrays", files_named(f"{name}.npz"), arrays.read_npz, name, facts or Facts())
