"""What can be found wrong with runs before they train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..core.errors import InputError
from ..data.store import ImageStore
from .federation import SPLIT, load_once, make_federation
from .run import Run


def check_together(runs: Sequence[Run]) -> None:
    """What `Run.check` finds, for many runs: each data set is read once, and what runs have in common is tried once.

    It is about settings: an error in a user's own code, or too little memory, is left to the run itself.
    """
    stores: dict[Any, ImageStore] = {}
    tried: set[Any] = set()
    alike: dict[Any, list[Run]] = {}  # by the images of the clients, of which only one split is in memory at a time
    for run in runs:
        alike.setdefault(tuple(getattr(run.config, name) for name in SPLIT), []).append(run)
    for group in alike.values():
        federation = None
        for run in group:
            config = replace(run.config, corruptions=(), resident="host")
            outs = (config.data, config.data_root, config.sites, config.on_bad, config.out)
            # Start weights depend on the seed; whether nets can be made does not, nor on alpha.
            nets = (replace(config, seed=0, alpha=1.0), repr(run.method))
            try:
                if federation is None or outs not in tried:
                    # OUT sets are brought to the shape of IN, which takes long and is the same for all clients.
                    seen = replace(config, out=()) if outs in tried else config
                    federation = make_federation(seen, partial(load_once, stores, config))
                    tried.add(outs)
                if nets not in tried:
                    tried.add(nets)
                    Run(run.folder, config, run.method).check_nets(federation)
            except InputError as error:
                raise InputError(f"run {run.folder.name}: {error}") from None
            except Exception:
                continue
