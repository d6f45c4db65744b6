"""The tables of a sweep."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..evaluation.rows import Row
from ..methods import method_settings, shown_name
from ..runs.files import read_rows
from ..tables.grid import Cell, Table
from ..tables.results import Report
from .scales import RUNS, Plan


def sweep_reports(plan: Plan, out: Path, failed: Iterable[str] = ()) -> dict[str, Report]:
    """The last results of each section, under the names of its lines."""
    lost = set(failed)
    reports: dict[str, Report] = {}
    for section in dict.fromkeys(point.section for point in plan.points):
        rows: list[Row] = []
        for point in plan.points:
            if point.section == section and point.name not in lost:
                name = shown_name(method_settings(plan.resolved(point, out)[1]), point.label)
                rows += Report.of(read_rows(out / RUNS / point.name)).last_round().called(name).rows
        reports[section] = Report.of(rows)
    return reports


def shortened(plan: Plan, reports: Mapping[str, Report], shown: Sequence[str]) -> dict[str, Report]:
    """The reports with these detectors and the user's own alone, where there are more and the sweep chose none."""
    found = {row.detector for report in reports.values() for row in report.rows if row.detector}
    kept = {name for name in found if name in shown or ".py:" in name}
    if plan.about_detectors or not kept or len(found) <= len(shown):
        return dict(reports)
    return {section: report.only(kept) for section, report in reports.items()}


def sweep_tables(reports: Mapping[str, Report]) -> list[Table]:
    """For each section the results, the joint view and, where there are several, the corruptions; then all sections."""
    tables = []
    for section, report in reports.items():
        for table in (report.headline(), report.joint(), _by_corruption(report)):
            if table.rows:
                title = f"{section}: {table.title}" if section else table.title
                tables.append(replace(table, title=title))
    if len(reports) > 1:
        tables += [_overview(reports, split, title) for split, title in (("in", "ACC-IN"), ("in-c", "ACC-IN-C"))]
    return tables


def _by_corruption(report: Report) -> Table:
    """Accuracy on each kind of IN-C, the mean over severities; no lines where there is one kind only."""
    kinds = list(dict.fromkeys(row.corruption for row in report.rows if row.split == "in-c" and row.corruption))
    lines = []
    for kind in kinds if len(kinds) > 1 else ():
        part = Report.of(row for row in report.rows if row.corruption == kind)
        cells = [part.values(method=name, metric="accuracy", split="in-c") for name in report.methods()]
        lines.append((kind, *(Cell(tuple(values)).text() for values in cells)))
    return Table("accuracy by corruption, in %", ("corruption", *report.methods()), tuple(lines))


def _overview(reports: Mapping[str, Report], split: str, title: str) -> Table:
    """One accuracy, a line for each method and a column for each section, and their mean."""
    lines = []
    for method in dict.fromkeys(name for report in reports.values() for name in report.methods()):
        found = [_by_seed(report, method, split) for report in reports.values()]
        alike = all(values.keys() == found[0].keys() for values in found)
        mean = tuple(statistics.fmean(values[seed] for values in found) for seed in found[0]) if alike else ()
        lines.append((method, *(Cell(tuple(values.values())).text() for values in found), Cell(mean).text()))
    return Table(f"{title}, in %", ("method", *reports, "mean"), tuple(lines))


def _by_seed(report: Report, method: str, split: str) -> dict[int, float]:
    """The accuracy of each seed; those that were not measured are left out."""
    found = {}
    for seed in sorted({row.seed for row in report.rows}):
        part = Report.of(row for row in report.rows if row.seed == seed)
        for value in part.values(method=method, metric="accuracy", split=split):
            found[seed] = value
    return found


def tables_text(plan: Plan, tables: Iterable[Table], failures: Mapping[str, str]) -> str:
    """`table.md`: warnings first, then the tables, then what failed."""
    text = [f"# {plan.title}", ""]
    for sentence in plan.warnings:
        text += [f"**{sentence}**", ""]
    for table in tables:
        words = (0, 1) if table.columns[:2] == ("method", "detector") else (0,)
        text += [f"({table.title})", "", table.markdown(words), ""]
    if failures:
        text += ["Failed runs, which are not in the tables:", ""]
        text += [*(f"- {name}: {reason}" for name, reason in failures.items()), ""]
    return "\n".join(text)
