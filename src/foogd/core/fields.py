"""Settings: fields of frozen dataclasses that say what they mean, what they may be and what they are for.

`check` looks at the fields of an object when it is made: `Config`, methods, detectors and Flower's options call it, so
that Python and the command line have the same limits and the same sentence. `parse` reads a single value from text.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from numbers import Integral, Real
from typing import Any, Literal, Union, final, get_args, get_origin

from .errors import InputError

AutoNumber = float | Literal["auto"]
AutoWhole = int | Literal["auto"]


class Role(Enum):
    """What a setting of a run decides."""

    RESULT = "what is learnt"
    SPLIT = "which images each client has"
    TEST = "what the trained model is tested on, and by what"
    PLACE = "where and how fast the work is done"
    LABEL = "which of several runs of one experiment it is"


def setting(
    default: Any, help: str, *, role: Role = Role.RESULT, path: bool = False, plugin: bool = False, **limits: Any
) -> Any:
    """A dataclass field with a line of help and its limits: ge, gt, le, lt or choices.

    `path` and `plugin` mark values that may be a path, or name an object as in file.py:name. `added` marks a setting
    that older run folders do not name: they go on with its default. `group` names the group of settings that begins
    with this one, `words` replace what may be said of the type alone, and a text that fits `also` is allowed besides.
    """
    return field(default=default, metadata={"help": help, "role": role, "path": path, "plugin": plugin, **limits})


@final
@dataclass(frozen=True)
class Kind:
    """What a value of a type is: in words, of one and of many, and as a test; `convert` makes it plain."""

    one: str
    many: str
    fits: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


_TEXT = Kind("text", "texts", lambda value: isinstance(value, str))
_KINDS: dict[Any, Kind] = {
    int: Kind("a whole number", "whole numbers", _whole, int),
    float: Kind("a number", "numbers", _number, float),
    bool: Kind("true or false", "true or false", lambda value: isinstance(value, bool)),
    str: _TEXT,
}


def kind_of(hint: Any) -> tuple[Kind, bool] | None:
    """What values of a type are, and whether there are many of them; None of a type that no text can give."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is tuple and len(inner) == 2 and inner[1] is Ellipsis:
        found = kind_of(inner[0])
        return (found[0], True) if found and not found[1] else None
    if origin is Literal:
        return Kind(f"one of {quoted(inner)}", "", lambda value: _is_among(value, inner)), False
    if origin in (Union, types.UnionType):
        return _joined([one for one in inner if one is not type(None)])
    return (_KINDS[hint], False) if isinstance(hint, type) and hint in _KINDS else None


def _joined(hints: Sequence[Any]) -> tuple[Kind, bool] | None:
    """The kind of a union: one type or None, a number or 'auto', a text or a function."""
    if len(hints) == 1:
        found = kind_of(hints[0])
        if found is None:
            return None
        kind, many = found
        convert = lambda value: None if value is None else kind.convert(value)  # noqa: E731
        return Kind(kind.one, kind.many, lambda value: value is None or kind.fits(value), convert), many
    rest = [hint for hint in hints if hint != Literal["auto"]]
    if len(rest) == 1 and len(hints) == 2 and rest[0] in (int, float):
        kind = _KINDS[rest[0]]
        convert = lambda value: value if isinstance(value, str) else kind.convert(value)  # noqa: E731
        return Kind(f"'auto' or {kind.one}", "", lambda value: value == "auto" or kind.fits(value), convert), False
    if str in hints:
        return Kind("text or a function", "", lambda value: isinstance(value, str) or callable(value)), False
    return None


def _is_among(value: Any, choices: Iterable[Any]) -> bool:
    """Whether it is one of these and of its type: True is not 1."""
    return any(value == choice and type(value) is type(choice) for choice in choices)


def hints_of(owner: type[Any]) -> Mapping[str, Any]:
    """The types of the fields of a class; of a name that cannot be found, the text."""
    found: dict[str, Any] = {}
    for base in reversed(owner.__mro__):
        names = vars(sys.modules[base.__module__]) if base.__module__ in sys.modules else {}
        for name, hint in inspect.get_annotations(base).items():
            try:
                found[name] = eval(hint, dict(names)) if isinstance(hint, str) else hint
            except (NameError, AttributeError):
                found[name] = hint
    return found


def check(owner: Any) -> None:
    """Complain about a setting, a field with a line of help, that is of another type or beyond its limits.

    Tuples may be given as lists and numbers as numpy's: they are made plain, so that nothing can change them later.
    """
    hints = hints_of(type(owner))
    for item in fields(owner):
        if "help" in item.metadata and kind_of(hints[item.name]) is not None:
            object.__setattr__(owner, item.name, valid(item.name, getattr(owner, item.name), hints[item.name], item))


def valid(name: str, value: Any, hint: Any, item: Field[Any], *, given: Any = None) -> Any:
    """A plain value of this type within the limits of its field; InputError in one sentence where it is none.

    `given` is what somebody wrote, where that is not the value itself.
    """
    found = kind_of(hint)
    if found is None:
        raise InputError(f"setting {name!r} cannot be given as text: it is a {hint}")
    (kind, many), limits = found, item.metadata
    right = fits(value, hint)
    if right and "choices" in limits:
        matches = "also" in limits and re.fullmatch(limits["also"], str(value))
        right = _is_among(value, limits["choices"]) or bool(matches)
    elif right:
        right = all(_within(one, limits) for one in (value if many else (value,)))
    if not right:
        shown = value if given is None else given
        raise InputError(f"{name} = {shown!r} is not allowed: it must be {allowed(hint, item)}")
    return tuple(map(kind.convert, value)) if many else kind.convert(value)


def fits(value: Any, hint: Any) -> bool:
    """Whether it is a value of this type, which a text can give; limits are not looked at."""
    kind, many = kind_of(hint) or (_TEXT, False)
    if many:
        return isinstance(value, tuple | list) and all(map(kind.fits, value))
    return kind.fits(value)


def parse(name: str, value: Any, hint: Any, item: Field[Any]) -> Any:
    """A value from a file or a command line, where a list may also be a text with commas or a single item."""
    found, given = kind_of(hint), value
    if found is not None and found[1]:
        if isinstance(value, str):  # --set out=digits,fashion_out and --set severities=1,3,5
            parts = [part.strip() for part in value.split(",") if part.strip()]
            value = parts if found[0] is _TEXT else [_number_in(part) for part in parts]
        value = tuple(value) if isinstance(value, Sequence) else (value,)
    return valid(name, value, hint, item, given=given)


def _number_in(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _within(value: Any, limits: Mapping[str, Any]) -> bool:
    return isinstance(value, str | None) or (
        ("ge" not in limits or value >= limits["ge"])
        and ("gt" not in limits or value > limits["gt"])
        and ("le" not in limits or value <= limits["le"])
        and ("lt" not in limits or value < limits["lt"])
    )


def allowed(hint: Any, item: Field[Any]) -> str:
    """What a setting may be, in words."""
    limits = item.metadata
    if "choices" in limits:
        return f"one of {quoted(limits['choices'])}"
    found = kind_of(hint)
    if found is None:
        return str(hint)
    kind, many = found
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    bounds = " and ".join(f"{word} {limits[key]}" for key, word in words.items() if key in limits)
    return " ".join(filter(None, [f"a list of {kind.many}" if many else kind.one, bounds]))


def quoted(values: Iterable[Any]) -> str:
    """Values as in a program, with commas between."""
    return ", ".join(repr(value) for value in values)
