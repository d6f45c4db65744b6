"""The toys in the plane: true scores are gradients of true densities, training approaches them, figures are written."""

import sys
from pathlib import Path

import pytest
import torch
from scipy.stats import multivariate_normal

from foogd.cli import main
from foogd.engine.rng import Streams
from foogd.errors import InputError
from foogd.functional import mmd
from foogd.toy import (
    CLIENTS,
    LAMBDAS,
    TARGET,
    Mixture,
    Training,
    averaged,
    federated_toy,
    fit,
    floor,
    fresh_net,
    generate,
    lambda_figure,
    lambda_toy,
    mean_score,
    outcome,
    outcomes_table,
    save_figure,
)

SMALL = Training(steps=150, batch=64, width=32, chain=5)


@pytest.mark.parametrize("sigma", [0.0, 0.3])
def test_the_density_is_that_of_the_mixture_and_the_score_its_gradient(sigma, rng):
    z = 2 * torch.randn(40, 2, generator=rng, dtype=torch.float64)
    variance = TARGET.deviation**2 + sigma**2
    wanted = sum(
        weight * multivariate_normal(mean, variance).pdf(z.numpy())
        for mean, weight in zip(TARGET.means, TARGET.weights, strict=True)
    )
    assert torch.allclose(TARGET.log_density(z, sigma).exp(), torch.as_tensor(wanted), rtol=1e-5, atol=1e-300)
    z.requires_grad_(True)
    [gradient] = torch.autograd.grad(TARGET.log_density(z, sigma).sum(), z)
    assert torch.allclose(TARGET.score(z, sigma), gradient, rtol=1e-4, atol=1e-6)


def test_samples_have_the_shares_and_the_spread_of_the_mixture(rng):
    points = TARGET.sample(1000, rng)
    nearest = torch.cdist(points, torch.tensor(TARGET.means)).argmin(1)
    assert torch.bincount(nearest).tolist() == [500, 300, 200]
    rest = points - torch.tensor(TARGET.means)[nearest]
    assert rest.std() == pytest.approx(TARGET.deviation, rel=0.05)


def test_joined_mixtures_weigh_clients_the_same():
    everyone = CLIENTS[0].joined(CLIENTS[1:])
    z = torch.randn(20, 2, generator=torch.Generator().manual_seed(1))
    densities = torch.stack([client.log_density(z).exp() for client in CLIENTS])
    assert torch.allclose(everyone.log_density(z).exp(), densities.mean(0), rtol=1e-4)
    # The score of a mixture weighs the scores by the densities; the plain mean of scores is another field.
    scores = torch.stack([client.score(z) for client in CLIENTS])
    share = densities / densities.sum(0)
    assert torch.allclose(everyone.score(z), (share[..., None] * scores).sum(0), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(mean_score([client.score for client in CLIENTS])(z), everyone.score(z), rtol=0.5)
    with pytest.raises(InputError, match="deviation"):
        CLIENTS[0].joined([Mixture(((0.0, 0.0),), 1.0, (1.0,))])


def test_score_matching_learns_the_blurred_score():
    one = Mixture(((0.5, -0.5),), 0.5, (1.0,))
    how = Training(steps=400, batch=128, width=64)
    rng = Streams(0, "t")
    net = fit(fresh_net(how, rng), one.sample(2000, rng("p")), 0.0, how, rng)
    found = outcome("net", net, one, how, 0)
    assert found.error < 0.05
    sharp = (net(found.points) - one.score(found.points)).square().sum() / one.score(found.points).square().sum()
    assert sharp > 2 * found.error  # it is not the score of the points themselves


def test_the_true_score_has_no_error_and_the_zero_field_all_of_it():
    true = outcome("t", lambda z: TARGET.score(z, SMALL.sigma), TARGET, SMALL, 0)
    nothing = outcome("z", torch.zeros_like, TARGET, SMALL, 0)
    assert (true.error, nothing.error) == (0.0, 1.0)
    assert 0 < floor(TARGET, 0) < 0.005 < nothing.distance


def test_mmd_alone_moves_points_to_the_target():
    rng = Streams(1, "t")
    net = fresh_net(SMALL, rng)
    data = TARGET.sample(300, rng("p"))
    with torch.no_grad():
        before = float(mmd(generate(net, 500, SMALL, Streams(2)), data))
    fit(net, data, 1.0, SMALL, rng)
    with torch.no_grad():
        after = float(mmd(generate(net, 500, SMALL, Streams(2)), data))
    assert after < 0.7 * before


def test_a_share_of_0_or_1_computes_only_one_term(monkeypatch):
    def never(*_, **__):
        raise AssertionError

    rng, how = Streams(0), Training(steps=2, batch=8, width=8, chain=2)
    points = TARGET.sample(20, rng("p"))
    monkeypatch.setattr("foogd.toy.mmd", never)
    fit(fresh_net(how, rng), points, 0.0, how, rng)
    monkeypatch.undo()
    monkeypatch.setattr("foogd.toy.dsm", never)
    fit(fresh_net(how, rng), points, 1.0, how, rng)


def test_the_toy_of_lambda_starts_every_network_at_the_same_place_and_repeats():
    how = Training(steps=3, batch=16, width=8, chain=2)
    data, found = lambda_toy((0.0, 0.0, 0.5), how=how, seed=3)
    assert torch.equal(found[0].points, found[1].points)
    assert not torch.equal(found[0].points, found[2].points)
    assert torch.equal(lambda_toy((0.0,), how=how, seed=3)[0], data)
    assert not torch.equal(lambda_toy((0.0,), how=how, seed=4)[0], data)
    assert LAMBDAS == (0.0, 0.05, 0.1, 0.2, 0.4, 0.5, 0.8, 1.0)


def test_averaging_is_the_mean_of_parameters():
    nets = [fresh_net(SMALL, Streams(seed)) for seed in range(3)]
    mean = averaged(nets)
    key = "net.0.weight"
    assert torch.allclose(mean[key], sum(net.state_dict()[key] for net in nets) / 3)


def test_a_federation_of_equal_clients_learns_what_all_data_teach():
    one = Mixture(((0.3, 0.3),), 0.5, (1.0,))
    how = Training(steps=300, batch=64, width=32)
    data, found = federated_toy((one, one), rounds=(30,), points=1000, how=how, seed=0)
    assert len(data) == 2
    by_name = {outcome.name: outcome.error for outcome in found}
    assert list(by_name) == ["network averaged 30 times", "mean of the clients' scores", "one network on all data"]
    assert max(by_name.values()) < 0.2


def test_the_table_has_the_limits_below_the_numbers():
    _, found = lambda_toy((0.5,), how=Training(steps=1, batch=8, width=8, chain=1))
    table = outcomes_table("t", found, TARGET, SMALL, 0)
    assert [row[0] for row in table.rows] == ["lambda_m = 0.5", "true score", "fresh points of the target"]
    assert table.rows[1][2] == "0.000"


def test_the_same_figure_gives_the_same_bytes_whenever_it_is_written(tmp_path, monkeypatch):
    data, found = lambda_toy((0.5,), how=Training(steps=1, batch=8, width=8, chain=1))
    contents = []
    for moment in ("0", "1000000000"):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", moment)  # what matplotlib takes for now
        files = save_figure(lambda_figure(data, found, TARGET), tmp_path / moment / "toy")
        assert [path.suffix for path in files] == [".pdf", ".svg", ".png"]
        assert {path.name for path in files} == {path.name for path in (tmp_path / moment).iterdir()}  # no drafts
        contents.append([path.read_bytes() for path in files])
    assert contents[0] == contents[1]


def test_the_command_writes_figures_and_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["foogd", "toy", "--scale", "tiny", "--out", str(tmp_path / "t")])
    main()
    names = {path.name for path in Path(tmp_path / "t").iterdir()}
    assert names == {f"toy-{kind}.{suffix}" for kind in ("lambda", "federated") for suffix in ("pdf", "svg", "png")} | {
        "toy.md"
    }
    assert (tmp_path / "t" / "toy-lambda.pdf").read_bytes().startswith(b"%PDF")
    text = (tmp_path / "t" / "toy.md").read_text()
    assert "| lambda_m = 0.05 |" in text
    assert "| mean of the clients' scores |" in text
    assert "one network on all data" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["foogd", "toy", "--scale", "huge"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
