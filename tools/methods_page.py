"""Write docs/methods.md from the code: what each method adds, what travels, what stays, what it costs, its source.

python tools/methods_page.py          writes the page
python tools/methods_page.py --check  fails where the page is not what the code says
"""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from pathlib import Path

from foogd import Config, simulate
from foogd.cli.catalogue import listed_methods, summary_of, sums_of
from foogd.data.synthetic import tiny_federation
from foogd.detectors.registry import DETECTORS
from foogd.flower.options import on_flower
from foogd.methods import FOOGD, METHODS, AnchoredFOOGD, FedAvg, Method
from foogd.presets.loader import PROFILE
from foogd.tables.grid import Table

PAGE = Path(__file__).parent.parent / "docs" / "methods.md"
HEAD = """# Methods and detectors

This page is made from the code by `python tools/methods_page.py`; a test compares the two.

A method decides how clients train, a detector decides what is OUT. They are two axes: every method works with every
detector, but `score_norm` needs a score network, which `+foogd` adds. Any method takes `+foogd`, and one with the
setting `views` takes `+aug`.

## Methods

Bytes are measured, not estimated: one participant in its second round, for WideResNet-40-2 on 32x32 colour images of
ten classes, as a multiple of FedAvg's model (parameters, running statistics and counters of batch normalisation). What
travels only once, in the first round, stands in the column `once`.
"""
BETWEEN = """
`foogd methods` prints this table on the screen, with the settings. Someone whom the federation does not know has no
private part: a generic model answers, with the shared head or the mean of the private values.

## Settings

`--set key=value`; the defaults are the paper's where it prints them. What every run has besides stands in
[settings.md](settings.md).
"""
DETECTORS_HEAD = """
## Detectors

Larger always means more OUT. Those that must be fitted are fitted once after training, on sums over the clients'
training features; raw features never move.
"""
WHICH = """
**Which one?** All are asked of one trained model, so list several (`detectors`) and look. FOOGD in the numbers here is
the anchored variant, which is not in the paper. First say what OUT is:

- *Unlike anything that anybody has seen*: `score_span_all` with FOOGD, `span` without. On the embedded images they are
  good at near and far OUT alike, and accept the classes of other clients as they accept the client's own (5.8 and
  6.1 % rejected at alpha 0.1, where 5 % of the client's own are; [research](research.md), section 20). `foogd predict`
  rests on the first, where the run has it. On real images it was asked of small CNNs alone: on PACS 92.4 in the mean of
  four OUT sets (`score_norm` 93.3, `score_energy` 93.0, `energy` 85.4), on CIFAR-10 86.1 and 81.0 at alpha 5.0 and 0.1
  (83.9 and 81.6, 85.9 and 84.2, 76.4 and 71.2); and below chance, as `span`, on a ResNet-18 of four rounds that gets
  42 % right (sections 19 and 21 there). With WideResNet-40-2 `span` has 96.1 at alpha 5.0; with FedAvg at alpha
  0.1 `score_energy` has 93.3, `span` 92.3 and `score_norm` 91.1.
- *Unlike what this client has seen*: `score_span` with FOOGD, `span_own` without. A test gives a client its own
  classes, and by that they are the best or nearly so: 95.4 to 96.3 on every WideResNet of CIFAR-10 that was asked
  ([table](results.md#cifar10)), and the best on near and far OUT together on the embedded images. Of classes
  that only others have they reject a third to a half at alpha 0.1, `knn` and `score_own` more; with private heads
  (FedRoD) so do `energy` and `ash`. They keep one matrix; `score_near` and `knn` keep all features of the client.

Where that does not hold: with a small CNN on CIFAR-10, which gets 73 % right, the span alone is weak (`span_own`
79.7, `score_span` 86.2, `score_energy` 85.9, `knn` 87.4 at alpha 5.0; 75.8, 83.8, 84.2 and 86.0 at 0.1, where
`score_span_all` has 81.0; research, section 21); on PACS with ResNet-18 the score and all distances that were asked
are behind `energy` and `dice`, with a small CNN the norm is ahead (sections 19 and 21); on features that a strong
extra loss has shaped (a Stein term of full weight, FedATOL) `energy` is ahead of the span; on SVHN variants of `ash`
are ahead of `span_own` by up to 2.5 points on some models. `score_norm`, the paper's own, finds near OUT of the
embedded images and is behind on far OUT. On the embedded images all of ours reject more of IN-C than `energy` does
(29 to 32 % against 18), on CIFAR-10 as much as `energy`.
"""
UNPRINTED = """
## What the paper does not print

`+foogd` runs what is printed: Eq. 4 to 12, Algorithms 1 to 3, lambda_m 0.5, lambda_a 0.05, cross-entropy on the
originals, a score model that knows its noise level, weighted averaging, the norm of the score as detector. Everything
else had to be chosen. Choices about the score network were made on features that were computed once, by `python
benchmarks/score_search.py`; [research](research.md) has what the alternatives gave. Of a choice that was made with
OOD sets in view only the tables of what was left out are evidence.
"""
CHOICES = (
    (
        "space of the features",
        "latent features z",
        "as they are",
        (
            "u = (√d z/‖z‖ − m)/c; m their mean, c² their mean variance a dimension, measured over all "
            "clients before each round and test"
        ),
        (
            "centring and c change no density: it is the same method on z with levels c·sigma, but the Stein "
            "term and raw Eq. 4 scale by c², the start of Langevin is N(m, c²I), and d + 2 sums a client go "
            "up in a round. **Equal length is another density, and a choice**: in length, images of other "
            "classes differ little and the wrong way"
        ),
    ),
    (
        "noise levels",
        "sigma → 0",
        "0.01 to 1, as many as asked, of raw features",
        "ten levels from 0.1 to 3, in units of c, one drawn for each image",
        "an absolute sigma of 1 is 2 to 7 spreads of trained features",
    ),
    (
        "weight of a level in Eq. 4",
        "1 at its level",
        "sigma² on −v",
        "sigma²",
        "every level's loss has the same size",
    ),
    (
        "level that is read (Eq. 9, 11)",
        "sigma → 0",
        "all at once: the network does not know its level",
        "0.5 spreads",
        (
            "AUROC 79.4 in the mean of three kinds of nets, 77.6 at 0.1 and 80.1 at 1; but in whole runs of the demo "
            "88.3, and 82.8 at 1. **This does not follow the sentence on sigma → 0**; `--set sigma=0.1` does"
        ),
    ),
    (
        "network",
        "–",
        "Linear-LayerNorm-ELU-Linear, 1024 wide",
        (
            "the same with one more input for the level, and a skip of the score of N(0, I) (Karras et al., "
            "NeurIPS 2022)"
        ),
        (
            "without the skip every level says nearly the same. With its last layer at 0 the network is the "
            "distance to the mean: the control beside every table"
        ),
    ),
    (
        "optimiser of the score network",
        "SGD for the task models",
        "SGD 0.01",
        "Adam 0.001, gradients clipped at 5",
        (
            "SGD 0.01 with momentum 0.9 and that clip is within 1 point in long fits; plain SGD diverged on levels in "
            "units of c, and hardly learns in few rounds without them"
        ),
    ),
    (
        "features that it learns",
        "a fixed feature extractor",
        "of the training pass",
        "of a pass in eval mode, without gradients",
        "detection sees these",
    ),
    (
        "Langevin",
        "z0 ~ N(0, I), T steps",
        "step 0.01, ten steps",
        "the same start, step 0.5, ten steps, at the level that is read",
        "the chain must be able to move: its time is step times T",
    ),
    (
        "bandwidths",
        "a Gaussian kernel",
        "MMD: 1/2 and 1 times the mean squared distance; KSD: median/log(n+1)",
        "the same",
        "",
    ),
    (
        "unit of length of the Stein term",
        "–",
        "the network's own",
        "units of the level: sigma²·KSD",
        "KSD has the unit 1/length²: raw at a level of 0.1 it destroys accuracy (35 % for 75)",
    ),
    (
        "Fourier view",
        "a mix of amplitudes (FACT)",
        "share uniform in [0, 1], clipped at 225",
        "share uniform in [0, 1], partner of the same client",
        "",
    ),
    (
        "rounds, batch, flips, size of the WRN, severities",
        "–",
        "100, 128, for FOOGD only, 40-2, all",
        "100, 128, for all methods alike, 40-2, all",
        "",
    ),
)
ANCHORED = """
The **anchored** variant (`--set profile=anchored`) is ours and not in the paper: one Gaussian a class under the score
network, logarithmic and whitened features, both views in the cross-entropy, a smaller Stein term inside a logarithm. It
was chosen with OOD sets in view, and needs sums over each class's features. All that shows its numbers says so.
"""
BASELINES = """
## What still differs from the published baselines

Of each baseline what its paper or its authors' code does otherwise, and what that does on the embedded data: `foogd run
demo --method NAME --set detectors=msp,energy` with the setting, seed 0, ten rounds of one epoch; FOSTER at alpha 0.1,
where clients lack classes. Numbers are the accuracy on IN and IN-C, then the AUROC of MSP against near and far OUT. One
seed each: a point or two may be chance. FedAvg has 75.7, 55.4; 57.3, 96.1, at alpha 0.1 75.3, 56.2; 57.6, 95.6. FedLN
has nothing left.
"""
DEVIATIONS = (
    ("FedRoD", "a hypernetwork or a linear private head, started at random", "linear, started at 0",
     "84.6, 68.8; 67.1, 89.9; at random (one line changed) 84.8, 68.8; 67.7, 90.0"),
    ("FOSTER", "the least likely of 10,000 outliers, from the mean and spread of a queue",
     "of 1,000, generated anew each step",
     "87.2, 80.0; 72.2, 91.2; without selection (`select=0`) 87.3, 80.0; 72.2, 91.1, without exposure (`beta=0`) 87.5, "
     "80.1; 73.9, 91.1: the gain over FedAvg is that of the private heads"),
    ("FOSTER", "a client is tested over the classes that it has", "over all; `restrict_to_local_classes=true`",
     "87.2, 80.0; over its own 87.2, 80.0; 72.8, 90.9"),
    ("FedATOL", "a GAN that was trained on pooled images", "the clients' GAN; `generator=central` pools",
     "78.1, 73.3; 61.7, 92.0; `central` 79.0, 63.5; 70.1, 95.0. The clients' GAN trained in all ten rounds "
     "(`gan_rounds=10`) 71.7, 64.0; 55.3, 91.4, an untrained one (`random`) 79.2, 75.8; 66.5, 93.1: no GAN of so few "
     "steps is better than that"),
    ("FedATOL", "ten epochs on a converged net", "from the start of the run; `--init RUN`",
     "ten rounds from the finished FedAvg run 80.2, 75.9; 71.4, 91.6"),
    ("FedATOL", "outliers drawn once an epoch", "at each step", "no setting, not measured"),
    ("FedT3A", "detection on the head as it was trained (FOOGD's code)", "on adapted logits; `adapt=false`",
     "75.0, 56.0; 73.9, 98.9; with `adapt=false` FedAvg's numbers: 57.3 and 96.1"),
    ("FedT3A", "batches of 32 on IN-C (FOOGD's code)", "128 everywhere; `test_batch=32`",
     "with 32 everywhere 75.0, 55.8; 74.3, 99.1"),
    ("FedIIR", "gradients in train mode; each client counts alike", "the mean gradient in eval mode; by images",
     "76.7, 55.7; 58.2, 95.4: the whole penalty moves it no further than that from FedAvg"),
    ("FedTHE", "a private head started at random, from round 1", "at 0, from round 2",
     "79.5, 62.6; 58.9, 93.6; as published (two lines changed) 80.1, 62.5; 59.1, 93.7"),
    ("FedTHE", "its code blends history and image anew in each of the 20 steps", "once, as in the paper's formula",
     "no setting, not measured"),
    ("FedICON", "100 epochs of the private classifier (a co-author's code)", "5; `personal_epochs=100`",
     "75.8, 75.2; 68.5, 88.0; with 100 epochs 77.2, 77.0; 65.3, 86.3"),
    ("FedICON", "the contrast begins on a net that FedAvg trained (an option there)", "untrained; `--init RUN`",
     "from the finished FedAvg run 82.4, 81.4; 67.0, 86.1"),
    ("FedICON", "rate of the contrast 0.005", "the run's; `body_lr=0.005`",
     "64.4, 63.2; 59.0, 85.8: too slow for ten rounds"),
    ("FedICON", "steps on test batches with their own statistics, then a changed image is predicted",
     "with trained statistics, the image itself; `tta=none` takes no step", "without steps 75.8, 75.2; 68.3, 83.6"),
    ("FedICON", "features pass a projection before the contrast", "no projection", "no setting, not measured"),
)  # fmt: skip
IMAGES = """
![Images of FedATOL's generator](fedatol_images.png)

What FedATOL's clients make together (`python benchmarks/gan_images.py docs/fedatol_images.png`): a line each after 0,
5, 10 and 20 rounds of the demo, eight auxiliary images left, eight outliers right. A client makes about ten steps a
round here, and clothes come with twenty rounds, the default. With CIFAR's presets a round has 200 steps, at a fifth
of the rate. The demo trains the GAN in its first three rounds alone, to be done in two minutes: its images are blobs.
"""
COLUMNS = (
    "method", "what it adds", "what travels", "down", "up", "once", "stays on the client", "extra passes", "on Flower",
    "source",
)  # fmt: skip


def traffic(method: Method) -> tuple[float, float, float]:
    """Bytes down and up of one participant in the second round, and what came down once more in the first."""
    whole = tiny_federation(clients=2, classes=10, size=32, per_client=20, outs=False)
    federation = replace(whole, train_indices=tuple(own[:2] for own in whole.train_indices))  # one step is enough
    config = Config(backbone="wrn40-2", rounds=40, batch_size=2, device="cpu")
    results = simulate(method, federation, config)
    first, second = next(results), next(results)
    people = len(second.participants)
    return second.bytes_down / people, second.bytes_up / people, (first.bytes_down - second.bytes_down) / people


def times(value: float, unit: float) -> str:
    return f"{value / unit:.5g}" if value > 0 else "–"


def page() -> str:
    unit = traffic(FedAvg())[0]
    rows = []
    for name, built in listed_methods().items():
        down, up, once = traffic(built)
        bytes_ = (times(down, unit), times(up, unit), times(once, unit))
        adds = (f"`{name}`", summary_of(name, built).rstrip("."))
        rows.append((*adds, built.travels, *bytes_, built.keeps, built.passes, on_flower(built), built.paper))
    text = [HEAD, Table("", COLUMNS, tuple(rows)).markdown((0, 1, 2, 6, 7, 8, 9)), BETWEEN]
    for title, cls in (*METHODS.items(), ("+foogd", FOOGD), ("+foogd with `profile=anchored`", AnchoredFOOGD)):
        built = cls()
        known = [item for item in fields(built) if "help" in item.metadata]
        lines = [(item.name, f"`{getattr(built, item.name)}`", item.metadata["help"]) for item in known]
        if cls is FOOGD:
            name, default, meaning = PROFILE
            lines.insert(0, (name, f"`{default}`", meaning))
        if lines:
            columns = ("setting", "default", "meaning")
            text += [f"### {title}", "", Table("", columns, tuple(lines)).markdown((0, 1, 2)), ""]
    columns = ("choice", "printed", "authors' code", "ours", "why")
    text += [UNPRINTED, Table("", columns, CHOICES).markdown((0, 1, 2, 3, 4)), ANCHORED]
    columns = ("method", "published", "here", "effect")
    text += [BASELINES, Table("", columns, DEVIATIONS).markdown((0, 1, 2, 3)), IMAGES]
    found = tuple((f"`{n}`", d.description, sums_of(d), d.paper) for n, d in DETECTORS.items())
    headings = ("detector", "score", "what travels, once", "source")
    text += [DETECTORS_HEAD, Table("", headings, found).markdown((0, 1, 2, 3)), WHICH]
    return "\n".join(text)


def main() -> None:
    wanted = page()
    if "--check" in sys.argv[1:]:
        if not PAGE.is_file() or PAGE.read_text() != wanted:
            sys.exit(f"{PAGE.name} is not what the code says: run python tools/methods_page.py")
    else:
        PAGE.write_text(wanted)


if __name__ == "__main__":
    main()
