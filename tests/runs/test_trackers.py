"""Trackers get what the run folder has; whatever they do, training goes on with one line of warning."""

import importlib.util
import shutil
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest

from foogd import Config, FedAvg
from foogd.cli import main
from foogd.core.errors import InputError
from foogd.presets.loader import read_run_config
from foogd.runs.files import read_rounds, read_rows
from foogd.runs.run import Run
from foogd.runs.trackers import TRACKERS, Tracker, allowed_name, check_tracker, tracked
from foogd.tables.results import Report

DATA = """
from foogd.data.synthetic import tiny_federation

def inside(root):
    return tiny_federation(per_client=20, channels=1, size=8).train

def outside(root):
    return tiny_federation(per_client=20, channels=1, size=8).tests[-1].store
"""


def installed(name):
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "data.py").write_text(DATA)
    config = Config(
        method="fedavg", data="data.py:inside", out=("data.py:outside",), corruptions=("contrast",), severities=(1, 3),
        clients=2, rounds=3, batch_size=8, lr=0.05, detectors=("msp",), device="cpu", eval_every=2,
    )  # fmt: skip
    return Run.create(tmp_path / "a+b", config, FedAvg())


class Recorder(Tracker):
    def __init__(self, run):
        self.rounds, self.closed = {}, False
        Recorder.last = self

    def log(self, round, values):
        self.rounds[round] = dict(values)

    def close(self):
        self.closed = True


def use(monkeypatch, make, package="json"):
    monkeypatch.setitem(TRACKERS, "mine", (package, make))


def test_a_tracker_gets_the_numbers_of_the_run_folder(run, monkeypatch):
    use(monkeypatch, Recorder)
    assert [result.round for result in tracked(run, "mine")] == [1, 2, 3]
    found = Recorder.last
    assert found.closed
    lines = read_rounds(run.folder)
    for line in lines:
        values = found.rounds[line["round"]]
        assert values["loss/model"] == line["losses"]["model"]
        assert values["round/bytes_up"] == line["bytes_up"]
    rows = read_rows(run.folder)
    report = Report.of(row for row in rows if row.round == 2)
    values = found.rounds[2]
    assert values["accuracy/in"] == report.values(method="fedavg", metric="accuracy", split="in")[0]
    assert values["accuracy/in-c"] == pytest.approx(report.values(method="fedavg", metric="accuracy", split="in-c")[0])
    [auroc] = report.values(method="fedavg", metric="auroc", split="out", detector="msp")
    assert values["auroc/synthetic-out/msp"] == auroc
    assert not any(name.startswith("accuracy") for name in found.rounds[1])  # not evaluated
    assert any(name.startswith("accuracy") for name in found.rounds[3])


class Crash:
    """Fails in the way that is asked for."""

    def __init__(self, where):
        self.where, self.calls, self.closed = where, 0, 0

    def __call__(self, run):
        if self.where == "start":
            raise OSError("no place")
        return self

    def log(self, round, values):
        self.calls += 1
        if self.where == f"round {round}":
            raise RuntimeError("lost\nthe line")

    def close(self):
        self.closed += 1
        if self.where in ("close", "round 2"):
            raise SystemError("cannot stop")


@pytest.mark.parametrize("where", ["start", "round 1", "round 2", "close"])
def test_a_crash_of_a_tracker_never_stops_training(run, monkeypatch, capsys, where):
    crash = Crash(where)
    use(monkeypatch, crash)
    assert [result.round for result in tracked(run, "mine")] == [1, 2, 3]
    assert run.is_finished()
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1
    assert "warning: mine failed" in warning
    assert crash.calls == {"start": 0, "round 1": 1, "round 2": 2, "close": 3}[where]
    assert crash.closed == (where != "start")  # a failed one too, so that it does not live on in the process


def test_an_error_of_the_run_is_still_an_error_and_the_tracker_is_closed(run, monkeypatch):
    use(monkeypatch, Recorder)
    steps = tracked(run, "mine")
    next(steps)
    steps.close()  # as when the command is stopped
    assert Recorder.last.closed


def test_no_tracker_and_a_finished_run_report_nothing(run, monkeypatch):
    use(monkeypatch, Recorder)
    assert len(list(tracked(run, ""))) == 3
    Recorder.last = None
    assert list(tracked(run, "mine")) == []
    assert Recorder.last is None


def test_names_that_are_not_known_and_packages_that_are_missing_are_said_at_once(monkeypatch, run, capsys):
    check_tracker("")
    with pytest.raises(InputError, match="'pencil' is not known: use tensorboard, wandb, mlflow"):
        check_tracker("pencil")
    use(monkeypatch, Recorder, package="surely_not_installed")
    with pytest.raises(InputError, match="pip install"):
        check_tracker("mine")
    words = ["foogd", "run", "demo", "--tracker", "pencil", "--out", "never"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "'pencil'" in capsys.readouterr().err


@installed("tensorboard")
def test_tensorboard_shows_every_round_once_even_when_a_run_begins_again(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps = tracked(run, "tensorboard")
    assert [next(steps).round, next(steps).round] == [1, 2]
    steps.close()
    shutil.rmtree(run.folder / "checkpoint")  # a run that has lost its state begins again, and so do its curves
    again = Run.open(run.folder, read_run_config)
    assert [result.round for result in tracked(again, "tensorboard")] == [1, 2, 3]
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    found = events.Scalars("loss/model")
    assert [event.step for event in found] == [1, 2, 3]
    wanted = [line["losses"]["model"] for line in read_rounds(run.folder)]
    assert [event.value for event in found] == pytest.approx(wanted, rel=1e-6)
    assert [event.step for event in events.Scalars("accuracy/in")] == [2, 3]
    assert "settings/text_summary" in events.Tags()["tensors"]


@installed("tensorboard")
def test_the_command_has_the_option(run, monkeypatch, capsys):
    words = ["foogd", "run", run.folder / "config.toml", "--tracker", "tensorboard", "--out", "c"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    main()
    assert capsys.readouterr().err == ""
    assert list((run.folder.parent / "c" / "tensorboard").iterdir())


@pytest.fixture
def fake_wandb(monkeypatch):
    """The calls that the module would get."""
    calls = SimpleNamespace(init=None, logged=[], finished=False)

    def init(**words):
        calls.init = words
        return SimpleNamespace(
            log=lambda values, step: calls.logged.append((step, values)),
            finish=lambda: setattr(calls, "finished", True),
        )

    module = ModuleType("wandb")
    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def test_wandb_is_offline_unless_the_environment_says_otherwise(run, fake_wandb, monkeypatch):
    list(tracked(run, "wandb"))
    assert fake_wandb.init["mode"] == "offline"
    assert fake_wandb.init["dir"] == str(run.folder)
    assert fake_wandb.init["reinit"] == "finish_previous"
    assert fake_wandb.init["config"]["alpha"] == run.config.alpha
    assert [step for step, _ in fake_wandb.logged] == [1, 2, 3]
    assert fake_wandb.finished
    monkeypatch.setenv("WANDB_MODE", "online")
    other = Run.create(run.folder.parent / "other", replace(run.config, seed=1), FedAvg())
    next(tracked(other, "wandb"))
    assert fake_wandb.init["mode"] == "online"


@installed("wandb")
def test_the_real_wandb_writes_its_offline_files(run, capsys):
    list(tracked(run, "wandb"))
    assert "warning: wandb failed" not in capsys.readouterr().err
    assert list((run.folder / "wandb").glob("offline-run-*/*.wandb"))


@installed("mlflow")
def test_the_real_mlflow_writes_below_the_run_folder_and_goes_on_with_its_run(run, capsys):
    from mlflow.tracking import MlflowClient

    steps = tracked(run, "mlflow")
    next(steps)
    steps.close()
    list(tracked(Run.open(run.folder, read_run_config), "mlflow"))
    assert "warning: mlflow failed" not in capsys.readouterr().err
    client = MlflowClient(tracking_uri=(run.folder / "mlruns").as_uri())
    number = (run.folder / "mlflow-run.txt").read_text().strip()
    history = client.get_metric_history(number, "loss/model")
    assert [metric.step for metric in history] == [1, 2, 3]
    found = client.get_run(number)
    assert found.data.params["method"] == "fedavg"
    assert found.info.status == "FINISHED"


@pytest.fixture
def fake_mlflow(monkeypatch):
    calls = SimpleNamespace(place=None, runs=[], metrics=[], ended=[])

    class Client:
        def __init__(self, tracking_uri):
            calls.place = tracking_uri

        def get_experiment_by_name(self, name):
            return SimpleNamespace(experiment_id="7") if calls.runs else None

        def create_experiment(self, name):
            return "7"

        def create_run(self, experiment, run_name):
            calls.runs.append((experiment, run_name))
            return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

        def log_param(self, run, key, value):
            assert isinstance(value, str)

        def log_metric(self, run, key, value, step):
            calls.metrics.append((run, key, step))

        def set_terminated(self, run):
            calls.ended.append(run)

    tracking = ModuleType("mlflow.tracking")
    tracking.MlflowClient = Client
    monkeypatch.setitem(sys.modules, "mlflow", ModuleType("mlflow"))
    monkeypatch.setitem(sys.modules, "mlflow.tracking", tracking)
    return calls


def test_mlflow_is_local_unless_the_environment_says_otherwise_and_one_run_stays_one(run, fake_mlflow, monkeypatch):
    steps = tracked(run, "mlflow")
    next(steps)
    steps.close()
    assert fake_mlflow.place == (run.folder / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    list(tracked(Run.open(run.folder, read_run_config), "mlflow"))
    assert fake_mlflow.place == "http://127.0.0.1:5000"
    assert fake_mlflow.runs == [("7", "a+b")]
    assert [step for _, key, step in fake_mlflow.metrics if key == "loss/model"] == [1, 2, 3]
    assert allowed_name("auroc/svhn (sample of 30)/msp") == "auroc/svhn _sample of 30_/msp"
