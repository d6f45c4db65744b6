"""One whole run on real CIFAR-10 with the graph engine: seconds a round, accuracy and detection.

python benchmarks/cifar_gpu.py --root data --method fedavg+foogd --alpha 5.0 --rounds 25 --out runs/cifar

Needs torch, numpy and Pillow alone. The settings are those of the preset `cifar10` but for the rounds. IN-C is
brightness in five severities, made from the test images ("CIFAR-10-C style, generated").
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from foogd import Config
from foogd.detect import DETECTORS
from foogd.engine.graph import GraphEngine, make_engine
from foogd.evaluate import Evaluator
from foogd.methods import make_method, method_settings
from foogd.report import Report
from foogd.runs import environment, make_federation, to_toml
from foogd.simulate import initial_state, simulate


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--root", default="data")
    words.add_argument("--method", default="fedavg+foogd")
    words.add_argument("--outs", default="lsun_c,svhn,textures,isun")
    words.add_argument("--alpha", type=float, default=5.0)
    words.add_argument("--rounds", type=int, default=25)
    words.add_argument("--seed", type=int, default=21)
    words.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="a setting of the method")
    words.add_argument("--limit", type=float, default=0.0, help="stop training after so many seconds; 0: never")
    words.add_argument("--out", type=Path, required=True)
    args = words.parse_args()
    config = Config(
        method=args.method, seed=args.seed, data="cifar10", data_root=args.root, out=tuple(args.outs.split(",")),
        corruptions=("brightness",), alpha=args.alpha, backbone="wrn40-2", rounds=args.rounds, local_epochs=5,
        batch_size=128, lr=0.1, momentum=0.9, weight_decay=5e-4, flip=True, eval_batch=2000,
    )  # fmt: skip
    method = make_method(args.method, {k: json.loads(v) for k, _, v in (text.partition("=") for text in args.set)})
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    federation = make_federation(config)
    print(f"data in {time.perf_counter() - began:.1f} s", flush=True)
    engine = make_engine(method, federation, config)
    state = initial_state(engine)
    seconds: list[float] = []
    began = time.perf_counter()
    for result in simulate(method, federation, config, engine, start=state):
        state = result.state
        seconds.append(result.seconds)
        losses = ", ".join(f"{group} {value:.3f}" for group, value in result.losses.items())
        print(f"round {result.round}: {result.seconds:.2f} s, {losses}, refused {len(result.refused)}", flush=True)
        if args.limit and time.perf_counter() - began > args.limit:
            print(f"stopped by --limit after {result.round} rounds", flush=True)
            break
    if isinstance(engine, GraphEngine) and engine.fallback:
        print(f"no graphs: {engine.fallback}")
    evaluator = Evaluator(engine, DETECTORS)
    times = []
    for _ in range(2):  # the first one chooses kernels
        torch.cuda.synchronize()
        began = time.perf_counter()
        rows = evaluator.evaluation(state, run=f"{args.method}-{args.alpha}-{args.seed}", method=args.method).rows
        times.append(time.perf_counter() - began)
    report = Report.of(rows)
    print(f"evaluation with {len(DETECTORS)} detectors: {times[0]:.2f} s, again {times[1]:.2f} s")
    later = seconds[1:] or seconds
    print(f"first round {seconds[0]:.1f} s, later ones {sum(later) / len(later):.2f} s in the mean")
    for table in (report.headline(), report.joint()):
        print(f"\n({table.title})\n\n{table.markdown()}", flush=True)
    values = {**asdict(config), **{k: v for k, v in method_settings(method).items() if k != "views"}}
    (args.out / "config.toml").write_text(to_toml(values))
    (args.out / "environment.json").write_text(json.dumps(environment(torch.device("cuda")), indent=2))
    (args.out / "seconds.json").write_text(json.dumps(seconds))
    shown = [row for row in rows if row.scope != "client"]
    (args.out / "rows.jsonl").write_text("".join(json.dumps(row.as_dict()) + "\n" for row in shown))


if __name__ == "__main__":
    main()
