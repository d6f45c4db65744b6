"""From presets, TOML files and `--set key=value` to a checked `Config` and `Method`.

Settings are flat: a key belongs to the run (`rounds`) or to the method (`lambda_m`). A preset may also hold tables
named `[foogd]`, `[fedrod]`, …, whose keys count only where the method has that part.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from ..config import Config
from ..core.errors import InputError
from ..core.fields import allowed, fits, hints_of, parse
from ..methods import FOOGD, METHODS, PROFILES, AnchoredFOOGD, make_method, method_fields, split_name, variant_class
from ..methods.base import Method

TABLES: dict[str, type[Method]] = {**METHODS, "foogd": FOOGD}

PROFILE = (
    "profile",
    "published",
    "published, the paper's method; anchored, a variant of ours that is not in the paper",
)
"""Name, default and meaning of what chooses the class behind `+foogd`."""


REMOVED: dict[str, Any] = {
    # of FOOGD, all of them with the values of what is called anchored now
    "score_net": "anchored", "standardise": True, "conditioned": True, "score_features": "eval", "joint_views": True,
    "dsm_target": "score", "anneal_power": 2.0, "mmd_kernels": 2, "ksd_pairs": "aug", "ksd_power": 2.0,
    "ksd_log": True, "view_clip": 255, "score_optimiser": "adam", "score_momentum": 0.0,
    # of FedATOL and FOSTER
    "repo_label_shift": False, "relu": False,
    # of the run
    "weighting": "samples", "partners": "own", "train_constants": "dataset",
}  # fmt: skip
"""Settings that are gone → the default that each had, as TOML holds it. What it did is what is done now."""


def preset_names() -> list[str]:
    """The presets inside the package."""
    folder = resources.files("foogd") / "presets"
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def read_preset(name: str) -> dict[str, Any]:
    """The settings of a preset, or of a TOML file."""
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise InputError(f"{name} is not a file: give a preset ({', '.join(preset_names())}) or a TOML file")
        return parse_toml(path.read_bytes(), str(path))
    if name not in preset_names():
        if (Path(name) / "config.toml").is_file():
            raise InputError(f"{name} is a run folder, not a preset: its settings are in {Path(name) / 'config.toml'}")
        raise InputError(f"preset {name!r} is not known: use {', '.join(preset_names())} or a path that ends in .toml")
    return parse_toml((resources.files("foogd") / "presets" / f"{name}.toml").read_bytes(), name)


def parse_toml(data: bytes, name: str) -> dict[str, Any]:
    """The content of a TOML file, with one sentence where it cannot be read."""
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{name} is not TOML: {' '.join(str(error).split())}") from None


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """`key=value` pairs; a value is read as TOML (0.5, true, ["a"]) and taken as text where it is none."""
    settings: dict[str, Any] = {}
    for text in assignments:
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise InputError(f"--set {text!r} is not of the form key=value")
        settings[key.strip()] = _value(value.strip())
    return settings


def _value(text: str) -> Any:
    try:
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return found["value"] if len(found) == 1 else text


def resolve(preset: Mapping[str, Any], overrides: Mapping[str, Any]) -> tuple[Config, Method]:
    """The configuration and the method that a preset and the user's overrides describe."""
    name = str(overrides.get("method", preset.get("method", Config.method)))
    merged: dict[str, Any] = {**_flatten(preset, name), **overrides, "method": name}
    profile = profile_of(merged)
    merged.pop("profile", None)
    known_method = method_fields(name, profile)
    known_config = {item.name: item for item in fields(Config)}
    known: dict[str, tuple[type, Field[Any]]] = {key: (Config, item) for key, item in known_config.items()}
    for key, (owner, item) in known_method.items():
        if key in known_config:
            raise InputError(f"{owner.__name__} has a setting {key!r}, which every run has too: give it another name")
        if key not in merged and item.default is MISSING and item.default_factory is MISSING:
            raise InputError(f"setting {key!r} of method {name} has no default: give it with --set {key}=VALUE")
    known |= known_method
    _check_variant(name, profile, merged, known)
    for key in [key for key in merged if key in REMOVED and key not in known]:
        if (value := merged.pop(key)) != REMOVED[key]:
            raise InputError(f"{key} = {value!r} is not possible any more: only its default {REMOVED[key]!r} remains")
    checked = check_settings(merged, known, name)
    config = Config(**{key: value for key, value in checked.items() if key in known_config})
    try:
        own = {key: value for key, value in checked.items() if key not in known_config}
        return config, make_method(name, own | ({"profile": profile} if name.endswith("+foogd") else {}))
    except TypeError as error:  # a user's class that is abstract or makes itself in another way
        raise InputError(f"method {name} cannot be made from its settings: {error}") from error


def read_run_config(path: Path) -> tuple[Config, Method]:
    """Configuration and method from a run's config.toml, which names every setting."""
    settings = parse_toml(path.read_bytes(), str(path))
    try:
        config, method = resolve(settings, {})
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    known = [item.name for item in fields(Config) if not item.metadata.get("added")]
    of_method = method_fields(config.method, profile_of(settings))
    known += [key for key, (_, item) in of_method.items() if item.default is not None]
    missing = [key for key in known if key not in settings]
    if missing:
        raise InputError(f"{path} is half-written or of an older version: it has no {', '.join(missing)}")
    return config, method


def read_run_settings(path: Path) -> dict[str, Any]:
    """What a run's config.toml says, of types that fit, without settings that are gone and had their default.

    A folder from before a setting existed was made with its default.
    """
    try:
        settings = parse_toml(path.read_bytes(), str(path))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    if missing := [key for key in ("method", "seed", "rounds", "data") if key not in settings]:
        raise InputError(f"{path} is half-written: it has no {', '.join(missing)}")
    for item in fields(Config):
        hint, default = hints_of(Config)[item.name], item.default
        value = settings.setdefault(item.name, list(default) if isinstance(default, tuple) else default)
        if not fits(value, hint):
            raise InputError(f"{path} is damaged: {item.name} is {value!r}; {allowed(hint, item)} is needed")
    kept = {key: value for key, value in settings.items() if key not in REMOVED or value != REMOVED[key]}
    if str(settings.get("method", "")).endswith("+foogd"):
        try:
            kept["profile"] = profile_of(settings)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
    return kept


def _flatten(preset: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A preset without its tables, and with the values of those that belong to the method."""
    base, suffix = split_name(name)
    parts = {base, suffix.removeprefix("+")}
    flat = {key: value for key, value in preset.items() if not isinstance(value, Mapping)}
    for key, table in preset.items():
        if isinstance(table, Mapping):
            if key not in TABLES:
                raise InputError(f"table [{key}] is not known: a preset has {', '.join(f'[{t}]' for t in TABLES)}")
            _check_table(key, table)
            if key in parts:
                flat |= table
    return flat


def _check_table(name: str, table: Mapping[str, Any]) -> None:
    """A misspelt key is found also where the method has no use for its table."""
    owners = PROFILES.values() if name == "foogd" else (TABLES[name],)
    known = {item.name for owner in (Config, *owners) for item in fields(owner)}
    known = known - {"base", "method"} | ({"profile"} if name == "foogd" else set())
    for key in table:
        if key not in known and key not in REMOVED:
            raise InputError(f"table [{name}] has a setting {key!r} that is not known{near(key, known)}")


def profile_of(settings: Mapping[str, Any]) -> str:
    """What `+foogd` means in these settings; files from before there were profiles tell it by their score network."""
    name = str(settings.get("method", Config.method))
    if not name.endswith("+foogd"):
        if "profile" in settings:
            raise InputError(f"method {name} has no setting 'profile': only methods with +foogd have profiles")
        return PROFILE[1]
    if "profile" in settings:
        variant_class(settings["profile"])
        return str(settings["profile"])
    score_net = settings.get("score_net")
    if score_net not in (None, REMOVED["score_net"]):
        raise InputError(
            f"score_net = {score_net!r} is not possible any more: a run with it is read by foogd at the commit that "
            "its environment.json names"
        )
    return PROFILE[1] if score_net is None else "anchored"


def _check_variant(name: str, profile: str, settings: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Complain about what only the anchored variant of FOOGD has, or did."""
    if split_name(name)[1] != "+foogd" or profile == "anchored":
        return
    for key, value in settings.items():
        did = key in ("score_net", "ksd_log") and value == REMOVED[key]
        if did or (key not in known and key in AnchoredFOOGD.__dataclass_fields__):
            raise InputError(f"{key} is of the anchored variant of FOOGD alone: give profile = 'anchored' with it")


def check_settings(
    settings: Mapping[str, Any], known: Mapping[str, tuple[type, Field[Any]]], name: str
) -> dict[str, Any]:
    """The settings with their types and limits checked."""
    for key in settings:
        if key not in known:
            raise InputError(f"setting {key!r} is not known for method {name}{near(key, known)}")
    return {key: parse(key, value, hints_of(known[key][0]).get(key), known[key][1]) for key, value in settings.items()}


def near(key: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown setting: the nearest name, and all."""
    return f"{nearest(key, known)}: use {', '.join(sorted(known))}"


def nearest(key: str, known: Iterable[str]) -> str:
    """A guess at the name that was meant, in brackets; empty where none is near."""
    found = difflib.get_close_matches(key, known, n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""
