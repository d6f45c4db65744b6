"""MATLAB files of version 5, as far as numeric arrays go.

SciPy's reader can crash the interpreter on a damaged file (a segmentation fault), and damaged files are what a broken
download leaves; every length here is checked before it is used.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from ..core.errors import InputError

_TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
_MATRIX, _COMPRESSED = 14, 15
_HEADER = 128


def read_matlab(data: bytes) -> dict[str, Any]:
    """The numeric arrays of a file by name; others are left out."""
    if len(data) < _HEADER or data[126:128] not in (b"IM", b"MI"):
        raise InputError("it is no MATLAB file of version 5")
    order = "<" if data[126:128] == b"IM" else ">"
    arrays = {}
    for kind, content in _elements(memoryview(data)[_HEADER:], order):
        if kind == _COMPRESSED:
            kind, content = _inflated(content, order)
        if kind == _MATRIX:
            arrays.update(_matrix(content, order))
    return arrays


def _tag(data: memoryview, order: str) -> tuple[int, int, int]:
    """Type, bytes of content, and where the content begins; four bytes or fewer fit into the tag itself."""
    if len(data) < 8:
        raise InputError("it is cut short")
    first, second = (int(word) for word in np.frombuffer(data[:8], dtype=f"{order}u4"))
    if first >> 16:
        return first & 0xFFFF, first >> 16, 4
    return first, second, 8


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    while len(data):
        kind, length, begin = _tag(data, order)
        if begin == 4 and length > 4:
            raise InputError("a short element is too long")
        if begin + length > len(data):
            raise InputError("it is cut short")
        yield kind, data[begin : begin + length]
        end = 8 if begin == 4 else begin + length
        data = data[end if kind == _COMPRESSED else -(-end // 8) * 8 :]


def _inflated(packed: memoryview, order: str) -> tuple[int, memoryview]:
    stream = zlib.decompressobj()
    try:
        kind, length, begin = _tag(memoryview(stream.decompress(packed, 8)), order)
        # Only what the tag announces is unpacked: at most 4 GiB, however well a file is compressed.
        content = stream.decompress(stream.unconsumed_tail, length) if length else b""
    except zlib.error as error:
        raise InputError(f"a compressed part is damaged ({error})") from error
    if begin != 8 or len(content) != length:
        raise InputError("a compressed part is cut short")
    # The checksum of the stream comes behind its content.
    rest = stream.decompress(stream.unconsumed_tail, 1) if not stream.eof else b""
    if rest or not stream.eof:
        raise InputError("a compressed part does not end where it says")
    return kind, memoryview(content)


def _matrix(data: memoryview, order: str) -> dict[str, Any]:
    parts = list(_elements(data, order))
    if len(parts) < 4 or len(parts[0][1]) < 8 or parts[1][0] != 5:
        return {}
    flags, dims, name = parts[0][1], np.frombuffer(parts[1][1], dtype=f"{order}i4"), parts[2][1]
    number = int(np.frombuffer(flags[:4], dtype=f"{order}u4")[0]) & 0xFF
    kind, content = parts[3]
    if number not in _CLASSES or kind not in _TYPES:
        return {}
    stored = np.dtype(f"{order}{_TYPES[kind]}")
    shape = tuple(int(side) for side in dims)
    if min(shape, default=0) < 0 or prod(shape) * stored.itemsize != len(content):
        raise InputError(f"an array of shape {shape} has {len(content)} bytes")
    values = np.frombuffer(content, dtype=stored).reshape(shape, order="F")
    return {bytes(name).decode("latin1"): values.astype(_CLASSES[number], copy=False)}
