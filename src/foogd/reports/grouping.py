"""Runs that are one experiment: seeds of one another, sets side by side, and what tells them apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import Config
from ..core.errors import InputError
from ..core.fields import Role
from ..runs.files import PARTITION
from ..runs.predictions import read_samples
from .collection import HASH, LISTS, ON_FLOWER, TOLD, Collection, Group, Record, Scene, Settings, read_record

# What shares images out, and says nothing about images that nodes bring.
_SHARING = Config.of_role(Role.SPLIT) - {"data", "on_bad", "clients", "calibration"} | {"out"}


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
