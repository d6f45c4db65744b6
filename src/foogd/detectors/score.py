"""The norm of the score network's output, alone and beside what else speaks of a feature."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Self, final

import torch
from torch import Tensor

from ..core.errors import InputError
from ..core.fields import setting
from ..core.types import Output, Readout
from ..nets.score import of_equal_length
from .base import Detector, energy, linear_logits
from .neighbours import SAMPLE, bank_of, nearest, place_of
from .subspace import out_of_span, span_inverse, span_sums
from .sums import classes_of, fitted, named_sums

if TYPE_CHECKING:
    from jaxtyping import Float


@final
@dataclass(frozen=True)
class ScoreEnergy(Detector):
    """α · ‖s(z)‖ − logsumexp(g): the norm of the score as one more logit against those of the classes.

    The score tells what no training image looks like, the logits tell what belongs to no class; ViM joins its residual
    with the energy in the same way. α = |E max_c g_c| / E‖s(z)‖ over the training data.
    """

    description: ClassVar[str] = "energy and the norm of the score network's output"
    paper: ClassVar[str] = "ours, after Wang et al. 2022"
    passes: ClassVar[int] = 1
    needs_score: ClassVar[bool] = True

    sigma: float | None = setting(None, "noise level; without it the network's own default", gt=0.0)
    alpha: float | None = field(default=None, repr=False, compare=False)

    def statistics(self, outputs: Output, y: Tensor, readout: Readout) -> dict[str, Tensor]:
        norms = self._norms(outputs.z, readout)
        top = linear_logits(outputs, readout).detach().double().amax(dim=1)
        return {"n": norms.new_tensor(float(len(norms))), "max_logit": top.sum(), "norm": norms.sum()}

    def fit(self, total: Mapping[str, Tensor]) -> Self:
        _, top, norm = named_sums(self, total, "n", "max_logit", "norm")
        return replace(self, alpha=float(top.abs() / norm) if float(norm) > 0 else 0.0)

    def _norms(self, z: Tensor, readout: Readout | None) -> Tensor:
        if readout is None or readout.score is None:
            raise InputError("score_energy needs a score network, but the model has none.")
        s = readout.score(z) if self.sigma is None else readout.score(z, self.sigma)
        norms: Tensor = s.detach().double().norm(dim=1)
        return norms

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        alpha = fitted(self, self.alpha)
        scores: Tensor = alpha * self._norms(outputs.z, readout) + energy(linear_logits(outputs, readout))
        return scores


@final
@dataclass(frozen=True)
class ScoreOwn(Detector):
    """`ScoreEnergy` for the classes that the client itself has: α · ‖s_own(z)‖ − logsumexp over own classes of g.

    A client that trained on few classes asks whether an image is like anything that it has seen, not like anything that
    anyone has. Images of classes that only others have therefore count as OUT. The moments are those of all clients'
    images.
    """

    description: ClassVar[str] = "score_energy for the classes that the client has"
    paper: ClassVar[str] = "ours"
    passes: ClassVar[int] = 1
    local: ClassVar[bool] = True
    needs_score: ClassVar[bool] = True

    sigma: float | None = setting(None, "noise level; without it the network's own default", gt=0.0)
    alpha: float | None = field(default=None, repr=False, compare=False)
    own: Tensor | None = field(default=None, repr=False, compare=False)

    def applies(self, readout: Readout | None) -> bool:
        return readout is not None and readout.class_score is not None

    def statistics(self, outputs: Output, y: Tensor, readout: Readout) -> dict[str, Tensor]:
        logits = linear_logits(outputs, readout).detach().double()
        own = classes_of(y, logits)
        norms = _class_norms(self, outputs.z, own, readout)
        top = logits.masked_fill(own == 0, -torch.inf).amax(dim=1)
        return {"n": norms.new_tensor(float(len(norms))), "max_logit": top.sum(), "norm": norms.sum(), "own": own}

    def fit(self, total: Mapping[str, Tensor]) -> Self:
        _, top, norm, own = named_sums(self, total, "n", "max_logit", "norm", "own")
        return replace(self, alpha=float(top.abs() / norm) if float(norm) > 0 else 0.0, own=own)

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        alpha, own = fitted(self, self.alpha), fitted(self, self.own)
        logits = linear_logits(outputs, readout)[:, own.to(outputs.z.device) > 0]
        scores: Tensor = alpha * _class_norms(self, outputs.z, own, readout) + energy(logits)
        return scores


@final
@dataclass(frozen=True)
class ScoreNear(Detector):
    """α · (½ r_k(u)/E r_k + ½ ‖s_own(z)‖/E ‖s_own‖) − logsumexp(g), with r_k the distance to the client's k-th nearest
    training feature u_i = space(z_i), s_own as in `ScoreOwn`, and α = |E max_c g_c|.

    With little noise the best score of the client's own features points to the nearest of them and is as long as the
    way there: ‖s(u)‖ → min_i ‖u − u_i‖/σ². So r_k stands for a score that no network had to learn, of one client and
    as fine as its features, where s_own is smooth and of everyone; the k-th instead of the nearest steadies it. Both
    live in the space of the score network. Means are over the client's training data, where no feature is its own
    neighbour. k as in KNN, and as there, the features stay where they are.
    """

    description: ClassVar[str] = "energy, the score of the client's classes, and the distance to its own features"
    paper: ClassVar[str] = "ours, after Sun et al. 2022"
    passes: ClassVar[int] = 1
    local: ClassVar[bool] = True
    needs_score: ClassVar[bool] = True

    k: int = setting(50, "which neighbour; at most half of the training features", ge=1)
    share: float = setting(0.5, "of the score; the rest is the distance", ge=0.0, le=1.0)
    sigma: float | None = setting(None, "noise level; without it the network's own default", gt=0.0)
    of_score: float | None = field(default=None, repr=False, compare=False)
    of_distance: float | None = field(default=None, repr=False, compare=False)
    own: Tensor | None = field(default=None, repr=False, compare=False)
    bank: Tensor | None = field(default=None, repr=False, compare=False)

    def applies(self, readout: Readout | None) -> bool:
        return readout is not None and readout.score_space is not None and readout.class_score is not None

    def statistics(self, outputs: Output, y: Tensor, readout: Readout) -> dict[str, Tensor]:
        logits = linear_logits(outputs, readout).detach().double()
        own = classes_of(y, logits)
        norms = _class_norms(self, outputs.z, own, readout)
        return {
            "n": norms.new_tensor(float(len(norms))), "max_logit": logits.amax(dim=1).sum(), "norm": norms.sum(),
            "own": own, "bank": self._space(outputs.z, readout),
        }  # fmt: skip

    def fit(self, total: Mapping[str, Tensor]) -> Self:
        n, top, norm, own = named_sums(self, total, "n", "max_logit", "norm", "own")
        bank = bank_of(self, total)
        some = bank[:: -(-len(bank) // SAMPLE)]
        others = min(place_of(self.k, bank) + 1, len(bank))  # the nearest of a training feature is itself
        reach, alpha = float(nearest(some, bank, others).mean()), float(top.abs() / n)
        return replace(
            self,
            of_score=self.share * alpha / float(norm / n) if float(norm) > 0 else 0.0,
            of_distance=(1 - self.share) * alpha / reach if reach > 0 else 0.0,
            own=own,
            bank=bank,
        )

    def _space(self, z: Tensor, readout: Readout | None) -> Tensor:
        if readout is None or readout.score_space is None:
            raise InputError("score_near needs a score network, but the model has none.")
        return readout.score_space(z).detach()

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        of_score, of_distance = fitted(self, self.of_score), fitted(self, self.of_distance)
        own, bank = fitted(self, self.own), fitted(self, self.bank)
        distances = nearest(self._space(outputs.z, readout), bank, place_of(self.k, bank))
        norms = _class_norms(self, outputs.z, own, readout)
        scores: Tensor = of_score * norms + of_distance * distances + energy(linear_logits(outputs, readout))
        return scores


def _class_norms(
    detector: ScoreOwn | ScoreNear, z: Tensor, classes: Tensor, readout: Readout | None
) -> Float[Tensor, " n"]:
    """The norms of the score of some classes."""
    if readout is None or readout.class_score is None:
        name = "score_own" if isinstance(detector, ScoreOwn) else "score_near"
        raise InputError(f"{name} needs a score network that knows classes, but the model has none.")
    at = () if detector.sigma is None else (detector.sigma,)
    norms: Tensor = readout.class_score(z, classes, *at).detach().double().norm(dim=1)
    return norms


@dataclass(frozen=True)
class ScoreSpanned(Detector, ABC):
    """‖s(z)‖/E‖s‖ + r(z)/E r: the paper's detector and the share out of the span, each in units of its mean.

    The score tells how far an image is from where classes are, the span which share of it points to where no image
    does. Neither asks the classifier, which is sure of many images that no class has. In the mean of r no image counts
    to the span that it is measured by: of few images each is within the span of all.
    """

    paper: ClassVar[str] = "ours"
    passes: ClassVar[int] = 2  # the second tells the means
    needs_score: ClassVar[bool] = True

    sigma: float = setting(0.1, "noise level of the span, as in span", gt=0.0)
    inverse: Tensor | None = field(default=None, repr=False, compare=False)
    images: float | None = field(default=None, repr=False, compare=False)
    of_score: float | None = field(default=None, repr=False, compare=False)
    of_span: float | None = field(default=None, repr=False, compare=False)

    def statistics(self, outputs: Output, y: Tensor, readout: Readout) -> dict[str, Tensor]:
        if self.inverse is None or self.images is None:
            return span_sums(outputs.z)
        norms, u = self._norms(outputs.z, readout), of_equal_length(outputs.z.detach().double())
        pulled = u @ self.inverse.to(u.device)
        # (B − uuᵀ/n)⁻¹u = B⁻¹u/(1 − uᵀB⁻¹u/n): what r would be, had u no part in B = M + σ²I.
        without = pulled.norm(dim=1) / (1 - (u * pulled).sum(dim=1) / self.images)
        return {"n": norms.new_tensor(float(len(norms))), "norm": norms.sum(), "share": without.sum()}

    def fit(self, total: Mapping[str, Tensor]) -> Self:
        if self.inverse is None:
            (n,) = named_sums(self, total, "n")
            return replace(self, inverse=span_inverse(self, total, self.sigma), images=float(n))
        n, norm, share = named_sums(self, total, "n", "norm", "share")
        weights = [float(n / size) if float(size) > 0 else 0.0 for size in (norm, share)]
        return replace(self, of_score=weights[0], of_span=weights[1])

    @property
    @abstractmethod
    def name(self) -> str:
        """What people call it."""

    def _norms(self, z: Tensor, readout: Readout | None) -> Tensor:
        if readout is None or readout.score is None:
            raise InputError(f"{self.name} needs a score network, but the model has none.")
        norms: Tensor = readout.score(z).detach().double().norm(dim=1)
        return norms

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        of_score, of_span = fitted(self, self.of_score), fitted(self, self.of_span)
        shares = out_of_span(outputs.z, fitted(self, self.inverse), self.sigma)
        scores: Tensor = of_score * self._norms(outputs.z, readout) + of_span * shares
        return scores


@final
@dataclass(frozen=True)
class ScoreSpan(ScoreSpanned):
    """The norm of the score and `SpanOwn`, in units of their means over the client's own training images.

    An image of a class that only others have is not like what the client has seen, and counts as OUT more often.
    """

    description: ClassVar[str] = "norm of the score network's output, and span_own"
    name = "score_span"
    local: ClassVar[bool] = True


@final
@dataclass(frozen=True)
class ScoreSpanAll(ScoreSpanned):
    """The norm of the score and `Span`, in units of their means over all training images.

    It asks whether an image is unlike anything that anybody has seen, and can answer where nobody says which client it
    is. Clients send what `Span` needs, then two sums.
    """

    description: ClassVar[str] = "norm of the score network's output, and span"
    name = "score_span_all"


@final
@dataclass(frozen=True)
class ScoreNorm(Detector):
    """‖s(z)‖₂, the paper's own detector (Eq. 9); `sigma` picks a noise level where the score network knows several."""

    description: ClassVar[str] = "norm of the score network's output"
    paper: ClassVar[str] = "Liao et al. 2024"
    needs_score: ClassVar[bool] = True

    sigma: float | None = setting(None, "noise level; without it the network's own default", gt=0.0)

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        if readout is None or readout.score is None:
            raise InputError("score_norm needs a score network, but the model has none.")
        s = readout.score(outputs.z) if self.sigma is None else readout.score(outputs.z, self.sigma)
        return s.double().square().sum(dim=1).sqrt()
