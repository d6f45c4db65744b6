"""The sections of the page, in the order in which they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from ..collection import Collection
from ..tsne import MAPS
from .clients import clients, cost, partition
from .curves import drift, sensitivity, training
from .markup import Html
from .results import corruptions, detectors, joint, results
from .scores import maps, scores
from .setup import setup


@final
@dataclass(frozen=True)
class Section:
    """A part of the page with a place in its contents."""

    key: str
    title: str
    body: Html


def sections(
    collection: Collection, *, most_maps: int = MAPS, tell: Callable[[str], None] = lambda text: None
) -> list[Section]:
    """All sections that the runs have something for."""
    made = (
        ("results", "Results", results(collection)),
        ("detectors", "Methods × detectors", detectors(collection)),
        ("joint", "Joint view", joint(collection)),
        ("sensitivity", "Sensitivity", sensitivity(collection)),
        ("training", "Training", training(collection)),
        ("scores", "Scores and ROC", scores(collection)),
        ("maps", "Maps of the features", maps(collection, most_maps, tell)),
        ("shift", "Shifted images", corruptions(collection)),
        ("partition", "Who holds what", partition(collection)),
        ("clients", "Clients", clients(collection)),
        ("cost", "Communication and time", cost(collection)),
        ("drift", "Client drift", drift(collection)),
        ("setup", "Configuration", setup(collection)),
    )
    return [Section(key, title, body) for key, title, body in made if body]
