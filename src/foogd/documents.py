"""Reports as text: Markdown to read, CSV to compute with, LaTeX to print."""

from __future__ import annotations

from collections.abc import Sequence

from .findings import findings, headline, joint_grid, paper_grid
from .published import NOTE, departures
from .records import Collection, Scene
from .report import Grid, Measure, latex_text, to_csv


def markdown_report(collection: Collection) -> str:
    """Findings, the paper's table, all detectors and the joint view."""
    text = [f"# {headline(collection)}", ""]
    text += [f"- **{one.title}.** {one.text}" for one in findings(collection)]
    printed = False
    for scene in collection.scenes:
        place = f": {scene.title}" if scene.title else ""
        grid = paper_grid(scene)
        printed = printed or grid.has_published
        text += ["", f"## Results{place}", "", f"({grid.title})", "", grid.markdown()]
        marks = {line.method: "; ".join(line.marks) for line in grid.lines if line.marks}
        text += ["", *(f"† {method}: not the published settings: {why}." for method, why in marks.items())]
        for name in scene.report.out_sets():
            for metric in ("auroc", "fpr95"):
                table = scene.report.matrix(name, metric)
                text += ["", f"## {metric.upper()} against {name}{place}", "", table.markdown((0,))]
        joint = joint_grid(scene)
        if joint is not None:
            text += ["", f"## Joint view{place}", "", "(the threshold lets 95 % of IN pass)", "", joint.markdown()]
    if printed:
        text += ["", f"In brackets: the published number and the difference to it. {NOTE}"]
    return "\n".join(text) + "\n"


def csv_report(collection: Collection) -> str:
    """Every mean over seeds in long form, with every detector and with the published numbers."""
    grids = []
    for scene in collection.scenes:
        columns = [*scene.report.paper_columns(), *scene.report.joint_columns()]
        grids.append((scene.title, _everything(scene, columns)))
    return to_csv(grids)


def latex_report(collection: Collection) -> str:
    """One table a setting; needs the package booktabs."""
    text = [r"% \usepackage{booktabs}"]
    for scene in collection.scenes:
        grid = paper_grid(scene)
        notes = [f"{grid.title}; the best is bold"]
        notes += ["published numbers (Liao et al., NeurIPS 2024) in brackets"] if grid.has_published else []
        marks = dict.fromkeys("; ".join(line.marks) for line in grid.lines if line.marks)
        notes += [f"$^\\dagger$ {latex_text(why)}" for why in marks]
        caption = f"{latex_text(headline(collection))}{latex_text(', ' + scene.title) if scene.title else ''}"
        plain = "; ".join(note if note.startswith("$") else latex_text(note) for note in notes)
        text += [
            "",
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{caption}: {plain}.}}",
            grid.latex(),
            r"\end{table}",
        ]
    return "\n".join(text) + "\n"


def _everything(scene: Scene, columns: Sequence[Measure]) -> Grid:
    return scene.report.grid(
        columns,
        lambda method, known: known,
        settings={group.label: {} if group.stand_in else group.settings for group in scene.groups},
        departs={group.label: departures(group.settings) for group in scene.groups},
    )
