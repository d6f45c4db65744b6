"""What a finished run keeps for later: its model with detectors, and its answers about single images."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import Config
from ..core.errors import InputError
from ..data.federation import Federation
from ..evaluation.rows import Evaluation
from ..methods.base import Method
from .files import ABOUT, MODEL, write_atomic
from .model_file import detector_tensors, is_of, model_tensors, read_about, settings_digest
from .predictions import SAMPLES, pack_samples, read_samples


def save_model(
    folder: Path,
    found: Evaluation,
    federation: Federation,
    config: Config,
    method: Method,
    detectors: Sequence[str],
    trained: Tensor,
) -> None:
    """The trained model for use with these detectors, in two files; `model.json` names the other and is written last.

    A model of the same weights, which are `trained` before an evaluation touches them, keeps what it has of other
    detectors. One of other weights is replaced as soon as all detectors of the run were fitted.
    """
    from safetensors.torch import load

    names, whole = [name for name in detectors if name in found.fitted.names], {*detectors} == {*config.detectors}
    round, weights = found.state.server.round, {"weights_sha256": _tensor_digest(trained)}
    about: dict[str, Any] = {}
    with contextlib.suppress(InputError):  # none yet, or a damaged one
        about, data = read_about(folder)
    # Models of before they were added to do not say of which weights they are.
    known = about.get("weights_sha256", None if whole else weights["weights_sha256"])
    if about and about["round"] == round and known == weights["weights_sha256"] and is_of(about, config, method):
        every = list(dict.fromkeys([*about["detectors"], *names]))
        before = load(data)
        tensors = dict(before)
        for name in names:  # one that is there is replaced: its code may have changed, and its threshold with it
            place = every.index(name)
            tensors = {key: value for key, value in tensors.items() if not _is_of_detector(key, place)}
            tensors |= detector_tensors(found, [name], first=place)
        if every != about["detectors"] or not _same_tensors(before, tensors):
            _write_model(folder, tensors, {**about, **weights, "detectors": every})
    elif whole:
        tensors = model_tensors(found, names)
        write_model(folder, tensors, round, federation.clients, names, federation, config, method, weights)


def _is_of_detector(key: str, place: int) -> bool:
    """Whether a tensor of a model belongs to the detector at this place."""
    parts = key.split(".")
    own = parts[2:] if parts[0] == "client" else parts
    return own[:1] in (["detector"], ["calibration"], ["generic"]) and own[1:2] == [str(place)]


def _same_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def _tensor_digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def write_model(
    folder: Path,
    tensors: Mapping[str, Tensor],
    round: int,
    clients: int,
    detectors: Sequence[str],
    federation: Federation,
    config: Config,
    method: Method,
    more: Mapping[str, Any] | None = None,
) -> None:
    """A model's tensors and its description; `clients` are those whose private part is among the tensors."""
    classes = federation.train.classes or tuple(str(c) for c in range(federation.num_classes))
    about = {
        "round": round,
        "method": config.method,
        "clients": clients,
        "client_names": list(federation.client_names) if clients else [],
        "shape": list(federation.shape),
        "classes": list(classes),
        "mean": list(federation.mean),
        "std": list(federation.std),
        "detectors": list(detectors),
        **settings_digest(config, method),
        **(more or {}),
    }
    _write_model(folder, tensors, about)


def _write_model(folder: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    from safetensors.torch import save

    data = save(dict(tensors))
    digest = hashlib.sha256(data).hexdigest()
    name = f"model-{digest[:12]}.safetensors"
    write_atomic(folder / MODEL / name, data)
    text = json.dumps({**about, "file": name, "sha256": digest}, indent=2)
    write_atomic(folder / MODEL / ABOUT, f"{text}\n".encode())
    for old in (folder / MODEL).glob("model-*.safetensors"):
        if old.name != name:
            old.unlink(missing_ok=True)


def save_samples(folder: Path, found: Evaluation, config: Config) -> None:
    """What the models said about every test image; scores of detectors that were asked earlier stay."""
    try:
        earlier = read_samples(folder)
    except InputError:
        earlier = None  # damaged, and made again here
    write_atomic(folder / SAMPLES, pack_samples(found, seed=config.seed, method=config.method, earlier=earlier))
