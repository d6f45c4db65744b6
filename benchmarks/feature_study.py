"""Which space and noise level make the norm of a score tell OUT from IN: the score of the features themselves.

python benchmarks/feature_study.py runs/cifar10/fedavg-5.0 [--data-root DATA] [--images 6000]

First without a network, so that what is seen is the space: the score of one Gaussian a class with the true moments, and
the ideal of denoising score matching, the score of the training features smoothed by noise of level sigma, s(u) =
(Σ_i w_i(u) u_i - u)/σ² with w_i ∝ exp(-‖u - u_i‖²/2σ²); for all classes and for those of each client, alone and joined
with the energy (`--part spaces`). Then FOOGD's own score (`--part scores`): its space more or less whitened, or with
full covariances instead; networks that learn by its loss, on all clients' features at once, alone or on top of the
Gaussians, asked at the clean point or averaged over noise, trusted or half trusted. Last (`--part near`) the client's
own features in that space: their smoothed score, the distance to the k-th nearest, and shares of it beside the score.
`--part span`: one Gaussian around the origin of features of one length, and without each of its parts; networks that
regress on noise of a level that nobody tells them.
Apart from these `--part gap`: the norm of the score that the run has learnt, for training images and for the others.
A CPU takes some minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from foogd.detector import energy
from foogd.engine.rng import Streams
from foogd.evaluate import Evaluator
from foogd.methods.foogd import FOOGD
from foogd.metrics import auroc
from foogd.nets import AnchoredScore, MeasuredScore, SpanScore
from foogd.nets.score import ScoreNetwork
from foogd.runs import Run, source_commit
from foogd.settings import read_run_config
from foogd.types import Readout

Space = Callable[[Tensor], Tensor]


def spaces(z: Tensor) -> dict[str, Space]:
    """Maps of the features; each is then centred and scaled to a mean variance of 1 over the training features."""

    def power(p: float) -> Space:
        return lambda x: x.sign() * x.abs() ** p

    def logarithm(share: float, own_size: bool) -> Space:
        def of(x: Tensor) -> Tensor:
            size = x.abs().mean(1, keepdim=True) if own_size else z.abs().mean()
            return x.sign() * torch.log1p(x.abs() / (share * size + 1e-12))

        return of

    found = {"as they are": power(1.0), "power 1/3": power(1 / 3), "unit length": nn.functional.normalize}
    found |= {f"log, share {share} of all features' size": logarithm(share, False) for share in (0.3, 0.05)}
    found |= {f"log, share {share} of the image's size": logarithm(share, True) for share in (0.3, 0.1, 0.05)}

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


def covariance_score(reference: Tensor, y: Tensor, sigma: float, lean: float) -> Space:
    """The same with full covariances; each leans on that of all classes as if `lean` of its images had that one."""
    classes = y.unique().tolist()
    mean = torch.stack([reference[y == c].mean(0) for c in classes])
    count = torch.tensor([int((y == c).sum()) for c in classes])[:, None, None]
    own = torch.stack([torch.cov(reference[y == c].T, correction=0) for c in classes])
    joint = (count * own).sum(0) / count.sum()
    noisy = (count * own + lean * joint) / (count + lean) + sigma**2 * torch.eye(reference.shape[1])
    inverse, size = torch.linalg.inv(noisy), torch.logdet(noisy)

    def norm(u: Tensor) -> Tensor:
        away = mean[:, None] - u
        pull = away @ inverse
        log_density = -0.5 * ((pull * away).sum(2) + size[:, None])
        return (torch.softmax(log_density, 0)[:, :, None] * pull).sum(0).norm(dim=1)

    return norm


def within(space: Space, norm: Space) -> Space:
    """The norm of the score at features, which live outside of the space."""
    return lambda x: norm(space(x))


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("run", type=Path)
    words.add_argument("--data-root")
    words.add_argument("--outs", help="OUT sets instead of the run's, as in lsun_c,svhn")
    words.add_argument("--corruptions", help="kinds of IN-C instead of the run's, as in gaussian_noise,fog")
    words.add_argument("--severity", type=int, default=5, help="of IN-C")
    words.add_argument("--part", choices=("all", "spaces", "scores", "near", "span", "gap"), default="all")
    words.add_argument("--steps", type=int, default=240, help="of the networks that learn")
    words.add_argument("--images", type=int, default=6000, help="training images; a sixth of it of each test set")
    args = words.parse_args()
    config, method = read_run_config(args.run / "config.toml")
    # Clean images, and of IN-C one severity: nothing else is looked at.
    root = args.data_root or config.data_root
    outs = tuple(args.outs.split(",")) if args.outs else config.out
    kinds = tuple(args.corruptions.split(",")) if args.corruptions else config.corruptions
    config = replace(
        config, data_root=root, out=outs, corruptions=kinds, severities=(args.severity,), device="cpu", eval_batch=250
    )
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
        if args.part == "gap":
            gap(method.generic_readout(evaluator._nets), z, y, torch.cat(list(inside.values())), tests)
            return
        outs = [key for key in tests if "/" not in key]
        columns = ["space", "classes of", "score", "sigma", *tests, "mean of OUT"]
        columns += [f"with energy: {key}" for key in [*tests, "mean of OUT"]]
        print(f"| {' | '.join(columns)} |")
        print("|" + " --- |" * 3 + " ---: |" * (len(columns) - 3))

        def line(
            space: str, whose: str, kind: str, sigma: float, norms: dict[int, Space], *, joins: bool = True
        ) -> None:
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
            # Shifted images are of all classes, so for the classes of a client they say nothing.
            cells = []
            for numbers, shows in ((single, True), (joined, joins)):
                told = [value if whose == "all" or key in outs else None for key, value in numbers.items()]
                told.append(sum(numbers[key] for key in outs) / len(outs))
                cells += [f"{100 * value:.1f}" if value is not None and shows else "" for value in told]
            print(f"| {space} | {whose} | {kind} | {sigma} | " + " | ".join(cells) + " |", flush=True)

        line("logits", "all", "energy", 0.0, dict.fromkeys(inside, lambda x: energy(head(x))), joins=False)
        for name, space in spaces(z).items() if args.part in ("all", "spaces") else ():
            u = space(z)
            for sigma in (0.3, 0.5, 1.0):
                everyone = class_score(u, y, sigma)
                line(name, "all", "Gaussians", sigma, dict.fromkeys(inside, within(space, everyone)))
            norms: dict[int, Space] = {}
            for client in inside:
                mine = torch.isin(y, y[owner == client].unique())
                some = mine if bool(mine.any()) else torch.ones_like(mine)  # a client of which no image was chosen
                norms[client] = within(space, class_score(u[some], y[some], 0.5))
            line(name, "the client", "Gaussians", 0.5, norms)
            line(name, "all", "kernel", 1.0, dict.fromkeys(inside, within(space, kernel_score(u, 1.0))))
        if args.part in ("all", "near"):
            mine_aside = {k: aside[aside_owner == k] if bool((aside_owner == k).any()) else aside for k in inside}
            own_features(z, y, owner, mine_aside, line)
        if args.part in ("all", "span"):
            spans(z, y, owner, inside, args.steps, line)
        if args.part in ("spaces", "near", "span"):
            return
        plain = {"score_net": "mlp", "draws": 0}
        unwhitened = learnt_space(FOOGD(whiten=0.0), z, y)
        for title, lean in (("full covariance of each class", 100.0), ("one full covariance for all", 1e9)):
            for sigma in (0.5, 1.0):
                norm = within(unwhitened, covariance_score(unwhitened(z), y, sigma, lean))
                line("FOOGD's, not whitened", "all", title, sigma, dict.fromkeys(inside, norm))
        tried: list[tuple[str, dict[str, Any], int]] = [("Gaussians", {"whiten": 0.0, "sigma": 0.5}, 0)]
        tried += [("Gaussians", {"whiten": whiten}, 0) for whiten in (0.0, 0.1, 0.3, 1.0, 3.0)]
        tried += [("Gaussians", {"sigma": sigma}, 0) for sigma in (0.3, 0.5)]
        tried += [
            ("Gaussians and network, averaged", {"whiten": 0.0, "sigma": 0.5, "trust": 1.0}, args.steps),
            ("Gaussians and network, clean point", {"draws": 0, "trust": 1.0}, args.steps),
            ("Gaussians and network, averaged", {"trust": 1.0}, args.steps),
            ("Gaussians and half of the network, averaged", {}, args.steps),
            ("network alone, clean point", plain, args.steps),
            ("network alone, averaged", {"score_net": "mlp"}, args.steps),
            ("network alone, features as they are", plain | {"log_share": 0.0}, args.steps),
        ]
        for title, changes, steps in tried:
            foogd = FOOGD(**changes)
            with torch.enable_grad():
                score = learnt_score(foogd, z, y, steps)
            anchored = isinstance(score, AnchoredScore)
            where = f"FOOGD's, whiten {foogd.whiten:g}" if anchored else "FOOGD's, not whitened"
            line(where, "all", title, foogd.sigma, dict.fromkeys(inside, norm_of(foogd, score)))
            if anchored and (steps == 0 or not changes):
                own_norms = {}
                for client in inside:
                    known = torch.bincount(y[owner == client], minlength=int(y.max()) + 1).clamp_max(1).float()
                    own_norms[client] = norm_of(foogd, score, known if known.any() else None)
                line(where, "the client", title, foogd.sigma, own_norms)


def gap(readout: Readout, z: Tensor, y: Tensor, inside: Tensor, tests: dict[str, Tensor]) -> None:
    """How much farther than training images other images are: IN too, where a backbone knows its training by heart."""
    assert readout.score is not None
    right = float((readout.head(z).argmax(1) == y).float().mean())
    print(f"Training images classified right: {100 * right:.1f} %.\n")
    print("| images | norm, relative to training images | AUROC of the norm against IN | of the energy |")
    print("| --- | ---: | ---: | ---: |")
    usual = float(readout.score(z).norm(dim=1).mean())
    known = readout.score(inside).norm(dim=1), energy(readout.head(inside))
    for name, x in {"training": z, "IN": inside, **tests}.items():
        norm = readout.score(x).norm(dim=1)
        told = [f"{100 * auroc(*pair):.1f}" for pair in ((known[0], norm), (known[1], energy(readout.head(x))))]
        print(f"| {name} | {float(norm.mean()) / usual:.2f} | {' | '.join(told)} |", flush=True)


def own_features(z: Tensor, y: Tensor, owner: Tensor, aside: dict[int, Tensor], line: Callable[..., None]) -> None:
    """Lines about the features of each client in the space of FOOGD's score; Gaussians without a network beside.

    `aside` has other training features of each client: at its own points a distance is too short to set a scale by.
    """
    foogd = FOOGD()
    score = learnt_score(foogd, z, y, 0)
    known = {k: torch.bincount(y[owner == k], minlength=int(y.max()) + 1).clamp_max(1).float() for k in aside}
    banks = {k: z[owner == k] if bool(known[k].any()) else z for k in aside}
    gaussians = {k: norm_of(foogd, score, known[k] if known[k].any() else None) for k in aside}

    def distance(bank: Tensor, space: Space, k: int) -> Space:
        points = space(bank)
        place = max(min(k, len(points) // 2), 1)
        return lambda x: torch.cat([torch.cdist(u, points).kthvalue(place, 1).values for u in space(x).split(1000)])

    def mixed(first: Space, second: Space, share: float, at: Tensor) -> Space:
        sizes = float(first(at).mean()), float(second(at).mean())
        return lambda x: (1 - share) * first(x) / sizes[0] + share * second(x) / sizes[1]

    where, unit = f"FOOGD's, whiten {foogd.whiten:g}", nn.functional.normalize
    line("unit length", "the client", "distance to the 10th", 0.0, {k: distance(banks[k], unit, 10) for k in aside})
    for sigma in (1.0, 2.0):
        norms = {k: within(score.scale, kernel_score(score.scale(banks[k]), sigma)) for k in aside}
        line(where, "the client", "kernel, own features", sigma, norms)
    near = {k: distance(banks[k], score.scale, 10) for k in aside}
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        norms = {k: mixed(near[k], gaussians[k], share, aside[k]) for k in aside}
        line(where, "the client", f"distance to the 10th and {share:g} Gaussians", foogd.sigma, norms)


def spans(
    z: Tensor, y: Tensor, owner: Tensor, clients: Iterable[int], steps: int, line: Callable[..., None]
) -> None:
    """Lines about the span of features: its noise level, whose features, and without each of its parts."""

    def span(features: Tensor, sigma: float) -> Space:
        score = SpanScore(z.shape[1], 1)
        score.anchor(score.moments(features, torch.zeros(len(features), dtype=torch.int64)))
        return lambda x: score._pull(score.scale(x), sigma).norm(dim=1)

    def around(points: Tensor, centre: Tensor, space: Space, sigma: float) -> Space:
        """The same of any points and any centre; one unit is the root of their mean square."""
        away = points - centre
        size = away.square().mean()
        inverse = torch.linalg.inv(away.T @ away / len(away) / size + sigma**2 * torch.eye(z.shape[1]))
        return lambda x: ((space(x) - centre) / size.sqrt() @ inverse).norm(dim=1)

    clients = list(clients)
    for sigma in (0.05, 0.1, 0.2, 0.4, 1.0):
        line("one length", "all", "span", sigma, dict.fromkeys(clients, span(z, sigma)))
    own = {k: z[owner == k] if bool((owner == k).any()) else z for k in clients}
    line("one length", "the client", "span", 0.1, {k: span(own[k], 0.1) for k in clients})
    unit, nothing = nn.functional.normalize, torch.zeros(z.shape[1])
    u = unit(z)
    line("one length", "all", "span around the mean", 0.1, dict.fromkeys(clients, around(u, u.mean(0), unit, 0.1)))
    line("as they are", "all", "span", 0.1, dict.fromkeys(clients, around(z, nothing, lambda x: x, 0.1)))
    share = around(z, nothing, lambda x: x, 0.1)
    line("as they are", "all", "span, over the length", 0.1, dict.fromkeys(clients, lambda x: share(x) / x.norm(dim=1)))
    blind = {"score_net": "mlp", "standardise": False, "log_share": 0.0, "conditioned": False, "sigma_levels": 100}
    for title, changes in (
        ("network on noise, level not told", {"dsm_target": "noise"}),
        ("the same up to level 2", {"dsm_target": "noise", "sigma_max": 2.0}),
        ("the same up to level 0.5", {"dsm_target": "noise", "sigma_max": 0.5}),
        ("network on noise, one level", {"dsm_target": "noise", "sigma_levels": 1, "sigma": 1.0}),
        ("network on the score, level not told", {"dsm_target": "score"}),
    ):
        foogd = FOOGD(**({"sigma_min": 0.01, "draws": 0, "sigma": 1.0} | blind | changes))
        with torch.enable_grad():
            score = learnt_score(foogd, z, y, steps)
        line("as they are", "all", title, foogd.sigma_max, dict.fromkeys(clients, norm_of(foogd, score)))


def learnt_space(method: FOOGD, z: Tensor, y: Tensor) -> Space:
    """The space of an anchored score network that has measured these features."""
    score = method.score_network(z.shape[1], int(y.max()) + 1)
    assert isinstance(score, AnchoredScore)
    score.anchor(score.moments(z, y))
    return score.scale


def learnt_score(method: FOOGD, z: Tensor, y: Tensor, steps: int) -> ScoreNetwork:
    """FOOGD's score network after so many steps of its denoising loss on batches of 256."""
    torch.manual_seed(0)
    score = method.score_network(z.shape[1], int(y.max()) + 1).train()
    if isinstance(score, MeasuredScore):
        score.anchor(score.moments(z, y))
    else:
        for _ in range(200):
            score.observe(z)
    u, rng = score.scale(z), Streams(0)
    optimiser = torch.optim.Adam(score.parameters(), method.score_lr)
    for _ in range(steps):
        some = torch.randint(len(u), (256,), generator=rng("batch"))
        loss = method.denoising(score, u[some], rng)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return score.requires_grad_(False)


def norm_of(method: FOOGD, score: ScoreNetwork, classes: Tensor | None = None) -> Space:
    """The norm of FOOGD's score as it detects."""
    return lambda x: score.steadied(score.scale(x), method.sigma, method.draws, classes).norm(dim=1)


if __name__ == "__main__":
    main()
