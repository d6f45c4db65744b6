"""Pages that are made from the code or from kept results say what these say, and kept runs can be repeated."""

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from foogd import FOOGD, Config, InputError
from foogd.runs import Run, read_json, read_rows
from foogd.settings import read_run_config

ROOT = Path(__file__).parent.parent


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


def test_the_page_of_methods_is_what_the_code_says():
    assert (ROOT / "docs" / "methods.md").read_text() == tool("methods_page").page(), "run python tools/methods_page.py"


def test_the_page_of_settings_is_what_the_code_says():
    assert (ROOT / "docs" / "settings.md").read_text() == tool("settings_page").page(), "run tools/settings_page.py"


def test_the_tables_of_the_reproduction_are_what_its_rows_say():
    text = (ROOT / "docs" / "reproduction.md").read_text()
    assert text == tool("reproduction_page").page(text), "run python tools/reproduction_page.py"
    assert "<!-- runs -->" in text
    assert "<!-- detectors " in text


def copied(page: ModuleType, name: str, target: Path, **changed: str) -> None:
    """A kept run in another folder, with other settings."""
    target.mkdir()
    for file in ("config.toml", "environment.json", "rows.csv"):
        text = (page.RESULTS / name / file).read_text()
        for key, value in changed.items() if file == "config.toml" else ():
            text, found = re.subn(rf"^{key} = .*$", f"{key} = {value}", text, flags=re.MULTILINE)
            assert found == 1
        (target / file).write_text(text)


def test_every_number_of_the_reproduction_comes_from_a_row(tmp_path, monkeypatch):
    """A row that is changed shows in both tables; a run that is not there is named."""
    page = tool("reproduction_page")
    name = "fedavg+foogd-5.0-s21-second"
    copied(page, name, tmp_path / name)
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


def test_tables_hold_the_runs_on_their_data_with_the_numbers_printed_for_them(tmp_path, monkeypatch):
    page = tool("reproduction_page")
    name = "fedavg+foogd-5.0-s21"
    copied(page, name, tmp_path / name)
    copied(page, name, tmp_path / f"{name}-without-sag", lambda_a="0.0")
    copied(page, name, tmp_path / "hundred-s1", data='"cifar100"', alpha="0.1")
    pacs = {"data": '"pacs"', "partition": '"by_domain"', "leave_out": '"sketch"', "corruptions": "[]"}
    copied(page, name, tmp_path / "pacs-s1", **pacs)
    monkeypatch.setattr(page, "RESULTS", tmp_path)

    def lines(block: str) -> list[list[str]]:
        made = page.page(f"<!-- {block} -->\n<!-- end -->\n").splitlines()
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in made if line.startswith("|")]

    heads, _, first, *rest = lines("runs")
    assert (heads[:2], first[:2], first[6]) == (["method", "alpha"], ["fedavg+foogd", "5"], "88.6 (88.9)")
    asked = page.Kept(name).detectors
    assert [line[5] for line in rest] == [page.NAMES[ours] for ours in page.OURS if ours in asked]
    assert lines("runs cifar100")[2][:2] == ["fedavg+foogd", "0.1"]
    assert lines("runs cifar100")[2][6] == "88.6 (53.8)"
    heads, _, first, *_ = lines("runs pacs")
    assert (heads[1], first[1], first[7]) == ("left out", "sketch", "88.1 (41.4)")
    _, _, *both = lines(f"variants {name} {name}-without-sag")
    # The paper has its own numbers for the ablation.
    assert [(line[0], line[6]) for line in both if line[0]] == [
        ("as it is", "88.6 (88.9)"),
        ("without sag", "88.6 (87.9)"),
    ]
    copied(page, name, tmp_path / f"{name}-broken", rounds="30")
    assert [line[2] for line in lines(f"variants {name} {name}-broken") if line[0] in ("as it is", "broken")] == [
        "25",
        "25 of 30",
    ]


def test_the_overview_sets_the_best_of_the_others_beside_ours(tmp_path, monkeypatch):
    page = tool("reproduction_page")
    for name in ("fedavg+foogd-5.0-s21", "fedavg-5.0-s21"):
        copied(page, name, tmp_path / name)
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    (line,) = [line for line in page.overview_table().splitlines() if line.startswith("| cifar10")]
    cells = [cell.strip(" *") for cell in line.split("|")[1:-1]]
    ours, base = page.Kept("fedavg+foogd-5.0-s21"), page.Kept("fedavg-5.0-s21")
    assert cells[:4] == ["cifar10, alpha 5", "fedavg+foogd", "1", f"{base.mean('msp', 'auroc'):.1f}"]
    before = {page.NAMES[name]: base.mean(name, "auroc") for name in base.detectors if name not in page.OURS}
    assert cells[4] == f"{max(before.values()):.1f} ({max(before, key=before.get)})"
    assert cells[-1] == f"{ours.mean('score_near', 'auroc'):.1f}"
    others = {page.NAMES[name]: ours.mean(name, "auroc") for name in ours.detectors if name not in page.OURS}
    best = max(others, key=others.get)
    assert cells[8] == f"{others[best]:.1f} ({best})"

    copied(page, "fedavg+foogd-5.0-s21", tmp_path / "fedavg+foogd-5.0-s21-cnn", backbone='"cnn"')
    line = page.overview_table().splitlines()[-1]
    assert [cell.strip() for cell in line.split("|")[2:6]] == ["fedavg+foogd, small CNN", "1", "–", "–"]  # no base yet


def test_no_two_commands_of_the_guides_write_one_folder():
    """Without --out a run's folder is named by its method and seed, so a second one with the same finds it taken."""
    folders = []
    for page in (ROOT / "CONTRIBUTING.md", ROOT / "docs" / "experiments.md", ROOT / "docs" / "your_data.md"):
        for words in re.findall(r"^foogd run (\S+.*)$", page.read_text(), flags=re.MULTILINE):
            named = dict(re.findall(r"--(out|method) (\S+)", words))
            folders.append(named.get("out") or named.get("method", "default"))
    assert len(folders) > 4
    assert len(set(folders)) == len(folders)


def test_kept_runs_can_be_repeated():
    """Their configurations name every setting of today, so a default that changes does not change them."""
    for folder in sorted((ROOT / "docs" / "results").iterdir()):
        if folder.name.endswith("score-net-span"):  # by the commit that it names
            with pytest.raises(InputError, match="score_net = 'span' is not allowed"):
                read_run_config(folder / "config.toml")
        else:
            read_run_config(folder / "config.toml")


def test_a_repeated_run_pauses_where_the_time_is_over_and_ends_with_the_same_rows(tmp_path, monkeypatch, capsys):
    made = "from foogd.data.synthetic import tiny_federation\nfn = lambda root: tiny_federation(per_client=20).train\n"
    (tmp_path / "data.py").write_text(made)
    config = Config(
        method="fedavg+foogd", data=f"{tmp_path}/data.py:fn", out=(), clients=2, rounds=3, batch_size=8, backbone="cnn",
        corruptions=("brightness",), severities=(1,), detectors=("msp", "score_norm"), device="cpu",
    )  # fmt: skip
    first = Run.create(tmp_path / "kept" / "one", config, FOOGD(lambda_a=0.0, score_width=16))
    assert [result.round for result in first.train()] == [1, 2, 3]
    keep = tool("keep_run")
    keep.RESULTS = tmp_path / "results"
    keep.main([str(Run.create(tmp_path / "elsewhere", replace(config, data_root="/a/place"), first.method).folder)])
    assert 'data_root = "data"' in (keep.RESULTS / "elsewhere" / "config.toml").read_text()  # no place of one machine
    again = tool("repeat_runs")
    monkeypatch.setattr(again.runs, "source_commit", again.runs.source_commit)  # as it was, after the test
    words = ["repeat_runs.py", str(first.folder), "--out", str(tmp_path / "new"), "--commit", "0123"]

    def done(*more: str) -> int:
        monkeypatch.setattr(sys, "argv", [*words, *more])
        with pytest.raises(SystemExit) as ended:
            again.main()
        assert ended.value.code == 0
        return again.open_run(first.folder, "data", tmp_path / "new").finished_rounds()

    assert done("--seconds", "0") == 1  # a round is the least that is done
    assert done("--seconds", "100", "--evaluation", "200") == 2  # the last round would leave no time for its test
    assert capsys.readouterr().out.endswith("one: waits after round 2\n")
    assert done("--seconds", "0", "--evaluation", "0") == 3
    assert capsys.readouterr().out.endswith("one: finished\n")
    assert read_rows(tmp_path / "new" / "one") == read_rows(first.folder)
    assert read_json(tmp_path / "new" / "one" / "environment.json")["commit"] == "0123"

    other = ["--set", "rounds=1", "--set", 'detectors=["energy"]', "--suffix", "other"]
    monkeypatch.setattr(sys, "argv", [*words, *other])
    with pytest.raises(SystemExit):
        again.main()
    assert capsys.readouterr().out.endswith("one-other: finished\n")
    rows = read_rows(tmp_path / "new" / "one-other")
    assert {row.round for row in rows} == {1}
    assert {row.detector for row in rows} - {None} == {"energy"}
    mixed = ["--set", "rounds=2", "--set", 'detectors=["energy"]', "--suffix", "other"]
    wrongs = (["--set", "rounds=1"], ["--set", "rounds"], ["--suffix", "../other"], mixed)
    for wrong in wrongs:
        monkeypatch.setattr(sys, "argv", [*words, *wrong])
        with pytest.raises(SystemExit) as ended:
            again.main()
        assert ended.value.code == (1 if wrong is mixed else 2)
    said = "".join(capsys.readouterr())
    assert "--set makes other runs: give them another name with --suffix" in said
    assert "'rounds' is no KEY=VALUE" in said
    assert "--suffix '../other' is not allowed" in said
    assert "holds a run with another configuration: rounds is 1 there and 2 here" in said

    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.toml").write_text((first.folder / "config.toml").read_text() + "lambda_x = 1\n")
    for place, code, said in ((tmp_path, 2, "has no config.toml"), (unknown, 1, "has no setting 'lambda_x'")):
        monkeypatch.setattr(sys, "argv", ["repeat_runs.py", str(place), "--out", str(tmp_path / "none")])
        with pytest.raises(SystemExit) as ended:
            again.main()
        assert ended.value.code == code
        assert said in "".join(capsys.readouterr())
    assert not (tmp_path / "none").exists()
