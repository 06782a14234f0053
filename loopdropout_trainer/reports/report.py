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

from loopdropout_trainer.checks import check_distinct, check_folder
from loopdropout_trainer.evaluation.results import mean_sd
from loopdropout_trainer.record.measurement import ALL, BASE, NONE, PLACES
from loopdropout_trainer.reports import specs
from loopdropout_trainer.reports.averaging import average, settings_of, shown, telling, varying
from loopdropout_trainer.reports.plots import automatic_figures, labelled, paper_figure, save_figure
from loopdropout_trainer.reports.reading import OBJECTS, ReportError, load_table
from loopdropout_trainer.reports.specs import FigureSpec, TableSpec, build_table, load_spec


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
        faults = " ".join(table.attrs["skipped"]) or "train, evaluate or sweep first."
        raise ReportError(f"No measurements below {', '.join(map(str, folders))}: {faults}")
    if described:
        finished = {spec.name: build_table(spec, table) for spec in described if isinstance(spec, TableSpec)}
        figures = {spec.name: paper_figure(spec, table) for spec in described if isinstance(spec, FigureSpec)}
    else:
        finished = {cells.attrs["spec"].name: cells for cells in summary_tables(table)}
        figures = automatic_figures(table)
    for name in ("tables", "figures"):
        (output_dir / name).mkdir(parents=True, exist_ok=True)
    long = table.drop(columns=["verdicts", "answered", *OBJECTS]).dropna(axis=1, how="all")
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
    """Return one self-contained page of tables, figures and the identity of every run; texts in it are escaped."""
    here = files("loopdropout_trainer.reports")
    style, page = ((here / f"page.{each}").read_text(encoding="utf-8") for each in ("css", "html"))
    trained = table.dropna(subset=["run"]).drop_duplicates("run")
    runs = {
        f"{run['method']}, seed {shown(run['seed'])}: {run['source']}": json.dumps(run["of_run"], indent=1)
        for run in trained.to_dict("records")
    }
    shown_tables = [
        (cells.attrs["spec"].title, specs.grid(cells, html.escape, "<b>{}</b>"), specs.notes(cells))
        for cells in tables.values()
    ]
    figures = {name: base64.b64encode(path.read_bytes()).decode() for name, path in pictures.items()}
    return (
        jinja2.Environment(autoescape=True)
        .from_string(page)
        .render(
            title=title, style=style, runs=runs, skipped=table.attrs["skipped"], tables=shown_tables, figures=figures
        )
    )


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
    rows = table[(table["family"] == "accuracy") & table["readout"].isna() & table["loop"].isna()]
    rows = labelled(rows[rows["gates"].isin([ALL, NONE])], most=math.inf)
    columns = _columns_of(rows)
    costs = table[table["family"] == "cost"]
    costs = labelled(costs, most=math.inf) if len(costs) else costs.assign(label="", panel="")
    wanted = {
        title: {"metric": metric, **option}
        for title, (metric, option) in COSTS.items()
        if metric in set(costs["metric"])
    }
    made = [
        _summary(
            "accuracy", "Accuracy, %", rows, columns, [[label] for label in rows["label"].unique()], bold=["column"]
        ),
        _summary("differences", "Difference to LoRA, points", rows, columns, _gains(rows)),
        _summary("costs", "Cost of training", costs, wanted, [[label] for label in costs["label"].unique()]),
    ]
    return [cells for cells in made if len(cells)]


COSTS = {
    "Trainable": ("trainable_parameters", {"decimals": 0}),
    "Train (min)": ("train_seconds", {"scale": 1 / 60, "decimals": 1}),
    "Tokens/s": ("tokens_per_second", {"decimals": 0}),
    "Memory (GB)": ("peak_memory_gb", {}),
}
"""The columns of the summary's costs: metric, and how it is shown."""


def _columns_of(rows: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Return a table's columns: one for each way in which a metric was measured, and each depth."""
    columns = {}
    for panel, metric, depth in (
        rows[["panel", "metric", "depth"]].drop_duplicates().sort_values("depth", kind="stable").values
    ):
        name = panel.replace("\n", ", ").removesuffix(" (%)") or metric
        name = name if rows["depth"].nunique() == 1 else f"{name}, K = {depth}"
        columns[name] = {"panel": panel, "metric": metric, "depth": depth, "gates": [ALL, NONE]}
    return columns


def _gains(rows: pd.DataFrame) -> list[list[Any]]:
    """Return the rows of a table of differences: each method beside the LoRA that is equal in all else."""
    names = [
        name for name in telling(rows, settings_of(rows), ["method"]) if not name.startswith(("rule", "p", "masked"))
    ]
    keys = [tuple(map(str, values)) for values in rows[names].values]
    runs = {label: each for label, *each in zip(rows["label"], rows["method"], keys, strict=True)}
    loras = {key: label for label, (method, key) in runs.items() if method == "LoRA"}
    others = {label: key for label, (method, key) in runs.items() if method not in ("LoRA", BASE) and key in loras}
    return [[{label: {"label": label, "minus": {"label": loras[key]}}}] for label, key in others.items()]


def _summary(
    name: str, title: str, rows: pd.DataFrame, columns: dict[str, Any], lines: list[list[Any]], **option: Any
) -> pd.DataFrame:
    """Return a table of the summary; a cell of different settings says so, and the others are there."""
    columns = {title: {**wanted, **option} for title, wanted in columns.items()}
    about = {"label": f"tab:{name}", "title": title, "heads": {"Method": "label"}}
    return build_table(TableSpec(name=name, **about, columns=columns, rows=lines), rows, ReportError)
