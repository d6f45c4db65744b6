"""Write docs/methods.md from the code: what each method adds, what travels, what stays, what it costs, its source.

python tools/methods_page.py          writes the page
python tools/methods_page.py --check  fails where the page is not what the code says
"""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from pathlib import Path

from foogd import Config, simulate
from foogd.cli import summary_of, sums_of
from foogd.data.synthetic import tiny_federation
from foogd.detect import DETECTORS
from foogd.flower.options import on_flower
from foogd.methods import FOOGD, METHODS, make_method, method_names
from foogd.report import Table

PAGE = Path(__file__).parent.parent / "docs" / "methods.md"
HEAD = """# Methods and detectors

This page is made from the code by `python tools/methods_page.py`; a test compares the two.

A method decides how clients train, a detector decides what is OUT. They are two axes: every method works with every
detector, but `score_norm` needs a score network, which `+foogd` adds. Any method takes `+foogd`, and one with the
setting `views` takes `+aug`.

## Methods

Bytes are measured, not estimated: one participant in its second round, for WideResNet-40-2 on 32x32 colour images of
ten classes, as a multiple of FedAvg's model (parameters, running statistics and counters of batch normalisation). What
travels only once, in the first round, stands in the column `once`.
"""
BETWEEN = """
`foogd methods` prints this table on the screen, with the settings. Someone whom the federation does not know has no
private part: a generic model answers, with the shared head or the mean of the private values.

## Settings

`--set key=value`; the defaults are the paper's where it prints them.
"""
DETECTORS_HEAD = """
## Detectors

Larger always means more OUT. Those that must be fitted are fitted once after training, on sums over the clients'
training features; raw features never move.
"""
WHICH = """
**Which one?** All are asked of one trained model, so list several (`detectors`) and look. What we measured, in
[numbers](reproduction.md#in-one-table): with FOOGD on CIFAR-10 and CIFAR-100 `score_near` is the best in the mean of
four OUT sets; `score_energy` and `score_own`, which need none of the client's training features afterwards, come next
(with FedAvg at alpha 0.1 level with `knn`). For OUT that is near (two classes of Fashion-MNIST that nobody had)
`score_norm` is ahead of `score_energy`, `score_near` and `energy` ([results](results.md), [research](research.md),
section 13). On PACS, where the net knows few training images by heart (98 % right, 60 % in the test), the score and
all distances are behind `energy` and `dice`; why is not settled. Without FOOGD no detector was the best everywhere.
New, and not yet asked in whole runs on real images ([research](research.md), section 18): `span_own`, which needs
neither FOOGD nor labels, and `score_span`. On the embedded images they are the best on near and far OUT together; on
features that a strong extra loss has shaped (profile `paper`, FedATOL) `energy` was ahead of the span.
"""
COLUMNS = (
    "method", "what it adds", "what travels", "down", "up", "once", "stays on the client", "extra passes", "on Flower",
    "source",
)  # fmt: skip


def traffic(name: str) -> tuple[float, float, float]:
    """Bytes down and up of one participant in the second round, and what came down once more in the first."""
    whole = tiny_federation(clients=2, classes=10, size=32, per_client=20, outs=False)
    federation = replace(whole, train_indices=tuple(own[:2] for own in whole.train_indices))  # one step is enough
    config = Config(method=name, backbone="wrn40-2", rounds=40, batch_size=2, device="cpu")
    results = simulate(make_method(name), federation, config)
    first, second = next(results), next(results)
    people = len(second.participants)
    return second.bytes_down / people, second.bytes_up / people, (first.bytes_down - second.bytes_down) / people


def times(value: float, unit: float) -> str:
    return f"{value / unit:.5g}" if value > 0 else "–"


def page() -> str:
    unit = traffic("fedavg")[0]
    rows = []
    for name in method_names():
        built = make_method(name)
        down, up, once = traffic(name)
        bytes_ = (times(down, unit), times(up, unit), times(once, unit))
        adds = (f"`{name}`", summary_of(name, built).rstrip("."))
        rows.append((*adds, built.travels, *bytes_, built.keeps, built.passes, on_flower(built), built.paper))
    text = [HEAD, Table("", COLUMNS, tuple(rows)).markdown((0, 1, 2, 6, 7, 8, 9)), BETWEEN]
    for title, cls in (*METHODS.items(), ("+foogd", FOOGD)):
        built = cls()
        known = [item for item in fields(built) if "help" in item.metadata]
        lines = [(item.name, f"`{getattr(built, item.name)}`", item.metadata["help"]) for item in known]
        if lines:
            columns = ("setting", "default", "meaning")
            text += [f"### {title}", "", Table("", columns, tuple(lines)).markdown((0, 1, 2)), ""]
    found = tuple((f"`{n}`", d.description, sums_of(d), d.paper) for n, d in DETECTORS.items())
    headings = ("detector", "score", "what travels, once", "source")
    text += [DETECTORS_HEAD, Table("", headings, found).markdown((0, 1, 2, 3)), WHICH]
    return "\n".join(text)


def main() -> None:
    wanted = page()
    if "--check" in sys.argv[1:]:
        if not PAGE.is_file() or PAGE.read_text() != wanted:
            sys.exit(f"{PAGE.name} is not what the code says: run python tools/methods_page.py")
    else:
        PAGE.write_text(wanted)


if __name__ == "__main__":
    main()
