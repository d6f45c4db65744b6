"""The report shows the right numbers, marks what cannot be compared, escapes everything and needs nothing else."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import sys
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from made_runs import make_answers, make_run
from matplotlib.text import Text
from sklearn.metrics import roc_auc_score

from foogd.cli import main
from foogd.core.errors import InputError
from foogd.data.corrupt import CORRUPTIONS
from foogd.data.federation import LEFT_OUT
from foogd.evaluation.rows import Row
from foogd.methods import method_names
from foogd.presets.loader import read_preset, resolve
from foogd.reports.collection import find_runs, read_record
from foogd.reports.curves import sensitivities
from foogd.reports.figures import all_figures, file_name, save_figure
from foogd.reports.grids import domain_means, paper_grid
from foogd.reports.grouping import collect
from foogd.reports.html import html_report
from foogd.reports.html.charts import Series, histogram, line_chart, roc_points, tick_text, ticks
from foogd.reports.html.markup import h, join, number
from foogd.reports.narrative import findings, headline
from foogd.reports.tsne import feature_map
from foogd.reports.writers import csv_report, latex_report, markdown_report
from foogd.runs.files import read_rows
from foogd.tables.grid import Cell, Measure, latex_text
from foogd.tables.paper import DOMAINS, departures, published
from foogd.tables.results import Report, paper_detector

VOID = {"meta", "br", "input", "col", "hr"}
NASTY = """<img src=x onerror="alert('1')">&amp;"""


class Page(HTMLParser):
    """The elements of a page; every one must be closed by its own end."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[tuple[str, dict[str, str | None]]] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.cells: list[list[str]] = []
        self.best: list[str] = []
        self.feed(text)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(self.found[-1])
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_endtag(self, tag):
        assert self.stack.pop()[0] == tag

    def handle_data(self, data):
        names = [tag for tag, _ in self.stack]
        if "style" in names or "script" in names:
            return
        self.text.append(data)
        inside = [(tag, attributes) for tag, attributes in self.stack if tag in ("td", "th")]
        if inside:
            self.cells[-1][-1] += data
            if "best" in (inside[-1][1].get("class") or "") and "b" in names:
                self.best.append(data)

    def words(self) -> str:
        return " ".join("".join(self.text).split())


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Three methods, two seeds each, with single answers."""
    root = tmp_path_factory.mktemp("demo")
    for method, good in (("fedavg", 0.0), ("fedavg+foogd", 0.03), ("fedrod+foogd", 0.06)):
        for seed in (0, 1):
            make_run(root / f"{method}-{seed}", method, seed=seed, good=good, rounds=4, eval_every=2)
    return root


@pytest.fixture(scope="module")
def page(demo):
    return html_report(collect(find_runs([demo])), maps=1)


@pytest.fixture(scope="module")
def paper(tmp_path_factory):
    """The paper's settings at two alphas, and one run with fewer rounds."""
    root = tmp_path_factory.mktemp("paper")
    for alpha in (0.1, 0.5):
        for method in ("fedavg", "fedrod+foogd"):
            folder = root / f"{method}-{alpha}"
            make_run(folder, method, preset="cifar10", alpha=alpha, clients=10, samples=False)
    return root


# The page


def test_the_page_is_well_formed_and_needs_nothing_else(page):
    found = Page(page).found
    assert [tag for tag, _ in found].count("script") == 1
    assert not {tag for tag, _ in found} & {"link", "img", "iframe", "object", "embed", "base", "form"}
    for tag, attributes in found:
        assert "src" not in attributes, tag
        assert (attributes.get("href") or "#").startswith("#")
        assert not [name for name in attributes if name.startswith("on")]
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttp", page)
    ids = [attributes["id"] for _, attributes in found if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [attributes["href"][1:] for tag, attributes in found if tag == "a"]
    assert set(links) <= set(ids)
    assert len(links) > 10


def test_every_part_that_was_asked_for_is_there(page):
    keys = [attributes["id"] for tag, attributes in Page(page).found if tag == "section"]
    assert keys == [
        "results", "detectors", "joint", "training", "scores", "maps", "shift", "partition", "clients", "cost", "drift",
        "setup",
    ]  # fmt: skip
    words = Page(page).words()
    for text in (
        "ACC-IN-C",
        "fedrod+foogd",
        "0123456789ab",
        "foogd run config.toml",
        "95\u00a0% of IN",
        "torch 2.13.0",
        "Abacus, AVX2",
    ):
        assert text.replace("\u00a0", " ") in words.replace("\u00a0", " ")


def test_the_same_runs_give_the_same_page(demo, page):
    assert html_report(collect(find_runs([demo])), maps=1) == page


def test_results_show_means_and_deviations_with_the_best_in_bold(demo, page):
    report = collect(find_runs([demo])).scenes[0].report
    expected = Cell(tuple(report.values(method="fedrod+foogd", metric="accuracy", split="in")))
    rows = [cells for cells in Page(page).cells if cells[:1] == ["fedrod+foogdscore norm"]]
    assert rows[0][2] == f"{expected.mean:.1f}± {expected.deviation:.1f}"
    assert f"{expected.mean:.1f}" in Page(page).best
    worst = Cell(tuple(report.values(method="fedavg", metric="accuracy", split="in")))
    assert f"{worst.mean:.1f}" not in Page(page).best


def test_names_cannot_become_markup(tmp_path):
    make_run(tmp_path / "<script>x", "fedavg", names=[NASTY, "b"], rounds=2)
    path = tmp_path / "<script>x" / "partition.json"
    path.write_text(path.read_text().replace("class 0", "</td><img src=y>"))
    text = html_report(collect(find_runs([tmp_path])), title=NASTY)
    found = Page(text).found
    assert not [tag for tag, _ in found if tag == "img"]
    assert [tag for tag, _ in found].count("script") == 1
    assert NASTY in Page(text).words()
    assert not [name for _, attributes in found for name in attributes if name.startswith("on")]


def test_old_runs_lack_sections_and_the_page_says_how_to_make_them(tmp_path):
    make_run(tmp_path / "old", samples=False, drift=False, rounds=2)
    text = html_report(collect(find_runs([tmp_path])))
    keys = [attributes["id"] for tag, attributes in Page(text).found if tag == "section"]
    assert "drift" not in keys
    assert "maps" not in keys
    assert f"foogd evaluate {tmp_path / 'old'}" in Page(text).words()


def head_of(*places):
    """The facts below the title of the page."""
    text = html_report(collect(find_runs(places)), maps=0)
    return re.findall(r"<li>(.*?)</li>", re.search(r'<ul class="facts">.*?</ul>', text).group())


def test_the_head_counts_the_clients_that_there_are(tmp_path):
    make_run(tmp_path / "a", partition="by_domain", clients=0, rounds=2, samples=False)
    path = tmp_path / "a" / "partition.json"
    content = json.loads(path.read_text())
    assert not any("clients" in fact for fact in head_of(tmp_path / "a"))  # nothing in the folder says how many
    path.write_text(json.dumps(content | {"counts": [[1, 2, 3, 4, 5]] * 3}))
    assert "3 clients" in head_of(tmp_path / "a")
    make_run(tmp_path / "b", partition="by_domain", clients=5, rounds=2, samples=False)
    assert "3, 5 clients" in head_of(tmp_path)
    titles = [scene.title for scene in collect(find_runs([tmp_path])).scenes]
    assert titles == ["clients = one a domain", "clients = 5"]


def test_what_nodes_bring_is_no_partition(tmp_path):
    make_run(tmp_path / "a", rounds=2, flower=True, alpha=0.7)
    assert "nodes with their own data" in head_of(tmp_path / "a")
    assert not any("Dirichlet" in fact for fact in head_of(tmp_path / "a"))
    make_run(tmp_path / "b", rounds=2, alpha=0.3)
    assert {"Dirichlet 0.3", "nodes with their own data"} <= set(head_of(tmp_path))


def test_no_command_is_named_that_refuses_a_run_on_flower(tmp_path):
    make_run(tmp_path / "nodes", rounds=2, flower=True)
    words = Page(html_report(collect(find_runs([tmp_path])))).words()
    assert "foogd evaluate" not in words
    assert "stay on the nodes" in words
    assert "foogd run config.toml" not in words
    make_run(tmp_path / "old", rounds=2, samples=False, seed=1)
    words = Page(html_report(collect(find_runs([tmp_path])))).words()
    assert f"foogd evaluate {tmp_path / 'old'}" in words
    assert "stay on the nodes" in words
    assert "foogd run config.toml" in words


def section(text, key):
    return " ".join(Page(re.search(rf'<section id="{key}">.*?</section>', text, re.S).group()).words().split())


def test_thresholds_from_images_set_aside_stand_where_the_price_does(demo, tmp_path):
    for method in ("fedavg", "fedavg+foogd"):
        make_run(tmp_path / method, method, rounds=2, calibration=0.05)
    collection = collect(find_runs([tmp_path]))
    (scene,) = collection.scenes
    found = Cell(tuple(scene.report.values(method="fedavg", metric="rejected_calibrated", split="out", detector="msp",
                                           dataset="digits"))).text()  # fmt: skip
    clean = Cell(tuple(scene.report.values(method="fedavg", metric="rejected_calibrated", split="in", detector="msp")))
    page, text = html_report(collection, maps=0), markdown_report(collection)
    joint = section(page, "joint")
    for words in (joint, text[text.index("## Joint view") :]):
        assert "lets 95 % of its IN test images pass" in words
        assert "lets 95 % of its training images set aside pass" in words
        assert found in words
    price = next(one.text for one in findings(collection) if one.title == "The price of a threshold")
    assert "IN test images" in price
    assert f"Thresholds from training images set aside reject {clean.text()} % of IN" in price
    lines = list(csv.DictReader(io.StringIO(csv_report(collection))))
    assert {line["split"] for line in lines if line["metric"] == "rejected_calibrated"} == {"in", "in-c", "out"}
    plain = collect(find_runs([demo]))
    for words in (section(html_report(plain, maps=0), "joint"), markdown_report(plain)):
        assert "set aside" not in words


def test_what_is_rejected_says_over_what(demo, page):
    assert "Pooled: τ rejects" in page
    assert "weighted over clients" in section(page, "scores")
    assert "weighted over clients" in section(page, "joint")
    price = next(one.text for one in findings(collect(find_runs([demo]))) if one.title == "The price of a threshold")
    assert price.index("weighted over clients") < price.index("Without any effect")


def test_the_page_says_how_many_images_were_tested(demo, page, tmp_path):
    words = section(page, "results")
    assert "Test images: 100 IN and 100 IN-C in each of 20 corruptions and severities." in words
    assert "OUT images: 120 of fashion_out and 120 of digits, all of them for every client." in words
    # Of an older run nobody knows how large the OUT sets were, but for those who set images aside.
    make_run(tmp_path / "old", rounds=2, samples=False)
    assert "OUT images" not in section(html_report(collect(find_runs([tmp_path]))), "results")
    make_run(tmp_path / "aside", rounds=2, samples=False, calibration=0.1)
    words = section(html_report(collect(find_runs([tmp_path]))), "results")
    assert words.count("Test images") == 2
    assert words.count("120 of digits") == 1


def test_titles_count_long_lists_where_their_lengths_tell_them_apart(tmp_path):
    kinds = ["fog", "frost", "snow", "contrast", "pixelate"]
    make_run(tmp_path / "a", rounds=2, corruptions=["fog"])
    make_run(tmp_path / "b", rounds=2, corruptions=kinds)
    assert [s.title for s in collect(find_runs([tmp_path])).scenes] == ["5 corruptions", "corruptions = fog"]
    make_run(tmp_path / "c", rounds=2, corruptions=[*kinds[:4], "spatter"])
    titles = [s.title for s in collect(find_runs([tmp_path])).scenes]
    assert "corruptions = fog, frost, snow, contrast, pixelate" in titles
    assert len(set(titles)) == 3


def test_an_out_set_of_few_images_is_a_caution(tmp_path, monkeypatch):
    monkeypatch.setattr("made_runs.make_answers", partial(make_answers, images=19))
    make_run(tmp_path / "a", rounds=2)
    (note,) = [one.text for one in findings(collect(find_runs([tmp_path]))) if one.title == "To keep in mind"]
    assert "OUT sets of fewer than 20 images, whose numbers mean little: fashion_out (19), digits (19)." in note
    monkeypatch.setattr("made_runs.make_answers", partial(make_answers, images=20))
    make_run(tmp_path / "b" / "a", rounds=2)
    assert "mean little" not in str(findings(collect(find_runs([tmp_path / "b"]))))


def test_clients_that_differ_are_called_by_the_names_of_their_sites(tmp_path):
    folder = make_run(tmp_path / "a", rounds=2)
    partition = json.loads((folder / "partition.json").read_text())
    assert "client 0 has" in str(findings(collect(find_runs([tmp_path]))))
    partition["client_names"] = ["east", "west", "north", "south"]
    (folder / "partition.json").write_text(json.dumps(partition))
    text = str(findings(collect(find_runs([tmp_path]))))
    assert "client 0 east has" in text
    assert "client 3 south" in text


def test_a_choice_of_images_is_no_count_of_a_set(tmp_path, monkeypatch):
    monkeypatch.setattr("foogd.runs.predictions.LIMIT", 50)
    make_run(tmp_path / "a", rounds=2)
    assert "at least 50 of digits" in section(html_report(collect(find_runs([tmp_path]))), "results")


def test_images_of_a_domain_left_out_count_once(tmp_path):
    make_run(tmp_path / "a", rounds=2, samples=False)
    path = tmp_path / "a" / "rows.jsonl"
    row = json.loads(path.read_text().splitlines()[0])
    row |= {"dataset": "sketch", "split": "in-c", "corruption": f"{LEFT_OUT}sketch", "weight": 50.0 * 4}
    path.write_text(path.read_text() + json.dumps(row) + "\n")
    assert "50 of sketch (IN-C)" in section(html_report(collect(find_runs([tmp_path]))), "results")
    (tmp_path / "a" / "flower.json").write_text("{}")  # there each node brings images of its own
    words = section(html_report(collect(find_runs([tmp_path]))), "results")
    assert "200 of sketch (IN-C)" in words
    assert "Images of all nodes are added up." in words


def test_fifty_runs_stay_small(tmp_path):
    for alpha in (0.1, 0.5, 5.0):
        for method in method_names()[:9]:
            for seed in (0, 1):
                make_run(tmp_path / f"{alpha}-{method}-{seed}", method, seed=seed, alpha=alpha, rounds=10,
                         eval_every=5, samples=seed == 0)  # fmt: skip
    collection = collect(find_runs([tmp_path]))
    assert len(collection.records) == 54
    assert len(html_report(collection, maps=0).encode()) < 2_000_000


# Which runs belong together


def test_runs_are_grouped_by_what_differs(tmp_path):
    for alpha in (5.0, 0.1):
        for seed in (0, 1):
            make_run(tmp_path / f"a{alpha}-{seed}", seed=seed, alpha=alpha, samples=False)
            make_run(tmp_path / f"f{alpha}-{seed}", "fedavg+foogd", seed=seed, alpha=alpha, samples=False)
    make_run(tmp_path / "m", "fedavg+foogd", alpha=0.1, lambda_m=0.1, samples=False)
    scenes = collect(find_runs([tmp_path])).scenes
    assert [scene.title for scene in scenes] == ["alpha = 0.1", "alpha = 5"]
    labels = [[(group.label, len(group.records)) for group in scene.groups] for scene in scenes]
    both = ("fedavg+foogd, lambda_m=0.5", 2)
    assert labels == [[("fedavg", 2), ("fedavg+foogd, lambda_m=0.1", 1), both], [("fedavg", 2), both]]


def test_where_the_work_is_done_does_not_make_another_setting(tmp_path):
    make_run(tmp_path / "a", seed=0, samples=False)
    make_run(tmp_path / "b", seed=1, eval_batch=7, detectors=["msp"], samples=False)
    (scene,) = collect(find_runs([tmp_path])).scenes
    assert scene.title == ""
    assert [len(group.records) for group in scene.groups] == [2]


def test_runs_with_more_out_sets_are_compared_on_those_that_all_have(tmp_path):
    make_run(tmp_path / "a", seed=0, out=["fashion_out", "digits"])
    make_run(tmp_path / "b", seed=1, out=["digits", "fashion_out", "noise"], names=["digits", "fashion_out", "noise"])
    make_run(tmp_path / "f", "fedavg+foogd", seed=0, out=["fashion_out", "digits", "noise"])
    collection = collect(find_runs([tmp_path]))
    (scene,) = collection.scenes
    assert scene.title == ""
    assert [(group.label, len(group.records)) for group in scene.groups] == [("fedavg", 2), ("fedavg+foogd", 1)]
    for record in collection.records:
        assert {row.dataset for row in record.rows if row.split == "out"} == {"fashion_out", "digits"}
        assert {one.name for one in record.samples.of("out")} == {"fashion_out", "digits"}
        assert any(row.split == "in" for row in record.rows)
        assert record.samples.of("in")
    assert collection.notes == ("OUT set noise was left out: 2 of 3 runs to compare were tested on it.",)
    assert "noise" not in str(scene.report.headline().markdown())
    assert "noise was left out" in html_report(collection, maps=0)


def test_runs_without_a_common_out_set_have_tables_of_their_own(tmp_path):
    make_run(tmp_path / "a", out=["fashion_out"], samples=False)
    make_run(tmp_path / "b", "fedavg+foogd", out=["digits"], samples=False)
    make_run(tmp_path / "c", "fedrod", out=["digits"], names=["others"], samples=False)  # another set of that name
    collection = collect(find_runs([tmp_path]))
    assert [scene.title for scene in collection.scenes] == ["out = digits", "out = fashion_out"]
    assert collection.notes == ()


def test_two_sets_under_one_path_are_not_one_set(tmp_path):
    make_run(tmp_path / "a", out=["digits", "fashion_out"])
    make_run(tmp_path / "b", "fedrod", out=["fashion_out", "digits"], names=["fashion_out", "others"])
    collection = collect(find_runs([tmp_path]))
    (scene,) = collection.scenes
    assert {row.dataset for row in scene.report.rows if row.split == "out"} == {"fashion_out"}
    assert [note.partition(":")[0] for note in collection.notes] == [
        "OUT set digits was left out",
        "OUT set others was left out",
    ]


def test_each_table_keeps_the_out_sets_of_its_own_runs(tmp_path):
    for alpha, outs in ((0.1, ["fashion_out", "digits"]), (5.0, ["digits"])):
        make_run(tmp_path / f"a{alpha}", alpha=alpha, out=outs, samples=False)
        make_run(tmp_path / f"f{alpha}", "fedavg+foogd", alpha=alpha, out=outs, samples=False)
    few, more = collect(find_runs([tmp_path])).scenes
    assert (few.title, more.title) == ("out = digits, alpha = 5", "out = fashion_out, digits, alpha = 0.1")
    assert {row.dataset for row in more.report.rows if row.split == "out"} == {"fashion_out", "digits"}


def test_a_run_that_stands_there_twice_counts_once(tmp_path):
    make_run(tmp_path / "a", samples=False)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    collection = collect(find_runs([tmp_path]))
    assert len(collection.records) == 1
    assert any("same settings and seed" in note for note in collection.notes)


def test_runs_of_one_seed_on_other_images_are_told_by_their_hash(tmp_path):
    for place, digest in enumerate(("1" * 64, "2" * 64, "2" * 64)):
        make_run(tmp_path / f"a{place}", data_root=f"r{place}", content_hash=digest, samples=False)
    make_run(tmp_path / "p", "fedprox", content_hash="1" * 64, samples=False)
    collection = collect(find_runs([tmp_path]))
    found = {scene.title: [group.label for group in scene.groups] for scene in collection.scenes}
    assert found == {
        "training images with hash 11111111": ["fedavg", "fedprox"],
        "training images with hash 22222222": ["fedavg"],
    }
    different, twin = collection.notes
    assert different.startswith("Runs of one seed and the same settings trained on different images:")
    assert re.search(r"a2 was left out: .*a1 has the same settings and seed\.$", twin)
    assert different in findings(collection)[-1].text


def test_a_seed_may_hold_out_images_of_its_own(tmp_path):
    for seed, digest in enumerate(("1" * 64, "2" * 64)):
        for method in ("fedavg", "fedprox"):
            make_run(tmp_path / f"{method}{seed}", method, seed=seed, content_hash=digest, samples=False)
    make_run(tmp_path / "old", seed=2, samples=False)  # from before the hash was kept
    collection = collect(find_runs([tmp_path]))
    (scene,) = collection.scenes
    assert scene.title == ""
    assert [len(group.records) for group in scene.groups] == [3, 2]
    assert collection.notes == ()


def test_seeds_of_one_split_are_one_line_and_another_split_is_another_setting(tmp_path):
    from foogd.reports.curves import client_accuracies

    for seed in (0, 1, 2):
        make_run(tmp_path / f"a{seed}", seed=seed, split_seed=7, rounds=2, samples=False)
    [scene] = collect(find_runs([tmp_path])).scenes
    [group] = scene.groups
    assert (scene.title, group.label, len(group.records)) == ("", "fedavg", 3)
    assert len(client_accuracies(group, "in")) == 4  # a client is the same one in every seed: its mean over them
    make_run(tmp_path / "b", split_seed=8, rounds=2, samples=False)
    make_run(tmp_path / "c", rounds=2, proportions="authors", samples=False)
    found = {scene.title: len(scene.groups[0].records) for scene in collect(find_runs([tmp_path])).scenes}
    assert found == {
        "split_seed = 7, proportions = none": 3,
        "split_seed = 8, proportions = none": 1,
        "split_seed = auto, proportions = authors": 1,
    }
    make_run(tmp_path / "nodes" / "here", split_seed=7, proportions="my.json", samples=False)
    make_run(tmp_path / "nodes" / "there", flower=True, samples=False)
    assert [s.title for s in collect(find_runs([tmp_path / "nodes"])).scenes] == ["simulated", "on Flower"]
    assert "Dirichlet my.json" in html_report(collect([tmp_path / "nodes" / "here"]), maps=0)


def test_the_authors_shares_are_no_departure_from_the_paper_and_others_are():
    assert departures(settings_of("cifar10", method="fedavg", split_seed=21, proportions="authors")) == []
    given = settings_of("cifar10", method="fedavg", proportions="my.json")
    assert departures(given) == ["proportions my.json instead of authors"]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_on_flower_is_no_seed_of_a_simulated_run(tmp_path, seed):
    make_run(tmp_path / "here", rounds=2, alpha=0.3, samples=False)
    make_run(tmp_path / "nodes", rounds=2, alpha=0.3, seed=seed, flower=True)
    collection = collect(find_runs([tmp_path]))
    assert [scene.title for scene in collection.scenes] == ["simulated", "on Flower"]
    assert [record.folder.name for record in collection.records] == ["here", "nodes"]
    assert collection.notes == ()
    results = section(html_report(collection, maps=0), "results")
    for text in (results, markdown_report(collection), csv_report(collection), latex_report(collection)):
        assert "simulated" in text
        assert "on Flower" in text
        assert "over 2 seeds" not in text
    assert results.count("Images of all nodes are added up.") == 1


def test_runs_of_one_kind_need_no_word_for_it(tmp_path):
    for seed in (0, 1):
        make_run(tmp_path / f"nodes{seed}", rounds=2, seed=seed, flower=True)
    (scene,) = collect(find_runs([tmp_path])).scenes
    assert scene.title == ""
    assert [len(group.records) for group in scene.groups] == [2]


def test_what_shares_images_out_says_nothing_about_those_of_nodes(tmp_path):
    for alpha in (0.1, 5.0):
        make_run(tmp_path / f"here{alpha}", rounds=2, alpha=alpha, samples=False)
    make_run(tmp_path / "nodes", rounds=2, alpha=0.1, out=["fashion_out"], names=["scans"], flower=True)
    collection = collect(find_runs([tmp_path]))
    titles = [scene.title for scene in collection.scenes]
    assert titles == ["simulated, alpha = 0.1", "simulated, alpha = 5", "on Flower"]
    (names,) = {tuple(lines) for lines in sensitivities(collection)["alpha"].values()}
    assert names == ("fedavg, simulated",)
    assert {row.dataset for row in collection.scenes[0].report.rows if row.split == "out"} == {"fashion_out", "digits"}
    # Whoever gives two such runs other values means two experiments.
    make_run(tmp_path / "others", rounds=2, alpha=5.0, out=["fashion_out"], names=["scans"], flower=True)
    titles = [scene.title for scene in collect(find_runs([tmp_path])).scenes]
    assert titles[2:] == ["on Flower, alpha = 0.1", "on Flower, alpha = 5"]


def test_the_data_set_does_not_say_where_a_run_was_made(tmp_path):
    make_run(tmp_path / "here", rounds=2, samples=False)
    make_run(tmp_path / "nodes", preset="cifar10", rounds=2, flower=True)
    titles = [scene.title for scene in collect(find_runs([tmp_path])).scenes]
    assert titles == ["simulated, data = fashion", "on Flower, data = cifar10"]


def test_the_last_evaluated_round_counts_even_where_the_name_of_the_run_has_changed(tmp_path):
    folder = make_run(tmp_path / "a", rounds=4, eval_every=2, samples=False)
    lines = (folder / "rows.jsonl").read_text().splitlines()
    lines = [line.replace('"run": "fedavg-0"', '"run": "old"') if '"round": 2' in line else line for line in lines]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (scene,) = collect([folder]).scenes
    assert {row.round for row in scene.report.rows} == {4}


def test_an_unfinished_run_is_shown_and_named(tmp_path):
    make_run(tmp_path / "half", rounds=10, eval_every=2, done=4)
    collection = collect(find_runs([tmp_path]))
    assert not collection.records[0].finished
    assert any("half (4 of 10 rounds);" in one.text for one in findings(collection))


def test_a_run_that_is_not_as_far_as_other_seeds_is_in_no_mean(tmp_path):
    for seed, done in ((0, 10), (1, 10), (2, 4)):
        make_run(tmp_path / f"s{seed}", seed=seed, rounds=10, eval_every=2, done=done, samples=False)
    collection = collect(find_runs([tmp_path]))
    assert [record.seed for record in collection.records] == [0, 1]
    assert collection.scenes[0].report.seeds() == [0, 1]
    assert collection.notes == ("s2 was left out: it is at round 4 of 10, and another run of it is at 10.",)
    assert collection.notes[0] in findings(collection)[-1].text


def test_what_is_not_finished_is_marked_and_neither_best_nor_compared(tmp_path):
    for seed in (0, 1):
        make_run(tmp_path / f"a{seed}", preset="cifar10", seed=seed, clients=10, done=10, good=0.1, samples=False)
    make_run(tmp_path / "b", "fedrod", preset="cifar10", clients=10, samples=False)
    collection = collect(find_runs([tmp_path]))
    grid = paper_grid(collection.scenes[0])
    half, whole = grid.lines
    assert (half.method, half.marks) == ("fedavg", ("round 10 of 100",))
    assert half.cells[0].mean > whole.cells[0].mean
    assert not any(cell.best for cell in half.cells)
    assert whole.cells[0].best
    compared = sum(cell.published is not None for cell in whole.cells)
    texts = [one.text for one in findings(collection) if one.title == "Against the paper"]
    assert f" of {compared} numbers" in texts[0]
    assert texts[1].startswith("1 lines")
    assert "† fedavg: not finished: round 10 of 100." in Page(html_report(collection, maps=0)).words()
    assert "fedavg†" in markdown_report(collection)


def test_the_anchored_variant_is_named_and_told_by_its_own_settings_alone(tmp_path):
    made = {
        "published": {},
        "no-sag": {"lambda_a": 0.0},
        "anchored": {"profile": "anchored"},
        "flat": {"profile": "anchored", "whiten": 0.0},
    }
    for name, changes in made.items():
        make_run(tmp_path / name, "fedavg+foogd", **changes)
    collection = collect(find_runs([tmp_path]))
    (scene,) = collection.scenes
    labels = {group.records[0].folder.name: group.label for group in scene.groups}
    assert labels == {
        "published": "fedavg+foogd, lambda_a=0.05",
        "no-sag": "fedavg+foogd, lambda_a=0",
        "anchored": "fedavg+foogd (anchored, not in the paper), whiten=0.3",
        "flat": "fedavg+foogd (anchored, not in the paper), whiten=0",
    }
    lines = paper_grid(scene).lines
    assert [line.method for line in lines] == [labels[name] for name in ("no-sag", "published", "flat", "anchored")]
    assert {line.detector for line in lines} == {"score_norm"}
    for text in (markdown_report(collection), csv_report(collection), latex_report(collection)):
        told = text.replace("\\_", "_")
        assert all(label in told for label in labels.values())
    words = Page(html_report(collection, maps=0)).words()
    assert all(label in words for label in labels.values())
    assert {row.method for row in read_rows(tmp_path / "anchored")} == {"fedavg+foogd"}
    for name, figure in all_figures(collection, maps=0):
        texts = {text.get_text() for text in figure.findobj(Text)}
        shown = {text.replace("\n", " ") for text in texts}
        wanted = [label for label in labels.values() if not name.startswith("sensitivity")]
        wanted += ["fedavg+foogd (anchored, not in the paper)"] * (name == "sensitivity-whiten")
        for label in wanted:
            assert any(text.startswith(label) for text in shown), (name, label)


def test_a_report_of_the_anchored_variant_alone_is_called_by_it(tmp_path):
    make_run(tmp_path / "a", "fedavg+foogd", profile="anchored", samples=False)
    collection = collect(find_runs([tmp_path]))
    assert "fedavg+foogd (anchored, not in the paper)" in headline(collection)


def test_where_a_run_started_makes_no_table_of_its_own(tmp_path):
    for seed in (0, 1, 2):
        make_run(tmp_path / f"a{seed}", "fedavg+foogd", seed=seed, samples=False)
        make_run(tmp_path / f"f{seed}", "fedavg+foogd", seed=seed, train_base=False, init=f"runs/{seed}", samples=False)
    (scene,) = collect(find_runs([tmp_path])).scenes
    assert scene.title == ""
    assert [(group.label, len(group.records)) for group in scene.groups] == [
        ("fedavg+foogd, train_base=false", 3),
        ("fedavg+foogd, train_base=true", 3),
    ]


def test_a_warm_start_is_a_line_of_its_own(tmp_path):
    for seed in (0, 1):
        make_run(tmp_path / f"cold{seed}", seed=seed, samples=False)
        make_run(tmp_path / f"warm{seed}", seed=seed, init=f"runs/{seed}", samples=False)
    (scene,) = collect(find_runs([tmp_path])).scenes
    assert {(group.label, len(group.records)) for group in scene.groups} == {
        ("fedavg, init=none", 2),
        ("fedavg, init=given", 2),
    }


def test_a_folder_from_before_a_setting_existed_has_its_default(tmp_path):
    for seed, aggregation in ((0, "mean"), (1, "mean"), (2, "median")):
        make_run(tmp_path / f"s{seed}", seed=seed, aggregation=aggregation, samples=False)
    path = tmp_path / "s0" / "config.toml"
    kept = [line for line in path.read_text().splitlines() if not line.startswith(("aggregation", "severities"))]
    path.write_text("\n".join(kept) + "\n")
    scenes = collect(find_runs([tmp_path])).scenes
    assert [scene.title for scene in scenes] == ["aggregation = mean", "aggregation = median"]
    assert [len(scene.groups[0].records) for scene in scenes] == [2, 1]


def broken(folder, name, text):
    (folder / name).write_text(text(folder.joinpath(name).read_text()) if callable(text) else text)


DAMAGE = [
    ("config.toml", lambda old: old.replace("seed = 0", 'seed = "x"'), "seed is 'x'; a whole number"),
    ("config.toml", lambda old: old.replace("alpha = ", "alpha = true #"), "alpha is True; a number"),
    ("config.toml", "method =", "is not TOML"),
    ("environment.json", '{"versions": 3}', "versions is of the type int"),
    ("partition.json", '{"counts": [[1, 2], [3]]}', "counts are not"),
    ("partition.json", '{"counts": [[1, "2"], [3, 4]]}', "counts are not"),
    ("partition.json", '{"counts": [[], []]}', "counts are not"),
    ("partition.json", '{"content_hash": 3}', "content_hash is of the type int"),
    ("partition.json", '{"training_images_in_tests": {"d": "many"}}', "not whole numbers"),
    ("rounds.jsonl", lambda old: old.replace('"losses": {', '"losses": [], "x": {', 1), "damaged"),
    ("rounds.jsonl", lambda old: old.replace('"seconds": 1.5', '"seconds": "1.5"', 1), "seconds is of the type str"),
    ("rows.jsonl", "{}\n", "is not a row"),
    ("rows.jsonl", lambda old: old.replace('"weight": 100.0', '"weight": NaN', 1), "rows.jsonl is damaged: line 1 has"),
    ("rows.jsonl", lambda old: old.replace('"weight": 100.0', '"weight": Infinity', 1), "the weight inf; a finite"),
]


@pytest.mark.parametrize(("name", "text", "sentence"), DAMAGE)
def test_a_damaged_folder_is_one_sentence_and_leaves_the_others(tmp_path, name, text, sentence):
    make_run(tmp_path / "whole", seed=1, rounds=2, samples=False)
    broken(make_run(tmp_path / "torn", rounds=2, samples=False), name, text)
    collection = collect(find_runs([tmp_path]))
    assert [record.folder.name for record in collection.records] == ["whole"]
    (note,) = collection.notes
    assert note.startswith("torn was left out: ")
    assert sentence in note
    assert sentence in Page(html_report(collection, maps=0)).words()
    with pytest.raises(InputError, match=re.escape(sentence)):
        collect([tmp_path / "torn"])


def test_damaged_answers_are_left_out_and_the_note_says_how_to_make_them_again(tmp_path):
    for seed in (0, 1):
        make_run(tmp_path / f"s{seed}", seed=seed, rounds=2)
    path = tmp_path / "s0" / "samples.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    collection = collect(find_runs([tmp_path]))
    assert [record.samples is None for record in collection.records] == [True, False]
    assert collection.groups[0].answered.seed == 1
    (note,) = collection.notes
    assert note.startswith("The single answers of s0 were left out: ")
    assert note.endswith(f"make it again: foogd evaluate {tmp_path / 's0'}.")
    assert "foogd evaluate" in html_report(collection, maps=0)


def test_places_without_runs_are_named_and_do_not_stop_a_report(tmp_path, monkeypatch):
    run_folder = make_run(tmp_path / "a", samples=False)
    (tmp_path / "empty").mkdir()
    (tmp_path / "table.md").write_text("")
    heard: list[str] = []
    assert find_runs([run_folder, tmp_path / "empty", tmp_path / "table.md"], heard.append) == [run_folder]
    assert [("holds no run" in heard[0]), ("is a file" in heard[1])] == [True, True]
    with pytest.raises(InputError, match="is a file"):
        find_runs([tmp_path / "table.md"])
    (run_folder / "inside").mkdir()
    monkeypatch.chdir(run_folder / "inside")
    assert find_runs([Path("..")]) == [Path("..")]


def test_linked_runs_are_found_once_and_circles_of_links_end(tmp_path):
    run_folder = make_run(tmp_path / "kept" / "a", samples=False)
    chosen = tmp_path / "chosen"
    chosen.mkdir()
    (chosen / "a").symlink_to(run_folder)
    (chosen / "a_again").symlink_to(run_folder)
    (chosen / "circle").symlink_to(chosen)
    assert find_runs([chosen]) == [chosen / "a"]


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        find_runs([tmp_path / "nothing"])
    with pytest.raises(InputError, match="holds no run"):
        find_runs([tmp_path])
    folder = make_run(tmp_path / "a", samples=False)
    (folder / "rows.jsonl").unlink()
    with pytest.raises(InputError, match="nothing to report"):
        collect([folder])


# Published numbers


@pytest.mark.parametrize(
    ("preset", "method", "changes", "about", "value"),
    [
        ("cifar10", "fedavg", {"alpha": 0.1}, {"metric": "accuracy", "split": "in"}, 68.03),
        ("cifar10", "fedrod+foogd", {"alpha": 5.0},
         {"metric": "auroc", "split": "out", "dataset": "lsun_c", "detector": "score_norm"}, 96.25),
        ("cifar100", "fedavg", {"alpha": 0.5},
         {"metric": "accuracy", "split": "in-c", "corruption": "brightness"}, 54.62),
        ("cifar10", "fedavg+foogd", {"alpha": 0.1, "lambda_a": 0.0}, {"metric": "accuracy", "split": "in"}, 73.15),
        ("cifar10", "fedavg+foogd", {"alpha": 0.1, "lambda_m": 0.0}, {"metric": "accuracy", "split": "in"}, 74.70),
        ("cifar10", "fedavg+foogd", {"alpha": 0.1, "train_base": False},
         {"metric": "fpr95", "split": "out", "dataset": "lsun_c", "detector": "score_norm"}, 51.27),
        ("cifar10", "fedrod", {"alpha": 0.5},
         {"metric": "auroc", "split": "out", "dataset": "lsun_c", "detector": "energy"}, 90.93),
        ("cifar10", "foster", {"alpha": 0.1},
         {"metric": "fpr95", "split": "out", "dataset": "svhn", "detector": "msp"}, 39.55),
        ("tinyimagenet", "fedicon", {}, {"metric": "accuracy", "split": "in"}, 60.98),
        ("pacs", "fedthe", {"leave_out": "photo"}, {"metric": "accuracy", "split": "in-c"}, 93.57),
        ("pacs", "fedthe", {"leave_out": "photo"},
         {"metric": "accuracy", "split": "in-c", "corruption": "domain photo"}, 93.57),
        ("cifar10", "fedavg", {"alpha": 0.1},
         {"metric": "accuracy", "split": "in-c", "corruption": "brightness"}, 65.44),
    ],
)  # fmt: skip
def test_published_numbers_are_those_that_are_printed(preset, method, changes, about, value):
    settings = {**read_preset(preset), "method": method, **changes}
    assert published(settings, **about).mean == value


def test_there_is_a_published_number_for_no_other_setting():
    settings = {**read_preset("cifar10"), "method": "fedavg", "alpha": 0.1}
    about = {"metric": "accuracy", "split": "in"}
    assert published(settings, **about) is not None
    for changes in ({"alpha": 0.2}, {"data": "fashion"}, {"method": "fedavg+aug"}):
        assert published({**settings, **changes}, **about) is None
    assert published(settings, metric="auroc", split="out", dataset="lsun_c", detector="energy") is None


def test_published_corruptions_and_methods_have_the_names_of_the_code():
    text = (Path(published.__code__.co_filename).parent / "paper.csv").read_text()
    lines = list(csv.DictReader(text.splitlines()))
    assert {line["corruption"] for line in lines} - {"", "all"} == set(CORRUPTIONS)
    assert {line["method"] for line in lines} <= set(method_names())
    for data in ("cifar10", "cifar100"):
        for method in ("fedavg", "fedrod+foogd"):
            about = {"data": data, "method": method, "table": "corruptions"}
            own = {line["corruption"]: float(line["mean"]) for line in lines if about.items() <= line.items()}
            average = own.pop("all")
            assert np.mean(list(own.values())) == pytest.approx(average, abs=0.6)  # as printed, rounded there


def settings_of(preset, **changes):
    from foogd.methods import method_settings

    config, method = resolve(read_preset(preset), {"lr": 0.1, **changes})  # the printed rate
    return {**vars(config), **method_settings(method)}


def test_runs_of_before_updates_were_bound_stand_in_one_line_with_those_of_today(tmp_path):
    make_run(tmp_path / "old", update_bound=0.0)
    make_run(tmp_path / "new", seed=1)
    [scene] = collect(find_runs([tmp_path])).scenes
    assert [len(group.records) for group in scene.groups] == [2]
    make_run(tmp_path / "bound", seed=1, update_bound=5.0)
    assert len(collect(find_runs([tmp_path])).scenes) == 2


def test_departures_name_what_differs_from_the_paper():
    assert departures(settings_of("cifar10", method="fedrod+foogd", alpha=5.0, seed=3)) == []
    assert departures(settings_of("cifar10", method="fedavg+foogd", lambda_a=0.01)) == ["lambda_a 0.01 instead of 0.05"]
    assert departures(settings_of("cifar10", method="fedrod", eval_every=1, update_bound=0.0)) == []
    assert departures(settings_of("cifar10", method="fedrod", update_bound=5.0)) == ["update_bound 5 instead of auto"]
    assert departures(settings_of("cifar10", method="fedavg", rounds=4)) == ["rounds 4 instead of 100"]
    assert departures(settings_of("cifar10", method="fedavg", lr=0.01)) == ["lr 0.01 instead of 0.1"]  # our tables'
    other = settings_of("cifar10", method="fedavg+foogd", lambda_m=0.3)
    assert departures(other) == ["lambda_m 0.3 instead of 0.5"]
    assert departures(settings_of("cifar10", method="fedavg+foogd", lambda_a=0.0)) == []  # an ablation of the paper
    frozen = settings_of("cifar10", method="fedavg+foogd", train_base=False, init="runs/a")
    assert departures(frozen) == []
    still = {**frozen, "lambda_a": 0.0, "alpha": 5.0}  # what does not train has no Stein term
    assert published(still, metric="accuracy", split="in").mean == 86.5
    assert departures({**frozen, "train_base": True}) == ["init runs/a instead of "]
    anchored = settings_of("cifar10", method="fedrod+foogd", profile="anchored", steps=3, rounds=4)
    assert departures(anchored) == ["anchored, not in the paper", "rounds 4 instead of 100"]
    neither = settings_of("cifar10", method="fedavg+foogd", alpha=5.0, lambda_a=0.0, lambda_m=0.0)
    assert published(neither, metric="accuracy", split="in").mean == 88.9  # no ablation of the paper: the method's own
    assert departures(neither) == ["lambda_m 0 instead of 0.5", "lambda_a 0 instead of 0.05"]


def test_the_page_shows_the_published_number_and_the_difference(paper):
    collection = collect(find_runs([paper]))
    grid = paper_grid(collection.scenes[0])
    line = next(line for line in grid.lines if line.method == "fedavg")
    cell = line.cells[0]
    assert cell.published.mean == 68.03
    assert cell.difference == pytest.approx(cell.mean - 68.03)
    text = html_report(collection, maps=0)
    rows = [cells for cells in Page(text).cells if cells[:1] == ["fedavgMSP"]]
    shown = f"{cell.mean:.1f}paper 68.0{cell.difference:+.1f}".replace("-", "−")
    assert rows[0][2] == shown
    assert not any(line.marks for line in grid.lines)
    assert "†" not in text.replace('"†"', "")


def test_the_anchored_variant_beside_a_published_number_is_marked_and_the_published_method_is_not(tmp_path):
    for name, changes in {"p": {}, "a": {"profile": "anchored"}}.items():
        make_run(tmp_path / name, "fedavg+foogd", preset="cifar10", clients=10, samples=False, **changes)
    collection = collect(find_runs([tmp_path]))
    marks = {line.method: line.marks for line in paper_grid(collection.scenes[0]).lines}
    ours = "fedavg+foogd (anchored, not in the paper)"
    assert marks == {"fedavg+foogd": (), ours: ("anchored, not in the paper",)}
    text = Page(html_report(collection, maps=0)).words()
    assert f"† {ours}: not the published settings: anchored, not in the paper." in text


def test_a_run_at_other_settings_is_marked(tmp_path):
    make_run(tmp_path / "a", preset="cifar10", rounds=4, samples=False)
    text = Page(html_report(collect(find_runs([tmp_path])), maps=0)).words()
    assert "† fedavg: not the published settings: clients 4 instead of 10; rounds 4 instead of 100." in text
    make_run(tmp_path / "b", preset="cifar100", rounds=4, samples=False)
    make_run(tmp_path / "c", "fedrod", preset="cifar100", rounds=4, samples=False)
    make_run(tmp_path / "d", preset="tinyimagenet", rounds=5, samples=False)
    text = Page(html_report(collect(find_runs([tmp_path])), maps=0)).words()
    # A method that is marked for one reason needs no place, one with several does.
    both = "not the published settings: clients 4 instead of 10; rounds 4 instead of 100"
    at = "rounds = 4"
    assert f"† fedavg (data = cifar10, {at}), fedavg (data = cifar100, {at}), fedrod: {both}." in text
    assert "† fedavg (data = tinyimagenet, rounds = 5): not the published settings: clients 4" in text


def test_the_dagger_stands_wherever_a_published_number_does(tmp_path):
    make_run(tmp_path / "a", "fedrod+foogd", preset="cifar10", rounds=4, samples=False)
    make_run(tmp_path / "b", "fedavg", preset="cifar10", rounds=4, samples=False)
    text = html_report(collect(find_runs([tmp_path])), maps=0)
    for key in ("detectors", "shift"):
        section = text[text.index(f'id="{key}"') :]
        section = section[: section.index("</section>")]
        page = Page(f"<section {section}</section>")
        with_paper = {cells[0] for cells in page.cells if any("paper " in cell for cell in cells[1:])}
        heads = {cell for cell in page.cells[0] if "fed" in cell}
        names = with_paper if key == "detectors" else heads
        assert names
        assert all(name.endswith("†") for name in names), (key, names)
        assert "What † stands for" in page.words()


def test_the_mean_over_the_domains_left_out_stands_beside_the_published_one(tmp_path):
    domains = ("art_painting", "cartoon", "photo", "sketch")
    for place, domain in enumerate(domains):
        for seed in (0, 1) if domain != "photo" else (0,):
            make_run(tmp_path / f"{domain}{seed}", preset="pacs", leave_out=domain, seed=seed, clients=3,
                     good=0.05 * place, samples=False)  # fmt: skip
    for folder in tmp_path.iterdir():
        path = folder / "rows.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        left_out = folder.name[:-1]
        shifted = {**rows[0], "round": rows[-1]["round"], "split": "in-c", "dataset": left_out, "value": 0.5}
        shifted["corruption"] = f"{LEFT_OUT}{left_out}"  # as a run of PACS writes it
        shifted["value"] += 0.1 * domains.index(folder.name[:-1])
        path.write_text(path.read_text() + json.dumps(shifted) + "\n")
    collection = collect(find_runs([tmp_path]))
    ((title, grid),) = domain_means(collection)
    assert title == "mean over leave_out = art_painting, cartoon, photo, sketch"
    for scene, printed in zip(collection.scenes, (97.21, 62.58, 91.0, 35.28), strict=True):
        (line,) = paper_grid(scene).lines
        (cell,) = [cell for cell, column in zip(line.cells, grid.columns, strict=True) if column.title == "ACC-IN-C"]
        assert cell.published.mean == printed
    (line,) = grid.lines
    place = [column.title for column in grid.columns].index("ACC-IN-C")
    assert line.cells[place].values == pytest.approx((0.65,))  # seed 1 has no photo
    assert line.cells[place].published.mean == 71.52
    assert not line.marks
    for text in (Page(html_report(collection, maps=0)).words(), markdown_report(collection), csv_report(collection)):
        assert title in text
    assert "(71.5)" in latex_report(collection)
    ((_, fewer),) = domain_means(collect([one for one in tmp_path.iterdir() if "sketch" not in one.name]))
    assert not fewer.has_published


def test_a_mean_over_domains_has_no_number_that_a_domain_lacks(tmp_path):
    for place, domain in enumerate(sorted(DOMAINS)):
        for seed in (0, 1):
            asked = ["msp", "energy"] if (domain, seed) != ("sketch", 1) else ["energy"]
            make_run(tmp_path / f"{domain}{seed}", preset="pacs", leave_out=domain, seed=seed, clients=3,
                     good=0.05 * place, detectors=asked, samples=False)  # fmt: skip
    collection = collect(find_runs([tmp_path]))
    ((_, grid),) = domain_means(collection)
    (line,) = grid.lines
    about = {"metric": "auroc", "split": "out", "detector": "msp", "dataset": grid.columns[-1].dataset}
    whole = [scene.report.values(method="fedavg", **about)[0] for scene in collection.scenes]  # of seed 0
    assert line.detector == "msp"
    assert line.cells[-1].values == pytest.approx((np.mean(whole),))
    assert line.seeds == (1, 2)
    ((_, grid),) = domain_means(collect([path for path in tmp_path.iterdir() if path.name.endswith("1")]))
    (line,) = grid.lines
    assert line.detector == "msp"
    empty = [column.title for column, cell in zip(grid.columns, line.cells, strict=True) if not cell.values]
    assert set(empty) == {"FPR95", "AUROC"}
    assert line.cells[0].values


def test_published_averages_are_those_of_the_domains():
    for method in ("fedavg", "fedrod", "fedt3a", "fediir", "fedthe", "fedicon", "fedavg+foogd", "fedrod+foogd"):
        settings = {**read_preset("pacs"), "method": method}
        about = {"metric": "accuracy", "split": "in-c"}
        own = [published({**settings, "leave_out": one}, **about).mean for one in sorted(DOMAINS)]
        assert published({**settings, "leave_out": "all"}, **about).mean == pytest.approx(np.mean(own), abs=0.011)


def test_a_run_on_flower_has_no_published_number_and_says_why(tmp_path):
    make_run(tmp_path / "here", preset="cifar10", clients=10, samples=False)
    make_run(tmp_path / "nodes", preset="cifar10", clients=10, flower=True)
    collection = collect(find_runs([tmp_path]))
    here, nodes = (paper_grid(scene) for scene in collection.scenes)
    assert here.has_published
    assert not nodes.has_published
    assert not here.lines[0].marks
    compared = sum(cell.published is not None for cell in here.lines[0].cells)
    texts = [one.text for one in findings(collection) if one.title == "Against the paper"]
    assert len(texts) == 1
    assert f" of {compared} numbers" in texts[0]
    why = "no published numbers: on Flower the images and their split are those of the nodes"
    assert f"† fedavg: {why}" in section(html_report(collection, maps=0), "results")
    assert f"† fedavg: {why}" in markdown_report(collection)
    assert why in latex_report(collection)
    lines = list(csv.DictReader(io.StringIO(csv_report(collection))))
    assert {line["setting"] for line in lines if line["published"]} == {"simulated"}
    assert {line["setting"] for line in lines if "of the nodes" in line["departs"]} == {"on Flower"}
    alone = html_report(collect([tmp_path / "nodes"]), maps=0)
    assert 'class="pub"' not in alone
    assert why in alone


def test_a_run_on_flower_without_a_published_counterpart_is_not_marked(tmp_path):
    make_run(tmp_path / "nodes", rounds=2, flower=True)
    assert "published" not in Page(html_report(collect([tmp_path / "nodes"]), maps=0)).words()


def test_means_over_domains_of_nodes_have_no_published_number(tmp_path):
    for domain in DOMAINS:
        make_run(tmp_path / domain, preset="pacs", leave_out=domain, clients=3, corruptions=[], flower=True)
        path = tmp_path / domain / "rows.jsonl"
        row = json.loads(path.read_text().splitlines()[-1])
        row |= {"detector": None, "metric": "accuracy", "split": "in-c", "corruption": f"{LEFT_OUT}{domain}"}
        path.write_text(path.read_text() + json.dumps(row) + "\n")
    ((_, grid),) = domain_means(collect(find_runs([tmp_path])))
    assert not grid.has_published
    assert "on Flower" in grid.lines[0].footnote


def test_settings_that_follow_from_the_data_are_not_said_again(tmp_path):
    for preset, clients in (("cifar10", 10), ("cifar100", 5)):
        for alpha in (0.1, 5.0):
            make_run(tmp_path / f"{preset}-{alpha}", preset=preset, clients=clients, alpha=alpha, samples=False)
    collection = collect(find_runs([tmp_path]))
    assert [scene.title for scene in collection.scenes] == [
        f"data = {data}, alpha = {alpha}" for data in ("cifar10", "cifar100") for alpha in ("0.1", "5")
    ]
    assert {dict(scene.setting)["clients"] for scene in collection.scenes} == {10, 5}
    # Of one data set, every setting that differs is said.
    more = make_run(tmp_path / "more", preset="cifar10", clients=7, alpha=5.0, samples=False)
    collection = collect([tmp_path / "cifar10-0.1", more])
    assert [scene.title for scene in collection.scenes] == ["clients = 7, alpha = 5", "clients = 10, alpha = 0.1"]


# Findings


def rows_of(values, **about):
    blank = {"run": "r", "round": 1, "scope": "weighted", "client": None, "dataset": "d", "split": "in",
             "corruption": None, "severity": None, "detector": None, "metric": "accuracy", "weight": 1.0}  # fmt: skip
    return [Row(**{**blank, **about, "seed": seed, "value": value}) for seed, value in enumerate(values)]


def test_a_method_that_adapts_to_its_test_stream_is_read_with_care(tmp_path):
    def cautions(**settings):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        make_run(folder / "a", "fedavg", samples=False)
        make_run(folder / "b", samples=False, **settings)
        return findings(collect(find_runs([folder])))[-1].text

    assert "fedt3a adapts to the test stream" in cautions(method="fedt3a")
    assert "fedthe+foogd adapts" in cautions(method="fedthe+foogd")
    assert "stream" not in cautions(method="fedt3a", adapt=False)
    assert "stream" not in cautions(method="fedrod")
    make_run(tmp_path / "no OUT", "fedt3a", samples=False, out=())
    assert "stream" not in findings(collect(find_runs([tmp_path / "no OUT"])))[-1].text
    folder = tmp_path / "changed by hand"
    make_run(folder, "foster", samples=False)
    config = folder / "config.toml"
    config.write_text(re.sub(r"(?m)^select = .*", "select = 1000000", config.read_text()))
    assert "stream" not in findings(collect(find_runs([folder])))[-1].text


def test_whoever_pools_data_is_named(tmp_path):
    for generator in ("fed_gan", "central"):
        make_run(tmp_path / generator, "fedatol", samples=False, generator=generator)
        said = "the server trained on the images of all clients" in findings(collect(find_runs([tmp_path])))[-1].text
        assert said == (generator == "central")


def test_the_best_is_named_and_a_small_lead_is_called_level(demo, tmp_path):
    texts = {one.title: one.text for one in findings(collect(find_runs([demo])))}
    assert texts["Clean images"].startswith("fedrod+foogd classifies")
    assert "points more than fedavg+foogd" in texts["Clean images"]
    assert "To keep in mind" not in texts
    make_run(tmp_path / "a", "fedavg", samples=False)
    make_run(tmp_path / "b", "fedrod", samples=False)
    assert "one seed" in findings(collect(find_runs([tmp_path])))[-1].text
    from foogd.reports.narrative import _lead, ranking

    close = Report.of([*rows_of([0.7, 0.8], method="a"), *rows_of([0.74, 0.78], method="b")])
    assert "level with" in _lead(ranking(close, Measure("accuracy", "in")))
    far = Report.of([*rows_of([0.70, 0.71], method="a"), *rows_of([0.90, 0.91], method="b")])
    assert _lead(ranking(far, Measure("accuracy", "in"))) == ", 20.0 points more than a"


def test_the_detectors_of_the_paper_are_not_chosen_by_their_numbers(tmp_path):
    make_run(tmp_path / "a", "fedavg", detectors=["energy", "knn"], good=0.1, samples=False)
    make_run(tmp_path / "f", "fedavg+foogd", detectors=["score_norm", "energy", "knn"], samples=False)
    texts = {one.title: one.text for one in findings(collect(find_runs([tmp_path])))}
    for name in ("fashion_out", "digits"):
        text = texts[f"Unknown images: {name}"]
        assert "fedavg with KNN separates them best" in text
        assert "Of the detectors that the paper uses, the best is fedavg+foogd with score norm (" in text


def test_the_price_of_a_threshold_is_that_of_the_detectors_in_the_table(tmp_path):
    for method in ("fedavg", "fedprox"):
        folder = make_run(tmp_path / method, method, detectors=["energy", "knn"], samples=False)
        rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
        for row in rows:
            if (row["metric"], row["detector"]) == ("rejected", "knn"):
                row["value"] = 0.0 if method == "fedavg" else 0.9
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    collection = collect(find_runs([tmp_path]))
    assert {line.detector for line in paper_grid(collection.scenes[0]).lines} == {"energy"}
    texts = {one.title: one.text for one in findings(collection)}
    assert texts["The price of a threshold"].count("with energy") == 2
    assert "KNN" not in texts["The price of a threshold"]


def test_what_is_not_finished_wins_nothing(tmp_path):
    make_run(tmp_path / "a", "fedavg", samples=False, severities=[1])
    make_run(tmp_path / "b", "fedprox", samples=False, severities=[1], done=1, good=0.1)
    collection = collect(find_runs([tmp_path]))
    texts = {one.title: one.text for one in findings(collection)}
    assert re.fullmatch(r"fedavg classifies [\d.]+ % of the clean test images\.", texts["Clean images"])
    assert texts["Shifted images"].startswith("fedavg keeps")
    assert texts["Unknown images: digits"].startswith("Of 3 pairs of method and detector, fedavg with")
    assert "fedprox" not in texts["The price of a threshold"]
    assert "costs fedavg most" in texts["Weak points"]
    assert "Not finished: b (1 of 10 rounds)" in texts["To keep in mind"]
    shifted = Page(re.search(r'<section id="shift">.*?</section>', html_report(collection, maps=0), re.S).group())
    assert shifted.cells[0][1:] == ["fedavg", "fedprox†"]
    assert shifted.best == [cells[1] for cells in shifted.cells[1:]]
    # Where nothing is finished, a name says how far it is.
    alone = {one.title: one.text for one in findings(collect([tmp_path / "b"]))}
    assert alone["Clean images"].startswith("fedprox (round 1 of 10) classifies")
    assert "fedprox with KNN (round 1 of 10) separates them best" in alone["Unknown images: digits"]


def test_of_two_that_look_the_same_neither_is_ahead(tmp_path):
    folders = [make_run(tmp_path / name, name, detectors=["msp"], samples=False) for name in ("fedavg", "fedprox")]
    rows = (folders[0] / "rows.jsonl").read_text()
    (folders[1] / "rows.jsonl").write_text(rows.replace('"fedavg', '"fedprox'))
    texts = {one.title: one.text for one in findings(collect(folders))}
    assert texts["Clean images"].endswith(", as much as fedprox.")
    assert re.search(r"AUROC [\d.]+, level with fedprox with MSP, and", texts["Unknown images: digits"])
    other = make_run(tmp_path / "other", alpha=5.0, samples=False)
    (text,) = [one.text for one in findings(collect([*folders, other])) if one.title == "alpha = 0.5"]
    assert text.count(", level with fedprox with MSP)") == 2


def test_several_tables_say_what_is_level_and_nothing_is_best_alone(tmp_path):
    for alpha in (0.1, 0.5):
        for seed in (0, 1, 2):
            make_run(tmp_path / f"{alpha}-{seed}", seed=seed, alpha=alpha, samples=False, detectors=["msp"])
    texts = " ".join(one.text for one in findings(collect(find_runs([tmp_path]))))
    assert "fedavg classifies" in texts
    assert "best on" not in texts
    assert "best (AUROC)" not in texts
    for seed in (0, 1, 2):
        make_run(tmp_path / f"r{seed}", "fedrod", seed=seed, alpha=0.1, samples=False, detectors=["msp"])
    text = next(one.text for one in findings(collect(find_runs([tmp_path]))) if one.title == "alpha = 0.1")
    assert "within the deviation between seeds" in text
    assert "best (AUROC)" in text


def test_lines_with_fewer_seeds_say_so(tmp_path):
    for seed in (0, 1, 2):
        make_run(tmp_path / f"a{seed}", seed=seed, samples=False)
    make_run(tmp_path / "r", "fedrod", samples=False)
    collection = collect(find_runs([tmp_path]))
    grid = paper_grid(collection.scenes[0])
    assert "over 1 to 3 seeds" in grid.title
    assert [grid.fewer_seeds(line) for line in grid.lines] == ["", "1 seed"]
    assert "| fedrod (1 seed) |" in markdown_report(collection)
    assert "fedrod (1 seed)" in latex_report(collection)
    assert "fedrod (1 seed)" in Page(html_report(collection, maps=0)).words()
    assert "Not every line is a mean over 3 seeds: fedrod has 1." in findings(collection)[-1].text


def test_a_seed_that_diverged_is_marked_where_means_are_without_it(tmp_path):
    for seed in (0, 1, 2):
        make_run(tmp_path / f"a{seed}", seed=seed, samples=False)
        make_run(tmp_path / f"f{seed}", "fedavg+foogd", seed=seed, samples=False)
    whole = collect(find_runs([tmp_path]))
    assert "NaN" not in markdown_report(whole)
    assert "over 3 seeds" in paper_grid(whole.scenes[0]).title
    path = tmp_path / "a2" / "rows.jsonl"
    kept = [line for line in path.read_text().splitlines() if json.loads(line)["detector"] is None]
    path.write_text("\n".join(kept) + "\n")
    collection = collect(find_runs([tmp_path]))
    (scene,) = collection.scenes
    grid = paper_grid(scene)
    assert "over 2 to 3 seeds" in grid.title
    assert [grid.fewer_seeds(line) for line in grid.lines] == ["2 to 3 seeds", ""]
    assert "over 2 to 3 seeds" in scene.report.headline().title
    assert "over 2 to 3 seeds" in scene.report.matrix("digits", "auroc").title
    for text in (markdown_report(collection), latex_report(collection), Page(html_report(collection, maps=0)).words()):
        assert "fedavg (2 to 3 seeds)" in text
    caution = "as where scores are NaN: fedavg, seed 2 (MSP, energy, KNN). Their means are over the other seeds alone"
    assert caution in findings(collection)[-1].text


def test_a_detector_that_a_seed_was_not_asked_for_is_no_sign_of_nan(tmp_path):
    make_run(tmp_path / "a", seed=0, detectors=["msp", "energy"], samples=False)
    make_run(tmp_path / "b", seed=1, detectors=["msp"], samples=False)
    collection = collect(find_runs([tmp_path]))
    assert "NaN" not in markdown_report(collection)
    assert [line.seeds for line in paper_grid(collection.scenes[0]).lines] == [(2, 2)]


def test_names_keep_their_letters_and_no_distance_is_negative(tmp_path):
    folder = make_run(tmp_path / "a", names=["lsun_c"], samples=False)
    texts = {one.title: one.text for one in findings(collect([folder]))}
    assert "The OUT set lsun_c stays hard" in texts["Weak points"]
    assert "points below its clean accuracy" in texts["Shifted images"]
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    for row in rows:
        row["value"] = 0.6 if (row["split"], row["metric"]) == ("in", "accuracy") else 0.65
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = {one.title: one.text for one in findings(collect([folder]))}
    assert "That is 5.0 points above its clean accuracy." in texts["Shifted images"]


def test_a_mark_stands_for_one_client_of_one_seed(tmp_path):
    from foogd.reports.curves import client_accuracies

    for seed in (0, 1):
        make_run(tmp_path / f"a{seed}", seed=seed, rounds=2, samples=False)
        make_run(tmp_path / f"d{seed}", seed=seed, rounds=2, partition="by_domain", samples=False)
    apart, domains = (scene.groups[0] for scene in sorted(collect(find_runs([tmp_path])).scenes,
                                                          key=lambda scene: "by_domain" in scene.title))  # fmt: skip
    expected = [100 * row.value for r in apart.records for row in r.rows if (row.scope, row.split) == ("client", "in")]
    assert client_accuracies(apart, "in") == pytest.approx(expected)
    assert len(expected) == 8
    assert len(client_accuracies(domains, "in")) == 4


def test_distances_from_the_paper_are_counted_without_their_sign(paper):
    collection = collect(find_runs([paper]))
    cells = [c for scene in collection.scenes for line in paper_grid(scene).lines for c in line.cells if c.published]
    away = [abs(cell.difference) for cell in cells]
    text = next(one.text for one in findings(collection) if one.title == "Against the paper")
    near = sum(value <= 2 for value in away)
    assert text == (
        f"{near} of {len(away)} numbers lie within 2 points of the published ones; "
        f"on average they are {np.mean(away):.1f} points away."
    )


def test_smaller_is_better_where_it_is(demo):
    grid = paper_grid(collect(find_runs([demo])).scenes[0])
    for index, column in enumerate(grid.columns):
        means = [line.cells[index].mean for line in grid.lines]
        best = [line.cells[index].mean for line in grid.lines if line.cells[index].best]
        assert best
        assert best[0] == pytest.approx(min(means) if column.metric == "fpr95" else max(means), abs=0.05)


def test_the_detector_of_the_paper():
    assert paper_detector("fedavg+foogd, lambda_m=0.1", ["msp", "score_norm"]) == "score_norm"
    assert paper_detector("fedavg", ["energy", "msp"]) == "msp"
    assert paper_detector("fedavg", ["energy"]) == "energy"
    assert paper_detector("fedavg", []) is None


# Text


def test_csv_holds_every_number(demo):
    collection = collect(find_runs([demo]))
    lines = list(csv.DictReader(io.StringIO(csv_report(collection))))
    report = collection.scenes[0].report
    about = ("method", "detector", "split", "dataset", "metric", "scope", "corruption", "severity")
    keys = [tuple(line[key] for key in about) for line in lines]
    assert len(keys) == len(set(keys))
    for line in lines:
        values = report.values(
            method=line["method"], metric=line["metric"], split=line["split"], detector=line["detector"] or None,
            dataset=line["dataset"] or None, scope=line["scope"], corruption=line["corruption"] or None,
            severity=int(line["severity"]) if line["severity"] else None,
        )  # fmt: skip
        assert float(line["mean"]) == pytest.approx(100 * np.mean(values), abs=1e-3)
        assert float(line["deviation"]) == pytest.approx(100 * np.std(values, ddof=1), abs=1e-3)
    assert {"fedavg", "fedrod+foogd"} <= {line["method"] for line in lines}
    assert {("", ""), ("contrast", "1"), ("contrast", "5")} <= {(one["corruption"], one["severity"]) for one in lines}


def test_csv_has_every_metric_of_a_run_in_both_scopes(tmp_path):
    make_run(tmp_path / "a", rounds=2)
    path = tmp_path / "a" / "rows.jsonl"
    row = json.loads(path.read_text().splitlines()[0])
    more = [
        {"metric": "aupr", "split": "out", "dataset": "digits", "detector": "msp", "value": 0.25},
        {"metric": "aupr", "split": "out", "dataset": "digits", "detector": "msp", "value": 0.35, "scope": "pooled"},
        {"metric": "rejected", "detector": "msp", "value": 0.05},
        {"metric": "accuracy_generic", "value": 0.45, "scope": "pooled"},
    ]
    path.write_text(path.read_text() + "".join(json.dumps(row | one) + "\n" for one in more))
    lines = list(csv.DictReader(io.StringIO(csv_report(collect(find_runs([tmp_path]))))))
    found = {(one["metric"], one["split"], one["dataset"], one["detector"], one["scope"]): one["mean"] for one in lines}
    assert found["aupr", "out", "digits", "msp", "weighted"] == "25.0"
    assert found["aupr", "out", "digits", "msp", "pooled"] == "35.0"
    assert found["rejected", "in", "", "msp", "weighted"] == "5.0"
    assert found["accuracy_generic", "in", "", "", "pooled"] == "45.0"


def test_latex_is_a_table_of_booktabs(paper):
    text = latex_report(collect(find_runs([paper])))
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == text.count(r"\bottomrule") == 2
    assert text.count("{") == text.count("}")
    body = [line for line in text.splitlines() if line.endswith(r"\\")]
    table = re.search(r"tabular}{(l+r+)}", text).group(1)
    for line in body:
        spans = sum(int(count) - 1 for count in re.findall(r"multicolumn{(\d+)}", line))
        assert line.count(" & ") + 1 + spans == len(table), line
    assert r"\textbf{" in text
    assert "(68.0)" in text
    assert r"lsun\_c" in text


def test_latex_shows_what_the_best_is_decided_by():
    rows = [*rows_of([0.80012], method="a"), *rows_of([0.79991], method="b"), *rows_of([0.5], method="c")]
    text = Report.of(rows).grid([Measure("accuracy", "in")], lambda method, known: []).latex()
    assert text.count(r"\textbf{80.0}") == 2
    assert "50.0" in text


def test_latex_text_is_harmless():
    assert latex_text(r"a_b & 50% \x {y} #1 ~ ^") == (
        r"a\_b \& 50\% \textbackslash{}x \{y\} \#1 \textasciitilde{} \textasciicircum{}"
    )


def test_markdown_has_findings_and_whole_tables(paper):
    text = markdown_report(collect(find_runs([paper])))
    assert text.startswith("# 2 methods on cifar10\n")
    assert "(68.0, " in text
    block: list[int] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            block.append(len(re.findall(r"(?<!\\)\|", line)))
        else:
            assert len(set(block)) <= 1
            block = []


# Charts


def test_roc_points_have_the_area_of_scikit_learn():
    rng = np.random.default_rng(0)
    for shift, size in ((0.3, 40), (1.5, 3000)):
        inside, outside = rng.normal(size=size), rng.normal(shift, size=size)
        points = roc_points(inside, outside, 10**6)
        x, y = np.array(points).T
        labels = np.r_[np.zeros(size), np.ones(size)]
        assert np.trapezoid(y, x) == pytest.approx(roc_auc_score(labels, np.r_[inside, outside]), abs=1e-9)
        short = np.array(roc_points(inside, outside, 60))
        assert len(short) <= 60
        assert np.trapezoid(short[:, 1], short[:, 0]) == pytest.approx(np.trapezoid(y, x), abs=5e-3)
        assert (np.diff(short, axis=0) >= 0).all()
        assert short[0].tolist() == [0, 0]
        assert short[-1].tolist() == [1, 1]


def test_roc_points_of_ties_lie_on_the_diagonal():
    assert roc_points(np.ones(5), np.ones(7)) == [(0.0, 0.0), (1.0, 1.0)]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3.2, 7.9), (61.2, 61.9), (0, 12345), (1e-6, 5e-6), (2, 4)])
def test_ticks_are_even_and_inside(low, high):
    found = ticks(low, high)
    assert 2 <= len(found) <= 7
    assert low - 1e-9 * abs(low) <= found[0]
    assert found[-1] <= high * (1 + 1e-9)
    assert np.allclose(np.diff(found), found[1] - found[0])
    texts = [tick_text(value, found[1] - found[0]) for value in found]
    assert len(set(texts)) == len(texts)


def test_a_histogram_counts_far_scores_at_its_ends_and_shows_the_threshold():
    scores = np.r_[np.zeros(9900), np.ones(60), np.full(40, 1e9)]
    chart = histogram("t", [("IN", "in", scores)], 0.5, bins=4)
    start, levels = re.search(r'<path d="M[\d.]+ ([\d.]+)([^"]+)" class="area">', chart).groups()
    heights = [float(start) - float(level) for level in re.findall(r"V([\d.]+)", levels)]
    low, _, high, _ = heights  # up, down to nothing in the middle, up, down
    assert high / low == pytest.approx(100 / 9900, rel=0.1)
    assert 'class="threshold"' in chart
    assert histogram("t", [("IN", "in", np.zeros(0))], None) == ""
    assert histogram("t", [("IN", "in", np.full(9, 2.0))], 2.0)


def test_lines_skip_what_is_not_finite():
    assert line_chart("t", [Series("a", [(1, float("nan"))], 0)]) == ""
    chart = line_chart("t", [Series("a", [(1, float("nan")), (2, 3.0), (3, 4.0)], 0)])
    assert "nan" not in chart


def test_markup_escapes_text_and_attributes():
    assert h("p", "a<b", data_x='"&') == '<p data-x="&quot;&amp;">a&lt;b</p>'
    assert join("<", h("br"), None, ["&"]) == "&lt;<br>&amp;"
    assert [number(value) for value in (1.0, -0.04, 2.25, 10)] == ["1", "0", "2.2", "10"]


# Maps and figures


def test_a_map_is_seeded_and_names_its_points(demo):
    record = read_record(next(iter(find_runs([demo]))))
    first, second = feature_map(record.samples, points=40), feature_map(record.samples, points=40)
    assert np.array_equal(first.places, second.places)
    assert first.places.shape == (120, 2)
    assert {split: first.splits.count(split) for split in ("in", "in-c", "out")} == {"in": 40, "in-c": 40, "out": 40}
    assert all((label < 0) == (split == "out") for label, split in zip(first.labels, first.splits, strict=True))
    # Classes are far apart in the features, so neighbours on the map share their class.
    inside = np.array(first.splits) == "in"
    places, labels = first.places[inside], np.array(first.labels)[inside]
    distance = ((places[:, None] - places[None]) ** 2).sum(-1) + 1e9 * np.eye(len(places))
    assert (labels[distance.argmin(1)] == labels).mean() > 0.8


def test_figures_are_written_as_vector_and_picture(demo, tmp_path, monkeypatch):
    collection = collect(find_runs([demo]))
    names = []
    for name, figure in all_figures(collection, maps=1):
        names.append(name)
        if name in ("severity", "corruptions"):  # drawing takes its time
            vector = "pdf" if name == "severity" else "svg"
            written = []
            for moment in ("0", "1000000000"):
                monkeypatch.setenv("SOURCE_DATE_EPOCH", moment)  # what matplotlib takes for now
                save_figure(tmp_path / moment / name, figure, vector)
                written.append([(tmp_path / moment / f"{name}.{form}").read_bytes() for form in (vector, "png")])
            assert written[0] == written[1]
            assert written[0][0].startswith(b"%PDF" if vector == "pdf" else b"<?xml")
            assert written[0][1].startswith(b"\x89PNG")
    assert names == ["training", "scores", "roc", "severity", "corruptions", "corruption-severity", "tsne"]


def test_two_data_sets_with_corruptions_give_one_picture_of_their_averages(tmp_path):
    for data in ("cifar10", "cifar100"):
        for method in ("fedavg", "fedrod"):
            make_run(tmp_path / f"{data}-{method}", method, preset=data, corruptions=["fog", "snow"], samples=False)
    figures = dict(all_figures(collect(find_runs([tmp_path])), maps=0))
    panels = figures["corruptions-average"].axes
    assert [panel.get_title() for panel in panels] == ["data = cifar10", "data = cifar100"]
    scene = collect(find_runs([tmp_path])).scenes[0]
    fedavg = scene.report.rows_of("fedavg", "accuracy", "in-c")
    assert panels[0].patches[0].get_width() == pytest.approx(100 * np.mean([row.value for row in fedavg]))
    one = collect([tmp_path / "cifar10-fedavg", tmp_path / "cifar10-fedrod"])
    assert "corruptions-average" not in dict(all_figures(one, maps=0))


def test_names_of_files_stay_short_and_apart():
    first, second = (file_name("sites = " + "a very long word, " * 30 + end) for end in ("x", "y"))
    assert first != second
    assert max(len(first), len(second)) < 100
    assert file_name("alpha = 0.1, data = a/b") == "alpha=0.1_data=a_b"


def test_a_setting_at_several_values_gives_a_sensitivity_curve(tmp_path):
    for place, value in enumerate((0.1, 0.5, 1.0)):
        make_run(tmp_path / f"m{value}", "fedavg+foogd", lambda_m=value, good=0.05 * place, samples=False)
    collection = collect(find_runs([tmp_path]))
    curves = sensitivities(collection)
    assert list(curves) == ["lambda_m"]
    (points,) = curves["lambda_m"]["ACC-IN, %"].values()
    assert [x for x, _ in points] == [0.1, 0.5, 1.0]
    assert points == sorted(points, key=lambda point: point[1])
    assert "sensitivity" in html_report(collection)
    assert "sensitivity-lambda_m" in [name for name, _ in all_figures(collection, maps=0)]


# The command


def run(monkeypatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["foogd", *words])
    main()


@pytest.mark.parametrize(
    ("suffix", "start"), [("html", "<!doctype html>"), ("md", "# "), ("csv", "setting,"), ("tex", "%")]
)
def test_the_suffix_chooses_the_format(demo, tmp_path, monkeypatch, suffix, start):
    run(monkeypatch, "report", str(demo), "--out", str(tmp_path / f"r.{suffix}"), "--maps", "0")
    assert (tmp_path / f"r.{suffix}").read_text().startswith(start)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--out", "r.docx"], "does not say a format"),
        (["--out", "r.txt", "--format", "docx"], "--format 'docx' is not allowed"),
        (["--out", "r.html", "--maps", "many"], "--maps 'many' is not allowed"),
    ],
)
def test_a_wrong_word_is_one_sentence(demo, monkeypatch, capsys, words, sentence):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "report", str(demo), *words)
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


WITHOUT_MAPS = "maps of the features need scikit-learn (pip install scikit-learn threadpoolctl)"


@pytest.fixture(params=["sklearn", "threadpoolctl"])
def no_maps(request, monkeypatch):
    """One of the two packages that maps need is not installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == request.param]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, request.param, None)


def test_without_scikit_learn_the_page_has_everything_but_maps(demo, tmp_path, foogd, no_maps):
    code, said, _ = foogd("report", demo, "--out", tmp_path / "r.html")
    assert (code, said.splitlines().count(f"Left out: {WITHOUT_MAPS}")) == (0, 1)
    assert "t-SNE" not in said
    text = (tmp_path / "r.html").read_text()
    assert section(text, "maps") == f"Maps of the featuresLeft out: {WITHOUT_MAPS}."
    for asked in (("--maps", "0"), ("--format", "md")):
        code, said, _ = foogd("report", demo, "--out", tmp_path / "none.html", *asked)
        assert (code, "scikit-learn" in said) == (0, False)
    keys = re.findall(r'<section id="(\w+)"', html_report(collect(find_runs([demo])), maps=0))
    assert "maps" not in keys
    assert sorted([*keys, "maps"]) == sorted(re.findall(r'<section id="(\w+)"', text))


def test_without_scikit_learn_figures_are_made_but_for_maps(demo, tmp_path, foogd, no_maps, monkeypatch):
    monkeypatch.setattr("foogd.reports.figures.save_figure", lambda path, figure, vector: path.touch())
    code, said, _ = foogd("figures", demo, "--out", tmp_path)
    assert (code, said.splitlines().count(f"Left out: {WITHOUT_MAPS}")) == (0, 1)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"training", "scores", "roc"} <= names
    assert "tsne" not in names


@pytest.mark.parametrize("command", ["report", "figures"])
def test_whoever_asks_for_maps_is_told_what_they_need(demo, tmp_path, foogd, no_maps, command):
    code, _, complaint = foogd(command, demo, "--out", tmp_path / "r.html", "--maps", "3")
    assert (code, complaint.count("\n")) == (2, 1)
    assert f"--maps 3 is not possible: {WITHOUT_MAPS}" in complaint
    assert not (tmp_path / "r.html").exists()


def test_a_real_run_makes_a_whole_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny.py").write_text(
        "from foogd.data.synthetic import tiny_federation\n"
        "def inside(root):\n    return tiny_federation(per_client=40, channels=1).train\n"
        "def outside(root):\n    return tiny_federation(per_client=40, channels=1).tests[-1].store\n"
    )
    Path("tiny.toml").write_text(
        'data = "tiny.py:inside"\nout = ["tiny.py:outside"]\ncorruptions = ["gaussian_noise"]\nseverities = [1, 3]\n'
        'clients = 3\nrounds = 2\neval_every = 1\nbatch_size = 16\nlr = 0.05\ndevice = "cpu"\n'
        "[foogd]\nscore_width = 16\n"
    )
    run(monkeypatch, "run", "tiny.toml", "--method", "fedrod+foogd", "--out", "a")
    run(monkeypatch, "report", "a", "--out", "r.html")
    keys = [attributes["id"] for tag, attributes in Page(Path("r.html").read_text()).found if tag == "section"]
    assert {"results", "scores", "maps", "shift", "partition", "clients", "cost", "drift", "setup"} <= set(keys)
    assert torch.is_tensor(read_record(Path("a")).samples.sets[0].predictions)
