"""What learns in a net: all but the parameters that were built with `requires_grad_(False)`, which stay as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from .types import Nets, Phase


class BuiltFrozen(NamedTuple):
    """What is frozen in a net by paths in it: parameters, and modules with parameters of which none learns."""

    parameters: frozenset[str] = frozenset()
    parts: tuple[str, ...] = ()


def note_frozen(nets: Nets) -> None:
    """Remember what is frozen in nets that were just built; later, flags tell only what learns at the moment."""
    for net in nets.values():
        fixed = {name for name, value in net.named_parameters(remove_duplicate=False) if not value.requires_grad}
        if fixed:
            modules = net.named_modules(remove_duplicate=False)
            parts = tuple(path for path, part in modules if _is_frozen(part))
            net.built_frozen = BuiltFrozen(frozenset(fixed), parts)  # type: ignore[assignment]


def _is_frozen(part: nn.Module) -> bool:
    flags = [value.requires_grad for value in part.parameters()]
    return bool(flags) and not any(flags)


def _noted(net: nn.Module) -> BuiltFrozen:
    found = getattr(net, "built_frozen", None)
    return found if isinstance(found, BuiltFrozen) else BuiltFrozen()


def frozen_values(nets: Nets) -> frozenset[str]:
    """Frozen parameters, and all values of parts that are frozen as a whole, by their names in the state dict."""
    found = set()
    for key, net in nets.items():
        parameters, parts = _noted(net)
        if parameters:
            below = tuple(f"{path}." if path else "" for path in parts)
            found |= {f"{key}.{name}" for name in net.state_dict() if name in parameters or name.startswith(below)}
    return frozenset(found)


def learnable(net: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen, each once."""
    fixed = _noted(net).parameters
    return [value for name, value in net.named_parameters() if name not in fixed]


def set_training(net: nn.Module, training: bool) -> None:
    """Train or eval mode; parts that are frozen as a whole are always in eval mode."""
    net.train(training)
    for path in _noted(net).parts:
        net.get_submodule(path).eval()


def set_learning(net: nn.Module, learns: bool) -> None:
    """Train mode with gradients, or eval mode without; what is frozen stays so."""
    set_training(net, learns)
    for value in learnable(net):
        value.requires_grad_(learns)


def with_learners(phases: Sequence[Phase], groups: Mapping[str, tuple[str, ...]], nets: Nets) -> list[Phase]:
    """The phases without groups in which nothing can learn, as one of a backbone that is frozen as a whole."""
    idle = {group for group, names in groups.items() if not any(learnable(nets[name]) for name in names)}
    if not idle:
        return list(phases)
    found = [replace(phase, groups=tuple(group for group in phase.groups if group not in idle)) for phase in phases]
    return [phase for phase in found if phase.groups]
