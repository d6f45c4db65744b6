"""Images a second of every corruption, next to the package imagecorruptions-imaug, in one run.

    python benchmarks/corruptions.py [--device cuda] [--images 2000] [--reference-images 20] [--side 32]

Each number is over the five severities, after a warm-up. The package has the constants of ImageNet-C only and works on
one image at a time on one core, so its column belongs next to "imagenet". Limit: all 19 corruptions with 5 severities
of 10,000 images with the constants of CIFAR-10-C in 15 minutes on a CPU with 2 cores, and in 90 seconds on one H200.

Needs torch and numpy only; without the package its column and frost show "–". Ends with exit code 1 beyond the limit.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import io
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from foogd.core.errors import InputError
from foogd.data.corrupt import CORRUPTIONS, corrupt

PACKAGE = "imagecorruptions-imaug"
SEVERITIES, TEST_IMAGES = 5, 10_000
LIMIT_S = {"cpu": 15 * 60.0, "cuda": 90.0}


def smooth_images(n: int, side: int) -> Tensor:
    """Random colour images, coarse and fine structure added."""
    rng = torch.Generator().manual_seed(0)
    total = torch.zeros(n, 3, side, side)
    for cells in (4, 8, side):
        coarse = torch.randn((n, 3, cells, cells), generator=rng) / cells
        total += F.interpolate(coarse, size=(side, side), mode="bilinear")
    return (total * 400 + 128).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def seconds(work: Callable[[int], object], device: str) -> float:
    """Time of all five severities."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for severity in range(1, SEVERITIES + 1):
        work(severity)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def ours(name: str, images: Tensor, constants: str) -> float | None:
    """Images a second, or none where the photographs are missing."""
    try:
        for severity in range(1, SEVERITIES + 1):
            corrupt(images[: len(images) // 8 + 1], name, severity, 0, constants)
    except InputError:
        return None
    taken = seconds(lambda severity: corrupt(images, name, severity, 0, constants), images.device.type)
    return SEVERITIES * len(images) / taken


def reference(name: str, images: np.ndarray) -> float | None:
    """Images a second of the package, or none where it is missing."""
    if len(images) == 0 or importlib.util.find_spec("imagecorruptions") is None:
        return None
    import imagecorruptions

    def work(severity: int) -> None:
        for image in images:
            imagecorruptions.corrupt(image, severity, name)

    with contextlib.redirect_stdout(io.StringIO()), np.errstate(all="ignore"):
        imagecorruptions.corrupt(images[0], 1, name)
        taken = seconds(work, "cpu")
    return SEVERITIES * len(images) / taken


def machine(device: str) -> str:
    """Device, threads, versions and commit in one line."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}", f"numpy {np.__version__}"]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions.append(f"{PACKAGE} {importlib.metadata.version(PACKAGE)}")
    commit = "unknown"
    with contextlib.suppress(OSError):
        here = Path(__file__).resolve().parent
        answer = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True)
        commit = answer.stdout.strip() or commit
    return f"{name} · {' · '.join(versions)} · commit {commit}"


def cell(speed: float | None) -> str:
    return "–" if speed is None else f"{speed:,.0f}"


def main() -> int:
    arguments = argparse.ArgumentParser(description="Images a second of every corruption, next to the package.")
    arguments.add_argument("--device", default="cpu", choices=list(LIMIT_S))
    arguments.add_argument("--images", type=int, default=2000, help="images a severity")
    arguments.add_argument("--reference-images", type=int, default=20, help="images a severity for the package")
    arguments.add_argument("--side", type=int, default=32, help="pixels")
    chosen = arguments.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    images = smooth_images(chosen.images, chosen.side).to(chosen.device)
    few = images[: chosen.reference_images].cpu().numpy()
    print(machine(chosen.device))
    print(f"{chosen.images} images of {chosen.side}×{chosen.side}, images a second\n")
    print("| corruption | cifar | imagenet | package |\n|---|---|---|---|")
    total, missing = 0.0, []
    for name in CORRUPTIONS:
        cifar, imagenet = ours(name, images, "cifar"), ours(name, images, "imagenet")
        print(f"| {name} | {cell(cifar)} | {cell(imagenet)} | {cell(reference(name, few))} |", flush=True)
        if cifar is None:
            missing.append(name)
        else:
            total += SEVERITIES * TEST_IMAGES / cifar
    limit = LIMIT_S[chosen.device]
    without = f" without {', '.join(missing)}" if missing else ""
    print(f"\n19 × 5 × {TEST_IMAGES:,} images{without}: {total / 60:.2f} minutes (limit {limit / 60:g})")
    return int(total > limit)


if __name__ == "__main__":
    sys.exit(main())
