"""Merge adapters into ordinary checkpoints of their base models, export them, and push them to the Hub.

At unit gates an adapter is ordinary LoRA, so that W + (alpha / r) B A is an ordinary checkpoint of the base model.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from peft import PeftModel
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraLayer
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from loopdropout_trainer.errors import UserError, as_path, check_type, short_repr
from loopdropout_trainer.keywords import explain_unknown
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.lora import find_active_adapter, is_enabled, merged_update
from loopdropout_trainer.results.run_files import RECIPE_FILE
from loopdropout_trainer.saving.authors_format import write_authors_format
from loopdropout_trainer.saving.cards import (
    CardFields,
    base_name,
    make_card_fields,
    public_base_name,
    read_card_of,
    without_folders,
    write_model_card,
)
from loopdropout_trainer.saving.checkpoints import STATE_FILE, list_checkpoints
from loopdropout_trainer.saving.facts import Source
from loopdropout_trainer.saving.integrity import replacing_model
from loopdropout_trainer.saving.metadata import write_metadata
from loopdropout_trainer.saving.pushing import (
    create_branch,
    explain_push,
    list_files,
    name_on_card,
    patterns_left_out,
    push_run,
    upload,
)
from loopdropout_trainer.saving.saved_adapter import holds_adapter, read_saved_adapter
from loopdropout_trainer.saving.source import find_source
from loopdropout_trainer.saving.standalone import check_code, copy_code, write_code
from loopdropout_trainer.saving.trainings import warn_of_untrained
from loopdropout_trainer.tokenizers import add_end_tokens, check_tokenizer, end_token_ids, load_tokenizer


logger = logging.get_logger(__name__)


def export_authors_format(adapter: str | Path | Source, output_dir: str | Path) -> Path:
    """Write a saved adapter in the format of the paper authors' program.

    Args:
        adapter: Folder or Hub name of the adapter.
        output_dir: Folder for the exported adapter.

    Returns:
        The folder.

    Raises:
        UserError: If there is no such adapter, or the format cannot represent it.
    """
    source, output_dir = adapter, Path(output_dir)
    if not isinstance(source, Source):
        source = find_source(adapter, accept=("adapter",), what="adapter")
    if holds_adapter(output_dir) and not read_saved_adapter(output_dir).is_authors:
        raise UserError(f"`output_dir` must not hold an adapter in PEFT's format, got {output_dir}.")
    config, weights = source.adapter.read_config(), source.adapter.read_weights()
    output_dir.mkdir(parents=True, exist_ok=True)
    write_authors_format(output_dir, config, source.metadata, weights)
    return output_dir


@torch.no_grad()
def merged_state_dict(model: PeftModel, scale: float = 1.0) -> dict[str, Tensor]:
    """Return the base model's state dict with the adapter's update added.

    W + scale (alpha / r) B A is summed in float32 and rounded once. A 4-bit W is dequantized first. The model stays unmerged.

    Args:
        model: PEFT model over a looped model.
        scale: Factor of the update. It has the effect of this gate in every loop.

    Raises:
        UserError: If the adapter cannot be merged, or the base weights are sharded, or quantized to other than 4 bits, or a
            merged weight is not finite.
    """
    adapter = find_active_adapter(model)
    base = model.get_base_model()
    skipped = re.compile(r"\.lora_|\.weight\.")  # constants of a quantized weight are named `weight.absmax`, ...
    dequantized = _dequantized_weights(base)
    merged = {name: tensor for name, tensor in base.state_dict().items() if not skipped.search(name)}
    merged |= dequantized
    for name, layer in base.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        weight_name = f"{name}.base_layer.weight"
        weight, update = merged[weight_name], merged_update(layer, adapter)
        is_linear = type(layer) is LoraLinear or weight_name in dequantized
        if not is_linear or weight.shape != update.shape or not weight.is_floating_point():
            raise UserError(
                f"`{name}` is quantized or sharded. Save the adapter, load the base model unquantized in one process, "
                "and merge there."
            )
        summed = (weight.float() + scale * update.float()).to(weight.dtype)
        if not summed.isfinite().all():
            raise UserError(
                f"The merged weights of `{name}` must be finite, got infinity or NaN in {str(weight.dtype).split('.')[-1]}. "
                f"Check the adapter, and set `scale`, which is {scale:g}, to a smaller number."
            )
        merged[weight_name] = summed
    return {name.replace(".base_layer.", "."): tensor for name, tensor in merged.items()}


def _dequantized_weights(base: PreTrainedModel) -> dict[str, Tensor]:
    """Return the 4-bit weights of a model, dequantized."""
    linears = {name: module for name, module in base.named_modules() if isinstance(module, nn.Linear)}
    return {
        f"{name}.weight": dequantize_module_weight(linear)
        for name, linear in linears.items()
        if type(linear.weight).__name__ == "Params4bit"
    }


def _without_quantization(base: PreTrainedModel) -> PreTrainedModel:
    """Return a model without data, which saves dequantized weights."""
    config = copy.deepcopy(base.config)
    del config.quantization_config
    with torch.device("meta"):
        empty = type(base)(config).to(base.dtype)
    empty.generation_config = base.generation_config
    return empty


@explain_unknown
def merge_and_save(
    model: PeftModel,
    output_dir: str | Path,
    processing_class: PreTrainedTokenizerBase | None = None,
    card: CardFields | Mapping[str, Any] | None = None,
    repo_id: str | None = None,
    *,
    scale: float = 1.0,
    standalone: bool = False,
) -> Path:
    """Merge the adapter and save an ordinary checkpoint of the base model.

    The folder gets the weights in safetensors under the base model's own names, the configurations, the tokenizer and a model
    card. `model` itself stays unmerged. A 4-bit base model is merged into its dequantized weights. A former merged model in
    the folder is replaced only after the new one is complete, so the disk must have space for both.

    Args:
        model: PEFT model over a looped model.
        output_dir: Folder for the merged model.
        processing_class: Tokenizer to save with the model. Default: the trainer's, or the one of the adapter's folder, or
            the base model's. A warning says so if there is none.
        card: Fields of the model card, as from `read_card_fields`, or a mapping of them. The recipe is saved, too. Default:
            from the folder of the adapter's training.
        repo_id: Name on the Hub (`user/name`). The title and the code of the model card name it.
        scale: Factor of the update.
        standalone: Whether to write the code of this package's model class, so that transformers loads the model without this
            package, with `trust_remote_code=True`.

    Returns:
        The folder.

    Raises:
        UserError: If the adapter cannot be merged, or the folder holds an adapter, a training or the base model.
    """
    output_dir = as_path("output_dir", output_dir)
    if not isinstance(model, PeftModel):
        raise UserError(
            "`model` must be a PEFT model with an adapter, such as `trainer.model` or `load_model(folder)` of the adapter's "
            f"folder, got a {type(model).__name__}."
        )
    _check_arguments(processing_class, repo_id, scale, standalone)
    fields = None if card is None else make_card_fields(card)
    base = model.get_base_model()
    _check_folder(output_dir, base)
    if fields is None:
        fields = read_card_of(model)
    if repo_id is not None:
        fields = replace(fields, repo_id=repo_id)
    if standalone:
        check_code(base)
    if processing_class is None:
        processing_class = _find_tokenizer(model, output_dir)
    if processing_class is not None:
        add_end_tokens(base, end_token_ids(processing_class))
    weights = merged_state_dict(model, scale)
    warn_of_untrained(model, output_dir, merges=True)
    _warn_of_surroundings(model, output_dir)
    with replacing_model(output_dir) as new_dir:
        _write_merged(new_dir, model, weights, processing_class, fields.recipe, scale, standalone)
    write_model_card(output_dir, model, fields, merged_scale=scale)  # its title is the name of the folder
    return output_dir


def _check_folder(output_dir: Path, base: PreTrainedModel) -> None:
    """Raise UserError if a folder holds an adapter, a training that has saved none yet, or the base model."""
    kind = None
    if holds_adapter(output_dir) or output_dir.resolve() == Path(base.config.name_or_path or "?").resolve():
        kind = "an adapter or of the base model"
    elif (output_dir / STATE_FILE).is_file() or list_checkpoints(output_dir):
        kind = "a training, which saves its adapter there"
    if kind is not None:
        raise UserError(
            f"`output_dir` must not be the folder of {kind}, got {output_dir}. Choose a folder of its own, such as "
            f"{output_dir / 'merged'}."
        )


def _check_arguments(processing_class: Any, repo_id: Any, scale: Any, standalone: Any) -> None:
    """Raise UserError for an argument of `merge_and_save` of another type, before anything is written."""
    check_tokenizer(processing_class, is_optional=True)
    check_type("`repo_id`", repo_id, str | None)
    check_type("`standalone`", standalone, bool)
    check_type("`scale`", scale, int | float)
    if not math.isfinite(scale):
        raise UserError(f"`scale` must be a finite number, got {scale}.")
    effect = describe_unusual_scale(scale)
    if effect is not None:
        logger.warning(effect)


def _warn_of_surroundings(model: PeftModel, output_dir: Path) -> None:
    """Warn of blocks around a merge that it ignores, and of a depth that may be meant for a measurement or a training only."""
    looped = find_looped_model(model)
    if not is_enabled(model) or looped.gate_state.batch.of_block:
        logger.warning(
            f"The merged model in {output_dir} has the whole update of the adapter, although the merge runs inside of "
            "`use_gates` or `disable_adapter`. To merge another part of it, set `scale`."
        )
    own_depth = looped.own_num_loops
    if looped.num_loops != own_depth:
        logger.warning(
            f"The merged model in {output_dir} runs K = {looped.num_loops} loops, the depth of a block of `use_depth`, but "
            f"the model itself runs {own_depth}. To keep its own depth, merge outside of the block."
        )
        return
    depths = looped.trained_with.get("depths")
    if depths and not min(depths) <= own_depth <= max(depths):
        logger.warning(
            f"The merged model in {output_dir} runs K = {own_depth} loops, but the adapter was trained at {depths[0]}. To "
            f"give it the trained depth, merge inside of `with use_depth(model, {depths[0]}):`."
        )


_LARGEST_USUAL_SCALE = 2
"""Largest gate of Loop Dropout with p = 0.5, and so the largest factor of an update in its training."""


def describe_unusual_scale(scale: float) -> str | None:
    """Return a sentence about a factor of the update that is rarely meant, or None for a usual one."""
    if scale == 0:
        return "With a `scale` of 0, the merged model is the base model, because no part of the update is merged."
    if scale < 0:
        return f"With a `scale` of {scale:g}, the update is subtracted from the base model. To merge it, set 1."
    if scale > _LARGEST_USUAL_SCALE:
        return (
            f"With a `scale` of {scale:g}, the update is merged {scale:g} times, and no training has seen it so large. "
            "The scale 1 merges it as it was trained."
        )
    return None


def _find_tokenizer(model: PeftModel, output_dir: Path) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a model with an adapter, or warn that a merged model in `output_dir` lacks it."""
    looped = find_looped_model(model)
    if looped.training_tokenizer is not None:
        return looped.training_tokenizer
    try:
        if looped.adapter_source is not None:
            return looped.adapter_source.load_tokenizer()
        return load_tokenizer(base_name(model) or "", looped.base_revision)
    except UserError as error:
        logger.warning(
            f"The merged model in {output_dir} has no tokenizer, which `loopdropout chat` and servers need. Give it, as in "
            f"`merge_and_save(model, folder, tokenizer)`. {error}"
        )
        return None


def _write_merged(
    output_dir: Path,
    model: PeftModel,
    weights: dict[str, Tensor],
    processing_class: PreTrainedTokenizerBase | None,
    recipe: str | None,
    scale: float,
    standalone: bool,
) -> None:
    """Write the files of a merged model with `weights`, without its card. The others are as in `merge_and_save`."""
    base = model.get_base_model()
    saved = base
    if getattr(base.config, "quantization_config", None) is not None:
        saved = _without_quantization(base)
    saved.save_pretrained(output_dir, state_dict=weights)
    config = json.loads((output_dir / "config.json").read_text(encoding="utf-8"))
    auto_map = config.pop("auto_map", None) or {}
    own_map = write_code(base, output_dir) if standalone else {}
    auto_map = own_map or copy_code(auto_map, base_name(model), output_dir)
    if auto_map:
        config["auto_map"] = auto_map
    if "use_cache" in config:
        config["use_cache"] = True  # training sets it to False
    (output_dir / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if processing_class is not None:
        processing_class.save_pretrained(output_dir)
    if recipe:
        (output_dir / RECIPE_FILE).write_text(without_folders(recipe), encoding="utf-8")
    kind = "standalone model" if own_map else "merged model"
    facts = {"kind": kind, "scale": scale, "base_model": public_base_name(model)}
    write_metadata(output_dir, {**find_looped_model(model).trained_with, **facts})


@explain_unknown
def push_merged_to_hub(
    folder: str | Path,
    repo_id: str,
    *,
    token: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
) -> str:
    """Upload a merged model to the Hub, with the card that `merge_and_save` wrote. The card names the repository.

    Args:
        folder: Folder that `merge_and_save` wrote. It is kept if the push fails.
        repo_id: `user/name` of the repository, which is created if it does not exist.
        token: Hub token. Default: the token of the logged-in user.
        private: Whether a new repository is private. Default: the Hub's setting.
        revision: Branch, which is created if it does not exist. Default: `main`.

    Returns:
        The address of the repository.

    Raises:
        UserError: If the folder does not hold a merged model, or the push fails.
    """
    if not isinstance(folder, str | Path):
        raise UserError(
            f"`folder` must be a folder with a merged model, got {short_repr(folder)}. Call `merge_and_save(model, folder)` "
            "first."
        )
    folder = Path(folder)
    check_type("`repo_id`", repo_id, str)
    if holds_adapter(folder) or not any(folder.glob("*.safetensors")):
        raise UserError(f"`folder` must hold a merged model, got {folder}. Call `merge_and_save` first.")
    repository = _repository(repo_id, f"The merged model is saved in {folder}.", token, private, revision)
    with repository as repo_id, name_on_card(folder, repo_id, revision):
        commit = upload(folder, repo_id, "Upload merged model", token=token, branch=revision)
    return str(commit.repo_url)


def list_pushed_files(source: Source) -> dict[str, int]:
    """Return the files that a push of an adapter or a merged model in a folder uploads, with their sizes in bytes."""
    if not source.is_adapter:
        folder, names = source.folder, list_files(source.folder)
    else:
        folder, adapters = _locate_adapters(source)
        names = list_files(folder, patterns_left_out(folder, adapters))
    return {name: Path(folder, name).stat().st_size for name in names}


def _locate_adapters(source: Source) -> tuple[Path, list[str]]:
    """Return the folder that a push of an adapter uploads, and the names of adapters in subfolders that go with it."""
    folder, adapters = source.saved_in, []
    if source.folder != folder:
        adapters = [source.folder.name]
    return folder, adapters


def push_adapter(source: Source, repo_id: str, *, private: bool | None = None, revision: str | None = None) -> str:
    """Upload a saved adapter to the Hub, with its card, its settings and its results, and return the repository's address.

    Args:
        source: Adapter in a folder of this computer.
        repo_id: `user/name` of the repository, which is created if it does not exist.
        private: Whether a new repository is private. Default: the Hub's setting.
        revision: Branch, which is created if it does not exist. Default: `main`.

    Raises:
        UserError: If the push fails.
    """
    folder, adapters = _locate_adapters(source)
    repository = _repository(repo_id, f"The adapter is saved in {folder}.", None, private, revision)
    with repository as repo_id, name_on_card(folder, repo_id, revision):
        commit = push_run(folder, repo_id, adapters, branch=revision)
    return str(commit.repo_url)


@contextmanager
def _repository(
    repo_id: str, saved: str, token: str | None, private: bool | None, revision: str | None
) -> Iterator[str]:
    """Create a repository and its branch for a push inside of the block, and yield its whole name. Explain errors.

    The arguments are those of `explain_push` and `push_adapter`.
    """
    if not repo_id:  # the Hub's error about it names nothing
        raise UserError("`repo_id` must be the name of a repository, such as `user/name`, got ''.")
    with explain_push(repo_id, saved, token):
        repo_id = HfApi(token=token).create_repo(repo_id, private=private, exist_ok=True).repo_id
        create_branch(repo_id, revision, token)
        yield repo_id
