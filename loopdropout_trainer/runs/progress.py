"""Calm output: one bar for each phase with the time left, and one line for each logging interval."""

from __future__ import annotations

import logging
import os
import sys

from tqdm.auto import tqdm
from transformers import ProgressCallback


_OF_REWARDS = (
    "reward",
    "rewards/margins",
    "rewards/accuracies",
    "completions/mean_length",
    "kl",
    "entropy",
    "gate_mean",
)
"""What a line says of the log of DPO and GRPO beside the loss."""


class _LogAboveBars(logging.StreamHandler):
    """Writes log records above the bars; a message that every evaluation of a run repeats is written once."""

    _said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if line not in self._said or record.levelno > logging.WARNING:
            tqdm.write(line, file=sys.stderr)
        self._said.add(line)


def show_log() -> None:
    """Write this package's log to standard error: from INFO on in the first process, from WARNING on in the others."""
    log = logging.getLogger("loopdropout_trainer")
    if not log.handlers:
        log.addHandler(_LogAboveBars())
        log.handlers[0].setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    log.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)


class TrainingProgress(ProgressCallback):
    """transformers' bar, with a title, that writes the log as words; in a file there are the words alone."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title

    def on_train_begin(self, args, state, control, **kwargs):
        self.current_step = 0
        if state.is_world_process_zero:
            # `disable=None`: no bar where standard error is no terminal.
            self.training_bar = tqdm(total=state.max_steps, desc=self.title, dynamic_ncols=True, disable=None)

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        if sys.stderr.isatty():
            super().on_prediction_step(args, state, control, eval_dataloader, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        line = log_line(state.global_step, state.max_steps, logs or {})
        if line and state.is_world_process_zero and self.training_bar is not None:
            tqdm.write(line, file=sys.stdout)


def log_line(step: int, max_steps: int, logs: dict[str, float]) -> str | None:
    """Return the line of one logging interval or evaluation; None for the summary of the whole run, which has a table."""
    before = "" if "loss" in logs else "eval_"
    if f"{before}loss" not in logs:
        return None
    said = [f"{'held-out ' if before else ''}loss {float(logs[f'{before}loss']):.4f}"]
    if any(name.startswith(f"{before}reward") for name in logs):
        found = {name: logs.get(before + name) for name in _OF_REWARDS}
        said += [f"{name.split('/')[-1]} {float(value):.3g}" for name, value in found.items() if value is not None]
    if logs.get("learning_rate") is not None:
        said.append(f"learning rate {float(logs['learning_rate']):.3g}")
    return f"step {step} of {max_steps}: {', '.join(said)}"
