"""Repeat runs from their configurations on a machine that is lent for a limited time, and go on there the next time.

python tools/repeat_runs.py docs/results/fedavg-5.0-s21 docs/results/fedrod-5.0-s21 --out runs --seconds 540

Each argument is a folder with a config.toml that names every setting, as run folders and docs/results have them; the
run folder has its name. What does not fit into the seconds stays as it is after a whole round, or before its last
evaluation, and the same command goes on with it. Needs torch, numpy, Pillow, safetensors and matplotlib alone, so it
runs where the command line of the package does not. `--commit` says what the files are of, where they lie in no
repository. With other settings a run gets another name:

python tools/repeat_runs.py docs/results/fedavg-5.0-s21 --set seed=24 --suffix s24 --out runs
"""

from __future__ import annotations

import argparse
import sys
import time
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from foogd import Config, InputError, runs
from foogd.methods import make_method
from foogd.methods.base import Method


def assigned(text: str) -> tuple[str, Any]:
    """A setting and its value, in TOML or a plain word."""
    key, sign, value = text.partition("=")
    if not key or not sign:
        raise argparse.ArgumentTypeError(f"{text!r} is no KEY=VALUE")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def configured(place: Path, changed: Mapping[str, Any]) -> tuple[Config, Method]:
    """The settings of a folder, some of them changed."""
    settings = tomllib.loads((place / "config.toml").read_text()) | dict(changed)
    known = {item.name for item in fields(Config)}
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()}
    config = Config(**{key: value for key, value in values.items() if key in known})
    own = {key: value for key, value in values.items() if key not in known}  # a name that nobody knows is refused
    return config, make_method(config.method, own)


def open_run(place: Path, root: str, out: Path, changed: Mapping[str, Any] | None = None, suffix: str = "") -> runs.Run:
    """The run of this configuration below `out`, new or as far as it is."""
    config, method = configured(place, {"data_root": root, **(changed or {})})
    folder = out / (f"{place.name}-{suffix}" if suffix else place.name)
    if not folder.exists():
        return runs.Run.create(folder, config, method)
    runs.Run(folder, *configured(folder, {})).same_as(config, method)
    return runs.Run(folder, config, method)


def goes_on(run: runs.Run, left: float, evaluation: float) -> bool:
    """Train until the run is finished or the seconds are; whether it is finished."""
    began, rounds = time.monotonic(), run.config.rounds
    if run.finished_rounds() == rounds and not run.is_finished() and left < evaluation:
        return False
    for result in run.train():
        passed = time.monotonic() - began
        losses = ", ".join(f"{group} {value:.3f}" for group, value in result.losses.items())
        print(
            f"{run.folder.name} round {result.round}/{rounds}: {result.seconds:.1f} s, {losses}, "
            f"refused {len(result.refused)}; {left - passed:.0f} s left",
            flush=True,
        )
        # The last round ends with the evaluation; without time for both the round before it is where to pause.
        needed = 1.2 * result.seconds + (evaluation if result.round + 1 == rounds else 0)
        if result.round < rounds and left - passed < needed:
            return False
    return True


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("configurations", nargs="+", type=Path, metavar="FOLDER")
    words.add_argument("--root", default="data")
    words.add_argument("--out", type=Path, required=True)
    words.add_argument("--seconds", type=float, default=float("inf"), help="how long the machine is lent")
    words.add_argument("--evaluation", type=float, default=60, help="seconds that a last evaluation may take")
    words.add_argument("--commit", help="of these files, where they lie in no repository")
    words.add_argument("--set", type=assigned, action="append", default=[], metavar="KEY=VALUE", dest="changed")
    words.add_argument("--suffix", default="", help="what follows the names of the folders, where settings are changed")
    args = words.parse_args()
    if args.changed and not args.suffix:
        words.error("--set makes other runs: give them another name with --suffix")
    if Path(args.suffix).name != args.suffix:
        words.error(f"--suffix {args.suffix!r} is not allowed: it is part of a folder's name, without a slash")
    for place in args.configurations:
        if not (place / "config.toml").is_file():
            words.error(f"{place} has no config.toml")
    if args.commit:
        runs.source_commit = lambda: args.commit  # type: ignore[assignment]
    end, failed = time.monotonic() + args.seconds, False
    for place in args.configurations:
        try:
            run = open_run(place, args.root, args.out, dict(args.changed), args.suffix)
            finished = goes_on(run, end - time.monotonic(), args.evaluation)
        except InputError as error:  # one that diverges does not stop the others
            print(f"{place.name}: {error}", flush=True)
            failed = True
            continue
        name = run.folder.name
        print(f"{name}: {'finished' if finished else f'waits after round {run.finished_rounds()}'}", flush=True)
        if not finished:
            break
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
