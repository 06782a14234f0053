"""Merge the adapter into the base model at unit gates, save the result with its card, and push it to the Hub.

At unit gates the adapter is ordinary LoRA, so that W + (alpha / r) B A is an ordinary checkpoint of the base model.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from huggingface_hub import HfApi
from peft import PeftModel
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging

from loopdropout_trainer.lora import check_adapter, merged_update
from loopdropout_trainer.checks import shown_parts
from loopdropout_trainer.errors import UserError, one_line
from loopdropout_trainer.processes import LIBRARY_BYTES
from loopdropout_trainer.saving.adapter_files import base_sha256
from loopdropout_trainer.saving.cards import ModelCardFields, base_of, card_on_hub, is_hub_name, save_card
from loopdropout_trainer.saving.files import read_json, staged_files
from loopdropout_trainer.settings.tokenizer import as_in_its_file


logger = logging.get_logger(__name__)

MERGED = "merged.json"
"""In a merged model's folder: which base the adapter was merged into."""
_CARD = "README.md"
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"}


class PushError(RuntimeError):
    """The Hub did not take the model; it is on disk all the same."""


@torch.no_grad()
def merged_state_dict(model: PeftModel, folder: Path | None = None) -> dict[str, Tensor]:
    """Return the base model's state dict with the adapter added at unit gates; the model is left as it is.

    W + Delta is summed in float32 and rounded once to the base's dtype.

    Args:
        model: PEFT model over a looped model.
        folder: for the merged weights, so that they need no memory: files that these tensors map; None: in memory.

    Raises:
        ValueError: if the adapter cannot be merged (learned gates, a pair of factors for each loop), or the base weights
            are quantised or sharded.
    """
    adapter = check_adapter(model)
    base = model.get_base_model()
    layers = {name: module for name, module in base.named_modules() if isinstance(module, LoraLayer)}
    merged = {}
    for name, tensor in base.state_dict().items():
        module_name, _, parameter = name.rpartition(".")
        if module_name.endswith(".base_layer"):
            module_name = module_name.removesuffix(".base_layer")
            if parameter == "weight":
                tensor = _merged_weight(module_name, layers[module_name], adapter, tensor)
                tensor = tensor if folder is None else _in_file(tensor, folder / module_name)
        elif ".lora_" in f".{name}":
            continue
        merged[f"{module_name}.{parameter}"] = tensor
    return merged


def merging_memory(model: PeftModel) -> dict[str, int]:
    """Return the bytes that merging and saving takes at most: of `libraries`, `weights` and `one merged weight`."""
    adapted = [layer.weight.numel() for layer in model.modules() if isinstance(layer, LoraLayer)]
    frozen = [weight for name, weight in model.named_parameters() if ".lora_" not in name]
    return {
        "libraries": int(LIBRARY_BYTES),
        "weights": sum(weight.numel() * weight.element_size() for weight in frozen),
        "one merged weight": 12 * max(adapted),  # in float32: itself, the update and their sum
    }


def _merged_weight(name: str, layer: LoraLayer, adapter: str, weight: Tensor) -> Tensor:
    if type(layer) is not LoraLinear or not weight.is_floating_point():
        kind = f"a {type(layer).__name__} over {weight.dtype} weights"
        raise UserError(
            f"`{name}` is {kind}: load the base model unquantised, put the saved adapter on it, and merge that."
        )
    delta = merged_update(layer, adapter)
    if weight.shape != delta.shape:
        held = f"{list(weight.shape)} of a {list(delta.shape)} weight"
        raise UserError(f"`{name}` is sharded over processes, {held}: save the adapter, and merge it in one process.")
    merged = (weight.float() + delta.float()).to(weight.dtype)
    if not torch.isfinite(merged).all():
        raise UserError(f"The adapter cannot be merged: `{name}` would hold NaN or infinity in {weight.dtype}.")
    return merged


def _in_file(tensor: Tensor, path: Path) -> Tensor:
    """Return a copy of a tensor that maps a file, so that the system may drop it from memory and read it again."""
    path.write_bytes(tensor.contiguous().cpu().view(torch.uint8).numpy())
    return torch.from_file(str(path), size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)


def merge_and_save(
    model: PeftModel,
    output_dir: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    facts: ModelCardFields | None = None,
    repo_id: str | None = None,
) -> Path:
    """Save the unit-gate merged model as an ordinary checkpoint of its base: weights, tokenizer, generation config, card.

    The weights are safetensors in the base's dtype under the base's own key names. `model` itself stays unmerged.

    Args:
        model: PEFT model over a looped model.
        output_dir: new or existing folder.
        tokenizer: saved beside the weights if given.
        facts: for the model card; base model, depth and adapter are filled in from `model`.
        repo_id: name on the Hub for the card, if the model is going there.

    Returns:
        The folder.

    Raises:
        ValueError: if the adapter cannot be merged, or the folder holds other weights.
        WriteError: if the disk refuses; what was there before is untouched.
    """
    output_dir = Path(output_dir)
    check_merge_target(output_dir, model)
    base = model.get_base_model()
    logger.info(f"Memory of merging: about {shown_parts(merging_memory(model))}.")
    with staged_files(output_dir, "The merged model") as partial:
        with TemporaryDirectory(dir=partial) as files:
            base.save_pretrained(partial, state_dict=merged_state_dict(model, Path(files)))
        code = _bring_code(base.config, base.config.name_or_path or base_of(model), partial)
        config = read_json(partial / "config.json")
        config.pop("auto_map", None)
        if code:
            config["auto_map"] = code
        if "use_cache" in config:
            config["use_cache"] = True  # off for training only
        (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if tokenizer is not None:
            as_in_its_file(tokenizer).save_pretrained(partial)
        (partial / MERGED).write_text(_merged_into(model), encoding="utf-8")
        save_card(model, partial, repo_id, facts, title=output_dir.resolve().name, merged=True)
    return output_dir


def check_merge_target(folder: str | Path, model: PeftModel) -> None:
    """Raise ValueError if the folder holds weights, except those of an earlier merge into the same base model."""
    weights = sorted(file.name for file in Path(folder).glob("*") if file.suffix in _WEIGHTS)
    before = Path(folder, MERGED)
    if weights and not (before.is_file() and before.read_bytes() == _merged_into(model).encode()):
        raise UserError(f"{folder} holds other weights ({weights[0]}): choose another folder for the merged model.")


def _merged_into(model: PeftModel) -> str:
    """Return the content of MERGED, JSON with the SHA-256 of the base's files or, if unknown, the base's name."""
    base = model.get_base_model()
    return json.dumps({"merged_into": base_sha256(base) or Path(base.config.name_or_path).name}) + "\n"


def _bring_code(config: PreTrainedConfig, base_model: str | None, folder: Path) -> dict[str, str]:
    """Return the `auto_map` under which a merged model in `folder` finds its base's own code; empty if it cannot.

    A base's `auto_map` names files that lie beside its own config.json. In a new repository they are not there: the entries
    then name the base's repository (`org/name--file.Class`), or the files are copied.
    """
    auto_map = {}
    for key, name in (getattr(config, "auto_map", None) or {}).items():
        if "--" in name:
            auto_map[key] = name
        elif is_hub_name(base_model):
            auto_map[key] = f"{base_model}--{name}"
        elif base_model and Path(base_model, f"{name.partition('.')[0]}.py").is_file():
            auto_map[key] = name
            for file in Path(base_model).glob("*.py"):  # they may import one another
                shutil.copy2(file, folder)
        else:
            logger.warning(
                f"The base model's `auto_map` names {name} for {key}, whose file is not beside the base: other programs will "
                "not find it for the merged model either. Copy the .py files of the base's repository there, and merge again."
            )
    return auto_map


def push_merged_to_hub(
    folder: str | Path, repo_id: str, *, token: str | None = None, private: bool | None = None
) -> str:
    """Upload a folder written by `merge_and_save` to the Hub.

    Args:
        folder: of the merged model; it must hold the weights already, so that a refused push loses nothing.
        repo_id: `user/name`; created if it does not exist.
        token: default: the one of the logged-in user.
        private: whether a newly created repository is private; default: as the Hub decides.

    Returns:
        The address of the repository.

    Raises:
        FileNotFoundError: if the folder holds no merged model.
        PushError: if there is no valid token or the Hub refuses; one sentence, without the token.
    """
    folder = Path(folder)
    if not any(folder.glob("*.safetensors")):
        raise FileNotFoundError(f"{folder} holds no merged model: call `merge_and_save` first.")
    api = HfApi(token=token)
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        options = {"repo_id": repo_id, "commit_message": "Upload merged model"}
        commit = api.upload_folder(folder_path=folder, ignore_patterns=_CARD, **options)
        if (folder / _CARD).is_file():
            api.upload_file(path_or_fileobj=card_on_hub(folder, repo_id).encode(), path_in_repo=_CARD, **options)
        return str(commit.repo_url)
    except Exception as error:  # whatever the Hub's client raises, offline or refused: nothing may be lost here
        raise push_error(error, repo_id, f"The merged model is safe in {folder}", token) from None


def push_error(error: Exception, repo_id: str, safe: str, *tokens: str | None) -> PushError:
    """Say in one sentence, without any of the tokens, why the Hub did not take a model, and what is `safe`."""
    if isinstance(error, PushError):  # already said, by a call inside of this one that knew less of what is safe
        error = error.__context__
    reason = one_line(error)
    for token in filter(None, tokens):
        reason = reason.replace(token, "***")
    advice = "log in with `hf auth login` or set HF_TOKEN, then push it again"
    return PushError(f"The Hub did not take {repo_id!r} ({type(error).__name__}: {reason}). {safe}; {advice}.")
