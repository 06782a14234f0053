"""The lines of a plan about settings that change a training and have no line of their own: random depths, and all others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import yaml

from loopdropout_trainer.costs.trainings import find_obstacle, name_range
from loopdropout_trainer.errors import count, hide_secrets
from loopdropout_trainer.settings.arguments import names_of
from loopdropout_trainer.settings.command_fields import find_command_fields, find_default
from loopdropout_trainer.training.evaluation_fields import word_of


if TYPE_CHECKING:
    from loopdropout_trainer.costs.trainings import Training
    from loopdropout_trainer.gates import GateRule


SHOWN = {
    "model_name_or_path",
    "model_revision",
    "num_loops",
    "rule",
    "p",
    "rule_args",
    "depth_sampling",
    "depth_sampling_args",
    "adapter_name_or_path",
    "lora_r",
    "lora_alpha",
    "lora_target_modules",
    "preparation",
    "dataset_name",
    "dataset_revision",
    "train_files",
    "datasets",
    "num_train_examples",
    "num_eval_examples",
    "num_train_epochs",
    "max_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "seed",
    "early_stopping_patience",
}
"""Settings that other lines of a plan show, or whose effect they show, and the commit of the data."""


def describe_rule_fields(rule: GateRule) -> str:
    """Return the fields of a rule in parentheses, such as " (p = 0.5)", or "" for a rule without any."""
    from loopdropout_trainer.gates.rule import fields_of

    values = fields_of(rule)
    fields = {"p": values["p"], **(values["rule_args"] or {})}
    texts = []
    for name, value in fields.items():
        if value is not None:
            texts.append(f"{name} = {_write(value)}")
    return f" ({', '.join(texts)})" if texts else ""


def describe_depths(training: Training) -> str:
    """Return the numbers of loops that training steps run at random depth, or "" if each step runs the model's own."""
    args = training.args
    name = getattr(args, "depth_sampling", "fixed")  # only `sft` has the field
    if name == "fixed":
        return ""
    fields = {"depth_sampling": name}
    if args.depth_sampling_args:
        fields["depth_sampling_args"] = args.depth_sampling_args
    if training.depth is None:
        return f"each step runs a random number of loops ({_write_fields(fields)})"
    limits = args.make_depth_sampler().limits(training.depth)
    loops = name_range([f"{limit:,}" for limit in limits])
    line = f"each step runs {loops} loops, drawn at random ({_write_fields(fields)})"
    if find_obstacle([training]) is None:  # else the plan has no such numbers
        line += f"\ntime and memory are computed for {count(training.depth, 'loop')}. The deepest step needs the most memory"
    return line


def describe_other_settings(training: Training) -> str:
    """Return the settings of a recipe that change its training, differ from their defaults, and have no line of their own.

    Those of evaluations during the training follow.
    """
    fields = find_command_fields(training.args.command)
    is_without_effect = names_of("monitoring", "score", "measurement", "output", "never")
    values = {}
    for name, value in training.recipe.items():
        if name in SHOWN or name in is_without_effect or name not in fields:
            continue
        if value not in (None, "", find_default(fields, name)):
            values[name] = value
    return _write_fields({**values, **_find_evaluations(training.args)})


def _find_evaluations(args: Any) -> dict[str, Any]:
    """Return the fields that say when the loss of the held-out examples is measured during a training, or none."""
    strategy = word_of(args.eval_strategy)
    if strategy == "no":
        return {}
    if strategy == "steps":
        return {"eval_strategy": strategy, "eval_steps": args.eval_steps}
    return {"eval_strategy": strategy}


def _write_fields(values: Mapping[str, Any]) -> str:
    """Return fields as in a recipe in one line, such as "packing: true, max_length: 512"."""
    return ", ".join(f"{name}: {_write(value)}" for name, value in values.items())


def _write(value: Any) -> str:
    """Return a value as in a recipe, in one line and without secrets. It is never cut, because it may be a path."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        value = hide_secrets(value)
    if isinstance(value, list) and len(value) == 1:
        return _write(value[0])
    if isinstance(value, tuple):
        value = [*value]
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
    text = text.removesuffix("\n").removesuffix("\n...")
    if "\n" in text:  # YAML would break the line
        text = json.dumps(value, ensure_ascii=False)
    return hide_secrets(text)
