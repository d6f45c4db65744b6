"""Flower's processes on this machine for tests: each in a group of its own, stopped by its own id."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FOOGD = Path(sys.executable).with_name("foogd")
CLIENT = """
import os
import time
from pathlib import Path

import torch
from flwr.app import Message
from flwr.clientapp import ClientApp

from foogd.flower.client_app import app as real
from foogd.flower.messages import pack, to_record, unpack

app = ClientApp()


@app.query()
def hello(message, context):
    return real(message, context)


@app.query("survey")
def survey(message, context):
    return real(message, context)


@app.evaluate()
def evaluate(message, context):
    return real(message, context)


@app.train()
def train(message, context):
    # What a node does wrong in which round stands in a file beside its images.
    path = Path(context.node_config["data"]) / f"fault-{message.metadata.group_id}"
    fault, _, more = path.read_text().partition(" ") if path.is_file() else ("", "", "")
    Path(context.node_config["data"], f"begun-{message.metadata.group_id}").write_text(str(os.getpid()))
    if fault == "sleep":
        time.sleep(float(more))
    reply = real(message, context)
    if fault not in ("nan", "shape"):
        return reply
    arrays, about = unpack(reply.content)
    head = arrays["shared.head"]
    arrays["shared.head"] = torch.full_like(head, torch.nan) if fault == "nan" else head[1:]
    return Message(pack(to_record(arrays), about), reply_to=message)
"""


def children_of(pid):
    """All processes below one, the nearest first."""
    found, waiting = [], [pid]
    while waiting:
        parent = waiting.pop(0)
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                own = [int(word) for word in task.read_text().split()]
                found += own
                waiting += own
    return found


class Deployment:
    """A server and its nodes; everything that was started is stopped at the end."""

    def __init__(self, folder, address, server=(), node=("--insecure",)):
        self.folder, self.address = Path(folder), address
        self._server, self._node = list(server) or ["--insecure"], list(node)
        self.running = {}

    def start(self, name, *words):
        """One foogd command in the background, its output in NAME.log."""
        with (self.folder / f"{name}.log").open("a") as log:
            self.running[name] = subprocess.Popen(
                [str(FOOGD), "flower", *words], cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )
        return self.running[name]

    def serve(self):
        self.start("server", "serve", "--address", self.address, *self._server)
        self.wait_for(lambda: self.is_up(), 120, "the server does not answer")

    def is_up(self):
        import socket

        host, _, port = self.address.rpartition(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return True
        return False

    def node(self, name, data, *more):
        return self.start(
            name, "node", "--name", name, "--data", str(data), "--address", self.address, *self._node, *more
        )

    def submit(self, app, *words, seconds=600, security=("--insecure",)):
        """Submit a run and wait until it ends."""
        return subprocess.run(
            [str(FOOGD), "flower", "submit", str(app), "--address", self.address, *security, *words],
            cwd=self.folder, capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip

    def submit_in_background(self, app, *words):
        return self.start("submit", "submit", str(app), "--address", self.address, "--insecure", *words)

    def wait_for(self, happened, seconds, otherwise):
        end = time.monotonic() + seconds
        while not (found := happened()):
            assert time.monotonic() < end, f"{otherwise}\n{self.logs()}"
            time.sleep(0.2)
        return found

    def logs(self):
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def kill(self, name):
        """kill -9, without a chance to tidy up: the process and all below it."""
        process = self.running.pop(name)
        for pid in [process.pid, *children_of(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def stop(self, name):
        """SIGTERM, and after a while more than that."""
        process = self.running.pop(name)
        below = children_of(process.pid)
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        left = [pid for pid in below if self._lives(pid)]
        end = time.monotonic() + 15
        while left and time.monotonic() < end:
            time.sleep(0.2)
            left = [pid for pid in left if self._lives(pid)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left

    @staticmethod
    def _lives(pid):
        try:
            return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return False

    def close(self):
        return {name: left for name in list(self.running) if (left := self.stop(name))}


def write_app(folder, **settings):
    """An app whose nodes do wrong what a file beside their images says."""
    folder.mkdir(parents=True)
    subprocess.run([str(FOOGD), "flower", "init", str(folder)], check=True, capture_output=True)
    path = folder / "pyproject.toml"
    text = path.read_text().replace("foogd.flower.client_app:app", "faulty_client:app")
    lines = []
    for line in text.splitlines():
        key = line.partition(" = ")[0]
        if key in settings:
            value = settings.pop(key)
            line = f"{key} = " + (f'"{value}"' if isinstance(value, str) else str(value).lower())
        lines.append(line)
    assert not settings, f"not in the app: {settings}"
    path.write_text("\n".join(lines) + "\n")
    (folder / "faulty_client.py").write_text(CLIENT)
    return folder
