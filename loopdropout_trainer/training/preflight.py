"""What is checked before weights are loaded or a step is taken: model, depth, rule, adapter, layout, data."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
    TrainingArguments,
)

from loopdropout_trainer.adapters import check_adapter, check_peft_config
from loopdropout_trainer.looped import NotLoopedError, check_num_loops, find_looped_model
from loopdropout_trainer.training.config import LoopDropoutArguments
from loopdropout_trainer.training.distributed import check_arguments


def default_peft_config(model: PreTrainedModel | PreTrainedConfig, **overrides: Any) -> LoraConfig:
    """Return the paper's adapter: rank 16, alpha 32, on all linear projections of the recurrent block.

    Args:
        model: looped model, or its config (nothing is loaded then).
        overrides: other fields of `LoraConfig`, or other values for these.
    """
    if isinstance(model, PreTrainedConfig):
        with torch.device("meta"):  # by its class: `from_config` would let ZeRO-3 divide the meta tensors
            model = MODEL_FOR_CAUSAL_LM_MAPPING[type(model)](model)
    fields = {"r": 16, "lora_alpha": 32, "task_type": "CAUSAL_LM"}
    fields["target_modules"] = find_looped_model(model).recurrent_linears()
    return LoraConfig(**{**fields, **overrides})


def check_run(
    model: str | nn.Module, args: LoopDropoutArguments, peft_config: PeftConfig | None = None
) -> PreTrainedConfig:
    """Refuse what cannot be trained, before weights or data are loaded.

    Returns:
        The model's config, with the depth that it will run at.

    Raises:
        NotLoopedError: for a model without loops.
        ValueError: for a depth, rule, adapter or layout that cannot be trained.
    """
    config = _looped_config(model, args)
    args.make_rule().check(config.num_loops)
    check_arguments(args)
    if peft_config is not None:
        check_peft_config(peft_config)
    elif isinstance(model, PeftModel):
        check_adapter(model)
    return config


def _looped_config(model: str | nn.Module, args: TrainingArguments) -> PreTrainedConfig:
    """Return the model's config with the depth that it will run at, without loading weights."""
    if not isinstance(model, str):
        return find_looped_model(model).config
    init_kwargs = dict(args.model_init_kwargs or {})
    num_loops = init_kwargs.get("num_loops")
    if num_loops is not None:
        check_num_loops(num_loops)
    known = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
    try:
        config = AutoConfig.from_pretrained(
            model,
            trust_remote_code=args.trust_remote_code,
            **{key: init_kwargs[key] for key in known if key in init_kwargs},
        )
    except OSError as error:
        raise ValueError(f"The model {model} cannot be loaded: {' '.join(str(error).split())}") from error
    if not hasattr(config, "num_loops"):
        raise NotLoopedError(
            f"{model} is a `{config.model_type}` model, which is not looped: Loop Dropout needs a model that applies one "
            "block several times, such as `model_type: ouro`."
        )
    if num_loops is not None:
        config.num_loops = num_loops
    return config


def check_dataset(dataset: Any, formats: list[set[str]]) -> None:
    """Refuse training data that is empty, cannot be read, or has none of the sets of columns in `formats`.

    Raises:
        ValueError: in one sentence.
    """
    if dataset is None:
        return
    try:
        columns = set(next(iter(dataset)))
    except StopIteration:
        raise ValueError("`train_dataset` is empty: there is no example to train on.") from None
    except Exception as error:  # whatever the file format's reader raises
        raise ValueError(f"`train_dataset` cannot be read ({type(error).__name__}: {error}).") from error
    if not any(wanted <= columns for wanted in formats):
        valid = " or ".join(" and ".join(map(repr, sorted(wanted))) for wanted in formats)
        found = ", ".join(map(repr, sorted(columns)))
        raise ValueError(f"`train_dataset` has the columns {found}; it needs {valid}.")
