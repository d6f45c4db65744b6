"""The command line of runs on Flower: `foogd flower init | split | serve | node | submit | certs | keys | register`."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ..core.errors import InputError
from ..flower.options import Options, read_options
from ..flower.processes import (
    become,
    check_certificates,
    check_security,
    environment,
    flwr,
    follow,
    free_port,
    require_flower,
    superlink_command,
    supernode_command,
    wait_for_server,
)
from ..presets.loader import parse_assignments, read_preset, resolve
from ..runs.files import need_folder
from .common import Set, make_app, remark, say, whole_number
from .data import decode

ADDRESS = "127.0.0.1:8000"

flower_app = make_app(
    "flower", "The same methods across machines, on Flower. Example: foogd flower init app", no_args_is_help=True
)

Address = Annotated[str, typer.Option("--address", metavar="HOST:PORT", help="Where the server is.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Without TLS: for trials on this machine only.")]
Authority = Annotated[Path | None, typer.Option("--ca", metavar="FILE", help="Certificate of the authority, ca.crt.")]

APP = """# A Flower app of one file: its code is the installed package foogd, on the server and on every node.
# Submit it with: foogd flower submit {place}
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "foogd-app"
version = "0.1.0"
description = "foogd on Flower"
license = "MIT"
dependencies = []  # leave it empty: what stands here may be installed anew for every run

[tool.flwr.app]
publisher = "foogd"

[tool.flwr.app.components]
serverapp = "foogd.flower.server_app:app"
clientapp = "foogd.flower.client_app:app"

# All settings of `foogd run` may stand here, and those of Flower below. Lists are texts with commas.
[tool.flwr.app.config]
preset = "{preset}"           # what is not said here is as in this preset; or a TOML file on the server
method = "{method}"   # see foogd methods
data = "{data}"           # the name of the data in tables; the images themselves are on the nodes
clients = {clients}                # nodes that must be there before the first round
rounds = 3
participation = 1.0        # share of the nodes that train in a round
seed = 0
eval_every = 0             # evaluate every so many rounds; 0: after the last one only
aggregation = "mean"       # or median, trimmed, "mean,score=median"
update_bound = "auto"      # updates that move the model further are refused: 100 times its length, or a number; 0: none

# of Flower
{options}settings = ""              # foogd flower submit puts here what --set changes
"""


@flower_app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    preset: Annotated[str, typer.Option(help="Preset with the settings that the file does not name.")] = "demo",
    method: Annotated[str, typer.Option(help="Method: a name, see foogd methods.")] = "fedavg+foogd",
    clients: Annotated[str, typer.Option(metavar="N", help="Nodes to wait for.")] = "3",
) -> None:
    """Write a Flower app of one file with its settings explained. Example: foogd flower init app --clients 3"""
    count = whole_number("--clients", clients, 1)
    config, _ = resolve(read_preset(preset), {"method": method})
    path = folder / "pyproject.toml"
    if path.exists():
        raise InputError(f"{path} exists already: choose another folder")
    need_folder(folder, "folder")
    folder.mkdir(parents=True, exist_ok=True)
    known = [item for item in fields(Options) if item.name not in ("preset", "settings")]
    lines = [f"{item.name} = {_toml(item.default)}".ljust(27) + f"# {item.metadata['help']}" for item in known]
    text = APP.format(
        place=folder, preset=preset, method=method, data=config.data, clients=count, options="\n".join(lines) + "\n"
    )
    path.write_text(text)
    say(f"{path} is written; next: foogd flower split {preset} --clients {count} --out shards")


@flower_app.command()
def split(
    preset: Annotated[str, typer.Argument(help="Name of a preset, or a TOML file.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="A new folder.")],
    clients: Annotated[str, typer.Option(metavar="N", help="Number of nodes.")] = "3",
    settings: Set = None,
) -> None:
    """Write folders for nodes from a preset, for trials. Example: foogd flower split demo --clients 3 --out shards"""
    from ..flower.split import write_shards

    overrides = {"corruptions": (), **parse_assignments(settings or [])}
    overrides["clients"] = whole_number("--clients", clients, 1)
    config, _ = resolve(read_preset(preset), overrides)
    need_folder(out)
    for place in write_shards(config, out):
        say(str(place))
    remark(decode(config))


@flower_app.command()
def serve(
    address: Address = ADDRESS,
    insecure: Insecure = False,
    certs: Annotated[Path | None, typer.Option(metavar="DIR", help="With ca.crt, server.crt and server.key.")] = None,
    known_nodes: Annotated[bool, typer.Option("--known-nodes", help="Only nodes with registered keys.")] = False,
    state: Annotated[Path, typer.Option(metavar="DIR", help="Folder of Flower's own files.")] = Path("flower-server"),
) -> None:
    """Start the server (a SuperLink) and wait for runs. Example: foogd flower serve --insecure"""
    require_flower()
    check_security(address, insecure=insecure, certificate=None if certs is None else certs / "server.crt")
    if certs is not None:
        check_certificates(certs)
    if known_nodes and certs is None:
        raise InputError("--known-nodes needs TLS: give --certs DIR")
    need_folder(state, "--state")
    state.mkdir(parents=True, exist_ok=True)
    command = superlink_command(address, state=state, certificates=certs, known_nodes_only=known_nodes)
    become(command, environment(state / "flwr"))


@flower_app.command()
def node(
    name: Annotated[str, typer.Option(help="Name of this node, for good; no other node has it.")],
    data: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the node's own images; see docs/flower.md.")],
    address: Address = ADDRESS,
    insecure: Insecure = False,
    ca: Authority = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="The node's private key.")] = None,
    state: Annotated[Path | None, typer.Option(metavar="DIR", help="What the node keeps; default DATA/state.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    pixels: Annotated[str, typer.Option(metavar="N", help="Bring pictures to this size; 0: as they are.")] = "0",
    port: Annotated[str, typer.Option(metavar="N", help="Local port for the node's processes; 0: a free one.")] = "0",
) -> None:
    """Start a node with its own images. Example: foogd flower node --name a --data shards/node-0 --insecure"""
    require_flower()
    check_security(address, insecure=insecure, certificate=ca)
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device {device!r} is not allowed: use auto, cpu or cuda")
    if key is not None and not key.is_file():
        raise InputError(f"{key} is not a file: make keys with foogd flower keys")
    from ..flower.node import Node

    place = (state or data / "state").resolve()
    settings: dict[str, str | int] = {"name": name, "data": str(data.resolve()), "state": str(place), "device": device}
    settings["pixels"] = whole_number("--pixels", pixels, 0)
    found = Node.of(settings).facts()  # wrong data is found now, not in the first round
    say(f"{name}: {found.samples} training images of {len(found.classes)} classes, {found.shape}")
    local = whole_number("--port", port, 0) or free_port()
    command = supernode_command(address, settings=settings, authority=ca, key=key, port=local)
    become(command, environment(place / "flwr"))


@flower_app.command()
def submit(
    app: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the app; see foogd flower init.")],
    settings: Set = None,
    address: Address = ADDRESS,
    insecure: Insecure = False,
    ca: Authority = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in run_dir.")] = False,
) -> None:
    """Start a run and show its log until it ends. Example: foogd flower submit app --insecure --set rounds=5"""
    require_flower()
    check_security(address, insecure=insecure, certificate=ca)
    given = {**_app_settings(app), **parse_assignments(settings or []), **({"resume": True} if resume else {})}
    read_options(given)  # what is wrong is said here, not in a log of the server
    preset = str(given.pop("preset", ""))
    # Flower lets nobody change a setting that the app does not name: one text holds all, and the preset too.
    text = json.dumps({"preset": read_preset(preset) if preset else {}, "given": given}).replace("'", "\\u0027")
    wait_for_server(address)
    words = ["run", str(app), "foogd", "--stream", "--run-config", f"settings='{text}'"]
    number = follow(words, address, ca)
    done = flwr(["ls", "foogd", "--run-id", number, "--format", "json"], address, ca, capture_output=True)
    try:
        status = str(json.loads(done.stdout)["runs"][0]["status"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise InputError(f"the server at {address} does not say how run {number} ended: is it there?") from None
    if status != "finished:completed":
        raise InputError(f"run {number} ended as {status}; finished rounds are kept: submit again with --resume")


def _app_settings(app: Path) -> dict[str, Any]:
    path = app / "pyproject.toml"
    if not path.is_file():
        raise InputError(f"{path} is not a file: write one with foogd flower init {app}")
    try:
        content = tomllib.loads(path.read_text())
        return dict(content["tool"]["flwr"]["app"]["config"])
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML: {' '.join(str(error).split())}") from None
    except (KeyError, TypeError):
        raise InputError(f"{path} has no table [tool.flwr.app.config]") from None


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return json.dumps(",".join(str(item) for item in value))
    return json.dumps(value)


@flower_app.command()
def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    host: Annotated[list[str] | None, typer.Option(help="Name or address of the server; may be repeated.")] = None,
) -> None:
    """Make an authority and a server certificate, for trials. Example: foogd flower certs certs --host 10.0.0.5"""
    require_flower()
    from ..flower.certificates import write_certificates

    need_folder(folder, "folder")
    write_certificates(folder, host or ["127.0.0.1", "localhost"])
    say(f"{folder}: ca.crt goes to every node and to who submits; server.crt and server.key stay on the server; "
        "ca.key signs, keep it safe")  # fmt: skip


@flower_app.command()
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the keys.")],
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of nodes.")],
) -> None:
    """Make a key pair for each node. Example: foogd flower keys keys hospital-a hospital-b"""
    require_flower()
    from ..flower.certificates import write_keys

    need_folder(folder, "folder")
    for path in write_keys(folder, names):
        say(f"{path.with_suffix('')} goes to its node; register {path} on the server")


@flower_app.command()
def register(
    public: Annotated[list[Path], typer.Argument(metavar="KEY.pub", help="Public keys of nodes.")],
    address: Address = ADDRESS,
    ca: Authority = None,
) -> None:
    """Tell a server with --known-nodes whom it may trust. Example: foogd flower register a.pub --ca certs/ca.crt"""
    require_flower()
    check_security(address, insecure=False, certificate=ca)
    for path in public:
        if not path.is_file():
            raise InputError(f"{path} is not a file: make keys with foogd flower keys")
    wait_for_server(address)
    for path in public:
        done = flwr(["supernode", "register", str(path), "foogd"], address, ca, capture_output=True)
        if done.returncode:
            words = re.sub(r"\x1b\[[0-9;]*m", "", done.stderr + done.stdout)
            raise InputError(f"{path} was not registered: {' '.join(words.split())[:300]}")
        say(f"{path} is registered")
