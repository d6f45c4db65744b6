"""The contract of detectors, and the energy in which several of them end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from ..core.errors import InputError
from ..core.fields import check
from ..core.types import Output, Readout

if TYPE_CHECKING:
    from jaxtyping import Float


class Detector(ABC):
    """An outlier score. Its settings are the fields, with a line of help, of the final, frozen dataclass.

    Only `__call__` has no default. A detector that learns from training features says how many passes it needs, returns
    sums in `statistics`, which are added up over batches and clients, and returns its fitted copy from `fit`. What it
    has learnt it keeps in fields without help. Fitting again from stored sums gives the same detector.
    """

    passes: ClassVar[int] = 0
    """Passes over the training features before the detector can be used."""

    local: ClassVar[bool] = False
    """Whether each client fits its own, from one call of `statistics` a pass on all its features, which stay there."""

    needs_score: ClassVar[bool] = False
    """Whether it asks for the score network, which only some methods train."""

    description: ClassVar[str] = ""
    """One line for `foogd detectors`."""

    paper: ClassVar[str] = ""
    """Where the detector comes from."""

    def __post_init__(self) -> None:
        check(self)

    def statistics(self, outputs: Output, y: Tensor, readout: Readout) -> dict[str, Tensor]:
        """What one batch of training features adds to the sums that `fit` gets."""
        return {}

    def fit(self, total: Mapping[str, Tensor]) -> Self:
        """The detector that has learnt from the sums of one pass."""
        return self

    def prepared(self, readout: Readout) -> Self:
        """The fitted detector with all that can be computed once for this model; it is then used for no other."""
        return self

    def applies(self, readout: Readout | None) -> bool:
        """Whether the model has what the detector asks for."""
        return not self.needs_score or (readout is not None and readout.score is not None)

    @abstractmethod
    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        """One score per image; larger = more OUT."""


def check_passes(detector: Detector, name: str) -> None:
    """Complain about a detector that learns but asks for no pass: it would be used without a fit, or by nobody."""
    own = [word for word in ("statistics", "fit") if getattr(type(detector), word) is not getattr(Detector, word)]
    found = f"its own {' and '.join(own)}" if own else "local = True"
    if not detector.passes and (own or detector.local):
        raise InputError(
            f"the detector {name!r} has {found}, but passes = 0: say how many passes over the training features it "
            "needs, as in passes: ClassVar[int] = 1."
        )


def check_scores(scores: Any, images: int, name: str) -> Tensor:
    """The scores that a detector returned, which must be one an image."""
    if not isinstance(scores, Tensor) or scores.shape != (images,):
        found = f"a tensor of shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        wanted = f"a tensor of {images} scores for {images} images"
        raise InputError(f"the detector {name!r} must return {wanted}, but it returned {found}.")
    return scores


def linear_logits(outputs: Output, readout: Readout | None) -> Float[Tensor, "n classes"]:
    """The head's own logits, also where a method adapts the output's: some scores hold for a linear head only."""
    return outputs.logits if readout is None else readout.head(outputs.z)


def energy(logits: Float[Tensor, "n classes"], temperature: float = 1.0) -> Float[Tensor, " n"]:
    """−T · logsumexp(g/T), in float64 (Liu et al. 2020)."""
    return -temperature * torch.logsumexp(logits.double() / temperature, dim=1)
