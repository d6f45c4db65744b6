"""The parts of a run on Flower one by one: messages, what a node keeps, who is who, addresses, files for Flower."""

import json
import stat
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason='needs pip install "foogd[flower]"')

from foogd import Config, ImageStore
from foogd.cli import main
from foogd.core.errors import InputError
from foogd.core.flat import Layout
from foogd.core.types import ClientState, Missing, Update
from foogd.data.synthetic import tiny_federation
from foogd.engine.eager import EagerEngine
from foogd.flower.membership import Roster
from foogd.flower.messages import (
    BadMessage,
    Facts,
    pack,
    read_frozen,
    read_server,
    read_sums,
    read_update,
    server_arrays,
    sums_arrays,
    to_record,
    unpack,
    update_arrays,
)
from foogd.flower.node import Kept, Node, with_classes
from foogd.flower.options import read_options, refusal
from foogd.flower.processes import check_security, connection, is_loopback, split_address, supernode_command
from foogd.methods import make_method
from foogd.simulate import initial_state, run_round


def engine_of(method):
    federation = tiny_federation(per_client=20, channels=1)
    return EagerEngine(make_method(method), federation, Config(method=method, device="cpu", backbone="cnn"))


# Messages


@pytest.mark.parametrize("method", ["fedavg+foogd", "fedrod", "foster", "scaffold", "fedbn"])
def test_a_state_and_an_update_survive_a_message_to_the_bit(method):
    engine = engine_of(method)
    server = initial_state(engine).server
    about = {"server_round": 3, "frozen_round": 2, "clients": 5}
    arrays, read = unpack(pack(to_record(server_arrays(server, engine.layout, frozen=True)), about))
    frozen = read_frozen(arrays, engine.layout)
    found = read_server(arrays, read, engine.layout, frozen)
    assert torch.equal(found.shared, server.shared)
    assert torch.equal(found.frozen, server.frozen)
    assert found.round == 3
    assert found.extra.keys() == server.extra.keys()
    assert all(torch.equal(found.extra[name], value) for name, value in server.extra.items())
    update = Update(
        1, 7.0, torch.randn_like(server.shared), {"more": torch.randn(2, 3), "count": torch.tensor(4)},
        {name: value + 3 for name, value in server.integers.items()}, {"model": 0.5},
    )  # fmt: skip
    sent = pack(to_record(update_arrays(update, engine.layout)), {"weight": 7.0, "losses": {"model": 0.5}})
    back = read_update(*unpack(sent), 1, engine.layout, server)
    assert torch.equal(back.shared, update.shared)
    assert {name: value.dtype for name, value in back.integers.items()} == dict.fromkeys(server.integers, torch.int64)
    assert all(torch.equal(back.integers[name], value) for name, value in update.integers.items())
    assert all(torch.equal(back.extra[name], value) for name, value in update.extra.items())
    assert (back.weight, back.losses, back.client) == (7.0, {"model": 0.5}, 1)


def test_each_net_is_one_array():
    engine = engine_of("fedavg+foogd")
    names = update_arrays(Update(0, 1.0, initial_state(engine).server.shared), engine.layout)
    assert set(names) == {"shared.backbone", "shared.head", "shared.score"}
    assert sum(len(value) for value in names.values()) == engine.layout.shared_size


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda a, b: a.pop("shared.head"), "shared.head is missing"),
        (lambda a, b: a.update({"shared.other": torch.zeros(2)}), "shared.other is of no net"),
        (lambda a, b: a.update({"shared.head": torch.zeros(2)}), r"shape \(2,\)"),
        (lambda a, b: a.update({"shared.head": a["shared.head"].half()}), "float16"),
        (lambda a, b: a.update({next(n for n in a if n.startswith("integers.")): torch.tensor(1.5)}), "integers"),
        (lambda a, b: a.pop(next(n for n in a if n.startswith("integers."))), "is missing, "),
        (lambda a, b: a.update({"integers.more": torch.tensor(1)}), "integers.more"),
        (lambda a, b: b.pop("weight"), "no weight"),
        (lambda a, b: b.update(weight="much"), "no weight"),
        (lambda a, b: b.update(losses={"model": "low"}), "losses"),
    ],
)
def test_an_update_that_does_not_fit_is_bad(change, sentence):
    engine = engine_of("fedavg")
    server = initial_state(engine).server
    arrays = dict(update_arrays(Update(0, 1.0, server.shared, integers=server.integers), engine.layout))
    about = {"weight": 1.0, "losses": {}}
    change(arrays, about)
    with pytest.raises(BadMessage, match=sentence):
        read_update(arrays, about, 0, engine.layout, server)


def test_a_message_that_cannot_be_read_is_bad():
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    with pytest.raises(BadMessage, match="records none"):
        unpack(RecordDict())
    with pytest.raises(BadMessage, match="cannot be read"):
        unpack(RecordDict({"arrays": ArrayRecord(), "about": ConfigRecord({"json": "{"})}))
    broken = ArrayRecord({"shared.head": Array("float32", (3,), "numpy.ndarray", b"no array")})
    with pytest.raises(BadMessage, match="cannot be read"):
        unpack(RecordDict({"arrays": broken, "about": ConfigRecord({"json": "{}"})}))


def test_sums_of_detectors_with_dots_in_their_names_survive():
    names = ("msp", "my.py:fn.one", "gaussian")
    sums = {"my.py:fn.one": [{"a.b": torch.ones(2)}, {"c": torch.zeros(())}], "gaussian": [{"n": torch.tensor(3)}]}
    found = read_sums(sums_arrays(sums, names), names)
    assert found.keys() == sums.keys()
    assert [list(total) for total in found["my.py:fn.one"]] == [["a.b"], ["c"]]


# What a node keeps


def client(value):
    return ClientState(0, torch.full((3,), float(value)), torch.arange(4), torch.ones(2), {"m": torch.tensor([value])})


def test_a_node_goes_back_with_its_server(tmp_path):
    kept = Kept(tmp_path)
    fresh = client(0)
    assert kept.load(fresh, 0) == (fresh, "")
    for round in range(1, 8):
        kept.save(client(round), round)
    assert kept.rounds() == [4, 5, 6, 7]
    assert kept.load(fresh, 6)[0].personal.tolist() == [6.0] * 3
    assert kept.load(fresh, 6)[0].memory["m"].tolist() == [6]
    kept.drop_after(5)
    assert kept.rounds() == [4, 5]
    found, note = kept.load(fresh, 7)
    assert found.personal.tolist() == [5.0] * 3
    assert "of round 5, not 7" in note
    found, note = kept.load(fresh, 2)
    assert found is fresh
    assert "starts afresh" in note
    assert not list(tmp_path.glob("*.draft"))


def test_a_damaged_state_is_named(tmp_path):
    kept = Kept(tmp_path)
    kept.save(client(1), 1)
    (tmp_path / "round-00001.safetensors").write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"round-00001\.safetensors is damaged"):
        kept.load(client(0), 1)


def test_nets_of_the_server_are_kept_once(tmp_path):
    kept = Kept(tmp_path)
    kept.save_frozen(torch.ones(3), 1)
    kept.save_frozen(torch.zeros(3), 2)
    assert kept.frozen(1) is None
    assert torch.equal(kept.frozen(2), torch.zeros(3))


# Nodes


def write_node(folder, store=None):
    (store or tiny_federation(per_client=20, channels=1).train).save(folder / "train.npz")
    return Node.of({"name": "a", "data": str(folder)})


def test_a_node_reads_folders_of_pictures_and_arrays(tmp_path):
    from PIL import Image

    node = write_node(tmp_path)
    assert node.facts().samples == len(ImageStore.load(tmp_path / "train.npz"))
    assert node.part("test") is None
    for name in ("cat", "dog"):
        (tmp_path / f"test/{name}").mkdir(parents=True)
        Image.new("L", (16, 16), 7).save(tmp_path / f"test/{name}/1.png")
    (tmp_path / "out/noise").mkdir(parents=True)
    Image.new("L", (16, 16), 9).save(tmp_path / "out/noise/1.png")
    node.train().save(tmp_path / "out/more.npz")
    assert node.part("test").classes == ("cat", "dog")
    assert list(node.others("out")) == ["more", "noise"]
    assert node.home == Node.of({"name": "a", "data": str(tmp_path)}).home


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"data": "."}, "the node's name is None"),
        ({"name": "a b", "data": "."}, "letters, digits"),
        ({"name": "a", "data": "nowhere"}, "a folder is needed"),
        ({"name": "a", "data": ".", "pixels": "64"}, "a whole number"),
    ],
)
def test_a_node_that_was_started_wrongly_says_so(settings, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=sentence):
        Node.of(settings)
    with pytest.raises(InputError, match="no training images"):
        Node.of({"name": "a", "data": "."}).train()


def test_labels_follow_the_names_of_classes():
    store = ImageStore(torch.zeros(3, 2, 2, 1, dtype=torch.uint8), torch.tensor([0, 1, 1]), ("dog", "cat"))
    assert with_classes(store, ("ape", "cat", "dog"), "x").labels.tolist() == [2, 1, 1]
    with pytest.raises(InputError, match="x has a class 'dog'"):
        with_classes(store, ("cat", "ape"), "x")


# Who is who


def facts(name, home="", **more):
    store = tiny_federation(per_client=20, channels=1).train
    first, second, count = store.channel_sums()
    classes = store.classes or tuple(map(str, range(store.num_classes)))
    counts = tuple(torch.bincount(store.labels).tolist())
    found = Facts(name, home or name, len(store), classes, counts, store.shape, first, second, count)
    return replace(found, **more)


def test_ids_are_places_among_sorted_names_whatever_the_nodes_ids():
    roster = Roster.start({9: facts("b"), 3: facts("c"), 7: facts("a")})
    assert [(member.name, member.node) for member in roster.by_id] == [("a", 7), ("b", 9), ("c", 3)]
    assert roster.join(1, facts("0-new"), [1]) is None
    assert roster.members["0-new"].client == 3
    again = Roster.from_json(json.loads(roster.to_json()))
    assert [member.name for member in again.by_id] == ["a", "b", "c", "0-new"]
    assert again.mean == roster.mean


def test_mean_and_deviation_are_those_of_all_images_together():
    whole = tiny_federation(per_client=20, channels=1)
    stores = [whole.train.select(own) for own in whole.train_indices]
    found = {}
    for number, store in enumerate(stores):
        first, second, count = store.channel_sums()
        found[number] = facts(f"n{number}", first=first, second=second, count=count)
    roster = Roster.start(found)
    assert (roster.mean, roster.std) == (whole.mean, whole.std)


def test_nodes_with_other_classes_are_counted_by_name():
    found = facts("b", classes=("cat", "ape"), class_counts=(3, 1))
    roster = Roster.start({1: facts("a", classes=("dog", "cat"), class_counts=(5, 2)), 2: found})
    assert roster.classes == ("ape", "cat", "dog")
    assert [member.class_counts for member in roster.by_id] == [(0, 2, 5), (1, 3, 0)]


def test_a_client_that_is_missing_is_as_before_the_round():
    """What it was sent may not have arrived, so it counts as not sent."""
    engine = engine_of("foster")

    class Losing:
        def __getattr__(self, name):
            return getattr(engine, name)

        def train(self, server, clients, round):
            for client, update in zip(clients, engine.train(server, clients, round), strict=True):
                yield Missing(1, "gone") if client.id == 1 else update

    state = initial_state(engine)
    result = run_round(Losing(), state, 0)
    assert result.refused == {1: "gone"}
    lost, there = result.state.clients[1], result.state.clients[0]
    assert (lost.holds, lost.counted, there.holds, there.counted) == (-1, 0, 0, 1)
    assert torch.equal(lost.personal, state.clients[1].personal)


def test_black_images_do_not_divide_by_zero():
    assert Roster.start({1: facts("a", first=(0,), second=(0,))}).std == (1 / 255,)


def test_one_name_belongs_to_one_node():
    roster = Roster.start({1: facts("a"), 2: facts("b")})
    assert "two nodes are called 'a'" in roster.join(5, facts("a", home="elsewhere"), [1, 2, 5])
    assert roster.join(5, facts("a"), [1, 2, 5]) is None  # the same folder: it was started again
    assert roster.members["a"].node == 5
    assert roster.join(6, facts("a", home="elsewhere"), [2, 6]) is None  # the old one is gone
    assert "does not fit" in roster.join(7, facts("c", shape=(3, 16, 16)), [7])
    with pytest.raises(InputError, match="two nodes"):
        Roster.start({1: facts("a"), 2: facts("a", home="elsewhere")})


def test_who_fails_rests_for_1_2_4_rounds():
    roster = Roster.start({1: facts("a")})
    asked = []
    for round in range(20):
        if roster.absence(0, round, [1], again=False) is None:
            asked.append(round)
            roster.failed(0, round)
    assert asked == [0, 2, 5, 10, 19]
    assert roster.absence(0, 19, [1], again=True) is None
    roster.served(0)
    assert roster.absence(0, 20, [1], again=False) is None
    assert roster.absence(0, 20, [2], again=True) == "it is not connected"


def test_the_server_knows_counts_and_no_pixel():
    roster = Roster.start({1: facts("a"), 2: facts("b")})
    federation = roster.federation("x")
    assert federation.describe().tolist() == [list(member.class_counts) for member in roster.by_id]
    assert int(federation.train.images.sum()) == 0
    assert federation.train.images.untyped_storage().nbytes() <= 16 * 16


# Settings and commands


def test_what_submit_sends_is_what_the_app_says():
    given = {"method": "fedavg", "clients": 3, "rounds": 4, "min-updates": 2, "detectors": "msp,energy"}
    options, config, _ = read_options(given)
    assert (options.min_updates, config.rounds, config.detectors) == (2, 4, ("msp", "energy"))
    preset = {"lr": 0.3, "foogd": {"score_width": 8}}
    text = json.dumps({"preset": preset, "given": {**given, "method": "fedavg+foogd"}})
    options, config, method = read_options({"preset": "", "rounds": 99, "settings": text})
    assert (options.min_updates, config.rounds, config.lr, method.score_width) == (2, 4, 0.3, 8)


def test_methods_that_need_the_images_of_all_are_named():
    assert refusal(make_method("fedavg")) is None
    assert "images of all clients" in refusal(make_method("fedatol", {"generator": "central"}))


@pytest.mark.parametrize("address", ["127.0.0.1:8000", "localhost:1", "[::1]:80", "127.3.2.1:9"])
def test_loopback_may_be_insecure(address):
    check_security(address, insecure=True, certificate=None)


@pytest.mark.parametrize("address", ["0.0.0.0:8000", "192.168.0.2:80", "example.org:80", "[::]:80"])
def test_other_addresses_may_not(address):
    assert not is_loopback(split_address(address)[0])
    with pytest.raises(InputError, match=r"is for 127\.0\.0\.1 only"):
        check_security(address, insecure=True, certificate=None)


@pytest.mark.parametrize("address", ["8000", "host", "host:", ":80", "host:99999", "host:a"])
def test_an_address_is_a_host_and_a_port(address):
    with pytest.raises(InputError, match="HOST:PORT"):
        split_address(address)


def test_a_connection_is_what_flower_reads(tmp_path):
    found = tomllib.loads(connection("h:1", tmp_path / "ca.crt"))["superlink"]["foogd"]
    assert found == {"address": "h:1", "root-certificates": str(tmp_path / "ca.crt")}
    assert tomllib.loads(connection("h:1", None))["superlink"]["foogd"]["insecure"] is True


def test_a_path_that_flower_would_misread_is_refused():
    with pytest.raises(InputError, match="quotes"):
        supernode_command("h:1", settings={"data": 'a"b'}, authority=None, key=None, port=1)


def command(*words):
    return subprocess.run([sys.executable, "-m", "foogd", "flower", *words], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("serve", "--address", "0.0.0.0:8000", "--insecure"), "--insecure is for 127.0.0.1 only"),
        (("serve",), "choose --certs"),
        (("serve", "--known-nodes", "--insecure"), "--known-nodes needs TLS"),
        (("serve", "--certs", "nowhere"), "nowhere/server.crt is not a file"),
        (("node", "--name", "a", "--data", "nowhere", "--insecure"), "a folder is needed"),
        (("submit", "nowhere", "--insecure"), "foogd flower init"),
        (("split", "demo", "--clients", "0", "--out", "x"), "--clients '0' is not allowed"),
        (("register", "a.pub"), "choose --certs"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(words, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["foogd", "flower", *words])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert sentence in said
    assert said.count("\n") == 1


def test_without_flower_one_line_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["foogd", "flower", "serve", "--insecure"])
    with pytest.raises(SystemExit):
        main()
    assert 'pip install "foogd[flower]"' in capsys.readouterr().err


def test_the_app_that_init_writes_can_be_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["foogd", "flower", "init", str(tmp_path / "app"), "--clients", "5"])
    main()
    content = tomllib.loads((tmp_path / "app/pyproject.toml").read_text())
    options, config, _ = read_options(content["tool"]["flwr"]["app"]["config"])
    assert config.clients == 5
    assert options.preset == "demo"
    assert content["project"]["dependencies"] == []


def test_certificates_are_signed_and_secrets_are_secret(tmp_path):
    from cryptography import x509

    from foogd.flower.certificates import write_certificates, write_keys

    write_certificates(tmp_path, ["127.0.0.1", "fl.example.org"])
    root, leaf = (x509.load_pem_x509_certificate((tmp_path / f"{n}.crt").read_bytes()) for n in ("ca", "server"))
    leaf.verify_directly_issued_by(root)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org"]
    write_keys(tmp_path / "keys", ["a"])
    for secret in ("ca.key", "server.key", "keys/a"):
        assert stat.S_IMODE((tmp_path / secret).stat().st_mode) == 0o600
    for again in (lambda: write_certificates(tmp_path, ["x"]), lambda: write_keys(tmp_path / "keys", ["a"])):
        with pytest.raises(InputError, match="exists already"):
            again()


def test_a_process_that_is_stopped_takes_its_children_along(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    supervise = Path(sys.modules["foogd.flower.options"].__file__).with_name("supervise.py")
    process = subprocess.Popen([sys.executable, str(supervise), sys.executable, str(script)])
    import time

    end = time.monotonic() + 30
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
    child = int((tmp_path / "pid").read_text())
    process.terminate()
    process.wait(timeout=30)
    time.sleep(0.2)
    status = Path(f"/proc/{child}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_net_ranges_tile_the_row_also_with_tied_values():
    nets = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3), "b": torch.nn.Linear(2, 3), "c": torch.nn.Linear(3, 1)})
    nets["b"].weight = nets["a"].weight
    layout = Layout.of(nets, lambda name: False)
    assert layout.net_ranges() == {"a": (0, 9), "b": (9, 12), "c": (12, 16)}
    assert layout.shared_size == 16
