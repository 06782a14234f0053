"""Tables of loss reductions, and of the losses at each depth and of the readout of each loop, by `diagnose` and trainings."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pandas as pd

from loopdropout_trainer.errors import join_command
from loopdropout_trainer.reports.frames import average
from loopdropout_trainer.reports.labels import labelled
from loopdropout_trainer.reports.tables import add_seeds, fit_title, mean_numbers, name_examples, spread_places
from loopdropout_trainer.results.run_commands import read_command
from loopdropout_trainer.results.run_files import is_of_base
from loopdropout_trainer.results.run_states import name_runs
from loopdropout_trainer.results.sweep_folder import lacks_measurements
from loopdropout_trainer.saving.saved_adapter import holds_adapter


REDUCTION_TITLE = "Loss reduction on {}, adapter in one loop only, in %, mean ± SD over seeds"


class LossTable(NamedTuple):
    """A table of losses.

    Attributes:
        name: Name of its files.
        title: Text above it.
        numbers: Columns `mean`, `sd` and `num_seeds` by `method` and by `K` or `loop`.
        texts: Mean ± SD with a column for each depth or loop, and different numbers of seeds.
    """

    name: str
    title: str
    numbers: pd.DataFrame
    texts: pd.DataFrame


PLACES = {
    "depth_loss": ("num_loops", "K", " with K loops"),
    "readout_loss": ("loop", "loop", ", read out after each loop"),
}
"""Column of the place of each loss, the printed name of the place, and the words of the title."""


def make_loss_tables(results: pd.DataFrame) -> list[LossTable]:
    """Return the tables of losses by depth and by readout, one for each set of examples, and of readouts for each depth, too.

    Args:
        results: From `final_results`.
    """
    tables = []
    for metric, (column, place, _) in PLACES.items():
        losses = results[results["metric"] == metric]
        keys = ["task", "problem_set"]
        if column != "num_loops":
            keys.append("num_loops")
        has_depths = "num_loops" in keys and losses["num_loops"].nunique() > 1
        for number, ((task, *_), rows) in enumerate(losses.groupby(keys, sort=False), start=1):
            numbers = _average_places(rows, column, place)
            title = title_losses(metric, task, rows, losses)
            if has_depths:  # with a table for each
                title += f", at K = {rows['num_loops'].iloc[0]:g}"
            title = fit_title(f"{title}, mean ± SD over seeds", numbers)
            texts = spread_places(numbers, decimals=4).rename(columns=lambda name, head=place: _name_place(head, name))
            title, texts = add_seeds(title, texts, numbers["num_seeds"])
            name = metric if number == 1 else f"{metric}_{number}"
            tables.append(LossTable(name, title, numbers, texts))
    return tables


def reduction_numbers(reductions: pd.DataFrame) -> pd.DataFrame:
    """Return the loss reductions (%) by method and active loop in the columns `mean`, `sd` and `num_seeds`.

    Args:
        reductions: A group of `split_reductions`.
    """
    lines = []
    for (label, gates), rows in labelled(reductions).groupby(["label", "gates"], sort=False):
        loops = "all loops" if gates == "unit" else gates
        lines.append({"method": label, "adapter in": loops, **mean_numbers(average(rows))})
    return pd.DataFrame(lines).set_index(["method", "adapter in"])


def make_reduction_table(examples: str, numbers: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """Return the title and the texts of loss reductions, mean ± SD with one column for each loop.

    Args:
        examples: Description of the examples by `split_reductions`.
        numbers: From `reduction_numbers`.
    """
    loops = numbers.index.get_level_values("adapter in").unique()
    texts = spread_places(numbers, decimals=1)[[*loops]]
    return add_seeds(fit_title(REDUCTION_TITLE.format(examples), numbers), texts, numbers["num_seeds"])


def describe_unmeasured(results: pd.DataFrame) -> list[str]:
    """Return a sentence about the trainings without a loss reduction, with the command that measures it, or nothing.

    Args:
        results: From `final_results`. Some trainings have a loss reduction.
    """
    measured = {*results.loc[results["metric"] == "loss_reduction", "run"]}
    trained = results.loc[~is_of_base(results), "run"].dropna().unique()
    missing = [run for run in trained if run not in measured and _can_be_diagnosed(Path(run))]
    if not missing:
        return []
    return [
        f"No loss reduction is measured yet of {name_runs(missing)}. `{join_command('diagnose', missing[0])}` measures it on "
        "all held-out examples."
    ]


def _can_be_diagnosed(run: Path) -> bool:
    """Return whether `diagnose` can measure a run, whose own measurements are all there."""
    has_targets = read_command(run) in (None, "sft")  # of other commands, the data have none
    return has_targets and holds_adapter(run) and not lacks_measurements(run)


def title_losses(metric: str, task: str, rows: pd.DataFrame, all_rows: pd.DataFrame | None = None) -> str:
    """Return the title of losses on a task, whose metric is one of `PLACES`. `all_rows`: as in `name_examples`."""
    _, _, words = PLACES[metric]
    return f"Loss on {name_examples(task, rows, all_rows)}{words}, in nats per token"


def _average_places(rows: pd.DataFrame, column: str, place: str) -> pd.DataFrame:
    """Return the means over seeds by method and place."""
    named = labelled(rows)
    # The base model is measured next to each training, in batches of other sizes, which round in another way.
    of_base = is_of_base(named)
    named.loc[of_base, "value"] = named[of_base].groupby(["label", column])["value"].transform("first")
    lines = [
        {"method": label, place: int(at), **mean_numbers(average(own))}
        for (label, at), own in named.groupby(["label", column], sort=False)
    ]
    return pd.DataFrame(lines).set_index(["method", place])


def _name_place(place: str, name: int | str) -> str:
    """Return the head of a column, such as "K = 4" or "loop 4". The column `seeds` keeps its name."""
    if isinstance(name, str):
        return name
    return f"K = {name}" if place == "K" else f"loop {name}"
