"""The wall: imports go one way between the rooms of the package, and none go in a circle, lazy ones included."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import foogd

SOURCE = Path(foogd.__file__).parent
# A room may import from those before it. Files of the package's own folder are rooms, too.
ROOMS = (
    "core", "config", "functional", "metrics", "data", "nets", "methods", "engine", "detectors", "detect", "simulate",
    "evaluation", "testing", "presets", "tables", "runs", "model", "reports", "experiments", "flower", "cli",
    "__main__",
)  # fmt: skip
LONGEST = {"engine/graph.py": 516}


def modules():
    """Name → file of every module but the package itself, which gathers the public names."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found |= {name: path} if name else {}
    return found


def imports(name, path, known):
    """The modules that one imports when it runs; what only type checkers see does not count."""
    tree = ast.parse(path.read_text())
    home = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    hidden = {id(inner) for node in tree.body if "TYPE_CHECKING" in ast.dump(node) and isinstance(node, ast.If)
              for inner in ast.walk(node)}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and id(node) not in hidden:
            place = [*home[: len(home) + 1 - node.level], *(node.module or "").split(".")]
            base = ".".join(filter(None, place))
            for alias in node.names:
                target = f"{base}.{alias.name}".strip(".")
                yield target if target in known else base


def test_imports_go_one_way():
    known = modules()
    assert {name.partition(".")[0] for name in known} == set(ROOMS)
    for name, path in known.items():
        for target in filter(None, imports(name, path, known)):
            here, there = (ROOMS.index(one.partition(".")[0]) for one in (name, target))
            assert there <= here, f"{name} imports {target}, whose room comes later"


def test_no_module_waits_for_itself():
    known = modules()
    graph = {name: {target for target in imports(name, path, known) if target != name} for name, path in known.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_the_house_stays_small():
    assert len([path for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"]) <= 14
    long = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in modules().values()}
    assert {name: lines for name, lines in long.items() if lines > LONGEST.get(name, 500)} == {}
