"""Every experiment of the paper is tried end to end at the tiny scale, on embedded images in the place of its data."""

import sys
from pathlib import Path

import pytest

from foogd.cli import main
from foogd.experiments.sweep import plan, read_sweep, sweep_names
from foogd.reports.grids import paper_grid
from foogd.reports.grouping import collect


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
    replaced = " (tiny: data that are not here are replaced, "
    assert (replaced in text.splitlines()[0]) == (replaced in printed) == (name != "demo")
    collection = collect([folder / "runs" / point.name for point in points])
    for record in collection.records:
        outs = {row.dataset.partition(" (")[0] for row in record.rows if row.split == "out"}
        assert outs == {"fashion_out", "digits"}
    # What the paper prints is of other images.
    assert not any(paper_grid(scene).has_published for scene in collection.scenes)
