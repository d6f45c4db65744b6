"""Images of users: folders by site, tables, and the worked example."""

import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from foogd import InputError, load
from foogd.cli import main
from foogd.data.folders import PACS_CLASSES, PACS_DOMAINS, read_sites, read_table
from foogd.data.sources import load_source
from foogd.nets import BACKBONES
from foogd.presets.loader import read_preset, read_run_config, resolve
from foogd.runs.federation import make_federation
from foogd.runs.run import Run

EXAMPLE = Path(__file__).parents[2] / "examples" / "your_data.py"


def picture(path, shade):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (shade, shade, shade)).save(path)


@pytest.fixture
def sites(tmp_path):
    for number, (site, label) in enumerate([("b", "cat"), ("b", "dog"), ("a", "dog"), ("a", "eel")]):
        for copy in range(3):
            picture(tmp_path / "sites" / site / label / f"{copy}.png", 40 * number + copy)
    return tmp_path / "sites"


def test_sites_and_classes_are_folders(sites):
    store = read_sites(sites)
    assert store.classes == ("cat", "dog", "eel")
    assert store.domain_names == ("a", "b")
    assert torch.bincount(store.labels).tolist() == [3, 6, 3]
    assert [store.domains[store.labels == c].unique().tolist() for c in range(3)] == [[1], [0, 1], [0]]
    everything = zip(store.domains.tolist(), store.labels.tolist(), store.images[:, 0, 0, 0].tolist(), strict=True)
    shade = {(site, label): value // 40 for site, label, value in everything}
    assert shade == {(1, 0): 0, (1, 1): 1, (0, 1): 2, (0, 2): 3}


def test_images_outside_of_a_class_are_refused(sites):
    picture(sites / "a" / "loose.png", 1)
    with pytest.raises(InputError, match="outside of SITE/CLASS"):
        read_sites(sites)


def table(folder, text):
    path = folder / "table.csv"
    path.write_text(text)
    return path


def test_a_table_names_files_labels_splits_and_sites(sites):
    rows = ["b/cat/0.png,cat,train,w2", "a/dog/1.png,dog,test,w1", "a/eel/2.png,eel,train,w1"]
    path = table(sites, "\n".join(["file,label,split,ward", *rows]))
    store = read_table(path, site="ward")
    assert store.classes == ("cat", "dog", "eel")
    assert store.labels.tolist() == [0, 1, 2]
    assert store.test.tolist() == [False, True, False]
    assert (store.domains.tolist(), store.domain_names) == ([1, 0, 0], ("w1", "w2"))
    assert [int(image[0, 0, 0]) for image in store.images] == [0, 81, 122]
    assert read_table(path).domains is None


@pytest.mark.parametrize(
    ("text", "site", "word"),
    [
        ("name,label\nx,y\n", "", "no column 'file'"),
        ("file,label\nb/cat/0.png,cat\n", "ward", "no column 'ward'"),
        ("file,label\nb/cat/0.png\n", "", "line 2"),
        ("file,label\nb/cat/0.png,cat,more\n", "", "line 2"),
        ("file,label,split\nb/cat/0.png,cat,dev\n", "", "'dev' in line 2"),
        ("file,label\nb/cat/9.png,cat\n", "", "9.png"),
        ("", "", "no column 'file'"),
        ("file,label\n", "", "no line below its columns"),
    ],
)
def test_a_bad_table_is_one_sentence(sites, text, site, word):
    with pytest.raises(InputError, match=word):
        read_table(table(sites, text), site=site)


def test_where_sites_stand_must_fit_the_kind_of_data(sites, tmp_path):
    with pytest.raises(InputError, match="names a column"):
        load_source(str(sites), tmp_path, sites="ward")
    load_source(str(sites), tmp_path, sites="folder").save(tmp_path / "a.npz")
    with pytest.raises(InputError, match="array domains"):
        load_source(str(tmp_path / "a.npz"), tmp_path, sites="folder")
    again = load_source(str(tmp_path / "a.npz"), tmp_path)
    assert again.domain_names == ("a", "b")


def test_the_worked_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "shapes"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    few = ["--set", "rounds=1", "--set", "local_epochs=1", "--set", "severities=[3]"]
    for out, more in (("one", []), ("two", ["--set", "data=shapes/table.csv", "--set", "sites=site"])):
        monkeypatch.setattr(sys, "argv", ["foogd", "run", "shapes/my.toml", "--out", out, *few, *more])
        main()
    assert "3 clients" in Path("one/summary.md").read_text()
    assert "AUROC strange" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["foogd", "predict", "one", "shapes/strange", "--client", "west"])
    main()
    assert capsys.readouterr().err == ""  # enough images are set aside for its threshold
    left = ["--set", "leave_out=west", "--set", "method=fedavg"]
    monkeypatch.setattr(sys, "argv", ["foogd", "run", "shapes/my.toml", "--out", "three", *few, *left])
    main()
    assert "2 clients" in Path("three/summary.md").read_text()


MINE = """
data = "sites"
sites = "folder"
out = ["strange"]
corruptions = []
partition = "by_domain"
clients = 0
method = "fedavg"
rounds = 2
batch_size = 4
test_share = 0.34
detectors = ["msp"]
device = "cpu"
"""


@pytest.fixture
def own(sites, monkeypatch):
    """A working folder with two sites, an OUT folder and a file of settings."""
    monkeypatch.chdir(sites.parent)
    for copy in range(4):
        picture(Path("strange") / f"{copy}.png", 200 + copy)
    Path("my.toml").write_text(MINE)
    return sites


def test_a_run_says_which_client_is_which_site(own, foogd):
    assert foogd("run", "my.toml", "--out", "a")[0] == 0
    assert json.loads(Path("a/partition.json").read_text())["client_names"] == ["a", "b"]
    lines = Path("a/summary.md").read_text().splitlines()
    assert [line[:7] for line in lines if line.startswith(("| 0 ", "| 1 "))] == ["| 0 a |", "| 1 b |"]
    assert foogd("report", "a", "--out", "page.html")[0] == 0
    assert re.findall(r">([01] \w)</th>", Path("page.html").read_text()) == ["0 a", "1 b"]


@pytest.mark.parametrize("changed", ["training", "test", "out"])
def test_images_that_changed_since_the_run_began_are_noticed(own, foogd, changed):
    assert foogd("run", "my.toml", "--out", "whole")[0] == 0
    for _ in zip(range(1), Run.create(Path("begun"), *resolve(read_preset("my.toml"), {})).train(), strict=False):
        pass
    assert Run.open(Path("begun"), read_run_config).finished_rounds() == 1
    if changed == "out":
        (Path("strange") / "0.png").unlink()
        words = "test images strange"
    else:
        # A changed image is in one part or the other; what was in the training images says which.
        known = json.loads(Path("whole/partition.json").read_text())
        for path in sorted(own.rglob("*.png")):
            before = path.read_bytes()
            picture(path, 222)
            store = make_federation(read_run_config(Path("whole/config.toml"))[0])
            if (store.train.content_hash() != known["content_hash"]) == (changed == "training"):
                break
            path.write_bytes(before)
        words = "training images" if changed == "training" else "test images sites"
    files = (path for run in ("whole", "begun") for path in Path(run).rglob("*") if path.is_file())
    before = {path: path.read_bytes() for path in files}
    for command in (["evaluate", "whole"], ["run", "begun/config.toml", "--out", "begun", "--resume"]):
        code, _, complaint = foogd(*command)
        assert code == 2
        assert f"the {words} are not those that the run began with" in complaint
        assert "partition.json" in complaint
    assert before == {path: path.read_bytes() for path in before}


def test_images_that_are_skipped_are_counted_where_people_look(own, foogd):
    (own / "a" / "dog" / "0.png").write_bytes(b"no picture")
    (Path("strange") / "1.png").write_bytes(b"")
    sentence = "Images that could not be used and were left out: 1 of sites, 1 of strange."
    for out in ("first", "from-cache"):
        code, printed, _ = foogd("run", "my.toml", "--set", "on_bad=skip", "--out", out)
        assert code == 0
        assert sentence in printed
        assert sentence in Path(out, "summary.md").read_text()
        assert json.loads(Path(out, "partition.json").read_text())["skipped"] == {"sites": 1, "strange": 1}
    assert foogd("report", "first", "--out", "page.html")[0] == 0
    assert sentence in Path("page.html").read_text()


def test_skipping_does_not_leave_out_most_of_a_set_for_its_sizes(own, foogd):
    for copy in range(4):
        Image.new("RGB", (8 + copy, 8)).save(Path("strange") / f"{copy}.png")
    code, _, complaint = foogd("run", "my.toml", "--set", "on_bad=skip", "--out", "x")
    assert code == 2
    assert "4 sizes" in complaint
    assert "FOLDER@64" in complaint
    assert not Path("x").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["data=site@8"], "'site@8'; known are .*nothing is there"),
        (["data=sites@big"], "after @ a number of pixels is needed, not 'big'"),
        (["data=sites@0"], "the size of the images, after @, is 0"),
        (["partition=dirichlet"], r"clients is 0; at least 1 is needed \(0 is for the partition by_domain\)"),
        (["clients=3"], "clients is 3 .*the domains are a, b"),
        (["out=[\"broken.npz\"]"], "broken.npz cannot be read as an .npz of plain arrays .it is damaged"),
        (["out=[\"floats.npz\"]"], "floats.npz cannot be used: images have type torch.float64"),
        (["out=[\"words.npz\"]"], "words.npz cannot be used: labels have type <U1; whole numbers are needed"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_data_is_named(own, foogd, words, told):
    Path("broken.npz").write_bytes(b"no archive")
    images = np.zeros((3, 8, 8, 3), np.uint8)
    np.savez("floats.npz", x=images / 255, y=np.zeros(3, int))
    np.savez("words.npz", x=images, y=np.array(["a", "b", "c"]))
    code, _, complaint = foogd("run", "my.toml", *(part for word in words for part in ("--set", word)), "--out", "x")
    assert code == 2
    assert re.search(told, complaint), complaint
    assert not Path("x").exists()


def test_a_site_that_cannot_be_split_is_named(own, foogd):
    picture(own / "lonely" / "cat" / "0.png", 7)
    code, _, complaint = foogd("run", "my.toml", "--out", "x")
    assert code == 2
    assert "lonely has no test images" in complaint


@pytest.mark.parametrize("place", ["note.txt", "note.txt/a"])
def test_a_file_in_the_way_of_a_run_folder_is_named(own, foogd, place):
    Path("note.txt").write_text("mine")
    code, _, complaint = foogd("run", "my.toml", "--out", place)
    assert code == 2
    assert "note.txt is a file" in complaint
    assert Path("note.txt").read_text() == "mine"


def test_the_whole_file_of_the_page_is_the_one_that_the_example_writes():
    page = (EXAMPLE.parents[1] / "docs" / "your_data.md").read_text()
    preset = runpy.run_path(str(EXAMPLE))["PRESET"].format(folder="shapes")
    assert f"```toml\n{preset}```\n" in page


def test_the_page_names_every_backbone():
    page = (EXAMPLE.parents[1] / "docs" / "your_data.md").read_text()
    named = re.search(r"^Backbones are (.*?) or", page, re.MULTILINE)
    assert set(re.findall(r"`(.+?)`", named[1])) == set(BACKBONES)


def test_an_empty_folder_is_no_class(sites):
    (sites / "a" / "fox").mkdir()
    assert read_sites(sites).classes == ("cat", "dog", "eel")


def test_a_site_is_asked_by_its_name(own, foogd):
    assert foogd("run", "my.toml", "--set", "calibration=0.3", "--out", "a")[0] == 0
    model = load("a")
    assert model.client_names == ("a", "b")
    files = [str(path) for path in sorted(Path("strange").iterdir())]
    by_name, by_number = model.predict(files, client="b"), model.predict(files, client=1)
    assert (by_name.client, by_name.threshold) == (1, by_number.threshold) != (0, model.threshold(client="a"))
    assert torch.equal(by_name.score, by_number.score)
    with pytest.raises(InputError, match="client is 'c'; this run has the clients a, b"):
        model.threshold(client="c")
    answers = [foogd("predict", "a", "strange", "--client", who, "--format", "json") for who in ("b", "1")]
    assert answers[0] == answers[1]
    assert (answers[0][0], json.loads(answers[0][1])["client_name"]) == (0, "b")
    assert "of client 1 b" in foogd("predict", "a", "strange", "--client", "b")[1]
    code, _, complaint = foogd("predict", "a", "strange", "--client", "north")
    assert (code, "'north'; this run has the clients a, b" in complaint) == (2, True)
    about = Path("a/model/model.json")
    about.write_text(json.dumps(json.loads(about.read_text()) | {"client_names": ["a"]}))
    assert "client_names must be a name for each of the 2 clients" in foogd("predict", "a", "strange")[2]


def test_sites_that_are_called_by_numbers_keep_their_names(own, foogd):
    (own / "a").rename(own / "1")
    (own / "b").rename(own / "0")
    assert foogd("run", "my.toml", "--out", "a")[0] == 0
    found = [json.loads(foogd("predict", "a", "strange", "--client", who, "--format", "json")[1]) for who in ("0", "1")]
    assert [(one["client"], one["client_name"]) for one in found] == [(0, "0"), (1, "1")]
    (own / "0").rename(own / "2")
    assert foogd("run", "my.toml", "--out", "b")[0] == 0
    one = json.loads(foogd("predict", "b", "strange", "--client", "1", "--format", "json")[1])
    assert (one["client"], one["client_name"]) == (0, "1")


FORGOTTEN = (
    "sites is read with its folders as classes (a, b), but several of them hold folders of the same names (dog): "
    'if they are sites, set sites = "folder".'
)
AS_CLASSES = [part for word in ("sites=", "partition=dirichlet", "clients=2") for part in ("--set", word)]


def test_sites_that_are_read_as_classes_are_noticed(own, foogd):
    for out in ("first", "from-cache"):
        code, printed, complaint = foogd("run", "my.toml", *AS_CLASSES, "--out", out)
        assert (code, complaint) == (0, f"foogd: {FORGOTTEN}\n")
        assert "is read with" not in printed
        assert Path(out, "summary.md").read_text().splitlines().count(FORGOTTEN) == 1
    assert foogd("evaluate", "first")[0] == 0
    assert FORGOTTEN in Path("first/summary.md").read_text()
    code, _, complaint = foogd("run", "my.toml", "--out", "right")
    assert (code, complaint) == (0, "")
    assert "is read with" not in Path("right/summary.md").read_text()


@pytest.mark.parametrize("asked", ["partition=by_domain", "leave_out=b"])
def test_forgotten_sites_are_named_where_they_are_needed(own, foogd, asked):
    code, _, complaint = foogd("run", "my.toml", *AS_CLASSES, "--set", asked, "--out", "x")
    assert code == 2
    assert re.fullmatch(rf"foogd: .* needs images with domains; sites has none: {re.escape(FORGOTTEN)}\n", complaint)
    assert not Path("x").exists()


def test_every_command_that_splits_images_notices_forgotten_sites(own, foogd):
    settings = MINE.replace('"folder"', '""').replace('"by_domain"', '"dirichlet"').replace("rounds = 2", "rounds = 1")
    Path("wrong.toml").write_text(settings.replace("clients = 0", "clients = 2"))
    Path("two.toml").write_text('title = "two"\nbase = "wrong.toml"\n[grid]\nout = [["strange"], ["sites"]]\n')
    once = f"foogd: {FORGOTTEN}\n"
    demo = ("demo", "--preset", "wrong.toml", "--methods", "fedavg", "--seeds", "2", "--workers", "1", "--out", "demo")
    code, _, complaint = foogd(*demo)
    assert (code, complaint) == (0, once)
    code, _, complaint = foogd("flower", "split", "wrong.toml", "--clients", "2", "--out", "shards")
    assert (code, complaint) == (0, once)
    code, _, complaint = foogd("sweep", "two.toml", "--workers", "1", "--out", "sweep")
    assert (code, complaint.count("foogd: "), complaint.count("is read with its folders as classes")) == (0, 1, 1)


def test_folders_of_an_out_set_may_look_like_sites(own, foogd):
    code, _, complaint = foogd("run", "my.toml", "--set", 'out=["sites"]', "--out", "x")
    assert (code, complaint) == (0, "")


@pytest.mark.parametrize(
    ("files", "shared"),
    [
        ("east/cat east/dog west/cat west/dog", "cat, dog"),
        ("east/cat east/dog west/cat west/dog none/.cat", "cat, dog"),  # what is hidden is no image
        ("cat/images dog/images cat/none/.cat dog/none/.dog", ""),
        ("east/cat west/cat west/dog north/dog north/eel", "cat, dog"),  # no site has every class
        ("0/0 0/1 1/0 1/1", "0, 1"),
        ("a/1 a/2 a/3 a/4 a/5 a/6 a/7 b/1 b/2 b/3 b/4 b/5 b/6 b/7", "1, 2, 3, 4, 5 and 2 more"),
        ("east/cat/deep west/cat/deep west/dog", "cat"),
        ("cat/. dog/.", ""),
        ("cat/young cat/. dog/young dog/.", ""),  # a class with images and with folders
        ("cat/young dog/. dog/young cat/old dog/old", ""),
        ("pets/cat pets/dog wild/lion wild/wolf", ""),  # classes of classes
        ("pets/cat pets/dog pets/other wild/lion wild/wolf wild/other", ""),
        ("cat/images dog/images eel/images", ""),
        ("cat/train cat/test dog/train dog/test", ""),
        ("cat/Train cat/val dog/Train dog/val", ""),
        ("train/cat train/dog test/cat test/dog", ""),
        ("Train/cat Train/dog valid/cat valid/dog", ""),
        ("east/cat east/dog", ""),
    ],
)
def test_what_looks_like_sites(tmp_path, files, shared):
    for number, place in enumerate(files.split()):
        picture(tmp_path / "mine" / place / f"{number}.png", number)
    note = load_source(f"{tmp_path / 'mine'}@4", tmp_path).note
    uppers = sorted({place.split("/")[0] for place in files.split()} - {"none"})
    told = [(", ".join(uppers), shared)] if shared else []
    assert re.findall(r"as classes \((.*)\), but .* the same names \((.*)\): if", note) == told


def test_data_sets_of_the_literature_do_not_look_like_sites(tmp_path):
    for domain in PACS_DOMAINS:
        for name in PACS_CLASSES:
            picture(tmp_path / "pacs" / domain / name / "pic_001.png", 5)
    for wnid in ("n01", "n02"):
        picture(tmp_path / "tinyimagenet" / "train" / wnid / "images" / f"{wnid}_0.JPEG", 6)
        picture(tmp_path / "textures" / "images" / {"n01": "banded", "n02": "woven"}[wnid] / "1.jpg", 7)
    picture(tmp_path / "tinyimagenet" / "val" / "images" / "val_0.JPEG", 8)
    (tmp_path / "tinyimagenet" / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn01\t0\t0\t7\t7\n")
    (tmp_path / "tinyimagenet" / "wnids.txt").write_text("n01\nn02\n")
    assert [load_source(name, tmp_path).note for name in ("pacs", "tinyimagenet", "textures")] == ["", "", ""]
    assert load_source(str(tmp_path / "tinyimagenet" / "train"), tmp_path).note == ""
    assert "dog, elephant" in load_source(str(tmp_path / "pacs"), tmp_path).note  # a path like any
    assert load_source(str(tmp_path / "pacs"), tmp_path, sites="folder").note == ""
