"""Runs of experiment trackers, such as W&B, Trackio and MLflow: one run for each training, with its results."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from transformers import Trainer, TrainingArguments


CURVES = {
    ("accuracy", "num_loops"): "test_accuracy_by_depth",
    ("accuracy", "loop"): "test_accuracy_by_loop",
    ("loss_reduction", "loop"): "test_rho_by_loop",
}
"""Curves by metric and axis: over depths, or over the loop that alone has the adapter."""


def log_table(args: TrainingArguments, name: str, table: pd.DataFrame) -> None:
    """Log a table to the running runs of W&B and Trackio."""
    for tracker in {"wandb", "trackio"}.intersection(args.report_to):
        module = sys.modules[tracker]
        module.log({name: module.Table(dataframe=table)})


def finish_run(trainer: Trainer, rows: Sequence[Mapping[str, Any]]) -> None:
    """Log results to the run of a training, and end the run. The next training then starts another run.

    The results are `CURVES`. The step of a point is the depth or the loop.

    Args:
        trainer: Trainer after its training.
        rows: Results of its folder.
    """
    args = trainer.args
    modules = {name: sys.modules[name] for name in args.report_to if name in sys.modules}
    if mlflow := modules.get("mlflow"):  # transformers has ended its run
        ended = mlflow.last_active_run()
        if ended and ended.info.run_name == args.run_name:
            mlflow.start_run(run_id=ended.info.run_id)
    for row in sorted(rows, key=lambda row: (row["num_loops"], row.get("loop") or 0)):
        axis = "loop" if row.get("loop") else "num_loops"
        if row["gates"] != "none" and (name := CURVES.get((row["metric"], axis))):
            state = replace(trainer.state, global_step=row[axis])
            logs = {f"{name}/{row['task']}": row["value"]}
            trainer.callback_handler.on_log(args, state, trainer.control, logs)
    for name, end in {"wandb": "finish", "trackio": "finish", "mlflow": "end_run"}.items():
        if name in modules:
            getattr(modules[name], end)()
