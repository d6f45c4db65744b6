"""What travels: states, updates and answers as Flower records, all arrays in one record under prefixed keys.

The values of a net are one vector (`shared.backbone`, `shared.head`, `shared.score`), so that a group can be joined
by itself and a message has few parts: Flower sends every array on its own. Names and shapes within a vector stand in
the checkpoint of the run folder.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from ..core.flat import FROZEN, SHARED, Layout
from ..core.types import ServerState, Survey, Update
from ..data.federation import TestSet
from ..data.store import ImageStore
from ..evaluation.rows import Answers, Asked
from .names import NAME

ARRAYS, ABOUT, METRICS = "arrays", "about", "metrics"
OF_UPDATES = ("shared", "extra", "integers")
OF_ANSWERS = ("test", "calibration", "generic_calibration", "generic_clean")
MOST_PASSES = 64  # of a detector that is fitted
MOST_IMAGES = 10**8  # of one node: the server holds a label for each


class BadMessage(Exception):
    """What is wrong with a message, in words that fit after "client 3:"."""


def pack(arrays: ArrayRecord, about: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> RecordDict:
    """The content of a message."""
    records = RecordDict({ARRAYS: arrays, ABOUT: ConfigRecord({"json": json.dumps(about)})})
    if metrics is not None:
        records[METRICS] = MetricRecord(dict(metrics))
    return records


def unpack(content: RecordDict) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The arrays and the description in a message."""
    found, text = content.get(ARRAYS), content.get(ABOUT)
    if not isinstance(found, ArrayRecord) or not isinstance(text, ConfigRecord):
        raise BadMessage(f"its message has the records {', '.join(sorted(content)) or 'none'}")
    try:
        about = json.loads(str(text["json"]))
    except (KeyError, ValueError, RecursionError):
        raise BadMessage("the description in its message cannot be read") from None
    if not isinstance(about, dict):
        raise BadMessage("the description in its message is no object")
    try:
        arrays = {name: torch.from_numpy(array.numpy()) for name, array in found.items()}
    except (TypeError, ValueError, OSError, EOFError, MemoryError, RecursionError, zipfile.BadZipFile) as error:
        raise BadMessage(f"an array in its message cannot be read: {error}") from None
    return arrays, about


def to_record(arrays: Mapping[str, Tensor]) -> ArrayRecord:
    """Tensors as one record."""
    return ArrayRecord({name: Array(value.detach().cpu().contiguous().numpy()) for name, value in arrays.items()})


def below(arrays: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The arrays whose names start with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def server_arrays(server: ServerState, layout: Layout, *, frozen: bool) -> dict[str, Tensor]:
    """What a node is sent of the server's state; nets that only the server changes are sent where they are new."""
    arrays = _by_net(server.shared, layout, SHARED)
    if frozen:
        arrays |= _by_net(server.frozen, layout, FROZEN)
    arrays |= {f"extra.{name}": value for name, value in server.extra.items()}
    return arrays | {f"integers.{name}": value for name, value in server.integers.items()}


def read_server(arrays: Mapping[str, Tensor], about: Mapping[str, Any], layout: Layout, frozen: Tensor) -> ServerState:
    """The state that a node was sent; `frozen` are the values that it holds already."""
    return ServerState(
        shared=_joined(arrays, layout, SHARED),
        extra=below(arrays, "extra."),
        integers=below(arrays, "integers."),
        round=int(about["server_round"]),
        frozen=frozen,
        frozen_round=int(about["frozen_round"]),
        clients=int(about["clients"]),
    )


def has_frozen(arrays: Mapping[str, Tensor]) -> bool:
    """Whether a message brings the nets that only the server changes."""
    return any(name.startswith(f"{FROZEN}.") for name in arrays)


def read_frozen(arrays: Mapping[str, Tensor], layout: Layout) -> Tensor:
    """The row of the nets that only the server changes."""
    return _joined(arrays, layout, FROZEN)


def update_arrays(update: Update, layout: Layout) -> dict[str, Tensor]:
    """What a node sends after local training."""
    arrays = _by_net(update.shared, layout, SHARED)
    arrays |= {f"extra.{name}": value for name, value in update.extra.items()}
    return arrays | {f"integers.{name}": value for name, value in update.integers.items()}


def read_update(
    arrays: Mapping[str, Tensor], about: Mapping[str, Any], client: int, layout: Layout, server: ServerState
) -> Update:
    """The update in a node's answer; whatever does not fit the model is bad, whatever its values are."""
    _refuse_unknown(arrays, (*OF_UPDATES, *OF_ANSWERS))
    integers = below(arrays, "integers.")
    for name, wanted in server.integers.items():
        found = integers.get(name)
        if found is None or found.shape != wanted.shape or found.dtype != wanted.dtype:
            what = "missing" if found is None else f"{tuple(found.shape)} of {found.dtype}"
            raise BadMessage(f"integers.{name} is {what}, {tuple(wanted.shape)} of {wanted.dtype} is needed")
    more = set(integers) - set(server.integers)
    if more:
        raise BadMessage(f"its message has an array integers.{min(more)}, which the model does not have")
    losses = about.get("losses", {})
    if not isinstance(losses, dict):
        raise BadMessage("the losses in its message are not numbers")
    return Update(
        client=client,
        weight=_number(about.get("weight"), "its message has no weight"),
        shared=_joined(arrays, layout, SHARED).to(server.shared.device),
        extra={name: value.to(server.shared.device) for name, value in below(arrays, "extra.").items()},
        integers={name: value.to(server.shared.device) for name, value in integers.items()},
        losses={
            str(name): _number(value, "the losses in its message are not numbers") for name, value in losses.items()
        },
    )


def read_survey(arrays: Mapping[str, Tensor], about: Mapping[str, Any], client: int) -> Survey:
    """A node's answer before training."""
    _refuse_unknown(arrays, ("sums",))
    return Survey(client, _number(about.get("weight"), "its message has no weight"), below(arrays, "sums."))


def _refuse_unknown(arrays: Mapping[str, Tensor], prefixes: Sequence[str]) -> None:
    for name in arrays:
        if not name.startswith(tuple(f"{prefix}." for prefix in prefixes)):
            raise BadMessage(f"its message has an array {name[:60]!r}, which nobody asked for")


def _number(value: Any, complaint: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadMessage(complaint)
    try:
        return float(value)
    except OverflowError:
        raise BadMessage(complaint) from None


def sums_arrays(sums: Mapping[str, Sequence[Mapping[str, Tensor]]], detectors: Sequence[str]) -> dict[str, Tensor]:
    """The sums that detectors are fitted on; a detector is its place in the run's list, for names may hold dots."""
    return {
        f"fit.{detectors.index(name)}.{number}.{key}": value
        for name, passes in sums.items()
        for number, total in enumerate(passes)
        for key, value in total.items()
    }


def read_sums(arrays: Mapping[str, Tensor], detectors: Sequence[str]) -> dict[str, list[dict[str, Tensor]]]:
    """What `sums_arrays` wrote."""
    found: dict[str, list[dict[str, Tensor]]] = {}
    for name, value in sorted(below(arrays, "fit.").items(), key=_place):
        place, number, key = name.split(".", 2)
        passes = found.setdefault(_detector(place, detectors), [])
        if int(number) >= MOST_PASSES:
            raise BadMessage(f"its message has sums of a pass {number[:20]}; no detector has so many")
        while len(passes) <= int(number):
            passes.append({})
        passes[int(number)][key] = value
    return found


def _place(entry: tuple[str, Tensor]) -> tuple[int, int]:
    place, number, _ = entry[0].split(".", 2)
    return int(place), int(number)


def asked_arrays(asked: Asked, client: int, detectors: Sequence[str]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """One client's answers about its test sets: arrays, and which set each is. Only flags and scores are among them."""
    arrays: dict[str, Tensor] = {}
    sets: list[dict[str, Any]] = []
    for answer in asked.answers:
        prefix = f"test.{len(sets)}"
        test = answer.test
        sets.append(
            {
                "name": test.name,
                "split": test.split,
                "corruption": test.corruption,
                "severity": test.severity,
                "unseen": test.unseen,
            }
        )
        for kind, flags in (("correct", answer.correct), ("generic", answer.generic)):
            if client in flags:
                arrays[f"{prefix}.{kind}"] = flags[client]
        arrays |= _scores_arrays(f"{prefix}.score", answer.scores, client, detectors)
    for kind, scores in (
        ("calibration", asked.calibration),
        ("generic_calibration", asked.generic_calibration),
        ("generic_clean", asked.generic_clean or {}),
    ):
        arrays |= _scores_arrays(kind, scores, client, detectors)
    return arrays, sets


def read_asked(
    replies: Mapping[int, tuple[Mapping[str, Tensor], Sequence[Mapping[str, Any]]]], detectors: Sequence[str]
) -> Asked:
    """The answers of several clients as one, in the order of their ids."""
    tests: dict[str, TestSet] = {}
    flags: dict[str, dict[str, dict[int, Tensor]]] = {}
    scores: dict[str, dict[str, dict[int, Tensor]]] = {}
    nothing = ImageStore(torch.zeros(1, 1, 1, 1, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    for client in sorted(replies):
        arrays, sets = replies[client]
        for place, about in enumerate(sets):
            test = TestSet(store=nothing, indices=(), **about)
            tests.setdefault(test.key, test)
            for kind in ("correct", "generic"):
                if (found := arrays.get(f"test.{place}.{kind}")) is not None:
                    flags.setdefault(test.key, {}).setdefault(kind, {})[client] = found.bool()
            _add_scores(scores.setdefault(test.key, {}), arrays, f"test.{place}.score", client, detectors)
        for kind in ("calibration", "generic_calibration", "generic_clean"):
            _add_scores(scores.setdefault(kind, {}), arrays, kind, client, detectors)
    # Every set names every detector that someone has scores of.
    used = [name for name in detectors if any(name in of_set for of_set in scores.values())]
    answers = [
        Answers(
            test,
            flags.get(key, {}).get("correct", {}),
            flags.get(key, {}).get("generic", {}),
            {name: scores.get(key, {}).get(name, {}) for name in used},
        )
        for key, test in tests.items()
    ]
    order = {"in": 0, "in-c": 1, "out": 2}
    answers.sort(key=lambda answer: order[answer.test.split])
    aside = scores.get("calibration", {})
    return Asked(
        answers,
        aside,
        scores.get("generic_calibration", {}) or aside,
        scores.get("generic_clean") or None,
    )


def _scores_arrays(
    prefix: str, scores: Mapping[str, Mapping[int, Tensor]], client: int, detectors: Sequence[str]
) -> dict[str, Tensor]:
    return {
        f"{prefix}.{detectors.index(name)}": of_client[client]
        for name, of_client in scores.items()
        if client in of_client
    }


def _add_scores(
    scores: dict[str, dict[int, Tensor]],
    arrays: Mapping[str, Tensor],
    prefix: str,
    client: int,
    detectors: Sequence[str],
) -> None:
    for place, values in below(arrays, f"{prefix}.").items():
        scores.setdefault(_detector(place, detectors), {})[client] = values


def _detector(place: str, detectors: Sequence[str]) -> str:
    if not place.isdecimal() or int(place) >= len(detectors):
        raise BadMessage(f"its message has scores or sums of a detector {place[:20]!r}; there are {len(detectors)}")
    return detectors[int(place)]


def _by_net(row: Tensor, layout: Layout, kind: str) -> dict[str, Tensor]:
    return {f"{kind}.{net}": row[start:stop] for net, (start, stop) in layout.net_ranges(kind).items()}


def _joined(arrays: Mapping[str, Tensor], layout: Layout, kind: str) -> Tensor:
    """The row that `_by_net` cut into nets."""
    ranges = layout.net_ranges(kind)
    found = below(arrays, f"{kind}.")
    wrong = sorted(found.keys() ^ ranges.keys())
    if wrong:
        state = "is missing" if wrong[0] in ranges else "is of no net of the model"
        raise BadMessage(f"the array {kind}.{wrong[0]} {state}")
    for net, (start, stop) in ranges.items():
        if found[net].shape != (stop - start,) or found[net].dtype != torch.float32:
            raise BadMessage(
                f"{kind}.{net} has shape {tuple(found[net].shape)} and type {found[net].dtype}, "
                f"({stop - start},) and torch.float32 are needed"
            )
    return torch.cat([found[net] for net in ranges]) if ranges else torch.empty(0)


@final
@dataclass(frozen=True)
class Facts:
    """What a node says about itself when it is asked who it is."""

    name: str
    home: str  # names its state folder: two processes on one folder are one client
    samples: int
    classes: tuple[str, ...]
    class_counts: tuple[int, ...]
    shape: tuple[int, int, int]
    first: tuple[int, ...]  # sums of its pixels, from which all nodes' mean and deviation are made
    second: tuple[int, ...]
    count: int

    @staticmethod
    def read(about: Mapping[str, Any]) -> Facts:
        """The facts in a node's answer; whatever they could not be is bad."""
        for key in ("name", "home"):
            value = about.get(key)
            if not isinstance(value, str) or not NAME.fullmatch(value):
                raise _unfit(key)
        for key in ("samples", "count"):
            if not _is_count(about.get(key)):
                raise _unfit(key)
        for key in ("class_counts", "shape", "first", "second"):
            values = about.get(key)
            if not isinstance(values, list) or not all(_is_count(value) for value in values):
                raise _unfit(key)
        classes = about.get("classes")
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes) or not classes:
            raise _unfit("classes")
        facts = Facts(
            name=about["name"],
            home=about["home"],
            samples=about["samples"],
            classes=tuple(classes),
            class_counts=tuple(about["class_counts"]),
            shape=tuple(about["shape"]),
            first=tuple(about["first"]),
            second=tuple(about["second"]),
            count=about["count"],
        )
        facts._check()
        return facts

    def _check(self) -> None:
        brightest = 255 * self.count
        channels = self.shape[0] if len(self.shape) == 3 else 0
        together = (
            channels > 0
            and min(self.shape) > 0
            and len(set(self.classes)) == len(self.classes) == len(self.class_counts)
            and sum(self.class_counts) == self.samples <= MOST_IMAGES
            and self.count == self.samples * self.shape[1] * self.shape[2]
            and len(self.first) == len(self.second) == channels
            and max(self.first) <= brightest
            and max(self.second) <= 255 * brightest
        )
        if not together:
            raise BadMessage("its answer to who it is does not fit together")


def _unfit(key: str) -> BadMessage:
    return BadMessage(f"its answer to who it is has no fitting {key}")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
