"""The state of a run after a round, whole or not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.errors import InputError
from ..core.flat import Layout
from ..simulate import RunState, state_tensors
from .files import CHECKPOINT, DRAFT, MODEL, STATE, need_run, read_json, write_atomic


def save_checkpoint(folder: Path, state: RunState, layout: Layout) -> None:
    """The state in one safetensors file; `state.json` names it and the one before, and is written last."""
    from safetensors.torch import save

    data = save(state_tensors(state))
    name = _checkpoint_name(state.server.round)
    checkpoint = folder / CHECKPOINT
    last = read_checkpoint_state(checkpoint / STATE) if (checkpoint / STATE).is_file() else {}
    write_atomic(checkpoint / name, data)
    about = {
        "round": state.server.round,
        "file": name,
        "sha256": hashlib.sha256(data).hexdigest(),
        "layout": _places(layout, layout.shared_names),
        "private_layout": _places(layout, layout.personal_names),
        "frozen_layout": _places(layout, layout.frozen_names),
        **({"before": {key: last[key] for key in ("round", "file", "sha256")}} if last else {}),
    }
    write_atomic(checkpoint / STATE, json.dumps(about).encode())
    remove_others(folder, about)


def _checkpoint_name(round: int) -> str:
    return f"round-{round:05d}.safetensors"


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], int] | None:
    """The tensors and the round of the last checkpoint; None where there is none yet."""
    saved = _load_checkpoint(folder)
    return None if saved is None else (saved[0], saved[1]["round"])


def _places(layout: Layout, names: Sequence[str]) -> list[list[Any]]:
    return [[name, layout.slices[name].offset, list(layout.slices[name].shape)] for name in names]


def _named(row: Tensor, places: list[list[Any]]) -> dict[str, Tensor]:
    sizes = {name: (offset, torch.Size(shape)) for name, offset, shape in places}
    return {name: row[offset : offset + size.numel()].view(size) for name, (offset, size) in sizes.items()}


def load_private_values(folder: Path) -> list[dict[str, Tensor]]:
    """The private values of each client in a run's last checkpoint by name; [] where there are none."""
    saved = _load_checkpoint(folder)
    if saved is None:
        raise InputError(f"{folder} has no finished round to start from")
    tensors, about = saved
    places = about.get("private_layout", [])
    count = sum(name.startswith("client.") and name.endswith(".personal") for name in tensors)
    rows = [tensors[f"client.{client}.personal"] for client in range(count)]
    # Those of a run on Flower have never left their nodes.
    return [_named(row, places) for row in rows] if places and all(len(row) for row in rows) else []


def load_values(folder: Path) -> dict[str, Tensor]:
    """The travelling values of a run's last checkpoint by name ("backbone.conv.weight")."""
    need_run(folder)
    saved = _load_checkpoint(folder)
    if saved is None:
        raise InputError(f"{folder} has no finished round to start from")
    tensors, about = saved
    values = _named(tensors["server.shared"], about["layout"])
    if about.get("frozen_layout"):
        values |= _named(tensors["server.frozen"], about["frozen_layout"])
    prefix = "server.integers."
    values |= {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    return values


def _load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    path = folder / CHECKPOINT / STATE
    if not path.is_file():
        return None
    about = read_checkpoint_state(path)
    while True:
        try:
            return _load_tensors(path, about), about
        except InputError:
            again = read_checkpoint_state(path)
            if again == about:
                raise
            about = again  # the run trains on and replaced its checkpoint in between


def _load_tensors(path: Path, about: Mapping[str, Any]) -> dict[str, Tensor]:
    from safetensors.torch import load

    file = path.with_name(about["file"])
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InputError(f"the checkpoint {file} cannot be read: {error.strerror}") from None
    if hashlib.sha256(data).hexdigest() != about.get("sha256"):
        raise InputError(f"the checkpoint {file} is damaged: its checksum differs from the one in {path.name}")
    return load(data)


def read_checkpoint_state(path: Path) -> dict[str, Any]:
    """The content of a checkpoint's state.json: round, file, checksum and the place of each value in the row.

    Where there are two checkpoints, `before` has round, file and checksum of the earlier one.
    """
    about = read_json(path)
    for one in (about, about.get("before", about)):
        round = one.get("round") if isinstance(one, dict) else None
        if type(round) is not int or round < 1 or one.get("file") != _checkpoint_name(round):
            raise InputError(f"{path} is damaged: it does not name a round and the file of that round")
    layout = about.get("layout")
    layouts = (layout, about.get("private_layout", []), about.get("frozen_layout", []))
    if not all(isinstance(rows, list) and all(_is_slice(entry) for entry in rows) for rows in layouts):
        raise InputError(f"{path} is damaged: its layout is not a list of name, offset and shape")
    return about


def _is_slice(entry: Any) -> bool:
    if not isinstance(entry, list) or [type(part) for part in entry] != [str, int, list]:
        return False
    return all(type(size) is int for size in entry[2])


def remove_drafts(folder: Path) -> None:
    """Sweep up what a killed process left: drafts, and checkpoints that are not among the last two."""
    for place in (folder, folder / CHECKPOINT, folder / MODEL):
        for draft in place.glob(f".*{DRAFT}"):
            draft.unlink(missing_ok=True)
    path = folder / CHECKPOINT / STATE
    remove_others(folder, read_checkpoint_state(path) if path.is_file() else {})


def remove_others(folder: Path, about: Mapping[str, Any]) -> None:
    """Remove checkpoints that state.json does not name."""
    named = {one.get("file") for one in (about, about.get("before", {}))}
    for file in (folder / CHECKPOINT).glob("round-*.safetensors"):
        if file.name not in named:
            file.unlink(missing_ok=True)
