"""`foogd data list | get | verify` on small sets that the tests make."""

import os
import pickle
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from foogd.cli.data import compare, data_app
from foogd.core.errors import InputError
from foogd.data import ImageStore, load_source
from foogd.data.catalogue import CATALOGUE
from foogd.data.layouts import Facts


def run(*arguments):
    return CliRunner().invoke(data_app, [str(argument) for argument in arguments])


def text(result):
    assert result.exception is None, result.exception
    return " ".join(result.output.split())


def small_isun(folder, count=3):
    folder.mkdir(parents=True)
    for number in range(count):
        Image.fromarray(np.full((32, 32, 3), number, dtype=np.uint8)).save(folder / f"{number}.png")


def cifar10(folder, monkeypatch):
    """A thousandth of CIFAR-10 in its release for Python, and a catalogue that expects just that."""
    python, *others = CATALOGUE["cifar10"].layouts
    assert python.facts == Facts(50_000, 10_000, 10, 5_000, 1_000, px=32, first_label=6)
    python = replace(python, facts=Facts(50, 10, 10, 5, 1, px=32, first_label=6))
    monkeypatch.setitem(CATALOGUE, "cifar10", replace(CATALOGUE["cifar10"], layouts=(python, *others)))
    folder.mkdir(parents=True)
    labels = np.arange(60) % 10
    labels[:10] = np.roll(labels[:10], 4)  # the first label is 6
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        rows = slice(number * 10, (number + 1) * 10)
        content = {b"data": np.zeros((10, 3072), dtype=np.uint8), b"labels": labels[rows].tolist()}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return labels


def test_list_shows_every_set_and_what_is_present(tmp_path):
    small_isun(tmp_path / "isun" / "iSUN_patches")
    output = run("list", "--root", tmp_path).output
    for name in CATALOGUE:
        assert name in output
    (row,) = [line for line in output.splitlines() if line.startswith("isun ")]
    assert "OUT" in row
    assert "8,925" in row
    assert "32×32" in row
    assert " folder of " in row
    (row,) = [line for line in output.splitlines() if line.startswith("cifar100 ")]
    assert " no " in row
    assert "in the package" in output


def test_get_takes_a_local_path_and_says_when_nothing_is_to_do(tmp_path):
    small_isun(tmp_path / "have" / "iSUN_patches")
    assert "taken from" in text(run("get", "isun", "--root", tmp_path / "r", "--from", tmp_path / "have"))
    assert "isun is present: folder of images" in text(run("get", "isun", "--root", tmp_path / "r"))
    assert "inside the package" in text(run("get", "digits", "--root", tmp_path / "r"))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(InputError, match=r"nothing holds nothing that could be isun .*not linked"):
        raise run("get", "isun", "--root", tmp_path / "s", "--from", tmp_path / "nothing").exception
    assert not (tmp_path / "s").exists()
    photo = tmp_path / "photo.png"
    photo.write_bytes(b"1")
    with pytest.raises(InputError, match=r"photo\.png is one image"):
        raise run("get", "isun", "--root", tmp_path / "s", "--from", photo).exception
    (tmp_path / "isun.npz").write_bytes(b"1")
    with pytest.raises(InputError, match=r"isun is a link to .*have"):  # nothing is written into a user's folder
        raise run("get", "isun", "--root", tmp_path / "r", "--from", tmp_path / "isun.npz").exception
    assert [path.name for path in (tmp_path / "have").iterdir()] == ["iSUN_patches"]
    with pytest.raises(InputError, match="no stable official address"):
        raise run("get", "pacs", "--root", tmp_path / "r").exception
    with pytest.raises(InputError, match="unknown data set 'mnist'; known are fashion"):
        raise run("get", "isun", "mnist", "--root", tmp_path / "r").exception
    with pytest.raises(InputError, match="cannot be reached"):
        raise run("get", "svhn", "--root", tmp_path / "r", "--mirror", "http://127.0.0.1:9").exception


def test_verify_passes_a_whole_set_and_names_the_first_thing_that_is_wrong(tmp_path, monkeypatch):
    folder = tmp_path / "cifar10" / "cifar-10-batches-py"
    labels = cifar10(folder, monkeypatch)
    said = text(run("verify", "cifar10", "fashion", "--root", tmp_path))
    assert "cifar10: good, 50 + 10 images as cifar10 (python release)" in said
    assert "fashion: good, 7,600 images" in said
    load_source("cifar10", tmp_path)
    (decoded,) = (tmp_path / ".foogd-cache").glob("cifar10-*/images.npy")
    times = decoded.stat()
    with decoded.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    os.utime(decoded, ns=(times.st_atime_ns, times.st_mtime_ns))  # a disk that forgets does not change the time
    with pytest.raises(InputError, match=r"the decoded images in .* are damaged"):
        raise run("verify", "cifar10", "--root", tmp_path).exception
    wrong = labels[:10].copy()
    wrong[5] = (wrong[5] + 1) % 10
    data = np.zeros((10, 3072), dtype=np.uint8)
    (folder / "data_batch_1").write_bytes(pickle.dumps({b"data": data, b"labels": wrong.tolist()}, protocol=2))
    with pytest.raises(InputError, match=r"cifar10 has (4|6) training images of class \d; 5 are known"):
        raise run("verify", "cifar10", "--root", tmp_path).exception
    (folder / "data_batch_3").unlink()
    with pytest.raises(InputError, match="data_batch_3"):
        raise run("verify", "cifar10", "--root", tmp_path).exception
    (tmp_path / "cifar10" / "cifar-10-python.tar.gz").write_bytes(b"half")
    with pytest.raises(InputError, match=r"cifar-10-python.tar.gz has the md5 .* c58f30108f718f92721af3b95e74349a"):
        raise run("verify", "cifar10", "--root", tmp_path).exception


def test_verify_counts_images_and_reports_bad_ones(tmp_path):
    small_isun(tmp_path / "isun" / "iSUN_patches")
    with pytest.raises(InputError, match="isun has 3 images; 8925 are known"):
        raise run("verify", "isun", "--root", tmp_path).exception
    (tmp_path / "isun" / "iSUN_patches" / "1.png").write_bytes(b"")
    with pytest.raises(InputError, match=r"1\.png cannot be read: it is empty"):
        raise run("verify", "isun", "--root", tmp_path).exception
    said = text(run("verify", "isun", "--skip-bad", "--root", tmp_path))
    assert "2 images can be read, 1 cannot; the first: " in said
    with pytest.raises(InputError, match="foogd data get svhn"):
        raise run("verify", "svhn", "--root", tmp_path).exception


def test_verify_looks_at_each_corruption(tmp_path):
    folder = tmp_path / "cifar10c" / "CIFAR-10-C"
    folder.mkdir(parents=True)
    images = np.zeros((50_000, 32, 32, 3), dtype=np.uint8)
    np.save(folder / "fog.npy", images)
    np.save(folder / "snow.npy", images[:49_995])
    np.save(folder / "labels.npy", (np.arange(50_000) % 10).astype(np.uint8))
    with pytest.raises(InputError, match=r"snow\.npy holds uint8 of shape \(49995"):
        raise run("verify", "cifar10c", "--root", tmp_path).exception
    (folder / "snow.npy").unlink()
    with pytest.raises(InputError, match=r"cifar10c has 1 corruptions \(fog\); 19 are known"):
        raise run("verify", "cifar10c", "--root", tmp_path).exception
    for number in range(18):
        (folder / f"kind{number}.npy").symlink_to(folder / "fog.npy")
    assert "19 corruptions as cifar10-c" in text(run("verify", "cifar10c", "--root", tmp_path))


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        (Facts(train=5), "6 images; 5"),
        (Facts(train=6, test=1), "0 test images"),
        (Facts(px=8), r"\(4, 4\) pixels"),
        (Facts(classes=4), "3 classes; 4"),
        (Facts(classes=3, train_classes=(2, 2, 1)), "2 training images of class 2; 1"),
        (Facts(domains=(3, 3)), r"\(2, 4\) images by domain"),
        (Facts(first_label=1), "label 0 at its first image; 1"),
    ],
)
def test_each_fact_is_checked(facts, word):
    images = np.zeros((6, 4, 4, 3), dtype=np.uint8)
    store = ImageStore(images, np.arange(6) % 3, domains=np.array([0, 0, 1, 1, 1, 1]))
    with pytest.raises(InputError, match=word):
        compare("some", store, facts)
    compare("some", store, Facts(6, None, 3, 2, None, (2, 4), 4, 0))


def test_every_command_has_one_line_of_help_with_an_example():
    for command in ("list", "get", "verify"):
        assert "Example: foogd data" in text(run(command, "--help"))
