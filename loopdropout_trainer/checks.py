"""What a setting may hold: numbers, lists, mappings and folders. Each check raises ValueError."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import reprlib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loopdropout_trainer.errors import UserError


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80
_repr.maxdict = _repr.maxlist = 6
shown = _repr.repr
"""Return `repr` of a value of the user's, cut to a length that fits into a sentence."""


LARGEST = 2**31 - 1
"""Of an integer that has no limit of its own: more steps, rows or tokens than that are a slip of the hand."""

MOST_LOOPS = 1024
"""A depth above this is taken for a mistake, or for a damaged configuration."""


def _is_number(value: Any, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and abs(value) < math.inf


def check_integer(name: str, value: Any, least: int = 1, most: float = math.inf) -> None:
    """Raise ValueError unless a setting is an integer in [least, most], and at most LARGEST if `most` is infinite."""
    is_integer = _is_number(value, int)
    is_open = math.isinf(most)
    if is_integer and least <= value <= (LARGEST if is_open else most):
        return
    valid = f"of at least {least}" if is_open else f"from {least:,} to {most:,}"
    if is_integer and is_open and value > LARGEST:
        valid = f"of at most {LARGEST:,}"
    raise UserError(f"`{name}` must be an integer {valid}; got {shown(value)}.")


def check_number(
    name: str, value: Any, least: float = 0.0, most: float = math.inf, above: bool = False, below: bool = False
) -> None:
    """Raise ValueError unless a setting is a finite number in [least, most]; `above`, `below` leave out an end."""
    is_left_out = (above and value == least) or (below and value == most)
    if _is_number(value, int, float) and least <= value <= most and not is_left_out:
        return
    start = "(" if above else "["
    end = ")" if below else "]"
    valid = f"number in {start}{least:g}, {most:g}{end}"
    if math.isinf(most):
        valid = f"number above {least:g}" if above else f"number of at least {least:g}"
    if math.isinf(least):
        valid = "finite number"
    raise UserError(f"`{name}` must be a {valid}; got {shown(value)}.")


def check_choice(name: str, value: Any, valid: Sequence[str | None]) -> None:
    """Raise ValueError unless a setting is one of the valid values; None among them: it may be left out."""
    if value not in valid:
        names = ", ".join(filter(None, valid))
        raise UserError(f"`{name}` must be one of {names}; got {shown(value)}.")


def check_list(name: str, value: Any) -> None:
    """Raise ValueError unless a setting is None or a list of different strings."""
    if value is None:
        return
    is_list = isinstance(value, (list, tuple))
    if not is_list or not all(isinstance(item, str) and item.strip() for item in value):
        raise UserError(f"`{name}` must be a list of strings, such as [a, b]; got {shown(value)}.")
    check_distinct(name, value)


def check_distinct(name: str, values: Sequence[Any]) -> None:
    """Raise ValueError for a list that names something twice."""
    for index, value in enumerate(values):
        if value in values[:index]:
            raise UserError(f"`{name}` must name each of its values once; got {shown(value)} twice.")


def check_folder(name: str, value: Any) -> None:
    """Raise ValueError if a setting names no folder that files can be written to; nothing is made."""
    is_path = isinstance(value, (str, os.PathLike))
    if not is_path or not str(value).strip() or "\0" in str(value):
        raise UserError(f"`{name}` must be the path of a folder; got {shown(value)}.")
    folder = Path(value)
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        what = "a file" if folder.exists() else "a link that leads to nothing"
        raise UserError(f"`{name}` must be the path of a folder; {folder} is {what}.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"`{name}` must be a folder that can be written to; {folder} cannot.")


# The numbers in recipes: in TRL's and transformers' configurations, and in this package's own.


@dataclasses.dataclass(frozen=True)
class Range:
    """The finite numbers in [least, most]; `above` and `below` leave out an end."""

    least: float = 0
    most: float = math.inf
    above: bool = False
    below: bool = False


_RANGES = (  # fields, what they may hold, and why not more; any other number: finite, and at least 0
    ("per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps eval_accumulation_steps "
     "precompute_ref_batch_size generation_batch_size steps_per_generation num_iterations num_generations_eval "
     "completion_slots live_diagnostics_rows pad_to_multiple_of max_steps max_length max_completion_length "
     "ref_model_sync_steps dataset_num_proc dataloader_prefetch_factor ddp_bucket_cap_mb ddp_timeout "
     "torch_empty_cache_steps vllm_max_model_length vllm_tensor_parallel_size num_train_examples example_token_limit "
     "benchmark_batch_size benchmark_limit max_new_tokens num_rows rows_batch_size max_extensions selection_seeds workers",
     Range(1)),  # counts: none is nothing
    ("num_loops depths at_depths", Range(1, MOST_LOOPS)),
    ("num_threads", Range(1, 1024)),
    ("num_generations", Range(2)),  # a completion is compared with the others of its prompt
    ("num_train_epochs", Range(most=1e6, above=True)),
    ("save_steps eval_steps logging_steps", Range(above=True)),  # intervals
    ("learning_rates", Range(above=True)),  # of a sweep, whose runs learn
    ("adam_epsilon", Range(above=True)),  # A's first gradient is zero, B being zero, and 0 / 0 is NaN
    ("adam_beta1 adam_beta2", Range(most=1, below=True)),  # at 1 an average never learns
    ("label_smoothing_factor ref_model_mixup_alpha min_p", Range(most=1)),  # shares
    ("ld_alpha", Range(most=1)),
    ("label_smoothing", Range(most=0.5, below=True)),  # at a half of wrong labels nothing can be learned
    ("top_p top_entropy_quantile vllm_gpu_memory_utilization", Range(most=1, above=True)),  # shares of something
    ("temperature", Range(1e-6)),  # logits are divided by it
    ("discopop_tau sapo_temperature_pos sapo_temperature_neg repetition_penalty", Range(above=True)),  # so by these
    ("delta vllm_importance_sampling_clip_max", Range(above=True)),  # upper ends of a ratio: at 0 no gradient is left
    ("neftune_noise_alpha", Range(most=1e6)),  # beyond it the noise overflows
    ("loraplus_lr_ratio", Range(1)),  # B's rate as a multiple of A's
    ("f_alpha_divergence_coef entropy_coef reward_weights", Range(-math.inf)),  # either sign has a meaning
    ("seed data_seed seeds", Range(0, 2**32 - 1)),  # of numpy's generators
    ("gate_seed split_seed", Range(-(2**63), 2**63 - 1)),  # of this package's own
    ("vllm_server_port vllm_group_port", Range(1, 65_535)),
)  # fmt: skip
RANGES: dict[str, Range] = {name: valid for names, valid in _RANGES for name in names.split()}
_WEIGHTS = ("loss_weights", "reward_weights")  # of which one must count


def check_numbers(settings: Any, **own: Range) -> None:
    """Raise ValueError for a number in a dataclass with which nothing can be trained; `own`: ranges of this class alone.

    A field's default is always valid: it may stand for "not given", as -1 does. Inside of mappings numbers must be finite,
    and those for a schedule are checked as fields are.
    """
    ranges = {**RANGES, **own}
    kinds_of = _field_kinds(type(settings))
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, Mapping):
            _check_mapping(field.name, value, ranges)
            continue
        kinds = kinds_of[field.name]
        valid = ranges.get(field.name, Range())
        numbers = value if isinstance(value, (list, tuple)) else [value]
        for number in numbers if {int, float} & kinds else ():
            if number == field.default or type(number) in kinds - {int, float}:
                continue
            if float in kinds:
                check_number(field.name, number, **vars(valid))
            else:
                check_integer(field.name, number, valid.least, valid.most)
        if field.name in _WEIGHTS and value is not None and not any(numbers):
            raise UserError(f"`{field.name}` must hold a number other than 0; got {shown(value)}.")


def _check_mapping(name: str, settings: Mapping[str, Any], ranges: Mapping[str, Range]) -> None:
    is_schedule = name == "lr_scheduler_kwargs"
    for key, value in nested(settings):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            valid = ranges.get(key, Range()) if is_schedule else Range(-math.inf)
            check_number(f"{key}` in `{name}", value, **vars(valid))


def nested(value: Any, field: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a value and all that it holds, however deep, each with the key that it stands under, or its list."""
    yield field, value
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from nested(item, str(name))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from nested(item, field)


@functools.cache
def _field_kinds(cls: type) -> dict[str, set[Any]]:
    """Return the types that each field of a dataclass takes."""
    hints = typing.get_type_hints(cls)
    return {field.name: _kinds(hints[field.name]) for field in dataclasses.fields(cls)}


def _kinds(hint: Any) -> set[Any]:
    """Return the types that a hint is made of: int and NoneType of `list[int] | None`."""
    parts = typing.get_args(hint)
    return set().union(*map(_kinds, parts)) or {hint}


def shown_bytes(size: float) -> str:
    """Return a number of bytes as people read it: 12 MB, 2.87 GB, in powers of ten."""
    if size >= 1e8:
        return f"{size / 1e9:.3g} GB"
    return f"{size / 1e6:.3g} MB"


def shown_parts(sizes: Mapping[str, float]) -> str:
    """Return an estimate in bytes by parts as people read it: their sum, and each one that is not 0."""
    total = sum(sizes.values())
    parts = [f"{name} {shown_bytes(size)}" for name, size in sizes.items() if size]
    return f"{shown_bytes(total)} (estimate): {', '.join(parts)}"
