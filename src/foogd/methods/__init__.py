"""The methods by name. A name is a base method, optionally with `+aug` or `+foogd`: `fedrod+foogd`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields, replace
from typing import Any

from ..core.errors import InputError
from ..core.fields import quoted
from ..core.plugins import blamed, load_object
from .anchored import AnchoredFOOGD
from .base import HINT, Method, class_flaw
from .fedatol import FedATOL
from .fedavg import FedAvg
from .fedbn import FedBN
from .fedicon import FedICON
from .fediir import FedIIR
from .fedln import FedLN
from .fedprox import FedProx
from .fedrod import FedRoD
from .fedt3a import FedT3A
from .fedthe import FedTHE
from .foogd import FOOGD, ScoreWrapper
from .foster import FOSTER
from .scaffold import SCAFFOLD

METHODS: dict[str, type[Method]] = {
    # in the order of the paper's tables, then others that people compare with
    "fedavg": FedAvg,
    "fedrod": FedRoD,
    "foster": FOSTER,
    "fedln": FedLN,
    "fedatol": FedATOL,
    "fedt3a": FedT3A,
    "fediir": FedIIR,
    "fedthe": FedTHE,
    "fedicon": FedICON,
    "fedprox": FedProx,
    "scaffold": SCAFFOLD,
    "fedbn": FedBN,
}
"""Base methods by their name on the command line."""

PROFILES: dict[str, type[ScoreWrapper]] = {"published": FOOGD, "anchored": AnchoredFOOGD}
"""What `+foogd` means, by its setting `profile`: the paper's method, or a variant of ours."""

OURS = "anchored, not in the paper"
"""What is said of every number of the anchored variant."""

SUFFIXES = {"+foogd": "wrapped in FOOGD", "+aug": "with the augmented view in its own loss"}

__all__ = [
    "FOOGD",
    "FOSTER",
    "METHODS",
    "PROFILES",
    "SCAFFOLD",
    "AnchoredFOOGD",
    "FedATOL",
    "FedAvg",
    "FedBN",
    "FedICON",
    "FedIIR",
    "FedLN",
    "FedProx",
    "FedRoD",
    "FedT3A",
    "FedTHE",
    "Method",
    "make_method",
    "method_fields",
    "method_names",
    "method_settings",
    "possible_names",
    "shown_name",
    "written_settings",
]


def method_names() -> list[str]:
    """The methods of the paper's tables and the others of the package; any base method takes `+foogd`."""
    return [*METHODS, *(base + suffix for suffix in ("+aug", "+foogd") for base in ("fedavg", "fedrod"))]


def possible_names() -> list[str]:
    """Every base method alone, with its loss on the augmented view too where it can have one, and with FOOGD."""
    views = [base for base, cls in METHODS.items() if "views" in {item.name for item in fields(cls)}]  # type: ignore[arg-type]
    return [*METHODS, *(f"{base}+aug" for base in views), *(f"{base}+foogd" for base in METHODS)]


def split_name(name: str) -> tuple[str, str]:
    """A method's name as (base, suffix)."""
    for suffix in SUFFIXES:
        if name.endswith(suffix):
            return name.removesuffix(suffix), suffix
    return name, ""


def base_class(name: str) -> type[Method]:
    """The class of a base method: a known name, or `file.py:Class`."""
    if name in METHODS:
        return METHODS[name]
    if ".py:" not in name:
        suffixes = "any of them takes +foogd, as in fedavg+foogd or fedrod+foogd, and one with the setting views +aug"
        raise InputError(f"method {name!r} is not known: use {', '.join(METHODS)} or file.py:Class; {suffixes}")
    loaded = load_object(name, "method")
    if not (isinstance(loaded, type) and issubclass(loaded, Method)):
        kind = "class" if isinstance(loaded, type) else type(loaded).__name__
        raise InputError(f"{name} is a {kind}, but a method is a dataclass that extends foogd.Method")
    flaw = class_flaw(loaded)
    if flaw is not None:
        raise InputError(f"{name} is no method: {flaw}; {HINT}")
    return loaded


def method_fields(name: str, profile: str = "published") -> dict[str, tuple[type[Method], Field[Any]]]:
    """The settings that a method has: name → the class that owns it and its field."""
    base, suffix = split_name(name)
    known: dict[str, tuple[type[Method], Field[Any]]] = {}
    cls = base_class(base)
    known |= {item.name: (cls, item) for item in fields(cls)}  # type: ignore[arg-type]
    if suffix:
        if suffix == "+aug" and "views" not in known:
            raise InputError(f"{name} is not possible: {base} has no setting `views`")
        known.pop("views", None)  # decided by the suffix
    if suffix == "+foogd":
        variant = variant_class(profile)
        known |= {item.name: (variant, item) for item in fields(variant) if item.name != "base"}
    return known


def variant_class(profile: Any) -> type[ScoreWrapper]:
    """The class of a profile of FOOGD."""
    if isinstance(profile, str) and profile in PROFILES:
        return PROFILES[profile]
    now = {"fixed": "is called 'anchored' now", "paper": "is gone", "released": "is gone"}
    told = f" ({profile!r} {now[profile]})" if isinstance(profile, str) and profile in now else ""
    raise InputError(f"profile = {profile!r} is not allowed: it must be one of {quoted(PROFILES)}{told}")


def shown_name(settings: Mapping[str, Any], name: str = "") -> str:
    """What people read as the name of a run's method: its plain one, or `name`, and which variant of FOOGD it is."""
    name = name or str(settings["method"])
    if settings.get("profile") != "anchored":
        return name
    head, comma, rest = name.partition(",")
    return f"{head} ({OURS}){comma}{rest}"


def make_method(name: str, settings: Mapping[str, Any] | None = None) -> Method:
    """A method from its name and flat settings; those of FOOGD and of its base may be mixed."""
    base_name, suffix = split_name(name)
    settings = dict(settings or {})
    profile = settings.pop("profile", "published") if suffix == "+foogd" else "published"
    known = method_fields(name, profile)
    for key in settings:
        if key not in known:
            allowed = ", ".join(sorted(known)) or "none"
            raise InputError(f"method {name} has no setting {key!r}: it has {allowed}")
    cls, variant = base_class(base_name), variant_class(profile)
    with blamed(base_name):
        base = cls(**{key: value for key, value in settings.items() if known[key][0] is cls})
    if suffix == "+aug":
        return replace(base, views=2)  # type: ignore[type-var]
    if suffix == "+foogd":
        return variant(base, **{key: value for key, value in settings.items() if known[key][0] is variant})
    return base


def written_settings(name: str, method: Method) -> dict[str, Any]:
    """The settings of a method as a file holds them: without those that its name decides."""
    found = method_settings(method)
    if split_name(name)[1]:
        found.pop("views", None)
    return found


def method_settings(method: Method) -> dict[str, Any]:
    """All settings of a method, flat: those of FOOGD and its profile beside those of its base."""
    own = {item.name: getattr(method, item.name) for item in fields(method)}  # type: ignore[arg-type]
    if not isinstance(method, ScoreWrapper):
        return own
    inner = method_settings(own.pop("base"))
    inner.pop("views", None)
    profile = next(name for name, cls in PROFILES.items() if isinstance(method, cls))
    return {**inner, "profile": profile, **own}
