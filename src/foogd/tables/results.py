"""From rows to the tables that people read."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

from ..data.federation import LEFT_OUT
from ..evaluation.rows import Row
from ..methods import OURS
from .grid import JOINT, Cell, Grid, Line, Measure, Table, detector_name, mark_best, percent, seeds_in_words
from .paper import published

_ALL_CORRUPTIONS = 19  # kinds of CIFAR-10-C, the four extra ones included


def reported_detector(method: str) -> str:
    """The detector that the paper reports a method with: the score norm for FOOGD, MSP for all others."""
    name = method.replace(f" ({OURS})", "").partition(",")[0]
    return "score_norm" if name.endswith("+foogd") else "msp"


def paper_detector(method: str, known: Sequence[str]) -> str | None:
    """The detector that the paper reports a method with, or the first that is known where that one is not."""
    wanted = reported_detector(method)
    return wanted if wanted in known else next(iter(known), None)


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

    @cached_property
    def known_detectors(self) -> dict[str, list[str]]:
        """The detectors that each method has numbers of."""
        found: dict[str, dict[str, None]] = {}
        for method, _, _, _, detector in self._index:
            if detector:
                found.setdefault(method, {})[detector] = None
        return {method: list(names) for method, names in found.items()}

    def rows_of(
        self, method: str, metric: str, split: str, scope: str = "weighted", detector: str | None = None
    ) -> Sequence[Row]:
        """The rows about one thing, of all test sets and seeds."""
        return self._index.get((method, metric, split, scope, detector), ())

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Report:
        return cls(tuple(rows))

    def last_round(self) -> Report:
        """Only the rows of each run's last evaluated round."""
        last: dict[str, int] = {}
        for row in self.rows:
            last[row.run] = max(last.get(row.run, 0), row.round)
        return Report(tuple(row for row in self.rows if row.round == last[row.run]))

    def called(self, name: str) -> Report:
        """The rows with this in the place of the method's name."""
        return Report(tuple(replace(row, method=name) for row in self.rows))

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
        dataset: str | None = None, corruption: str | None = None, severity: int | None = None,
    ) -> list[float]:  # fmt: skip
        """One value a seed: the mean over the test sets that fit (all corruptions and severities of IN-C)."""
        by_seed: dict[int, list[float]] = {}
        for row in self.rows_of(method, metric, split, scope, detector):
            if (
                dataset in (None, row.dataset)
                and corruption in (None, row.corruption)
                and severity in (None, row.severity)
            ):
                by_seed.setdefault(row.seed, []).append(row.value)
        return [statistics.fmean(by_seed[seed]) for seed in sorted(by_seed)]

    def headline(self, scope: str = "weighted") -> Table:
        """ACC-IN, ACC-IN-C, and FPR95 and AUROC against each OUT set, a line for each method and detector."""
        sets = self.out_sets()
        columns = ["method", "detector", "ACC-IN", "ACC-IN-C"]
        columns += [f"{metric} {name}" for name in sets for metric in ("FPR95", "AUROC")]
        lines: list[_Numbers] = []
        for method in self.methods():
            accuracies = [
                self.values(method=method, metric="accuracy", split=split, scope=scope) for split in ("in", "in-c")
            ]
            found = []
            for detector in self.detectors():
                numbers = [
                    self.values(method=method, metric=metric, split="out", scope=scope, detector=detector, dataset=name)
                    for name in sets
                    for metric in ("fpr95", "auroc")
                ]
                if any(numbers):
                    found.append(((method, detector_name(detector)), [*accuracies, *numbers]))
            # A method that nothing was detected with still has its accuracies.
            lines += found or [((method, percent([])), [*accuracies, *([] for _ in columns[4:])])]
        return self._table(columns, lines, scope)

    def matrix(self, dataset: str, metric: str, scope: str = "weighted") -> Table:
        """One metric against one OUT set: a line for each method, a column for each detector."""
        detectors = self.detectors()
        lines: list[_Numbers] = []
        for method in self.methods():
            found = [
                self.values(method=method, metric=metric, split="out", scope=scope, detector=name, dataset=dataset)
                for name in detectors
            ]
            lines.append(((method,), found))
        columns = ("method", *(detector_name(name) for name in detectors))
        return self._table(columns, lines, scope, before=f"{metric.upper()} against {dataset}, ")

    def joint(self, scope: str = "weighted") -> Table:
        """Eq. 1 and 2 together: what is rejected where 95 % of IN pass, accuracy on the rest, both against OUT."""
        columns = ("method", "detector", "IN-C rejected", "ACC accepted IN", "ACC accepted IN-C", "AUROC IN+IN-C / OUT")
        lines: list[_Numbers] = []
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
                    lines.append(((method, detector_name(detector)), found))
        return self._table(columns, lines, scope, after=", threshold at 95 % of IN accepted")

    def thresholds(self, scope: str = "weighted") -> Table:
        """What is rejected at the thresholds that 95 % of the images set aside pass; no lines where none were."""
        sets = self.out_sets()
        columns = ("method", "detector", "IN rejected", "IN-C rejected", *(f"{name} rejected" for name in sets))
        lines: list[_Numbers] = []
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
                    lines.append(((method, detector_name(detector)), found))
        return self._table(columns, lines, scope, after=", thresholds of the clients from images set aside")

    def grid(
        self,
        columns: Sequence[Measure],
        chosen: Callable[[str, Sequence[str]], Sequence[str]],
        *,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        departs: Mapping[str, Sequence[str]] | None = None,
        unfinished: Mapping[str, str] | None = None,
        withheld: Mapping[str, str] | None = None,
        scope: str = "weighted",
    ) -> Grid:
        """Numbers of each method with the detectors that `chosen(method, known)` picks, the best of a column marked.

        `settings` of each method finds the published numbers, `departs` says in what its runs differ from those,
        `unfinished` how far they are where they are not finished, `withheld` why published numbers are not shown.
        """
        lines = []
        for method in self.methods():
            for detector in chosen(method, self.known_detectors.get(method, [])) or [""]:
                cells = [
                    self._cell(method, detector, column, (settings or {}).get(method), scope) for column in columns
                ]
                found = any(cell.published for cell in cells)
                why = (withheld or {}).get(method, "") if found else ""
                cells = [replace(cell, published=None) for cell in cells] if why else cells
                other = tuple((departs or {}).get(method, ())) if found and not why else ()
                lines.append(Line(method, detector, tuple(cells), other, (unfinished or {}).get(method, ""), why))
        title = self._title(scope, [cell.values for line in lines for cell in line.cells])
        return Grid(title, tuple(columns), mark_best(columns, lines), scope)

    def _cell(
        self, method: str, detector: str, column: Measure, settings: Mapping[str, Any] | None, scope: str
    ) -> Cell:
        values = self.values(
            method=method, metric=column.metric, split=column.split, scope=scope, dataset=column.dataset,
            detector=(detector or None) if column.detected else None, corruption=column.corruption,
            severity=column.severity,
        )  # fmt: skip
        printed = None
        if settings is not None and values and column.corruption is None:
            printed = published(
                settings, metric=column.metric, split=column.split, dataset=column.dataset or "",
                detector=detector if column.detected else "",
                corruption=self._published_corruption(method) if column.split == "in-c" else "",
            )  # fmt: skip
        return Cell(tuple(values), printed)

    def _published_corruption(self, method: str) -> str:
        """Which published column the mean over a method's IN-C sets stands for."""
        kinds = {row.corruption for row in self.rows_of(method, "accuracy", "in-c")}
        if None in kinds or not kinds or all(str(kind).startswith(LEFT_OUT) for kind in kinds):
            return ""  # no kind of corruption: a domain that was left out, or the mean over those
        if len(kinds) == 1:
            return str(next(iter(kinds)))
        return "all" if len(kinds) == _ALL_CORRUPTIONS else "some"

    def paper_columns(self) -> list[Measure]:
        """ACC-IN and ACC-IN-C, then FPR95 and AUROC against each OUT set."""
        splits = {row.split for row in self.rows if row.metric == "accuracy"}
        columns = [Measure("accuracy", split) for split in ("in", "in-c") if split in splits]
        return columns + [
            Measure(metric, "out", name, detected=True) for name in self.out_sets() for metric in ("fpr95", "auroc")
        ]

    def joint_columns(self) -> list[Measure]:
        """The joint view of Eq. 1 and 2."""
        known = {(row.metric, row.split) for row in self.rows}
        return [Measure(metric, split, detected=True) for metric, split in JOINT if (metric, split) in known]

    def threshold_columns(self) -> list[Measure]:
        """What thresholds from images set aside reject of IN, IN-C and each OUT set; none where none were set aside."""
        metric = "rejected_calibrated"
        known = {(row.split, row.dataset) for row in self.rows if row.metric == metric}
        splits = {split for split, _ in known}
        columns = [Measure(metric, split, detected=True) for split in ("in", "in-c") if split in splits]
        outs = [Measure(metric, "out", name, detected=True) for name in self.out_sets() if ("out", name) in known]
        return columns + outs

    def all_columns(self) -> list[Measure]:
        """Every metric there is, of OUT sets one by one, and accuracy on each corruption and severity too."""
        found = [*self.paper_columns(), *self.joint_columns(), *self.threshold_columns()]
        for row in self.rows:
            found.append(
                Measure(row.metric, row.split, row.dataset if row.split == "out" else None, bool(row.detector))
            )
        for row in self.rows:
            if row.metric == "accuracy" and row.corruption is not None:
                found.append(Measure(row.metric, row.split, None, False, row.corruption, row.severity))
        return list(dict.fromkeys(found))

    def _table(
        self, columns: Sequence[str], lines: Sequence[_Numbers], scope: str, before: str = "", after: str = ""
    ) -> Table:
        """A table of means, with words around what its title says of them."""
        title = self._title(scope, [values for _, numbers in lines for values in numbers])
        rows = tuple((*names, *map(percent, numbers)) for names, numbers in lines)
        return Table(f"{before}{title}{after}", tuple(columns), rows)

    def _title(self, scope: str, numbers: Iterable[Sequence[float]]) -> str:
        """What the numbers of a table are, and over how many seeds."""
        counts = {len(values) for values in numbers if values} or {len(self.seeds())}
        seeds = f", mean ± deviation over {seeds_in_words(counts)}" if max(counts) > 1 else ""
        return f"in %, {scope} over clients{seeds}"


_Numbers = tuple[tuple[str, ...], Sequence[Sequence[float]]]  # whose a line of a table is, and its values, one a seed
