"""The catalogue: every data set that foogd knows by name, with its address, checksums and the facts it must show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from . import readers
from .store import ImageStore

Role = Literal["in", "in-c", "out"]
_DEPTH = 2  # archives are unpacked into folders of their own, sometimes into two


@final
@dataclass(frozen=True)
class Remote:
    """A file at its official address; `md5` is None where no published checksum is known."""

    address: str
    md5: str | None = None
    needed: bool = True  # else only `get --all` downloads it

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.address.partition("?")[0].rpartition("/")[2]


@final
@dataclass(frozen=True)
class Facts:
    """What a whole data set must show; None is not checked, and one number for classes holds for each of them.

    A set without a test part counts as training; of an IN-C set, the facts are those of one corruption.
    """

    train: int | None = None
    test: int | None = None
    classes: int | None = None
    train_classes: int | tuple[int, ...] | None = None
    test_classes: int | None = None
    domains: tuple[int, ...] | None = None
    px: int | None = None
    first_label: int | None = None
    corruptions: int | None = None


@final
@dataclass(frozen=True)
class Layout:
    """One form in which a data set may lie in a folder: how it is found there and how it is read."""

    kind: str
    find: Callable[[Path], tuple[Path, ...]]  # the files or folders that it is made of; () where it is not there
    read: Callable[..., ImageStore]  # (*found, [corruption, severity,] and, where images are decoded, size, on_bad, …)
    name: str  # the name under which results report it
    facts: Facts
    decodes: bool = True  # else it holds pixels
    anywhere: bool = True  # its file names are its own: it is also found right in the root folder
    classes: tuple[str, ...] = ()  # the names of classes and domains where the files do not say them
    domain_names: tuple[str, ...] = ()


@final
@dataclass(frozen=True)
class Entry:
    """A data set: what it is for, what it holds, under which terms, and where it comes from."""

    name: str
    role: Role
    images: str
    px: int
    licence: str
    description: str
    layouts: tuple[Layout, ...] = ()  # () is inside the package
    files: tuple[Remote, ...] = ()
    where: str = ""  # where to look when there is no stable address
    flip: bool = True  # whether a mirrored image still shows its class

    @property
    def embedded(self) -> bool:
        """Whether the images lie inside the package."""
        return not self.layouts


def locate(entry: Entry, root: Path) -> tuple[Layout, tuple[Path, ...]] | None:
    """The first form of the data set below ROOT/NAME, or right in ROOT where the file names are its own."""
    for layout in entry.layouts:
        found = layout.find(root / entry.name)
        if found:
            return layout, found
    for layout in entry.layouts:
        found = layout.find(root) if layout.anywhere else ()
        if found:
            return layout, found
    return None


# Finders


def _folder_with(*names: str, every: bool = False) -> Callable[[Path], tuple[Path, ...]]:
    """The nearest folder that holds one of these names, or every one of them."""
    need = all if every else any

    def find(base: Path) -> tuple[Path, ...]:
        level = [base]
        for _ in range(_DEPTH + 1):
            for folder in level:
                if need((folder / name).exists() for name in names):
                    return (folder,)
            level = [path for folder in level for path in _inside(folder)]
        return ()

    return find


def _inside(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))[:1000]
    except OSError:
        return []


def _files(*names: str) -> Callable[[Path], tuple[Path, ...]]:
    """All of these files where one of them is there, so that the reader can name what is missing."""

    def find(base: Path) -> tuple[Path, ...]:
        for folder in (base, *_inside(base)):
            if any((folder / name).is_file() for name in names):
                return tuple(folder / name for name in names)
        return ()

    return find


def _any_images(base: Path) -> tuple[Path, ...]:
    level = [base]
    for _ in range(_DEPTH + 2):
        if any(path.suffix.lower() in readers.IMAGE_SUFFIXES for folder in level[:3] for path in _peek(folder)):
            return (base,)
        level = [path for folder in level[:3] for path in _inside(folder)]
    return ()


def _peek(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _tree_root(base: Path) -> tuple[Path, ...]:
    """The folder of the classes: archives often wrap it in one more folder."""
    if not _any_images(base):
        return ()
    for _ in range(_DEPTH):
        inside = _inside(base)
        if len(inside) != 1 or not _inside(inside[0]):
            break
        base = inside[0]
    return (base,)


# Layouts


def _pack(
    name: str, file: str, facts: Facts, classes: tuple[str, ...] = (), domain_names: tuple[str, ...] = ()
) -> Layout:
    return Layout(
        "pack",
        _files(file),
        lambda path, **options: readers.read_packs([path], **options),
        name,
        facts,
        classes=classes,
        domain_names=domain_names,
    )


def _cifar_packs(train_a: Path, train_b: Path, test: Path, **options: Any) -> ImageStore:
    return readers.read_packs([train_a, train_b], [test], **options)


def _dtd(folder: Path, *, size: int | None = None, **options: Any) -> ImageStore:
    images = folder / "images" if (folder / "images").is_dir() else folder
    return readers.read_tree(images, size=size or 32, **options)  # its images have many sizes


def _tree(name: str, facts: Facts) -> Layout:
    return Layout("folders", _tree_root, readers.read_tree, name, facts, anywhere=False)


def _flat(name: str, facts: Facts) -> Layout:
    return Layout("folder of images", _any_images, readers.read_flat, name, facts, anywhere=False)


def _arrays(name: str, facts: Facts | None = None) -> Layout:
    return Layout("arrays", _files(f"{name}.npz"), readers.read_npz, name, facts or Facts())


_CIFAR10 = Facts(50_000, 10_000, 10, 5_000, 1_000, px=32, first_label=6)
_CIFAR100 = Facts(50_000, 10_000, 100, 500, 100, px=32, first_label=19)
_TREE10, _TREE100 = Facts(50_000, 10_000, 10, 5_000, 1_000, px=32), Facts(50_000, 10_000, 100, 500, 100, px=32)
_TINY = Facts(100_000, 10_000, 200, 500, 50, px=64)
_PACS = Facts(train=9_991, classes=7, domains=(2_048, 2_344, 1_670, 3_929))
_SVHN_TEST = (1_744, 5_099, 4_149, 2_882, 2_523, 2_384, 1_977, 2_019, 1_660, 1_595)

_DROPBOX = "https://www.dropbox.com/s"  # ?dl=1, or the answer is a page about the file

CATALOGUE: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            "fashion",
            "in",
            "7,600",
            28,
            "MIT",
            "8 classes of Fashion-MNIST, 28×28 grey: 6,000 training and 1,600 test images, inside the package.",
        ),
        Entry(
            "fashion_out",
            "out",
            "400",
            28,
            "MIT",
            "400 test images of Sandal and Bag, the two classes of Fashion-MNIST that `fashion` leaves out (near OUT).",
        ),
        Entry(
            "digits",
            "out",
            "1,797",
            28,
            "CC BY 4.0",
            "1,797 handwritten digits, 8×8 grey enlarged to 28×28 (far OUT).",
            flip=False,
        ),
        Entry(
            "cifar10",
            "in",
            "50,000 + 10,000",
            32,
            "none stated",
            "CIFAR-10: 10 classes of photographs.",
            (
                Layout(
                    "python release",
                    _folder_with(*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"),
                    readers.read_cifar_python,
                    "cifar10",
                    _CIFAR10,
                    decodes=False,
                ),
                Layout(
                    "binary release",
                    _folder_with(*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
                    readers.read_cifar_binary,
                    "cifar10",
                    _CIFAR10,
                    decodes=False,
                ),
                Layout(
                    "pack",
                    _files("cifar10_train_a.npz", "cifar10_train_b.npz", "cifar10_test.npz"),
                    _cifar_packs,
                    "cifar10",
                    _CIFAR10,
                    classes=readers.CIFAR10_CLASSES,
                ),
                _arrays("cifar10", _CIFAR10),
                _tree("cifar10", _TREE10),
            ),
            (Remote("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),),
        ),
        Entry(
            "cifar100",
            "in",
            "50,000 + 10,000",
            32,
            "none stated",
            "CIFAR-100: 100 classes of photographs.",
            (
                Layout(
                    "python release",
                    _folder_with("train", "test", "meta", every=True),
                    readers.read_cifar_python,
                    "cifar100",
                    _CIFAR100,
                    decodes=False,
                ),
                Layout(
                    "binary release",
                    _folder_with("train.bin", "test.bin"),
                    readers.read_cifar_binary,
                    "cifar100",
                    _CIFAR100,
                    decodes=False,
                ),
                _arrays("cifar100", _CIFAR100),
                _tree("cifar100", _TREE100),
            ),
            (Remote("https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),),
        ),
        Entry(
            "tinyimagenet",
            "in",
            "100,000 + 10,000",
            64,
            "ImageNet terms: research only",
            "TinyImageNet: 200 classes of photographs; the validation part is the test.",
            (
                Layout(
                    "official folders",
                    _folder_with("train", "val", "wnids.txt", every=True),
                    readers.read_tinyimagenet,
                    "tinyimagenet",
                    _TINY,
                ),
                Layout(
                    "official folders",
                    _folder_with("train", "val", every=True),
                    readers.read_tinyimagenet,
                    "tinyimagenet",
                    _TINY,
                    anywhere=False,
                ),
                _arrays("tinyimagenet", _TINY),
                _tree("tinyimagenet", _TINY),
            ),
            (Remote("http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"),),
        ),
        Entry(
            "pacs",
            "in",
            "9,991",
            227,
            "none stated",
            "PACS: 7 classes in the domains art_painting, cartoon, photo and sketch.",
            (
                Layout(
                    "official folders",
                    _folder_with(*readers.PACS_DOMAINS, every=True),
                    readers.read_pacs,
                    "pacs",
                    _PACS,
                ),
                _pack(
                    "pacs",
                    "pacs64.npz",
                    Facts(9_991, None, 7, None, None, _PACS.domains, 64),
                    readers.PACS_CLASSES,
                    readers.PACS_DOMAINS,
                ),
                _arrays("pacs", _PACS),
            ),
            where="the page of the authors of PACS (Li et al. 2017), or the copies of domain generalisation suites",
        ),
        Entry(
            "svhn",
            "out",
            "26,032",
            32,
            "non-commercial use only",
            "SVHN: cropped house numbers, the test part.",
            (
                Layout(
                    "MATLAB file",
                    _files("test_32x32.mat"),
                    readers.read_svhn,
                    "svhn",
                    Facts(26_032, None, 10, _SVHN_TEST, px=32),
                    decodes=False,
                ),
                _pack("svhn", "out_svhn.npz", Facts(5_000, px=32)),
                _arrays("svhn"),
                _tree("svhn", Facts(px=32)),
            ),
            (
                Remote("http://ufldl.stanford.edu/housenumbers/test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
                Remote(
                    "http://ufldl.stanford.edu/housenumbers/train_32x32.mat",
                    "e26dedcc434d2e4c54c9b2d4a06d8373",
                    needed=False,
                ),
            ),
            flip=False,
        ),
        Entry(
            "textures",
            "out",
            "5,640",
            32,
            "research only",
            "Describable Textures (DTD), 47 classes; shorter side to 32 pixels or the size asked for, then the centre.",
            (
                Layout(
                    "official folders",
                    _folder_with("images/banded", "banded"),
                    _dtd,
                    "textures",
                    Facts(5_640, None, 47, 120),
                ),
                _pack("Textures (10 classes)", "out_textures.npz", Facts(1_200, px=32)),
                _arrays("textures"),
            ),
            (
                Remote(
                    "https://www.robots.ox.ac.uk/~vgg/data/dtd/download/dtd-r1.0.1.tar.gz",
                    "fff73e5086ae6bdbea199a49dfb8a4c1",
                ),
            ),
        ),
        Entry(
            "isun",
            "out",
            "8,925",
            32,
            "none stated",
            "iSUN: scene photographs made 32×32.",
            (
                _pack("isun", "out_isun.npz", Facts(5_000, px=32)),
                _arrays("isun"),
                _flat("isun", Facts(8_925, px=32)),
            ),
            (Remote(f"{_DROPBOX}/ssz7qxfqae0cca5/iSUN.tar.gz?dl=1"),),  # the md5 begins with be77b0f2
        ),
        Entry(
            "lsun_c",
            "out",
            "10,000",
            32,
            "none stated",
            "LSUN-C: scene photographs, cropped.",
            (
                _pack("LSUN-like crop", "out_lsunlike_crop.npz", Facts(5_000, px=32)),
                _arrays("lsun_c"),
                _flat("lsun_c", Facts(10_000)),
            ),
            (Remote(f"{_DROPBOX}/fhtsw1m3qxlwj6h/LSUN.tar.gz?dl=1", "458a0a0ab8e5f1cb4516d7400568e460"),),
        ),
        Entry(
            "lsun_r",
            "out",
            "10,000",
            32,
            "none stated",
            "LSUN-R: scene photographs, resized.",
            (
                _pack("LSUN-like resize", "out_lsunlike_resize.npz", Facts(5_000, px=32)),
                _arrays("lsun_r"),
                _flat("lsun_r", Facts(10_000, px=32)),
            ),
            (Remote(f"{_DROPBOX}/moqh2wh8696c3yl/LSUN_resize.tar.gz?dl=1", "278b7b31c8cb7e804a1465a8ce03a2dc"),),
        ),
        Entry(
            "cifar10c",
            "in-c",
            "19 × 50,000",
            32,
            "CC BY 4.0",
            "CIFAR-10-C: the test images under 19 corruptions; cifar10c/fog/3 is one of them at one severity.",
            (
                Layout(
                    "arrays of corruptions",
                    _folder_with("labels.npy"),
                    readers.read_cifar_c,
                    "cifar10-c",
                    Facts(50_000, None, 10, 5_000, px=32, corruptions=19),
                    decodes=False,
                    anywhere=False,
                ),
            ),
            (
                Remote(
                    "https://zenodo.org/record/2535967/files/CIFAR-10-C.tar", "56bf5dcef84df0e2308c6dcbcbbd8499"
                ),
            ),
        ),
        Entry(
            "cifar100c",
            "in-c",
            "19 × 50,000",
            32,
            "CC BY 4.0",
            "CIFAR-100-C: the test images under 19 corruptions; cifar100c/fog/3 is one of them at one severity.",
            (
                Layout(
                    "arrays of corruptions",
                    _folder_with("labels.npy"),
                    readers.read_cifar_c,
                    "cifar100-c",
                    Facts(50_000, None, 100, 500, px=32, corruptions=19),
                    decodes=False,
                    anywhere=False,
                ),
            ),
            (
                Remote(
                    "https://zenodo.org/record/3555552/files/CIFAR-100-C.tar", "11f0ed0f1191edbf9fa23466ae6021d3"
                ),
            ),
        ),
        Entry(
            "tinyimagenetc",
            "in-c",
            "15 × 50,000",
            64,
            "not known here",
            "Tiny-ImageNet-C: the validation images under 15 corruptions; tinyimagenetc/fog/3 is one at one severity.",
            (
                Layout(
                    "official folders",
                    _folder_with("brightness/1", "fog/1", "contrast/1"),
                    readers.read_tinyimagenet_c,
                    "tinyimagenet-c",
                    Facts(50_000, None, 200, 250, px=64, corruptions=15),
                    anywhere=False,
                ),
            ),
            where="the page of the authors of ImageNet-C (Hendrycks and Dietterich 2019)",
        ),
    )
}
