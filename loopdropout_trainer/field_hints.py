"""The advice in the message about a field that a script does not have, by the names that people type."""

from __future__ import annotations

from collections.abc import Collection

from loopdropout_trainer.errors import closest_match


USUAL_NAMES = {
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "batch_size": "per_device_train_batch_size",
    "dropout": "p",
    "loop_dropout": "p",
    "K": "num_loops",
    "loops": "num_loops",
    "model": "model_name_or_path",
    "dataset": "dataset_name",
    "rank": "lora_r",
    "steps": "max_steps",
    "tasks": "benchmarks",
    "task": "benchmarks",
    "eval_tasks": "benchmarks",
    "limit": "benchmark_limit",
    "plot_loss": "report_to",
    "resume": "resume_from_checkpoint",
    "drop_p": "p",
    "dropout_p": "p",
    "p_drop": "p",
    "drop_prob": "p",
    "loop_dropout_p": "p",
    "patience": "early_stopping_patience",
    "torch_dtype": "dtype",
    "load_in_4bit": "model_init_kwargs",
    "dataset_test_split": "num_eval_examples",
    "test_size": "num_eval_examples",
    "max_seq_length": "max_length",
    "group_by_length": "train_sampling_strategy",
    "evaluation_strategy": "eval_strategy",
}
"""Names that people type by habit, and the names of the fields. They only complete the message about an unknown field."""

ITEM_FIELDS = {"fraction": "datasets", "fractions": "datasets"}
"""Names of fields of the items of a list, and of the list."""

HOW_TO_COMPARE = {
    "learning_rate": "use `loopdropout sweep`",
    "seed": "use `loopdropout sweep`",
    "rule": "set `compare_with`",
}
"""Fields of one value that people give several values, and how to compare the values."""

OF_OTHER_SCRIPTS = {
    "recipe": ("model_name_or_path", "A recipe with this field is a sweep. Use `loopdropout sweep`."),
    "model_name_or_path": (
        "learning_rates",
        "It is a field of a training, whose recipe is the field `recipe` of a sweep.",
    ),
}
"""Fields that show that a recipe is one of another script: a field of the running script, and what to do."""

_COMPUTED = {"q": ("p", "Set `p` = 1 - q, the probability that a loop is off.")}
"""Quantities that follow from a field: the field, and how it is set."""

FORMER_NAMES = {"depths": "eval_num_loops", "at_depths": "eval_num_loops"}
"""Present names of fields in recipes of finished runs."""


def field_hint(name: str, fields: Collection[str]) -> str:
    """Return the end of the message about an unknown field, which names the field that helps."""
    if ITEM_FIELDS.get(name) in fields:
        return f" Set `{name.removesuffix('s')}` in each item of `{ITEM_FIELDS[name]}`."
    own_field, advice = {**OF_OTHER_SCRIPTS, **_COMPUTED}.get(name, (None, ""))
    if own_field in fields:
        return f" {advice}"
    meant = FORMER_NAMES.get(name) or USUAL_NAMES.get(name)
    return closest_match(meant if meant in fields else name, fields)
