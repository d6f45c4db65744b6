"""ImageStore: uint8 images and labels, resident on one device, read from and written to one .npz file."""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor

from ..core.errors import InputError
from ..core.random import generator

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, UInt8

_CHUNK = 2**23  # values that statistics widen at a time, so that memory stays small


@final
@dataclass(frozen=True, eq=False)
class ImageStore:
    """Images with labels; `domains` numbers where each image comes from, `test` marks the held-out ones.

    `domain_names` names the domains: styles, hospitals, cameras. `skipped` counts images of the source that could not
    be read and are not here. `note` is a sentence for people, where what was read may not be what they meant.

    Every array may also be given as numpy, and grey images as N×H×W.
    """

    images: UInt8[Tensor, "n h w c"] = field(repr=False)
    labels: Int[Tensor, " n"] = field(repr=False)
    classes: tuple[str, ...] = ()
    name: str = ""
    domains: Int[Tensor, " n"] | None = field(default=None, repr=False)
    test: Bool[Tensor, " n"] | None = field(default=None, repr=False)
    domain_names: tuple[str, ...] = ()
    skipped: int = 0
    note: str = ""

    def __post_init__(self) -> None:
        images = _tensor(self.images, "images")
        if images.dtype != torch.uint8:
            raise InputError(f"images have type {images.dtype}; an ImageStore takes uint8 from 0 to 255.")
        if images.ndim == 3:
            images = images[..., None]
        if images.ndim != 4:
            raise InputError(f"images have shape {tuple(images.shape)}; an ImageStore takes N×H×W×C or N×H×W.")
        if images.numel() == 0:
            raise InputError(f"images have shape {tuple(images.shape)}; an ImageStore needs at least one image.")
        if images.shape[-1] == 1:
            # The stride of one channel may be anything, and kernels read it: bits must not depend on a store's history.
            images = images[..., 0].unsqueeze(-1)
        labels = _numbers(self.labels, "labels", len(images))
        classes = tuple(str(name) for name in self.classes)
        if classes and int(labels.max()) >= len(classes):
            raise InputError(f"labels go up to {int(labels.max())}, but only {len(classes)} classes are named.")
        domains = None if self.domains is None else _numbers(self.domains, "domains", len(images))
        if self.domain_names and (domains is None or int(domains.max()) >= len(self.domain_names)):
            found = "none" if domains is None else f"up to {int(domains.max())}"
            raise InputError(f"{len(self.domain_names)} domains are named, but the images have {found}.")
        test = None if self.test is None else _tensor(self.test, "test")
        if test is not None and (test.dtype != torch.bool or test.shape != (len(images),)):
            raise InputError(
                f"test has type {test.dtype} and shape {tuple(test.shape)}; it takes {len(images)} bools, one an image."
            )
        device = images.device
        for key, value in (("images", images), ("classes", classes), ("labels", labels.to(device))):
            object.__setattr__(self, key, value)
        object.__setattr__(self, "domains", None if domains is None else domains.to(device))
        object.__setattr__(self, "test", None if test is None else test.to(device))

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one image."""
        _, h, w, c = self.images.shape
        return c, h, w

    @property
    def num_classes(self) -> int:
        """The number of named classes, or the largest label plus one."""
        return len(self.classes) or int(self.labels.max()) + 1

    def to(self, device: torch.device | str) -> ImageStore:
        """The same store on another device."""
        return replace(self, images=self.images.to(device))

    def select(self, which: Int[Tensor, " m"] | Bool[Tensor, " n"]) -> ImageStore:
        """The images at these indices, or where this mask is true; the number of classes stays."""
        which = _tensor(which, "the selection").to(self.images.device)
        if which.dtype == torch.bool and which.shape != (len(self),):
            raise InputError(f"the mask has shape {tuple(which.shape)}; {len(self)} bools, one an image, are needed.")
        return replace(
            self,
            images=self.images[which],
            labels=self.labels[which],
            classes=self.classes or tuple(str(label) for label in range(self.num_classes)),
            domains=None if self.domains is None else self.domains[which],
            test=None if self.test is None else self.test[which],
        )

    def batch(self, indices: Int[Tensor, " b"]) -> Float[Tensor, "b c h w"]:
        """These images as floats in [0, 1], on the store's device."""
        chosen = self.images[indices.to(self.images.device)]
        return chosen.permute(0, 3, 1, 2).contiguous().float() / 255

    def channel_moments(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel over all images in [0, 1], the same on every device."""
        return moments(*self.channel_sums())

    def channel_sums(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Sum and sum of squares of each channel's values from 0 to 255, and how many values a channel has."""
        channels = self.shape[0]
        first, second = torch.zeros(2, channels, dtype=torch.int64, device=self.images.device)
        for chunk in torch.split(self.images, max(1, _CHUNK // self.images[0].numel())):
            values = chunk.reshape(-1, channels).long()
            first, second = first + values.sum(0), second + (values * values).sum(0)  # integers: no rounding
        return tuple(first.tolist()), tuple(second.tolist()), self.images.numel() // channels

    def content_hash(self) -> str:
        """SHA-256 of shape, images and labels, as hex digits."""
        digest = hashlib.sha256(str(tuple(self.images.shape)).encode())
        digest.update(np.ascontiguousarray(self.images.cpu().numpy()).data)
        digest.update(np.ascontiguousarray(self.labels.cpu().numpy().astype("<i8")).data)
        return digest.hexdigest()

    def save(self, path: Path | str) -> None:
        """Writes a compressed .npz under this very name, in one step: an older file stays until it is whole."""
        path = Path(path)
        arrays: dict[str, Any] = {
            "images": self.images.cpu().numpy(),
            "labels": self.labels.cpu().numpy(),
            "classes": np.array(self.classes, dtype=np.str_),
            "name": np.array(self.name, dtype=np.str_),
            "domain_names": np.array(self.domain_names, dtype=np.str_),
        }
        for key, value in (("domains", self.domains), ("test", self.test)):
            if value is not None:
                arrays[key] = value.cpu().numpy()
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            partial = Path(file.name)
            try:
                np.savez_compressed(file, **arrays)
            except BaseException:
                partial.unlink()
                raise
        partial.chmod(0o644)  # a temporary file starts private
        partial.replace(path)

    @staticmethod
    def load(path: Path | str) -> ImageStore:
        """The store in an .npz with the arrays `images` and `labels`, perhaps `classes`, `name`, `domains`, `test`."""
        arrays = _read_npz(Path(path))
        missing = [key for key in ("images", "labels") if key not in arrays]
        if missing:
            held = ", ".join(sorted(arrays)) or "nothing"
            raise InputError(f"{path} lacks the array {' and '.join(missing)}; it holds {held}.")
        return ImageStore(
            arrays["images"],
            arrays["labels"],
            classes=tuple(arrays["classes"].tolist()) if "classes" in arrays else (),
            name=str(arrays["name"]) if "name" in arrays else Path(path).stem,
            domains=arrays.get("domains"),
            test=arrays.get("test"),
            domain_names=tuple(arrays["domain_names"].tolist()) if "domain_names" in arrays else (),
        )


def sample(store: ImageStore, *, train: int, test: int) -> ImageStore:
    """About so many images of a store, the same share of each class and domain and at least one, drawn with seed 0."""
    groups = store.labels.cpu().clone()
    if store.domains is not None:
        groups += store.num_classes * store.domains.cpu()
    held = torch.zeros(len(store), dtype=torch.bool) if store.test is None else store.test.cpu()
    order = torch.randperm(len(store), generator=generator(0, "sample", store.name))
    chosen = []
    for part, wanted in ((~held, train), (held, test)):
        own = order[part[order]]
        for group in torch.unique(groups[own]).tolist():
            members = own[groups[own] == group]
            chosen.append(members[: max(1, round(wanted * len(members) / max(1, len(own))))])
    picked = torch.cat(chosen).sort().values
    return replace(store.select(picked), name=f"{store.name} (sample of {len(picked)})")


def moments(first: Sequence[int], second: Sequence[int], count: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation in [0, 1] from whole sums, which several stores may add up."""
    mean = [total / count for total in first]
    std = [max(total / count - m * m, 0.0) ** 0.5 for total, m in zip(second, mean, strict=True)]
    return tuple(m / 255 for m in mean), tuple(s / 255 for s in std)


def _read_npz(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise InputError(f"{path} is not a file; an .npz with images and labels is needed.")
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}
    except (OSError, ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"{path} cannot be read as an .npz of plain arrays ({said_by_numpy(error)}).") from error


def one_line(error: Exception) -> str:
    """What an exception says, in one short line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else f"{text[:160]}…"


def said_by_numpy(error: Exception) -> str:
    """The same, without numpy's advice to load a pickle, which nobody should follow."""
    return "it is damaged, or another kind of file" if "pickle" in str(error) else one_line(error)


def _tensor(values: Any, what: str) -> Tensor:
    if isinstance(values, Tensor):
        return values
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{what} cannot be made a tensor ({type(values).__name__}: {error}).") from error


def _numbers(values: Any, what: str, count: int) -> Tensor:
    if isinstance(values, np.ndarray) and values.dtype.kind not in "biufc":
        raise InputError(f"{what} have type {values.dtype}; whole numbers are needed.")
    numbers = _tensor(values, what)
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise InputError(f"{what} have type {numbers.dtype}; whole numbers are needed.")
    if numbers.shape != (count,):
        raise InputError(f"{what} have shape {tuple(numbers.shape)}; {count} numbers, one an image, are needed.")
    numbers = numbers.long()
    if int(numbers.min()) < 0:
        raise InputError(f"{what} go down to {int(numbers.min())}; they must be 0 or more.")
    return numbers
