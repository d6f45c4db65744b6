"""What a newcomer gets wrong first: it is refused, or said on the screen, and never a table of 100 %."""

import json
from pathlib import Path

import pytest
from PIL import Image

PRESET = """
data = "photos"
out = ["strange"]
corruptions = ["brightness"]
severities = [3]
clients = 2
rounds = 2
batch_size = 4
device = "cpu"
min_size = 0
detectors = ["msp", "energy"]
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Photos of two classes, and some of something else."""
    monkeypatch.chdir(tmp_path)
    Path("my.toml").write_text(PRESET)
    for folder, shade in (("photos/cat", 0), ("photos/dog", 100), ("strange", 200)):
        Path(folder).mkdir(parents=True)
        for number in range(12):
            Image.new("L", (8, 8), shade + number).save(f"{folder}/{number}.png")
    return tmp_path


def run(foogd, *words, method="fedavg", out="a"):
    return foogd("run", "my.toml", "--method", method, *words, "--out", out)


def test_images_of_one_class_are_refused(foogd):
    code, _, err = run(foogd, "--set", "data=strange")
    assert (code, Path("a").exists()) == (2, False)
    assert "strange has images of one class (all); at least two are needed, as FOLDER/CLASS/image" in err
    Path("photos/dog").rename("dog")
    Path("photos/dog").mkdir()  # an empty folder is no class either
    code, _, err = run(foogd)
    assert (code, "photos has images of one class (cat)" in err) == (2, True)


def test_folders_without_images_are_named_on_the_screen_and_in_the_summary(foogd):
    Path("photos/bird").mkdir()
    code, _, err = run(foogd)
    assert code == 0
    assert "photos has no images in bird." in err
    assert "photos has no images in bird." in Path("a/summary.md").read_text()


def test_detectors_that_a_method_cannot_serve_are_named_and_where_none_is_left_the_run_is_refused(foogd):
    code, out, _ = run(foogd, "--set", "detectors=msp,score_norm,span")
    sentence = "Detectors left out: score_norm (method fedavg has no score network)."
    assert (code, sentence in out, sentence in Path("a/summary.md").read_text()) == (0, True, True)
    code, _, err = run(foogd, "--set", "detectors=score_norm,score_span", out="b")
    assert (code, Path("b").exists()) == (2, False)
    assert "detectors = ['score_norm', 'score_span'] are not possible: method fedavg has no score network" in err


def test_training_images_in_a_test_set_are_named_on_the_screen(foogd):
    code, out, _ = run(foogd, "--set", "out=photos/cat")
    assert code == 0
    assert "Training images in test sets, by content: " in out
    assert " in cat." in out
    assert "Training images" not in run(foogd, out="b")[1]


def test_an_unfinished_run_says_so_and_the_command_that_is_named_finishes_it(foogd):
    assert run(foogd)[0] == 0
    done = Path("a/rows.jsonl").read_text()
    for part in ("checkpoint/state.json", "rounds.jsonl", "rows.jsonl", "summary.md", "model/model.json"):
        Path("a", part).unlink()  # as a kill in the first round leaves it
    code, _, err = foogd("predict", "a", "photos/cat/0.png")
    assert code == 2
    _, _, command = err.strip().partition("finish the run with foogd ")
    again = "run my.toml --set rounds=3 --out a --resume"
    Path("full").mkdir()
    assert foogd("run", "my.toml", "--out", "full")[2] == "foogd: full exists already: choose another --out\n"
    for words in ("evaluate a", "run my.toml --out a", again):
        code, _, err = foogd(*words.split())
        assert (code, err.strip().endswith(command)) == (2, True)
    assert foogd(*command.split())[0] == 0
    assert Path("a/rows.jsonl").read_text() == done


def test_evaluating_an_unfinished_run_names_its_round(foogd):
    assert run(foogd)[0] == 0
    text = Path("a/config.toml").read_text()
    assert "not finished" not in foogd("evaluate", "a")[1]
    Path("a/config.toml").write_text(text.replace("rounds = 2", "rounds = 5"))
    assert "a is not finished: these are the numbers of round 2 of 5." in foogd("evaluate", "a")[1]


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("photos/cat/0.png", "unknown data set 'photos/cat/0.png'; .*; as a path, it is a file of another kind"),
        ("nowhere", "unknown data set 'nowhere'; .*; as a path, nothing is there, seen from /"),
        ("empty.csv", "empty.csv has no line below its columns; each image needs one"),
    ],
)
def test_a_path_that_cannot_be_read_is_told_from_one_that_is_not_there(foogd, value, sentence):
    import re

    Path("empty.csv").write_text("file,label\n")
    code, _, err = run(foogd, "--set", f"data={value}")
    assert code == 2
    assert re.search(sentence, err)


def test_the_case_of_a_suffix_does_not_matter(foogd):
    lines = [f"photos/{name}/{number}.png,{name}" for name in ("cat", "dog") for number in range(12)]
    Path("TABLE.CSV").write_text("file,label\n" + "\n".join(lines))
    assert run(foogd, "--set", "data=TABLE.CSV")[0] == 0
    assert sum(map(sum, json.loads(Path("a/partition.json").read_text())["counts"])) == 20  # of 24


def test_compare_names_what_it_does_not_show_and_writes_markdown_alone(foogd):
    for name in "ab":
        rate = f"lr=0.0{1 + 'ab'.index(name)}"
        assert run(foogd, "--set", "detectors=msp,ash,span", "--set", rate, out=name)[0] == 0
    code, out, _ = foogd("compare", "a", "b", "--resamples", "10")
    assert (code, "not shown: ash, span (--detector NAME shows one)" in out) == (0, True)
    assert "not shown" not in foogd("compare", "a", "b", "--detector", "ash", "--resamples", "10")[1]
    code, _, err = foogd("compare", "a", "b", "--out", "c.html")
    assert (code, "--out 'c.html' is not possible" in err, Path("c.html").exists()) == (2, True, False)
