"""The server's side: the simulator's own rounds over messages, with quorum, deadlines, checkpoints and resume."""

from __future__ import annotations

import contextlib
import io
import json
import secrets
import time
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
from flwr.serverapp import Grid
from torch import Tensor

from ..core.errors import InputError
from ..core.random import generator
from ..core.types import ClientState
from ..data.federation import Federation
from ..evaluation.evaluator import refitted
from ..evaluation.rows import Asked, Evaluation, Fitted, blank_row, make_rows
from ..presets.loader import read_run_config
from ..runs.answers import write_model
from ..runs.checkpoint import load_checkpoint, remove_drafts
from ..runs.files import FLOWER, PARTITION, PICTURE, SUMMARY, alone, read_json, read_rows, write_atomic
from ..runs.model_file import model_tensors
from ..runs.picture import partition_figure
from ..runs.run import Run
from ..runs.summary import write_summary
from ..simulate import RoundResult, RunState, initial_state, restore_state, run_round, sample_clients, settled
from .engine import EVALUATE, HELLO, LOG, SUMS, FlowerEngine, Post, Reply
from .membership import Roster
from .messages import BadMessage, Facts, read_sums, sums_arrays, to_record
from .options import read_options

LOCK_SECONDS = 90.0  # to wait for another server on the same run folder
HELLO_SECONDS = 120.0  # that a node has to say who it is


@final
class Server:
    """One run on Flower, from the first hello to the summary."""

    def __init__(self, grid: Grid, settings: Mapping[str, Any]) -> None:
        self.options, self.config, self.method = read_options(settings)
        self._post = Post(grid, self.options.poll)
        self._folder = Path(self.options.run_dir)
        self._left_out: dict[int, int | None] = {}  # nodes that were not let in → the node because of which, if any
        self._tries: Counter[int] = Counter()  # of asking a node who it is, in vain
        self._continues = False
        self._repeats, self._until = 0, 0.0  # how often, and until when, the final evaluation asks the missing again

    def run(self) -> Run:
        """Train what is left, evaluate, write the summary; after each round everything is on disk."""
        with self._alone():  # what the folder holds is only sure when nobody else works on it
            self._continues = self._folder.exists()
            if self._continues:
                self._check_folder()
                if self._is_finished():
                    LOG.info("foogd: the run in %s is finished: nothing is left to do", self._folder)
                    return Run(self._folder, self.config, self.method)
            return self._serve()

    def _check_folder(self) -> None:
        if not self.options.resume:
            raise InputError(f"{self._folder} exists already: set resume=true to continue it, or another run_dir")
        if not (self._folder / FLOWER).is_file():
            raise InputError(f"{self._folder} holds no run on Flower: choose another run_dir")
        Run.open(self._folder, read_run_config).same_as(self.config, self.method)

    def _serve(self) -> Run:
        roster, token = self._gather()
        if self._continues:
            run = Run(self._folder, self.config, self.method)
            remove_drafts(self._folder)
            write_atomic(self._folder / FLOWER, self._about(roster, token).encode())  # newcomers keep their ids
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
        notes = self._evaluate(state) if self._asks else []
        self._write_partition()
        write_summary(run, read_rows(self._folder), lines, notes)
        LOG.info("foogd: finished; the run folder is %s", self._folder.resolve())
        return run

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else works on the run folder: a server that lost its SuperLink may live a little longer."""
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        lock = self._folder.parent / f".{self._folder.name}.lock"  # beside it: the folder may not exist yet
        lock.touch()
        with alone(self._folder, lock, seconds=LOCK_SECONDS, pause=self.options.poll):
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
            self._forget(online)
            known = {node: facts for node, facts in known.items() if node in online}
            unknown = [node for node in online if node not in known and node not in self._left_out]
            known = self._newest(known | self._hello(unknown, max(1.0, end - time.monotonic())))
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
        members = roster.members

        def stranger(one: tuple[int, Facts]) -> bool:
            return one[1].name in members and members[one[1].name].home != one[1].home

        for node, facts in sorted(known.items(), key=stranger):  # of two with one name the one with the old home
            self._join(roster, node, facts, online)
        return roster, token

    def _newest(self, known: Mapping[int, Facts]) -> dict[int, Facts]:
        """One node for each name and home: a node that was started again is there under two ids for a while."""
        last = {(facts.name, facts.home): node for node, facts in known.items()}
        for node, facts in known.items():
            if node != last[facts.name, facts.home]:
                self._left_out[node] = last[facts.name, facts.home]
        return {node: facts for node, facts in known.items() if node not in self._left_out}

    def _forget(self, online: Sequence[int]) -> None:
        """Nodes that were not let in because of another one may try again when that one is gone."""
        self._left_out = {
            node: rival
            for node, rival in self._left_out.items()
            if node in online and (rival is None or rival in online)
        }

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
                del self._tries[node]
            except BadMessage as error:
                LOG.warning("foogd: node %d has not said who it is: %s", node, error)
        return found

    def _join(self, roster: Roster, node: int, facts: Facts, online: Sequence[int]) -> None:
        before, member = len(roster.members), roster.members.get(facts.name)
        rival = member.node if member is not None and member.node in online and member.node != node else None
        reason = roster.join(node, facts, online)
        if reason is not None:
            self._left_out[node] = rival
            LOG.warning("foogd: %s", reason)
            return
        if rival is not None:  # the same node before it was started again
            self._left_out[rival] = node
        if len(roster.members) > before:
            LOG.info("foogd: %s is new: client %d", facts.name, roster.members[facts.name].client)

    def _let_in(self, state: RunState) -> RunState:
        """The state with newcomers among its clients; nodes that are back speak for their client again."""
        engine, roster = self._engine, self._engine.roster
        online = self._post.online()
        self._forget(online)
        fresh = [node for node in online if node not in roster.nodes() | self._left_out.keys()]
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
        failed: set[int] = set()
        for attempt in range(self.options.retries + 1):
            engine.again, engine.unasked = attempt > 0, set()
            result = self._attempt(state, round, attempt, failed)
            failed |= result.refused.keys() - result.spare
            counted = len(result.participants) - len(result.refused)
            for client in result.participants:
                if client not in result.refused:
                    engine.roster.served(client)
                elif client not in engine.unasked | result.spare:
                    engine.roster.failed(client, round)
            if counted >= wanted:
                return result
            names = {engine.roster.by_id[client].name: reason for client, reason in result.refused.items()}
            LOG.warning("foogd: round %d has %d updates, %d are needed: %s", round + 1, counted, wanted, names)
            if attempt < self.options.retries:
                state = self._wait(state, wanted)
        raise InputError(
            f"round {round + 1} was tried {self.options.retries + 1} times and never had {wanted} updates; the "
            f"finished rounds are in {self._folder}: submit again with resume=true"
        )

    def _attempt(self, state: RunState, round: int, attempt: int, failed: Container[int]) -> RoundResult:
        """The simulator's round; where it is repeated, with a sample of those who are connected.

        The same sample would fail again. Those who failed in this round are in it only where others are too few.
        """
        engine, config = self._engine, self.config
        repeated = attempt > 0 and config.participation < 1
        there = self._connected(state) if repeated else []
        if not there:
            return run_round(engine, state, round)
        count = len(sample_clients(state.clients, config.participation, config.seed, round))
        others = [client for client in there if client.id not in failed]
        able = others if len(others) >= self.options.min_updates else there
        order = torch.randperm(len(able), generator=generator(config.seed, round, "participants", attempt))
        chosen = tuple(able[place] for place in sorted(order[:count].tolist()))
        engine.config = replace(config, participation=1.0)
        try:
            result = run_round(engine, RunState(state.server, chosen), round)
        finally:
            engine.config = config
        after = {client.id: client for client in result.state.clients}
        clients = tuple(after.get(client.id, client) for client in state.clients)
        return replace(result, state=RunState(result.state.server, clients))

    def _connected(self, state: RunState) -> list[ClientState]:
        """The clients that could train now."""
        online, roster = self._post.online(), self._engine.roster
        return [c for c in state.clients if len(c.indices) > 0 and roster.by_id[c.id].node in online]

    def _wait(self, state: RunState, wanted: int) -> RunState:
        """Wait before a repeat until enough clients are connected, not longer than `wait_for_nodes`."""
        end = time.monotonic() + self.options.wait_for_nodes
        while True:
            time.sleep(self.options.poll)
            state = self._let_in(state)
            if len(self._connected(state)) >= wanted or time.monotonic() > end:
                return state

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

    def _evaluate(self, state: RunState) -> list[str]:
        """The final model: sums for detectors that are fitted, then the answers, then rows and the model for use.

        Whoever does not answer is asked again; sentences about those who never did are for the summary.
        """
        engine = self._engine
        engine.evaluate = True
        self._repeats, self._until = self.options.retries, time.monotonic() + self.options.wait_for_nodes
        state = settled(engine, state)
        sums, unfitted = self._fit(state)
        replies = self._ask_all(EVALUATE, state, sums)
        good = {client: reply for client, reply in replies.items() if not isinstance(reply, str)}
        if not good:
            raise InputError(f"no node evaluated the model; it is in {self._folder}: submit again with resume=true")
        asked = engine.joined(good)
        if asked is not None:
            self._keep(asked, state.server.round)
            self._save_model(state, asked, sums)
        elif not engine.unusable:
            LOG.warning("foogd: no node has test images: there are no results to show")
        missing = (replies.keys() - good.keys()) | engine.unusable
        return [
            f"{what}: {', '.join(engine.roster.by_id[client].name for client in sorted(clients))}."
            for what, clients in (
                ("The final model was not evaluated by", missing),
                ("Detectors were fitted without the features of", unfitted),
            )
            if clients
        ]

    def _ask_all(
        self, kind: str, state: RunState, sums: Mapping[str, Sequence[Mapping[str, Tensor]]]
    ) -> dict[int, Reply | str]:
        """The answers of all clients to a question about the final model, or why there are none."""
        engine = self._engine
        arrays = sums_arrays(sums, self.config.detectors)
        found: dict[int, Reply | str] = {}
        missing: Sequence[ClientState] = state.clients
        while True:
            self._let_in(state)
            found |= engine.ask(kind, state.server, missing, state.server.round, sums=arrays)
            missing = [client for client in missing if isinstance(found[client.id], str)]
            for client in missing:
                LOG.warning("foogd: no answer of %s: %s", engine.roster.by_id[client.id].name, found[client.id])
            if not missing or not self._repeats:
                return found
            self._repeats -= 1
            while True:
                time.sleep(self.options.poll)
                self._let_in(state)
                if engine.roster.nodes_of(client.id for client in missing) & set(self._post.online()):
                    break
                if time.monotonic() > self._until:  # they do not come: the next questions do not wait for them
                    self._repeats = 0
                    return found

    def _fit(self, state: RunState) -> tuple[dict[str, list[dict[str, Tensor]]], set[int]]:
        """The sums of all passes over the training features, added up in the order of client ids, and who lacks."""
        names = self.config.detectors
        sums: dict[str, list[dict[str, Tensor]]] = {}
        lacking: set[int] = set()
        fitted = [self._run.detectors[name] for name in names if not self._run.detectors[name].local]
        for number in range(max((detector.passes for detector in fitted), default=0)):
            replies = self._ask_all(SUMS, state, sums)
            total: dict[str, dict[str, Tensor]] = {}
            for client in sorted(replies):
                reply = replies[client]
                if isinstance(reply, str):
                    lacking.add(client)
                    continue
                try:
                    _add_sums(total, read_sums(reply[0], names))
                except (ValueError, IndexError, BadMessage) as error:
                    lacking.add(client)
                    LOG.warning("foogd: sums of %s cannot be used: %s", self._engine.roster.by_id[client].name, error)
            for name, values in total.items():
                if len(sums.setdefault(name, [])) == number:
                    sums[name].append(values)
        return sums, lacking

    def _save_model(self, state: RunState, asked: Asked, sums: Mapping[str, Sequence[Mapping[str, Tensor]]]) -> None:
        """The model for use; private parts are on the nodes, and where features are private nothing is left to use."""
        # Made again: the nodes have said by now how many images they set aside.
        layout, federation = self._engine.layout, self._engine.roster.federation(self.config.data)
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
        write_model(self._folder, tensors, state.server.round, count, names, federation, self.config, self.method)

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
            "client_names": list(federation.client_names),
            "training_images_in_tests": leaks,
        }
        picture = io.BytesIO()
        partition_figure(federation).savefig(picture, format="png", dpi=150)
        write_atomic(self._folder / PICTURE, picture.getvalue())
        write_atomic(self._folder / PARTITION, json.dumps(content).encode())


def _add_sums(total: dict[str, dict[str, Tensor]], found: Mapping[str, Sequence[Mapping[str, Tensor]]]) -> None:
    """Add one client's sums, or none of them where one cannot be used."""
    for name, passes in found.items():
        before = total.get(name)
        if before is not None and before.keys() != passes[-1].keys():
            raise BadMessage(f"{name} has other parts than the sums of the others")
        for key, value in passes[-1].items():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise BadMessage(f"{name} {key} is not finite")
            if before is not None and (before[key].shape, before[key].dtype) != (value.shape, value.dtype):
                raise BadMessage(
                    f"{name} {key} has shape {tuple(value.shape)} and type {value.dtype}, "
                    f"not {tuple(before[key].shape)} and {before[key].dtype}"
                )
    for name, passes in found.items():
        before = total.get(name, {})
        total[name] = {key: before[key] + value if key in before else value for key, value in passes[-1].items()}


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
