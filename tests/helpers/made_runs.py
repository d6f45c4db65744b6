"""Run folders made up from formulas: what a report reads, without training."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import torch

from foogd.data.federation import TestSet
from foogd.data.store import ImageStore
from foogd.evaluation.rows import Answers, Row
from foogd.presets.loader import read_preset, resolve
from foogd.runs.files import to_toml
from foogd.runs.predictions import SAMPLES, pack_samples
from foogd.runs.run import Run

CLASSES = 5
CLIENTS = 4
DETECTORS = ["msp", "energy", "knn", "score_norm"]


def make_run(
    folder: Path, method: str = "fedavg", *, seed: int = 0, preset: str = "demo", samples: bool = True,
    drift: bool = True, done: int | None = None, good: float = 0.0, classes: int = CLASSES,
    content_hash: str = "", names=None, flower: bool = False, **overrides,
) -> Path:  # fmt: skip
    """A finished run whose numbers follow from its method, seed and `good`; `done` rounds where it is not finished."""
    changes = {"method": method, "seed": seed, "device": "cpu", "clients": CLIENTS, "detectors": DETECTORS, **overrides}
    if preset.startswith("cifar"):
        changes = {"lr": 0.1, **changes}  # the printed rate, at every alpha
    config, built = resolve(read_preset(preset), changes)
    folder.mkdir(parents=True)
    settings = Run(folder, config, built).settings()
    (folder / "config.toml").write_text(to_toml(settings))
    about = {"commit": "0123456789ab", "python": "3.11.7", "versions": {"torch": "2.13.0"}, "platform": "Linux",
             "device": "cpu", "precision": "fp32", "gpu": None, "processor": "Abacus, AVX2", "cores": 2}  # fmt: skip
    (folder / "environment.json").write_text(json.dumps(about))
    last = config.rounds if done is None else done
    stream = torch.Generator().manual_seed(zlib.crc32(f"{method}/{seed}/{settings.get('alpha')}".encode()))

    def near(value: float) -> float:
        return min(1.0, max(0.0, value + good + 0.02 * (float(torch.rand((), generator=stream)) - 0.5)))

    lines = []
    for round in range(1, last + 1):
        line = {
            "round": round, "seconds": 1.5, "losses": {"model": 2.0 / round, "score": 30.0 / round},
            "participants": list(range(config.clients)), "refused": {}, "bytes_up": 2**20, "bytes_down": 2**21,
        }  # fmt: skip
        lines.append(line | ({"drift": {"backbone": 1.0 / round, "head": 0.5 / round}} if drift else {}))
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    outs = list(names or config.out)
    used = [name for name in config.detectors if name != "score_norm" or "foogd" in method]
    rows: list[Row] = []
    evaluated = sorted({last, *(range(config.eval_every, last + 1, config.eval_every) if config.eval_every else ())})
    for round in evaluated:
        blank = Row(
            f"{method}-{seed}",
            method,
            seed,
            round,
            "weighted",
            None,
            "d",
            "in",
            None,
            None,
            None,
            "accuracy",
            0.0,
            100.0,
        )

        def row(value: float, blank: Row = blank, **about) -> None:
            rows.append(Row(**{**asdict(blank), "value": near(value), **about}))

        row(0.70 + 0.1 * round / last)
        for client in range(config.clients):
            row(0.5 + 0.1 * client, scope="client", client=client)
        for kind in config.corruptions:
            for severity in config.severities:
                row(0.75 - 0.06 * severity, split="in-c", corruption=kind, severity=severity)
                for client in range(config.clients):
                    row(
                        0.4 + 0.1 * client,
                        scope="client",
                        client=client,
                        split="in-c",
                        corruption=kind,
                        severity=severity,
                    )
        for place, detector in enumerate(used):
            for name in outs:
                row(0.6 + 0.02 * place, split="out", dataset=name, detector=detector, metric="auroc")
                row(0.7 - 0.02 * place, split="out", dataset=name, detector=detector, metric="fpr95")
                row(0.6 + 0.02 * place, split="out", dataset=name, detector=detector, metric="auroc_joint")
            row(0.1 + 0.01 * place, split="in-c", corruption="x", severity=1, detector=detector, metric="rejected")
            row(0.8, detector=detector, metric="accuracy_accepted")
            if config.calibration:
                about = {"detector": detector, "metric": "rejected_calibrated"}
                row(0.07, **about)
                row(0.2, split="in-c", corruption="x", severity=1, **about)
                for name in outs:
                    row(0.3, split="out", dataset=name, weight=120.0 * config.clients, **about)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row.as_dict()) + "\n" for row in rows))
    counts = torch.randint(0, 90, (config.clients, classes), generator=stream).tolist()
    partition = {"data": config.data, "classes": [f"class {c}" for c in range(classes)], "counts": counts,
                 "indices": [], "training_images_in_tests": {"d": 0}}  # fmt: skip
    partition |= {"content_hash": content_hash} if content_hash else {}
    (folder / "partition.json").write_text(json.dumps(partition))
    if flower:
        (folder / "flower.json").write_text('{"token": "00", "roster": {}}')
    if samples and last == config.rounds and not flower:
        found = SimpleNamespace(
            answers=make_answers(outs, used, stream), state=SimpleNamespace(server=SimpleNamespace(round=last))
        )
        (folder / SAMPLES).write_bytes(pack_samples(found, seed=seed, method=method))
    return folder


def make_answers(outs, detectors, stream, images: int = 120) -> list[Answers]:
    """Normal scores: IN around 0, IN-C around 0.5, the OUT sets around 1, 2, …; features in clusters by class."""
    answers = []
    sets = [("d", "in", None), ("d", "in-c", "fog"), *((name, "out", None) for name in outs)]
    for place, (name, split, kind) in enumerate(sets):
        labels = torch.arange(images) % CLASSES
        store = ImageStore(torch.zeros(images, 2, 2, 1, dtype=torch.uint8), labels, name=name)
        parts = tuple(torch.arange(images).chunk(CLIENTS)) if split != "out" else (torch.arange(images),) * CLIENTS
        test = TestSet(name, split, store, parts, kind, None if kind is None else 1)
        shift = {"in": 0.0, "in-c": 0.5}.get(split, place - 1.0)
        whole = {detector: torch.randn(images, generator=stream) + shift for detector in detectors}
        z = torch.randn(images, 6, generator=stream) + 4 * torch.nn.functional.one_hot(labels, 6) + shift
        answers.append(
            Answers(
                test, correct={}, generic={}, predictions={client: labels[part] for client, part in enumerate(parts)},
                scores={name: {c: values[part] for c, part in enumerate(parts)} for name, values in whole.items()},
                features={c: (torch.arange(len(part))[:20], z[part][:20]) for c, part in enumerate(parts)},
            )
        )  # fmt: skip
    return answers
