"""Tables show the right numbers of the right rows, and say where there are none."""

from __future__ import annotations

import re
import statistics
from typing import Any

import pytest

from foogd.evaluation.rows import Row
from foogd.tables.grid import Table
from foogd.tables.results import Report

BLANK = Row(
    run="r", method="fedavg", seed=0, round=1, scope="weighted", client=None, dataset="d", split="in", corruption=None,
    severity=None, detector=None, metric="accuracy", value=0.0, weight=1.0,
)  # fmt: skip


def row(value: float, **about: Any) -> Row:
    return Row(**{**BLANK.as_dict(), "value": value, **about})


def in_c(value: float, corruption: str, severity: int, **about: Any) -> Row:
    return row(value, dataset="d-c", split="in-c", corruption=corruption, severity=severity, **about)


def out(value: float, metric: str, detector: str = "msp", dataset: str = "svhn", **about: Any) -> Row:
    return row(value, dataset=dataset, split="out", metric=metric, detector=detector, **about)


def cells(table: Table, method: str, detector: str) -> dict[str, str]:
    lines = [dict(zip(table.columns, line, strict=True)) for line in table.rows]
    (hit,) = [line for line in lines if (line["method"], line["detector"]) == (method, detector)]
    return hit


ONE_SEED = [
    row(0.912),
    row(0.5, scope="pooled"),
    row(0.1, scope="client", client=0),
    in_c(0.8, "noise", 1),
    in_c(0.6, "noise", 5),
    in_c(0.2, "fog", 1),
    in_c(0.9, "fog", 1, scope="pooled"),
    row(0.3, metric="accuracy_generic", scope="pooled"),
    out(0.25, "fpr95"),
    out(0.934, "auroc"),
    out(0.5, "auroc", dataset="textures"),
    out(0.11, "fpr95", scope="pooled"),
    out(0.7, "auroc", detector="score_norm"),
]


def test_headline_shows_each_number_in_its_place():
    table = Report.of(ONE_SEED).headline()
    assert table.columns == (
        "method", "detector", "ACC-IN", "ACC-IN-C", "FPR95 svhn", "AUROC svhn", "FPR95 textures", "AUROC textures",
    )  # fmt: skip
    assert table.rows == (
        ("fedavg", "MSP", "91.2", "53.3", "25.0", "93.4", "–", "50.0"),
        ("fedavg", "score norm", "91.2", "53.3", "–", "70.0", "–", "–"),
    )


def test_headline_of_another_scope_reads_the_rows_of_that_scope():
    table = Report.of(ONE_SEED).headline("pooled")
    assert table.rows == (("fedavg", "MSP", "50.0", "90.0", "11.0", "–", "–", "–"),)
    assert "pooled" in table.title


def test_headline_has_no_line_for_a_detector_that_a_method_cannot_use():
    rows = [row(0.5), out(0.6, "auroc"), row(0.7, method="fedavg+foogd"), out(0.8, "auroc", method="fedavg+foogd"),
            out(0.9, "auroc", detector="score_norm", method="fedavg+foogd")]  # fmt: skip
    lines = [line[:2] for line in Report.of(rows).headline().rows]
    assert lines == [("fedavg", "MSP"), ("fedavg+foogd", "MSP"), ("fedavg+foogd", "score norm")]


def test_headline_keeps_the_accuracy_of_a_method_without_detection():
    rows = [row(0.7), in_c(0.6, "noise", 1), row(0.8, method="fedrod"), out(0.9, "auroc", method="fedrod")]
    table = Report.of(rows).headline()
    assert cells(table, "fedavg", "–") == {
        "method": "fedavg", "detector": "–", "ACC-IN": "70.0", "ACC-IN-C": "60.0", "FPR95 svhn": "–", "AUROC svhn": "–",
    }  # fmt: skip
    assert cells(table, "fedrod", "MSP")["ACC-IN-C"] == "–"
    assert Report.of([row(0.7)]).headline().rows == (("fedavg", "–", "70.0", "–"),)


def test_several_seeds_give_mean_and_sample_deviation():
    values = {0: 0.90, 1: 0.94, 5: 0.86}
    rows = [r for seed, value in values.items() for r in (
        row(value, seed=seed, run=f"r{seed}"), out(value - 0.2, "auroc", seed=seed, run=f"r{seed}"),
    )]  # fmt: skip
    report = Report.of([*rows, out(0.3, "fpr95", seed=1, run="r1")])
    line = cells(report.headline(), "fedavg", "MSP")
    deviation = 100 * statistics.stdev(values.values())
    assert line["ACC-IN"] == f"90.0 ± {deviation:.1f}" == "90.0 ± 4.0"
    assert line["AUROC svhn"] == "70.0 ± 4.0"
    assert line["FPR95 svhn"] == "30.0"  # one seed has no deviation
    assert "over 1 to 3 seeds" in report.headline().title
    assert "over 3 seeds" in report.matrix("svhn", "auroc").title
    assert "3 seeds" in report.joint().title
    assert "seeds" not in Report.of(ONE_SEED).headline().title
    assert "seeds" not in Report.of(ONE_SEED).joint().title


def test_deviation_is_over_seeds_and_not_over_corruptions():
    rows = [in_c(value, "noise", severity, seed=seed)
            for seed in (0, 1) for severity, value in ((1, 0.9), (5, 0.1))]  # fmt: skip
    assert Report.of(rows).values(method="fedavg", metric="accuracy", split="in-c") == pytest.approx([0.5, 0.5])


def test_joint_shows_each_number_in_its_place():
    rows = [
        in_c(0.10, "noise", 1, metric="rejected", detector="msp"),
        in_c(0.30, "noise", 5, metric="rejected", detector="msp"),
        row(0.05, metric="rejected", detector="msp"),
        row(0.97, metric="accuracy_accepted", detector="msp"),
        in_c(0.88, "noise", 1, metric="accuracy_accepted", detector="msp"),
        out(0.81, "auroc_joint"),
        out(0.61, "auroc_joint", dataset="textures"),
        out(0.99, "auroc"),
        out(0.77, "auroc_joint", detector="mine"),
    ]
    table = Report.of(rows).joint()
    assert table.columns == (
        "method", "detector", "IN-C rejected", "ACC accepted IN", "ACC accepted IN-C", "AUROC IN+IN-C / OUT",
    )  # fmt: skip
    assert table.rows == (
        ("fedavg", "MSP", "20.0", "97.0", "88.0", "71.0"),
        ("fedavg", "mine", "–", "–", "–", "77.0"),
    )


def test_last_round_keeps_the_last_evaluated_round_of_each_run():
    rows = [row(0.1, run="a", round=5), row(0.2, run="a", round=10), row(0.3, run="b", round=7, method="fedrod"),
            out(0.4, "auroc", run="a", round=10), row(0.5, run="b", round=2, method="fedrod")]  # fmt: skip
    kept = Report.of(rows).last_round().rows
    assert [(r.run, r.round, r.value) for r in kept] == [("a", 10, 0.2), ("b", 7, 0.3), ("a", 10, 0.4)]
    assert Report.of(kept).last_round().rows == kept
    assert Report.of([]).last_round().rows == ()


def test_lists_keep_the_order_of_the_rows():
    rows = [row(0.1, method="z", seed=3), out(0.2, "auroc", "msp", "svhn", method="a", seed=1),
            out(0.3, "auroc", "energy", "digits", method="z", seed=3)]  # fmt: skip
    report = Report.of(rows)
    assert report.methods() == ["z", "a"]
    assert report.detectors() == ["msp", "energy"]
    assert report.out_sets() == ["svhn", "digits"]
    assert report.seeds() == [1, 3]


def parsed(markdown: str) -> list[list[str]]:
    """The cells of a Markdown table; a bar after a backslash belongs to its cell."""
    lines = []
    for line in markdown.splitlines():
        assert line.startswith("| ")
        assert line.endswith(" |")
        lines.append([cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line[1:-1])])
    return lines


@pytest.mark.parametrize("kind", ["headline", "joint"])
def test_markdown_is_a_table_that_reads_back(kind):
    table = getattr(Report.of(ONE_SEED), kind)()
    header, rule, *body = parsed(table.markdown())
    assert tuple(header) == table.columns
    assert all(re.fullmatch("-{3,}:?", cell) for cell in rule)
    assert len(rule) == len(header)
    assert tuple(map(tuple, body)) == table.rows


def test_markdown_aligns_numbers_to_the_right_and_survives_bars_in_names():
    table = Table("t", ("method", "detector", "ACC"), (("a|b", "c", "1.0"),))
    _, rule, body = parsed(table.markdown())
    assert rule == ["---", "---", "---:"]
    assert body == ["a|b", "c", "1.0"]
