"""Run folders as a report reads them: what was run, what came out, and which runs belong together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

from .config import Config
from .errors import InputError
from .evaluate import Row
from .fields import Role
from .methods import shown_name
from .report import Report
from .runs import CONFIG, ENVIRONMENT, FLOWER, PARTITION, ROUNDS, read_json, read_rounds, read_rows
from .samples import Samples, read_samples
from .settings import read_run_settings

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
# What shares images out, and says nothing about images that nodes bring.
_SHARING = Config.of_role(Role.SPLIT) - {"data", "on_bad", "clients", "calibration"} | {"out"}
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


def collect(folders: Sequence[Path]) -> Collection:
    """The runs in these folders, grouped by what differs between them.

    Left out, with a note: folders that cannot be read, runs without an evaluated round, runs that stand there twice,
    runs that are not as far as their siblings with other seeds, and OUT sets on which not all runs of a table were
    tested.
    """
    records, notes, unread = _readable(folders)
    if not records:
        if len(unread) == len(folders) > 0:
            raise unread[0]
        raise InputError(f"there is nothing to report: none of {len(folders)} runs has an evaluated round")
    records = _on_shared_outs(_told_by_hash(_without_idle(records), notes), notes)
    in_setting = [key for key in _varying(records) if _is_of_run(key)]
    in_variant = {
        name: [key for key in _varying([r for r in records if r.name == name]) if not _is_of_run(key)]
        for name in dict.fromkeys(record.name for record in records)
    }
    lines: dict[str, list[Record]] = {}
    keys: dict[str, tuple[Settings, Settings]] = {}
    for record in records:
        setting = _told(record, in_setting)
        variant = tuple((key, record.settings.get(key)) for key in in_variant[record.name])
        line = repr((setting, record.name, variant))
        keys[line] = setting, variant
        lines.setdefault(line, []).append(record)
    scenes: dict[str, list[Group]] = {}
    for line, alike in lines.items():
        setting, variant = keys[line]
        # Where a run started makes another line only where nothing else tells the runs apart.
        starts = dict.fromkeys(bool(record.settings["init"]) for record in alike)
        for started in starts:
            members = [record for record in alike if bool(record.settings["init"]) == started]
            own = (*variant, ("init", "given" if started else "")) if len(starts) > 1 else variant
            group = Group(alike[0].method, setting, own, _siblings(members, notes))
            scenes.setdefault(repr(setting), []).append(group)
    settings = [groups[0].setting for groups in scenes.values()]
    implied, counted = _implied(settings), _counted(settings)
    found = [
        Scene(groups[0].setting, tuple(sorted(groups, key=_order)), implied, counted) for groups in scenes.values()
    ]
    found.sort(key=lambda scene: [sortable(value) for _, value in scene.setting])
    return Collection(tuple(found), tuple(notes))


def _counted(settings: Sequence[Settings]) -> frozenset[str]:
    """The lists of which no two different ones are equally long: a title need not name what is in a long one."""
    found = set()
    for key in LISTS:
        values = [value for setting in settings for name, value in setting if name == key]
        lists = {repr(list(value)): len(value) for value in values if isinstance(value, list | tuple)}
        if len(set(lists.values())) == len(lists):
            found.add(key)
    return frozenset(found)


def _implied(settings: Sequence[Settings]) -> frozenset[str]:
    """Settings of which there is one value for each data set, but for those that a reader always wants to know."""
    found = [dict(setting) for setting in settings]
    keys = {key for setting in found for key in setting if "data" in setting} - {"data"} - TOLD
    of_data = {
        key: {(repr(setting["data"]), repr(setting[key])) for setting in found if key in setting} for key in keys
    }
    return frozenset(key for key, pairs in of_data.items() if len(pairs) == len({data for data, _ in pairs}))


def _readable(folders: Sequence[Path]) -> tuple[list[Record], list[str], list[InputError]]:
    """The runs with an evaluated round, notes about the others, and why folders could not be read."""
    records, notes, unread = [], [], []
    for folder in folders:
        try:
            record = read_record(folder)
        except InputError as error:
            notes.append(f"{folder.name} was left out: {error}.")
            unread.append(error)
            continue
        if not record.rows:
            notes.append(f"{folder.name} was left out: it has no evaluated round yet.")
            continue
        try:
            read_samples(folder)
        except InputError as error:
            notes.append(f"The single answers of {folder.name} were left out: {error}.")
            record = replace(record, answers=False)
        records.append(record)
    return records, notes, unread


def _on_shared_outs(records: Sequence[Record], notes: list[str]) -> list[Record]:
    """Runs that differ in OUT sets alone, on those sets that all of them have; where they share none, as they are.

    Every number is of one OUT set, so sets that were added later do not make another experiment.
    """
    found, left_out = list(records), dict[str, tuple[int, int]]()
    for places in _but_for_outs(records):
        tested = [records[place].tested for place in places]
        if None in tested:
            continue
        pairs = [list((one or {}).items()) for one in tested]
        shared = [pair for pair in pairs[0] if all(pair in other for other in pairs)]
        dropped = dict.fromkeys(name for one in pairs for spec, name in one if (spec, name) not in shared)
        if not shared or all(one == pairs[0] for one in pairs):
            continue
        outs = dict(shared)
        for place in places:
            rows = tuple(row for row in records[place].rows if row.split != "out" or row.dataset in outs.values())
            found[place] = replace(records[place], rows=rows, outs=outs)
        for name in dropped:
            have, runs = left_out.get(name, (0, 0))
            left_out[name] = have + sum(name in dict(one).values() for one in pairs), runs + len(places)
    for name, (have, runs) in left_out.items():
        notes.append(f"OUT set {name} was left out: {have} of {runs} runs to compare were tested on it.")
    return found


def _told_by_hash(records: Sequence[Record], notes: list[str]) -> list[Record]:
    """The records, with the hash of their training images where runs of one seed trained on other images.

    Between seeds it may differ: where a data set has no test images of its own, the seed decides which are held out.
    """
    found = list(records)
    for places in _but_for_outs(records):
        hashes: dict[int, set[str]] = {}
        for place in places:
            if HASH in records[place].partition and not records[place].flower:
                hashes.setdefault(records[place].seed, set()).add(records[place].partition[HASH])
        if any(len(several) > 1 for several in hashes.values()):
            for place in places:
                found[place] = replace(records[place], hashed=True)
    if any(record.hashed for record in found):
        notes.append(
            "Runs of one seed and the same settings trained on different images: they stand in tables of their own, "
            f"with the first digits of the images' hash ({HASH} in {PARTITION}) in the title."
        )
    return found


def _but_for_outs(records: Sequence[Record]) -> list[list[int]]:
    """The places of runs whose tables would differ in the OUT sets alone."""
    others = [key for key in _varying(records) if _is_of_run(key) and key != "out"]
    alike: dict[str, list[int]] = {}
    for place, record in enumerate(records):
        alike.setdefault(repr(_told(record, others)), []).append(place)
    return list(alike.values())


def _without_idle(records: Sequence[Record]) -> list[Record]:
    """The records, those on Flower without settings that share images out: their nodes bring them.

    Where such runs have several values of one, whoever gave them meant several experiments, and they stay apart.
    """
    nodes = [record for record in records if record.flower]
    idle = _SHARING - set(_varying(nodes))
    return [replace(record, idle=idle) if record.flower else record for record in records]


def _is_of_run(key: str) -> bool:
    """Whether it makes a table of its own, and is no setting of a method."""
    return key in Config.__dataclass_fields__ or key in (ON_FLOWER, HASH)


def _told(record: Record, keys: Iterable[str]) -> Settings:
    return tuple((key, record.compared[key]) for key in keys if key in record.compared)


def _siblings(members: Sequence[Record], notes: list[str]) -> tuple[Record, ...]:
    """One run a seed, all of them equally far: a mean over several rounds would be of nothing."""
    most = max(record.last_round for record in members)
    kept: dict[int, Record] = {}
    for record in members:
        twin = kept.get(record.seed)
        if record.last_round < most:
            notes.append(
                f"{record.folder.name} was left out: it is at round {record.last_round} of "
                f"{record.settings['rounds']}, and another run of it is at {most}."
            )
        elif twin is not None:
            same = "settings" if twin.settings["init"] == record.settings["init"] else "settings but for init"
            notes.append(f"{record.folder} was left out: {twin.folder} has the same {same} and seed.")
        else:
            kept[record.seed] = record
    return tuple(kept[seed] for seed in sorted(kept))


def _varying(records: Sequence[Record]) -> list[str]:
    """What differs between records that have it."""
    keys = dict.fromkeys(key for record in records for key in record.compared)
    return [key for key in keys if len({repr(r.compared[key]) for r in records if key in r.compared}) > 1]


# The order of the paper's tables: methods without a private part, then those with one; FOOGD last in each.
_TABLE = (
    "fedavg", "fedavg+aug", "fedprox", "scaffold", "fedbn", "fedln", "fedatol", "fedt3a", "fediir", "fedavg+foogd",
    "fedrod", "fedrod+aug", "foster", "fedthe", "fedicon", "fedrod+foogd",
)  # fmt: skip


def _order(group: Group) -> tuple[Any, ...]:
    place = _TABLE.index(group.method) if group.method in _TABLE else len(_TABLE)
    return place, group.name, [sortable(value) for _, value in group.variant]


def sortable(value: Any) -> tuple[int, float, str]:
    """What values of a setting are put in order by: numbers first."""
    number = isinstance(value, int | float)
    return (0, float(value), "") if number else (1, 0.0, str(value))


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
