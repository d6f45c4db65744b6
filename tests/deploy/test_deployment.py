"""Real processes on this machine: the simulator's weights, and a run that survives its nodes and its server."""

import os
import signal

import pytest
import torch

from foogd import load
from foogd.presets.loader import parse_toml, resolve
from foogd.runs.checkpoint import load_checkpoint
from foogd.runs.files import read_rounds, read_rows
from foogd.runs.run import Run


@pytest.fixture(scope="module")
def simulated(folder):
    """The same run in the simulator."""
    config, method = resolve(parse_toml((folder / "tiny.toml").read_bytes(), "s"), {"method": "fedavg+foogd"})
    run = Run.create(folder / "simulated", config, method)
    for _ in run.train():
        pass
    return folder / "simulated"


def weights(folder):
    tensors, round = load_checkpoint(folder)
    return {name: value for name, value in tensors.items() if name.startswith("server.")}, round


def assert_same_weights(one, other):
    (mine, done), (theirs, wanted) = weights(one), weights(other)
    assert done == wanted
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-6)


def test_three_nodes_and_three_rounds_give_the_simulators_weights(deployment, folder, simulated):
    for number in range(3):
        deployment.node(f"node-{number}", folder / f"shards-3/node-{number}")
    done = deployment.submit(folder / "app", "--set", "run_dir=parity")
    assert done.returncode == 0, done.stdout + done.stderr + deployment.logs()
    assert_same_weights(folder / "parity", simulated)
    assert [line["refused"] for line in read_rounds(folder / "parity")] == [{}, {}, {}]
    keys = ("client", "scope", "dataset", "corruption", "detector", "metric")
    rows = [[row.as_dict() for row in read_rows(place)] for place in (folder / "parity", simulated)]
    mine, theirs = ({tuple(row[key] for key in keys): row["value"] for row in some} for some in rows)
    assert mine == pytest.approx(theirs, abs=1e-6)


def test_a_killed_server_goes_on_at_the_next_round(deployment, folder, simulated):
    mark = folder / "shards-3/node-0/begun-1"
    mark.unlink()
    deployment.submit_in_background(folder / "app", "--set", "run_dir=killed")
    deployment.wait_for(mark.exists, 240, "the second round does not begin")
    deployment.kill("server")
    deployment.kill("submit")
    assert weights(folder / "killed")[1] == 1
    deployment.serve()
    done = deployment.submit(folder / "app", "--set", "run_dir=killed", "--resume")
    assert done.returncode == 0, done.stdout + done.stderr + deployment.logs()
    assert_same_weights(folder / "killed", simulated)
    assert len(read_rounds(folder / "killed")) == 3
    for number in range(3):
        assert not deployment.stop(f"node-{number}")


def test_nodes_that_fail_in_every_way_do_not_stop_a_run(deployment, folder):
    """Rounds count from 0 in the files of the nodes, and from 1 in the log."""
    shards = [folder / f"shards-4/node-{number}" for number in range(4)]
    deadline = 90
    (shards[1] / "fault-0").write_text("sleep 600")  # its process is killed meanwhile
    (shards[2] / "fault-0").write_text("nan")
    (shards[3] / "fault-0").write_text(f"sleep {deadline + 5}")
    (shards[2] / "fault-2").write_text("shape")
    for number, place in enumerate(shards):
        deployment.node(f"node-{number}", place)
    deployment.submit_in_background(
        folder / "app", "--set", "run_dir=faults", "--set", "clients=4", "--set", "rounds=4",
        "--set", f"round_timeout={deadline}.0",
    )  # fmt: skip
    begun = shards[1] / "begun-0"
    deployment.wait_for(lambda: begun.exists() and begun.read_text(), 240, "the first round does not begin")
    os.kill(int(begun.read_text()), signal.SIGKILL)
    deployment.wait_for(lambda: len(read_rounds(folder / "faults")) >= 1, 240, "the first round does not end")
    deployment.kill("node-1")
    deployment.node("node-1", shards[1])
    submitted = deployment.running.pop("submit")
    assert submitted.wait(timeout=600) == 0, deployment.logs()
    refused = [line["refused"] for line in read_rounds(folder / "faults")]
    assert refused[0].keys() == {"1", "2", "3"}, refused
    assert "it failed" in refused[0]["1"]
    assert "not finite" in refused[0]["2"]
    assert "did not answer within 90 s" in refused[0]["3"]
    assert {"2", "3"} <= refused[1].keys() <= {"1", "2", "3"}, refused  # node-1 may be back already
    assert "shared.head has shape" in refused[2]["2"]
    assert refused[2].keys() <= {"1", "2"}, refused
    assert refused[3].keys() == {"2"}, refused
    assert "asked again in round 6" in refused[3]["2"]
    assert all(torch.isfinite(value).all() for value in weights(folder / "faults")[0].values())
    accuracy = [row for row in read_rows(folder / "faults") if row.metric == "accuracy" and row.split == "in"]
    assert {row.client for row in accuracy} == {None, 0, 1, 2, 3}
    assert next(row.value for row in accuracy if row.scope == "weighted") > 0.5
    found = load(folder / "faults").predict(torch.zeros(2, 16, 16, 1, dtype=torch.uint8))
    assert len(found) == 2
    for number in range(4):
        assert not deployment.stop(f"node-{number}")
