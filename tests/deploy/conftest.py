"""One server and four nodes for several tests; the tests run in the order of the files."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason='needs pip install "foogd[flower]"')

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "helpers"))

from deployment import Deployment, write_app
from flower_grid import DATA, SETTINGS

from foogd.flower.processes import free_port
from foogd.flower.split import write_shards
from foogd.presets.loader import parse_toml, resolve

RUN = SETTINGS.replace("rounds = 2", "rounds = 3").replace(
    'detectors = ["msp", "energy", "score_norm", "gaussian", "knn", "react"]', 'detectors = ["msp", "score_norm"]'
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A working folder with a small data set, the folders of four nodes and an app."""
    place = tmp_path_factory.mktemp("deployment")
    (place / "tiny.py").write_text(DATA)
    text = RUN.replace("tiny.py", str(place / "tiny.py"))
    (place / "tiny.toml").write_text(text)
    for clients in (3, 4):
        config, _ = resolve(parse_toml(text.encode(), "settings"), {"clients": clients})
        write_shards(config, place / f"shards-{clients}")
    write_app(
        place / "app", preset=str(place / "tiny.toml"), data="synthetic", min_updates=1, round_timeout=300.0,
        wait_for_nodes=300.0,
    )  # fmt: skip
    return place


@pytest.fixture(scope="session")
def deployment(folder):
    """A server that any node of this machine may join."""
    found = Deployment(folder, f"127.0.0.1:{free_port()}")
    try:
        found.serve()
        yield found
    finally:
        left = found.close()
    assert not left, f"processes outlived their parents: {left}"
