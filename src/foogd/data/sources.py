"""Data sets by name, and a user's own by `file.py:function`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Literal, final

from ..errors import InputError
from ..plugins import load_object
from .federation import fit_to
from .store import ImageStore

IN_CLASSES = 8  # the first classes of fashion.npz; the others are the near OUT


@final
@dataclass(frozen=True)
class Source:
    """A data set that foogd knows: how it is read below a root folder, what it is for, and its licence."""

    load: Callable[[Path], ImageStore]
    role: Literal["in", "out"]
    description: str
    licence: str
    flip: bool  # whether a mirrored image still shows its class


def load_source(spec: str, root: Path) -> ImageStore:
    """The data set called `spec`, or what the function `file.py:fn` returns for the root folder."""
    if spec in SOURCES:
        return SOURCES[spec].load(root)
    if ":" not in spec:
        raise InputError(f"unknown data set {spec!r}; known are {', '.join(SOURCES)}, or file.py:function.")
    load = load_object(spec, "data set")
    if not callable(load):
        raise InputError(f"{spec} is a {type(load).__name__}; a function root → ImageStore is needed.")
    store = load(root)
    if not isinstance(store, ImageStore):
        raise InputError(f"{spec} returned {type(store).__name__}; an ImageStore is needed.")
    return store


def _embedded(name: str) -> ImageStore:
    with as_file(files("foogd.data") / "embedded" / name) as path:
        return ImageStore.load(path)


def _fashion(root: Path) -> ImageStore:
    store = _embedded("fashion.npz")
    inside = store.select(store.labels < IN_CLASSES)
    return replace(inside, classes=store.classes[:IN_CLASSES])


def _fashion_out(root: Path) -> ImageStore:
    store = _embedded("fashion.npz")
    outside = store.select(store.labels >= IN_CLASSES)
    return replace(
        outside,
        labels=outside.labels - IN_CLASSES,
        classes=store.classes[IN_CLASSES:],
        name="fashion_out",
        test=None,
    )


def _digits(root: Path) -> ImageStore:
    return fit_to(_embedded("digits.npz"), (1, 28, 28))


SOURCES: dict[str, Source] = {
    "fashion": Source(
        _fashion,
        "in",
        "8 classes of Fashion-MNIST, 28×28 grey: 6,000 training and 1,600 test images, inside the package.",
        "MIT",
        flip=True,
    ),
    "fashion_out": Source(
        _fashion_out,
        "out",
        "400 test images of Sandal and Bag, the two classes of Fashion-MNIST that `fashion` leaves out (near OUT).",
        "MIT",
        flip=True,
    ),
    "digits": Source(
        _digits,
        "out",
        "1,797 handwritten digits, 8×8 grey enlarged to 28×28 (far OUT).",
        "CC BY 4.0",
        flip=False,
    ),
}
