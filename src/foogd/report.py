"""From rows to the tables that people read."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

from .data.federation import LEFT_OUT
from .evaluate import Row
from .methods import OURS
from .published import Published, published

NAMES = {
    "msp": "MSP",
    "energy": "energy",
    "max_logit": "max logit",
    "score_norm": "score norm",
    "score_energy": "score + energy",
    "score_own": "score + energy, own classes",
    "score_near": "score + energy, own features",
    "score_span_all": "score + span",
    "score_span": "score + span, own features",
    "ash": "ASH-B",
    "ash_p": "ASH-P",
    "ash_s": "ASH-S",
    "react": "ReAct",
    "dice": "DICE",
    "vim": "ViM",
    "knn": "KNN",
    "mahalanobis": "Mahalanobis",
    "gaussian": "Gaussian",
    "span": "span",
    "span_own": "span, own features",
    "gradnorm": "GradNorm",
}


_ALL_CORRUPTIONS = 19  # kinds of CIFAR-10-C, the four extra ones included


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
class Cell:
    """One number of a table: a share a seed, what is printed for it, and whether it is the best of its column."""

    values: tuple[float, ...]
    published: Published | None = None
    best: bool = False

    @property
    def mean(self) -> float:
        """The mean in %."""
        return 100 * statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """The sample deviation in %; None for one seed."""
        return 100 * statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Measured minus published, in points."""
        return None if self.published is None or not self.values else self.mean - self.published.mean

    def text(self) -> str:
        return _percent(self.values)


@final
@dataclass(frozen=True)
class Measure:
    """What a column of a grid shows."""

    metric: str
    split: str
    dataset: str | None = None
    detected: bool = False  # whether the number depends on the detector
    corruption: str | None = None  # None: the mean over all, and over all severities
    severity: int | None = None

    @property
    def title(self) -> str:
        return _MEASURES[self.metric, self.split]

    @property
    def smaller_is_better(self) -> bool:
        if self.metric == "rejected_calibrated":
            return self.split != "out"
        return self.metric in ("fpr95", "rejected")


_JOINT = (("rejected", "in-c"), ("accuracy_accepted", "in"), ("accuracy_accepted", "in-c"), ("auroc_joint", "out"))
_MEASURES = {
    ("accuracy", "in"): "ACC-IN",
    ("accuracy", "in-c"): "ACC-IN-C",
    ("fpr95", "out"): "FPR95",
    ("auroc", "out"): "AUROC",
    ("aupr", "out"): "AUPR",
    ("rejected", "in-c"): "IN-C rejected",
    ("accuracy_accepted", "in"): "ACC accepted IN",
    ("accuracy_accepted", "in-c"): "ACC accepted IN-C",
    ("auroc_joint", "out"): "AUROC IN+IN-C / OUT",
    ("rejected_calibrated", "in"): "IN rejected",
    ("rejected_calibrated", "in-c"): "IN-C rejected",
    ("rejected_calibrated", "out"): "rejected",
}


@final
@dataclass(frozen=True)
class Line:
    """One line of a grid: whose numbers they are, and the numbers."""

    method: str
    detector: str
    cells: tuple[Cell, ...]
    departs: tuple[str, ...] = ()  # in what it differs from the published settings
    unfinished: str = ""  # how far its runs are, where they are not finished
    withheld: str = ""  # why published numbers do not stand beside it, though its settings have some

    @property
    def seeds(self) -> tuple[int, int]:
        """The fewest and the most seeds that a number of it is over: a seed may lack some, as after NaN."""
        counts = [len(cell.values) for cell in self.cells if cell.values] or [0]
        return min(counts), max(counts)

    @property
    def marks(self) -> tuple[str, ...]:
        """Why its numbers are not to be compared with the published ones."""
        return (*self.departs, *filter(None, [self.withheld, self.unfinished]))

    @property
    def footnote(self) -> str:
        """The marks as the end of a sentence."""
        words = [f"not the published settings: {'; '.join(self.departs)}"] if self.departs else []
        words += [f"no published numbers: {self.withheld}"] if self.withheld else []
        return "; ".join([*words, *([f"not finished: {self.unfinished}"] if self.unfinished else [])])


@final
@dataclass(frozen=True)
class Grid:
    """A table of numbers, in any form that a reader wants."""

    title: str
    columns: tuple[Measure, ...]
    lines: tuple[Line, ...]
    scope: str = "weighted"

    @property
    def blocks(self) -> list[tuple[str, list[int]]]:
        """Neighbouring columns of the same data set."""
        found: list[tuple[str, list[int]]] = []
        for index, column in enumerate(self.columns):
            name = column.dataset or ""
            if not found or found[-1][0] != name:
                found.append((name, []))
            found[-1][1].append(index)
        return found

    @property
    def has_published(self) -> bool:
        return any(cell.published for line in self.lines for cell in line.cells)

    def fewer_seeds(self, line: Line) -> str:
        """The number of a line's seeds where others have more, or some of its own numbers have; else empty."""
        most = max((other.seeds[1] for other in self.lines), default=0)
        return "" if line.seeds[0] in (0, most) else _seeds(line.seeds)

    def _name(self, line: Line, dagger: str) -> str:
        count = self.fewer_seeds(line)
        return f"{line.method}{f' ({count})' if count else ''}{dagger if line.marks else ''}"

    def markdown(self) -> str:
        """A Markdown table; the best in bold, and after a published number how far the measured one is from it."""
        names = [f"{column.title} {column.dataset}" if column.dataset else column.title for column in self.columns]
        rows = [
            (self._name(line, "†"), detector_name(line.detector), *map(_markdown_cell, line.cells))
            for line in self.lines
        ]
        return Table(self.title, ("method", "detector", *names), tuple(rows)).markdown()

    def latex(self) -> str:
        """A table for LaTeX with the package booktabs; the best in bold, published numbers in brackets."""
        heads, rules, at = [], [], 3
        for name, members in self.blocks:
            heads.append(rf"\multicolumn{{{len(members)}}}{{c}}{{{latex_text(name)}}}")
            if name:
                rules.append(rf"\cmidrule(lr){{{at}-{at + len(members) - 1}}}")
            at += len(members)
        arrows = [rf"{latex_text(c.title)} $\{'down' if c.smaller_is_better else 'up'}arrow$" for c in self.columns]
        body, last = [], None
        for line in self.lines:
            name = latex_text(self._name(line, "")) + (r"$^\dagger$" if line.marks else "")
            cells = [_latex_cell(cell) for cell in line.cells]
            if last not in (None, line.method) and self._many_lines_a_method:
                body.append(r"\addlinespace")
            shown = "" if line.method == last else name
            body.append(" & ".join([shown, latex_text(detector_name(line.detector)), *cells]) + r" \\")
            last = line.method
        return "\n".join(
            [
                rf"\begin{{tabular}}{{ll{'r' * len(self.columns)}}}",
                r"\toprule",
                *([" & ".join(["", "", *heads]) + r" \\", *rules] if any(name for name, _ in self.blocks) else []),
                " & ".join(["method", "detector", *arrows]) + r" \\",
                r"\midrule",
                *body,
                r"\bottomrule",
                r"\end{tabular}",
            ]
        )

    @property
    def _many_lines_a_method(self) -> bool:
        return len({line.method for line in self.lines}) < len(self.lines)

    def records(self) -> list[dict[str, Any]]:
        """Every number in long form."""
        return [
            {
                "method": line.method,
                "detector": line.detector if column.detected else "",
                "split": column.split,
                "dataset": column.dataset or "",
                "metric": column.metric,
                "scope": self.scope,
                "corruption": column.corruption or "",
                "severity": "" if column.severity is None else column.severity,
                "mean": round(cell.mean, 4),
                "deviation": "" if cell.deviation is None else round(cell.deviation, 4),
                "seeds": len(cell.values),
                "best": int(cell.best),
                "published": "" if cell.published is None else cell.published.mean,
                "published_deviation": "" if cell.published is None else _or_empty(cell.published.deviation),
                "difference": "" if cell.difference is None else round(cell.difference, 4),
                "departs": "; ".join(line.marks) if cell.published or line.unfinished or line.withheld else "",
            }
            for line in self.lines
            for column, cell in zip(self.columns, line.cells, strict=True)
            if cell.values
        ]


def _seeds(counts: Collection[int]) -> str:
    """How many seeds numbers are over, in words."""
    low, high = min(counts), max(counts)
    return f"{high if low == high else f'{low} to {high}'} seed{'' if high == 1 else 's'}"


def _or_empty(value: float | None) -> float | str:
    return "" if value is None else value


def to_csv(grids: Iterable[tuple[str, Grid]]) -> str:
    """All numbers of titled grids as one CSV file in long form; a number that stands in two grids comes once."""
    lines = [{"setting": title, **record} for title, grid in grids for record in grid.records()]
    once = {tuple(line[key] for key in _IDENTITY): line for line in reversed(lines)}
    text = io.StringIO()
    if lines:
        writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(reversed(once.values()))
    return text.getvalue()


_IDENTITY = ("setting", "method", "detector", "split", "dataset", "metric", "scope", "corruption", "severity")


def latex_text(text: str) -> str:
    """Text in which LaTeX finds nothing to obey."""
    special = {**{c: f"\\{c}" for c in "&%$#_{}"}, "\\": r"\textbackslash{}", "~": r"\textasciitilde{}",
               "^": r"\textasciicircum{}", "±": r"$\pm$", "λ": r"$\lambda$"}  # fmt: skip
    return "".join(special.get(character, character) for character in text)


def _latex_cell(cell: Cell) -> str:
    if not cell.values:
        return "--"
    number = f"{cell.mean:.1f}"  # as the best is decided
    number = rf"\textbf{{{number}}}" if cell.best else number
    number += "" if cell.deviation is None else rf"\,{{\scriptsize$\pm${cell.deviation:.1f}}}"
    return number + ("" if cell.published is None else rf" {{\scriptsize({cell.published.mean:.1f})}}")


def _markdown_cell(cell: Cell) -> str:
    text = f"**{cell.text()}**" if cell.best else cell.text()
    if cell.published is None or cell.difference is None:
        return text
    return f"{text} ({cell.published.mean:.1f}, {signed(cell.difference)})"


def signed(points: float) -> str:
    """A difference with its sign, and with no sign where it rounds to 0."""
    text = f"{points:+.1f}"
    return "0.0" if float(text) == 0 else text.replace("-", "−")


def detector_name(detector: str) -> str:
    """A detector's name for people; of a file with its full path, the name of the file is enough."""
    if ".py:" in detector and Path(detector).is_absolute():
        return Path(detector).name
    return NAMES.get(detector, detector) or "–"


def reported_detector(method: str) -> str:
    """The detector that the paper reports a method with: the score norm for FOOGD, MSP for all others."""
    name = method.replace(f" ({OURS})", "").partition(",")[0]
    return "score_norm" if name.endswith("+foogd") else "msp"


def paper_detector(method: str, known: Sequence[str]) -> str | None:
    """The detector that the paper reports a method with, or the first that is known where that one is not."""
    wanted = reported_detector(method)
    return wanted if wanted in known else next(iter(known), None)


def mark_best(columns: Sequence[Measure], lines: Sequence[Line]) -> tuple[Line, ...]:
    """The lines with the best number of each column marked; numbers that look the same are equally good.

    What is not finished is no better than what is.
    """
    best: list[str | None] = []
    ready = [line for line in lines if not line.unfinished] or lines
    for index, column in enumerate(columns):
        found = {line.cells[index].mean for line in ready if line.cells[index].values}
        choose: Callable[[Iterable[float]], float] = min if column.smaller_is_better else max
        best.append(f"{choose(found):.1f}" if len(lines) > 1 and found else None)
    return tuple(
        replace(
            line,
            cells=tuple(
                replace(cell, best=line in ready and bool(cell.values) and f"{cell.mean:.1f}" == best[index])
                for index, cell in enumerate(line.cells)
            ),
        )
        for line in lines
    )


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
            lines += found or [((method, _percent([])), [*accuracies, *([] for _ in columns[4:])])]
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
        return [Measure(metric, split, detected=True) for metric, split in _JOINT if (metric, split) in known]

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
        rows = tuple((*names, *map(_percent, numbers)) for names, numbers in lines)
        return Table(f"{before}{title}{after}", tuple(columns), rows)

    def _title(self, scope: str, numbers: Iterable[Sequence[float]]) -> str:
        """What the numbers of a table are, and over how many seeds."""
        counts = {len(values) for values in numbers if values} or {len(self.seeds())}
        seeds = f", mean ± deviation over {_seeds(counts)}" if max(counts) > 1 else ""
        return f"in %, {scope} over clients{seeds}"


_Numbers = tuple[tuple[str, ...], Sequence[Sequence[float]]]  # whose a line of a table is, and its values, one a seed


def _percent(values: Sequence[float]) -> str:
    if not values:
        return "–"
    mean = 100 * statistics.fmean(values)
    return f"{mean:.1f}" if len(values) == 1 else f"{mean:.1f} ± {100 * statistics.stdev(values):.1f}"
