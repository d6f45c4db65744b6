"""One frozen configuration for everything that decides a result, besides the method's own settings."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Literal

from torch import nn

from .errors import InputError

Backbone = Callable[..., nn.Module]
AutoNumber = float | Literal["auto"]
AutoWhole = int | Literal["auto"]

WHERE = frozenset({"device", "engine", "slots"})
"""Settings that say where and how fast, not what."""


def setting(default: Any, help: str, **limits: Any) -> Any:
    """A dataclass field with a line of help and its limits: ge, gt, le, lt or choices.

    `added` marks a setting that older run folders do not name: they go on with its default. `group` names the
    group of settings that begins with this one.
    """
    return field(default=default, metadata={"help": help, **limits})


def limits_in_words(limits: Mapping[str, Any]) -> str:
    """The end of "a whole number at least 1"; empty where there are no limits."""
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    found = [f"{word} {limits[key]}" for key, word in words.items() if key in limits]
    return f" {' and '.join(found)}" if found else ""


def quoted(values: Iterable[Any]) -> str:
    """Values as in a program, with commas between."""
    return ", ".join(repr(value) for value in values)


def _within(value: Any, limits: Mapping[str, Any]) -> bool:
    return isinstance(value, str) or (
        ("ge" not in limits or value >= limits["ge"])
        and ("gt" not in limits or value > limits["gt"])
        and ("le" not in limits or value <= limits["le"])
        and ("lt" not in limits or value < limits["lt"])
    )


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _text(value: Any) -> bool:
    return isinstance(value, str)


# A field's type as it is written below → what a value of it is, and how it is called.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_whole, "a whole number"),
    "float": (_number, "a number"),
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "AutoNumber": (lambda value: _number(value) or value == "auto", "'auto' or a number"),
    "AutoWhole": (lambda value: _whole(value) or value == "auto", "'auto' or a whole number"),
    "str": (_text, "text"),
    "str | Backbone": (lambda value: _text(value) or callable(value), "text or a function"),
    "tuple[str, ...]": (_text, "a tuple of texts"),
    "tuple[int, ...]": (_whole, "a tuple of whole numbers"),
}


def _plain(value: Any) -> Any:
    return value.item() if type(value).__module__ == "numpy" else value


@dataclass(frozen=True)
class Config:
    """What a run needs besides its method: data, clients, local training, evaluation.

    A value that is of another type or beyond its limits raises InputError.
    """

    method: str = setting("fedavg+foogd", "name of a method, or file.py:Class", group="Method")
    seed: int = setting(0, "seed of weights, partition and every random draw", ge=0)

    data: str = setting("fashion", "IN data: a name, or file.py:fn", group="Images for training and tests")
    data_root: str = setting("data", "folder that data sets are read from")
    out: tuple[str, ...] = setting(("fashion_out", "digits"), "OUT data: names, or file.py:fn")
    corruptions: tuple[str, ...] = setting(
        ("brightness", "contrast", "gaussian_noise", "gaussian_blur"), "kinds of corruption in IN-C"
    )
    severities: tuple[int, ...] = setting((1, 2, 3, 4, 5), "severities of IN-C", ge=1, le=5)
    constants: str = setting("cifar", "strength of the corruptions", choices=("cifar", "tiny", "imagenet"))
    test_share: float = setting(0.2, "share held out where the data has no test part", gt=0.0, lt=1.0)

    sites: str = setting(
        "", "site of an image of yours: folder (SITE/CLASS/image), or a column of the table", group="Images of your own"
    )
    on_bad: str = setting("error", "what an image that cannot be read does", choices=("error", "skip"))
    leave_out: str = setting("", "domain that no client trains on, tested as IN-C; empty: none")

    clients: int = setting(10, "number of clients; 0 for by_domain: one a domain", ge=0, group="Clients")
    partition: str = setting("dirichlet", "how data is split", choices=("dirichlet", "pathological", "by_domain"))
    alpha: float = setting(0.5, "Dirichlet concentration: small is heterogeneous", gt=0.0)
    classes_per_client: int = setting(2, "classes of a client in the pathological split", ge=1)
    min_size: int = setting(2, "smallest number of training images of a client", ge=0)
    split_seed: AutoWhole = setting("auto", "seed of who has which images; auto: that of the run", ge=0, added=True)
    proportions: str = setting(
        "", "given shares of a Dirichlet split; authors: those of the authors' code; empty: drawn", added=True
    )
    participation: float = setting(1.0, "share of the clients that train in a round", gt=0.0, le=1.0)

    init: str = setting("", "run folder whose weights this run starts from; empty: from the seed", group="Training")
    backbone: str | Backbone = setting("cnn", "name of a backbone, or file.py:fn")
    rounds: int = setting(10, "communication rounds", ge=1)
    local_epochs: int = setting(1, "epochs of local training in a round", ge=0)
    batch_size: int = setting(64, "images a local step", ge=2)
    drop_last: bool = setting(False, "leave out the last, incomplete batch of an epoch")
    lr: float = setting(0.1, "learning rate of backbone and heads", gt=0.0)
    momentum: float = setting(0.9, "momentum of SGD", ge=0.0, lt=1.0)
    weight_decay: float = setting(5e-4, "weight decay", ge=0.0)
    keep_momentum: bool = setting(False, "clients keep the momentum of SGD between rounds")
    flip: bool = setting(False, "random horizontal flips, the same for all methods")
    crop: int = setting(0, "random crops after padding by so many pixels, the same for all methods", ge=0)
    bn_pool: str = setting("average", "how running variances are joined", choices=("average", "exact"))
    aggregation: str = setting(
        "mean", "how updates are joined: mean, median, trimmed, or by group as in 'mean,score=median'", added=True
    )
    trim: float = setting(
        0.1, "share that a trimmed mean leaves out at each end, one update or more; 0: none", ge=0.0, lt=0.5, added=True
    )
    update_bound: AutoNumber = setting(
        "auto", "how far an update may move the model; auto: 100 x its length; 0: no bound", ge=0.0, added=True
    )

    detectors: tuple[str, ...] = setting(
        ("msp", "energy", "score_norm", "score_span_all"), "detectors: names, or file.py:fn", group="Evaluation"
    )
    calibration: float = setting(
        0.0, "share of each client's training images set aside for thresholds; 0: no thresholds", ge=0.0, lt=1.0
    )
    eval_every: int = setting(0, "evaluate every so many rounds; 0: after the last one only", ge=0)
    eval_batch: int = setting(500, "images a pass in evaluation", ge=1)

    resident: str = setting("auto", "where images are kept", choices=("auto", "device", "host"), group="The machine")
    threads: int = setting(1, "threads of a run on the CPU; the last bits of a result depend on it", ge=1)
    device: str = setting("auto", "where to compute", choices=("auto", "cpu", "cuda"))
    engine: str = setting("auto", "graph: CUDA graphs, several clients at once", choices=("auto", "eager", "graph"))
    slots: int = setting(8, "clients that train at once on a GPU", ge=1)
    precision: str = setting(
        "auto", "of the backbone; auto: bf16 where steps are graphs, else fp32", choices=("auto", "fp32", "bf16")
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            value, limits = getattr(self, item.name), item.metadata
            is_one, kind = _KINDS[str(item.type)]
            many = kind.startswith("a tuple")
            values = value if many and isinstance(value, tuple | list) else (value,)
            right = many == isinstance(value, tuple | list) and all(is_one(v) and _within(v, limits) for v in values)
            if "choices" in limits:
                # In Python one of several GPUs may be named.
                numbered = item.name == "device" and right and re.fullmatch(r"cuda:\d+", value)
                right, kind = value in limits["choices"] or bool(numbered), f"one of {quoted(limits['choices'])}"
            if not right:
                raise InputError(
                    f"{item.name} = {value!r} is not allowed: it must be {kind}{limits_in_words(limits)}"
                )
            # A list could be changed later, and numpy's numbers are written down in another way.
            plain = tuple(map(_plain, values)) if many else _plain(value)
            object.__setattr__(self, item.name, plain)

    @property
    def images_seed(self) -> int:
        """The seed that decides which images each client has."""
        return self.seed if self.split_seed == "auto" else self.split_seed

    def digest(self, method_settings: Mapping[str, Any]) -> str:
        """A short name for (configuration, method settings); where the work is done is left out."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in WHERE}
        text = json.dumps({**values, **method_settings}, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()
