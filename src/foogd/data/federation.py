"""Federation: the images of every client for training and for the tests IN, IN-C and OUT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.errors import InputError
from ..core.random import derive_seed, generator
from .corrupt import corrupt
from .partition import Partition, by_domain, dirichlet, follow, given_proportions, pathological
from .store import ImageStore

if TYPE_CHECKING:
    from jaxtyping import Float, Int

PARTITIONS = ("dirichlet", "pathological", "by_domain")
LEFT_OUT = "domain "  # then its name: what rows call the shift of a domain that no client trains on

_LUMINANCE = (0.299, 0.587, 0.114)  # ITU-R BT.601
_CHUNK = 2048  # images that are widened to floats at a time


@final
@dataclass(frozen=True, eq=False)
class TestSet:
    """One test set and which of its images each client sees."""

    __test__ = False  # not a test case, whatever pytest makes of the name

    name: str
    split: Literal["in", "in-c", "out"]
    store: ImageStore
    indices: tuple[Int[Tensor, " n"], ...] = field(repr=False)
    corruption: str | None = None
    severity: int | None = None
    unseen: bool = False  # from a domain that no client has: the generic model answers

    @property
    def key(self) -> str:
        """A name that no other test set of the federation has."""
        return self.name if self.corruption is None else f"{self.name}/{self.corruption}/{self.severity}"


@final
@dataclass(frozen=True, eq=False)
class Federation:
    """The training images with the indices of every client, the test sets, and the moments for normalisation."""

    name: str
    train: ImageStore
    train_indices: tuple[Int[Tensor, " n"], ...] = field(repr=False)
    tests: tuple[TestSet, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    calibration_indices: tuple[Int[Tensor, " n"], ...] = field(default=(), repr=False)  # set aside for thresholds
    client_names: tuple[str, ...] = ()  # where clients are sites with names
    skipped: Mapping[str, int] = field(default_factory=dict)  # of a source, images that could not be read

    @property
    def calibration_test(self) -> TestSet | None:
        """The training images that were set aside, as a test set; None where there are none."""
        if not any(len(own) for own in self.calibration_indices):
            return None
        return TestSet("calibration", "in", self.train, self.calibration_indices)

    @property
    def clients(self) -> int:
        """The number of clients, those without data included."""
        return len(self.train_indices)

    @property
    def num_classes(self) -> int:
        """The number of IN classes."""
        return self.train.num_classes

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one image."""
        return self.train.shape

    def class_counts(self, client: int) -> Float[Tensor, " classes"]:
        """How many training images of each class the client holds."""
        own = self.train_indices[client].to(self.train.labels.device)
        return torch.bincount(self.train.labels[own], minlength=self.num_classes).float()

    def describe(self) -> Int[Tensor, "clients classes"]:
        """The table of training images by client and class."""
        return torch.stack([self.class_counts(client).long().cpu() for client in range(self.clients)])

    @property
    def bytes(self) -> int:
        """The memory that all images take."""
        stores = {id(store.images): store.images.nbytes for store in (self.train, *(test.store for test in self.tests))}
        return sum(stores.values())

    def to(self, device: torch.device | str) -> Federation:
        """The same federation with all images and indices on another device."""

        def moved(indices: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(own.to(device) for own in indices)

        tests = tuple(replace(t, store=t.store.to(device), indices=moved(t.indices)) for t in self.tests)
        return replace(
            self,
            train=self.train.to(device),
            train_indices=moved(self.train_indices),
            tests=tests,
            calibration_indices=moved(self.calibration_indices),
        )

    @staticmethod
    def build(
        source: ImageStore,
        *,
        outs: Sequence[ImageStore] = (),
        corruptions: Sequence[str] = (),
        severities: Sequence[int] = (1, 2, 3, 4, 5),
        clients: int,
        partition: str = "dirichlet",
        alpha: float = 0.5,
        classes_per_client: int = 2,
        min_size: int = 1,
        seed: int,
        split_seed: int | None = None,
        proportions: str = "",
        constants: str = "cifar",
        test_share: float = 0.2,
        leave_out: str = "",
        calibration: float = 0.0,
    ) -> Federation:
        """A data set split over clients: training, IN and IN-C tests in the same proportions, OUT sets whole for all.

        The held-out images are those of `source.test`, or a share of each class. A client with no training images is
        possible with `min_size=0`. All images of the domain `leave_out` are kept from training and form one more IN-C
        set, which every client sees whole. A share `calibration` of each client's training images is set aside.
        All but noise in corruptions follows `split_seed`, or `seed`. `proportions`: see `given_proportions`.
        """
        split = seed if split_seed is None else split_seed
        found = torch.unique(source.labels).tolist()
        if len(found) < 2:
            names = [source.classes[label] if source.classes else str(label) for label in found]
            raise InputError(
                f"{source.name or 'the IN data'} has images of one class ({', '.join(names)}); at least two are "
                "needed, as FOLDER/CLASS/image or in a column label."
            )
        unseen: tuple[TestSet, ...] = ()
        if leave_out:
            source, left = _without_domain(source, leave_out)
            everything = torch.arange(len(left), device=left.images.device)
            shares = (everything,) * (clients or len(torch.unique(source.domains)))
            unseen = (TestSet(leave_out, "in-c", left, shares, corruption=f"{LEFT_OUT}{leave_out}", unseen=True),)
        held_out = source.test if source.test is not None else _stratified(_strata(source), test_share, split)
        if not held_out.any() or held_out.all():
            raise InputError(
                f"{int(held_out.sum())} of {len(source)} images are held out; training and test need some each."
            )
        train, test = replace(source.select(~held_out), test=None), replace(source.select(held_out), test=None)
        own, own_test = _partition(
            train, test, partition, clients, alpha, proportions, classes_per_client, min_size, split
        )
        kept, aside = _set_aside(own, calibration, split)
        mean, std = train.channel_moments()
        return Federation(
            name=source.name,
            train=train,
            train_indices=kept,
            calibration_indices=aside,
            tests=(
                *in_tests(
                    test, own_test, corruptions=corruptions, severities=severities, seed=seed, constants=constants
                ),
                *unseen,
                *out_tests(outs, source.shape, clients=len(own), taken=test.name or "in"),
            ),
            mean=mean,
            std=usable_deviation(std),
            client_names=_client_names(train) if partition == "by_domain" else (),
            skipped={store.name: store.skipped for store in (source, *outs) if store.skipped},
        )


def client_labels(names: Sequence[str], clients: int) -> list[str]:
    """What tables call the clients: their numbers, and where they are sites, the names too."""
    return [f"{client} {names[client]}" if names else str(client) for client in range(clients)]


def usable_deviation(std: Sequence[float]) -> tuple[float, ...]:
    """Standard deviations to divide by: a constant channel must not divide by 0."""
    return tuple(max(s, 1 / 255) for s in std)


def _set_aside(own: Sequence[Tensor], share: float, seed: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Each client's indices to train on and to set thresholds with; a client of one image keeps it for training."""
    if not 0 <= share < 1:
        raise InputError(f"calibration is {share}; a share of at least 0 and below 1 is needed.")
    if share == 0:
        return tuple(own), ()
    parts = [set_aside(indices, share, seed, client) for client, indices in enumerate(own)]
    return tuple(kept for kept, _ in parts), tuple(aside for _, aside in parts)


def set_aside(indices: Tensor, share: float, seed: int, client: int) -> tuple[Tensor, Tensor]:
    """One client's indices to train on and to set thresholds with."""
    n = len(indices)
    count = min(max(round(share * n), 1), n - 1) if n > 1 and share > 0 else 0
    order = torch.randperm(n, generator=generator(seed, "calibration", client)).to(indices.device)
    return indices[order[count:].sort().values], indices[order[:count].sort().values]


def in_tests(
    test: ImageStore,
    indices: Sequence[Tensor],
    *,
    corruptions: Sequence[str],
    severities: Sequence[int],
    seed: int,
    constants: str = "cifar",
) -> tuple[TestSet, ...]:
    """The clean IN test and one copy of it a corruption and severity.

    Each client sees the same images in every copy, so severity is not mixed up with the client.
    """
    shares = tuple(indices)
    name = test.name or "in"
    sets = [TestSet(name, "in", test, shares)]
    for corruption in corruptions:
        for severity in severities:
            images = corrupt(test.images, corruption, severity, seed, constants)
            store = replace(test, images=images, name=f"{name}-c")
            sets.append(TestSet(store.name, "in-c", store, shares, corruption, severity))
    return tuple(sets)


def out_tests(
    outs: Sequence[ImageStore], shape: tuple[int, int, int], *, clients: int, taken: str = ""
) -> tuple[TestSet, ...]:
    """OUT sets in the shape of the IN images; every client sees all of each. One whose name is `taken` gets another."""
    sets: list[TestSet] = []
    for number, out in enumerate(outs):
        name = out.name or f"out{number}"
        store = fit_to(replace(out, name=f"{name} (OUT)" if name == taken else name), shape)
        if store.name in {t.name for t in sets}:
            raise InputError(f"two OUT sets are called {store.name!r}; each needs a name of its own.")
        everything = torch.arange(len(store), device=store.images.device)
        sets.append(TestSet(store.name, "out", store, (everything,) * clients))
    return tuple(sets)


def fit_to(store: ImageStore, shape: tuple[int, int, int]) -> ImageStore:
    """The store with images of this shape: bilinear resize, grey repeated to colour, colour to grey by luminance."""
    if store.shape == shape:
        return store
    channels, height, width = shape
    if {store.shape[0], channels} - {1, 3} and store.shape[0] != channels:
        raise InputError(
            f"images of {store.shape[0]} channels cannot be made images of {channels}; 1 and 3 are possible."
        )
    parts = []
    for chunk in torch.split(store.images, _CHUNK):
        x = chunk.permute(0, 3, 1, 2).float()
        if channels == 1 and x.shape[1] == 3:
            x = (x * x.new_tensor(_LUMINANCE)[:, None, None]).sum(1, keepdim=True)
        if x.shape[-2:] != (height, width):
            x = F.interpolate(x, size=(height, width), mode="bilinear", antialias=True)
        x = x.round().clamp(0, 255).to(torch.uint8).expand(-1, channels, -1, -1)
        parts.append(x.permute(0, 2, 3, 1).contiguous())
    return replace(store, images=torch.cat(parts))


def _without_domain(source: ImageStore, name: str) -> tuple[ImageStore, ImageStore]:
    """The store without one of its domains, and that domain alone."""
    if source.domains is None:
        raise InputError(f"leave_out = {name!r} needs images with domains; {_has_no_domains(source)}")
    names = source.domain_names or tuple(str(number) for number in range(int(source.domains.max()) + 1))
    if name not in names:
        raise InputError(f"leave_out = {name!r} is not a domain of {source.name}; it has {', '.join(names)}.")
    left = source.domains == names.index(name)
    return source.select(~left), replace(source.select(left), test=None)


def _has_no_domains(store: ImageStore) -> str:
    return f"{store.name or 'this data set'} has none" + (f": {store.note}" if store.note else ".")


def _domain_name(store: ImageStore, domain: int) -> str:
    return store.domain_names[domain] if store.domain_names else str(domain)


def _client_names(train: ImageStore) -> tuple[str, ...]:
    """The domains' names in the order of `by_domain`; none where they have only numbers."""
    assert train.domains is not None
    return tuple(train.domain_names[d] for d in torch.unique(train.domains).tolist()) if train.domain_names else ()


def _strata(source: ImageStore) -> Tensor:
    """The groups of which a share each is held out: classes, and where there are domains, classes within domains."""
    if source.domains is None:
        return source.labels
    return source.domains * source.num_classes + source.labels


def _stratified(labels: Tensor, share: float, seed: int) -> Tensor:
    if not 0 < share < 1:
        raise InputError(f"test_share is {share}; a number between 0 and 1 is needed.")
    rng = np.random.default_rng(derive_seed(seed, "held-out"))
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    y = labels.cpu().numpy()
    for label in np.unique(y):
        own = rng.permutation(np.flatnonzero(y == label))
        # A class of two images or more is in both parts; a single image is for training.
        count = min(max(round(share * len(own)), 1), len(own) - 1)
        held_out[torch.from_numpy(own[:count])] = True
    return held_out.to(labels.device)


def _partition(
    train: ImageStore,
    test: ImageStore,
    kind: str,
    clients: int,
    alpha: float,
    proportions: str,
    classes_per_client: int,
    min_size: int,
    seed: int,
) -> tuple[Partition, Partition]:
    if proportions and kind != "dirichlet":
        raise InputError(f"proportions = {proportions!r} is for partition 'dirichlet'; partition is {kind!r}.")
    if kind == "dirichlet":
        given = given_proportions(proportions, clients=clients, classes=train.num_classes, alpha=alpha)
        own = dirichlet(train.labels, clients=clients, alpha=alpha, seed=seed, proportions=given, min_size=min_size)
    elif kind == "pathological":
        own = pathological(train.labels, clients=clients, classes_per_client=classes_per_client, seed=seed)
    elif kind == "by_domain":
        if train.domains is None or test.domains is None:
            raise InputError(f"partition 'by_domain' needs images with domains; {_has_no_domains(train)}")
        found, tested = torch.unique(train.domains).tolist(), torch.unique(test.domains).tolist()
        if found != tested:
            lacking = [f"{_domain_name(train, d)} has no test images" for d in found if d not in tested]
            lacking += [f"{_domain_name(train, d)} has no training images" for d in tested if d not in found]
            raise InputError(
                f"partition 'by_domain' needs training and test images of each domain: {', '.join(lacking)}."
            )
        if clients not in (0, len(found)):
            names = ", ".join(_domain_name(train, d) for d in found)
            raise InputError(
                f"partition 'by_domain' needs one client a domain; clients is {clients} (0 takes as many as there are) "
                f"and the domains are {names}."
            )
        own = by_domain(train.domains)
    else:
        raise InputError(f"unknown partition {kind!r}; known are {', '.join(PARTITIONS)}.")
    smallest = min(len(indices) for indices in own)
    if smallest < min_size:
        raise InputError(f"partition {kind!r} leaves a client with {smallest} training images; min_size is {min_size}.")
    if own.proportions is None:
        assert test.domains is not None
        return own, by_domain(test.domains)
    return own, follow(test.labels, own.proportions, seed)
