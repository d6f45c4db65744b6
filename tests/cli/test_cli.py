"""The command line: what it writes, what it repeats bit for bit, and one sentence for everything that is wrong."""

import io
import itertools
import json
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from rich.console import Console

from foogd import Config, InputError, __version__, load
from foogd.cli import main
from foogd.cli.common import ORDER, rich_table
from foogd.cli.settings import method_groups, run_groups
from foogd.data.corrupt import CORRUPTIONS
from foogd.detectors.registry import DETECTORS
from foogd.methods import PROFILES, method_names
from foogd.nets import BACKBONES
from foogd.presets.loader import read_preset, read_run_config, resolve
from foogd.runs.checkpoint import load_checkpoint, load_private_values, load_values
from foogd.runs.files import alone, read_rows
from foogd.runs.run import Run
from foogd.tables.grid import Table

MINE = """
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from foogd import ImageStore, Method
from foogd.data.synthetic import tiny_federation
from foogd.detect import Detector


def inside(root):
    return tiny_federation(per_client=40, channels=1).train


def outside(root):
    return tiny_federation(per_client=40, channels=1).tests[-1].store


def nothing(root):
    return None


@final
@dataclass(frozen=True)
class Mine(Method):
    "A method of one's own."

    smoothing: float = 0.0

    def losses(self, nets, batch, ctx):
        logits = nets["head"](batch.features)
        return {"model": cross_entropy(logits, batch.y, label_smoothing=self.smoothing)}


class NoMethod:
    pass


def flat(shape):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(12), nn.BatchNorm1d(12), nn.Dropout(0.2), nn.ReLU())


def image_shaped(shape):
    return nn.Conv2d(1, 3, 3)


def width(output):
    return output.logits.std(dim=1).neg()


def crooked(output):
    return output.logits


number = 3
"""

TINY = """
data = "mine.py:inside"
out = ["mine.py:outside"]
corruptions = []
severities = [1]
clients = 3
rounds = 2
batch_size = 16
lr = 0.05
device = "cpu"
[foogd]
score_width = 16
"""


def populate():
    Path("mine.py").write_text(MINE)
    Path("tiny.toml").write_text(TINY)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working folder with a preset and with a file of one's own data, method, nets and detectors."""
    monkeypatch.chdir(tmp_path)
    populate()
    return tmp_path


@pytest.fixture
def run(foogd):
    """A run that must succeed; its folder."""

    def call(folder, method="fedavg", *words):
        code, _, complaint = foogd("run", "tiny.toml", "--method", method, "--out", folder, *words)
        assert (code, complaint) == (0, "")
        return Path(folder)

    return call


@pytest.fixture
def refused(foogd):
    """The one sentence for bad input; exit code 2, nothing written and nothing lost."""

    def call(*words):
        before = contents(Path())
        code, printed, complaint = foogd(*words)
        assert code == 2, printed
        assert "Traceback" not in complaint
        [line] = complaint.splitlines()
        assert line.startswith("foogd: ")
        assert contents(Path()) == before
        return line

    return call


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A finished run of fedavg+foogd, to be copied."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        populate()
        patch.setattr(sys, "argv", ["foogd", "run", "tiny.toml", "--method", "fedavg+foogd", "--out", "a"])
        main()
    return folder / "a"


@pytest.fixture
def finished(kept):
    shutil.copytree(kept, "a")
    return Path("a")


def contents(folder):
    """Every file below a folder with its bytes, and every folder."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        assert torch.equal(value, other[name]), name


def base_values(folder):
    """Backbone and head of a run, with buffers and counters."""
    values = {name: value for name, value in load_values(folder).items() if not name.startswith("score.")}
    assert {name.partition(".")[0] for name in values} == {"backbone", "head"}
    assert any(name.endswith("running_var") for name in values)
    assert any(name.endswith("num_batches_tracked") for name in values)
    return values


# Runs


def test_a_run_folder_holds_what_is_promised(run):
    folder = run("a", "fedrod+foogd")
    names = ["checkpoint", "config.toml", "environment.json", "model", "partition.json", "partition.png",
             "rounds.jsonl", "rows.jsonl", "samples.safetensors", "summary.md"]  # fmt: skip
    assert sorted(path.name for path in folder.iterdir()) == names
    kept = ["round-00001.safetensors", "round-00002.safetensors", "state.json"]
    assert sorted(path.name for path in (folder / "checkpoint").iterdir()) == kept
    about = json.loads((folder / "environment.json").read_text())
    assert about["versions"]["torch"] == torch.__version__
    assert about["device"] == "cpu"
    kind, _, instructions = about["processor"].rpartition(", ")  # bits depend on it
    assert kind
    assert instructions == torch.backends.cpu.get_cpu_capability()
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in rounds] == [1, 2]
    assert all(set(line["losses"]) == {"model", "personal", "score"} and line["seconds"] > 0 for line in rounds)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    wanted = {"run", "method", "seed", "client", "dataset", "split", "corruption", "severity", "detector", "metric",
              "value", "weight"}  # fmt: skip
    assert all(wanted <= row.keys() for row in rows)
    assert {row["detector"] for row in rows} == {None, "msp", "energy", "score_norm", "score_span_all"}
    assert "ACC-IN" in (folder / "summary.md").read_text()


def test_the_same_command_gives_the_same_bytes_and_another_seed_does_not(run):
    one, other = run("a", "fedrod+foogd", "--seed", "5"), run("b", "fedrod+foogd", "--set", "seed=5")
    assert (one / "rows.jsonl").read_bytes() == (other / "rows.jsonl").read_bytes()
    assert (one / "config.toml").read_bytes() == (other / "config.toml").read_bytes()
    assert_equal(load_checkpoint(one)[0], load_checkpoint(other)[0])
    third = run("c", "fedrod+foogd", "--seed", "6")
    assert (one / "rows.jsonl").read_bytes() != (third / "rows.jsonl").read_bytes()


def test_the_configuration_in_a_run_folder_repeats_the_run(run, foogd):
    one = run("a", "fedrod+foogd", "--set", "profile=anchored", "--set", "lambda_a=0.125", "--seed", "3")
    assert foogd("run", "a/config.toml", "--out", "b")[0] == 0
    for name in ("rows.jsonl", "config.toml"):
        assert (one / name).read_bytes() == (Path("b") / name).read_bytes()
    assert_equal(load_checkpoint(one)[0], load_checkpoint(Path("b"))[0])


def test_without_weight_on_originals_foogd_is_its_base_method_bit_for_bit(run):
    plain = run("plain")
    neutral = run("neutral", "fedavg+foogd", "--set", "lambda_a=0")
    assert_equal(base_values(plain), base_values(neutral))


def test_without_weight_on_both_views_foogd_is_the_augmented_base_method_bit_for_bit(run):
    plain, augmented = run("plain"), run("augmented", "fedavg+aug")
    neutral = run("neutral", "fedavg+foogd", "--set", "lambda_a=0", "--set", "ce_on=both")
    assert_equal(base_values(augmented), base_values(neutral))
    assert not torch.equal(base_values(plain)["head.weight"], base_values(neutral)["head.weight"])


def test_with_weight_foogd_is_not_its_base_method(run):
    plain, aligned = run("plain"), run("aligned", "fedavg+foogd")
    assert not torch.equal(base_values(plain)["head.weight"], base_values(aligned)["head.weight"])


def test_a_frozen_start_stays_as_it_was_while_the_score_network_learns(run):
    start = run("start", "fedavg", "--seed", "1")
    frozen = run("frozen", "fedavg+foogd", "--init", "start", "--set", "train_base=false")
    assert_equal(base_values(start), base_values(frozen))
    short = run("short", "fedavg+foogd", "--init", "start", "--set", "train_base=false", "--set", "rounds=1")
    score = [{name: value for name, value in load_values(f).items() if "score." in name} for f in (frozen, short)]
    assert any(not torch.equal(score[0][name], score[1][name]) for name in score[0])
    trained = run("trained", "fedavg+foogd", "--init", "start")
    assert not torch.equal(base_values(start)["head.weight"], base_values(trained)["head.weight"])


def test_a_detector_without_a_ranking_is_named(foogd, run):
    Path("nan.py").write_text(
        "def nothing(output):\n    return output.z.sum(1) * float('nan')\n"
        "def gaps(output):\n    s = -output.logits.amax(1)\n    s[::4] = float('nan')\n    return s\n"
    )
    words = ["run", "tiny.toml", "--method", "fedavg", "--out", "a", "--set", "detectors=msp,nan.py:nothing"]
    code, printed, _ = foogd(*words)
    folder = Path("a")
    assert code == 0
    sentence = (
        "Detector nan.py:nothing has no rows: 23 of its 23 scores for synthetic are NaN, and some for 1 other set."
    )
    assert sentence in (folder / "summary.md").read_text()
    assert sentence in printed
    assert {row.detector for row in read_rows(folder)} == {None, "msp"}
    code, printed, _ = foogd("evaluate", "a", "--detector", "nan.py:gaps", "--detector", "energy")
    assert code == 0
    assert re.search(r"Detector nan.py:gaps has no rows: \d+ of its 23 scores for synthetic are NaN", printed)
    assert printed.count("has no rows") == 1
    assert "Detector nan.py:nothing has no rows: some of its scores are NaN." in (folder / "summary.md").read_text()
    assert "has no rows" not in (run("b", "fedavg") / "summary.md").read_text()  # score_norm does not apply there


def test_a_start_brings_the_private_heads_along(run):
    start = run("start", "fedrod", "--seed", "1")
    frozen = run("frozen", "fedrod+foogd", "--init", "start", "--seed", "1", "--set", "train_base=false")
    heads = [load_private_values(folder) for folder in (start, frozen)]
    assert len(heads[0]) == 3
    for one, two in zip(*heads, strict=True):
        assert_equal(one, two)
    assert any(bool((values["personal_head.weight"] != 0).any()) for values in heads[0])
    accuracy = [
        {row.client: row.value for row in read_rows(folder) if (row.metric, row.split) == ("accuracy", "in")}
        for folder in (start, frozen)
    ]
    assert accuracy[0] == accuracy[1]
    assert load_private_values(run("plain", "fedavg")) == []


def test_numbers_of_the_anchored_variant_bear_its_name_and_rows_the_method_s(foogd):
    name = "fedavg+foogd (anchored, not in the paper)"
    small = ["--set", "profile=anchored", "--set", "rounds=1", "--set", "clients=2"]
    code, printed, _ = foogd("run", "tiny.toml", "--method", "fedavg+foogd", "--out", "a", *small)
    assert code == 0
    rounds, tables = printed.split("\n", 1)
    assert rounds.startswith(f"{name} seed 0: round 1/1")
    summary = Path("a/summary.md").read_text()
    assert summary.startswith(f"# {name}, seed 0\n")
    lines = [line for line in summary.splitlines() if line.startswith("| fedavg")]
    assert lines
    assert all(line.startswith(f"| {name} |") for line in lines)
    for text in (tables, foogd("evaluate", "a")[1]):  # on the screen what is in brackets stands in a second line
        lines = [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│")]
        assert len(lines) > 4
        assert lines == [*name.replace(" (", "|(").split("|")] * (len(lines) // 2)
    assert {row.method for row in read_rows(Path("a"))} == {"fedavg+foogd"}
    code, printed, _ = foogd("evaluate", "a", "--set", "out=digits", "--out", "b")
    assert (code, "│ (anchored, not in the paper) │" in printed) == (0, True)


def test_the_demo_s_tables_name_the_anchored_variant_and_no_other_method(foogd):
    words = ["--preset", "tiny.toml", "--methods", "fedavg,fedavg+foogd", "--workers", "1", "--out", "d"]
    Path("tiny.toml").write_text(f'{TINY}profile = "anchored"\n')
    assert foogd("demo", *words, "--set", "rounds=1")[0] == 0
    lines = [line for line in Path("d/table.md").read_text().splitlines() if line.startswith("| fedavg")]
    assert {line.split(" | ")[0] for line in lines} == {"| fedavg", "| fedavg+foogd (anchored, not in the paper)"}


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_runs_end_to_end(run, profile):
    folder = run("a", "fedavg+foogd", "--set", f"profile={profile}")
    rows = read_rows(folder)
    assert {row.detector for row in rows} == {None, "msp", "energy", "score_norm", "score_span_all"}
    assert all(row.value == row.value for row in rows)
    assert all(not json.loads(line)["refused"] for line in (folder / "rounds.jsonl").read_text().splitlines())


def test_the_embedded_data_with_everything_on(foogd):
    # One of 60 clients trains, so that it is quick.
    words = ["clients=60", "participation=0.02", "rounds=1", "corruptions=contrast", "severities=1,5", "score_width=16"]
    settings = [part for word in words for part in ("--set", word)]
    code, printed, _ = foogd("run", "demo", "--method", "fedrod+foogd", *settings, "--out", "a")
    assert code == 0
    assert "ACC-IN-C" in printed
    found = {(row.dataset, row.split, row.corruption, row.severity) for row in read_rows(Path("a"))}
    assert found == {
        ("fashion", "in", None, None), ("fashion-c", "in-c", "contrast", 1), ("fashion-c", "in-c", "contrast", 5),
        ("fashion_out", "out", None, None), ("digits", "out", None, None),
    }  # fmt: skip


def test_the_folder_has_a_default(foogd):
    assert foogd("run", "tiny.toml", "--method", "fedavg", "--seed", "4", "--set", "rounds=1")[0] == 0
    assert Path("runs/fedavg-4/rows.jsonl").is_file()


def test_resume_starts_what_a_kill_left_no_folder_of(run):
    assert (run("b", "fedavg", "--resume") / "rows.jsonl").read_bytes() == (run("a") / "rows.jsonl").read_bytes()


# Evaluation


def test_more_detectors_add_rows_and_keep_the_others(finished, foogd):
    before = read_rows(finished)
    code, printed, _ = foogd("evaluate", "a", "--detector", "ash", "--detector", "max_logit")
    assert code == 0
    assert "ASH" in printed
    rows = read_rows(finished)
    assert len(rows) == len(set(rows))
    assert set(before) < set(rows)
    assert {row.detector for row in set(rows) - set(before)} == {"ash", "max_logit"}
    assert "max logit" in (finished / "summary.md").read_text()


def test_a_time_limit_ends_with_a_whole_round_and_the_run_goes_on(foogd, monkeypatch):
    words = ("run", "tiny.toml", "--method", "fedrod", "--set", "rounds=3")
    assert foogd(*words, "--out", "whole")[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr("foogd.cli.progress.time.perf_counter", itertools.count().__next__)  # a second a look
        code, printed, _ = foogd(*words, "--out", "parts", "--seconds", "1")
    assert code == 0
    assert "foogd run parts/config.toml --out parts --resume" in " ".join(printed.split())
    assert not (Path("parts") / "summary.md").exists()
    assert foogd("run", "parts/config.toml", "--out", "parts", "--resume")[0] == 0
    assert read_rows(Path("parts")) == read_rows(Path("whole"))


def test_evaluating_again_changes_no_number(finished, foogd):
    before = read_rows(finished)
    assert foogd("evaluate", "a")[0] == 0
    assert sorted(map(str, read_rows(finished))) == sorted(map(str, before))


def test_an_evaluation_says_how_far_it_is(finished, foogd, monkeypatch):
    _, quiet, _ = foogd("evaluate", "a")
    assert "images evaluated" not in quiet  # it took no time worth a word
    settings = finished / "config.toml"
    settings.write_text(re.sub(r"eval_batch = \d+", "eval_batch = 16", settings.read_text()))
    monkeypatch.setattr("foogd.cli.progress.SILENCE", 0.0)
    monkeypatch.setattr("foogd.cli.time.perf_counter", itertools.count().__next__)  # a second from batch to batch
    _, printed, _ = foogd("evaluate", "a")
    told = re.findall(r"fedavg\+foogd seed 0: (\d+) of (\d+) images evaluated;(?: about (\d+) s left)?", printed)
    assert len(told) > 2
    seen, total, left = (tuple(map(int, values)) for values in zip(*told[1:], strict=True))
    assert len(set(total)) == 1
    assert list(seen) == sorted(set(seen))
    assert seen[-1] == total[-1]
    assert left[0] > 0
    assert left[-1] == 0


# Users' own files


def test_a_method_from_a_file(run, foogd):
    folder = run("a", "mine.py:Mine", "--set", "smoothing=0.1")
    assert not torch.equal(base_values(folder)["head.weight"], base_values(run("b"))["head.weight"])
    assert_equal(base_values(run("c", "mine.py:Mine")), base_values(Path("b")))
    assert {row.method for row in read_rows(folder)} == {"mine.py:Mine"}
    assert foogd("evaluate", "a", "--detector", "ash")[0] == 0
    assert "score_norm" in {row.detector for row in read_rows(run("d", "mine.py:Mine+foogd"))}


def test_a_backbone_from_a_file(run):
    folder = run("a", "fedavg+foogd", "--backbone", "mine.py:flat")
    assert load_values(folder)["head.weight"].shape[1] == 12
    again = run("b", "fedavg+foogd", "--backbone", "mine.py:flat")
    assert (folder / "rows.jsonl").read_bytes() == (again / "rows.jsonl").read_bytes()


def test_a_detector_from_a_file(run, foogd):
    folder = run("a", "fedavg", "--set", "detectors=msp,mine.py:width")
    assert {row.detector for row in read_rows(folder)} == {None, "msp", "mine.py:width"}
    run("b")
    assert foogd("evaluate", "b", "--detector", "mine.py:width")[0] == 0
    values = [[row.value for row in read_rows(Path(f)) if row.detector == "mine.py:width"] for f in ("a", "b")]
    assert values[0] == values[1]


def test_data_from_a_file_given_by_name(foogd):
    settings = ["--set", "out=mine.py:outside", "--set", "corruptions=[]", "--set", "clients=2", "--set", "rounds=1"]
    assert foogd("run", "demo", "--method", "fedavg", "--data", "mine.py:inside", *settings, "--out", "a")[0] == 0
    assert {row.dataset for row in read_rows(Path("a"))} == {"synthetic", "synthetic-out"}


# The demo


def demo(foogd, out, *words):
    code, printed, complaint = foogd("demo", "--preset", "tiny.toml", "--out", out, *words)
    assert (code, complaint) == (0, "")
    return printed


def test_the_demo_prints_one_table_keeps_what_is_finished_and_does_not_depend_on_the_workers(foogd, run):
    words = ["--methods", "fedavg,fedavg+foogd", "--seeds", "2", "--workers"]
    printed = demo(foogd, "two", *words, "2")
    for word in ("fedavg+foogd", "AUROC", "±", "4 runs", "round 2/2"):
        assert word in printed
    folders = ["fedavg+foogd-0", "fedavg+foogd-1", "fedavg-0", "fedavg-1"]
    assert sorted(path.name for path in Path("two").iterdir()) == [*folders, "table.md"]
    assert "fedavg+foogd" in Path("two/table.md").read_text()

    before = contents(Path("two"))
    shutil.rmtree("two/fedavg-1")
    again = demo(foogd, "two", *words, "1")
    assert again.count("round 2/2") == 1, "finished runs are not trained again"
    after = contents(Path("two"))
    assert before.keys() == after.keys()
    assert not [path for path in before if before[path] != after[path] and path.name == "rows.jsonl"]
    assert not [path for path in before if before[path] != after[path] and path.parts[1] != "fedavg-1"]

    alone = run("alone", "fedavg+foogd", "--seed", "1")
    assert (alone / "rows.jsonl").read_bytes() == Path("two/fedavg+foogd-1/rows.jsonl").read_bytes()


def test_the_demo_says_how_far_evaluations_are(foogd, monkeypatch):
    monkeypatch.setattr("foogd.cli.progress.SILENCE", 0.0)
    printed = demo(foogd, "told", "--methods", "fedavg", "--workers", "1")
    assert re.search(r"fedavg seed 0: (\d+) of \1 images evaluated", printed)


# Help and lists


@pytest.mark.parametrize("command", ["run", "evaluate", "demo", "methods", "detectors", "settings"])
def test_help_says_what_a_command_does_and_shows_an_example(foogd, command):
    code, printed, _ = foogd(command, "--help")
    assert "\\" not in printed  # meant for a screen that reads marks
    assert code == 0
    assert f"Example: foogd {command}" in " ".join(printed.split())


def test_without_words_the_commands_are_shown(foogd):
    code, printed, _ = foogd()
    assert code == 0
    for command in ("run", "evaluate", "demo", "methods", "detectors"):
        assert command in printed


def test_help_lists_every_command_in_the_order_in_which_people_need_them(foogd):
    _, printed, _ = foogd("--help")
    listed = printed.partition("Commands:")[2].splitlines()
    assert tuple(line.split()[0] for line in listed if re.match(r"  \w", line)) == ORDER
    assert "detects what nobody trained on" in " ".join(printed.split())


def test_the_version_is_told_with_those_that_decide_a_result(foogd, monkeypatch):
    monkeypatch.setattr("foogd.runs.environment.source_commit", lambda: "0123")
    said = f"foogd {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    assert foogd("--version") == (0, f"{said}, commit 0123\n", "")
    monkeypatch.setattr("foogd.runs.environment.source_commit", lambda: None)  # installed without its repository
    assert foogd("--version") == (0, f"{said}\n", "")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__


def test_names_alone_are_for_scripts(foogd):
    code, printed, _ = foogd("methods", "--names")
    assert (code, printed.split()) == (0, method_names())
    code, printed, _ = foogd("detectors", "--names")
    assert (code, printed.split()) == (0, list(DETECTORS))


def test_lists_name_everything(foogd):
    code, printed, _ = foogd("methods")
    assert code == 0
    [ours] = [line for line in printed.splitlines() if line.startswith("fedavg+foogd (anchored, not")]
    assert "ours, after Liao et al." in ours
    assert "sums over each class's" in printed
    for name in (*method_names(), "lambda_a", "prior_smoothing", "profile", "profile=anchored", "NeurIPS 2024"):
        assert name in printed
    code, printed, _ = foogd("detectors")
    assert code == 0
    for name, detector in DETECTORS.items():
        assert name in printed
        assert detector.paper in printed


def test_every_setting_of_a_run_is_listed_once_with_what_it_may_be(foogd):
    code, printed, _ = foogd("settings")
    assert code == 0
    first = [line.split()[0] for line in printed.splitlines() if line.strip()]
    for item in fields(Config):
        assert first.count(item.name) == 1
        for choice in item.metadata.get("choices", ()):
            assert repr(choice) in printed
    for name in (*BACKBONES, *CORRUPTIONS, *PROFILES, "foogd methods"):
        assert name in printed


def test_settings_are_listed_by_name_those_of_methods_too(foogd):
    code, printed, _ = foogd("settings", "lr", "profile", "lambda_m", "views", "whiten")
    assert code == 0
    first = [line.split()[0] for line in printed.splitlines() if line.strip()]
    assert {"Training", "lr", "lambda_m", "profile", "views"} <= set(first)
    assert not {"momentum", "lambda_a", "Clients"} & set(first)
    assert "Of +foogd" in printed
    assert "'published', 'anchored'" in printed
    of_anchored = printed.partition("Of +foogd with profile=anchored")[2]
    assert "whiten" in of_anchored
    assert "whiten" not in printed.removesuffix(of_anchored)


def test_defaults_are_listed_as_a_file_takes_them():
    lines = [line for lines in run_groups().values() for line in lines]
    lines += [line for line in method_groups()["Of +foogd"] if line.name != "profile"]
    given = tomllib.loads("\n".join(f"{line.name} = {line.default}" for line in lines))
    assert resolve({}, given) == resolve({}, {})


def test_a_setting_that_is_not_known_is_guessed_in_a_short_sentence(refused):
    assert refused("settings", "rounds", "lamda_m") == (
        "foogd: setting 'lamda_m' is not known (did you mean 'lambda_m'?): foogd settings lists those of a run, "
        "foogd methods those of methods"
    )


# Bad input

TRY = ("run", "tiny.toml", "--out", "x", "--method", "fedavg")
FOOGD = (*TRY[:-1], "fedavg+foogd")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        # commands and options
        (["fly"], ["fly"]),
        (["compare", "none", "none"], ["none is not a run folder: it does not exist"]),
        (["figures", ".", "--out", "tiny.toml"], ["tiny.toml cannot be a folder: tiny.toml is a file"]),
        (["report", ".", "--out", "folder.toml", "--format", "md"], ["folder.toml cannot be written: it is a folder"]),
        (["flower", "init", "tiny.toml"], ["tiny.toml cannot be a folder: tiny.toml is a file", "another folder"]),
        (["flower", "split", "tiny.toml", "--out", "mine.py"], ["mine.py cannot be a folder: mine.py is a file"]),
        (["run"], ["preset"]),
        (["evaluate"], ["run_dir"]),
        ([*TRY, "--colour", "red"], ["--colour"]),
        ([*TRY, "--seed"], ["--seed"]),
        ([*TRY, "too", "many"], ["too"]),
        # presets
        (["run", "dmo"], ["'dmo'", "demo", ".toml"]),
        (["run", "none.toml"], ["none.toml", "demo"]),
        (["run", "mine.py"], ["'mine.py'", "demo"]),
        (["run", "broken.toml"], ["broken.toml is not TOML", "line 2"]),
        (["run", "binary.toml"], ["binary.toml is not TOML"]),
        (["run", "table.toml"], ["[fogd]", "[foogd]"]),
        (["run", "folder.toml"], ["folder.toml is not a file"]),
        # methods
        (["run", "tiny.toml", "--method", "fedfoo"], ["'fedfoo'", "file.py:Class", "any of them takes +foogd"]),
        (["run", "tiny.toml", "--method", "fedavg+fogd"], ["'fedavg+fogd'", "fedavg+foogd"]),
        ([*TRY, "--method", "none.py:Mine"], ["none.py", "does not exist"]),
        ([*TRY, "--method", "broken.py:Mine"], ["broken.py", "SyntaxError"]),
        ([*TRY, "--method", "raises.py:Mine"], ["raises.py", "ZeroDivisionError"]),
        ([*TRY, "--method", "mine.py:Yours"], ["'Yours'", "mine.py", "Mine"]),
        ([*TRY, "--method", "mine.py:NoMethod"], ["mine.py:NoMethod is a class, but", "foogd.Method"]),
        ([*TRY, "--method", "mine.py:number"], ["mine.py:number is a int, but", "foogd.Method"]),
        ([*TRY, "--method", "mine.py:inside"], ["mine.py:inside is a function, but", "foogd.Method"]),
        ([*TRY, "--method", "mine.py:Mine+aug"], ["mine.py:Mine+aug", "views"]),
        ([*TRY, "--method", "~nobody_of_that_name/m.py:Mine"], ["~nobody_of_that_name/m.py", "does not exist"]),
        # keys and values
        ([*TRY, "--set", "round=3"], ["'round'", "did you mean 'rounds'?"]),
        ([*TRY, "--set", "lambda_a=0.1"], ["'lambda_a'", "fedavg"]),
        ([*TRY, "--set", "rounds"], ["'rounds'", "key=value"]),
        ([*TRY, "--set", "rounds=many"], ["rounds = 'many'", "a whole number at least 1"]),
        ([*TRY, "--set", "rounds=1.5"], ["rounds = 1.5", "a whole number at least 1"]),
        ([*TRY, "--set", "rounds=0"], ["rounds = 0", "a whole number at least 1"]),
        ([*TRY, "--set", "lr=-1"], ["lr = -1", "above 0"]),
        ([*TRY, "--set", "flip=1"], ["flip = 1", "true or false"]),
        ([*TRY, "--set", "severities=[6]"], ["severities = [6]", "at most 5"]),
        ([*TRY, "--set", "partition=iid"], ["'iid'", "'dirichlet'"]),
        ([*TRY, "--seed", "-1"], ["seed = -1", "at least 0"]),
        ([*TRY, "--seed", "first"], ["seed = 'first'", "a whole number"]),
        ([*TRY, "--device", "gpu"], ["'gpu'", "'cuda'"]),
        ([*TRY, "--device", "cuda"], ["'cuda'", "no GPU", "cpu"]),
        ([*TRY, "--set", "profile=anchored"], ["profile", "fedavg", "+foogd"]),
        ([*FOOGD, "--set", "profile=fast"], ["'fast'", "'published', 'anchored'"]),
        ([*FOOGD, "--set", "profile=fixed"], ["'published', 'anchored'", "'fixed' is called 'anchored' now"]),
        ([*FOOGD, "--set", "profile=paper"], ["'published', 'anchored'", "'paper' is gone"]),
        ([*FOOGD, "--set", "profile=released"], ["'published', 'anchored'", "'released' is gone"]),
        ([*FOOGD, "--set", "whiten=0.1"], ["whiten", "profile = 'anchored'"]),
        ([*FOOGD, "--set", "profile=published", "--set", "score_net=anchored"], ["score_net", "profile = 'anchored'"]),
        ([*FOOGD, "--set", "score_net=mlp"], ["score_net = 'mlp'", "not possible any more"]),
        ([*FOOGD, "--set", "profile=anchored", "--set", "ksd_log=false"], ["ksd_log = False", "not possible any more"]),
        ([*FOOGD, "--set", "weighting=batches"], ["weighting = 'batches'", "not possible any more"]),
        ([*FOOGD, "--set", "score_width=1000000000000000"], ["not enough memory"]),
        # data, corruptions, detectors, backbones
        ([*TRY, "--data", "mnist"], ["'mnist'", "fashion"]),
        ([*TRY, "--data", "mine.py:nothing"], ["mine.py:nothing", "ImageStore"]),
        ([*TRY, "--data", "mine.py:number"], ["mine.py:number", "ImageStore"]),
        ([*TRY, "--set", "out=svhm"], ["'svhm'", "digits"]),
        ([*TRY, "--set", "out=digits,digits"], ["digits"]),
        ([*TRY, "--set", "corruptions=fog_of_war"], ["'fog_of_war'", "brightness"]),
        ([*TRY, "--set", "detectors=mps"], ["'mps'", "msp"]),
        ([*TRY, "--set", "detectors=mine.py:number"], ["mine.py:number", "function"]),
        ([*TRY, "--set", "detectors=mine.py:Mine"], ["mine.py:Mine", "Detector"]),
        ([*TRY, "--backbone", "vgg"], ["vgg", "cnn"]),
        ([*TRY, "--backbone", "mine.py:number"], ["mine.py:number", "function"]),
        ([*TRY, "--backbone", "mine.py:image_shaped"], ["mine.py:image_shaped", "(2, d)"]),
        ([*TRY, "--backbone", "mine.py:nothing"], ["mine.py:nothing", "Module"]),
        ([*TRY, "--set", "aggregation=meen"], ["aggregation = 'meen'", "median"]),
        ([*TRY, "--set", "aggregation=mean,score=median"], ["'score'", "this method has model"]),
        # clients
        ([*TRY, "--set", "clients=1000"], ["1000", "clients"]),
        ([*TRY, "--set", "clients=45"], ["45", "clients"]),
        ([*TRY, "--set", "clients=0"], ["clients is 0", "at least 1"]),
        ([*TRY, "--set", "clients=-1"], ["clients = -1", "at least 0"]),
        ([*TRY, "--set", "partition=pathological", "--set", "classes_per_client=9"], ["classes_per_client", "9"]),
        ([*TRY, "--set", "partition=by_domain"], ["domain"]),
        # folders
        ([*TRY, "--init", "none"], ["none", "not a run folder"]),
        ([*TRY, "--init", "folder.toml"], ["folder.toml", "config.toml"]),
        (["run", "tiny.toml", "--out", "tiny.toml"], ["tiny.toml", "is a file", "--out"]),
        (["run", "tiny.toml", "--out", "tiny.toml", "--resume"], ["tiny.toml", "file"]),
        (["run", "tiny.toml", "--out", "tiny.toml/x"], ["tiny.toml"]),
        (["run", "tiny.toml", "--out", "folder.toml"], ["folder.toml", "choose another --out"]),
        (["run", "tiny.toml", "--out", "folder.toml", "--resume"], ["folder.toml", "config.toml"]),
        (["evaluate", "none"], ["none", "does not exist"]),
        (["evaluate", "folder.toml"], ["folder.toml", "config.toml"]),
        (["evaluate", "tiny.toml"], ["tiny.toml", "file"]),
        # the demo
        (["demo", "--methods", "fedavg,fedfoo"], ["'fedfoo'", "fedrod"]),
        (["demo", "--methods", " , "], ["--methods", "fedrod"]),
        (["demo", "--seeds", "0"], ["--seeds", "'0'", "at least 1"]),
        (["demo", "--workers", "-1"], ["--workers", "'-1'", "at least 0"]),
        (["demo", "--workers", "two"], ["--workers", "'two'", "a whole number"]),
        (["demo", "--preset", "dmo"], ["'dmo'", "demo"]),
        (["demo", "--preset", "tiny.toml", "--set", "alpha=0"], ["alpha = 0", "above 0"]),
        (["demo", "--preset", "tiny.toml", "--out", "tiny.toml"], ["tiny.toml"]),
    ],
)
def test_bad_input_ends_in_one_sentence(refused, monkeypatch, words, found):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Path("broken.toml").write_text('method = "fedavg"\nrounds = \n')
    Path("binary.toml").write_bytes(b"\xff\xfe\x00")
    Path("table.toml").write_text("[fogd]\nlambda_a = 0.1\n")
    Path("folder.toml").mkdir()
    Path("broken.py").write_text("class Mine(:\n")
    Path("raises.py").write_text("1 / 0\n")
    line = refused(*words)
    for word in found:
        assert word in line or f"'{word.upper()}'" in line  # some versions of typer shout the names of arguments


BROKEN = """
from dataclasses import dataclass

from torch.nn.functional import cross_entropy

from foogd import Method
from foogd.detect import Detector


def loss(nets, batch, **more):
    return cross_entropy(nets["head"](batch.z), batch.y, **more)


@dataclass(frozen=True)
class Silent(Method):
    def losses(self, nets, batch, ctx):
        loss(nets, batch)


@dataclass(frozen=True)
class Misnamed(Method):
    def losses(self, nets, batch, ctx):
        return {"head": loss(nets, batch)}


@dataclass(frozen=True)
class Vector(Method):
    def losses(self, nets, batch, ctx):
        return {"model": loss(nets, batch, reduction="none")}


@dataclass(frozen=True)
class Raising(Method):
    def losses(self, nets, batch, ctx):
        return {"model": nets["hed"](batch.z).mean()}


@dataclass(frozen=True)
class Choosy(Method):
    def __post_init__(self):
        raise ValueError("never")

    def losses(self, nets, batch, ctx):
        return {"model": loss(nets, batch)}


@dataclass(frozen=True)
class Hiding(Method):
    weight: float = 0.5

    def losses(self, nets, batch, ctx):
        return {"model": loss(nets, batch)}


class Bare(Method):
    def losses(self, nets, batch, ctx):
        return {"model": loss(nets, batch)}


class Learning(Detector):
    passes = 1

    def statistics(self, outputs, y, readout):
        return {"sum": outputs.zz.sum(0)}

    def __call__(self, outputs, readout=None):
        return outputs.z.sum(1)


def scores(output):
    return output.zz.sum(1)


def images(root):
    return (root / "none.bin").read_bytes()


def net(shape):
    return shape[7]
"""


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--method", "broken.py:Silent"], ["Silent", "returned nothing", "'model'", "check_method"]),
        (["--method", "broken.py:Silent+foogd"], ["Silent", "returned nothing", "'model'", "check_method"]),
        (["--method", "broken.py:Misnamed"], ["Misnamed", "['head']", "'model'", "check_method"]),
        (["--method", "broken.py:Misnamed+foogd"], ["Misnamed", "['head']", "'model'", "check_method"]),
        (["--method", "broken.py:Vector"], ["Vector", "shape (16,)", "a scalar", "check_method"]),
        (["--method", "broken.py:Raising"], ["broken.py failed in line 35, in losses: KeyError: 'hed'"]),
        (["--method", "broken.py:Choosy"], ["broken.py failed in line 41, in __post_init__: ValueError: never"]),
        (["--method", "broken.py:Hiding"], ["broken.py:Hiding", "'weight'", "Method.weight", "another name"]),
        (["--method", "broken.py:Bare"], ["broken.py:Bare", "no dataclass", "@dataclass(frozen=True)"]),
        (["--data", "broken.py:images"], ["broken.py failed in line 75, in images: FileNotFoundError", "none.bin"]),
        (["--set", "out=broken.py:images"], ["broken.py failed in line 75, in images"]),
        (["--backbone", "broken.py:net"], ["broken.py failed in line 79, in net: IndexError: tuple index"]),
    ],
)
def test_an_error_in_a_file_of_ones_own_ends_in_one_sentence_before_a_folder_is_made(refused, words, found):
    Path("broken.py").write_text(BROKEN)
    line = refused(*TRY, *words)
    for word in found:
        assert word in line


def test_an_error_in_a_detector_of_ones_own_adds_nothing(refused, finished):
    Path("broken.py").write_text(BROKEN)
    assert "broken.py failed in line 71, in scores: AttributeError" in refused(
        "evaluate", "a", "--detector", "ash", "--detector", "broken.py:scores"
    )
    assert "line 64, in statistics: AttributeError" in refused("evaluate", "a", "--detector", "broken.py:Learning")


def test_an_error_of_the_package_is_not_blamed_on_a_file_of_ones_own(foogd, monkeypatch):
    def broken(*_, **__):
        raise AttributeError("ours")

    monkeypatch.setattr("foogd.runs.run.initial_state", broken)
    with pytest.raises(AttributeError, match="ours"):
        foogd(*TRY, "--method", "mine.py:Mine", "--set", "detectors=mine.py:width")


def test_a_command_that_is_misspelt_is_guessed_once(refused):
    assert refused("swep").count("Did you mean 'sweep'?") == 1


def test_a_run_folder_is_no_preset_but_its_configuration_is_one(refused, finished):
    assert "a is a run folder, not a preset: its settings are in a/config.toml" in refused("run", "a", "--out", "b")


def test_a_run_folder_with_the_name_of_a_preset_does_not_hide_it(finished):
    before = read_preset("demo")
    finished.rename("demo")
    assert read_preset("demo") == before


def test_a_report_says_how_many_runs_and_how_large(foogd, finished):
    code, printed, _ = foogd("report", "a", "--out", "r.md")
    assert code == 0
    assert re.search(r"^1 run in r.md \(\d+\.\d KiB\)$", printed, re.MULTILINE)


def test_help_says_where_several_names_are_allowed_and_where_sweeps_go(foogd):
    for words in (("data", "get"), ("data", "verify"), ("flower", "keys")):
        assert "NAME..." in foogd(*words, "--help")[1]
    assert "runs/NAME, or runs/NAME-SCALE" in " ".join(foogd("sweep", "--help")[1].split())


def test_a_run_folder_that_exists_is_not_touched(refused, finished):
    assert "--resume" in refused("run", "tiny.toml", "--method", "fedavg+foogd", "--out", "a")


@pytest.mark.parametrize(
    ("words", "difference"),
    [
        (["--method", "fedavg"], "method is 'fedavg+foogd' there and 'fedavg' here"),
        (["--method", "fedavg+foogd", "--seed", "1"], "seed is 0 there and 1 here"),
        (["--method", "fedavg+foogd", "--set", "rounds=3"], "rounds is 2 there and 3 here"),
        (["--method", "fedavg+foogd", "--set", "sigma=0.2"], "sigma is 0.5 there and 0.2 here"),
    ],
)
def test_resume_with_another_configuration_is_refused(refused, finished, words, difference):
    line = refused("run", "tiny.toml", *words, "--out", "a", "--resume")
    assert "a holds a run with another configuration" in line
    assert difference in line


def test_resume_may_change_the_device_only(foogd, finished):
    words = ["run", "tiny.toml", "--method", "fedavg+foogd", "--out", "a", "--resume"]
    assert foogd(*words, "--device", "auto")[0] == 0


def shorten(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def keep_half_of_the_lines(path):
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: len(lines) // 2]))


@pytest.mark.parametrize(
    ("name", "act", "found"),
    [
        ("checkpoint/round-00002.safetensors", shorten, "round-00002.safetensors is damaged"),
        ("checkpoint/round-00002.safetensors", Path.unlink, "round-00002.safetensors cannot be read"),
        ("checkpoint/state.json", shorten, "state.json cannot be read"),
        ("rows.jsonl", shorten, "rows.jsonl is damaged"),
        ("rounds.jsonl", lambda path: path.write_bytes(path.read_bytes()[:-10]), "rounds.jsonl is damaged"),
        ("rounds.jsonl", keep_half_of_the_lines, "half-written: rounds.jsonl has 1 lines"),
        ("config.toml", lambda path: path.write_text("rounds = "), "config.toml is not TOML"),
        ("config.toml", lambda path: path.write_text('method = "fedfoo"'), "config.toml: method 'fedfoo'"),
        ("config.toml", lambda path: path.write_text("rounds = 0"), "config.toml: rounds = 0"),
        ("config.toml", keep_half_of_the_lines, "config.toml is half-written"),
        ("config.toml", lambda path: path.write_text(""), "config.toml is half-written"),
        ("config.toml", Path.unlink, "it has no config.toml"),
    ],
)
def test_a_damaged_run_folder_is_refused_by_every_command(refused, finished, name, act, found):
    act(finished / name)
    assert found in refused("run", "tiny.toml", "--method", "fedavg+foogd", "--out", "a", "--resume")
    assert found in refused("evaluate", "a", "--detector", "ash")
    if name.startswith("checkpoint"):
        assert found in refused(*FOOGD, "--init", "a")


def test_a_start_with_another_backbone_is_refused(refused, finished):
    assert "backbone" in refused(*TRY, "--init", "a", "--backbone", "wrn16-1")
    assert "backbone" in refused(*TRY, "--init", "a", "--backbone", "mine.py:flat")


def test_a_run_without_a_finished_round_can_be_neither_start_nor_evaluated(refused, finished):
    shutil.rmtree("a/checkpoint")
    for name in ("rows.jsonl", "rounds.jsonl", "summary.md"):
        (finished / name).unlink()
    assert "no finished round" in refused("evaluate", "a")
    assert "no finished round" in refused(*TRY, "--init", "a")


@pytest.mark.parametrize(
    ("detector", "found"),
    [
        ("mps", "'mps'"),
        ("none.py:fn", "none.py"),
        ("mine.py:none", "'none'"),
        ("mine.py:crooked", "shape"),
        ("mine.py:Mine", "mine.py:Mine"),
    ],
)
def test_a_bad_detector_adds_nothing(refused, finished, detector, found):
    assert found in refused("evaluate", "a", "--detector", "ash", "--detector", detector)


def test_a_detector_that_the_method_cannot_serve_is_refused(refused, run):
    run("b")
    line = refused("evaluate", "b", "--detector", "score_norm")
    assert "score_norm" in line
    assert "fedavg" in line


# The real entry point


def real(*words):
    command = [sys.executable, "-m", "foogd", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_as_a_process_gives_the_same_bytes(run):
    done = real("run", "tiny.toml", "--method", "fedrod+foogd", "--out", "process")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Run folder: process" in done.stdout
    inside = run("inside", "fedrod+foogd")
    assert (inside / "rows.jsonl").read_bytes() == Path("process/rows.jsonl").read_bytes()


def test_the_command_as_a_process_refuses_in_one_line():
    done = real("run", "tiny.toml", "--set", "round=3")
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert "did you mean 'rounds'?" in line


def test_a_narrow_screen_cuts_off_no_name_and_no_number():
    numbers = tuple(f"{place + 0.1 * place:.1f} ± {place}.5" for place in range(60, 66))
    rows = [("fedavg+foogd", "score + energy, own features", *numbers)]
    table = Table("a title", ("method", "detector", *(f"AUROC of set_{place}" for place in range(6))), tuple(rows))
    for width in (80, 200):
        console = Console(width=width, file=io.StringIO(), color_system=None)
        console.print(rich_table(table))
        lines = console.file.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        cells = [line.split("│")[1:-1] for line in lines if line.startswith("│")]
        assert all(len(line) == 8 for line in cells)
        columns = [" ".join(cell.strip() for cell in column if cell.strip()) for column in zip(*cells, strict=True)]
        assert columns[0] == "fedavg+foogd"
        assert columns[1].replace(" ", "") == "score+energy,ownfeatures"
        assert columns[2:] == list(numbers)


def test_python_knows_the_package_as_a_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["foogd", "run", "nothing.toml"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("foogd", run_name="__main__")
    assert end.value.code == 2
    assert "nothing.toml" in capsys.readouterr().err


def test_a_detector_that_is_named_twice_is_asked_once(run, foogd):
    folder = run("twice", "fedavg", "--set", "detectors=msp,msp")
    assert Run.open(folder, read_run_config).is_finished()
    assert load(folder).detectors == ["msp"]


def test_a_detector_of_ones_own_that_was_changed_gets_its_threshold_anew(run, foogd):
    folder = run("a", "fedavg", "--set", "calibration=0.3", "--set", "detectors=msp,mine.py:width")
    before = {name: load(folder).threshold(name) for name in ("msp", "mine.py:width")}
    Path("mine.py").write_text(MINE.replace(".std(dim=1).neg()", ".std(dim=1).neg() + 100"))
    assert foogd("evaluate", "a", "--detector", "mine.py:width")[0] == 0
    after = {name: load(folder).threshold(name) for name in before}
    assert after["msp"] == before["msp"]
    assert after["mine.py:width"] == pytest.approx(before["mine.py:width"] + 100)


SURVEYS = """
from dataclasses import dataclass, replace

import torch

from foogd.methods import FedAvg


@dataclass(frozen=True)
class Counting(FedAvg):
    "Its clients are asked before the first step, which needs what they said."

    def survey(self, nets, batch, ctx):
        return {"seen": torch.tensor(float(len(batch.y)))}

    def begin(self, server, answers):
        total = sum((answer.sums["seen"] for answer in answers), torch.zeros(()))
        return replace(server, extra={**server.extra, "total": total})

    def losses(self, nets, batch, ctx):
        assert float(ctx.server["total"]) > 0
        return super().losses(nets, batch, ctx)
"""


def test_a_method_of_ones_own_is_tried_after_its_survey(foogd):
    Path("counting.py").write_text(SURVEYS)
    code, _, complaint = foogd("run", "tiny.toml", "--method", "counting.py:Counting", "--out", "a")
    assert (code, complaint) == (0, "")


def test_two_evaluations_write_one_after_the_other(finished, monkeypatch):
    """The second waits while the first has the folder, and is refused where that takes too long."""
    monkeypatch.setattr("foogd.runs.run.WAIT", 0.2)
    this = Run.open(finished, read_run_config)
    with alone(finished, finished / "environment.json"), pytest.raises(InputError, match="another process works on"):
        this.evaluate(["max_logit"])
    assert "max_logit" not in load(finished).detectors
    this.evaluate(["max_logit"])
    assert "max_logit" in load(finished).detectors
