"""Detectors: direction, invariances, closed forms, and how a user's own is found."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from foogd.detect import (
    ASH,
    DETECTORS,
    MSP,
    Detector,
    Energy,
    FunctionDetector,
    GradNorm,
    MaxLogit,
    ScoreNorm,
    resolve_detector,
)
from foogd.errors import InputError
from foogd.metrics import auroc
from foogd.plugins import load_object
from foogd.types import Output, Readout

CLASSES, D = 5, 40


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def model() -> Readout:
    """A head that reads class c from its own block of features, and the exact score of N(mean, I) around them."""
    weight = torch.zeros(CLASSES, D)
    for c in range(CLASSES):
        weight[c, c * 8 : (c + 1) * 8] = 1.0

    def score(z: Tensor, sigma: float | None = None) -> Tensor:
        return -z / (1 + (sigma or 0.0) ** 2)

    return Readout(lambda z: z @ weight.T, weight, torch.zeros(CLASSES), score)


def outputs(n: int = 60, seed: int = 0) -> Output:
    z = torch.rand(n, D, generator=stream(seed))
    return Output(z, model().head(z))


def separable() -> tuple[Output, Output]:
    """IN: the eight features of one class are active. OUT: eight features of all classes are, faintly."""
    z_in = 0.02 * torch.rand(200, D, generator=stream(0))
    for i in range(200):
        c = i % CLASSES
        z_in[i, c * 8 : (c + 1) * 8] += 2.0
    z_out = 0.02 * torch.rand(200, D, generator=stream(1))
    z_out[:, ::5] += 0.3
    head = model().head
    return Output(z_in, head(z_in)), Output(z_out, head(z_out))


def all_detectors() -> list[Detector]:
    return [*DETECTORS.values(), ASH("p", 60), ASH("s", 90), MSP(10.0), Energy(10.0)]


def name_of(detector: Detector) -> str:
    return repr(detector)


@pytest.mark.parametrize("detector", [d for d in all_detectors() if d != ScoreNorm()], ids=name_of)
def test_larger_means_more_out(detector: Detector) -> None:
    inside, outside = separable()
    assert auroc(detector(inside, model()), detector(outside, model())) > 0.99


def test_the_score_norm_grows_away_from_the_mode() -> None:
    near, far = outputs(), outputs()._replace(z=outputs().z + 10.0)
    assert auroc(ScoreNorm()(near, model()), ScoreNorm()(far, model())) == 1.0


@pytest.mark.parametrize("detector", all_detectors(), ids=name_of)
def test_a_score_belongs_to_its_image(detector: Detector) -> None:
    data, order = outputs(), torch.randperm(60, generator=stream(3))
    scores = detector(data, model())
    assert scores.shape == (60,)
    shuffled = detector(Output(data.z[order], data.logits[order]), model())
    torch.testing.assert_close(shuffled, scores[order], rtol=1e-6, atol=0)
    alone = torch.cat([detector(Output(data.z[i : i + 1], data.logits[i : i + 1]), model()) for i in range(5)])
    torch.testing.assert_close(alone, scores[:5], rtol=1e-6, atol=0)


@pytest.mark.parametrize("detector", all_detectors(), ids=name_of)
def test_scores_are_finite_and_arguments_unchanged(detector: Detector) -> None:
    for z in (outputs().z * 1e4, torch.zeros(4, D), torch.full((4, D), 1e4), -outputs().z):
        data = Output(z, model().head(z) + torch.tensor([1e4, -1e4, 0.0, 0.0, 0.0]))
        before = data.z.clone(), data.logits.clone()
        assert torch.isfinite(detector(data, model())).all()
        assert torch.equal(data.z, before[0])
        assert torch.equal(data.logits, before[1])


def test_msp_is_the_largest_probability_and_ignores_a_shift() -> None:
    data = outputs()
    torch.testing.assert_close(MSP()(data).float(), -torch.softmax(data.logits, 1).amax(1))
    torch.testing.assert_close(MSP(2.0)(data).float(), -torch.softmax(data.logits / 2, 1).amax(1))
    shifted = Output(data.z, data.logits.double() + 7.0)
    torch.testing.assert_close(MSP()(shifted), MSP()(data), rtol=0, atol=1e-12)


def test_msp_ranks_confident_images_that_are_equal_in_float32() -> None:
    logits = torch.zeros(3, CLASSES)
    logits[:, 0] = torch.tensor([20.0, 25.0, 30.0])
    assert (torch.softmax(logits, 1).amax(1) == 1).all()
    scores = MSP()(Output(torch.zeros(3, D), logits))
    assert scores[0] > scores[1] > scores[2]


def test_energy_and_max_logit_follow_a_shift() -> None:
    data = outputs()
    shifted = Output(data.z, data.logits.double() + 7.0)
    for detector in (Energy(), Energy(3.0), MaxLogit()):
        torch.testing.assert_close(detector(shifted), detector(data).double() - 7.0, rtol=0, atol=1e-10)


def test_energy_lies_between_the_max_logit_and_its_bound() -> None:
    data = outputs()
    gap = MaxLogit()(data) - Energy()(data)
    assert (gap > 0).all()
    assert (gap <= math.log(CLASSES)).all()
    torch.testing.assert_close(Energy(1e-3)(data), MaxLogit()(data).double(), rtol=0, atol=2e-3)


def test_ash_without_pruning() -> None:
    """p leaves the features, s multiplies them by e, b replaces each by the mean of its vector."""
    data, readout = outputs(), model()

    def energy_of(z: Tensor) -> Tensor:
        return Energy()(Output(z, readout.head(z)))

    torch.testing.assert_close(ASH("p", 0)(data, readout), Energy()(data), rtol=0, atol=1e-12)
    torch.testing.assert_close(ASH("s", 0)(data, readout), energy_of(math.e * data.z), rtol=1e-5, atol=0)
    flat = data.z.mean(1, keepdim=True).expand_as(data.z)
    torch.testing.assert_close(ASH("b", 0)(data, readout), energy_of(flat), rtol=1e-5, atol=0)


@pytest.mark.parametrize("variant", ["p", "b", "s"])
@pytest.mark.parametrize("percentile", [10, 33, 65, 90, 99.9])
def test_ash_keeps_the_largest_entries(variant: str, percentile: float) -> None:
    seen: list[Tensor] = []

    def head(z: Tensor) -> Tensor:
        seen.append(z)
        return z[:, :CLASSES]

    z = outputs(7).z
    ASH(variant, percentile)(Output(z, z[:, :CLASSES]), Readout(head))
    k = max(D - round(D * percentile / 100), 1)
    for row, pruned in zip(z.numpy(), seen[0].numpy(), strict=True):
        kept = np.sort(np.argsort(row)[-k:])
        expected = np.zeros(D)
        expected[kept] = {
            "p": row[kept],
            "b": np.full(k, row.sum() / k),
            "s": row[kept] * np.exp(row.sum() / row[kept].sum()),
        }[variant]
        np.testing.assert_allclose(pruned, expected, rtol=1e-4)
        assert (pruned != 0).sum() == k


def test_ash_keeps_exactly_k_of_equal_entries() -> None:
    seen: list[Tensor] = []
    readout = Readout(lambda z: seen.append(z) or z)
    ASH("p", 75)(Output(torch.ones(3, 8), torch.ones(3, 8)), readout)
    assert seen[0].sum(1).tolist() == [2.0, 2.0, 2.0]


def test_the_default_ash_is_the_papers() -> None:
    assert DETECTORS["ash"] == ASH("b", 65)


@pytest.mark.parametrize(("variant", "percentile"), [("x", 65), ("p", -1), ("p", 100), ("b", math.nan)])
def test_ash_refuses_other_settings(variant: str, percentile: float) -> None:
    with pytest.raises(InputError, match="of ASH is"):
        ASH(variant, percentile)


def test_gradnorm_is_the_gradient_of_the_last_layer() -> None:
    head = nn.Linear(D, CLASSES).double()
    z = torch.randn(9, D, generator=stream(), dtype=torch.float64)
    scores = GradNorm()(Output(z, head(z)))
    for i in range(9):
        loss = -torch.log_softmax(head(z[i]), 0).sum()
        (grad,) = torch.autograd.grad(loss, head.weight)
        assert float(scores[i].detach()) == pytest.approx(-float(grad.abs().sum()), rel=1e-10)


def test_score_norm_asks_for_its_noise_level() -> None:
    data, norm = outputs(), outputs().z.norm(dim=1)
    torch.testing.assert_close(ScoreNorm()(data, model()).float(), norm)
    torch.testing.assert_close(ScoreNorm(sigma=1.0)(data, model()).float(), norm / 2)


def test_detectors_say_whether_they_apply() -> None:
    plain = Readout(model().head)
    assert [name for name, d in DETECTORS.items() if not d.applies(plain)] == ["score_norm"]
    assert all(d.applies(model()) for d in DETECTORS.values())
    assert {name for name, d in DETECTORS.items() if not d.applies(None)} == {"score_norm", "ash"}
    for readout in (None, plain):
        with pytest.raises(InputError, match="score network"):
            ScoreNorm()(outputs(), readout)
    with pytest.raises(InputError, match="head"):
        ASH()(outputs())


def test_every_detector_describes_itself() -> None:
    assert list(DETECTORS)[:6] == ["msp", "max_logit", "energy", "ash", "gradnorm", "score_norm"]
    for detector in DETECTORS.values():
        assert detector.description
        assert detector.paper
        assert detector.passes >= 0


def test_detectors_without_training_passes_need_no_fit() -> None:
    data = outputs()
    for detector in DETECTORS.values():
        if detector.passes == 0:
            assert detector.statistics(data, torch.zeros(60, dtype=torch.long), model()) == {}
            assert detector.fit({}) is detector


# ------------------------------------------------------------------------------------------------------- users' files

PLUGIN = """
from __future__ import annotations

import math
from dataclasses import dataclass
from torch import Tensor
from foogd.detect import MSP, Detector

LIMIT = 3
ready = MSP(2.0)

def negative_max(outputs):
    return -outputs.logits.amax(1)

def too_short(outputs):
    return outputs.logits[0]

def not_a_tensor(outputs):
    return [1.0]

@dataclass(frozen=True)
class Mine(Detector):
    scale: float = 2.0
    def __call__(self, outputs, readout=None):
        return -self.scale * outputs.logits.amax(1)

@dataclass(frozen=True)
class Demanding(Detector):
    scale: float
    def __call__(self, outputs, readout=None):
        return -self.scale * outputs.logits.amax(1)

class Unfinished(Detector):
    pass

class Unrelated:
    pass

_hidden = 1
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    return path


def test_a_name_is_looked_up() -> None:
    assert resolve_detector("msp") is DETECTORS["msp"]
    with pytest.raises(InputError, match=r"no detector 'mps'; it must be one of msp, max_logit, .*file.py:name"):
        resolve_detector("mps")


def test_a_function_an_instance_and_a_class_are_detectors(plugin: Path) -> None:
    data = outputs()
    function = resolve_detector(f"{plugin}:negative_max")
    assert isinstance(function, FunctionDetector)
    assert function.applies(None)
    assert torch.equal(function(data), MaxLogit()(data))
    assert resolve_detector(f"{plugin}:ready") == MSP(2.0)
    mine = resolve_detector(f"{plugin}:Mine")
    assert torch.equal(mine(data), 2 * MaxLogit()(data))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("LIMIT", "of type int, but it must be a function, a Detector or its class"),
        ("Demanding", "cannot be made without arguments: .*scale"),
        ("Unfinished", "is abstract: it must define __call__"),
        ("Unrelated", "must inherit from foogd.detect.Detector"),
        ("missing", "LIMIT, ready, negative_max, too_short, not_a_tensor, Mine, Demanding, Unfinished, Unrelated.$"),
        ("no name", "not of the form file.py:name"),
        ("", "not of the form file.py:name"),
    ],
)
def test_other_objects_are_refused(plugin: Path, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        resolve_detector(f"{plugin}:{name}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"), [("too_short", r"60 scores .* shape \(5,\)"), ("not_a_tensor", "returned list")]
)
def test_a_function_must_return_one_score_an_image(plugin: Path, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_detector(f"{plugin}:{name}")(outputs())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{re.escape(str(tmp_path))}/none.py for the detector does not exist"):
        resolve_detector(f"{tmp_path}/none.py:f")
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(InputError, match="for the detector does not exist"):
        resolve_detector(f"{tmp_path}/folder.py:f")
    with pytest.raises(InputError, match=r"not of the form file\.py:name"):
        resolve_detector("module:f")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:\n", "cannot be imported: SyntaxError: "),
        ("import nothing_of_that_name\n", "cannot be imported: ModuleNotFoundError: No module named"),
        ("raise RuntimeError('two\\nlines')\n", "cannot be imported: RuntimeError: two lines$"),
        ("raise SystemExit(3)\n", "cannot be imported: SystemExit: 3$"),
    ],
)
def test_a_file_that_cannot_be_imported_says_why_on_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as error:
        load_object(f"{path}:f", "method")
    assert "\n" not in str(error.value)
    path.write_text("f = 1\n")
    assert load_object(f"{path}:f", "method") == 1


def test_objects_of_one_file_share_their_classes(plugin: Path) -> None:
    mine = load_object(f"{plugin}:Mine", "detector")
    assert load_object(f"{plugin}:Mine", "detector") is mine
    assert isinstance(resolve_detector(f"{plugin}:Mine"), mine)


def test_a_changed_file_is_read_again_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "value.py"
    for value in (1, 2, 3):
        path.write_text(f"x = {value}\n")
        assert load_object(f"{path}:x", "data set") == value
    assert list(tmp_path.iterdir()) == [path]


def test_files_of_the_same_name_do_not_mix(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text("class X: pass\n")
    first, second = (load_object(f"{tmp_path}/{folder}/same.py:X", "method") for folder in ("a", "b"))
    assert first is not second


def test_a_file_without_names_says_so(tmp_path: Path) -> None:
    path = tmp_path / "empty.py"
    path.write_text("from __future__ import annotations\nimport math\n_x = 1\n")
    with pytest.raises(InputError, match="the public names defined there: none"):
        load_object(f"{path}:f", "backbone")
