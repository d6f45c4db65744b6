"""A trained model for use: label, probability, outlier score and verdict for new images, without any training data."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor

from .config import Config
from .core.errors import InputError
from .core.flat import Layout
from .core.random import Streams
from .core.types import Context
from .data.decode import BadImage, decode, picture_pixels, square_pixels
from .data.federation import fit_to
from .data.store import ImageStore
from .detectors.base import Detector
from .detectors.registry import DETECTORS, resolve_detector
from .engine.eager import build_nets, resolve_device
from .methods.base import Method
from .metrics import threshold_at_tpr
from .runs.files import ABOUT, MODEL
from .runs.model_file import check_parts, is_of, read_about

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

# The detector that a verdict rests on, where nobody chooses one: first those that know what everyone has. Detectors of
# one client's images take classes that only others have for OUT, and so do logits of private heads (docs/research.md,
# section 20).
PREFERRED = ("score_span_all", "score_norm", "span", "energy", "msp")


@final
@dataclass(frozen=True)
class Predictions:
    """What the model says about n images; `out` is None where the run set no images aside for a threshold."""

    labels: tuple[str, ...]
    classes: Int[Tensor, " n"]
    probability: Float[Tensor, " n"]  # of that class, by softmax
    score: Float[Tensor, " n"]  # larger = more OUT
    out: Bool[Tensor, " n"] | None  # IsOUT(x) of Eq. 9: the score is above the threshold
    threshold: float | None
    detector: str
    client: int | None  # who answered; None: the model of nobody in particular
    calibrated: int  # images that the threshold rests on
    calibrated_by: int | None  # the client that set them aside; None: all clients

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary an image, of plain numbers and words."""
        verdicts = [None] * len(self) if self.out is None else ["OUT" if out else "IN" for out in self.out.tolist()]
        columns = zip(self.labels, self.probability.tolist(), self.score.tolist(), verdicts, strict=True)
        shared = {"threshold": self.threshold, "calibrated": self.calibrated}
        return [
            {"label": label, "probability": p, "score": s, **shared, "verdict": verdict}
            for label, p, s, verdict in columns
        ]


@dataclass(frozen=True)
class _Task:
    """What nets are built for."""

    shape: tuple[int, int, int]
    num_classes: int


@dataclass(frozen=True)
class _Client:
    """What one client's model has of its own; that of nobody in particular has the mean of the private values."""

    personal: Tensor
    class_counts: Tensor
    memory: Mapping[str, Tensor]
    detectors: Mapping[str, Detector]


@final
class Model:
    """A trained federation: everyone's model, and with `client` the one of a client with its private part."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        method: Method,
        about: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self.folder, self.config, self.method, self.device = folder, config, method, device
        self.classes: tuple[str, ...] = tuple(about["classes"])
        self.shape: tuple[int, int, int] = tuple(about["shape"])
        self.clients: int = about["clients"]
        self.client_names: tuple[str, ...] = tuple(about.get("client_names", ()))  # where clients are sites with names
        self.round: int = about["round"]
        self._tensors = {name: value.to(device) for name, value in tensors.items() if not name.startswith("client.")}
        own_tensors: dict[int, dict[str, Tensor]] = {client: {} for client in range(self.clients)}
        for name, value in tensors.items():
            if name.startswith("client."):
                _, number, rest = name.split(".", 2)
                own_tensors[int(number)][rest] = value.to(device)
        self._nets = build_nets(method, _Task(self.shape, len(self.classes)), config).to(device)
        layout = Layout.of(self._nets, method.private_names(self._nets).__contains__, method.frozen)
        shared, self._personal, _ = layout.pack(self._nets)
        frozen = layout.pack_frozen(self._nets)
        for name, row in (("shared", shared), ("frozen", frozen)):
            saved = self._tensors[name]
            if saved.shape != row.shape:
                found, wanted = tuple(saved.shape), tuple(row.shape)
                raise InputError(f"{folder} does not fit its configuration: {name} is {found}, {wanted} is needed")
            row.copy_(saved)
        layout.bind(self._nets, shared, self._personal, frozen)
        layout.load_integers(self._nets, _below(self._tensors, "integers."))
        self._nets.eval().requires_grad_(False)
        self._extra = _below(self._tensors, "extra.")
        self._mean = torch.tensor(about["mean"], device=device).view(1, -1, 1, 1)
        self._std = torch.tensor(about["std"], device=device).view(1, -1, 1, 1)
        self._names: list[str] = about["detectors"]
        self._broken: dict[str, str] = {}
        fresh: dict[str, Detector] = {}
        for name in self._names:
            try:
                fresh[name] = resolve_detector(name)
            except InputError as error:  # a file of the user's own that is not here: all others still work
                self._broken[name] = str(error)
        places = {name: self._names.index(name) for name in fresh}
        common = {}
        for name, detector in fresh.items():
            if not detector.local:
                try:
                    common[name] = _fitted(detector, _below(self._tensors, f"detector.{places[name]}."))
                except (LookupError, ValueError, RuntimeError):
                    self._broken[name] = f"{folder / MODEL / ABOUT} is damaged: the model was not fitted for {name}"
        self._of: dict[int | None, _Client] = {}
        for client, mine in own_tensors.items():
            own = {}
            for name, detector in fresh.items():
                sums = _below(mine, f"detector.{places[name]}.")
                if detector.local and sums:
                    own[name] = _fitted(detector, sums)
            self._of[client] = _Client(
                personal=mine["personal"],
                class_counts=mine["class_counts"],
                memory=_below(mine, "memory."),
                detectors={**common, **own},
            )
        self._of[None] = _Client(
            personal=self._tensors["personal"],
            class_counts=self._tensors["class_counts"]
            if "class_counts" in self._tensors  # of a run on Flower, whose private parts are on the nodes
            else torch.stack([own.class_counts for own in self._of.values()]).sum(0),
            memory={},
            detectors=common,
        )

    @property
    def detectors(self) -> list[str]:
        """The detectors that were fitted and can be asked for."""
        return list(self._names)

    @property
    def is_calibrated(self) -> bool:
        """Whether images were set aside, so that a score can be turned into a verdict."""
        return any(name.startswith("calibration.") for name in self._tensors)

    def number_of(self, client: int | str | None) -> int | None:
        """The number of a client by the name of its site; numbers stay as they are."""
        if isinstance(client, str):
            if client not in self.client_names:
                raise InputError(f"client is {client!r}; this run has {self._known()}")
            return self.client_names.index(client)
        return client

    def _known(self) -> str:
        if self.client_names:
            return f"the clients {', '.join(self.client_names)}"
        return f"the clients 0 to {self.clients - 1}" if self.clients else "its private parts on its nodes only"

    def threshold(
        self, detector: str | None = None, *, client: int | str | None = None, tpr: float = 0.95
    ) -> float | None:
        """tau: the share `tpr` of the images set aside have at most this score, of one client's model or of everyone's.

        A client, by its number or the name of its site, that set none aside has the threshold of all; None where
        nobody did.
        """
        checked_tpr(tpr)
        client = self.number_of(client)
        scores, _ = self._aside(self._named(detector, client), client)
        return None if scores is None else threshold_at_tpr(scores, tpr)

    @torch.no_grad()
    def predict(
        self,
        images: Any,
        *,
        client: int | str | None = None,
        detector: str | None = None,
        tpr: float = 0.95,
    ) -> Predictions:
        """Label, probability, score and verdict of images: uint8 N×H×W×C or N×H×W, PIL pictures, or files.

        Images of another size are brought to that of the model: shorter side, then the centre as a square. With
        `client`, a number or the name of a site, the client's private part answers.
        """
        checked_tpr(tpr)
        client = self.number_of(client)
        name = self._named(detector, client)
        own = self._client(client)
        self._personal.copy_(own.personal)
        readout = self.method.readout(self._nets) if client is not None else self.method.generic_readout(self._nets)
        scorer = own.detectors[name].prepared(readout)
        predict = self.method.predictor(self._nets, self._context(own, client))
        size = self.method.test_batch or self.config.eval_batch
        parts = []
        for chunk in torch.split(as_images(images, self.shape), size):
            x = chunk.to(self.device).permute(0, 3, 1, 2).float() / 255
            output = predict((x - self._mean) / self._std)
            parts.append((output.logits.double().softmax(1).max(1), scorer(output, readout).double()))
        probability = torch.cat([best.values for best, _ in parts]).cpu()
        classes = torch.cat([best.indices for best, _ in parts]).cpu()
        score = torch.cat([scores for _, scores in parts]).cpu()
        aside, owner = self._aside(name, client)
        tau = None if aside is None else threshold_at_tpr(aside, tpr)
        return Predictions(
            labels=tuple(self.classes[c] for c in classes.tolist()),
            classes=classes,
            probability=probability,
            score=score,
            out=None if tau is None else score > tau,
            threshold=tau,
            detector=name,
            client=None if client is None else int(client),
            calibrated=0 if aside is None else len(aside),
            calibrated_by=owner,
        )

    def is_out(self, images: Any, **choices: Any) -> Bool[Tensor, " n"]:
        """IsOUT(x) of Eq. 9, one verdict an image; takes what `predict` takes."""
        found = self.predict(images, **choices).out
        if found is None:
            raise InputError(
                f"{self.folder} has no threshold: it set no images aside; train with --set calibration=0.05"
            )
        return found

    def _client(self, client: int | None) -> _Client:
        # True and 1.0 would find the client 1 in a dictionary.
        number = isinstance(client, int | np.integer) and not isinstance(client, bool)
        if client is not None and (not number or client not in self._of):
            raise InputError(f"client is {client!r}; this run has {self._known()}")
        return self._of[client]

    def _named(self, detector: str | None, client: int | None) -> str:
        usable = [name for name in self._names if name in self._client(client).detectors]
        if detector is None and usable:
            return next((name for name in PREFERRED if name in usable), usable[0])
        whose = "without a client" if client is None else f"as client {client}"
        if detector is None:
            why = "; ".join(f"{name}: {self._why_not(name, client)}" for name in self._names) or "it has none at all"
            raise InputError(f"{self.folder} has no detector that can be used {whose}: {why}")
        if not isinstance(detector, str):
            raise InputError(f"detector is {detector!r}: a name is needed, one of {', '.join(self._names)}")
        if detector not in usable:
            left = f"possible are {', '.join(usable)}" if usable else "no other is possible either"
            if detector not in self._names and detector not in DETECTORS and detector not in self._broken:
                raise InputError(f"{self.folder} has no detector {detector!r}; {left}")
            why = self._why_not(detector, client).rstrip(".")
            raise InputError(f"detector {detector!r} is not possible {whose}: {why}; {left}")
        return detector

    def _why_not(self, detector: str, client: int | None) -> str:
        """Why a detector cannot be used, and what would help."""
        from .runs.files import FLOWER, read_rows

        if detector in self._broken:
            return self._broken[detector]
        known = DETECTORS.get(detector)
        if detector in self._names:
            if client is None:
                return f"it judges by the features of one client, so give a client from 0 to {self.clients - 1}"
            return "that client had no training images to fit it on"
        if known is not None and not known.applies(self.method.readout(self._nets)):
            return f"the method {self.config.method} has no part that it asks for"
        if (self.folder / FLOWER).is_file():
            if (known is not None and known.local) or detector in self.config.detectors:
                return "this run was trained on Flower, and what it is fitted on stays on the nodes"
            return "this run was trained on Flower, which fits only the detectors that its settings name"
        cure = f"foogd evaluate {self.folder} --detector {detector} adds it"
        with contextlib.suppress(InputError):  # of a damaged file nothing is known
            if any(row.detector == detector for row in read_rows(self.folder)):
                return f"it was evaluated, but the model was saved without it; {cure}"
        return f"the model was saved without it; {cure}"

    def _aside(self, detector: str, client: int | None) -> tuple[Tensor | None, int | None]:
        """The scores of the images that a threshold rests on, and the client that they are of; None: of all."""
        scores = self._calibration("generic" if client is None else "calibration", detector)
        if not scores:
            return None, None
        if client is not None and client in scores:
            return scores[client], client
        return torch.cat(list(scores.values())), None

    def _calibration(self, kind: str, detector: str) -> dict[int, Tensor]:
        found = _below(self._tensors, f"{kind}.{self._names.index(detector)}.")
        return {int(client): scores for client, scores in found.items()}

    def _context(self, own: _Client, client: int | None) -> Context:
        return Context(
            round=self.round,
            rounds=self.config.rounds,
            groups=(),
            class_counts=own.class_counts,
            received=self._nets,
            server=self._extra,
            memory=own.memory,
            rng=Streams(self.config.seed, self.round, -1 if client is None else client, "predict", device=self.device),
            mean=self._mean,
            std=self._std,
            unknown=client is None,
        )


def checked_tpr(tpr: Any) -> None:
    """Complain about a share of IN that is no number above 0 and at most 1."""
    number = isinstance(tpr, int | float | np.integer | np.floating) and not isinstance(tpr, bool)
    if not number or not 0 < tpr <= 1:
        raise InputError(f"tpr is {tpr!r}: it must be a number above 0 and at most 1")


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _fitted(detector: Detector, sums: Mapping[str, Tensor]) -> Detector:
    for number in range(detector.passes):
        detector = detector.fit(_below(sums, f"{number}."))
    return detector


def as_images(images: Any, shape: tuple[int, int, int]) -> Tensor:
    """uint8 N×H×W×C in the shape that a model takes, from arrays, tensors, pictures or files.

    Where a model takes squares, all of them get the geometry of files: shorter side, then the centre.
    """
    if isinstance(images, str | Path) or _is_picture(images):
        images = [images]
    if isinstance(images, Sequence):
        if not images:
            raise InputError("no images were given: at least one is needed")
        return torch.cat([_one(item, shape) for item in images])
    array = np.asarray(images.cpu() if isinstance(images, Tensor) else images)
    if array.dtype != np.uint8 or array.ndim not in (3, 4):
        found = f"{array.shape} of {array.dtype}" if array.dtype != object else type(images).__name__
        raise InputError(f"images are {found}: uint8 of shape N×H×W×C or N×H×W, or files, are allowed")
    if array.ndim == 3 and array.shape[-1] in (1, 3, 4):
        raise InputError(f"images are {array.shape}: one image needs an axis for N, which is then 1")
    stack = array if array.ndim == 4 else array[..., None]
    _, height, width = shape
    if height == width and stack.size and stack.shape[1:3] != (height, width):
        try:
            stack = np.stack([square_pixels(pixels, height) for pixels in stack])
        except BadImage as error:
            raise InputError(f"an image cannot be used: {error}") from None
    # torch warns about arrays that cannot be written to.
    pixels = torch.as_tensor(np.require(stack, requirements=["C", "W"]))
    return fit_to(ImageStore(pixels, torch.zeros(len(pixels), dtype=torch.int64)), shape).images


def _is_picture(item: Any) -> bool:
    pillow = sys.modules.get("PIL.Image")  # who has a picture has imported it
    return pillow is not None and isinstance(item, pillow.Image)


def _one(item: Any, shape: tuple[int, int, int]) -> Tensor:
    _, height, width = shape
    size = height if height == width else None
    try:
        if _is_picture(item):
            pixels = picture_pixels(item, size)
        elif isinstance(item, str | Path):
            pixels = decode(str(item), size)
        else:
            pixels = np.asarray(item.cpu() if isinstance(item, Tensor) else item)
    except BadImage as error:
        raise InputError(f"{item if isinstance(item, str | Path) else 'a picture'} cannot be used: {error}") from None
    return as_images(pixels[None], shape)


def load(folder: str | Path, *, device: str = "cpu") -> Model:
    """The model of a finished run: `foogd.load("runs/a").predict(images)`."""
    from safetensors.torch import load as read_tensors

    from .presets.loader import read_run_config

    if not isinstance(folder, str | os.PathLike):
        raise InputError(f"{folder!r} is not a run folder: a path is needed")
    place = Path(folder)
    if not (place / "config.toml").is_file():
        raise InputError(f"{place} is not a run folder: it has no config.toml")
    if device not in ("auto", "cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise InputError(f"device = {device!r} is not possible: use auto or cpu, or cuda where torch finds a GPU")
    config, method = read_run_config(place / "config.toml")
    about, data = read_about(place)
    if not is_of(about, config, method):
        raise InputError(
            f"{place / 'config.toml'} was changed since the model was saved, and no longer describes it: "
            f"undo the change, or train again with foogd run"
        )
    tensors = read_tensors(data)
    check_parts(place / MODEL / ABOUT, about, tensors)
    return Model(place, replace(config, device=device), method, about, tensors, resolve_device(device))
