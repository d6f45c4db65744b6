"""Shared fixtures: a small federation, and one thread so that timings and bits do not depend on the machine."""

import os
import sys
from dataclasses import replace

import pytest
import torch

from foogd import Config
from foogd.data.synthetic import tiny_federation

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for processes that tests start


@pytest.fixture(scope="session")
def federation():
    return tiny_federation()


@pytest.fixture
def config():
    return Config(rounds=2, local_epochs=1, batch_size=16, lr=0.05, device="cpu")


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(0)


@pytest.fixture
def with_train_indices():
    """A federation with other training indices for its clients."""

    def change(federation, indices):
        return replace(federation, train_indices=tuple(indices))

    return change


@pytest.fixture
def foogd(monkeypatch, capsys):
    """The command in this process: exit code, what it printed, what it complained about."""
    from foogd.cli import main  # not above: the tests of the core run where the command line cannot

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["foogd", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return call
