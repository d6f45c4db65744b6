"""Run a command until it ends or this process is told to, and end its children with it: `python supervise.py COMMAND…`

Flower's SuperNode leaves the processes of its apps behind when it is stopped, so all are in one group. This file is
started by its path and imports nothing of the package: a process that only waits should not hold torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from types import FrameType

PATIENCE = 10.0  # seconds that a process has to end by itself


def run_until_stopped(command: list[str]) -> int:
    """The exit status of the command."""
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=_end_with_parent)
    told = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal told
        told = True
        child.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        waited = 0.0
        while waited < PATIENCE:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(timeout=0.5)
            waited += 0.5 if told else 0.0
        return 128 + signal.SIGKILL
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _end_with_parent() -> None:
    """On Linux the command is told to stop when this process is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    sys.exit(run_until_stopped(sys.argv[1:]))
