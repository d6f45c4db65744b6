"""The file of samples gives back the numbers of the rows, keeps every run's choice of images, and stays small."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import foogd.runs.predictions as samples
from foogd import FOOGD, FedAvg, FedRoD
from foogd.core.errors import InputError
from foogd.data.synthetic import tiny_federation
from foogd.detectors.registry import resolve_detector
from foogd.engine.eager import EagerEngine
from foogd.evaluation.evaluator import Evaluator
from foogd.metrics import auroc, fpr_at_tpr
from foogd.runs.predictions import SAMPLES, pack_samples, read_samples
from foogd.simulate import initial_state, run_round

DETECTORS = ("msp", "energy", "score_norm", "knn")


def evaluated(config, method, federation, detectors=DETECTORS):
    engine = EagerEngine(method, federation, config)
    state = run_round(engine, initial_state(engine), 1).state
    chosen = {name: resolve_detector(name) for name in detectors}
    return Evaluator(engine, chosen).evaluation(state, run="r", method="m")


def written(folder: Path, found, **settings):
    (folder / SAMPLES).write_bytes(pack_samples(found, seed=0, method="m", **settings))
    return read_samples(folder)


def value(found, **about):
    (row,) = [r for r in found.rows if all(getattr(r, key) == want for key, want in about.items())]
    return row.value


@pytest.fixture(scope="module")
def federation():
    return tiny_federation(per_client=40)


def test_an_unseen_domain_stands_beside_in_only_where_one_model_has_scored_both(tmp_path, config, federation):
    unseen = replace(federation.tests[-1], name="far", split="in-c", corruption="domain far", unseen=True)
    federation = replace(federation, tests=(*federation.tests, unseen))
    known = [test.key for test in federation.tests if test.split == "in-c" and not test.unseen]
    shared = written(tmp_path, evaluated(config, FedAvg(), federation))
    assert [one.key for one in shared.shifted()] == [*known, unseen.key]
    assert [one.key for one in replace(shared, sets=shared.sets[:1] + shared.sets[-1:]).shifted()] == []  # who knows
    private = written(tmp_path, evaluated(config, FedRoD(), federation))
    assert [one.key for one in private.shifted()] == known
    assert [one.key for one in private.of("in-c")] == [*known, unseen.key]


def test_the_same_answers_are_the_same_bytes(config, federation):
    found = evaluated(config, FedAvg(), federation, ["msp"])
    assert len({pack_samples(found, seed=0, method="m") for _ in range(12)}) == 1


def test_a_file_with_its_format_as_an_entry_of_its_own_is_read_as_before(tmp_path, config, federation):
    from safetensors import safe_open
    from safetensors.torch import load, save

    new = written(tmp_path, evaluated(config, FedAvg(), federation, ["msp"]))
    with safe_open(str(tmp_path / SAMPLES), framework="pt") as file:
        header = json.loads(file.metadata()["about"])
    tensors = load((tmp_path / SAMPLES).read_bytes())
    about = {"format": header.pop("format"), "about": json.dumps(header)}
    (tmp_path / SAMPLES).write_bytes(save(tensors, metadata=about))
    old = read_samples(tmp_path)
    assert [one.key for one in old.sets] == [one.key for one in new.sets]
    assert torch.equal(old.sets[0].scores["msp"], new.sets[0].scores["msp"])


@pytest.mark.parametrize("method", [FOOGD(FedAvg()), FOOGD(FedRoD())], ids=["shared", "private"])
def test_the_samples_give_the_numbers_of_the_rows(tmp_path, config, federation, method):
    found = evaluated(config, method, federation)
    read = written(tmp_path, found)
    (clean,) = read.of("in")
    assert read.round == 1
    assert sorted(read.detectors()) == sorted(DETECTORS)
    for one in (clean, *read.of("in-c")):
        about = {"dataset": one.name, "corruption": one.corruption, "severity": one.severity, "metric": "accuracy"}
        assert one.correct.double().mean() == pytest.approx(value(found, scope="pooled", **about))
        for client in one.clients:
            right = one.of_client(one.correct, client).double().mean()
            assert right == pytest.approx(value(found, scope="client", client=client, **about))
    for one in read.of("out"):
        assert one.correct is None
        for name in DETECTORS:
            for metric, function in (("auroc", auroc), ("fpr95", fpr_at_tpr)):
                about = {"dataset": one.name, "detector": name, "metric": metric}
                pooled = function(clean.pooled(name), one.pooled(name))
                assert pooled == pytest.approx(value(found, scope="pooled", **about), abs=1e-4)
                for client in one.clients:
                    inside, outside = (part.of_client(part.scores[name], client) for part in (clean, one))
                    assert function(inside, outside) == pytest.approx(
                        value(found, scope="client", client=client, **about), abs=1e-4
                    )


def test_what_is_the_same_for_all_clients_is_stored_once(tmp_path, config, federation):
    tests = tuple(
        replace(t, indices=tuple(torch.arange(len(t.store)) for _ in t.indices)) if t.split == "out" else t
        for t in federation.tests
    )
    everyone = replace(federation, tests=tests)
    images = len(tests[-1].store)
    (shared,) = written(tmp_path, evaluated(config, FOOGD(FedAvg()), everyone)).of("out")
    assert shared.scores["energy"].shape == shared.predictions.shape == shared.index.shape == (images,)
    assert shared.scores["knn"].shape == (federation.clients, images)  # every client compares with its own images
    assert set(shared.client.tolist()) == {-1}
    (private,) = written(tmp_path, evaluated(config, FOOGD(FedRoD()), everyone)).of("out")
    assert private.scores["energy"].shape == private.predictions.shape == (federation.clients, images)


def test_a_large_set_keeps_the_same_images_in_every_run(tmp_path, config, monkeypatch):
    monkeypatch.setattr(samples, "LIMIT", 20)
    kept = []
    for seed in (0, 1):
        federation = tiny_federation(per_client=40)
        order = [torch.cat(list(t.indices)) for t in federation.tests]
        if seed:  # other clients see the same images
            tests = (replace(t, indices=tuple(o.flip(0).tensor_split([7, 11]))) if t.split != "out" else t
                     for t, o in zip(federation.tests, order, strict=True))  # fmt: skip
            federation = replace(federation, tests=tuple(tests))
        read = written(tmp_path, evaluated(replace(config, seed=seed), FedAvg(), federation, ["msp"]))
        assert all(len(one) == 20 for one in read.sets)
        kept.append([set(one.index.tolist()) for one in read.sets])
    assert kept[0] == kept[1]


def test_a_model_of_each_client_has_fewer_images_of_those_that_a_shared_one_has(
    tmp_path, config, federation, monkeypatch
):
    monkeypatch.setattr(samples, "LIMIT", 20)
    (shared,) = written(tmp_path, evaluated(config, FedAvg(), federation, ["msp"])).of("out")
    (private,) = written(tmp_path, evaluated(config, FedRoD(), federation, ["msp"])).of("out")
    assert (len(shared), private.predictions.numel()) == (20, 18)
    assert set(private.index.tolist()) < set(shared.index.tolist())


def test_a_split_of_many_sets_has_a_limit_too(tmp_path, config, federation, monkeypatch):
    monkeypatch.setattr(samples, "SPLIT_LIMIT", 30)
    monkeypatch.setattr(samples, "SPLIT_FEATURES", 12)
    several = [t for t in federation.tests if t.split == "in-c"]
    tests = (*federation.tests, *(replace(several[0], severity=9 - n) for n in range(2)))
    read = written(tmp_path, evaluated(config, FedAvg(), replace(federation, tests=tests), ["msp"]))
    assert sum(len(one) for one in read.of("in-c")) <= 30
    assert 0 < sum(len(one.features) for one in read.of("in-c")) <= 12


def test_features_belong_to_their_labels(tmp_path, config, federation):
    found = evaluated(config, FedAvg(), federation, ["msp"])
    read = written(tmp_path, found)
    for one, answer in zip(read.sets, found.answers, strict=True):
        assert one.features.dtype == torch.float16
        assert len(one.features) == len(one.feature_labels) == len(one.feature_client) <= samples.FEATURES
        rows = {tuple(z.half().tolist()): int(answer.test.store.labels[answer.test.indices[client][p]])
                for client, (places, features) in answer.features.items()
                for p, z in zip(places, features, strict=True)}  # fmt: skip
        for z, label in zip(one.features, one.feature_labels, strict=True):
            assert rows[tuple(z.tolist())] == label


def test_detectors_of_an_earlier_evaluation_stay(tmp_path, config, federation):
    first = written(tmp_path, evaluated(config, FedAvg(), federation, ["msp", "energy"]))
    both = written(tmp_path, evaluated(config, FedAvg(), federation, ["energy", "max_logit"]), earlier=first)
    assert sorted(both.detectors()) == ["energy", "max_logit", "msp"]
    assert torch.equal(both.sets[0].scores["msp"], first.sets[0].scores["msp"])
    other = replace(first, round=7)
    alone = written(tmp_path, evaluated(config, FedAvg(), federation, ["energy"]), earlier=other)
    assert alone.detectors() == ["energy"]


def test_probabilities_near_one_do_not_become_ties(tmp_path, config, federation):
    found = evaluated(config, FedAvg(), federation, ["msp"])
    answer = found.answers[0]
    near = {c: -1 + 1e-12 * torch.arange(len(s), dtype=torch.float64) for c, s in answer.scores["msp"].items()}
    changed = replace(found, answers=[replace(answer, scores={"msp": near, "energy": near})])
    read = written(tmp_path, changed)
    client = read.sets[0].clients[0]
    assert torch.equal(read.sets[0].of_client(read.sets[0].scores["msp"], client), near[client])


def test_a_folder_without_samples_has_none_and_a_damaged_file_is_named(tmp_path, config, federation):
    assert read_samples(tmp_path) is None
    written(tmp_path, evaluated(config, FedAvg(), federation, ["msp"]))
    path = tmp_path / SAMPLES
    whole = path.read_bytes()
    path.write_bytes(whole[:200])
    with pytest.raises(InputError, match=r"samples\.safetensors is damaged"):
        read_samples(tmp_path)
    path.write_bytes(whole.replace(rb"\"format\": \"1\"", rb"\"format\": \"9\""))
    with pytest.raises(InputError, match="its format is '9'"):
        read_samples(tmp_path)
