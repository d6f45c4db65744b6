"""Flower's own commands, started with what `foogd` knows about them: no telemetry, nothing installed at run time."""

from __future__ import annotations

import importlib.util
import ipaddress
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..core.errors import InputError

CERTIFICATES = {"ca-certfile": "ca.crt", "certfile": "server.crt", "keyfile": "server.key"}  # Flower's option: file
WAIT_FOR_SERVER = 60.0  # seconds: a server that was started just now takes some to listen


def require_flower() -> None:
    """Complain in one line where Flower is not installed."""
    if importlib.util.find_spec("flwr") is None:
        raise InputError('Flower is not installed: pip install "foogd[flower]"')


def split_address(text: str) -> tuple[str, int]:
    """HOST:PORT, as in 127.0.0.1:8000 or [::1]:8000."""
    host, separator, port = text.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"the address {text!r} is not allowed: it must be HOST:PORT, such as 127.0.0.1:8000")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_security(address: str, *, insecure: bool, certificate: Path | None) -> None:
    """Without TLS only on this machine; with it the certificate must be there."""
    host, _ = split_address(address)
    if insecure and certificate is not None:
        raise InputError("--insecure and a certificate exclude each other: leave one of them out")
    if insecure and not is_loopback(host):
        raise InputError(f"--insecure is for 127.0.0.1 only, not for {host}: make certificates with foogd flower certs")
    if not insecure and certificate is None:
        raise InputError("choose --certs DIR (see foogd flower certs), or --insecure for trials on this machine")
    if certificate is not None and not certificate.is_file():
        raise InputError(f"{certificate} is not a file: make certificates with foogd flower certs")


def check_certificates(folder: Path) -> None:
    """All that a server with TLS reads must be there before it starts."""
    for name in CERTIFICATES.values():
        if not (folder / name).is_file():
            raise InputError(f"{folder / name} is not a file: make certificates with foogd flower certs")


def wait_for_server(address: str, seconds: float | None = None) -> None:
    """Return as soon as someone listens at an address."""
    host, port = split_address(address)
    limit = WAIT_FOR_SERVER if seconds is None else seconds
    end = time.monotonic() + limit
    while True:
        try:
            socket.create_connection((host, port), timeout=max(1.0, min(5.0, limit))).close()
            return
        except OSError as error:
            if time.monotonic() >= end:
                raise InputError(
                    f"no server answers at {address} ({error}): start one with foogd flower serve"
                ) from None
        time.sleep(min(0.5, max(0.01, end - time.monotonic())))


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def environment(home: Path) -> dict[str, str]:
    """The environment of Flower's processes: its files below `home`, its commands found, nothing sent to its makers."""
    commands = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "FLWR_HOME": str(home.resolve()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": f"{commands}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def become(command: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Go on as a small process that runs a command until it is stopped, and ends the command's children with it."""
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, str(Path(__file__).with_name("supervise.py")), *command], dict(env))


def superlink_command(address: str, *, state: Path, certificates: Path | None, known_nodes_only: bool) -> list[str]:
    """The SuperLink, with its list of nodes and runs in a file below `state`."""
    host, port = split_address(address)
    command = ["flower-superlink", "--host", host, "--port", str(port), "--database", str(state / "superlink.db")]
    command.append("--disable-runtime-dependency-installation")
    if certificates is None:
        command.append("--insecure")
    else:
        for option, name in CERTIFICATES.items():
            command += [f"--ssl-{option}", str(certificates / name)]
    if known_nodes_only:
        command.append("--enable-supernode-auth")
    return command


def supernode_command(
    address: str, *, settings: Mapping[str, str | int], authority: Path | None, key: Path | None, port: int
) -> list[str]:
    """A SuperNode with its node configuration; it listens for its own processes on this machine only."""
    for name, value in settings.items():
        if isinstance(value, str) and set(value) & set("\"'\\\n"):
            raise InputError(f"{name} is {value!r}: quotes and backslashes are not allowed here")
    words = " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
    command = ["flower-supernode", "--superlink", address, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--node-config", words]
    command += ["--insecure"] if authority is None else ["--root-certificates", str(authority)]
    return [*command, *(["--auth-supernode-private-key", str(key)] if key is not None else ())]


def connection(address: str, authority: Path | None) -> str:
    """The configuration by which Flower's command line finds a SuperLink."""
    safety = "insecure = true" if authority is None else f"root-certificates = {json.dumps(str(authority.resolve()))}"
    return f'[superlink]\ndefault = "foogd"\n\n[superlink.foogd]\naddress = {json.dumps(address)}\n{safety}\n'


def follow(words: Sequence[str], address: str, authority: Path | None) -> str:
    """Start a run, show its log until it ends, and return its number."""
    number = ""
    with tempfile.TemporaryDirectory(prefix="foogd-flower-") as home:
        (Path(home) / "config.toml").write_text(connection(address, authority))
        env = {**environment(Path(home)), "PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(["flwr", *words], env=env, text=True, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            for line in child.stdout:
                print(line, end="", flush=True)
                found = re.search(r"started run (\d+)", line)
                number = found.group(1) if found else number
    if not number:
        raise InputError(f"the run was not started: the server at {address} did not take it")
    return number


def flwr(
    words: Sequence[str], address: str, authority: Path | None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Flower's command line against one SuperLink."""
    with tempfile.TemporaryDirectory(prefix="foogd-flower-") as home:
        (Path(home) / "config.toml").write_text(connection(address, authority))
        return subprocess.run(["flwr", *words], env=environment(Path(home)), text=True, check=False, **options)
