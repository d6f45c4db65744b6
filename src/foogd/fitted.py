"""Detectors that learn from training features: sums over batches and clients in, a fitted detector out."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self, TypeVar, final

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from .detector import Detector, energy, linear_logits
from .errors import InputError
from .nets.score import of_equal_length
from .types import Output, Readout

if TYPE_CHECKING:
    from jaxtyping import Float, Int

T = TypeVar("T")

SMALLEST, LARGEST, STEP = 1e-8, 1e8, 0.0019
"""ReAct's histogram: magnitudes between these two in bins of 0.19 %, for each sign, and one bin for what is smaller."""

BINS = math.ceil(math.log(LARGEST / SMALLEST) / STEP)

NOISE = 1e-12
"""Variances below this share of the mean square are what rounding leaves of zero."""

DISTANCES = 2**24
"""How many distances the nearest-neighbour search holds at a time."""

SAMPLE = 1000
"""About how many training features say how far neighbours are apart: the mean of more would hardly differ."""


@final
@dataclass(frozen=True)
class ReAct(Detector):
    """The energy of g(min(z, c)), where c is a percentile of all training activations.

    The percentile comes from a histogram whose bins are fixed in advance, so that it does not depend on how the data is
    cut; c is right to 0.1 %, for magnitudes from 1e-8 to 1e8.
    """

    description: ClassVar[str] = "energy after clipping the features from above"
    paper: ClassVar[str] = "Sun et al. 2021"
    passes: ClassVar[int] = 1

    percentile: float = field(
        default=90.0, metadata={"ge": 0.0, "le": 100.0, "help": "percentile of the training activations to clip at"}
    )
    threshold: float | None = field(default=None, repr=False, compare=False)

    def applies(self, readout: Readout | None) -> bool:
        return readout is not None

    def statistics(self, outputs: Output, y: Tensor, readout: Readout) -> dict[str, Tensor]:
        return {"counts": histogram(outputs.z.detach())}

    def fit(self, total: Mapping[str, Tensor]) -> Self:
        (counts,) = _sums(self, total, "counts")
        return replace(self, threshold=histogram_percentile(counts, self.percentile))

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        threshold = _ready(self, self.threshold)
        return energy(_given(self, readout).head(outputs.z.clamp_max(threshold)))


@final
@dataclass(frozen=True)
class DICE(Detector):
    """The energy of (M∘W)z + b, where the mask M keeps the entries with the largest contribution E[z]_j · W_cj.

    Of m entries m − round(m·percentile/100) are kept, at least one. The head is the one that classifies.
    """

    description: ClassVar[str] = "energy with the strongest weights of the head alone"
    paper: ClassVar[str] = "Sun & Li 2022"
    passes: ClassVar[int] = 1

    percentile: float = field(
        default=90.0, metadata={"ge": 0.0, "lt": 100.0, "help": "percentage of the head's weights that are set to 0"}
    )
    mean: Tensor | None = field(default=None, repr=False, compare=False)
    kept: _Linear | None = field(default=None, repr=False, compare=False)

    def applies(self, readout: Readout | None) -> bool:
        return readout is not None and readout.weight is not None

    def statistics(self, outputs: Output, y: Tensor, readout: Readout) -> dict[str, Tensor]:
        z = outputs.z.detach().double()
        return {"n": z.new_tensor(float(len(z))), "sum": z.sum(dim=0)}

    def fit(self, total: Mapping[str, Tensor]) -> Self:
        n, first = _sums(self, total, "n", "sum")
        return replace(self, mean=first / n, kept=None)

    def prepared(self, readout: Readout) -> Self:
        head, mean = _linear(self, readout), _ready(self, self.mean)
        contribution = (mean.to(head.weight.device) * head.weight).flatten()
        k = max(len(contribution) - round(len(contribution) * self.percentile / 100), 1)
        order = contribution.argsort(descending=True, stable=True)
        mask = torch.zeros_like(contribution, dtype=torch.bool).scatter(0, order[:k], True)
        return replace(self, kept=head._replace(weight=torch.where(mask.view_as(head.weight), head.weight, 0.0)))

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        kept = self.kept or _ready(self, self.prepared(_given(self, readout)).kept)
        return energy(outputs.z.double() @ kept.weight.T + kept.bias)


@final
@dataclass(frozen=True)
class ViM(Detector):
    """α · ‖Rᵀ(z − u)‖ − logsumexp(g), with u = −W⁺b the point of no logits.

    R spans what the largest eigenvectors of E[(z−u)(z−u)ᵀ] leave over; eigenvectors without variance are never among
    those. α makes the residuals as large as the largest logits: |E max_c g_c| / E‖Rᵀ(z − u)‖ over the training data, in
    a second pass. A residual below 1e-6 of ‖z − u‖ counts as that much, so that α stays finite.
    """

    description: ClassVar[str] = "energy and the residual outside of the principal space"
    paper: ClassVar[str] = "Wang et al. 2022"
    passes: ClassVar[int] = 2

    share: float = field(
        default=0.5, metadata={"ge": 0.0, "lt": 1.0, "help": "share of the dimensions in the principal space"}
    )
    moments: _Moments | None = field(default=None, repr=False, compare=False)
    alpha: float | None = field(default=None, repr=False, compare=False)
    space: _Space | None = field(default=None, repr=False, compare=False)

    def applies(self, readout: Readout | None) -> bool:
        return readout is not None and readout.weight is not None

    def statistics(self, outputs: Output, y: Tensor, readout: Readout) -> dict[str, Tensor]:
        if self.moments is None:
            return moments(outputs.z)
        space = self._space(readout)
        shifted = outputs.z.detach().double() - space.origin
        return {
            "n": shifted.new_tensor(float(len(shifted))),
            "max_logit": linear_logits(outputs, readout).detach().double().amax(dim=1).sum(),
            "residual": (shifted @ space.residual).norm(dim=1).sum(),
            "length": shifted.norm(dim=1).sum(),
        }

    def fit(self, total: Mapping[str, Tensor]) -> Self:
        if self.moments is None:
            return replace(self, moments=_Moments.of(*_sums(self, total, "n", "sum", "outer")))
        _, top, residual, length = _sums(self, total, "n", "max_logit", "residual", "length")
        alpha = float(top.abs() / torch.maximum(residual, 1e-6 * length)) if float(length) != 0 else 0.0
        return replace(self, alpha=alpha, space=None)

    def prepared(self, readout: Readout) -> Self:
        head, known = _linear(self, readout), _ready(self, self.moments)
        origin = -_pseudo_inverse(head.weight) @ head.bias
        offset = known.mean.to(origin.device) - origin
        values, vectors = _eigen(known.covariance.to(origin.device) + torch.outer(offset, offset))
        # Among directions without variance the choice would be rounding's, so all of them belong to the residual.
        varied = int((values > NOISE * values.sum()).sum())
        principal = min(int(self.share * len(values)), varied)
        return replace(self, space=_Space(origin, vectors[:, : len(values) - principal]))

    def _space(self, readout: Readout | None) -> _Space:
        return self.space or _ready(self, self.prepared(_given(self, readout)).space)

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        alpha, space = _ready(self, self.alpha), self._space(readout)
        residual = (outputs.z.double() - space.origin) @ space.residual
        scores: Tensor = alpha * residual.norm(dim=1) + energy(linear_logits(outputs, readout))
        return scores


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

    sigma: float | None = field(
        default=None, metadata={"gt": 0.0, "help": "noise level; without it the network's own default"}
    )
    alpha: float | None = field(default=None, repr=False, compare=False)

    def statistics(self, outputs: Output, y: Tensor, readout: Readout) -> dict[str, Tensor]:
        norms = self._norms(outputs.z, readout)
        top = linear_logits(outputs, readout).detach().double().amax(dim=1)
        return {"n": norms.new_tensor(float(len(norms))), "max_logit": top.sum(), "norm": norms.sum()}

    def fit(self, total: Mapping[str, Tensor]) -> Self:
        _, top, norm = _sums(self, total, "n", "max_logit", "norm")
        return replace(self, alpha=float(top.abs() / norm) if float(norm) > 0 else 0.0)

    def _norms(self, z: Tensor, readout: Readout | None) -> Tensor:
        if readout is None or readout.score is None:
            raise InputError("score_energy needs a score network, but the model has none.")
        s = readout.score(z) if self.sigma is None else readout.score(z, self.sigma)
        norms: Tensor = s.detach().double().norm(dim=1)
        return norms

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        alpha = _ready(self, self.alpha)
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

    sigma: float | None = field(
        default=None, metadata={"gt": 0.0, "help": "noise level; without it the network's own default"}
    )
    alpha: float | None = field(default=None, repr=False, compare=False)
    own: Tensor | None = field(default=None, repr=False, compare=False)

    def applies(self, readout: Readout | None) -> bool:
        return readout is not None and readout.class_score is not None

    def statistics(self, outputs: Output, y: Tensor, readout: Readout) -> dict[str, Tensor]:
        logits = linear_logits(outputs, readout).detach().double()
        own = _classes_of(y, logits)
        norms = _class_norms(self, outputs.z, own, readout)
        top = logits.masked_fill(own == 0, -torch.inf).amax(dim=1)
        return {"n": norms.new_tensor(float(len(norms))), "max_logit": top.sum(), "norm": norms.sum(), "own": own}

    def fit(self, total: Mapping[str, Tensor]) -> Self:
        _, top, norm, own = _sums(self, total, "n", "max_logit", "norm", "own")
        return replace(self, alpha=float(top.abs() / norm) if float(norm) > 0 else 0.0, own=own)

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        alpha, own = _ready(self, self.alpha), _ready(self, self.own)
        logits = linear_logits(outputs, readout)[:, own.to(outputs.z.device) > 0]
        scores: Tensor = alpha * _class_norms(self, outputs.z, own, readout) + energy(logits)
        return scores


@final
@dataclass(frozen=True)
class KNN(Detector):
    """The distance of z/‖z‖ to its k-th nearest unit feature among the client's own training data.

    k = min(`k`, ⌊n/2⌋), at least 1. The features stay where they are: every client has its own detector.
    """

    description: ClassVar[str] = "distance to the client's k-th nearest training feature"
    paper: ClassVar[str] = "Sun et al. 2022"
    passes: ClassVar[int] = 1
    local: ClassVar[bool] = True

    k: int = field(default=50, metadata={"ge": 1, "help": "which neighbour; at most half of the training features"})
    bank: Tensor | None = field(default=None, repr=False, compare=False)

    def statistics(self, outputs: Output, y: Tensor, readout: Readout) -> dict[str, Tensor]:
        return {"bank": _unit(outputs.z.detach())}

    def fit(self, total: Mapping[str, Tensor]) -> Self:
        return replace(self, bank=_bank(self, total))

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        bank = _ready(self, self.bank)
        return _nearest(_unit(outputs.z), bank, _place(self.k, bank))


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

    k: int = field(default=50, metadata={"ge": 1, "help": "which neighbour; at most half of the training features"})
    share: float = field(default=0.5, metadata={"ge": 0.0, "le": 1.0, "help": "of the score; the rest is the distance"})
    sigma: float | None = field(
        default=None, metadata={"gt": 0.0, "help": "noise level; without it the network's own default"}
    )
    of_score: float | None = field(default=None, repr=False, compare=False)
    of_distance: float | None = field(default=None, repr=False, compare=False)
    own: Tensor | None = field(default=None, repr=False, compare=False)
    bank: Tensor | None = field(default=None, repr=False, compare=False)

    def applies(self, readout: Readout | None) -> bool:
        return readout is not None and readout.score_space is not None and readout.class_score is not None

    def statistics(self, outputs: Output, y: Tensor, readout: Readout) -> dict[str, Tensor]:
        logits = linear_logits(outputs, readout).detach().double()
        own = _classes_of(y, logits)
        norms = _class_norms(self, outputs.z, own, readout)
        return {
            "n": norms.new_tensor(float(len(norms))), "max_logit": logits.amax(dim=1).sum(), "norm": norms.sum(),
            "own": own, "bank": self._space(outputs.z, readout),
        }  # fmt: skip

    def fit(self, total: Mapping[str, Tensor]) -> Self:
        n, top, norm, own = _sums(self, total, "n", "max_logit", "norm", "own")
        bank = _bank(self, total)
        some = bank[:: -(-len(bank) // SAMPLE)]
        others = min(_place(self.k, bank) + 1, len(bank))  # the nearest of a training feature is itself
        reach, alpha = float(_nearest(some, bank, others).mean()), float(top.abs() / n)
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
        of_score, of_distance = _ready(self, self.of_score), _ready(self, self.of_distance)
        own, bank = _ready(self, self.own), _ready(self, self.bank)
        distances = _nearest(self._space(outputs.z, readout), bank, _place(self.k, bank))
        norms = _class_norms(self, outputs.z, own, readout)
        scores: Tensor = of_score * norms + of_distance * distances + energy(linear_logits(outputs, readout))
        return scores


def _classes_of(y: Tensor, logits: Tensor) -> Float[Tensor, " classes"]:
    """1 for the classes that are among these labels, 0 for all others."""
    return torch.bincount(y, minlength=logits.shape[1]).clamp_max(1).to(logits)


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


def _bank(detector: Detector, total: Mapping[str, Tensor]) -> Tensor:
    bank = total.get("bank")
    if bank is None or len(bank) == 0:
        name = type(detector).__name__
        raise InputError(f"{name} cannot be fitted: the client has no training features of its own.")
    return bank


def _place(k: int, bank: Tensor) -> int:
    """Which neighbour: where there are few features, the k-th would be among the farthest."""
    return max(min(k, len(bank) // 2), 1)


def _nearest(u: Float[Tensor, "n d"], bank: Float[Tensor, "m d"], k: int) -> Float[Tensor, " n"]:
    """The distance to the k-th nearest point of the bank."""
    bank = bank.to(u.device).double()
    squares = bank.square().sum(dim=1)
    found = []
    for part in torch.split(u.double(), max(DISTANCES // len(bank), 1)):
        distances = part.square().sum(dim=1, keepdim=True) + squares - 2 * part @ bank.T
        found.append(distances.kthvalue(k, dim=1).values.clamp_min(0.0).sqrt())
    return torch.cat(found)


@final
@dataclass(frozen=True)
class Mahalanobis(Detector):
    """min_c (z−μ_c)ᵀ Σ⁻¹ (z−μ_c) over the classes that were seen, with one Σ for all of them.

    Clients send Σz for each class, so the server learns how many images of each class they have.
    """

    description: ClassVar[str] = "distance to the nearest class mean, one covariance for all"
    paper: ClassVar[str] = "Lee et al. 2018"
    passes: ClassVar[int] = 1

    shrinkage: float = field(
        default=1e-6, metadata={"ge": 0.0, "le": 1.0, "help": "how far the covariance goes towards its mean variance"}
    )
    whitening: _Whitening | None = field(default=None, repr=False, compare=False)
    means: Tensor | None = field(default=None, repr=False, compare=False)

    def statistics(self, outputs: Output, y: Tensor, readout: Readout) -> dict[str, Tensor]:
        z = outputs.z.detach().double()
        members = one_hot(y.long(), outputs.logits.shape[1]).to(z)
        return {"counts": members.sum(dim=0), "sums": members.T @ z, "outer": z.T @ z}

    def fit(self, total: Mapping[str, Tensor]) -> Self:
        counts, sums, outer = _sums(self, total, "counts", "sums", "outer")
        n, seen = counts.sum(), counts > 0
        means = sums[seen] / counts[seen].unsqueeze(1)
        within = (outer - sums[seen].T @ means) / n
        whitening = _Whitening.of(sums.sum(dim=0) / n, within, outer.diagonal().mean() / n, self.shrinkage)
        return replace(self, whitening=whitening, means=whitening(means))

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        z, means = _ready(self, self.whitening)(outputs.z), _ready(self, self.means)
        # Differences, not scalar products: classes can be far apart compared with their width.
        exact = "donot_use_mm_for_euclid_dist"
        return torch.cdist(z, means.to(z.device), compute_mode=exact).square().amin(dim=1)


@final
@dataclass(frozen=True)
class Gaussian(Detector):
    """−log N(z; μ, Σ), minus the log density of one Gaussian for all training features, in nats.

    n, Σz and Σzzᵀ are all that clients send, and their sums give what pooled features would have given.
    """

    description: ClassVar[str] = "minus the log density of one Gaussian on the features"
    paper: ClassVar[str] = "after Sehwag et al. 2021"
    passes: ClassVar[int] = 1

    shrinkage: float = field(
        default=1e-6, metadata={"ge": 0.0, "le": 1.0, "help": "how far the covariance goes towards its mean variance"}
    )
    whitening: _Whitening | None = field(default=None, repr=False, compare=False)

    def statistics(self, outputs: Output, y: Tensor, readout: Readout) -> dict[str, Tensor]:
        return moments(outputs.z)

    def fit(self, total: Mapping[str, Tensor]) -> Self:
        n, first, outer = _sums(self, total, "n", "sum", "outer")
        mean, covariance = _Moments.of(n, first, outer)
        whitening = _Whitening.of(mean, covariance, outer.diagonal().mean() / n, self.shrinkage)
        return replace(self, whitening=whitening)

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        whitening = _ready(self, self.whitening)
        squared = whitening(outputs.z).square().sum(dim=1)
        return 0.5 * (squared + whitening.log_determinant + outputs.z.shape[1] * math.log(2 * math.pi))


@dataclass(frozen=True)
class _Spanned(Detector, ABC):
    """What `Span` and `SpanOwn` have in common: all but whose features they know."""

    paper: ClassVar[str] = "ours, after Wang et al. 2022"
    passes: ClassVar[int] = 1

    sigma: float = field(default=0.1, metadata={"gt": 0.0, "help": "noise level, where features have the length √d"})
    inverse: Tensor | None = field(default=None, repr=False, compare=False)

    def statistics(self, outputs: Output, y: Tensor, readout: Readout) -> dict[str, Tensor]:
        return _span_sums(outputs.z)

    def fit(self, total: Mapping[str, Tensor]) -> Self:
        return replace(self, inverse=_span_inverse(self, total))

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Float[Tensor, " n"]:
        return _out_of_span(outputs.z, _ready(self, self.inverse), self.sigma)


@final
@dataclass(frozen=True)
class Span(_Spanned):
    """‖(M + σ²I)⁻¹u‖ with u = √d z/‖z‖ and M = E uuᵀ over all training features: the norm of N(0, M + σ²I)'s score.

    A trained backbone lets the features of C classes span little more than C directions. Along a direction of spread λ
    a feature counts 1/(λ + σ²), so what is heard is the share of it that points out of the span of training features;
    a share, because all have one length. n and Σuuᵀ are all that clients send; no label is needed.
    """

    description: ClassVar[str] = "the share of a feature that points out of what training features span"


@final
@dataclass(frozen=True)
class SpanOwn(_Spanned):
    """`Span` of the client's own training features.

    A client that has few classes asks whether an image is like what it has seen itself, so images of classes that only
    others have count as OUT, as they do for KNN. What it keeps is one matrix, and no features.
    """

    description: ClassVar[str] = "span of the client's own training features"
    local: ClassVar[bool] = True


@dataclass(frozen=True)
class _ScoreSpanned(Detector, ABC):
    """‖s(z)‖/E‖s‖ + r(z)/E r: the paper's detector and the share out of the span, each in units of its mean.

    The score tells how far an image is from where classes are, the span which share of it points to where no image
    does. Neither asks the classifier, which is sure of many images that no class has. In the mean of r no image counts
    to the span that it is measured by: of few images each is within the span of all.
    """

    paper: ClassVar[str] = "ours"
    passes: ClassVar[int] = 2  # the second tells the means
    needs_score: ClassVar[bool] = True

    sigma: float = field(default=0.1, metadata={"gt": 0.0, "help": "noise level of the span, as in span"})
    inverse: Tensor | None = field(default=None, repr=False, compare=False)
    images: float | None = field(default=None, repr=False, compare=False)
    of_score: float | None = field(default=None, repr=False, compare=False)
    of_span: float | None = field(default=None, repr=False, compare=False)

    def statistics(self, outputs: Output, y: Tensor, readout: Readout) -> dict[str, Tensor]:
        if self.inverse is None or self.images is None:
            return _span_sums(outputs.z)
        norms, u = self._norms(outputs.z, readout), of_equal_length(outputs.z.detach().double())
        pulled = u @ self.inverse.to(u.device)
        # (B − uuᵀ/n)⁻¹u = B⁻¹u/(1 − uᵀB⁻¹u/n): what r would be, had u no part in B = M + σ²I.
        without = pulled.norm(dim=1) / (1 - (u * pulled).sum(dim=1) / self.images)
        return {"n": norms.new_tensor(float(len(norms))), "norm": norms.sum(), "share": without.sum()}

    def fit(self, total: Mapping[str, Tensor]) -> Self:
        if self.inverse is None:
            (n,) = _sums(self, total, "n")
            return replace(self, inverse=_span_inverse(self, total), images=float(n))
        n, norm, share = _sums(self, total, "n", "norm", "share")
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
        of_score, of_span = _ready(self, self.of_score), _ready(self, self.of_span)
        shares = _out_of_span(outputs.z, _ready(self, self.inverse), self.sigma)
        scores: Tensor = of_score * self._norms(outputs.z, readout) + of_span * shares
        return scores


@final
@dataclass(frozen=True)
class ScoreSpan(_ScoreSpanned):
    """The norm of the score and `SpanOwn`, in units of their means over the client's own training images.

    An image of a class that only others have is not like what the client has seen, and counts as OUT more often.
    """

    description: ClassVar[str] = "norm of the score network's output, and span_own"
    name = "score_span"
    local: ClassVar[bool] = True


@final
@dataclass(frozen=True)
class ScoreSpanAll(_ScoreSpanned):
    """The norm of the score and `Span`, in units of their means over all training images.

    It asks whether an image is unlike anything that anybody has seen, and can answer where nobody says which client it
    is. Clients send what `Span` needs, then two sums.
    """

    description: ClassVar[str] = "norm of the score network's output, and span"
    name = "score_span_all"


def _span_sums(z: Tensor) -> dict[str, Tensor]:
    u = of_equal_length(z.detach().double())
    return {"n": u.new_tensor(float(len(u))), "outer": u.T @ u}


def _span_inverse(detector: _Spanned | _ScoreSpanned, total: Mapping[str, Tensor]) -> Float[Tensor, "d d"]:
    """(M + σ²I)⁻¹."""
    n, outer = _sums(detector, total, "n", "outer")
    spread, axes = _eigen(outer / n)
    inverse: Tensor = axes / (spread + detector.sigma**2) @ axes.T
    return inverse


def _out_of_span(z: Tensor, inverse: Float[Tensor, "d d"], sigma: float) -> Float[Tensor, " n"]:
    """‖(M + σ²I)⁻¹u‖; features that are all 0 have no direction, and count as wholly out of the span."""
    u = of_equal_length(z.detach().double())
    norms: Tensor = (u @ inverse.to(z.device)).norm(dim=1)
    return torch.where((u == 0).all(dim=1), math.sqrt(z.shape[1]) / sigma**2, norms)


def moments(z: Float[Tensor, "n d"]) -> dict[str, Tensor]:
    """n, Σz and Σzzᵀ in float64: what a Gaussian needs, and nothing about a single image."""
    z = z.detach().double()
    return {"n": z.new_tensor(float(len(z))), "sum": z.sum(dim=0), "outer": z.T @ z}


def histogram(z: Float[Tensor, "n d"]) -> Int[Tensor, " bins"]:
    """How many entries are in each bin: negative ones from large to small, those near 0, positive ones."""
    z = z.float()
    level = (z.abs() / SMALLEST).log().div(STEP).floor() + 1  # 0: smaller than all bins
    signed = level.nan_to_num(0.0).clamp(0, BINS) * z.sign().nan_to_num(0.0)
    return torch.bincount((signed.long() + BINS).flatten(), minlength=2 * BINS + 1)


def histogram_percentile(counts: Int[Tensor, " bins"], percentile: float) -> float:
    """The percentile of the entries in a histogram, linear between neighbours in order; a bin is its middle."""
    upto = counts.cumsum(0)
    rank = (int(upto[-1]) - 1) * percentile / 100
    ends = [int(torch.searchsorted(upto, r, right=True)) - BINS for r in (math.floor(rank), math.ceil(rank))]
    low, high = (math.copysign(SMALLEST * math.exp((abs(i) - 0.5) * STEP), i) if i else 0.0 for i in ends)
    return low + (high - low) * (rank - math.floor(rank))


class _Linear(NamedTuple):
    """A linear head in float64; copies, because the nets behind a readout take another client's values later."""

    weight: Float[Tensor, "classes d"]
    bias: Float[Tensor, " classes"]


class _Moments(NamedTuple):
    mean: Float[Tensor, " d"]
    covariance: Float[Tensor, "d d"]

    @classmethod
    def of(cls, n: Tensor, first: Tensor, outer: Tensor) -> _Moments:
        mean = first / n
        return cls(mean, outer / n - torch.outer(mean, mean))


class _Space(NamedTuple):
    origin: Float[Tensor, " d"]
    residual: Float[Tensor, "d r"]


class _Whitening(NamedTuple):
    """z ↦ (z − centre) V Λ^(−1/2), whose squared length is the Mahalanobis distance to the centre."""

    centre: Float[Tensor, " d"]
    matrix: Float[Tensor, "d d"]
    log_determinant: float  # of the covariance

    @classmethod
    def of(cls, centre: Tensor, covariance: Tensor, mean_square: Tensor, shrinkage: float) -> _Whitening:
        """The covariance shrunk to (1−s)·Σ + s·tr(Σ)/d·I; where all variances are 0, distances are Euclidean."""
        values, vectors = _eigen(covariance)
        values = (1 - shrinkage) * values + shrinkage * values.mean()
        values = values.clamp_min(float(NOISE * mean_square)) if float(mean_square) != 0 else torch.ones_like(values)
        return cls(centre, vectors / values.sqrt(), float(values.log().sum()))

    def __call__(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        return (z.double() - self.centre.to(z.device)) @ self.matrix.to(z.device)


def _eigen(matrix: Float[Tensor, "d d"]) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"]]:
    """Eigenvalues from small to large, none below 0, and eigenvectors; all nan after a model has diverged."""
    if not bool(torch.isfinite(matrix).all()):
        return torch.full_like(matrix[0], math.nan), torch.full_like(matrix, math.nan)
    values, vectors = torch.linalg.eigh(matrix)
    return values.clamp_min(0.0), vectors


def _pseudo_inverse(weight: Float[Tensor, "classes d"]) -> Float[Tensor, "d classes"]:
    if not bool(torch.isfinite(weight).all()):
        return torch.full_like(weight.T, math.nan)
    inverse: Tensor = torch.linalg.pinv(weight)
    return inverse


def _unit(z: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """z/‖z‖, and 0 where z is 0."""
    length = z.double().norm(dim=1, keepdim=True)
    return (z / torch.where(length > 0, length, 1.0)).to(z.dtype)


def _linear(detector: Detector, readout: Readout) -> _Linear:
    if readout.weight is None:
        raise InputError(f"{type(detector).__name__} needs the weights of a linear head, but the model has none.")
    weight = readout.weight.detach().to(torch.float64, copy=True)
    if readout.bias is None:
        return _Linear(weight, weight.new_zeros(len(weight)))
    return _Linear(weight, readout.bias.detach().to(torch.float64, copy=True))


def _given(detector: Detector, readout: Readout | None) -> Readout:
    if readout is None:
        raise InputError(f"{type(detector).__name__} needs the model's head, but no readout was given.")
    return readout


def _ready(detector: Detector, value: T | None) -> T:
    if value is None:
        times = "once" if detector.passes == 1 else f"{detector.passes} times"
        raise InputError(f"{type(detector).__name__} was used before it was fitted: call fit {times} first.")
    return value


def _sums(detector: Detector, total: Mapping[str, Tensor], *names: str) -> list[Tensor]:
    """The statistics of these names, of which the first counts what was seen."""
    name = type(detector).__name__
    missing = [key for key in names if key not in total]
    if missing:
        raise InputError(f"{name} cannot be fitted: the statistics {', '.join(missing)} are missing.")
    found = [total[key] for key in names]
    if float(found[0].sum()) == 0:
        raise InputError(f"{name} cannot be fitted: there are no training features.")
    return found
