"""From presets, TOML and `--set` to a checked configuration and method, and back to TOML."""

import re
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from foogd import AnchoredFOOGD, FedAvg, FedRoD, simulate
from foogd.config import Config
from foogd.core.errors import InputError
from foogd.methods import FOOGD, PROFILES, make_method, method_names, method_settings
from foogd.presets.loader import (
    REMOVED,
    parse_assignments,
    parse_toml,
    preset_names,
    read_preset,
    read_run_config,
    read_run_settings,
    resolve,
)
from foogd.runs.files import to_toml
from foogd.runs.run import Run


def refusal(preset, overrides=None):
    """The sentence with which settings are refused."""
    with pytest.raises(InputError) as caught:
        resolve(preset, overrides or {})
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def settings_of(config, method):
    """All settings, flat, as a run folder keeps them."""
    return Run(Path("unused"), config, method).settings()


def set_to(text, method="fedavg+foogd"):
    """The value of one setting after `--set text`."""
    key = text.partition("=")[0].strip()
    config, built = resolve({}, {"method": method, **parse_assignments([text])})
    return settings_of(config, built)[key]


# Precedence


def test_set_beats_the_preset_and_both_beat_the_defaults_of_the_profile():
    preset = {"method": "fedavg+foogd", "lr": 0.3, "lambda_a": 0.25}
    assert resolve(preset, {})[1] == FOOGD(lambda_a=0.25)
    config, method = resolve(preset, {"profile": "anchored"})
    assert (config.lr, method) == (0.3, AnchoredFOOGD(lambda_a=0.25))
    config, method = resolve(preset, {"profile": "anchored", "lr": 0.7, "lambda_a": 0.75, "trust": 0.25})
    assert (config.lr, method) == (0.7, AnchoredFOOGD(lambda_a=0.75, trust=0.25))


def test_within_one_layer_a_value_beats_the_profile_whatever_their_order():
    for layer in ({"profile": "anchored", "ce_on": "ori"}, {"ce_on": "ori", "profile": "anchored"}):
        assert resolve({"method": "fedavg+foogd", **layer}, {})[1] == AnchoredFOOGD(ce_on="ori")
        assert resolve({}, {"method": "fedavg+foogd", **layer})[1] == AnchoredFOOGD(ce_on="ori")


def test_a_profile_on_the_command_line_beats_that_of_the_preset():
    for one in PROFILES:
        for two, cls in PROFILES.items():
            preset = {"method": "fedavg+foogd", "foogd": {"profile": one, "lambda_m": 0.25}}
            assert resolve(preset, {"profile": two})[1] == cls(lambda_m=0.25), (one, two)
            assert type(resolve({**preset, "profile": two}, {})[1]) is PROFILES[one]  # a table beats what is above it


def test_the_method_on_the_command_line_decides_which_settings_there_are():
    preset = {"method": "fedavg+foogd"}
    assert isinstance(resolve(preset, {})[1], FOOGD)
    assert resolve(preset, {"method": "fedrod"})[0].method == "fedrod"
    assert "lambda_m" in refusal(preset, {"method": "fedrod", "lambda_m": 0.5})


def test_what_another_profile_has_is_not_known():
    assert "give profile = 'anchored'" in refusal({"method": "fedavg+foogd"}, {"trust": 0.5})
    assert resolve({"method": "fedavg+foogd"}, {"profile": "anchored", "trust": 0.5})[1] == AnchoredFOOGD()
    assert resolve({"method": "fedavg", "foogd": {"trust": 0.5}}, {})[1] == FedAvg()  # of a table that does not count


# Files from before the paper's method was the default

OLD = """
method = "fedrod+foogd"
rounds = 7
weighting = "samples"
partners = "own"
train_constants = "dataset"
lambda_m = 0.5
lambda_a = 0.02
ce_on = "both"
train_base = true
score_net = "anchored"
score_width = 512
standardise = true
log_share = 0.1
whiten = 0.3
conditioned = true
score_features = "eval"
joint_views = true
sigma = 0.25
draws = 4
trust = 0.5
sigma_min = 0.1
sigma_max = 1.0
sigma_levels = 10
dsm_target = "score"
anneal_power = 2.0
step = 0.1
steps = 10
mmd_kernels = 2
ksd_pairs = "aug"
ksd_power = 2.0
ksd_log = true
view_clip = 255
score_optimiser = "adam"
score_lr = 0.001
score_momentum = 0.0
score_clip = 5.0
prior_smoothing = 0.0
"""


def test_an_old_run_is_the_anchored_variant_with_its_values():
    assert set(REMOVED) - {"repo_label_shift", "relu"} < set(tomllib.loads(OLD))  # without those of others
    config, method = resolve(tomllib.loads(OLD), {})
    assert config.rounds == 7
    assert method == AnchoredFOOGD(FedRoD(), lambda_a=0.02, score_width=512, sigma=0.25, draws=4)


def test_the_config_of_an_old_run_can_be_read_and_is_written_with_its_profile(tmp_path):
    config, method = resolve({}, {"method": "fedrod+foogd", "profile": "anchored"})
    now = settings_of(config, method)
    old = {key: value for key, value in now.items() if key != "profile"} | REMOVED | tomllib.loads(OLD)
    (tmp_path / "config.toml").write_text(to_toml(old))
    config, method = read_run_config(tmp_path / "config.toml")
    assert (config.rounds, type(method), method.sigma) == (7, AnchoredFOOGD, 0.25)
    told = read_run_settings(tmp_path / "config.toml")
    assert told["profile"] == "anchored"
    assert not told.keys() & REMOVED.keys()
    assert told == tomllib.loads(to_toml(settings_of(config, method)))


@pytest.mark.parametrize("score_net", ["mlp", "span"])
def test_an_old_run_with_a_score_network_that_is_gone_is_one_sentence(score_net):
    sentence = refusal(tomllib.loads(OLD) | {"score_net": score_net})
    assert f"score_net = '{score_net}' is not possible any more" in sentence
    assert "environment.json" in sentence


@pytest.mark.parametrize("key", [key for key in REMOVED if key != "score_net"])
def test_a_setting_that_is_gone_may_only_have_its_default(key):
    other = {bool: REMOVED[key] is False, int: 1, float: 0.5, str: "other"}[type(REMOVED[key])]
    sentence = refusal(tomllib.loads(OLD) | {key: other})
    assert sentence.startswith(f"{key} = {other!r} is not possible any more")
    assert repr(REMOVED[key]) in sentence


def test_no_setting_of_today_counts_as_gone():
    for cls in (Config, FOOGD, AnchoredFOOGD):
        assert not REMOVED.keys() & {item.name for item in fields(cls)}


# Tables


def test_a_table_counts_only_where_the_method_has_that_part():
    preset = {"foogd": {"lambda_a": 0.5}, "fedrod": {"prior_smoothing": 2.0}, "fedavg": {"rounds": 3}}
    assert resolve(preset, {"method": "fedavg"})[0].rounds == 3
    assert resolve(preset, {"method": "fedavg+aug"})[0].rounds == 3
    assert resolve(preset, {"method": "fedrod"})[1].prior_smoothing == 2.0
    assert resolve(preset, {"method": "fedrod"})[0].rounds == Config.rounds
    both = resolve(preset, {"method": "fedrod+foogd"})[1]
    assert (both.lambda_a, both.base.prior_smoothing) == (0.5, 2.0)
    assert resolve(preset, {"method": "fedavg+foogd"})[1].lambda_a == 0.5


def test_a_table_beats_the_preset_and_set_beats_the_table():
    preset = {"rounds": 5, "fedrod": {"rounds": 7}}
    assert resolve(preset, {"method": "fedavg"})[0].rounds == 5
    assert resolve(preset, {"method": "fedrod"})[0].rounds == 7
    assert resolve(preset, {"method": "fedrod", "rounds": 9})[0].rounds == 9


def test_a_misspelt_table_or_key_in_a_table_is_found_even_where_it_would_not_count():
    assert "[fogd]" in refusal({"method": "fedavg", "fogd": {}})
    sentence = refusal({"method": "fedavg", "foogd": {"lamda_a": 0.5}})
    assert "[foogd]" in sentence
    assert "'lamda_a'" in sentence
    assert "did you mean 'lambda_a'?" in sentence


# Values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("rounds=3", 3),
        ("rounds = 3 ", 3),
        ("lr=0.5", 0.5),
        ("lr=5e-1", 0.5),
        ("lr=1", 1.0),
        ("flip=true", True),
        ("flip=false", False),
        ("train_base=false", False),
        ("data=digits", "digits"),
        ('data="digits"', "digits"),
        ("init=runs/a=b", "runs/a=b"),
        ("backbone=nets/mine.py:wide", "nets/mine.py:wide"),
        ("out=digits", ("digits",)),
        ("out=digits,fashion_out", ("digits", "fashion_out")),
        ("out=digits, fashion_out", ("digits", "fashion_out")),
        ('out=["digits"]', ("digits",)),
        ("corruptions=[]", ()),
        ("corruptions=", ()),
        ("severities=3", (3,)),
        ("severities=1,3,5", (1, 3, 5)),
        ("severities=[1, 3]", (1, 3)),
        ("ce_on=ori", "ori"),
        ("update_bound=auto", "auto"),
        ("update_bound=0", 0.0),
        ("update_bound=2.5", 2.5),
        ("split_seed=auto", "auto"),
        ("split_seed=3", 3),
    ],
)
def test_values_are_read_as_what_they_are(text, value):
    found = set_to(text)
    assert found == value
    assert type(found) is type(value)


def test_of_two_assignments_the_last_counts():
    assert parse_assignments(["rounds=2", "rounds=3"]) == {"rounds": 3}


@pytest.mark.parametrize("text", ["rounds", "=3", " =3", ""])
def test_an_assignment_without_key_or_value_is_refused(text):
    with pytest.raises(InputError, match="key=value") as caught:
        parse_assignments([text])
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("rounds=2.0", "a whole number at least 1"),
        ("rounds=two", "a whole number at least 1"),
        ("rounds=true", "a whole number at least 1"),
        ("rounds=0", "a whole number at least 1"),
        ("rounds=-1", "a whole number at least 1"),
        ("rounds=[2]", "a whole number at least 1"),
        ("rounds=2024-01-01", "a whole number at least 1"),
        ("seed=-1", "a whole number at least 0"),
        ("batch_size=1", "a whole number at least 2"),
        ("lr=0", "a number above 0.0"),
        ("lr=fast", "a number above 0.0"),
        ("lr=true", "a number above 0.0"),
        ("lr=nan", "a number above 0.0"),
        ("lr=inf", "a number above 0.0"),
        ("participation=0", "a number above 0.0 and at most 1.0"),
        ("participation=1.5", "a number above 0.0 and at most 1.0"),
        ("momentum=1", "a number at least 0.0 and below 1.0"),
        ("lambda_m=1.01", "a number at least 0.0 and at most 1.0"),
        ("flip=1", "true or false"),
        ("flip=yes", "true or false"),
        ("flip=True", "true or false"),
        ("partition=iid", "one of 'dirichlet', 'pathological', 'by_domain'"),
        ("partition=1", "one of 'dirichlet', 'pathological', 'by_domain'"),
        ("partition=[]", "one of 'dirichlet', 'pathological', 'by_domain'"),
        ("device=gpu", "one of 'auto', 'cpu', 'cuda'"),
        ("ce_on=aug", "one of 'ori', 'both'"),
        ("update_bound=-1", "'auto' or a number at least 0.0"),
        ("update_bound=nan", "'auto' or a number at least 0.0"),
        ("update_bound=inf", "'auto' or a number at least 0.0"),
        ("update_bound=high", "'auto' or a number at least 0.0"),
        ("update_bound=true", "'auto' or a number at least 0.0"),
        ("split_seed=-1", "'auto' or a whole number at least 0"),
        ("split_seed=1.5", "'auto' or a whole number at least 0"),
        ("split_seed=mine", "'auto' or a whole number at least 0"),
        ("split_seed=true", "'auto' or a whole number at least 0"),
        ("data=3", "text"),
        ("out=[1]", "a list of texts"),
        ("severities=0", "a list of whole numbers at least 1 and at most 5"),
        ("severities=6", "a list of whole numbers at least 1 and at most 5"),
        ("severities=[1.5]", "a list of whole numbers at least 1 and at most 5"),
        ("severities=1,high", "a list of whole numbers at least 1 and at most 5"),
        ("severities=[[1]]", "a list of whole numbers at least 1 and at most 5"),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_what_is_allowed(text, allowed):
    [(key, value)] = parse_assignments([text]).items()
    sentence = refusal({"method": "fedavg+foogd"}, {key: value})
    assert sentence == f"{key} = {value!r} is not allowed: it must be {allowed}"


@pytest.mark.parametrize("text", ["3", "true", "1.0"])
def test_a_number_among_choices_has_its_type(text):
    [(key, value)] = parse_assignments([f"views={text}"]).items()
    assert refusal({"method": "fedavg"}, {key: value}) == f"views = {value!r} is not allowed: it must be one of 1, 2"
    assert set_to("views=2", "fedavg") == 2


@pytest.mark.parametrize("method", method_names())
def test_limits_are_met_by_every_default(method):
    config, built = resolve({}, {"method": method})
    assert resolve({}, settings_of(config, built)) == (config, built)


def test_an_unknown_key_suggests_the_near_one_and_lists_all():
    sentence = refusal({"method": "fedavg+foogd"}, {"lamda_a": 0.1})
    assert "'lamda_a' is not known for method fedavg+foogd" in sentence
    assert "did you mean 'lambda_a'?" in sentence
    for name in ("lambda_m", "rounds", "clients"):
        assert name in sentence
    far = refusal({"method": "fedavg"}, {"qqqqqq": 1})
    assert "did you mean" not in far
    assert "rounds" in far


@pytest.mark.parametrize("method", ["fedavg+aug", "fedrod+aug", "fedavg+foogd"])
def test_what_a_suffix_decides_is_no_setting(method):
    assert "'views' is not known" in refusal({"method": method}, {"views": 1})


@pytest.mark.parametrize("profile", ["fast", "", 3, ["anchored"], True, "fixed", "paper", "released"])
def test_an_unknown_profile_is_refused(profile):
    sentence = refusal({"method": "fedavg+foogd"}, {"profile": profile})
    assert repr(profile) in sentence
    for name in PROFILES:
        assert repr(name) in sentence
    assert ("'fixed' is called 'anchored' now" in sentence) == (profile == "fixed")


@pytest.mark.parametrize("method", ["fedavg", "fedrod+aug"])
def test_only_foogd_has_profiles(method):
    sentence = refusal({"method": method}, {"profile": "anchored"})
    assert method in sentence
    assert "+foogd" in sentence


@pytest.mark.parametrize("method", ["fedfoo", "fedavg+fogd", "", "fedavg+", 3, "fedavg+foogd+aug"])
def test_an_unknown_method_is_refused(method):
    sentence = refusal({}, {"method": method})
    for name in ("fedavg", "fedrod+foogd", "file.py:Class"):
        assert name in sentence


# Presets and files


def test_every_preset_resolves_for_every_method():
    assert "demo" in preset_names()
    for preset in preset_names():
        for method in method_names():
            config, built = resolve(read_preset(preset), {"method": method})
            assert config.method == method
            assert type(built) is type(make_method(method))


def test_an_unknown_preset_is_refused_with_the_names_of_all():
    with pytest.raises(InputError, match="'dmo'") as caught:
        read_preset("dmo")
    for name in preset_names():
        assert name in str(caught.value)


def test_a_file_that_is_missing_or_is_not_toml_is_named(tmp_path):
    with pytest.raises(InputError, match=r"none\.toml is not a file"):
        read_preset(str(tmp_path / "none.toml"))
    for content in (b"rounds = ", b"rounds 3", b"\xff\xfe", b"rounds = 1\nrounds = 2"):
        with pytest.raises(InputError, match=r"mine\.toml is not TOML") as caught:
            parse_toml(content, "mine.toml")
        assert "\n" not in str(caught.value)


# There and back


def there_and_back(config, method):
    """What a run folder's config.toml makes of a configuration."""
    return resolve(tomllib.loads(to_toml(settings_of(config, method))), {})


@pytest.mark.parametrize("name", method_names())
def test_a_configuration_survives_its_own_toml(name):
    config, method = resolve(read_preset("demo"), {"method": name})
    assert there_and_back(config, method) == (config, method)
    changed = {"seed": 7, "lr": 1e-5, "weight_decay": 0.1 + 0.2, "corruptions": [], "severities": [5], "flip": False}
    if name.endswith("+foogd"):
        changed |= {"profile": "anchored", "sigma": 1 / 3, "train_base": False}
    config, method = resolve(read_preset("demo"), {"method": name, **changed})
    assert there_and_back(config, method) == (config, method)
    assert config.digest(method_settings(method)) == config.digest(method_settings(there_and_back(config, method)[1]))


@pytest.mark.parametrize("text", ['a "quoted" name', "back\\slash", "tab\tand\nline", "Füße ≠ 足", "del\x7f", "x#y"])
def test_any_text_survives_toml(text):
    assert tomllib.loads(to_toml({"data_root": text, "out": (text, text)})) == {"data_root": text, "out": [text, text]}


def test_what_toml_cannot_hold_is_refused():
    with pytest.raises(InputError, match=r"config\.toml"):
        to_toml({"backbone": lambda shape: None})


# Users' own methods

MINE = """
from __future__ import annotations
from dataclasses import dataclass, field
from typing import final
from torch.nn.functional import cross_entropy
from foogd import Method

class Own(Method):
    def losses(self, nets, batch, ctx):
        return {"model": cross_entropy(nets["head"](batch.features), batch.y)}

@final
@dataclass(frozen=True)
class Mine(Own):
    tau: float = field(default=0.04, metadata={"gt": 0.0})
    schema: str = "a"
    floor: float | None = None

@final
@dataclass(frozen=True)
class Needs(Own):
    tau: float

@final
@dataclass(frozen=True)
class Clash(Own):
    lr: float = 0.1

@final
@dataclass(frozen=True)
class Abstract(Method):
    tau: float = 0.1

@final
@dataclass(frozen=True)
class Unknown(Own):
    tau: Missing = 0.1
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return f"{tmp_path}/mine.py"


@pytest.mark.parametrize("suffix", ["", "+foogd"])
def test_a_method_from_a_file_has_its_settings_checked(mine, suffix):
    name = f"{mine}:Mine{suffix}"
    config, method = resolve({}, {"method": name, "tau": 1, "schema": "b"})
    assert {"tau": 1.0, "schema": "b"}.items() <= method_settings(method).items()
    assert there_and_back(config, method) == (config, method)
    assert "it must be a number above 0.0" in refusal({}, {"method": name, "tau": 0})


def test_a_setting_without_default_must_be_given(mine):
    assert "'tau'" in refusal({}, {"method": f"{mine}:Needs"})
    assert resolve({}, {"method": f"{mine}:Needs", "tau": 0.5})[1].tau == 0.5


@pytest.mark.parametrize(("name", "word"), [("Clash", "'lr'"), ("Abstract", "losses")])
def test_a_method_that_cannot_be_made_is_refused(mine, name, word):
    sentence = refusal({}, {"method": f"{mine}:{name}"})
    assert word in sentence
    assert name in sentence


def test_a_setting_whose_type_cannot_be_found_keeps_its_default(mine):
    assert resolve({}, {"method": f"{mine}:Unknown"})[1].tau == 0.1
    assert "Missing" in refusal({}, {"method": f"{mine}:Unknown", "tau": 0.2})


# The configuration in Python


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("rounds", 0, "a whole number at least 1"),
        ("rounds", "x", "a whole number at least 1"),
        ("rounds", True, "a whole number at least 1"),
        ("rounds", 2.0, "a whole number at least 1"),
        ("seed", None, "a whole number at least 0"),
        ("batch_size", 0, "a whole number at least 2"),
        ("participation", 2.0, "a number above 0.0 and at most 1.0"),
        ("lr", float("nan"), "a number above 0.0"),
        ("lr", float("inf"), "a number above 0.0"),
        ("flip", 1, "true or false"),
        ("device", "gpu", "one of 'auto', 'cpu', 'cuda'"),
        ("device", 0, "one of 'auto', 'cpu', 'cuda'"),
        ("partition", "iid", "one of 'dirichlet', 'pathological', 'by_domain'"),
        ("out", "digits", "a list of texts"),
        ("severities", (1, 6), "a list of whole numbers at least 1 and at most 5"),
        ("severities", 3, "a list of whole numbers at least 1 and at most 5"),
        ("backbone", 3, "text or a function"),
        ("update_bound", -1, "'auto' or a number at least 0.0"),
        ("update_bound", float("nan"), "'auto' or a number at least 0.0"),
        ("update_bound", "high", "'auto' or a number at least 0.0"),
        ("update_bound", True, "'auto' or a number at least 0.0"),
        ("split_seed", -1, "'auto' or a whole number at least 0"),
        ("split_seed", 1.5, "'auto' or a whole number at least 0"),
        ("split_seed", "mine", "'auto' or a whole number at least 0"),
    ],
)
def test_python_refuses_what_the_command_refuses(key, value, allowed):
    sentence = re.escape(f"{key} = {value!r} is not allowed: it must be {allowed}") + "$"
    with pytest.raises(InputError, match=sentence):
        Config(**{key: value})
    with pytest.raises(InputError, match=sentence):
        replace(Config(), **{key: value})


def test_python_takes_what_can_be_used():
    chosen = {"lr": 1, "out": ["digits"], "severities": (), "clients": 0, "backbone": Config, "device": "cuda:1"}
    config = Config(**chosen, rounds=np.int64(3), alpha=np.float32(0.5))
    assert {key: getattr(config, key) for key in chosen} == {**chosen, "out": ("digits",)}
    assert (type(config.rounds), type(config.alpha)) == (int, float)  # as they are written down
    assert hash(config) == hash(replace(config))
    for preset in preset_names():
        resolve(read_preset(preset), {})


def test_a_gpu_that_is_not_there_is_named(federation, config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="device = 'cuda' is not possible: torch finds no GPU here; use auto or cpu"):
        next(simulate(FedAvg(), federation, replace(config, device="cuda")))
