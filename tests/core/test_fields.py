"""Settings are checked where an object is made, by one rule for configurations, methods, detectors and Flower."""

from dataclasses import dataclass, fields
from typing import Literal, final

import numpy as np
import pytest

from foogd import FOOGD, Config, FedAvg, FedRoD
from foogd.core.errors import InputError
from foogd.core.fields import Role, check, hints_of, kind_of, parse, setting
from foogd.detectors.neighbours import KNN
from foogd.detectors.registry import DETECTORS
from foogd.flower.options import Options
from foogd.methods import METHODS, PROFILES


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FOOGD(FedAvg(), lambda_m=7.0), "lambda_m = 7.0 is not allowed: it must be a number at least 0.0"),
        (lambda: FOOGD(FedAvg(), sigma=-1.0), "sigma = -1.0"),
        (lambda: FOOGD(FedAvg(), ce_on="all"), "ce_on = 'all' is not allowed: it must be one of 'ori'"),
        (lambda: FOOGD(FedAvg(), steps=2.5), "steps = 2.5 is not allowed: it must be a whole number"),
        (lambda: FedRoD(prior_smoothing=float("nan")), "prior_smoothing = nan"),
        (lambda: FedAvg(views=True), "views = True is not allowed: it must be one of 1, 2"),
        (lambda: KNN(k="50"), "k = '50' is not allowed: it must be a whole number at least 1"),
        (lambda: Options(retries=-1), "retries = -1"),
        (lambda: Config(severities=(1, 9)), "at least 1 and at most 5"),
    ],
)  # fmt: skip
def test_python_refuses_what_the_command_line_refuses(make, words):
    with pytest.raises(InputError) as caught:
        make()
    assert words in str(caught.value)


@final
@dataclass(frozen=True)
class Own:
    """Settings of every type that a text can give, and a field that is no setting."""

    number: float = setting(1, "a number")
    either: Literal["a", "b"] = setting("a", "one of two")
    level: float | None = setting(None, "a level, or none", gt=0.0)
    weights: tuple[float, ...] = setting((1.0,), "several", ge=0.0)
    learnt: np.ndarray | None = None

    def __post_init__(self) -> None:
        check(self)


def test_values_become_plain():
    own = Own(number=np.float32(2.0), weights=[1, np.int64(3)])
    assert (type(own.number), own.weights) == (float, (1.0, 3.0))
    assert all(type(weight) is float for weight in own.weights)
    assert type(Own().number) is float  # a default, too: equal configurations have equal names


@pytest.mark.parametrize(
    "wrong", [{"either": "c"}, {"level": 0.0}, {"weights": (1.0, -1.0)}, {"weights": "1"}, {"number": None}]
)
def test_each_type_has_its_limits(wrong):
    with pytest.raises(InputError):
        Own(**wrong)


def test_what_is_no_setting_is_left_alone():
    assert Own(learnt="anything").learnt == "anything"


def test_a_text_may_hold_a_list():
    items = {item.name: item for item in fields(Own)}
    assert parse("weights", "1, 2.5", hints_of(Own)["weights"], items["weights"]) == (1.0, 2.5)
    assert parse("weights", 3, hints_of(Own)["weights"], items["weights"]) == (3.0,)
    with pytest.raises(InputError, match="weights = '1,x'"):
        parse("weights", "1,x", hints_of(Own)["weights"], items["weights"])
    with pytest.raises(InputError, match="learnt"):
        parse("learnt", "x", hints_of(Own)["learnt"], items["learnt"])


def test_where_the_work_is_done_is_not_part_of_a_name():
    plain = Config().digest({})
    for name in Config.of_role(Role.PLACE):
        item = Config.__dataclass_fields__[name]
        other = next((one for one in item.metadata.get("choices", (3,)) if one != item.default), None)
        assert Config(**{name: other}).digest({}) == plain, name
    assert Config(seed=1).digest({}) != plain


@pytest.mark.parametrize(
    "owner", [Config, Options, *METHODS.values(), *PROFILES.values(), *map(type, DETECTORS.values())]
)
def test_every_setting_is_of_a_type_that_is_checked(owner):
    hints = hints_of(owner)
    assert [item.name for item in fields(owner) if "help" in item.metadata and kind_of(hints[item.name]) is None] == []


def test_every_setting_of_a_run_has_one_role():
    named = [name for role in Role for name in Config.of_role(role)]
    assert sorted(named) == sorted(item.name for item in fields(Config))
