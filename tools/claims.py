"""The first part of docs/results.md: the claims of the paper, which tools/claims.toml lists, judged by one rule."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, final

from foogd import InputError
from foogd.presets.loader import profile_of
from foogd.tables.grid import Table, signed
from foogd.tables.paper import published
from foogd.tables.results import reported_detector

if TYPE_CHECKING:
    from results import Kept

Sweeps = Callable[[str], Mapping[str, "Kept"]]  # the runs of a sweep
LIST = tomllib.loads((Path(__file__).parent / "claims.toml").read_text())
CONFIRMED, IN_PART, NOT, NOT_TRIED = "confirmed", "in part", "not", "not tried here"
SAME = "same direction"
NO_VALUE = "–"


def verdict(printed: float, measured: Sequence[float]) -> str:
    """What differences measured with the paper's net and data, one a seed, say of the printed one."""
    if not measured:
        return NOT_TRIED
    mean = fmean(measured)
    if all(one * printed > 0 for one in measured) and abs(mean) >= abs(printed) / 2:
        return CONFIRMED
    return IN_PART if mean * printed > 0 else NOT


def direction(printed: float, measured: Sequence[float]) -> str:
    """What the small CNN says."""
    return (SAME if fmean(measured) * printed > 0 else NOT) if measured else NO_VALUE


@final
@dataclass(frozen=True)
class Measure:
    """A column of the paper's tables; `dataset` is an OUT set as the paper's presets call it."""

    name: str
    metric: str
    split: str
    dataset: str = ""
    corruption: str = ""

    def printed(self, side: Mapping[str, Any]) -> float | None:
        detector = side.get("detector") or reported_detector(side["method"])
        found = published(
            side, metric=self.metric, split=self.split, dataset=self.dataset,
            detector=detector if self.dataset else "", corruption=self.corruption,
        )  # fmt: skip
        return None if found is None else found.mean

    def of(self, run: Kept, detector: str) -> float | None:
        """The run's number in %, weighted over clients; None where it lacks it, or has other corruptions."""
        wanted = LIST["out"].get(self.dataset, "")
        found, kinds = [], set()
        for (scope, split, dataset, kind, _, by, metric), value in run.values.items():
            if (scope, split, metric, by) == ("weighted", self.split, self.metric, detector if self.dataset else ""):
                if self.dataset and dataset != wanted:
                    continue
                found.append(100 * float(value))
                kinds.add(kind)
        if self.corruption and len(kinds) != (19 if self.corruption == "all" else 1):
            return None
        return fmean(found) if found else None


def _out(*names: str) -> list[Measure]:
    of_table = len(names) > 1
    return [
        Measure(f"{title} {LIST['shown'][name].partition(' ')[0]}" if of_table else title, metric, "out", name)
        for name in names
        for title, metric in (("AUROC", "auroc"), ("FPR95", "fpr95"))
    ]


ACCURACY = [Measure("ACC-IN", "accuracy", "in"), Measure("ACC-IN-C", "accuracy", "in-c", corruption="brightness")]
KINDS: dict[str, list[Measure]] = {
    "both": [*ACCURACY, *_out("lsun_c")],
    "accuracy": ACCURACY,
    "detection": _out("lsun_c"),
    "other OUT": _out("isun", "svhn", "textures", "lsun_r"),
    "domain": [Measure("ACC-IN-C", "accuracy", "in-c")],
    "corruptions": [Measure("mean of 19", "accuracy", "in-c", corruption="all")],
}


# The columns of a line: whose rows they are, and which FOOGD is meant.
COLUMNS = {"net": ("net", "published"), "small": ("small", "published"), "anchored": ("anchored", "anchored"),
           "anchored_small": ("small", "anchored")}  # fmt: skip


@final
@dataclass(frozen=True)
class Line:
    """One printed difference, and what was measured: differences by seed in each column, in points."""

    at: str
    measure: str
    printed: float | None
    net: Mapping[int, float] = field(default_factory=dict)
    small: Mapping[int, float] = field(default_factory=dict)
    anchored: Mapping[int, float] = field(default_factory=dict)
    anchored_small: Mapping[int, float] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        return NO_VALUE if self.printed is None else verdict(self.printed, list(self.net.values()))

    @property
    def direction(self) -> str:
        return NO_VALUE if self.printed is None else direction(self.printed, list(self.small.values()))

    @property
    def measured(self) -> bool:
        return any((self.net, self.small, self.anchored, self.anchored_small))

    def cells(self) -> tuple[str, ...]:
        printed = NO_VALUE if self.printed is None else signed(self.printed)
        judged = bool(self.small) and self.printed is not None
        small = difference(self.small) + (f", {self.direction}" if judged else "")
        both = (("net", self.anchored), ("small", self.anchored_small))
        anchored = "; ".join(f"{name} {difference(one)}" for name, one in both if one) or NO_VALUE
        return f"{self.at}, {self.measure}", printed, difference(self.net), self.verdict, small, anchored


def difference(by_seed: Mapping[int, float]) -> str:
    """A mean with its deviation over seeds, or with the one seed that there is."""
    values = list(by_seed.values())
    if len(values) < 2:
        return f"{signed(values[0])} [1]" if values else NO_VALUE
    return f"{signed(fmean(values))} ± {stdev(values):.1f} [{len(values)}]"


@final
@dataclass(frozen=True)
class Claim:
    """What tools/claims.toml says of a claim."""

    about: Mapping[str, Any]

    @property
    def other_side(self) -> str:
        """What sets the other side apart beside its method."""
        said = {key: value for key, value in self.about["than"].items() if key != "method"}
        return "".join(f" ({key} = {value})" for key, value in said.items())

    def lines(self, sweeps: Sweeps) -> Iterator[Line]:
        for point in self.about.get("at", ()):
            where = point | {"data": self.about["data"]}
            one, other = (dict(self.about[name]) | where for name in ("ours", "than"))
            with_foogd = one["method"].endswith("+foogd")
            for measure in KINDS[self.about["kind"]]:
                ours, than = measure.printed(one), measure.printed(other)
                known = ours is not None and than is not None and "part" in self.about
                columns: dict[str, dict[int, float]] = {}
                for column, (rows, profile) in COLUMNS.items():
                    if profile == "anchored" and not with_foogd:
                        continue
                    runs = [run for name in LIST["columns"][rows] for run in sweeps(name).values()]
                    mine, theirs = by_seed(runs, one, measure, profile), by_seed(runs, other, measure, profile)
                    columns[column] = {seed: mine[seed] - theirs[seed] for seed in sorted(mine.keys() & theirs.keys())}
                ((key, value),) = point.items()
                at = f"alpha {value}" if key == "alpha" else _words(value)
                yield Line(at, measure.name, (ours or 0.0) - (than or 0.0) if known else None, **columns)


def by_seed(runs: Sequence[Kept], side: Mapping[str, Any], measure: Measure, profile: str) -> dict[int, float]:
    """The numbers of the runs that are meant by one side of a claim; runs of one seed count as their mean."""
    wanted = {key: value for key, value in side.items() if key != "detector"}
    if wanted["method"].endswith("+foogd"):
        # A weight that a claim sets to 0 is meant; the others are those of the method.
        wanted = LIST["methods"][profile] | wanted
    detector = side.get("detector") or reported_detector(side["method"])
    found: dict[int, list[float]] = {}
    for run in runs:
        value = measure.of(run, detector) if _is(run, wanted) else None
        if value is not None:
            found.setdefault(run.settings["seed"], []).append(value)
    return {seed: fmean(values) for seed, values in found.items()}


def _is(run: Kept, wanted: Mapping[str, Any]) -> bool:
    if run.made["round"] < run.settings["rounds"]:
        return False
    said = dict(run.settings)
    said["data"] = LIST["small"]["stands_for"].get(said["data"], said["data"])
    if said["method"].endswith("+foogd"):
        try:
            said["profile"] = profile_of(said)
        except InputError:  # a score network that is gone
            return False
    return all(said.get(key) == value for key, value in wanted.items())


def _words(name: str) -> str:
    return name.replace("_", " ")


# The page


def table(lines: Sequence[Line]) -> str:
    """A line a number; a point at which nothing was measured has one line for all of them."""
    shown = []
    for at in dict.fromkeys(line.at for line in lines):
        here = [line for line in lines if line.at == at]
        if any(line.measured for line in here):
            shown += [line.cells() for line in here]
        else:
            names, printed = ", ".join(line.measure for line in here), ", ".join(line.cells()[1] for line in here)
            shown.append((f"{at}, {names}", printed, NO_VALUE, NOT_TRIED, NO_VALUE, NO_VALUE))
    heads = ("difference", "printed", "paper's net", "verdict", "small CNN", "anchored, not in the paper")
    return Table("", heads, tuple(shown)).markdown((0, 3, 5))


def judged(found: Sequence[tuple[Claim, list[Line]]]) -> str:
    """What was judged, by verdict: what was refuted as plainly as what was confirmed."""
    shown: dict[str, dict[str, list[str]]] = {CONFIRMED: {}, IN_PART: {}, NOT: {}}
    for claim, lines in found:
        for line in lines:
            if line.net and line.printed is not None:
                ours, than = (LIST["names"][claim.about[side]["method"]] for side in ("ours", "than"))
                which = f"{claim.about['part']}, {ours} over {than}{claim.other_side}, {line.at}"
                numbers = shown[line.verdict].setdefault(which, [])
                numbers.append(f"{line.measure} {difference(line.net)} (printed {signed(line.printed)})")
    return "\n".join(
        f"- **{word}**: {'; '.join(f'{which}: ' + ', '.join(numbers) for which, numbers in by.items())}"
        for word, by in shown.items() if by
    )  # fmt: skip


def overview(found: Sequence[tuple[Claim, list[Line]]], sweeps: Sweeps) -> str:
    shown = []
    for claim, lines in found:
        verdicts = Counter(line.verdict for line in lines)
        if verdicts.keys() <= {NOT_TRIED}:
            said = cost(claim.about["cost"], sweeps) if "cost" in claim.about else claim.about.get("said", NOT_TRIED)
        else:
            order = (CONFIRMED, IN_PART, NOT, NOT_TRIED)
            said = ", ".join(f"{verdicts[word]} {word}" for word in order if verdicts[word])
        small = [line.direction for line in lines if line.small]
        same = f"{small.count(SAME)} of {len(small)}" if small else NO_VALUE
        part = claim.about["part"]
        shown.append((f"[{part}](#{anchor(part)})" if lines else part, claim.about["says"], said, same))
    heads = ("in the paper", "claim", "verdicts: paper's net", "small CNN: same direction")
    return Table("", heads, tuple(shown)).markdown((0, 1, 2))


def anchor(heading: str) -> str:
    """Where a page of GitHub has this heading."""
    return "".join(letter for letter in heading.lower() if letter.isalnum() or letter in " -").replace(" ", "-")


def cost(about: Mapping[str, str], sweeps: Sweeps) -> str:
    places = [(sweeps(sweep), run) for sweep, run in (place.split("/") for place in about.values())]
    if not all(run in runs for runs, run in places):
        return NOT_TRIED
    ours, than = (runs[run].made["seconds"] / runs[run].made["round"] for runs, run in places)
    return f"a round took {ours / than:.1f} times FedAvg's; bytes: [methods](methods.md#methods)"


def stein(beside: Sequence[tuple[Claim, list[Line]]]) -> Iterator[str]:
    """What of the printed gain is there without the Stein term, by the paper's own tables."""
    rows = []
    for data, name in (("cifar10", "CIFAR-10"), ("cifar100", "CIFAR-100")):
        for alpha in (0.1, 0.5, 5.0):
            about = {"data": data, "alpha": alpha, "method": "fedavg+foogd"}
            sides = (about | {"method": "fedavg"}, about | {"lambda_a": 0.0}, about)
            base, without, full = (ACCURACY[0].printed(side) or 0.0 for side in sides)
            gains = [signed(full - base), signed(without - base), signed(full - without)]
            rows.append((f"{name}, alpha {alpha}", *(f"{one:.1f}" for one in (base, without, full)), *gains))
    _, of_base, of_without, of_full, gain, *parts = (text.lstrip("+") for text in rows[0])
    yield "### Most of the printed gain at alpha 0.1 cannot be the Stein term's"
    yield (
        "By Algorithm 2 SM3D never moves the backbone: it reads the features of a fixed extractor. So FOOGD on FedAvg "
        "without SAG *is* FedAvg in all but its detector, and must have its accuracy. On CIFAR-10 at alpha 0.1 it is "
        f"printed {parts[0]} points above it: {of_without} where FedAvg has {of_base}. FOOGD has {of_full}: of its "
        f"{gain} points over FedAvg {parts[1]} are left for the Stein term. The paper does not say what made the "
        "others; the public code trains FOOGD with another optimiser than FedAvg, with flips, and with the second view "
        "in the cross-entropy too. Accuracy on IN as printed:"
    )
    printed = ("", "FedAvg", "without SAG", "FOOGD", "gain", "of it without SAG", "left for SAG")
    yield Table("", printed, tuple(rows)).markdown((0,))
    yield (
        "In our code FOOGD without SAG is FedAvg bit for bit, so what a published run of ours gains over FedAvg is the "
        "Stein term's, or chance. What the second view alone gives, in the cross-entropy (+aug), stands beside it. The "
        "paper prints none of these:"
    )
    measured = [(claim.about["says"], line.cells()) for claim, lines in beside for line in lines if line.measured]
    shown = tuple((says, where, net, small, anchored) for says, (where, _, net, _, small, anchored) in measured)
    heads = ("", "difference", "paper's net", "small CNN", "anchored, not in the paper")
    yield Table("", heads, shown).markdown((0, 1, 4))


def other_out(sweeps: Sweeps) -> Iterator[str]:
    """Table 5 beside our rows, FPR95 / AUROC, and what it comes to where the images are the paper's."""
    places = {"published": LIST["columns"]["net"], "anchored": ["cifar10"]}
    shown = []
    real: dict[str, list[float]] = {name: [] for name in ("printed", *places)}
    for method in ("fedavg", "fedavg+foogd", "fedrod", "fedrod+foogd"):
        side = {"method": method, "data": "cifar10", "alpha": 0.1}
        for name, title in LIST["shown"].items():
            both = [Measure("", metric, "out", name) for metric in ("fpr95", "auroc")]
            found = {"printed": [measure.printed(side) for measure in both]}
            for profile, names in places.items():
                runs = [run for sweep in names for run in sweeps(sweep).values()]
                values = [list(by_seed(runs, side, measure, profile).values()) for measure in both]
                found[profile] = [fmean(one) if one else None for one in values]
            cells = [" / ".join(NO_VALUE if v is None else f"{v:.1f}" for v in one) if any(one) else NO_VALUE
                     for one in found.values()]  # fmt: skip
            shown.append((f"{method}, {_words(reported_detector(method))}", title, *cells))
            if method == "fedavg+foogd" and not title.endswith("*"):
                for column, one in found.items():
                    real[column] += [one[1]] if one[1] is not None else []
    means = {column: f"{fmean(values):.1f}" if values else NO_VALUE for column, values in real.items()}
    yield "### Other OUT sets, Table 5 beside our rows"
    yield (
        "CIFAR-10, alpha 0.1, FPR95 / AUROC; LSUN-C is of Table 1. The sets with a star are scene photographs, cut and "
        "resized in the way of LSUN: their numbers are not to be compared with the printed ones. Where the images are "
        "the paper's, or a part of them (iSUN, SVHN, Texture), the norm of FOOGD on FedAvg has an AUROC of "
        f"{means['printed']} in the mean as printed, {means['published']} in our published run (rate 0.01) and "
        f"{means['anchored']} in our anchored ones (rate 0.1, two runs of one seed)."
    )
    heads = ("method, detector", "OUT", "printed", "published", "anchored, not in the paper")
    yield Table("", heads, tuple(shown)).markdown((0, 1))


def section(sweeps: Sweeps) -> str:
    """All of it, from the heading on."""
    found = [(claim, list(claim.lines(sweeps))) for claim in map(Claim, LIST["claims"])]
    parts = ["## The claims of the paper", LIST["about"].strip(), "What was judged, by verdict:", judged(found)]
    parts.append(overview(found, sweeps))
    for part in dict.fromkeys(claim.about["part"] for claim, lines in found if lines):
        parts.append(f"### {part}")
        for claim, lines in found:
            if claim.about["part"] == part:
                parts += [f"**{claim.about['says']}**: `{claim.about['command']}`", table(lines)]
    parts += stein([(claim, list(claim.lines(sweeps))) for claim in map(Claim, LIST["beside"])])
    parts += other_out(sweeps)
    return "\n\n".join(parts)
