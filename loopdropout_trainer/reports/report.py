"""A report: the long table as CSV, tables, figures, and one page that holds them all."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from loopdropout_trainer.reports import specs
from loopdropout_trainer.reports.averaging import average, is_protocol, mean_sd, settings_of, shown, telling, varying
from loopdropout_trainer.reports.plots import accuracies, automatic_figures, labelled, paper_figure, save_figure
from loopdropout_trainer.reports.reading import ALL, BASE, FORMS, NONE, OUTCOMES, PLACES, ReportError, load_table
from loopdropout_trainer.reports.specs import build_table, load_spec, make_spec


MOST_PROBLEMS, MOST_LETTERS = 3000, 1500
"""Of one benchmark whose answers the page shows, and of a prompt or a completion; more would make it slow to open."""


def write_report(
    folders: Sequence[str | Path], tables: Sequence[str | Path], output_dir: str | Path, title: str = "Report"
) -> tuple[list[pd.DataFrame], str]:
    """Write the long table (CSV), tables (Markdown, LaTeX, CSV), figures (PNG, PDF, SVG) and one page into a folder.

    Args:
        folders: of runs; everything below them is read.
        tables: YAML files of tables and figures; none: a summary of the runs, and every figure that they have numbers for.
        output_dir: of the report.
        title: of the page.

    Returns:
        The finished tables, and a few lines that say what was written where.

    Raises:
        ReportError: if there is nothing to report, or runs cannot be compared.
        RecipeError: for a file that is not valid YAML.
    """
    described, table = [load_spec(path) for path in tables], load_table(folders)
    skipped, output_dir = table.attrs["skipped"], Path(output_dir)
    if not len(table):
        raise ReportError(
            f"There are no results below {', '.join(map(str, folders))}: train, evaluate or sweep first."
        )
    if described:
        finished = {spec.name: build_table(spec, table) for spec in described if not spec.figure}
        figures = {spec.name: paper_figure(spec, table) for spec in described if spec.figure}
    else:
        finished = {cells.attrs["spec"].name: cells for cells in summary_tables(table)}
        figures = automatic_figures(table)
    for name in ("tables", "figures"):
        (output_dir / name).mkdir(parents=True, exist_ok=True)
    long = table.drop(columns=["predictions", "verdicts", "answered"]).dropna(axis=1, how="all")
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
    page.write_text(page_text(title, finished, pictures, table, skipped), encoding="utf-8")
    missing = sum(map(len, map(specs.missing_of, finished.values())))
    lines = [
        f"{table['run'].nunique()} runs read, {len(table)} numbers in {output_dir / 'long.csv'}.",
        f"{len(finished)} tables in {output_dir / 'tables'}; {missing} of their numbers are missing.",
        f"{len(pictures)} figures in {output_dir / 'figures'}{'; no results for ' + ', '.join(nothing) if nothing else ''}.",
        f"The page: {page}",
        *(f"Left out: {fault}" for fault in skipped),
    ]
    return list(finished.values()), "\n".join(lines)


def numbers_by_method(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each number that was measured, and a column for each method: mean ± SD over seeds."""
    places, found = varying(table, ["benchmark", "metric", *PLACES]), {}
    for (*key, label), part in labelled(table, *places).groupby([*places, "label"], sort=False, dropna=False):
        known = [(place, shown(value)) for place, value in zip(places, key, strict=True) if not pd.isna(value)]
        name = ", ".join(f"{place} {value}" if place in PLACES else value for place, value in known)
        found.setdefault(name, {})[label] = mean_sd(average(part, f"{label}, {name}"), 4)
    return pd.DataFrame.from_dict(found, orient="index").fillna("")


# Without files: tables of whatever there is.


def summary_tables(table: pd.DataFrame) -> list[pd.DataFrame]:
    """Return accuracy, differences to LoRA and costs; a row for each setting, a column for each metric, depth and protocol."""
    rows = accuracies(table)
    rows = rows[(rows["gates"] == ALL) & rows["readout"].isna() | (rows["method"] == BASE)]
    columns: dict[str, dict[str, Any]] = {}
    for (benchmark, metric, depth), part in rows.groupby(["benchmark", "metric", "depth"], sort=False):
        name = metric if metric == benchmark else f"{metric} ({benchmark})"
        name = name if rows["depth"].nunique() == 1 else f"{name}, K = {depth}"
        how = telling(part, filter(is_protocol, rows))
        for values in part[how].drop_duplicates().to_dict("records") if how else [{}]:
            words = [f"{each.removeprefix('evaluation.')} {shown(value)}" for each, value in values.items()]
            place = {"benchmark": benchmark, "metric": metric, "depth": depth, "gates": [ALL, NONE]}
            columns[", ".join([name, *words])] = {**place, **values}
    heads, lines = _heads(rows)
    bold = {name: {**wanted, "bold": ["column"]} for name, wanted in columns.items()}
    found = [_summary("accuracy", "Accuracy, %", heads, bold, lines, rows)]
    # Each method beside the LoRA that is equal in all that the table tells apart, where there is one.
    changed = {name: None for name in ("p", "rule", "rule_args.m") if name in heads}
    rest = lambda line: [value for name, value in zip(heads, line, strict=True) if name not in ("method", *changed)]
    loras = [rest(line) for line in lines if line[0] == "LoRA"]
    others = [line for line in lines if line[0] not in ("LoRA", BASE) and rest(line) in loras]
    minus = {name: {**wanted, "minus": {"method": "LoRA", **changed}} for name, wanted in columns.items()}
    found.append(_summary("differences", "Difference to LoRA, points", heads, minus, others, rows))
    costs = {title: of for title, of in FORMS["costs"].items() if table[of["of"]].notna().any()}
    runs = table.dropna(subset=[of["of"] for of in costs.values()], how="all").drop_duplicates("run")
    runs = runs[["method", *settings_of(runs), *OUTCOMES]]
    runs = runs.assign(depth=runs["num_loops"], gates=ALL, readout=None, benchmark="training", metric="cost")
    heads, lines = _heads(runs)
    found.append(_summary("costs", "Cost of training", heads, costs, lines, runs))
    return [cells for cells in found if len(cells)]


def _heads(rows: pd.DataFrame) -> tuple[dict[str, str], list[list[Any]]]:
    """Return the columns that tell the settings of runs apart, and a line of their values for each setting."""
    names = ["method", *telling(rows, settings_of(rows), ["method"])]
    return {name: name for name in names}, rows[names].drop_duplicates().values.tolist()


def _summary(name: str, title: str, heads: dict, columns: dict, lines: list, rows: pd.DataFrame) -> pd.DataFrame:
    return build_table(
        make_spec(name, label=f"tab:{name}", title=title, heads=heads, columns=columns, rows=lines), rows
    )


# The page.


def page_text(
    title: str, tables: dict[str, pd.DataFrame], pictures: dict[str, Path], table: pd.DataFrame, skipped: list[str]
) -> str:
    """Return one self-contained page: tables, figures, every problem with the answers of all methods, settings of every run.

    Text of completions and recipes goes into it as JSON or escaped, never as HTML; figures as images, which run nothing.
    """
    names = ["seed", *settings_of(table), *OUTCOMES[8:]]
    runs = []
    for run in table.drop_duplicates("run").to_dict("records"):
        about = {name: run[name] for name in names if not pd.isna(run[name])}
        about = json.dumps(about, indent=1, default=str)
        runs.append((f"{run['method']}, seed {shown(run['seed'])}: {run['run']}", about))
    here = files("loopdropout_trainer.reports")
    style, script, page = ((here / f"page.{each}").read_text(encoding="utf-8") for each in ("css", "js", "html"))
    return jinja2.Environment(autoescape=True).from_string(page).render(
        title=title, style=style, script=script, runs=runs, skipped=skipped, answers=answers(table),
        tables=[
            (cells.attrs["spec"].title, specs.grid(cells, html.escape, "<b>{}</b>"), specs.notes(cells))
            for cells in tables.values()
        ],
        figures={name: base64.b64encode(path.read_bytes()).decode() for name, path in pictures.items()},
    )  # fmt: skip


def answers(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return for each benchmark the problems, and for each run its verdicts and completions."""
    found: dict[tuple, dict[str, Any]] = {}
    rows = table[table["predictions"].notna() & (table["metric"] != "missing")]
    rows = rows.drop_duplicates(["run", "benchmark", "depth", "gates", "problems"])
    for row in rows.to_dict("records"):
        predictions = row["predictions"][:MOST_PROBLEMS]
        gates = "" if row["gates"] == ALL or row["method"] == BASE else f", gates {row['gates']}"
        name = f"{row['benchmark']}, K = {row['depth']}{gates}"
        problems = [[p.get("id", ""), p["prompt"][-MOST_LETTERS:], p.get("reference", "")] for p in predictions]
        new = {"benchmark": name, "total": len(row["predictions"]), "methods": {}, "problems": problems}
        methods = found.setdefault((name, row["problems"]), new)["methods"]
        name = row["method"] + ("" if pd.isna(row["seed"]) else f", seed {row['seed']}")
        name = f"{name} ({Path(row['run']).name})" if name in methods else name
        verdict = lambda p: "right" if p["correct"] else "missing" if p["extracted"] is None else "wrong"
        methods[name] = [
            [verdict(p), p["extracted"], str(p.get("completion", ""))[:MOST_LETTERS]] for p in predictions
        ]
    return list(found.values())
