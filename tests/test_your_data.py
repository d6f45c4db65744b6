"""Images of users: folders by site, tables, and the worked example."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from foogd import InputError
from foogd.cli import main
from foogd.data.readers import read_sites, read_table
from foogd.data.sources import load_source

EXAMPLE = Path(__file__).parents[1] / "examples" / "your_data.py"


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
        ("file,label\n", "", "no images"),
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
    left = ["--set", "leave_out=west", "--set", "method=fedavg"]
    monkeypatch.setattr(sys, "argv", ["foogd", "run", "shapes/my.toml", "--out", "three", *few, *left])
    main()
    assert "2 clients" in Path("three/summary.md").read_text()
