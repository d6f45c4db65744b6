"""The engine whose clients are Flower's nodes: what a client does in a round is a message and its answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, final

import httpx
import torch
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import UnexpectedObjectContentError
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError, ObjectUnavailableError
from torch import Tensor

from ..config import Config
from ..core.errors import InputError
from ..core.flat import Layout, ServerNets
from ..core.types import ClientState, Missing, Nets, ServerState, Survey, Update
from ..data.federation import Federation, TestSet
from ..engine.eager import EagerEngine
from ..evaluation.rows import Asked
from ..methods.base import Method
from ..runs.run import Run
from .membership import Roster
from .messages import BadMessage, pack, read_asked, read_survey, read_update, server_arrays, to_record, unpack
from .options import Options
from .schemas import check_form, extra_form, survey_form

GRACE = 10.0  # seconds
PATIENCE = 300.0  # seconds without any answer of the SuperLink after which a run ends
TROUBLE = (
    httpx.HTTPError, ConnectionError, ObjectPullError, ObjectPushError, ObjectUnavailableError,
    UnexpectedObjectContentError, ValueError,  # an answer that Flower cannot put together
)  # fmt: skip
HELLO, SURVEY, TRAIN, SUMS, EVALUATE = "query", "query.survey", "train", "evaluate.sums", "evaluate"
LOG = logging.getLogger("flwr")

Reply = tuple[dict[str, Tensor], dict[str, Any]]
Letter = tuple[str, ArrayRecord, Mapping[str, Any]]
"""The kind of a message, its arrays and its description."""
Answer = TypeVar("Answer")


@final
class Post:
    """Sends one message to each of some nodes and waits for the answers, not longer than a deadline."""

    def __init__(self, grid: Grid, poll: float, patience: float = PATIENCE) -> None:
        self._grid, self._poll, self._patience = grid, poll, patience

    def online(self) -> list[int]:
        """The nodes that are connected, as far as Flower knows."""
        found = self._insist(lambda: list(self._grid.get_node_ids()), time.monotonic() + self._patience)
        if isinstance(found, str):
            raise InputError(f"the SuperLink has not answered for {self._patience:g} s ({found}): look at its log")
        return found

    def ask(self, letters: Mapping[int, Letter], seconds: float, group: str) -> dict[int, Reply | str]:
        """Node → its answer, or why there is none."""
        end = time.monotonic() + seconds

        def push() -> list[str]:
            # Made again for each try: Flower takes no message twice. It forgets a message after its time, and must
            # not do so before this server has given up.
            life = max(0.0, end - time.monotonic()) + GRACE
            messages = [
                Message(pack(arrays, about), node, kind, ttl=life, group_id=group)
                for node, (kind, arrays, about) in letters.items()
            ]
            return list(self._grid.push_messages(messages))

        sent = self._insist(push, end) if letters else []
        if isinstance(sent, str):
            return dict.fromkeys(letters, f"its message could not be sent: {sent}")
        found: dict[int, Reply | str] = {}
        waiting: dict[str, int] = {}
        # Flower sends nothing at all, and names nothing, where the messages are too large together.
        for node, name in zip(letters, (*sent, *[""] * len(letters)), strict=False):
            if name:
                waiting[name] = node
            else:
                found[node] = "its message could not be sent"
        while waiting and time.monotonic() < end:
            pulled = self._insist(lambda: list(self._grid.pull_messages(list(waiting))), end)
            for message in () if isinstance(pulled, str) else pulled:
                name = message.metadata.reply_to_message_id
                if name in waiting:
                    found[waiting.pop(name)] = _read(message)
            if waiting:
                time.sleep(min(self._poll, max(0.0, end - time.monotonic())))
        late = f"it did not answer within {seconds:g} s"
        return {node: found.get(node, late) for node in letters}

    def _insist(self, call: Callable[[], Answer], end: float) -> Answer | str:
        """What the SuperLink answers; a failure is tried again until the end, and is then told in words."""
        while True:
            try:
                return call()
            except TROUBLE as error:
                words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                LOG.warning("foogd: the SuperLink did not do what it was asked: %s", words)
            if time.monotonic() + self._poll > end:
                return words
            time.sleep(self._poll)


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
        self.unusable: set[int] = set()  # whose answers about test images could not be read when last joined
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

    def survey(self, server: ServerState, clients: Sequence[ClientState], round: int) -> list[Survey | Missing]:
        """What the nodes answer before training; [] where the method asks nothing."""
        if not self.method.surveys:
            return []
        replies = self.ask(SURVEY, server, clients, round)
        wanted = survey_form(self._inner, server, round)

        def read(arrays: Mapping[str, Tensor], about: Mapping[str, Any], client: int) -> Survey:
            survey = read_survey(arrays, about, client)
            check_form(survey.sums, wanted, "its answer before training")
            self._check_weight(survey.weight, client)
            return survey

        return [self._use(client, replies[client.id], read) for client in clients]

    def train(self, server: ServerState, clients: Sequence[ClientState], round: int) -> Iterator[Update | Missing]:
        """The updates of the nodes in the order of client ids."""
        training = {client.id for client in clients}
        others = [client for client in self.everyone if self.evaluate and client.id not in training]
        replies = self.ask(TRAIN, server, clients, round, also=others)
        if self.evaluate:
            self._asked |= {c: (_about_tests(r[0]), r[1]) for c, r in replies.items() if not isinstance(r, str)}

        def read(arrays: Mapping[str, Tensor], about: Mapping[str, Any], client: int) -> Update:
            if isinstance(about.get("refused"), str):
                raise BadMessage(about["refused"])
            update = read_update(arrays, about, client, self.layout, server)
            check_form(update.extra, wanted, "what it sends beside the model")
            self._check_weight(update.weight, client)
            strange = sorted(update.losses.keys() - self.method.groups.keys())
            if strange:
                raise BadMessage(f"it has a loss of {strange[0][:60]!r}, which the method does not have")
            return update

        wanted = extra_form(self._inner, server, round)
        for client in clients:
            yield self._use(client, replies.pop(client.id), read)

    def _check_weight(self, weight: float, client: int) -> None:
        """A node may not count for more than the images that it told of."""
        samples = self.roster.by_id[client].samples
        most = self._inner.weight(ClientState(client, torch.empty(0), torch.zeros(1).expand(samples), torch.empty(0)))
        if not weight <= most:
            known = f"the {samples} images that it told of give at most {most:g}"
            raise BadMessage(f"its weight is {weight:g}, {known}; a node with new images must be started again")

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
            # No more than it told of when it came: its weight is bound by them.
            allowed = sum(counts) + about["aside"] <= member.samples + member.aside
            if allowed:
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
        kinds: dict[str, tuple[str, bool]] = {}
        self.unusable = set()
        for client, (arrays, about) in sorted(replies.items()):
            try:
                sets = list(about["sets"])
                _check_answers(read_asked({client: (arrays, sets)}, self.config.detectors), client, kinds)
            except (KeyError, TypeError, ValueError, IndexError, BadMessage) as error:
                name = self.roster.by_id[client].name
                self.unusable.add(client)
                LOG.warning("foogd: answers of %s about test images cannot be used: %s", name, error)
            else:
                if sets:
                    usable[client] = arrays, sets
        return read_asked(usable, self.config.detectors) if usable else None


def _about_tests(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in arrays.items() if not name.startswith(("shared.", "extra.", "integers."))}


def _are_counts(values: Sequence[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _check_answers(asked: Asked, client: int, kinds: dict[str, tuple[str, bool]]) -> None:
    """Whether one client's answers are whole: rows of all clients are made from them without looking again.

    `kinds` tells what the sets are to those who came before, and afterwards to this client too.
    """
    mine = {}
    used = [{name for name, scores in answer.scores.items() if client in scores} for answer in asked.answers]
    for answer, scored in zip(asked.answers, used, strict=True):
        test = answer.test
        _check_test(test)
        mine[test.key] = test.split, test.unseen
        if kinds.get(test.key, mine[test.key]) != mine[test.key]:
            raise BadMessage(f"{test.key} is another kind of test set than others say")
        if test.split != "out" and client not in answer.correct:
            raise BadMessage(f"{test.key} does not say what is right")
        if scored != used[0]:
            raise BadMessage(f"{test.key} has scores of other detectors than {asked.answers[0].test.key}")
        parts = [answer.correct, answer.generic, *answer.scores.values()]
        lengths = {part[client].shape for part in parts if client in part}
        if len(lengths) > 1 or any(len(shape) != 1 or not shape[0] for shape in lengths):
            raise BadMessage(f"{test.key} has answers of different lengths")
    aside = (asked.calibration, asked.generic_calibration, asked.generic_clean or {})
    for kind in aside:
        if used and kind and kind.keys() != used[0]:
            raise BadMessage("its training images have scores of other detectors than its test images")
    for kind in (*aside, *(answer.scores for answer in asked.answers)):
        for name, scores in kind.items():
            if client in scores and not (scores[client].is_floating_point() and scores[client].ndim == 1):
                raise BadMessage(f"the scores of {name} are no row of numbers")
    kinds |= mine


def _check_test(test: TestSet) -> None:
    words = (test.name, test.split, test.corruption or "")
    if not all(isinstance(word, str) for word in words) or type(test.unseen) is not bool:
        raise BadMessage("a test set has no fitting description")
    if test.severity is not None and type(test.severity) is not int:
        raise BadMessage(f"{test.name} has no fitting severity")
