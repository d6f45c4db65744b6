"""Pages that are made from the code say what the code says."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_page_of_methods_is_what_the_code_says():
    spec = importlib.util.spec_from_file_location("methods_page", ROOT / "tools" / "methods_page.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert (ROOT / "docs" / "methods.md").read_text() == tool.page(), "run python tools/methods_page.py"
