"""Who takes part: names of nodes, the client ids that belong to them for good, and who has failed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, final

import torch

from ..core.errors import InputError
from ..data.federation import Federation, usable_deviation
from ..data.store import ImageStore, moments
from .messages import Facts

LONGEST_REST = 16  # rounds


@dataclass
class Member:
    """One client: a name, the node that speaks for it now, and how it has behaved."""

    client: int
    name: str
    home: str
    class_counts: tuple[int, ...]
    aside: int = 0
    node: int | None = None
    failures: int = 0  # in a row
    rests_until: int = 0  # the first round in which it is asked again

    @property
    def samples(self) -> int:
        return sum(self.class_counts)


@final
@dataclass
class Roster:
    """The members of a run. Ids are the places among the sorted names at the start; newcomers get the next ones."""

    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    members: dict[str, Member] = field(default_factory=dict)

    @staticmethod
    def start(found: Mapping[int, Facts]) -> Roster:
        """The roster of the nodes that are there at the start: node id → facts."""
        everyone = sorted(found.values(), key=lambda facts: facts.name)
        for one, other in pairwise(everyone):
            if one.name == other.name:
                raise InputError(f"two nodes are called {one.name!r}: each needs a name of its own")
        first = everyone[0]
        for facts in everyone:
            if facts.shape != first.shape:
                raise InputError(
                    f"the images of {facts.name} are {facts.shape} and those of {first.name} are {first.shape} "
                    "(channels, height, width): all must be alike"
                )
        same = all(facts.classes == first.classes for facts in everyone)
        classes = first.classes if same else tuple(sorted({name for facts in everyone for name in facts.classes}))
        sums = [[sum(column) for column in zip(*rows, strict=True)] for rows in (
            [facts.first for facts in everyone], [facts.second for facts in everyone]
        )]  # fmt: skip
        mean, std = moments(sums[0], sums[1], sum(facts.count for facts in everyone))
        roster = Roster(classes, first.shape, mean, usable_deviation(std))
        for facts in everyone:
            roster._add(facts)
        for node, facts in found.items():
            roster.members[facts.name].node = node
        return roster

    def _add(self, facts: Facts) -> Member:
        member = Member(len(self.members), facts.name, facts.home, self._counts(facts))
        self.members[facts.name] = member
        return member

    def _counts(self, facts: Facts) -> tuple[int, ...]:
        counts = [0] * len(self.classes)
        for name, count in zip(facts.classes, facts.class_counts, strict=True):
            counts[self.classes.index(name)] = count
        return tuple(counts)

    def join(self, node: int, facts: Facts, online: Sequence[int]) -> str | None:
        """A node that was not known: a member that is back, or a new one; why it is not let in, or None."""
        strange = [name for name in facts.classes if name not in self.classes]
        if strange or facts.shape != self.shape:
            what = f"a class {strange[0]!r}" if strange else f"images of {facts.shape}"
            return f"{facts.name} has {what}, which does not fit this run"
        member = self.members.get(facts.name)
        if member is not None and member.node in online and member.node != node and member.home != facts.home:
            return f"two nodes are called {facts.name!r}: the second one is left out"
        if member is None:
            member = self._add(facts)
        if facts.samples != member.samples + member.aside:  # its images are others now
            member.class_counts, member.aside = self._counts(facts), 0
        member.node, member.home, member.rests_until = node, facts.home, 0
        return None

    @property
    def by_id(self) -> list[Member]:
        """The members in the order of their ids."""
        return sorted(self.members.values(), key=lambda member: member.client)

    def nodes(self) -> set[int]:
        """The nodes that speak for someone."""
        return {member.node for member in self.members.values() if member.node is not None}

    def nodes_of(self, clients: Iterable[int]) -> set[int]:
        """The nodes that speak for these clients."""
        everyone = self.by_id
        return {node for client in clients if (node := everyone[client].node) is not None}

    def absence(self, client: int, round: int, online: Sequence[int], *, again: bool) -> str | None:
        """Why a client is not asked in this round, or None; who failed is asked `again` where a round is repeated."""
        member = self.by_id[client]
        if member.node not in online:
            return "it is not connected"
        if not again and round < member.rests_until:
            return f"it failed {member.failures} times in a row and is asked again in round {member.rests_until + 1}"
        return None

    def failed(self, client: int, round: int) -> None:
        """The client sent nothing that counts: it is left out for 1, 2, 4, … rounds."""
        member = self.by_id[client]
        member.failures += 1
        member.rests_until = round + 1 + min(2 ** (member.failures - 1), LONGEST_REST)

    def served(self, client: int) -> None:
        """The client's update counted."""
        member = self.by_id[client]
        member.failures, member.rests_until = 0, 0

    def federation(self, name: str) -> Federation:
        """The federation as the server knows it: how many images of which class, and not one pixel."""
        height, width, channels = self.shape[1], self.shape[2], self.shape[0]
        counts = [torch.tensor(member.class_counts) for member in self.by_id]
        labels = [torch.repeat_interleave(torch.arange(len(own)), own) for own in counts]
        every = torch.cat(labels)
        # One black image, seen as many times: memory does not grow.
        images = torch.zeros(1, height, width, channels, dtype=torch.uint8).expand(max(1, len(every)), -1, -1, -1)
        store = ImageStore(images, every if len(every) else torch.zeros(1, dtype=torch.int64), self.classes, name)
        ends = torch.tensor([len(own) for own in labels]).cumsum(0).tolist()
        ranges = tuple(torch.arange(end - len(own), end) for own, end in zip(labels, ends, strict=True))
        aside = tuple(torch.zeros(member.aside, dtype=torch.int64) for member in self.by_id)
        names = tuple(member.name for member in self.by_id)
        return Federation(name, store, ranges, (), self.mean, self.std, aside if any(map(len, aside)) else (), names)

    def to_json(self) -> str:
        """The roster as text; which node speaks for whom is not part of it."""
        about = {
            "classes": self.classes,
            "shape": self.shape,
            "mean": self.mean,
            "std": self.std,
            "clients": [
                {"name": m.name, "home": m.home, "class_counts": m.class_counts, "aside": m.aside} for m in self.by_id
            ],
        }
        return json.dumps(about, indent=1)

    @staticmethod
    def from_json(about: Mapping[str, Any]) -> Roster:
        """What `to_json` wrote."""
        try:
            roster = Roster(tuple(about["classes"]), tuple(about["shape"]), tuple(about["mean"]), tuple(about["std"]))
            for client, one in enumerate(about["clients"]):
                member = Member(client, one["name"], one["home"], tuple(one["class_counts"]), one["aside"])
                roster.members[member.name] = member
        except (KeyError, TypeError) as error:
            raise InputError(f"the list of nodes is damaged: {error}") from None
        return roster
