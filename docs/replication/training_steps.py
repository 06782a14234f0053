"""Study B of plan.md: whether Loop Dropout loses on SmolLM2 because it is trained for too few steps.

python docs/replication/make.py collect outputs/studies/small_lm_steps   # finished runs -> runs.csv.gz
python docs/replication/training_steps.py                                # the registered tests
"""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd
from claims import format_p, verdict, with_interval
from intervals import Estimate, estimate, holm
from runs import RUNS, Study, differences


SELECTION_SEED = 30


def gains(study: Study, steps: int, method: str = "loop_dropout", **place) -> np.ndarray:
    """Return a method's gains over LoRA [seeds, problems] in points, without the seed that chose the learning rates."""
    ours, lora = (
        study.select(f"{name}@{steps}_steps", "accuracy", **place).drop(SELECTION_SEED, errors="ignore")
        for name in (method, "lora")
    )
    return differences(ours, lora)


def count_compared(study: Study) -> int:
    """Return the number of runs that are compared, without those that only chose a learning rate."""
    accuracy = study.rows[study.rows["metric"] == "accuracy"]
    return len(accuracy[["method", "seed"]].drop_duplicates().query("seed != @SELECTION_SEED"))


def registered_tests(study: Study) -> dict[str, tuple[Estimate, float]]:
    """Return the estimates of both registered tests with p-values that are adjusted by Holm's method.

    `gain`: Loop Dropout minus LoRA after 1,200 steps, in distribution at K = 4.
    `change`: this gain minus the gain after 150 steps.
    """
    late, early = gains(study, 1200), gains(study, 150)
    found = {"gain": estimate(late), "change": estimate(late - early)}
    adjusted = holm([test.p for test in found.values()])
    return dict(zip(found, zip(found.values(), adjusted, strict=True), strict=True))


if __name__ == "__main__":
    rows = pd.read_csv(RUNS)
    study = Study(rows[rows["study"] == "small_lm_steps"])
    if not count_compared(study):
        sys.exit("Study B was withdrawn before any compared run, so runs.csv.gz has no runs to test.")
    for name, (test, p) in registered_tests(study).items():
        print(f"{name}: {with_interval(test)}, adjusted p {format_p(p)}, {verdict(test.mean, p)}")
