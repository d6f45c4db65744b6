"""Run folders as a report reads them: what was run, what came out, and which runs belong together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

from ..config import Config
from ..core.errors import InputError
from ..core.fields import Role
from ..evaluation.rows import Row
from ..methods import shown_name
from ..presets.loader import read_run_settings
from ..runs.files import CONFIG, ENVIRONMENT, FLOWER, PARTITION, ROUNDS, read_json, read_rounds, read_rows
from ..runs.predictions import Samples, read_samples
from ..tables.results import Report

Settings = tuple[tuple[str, Any], ...]
_LEAKS = "training_images_in_tests"
_ROUND = {
    "seconds": int | float, "losses": dict, "participants": list, "refused": dict | list, "bytes_up": int,
    "bytes_down": int, "drift": dict,
}  # fmt: skip

# Settings that differ without making another experiment. `init` is another path for every seed: see `collect`.
_SAME = Config.of_role(Role.PLACE, Role.LABEL) | {"detectors", "eval_every", "eval_batch", "on_bad"}
ON_FLOWER = "on_flower"  # beside the settings: whether the nodes of Flower brought the images
HASH = "content_hash"  # beside the settings, where these are not enough: the hash of the training images
_SHOWN = 8  # digits of a hash that a title shows
LISTS = {"out": "OUT sets", "corruptions": "corruptions", "severities": "severities"}  # what a title calls them
MANY = 4  # items of such a list: of more, a title gives the number
# Told in titles even where the data set decides them: without them two experiments would look alike.
TOLD = frozenset({ON_FLOWER, "alpha", "rounds", "leave_out"})


@final
@dataclass(frozen=True, eq=False)
class Record:
    """One run: its settings and what it has written so far.

    Of the rows it keeps the means over clients, and of the last evaluated round what is pooled and the clients' own
    accuracies.
    """

    folder: Path
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    rounds: Sequence[Mapping[str, Any]]
    rows: tuple[Row, ...]
    partition: Mapping[str, Any]
    answers: bool = True  # whether its single answers can be read, where it has any
    outs: Mapping[str, str] | None = None  # the OUT sets that are looked at, as in `tested`; None: all
    flower: bool = False  # whether it was made on Flower, where the nodes bring their data
    idle: frozenset[str] = frozenset()  # settings that tell nothing about it beside other runs
    hashed: bool = False  # whether only a hash tells its training images from those of other runs

    @property
    def method(self) -> str:
        return str(self.settings["method"])

    @property
    def name(self) -> str:
        """The method as people read it."""
        return shown_name(self.settings)

    @property
    def seed(self) -> int:
        return int(self.settings["seed"])

    @property
    def clients(self) -> int:
        """How many there are: the settings say 0 where clients are domains, and on Flower more may have joined.

        0 where the folder does not say.
        """
        seen = {row.client for row in self.rows if row.client is not None}
        return len(self.partition.get("counts", ())) or int(self.settings["clients"]) or len(seen)

    @property
    def last_round(self) -> int:
        """The last evaluated round."""
        return max((row.round for row in self.rows), default=0)

    @property
    def finished(self) -> bool:
        return self.last_round >= int(self.settings["rounds"])

    @cached_property
    def samples(self) -> Samples | None:
        found = read_samples(self.folder) if self.answers else None
        if found is None or self.outs is None:
            return found
        names = self.outs.values()
        return replace(found, sets=tuple(one for one in found.sets if one.split != "out" or one.name in names))

    @cached_property
    def compared(self) -> dict[str, Any]:
        """What it is told from other runs by."""
        settings = {key: value for key, value in self.settings.items() if key not in _SAME | self.idle}
        if settings.get("update_bound") == 0:  # one experiment with "auto": whose updates were refused is told
            settings["update_bound"] = "auto"
        outs = {} if self.outs is None else {"out": list(self.outs)}
        known = self.hashed and not self.flower and HASH in self.partition
        return {ON_FLOWER: self.flower, **settings, **outs, **({HASH: self.partition[HASH]} if known else {})}

    @property
    def tested(self) -> dict[str, str] | None:
        """The OUT sets that have rows: what the settings call them, and their names; None where that is not clear."""
        names = list(dict.fromkeys(row.dataset for row in self.rows if row.split == "out"))
        specs = self.settings["out"]
        return dict(zip(specs, names, strict=True)) if len(specs) == len(names) == len(set(specs)) else None


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
        return ", ".join([self.name, *(f"{key}={shown(value)}" for key, value in self.variant)])

    @property
    def name(self) -> str:
        return self.records[0].name

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.records[0].settings

    @property
    def clients_stay(self) -> bool:
        """Whether a client is the same one in every seed: as a domain, a node of Flower, or by a seed of the split."""
        return self.flower or bool(self.settings["partition"] == "by_domain") or self.settings["split_seed"] != "auto"

    @property
    def unfinished(self) -> str:
        """How far the runs are where they are not finished; else empty."""
        first = self.records[0]
        return "" if first.finished else f"round {first.last_round} of {first.settings['rounds']}"

    @property
    def flower(self) -> bool:
        return self.records[0].flower

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
    implied: frozenset[str] = frozenset()  # settings that the data set decides, among the runs of the report
    counted: frozenset[str] = frozenset()  # lists whose length tells them apart, among the runs of the report

    @property
    def title(self) -> str:
        return self.title_without()

    def title_without(self, left_out: str = "") -> str:
        """The settings that tell this table from others; what follows from the data set is not said again."""
        told = [(key, value) for key, value in self.setting if key not in self.implied and key != left_out]
        return ", ".join(self._in_words(key, value) for key, value in told)

    def _in_words(self, key: str, value: Any) -> str:
        if (key, value) == ("clients", 0):  # what the setting says is no number of clients
            return "clients = one a domain"
        if key in self.counted and isinstance(value, list | tuple) and len(value) > MANY:
            return f"{len(value)} {LISTS[key]}"
        return in_words(key, value, " = ")

    @property
    def unfinished(self) -> dict[str, str]:
        """How far the groups are that are not finished."""
        return {group.label: group.unfinished for group in self.groups if group.unfinished}

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


def find_runs(places: Iterable[Path], tell: Callable[[str], None] = lambda text: None) -> list[Path]:
    """Run folders themselves, and those below folders that are none; `tell` hears which places hold no run."""
    found: dict[Path, None] = {}
    empty = []
    for place in places:
        if not place.exists():
            raise InputError(f"{place} is not a run folder: it does not exist")
        if not place.is_dir():
            empty.append(f"{place} is not a run folder: it is a file")
            continue
        inside = [place] if (place / CONFIG).is_file() else sorted(_with_config(place))
        inside = [path for path in inside if not path.resolve().name.startswith(".")]
        found.update(dict.fromkeys(inside))
        if not inside:
            empty.append(f"{place} holds no run: there is no {CONFIG} in it or below it")
    if empty and not found:
        raise InputError(empty[0])
    for sentence in empty:
        tell(f"{sentence}.")
    return list(found)


def _with_config(place: Path) -> Iterator[Path]:
    """Folders below with a configuration, linked ones too; each once, and no circle of links is followed."""
    seen = set()
    for folder, below, files in os.walk(place, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        below.sort()  # of two links to one run, the same one on every machine
        if CONFIG in files:
            yield Path(folder)


def read_record(folder: Path) -> Record:
    """What a run folder holds; the code of methods and data that it names is not needed."""
    settings = read_run_settings(folder / CONFIG)
    rows = read_rows(folder)
    last = max((row.round for row in rows), default=0)
    # A run's name changes where the package gets a new setting; its folder stays.
    kept = tuple(
        replace(row, run=str(folder))
        for row in rows
        if row.scope == "weighted"
        or (row.round == last and (row.scope == "pooled" or (row.scope == "client" and row.detector is None)))
    )
    environment = read_json(folder / ENVIRONMENT) if (folder / ENVIRONMENT).is_file() else {}
    partition = read_json(folder / PARTITION) if (folder / PARTITION).is_file() else {}
    for key in ("indices", "calibration_indices"):  # who holds which image; long, and nothing that a report shows
        partition.pop(key, None)
    rounds = read_rounds(folder)
    _check(folder / ENVIRONMENT, environment, {"versions": dict})
    kinds = {
        "data": str, HASH: str, "classes": list, "counts": list, "client_names": list, "skipped": dict, _LEAKS: dict,
    }  # fmt: skip
    _check(folder / PARTITION, partition, kinds)
    for line in rounds:
        _check(folder / ROUNDS, line, _ROUND)
    if not _is_table(partition.get("counts", [])):
        raise InputError(f"{folder / PARTITION} is damaged: its counts are not one whole number a client and class")
    if len(partition.get("client_names", [])) not in (0, len(partition.get("counts", []))):
        raise InputError(f"{folder / PARTITION} is damaged: its client_names are not one a client")
    for key in (_LEAKS, "skipped"):
        if not all(isinstance(count, int) for count in partition.get(key, {}).values()):
            raise InputError(f"{folder / PARTITION} is damaged: its {key} are not whole numbers")
    flower = (folder / FLOWER).is_file()
    return Record(folder, settings, environment, rounds, kept, partition, flower=flower)


def _check(path: Path, content: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    for key, kind in kinds.items():
        if key in content and not isinstance(content[key], kind):
            raise InputError(f"{path} is damaged: {key} is of the type {type(content[key]).__name__}")


def _is_table(counts: Sequence[Any]) -> bool:
    """Whether it is a list of lists of the same length, of whole numbers."""
    if not all(isinstance(line, list) for line in counts):
        return False
    widths = {len(line) for line in counts}
    return len(widths) < 2 and 0 not in widths and all(type(n) is int for line in counts for n in line)


def in_words(key: str, value: Any, sign: str = "=") -> str:
    """A setting with its value, where a run was made, and on which images."""
    if key == ON_FLOWER:
        return "on Flower" if value else "simulated"
    if key == HASH:
        return f"training images with hash {value[:_SHOWN]}"
    return f"{key}{sign}{shown(value)}"


def shown(value: Any) -> str:
    """A setting's value in words."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(shown(item) for item in value) or "none"
    return str(value) if value not in (None, "") else "none"
