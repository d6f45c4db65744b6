"""What a run's last evaluation said about every test image, in one file of bounded size.

A set holds at most `LIMIT` answers, the sets of a split at most `SPLIT_LIMIT`; where there are more, a choice of
images is kept, the same one in every run and for every client, so that runs can be compared image by image.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from ..core.errors import InputError
from ..core.random import generator
from ..evaluation.rows import Answers, Evaluation

SAMPLES = "samples.safetensors"
LIMIT, SPLIT_LIMIT = 50_000, 200_000  # answers
FEATURES, SPLIT_FEATURES = 400, 2_000  # samples with features
FORMAT = "1"


@final
@dataclass(frozen=True, eq=False)
class SampleSet:
    """The answers about one test set.

    `client` says who saw an image, −1 where every client sees all of them. Predictions and scores have the shape (n,),
    or (clients, n) where every client sees every image and has an answer of its own.
    """

    key: str
    name: str
    split: str  # in, in-c or out
    corruption: str | None
    severity: int | None
    unseen: bool
    clients: tuple[int, ...]
    index: Tensor  # place of the image in the test set
    labels: Tensor
    client: Tensor
    predictions: Tensor
    scores: Mapping[str, Tensor]
    features: Tensor  # float16, (few, width)
    feature_labels: Tensor
    feature_client: Tensor

    def __len__(self) -> int:
        return len(self.index)

    @property
    def correct(self) -> Tensor | None:
        """Right or wrong, in the shape of `predictions`; None for OUT, where no class is right."""
        return None if self.split == "out" else self.predictions == self.labels

    def pooled(self, detector: str) -> Tensor:
        """The scores of all clients in one row; once where they are the same for all."""
        return self.scores[detector].flatten()

    def of_client(self, values: Tensor, client: int) -> Tensor:
        """What `predictions`, `correct` or one of `scores` says for one client."""
        if values.ndim == 2:
            return values[self.clients.index(client)] if client in self.clients else values[0, :0]
        if len(self.client) and int(self.client[0]) < 0:
            return values if client in self.clients else values[:0]
        return values[self.client == client]


@final
@dataclass(frozen=True, eq=False)
class Samples:
    """The test sets of one evaluation."""

    round: int
    method: str
    seed: int
    sets: tuple[SampleSet, ...]

    def of(self, split: str) -> list[SampleSet]:
        """The sets of a split: in, in-c or out."""
        return [one for one in self.sets if one.split == split]

    def shifted(self) -> list[SampleSet]:
        """The IN-C sets whose scores have one scale with those of IN.

        An unseen domain is scored by the model without a private part. Where clients have models of their own, and so
        say different things about OUT, that is another model.
        """
        outs = self.of("out")
        shared = bool(outs) and all(one.predictions.dim() == 1 for one in outs)
        return [one for one in self.of("in-c") if shared or not one.unseen]

    def detectors(self) -> list[str]:
        """The detectors that scored every set."""
        names = list(dict.fromkeys(name for one in self.sets for name in one.scores))
        return [name for name in names if all(name in one.scores for one in self.sets)]


def pack_samples(found: Evaluation, *, seed: int, method: str, earlier: Samples | None = None) -> bytes:
    """The file's content; scores of detectors that were not asked this time are taken from `earlier`."""
    from safetensors.torch import save

    sets = _collect(found.answers)
    if earlier is not None and earlier.round == found.state.server.round:
        sets = _with_earlier(sets, {one.key: one for one in earlier.sets})
    tensors: dict[str, Tensor] = {}
    about: list[dict[str, Any]] = []
    for number, one in enumerate(sets):
        for name in _INTEGERS:
            tensors[f"{number}/{name}"] = _narrow(getattr(one, name))
        tensors[f"{number}/features"] = one.features.contiguous()
        for name, values in one.scores.items():
            tensors[f"{number}/scores/{name}"] = values.contiguous()
        about.append(
            {
                "key": one.key, "name": one.name, "split": one.split, "corruption": one.corruption,
                "severity": one.severity, "unseen": one.unseen, "clients": list(one.clients),
                "detectors": list(one.scores),
            }
        )  # fmt: skip
    header = {"format": FORMAT, "round": found.state.server.round, "method": method, "seed": seed, "sets": about}
    # One entry alone: safetensors writes several in an order that differs from one call to the next.
    data: bytes = save(tensors, metadata={"about": json.dumps(header)})
    return data


def read_samples(folder: Path) -> Samples | None:
    """The samples of a run folder; None where it has none, as older runs and unfinished ones do."""
    from safetensors import SafetensorError, safe_open

    path = folder / SAMPLES
    if not path.is_file():
        return None
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            header = json.loads(metadata["about"])
            form = header.get("format", metadata.get("format"))  # older files have it as an entry of its own
            if form != FORMAT:
                raise InputError(f"{path} cannot be read: its format is {form!r}, not {FORMAT!r}")
            sets = []
            for number, about in enumerate(header["sets"]):
                parts = {name: file.get_tensor(f"{number}/{name}").long() for name in _INTEGERS}
                scores = {name: file.get_tensor(f"{number}/scores/{name}").clone() for name in about.pop("detectors")}
                about["clients"] = tuple(about["clients"])
                features = file.get_tensor(f"{number}/features").clone()  # else it is the file itself
                sets.append(SampleSet(**about, **parts, scores=scores, features=features))
            return Samples(header["round"], header["method"], header["seed"], tuple(sets))
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        why = " ".join(str(error).split())
        raise InputError(f"{path} is damaged: {why}; make it again: foogd evaluate {folder}") from None


_INTEGERS = ("index", "labels", "client", "predictions", "feature_labels", "feature_client")


def _collect(answers: Iterable[Answers]) -> list[SampleSet]:
    asked = [answer for answer in answers if answer.predictions]
    splits = [answer.test.split for answer in asked]
    return [
        _set(
            answer,
            min(LIMIT, SPLIT_LIMIT // splits.count(answer.test.split)),
            min(FEATURES, SPLIT_FEATURES // splits.count(answer.test.split)),
        )
        for answer in asked
    ]


def _set(answer: Answers, limit: int, features: int) -> SampleSet:
    test = answer.test
    clients = tuple(sorted(answer.predictions))
    parts = {client: test.indices[client].cpu() for client in clients}
    labels = test.store.labels.cpu()
    first = parts[clients[0]]
    together = len(clients) > 1 and all(torch.equal(first, part) for part in parts.values())
    answered = [answer.predictions, *(scores for scores in answer.scores.values() if scores.keys() == set(clients))]
    alike = together and all(_same(row, values[clients[0]]) for values in answered for row in values.values())
    chosen = _chosen(test.key, len(labels), [first] if alike else list(parts.values()), limit)
    kept = {client: chosen[part].nonzero().flatten() for client, part in parts.items()}

    def join(values: Mapping[int, Tensor]) -> Tensor:
        rows = [values[client][kept[client]] for client in clients]
        if not together:
            return torch.cat(rows)
        return rows[0] if all(_same(rows[0], row) for row in rows) else torch.stack(rows)

    index = first[kept[clients[0]]] if together else torch.cat([parts[client][kept[client]] for client in clients])
    owner = [torch.full((len(kept[client]),), client) for client in clients]
    places, vectors = [], []
    for client in clients:
        if client in answer.features:
            positions, found = answer.features[client]
            places.append(torch.stack([torch.full_like(positions, client), parts[client][positions]]))
            vectors.append(found.half())
    where = torch.cat(places, dim=1) if places else torch.zeros(2, 0, dtype=torch.long)
    z = torch.cat(vectors) if vectors else torch.zeros(0, 0, dtype=torch.float16)
    few = torch.randperm(len(z), generator=generator(0, test.key, "features"))[:features].sort().values
    return SampleSet(
        key=test.key,
        name=test.name,
        split=test.split,
        corruption=test.corruption,
        severity=test.severity,
        unseen=test.unseen,
        clients=clients,
        index=index,
        labels=labels[index],
        client=torch.full((len(index),), -1) if together else torch.cat(owner),
        predictions=join(answer.predictions),
        scores={
            name: _compact(join(values)) for name, values in answer.scores.items() if values.keys() == set(clients)
        },
        features=z[few],
        feature_labels=labels[where[1, few]],
        feature_client=where[0, few],
    )  # fmt: skip


def _same(a: Tensor, b: Tensor) -> bool:
    # NaN is not equal to itself, but here it is the same answer.
    if a is b or torch.equal(a, b):
        return True
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def _chosen(key: str, size: int, parts: Sequence[Tensor], limit: int) -> Tensor:
    """Which images of a test set are kept; the order that they are taken in is the same in every run."""
    counts = torch.bincount(torch.cat(list(parts)), minlength=size)
    order = torch.randperm(size, generator=generator(0, key, "samples"))
    chosen = torch.zeros(size, dtype=torch.bool)
    chosen[order[counts[order].cumsum(0) <= limit]] = True
    return chosen


def _with_earlier(sets: Sequence[SampleSet], earlier: Mapping[str, SampleSet]) -> list[SampleSet]:
    merged = []
    for one in sets:
        old = earlier.get(one.key)
        if old is not None and torch.equal(old.index, one.index) and torch.equal(old.client, one.client):
            merged.append(replace(one, scores={**old.scores, **one.scores}))
        else:
            merged.append(one)
    return merged


def _compact(values: Tensor) -> Tensor:
    """float32, or float64 where that would make equal what is not, as for probabilities near 1."""
    if values.dtype != torch.float64:
        return values.float()
    ordered = values.flatten().sort().values
    before, after = (int((row[1:] != row[:-1]).sum()) + 1 for row in (ordered, ordered.float()))
    return values.float() if after >= 0.999 * before else values


def _narrow(values: Tensor) -> Tensor:
    """The same whole numbers in the smallest type."""
    low, high = (int(values.min()), int(values.max())) if values.numel() else (0, 0)
    for dtype in (torch.uint8, torch.int16):
        if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max:
            return values.to(dtype).contiguous()
    return values.to(torch.int32).contiguous()
