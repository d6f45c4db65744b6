"""The paper's figure in two dimensions: what the score network learns for each share of MMD in its loss.

    python examples/toy.py --out runs/toy          # toy.png, toy.pdf and a table; about a minute

The data are 300 points of three narrow Gaussians, far apart and of different weight. For each lambda_m one network
learns them with (1 - lambda_m)·DSM + lambda_m·MMD (Eq. 8), all from the same start and with the same draws. The density
is known, so each score can be compared with the true one.
"""

import argparse
import math
from pathlib import Path

import torch
from matplotlib.figure import Figure

from foogd.core.random import Streams, with_seed
from foogd.functional import dsm, langevin, mmd
from foogd.nets.score import ScoreNet

LAMBDAS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.5, 0.8, 1.0)  # those of the paper
MEANS, WEIGHTS, DEVIATION = torch.tensor([[-1.6, 0.9], [1.7, 1.3], [0.3, -1.8]]), torch.tensor([0.5, 0.3, 0.2]), 0.2
SIGMA = 0.3  # noise of score matching; what is learnt is the score of the density that this noise has blurred
BATCH, WIDTH = 128, 128
EXTENT = 3.2  # of the figure


# The data, of which everything is known


def sample(count, rng):
    """Points of the mixture; how many come from each Gaussian is not drawn, so that samples are alike."""
    centres = MEANS.repeat_interleave((WEIGHTS * count).round().int(), dim=0)
    return centres + DEVIATION * torch.randn(count, 2, generator=rng)


def log_joint(z, sigma=0.0):
    """log p(z, k) of each point and each Gaussian k, blurred by noise of deviation sigma."""
    variance = DEVIATION**2 + sigma**2
    distance = (z[:, None] - MEANS.to(z)).square().sum(2)
    return WEIGHTS.to(z).log() - distance / (2 * variance) - math.log(2 * math.pi * variance)


def log_density(z, sigma=0.0):
    return log_joint(z, sigma).logsumexp(1)


def true_score(z, sigma=0.0):
    """∇ log p(z): the mean of (m_k - z)/variance, weighted by how likely Gaussian k made z."""
    share = log_joint(z, sigma).softmax(1)
    return (share[:, :, None] * (MEANS.to(z) - z[:, None])).sum(1) / (DEVIATION**2 + sigma**2)


# Learning and measuring


def generate(score, count, rng):
    """Points by 20 Langevin steps from N(0, I), Eq. 6."""
    start = torch.randn(count, 2, generator=rng("start"))
    return langevin(score, start, step=0.1, steps=20, rng=rng("langevin"))


def fit(points, lambda_m, steps=800, seed=0):
    """z ↦ s(z, SIGMA) of a network that has learnt the points as they are, at one noise level."""
    rng = Streams(seed, "toy", "fit")  # rng(purpose) is a generator of its own for each purpose
    net = with_seed(rng("net"), lambda: ScoreNet(2, WIDTH))
    optimiser = torch.optim.Adam(net.parameters(), lr=2e-3)

    def score(z):
        return net(z, SIGMA)

    for _ in range(steps):
        batch = points[torch.randint(len(points), (BATCH,), generator=rng("batch"))]
        matching = dsm(score, batch, sigma=SIGMA, rng=rng("dsm"))
        discrepancy = mmd(batch, generate(score, BATCH, rng))
        optimiser.zero_grad()
        ((1 - lambda_m) * matching + lambda_m * discrepancy).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optimiser.step()
    return score


@torch.no_grad()
def measure(score, seed=0, count=1000):
    """Generated points, their squared MMD to fresh points, and ‖s - s*‖² relative to ‖s*‖² at blurred fresh points."""
    rng = Streams(seed, "toy", "test")
    points, fresh = generate(score, count, rng), sample(count, rng("fresh"))
    blurred = fresh + SIGMA * torch.randn(count, 2, generator=rng("blur"))
    truth = true_score(blurred, SIGMA)
    error = (score(blurred) - truth).square().sum() / truth.square().sum()
    return points, float(mmd(points, fresh)), float(error)


# The figure


def grid(side):
    return torch.meshgrid(*2 * [torch.linspace(-EXTENT, EXTENT, side)], indexing="xy")


@torch.no_grad()
def draw(axes, title, score, data, generated):
    """Arrows of the score, lines of equal density, the training points, and the points that the score generates."""
    x, y = grid(17)
    s = score(torch.stack([x, y], 2).view(-1, 2))
    norm = s.norm(dim=1, keepdim=True)
    u, v = (s / norm * norm.log1p()).view(17, 17, 2).unbind(2)  # compressed, so that short arrows can be seen
    axes.quiver(x, y, u, v, color="0.55", width=0.0045, scale=45, headwidth=4.5, zorder=1)
    x, y = grid(121)
    height = log_density(torch.stack([x, y], 2).view(-1, 2)).view(121, 121)
    # Where a lone Gaussian is three, two and one deviations from its peak.
    levels = [float(height.max()) - deviations**2 / 2 for deviations in (3, 2, 1)]
    axes.contour(x, y, height, levels, colors="0.15", linewidths=0.6, linestyles="solid", zorder=4)
    style = {"linewidths": 0.6, "alpha": 0.75}
    axes.scatter(*generated[:300].T, s=5, marker=".", color="#0072b2", label="generated", zorder=2, **style)
    axes.scatter(*data.T, s=9, marker="x", color="#d55e00", label="target", zorder=3, **style)
    axes.set(title=title, xlim=(-EXTENT, EXTENT), ylim=(-EXTENT, EXTENT), aspect="equal")
    axes.title.set_fontsize(9)
    axes.tick_params(labelsize=7)


def main():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--out", type=Path, default=Path("runs/toy"), metavar="DIR", help="folder of the figure")
    words.add_argument("--steps", type=int, default=800, help="training steps of each network (default 800)")
    words.add_argument("--seed", type=int, default=0)
    asked = words.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # nets this small lose time to threads
    data = sample(300, Streams(asked.seed, "toy", "points")("points"))
    figure = Figure(figsize=(10.4, 6.2), layout="constrained")
    panels = figure.subplots(2, 4).ravel()
    print("| score | squared MMD of generated points | relative error of the score |\n| --- | ---: | ---: |")
    for axes, lambda_m in zip(panels, LAMBDAS, strict=True):
        score = fit(data, lambda_m, asked.steps, asked.seed)
        points, distance, error = measure(score, asked.seed)
        print(f"| lambda_m = {lambda_m:g} | {distance:.4f} | {error:.3f} |", flush=True)
        draw(axes, f"$\\lambda_m = {lambda_m:g}$\nMMD² {distance:.4f}", score, data, points)
    _, distance, error = measure(lambda z: true_score(z, SIGMA), asked.seed)
    print(f"| true score | {distance:.4f} | {error:.3f} |")
    again = Streams(asked.seed, "toy", "floor")
    print(f"| fresh points of the target | {float(mmd(sample(1000, again('a')), sample(1000, again('b')))):.4f} | – |")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9, markerscale=2)
    for suffix in ("png", "pdf"):
        figure.savefig(asked.out / f"toy.{suffix}", dpi=200)
    print(f"Figure: {asked.out / 'toy.png'} (and .pdf)")


if __name__ == "__main__":
    main()
