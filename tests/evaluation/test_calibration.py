"""Thresholds come from the model that they judge: a client's own, or on an unseen domain everyone's."""

import itertools
from dataclasses import replace

import pytest
import torch

from foogd import FOOGD, Config, FedAvg, FedBN, FedRoD, FedT3A, InputError, simulate
from foogd.data.federation import Federation, TestSet
from foogd.data.synthetic import tiny_federation
from foogd.detectors.logits import Energy
from foogd.detectors.neighbours import KNN
from foogd.engine.eager import EagerEngine
from foogd.evaluation.evaluator import Evaluator
from foogd.metrics import threshold_at_tpr

CONFIG = Config(rounds=2, batch_size=16, lr=0.05, device="cpu")


@pytest.fixture(scope="module")
def judged():
    base = tiny_federation(clients=3)
    everything = torch.arange(len(base.tests[0].store))
    other = TestSet("other", "in-c", base.tests[1].store, (everything,) * 3, corruption="domain other", unseen=True)
    federation = replace(
        base,
        tests=(*base.tests, other),
        train_indices=tuple(own[20 + 3 * client :] for client, own in enumerate(base.train_indices)),
        calibration_indices=tuple(own[:20] for own in base.train_indices),
    )
    engine = EagerEngine(FedRoD(), federation, CONFIG)
    *_, last = simulate(FedRoD(), federation, CONFIG, engine)
    return federation, engine, last.state, Evaluator(engine, {"energy": Energy()}).evaluation(last.state)


def scores(engine, state, store, indices, client):
    """Energy by a plain pass, with the client's private head or, for None, without any."""
    nets = engine.nets().eval()
    engine.layout.bind(nets, state.server.shared, state.clients[client or 0].personal)
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (engine.federation.mean, engine.federation.std))
    with torch.no_grad():
        z = nets["backbone"]((store.batch(indices) - mean) / std)
        logits = nets["head"](z) if client is None else nets["head"](z) + nets["personal_head"](z)
    return -torch.logsumexp(logits.double(), 1)


def rows_of(found, metric, **about):
    return [
        row
        for row in found.rows
        if row.metric == metric and all(getattr(row, key) == value for key, value in about.items())
    ]


@pytest.mark.parametrize("client", range(3))
def test_a_client_is_judged_by_its_own_threshold(judged, client):
    federation, engine, state, found = judged
    tau = threshold_at_tpr(scores(engine, state, federation.train, federation.calibration_indices[client], client))
    for test in federation.tests[:3]:
        values = scores(engine, state, test.store, test.indices[client], client)
        [row] = rows_of(found, "rejected_calibrated", client=client, dataset=test.name, severity=test.severity)
        assert row.value == pytest.approx(float((values > tau).double().mean()), abs=1e-9)


@pytest.mark.parametrize("client", range(3))
def test_an_unseen_domain_is_judged_by_the_generic_model_alone(judged, client):
    federation, engine, state, found = judged
    other = federation.tests[-1]
    values = scores(engine, state, other.store, other.indices[client], None)
    aside = scores(engine, state, federation.train, federation.calibration_indices[client], None)
    [row] = rows_of(found, "rejected_calibrated", client=client, dataset="other")
    assert row.value == pytest.approx(float((values > threshold_at_tpr(aside)).double().mean()), abs=1e-9)
    inside = federation.tests[0]
    clean = scores(engine, state, inside.store, inside.indices[client], None)
    [row] = rows_of(found, "rejected", client=client, dataset="other")
    assert row.value == pytest.approx(float((values > threshold_at_tpr(clean)).double().mean()), abs=1e-9)


def test_the_joint_view_never_mixes_two_models(judged):
    federation, engine, state, found = judged
    out = federation.tests[2]
    [row] = rows_of(found, "auroc_joint", client=0)
    parts = [scores(engine, state, test.store, test.indices[0], 0) for test in federation.tests[:2]]
    values = scores(engine, state, out.store, out.indices[0], 0)
    known = torch.cat(parts)
    wanted = float((values[:, None] > known).double().mean() + 0.5 * (values[:, None] == known).double().mean())
    assert row.value == pytest.approx(wanted, abs=1e-9)


def test_a_share_of_each_client_is_set_aside_and_repeats_with_the_seed():
    source = tiny_federation(clients=1, per_client=200).train

    def build(seed, share):
        return Federation.build(source, clients=3, alpha=5.0, seed=seed, calibration=share)

    plain, one, again, other = build(0, 0.0), build(0, 0.1), build(0, 0.1), build(1, 0.1)
    assert plain.calibration_indices == ()
    assert plain.calibration_test is None
    for own, kept, aside in zip(plain.train_indices, one.train_indices, one.calibration_indices, strict=True):
        assert torch.equal(torch.cat([kept, aside]).sort().values, own.sort().values)
        assert len(aside) == max(1, round(0.1 * len(own)))
    assert all(torch.equal(a, b) for a, b in zip(one.calibration_indices, again.calibration_indices, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(one.calibration_indices, other.calibration_indices, strict=True))
    with pytest.raises(InputError, match=r"calibration is 1\.0"):
        build(0, 1.0)


@pytest.mark.parametrize("method", [FedAvg(), FedRoD(), FedBN(), FedT3A(), FOOGD()], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("detector", [Energy(), KNN()], ids=["learns nothing", "learns"])
def test_progress_counts_every_image_and_ends_with_the_last(judged, method, detector):
    federation = judged[0]
    engine = EagerEngine(method, federation, CONFIG)
    *_, last = simulate(method, federation, CONFIG, engine)
    told, passed = [], []
    evaluator = Evaluator(engine, {"one": detector}, progress=lambda *now: told.append(now))
    evaluator._nets["backbone"].register_forward_hook(lambda net, given, z: passed.append(len(z)))
    evaluator.evaluation(last.state)
    seen, totals = zip(*told, strict=True)
    assert len(set(totals)) == 1
    # What FOOGD measures before the test is told client by client.
    before = [len(client.indices) for client in last.state.clients] if method.settles else []
    assert list(seen) == list(itertools.accumulate(before + passed))
    assert seen[-1] == totals[-1]
