"""What a method that adapts to its test stream detects where the stream is pure, and where IN and OUT come mixed.

python benchmarks/stream_study.py RUN [--method fedt3a] [--data-root DATA] [--clients 3] [--images 500]

Evaluation gives such a method each test set as a stream of its own. Then the model that
scores an OUT image has adapted to OUT images alone, and one that scores an IN image to IN images: a detector may hear
the stream rather than the image. Here each client also gets its IN images and those of an OUT set in one shuffled
stream. `--method fedt3a` may take a run of FedAvg, for the two train alike. A CPU takes some minutes.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from foogd.data.federation import TestSet
from foogd.detector import energy
from foogd.engine.rng import generator
from foogd.evaluate import Evaluator
from foogd.methods import make_method
from foogd.metrics import auroc
from foogd.report import Table
from foogd.runs import Run, source_commit
from foogd.settings import read_run_config


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("run", type=Path)
    words.add_argument("--method", help="that adapts; the run's own where none is named")
    words.add_argument("--data-root")
    words.add_argument("--clients", type=int, default=3, help="the first ones; results are means over them")
    words.add_argument("--images", type=int, default=500, help="of a client, at most, of each test set")
    args = words.parse_args()
    config, method = read_run_config(args.run / "config.toml")
    if args.method:
        method = make_method(args.method)
        config = replace(config, method=args.method)
    if not method.adapts:
        words.error(f"{config.method} does not adapt to its test stream; name a method that does with --method.")
    root = args.data_root or config.data_root
    run = Run(args.run, replace(config, data_root=root, corruptions=(), device="cpu"), method)
    state, federation = run.state(), run.federation
    evaluator = Evaluator(run.engine, {})
    state = evaluator.ready(state)
    clean, *outs = (test for test in federation.tests if test.split in ("in", "out"))
    clients = state.clients[: args.clients]

    @torch.no_grad()
    def answers(client: int, images: Tensor, adapt: bool) -> Tensor:
        """Logits of a stream of images, in its order."""
        evaluator._become(state.clients[client])
        nets = evaluator._nets
        if not adapt:
            return torch.cat([method.logits(nets, nets["backbone"](x)) for x in images.split(250)])
        predict = method.predictor(nets, evaluator._context(state, clients[client], "stream", unseen=False))
        return torch.cat([predict(x).logits for x in images.split(method.test_batch or 128)])

    def images(test: TestSet, client: int) -> Tensor:
        part = test.indices[client]
        order = torch.randperm(len(part), generator=generator(config.seed, client, test.key, "stream"))[: args.images]
        return evaluator._images(test.store, part[order])

    clean_images = [images(clean, client) for client in range(len(clients))]
    clean_answers = [[answers(k, x, adapt) for adapt in (False, True)] for k, x in enumerate(clean_images)]
    scores = {"MSP": lambda logits: 1 - logits.softmax(1).max(1).values, "energy": energy}
    lines = []
    for out in outs:
        found: dict[str, dict[str, list[float]]] = {name: {} for name in scores}
        for client, x_in in enumerate(clean_images):
            x_out = images(out, client)
            both = torch.cat([x_in, x_out])
            order = torch.randperm(len(both), generator=generator(config.seed, client, out.key, "mixed"))
            mixed = torch.empty(len(both), federation.num_classes)
            mixed[order] = answers(client, both[order], True)
            ways = {
                "not adapted": (clean_answers[client][0], answers(client, x_out, False)),
                "each set a stream": (clean_answers[client][1], answers(client, x_out, True)),
                "one mixed stream": (mixed[: len(x_in)], mixed[len(x_in) :]),
            }
            for name, score in scores.items():
                for way, (of_in, of_out) in ways.items():
                    found[name].setdefault(way, []).append(float(auroc(score(of_in), score(of_out))))
        for name, ways_found in found.items():
            values = (f"{100 * sum(values) / len(values):.1f}" for values in ways_found.values())
            lines.append((out.name, name, *values))
        print(*lines[-len(scores) :], sep="\n", file=sys.stderr, flush=True)  # so that one sees it go on
    columns = ("OUT set", "detector", "not adapted", "each set a stream", "one mixed stream")
    print(
        f"AUROC in %, {config.method} on {args.run.name}, mean of {len(clients)} clients, "
        f"up to {args.images} images a set, seed {config.seed}, commit {source_commit()}\n"
    )
    print(Table("", columns, tuple(lines)).markdown())


if __name__ == "__main__":
    main()
