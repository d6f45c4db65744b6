"""A run of before FOOGD had variants: what was its one way is the anchored variant now, and says the same.

data/anchored-run was made by the code of then (`foogd run demo --method fedavg+foogd --data stripes.npz --backbone
net.py:net …`, commit d8197a8, as its environment.json says); answers.json is what its model said about twelve images.
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from foogd import AnchoredFOOGD, InputError, load
from foogd.presets.loader import parse_toml, read_run_config
from foogd.reports.compare import compare_runs
from foogd.runs.files import read_rows
from foogd.runs.model_file import is_of, read_about
from foogd.runs.run import Run

KEPT = Path(__file__).parent / "anchored-run"
NAME = "fedavg+foogd (anchored, not in the paper)"
CLOSE = {"rel": 1e-5, "abs": 1e-5}  # other processors add in another order


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A copy of the run with its images and its backbone, in a folder of its own."""
    shutil.copytree(KEPT, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def must(foogd):
    """A command that must succeed; what it printed."""

    def call(*words):
        code, printed, complaint = foogd(*words)
        assert (code, complaint) == (0, "")
        return printed

    return call


def answers_are_those_of_then(folder: Path, abs: float = 1e-5) -> None:
    images = [np.load("stripes.npz")["images"][240:246], np.load("others.npz")["images"][:6]]
    model = load(folder)
    for said in json.loads(Path("answers.json").read_text()):
        about = {"client": said["client"], "detector": said["detector"]}
        found = model.predict(torch.from_numpy(np.concatenate(images)), **about)
        assert found.classes.tolist() == said["classes"]
        assert found.probability.tolist() == pytest.approx(said["probability"], rel=abs, abs=abs), about
        assert found.score.tolist() == pytest.approx(said["score"], rel=abs, abs=abs), about
        assert found.threshold == pytest.approx(said["threshold"], rel=abs, abs=abs), about


def rows_are_those_of_then(folder: Path) -> None:
    found, then = read_rows(folder), read_rows(KEPT / "run")
    assert [row.as_dict() | {"value": 0} for row in found] == [row.as_dict() | {"value": 0} for row in then]
    # One pair of images that rounding puts the other way round moves a rank by less.
    assert [row.value for row in found] == pytest.approx([row.value for row in then], abs=2e-3)


def test_the_model_is_loaded_as_what_it_was_and_answers_the_same():
    config, method = read_run_config(Path("run/config.toml"))
    assert isinstance(method, AnchoredFOOGD)
    about, _ = read_about(Path("run"))
    assert {"score_net", "ksd_log", "joint_views"} < {*about["settings"]}  # gone, and in the digest
    assert is_of(about, config, method)
    answers_are_those_of_then(Path("run"))


@pytest.mark.parametrize("change", ["whiten = 0.2", "trust = 1.0", "score_width = 17", "lambda_a = 0.05"])
def test_the_digest_still_notices_what_was_changed(change):
    place = Path("run/config.toml")
    key = change.partition(" ")[0]
    place.write_text(re.sub(rf"(?m)^{key} = .*$", change, place.read_text()))
    with pytest.raises(InputError, match=r"config\.toml was changed since the model was saved"):
        load(Path("run"))


def test_it_is_evaluated(must):
    printed = must("evaluate", "run")
    assert NAME.replace("fedavg+foogd ", "") in printed
    rows_are_those_of_then(Path("run"))
    assert Path("run/summary.md").read_text().startswith(f"# {NAME}, seed 0\n")
    must("evaluate", "run", "--detector", "max_logit")
    assert {row.detector for row in read_rows(Path("run"))} == {None, "msp", "energy", "score_norm", "score_own",
                                                                "max_logit"}  # fmt: skip
    assert len({row.run for row in read_rows(Path("run"))}) == 1


def test_it_is_resumed_where_it_was_killed_before_its_evaluation(must):
    for name in ("summary.md", "rows.jsonl", "samples.safetensors", "model"):
        place = Path("run", name)
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    must("run", "run/config.toml", "--out", "run", "--resume")
    found, then = read_rows(Path("run")), read_rows(KEPT / "run")
    assert {row.method for row in found} == {"fedavg+foogd"}
    assert [row.value for row in found] == pytest.approx([row.value for row in then], abs=2e-3)
    answers_are_those_of_then(Path("run"))
    assert Run.open(Path("run"), read_run_config).is_finished()


def test_its_configuration_trains_the_same_model_again_and_is_written_with_its_profile(must):
    must("run", "run/config.toml", "--out", "again")
    answers_are_those_of_then(Path("again"), 1e-3)  # a round of steps, which rounding may drive apart
    written = parse_toml(Path("again/config.toml").read_bytes(), "again")
    assert written["profile"] == "anchored"
    assert "score_net" not in written
    found = compare_runs(Path("run"), Path("again"), resamples=10)
    assert found.settings == ()
    assert found.names == (NAME, NAME)
    printed = must("compare", "run", "again", "--resamples", "10", "--out", "c.md")
    assert f"A: run, {NAME}\nB: again, {NAME}\n" in printed
    assert f"A: run, {NAME}" in Path("c.md").read_text()


def test_it_is_reported_by_its_name(must):
    for form in ("md", "csv", "html"):
        must("report", "run", "--out", f"r.{form}")
        assert NAME in Path(f"r.{form}").read_text()


def test_it_is_not_gone_on_with_as_another_method(foogd):
    words = parse_toml(Path("run/config.toml").read_bytes(), "run")
    keys = ("clients", "alpha", "rounds", "local_epochs", "batch_size", "calibration")
    same = [f"{key}={words[key]}" for key in keys]
    same += ['out=["others.npz"]', 'corruptions=["brightness"]', "severities=[3]", "score_width=16", "data=stripes.npz"]
    same += ['detectors=["msp","energy","score_norm","score_own"]', "backbone=net.py:net", "device=cpu"]
    settings = [part for setting in same for part in ("--set", setting)]
    code, _, complaint = foogd("run", "demo", "--method", "fedavg+foogd", *settings, "--out", "run", "--resume")
    assert code == 2
    assert "another configuration: profile is 'anchored' there and 'published' here" in complaint
    assert foogd(
        "run", "demo", "--method", "fedavg+foogd", *settings, "--set", "profile=anchored", "--out", "run", "--resume"
    )[0] == 0  # fmt: skip


@pytest.mark.parametrize("name", ["mlp", "span"])
def test_a_run_of_a_score_network_that_is_gone_is_refused_in_one_sentence(foogd, name):
    place = Path("run/config.toml")
    place.write_text(place.read_text().replace('score_net = "anchored"', f'score_net = "{name}"'))
    ways = (
        ("predict", "run", "x.png"),
        ("evaluate", "run"),
        ("report", "run", "--out", "r.html"),
        ("figures", "run"),
        ("compare", "run", "run"),
        ("run", "run/config.toml", "--out", "run", "--resume"),
    )
    for words in ways:
        code, printed, complaint = foogd(*words)
        assert code == 2, printed
        [line] = complaint.splitlines()
        assert f"score_net = '{name}' is not possible any more" in line
        assert "environment.json" in line
        assert words[0] == "run" or "run/config.toml" in line
