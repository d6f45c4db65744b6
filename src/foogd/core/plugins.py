"""Users' own methods, detectors, backbones and data sets: `my_file.py:name` becomes the object of that name."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import torch

from .errors import InputError


def load_object(spec: str, what: str) -> object:
    """The object `name` of the Python file in `file.py:name`; `what` ("method", "detector" …) is for messages.

    The file is run once for each version of its text, so that two objects from one file share their classes.
    """
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise InputError(f"the {what} {spec!r} is not of the form file.py:name.")
    module = _load_module(_expanded(path), what)
    if name not in vars(module):
        found = ", ".join(_public_names(module)) or "none"
        raise InputError(f"the {what} {name!r} is not in {path}; the public names defined there: {found}.")
    found_object: object = vars(module)[name]
    return found_object


@contextlib.contextmanager
def blamed(*specs: str) -> Iterator[None]:
    """Say in one sentence in which line of a user's file an error came up; `specs` are file.py:name, or other names.

    An error whose way does not lead through one of the files is the package's own and stays as it is. So does a lack
    of memory, for which the command has a sentence.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        files = {_expanded(spec.rpartition(":")[0]).resolve() for spec in specs if is_plugin(spec)}
        place = next((f for f in reversed(traceback.extract_tb(error.__traceback__)) if _inside(f, files)), None)
        if place is None or lacks_memory(error):
            raise
        words = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{place.filename} failed in line {place.lineno}, in {place.name}: {words}") from error


def is_plugin(spec: object) -> bool:
    """Whether a name stands for an object in a user's file."""
    return isinstance(spec, str) and spec.rpartition(":")[0].endswith(".py")


def plugin_file(spec: str) -> dict[str, str]:
    """The file in file.py:name and a hash of its text."""
    file = spec.rpartition(":")[0]
    path = _expanded(file)
    return {"file": file, "sha256": hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest()}


def lacks_memory(error: BaseException) -> bool:
    """Whether memory ran out; torch says so in three ways, one of them a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


def _inside(frame: traceback.FrameSummary, files: set[Path]) -> bool:
    return frame.filename.endswith(".py") and Path(frame.filename).resolve() in files


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:  # ~name of a user that the machine does not know: then it is a name like any other
        return Path(path)


def _load_module(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise InputError(f"the file {path} for the {what} does not exist{where}.")
    source = path.read_bytes()
    key = hashlib.blake2b(str(path.resolve()).encode() + b"\0" + source, digest_size=8).hexdigest()
    name = f"foogd_plugin_{path.stem}_{key}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # load_object lets only .py through
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look their module up there
    try:
        # Not by the loader: its cache goes by time stamp and size, and lies beside the user's file.
        exec(compile(source, str(path), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"the file {path} for the {what} cannot be imported: {message}") from error
    return module


def _public_names(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if not name.startswith("_") and _defined_in(module, value)]


def _defined_in(module: ModuleType, value: object) -> bool:
    if isinstance(value, (type, FunctionType)):
        return value.__module__ == module.__name__
    return not isinstance(value, ModuleType) and type(value).__module__ != "__future__"
