"""Trainings that have not ended, of which only checkpoints are left: after a kill, an interruption, or while they run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from loopdropout_trainer.errors import count
from loopdropout_trainer.results.run_files import read_recipe
from loopdropout_trainer.saving.checkpoints import STATE_FILE, load_state, newest_checkpoint
from loopdropout_trainer.settings.recipe_folders import sort_folders


UNFINISHED = "unfinished_at"
"""Metric of the only result of a training that has not ended: the step of its newest checkpoint."""


def read_unfinished(folders: Iterable[str | Path]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a result for each training below some folders that has left checkpoints, and a sentence about each.

    The result names the training, whose checkpoint has the logged losses. Call it for trainings without results only.
    """
    from loopdropout_trainer.saving.source import find_source

    runs: set[Path] = set()
    for folder in folders:
        # The answers of an evaluated checkpoint are in a folder of its name, too, without a state.
        runs.update(path.parent.parent for path in Path(folder).rglob(f"checkpoint-*/{STATE_FILE}"))
    rows, sentences = [], []
    for run in sort_folders(runs):
        checkpoint = newest_checkpoint(run)
        if checkpoint is None:
            continue
        source, state = find_source(checkpoint), load_state(checkpoint)
        if source.training_id is None:  # of another trainer
            continue
        row = {f"recipe_{name}": value for name, value in read_recipe(run).items()}
        row |= {"method": source.columns.get("method"), "seed": source.columns.get("seed"), "folder": str(run)}
        row |= {"metric": UNFINISHED, "value": state.global_step, "unit": "step", "task": "training", "gates": "unit"}
        rows.append(row | {"num_loops": source.num_loops, "step": state.global_step, "training": source.training_id})
        sentences.append(
            f"The training in {run} has not ended, so it has no results. Its newest checkpoint is {Path(checkpoint).name}, of "
            f"{count(state.max_steps, 'step')} in all, and a figure of losses ends there."
        )
    return rows, sentences
