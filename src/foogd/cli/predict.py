"""The command `foogd predict`."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table as RichTable

from ..core.errors import InputError
from ..data.federation import client_labels
from ..data.folders import IMAGE_SUFFIXES, images_below
from ..metrics import needed_for_tpr
from ..model import as_images, load
from .common import console, whole_number


def predict(
    run_dir: Annotated[Path, typer.Argument(help="A finished run folder.")],
    files: Annotated[list[Path], typer.Argument(help="Images, or folders of images.")],
    client: Annotated[
        str | None, typer.Option(metavar="N", help="Answer as this client, or site by name; default: as nobody.")
    ] = None,
    detector: Annotated[str | None, typer.Option(help="The detector that decides; see foogd detectors.")] = None,
    tpr: Annotated[str, typer.Option(metavar="SHARE", help="Share of IN that the threshold accepts.")] = "0.95",
    on_bad: Annotated[str, typer.Option(help="What an image that cannot be read does: error or skip.")] = "error",
    form: Annotated[str, typer.Option("--format", help="table, json or csv.")] = "table",
) -> None:
    """Label, probability, score and verdict of images. Example: foogd predict runs/a image.png --format json"""
    if form not in ("table", "json", "csv"):
        raise InputError(f"--format {form!r} is not allowed: use table, json or csv")
    if on_bad not in ("error", "skip"):
        raise InputError(f"--on-bad {on_bad!r} is not allowed: use error or skip")
    accepted = share("--tpr", tpr)
    model = load(run_dir)
    chosen = None
    if client is not None:  # a site may be called by a number too: its name counts
        named = client in model.client_names or (model.client_names and not client.isdecimal())
        chosen = model.number_of(client) if named else whole_number("--client", client, 0)
    model.threshold(detector, client=chosen)  # what cannot be asked is found before images are read
    names, images = read_images(files, model.shape, skip=on_bad == "skip")
    found = model.predict(images, client=chosen, detector=detector, tpr=accepted)
    rows = [{"file": str(name), **row} for name, row in zip(names, found.rows(), strict=True)]
    labels = client_labels(model.client_names, model.clients)
    whose = "all clients" if found.calibrated_by is None else f"client {labels[found.calibrated_by]}"
    if form == "json":
        name = model.client_names[found.client] if found.client is not None and model.client_names else None
        about = {
            "run": str(run_dir),
            "client": found.client,
            "client_name": name,
            "detector": found.detector,
            "tpr": accepted,
            "calibrated": found.calibrated,
            "calibrated_by": found.calibrated_by,
            "images": rows,
        }
        print(json.dumps(about, indent=2))
    elif form == "csv":
        writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        rests = f"; the threshold rests on {found.calibrated} images of {whose}" if found.calibrated else ""
        grid = RichTable(title=f"{escape(found.detector)}, larger = more OUT{rests}", title_justify="left")
        for index, name in enumerate(("file", "label", "probability", "score", "threshold", "verdict")):
            grid.add_column(name, justify="left" if index < 2 else "right", overflow="fold")
        for row in rows:
            tau = "–" if row["threshold"] is None else f"{row['threshold']:.4g}"
            numbers = (f"{row['probability']:.3f}", f"{row['score']:.4g}", tau, row["verdict"] or "–")
            grid.add_row(escape(row["file"]), escape(row["label"]), *numbers)
        console.print(grid)
    if found.out is None:
        text = f"no verdict: {run_dir} set no images aside for a threshold; train with --set calibration=0.05"
        print(f"foogd: {text}", file=sys.stderr)
    elif found.calibrated < (needed := needed_for_tpr(accepted)):
        text = f"the threshold rests on {found.calibrated} images of {whose}: --tpr {tpr} needs at least {needed}"
        print(f"foogd: {text}; until then it is the largest score among them", file=sys.stderr)


def read_images(places: list[Path], shape: tuple[int, int, int], *, skip: bool) -> tuple[list[Path], torch.Tensor]:
    """The images of files and folders in a model's shape; with `skip` those that cannot be used are only named."""

    def attempt(read: Callable[[Path], Any], place: Path) -> Any:
        try:
            return read(place)
        except InputError as error:
            if not skip:
                raise
            print(f"foogd: {' '.join(str(error).split())}; it is left out", file=sys.stderr)
            return None

    names: list[Path] = []
    images: list[torch.Tensor] = []
    for place in places:
        for name in attempt(image_files, place) or ():
            pixels = attempt(partial(as_images, shape=shape), name)
            if pixels is not None:
                names.append(name)
                images.append(pixels)
    if not names:
        raise InputError("none of the images can be used: nothing is left to judge")
    return names, torch.cat(images)


def image_files(place: Path) -> list[Path]:
    """An image file itself, or all images below a folder that a run would train on."""
    if not place.is_dir():
        if not place.exists():
            raise InputError(f"{place} does not exist: give image files, or folders of them")
        return [place]
    found = images_below(place)
    if not found:
        raise InputError(f"{place} holds no images ({', '.join(sorted(IMAGE_SUFFIXES))})")
    return found


def share(option: str, text: str) -> float:
    """The share that an option gives."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise InputError(f"{option} {text!r} is not allowed: it must be a number above 0 and at most 1")
    return value
