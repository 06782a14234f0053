"""A report: the long table as CSV, tables, figures, and one page that holds them all."""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from loopdropout_trainer.checks import check_distinct, check_folder
from loopdropout_trainer.record.measurement import ALL, BASE, NONE, PLACES, mean_sd
from loopdropout_trainer.reports.averaging import average, select, settings_of, shown, telling, varying
from loopdropout_trainer.reports.plots import automatic_figures, labelled, paper_figure, save_figure
from loopdropout_trainer.reports.reading import OBJECTS, ReportError, load_table
from loopdropout_trainer.reports.specs import (
    TableSpec,
    build_table,
    grid,
    latex,
    load_spec,
    markdown,
    missing_of,
    notes,
)


def write_report(
    folders: Sequence[str | Path], tables: Sequence[str | Path], output_dir: str | Path, title: str = "Report"
) -> tuple[list[pd.DataFrame], str]:
    """Write the long table (CSV), tables (Markdown, LaTeX, CSV), figures (PNG, PDF, SVG) and one page into a folder.

    `tables` are YAML files, whose names are those of all that is written of them; without any it is a summary of the runs, and
    every figure that they have numbers for.

    Returns:
        The finished tables, and a few lines that say what was written where.

    Raises:
        ReportError, RecipeError: if a file is wrong, there is nothing to report, or runs cannot be compared.
    """
    check_folder("output_dir", output_dir)
    check_distinct("tables", [Path(path).stem for path in tables])
    specs = {Path(path).stem: load_spec(path) for path in tables}
    table = load_table(folders)
    if not len(table):
        faults = " ".join(table.attrs["skipped"]) or "train, evaluate or sweep first."
        raise ReportError(f"No measurements below {', '.join(map(str, folders))}: {faults}")
    finished = {}
    figures = {}
    for name, spec in specs.items():
        if isinstance(spec, TableSpec):
            finished[name] = build_table(spec, table)
        else:
            figures[name] = paper_figure(spec, table)
    if not specs:
        finished = summary_tables(table)
        figures = automatic_figures(table)
    of_tables = Path(output_dir, "tables")
    of_figures = Path(output_dir, "figures")
    of_tables.mkdir(parents=True, exist_ok=True)
    of_figures.mkdir(exist_ok=True)
    long = table.drop(columns=["verdicts", "answered", *OBJECTS]).dropna(axis=1, how="all")
    long_file = Path(output_dir, "long.csv")
    long.to_csv(long_file, index=False)
    for name, cells in finished.items():
        numbers = cells.assign(row=cells["row"].map(" / ".join)).drop(columns="bold")
        numbers.to_csv(of_tables / f"{name}.csv", index=False)
        (of_tables / f"{name}.md").write_text(markdown(cells), encoding="utf-8")
        (of_tables / f"{name}.tex").write_text(latex(cells), encoding="utf-8")
    drawn = {name: plot for name, plot in figures.items() if plot is not None}
    pictures = {name: save_figure(plot, of_figures / name)[2] for name, plot in drawn.items()}
    page = Path(output_dir, "report.html")
    page.write_text(page_text(title, finished.values(), pictures, table), encoding="utf-8")
    missing = sum(len(missing_of(cells)) for cells in finished.values())
    lines = [
        f"{table['run'].nunique()} runs read, {len(table)} numbers in {long_file}.",
        f"{len(finished)} tables in {of_tables}; {missing} of their numbers are missing.",
        f"{len(drawn)} figures in {of_figures}.",
        f"The page: {page}",
        *(f"No results for the figure {name}." for name in figures if name not in drawn),
        *(f"Left out: {fault}" for fault in table.attrs["skipped"]),
    ]
    return list(finished.values()), "\n".join(lines)


def page_text(title: str, tables: Iterable[pd.DataFrame], pictures: Mapping[str, Path], table: pd.DataFrame) -> str:
    """Return one self-contained page of tables, figures and the identity of every run; texts in it are escaped."""
    runs = {}
    for run in table.dropna(subset=["run"]).drop_duplicates("run").to_dict("records"):
        name = f"{run['method']}, seed {shown(run['seed'])}: {run['source']}"
        runs[name] = json.dumps(run["of_run"], indent=1)
    figures = {name: base64.b64encode(path.read_bytes()).decode() for name, path in pictures.items()}
    shown_tables = []
    for cells in tables:
        texts = grid(cells, html.escape, "<b>{}</b>")
        shown_tables.append((cells.attrs["spec"].title, texts, notes(cells)))
    here = Path(__file__).parent
    page = jinja2.Environment(autoescape=True, loader=jinja2.FileSystemLoader(here)).get_template("page.html")
    return page.render(
        title=title,
        style=(here / "page.css").read_text(encoding="utf-8"),
        tables=shown_tables,
        figures=figures,
        runs=runs,
        skipped=table.attrs["skipped"],
    )


# Without files: tables of whatever there is.


def numbers_by_method(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each number that was measured, and a column for each method: mean ± SD over seeds."""
    places = varying(table, ["benchmark", "metric", *PLACES])
    rows = labelled(table, most=math.inf)
    names = []
    for row in rows[places].to_dict("records"):
        said = []
        for place, value in row.items():
            if not pd.isna(value):
                said.append(f"{place} {shown(value)}" if place in PLACES else value)
        names.append(", ".join(said))
    texts = {}
    for (name, label), part in rows.groupby([pd.Series(names, rows.index), "label"], sort=False):
        values = average(part, f"{label}, {name}")
        texts.setdefault(name, {})[label] = mean_sd(values, 4)
    return pd.DataFrame.from_dict(texts, orient="index").fillna("")


COSTS = {
    "Trainable": {"metric": "trainable_parameters", "decimals": 0},
    "Train (min)": {"metric": "train_seconds", "scale": 1 / 60, "decimals": 1},
    "Tokens/s": {"metric": "tokens_per_second", "decimals": 0},
    "Memory (GB)": {"metric": "peak_memory_gb"},
}
"""The columns of the summary's costs."""

_OF_METHODS = {"rule", "rule_args", "p"}
"""Settings that a method has and LoRA has not."""


def summary_tables(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return accuracy, differences to LoRA and costs; a row for each setting, a column for each metric, depth and protocol.

    A cell of different settings says so, and the others are there.
    """
    rows = select(table, {"family": "accuracy", "readout": None, "loop": None, "gates": [ALL, NONE]})
    rows = labelled(rows, most=math.inf)
    costs = labelled(select(table, {"family": "cost"}), most=math.inf)
    columns = _columns_of(rows)
    in_bold = {name: {**column, "bold": ["column"]} for name, column in columns.items()}
    measured = set(costs["metric"])
    of_costs = {name: column for name, column in COSTS.items() if column["metric"] in measured}
    described = {
        "accuracy": ("Accuracy, %", rows, in_bold, [[label] for label in rows["label"].unique()]),
        "differences": ("Difference to LoRA, points", rows, columns, _gains(rows)),
        "costs": ("Cost of training", costs, of_costs, [[label] for label in costs["label"].unique()]),
    }
    tables = {}
    for name, (title, part, wanted, lines) in described.items():
        heads = {"Method": "label"}
        spec = TableSpec(label=f"tab:{name}", title=title, heads=heads, columns=wanted, rows=lines)
        tables[name] = build_table(spec, part, ReportError)
    return {name: cells for name, cells in tables.items() if len(cells)}


def _columns_of(rows: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Return a table's columns: one for each way in which a metric was measured, and each depth."""
    columns = {}
    ways = rows[["panel", "metric", "depth"]].drop_duplicates().sort_values("depth", kind="stable")
    for panel, metric, depth in ways.itertuples(index=False):
        name = panel.replace("\n", ", ").removesuffix(" (%)") or metric
        if rows["depth"].nunique() > 1:
            name = f"{name}, K = {depth}"
        columns[name] = {"panel": panel, "metric": metric, "depth": depth, "gates": [ALL, NONE]}
    return columns


def _gains(rows: pd.DataFrame) -> list[list[Any]]:
    """Return the rows of a table of differences: each method beside the LoRA that is equal in all else."""
    settings = telling(rows, settings_of(rows), ["method"])
    others = [name for name in settings if name.split(".")[0] not in _OF_METHODS]
    alike = ["family", *others]
    runs = rows.drop_duplicates("label")
    loras = runs[runs["method"] == "LoRA"]
    methods = runs[~runs["method"].isin(["LoRA", BASE])]
    pairs = methods.merge(loras, on=alike, suffixes=("", "_lora"))
    return [
        [{label: {"label": label, "minus": {"label": lora}}}]
        for label, lora in zip(pairs["label"], pairs["label_lora"], strict=True)
    ]
