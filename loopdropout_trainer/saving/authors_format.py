"""Adapters in the format of the paper authors' program (GitHub NUS-HPC-AI-Lab/loop-dropout): read, and written.

The same numbers as in PEFT's format, under other names: tensors `layers.0.self_attn.q_proj.lora_A` [r, in] and `.lora_B`
[out, r], and in adapter_config.json the fields of `FIELDS`. It holds adapters of one base model, on all its projections.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import type_validator
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor

from loopdropout_trainer.checks import MOST_LOOPS
from loopdropout_trainer.errors import UserError, user_supplied
from loopdropout_trainer.models.layers import PROJECTIONS
from loopdropout_trainer.saving.files import read_json


# The base, and its depth, that the authors' program takes.
MODEL_ID = "ByteDance/Ouro-1.4B"
MODEL_REVISION = "574fa66cb8bf5abdc979642d01cf2b79b16bfab1"
NUM_LOOPS = 4
FIELDS = {
    "rank": int,
    "alpha": float | int,
    "dropout": float | int,  # p of Loop Dropout; 0: LoRA
    "model_id": str,
    "model_revision": str,
    "num_loops": int,
}
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model.model."  # of PEFT's names


def read_fields(folder: Path) -> dict[str, Any] | None:
    """Return an adapter's FIELDS; None if it is in another format."""
    path = folder / CONFIG
    if not path.is_file():
        return None
    with user_supplied(f"{path} cannot be read"):
        fields = dict(read_json(path))
        if "peft_type" in fields or "rank" not in fields:
            return None
        for name, kind in FIELDS.items():
            type_validator(name, fields.get(name), kind)
        is_valid = {
            "rank": fields["rank"] >= 1,
            "alpha": 0 < fields["alpha"] < math.inf,
            "dropout": 0 <= fields["dropout"] < 1,
            "num_loops": 1 <= fields["num_loops"] <= MOST_LOOPS,
        }
        for name in is_valid:
            if not is_valid[name]:
                raise ValueError(f"`{name}` is {fields[name]}")
    return {name: fields[name] for name in FIELDS}


def peft_config(fields: Mapping[str, Any]) -> LoraConfig:
    """Return PEFT's configuration of an adapter with these FIELDS."""
    alpha = fields["alpha"]
    return LoraConfig(
        r=fields["rank"],
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
        target_modules=[name.rpartition(".")[2] for name in PROJECTIONS],
        base_model_name_or_path=fields["model_id"],
        revision=fields["model_revision"],
        task_type="CAUSAL_LM",
    )


def training_facts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an adapter with these FIELDS was trained with, as `adapter_metadata` does."""
    p = fields["dropout"]
    return {"rule": "loop_dropout" if p else "lora", "p": p, "num_loops": fields["num_loops"]}


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return an adapter's tensors under PEFT's names."""
    with user_supplied(f"{folder / WEIGHTS} cannot be read"):
        weights = load_file(folder / WEIGHTS)
    return {f"{_PREFIX}{name}.weight": tensor for name, tensor in weights.items()}


def write(folder: Path, config: LoraConfig, facts: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Write an adapter in the authors' format.

    Args:
        folder: that gets the two files.
        config, facts, weights: of the adapter, in PEFT's format; `facts` are those of `training_facts`.

    Raises:
        UserError: if the format cannot hold it; the sentence says why.
    """
    names = {f"{_PREFIX}{name}.weight": name for name in _expected_names(weights)}
    if reason := _why_not(config, facts, weights, names):
        raise UserError(f"The authors' format cannot hold this adapter: {reason}.")
    fields = {
        "rank": config.r,
        "alpha": float(config.lora_alpha),
        "dropout": facts["p"] if facts["rule"] == "loop_dropout" else 0.0,
        "model_id": MODEL_ID,
        "model_revision": MODEL_REVISION,
        "num_loops": NUM_LOOPS,
    }
    save_file({name: weights[peft_name].float().contiguous() for peft_name, name in names.items()}, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _expected_names(weights: Mapping[str, Tensor]) -> list[str]:
    """Return the format's names of all tensors, for as many layers as there are in PEFT's names."""
    layers = set(re.findall(rf"^{_PREFIX}layers\.(\d+)\.", "\n".join(weights), re.MULTILINE))
    modules = [f"layers.{layer}.{name}" for layer in range(len(layers)) for name in PROJECTIONS]
    return [f"{module}.lora_{factor}" for module in modules for factor in "AB"]


def _why_not(
    config: LoraConfig, facts: Mapping[str, Any], weights: Mapping[str, Tensor], names: Mapping[str, str]
) -> str | None:
    """Return why the format cannot hold an adapter; None if it can."""
    base = config.base_model_name_or_path
    rule = facts.get("rule")
    p = facts.get("p")
    if not _is_the_base(base):
        return f"it is for {MODEL_ID}, and this one was trained on {base}"
    if config.revision not in (None, "main", MODEL_REVISION):
        return f"it is for revision {MODEL_REVISION} of {MODEL_ID}, and this one was trained on {config.revision}"
    if config.use_rslora:
        return "its scale is alpha / r, and `use_rslora` gives this one alpha / sqrt(r)"
    if config.rank_pattern or config.alpha_pattern:
        return "it has one rank and one alpha for all layers, and `rank_pattern` or `alpha_pattern` gives some others"
    if any(tensor.dim() != 2 for tensor in weights.values()):
        return "it has one update for all loops, and this one has factors or gates for each loop"
    if weights.keys() != names.keys():
        return f"it has the {len(PROJECTIONS)} projections of every layer, and this one is on others"
    if not rule:
        return "it names p and the depth, and how this one was trained was not saved with it"
    if rule not in ("loop_dropout", "lora") or isinstance(p, list):
        return f"it names one p of Loop Dropout, and this one was trained by the rule {rule} with p {p}"
    if facts.get("num_loops") != NUM_LOOPS:
        return f"it is for {NUM_LOOPS} loops, and this one was trained with {facts.get('num_loops')}"
    return None


def _is_the_base(name: str | None) -> bool:
    """Return whether a model's name is the format's, or a folder that may hold it."""
    config = Path(name or MODEL_ID, "config.json")
    if name == MODEL_ID or not config.is_file():
        return name == MODEL_ID
    with user_supplied(f"{config} cannot be read"):
        return read_json(config).get("model_type") == "ouro"
