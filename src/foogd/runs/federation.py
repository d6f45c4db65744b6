"""The images of a run: read once, dealt to clients, and what is said about them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..config import Config
from ..core.errors import InputError
from ..core.fields import Role
from ..core.plugins import blamed
from ..data.federation import Federation, client_labels
from ..data.overlap import count_leaks
from ..data.sources import load_source
from ..data.store import ImageStore
from ..tables.grid import Table
from .files import PARTITION, PICTURE, read_json, write_atomic

TRAINING = "training images"
# Settings that decide which images each client has.
SPLIT = sorted(Config.of_role(Role.SPLIT) | {"data_root", "seed"})
Load = Callable[[str, str], ImageStore]


def load_once(stores: dict[Any, ImageStore], config: Config, spec: str, sites: str) -> ImageStore:
    key = (spec, config.data_root, sites, config.on_bad)
    if key not in stores:
        stores[key] = load_source(spec, Path(config.data_root), sites=sites, on_bad=config.on_bad)  # type: ignore[arg-type]
    return stores[key]


def _load(config: Config, spec: str, sites: str) -> ImageStore:
    with blamed(spec):
        return load_once({}, config, spec, sites)


def make_federation(config: Config, load: Load | None = None) -> Federation:
    """The data of a run, split over its clients; `load` gives the images of a source and says where sites stand."""
    load = load or partial(_load, config)
    return Federation.build(
        load(config.data, config.sites),
        outs=[load(spec, "") for spec in config.out],
        corruptions=config.corruptions,
        severities=config.severities,
        clients=config.clients,
        partition=config.partition,
        alpha=config.alpha,
        classes_per_client=config.classes_per_client,
        min_size=config.min_size,
        seed=config.seed,
        split_seed=config.images_seed,
        proportions=config.proportions,
        constants=config.constants,
        test_share=config.test_share,
        leave_out=config.leave_out,
        calibration=config.calibration,
    )


def image_hashes(federation: Federation) -> dict[str, str]:
    """What tells the images of a federation from others: a hash of the training images, and one of the test images.

    Of OUT sets it is their number: they may have been resized, which is not the same to the last bit everywhere, and
    nobody trains on them. Corrupted copies follow from the test images, and need none.
    """
    found = {TRAINING: f"sha256 {federation.train.content_hash()}"}
    for test in federation.tests:
        if test.split != "in-c":
            number = f"{len(test.store)} images"
            found[f"test images {test.name}"] = number if test.split == "out" else f"sha256 {test.store.content_hash()}"
    return found


def write_partition(folder: Path, federation: Federation) -> None:
    """Who trains on what, as numbers and as a picture, and which training images are in a test set."""
    from .picture import partition_figure

    counts, hashes = federation.describe().tolist(), image_hashes(federation)
    content = {
        "data": federation.name,
        "content_hash": hashes.pop(TRAINING).removeprefix("sha256 "),
        "test_hashes": hashes,
        "skipped": dict(federation.skipped),
        "classes": list(federation.train.classes),
        "client_names": list(federation.client_names),
        "counts": counts,
        "indices": [indices.tolist() for indices in federation.train_indices],
        "calibration_indices": [indices.tolist() for indices in federation.calibration_indices],
        "training_images_in_tests": count_leaks(federation),
    }
    picture = io.BytesIO()
    partition_figure(federation).savefig(picture, format="png", dpi=150)
    write_atomic(folder / PICTURE, picture.getvalue())
    write_atomic(folder / PARTITION, json.dumps(content).encode())


def read_leaks(folder: Path) -> dict[str, int]:
    """How many training images each test set of a run holds."""
    found = read_json(folder / PARTITION).get("training_images_in_tests")
    if not isinstance(found, dict):
        raise InputError(f"{folder / PARTITION} is damaged: it does not say which training images are in tests")
    return found


def leaks_sentence(leaks: Mapping[str, int]) -> str:
    """What the check by content found."""
    found = {name: count for name, count in leaks.items() if count}
    if not found:
        return f"No training image is in any of the {len(leaks)} test sets (compared by content)."
    return "Training images in test sets, by content: " + ", ".join(f"{n} in {name}" for name, n in found.items()) + "."


def skipped_sentence(skipped: Mapping[str, int]) -> str:
    """How many images were left out because they could not be used."""
    counts = ", ".join(f"{count} of {name}" for name, count in skipped.items())
    return f"Images that could not be used and were left out: {counts}."


def partition_table(federation: Federation) -> Table:
    """Training images of each class on each client."""
    counts = federation.describe()
    names = federation.train.classes or tuple(str(c) for c in range(federation.num_classes))
    clients = client_labels(federation.client_names, len(counts))
    rows = tuple(
        (name, str(int(row.sum())), *(str(int(n)) for n in row)) for name, row in zip(clients, counts, strict=True)
    )
    return Table("training images", ("client", "all", *names), rows)
