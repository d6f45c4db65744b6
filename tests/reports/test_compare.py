"""Comparing two runs: metrics with weights against copies of the samples, and intervals that cover the truth."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import norm

from foogd import FOOGD, Config, FedAvg, FedRoD
from foogd.cli import main
from foogd.core.errors import InputError
from foogd.metrics import aupr, auroc, fpr_at_tpr, threshold_at_tpr
from foogd.presets.loader import read_run_config
from foogd.reports.bootstrap import accepted, hits_from, running_sums, weighted_aupr, weighted_auroc, weighted_threshold
from foogd.reports.compare import compare_runs, compare_samples, detector_pair
from foogd.runs.files import read_rows
from foogd.runs.predictions import Samples, SampleSet, read_samples
from foogd.runs.run import Run

DATA = """
from dataclasses import replace
from foogd.data.synthetic import tiny_federation
import torch

def inside(root):
    f = tiny_federation(per_client=60, channels=1, size=8)
    return replace(f.train, test=torch.arange(len(f.train)) % 3 == 0)

def outside(root):
    return tiny_federation(per_client=20, channels=1, size=8).tests[-1].store

def other(root):
    return replace(inside(root), name="other")

def alike(root):
    f = inside(root)
    return replace(f, images=255 - f.images)
"""


# Metrics with weights


@pytest.fixture
def drawn(rng):
    """Scores with ties, weights of four resamples, and the same resamples written out."""
    rng = np.random.default_rng(3)
    inside, outside = np.sort(rng.integers(0, 12, 40) / 4), np.sort(rng.integers(2, 16, 30) / 4)
    w, v = rng.integers(0, 4, (4, 40)), rng.integers(0, 3, (4, 30))
    copies = [(np.repeat(inside, w[b]), np.repeat(outside, v[b])) for b in range(4)]
    return inside, w, outside, v, copies


def test_metrics_with_weights_are_metrics_of_copies(drawn):
    inside, w, outside, v, copies = drawn
    w_sums, v_sums = running_sums(w), running_sums(v)
    assert np.allclose(weighted_auroc(inside, w, outside, v_sums), [auroc(*both) for both in copies], atol=1e-12)
    found = weighted_aupr(inside, w_sums, outside, v, hits_from(outside, v_sums))
    assert np.allclose(found, [aupr(*both) for both in copies], atol=1e-6)
    tau = weighted_threshold(w_sums)
    assert np.array_equal(inside[tau], [threshold_at_tpr(both[0]) for both in copies])
    share = accepted(inside, tau, outside, v_sums) / v.sum(1)
    assert np.allclose(share, [fpr_at_tpr(*both) for both in copies], atol=1e-12)


@pytest.mark.parametrize("n", [1, 19, 20, 21, 40, 100])
def test_the_threshold_is_at_the_same_rank_for_every_number_of_samples(n):
    scores = np.arange(n) / n
    assert scores[weighted_threshold(running_sums(np.ones((1, n), dtype=int)))[0]] == threshold_at_tpr(scores)


# Whole samples


def sample_set(key, split, scores, *, labels=None, predictions=None, index=None):
    """A set of samples; `scores` by detector."""
    first = next(iter(scores.values()))
    n = first.shape[-1]
    labels = torch.zeros(n, dtype=torch.long) if labels is None else labels
    empty = torch.zeros(0, dtype=torch.long)
    return SampleSet(
        key=key, name=key.partition("/")[0], split=split, corruption=None, severity=None, unseen=False, clients=(0,),
        index=torch.arange(n) if index is None else index, labels=labels, client=torch.zeros(n, dtype=torch.long),
        predictions=labels if predictions is None else predictions,
        scores={name: torch.as_tensor(value) for name, value in scores.items()}, features=torch.zeros(0, 0),
        feature_labels=empty, feature_client=empty,
    )  # fmt: skip


def run_of(*sets):
    return Samples(1, "m", 0, sets)


def synthetic(rng, n, shift, skill):
    """Two classifiers and scores of the same images, correlated; their true differences are known."""
    common_in, common_out = rng.standard_normal(n), rng.standard_normal(n)
    sides = []
    for place in range(2):
        inside = (common_in + rng.standard_normal(n)) / 2**0.5
        outside = (common_out + rng.standard_normal(n)) / 2**0.5 + shift[place]
        hit = torch.as_tensor(rng.random(n) < skill[place])
        sides.append(
            run_of(
                sample_set("d", "in", {"s": inside}, predictions=torch.where(hit, 0, 1)),
                sample_set("o", "out", {"s": outside}),
            )
        )
    return sides


def test_the_interval_covers_the_true_difference_about_as_often_as_it_says():
    """AUROC of N(0,1) against N(m,1) is Φ(m/√2), FPR95 is Φ(z₀.₉₅ − m), and a share is a share."""
    shift, skill, trials = (0.8, 1.3), (0.7, 0.78), 150
    truth = {
        "auroc": norm.cdf(shift[1] / 2**0.5) - norm.cdf(shift[0] / 2**0.5),
        "fpr95": norm.cdf(norm.ppf(0.95) - shift[1]) - norm.cdf(norm.ppf(0.95) - shift[0]),
        "accuracy": skill[1] - skill[0],
    }
    covered = dict.fromkeys(truth, 0)
    rng = np.random.default_rng(0)
    for trial in range(trials):
        a, b = synthetic(rng, 200, shift, skill)
        for one in compare_samples(a, b, pairs=[("s", "s")], resamples=200, seed=trial):
            if one.metric in truth:
                covered[one.metric] += one.low <= truth[one.metric] <= one.high
    for metric, count in covered.items():
        # 95 % of 150 with a deviation of 1.8 %; a percentile interval of 200 resamples is a little narrow.
        assert 0.89 <= count / trials <= 0.995, (metric, count / trials)


def test_pairing_makes_intervals_narrow():
    rng = np.random.default_rng(1)
    scores, out = rng.standard_normal(300), rng.standard_normal(300) + 1
    a = run_of(sample_set("d", "in", {"s": scores}), sample_set("o", "out", {"s": out}))
    b = run_of(sample_set("d", "in", {"s": scores}), sample_set("o", "out", {"s": out + 0.05 * rng.random(300)}))
    [found] = [one for one in compare_samples(a, b, pairs=[("s", "s")], resamples=200) if one.metric == "auroc"]
    alone = 2 * 1.96 * (found.a * (1 - found.a) / 300) ** 0.5  # width for one run alone is about this
    assert found.high - found.low < alone / 4
    assert found.low > 0
    assert (found.same_sign, found.clear) == (1.0, True)


def test_a_shift_of_which_nothing_is_accepted_does_not_count():
    """As in the rows of a run: there is no accuracy of no images."""
    rng = np.random.default_rng(3)
    scores, hit = rng.standard_normal(200), torch.as_tensor(rng.random(200) < 0.7)
    inside = sample_set("d", "in", {"s": scores})
    mild = sample_set("c/fog/1", "in-c", {"s": scores}, predictions=torch.where(hit, 0, 1))
    strong = replace(mild, key="c/fog/5", scores={"s": torch.as_tensor(scores + 100)})
    found = [
        compare_samples(run_of(*sets), run_of(*sets), pairs=[("s", "s")], resamples=20)
        for sets in ((inside, mild), (inside, mild, strong))
    ]
    values = [[one.a for one in some if (one.metric, one.split) == ("accuracy_accepted", "in-c")] for some in found]
    assert values[0] == values[1]
    assert 0.5 < values[1][0] < 0.9
    assert all(one.low == one.high == 0 for one in found[1])


def test_a_run_does_not_differ_from_itself_and_the_order_of_samples_does_not_matter(rng):
    a, _ = synthetic(np.random.default_rng(2), 50, (1, 1), (0.5, 0.5))
    order = torch.randperm(50, generator=rng)
    mixed = run_of(*(
        replace(one, index=one.index[order], labels=one.labels[order], client=one.client[order],
                predictions=one.predictions[order], scores={"s": one.scores["s"][order]})
        for one in a.sets
    ))  # fmt: skip
    for one in compare_samples(a, mixed, pairs=[("s", "s")], resamples=50):
        assert (one.a, one.low, one.high) == (one.b, 0, 0)
        assert not one.clear


def test_resamples_draw_corrupted_copies_with_their_originals():
    """Where a copy has the answer of its original, the difference of IN-C and that of IN are the same in each draw."""
    rng = np.random.default_rng(4)
    hits = [torch.as_tensor(rng.random(80) < skill) for skill in (0.5, 0.7)]
    sides = [
        run_of(
            *(
                sample_set(key, split, {"s": np.zeros(80)}, predictions=torch.where(hit, 0, 1))
                for key, split in (("d", "in"), ("d-c/fog/1", "in-c"), ("d-c/fog/2", "in-c"))
            )
        )
        for hit in hits
    ]
    inside, shifted = [one for one in compare_samples(*sides, pairs=[], resamples=100) if one.metric == "accuracy"]
    assert (inside.split, shifted.split) == ("in", "in-c")
    assert (inside.low, inside.high, inside.same_sign) == (shifted.low, shifted.high, shifted.same_sign)


def test_two_runs_with_other_clients_are_compared_on_the_images_that_both_have():
    scores = np.arange(10) / 10
    a = run_of(sample_set("d", "in", {"s": scores}, predictions=torch.tensor([0] * 5 + [1] * 5)))
    b = run_of(sample_set("d", "in", {"s": scores[:4]}, index=torch.tensor([9, 1, 2, 12])))
    [found] = [one for one in compare_samples(a, b, pairs=[], resamples=20) if one.metric == "accuracy"]
    assert (found.a, found.b) == (pytest.approx(2 / 3), 1.0)  # images 1, 2 and 9


# Run folders


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """FedAvg, FedRoD+FOOGD (private heads) and FedAvg with another seed, on the same images."""
    place = tmp_path_factory.mktemp("runs")
    (place / "data.py").write_text(DATA)
    config = Config(
        data=f"{place}/data.py:inside", out=(f"{place}/data.py:outside",), corruptions=("gaussian_noise", "contrast"),
        severities=(2, 4), clients=3, alpha=0.5, rounds=1, batch_size=16, lr=0.05, device="cpu", local_epochs=2,
        detectors=("msp", "energy", "score_norm"),
    )  # fmt: skip
    wanted = {
        "avg": (replace(config, method="fedavg"), FedAvg()),
        "rod": (replace(config, method="fedrod+foogd"), FOOGD(FedRoD(), score_width=8)),
        "seed": (replace(config, method="fedavg", seed=5), FedAvg()),
        "other": (replace(config, method="fedavg", data=f"{place}/data.py:other"), FedAvg()),
        "alike": (replace(config, method="fedavg", data=f"{place}/data.py:alike"), FedAvg()),
        "strong": (replace(config, method="fedavg", constants="imagenet", out=()), FedAvg()),
    }
    for name, both in wanted.items():
        list(Run.create(place / name, *both).train())
    return place


@pytest.mark.parametrize("scope", ["weighted", "pooled"])
@pytest.mark.parametrize("other", ["rod", "seed"])
def test_the_values_are_those_of_the_rows(runs, scope, other):
    found = compare_runs(runs / "avg", runs / other, scope=scope, resamples=20)
    metrics = {one.metric for one in found.results}
    assert metrics == {"accuracy", "fpr95", "auroc", "aupr", "rejected", "accuracy_accepted", "auroc_joint"}
    for folder, side in ((runs / "avg", "a"), (runs / other, "b")):
        rows = [row for row in read_rows(folder) if row.scope == scope]
        for one in found.results:
            values = [
                row.value
                for row in rows
                if (row.metric, row.split, row.detector or "") == (one.metric, one.split, one.detectors[0])
            ]
            assert getattr(one, side) == pytest.approx(np.mean(values), abs=1e-6), one


def test_one_resample_is_the_metrics_of_its_images(runs):
    """With one resample the interval is a point: the same draw by hand gives it."""
    a, b = (read_samples(runs / name) for name in ("avg", "rod"))
    found = {
        (one.metric, one.split): one.low
        for one in compare_samples(a, b, pairs=[("msp", "msp")], scope="pooled", resamples=1, seed=7)
    }
    from foogd.reports.bootstrap import Universe as _Universe

    [weights] = list(_Universe(a, b, True).resampled(1, 7))
    assert all(row.sum() == row.shape[1] for row in weights.values())
    values = []
    for side in (a, b):
        [inside], [outside] = side.of("in"), side.of("out")
        w, v = (torch.as_tensor(weights[key][0]).long() for key in ("in", outside.key))
        order = inside.index.argsort()
        scores = inside.scores["msp"][order].repeat_interleave(w)
        out = outside.scores["msp"]
        outs = torch.cat([row.repeat_interleave(v) for row in (out if out.ndim == 2 else [out])])
        shifted = [one.correct[one.index.argsort()].repeat_interleave(w).double().mean() for one in side.of("in-c")]
        values.append((auroc(scores, outs), fpr_at_tpr(scores, outs), float(torch.stack(shifted).mean())))
    keys = (("auroc", "out"), ("fpr95", "out"), ("accuracy", "in-c"))
    for key, before, after in zip(keys, *values, strict=True):
        assert found[key] == pytest.approx(after - before, abs=1e-9), key


def test_what_differs_is_listed_and_what_is_left_out_is_noted(runs):
    found = compare_runs(runs / "avg", runs / "rod", resamples=10)
    settings = {key: both for key, *both in found.settings}
    assert settings["method"] == ["fedavg", "fedrod+foogd"]
    assert settings["lambda_m"] == ["–", "0.5"]
    assert "seed" not in settings
    assert found.environment == ()
    assert {one.detectors for one in found.results} == {("", ""), ("msp", "msp"), ("energy", "energy")}
    crossed = compare_runs(runs / "avg", runs / "rod", resamples=10, detectors=[("msp", "score_norm")])
    assert "MSP : score norm" in {row[1] for row in crossed.results_table().rows}
    other = compare_runs(runs / "avg", runs / "seed", resamples=10)
    assert any("seeds differ" in note for note in other.notes)
    weak = compare_runs(runs / "avg", runs / "strong", resamples=10)
    assert any("only in one" in note for note in weak.notes)
    assert any("constants" in note for note in weak.notes)
    assert {(one.metric, one.split) for one in weak.results} == {("accuracy", "in"), ("accuracy_accepted", "in")}


@pytest.mark.parametrize(
    ("other", "options", "words"),
    [
        ("nowhere", [], ["nowhere is not a run folder: it does not exist"]),
        ("other", [], ["not comparable", "synthetic", "other"]),
        ("alike", [], ["not comparable", "different images"]),
        ("bare", [], ["foogd evaluate"]),
        ("half", [], ["half has no answers about single images: it is at round 0 of 1", "foogd run", "--resume"]),
        ("broken", [], ["environment.json is damaged: versions is of the type list"]),
        ("namesakes", [], ["namesakes has two test sets called 'synthetic'"]),
        ("nodes", [], ["trained on Flower", "stay on the nodes"]),
        ("seed", ["--detector", "score_norm"], ["'score_norm'", "msp"]),
        ("seed", ["--detector", ":msp"], ["':msp'"]),
        ("seed", ["--detector", "my.py:fn"], ["no scores of detector 'my.py:fn'"]),
        ("seed", ["--detector", "msp:my.py:fn"], ["seed has no scores of detector 'my.py:fn'"]),
        ("seed", ["--detector", "my.py:fn:msp"], ["avg has no scores of detector 'my.py:fn'"]),
        ("seed", ["--out", "."], [". cannot be written: it is a folder"]),
        ("seed", ["--resamples", "0"], ["--resamples '0'"]),
        ("seed", ["--scope", "all"], ["'all'", "pooled"]),
        ("seed", ["--resamples", "3"], ["--resamples", "at least 10"]),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_sentence(runs, other, options, words, monkeypatch, capsys):
    if other in ("bare", "nodes", "half", "broken", "namesakes") and not (runs / other).exists():
        shutil.copytree(runs / "avg", runs / other)
        if other != "broken":
            (runs / other / "samples.safetensors").unlink()
    if other == "half":
        (runs / other / "rounds.jsonl").unlink()
    if other == "broken":
        (runs / other / "environment.json").write_text('{"versions": [1]}')
    if other == "namesakes":  # as earlier versions wrote them
        found = read_samples(runs / "avg")
        (clean,) = found.of("in")
        twice = replace(found, sets=tuple(replace(one, key=clean.key) for one in found.sets))
        changed = {other: twice}
        monkeypatch.setattr("foogd.reports.compare.read_samples", lambda folder: changed.get(folder.name, found))
    if other == "nodes":
        (runs / other / "flower.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["foogd", "compare", str(runs / "avg"), str(runs / other), *options])
    with pytest.raises(SystemExit) as end:
        main()
    printed, complaint = capsys.readouterr()
    assert (end.value.code, printed) == (2, "")  # nothing begins before everything is checked
    assert complaint.count("\n") == 1
    assert all(word in complaint for word in words), complaint


def test_images_with_other_labels_are_not_the_same_images(runs):
    a = read_samples(runs / "avg")
    [inside] = a.of("in")
    b = replace(a, sets=tuple(replace(one, labels=one.labels + 1) if one is inside else one for one in a.sets))
    with pytest.raises(InputError, match="different labels"):
        compare_samples(a, b, pairs=[], resamples=10)
    c = replace(a, sets=tuple(replace(one, index=one.index + 10**6) if one is inside else one for one in a.sets))
    with pytest.raises(InputError, match="no image"):
        compare_samples(a, c, pairs=[], resamples=10)


def test_scores_that_are_no_numbers_are_left_out(runs, monkeypatch):
    def broken(folder):
        found = read_samples(folder)
        sets = tuple(replace(one, scores={**one.scores, "msp": one.scores["msp"] * float("nan")}) for one in found.sets)
        return replace(found, sets=sets)

    monkeypatch.setattr("foogd.reports.compare.read_samples", broken)
    found = compare_runs(runs / "avg", runs / "seed", resamples=10)
    assert {one.detectors[0] for one in found.results} == {"", "energy"}


def test_a_folder_from_before_a_setting_existed_was_made_with_its_default(runs, tmp_path):
    shutil.copytree(runs / "avg", tmp_path / "old")
    path = tmp_path / "old" / "config.toml"
    new = ("aggregation", "trim", "update_bound", "severities")
    lines = [line for line in path.read_text().splitlines() if line.partition(" ")[0] not in new]
    path.write_text("\n".join(lines))
    found = {key: both for key, *both in compare_runs(runs / "avg", tmp_path / "old", resamples=10).settings}
    assert found.keys() <= {"severities"}  # which is not the default in these runs
    path.write_text("\n".join([*lines, 'aggregation = "median"']))
    found = {key: both for key, *both in compare_runs(runs / "avg", tmp_path / "old", resamples=10).settings}
    assert found["aggregation"] == ["mean", "median"]


def test_the_command_prints_both_tables_and_writes_them(runs, monkeypatch, capsys, tmp_path):
    words = ["foogd", "compare", runs / "avg", runs / "rod", "--detector", "msp", "--detector", "energy:score_norm"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in (*words, "--resamples", 50, "--out", tmp_path / "c.md")])
    main()
    printed = capsys.readouterr().out
    assert "lambda_m" in printed
    assert "energy : score norm" in printed
    text = Path(tmp_path / "c.md").read_text()
    assert "| setting | A | B |" in text
    assert "| AUROC OUT | MSP |" in text


def test_a_detector_is_found_by_those_that_the_runs_have():
    plain, own, other = "msp", "my.py:fn", "/place/of/my.py:gn"
    first, second = [plain, own], [plain, "energy", own, other]
    for text, pair in {
        "msp": (plain, plain),
        "msp:energy": (plain, "energy"),
        "my.py:fn": (own, own),
        "my.py:fn:energy": (own, "energy"),
        "msp:my.py:fn": (plain, own),
        "my.py:fn:my.py:fn": (own, own),
        f"msp:{other}": (plain, other),
        "msp:my.py:gn": (plain, other),  # the end of the path leaves no doubt
        "my.py:fn:of/my.py:gn": (own, other),
        "nope:energy": ("nope", "energy"),  # what is not there is said by whoever knows the runs
        "my.py:fn:nope": (own, "nope"),
        "my.py:gn": ("my.py:gn", other),
    }.items():
        assert detector_pair(text, first, second) == pair
    assert detector_pair("d:/my.py:fn", ["d:/my.py:fn"], ["d:/my.py:fn"]) == ("d:/my.py:fn",) * 2
    for text in ("", ":", "msp:", ":msp", "a:b:c", "my.py", "my.py:"):
        with pytest.raises(InputError, match="is not of the form NAME or A:B"):
            detector_pair(text, first, second)


def test_detectors_of_files_are_compared_by_the_command(runs, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text("def norm(output):\n    return -output.z.norm(dim=1)\n")
    for name in ("avg", "rod"):
        shutil.copytree(runs / name, name)
        Run.open(Path(name), read_run_config).evaluate(["my.py:norm"])
    words = ["foogd", "compare", "avg", "rod", "--resamples", "10"]
    for text in ("my.py:norm", "msp:my.py:norm", "my.py:norm:score_norm"):
        words += ["--detector", text]
    monkeypatch.setattr(sys, "argv", words)
    main()
    printed = capsys.readouterr().out
    for name in ("my.py:norm", "MSP : my.py:norm", "my.py:norm : score norm"):
        assert f" {name} " in printed


def test_the_hash_of_the_training_images_decides(runs, tmp_path):
    shutil.copytree(runs / "avg", tmp_path / "copy")
    assert compare_runs(runs / "avg", tmp_path / "copy", resamples=10).settings == ()
    about = json.loads((tmp_path / "copy" / "partition.json").read_text())
    (tmp_path / "copy" / "partition.json").write_text(json.dumps(about | {"content_hash": "else"}))
    with pytest.raises(InputError, match="different images"):
        compare_runs(runs / "avg", tmp_path / "copy", resamples=10)
