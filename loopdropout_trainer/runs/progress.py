"""Calm output: one bar for each phase with the time left, and one line for each logging interval."""

from __future__ import annotations

import datasets
from transformers import ProgressCallback, Trainer
from transformers.utils import logging


SHORT = 20_000  # examples; a bar over fewer of them is gone before anyone can read it


def hide_short_bars(num_examples: int) -> None:
    """Leave out the bars of loading weights, and those of preparing examples unless there are many of them."""
    logging.disable_progress_bar()
    if num_examples < SHORT:
        datasets.disable_progress_bars()


def show_training(trainer: Trainer, title: str) -> None:
    """Give a trainer one bar with a title, and one line for each logging interval, instead of its own."""
    if not trainer.args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(TrainingProgress(title))


class TrainingProgress(ProgressCallback):
    """transformers' bar, with a title, that writes the log as words."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.set_description(self.title)

    def on_log(self, args, state, control, logs=None, **kwargs):
        line = log_line(state.global_step, state.max_steps, logs or {})
        if line and state.is_world_process_zero and self.training_bar is not None:
            self.training_bar.write(line)


def log_line(step: int, max_steps: int, logs: dict[str, float]) -> str | None:
    """Return the line of one logging interval or evaluation; None for the summary of the whole run, which has a table."""
    for loss, words in (("loss", "loss"), ("eval_loss", "held-out loss")):
        if loss in logs:
            line = f"step {step} of {max_steps}: {words} {float(logs[loss]):.4f}"
            rate = logs.get("learning_rate")
            return line if rate is None else f"{line}, learning rate {float(rate):.3g}"
    return None
