"""Builds the images inside the package, src/foogd/data/embedded, from Fashion-MNIST and scikit-learn's digits.

python tools/build_embedded.py /usr/share/datasets/fashion-mnist

The folder is that of Debian's package dataset-fashion-mnist: the four original files of Fashion-MNIST.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from foogd.data.store import ImageStore

SEED = 2024
TRAIN_PER_CLASS = 750
TEST_PER_CLASS = 200
NAMES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
OUT = ("Sandal", "Bag")
TARGET = Path(__file__).resolve().parent.parent / "src" / "foogd" / "data" / "embedded"
LIMIT = 5_000_000  # bytes in all

MIT = """\
The MIT License (MIT)

Copyright © 2017 Zalando SE, https://tech.zalando.com

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the “Software”), to deal in the Software without restriction, including without limitation the
rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
persons to whom the Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED “AS IS”, WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""

CC_BY = """\
digits.npz is adapted from "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (1998),
UCI Machine Learning Repository, https://doi.org/10.24432/C50P49.

It holds the test part of that data set, as scikit-learn ships it (sklearn.datasets.load_digits).
Changes: the grey levels 0 to 16 were scaled to 0 to 255 and rounded.

Licensed under the Creative Commons Attribution 4.0 International licence (CC BY 4.0):
https://creativecommons.org/licenses/by/4.0/
"""

README = """\
# Images inside the package

| file | images | SHA-256 |
|---|---|---|
| fashion.npz | {fashion} of Fashion-MNIST, 28×28 grey | `{fashion_sha}` |
| digits.npz | {digits} handwritten digits, 8×8 grey | `{digits_sha}` |

`fashion.npz`: of each of the eight IN classes ({inside}), {train} images drawn from the training file; of each of the
ten classes, {test} images drawn from the test file (`test` is true for these). Labels 0 to 7 are the IN classes in
that order; 8 and 9 are {outside}, the near OUT. Drawn without replacement by `numpy.random.default_rng({seed})`, then
kept in the order of the files.
Source: the four original files, from Debian's package dataset-fashion-mnist. Licence: MIT, see LICENSE-fashion-mnist.

`digits.npz`: all images of `sklearn.datasets.load_digits`, levels 0 to 16 scaled to 0 to 255.
Licence: CC BY 4.0, see LICENSE-digits.

Both are plain arrays (no pickle), built by

    python tools/build_embedded.py /usr/share/datasets/fashion-mnist

which gives the same arrays everywhere, and the same bytes with the same version of zlib.
"""


def read_idx(path: Path) -> np.ndarray:
    """The array in a gzipped IDX file of bytes."""
    data = gzip.decompress(path.read_bytes())
    if data[:3] != b"\x00\x00\x08":
        raise SystemExit(f"{path} is not an IDX file of bytes")
    shape = np.frombuffer(data, dtype=">u4", count=data[3], offset=4)
    return np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * data[3]).reshape(tuple(int(n) for n in shape))


def draw(rng: np.random.Generator, labels: np.ndarray, names: tuple[str, ...], count: int) -> np.ndarray:
    """Indices of `count` images of each named class, in file order."""
    own = [rng.choice(np.flatnonzero(labels == NAMES.index(name)), count, replace=False) for name in names]
    return np.sort(np.concatenate(own))


def fashion(folder: Path) -> ImageStore:
    """Training images of the IN classes, then test images of all."""
    images, labels = (read_idx(folder / f"train-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
    test_images, test_labels = (read_idx(folder / f"t10k-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
    inside = tuple(name for name in NAMES if name not in OUT)
    classes = inside + OUT
    rng = np.random.default_rng(SEED)
    train = draw(rng, labels, inside, TRAIN_PER_CLASS)
    test = draw(rng, test_labels, classes, TEST_PER_CLASS)
    number = np.array([classes.index(name) for name in NAMES])
    return ImageStore(
        np.concatenate([images[train], test_images[test]]),
        number[np.concatenate([labels[train], test_labels[test]])],
        classes=classes,
        name="fashion",
        test=np.arange(len(train) + len(test)) >= len(train),
    )


def digits() -> ImageStore:
    """All of scikit-learn's digits."""
    bunch = load_digits()
    images = np.round(bunch.images * 255 / 16).astype(np.uint8)
    return ImageStore(images, bunch.target, classes=tuple("0123456789"), name="digits")


def main() -> None:
    """Writes the two archives, their licences and the README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fashion", type=Path, help="folder with the four files of Fashion-MNIST")
    parser.add_argument("--target", type=Path, default=TARGET, help="folder to write to")
    arguments = parser.parse_args()
    target: Path = arguments.target
    stores = {"fashion": fashion(arguments.fashion), "digits": digits()}
    sums = {}
    for name, store in stores.items():
        path = target / f"{name}.npz"
        store.save(path)
        sums[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"{path.name}: {len(store)} images, {path.stat().st_size:,} bytes, sha256 {sums[name]}")
    (target / "LICENSE-fashion-mnist").write_text(MIT, encoding="utf-8")
    (target / "LICENSE-digits").write_text(CC_BY, encoding="utf-8")
    text = README.format(
        fashion=f"{len(stores['fashion']):,}",
        digits=f"{len(stores['digits']):,}",
        fashion_sha=sums["fashion"],
        digits_sha=sums["digits"],
        inside=", ".join(name for name in NAMES if name not in OUT),
        outside=" and ".join(OUT),
        train=TRAIN_PER_CLASS,
        test=TEST_PER_CLASS,
        seed=SEED,
    )
    (target / "README.md").write_text(text, encoding="utf-8")
    total = sum(file.stat().st_size for file in target.iterdir())
    if total > LIMIT:
        raise SystemExit(f"the files have {total:,} bytes, more than {LIMIT:,}")


if __name__ == "__main__":
    main()
