"""Load what is to be evaluated, and what is known of its training."""

from __future__ import annotations

import json
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from loopdropout_trainer.adapters import add_gates
from loopdropout_trainer.data import check_vocabulary, load_tokenizer
from loopdropout_trainer.errors import user_supplied
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.saving import adapter_files
from loopdropout_trainer.saving.adapter_files import WEIGHTS_FILE, adapter_folder
from loopdropout_trainer.settings.arguments import ModelArguments
from loopdropout_trainer.settings.recipe import method_title
from loopdropout_trainer.training.checkpoints.sealing import CheckpointError, is_sealed, run_of


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
        adapted = adapter_files.load_adapter(base, adapter_folder(adapter))
    add_gates(adapted, in_activation_dtype=True)  # as in training: the same answers as those that sft.py reports
    return adapted.eval(), tokenizer


def train_info(adapter: str | None) -> dict[str, Any]:
    """Return how an adapter was trained, as far as it was saved with it; {} for none."""
    if adapter is None:
        return {}
    with user_supplied(f"The adapter {adapter} cannot be loaded"):
        folder = adapter_folder(adapter)
        config = adapter_files.read_adapter_config(folder)
    targets = config.target_modules
    return {
        **adapter_files.adapter_metadata(folder),
        **{name: getattr(config, name) for name in ("r", "lora_alpha", "use_rslora")},
        "target_modules": targets if isinstance(targets, str) else sorted(targets or []),
    }


def training_of(adapter: str | None) -> dict[str, Any]:
    """Return the training that an adapter comes from, as far as its folder tells: `identity`, `method`, `seed` and `steps`.

    The identity is that of its manifest, if the weights are those that were sealed; else what was saved with the adapter.
    """
    if adapter is None:
        return {"identity": None, "method": None, "seed": None, "steps": None}
    facts, folder = train_info(adapter), adapter_folder(adapter)
    try:
        identity = run_of(folder) if is_sealed(folder, WEIGHTS_FILE) else None
    except CheckpointError:  # of another version
        identity = None
    if identity is None:
        of_adapter = {name: facts[name] for name in ("r", "lora_alpha", "use_rslora", "target_modules")}
        settings = {
            name: value for name, value in facts.items() if name not in {*of_adapter, "num_loops", "gate_seed"}
        }
        seeds = {"seed": facts["gate_seed"]} if "gate_seed" in facts else {}
        loops = {"num_loops": facts["num_loops"]} if "num_loops" in facts else {}
        identity = {"adapter": of_adapter, "settings": settings, "loops": loops, "seeds": seeds}
    fields = {**identity.get("adapter", {}), **identity.get("settings", {})}
    try:
        steps = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]
    except (OSError, ValueError, KeyError, TypeError):
        steps = None
    seed = identity.get("seeds", {}).get("seed")
    return {
        "identity": identity,
        "method": method_title(fields) if fields.get("rule") else None,
        "seed": seed if isinstance(seed, int) else None,
        "steps": steps if isinstance(steps, int) else None,
    }
