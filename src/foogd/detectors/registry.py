"""Detectors by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import isabstract, signature
from typing import TYPE_CHECKING, ClassVar, final

from torch import Tensor

from ..core.errors import InputError
from ..core.plugins import blamed, load_object
from ..core.types import Output, Readout
from .base import Detector, check_passes, check_scores
from .gaussians import Gaussian, Mahalanobis
from .logits import MSP, Energy, GradNorm, MaxLogit
from .neighbours import KNN
from .pruning import ASH, DICE, ReAct
from .score import ScoreEnergy, ScoreNear, ScoreNorm, ScoreOwn, ScoreSpan, ScoreSpanAll
from .subspace import Span, SpanOwn, ViM

if TYPE_CHECKING:
    from jaxtyping import Float


@final
@dataclass(frozen=True)
class FunctionDetector(Detector):
    """A user's function from an output to one score per image."""

    description: ClassVar[str] = "a function of your own"

    function: Callable[[Output], Tensor]

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return check_scores(self.function(outputs), len(outputs.logits), name)


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
        try:
            signature(found).bind(None)
        except TypeError:
            raise InputError(
                f"the detector {name!r} takes {signature(found)}, but a function is given the model's output alone: "
                "write a class of foogd.detect.Detector for more."
            ) from None
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
