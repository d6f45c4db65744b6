"""What a run on Flower is told besides the settings of every run, and which methods can run there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, final

from ..config import Config
from ..core.errors import InputError
from ..core.fields import check, setting
from ..engine.aggregate import least_updates
from ..methods.base import Method
from ..presets.loader import check_settings, read_preset, resolve
from ..simulate import need_updates, round_size


@final
@dataclass(frozen=True)
class Options:
    """How a run on Flower is served; all that decides its result stands in `Config` and in the method."""

    preset: str = setting("", "preset, or TOML file on the server, with the settings that are not given here")
    run_dir: str = setting("runs/flower", "run folder on the machine of the server")
    resume: bool = setting(False, "go on with the run in run_dir, where there is one")
    min_updates: int = setting(1, "a round with fewer updates that count is repeated", ge=1)
    round_timeout: float = setting(3600.0, "seconds that a node has for one message", gt=0.0)
    wait_for_nodes: float = setting(600.0, "seconds to wait for nodes, at the start and before a repeat", gt=0.0)
    retries: int = setting(3, "how often a round is repeated before the run ends", ge=0)
    evaluate: str = setting(
        "scores", "scores: nodes send outlier scores and right or wrong of test images", choices=("scores", "none")
    )
    server_device: str = setting("cpu", "where the server computes", choices=("auto", "cpu", "cuda"))
    poll: float = setting(1.0, "seconds between two looks for answers", gt=0.0)
    settings: str = setting("", "all settings as one text; foogd flower submit writes it")

    def __post_init__(self) -> None:
        check(self)


def read_options(given: Mapping[str, Any]) -> tuple[Options, Config, Method]:
    """Options, configuration and method from the flat settings of a Flower app."""
    preset: Mapping[str, Any] = {}
    if text := given.get("settings", ""):
        try:
            sent = json.loads(text)
            preset, given = dict(sent["preset"]), dict(sent["given"])
        except (ValueError, KeyError, TypeError):
            raise InputError("settings is not what foogd flower submit writes: leave it empty") from None
    values = {key.replace("-", "_"): value for key, value in given.items() if key != "settings"}
    known = {item.name: (Options, item) for item in fields(Options)}
    options = Options(**check_settings({k: v for k, v in values.items() if k in known}, known, "on Flower"))
    preset = read_preset(options.preset) if options.preset else preset
    config, method = resolve(preset, {key: value for key, value in values.items() if key not in known})
    for reason in (refusal(method), config_refusal(config)):
        if reason is not None:
            raise InputError(f"method {config.method} cannot run on Flower with these settings: {reason}")
    if options.min_updates > config.clients:
        raise InputError(f"min_updates = {options.min_updates} is more than the {config.clients} clients")
    need_updates(config, config.clients)
    sample = round_size(config.clients, config.participation)
    if options.min_updates > sample:
        raise InputError(
            f"min_updates = {options.min_updates} is more than the {sample} clients that participation = "
            f"{config.participation:g} lets take part in a round"
        )
    options = replace(options, min_updates=max(options.min_updates, least_updates(config)))
    # What a node does with its test images is its own: those that the simulator would make are not asked for.
    return options, replace(config, device=options.server_device, resident="host"), method


def refusal(method: Method) -> str | None:
    """Why a method cannot run where the server sees no data, or None."""
    return "its server trains on the images of all clients" if method.pools_data else None


def on_flower(method: Method) -> str:
    """Whether a method runs on Flower, and with which of its settings it does not, for tables."""
    reason = refusal(method)
    if reason is not None:
        return f"no: {reason}"
    for item in fields(method):  # type: ignore[arg-type]  # methods are dataclasses
        for choice in item.metadata.get("choices", ()):
            other = refusal(replace(method, **{item.name: choice}))  # type: ignore[type-var]
            if other is not None:
                return f"yes, but not with {item.name}={choice}: {other}"
    return "yes"


def config_refusal(config: Config) -> str | None:
    """Which setting of a run is for the simulator only, or None."""
    if config.clients < 1:
        return "clients is 0, and the server must know how many nodes to wait for"
    if config.init:
        return "init names a run folder, which only the simulator reads"
    return None
