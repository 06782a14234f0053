"""Fields of the arguments that a trainer reads when it is made, where a later change would silently have no effect."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence, Sized
from typing import Any

from datasets import IterableDataset
from transformers import TrainingArguments

from loopdropout_trainer.errors import UserError, find_mistyped, short_repr
from loopdropout_trainer.settings.field_hints import COMPUTED, USUAL_NAMES
from loopdropout_trainer.training.examples import check_datasets, read_first


RULE_FIELDS = ("p", "rule", "rule_args", "depth_sampling", "depth_sampling_args")
"""Fields that describe the gates and the depths of a training."""

_READ_ONCE = (
    *RULE_FIELDS,
    # The data, which is prepared when the trainer is made
    "assistant_only_loss",
    "completion_only_loss",
    "dataset_kwargs",
    "dataset_text_field",
    "chat_template_path",
    "eos_token",
    "max_length",
    "packing",
    "packing_strategy",
    "pad_to_multiple_of",
    "pad_token",
    "padding_free",
    "shuffle_dataset",
    "truncation_mode",
    # The model, the devices and the batches
    "activation_checkpointing",
    "activation_offloading",
    "bf16",
    "fp16",
    "full_determinism",
    "gradient_checkpointing",
    "per_device_train_batch_size",
    "tf32",
    "torch_compile",
    "torch_compile_backend",
    "torch_compile_mode",
    "use_cpu",
    "use_liger_kernel",
    # The loss
    "label_names",
    "label_smoothing_factor",
    "neftune_noise_alpha",
    "router_aux_loss_coef",
    # The callbacks
    "disable_tqdm",
    "early_stopping_patience",
    "report_to",
    # DPO and GRPO, whose trainers of TRL copy these fields
    "beta",
    "disable_dropout",
    "epsilon",
    "f_divergence_type",
    "label_smoothing",
    "ld_alpha",
    "loss_weights",
    "max_completion_length",
    "min_p",
    "num_generations",
    "num_iterations",
    "precompute_ref_log_probs",
    "repetition_penalty",
    "reward_weights",
    "scale_rewards",
    "steps_per_generation",
    "sync_ref_model",
    "temperature",
    "top_k",
    "top_p",
    "use_weighting",
)
"""Fields that a trainer reads when it is made. Arguments that lack one of them have no such setting."""

_OFTEN_SET = (
    "eval_steps",
    "eval_strategy",
    "gate_seed",
    "gradient_accumulation_steps",
    "learning_rate",
    "logging_steps",
    "loss_average",
    "max_steps",
    "num_train_epochs",
    "output_dir",
    "remove_padding",
    "save_steps",
    "save_strategy",
    "seed",
    "skip_frozen_loops",
    "warmup_steps",
    "weight_decay",
)
"""Fields that apply when they are set on the arguments, and that somebody could set on the trainer itself by mistake."""

_SETTABLE = ("eval_dataset", "num_loops", "p", "rule", "train_dataset")
"""Attributes of a trainer that people set and mistype."""


def copy_fields(args: TrainingArguments, names: Sequence[str] = _READ_ONCE) -> dict[str, Any]:
    """Return copies of fields, by their names."""
    return {name: copy.deepcopy(getattr(args, name, None)) for name in names}


def find_changed(args: TrainingArguments, made_with: Mapping[str, Any]) -> list[str]:
    """Return the names of the fields that differ from those that a trainer was made with, from `copy_fields`."""
    return [name for name, value in made_with.items() if getattr(args, name, None) != value]


def changed_field(args: TrainingArguments, made_with: Mapping[str, Any], name: str, hint: str = "") -> UserError:
    """Return the error about a field that has changed since a trainer was made. `hint` is its last sentence."""
    before, now = short_repr(made_with[name]), short_repr(getattr(args, name))
    return UserError(
        f"`{name}` must keep its value {before} after the trainer was made, got {now}. {_how_to_change(name)}{hint}"
    )


def _how_to_change(field: str) -> str:
    """Return the sentence that says how a field of a trainer's arguments is changed."""
    if field in ("rule", "rule_args"):
        return "Set another rule by `trainer.rule = ...`, to its name or to a rule such as `ExactlyM(m=2)`."
    if field in _READ_ONCE:
        return "Make a new trainer."
    return f"Set it by `trainer.args.{field} = ...`."


def check_attribute(trainer: Any, name: str, value: Any) -> None:
    """Raise UserError if a program sets an attribute of a trainer of this package, and the training cannot use it.

    Args:
        trainer: Trainer that is made. A subclass of the user may have attributes of its own.
        name: Name of the attribute. A field of the arguments has no effect on the trainer.
        value: Its new value. Training examples must be prepared.
    """
    if not type(trainer).__module__.startswith("loopdropout_trainer."):
        return
    is_field = name in (*_OFTEN_SET, *_READ_ONCE)
    if is_field and not _has_settable(trainer, name):
        raise UserError(
            f"`{name}` must be set in the arguments of the trainer, and not on the trainer. {_how_to_change(name)}"
        )
    if name == "train_dataset":
        _check_prepared(trainer.train_dataset, value)
    if not hasattr(trainer, name):
        _check_name(trainer, name)


def _check_name(trainer: Any, name: str) -> None:
    """Raise UserError for a mistyped name of an attribute, or for the name of a field in another trainer."""
    known = [*_SETTABLE]
    for field in (*_OFTEN_SET, *_READ_ONCE):
        if hasattr(trainer.args, field):
            known.append(field)
    computed_from, advice = COMPUTED.get(name, (None, ""))
    if computed_from in known:
        raise UserError(f"`{name}` is not an attribute of the trainer. {advice}")
    meant = USUAL_NAMES.get(name)
    if meant not in known:
        meant = find_mistyped(name, known)
    if meant in _SETTABLE:
        raise UserError(f"`{name}` is not an attribute of the trainer. Did you mean {meant!r}?")
    if meant is not None:
        raise UserError(
            f"`{name}` is not an attribute of the trainer. Did you mean the field {meant!r} of its arguments? "
            f"{_how_to_change(meant)}"
        )


def _has_settable(trainer: Any, name: str) -> bool:
    """Return whether a trainer has an attribute that a program can set. TRL's trainers copy some fields to attributes."""
    own = getattr(type(trainer), name, None)
    if isinstance(own, property) and own.fset is None:
        return False
    return hasattr(trainer, name)


def _check_prepared(before: Any, now: Any) -> None:
    """Raise UserError if training examples lack the tokens that those of the trainer have."""
    columns = getattr(now, "column_names", None)
    if columns is None and isinstance(now, Sized | IterableDataset):  # rows, or a stream whose columns are not known
        columns = list(read_first(now) or ())
    tokens = [
        name for name in getattr(before, "column_names", None) or () if name.endswith("_ids") or name == "labels"
    ]
    if columns and not set(tokens).issubset(columns):
        raise UserError(
            f"`train_dataset` must have the columns {', '.join(tokens)} of prepared examples if it is set later, got "
            f"{', '.join(columns)}. Make a new trainer, which prepares its examples."
        )
    check_datasets({"train_dataset": now})
