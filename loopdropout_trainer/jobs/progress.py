"""Show a job of several trainings: its progress and sample completions, and its results in W&B, Trackio or MLflow."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import chain, islice
from typing import Any

import pandas as pd
import torch
from tqdm.auto import tqdm
from transformers import (
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.generation import generate_greedy
from loopdropout_trainer.limits import render_chat
from loopdropout_trainer.results.run_files import is_of_base
from loopdropout_trainer.terminal import format_value
from loopdropout_trainer.training.distributed import IGNORED, shards_weights


CURVES = {
    ("accuracy", "num_loops"): "test_accuracy_by_depth",
    ("accuracy", "loop"): "test_accuracy_by_loop",
    ("loss_reduction", "loop"): "test_loss_reduction_by_loop",
}
"""Curves by metric and axis: over depths, or over the loop that alone has the adapter."""


class JobProgressCallback(ProgressCallback):
    """Show the trainings of a job, with the method's name and the expected time until the end of the job.

    The time includes the evaluations as soon as the first training has been evaluated. Attach one object to all trainers.

    Args:
        trainings: Number of trainings of the job. It may be set before the first one.
    """

    evaluation_seconds = trained_at = None

    def __init__(self, trainings: int = 1) -> None:
        super().__init__()
        self.trainings = trainings

    def attach(self, trainer: Trainer, title: str) -> None:
        """Show the progress of a trainer under a title, instead of transformers' own display."""
        self.title = title
        for display in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(display)
        trainer.add_callback(self)

    def on_train_begin(self, args, state, control, **kwargs):
        self.current_step = self.first_step = state.global_step
        self.start = time.monotonic()
        self.time_left = ""  # after the first step, such as "0:01:00 left"
        if self.trained_at is not None:
            self.evaluation_seconds = self.start - self.trained_at
        # None hides the bar in a file, such as the log of a sweep's run. The lines of `on_log` stay.
        hidden = args.disable_tqdm or not state.is_world_process_zero
        self.training_bar = tqdm(
            desc=self.title, total=state.max_steps, initial=state.global_step, disable=hidden or None
        )

    def on_step_end(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control, **kwargs)
        step_seconds = (time.monotonic() - self.start) / (state.global_step - self.first_step)
        left = (self.trainings * state.max_steps - state.global_step) * step_seconds
        left += self.trainings * (self.evaluation_seconds or 0)
        without = "" if self.evaluation_seconds else ", evaluations not counted"
        self.time_left = f"{timedelta(seconds=round(left))} left{without}"
        self.training_bar.set_postfix_str(self.time_left, refresh=False)

    def on_prediction_step(self, args, state, control, **kwargs):
        if not args.disable_tqdm:
            super().on_prediction_step(args, state, control, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and self.training_bar is not None:
            values = {name: format_value(value) for name, value in logs.items()}
            title = f"{self.title}, {self.time_left}" if self.time_left else self.title
            self.training_bar.write(f"{title}: {values}")

    def on_train_end(self, args, state, control, **kwargs):
        super().on_train_end(args, state, control, **kwargs)
        self.trainings -= 1
        self.trained_at = time.monotonic()

    def close(self) -> None:
        """Close the bars of a training that failed. Python would print them again at its end, after the error."""
        for bar in (self.prediction_bar, self.training_bar):
            if bar is not None:
                bar.close()
        self.prediction_bar = self.training_bar = None


class SampleCompletionsCallback(TrainerCallback):
    """Print greedy completions of the first evaluation examples, and log them to W&B and Trackio.

    It does so at each evaluation, and after the last step, once for each step. After a signal, the training ends without them.

    Args:
        trainer: Trainer with an evaluation dataset.
        number: Number of examples.

    Raises:
        UserError: If the trainer has no evaluation dataset.
    """

    def __init__(self, trainer: Trainer, number: int = 1) -> None:
        self.trainer = trainer
        self.last_step: int | None = None  # of the newest samples
        dataset = trainer.eval_dataset
        if dataset is None:
            raise UserError(
                "`eval_dataset` must be given to the trainer, because `SampleCompletionsCallback` completes its examples, got "
                "None."
            )
        if isinstance(dataset, Mapping):  # several by name
            dataset = chain.from_iterable(dataset.values())
        self.examples = [self._divide(row) for row in islice(dataset, number)]

    def _divide(self, row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """Return the tokens of the prompt and of the reference of an example."""
        with torch.random.fork_rng():
            batch = self.trainer.data_collator([row])
        ids, trained = batch["input_ids"][0], batch["labels"][0] != IGNORED
        start = int(trained.int().argmax())
        if start == 0:  # the whole text is trained, without a prompt
            start = _find_last_answer(self.trainer.processing_class, ids.tolist()) or len(ids) // 2
        # The reference ends with the first answer: a chat has further turns behind it, and a packed row further examples.
        is_answer = trained[start:].tolist()
        length = is_answer.index(False) if False in is_answer else len(is_answer)
        return ids[:start].tolist(), ids[start : start + length].tolist()

    def on_train_begin(self, args, state, control, **kwargs):
        self.last_step = None

    def on_step_end(self, args, state, control, **kwargs):
        if control.should_training_stop and not control.should_evaluate:
            self.on_evaluate(args, state, control)

    def on_evaluate(self, args, state, control, **kwargs):
        is_stopped = self.trainer._stop_callback.received
        if is_stopped or state.global_step == self.last_step:  # the evaluation of an epoch comes after its last step
            return
        self.last_step = state.global_step
        with self.trainer._step_clock.pause():
            self._print_samples(args, state)

    def _print_samples(self, args: TrainingArguments, state: TrainerState) -> None:
        """Print and log the completions of the examples at the present step."""
        trainer, tokenizer = self.trainer, self.trainer.processing_class
        if state.is_world_process_zero and not shards_weights(args):
            prompts = [prompt for prompt, _ in self.examples]
            with torch.random.fork_rng(), trainer.accelerator.autocast():
                texts = generate_greedy(trainer.model, tokenizer, prompts, max_new_tokens=64, progress=False)
            samples = []
            for (prompt, reference), text in zip(self.examples, texts, strict=True):
                sample = {"step": state.global_step, "prompt": tokenizer.decode(prompt), "completion": text}
                sample["reference"] = tokenizer.decode(reference, skip_special_tokens=True)
                tqdm.write("\n".join(f"{name}: {value}" for name, value in sample.items()))
                samples.append(sample)
            log_table(args, "samples", pd.DataFrame(samples))


def _find_last_answer(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> int | None:
    """Return the index of the first token of the last answer in a chat, or None if the text is not a chat."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    turns = [{"role": "user", "content": "x"}]
    try:
        question = render_chat(tokenizer, turns)
        prompt = render_chat(tokenizer, turns, add_generation_prompt=True)
    except UserError:  # the template needs other turns
        return None
    # The text that the template writes in front of each answer, such as "<|im_start|>assistant".
    beginning = tokenizer(prompt.removeprefix(question), add_special_tokens=False)["input_ids"]
    for start in range(len(ids) - 1, 0, -1):
        if beginning and ids[:start][-len(beginning) :] == beginning:
            return start
    return None


def log_table(args: TrainingArguments, name: str, table: pd.DataFrame) -> None:
    """Log a table to the running runs of W&B and Trackio."""
    for tracker in {"wandb", "trackio"}.intersection(args.report_to):
        module = sys.modules[tracker]
        module.log({name: module.Table(dataframe=table)})


def finish_run(trainer: Trainer, rows: Sequence[Mapping[str, Any]]) -> None:
    """Log the curves of a training to its run in W&B, Trackio or MLflow, and end that run. The next training starts another.

    The curves are the results in `CURVES`. In place of the step, a point has its depth or its loop.

    Args:
        trainer: Trainer after its training.
        rows: Results of its folder.
    """
    args = trainer.args
    modules = {name: sys.modules[name] for name in args.report_to if name in sys.modules}
    if "mlflow" in modules:  # transformers has ended its run, which is opened again for the curves
        ended = modules["mlflow"].last_active_run()
        if ended and ended.info.run_name == args.run_name:
            modules["mlflow"].start_run(run_id=ended.info.run_id)
    for row in sorted(rows, key=lambda row: (row["num_loops"], row.get("loop") or 0)):
        axis = "loop" if row.get("loop") else "num_loops"
        name = CURVES.get((row["metric"], axis))
        if name is not None and not is_of_base(row):
            state = replace(trainer.state, global_step=row[axis])
            logs = {f"{name}/{row['task']}": row["value"]}
            trainer.callback_handler.on_log(args, state, trainer.control, logs)
    for name, end in {"wandb": "finish", "trackio": "finish", "mlflow": "end_run"}.items():
        if name in modules:
            getattr(modules[name], end)()
