"""Which unprinted choices of the score network: FOOGD's own SM3D fitted to features that are computed once.

    python benchmarks/score_search.py bank RUN... --out BANKS      # features of finished runs, once
    python benchmarks/score_search.py fit BANKS --seeds 1 --out found.csv
    python benchmarks/score_search.py tables benchmarks/score_search.csv      # what docs/research.md shows

SM3D never moves the backbone (Algorithm 2), so what a choice does to detection can be found on a trained backbone: the
score networks of all clients are fitted by `ScoreWrapper.sm3d`, averaged by number of images, and the norm of the
score of the test images is read at several noise levels. The published and the anchored network are fitted to the same
features. A bank is named KIND-NAME after its run folder; kinds of nets (embedded images, CIFAR-10, a pretrained net)
are left out one at a time: the choice is made on the others and shown on the one left out. A bank of other features, as
the pretrained net's are, is a safetensors file with train.K and labels.K of each client K, in.NAME and out.NAME.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from foogd import Config
from foogd.core.random import Streams, generator, with_seed
from foogd.core.types import Optimiser
from foogd.engine.batches import epoch_positions
from foogd.engine.eager import GroupOptimiser
from foogd.functional import langevin
from foogd.methods import AnchoredFOOGD
from foogd.methods.foogd import ScoreWrapper
from foogd.metrics import auroc
from foogd.nets.score import ScoreNetwork, conditional, of_equal_length, two_layers
from foogd.presets.loader import read_run_config
from foogd.runs.run import Run

LEVELS = (0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 3.0)
SPACES = ("spread", "length")  # centred and in units of the spread; the same of features at equal length
NETS = ("plain", "skip")


@final
class CandidateNet(ScoreNetwork):
    """s(u, σ) = net(u, log σ)/σ, or with a skip of the score of N(0, I), in one of two spaces."""

    centre: Tensor
    spread: Tensor

    def __init__(self, feature_width: int, width: int, space: str, kind: str) -> None:
        super().__init__()
        self.space, self.kind = space, kind
        self.register_buffer("centre", torch.zeros(feature_width))
        self.register_buffer("spread", torch.ones(1))
        self.net = two_layers(feature_width, width)
        if kind == "skip":
            for value in self.net[3].parameters():
                nn.init.zeros_(value)

    def scale(self, z: Tensor) -> Tensor:
        return (self._sized(z) - self.centre) / self.spread

    def forward(self, u: Tensor, sigma: float | Tensor) -> Tensor:
        if self.kind == "plain":
            return conditional(self.net, u, sigma)
        level = sigma.to(u).reshape(-1, 1) if isinstance(sigma, Tensor) else u.new_full((1, 1), sigma)
        total = (1 + level.square()).sqrt()
        return -u / total.square() + conditional(self.net, u / total, sigma) / total

    def moments(self, z: Tensor, y: Tensor) -> dict[str, Tensor]:
        u = self._sized(z).double()
        return {"images": u.new_full((), len(u)), "sum": u.sum(0), "square": u.square().sum()}

    def measure(self, sums: Mapping[str, Tensor]) -> None:
        centre = sums["sum"] / sums["images"]
        self.centre.copy_(centre)
        variance = (sums["square"] / sums["images"] - centre.square().sum()) / len(centre)
        self.spread.fill_(variance.sqrt())

    def _sized(self, z: Tensor) -> Tensor:
        return of_equal_length(z) if self.space == "length" else z


@final
@dataclass(frozen=True)
class Candidate(ScoreWrapper):
    """FOOGD with open choices."""

    space: str = "spread"
    kind: str = "plain"
    chain_level: float = 1.0
    optim: str = "adam"

    def score_network(self, width: int, num_classes: int) -> ScoreNetwork:
        return CandidateNet(width, self.score_width, self.space, self.kind)

    def generate(self, score: ScoreNetwork, start: Tensor, y: Tensor, rng: torch.Generator) -> Tensor:
        return langevin(lambda u: score(u, self.chain_level), start, step=self.step, steps=self.steps, rng=rng)

    def optimiser(self, group: str, default: Optimiser) -> Optimiser:
        if self.optim == "adam":
            return super().optimiser(group, default)
        return Optimiser(lr=0.01, momentum=0.9 if self.optim == "momentum" else 0.0, clip=self.score_clip)

    def score_of(self, nets: Any) -> Any:
        raise NotImplementedError


def candidates(names: Iterable[str]) -> dict[str, ScoreWrapper]:
    """The choices by name."""
    found: dict[str, ScoreWrapper] = {"anchored": AnchoredFOOGD()}
    for space, kind, top in itertools.product(SPACES, NETS, (1.0, 3.0)):
        base = Candidate(space=space, kind=kind, sigma_max=top, step=0.5)
        found[f"{space} {kind} {top:g}"] = base
    base = Candidate(space="length", kind="skip", sigma_max=3.0, step=0.5)
    found |= {
        "length skip 3, rate 0.003": replace(base, score_lr=0.003),
        "length skip 3, momentum": replace(base, optim="momentum"),
        "length skip 3, sgd": replace(base, optim="sgd"),
        "length skip 3, no MMD": replace(base, lambda_m=0.0),
        "length skip 3, chain at 0.5": replace(base, chain_level=0.5),
    }
    wanted = list(names)
    return {name: found[name] for name in wanted} if wanted else found


# Banks


def bank(run: Run, place: Path) -> None:
    """The features of a finished run's images: of each client's training images, and of each test set."""
    engine, state = run.engine, run.state()
    nets = engine.nets()
    shared, personal, _ = engine.layout.pack(nets)
    shared.copy_(state.server.shared)
    engine.layout.bind(nets, shared, personal, engine.layout.pack_frozen(nets))
    nets.eval()
    federation = engine.federation
    shape = (1, -1, 1, 1)
    centre, size = (torch.tensor(values).view(shape) for values in (federation.mean, federation.std))

    @torch.no_grad()
    def features(store: Any, indices: Tensor | None = None) -> Tensor:
        order = torch.arange(len(store)) if indices is None else indices
        return torch.cat([nets["backbone"]((store.batch(i) - centre) / size) for i in torch.split(order, 500)])

    tensors: dict[str, Tensor] = {}
    for number, own in enumerate(federation.train_indices):
        tensors[f"train.{number}"] = features(federation.train, own)
        tensors[f"labels.{number}"] = federation.train.labels[own].clone()
    for test in federation.tests:
        if test.split in ("in", "out"):
            z = features(test.store)
            tensors[f"{test.split}.{test.store.name}"] = z
            with torch.no_grad():
                tensors[f"energy.{test.store.name}"] = -torch.logsumexp(run.method.generic_logits(nets, z), 1)
            if test.split == "in":
                right = run.method.generic_logits(nets, z).argmax(1) == test.store.labels
                print(f"{place.stem}: accuracy {100 * right.float().mean():.1f} %", flush=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, place)


# Fits


def fit(method: ScoreWrapper, tensors: Mapping[str, Tensor], rounds: int, epochs: int, seed: int) -> ScoreNetwork:
    """The score network of a federation on fixed features: `rounds` times local epochs and a weighted mean."""
    clients = sorted({int(name.split(".")[1]) for name in tensors if name.startswith("train.")})
    own = {k: (tensors[f"train.{k}"], tensors[f"labels.{k}"]) for k in clients}
    classes = 1 + max(int(y.max()) for _, y in own.values() if len(y))
    width = tensors["train.0"].shape[1]
    score = with_seed(generator(seed, "score"), lambda: method.score_network(width, classes))
    sums: dict[str, Tensor] = {}
    for z, y in own.values():
        for name, value in score.moments(z, y).items():
            sums[name] = sums[name] + value if name in sums else value
    score.measure(sums)
    total = sum(len(y) for _, y in own.values())
    config = Config(batch_size=128)
    for round in range(rounds):
        start = {name: value.clone() for name, value in score.state_dict().items()}
        mean_of = {name: torch.zeros_like(value) for name, value in start.items()}
        for k, (z, y) in own.items():
            if len(y) < 2:
                continue
            score.load_state_dict(start)
            score.train()
            parameters = list(score.parameters())
            optimiser = GroupOptimiser(parameters, method.optimiser("score", Optimiser(0.1)), {})
            rng, order = Streams(seed, round, k), generator(seed, round, k, "order")
            for _ in range(epochs):
                for positions in epoch_positions(len(y), config, order):
                    loss = method.sm3d(score, score.scale(z[positions]), y[positions], rng)
                    optimiser.step(torch.autograd.grad(loss, parameters))
            for name, value in score.state_dict().items():
                mean_of[name] += value * (len(y) / total)
        score.load_state_dict(mean_of)
    return score.eval()


@torch.no_grad()
def norms(method: ScoreWrapper, score: ScoreNetwork, z: Tensor, level: float) -> Tensor:
    parts = []
    for part in torch.split(z, 2000):
        if isinstance(method, AnchoredFOOGD):
            found = score.steadied(score.scale(part), level, method.draws)  # type: ignore[operator]
        else:
            found = score(score.scale(part), level)
        parts.append(found.norm(dim=1))
    return torch.cat(parts)


def rows_of(name: str, place: Path, rounds: int, epochs: int, seed: int) -> list[dict[str, Any]]:
    """AUROC of one choice on one bank: a row for each OUT set and level."""
    tensors, method = load_file(place), candidates([name])[name]
    began = time.perf_counter()
    score = fit(method, tensors, rounds, epochs, seed)
    seconds = time.perf_counter() - began
    (inside,) = (value for key, value in tensors.items() if key.startswith("in."))
    outs = {key[4:]: value for key, value in tensors.items() if key.startswith("out.")}
    levels = (method.sigma,) if isinstance(method, AnchoredFOOGD) else LEVELS
    rows = []
    for level in levels:
        known = norms(method, score, inside, level)
        for out, z in outs.items():
            value = auroc(known, norms(method, score, z, level)) if bool(known.isfinite().all()) else float("nan")
            rows.append({"bank": place.stem, "choice": name, "level": level, "seed": seed, "out": out,
                         "auroc": round(100 * value, 2), "seconds": round(seconds, 1)})  # fmt: skip
    return rows


# Tables


def tables(rows: list[dict[str, str]]) -> str:
    """Means by bank, and the choices with a kind of net, or an OUT set, left out."""
    setting = {(r["choice"], r["level"]) for r in rows if r["choice"] != "anchored"}
    anchor = next((r["choice"], r["level"]) for r in rows if r["choice"] == "anchored")
    value: dict[tuple[tuple[str, str], str, str], float] = {}
    for key in {(r["choice"], r["level"], r["bank"], r["out"]) for r in rows}:
        found = [float(r["auroc"]) for r in rows if (r["choice"], r["level"], r["bank"], r["out"]) == key]
        value[(key[0], key[1]), key[2], key[3]] = mean(found)
    banks = sorted({bank for _, bank, _ in value})
    kinds = sorted({bank.split("-")[0] for bank in banks})
    outs = {bank: sorted({out for _, b, out in value if b == bank}) for bank in banks}

    def of_bank(choice: tuple[str, str], bank: str, without: str = "") -> float:
        return mean(value[choice, bank, out] for out in outs[bank] if out != without or len(outs[bank]) == 1)

    def of_kind(choice: tuple[str, str], kind: str) -> float:
        return mean(of_bank(choice, bank) for bank in banks if bank.split("-")[0] == kind)

    whole = sorted(c for c in setting if all((c, b, o) in value for b in banks for o in outs[b]))
    text = ["choice, level: mean of kinds | " + " | ".join(banks)]
    ranked = sorted([*whole, anchor], key=lambda c: -mean(of_kind(c, k) for k in kinds))
    for choice in ranked:
        cells = " | ".join(f"{of_bank(choice, bank):.1f}" for bank in banks)
        text.append(f"{choice[0]}, {choice[1]}: {mean(of_kind(choice, k) for k in kinds):.1f} | {cells}")
    text += ["", "one kind of net left out: chosen on the others | shown on it | anchored there"]
    shown = []
    for kind in kinds if len(kinds) > 1 else ():
        best = max(whole, key=lambda c: mean(of_kind(c, k) for k in kinds if k != kind))
        shown.append((of_kind(best, kind), of_kind(anchor, kind)))
        text.append(f"{kind}: {best[0]}, {best[1]} | {shown[-1][0]:.1f} | {shown[-1][1]:.1f}")
    if shown:
        text.append(f"mean | {mean(a for a, _ in shown):.1f} | {mean(b for _, b in shown):.1f}")
    text += ["", "one OUT set left out: chosen on all other sets of all banks | shown on it | anchored there"]
    names = sorted({out for bank in banks for out in outs[bank]})
    pairs = []
    for out in names:
        here = [bank for bank in banks if out in outs[bank]]

        def without(c: tuple[str, str], out: str = out) -> float:
            return mean(mean(of_bank(c, b, out) for b in banks if b.split("-")[0] == k) for k in kinds)

        best = max(whole, key=without)
        pairs.append((mean(value[best, b, out] for b in here), mean(value[anchor, b, out] for b in here)))
        text.append(f"{out}: {best[0]}, {best[1]} | {pairs[-1][0]:.1f} | {pairs[-1][1]:.1f}")
    text.append(f"mean | {mean(a for a, _ in pairs):.1f} | {mean(b for _, b in pairs):.1f}")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("bank", "fit", "tables"))
    parser.add_argument("places", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--choices", default="", help="names with ; between; default: all")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    if options.what == "bank":
        options.out.mkdir(parents=True, exist_ok=True)
        for folder in options.places:
            bank(Run.open(folder, read_run_config), options.out / f"{folder.name}.safetensors")
        return
    if options.what == "tables":
        with options.places[0].open() as file:
            print(tables(list(csv.DictReader(file))))
        return
    torch.set_num_threads(1)
    found = [one for at in options.places for one in (sorted(at.glob("*.safetensors")) if at.is_dir() else [at])]
    names = candidates(filter(None, options.choices.split(";")))
    done = set()
    if options.out.is_file():
        with options.out.open() as file:
            done = {(r["bank"], r["choice"], r["seed"]) for r in csv.DictReader(file)}
    for seed, place, name in itertools.product(range(options.seeds), found, names):
        if (place.stem, name, str(seed)) in done:
            continue
        rows = rows_of(name, place, options.rounds, options.epochs, seed)
        fresh = not options.out.is_file()
        with options.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            if fresh:
                writer.writeheader()
            writer.writerows(rows)
        levels = {row["level"] for row in rows}
        best = max((mean(row["auroc"] for row in rows if row["level"] == level), level) for level in levels)
        print(f"{place.stem}, {name}, seed {seed}: {best[0]:.1f} at {best[1]}, {rows[0]['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
