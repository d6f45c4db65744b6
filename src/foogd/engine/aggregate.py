"""From client updates to the next server row: checks, and one definition of the weighted mean."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, final

import torch

from ..config import Config
from ..core.errors import InputError
from ..core.fields import AutoNumber
from ..core.flat import Layout
from ..core.types import ClientState, ServerState, Survey, Update

if TYPE_CHECKING:
    from ..methods.base import Method


FARTHEST = 100.0  # times the length of the row that an update starts from
LEAST_TRIMMED = 3  # updates: one is left out at each end


@final
class Bound:
    """How far an update may lie from the row that it starts from, known without the other updates; 0: no bound.

    "auto" is FARTHEST times the length of that row, where one shorter than 1 counts as 1: a model of zeros may learn.
    A running variance counts there by its root, for it grows with the square of the weights.
    """

    def __init__(self, limit: AutoNumber, layout: Layout, start: torch.Tensor) -> None:
        self._start, self._relative = start, limit == "auto"
        self._variances = layout.pooled_moments[1].to(start.device)
        self._limit = FARTHEST * max(1.0, self._length(start)) if limit == "auto" else float(limit)

    def refusal(self, update: Update) -> str | None:
        """Why an update is too long, or None."""
        distance = self._length(update.shared - self._start) if self._limit else 0.0
        if distance <= self._limit:
            return None
        said = f"it moved the model by {distance:.4g}; the bound is {self._limit:.4g}"
        return said + f", {FARTHEST:g} times the length of the model (update_bound = 'auto')" * self._relative

    def _length(self, row: torch.Tensor) -> float:
        values = row.double()  # the square of 3e38 is no float32
        if self._relative:
            values[self._variances] = values[self._variances].abs().sqrt()
        return float(torch.linalg.vector_norm(values))


def refusal(update: Update, server: ServerState) -> str | None:
    """Why an update may not count, or None: it must have the server's shape and only finite values."""
    if update.shared.shape != server.shared.shape:
        return f"its row has shape {tuple(update.shared.shape)}, the server's has {tuple(server.shared.shape)}"
    if update.shared.dtype != server.shared.dtype:
        return f"its row has dtype {update.shared.dtype}, the server's has {server.shared.dtype}"
    if not _all_finite(update.shared):
        bad = int((~torch.isfinite(update.shared)).sum())
        return f"{bad} of its {update.shared.numel()} values are not finite"
    for name, value in update.extra.items():
        if value.is_floating_point() and not _all_finite(value):
            return f"its upload {name!r} has values that are not finite"
    if not (math.isfinite(update.weight) and update.weight > 0):
        return f"its weight is {update.weight}"
    for name, loss in update.losses.items():
        if not math.isfinite(loss):
            return f"its loss {name!r} is {loss}"
    mine = {name: tuple(value.shape) for name, value in update.integers.items()}
    if server.integers and mine != {name: tuple(value.shape) for name, value in server.integers.items()}:
        return "its integer buffers are not those of the server"
    return None


def survey_refusal(answer: Survey) -> str | None:
    """Why a client's answer before training may not count, or None."""
    if not (math.isfinite(answer.weight) and answer.weight > 0):
        return f"its weight is {answer.weight}"
    for name, value in answer.sums.items():
        if value.is_floating_point() and not _all_finite(value):
            return f"its answer {name!r} has values that are not finite"
    return None


def _all_finite(values: torch.Tensor) -> bool:
    # A sum is finite only where every term is, and takes a tenth of the time; one that overflows proves nothing.
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def private_refusal(client: ClientState) -> str | None:
    """Why what a client would keep for itself may not be kept, or None."""
    kept = {"private values": client.personal} | client.memory | client.optimiser
    for name, value in kept.items():
        if value.is_floating_point() and not _all_finite(value):
            return f"its {name} are not finite"
    return None


class Fold(Protocol):
    """A rule that joins updates one at a time."""

    def add(self, update: Update) -> None: ...

    def finish(self, server: ServerState) -> ServerState: ...


@final
class WeightedMean:
    """The running weighted mean of rows in the order of `add`; its memory does not grow with the number of clients.

    m ← m + (row - m)·w/W, so that equal rows give exactly that row and a round without steps changes no bit.
    """

    def __init__(self, layout: Layout, *, exact_bn: bool = False) -> None:
        self._layout, self._exact_bn = layout, exact_bn
        self._mean: torch.Tensor | None = None
        self._integers: Mapping[str, torch.Tensor] = {}
        self._weight = 0.0

    def add(self, update: Update) -> None:
        row = self._layout.to_second_moments(update.shared) if self._exact_bn else update.shared
        self._weight += update.weight
        if self._mean is None:
            self._mean, self._integers = row.clone(), update.integers
        else:
            self._mean.lerp_(row, update.weight / self._weight)

    def finish(self, server: ServerState) -> ServerState:
        """The server with the mean as its row; unchanged but for the round where nothing was added."""
        if self._mean is None:
            return replace(server, round=server.round + 1)
        row = self._layout.from_second_moments(self._mean) if self._exact_bn else self._mean
        return replace(server, shared=row, integers=self._integers, round=server.round + 1)


@final
class Robust:
    """A rule of its own for each net: the weighted mean, the median or the trimmed mean of each value.

    Median and trimmed mean (Yin et al., ICML 2018) give every client one vote, whatever its weight. All rows are held
    until the end of the round.
    """

    def __init__(self, layout: Layout, rules: Mapping[str, str], *, trim: float, exact_bn: bool = False) -> None:
        self._mean, self._trim = WeightedMean(layout, exact_bn=exact_bn), trim
        self._rules = {places: rules[net] for net, places in layout.net_ranges().items() if rules[net] != "mean"}
        self._rows: list[torch.Tensor] = []

    def add(self, update: Update) -> None:
        self._mean.add(update)
        self._rows.append(update.shared)

    def finish(self, server: ServerState) -> ServerState:
        """The server with the joined row; unchanged but for the round where nothing was added."""
        joined = self._mean.finish(server)
        if not self._rows:
            return joined
        row = joined.shared.clone()
        for (start, stop), rule in self._rules.items():
            values = torch.stack([own[start:stop] for own in self._rows])
            row[start:stop] = median(values) if rule == "median" else trimmed_mean(values, self._trim)
        return replace(joined, shared=row)


def median(values: torch.Tensor) -> torch.Tensor:
    """The median over the first axis; of an even number the mean of the two in the middle."""
    ordered, n = values.sort(dim=0).values, len(values)
    return torch.lerp(ordered[(n - 1) // 2], ordered[n // 2], 0.5)


def trimmed_mean(values: torch.Tensor, trim: float) -> torch.Tensor:
    """The mean over the first axis without the ⌊trim·n⌋ largest and as many smallest of n values.

    Where trim is above 0, at least one is left out at each end: so n must be 3 or more.
    """
    if trim > 0 and len(values) < LEAST_TRIMMED:
        raise InputError(f"a trimmed mean of {len(values)} updates is not possible: it needs {LEAST_TRIMMED}")
    cut = max(int(trim * len(values)), int(trim > 0))
    return values.sort(dim=0).values[cut : len(values) - cut].mean(dim=0)


RULES = ("mean", "median", "trimmed")


def net_rules(text: str, groups: Mapping[str, tuple[str, ...]], nets: Iterable[str]) -> dict[str, str]:
    """The rule of each net from the setting `aggregation`: "median", or "mean,score=median" with names of groups."""
    words = [word.strip() for word in text.split(",")]
    plain = [word for word in words if "=" not in word]
    pairs = [word.partition("=") for word in words if "=" in word]
    chosen = {group.strip(): rule.strip() for group, _, rule in pairs}
    for rule in (*plain, *chosen.values()):
        if rule not in RULES or len(plain) > 1:
            raise InputError(
                f"aggregation = {text!r} is not allowed: it must be {', '.join(RULES)}, or one for each group as in "
                "'mean,score=median'"
            )
    for group in chosen:
        if group not in groups:
            raise InputError(f"aggregation = {text!r} names a group {group!r}: this method has {', '.join(groups)}")
    of_net = {net: rule for group, rule in chosen.items() for net in groups[group]}
    return {net: of_net.get(net, plain[0] if plain else "mean") for net in nets}


def least_updates(config: Config) -> int:
    """How many updates the rule of a run needs in a round."""
    rules = {word.rpartition("=")[2].strip() for word in config.aggregation.split(",")}
    return LEAST_TRIMMED if config.trim > 0 and "trimmed" in rules else 1


def make_fold(config: Config, method: Method, layout: Layout) -> Fold:
    """The rule of a run; the weighted mean alone needs no memory for each client."""
    exact = config.bn_pool == "exact"
    rules = net_rules(config.aggregation, method.groups, layout.net_ranges())
    if set(rules.values()) <= {"mean"}:
        return WeightedMean(layout, exact_bn=exact)
    return Robust(layout, rules, trim=config.trim, exact_bn=exact)


@final
class Drift:
    """How far the clients' models lie from their weighted mean: sqrt(Σ p_k ‖w_k - w̄‖²), one number a net.

    Statistics of batch normalisation are no weights and left out. Differences to the row that the clients started
    from are summed, so memory does not grow with their number and nothing is lost to cancellation.
    """

    def __init__(self, layout: Layout, start: torch.Tensor) -> None:
        self._start, self._weight = start, 0.0
        self._mean = torch.zeros_like(start)
        self._masks: dict[str, torch.Tensor] = {}
        for name in layout.shared_names:
            if not name.endswith((".running_mean", ".running_var")):
                net, place = name.partition(".")[0], layout.slices[name]
                mask = self._masks.setdefault(net, torch.zeros(len(start), dtype=torch.bool, device=start.device))
                mask[place.offset : place.stop] = True
        self._squares = {net: torch.zeros((), dtype=torch.float64, device=start.device) for net in self._masks}

    def add(self, update: Update) -> None:
        difference = update.shared - self._start
        self._weight += update.weight
        share = update.weight / self._weight
        self._mean.lerp_(difference, share)
        for net, square in self._square(difference).items():
            self._squares[net] = torch.lerp(self._squares[net], square, share)

    def finish(self) -> dict[str, float]:
        """The distances; none where nothing was added."""
        if not self._weight:
            return {}
        middle = self._square(self._mean)
        return {net: math.sqrt(max(0.0, float(self._squares[net] - middle[net]))) for net in self._masks}

    def _square(self, row: torch.Tensor) -> dict[str, torch.Tensor]:
        squares = row.square()
        return {net: squares.where(mask, 0.0).sum(dtype=torch.float64) for net, mask in self._masks.items()}
