"""The numbers that the paper prints (Liao et al., NeurIPS 2024), and in what a run differs from the settings there."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, final

from ..config import Config
from ..core.errors import InputError
from ..core.fields import Role
from ..data.federation import LEFT_OUT
from ..data.partition import AUTHORS
from ..methods import OURS, AnchoredFOOGD

PAPER_PRESETS = ("cifar10", "cifar100", "tinyimagenet", "pacs")
PRINTED_RATE = 0.1  # for FedAvg; the presets of CIFAR have another one at alpha 0.1
DOMAINS = frozenset({"art_painting", "cartoon", "photo", "sketch"})  # of PACS, each left out once
NOTE = (
    "Published: Liao et al., NeurIPS 2024, in %. IN-C is brightness and OUT is LSUN-C in its main tables. The public "
    "code exchanges IN and OUT in the FPR95 of MSP, so a published FPR95 of a method without FOOGD may be another "
    "quantity; AUROC is not affected."
)
OF_NODES = "on Flower the images and their split are those of the nodes, whatever the settings say"

# What may differ from the preset without making the published number another one: how much is measured, and where.
_FREE = Config.of_role(Role.PLACE, Role.TEST, Role.LABEL) - {"severities", "constants", "init"} | {
    "split_seed", "alpha", "leave_out",
}  # fmt: skip
# The ablations of the paper, which have published numbers of their own.
_VARIANTS: dict[str, tuple[str, Any]] = {
    "train_base=false": ("train_base", False),
    "lambda_m=0": ("lambda_m", 0.0),
    "lambda_a=0": ("lambda_a", 0.0),
}


@final
@dataclass(frozen=True)
class Published:
    """A printed number in %, with its deviation over seeds where that is printed too."""

    mean: float
    deviation: float | None
    table: str


@cache
def _entries() -> dict[tuple[str, ...], Published]:
    text = (resources.files("foogd.tables") / "paper.csv").read_text()
    found: dict[tuple[str, ...], Published] = {}
    for line in csv.DictReader(text.splitlines()):
        key = tuple(line[name] for name in _KEY)
        value = Published(
            float(line["mean"]), float(line["deviation"]) if line["deviation"] else None, line["table"]
        )  # fmt: skip
        found.setdefault(key, value)  # the main tables come first; others print some cells differently
    return found


_KEY = (
    "data", "alpha", "leave_out", "method", "variant", "detector", "split", "dataset", "corruption", "metric",
)  # fmt: skip


def published(
    settings: Mapping[str, Any], *, metric: str, split: str, dataset: str = "", detector: str = "", corruption: str = ""
) -> Published | None:
    """The printed number for a run with these settings.

    `corruption` may be "all", the mean over the 19 kinds, and so may `leave_out`: the mean over the four domains.
    """
    data = str(settings.get("data", ""))
    if data not in PAPER_PRESETS:
        return None
    pacs = data == "pacs"
    key = (
        data,
        "" if pacs else str(float(settings.get("alpha", 0.0))),
        str(settings.get("leave_out", "")) if pacs else "",
        str(settings.get("method", "")),
        _variant(settings),
        detector,
        split,
        dataset if split == "out" else "",
        "" if corruption.startswith(LEFT_OUT) else corruption,  # that is `leave_out`
        metric,
    )
    return _entries().get(key)


def departures(settings: Mapping[str, Any]) -> list[str]:
    """In which settings a run differs from those of the paper's table, in words; [] where it repeats them.

    Of the anchored variant of FOOGD, which is another method, its own settings are not listed.
    """
    data = str(settings.get("data", ""))
    if data not in PAPER_PRESETS:
        return []
    expected = _expected(data, str(settings.get("method", "")))
    variant = {_VARIANTS[_variant(settings)][0]} if _variant(settings) else set()
    if "train_base" in variant:
        variant |= {"init", "lambda_a"}  # the trained net stays as it is: no Stein term moves it
    found = []
    if settings.get("profile") == "anchored":
        found = [OURS]
        expected = {key: want for key, want in expected.items() if key not in AnchoredFOOGD.__dataclass_fields__}
    for key, want in expected.items():
        have = settings.get(key, want)
        have = list(have) if isinstance(have, tuple) else have
        # No bound moves no number, as updates that were refused are told; the paper's shares are those of its code.
        same = (key, have) in (("update_bound", 0), ("proportions", AUTHORS))
        if key in _FREE | variant | {"profile"} or have == want or same:
            continue
        found.append(f"{key} {_word(have)} instead of {_word(want)}")
    return found


def _variant(settings: Mapping[str, Any]) -> str:
    if settings.get("method") != "fedavg+foogd":
        return ""
    found = [name for name, (key, value) in _VARIANTS.items() if settings.get(key) == value]
    if "train_base=false" in found and "lambda_a=0" in found:
        found.remove("lambda_a=0")  # without a backbone to train there is no Stein term
    return found[0] if len(found) == 1 else ""  # two at once are no ablation of the paper


@cache
def _expected(data: str, method: str) -> dict[str, Any]:
    from ..methods import method_settings
    from ..presets.loader import read_preset, resolve

    try:
        config, built = resolve(read_preset(data), {"method": method})
    except InputError:  # a method of one's own
        return {}
    config = replace(config, lr=PRINTED_RATE)
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(config).items()}
    return values | method_settings(built)  # a run without such a setting does not differ in it


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
