"""Two toys in the plane, where every density and score is known: SM3D for each lambda_m, and scores of a federation.

The first shows what the two terms of Eq. 8 do to generated points. The second shows what becomes of the scores of
clients that see different modes: when networks are averaged, when scores are, and with all data in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from . import figures
from .engine.rng import Streams, with_seed
from .errors import InputError
from .functional import dsm, langevin, mmd
from .nets.score import ScoreNet
from .report import Table

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.figure import Figure

    Points = Float[Tensor, "n 2"]

Field = Callable[[Tensor], Tensor]
LAMBDAS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.5, 0.8, 1.0)
"""The shares of MMD in the paper's figure."""


@final
@dataclass(frozen=True)
class Mixture:
    """A mixture of round Gaussians in the plane: means, one standard deviation, weights that sum to 1."""

    means: tuple[tuple[float, float], ...]
    deviation: float
    weights: tuple[float, ...]

    def sample(self, count: int, rng: torch.Generator) -> Points:
        """So many points; the numbers from each component are the weights, rounded, so that samples are alike."""
        edges = torch.cumsum(torch.tensor(self.weights), 0) * count
        which = torch.searchsorted(edges.round().clamp(max=count), torch.arange(count), right=True)
        centres = torch.tensor(self.means)[which.clamp(max=len(self.means) - 1)]
        return centres + self.deviation * torch.randn(count, 2, generator=rng)

    def log_density(self, z: Points, sigma: float = 0.0) -> Float[Tensor, " n"]:
        """log p of points, blurred by noise of deviation sigma."""
        return torch.logsumexp(self._joint(z, sigma), dim=1)

    def score(self, z: Points, sigma: float = 0.0) -> Points:
        """∇ log p: the mean of (m_k − z)/v, weighted by how likely component k made z; v = deviation² + sigma²."""
        share = torch.softmax(self._joint(z, sigma), dim=1)
        away = torch.tensor(self.means, dtype=z.dtype)[None] - z[:, None]
        return (share[:, :, None] * away).sum(1) / (self.deviation**2 + sigma**2)

    def _joint(self, z: Tensor, sigma: float) -> Tensor:
        variance = self.deviation**2 + sigma**2
        away = torch.cdist(z, torch.tensor(self.means, dtype=z.dtype)).square()
        log_weights = torch.tensor(self.weights, dtype=z.dtype).log()
        return log_weights - away / (2 * variance) - torch.log(torch.tensor(2 * torch.pi * variance, dtype=z.dtype))

    def joined(self, others: Sequence[Mixture]) -> Mixture:
        """This mixture and others of the same deviation, each with the same share."""
        parts = (self, *others)
        if any(part.deviation != self.deviation for part in parts):
            raise InputError("only mixtures of one standard deviation can be joined")
        means = tuple(mean for part in parts for mean in part.means)
        return Mixture(means, self.deviation, tuple(w / len(parts) for part in parts for w in part.weights))


@final
@dataclass(frozen=True)
class Training:
    """How a score network learns points: SM3D as in Eq. 8, Adam."""

    steps: int = 800
    batch: int = 128
    width: int = 128
    lr: float = 2e-3
    sigma: float = 0.3  # noise of DSM; what is learnt is the score of the density blurred by it
    step: float = 0.1  # of Langevin, Eq. 6
    chain: int = 20  # Langevin steps


def fresh_net(how: Training, rng: Streams) -> ScoreNet:
    """A score network of the plane, drawn from its own stream."""
    return with_seed(rng("net"), lambda: ScoreNet(2, how.width))


def fit(net: ScoreNet, points: Points, lambda_m: float, how: Training, rng: Streams) -> ScoreNet:
    """Train on points with (1 − lambda_m)·DSM + lambda_m·MMD, Eq. 8; a term without weight is not computed."""
    optimiser = torch.optim.Adam(net.parameters(), lr=how.lr)
    for _ in range(how.steps):
        batch = points[torch.randint(len(points), (how.batch,), generator=rng("batch"))]
        terms = []
        if lambda_m < 1:
            terms.append((1 - lambda_m) * dsm(net, batch, sigma=how.sigma, rng=rng("dsm")))
        if lambda_m > 0:
            terms.append(lambda_m * mmd(batch, generate(net, len(batch), how, rng)))
        gradients = torch.autograd.grad(sum(terms[1:], terms[0]), list(net.parameters()))
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optimiser.step()
    return net


def generate(score: Field, count: int, how: Training, rng: Streams) -> Points:
    """Points by Langevin sampling from N(0, I), Eq. 6."""
    start = torch.randn(count, 2, generator=rng("start"))
    return langevin(score, start, step=how.step, steps=how.chain, rng=rng("langevin"))


# Numbers


@final
@dataclass(frozen=True)
class Outcome:
    """One score field of a toy: its name, the field, points that it generates, and how far both are from the truth."""

    name: str
    field: Field
    points: Points
    distance: float  # squared MMD of the points to fresh points of the target
    error: float  # mean of ‖s − s*‖² over that of ‖s*‖², on blurred points of the target


def outcome(name: str, field: Field, target: Mixture, how: Training, seed: int, count: int = 1000) -> Outcome:
    """Generate points with a field and measure both; every field meets the same noise."""
    rng = Streams(seed, "toy", "test")
    with torch.no_grad():
        points = generate(field, count, how, rng)
        fresh = target.sample(count, rng("fresh"))
        blurred = fresh + how.sigma * torch.randn(count, 2, generator=rng("blur"))
        truth = target.score(blurred, how.sigma)
        error = (field(blurred) - truth).square().sum() / truth.square().sum()
        return Outcome(name, field, points, float(mmd(points, fresh)), float(error))


def floor(target: Mixture, seed: int, count: int = 1000) -> float:
    """The squared MMD of two fresh samples of the target: nothing can be expected to be smaller."""
    rng = Streams(seed, "toy", "floor")
    return float(mmd(target.sample(count, rng("a")), target.sample(count, rng("b"))))


def outcomes_table(title: str, outcomes: Sequence[Outcome], target: Mixture, how: Training, seed: int) -> Table:
    """The numbers of a toy, with those of the true score and of fresh points of the target as limits."""
    true = outcome("true score", lambda z: target.score(z, how.sigma), target, how, seed)
    lines = [(one.name, f"{one.distance:.4f}", f"{one.error:.3f}") for one in (*outcomes, true)]
    lines.append(("fresh points of the target", f"{floor(target, seed):.4f}", "–"))
    return Table(title, ("score", "squared MMD of generated points", "relative error of the score"), tuple(lines))


# The two toys

TARGET = Mixture(((-1.6, 0.9), (1.7, 1.3), (0.3, -1.8)), 0.2, (0.5, 0.3, 0.2))
"""Three narrow modes of different weight, far apart: sparse and multi-modal, as in the paper's motivation."""

CLIENTS = (
    Mixture(((-1.7, 0.2), (-1.0, 1.6)), 0.25, (0.5, 0.5)),
    Mixture(((1.6, 1.1),), 0.25, (1.0,)),
    Mixture(((0.2, -1.7), (1.5, -1.0)), 0.25, (0.7, 0.3)),
)
"""Three clients, each with modes of its own."""


def lambda_toy(
    lambdas: Sequence[float] = LAMBDAS, *, target: Mixture = TARGET, points: int = 300, how: Training, seed: int = 0
) -> tuple[Points, list[Outcome]]:
    """The points, and a network trained on them for each share of MMD, all from the same start."""
    data = target.sample(points, Streams(seed, "toy", "points")("points"))
    found = []
    for lambda_m in lambdas:
        rng = Streams(seed, "toy", "fit")
        net = fit(fresh_net(how, rng), data, lambda_m, how, rng)
        found.append(outcome(f"lambda_m = {lambda_m:g}", net, target, how, seed))
    return data, found


def averaged(nets: Sequence[ScoreNet]) -> Mapping[str, Tensor]:
    """The mean of the parameters, as the server makes it of clients of the same size."""
    states = [net.state_dict() for net in nets]
    return {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}


def mean_score(nets: Sequence[Field]) -> Field:
    """The mean of the clients' scores: the score of the geometric mean of their densities."""

    def field(z: Tensor) -> Tensor:
        return torch.stack([net(z) for net in nets]).mean(0)

    return field


def federated_toy(
    clients: Sequence[Mixture] = CLIENTS, *, rounds: Sequence[int] = (20, 200), points: int = 300, how: Training,
    seed: int = 0,
) -> tuple[list[Points], list[Outcome]]:  # fmt: skip
    """The points of the clients, and ways to one score: networks averaged so many times, mean of scores, all data.

    Score matching alone (lambda_m = 0), the same number of steps for everyone.
    """
    target = clients[0].joined(clients[1:])
    data = [one.sample(points, Streams(seed, "toy", "client", k)("points")) for k, one in enumerate(clients)]
    start = fresh_net(how, Streams(seed, "toy", "federated")).state_dict()

    def net_of(state: Mapping[str, Tensor]) -> ScoreNet:
        net = ScoreNet(2, how.width)
        net.load_state_dict(dict(state))
        return net

    def trained(state: Mapping[str, Tensor], own: Points, steps: int, *stream: int | str) -> ScoreNet:
        return fit(net_of(state), own, 0.0, replace(how, steps=steps), Streams(seed, "toy", *stream))

    fields: list[tuple[str, Field]] = []
    for count in rounds:
        state: Mapping[str, Tensor] = start
        for number in range(count):
            local = max(1, how.steps // count)
            state = averaged([trained(state, own, local, "round", count, number, k) for k, own in enumerate(data)])
        fields.append((f"network averaged {count} times", net_of(state)))
    alone = [trained(start, own, how.steps, "alone", k) for k, own in enumerate(data)]
    fields.append(("mean of the clients' scores", mean_score(alone)))
    fields.append(("one network on all data", trained(start, torch.cat(data), how.steps, "central")))
    return data, [outcome(name, field, target, how, seed) for name, field in fields]


# Figures

_BLUE, _ORANGE, _GREEN = "#0072b2", "#d55e00", "#009e73"  # told apart by colour-blind people, and in grey by markers
_MARKS = (("x", _ORANGE), ("^", _GREEN), ("s", "#cc79a7"), ("d", "#e69f00"))
_EXTENT = 3.2


def lambda_figure(data: Points, outcomes: Sequence[Outcome], target: Mixture) -> Figure:
    """For each share of MMD the score field, the training points, the points that it generates, the true density."""
    from matplotlib.figure import Figure

    columns = 4 if len(outcomes) > 4 else len(outcomes)
    rows = -(-len(outcomes) // columns)
    figure = Figure(figsize=(2.6 * columns, 2.85 * rows + 0.5), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, one in zip(panels, outcomes, strict=False):
        _draw_field(axes, one.field)
        _draw_density(axes, target)
        _draw_points(axes, one.points, "generated", ".", _BLUE)
        _draw_points(axes, data, "target", "x", _ORANGE)
        axes.set_title(f"$\\lambda_m = {one.name.rpartition(' ')[2]}$\nMMD² {one.distance:.4f}", fontsize=9)
    for axes in panels[len(outcomes) :]:
        axes.set_axis_off()
    _legend(figure, panels[0])
    return figure


def federated_figure(data: Sequence[Points], outcomes: Sequence[Outcome], target: Mixture, how: Training) -> Figure:
    """The true score of all clients' data with their points, and beside it each learnt score with what it generates."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.6 * (len(outcomes) + 1), 3.4), layout="constrained")
    panels = figure.subplots(1, len(outcomes) + 1, squeeze=False).ravel()
    _draw_field(panels[0], lambda z: target.score(z, how.sigma))
    _draw_density(panels[0], target)
    for number, own in enumerate(data):
        mark, colour = _MARKS[number % len(_MARKS)]
        _draw_points(panels[0], own, f"client {number}", mark, colour)
    panels[0].set_title("true score of all data\n(points of the clients)", fontsize=9)
    for axes, one in zip(panels[1:], outcomes, strict=True):
        _draw_field(axes, one.field)
        _draw_density(axes, target)
        _draw_points(axes, one.points, "generated", ".", _BLUE)
        axes.set_title(f"{one.name}\nerror {one.error:.2f}, MMD² {one.distance:.4f}", fontsize=9)
    _legend(figure, *panels[:2])
    return figure


def _draw_field(axes: Any, field: Field) -> None:
    """Arrows of the score; their lengths are its norm, compressed, so that the small ones can be seen."""
    side = torch.linspace(-_EXTENT, _EXTENT, 17)
    x, y = torch.meshgrid(side, side, indexing="xy")
    with torch.no_grad():
        s = field(torch.stack([x.ravel(), y.ravel()], 1))
    norm = torch.linalg.vector_norm(s, dim=1, keepdim=True).clamp_min(1e-12)
    arrows = s / norm * torch.log1p(norm)
    options = {"color": "0.55", "width": 0.0045, "scale": 45, "headwidth": 4.5, "zorder": 1}
    axes.quiver(x.numpy(), y.numpy(), arrows[:, 0].view_as(x).numpy(), arrows[:, 1].view_as(x).numpy(), **options)
    axes.set_aspect("equal")
    axes.set_xlim(-_EXTENT, _EXTENT)
    axes.set_ylim(-_EXTENT, _EXTENT)
    axes.tick_params(labelsize=7)


def _draw_density(axes: Any, target: Mixture) -> None:
    """Lines of equal density of the target: where a lone Gaussian is at one, two and three deviations from its peak."""
    side = torch.linspace(-_EXTENT, _EXTENT, 121)
    x, y = torch.meshgrid(side, side, indexing="xy")
    height = target.log_density(torch.stack([x.ravel(), y.ravel()], 1)).view_as(x)
    levels = sorted(float(height.max()) - 0.5 * deviations**2 for deviations in (1, 2, 3))
    style = {"colors": "0.15", "linewidths": 0.6, "linestyles": "solid", "zorder": 4}
    axes.contour(x.numpy(), y.numpy(), height.numpy(), levels=levels, **style)


def _draw_points(axes: Any, points: Points, label: str, mark: str, colour: str) -> None:
    size = 5 if mark == "." else 9
    shown = points[:300]
    axes.scatter(
        shown[:, 0].numpy(), shown[:, 1].numpy(), s=size, marker=mark, color=colour, linewidths=0.6, alpha=0.75,
        label=label, zorder=2 if mark == "." else 3,
    )  # fmt: skip


def _legend(figure: Figure, *panels: Any) -> None:
    found: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    figure.legend(
        list(found.values()), list(found), loc="outside lower center", ncols=len(found), frameon=False, fontsize=9,
        markerscale=2,
    )  # fmt: skip


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """The figure as PDF, SVG and PNG; the path has no suffix, and the same figure gives the same bytes."""
    for vector in ("pdf", "svg"):
        figures.save_figure(path, figure, vector)  # the PNG comes with each
    return [path.with_name(f"{path.name}.{suffix}") for suffix in ("pdf", "svg", "png")]
