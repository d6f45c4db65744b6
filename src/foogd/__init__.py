"""Federated learning that keeps classifying shifted data and detects what nobody trained on."""

from importlib.metadata import PackageNotFoundError, version

from .config import Config
from .core.errors import InputError
from .core.fields import setting
from .data import Federation, ImageStore
from .evaluation.evaluator import evaluate
from .evaluation.rows import Row
from .methods import (
    FOOGD,
    FOSTER,
    SCAFFOLD,
    AnchoredFOOGD,
    FedATOL,
    FedAvg,
    FedBN,
    FedICON,
    FedIIR,
    FedLN,
    FedProx,
    FedRoD,
    FedT3A,
    FedTHE,
    Method,
)
from .model import Model, Predictions, load
from .simulate import RoundResult, RunState, simulate

try:
    __version__ = version("foogd")
except PackageNotFoundError:  # run from its sources alone
    __version__ = "not installed"

__all__ = [
    "FOOGD",
    "FOSTER",
    "SCAFFOLD",
    "AnchoredFOOGD",
    "Config",
    "FedATOL",
    "FedAvg",
    "FedBN",
    "FedICON",
    "FedIIR",
    "FedLN",
    "FedProx",
    "FedRoD",
    "FedT3A",
    "FedTHE",
    "Federation",
    "ImageStore",
    "InputError",
    "Method",
    "Model",
    "Predictions",
    "RoundResult",
    "Row",
    "RunState",
    "evaluate",
    "load",
    "setting",
    "simulate",
]
