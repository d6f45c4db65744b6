"""Keep what a run has shown under docs/results: its settings, where it ran, its rows but for those of single clients.

python tools/keep_run.py runs/fedavg-5.0-s21 [RUN...]       # writes docs/results/fedavg-5.0-s21/
"""

from __future__ import annotations

import csv
import io
import re
import sys
from pathlib import Path

from foogd.runs import read_rounds, read_rows, write_atomic

KEPT = ("round", "scope", "dataset", "split", "corruption", "severity", "detector", "metric", "value", "weight")


RESULTS = Path(__file__).parent.parent / "docs" / "results"


def main(folders: list[str]) -> None:
    for name in folders:
        folder = Path(name)
        place = RESULTS / folder.name
        # Where the data lay is of one machine, and no setting of the run.
        config = re.sub(r"(?m)^data_root = .*$", 'data_root = "data"', (folder / "config.toml").read_text())
        write_atomic(place / "config.toml", config.encode())
        write_atomic(place / "environment.json", (folder / "environment.json").read_bytes())
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(KEPT)
        for row in read_rows(folder):
            if row.scope != "client":
                values = row.as_dict() | {"value": round(row.value, 6)}
                writer.writerow(["" if values[key] is None else values[key] for key in KEPT])
        write_atomic(place / "rows.csv", text.getvalue().encode())
        lines = read_rounds(folder)
        groups = sorted({group for line in lines for group in line["losses"]})  # not all learn in every round
        rounds = [",".join(["round", "seconds", *groups])]
        for line in lines:
            losses = [f"{line['losses'][group]:.4f}" if group in line["losses"] else "" for group in groups]
            rounds.append(",".join([str(line["round"]), f"{line['seconds']:.2f}", *losses]))
        write_atomic(place / "rounds.csv", ("\n".join(rounds) + "\n").encode())


if __name__ == "__main__":
    main(sys.argv[1:])
