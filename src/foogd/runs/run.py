"""Run folders: configuration, rounds, rows, summary and checkpoints, safe against a kill at any moment.

Every file is replaced as a whole. The order within a round is: the line of `rounds.jsonl`, the checkpoint, the rows of
an evaluation. A run that is continued drops what is later than its checkpoint and makes what is missing.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

from ..config import Config
from ..core.errors import InputError
from ..core.fields import Role
from ..core.plugins import blamed, is_plugin, plugin_file
from ..core.types import Readout
from ..data.corrupt import CORRUPTIONS
from ..data.federation import Federation
from ..data.partition import AUTHORS
from ..data.readers import Progress
from ..detectors.base import Detector
from ..detectors.registry import resolve_detector
from ..engine.aggregate import make_fold
from ..engine.eager import EagerEngine, Engine, resolve_device, usable_device
from ..engine.graph import GraphEngine, make_engine
from ..evaluation.evaluator import Evaluator
from ..evaluation.rows import Row, no_numbers
from ..methods import method_settings, shown_name, split_name, written_settings
from ..methods.base import Method
from ..nets.precision import resolve_precision
from ..simulate import RoundResult, RunState, initial_state, need_updates, restore_state, simulate, surveyed
from ..tables.results import Report
from .answers import save_model, save_samples
from .checkpoint import (
    load_checkpoint,
    load_private_values,
    load_values,
    read_checkpoint_state,
    remove_drafts,
    save_checkpoint,
)
from .environment import environment, write_environment
from .federation import (
    TRAINING,
    image_hashes,
    leaks_sentence,
    make_federation,
    read_leaks,
    write_partition,
)
from .files import (
    CHECKPOINT,
    CONFIG,
    ENVIRONMENT,
    FLOWER,
    PARTITION,
    PROPORTIONS,
    ROUNDS,
    ROWS,
    STATE,
    SUMMARY,
    WAIT,
    alone,
    json_lines,
    need_folder,
    need_run,
    read_json,
    read_rounds,
    read_rows,
    resume_command,
    round_line,
    same_setting,
    to_toml,
    write_atomic,
)
from .model_file import read_about
from .summary import write_summary

LOST_ROUNDS = 3  # in a row, in which no update could be used: then a run stops
# Files of a user on which the weights of a run depend.
CODE = [item.name for item in fields(Config) if item.metadata["plugin"] and item.metadata["role"] != Role.TEST]


@final
class Run:
    """One run in its folder."""

    def __init__(self, folder: Path, config: Config, method: Method) -> None:
        self.folder, self.config, self.method = folder, config, method
        self.name = f"{config.method.replace('/', '_')}-s{config.seed}-{config.digest(method_settings(method))}"
        usable_device(config.device)
        for kind in config.corruptions:
            if kind not in CORRUPTIONS:
                raise InputError(f"corruption {kind!r} is not known: use {', '.join(CORRUPTIONS)}")
        self.detectors: dict[str, Detector] = {name: resolve_detector(name) for name in config.detectors}
        self._no_numbers: dict[str, str] = {}  # of the last evaluation here

    @classmethod
    def create(cls, folder: Path, config: Config, method: Method, files: Mapping[str, bytes] | None = None) -> Run:
        """A new run; its folder appears with configuration and environment already in it.

        `files` are more of them, of a run whose data is not here and cannot be checked.
        """
        need_folder(folder)
        if folder.exists():
            further = f", or go on with {resume_command(folder)}" if (folder / CONFIG).is_file() else ""
            raise InputError(f"{folder} exists already: choose another --out{further}")
        run = cls(folder, config, method)
        if files is None:
            run.check()
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            write_atomic(draft / CONFIG, to_toml(run.settings()).encode())
            about = environment(resolve_device(config.device), run.precision)
            write_environment(draft, about, run.plugins())
            if files is None and config.proportions not in ("", AUTHORS):  # the file may change or be lost
                write_atomic(draft / PROPORTIONS, Path(config.proportions).read_bytes())
            for name, content in (files or {}).items():
                write_atomic(draft / name, content)
            draft.chmod(0o755)
            draft.rename(folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return run

    @classmethod
    def open(cls, folder: Path, read: Callable[[Path], tuple[Config, Method]]) -> Run:
        """A run that exists; `read` turns its config.toml into configuration and method."""
        need_run(folder)
        return cls(folder, *read(folder / CONFIG))

    def settings(self) -> dict[str, Any]:
        """All settings of the run, flat."""
        values = {item.name: getattr(self.config, item.name) for item in fields(self.config)}
        return values | written_settings(self.config.method, self.method)

    @property
    def shown_name(self) -> str:
        """The method as people read it; rows have its plain name."""
        return shown_name(self.settings())

    def report(self, rows: Sequence[Row]) -> Report:
        """Rows of the last evaluated round, under the name that people read."""
        return Report.of(rows).last_round().called(self.shown_name)

    def same_as(self, config: Config, method: Method) -> None:
        """Complain where the folder belongs to another configuration; the place of the work may differ."""
        place, mine, other = Config.of_role(Role.PLACE), self.settings(), Run(self.folder, config, method).settings()
        # In the order of the settings: what differs first, the method say, often explains the rest.
        for key in dict.fromkeys([*mine, *other]):
            if key not in place and not same_setting(key, mine.get(key), other.get(key)):
                raise InputError(
                    f"{self.folder} holds a run with another configuration: {key} is {mine.get(key)!r} there and "
                    f"{other.get(key)!r} here; choose another --out, or go on with {resume_command(self.folder)}"
                )

    @cached_property
    def federation(self) -> Federation:
        if (self.folder / FLOWER).is_file():
            raise InputError(f"{self.folder} was trained on Flower: its data is on the nodes, and cannot be read here")
        found = make_federation(self.config)
        if (self.folder / PARTITION).is_file():
            self.check_images(found)
        return found

    def check_images(self, found: Federation) -> None:
        """Complain where images have changed since the run began: test images might be some that it trained on."""
        before, now = read_json(self.folder / PARTITION), image_hashes(found)
        kept = before.get("test_hashes", {})
        trained = before.get("content_hash")
        known = {TRAINING: trained and f"sha256 {trained}", **(kept if isinstance(kept, dict) else {})}
        for name, digest in now.items():
            if (known.get(name) or digest) != digest:
                raise InputError(
                    f"{self.folder}: the {name} are not those that the run began with ({digest[:19]}, {PARTITION} has "
                    f"{str(known[name])[:19]}): put them back, or begin a new run; other versions of the packages, or "
                    f"another kind of processor, may also make other pixels of the same files"
                )
        if before.get("indices", own := [indices.tolist() for indices in found.train_indices]) != own:
            raise InputError(
                f"{self.folder}: clients do not have the images that they began with, by {PARTITION}: put the file of "
                f"the proportions back, or begin a new run; another version of numpy may also split in another way"
            )

    def plugins(self) -> dict[str, dict[str, str]]:
        """The files of a user whose code the run calls, by what they are for, with a hash of each."""
        names: dict[str, Any] = {
            "method": split_name(self.config.method)[0],
            "data": self.config.data,
            "backbone": self.config.backbone,
            **{f"out {number}": name for number, name in enumerate(self.config.out)},
            **{f"detector {number}": name for number, name in enumerate(self.config.detectors)},
        }
        return {use: plugin_file(spec) for use, spec in names.items() if is_plugin(spec)}

    def _check_plugins(self) -> None:
        """Complain where code has changed since the first round; before it, what was written down is made new."""
        path = self.folder / ENVIRONMENT
        about = read_json(path) if path.is_file() else {}
        before, now = about.get("plugins"), self.plugins()
        if not isinstance(before, dict) or before == now:  # older runs have no record
            return
        if not self.finished_rounds():
            write_environment(self.folder, about, now)
            return
        for use in CODE:
            kept = before.get(use)
            digest = kept.get("sha256") if isinstance(kept, dict) else None
            if use in now and digest and digest != now[use]["sha256"]:
                file, found = now[use]["file"], now[use]["sha256"]
                raise InputError(
                    f"{self.folder}: {file}, the file of the {use}, is not the one that the run began with (sha256 "
                    f"{found[:12]}…, {ENVIRONMENT} has {str(digest)[:12]}…): put it back, or begin a new run"
                )

    @cached_property
    def engine(self) -> EagerEngine | GraphEngine:
        return make_engine(self.method, self.federation, self.config)

    @property
    def precision(self) -> str:
        """The precision of local steps here; `auto` depends on device and engine."""
        device = resolve_device(self.config.device)
        graphs = device.type == "cuda" and self.config.engine != "eager"
        return resolve_precision(self.config.precision, device, graphs=graphs)

    @property
    def fallback(self) -> str | None:
        """Why steps are not replayed as graphs although they could be, or None."""
        return self.engine.fallback if isinstance(self.engine, GraphEngine) else None

    def check(self) -> None:
        """Find what is wrong with data, clients, nets or start weights before anything is written."""
        quick = replace(self.config, corruptions=())  # corrupting the test images is the slow part
        federation = make_federation(quick)
        with blamed(*self.specs()):
            self.check_nets(federation)

    def check_nets(self, federation: Federation) -> None:
        """The part of `check` after the data."""
        engine = EagerEngine(self.method, federation, self.config)
        readout = self.method.readout(engine.nets())
        if self.detectors and not any(detector.applies(readout) for detector in self.detectors.values()):
            raise InputError(f"detectors = {list(self.detectors)} are not possible: {self._lacking(readout)}")
        make_fold(self.config, self.method, engine.layout)
        need_updates(self.config, sum(len(indices) > 0 for indices in federation.train_indices))
        state = self._start(engine) if self.config.init else None
        if is_plugin(split_name(self.config.method)[0]):  # a method of yours may break the contract
            state = state or initial_state(engine, pretrain=False)
            client = max(state.clients, key=lambda client: len(client.indices))
            if len(client.indices) > 1 and not self.method.pools_data:
                # What a method needs before its first step: one client's answers are as good as all.
                answers, _, _ = surveyed(engine, state.server, [client], 0)
                server = self.method.begin(state.server, answers)
                if answers and self.method.settles:
                    server = self.method.settle(server, answers, engine.server_nets())
                engine.try_step(server, client)

    def specs(self) -> tuple[str, ...]:
        """Whose code a run calls while it trains and evaluates: of these names, those that are files of a user."""
        backbone = (self.config.backbone,) if isinstance(self.config.backbone, str) else ()
        return (split_name(self.config.method)[0], *backbone, *self.detectors)

    def fresh_state(self) -> RunState:
        """The state before the first round."""
        return self._start(self.engine) if self.config.init else initial_state(self.engine)

    def _start(self, engine: Engine) -> RunState:
        folder = Path(self.config.init)
        return initial_state(engine, load_values(folder), load_private_values(folder))

    def state(self) -> RunState:
        """The state after the last finished round; the start weights are needed only before the first."""
        saved = load_checkpoint(self.folder)
        if saved is None:
            return self.fresh_state()
        return restore_state(initial_state(self.engine, pretrain=False), saved[0], saved[1])

    def finished_rounds(self) -> int:
        """The round of the last checkpoint, 0 where there is none."""
        path = self.folder / CHECKPOINT / STATE
        return int(read_checkpoint_state(path)["round"]) if path.is_file() else 0

    def is_finished(self) -> bool:
        """Whether nothing is left to do: all files are whole, and the summary, which is written last, is there."""
        saved = load_checkpoint(self.folder)
        if saved is None or saved[1] != self.config.rounds or not (self.folder / SUMMARY).is_file():
            return False
        return self._has_model() and len(read_rounds(self.folder)) == saved[1] and bool(read_rows(self.folder))

    def _has_model(self) -> bool:
        try:
            read_about(self.folder)
        except InputError:
            return False
        return True

    def train(self, progress: Progress | None = None) -> Iterator[RoundResult]:
        """Train what is left; after each round everything is on disk. One process at a time may do it.

        `progress` is told how far an evaluation is, in images.
        """
        if self.is_finished():
            return
        with alone(self.folder, self.folder / CONFIG), blamed(*self.specs()):
            if not self.is_finished():  # by a process that has just let go of it
                yield from self._train(progress)

    def _train(self, progress: Progress | None) -> Iterator[RoundResult]:
        remove_drafts(self.folder)
        self._check_plugins()
        if not (self.folder / PARTITION).is_file():
            write_partition(self.folder, self.federation)
        state = self.state()
        done = state.server.round
        lines = self.lines(done)
        nothing = self._nothing_used(lines)
        if nothing is not None:
            raise InputError(nothing)
        found = {(row.round, row.detector) for row in read_rows(self.folder)}
        lost = [round for round in range(1, done) if self.is_due(round) and (round, None) not in found]
        if lost:
            raise InputError(f"{self.folder} is half-written: {ROWS} has no row of round {lost[0]}")
        measured = {(done, name) for name in self._measured()} <= found
        if done and self.is_due(done) and not (measured and (done < self.config.rounds or self._has_model())):
            self._evaluate(state, self.detectors, progress)
        lost_rounds = 0
        for result in simulate(self.method, self.federation, self.config, self.engine, start=state):
            self.keep_round(lines, result)
            nothing = self._nothing_used(lines)
            if self.is_due(result.round) and nothing is None:
                self._evaluate(result.state, self.detectors, progress)
            yield result
            if nothing is not None:
                raise InputError(nothing)
            lost_rounds = lost_rounds + 1 if len(result.refused) == len(result.participants) else 0
            if lost_rounds == LOST_ROUNDS and result.round < self.config.rounds:
                client, reason = next(iter(result.refused.items()))
                raise InputError(
                    f"{self.folder}: no update could be used in rounds {result.round - LOST_ROUNDS + 1} to "
                    f"{result.round} (client {client}: {reason}); {self._advice}"
                )
        write_summary(self, read_rows(self.folder), lines)

    def _nothing_used(self, lines: Sequence[Mapping[str, Any]]) -> str | None:
        """A sentence where all rounds are over and no update was ever used: the model is what it was at the start."""
        used = any(len(line["refused"]) < len(line["participants"]) for line in lines)
        if len(lines) < self.config.rounds or used:
            return None
        client, reason = next(iter(lines[-1]["refused"].items()))
        return (
            f"{self.folder}: no update could be used in any of the {len(lines)} rounds (client {client}: {reason}); "
            f"nothing was learnt: {self._advice}"
        )

    @property
    def _advice(self) -> str:
        """What may help where no update can be used; who did wrong cannot be known."""
        bound = self.config.update_bound
        other = "" if bound == "auto" else f" than {bound:g}: 'auto' refuses what would spoil the model for all"
        return f"use a smaller lr where training diverges, or another update_bound{other}"

    def keep_round(self, lines: list[dict[str, Any]], result: RoundResult) -> None:
        """Write down a finished round: its line after those of the rounds before, then the checkpoint."""
        lines.append(round_line(result))
        write_atomic(self.folder / ROUNDS, json_lines(lines))
        save_checkpoint(self.folder, result.state, self.engine.layout)

    def keep_rows(self, found: Sequence[Row]) -> None:
        """Write down new rows, which replace older ones of the same round and detector; all others stay."""
        fresh = {(row.round, row.detector) for row in found}
        rows = [row for row in read_rows(self.folder) if (row.round, row.detector) not in fresh] + list(found)
        write_atomic(self.folder / ROWS, json_lines([row.as_dict() for row in rows]))

    def lines(self, done: int) -> list[dict[str, Any]]:
        """The lines of the finished rounds; a line of the round in which a run was killed is left out."""
        lines = read_rounds(self.folder)
        if len(lines) < done:
            raise InputError(
                f"{self.folder} is half-written: {ROUNDS} has {len(lines)} lines, the checkpoint is of round {done}"
            )
        return lines[:done]

    def is_due(self, round: int) -> bool:
        """Whether the state after this round is evaluated."""
        every = self.config.eval_every
        return round == self.config.rounds or (every > 0 and round % every == 0)

    def _measured(self) -> list[str | None]:
        """What rows of an evaluation are about: the classification, and each detector that the method can serve."""
        readout = self.method.readout(self.engine.nets())
        return [None, *(name for name, detector in self.detectors.items() if detector.applies(readout))]

    def _evaluate(self, state: RunState, detectors: Mapping[str, Detector], progress: Progress | None) -> list[Row]:
        older = read_rows(self.folder)  # a damaged file is found before anything is written
        # A run keeps its name: one that a later version of the package evaluates has more settings, so another digest.
        name = older[0].run if older else self.name
        evaluator = Evaluator(self.engine, detectors, progress=progress)
        done = evaluator.evaluation(state, run=name, method=self.config.method)
        self._no_numbers = no_numbers(done)
        with self._writing():
            if state.server.round == self.config.rounds:
                trained = state.server.shared
                save_model(self.folder, done, self.federation, self.config, self.method, list(detectors), trained)
            if state.server.round == self.config.rounds and done.answers:
                save_samples(self.folder, done, self.config)
            self.keep_rows(done.rows)
        return done.rows

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Two evaluations at once write one after the other; what trains holds another lock, all the while."""
        lock = self.folder / ENVIRONMENT
        with alone(self.folder, lock, seconds=WAIT, pause=0.1) if lock.is_file() else contextlib.nullcontext():
            yield

    def evaluate(self, detectors: Sequence[str] = (), progress: Progress | None = None) -> list[Row]:
        """Evaluate the last checkpoint with these detectors, or with those of the run that the method can serve."""
        chosen = {name: resolve_detector(name) for name in detectors} or self.detectors
        if not self.finished_rounds():
            raise InputError(f"{self.folder} has no finished round yet: train it with {resume_command(self.folder)}")
        with blamed(*self.specs(), *detectors):
            state = self.state()
            lines = self.lines(state.server.round)
            readout = self.method.readout(self.engine.nets())
            for name in detectors:
                if not chosen[name].applies(readout):
                    lacks = "part that the detector asks for"
                    if chosen[name].needs_score:
                        lacks = "score network" if readout.score is None else "score network that knows classes"
                    raise InputError(f"detector {name} is not possible: method {self.config.method} has no {lacks}")
            found = self._evaluate(state, chosen, progress)
        if (self.folder / SUMMARY).is_file():  # else training is not over, and the summary will be its last step
            write_summary(self, read_rows(self.folder), lines)
        return found

    def _lacking(self, readout: Readout) -> str:
        """What a method does not have that some of the run's detectors ask for."""
        scores = any(d.needs_score for d in self.detectors.values() if not d.applies(readout))
        part = "score network" if scores and readout.score is None else "part that they ask for"
        return f"method {self.config.method} has no {part}"

    def left_out(self) -> list[str]:
        """A sentence where the method cannot serve some of the run's detectors."""
        readout = self.method.readout(self.engine.nets())
        names = [name for name, detector in self.detectors.items() if not detector.applies(readout)]
        return [f"Detectors left out: {', '.join(names)} ({self._lacking(readout)})."] if names else []

    def leaked(self) -> list[str]:
        """A sentence where training images are in a test set."""
        leaks = read_leaks(self.folder)
        return [leaks_sentence(leaks)] if any(leaks.values()) else []

    def unranked(self, rows: Sequence[Row], names: Sequence[str] = ()) -> list[str]:
        """A sentence for each of these detectors, or of the run's, that can be served but gave NaN somewhere."""
        if not rows:  # nothing was evaluated
            return []
        readout, ranked = self.method.readout(self.engine.nets()), {row.detector for row in rows}
        sentences = []
        for name in dict.fromkeys(names or self.detectors):
            detector = self.detectors.get(name) or resolve_detector(name)
            if name in self._no_numbers:
                sentences.append(self._no_numbers[name])
            elif detector.applies(readout) and name not in ranked:  # it was evaluated by another process
                sentences.append(f"Detector {name} has no rows: some of its scores are NaN.")
        return sentences
