"""Sweeps: every combination once, settings checked first, resumable, one failed run does not stop the others."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from foogd.core.errors import InputError
from foogd.data.folders import PACS_DOMAINS
from foogd.data.store import ImageStore
from foogd.detectors.registry import DETECTORS
from foogd.evaluation.rows import Row
from foogd.experiments.scales import SCALES, training_time, with_data
from foogd.experiments.sweep import plan, rate_note, read_sweep, sweep_names
from foogd.experiments.sweep_tables import sweep_reports, sweep_tables, tables_text
from foogd.runs.checkpoint import load_values
from foogd.runs.checks import check_together
from foogd.runs.federation import make_federation
from foogd.runs.files import read_rows, write_atomic
from foogd.runs.run import Run
from foogd.tables.grid import Table

METHODS = {
    "fedavg", "fedln", "fedatol", "fedt3a", "fediir", "fedavg+foogd", "fedrod", "foster", "fedthe", "fedicon",
    "fedrod+foogd",
}  # fmt: skip
MINE = """
from foogd.data.synthetic import tiny_federation

def inside(root):
    return tiny_federation(per_client=30, channels=1, size=8).train

def outside(root):
    return tiny_federation(per_client=30, channels=1, size=8).tests[-1].store
"""
PRESET = """
data = "mine.py:inside"
out = ["mine.py:outside"]
corruptions = ["gaussian_noise", "contrast"]
severities = [3]
clients = 2
rounds = 2
batch_size = 16
lr = 0.05
device = "cpu"
detectors = ["msp", "score_norm"]
[foogd]
score_width = 8
"""
SWEEP = """
title = "Mine"
base = "preset.toml"
[grid]
alpha = [0.5, 5.0]
seed = [0, 1]
[[variants]]
name = "plain"
method = "fedavg"
[[variants]]
name = "fixed"
start = "plain"
method = "fedavg+foogd"
train_base = false
grid = { seed = [0] }
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (("mine.py", MINE), ("preset.toml", PRESET), ("sweep.toml", SWEEP)):
        Path(name).write_text(text)
    return tmp_path


def with_its_data(found, out):
    return with_data(found, out, [found.resolved(point, out)[0] for point in found.points])


def read(text):
    Path("other.toml").write_text(text)
    return plan("other", read_sweep("other.toml"))


# The plan


def test_every_combination_is_one_run_and_variants_have_lists_of_their_own():
    found = plan("sweep", read_sweep("sweep.toml"))
    assert [point.name for point in found.points] == [
        *(f"plain-alpha={alpha}-seed={seed}" for alpha in (0.5, 5.0) for seed in (0, 1)),
        *(f"fixed-alpha={alpha}-seed=0" for alpha in (0.5, 5.0)),
    ]
    last = found.points[-1]
    assert (last.label, last.section, last.start) == ("fixed", "alpha = 5.0", "plain-alpha=5.0-seed=0")
    config, method = found.resolved(last, Path("o"))
    assert (config.alpha, config.seed, config.init) == (5.0, 0, "o/runs/plain-alpha=5.0-seed=0")
    assert (method.train_base, method.score_width) == (False, 8)


def test_settings_of_methods_stand_in_tables_and_count_where_the_method_has_them():
    found = read('base = "preset.toml"\n[set.foogd]\nlambda_m = 0.25\n[grid]\nmethod = ["fedavg", "fedrod+foogd"]')
    assert found.resolved(found.points[1], Path())[1].lambda_m == 0.25
    assert found.resolved(found.points[1], Path())[1].score_width == 8  # the table of the preset is kept


def test_overrides_change_every_run_or_replace_a_list():
    found = plan("sweep", read_sweep("sweep.toml"), overrides={"rounds": 7, "seed": 4})
    assert {point.settings["seed"] for point in found.points} == {4}
    assert {found.resolved(point, Path())[0].rounds for point in found.points} == {7}
    with pytest.raises(InputError, match="'plain' sets method"):
        plan("sweep", read_sweep("sweep.toml"), overrides={"method": "fedrod"})


def test_scales_cut_seeds_and_alphas_but_not_what_the_sweep_is_about():
    content = read_sweep("lambda-m")
    for scale, count in (("full", 30), ("small", 10), ("tiny", 3)):
        assert len(plan("lambda-m", content, scale).points) == count
    tiny = plan("lambda-m", content, "tiny")
    config, _ = tiny.resolved(tiny.points[0], Path())
    assert (config.rounds, config.clients, config.backbone) == (1, 3, "cnn")
    assert [point.settings["lambda_m"] for point in tiny.points] == [0.1, 0.5, 1.0]  # its own list
    small = plan("lambda-m", content, "small")
    assert {point.settings["lambda_m"] for point in small.points} == {0.1, 0.2, 0.5, 0.8, 1.0}
    assert plan("lambda-m", content, "tiny", {"clients": 7, "rounds": 1}).base["clients"] == 7


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('base = "preset.toml"\ngird = 1', ["'gird'", "grid"]),
        ("title = 'x'", ["no base"]),
        ('base = "nowhere"', ["'nowhere'", "cifar10"]),
        ("base = 3", ["base = 3", "text"]),
        ('base = "preset.toml"\ntitle = 5', ["title = 5", "text"]),
        ('base = "preset.toml"\nset = 3', ["set = 3", "table"]),
        ('base = "preset.toml"\ngrid = 3', ["grid = 3", "table of lists"]),
        ('base = "preset.toml"\nvariants = "abc"', ["variants = 'abc'", "[[variants]]"]),
        ('base = "preset.toml"\nvariants = [1, 2]', ["variant 1", "[[variants]]"]),
        ('base = "preset.toml"\n[[variants]]\nname = "a"\ngrid = 3', ["variant 'a'", "grid = 3", "table of lists"]),
        ('base = "preset.toml"\n[[variants]]\nname = "a"\nstart = 3', ["variant 'a'", "start = 3"]),
        ('base = "preset.toml"\ntiny = 3', ["tiny = 3", "[tiny.set]"]),
        ('base = "preset.toml"\n[tiny]\nsett = {}', ["[tiny]", "'sett'", "grid, set"]),
        ('base = "preset.toml"\n[small]\nset = 3', ["[small]", "set = 3", "[small.set]"]),
        ('base = "preset.toml"\n[small]\ngrid = 3', ["[small]", "grid = 3", "table of lists"]),
        ('base = "preset.toml"\nsections = 3', ["sections = 3", "list"]),
        ('base = "preset.toml"\nsections = "alpha"', ["sections = 'alpha'", "list"]),
        ('base = "preset.toml"\nsections = ["alhpa"]', ["'alhpa'", "did you mean 'alpha'?"]),
        ('base = "preset.toml"\npaper = 3', ["paper = 3", "text"]),
        ('base = "preset.toml"\nwhere = 3', ["where = 3", "[[where]]"]),
        ('base = "preset.toml"\nwhere = [3]', ["where = 3", "value of a list"]),
        ('base = "preset.toml"\n[grid]\nseed = [1]\n[[where]]\nset = { lr = 1.0 }', ["value of a list"]),
        ('base = "preset.toml"\n[grid]\nseed = [1]\n[[where]]\nseed = 2\nset = { lr = 1.0 }', ["seed = 2", "none of"]),
        (
            'base = "preset.toml"\n[grid]\nseed = [1]\nlr = [0.1]\n[[where]]\nseed = 1\nset = { lr = 1.0 }',
            ["[[where]] that sets lr", "a list"],
        ),
        # settings
        ('base = "preset.toml"\n[set]\nruonds = 3', ["'ruonds'", "did you mean 'rounds'?"]),
        ('base = "preset.toml"\n[set.foogdd]\nlambda_m = 0', ["[foogdd]", "[foogd]"]),
        ('base = "preset.toml"\n[grid]\nsed = [3]', ["'sed'", "did you mean 'seed'?"]),
        ('base = "preset.toml"\n[grid]\nseed = [0, "a"]', ["run run-seed=a", "seed = 'a'"]),
        ('base = "preset.toml"\n[[variants]]\nname = "a"\nnmae = "b"', ["run a:", "'nmae'"]),
        ('base = "preset.toml"\n[grid]\nseed = 3', ["seed = 3", "list"]),
        ('base = "preset.toml"\n[grid]\nseed = []', ["seed = []", "list"]),
        ('base = "preset.toml"\n[grid]\nseed = [0, 0]', ["two runs", "seed=0"]),
        ('base = "preset.toml"\n[[variants]]\nmethod = "fedavg"', ["without a name"]),
        ('base = "preset.toml"\n[[variants]]\nname = "a"\nstart = "b"', ["'b'"]),
        ('base = "preset.toml"\n[[variants]]\nname = "a"\nstart = "a"', ["'a' can begin", "starts from 'a'"]),
        (
            'base = "preset.toml"\n[[variants]]\nname = "a"\nstart = "b"\n[[variants]]\nname = "b"\nstart = "a"',
            ["'a' can begin", "starts from 'b', which starts from 'a'"],
        ),
        ('base = "preset.toml"\n[grid]\nseed=[1]\n[[variants]]\nname = "a"\nseed = 2', ["'a' sets seed"]),
        (
            'base = "preset.toml"\n[grid]\nseed=[1]\n[[variants]]\nname = "a"\ngrid = {seed = [2]}\n'
            '[[variants]]\nname="b"\nstart="a"',
            ["b-seed=1", "a-seed=1", "not in the sweep"],
        ),
    ],
)
def test_a_sweep_that_is_wrong_is_refused_in_one_sentence(foogd, text, words):
    Path("other.toml").write_text(text)
    for more in ([], ["--plan"]):
        code, printed, complaint = foogd("sweep", "other.toml", "--out", "o", *more)
        assert (code, printed) == (2, "")
        assert complaint.count("\n") == 1
        assert all(word in complaint for word in words), complaint
        assert not Path("o").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["none"], ["'none'", "cifar10"]),
        (["none.toml"], ["none.toml"]),
        ([], ["--list"]),
        (["sweep.toml", "--scale", "huge"], ["'huge'", "tiny"]),
        (["sweep.toml", "--workers", "x"], ["--workers", "'x'"]),
        (["sweep.toml", "--set", "rounds=0"], ["plain-alpha=0.5-seed=0", "rounds = 0"]),
        (["sweep.toml", "--set", "data=nothing"], ["'nothing'"]),
        (["sweep.toml", "--set", "seed=[7,8]", "--plan"], ["seed = [7, 8]", "a whole number"]),
        (["many.toml", "--scale", "tiny"], ["clients = 'many'", "a whole number"]),
        (["sweep.toml", "--tracker", "pencil"], ["'pencil'", "tensorboard"]),
    ],
)
def test_an_option_that_is_wrong_is_refused_before_anything_is_made(foogd, options, words):
    Path("many.toml").write_text('base = "preset.toml"\n[set]\nclients = "many"')
    code, _, complaint = foogd("sweep", *options, "--out", "o")
    assert code == 2
    assert all(word in complaint for word in words), complaint
    assert not Path("o").exists()


@pytest.mark.parametrize("scale", ["full", "tiny"])
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("detectors=mspp", ["'mspp'", "msp"]),
        ("detectors=none.py:own", ["none.py", "does not exist in"]),
        ("corruptions=fogg", ["'fogg'", "fog"]),
        ("backbone=nope", ["nope", "cnn"]),
        ("aggregation=meen", ["'meen'", "median"]),
        ("aggregation=mean,score=median", ["'score'", "this method has model"]),
        ("clients=0", ["clients is 0", "at least 1"]),
        ("leave_out=x", ["leave_out = 'x'", "domains"]),
        ("partition=by_domain", ["by_domain", "domains"]),
        ("init=none", ["none", "does not exist"]),
    ],
)
def test_a_setting_that_no_run_can_have_is_refused_before_anything_is_made(foogd, here, scale, setting, words):
    before = sorted(here.rglob("*"))
    words = ["sweep sweep, run plain-alpha=0.5-seed=0: ", *words]
    code, printed, complaint = foogd("sweep", "sweep.toml", "--scale", scale, "--out", "o/p", "--set", setting)
    assert (code, printed) == (2, "")
    assert complaint.count("\n") == 1
    assert all(word in complaint for word in words), complaint
    assert sorted(here.rglob("*")) == before


def test_checks_read_each_data_set_once_and_leave_errors_of_users_code_to_the_runs(here):
    counting = MINE.replace("(root):", "(root):\n    open(f'{root}/asked', 'a').write('x')", 1)
    Path("mine.py").write_text(f"{counting}\ndef broken(root):\n    return 1 / 0\n")
    found = plan("sweep", read_sweep("sweep.toml"), overrides={"data_root": str(here)})
    pairs = [found.resolved(point, Path("o")) for point in found.points if not point.start]
    runs = [Run(Path("o") / str(number), *both) for number, both in enumerate(pairs)]
    check_together(runs)
    assert Path("asked").read_text() == "x"
    check_together([Run(Path("o"), replace(pairs[0][0], data="mine.py:broken"), pairs[0][1])])
    with pytest.raises(InputError, match=r"run 3: .*clients is 0"):
        check_together([*runs[:3], Run(Path("o/3"), replace(pairs[3][0], clients=0), pairs[3][1])])


def test_a_file_in_the_place_of_the_folder_is_named(foogd):
    for options in ([], ["--plan"]):
        code, printed, complaint = foogd("sweep", "sweep.toml", "--out", "sweep.toml", *options)
        assert (code, printed) == (2, "")
        assert "sweep.toml cannot be a folder: sweep.toml is a file" in complaint
    assert Path("sweep.toml").read_text() == SWEEP


# Runs


def test_plug_ins_beside_the_sweep_are_found_from_any_folder(foogd, here, monkeypatch):
    Path("plug").mkdir()
    Path("plug/my.py").write_text(
        "from dataclasses import dataclass\nimport foogd\nfrom foogd import Method\n"
        "@dataclass(frozen=True)\nclass Mine(Method):\n    'Mine.'\n"
        "    def losses(self, nets, batch, ctx):\n"
        "        return {'model': nets['head'](batch.z).square().mean()}\n"
        "def norm(output):\n    return -output.z.norm(dim=1)\n"
    )
    Path("plugged.toml").write_text(
        'base = "preset.toml"\n[set]\nrounds = 1\ndetectors = ["msp", "plug/my.py:norm"]\n'
        '[grid]\nmethod = ["plug/my.py:Mine", "fedavg"]\n'
    )
    words = ("sweep", here / "plugged.toml", "--workers", "1", "--set", f"data_root={here}/data", "--out")
    for scale, out in (("full", here / "o"), ("tiny", here / "t")):
        monkeypatch.chdir(here)
        assert foogd(*words, out, "--scale", scale)[0] == 0
        shutil.rmtree(out / "runs/fedavg")
        Path("elsewhere").mkdir(exist_ok=True)
        monkeypatch.chdir("elsewhere")
        code, printed, complaint = foogd(*words, out, "--scale", scale)
        assert (code, complaint) == (0, "")
        assert "1 of 2 runs are left" in printed
        assert "| plug/my.py:Mine | my.py:norm |" in (out / "table.md").read_text()
    # Runs of an earlier version name plug-ins as the sweep does.
    config = here / "o/runs/plug_my.py_Mine/config.toml"
    config.write_text(config.read_text().replace(f"{here}/", ""))
    assert 'method = "plug/my.py:Mine"' in config.read_text()
    monkeypatch.chdir(here)
    assert foogd(*words, here / "o")[0] == 0


def test_the_screen_shows_some_detectors_where_there_are_many_and_the_file_all(foogd):
    many = ["msp", "energy", "max_logit", "ash", "react", "knn"]
    Path("preset.toml").write_text(PRESET.replace('["msp", "score_norm"]', json.dumps(many)))
    Path("other.toml").write_text('base = "preset.toml"\n[set]\nrounds = 1\n[grid]\nmethod = ["fedavg"]')
    words = ("sweep", "other.toml", "--workers", "1", "--out")
    code, printed, _ = foogd(*words, "o")
    assert code == 0
    assert "MSP" in printed
    assert "KNN" not in printed
    assert "Tables of all detectors: o/table.md" in printed
    assert "| fedavg | KNN |" in Path("o/table.md").read_text()
    # A sweep that chooses its detectors is about them.
    code, printed, _ = foogd(*words, "p", "--set", f"detectors={json.dumps(many)}")
    assert code == 0
    assert "KNN" in printed
    assert "all detectors" not in printed


def test_a_sweep_trains_all_and_goes_on_where_it_was_and_starts_from_what_it_should(foogd):
    words = ("sweep", "sweep.toml", "--out", "o", "--workers", "2", "--set", "alpha=0.5")
    code, printed, complaint = foogd(*words)
    assert (code, complaint) == (0, "")
    assert "[3/3]" in printed
    assert "foogd report o/runs/*" in printed
    plain, fixed = (load_values(Path("o/runs") / f"{name}-alpha=0.5-seed=0") for name in ("plain", "fixed"))
    assert all((plain[name] == value).all() for name, value in fixed.items() if not name.startswith("score"))
    text = Path("o/table.md").read_text()
    assert "| plain | MSP |" in text
    assert "| fixed | score norm |" in text
    assert "| contrast |" in text  # two corruptions: a table of them
    # Again: nothing is trained; what was lost is made again.
    before = {path: path.stat().st_mtime_ns for path in Path("o/runs").rglob("config.toml")}
    rows = read_rows(Path("o/runs/plain-alpha=0.5-seed=1"))
    shutil.rmtree("o/runs/plain-alpha=0.5-seed=1")
    code, printed, _ = foogd(*words)
    assert code == 0
    assert "1 of 3 runs are left" in printed
    assert read_rows(Path("o/runs/plain-alpha=0.5-seed=1")) == rows
    kept = {path: path.stat().st_mtime_ns for path in before if "seed=1" not in str(path)}
    assert all(before[path] == stamp for path, stamp in kept.items())
    code, printed, _ = foogd(*words)
    assert code == 0
    assert "are left" not in printed


def test_a_run_that_fails_is_named_at_the_end_with_exit_code_1_and_the_others_are_in_the_tables(foogd):
    Path("bad.py").write_text(
        "from dataclasses import dataclass\nfrom foogd import Method\n@dataclass(frozen=True)\nclass Bad(Method):\n"
        "    'Fails.'\n    def losses(self, nets, batch, ctx):\n        raise ZeroDivisionError('by nobody')\n"
    )
    Path("other.toml").write_text('base = "preset.toml"\n[grid]\nmethod = ["bad.py:Bad", "fedavg"]')
    words = ("sweep", "other.toml", "--out", "o", "--workers", "1")
    code, printed, _ = foogd(*words)
    assert code == 1
    told = r"bad\.py_Bad: \S*bad\.py failed in line 7, in losses: ZeroDivisionError: by nobody"
    assert re.search(f"failed: {told}", printed)
    text = Path("o/table.md").read_text()
    assert "| fedavg | MSP |" in text
    assert re.search(f"- {told}", text)
    assert "raise ZeroDivisionError" in Path("o/failures.txt").read_text()
    code, printed, _ = foogd(*words)
    assert code == 1
    assert "1 of 2 runs are left" in printed
    # A folder that someone has changed is named too.
    Path("o/runs/fedavg/config.toml").write_text("rounds = 3")
    code, printed, _ = foogd(*words)
    assert code == 1
    assert "failed: fedavg: " in printed


def test_what_starts_from_a_failed_run_is_not_trained_however_far_away_and_a_list_of_failures_does_not_stay(foogd):
    chain = [("last", "middle"), ("middle", "first"), ("first", "")]  # each is listed before the one it starts from
    variants = "".join(
        f'[[variants]]\nname = "{name}"\nmethod = "fedavg"\nlr = {rate}\n' + (f'start = "{start}"\n' if start else "")
        for rate, (name, start) in zip((0.01, 0.02, 0.03), chain, strict=True)
    )
    Path("other.toml").write_text(f'base = "preset.toml"\n{variants}')
    words = ("sweep", "other.toml", "--out", "o", "--workers", "1")
    assert foogd(*words)[0] == 0
    for name in ("last", "middle"):
        shutil.rmtree(f"o/runs/{name}")
    whole = Path("o/runs/first/config.toml").read_text()
    Path("o/runs/first/config.toml").write_text("rounds = 3")
    code, printed, _ = foogd(*words)
    assert code == 1
    assert "failed: middle: it starts from first, which failed" in printed
    assert "failed: last: it starts from middle, which failed" in printed
    assert not Path("o/runs/last").exists()
    Path("o/runs/first/config.toml").write_text(whole)
    assert foogd(*words)[0] == 0
    Path("o/failures.txt").write_text("of a run that was finished by hand since")
    assert foogd(*words)[0] == 0
    assert not Path("o/failures.txt").exists()


def test_another_spelling_of_the_folder_is_the_same_sweep_and_another_setting_stops_before_the_tables(foogd, here):
    words = ("sweep", "sweep.toml", "--workers", "1", "--set", "alpha=0.5", "--set", "seed=0")
    assert foogd(*words, "--out", "o")[0] == 0
    before = Path("o/table.md").read_text()
    assert "| fixed | MSP |" in before
    for spelling in (here / "o", "../" + here.name + "/o"):
        code, printed, _ = foogd(*words, "--out", spelling)
        assert code == 0
        assert "are left" not in printed
    # A folder of an earlier version names the run that it starts from by the path that was given.
    config = Path("o/runs/fixed-alpha=0.5-seed=0/config.toml")
    config.write_text(config.read_text().replace(f'"{here}/o/runs', '"o/runs'))
    assert 'init = "o/runs/plain' in config.read_text()
    assert foogd(*words, "--out", "o")[0] == 0
    assert Path("o/table.md").read_text() == before
    code, _, complaint = foogd(*words, "--out", "o", "--set", "rounds=3")
    assert code == 2
    assert complaint.count("\n") == 1
    assert "rounds is 2 there and 3 here" in complaint
    assert Path("o/table.md").read_text() == before


def test_the_plan_and_the_list(foogd):
    code, printed, _ = foogd("sweep", "sweep.toml", "--plan", "--out", "o")
    assert code == 0
    assert "fixed-alpha=0.5-seed=0, after plain-alpha=0.5-seed=0" in printed
    assert not Path("o").exists()
    code, printed, _ = foogd("sweep", "--list")
    assert code == 0
    assert all(name in printed for name in sweep_names())
    order = re.findall(r"^(Table \d+|Fig\. \d+|–)", printed, flags=re.MULTILINE)
    assert order[:4] == ["Table 1", "Table 2", "Table 3", "Table 4"]  # as in the paper, what is not in it last
    assert order[-1] == "–"


# Data of a scale


def some_images(classes=10, **more):
    labels = torch.arange(60) % classes
    return ImageStore(torch.zeros(60, 32, 32, 3, dtype=torch.uint8), labels, test=torch.arange(60) > 29, **more)


def test_small_scales_take_samples_of_what_is_there_and_tiny_takes_embedded_images_for_what_is_not():
    content = {"base": "demo", "title": "Mine", "set": {"out": ["svhn", "digits", "isun"]}}
    found = with_its_data(plan("other", content, "tiny"), Path("o"))
    assert found.title == (
        "Mine (tiny: data that are not here are replaced, OUT sets svhn, isun by fashion_out and digits)"
    )
    assert "The numbers tell nothing about svhn, isun: " in found.warnings[1]
    config, _ = found.resolved(found.points[0], Path("o"))
    assert config.data == "o/data/fashion.npz"
    assert config.out == ("o/data/fashion_out.npz", "o/data/digits.npz")
    federation = make_federation(config)
    assert federation.name.startswith("fashion (sample of ")
    outs = [test.name for test in federation.tests if test.split == "out"]
    assert outs == [f"{name} (sample of {SCALES['tiny'].out})" for name in ("fashion_out", "digits")]
    assert abs(len(federation.train) - SCALES["tiny"].train) < 10
    # No other scale replaces data.
    with pytest.raises(InputError, match="isun is neither"):
        with_its_data(plan("other", content, "small"), Path("p"))
    full = plan("other", content)
    assert with_its_data(full, Path("q")) is full
    assert full.warnings == []


def test_embedded_images_take_the_place_of_what_is_missing_alone(here):
    some_images().save("data/svhn.npz")
    found = with_its_data(plan("cifar10", read_sweep("cifar10"), "tiny"), Path("o"))
    assert found.missing == ("cifar10", "lsun_c", "lsun_r", "textures", "isun")
    assert found.title == (
        "CIFAR-10, Table 1 (tiny: data that are not here are replaced, cifar10 by embedded images; "
        "OUT sets lsun_c, lsun_r, textures, isun by fashion_out and digits)"
    )
    federation = make_federation(found.resolved(found.points[0], Path("o"))[0])
    names = [federation.name, *(test.name for test in federation.tests if test.split == "out")]
    assert [name.partition(" (")[0] for name in names] == ["fashion", "fashion_out", "digits", "svhn"]
    some_images().save("data/cifar10.npz")
    there = with_its_data(plan("cifar10", read_sweep("cifar10"), "tiny"), Path("p"))
    assert "cifar10 by" not in there.title
    assert there.points[0].settings["data"] == "p/data/cifar10.npz"
    assert ImageStore.load("p/data/cifar10.npz").shape == (3, 32, 32)


@pytest.mark.parametrize("arrived", ["cifar10", "svhn"])
def test_a_sweep_with_embedded_images_is_not_continued_with_the_data_they_stand_for(here, arrived):
    begun = plan("cifar10", read_sweep("cifar10"), "tiny")
    first = with_its_data(begun, Path("o"))
    assert with_its_data(begun, Path("o")) == first
    some_images().save(f"data/{arrived}.npz")
    with pytest.raises(InputError, match=rf"o/data has embedded images in the place of {arrived}, which is in .*data"):
        with_its_data(begun, Path("o"))
    # What was sampled need not stay.
    found = with_its_data(begun, Path("p"))
    Path(f"data/{arrived}.npz").unlink()
    assert with_its_data(begun, Path("p")).points == found.points


def test_each_domain_of_pacs_is_a_look_of_other_embedded_images():
    found = with_its_data(plan("pacs", read_sweep("pacs"), "tiny"), Path("o"))
    assert "pacs by four looks of embedded images; " in found.title
    store = ImageStore.load(found.points[0].settings["data"])
    assert store.domain_names == PACS_DOMAINS
    kinds = {*zip(store.domains.tolist(), store.labels.tolist(), strict=True)}
    assert kinds == {(domain, label) for domain in range(4) for label in range(8)}
    looks = [store.images[store.domains == domain].float() for domain in range(4)]
    # Means and deviations, as of the corruptions whose names stand beside the domains.
    assert looks[2].mean() == max(look.mean() for look in looks)
    assert looks[1].std() == min(look.std() for look in looks)
    for point in found.points:
        config, _ = found.resolved(point, Path("o"))
        federation = make_federation(config)
        assert federation.clients == 3
        (left,) = [test for test in federation.tests if test.unseen]
        assert left.name == config.leave_out
        assert config.leave_out not in federation.client_names


def test_a_sample_is_taken_again_only_for_the_same_folder_of_data(here):
    content = {"base": "preset.toml", "set": {"clients": 2}}
    first = with_its_data(plan("x", content, "tiny", {"data_root": str(here / "one")}), Path("o"))
    stamp = Path("o/data/mine.py_inside.npz").stat().st_mtime_ns
    assert with_its_data(plan("x", content, "tiny", {"data_root": "one"}), Path("o")).points == first.points
    assert Path("o/data/mine.py_inside.npz").stat().st_mtime_ns == stamp
    with pytest.raises(InputError, match=r"has a sample of .* in .*one, and data_root is .*two now"):
        with_its_data(plan("x", content, "tiny", {"data_root": "two"}), Path("o"))
    # Embedded data are the same everywhere.
    for root in ("one", "two"):
        with_its_data(plan("y", {"base": "demo"}, "tiny", {"data_root": root}), Path("p"))


def test_samples_leave_out_what_cannot_be_read_where_the_runs_do(here):
    for name in "ab":
        folder = here / "photos" / name
        folder.mkdir(parents=True)
        for number in range(8):
            Image.new("L", (8, 8), 30 * number).save(folder / f"{number}.png")
    (here / "photos" / "a" / "bad.png").write_text("no image")
    content = {"base": "preset.toml", "set": {"data": "photos", "out": []}}
    with pytest.raises(InputError, match=r"bad\.png cannot be read"):
        with_its_data(plan("x", content, "tiny"), Path("o"))
    content["set"]["on_bad"] = "skip"
    found = with_its_data(plan("x", content, "tiny"), Path("p"))
    assert len(ImageStore.load(Path(found.points[0].settings["data"]))) == 16


def test_the_warnings_stand_above_the_tables():
    found = with_its_data(plan("svhn", {"base": "demo", "set": {"out": ["svhn"]}}, "tiny"), Path("o"))
    text = tables_text(found, [Table("t", ("method", "detector"), (("a", "b"),))], {})
    assert text.startswith("# svhn (tiny: data that are not here are replaced, OUT sets svhn by ")
    assert text.index("tell nothing about svhn") < text.index("| a | b |")


# Tables


def test_tables_keep_sections_and_lines_apart(tmp_path):
    grid = {"method": ["fedavg"], "alpha": [0.1, 5.0], "batch_size": [32, 64], "seed": [0, 1]}
    found = plan("x", {"base": "demo", "grid": grid})
    for number, point in enumerate(found.points):
        rows = [
            Row("r", "fedavg", point.settings["seed"], 2, "weighted", None, "d", split, kind, None, None, "accuracy",
                number / 100, 1.0)
            for split, kind in (("in", None), ("in-c", "fog"), ("in-c", "snow"))
        ]  # fmt: skip
        text = "".join(json.dumps(row.as_dict()) + "\n" for row in rows)
        write_atomic(tmp_path / "runs" / point.name / "rows.jsonl", text.encode())
    tables = sweep_tables(sweep_reports(found, tmp_path))
    assert [table.title.partition(":")[0] for table in tables[:4]] == ["alpha = 0.1"] * 2 + ["alpha = 5.0"] * 2
    assert tables[0].rows == (
        ("fedavg, batch_size=32", "–", "0.5 ± 0.7", "0.5 ± 0.7"),
        ("fedavg, batch_size=64", "–", "2.5 ± 0.7", "2.5 ± 0.7"),
    )
    assert tables[1].columns == ("corruption", "fedavg, batch_size=32", "fedavg, batch_size=64")
    assert tables[1].rows[1] == ("snow", "0.5 ± 0.7", "2.5 ± 0.7")
    assert tables[4].columns == ("method", "alpha = 0.1", "alpha = 5.0", "mean")
    assert tables[4].rows[0] == ("fedavg, batch_size=32", "0.5 ± 0.7", "4.5 ± 0.7", "2.5 ± 0.7")
    lost = [point.name for point in found.points if point.settings["seed"] == 1]
    without = sweep_tables(sweep_reports(found, tmp_path, lost))
    assert without[0].rows[0][2] == "0.0"
    # Seed 0 of one section has no partner in seed 1 of the other.
    lost = [p.name for p in found.points if p.settings["seed"] == (p.settings["alpha"] == 0.1)]
    tables = sweep_tables(sweep_reports(found, tmp_path, lost))
    assert tables[-2].rows[0] == ("fedavg, batch_size=32", "0.0", "5.0", "–")


def test_tables_name_the_anchored_variant_behind_any_label(tmp_path):
    variants = [
        {"name": "FedAvg", "method": "fedavg"},
        {"name": "without SAG, ours", "method": "fedavg+foogd", "lambda_a": 0.0},
        {"name": "printed", "method": "fedavg+foogd", "profile": "published"},
    ]
    found = plan("x", {"base": "demo", "set": {"foogd": {"profile": "anchored"}}, "variants": variants})
    for point in found.points:
        row = Row("r", str(point.settings["method"]), 0, 1, "weighted", None, "d", "in", None, None, None, "accuracy",
                  0.5, 1.0)  # fmt: skip
        write_atomic(tmp_path / "runs" / point.name / "rows.jsonl", json.dumps(row.as_dict()).encode())
    table = sweep_tables(sweep_reports(found, tmp_path))[0]
    assert [row[0] for row in table.rows] == ["FedAvg", "without SAG (anchored, not in the paper), ours", "printed"]


# The paper's experiments


def values(name, key):
    return {point.settings[key] for point in plan(name, read_sweep(name)).points}


def test_the_sweeps_of_the_paper_have_its_values():
    for name in ("cifar10", "cifar100"):
        assert values(name, "method") == METHODS
        assert values(name, "alpha") == values(f"ablation-{name}", "alpha") == {0.1, 0.5, 5.0}
    for name in ("tinyimagenet", "other-out", "corruptions-cifar10", "corruptions-cifar100", "clients"):
        assert values(name, "method") == METHODS
    assert values("lambda-m", "lambda_m") == {0.1, 0.2, 0.5, 0.8, 1.0}
    assert values("lambda-a", "lambda_a") == {0.0, 0.01, 0.05, 0.1, 0.2, 0.5, 0.8}
    assert values("clients", "clients") == {5, 10, 20, 50}
    assert values("pacs", "leave_out") == {"art_painting", "cartoon", "photo", "sketch"}
    for name in sweep_names():
        assert values(name, "seed") == ({0} if name == "figures" else {0, 1, 2})
    assert values("detectors", "method") == {"fedrod", "fedrod+foogd"}
    assert values("figures", "method") >= {"fedatol", "fedavg+foogd", "fedthe", "fedrod+foogd"}


def test_beside_printed_numbers_fedatol_has_a_line_of_its_own_with_the_authors_pooled_data():
    for name in ("cifar10", "cifar100", "other-out", "tinyimagenet", "corruptions-cifar10", "corruptions-cifar100"):
        found = plan(name, read_sweep(name))
        built = {point.label: found.resolved(point, Path("o"))[1] for point in found.points}
        pooled = {label: method.generator for label, method in built.items() if label.startswith("fedatol")}
        assert pooled == {"fedatol": "fed_gan", "fedatol, pools data": "central"}
        assert {label for label, method in built.items() if method.pools_data} == {"fedatol, pools data"}


def test_a_variant_keeps_of_its_own_methods_those_that_are_asked_for():
    def labels(scale="full", **overrides):
        return {point.label for point in plan("other", read_sweep("other.toml"), scale, overrides).points}

    text = """
base = "cifar10"
[grid]
method = ["fedavg", "fedrod"]
[[variants]]
name = ""
[[variants]]
name = "own"
momentum = 0.5
grid = { method = ["fedrod", "fedln"] }
[tiny.grid]
method = ["fedln"]
"""
    read(text)
    assert labels() == {"fedavg", "fedrod", "fedrod, own", "fedln, own"}
    assert labels(method="fedrod") == {"fedrod", "fedrod, own"}
    assert labels(method="fedavg") == {"fedavg"}
    assert labels("tiny") == {"fedln", "fedln, own"}


def test_the_tables_name_the_rate_of_each_alpha_and_the_ablations_start_from_a_run_of_the_same_one():
    for name in ("cifar10", "cifar100", "ablation-cifar10", "ablation-cifar100", "detectors"):
        found = plan(name, read_sweep(name))
        rates = {(point.section, found.resolved(point, Path())[0].lr) for point in found.points}
        assert rates == {
            ("alpha = 0.1, lr = 0.01", 0.01),
            ("alpha = 0.5, lr = 0.1", 0.1),
            ("alpha = 5.0, lr = 0.1", 0.1),
        }
    for name in ("other-out", "clients", "lambda-m", "lambda-a", "corruptions-cifar10", "corruptions-cifar100"):
        assert {"alpha": 0.1, "lr": 0.01}.items() <= read_sweep(name)["set"].items()
    assert read_sweep("figures")["set"].items() >= {"alpha": 5.0, "lr": 0.1}.items()


def test_what_is_set_at_a_value_of_a_list_stands_in_the_run_and_gives_way_to_an_override():
    text = SWEEP.replace("[grid]", "[[where]]\nalpha = 5.0\nset = { lr = 0.02, rounds = 3 }\n[grid]")
    found = read(text)
    settings = [found.resolved(point, Path("o"))[0] for point in found.points]
    assert {(one.alpha, one.lr, one.rounds) for one in settings} == {(0.5, 0.05, 2), (5.0, 0.02, 3)}
    assert {point.label for point in found.points} == {
        "plain", "fixed", "plain, lr=0.02, rounds=3", "fixed, lr=0.02, rounds=3"
    }  # fmt: skip
    assert found.points[-1].start == "plain-lr=0.02-rounds=3-alpha=5.0-seed=0"
    other = plan("other", read_sweep("other.toml"), overrides={"lr": 0.3})
    assert {other.resolved(point, Path("o"))[0].lr for point in other.points} == {0.3}


def test_whoever_sets_alpha_alone_is_told_that_the_rate_stays():
    assert rate_note("cifar10", {"alpha": 5.0}) == (
        "alpha is 5.0 and lr stays 0.01; the tables use 0.1 there: --set lr=0.1"
    )
    assert rate_note("cifar100", {"alpha": 1.0}).endswith("; the tables use 0.01 at 0.1, 0.1 at 0.5, 0.1 at 5.0")
    for preset, named in (
        ("cifar10", {}), ("cifar10", {"alpha": 0.1}), ("cifar10", {"alpha": 5.0, "lr": 0.01}), ("demo", {"alpha": 5.0}),
        ("tinyimagenet", {"alpha": 5.0}), ("mine.toml", {"alpha": 5.0}),
    ):  # fmt: skip
        assert rate_note(preset, named) == ""


@pytest.mark.parametrize(
    "words", [["run", "cifar10", "--set", "alpha=5.0"], ["demo", "--preset", "cifar10", "--set", "alpha=5.0"]]
)
def test_the_commands_tell_it_before_they_train(foogd, words):
    code, _, said = foogd(*words, "--out", "o", "--set", "data_root=nowhere")
    assert code == 2
    assert said.count("alpha is 5.0 and lr stays 0.01; the tables use 0.1 there: --set lr=0.1") == 1


def test_a_sweep_tells_it_once_where_alpha_is_in_its_list(foogd):
    Path("other.toml").write_text('base = "cifar10"\n[grid]\nalpha = [0.1, 5.0]\nseed = [0, 1]')
    code, _, said = foogd("sweep", "other.toml", "--plan")
    assert code == 0
    assert said.count("alpha is 5.0 and lr stays 0.01") == said.count("lr stays") == 1
    _, _, said = foogd("sweep", "cifar10", "--plan", "--set", "alpha=5.0")  # its own table has the rate
    assert "lr stays" not in said


def test_the_time_of_a_sweep_grows_with_its_runs_and_is_not_guessed_where_nothing_was_measured():
    def time(scale="full", **overrides):
        return training_time(plan("cifar10", read_sweep("cifar10"), scale, overrides))

    seconds, where = time(seed=0, alpha=5.0, method="fedavg")
    assert (seconds, where) == (pytest.approx(625), "one GPU like an H200")  # 6.25 s a round, as in results/
    assert time(seed=0, alpha=5.0, method="fedavg", rounds=10)[0] == pytest.approx(seconds / 10)
    assert time(seed=0, alpha=5.0, method="fedavg+foogd")[0] == pytest.approx(2 * seconds)
    assert time()[0] > 99 * seconds
    assert time("small")[1] == "two cores"
    assert time("tiny") is None
    assert time(backbone="resnet18-gn") is None
    assert training_time(plan("demo", read_sweep("demo"))) is None


def test_other_out_sets_detectors_and_corruptions_are_those_of_the_paper():
    def config(name):
        found = plan(name, read_sweep(name))
        return found.resolved(found.points[0], Path())[0]

    assert set(config("other-out").out) == {"isun", "svhn", "lsun_r", "textures"}
    assert "lsun_c" in config("cifar10").out
    assert set(config("detectors").detectors) == set(DETECTORS)
    assert len(config("corruptions-cifar10").corruptions) == 19
    assert len(config("tinyimagenet").corruptions) == 15
    assert config("tinyimagenet").constants == "tiny"
    extra = {"gaussian_blur", "saturate", "spatter", "speckle_noise"}
    assert set(config("corruptions-cifar10").corruptions) - set(config("tinyimagenet").corruptions) == extra


def test_the_ablations_differ_from_the_whole_in_one_setting():
    found = plan("ablation-cifar10", read_sweep("ablation-cifar10"))
    built = {point.label: found.resolved(point, Path("o")) for point in found.points}
    whole = built["FedAvg+FOOGD"][1]
    changed = {
        label: {k: v for k, v in vars(method).items() if v != vars(whole)[k]}
        for label, (_, method) in built.items()
        if label != "FedAvg"
    }
    assert changed == {
        "fixed backbone": {"train_base": False},
        "without SM3D (DSM only)": {"lambda_m": 0.0},
        "MMD only": {"lambda_m": 1.0},
        "without SAG": {"lambda_a": 0.0},
        "FedAvg+FOOGD": {},
    }
    starts = {point.label: point.start for point in found.points if point.start}
    assert starts == {"fixed backbone": "FedAvg-alpha=5.0__lr=0.1-seed=2"}


@pytest.mark.parametrize("name", sweep_names())
def test_the_settings_of_every_run_of_every_sweep_are_known(name):
    for scale in SCALES:
        found = plan(name, read_sweep(name), scale)
        for point in {(str(point.settings.get("method")), point.label): point for point in found.points}.values():
            found.resolved(point, Path("o"))
