"""Folders for nodes from a preset: what each client of the simulator has, for trials and for comparison with it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from ..config import Config
from ..core.errors import InputError
from ..runs.federation import make_federation


def write_shards(config: Config, folder: Path) -> list[Path]:
    """One folder a client, with the simulator's images in its order: train, test, out/NAME and unseen/NAME (.npz).

    IN-C is not written: a node makes it from its own test images.
    """
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty: choose another --out")
    federation = make_federation(config)
    empty = [client for client, own in enumerate(federation.train_indices) if not len(own)]
    if empty:
        raise InputError(f"client {empty[0]} has no training images: set min_size=1 or more")
    width = len(str(federation.clients - 1))
    places = [folder / f"node-{client:0{width}d}" for client in range(federation.clients)]
    for client, place in enumerate(places):
        own = federation.train_indices[client]
        if federation.calibration_indices:  # a node sets the same ones aside again
            own = torch.cat([own, federation.calibration_indices[client]]).sort().values
        federation.train.select(own).save(place / "train.npz")
    for test in federation.tests:
        if test.split == "in":
            for client, place in enumerate(places):
                if len(test.indices[client]):
                    test.store.select(test.indices[client]).save(place / "test.npz")
        elif test.split == "out" or test.unseen:
            name = f"{'unseen' if test.unseen else 'out'}/{test.name}.npz"
            test.store.save(places[0] / name)
            for place in places[1:]:
                _same_file(places[0] / name, place / name)
    return places


def _same_file(source: Path, target: Path) -> None:
    """The file under another name: a link where the disk allows it, else a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
