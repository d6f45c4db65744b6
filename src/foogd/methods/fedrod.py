"""FedRoD (Chen and Chao, ICLR 2022): a generic head for everyone, a private one for each client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..core.fields import setting
from ..core.types import Batch, Context, Nets, Readout, Rng, both_views
from ..functional import balanced_softmax
from .base import Method, joined_readout, linear_head, linear_readout


@final
@dataclass(frozen=True)
class FedRoD(Method):
    """Balanced softmax for the shared nets; a private head learns the client's own class balance on top of them."""

    views: int = setting(1, "2: losses on the augmented view too", choices=(1, 2))
    prior_smoothing: float = setting(0.0, "added to the class counts of the prior", ge=0.0)

    paper: ClassVar[str] = "Chen and Chao, ICLR 2022"
    keeps: ClassVar[str] = "a private head"
    passes: ClassVar[str] = "one more head"

    @property
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        return {"model": ("backbone", "head"), "personal": ("personal_head",)}

    def build(self, backbone: nn.Module, num_classes: int, rng: Rng) -> Nets:
        nets = super().build(backbone, num_classes, rng)
        private = linear_head(backbone, num_classes, rng("personal_head"))
        nn.init.zeros_(private.weight)  # personal = generic at the start
        nets["personal_head"] = private
        return nets

    def personal(self, name: str) -> bool:
        return name.startswith("personal_head.")

    def losses(self, nets: Nets, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        batch = both_views(batch)
        z, generic = batch.features, nets["head"](batch.features)
        return {
            "model": balanced_softmax(generic, batch.y, ctx.class_counts, smoothing=self.prior_smoothing),
            "personal": cross_entropy(generic.detach() + nets["personal_head"](z.detach()), batch.y),
        }

    def logits(self, nets: Nets, z: Tensor) -> Tensor:
        out: Tensor = nets["head"](z) + nets["personal_head"](z)
        return out

    def generic_logits(self, nets: Nets, z: Tensor) -> Tensor:
        out: Tensor = nets["head"](z)
        return out

    def readout(self, nets: Nets) -> Readout:
        return joined_readout(lambda z: self.logits(nets, z), nets["head"], nets["personal_head"])

    def generic_readout(self, nets: Nets) -> Readout:
        return linear_readout(lambda z: self.generic_logits(nets, z), nets["head"])
