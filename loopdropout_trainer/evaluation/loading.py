"""Load what is to be evaluated, and tell it from anything else."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from loopdropout_trainer.adapters import add_gates
from loopdropout_trainer.data import check_vocabulary, load_tokenizer
from loopdropout_trainer.errors import user_supplied
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.saving import adapter_files
from loopdropout_trainer.saving.files import sha256
from loopdropout_trainer.settings.arguments import ModelArguments


def load_model(model: ModelArguments, adapter: str | None = None) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Load a looped model at its evaluation depth, with an adapter on it if there is one, and its tokenizer.

    Raises:
        ValueError: if there is no such model or adapter, its weights are not finite, or the adapter is of another kind of
            model or method.
    """
    tokenizer = load_tokenizer(model)
    with user_supplied(f"The model {model.model_name_or_path} cannot be loaded"):
        base = AutoModelForCausalLM.from_pretrained(
            model.model_name_or_path, trust_remote_code=False, **model.init_kwargs
        )
    check_vocabulary(tokenizer, find_looped_model(base).config)
    if adapter is None:
        return base.eval(), tokenizer
    with user_supplied(f"The adapter {adapter} cannot be loaded"):
        adapted = adapter_files.load_adapter(base, adapter_files.adapter_folder(adapter))
    add_gates(adapted, in_activation_dtype=True)  # as in training: the same answers as those that sft.py reports
    return adapted.eval(), tokenizer


def model_identity(arguments: ModelArguments, model: nn.Module, adapter: str | None = None) -> dict[str, Any]:
    """Return what tells one model from another: names, dtype, and the hash of the weights' files (see `base_sha256`)."""
    return {
        "model": arguments.base_name,
        "weights": adapter_files.base_sha256(find_looped_model(model)),
        "adapter": None if adapter is None else sha256(adapter_files.adapter_folder(adapter).glob("adapter_*")),
        "dtype": arguments.dtype,
        "attn_implementation": arguments.attn_implementation,
    }


def train_info(adapter: str | None) -> dict[str, Any]:
    """Return how an adapter was trained, as far as it was saved with it; {} for none."""
    if adapter is None:
        return {}
    with user_supplied(f"The adapter {adapter} cannot be loaded"):
        folder = adapter_files.adapter_folder(adapter)
        config = adapter_files.read_adapter_config(folder)
    targets = config.target_modules
    return {
        **adapter_files.adapter_metadata(folder),
        **{name: getattr(config, name) for name in ("r", "lora_alpha", "use_rslora")},
        "target_modules": targets if isinstance(targets, str) else sorted(targets or []),
    }
