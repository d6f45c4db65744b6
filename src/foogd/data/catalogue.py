"""The catalogue: every data set that foogd knows by name, with its address, checksums and the facts it must show."""

from __future__ import annotations

from . import cifar, folders, readers
from .layouts import (
    Entry,
    Facts,
    Layout,
    Remote,
    array_files,
    cifar_packs,
    dtd,
    files_named,
    flat,
    folder_with,
    pack,
    tree,
)

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
                    folder_with(*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"),
                    cifar.read_cifar_python,
                    "cifar10",
                    _CIFAR10,
                    decodes=False,
                ),
                Layout(
                    "binary release",
                    folder_with(*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
                    cifar.read_cifar_binary,
                    "cifar10",
                    _CIFAR10,
                    decodes=False,
                ),
                Layout(
                    "pack",
                    files_named("cifar10_train_a.npz", "cifar10_train_b.npz", "cifar10_test.npz"),
                    cifar_packs,
                    "cifar10",
                    _CIFAR10,
                    classes=readers.CIFAR10_CLASSES,
                ),
                array_files("cifar10", _CIFAR10),
                tree("cifar10", _TREE10),
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
                    folder_with("train", "test", "meta", every=True),
                    cifar.read_cifar_python,
                    "cifar100",
                    _CIFAR100,
                    decodes=False,
                ),
                Layout(
                    "binary release",
                    folder_with("train.bin", "test.bin"),
                    cifar.read_cifar_binary,
                    "cifar100",
                    _CIFAR100,
                    decodes=False,
                ),
                array_files("cifar100", _CIFAR100),
                tree("cifar100", _TREE100),
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
                    folder_with("train", "val", "wnids.txt", every=True),
                    folders.read_tinyimagenet,
                    "tinyimagenet",
                    _TINY,
                ),
                Layout(
                    "official folders",
                    folder_with("train", "val", every=True),
                    folders.read_tinyimagenet,
                    "tinyimagenet",
                    _TINY,
                    anywhere=False,
                ),
                array_files("tinyimagenet", _TINY),
                tree("tinyimagenet", _TINY),
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
                    folder_with(*folders.PACS_DOMAINS, every=True),
                    folders.read_pacs,
                    "pacs",
                    _PACS,
                ),
                pack(
                    "pacs",
                    "pacs64.npz",
                    Facts(9_991, None, 7, None, None, _PACS.domains, 64),
                    folders.PACS_CLASSES,
                    folders.PACS_DOMAINS,
                ),
                array_files("pacs", _PACS),
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
                    files_named("test_32x32.mat"),
                    cifar.read_svhn,
                    "svhn",
                    Facts(26_032, None, 10, _SVHN_TEST, px=32),
                    decodes=False,
                ),
                pack("svhn", "out_svhn.npz", Facts(5_000, px=32)),
                array_files("svhn"),
                tree("svhn", Facts(px=32)),
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
                    folder_with("images/banded", "banded"),
                    dtd,
                    "textures",
                    Facts(5_640, None, 47, 120),
                ),
                pack("Textures (10 classes)", "out_textures.npz", Facts(1_200, px=32)),
                array_files("textures"),
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
                pack("isun", "out_isun.npz", Facts(5_000, px=32)),
                array_files("isun"),
                flat("isun", Facts(8_925, px=32)),
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
                pack("LSUN-like crop", "out_lsunlike_crop.npz", Facts(5_000, px=32)),
                array_files("lsun_c"),
                flat("lsun_c", Facts(10_000)),
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
                pack("LSUN-like resize", "out_lsunlike_resize.npz", Facts(5_000, px=32)),
                array_files("lsun_r"),
                flat("lsun_r", Facts(10_000, px=32)),
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
                    folder_with("labels.npy"),
                    cifar.read_cifar_c,
                    "cifar10-c",
                    Facts(50_000, None, 10, 5_000, px=32, corruptions=19),
                    decodes=False,
                    anywhere=False,
                ),
            ),
            (Remote("https://zenodo.org/record/2535967/files/CIFAR-10-C.tar", "56bf5dcef84df0e2308c6dcbcbbd8499"),),
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
                    folder_with("labels.npy"),
                    cifar.read_cifar_c,
                    "cifar100-c",
                    Facts(50_000, None, 100, 500, px=32, corruptions=19),
                    decodes=False,
                    anywhere=False,
                ),
            ),
            (Remote("https://zenodo.org/record/3555552/files/CIFAR-100-C.tar", "11f0ed0f1191edbf9fa23466ae6021d3"),),
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
                    folder_with("brightness/1", "fog/1", "contrast/1"),
                    folders.read_tinyimagenet_c,
                    "tinyimagenet-c",
                    Facts(50_000, None, 200, 250, px=64, corruptions=15),
                    anywhere=False,
                ),
            ),
            where="the page of the authors of ImageNet-C (Hendrycks and Dietterich 2019)",
        ),
    )
}
