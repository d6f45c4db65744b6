"""Stand-ins are read by the readers of the true formats and say what they are; samples keep classes and domains."""

import json

import pytest
import torch

from foogd.data.catalogue import CATALOGUE, locate
from foogd.data.sources import load_source
from foogd.data.standins import MARK, make_stand_ins, sample, stand_ins
from foogd.data.store import ImageStore
from foogd.errors import InputError

SETS = {
    # name: kind of files, classes, pixels
    "cifar10": ("python release", 10, 32),
    "cifar100": ("python release", 100, 32),
    "tinyimagenet": ("official folders", 200, 64),
    "pacs": ("official folders", 7, 32),
    "svhn": ("MATLAB file", 10, 32),
    "textures": ("official folders", 4, 32),
    "isun": ("folder of images", 1, 32),
    "lsun_c": ("folder of images", 1, 32),
    "lsun_r": ("folder of images", 1, 32),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    place = tmp_path_factory.mktemp("root")
    make_stand_ins(place, SETS, train=60, test=30, out=20)
    return place


@pytest.mark.parametrize("name", SETS)
def test_a_stand_in_has_the_format_of_the_real_set_and_its_name_says_what_it_is(root, name):
    kind, classes, px = SETS[name]
    layout, _ = locate(CATALOGUE[name], root)
    assert layout.kind == kind
    for _ in range(2):  # decoded, then from the cache
        store = load_source(name, root)
        assert store.name == f"{name} (stand-in)"
        assert store.shape == (3, px, px)
        assert len(torch.unique(store.labels)) == classes
    if CATALOGUE[name].role == "in" and name != "pacs":
        assert set(store.labels[store.test].tolist()) == set(store.labels[~store.test].tolist()) == set(range(classes))


def test_the_domains_of_pacs_hold_every_class(root):
    store = load_source("pacs", root)
    assert {(d, y) for d, y in zip(store.domains.tolist(), store.labels.tolist(), strict=True)} == {
        (d, y) for d in range(4) for y in range(7)
    }


def test_images_of_one_class_are_alike_and_those_of_two_are_not(root):
    store = load_source("cifar10", root)
    x = store.images.float().flatten(1)
    distance = torch.cdist(x, x)
    same = store.labels[:, None] == store.labels
    assert distance[same & ~torch.eye(len(x), dtype=torch.bool)].max() < distance[~same].min()


def test_the_folder_says_it_too_and_what_is_there_is_not_made_again(root):
    assert stand_ins(root) == list(SETS)
    assert "made up" in json.loads((root / MARK).read_text())["about"]
    file = root / "cifar10" / "data_batch_1"
    before = file.stat().st_mtime_ns
    make_stand_ins(root, ["cifar10"], train=60, test=30, out=20)
    assert file.stat().st_mtime_ns == before


def test_real_data_keep_their_name(tmp_path):
    store = ImageStore(torch.zeros(4, 32, 32, 3, dtype=torch.uint8), torch.arange(4) % 2, test=torch.arange(4) > 1)
    store.save(tmp_path / "cifar10.npz")
    assert load_source("cifar10", tmp_path).name == "cifar10"


def test_what_cannot_be_made_or_read_is_named(tmp_path):
    with pytest.raises(InputError, match=r"'cifar10c'.*svhn"):
        make_stand_ins(tmp_path, ["cifar10c"], train=1, test=1, out=1)
    (tmp_path / MARK).write_text("{")
    with pytest.raises(InputError, match=MARK):
        stand_ins(tmp_path)


def test_a_sample_keeps_the_shares_of_classes_and_parts():
    labels = torch.arange(1000) % 10
    test = torch.arange(1000) >= 800
    images = torch.arange(1000).remainder(256).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 8, 8, 1)
    store = ImageStore(images, labels, name="big", test=test)
    small = sample(store, train=80, test=20)
    assert torch.bincount(small.labels[~small.test]).tolist() == [8] * 10
    assert torch.bincount(small.labels[small.test]).tolist() == [2] * 10
    assert small.name == "big (sample of 100)"
    assert torch.equal(sample(store, train=80, test=20).images, small.images)


def test_a_sample_has_every_class_of_every_domain_and_never_more_than_there_is():
    labels, domains = torch.arange(60) % 5, torch.arange(60) // 30
    store = ImageStore(torch.zeros(60, 8, 8, dtype=torch.uint8), labels, name="d", domains=domains)
    small = sample(store, train=4, test=0)
    found = {*zip(small.domains.tolist(), small.labels.tolist(), strict=True)}
    assert found == {(d, c) for d in (0, 1) for c in range(5)}
    assert len(sample(store, train=10**6, test=10**6)) == 60
