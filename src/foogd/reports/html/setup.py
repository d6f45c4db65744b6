"""The section that says what was run, with what, and how to repeat it."""

from __future__ import annotations

from collections.abc import Sequence

from ...runs.files import to_toml
from ..collection import Collection, Record, shown
from .blocks import fine, lead
from .markup import Html, h, join
from .tables import Shown, table


def setup(collection: Collection) -> Html:
    """All runs, the settings that they share, and every configuration."""
    records = collection.records
    first = records[0].settings
    common = {
        key: value
        for key, value in first.items()
        if key not in ("method", "seed") and all(record.settings.get(key) == value for record in records)
    }
    rows = [
        [
            Shown(record.folder.name),
            Shown(group.label),
            Shown(scene.title or "–"),
            Shown(str(record.environment.get("commit") or "–")),
            Shown(str(record.environment.get("gpu") or record.environment.get("device") or "–")),
            Shown(str(record.environment.get("versions", {}).get("torch", "–"))),
            Shown(str(record.seed), record.seed),
            Shown(f"{record.last_round}/{record.settings['rounds']}", record.last_round),
        ]
        for scene in collection.scenes
        for group in scene.groups
        for record in group.records
    ]
    return join(
        table(("run", "method", "setting", "commit", "device", "torch", "seed", "rounds"), rows, words=6),
        h("h3", "Settings that all runs share"),
        h("dl", [h("div", h("dt", key), h("dd", shown(value))) for key, value in common.items()], class_="settings"),
        h("h3", "Repeat a run"),
        _how(records),
        [_configuration(record) for record in records],
    )


def _how(records: Sequence[Record]) -> Html:
    """How a run is repeated; what was made on Flower needs its nodes."""
    here = (
        "Save its configuration as ", h("code", "config.toml"), "; then ",
        h("code", "foogd run config.toml --out again"), " repeats it. ",
    )  # fmt: skip
    nodes = ("A run on Flower needs its nodes: ", h("code", "foogd flower submit"), " with the same settings.")
    flower = [record.flower for record in records]
    return lead(join(() if all(flower) else here, nodes if any(flower) else ()))


def _configuration(record: Record) -> Html:
    about = record.environment
    versions = [f"{name} {version}" for name, version in about.get("versions", {}).items()]
    words = [
        f"commit {about.get('commit') or 'unknown'}",
        f"Python {about.get('python', '?')}",
        *versions,
        str(about.get("platform", "")),
        str(about.get("processor", "")),
        f"{about.get('cores', '?')} cores",
        f"precision {about.get('precision', '?')}",
    ]
    return h(
        "details", h("summary", record.folder.name), fine(", ".join(word for word in words if word)),
        h("pre", to_toml(record.settings), tabindex="0"),
    )  # fmt: skip
