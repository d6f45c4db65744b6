"""Nets ↔ flat rows: loading a model is one copy into the row, reading it is one clone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import Tensor, nn

from .errors import InputError
from .learning import frozen_values
from .types import Nets, ServerState

if TYPE_CHECKING:
    from jaxtyping import Float, Int

SHARED, PERSONAL, FROZEN = "shared", "personal", "frozen"


class Slice(NamedTuple):
    """Where a value lies: in which row, from which offset, and in which shape."""

    row: str
    offset: int
    shape: torch.Size

    @property
    def stop(self) -> int:
        """The offset behind the last entry."""
        return self.offset + self.shape.numel()


@final
@dataclass(frozen=True)
class Layout:
    """Where each parameter and float buffer of some nets lies: in the row that travels, in the one that stays on its
    client, or in the one that no client changes: nets that only the server changes, and what was built frozen.

    Names and order are those of `nets.state_dict()`. Names of tied values have the same slice. Integer buffers (the
    counters of batch normalisation) are in neither row.
    """

    slices: Mapping[str, Slice]
    integer_names: tuple[str, ...]
    shared_size: int
    personal_size: int
    frozen_size: int = 0

    @classmethod
    def of(cls, nets: nn.ModuleDict, personal: Callable[[str], bool], frozen: Collection[str] = frozenset()) -> Layout:
        """The layout of `nets`: `personal(name)` says what stays on the client, `frozen` names the server's nets."""
        slices: dict[str, Slice] = {}
        integers: list[str] = []
        sizes = {SHARED: 0, PERSONAL: 0, FROZEN: 0}
        placed: dict[int, str] = {}
        built = frozen_values(nets)
        for name, value in _values(nets):
            if not value.is_floating_point() and not value.is_complex():
                integers.append(name)
                continue
            if value.dtype != torch.float32:
                raise InputError(f'"{name}" has the type {value.dtype}, but only torch.float32 is allowed in a model.')
            of_server = name.partition(".")[0] in frozen
            row = FROZEN if name in built else PERSONAL if personal(name) else FROZEN if of_server else SHARED
            twin = placed.setdefault(id(value), name)
            if twin != name:
                if slices[twin].row != row:
                    raise InputError(f'"{name}" and "{twin}" are tied: both must be personal, frozen or shared.')
                slices[name] = slices[twin]
                continue
            slices[name] = Slice(row, sizes[row], value.shape)
            sizes[row] = slices[name].stop
        return cls(slices, tuple(integers), sizes[SHARED], sizes[PERSONAL], sizes[FROZEN])

    @property
    def shared_names(self) -> tuple[str, ...]:
        """The names in the row that travels."""
        return tuple(name for name, place in self.slices.items() if place.row == SHARED)

    @property
    def personal_names(self) -> tuple[str, ...]:
        """The names in the row that stays on the client."""
        return tuple(name for name, place in self.slices.items() if place.row == PERSONAL)

    @property
    def frozen_names(self) -> tuple[str, ...]:
        """The names in the row that only the server changes."""
        return tuple(name for name, place in self.slices.items() if place.row == FROZEN)

    def net_ranges(self, row: str = SHARED) -> dict[str, tuple[int, int]]:
        """From where to where the values of each net lie in a row; those of a net stand together."""
        found: dict[str, tuple[int, int]] = {}
        end = 0
        for name, place in self.slices.items():
            if place.row == row and place.offset == end and place.stop > end:  # else tied to a value before it
                net = name.partition(".")[0]
                start, _ = found.get(net, (place.offset, 0))
                found[net] = (start, place.stop)
                end = place.stop
        return found

    @torch.no_grad()
    def pack_frozen(self, nets: nn.ModuleDict) -> Float[Tensor, " f"]:
        """A copy of the nets' values that only the server changes, as one row."""
        values = dict(_values(nets))
        device = next(iter(values.values())).device if values else None
        row = torch.empty(self.frozen_size, device=device)
        for name in self.frozen_names:
            self._view(row, name).copy_(values[name])
        return row

    def _view(self, row: Tensor, name: str) -> Tensor:
        place = self.slices[name]
        return row[place.offset : place.stop].view(place.shape)

    @torch.no_grad()
    def pack(self, nets: nn.ModuleDict) -> tuple[Float[Tensor, " p"], Float[Tensor, " q"], dict[str, Tensor]]:
        """Copies of the nets' values: the shared row, the personal row, the integer buffers."""
        values = dict(_values(nets))
        device = next(iter(values.values())).device if values else None
        shared = torch.empty(self.shared_size, device=device)
        personal = torch.empty(self.personal_size, device=device)
        for name, view in self.named(shared, personal).items():
            view.copy_(values[name])
        return shared, personal, self.integers(nets)

    def bind(
        self,
        nets: nn.ModuleDict,
        shared: Float[Tensor, " p"],
        personal: Float[Tensor, " q"],
        frozen: Float[Tensor, " f"] | None = None,
    ) -> None:
        """Make every parameter and float buffer of `nets` a view into the rows, whose values they take.

        Without `frozen`, nets that only the server changes keep values of their own.
        """
        # `.data` gives each view a version of its own: a step on one value must not look like one on its neighbours.
        named = self.named(shared, personal, frozen)
        fresh = {id(view): view.data for view in named.values()}
        views = {name: fresh[id(view)] for name, view in named.items()}
        for path, module in nets.named_modules():
            prefix = f"{path}." if path else ""
            for name, parameter in module._parameters.items():
                if parameter is not None and prefix + name in views:
                    parameter.data = views[prefix + name]
            for name, buffer in module._buffers.items():
                if buffer is not None and prefix + name in views:
                    module._buffers[name] = views[prefix + name]

    def integer_buffers(self, nets: nn.ModuleDict) -> dict[str, Tensor]:
        """The nets' integer buffers themselves; `bind` leaves them where they are."""
        values = dict(_values(nets))
        return {name: values[name] for name in self.integer_names}

    def integers(self, nets: nn.ModuleDict) -> dict[str, Tensor]:
        """Copies of the nets' integer buffers."""
        return {name: value.clone() for name, value in self.integer_buffers(nets).items()}

    def load_integers(self, nets: nn.ModuleDict, integers: Mapping[str, Tensor]) -> None:
        """Copy integer buffers into the nets."""
        if set(integers) != set(self.integer_names):
            different = ", ".join(sorted(set(integers) ^ set(self.integer_names)))
            raise InputError(f"the integer buffers of the model and of its stored state differ in: {different}.")
        for name, buffer in self.integer_buffers(nets).items():
            buffer.copy_(integers[name])

    def named(
        self,
        shared: Float[Tensor, " p"],
        personal: Float[Tensor, " q"] | None = None,
        frozen: Float[Tensor, " f"] | None = None,
    ) -> dict[str, Tensor]:
        """Views into the rows by name, tied names on the same view; values of a row that is not given are left out."""
        rows = {SHARED: _checked(shared, self.shared_size, SHARED)}
        if personal is not None:
            rows[PERSONAL] = _checked(personal, self.personal_size, PERSONAL)
        if frozen is not None:
            rows[FROZEN] = _checked(frozen, self.frozen_size, FROZEN)
        views: dict[Slice, Tensor] = {}
        named = {}
        for name, place in self.slices.items():
            if place.row in rows:
                if place not in views:
                    views[place] = rows[place.row][place.offset : place.stop].view(place.shape)
                named[name] = views[place]
        return named

    @cached_property
    def pooled_moments(self) -> tuple[Int[Tensor, " m"], Int[Tensor, " m"]]:
        """Where the running means and the running variances that belong to them lie in the shared row."""
        means, variances = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
        for name, mean in self.slices.items():
            owner, _, leaf = name.rpartition("running_")
            var = self.slices.get(f"{owner}running_var")
            if leaf == "mean" and var is not None and mean.row == var.row == SHARED:
                means.append(torch.arange(mean.offset, mean.stop))
                variances.append(torch.arange(var.offset, var.stop))
        return torch.cat(means), torch.cat(variances)

    def to_second_moments(self, row: Float[Tensor, "*n p"]) -> Float[Tensor, "*n p"]:
        """The row with each running variance replaced by var + mean², which clients may average exactly."""
        means, variances = (index.to(row.device) for index in self.pooled_moments)
        out = row.clone()
        out[..., variances] += row[..., means].square()
        return out

    def from_second_moments(self, row: Float[Tensor, "*n p"]) -> Float[Tensor, "*n p"]:
        """The row with each second moment replaced by max(moment − mean², 0): undoes `to_second_moments`."""
        means, variances = (index.to(row.device) for index in self.pooled_moments)
        out = row.clone()
        out[..., variances] = (row[..., variances] - row[..., means].square()).clamp(min=0)
        return out


@final
@dataclass(frozen=True)
class ServerNets:
    """Nets for a server that trains something itself: load a state into them, change them, store them in a state."""

    build: Callable[[], Nets]
    layout: Layout

    def load(self, state: ServerState) -> Nets:
        """Fresh nets with the values of a state; private values are those of the start."""
        nets = self.build()
        _, personal, _ = self.layout.pack(nets)
        self.layout.bind(nets, state.shared.clone(), personal, state.frozen.clone())
        self.layout.load_integers(nets, state.integers)
        return nets

    def store(self, state: ServerState, nets: Nets) -> ServerState:
        """The state with the values of these nets."""
        shared, _, integers = self.layout.pack(nets)
        return replace(state, shared=shared, frozen=self.layout.pack_frozen(nets), integers=integers)


def _values(nets: nn.ModuleDict) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers as the modules hold them: the same object under each name of a tied value."""
    for name, value in nets.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise InputError(f'"{name}" of the model is a {type(value).__name__}, but only tensors can travel.')
        yield name, value


def _checked(row: Tensor, size: int, name: str) -> Tensor:
    if row.shape != (size,) or row.dtype != torch.float32:
        raise InputError(
            f"the {name} row has shape {tuple(row.shape)} and type {row.dtype}, "
            f"but the model needs ({size},) and torch.float32."
        )
    return row
