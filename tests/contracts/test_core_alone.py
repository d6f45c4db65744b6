"""The core works where only torch and numpy are installed, and importing it fetches nothing else."""

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
OUTER = (
    "safetensors", "typer", "click", "rich", "PIL", "pooch", "sklearn", "matplotlib",
    "scipy", "tomli_w", "jaxtyping", "beartype", "requests", "pytest",
)  # fmt: skip

# Of all that is installed, only torch, numpy and what those two need is there; whoever opens a connection ends.
ALONE = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in REFUSED else self.finder.find_spec(name, path, target)

def stay(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        raise SystemExit(f"the network was used: {event} {arguments}")

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
sys.addaudithook(stay)
"""


def needed(*names):
    """The importable names of these packages and of all that they require."""
    found, waiting = set(), list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        if name not in found:
            found.add(name)
            waiting += [re.match(r"[\w.-]+", text).group() for text in requires if "extra ==" not in text]
    distributions = metadata.packages_distributions()
    return {
        top for top, owners in distributions.items() if {owner.lower().replace("_", "-") for owner in owners} & found
    }


ALLOWED = {*needed("torch", "numpy"), "foogd"}
REFUSED = sorted({*metadata.packages_distributions(), *OUTER} - ALLOWED)


def python(code, *, alone, refused=REFUSED):
    start = f"REFUSED = frozenset({refused!r})\n{ALONE}" if alone else ""
    start += f"import sys\nsys.path.insert(0, {str(SOURCE)!r})\n"
    command = [sys.executable, "-c", start + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_torch_and_numpy_need_none_of_the_outer_packages():
    assert {"torch", "numpy"} <= ALLOWED
    assert not ALLOWED & set(OUTER)


@pytest.mark.parametrize("name", ["safetensors", "typer", "sklearn", "scipy"])
def test_the_others_really_cannot_be_imported(name):
    done = python(f"import {name}", alone=True)
    assert done.returncode == 1
    assert f"No module named {name!r}" in done.stderr


def test_the_network_really_cannot_be_used():
    done = python("import socket; socket.create_connection(('127.0.0.1', 9))", alone=True)
    assert done.returncode == 1
    assert "the network was used" in done.stderr


CORE = """
import torch
import foogd
from foogd import FOOGD, AnchoredFOOGD, Config, FedAvg, FedRoD, evaluate, simulate
from foogd.data.corrupt import CORRUPTIONS, corrupt
from foogd.data.partition import by_domain, dirichlet, pathological
from foogd.data.synthetic import tiny_federation
from foogd.detect import DETECTORS
from foogd.engine.eager import EagerEngine
from foogd.tables.results import Report
from foogd.runs import make_federation
from foogd.testing import check_detector

torch.set_num_threads(1)
federation = tiny_federation()
config = Config(rounds=1, batch_size=16, device="cpu")
for method in (FOOGD(FedRoD()), AnchoredFOOGD(), FedAvg(views=2)):
    engine = EagerEngine(method, federation, config)
    [result] = simulate(method, federation, config, engine)
    assert not result.refused
    rows = evaluate(engine, result.state, DETECTORS, method="m")
    wanted = {name for name, detector in DETECTORS.items() if detector.applies(method.readout(engine.nets()))}
    assert isinstance(method, FedAvg) == ("score_norm" not in wanted)
    assert isinstance(method, AnchoredFOOGD) == ("score_own" in wanted)  # which asks for Gaussians of classes
    assert {row.detector for row in rows} == {None, *wanted}
    assert "ACC-IN" in Report.of(rows).headline().markdown()
for detector in DETECTORS.values():
    check_detector(detector)
images = torch.arange(2 * 16 * 16 * 3).remainder(256).to(torch.uint8).view(2, 16, 16, 3)
lacking = set()
for name in CORRUPTIONS:
    try:
        assert corrupt(images, name, 3, 0).shape == images.shape
    except foogd.InputError as error:
        assert "install" in str(error), error
        lacking.add(name)
assert lacking <= {"frost", "jpeg_compression"}, lacking  # photographs and a codec are no mathematics
labels = torch.arange(60) % 6
for parts in (
    dirichlet(labels, clients=3, alpha=0.5, seed=0),
    pathological(labels, clients=3, classes_per_client=2, seed=0),
    by_domain(labels),
):
    assert torch.equal(torch.cat(list(parts)).sort().values, torch.arange(60))

small = Config(rounds=1, clients=60, participation=0.02, corruptions=("brightness",), severities=(1,), device="cpu")
embedded = make_federation(small)
assert [test.split for test in embedded.tests] == ["in", "in-c", "out", "out"]
method = FOOGD(FedAvg(), score_width=16)
[result] = simulate(method, embedded, small)
assert len(result.participants) == 1 and not result.refused
print("all of it")
"""


def test_the_core_works_with_torch_and_numpy_alone():
    done = python(CORE, alone=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all of it"


SCIKIT_LEARN = sorted(needed("scikit-learn") - needed("torch", "typer", "pooch", "matplotlib"))

COMMANDS = """
import os
os.chdir(PLACE)
from foogd.cli import main
for words in (
    "run tiny.toml --method fedavg --out a --set clients=2 --set detectors=['msp'] --set corruptions=[]",
    "report a --out page.html",
    "figures a --out figures",
):
    sys.argv = ["foogd", *words.split()]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (words, end.code)
"""


def test_commands_work_without_scikit_learn_and_all_that_comes_with_it(tmp_path):
    assert {"sklearn", "threadpoolctl", "scipy"} <= set(SCIKIT_LEARN)
    made = "from foogd.data.synthetic import tiny_federation\ndef fn(root): return tiny_federation().train\n"
    (tmp_path / "data.py").write_text(made)
    (tmp_path / "tiny.toml").write_text("data = 'data.py:fn'\nout = ['digits']\nrounds = 1\nbatch_size = 8\n")
    done = python(f"PLACE = {str(tmp_path)!r}\n{COMMANDS}", alone=True, refused=SCIKIT_LEARN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("pip install scikit-learn threadpoolctl") == 2
    assert (tmp_path / "page.html").read_text().count("pip install scikit-learn threadpoolctl") == 1
    assert (tmp_path / "figures" / "scores.pdf").is_file()
    assert not (tmp_path / "figures" / "tsne.pdf").exists()


IMPORT = """
import json
import re
import torch, numpy
before = set(sys.modules)
import foogd, foogd.runs, foogd.tables.results, foogd.testing
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""


def test_importing_the_core_imports_nothing_else_even_where_it_is_installed():
    done = python(IMPORT, alone=False)
    assert done.returncode == 0, done.stderr
    found = set(json.loads(done.stdout)) - set(sys.stdlib_module_names)
    assert "foogd" in found
    assert found <= ALLOWED
