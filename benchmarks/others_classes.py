"""What each detector says of images of classes that a client does not have, but others do.

python benchmarks/others_classes.py RUN... [--data-root DATA]

Tests give a client IN images of its own classes alone. But images of the others' classes come too in use, and whether
they are OUT is a matter of the question: unlike anything that anybody has seen (no), or unlike what this client has
seen (yes). For each detector, at the threshold that accepts 95 % of the client's own IN test images: the share of
these images that is rejected, and of the OUT sets; weighted over clients, mean over the runs, in %. The model's saved
detectors are asked, so the runs need a `model/`. Some minutes on a CPU.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import foogd
from foogd.metrics import threshold_at_tpr
from foogd.report import NAMES, Table
from foogd.runs import FLOWER, make_federation, source_commit
from foogd.settings import read_run_config

OTHERS = "classes of others"


def study(folder: Path, data_root: str | None) -> dict[str, dict[str, float]]:
    """By detector: the share rejected of the classes of others and of each OUT set."""
    if not (folder / "model").is_dir() or (folder / FLOWER).is_file():
        raise SystemExit(f"{folder} is no simulated run with a model/: give folders of finished runs.")
    config, _ = read_run_config(folder / "config.toml")
    config = replace(config, corruptions=(), data_root=data_root or config.data_root)
    federation, model = make_federation(config), foogd.load(folder)
    (clean,) = (test for test in federation.tests if test.split == "in")
    found: dict[str, dict[str, float]] = {}
    total = 0
    for client in range(federation.clients):
        own = clean.indices[client]
        lacking = federation.class_counts(client) == 0
        foreign = torch.nonzero(lacking[clean.store.labels]).flatten()
        if not len(own) or not len(foreign):
            continue
        total += len(own)
        sets = {OTHERS: clean.store.images[foreign]}
        sets |= {test.name: test.store.images[test.indices[client]] for test in federation.tests if test.split == "out"}

        def score(images: Tensor, name: str, client: int = client) -> Tensor:
            return model.predict(images, client=client, detector=name).score

        for name in model.detectors:
            threshold = threshold_at_tpr(score(clean.store.images[own], name))
            for key, images in sets.items():
                rejected = float((score(images, name) > threshold).double().mean())
                cells = found.setdefault(name, {})
                cells[key] = cells.get(key, 0.0) + len(own) * rejected
    if not total:
        raise SystemExit(f"{folder}: every client has every class, so there is nothing to ask.")
    return {name: {key: 100 * value / total for key, value in cells.items()} for name, cells in found.items()}


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("runs", type=Path, nargs="+")
    words.add_argument("--data-root")
    args = words.parse_args()
    found = [study(folder, args.data_root) for folder in args.runs]
    names = [name for name in found[0] if all(name in one for one in found)]
    if len({tuple(one[name]) for one in found for name in names}) > 1:
        raise SystemExit("the runs have other OUT sets: give runs that were tested on the same ones.")
    columns = list(found[0][names[0]])
    lines = [
        (NAMES.get(name, name), *(f"{mean(one[name][c] for one in found):.1f}" for c in columns)) for name in names
    ]
    print(f"rejected in %, 95 % of the client's IN accepted, {len(found)} runs, commit {source_commit()}\n")
    print(Table("", ("detector", *columns), tuple(lines)).markdown(words=(0,)))


if __name__ == "__main__":
    main()
