"""Sweeps: many runs from one TOML file, by lists of methods, alphas, seeds and any other settings.

    title = "…"                    # of the tables
    about = "…"                    # one line for `foogd sweep --list`
    paper = "Table 1"              # optional: which table or figure of the paper it repeats
    base = "cifar10"               # a preset, or a TOML file beside this one
    sections = ["alpha"]           # one table for each value of these; all other settings stand in the lines of a table
    [set]                          # settings of every run; tables [set.foogd], … as in a preset
    [grid]                         # lists of values; every combination is one run
    method = ["fedavg", "fedavg+foogd"]
    seed = [0, 1, 2]
    [[where]]                      # optional: what else is set at some value of a list
    alpha = 0.1
    set = { lr = 0.01 }
    [[variants]]                   # optional: named settings, each combined with the whole grid
    name = "fixed backbone"
    start = "FedAvg"               # begins with the trained weights of that variant at the same point of the grid
    grid = { seed = [0] }          # lists that replace those of the grid for this variant
    [tiny]                         # what `--scale tiny` changes besides its usual: set = {…}, grid = {…}; also [small]

Files of plug-ins (`file.py:name`) are looked for beside the sweep's file, then in the working folder.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from ..config import Config
from ..core.errors import InputError
from ..methods import PROFILES
from ..presets.loader import TABLES, near, parse_toml, read_preset
from .scales import SCALES, Plan, Point, slug

_KEYS = {"title", "about", "paper", "base", "sections", "set", "grid", "where", "variants", "tiny", "small"}
_VARIANT_KEYS = {"name", "start", "grid"}
_SCALE_KEYS = {"set", "grid"}


def sweep_names() -> list[str]:
    """The sweeps inside the package."""
    folder = resources.files("foogd") / "presets" / "sweeps"
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def read_sweep(name: str) -> dict[str, Any]:
    """The content of a sweep of the package, or of a TOML file; its base is looked for beside the file."""
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise InputError(f"{name} is not a file: give a sweep ({', '.join(sweep_names())}) or a TOML file")
        content = parse_toml(path.read_bytes(), name)
        base = content.get("base", "")
        if isinstance(base, str) and base.endswith(".toml") and (path.parent / base).is_file():
            content["base"] = str(path.parent / base)
    elif name in sweep_names():
        content = parse_toml((resources.files("foogd") / "presets" / "sweeps" / f"{name}.toml").read_bytes(), name)
    else:
        raise InputError(f"sweep {name!r} is not known: use {', '.join(sweep_names())} or a path that ends in .toml")
    _check(content, name)
    return content


def rate_note(preset: str, named: Mapping[str, Any]) -> str:
    """A sentence where somebody named an alpha and no rate, and the tables of this preset have another rate there."""
    if "alpha" not in named or "lr" in named or preset not in sweep_names():
        return ""
    rates = {rule["alpha"]: rule["set"]["lr"] for rule in read_sweep(preset).get("where", ())}
    alpha, lr = named["alpha"], read_preset(preset)["lr"]
    if not rates or rates.get(alpha) == lr:
        return ""
    there = f"{rates[alpha]} there: --set lr={rates[alpha]}" if alpha in rates else ", ".join(
        f"{rate} at {other}" for other, rate in rates.items()
    )  # fmt: skip
    return f"alpha is {alpha} and lr stays {lr}; the tables use {there}"


def _check(content: Mapping[str, Any], name: str) -> None:
    unknown = [key for key in content if key not in _KEYS]
    if unknown:
        raise InputError(f"{name} has {unknown[0]!r}, which no sweep has: use {', '.join(sorted(_KEYS))}")
    if "base" not in content:
        raise InputError(f'{name} has no base: name a preset, as in base = "cifar10"')
    for key in ("base", "title", "about", "paper"):
        _need(name, content, key, str, "text")
    _need(name, content, "set", dict, "a table of settings, as in [set]")
    _check_grid(name, content)
    _need(name, content, "variants", list, "a list of tables, each as in [[variants]]")
    for variant in content.get("variants", ()):
        if not isinstance(variant, dict):
            raise InputError(f"{name} has a variant {variant!r}: it must be a table with a name, as in [[variants]]")
        if not isinstance(variant.get("name"), str):
            raise InputError(f"{name} has a variant without a name: {variant!r}")
        where = f"{name}, variant {variant['name']!r},"
        _need(where, variant, "start", str, "the name of another variant")
        _check_grid(where, variant)
    for scale in SCALES.keys() & content.keys():
        _need(name, content, scale, dict, f"a table, as in [{scale}.set] and [{scale}.grid]")
        where = f"{name}, table [{scale}],"
        for key in content[scale]:
            if key not in _SCALE_KEYS:
                raise InputError(f"{where} has {key!r}, which is not known: use {', '.join(sorted(_SCALE_KEYS))}")
        _need(where, content[scale], "set", dict, f"a table of settings, as in [{scale}.set]")
        _check_grid(where, content[scale])
    _check_sections(name, content)
    _check_where(name, content)


def _need(where: str, table: Mapping[str, Any], key: str, kind: type, allowed: str) -> None:
    if key in table and not isinstance(table[key], kind):
        raise InputError(f"{where} has {key} = {table[key]!r}: it must be {allowed}")


def _check_grid(where: str, table: Mapping[str, Any]) -> None:
    _need(where, table, "grid", dict, "a table of lists, as in grid = { seed = [0, 1] }")
    for axis, values in table.get("grid", {}).items():
        if not isinstance(values, list) or not values:
            raise InputError(f"{where} has {axis} = {values!r} in a grid: a list of values is needed")


def _check_where(name: str, content: Mapping[str, Any]) -> None:
    """Each [[where]] has settings, and values that are in the lists of the sweep."""
    _need(name, content, "where", list, "a list of tables, each as in [[where]]")
    tables = [content, *content.get("variants", ()), *(content.get(scale, {}) for scale in SCALES)]
    for rule in content.get("where", ()):
        if not isinstance(rule, dict) or not isinstance(rule.get("set"), dict) or len(rule) < 2:
            raise InputError(f"{name} has where = {rule!r}: it must have a value of a list and set = {{...}}")
        for axis, value in _condition(rule).items():
            if not any(value in table.get("grid", {}).get(axis, ()) for table in tables):
                raise InputError(f"{name} has a [[where]] with {axis} = {value!r}, which is in none of its lists")
        for key in rule["set"]:
            if any(key in table.get("grid", {}) for table in tables):
                raise InputError(f"{name} has a [[where]] that sets {key}, of which the sweep has a list")


def _condition(rule: Mapping[str, Any]) -> dict[str, Any]:
    return {axis: value for axis, value in rule.items() if axis != "set"}


def _check_sections(name: str, content: Mapping[str, Any]) -> None:
    """Sections are settings: of the lists of the sweep, or any other, which has one value then."""
    sections = content.get("sections", [])
    if not isinstance(sections, list) or not all(isinstance(axis, str) for axis in sections):
        raise InputError(f'{name} has sections = {sections!r}: it must be a list of settings, as in ["alpha"]')
    tables = [content, *content.get("variants", ()), *(content.get(scale, {}) for scale in SCALES)]
    axes = {axis for table in tables for axis in table.get("grid", {})}
    settings = {item.name for owner in (Config, *TABLES.values(), *PROFILES.values()) for item in fields(owner)}  # type: ignore[arg-type]
    for axis in sections:
        if axis not in axes | settings:
            raise InputError(f"{name} has {axis!r} in its sections, which is no setting{near(axis, axes | settings)}")


def plan(
    name: str,
    content: Mapping[str, Any],
    scale: str = "full",
    overrides: Mapping[str, Any] | None = None,
    *,
    beside: Path | None = None,
) -> Plan:
    """Every run of a sweep at a scale; `overrides` change a setting of all runs, or replace the list of an axis.

    `beside` is the folder of its file, where plug-ins are looked for first.
    """
    if scale not in SCALES:
        raise InputError(f"--scale {scale!r} is not allowed: use {', '.join(SCALES)}")
    how, own = SCALES[scale], content.get(scale, {})
    base = read_preset(content["base"])
    for layer in (content.get("set", {}), how.settings, own.get("set", {})):
        base = _merged(base, layer)
    grid = {**content.get("grid", {}), **own.get("grid", {})}
    # The list of a scale is its own choice; of others, seeds and alphas beyond the first only take time.
    cut = {axis for axis in how.first_only if axis not in own.get("grid", {})}
    clients = base.get("clients", Config.clients)
    if how.clients and base.get("partition") != "by_domain" and isinstance(clients, int):
        base["clients"] = min(clients, how.clients)
    base = _merged(base, {key: value for key, value in (overrides or {}).items() if key not in grid})
    sections = content.get("sections", ["alpha"])
    rules = content.get("where", ())
    variants = content.get("variants", [{"name": ""}])
    names = [variant["name"] for variant in variants]
    # Where a scale or --set chooses methods, a variant keeps of its own methods those among them, be it none.
    asked = [overrides["method"]] if overrides and "method" in overrides else own.get("grid", {}).get("method")
    points: dict[str, Point] = {}
    for variant in variants:
        own_grid = {**grid, **variant.get("grid", {})}
        own_grid |= {key: [value] for key, value in (overrides or {}).items() if key in own_grid}
        if asked is not None and "method" in variant.get("grid", {}):
            own_grid["method"] = [name for name in variant["grid"]["method"] if name in asked]
        own_grid = {axis: values[:1] if axis in cut else values for axis, values in own_grid.items()}
        fixed = {key: value for key, value in variant.items() if key not in _VARIANT_KEYS}
        for key in (*own_grid, *(overrides or {}), *(key for rule in rules for key in rule["set"])):
            if key in fixed:
                raise InputError(f"sweep {name}: variant {variant['name']!r} sets {key}, and so does something else")
        if "start" in variant and variant["start"] not in names:
            raise InputError(f"sweep {name}: variant {variant['name']!r} starts from {variant['start']!r}; there are "
                             f"{', '.join(names)}")  # fmt: skip
        for values in itertools.product(*own_grid.values()):
            at = dict(zip(own_grid, values, strict=True))
            for rule in rules:
                if _condition(rule).items() <= at.items():
                    at |= {key: (overrides or {}).get(key, value) for key, value in rule["set"].items()}
            point = _point(variant["name"], {**at, **fixed}, at, sections)
            if variant.get("start"):
                point = replace(point, start=_point(variant["start"], at, at, sections).name)
            if point.name in points:
                raise InputError(f"sweep {name} has two runs called {point.name}: lists and variants need their own")
            points[point.name] = point
    for point in points.values():
        if point.start is not None and point.start not in points:
            raise InputError(f"sweep {name}: run {point.name} starts from {point.start}, which is not in the sweep")
    _check_starts(name, {variant["name"]: variant["start"] for variant in variants if variant.get("start")})
    layers = (content.get("set", {}), own.get("set", {}), overrides or {}, *(p.settings for p in points.values()))
    chosen = any("detectors" in layer for layer in layers)
    title = content.get("title", name)
    return Plan(name, title, scale, base, tuple(points.values()), beside=beside, about_detectors=chosen)


def _check_starts(name: str, starts: Mapping[str, str]) -> None:
    """Complain about variants that wait for each other."""
    for first in starts:
        chain = [first]
        while (following := starts.get(chain[-1])) is not None:
            if following in chain:
                circle = ", which starts from ".join(repr(variant) for variant in (*chain[1:], following))
                raise InputError(f"sweep {name}: no run of variant {first!r} can begin: it starts from {circle}")
            chain.append(following)


def _merged(base: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with those of a later layer; tables of methods are merged key by key."""
    merged = dict(base)
    for key, value in layer.items():
        old = merged.get(key)
        merged[key] = {**old, **value} if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _point(variant: str, settings: Mapping[str, Any], at: Mapping[str, Any], sections: Sequence[str]) -> Point:
    first = [str(at["method"])] if "method" in at else []
    rest = {axis: value for axis, value in at.items() if axis not in ("method", "seed", *sections)}
    words = [*first, *([variant] if variant else []), *_assignments(rest)] or ["run"]
    section = ", ".join(_assignments({axis: at[axis] for axis in sections if axis in at}))
    seed = [f"seed={at['seed']}"] if "seed" in at else []
    name = "-".join(slug(word) for word in (*words, *([section] if section else []), *seed))
    return Point(name, ", ".join(words), section.replace("=", " = "), settings)


def _assignments(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key}={'+'.join(map(str, v)) if isinstance(v, list) else v}" for key, v in settings.items()]
