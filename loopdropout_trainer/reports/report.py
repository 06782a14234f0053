"""A whole report: read the folders, fill the tables, draw the figures, write the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from loopdropout_trainer.reports import render
from loopdropout_trainer.reports.figures import make_figures
from loopdropout_trainer.reports.page import write_page
from loopdropout_trainer.reports.records import ReportError, read_records
from loopdropout_trainer.reports.summary import summary_tables
from loopdropout_trainer.reports.tables import FinishedTable, build_table, load_table


PAGE = "report.html"


@dataclass(frozen=True)
class Written:
    """What a report came to: its tables, and a few lines that say what was written where."""

    tables: list[FinishedTable]
    summary: str


def write_report(
    folders: Sequence[str | Path], tables: Sequence[str | Path], output_dir: str | Path, title: str = "Report"
) -> Written:
    """Write tables (Markdown, LaTeX, CSV, JSON), figures (PNG, PDF) and one page into a folder.

    Args:
        folders: of runs; everything below them is read.
        tables: YAML files; none: a summary of the runs.
        output_dir: of the report.
        title: of the page.

    Raises:
        ReportError: if there is nothing to report, a file cannot be read, or runs cannot be compared.
        RecipeError: for a table file that is not valid YAML.
    """
    specs = [load_table(path) for path in tables]
    records = read_records(folders)
    if not records:
        raise ReportError(
            f"There are no results below {', '.join(map(str, folders))}: train, evaluate or sweep first."
        )
    finished = [build_table(spec, records) for spec in specs] if specs else summary_tables(records)
    output_dir = Path(output_dir)
    try:
        (output_dir / "tables").mkdir(parents=True, exist_ok=True)
        (output_dir / "figures").mkdir(exist_ok=True)
    except OSError as error:
        raise ReportError(f"`--output_dir` {output_dir} cannot be written to: {error.strerror}.") from None
    for table in finished:
        stem = output_dir / "tables" / table.spec.name.replace(" ", "_")
        for ending, text in (
            ("md", render.markdown(table)),
            ("tex", render.latex(table)),
            ("csv", render.comma_separated(table)),
            ("json", render.json_text(table)),
        ):
            stem.with_name(f"{stem.name}.{ending}").write_text(text, encoding="utf-8")
    figures = make_figures(records, finished)
    drawn = 0
    if find_spec("matplotlib") is not None:
        from loopdropout_trainer.reports.drawing import draw_figure

        for figure in figures:
            draw_figure(figure, output_dir / "figures")
            drawn += 1
    write_page(output_dir / PAGE, title, finished, figures, records)
    missing = sum(len(table.missing) for table in finished)
    lines = [
        f"{len(records)} runs read.",
        f"{len(finished)} tables in {output_dir / 'tables'}"
        + (f"; {missing} of their numbers are missing, and listed below each table." if missing else "."),
        f"{drawn} figures in {output_dir / 'figures'}."
        if drawn or not figures
        else 'No figures for print without matplotlib: pip install "loopdropout-trainer[plots]"',
        f"The page: {output_dir / PAGE}",
    ]
    return Written(finished, "\n".join(lines))
