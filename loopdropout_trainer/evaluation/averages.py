"""Averages of several metrics of one row, such as the paper's over six benchmarks, and the table of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loopdropout_trainer.evaluation.benchmarks import BENCHMARKS


def check_averages(averages: Any) -> None:
    """Raise ValueError unless `averages` maps names to lists of metrics; lm-eval's are written `metric,filter`."""
    known = {metric for name, task in BENCHMARKS.items() for metric in task.metric_names(name)}
    if not isinstance(averages, Mapping):
        raise ValueError(f"`averages` must map names to lists of metrics; got {averages!r}.")
    for name, metrics in averages.items():
        if not isinstance(metrics, list) or not metrics:
            raise ValueError(f"`averages` must give `{name}` a list of one or more metrics; got {metrics!r}.")
        for metric in metrics:
            if metric not in known and "," not in str(metric):
                raise ValueError(
                    f"`averages` has `{metric}` in `{name}`, which must be among {', '.join(sorted(known))}."
                )


def averages_of(benchmarks: Mapping[str, Any], averages: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the plain means of metrics' scores, in percent, for those averages whose metrics are all there.

    Args:
        benchmarks: entries of the results file.
        averages: name -> metrics.
    """
    scores = {name: metric["score"] for entry in benchmarks.values() for name, metric in entry["metrics"].items()}
    return {
        name: {"score": sum(scores[metric] for metric in metrics) / len(metrics), "metrics": list(metrics)}
        for name, metrics in averages.items()
        if all(metric in scores for metric in metrics)
    }


def results_table(rows: Mapping[str, Any], names: Sequence[str], averages: Sequence[str]) -> str:
    """Return a Markdown table of the metrics and averages in a results file, a column for each of the rows `names`.

    Args:
        rows: of the results file.
        names: of the rows to show.
        averages: names of the averages, which come last.
    """
    columns = [
        {metric: values for entry in rows[name]["benchmarks"].values() for metric, values in entry["metrics"].items()}
        for name in names
    ]
    metrics = list(dict.fromkeys(metric for column in columns for metric in column))
    lines = [["Metric", *names], ["---", *["---:"] * len(names)]]
    lines += [[metric, *(_cell(column.get(metric)) for column in columns)] for metric in metrics]
    for average in averages:
        values = [rows[name].get("averages", {}).get(average) for name in names]
        lines.append([average, *("-" if value is None else f"{value['score']:.2f}" for value in values)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(metric: Mapping[str, Any] | None) -> str:
    if metric is None:
        return "-"
    count = "" if metric["correct"] is None else f" ({metric['correct']}/{metric['total']})"
    return f"{metric['score']:.2f}{count}"
