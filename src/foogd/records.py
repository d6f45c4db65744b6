"""Run folders as a report reads them: what was run, what came out, and which runs belong together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

from .config import WHERE, Config
from .data.standins import SUFFIX
from .errors import InputError
from .evaluate import Row
from .report import Report
from .runs import CONFIG, ENVIRONMENT, PARTITION, read_json, read_rounds, read_rows
from .samples import Samples, read_samples
from .settings import parse_toml

Settings = tuple[tuple[str, Any], ...]

# Settings that differ without making another experiment.
_SAME = WHERE | {
    "method",
    "seed",
    "data_root",
    "detectors",
    "eval_every",
    "eval_batch",
    "resident",
    "threads",
    "on_bad",
}
_CONFIG = frozenset(item.name for item in fields(Config))


@final
@dataclass(frozen=True, eq=False)
class Record:
    """One run: its settings and what it has written so far.

    Of the rows it keeps the means over clients, and of the last evaluated round the clients' own accuracies.
    """

    folder: Path
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    rounds: Sequence[Mapping[str, Any]]
    rows: tuple[Row, ...]
    partition: Mapping[str, Any]

    @property
    def method(self) -> str:
        return str(self.settings["method"])

    @property
    def seed(self) -> int:
        return int(self.settings["seed"])

    @property
    def last_round(self) -> int:
        """The last evaluated round."""
        return max((row.round for row in self.rows), default=0)

    @property
    def finished(self) -> bool:
        return self.last_round >= int(self.settings["rounds"])

    @property
    def stand_in(self) -> str:
        """The name of the IN data where its images are made up; else empty."""
        name = str(self.partition.get("data", ""))
        return name if name.endswith(SUFFIX) else ""

    @cached_property
    def samples(self) -> Samples | None:
        return read_samples(self.folder)


@final
@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ in the seed alone."""

    method: str
    setting: Settings  # of the run, where the report's runs differ in it: alpha
    variant: Settings  # of the method, where its runs differ in it: lambda_m
    records: tuple[Record, ...]

    @property
    def label(self) -> str:
        """The method, with the settings of its own that other runs of it have differently."""
        return ", ".join([self.method, *(f"{key}={shown(value)}" for key, value in self.variant)])

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.records[0].settings

    @property
    def stand_in(self) -> bool:
        return any(record.stand_in for record in self.records)

    @cached_property
    def answered(self) -> Record | None:
        """The first run that has single answers of its last evaluated round."""
        for record in self.records:
            if record.samples is not None and record.samples.round == record.last_round:
                return record
        return None


@final
@dataclass(frozen=True, eq=False)
class Scene:
    """Groups with the same data, clients and training: the lines of one table."""

    setting: Settings
    groups: tuple[Group, ...]

    @property
    def title(self) -> str:
        return ", ".join(f"{key} = {shown(value)}" for key, value in self.setting)

    @cached_property
    def history(self) -> Report:
        """All rows, with the groups' labels in the place of the methods' names."""
        return Report.of(
            row if row.method == group.label else replace(row, method=group.label)
            for group in self.groups
            for record in group.records
            for row in record.rows
        )

    @cached_property
    def report(self) -> Report:
        """The rows of every run's last evaluated round."""
        return self.history.last_round()


@final
@dataclass(frozen=True, eq=False)
class Collection:
    """All runs of a report, in groups."""

    scenes: tuple[Scene, ...]
    notes: tuple[str, ...]  # what was left out, and why

    @property
    def groups(self) -> list[Group]:
        return [group for scene in self.scenes for group in scene.groups]

    @property
    def records(self) -> list[Record]:
        return [record for group in self.groups for record in group.records]


def find_runs(places: Iterable[Path]) -> list[Path]:
    """Run folders themselves, and those below folders that are none."""
    found: dict[Path, None] = {}
    for place in places:
        if not place.is_dir():
            raise InputError(f"{place} is not a run folder: it {'is a file' if place.exists() else 'does not exist'}")
        inside = [place] if (place / CONFIG).is_file() else sorted(path.parent for path in place.rglob(CONFIG))
        if not inside:
            raise InputError(f"{place} holds no run: there is no {CONFIG} in it or below it")
        found.update(dict.fromkeys(path for path in inside if not path.name.startswith(".")))
    return list(found)


def read_record(folder: Path) -> Record:
    """What a run folder holds; the code of methods and data that it names is not needed."""
    settings = parse_toml((folder / CONFIG).read_bytes(), str(folder / CONFIG))
    missing = [key for key in ("method", "seed", "rounds", "data") if key not in settings]
    if missing:
        raise InputError(f"{folder / CONFIG} is half-written: it has no {', '.join(missing)}")
    rows = read_rows(folder)
    last = max((row.round for row in rows), default=0)
    # A run's name changes where the package gets a new setting; its folder stays.
    kept = tuple(
        replace(row, run=str(folder))
        for row in rows
        if row.scope == "weighted" or (row.scope == "client" and row.round == last and row.detector is None)
    )
    environment = read_json(folder / ENVIRONMENT) if (folder / ENVIRONMENT).is_file() else {}
    partition = read_json(folder / PARTITION) if (folder / PARTITION).is_file() else {}
    for key in ("indices", "calibration_indices"):  # who holds which image; long, and nothing that a report shows
        partition.pop(key, None)
    return Record(folder, settings, environment, read_rounds(folder), kept, partition)


def collect(folders: Sequence[Path]) -> Collection:
    """The runs in these folders, grouped by what differs between them."""
    notes, records = [], []
    for folder in folders:
        record = read_record(folder)
        if record.rows:
            records.append(record)
        else:
            notes.append(f"{folder.name} was left out: it has no evaluated round yet.")
    if not records:
        raise InputError(f"there is nothing to report: none of {len(folders)} runs has an evaluated round")
    in_setting = [key for key in _varying(records) if key in _CONFIG]
    in_variant = {
        method: [key for key in _varying([r for r in records if r.method == method]) if key not in _CONFIG]
        for method in dict.fromkeys(record.method for record in records)
    }
    scenes: dict[str, dict[str, list[Record]]] = {}
    keys: dict[tuple[str, str], tuple[Settings, Settings]] = {}
    for record in records:
        setting = tuple((key, record.settings.get(key)) for key in in_setting)
        variant = tuple((key, record.settings.get(key)) for key in in_variant[record.method])
        scene, line = repr(setting), repr((record.method, variant))
        keys[scene, line] = setting, variant
        alike = scenes.setdefault(scene, {}).setdefault(line, [])
        twin = next((other for other in alike if other.seed == record.seed), None)
        if twin is None:
            alike.append(record)
        else:
            notes.append(f"{record.folder} was left out: {twin.folder} has the same settings and seed.")
    found = []
    for scene, lines in scenes.items():
        groups = [
            Group(members[0].method, *keys[scene, line], tuple(sorted(members, key=lambda one: one.seed)))
            for line, members in lines.items()
        ]
        found.append(Scene(groups[0].setting, tuple(sorted(groups, key=_order))))
    found.sort(key=lambda scene: [sortable(value) for _, value in scene.setting])
    return Collection(tuple(found), tuple(notes))


def _varying(records: Sequence[Record]) -> list[str]:
    """The settings whose values differ between records that have them."""
    keys = dict.fromkeys(key for record in records for key in record.settings if key not in _SAME)
    return [key for key in keys if len({repr(r.settings[key]) for r in records if key in r.settings}) > 1]


# The order of the paper's tables: methods without a private part, then those with one; FOOGD last in each.
_TABLE = (
    "fedavg", "fedavg+aug", "fedprox", "scaffold", "fedbn", "fedln", "fedatol", "fedt3a", "fediir", "fedavg+foogd",
    "fedrod", "fedrod+aug", "foster", "fedthe", "fedicon", "fedrod+foogd",
)  # fmt: skip


def _order(group: Group) -> tuple[Any, ...]:
    place = _TABLE.index(group.method) if group.method in _TABLE else len(_TABLE)
    return place, group.method, [sortable(value) for _, value in group.variant]


def sortable(value: Any) -> tuple[int, float, str]:
    """What values of a setting are put in order by: numbers first."""
    number = isinstance(value, int | float)
    return (0, float(value), "") if number else (1, 0.0, str(value))


def shown(value: Any) -> str:
    """A setting's value in words."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(shown(item) for item in value) or "none"
    return str(value) if value not in (None, "") else "none"
