"""Pages that are made from the code or from kept results say what these say."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from foogd.settings import read_run_config

ROOT = Path(__file__).parent.parent


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


def test_the_page_of_methods_is_what_the_code_says():
    assert (ROOT / "docs" / "methods.md").read_text() == tool("methods_page").page(), "run python tools/methods_page.py"


def test_the_tables_of_the_reproduction_are_what_its_rows_say():
    text = (ROOT / "docs" / "reproduction.md").read_text()
    assert text == tool("reproduction_page").page(text), "run python tools/reproduction_page.py"
    assert "<!-- runs -->" in text
    assert "<!-- detectors " in text


def test_every_number_of_the_reproduction_comes_from_a_row(tmp_path, monkeypatch):
    """A row that is changed shows in both tables; a run that is not there is named."""
    page = tool("reproduction_page")
    name = "fedavg+foogd-5.0-s21-second"
    for file in ("config.toml", "environment.json", "rows.csv"):
        text = (page.RESULTS / name / file).read_text()
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / file).write_text(text)
    rows = (tmp_path / name / "rows.csv").read_text().splitlines()
    at = next(i for i, row in enumerate(rows) if ",weighted,LSUN-like crop,out,,,score_energy,auroc," in row)
    parts = rows[at].split(",")
    parts[-2] = "0.123456"
    rows[at] = ",".join(parts)
    (tmp_path / name / "rows.csv").write_text("\n".join(rows) + "\n")
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    made = page.page(f"<!-- runs -->\n<!-- end -->\n<!-- detectors {name} -->\n<!-- end -->\n")
    assert made.count("| 12.3 |") == 2
    with pytest.raises(FileNotFoundError, match="fedavg-7"):
        page.page("<!-- detectors fedavg-7 -->\n<!-- end -->\n")


def test_kept_runs_can_be_repeated():
    """Their configurations name every setting of today, so a default that changes does not change them."""
    for folder in sorted((ROOT / "docs" / "results").iterdir()):
        read_run_config(folder / "config.toml")
