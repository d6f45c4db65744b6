"""The cache gives the same images without decoding, notices change and damage, and never breaks a read."""

import json
import os
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from foogd.data import ImageStore, cache
from foogd.data.cache import FOLDER, cache_folder, cached, read_meta


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.bin"
    path.write_bytes(b"first")
    return path


class Reader:
    """Counts how often it is asked, and gives images made from the file."""

    def __init__(self, path, skipped=()):
        self.path, self.skipped, self.calls = path, skipped, 0

    def __call__(self, skipped):
        self.calls += 1
        skipped += self.skipped
        images = np.random.default_rng(list(self.path.read_bytes())).integers(0, 256, (6, 4, 5, 3), dtype=np.uint8)
        test = np.arange(6) > 3
        domains = {"domains": np.arange(6) % 2, "domain_names": ("here", "there")}
        return ImageStore(images, np.arange(6) % 3, ("a", "b", "ü"), "Its name", test=test, **domains)


def opened(tmp_path, source, read, **options):
    return cached(tmp_path / "root", "some set", [source], options, read)


def same(a, b):
    return (
        torch.equal(a.images, b.images)
        and torch.equal(a.labels, b.labels)
        and torch.equal(a.domains, b.domains)
        and torch.equal(a.test, b.test)
        and (a.classes, a.name, a.domain_names) == (b.classes, b.name, b.domain_names)
    )


def test_the_second_opening_reads_nothing_and_is_the_same(tmp_path, source):
    read = Reader(source)
    first, second = opened(tmp_path, source, read), opened(tmp_path, source, read)
    assert read.calls == 1
    assert same(first, second)
    assert same(first, read([]))
    meta = read_meta(cache_folder(tmp_path / "root", "some set", [source], {}))
    assert meta["content_hash"] == second.content_hash()


def test_images_are_mapped_without_a_warning_and_writing_to_them_leaves_the_file(tmp_path, source):
    read = Reader(source)
    opened(tmp_path, source, read)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = opened(tmp_path, source, read)
    folder = cache_folder(tmp_path / "root", "some set", [source], {})
    before = (folder / "images.npy").read_bytes()
    assert str(folder / "images.npy") in Path("/proc/self/maps").read_text()
    store.images.zero_()
    assert (folder / "images.npy").read_bytes() == before
    assert same(opened(tmp_path, source, read), read([]))


def test_a_changed_source_or_option_is_read_again_and_the_stale_copy_goes(tmp_path, source):
    read = Reader(source)
    opened(tmp_path, source, read)
    small = opened(tmp_path, source, read, size=3)
    assert read.calls == 2
    source.write_bytes(b"other")
    assert same(opened(tmp_path, source, read), read([]))
    assert read.calls == 4
    os.utime(source, ns=(1, 1))
    opened(tmp_path, source, read)
    assert read.calls == 5
    assert len(list((tmp_path / "root" / FOLDER).iterdir())) == 2  # the last one, and the one with the other size
    assert len(small) == 6


def test_another_source_of_the_same_name_keeps_its_copy(tmp_path, source):
    other = tmp_path / "more" / "source.bin"
    other.parent.mkdir()
    other.write_bytes(b"another")
    reads = Reader(source), Reader(other)
    for _ in range(2):
        for path, read in zip((source, other), reads, strict=True):
            opened(tmp_path, path, read)
    assert [read.calls for read in reads] == [1, 1]


def test_files_within_a_folder_are_part_of_the_fingerprint(tmp_path):
    folder = tmp_path / "set"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "1").write_text("x")
    before = cache.fingerprint([folder])
    assert cache.fingerprint([folder]) == before
    (folder / "a" / "2").write_text("x")
    (folder / "a" / "gone").symlink_to(tmp_path / "nowhere")
    assert cache.fingerprint([folder]) != before


def test_copies_of_before_images_were_read_upright_are_made_again(tmp_path, source, monkeypatch):
    read = Reader(source)
    with monkeypatch.context() as before:
        before.setattr(cache, "_FORMAT", 1)
        opened(tmp_path, source, read)
    opened(tmp_path, source, read)
    assert read.calls == 2
    assert len(list((tmp_path / "root" / FOLDER).iterdir())) == 1


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 255
    path.write_bytes(data)


DAMAGE = {
    "a flipped bit in the images": lambda folder: flip(folder / "images.npy"),
    "flipped labels": lambda folder: flip(folder / "labels.npy"),
    "a cut": lambda folder: os.truncate(folder / "images.npy", 200),
    "an empty file": lambda folder: os.truncate(folder / "images.npy", 0),
    "lost labels": lambda folder: (folder / "labels.npy").unlink(),
    "lost meta": lambda folder: (folder / "meta.json").unlink(),
    "half of meta": lambda folder: os.truncate(folder / "meta.json", 30),
    "meta of another kind": lambda folder: (folder / "meta.json").write_text("[1]"),
    "another format": lambda folder: (folder / "meta.json").write_text(json.dumps({"format": 0})),
    "a file in its place": lambda folder: (shutil.rmtree(folder), folder.write_text("x")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_noticed_and_mended(tmp_path, source, damage):
    read = Reader(source)
    opened(tmp_path, source, read)
    DAMAGE[damage](cache_folder(tmp_path / "root", "some set", [source], {}))
    assert same(opened(tmp_path, source, read), read([]))
    calls = read.calls
    opened(tmp_path, source, read)
    assert read.calls == calls


def test_a_copied_cache_is_good_by_its_content(tmp_path, source):
    read = Reader(source)
    opened(tmp_path, source, read)
    folder = cache_folder(tmp_path / "root", "some set", [source], {})
    for path in folder.iterdir():
        os.utime(path, ns=(1, 1))
    opened(tmp_path, source, read)
    assert read.calls == 1


def test_where_nothing_can_be_written_the_images_stay_in_memory(tmp_path, source, monkeypatch):
    read = Reader(source)
    (tmp_path / "root").write_text("a file is no folder")
    assert same(opened(tmp_path, source, read), read([]))
    (tmp_path / "root").unlink()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    assert same(opened(tmp_path, source, read), read([]))
    assert list((tmp_path / "root" / FOLDER).iterdir()) == []  # no draft stays


def test_skipped_images_are_on_record(tmp_path, source):
    read = Reader(source, ["1.png: it is empty"])
    opened(tmp_path, source, read)
    meta = read_meta(cache_folder(tmp_path / "root", "some set", [source], {}))
    assert (meta["skipped"], meta["first_skipped"]) == (1, ["1.png: it is empty"])


def test_many_writers_at_once_leave_one_whole_copy(tmp_path, source):
    barrier = threading.Barrier(6)
    found, read = [], Reader(source)

    def slow(skipped):
        store = read(skipped)
        barrier.wait()  # all have seen that there is no copy yet
        return store

    threads = [threading.Thread(target=lambda: found.append(opened(tmp_path, source, slow))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert all(same(store, found[0]) for store in found)
    assert len(list((tmp_path / "root" / FOLDER).iterdir())) == 1


def test_a_writer_killed_in_the_middle_leaves_nothing_that_is_taken_for_a_copy(tmp_path, source):
    code = (
        "import os, sys, numpy as np\n"
        "from pathlib import Path\n"
        "from foogd.data import ImageStore, cache\n"
        "real = np.save\n"
        "def save(file, array, **more):\n"
        "    if array.ndim == 1: os._exit(9)\n"  # the images are written, the labels are not
        "    real(file, array, **more)\n"
        "np.save = save\n"
        "store = ImageStore(np.zeros((2, 4, 4, 3), np.uint8), [0, 1])\n"
        "cache.cached(Path(sys.argv[1]), 'some set', [Path(sys.argv[2])], {}, lambda skipped: store)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "root"), str(source)]
    assert subprocess.run(command, check=False).returncode == 9
    place = tmp_path / "root" / FOLDER
    (draft,) = place.iterdir()
    read = Reader(source)
    assert same(opened(tmp_path, source, read), read([]))
    assert draft.exists()  # its writer might still be at work
    os.utime(draft, (1, 1))
    source.write_bytes(b"new")
    opened(tmp_path, source, read)
    assert not draft.exists()
