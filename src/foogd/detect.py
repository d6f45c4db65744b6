"""The detectors by the path that users' scripts name; they live in `foogd.detectors`."""

from .detectors.base import Detector as Detector
from .detectors.gaussians import Gaussian as Gaussian
from .detectors.gaussians import Mahalanobis as Mahalanobis
from .detectors.logits import MSP as MSP
from .detectors.logits import Energy as Energy
from .detectors.logits import GradNorm as GradNorm
from .detectors.logits import MaxLogit as MaxLogit
from .detectors.neighbours import KNN as KNN
from .detectors.pruning import ASH as ASH
from .detectors.pruning import DICE as DICE
from .detectors.pruning import ReAct as ReAct
from .detectors.registry import DETECTORS as DETECTORS
from .detectors.registry import resolve_detector as resolve_detector
from .detectors.score import ScoreEnergy as ScoreEnergy
from .detectors.score import ScoreNear as ScoreNear
from .detectors.score import ScoreNorm as ScoreNorm
from .detectors.score import ScoreOwn as ScoreOwn
from .detectors.score import ScoreSpan as ScoreSpan
from .detectors.score import ScoreSpanAll as ScoreSpanAll
from .detectors.subspace import Span as Span
from .detectors.subspace import SpanOwn as SpanOwn
from .detectors.subspace import ViM as ViM
