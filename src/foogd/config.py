"""One frozen configuration for everything that decides a result, besides the method's own settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from .core.fields import AutoNumber, AutoWhole, Role, check, setting

Backbone = Callable[..., nn.Module]


@dataclass(frozen=True)
class Config:
    """What a run needs besides its method: data, clients, local training, evaluation.

    A value that is of another type or beyond its limits raises InputError.
    """

    method: str = setting(
        "fedavg+foogd",
        "name of a method, or file.py:Class",
        group="Method",
        words="a name from foogd methods, also with +foogd, or file.py:Class",
        role=Role.LABEL,
        plugin=True,
    )
    seed: int = setting(0, "seed of weights, partition and every random draw", ge=0, role=Role.LABEL)

    data: str = setting(
        "fashion",
        "IN data: a name, or file.py:fn",
        group="Images for training and tests",
        words="a name from foogd data list, a folder, an .npz or .csv file, or file.py:fn",
        role=Role.SPLIT,
        plugin=True,
    )
    data_root: str = setting("data", "folder that data sets are read from", role=Role.LABEL, path=True)
    out: tuple[str, ...] = setting(
        ("fashion_out", "digits"),
        "OUT data: names, or file.py:fn",
        words="a list of the same as for data",
        role=Role.TEST,
        plugin=True,
    )
    corruptions: tuple[str, ...] = setting(
        ("brightness", "contrast", "gaussian_noise", "gaussian_blur"), "kinds of corruption in IN-C", role=Role.TEST
    )
    severities: tuple[int, ...] = setting((1, 2, 3, 4, 5), "severities of IN-C", ge=1, le=5, role=Role.TEST)
    constants: str = setting(
        "cifar", "strength of the corruptions", choices=("cifar", "tiny", "imagenet"), role=Role.TEST
    )
    test_share: float = setting(0.2, "share held out where the data has no test part", gt=0.0, lt=1.0, role=Role.SPLIT)

    sites: str = setting(
        "",
        "site of an image of yours: folder (SITE/CLASS/image), or a column of the table",
        group="Images of your own",
        role=Role.SPLIT,
    )
    on_bad: str = setting("error", "what an image that cannot be read does", choices=("error", "skip"), role=Role.SPLIT)
    leave_out: str = setting("", "domain that no client trains on, tested as IN-C; empty: none", role=Role.SPLIT)

    clients: int = setting(
        10, "number of clients; 0 for by_domain: one a domain", ge=0, group="Clients", role=Role.SPLIT
    )
    partition: str = setting(
        "dirichlet", "how data is split", choices=("dirichlet", "pathological", "by_domain"), role=Role.SPLIT
    )
    alpha: float = setting(0.5, "Dirichlet concentration: small is heterogeneous", gt=0.0, role=Role.SPLIT)
    classes_per_client: int = setting(2, "classes of a client in the pathological split", ge=1, role=Role.SPLIT)
    min_size: int = setting(2, "smallest number of training images of a client", ge=0, role=Role.SPLIT)
    split_seed: AutoWhole = setting(
        "auto", "seed of who has which images; auto: that of the run", ge=0, added=True, role=Role.SPLIT
    )
    proportions: str = setting(
        "",
        "given shares of a Dirichlet split; authors: those of the authors' code; empty: drawn",
        words="a JSON file, or authors",
        added=True,
        role=Role.SPLIT,
        path=True,
    )
    participation: float = setting(1.0, "share of the clients that train in a round", gt=0.0, le=1.0)

    init: str = setting(
        "",
        "run folder whose weights this run starts from; empty: from the seed",
        group="Training",
        role=Role.LABEL,
        path=True,
    )
    backbone: str | Backbone = setting("cnn", "name of a backbone, or file.py:fn", plugin=True)
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
        ("msp", "energy", "score_norm", "score_span_all"),
        "detectors: names, or file.py:fn",
        group="Evaluation",
        words="a list of names from foogd detectors, or file.py:fn",
        role=Role.TEST,
        plugin=True,
    )
    calibration: float = setting(
        0.0,
        "share of each client's training images set aside for thresholds; 0: no thresholds",
        ge=0.0,
        lt=1.0,
        role=Role.SPLIT,
    )
    eval_every: int = setting(0, "evaluate every so many rounds; 0: after the last one only", ge=0, role=Role.TEST)
    eval_batch: int = setting(500, "images a pass in evaluation", ge=1, role=Role.TEST)

    resident: str = setting(
        "auto", "where images are kept", choices=("auto", "device", "host"), group="The machine", role=Role.PLACE
    )
    threads: int = setting(
        1, "threads of a run on the CPU; the last bits of a result depend on it", ge=1, role=Role.LABEL
    )
    device: str = setting(
        "auto", "where to compute", choices=("auto", "cpu", "cuda"), also=r"cuda:\d+", role=Role.PLACE
    )
    engine: str = setting(
        "auto", "graph: CUDA graphs, several clients at once", choices=("auto", "eager", "graph"), role=Role.PLACE
    )
    slots: int = setting(8, "clients that train at once on a GPU", ge=1, role=Role.PLACE)
    precision: str = setting(
        "auto",
        "of the backbone; auto: bf16 where steps are graphs, else fp32",
        choices=("auto", "fp32", "bf16"),
        role=Role.PLACE,
    )

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def of_role(cls, *roles: Role) -> frozenset[str]:
        """The names of the settings that decide this."""
        return frozenset(item.name for item in fields(cls) if item.metadata["role"] in roles)

    @property
    def images_seed(self) -> int:
        """The seed that decides which images each client has."""
        return self.seed if self.split_seed == "auto" else self.split_seed

    def digest(self, method_settings: Mapping[str, Any]) -> str:
        """A short name for (configuration, method settings); where the work is done is left out."""
        place = self.of_role(Role.PLACE)
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in place}
        values |= {"resident": "auto", "precision": "auto"}  # they counted once: names of runs stay
        text = json.dumps({**values, **method_settings}, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()
