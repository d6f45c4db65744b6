"""Run folders: configuration, rounds, rows, summary and checkpoints, safe against a kill at any moment.

Every file is replaced as a whole. The order within a round is: the line of `rounds.jsonl`, the checkpoint, the rows of
an evaluation. A run that is continued drops what is later than its checkpoint and makes what is missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import IO, Any, final, get_type_hints

import torch
from torch import Tensor

from .config import Config
from .data.corrupt import CORRUPTIONS
from .data.federation import Federation, client_labels
from .data.leaks import count_leaks
from .data.partition import AUTHORS
from .data.readers import Progress
from .data.sources import load_source
from .data.store import ImageStore
from .detect import Detector, resolve_detector
from .engine.aggregate import make_fold
from .engine.arena import Layout
from .engine.eager import EagerEngine, Engine, resolve_device, usable_device
from .engine.graph import GraphEngine, make_engine
from .errors import InputError
from .evaluate import Evaluation, Evaluator, Row, no_numbers
from .fields import Role
from .methods import method_settings, shown_name, split_name, written_settings
from .methods.base import Method
from .model import ABOUT, MODEL, detector_tensors, is_of, model_tensors, read_about, settings_digest
from .nets.precision import resolve_precision
from .plugins import blamed, is_plugin, plugin_file
from .report import Report, Table
from .samples import SAMPLES, pack_samples, read_samples
from .simulate import (
    RoundResult,
    RunState,
    initial_state,
    need_updates,
    restore_state,
    simulate,
    state_tensors,
    surveyed,
)
from .types import Readout

CONFIG, ENVIRONMENT = "config.toml", "environment.json"
ROUNDS, ROWS, SUMMARY = "rounds.jsonl", "rows.jsonl", "summary.md"
PARTITION, PICTURE, PROPORTIONS = "partition.json", "partition.png", "proportions.json"
FLOWER = "flower.json"  # of a run on Flower: its nodes, and what they have in common
CHECKPOINT, STATE = "checkpoint", "state.json"
DRAFT = ".draft"
TRAINING = "training images"
WAIT = 120.0  # seconds in which another evaluation has surely written what it found
LOST_ROUNDS = 3  # in a row, in which no update could be used: then a run stops
# Settings that may be paths, or name files of plug-ins.
PATHS = {item.name for item in fields(Config) if item.metadata["path"] or item.metadata["plugin"]}
# Settings that decide which images each client has.
SPLIT = sorted(Config.of_role(Role.SPLIT) | {"data_root", "seed"})
# Files of a user on which the weights of a run depend.
CODE = [item.name for item in fields(Config) if item.metadata["plugin"] and item.metadata["role"] != Role.TEST]
Load = Callable[[str, str], ImageStore]


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
            if key not in place and not _same_setting(key, mine.get(key), other.get(key)):
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
        self.write_summary(read_rows(self.folder), lines)

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
        lines.append(_round_line(result))
        write_atomic(self.folder / ROUNDS, _jsonl(lines))
        save_checkpoint(self.folder, result.state, self.engine.layout)

    def keep_rows(self, found: Sequence[Row]) -> None:
        """Write down new rows, which replace older ones of the same round and detector; all others stay."""
        fresh = {(row.round, row.detector) for row in found}
        rows = [row for row in read_rows(self.folder) if (row.round, row.detector) not in fresh] + list(found)
        write_atomic(self.folder / ROWS, _jsonl([row.as_dict() for row in rows]))

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

    def _evaluate(
        self, state: RunState, detectors: Mapping[str, Detector], progress: Progress | None
    ) -> list[Row]:
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
            self.write_summary(read_rows(self.folder), lines)
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

    def write_summary(
        self, rows: Sequence[Row], lines: Sequence[Mapping[str, Any]], notes: Sequence[str] = ()
    ) -> None:
        """`summary.md`: results, communication and what the run was; `notes` are further sentences about it."""
        report = self.report(rows)
        refused = sum(len(line["refused"]) for line in lines)
        seconds = sum(line["seconds"] for line in lines)
        up, down = (sum(line[key] for line in lines) / max(1, len(lines)) / 2**20 for key in ("bytes_up", "bytes_down"))
        aside = sum(len(indices) for indices in self.federation.calibration_indices)
        text = [
            f"# {self.shown_name}, seed {self.config.seed}",
            "",
            f"Run {self.name}: {len(lines)} rounds, {self.federation.clients} clients, {seconds:.1f} s of training, "
            f"{down:.2f} MiB down and {up:.2f} MiB up a round, {refused} updates refused.",
            "",
            *([leaks_sentence(leaks), ""] if (leaks := read_leaks(self.folder)) else ()),
            *([skipped_sentence(self.federation.skipped), ""] if self.federation.skipped else ()),
            *([note, ""] if (note := self.federation.train.note) else ()),
            *(line for sentence in notes for line in (sentence, "")),
            *([f"{aside} training images were set aside to find thresholds.", ""] if aside else ()),
            *(line for sentence in (*self.left_out(), *self.unranked(report.rows)) for line in (sentence, "")),
            *_section("Results", report.headline()),
            *_section("Joint view", report.joint()),
            *(_section("Thresholds", thresholds) if (thresholds := report.thresholds()).rows else ()),
            *_section("Communication", communication_table(lines)),
            *_section("Partition", partition_table(self.federation)),
        ]
        write_atomic(self.folder / SUMMARY, ("\n".join(text) + "\n").encode())


def _same_setting(key: str, mine: Any, other: Any) -> bool:
    """Whether two values of a setting mean the same; a path may be written in several ways."""
    if mine == other or key not in PATHS:
        return bool(mine == other)
    if isinstance(mine, str) and isinstance(other, str):
        return bool(mine and other) and Path(mine).resolve() == Path(other).resolve()
    pairs = (mine, other)
    if not all(isinstance(values, list | tuple) for values in pairs) or len(mine) != len(other):
        return False
    return all(_same_setting(key, *values) for values in zip(mine, other, strict=True))


def need_run(folder: Path) -> None:
    """Complain about what is not a run folder."""
    if not folder.is_dir():
        found = "it is a file" if folder.exists() else "it does not exist"
        raise InputError(f"{folder} is not a run folder: {found}")
    if not (folder / CONFIG).is_file():
        raise InputError(f"{folder} is not a run folder: it has no {CONFIG}")


def resume_command(folder: Path) -> str:
    """What goes on with a run by its own settings, whatever it was started with."""
    return shlex.join(["foogd", "run", str(folder / CONFIG), "--out", str(folder), "--resume"])


def need_folder(place: Path, option: str = "--out") -> None:
    """Complain where a folder is to be made and a file is in the way."""
    for part in (place, *place.parents):
        if part.exists() and not part.is_dir():
            raise InputError(f"{place} cannot be a folder: {part} is a file; choose another {option}")


def need_file(place: Path) -> None:
    """Complain where a file is to be written and a folder is in the way, or a file in the place of its folder."""
    if place.is_dir():
        raise InputError(f"{place} cannot be written: it is a folder; give --out the name of a file")
    need_folder(place.parent)


def check_together(runs: Sequence[Run]) -> None:
    """What `Run.check` finds, for many runs: each data set is read once, and what runs have in common is tried once.

    It is about settings: an error in a user's own code, or too little memory, is left to the run itself.
    """
    stores: dict[Any, ImageStore] = {}
    tried: set[Any] = set()
    alike: dict[Any, list[Run]] = {}  # by the images of the clients, of which only one split is in memory at a time
    for run in runs:
        alike.setdefault(tuple(getattr(run.config, name) for name in SPLIT), []).append(run)
    for group in alike.values():
        federation = None
        for run in group:
            config = replace(run.config, corruptions=(), resident="host")
            outs = (config.data, config.data_root, config.sites, config.on_bad, config.out)
            # Start weights depend on the seed; whether nets can be made does not, nor on alpha.
            nets = (replace(config, seed=0, alpha=1.0), repr(run.method))
            try:
                if federation is None or outs not in tried:
                    # OUT sets are brought to the shape of IN, which takes long and is the same for all clients.
                    seen = replace(config, out=()) if outs in tried else config
                    federation = make_federation(seen, partial(_load_once, stores, config))
                    tried.add(outs)
                if nets not in tried:
                    tried.add(nets)
                    Run(run.folder, config, run.method).check_nets(federation)
            except InputError as error:
                raise InputError(f"run {run.folder.name}: {error}") from None
            except Exception:
                continue


def _load_once(stores: dict[Any, ImageStore], config: Config, spec: str, sites: str) -> ImageStore:
    key = (spec, config.data_root, sites, config.on_bad)
    if key not in stores:
        stores[key] = load_source(spec, Path(config.data_root), sites=sites, on_bad=config.on_bad)  # type: ignore[arg-type]
    return stores[key]


def _load(config: Config, spec: str, sites: str) -> ImageStore:
    with blamed(spec):
        return _load_once({}, config, spec, sites)


def make_federation(config: Config, load: Load | None = None) -> Federation:
    """The data of a run, split over its clients; `load` gives the images of a source and says where sites stand."""
    load = load or partial(_load, config)
    return Federation.build(
        load(config.data, config.sites),
        outs=[load(spec, "") for spec in config.out],
        corruptions=config.corruptions,
        severities=config.severities,
        clients=config.clients,
        partition=config.partition,
        alpha=config.alpha,
        classes_per_client=config.classes_per_client,
        min_size=config.min_size,
        seed=config.seed,
        split_seed=config.images_seed,
        proportions=config.proportions,
        constants=config.constants,
        test_share=config.test_share,
        leave_out=config.leave_out,
        calibration=config.calibration,
    )


def image_hashes(federation: Federation) -> dict[str, str]:
    """What tells the images of a federation from others: a hash of the training images, and one of the test images.

    Of OUT sets it is their number: they may have been resized, which is not the same to the last bit everywhere, and
    nobody trains on them. Corrupted copies follow from the test images, and need none.
    """
    found = {TRAINING: f"sha256 {federation.train.content_hash()}"}
    for test in federation.tests:
        if test.split != "in-c":
            number = f"{len(test.store)} images"
            found[f"test images {test.name}"] = number if test.split == "out" else f"sha256 {test.store.content_hash()}"
    return found


def write_partition(folder: Path, federation: Federation) -> None:
    """Who trains on what, as numbers and as a picture, and which training images are in a test set."""
    from .figures import partition_figure

    counts, hashes = federation.describe().tolist(), image_hashes(federation)
    content = {
        "data": federation.name,
        "content_hash": hashes.pop(TRAINING).removeprefix("sha256 "),
        "test_hashes": hashes,
        "skipped": dict(federation.skipped),
        "classes": list(federation.train.classes),
        "client_names": list(federation.client_names),
        "counts": counts,
        "indices": [indices.tolist() for indices in federation.train_indices],
        "calibration_indices": [indices.tolist() for indices in federation.calibration_indices],
        "training_images_in_tests": count_leaks(federation),
    }
    picture = io.BytesIO()
    partition_figure(federation).savefig(picture, format="png", dpi=150)
    write_atomic(folder / PICTURE, picture.getvalue())
    write_atomic(folder / PARTITION, json.dumps(content).encode())


def read_leaks(folder: Path) -> dict[str, int]:
    """How many training images each test set of a run holds."""
    found = read_json(folder / PARTITION).get("training_images_in_tests")
    if not isinstance(found, dict):
        raise InputError(f"{folder / PARTITION} is damaged: it does not say which training images are in tests")
    return found


def leaks_sentence(leaks: Mapping[str, int]) -> str:
    """What the check by content found."""
    found = {name: count for name, count in leaks.items() if count}
    if not found:
        return f"No training image is in any of the {len(leaks)} test sets (compared by content)."
    return "Training images in test sets, by content: " + ", ".join(f"{n} in {name}" for name, n in found.items()) + "."


def skipped_sentence(skipped: Mapping[str, int]) -> str:
    """How many images were left out because they could not be used."""
    counts = ", ".join(f"{count} of {name}" for name, count in skipped.items())
    return f"Images that could not be used and were left out: {counts}."


def partition_table(federation: Federation) -> Table:
    """Training images of each class on each client."""
    counts = federation.describe()
    names = federation.train.classes or tuple(str(c) for c in range(federation.num_classes))
    clients = client_labels(federation.client_names, len(counts))
    rows = tuple(
        (name, str(int(row.sum())), *(str(int(n)) for n in row)) for name, row in zip(clients, counts, strict=True)
    )
    return Table("training images", ("client", "all", *names), rows)


def communication_table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """What one participant was sent and sent back, in the first round, in the last one and in the mean of all."""
    chosen = [("first", lines[:1]), ("last", lines[-1:]), ("mean", lines)]
    rows = []
    for name, some in chosen:
        participants = sum(len(line["participants"]) for line in some) or 1
        down, up = (sum(line[key] for line in some) / participants for key in ("bytes_down", "bytes_up"))
        rows.append((name, f"{down:,.0f}", f"{up:,.0f}"))
    return Table("bytes of one participant in a round", ("round", "down", "up"), tuple(rows))


def _section(title: str, table: Table) -> list[str]:
    return [f"## {title} ({table.title})", "", table.markdown(), ""]


_ROUND_KEYS = {"round", "seconds", "losses", "participants", "refused", "bytes_up", "bytes_down", "drift"}


def _round_line(result: RoundResult) -> dict[str, Any]:
    return {
        "round": result.round,
        "seconds": round(result.seconds, 4),
        "losses": dict(result.losses),
        "participants": list(result.participants),
        "refused": {str(client): reason for client, reason in result.refused.items()},
        "bytes_up": result.bytes_up,
        "bytes_down": result.bytes_down,
        "drift": dict(result.drift),
    }


# Files


@contextlib.contextmanager
def alone(folder: Path, lock: Path, *, seconds: float = 0.0, pause: float = 1.0) -> Iterator[None]:
    """Hold the lock of a run folder on a file that exists; whoever waits longer than so many seconds is refused.

    The system lets go of it when a process ends in whatever way. Where there are no locks, nobody is refused.
    """
    end = time.monotonic() + seconds
    with lock.open("r+b") as file:
        while not _taken(file):
            if time.monotonic() >= end:
                raise InputError(f"another process works on {folder}: let it end or stop it, or choose another folder")
            time.sleep(pause)
        yield


def _taken(file: IO[bytes]) -> bool:
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems have no locks
        return True
    return True


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file as a whole: readers see the old content or the new, even after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}{DRAFT}")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:  # a full disk does not say which file it was
        raise OSError(error.errno, f"cannot be written: {error.strerror}", str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def remove_drafts(folder: Path) -> None:
    """Sweep up what a killed process left: drafts, and checkpoints that are not among the last two."""
    for place in (folder, folder / CHECKPOINT, folder / MODEL):
        for draft in place.glob(f".*{DRAFT}"):
            draft.unlink(missing_ok=True)
    path = folder / CHECKPOINT / STATE
    _remove_others(folder, read_checkpoint_state(path) if path.is_file() else {})


def _remove_others(folder: Path, about: Mapping[str, Any]) -> None:
    """Remove checkpoints that state.json does not name."""
    named = {one.get("file") for one in (about, about.get("before", {}))}
    for file in (folder / CHECKPOINT).glob("round-*.safetensors"):
        if file.name not in named:
            file.unlink(missing_ok=True)


def _jsonl(items: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(item) + "\n" for item in items).encode()


def write_environment(folder: Path, about: Mapping[str, Any], plugins: Mapping[str, Any]) -> None:
    """`environment.json`: what a run is made with, and which files of a user it calls."""
    content = {**about, "plugins": plugins} if plugins else about
    write_atomic(folder / ENVIRONMENT, f"{json.dumps(content, indent=2)}\n".encode())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file, with one sentence where it cannot be read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} cannot be read: it holds no JSON object")
    return content


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; [] where there is none."""
    if not path.is_file():
        return []
    lines = []
    try:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            lines.append(json.loads(line))
            if not isinstance(lines[-1], dict):
                raise InputError(f"{path} is damaged: line {number} is no JSON object")
    except UnicodeDecodeError:
        raise InputError(f"{path} is damaged: it is not text") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is damaged: line {len(lines) + 1} is no JSON object ({error.msg})") from None
    return lines


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """The lines of rounds.jsonl, one a round from 1; [] where none were written yet."""
    lines = read_lines(folder / ROUNDS)
    for number, line in enumerate(lines, start=1):
        # Runs of before the drift was measured have no such key.
        if line.keys() | {"drift"} != _ROUND_KEYS or line["round"] != number:
            raise InputError(f"{folder / ROUNDS} is damaged: line {number} is not the line of round {number}")
    return lines


def read_rows(folder: Path) -> list[Row]:
    """The rows of a run folder; [] where none were written yet."""
    hints = {key: int | float if hint is float else hint for key, hint in get_type_hints(Row).items()}
    rows = []
    for number, line in enumerate(read_lines(folder / ROWS), start=1):
        if line.keys() != hints.keys() or not all(isinstance(line[key], hint) for key, hint in hints.items()):
            raise InputError(f"{folder / ROWS} is damaged: line {number} is not a row")
        if not -math.inf < line["weight"] < math.inf:  # Python reads NaN and Infinity, which JSON does not have
            about = f"line {number} has the weight {line['weight']}; a finite number is needed"
            raise InputError(f"{folder / ROWS} is damaged: {about}")
        rows.append(Row(**line))
    return rows


def to_toml(settings: Mapping[str, Any]) -> str:
    """Flat settings as TOML, which has no word for None: such a setting is left out and keeps its default."""
    return "".join(f"{key} = {_toml_value(value)}\n" for key, value in settings.items() if value is not None)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    raise InputError(f"{value!r} cannot be written to {CONFIG}: give it as a name or as file.py:fn")


def save_checkpoint(folder: Path, state: RunState, layout: Layout) -> None:
    """The state in one safetensors file; `state.json` names it and the one before, and is written last."""
    from safetensors.torch import save

    data = save(state_tensors(state))
    name = _checkpoint_name(state.server.round)
    checkpoint = folder / CHECKPOINT
    last = read_checkpoint_state(checkpoint / STATE) if (checkpoint / STATE).is_file() else {}
    write_atomic(checkpoint / name, data)
    about = {
        "round": state.server.round,
        "file": name,
        "sha256": hashlib.sha256(data).hexdigest(),
        "layout": _places(layout, layout.shared_names),
        "private_layout": _places(layout, layout.personal_names),
        "frozen_layout": _places(layout, layout.frozen_names),
        **({"before": {key: last[key] for key in ("round", "file", "sha256")}} if last else {}),
    }
    write_atomic(checkpoint / STATE, json.dumps(about).encode())
    _remove_others(folder, about)


def save_model(
    folder: Path,
    found: Evaluation,
    federation: Federation,
    config: Config,
    method: Method,
    detectors: Sequence[str],
    trained: Tensor,
) -> None:
    """The trained model for use with these detectors, in two files; `model.json` names the other and is written last.

    A model of the same weights, which are `trained` before an evaluation touches them, keeps what it has of other
    detectors. One of other weights is replaced as soon as all detectors of the run were fitted.
    """
    from safetensors.torch import load

    names, whole = [name for name in detectors if name in found.fitted.names], {*detectors} == {*config.detectors}
    round, weights = found.state.server.round, {"weights_sha256": _tensor_digest(trained)}
    about: dict[str, Any] = {}
    with contextlib.suppress(InputError):  # none yet, or a damaged one
        about, data = read_about(folder)
    # Models of before they were added to do not say of which weights they are.
    known = about.get("weights_sha256", None if whole else weights["weights_sha256"])
    if about and about["round"] == round and known == weights["weights_sha256"] and is_of(about, config, method):
        every = list(dict.fromkeys([*about["detectors"], *names]))
        before = load(data)
        tensors = dict(before)
        for name in names:  # one that is there is replaced: its code may have changed, and its threshold with it
            place = every.index(name)
            tensors = {key: value for key, value in tensors.items() if not _is_of_detector(key, place)}
            tensors |= detector_tensors(found, [name], first=place)
        if every != about["detectors"] or not _same_tensors(before, tensors):
            _write_model(folder, tensors, {**about, **weights, "detectors": every})
    elif whole:
        tensors = model_tensors(found, names)
        write_model(folder, tensors, round, federation.clients, names, federation, config, method, weights)


def _is_of_detector(key: str, place: int) -> bool:
    """Whether a tensor of a model belongs to the detector at this place."""
    parts = key.split(".")
    own = parts[2:] if parts[0] == "client" else parts
    return own[:1] in (["detector"], ["calibration"], ["generic"]) and own[1:2] == [str(place)]


def _same_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def _tensor_digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def write_model(
    folder: Path,
    tensors: Mapping[str, Tensor],
    round: int,
    clients: int,
    detectors: Sequence[str],
    federation: Federation,
    config: Config,
    method: Method,
    more: Mapping[str, Any] | None = None,
) -> None:
    """A model's tensors and its description; `clients` are those whose private part is among the tensors."""
    classes = federation.train.classes or tuple(str(c) for c in range(federation.num_classes))
    about = {
        "round": round,
        "method": config.method,
        "clients": clients,
        "client_names": list(federation.client_names) if clients else [],
        "shape": list(federation.shape),
        "classes": list(classes),
        "mean": list(federation.mean),
        "std": list(federation.std),
        "detectors": list(detectors),
        **settings_digest(config, method),
        **(more or {}),
    }
    _write_model(folder, tensors, about)


def _write_model(folder: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    from safetensors.torch import save

    data = save(dict(tensors))
    digest = hashlib.sha256(data).hexdigest()
    name = f"model-{digest[:12]}.safetensors"
    write_atomic(folder / MODEL / name, data)
    text = json.dumps({**about, "file": name, "sha256": digest}, indent=2)
    write_atomic(folder / MODEL / ABOUT, f"{text}\n".encode())
    for old in (folder / MODEL).glob("model-*.safetensors"):
        if old.name != name:
            old.unlink(missing_ok=True)


def save_samples(folder: Path, found: Evaluation, config: Config) -> None:
    """What the models said about every test image; scores of detectors that were asked earlier stay."""
    try:
        earlier = read_samples(folder)
    except InputError:
        earlier = None  # damaged, and made again here
    write_atomic(folder / SAMPLES, pack_samples(found, seed=config.seed, method=config.method, earlier=earlier))


def _checkpoint_name(round: int) -> str:
    return f"round-{round:05d}.safetensors"


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], int] | None:
    """The tensors and the round of the last checkpoint; None where there is none yet."""
    saved = _load_checkpoint(folder)
    return None if saved is None else (saved[0], saved[1]["round"])


def _places(layout: Layout, names: Sequence[str]) -> list[list[Any]]:
    return [[name, layout.slices[name].offset, list(layout.slices[name].shape)] for name in names]


def _named(row: Tensor, places: list[list[Any]]) -> dict[str, Tensor]:
    sizes = {name: (offset, torch.Size(shape)) for name, offset, shape in places}
    return {name: row[offset : offset + size.numel()].view(size) for name, (offset, size) in sizes.items()}


def load_private_values(folder: Path) -> list[dict[str, Tensor]]:
    """The private values of each client in a run's last checkpoint by name; [] where there are none."""
    saved = _load_checkpoint(folder)
    if saved is None:
        raise InputError(f"{folder} has no finished round to start from")
    tensors, about = saved
    places = about.get("private_layout", [])
    count = sum(name.startswith("client.") and name.endswith(".personal") for name in tensors)
    rows = [tensors[f"client.{client}.personal"] for client in range(count)]
    # Those of a run on Flower have never left their nodes.
    return [_named(row, places) for row in rows] if places and all(len(row) for row in rows) else []


def load_values(folder: Path) -> dict[str, Tensor]:
    """The travelling values of a run's last checkpoint by name ("backbone.conv.weight")."""
    need_run(folder)
    saved = _load_checkpoint(folder)
    if saved is None:
        raise InputError(f"{folder} has no finished round to start from")
    tensors, about = saved
    values = _named(tensors["server.shared"], about["layout"])
    if about.get("frozen_layout"):
        values |= _named(tensors["server.frozen"], about["frozen_layout"])
    prefix = "server.integers."
    values |= {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    return values


def _load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    path = folder / CHECKPOINT / STATE
    if not path.is_file():
        return None
    about = read_checkpoint_state(path)
    while True:
        try:
            return _load_tensors(path, about), about
        except InputError:
            again = read_checkpoint_state(path)
            if again == about:
                raise
            about = again  # the run trains on and replaced its checkpoint in between


def _load_tensors(path: Path, about: Mapping[str, Any]) -> dict[str, Tensor]:
    from safetensors.torch import load

    file = path.with_name(about["file"])
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InputError(f"the checkpoint {file} cannot be read: {error.strerror}") from None
    if hashlib.sha256(data).hexdigest() != about.get("sha256"):
        raise InputError(f"the checkpoint {file} is damaged: its checksum differs from the one in {path.name}")
    return load(data)


def read_checkpoint_state(path: Path) -> dict[str, Any]:
    """The content of a checkpoint's state.json: round, file, checksum and the place of each value in the row.

    Where there are two checkpoints, `before` has round, file and checksum of the earlier one.
    """
    about = read_json(path)
    for one in (about, about.get("before", about)):
        round = one.get("round") if isinstance(one, dict) else None
        if type(round) is not int or round < 1 or one.get("file") != _checkpoint_name(round):
            raise InputError(f"{path} is damaged: it does not name a round and the file of that round")
    layout = about.get("layout")
    layouts = (layout, about.get("private_layout", []), about.get("frozen_layout", []))
    if not all(isinstance(rows, list) and all(_is_slice(entry) for entry in rows) for rows in layouts):
        raise InputError(f"{path} is damaged: its layout is not a list of name, offset and shape")
    return about


def _is_slice(entry: Any) -> bool:
    if not isinstance(entry, list) or [type(part) for part in entry] != [str, int, list]:
        return False
    return all(type(size) is int for size in entry[2])


def environment(device: torch.device, precision: str = "fp32") -> dict[str, Any]:
    """What a number was measured with: commit, versions, device and processor, precision of local steps."""
    packages = ("foogd", "torch", "numpy", "safetensors")
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "commit": source_commit(),
        "python": platform.python_version(),
        "versions": {**versions, "torch": torch.__version__},
        "platform": platform.platform(),
        "device": str(device),
        "precision": precision,
        "gpu": gpu,
        "processor": processor(),
        "cores": os.cpu_count(),
    }


def processor() -> str:
    """The kind of processor, and the instructions that torch uses of it: with others, bits on a CPU are others."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def source_commit() -> str | None:
    """The commit of the package's own repository, with a plus sign where files differ from it."""
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        command = ["git", "-C", str(here), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) not in here.parents:
            return None
        dirty = git("status", "--porcelain", "--untracked-files=no", "--", str(here))
        return git("rev-parse", "--short=12", "HEAD") + ("+" if dirty else "")
    except (OSError, subprocess.SubprocessError):
        return None
