"""Which space and noise level make the norm of a score tell OUT from IN: the score of the features themselves.

python benchmarks/feature_study.py runs/cifar10/fedavg-5.0 [--data-root DATA] [--images 6000]

For a trained run the ideal of denoising score matching is known: the score of the training features smoothed by noise
of level sigma, s(u) = (Σ_i w_i(u) u_i - u)/σ² with w_i ∝ exp(-‖u - u_i‖²/2σ²). This prints its AUROC in several spaces
of features, for the features of all clients together and for each client's own, alone and joined with the energy;
beside it the score of one Gaussian a class with the true moments. No network is trained, so what is seen is the space.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from foogd.detector import energy
from foogd.evaluate import Evaluator
from foogd.metrics import auroc
from foogd.runs import Run, source_commit
from foogd.settings import read_run_config

Space = Callable[[Tensor], Tensor]


def spaces(z: Tensor) -> dict[str, Space]:
    """Maps of the features; each is then centred and scaled to a mean variance of 1 over the training features."""

    def power(p: float) -> Space:
        return lambda x: x.sign() * x.abs() ** p

    def logarithm(share: float) -> Space:
        return lambda x: x.sign() * torch.log1p(x.abs() / (share * z.abs().mean()))

    found = {"as they are": power(1.0), "power 1/2": power(0.5), "power 1/3": power(1 / 3)}
    found |= {f"log, share {share}": logarithm(share) for share in (0.3, 0.1, 0.05)}
    found["unit length"] = lambda x: torch.nn.functional.normalize(x, dim=1)

    def scaled(raw: Space) -> Space:
        u = raw(z)
        mean, size = u.mean(0), u.var(0).mean().sqrt()
        return lambda x: (raw(x) - mean) / size

    return {name: scaled(raw) for name, raw in found.items()}


def kernel_score(reference: Tensor, sigma: float) -> Space:
    """The norm of the score of the reference points smoothed by noise."""

    def norm(u: Tensor) -> Tensor:
        parts = []
        for some in u.split(1000):
            near = torch.softmax(-torch.cdist(some, reference).square() / (2 * sigma**2), 1)
            parts.append((near @ reference - some).norm(dim=1) / sigma**2)
        return torch.cat(parts)

    return norm


def class_score(reference: Tensor, y: Tensor, sigma: float) -> Space:
    """The norm of the score of one Gaussian a class with diagonal covariance, smoothed by noise."""
    classes = [c for c in y.unique().tolist() if int((y == c).sum()) > 1]
    mean = torch.stack([reference[y == c].mean(0) for c in classes])
    var = torch.stack([reference[y == c].var(0, correction=0) for c in classes]) + sigma**2

    def norm(u: Tensor) -> Tensor:
        pull = (mean - u[:, None]) / var
        log_density = -0.5 * (pull * (mean - u[:, None]) + var.log()).sum(2)
        return (torch.softmax(log_density, 1)[:, :, None] * pull).sum(1).norm(dim=1)

    return norm


def within(space: Space, norm: Space) -> Space:
    """The norm of the score at features, which live outside of the space."""
    return lambda x: norm(space(x))


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("run", type=Path)
    words.add_argument("--data-root")
    words.add_argument("--images", type=int, default=6000, help="training images; a sixth of it of each test set")
    args = words.parse_args()
    config, method = read_run_config(args.run / "config.toml")
    # Clean images, and of IN-C the hardest: nothing else is looked at.
    root = args.data_root or config.data_root
    config = replace(config, data_root=root, severities=(5,), device="cpu", eval_batch=250)
    run = Run(args.run, config, method)
    state, federation = run.state(), run.federation
    evaluator = Evaluator(run.engine, {})
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        evaluator._load(state)
        chosen = torch.randperm(len(federation.train), generator=draw)[: args.images]
        z, y = evaluator._features(federation.train, chosen), federation.train.labels[chosen]
        owner = torch.full((len(federation.train),), -1)
        for client, own in enumerate(federation.train_indices):
            owner[own] = client
        owner = owner[chosen]
        # A quarter sets the scale against the energy: at its own points a kernel score is 0.
        fitting, scaling = slice(0, 3 * len(z) // 4), slice(3 * len(z) // 4, None)
        aside, aside_owner = z[scaling], owner[scaling]
        z, y, owner = z[fitting], y[fitting], owner[fitting]
        inside: dict[int, Tensor] = {}
        tests: dict[str, Tensor] = {}
        count = args.images // 6
        for test in federation.tests:
            if test.split == "in":
                for client, own in enumerate(test.indices):
                    some = own[torch.randperm(len(own), generator=draw)[: -(-2 * count * len(own) // len(test.store))]]
                    if len(some):
                        inside[client] = evaluator._features(test.store, some)
            else:
                some = torch.randperm(len(test.store), generator=draw)[:count]
                tests[test.key] = evaluator._features(test.store, some)
        head = method.generic_readout(evaluator._nets).head
        about = f"{config.method}, alpha {config.alpha}, round {state.server.round}, seed {config.seed}"
        print(f"{about}; {len(z)} training images, commit {source_commit()}, torch {torch.__version__}\n")
        columns = ["space", "features of", "score", "sigma", *tests, "mean of OUT", "with energy, mean of OUT"]
        print(f"| {' | '.join(columns)} |")
        print("|" + " --- |" * 3 + " ---: |" * (len(tests) + 3))

        def line(space: str, whose: str, kind: str, sigma: float, norms: dict[int, Space]) -> None:
            single: dict[str, float] = dict.fromkeys(tests, 0.0)
            joined: dict[str, float] = dict.fromkeys(tests, 0.0)
            total = sum(map(len, inside.values()))
            for client, x in inside.items():
                norm = norms[client]
                mine = aside_owner == client
                own = aside[mine] if whose == "the client" and bool(mine.any()) else aside
                alpha = float(head(own).amax(1).mean().abs() / norm(own).mean())
                scores = norm(x)
                for key, out in tests.items():
                    found = norm(out)
                    single[key] += len(x) / total * auroc(scores, found)
                    joined[key] += len(x) / total * auroc(
                        alpha * scores + energy(head(x)), alpha * found + energy(head(out))
                    )
            outs = [key for key in tests if "/" not in key]
            cells = [f"{100 * value:.1f}" for value in single.values()]
            means = [f"{100 * sum(values[key] for key in outs) / len(outs):.1f}" for values in (single, joined)]
            print(f"| {space} | {whose} | {kind} | {sigma} | " + " | ".join([*cells, *means]) + " |", flush=True)

        for name, space in spaces(z).items():
            u = space(z)
            for sigma in (0.1, 0.5, 1.0, 1.5):
                everyone = kernel_score(u, sigma)
                line(name, "all", "kernel", sigma, dict.fromkeys(inside, within(space, everyone)))
            for sigma in (0.1, 0.5):
                everyone = class_score(u, y, sigma)
                line(name, "all", "classes", sigma, dict.fromkeys(inside, within(space, everyone)))
            for kind, sigma in (("kernel", 1.0), ("classes", 0.5)):
                norms: dict[int, Space] = {}
                for client in inside:
                    mine = owner == client
                    if int(mine.sum()) < 2 * len(y[mine].unique()):  # too few in this choice of images
                        mine = torch.ones_like(mine)
                    own = kernel_score(u[mine], sigma) if kind == "kernel" else class_score(u[mine], y[mine], sigma)
                    norms[client] = within(space, own)
                line(name, "the client", kind, sigma, norms)


if __name__ == "__main__":
    main()
