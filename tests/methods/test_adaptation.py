"""What all methods have in common that adapt at test time, have private parts, or meet someone new."""

from dataclasses import replace

import pytest
import torch

from foogd import FOSTER, Config, FedBN, FedICON, FedTHE, simulate
from foogd.data.federation import TestSet, out_tests
from foogd.data.synthetic import tiny_federation
from foogd.detectors.registry import DETECTORS
from foogd.engine.eager import EagerEngine
from foogd.evaluation.evaluator import Evaluator, evaluate
from foogd.methods import METHODS, make_method
from foogd.simulate import initial_state, restore_state, state_tensors

CONFIG = Config(rounds=3, batch_size=16, lr=0.05, device="cpu")
ADAPTING = [name for name in METHODS if make_method(name).adapts]


def trained(method, federation, config=CONFIG):
    engine = EagerEngine(method, federation, config)
    *_, last = simulate(method, federation, config, engine)
    return engine, last.state


@pytest.mark.parametrize("name", ADAPTING)
def test_more_images_of_the_same_kind_are_no_outliers(name):
    """An OUT set that is IN and far longer: a score that drifts along a stream would tell them apart."""
    # Steps on test batches that are large enough for a drift to show.
    method = make_method(name, {"test_batch": 32, **({"tta_lr": 0.05} if name == "fedicon" else {})})
    base = tiny_federation(clients=3, per_client=150)
    inside = base.tests[0]
    [same] = out_tests([replace(inside.store, name="more of the same")], inside.store.shape, clients=3)
    federation = replace(base, tests=(inside, same))
    engine, state = trained(method, federation, replace(CONFIG, rounds=2))
    detectors = {key: DETECTORS[key] for key in ("msp", "energy", "mahalanobis", "gaussian", "vim", "knn")}
    rows = evaluate(engine, state, detectors)
    for row in rows:
        if (row.metric, row.scope) == ("auroc", "pooled"):
            assert 0.38 < row.value < 0.62, f"{name} {row.detector}: {row.value:.2f}"


@pytest.mark.parametrize("name", ADAPTING)
def test_a_stream_is_shuffled_and_answers_come_back_in_place(name):
    """Sorted by class or not, the same images get the same answers but for what a stream does to them."""
    base = tiny_federation(clients=1, per_client=60)
    engine, state = trained(make_method(name), base, replace(CONFIG, rounds=1))
    nets = engine.nets().eval()
    engine.layout.bind(nets, state.server.shared, state.clients[0].personal)
    evaluator = Evaluator(engine, {})
    with torch.no_grad():
        evaluator._load(state)
        [(_, part, found)] = list(evaluator._outputs(base.tests[0], state, adapt=True))
        wanted = nets["backbone"](evaluator._images(base.tests[0].store, part))
    assert torch.allclose(found.z, wanted, atol=1e-5)


@pytest.mark.parametrize("method", [FedBN(), FOSTER()], ids=["fedbn", "foster"])
def test_clients_that_never_trained_are_tested_with_the_mean_of_those_that_have(method):
    federation = tiny_federation(clients=4)
    config = replace(CONFIG, rounds=1, participation=0.5)
    engine, state = trained(method, federation, config)
    assert [client.trained for client in state.clients].count(True) == 2
    tested = Evaluator(engine, {}).evaluation(state).state
    mean = torch.stack([client.personal for client in state.clients if client.trained]).mean(0)
    for before, after in zip(state.clients, tested.clients, strict=True):
        assert torch.equal(after.personal, before.personal if before.trained else mean)
    again = restore_state(initial_state(engine), state_tensors(state), 1)
    assert [client.trained for client in again.clients] == [client.trained for client in state.clients]


@pytest.mark.parametrize("method", [FedICON(), FedTHE(), FOSTER(restrict_to_local_classes=True)])
def test_an_unseen_domain_is_answered_without_private_parts(method):
    base = tiny_federation(clients=3)
    everything = torch.arange(len(base.tests[0].store))
    other = TestSet("other", "in-c", base.tests[0].store, (everything,) * 3, corruption="domain other", unseen=True)
    federation = replace(base, tests=(base.tests[0], other))
    engine, state = trained(method, federation)
    loud = tuple(replace(client, personal=client.personal + 0.0) for client in state.clients)
    for client in loud[1:]:
        client.personal.normal_(generator=torch.Generator().manual_seed(client.id))
    outputs = []
    for clients in (state.clients, loud):
        changed = replace(state, clients=clients)
        evaluator = Evaluator(engine, {})
        with torch.no_grad():
            evaluator._load(changed)
            outputs.append([found.logits for _, _, found in evaluator._outputs(other, changed, adapt=True)])
    for one, two in zip(*outputs, strict=True):
        assert torch.equal(one, two), "private values decide about someone unknown"
