"""What a number was measured with: commit, versions, device, and the code of users."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .files import ENVIRONMENT, write_atomic


def write_environment(folder: Path, about: Mapping[str, Any], plugins: Mapping[str, Any]) -> None:
    """`environment.json`: what a run is made with, and which files of a user it calls."""
    content = {**about, "plugins": plugins} if plugins else about
    write_atomic(folder / ENVIRONMENT, f"{json.dumps(content, indent=2)}\n".encode())


def environment(device: torch.device, precision: str = "fp32") -> dict[str, Any]:
    """What a number was measured with: commit, versions, device and processor, precision of local steps."""
    packages = ("foogd", "torch", "numpy", "safetensors")
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "commit": source_commit(),
        "python": platform.python_version(),
        "versions": {**versions, "torch": torch.__version__},
        "platform": platform.platform(),
        "device": str(device),
        "precision": precision,
        "gpu": gpu,
        "processor": processor(),
        "cores": os.cpu_count(),
    }


def processor() -> str:
    """The kind of processor, and the instructions that torch uses of it: with others, bits on a CPU are others."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def source_commit() -> str | None:
    """The commit of the package's own repository, with a plus sign where files differ from it."""
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        command = ["git", "-C", str(here), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) not in here.parents:
            return None
        dirty = git("status", "--porcelain", "--untracked-files=no", "--", str(here))
        return git("rev-parse", "--short=12", "HEAD") + ("+" if dirty else "")
    except (OSError, subprocess.SubprocessError):
        return None
