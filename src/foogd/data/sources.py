"""Data sets by name, by path, and a user's own by `file.py:function`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Literal, final

from ..core.errors import InputError
from ..core.plugins import load_object
from .arrays import read_npz
from .cache import cached
from .catalogue import CATALOGUE
from .federation import fit_to
from .folders import read_sites, read_table, read_tree, sites_taken_for_classes
from .layouts import Entry, Layout, locate
from .readers import OnBad, Progress, named, split_size
from .store import ImageStore

IN_CLASSES = 8  # the first classes of fashion.npz; the others are the near OUT


@final
@dataclass(frozen=True)
class Source:
    """A data set that foogd knows: how it is read below a root folder, what it is for, and its licence."""

    load: Callable[[Path], ImageStore]
    role: Literal["in", "in-c", "out"]
    description: str
    licence: str
    flip: bool  # whether a mirrored image still shows its class


def load_source(
    spec: str, root: Path, *, sites: str = "", on_bad: OnBad = "error", progress: Progress | None = None
) -> ImageStore:
    """The data set of a name or path, or what the function `file.py:fn` returns for the root folder.

    `textures@64` asks for images of 64 pixels; `cifar10c/fog/3` is one corruption at one severity; a path is a folder
    of images, a folder a class, an .npz file, or a CSV table of files and labels. `sites` says where the site of an
    image of yours stands: "folder" for SITE/CLASS folders, or the name of a column. What needs decoding is cached
    below the root folder.
    """
    text, size = split_size(spec)
    name, *rest = text.split("/")
    entry = CATALOGUE.get(name)
    if entry is not None and not rest and size is None and entry.embedded:
        return SOURCES[name].load(root)
    if entry is not None and entry.embedded and not rest:
        raise InputError(f"{spec} asks for a size; {name} has the one of its arrays.")
    if entry is not None and (not rest or entry.role == "in-c"):
        return load_entry(entry, root, size=size, part=_part(spec, rest), on_bad=on_bad, progress=progress)
    for path, px in ((Path(spec), None), (Path(text), size)):
        if path.is_dir() or (path.is_file() and path.suffix.lower() in (".npz", ".csv")):
            return _load_path(path, root, sites, px, on_bad, progress)
    if ":" not in spec:
        after = spec.rpartition("@")[2] if "@" in spec else ""
        what = "it is a file of another kind" if Path(spec).is_file() else f"nothing is there, seen from {Path.cwd()}"
        if after and size is None:
            what = f"after @ a number of pixels is needed, not {after!r}"
        raise InputError(
            f"unknown data set {spec!r}; known are {', '.join(SOURCES)}, a folder of images, an .npz or "
            f".csv file, or file.py:function; as a path, {what}."
        )
    load = load_object(spec, "data set")
    if not callable(load):
        raise InputError(f"{spec} is a {type(load).__name__}; a function root → ImageStore is needed.")
    store = load(root)
    if not isinstance(store, ImageStore):
        raise InputError(f"{spec} returned {type(store).__name__}; an ImageStore is needed.")
    return store


def load_entry(
    entry: Entry,
    root: Path,
    *,
    size: int | None = None,
    part: tuple[str | None, int | None] = (None, None),
    on_bad: OnBad = "error",
    progress: Progress | None = None,
) -> ImageStore:
    """A data set of the catalogue from below the root folder, in whichever form it lies there."""
    layout, found = require(entry, root)
    if size is not None and not layout.decodes:
        raise InputError(f"{entry.name}@{size}: the {layout.kind} holds pixels; a size needs encoded images.")
    if entry.role == "in-c" and not layout.decodes:
        return read_layout(layout, found, part=part)  # its files can be mapped as they are
    more: dict[str, Any] = {"size": size, "on_bad": on_bad, "progress": progress} if layout.decodes else {}

    def read(skipped: list[str]) -> ImageStore:
        return read_layout(layout, found, part=part, **more, **({"skipped": skipped} if layout.decodes else {}))

    return cached(root, entry.name, found, cache_options(layout, size, part, on_bad), read)


def cache_options(
    layout: Layout,
    size: int | None = None,
    part: tuple[str | None, int | None] = (None, None),
    on_bad: OnBad = "error",
) -> dict[str, str | int | None]:
    """What, besides the files, decides the images in the cache."""
    return {"kind": layout.kind, "size": size, "on_bad": on_bad, "corruption": part[0], "severity": part[1]}


def require(entry: Entry, root: Path) -> tuple[Layout, tuple[Path, ...]]:
    """Where and in which form the data set lies below the root folder; an error says how to get it."""
    found = locate(entry, root)
    if found is None:
        kinds = ", ".join(dict.fromkeys(layout.kind for layout in entry.layouts))
        how = f"foogd data get {entry.name}" if entry.files else f"see {entry.where}"
        raise InputError(
            f"{entry.name} is neither in {root / entry.name} nor in {root} ({kinds}): {how}, "
            f"or foogd data get {entry.name} --from PATH for what you have."
        )
    return found


def read_layout(
    layout: Layout, found: tuple[Path, ...], *, part: tuple[str | None, int | None] = (None, None), **options: Any
) -> ImageStore:
    """What lies there, decoded now, under the name by which results report it."""
    chosen = () if part == (None, None) else part
    return named(layout.read(*found, *chosen, **options), layout.name, layout.classes, layout.domain_names)


def _part(spec: str, rest: list[str]) -> tuple[str | None, int | None]:
    if len(rest) > 2 or (len(rest) == 2 and not rest[1].isdecimal()):
        raise InputError(f"{spec!r} is not of the form name/corruption/severity.")
    return (rest[0] if rest else None, int(rest[1]) if len(rest) == 2 else None)


def _load_path(
    path: Path, root: Path, sites: str, size: int | None, on_bad: OnBad, progress: Progress | None
) -> ImageStore:
    reader: Callable[..., ImageStore]
    if path.is_dir():
        if sites not in ("", "folder"):
            raise InputError(f"sites = {sites!r} names a column, but {path} is a folder; 'folder' is possible.")
        reader = read_sites if sites else read_tree
    elif path.suffix.lower() == ".csv":
        reader = partial(read_table, site=sites)
    elif sites:
        raise InputError(f"sites = {sites!r} is not possible for {path}: an .npz has its sites in the array domains.")
    else:
        reader = read_npz

    def read(skipped: list[str]) -> ImageStore:
        store = reader(path, size=size, on_bad=on_bad, progress=progress, skipped=skipped)
        return store if store.name else replace(store, name=path.stem)

    place = path.resolve()
    # The images that a table names lie below it.
    parts = (place, place.parent) if path.suffix.lower() == ".csv" else (place,)
    options = {"kind": "path", "size": size, "on_bad": on_bad, "sites": sites}
    store = cached(root, place.stem, parts, options, read)
    # Not by the reader: what older versions have cached must be told too.
    note = sites_taken_for_classes(path) if reader is read_tree else ""
    notes = [note, _empty_folders(path, store)] if path.is_dir() else []
    note = " ".join(filter(None, notes))
    return replace(store, note=note) if note else store


def _empty_folders(path: Path, store: ImageStore) -> str:
    """A sentence where folders of classes or sites hold no image; else nothing."""
    lacking = []
    for names, numbers in ((store.classes, store.labels), (store.domain_names, store.domains)):
        found = set() if numbers is None else set(numbers.tolist())
        lacking += [name for number, name in enumerate(names) if number not in found]
    return f"{path} has no images in {', '.join(lacking)}." if lacking else ""


def _embedded(name: str) -> ImageStore:
    with as_file(files("foogd.data") / "embedded" / name) as path:
        return ImageStore.load(path)


def _fashion(root: Path) -> ImageStore:
    store = _embedded("fashion.npz")
    inside = store.select(store.labels < IN_CLASSES)
    return replace(inside, classes=store.classes[:IN_CLASSES])


def _fashion_out(root: Path) -> ImageStore:
    store = _embedded("fashion.npz")
    outside = store.select(store.labels >= IN_CLASSES)
    return replace(
        outside,
        labels=outside.labels - IN_CLASSES,
        classes=store.classes[IN_CLASSES:],
        name="fashion_out",
        test=None,
    )


def _digits(root: Path) -> ImageStore:
    return fit_to(_embedded("digits.npz"), (1, 28, 28))


_EMBEDDED = {"fashion": _fashion, "fashion_out": _fashion_out, "digits": _digits}

SOURCES: dict[str, Source] = {
    name: Source(
        _EMBEDDED.get(name) or partial(load_entry, entry), entry.role, entry.description, entry.licence, entry.flip
    )
    for name, entry in CATALOGUE.items()
}
