"""The images of benchmarks/claims.toml: 10,000 training images of CIFAR-10 with all of its tests, and near OUT images.

python benchmarks/cifar10_part.py DATA    # reads DATA/cifar10… and DATA/tinyimagenet…; writes two .npz beside them

The near OUT images are 2,000 of TinyImageNet at 32 pixels: photographs of things, some of them of the ten classes.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from foogd.data import load_source
from foogd.data.store import sample


def write_parts(root: Path) -> None:
    inside = sample(load_source("cifar10", root), train=10_000, test=10_000)
    replace(inside, name="cifar10").save(root / "cifar10_part.npz")
    near = sample(load_source("tinyimagenet@32", root), train=1_500, test=500)
    replace(near, name="tinyimagenet", test=None).save(root / "near.npz")


if __name__ == "__main__":
    write_parts(Path(sys.argv[1]))
