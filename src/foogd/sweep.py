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

import contextlib
import itertools
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, final

import torch

from .config import Config
from .data.catalogue import CATALOGUE, locate
from .data.corrupt import corrupt
from .data.readers import OnBad, split_size
from .data.sources import load_source
from .data.store import ImageStore, sample
from .errors import InputError
from .evaluate import Row
from .methods import PROFILES, method_settings, shown_name
from .methods.base import Method
from .report import Cell, Report, Table
from .runs import read_json, read_rows, write_atomic
from .settings import TABLES, near, parse_toml, read_preset, resolve

RUNS, DATA, TABLE, FAILURES = "runs", "data", "table.md", "failures.txt"
_KEYS = {"title", "about", "paper", "base", "sections", "set", "grid", "where", "variants", "tiny", "small"}
_VARIANT_KEYS = {"name", "start", "grid"}
_SCALE_KEYS = {"set", "grid"}
# In the place of data that are missing: the embedded images, and for PACS four looks of them, one a domain.
INSIDE, OUTSIDE, LOOKS = "fashion", ("fashion_out", "digits"), "four looks of fashion"
LOOK_OF = {"art_painting": "gaussian_blur", "cartoon": "contrast", "photo": "brightness", "sketch": "gaussian_noise"}
_PLUGINS = [item.name for item in fields(Config) if item.metadata["plugin"]]


@final
@dataclass(frozen=True)
class Scale:
    """How large the runs of a sweep are: settings, the axes of which only the first value counts, numbers of images."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    first_only: tuple[str, ...] = ()
    clients: int = 0  # at most; 0: as many as there are
    train: int = 0  # images of a set; 0: all
    test: int = 0
    out: int = 0
    replaces: bool = False  # whether embedded images take the place of data that are missing


SCALES: dict[str, Scale] = {
    "tiny": Scale(
        settings={
            "backbone": "cnn", "rounds": 1, "local_epochs": 1, "batch_size": 32, "eval_every": 0, "severities": [3],
            "foogd": {"score_width": 32}, "fedatol": {"generator_width": 4, "gan_epochs": 1, "gan_rounds": 1},
            "foster": {"generator_batch": 32, "candidates": 50}, "fedicon": {"head_epochs": 1, "personal_epochs": 1},
        },
        first_only=("seed", "alpha"), clients=3, train=160, test=60, out=30, replaces=True,
    ),
    "small": Scale(
        settings={
            "backbone": "cnn", "rounds": 10, "local_epochs": 1, "batch_size": 64, "eval_every": 0,
            "severities": [1, 3, 5], "foogd": {"score_width": 256}, "fedatol": {"generator_width": 8, "gan_lr": 1e-3},
        },
        first_only=("seed",), train=5_000, test=1_000, out=500,
    ),
    "full": Scale(),
}  # fmt: skip
"""What `--scale` makes of a sweep: tiny takes about a minute, small is for a processor, full is as it stands."""


@final
@dataclass(frozen=True)
class Point:
    """One run of a sweep: its folder's name, its line and section in the tables, its settings, what it starts from."""

    name: str
    label: str
    section: str
    settings: Mapping[str, Any]
    start: str | None = None


@final
@dataclass(frozen=True)
class Plan:
    """A sweep, read and multiplied out."""

    name: str
    title: str
    scale: str
    base: Mapping[str, Any]
    points: tuple[Point, ...]
    missing: tuple[str, ...] = ()  # data sets in whose place there are embedded images
    beside: Path | None = None  # the folder of the sweep's file
    about_detectors: bool = False  # whether it chooses detectors itself

    def resolved(self, point: Point, out: Path) -> tuple[Config, Method]:
        """Configuration and method of one run in the folder of the sweep."""
        settings = dict(point.settings)
        if point.start is not None:
            settings["init"] = str(out / RUNS / point.start)
        with self.naming(point):
            return resolve(self._found(self.base), self._found(settings))

    @contextlib.contextmanager
    def naming(self, point: Point) -> Iterator[None]:
        """Say in a complaint which run it is about."""
        try:
            yield
        except InputError as error:
            raise InputError(f"sweep {self.name}, run {point.name}: {error}") from None

    def _found(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings with full paths of plug-ins, by which runs find them again from any folder."""
        # A sample takes the place of data; it is named after what the sweep's file says.
        kept = ("data", "out") if SCALES[self.scale].train else ()
        found = dict(settings)
        for key in _PLUGINS:
            value = settings.get(key)
            if isinstance(value, str) and key in ("detectors", "out"):  # --set detectors=msp,mine.py:own
                value = [part.strip() for part in value.split(",") if part.strip()]
            if isinstance(value, str) and key not in kept:
                found[key] = self.find(value)
            elif isinstance(value, list | tuple) and key not in kept:
                found[key] = [self.find(item) if isinstance(item, str) else item for item in value]
        return found

    def find(self, spec: str) -> str:
        """A plug-in `file.py:name` with the full path of its file, where there is such a file; else as it is."""
        file, _, name = spec.rpartition(":")
        if file.endswith(".py"):
            for folder in (*([self.beside] if self.beside is not None else []), Path()):
                if (folder / file).is_file():
                    return f"{(folder / file).resolve()}:{name}"
        return spec

    @property
    def warnings(self) -> list[str]:
        """What a reader of the tables must know."""
        found = []
        if self.scale != "full":
            found.append(f"Scale {self.scale}: fewer rounds and images and a smaller net than the sweep asks for.")
        if self.missing:
            names = ", ".join(self.missing)
            found.append(f"The numbers tell nothing about {names}: embedded images are in the place of these data.")
        return found


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
        raise InputError(f"{name} has no base: name a preset, as in base = \"cifar10\"")
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
        raise InputError(f"{name} has sections = {sections!r}: it must be a list of settings, as in [\"alpha\"]")
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
    name = "-".join(_slug(word) for word in (*words, *([section] if section else []), *seed))
    return Point(name, ", ".join(words), section.replace("=", " = "), settings)


def _assignments(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key}={'+'.join(map(str, v)) if isinstance(v, list) else v}" for key, v in settings.items()]


def _slug(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "+._=" else "_" for letter in text)


def with_data(plan: Plan, out: Path, configs: Sequence[Config]) -> Plan:
    """The plan with samples of its data in the sweep's own folder; embedded images in the place of what is missing."""
    how = SCALES[plan.scale]
    if not how.train:
        return plan
    place, real_root = out / DATA, Path(configs[0].data_root)
    if how.replaces:
        plan, configs = _with_embedded(plan, place, configs)
    inside = {(config.data, config.sites) for config in configs}
    specs = {*inside, *((name, "") for config in configs for name in config.out)}
    on_bad: OnBad = "skip" if all(config.on_bad == "skip" for config in configs) else "error"
    taken: dict[str, str] = {}
    for spec, sites in sorted(specs):
        entry = CATALOGUE.get(split_size(spec)[0])
        embedded = spec == LOOKS or (entry is not None and entry.embedded)
        root = None if embedded else str(real_root.resolve())
        path, origin = _files_of(place, spec)
        _check_origin(place, spec, root)
        if not path.is_file():
            store = _looks() if spec == LOOKS else load_source(plan.find(spec), real_root, sites=sites, on_bad=on_bad)
            numbers = (how.train, how.test) if (spec, sites) in inside else (how.out, how.out)
            # Before the sample: one that is there has an origin.
            write_atomic(origin, json.dumps({"data_root": root}).encode())
            sample(store, train=numbers[0], test=numbers[1]).save(path)
        taken[spec] = str(path)
    points = []
    for point, config in zip(plan.points, configs, strict=True):
        changed = {"data": taken[config.data], "sites": "", "out": [taken[name] for name in config.out]}
        points.append(replace(point, settings={**point.settings, **changed}))
    return replace(plan, points=tuple(points))


def _with_embedded(plan: Plan, place: Path, configs: Sequence[Config]) -> tuple[Plan, list[Config]]:
    """The plan, which says what is missing, and the configurations with embedded images in its place."""

    def lost(spec: str) -> bool:
        entry, root = CATALOGUE.get(split_size(spec)[0]), Path(configs[0].data_root)
        there = _files_of(place, spec)[0].is_file()  # a sample is enough
        return entry is not None and not entry.embedded and not there and locate(entry, root) is None

    data = [spec for spec in dict.fromkeys(config.data for config in configs) if lost(spec)]
    outs = [spec for spec in dict.fromkeys(name for config in configs for name in config.out) if lost(spec)]
    missing = tuple(dict.fromkeys([*data, *outs]))
    if not missing:
        return plan, list(configs)
    for spec in missing:  # so that nobody goes on with the real data
        write_atomic(_files_of(place, spec)[1], json.dumps({"data_root": None}).encode())
    instead = {spec: LOOKS if split_size(spec)[0] == "pacs" else INSIDE for spec in data}
    found = []
    for config in configs:
        out = dict.fromkeys(name for spec in config.out for name in (OUTSIDE if spec in outs else (spec,)))
        found.append(replace(config, data=instead.get(config.data, config.data), out=tuple(out)))
    told = [f"{spec} by {'' if name == INSIDE else 'four looks of '}embedded images" for spec, name in instead.items()]
    told += [f"OUT sets {', '.join(outs)} by {' and '.join(OUTSIDE)}"] if outs else []
    title = f"{plan.title} ({plan.scale}: data that are not here are replaced, {'; '.join(told)})"
    return replace(plan, title=title, missing=missing), found


def _looks() -> ImageStore:
    """A quarter of the embedded images in each of four looks, which bear the names of the domains of PACS."""
    store = load_source(INSIDE, Path())
    domains = torch.arange(len(store)) % len(LOOK_OF)  # the images are in no order
    images = store.images.clone()
    for number, kind in enumerate(LOOK_OF.values()):
        images[domains == number] = corrupt(images[domains == number], kind, 5, 0)
    return replace(store, images=images, name=LOOKS, domains=domains, domain_names=tuple(LOOK_OF), test=None)


def _files_of(place: Path, spec: str) -> tuple[Path, Path]:
    """A sample, and the file that says from where it was taken."""
    return place / f"{_slug(spec)}.npz", place / f"{_slug(spec)}.json"


def _check_origin(place: Path, spec: str, root: str | None) -> None:
    """Complain about what was taken from another folder, or stands for data that are here now.

    Samples of earlier versions do not say where they are from.
    """
    origin = _files_of(place, spec)[1]
    before = read_json(origin).get("data_root") if origin.is_file() else root
    if before != root:
        sampled = f"a sample of {spec} in {before}, and data_root is {root} now"
        what = sampled if before else f"embedded images in the place of {spec}, which is in {root} now"
        raise InputError(f"{place} has {what}; choose another --out")


# Time

# Backbone → seconds of FedAvg for an image of an epoch, what each further pass of a method's `effort` adds to them, and
# the size of those images: the kept runs that docs/paper.md names, on one H200 and, of the small CNN, on one core.
COST = {"wrn40-2": (25e-6, 0.4, 32), "resnet18": (25e-6, 0.5, 64), "cnn": (146e-6, 1.3, 32)}
# Data → training images, of PACS without the domain that is left out, and their size.
IMAGES = {"cifar10": (50_000, 32), "cifar100": (50_000, 32), "tinyimagenet": (100_000, 64), "pacs": (6_700, 64)}


def training_time(plan: Plan) -> tuple[float, str] | None:
    """About how many seconds the training of a sweep takes, and on what; None where nothing like it was measured."""
    how, seconds, places = SCALES[plan.scale], 0.0, set()
    for config, method in (plan.resolved(point, Path()) for point in plan.points):
        if how.replaces or config.backbone not in COST or config.data not in IMAGES:
            return None
        (once, further, size), (images, px) = COST[config.backbone], IMAGES[config.data]
        times = config.rounds * config.local_epochs * min(images, how.train or images) * (px / size) ** 2
        seconds += times * once * (1 + further * (method.effort - 1))
        places.add("two cores" if config.backbone == "cnn" else "one GPU like an H200")
    return (seconds / 2 if places == {"two cores"} else seconds), " and ".join(sorted(places))


# Tables


def sweep_reports(plan: Plan, out: Path, failed: Iterable[str] = ()) -> dict[str, Report]:
    """The last results of each section, under the names of its lines."""
    lost = set(failed)
    reports: dict[str, Report] = {}
    for section in dict.fromkeys(point.section for point in plan.points):
        rows: list[Row] = []
        for point in plan.points:
            if point.section == section and point.name not in lost:
                name = shown_name(method_settings(plan.resolved(point, out)[1]), point.label)
                rows += Report.of(read_rows(out / RUNS / point.name)).last_round().called(name).rows
        reports[section] = Report.of(rows)
    return reports


def shortened(plan: Plan, reports: Mapping[str, Report], shown: Sequence[str]) -> dict[str, Report]:
    """The reports with these detectors and the user's own alone, where there are more and the sweep chose none."""
    found = {row.detector for report in reports.values() for row in report.rows if row.detector}
    kept = {name for name in found if name in shown or ".py:" in name}
    if plan.about_detectors or not kept or len(found) <= len(shown):
        return dict(reports)
    return {section: report.only(kept) for section, report in reports.items()}


def sweep_tables(reports: Mapping[str, Report]) -> list[Table]:
    """For each section the results, the joint view and, where there are several, the corruptions; then all sections."""
    tables = []
    for section, report in reports.items():
        for table in (report.headline(), report.joint(), _by_corruption(report)):
            if table.rows:
                title = f"{section}: {table.title}" if section else table.title
                tables.append(replace(table, title=title))
    if len(reports) > 1:
        tables += [_overview(reports, split, title) for split, title in (("in", "ACC-IN"), ("in-c", "ACC-IN-C"))]
    return tables


def _by_corruption(report: Report) -> Table:
    """Accuracy on each kind of IN-C, the mean over severities; no lines where there is one kind only."""
    kinds = list(dict.fromkeys(row.corruption for row in report.rows if row.split == "in-c" and row.corruption))
    lines = []
    for kind in kinds if len(kinds) > 1 else ():
        part = Report.of(row for row in report.rows if row.corruption == kind)
        cells = [part.values(method=name, metric="accuracy", split="in-c") for name in report.methods()]
        lines.append((kind, *(Cell(tuple(values)).text() for values in cells)))
    return Table("accuracy by corruption, in %", ("corruption", *report.methods()), tuple(lines))


def _overview(reports: Mapping[str, Report], split: str, title: str) -> Table:
    """One accuracy, a line for each method and a column for each section, and their mean."""
    lines = []
    for method in dict.fromkeys(name for report in reports.values() for name in report.methods()):
        found = [_by_seed(report, method, split) for report in reports.values()]
        alike = all(values.keys() == found[0].keys() for values in found)
        mean = tuple(statistics.fmean(values[seed] for values in found) for seed in found[0]) if alike else ()
        lines.append((method, *(Cell(tuple(values.values())).text() for values in found), Cell(mean).text()))
    return Table(f"{title}, in %", ("method", *reports, "mean"), tuple(lines))


def _by_seed(report: Report, method: str, split: str) -> dict[int, float]:
    """The accuracy of each seed; those that were not measured are left out."""
    found = {}
    for seed in sorted({row.seed for row in report.rows}):
        part = Report.of(row for row in report.rows if row.seed == seed)
        for value in part.values(method=method, metric="accuracy", split=split):
            found[seed] = value
    return found


def tables_text(plan: Plan, tables: Iterable[Table], failures: Mapping[str, str]) -> str:
    """`table.md`: warnings first, then the tables, then what failed."""
    text = [f"# {plan.title}", ""]
    for sentence in plan.warnings:
        text += [f"**{sentence}**", ""]
    for table in tables:
        words = (0, 1) if table.columns[:2] == ("method", "detector") else (0,)
        text += [f"({table.title})", "", table.markdown(words), ""]
    if failures:
        text += ["Failed runs, which are not in the tables:", ""]
        text += [*(f"- {name}: {reason}" for name, reason in failures.items()), ""]
    return "\n".join(text)
