"""A report: the long table as CSV, tables, figures, and one page that holds them all."""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from loopdropout_trainer.evaluation.results import mean_sd
from loopdropout_trainer.reports import specs
from loopdropout_trainer.reports.averaging import average, settings_of, shown, telling, varying
from loopdropout_trainer.reports.plots import accuracies, automatic_figures, labelled, paper_figure, save_figure
from loopdropout_trainer.reports.reading import ALL, BASE, FORMS, NONE, OUTCOMES, PLACES, ReportError, load_table
from loopdropout_trainer.reports.specs import build_table, load_spec, make_spec
from loopdropout_trainer.settings.ranges import check_distinct, check_folder


def write_report(
    folders: Sequence[str | Path], tables: Sequence[str | Path], output_dir: str | Path, title: str = "Report"
) -> tuple[list[pd.DataFrame], str]:
    """Write the long table (CSV), tables (Markdown, LaTeX, CSV), figures (PNG, PDF, SVG) and one page into a folder.

    `tables` are YAML files; without any it is a summary of the runs, and every figure that they have numbers for.

    Returns:
        The finished tables, and a few lines that say what was written where.

    Raises:
        ReportError, RecipeError: if a file is wrong, there is nothing to report, or runs cannot be compared.
    """
    check_folder("output_dir", output_dir)
    described = [load_spec(path) for path in tables]
    check_distinct("tables", [spec.name for spec in described])
    table, output_dir = load_table(folders), Path(output_dir)
    if not len(table):
        raise ReportError(f"No results below {', '.join(map(str, folders))}: train, evaluate or sweep first.")
    if described:
        finished = {spec.name: build_table(spec, table) for spec in described if not spec.figure}
        figures = {spec.name: paper_figure(spec, table) for spec in described if spec.figure}
    else:
        finished = {cells.attrs["spec"].name: cells for cells in summary_tables(table)}
        figures = automatic_figures(table)
    for name in ("tables", "figures"):
        (output_dir / name).mkdir(parents=True, exist_ok=True)
    long = table.drop(columns=["verdicts", "answered"]).dropna(axis=1, how="all")
    long.to_csv(output_dir / "long.csv", index=False)
    for name, cells in finished.items():
        stem = output_dir / "tables" / name
        Path(f"{stem}.md").write_text(specs.markdown(cells), encoding="utf-8")
        Path(f"{stem}.tex").write_text(specs.latex(cells), encoding="utf-8")
        numbers = cells.assign(row=cells["row"].map(" / ".join)).drop(columns="bold")
        numbers.to_csv(f"{stem}.csv", index=False)
    nothing = [name for name, plot in figures.items() if plot is None]
    pictures = {name: save_figure(plot, output_dir / "figures" / name)[2] for name, plot in figures.items() if plot}
    page = output_dir / "report.html"
    page.write_text(page_text(title, finished, pictures, table), encoding="utf-8")
    missing = sum(map(len, map(specs.missing_of, finished.values())))
    lines = [
        f"{table['run'].nunique()} runs read, {len(table)} numbers in {output_dir / 'long.csv'}.",
        f"{len(finished)} tables in {output_dir / 'tables'}; {missing} of their numbers are missing.",
        f"{len(pictures)} figures in {output_dir / 'figures'}{'; no results for ' + ', '.join(nothing) if nothing else ''}.",
        f"The page: {page}",
        *(f"Left out: {fault}" for fault in table.attrs["skipped"]),
    ]
    return list(finished.values()), "\n".join(lines)


def page_text(title: str, tables: dict[str, pd.DataFrame], pictures: dict[str, Path], table: pd.DataFrame) -> str:
    """Return one self-contained page of tables, figures and the settings of every run; texts in it are escaped."""
    names, here = ["seed", *settings_of(table), *OUTCOMES[7:]], files("loopdropout_trainer.reports")
    runs = {
        f"{run['method']}, seed {shown(run['seed'])}: {run['run']}":
        json.dumps({name: run[name] for name in names if not pd.isna(run[name])}, indent=1, default=str)
        for run in table.drop_duplicates("run").to_dict("records")
    }  # fmt: skip
    style, page = ((here / f"page.{each}").read_text(encoding="utf-8") for each in ("css", "html"))
    return jinja2.Environment(autoescape=True).from_string(page).render(
        title=title, style=style, runs=runs, skipped=table.attrs["skipped"],
        tables=[
            (cells.attrs["spec"].title, specs.grid(cells, html.escape, "<b>{}</b>"), specs.notes(cells))
            for cells in tables.values()
        ],
        figures={name: base64.b64encode(path.read_bytes()).decode() for name, path in pictures.items()},
    )  # fmt: skip


# Without files: tables of whatever there is.


def numbers_by_method(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each number that was measured, and a column for each method: mean ± SD over seeds."""
    places, found = varying(table, ["benchmark", "metric", *PLACES]), {}
    rows = labelled(table, most=math.inf)
    for (*key, label), part in rows.groupby([*places, "label"], sort=False, dropna=False):
        known = [(place, shown(value)) for place, value in zip(places, key, strict=True) if not pd.isna(value)]
        name = ", ".join(f"{place} {value}" if place in PLACES else value for place, value in known)
        found.setdefault(name, {})[label] = mean_sd(average(part, f"{label}, {name}"), 4)
    return pd.DataFrame.from_dict(found, orient="index").fillna("")


def summary_tables(table: pd.DataFrame) -> list[pd.DataFrame]:
    """Return accuracy, differences to LoRA and costs; a row for each setting, a column for each metric, depth and protocol."""
    rows = accuracies(table)
    rows = rows[(rows["gates"] == ALL) & rows["readout"].isna() | (rows["method"] == BASE)]
    # Each method stands beside the LoRA that is equal in all that tells runs apart, where there is one.
    names = [name for name in telling(rows, settings_of(rows), ["method"]) if name not in ("rule", "p", "rule_args.m")]
    keys = [tuple(map(str, values)) for values in rows[names].values]
    rows = labelled(rows, most=math.inf)
    runs = {label: each for label, *each in zip(rows["label"], rows["method"], keys, strict=True)}
    loras = {key: label for label, (method, key) in runs.items() if method == "LoRA"}
    others = {label: key for label, (method, key) in runs.items() if method not in ("LoRA", BASE) and key in loras}
    gains = [[{label: {"label": label, "minus": {"label": loras[key]}}}] for label, key in others.items()]
    columns: dict[str, dict[str, Any]] = {}
    for panel, metric, depth in rows[["panel", "metric", "depth"]].drop_duplicates().values:
        name = panel.replace("\n", ", ") or metric
        name = name if rows["depth"].nunique() == 1 else f"{name}, K = {depth}"
        columns[name] = {"panel": panel, "metric": metric, "depth": depth, "gates": [ALL, NONE]}
    bold = {name: {**wanted, "bold": ["column"]} for name, wanted in columns.items()}
    costs = {title: of for title, of in FORMS["costs"].items() if table[of["of"]].notna().any()}
    trained = table.dropna(subset=[of["of"] for of in costs.values()], how="all").drop_duplicates("run")
    trained = trained[["method", *settings_of(trained), *OUTCOMES]]
    trained = trained.assign(depth=trained["num_loops"], gates=ALL, readout=None, benchmark="cost", metric="cost")
    trained = labelled(trained, most=math.inf)
    found = []
    for name, title, of_columns, lines, of_rows in (
        ("accuracy", "Accuracy, %", bold, [[label] for label in runs], rows),
        ("differences", "Difference to LoRA, points", columns, gains, rows),
        ("costs", "Cost of training", costs, [[label] for label in trained["label"].unique()], trained),
    ):
        about = {"label": f"tab:{name}", "title": title, "heads": {"Method": "label"}}
        spec = make_spec(name, **about, columns=of_columns, rows=lines)
        found.append(
            build_table(spec, of_rows, ReportError)
        )  # a cell of different settings says so, the others are there
    return [cells for cells in found if len(cells)]
