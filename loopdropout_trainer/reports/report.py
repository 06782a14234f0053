"""A report: the long table as CSV, tables, figures, and one page that holds them all."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopdropout_trainer.reports import averaging, reading, specs
from loopdropout_trainer.reports.averaging import groups, is_protocol, known, settings_of, shown, telling
from loopdropout_trainer.reports.figures import automatic_figures, labelled, paper_figure
from loopdropout_trainer.reports.plots import save_figure
from loopdropout_trainer.reports.reading import ALL, BASE, ReportError, check_extra, load_table
from loopdropout_trainer.reports.specs import FinishedTable, Spec, build_table, load_spec


if TYPE_CHECKING:
    import pandas as pd

PAGE, LONG = "report.html", "long.csv"
MOST_PROBLEMS, MOST_LETTERS = 3000, 1500
"""Of one benchmark whose answers the page shows, and of a prompt or a completion; more would make it slow to open."""


@dataclass(frozen=True)
class Written:
    """What a report came to: its tables, and a few lines that say what was written where."""

    tables: list[FinishedTable]
    summary: str


def write_report(
    folders: Sequence[str | Path], tables: Sequence[str | Path], output_dir: str | Path, title: str = "Report"
) -> Written:
    """Write the long table (CSV), tables (Markdown, LaTeX, CSV), figures (PNG, PDF, SVG) and one page into a folder.

    Args:
        folders: of runs; everything below them is read.
        tables: YAML files of tables and figures; none: a summary of the runs, and every figure that they have numbers for.
        output_dir: of the report.
        title: of the page.

    Raises:
        ReportError: if a package is missing, there is nothing to report, or runs cannot be compared.
        RecipeError: for a file that is not valid YAML.
    """
    check_extra()
    described = [load_spec(path) for path in tables]
    table = load_table(folders)
    skipped = table.attrs["skipped"]
    if not len(table):
        raise ReportError(
            f"There are no results below {', '.join(map(str, folders))}: train, evaluate or sweep first."
        )
    output_dir = Path(output_dir)
    try:
        (output_dir / "tables").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReportError(f"`--output_dir` {output_dir} cannot be written to: {error.strerror}.") from None
    table.drop(columns=["predictions", "verdicts", "answered"], errors="ignore").to_csv(output_dir / LONG, index=False)
    if described:
        finished = [build_table(spec, table) for spec in described if not spec.figure]
        figures = {spec.name: paper_figure(spec, table) for spec in described if spec.figure}
    else:
        finished, figures = summary_tables(table), automatic_figures(table)
    for each in finished:
        stem = output_dir / "tables" / each.spec.name
        Path(f"{stem}.md").write_text(specs.markdown(each), encoding="utf-8")
        Path(f"{stem}.tex").write_text(specs.latex(each), encoding="utf-8")
        specs.numbers(each).to_csv(f"{stem}.csv", index=False)
    nothing = [name for name, plot in figures.items() if plot is None]
    figures = {name: plot for name, plot in figures.items() if plot is not None}
    pictures = {name: save_figure(plot, output_dir / "figures" / name)[2] for name, plot in figures.items()}
    write_page(output_dir / PAGE, title, finished, pictures, table, skipped)
    missing = sum(len(each.missing) for each in finished)
    lines = [
        f"{table['run'].nunique()} runs read, {len(table)} numbers in {output_dir / LONG}.",
        f"{len(finished)} tables in {output_dir / 'tables'}"
        + (f"; {missing} of their numbers are missing, and listed below each table." if missing else "."),
        f"{len(pictures)} figures in {output_dir / 'figures'}{'; no results for ' + ', '.join(nothing) if nothing else ''}.",
        f"The page: {output_dir / PAGE}",
        *(f"Left out: {fault}" for fault in skipped),
    ]
    return Written(finished, "\n".join(lines))


def write_figures(table: pd.DataFrame, output_dir: str | Path) -> list[Path]:
    """Save every figure that a long table has numbers for, as PNG, PDF and SVG.

    Raises:
        ReportError: if a package is missing, or runs would be averaged that must not be.
    """
    check_extra()
    figures = automatic_figures(table)
    return [path for name, plot in figures.items() for path in save_figure(plot, Path(output_dir) / name)]


def numbers_by_method(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each number that was measured, and a column for each method: mean ± SD over seeds."""
    import pandas as pd

    places = [name for name in ("benchmark", "metric", "gates", "readout", *averaging.PLACES) if name in table]
    rows, found = labelled(table, *places), {}
    for key, part in groups(rows, [*averaging.varying(rows, places), "label"]):
        label = key.pop("label")
        words = [str(value) if name in ("benchmark", "metric") else f"{name} {shown(value)}" for name, value in key.items()
                 if value is not None]  # fmt: skip
        name = ", ".join(words)
        found.setdefault(name, {})[label] = averaging.average(part, f"{label}, {name}").text(4)
    return pd.DataFrame.from_dict(found, orient="index").fillna("")


# Without files: tables of whatever there is.


def summary_tables(table: pd.DataFrame) -> list[FinishedTable]:
    """Return accuracy, differences to LoRA and costs; a row for each setting, a column for each metric, depth and protocol."""
    rows = table[table["total"].notna() & (table["metric"] != "missing") & ~table["metric"].str.startswith("by_")]
    rows = rows[(rows["gates"] == ALL) & rows["readout"].isna() | (rows["method"] == BASE)]
    if not len(rows):
        return _costs(table)
    of_columns = ("benchmark", "metric", "depth", "gates", "readout", "loop", "method")
    settings = [name for name in settings_of(rows) if not is_protocol(name) and name not in of_columns]
    head = {name: name for name in ["method", *telling(rows, settings, ["method"])]}
    body = [list(key.values()) for key, _ in groups(rows, list(head))]
    columns: dict[str, dict[str, Any]] = {}
    for key, part in groups(rows, ["benchmark", "metric", "depth"]):
        name = key["metric"] if key["metric"] == key["benchmark"] else f"{key['metric']} ({key['benchmark']})"
        name = name if rows["depth"].nunique() == 1 else f"{name}, K = {shown(key['depth'])}"
        for how, _ in groups(part, telling(part, filter(is_protocol, rows))):
            words = [f"{each.removeprefix('evaluation.')} {shown(value)}" for each, value in how.items()]
            columns[", ".join([name, *words])] = {**key, **how, "gates": [ALL, reading.NONE]}
    bold = {name: {**wanted, "bold": ["column"]} for name, wanted in columns.items()}
    found = [build_table(Spec("accuracy", "tab:accuracy", "Accuracy, %", heads=head, columns=bold, rows=body), rows)]
    # Each method beside the LoRA that is equal in all that the table tells apart, where there is one.
    changed = ("p", "rule", "rule_args.m")
    rest = lambda row: [value for name, value in zip(head, row, strict=True) if name not in ("method", *changed)]
    loras = [rest(row) for row in body if row[0] == "LoRA"]
    others = [row for row in body if row[0] not in ("LoRA", BASE) and rest(row) in loras]
    if others:
        minus = {"minus": {"method": "LoRA", **{name: None for name in changed if name in head}}}
        columns = {name: {**wanted, **minus} for name, wanted in columns.items()}
        title = "Difference to LoRA, points"
        spec = Spec("differences", "tab:differences", title, heads=head, columns=columns, rows=others)
        found.append(build_table(spec, rows))
    return found + _costs(table)


_COSTS = {  # column: title, scale, decimals
    "trainable_parameters": ("Trainable", 1, 0),
    "train_seconds": ("Train (min)", 1 / 60, 1),
    "tokens_per_second": ("Tokens/s", 1, 0),
    "peak_memory_gb": ("Memory (GB)", 1, 2),
}


def _costs(table: pd.DataFrame) -> list[FinishedTable]:
    names = [name for name in _COSTS if name in table and table[name].notna().any()]
    runs = table[table["method"] != BASE].drop_duplicates("run")
    runs = runs[runs[names].notna().any(axis=1)] if names else runs.iloc[:0]
    if not len(runs):
        return []
    numbers = table[settings_of(table)].groupby(table["run"]).nunique(dropna=False).max()  # of values in one run
    of_run = [name for name in settings_of(table) if not is_protocol(name) and numbers.get(name) == 1]
    runs = runs[[name for name in table if name in (*of_run, *reading.OUTCOMES)]].assign(
        depth=runs["num_loops"], gates=ALL, readout=None, benchmark=reading.TRAINING, metric="cost", value=0.0
    )
    heads = ["method", *telling(runs, [name for name in of_run if name != "method"], ["method"])]
    body = [list(key.values()) for key, _ in groups(runs, heads)]
    columns = {}
    for name in names:
        title, scale, decimals = _COSTS[name]
        columns[title] = {"of": name, "scale": scale, "decimals": decimals}
    head = {name: name for name in heads}
    return [build_table(Spec("costs", "tab:costs", "Cost of training", heads=head, columns=columns, rows=body), runs)]


# The page.


def write_page(
    path: Path,
    title: str,
    tables: Sequence[FinishedTable],
    pictures: dict[str, Path],
    table: pd.DataFrame,
    skipped: Sequence[str],
) -> None:
    """Write one self-contained page: tables, figures, every problem with the answers of all methods, settings of every run.

    Text of completions and recipes goes into it as JSON or escaped, never as HTML; figures as images, which run nothing.
    """
    parts = {"title": html.escape(title), "tables": [], "figures": [], "runs": [], "skipped": []}
    for each in tables:
        lines = "".join(f'<p class="note">{html.escape(note)}</p>' for note in specs.notes(each))
        parts["tables"].append(
            f'<h3>{html.escape(each.spec.title)}</h3><div class="scroll">{specs.page_table(each)}</div>{lines}'
        )
    for name, picture in pictures.items():
        data = base64.b64encode(picture.read_bytes()).decode()
        parts["figures"].append(
            f'<figure id="figure-{html.escape(name)}">'
            f'<img alt="{html.escape(name)}" src="data:image/svg+xml;base64,{data}"></figure>'
        )
    for _, run in table.drop_duplicates("run").iterrows():
        names = [
            name for name in (*settings_of(table), "seed", *reading.COSTS) if name in run and not is_protocol(name)
        ]
        about = {name: run[name] for name in names if known(run[name]) is not None}
        name = html.escape(f"{run['method']}, seed {shown(run['seed'])}: {run['run']}")
        text = html.escape(json.dumps(about, indent=1, default=str))
        parts["runs"].append(f"<details><summary>{name}</summary><pre>{text}</pre></details>")
    parts["skipped"] = [f'<p class="note">Left out: {html.escape(fault)}</p>' for fault in skipped]
    parts["answers"] = json.dumps(_answers(table), ensure_ascii=False, default=str).replace(
        "<", "\\u003c"
    )  # closes no script
    here = files("loopdropout_trainer.reports")
    page = (here / "page.html").read_text(encoding="utf-8")
    for name in ("page.css", "page.js"):
        page = page.replace(f"/*{name}*/", (here / name).read_text(encoding="utf-8"))
    first, *rest = page.split("{{")  # filled in one pass, so that no text is taken for a place
    page = first + "".join("".join(parts[part.split("}}")[0]]) + part.split("}}", 1)[1] for part in rest)
    path.write_text(page, encoding="utf-8")


def _answers(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return for each benchmark the problems, and for each run its verdicts and completions."""
    found: dict[tuple, dict[str, Any]] = {}
    rows = table[table["predictions"].notna()] if "predictions" in table else table.iloc[:0]
    rows = rows[rows["metric"] != "missing"].drop_duplicates(["run", "benchmark", "depth", "gates", "problems"])
    for _, row in rows.iterrows():
        predictions = row["predictions"][:MOST_PROBLEMS]
        gates = "" if row["gates"] == ALL or row["method"] == BASE else f", gates {row['gates']}"
        name = f"{row['benchmark']}, K = {shown(row['depth'])}{gates}"
        problems = [[p.get("id", ""), p["prompt"][-MOST_LETTERS:], p.get("reference", "")] for p in predictions]
        new = {"benchmark": name, "total": len(row["predictions"]), "methods": {}, "problems": problems}
        methods = found.setdefault((name, row["problems"]), new)["methods"]
        seed = "" if known(row["seed"]) is None else f", seed {row['seed']}"
        name = f"{row['method']}{seed}"
        name = f"{name} ({Path(row['run']).name})" if name in methods else name
        verdict = lambda p: "right" if p["correct"] else "missing" if p["extracted"] is None else "wrong"
        methods[name] = [
            [verdict(p), p["extracted"], str(p.get("completion", ""))[:MOST_LETTERS]] for p in predictions
        ]
    return list(found.values())
