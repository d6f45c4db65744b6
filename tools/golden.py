"""The same commands at an earlier commit and now, file by file: a change that only moves code moves no bit.

python tools/golden.py BASE [--keep DIR]    # BASE is a commit; its run folders are kept in DIR for the next time

Each command is run by the package of BASE, from a worktree of its own, and by the package as it stands here. Rows and
weights must be the same, bit for bit; run names, times and versions are set aside.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors.numpy import load_file

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "src" / "foogd" / "data" / "embedded" / "fashion.npz"
TINY = [
    *("clients=3", "rounds=2", "corruptions=brightness", "severities=3", "device=cpu"),
    *("detectors=msp,energy,knn,react,vim,span,span_own,gaussian,mahalanobis", "calibration=0.2"),
]
SCORES = ["score_width=32", TINY[-2] + ",score_norm,score_energy,score_span,score_span_all"]
FLOWER = """
from pathlib import Path
from flower_grid import DATA, SETTINGS, make_nodes
from foogd.flower.server import serve
Path("tiny.py").write_text(DATA)
Path("tiny.toml").write_text(SETTINGS)
given = {"preset": "tiny.toml", "data": "synthetic", "run_dir": "flower", "poll": 0.01, "method": "fedrod+foogd"}
serve(make_nodes("nodes"), given)
"""


def demo(name: str, *settings: str) -> list[str]:
    """The words of a small run in the folder of its name."""
    given = [word for one in (*TINY, *settings) for word in ("--set", one)]
    return ["run", "demo", "--out", name, *given]


def commands() -> dict[str, list[str]]:
    """Folder → words of `foogd`."""
    mine = ["data=mine", "sites=folder", "clients=0", "partition=by_domain", "out=fashion_out"]
    return {
        "rod": demo("rod", "method=fedrod+foogd", "profile=published", *SCORES),
        "anchored": demo("anchored", "method=fedavg+foogd", "profile=anchored", *SCORES),
        "icon": demo("icon", "method=fedicon"),
        "sites": demo("sites", "method=fedavg", *mine),
    }


def make_images(folder: Path) -> None:
    """Images of two classes at two sites, as a user has them."""
    with np.load(IMAGES) as packed:
        images, labels = packed["images"], packed["labels"]
    for site in range(2):
        for label in range(2):
            place = folder / f"site{site}" / f"class{label}"
            place.mkdir(parents=True)
            for number in np.flatnonzero(labels == label)[site * 40 : site * 40 + 40]:
                Image.fromarray(images[number].squeeze()).save(place / f"{number}.png")


def write(source: Path, place: Path) -> None:
    """Every run by the package of `source`, in the new folder `place`."""
    place.mkdir(parents=True)
    make_images(place / "mine")
    path = os.pathsep.join((str(source / "src"), str(source / "tests"), str(source / "tests" / "helpers")))
    about = {"cwd": place, "env": {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}}
    foogd = [sys.executable, "-m", "foogd"]
    for words in commands().values():
        subprocess.run([*foogd, *words], check=True, stdout=subprocess.DEVNULL, **about)
    subprocess.run([sys.executable, "-c", FLOWER], check=True, stdout=subprocess.DEVNULL, **about)
    # Killed after its second round, and resumed.
    words = demo("killed", "method=scaffold", "rounds=6")
    with subprocess.Popen([*foogd, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **about) as run:
        log = place / "killed" / "rounds.jsonl"
        while run.poll() is None and not (log.is_file() and log.read_text().count("\n") >= 2):
            time.sleep(0.02)
        run.send_signal(signal.SIGKILL)
    subprocess.run([*foogd, *words, "--resume"], check=True, stdout=subprocess.DEVNULL, **about)


def rows(folder: Path) -> list[dict[str, object]]:
    found = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in ("run", "seconds")} for row in found]


def weights(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a run's folder but those of single predictions' files, by file and name."""
    found = {}
    for file in sorted(folder.rglob("*.safetensors")):
        kind = file.parent.name if file.parent != folder else file.stem  # file names have a digest in them
        found |= {f"{kind}/{name}": value for name, value in load_file(file).items()}
    return found


def compare(old: Path, new: Path) -> list[str]:
    """What differs between two folders of runs, a sentence each."""
    flaws = []
    for name in (*commands(), "flower", "killed"):
        before, now = rows(old / name), rows(new / name)
        flaws += [f"{name}: {len(before)} rows before, {len(now)} now"] if len(before) != len(now) else []
        different = [f"{one} before, {other} now" for one, other in zip(before, now, strict=False) if one != other]
        flaws += [f"{name}: {len(different)} rows differ; the first: {different[0]}"] if different else []
        mine, theirs = weights(old / name), weights(new / name)
        flaws += [f"{name}: {key} is in one of them only" for key in sorted(mine.keys() ^ theirs.keys())]
        shared = sorted(mine.keys() & theirs.keys())
        flaws += [f"{name}: {key} differs" for key in shared if mine[key].tobytes() != theirs[key].tobytes()]
        print(f"{name}: {len(now)} rows, {len(shared)} tensors, {sum(mine[key].size for key in shared)} values")
    return flaws


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare run folders of a commit with those of the package as it is.")
    parser.add_argument("base", help="a commit")
    parser.add_argument("--keep", type=Path, default=ROOT / "build" / "golden", help="where its run folders stay")
    asked = parser.parse_args()
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", asked.base], check=True, capture_output=True, text=True).stdout.strip()
    old = asked.keep.resolve() / commit[:12]
    with tempfile.TemporaryDirectory() as scratch:
        if not (old / "done").is_file():
            shutil.rmtree(old, ignore_errors=True)
            subprocess.run([*git, "worktree", "add", "--quiet", "--detach", f"{scratch}/base", commit], check=True)
            try:
                write(Path(scratch, "base"), old)
            finally:
                subprocess.run([*git, "worktree", "remove", "--force", f"{scratch}/base"], check=True)
            (old / "done").touch()
        write(ROOT, Path(scratch, "now"))
        flaws = compare(old, Path(scratch, "now"))
    print(*flaws or [f"The same as {commit[:12]}, bit for bit."], sep="\n")
    return 1 if flaws else 0


if __name__ == "__main__":
    sys.exit(main())
