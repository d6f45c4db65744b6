"""Write docs/settings.md from the code: every setting of a run, as `foogd settings` prints them.

python tools/settings_page.py          writes the page
python tools/settings_page.py --check  fails where the page is not what the code says
"""

from __future__ import annotations

import sys
from pathlib import Path

from foogd.cli.settings import COLUMNS, ELSEWHERE, run_groups
from foogd.tables.grid import Table

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
HEAD = """# Settings of a run

This page is made from the code by `python tools/settings_page.py`; a test compares the two.

`foogd settings` prints it on the screen, `foogd settings rounds clients` two of them. Each is changed with
`--set NAME=VALUE`, or by a line `NAME = VALUE` in a TOML file that `foogd run` gets in place of a preset; a list may
also be given as `--set out=digits,fashion_out`. The defaults are those of a file that says nothing; a preset has
values of its own. What a run was made with stands in its `config.toml`.
"""


def page() -> str:
    text = [HEAD]
    for title, lines in run_groups().items():
        rows = tuple((f"`{name}`", f"`{default}`", allowed, meaning) for name, default, allowed, meaning in lines)
        text += [f"## {title}", "", Table("", COLUMNS, rows).markdown((0, 1, 2, 3)), ""]
    words = ELSEWHERE.replace("`foogd methods` lists them", "`foogd methods` and [methods.md](methods.md) list them")
    return "\n".join([*text, "## Of methods", "", words, ""])


def main() -> None:
    wanted = page()
    if "--check" in sys.argv[1:]:
        if not PAGE.is_file() or PAGE.read_text() != wanted:
            sys.exit(f"{PAGE.name} is not what the code says: run python tools/settings_page.py")
    else:
        PAGE.write_text(wanted)


if __name__ == "__main__":
    main()
