"""One recorded local step on one slot: milliseconds, and where the GPU spends them, kernel by kernel.

python benchmarks/gpu_step.py

Sizes as in gpu_round.py. The profile is of three steps.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from gpu_round import config_of, federation_of

from foogd.engine.graph import Captured, GraphEngine, Slot
from foogd.methods import make_method
from foogd.simulate import initial_state


def replay(slot: Slot, captured: Captured, count: int) -> float:
    """Seconds of so many steps."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    with slot.on():
        slot.step.zero_()
        for _ in range(count):
            captured.replay()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a GPU, and torch finds none here")
    federation = federation_of(5.0, 10, 50_000)
    for name in ("fedavg", "fedavg+foogd"):
        engine = GraphEngine(make_method(name), federation, config_of(name, precision="bf16"), slots=1)
        state = initial_state(engine)
        engine._prepare(state.server, state.clients, 0)
        [slot] = engine._slots
        [captured] = slot._graphs.values()
        replay(slot, captured, 10)
        print(f"{name}: {replay(slot, captured, 100) * 10:.2f} ms a step", flush=True)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            replay(slot, captured, 3)
        print(found.key_averages().table(sort_by="cuda_time_total", row_limit=28, max_name_column_width=90), flush=True)


if __name__ == "__main__":
    main()
