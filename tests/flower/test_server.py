"""A run on Flower is the simulator's run, whatever its nodes do; here with nodes in this process."""

import json
from pathlib import Path

import httpx
import pytest
import torch

pytest.importorskip("flwr", reason='needs pip install "foogd[flower]"')

from flower_grid import DATA, SETTINGS, MemoryGrid, make_nodes
from flwr.app import Message
from safetensors.torch import load_file

from foogd import load
from foogd.core.errors import InputError
from foogd.core.random import generator
from foogd.flower.engine import Post
from foogd.flower.messages import BadMessage, pack, to_record, unpack
from foogd.flower.node import Kept
from foogd.flower.server import Server, _add_sums, serve
from foogd.presets.loader import parse_toml, resolve
from foogd.reports.collection import find_runs
from foogd.reports.grouping import collect
from foogd.runs.checkpoint import load_checkpoint, load_values
from foogd.runs.files import read_rounds, read_rows
from foogd.runs.run import Run

PLAIN = {"method": "fedavg", "detectors": "msp", "evaluate": "none"}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working folder with a small data set and its settings."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.py").write_text(DATA)
    Path("tiny.toml").write_text(SETTINGS)
    return tmp_path


def on_flower(grid, folder="flower", **settings):
    given = {"preset": "tiny.toml", "data": "synthetic", "run_dir": folder, "poll": 0.01, "method": "fedavg+foogd"}
    return serve(grid, given | settings)


def simulated(folder="simulated", **settings):
    config, method = resolve(parse_toml(SETTINGS.encode(), "s"), {"method": "fedavg+foogd", **settings})
    run = Run.create(Path(folder), config, method)
    for _ in run.train():
        pass
    return run


def server_values(folder):
    tensors, _ = load_checkpoint(Path(folder))
    return {name: value for name, value in tensors.items() if name.startswith("server.")}


def same_weights(one, other):
    mine, theirs = server_values(one), server_values(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def rows_of(folder):
    rows = [row.as_dict() for row in read_rows(folder)]
    return {tuple(v for k, v in row.items() if k not in ("run", "value")): row["value"] for row in rows}


def changed(change):
    """A node that changes the arrays of its updates."""

    def behave(message, answer):
        reply = answer()
        if message.metadata.message_type != "train":
            return reply
        arrays, about = unpack(reply.content)
        return Message(pack(to_record(change(arrays)), about), reply_to=message)

    return behave


def silent(message, answer):
    """A node that never answers."""
    return answer() if message.metadata.message_type == "query" else None


def crashing(message, answer):
    if message.metadata.message_type == "query":
        return answer()
    raise RuntimeError("out of memory")


def crashing_in_training(message, answer):
    if message.metadata.message_type == "train":
        raise RuntimeError("out of memory")
    return answer()


def not_finite(arrays):
    return arrays | {"shared.head": torch.full_like(arrays["shared.head"], torch.nan)}


# The same as the simulator


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg+foogd", {"eval_every": 1, "calibration": 0.1, "split_seed": 3}),
        ("fedavg+foogd", {"detectors": "score_norm,span,span_own,score_span,score_span_all"}),
        ("fedrod+foogd", {"participation": 0.67, "rounds": 3}),  # a private net
        ("foster", {}),  # a private net, and one that only the server changes
        ("fediir", {"keep_momentum": True}),  # a question before training
        ("fedatol", {"gan_rounds": 1, "generator_width": 2}),  # a GAN that the nodes train in the first round
        ("scaffold", {"rounds": 3}),  # memory of the client, uploads beside the model
    ],
)
def test_weights_and_rows_are_those_of_the_simulator(method, settings):
    grid = make_nodes("shards", split_seed=settings.get("split_seed", "auto"))
    on_flower(grid, method=method, **settings)
    simulated(method=method, **settings)
    assert same_weights("flower", "simulated")
    mine, theirs = rows_of(Path("flower")), rows_of(Path("simulated"))
    last = settings.get("rounds", 2)
    fitted = {"gaussian", "react"}  # asked for in one go after training, not on the way
    wanted = {key for key in theirs if key[2] == last or key[9] not in fitted}
    assert mine.keys() == wanted
    assert max(abs(mine[key] - theirs[key]) for key in wanted) == 0
    lines = [[line[key] for key in ("participants", "losses", "bytes_up", "bytes_down", "drift")]
             for folder in ("flower", "simulated") for line in read_rounds(Path(folder))]  # fmt: skip
    assert lines[:last] == lines[last:]


NET = """
from torch import nn

def half(shape):
    front = nn.Sequential(nn.Conv2d(shape[0], 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU()).requires_grad_(False)
    back = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
    return nn.Sequential(front, back, nn.AdaptiveAvgPool2d(1), nn.Flatten())

def probe(shape):
    return half(shape).requires_grad_(False)
"""


@pytest.mark.parametrize(("method", "backbone"), [("fedbn", "half"), ("fedavg+foogd", "probe")])
def test_what_a_backbone_froze_stays_as_it_was_built_on_the_nodes(method, backbone):
    Path("net.py").write_text(NET)
    settings = {"method": method, "backbone": f"net.py:{backbone}", "momentum": 0.9, "bn_pool": "exact"}
    on_flower(make_nodes("shards"), **settings)
    run = simulated(**settings)
    assert same_weights("flower", "simulated")
    start, found = run.engine.nets().state_dict(), load_values(Path("flower"))
    held = [name for name in start if name.startswith("backbone.0." if backbone == "half" else "backbone.")]
    assert "backbone.0.1.running_var" in held
    assert all(torch.equal(found[name], start[name]) for name in held)
    assert not torch.equal(found["head.weight"], start["head.weight"])


def test_the_run_folder_has_the_files_of_a_simulated_run():
    grid = make_nodes("shards")
    on_flower(grid, calibration=0.1, method="fedavg+foogd")
    simulated(calibration=0.1)
    names = [{path.name for path in Path(folder).rglob("*") if path.is_file()} for folder in ("flower", "simulated")]
    digest = {name for both in names for name in both if name.startswith("model-")}
    assert names[1] - digest - names[0] == {"samples.safetensors"}  # would show labels and predictions of test images
    assert names[0] - digest - names[1] == {"flower.json"}
    images = torch.randint(0, 256, (5, 16, 16, 1), dtype=torch.uint8)
    mine, theirs = load("flower").predict(images, client=1), load("simulated").predict(images, client=1)
    assert mine.threshold == theirs.threshold
    assert torch.equal(mine.score, theirs.score)
    assert "3 clients" in Path("flower/summary.md").read_text()
    with pytest.raises(InputError, match="on the nodes"):
        Run.open(Path("flower"), lambda path: resolve(parse_toml(path.read_bytes(), "c"), {})).evaluate()


def test_verdicts_rest_on_what_all_nodes_have_as_in_the_simulator():
    named = {"calibration": 0.1, "method": "fedrod+foogd"}
    on_flower(make_nodes("shards"), detectors="score_norm,score_span,score_span_all", **named)
    simulated(detectors=["score_norm", "score_span", "score_span_all"], **named)
    images = torch.randint(0, 256, (5, 16, 16, 1), dtype=torch.uint8)
    mine, theirs = load("flower").predict(images), load("simulated").predict(images)
    assert mine.detector == theirs.detector == "score_span_all"
    assert mine.threshold == theirs.threshold
    assert torch.equal(mine.score, theirs.score)


def test_a_report_tells_a_run_on_flower_from_its_twin_in_the_simulator():
    on_flower(make_nodes("shards"), method="fedavg", detectors="msp", data="tiny.py:inside")
    simulated(method="fedavg", detectors=["msp"])
    collection = collect(find_runs([Path("flower"), Path("simulated")]))
    assert [scene.title for scene in collection.scenes] == ["simulated", "on Flower"]
    assert collection.notes == ()


def test_private_values_stay_on_their_node():
    grid = make_nodes("shards")
    seen = []

    def listen(message, answer):
        seen.append(message)
        seen.append(answer())
        return seen[-1]

    grid.behave = dict.fromkeys((node["name"] for node in grid.nodes.values()), listen)
    on_flower(grid, method="fedrod", calibration=0.1)
    names = {name for message in seen for name in unpack(message.content)[0]}
    assert not [name for name in names if "personal" in name]
    assert {name.partition(".")[0] for name in names} <= {
        "shared", "integers", "test", "fit", "calibration", "generic_calibration",
    }  # fmt: skip
    tensors, _ = load_checkpoint(Path("flower"))
    assert all(value.numel() == 0 for name, value in tensors.items() if name.endswith(".personal"))
    assert load("flower").predict(torch.zeros(2, 16, 16, 1, dtype=torch.uint8)).out is not None
    simulated(method="fedrod", calibration=0.1)
    for name in ("msp", "gaussian"):  # of the model that has no private part
        assert load("flower").threshold(name) == load("simulated").threshold(name)
    with pytest.raises(InputError, match="on its nodes only"):
        load("flower").predict(torch.zeros(2, 16, 16, 1, dtype=torch.uint8), client=0)
    for name, why in (("knn", "stays on the nodes"), ("dice", "only the detectors that its settings name")):
        with pytest.raises(InputError, match=rf"{name}.* without a client: .*Flower.* {why}; possible are .*msp"):
            load("flower").threshold(name)
    kept = Kept(next(Path("shards/node-0/state").glob("fedrod-*")))
    assert kept.rounds() == [1, 2]


def test_without_evaluation_no_score_leaves_a_node():
    grid = make_nodes("shards")
    on_flower(grid, evaluate="none", eval_every=1)
    assert {kind for _, kind, _ in grid.sent} == {"query", "query.survey", "train"}
    assert read_rows(Path("flower")) == []
    summary = Path("flower/summary.md").read_text()
    assert "test sets" not in summary  # nothing was compared
    assert "has no rows" not in summary  # no detector was asked


def test_evaluation_comes_with_the_updates():
    grid = make_nodes("shards")
    on_flower(grid, eval_every=1, rounds=3, participation=0.34, detectors="msp")
    kinds = [kind for _, kind, _ in grid.sent]
    assert kinds.count("train") == 3
    assert kinds.count("evaluate") == 2 + 2 + 3  # those who do not train in rounds 2 and 3, then all
    assert {row.client for row in read_rows(Path("flower")) if row.round == 1} == {None, 0, 1, 2}


def test_those_who_only_evaluate_do_not_decide_what_updates_look_like():
    grid = make_nodes("shards")
    on_flower(grid, method="scaffold", rounds=2, participation=0.34, eval_every=1, detectors="msp")
    assert [line["refused"] for line in read_rounds(Path("flower"))] == [{}, {}]


@pytest.mark.parametrize(
    "said", [{"class_counts": "many"}, {"leaks": {"in": "x"}}, {"notes": 3}, {"aside": -1}, {"sets": 7}, {"sets": [{}]}]
)
def test_nonsense_about_itself_does_not_stop_a_run(said):
    grid = make_nodes("shards")

    def babble(message, answer):
        reply = answer()
        if message.metadata.message_type == "query":
            return reply
        arrays, about = unpack(reply.content)
        return Message(pack(to_record(arrays), about | said), reply_to=message)

    grid.behave["node-1"] = babble
    on_flower(grid, rounds=1, detectors="msp", method="fedavg")
    clients = {row.client for row in read_rows(Path("flower"))}
    assert {None, 0, 2} <= clients
    assert (1 in clients) == ("sets" not in said)


def test_a_private_part_that_never_trained_and_means_nothing_is_not_tested():
    """The simulator would test such a client with the mean of the others' private parts, which nobody has here."""
    grid = make_nodes("shards")
    on_flower(grid, method="fedbn", rounds=1, participation=0.34, detectors="msp,gaussian")
    [chosen] = read_rounds(Path("flower"))[0]["participants"]
    assert {row.client for row in read_rows(Path("flower"))} == {None, chosen}
    assert not Path("flower/model").exists()  # features are private: the server has nothing to answer with


# Nodes that fail


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (changed(not_finite), "not finite"),
        (changed(lambda arrays: arrays | {"shared.head": arrays["shared.head"][:-1]}), "shared.head has shape"),
        (changed(lambda arrays: arrays | {"shared.head": arrays["shared.head"].double()}), "torch.float64"),
        (changed(lambda arrays: {k: v for k, v in arrays.items() if k != "shared.score"}), "shared.score is missing"),
        (changed(lambda arrays: arrays | {"shared.tail": arrays["shared.head"]}), "shared.tail is of no net"),
        (changed(lambda arrays: arrays | {"extra.more": torch.zeros(3)}), "beside the model"),
        (crashing, "out of memory"),
        (silent, "did not answer within"),
    ],
)
def test_an_update_that_cannot_be_used_is_left_out_and_its_node_rests(behave, reason):
    grid = make_nodes("shards")
    grid.behave["node-1"] = behave
    on_flower(grid, rounds=4, round_timeout=5.0 if behave is not silent else 3.0, detectors="msp", evaluate="none")
    lines = read_rounds(Path("flower"))
    assert [list(line["refused"]) for line in lines] == [["1"], ["1"], ["1"], ["1"]]
    assert reason in lines[0]["refused"]["1"]
    assert "asked again in round 3" in lines[1]["refused"]["1"]
    assert reason in lines[2]["refused"]["1"]
    assert "asked again in round 6" in lines[3]["refused"]["1"]
    asked = [round for name, kind, round in grid.sent if name == "node-1" and kind in ("query.survey", "train")]
    assert list(dict.fromkeys(asked)) == ["0", "2"]
    assert all(torch.isfinite(value).all() for value in server_values("flower").values())


def test_an_update_beyond_the_bound_is_refused():
    grid = make_nodes("shards")
    grid.behave["node-2"] = changed(lambda arrays: arrays | {"shared.head": arrays["shared.head"] + 100})
    on_flower(grid, rounds=1, update_bound=50.0, detectors="msp")
    assert "the bound is 50" in read_rounds(Path("flower"))[0]["refused"]["2"]


def test_a_huge_update_is_refused_by_default_and_the_run_is_that_of_the_others():
    grid = make_nodes("shards")
    grid.behave["node-2"] = changed(
        lambda arrays: {k: torch.full_like(v, 3e38) if k.startswith("shared.") else v for k, v in arrays.items()}
    )
    on_flower(grid, rounds=3, detectors="msp")
    refused = [line["refused"] for line in read_rounds(Path("flower"))]
    assert [list(clients) for clients in refused] == [["2"], ["2"], ["2"]]
    for round in (0, 2):  # between them it rests
        assert refused[round]["2"].endswith(", 100 times the length of the model (update_bound = 'auto')")
        assert float(refused[round]["2"].split("by ")[1].partition(";")[0]) > 1e40
    grid = make_nodes("others")
    grid.behave["node-2"] = crashing_in_training
    on_flower(grid, "without", rounds=3, detectors="msp")
    assert same_weights("flower", "without")
    assert rows_of(Path("flower")) == rows_of(Path("without"))


def test_a_trimmed_round_waits_for_three_updates():
    grid = make_nodes("shards")
    left = iter([0])

    def once(message, answer):
        if message.metadata.message_type == "train" and next(left, None) is not None:
            raise RuntimeError("out of memory")
        return answer()

    grid.behave["node-1"] = once
    settings = {"method": "fedavg", "detectors": "msp", "aggregation": "trimmed"}
    on_flower(grid, **settings)
    assert [round for name, kind, round in grid.sent if (name, kind) == ("node-0", "train")] == ["0", "0", "1"]
    assert [line["refused"] for line in read_rounds(Path("flower"))] == [{}, {}]
    simulated(**settings)
    assert same_weights("flower", "simulated")
    grid.behave["node-1"] = crashing
    with pytest.raises(InputError, match="round 1 was tried 2 times and never had 3 updates"):
        on_flower(grid, "lost", **settings, retries=1)


def test_a_refused_client_goes_on_from_what_it_kept_before():
    """The private net of an update that did not count is not used again."""
    grid = make_nodes("shards")
    times = []

    def once(message, answer):
        reply = answer()
        if message.metadata.message_type == "train":
            times.append(message.metadata.group_id)
            if times == ["0"]:
                return changed(not_finite)(message, lambda: reply)
        return reply

    grid.behave["node-1"] = once
    on_flower(grid, method="fedrod", rounds=3, detectors="msp")
    assert times == ["0", "2"]
    folder = next(Path("shards/node-1/state").glob("fedrod-*"))
    assert Kept(folder).rounds() == [3]


def test_a_round_below_the_quorum_is_repeated_and_then_the_run_ends_and_can_go_on():
    grid = make_nodes("shards")
    grid.behave = {"node-1": crashing, "node-2": crashing}
    with pytest.raises(InputError, match="round 1 was tried 3 times and never had 2 updates"):
        on_flower(grid, min_updates=2, retries=2)
    assert [round for name, kind, round in grid.sent if (name, kind) == ("node-1", "query.survey")] == ["0"] * 3
    grid.behave = {}
    on_flower(grid, min_updates=2, retries=2, resume=True)
    simulated()
    assert same_weights("flower", "simulated")


def test_a_repeated_round_draws_others():
    """A sample whose only node is dead would fail as often as it is drawn.

    With this seed the dead one would be drawn in the repeat too, if it were among those who can be.
    """
    grid = make_nodes("shards")
    grid.behave["node-1"] = crashing
    run = on_flower(grid, **PLAIN, rounds=3, participation=0.34, retries=1, seed=17)
    drawn = [int(torch.randperm(3, generator=generator(run.config.seed, r, "participants"))[0]) for r in range(3)]
    taken = [line["participants"] for line in read_rounds(Path("flower"))]
    assert 1 in drawn
    assert set(drawn) != {1}
    for theirs, own in zip(drawn, taken, strict=True):
        assert own in ([0], [2]) if theirs == 1 else own == [theirs]
    last = [max((r + 1 for r in range(3) if taken[r] == [client]), default=0) for client in range(3)]
    assert load_checkpoint(Path("flower"))[0]["counted"].tolist() == last


def test_a_round_is_repeated_when_enough_nodes_are_back():
    grid = make_nodes("shards")
    away, looks = {}, []

    def leaves(message, answer):
        if message.metadata.message_type == "train" and not looks:
            away[101] = grid.nodes.pop(101)
            raise RuntimeError("the machine was started again")
        return answer()

    def online():
        if away:
            looks.append(0)
            if len(looks) == 20:
                grid.nodes |= {101: away.pop(101)}
        return list(grid.nodes)

    grid.behave["node-1"], grid.get_node_ids = leaves, online
    on_flower(grid, **PLAIN, rounds=1, min_updates=3, retries=1, wait_for_nodes=60.0)
    assert read_rounds(Path("flower"))[0]["refused"] == {}


def evaluates_after(failures):
    """A node that fails so many times when it is asked to evaluate."""
    left = iter(range(failures))

    def behave(message, answer):
        if message.metadata.message_type.startswith("evaluate") and next(left, None) is not None:
            raise RuntimeError("out of memory")
        return answer()

    return behave


@pytest.mark.parametrize("detectors", ["msp", "msp,gaussian"])
def test_the_final_evaluation_asks_again_who_failed(detectors):
    grid = make_nodes("shards")
    grid.behave["node-1"] = evaluates_after(1)
    on_flower(grid, rounds=1, method="fedavg", detectors=detectors)
    simulated(rounds=1, method="fedavg", detectors=detectors)
    assert rows_of(Path("flower")) == rows_of(Path("simulated"))
    assert "was not evaluated by" not in Path("flower/summary.md").read_text()
    assert [name for name, kind, _ in grid.sent if kind == "evaluate"].count("node-0") == 1


def test_the_summary_names_who_did_not_evaluate():
    grid = make_nodes("shards")
    grid.behave["node-1"] = evaluates_after(10**9)
    on_flower(grid, rounds=1, method="fedavg", detectors="msp,gaussian", retries=2)
    summary = Path("flower/summary.md").read_text()
    assert "The final model was not evaluated by: node-1." in summary
    assert "Detectors were fitted without the features of: node-1." in summary
    assert {row.client for row in read_rows(Path("flower"))} == {None, 0, 2}


def test_the_final_evaluation_does_not_wait_for_ever():
    grid = make_nodes("shards")

    def leaves(message, answer):
        reply = answer()
        if message.metadata.message_type == "train":
            del grid.nodes[101]
        return reply

    grid.behave["node-1"] = leaves
    on_flower(grid, rounds=1, method="fedavg", detectors="msp,gaussian", wait_for_nodes=0.2)
    assert "was not evaluated by: node-1." in Path("flower/summary.md").read_text()


@pytest.mark.parametrize(
    "wrong", [{"sum": torch.tensor([torch.nan])}, {"sum": torch.ones(2)}, {"sum": torch.ones(1).double()}, {}]
)
def test_sums_of_a_client_are_added_whole_or_not_at_all(wrong):
    total = {"a": {"sum": torch.ones(1)}, "b": {"sum": torch.ones(1)}}
    with pytest.raises(BadMessage):
        _add_sums(total, {"a": [{"sum": torch.ones(1)}], "b": [wrong]})
    assert total == {"a": {"sum": torch.ones(1)}, "b": {"sum": torch.ones(1)}}
    _add_sums(total, {"a": [{"sum": torch.ones(1)}]})
    assert total == {"a": {"sum": 2 * torch.ones(1)}, "b": {"sum": torch.ones(1)}}


def test_the_model_for_use_counts_the_images_that_trained():
    grid = make_nodes("shards")
    on_flower(grid, method="fedrod", rounds=1, calibration=0.3, detectors="msp")
    simulated(method="fedrod", rounds=1, calibration=0.3, detectors="msp")
    [path] = Path("flower/model").glob("*.safetensors")
    counts = torch.tensor(json.loads(Path("simulated/partition.json").read_text())["counts"])
    assert load_file(path)["class_counts"].tolist() == counts.sum(0).tolist()


# A SuperLink that stumbles


def stumbling(real, times):
    """The same call; its first calls fail as a SuperLink does whose database is locked."""
    left = iter(range(times))

    def call(*given):
        if next(left, None) is not None:
            request = httpx.Request("POST", "http://superlink")
            raise httpx.HTTPStatusError("database is locked", request=request, response=httpx.Response(500))
        return real(*given)

    return call


@pytest.mark.parametrize("call", ["get_node_ids", "push_messages", "pull_messages"])
def test_a_failure_of_the_superlink_is_tried_again(call):
    grid = make_nodes("shards")
    setattr(grid, call, stumbling(getattr(grid, call), 2))
    on_flower(grid, rounds=1, detectors="msp", method="fedavg")
    assert read_rounds(Path("flower"))[0]["refused"] == {}


def test_a_superlink_that_is_gone_ends_the_run_with_a_sentence():
    grid = make_nodes("shards")
    grid.get_node_ids = stumbling(grid.get_node_ids, 10**9)
    with pytest.raises(InputError, match=r"not answered for 0.05 s \(HTTPStatusError: database is locked\)"):
        Post(grid, poll=0.01, patience=0.05).online()


@pytest.mark.parametrize(("push", "reason"), [
    (lambda messages: [], "could not be sent"),  # as Flower does where messages are too large
    (stumbling(None, 10**9), "could not be sent: HTTPStatusError: database is locked"),
])  # fmt: skip
def test_a_message_that_never_left_is_not_called_late(push, reason):
    grid = make_nodes("shards")
    grid.push_messages = push
    letter = ("query", to_record({}), {})
    found = Post(grid, poll=0.01).ask({100: letter, 101: letter}, 0.05, "0")
    assert found == dict.fromkeys((100, 101), f"its message {reason}")


# Going on


class Killed(Exception):
    """The server is gone."""


def test_a_killed_server_goes_on_at_the_next_round_to_the_same_weights():
    grid = make_nodes("shards")

    real = grid._answer

    def dies(message):
        about, name = message.metadata, grid.nodes[message.metadata.dst_node_id]["name"]
        if (about.message_type, about.group_id, name) == ("train", "1", "node-1"):
            real(message)  # the node has trained and kept its state, but nobody hears of it
            raise Killed
        return real(message)

    grid._answer = dies
    with pytest.raises(Killed):
        on_flower(grid, method="fedrod", rounds=3, eval_every=1, detectors="msp")
    grid._answer = real
    with pytest.raises(InputError, match="exists already"):
        on_flower(grid, method="fedrod", rounds=3, eval_every=1, detectors="msp")
    with pytest.raises(InputError, match="another configuration: lr"):
        on_flower(grid, method="fedrod", rounds=3, eval_every=1, detectors="msp", lr=0.5, resume=True)
    # The nodes have other ids now, in another order.
    grid.nodes = {n: grid.nodes[old] for n, old in zip((7, 5, 9), grid.nodes, strict=True)}
    grid.sent.clear()
    on_flower(grid, method="fedrod", rounds=3, eval_every=1, detectors="msp", resume=True)
    assert [round for name, kind, round in grid.sent if (name, kind) == ("node-1", "train")] == ["1", "2"]
    simulated(method="fedrod", rounds=3, eval_every=1, detectors="msp")
    assert same_weights("flower", "simulated")
    assert rows_of(Path("flower")) == rows_of(Path("simulated"))
    on_flower(grid, method="fedrod", rounds=3, eval_every=1, detectors="msp", resume=True)  # nothing is left


def test_newcomers_get_the_next_ids_and_members_that_are_back_keep_theirs():
    grid = make_nodes("shards", clients=4)
    late = grid.nodes.pop(100)  # the first by name

    def arrive(message, answer):
        if message.metadata.message_type == "train" and message.metadata.group_id == "0":
            grid.nodes[100] = late
            grid.nodes[201] = grid.nodes.pop(101)  # node-1 was started again
        return answer()

    grid.behave["node-1"] = arrive
    on_flower(grid, rounds=3, detectors="msp")
    names = [client["name"] for client in json.loads(Path("flower/flower.json").read_text())["roster"]["clients"]]
    assert names == ["node-1", "node-2", "node-3", "node-0"]
    lines = read_rounds(Path("flower"))
    assert [line["participants"] for line in lines] == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert all(line["refused"] == {} for line in lines)


def heard(grid, seen):
    """The same grid; `seen` gets the Flower id of each node that trains."""
    real = grid._answer

    def answer(message):
        if message.metadata.message_type == "train":
            seen.append(message.metadata.dst_node_id)
        return real(message)

    grid._answer = answer


def test_a_node_that_is_started_again_while_the_server_waits_is_one_node():
    grid = make_nodes("shards")
    last, again = grid.nodes.pop(102), dict(grid.nodes[101])
    looks, seen = [], []

    def online():
        looks.append(0)
        grid.nodes |= {201: again} if len(looks) == 2 else {102: last} if len(looks) == 4 else {}
        return list(grid.nodes)  # the old id stays there: Flower has not noticed

    grid.get_node_ids = online
    heard(grid, seen)
    on_flower(grid, **PLAIN, rounds=2)
    assert seen == [100, 201, 102] * 2


def test_a_node_with_a_new_state_folder_is_let_in_when_its_old_self_is_gone():
    grid = make_nodes("shards")
    seen = []

    def restarts(message, answer):
        if message.metadata.message_type == "train" and message.metadata.group_id == "0":
            grid.nodes[201] = grid.nodes[101] | {"state": "fresh"}
        if message.metadata.message_type == "train" and message.metadata.group_id == "1":
            del grid.nodes[101]
        return answer()

    grid.behave["node-2"] = restarts
    heard(grid, seen)
    on_flower(grid, **PLAIN, rounds=3)
    assert [node for node in seen if node in (101, 201)] == [101, 101, 201]


def test_of_two_nodes_with_one_name_the_one_with_the_old_home_goes_on():
    grid = make_nodes("shards")
    seen = []
    grid.behave["node-1"] = crashing
    with pytest.raises(InputError, match="was tried 1 times"):
        on_flower(grid, **PLAIN, rounds=1, min_updates=3, retries=0)
    grid.behave = {}
    grid.nodes = {50: grid.nodes[101] | {"state": "other"}} | grid.nodes
    heard(grid, seen)
    on_flower(grid, **PLAIN, rounds=1, min_updates=3, retries=0, resume=True)
    assert seen == [100, 101, 102]


def test_the_run_folder_is_looked_at_after_the_lock():
    """Another server may have made it while this one waited."""
    grid = make_nodes("shards")
    given = {"preset": "tiny.toml", "data": "synthetic", "run_dir": "flower", "poll": 0.01, "rounds": 1, **PLAIN}
    first, second = Server(grid, given), Server(grid, given | {"lr": 0.5, "resume": True})
    on_flower(grid, **PLAIN, rounds=1)
    with pytest.raises(InputError, match="exists already"):
        first.run()
    with pytest.raises(InputError, match="another configuration: lr"):
        second.run()


def test_two_nodes_with_one_name_are_refused():
    grid = make_nodes("shards")
    grid.nodes[102] = {"name": "node-1", "data": grid.nodes[102]["data"]}
    with pytest.raises(InputError, match="two nodes are called 'node-1'"):
        on_flower(grid, wait_for_nodes=5.0)


def test_waiting_for_nodes_ends():
    grid = make_nodes("shards")
    del grid.nodes[101]
    with pytest.raises(InputError, match=r"2 of 3 nodes came within 0.2 s \(node-0, node-2\)"):
        on_flower(grid, wait_for_nodes=0.2)
    assert not Path("flower").exists()


def test_classes_are_found_by_their_names():
    """A node that lacks a class has other numbers for the rest; the run has one list for all."""
    from dataclasses import replace

    from foogd.data.store import ImageStore

    grid = make_nodes("shards")
    for part in ("train", "test"):
        path = Path(f"shards/node-1/{part}.npz")
        store = ImageStore.load(path)
        some = store.select(store.labels > 0)
        replace(some, labels=some.labels - 1, classes=some.classes[1:]).save(path)
    on_flower(grid, rounds=1, detectors="msp")
    about = json.loads(Path("flower/partition.json").read_text())
    assert about["classes"] == sorted(about["classes"])
    assert about["counts"][1][0] == 0
    assert sum(about["counts"][1]) == len(ImageStore.load("shards/node-1/train.npz"))
    accuracy = [row.value for row in read_rows(Path("flower")) if row.client == 1 and row.metric == "accuracy"]
    assert max(accuracy) > 0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"method": "fedatol", "generator": "central"}, "images of all clients"),
        ({"partners": "all"}, "partners = 'all' is not possible any more"),
        ({"clients": 0}, "how many nodes"),
        ({"min_updates": 4}, "more than the 3 clients"),
        ({"aggregation": "trimmed", "clients": 2}, "needs 3 a round, but 2 clients with participation = 1 send 2"),
        ({"min_updates": 2, "participation": 0.34}, "more than the 1 clients that participation = 0.34"),
        ({"round_timeout": 0.0}, "round_timeout = 0.0 is not allowed"),
        ({"rouns": 3}, "'rouns' is not known"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_sent(settings, sentence):
    grid = MemoryGrid({})
    with pytest.raises(InputError, match=sentence):
        on_flower(grid, wait_for_nodes=0.1, **settings)
    assert grid.sent == []
