"""The engine whose clients are Flower's nodes: what a client does in a round is a message and its answer."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid
from torch import Tensor

from ..config import Config
from ..data.federation import Federation
from ..engine.arena import Layout, ServerNets
from ..engine.eager import EagerEngine
from ..evaluate import Asked
from ..methods.base import Method
from ..runs import Run
from ..types import ClientState, Missing, Nets, ServerState, Survey, Update
from .hooks import before_joining
from .messages import BadMessage, below, pack, read_asked, read_survey, read_update, server_arrays, to_record, unpack
from .options import Options
from .roster import Roster

GRACE = 10.0  # seconds
HELLO, SURVEY, TRAIN, SUMS, EVALUATE = "query", "query.survey", "train", "evaluate.sums", "evaluate"
LOG = logging.getLogger("flwr")

Reply = tuple[dict[str, Tensor], dict[str, Any]]
Letter = tuple[str, ArrayRecord, Mapping[str, Any]]
"""The kind of a message, its arrays and its description."""


@final
class Post:
    """Sends one message to each of some nodes and waits for the answers, not longer than a deadline."""

    def __init__(self, grid: Grid, poll: float) -> None:
        self._grid, self._poll = grid, poll

    def online(self) -> list[int]:
        """The nodes that are connected, as far as Flower knows."""
        return list(self._grid.get_node_ids())

    def ask(self, letters: Mapping[int, Letter], seconds: float, group: str) -> dict[int, Reply | str]:
        """Node → its answer, or why there is none."""
        messages = [
            # Flower forgets a message after its time; it must not do so before this server has given up.
            Message(pack(arrays, about), node, kind, ttl=seconds + GRACE, group_id=group)
            for node, (kind, arrays, about) in letters.items()
        ]
        sent = list(self._grid.push_messages(messages)) if messages else []
        found: dict[int, Reply | str] = {}
        waiting: dict[str, int] = {}
        for node, name in zip(letters, sent, strict=False):
            if name:
                waiting[name] = node
            else:
                found[node] = "its message could not be sent"
        end = time.monotonic() + seconds
        while waiting and time.monotonic() < end:
            for message in self._grid.pull_messages(list(waiting)):
                name = message.metadata.reply_to_message_id
                if name in waiting:
                    found[waiting.pop(name)] = _read(message)
            if waiting:
                time.sleep(min(self._poll, max(0.0, end - time.monotonic())))
        late = f"it did not answer within {seconds:g} s"
        return {node: found.get(node, late) for node in letters}


def _read(message: Message) -> Reply | str:
    if message.has_error():
        words = " ".join(str(message.error.reason or f"error {message.error.code}").split())
        return f"it failed: {words[:300]}"
    try:
        return unpack(message.content)
    except BadMessage as error:
        return str(error)


@final
class FlowerEngine:
    """The engine whose clients are nodes: what a client does in a round is a message and its answer."""

    def __init__(self, run: Run, roster: Roster, post: Post, options: Options, token: str) -> None:
        self.method: Method = run.method
        self.config: Config = run.config
        self.roster, self._post, self._options = roster, post, options
        self._token = f"{run.name}-{token}"
        here = ("device", "resident")  # a node knows better where it computes
        self._settings = {k: v for k, v in run.settings().items() if v is not None and k not in here}
        self.federation: Federation = roster.federation(run.config.data)
        self._inner = EagerEngine(run.method, self.federation, run.config)
        self.layout: Layout = self._inner.layout
        self.again = False  # whether the round is repeated: then those who failed are asked too
        self.evaluate = False  # whether the state that is sent has no rows yet
        self.everyone: Sequence[ClientState] = ()
        self.unasked: set[int] = set()
        self.leaks: dict[int, dict[str, int]] = {}
        self._asked: dict[int, Reply] = {}
        self._holds: dict[int, int] = {}

    def nets(self) -> Nets:
        return self._inner.nets()

    def server_nets(self) -> ServerNets:
        return self._inner.server_nets()

    def pretrain(self, nets: Nets) -> None:
        """No server on Flower sees images."""

    def personalise(self, server: ServerState, clients: Sequence[ClientState]) -> list[ClientState]:
        """Nodes do this themselves when they evaluate."""
        return list(clients)

    def survey(
        self, server: ServerState, clients: Sequence[ClientState], round: int
    ) -> list[Survey | Missing]:
        """What the nodes answer before training; [] where the method asks nothing."""
        if not self.method.surveys:
            return []
        replies = self.ask(SURVEY, server, clients, round)
        return [self._use(client, replies[client.id], read_survey) for client in clients]

    def train(
        self, server: ServerState, clients: Sequence[ClientState], round: int
    ) -> Iterator[Update | Missing]:
        """The updates of the nodes in the order of client ids."""
        return before_joining(self._train(server, clients, round), server, self.config)

    def _train(
        self, server: ServerState, clients: Sequence[ClientState], round: int
    ) -> Iterator[Update | Missing]:
        training = {client.id for client in clients}
        others = [client for client in self.everyone if self.evaluate and client.id not in training]
        replies = self.ask(TRAIN, server, clients, round, also=others)
        if self.evaluate:
            self._asked |= {c: (_about_tests(r[0]), r[1]) for c, r in replies.items() if not isinstance(r, str)}

        def read(arrays: Mapping[str, Tensor], about: Mapping[str, Any], client: int) -> Update:
            if isinstance(about.get("refused"), str):
                raise BadMessage(about["refused"])
            return read_update(arrays, about, client, self.layout, server)

        # What a method uploads beside the model has shapes that only the method knows: most clients are right.
        answers = [replies[client.id] for client in clients]
        forms = Counter(_form(reply[0]) for reply in answers if not isinstance(reply, str))
        usual = forms.most_common(1)[0][0] if forms else ()
        for client in clients:
            reply = replies.pop(client.id)
            found = self._use(client, reply, read)
            if isinstance(found, Update) and not isinstance(reply, str) and _form(reply[0]) != usual:
                found = Missing(client.id, "what it sends beside the model is not what the others send")
            yield found

    def _use(self, client: ClientState, reply: Reply | str, read: Callable[[dict[str, Tensor], Any, int], Any]) -> Any:
        if isinstance(reply, str):
            return Missing(client.id, reply)
        try:
            return read(*reply, client.id)
        except BadMessage as error:
            return Missing(client.id, str(error))

    def ask(
        self,
        kind: str,
        server: ServerState,
        clients: Sequence[ClientState],
        round: int,
        sums: Mapping[str, Tensor] | None = None,
        also: Sequence[ClientState] = (),
    ) -> dict[int, Reply | str]:
        """Client → its answer to the server's state, or why there is none; clients that cannot answer are not asked.

        Those in `also` only evaluate.
        """
        online = self._post.online()
        found: dict[int, Reply | str] = {}
        asked: dict[int, ClientState] = {}
        only = {client.id for client in also}
        for client in (*clients, *also):
            reason = self.roster.absence(client.id, round, online, again=self.again or kind in (SUMS, EVALUATE))
            if reason is None:
                node = self.roster.by_id[client.id].node
                assert node is not None
                asked[node] = client
            else:
                found[client.id] = reason
                self.unasked.add(client.id)
        records: dict[bool, ArrayRecord] = {}
        letters = {}
        for node, client in asked.items():
            frozen = self.layout.frozen_size > 0 and self._holds.get(node) != server.frozen_round
            if frozen not in records:  # made once: all nodes are sent the same values
                records[frozen] = to_record(server_arrays(server, self.layout, frozen=frozen) | dict(sums or {}))
            letters[node] = EVALUATE if client.id in only else kind, records[frozen], self._about(server, client, round)
        for node, reply in self._post.ask(letters, self._options.round_timeout, f"{round}").items():
            client = asked[node]
            found[client.id] = reply
            if isinstance(reply, str):
                self._holds.pop(node, None)
            else:
                self._holds[node] = server.frozen_round
                self._learn(client.id, reply[1])
        return found

    def _about(self, server: ServerState, client: ClientState, round: int) -> dict[str, Any]:
        return {
            "settings": self._settings,
            "run": self._token,
            "client": client.id,
            "counted": client.counted,
            "round": round,
            "server_round": server.round,
            "frozen_round": server.frozen_round,
            "clients": server.clients,
            "classes": self.roster.classes,
            "shape": self.roster.shape,
            "mean": self.roster.mean,
            "std": self.roster.std,
            "evaluate": self.evaluate,
        }

    def _learn(self, client: int, about: Mapping[str, Any]) -> None:
        """What an answer says about its node: its images after some were set aside, and what went wrong there."""
        member = self.roster.by_id[client]
        counts, aside, leaks, notes = (about.get(key) for key in ("class_counts", "aside", "leaks", "notes"))
        if isinstance(counts, list) and len(counts) == len(self.roster.classes) and _are_counts([*counts, aside]):
            member.class_counts, member.aside = tuple(counts), about["aside"]
        if isinstance(leaks, dict) and _are_counts(list(leaks.values())):
            self.leaks[client] = leaks
        for note in notes if isinstance(notes, list) else ():
            LOG.warning("foogd: %s: %s", member.name, str(note)[:300])

    def take_asked(self) -> Asked | None:
        """The answers about test images that came with the updates, once; None where there are none."""
        found, self._asked = self._asked, {}
        return self.joined(found)

    def joined(self, replies: Mapping[int, Reply]) -> Asked | None:
        """The answers of those that sent usable ones; None where nobody did."""
        usable = {}
        for client, (arrays, about) in replies.items():
            try:
                sets = list(about["sets"])
                _check_answers(read_asked({client: (arrays, sets)}, self.config.detectors), client)
            except (KeyError, TypeError, ValueError, IndexError, BadMessage) as error:
                name = self.roster.by_id[client].name
                LOG.warning("foogd: answers of %s about test images cannot be used: %s", name, error)
            else:
                if sets:
                    usable[client] = arrays, sets
        return read_asked(usable, self.config.detectors) if usable else None


def _form(arrays: Mapping[str, Tensor]) -> tuple[Any, ...]:
    extra = below(arrays, "extra.")
    return tuple((name, tuple(value.shape), value.dtype) for name, value in sorted(extra.items()))


def _about_tests(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in arrays.items() if not name.startswith(("shared.", "extra.", "integers."))}


def _are_counts(values: Sequence[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _check_answers(asked: Asked, client: int) -> None:
    for answer in asked.answers:
        parts = [answer.correct, answer.generic, *answer.scores.values()]
        lengths = {part[client].shape for part in parts if client in part}
        if len(lengths) > 1 or any(len(shape) != 1 for shape in lengths):
            raise BadMessage(f"{answer.test.key} has answers of different lengths")
