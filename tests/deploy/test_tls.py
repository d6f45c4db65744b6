"""TLS with registered node keys: who is known and trusts the right authority takes part, nobody else."""

import subprocess

import pytest
from deployment import FOOGD, Deployment

from foogd.flower.processes import free_port
from foogd.runs.files import read_rounds


def foogd(folder, *words):
    done = subprocess.run([str(FOOGD), "flower", *words], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def secured(folder):
    """A server with TLS that lets in the nodes a and b only."""
    foogd(folder, "certs", "certs")
    foogd(folder, "certs", "other-certs")
    foogd(folder, "keys", "keys", "a", "b", "stranger")
    found = Deployment(
        folder,
        f"127.0.0.1:{free_port()}",
        server=("--certs", "certs", "--known-nodes", "--state", "tls-server"),
        node=("--ca", "certs/ca.crt"),
    )
    try:
        found.serve()
        yield found
    finally:
        found.close()


def test_only_registered_keys_and_the_right_authority_take_part(secured, folder):
    ca = ("--ca", "certs/ca.crt")
    foogd(folder, "register", "keys/a.pub", "keys/b.pub", "--address", secured.address, *ca)
    stranger = secured.node("stranger", folder / "shards-3/node-2", "--key", "keys/stranger")
    for name, number in (("a", 0), ("b", 1)):
        secured.node(name, folder / f"shards-3/node-{number}", "--key", f"keys/{name}")
    deceived = Deployment(folder, secured.address, node=("--ca", "other-certs/ca.crt", "--key", "keys/b"))
    deceived.node("deceived", folder / "shards-3/node-2")
    try:
        settings = {"run_dir": "tls", "clients": 2, "rounds": 1, "evaluate": "none"}
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        done = secured.submit(folder / "app", *words, security=ca)
        assert done.returncode == 0, done.stdout + done.stderr + secured.logs()
        assert stranger.wait(timeout=120) != 0
        assert "certificate" in (folder / "deceived.log").read_text().lower()
    finally:
        deceived.close()
    secured.running.pop("stranger")
    lines = read_rounds(folder / "tls")
    assert [line["participants"] for line in lines] == [[0, 1]]
    assert lines[0]["refused"] == {}
    wrong = secured.submit(folder / "app", *words, security=("--ca", "other-certs/ca.crt"), seconds=120)
    assert wrong.returncode == 2
    assert "was not started" in wrong.stderr
