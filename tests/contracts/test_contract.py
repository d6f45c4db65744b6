"""Every method and every detector of the package obeys its contract, and the contract catches those that do not."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import pytest
import torch
from torch.nn.functional import cross_entropy

from foogd import FedRoD, InputError, Method, simulate
from foogd.core.plugins import load_object
from foogd.detectors.registry import DETECTORS, resolve_detector
from foogd.methods import make_method, method_names, possible_names
from foogd.methods.foogd import FOOGD
from foogd.testing import CONTRACT, check_detector, check_method


# Every method, and FOOGD around each; the augmented view of the two that the tables show.
@pytest.mark.parametrize("name", [n for n in possible_names() if not n.endswith("+aug") or n in method_names()])
def test_methods_obey_the_contract(name):
    # Around other bases than the two of the tables a small score network does: the wrapping is what matters there.
    small = name.endswith("+foogd") and name not in method_names()
    # They learn in ten rounds, as their bases do; FedICON's classifier learns in the last quarter alone.
    config = replace(CONTRACT, rounds=10) if small and name != "fedicon+foogd" else CONTRACT
    check_method(make_method(name, {"score_width": 64, "steps": 3} if small else {}), config=config)


@pytest.mark.parametrize("base", ["fedavg", "fedrod"])
def test_the_anchored_variant_obeys_the_contract(base):
    check_method(make_method(f"{base}+foogd", {"profile": "anchored"}))


@pytest.mark.parametrize("name", DETECTORS)
def test_detectors_obey_the_contract(name):
    check_detector(DETECTORS[name])


def test_a_plain_function_is_a_detector():
    check_detector(lambda output: -output.logits.max(1).values)
    with pytest.raises(AssertionError, match="larger must mean more OUT"):
        check_detector(lambda output: output.logits.max(1).values)
    with pytest.raises(AssertionError, match="rest of the batch"):
        check_detector(lambda output: output.logits.mean() - output.logits.max(1).values)


def test_the_fitted_detector_of_the_guide_is_one(tmp_path):
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    [code] = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class NearestMean" in block]
    (tmp_path / "mine.py").write_text(code)
    for name in ("NearestMean", "squared"):
        check_detector(resolve_detector(f"{tmp_path / 'mine.py'}:{name}"))
    check_detector(load_object(f"{tmp_path / 'mine.py'}:NearestMean", "detector"))  # the class, as a file names it


@dataclass(frozen=True)
class Broken(Method):
    """A method to break in one way at a time."""

    def losses(self, nets, batch, ctx):
        return {"model": cross_entropy(nets["head"](batch.z), batch.y)}


@final
@dataclass(frozen=True)
class Peeking(Broken):
    def losses(self, nets, batch, ctx):
        loss = cross_entropy(nets["head"](batch.z), batch.y)
        return {"model": loss * (2.0 if loss.item() > 1 else 1.0)}


@final
@dataclass(frozen=True)
class Reaching(Broken):
    @property
    def groups(self):
        return {"body": ("backbone",), "model": ("head",)}

    def losses(self, nets, batch, ctx):
        loss = cross_entropy(nets["head"](batch.z), batch.y)
        return {"model": loss, "body": loss}


@final
@dataclass(frozen=True)
class Exploding(Broken):
    def losses(self, nets, batch, ctx):
        return {"model": nets["head"](batch.z).sum() * float("inf")}


@final
@dataclass(frozen=True)
class Counting(Broken):
    def losses(self, nets, batch, ctx):
        return {"model": cross_entropy(nets["head"](batch.z), batch.y) / (1 + ctx.round)}


@final
@dataclass(frozen=True)
class Vector(Broken):
    def losses(self, nets, batch, ctx):
        return {"model": cross_entropy(nets["head"](batch.z), batch.y, reduction="none")}


@final
@dataclass(frozen=True)
class Silent(Broken):
    def losses(self, nets, batch, ctx):
        cross_entropy(nets["head"](batch.z), batch.y)


@final
@dataclass(frozen=True)
class Misnamed(Broken):
    def losses(self, nets, batch, ctx):
        return {"head": cross_entropy(nets["head"](batch.z), batch.y)}


@final
@dataclass(frozen=True)
class Detached(Broken):
    def losses(self, nets, batch, ctx):
        return {"model": cross_entropy(nets["head"](batch.z), batch.y).detach()}


@final
@dataclass(frozen=True)
class Plain(Broken):
    def losses(self, nets, batch, ctx):
        return {"model": 1.0}


@final
@dataclass(frozen=True)
class Hiding(Broken):
    weight: float = 0.5


class Bare(Method):
    def losses(self, nets, batch, ctx):
        return {"model": cross_entropy(nets["head"](batch.z), batch.y)}


@final
@dataclass(frozen=True)
class Unseeded(Broken):
    def losses(self, nets, batch, ctx):
        noise = torch.rand((), generator=None if batch.x.is_meta else CARELESS, device=batch.x.device)
        return {"model": cross_entropy(nets["head"](batch.z), batch.y) * (1 + noise)}


CARELESS = torch.Generator()


@final
@dataclass(frozen=True)
class Lazy(Broken):
    def losses(self, nets, batch, ctx):
        return {"model": cross_entropy(nets["head"](batch.z), batch.y) * 1e-9}


@final
@dataclass(frozen=True)
class Talking(Broken):
    """Uploads what should stay private."""

    @property
    def groups(self):
        return {"model": ("backbone", "head"), "personal": ("personal_head",)}

    def build(self, backbone, num_classes, rng):
        return FedRoD().build(backbone, num_classes, rng)

    def personal(self, name):
        return name.startswith("personal_head.")

    def losses(self, nets, batch, ctx):
        return FedRoD().losses(nets, batch, ctx)

    def finish(self, nets, batches, ctx):
        return {"head": nets["personal_head"].weight.clone()}, {}


@final
@dataclass(frozen=True)
class Orphan(Broken):
    def build(self, backbone, num_classes, rng):
        nets = super().build(backbone, num_classes, rng)
        nets["spare"] = torch.nn.Linear(2, 2)
        return nets


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (Peeking(), "look at a value"),
        (Reaching(), "reaches the nets of"),
        (Exploding(), "loss of 'model' is"),
        (Vector(), "must be a scalar"),
        (Silent(), r"losses returned nothing \(is there a return\?\), but a dict"),
        (Misnamed(), r"keys \['head'\], but a dict with one scalar tensor for each of the groups 'model'"),
        (Detached(), "the loss of 'model' has no gradient"),
        (Plain(), "the loss of 'model' is a float"),
        (Hiding(), "the field 'weight' of Hiding hides the hook Method.weight"),
        (Bare(), "the class Bare is no dataclass"),
        (FOOGD(Silent(), score_width=16, steps=1), "the method Silent cannot be trained: losses returned nothing"),
        (Broken, "is no method: give an object"),
        (Counting(), "read ctx.round, but it does not say so"),
        (Unseeded(), "depends on who trained before"),
        (Lazy(), "accuracy"),
        (Talking(), "private values travel in the upload 'head'"),
        (Orphan(), "'spare' must be in a group"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Method) else "",
)
def test_the_contract_says_what_is_broken(method, sentence):
    with pytest.raises(AssertionError, match=sentence):
        check_method(method)


@pytest.mark.parametrize("method", [Silent(), Misnamed(), Vector(), Detached(), Plain()])
def test_a_method_that_breaks_the_contract_is_not_trained(federation, config, method):
    with pytest.raises(InputError, match=f"{type(method).__name__} cannot be trained: .*check_method tells more"):
        next(simulate(method, federation, config))
