"""summary.md: results, communication and what the run was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..evaluation.rows import Row
from ..tables.grid import Table
from .federation import leaks_sentence, partition_table, read_leaks, skipped_sentence
from .files import SUMMARY, write_atomic

if TYPE_CHECKING:
    from .run import Run


def communication_table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """What one participant was sent and sent back, in the first round, in the last one and in the mean of all."""
    chosen = [("first", lines[:1]), ("last", lines[-1:]), ("mean", lines)]
    rows = []
    for name, some in chosen:
        participants = sum(len(line["participants"]) for line in some) or 1
        down, up = (sum(line[key] for line in some) / participants for key in ("bytes_down", "bytes_up"))
        rows.append((name, f"{down:,.0f}", f"{up:,.0f}"))
    return Table("bytes of one participant in a round", ("round", "down", "up"), tuple(rows))


def _section(title: str, table: Table) -> list[str]:
    return [f"## {title} ({table.title})", "", table.markdown(), ""]


def write_summary(run: Run, rows: Sequence[Row], lines: Sequence[Mapping[str, Any]], notes: Sequence[str] = ()) -> None:
    """`summary.md`: results, communication and what the run was; `notes` are further sentences about it."""
    report = run.report(rows)
    refused = sum(len(line["refused"]) for line in lines)
    seconds = sum(line["seconds"] for line in lines)
    up, down = (sum(line[key] for line in lines) / max(1, len(lines)) / 2**20 for key in ("bytes_up", "bytes_down"))
    aside = sum(len(indices) for indices in run.federation.calibration_indices)
    text = [
        f"# {run.shown_name}, seed {run.config.seed}",
        "",
        f"Run {run.name}: {len(lines)} rounds, {run.federation.clients} clients, {seconds:.1f} s of training, "
        f"{down:.2f} MiB down and {up:.2f} MiB up a round, {refused} updates refused.",
        "",
        *([leaks_sentence(leaks), ""] if (leaks := read_leaks(run.folder)) else ()),
        *([skipped_sentence(run.federation.skipped), ""] if run.federation.skipped else ()),
        *([note, ""] if (note := run.federation.train.note) else ()),
        *(line for sentence in notes for line in (sentence, "")),
        *([f"{aside} training images were set aside to find thresholds.", ""] if aside else ()),
        *(line for sentence in (*run.left_out(), *run.unranked(report.rows)) for line in (sentence, "")),
        *_section("Results", report.headline()),
        *_section("Joint view", report.joint()),
        *(_section("Thresholds", thresholds) if (thresholds := report.thresholds()).rows else ()),
        *_section("Communication", communication_table(lines)),
        *_section("Partition", partition_table(run.federation)),
    ]
    write_atomic(run.folder / SUMMARY, ("\n".join(text) + "\n").encode())
