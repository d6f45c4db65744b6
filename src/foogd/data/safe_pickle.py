"""Pickles without their powers: dictionaries of numbers, text and numeric arrays, and nothing else.

The python releases of CIFAR are pickles, and a pickle may run any code when it is loaded. Here its instructions are
looked through first, no name in it is ever imported, and stand-ins take the place of numpy's classes.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any, final

import numpy as np

from ..core.errors import InputError

_OPCODES = (
    "PROTO FRAME STOP MARK EMPTY_DICT DICT SETITEM SETITEMS EMPTY_LIST LIST APPEND APPENDS "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 NONE NEWTRUE NEWFALSE INT LONG BININT BININT1 BININT2 LONG1 "
    "STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES UNICODE BINUNICODE SHORT_BINUNICODE "
    "PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD"
)
_MEMO = 10_000_000  # a larger index makes the unpickler take gigabytes


@final
class _Array:
    """Stands in for numpy's array while a pickle is read; only plain numbers can become one."""

    array: Any = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Type) or not isinstance(data, bytes):
            raise InputError("an array of objects")
        self.array = np.frombuffer(data, dtype=dtype.code).reshape(shape, order="F" if fortran else "C")


@final
class _Type:
    """Stands in for numpy's dtype."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = code.decode("latin1") if isinstance(code, bytes) else code
        if self.code not in ("u1", "i1", "i2", "i4", "i8", "u2", "u4", "u8", "f4", "f8"):
            raise InputError(f"the type {code!r}")

    def __setstate__(self, state: Any) -> None:
        if state[1] in (">", b">"):
            self.code = f">{self.code}"


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _encode(text: Any, encoding: Any = "latin1", *_: Any) -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise InputError(f"text in the encoding {encoding!r}")
    return text.encode("latin1")


_NAMES: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _encode,  # how Python 3 writes bytes in protocol 2
}


@final
class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise InputError(f"{module}.{name}")
        return _NAMES[module, name]


def read_plain_pickle(data: bytes) -> dict[bytes, Any]:
    """The dictionary in a pickle; an InputError says what else it asks for, any other exception that it is damaged."""
    allowed = frozenset(_OPCODES.split())
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name not in allowed:
            raise InputError(f"the instruction {opcode.name}")
        if opcode.name in ("PUT", "LONG_BINPUT") and not 0 <= int(argument or 0) < _MEMO:
            raise InputError(f"the instruction {opcode.name} with {argument}")
    content = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    if not isinstance(content, dict):
        raise InputError(f"a {type(content).__name__} instead of a dictionary")
    return {
        key.encode() if isinstance(key, str) else key: value.array if isinstance(value, _Array) else value
        for key, value in content.items()
    }
