"""What came of a sweep: its finished runs, the rates that were chosen, and a table of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from loopdropout_trainer.record.measurement import mean_sd
from loopdropout_trainer.runs.result import training_result
from loopdropout_trainer.saving.files import read_json


SUMMARY_FILE = "summary.json"


def load_runs(output_dir: str | Path) -> list[dict[str, Any]]:
    """Return the finished runs of a sweep from its folder alone, by method, learning rate and seed.

    Returns:
        For each run: `method`, `learning_rate`, `seed`; `chosen`, whether the rate was chosen for the method; `final`, whether
        it was measured, not only compared with other rates; `selection_score`, in percent; `diverged`; `folder`, below
        `output_dir`; `result`, with the measurements in `result.rows` (none if it diverged).

    Raises:
        OSError, ValueError: if the folder holds no summary of a sweep, or a file is damaged.
    """
    runs = read_json(Path(output_dir) / SUMMARY_FILE)["runs"]
    for run in runs:
        run["result"] = training_result(Path(output_dir) / run["folder"])
    return runs


def summary_text(summary: Mapping[str, Any], select_on: str) -> str:
    """Return a table of a sweep's runs, with a sentence for each rate that was chosen at the edge of its grid.

    Args:
        summary: as in summary.json.
        select_on: name of the column of selection scores.
    """
    sentences = [_edge(choice) for choice in summary["choices"] if choice["edge"]]
    return "\n".join([_table(summary["runs"], select_on), *sentences])


def _table(runs: Sequence[Mapping[str, Any]], select_on: str) -> str:
    """Return a line for each method and rate: selection score (* if chosen), minutes, GB, and mean ± SD over seeds."""
    if not runs:
        return "No run is finished yet."
    lines = []
    for (method, rate), seeds in pd.DataFrame(runs).groupby(["method", "learning_rate"]):
        line = {"method": method, "rate": f"{rate:.6g}", select_on: _selection(seeds)}
        final = seeds[seeds["final"]]
        line["minutes"] = final["train_seconds"].mean() / 60
        line["GB"] = final["peak_memory_gb"].max()
        benchmarks = pd.DataFrame([scores or {} for scores in final["benchmarks"]])
        for name in benchmarks:
            line[f"{name} (seeds)"] = _over_seeds(benchmarks[name])
        lines.append(line)
    return pd.DataFrame(lines).to_string(index=False, na_rep="", float_format="{:.2f}".format)


def _selection(seeds: pd.DataFrame) -> str:
    """Return the mean selection score of a rate's seeds, with * if the rate was chosen."""
    if seeds["diverged"].any():
        return "diverged"
    score = seeds["selection_score"].mean()
    star = "*" if seeds["chosen"].any() else ""
    return star if pd.isna(score) else f"{score:.2f}{star}"


def _over_seeds(scores: pd.Series) -> str:
    """Return mean ± SD and the number of seeds of one benchmark's scores, which are missing where a seed diverged."""
    finished = scores.dropna().tolist()
    diverged = f", {len(scores) - len(finished)} diverged" if len(finished) < len(scores) else ""
    mean = mean_sd(finished) if finished else "-"
    return f"{mean} ({len(finished)}{diverged})"


def _edge(choice: Mapping[str, Any]) -> str:
    return (
        f"{choice['method']} in `{choice['part']}`: the best rate, {choice['learning_rate']:.6g}, is the {choice['edge']} of "
        f"the {len(choice['rates'])} that were tried: one beyond it may be better (`extend_grid`, `max_extensions`)."
    )
