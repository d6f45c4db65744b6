"""The server's side: the simulator's own rounds over messages, with quorum, deadlines, checkpoints and resume."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid
from torch import Tensor

from ..config import Config
from ..data.federation import Federation
from ..engine.arena import Layout, ServerNets
from ..engine.eager import EagerEngine
from ..errors import InputError
from ..evaluate import Asked, Evaluation, Fitted, blank_row, make_rows, refitted
from ..figures import partition_figure
from ..methods.base import Method
from ..model import model_tensors
from ..runs import (
    FLOWER,
    PARTITION,
    PICTURE,
    SUMMARY,
    Run,
    load_checkpoint,
    read_json,
    read_rows,
    remove_drafts,
    write_atomic,
    write_model,
)
from ..settings import read_run_config
from ..simulate import RoundResult, RunState, initial_state, restore_state, run_round
from ..types import ClientState, Missing, Nets, ServerState, Survey, Update
from .hooks import before_joining
from .messages import (
    BadMessage,
    Facts,
    below,
    pack,
    read_asked,
    read_sums,
    read_survey,
    read_update,
    server_arrays,
    sums_arrays,
    to_record,
    unpack,
)
from .options import Options, read_options
from .roster import Roster

LOCK_SECONDS = 90.0  # to wait for another server on the same run folder
GRACE = 10.0  # seconds
HELLO_SECONDS = 120.0  # that a node has to say who it is
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
            self._asked |= {client: reply for client, reply in replies.items() if not isinstance(reply, str)}

        def read(arrays: Mapping[str, Tensor], about: Mapping[str, Any], client: int) -> Update:
            if isinstance(about.get("refused"), str):
                raise BadMessage(about["refused"])
            return read_update(arrays, about, client, self.layout, server)

        # What a method uploads beside the model has shapes that only the method knows: most clients are right.
        forms = Counter(_form(reply[0]) for reply in replies.values() if not isinstance(reply, str))
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
        counts, aside, leaks = about.get("class_counts"), about.get("aside"), about.get("leaks")
        if isinstance(counts, list) and len(counts) == len(self.roster.classes) and isinstance(aside, int):
            member.class_counts, member.aside = tuple(int(n) for n in counts), aside
        if isinstance(leaks, dict):
            self.leaks[client] = {str(key): int(count) for key, count in leaks.items()}
        for note in about.get("notes", ()):
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


def _check_answers(asked: Asked, client: int) -> None:
    for answer in asked.answers:
        parts = [answer.correct, answer.generic, *answer.scores.values()]
        lengths = {part[client].shape for part in parts if client in part}
        if len(lengths) > 1 or any(len(shape) != 1 for shape in lengths):
            raise BadMessage(f"{answer.test.key} has answers of different lengths")


@final
class Server:
    """One run on Flower, from the first hello to the summary."""

    def __init__(self, grid: Grid, settings: Mapping[str, Any]) -> None:
        self.options, self.config, self.method = read_options(settings)
        self._post = Post(grid, self.options.poll)
        self._folder = Path(self.options.run_dir)
        self._left_out: set[int] = set()  # nodes that were not let in
        self._tries: Counter[int] = Counter()  # of asking a node who it is
        self._continues = self._folder.exists()
        if self._continues:
            if not self.options.resume:
                raise InputError(f"{self._folder} exists already: set resume=true to continue it, or another run_dir")
            if not (self._folder / FLOWER).is_file():
                raise InputError(f"{self._folder} holds no run on Flower: choose another run_dir")
            Run.open(self._folder, read_run_config).same_as(self.config, self.method)

    def run(self) -> Run:
        """Train what is left, evaluate, write the summary; after each round everything is on disk."""
        if self._continues and self._is_finished():
            LOG.info("foogd: the run in %s is finished: nothing is left to do", self._folder)
            return Run(self._folder, self.config, self.method)
        with self._alone():
            return self._serve()

    def _serve(self) -> Run:
        roster, token = self._gather()
        if self._continues:
            run = Run(self._folder, self.config, self.method)
            remove_drafts(self._folder)
        else:
            about = self._about(roster, token)
            run = Run.create(self._folder, self.config, self.method, files={FLOWER: about.encode()})
        self._run, self._token = run, token
        engine = FlowerEngine(run, roster, self._post, self.options, token)
        self._engine = engine
        run.engine, run.federation = engine, engine.federation  # type: ignore[assignment]
        state = self._state()
        lines = run.lines(state.server.round)
        for round in range(state.server.round, self.config.rounds):
            state = self._let_in(state)
            done, engine.everyone = state.server.round, state.clients
            engine.evaluate = self._asks and done > 0 and run.is_due(done) and not self._has_rows(done)
            result = self._round(state, round)
            asked = engine.take_asked()
            if asked is not None:
                self._keep(asked, done)
            state = result.state
            run.keep_round(lines, result)
            self._report(result)
        if self._asks:
            self._evaluate(state)
        self._write_partition()
        run.write_summary(read_rows(self._folder), lines)
        LOG.info("foogd: finished; the run folder is %s", self._folder.resolve())
        return run

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else works on the run folder: a server that lost its SuperLink may live a little longer."""
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        with (self._folder.parent / f".{self._folder.name}.lock").open("w") as lock:
            end = time.monotonic() + LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        raise InputError(f"another run works on {self._folder}: stop it, or choose another") from None
                    time.sleep(self.options.poll)
            self._continues = self._folder.exists()
            yield

    def _is_finished(self) -> bool:
        done = Run(self._folder, self.config, self.method).finished_rounds() == self.config.rounds
        return done and (self._folder / SUMMARY).is_file()

    @property
    def _asks(self) -> bool:
        return self.options.evaluate != "none"

    def _gather(self) -> tuple[Roster, str]:
        """Wait for the nodes of the start, or for those of the run that is continued."""
        roster, token = None, secrets.token_hex(4)
        if self._continues:
            about = read_json(self._folder / FLOWER)
            roster, token = Roster.from_json(about["roster"]), str(about["token"])
        wanted = self.config.clients
        end = time.monotonic() + self.options.wait_for_nodes
        known: dict[int, Facts] = {}
        LOG.info("foogd: waiting for %d nodes", wanted)
        while True:
            online = self._post.online()
            known = {node: facts for node, facts in known.items() if node in online}
            known |= self._hello([node for node in online if node not in known], max(1.0, end - time.monotonic()))
            names = {facts.name for facts in known.values()}
            expected = wanted if roster is None else len(roster.members)
            there = len(names) if roster is None else len(names & roster.members.keys())
            if there >= expected or (len(known) >= expected and roster is None):
                break
            if time.monotonic() > end:
                if roster is not None and there >= self.options.min_updates:
                    LOG.warning("foogd: %d of %d nodes are there; the run goes on without the others", there, expected)
                    break
                seen = ", ".join(sorted(names)) or "none"
                raise InputError(
                    f"{there} of {expected} nodes came within {self.options.wait_for_nodes:g} s ({seen}): "
                    "start the others and submit again"
                )
            time.sleep(self.options.poll)
        if roster is None:
            return Roster.start(known), token
        for node, facts in known.items():
            self._join(roster, node, facts, online)
        return roster, token

    def _hello(self, nodes: Sequence[int], seconds: float = HELLO_SECONDS) -> dict[int, Facts]:
        """Who these nodes are; one that has not said so three times is not asked again."""
        asked = [node for node in nodes if self._tries[node] < 3]
        self._tries.update(asked)
        letters = {node: (HELLO, to_record({}), dict[str, Any]()) for node in asked}
        found: dict[int, Facts] = {}
        for node, reply in self._post.ask(letters, min(seconds, HELLO_SECONDS), "hello").items():
            try:
                if isinstance(reply, str):
                    raise BadMessage(reply)
                found[node] = Facts.read(reply[1])
            except BadMessage as error:
                LOG.warning("foogd: node %d has not said who it is: %s", node, error)
        return found

    def _join(self, roster: Roster, node: int, facts: Facts, online: Sequence[int]) -> None:
        before = len(roster.members)
        reason = roster.join(node, facts, online)
        if reason is not None:
            self._left_out.add(node)
            LOG.warning("foogd: %s", reason)
        elif len(roster.members) > before:
            LOG.info("foogd: %s is new: client %d", facts.name, roster.members[facts.name].client)

    def _let_in(self, state: RunState) -> RunState:
        """The state with newcomers among its clients; nodes that are back speak for their client again."""
        engine, roster = self._engine, self._engine.roster
        online = self._post.online()
        fresh = [node for node in online if node not in roster.nodes() | self._left_out]
        if not fresh:
            return state
        before = len(roster.members)
        for node, facts in self._hello(fresh).items():
            self._join(roster, node, facts, online)
        if len(roster.members) == before:
            return state
        write_atomic(self._folder / FLOWER, self._about(roster, self._token).encode())
        engine.federation = roster.federation(self.config.data)
        self._run.federation = engine.federation
        newcomers = _clients(engine.federation)[before:]
        server = replace(state.server, clients=len(roster.members))
        return RunState(server, (*state.clients, *newcomers))

    def _about(self, roster: Roster, token: str) -> str:
        return json.dumps({"token": token, "roster": json.loads(roster.to_json())}, indent=1)

    def _state(self) -> RunState:
        fresh = initial_state(self._engine)
        fresh = replace(fresh, clients=_clients(self._engine.federation))
        saved = load_checkpoint(self._folder)
        return fresh if saved is None else restore_state(fresh, *_with_newcomers(fresh, *saved))

    def _round(self, state: RunState, round: int) -> RoundResult:
        """One round, repeated as long as too few updates count."""
        engine, wanted = self._engine, self.options.min_updates
        for attempt in range(self.options.retries + 1):
            engine.again, engine.unasked = attempt > 0, set()
            result = run_round(engine, state, round)
            counted = len(result.participants) - len(result.refused)
            for client in result.participants:
                if client not in result.refused:
                    engine.roster.served(client)
                elif client not in engine.unasked:
                    engine.roster.failed(client, round)
            if counted >= wanted:
                return result
            names = {engine.roster.by_id[client].name: reason for client, reason in result.refused.items()}
            LOG.warning("foogd: round %d has %d updates, %d are needed: %s", round + 1, counted, wanted, names)
            if attempt < self.options.retries:
                time.sleep(self.options.poll)
                state = self._let_in(state)
        raise InputError(
            f"round {round + 1} was tried {self.options.retries + 1} times and never had {wanted} updates; the "
            f"finished rounds are in {self._folder}: submit again with resume=true"
        )

    def _report(self, result: RoundResult) -> None:
        losses = ", ".join(f"{group} {value:.3f}" for group, value in result.losses.items())
        text = f"round {result.round}/{self.config.rounds}, {result.seconds:.1f} s, loss {losses}"
        LOG.info("foogd: %s", text)
        for client, reason in result.refused.items():
            LOG.warning("foogd: no update of %s: %s", self._engine.roster.by_id[client].name, reason)

    # Evaluation

    def _has_rows(self, round: int) -> bool:
        return any(row.round == round for row in read_rows(self._folder))

    def _keep(self, asked: Asked, round: int) -> None:
        blank = blank_row(self.config, round, self._run.name, self.config.method)
        self._run.keep_rows(make_rows(blank, asked, private=self._engine.layout.personal_size > 0))

    def _evaluate(self, state: RunState) -> None:
        """The final model: sums for detectors that are fitted, then the answers, then rows and the model for use."""
        self._engine.evaluate = True
        for attempt in range(self.options.retries + 1):
            self._let_in(state)
            sums = self._fit(state)
            arrays = sums_arrays(sums, self.config.detectors)
            replies = self._engine.ask(EVALUATE, state.server, state.clients, state.server.round, sums=arrays)
            good = {client: reply for client, reply in replies.items() if not isinstance(reply, str)}
            for client, reply in replies.items():
                if isinstance(reply, str):
                    LOG.warning("foogd: no answers of %s: %s", self._engine.roster.by_id[client].name, reply)
            asked = self._engine.joined(good)
            if asked is not None:
                self._keep(asked, state.server.round)
                self._save_model(state, asked, sums)
                return
            if good:
                LOG.warning("foogd: no node has test images: there are no results to show")
                return
            if attempt < self.options.retries:
                time.sleep(self.options.poll)
        raise InputError(f"no node evaluated the model; it is in {self._folder}: submit again with resume=true")

    def _fit(self, state: RunState) -> dict[str, list[dict[str, Tensor]]]:
        """The sums of all passes over the training features of the nodes, added up in the order of client ids."""
        names = self.config.detectors
        sums: dict[str, list[dict[str, Tensor]]] = {}
        fitted = [self._run.detectors[name] for name in names if not self._run.detectors[name].local]
        for number in range(max((detector.passes for detector in fitted), default=0)):
            arrays = sums_arrays(sums, names)
            replies = self._engine.ask(SUMS, state.server, state.clients, state.server.round, sums=arrays)
            total: dict[str, dict[str, Tensor]] = {}
            for client in sorted(replies):
                reply = replies[client]
                if isinstance(reply, str):
                    LOG.warning("foogd: no sums of %s: %s", self._engine.roster.by_id[client].name, reply)
                    continue
                try:
                    _add_sums(total, read_sums(reply[0], names))
                except (ValueError, IndexError, BadMessage) as error:
                    LOG.warning("foogd: sums of %s cannot be used: %s", self._engine.roster.by_id[client].name, error)
            for name, values in total.items():
                if len(sums.setdefault(name, [])) == number:
                    sums[name].append(values)
        return sums

    def _save_model(self, state: RunState, asked: Asked, sums: Mapping[str, Sequence[Mapping[str, Tensor]]]) -> None:
        """The model for use; private parts are on the nodes, and where features are private nothing is left to use."""
        layout, federation = self._engine.layout, self._engine.federation
        if any(name.startswith("backbone.") for name in layout.personal_names):
            LOG.info("foogd: this method has private features: the server has no model for use")
            return
        common = {
            name: refitted(detector, sums.get(name, ()))
            for name, detector in self._run.detectors.items()
            if not detector.local and len(sums.get(name, ())) == detector.passes
            and detector.applies(self.method.readout(self._engine.nets()))
        }  # fmt: skip
        _, start, _ = layout.pack(self._engine.nets())
        clients = tuple(
            replace(client, personal=start, class_counts=federation.class_counts(client.id)) for client in state.clients
        )
        found = Evaluation(
            [], RunState(state.server, clients), Fitted(common, {}, sums, {}), asked.calibration,
            asked.generic_calibration,
        )  # fmt: skip
        names = [name for name in self.config.detectors if name in common]
        tensors, count = model_tensors(found, names), len(clients)
        if layout.personal_size:
            count = 0
            tensors = {name: value for name, value in tensors.items() if not name.startswith("client.")}
            tensors["class_counts"] = torch.stack([client.class_counts for client in clients]).sum(0)
        write_model(self._folder, tensors, state.server.round, count, names, federation, self.config)

    def _write_partition(self) -> None:
        """Who trained on how many images of which class, and how many of them are in the same node's tests."""
        roster = self._engine.roster
        federation = self._run.federation = self._engine.federation = roster.federation(self.config.data)
        write_atomic(self._folder / FLOWER, self._about(roster, self._token).encode())
        leaks: dict[str, int] = {}
        for own in self._engine.leaks.values():
            for key, count in own.items():
                leaks[key] = leaks.get(key, 0) + count
        content = {
            "data": federation.name,
            "classes": list(roster.classes),
            "counts": federation.describe().tolist(),
            "nodes": [member.name for member in roster.by_id],
            "training_images_in_tests": leaks,
        }
        picture = io.BytesIO()
        partition_figure(federation).savefig(picture, format="png", dpi=150)
        write_atomic(self._folder / PICTURE, picture.getvalue())
        write_atomic(self._folder / PARTITION, json.dumps(content).encode())


def _add_sums(total: dict[str, dict[str, Tensor]], found: Mapping[str, Sequence[Mapping[str, Tensor]]]) -> None:
    for name, passes in found.items():
        for key, value in passes[-1].items():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise BadMessage(f"{name} {key} is not finite")
            before = total.setdefault(name, {}).get(key)
            if before is not None and before.shape != value.shape:
                raise BadMessage(f"{name} {key} has shape {tuple(value.shape)}, not {tuple(before.shape)}")
            total[name][key] = value if before is None else before + value


def _clients(federation: Federation) -> tuple[ClientState, ...]:
    """The clients as the server knows them: nothing that is private."""
    return tuple(
        ClientState(client, torch.empty(0), indices, federation.class_counts(client))
        for client, indices in enumerate(federation.train_indices)
    )


def _with_newcomers(fresh: RunState, tensors: Mapping[str, Tensor], round: int) -> tuple[dict[str, Tensor], int]:
    """A checkpoint in which those who came after it stand too, as people who have not trained."""
    whole = dict(tensors)
    count = len(fresh.clients)
    for client in fresh.clients:
        whole.setdefault(f"client.{client.id}.personal", torch.empty(0))
    for name, value in (("counted", 0), ("holds", -1)):
        if name in whole:
            more = count - len(whole[name])
            whole[name] = torch.cat([whole[name], torch.full((more,), value)])
    return whole, round


def serve(grid: Grid, settings: Mapping[str, Any]) -> Run:
    """Run what the settings of a Flower app describe."""
    return Server(grid, settings).run()
