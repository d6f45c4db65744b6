"""What a node or a person may say wrongly to a run on Flower, and that it is a sentence and not the end of the run."""

import math
import socket
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason='needs pip install "foogd[flower]"')

from flower_grid import DATA, SETTINGS, make_nodes
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from foogd import Config
from foogd.cli import main
from foogd.core.errors import InputError
from foogd.core.types import ClientState, Survey, Update
from foogd.data.federation import TestSet
from foogd.data.store import ImageStore
from foogd.data.synthetic import tiny_federation
from foogd.engine.aggregate import refusal, survey_refusal
from foogd.engine.eager import EagerEngine
from foogd.evaluation.rows import Answers, Asked
from foogd.flower.certificates import write_certificates, write_keys
from foogd.flower.engine import _check_answers
from foogd.flower.membership import Roster
from foogd.flower.messages import (
    BadMessage,
    Facts,
    pack,
    read_asked,
    read_sums,
    read_survey,
    read_update,
    to_record,
    unpack,
    update_arrays,
)
from foogd.flower.names import run_folder
from foogd.flower.node import Kept
from foogd.flower.processes import check_certificates, wait_for_server
from foogd.flower.schemas import check_form, extra_form, survey_form
from foogd.flower.server import serve
from foogd.methods import make_method
from foogd.runs.checkpoint import load_checkpoint
from foogd.runs.files import read_rounds
from foogd.simulate import initial_state


def engine_of(method, **settings):
    federation = tiny_federation(per_client=20, channels=1)
    return EagerEngine(make_method(method), federation, Config(method=method, device="cpu", backbone="cnn", **settings))


def form_of(arrays):
    return {name: (tuple(value.shape), value.dtype) for name, value in arrays.items()}


# What a method sends beside the model


@pytest.mark.parametrize("method", ["fedavg", "fediir", "scaffold", "scaffold+foogd", "foster", "fedthe", "fedrod"])
def test_the_server_knows_what_a_method_sends_before_anyone_sends_it(method):
    engine = engine_of(method, batch_size=8)
    state = initial_state(engine)
    for round in (0, 1):  # in the second one a client has a memory
        update = next(engine.train(state.server, [state.clients[1]], round))
        assert extra_form(engine, state.server, round) == form_of(update.extra)
        for answer in engine.survey(state.server, state.clients, round):
            assert survey_form(engine, state.server, round) == form_of(answer.sums)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda a: a.pop("one"), "lacks the array 'one'"),
        (lambda a: a.update(more=torch.zeros(1)), "'more', which the method does not send"),
        (lambda a: a.update(one=torch.zeros(2)), r"'one' that is \(2,\)"),
        (lambda a: a.update(one=torch.zeros(3).double()), "float64"),
    ],
)
def test_another_form_is_bad(change, sentence):
    arrays = {"one": torch.zeros(3), "two": torch.tensor(1)}
    wanted = form_of(arrays)
    check_form(arrays, wanted, "it")
    change(arrays)
    with pytest.raises(BadMessage, match=sentence):
        check_form(arrays, wanted, "it")


def lying(kind, change):
    """A node that changes its answers of one kind."""

    def behave(message, answer):
        reply = answer()
        if message.metadata.message_type != kind:
            return reply
        arrays, about = unpack(reply.content)
        change(arrays, about)
        return Message(pack(to_record(arrays), about), reply_to=message)

    return behave


def shorten(name):
    return lambda arrays, about: arrays.update({name: arrays[name][:-1]})


@pytest.mark.parametrize(
    ("method", "kind", "change", "reason"),
    [
        ("fediir", "query.survey", shorten("sums.gradient"), "'gradient' that is"),
        ("fediir", "query.survey", lambda a, b: a.pop("sums.batches"), "lacks the array 'batches'"),
        ("fediir", "query.survey", lambda a, b: b.update(weight=math.nan), "weight is nan"),
        ("fediir", "query.survey", lambda a, b: b.update(weight=10**400), "no weight"),
        ("scaffold", "train", shorten("extra.variate"), "'variate' that is"),
        ("scaffold", "train", lambda a, b: a.pop("extra.variate"), "lacks the array 'variate'"),
        ("fedavg", "train", lambda a, b: b.update(weight=1e12), "its weight is 1e"),
        ("fedavg", "train", lambda a, b: b.update(weight=1e6, class_counts=[10**6] * len(b["class_counts"])), "1e+06"),
        ("fedavg", "train", lambda a, b: b.update(losses={"model": math.inf}), "its loss 'model' is inf"),
        ("fedavg", "train", lambda a, b: b.update(losses={"other": 1.0}), "a loss of 'other'"),
        ("fedavg", "train", lambda a, b: a.update({"other.more": torch.zeros(1)}), "which nobody asked for"),
    ],
)
def test_one_node_that_lies_is_refused_and_the_others_go_on(method, kind, change, reason, tmp_path, monkeypatch):
    """With one participant it is the majority, too."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.py").write_text(DATA)
    Path("tiny.toml").write_text(SETTINGS)
    grid = make_nodes("shards", clients=2)
    grid.behave["node-1"] = lying(kind, change)
    serve(grid, {"preset": "tiny.toml", "data": "synthetic", "run_dir": "run", "poll": 0.01, "method": method,
                 "clients": 2, "rounds": 1, "detectors": "msp", "evaluate": "none"})  # fmt: skip
    [line] = read_rounds(Path("run"))
    assert list(line["refused"]) == ["1"]
    assert reason in line["refused"]["1"]
    tensors, _ = load_checkpoint(Path("run"))
    assert all(bool(torch.isfinite(value).all()) for value in tensors.values() if value.is_floating_point())


def test_a_weight_is_checked_in_the_simulator_too():
    engine = engine_of("fedavg")
    server = initial_state(engine).server
    good = Update(0, 1.0, server.shared, integers=server.integers, losses={"model": 0.5})
    assert refusal(good, server) is None
    assert "loss 'model' is nan" in refusal(replace(good, losses={"model": math.nan}), server)
    assert survey_refusal(Survey(0, 1.0, {})) is None
    assert "weight is 0" in survey_refusal(Survey(0, 0.0, {}))


def test_a_member_that_is_back_with_more_images_may_weigh_more():
    roster = Roster.start({1: facts("a"), 2: facts("b")})
    before = roster.members["a"].samples
    more = facts("a")
    counts = tuple(2 * count for count in more.class_counts)
    assert roster.join(5, replace(more, class_counts=counts, samples=2 * more.samples), [2, 5]) is None
    assert roster.members["a"].samples == 2 * before


# Messages


def test_arrays_that_nobody_asked_for_are_bad():
    engine = engine_of("fedavg")
    server = initial_state(engine).server
    arrays = dict(update_arrays(Update(0, 1.0, server.shared, integers=server.integers), engine.layout))
    about = {"weight": 1.0, "losses": {}}
    read_update(arrays | {"test.0.correct": torch.ones(2)}, about, 0, engine.layout, server)
    with pytest.raises(BadMessage, match="nobody asked for"):
        read_update(arrays | {"personal.head": torch.ones(2)}, about, 0, engine.layout, server)
    with pytest.raises(BadMessage, match="nobody asked for"):
        read_survey({"sum.x": torch.ones(2)}, about, 0)
    with pytest.raises(BadMessage, match="no weight"):
        read_survey({"sums.x": torch.ones(2)}, {"weight": True}, 0)


@pytest.mark.parametrize("data", [b"PK\x03\x04 no archive", b"", b"\x93NUMPY\x01\x00"])
def test_an_array_of_any_bytes_is_at_worst_bad(data):
    broken = ArrayRecord({"shared.head": Array("float32", (3,), "numpy.ndarray", data)})
    with pytest.raises(BadMessage, match="cannot be read"):
        unpack(RecordDict({"arrays": broken, "about": ConfigRecord({"json": "{}"})}))


def test_a_description_of_any_depth_is_at_worst_bad():
    text = "[" * 200_000
    with pytest.raises(BadMessage, match="cannot be read"):
        unpack(RecordDict({"arrays": ArrayRecord(), "about": ConfigRecord({"json": text})}))


@pytest.mark.parametrize("name", ["fit.7.0.n", "fit.-1.0.n", "fit.0.999999999.n"])
def test_sums_of_no_detector_are_bad(name):
    with pytest.raises((BadMessage, ValueError)):
        read_sums({name: torch.ones(1)}, ("msp", "energy"))


@pytest.mark.parametrize("name", ["", ".", "..", "../esc", "a/b", "/etc", "a\nb", "x" * 300])
def test_a_run_has_the_name_of_one_folder(name):
    with pytest.raises(InputError, match="no name of a folder"):
        run_folder(name)


@pytest.mark.parametrize("name", ["fedavg+foogd-s0-0a1b-7f", "my.py:fn-s0-0a1b", "._my.py:fn-s1-0a"])
def test_a_run_may_have_the_name_of_its_method(name):
    assert run_folder(name) == name


# Who a node says that it is


def facts(name):
    store = tiny_federation(per_client=20, channels=1).train
    first, second, count = store.channel_sums()
    counts = tuple(torch.bincount(store.labels).tolist())
    return Facts(name, name, len(store), tuple(map(str, range(len(counts)))), counts, store.shape, first, second, count)


def said(**changes):
    about = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(facts("a")).items()}
    return about | changes


def test_what_a_node_says_about_itself_is_read_back():
    assert Facts.read(said()) == facts("a")


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../a"}, {"name": ""}, {"name": 3}, {"home": "a/b"}, {"samples": True}, {"samples": -1},
        {"samples": 10**15}, {"count": "many"}, {"count": 1}, {"count": 10**9}, {"classes": []}, {"classes": ["0"] * 4},
        {"classes": [1, 2, 3, 4]}, {"class_counts": [1.5]}, {"class_counts": [None]}, {"class_counts": [-1, 81]},
        {"shape": [1, 16]}, {"shape": [1, 16, "x"]}, {"shape": [0, 16, 16]}, {"shape": []}, {"first": []},
        {"first": [10**400]}, {"second": [1, 2]}, {"second": [{}]}, {"first": None}, {"first": [-1]}, {"count": -1},
    ],
)  # fmt: skip
def test_nonsense_about_itself_is_a_bad_message(change):
    with pytest.raises(BadMessage, match="its answer to who it is"):
        Facts.read(said(**change))


# Answers about test images


def answers(*, correct=True, split="in", scores=("msp", "energy"), size=4):
    nothing = ImageStore(torch.zeros(1, 1, 1, 1, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    test = TestSet(split, split, nothing, ())
    flags = {1: torch.ones(size, dtype=torch.bool)} if correct else {}
    found = {name: {1: torch.zeros(size)} if name in scores else {} for name in ("msp", "energy")}
    return Answers(test, flags, {}, found)


def asked(*sets, calibration=None):
    return Asked(list(sets), calibration or {}, calibration or {}, None)


def test_whole_answers_are_taken():
    whole = asked(answers(), answers(split="in-c"), answers(split="out", correct=False),
                  calibration={name: {1: torch.zeros(2)} for name in ("msp", "energy")})  # fmt: skip
    _check_answers(whole, 1, {})


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (asked(answers(correct=False)), "in does not say what is right"),
        (asked(answers(), answers(split="in-c", correct=False)), "in-c does not say what is right"),
        (asked(answers(), answers(split="out", correct=False, scores=("msp",))), "out has scores of other detectors"),
        (asked(answers(size=0)), "different lengths"),
        (asked(answers(), calibration={"msp": {1: torch.zeros(2)}}), "its training images have scores"),
        (asked(answers(), calibration={n: {1: torch.zeros(2, 2)} for n in ("msp", "energy")}), "no row of numbers"),
    ],
)
def test_answers_that_are_not_whole_are_bad(given, sentence):
    with pytest.raises(BadMessage, match=sentence):
        _check_answers(given, 1, {})


def test_a_set_is_of_one_kind_for_all():
    kinds = {}
    _check_answers(asked(answers()), 1, kinds)
    assert kinds == {"in": ("in", False)}
    other = replace(answers(correct=False), test=replace(answers().test, split="out"))
    with pytest.raises(BadMessage, match="another kind"):
        _check_answers(asked(other), 1, kinds)


def test_scores_of_a_detector_that_is_not_there_are_bad():
    sets = [{"name": "x", "split": "in", "corruption": None, "severity": None, "unseen": False}]
    for place in ("-1", "2", "one"):
        with pytest.raises(BadMessage, match="there are 2"):
            read_asked({0: ({f"test.0.score.{place}": torch.zeros(2)}, sets)}, ("msp", "energy"))


# What a node keeps


def test_a_memory_that_is_lost_is_told_also_without_private_values(tmp_path):
    client = ClientState(0, torch.empty(0), torch.arange(4), torch.ones(2), {"variate": torch.ones(3)})
    kept = Kept(tmp_path)
    assert kept.load(client, 0)[1] == ""
    assert "is not there" in kept.load(client, 2)[1]
    kept.save(client, 1)
    assert kept.load(client, 1)[1] == ""
    assert "is of round 1, not 2" in kept.load(client, 2)[1]


# Certificates, keys and servers


@pytest.mark.parametrize("host", ["", "a b", "ä.org", "-a.org", "a..b", "http://a.org", "a:80", "x" * 64])
def test_a_host_that_cannot_be_is_named(host, tmp_path):
    with pytest.raises(InputError, match="--host"):
        write_certificates(tmp_path, ["127.0.0.1", host])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("host", ["::1", "fl_server", "*.example.org", "a-1.b-2." + "c" * 60 + ".org"])
def test_a_host_may_be_an_address_or_a_name(host, tmp_path):
    write_certificates(tmp_path, [host])
    check_certificates(tmp_path)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [(["../esc"], "not allowed"), (["a/b"], "not allowed"), (["a.pub"], "not allowed"), (["a", "a"], "given twice"),
     (["old"], "old.pub exists already")],
)  # fmt: skip
def test_keys_are_written_into_their_folder_and_over_nothing(names, sentence, tmp_path):
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / "old.pub").write_text("old")
    with pytest.raises(InputError, match=sentence):
        write_keys(folder, names)
    assert [path.name for path in folder.iterdir()] == ["old.pub"]
    assert (folder / "old.pub").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]


@pytest.mark.parametrize("words", [["certs", "x.toml"], ["keys", "x.toml", "a"]])
def test_a_file_in_the_place_of_a_folder_is_named(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.toml").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["foogd", "flower", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "x.toml cannot be a folder: x.toml is a file; choose another folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ca.crt", "server.key"])
def test_a_server_needs_all_three_files(name, tmp_path, monkeypatch, capsys):
    write_certificates(tmp_path / "certs", ["127.0.0.1"])
    (tmp_path / "certs" / name).unlink()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("foogd.cli.flower.become", lambda command, env: None)
    monkeypatch.setattr(sys, "argv", ["foogd", "flower", "serve", "--certs", "certs"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert f"certs/{name} is not a file" in capsys.readouterr().err


def test_a_server_that_comes_later_is_waited_for():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(InputError, match=f"no server answers at {address}"):
            wait_for_server(address, 0.1)
        assert time.monotonic() - began < 5
        later = threading.Timer(0.3, server.listen)
        later.start()
        wait_for_server(address, 30)
        later.join()


@pytest.mark.parametrize("words", [("submit", "app", "--insecure"), ("register", "a.pub", "--ca", "ca.crt")])
def test_commands_wait_for_the_server_before_they_talk_to_it(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("foogd.flower.processes.WAIT_FOR_SERVER", 0.1)
    monkeypatch.setattr(sys, "argv", ["foogd", "flower", "init", "app"])
    main()
    for name in ("a.pub", "ca.crt"):
        Path(name).write_text("")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))  # nobody listens there
        monkeypatch.setattr(sys, "argv", ["foogd", "flower", *words, "--address", f"127.0.0.1:{one.getsockname()[1]}"])
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 2
    assert "no server answers" in capsys.readouterr().err
