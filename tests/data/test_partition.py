import json
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foogd.core.errors import InputError
from foogd.data.partition import by_domain, dirichlet, follow, given_proportions, pathological

LABELS = torch.arange(1000) % 10


def table(partition, labels, classes=10):
    return torch.stack([torch.bincount(labels[own], minlength=classes) for own in partition])


def covers(partition, n):
    return torch.equal(torch.cat(list(partition)).sort().values, torch.arange(n))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=80),
    st.integers(1, 12),
    st.floats(1e-3, 1e3),
    st.integers(-5, 2**40),
)
def test_dirichlet_hands_out_every_image_once(labels, clients, alpha, seed):
    partition = dirichlet(labels, clients=clients, alpha=alpha, seed=seed)
    assert len(partition) == clients
    assert covers(partition, len(labels))
    assert all(own.dtype == torch.int64 for own in partition)


def test_counts_follow_the_proportions_within_one_image_for_training_and_test():
    train = dirichlet(LABELS, clients=7, alpha=0.3, seed=1)
    test_labels = torch.arange(330) % 10
    test = dirichlet(test_labels, clients=7, alpha=0.3, seed=1, proportions=train.proportions)
    assert train.proportions.shape == (7, 10)
    assert torch.allclose(train.proportions.sum(0), torch.ones(10, dtype=torch.float64))
    assert torch.equal(test.proportions, train.proportions)
    for partition, labels, per_class in ((train, LABELS, 100), (test, test_labels, 33)):
        assert covers(partition, len(labels))
        assert ((table(partition, labels) - per_class * train.proportions).abs() < 1).all()


def test_one_seed_repeats_and_two_seeds_differ():
    first, again, other = (dirichlet(LABELS, clients=5, alpha=0.5, seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.allclose(first.proportions, other.proportions)
    same_shares = follow(LABELS, first.proportions, 4)
    assert torch.equal(table(first, LABELS).sum(0), table(same_shares, LABELS).sum(0))
    assert not all(torch.equal(a, b) for a, b in zip(first, same_shares, strict=True))  # the shuffle follows the seed


def test_alpha_goes_from_one_owner_a_class_to_even_shares():
    concentrated = table(dirichlet(LABELS, clients=5, alpha=1e-3, seed=0), LABELS)
    even = table(dirichlet(LABELS, clients=5, alpha=1e5, seed=0), LABELS)
    assert (concentrated.max(0).values >= 99).all()
    assert ((even - 20).abs() <= 2).all()


def test_images_are_shuffled_within_a_class():
    own = dirichlet(torch.zeros(1000, dtype=torch.int64), clients=2, alpha=1e5, seed=0)
    assert all(abs(float(indices.double().mean()) - 500) < 60 for indices in own)  # slices would give 250, 750


def test_equal_shares_favour_no_client():
    labels = torch.arange(300) // 3  # 100 classes of three images for two clients
    sizes = [len(own) for own in follow(labels, torch.full((2, 100), 0.5), 0)]
    assert abs(sizes[0] - sizes[1]) < 60  # in client order the first would gain 100


def test_min_size_is_kept_or_refused_quickly():
    partition = dirichlet(LABELS, clients=10, alpha=0.1, seed=0, min_size=20)
    assert min(len(own) for own in partition) >= 20
    assert covers(partition, 1000)
    start = time.perf_counter()
    with pytest.raises(InputError, match=r"alpha 0.01 .*10 clients min_size 99 .*the best had \d+"):
        dirichlet(LABELS, clients=10, alpha=0.01, seed=0, min_size=99)
    with pytest.raises(InputError, match="need more images"):
        dirichlet(LABELS, clients=10, alpha=1, seed=0, min_size=101)
    assert time.perf_counter() - start < 5
    with pytest.raises(InputError, match="min_size is 5"):
        dirichlet(LABELS, clients=2, alpha=1, seed=0, min_size=5, proportions=torch.eye(2)[:, [0] * 10])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"clients": 0}, "clients"),
        ({"alpha": 0.0}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
        ({"proportions": torch.ones(3, 10) / 3}, "rows"),
        ({"proportions": torch.ones(2, 10)}, "add up to 1"),
        ({"proportions": torch.ones(2, 9) / 2}, "9 classes"),
        ({"labels": [0.5]}, "whole numbers"),
        ({"labels": [-1]}, "-1"),
        ({"labels": torch.zeros(0, dtype=torch.int64)}, "no labels"),
    ],
)
def test_bad_arguments_are_refused(change, word):
    arguments = {"labels": LABELS, "clients": 2, "alpha": 0.5, "seed": 0} | change
    with pytest.raises(InputError, match=word):
        dirichlet(arguments.pop("labels"), **arguments)


def test_the_authors_shares_give_the_client_sizes_of_their_code():
    shares = given_proportions("authors", clients=10, classes=10, alpha=0.1)
    theirs = (5000 * shares).floor().sum(1)  # CIFAR-10, where their code drops what rounding leaves
    assert (theirs.min(), theirs.max()) == (2330, 9018)
    labels = torch.arange(50_000) % 10
    held = table(dirichlet(labels, clients=10, alpha=0.1, seed=0, proportions=shares), labels)
    assert ((held.sum(1) - theirs).abs() <= 10).all()
    assert int(held.max(1).values.sum()) / 50_000 == pytest.approx(0.61, abs=0.005)
    few = given_proportions("authors", clients=3, classes=7, alpha=5.0)
    assert few.shape == (3, 7)
    assert torch.allclose(few.sum(0), torch.ones(7, dtype=torch.float64))
    assert given_proportions("", clients=3, classes=7, alpha=5.0) is None


def test_shares_of_a_file_are_taken_as_they_stand_but_for_rounding(tmp_path):
    path = tmp_path / "shares.json"
    path.write_text(json.dumps([[1, 0.3333333], [0, 0.3333333], [0, 0.3333333]]))
    found = given_proportions(str(path), clients=3, classes=2, alpha=0.5)
    third = 1 / 3
    expected = torch.tensor([[1, third], [0, third], [0, third]], dtype=torch.float64)
    assert torch.allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[1, 1], [0, 0], [0, 0]]", "has 3 lists of 2; 2 lists, one a client, of 3 shares, one a class, are needed."),
        ("[[1, 1, 1], [0, 0]]", "has 2 lists of 2, 3; 2 lists"),
        ("{}", "has no list of lists; 2 lists"),
        ("[1, 0]", "has no list of lists; 2 lists"),
        ("[[1, 1, 0.5], [0, 0, 0.4]]", "the shares of class 2 add up to 0.9 over the clients, not to 1."),
        ("[[1, 1, 0.5], [0, 0, 0.50001]]", "class 2 add up to 1.00001 over"),
        ("[[1, 1, 1.5], [0, 0, -0.5]]", "has 1.5; a share is a number from 0 to 1."),
        ("[[1, 1, NaN], [0, 0, 1]]", "has nan; a share"),
        ('[[1, 1, "1"], [0, 0, 0]]', "has '1'; a share"),
        ("[[1, 1, true], [0, 0, 0]]", "has True; a share"),
        ("[[1, 1,", "is neither 'authors' nor a JSON file that can be read: Expecting value: line 1"),
        ("[" * 100_000, "nor a JSON file that can be read"),
        (None, "nor a JSON file that can be read: .*No such file"),
    ],
)
def test_shares_that_are_none_are_refused_in_one_sentence(tmp_path, text, words):
    path = tmp_path / "shares.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=f"^proportions = '.*shares.json'.* {words}") as caught:
        given_proportions(str(path), clients=2, classes=3, alpha=0.5)
    assert "\n" not in str(caught.value)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.integers(1, 8), st.integers(0, 99))
def test_pathological_gives_each_client_its_classes_and_each_class_an_owner(clients, per_client, seed):
    labels = torch.arange(800) % 8
    if clients * per_client < 8:
        with pytest.raises(InputError, match=f"at least {-(-8 // per_client)} clients"):
            pathological(labels, clients=clients, classes_per_client=per_client, seed=seed)
        return
    partition = pathological(labels, clients=clients, classes_per_client=per_client, seed=seed)
    assert covers(partition, 800)
    held = table(partition, labels, 8)
    assert ((held > 0).sum(1) == per_client).all()
    test = follow(torch.arange(400) % 8, partition.proportions, seed)
    assert torch.equal(table(test, torch.arange(400) % 8, 8) > 0, held > 0)


def test_pathological_depends_on_the_seed_and_knows_the_number_of_classes():
    tables = [table(pathological(LABELS, clients=10, classes_per_client=2, seed=seed), LABELS) for seed in (0, 0, 1)]
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], tables[2])
    for count in (0, 11):
        with pytest.raises(InputError, match="10 classes"):
            pathological(LABELS, clients=10, classes_per_client=count, seed=0)
    with pytest.raises(InputError, match="clients is 0"):
        pathological(LABELS, clients=0, classes_per_client=2, seed=0)


def test_by_domain_makes_one_client_a_domain():
    partition = by_domain(np.array([4, 0, 4, 2, 0]))
    assert [own.tolist() for own in partition] == [[1, 4], [3], [0, 2]]
    assert partition.proportions is None
