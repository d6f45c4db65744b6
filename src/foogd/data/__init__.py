"""Images: stores, sources, partitions, corruptions, augmentations and the federation made of them."""

from .augment import flip_crop, fourier_mix
from .corrupt import CORRUPTIONS, corrupt
from .federation import Federation, TestSet, fit_to
from .partition import Partition, by_domain, dirichlet, follow, pathological
from .sources import SOURCES, Source, load_source
from .store import ImageStore
from .synthetic import tiny_federation

__all__ = [
    "CORRUPTIONS",
    "SOURCES",
    "Federation",
    "ImageStore",
    "Partition",
    "Source",
    "TestSet",
    "by_domain",
    "corrupt",
    "dirichlet",
    "fit_to",
    "flip_crop",
    "follow",
    "fourier_mix",
    "load_source",
    "pathological",
    "tiny_federation",
]
