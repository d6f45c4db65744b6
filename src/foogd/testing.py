"""The contracts of methods and detectors, for our own tests and for yours: `check_method(MyMethod())`."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .config import Config
from .core.errors import InputError
from .core.learning import frozen_values, learnable, set_training, with_learners
from .core.random import Streams, generator
from .core.types import Batch, Context, Nets, Output, Phase, Readout
from .data.federation import Federation
from .data.synthetic import tiny_federation
from .detectors.base import Detector
from .detectors.registry import as_detector
from .engine.batches import BatchMaker
from .engine.eager import EagerEngine, build_nets
from .engine.graph import CannotCapture, guarded
from .evaluation.evaluator import evaluate
from .methods.base import Method, class_flaw, losses_flaw
from .metrics import auroc
from .nets.dropout import bind_dropout
from .simulate import initial_state, restore_state, simulate, state_tensors

CONTRACT = Config(
    backbone="cnn", rounds=20, local_epochs=1, batch_size=16, lr=0.05, momentum=0.9, weight_decay=5e-4, device="cpu"
)


ROUNDS = 8  # of the run whose phases are looked at one by one


def check_method(method: Method, federation: Federation | None = None, config: Config = CONTRACT) -> None:
    """Raise AssertionError with one sentence where `method` breaks the contract; a few seconds on a CPU.

    Finite scalar losses for exactly its groups, each reaching its own group only; nothing that looks at a value
    (it runs on the meta device); private values never travel and BN statistics do; results that do not depend on the
    order of clients and repeat with the seed; a state that saves and loads; and it learns separable data.
    """
    assert isinstance(method, Method), f"{method!r} is no method: give an object of a class that extends foogd.Method"
    flaw = class_flaw(type(method))
    assert flaw is None, flaw
    federation = federation or tiny_federation()
    engine = EagerEngine(method, federation, replace(config, rounds=2))
    try:
        _check_losses(method, federation, config)
    except InputError as error:  # FOOGD says so of its base
        raise AssertionError(str(error)) from error
    _check_meta(method, federation, config)
    _check_travel(method, engine)
    _check_order(engine)
    _check_seed(method, federation, replace(config, rounds=2))
    _check_save_and_load(method, federation, replace(config, rounds=3))
    _check_learning(method, federation, config)


def _context(
    nets: Nets, federation: Federation, groups: tuple[str, ...], rng: Streams, server: Mapping[str, Tensor], round: int
) -> Context:
    return Context(
        round=round, rounds=ROUNDS, groups=groups, class_counts=federation.class_counts(0), received=nets,
        server=server, memory={}, rng=rng,
    )  # fmt: skip


def _all_phases(method: Method, nets: Nets) -> list[tuple[int, Phase]]:
    """Every kind of phase: of an early round, of the last one, and before a test; a kind is named by its groups."""
    rounds = {round: method.phases(round, ROUNDS, 1) for round in (0, ROUNDS - 1)} | {ROUNDS: method.before_test()}
    found = [(at, phase) for at, phases in rounds.items() for phase in with_learners(phases, method.groups, nets)]
    return list({(phase.groups, phase.received): (round, phase) for round, phase in found}.values())


def _check_losses(method: Method, federation: Federation, config: Config) -> None:
    nets = build_nets(method, federation, config)
    rng = Streams(0, 0, 0)
    bind_dropout(nets, rng("dropout"))
    batches = BatchMaker.of(method, federation, config, torch.device("cpu"))
    own = federation.train_indices[0]
    server = method.init_server(nets, Streams(0, "server"))
    for round, phase in _all_phases(method, nets):
        nets.eval()
        for group in phase.groups:
            assert group in method.groups, f"phase trains {group!r}, which is none of the groups {tuple(method.groups)}"
            for name in method.groups[group]:
                set_training(nets[name], True)
        ctx = _context(nets, federation, phase.groups, rng, server, round)
        batch = method.extend(nets, batches.training(own[: config.batch_size], own, rng), ctx)
        losses = method.losses(nets, method.embed(nets, batch), ctx)
        flaw = losses_flaw(losses, phase.groups)
        assert flaw is None, flaw
        assert set(losses) == set(phase.groups), f"losses have the keys {sorted(losses)}, the groups are {phase.groups}"
        parameters = {g: [p for net in method.groups[g] for p in learnable(nets[net])] for g in phase.groups}
        for group, loss in losses.items():
            assert bool(torch.isfinite(loss)), f"the loss of {group!r} is {float(loss.detach())}"
            assert loss.requires_grad, f"the loss of {group!r} has no gradient"
            for other, wanted in parameters.items():
                found = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
                reached = any(g is not None and bool((g != 0).any()) for g in found)
                if other == group:
                    assert reached, f"the loss of {group!r} has no gradient for its own nets"
                    finite = all(g is None or bool(torch.isfinite(g).all()) for g in found)
                    assert finite, f"the gradient of the loss of {group!r} is not finite"
                else:
                    assert not reached, f"the loss of {group!r} reaches the nets of {other!r}"


def _check_meta(method: Method, federation: Federation, config: Config) -> None:
    nets = build_nets(method, federation, config).to("meta")
    bind_dropout(nets, None)
    c, h, w = federation.shape
    b = config.batch_size
    x = torch.empty(b, c, h, w, device="meta")

    def no_stream(purpose: str) -> torch.Generator:
        return None  # type: ignore[return-value]  # draws on meta take no generator

    published = method.init_server(build_nets(method, federation, config), Streams(0))
    server = {name: value.to("meta") for name, value in published.items()}
    class_counts = torch.empty(federation.num_classes, device="meta")
    constants = torch.empty(1, c, 1, 1, device="meta"), torch.empty(1, c, 1, 1, device="meta")
    for round, phase in _all_phases(method, nets):
        for net in nets.values():
            set_training(net, True)
        ctx = Context(round, ROUNDS, phase.groups, class_counts, nets, server, {}, no_stream, *constants)
        ctx = guarded(ctx, reads_round=method.reads_round)
        try:
            x_hat = method.view(x, x, no_stream) if method.views == 2 else None
            y = torch.empty(b, dtype=torch.int64, device="meta")
            batch = method.extend(nets, Batch(method.first_view(x, no_stream), y, x_hat), ctx)
            losses = method.losses(nets, method.embed(nets, batch), ctx)
        except CannotCapture as error:
            raise AssertionError(str(error)) from error
        except (RuntimeError, NotImplementedError) as error:
            raise AssertionError(f"the losses look at a value, or use what a graph cannot record: {error}") from error
        assert all(loss.device.type == "meta" for loss in losses.values()), "a loss left the device of its batch"


def _check_travel(method: Method, engine: EagerEngine) -> None:
    layout, nets = engine.layout, engine.nets()
    trained = {name for group in method.groups.values() for name in group}
    for name in nets:
        once = (name in trained) != (name in method.frozen)
        assert once, f"net {name!r} must be in a group or frozen, and not in both"
    built = frozen_values(nets)
    private = method.private_names(nets) - built
    for name, value in nets.state_dict().items():
        if value.is_floating_point():
            frozen = name in built or name.partition(".")[0] in method.frozen
            rest = layout.frozen_names if frozen else layout.shared_names
            wanted = layout.personal_names if name in private else rest
            assert name in wanted, f"{name} is not in the row where it belongs"
    state = initial_state(engine)
    result = next(simulate(method, engine.federation, engine.config, engine, start=state))
    assert not result.refused, f"updates were refused: {dict(result.refused)}"
    for old, new in zip(state.clients, result.state.clients, strict=True):
        same = old.personal.data_ptr() == new.personal.data_ptr()
        assert not layout.personal_size or not same, "private values of a client were written into, not replaced"
    # Without a local step, what a client sends may not change with what is private to it.
    still = EagerEngine(method, engine.federation, replace(engine.config, local_epochs=0))
    noise = torch.randn(layout.personal_size, generator=generator(0, "private"))
    plain = next(still.train(state.server, [replace(state.clients[0])], 0))
    other = next(still.train(state.server, [replace(state.clients[0], personal=noise)], 0))
    assert torch.equal(plain.shared, other.shared), "private values travel in the row"
    for name, value in plain.extra.items():
        if name not in method.disclosed:
            assert torch.equal(value, other.extra[name]), f"private values travel in the upload {name!r}"
    before = result.state.server.shared.clone()
    engine.personalise(result.state.server, result.state.clients)
    assert torch.equal(before, result.state.server.shared), "the training before a test changes the server's values"
    for group in {group for phase in method.before_test() for group in phase.groups}:
        parts = {f"{net}.{name}" for net in method.groups[group] for name, _ in nets[net].named_parameters()}
        assert parts <= private, f"the training before a test trains {group!r}, which is not private"


def _check_order(engine: EagerEngine) -> None:
    state = initial_state(engine)
    one, two = ([replace(client) for client in state.clients] for _ in range(2))
    one_way = {update.client: update for update in engine.train(state.server, one, 0)}
    other_way = {update.client: update for update in engine.train(state.server, list(reversed(two)), 0)}
    for client, update in one_way.items():
        again = other_way[client]
        for mine, other in ((update.extra, again.extra), (update.integers, again.integers)):
            assert all(torch.equal(mine[name], other[name]) for name in mine), _depends(client)
        assert torch.equal(update.shared, again.shared), _depends(client)
        assert torch.equal(one[client].personal, two[client].personal), _depends(client)
        memories = one[client].memory, two[client].memory
        assert all(torch.equal(memories[0][name], memories[1][name]) for name in memories[0]), _depends(client)


def _depends(client: int) -> str:
    return f"client {client} depends on who trained before it"


def _last(method: Method, federation: Federation, config: Config) -> dict[str, Tensor]:
    *_, last = simulate(method, federation, config)
    return state_tensors(last.state)


def _check_seed(method: Method, federation: Federation, config: Config) -> None:
    one, again = _last(method, federation, config), _last(method, federation, config)
    assert all(torch.equal(one[name], again[name]) for name in one), "one seed gave two results"
    other = _last(method, federation, replace(config, seed=config.seed + 1))
    assert not all(torch.equal(one[name], other[name]) for name in one), "two seeds gave one result"


def _check_save_and_load(method: Method, federation: Federation, config: Config) -> None:
    engine = EagerEngine(method, federation, config)
    results = list(simulate(method, federation, config, engine))
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in state_tensors(results[0].state).items()}
    np.savez(buffer, **arrays)
    buffer.seek(0)
    with np.load(buffer, allow_pickle=False) as saved:
        tensors = {name: torch.from_numpy(saved[name]) for name in saved.files}
    resumed = restore_state(initial_state(engine, pretrain=False), tensors, results[0].round)
    *_, last = simulate(method, federation, config, start=resumed)
    straight = state_tensors(results[-1].state)
    again = state_tensors(last.state)
    assert straight.keys() == again.keys(), "a saved and loaded state has other parts"
    for name in straight:
        assert torch.equal(straight[name], again[name]), f"after saving and loading, {name} ends differently"


def _check_learning(method: Method, federation: Federation, config: Config) -> None:
    engine = EagerEngine(method, federation, config)
    *_, last = simulate(method, federation, config, engine)
    rows = evaluate(engine, last.state, {})
    right = next(r.value for r in rows if (r.metric, r.split, r.scope) == ("accuracy", "in", "pooled"))
    assert right > 0.9, f"after {config.rounds} rounds on separable data the accuracy is {right:.3f}, not above 0.9"


def check_detector(detector: Detector | type[Detector] | Callable[[Output], Tensor]) -> None:
    """Raise AssertionError with one sentence where a detector (function, Detector or its class) breaks the contract.

    One that learns says in `passes` how often, and raises InputError where it is used before it is fitted; finite
    scores, one a sample, larger for OUT on separable data (AUROC above 0.99); the same scores whether it is prepared
    for the model or not, and however the training data is cut; scores that do not depend on the other samples of the
    batch, and finite scores on extreme input.
    """
    try:
        detector = as_detector(detector, getattr(detector, "__name__", type(detector).__name__))
    except InputError as error:
        raise AssertionError(str(error)) from error
    known, labels, unknown, readout = _separable_outputs()
    assert detector.applies(readout), "it does not apply to a model with a linear head and a score network"
    halves = [(Output(known.z[i::2], known.logits[i::2]), labels[i::2]) for i in (0, 1)]
    cut = detector
    for done in range(detector.passes):
        try:
            detector(known, readout)
        except InputError:
            pass
        except Exception as error:
            raise AssertionError(f"before it is fitted it fails with {error!r}; InputError is needed") from error
        else:
            raise AssertionError(f"it can be used after {done} of {detector.passes} passes; InputError is needed")
        detector = detector.fit(detector.statistics(known, labels, readout))
        one, two = (cut.statistics(*half, readout) for half in halves)
        assert one.keys() == two.keys(), f"the statistics {sorted(one)} and {sorted(two)} have different names"
        if not detector.local:
            cut = cut.fit({name: one[name] + two[name] for name in one})
    in_scores, out_scores = detector(known, readout), detector(unknown, readout)
    for scores, output in ((in_scores, known), (out_scores, unknown)):
        assert scores.shape == (len(output.z),), f"the scores have shape {tuple(scores.shape)}; one a sample is needed"
        wrong = int((~torch.isfinite(scores)).sum())
        assert not wrong, f"{wrong} of {len(scores)} scores on separable data are not finite"
    if not detector.local:
        again = cut(unknown, readout)
        same = torch.allclose(again, out_scores, rtol=1e-6, atol=1e-9)
        assert same, "fitted on the sums of two halves of the data, it gives other scores than on all at once"
    prepared = detector.prepared(readout)(unknown, readout)
    assert torch.allclose(prepared, out_scores, rtol=1e-6, atol=1e-9), "prepared for a model, it gives other scores"
    area = auroc(in_scores, out_scores)
    assert area > 0.99, f"AUROC is {area:.3f} on separable data: larger must mean more OUT"
    order = torch.randperm(len(known.z), generator=generator(0, "order"))
    moved = detector(Output(known.z[order], known.logits[order]), readout)
    assert torch.allclose(moved, in_scores[order], rtol=1e-4, atol=1e-6), "a score depends on the rest of the batch"
    half = detector(Output(known.z[:7], known.logits[:7]), readout)
    assert torch.allclose(half, in_scores[:7], rtol=1e-4, atol=1e-6), "a score depends on the rest of the batch"
    for scale in (0.0, 1e4):
        extreme = Output(known.z * scale, known.logits * scale)
        finite = bool(torch.isfinite(detector(extreme, readout)).all())
        assert finite, f"scores are not finite on features times {scale}"


def _separable_outputs() -> tuple[Output, Tensor, Output, Readout]:
    """IN features in tight, non-negative clusters that the head knows; OUT: one weak feature of each cluster."""
    stream, classes, d = generator(0, "separable"), 4, 32
    means = torch.zeros(classes, d)
    for c in range(classes):
        means[c, c * 8 : c * 8 + 8] = 4.0
    labels = torch.arange(classes).repeat(64)
    z_in = (means[labels] + 0.2 * torch.randn(len(labels), d, generator=stream)).clamp_min(0.0)
    z_out = 0.1 * torch.rand(200, d, generator=stream)
    for c in range(classes):
        z_out[torch.arange(200), c * 8 + torch.randint(8, (200,), generator=stream)] += 1.0
    weight, bias = means / 8, torch.zeros(classes)

    def head(z: Tensor) -> Tensor:
        return z @ weight.T + bias

    def score(z: Tensor, sigma: float | None = None) -> Tensor:
        nearest = torch.cdist(z, means).argmin(1)
        return means[nearest] - z

    def class_score(z: Tensor, classes: Tensor, sigma: float | None = None) -> Tensor:
        some = means[classes > 0]
        return some[torch.cdist(z, some).argmin(1)] - z

    readout = Readout(head, weight, bias, score, class_score, score_space=lambda z: z)
    return Output(z_in, head(z_in)), labels, Output(z_out, head(z_out)), readout
