"""What a node, its key and the folder of a run may be called: names that are safe as names of files."""

from __future__ import annotations

import re
from pathlib import Path

from ..core.errors import InputError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAME_RULE = "letters, digits and . _ - are allowed, at most 64 of them, a letter or a digit first"


def run_folder(run: str) -> str:
    """The name of a run as that of a folder: methods have names with more characters, but it must be one folder."""
    if not run or run == ".." or Path(run).name != run or not run.isprintable() or len(run) > 200:
        raise InputError(f"the run is called {run[:80]!r}, which is no name of a folder")
    return run
