"""Load looped models and their adapters."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from peft import LoraConfig, PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import find_adapter_config_file, logging

from loopdropout_trainer.errors import UserError, check_name, check_type, first_line
from loopdropout_trainer.files import TINY_OURO_PATH, model_path, read_json_object, write_file
from loopdropout_trainer.looped import NotLoopedError, attach_looped_model, find_looped_model
from loopdropout_trainer.lora import add_gates, attach_adapter, check_peft_config, parse_peft_config
from loopdropout_trainer.models.external import loading_fields
from loopdropout_trainer.models.looped_modeling import check_checkpoint, check_weights, explain_loading
from loopdropout_trainer.results import RECIPE_FILE, RESULTS_FILE
from loopdropout_trainer.saving.authors_format import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    read_authors_config,
    to_metadata,
    to_peft_config,
    to_peft_weights,
)
from loopdropout_trainer.tokenizers import add_end_tokens, end_tokens, load_tokenizer


logger = logging.get_logger(__name__)

ADAPTER_METADATA = "loop_dropout.json"
"""File next to an adapter with its training settings: `rule`, `p`, `num_loops`, ..., and the end tokens of its answers."""

_METADATA_TYPES = {"num_loops": int | None, "depths": list[int] | None, "eos_token_id": list[int] | None}

_ADAPTER_FILES = ["*adapter_*", f"*{ADAPTER_METADATA}", "*token*", "chat_template.jinja", RECIPE_FILE, RESULTS_FILE]


def load_model(
    name_or_path: str | Path,
    *,
    revision: str | None = None,
    dtype: str | torch.dtype = "auto",
    attn_implementation: str | None = None,
    num_loops: int | None = None,
    device: str | torch.device | None = None,
    adapter: str | Path | None = None,
    **kwargs: Any,
) -> PreTrainedModel | PeftModel:
    """Load a base model, a merged model or an adapter for inference.

    Weights are read from safetensors files only, and code in a checkpoint is never run.

    Args:
        name_or_path: Folder or Hub name, or `tiny-ouro`. For an adapter, the base model is the model that its
            `adapter_config.json` names.
        revision: Branch, tag or commit of the base or merged model on the Hub.
        dtype: Data type of the weights. "auto" is the data type of the checkpoint.
        attn_implementation: "sdpa", "eager", "flash_attention_2", ...
        num_loops: Recurrence depth K. Default: the depth that the adapter was trained at, else the model's own depth.
        device: Device of the model. Default: the CPU.
        adapter: Folder or Hub name of an adapter, in PEFT's format or in the format of the paper authors' program.
        **kwargs: Further keyword arguments of `AutoModelForCausalLM.from_pretrained`.

    Returns:
        The model in evaluation mode. With an adapter it is a `PeftModel` with gated layers.

    Raises:
        UserError: If the model or the adapter does not exist, or the adapter does not fit the model.
    """
    check_name(name := str(model_path(name_or_path)))
    with explain_loading(str(name_or_path)):
        if is_adapter(name):
            name, adapter = None, adapter or name
        if adapter is not None:
            adapter = adapter_folder(adapter)
            num_loops = read_adapter_metadata(adapter).get("num_loops") if num_loops is None else num_loops
            if name is None:
                config = read_adapter_config(adapter)
                name, revision = config.base_model_name_or_path, revision or config.revision
                file = find_saved(adapter) / CONFIG_FILE
                check_name(
                    name,
                    f" It is `base_model_name_or_path` in {file}, the base model of the adapter. Change it there, or give the "
                    "base model, as in `load_model(base, adapter=folder)` or `--model_name_or_path`.",
                )
        check_checkpoint(name, revision or "main")
        if num_loops is not None:
            kwargs = loading_fields(name, {**kwargs, "num_loops": num_loops, "revision": revision or "main"})
        model, info = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=dtype,
            attn_implementation=attn_implementation,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **{"revision": revision or "main", **kwargs},
        )
        check_weights(model, name, info)
        with suppress(NotLoopedError):
            attach_looped_model(model)
    if adapter is not None:
        model = load_adapter(model, adapter)
        add_gates(model, in_activation_dtype=True)  # the same arithmetic as in training
    return model.eval() if device is None else model.eval().to(device)


def load_adapter(model: PreTrainedModel, adapter: str | Path, is_trainable: bool = False) -> PeftModel:
    """Put a saved adapter on its base model, at the depth that the model is set to.

    A shared update runs at any depth. An adapter with factors or gates for each loop runs at its own depth only.

    Args:
        model: Looped base model.
        adapter: Folder or Hub name of the adapter, in PEFT's format or in the format of the paper authors' program.
        is_trainable: Whether to train the adapter further.

    Raises:
        UserError: If the folder does not hold an adapter in safetensors, or the adapter does not fit the model.
    """
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise UserError(
            "`model` must be a looped base model with its head and without an adapter, as `load_model` and "
            f"`AutoModelForCausalLM` load it, got a {type(model).__name__}."
        )
    folder = adapter_folder(adapter)
    with explain_loading(str(folder)):
        config, metadata = read_adapter_config(folder), read_adapter_metadata(folder)
    check_peft_config(config)
    looped = attach_looped_model(model)
    looped.trained_with = {**metadata, "initial_adapter": str(adapter)} if is_trainable else metadata
    add_end_tokens(looped, metadata.get("eos_token_id") or [])
    base, trained_on = model.config.name_or_path, config.base_model_name_or_path
    if base and trained_on and base != trained_on:
        logger.warning(f"The adapter in {folder} was trained on {trained_on}, but the model is {base}.")
    num_loops = looped.num_loops
    low, high = metadata.get("depths") or [metadata.get("num_loops", num_loops)] * 2
    if not low <= num_loops <= high:
        depths = f"depth {low}" if low == high else f"depths {low} to {high}"
        logger.warning(f"The adapter in {folder} was trained at {depths}, but the model runs {num_loops} loops.")
    try:
        weights = read_weights(folder)
        _fit_vocabulary(model, weights)
        return attach_adapter(model, folder, is_trainable, config, weights)
    except UserError:
        raise
    except (RuntimeError, ValueError, SafetensorError, re.error) as error:  # `target_modules` may be a pattern
        raise UserError(f"The adapter in {folder} does not fit this model: {first_line(error)}") from error


def _fit_vocabulary(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Resize the embeddings to the saved ones, which PEFT saves with an adapter after `resize_token_embeddings`."""
    embeddings = model.get_input_embeddings()
    saved = weights.get(
        next(f"base_model.model.{name}.weight" for name, x in model.named_modules() if x is embeddings)
    )
    if saved is not None and len(saved) != len(embeddings.weight):
        with torch.random.fork_rng():  # new rows are random before they are loaded
            model.resize_token_embeddings(len(saved), mean_resizing=False)


def adapter_folder(adapter: str | Path) -> Path:
    """Return the folder of an adapter, and download an adapter on the Hub first."""
    if Path(adapter).is_dir():
        return Path(adapter)
    check_name(str(adapter))
    try:
        return Path(snapshot_download(str(adapter), allow_patterns=_ADAPTER_FILES))
    except (OSError, ValueError) as error:
        raise UserError(f"`adapter` must be a folder or a Hub name, got {adapter} ({first_line(error)}).") from error


def is_adapter(name: str | Path) -> bool:
    """Return whether a folder or a repository on the Hub has an adapter, and not a model."""
    is_named = Path(name).is_dir() and not Path(name, "config.json").is_file() and find_saved(name) != Path(name)
    return is_named or find_adapter_config_file(str(name)) is not None


def load_saved_tokenizer(
    folder: str | Path, model: PreTrainedModel, revision: str | None = None, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer in the folder of an adapter or model, or the tokenizer of the loaded model."""
    is_saved = Path(folder, "tokenizer.json").is_file()
    name = folder if is_saved else find_looped_model(model).config.name_or_path
    return load_tokenizer(name, revision, chat_template)


def read_adapter_config(folder: str | Path) -> LoraConfig:
    """Return the LoRA configuration of a saved adapter."""
    folder = find_saved(folder)
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / file).is_file():
            raise UserError(f"{folder} must hold an adapter in safetensors, but it has no {file}.")
    file, fields = folder / CONFIG_FILE, read_authors_config(folder)
    config = parse_peft_config(read_json_object(file), file) if fields is None else to_peft_config(fields)
    config.base_model_name_or_path = model_path(config.base_model_name_or_path)
    return config


def find_saved(folder: str | Path) -> Path:
    """Return the folder of the adapter in the folder of a run.

    PEFT saves the adapter `default` in the folder, and another adapter in a subfolder with its name. Of several adapters it is
    the trained one, which has `ADAPTER_METADATA`.

    Raises:
        UserError: If there are several adapters in subfolders.
    """
    folder = Path(folder)
    named = sorted(path.parent for path in folder.glob(f"*/{CONFIG_FILE}"))
    named = [path for path in named if not path.name.startswith(PREFIX_CHECKPOINT_DIR)]
    found = [path for path in (folder, *named) if (path / CONFIG_FILE).is_file()]
    found = [path for path in found if (path / ADAPTER_METADATA).is_file()] or found
    if len(found) > 1 and folder not in found:
        names = ", ".join(path.name for path in found)
        raise UserError(f"`adapter` must be the folder of one adapter, got {folder} with the adapters {names}.")
    return folder if folder in found or not found else found[0]


def read_adapter_metadata(folder: str | Path) -> dict[str, Any]:
    """Return the training settings that were saved with an adapter; an empty dict if there are none."""
    folder = find_saved(folder)
    path = folder / ADAPTER_METADATA
    if path.is_file():
        metadata = read_json_object(path)
        for name, hint in _METADATA_TYPES.items():
            check_type(f"`{name}` in {path}", metadata.get(name), hint)
        return metadata
    fields = read_authors_config(folder) if (folder / CONFIG_FILE).is_file() else None
    return {} if fields is None else to_metadata(fields)


def save_adapter_metadata(model: PeftModel, folder: str | Path, **settings: Any) -> None:
    """Save training settings next to the active adapter, and the name of `tiny-ouro` instead of its folder here.

    Args:
        model: Trained model, whose end tokens are saved as well.
        folder: Folder in which PEFT has saved the adapters.
        **settings: `num_loops`, `rule`, `p`, ...
    """
    settings["eos_token_id"] = end_tokens(model.get_base_model())
    for adapter in model.peft_config:
        own = Path(folder) if adapter == "default" else Path(folder, adapter)
        if adapter == model.active_adapters[0]:
            write_file(own / ADAPTER_METADATA, json.dumps(settings, indent=1) + "\n")
        config = own / CONFIG_FILE
        if config.is_file() and str(TINY_OURO_PATH) in (text := config.read_text(encoding="utf-8")):
            write_file(config, text.replace(json.dumps(str(TINY_OURO_PATH)), '"tiny-ouro"'))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return a saved adapter's tensors under PEFT's names."""
    folder = find_saved(folder)
    return load_file(folder / WEIGHTS_FILE) if read_authors_config(folder) is None else to_peft_weights(folder)
