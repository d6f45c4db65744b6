import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from foogd.core.errors import InputError
from foogd.data import Federation, ImageStore, corrupt, fit_to, load_source, tiny_federation


def source(n=600, classes=6, channels=3, size=8, **more):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (n, size, size, channels), dtype=np.uint8)
    return ImageStore(images, np.arange(n) % classes, name="trial", **more)


def build(store=None, **change):
    arguments = {"clients": 4, "seed": 0, "corruptions": ("contrast", "gaussian_noise"), "severities": (1, 5)} | change
    return Federation.build(source() if store is None else store, **arguments)


def counts(labels, indices, classes):
    return torch.stack([torch.bincount(labels[own], minlength=classes) for own in indices])


@pytest.mark.parametrize("partition", ["dirichlet", "pathological"])
def test_training_and_tests_share_the_proportions_and_miss_no_image(partition):
    federation = build(partition=partition, min_size=0)
    test = federation.tests[0]
    assert (len(federation.train), len(test.store)) == (480, 120)
    for indices, store in ((federation.train_indices, federation.train), (test.indices, test.store)):
        assert torch.equal(torch.cat(indices).sort().values, torch.arange(len(store)))
    train_counts = counts(federation.train.labels, federation.train_indices, 6)
    test_counts = counts(test.store.labels, test.indices, 6)
    assert torch.equal(federation.describe(), train_counts)
    assert ((train_counts / 80 - test_counts / 20).abs() <= 1 / 80 + 1 / 20).all()
    assert all(torch.equal(federation.class_counts(k), train_counts[k].float()) for k in range(4))


def test_severity_is_not_confounded_with_the_client():
    federation = build(alpha=0.1, min_size=0)
    clean, *rest = [test for test in federation.tests if test.split != "out"]
    assert {(test.corruption, test.severity) for test in rest} == {
        (name, severity) for name in ("contrast", "gaussian_noise") for severity in (1, 5)
    }
    for test in rest:
        assert (test.split, test.name) == ("in-c", "trial-c")
        assert all(torch.equal(a, b) for a, b in zip(test.indices, clean.indices, strict=True))
        assert torch.equal(test.store.labels, clean.store.labels)
        assert torch.equal(test.store.images, corrupt(clean.store.images, test.corruption, test.severity, 0))
    assert len({test.key for test in federation.tests}) == len(federation.tests)


def test_the_held_out_images_are_those_of_the_mask():
    mask = np.arange(600) >= 500
    store = source(test=mask)
    federation = build(store, corruptions=())
    assert torch.equal(federation.train.images, store.images[:500])
    assert torch.equal(federation.tests[0].store.images, store.images[500:])
    for wrong in (np.zeros(600, dtype=bool), np.ones(600, dtype=bool)):
        with pytest.raises(InputError, match="held out"):
            build(source(test=wrong))


def test_a_share_of_each_class_is_held_out_by_the_seed():
    first, again, other = (build(corruptions=(), seed=seed, test_share=0.1) for seed in (0, 0, 1))
    assert torch.bincount(first.tests[0].store.labels).tolist() == [10] * 6
    assert first.tests[0].store.content_hash() == again.tests[0].store.content_hash()
    assert first.tests[0].store.content_hash() != other.tests[0].store.content_hash()
    with pytest.raises(InputError, match="test_share"):
        build(test_share=1.0)


@pytest.mark.parametrize("partition", ["dirichlet", "pathological"])
def test_the_seed_of_the_split_decides_alone_who_has_which_images(partition):
    def images(federation):
        clean = federation.tests[0]
        held_out = [clean.store.content_hash(), federation.train.content_hash()]
        shares = (federation.train_indices, federation.calibration_indices, clean.indices)
        return held_out + [[own.tolist() for own in indices] for indices in shares]

    def made(**seeds):
        return build(partition=partition, calibration=0.2, **seeds)

    first, again = made(seed=0, split_seed=7), made(seed=1, split_seed=7)
    assert images(first) == images(again) == images(made(seed=7))
    assert all(a != b for a, b in zip(images(first), images(made(seed=7, split_seed=8)), strict=True))
    noise = [next(test for test in one.tests if test.corruption == "gaussian_noise") for one in (first, again)]
    assert noise[0].store.content_hash() != noise[1].store.content_hash()  # a random draw, not a matter of who has it


def test_training_and_tests_follow_the_proportions_of_a_file(tmp_path):
    shares = [[0.25, 1, 0, 0.1, 0.5, 0.25], [0.75, 0, 1, 0.9, 0.5, 0.75]]
    path = tmp_path / "shares.json"
    path.write_text(json.dumps(shares))
    given = {"clients": 2, "corruptions": (), "proportions": str(path)}
    federation = build(**given, min_size=2)
    expected = torch.tensor(shares, dtype=torch.float64)
    assert torch.equal(federation.describe(), (80 * expected).long())
    test = federation.tests[0]
    assert torch.equal(counts(test.store.labels, test.indices, 6), (20 * expected).long())
    with pytest.raises(InputError, match="partition 'dirichlet'; partition is 'pathological'"):
        build(**given, partition="pathological")
    path.write_text(json.dumps([[1] * 6, [0] * 6]))
    with pytest.raises(InputError, match="leave a client with 0 images; min_size is 2"):
        build(**given, min_size=2)


def test_mean_and_std_are_of_the_training_images_only():
    store = source(test=np.arange(600) >= 500)
    images = store.images.clone()
    images[500:] = 255
    federation = build(replace(store, images=images), corruptions=())
    np.testing.assert_allclose(federation.mean, (store.images[:500].double() / 255).mean((0, 1, 2)))
    black = build(ImageStore(np.zeros((60, 8, 8), dtype=np.uint8), np.arange(60) % 6), corruptions=())
    assert black.std[0] > 0


def test_every_client_sees_all_of_each_out_set_in_the_shape_of_in():
    outs = [replace(source(n=30, channels=1, size=5), name="grey"), replace(source(n=20, size=11), name="large")]
    federation = build(outs=outs, corruptions=())
    grey, large = federation.tests[1:]
    assert [test.name for test in (grey, large)] == ["grey", "large"]
    for test, count in ((grey, 30), (large, 20)):
        assert test.split == "out"
        assert test.store.shape == federation.shape == (3, 8, 8)
        assert len(test.indices) == 4
        assert all(torch.equal(own, torch.arange(count)) for own in test.indices)
    with pytest.raises(InputError, match="'grey'"):
        build(outs=[outs[0], outs[0]])


def test_fit_to_repeats_grey_takes_luminance_and_resizes_smoothly():
    grey = ImageStore(np.arange(256, dtype=np.uint8).reshape(1, 16, 16), [0])
    colour = fit_to(grey, (3, 16, 16))
    assert torch.equal(colour.images, grey.images.expand(-1, -1, -1, 3))
    assert torch.equal(fit_to(colour, (1, 16, 16)).images, grey.images)
    green = np.zeros((1, 4, 4, 3), dtype=np.uint8)
    green[..., 1] = 100
    assert (fit_to(ImageStore(green, [0]), (1, 4, 4)).images == 59).all()
    assert (fit_to(ImageStore(green, [0]), (3, 9, 6)).images == torch.tensor([0, 100, 0], dtype=torch.uint8)).all()
    small = fit_to(grey, (1, 4, 4)).images.double()
    assert small.mean() == pytest.approx(grey.images.double().mean(), abs=1)
    assert fit_to(grey, grey.shape) is grey
    with pytest.raises(InputError, match="2 channels"):
        fit_to(ImageStore(np.zeros((1, 4, 4, 2), dtype=np.uint8), [0]), (3, 4, 4))


def test_domains_make_clients():
    store = source(domains=np.arange(600) // 200, test=np.arange(600) % 5 == 0)
    federation = build(store, partition="by_domain", clients=3, corruptions=())
    for client in range(3):
        assert (federation.train.domains[federation.train_indices[client]] == client).all()
        test = federation.tests[0]
        assert (test.store.domains[test.indices[client]] == client).all()
        assert len(test.indices[client]) == 40
    with pytest.raises(InputError, match="one client a domain"):
        build(store, partition="by_domain", clients=4)
    with pytest.raises(InputError, match="has none"):
        build(partition="by_domain")


def test_clients_without_data_are_allowed_only_on_request():
    federation = build(source(n=24), clients=40, min_size=0, corruptions=())
    assert min(len(own) for own in federation.train_indices) == 0
    assert federation.class_counts(min(range(40), key=lambda k: len(federation.train_indices[k]))).sum() == 0
    with pytest.raises(InputError, match="min_size 1"):
        build(source(n=24), clients=40, corruptions=())
    with pytest.raises(InputError, match="min_size is 200"):
        build(partition="pathological", min_size=200)
    with pytest.raises(InputError, match="dirichlet, pathological, by_domain"):
        build(partition="iid")


def test_moving_a_federation_changes_nothing_else():
    federation = build(outs=[source(n=5)])
    moved = federation.to("cuda" if torch.cuda.is_available() else "cpu")
    assert torch.equal(moved.describe(), federation.describe())
    assert moved.train.content_hash() == federation.train.content_hash()
    assert (moved.mean, moved.std) == (federation.mean, federation.std)
    for before, after in zip(federation.tests, moved.tests, strict=True):
        assert (after.key, after.split, after.store.content_hash()) == (
            before.key,
            before.split,
            before.store.content_hash(),
        )
        assert all(torch.equal(a, b.cpu()) for a, b in zip(before.indices, after.indices, strict=True))


def test_the_embedded_sets_make_a_federation():
    fashion = load_source("fashion", Path())
    outs = [load_source(name, Path()) for name in ("fashion_out", "digits")]
    federation = Federation.build(fashion, outs=outs, corruptions=("contrast",), severities=(3,), clients=10, seed=0)
    assert (len(federation.train), federation.num_classes, federation.clients) == (6000, 8, 10)
    assert [(test.name, test.split, len(test.store)) for test in federation.tests] == [
        ("fashion", "in", 1600),
        ("fashion-c", "in-c", 1600),
        ("fashion_out", "out", 400),
        ("digits", "out", 1797),
    ]
    assert federation.describe().sum() == 6000


@pytest.mark.parametrize("channels", [1, 3])
def test_the_tiny_federation_is_learned_by_a_small_net(channels):
    federation = tiny_federation(channels=channels, seed=1)
    assert (federation.clients, federation.num_classes, federation.shape) == (3, 5, (channels, 16, 16))
    assert (federation.describe() > 0).all()
    assert federation.describe().sum(1).tolist() == [60] * 3
    assert len({tuple(row.tolist()) for row in federation.describe()}) == 3
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(channels, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 5),
    )
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    train, everything = federation.train, torch.arange(len(federation.train))
    for _ in range(8):
        for part in everything[torch.randperm(len(everything))].split(20):
            loss = nn.functional.cross_entropy(net(train.batch(part) - 0.5), train.labels[part])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    net.eval()
    test = federation.tests[0].store
    right = (net(test.batch(torch.arange(len(test))) - 0.5).argmax(1) == test.labels).float().mean()
    assert right > 0.9


def test_the_tiny_federation_has_its_tests_and_repeats():
    first, again, other = tiny_federation(), tiny_federation(), tiny_federation(seed=1)
    assert [(t.split, t.corruption, t.severity) for t in first.tests] == [
        ("in", None, None),
        ("in-c", "gaussian_noise", 3),
        ("out", None, None),
    ]
    for test in first.tests[:2]:
        assert (counts(test.store.labels, test.indices, 5) > 0).all()
    assert first.train.content_hash() == again.train.content_hash() != other.train.content_hash()
    assert len(tiny_federation(outs=False).tests) == 2
    large = tiny_federation(clients=2, classes=12, size=20, per_client=30)
    assert (large.describe() > 0).all()
    with pytest.raises(InputError, match="per_client"):
        tiny_federation(per_client=8)
    with pytest.raises(InputError, match="classes 1"):
        tiny_federation(classes=1)
