"""What a method sends beside the model has names, shapes and types that the server finds out by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..core.random import Streams
from ..core.types import Batch, ClientState, Context, Nets, ServerState
from ..engine.eager import EagerEngine
from .messages import BadMessage

Form = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Name → shape and type of an array."""


@torch.no_grad()
def survey_form(engine: EagerEngine, server: ServerState, round: int) -> Form:
    """The form of an answer before training: that of a made-up client with black images."""
    nets, batch, ctx = _made_up(engine, server, round)
    return _form(engine.method.survey(nets, engine.method.embed(nets, batch), ctx))


@torch.no_grad()
def extra_form(engine: EagerEngine, server: ServerState, round: int) -> Form:
    """The form of what comes with an update; a method may send other things in other rounds."""
    nets, batch, ctx = _made_up(engine, server, round)
    return _form(engine.method.finish(nets, [batch], ctx)[0])


def check_form(found: Mapping[str, Tensor], wanted: Form, what: str) -> None:
    """Complain about the first array that is not as the method makes it."""
    for name in sorted(found.keys() | wanted.keys()):
        if name not in wanted:
            raise BadMessage(f"{what} has an array {name!r}, which the method does not send")
        shape, kind = wanted[name]
        if name not in found:
            raise BadMessage(f"{what} lacks the array {name!r}")
        if tuple(found[name].shape) != shape or found[name].dtype != kind:
            is_now = f"{tuple(found[name].shape)} of {found[name].dtype}"
            raise BadMessage(f"{what} has an array {name!r} that is {is_now}, {shape} of {kind} is needed")


def _form(arrays: Mapping[str, Tensor]) -> Form:
    return {name: (tuple(value.shape), value.dtype) for name, value in arrays.items()}


def _made_up(engine: EagerEngine, server: ServerState, round: int) -> tuple[Nets, Batch, Context]:
    nets, federation = engine.nets().eval(), engine.federation
    counts = federation.class_counts(0)
    client = ClientState(0, torch.empty(0), torch.arange(min(2, len(federation.train))), counts)
    phases = engine.phases(round)
    rng = Streams(engine.config.seed, round, "form", device=engine.device)
    ctx = engine.context(round, nets, server.extra, {}, rng, counts.to(engine.device))
    ctx = replace(ctx, groups=phases[0].groups if phases else (), steps=engine.steps(client, phases))
    return nets, engine.batches.plain(client.indices.to(engine.device)), ctx
