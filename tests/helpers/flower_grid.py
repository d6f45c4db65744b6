"""A Flower grid in memory: messages go to the real functions of the nodes, in this process."""

import time
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from foogd.flower.client_app import app
from foogd.flower.options import read_options
from foogd.flower.split import write_shards
from foogd.presets.loader import parse_toml

DATA = """
from foogd.data.synthetic import tiny_federation

def inside(root):
    return tiny_federation(per_client=40, channels=1).train

def outside(root):
    return tiny_federation(per_client=40, channels=1).tests[-1].store
"""

SETTINGS = """
data = "tiny.py:inside"
out = ["tiny.py:outside"]
corruptions = ["brightness"]
severities = [3]
clients = 3
alpha = 5.0
rounds = 2
batch_size = 16
lr = 0.05
device = "cpu"
detectors = ["msp", "energy", "score_norm", "gaussian", "knn", "react"]
[foogd]
score_width = 16
"""


class MemoryGrid(Grid):
    """Nodes by id: Flower's node configuration each. `behave[name]` changes or loses an answer of a node."""

    def __init__(self, nodes):
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # as in a ServerApp's process
        self.nodes = dict(nodes)
        self.behave = {}
        self.sent = []  # (name, kind, round) of each message
        self._replies = {}

    def set_run(self, run):
        pass

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *arguments, **more):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        names = []
        for message in messages:
            name = f"message-{len(self._replies)}-{message.metadata.dst_node_id}"
            message.metadata.__dict__["_message_id"] = name
            names.append(name)
            self._replies[name] = self._answer(message)
        return names

    def _answer(self, message):
        config = self.nodes[message.metadata.dst_node_id]
        kind, round = message.metadata.message_type, message.metadata.group_id
        self.sent.append((config["name"], kind, round))
        context = Context(0, message.metadata.dst_node_id, dict(config), RecordDict(), {})

        def answer():
            return app(message, context)

        behave = self.behave.get(config["name"])
        try:
            return answer() if behave is None else behave(message, answer)
        except Exception as error:  # as Flower does: the server gets an error for an answer
            return Message(Error(1, f"{type(error)}:<'{error}'>"), reply_to=message)

    def pull_messages(self, message_ids):
        found = [self._replies.pop(name) for name in list(message_ids) if self._replies.get(name) is not None]
        if not found:
            time.sleep(0.01)
        return found


def make_nodes(folder, **overrides):
    """The folders of three nodes with the images of the simulator's three clients, and a grid of them."""
    preset = parse_toml(SETTINGS.encode(), "settings")
    _, config, _ = read_options({**{k: v for k, v in preset.items() if k != "foogd"}, "score_width": 16, **overrides})
    places = write_shards(config, Path(folder))
    return MemoryGrid({100 + n: {"name": place.name, "data": str(place)} for n, place in enumerate(places)})
