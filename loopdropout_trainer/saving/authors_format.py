"""Read and write adapters in the format of the paper authors' program (GitHub NUS-HPC-AI-Lab/loop-dropout).

The numbers are the same as in PEFT's format, under other names. The tensors are `layers.0.self_attn.q_proj.lora_A` [r, in] and
`.lora_B` [out, r]. `adapter_config.json` has the fields `rank`, `alpha`, `dropout` (p of Loop Dropout, 0 for LoRA),
`model_id`, `model_revision` and `num_loops`. The adapter is on all seven projections of every layer of Ouro-1.4B.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import logging

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.files import check_links, model_path, read_json_object
from loopdropout_trainer.published_sizes import PUBLISHED


if TYPE_CHECKING:
    from peft import LoraConfig

logger = logging.get_logger(__name__)


# The base model and the depth that the authors' program supports.
MODEL_ID = "ByteDance/Ouro-1.4B"
MODEL_REVISION = "574fa66cb8bf5abdc979642d01cf2b79b16bfab1"
NUM_LOOPS = 4

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

_PROJECTIONS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
FIELD_TYPES = {
    "rank": int,
    "alpha": int | float,
    "dropout": int | float,
    "model_id": str,
    "model_revision": str | None,
    "num_loops": int,
}
"""Types of the fields of `adapter_config.json`."""
_PREFIX = "base_model.model.model."  # of PEFT's names


def is_authors_format(fields: Mapping[str, Any]) -> bool:
    """Return whether the content of an `adapter_config.json` has the authors' format, and not PEFT's."""
    return "rank" in fields and "peft_type" not in fields


def to_peft_config(fields: Mapping[str, Any]) -> LoraConfig:
    """Return PEFT's configuration of an adapter in the authors' format."""
    from peft import LoraConfig  # its import takes seconds

    alpha = float(fields["alpha"])
    return LoraConfig(
        r=fields["rank"],
        lora_alpha=int(alpha) if alpha.is_integer() else alpha,
        target_modules=[name.rpartition(".")[2] for name in _PROJECTIONS],
        base_model_name_or_path=fields["model_id"],
        revision=fields["model_revision"],
        task_type="CAUSAL_LM",
    )


def to_metadata(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training settings of an adapter in the authors' format, as `read_metadata` does."""
    p = fields["dropout"]
    return {"rule": "loop_dropout" if p else "lora", "p": p, "num_loops": fields["num_loops"]}


def to_peft_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of an adapter in the authors' format under PEFT's names."""
    return {f"{_PREFIX}{name}.weight": tensor for name, tensor in weights.items()}


def write_authors_format(
    folder: Path, config: LoraConfig, metadata: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> None:
    """Write an adapter in the authors' format.

    Args:
        folder: Existing folder for the two files.
        config: PEFT's configuration of the adapter.
        metadata: Training settings `rule`, `p` and `num_loops`.
        weights: Tensors of the adapter under PEFT's names.

    Raises:
        UserError: If the format cannot represent the adapter.
    """
    tensors = {}
    for name, tensor in weights.items():
        tensors[name.removeprefix(_PREFIX).removesuffix(".weight")] = tensor.float().contiguous()
    _check_tensors(tensors)
    fields = {
        "rank": config.r,
        "alpha": float(config.lora_alpha),
        "dropout": _find_dropout(config, metadata),
        "model_id": MODEL_ID,
        "model_revision": MODEL_REVISION,
        "num_loops": NUM_LOOPS,
    }
    check_links(folder)
    save_file(tensors, folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _check_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError unless tensors under the authors' names are one update of all projections of each layer."""
    num_layers = len(tensors) // (2 * len(_PROJECTIONS))
    names = set()
    for layer in range(num_layers):
        for projection in _PROJECTIONS:
            names |= {f"layers.{layer}.{projection}.lora_A", f"layers.{layer}.{projection}.lora_B"}
    are_matrices = all(tensor.dim() == 2 for tensor in tensors.values())
    if tensors.keys() != names or not are_matrices:
        raise UserError(
            f"The authors' format requires one update for all loops of the {len(_PROJECTIONS)} projections of every layer."
        )


def _find_dropout(config: LoraConfig, metadata: Mapping[str, Any]) -> float | None:
    """Return p of an adapter, which is 0 for LoRA. Raise UserError for settings that the format cannot represent."""
    required = {
        "base_model_name_or_path": [MODEL_ID],
        "revision": [None, "main", MODEL_REVISION],
        "use_rslora": [False],
        "rank_pattern": [None, {}],
        "alpha_pattern": [None, {}],
        "rule": ["loop_dropout", "lora"],
        "num_loops": [NUM_LOOPS],
    }
    settings = {**vars(config), **metadata}
    base = Path(model_path(config.base_model_name_or_path or MODEL_ID))
    if (base / "config.json").is_file():
        _check_base(base)
        settings["base_model_name_or_path"] = MODEL_ID
    for name, values in required.items():
        value = settings.get(name)
        if value not in values:
            raise UserError(f"The authors' format requires `{name}` {values[-1]!r}, got {value!r}.")
    if settings["rule"] == "lora":
        return 0.0
    p = settings.get("p")
    if isinstance(p, list):
        raise UserError(f"The authors' format requires a single `p`, got {p}.")
    return p


def _check_base(folder: Path) -> None:
    """Raise UserError if a folder holds another model than Ouro-1.4B, as its config.json tells, and warn otherwise.

    Other weights of the same sizes cannot be told apart, so the warning asks the user.
    """
    config = read_json_object(folder / "config.json")
    for name, published in PUBLISHED[MODEL_ID].items():
        if config.get(name) != published:
            raise UserError(
                f"The authors' format requires an adapter of {MODEL_ID}, but the base model {folder} is another one: `{name}` "
                f"in its config.json is {config.get(name)!r}, and not {published!r}. Use `merge` or `push`, which take every "
                "model."
            )
    logger.warning(
        f"The adapter is written as one of {MODEL_ID}, the only base model that the authors' format has. That is right "
        f"only if the folder {folder} holds this model."
    )
