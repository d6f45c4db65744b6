"""Keep what runs have shown in results/, and make docs/results.md of it.

python tools/results.py keep SWEEP RUN_FOLDER...     # adds these runs, or replaces them
python tools/results.py config SWEEP RUN > my.toml   # all settings of a kept run; foogd run my.toml repeats it
python tools/results.py page                         # writes the claims (claims.py) and the tables of docs/results.md
python tools/results.py page --check                 # fails where the page is not what the rows say

results/SWEEP.csv has one number a line and one run a column, of the last evaluated round. results/SWEEP.toml has the
settings that all runs share, for each run those of its own and what it was made with, and before these what the page
says of the sweep: `title`, `about`, and, where wanted, `command` (in place of the usual one), `table` (a name of
TABLES), `beside` (runs of other sweeps in the same table), `printed = false` (nothing of the paper in it) and
`detectors` (lists of runs, seeds of one another, whose every detector is shown).
"""

from __future__ import annotations

import contextlib
import csv
import io
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, final

import claims

from foogd import InputError
from foogd.evaluation.rows import Row
from foogd.methods import shown_name
from foogd.presets.loader import profile_of
from foogd.runs.files import read_json, read_rounds, read_rows, to_toml, write_atomic
from foogd.tables.grid import NAMES, Cell, Measure, Table
from foogd.tables.paper import published
from foogd.tables.results import Report, reported_detector

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
PAGE = ROOT / "docs" / "results.md"
KEY = ("scope", "split", "dataset", "corruption", "severity", "detector", "metric")
MADE = ("commit", "device", "gpu", "processor", "cores", "precision", "python")
SHOWN = ("msp", "energy", "score_norm", "score_near", "span_own", "score_span")
CROP, RESIZE, NEAR, FOUR = "LSUN-like crop", "LSUN-like resize", "tinyimagenet", "mean of four"
MARK = "<!-- From here on the page is made by python tools/results.py page. -->"


@final
@dataclass(frozen=True)
class Kept:
    """A run: all its settings, what it was made with, and its numbers as they stand in the file."""

    settings: dict[str, Any]
    made: dict[str, Any]
    values: dict[tuple[str, ...], str]

    @classmethod
    def of(cls, folder: Path) -> Kept:
        """What is kept of a run folder; rows of single clients and of earlier rounds are not."""
        rows = read_rows(folder)
        if not rows:
            raise InputError(f"{folder} has no rows: it is no run folder, or was not evaluated yet")
        settings = tomllib.loads((folder / "config.toml").read_text()) | {"data_root": "data"}  # of one machine
        for key, value in settings.items():
            if any(str(one).startswith("/") for one in (value if isinstance(value, list) else [value])):
                raise InputError(f"{folder}: {key} = {value!r} names a place of one machine: use a relative path")
        last = max(row.round for row in rows)
        about = read_json(folder / "environment.json")
        made = {key: about[key] for key in MADE if key in about} | about["versions"]
        made |= {f"tested_{key}": value for key, value in about.get("tested", {}).items()}
        made |= {"round": last, "seconds": round(sum(line["seconds"] for line in read_rounds(folder)))}
        found = (row.as_dict() for row in rows if row.round == last and row.scope != "client")
        return cls(settings, made, {tuple(map(_text, map(row.get, KEY))): _text(row["value"]) for row in found})

    @property
    def split(self) -> str:
        """How the data are split over clients."""
        by_domain = self.settings["partition"] == "by_domain"
        return f"Without {self.settings['leave_out']}" if by_domain else f"Alpha {self.settings['alpha']}"


def _text(value: Any) -> str:
    return "" if value is None else str(round(value, 5) if isinstance(value, float) else value)


@final
@dataclass(frozen=True)
class Sweep:
    """Runs that were made to be compared, by name."""

    name: str
    about: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, Kept] = field(default_factory=dict)

    @classmethod
    def read(cls, name: str) -> Sweep:
        if not (RESULTS / f"{name}.toml").is_file():
            raise InputError(f"sweep {name!r} is not kept: use {', '.join(p.stem for p in RESULTS.glob('*.toml'))}")
        about = tomllib.loads((RESULTS / f"{name}.toml").read_text())
        shared, runs = about.pop("settings"), about.pop("runs")
        with (RESULTS / f"{name}.csv").open() as file:
            rows = list(csv.DictReader(file))
        for run, own in runs.items():
            values = {tuple(row[key] for key in KEY): row[run] for row in rows if row[run]}
            runs[run] = Kept(made=own.pop("made"), settings=shared | own, values=values)
        return cls(name, about, runs)

    def write(self) -> None:
        first, *others = (run.settings for run in self.runs.values())
        shared = {k: v for k, v in first.items() if all(repr(own.get(k)) == repr(v) for own in others)}
        text = [to_toml(self.about), "[settings]", to_toml(shared)]
        for name, run in self.runs.items():
            own = {key: value for key, value in run.settings.items() if key not in shared}
            text += [f'[runs."{name}"]', f'{to_toml(own)}[runs."{name}".made]', to_toml(run.made)]
        write_atomic(RESULTS / f"{self.name}.toml", "\n".join(text).encode())
        table = io.StringIO()
        lines = csv.writer(table, lineterminator="\n")
        lines.writerow((*KEY, *self.runs))
        for key in sorted({key for run in self.runs.values() for key in run.values}):
            lines.writerow((*key, *(run.values.get(key, "") for run in self.runs.values())))
        write_atomic(RESULTS / f"{self.name}.csv", table.getvalue().encode())

    @property
    def compared(self) -> dict[str, Kept]:
        """The runs of its tables: its own, after those of other sweeps beside which they are shown."""
        beside = (place.split("/") for place in self.about.get("beside", ()))
        return {run: Sweep.read(sweep).runs[run] for sweep, run in beside} | self.runs

    def label(self, name: str, run: Kept) -> str:
        """What a table calls a run: its name without what the sweep or the table says, and how far it got."""
        said = run.settings
        gone = {*self.name.split("-"), str(said["alpha"]), str(said["seed"]), f"s{said['seed']}", "anchored"}
        method, *words = (word for word in name.split("-") if word not in gone)
        with contextlib.suppress(InputError):  # a score network that is gone: neither of today's two variants
            method = shown_name({"profile": profile_of(said)}, method)
        cut = [f"stopped after round {run.made['round']} of {said['rounds']}"] * (run.made["round"] < said["rounds"])
        return ", ".join([method, *filter(None, [" ".join(words)]), *cut])

    def report(self, runs: Mapping[str, Kept]) -> Report:
        """The rows of these runs, with the means over four OUT sets, under the names that the tables give them."""
        rows: list[Row] = []
        for name, run in runs.items():
            four: dict[tuple[str, ...], list[float]] = {}
            who = (name, self.label(name, run), run.settings["seed"], run.made["round"])
            for other in {row.run for row in rows if (row.method, row.seed) == who[1:3]}:
                raise InputError(f"{self.name}: {name} has the label and the seed of {other}: name it otherwise")
            for key, value in run.values.items():
                scope, split, dataset, kind, severity, detector, metric = key
                about = (kind or None, int(severity) if severity else None, detector or None, metric)
                rows.append(Row(*who, scope, None, dataset, split, *about, float(value), 0.0))
                if split == "out" and dataset not in (RESIZE, NEAR):
                    four.setdefault((scope, detector, metric), []).append(float(value))
            for (scope, detector, metric), found in four.items():
                if len(found) == 4:
                    rows.append(Row(*who, scope, None, FOUR, "out", None, None, detector, metric, fmean(found), 0.0))
        return Report.of(rows)


def chosen(method: str, known: Sequence[str]) -> Sequence[str]:
    return [name for name in SHOWN if name in known]


def grid(report: Report, *_: Any) -> str:
    """A run and a detector a line: accuracies, what is rejected of IN-C, and each OUT set."""
    columns = report.paper_columns()
    return report.grid([*columns[:2], Measure("rejected", "in-c", detected=True), *columns[2:]], chosen).markdown()


def summary(report: Report, sweep: Sweep, settings: Mapping[str, Mapping[str, Any]]) -> str:
    """A run a line: accuracies and LSUN-like crop beside what the paper prints, and chosen detectors."""
    asked = chosen("", report.detectors())
    lines = []
    for method, known in settings.items():
        theirs, shift = reported_detector(known["method"]), ",".join(known["corruptions"])
        cells = [method]
        for metric, split, dataset, detector in (
            ("accuracy", "in", "", ""), ("accuracy", "in-c", "", ""),
            ("auroc", "out", CROP, theirs), ("fpr95", "out", CROP, theirs),
        ):  # fmt: skip
            values = report.values(
                method=method, metric=metric, split=split, dataset=dataset or None, detector=detector or None
            )
            printed = published(
                known if sweep.about.get("printed", True) else {}, metric=metric, split=split,
                dataset="lsun_c" if dataset else "", detector=detector, corruption=shift if split == "in-c" else "",
            )  # fmt: skip
            cells.append(Cell(tuple(values)).text() + (f" ({printed.mean:.1f})" if printed else ""))
        for name in asked:
            about: dict[str, Any] = {"method": method, "split": "out", "dataset": FOUR, "detector": name}
            both = [Cell(tuple(report.values(metric=metric, **about))) for metric in ("auroc", "fpr95")]
            cells.append(", ".join(cell.text() for cell in both) if both[0].values else "–")
        lines.append(tuple(cells))
    heads = ("method", "ACC-IN", "ACC-IN-C", f"AUROC {CROP}", f"FPR95 {CROP}", *(NAMES[name] for name in asked))
    return Table("", heads, tuple(lines)).markdown((0,))


def by_corruption(report: Report, *_: Any) -> str:
    kinds = list(dict.fromkeys(row.corruption for row in report.rows if row.corruption))
    lines = []
    for kind in (None, *kinds, f"mean of {len(kinds)}"):
        about: dict[str, Any] = {"split": "in-c" if kind else "in", "corruption": kind if kind in kinds else None}
        found = [report.values(method=method, metric="accuracy", **about) for method in report.methods()]
        lines.append(((kind or "none").replace("_", " "), *(Cell(tuple(values)).text() for values in found)))
    return Table("", ("accuracy under", *report.methods()), tuple(lines)).markdown((0,))


TABLES = {"summary": summary, "grid": grid, "corruptions": by_corruption}


def tables(sweep: Sweep) -> Iterable[str]:
    compared = sweep.compared
    for split in dict.fromkeys(run.split for run in compared.values()):
        runs = {name: run for name, run in compared.items() if run.split == split}
        report = sweep.report(runs)
        settings = {sweep.label(name, run): run.settings for name, run in runs.items()}
        rounds = ", ".join(dict.fromkeys(str(run.settings["rounds"]) for run in runs.values()))
        yield f"{split}, rounds: {rounds}, seeds: {', '.join(map(str, report.seeds()))}:"
        yield TABLES[sweep.about.get("table", "summary")](report, sweep, settings)
    for names in sweep.about.get("detectors", ()):
        report = sweep.report({name: sweep.runs[name] for name in names})
        columns = [Measure("auroc", "out", out, detected=True) for out in report.out_sets()]
        columns.append(Measure("fpr95", "out", FOUR, detected=True))
        yield f"Every detector of {', '.join(names)}:"
        yield report.grid(columns, lambda method, known: [name for name in NAMES if name in known]).markdown()


def section(sweep: Sweep) -> str:
    made = [run.made for run in sweep.runs.values()]
    machines = {f"{m.get('gpu') or m.get('processor', 'CPU')} ({m['precision']}, torch {m['torch']})" for m in made}
    commits = ", ".join(dict.fromkeys(str(m["commit"])[:7] for m in made))
    hours = f"{sum(m['seconds'] for m in made) / 3600:.1f} hours of training"
    first = next(iter(sweep.runs))
    again = f"python tools/results.py config {sweep.name} {first} > my.toml && foogd run my.toml --set data_root=DATA"
    facts = f"{len(made)} runs, {hours}; {', '.join(sorted(machines))}; commits {commits}. Command: "
    facts += f"`{sweep.about.get('command', f'{again} --out runs/{first}')}`"
    return "\n\n".join([f"## {sweep.name}", sweep.about["about"], facts, *tables(sweep)])


def page() -> str:
    """The page with all that follows its mark made new."""
    sweeps = [Sweep.read(name) for name in sorted(place.stem for place in RESULTS.glob("*.toml"))]
    contents = "\n".join(f"- [{one.name}](#{one.name}): {one.about['title']}" for one in sweeps)
    runs = {one.name: one.runs for one in sweeps}
    parts = [claims.section(lambda name: runs.get(name, {})), "## The runs, by sweep", contents, *map(section, sweeps)]
    return "\n\n".join([PAGE.read_text().partition(MARK)[0] + MARK, *parts]) + "\n"


def keep(name: str, folders: Sequence[Path]) -> None:
    is_new = not (RESULTS / f"{name}.toml").is_file()
    sweep = Sweep(name, {"title": "", "about": ""}) if is_new else Sweep.read(name)
    found = {folder.resolve().name: Kept.of(folder) for folder in folders}
    replace(sweep, runs=sweep.runs | found).write()


def config(name: str, run: str) -> str:
    runs = Sweep.read(name).runs
    if run not in runs:
        raise InputError(f"sweep {name!r} has no run {run!r}: use {', '.join(runs)}")
    return to_toml(runs[run].settings)


def main(words: Sequence[str]) -> None:
    match words:
        case ["keep", name, _, *_]:
            keep(name, [Path(folder) for folder in words[2:]])
        case ["config", name, run]:
            print(config(name, run), end="")
        case ["page"]:
            write_atomic(PAGE, page().encode())
        case ["page", "--check"]:
            if PAGE.read_text() != page():
                raise InputError(f"{PAGE.name} is not what the rows say: run python tools/results.py page")
        case _:
            raise InputError(str(__doc__))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except InputError as error:
        sys.exit(str(error))
