"""Tables: cells of values by seed, lines and columns, as text, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from .paper import Published

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
        return percent(self.values)


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


JOINT = (("rejected", "in-c"), ("accuracy_accepted", "in"), ("accuracy_accepted", "in-c"), ("auroc_joint", "out"))
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
        return "" if line.seeds[0] in (0, most) else seeds_in_words(line.seeds)

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


def seeds_in_words(counts: Collection[int]) -> str:
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


def percent(values: Sequence[float]) -> str:
    if not values:
        return "–"
    mean = 100 * statistics.fmean(values)
    return f"{mean:.1f}" if len(values) == 1 else f"{mean:.1f} ± {100 * statistics.stdev(values):.1f}"
