"""A trained model on other tests: the weights of a run in a folder of their own, which is evaluated and not trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import Config
from ..core.errors import InputError
from ..core.fields import Role
from ..presets.loader import read_run_config
from .checkpoint import load_checkpoint, read_checkpoint_state
from .environment import source_commit
from .federation import make_federation
from .files import CHECKPOINT, ENVIRONMENT, FLOWER, ROUNDS, STATE, read_json, read_rounds, resume_command
from .run import CODE, Run

# Settings that say what a model is tested on and by what; no weight depends on them.
TESTS = Config.of_role(Role.TEST) - {"eval_every"} | {"data_root"}


def check_tests(changed: Mapping[str, Any]) -> None:
    """Complain about settings that training depends on."""
    for key in changed:
        if key not in (free := TESTS | Config.of_role(Role.PLACE)):
            allowed = ", ".join(sorted(free))
            raise InputError(f"setting {key!r} cannot be changed for a model that is trained: use {allowed}")


def retest(run: Run, folder: Path, config: Config) -> Run:
    """The weights of a finished run in `folder`, with other tests; `train` of the new run evaluates, and that is all.

    A folder that holds the same tests of the same weights goes on where it was.
    """
    config = replace(config, eval_every=0)  # the weights of earlier rounds are gone
    _check_source(run)
    state = read_checkpoint_state(run.folder / CHECKPOINT / STATE)
    if folder.exists():
        return _known(run, folder, config, state)
    # What is wrong with the data is found before anything is written; corrupting the test images is the slow part.
    run.check_images(make_federation(replace(config, corruptions=())))
    about = read_json(run.folder / ENVIRONMENT) if (run.folder / ENVIRONMENT).is_file() else {}
    new = Run(folder, config, run.method)
    # Code that the weights depend on must still be that of the run: its hashes stay, and `train` compares them.
    trained = {use: kept for use, kept in about.pop("plugins", {}).items() if use in CODE}
    plugins = {**new.plugins(), **trained}
    about |= {"tested": {"run": run.folder.name, "commit": source_commit()}}
    about |= {"plugins": plugins} if plugins else {}
    files = {name: (run.folder / name).read_bytes() for name in (ROUNDS, f"{CHECKPOINT}/{state['file']}")}
    alone = {key: value for key, value in state.items() if key != "before"}  # the weights that are tested, no others
    files[f"{CHECKPOINT}/{STATE}"] = json.dumps(alone).encode()
    return Run.create(folder, config, run.method, files | {ENVIRONMENT: f"{json.dumps(about, indent=2)}\n".encode()})


def _check_source(run: Run) -> None:
    if (run.folder / FLOWER).is_file():
        raise InputError(f"{run.folder} was trained on Flower: its data is on the nodes, and cannot be read here")
    done, wanted = run.finished_rounds(), run.config.rounds
    if done != wanted:
        raise InputError(f"{run.folder} has {done} of {wanted} rounds: finish it with {resume_command(run.folder)}")
    load_checkpoint(run.folder)  # a damaged one is not handed on
    read_rounds(run.folder)


def _known(run: Run, folder: Path, config: Config, state: Mapping[str, Any]) -> Run:
    """The run that is there, if it has these tests of these weights."""
    Run.open(folder, read_run_config).same_as(config, run.method)
    place = folder / CHECKPOINT / STATE
    if not place.is_file() or read_checkpoint_state(place)["sha256"] != state["sha256"]:
        raise InputError(f"{folder} holds another model than {run.folder}: choose another --out")
    return Run(folder, config, run.method)
