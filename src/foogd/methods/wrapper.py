"""A method around another one: every hook is the base's, and a wrapper says only what it changes."""

from __future__ import annotations

import inspect
from abc import ABC
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..core.types import Batch, Context, Nets
from .base import Method
from .fedavg import FedAvg


@dataclass(frozen=True)
class Wrapper(Method, ABC):
    """Forwards every hook of `Method` to `base`: `losses` here, all others below, so that none can be forgotten."""

    base: Method = field(default_factory=FedAvg)

    def losses(self, nets: Nets, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        return self.base.losses(nets, batch, ctx)


def _forwarded(name: str) -> Any:
    """The hook of that name, asked of the base: what it computes for a property, or what it returns for a call."""
    if isinstance(inspect.getattr_static(Method, name), property):
        return property(lambda wrapper: getattr(wrapper.base, name))

    def call(wrapper: Wrapper, *args: Any, **kwargs: Any) -> Any:
        return getattr(wrapper.base, name)(*args, **kwargs)

    call.__name__ = name
    return call


for _name, _hook in vars(Method).items():
    if not _name.startswith("_") and (callable(_hook) or isinstance(_hook, property)) and _name != "losses":
        setattr(Wrapper, _name, _forwarded(_name))
