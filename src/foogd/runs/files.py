"""The files of a run folder: their names, and how they are written whole or not at all, and read again."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import IO, Any, get_type_hints

from ..config import Config
from ..core.errors import InputError
from ..evaluation.rows import Row
from ..simulate import RoundResult

CONFIG, ENVIRONMENT = "config.toml", "environment.json"
ROUNDS, ROWS, SUMMARY = "rounds.jsonl", "rows.jsonl", "summary.md"
PARTITION, PICTURE, PROPORTIONS = "partition.json", "partition.png", "proportions.json"
FLOWER = "flower.json"  # of a run on Flower: its nodes, and what they have in common
CHECKPOINT, STATE = "checkpoint", "state.json"
MODEL, ABOUT = "model", "model.json"  # the folder within that of the run, and the file in it
DRAFT = ".draft"
WAIT = 120.0  # seconds in which another evaluation has surely written what it found
# Settings that may be paths, or name files of plug-ins.
PATHS = {item.name for item in fields(Config) if item.metadata["path"] or item.metadata["plugin"]}


def same_setting(key: str, mine: Any, other: Any) -> bool:
    """Whether two values of a setting mean the same; a path may be written in several ways."""
    if mine == other or key not in PATHS:
        return bool(mine == other)
    if isinstance(mine, str) and isinstance(other, str):
        return bool(mine and other) and Path(mine).resolve() == Path(other).resolve()
    pairs = (mine, other)
    if not all(isinstance(values, list | tuple) for values in pairs) or len(mine) != len(other):
        return False
    return all(same_setting(key, *values) for values in zip(mine, other, strict=True))


def need_run(folder: Path) -> None:
    """Complain about what is not a run folder."""
    if not folder.is_dir():
        found = "it is a file" if folder.exists() else "it does not exist"
        raise InputError(f"{folder} is not a run folder: {found}")
    if not (folder / CONFIG).is_file():
        raise InputError(f"{folder} is not a run folder: it has no {CONFIG}")


def resume_command(folder: Path) -> str:
    """What goes on with a run by its own settings, whatever it was started with."""
    return shlex.join(["foogd", "run", str(folder / CONFIG), "--out", str(folder), "--resume"])


def need_folder(place: Path, option: str = "--out") -> None:
    """Complain where a folder is to be made and a file is in the way."""
    for part in (place, *place.parents):
        if part.exists() and not part.is_dir():
            raise InputError(f"{place} cannot be a folder: {part} is a file; choose another {option}")


def need_file(place: Path) -> None:
    """Complain where a file is to be written and a folder is in the way, or a file in the place of its folder."""
    if place.is_dir():
        raise InputError(f"{place} cannot be written: it is a folder; give --out the name of a file")
    need_folder(place.parent)


_ROUND_KEYS = {"round", "seconds", "losses", "participants", "refused", "bytes_up", "bytes_down", "drift"}


def round_line(result: RoundResult) -> dict[str, Any]:
    return {
        "round": result.round,
        "seconds": round(result.seconds, 4),
        "losses": dict(result.losses),
        "participants": list(result.participants),
        "refused": {str(client): reason for client, reason in result.refused.items()},
        "bytes_up": result.bytes_up,
        "bytes_down": result.bytes_down,
        "drift": dict(result.drift),
    }


@contextlib.contextmanager
def alone(folder: Path, lock: Path, *, seconds: float = 0.0, pause: float = 1.0) -> Iterator[None]:
    """Hold the lock of a run folder on a file that exists; whoever waits longer than so many seconds is refused.

    The system lets go of it when a process ends in whatever way. Where there are no locks, nobody is refused.
    """
    end = time.monotonic() + seconds
    with lock.open("r+b") as file:
        while not _taken(file):
            if time.monotonic() >= end:
                raise InputError(f"another process works on {folder}: let it end or stop it, or choose another folder")
            time.sleep(pause)
        yield


def _taken(file: IO[bytes]) -> bool:
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems have no locks
        return True
    return True


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file as a whole: readers see the old content or the new, even after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}{DRAFT}")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:  # a full disk does not say which file it was
        raise OSError(error.errno, f"cannot be written: {error.strerror}", str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def json_lines(items: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(item) + "\n" for item in items).encode()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file, with one sentence where it cannot be read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} cannot be read: it holds no JSON object")
    return content


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; [] where there is none."""
    if not path.is_file():
        return []
    lines = []
    try:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            lines.append(json.loads(line))
            if not isinstance(lines[-1], dict):
                raise InputError(f"{path} is damaged: line {number} is no JSON object")
    except UnicodeDecodeError:
        raise InputError(f"{path} is damaged: it is not text") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is damaged: line {len(lines) + 1} is no JSON object ({error.msg})") from None
    return lines


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """The lines of rounds.jsonl, one a round from 1; [] where none were written yet."""
    lines = read_lines(folder / ROUNDS)
    for number, line in enumerate(lines, start=1):
        # Runs of before the drift was measured have no such key.
        if line.keys() | {"drift"} != _ROUND_KEYS or line["round"] != number:
            raise InputError(f"{folder / ROUNDS} is damaged: line {number} is not the line of round {number}")
    return lines


def read_rows(folder: Path) -> list[Row]:
    """The rows of a run folder; [] where none were written yet."""
    hints = {key: int | float if hint is float else hint for key, hint in get_type_hints(Row).items()}
    rows = []
    for number, line in enumerate(read_lines(folder / ROWS), start=1):
        if line.keys() != hints.keys() or not all(isinstance(line[key], hint) for key, hint in hints.items()):
            raise InputError(f"{folder / ROWS} is damaged: line {number} is not a row")
        if not -math.inf < line["weight"] < math.inf:  # Python reads NaN and Infinity, which JSON does not have
            about = f"line {number} has the weight {line['weight']}; a finite number is needed"
            raise InputError(f"{folder / ROWS} is damaged: {about}")
        rows.append(Row(**line))
    return rows


def to_toml(settings: Mapping[str, Any]) -> str:
    """Flat settings as TOML, which has no word for None: such a setting is left out and keeps its default."""
    return "".join(f"{key} = {_toml_value(value)}\n" for key, value in settings.items() if value is not None)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    raise InputError(f"{value!r} cannot be written to {CONFIG}: give it as a name or as file.py:fn")
