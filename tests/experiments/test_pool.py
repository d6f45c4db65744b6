"""Several runs at once: one that fails or is killed does not stop the others, and runs wait for their start."""

import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from foogd import Config, FedAvg
from foogd.cli.sweep import Screen
from foogd.core.errors import InputError
from foogd.experiments.pool import (
    Evaluating,
    Failed,
    Finished,
    Job,
    Progressed,
    Started,
    _failure,
    possible_workers,
    train_all,
    work,
)
from foogd.presets.loader import read_run_config
from foogd.runs.run import Run

DATA = """
import os, signal
from foogd.data.synthetic import tiny_federation

def inside(root):
    return tiny_federation(per_client=20, channels=1, size=8).train

def bad(root):
    raise ValueError("no such luck")

def deadly(root):
    if os.environ.get("FOOGD_TEST_PARENT") != str(os.getpid()):
        os.kill(os.getpid(), signal.SIGKILL)
    return inside(root)

def unlucky(root):
    if os.environ.get("FOOGD_TEST_PARENT") != str(os.getpid()):
        raise MyError(1, 2)
    return inside(root)

def poison(root):
    if os.environ.get("FOOGD_TEST_PARENT") != str(os.getpid()):
        os.environ["FOOGD_TEST_POISONED"] = "1"
        raise MyError(1, 2)
    return inside(root)

def wary(root):
    assert "FOOGD_TEST_POISONED" not in os.environ
    return inside(root)

class MyError(Exception):
    def __init__(self, a, b):
        super().__init__("mine")
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FOOGD_TEST_PARENT", str(os.getpid()))
    (tmp_path / "data.py").write_text(DATA)
    config = Config(
        method="fedavg", data="data.py:inside", out=(), corruptions=(), clients=2, rounds=2, batch_size=8, lr=0.05,
        detectors=("msp",), device="cpu",
    )  # fmt: skip

    def create(name, fn="inside", **settings):
        Run.create(tmp_path / name, replace(config, data=f"data.py:{fn}", **settings), FedAvg())
        return tmp_path / name

    return create


def names(events, kind):
    return [event.folder.name for event in events if isinstance(event, kind)]


def test_a_run_that_fails_and_one_that_is_killed_do_not_stop_the_others(make):
    folders = [make("killed", "deadly"), make("fails", "unlucky"), make("good"), make("also", seed=1)]
    events = list(work([Job(folder) for folder in folders], read_run_config, 1))
    assert names(events, Started) == ["killed", "fails", "good", "also"]
    assert names(events, Finished) == ["good", "also"]
    failed = {event.folder.name: event for event in events if isinstance(event, Failed)}
    assert failed.keys() == {"killed", "fails"}
    assert "killed" in failed["killed"].reason
    assert failed["fails"].reason == "data.py failed in line 18, in unlucky: MyError: mine"
    assert "raise MyError(1, 2)" in failed["fails"].trace
    rounds = [(event.folder.name, event.round) for event in events if isinstance(event, Progressed)]
    assert rounds == [("good", 1), ("good", 2), ("also", 1), ("also", 2)]
    assert all(Run.open(folder, read_run_config).is_finished() for folder in folders[2:])


def test_an_error_that_cannot_be_made_again_in_another_process_is_told_in_words():
    class Odd(Exception):
        def __init__(self, a, b):
            super().__init__("mine")

    failed = _failure(Path("a"), Odd(1, 2))
    assert (failed.reason, failed.error) == ("Odd: mine", None)
    assert "Odd: mine" in failed.trace
    assert _failure(Path("a"), InputError("no")).trace == ""


def test_an_evaluation_tells_how_far_it_is_until_all_images_are_seen(make):
    folders = [make("good", eval_batch=4), make("also", eval_batch=4, seed=1)]
    events = list(work([Job(folder) for folder in folders], read_run_config, 1))
    for folder in folders:
        mine = [event for event in events if event.folder == folder]
        told = [event for event in mine if isinstance(event, Evaluating)]
        assert len({event.total for event in told}) == 1
        assert [event.images for event in told] == sorted({event.images for event in told})
        assert told[0].images < told[-1].images == told[-1].total
        kinds = [type(event) for event in mine]
        # The last round counts as finished when it has been evaluated; the process stays with its run until then.
        assert kinds == [Started, Progressed, *[Evaluating] * len(told), Progressed, Finished]


def test_the_screen_of_a_sweep_shows_evaluations(make, monkeypatch, capsys):
    folder = make("good")
    screen = Screen({folder: read_run_config(folder / "config.toml")})
    monkeypatch.setattr("foogd.cli.sweep.SECONDS", -1.0)
    with screen:
        for event in (Started(folder), Progressed(folder, 1, 0.5, {"base": 2.0}, {}), Evaluating(folder, 30, 120)):
            screen.update(event)
        assert "good: 30 of 120 images evaluated; about" in capsys.readouterr().out
        assert [*screen.table().columns[-1].cells] == ["25%"]
        screen.update(Progressed(folder, 2, 0.5, {"base": 1.0}, {}))
        assert [*screen.table().columns[-1].cells] == ["–"]
        screen.update(Finished(folder))
    assert screen.table().row_count == 0


def test_a_process_in_which_a_run_failed_trains_no_other_run(make):
    jobs = [Job(make("broken", "poison")), Job(make("next", "wary"))]
    events = list(work(jobs, read_run_config, 1))
    assert names(events, Failed) == ["broken"]
    assert names(events, Finished) == ["next"]


def test_a_process_that_dies_with_nothing_to_do_is_replaced(make):
    events = []
    for event in work([Job(make("first")), Job(make("second", seed=1))], read_run_config, 1):
        events.append(event)
        if isinstance(event, Finished) and event.folder.name == "first":
            [process] = multiprocessing.active_children()
            process.kill()
            process.join()
    assert names(events, Failed) == []
    assert names(events, Finished) == ["first", "second"]
    assert multiprocessing.active_children() == []


def test_a_run_waits_for_the_one_that_it_starts_from(make, tmp_path):
    prepared = []

    def prepare(folder):
        if folder.name == "second":
            assert Run.open(tmp_path / "first", read_run_config).is_finished()
            make("second", init=str(tmp_path / "first"))
        prepared.append(folder.name)

    first, slow = make("first"), make("other", seed=3)
    jobs = [Job(tmp_path / "second", after=first), Job(first), Job(slow)]
    events = list(work(jobs, read_run_config, 2, prepare=prepare))
    assert names(events, Failed) == []
    assert set(names(events, Finished)) == {"first", "second", "other"}
    assert prepared.index("second") == 2
    order = [(type(event), event.folder.name) for event in events]
    assert order.index((Finished, "first")) < order.index((Started, "second"))


def test_what_starts_from_a_failed_run_fails_too_and_so_does_what_cannot_be_prepared(make, tmp_path):
    def prepare(folder):
        if folder.name == "bad":
            raise InputError("it is not allowed")

    jobs = [Job(tmp_path / "later", after=tmp_path / "bad"), Job(tmp_path / "bad"), Job(make("good"))]
    events = list(work(jobs, read_run_config, 1, prepare=prepare))
    reasons = {event.folder.name: event.reason for event in events if isinstance(event, Failed)}
    assert reasons["bad"] == "it is not allowed"
    assert "which failed" in reasons["later"]
    assert names(events, Finished) == ["good"]


def test_train_all_ends_with_the_first_failure_and_leaves_no_process(make):
    with pytest.raises(InputError, match="killed"):
        list(train_all([make("killed", "deadly"), make("good")], read_run_config, 1))
    events = train_all([make("more")], read_run_config, 1)
    assert next(events).round == 1
    events.close()  # as after Ctrl-C: the worker is ended


def test_nothing_to_do_is_nothing_done():
    assert list(work([], read_run_config, 2)) == []
    assert list(train_all([], read_run_config, 2)) == []


def test_one_run_at_a_time_on_a_gpu_and_one_a_core_elsewhere(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert possible_workers(0, ["cpu", "cpu"]) == 5
    assert possible_workers(0, ["cpu", "cuda"]) == 1
    assert possible_workers(0, ["auto"]) == 1
    assert possible_workers(3, ["cuda"]) == 3
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert possible_workers(0, ["auto"]) == 5
    assert signal.getsignal(signal.SIGINT) is before  # only workers end without a word
