"""The examples and benchmarks that no other test runs: the toy in the plane, and what the framework costs."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import multivariate_normal

ROOT = Path(__file__).parents[2]


def script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def toy():
    return script("examples/toy.py")


@pytest.mark.parametrize("sigma", [0.0, 0.3])
def test_the_toys_true_score_is_the_gradient_of_its_density(toy, rng, sigma):
    z = 2 * torch.randn(40, 2, generator=rng, dtype=torch.float64)
    variance = toy.DEVIATION**2 + sigma**2
    wanted = sum(
        weight * multivariate_normal(mean, variance).pdf(z.numpy())
        for mean, weight in zip(toy.MEANS.tolist(), toy.WEIGHTS.tolist(), strict=True)
    )
    assert torch.allclose(toy.log_density(z, sigma).exp(), torch.as_tensor(wanted), rtol=1e-5, atol=1e-300)
    z.requires_grad_(True)
    [gradient] = torch.autograd.grad(toy.log_density(z, sigma).sum(), z)
    assert torch.allclose(toy.true_score(z, sigma), gradient)


def test_the_toys_points_have_the_shares_and_the_spread_of_its_density(toy, rng):
    points = toy.sample(1000, rng)
    nearest = torch.cdist(points, toy.MEANS).argmin(1)
    assert torch.bincount(nearest).tolist() == [500, 300, 200]
    assert (points - toy.MEANS[nearest]).std() == pytest.approx(toy.DEVIATION, rel=0.05)


def test_what_the_toy_trains_comes_nearer_to_the_truth(toy, rng):
    """The score by score matching, generated points by MMD; no field has an error of 1, the true one of 0."""
    _, far, nothing = toy.measure(torch.zeros_like)
    _, _, truth = toy.measure(lambda z: toy.true_score(z, toy.SIGMA))
    assert (nothing, truth) == (1.0, 0.0)
    data = toy.sample(300, rng)
    assert toy.measure(toy.fit(data, 0.0, steps=120))[2] < 0.75
    assert toy.measure(toy.fit(data, 1.0, steps=80))[1] < 0.6 * far


def test_the_toy_makes_the_papers_figure_by_one_command(toy, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["toy.py", "--out", str(tmp_path / "new" / "toy"), "--steps", "1"])
    toy.main()
    printed = capsys.readouterr().out
    for lambda_m in (0, 0.05, 0.1, 0.2, 0.4, 0.5, 0.8, 1):
        assert f"| lambda_m = {lambda_m:g} |" in printed
    assert (tmp_path / "new" / "toy" / "toy.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "new" / "toy" / "toy.pdf").read_bytes().startswith(b"%PDF")


def test_the_cost_of_the_framework_is_measured_with_the_model_that_the_page_names():
    framework, bare, values = script("benchmarks/overhead.py").time_rounds(1, warm_up=0)
    assert min(*framework, *bare) > 0
    assert f"({values:,} values), no training" in (ROOT / "docs" / "performance.md").read_text()


def test_the_picture_of_fedatols_generator_has_a_line_a_number_of_rounds(tmp_path, monkeypatch):
    place = tmp_path / "images.png"
    monkeypatch.setattr(sys, "argv", ["gan_images.py", str(place), "--rounds", "0", "1"])
    script("benchmarks/gan_images.py").main()
    first, second = torch.from_numpy(np.array(Image.open(place))).float().view(2, 30, 16 * 30)
    assert second[1:-1, 1:29].std() > 3 * first[1:-1, 1:29].std()  # grey before anything is learnt
