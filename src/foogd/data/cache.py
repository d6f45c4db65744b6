"""Decoded images kept as one memory-mapped file a set, so that opening a set again takes no decoding.

`ROOT/.foogd-cache/NAME-HASH/` holds images.npy, labels.npy, perhaps domains.npy and test.npy, and meta.json. The hash
is that of names, sizes and times of the source files and of the options of the reader: when a source changes, so does
the folder, and the older one is swept away.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .store import ImageStore

FOLDER = ".foogd-cache"
_FORMAT = 2  # 2: images are upright
_META = "meta.json"
_DRAFT = ".draft-"
_ABANDONED = 24 * 3600  # seconds after which a draft has no writer any more

Options = Mapping[str, str | int | None]


def fingerprint(parts: Sequence[Path]) -> str:
    """A hash of the names, sizes and times of these files, and of all files below these folders."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{part.absolute()}\0".encode("utf-8", "surrogateescape"))
        for path in _files_below(part):
            name = path.relative_to(part).as_posix()
            try:
                stamp = _stamp(path)
            except OSError:  # a link to nowhere: the reader will name it
                stamp = []
            digest.update(f"{name}\0{stamp}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _files_below(part: Path) -> list[Path]:
    if part.is_file():
        return [part]
    found = []
    for place, inside, names in os.walk(part):
        inside[:] = [name for name in inside if not name.startswith(".")]
        found += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted(found)


def cache_folder(root: Path, name: str, parts: Sequence[Path], options: Options) -> Path:
    """Where the decoded images of these sources lie, whether they are there yet or not."""
    key = hashlib.sha256(f"{_FORMAT}\0{fingerprint(parts)}\0{_text(options)}".encode()).hexdigest()
    safe = "".join(letter if letter.isalnum() or letter in "_." else "_" for letter in name)
    return root / FOLDER / f"{safe}-{key[:16]}"


def cached(
    root: Path, name: str, parts: Sequence[Path], options: Options, read: Callable[[list[str]], ImageStore]
) -> ImageStore:
    """The store that `read` makes of these files, from the cache where it is there and whole.

    `read` gets a list for the names of the images that it skips. Where the cache cannot be written (no space, no
    right), the images stay in memory.
    """
    folder = cache_folder(root, name, parts, options)
    found = open_folder(folder)
    if found is not None:
        return found
    skipped: list[str] = []
    store = read(skipped)
    try:
        _write(folder, store, name, parts, options, skipped)
    except OSError:
        return store
    return open_folder(folder) or store


def open_folder(folder: Path) -> ImageStore | None:
    """The store in a cache folder, mapped into memory; None where it is not there, or damaged.

    Files with the size and the time that they were written with are trusted; others are compared by their content.
    """
    try:
        meta = json.loads((folder / _META).read_text(encoding="utf-8"))
        if meta["format"] != _FORMAT:
            return None
        # "c" (copy on write): torch warns about arrays that cannot be written to.
        arrays = {key: np.load(folder / f"{key}.npy", mmap_mode="c", allow_pickle=False) for key in meta["files"]}
        words: dict[str, Any] = {"classes": tuple(meta["classes"]), "domain_names": tuple(meta["domain_names"])}
        store = ImageStore(name=meta["name"], skipped=meta["skipped"], **words, **arrays)
        touched = any(_stamp(folder / f"{key}.npy") != stamp for key, stamp in meta["files"].items())
        return None if touched and store.content_hash() != meta["content_hash"] else store
    except Exception:  # whatever is wrong with it, the set is read again
        return None


def read_meta(folder: Path) -> dict[str, Any] | None:
    """What a cache folder says of itself: name, content_hash, skipped, …; None where there is none."""
    try:
        meta = json.loads((folder / _META).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return meta if isinstance(meta, dict) else None


def _write(
    folder: Path, store: ImageStore, name: str, parts: Sequence[Path], options: Options, skipped: list[str]
) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder.parent)
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{_DRAFT}{name[:20].replace(os.sep, '_')}-"))
    try:
        draft.chmod(0o755)  # a temporary folder starts private
        stamps = {}
        for key in ("images", "labels", "domains", "test"):
            tensor = getattr(store, key)
            if tensor is None:
                continue
            with (draft / f"{key}.npy").open("wb") as file:
                np.save(file, tensor.numpy(), allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
            stamps[key] = _stamp(draft / f"{key}.npy")
        meta = {
            "format": _FORMAT,
            "source": [name, *(str(part.absolute()) for part in parts)],
            "options": _text(options),
            "name": store.name,
            "classes": store.classes,
            "domain_names": store.domain_names,
            "content_hash": store.content_hash(),
            "files": stamps,
            "skipped": len(skipped),
            "first_skipped": skipped[:20],
        }
        (draft / _META).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        _put(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    _sweep_stale(folder, meta)


def _put(draft: Path, folder: Path) -> None:
    """Rename the draft; what another writer has put there meanwhile is as good, unless it is damaged."""
    with contextlib.suppress(OSError):
        draft.rename(folder)
        return
    if open_folder(folder) is not None:
        return
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=_DRAFT))
    try:
        with contextlib.suppress(FileNotFoundError):  # another writer was faster
            folder.rename(aside / "damaged")
        with contextlib.suppress(OSError):
            draft.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sweep(place: Path) -> None:
    for draft in place.glob(f"{_DRAFT}*"):
        with contextlib.suppress(OSError):
            if time.time() - draft.stat().st_mtime > _ABANDONED:
                shutil.rmtree(draft, ignore_errors=True)


def _sweep_stale(folder: Path, meta: Mapping[str, Any]) -> None:
    # Who has an older one mapped keeps it: the file goes when it is closed.
    stem = folder.name.rpartition("-")[0]
    for other in folder.parent.glob(f"{stem}-*"):
        about = read_meta(other)
        same = about is not None and all(about.get(key) == meta[key] for key in ("source", "options"))
        if other != folder and same:
            shutil.rmtree(other, ignore_errors=True)


def _stamp(path: Path) -> list[int]:
    about = path.stat()
    return [about.st_size, about.st_mtime_ns]


def _text(options: Options) -> str:
    return json.dumps(dict(options), sort_keys=True)
