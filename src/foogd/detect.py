"""Detectors: from a model's output to one outlier score per image, and larger always means more OUT."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import isabstract
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor

from .detector import Detector as Detector
from .detector import check_passes, check_scores, linear_logits
from .detector import energy as energy
from .errors import InputError
from .fitted import (
    DICE,
    KNN,
    Gaussian,
    Mahalanobis,
    ReAct,
    ScoreEnergy,
    ScoreNear,
    ScoreOwn,
    ScoreSpan,
    ScoreSpanAll,
    Span,
    SpanOwn,
    ViM,
)
from .plugins import blamed, load_object
from .types import Output, Readout

if TYPE_CHECKING:
    from jaxtyping import Float


@final
@dataclass(frozen=True)
class MSP(Detector):
    """−max_c p_c with p = softmax(g/T), in float64: in float32 all probabilities near 1 are the same number."""

    description: ClassVar[str] = "minus the largest softmax probability"
    paper: ClassVar[str] = "Hendrycks & Gimpel 2017"

    temperature: float = field(default=1.0, metadata={"gt": 0.0, "help": "the logits are divided by it"})

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        return -torch.softmax(outputs.logits.double() / self.temperature, dim=1).amax(dim=1)


@final
@dataclass(frozen=True)
class MaxLogit(Detector):
    """−max_c g_c."""

    description: ClassVar[str] = "minus the largest logit"
    paper: ClassVar[str] = "Hendrycks et al. 2022"

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        return -outputs.logits.amax(dim=1)


@final
@dataclass(frozen=True)
class Energy(Detector):
    """−T · logsumexp(g/T)."""

    description: ClassVar[str] = "free energy of the logits"
    paper: ClassVar[str] = "Liu et al. 2020"

    temperature: float = field(default=1.0, metadata={"gt": 0.0, "help": "the logits are divided by it"})

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        return energy(outputs.logits, self.temperature)


@final
@dataclass(frozen=True)
class ASH(Detector):
    """The energy of g(z'), where z' keeps the largest entries of each feature vector.

    Of n entries k = n − round(n·percentile/100) survive, at least one; `variant` names what becomes of them.
    """

    description: ClassVar[str] = "energy after pruning the features"
    paper: ClassVar[str] = "Djurisic et al. 2023"

    variant: str = field(
        default="b", metadata={"choices": ("p", "b", "s"), "help": "survivors stay (p), become equal (b), grow (s)"}
    )
    percentile: float = field(
        default=65.0, metadata={"ge": 0.0, "lt": 100.0, "help": "percentage of the features that are set to 0"}
    )

    def applies(self, readout: Readout | None) -> bool:
        return readout is not None

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        if readout is None:
            raise InputError("ASH needs the model's head, but no readout was given.")
        n = outputs.z.shape[1]
        k = max(n - round(n * self.percentile / 100), 1)
        return energy(readout.head(ASH_VARIANTS[self.variant](outputs.z, k)))


@final
@dataclass(frozen=True)
class GradNorm(Detector):
    """−‖C·p − 1‖₁ · ‖z‖₁, minus the L1 norm of the head's gradient of −Σ_c log p_c, in closed form."""

    description: ClassVar[str] = "minus the gradient norm of the last layer"
    paper: ClassVar[str] = "Huang et al. 2021"

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        p = torch.softmax(linear_logits(outputs, readout).double(), dim=1)
        return -(p.shape[1] * p - 1).abs().sum(dim=1) * outputs.z.double().abs().sum(dim=1)


@final
@dataclass(frozen=True)
class ScoreNorm(Detector):
    """‖s(z)‖₂, the paper's own detector (Eq. 9); `sigma` picks a noise level where the score network knows several."""

    description: ClassVar[str] = "norm of the score network's output"
    paper: ClassVar[str] = "Liao et al. 2024"
    needs_score: ClassVar[bool] = True

    sigma: float | None = field(
        default=None, metadata={"gt": 0.0, "help": "noise level; without it the network's own default"}
    )

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        if readout is None or readout.score is None:
            raise InputError("score_norm needs a score network, but the model has none.")
        s = readout.score(outputs.z) if self.sigma is None else readout.score(outputs.z, self.sigma)
        return s.double().square().sum(dim=1).sqrt()


@final
@dataclass(frozen=True)
class FunctionDetector(Detector):
    """A user's function from an output to one score per image."""

    description: ClassVar[str] = "a function of your own"

    function: Callable[[Output], Tensor]

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return check_scores(self.function(outputs), len(outputs.logits), name)


def ash_p(z: Float[Tensor, "n d"], k: int) -> Float[Tensor, "n d"]:
    """Survivors stay as they are."""
    return torch.where(_survivors(z, k), z, 0.0)


def ash_b(z: Float[Tensor, "n d"], k: int) -> Float[Tensor, "n d"]:
    """Survivors all become s₁/k, with s₁ the sum of the features before pruning."""
    return torch.where(_survivors(z, k), z.sum(dim=1, keepdim=True) / k, 0.0)


def ash_s(z: Float[Tensor, "n d"], k: int) -> Float[Tensor, "n d"]:
    """Survivors are multiplied by exp(s₁/s₂), with the sums before and after pruning.

    ASH is made for features after a ReLU; where the survivors do not have a positive sum, they stay as they are.
    """
    pruned = ash_p(z, k)
    before, after = z.sum(dim=1, keepdim=True), pruned.sum(dim=1, keepdim=True)
    ratio = torch.where(after > 0, before / torch.where(after > 0, after, 1.0), 0.0)
    # s₁/s₂ is at most n/k; only when very few survive can it reach 60, and float32 ends at exp(88).
    return pruned * torch.exp(ratio.clamp_max(60.0))


def _survivors(z: Tensor, k: int) -> Tensor:
    """Where the k largest entries of each row are; of equal entries the first survive, on every device."""
    order = z.sort(dim=1, descending=True, stable=True).indices
    return torch.zeros_like(z, dtype=torch.bool).scatter(1, order[:, :k], True)


ASH_VARIANTS: dict[str, Callable[[Tensor, int], Tensor]] = {"p": ash_p, "b": ash_b, "s": ash_s}

DETECTORS: dict[str, Detector] = {
    "msp": MSP(),
    "max_logit": MaxLogit(),
    "energy": Energy(),
    "ash": ASH(),
    "ash_p": ASH("p", 60.0),
    "ash_s": ASH("s", 95.0),
    "react": ReAct(),
    "dice": DICE(),
    "vim": ViM(),
    "knn": KNN(),
    "mahalanobis": Mahalanobis(),
    "gradnorm": GradNorm(),
    "score_norm": ScoreNorm(),
    "score_energy": ScoreEnergy(),
    "score_own": ScoreOwn(),
    "score_near": ScoreNear(),
    "score_span": ScoreSpan(),
    "score_span_all": ScoreSpanAll(),
    "gaussian": Gaussian(),
    "span": Span(),
    "span_own": SpanOwn(),
}


def resolve_detector(name: str) -> Detector:
    """The detector of that name, or the one in `file.py:name`: a function Output → Tensor, a Detector, or its class."""
    if name in DETECTORS:
        return DETECTORS[name]
    if ":" not in name:
        raise InputError(f"there is no detector {name!r}; it must be one of {', '.join(DETECTORS)}, or file.py:name.")
    with blamed(name):
        return as_detector(load_object(name, "detector"), name)


def as_detector(found: object, name: str) -> Detector:
    """A user's function, Detector or class of one as a detector; `name` is for messages."""
    if isinstance(found, type):
        found = _instance(found, name)
    if isinstance(found, Detector):
        check_passes(found, name)
        return found
    if callable(found):
        return FunctionDetector(found)
    raise InputError(
        f"the detector {name!r} is of type {type(found).__name__}, but it must be a function, a Detector or its class."
    )


def _instance(found: type, name: str) -> Detector:
    if not issubclass(found, Detector):
        raise InputError(f"the class {name!r} is not a detector: it must inherit from foogd.detect.Detector.")
    if isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise InputError(f"the detector {name!r} is abstract: it must define {missing}.")
    try:
        return found()
    except TypeError as error:
        raise InputError(f"the detector {name!r} cannot be made without arguments: {error}.") from error
