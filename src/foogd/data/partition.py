"""Partitions: how the images of one data set are dealt out to clients, every image exactly once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor

from ..core.errors import InputError
from ..core.random import derive_seed

if TYPE_CHECKING:
    from jaxtyping import Float, Int

AUTHORS = "authors"  # names the shares of the code that the authors of FOOGD published
_DRAWS = 1000  # proportions tried before a smallest size is called out of reach
_CLOSE = 1e-6  # how near to 1 the given shares of a class must add up


@final
class Partition(list[Tensor]):
    """One tensor of indices a client; `proportions` holds each client's share of each class, where there are such."""

    def __init__(self, indices: Iterable[Tensor], proportions: Float[Tensor, "clients classes"] | None = None) -> None:
        super().__init__(indices)
        self.proportions = proportions


def dirichlet(
    labels: Int[Tensor, " n"] | Sequence[int],
    *,
    clients: int,
    alpha: float,
    seed: int,
    proportions: Float[Tensor, "clients classes"] | None = None,
    min_size: int = 0,
) -> Partition:
    """Each class dealt out in shares from Dir(α·1) over the clients; given `proportions` replace the draw.

    Redraws until every client holds `min_size` images.
    """
    y = _labels(labels)
    if clients < 1:
        raise InputError(f"clients is {clients}; at least 1 is needed (0 is for the partition by_domain).")
    if not 0 < alpha < float("inf"):
        raise InputError(f"alpha is {alpha}; a Dirichlet distribution needs a positive number.")
    if clients * min_size > len(y):
        raise InputError(f"{clients} clients with min_size {min_size} need more images than the {len(y)} there are.")
    if proportions is not None:
        if len(proportions) != clients:
            raise InputError(f"the proportions have {len(proportions)} rows; {clients}, one a client, are needed.")
        partition = follow(labels, proportions, seed)
        smallest = min(len(indices) for indices in partition)
        if smallest < min_size:
            raise InputError(f"the given proportions leave a client with {smallest} images; min_size is {min_size}.")
        return partition
    totals = np.bincount(y)
    best = -1
    for draw in range(_DRAWS):
        rng = np.random.default_rng(derive_seed(seed, "dirichlet", draw))
        shares = rng.dirichlet(np.full(clients, alpha), size=len(totals)).T
        best = max(best, int(_counts(totals, shares, seed).sum(1).min()))
        if best >= min_size:
            return follow(labels, torch.from_numpy(np.ascontiguousarray(shares)), seed)
    raise InputError(
        f"no partition with alpha {alpha} gave each of {clients} clients min_size {min_size} images in {_DRAWS} draws; "
        f"the best had {best} in its smallest client."
    )


def given_proportions(name: str, *, clients: int, classes: int, alpha: float) -> Tensor | None:
    """The shares in a JSON file, one list a client, or by name those of the authors' code; None without a name."""
    if not name:
        return None
    if name == AUTHORS:
        return torch.from_numpy(np.random.default_rng(21).dirichlet(np.full(clients, alpha), classes).T.copy())
    said, wanted = f"proportions = {name!r}", f"{clients} lists, one a client, of {classes} shares, one a class"
    try:
        rows = json.loads(Path(name).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{said} is neither {AUTHORS!r} nor a JSON file that can be read: {error}.") from None
    lists = isinstance(rows, list) and all(isinstance(row, list) for row in rows)
    widths = [len(row) for row in rows] if lists else []
    if widths != [classes] * clients:
        found = f"{len(rows)} lists of {', '.join(map(str, sorted(set(widths))))}" if widths else "no list of lists"
        raise InputError(f"{said} has {found}; {wanted}, are needed.")
    for share in (share for row in rows for share in row):
        if type(share) not in (int, float) or not 0 <= share <= 1 + _CLOSE:
            raise InputError(f"{said} has {share!r}; a share is a number from 0 to 1.")
    totals = np.sum(rows, 0, dtype=float)
    label = int(np.abs(totals - 1).argmax())
    if abs(totals[label] - 1) > _CLOSE:
        raise InputError(f"{said}: the shares of class {label} add up to {totals[label]:g} over the clients, not to 1.")
    return torch.from_numpy(np.array(rows, dtype=float) / totals)


def pathological(
    labels: Int[Tensor, " n"] | Sequence[int], *, clients: int, classes_per_client: int, seed: int
) -> Partition:
    """Each client holds `classes_per_client` classes; the owners of a class share it evenly (McMahan et al. 2017)."""
    y = _labels(labels)
    classes = int(y.max()) + 1
    if clients < 1:
        raise InputError(f"clients is {clients}; at least 1 is needed (0 is for the partition by_domain).")
    if not 1 <= classes_per_client <= classes:
        raise InputError(f"classes_per_client is {classes_per_client}; it must be between 1 and the {classes} classes.")
    if clients * classes_per_client < classes:
        raise InputError(
            f"{clients} clients with {classes_per_client} classes each cannot hold {classes} classes; "
            f"at least {-(-classes // classes_per_client)} clients are needed."
        )
    rng = np.random.default_rng(derive_seed(seed, "pathological"))
    # Slots go round the shuffled classes: the classes of a client differ, and owners per class differ by at most one.
    slots = rng.permutation(classes)[np.arange(clients * classes_per_client) % classes]
    owns = np.zeros((clients, classes))
    owns[np.arange(clients)[:, None], rng.permutation(slots.reshape(clients, -1))] = 1
    return follow(labels, torch.from_numpy(owns / owns.sum(0)), seed)


def by_domain(domains: Int[Tensor, " n"] | Sequence[int]) -> Partition:
    """One client a domain, in the order of the domains' numbers."""
    numbers = _labels(domains)
    return Partition(torch.from_numpy(np.flatnonzero(numbers == domain)) for domain in np.unique(numbers))


def follow(
    labels: Int[Tensor, " n"] | Sequence[int], proportions: Float[Tensor, "clients classes"], seed: int
) -> Partition:
    """Each class shuffled and cut in the given proportions; largest remainders get what rounding down leaves."""
    y = _labels(labels)
    shares = torch.as_tensor(proportions).detach().cpu().double().numpy()
    totals = np.bincount(y, minlength=shares.shape[1])
    if len(totals) > shares.shape[1]:
        raise InputError(f"labels go up to {len(totals) - 1}; the proportions cover {shares.shape[1]} classes.")
    sums = shares.sum(0)[totals > 0]
    if not (shares >= 0).all() or not np.allclose(sums, 1, atol=1e-4):
        raise InputError("the proportions of a class must be 0 or more and add up to 1 over the clients.")
    counts = _counts(totals, shares, seed)
    rng = np.random.default_rng(derive_seed(seed, "shuffle"))
    held: list[list[Any]] = [[] for _ in range(len(shares))]
    for label in range(len(totals)):
        own = rng.permutation(np.flatnonzero(y == label))
        for client, part in enumerate(np.split(own, np.cumsum(counts[:-1, label]))):
            held[client].append(part)
    return Partition(
        (torch.from_numpy(np.sort(np.concatenate(parts))) for parts in held),
        torch.from_numpy(np.ascontiguousarray(shares)),
    )


def _labels(labels: Any) -> Any:
    y = labels.cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise InputError(f"labels have type {y.dtype} and shape {y.shape}; a list of whole numbers is needed.")
    if y.size == 0:
        raise InputError("there are no labels; a partition needs at least one image.")
    if y.min() < 0:
        raise InputError(f"labels go down to {y.min()}; they must be 0 or more.")
    return y


def _counts(totals: Any, shares: Any, seed: int) -> Any:
    exact = shares * totals
    counts = np.floor(exact + 1e-9).astype(np.int64)
    remainder = np.round(exact - counts, 9)
    # Equal remainders fall in random order: in client order the first clients would gain an image in every class.
    order = np.lexsort((np.random.default_rng(derive_seed(seed, "ties")).random(shares.shape), -remainder), axis=0)
    rank = np.argsort(order, axis=0)
    return counts + (rank < totals - counts.sum(0))
