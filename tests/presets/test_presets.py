"""The presets name everything that decides a result, and their partitions can be made."""

import tomllib
from importlib import resources

import pytest
import torch

from foogd import FOOGD, AnchoredFOOGD
from foogd.data.partition import dirichlet, follow
from foogd.methods import method_names
from foogd.presets.loader import preset_names, read_preset, resolve

PAPER = ("cifar10", "cifar100", "tinyimagenet", "pacs")


def test_the_presets_of_the_paper_are_there():
    assert {*PAPER, "demo"} <= set(preset_names())


@pytest.mark.parametrize("method", method_names())
@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_fits_every_method(preset, method):
    config, built = resolve(read_preset(preset), {"method": method})
    assert config.method == method
    assert built is not None


@pytest.mark.parametrize("preset", preset_names())
def test_a_preset_names_what_decides_a_result(preset):
    text = (resources.files("foogd") / "presets" / f"{preset}.toml").read_text()
    named = tomllib.loads(text)
    needed = {"data", "out", "corruptions", "clients", "partition", "participation", "backbone", "rounds",
              "local_epochs", "batch_size", "lr", "momentum", "weight_decay", "flip", "crop", "detectors",
              "eval_every"}  # fmt: skip
    assert needed <= named.keys()
    assert named["foogd"]["profile"] == "published"


@pytest.mark.parametrize("preset", PAPER)
def test_the_papers_detectors_and_ours_are_asked(preset):
    papers, ours = ["msp", "energy", "score_norm"], ["score_energy", "score_near", "span_own", "score_span"]
    assert read_preset(preset)["detectors"] == [*papers, *ours, "score_span_all"]


@pytest.mark.parametrize("preset", PAPER)
def test_the_papers_settings(preset):
    config, method = resolve(read_preset(preset), {"method": "fedavg+foogd"})
    assert (config.rounds, config.local_epochs, config.batch_size) == (100, 5, 128)
    # The printed rate, but for alpha 0.1 on CIFAR, where the gain of FOOGD was seen at another one.
    assert config.lr == (0.01 if preset.startswith("cifar") else 0.1)
    assert (config.momentum, config.weight_decay) == (0.9, 5e-4)
    assert method == FOOGD()
    assert (method.lambda_m, method.lambda_a, method.ce_on) == (0.5, 0.05, "ori")
    assert resolve(read_preset(preset), {"method": "fedavg+foogd", "profile": "anchored"})[1] == AnchoredFOOGD()
    assert config.clients == (3 if preset == "pacs" else 10)
    assert config.backbone == ("wrn40-2" if preset.startswith("cifar") else "resnet18")


@pytest.mark.parametrize("preset", ["cifar10", "cifar100", "tinyimagenet"])
def test_the_five_out_sets_of_the_paper_are_tested(preset):
    assert set(read_preset(preset)["out"]) == {"lsun_c", "lsun_r", "svhn", "textures", "isun"}


@pytest.mark.parametrize("clients", [5, 10, 20, 50])
@pytest.mark.parametrize("alpha", [0.1, 0.5, 5.0])
def test_partitions_of_the_papers_sizes(alpha, clients):
    labels = torch.arange(10).repeat(5000)
    parts = dirichlet(labels, clients=clients, alpha=alpha, seed=21, min_size=2)
    assert torch.equal(torch.cat(list(parts)).sort().values, torch.arange(50_000))
    test = follow(torch.arange(10).repeat(1000), parts.proportions, 21)
    assert sum(len(part) for part in test) == 10_000
    for own, mine in zip(parts, test, strict=True):
        wanted = torch.bincount(labels[own], minlength=10) / 5
        found = torch.bincount(torch.arange(10).repeat(1000)[mine], minlength=10)
        assert (wanted - found).abs().max() <= 1.5


def test_what_the_paper_prints_for_one_data_set_stands_in_its_preset():
    assert resolve(read_preset("pacs"), {"method": "fedt3a"})[1].filter == 50
    assert resolve(read_preset("cifar10"), {"method": "fedt3a"})[1].filter == 100
    assert resolve(read_preset("cifar100"), {"method": "fedatol"})[1].lambda_al == 5.0
