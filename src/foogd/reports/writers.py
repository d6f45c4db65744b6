"""Reports as text: Markdown to read, CSV to compute with, LaTeX to print."""

from __future__ import annotations

from ..tables.grid import Grid, latex_text, to_csv
from ..tables.paper import NOTE
from .collection import Collection
from .grids import domain_means, every, joint_grid, paper_grid, scene_grid, threshold_grid
from .narrative import AT_IN, AT_SET_ASIDE, findings, headline


def markdown_report(collection: Collection) -> str:
    """Findings, the paper's table, all detectors, the joint view and thresholds from images set aside."""
    text = [f"# {headline(collection)}", ""]
    text += [f"- **{one.title}.** {one.text}" for one in findings(collection)]
    averages = domain_means(collection)
    for scene in collection.scenes:
        place = f": {scene.title}" if scene.title else ""
        text += _results(scene.title, paper_grid(scene))
        for name in scene.report.out_sets():
            for metric in ("auroc", "fpr95"):
                table = scene.report.matrix(name, metric)
                text += ["", f"## {metric.upper()} against {name}{place}", "", table.markdown((0,))]
        joint = joint_grid(scene)
        if joint is not None:
            text += ["", f"## Joint view{place}", "", f"({joint.title}; {AT_IN})", "", joint.markdown()]
        thresholds = threshold_grid(scene)
        if thresholds is not None:
            about = f"({thresholds.title}; {AT_SET_ASIDE})"
            text += ["", f"## Thresholds{place}", "", about, "", thresholds.markdown()]
    for title, grid in averages:
        text += _results(title, grid)
    if any(grid.has_published for grid in (*map(paper_grid, collection.scenes), *(grid for _, grid in averages))):
        text += ["", f"In brackets: the published number and the difference to it. {NOTE}"]
    return "\n".join(text) + "\n"


def _results(title: str, grid: Grid) -> list[str]:
    marks = {line.method: line.footnote for line in grid.lines if line.marks}
    return [
        "", f"## Results: {title}" if title else "## Results", "", f"({grid.title})", "", grid.markdown(), "",
        *(f"† {method}: {why}." for method, why in marks.items()),
    ]  # fmt: skip


def csv_report(collection: Collection) -> str:
    """Every metric and detector in long form, as means over seeds, weighted and pooled, with the published numbers."""
    grids = []
    for scene in collection.scenes:
        columns = scene.report.all_columns()
        grids.append((scene.title, scene_grid(scene, columns, every)))
        grids.append((scene.title, scene_grid(scene, columns, every, scope="pooled")))
    return to_csv([*grids, *domain_means(collection)])


def latex_report(collection: Collection) -> str:
    """One table a setting; needs the package booktabs."""
    text = [r"% \usepackage{booktabs}"]
    for title, grid in [*((scene.title, paper_grid(scene)) for scene in collection.scenes), *domain_means(collection)]:
        notes = [f"{grid.title}; the best is bold"]
        notes += ["published numbers (Liao et al., NeurIPS 2024) in brackets"] if grid.has_published else []
        marks = dict.fromkeys(line.footnote for line in grid.lines if line.marks)
        notes += [f"$^\\dagger$ {latex_text(why)}" for why in marks]
        caption = f"{latex_text(headline(collection))}{latex_text(', ' + title) if title else ''}"
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
