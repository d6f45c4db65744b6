"""From rows to the tables that people read."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

from .evaluate import Row

NAMES = {
    "msp": "MSP",
    "energy": "energy",
    "max_logit": "max logit",
    "score_norm": "score norm",
    "ash": "ASH-B",
    "ash_p": "ASH-P",
    "ash_s": "ASH-S",
    "react": "ReAct",
    "dice": "DICE",
    "vim": "ViM",
    "knn": "KNN",
    "mahalanobis": "Mahalanobis",
    "gaussian": "Gaussian",
    "gradnorm": "GradNorm",
}


@final
@dataclass(frozen=True)
class Table:
    """A titled grid of text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self, words: Collection[int] = (0, 1)) -> str:
        """The table in Markdown; the columns of words to the left, all others, of numbers, to the right."""
        align = ["---" if index in words else "---:" for index in range(len(self.columns))]
        lines = [self.columns, tuple(align), *self.rows]
        cells = ([cell.replace("|", r"\|") for cell in line] for line in lines)
        return "\n".join(f"| {' | '.join(line)} |" for line in cells)


@final
@dataclass(frozen=True)
class Report:
    """The rows of one run or of several."""

    rows: tuple[Row, ...]

    @cached_property
    def _index(self) -> dict[tuple[str, str, str, str, str | None], list[Row]]:
        """The rows by what they are about: a table asks a thousand times, and rows are many."""
        index: dict[tuple[str, str, str, str, str | None], list[Row]] = {}
        for row in self.rows:
            index.setdefault((row.method, row.metric, row.split, row.scope, row.detector), []).append(row)
        return index

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Report:
        return cls(tuple(rows))

    def last_round(self) -> Report:
        """Only the rows of each run's last evaluated round."""
        last: dict[str, int] = {}
        for row in self.rows:
            last[row.run] = max(last.get(row.run, 0), row.round)
        return Report(tuple(row for row in self.rows if row.round == last[row.run]))

    def only(self, detectors: Collection[str]) -> Report:
        """Accuracies, and of the detectors these alone."""
        return Report(tuple(row for row in self.rows if row.detector is None or row.detector in detectors))

    def methods(self) -> list[str]:
        return list(dict.fromkeys(row.method for row in self.rows))

    def detectors(self) -> list[str]:
        return list(dict.fromkeys(row.detector for row in self.rows if row.detector))

    def out_sets(self) -> list[str]:
        return list(dict.fromkeys(row.dataset for row in self.rows if row.split == "out"))

    def seeds(self) -> list[int]:
        return sorted({row.seed for row in self.rows})

    def values(
        self, *, method: str, metric: str, split: str, scope: str = "weighted", detector: str | None = None,
        dataset: str | None = None,
    ) -> list[float]:  # fmt: skip
        """One value a seed: the mean over the test sets that fit (all corruptions and severities of IN-C)."""
        by_seed: dict[int, list[float]] = {}
        for row in self._index.get((method, metric, split, scope, detector), ()):
            if dataset in (None, row.dataset):
                by_seed.setdefault(row.seed, []).append(row.value)
        return [statistics.fmean(by_seed[seed]) for seed in sorted(by_seed)]

    def headline(self, scope: str = "weighted") -> Table:
        """ACC-IN, ACC-IN-C, and FPR95 and AUROC against each OUT set, a line for each method and detector."""
        sets = self.out_sets()
        columns = ["method", "detector", "ACC-IN", "ACC-IN-C"]
        columns += [f"{metric} {name}" for name in sets for metric in ("FPR95", "AUROC")]
        lines = []
        for method in self.methods():
            accuracies = [
                _percent(self.values(method=method, metric="accuracy", split=split, scope=scope))
                for split in ("in", "in-c")
            ]
            found = []
            for detector in self.detectors():
                numbers = [
                    self.values(method=method, metric=metric, split="out", scope=scope, detector=detector, dataset=name)
                    for name in sets
                    for metric in ("fpr95", "auroc")
                ]
                if any(numbers):
                    found.append((method, NAMES.get(detector, detector), *accuracies, *map(_percent, numbers)))
            # A method that nothing was detected with still has its accuracies.
            lines += found or [(method, _percent([]), *accuracies, *(_percent([]) for _ in columns[4:]))]
        return Table(self._title(scope), tuple(columns), tuple(lines))

    def matrix(self, dataset: str, metric: str, scope: str = "weighted") -> Table:
        """One metric against one OUT set: a line for each method, a column for each detector."""
        detectors = self.detectors()
        lines = []
        for method in self.methods():
            found = [
                self.values(method=method, metric=metric, split="out", scope=scope, detector=name, dataset=dataset)
                for name in detectors
            ]
            lines.append((method, *map(_percent, found)))
        columns = ("method", *(NAMES.get(name, name) for name in detectors))
        return Table(f"{metric.upper()} against {dataset}, {self._title(scope)}", columns, tuple(lines))

    def joint(self, scope: str = "weighted") -> Table:
        """Eq. 1 and 2 together: what is rejected where 95 % of IN pass, accuracy on the rest, both against OUT."""
        columns = ("method", "detector", "IN-C rejected", "ACC accepted IN", "ACC accepted IN-C", "AUROC IN+IN-C / OUT")
        lines = []
        for method in self.methods():
            for detector in self.detectors():
                found = [
                    self.values(method=method, metric=metric, split=split, scope=scope, detector=detector)
                    for metric, split in (
                        ("rejected", "in-c"),
                        ("accuracy_accepted", "in"),
                        ("accuracy_accepted", "in-c"),
                        ("auroc_joint", "out"),
                    )
                ]
                if any(found):
                    lines.append((method, NAMES.get(detector, detector), *map(_percent, found)))
        return Table(f"{self._title(scope)}, threshold at 95 % of IN accepted", columns, tuple(lines))

    def thresholds(self, scope: str = "weighted") -> Table:
        """What is rejected at the thresholds that 95 % of the images set aside pass; no lines where none were."""
        sets = self.out_sets()
        columns = ("method", "detector", "IN rejected", "IN-C rejected", *(f"{name} rejected" for name in sets))
        lines = []
        for method in self.methods():
            for detector in self.detectors():
                found = [
                    self.values(
                        method=method, metric="rejected_calibrated", split=split, scope=scope, detector=detector,
                        dataset=dataset,
                    )
                    for split, dataset in (("in", None), ("in-c", None), *(("out", name) for name in sets))
                ]  # fmt: skip
                if any(found):
                    lines.append((method, NAMES.get(detector, detector), *map(_percent, found)))
        return Table(f"{self._title(scope)}, thresholds of the clients from images set aside", columns, tuple(lines))

    def _title(self, scope: str) -> str:
        count = len(self.seeds())
        return f"in %, {scope} over clients" + (f", mean ± deviation over {count} seeds" if count > 1 else "")


def _percent(values: Sequence[float]) -> str:
    if not values:
        return "–"
    mean = 100 * statistics.fmean(values)
    return f"{mean:.1f}" if len(values) == 1 else f"{mean:.1f} ± {100 * statistics.stdev(values):.1f}"
