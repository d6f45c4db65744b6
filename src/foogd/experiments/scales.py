"""How large the runs of a sweep are, the samples of data that smaller ones take, and their time."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, final

import torch

from ..config import Config
from ..core.errors import InputError
from ..data.catalogue import CATALOGUE
from ..data.corrupt import corrupt
from ..data.layouts import locate
from ..data.readers import OnBad, split_size
from ..data.sources import load_source
from ..data.store import ImageStore, sample
from ..methods.base import Method
from ..presets.loader import resolve
from ..runs.files import read_json, write_atomic

RUNS, DATA, TABLE, FAILURES = "runs", "data", "table.md", "failures.txt"
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


def slug(text: str) -> str:
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
    return place / f"{slug(spec)}.npz", place / f"{slug(spec)}.json"


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
