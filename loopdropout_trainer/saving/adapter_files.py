"""Adapters on disk: the depth they were trained at is saved beside them, and checked with their rank and base on loading."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.dataclasses import type_validator
from peft import LoraConfig, PeftConfig, PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from loopdropout_trainer.lora import attach_adapter, check_peft_config
from loopdropout_trainer.checks import shown
from loopdropout_trainer.errors import UserError, user_supplied
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.looped.model import check_num_loops
from loopdropout_trainer.saving import authors_format
from loopdropout_trainer.saving.cards import is_hub_name
from loopdropout_trainer.saving.files import read_json, sha256_of_weights, staged_files, write_json
from loopdropout_trainer.settings.tokenizer import add_end_tokens, end_tokens


logger = logging.get_logger(__name__)

ADAPTER_METADATA = "loop_dropout.json"
WEIGHTS_FILE = authors_format.WEIGHTS
_KINDS = {"num_loops": int, "rule": str, "p": float | int | list, "eos_token_id": list[int], "base_sha256": str}


def base_sha256(base: PreTrainedModel) -> str | None:
    """Return a hash of the safetensors files that a base model was loaded from; None if they are not on this machine.

    It does not depend on where the files lie: a copy in another folder, or in the Hub's cache, has the same.
    """
    name = base.config.name_or_path
    if is_hub_name(name):
        config = try_to_load_from_cache(name, "config.json", revision=getattr(base.config, "_commit_hash", None))
        name = Path(config).parent if isinstance(config, str) else None
    if not name:
        return None
    files = [Path(name, SAFE_WEIGHTS_NAME)]
    index = Path(name, SAFE_WEIGHTS_INDEX_NAME)
    if index.is_file() and not files[0].is_file():  # the shards, whatever else lies there
        shards = read_json(index)["weight_map"].values()
        files = [Path(name, shard) for shard in set(shards)]
    files = list(filter(Path.is_file, files))
    return sha256_of_weights(files) if files else None


def save_adapter_metadata(model: PeftModel, folder: str | Path, **facts: Any) -> None:
    """Write what an adapter was trained with beside it.

    That is `num_loops`, `rule`, `p`, ..., the hash of its base's files, and the ids of the tokens that end its answers.
    """
    facts["base_sha256"] = base_sha256(model.get_base_model())
    facts["eos_token_id"] = end_tokens(model.get_base_model())
    write_json(Path(folder, ADAPTER_METADATA), facts)


def adapter_metadata(folder: str | Path) -> dict:
    """Return what an adapter was trained with; an adapter without such a file was trained with something unknown: {}."""
    file = Path(folder) / ADAPTER_METADATA
    if not file.exists():
        fields = authors_format.read_fields(Path(folder))
        return {} if fields is None else authors_format.training_facts(fields)
    with user_supplied(f"{file} is not what was saved with the adapter"):
        metadata = dict(read_json(file))
        for name, kind in _KINDS.items():
            type_validator(name, metadata.get(name), kind | None)
        depths = metadata.get("depths") or [1, 1]
        type_validator("depths", tuple(depths), tuple[int, int])
        for depth in (metadata.get("num_loops", 1), *depths):
            check_num_loops(depth)
    return metadata


def adapter_folder(adapter: str | Path) -> Path:
    """Return the folder of an adapter, downloaded if it is on the Hub.

    Raises:
        UserError, SetupError: if there is no such folder, and nothing of that name can be loaded from the Hub.
    """
    if Path(adapter).is_dir():
        return Path(adapter)
    if not is_hub_name(str(adapter)):
        raise UserError(f"The adapter {adapter} cannot be loaded: there is no such folder.")
    with user_supplied(f"There is no folder {adapter}, and no adapter of this name can be loaded from the Hub"):
        return Path(snapshot_download(str(adapter), allow_patterns=["adapter_*", ADAPTER_METADATA]))


def load_adapter(
    model: PreTrainedModel, folder: str | Path, is_trainable: bool = False, another_base: bool = False
) -> PeftModel:
    """Put a saved adapter of any kind on its base model, at the depth that the model is set to.

    A shared update runs at any depth: one that differs from training is logged. Factors or learned gates for each loop
    run at their own depth only.

    Args:
        model: looped base model.
        folder: where `save_model`, a checkpoint, PEFT's `save_pretrained` or the paper authors' program put the adapter, or
            its name on the Hub.
        is_trainable: whether to train it further.
        another_base: whether it may have been trained on another base model than this one.

    Raises:
        NotLoopedError: for a model without loops.
        ValueError: if the folder holds no safetensors adapter, one of another base model, or one whose loops have factors
            or gates of their own at another depth; one sentence.
    """
    folder = adapter_folder(folder)
    config = read_adapter_config(folder)
    check_peft_config(config)
    looped = find_looped_model(model)
    metadata = adapter_metadata(folder)
    if not another_base:
        _check_base(model, config, metadata, folder)
    looped.trained_with = metadata
    add_end_tokens(looped, metadata.get("eos_token_id") or ())
    num_loops = looped.config.num_loops
    low, high = metadata.get("depths") or [metadata.get("num_loops", num_loops)] * 2
    if not low <= num_loops <= high:
        depths = f"depth {low}" if low == high else f"depths {low} to {high}"
        logger.warning(f"The adapter in {folder} was trained at {depths}; the model runs {num_loops} loops.")
    with user_supplied(f"The adapter in {folder} cannot be put on this model"):
        return attach_adapter(model, folder, is_trainable, config, _read_weights(folder))


def export_adapter(adapter: str | Path, folder: str | Path) -> Path:
    """Write a saved adapter in the format of the paper authors' program (`authors_format`); return the folder.

    Args:
        adapter: its folder, or its name on the Hub.
        folder: new or existing; an adapter in it is replaced.

    Raises:
        UserError: if there is no such adapter, or the format cannot hold it.
        WriteError: if the disk refuses; what was there before is untouched.
    """
    source = adapter_folder(adapter)
    folder = Path(folder)
    if (folder / authors_format.CONFIG).is_file() and authors_format.read_fields(folder) is None:
        raise UserError(f"{folder} holds an adapter in PEFT's format: choose another folder.")
    config = read_adapter_config(source)
    facts = adapter_metadata(source)
    with user_supplied(f"The adapter in {source} cannot be read"):
        weights = _read_weights(source)
    with staged_files(folder, "The exported adapter") as partial:
        authors_format.write(partial, config, facts, weights)
    return folder


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Return a saved adapter's tensors by PEFT's names."""
    is_pefts = authors_format.read_fields(folder) is None
    return load_file(folder / WEIGHTS_FILE) if is_pefts else authors_format.read_weights(folder)


def _check_base(model: PreTrainedModel, config: LoraConfig, metadata: dict, folder: Path) -> None:
    """Refuse an adapter of another base model; only warn where a folder may just have another name.

    The files' hashes decide where both are known, so that a base may be renamed, moved and downloaded again.
    """
    trained_on = config.base_model_name_or_path
    base = model.config.name_or_path
    names_differ = bool(base and trained_on and base != trained_on)
    before = metadata.get("base_sha256")
    now = base_sha256(model) if before else None
    is_another = names_differ and is_hub_name(base) and is_hub_name(trained_on)
    if now:
        is_another = before != now
    if is_another:
        name = trained_on or "another base model"
        name = name if names_differ else f"other weights than those of {name}"
        advice = "load that base, or pass `another_base=True` to `load_adapter`"
        raise UserError(f"The adapter in {folder} was trained on {name}, not on {base}: {advice}.")
    if names_differ and not now:
        logger.warning(f"The adapter in {folder} was trained on {trained_on}; it is put on {base}.")


def check_resumable(model: PeftModel, folder: str | Path) -> None:
    """Refuse to resume a run from a checkpoint of another one.

    Raises:
        ValueError: if the checkpoint's adapter has another rank, scale, target, base model or depth.
    """
    adapter = model.active_adapters[0]
    weights = Path(folder) / adapter if (Path(folder) / adapter / "adapter_config.json").is_file() else folder
    saved = read_adapter_config(weights)  # PEFT keeps an adapter that is not called `default` in a folder of its name
    running = model.peft_config[adapter]
    for field in ("r", "lora_alpha", "use_rslora", "target_modules"):
        old = getattr(saved, field)
        new = getattr(running, field)
        if old != new:
            raise UserError(f"The adapter in {folder} has `{field}` {old}, this run's has {new}.")
    num_loops = find_looped_model(model).config.num_loops
    trained = adapter_metadata(folder).get("num_loops", num_loops)
    if trained != num_loops:
        raise UserError(
            f"The run in {folder} trains at depth {trained}, but the model runs {num_loops} loops: set `num_loops` to "
            f"{trained}, or start a new run with `load_adapter`."
        )


def read_adapter_config(folder: str | Path) -> LoraConfig:
    """Return the LoRA configuration of a saved adapter.

    Raises:
        ValueError: if there is none, or weights are missing or in another format than safetensors.
    """
    folder = Path(folder)
    path = folder / "adapter_config.json"
    if not path.is_file():
        raise UserError(f"{folder} holds no adapter: there is no adapter_config.json in it.")
    if not (folder / WEIGHTS_FILE).is_file():
        pickled = "; a pickled .bin file is not read, since it could run code" if any(folder.glob("*.bin")) else ""
        raise UserError(f"{folder} holds no {WEIGHTS_FILE}{pickled}.")
    with user_supplied(f"{path} cannot be read"):
        fields = authors_format.read_fields(folder)
        config = PeftConfig.from_pretrained(str(folder)) if fields is None else authors_format.peft_config(fields)
        if not isinstance(config, LoraConfig):
            raise UserError(f"{folder} holds a {type(config).__name__}; this package loads LoRA adapters.")
        for names in (config.target_modules, config.rank_pattern, config.alpha_pattern):
            sorted(names or ())  # TypeError for what is no collection of names
    # PEFT matches regular expressions against every module's name; a malicious one takes hours.
    if isinstance(config.target_modules, str) and config.target_modules != "all-linear":
        with user_supplied(f"{folder / WEIGHTS_FILE} cannot be read"), safe_open(folder / WEIGHTS_FILE, "pt") as file:
            names = [name.removeprefix("base_model.model.") for name in file.keys()]  # noqa: SIM118 (not a dict)
        config.target_modules = {name.rpartition(".lora_")[0] for name in names}
        config.exclude_modules = None
    for patterns in (config.exclude_modules, config.layers_pattern, config.rank_pattern, config.alpha_pattern):
        for pattern in [patterns] if isinstance(patterns, str) else patterns or ():
            if not re.fullmatch(r"\^?[\w.]+\$?", str(pattern)):
                raise UserError(f"{path} holds the regular expression {shown(pattern)}: give plain names of modules.")
    return config
