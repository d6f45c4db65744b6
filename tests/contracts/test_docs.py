"""Pages that are made from the code or from kept results say what these say, and kept runs can be repeated."""

import csv
import importlib.util
import json
import re
import shutil
import sys
import tomllib
from functools import partial
from pathlib import Path
from statistics import fmean
from types import ModuleType

import pytest
from made_runs import make_run

from foogd import FOOGD, AnchoredFOOGD, InputError
from foogd.experiments.scales import training_time
from foogd.experiments.sweep import plan, read_sweep, sweep_names
from foogd.presets.loader import read_preset, resolve
from foogd.runs.files import read_rows
from foogd.tables.results import Report

ROOT = Path(__file__).parents[2]


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


def test_the_page_of_methods_is_what_the_code_says():
    assert (ROOT / "docs" / "methods.md").read_text() == tool("methods_page").page(), "run python tools/methods_page.py"


def test_the_page_of_settings_is_what_the_code_says():
    assert (ROOT / "docs" / "settings.md").read_text() == tool("settings_page").page(), "run tools/settings_page.py"


def test_no_two_commands_of_the_guides_write_one_folder():
    """Without --out a run's folder is named by its method and seed, so a second one with the same finds it taken."""
    folders = []
    for page in (ROOT / "CONTRIBUTING.md", ROOT / "docs" / "experiments.md", ROOT / "docs" / "your_data.md"):
        for words in re.findall(r"^foogd run (\S+.*)$", page.read_text(), flags=re.MULTILINE):
            named = dict(re.findall(r"--(out|method) (\S+)", words))
            folders.append(named.get("out") or named.get("method", "default"))
    assert len(folders) > 4
    assert len(set(folders)) == len(folders)


def test_the_map_of_the_paper_has_every_sweep_that_repeats_a_part_of_it():
    """Its first column, its numbers of runs and its hours are those of `foogd sweep --list` and `--plan`."""
    lines = [line for line in (ROOT / "docs" / "paper.md").read_text().splitlines() if "`foogd sweep " in line]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    expected = []
    for name in sweep_names():
        content = read_sweep(name)
        if "paper" in content:
            full, small = plan(name, content), plan(name, content, "small")
            hours, minutes = training_time(full)[0] / 3600, training_time(small)[0] / 60
            expected.append([content["paper"], f"`foogd sweep {name}`", str(len(full.points)), f"{hours:.1f}",
                             str(len(small.points)), f"{minutes:.0f}"])  # fmt: skip
    assert sorted(row[:6] for row in rows) == sorted(expected)
    assert set(sweep_names()) - {row[1].split()[-1].rstrip("`") for row in rows} == {"demo"}


def test_the_page_of_results_is_what_the_kept_rows_say():
    assert (ROOT / "docs" / "results.md").read_text() == tool("results").page(), "run python tools/results.py page"


def test_every_kept_run_has_its_rows_and_its_settings_and_can_be_repeated(tmp_path):
    """Settings of today are all named, so a default that changes does not change them."""
    kept = tool("results")
    for place in sorted(kept.RESULTS.glob("*.*")):
        assert place.with_suffix(".toml").is_file(), f"{place.name} has no settings"
    for place in sorted(kept.RESULTS.glob("*.toml")):
        sweep = kept.Sweep.read(place.stem)
        with place.with_suffix(".csv").open() as file:
            rows = list(csv.reader(file))
        assert tuple(rows[0]) == (*kept.KEY, *sweep.runs)
        assert len({tuple(row[: len(kept.KEY)]) for row in rows}) == len(rows)
        assert {row[0] for row in rows[1:]} == {"weighted", "pooled"}  # no single clients
        for name, run in sweep.runs.items():
            (right,) = [v for key, v in run.values.items() if key[:2] == ("weighted", "in") and key[-1] == "accuracy"]
            assert 0 <= float(right) <= 1
            assert run.settings["data_root"] == "data"
            assert 0 < run.made["round"] <= run.settings["rounds"]
            assert run.made["commit"]
            assert run.made["seconds"] > 0
            (tmp_path / "my.toml").write_text(kept.config(place.stem, name))
            again = partial(resolve, read_preset(str(tmp_path / "my.toml")), {"data_root": "DATA"})  # as foogd run does
            if run.settings.get("score_net") in ("mlp", "span"):
                with pytest.raises(InputError, match=r"score_net = '.*' is not possible any more: .* at the commit"):
                    again()
            else:
                method = again()[1]
                variant = FOOGD if run.settings.get("profile") == "published" else AnchoredFOOGD
                assert isinstance(method, variant) or "+foogd" not in name


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The tool with nothing kept yet."""
    found = tool("results")
    monkeypatch.setattr(found, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(found, "PAGE", tmp_path / "results.md")
    found.PAGE.write_text(f"# By hand\n\n{found.MARK}\n\nold\n")
    return found


def test_runs_are_kept_replaced_and_shown(kept, tmp_path, capsys):
    one = make_run(tmp_path / "fedavg-0", data_root="/a/place", eval_every=5, lr=0.1)
    early = read_rows(one)[0].as_dict() | {"round": 5, "detector": "knn", "metric": "only_before"}
    with (one / "rows.jsonl").open("a") as file:
        file.write(json.dumps(early) + "\n")
    two = make_run(tmp_path / "fedavg-1", seed=1)
    other = make_run(tmp_path / "fedavg+foogd-0", method="fedavg+foogd")
    kept.main(["keep", "small", str(one), str(two)])
    kept.main(["keep", "small", str(other)])
    for folder in (one, two, other):
        capsys.readouterr()
        kept.main(["config", "small", folder.name])
        ran = tomllib.loads((folder / "config.toml").read_text())
        assert tomllib.loads(capsys.readouterr().out) == ran | {"data_root": "data"}
    place = kept.RESULTS / "small.toml"
    assert "/a/place" not in place.read_text()
    assert tomllib.loads(place.read_text())["runs"]["fedavg-0"]["lr"] == 0.1  # others have another
    assert "clients" in tomllib.loads(place.read_text())["settings"]
    sweep = kept.Sweep.read("small")
    run, rows = sweep.runs["fedavg-0"], read_rows(one)
    assert run.made | {"commit": "0123456789ab", "torch": "2.13.0", "round": 10, "seconds": 15} == run.made
    # Of the last round alone, and no single clients: one value a key.
    last = [row for row in rows if row.round == 10 and row.scope != "client"]
    assert len(run.values) == len(last) < len(rows) / 2
    (auroc,) = [row.value for row in last if (row.dataset, row.detector, row.metric) == ("digits", "knn", "auroc")]
    assert float(run.values["weighted", "out", "digits", "", "", "knn", "auroc"]) == pytest.approx(auroc, abs=6e-6)

    kept.Sweep(sweep.name, {"title": "t", "about": "a", "table": "grid"}, sweep.runs).write()
    with pytest.raises(InputError, match=r"results\.md is not what the rows say"):
        kept.main(["page", "--check"])
    kept.main(["page"])
    kept.main(["page", "--check"])
    text = kept.PAGE.read_text()
    assert text.startswith("# By hand\n")
    assert "old" not in text
    by_hand = Report.of([row for folder in (one, two) for row in read_rows(folder) if row.round == 10])
    accuracy = by_hand.headline().rows[0][2]
    assert "±" in accuracy
    assert f"| fedavg | MSP | {accuracy} |" in text
    assert "Alpha 0.5, rounds: 10, seeds: 0, 1:" in text

    shutil.rmtree(one)
    make_run(one, good=0.2)  # the same run once more, a better one
    kept.main(["keep", "small", str(one)])
    with pytest.raises(InputError, match="is not what the rows say"):
        kept.main(["page", "--check"])
    kept.main(["page"])
    assert f"| fedavg | MSP | {accuracy} |" not in kept.PAGE.read_text()
    assert kept.Sweep.read("small").about["table"] == "grid"
    assert list(kept.Sweep.read("small").runs) == ["fedavg-0", "fedavg-1", "fedavg+foogd-0"]


def test_tables_of_results_hold_the_paper_and_means_without_the_set_that_settings_were_chosen_by(kept, monkeypatch):
    monkeypatch.setattr(kept, "RESULTS", ROOT / "results")

    def line(sweep: str, start: str) -> list[str]:
        (found,) = [line for line in kept.section(kept.Sweep.read(sweep)).splitlines() if line.startswith(start)]
        return [cell.strip() for cell in found.split("|")[1:-1]]

    heads, ours = "| method | ACC-IN |", "fedavg+foogd (anchored, not in the paper)"
    run = kept.Sweep.read("cifar100").runs["cifar100-fedavg+foogd-0.1-s21"]
    values = {key[2]: float(value) for key, value in run.values.items() if key[0::5] == ("weighted", "energy")
              and key[-1] == "auroc"}  # fmt: skip
    four = fmean(values[name] for name in ("LSUN-like crop", "Textures (10 classes)", "isun", "svhn"))
    assert len(values) == 5
    cells = dict(zip(line("cifar100", heads), line("cifar100", f"| {ours} |"), strict=True))
    assert cells["ACC-IN"] == "45.4 (53.8)"
    assert cells["AUROC LSUN-like crop"].endswith(" (91.4)")  # the paper's score norm on LSUN-C
    assert cells["energy"].startswith(f"{100 * four:.1f}, ")
    cells = dict(zip(line("pacs", heads), line("pacs", f"| {ours} |"), strict=True))
    assert cells["ACC-IN-C"] == "49.0 ± 2.1 (41.4)"
    assert "(" not in "".join(line("pacs-small-cnn", f"| {ours} |")[1:])  # no net of the paper
    assert line("cifar10-profiles", "| fedavg+foogd, paper sigma 0.1")[0].endswith(", stopped after round 23 of 25")
    assert line("cifar10-ablations", f"| {ours}, without sag |")[1] == "88.5 (87.9)"  # its own printed number
    assert line("cifar10-corruptions", "| mean of 19 |")[1:] == ["59.6", "65.7", "65.6"]


def test_the_page_of_results_names_every_kept_run_of_the_anchored_variant(kept, monkeypatch):
    monkeypatch.setattr(kept, "RESULTS", ROOT / "results")
    unnamed = set()
    for place in sorted(kept.RESULTS.glob("*.toml")):
        sweep = kept.Sweep.read(place.stem)
        for name, run in sweep.runs.items():
            named = "(anchored, not in the paper)" in sweep.label(name, run)
            variants = {run.settings.get("score_net"), run.settings.get("profile")}  # the first in files of before
            is_other = not run.settings["method"].endswith("+foogd") or "anchored" not in variants
            assert named != is_other, name
            if run.settings["method"].endswith("+foogd") and is_other and "published" not in variants:
                unnamed.add(name.removeprefix("fedavg+foogd-5.0-s21-"))
    others = {"first", "fedavg+foogd-0.1-s21-first", "score-net-span", "paper", "paper-sigma-0.1", "released"}
    assert unnamed == {*others, "released-common-optimiser"}


def test_a_claim_is_judged_by_the_rule_that_the_page_states():
    cases = [
        (7.1, [6.9], "confirmed"),
        (7.1, [3.6, 3.5, 3.6], "confirmed"),  # half in the mean is enough, and each has the sign
        (7.1, [3.5, 3.4, 3.5], "in part"),  # less than half
        (7.1, [20.0, 9.0, -0.1], "in part"),  # one seed has the other sign
        (7.1, [5.0, -5.1, 0.0], "not"),
        (7.1, [-6.9], "not"),
        (7.1, [0.0], "not"),
        (7.1, [], "not tried here"),
        (-48.1, [-24.1, -30.0], "confirmed"),  # of FPR95 the smaller is the better
        (-48.1, [-10.0, -2.0], "in part"),
        (-48.1, [10.0, 2.0], "not"),
        (0.0, [0.0], "not"),  # nothing printed to confirm
    ]
    claims = tool("claims")
    assert [claims.verdict(printed, measured) for printed, measured, _ in cases] == [said for *_, said in cases]
    assert [claims.direction(-2.0, measured) for measured in ([-0.1, 0.0], [0.1], [])] == ["same direction", "not", "–"]


def test_only_finished_runs_of_the_published_method_are_behind_a_verdict(kept):
    """FOOGD is 5.0 and 9.0 points better by seed; other variants and points, and what was cut off, do not count."""
    keys = {"right": ("weighted", "in", "cifar10", "", "", "", "accuracy")}
    keys["auroc"] = ("weighted", "out", "LSUN-like crop", "", "", "score_norm", "auroc")
    keys["msp"] = ("weighted", "out", "LSUN-like crop", "", "", "msp", "auroc")

    def run(method: str, seed: int, right: float, auroc: float, round: int = 10, **settings):
        said = {"method": method, "seed": seed, "data": "cifar10", "alpha": 0.1, "rounds": 10} | settings
        detector = "auroc" if method.endswith("foogd") else "msp"
        return kept.Kept(said, {"round": round}, {keys["right"]: str(right), keys[detector]: str(auroc)})

    ours = {"profile": "published", "lambda_m": 0.5, "lambda_a": 0.05, "train_base": True}
    foogd = "fedavg+foogd"
    runs = [
        run("fedavg", 1, 0.50, 0.60), run("fedavg", 2, 0.50, 0.80), run("fedavg", 3, 0.1, 0.1),
        run("fedavg", 2, 0.9, 0.9, alpha=5.0), run("fedrod", 2, 0.9, 0.9),
        run(foogd, 1, 0.55, 0.70, **ours), run(foogd, 2, 0.59, 0.79, **ours), run(foogd, 4, 0.9, 0.9, **ours),
        run(foogd, 3, 0.9, 0.9, **ours | {"profile": "anchored"}), run(foogd, 3, 0.9, 0.9, 9, **ours),
        run(foogd, 3, 0.9, 0.9, **ours | {"lambda_m": 1.0}), run(foogd, 3, 0.9, 0.9, **ours | {"lambda_a": 0.0}),
    ]  # fmt: skip
    claims = tool("claims")
    table_1 = claims.Claim(claims.LIST["claims"][0])
    low_rate = {str(index): run for index, run in enumerate(runs)}
    accuracy, in_c, auroc, _, *rest = table_1.lines(lambda name: low_rate if name == "cifar10-low-rate" else {})
    assert (accuracy.at, accuracy.measure, accuracy.printed) == ("alpha 0.1", "ACC-IN", pytest.approx(75.09 - 68.03))
    assert accuracy.net == pytest.approx({1: 5.0, 2: 9.0})
    assert accuracy.cells()[1:5] == ("+7.1", "+7.0 ± 2.8 [2]", "confirmed", "–")
    assert auroc.net == pytest.approx({1: 10.0, 2: -1.0})  # each by the detector of its method
    assert auroc.verdict == "in part"
    assert {line.verdict for line in (in_c, *rest)} == {"not tried here"}
    without = claims.by_seed(runs, {"method": foogd, "lambda_a": 0.0}, claims.ACCURACY[0], "published")
    assert without == pytest.approx({3: 90.0})  # the ablation itself is asked for


def test_every_claim_has_what_is_printed_and_the_page_has_them_all():
    claims, page = tool("claims"), (ROOT / "docs" / "results.md").read_text()
    for about in claims.LIST["claims"]:
        lines = list(claims.Claim(about).lines(lambda name: {}))
        assert all(line.printed is not None for line in lines)
        assert lines or not about.get("at")
        assert re.search(rf"\| \[?{re.escape(about['part'])}[^|]* \| {re.escape(about['says'])} \|", page)
        if lines:
            assert about["command"].split()[-1] in sweep_names()
    for names in claims.LIST["columns"].values():
        assert all((ROOT / "results" / f"{name}.csv").is_file() for name in names)


def test_near_images_count_in_no_mean_of_four(kept, monkeypatch):
    monkeypatch.setattr(kept, "RESULTS", ROOT / "results")
    sweep = kept.Sweep.read("cifar10-claims")
    name = "fedavg+foogd-5.0-s21"
    report = sweep.report({name: sweep.runs[name]})
    assert "tinyimagenet" in report.out_sets()
    (four,) = report.values(method="fedavg+foogd", metric="auroc", dataset=kept.FOUR, split="out", detector="msp")
    values = {key[2]: float(value) for key, value in sweep.runs[name].values.items()
              if (key[0], *key[5:]) == ("weighted", "msp", "auroc")}  # fmt: skip
    far = ("LSUN-like crop", "Textures (10 classes)", "isun", "svhn")
    assert four == pytest.approx(fmean(values[out] for out in far))


def test_what_cannot_be_kept_is_said(kept, tmp_path):
    run = make_run(tmp_path / "fedavg-0")
    kept.main(["keep", "small", str(run)])
    wrongs = {
        ("keep", "small", str(tmp_path)): "has no rows: it is no run folder",
        ("keep", "small", str(make_run(tmp_path / "from", init="/a/start"))): "init = '/a/start' names a place",
        ("config", "large", "fedavg-0"): "sweep 'large' is not kept: use small",
        ("config", "small", "fedavg-1"): "sweep 'small' has no run 'fedavg-1': use fedavg-0",
        ("keep", "small"): "python tools/results.py keep SWEEP RUN_FOLDER",
    }
    for words, said in wrongs.items():
        with pytest.raises(InputError, match=re.escape(said)):
            kept.main(words)
    assert list(kept.Sweep.read("small").runs) == ["fedavg-0"]
    kept.main(["keep", "small", str(make_run(tmp_path / "fedavg-s0", good=0.1))])
    with pytest.raises(InputError, match="fedavg-s0 has the label and the seed of fedavg-0"):  # no mean of the two
        kept.main(["page"])


def test_the_first_page_can_be_read_to_its_end():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 1000
    assert len(re.findall(r"\d+\.\d+", text)) <= 25


def test_links_of_the_pages_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose):
            assert link.startswith("https://") or (page.parent / link).exists(), f"{page.name} links {link}"
