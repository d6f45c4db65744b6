"""Data sets from their official addresses: download with resume (pooch does the work), checksum, unpacking."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, final

from ..core.errors import InputError
from .folders import IMAGE_SUFFIXES
from .layouts import Entry, Remote
from .readers import Progress

TIMEOUT = 30  # seconds without an answer
_BLOCK = 1 << 18
_PART, _WRONG = ".part", ".wrong"
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")


@final
@dataclass(frozen=True)
class Fetched:
    """A file that is now below the root folder; `checked` says whether a published checksum agreed."""

    path: Path
    md5: str
    checked: bool


def fetch(
    entry: Entry,
    root: Path,
    *,
    mirror: str | None = None,
    everything: bool = False,
    progress: Callable[[str], Progress] | None = None,
) -> list[Fetched]:
    """Download a data set to ROOT/NAME and unpack it there; a half-finished download goes on where it stopped."""
    if not entry.files:
        raise InputError(
            f"{entry.name} has no stable official address: look at {entry.where}, "
            f"then foogd data get {entry.name} --from PATH."
        )
    folder = root / entry.name
    with _disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
    fetched = []
    for remote in entry.files:
        if remote.needed or everything:
            target = folder / remote.name
            report = None if progress is None else progress(remote.name)
            fetched.append(download(address(remote, mirror), target, remote.md5, progress=report))
            if remote.name.endswith(_ARCHIVES):
                unpack(target, folder)
    return fetched


def address(remote: Remote, mirror: str | None) -> str:
    """The official address, or the file of the same name at a mirror; a mirror may also name the file itself."""
    if mirror is None:
        return remote.address
    if not re.match(r"https?://", mirror):
        raise InputError(f"the mirror {mirror!r} is no address that begins with http:// or https://.")
    return mirror if mirror.partition("?")[0].endswith(f"/{remote.name}") else f"{mirror.rstrip('/')}/{remote.name}"


def download(url: str, target: Path, md5: str | None, *, progress: Progress | None = None) -> Fetched:
    """Download one file, in one step as far as others can see, and compare its checksum."""
    import pooch

    part = target.with_name(target.name + _PART)
    if target.is_file():
        found = pooch.file_hash(str(target), alg="md5")
        if md5 is None or found == md5:
            return Fetched(target, found, md5 is not None)
    resumed = _receive(url, part, progress)
    found = pooch.file_hash(str(part), alg="md5")
    if md5 is not None and found != md5 and resumed:
        part.unlink()  # the beginning was of another file: once more from the start
        _receive(url, part, progress)
        found = pooch.file_hash(str(part), alg="md5")
    if _looks_like_html(part):
        part.unlink()
        raise InputError(f"{url} answered with a web page instead of {target.name}; try --mirror or --from PATH.")
    if md5 is not None and found != md5:
        wrong = target.with_name(target.name + _WRONG)
        part.replace(wrong)
        raise InputError(
            f"{url} has the md5 {found}, but {md5} is published; the file is kept as {wrong}, nothing was unpacked."
        )
    part.replace(target)
    return Fetched(target, found, md5 is not None)


@final
class _Restart(Exception):
    """The server cannot go on from where the partial file ends."""


@final
class _Whole(Exception):
    """The partial file is already all there is."""


def _receive(url: str, part: Path, progress: Progress | None) -> bool:
    """Bring the partial file to its end; says whether it had a beginning."""
    try:
        try:
            return _request(url, part, progress)
        except _Restart:
            part.unlink()
            return _request(url, part, progress)
    except InputError:
        if part.exists() and not part.stat().st_size:
            part.unlink()
        raise


def _request(url: str, part: Path, progress: Progress | None) -> bool:
    import requests
    from pooch import HTTPDownloader

    with _disk(part), part.open("ab") as file:
        begun = file.tell()

        def inspect(response: Any, *_: Any, **__: Any) -> None:
            _inspect(response, url, part, begun)
            if begun and response.status_code == 200:  # the server does not know ranges
                file.truncate(0)
                meter.begun = 0

        meter = _Meter(progress, begun)
        headers = {"Accept-Encoding": "identity"}
        if begun:
            headers["Range"] = f"bytes={begun}-"
        get = HTTPDownloader(
            progressbar=meter, chunk_size=_BLOCK, timeout=TIMEOUT, headers=headers, hooks={"response": inspect}
        )
        try:
            get(url, file, None)
        except _Whole:
            return True
        except requests.HTTPError as error:
            answer = error.response
            raise InputError(f"{url} answered {answer.status_code} {answer.reason}.") from None  # type: ignore[union-attr]
        except requests.RequestException as error:
            held = part.stat().st_size
            if held:
                raise InputError(
                    f"{url} broke off after {held:,} bytes ({_reason(error)}); they are kept, so get it again to go on."
                ) from None
            raise InputError(f"{url} cannot be reached ({_reason(error)}).") from None
    return begun > 0


def _inspect(response: Any, url: str, part: Path, begun: int) -> None:
    """Look at an answer before a byte of it is written."""
    if response.is_redirect or (response.status_code >= 400 and response.status_code != 416):
        return
    if response.status_code == 416:
        total = re.fullmatch(r"bytes \*/(\d+)", response.headers.get("Content-Range", ""))
        raise _Whole if total and int(total[1]) == begun else _Restart
    if response.headers.get("Content-Type", "").startswith("text/html"):
        raise InputError(f"{url} answered with a web page instead of {part.stem}; try --mirror or --from PATH.")
    if response.status_code == 206 and not response.headers.get("Content-Range", "").startswith(f"bytes {begun}-"):
        raise _Restart
    length = response.headers.get("Content-Length", "")
    free = shutil.disk_usage(part.parent).free
    if length.isdecimal() and int(length) > free:
        raise InputError(f"{part.stem} needs {int(length):,} more bytes in {part.parent}, and only {free:,} are free.")


@final
class _Meter:
    """What pooch's downloader asks of a progress bar."""

    def __init__(self, report: Progress | None, begun: int) -> None:
        self.report, self.begun, self.done, self.total = report, begun, 0, 0

    def update(self, count: int) -> None:
        self.done = min(self.done + count, self.total)
        if self.report is not None:
            self.report(self.begun + self.done, self.begun + self.total)

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None:
        return


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    for word, meaning in (
        ("timed out", "no answer in time"),
        ("Name or service not known", "the name is not known"),
        ("resolve", "the name is not known"),
        ("refused", "the connection was refused"),
        ("IncompleteRead", "the connection was closed"),
        ("reset", "the connection was closed"),
        ("unreachable", "the network is not reachable"),
        ("CERTIFICATE", "the certificate is not trusted"),
    ):
        if word in text:
            return meaning
    return text[:120]


class _disk(contextlib.AbstractContextManager["_disk"]):
    """Turns the errors of a disk into one sentence; what is on it stays."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and type(error).__module__ == "builtins":
            _refuse(self.path, error)


def _refuse(path: Path, error: OSError) -> NoReturn:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise InputError(f"the disk is full: {path} cannot be written; make room and get it again.") from None
    raise InputError(f"{path} cannot be written: {error.strerror or error}.") from None


def _looks_like_html(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(512).lstrip().lower()
    return start.startswith((b"<!doctype", b"<html", b"<head", b"<?xml"))


def unpack(archive: Path, folder: Path) -> None:
    """Unpack into the folder; a file appears there only when the whole archive was readable, and none is removed."""
    with _disk(folder):
        draft = Path(tempfile.mkdtemp(dir=folder, prefix=".unpack-"))
    try:
        with _disk(folder):
            _extract(archive, draft)
            for path in sorted(draft.rglob("*")):
                target = folder / path.relative_to(draft)
                if path.is_dir() and not path.is_symlink():
                    target.mkdir(parents=True, exist_ok=True)
                else:
                    path.replace(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _extract(archive: Path, draft: Path) -> None:
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as held:
                held.extractall(draft)  # takes no path out of the folder
        else:
            with tarfile.open(archive) as packed:
                packed.extractall(draft, filter="data")
    except tarfile.FilterError as error:
        raise InputError(f"{archive} is refused: {error}.") from error
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, RuntimeError, ValueError) as error:
        raise InputError(f"{archive} cannot be unpacked: {' '.join(str(error).split())}.") from error
    except OSError as error:
        if error.errno is None:  # gzip's own complaints
            raise InputError(f"{archive} cannot be unpacked: {error}.") from error
        raise


def adopt(entry: Entry, root: Path, path: Path) -> Path:
    """Take a data set from a local path: a folder is linked, an archive unpacked, any other file copied."""
    import pooch

    folder = root / entry.name
    if not path.exists():
        raise InputError(f"{path} does not exist; a folder, an archive or a file of {entry.name} is needed.")
    if path.is_dir():
        if folder.is_symlink() and folder.resolve() == path.resolve():
            return folder
        if folder.exists() or folder.is_symlink():
            raise InputError(f"{folder} is there already; remove it before {path} takes its place.")
        if not any(layout.find(path) for layout in entry.layouts):
            kinds = ", ".join(dict.fromkeys(layout.kind for layout in entry.layouts))
            raise InputError(f"{path} holds nothing that could be {entry.name} ({kinds}); it was not linked.")
        with _disk(folder):
            root.mkdir(parents=True, exist_ok=True)
            folder.symlink_to(path.resolve(), target_is_directory=True)
        return folder
    if path.suffix.lower() in IMAGE_SUFFIXES:
        raise InputError(f"{path} is one image; a folder, an archive or a file of {entry.name} is needed.")
    if folder.is_symlink():
        # What is copied would land in a folder of the user's.
        raise InputError(f"{folder} is a link to {folder.resolve()}; remove it before {path} takes its place.")
    official = {remote.name: remote.md5 for remote in entry.files}.get(path.name)
    if official is not None:
        found = pooch.file_hash(str(path), alg="md5")
        if found != official:
            raise InputError(
                f"{path} has the md5 {found}, but the official file of that name has {official}; "
                f"it is cut short or another file (then give it another name)."
            )
    with _disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(_ARCHIVES):
        unpack(path, folder)
        return folder
    target = folder / path.name
    if target.exists() and os.path.samefile(path, target):  # noqa: PTH121 (two paths, one file)
        return target
    draft = target.with_name(target.name + _PART)
    try:
        with _disk(target):
            shutil.copyfile(path, draft)
            draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return target
