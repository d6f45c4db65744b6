"""Whole runs on real CIFAR-10 with the graph engine, as run folders: seconds a round, accuracy and detection.

python benchmarks/cifar_gpu.py --root data --method fedavg+foogd --alpha 5.0 --rounds 25 --out runs/cifar

Needs torch, numpy, Pillow, safetensors and matplotlib alone, so it runs where the command line of the package does not.
The settings are those of the preset `cifar10` but for the rounds, all detectors and the size of a test batch. IN-C is
brightness in five severities, made from the test images ("CIFAR-10-C style, generated").
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from foogd import Config
from foogd.detectors.registry import DETECTORS
from foogd.evaluation.evaluator import Evaluator
from foogd.methods import make_method
from foogd.runs.files import read_rounds, read_rows
from foogd.runs.run import Run
from foogd.tables.results import Report


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--root", default="data")
    words.add_argument("--method", default="fedavg+foogd")
    words.add_argument("--outs", default="lsun_c,svhn,textures,isun")
    words.add_argument("--alpha", type=float, default=5.0)
    words.add_argument("--rounds", type=int, default=25)
    words.add_argument("--seed", type=int, default=21)
    words.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="a setting of the method")
    words.add_argument("--time-evaluation", action="store_true", help="evaluate twice more and print the seconds")
    words.add_argument("--out", type=Path, required=True)
    args = words.parse_args()
    config = Config(
        method=args.method, seed=args.seed, data="cifar10", data_root=args.root, out=tuple(args.outs.split(",")),
        corruptions=("brightness",), alpha=args.alpha, backbone="wrn40-2", rounds=args.rounds, local_epochs=5,
        batch_size=128, lr=0.1, momentum=0.9, weight_decay=5e-4, flip=True, eval_batch=2000,
        detectors=tuple(DETECTORS),
    )  # fmt: skip
    method = make_method(args.method, {k: json.loads(v) for k, _, v in (text.partition("=") for text in args.set)})
    run = Run(args.out, config, method) if args.out.exists() else Run.create(args.out, config, method)
    state = None
    for result in run.train():
        state = result.state
        losses = ", ".join(f"{group} {value:.3f}" for group, value in result.losses.items())
        print(f"round {result.round}: {result.seconds:.2f} s, {losses}, refused {len(result.refused)}", flush=True)
    if run.fallback:
        print(f"no graphs: {run.fallback}")
    seconds = [line["seconds"] for line in read_rounds(args.out)]
    later = seconds[1:] or seconds
    print(f"first round {seconds[0]:.1f} s, later ones {sum(later) / len(later):.2f} s in the mean")
    if args.time_evaluation and state is not None:
        evaluator = Evaluator(run.engine, run.detectors)
        for number in ("first", "second"):  # the first one chooses kernels
            torch.cuda.synchronize()
            began = time.perf_counter()
            evaluator.evaluation(state, run=run.name, method=args.method)
            print(f"{number} evaluation with {len(run.detectors)} detectors: {time.perf_counter() - began:.2f} s")
    report = Report.of(read_rows(args.out)).last_round()
    for table in (report.headline(), report.joint()):
        print(f"\n({table.title})\n\n{table.markdown()}", flush=True)


if __name__ == "__main__":
    main()
