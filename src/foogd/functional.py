"""Losses and kernels as pure functions: tensors in, tensor out, every draw from a generator that is passed in.

Nothing here looks at a value, so everything runs on `device="meta"`; CUDA graphs need the same. Kernels are in
float32 or better, also under autocast; distances are matrix products of centred features (TF32 off, torch's default).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .core.errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Float, Int

BANDWIDTH_FLOOR = 1e-12
"""The smallest bandwidth: 4/h² and the gradients of exp(−r²/h) stay finite in float32 when all features coincide."""


# ---------------------------------------------------------------------------------------------------------- kernels


def rbf(a: Float[Tensor, "n d"], b: Float[Tensor, "m d"], h: float | Float[Tensor, ""]) -> Float[Tensor, "n m"]:
    """The Gaussian kernel k(a, b) = exp(−‖a−b‖²/h), below Eq. 7 (the paper prints a plus; a kernel needs the minus)."""
    return torch.exp(-_squared_distances(*_centred(a, b)) / h)


def median_bandwidth(a: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """The median heuristic h = median_{i<j} ‖a_i−a_j‖² / log(n+1), detached.

    It is at least 10⁻³ · mean ‖a−mean a‖² + 10⁻¹², so that collapsed or clustered features keep a kernel.
    The median of an even number of values is the mean of the middle two.
    """
    (a,) = _centred(a.detach())
    return _median_bandwidth(a, _squared_distances(a, a))


def mmd(
    a: Float[Tensor, "n d"], b: Float[Tensor, "m d"], *, bandwidths: Sequence[float | Tensor] | Tensor | None = None
) -> Float[Tensor, ""]:
    """The squared maximum mean discrepancy, V-statistic: mean k(a,a') − 2 mean k(a,b) + mean k(b,b'), Eq. 7.

    It is the sum over kernels with the given bandwidths. Without them there are two, with h = ½ and 1 times the mean
    squared distance of two different rows of the union of a and b, detached.
    """
    a, b = _centred(a, b)
    if bandwidths is None:
        mean = _mean_squared_distance(a, b)
        bandwidths = (0.5 * mean, mean)
    aa, ab, bb = _squared_distances(a, a), _squared_distances(a, b), _squared_distances(b, b)
    total = a.new_zeros(())
    for h in bandwidths:
        total = total + torch.exp(-aa / h).mean() - 2 * torch.exp(-ab / h).mean() + torch.exp(-bb / h).mean()
    return total


# --------------------------------------------------------------------------------------- kernelised Stein discrepancy


def ksd(
    score: Callable[[Tensor], Tensor] | Float[Tensor, "n d"],
    z: Float[Tensor, "n d"],
    *,
    bandwidth: float | Float[Tensor, ""] | None = None,
    statistic: str = "v",
) -> Float[Tensor, ""]:
    """The kernelised Stein discrepancy of a sample z from the density whose score is given, Eq. 11.

    u(a,b) = k(a,b) · [s(a)·s(b) + (2/h)(s(a)−s(b))·(a−b) + 2d/h − (4/h²)‖a−b‖²]; `"v"` is the mean of u over all pairs
    (never negative, for training), `"u"` the mean over i ≠ j (unbiased, for reporting). `score` is a function or s(z)
    itself; without `bandwidth`, h is `median_bandwidth(z)`. Fewer than two rows give 0.
    """
    s = score if isinstance(score, Tensor) else score(z)
    if statistic not in _PAIR_MEANS:
        raise InputError(f'statistic is {statistic!r}, but only "v" and "u" exist.')
    n = len(z)
    if n < 2:
        return 0.0 * (z.sum() + s.sum())
    (a,), s = _centred(z), _at_least_float32(s)
    r2 = _squared_distances(a, a)
    h = _median_bandwidth(a.detach(), r2.detach()) if bandwidth is None else bandwidth
    return _PAIR_MEANS[statistic](_stein_kernel(_product(s, s), _score_alignment(s, s, a, a), r2, h, a.shape[1]))


# ------------------------------------------------------------------------------------------- score matching, sampling


def dsm(
    score: Callable[[Tensor], Tensor],
    z: Float[Tensor, "b d"],
    *,
    sigma: float | Float[Tensor, ""] | Float[Tensor, " b"],
    rng: torch.Generator | None,
) -> Float[Tensor, ""]:
    """Denoising score matching: the mean of ½‖σ·s(z+σv) + v‖² with v ~ N(0, I), which is Eq. 4 with weight σ².

    `sigma` is one number or one per sample. The minimiser is the score of the density of z + σv.
    """
    z, sigma = _at_least_float32(z), _per_sample(sigma)
    v = _noise(z, rng)
    return 0.5 * (sigma * score(z + sigma * v) + v).square().sum(dim=1, keepdim=True).mean()


def langevin(
    score: Callable[[Tensor], Tensor],
    z0: Float[Tensor, "b d"],
    *,
    step: float | Float[Tensor, ""],
    steps: int,
    rng: torch.Generator | None,
) -> Float[Tensor, "b d"]:
    """Langevin sampling z ← z + (ε/2)·s(z) + √ε·w with w ~ N(0, I), `steps` times from z0, Eq. 6.

    Differentiable through every step. With s(z) = −z the stationary variance is 1/(1−ε/4).
    """
    z = z0
    for _ in range(steps):
        z = z + 0.5 * step * score(z) + step**0.5 * _noise(z0, rng)
    return z


# --------------------------------------------------------------------------------------------------- classification


def balanced_softmax(
    logits: Float[Tensor, "b classes"],
    y: Int[Tensor, " b"],
    class_counts: Float[Tensor, " classes"] | Int[Tensor, " classes"],
    *,
    smoothing: float = 0.0,
) -> Float[Tensor, ""]:
    """Cross-entropy of logits + log(n_c + smoothing), the balanced softmax of FedRoD.

    A class without samples gets −∞, which is a gradient of exactly 0.
    """
    logits = _at_least_float32(logits)
    counts = class_counts.to(logits.dtype) + smoothing
    # A constant added to the prior leaves the loss as it is; with the largest count as the unit it is exactly 0 for
    # uniform counts of any size, so that the loss is cross-entropy bit for bit.
    return F.cross_entropy(logits + torch.log(counts / counts.max()), y)


def logit_norm(logits: Float[Tensor, "b classes"], y: Int[Tensor, " b"], *, tau: float) -> Float[Tensor, ""]:
    """Cross-entropy of v / (τ(‖v‖ + 10⁻⁷)) for logits v (Wei et al. 2022)."""
    logits = _at_least_float32(logits)
    norm = torch.linalg.vector_norm(logits, dim=1, keepdim=True)
    return F.cross_entropy(logits / (tau * (norm + 1e-7)), y)


def outlier_exposure(logits: Float[Tensor, "b classes"]) -> Float[Tensor, ""]:
    """Cross-entropy to the uniform distribution, the mean of logsumexp(g) − mean_c g_c (Hendrycks et al. 2019).

    Its minimum is log C, at equal logits.
    """
    logits = _at_least_float32(logits)
    return (torch.logsumexp(logits, dim=1) - logits.mean(dim=1)).mean()


def entropy(logits: Float[Tensor, "b classes"]) -> Float[Tensor, " b"]:
    """The entropy of the softmax of each sample, H = −Σ_c p_c log p_c; a logit of −∞ counts as 0, as in the limit."""
    log_p = torch.log_softmax(_at_least_float32(logits), dim=1)
    p = log_p.exp()
    # 0·∞ is no number, in the gradient too, so the logarithm is replaced where p is 0.
    return -(p * log_p.masked_fill(p == 0, 0.0)).sum(dim=1)


def head_gradient(
    z: Float[Tensor, "b d"], logits: Float[Tensor, "b classes"], y: Int[Tensor, " b"]
) -> tuple[Float[Tensor, "classes d"], Float[Tensor, " classes"]]:
    """The gradient of the mean cross-entropy for the weight and the bias of a linear head with these logits.

    ∂W = (p − onehot(y))ᵀ z / B and ∂b = Σ_i (p_i − onehot(y_i)) / B, differentiable with respect to z and the logits.
    """
    z, logits = _at_least_float32(z), _at_least_float32(logits)
    target = y[:, None] == torch.arange(logits.shape[1], device=y.device)
    error = (torch.softmax(logits, dim=1) - target.to(logits.dtype)) / len(z)
    return _product(error.T, z.T), error.sum(dim=0)


# ----------------------------------------------------------------------------------------------------------- contrast


def supcon(u: Float[Tensor, "n d"], y: Int[Tensor, " n"], *, temperature: float) -> Float[Tensor, ""]:
    """The supervised contrastive loss (Khosla et al., NeurIPS 2020, the sum over positives outside the logarithm).

    −1/|A| Σ_{i∈A} 1/|P(i)| Σ_{p∈P(i)} log( exp(u_i·u_p/T) / Σ_{a≠i} exp(u_i·u_a/T) ) for rows u scaled to length 1;
    P(i) are the other rows with the label of i, and A the rows where there is one. Without any the loss is 0.
    """
    n = len(u)
    if n < 2:
        return 0.0 * _at_least_float32(u).sum()
    unit = _unit(_at_least_float32(u))
    similarity = _product(unit, unit) / temperature
    itself = torch.eye(n, dtype=torch.bool, device=u.device)
    positive = (y[:, None] == y) & ~itself
    count = positive.sum(dim=1)
    normaliser = torch.logsumexp(similarity.masked_fill(itself, -math.inf), dim=1)
    mean = torch.where(positive, similarity, 0.0).sum(dim=1) / count.clamp_min(1)
    return torch.where(count > 0, normaliser - mean, 0.0).sum() / (count > 0).sum().clamp_min(1)


def simclr(u: Float[Tensor, "n d"], u_hat: Float[Tensor, "n d"], *, temperature: float) -> Float[Tensor, ""]:
    """`supcon` without labels: the only positive of a row is its other view (NT-Xent, Chen et al., ICML 2020)."""
    return supcon(torch.cat([u, u_hat]), torch.arange(len(u), device=u.device).repeat(2), temperature=temperature)


# ------------------------------------------------------------------------------------------------------ shared parts


def _at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _autocast_off(device: str) -> AbstractContextManager[object]:
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def _unit(u: Tensor) -> Tensor:
    """Rows scaled to length 1; a row of zeros stays as it is, with a gradient of ordinary size."""
    norm = torch.linalg.vector_norm(u, dim=1, keepdim=True)
    return u / torch.where(norm > 1e-12, norm, 1.0)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """All inner products a_i·b_j, in the precision of a and b even where autocast would lower it."""
    with _autocast_off(a.device.type):
        return a @ b.T


def _centred(*samples: Tensor) -> tuple[Tensor, ...]:
    """The samples less their common mean: distances stay the same, but their matrix product loses no digits."""
    samples = tuple(_at_least_float32(sample) for sample in samples)
    mean = torch.cat(samples).detach().mean(dim=0)
    return tuple(sample - mean for sample in samples)


def _squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """‖a_i−b_j‖² = ‖a_i‖² + ‖b_j‖² − 2 a_i·b_j, for centred a and b."""
    return (a.square().sum(dim=1)[:, None] + b.square().sum(dim=1) - 2 * _product(a, b)).clamp_min(0.0)


def _mean_squared_distance(a: Tensor, b: Tensor) -> Tensor:
    """The mean of ‖u_i−u_j‖² over i ≠ j in the union of centred a and b: 2/(N−1) · Σ‖u_i‖², detached."""
    spread = a.detach().square().sum() + b.detach().square().sum()
    return (2 * spread / max(len(a) + len(b) - 1, 1)).clamp_min(BANDWIDTH_FLOOR)


def _median_bandwidth(a: Tensor, r2: Tensor) -> Tensor:
    """`median_bandwidth` from centred features and their squared distances, both detached."""
    n = len(a)
    floor = 1e-3 * a.square().sum(dim=1).mean() + BANDWIDTH_FLOOR
    if n < 2:
        return floor
    # Off the diagonal each pair occurs twice, which does not change the median.
    pairs = r2.flatten()[1:].view(n - 1, n + 1)[:, :-1]
    median = 0.5 * (pairs.median() - (-pairs).median())  # torch's median is the lower of the middle two
    return torch.maximum(median / math.log(n + 1), floor)


def _score_alignment(p: Tensor, q: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """(p_i−q_j)·(a_i−b_j) for all pairs, without a tensor of pairs times dimensions."""
    return (p * a).sum(dim=1)[:, None] + (q * b).sum(dim=1) - _product(p, b) - _product(a, q)


def _stein_kernel(scores: Tensor, alignment: Tensor, r2: Tensor, h: float | Tensor, d: int) -> Tensor:
    return torch.exp(-r2 / h) * (scores + (2 / h) * alignment + 2 * d / h - (4 / h**2) * r2)


def _mean_of_all_pairs(u: Tensor) -> Tensor:
    return u.mean()


def _mean_of_distinct_pairs(u: Tensor) -> Tensor:
    n = len(u)
    return (u.sum() - u.diagonal().sum()) / (n * (n - 1))


_PAIR_MEANS: dict[str, Callable[[Tensor], Tensor]] = {"v": _mean_of_all_pairs, "u": _mean_of_distinct_pairs}


def _noise(z: Tensor, rng: torch.Generator | None) -> Tensor:
    return torch.randn(z.shape, generator=rng, device=z.device, dtype=z.dtype)


def _per_sample(sigma: float | Tensor) -> float | Tensor:
    return sigma.reshape(-1, 1) if isinstance(sigma, Tensor) else sigma
