"""A whole method in one file: FedAvg with smoothed labels.

foogd run demo --method examples/add_a_method.py:FedSmooth --set smoothing=0.2
foogd run demo --method examples/add_a_method.py:FedSmooth+foogd
"""

from dataclasses import dataclass
from typing import final

from torch.nn.functional import cross_entropy

from foogd import Method, setting


@final
@dataclass(frozen=True)
class FedSmooth(Method):
    """FedAvg with smoothed labels."""

    smoothing: float = setting(0.1, "share given to the other classes", ge=0.0, lt=1.0)

    def losses(self, nets, batch, ctx):
        return {"model": cross_entropy(nets["head"](batch.z), batch.y, label_smoothing=self.smoothing)}


if __name__ == "__main__":
    from foogd.testing import check_method

    check_method(FedSmooth())
    print("FedSmooth obeys the contract.")
