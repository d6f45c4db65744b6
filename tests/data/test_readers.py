"""Readers give the images that were written, in the true formats, and refuse what is damaged or hostile."""

import contextlib
import io
import os
import pickle
import pickletools
import struct
import zlib

import numpy as np
import pytest
import scipy.io
from PIL import EpsImagePlugin, Image

from foogd.core.errors import InputError
from foogd.data import arrays, cifar, folders, readers
from foogd.data import decode as decoding
from foogd.data.matlab import read_matlab
from foogd.data.sources import load_source

RNG = np.random.default_rng(0)


def pixels(n, px=32):
    return RNG.integers(0, 256, (n, px, px, 3), dtype=np.uint8)


def planes(images):
    """CIFAR's rows: the red plane, the green one, the blue one."""
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def save(path, image):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)


def encoded(image, **how):
    file = io.BytesIO()
    Image.fromarray(image).save(file, **({"format": "WEBP", "lossless": True, "exact": True} | how))
    return file.getvalue()


def write_pack(path, blobs, y, **more):
    off = np.cumsum([0, *(len(blob) for blob in blobs)])
    buf = np.frombuffer(b"".join(blobs), dtype=np.uint8)
    np.savez(path, buf=buf, off=off.astype(np.int64), y=np.array(y, dtype=np.uint8), **more)


def python2_pickle(data, labels):
    """A dictionary as Python 2 wrote it in the release: protocol 2, byte strings, the old name of numpy's module."""

    def text(value):
        return b"U" + bytes([len(value)]) + value

    def number(value):
        return b"J" + struct.pack("<i", value)

    raw = data.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n"
        + number(0)
        + b"\x85"
        + text(b"b")
        + b"tR("
        + number(1)
        + number(data.shape[0])
        + number(data.shape[1])
        + b"\x86cnumpy\ndtype\n"
        + text(b"u1")
        + number(0)
        + number(1)
        + b"\x87R("
        + number(3)
        + text(b"|")
        + b"NNN"
        + number(-1) * 2
        + number(0)
        + b"tb\x89T"
        + struct.pack("<i", len(raw))
        + raw
        + b"tb"
    )
    listed = b"](" + b"".join(number(label) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + listed + b"u."


def write_cifar10_python(folder, images, labels, protocol="python 2"):
    folder.mkdir(parents=True)
    each = len(images) // 6
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        rows = slice(number * each, (number + 1) * each)
        data, y = planes(images[rows]), [int(label) for label in labels[rows]]
        if protocol == "python 2":
            content = python2_pickle(data, y)
        else:
            content = pickle.dumps({b"data": data, b"labels": y}, protocol=protocol)
        (folder / name).write_bytes(content)
    names = [name.encode() for name in readers.CIFAR10_CLASSES]
    (folder / "batches.meta").write_bytes(pickle.dumps({b"label_names": names}, protocol=2))


@pytest.mark.parametrize("protocol", ["python 2", 0, 2, 4])
def test_cifar10_python_release(tmp_path, protocol):
    images, labels = pixels(12), np.arange(12) % 10
    write_cifar10_python(tmp_path / "c", images, labels, protocol)
    store = cifar.read_cifar_python(tmp_path / "c")
    assert np.array_equal(store.images.numpy(), images)
    assert store.labels.tolist() == labels.tolist()
    assert store.test.tolist() == [False] * 10 + [True] * 2
    assert store.classes == readers.CIFAR10_CLASSES


def test_the_python_2_pickle_of_these_tests_is_one_that_the_full_unpickler_reads():
    data = planes(pixels(2))
    content = pickle.loads(python2_pickle(data, [3, 300]), encoding="bytes")
    assert np.array_equal(content[b"data"], data)
    assert content[b"labels"] == [3, 300]
    assert any(op.name == "GLOBAL" for op, _, _ in pickletools.genops(python2_pickle(data, [1, 2])))


def test_cifar100_python_release_takes_the_fine_labels(tmp_path):
    images = pixels(5)
    for name, rows in (("train", slice(0, 3)), ("test", slice(3, 5))):
        fine = list(range(5))[rows]
        content = {b"data": planes(images[rows]), b"fine_labels": fine, b"coarse_labels": [0] * len(fine)}
        (tmp_path / name).write_bytes(pickle.dumps(content, protocol=2))
    names = {b"fine_label_names": [b"a", b"b", b"c", b"d", b"e"], b"coarse_label_names": [b"z"]}
    (tmp_path / "meta").write_bytes(pickle.dumps(names, protocol=2))
    store = load_source("cifar100", tmp_path)
    assert store.name == "cifar100"
    assert store.labels.tolist() == [0, 1, 2, 3, 4]
    assert store.classes == ("a", "b", "c", "d", "e")
    assert np.array_equal(store.images.numpy(), images)
    assert int(store.test.sum()) == 2


class Hostile:
    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("where", ["data", "key", "top"])
def test_a_hostile_pickle_is_refused_and_not_run(tmp_path, protocol, where):
    write_cifar10_python(tmp_path / "c", pixels(6), np.zeros(6, dtype=int))
    trap = Hostile(os.mkdir, str(tmp_path / "owned"))
    content = {"data": {b"data": trap, b"labels": []}, "key": {b"x": [trap]}, "top": trap}[where]
    (tmp_path / "c" / "data_batch_3").write_bytes(pickle.dumps(content, protocol=protocol))
    with pytest.raises(InputError, match="data_batch_3 is refused"):
        cifar.read_cifar_python(tmp_path / "c")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Hostile(eval, "1/0")),
        pickle.dumps(Hostile(getattr, "", "upper")),
        pickle.dumps({b"data": np.array([{}], dtype=object), b"labels": [0]}),
        pickle.dumps({b"data": np.zeros((1, 3072)), b"labels": [0]}),
        pickle.dumps({b"data": planes(pixels(2)), b"labels": [0]}),
        pickle.dumps({b"data": planes(pixels(1)), b"labels": ["cat"]}),
        pickle.dumps([1, 2]),
        b"\x80\x02c_codecs\nencode\n(X\x04\x00\x00\x00aaaaX\x03\x00\x00\x00zipt R.",
        b"\x80\x02U\xff",
        b"\x80\x02}r\xff\xff\xff\x7f.",
        b"\x80\x05\x96\x08\x00\x00\x00\x00\x00\x00\x00abcdefgh.",
        b"\x80\x02\x82\x01.",
        b"Pname\n.",
        b"not a pickle",
        b"",
    ],
)
def test_a_file_with_other_content_ends_in_one_sentence(tmp_path, content):
    write_cifar10_python(tmp_path / "c", pixels(6), np.zeros(6, dtype=int))
    (tmp_path / "c" / "data_batch_2").write_bytes(content)
    with pytest.raises(InputError, match="data_batch_2"):
        cifar.read_cifar_python(tmp_path / "c")


def test_a_truncated_or_missing_batch_is_named(tmp_path):
    write_cifar10_python(tmp_path / "c", pixels(6), np.zeros(6, dtype=int))
    whole = (tmp_path / "c" / "data_batch_4").read_bytes()
    for length in (10, len(whole) // 2, len(whole) - 1):
        (tmp_path / "c" / "data_batch_4").write_bytes(whole[:length])
        with pytest.raises(InputError, match="data_batch_4"):
            cifar.read_cifar_python(tmp_path / "c")
    (tmp_path / "c" / "data_batch_4").unlink()
    with pytest.raises(InputError, match=r"data_batch_4.*No such file"):
        cifar.read_cifar_python(tmp_path / "c")


def test_binary_releases(tmp_path):
    images, labels = pixels(12), (np.arange(12) % 10).astype(np.uint8)
    records = np.concatenate([labels[:, None], planes(images)], axis=1)
    (tmp_path / "ten").mkdir()
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        (tmp_path / "ten" / f"{name}.bin").write_bytes(records[2 * number : 2 * number + 2].tobytes())
    ten = cifar.read_cifar_binary(tmp_path / "ten")
    assert np.array_equal(ten.images.numpy(), images)
    assert ten.labels.tolist() == labels.tolist()
    (tmp_path / "hundred").mkdir()
    both = np.concatenate([np.full((12, 1), 7, dtype=np.uint8), records], axis=1)
    (tmp_path / "hundred" / "train.bin").write_bytes(both[:8].tobytes())
    (tmp_path / "hundred" / "test.bin").write_bytes(both[8:].tobytes())
    hundred = cifar.read_cifar_binary(tmp_path / "hundred")
    assert hundred.labels.tolist() == labels.tolist()
    assert hundred.test.tolist() == [False] * 8 + [True] * 4
    (tmp_path / "ten" / "data_batch_5.bin").write_bytes(records[:2].tobytes()[:-1])
    with pytest.raises(InputError, match=r"data_batch_5.bin has 6145 bytes"):
        cifar.read_cifar_binary(tmp_path / "ten")


def test_cifar_c_gives_one_corruption_at_one_severity_from_its_file(tmp_path):
    fog, snow = pixels(10, 8), pixels(10, 8)
    np.save(tmp_path / "fog.npy", fog)
    np.save(tmp_path / "snow.npy", snow)
    np.save(tmp_path / "labels.npy", np.array([3, 1] * 5, dtype=np.uint8))
    one = cifar.read_cifar_c(tmp_path, "snow", 3)
    assert np.array_equal(one.images.numpy(), snow[4:6])
    assert one.labels.tolist() == [3, 1]
    assert one.domains.tolist() == [7, 7]
    assert one.domain_names[7] == "snow/3"
    everything = cifar.read_cifar_c(tmp_path)
    assert np.array_equal(everything.images.numpy(), np.concatenate([fog, snow]))
    assert everything.domains.tolist() == [d for d in range(10) for _ in range(2)]
    with pytest.raises(InputError, match="no corruption 'rain'; it holds fog, snow"):
        cifar.read_cifar_c(tmp_path, "rain")
    with pytest.raises(InputError, match="severity is 6"):
        cifar.read_cifar_c(tmp_path, "fog", 6)
    np.save(tmp_path / "fog.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match=r"fog\.npy"):
        cifar.read_cifar_c(tmp_path, "fog")


def test_svhn_is_turned_the_right_way_and_ten_means_zero(tmp_path):
    images = pixels(4)
    path = tmp_path / "test_32x32.mat"
    scipy.io.savemat(path, {"X": images.transpose(1, 2, 3, 0), "y": np.array([[10], [1], [9], [10]], dtype=np.uint8)})
    assert load_source("svhn", tmp_path).name == "svhn"
    store = cifar.read_svhn(path)
    assert np.array_equal(store.images.numpy(), images)
    assert store.labels.tolist() == [0, 1, 9, 0]
    assert store.test is None
    scipy.io.savemat(tmp_path / "train_32x32.mat", {"X": images.transpose(1, 2, 3, 0), "y": np.full((4, 1), 2)})
    assert cifar.read_svhn(tmp_path / "train_32x32.mat", path).test.tolist() == [False] * 4 + [True] * 4
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"x" * 500):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"test_32x32\.mat"):
            cifar.read_svhn(path)
    scipy.io.savemat(path, {"X": images, "z": 1})
    with pytest.raises(InputError, match="no array y"):
        cifar.read_svhn(path)


@pytest.mark.parametrize("compressed", [False, True])
def test_matlab_arrays_are_those_that_scipy_writes(tmp_path, compressed):
    written = {
        "X": RNG.integers(0, 256, (4, 5, 3, 7), dtype=np.uint8),
        "y": np.arange(7.0)[:, None],
        "a_longer_name": np.array([[-3, 5]], dtype=np.int16),
        "words": "left out",
    }
    scipy.io.savemat(tmp_path / "a.mat", written, do_compression=compressed)
    found = read_matlab((tmp_path / "a.mat").read_bytes())
    assert found.keys() == {"X", "y", "a_longer_name"}
    for name, values in found.items():
        assert values.dtype == written[name].dtype
        assert np.array_equal(values, written[name])


def spoiled(whole, count, head):
    """Copies of a file with some bytes changed, most of them near its beginning, or cut."""
    rng = np.random.default_rng(1)
    for number in range(count):
        data = bytearray(whole)
        for _ in range(1 + number % 3):
            data[rng.integers(min(head, len(data)))] = rng.integers(256)
        yield bytes(data if number % 4 else data[: rng.integers(len(data))])


@pytest.mark.parametrize("compressed", [False, True])
def test_a_spoiled_matlab_file_never_crashes(tmp_path, compressed):
    path = tmp_path / "test_32x32.mat"
    arrays = {"X": pixels(2).transpose(1, 2, 3, 0), "y": np.array([[10], [1]], dtype=np.uint8)}
    scipy.io.savemat(path, arrays, do_compression=compressed)
    refused = 0
    for content in spoiled(path.read_bytes(), 200, 300):
        path.write_bytes(content)
        try:
            cifar.read_svhn(path)
        except InputError:
            refused += 1
    assert refused > 50


def test_a_spoiled_pickle_never_crashes(tmp_path):
    write_cifar10_python(tmp_path / "c", pixels(6), np.zeros(6, dtype=int))
    said = []
    for content in spoiled((tmp_path / "c" / "test_batch").read_bytes(), 200, 150):
        (tmp_path / "c" / "test_batch").write_bytes(content)
        try:
            cifar.read_cifar_python(tmp_path / "c")
        except InputError as error:
            said.append(str(error))
    assert len(said) > 50
    assert not any("\n" in sentence for sentence in said)


def test_class_folders_with_and_without_a_test_part(tmp_path):
    images = pixels(6, 8)
    for name, image in zip(("b/1", "b/2", "a/deep/1"), images[:3], strict=True):
        save(tmp_path / "train" / f"{name}.png", image)
    for name, image in zip(("a/1", "b/1", "b/2"), images[3:], strict=True):
        save(tmp_path / "test" / f"{name}.png", image)
    (tmp_path / "train" / "b" / "notes.txt").write_text("no image")
    store = folders.read_tree(tmp_path)
    assert store.classes == ("a", "b")
    assert store.labels.tolist() == [0, 1, 1, 0, 1, 1]
    assert store.test.tolist() == [False] * 3 + [True] * 3
    assert np.array_equal(store.images.numpy(), images[[2, 0, 1, 3, 4, 5]])
    plain = folders.read_tree(tmp_path / "train")
    assert (plain.classes, plain.labels.tolist(), plain.test) == (("a", "b"), [0, 1, 1], None)
    flat = folders.read_tree(tmp_path / "train" / "b")
    assert (len(flat), flat.labels.tolist()) == (2, [0, 0])
    assert len(folders.read_flat(tmp_path)) == 6
    save(tmp_path / "train" / "loose.png", images[0])
    with pytest.raises(InputError, match="beside folders"):
        folders.read_tree(tmp_path / "train")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no images"):
        folders.read_tree(tmp_path / "empty")


def test_tinyimagenet_takes_the_labels_of_val_from_its_table(tmp_path):
    images = pixels(6, 8)
    for wnid, number in (("n02", 0), ("n02", 1), ("n01", 0), ("n01", 1)):
        save(tmp_path / "train" / wnid / "images" / f"{wnid}_{number}.png", images[number])
    for number in range(2):
        save(tmp_path / "val" / "images" / f"val_{number}.png", images[4 + number])
    table = tmp_path / "val" / "val_annotations.txt"
    table.write_text("val_0.png\tn02\t0\t0\t62\t57\nval_1.png\tn01\t0\t0\t62\t57\n")
    store = folders.read_tinyimagenet(tmp_path)
    assert store.classes == ("n01", "n02")
    assert store.labels.tolist() == [0, 0, 1, 1, 1, 0]
    assert store.test.tolist() == [False] * 4 + [True] * 2
    assert np.array_equal(store.images[4:].numpy(), images[4:])
    table.write_text("../../secret.png\tn02\n")
    with pytest.raises(InputError, match="line 1"):
        folders.read_tinyimagenet(tmp_path)
    table.write_text("val_0.png\tn99\n")
    with pytest.raises(InputError, match="n99"):
        folders.read_tinyimagenet(tmp_path)


def test_tinyimagenet_c_and_pacs_folders(tmp_path):
    image = pixels(1, 8)[0]
    for corruption in ("fog", "snow"):
        for severity in range(1, 6):
            for wnid in ("n01", "n02"):
                save(tmp_path / "c" / corruption / str(severity) / wnid / "a.png", image)
    store = folders.read_tinyimagenet_c(tmp_path / "c", "snow", 2)
    assert (store.labels.tolist(), store.domains.tolist()) == ([0, 1], [6, 6])
    assert len(folders.read_tinyimagenet_c(tmp_path / "c")) == 20
    for domain in folders.PACS_DOMAINS:
        for name in folders.PACS_CLASSES:
            save(tmp_path / "pacs" / domain / name / "a.png", image)
    pacs = folders.read_pacs(tmp_path / "pacs")
    assert pacs.domains.bincount().tolist() == [7] * 4
    assert pacs.domain_names == folders.PACS_DOMAINS
    assert pacs.labels.tolist() == list(range(7)) * 4
    save(tmp_path / "pacs" / "photo" / "cat" / "a.png", image)
    with pytest.raises(InputError, match="cat"):
        folders.read_pacs(tmp_path / "pacs")


def test_packs_give_their_images_in_order_with_test_part_and_domains(tmp_path):
    images = pixels(5, 16)
    blobs = [encoded(image) for image in images]
    write_pack(tmp_path / "a.npz", blobs[:2], [1, 0])
    write_pack(tmp_path / "b.npz", blobs[2:4], [2, 2])
    write_pack(tmp_path / "t.npz", blobs[4:], [1], domain=np.array([3], dtype=np.uint8))
    store = arrays.read_packs([tmp_path / "a.npz", tmp_path / "b.npz"], [tmp_path / "t.npz"])
    assert np.array_equal(store.images.numpy(), images)
    assert (store.labels.tolist(), store.test.tolist()) == ([1, 0, 2, 2, 1], [False] * 4 + [True])
    assert arrays.read_npz(tmp_path / "t.npz").domains.tolist() == [3]
    write_pack(tmp_path / "a.npz", [blobs[0], blobs[1][:40]], [1, 0])
    with pytest.raises(InputError, match=r"image 1 of a\.npz cannot be read"):
        arrays.read_packs([tmp_path / "a.npz"])


@pytest.mark.parametrize(
    "change",
    [
        {"off": np.array([0, 10, 5])},
        {"off": np.array([0, 10])},
        {"off": np.array([0.0, 1.0, 2.0])},
        {"off": np.array([0, 2**40, 2**41])},
        {"y": np.array([[1], [2]])},
        {"y": np.zeros(0, dtype=int)},
        {"buf": np.zeros((4, 4), dtype=np.uint8)},
        {"domain": np.array([1])},
    ],
)
def test_a_pack_that_contradicts_itself_is_refused(tmp_path, change):
    blob = encoded(pixels(1, 8)[0])
    both = np.frombuffer(blob * 2, dtype=np.uint8)
    held = {"buf": both, "off": np.array([0, len(blob), 2 * len(blob)]), "y": np.array([0, 1])}
    np.savez(tmp_path / "p.npz", **held)
    assert len(arrays.read_npz(tmp_path / "p.npz")) == 2
    np.savez(tmp_path / "p.npz", **(held | change))
    with pytest.raises(InputError, match=r"p\.npz"):
        arrays.read_npz(tmp_path / "p.npz")


def test_npz_of_arrays_in_the_usual_names(tmp_path):
    images = pixels(5, 8)
    np.savez(tmp_path / "a.npz", x=images, y=np.arange(5))
    np.savez(tmp_path / "b.npz", x_train=images[:3], y_train=[[0], [1], [2]], x_test=images[3:], y_test=[[3], [4]])
    assert arrays.read_npz(tmp_path / "a.npz").labels.tolist() == [0, 1, 2, 3, 4]
    split = arrays.read_npz(tmp_path / "b.npz")
    assert np.array_equal(split.images.numpy(), images)
    assert (split.labels.tolist(), split.test.tolist()) == ([0, 1, 2, 3, 4], [False] * 3 + [True] * 2)
    np.savez(tmp_path / "c.npz", x=images.transpose(0, 3, 1, 2), y=np.arange(5))
    with pytest.raises(InputError, match="channels first"):
        arrays.read_npz(tmp_path / "c.npz")
    np.savez(tmp_path / "d.npz", z=images)
    with pytest.raises(InputError, match="holds z"):
        arrays.read_npz(tmp_path / "d.npz")
    np.savez(tmp_path / "e.npz", x=np.array([{}], dtype=object), y=[0])
    with pytest.raises(InputError, match="plain arrays"):
        arrays.read_npz(tmp_path / "e.npz")


def huge_png(width, height):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0")) + chunk(b"IEND", b"")


GOOD = encoded(pixels(1, 8)[0], format="PNG")
BAD = {
    "empty": (b"", "it is empty"),
    "text": (b"<html>404</html>", "not an image"),
    "truncated": (GOOD[: len(GOOD) // 2], "cannot be read: "),
    "header only": (GOOD[:40], "cannot be read: "),
    "huge": (huge_png(9000, 9000), "9000×9000 pixels"),
    "gigantic": (huge_png(100_000, 100_000), "pixels"),
    "deep": (b"", "mode"),
}


@pytest.mark.parametrize("format", decoding.FORMATS)
def test_an_image_of_each_format_is_read(format):
    grey = np.full((8, 8, 3), 128, dtype=np.uint8)
    assert np.array_equal(decoding.decode(encoded(grey, format=format)), grey)


@pytest.mark.parametrize("format", ["EPS", "TGA", "PCX", "ICO", "SGI"])
def test_no_other_format_is_opened_and_no_other_program_is_started(tmp_path, monkeypatch, format):
    started = tmp_path / "started"
    ghostscript = tmp_path / "gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch '{started}'\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # not looked for yet
    photo = tmp_path / "photo.png"
    photo.write_bytes(encoded(pixels(1, 16)[0], format=format))
    with pytest.raises(decoding.BadImage, match="not an image of a known format: PNG, JPEG, WEBP, BMP, PPM, GIF, TIFF"):
        decoding.decode(str(photo))
    assert not started.exists()


def tree_with(tmp_path, content):
    for number in range(3):
        path = tmp_path / "set" / "class" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(GOOD)
    bad = tmp_path / "set" / "class" / "1b.png"
    bad.write_bytes(content)
    return bad


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_image_is_named_or_skipped_and_counted(tmp_path, kind):
    content, reason = BAD[kind]
    bad = tree_with(tmp_path, content)
    if kind == "deep":
        Image.fromarray(np.full((8, 8), 40_000, dtype=np.uint16)).save(bad)
    with pytest.raises(InputError, match=r"1b\.png.*" + reason):
        folders.read_tree(tmp_path / "set")
    skipped = []
    store = folders.read_tree(tmp_path / "set", on_bad="skip", skipped=skipped)
    assert len(store) == len(store.labels) == 3
    assert len(skipped) == 1
    assert "1b.png" in skipped[0]


def test_every_prefix_of_an_image_gives_an_image_or_the_one_error():
    for how in ({"format": "PNG"}, {"format": "JPEG"}, {"format": "WEBP"}, {"format": "GIF"}, {"format": "BMP"}):
        whole = encoded(pixels(1, 8)[0], **how)
        assert decoding.decode(whole).shape == (8, 8, 3)
        for length in range(0, len(whole), 7):
            found = "?"
            with contextlib.suppress(decoding.BadImage):
                found = decoding.decode(whole[:length]).shape
            assert found in ("?", (8, 8, 3))


def test_mixed_sizes_name_both_files_or_the_rare_size_is_skipped(tmp_path):
    for number, px in enumerate((9, 8, 8)):
        save(tmp_path / "set" / "a" / f"{number}.png", pixels(1, px)[0])
    with pytest.raises(InputError, match=r"0\.png has 9×9 pixels and .*1\.png has 8×8"):
        folders.read_tree(tmp_path / "set")
    skipped = []
    assert folders.read_tree(tmp_path / "set", on_bad="skip", skipped=skipped).shape == (3, 8, 8)
    assert len(skipped) == 1
    assert "0.png" in skipped[0]
    assert folders.read_tree(tmp_path / "set", size=4).shape == (3, 4, 4)


def test_when_no_image_can_be_read_skipping_ends_in_an_error(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_bytes(b"")
    with pytest.raises(InputError, match="none of the 1 images"):
        folders.read_tree(tmp_path, on_bad="skip")
    with pytest.raises(InputError, match="on_bad is 'ignore'"):
        folders.read_tree(tmp_path, on_bad="ignore")


def test_size_shortens_the_shorter_side_and_keeps_the_centre():
    wide = np.zeros((8, 24, 3), dtype=np.uint8)
    wide[:, 8:16] = 200
    assert (decoding.decode(encoded(wide, format="PNG"), 8) == 200).all()
    tall = wide.transpose(1, 0, 2)
    assert (decoding.decode(encoded(tall, format="PNG"), 8) == 200).all()
    line = encoded(np.zeros((1, 30_000, 3), dtype=np.uint8), format="PNG")
    with pytest.raises(decoding.BadImage, match="long and thin"):
        decoding.decode(line, 64)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_all_kinds_of_8_bit_images_become_colour(mode):
    file = io.BytesIO()
    image = Image.fromarray(np.full((6, 7, 3), 255, dtype=np.uint8)).convert(mode)
    image.save(file, format="TIFF" if mode == "CMYK" else "PNG")
    found = decoding.decode(file.getvalue())
    assert found.shape == (6, 7, 3)
    assert (found == 255).all()


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_read_upright(format, orientation):
    upright = np.zeros((8, 16, 3), dtype=np.uint8)
    upright[:, :8, 0], upright[:4, :, 1] = 255, 255
    stored = {
        1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1], 5: upright.transpose(1, 0, 2),
        6: np.rot90(upright), 7: np.rot90(upright.transpose(1, 0, 2), 2), 8: np.rot90(upright, -1),
    }  # fmt: skip
    remark = Image.Exif()
    remark[0x0112] = orientation
    how = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}.get(format, {})
    found = decoding.decode(encoded(stored[orientation].copy(), format=format, exif=remark, **how))
    assert found.shape == upright.shape
    assert np.abs(found.astype(int) - upright).max() < 30


def test_a_damaged_remark_does_not_spoil_an_image():
    colours = pixels(1, 8)[0]
    assert np.array_equal(decoding.decode(encoded(colours, format="PNG", exif=b"nonsense")), colours)


def test_workers_give_the_same_images_in_the_same_order_as_one_process():
    images = pixels(1200, 8)
    blobs = [encoded(image, format="PNG") for image in images]
    blobs[700] = b"broken"
    alone = [found for _, part in decoding.decode_many(1200, blobs.__getitem__, workers=1) for found in part]
    shared = [found for _, part in decoding.decode_many(1200, blobs.__getitem__, workers=3) for found in part]
    assert isinstance(alone[700], str)
    assert alone[700] == shared[700]
    assert all(np.array_equal(a, b) for i, (a, b) in enumerate(zip(alone, shared, strict=True)) if i != 700)
    assert all(np.array_equal(a, b) for i, (a, b) in enumerate(zip(images, shared, strict=True)) if i != 700)


def test_a_worker_that_dies_costs_no_image(monkeypatch):
    blobs = [GOOD] * 1000
    first = decoding._Worker.decode
    killed = []

    def dying(self, sources, size):
        if not killed:
            killed.append(self)
            self.kill()
        return first(self, sources, size)

    monkeypatch.setattr(decoding._Worker, "decode", dying)
    monkeypatch.setattr(decoding, "_CHUNK", 5)
    blobs_read = [f for _, part in decoding.decode_many(1000, blobs.__getitem__, workers=2) for f in part]
    assert killed
    assert len(blobs_read) == 1000
    assert not any(isinstance(found, str) for found in blobs_read)


def test_progress_reaches_the_number_of_images(tmp_path):
    for number in range(3):
        save(tmp_path / "a" / f"{number}.png", pixels(1, 8)[0])
    seen = []
    folders.read_tree(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (3, 3)


@pytest.mark.parametrize(
    ("name", "file", "reported"),
    [
        ("isun", "out_isun.npz", "isun"),
        ("svhn", "out_svhn.npz", "svhn"),
        ("textures", "out_textures.npz", "Textures (10 classes)"),
        ("lsun_c", "out_lsunlike_crop.npz", "LSUN-like crop"),
        ("lsun_r", "out_lsunlike_resize.npz", "LSUN-like resize"),
    ],
)
def test_packs_are_found_and_substitutes_keep_their_honest_names(tmp_path, name, file, reported):
    (tmp_path / "here" / name).mkdir(parents=True)
    write_pack(tmp_path / "here" / name / file, [GOOD], [0])
    assert load_source(name, tmp_path / "here").name == reported
    (tmp_path / "there").mkdir()
    write_pack(tmp_path / "there" / file, [GOOD], [0])
    assert load_source(name, tmp_path / "there").name == reported


def test_sources_find_every_form_below_the_root(tmp_path):
    image = pixels(1, 8)[0]
    write_cifar10_python(tmp_path / "a" / "cifar10" / "cifar-10-batches-py", pixels(12), np.arange(12) % 10)
    assert len(load_source("cifar10", tmp_path / "a")) == 12
    write_cifar10_python(tmp_path / "b" / "cifar-10-batches-py", pixels(12), np.arange(12) % 10)
    assert load_source("cifar10", tmp_path / "b").name == "cifar10"
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            save(tmp_path / "c" / "cifar10" / "CIFAR" / part / name / "1.png", image)
    assert load_source("cifar10", tmp_path / "c").classes == ("cat", "dog")
    save(tmp_path / "c" / "lsun_r" / "LSUN_resize" / "LSUN_resize" / "1.jpg", image)
    assert len(load_source("lsun_r", tmp_path / "c")) == 1
    save(tmp_path / "c" / "textures" / "dtd" / "images" / "banded" / "1.jpg", pixels(1, 40)[0])
    assert load_source("textures", tmp_path / "c").shape == (3, 32, 32)
    assert load_source("textures@16", tmp_path / "c").shape == (3, 16, 16)
    np.save(tmp_path / "labels.npy", np.zeros(5, dtype=np.uint8))
    (tmp_path / "c" / "cifar10c" / "CIFAR-10-C").mkdir(parents=True)
    np.save(tmp_path / "c" / "cifar10c" / "CIFAR-10-C" / "fog.npy", pixels(5))
    (tmp_path / "labels.npy").rename(tmp_path / "c" / "cifar10c" / "CIFAR-10-C" / "labels.npy")
    assert len(load_source("cifar10c/fog/3", tmp_path / "c")) == 1
    with pytest.raises(InputError, match="name/corruption/severity"):
        load_source("cifar10c/fog/high", tmp_path / "c")
    with pytest.raises(InputError, match="holds pixels"):
        load_source("cifar10@16", tmp_path / "a")


def test_a_path_is_a_source(tmp_path):
    save(tmp_path / "mine" / "a" / "1.png", pixels(1, 8)[0])
    save(tmp_path / "mine" / "b" / "1.png", pixels(1, 9)[0])
    np.savez(tmp_path / "arrays.npz", x=pixels(3, 8), y=np.arange(3))
    assert load_source(str(tmp_path / "arrays.npz"), tmp_path).name == "arrays"
    assert load_source(f"{tmp_path / 'mine'}@8", tmp_path).shape == (3, 8, 8)
    with pytest.raises(InputError, match="ask for a size"):
        load_source(str(tmp_path / "mine"), tmp_path)
    assert len(load_source(str(tmp_path / "mine"), tmp_path, on_bad="skip")) == 1


def test_a_missing_set_says_where_it_was_sought_and_how_to_get_it(tmp_path):
    with pytest.raises(InputError, match=rf"neither in {tmp_path}/cifar10 nor in .*foogd data get cifar10"):
        load_source("cifar10", tmp_path)
    with pytest.raises(InputError, match="Li et al"):
        load_source("pacs", tmp_path)
