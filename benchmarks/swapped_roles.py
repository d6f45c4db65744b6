"""FPR95 as it is, and with the roles of IN and OUT swapped as in the authors' code for MSP and max logit.

python benchmarks/swapped_roles.py RUN... [--out "LSUN-like crop"] [--detectors msp,max_logit,energy]

From the scores of every test image that a run keeps (samples.safetensors), weighted over clients, in %, beside what the
paper prints for that method and alpha. Seconds on a CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from foogd.metrics import auroc, fpr95_swapped, fpr_at_tpr
from foogd.published import published
from foogd.report import NAMES, Table
from foogd.runs import source_commit
from foogd.samples import read_samples
from foogd.settings import read_run_config

PRINTED, METRICS = "lsun_c", ("auroc", "fpr95")


def study(folder: Path, out: str, detectors: list[str]) -> list[tuple[str, ...]]:
    config, _ = read_run_config(folder / "config.toml")
    samples = read_samples(folder)
    if samples is None:
        raise SystemExit(f"{folder} keeps no scores of test images; take a run that has a samples.safetensors.")
    (inside,) = samples.of("in")
    outside = next((one for one in samples.of("out") if one.name == out), None)
    if outside is None:
        known = ", ".join(one.name for one in samples.of("out"))
        raise SystemExit(f"{folder} was not tested on {out!r}; it was on {known}.")

    def weighted(metric: Callable[..., float], detector: str) -> float:
        total = 0.0
        for client in inside.clients:
            of_in = inside.of_client(inside.scores[detector], client)
            total += len(of_in) * metric(of_in, outside.of_client(outside.scores[detector], client))
        return 100 * total / len(inside)

    lines = []
    for name in detectors:
        values = [f"{weighted(metric, name):.1f}" for metric in (auroc, fpr_at_tpr, fpr95_swapped)]
        found = (published(asdict(config), metric=m, split="out", dataset=PRINTED, detector=name) for m in METRICS)
        printed = (f"{one.mean:.1f}" if one else "" for one in found)
        lines.append((folder.name, NAMES.get(name, name), *values, *printed))
    return lines


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("runs", type=Path, nargs="+")
    words.add_argument("--out", default="LSUN-like crop", help="the OUT set, by the name that tables give it")
    words.add_argument("--detectors", default="msp,max_logit,energy")
    args = words.parse_args()
    lines = [line for run in args.runs for line in study(run, args.out, args.detectors.split(","))]
    columns = ("run", "detector", "AUROC", "FPR95", "roles swapped", "printed AUROC", "printed FPR95")
    print(f"OUT: {args.out} (printed: LSUN-C), commit {source_commit()}\n")
    print(Table("", columns, tuple(lines)).markdown())


if __name__ == "__main__":
    main()
