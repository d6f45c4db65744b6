"""The file of a trained model: its keys, its tensors, and how it is read and checked."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..config import Config
from ..core.errors import InputError
from ..evaluation.evaluator import mean_private
from ..evaluation.rows import Evaluation
from ..methods import written_settings
from ..methods.base import Method
from .files import ABOUT, MODEL, resume_command

KEYS = {
    "round": "a whole number",
    "clients": "a whole number",
    "shape": "three whole numbers above 0",
    "classes": "a list of names",
    "mean": "a number for each channel",
    "std": "a number above 0 for each channel",
    "detectors": "a list of names, each once",
    "file": "a text",
    "sha256": "a text",
}


def model_tensors(found: Evaluation, detectors: Sequence[str]) -> dict[str, Tensor]:
    """All that a model for use is made of, as named tensors."""
    server = found.state.server
    tensors = {"shared": server.shared, "frozen": server.frozen, "personal": mean_private(found.state.clients)}
    tensors |= {f"extra.{name}": value for name, value in server.extra.items()}
    tensors |= {f"integers.{name}": value for name, value in server.integers.items()}
    for client in found.state.clients:
        tensors[f"client.{client.id}.personal"] = client.personal
        tensors[f"client.{client.id}.class_counts"] = client.class_counts
        tensors |= {f"client.{client.id}.memory.{name}": value for name, value in client.memory.items()}
    return _as_saved(tensors) | detector_tensors(found, detectors)


def detector_tensors(found: Evaluation, detectors: Sequence[str], first: int = 0) -> dict[str, Tensor]:
    """What detectors are fitted on and their scores of images set aside; `first` is the place of the first of them."""
    tensors: dict[str, Tensor] = {}
    for position, name in enumerate(detectors, start=first):
        tensors |= dict(_sums(f"detector.{position}", found.fitted.sums.get(name, ())))
        for client_id, own in found.fitted.own_sums.items():
            tensors |= dict(_sums(f"client.{client_id}.detector.{position}", own.get(name, ())))
        for kind, scores_of in (("calibration", found.calibration), ("generic", found.generic_calibration)):
            for client_id, scores in scores_of.get(name, {}).items():
                tensors[f"{kind}.{position}.{client_id}"] = scores
    return _as_saved(tensors)


def _as_saved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}


def _sums(prefix: str, passes: Sequence[Mapping[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for number, sums in enumerate(passes):
        for key, value in sums.items():
            yield f"{prefix}.{number}.{key}", value


def settings_digest(config: Config, method: Method, keys: Iterable[str] | None = None) -> dict[str, Any]:
    """A digest of the settings that decide what a model computes, and which ones they are: `keys`, or all of today.

    A later version may have more settings, or fewer: their defaults do what was done before.
    """
    values = {"method": _code(config.method), "backbone": _code(str(config.backbone)), "seed": config.seed}
    values |= written_settings(config.method, method)
    chosen = sorted(values) if keys is None else list(keys)
    if keys is not None:  # of a file, which the core alone does not read
        from ..presets.loader import REMOVED

        values = REMOVED | values
    text = json.dumps({key: _plain(values.get(key)) for key in chosen}, sort_keys=True)
    return {"settings": chosen, "settings_sha256": hashlib.sha256(text.encode()).hexdigest()}


def is_of(about: Mapping[str, Any], config: Config, method: Method) -> bool:
    """Whether a model was made with these settings; one that was saved before it kept a digest may be of any."""
    if "settings_sha256" not in about:
        return True
    return bool(settings_digest(config, method, about["settings"])["settings_sha256"] == about["settings_sha256"])


def _code(spec: str) -> str:
    """A name, or a file.py:Class wherever the file lies."""
    return spec.replace("\\", "/").rpartition("/")[2] if ".py:" in spec else spec


def _plain(value: Any) -> Any:
    """A setting as it is compared: a file writes 1 and 1.0, and lists and tuples, alike."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return repr(float(value))
    return value if value is None or isinstance(value, bool | str) else str(value)


def read_about(folder: Path) -> tuple[dict[str, Any], bytes]:
    """The description and the file of a run's model, whose checksum must be right."""
    path = folder / MODEL / ABOUT
    if not path.is_file():
        raise InputError(f"{folder} has no model yet: finish the run with {resume_command(folder)}")
    while True:
        about = _read_description(path)
        try:
            return about, _read_data(path, about)
        except InputError:
            if _read_description(path) == about:
                raise  # else the model was replaced in between


def _read_description(path: Path) -> dict[str, Any]:
    try:
        about = json.loads(path.read_text())
        if not isinstance(about, dict) or not about.keys() >= KEYS.keys():
            raise ValueError("it is no object with " + ", ".join(sorted(KEYS)))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{path} or the file that it names cannot be read: {reason}") from None
    for key, allowed in KEYS.items():
        if not _fits(key, about[key], about):
            shown = json.dumps(about[key])
            shown = shown if len(shown) <= 60 else f"{shown[:60]}…"
            raise InputError(f"{path} is damaged: {key} is {shown}, and {allowed} is needed")
    sites = about.get("client_names", [])
    if (
        not isinstance(sites, list)
        or not all(isinstance(site, str) for site in sites)
        or (len(sites) not in (0, about["clients"]))
    ):
        raise InputError(f"{path} is damaged: client_names must be a name for each of the {about['clients']} clients")
    names = about.get("settings", [])
    if (
        not isinstance(names, list)
        or not all(isinstance(name, str) for name in names)
        or (("settings" in about) != ("settings_sha256" in about))
    ):
        raise InputError(f"{path} is damaged: its digest of the settings is not whole")
    return about


def _fits(key: str, value: Any, about: Mapping[str, Any]) -> bool:
    """Whether a value of the description is of the kind that it must be; those before it fit already."""
    if key in ("round", "clients"):
        return type(value) is int and value >= 0
    if key in ("file", "sha256"):
        return isinstance(value, str)
    if not isinstance(value, list):
        return False
    if key == "shape":
        return len(value) == 3 and all(type(size) is int and size > 0 for size in value)
    if key in ("classes", "detectors"):
        names = all(isinstance(name, str) for name in value)
        return names and (bool(value) if key == "classes" else len(set(value)) == len(value))
    numbers = all(type(number) in (int, float) and math.isfinite(number) for number in value)
    return numbers and len(value) == about["shape"][0] and (key == "mean" or min(value) > 0)


def _read_data(path: Path, about: Mapping[str, Any]) -> bytes:
    try:
        data: bytes = path.with_name(about["file"]).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{path} or the file that it names cannot be read: {reason}") from None
    if hashlib.sha256(data).hexdigest() != about["sha256"]:
        raise InputError(f"{path.parent / about['file']} is damaged: its checksum differs from the one in {ABOUT}")
    return data


def check_parts(path: Path, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Complain where a description was changed so that it is not that of these tensors."""
    numbers = {name.split(".")[1] for name in tensors if name.startswith("client.")}
    if numbers != {str(client) for client in range(about["clients"])}:
        raise InputError(f"{path} is damaged: clients is {about['clients']}, and the model holds {len(numbers)}")
    counts = [value for name, value in tensors.items() if re.fullmatch(r"(client\.\d+\.)?class_counts", name)]
    classes = {len(value) for value in counts}
    if classes != {len(about["classes"])}:
        held = ", ".join(map(str, sorted(classes)))
        raise InputError(f"{path} is damaged: classes has {len(about['classes'])} names, and the model {held}")
    kinds = ("detector", "calibration", "generic")
    places = {int(name.split(".")[1]) for name in tensors if name.split(".")[0] in kinds}
    if places and max(places) >= len(about["detectors"]):
        raise InputError(f"{path} is damaged: detectors names {len(about['detectors'])}, and the model has more")
