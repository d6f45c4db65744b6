"""Every experiment of the paper is tried end to end at the tiny scale, on stand-ins in the true file formats."""

import sys
from pathlib import Path

import pytest

from foogd.cli import main
from foogd.runs import read_rows
from foogd.sweep import plan, read_sweep, sweep_names


@pytest.mark.parametrize("name", sweep_names())
def test_every_sweep_runs_at_the_tiny_scale(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["foogd", "sweep", name, "--scale", "tiny", "--workers", "1"])
    main()
    printed = capsys.readouterr().out
    points = plan(name, read_sweep(name), "tiny").points
    assert f"[{len(points)}/{len(points)}]" in printed
    assert "failed" not in printed
    folder = Path("runs") / f"{name}-tiny"
    text = (folder / "table.md").read_text()
    assert "**Scale tiny" in text
    assert all(f"| {point.label} | MSP |" in text for point in points)
    made_up = name != "demo"
    assert ("**NOT REAL DATA" in text) == ("NOT REAL DATA" in printed) == made_up
    rows = read_rows(folder / "runs" / points[0].name)
    word = "(stand-in)" if made_up else "(sample of"
    assert all(word in row.dataset for row in rows if row.split in ("in", "out"))
