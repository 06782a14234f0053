"""Arguments of `LoopedLM` that are wrong or have no effect, which lm-eval ignores. Only this module decides them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

from lm_eval.models.huggingface import HFLM

from loopdropout_trainer.errors import UserError, short_repr
from loopdropout_trainer.hints import closest_known
from loopdropout_trainer.settings.field_hints import USUAL_NAMES


_OF_PROCESSES = "Each process has the whole model. Use several of them by `accelerate launch -m`."
_OF_FORMATS = "The format is not supported. Give a model with weights in safetensors."

ADVICE_ON_UNUSED = {
    "autogptq": _OF_FORMATS,
    "delta": "Save a model with the sum of the weights, and give its folder.",
    "gguf_file": _OF_FORMATS,
    "gptqmodel": _OF_FORMATS,
    "max_cpu_memory": _OF_PROCESSES,
    "max_memory_per_gpu": _OF_PROCESSES,
    "offload_folder": _OF_PROCESSES,
    "parallelize": _OF_PROCESSES,
    "peft": "Use `adapter`.",
    "subfolder": "Give the path of the folder itself as `pretrained`.",
    "tp_plan": _OF_PROCESSES,
    "trust_remote_code": "Leave it out, because looped models run without remote code.",
    "use_fast_tokenizer": "Leave it out, because the tokenizer is always a fast one.",
}
"""Arguments of lm-eval's `hf` that a `LoopedLM` cannot use, because it loads the model itself, each with the fix."""


def check_batch_size(batch_size: Any) -> None:
    """Raise UserError unless lm-eval can read a batch size: an integer, also as a text, "auto" or "auto:N"."""
    words = str(batch_size)
    if isinstance(batch_size, bool) or not re.fullmatch(r"auto(:\d+(\.\d+)?)?|0*[1-9]\d*", words):
        raise UserError(f'`batch_size` must be an integer of at least 1, or "auto", got {short_repr(batch_size)}.')


def check_keywords(keywords: Mapping[str, Any], own_names: Iterable[str]) -> None:
    """Raise UserError for an argument that `LoopedLM` does not have, or that has no effect on it.

    An argument with the default value of lm-eval, such as `peft=None`, is no mistake.

    Args:
        keywords: Arguments that are not parameters of `LoopedLM` itself.
        own_names: Names of the parameters of `LoopedLM`.
    """
    of_lm_eval = inspect.signature(HFLM.__init__).parameters
    known = [*own_names, *of_lm_eval]
    usable = [name for name in known if name not in ("self", "kwargs", *ADVICE_ON_UNUSED)]
    for name, value in keywords.items():
        if name in ADVICE_ON_UNUSED:
            is_off = value is None or value is False or value == of_lm_eval[name].default
            if not is_off:
                raise UserError(
                    f"`{name}` has no effect on a `LoopedLM`, got {short_repr(value)}. {ADVICE_ON_UNUSED[name]}"
                )
        elif name not in usable:
            hint = closest_known(name, usable, USUAL_NAMES)
            raise UserError(f"`{name}` is not an argument of LoopedLM.{hint}")


def check_unused_by_loaded_model(**loading: Any) -> None:
    """Raise UserError for an argument of the loading of a model that is loaded already."""
    for name, value in loading.items():
        if value is not None:
            raise UserError(
                f"`{name}` must not be set for a loaded model, on which it has no effect, got {short_repr(value)}. Load the "
                "model with it, or give the name of the model."
            )


def check_unused_by_name(tokenizer: Any) -> None:
    """Raise UserError for a tokenizer next to the name of a model, whose own tokenizer is loaded."""
    if tokenizer is not None:
        raise UserError(
            f"`tokenizer` must not be set for the name of a model, whose own tokenizer applies, got {short_repr(tokenizer)}. "
            "Load the model by `load_model`, and give `LoopedLM(model, tokenizer)`."
        )
