"""Make tables, figures and one page to look through from the folders that runs, sweeps and diagnostics left.

    python recipes/report.py outputs/quickstart
    python recipes/report.py outputs/sweeps --tables math_main mask_controls --output_dir report
    python recipes/report.py outputs --tables all

Without `--tables` it summarises all runs below the folders: accuracy by depth, differences, costs, and every figure that they
have numbers for. A table or figure of the paper is a YAML file in recipes/tables/. Tables are written as Markdown, LaTeX and
CSV, with the paper's numbers in columns of their own, figures as PNG, PDF and SVG. What is missing is listed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loopdropout_trainer.errors import run_command
from loopdropout_trainer.settings.recipe import RecipeError


TABLES = Path(__file__).parent / "tables"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="folders of runs; everything below them is read")
    parser.add_argument(
        "--tables",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names in recipes/tables, YAML files of your own, or `all`",
    )
    parser.add_argument("--output_dir", default="report", help="folder for the report (default: %(default)s)")
    parser.add_argument("--title", default="Report", help="of the page")
    arguments = parser.parse_args(argv)
    from loopdropout_trainer.reports.report import write_report
    from loopdropout_trainer.reports.specs import grid, notes

    tables, summary = write_report(
        arguments.folders, table_files(arguments.tables), arguments.output_dir, arguments.title
    )
    screen = Console()
    any_width = Console(width=10_000)
    for cells in tables:
        texts, spec = grid(cells), cells.attrs["spec"]
        out = Table(title=spec.title, title_justify="left", caption="\n".join(notes(cells)), caption_justify="left")
        for place, name in enumerate(texts):
            out.add_column(name, justify="left" if place < len(spec.heads) else "right")
        for row in texts.itertuples(index=False):
            out.add_row(*row)
        narrowest = any_width.measure(out).minimum  # on a narrower screen, too, every word is whole
        Console(width=max(narrowest, screen.width)).print(out)
    screen.print(summary, highlight=False, soft_wrap=True)


def table_files(names: list[str]) -> list[Path]:
    """Return the YAML files of tables given by name or path."""
    tables = {path.stem: path for path in sorted(TABLES.glob("*.yaml"))}
    files = []
    for name in names:
        if name == "all":
            files += tables.values()
        elif name in tables:
            files.append(tables[name])
        elif Path(name).is_file():
            files.append(Path(name))
        else:
            raise RecipeError(f"`--tables` must name a file or one of all, {', '.join(tables)}; got {name!r}.")
    return files


if __name__ == "__main__":
    run_command(main)
