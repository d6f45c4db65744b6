"""FedT3A: the FedAvg model with test-time templates (T3A, Iwasawa and Matsuo, NeurIPS 2021)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from ..core.fields import setting
from ..core.types import Batch, Context, Nets, Output
from ..functional import entropy
from .base import Method
from .fedavg import FedAvg

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class Supports(NamedTuple):
    """Features that stand for classes, in the order of their arrival."""

    u: Float[Tensor, "s d"]
    label: Int[Tensor, " s"]
    entropy: Float[Tensor, " s"]


@final
@dataclass(frozen=True)
class FedT3A(Method):
    """FedAvg that classifies a test stream by prototypes of its own surest predictions, without gradients."""

    views: int = setting(1, "2: cross-entropy on the augmented view too", choices=(1, 2))
    filter: int = setting(100, "supports that a class keeps, the surest; PACS: 50", ge=1)
    test_batch: int = setting(128, "test images that join the supports at a time", ge=1)
    adapt: bool = setting(True, "false: plain evaluation, as FedAvg")

    paper: ClassVar[str] = "Iwasawa and Matsuo, NeurIPS 2021"
    passes: ClassVar[str] = "none; a test batch sorts its supports"

    @property
    def adapts(self) -> bool:
        return self.adapt

    def losses(self, nets: Nets, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        return FedAvg(self.views).losses(nets, batch, ctx)

    def predictor(self, nets: Nets, ctx: Context) -> Callable[[Tensor], Output]:
        if not self.adapt:
            return super().predictor(nets, ctx)
        head = nets["head"]
        assert isinstance(head, nn.Linear)
        supports = warm_up(head)

        def predict(x: Tensor) -> Output:
            nonlocal supports
            z = nets["backbone"](x)
            logits = self.logits(nets, z)
            # The batch joins before it is predicted: it sees itself.
            joined = Supports(
                torch.cat([supports.u, z]),
                torch.cat([supports.label, logits.argmax(1)]),
                torch.cat([supports.entropy, entropy(logits)]),
            )
            supports = surest(joined, limit=self.filter, classes=head.out_features)
            return Output(z, z @ prototypes(supports, classes=head.out_features).T)

        return predict


def warm_up(head: nn.Linear) -> Supports:
    """The rows of the head as the first supports, each of the class that the head gives it.

    A class whose row looks like another one has no support until an image of it comes: its prototype is 0 till then.
    """
    rows = head.weight.detach()
    logits: Tensor = head(rows)
    return Supports(rows, logits.argmax(1), entropy(logits))


def surest(supports: Supports, *, limit: int, classes: int) -> Supports:
    """In each class the `limit` supports of lowest entropy, in order of arrival; of two equals the earlier stays."""
    by_entropy = supports.entropy.argsort(stable=True)
    order = by_entropy[supports.label[by_entropy].argsort(stable=True)]
    count = torch.bincount(supports.label, minlength=classes)
    place = torch.arange(len(order), device=order.device)
    rank = torch.empty_like(order)
    rank[order] = place - (count.cumsum(0) - count)[supports.label[order]]
    return Supports(*(part[rank < limit] for part in supports))


def prototypes(supports: Supports, *, classes: int) -> Float[Tensor, "classes d"]:
    """c_j = v_j/‖v_j‖ with v_j = Σ u/‖u‖ over the supports of class j, and 0 where it has none."""
    sums = supports.u.new_zeros(classes, supports.u.shape[1])
    return normalize(sums.index_add_(0, supports.label, normalize(supports.u, dim=1)), dim=1)
