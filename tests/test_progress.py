"""Runs of experiment trackers: one for each training, with curves over loops and tables of samples."""

import sys
from types import SimpleNamespace

import pandas as pd

from loopdropout_trainer.progress import finish_run, log_table


def test_curves_are_logged_over_loops(make_sft, monkeypatch):
    logs, trainer = [], make_sft()
    log = lambda args, state, control, values: logs.append((state.global_step, values))
    monkeypatch.setattr(trainer.callback_handler, "on_log", log)
    accuracy = {"metric": "accuracy", "task": "gsm8k", "num_loops": 4, "gates": "unit", "value": 50.0}
    rows = [
        accuracy,
        {**accuracy, "num_loops": 2, "value": 20.0},
        {**accuracy, "gates": "none", "value": 0.0},
        {**accuracy, "gates": "loop 3", "loop": 3, "value": 30.0},
        {**accuracy, "metric": "loss_reduction", "gates": "loop 1", "loop": 1, "value": 5.0},
        {**accuracy, "metric": "loss_reduction", "value": 6.0},
    ]
    finish_run(trainer, rows)
    assert logs == [
        (2, {"test_accuracy_by_depth/gsm8k": 20.0}),
        (4, {"test_accuracy_by_depth/gsm8k": 50.0}),
        (1, {"test_rho_by_loop/gsm8k": 5.0}),
        (3, {"test_accuracy_by_loop/gsm8k": 30.0}),
    ]


def test_tables_are_logged_to_running_trackers(config, monkeypatch):
    logs, table = [], pd.DataFrame([{"step": 1, "completion": "2"}])
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(log=logs.append, Table=lambda dataframe: dataframe))
    log_table(config(report_to=["tensorboard", "trackio"]), "samples", table)
    assert logs == [{"samples": table}]
