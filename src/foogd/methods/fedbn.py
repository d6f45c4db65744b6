"""FedBN (Li et al., ICLR 2021): batch normalisation stays on the client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.fields import setting
from ..core.types import Batch, Context, Nets, both_views
from .base import Method


@final
@dataclass(frozen=True)
class FedBN(Method):
    """FedAvg in which the backbone's batch normalisation, weights and statistics, never leaves its client.

    The layers are found by their class, whatever they are called. A client that the federation does not know has none
    of its own: it is tested with the mean of the clients' private values.
    """

    views: int = setting(1, "2: cross-entropy on the augmented view too", choices=(1, 2))

    paper: ClassVar[str] = "Li et al., ICLR 2021"
    travels: ClassVar[str] = "the model without batch normalisation, both ways"
    keeps: ClassVar[str] = "its batch normalisation: weights and statistics"

    @property
    def neutral_start(self) -> bool:
        return False  # statistics of nothing

    def private_names(self, nets: Nets) -> frozenset[str]:
        return frozenset(
            name
            # The same layer under two names is private under both.
            for path, module in nets["backbone"].named_modules(prefix="backbone", remove_duplicate=False)
            if isinstance(module, _BatchNorm)  # the base of torch's classes: 1d to 3d, lazy, synchronised
            for values in (module.named_parameters(path, recurse=False), module.named_buffers(path, recurse=False))
            for name, value in values
            if value.is_floating_point()  # counters of batches are in no row
        )

    def losses(self, nets: Nets, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        batch = both_views(batch)
        return {"model": cross_entropy(nets["head"](batch.features), batch.y)}
