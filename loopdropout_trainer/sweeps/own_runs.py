"""Which runs in the folder of a sweep are its own. Other sweeps can share the folder, and an earlier recipe can leave runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loopdropout_trainer.results.sweep_folder import SweepRun


def list_own_folders(sweep: Any) -> set[Path]:
    """Return the folders that runs with the methods, learning rates and seeds of a sweep have, also before they start.

    A learning rate that `extend_grid` added counts also if its run has results of other imported code.

    Args:
        sweep: `Sweep` of recipes/sweep.py.
    """
    folders = set()
    for method in sweep.recipes:
        rates = {*sweep.choice(method).rates}
        if sweep.extend_grid:  # else the rates are those of the recipe, and no score is read, which takes time
            rates.update(sweep.choice(method, with_other_code=True).rates)
        for rate in rates:
            folders.update(sweep.folder(SweepRun(method, rate, seed, False)) for seed in sweep.seeds)
    return folders
