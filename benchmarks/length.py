"""Detectors that join the length of a feature, or the energy, with `score_span`, which hears directions alone.

foogd evaluate RUN --detector benchmarks/length.py:added --detector benchmarks/length.py:times \\
    --detector benchmarks/length.py:with_energy --detector benchmarks/length.py:alone

What came of them is in docs/research.md, section 21: they are no detectors of the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self, final

from torch import Tensor

from foogd import InputError
from foogd.detect import Detector, ScoreSpan, energy
from foogd.detector import linear_logits
from foogd.types import Output, Readout


@final
@dataclass(frozen=True)
class Length(Detector):
    """s + r of `score_span` with ℓ = ‖z‖⁻¹/E‖z‖⁻¹: their sum, their product, or ℓ alone; or α(s + r)/2 + energy."""

    description: ClassVar[str] = "score_span, joined with the length of the feature or the energy"
    passes: ClassVar[int] = 2
    local: ClassVar[bool] = True
    needs_score: ClassVar[bool] = True

    how: str = field(default="added", metadata={"choices": ("added", "times", "energy", "alone"), "help": "what joins"})
    inner: ScoreSpan = field(default_factory=ScoreSpan, repr=False, compare=False)
    inverse: float | None = field(default=None, repr=False, compare=False)
    alpha: float | None = field(default=None, repr=False, compare=False)

    def statistics(self, outputs: Output, y: Tensor, readout: Readout) -> dict[str, Tensor]:
        top = linear_logits(outputs, readout).detach().double().amax(dim=1)
        own = {"top": top.sum(), "inverse": _inverse_length(outputs.z).sum()}
        return self.inner.statistics(outputs, y, readout) | own

    def fit(self, total: Mapping[str, Tensor]) -> Self:
        means = {name: float(total[name] / total["n"]) for name in ("top", "inverse")}
        return replace(self, inner=self.inner.fit(total), inverse=means["inverse"], alpha=abs(means["top"]))

    def __call__(self, outputs: Output, readout: Readout | None = None) -> Tensor:
        if self.inverse is None or self.alpha is None:
            raise InputError("Length was used before it was fitted: call fit 2 times first.")
        joined = self.inner(outputs, readout)
        length = _inverse_length(outputs.z) / self.inverse
        if self.how == "energy":
            return self.alpha * joined / 2 + energy(linear_logits(outputs, readout))
        return {"added": joined + length, "times": joined * length, "alone": length}[self.how]


def _inverse_length(z: Tensor) -> Tensor:
    return 1 / z.detach().double().norm(dim=1).clamp_min(1e-9)


added, times, with_energy, alone = (Length(how) for how in ("added", "times", "energy", "alone"))
