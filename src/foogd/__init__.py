"""Federated learning that keeps classifying shifted data and detects what nobody trained on."""

from .config import Config
from .data import Federation, ImageStore
from .errors import InputError
from .evaluate import Row, evaluate
from .methods import FOOGD, FedAvg, FedRoD, Method
from .simulate import RoundResult, RunState, simulate

__version__ = "0.1.0"

__all__ = [
    "FOOGD",
    "Config",
    "FedAvg",
    "FedRoD",
    "Federation",
    "ImageStore",
    "InputError",
    "Method",
    "RoundResult",
    "Row",
    "RunState",
    "evaluate",
    "simulate",
]
