"""A trained model on other tests: the same weights, other images, a folder of its own, and the run stays as it is."""

import json
import shutil
from pathlib import Path

import pytest
from test_run import DATA, PRESET

from foogd.presets.loader import read_run_config
from foogd.runs.checkpoint import read_checkpoint_state
from foogd.runs.files import read_rows

SMALL = PRESET.replace("rounds = 9", "rounds = 2").replace("eval_every = 2", "eval_every = 1")


@pytest.fixture
def run(tmp_path, monkeypatch, foogd):
    """A finished run in the folder a."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.py").write_text(DATA)
    Path("tiny.toml").write_text(SMALL)
    assert foogd("run", "tiny.toml", "--method", "fedrod+foogd", "--out", "a")[0] == 0
    return Path("a")


def everything(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def values(folder, **wanted):
    rows = [row for row in read_rows(folder) if all(getattr(row, key) == value for key, value in wanted.items())]
    keys = ("scope", "client", "dataset", "split", "corruption", "severity", "detector", "metric")
    return {tuple(getattr(row, key) for key in keys): row.value for row in rows}


def test_other_tests_of_the_same_weights(run, foogd):
    before = everything(run)
    words = ("--set", 'corruptions=["brightness","contrast"]', "--set", "severities=1,5")
    code, out, _ = foogd("evaluate", "a", *words, "--detector", "energy", "--detector", "score_norm", "--out", "b")
    assert code == 0
    assert "Run folder: b" in out
    assert everything(run) == before
    state, source = (read_checkpoint_state(Path(name) / "checkpoint" / "state.json") for name in ("b", "a"))
    assert source.pop("before")["round"] == 1
    assert state == source
    assert sorted(path.name for path in Path("b/checkpoint").iterdir()) == [state["file"], "state.json"]
    found = {(row.corruption, row.severity) for row in read_rows(Path("b")) if row.split == "in-c"}
    assert found == {(kind, severity) for kind in ("brightness", "contrast") for severity in (1, 5)}
    assert {row.detector for row in read_rows(Path("b"))} == {None, "energy", "score_norm"}
    # What both have tested is the same to the last bit.
    for wanted in ({"split": "in", "detector": None}, {"split": "out", "detector": "score_norm", "metric": "auroc"}):
        assert values(Path("b"), round=2, **wanted) == values(run, round=2, **wanted) != {}
    about = json.loads(Path("b/environment.json").read_text())
    assert about["tested"]["run"] == "a"
    assert about["plugins"]["data"] == json.loads(Path("a/environment.json").read_text())["plugins"]["data"]
    config, _ = read_run_config(Path("b/config.toml"))
    assert config.corruptions == ("brightness", "contrast")
    assert "brightness" not in Path("a/summary.md").read_text()
    assert Path("b/summary.md").is_file()


def test_the_model_of_the_new_folder_judges_as_the_old_one(run, foogd):
    import foogd as package

    assert foogd("evaluate", "a", "--set", "severities=1", "--out", "b")[0] == 0
    images = package.runs.make_federation(read_run_config(Path("a/config.toml"))[0]).train.images[:5]
    one, other = (package.load(name).predict(images, client=1) for name in ("a", "b"))
    assert one.score.equal(other.score)
    assert one.labels == other.labels


def test_it_goes_on_after_a_kill_and_then_has_nothing_to_do(run, foogd):
    words = ("evaluate", "a", "--set", "severities=1,2", "--out", "b")
    assert foogd(*words)[0] == 0
    whole = everything(Path("b"))
    for name in ("summary.md", "rows.jsonl", "samples.safetensors", "partition.json"):
        Path("b", name).unlink()  # as a kill before the evaluation leaves it
    shutil.rmtree("b/model")
    assert foogd(*words)[0] == 0
    again = everything(Path("b"))
    assert again.keys() == whole.keys()
    assert again[Path("b/rows.jsonl")] == whole[Path("b/rows.jsonl")]
    assert foogd(*words)[0] == 0
    assert everything(Path("b")) == again


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--set", "seed=1", "--out", "b"], "setting 'seed' cannot be changed for a model that is trained: use "),
        (["--set", "calibration=0.1", "--out", "b"], "setting 'calibration' cannot be changed"),
        (["--set", "lambda_m=0.1", "--out", "b"], "setting 'lambda_m' cannot be changed"),
        (["--set", "severities=9", "--out", "b"], "severities = 9 is not allowed"),
        (["--set", "corruptions=foog", "--out", "b"], "corruption 'foog' is not known"),
        (["--set", "out=nowhere", "--out", "b"], "unknown data set 'nowhere'"),
        (["--set", "severities=1"], "--set needs --out"),
        (["--out", "b"], "--out needs --set or --detector"),
        (["--detector", "spam", "--out", "b"], "there is no detector 'spam'"),
        (["--set", "severities=1", "--out", "tiny.toml"], "tiny.toml is not a run folder: it is a file"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_written(run, foogd, words, sentence):
    code, _, err = foogd("evaluate", "a", *words)
    assert code == 2
    assert sentence in err
    assert len(err.strip().splitlines()) == 1
    assert not Path("b").exists()


def test_only_a_finished_run_whose_images_and_code_are_the_same(run, foogd):
    assert foogd("evaluate", "a", "--set", "severities=1", "--out", "b")[0] == 0
    text = Path("a/config.toml").read_text()
    Path("a/config.toml").write_text(text.replace("rounds = 2", "rounds = 3"))
    code, _, err = foogd("evaluate", "a", "--set", "severities=2", "--out", "c")
    assert (code, "a has 2 of 3 rounds: finish it with foogd run a/config.toml --out a --resume" in err) == (2, True)
    Path("a/config.toml").write_text(text)
    state = json.loads(Path("b/checkpoint/state.json").read_text())
    Path("b/checkpoint/state.json").write_text(json.dumps(state | {"sha256": "0" * 64}))
    code, _, err = foogd("evaluate", "a", "--set", "severities=1", "--out", "b")
    assert (code, "b holds another model than a" in err) == (2, True)
    Path("tiny.py").write_text(DATA.replace("per_client=40", "per_client=44"))
    code, _, err = foogd("evaluate", "a", "--set", "severities=2", "--out", "c")
    assert (code, "the training images are not those that the run began with" in err) == (2, True)
    assert not Path("c").exists()
    Path("tiny.py").write_text(DATA + "\n# the same images, other code\n")
    code, _, err = foogd("evaluate", "a", "--set", "severities=2", "--out", "c")
    assert (code, "the file of the data, is not the one that the run began with" in err) == (2, True)
