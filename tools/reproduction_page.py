"""Fill the tables of docs/reproduction.md from the rows under docs/results, and draw its figures.

python tools/reproduction_page.py            writes page and figures
python tools/reproduction_page.py --check    fails where the page is not what the rows say

A block of the page begins with <!-- overview --> (FOOGD's detectors beside others, for all data sets),
<!-- runs DATA --> (every whole run on these data, CIFAR-10 where none are named, beside the published numbers),
<!-- variants RUN... --> (single runs beside each other, named after what follows the seed) or <!-- detectors RUN... -->
(every detector of these runs, their mean where there are several seeds), and ends with <!-- end -->.
"""

from __future__ import annotations

import csv
import json
import re
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from foogd.figures import COLOURS, MARKS, STYLE, save_figure
from foogd.published import published
from foogd.report import NAMES, Table
from foogd.runs import write_atomic

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reproduction.md"
RESULTS = ROOT / "docs" / "results"
FIGURES = ROOT / "docs" / "figures"
OUTS = {"LSUN-like crop": "LSUN-like crop", "Textures (10 classes)": "Textures", "isun": "iSUN", "svhn": "SVHN"}
CHOSEN_BY = "LSUN-like resize"  # settings were chosen by this set, so no mean counts it
# What follows the seed in the name of a whole run, in words.
KINDS = {
    "first": "first settings", "second": "second settings", "again": "again", "score-net-span": "score_net=span",
    "cnn": "small CNN",
}  # fmt: skip
OURS = ("score_norm", "score_energy", "score_own", "score_near", "span", "span_own", "score_span", "score_span_all")


@dataclass(frozen=True)
class Kept:
    """A run whose rows are kept under docs/results."""

    name: str

    @cached_property
    def settings(self) -> dict[str, Any]:
        found = tomllib.loads((RESULTS / self.name / "config.toml").read_text())
        return {key: value for key, value in found.items() if not isinstance(value, dict)}

    @property
    def split_by(self) -> str:
        """How the data are split over clients: alpha, or the domain that nobody trains on."""
        if self.settings["partition"] == "by_domain":
            return str(self.settings["leave_out"])
        return f"{self.settings['alpha']:g}"

    @cached_property
    def commit(self) -> str:
        return str(json.loads((RESULTS / self.name / "environment.json").read_text())["commit"])[:7]

    @cached_property
    def rows(self) -> list[dict[str, str]]:
        with (RESULTS / self.name / "rows.csv").open() as file:
            rows = list(csv.DictReader(file))
        last = max(int(row["round"]) for row in rows)
        return [row for row in rows if row["scope"] == "weighted" and int(row["round"]) == last]

    @property
    def rounds(self) -> str:
        """The round that the rows are of; a run that broke off says of how many."""
        last, planned = self.rows[0]["round"], str(self.settings["rounds"])
        return last if last == planned else f"{last} of {planned}"

    def accuracy(self, split: str) -> float:
        """In %; the mean over severities."""
        return 100 * mean(float(r["value"]) for r in self.rows if r["split"] == split and r["metric"] == "accuracy")

    def detection(self, detector: str, metric: str) -> dict[str, float]:
        """In %, for each OUT set."""
        return {
            row["dataset"]: 100 * float(row["value"])
            for row in self.rows
            if row["split"] == "out" and row["detector"] == detector and row["metric"] == metric
        }

    def mean(self, detector: str, metric: str) -> float:
        """In %, over the OUT sets that we report on."""
        found = self.detection(detector, metric)
        return mean(found[out] for out in OUTS)

    @cached_property
    def detectors(self) -> list[str]:
        found = {row["detector"] for row in self.rows if row["split"] == "out"}
        return [name for name in NAMES if name in found]


def whole_runs(data: str) -> dict[tuple[str, str, int], list[Kept]]:
    """Runs that trained everything from the start, by method, split of the data and rounds, each with its seeds.

    A run with settings of FOOGD that were the default once, or may be one day, is named after them, as in
    RUN-s21-second; RUN-s21-again repeats one with more detectors.
    """
    groups: dict[tuple[str, str, int], list[Kept]] = {}
    for folder in sorted(RESULTS.iterdir()):
        name = re.fullmatch(rf".*-s\d+(?:-(?P<kind>{'|'.join(KINDS)}))?", folder.name)
        run = Kept(folder.name)
        if name is None or run.settings["data"] != data:
            continue
        method = str(run.settings["method"]) + (f", {KINDS[name['kind']]}" if name["kind"] else "")
        groups.setdefault((method, run.split_by, int(run.settings["rounds"])), []).append(run)
    order = ["fedavg", "fedavg+aug", "fedavg+foogd", "fedrod", "fedrod+foogd"]

    def place(group: tuple[str, str, int]) -> tuple[float, int, str]:
        base = group[0].partition(",")[0]
        alpha = -groups[group][0].settings["alpha"]
        return alpha, order.index(base) if base in order else len(order), group[0]

    return {group: groups[group] for group in sorted(groups, key=place)}


def spread(values: Sequence[float]) -> str:
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def lines_of(name: str, runs: Sequence[Kept]) -> list[tuple[str, ...]]:
    """A line for MSP and one for each detector of ours, published numbers in brackets."""
    lines = []
    settings = runs[0].settings
    # The paper has the score norm for FOOGD and MSP for all others; it prints PACS's shifted domain as one number.
    printed_for = "score_norm" if str(settings["method"]).endswith("+foogd") else "msp"
    shift = ",".join(settings["corruptions"])
    for detector in ("msp", *(ours for ours in OURS if ours in runs[0].detectors)):
        cells = []
        for metric, split in (("accuracy", "in"), ("accuracy", "in-c"), ("fpr95", "out"), ("auroc", "out")):
            if metric == "accuracy":
                values = [run.accuracy(split) for run in runs]
            else:
                values = [run.detection(detector, metric)["LSUN-like crop"] for run in runs]
            printed = published(
                settings,
                metric=metric,
                split=split,
                dataset="lsun_c" if split == "out" else "",
                detector=printed_for if split == "out" else "",
                corruption=shift if split == "in-c" else "",
            )
            here = detector == (printed_for if split == "out" else "msp")  # an accuracy is shown once
            here = here and settings["backbone"] != "cnn"  # a net that the paper does not have
            cells.append(spread(values) + (f" ({printed.mean:.1f})" if printed and here else ""))
        means = [run.mean(detector, "auroc") for run in runs]
        commits = ", ".join(dict.fromkeys(run.commit for run in runs))
        who = [name, runs[0].split_by, runs[0].rounds, str(len(runs)), commits]
        lines.append((*(who if detector == "msp" else [""] * 5), NAMES[detector], *cells, spread(means)))
    return lines


def lines_table(first: str, data: str, lines: Sequence[tuple[str, ...]]) -> str:
    words = (first, "left out" if data == "pacs" else "alpha", "rounds", "seeds", "commit", "detector")
    numbers = ("ACC-IN", "ACC-IN-C", "FPR95 LSUN-like crop", "AUROC LSUN-like crop", "AUROC, mean of four OUT sets")
    return Table("", (*words, *numbers), tuple(lines)).markdown(words=(0, 1, 4, 5))


def runs_table(data: str) -> str:
    lines = [line for (method, _, _), runs in whole_runs(data).items() for line in lines_of(method, runs)]
    return lines_table("method", data, lines)


def variants_table(runs: Sequence[Kept]) -> str:
    """Runs of one method and split beside each other, named after what follows the seed in their names."""
    lines = []
    for run in runs:
        name = re.sub(r".*-s\d+-?", "", run.name).replace("-", " ") or "as it is"
        lines += lines_of(name, [run])
    return lines_table("variant", str(runs[0].settings["data"]), lines)


def means(runs: Sequence[Kept]) -> dict[str, float]:
    """AUROC of each detector in %, over the OUT sets that we report on and over seeds."""
    return {name: mean(run.mean(name, "auroc") for run in runs) for name in runs[0].detectors}


def best_other(known: dict[str, float]) -> str:
    """The best detector that is not FOOGD's."""
    return max((name for name in known if name not in OURS), key=lambda name: known[name])


def overview_table() -> str:
    """For each data set, split and base: AUROC of FOOGD's detectors and of others, in the mean of four OUT sets."""
    others = ("msp", "energy", "knn")
    lines = []
    kept = {data: whole_runs(data) for data in ("cifar10", "cifar100", "pacs")}
    everyone = [run for found in kept.values() for runs in found.values() for run in runs]
    # The client's own classes tell what its own features tell better; all runs have them in their tables.
    asked = [name for name in OURS if name != "score_own" and any(name in run.detectors for run in everyone)]
    for data, found in kept.items():
        for (method, split_by, rounds), runs in found.items():
            plain_name, foogd, kind = method.partition("+foogd")
            if not foogd or kind.endswith(" settings"):
                continue
            bases = [found.get((name, split_by, rounds), []) for name in (plain_name + kind, plain_name)]
            base = next((b for b in bases if b and b[0].settings["backbone"] == runs[0].settings["backbone"]), None)
            known = means(runs)
            best = best_other(known)
            before = ["–", "–"]
            if base:
                plain = means(base)
                before = [f"{plain['msp']:.1f}", f"{plain[best_other(plain)]:.1f} ({NAMES[best_other(plain)]})"]
            top = f"{max(known.values()):.1f}"
            cells = [f"{known[name]:.1f}" if name in known else "–" for name in (*others, best, *asked)]
            cells = [f"**{cell}**" if cell == top else cell for cell in cells]
            cells[len(others)] += f" ({NAMES[best]})"
            where = f"{data}, {'without ' if data == 'pacs' else 'alpha '}{split_by}"
            lines.append((where, method, str(len(runs)), *before, *cells))
    heads = ("data", "method", "seeds", "base method: MSP", "its best detector", *(NAMES[name] for name in others))
    heads = (*heads, "best of all others")
    return Table("", (*heads, *(NAMES[name] for name in asked)), tuple(lines)).markdown(words=(0, 1))


def detectors_table(runs: Sequence[Kept]) -> str:
    numbers: dict[str, list[float]] = {}
    columns = [*OUTS] + [CHOSEN_BY] * all(CHOSEN_BY in run.detection("msp", "auroc") for run in runs)
    for name in runs[0].detectors:
        single = [mean(run.detection(name, "auroc")[out] for run in runs) for out in columns]
        numbers[name] = [*single, *(mean(run.mean(name, metric) for run in runs) for metric in ("auroc", "fpr95"))]
    # FPR95, the last one, is better where it is smaller.
    values = list(zip(*numbers.values(), strict=True))
    best = [*map(max, values[:-1]), min(values[-1])]
    lines = []
    for name, line in numbers.items():
        cells = [f"**{v:.1f}**" if f"{v:.1f}" == f"{b:.1f}" else f"{v:.1f}" for v, b in zip(line, best, strict=True)]
        lines.append((f"**{NAMES[name]}**" if name in OURS else NAMES[name], *cells))
    heads = ("AUROC", *(OUTS.get(out, out) for out in columns), "mean of four", "FPR95, mean of four")
    return Table("", heads, tuple(lines)).markdown(words=(0,))


def page(text: str) -> str:
    """The page with its blocks filled."""

    def fill(match: re.Match[str]) -> str:
        kind, *names = match["what"].split()
        if kind == "overview":
            made = overview_table()
        elif kind == "runs":
            made = runs_table(*names or ["cifar10"])
        else:
            made = {"variants": variants_table, "detectors": detectors_table}[kind]([Kept(name) for name in names])
        return f"<!-- {match['what']} -->\n\n{made}\n\n<!-- end -->"

    kinds = "overview|runs|variants|detectors"
    return re.sub(rf"<!-- (?P<what>(?:{kinds})[^>]*?) -->.*?<!-- end -->", fill, text, flags=re.DOTALL)


def figures() -> dict[str, Any]:
    """By name: what every detector reaches on each run's own backbone."""
    import matplotlib
    from matplotlib.figure import Figure

    panels_of = {
        "CIFAR-10, alpha 5.0": ("cifar10", "5"),
        "CIFAR-10, alpha 0.1": ("cifar10", "0.1"),
        "CIFAR-100, alpha 0.1": ("cifar100", "0.1"),
    }
    # With the settings of today.
    groups = {
        (data, *key): runs
        for data in ("cifar10", "cifar100")
        for key, runs in whole_runs(data).items()
        if not key[0].endswith((" settings", KINDS["cnn"]))
    }
    methods = list(dict.fromkeys(method for _, method, _, _ in groups))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.6, 4.6), layout="constrained")
        panels = figure.subplots(1, 3, sharey=True)
        for axes, (title, shown) in zip(panels, panels_of.items(), strict=True):
            for (data, method, split_by, _), runs in groups.items():
                if (data, split_by) != shown:
                    continue
                found = {name: mean(run.mean(name, "auroc") for run in runs) for name in runs[0].detectors}
                axes.plot(
                    list(found.values()),
                    [list(NAMES).index(name) for name in found],
                    linestyle="none",
                    marker=MARKS[methods.index(method) % len(MARKS)],
                    color=COLOURS[methods.index(method) % len(COLOURS)],
                    alpha=0.85,
                    label=method,
                )
            axes.set_title(title)
            axes.set_xlabel("AUROC in %, mean of four OUT sets")
            axes.set_yticks(range(len(NAMES)), list(NAMES.values()))
            axes.set_xlim(50, 100)  # below is no better than a coin
        for name, word in zip(NAMES, panels[0].get_yticklabels(), strict=True):
            word.set_fontweight("bold" if name in OURS else "normal")
        panels[0].invert_yaxis()
        marks = {mark: word for axes in panels for mark, word in zip(*axes.get_legend_handles_labels(), strict=True)}
        chosen = {word: mark for mark, word in marks.items()}
        figure.legend(list(chosen.values()), list(chosen), loc="outside lower center", ncols=5)
    return {"detectors": figure}


def main(check: bool) -> None:
    text = PAGE.read_text()
    made = page(text)
    if check:
        sys.exit("run python tools/reproduction_page.py" if made != text else 0)
    write_atomic(PAGE, made.encode())
    for name, figure in figures().items():
        save_figure(FIGURES / name, figure, "svg")


if __name__ == "__main__":
    main(check="--check" in sys.argv[1:])
