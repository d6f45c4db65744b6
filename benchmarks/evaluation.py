"""How long a test of FOOGD takes with the score network asked once about the same features, and as often as asked.

python benchmarks/evaluation.py     # prints seconds of CPU of both ways in one run, and their ratio
"""

from __future__ import annotations

import time
from contextlib import contextmanager

import torch

from foogd import FOOGD, AnchoredFOOGD, FedAvg
from foogd.detectors.neighbours import nearest
from foogd.detectors.registry import DETECTORS
from foogd.engine.eager import EagerEngine
from foogd.evaluation.evaluator import Evaluator
from foogd.presets.loader import read_preset, resolve
from foogd.runs import make_federation
from foogd.simulate import initial_state


@contextmanager
def asking_each_time():
    """Every detector asks the score network for itself."""
    remembering = Evaluator._remembering
    Evaluator._remembering = lambda self, readout: readout
    try:
        yield
    finally:
        Evaluator._remembering = remembering


def seconds(engine, state):
    evaluator = Evaluator(engine, DETECTORS)
    start = time.process_time()
    found = evaluator.evaluation(state)
    return time.process_time() - start, found.rows


def main():
    torch.set_num_threads(1)
    config, _ = resolve(read_preset("demo"), {"clients": 10, "device": "cpu"})
    federation = make_federation(config)
    for method in (FOOGD(FedAvg()), AnchoredFOOGD(FedAvg())):
        engine = EagerEngine(method, federation, config)
        state = initial_state(engine)
        once, rows = seconds(engine, state)
        with asking_each_time():
            each, before = seconds(engine, state)
        assert [row.value for row in rows] == [row.value for row in before], "the rows must be the same to the bit"
        name = type(method).__name__
        print(f"{name}: {once:.1f} s of CPU, {each:.1f} s with every detector asking; ratio {each / once:.2f}")
    u, bank = torch.randn(2000, 128), torch.randn(2000, 128)
    start = time.process_time()
    nearest(u, bank, 50)
    print(f"KNN: {time.process_time() - start:.2f} s for 2,000 images and 2,000 features")


if __name__ == "__main__":
    main()
