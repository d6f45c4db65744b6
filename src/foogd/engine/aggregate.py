"""From client updates to the next server row: checks, and one definition of the weighted mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol, final

import torch

from ..types import ClientState, ServerState, Survey, Update
from .arena import Layout


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
    mine = {name: tuple(value.shape) for name, value in update.integers.items()}
    if server.integers and mine != {name: tuple(value.shape) for name, value in server.integers.items()}:
        return "its integer buffers are not those of the server"
    return None


def survey_refusal(answer: Survey) -> str | None:
    """Why a client's answer before training may not count, or None."""
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
