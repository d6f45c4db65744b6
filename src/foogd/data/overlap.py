"""A check that no training image is in a test set, by the content of the images."""

from __future__ import annotations

import hashlib

import numpy as np

from .federation import Federation
from .store import ImageStore


def image_digests(store: ImageStore) -> set[bytes]:
    """One digest for each different image of a store; labels do not count."""
    images = np.ascontiguousarray(store.images.cpu().numpy())
    return {hashlib.blake2b(image.data, digest_size=16).digest() for image in images}


def count_leaks(federation: Federation) -> dict[str, int]:
    """For each test set (by its key), how many of its images are a training image, byte for byte."""
    training = image_digests(federation.train)
    leaks = {}
    for test in federation.tests:
        images = np.ascontiguousarray(test.store.images.cpu().numpy())
        leaks[test.key] = sum(hashlib.blake2b(image.data, digest_size=16).digest() in training for image in images)
    return leaks
