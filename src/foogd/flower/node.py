"""The node's side: its images, what it keeps for itself between rounds, and its answers to the server's questions."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from flwr.app import RecordDict
from torch import Tensor

from ..config import Config
from ..core.errors import InputError
from ..core.types import ClientState, ServerState
from ..data.federation import LEFT_OUT, Federation, TestSet, fit_to, in_tests, set_aside
from ..data.overlap import count_leaks
from ..data.sources import load_source
from ..data.store import ImageStore
from ..detectors.base import Detector
from ..detectors.registry import resolve_detector
from ..engine.aggregate import private_refusal
from ..engine.eager import EagerEngine
from ..evaluation.evaluator import Evaluator
from ..presets.loader import resolve
from ..runs.files import write_atomic
from ..simulate import RunState
from .messages import (
    Facts,
    asked_arrays,
    below,
    has_frozen,
    pack,
    read_frozen,
    read_server,
    read_sums,
    sums_arrays,
    to_record,
    unpack,
    update_arrays,
)
from .names import NAME, NAME_RULE, run_folder

KEPT = 4  # states of a run that a node keeps, the newest ones


@final
@dataclass(frozen=True)
class Node:
    """A node as it was started: its name, where its images are, and where it keeps what is its own."""

    name: str
    data: Path
    state: Path
    device: str = "auto"
    pixels: int = 0  # to which pictures in folders are brought; 0: they have one size

    @staticmethod
    def of(settings: Mapping[str, Any]) -> Node:
        """The node that Flower's node configuration describes."""
        name, data = settings.get("name"), settings.get("data")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise InputError(f"the node's name is {name!r}: {NAME_RULE}")
        if not isinstance(data, str) or not Path(data).is_dir():
            raise InputError(f"the data of node {name} is {data!r}: a folder is needed")
        state, pixels = settings.get("state") or str(Path(data) / "state"), settings.get("pixels", 0)
        if type(pixels) is not int or pixels < 0:
            raise InputError(f"the pixels of node {name} are {pixels!r}: a whole number at least 0 is needed")
        return Node(name, Path(data).resolve(), Path(str(state)), str(settings.get("device", "auto")), pixels)

    @property
    def home(self) -> str:
        """A name for the state folder that no other has: made once, then read."""
        path = self.state / "home"
        if not path.is_file():
            write_atomic(path, secrets.token_hex(8).encode())
        return path.read_text()

    def part(self, name: str) -> ImageStore | None:
        """The images of `train`, `test` or `out/NAME`: a folder, an .npz or a .csv file; None: there are none."""
        for path in (self.data / f"{name}.npz", self.data / f"{name}.csv", self.data / name):
            if path.is_file() or path.is_dir():
                size = f"@{self.pixels}" if self.pixels and path.suffix != ".npz" else ""
                return replace(load_source(f"{path}{size}", self.state / "decoded"), test=None)
        return None

    def train(self) -> ImageStore:
        """The training images."""
        found = self.part("train")
        if found is None:
            raise InputError(f"node {self.name} has no training images: {self.data} holds no train.npz and no train/")
        return found

    def others(self, kind: str) -> dict[str, ImageStore]:
        """The test sets of other images by name, from `KIND/NAME` or `KIND/NAME.npz`."""
        folder = self.data / kind
        names = sorted({path.stem if path.is_file() else path.name for path in folder.glob("*")})
        found = {name: self.part(f"{kind}/{name}") for name in names if not name.startswith(".")}
        return {name: store for name, store in found.items() if store is not None}

    def facts(self) -> Facts:
        """What the server may know of the images."""
        store = self.train()
        first, second, count = store.channel_sums()
        classes = store.classes or tuple(str(label) for label in range(store.num_classes))
        counts = torch.bincount(store.labels, minlength=len(classes))
        return Facts(
            name=self.name,
            home=self.home,
            samples=len(store),
            classes=classes,
            class_counts=tuple(counts.tolist()),
            shape=store.shape,
            first=first,
            second=second,
            count=count,
        )


def with_classes(store: ImageStore, classes: tuple[str, ...], whose: str) -> ImageStore:
    """The store with the labels that all nodes have agreed on, found by the names of its classes."""
    if store.classes == classes:
        return store
    own = store.classes or tuple(str(label) for label in range(store.num_classes))
    strange = [name for name in own if name not in classes]
    if strange:
        raise InputError(f"{whose} has a class {strange[0]!r}; this run has {', '.join(classes)}")
    places = torch.tensor([classes.index(name) for name in own])
    return replace(store, labels=places[store.labels.cpu()], classes=classes)


@final
class Kept:
    """What a client keeps of one run: a file a round, so that a server which goes back finds the state of then."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def rounds(self) -> list[int]:
        """The rounds after which there is a state, the oldest first."""
        return sorted(int(path.stem.removeprefix("round-")) for path in self._folder.glob("round-*.safetensors"))

    def load(self, client: ClientState, counted: int) -> tuple[ClientState, str]:
        """The client with what it kept after round `counted`, or before it, and a sentence where that is not there."""
        possible = [round for round in self.rounds() if round <= counted]
        if not possible:
            return client, f"its private state of round {counted} is not there: it starts afresh" if counted else ""
        tensors = self._read(f"round-{possible[-1]:05d}.safetensors")
        if tensors["personal"].shape != client.personal.shape:
            raise InputError(f"the state in {self._folder} does not fit this model: remove the folder")
        device = client.personal.device
        kept = replace(
            client,
            personal=tensors["personal"].to(device),
            memory={name: value.to(device) for name, value in below(tensors, "memory.").items()},
            optimiser={name: value.to(device) for name, value in below(tensors, "optimiser.").items()},
        )
        late = possible[-1] < counted
        return kept, f"its private state is of round {possible[-1]}, not {counted}" if late else ""

    def drop_after(self, counted: int) -> None:
        """Remove what came of updates that did not count."""
        for round in self.rounds():
            if round > counted:
                (self._folder / f"round-{round:05d}.safetensors").unlink(missing_ok=True)

    def save(self, client: ClientState, round: int) -> None:
        """Keep the client as it is after a round; the oldest states go."""
        tensors = {"personal": client.personal}
        tensors |= {f"memory.{name}": value for name, value in client.memory.items()}
        tensors |= {f"optimiser.{name}": value for name, value in client.optimiser.items()}
        self._write(f"round-{round:05d}.safetensors", tensors)
        for old in self.rounds()[:-KEPT]:
            (self._folder / f"round-{old:05d}.safetensors").unlink(missing_ok=True)

    def frozen(self, round: int) -> Tensor | None:
        """The nets that only the server changes as they were after a round; None where they were never sent."""
        name = f"frozen-{round:05d}.safetensors"
        return self._read(name)["frozen"] if (self._folder / name).is_file() else None

    def save_frozen(self, row: Tensor, round: int) -> None:
        """Keep the nets that only the server changes; older ones go."""
        name = f"frozen-{round:05d}.safetensors"
        self._write(name, {"frozen": row})
        for old in self._folder.glob("frozen-*.safetensors"):
            if old.name != name:
                old.unlink(missing_ok=True)

    def _read(self, name: str) -> dict[str, Tensor]:
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            return load((self._folder / name).read_bytes())
        except SafetensorError as error:
            raise InputError(f"{self._folder / name} is damaged ({error}): remove it") from None

    def _write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        from safetensors.torch import save

        # Copies: a file of tensors must not hold two that share memory.
        data = save({key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()})
        write_atomic(self._folder / name, data)


@final
class Work:
    """One message at work on a node: the model as it was sent, the node's images, and what it kept."""

    def __init__(self, node: Node, arrays: Mapping[str, Tensor], about: Mapping[str, Any], *, tests: bool) -> None:
        self.node, self._arrays, self._about = node, arrays, about
        config, self.method = resolve(about["settings"], {})
        self.config: Config = replace(config, device=node.device, resident="auto")
        self.client_id = int(about["client"])
        self.federation = self._federation(tests=tests)
        self.engine = EagerEngine(self.method, self.federation, self.config)
        self.kept = Kept(node.state / run_folder(str(about["run"])))
        self.server = self._server()
        self.notes: list[str] = []

    def _server(self) -> ServerState:
        layout, round = self.engine.layout, int(self._about["frozen_round"])
        frozen = torch.empty(0)
        if has_frozen(self._arrays):
            self.kept.save_frozen(read_frozen(self._arrays, layout), round)
        if layout.frozen_size:
            held = self.kept.frozen(round)
            if held is None:
                raise InputError(f"node {self.node.name} was not sent the server's own nets of round {round}")
            frozen = held
        server = read_server(self._arrays, self._about, layout, frozen)
        device = self.engine.device
        return replace(
            server,
            shared=server.shared.to(device),
            extra={name: value.to(device) for name, value in server.extra.items()},
            integers={name: value.to(device) for name, value in server.integers.items()},
            frozen=server.frozen.to(device),
        )

    def _federation(self, *, tests: bool) -> Federation:
        about, config = self._about, self.config
        classes, shape = tuple(about["classes"]), tuple(about["shape"])
        train = with_classes(self.node.train(), classes, f"node {self.node.name}")
        if train.shape != shape:
            raise InputError(f"the images of node {self.node.name} are {train.shape}; those of the others are {shape}")
        kept, aside = set_aside(torch.arange(len(train)), config.calibration, config.images_seed, self.client_id)
        return Federation(
            name=config.data,
            train=train,
            train_indices=(kept,),
            tests=self._tests(classes) if tests else (),
            mean=tuple(about["mean"]),
            std=tuple(about["std"]),
            calibration_indices=(aside,) if len(aside) else (),
        )

    def _tests(self, classes: tuple[str, ...]) -> tuple[TestSet, ...]:
        """IN and IN-C from the node's own test images, unseen domains, and OUT sets."""
        config, shape = self.config, tuple(self._about["shape"])
        found: list[TestSet] = []
        test = self.node.part("test")
        if test is not None:
            own = replace(with_classes(test, classes, f"the test of node {self.node.name}"), name=config.data)
            found += in_tests(
                own,
                (torch.arange(len(own)),),
                corruptions=config.corruptions,
                severities=config.severities,
                seed=config.seed,
                constants=config.constants,
            )
        for name, store in self.node.others("unseen").items():
            left = with_classes(fit_to(store, shape), classes, f"unseen/{name} of node {self.node.name}")
            everything = (torch.arange(len(left)),)
            found.append(TestSet(name, "in-c", left, everything, corruption=f"{LEFT_OUT}{name}", unseen=True))
        for name, store in self.node.others("out").items():
            found.append(TestSet(name, "out", fit_to(store, shape), (torch.arange(len(store)),)))
        return tuple(found)

    def client(self) -> ClientState:
        """The client with what it kept at its last update that counted."""
        _, personal, _ = self.engine.layout.pack(self.engine.nets())
        fresh = ClientState(
            id=self.client_id,
            personal=personal,
            indices=self.federation.train_indices[0],
            class_counts=self.federation.class_counts(0),
            counted=int(self._about["counted"]),
        )
        kept, note = self.kept.load(fresh, fresh.counted)
        if note:
            self.notes.append(note)
        return kept

    def own_facts(self) -> dict[str, Any]:
        """What an answer says about the node's images: those that train, after some were set aside."""
        aside = sum(len(own) for own in self.federation.calibration_indices)
        return {"class_counts": self.federation.class_counts(0).long().tolist(), "aside": aside, "notes": self.notes}

    def evaluator(self) -> tuple[Evaluator, RunState]:
        """The evaluator of the node's own images, and the state that it is about."""
        detectors: dict[str, Detector] = {name: resolve_detector(name) for name in self.config.detectors}
        evaluator = Evaluator(self.engine, detectors)
        return evaluator, evaluator.ready(RunState(self.server, (self.client(),)))

    def answers(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Flags and scores of the node's test images by the model as it was sent; none where it cannot be tested."""
        if not self.testable():
            return {}, {"sets": [], "leaks": {}}
        evaluator, state = self.evaluator()
        sums = read_sums(self._arrays, self.config.detectors)
        on_device = {
            name: [{key: value.to(self.engine.device) for key, value in total.items()} for total in passes]
            for name, passes in sums.items()
        }
        asked = evaluator.asked(state, evaluator.fitted(state, on_device))
        arrays, sets = asked_arrays(asked, self.client_id, self.config.detectors)
        return arrays, {"sets": sets, "leaks": count_leaks(self.federation)}

    def testable(self) -> bool:
        """Whether the client's model can be tested: some private parts mean nothing before they have trained."""
        return self.method.neutral_start or not self.engine.layout.personal_size or int(self._about["counted"]) > 0


def answer_hello(node: Node) -> RecordDict:
    """Who the node is."""
    return pack(to_record({}), {**asdict(node.facts()), "kind": "hello"})


def answer_survey(node: Node, content: RecordDict) -> RecordDict:
    """What the method asks before training."""
    work = Work(node, *unpack(content), tests=False)
    client = work.client()
    answers = list(work.engine.survey(work.server, [client], int(work._about["round"])))
    sums = {f"sums.{name}": value for answer in answers for name, value in answer.sums.items()}
    return pack(to_record(sums), {"weight": work.engine.weight(client), "answers": len(answers), **work.own_facts()})


def answer_train(node: Node, content: RecordDict) -> RecordDict:
    """The update of one round; what the client keeps is on disk before its update leaves."""
    arrays, about = unpack(content)
    evaluate = bool(about["evaluate"])
    work = Work(node, arrays, about, tests=evaluate)
    reply: dict[str, Any] = {}
    found: dict[str, Tensor] = {}
    if evaluate:
        found, more = work.answers()
        reply |= more
    round = int(about["round"])
    client = work.client()
    work.kept.drop_after(client.counted)
    update = next(work.engine.train(work.server, [client], round))
    reason = private_refusal(client)
    if reason is not None:
        return pack(to_record(found), {**reply, "refused": reason, **work.own_facts()})
    work.kept.save(client, round + 1)
    reply |= {"weight": update.weight, "losses": dict(update.losses), **work.own_facts()}
    metrics = {"num-examples": len(client.indices), **{f"loss-{name}": loss for name, loss in update.losses.items()}}
    return pack(to_record({**update_arrays(update, work.engine.layout), **found}), reply, metrics)


def answer_sums(node: Node, content: RecordDict) -> RecordDict:
    """What the node's training features add to the next pass of the detectors that are fitted for everyone."""
    arrays, about = unpack(content)
    work = Work(node, arrays, about, tests=False)
    totals: dict[str, dict[str, Tensor]] = {}
    if work.testable():
        evaluator, state = work.evaluator()
        totals = evaluator.next_sums(state, read_sums(arrays, work.config.detectors))
    sums = {name: [total] for name, total in totals.items()}
    return pack(to_record(sums_arrays(sums, work.config.detectors)), work.own_facts())


def answer_evaluate(node: Node, content: RecordDict) -> RecordDict:
    """Flags and scores of the node's test images."""
    arrays, about = unpack(content)
    work = Work(node, arrays, about, tests=True)
    found, more = work.answers()
    return pack(to_record(found), {**more, **work.own_facts()})
