"""Sentences about how the trainings of a report ran: their learning rates, early stops, and starts from trained weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from loopdropout_trainer.errors import UserError, count
from loopdropout_trainer.reports.labels import labelled
from loopdropout_trainer.results.run_files import is_of_base, is_of_training, read_own_results
from loopdropout_trainer.saving.checkpoints import STATE_FILE, find_early_stop, load_state, newest_checkpoint
from loopdropout_trainer.saving.source import find_source


RATE = "recipe_learning_rate"
"""Column of the learning rate."""


def describe_rates(results: pd.DataFrame) -> list[str]:
    """Return a sentence with the learning rates of methods of sweeps, or nothing if there are none or the labels have them.

    Args:
        results: From `final_results`.
    """
    if RATE not in results or "label_fields" not in results or results["label_fields"].str.contains(RATE).any():
        return []
    of_sweeps = results[results["sweep"].notna() & results[RATE].notna() & ~is_of_base(results)]
    texts = {}
    for label, rates in labelled(of_sweeps).groupby("label", sort=False)[RATE]:
        texts[label] = " or ".join(f"{rate:g}" for rate in sorted(rates.unique()))
    values = [*dict.fromkeys(texts.values())]
    if len(values) > 1:
        listed = [f"{label} {text}" for label, text in texts.items()]
        return [f"Learning rates: {', '.join(listed)}."]
    return [f"Learning rate: {value}." for value in values]


def describe_early_stops(folders: Sequence[str]) -> list[str]:
    """Return a line with the trainings in some folders that stopped early, and where, or no line if there are none."""
    stops = []
    for folder in folders:
        if not Path(folder, STATE_FILE).is_file():  # of an older run
            continue
        state = load_state(folder)
        if find_early_stop(state) is not None:
            stops.append(f"{folder} after {state.global_step:,} of {count(state.max_steps, 'step')}")
    return [f"Stopped early: {'; '.join(stops)}."] if stops else []


def describe_starts(folders: Sequence[str]) -> list[str]:
    """Return a line for each training in some folders whose weights were trained before."""
    lines = []
    for folder in folders:
        earlier = _find_earlier_trainings(folder)
        if earlier:
            lines.append(f"{folder} started from weights that were trained before: {'; '.join(earlier)}.")
    return lines


def _find_earlier_trainings(folder: str) -> Sequence[str]:
    """Return the trainings before the one in a folder, as its saved adapter says, or else its newest checkpoint."""
    trained = {row.get("training") for row in read_own_results(folder) if is_of_training(row)}
    for place in filter(None, [folder, newest_checkpoint(folder)]):
        try:
            metadata = find_source(place).metadata
        except UserError:  # not saved
            continue
        earlier = metadata.get("earlier_trainings")
        if earlier and metadata.get("training_id") in trained:
            return earlier
    return ()
