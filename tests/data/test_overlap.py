"""Leaving a domain out, training images in test sets, and where images are kept."""

import json
from dataclasses import replace

import pytest
import torch

from foogd import Config, FedAvg, Federation, FedRoD, ImageStore, InputError, evaluate, simulate
from foogd.data.federation import TestSet
from foogd.data.overlap import count_leaks
from foogd.engine.eager import EagerEngine, fits
from foogd.runs.federation import image_hashes, leaks_sentence, read_leaks, write_partition
from foogd.runs.picture import partition_figure


@pytest.fixture
def store(rng):
    """Three domains with their own brightness, four classes, 20 images each."""
    labels = torch.arange(4).repeat_interleave(20).repeat(3)
    domains = torch.arange(3).repeat_interleave(80)
    images = torch.randint(0, 60, (240, 16, 16, 3), generator=rng, dtype=torch.uint8)
    images += (labels * 40 + domains * 10).to(torch.uint8)[:, None, None, None]
    return ImageStore(images, labels, domains=domains, domain_names=("ward", "lab", "field"), name="sites")


def test_a_domain_left_out_is_trained_on_by_nobody_and_tested_as_in_c(store):
    federation = Federation.build(store, clients=2, partition="by_domain", seed=0, leave_out="lab")
    assert set(federation.train.domains.tolist()) == {0, 2}
    (unseen,) = [test for test in federation.tests if test.unseen]
    assert (unseen.split, unseen.name, len(unseen.store)) == ("in-c", "lab", 80)
    assert set(unseen.store.domains.tolist()) == {1}
    assert all(len(indices) == 80 for indices in unseen.indices)


def test_an_out_set_with_the_name_of_the_in_data_gets_another_and_its_leaks_are_counted_apart(store):
    out = ImageStore(torch.full((5, 16, 16, 3), 255, dtype=torch.uint8), torch.zeros(5).long(), name="sites")
    copied = replace(store, images=store.images[:1].expand_as(store.images), test=torch.arange(240) % 2 == 1)
    federation = Federation.build(copied, outs=[out], clients=2, seed=0)
    keys = [test.key for test in federation.tests]
    assert keys == ["sites", "sites (OUT)"]
    assert count_leaks(federation) == {"sites": 120, "sites (OUT)": 0}
    assert len(image_hashes(federation)) == 3


@pytest.mark.parametrize(("name", "word"), [("moon", "ward, lab, field"), ("1", "ward, lab, field")])
def test_an_unknown_domain_is_one_sentence(store, name, word):
    with pytest.raises(InputError, match=word):
        Federation.build(store, clients=2, partition="by_domain", seed=0, leave_out=name)


def test_a_store_without_domains_cannot_leave_one_out(store):
    with pytest.raises(InputError, match="needs images with domains"):
        Federation.build(replace(store, domains=None, domain_names=()), clients=2, seed=0, leave_out="lab")


def test_domain_names_travel_with_the_file(store, tmp_path):
    store.save(tmp_path / "a.npz")
    assert ImageStore.load(tmp_path / "a.npz").domain_names == store.domain_names
    with pytest.raises(InputError, match="domains are named"):
        replace(store, domain_names=("ward",))


def test_an_unseen_domain_is_answered_by_the_generic_head(store, config):
    federation = Federation.build(store, clients=2, partition="by_domain", seed=0, leave_out="lab")
    engine = EagerEngine(FedRoD(), federation, config)
    *_, last = simulate(FedRoD(), federation, config, engine)
    state = last.state
    for client in state.clients:  # private heads that always say class 0
        client.personal = torch.zeros_like(client.personal)
        client.personal[-4:] = torch.tensor([1e6, 0.0, 0.0, 0.0])
    rows = evaluate(engine, state, {})
    seen = [r.value for r in rows if (r.metric, r.split, r.scope) == ("accuracy", "in", "pooled")]
    unseen = [r for r in rows if (r.split, r.scope) == ("in-c", "pooled")]
    assert seen == [pytest.approx(0.25)]
    values = {row.metric: row.value for row in unseen}
    assert values["accuracy"] == values["accuracy_generic"]


def test_training_images_in_a_test_set_are_counted(store):
    federation = Federation.build(store, outs=[], clients=3, partition="by_domain", seed=0)
    assert set(count_leaks(federation).values()) == {0}
    leaky = replace(federation.train.select(torch.arange(7)), name="leaky")
    test = TestSet("leaky", "out", leaky, (torch.arange(7),) * 3)
    leaks = count_leaks(replace(federation, tests=(*federation.tests, test)))
    assert leaks == {"sites": 0, "leaky": 7}
    assert leaks_sentence(leaks) == "Training images in test sets, by content: 7 in leaky."
    assert leaks_sentence({"a": 0, "b": 0}).startswith("No training image is in any of the 2 test sets")


def test_a_run_keeps_its_partition_as_numbers_and_as_a_picture(store, tmp_path):
    federation = Federation.build(store, clients=4, alpha=0.3, seed=1)
    write_partition(tmp_path, federation)
    saved = json.loads((tmp_path / "partition.json").read_text())
    assert saved["counts"] == federation.describe().tolist()
    assert saved["indices"] == [indices.tolist() for indices in federation.train_indices]
    assert read_leaks(tmp_path) == {"sites": 0}
    assert (tmp_path / "partition.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_says_every_count(store):
    federation = Federation.build(store, clients=4, alpha=0.3, seed=1)
    (axes,) = partition_figure(federation).axes
    shown = sorted(int(text.get_text()) for text in axes.texts)
    assert shown == sorted(n for n in federation.describe().flatten().tolist() if n)
    many = replace(federation.train, labels=federation.train.labels, classes=tuple(str(c) for c in range(60)))
    assert partition_figure(replace(federation, train=many)).axes


def test_images_on_the_host_give_the_same_result(store, config):
    federation = Federation.build(store, clients=3, partition="by_domain", seed=0)
    *_, one = simulate(FedAvg(), federation, config)
    *_, two = simulate(FedAvg(), federation, replace(config, resident="host"))
    assert torch.equal(one.state.server.shared, two.state.server.shared)
    assert not fits(federation, torch.device("cuda"), "host")
    assert fits(federation, torch.device("cuda"), "device")
    assert federation.bytes == sum(s.images.nbytes for s in (federation.train, federation.tests[0].store))
    assert Config().resident == "auto"
