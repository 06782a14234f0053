"""The advice about a field that a script does not have, by the names that people type, or that has no effect."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from loopdropout_trainer.errors import UserError, find_mistyped, short_repr
from loopdropout_trainer.hints import closest_known
from loopdropout_trainer.usual_names import ADVICE_ON_Q, NAMES_OF_P


logger = logging.getLogger(__name__)

USUAL_NAMES = {
    # Optimizer and length
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "steps": "max_steps",
    "max_train_steps": "max_steps",
    "batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "micro_batch_size": "per_device_train_batch_size",
    "bs": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "gradient_accumulation": "gradient_accumulation_steps",
    "grad_accum": "gradient_accumulation_steps",
    "optimizer": "optim",
    "scheduler": "lr_scheduler_type",
    "lr_scheduler": "lr_scheduler_type",
    "warmup": "warmup_steps",
    "num_warmup_steps": "warmup_steps",
    "wd": "weight_decay",
    "clip_grad": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "gradient_clip": "max_grad_norm",
    "grad_clip": "max_grad_norm",
    "use_gradient_checkpointing": "gradient_checkpointing",
    "loraplus_ratio": "loraplus_lr_ratio",
    "patience": "early_stopping_patience",
    # Gates and adapter
    **dict.fromkeys(NAMES_OF_P, "p"),
    "method": "rule",
    "r": "lora_r",
    "rank": "lora_r",
    "lora_rank": "lora_r",
    "alpha": "lora_alpha",
    "target_modules": "lora_target_modules",
    "lora_target": "lora_target_modules",
    "lora_modules": "lora_target_modules",
    "rslora": "use_rslora",
    "adapter": "adapter_name_or_path",
    "adapter_path": "adapter_name_or_path",
    # Model
    "K": "num_loops",
    "depth": "num_loops",
    "loops": "num_loops",
    "model": "model_name_or_path",
    "model_name": "model_name_or_path",
    "model_id": "model_name_or_path",
    "base_model": "model_name_or_path",
    "torch_dtype": "dtype",
    "load_in_4bit": "model_init_kwargs",
    "load_in_8bit": "model_init_kwargs",
    "quantization_bit": "model_init_kwargs",
    "attn": "attn_implementation",
    "flash_attn": "attn_implementation",
    "flash_attention": "attn_implementation",
    # Data
    "dataset": "dataset_name",
    "train_file": "train_files",
    "data_files": "train_files",
    "eval_file": "eval_files",
    "validation_file": "eval_files",
    "dataset_test_split": "num_eval_examples",
    "test_size": "num_eval_examples",
    "val_size": "num_eval_examples",
    "val_set_size": "num_eval_examples",
    "max_samples": "num_train_examples",
    "max_train_samples": "num_train_examples",
    "max_eval_samples": "num_eval_examples",
    "max_seq_length": "max_length",
    "max_seq_len": "max_length",
    "seq_len": "max_length",
    "seq_length": "max_length",
    "sequence_len": "max_length",
    "cutoff_len": "max_length",
    "sample_packing": "packing",
    "pack_sequences": "packing",
    "template": "chat_template",
    "train_on_inputs": "completion_only_loss",
    "group_by_length": "train_sampling_strategy",
    # Measurements and files
    "tasks": "benchmarks",
    "task": "benchmarks",
    "eval_tasks": "benchmarks",
    "limit": "benchmark_limit",
    "evaluation_strategy": "eval_strategy",
    "plot_loss": "report_to",
    "resume": "resume_from_checkpoint",
    "out": "output_dir",
    "output": "output_dir",
    "repo_id": "hub_model_id",
    "private": "hub_private_repo",
}
"""Names that people type by habit or know from other trainers, and the names of the fields.

They only complete the message about an unknown field.
"""

ITEM_FIELDS = {"fraction": "datasets", "fractions": "datasets"}
"""Names of fields of the items of a list, and of the list."""

SEVERAL_TEXTS = {
    "prompt": "Put one prompt in quotes. Several prompts are lines of a file or a pipe, as in `loopdropout chat MODEL < FILE`."
}
"""Fields of one text that people give several ones, or one text without quotes, and how to give them."""

HOW_TO_COMPARE = {
    "learning_rate": "use `loopdropout sweep`",
    "seed": "use `loopdropout sweep`",
    "rule": "set `compare_with`",
}
"""Fields of one value that people give several values, and how to compare the values."""

WORDS_FOR_NULL = {"none", "[]", "off"}
"""Words that people write for no value, in small letters, where YAML and command lines have `null`."""

WITHOUT_VALUE = {
    "compare_with": "to train one method only",
    "benchmarks": "to evaluate nothing",
}
"""Fields and the purpose of the value `null`."""

OF_OTHER_SCRIPTS = {
    "recipe": ("model_name_or_path", "A recipe with this field is a sweep. Use `loopdropout sweep`."),
    "model_name_or_path": (
        "learning_rates",
        "It is a field of a training, whose recipe is the field `recipe` of a sweep.",
    ),
    "push_to_hub": ("hub_model_id", "Set `hub_model_id` to the name of the repository to push to."),
}
"""Fields that show that a recipe is one of another script: a field of the running script, and what to do."""

COMPUTED = {"q": ("p", ADVICE_ON_Q)}
"""Quantities that follow from a field: the field, and how it is set."""

FORMER_NAMES = {"depths": "eval_num_loops", "at_depths": "eval_num_loops"}
"""Present names of fields in recipes of finished runs."""

_OF_MODEL = {"num_loops", "dtype", "attn_implementation", "revision", "quantization_config"}
"""Fields of recipes, and arguments of a model's loading, that a trainer in Python takes in `model_init_kwargs`."""


class InnerFields(NamedTuple):
    """Fields that a mapping takes, which is a field of the script itself: their names, and the noun of the message."""

    names: Collection[str]
    noun: str


def field_hint(
    name: str, fields: Collection[str], value: Any = None, inner: Mapping[str, InnerFields] | None = None
) -> str:
    """Return the end of the message about an unknown field, which names the field that helps.

    Args:
        name: Unknown field.
        fields: Fields of the script.
        value: Value that the user has given, as words of a command line or as a recipe has it.
        inner: Fields inside of a field of the script, by its name.
    """
    if ITEM_FIELDS.get(name) in fields:
        return f" Set `{name.removesuffix('s')}` in each item of `{ITEM_FIELDS[name]}`."
    own_field, advice = {**OF_OTHER_SCRIPTS, **COMPUTED}.get(name, (None, ""))
    if own_field in fields:
        return f" {advice}"
    meant = FORMER_NAMES.get(name) or USUAL_NAMES.get(name)
    if meant in fields:
        return f" Did you mean {meant!r}?"
    if f"{name}s" in fields:  # also if people use the name for a field of trainings
        return f" Did you mean '{name}s'?"
    for field, inner_fields in (inner or {}).items():
        own_name = next((own for own in (name, meant) if own in inner_fields.names), None)
        if own_name is not None:
            return f" Put fields of {inner_fields.noun} under `{field}`: {{{own_name}: {_name_value(value)}}}."
    return _hint_at_rule(name, fields, value) or closest_known(name, fields, USUAL_NAMES)


def _hint_at_rule(name: str, fields: Collection[str], value: Any) -> str:
    """Return the end of the message about an unknown field of a training that is a field of rules, such as `m`, or ""."""
    if "rule_args" not in fields:
        return ""
    from loopdropout_trainer.gates import RULES  # imports torch

    rules = []
    for rule in sorted(RULES):
        own_field = RULES[rule].__dataclass_fields__.get(name)
        if own_field is not None and own_field.init:
            rules.append(rule)
    if not rules:
        return ""
    noun = "rule" if len(rules) == 1 else "rules"
    return f" Put fields of the {noun} {' and '.join(rules)} under `rule_args`: {{{name}: {_name_value(value)}}}."


def check_advice(given: Collection[str], fields: Collection[str], advice: Mapping[str, str]) -> None:
    """Raise UserError with the advice of a script about a name that is not one of its fields, if it has any."""
    for name in given:
        if name not in fields and name in advice:
            raise UserError(f"`{name}` is not a field of this script. {advice[name]}")


def drop_replaced(recipe: dict[str, Any], changes: Mapping[str, Any], replaces: Mapping[str, str]) -> None:
    """Remove fields from a recipe that would hide a field of the command line.

    Args:
        recipe: Settings of the recipe, which are changed.
        changes: Settings of the command line.
        replaces: Names of fields of the command line, and of the field of the recipe that each counts instead of.
    """
    for name, replaced in replaces.items():
        if changes.get(name) is not None:
            recipe.pop(replaced, None)


def warn_of_unused_epochs(recipe: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Warn if a command line sets `num_train_epochs`, but the length follows from `max_steps`, there or in the recipe.

    The other way around is usual: `--max_steps 20` tries a recipe with `num_train_epochs`.
    """
    is_of_recipe = "max_steps" not in changes
    max_steps = recipe.get("max_steps") if is_of_recipe else changes["max_steps"]
    is_limited = isinstance(max_steps, int) and max_steps > 0
    if "num_train_epochs" not in changes or not is_limited:
        return
    cause, fix = f"`--max_steps {max_steps}` counts instead", "Remove `--max_steps`"
    if is_of_recipe:
        cause, fix = f"the recipe sets `max_steps: {max_steps}`", "Add `--max_steps -1`"
    elif recipe.get("max_steps") is not None:
        fix = "Set `--max_steps -1`"
    if os.environ.get("RANK", "0") == "0":
        logger.warning(
            "`--num_train_epochs %s` has no effect, because %s. %s to train for so many epochs.",
            changes["num_train_epochs"],
            cause,
            fix,
        )


def warn_of_replaced_mappings(recipe: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Warn if a mapping of a command line replaces that of the recipe, and lacks fields that the recipe sets in it."""
    for name, value in changes.items():
        former = recipe.get(name)
        if not isinstance(value, dict) or not isinstance(former, dict):
            continue
        lost = [field for field in former if field not in value]
        if lost and os.environ.get("RANK", "0") == "0":
            logger.warning(
                "`--%s` replaces the whole mapping of the recipe, so its fields %s are no longer set. To keep them, repeat "
                "them.",
                name,
                ", ".join(map(str, lost)),
            )


def _name_value(value: Any) -> str:
    """Return a value as a recipe has it. A single word of a command line is no list."""
    if isinstance(value, list):
        words = ", ".join(map(_name_value, value))
        return words if len(value) == 1 else f"[{words}]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)  # has the words of YAML: null, true and false
    return value if isinstance(value, str) else short_repr(value)


def list_fields(fields: Collection[str]) -> str:
    """Return the end of the message about an unknown field that resembles none: the fields of a small script, or the help."""
    if len(fields) > MOST_LISTED:
        return " `--help` lists the fields."
    return f" Its fields are {', '.join(f'`{name}`' for name in fields)}."


MOST_LISTED = 12
"""Largest number of fields that the message about an unknown one lists."""


def python_field_hint(name: str, value: Any, fields: Collection[str]) -> str:
    """Return the end of the message about an unknown field of a configuration in Python.

    It names the argument of the trainer that helps, where a recipe has a field.
    """
    meant = USUAL_NAMES.get(name, name)
    if meant in _OF_MODEL:
        return f" Set `model_init_kwargs={{{meant!r}: {short_repr(value)}}}`."
    if meant.startswith("lora_"):
        return " Give the trainer a `LoraConfig` as `peft_config`."
    return field_hint(name, fields, value)


def attribute_hint(name: str, value: Any, fields: Collection[str]) -> str | None:
    """Return the end of the message about an unknown attribute of a configuration that exists, or None.

    None: the name is like no field's, so that it may be an attribute of a library or of the user.
    """
    if name in USUAL_NAMES or name in COMPUTED:
        return python_field_hint(name, value, fields)
    of_rule = _hint_at_rule(name, fields, value)
    if of_rule:
        return of_rule
    meant = find_mistyped(name, fields)
    return None if meant is None else f" Did you mean {meant!r}?"
