"""The server's side: the simulator's own rounds over messages, with quorum, deadlines, checkpoints and resume."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
from flwr.serverapp import Grid
from torch import Tensor

from ..data.federation import Federation
from ..errors import InputError
from ..evaluate import Asked, Evaluation, Fitted, blank_row, make_rows, refitted
from ..figures import partition_figure
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
from ..types import ClientState
from .engine import EVALUATE, HELLO, LOG, SUMS, FlowerEngine, Post
from .messages import BadMessage, Facts, read_sums, sums_arrays, to_record
from .options import read_options
from .roster import Roster

LOCK_SECONDS = 90.0  # to wait for another server on the same run folder
HELLO_SECONDS = 120.0  # that a node has to say who it is


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
