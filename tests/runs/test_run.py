"""Run folders survive: kill -9 at any moment, a full disk, damaged files, readers while a run trains."""

import errno
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from foogd.cli import main, read_run_config
from foogd.core.errors import InputError
from foogd.presets.loader import parse_toml, resolve
from foogd.runs.checkpoint import load_checkpoint, load_values, read_checkpoint_state
from foogd.runs.files import read_rounds, read_rows, write_atomic
from foogd.runs.run import Run

DATA = """
from foogd.data.synthetic import tiny_federation

def inside(root):
    return tiny_federation(per_client=40, channels=1).train

def outside(root):
    return tiny_federation(per_client=40, channels=1).tests[-1].store
"""

PRESET = """
data = "tiny.py:inside"
out = ["tiny.py:outside"]
corruptions = ["gaussian_noise"]
severities = [3]
clients = 3
participation = 0.67
keep_momentum = true
rounds = 9
eval_every = 2
batch_size = 16
lr = 0.05
device = "cpu"
[foogd]
score_width = 16
"""

COMMAND = (sys.executable, "-m", "foogd", "run", "tiny.toml", "--method", "fedrod+foogd")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working folder with a small data set and a preset."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.py").write_text(DATA)
    Path("tiny.toml").write_text(PRESET)
    return tmp_path


def make(folder, **overrides):
    """A new run in this process; 3 rounds, evaluated after 2 and 3."""
    preset = parse_toml(PRESET.encode(), "preset")
    config, method = resolve(preset, {"method": "fedavg+foogd", "rounds": 3, **overrides})
    return Run.create(Path(folder), config, method)


def reopen(folder):
    return Run.open(Path(folder), read_run_config)


def finish(run):
    for _ in run.train():
        pass
    return run


def test_a_run_that_has_diverged_stops_and_says_so():
    """Each round whose updates are all refused leaves the model as it was, so more of them change nothing."""
    run = make("diverged", lr=1e30, rounds=9)
    with pytest.raises(InputError, match=r"no update could be used in rounds \d to \d \(client \d: .*smaller lr"):
        finish(run)
    assert len(read_rounds(run.folder)) < 9


def test_a_run_without_any_usable_update_is_no_success():
    """Too few rounds to stop early: the end says so, nothing is tested, and --resume says it again."""
    run = make("lost", lr=1e30, rounds=2)
    sentence = r"lost: no update could be used in any of the 2 rounds \(client \d: .*smaller lr"
    training = run.train()
    assert [next(training).round, next(training).round] == [1, 2]
    with pytest.raises(InputError, match=sentence):
        next(training)
    assert len(read_rounds(run.folder)) == 2
    assert not read_rows(run.folder)
    assert not run.is_finished()
    assert not (run.folder / "summary.md").exists()
    with pytest.raises(InputError, match=sentence):
        finish(reopen("lost"))


@pytest.mark.parametrize(
    ("bound", "advice"),
    [
        (1e-9, "or another update_bound than 1e-09: 'auto' refuses what would spoil the model for all"),
        ("auto", "or another update_bound$"),
    ],
)
def test_who_refuses_every_update_is_told_of_the_bound_too(bound, advice):
    run = make("a", update_bound=bound, rounds=2, lr=0.05 if bound != "auto" else 1e30)
    with pytest.raises(InputError, match=f"nothing was learnt: use a smaller lr where training diverges, {advice}"):
        finish(run)


METHOD = """
from dataclasses import dataclass
from foogd import FedAvg, Method

@dataclass(frozen=True)
class Mine(Method):
    def losses(self, nets, batch, ctx):
        return FedAvg().losses(nets, batch, ctx)
"""
NET = """
from torch import nn

def flat(shape):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.ReLU())
"""
PLUGINS = {"method": "mine.py:Mine", "backbone": "net.py:flat", "detectors": ("msp", "scores.py:norm")}


@pytest.fixture
def with_plugins():
    Path("mine.py").write_text(METHOD)
    Path("net.py").write_text(NET)
    Path("scores.py").write_text("def norm(output):\n    return -output.z.norm(dim=1)\n")


def edit(name):
    path = Path(name)
    path.write_text(path.read_text() + "\n# changed\n")


@pytest.mark.parametrize(("name", "use"), [("mine.py", "method"), ("net.py", "backbone"), ("tiny.py", "data")])
def test_a_run_does_not_go_on_with_other_code(with_plugins, name, use):
    run = stop_after(make("a", **PLUGINS), 1)
    edit(name)
    before = contents(run.folder)
    with pytest.raises(InputError, match=f"a: {name}, the file of the {use}, is not the one .*put it back, or begin"):
        finish(reopen("a"))
    assert contents(run.folder) == before
    reopen("a").evaluate()  # what is there can still be looked at
    path = run.folder / "environment.json"
    about = json.loads(path.read_text())
    assert about.pop("plugins")[use]["file"] == name
    path.write_text(json.dumps(about))  # as of a run of before this was written down
    assert finish(reopen("a")).is_finished()
    edit(name)
    assert finish(reopen("a")).is_finished()  # nothing is left to do


def test_code_may_change_before_the_first_round_and_detectors_at_any_time(with_plugins):
    make("a", **PLUGINS)
    edit("mine.py")
    stop_after(reopen("a"), 1)
    edit("scores.py")
    stop_after(reopen("a"), 1)
    edit("mine.py")
    with pytest.raises(InputError, match="the file of the method"):
        finish(reopen("a"))


def write_shares(*rows):
    Path("shares.json").write_text(json.dumps([[share] * 5 for share in rows]))


def test_a_run_keeps_the_shares_that_it_began_with():
    write_shares(0.2, 0.3, 0.5)
    given = {"proportions": "shares.json", "method": "fedavg", "detectors": ("msp",)}
    run = stop_after(make("a", **given), 1)
    kept = Path("shares.json").read_bytes()
    assert (run.folder / "proportions.json").read_bytes() == kept
    write_shares(0.3, 0.2, 0.5)
    before = contents(run.folder)
    for act in (finish, lambda one: one.evaluate()):
        with pytest.raises(InputError, match="a: clients do not have the images that they began"):
            act(reopen("a"))
    assert contents(run.folder) == before
    Path("shares.json").write_bytes(kept)
    finish(reopen("a"))
    assert_same_run("a", finish(make("b", **given)).folder)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("proportions=shares.json", "clients=2"), "3 lists of 5; 2 lists, one a client, of 5 shares"),
        (("proportions=shares.json", "partition=pathological"), "is for partition 'dirichlet'"),
        (("proportions=lost.json",), "No such file or directory: 'lost.json'"),
        (("proportions=tiny.py",), "nor a JSON file that can be read"),
        (("proportions=empty.json",), "leave a client with 0 images; min_size is 2"),
        (("split_seed=-1",), "split_seed = -1 is not allowed: it must be 'auto' or a whole number at least 0"),
    ],
)
def test_a_split_that_cannot_be_made_is_told_before_training(capsys, monkeypatch, given, words):
    write_shares(0, 0.5, 0.5)
    Path("shares.json").rename("empty.json")
    write_shares(0.2, 0.3, 0.5)
    settings = [word for text in given for word in ("--set", text)]
    monkeypatch.setattr("sys.argv", ["foogd", "run", "tiny.toml", "--method", "fedavg", *settings, "--out", "a"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not Path("a").exists()


def test_a_folder_from_before_the_split_had_a_seed_goes_on():
    run = stop_after(make("a", seed=4), 1)
    path = run.folder / "config.toml"
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True)
                            if not line.startswith(("split_seed", "proportions"))))  # fmt: skip
    assert_same_run(finish(reopen("a")).folder, finish(make("b", seed=4)).folder)


def stop_after(run, rounds):
    """Train so many rounds and leave the rest."""
    training = run.train()
    for _ in range(rounds):
        next(training)
    training.close()
    return run


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_same_run(one, other):
    """Equal rows byte for byte, equal rounds but for the seconds, equal checkpoints, and no drafts left."""
    one, other = Path(one), Path(other)
    assert (one / "rows.jsonl").read_bytes() == (other / "rows.jsonl").read_bytes()
    lines = [[{k: v for k, v in line.items() if k != "seconds"} for line in read_rounds(f)] for f in (one, other)]
    assert lines[0] == lines[1]
    (tensors, round), (others, other_round) = load_checkpoint(one), load_checkpoint(other)
    assert round == other_round == len(lines[0])
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name
    assert contents(one).keys() == contents(other).keys()
    assert not [name for name in contents(one) if Path(name).name.startswith(".")]


# Kill and resume


def listen():
    """Tests that were started in the background ignore Ctrl-C, and what they start would too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start(*words):
    return subprocess.Popen(
        [*COMMAND, *words], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        preexec_fn=listen,
    )  # fmt: skip


def changed(path):
    """A condition: the file has another content than now."""
    before = path.read_bytes() if path.is_file() else None

    def happened():
        return (path.read_bytes() if path.is_file() else None) != before

    return happened


def later(happened, seconds):
    """A condition: so many seconds have passed since that one came true."""
    end = float("inf")

    def passed():
        nonlocal end
        if end == float("inf") and happened():
            end = time.monotonic() + seconds
        return time.monotonic() >= end

    return passed


def kill_when(process, happened):
    """Kill the process group as soon as a condition holds; whether the process was still at work then."""
    while process.poll() is None and not happened():
        time.sleep(0.0005)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stderr.close()
    return process.returncode == -signal.SIGKILL


def test_a_run_that_is_killed_again_and_again_ends_as_if_it_had_not_been():
    with start("--out", "straight") as process:  # meanwhile a reader looks at the checkpoint all the time
        seen = []
        while process.poll() is None:
            saved = load_checkpoint(Path("straight"))
            if saved is not None:
                assert "server.shared" in saved[0]
                seen.append(saved[1])
            time.sleep(0.002)
        assert process.returncode == 0, process.stderr.read()
    assert seen == sorted(seen)
    assert len(set(seen)) > 3, "the reader was to see the checkpoints of several rounds"

    folder = Path("killed")
    within_a_round = random.Random(0).random() * min(line["seconds"] for line in read_rounds(Path("straight")))
    moments = [
        lambda: folder.is_dir,
        lambda: lambda: any(folder.glob("checkpoint/.round*")),
        lambda: changed(folder / "checkpoint" / "state.json"),
        lambda: changed(folder / "rows.jsonl"),
        lambda: later(changed(folder / "checkpoint" / "state.json"), within_a_round),
    ]
    kills = sum(kill_when(start("--out", "killed", "--resume"), moment()) for moment in moments)
    assert kills >= 4
    assert 0 < len(read_rounds(folder)) < 9
    done = subprocess.run([*COMMAND, "--out", "killed", "--resume"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert_same_run("straight", "killed")
    assert len(read_rounds(folder)) == 9


def test_ctrl_c_ends_in_one_sentence_and_keeps_what_is_finished():
    with start("--out", "a", "--set", "rounds=1000") as process:
        happened = changed(Path("a/checkpoint/state.json"))
        while process.poll() is None and not happened():
            time.sleep(0.001)
        os.killpg(process.pid, signal.SIGINT)
        [line] = process.stderr.read().splitlines()
    assert process.returncode == 130
    assert "--resume" in line
    assert load_checkpoint(Path("a"))[1] >= 1


class Killed(BaseException):
    """The end of the process, as far as the code can tell."""


def dying(monkeypatch, at, *, before):
    """Let the process end just before or just after its n-th file, with a draft lying about."""
    written = []

    def write(path, data):
        written.append(path)
        if len(written) == at and before:
            path.parent.mkdir(exist_ok=True)
            path.with_name(f".{path.name}.1.draft").write_bytes(data[: len(data) // 2])
            raise Killed
        write_atomic(path, data)
        if len(written) == at:
            raise Killed

    for module in [module for name, module in sys.modules.items() if name.startswith("foogd.runs")]:
        if hasattr(module, "write_atomic"):
            monkeypatch.setattr(module, "write_atomic", write)
    return written


def test_death_before_or_after_any_file_of_a_run_changes_nothing(monkeypatch):
    make("straight")
    with monkeypatch.context() as patch:
        written = dying(patch, 0, before=True)
        finish(reopen("straight"))
    names = [path.name for path in written]
    assert len([name for name in names if name == "rows.jsonl"]) == 2
    assert names[-1] == "summary.md"
    make("fresh")
    for at in range(1, len(names) + 1):
        for before in (True, False):
            folder = f"{at}-{before}"
            shutil.copytree("fresh", folder)
            with monkeypatch.context() as patch:
                dying(patch, at, before=before)
                with pytest.raises(Killed):
                    finish(reopen(folder))
            finish(reopen(folder))
            assert_same_run("straight", folder)
            shutil.rmtree(folder)


def test_a_run_stopped_after_any_round_goes_on_bit_for_bit():
    finish(make("straight", method="fedrod+foogd", rounds=4))
    for rounds in (1, 2, 3):
        stop_after(make(f"stopped-{rounds}", method="fedrod+foogd", rounds=4), rounds)
        assert reopen(f"stopped-{rounds}").finished_rounds() == rounds
        finish(reopen(f"stopped-{rounds}"))
        assert_same_run("straight", f"stopped-{rounds}")


def test_resume_of_a_finished_run_does_nothing(monkeypatch, capsys):
    words = ["foogd", "run", "tiny.toml", "--method", "fedavg", "--set", "rounds=2", "--out", "a"]
    monkeypatch.setattr(sys, "argv", words)
    main()
    before, times = contents(Path("a")), {path: path.stat().st_mtime_ns for path in Path("a").rglob("*")}
    monkeypatch.setattr(sys, "argv", [*words, "--resume"])
    main()
    assert "ACC-IN" in capsys.readouterr().out
    assert contents(Path("a")) == before
    assert {path: path.stat().st_mtime_ns for path in Path("a").rglob("*")} == times


def test_the_start_run_is_not_needed_any_more_once_a_round_is_finished():
    finish(make("start", rounds=1))
    stop_after(make("next", init="start"), 1)
    shutil.copytree("next", "straight")
    finish(reopen("straight"))
    shutil.rmtree("start")
    finish(reopen("next"))
    assert_same_run("straight", "next")


def test_rows_of_an_evaluation_during_training_are_kept():
    training = make("a").train()
    next(training)
    next(training)
    reopen("a").evaluate(["ash"])
    for _ in training:
        pass
    found = {(row.round, row.detector) for row in read_rows(Path("a"))}
    assert (2, "ash") in found
    assert {(2, "msp"), (2, None), (3, "msp"), (3, "score_norm")} <= found


def test_an_evaluation_between_death_and_resume_does_not_hide_what_is_missing(monkeypatch):
    run = make("a", eval_every=0)
    with monkeypatch.context() as patch:
        dying(patch, 11, before=False)  # the last checkpoint is there, its rows are not
        with pytest.raises(Killed):
            finish(run)
    assert run.finished_rounds() == 3
    reopen("a").evaluate(["ash"])
    assert not reopen("a").is_finished()
    finish(reopen("a"))
    asked = {row.detector for row in read_rows(Path("a"))}
    assert asked == {None, "ash", "msp", "energy", "score_norm", "score_span_all"}
    finish(make("b", eval_every=0))
    rows = [row for row in read_rows(Path("a")) if row.detector != "ash"]
    assert sorted(map(str, rows)) == sorted(map(str, read_rows(Path("b"))))


def test_one_process_at_a_time_trains_a_run_and_a_stopped_one_lets_go():
    training = make("a").train()
    next(training)
    before = contents(Path("a"))
    with pytest.raises(InputError, match="another process works on a: "):
        finish(reopen("a"))
    words = (*COMMAND[:-1], "fedavg+foogd", "--set", "rounds=3", "--out", "a", "--resume")
    answer = subprocess.run(words, capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    assert "another process works on a" in answer.stderr
    assert answer.stderr.count("\n") == 1
    assert contents(Path("a")) == before
    training.close()
    finish(reopen("a"))
    finish(make("b"))
    assert_same_run("a", "b")


# Checkpoints


def test_a_checkpoint_is_safetensors_and_json_and_the_last_two_are_kept():
    training, names = make("a").train(), [f"round-{round:05d}.safetensors" for round in (1, 2, 3)]
    for round in (1, 2, 3):
        next(training)
        kept = sorted(path.name for path in Path("a/checkpoint").iterdir())
        assert kept == [*names[max(0, round - 2) : round], "state.json"]
    about = json.loads(Path("a/checkpoint/state.json").read_text())
    assert about["round"] == 3
    for one, name in ((about, names[2]), (about["before"], names[1])):
        data = Path("a/checkpoint", name).read_bytes()
        assert (one["file"], one["sha256"]) == (name, hashlib.sha256(data).hexdigest())
        assert "server.shared" in json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def test_a_run_can_be_taken_back_one_round_by_hand():
    finish(make("straight", eval_every=1))
    shutil.copytree("straight", "a")
    rewrite(Path("a/checkpoint/state.json"), lambda content: content.update(content["before"]))
    assert load_checkpoint(Path("a"))[1] == reopen("a").finished_rounds() == 2
    finish(reopen("a"))
    assert_same_run("straight", "a")


def test_a_folder_from_before_two_checkpoints_were_kept_goes_on():
    finish(make("straight"))
    stop_after(make("a"), 2)
    rewrite(Path("a/checkpoint/state.json"), lambda content: content.pop("before"))
    Path("a/checkpoint/round-00001.safetensors").unlink()
    finish(reopen("a"))
    assert_same_run("straight", "a")


def test_a_reader_that_is_overtaken_by_the_run_gets_the_newer_checkpoint(monkeypatch):
    training = make("a").train()
    next(training)
    old = read_checkpoint_state(Path("a/checkpoint/state.json"))
    next(training)
    next(training)
    answers = [old]  # what the reader saw just before the run replaced it
    read = read_checkpoint_state
    monkeypatch.setattr(
        "foogd.runs.checkpoint.read_checkpoint_state", lambda path: answers.pop() if answers else read(path)
    )
    assert load_checkpoint(Path("a"))[1] == 3
    assert not answers
    training.close()


def test_values_of_a_checkpoint_have_their_names_and_shapes():
    run = finish(make("a"))
    values = load_values(Path("a"))
    expected = {name: value.shape for name, value in run.engine.nets().state_dict().items()}
    assert {name: value.shape for name, value in values.items()} == expected
    assert any(name.endswith("num_batches_tracked") for name in values)


def rewrite(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


TENSORS, STATE = Path("checkpoint/round-00002.safetensors"), Path("checkpoint/state.json")
DAMAGES = {
    "tensors cut": (TENSORS, cut),
    "tensors empty": (TENSORS, lambda path: path.write_bytes(b"")),
    "one bit flipped": (TENSORS, flip),
    "tensors gone": (TENSORS, Path.unlink),
    "tensors are a folder": (TENSORS, lambda path: (path.unlink(), path.mkdir())),
    "state cut": (STATE, cut),
    "state empty": (STATE, lambda path: path.write_bytes(b"")),
    "state not text": (STATE, lambda path: path.write_bytes(b"\xff\xfe\x00")),
    "state is a list": (STATE, lambda path: path.write_text("[]")),
    "state without round": (STATE, lambda path: rewrite(path, lambda c: c.pop("round"))),
    "round is text": (STATE, lambda path: rewrite(path, lambda c: c.update(round="2"))),
    "round is another": (STATE, lambda path: rewrite(path, lambda c: c.update(round=1))),
    "round is true": (STATE, lambda path: rewrite(path, lambda c: c.update(round=True))),
    "file elsewhere": (STATE, lambda path: rewrite(path, lambda c: c.update(file="../config.toml"))),
    "before is text": (STATE, lambda path: rewrite(path, lambda c: c.update(before="round 1"))),
    "before lies elsewhere": (STATE, lambda path: rewrite(path, lambda c: c["before"].update(file="../x"))),
    "no checksum": (STATE, lambda path: rewrite(path, lambda c: c.pop("sha256"))),
    "no layout": (STATE, lambda path: rewrite(path, lambda c: c.pop("layout"))),
    "layout of another form": (STATE, lambda path: rewrite(path, lambda c: c.update(layout=[["a", 0]]))),
}


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run of 3 rounds that was stopped after 2, to be copied."""
    folder = tmp_path_factory.mktemp("interrupted")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("tiny.py").write_text(DATA)
        stop_after(make("a"), 2)
    return folder / "a"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_nothing_is_touched(interrupted, damage):
    shutil.copytree(interrupted, "a")
    path, act = DAMAGES[damage]
    act(Path("a") / path)
    before = contents(Path("a"))
    for attempt in (
        lambda: load_checkpoint(Path("a")),
        lambda: load_values(Path("a")),
        lambda: finish(reopen("a")),
        lambda: reopen("a").evaluate(["msp"]),
    ):
        with pytest.raises(InputError) as caught:
            attempt()
        assert path.name in str(caught.value)
        assert "\n" not in str(caught.value)
    assert contents(Path("a")) == before


def test_a_checkpoint_of_another_net_is_refused(interrupted):
    shutil.copytree(interrupted, "a")
    config = Path("a/config.toml")
    config.write_text(config.read_text().replace("score_width = 16", "score_width = 17"))
    with pytest.raises(InputError, match="server row"):
        finish(reopen("a"))


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("rows.jsonl", cut),
        ("rows.jsonl", lambda path: path.write_bytes(b"\xff")),
        ("rows.jsonl", lambda path: path.write_text("{}\n")),
        ("rows.jsonl", lambda path: path.write_text("[1]\n")),
        ("rows.jsonl", lambda path: path.write_text("null\n")),
        ("rows.jsonl", lambda path: path.write_text(path.read_text().replace('"value": ', '"value": "x", "was": ', 1))),
        ("rounds.jsonl", cut),
        ("rounds.jsonl", lambda path: path.write_text("{}\n{}\n")),
        ("rounds.jsonl", lambda path: path.write_text("".join(reversed(path.read_text().splitlines(True))))),
        ("rounds.jsonl", Path.unlink),
    ],
)
def test_damaged_lines_are_refused_and_nothing_is_touched(interrupted, name, act):
    shutil.copytree(interrupted, "a")
    act(Path("a") / name)
    before = contents(Path("a"))
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        finish(reopen("a"))
    assert contents(Path("a")) == before


def test_rows_that_should_be_there_are_missed():
    stop_after(make("a", rounds=4, eval_every=1), 3)
    lines = Path("a/rows.jsonl").read_text().splitlines(keepends=True)
    Path("a/rows.jsonl").write_text("".join(line for line in lines if '"round": 2,' not in line))
    with pytest.raises(InputError, match=r"rows\.jsonl has no row of round 2"):
        finish(reopen("a"))


# Writing


def test_a_file_is_replaced_as_a_whole(here):
    write_atomic(here / "new" / "a.txt", b"one")
    write_atomic(here / "new" / "a.txt", b"two")
    assert (here / "new" / "a.txt").read_bytes() == b"two"
    assert [path.name for path in (here / "new").iterdir()] == ["a.txt"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt(), Killed()])
def test_a_write_that_fails_leaves_the_old_content_and_no_draft(here, monkeypatch, error):
    write_atomic(here / "w" / "a.txt", b"old")

    def fail(handle):
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(type(error)) as caught:
        write_atomic(here / "w" / "a.txt", b"new")
    if isinstance(error, OSError):
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == str(here / "w" / "a.txt")
    assert contents(here / "w") == {"a.txt": b"old"}


def test_a_full_disk_ends_in_one_sentence_and_the_run_goes_on_when_there_is_room(monkeypatch, capsys):
    finish(make("straight"))
    make("a")
    config = contents(Path("a"))
    calls = []

    def fsync(handle):
        calls.append(handle)
        if len(calls) > 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    words = ["foogd", "run", "a/config.toml", "--out", "a", "--resume"]
    monkeypatch.setattr(sys, "argv", words)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(SystemExit) as caught:
            main()
    assert caught.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "checkpoint/round-00002.safetensors" in line
    assert os.strerror(errno.ENOSPC) in line
    assert config.items() <= contents(Path("a")).items()
    assert load_checkpoint(Path("a"))[1] == 1
    main()
    assert_same_run("straight", "a")


def test_a_real_process_that_may_write_no_more_ends_in_one_sentence():
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))  # smaller than a checkpoint

    done = subprocess.run(
        [*COMMAND, "--out", "a"], capture_output=True, text=True, check=False, preexec_fn=limit, timeout=120
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "a/checkpoint/round-00001.safetensors" in line
    assert os.strerror(errno.EFBIG) in line
    written = ["config.toml", "environment.json", "partition.json", "partition.png", "rounds.jsonl"]
    assert sorted(contents(Path("a"))) == written
