"""The control of the score norm: what the published score network says with its last layer at zero.

foogd evaluate RUN --detector score_norm --detector benchmarks/control.py:Control

Then the score is that of one Gaussian, and its norm the distance from the mean of the features, at equal length and in
units of their spread. What the network has learnt is what the norm has ahead of this.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from foogd.detect import Detector


@final
@dataclass(frozen=True)
class Control(Detector):
    """The distance of a feature from the mean, in the space of the score network."""

    needs_score: ClassVar[bool] = True

    def __call__(self, outputs, readout=None):
        return readout.score_space(outputs.z).double().norm(dim=1)
