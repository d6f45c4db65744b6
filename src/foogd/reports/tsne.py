"""Maps of features in two dimensions: t-SNE of a few IN, IN-C and OUT samples of a run."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import final

import numpy as np
import torch

from ..core.random import derive_seed, generator
from ..runs.predictions import Samples, SampleSet

POINTS = 160  # of each split
MAPS = 12  # t-SNE takes seconds each


@final
@dataclass(frozen=True, eq=False)
class FeatureMap:
    """Places in the plane, and what each point is."""

    places: np.ndarray  # (n, 2)
    splits: tuple[str, ...]  # in, in-c or out
    names: tuple[str, ...]  # the set's name
    labels: tuple[int, ...]  # class; −1 for OUT


def lacking() -> str | None:
    """What maps need that is not installed, in one sentence; None where nothing is missing."""
    if all(find_spec(name) is not None for name in ("sklearn", "threadpoolctl")):
        return None
    return "maps of the features need scikit-learn (pip install scikit-learn threadpoolctl)"


def feature_map(samples: Samples, *, points: int = POINTS) -> FeatureMap | None:
    """t-SNE (van der Maaten and Hinton, JMLR 2008) with a fixed seed; None where there are too few features."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    features: list[torch.Tensor] = []
    splits: list[str] = []
    names: list[str] = []
    labels: list[int] = []
    for split in ("in", "in-c", "out"):
        sets = [one for one in samples.of(split) if len(one.features)]
        for one, share in zip(sets, _shares(points, sets), strict=True):
            order = torch.randperm(len(one.features), generator=generator(samples.seed, one.key, "map"))[:share]
            features.append(one.features[order].float())
            labels += one.feature_labels[order].tolist() if split != "out" else [-1] * len(order)
            splits += [split] * len(order)
            names += [one.name if split == "out" else split.upper()] * len(order)
    if len(splits) < 8:
        return None
    z = torch.cat(features).numpy()
    if not np.isfinite(z).all():
        return None
    seed = derive_seed(samples.seed, "map") % 2**32
    method = TSNE(perplexity=min(30.0, (len(z) - 1) / 3), init="pca", random_state=seed, max_iter=500)
    with threadpool_limits(limits=1):  # so few points are slower with more threads, and other runs want the cores
        places = method.fit_transform(z)
    return FeatureMap(places, tuple(splits), tuple(names), tuple(labels))


def _shares(points: int, sets: list[SampleSet]) -> list[int]:
    """How many points each set of a split gets."""
    return [points // len(sets) + (index < points % len(sets)) for index in range(len(sets))]
