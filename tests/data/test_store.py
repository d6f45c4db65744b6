import hashlib
import zipfile
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch

from foogd.core.errors import InputError
from foogd.data import SOURCES, ImageStore, load_source
from foogd.data.store import sample

EMBEDDED = Path(str(files("foogd.data"))) / "embedded"


def store(n=10, h=4, w=5, c=3, **more):
    rng = np.random.default_rng(0)
    return ImageStore(rng.integers(0, 256, (n, h, w, c), dtype=np.uint8), np.arange(n) % 3, **more)


def test_a_store_takes_numpy_or_torch_and_adds_the_channel_of_grey_images():
    grey = ImageStore(np.zeros((4, 6, 7), dtype=np.uint8), [0, 1, 2, 1])
    assert (len(grey), grey.shape, grey.num_classes, grey.labels.dtype) == (4, (1, 6, 7), 3, torch.int64)
    assert ImageStore(torch.zeros(4, 6, 7, 3, dtype=torch.uint8), torch.zeros(4).int()).shape == (3, 6, 7)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"images": np.zeros((2, 4, 4, 3)), "labels": [0, 1]}, "uint8"),
        ({"images": np.zeros((2, 4), dtype=np.uint8), "labels": [0, 1]}, "shape"),
        ({"images": np.zeros((0, 4, 4), dtype=np.uint8), "labels": np.zeros(0, dtype=int)}, "at least one"),
        ({"images": np.zeros((2, 4, 4), dtype=np.uint8), "labels": [0]}, "labels"),
        ({"images": np.zeros((2, 4, 4), dtype=np.uint8), "labels": [0, -1]}, "-1"),
        ({"images": np.zeros((2, 4, 4), dtype=np.uint8), "labels": [0.0, 1.0]}, "whole numbers"),
        ({"images": np.zeros((2, 4, 4), dtype=np.uint8), "labels": [0, 2], "classes": ("a", "b")}, "named"),
        ({"images": np.zeros((2, 4, 4), dtype=np.uint8), "labels": [0, 1], "domains": [1]}, "domains"),
        ({"images": np.zeros((2, 4, 4), dtype=np.uint8), "labels": [0, 1], "test": [1, 0]}, "bool"),
        ({"images": "abc", "labels": [0, 1]}, "images"),
    ],
)
def test_bad_arrays_are_refused_in_one_sentence(arguments, word):
    with pytest.raises(InputError, match=word):
        ImageStore(**arguments)


def test_batch_gives_the_chosen_images_as_channels_first_in_zero_to_one():
    data = store()
    batch = data.batch(torch.tensor([7, 2, 2]))
    assert batch.shape == (3, 3, 4, 5)
    assert torch.equal((batch * 255).round().to(torch.uint8).permute(0, 2, 3, 1), data.images[[7, 2, 2]])
    assert torch.equal(batch[1], batch[2])


def test_moments_are_those_of_numpy():
    data = store(n=50)
    mean, std = data.channel_moments()
    pixels = data.images.numpy().reshape(-1, 3) / 255
    np.testing.assert_allclose(mean, pixels.mean(0), rtol=1e-12)
    np.testing.assert_allclose(std, pixels.std(0), rtol=1e-9)
    assert ImageStore(np.full((3, 4, 4), 7, dtype=np.uint8), [0, 0, 0]).channel_moments()[1] == (0.0,)


def test_select_by_index_and_by_mask_agree_and_keep_the_number_of_classes():
    data = store(domains=np.arange(10) // 5, test=np.arange(10) > 7)
    mask = data.labels == 0
    by_mask, by_index = data.select(mask), data.select(mask.nonzero().flatten())
    assert by_mask.content_hash() == by_index.content_hash()
    assert by_mask.num_classes == data.num_classes == 3
    assert torch.equal(by_mask.domains, data.domains[mask])
    assert torch.equal(by_mask.test, data.test[mask])
    with pytest.raises(InputError, match="mask"):
        data.select(mask[:5])


def test_a_saved_store_comes_back_whole(tmp_path):
    data = store(classes=("a", "b", "ç"), name="trial", domains=np.arange(10), test=np.arange(10) > 4)
    data.save(tmp_path / "deep" / "trial.npz")
    back = ImageStore.load(tmp_path / "deep" / "trial.npz")
    assert (back.classes, back.name, back.content_hash()) == (data.classes, data.name, data.content_hash())
    assert torch.equal(back.domains, data.domains)
    assert torch.equal(back.test, data.test)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["trial.npz"]
    bare = store()
    bare.save(tmp_path / "bare.npz")
    back = ImageStore.load(tmp_path / "bare.npz")
    assert (back.domains, back.test, back.classes) == (None, None, ())


def test_saving_twice_gives_the_same_bytes_and_a_failure_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    store().save(path)
    first = path.read_bytes()
    store().save(path)
    assert path.read_bytes() == first

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(OSError, match="disk full"):
        store(n=3).save(path)
    assert path.read_bytes() == first
    assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]


def test_unreadable_files_are_refused(tmp_path):
    path = tmp_path / "x.npz"
    with pytest.raises(InputError, match="not a file"):
        ImageStore.load(path)
    path.write_bytes(b"no archive")
    with pytest.raises(InputError, match="cannot be read"):
        ImageStore.load(path)
    store(n=200).save(path)
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(InputError, match="cannot be read"):
        ImageStore.load(path)
    np.savez(path, pictures=np.zeros(3))
    with pytest.raises(InputError, match="pictures"):
        ImageStore.load(path)
    np.savez(path, images=np.array([{}], dtype=object), labels=np.zeros(1, dtype=int))
    with pytest.raises(InputError, match="cannot be read"):
        ImageStore.load(path)
    np.save(tmp_path / "y.npy", np.zeros(3))
    with pytest.raises(InputError, match="cannot be read"):
        ImageStore.load(tmp_path / "y.npy")


def test_the_hash_sees_pixels_labels_and_shape():
    data = store()
    pixels, labels = data.images.clone(), data.labels.clone()
    pixels[3, 1, 1, 0] ^= 1
    labels[3] += 1
    others = [
        ImageStore(pixels, data.labels),
        ImageStore(data.images, labels),
        ImageStore(data.images.reshape(10, 5, 4, 3), data.labels),
    ]
    hashes = {data.content_hash(), *(other.content_hash() for other in others)}
    assert len(hashes) == 4
    assert data.content_hash() == store(name="other").content_hash()


def test_a_sample_keeps_the_shares_of_classes_and_parts():
    labels = torch.arange(1000) % 10
    test = torch.arange(1000) >= 800
    images = torch.arange(1000).remainder(256).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 8, 8, 1)
    store = ImageStore(images, labels, name="big", test=test)
    small = sample(store, train=80, test=20)
    assert torch.bincount(small.labels[~small.test]).tolist() == [8] * 10
    assert torch.bincount(small.labels[small.test]).tolist() == [2] * 10
    assert small.name == "big (sample of 100)"
    assert torch.equal(sample(store, train=80, test=20).images, small.images)


def test_a_sample_has_every_class_of_every_domain_and_never_more_than_there_is():
    labels, domains = torch.arange(60) % 5, torch.arange(60) // 30
    store = ImageStore(torch.zeros(60, 8, 8, dtype=torch.uint8), labels, name="d", domains=domains)
    small = sample(store, train=4, test=0)
    found = {*zip(small.domains.tolist(), small.labels.tolist(), strict=True)}
    assert found == {(d, c) for d in (0, 1) for c in range(5)}
    assert len(sample(store, train=10**6, test=10**6)) == 60


def test_fashion_has_the_promised_images():
    data = load_source("fashion", Path())
    assert (data.shape, data.num_classes, len(data.classes), data.name) == ((1, 28, 28), 8, 8, "fashion")
    assert torch.bincount(data.labels[~data.test]).tolist() == [750] * 8
    assert torch.bincount(data.labels[data.test]).tolist() == [200] * 8
    assert not {"Sandal", "Bag"} & set(data.classes)
    assert len(torch.unique(data.images.reshape(len(data), -1), dim=0)) > 7590  # no image was taken twice


def test_out_sources_are_what_they_say():
    near, far = load_source("fashion_out", Path()), load_source("digits", Path())
    assert (near.classes, torch.bincount(near.labels).tolist()) == (("Sandal", "Bag"), [200, 200])
    assert (len(far), far.shape, far.num_classes) == (1797, (1, 28, 28), 10)
    assert far.images.max() > 240
    corners = far.images[:, [0, 0, -1, -1], [0, -1, 0, -1]].float()
    assert corners.mean() < 10  # black background, as in Fashion-MNIST
    roles = {name: source.role for name, source in SOURCES.items()}
    assert (roles["fashion"], roles["fashion_out"], roles["digits"]) == ("in", "out", "out")


def test_embedded_files_are_small_plain_licensed_and_as_the_readme_says():
    readme = (EMBEDDED / "README.md").read_text(encoding="utf-8")
    for name in ("fashion.npz", "digits.npz"):
        assert hashlib.sha256((EMBEDDED / name).read_bytes()).hexdigest() in readme
        with np.load(EMBEDDED / name, allow_pickle=False) as archive:
            assert all(archive[key].dtype != object for key in archive.files)
        with zipfile.ZipFile(EMBEDDED / name) as archive:
            assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    assert "Zalando" in (EMBEDDED / "LICENSE-fashion-mnist").read_text(encoding="utf-8")
    assert "Alpaydin" in (EMBEDDED / "LICENSE-digits").read_text(encoding="utf-8")
    assert sum(path.stat().st_size for path in EMBEDDED.iterdir()) < 5_000_000


def test_a_users_function_is_a_source(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import numpy as np\nfrom foogd.data import ImageStore\n"
        "def mine(root): return ImageStore(np.zeros((2, 4, 4), dtype=np.uint8), [0, 1], name=str(root))\n"
        "def wrong(root): return 3\nnumber = 4\n"
    )
    assert load_source(f"{tmp_path}/mine.py:mine", Path("somewhere")).name == "somewhere"
    with pytest.raises(InputError, match="int"):
        load_source(f"{tmp_path}/mine.py:wrong", Path())
    with pytest.raises(InputError, match="function"):
        load_source(f"{tmp_path}/mine.py:number", Path())
    with pytest.raises(InputError, match="fashion, fashion_out, digits"):
        load_source("cifar11", Path())
