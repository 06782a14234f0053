"""The results and the recipe of a training, from its trainer."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any

from loopdropout_trainer.files import checkpoint_step, public_name
from loopdropout_trainer.results.problems import digest_examples
from loopdropout_trainer.results.run_files import DRAWN, GATE_MEAN
from loopdropout_trainer.settings.arguments import describe_adapter
from loopdropout_trainer.settings.library_fields import SAFE_VALUES


if TYPE_CHECKING:
    from datasets import Dataset
    from torch.utils.data import DataLoader
    from transformers import Trainer

UNITS = {
    "train_loss": "nats",
    "eval_loss": "nats",
    "num_tokens": "tokens",
    "train_seconds": "s",
    "step_seconds": "s",
    "tokens_per_second": "tokens/s",
    "peak_memory_gb": "GB",
}
"""Units of the results of a training. The others are numbers."""


OTHER_DEPTH = "_num_loops"
"""End of the name of the depth in the logs of an evaluation at another depth than that of the training."""

OTHER_GATES = "_gates"
"""End of the name of the gates, which are a text, in the logs of an evaluation under other gates than 1."""


def as_trained(history: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the logs of a training without those of evaluations of another model than the trained one.

    They run at another depth or under other gates, as in a block of `use_depth`, `use_gates` or `disable_adapter`.
    """
    logs = []
    for log in history:
        if not any(_names_another_model(name, value) for name, value in log.items()):
            logs.append(log)
    return logs


def _names_another_model(name: str, value: Any) -> bool:
    """Return whether an entry of a log is a depth or gates that differ from those of the training."""
    if name.endswith(OTHER_DEPTH):
        return True
    return name.endswith(OTHER_GATES) and isinstance(value, str)  # a number is a metric of the user


def saved_step(trainer: Trainer) -> int:
    """Return the optimizer step of a trainer's weights, which is the best one after `load_best_model_at_end`."""
    state = trainer.state
    loads_best = trainer.args.load_best_model_at_end and not trainer._is_cut_off
    if loads_best and state.best_model_checkpoint is not None:
        return checkpoint_step(state.best_model_checkpoint)  # the best step may have no checkpoint
    return state.global_step


def result_columns(trainer: Trainer, method: str) -> dict[str, Any]:
    """Return the columns that all results of a trainer's model share."""
    return {
        "method": method,
        "num_loops": trainer.looped.trained_with["num_loops"],
        "seed": trainer.args.seed,
        "step": saved_step(trainer),
        "training": trainer.training_id,
    }


def count_examples(dataset: Dataset) -> tuple[int, int | None]:
    """Return the number of examples of a dataset, and the number of the rows that they are packed into, or None."""
    if "seq_lengths" not in dataset.column_names:
        return len(dataset), None
    return sum(len(lengths) for lengths in dataset["seq_lengths"]), len(dataset)


def describe_held_out_examples(trainer: Trainer) -> dict[str, Any]:
    """Return the number of the examples of a held-out loss as the column `n`, and their digest as the column `problems`.

    A stream has none of them. There is no digest either if a data collator of the user gives random batches.
    """
    import torch
    from datasets import Dataset

    if not isinstance(trainer.eval_dataset, Dataset):
        return {}
    num_examples, _ = count_examples(trainer.eval_dataset)
    columns: dict[str, Any] = {"n": num_examples}
    evaluated = trainer.get_eval_dataloader()  # whose dataset has only the columns that the collator expects
    batch_size = trainer.args.per_device_eval_batch_size
    with torch.random.fork_rng():
        first, again = next(_collate(evaluated, batch_size)), next(_collate(evaluated, batch_size))
        if digest_examples([first]) == digest_examples([again]):
            columns["problems"] = digest_examples(_collate(evaluated, batch_size))
    return columns


def _collate(evaluated: DataLoader, batch_size: int) -> Iterator[Any]:
    """Yield all batches of an evaluation, also in one of several processes."""
    data = evaluated.dataset
    for start in range(0, len(data), batch_size):
        rows = [data[place] for place in range(start, min(start + batch_size, len(data)))]
        yield evaluated.collate_fn(rows)


def mean_loss(history: Sequence[Mapping[str, float]]) -> float:
    """Return the training loss of a log: the mean over all steps, also of those before an interruption, or NaN without a loss.

    A logged loss is the mean over the steps since the loss before it.
    """
    total, last_step = 0.0, 0
    for log in history:
        if "loss" in log:
            total += log["loss"] * (log["step"] - last_step)
            last_step = log["step"]
    return total / last_step if last_step else math.nan


def training_results(trainer: Trainer) -> list[dict[str, Any]]:
    """Return the results of a training, without the columns of `task`, `method`, `seed` and `num_loops`.

    `eval_loss` belongs to the weights that the trainer has now: it is measured at their step, or before if no evaluation was
    at the last step. `train_seconds` is the measured time of all steps, also of those before an interruption, without
    evaluations, samples and checkpoints. `step_seconds` is its mean for a step. `num_tokens` is without the tokens of earlier
    calls of `train`, which the logs count, too.
    """
    import torch

    history, num_steps = as_trained(trainer.state.log_history), trainer.state.global_step
    newest_values = {}
    for log in history:
        newest_values |= log
    eval_loss = math.nan
    for log in history:
        if "eval_loss" in log and log["step"] <= saved_step(trainer):
            eval_loss = log["eval_loss"]
    seconds = trainer._step_clock.seconds
    num_tokens = newest_values.get("num_tokens", math.nan) - trainer.resumption.tokens_before
    values = {
        "train_loss": mean_loss(history),
        "eval_loss": eval_loss,
        **_count_train_examples(trainer),
        "trainable_parameters": trainer.model.get_nb_trainable_parameters()[0],
        "num_tokens": num_tokens,
        "train_seconds": seconds,
        "step_seconds": seconds / num_steps,
        "tokens_per_second": num_tokens / seconds,
        "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9 or math.nan,
    }
    values |= _mean_rewards(history)
    rows = []
    for name, value in values.items():
        if math.isnan(value):  # it is not known
            continue
        gates = "unit"
        if name == "train_loss" and trainer.rule.draws_gates:
            gates = DRAWN  # while the held-out loss is measured at gates of 1
        row = {"metric": name, "value": value, "unit": UNITS.get(name, ""), "gates": gates}
        if name == "eval_loss":
            row |= describe_held_out_examples(trainer)
        rows.append(row)
    return rows + _mean_gates(trainer)


def _count_train_examples(trainer: Trainer) -> dict[str, int]:
    """Return the numbers of examples and of packed rows that a trainer trains on, as far as they are known."""
    from datasets import Dataset

    data = trainer.train_dataset
    if isinstance(data, Dataset):
        num_examples, num_packed_rows = count_examples(data)
        if num_packed_rows is None:
            return {"examples": num_examples}
        return {"examples": num_examples, "packed_rows": num_packed_rows}
    if isinstance(data, Sized):
        return {"examples": len(data)}
    return {}


def _mean_gates(trainer: Trainer) -> list[dict[str, Any]]:
    """Return the mean gate of each loop if it is not 1 by a fault of the rule, of which the training has warned."""
    fault = trainer._rule_fault
    if fault is None:
        return []
    shared = {"metric": GATE_MEAN, "unit": "", "gates": DRAWN, "n": fault.num_examples}
    return [{**shared, "loop": loop, "value": mean} for loop, mean in enumerate(fault.means, start=1)]


def _mean_rewards(history: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Return the mean rewards in the first and in the last tenth of a log, or none without rewards.

    TRL logs None if no completion had a reward since the log before.
    """
    import numpy as np

    rewards = [log["reward"] for log in history if log.get("reward") is not None]
    if not rewards:
        return {}
    tenth = max(1, len(rewards) // 10)
    return {"reward_first": np.mean(rewards[:tenth]), "reward_last": np.mean(rewards[-tenth:])}


ALWAYS_SAVED = (
    "rule",
    "p",
    "learning_rate",
    "seed",
    "num_train_epochs",
    "max_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
)
"""Arguments of a training that `training_recipe` has also if the user has not given them."""

_UNSAVED = {
    "output_dir",
    "resume_from_checkpoint",
    "hub_token",
    "model_init_kwargs",  # the model has fields of its own
    "generation_batch_size",  # GRPOConfig derives it
    *SAFE_VALUES,
}
"""Arguments of a training that `training_recipe` leaves out, also because they can run code."""


def training_recipe(trainer: Trainer) -> dict[str, Any]:
    """Return the settings of a training in Python as a recipe. It has no data, which the program made.

    It has the fields that the user has given, and not the values that the libraries have chosen for this machine.
    """
    model, args, facts = trainer.model, trainer.args, trainer.looped.trained_with
    recipe = {
        "model_name_or_path": public_name(model.get_base_model().config.name_or_path),
        "model_revision": facts.get("base_revision"),
        "num_loops": facts["num_loops"],
        "dtype": facts.get("dtype"),
        "adapter_name_or_path": None if facts.get("earlier_trainings") else facts.get("initial_adapter"),
        **describe_adapter(model),
    }
    recipe = {name: value for name, value in recipe.items() if value is not None}
    given = {*args.given_fields()} - _UNSAVED
    for field in dataclasses.fields(trainer.config_class):
        value = getattr(args, field.name)
        if field.name in given or field.name in ALWAYS_SAVED and value is not None:
            value = value.value if isinstance(value, Enum) else value
            with suppress(TypeError):  # an object, such as `accelerator_config`
                recipe[field.name] = json.loads(json.dumps(value))
    return recipe
