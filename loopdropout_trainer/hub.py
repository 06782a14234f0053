"""Load looped models and their adapters, merge them, describe them in model cards, and push them to the Hub.

At unit gates an adapter is ordinary LoRA, so that W + (alpha / r) B A is an ordinary checkpoint of the base model.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, ModelCard, ModelCardData, snapshot_download
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraLayer
from peft.utils.integrations import dequantize_module_weight
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import find_adapter_config_file, logging

from loopdropout_trainer.authors_format import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    read_authors_config,
    to_metadata,
    to_peft_config,
    to_peft_weights,
    write_authors_format,
)
from loopdropout_trainer.errors import UserError, hide_secrets
from loopdropout_trainer.foreign import loading_fields
from loopdropout_trainer.gates import RULES
from loopdropout_trainer.looped import NotLoopedError, find_looped_model
from loopdropout_trainer.lora import (
    add_gates,
    attach_adapter,
    check_adapter,
    check_peft_config,
    kind_of,
    merged_update,
)
from loopdropout_trainer.models.looped_modeling import check_checkpoint, check_weights
from loopdropout_trainer.recipe import model_path
from loopdropout_trainer.results import RECIPE_FILE, RESULTS_FILE, read_recipe, read_results
from loopdropout_trainer.standalone import write_code
from loopdropout_trainer.tokenizers import end_token_ids, load_tokenizer


logger = logging.get_logger(__name__)

ADAPTER_METADATA = "loop_dropout.json"
"""File next to an adapter with its training settings: `rule`, `p`, `num_loops`, ..., and the end tokens of its answers."""

_ADAPTER_FILES = ["adapter_*", ADAPTER_METADATA, "*token*", "chat_template.jinja", RECIPE_FILE, RESULTS_FILE]


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
    name = str(model_path(name_or_path))
    try:
        if find_adapter_config_file(name):
            name, adapter = None, adapter or name
        if adapter is not None:
            adapter = adapter_folder(adapter)
            num_loops = num_loops or read_adapter_metadata(adapter).get("num_loops")
            if name is None:
                config = read_adapter_config(adapter)
                name, revision = config.base_model_name_or_path, revision or config.revision
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
            find_looped_model(model)  # attaches the description of a foreign class
    except (OSError, ValueError) as error:
        raise UserError(f"The model {name or adapter} cannot be loaded: {_first_line(error)}") from error
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
    folder = adapter_folder(adapter)
    config = read_adapter_config(folder)
    check_peft_config(config)
    looped = find_looped_model(model)
    metadata = read_adapter_metadata(folder)
    looped.trained_with = metadata
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
        return attach_adapter(model, folder, is_trainable, config, _read_weights(folder))
    except UserError:
        raise
    except (RuntimeError, ValueError, SafetensorError) as error:
        raise UserError(f"The adapter in {folder} does not fit this model: {_first_line(error)}") from error


def adapter_folder(adapter: str | Path) -> Path:
    """Return the folder of an adapter, and download an adapter on the Hub first."""
    if Path(adapter).is_dir():
        return Path(adapter)
    try:
        return Path(snapshot_download(str(adapter), allow_patterns=_ADAPTER_FILES))
    except (OSError, ValueError) as error:
        raise UserError(f"`adapter` must be a folder or a Hub name, got {adapter} ({_first_line(error)}).") from error


def load_saved_tokenizer(folder: Path, model: PreTrainedModel, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer in the folder of an adapter or model, or the tokenizer of the loaded model."""
    is_saved = (folder / "tokenizer.json").is_file()
    return load_tokenizer(folder if is_saved else find_looped_model(model).config.name_or_path, revision)


def read_adapter_config(folder: str | Path) -> LoraConfig:
    """Return the LoRA configuration of a saved adapter."""
    folder = Path(folder)
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / file).is_file():
            raise UserError(f"{folder} must hold an adapter in safetensors, but it has no {file}.")
    fields = read_authors_config(folder)
    return PeftConfig.from_pretrained(str(folder)) if fields is None else to_peft_config(fields)


def read_adapter_metadata(folder: str | Path) -> dict[str, Any]:
    """Return the training settings that were saved with an adapter; an empty dict if there are none."""
    path = Path(folder, ADAPTER_METADATA)
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    fields = read_authors_config(Path(folder)) if Path(folder, CONFIG_FILE).is_file() else None
    return {} if fields is None else to_metadata(fields)


def save_adapter_metadata(model: PeftModel, folder: str | Path, **settings: Any) -> None:
    """Save training settings next to an adapter.

    Args:
        model: Trained model, whose end tokens are saved as well.
        folder: Folder of the adapter.
        **settings: `num_loops`, `rule`, `p`, ...
    """
    settings["eos_token_id"] = end_tokens(model.get_base_model())
    Path(folder, ADAPTER_METADATA).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def export_authors_format(adapter: str | Path, output_dir: str | Path) -> Path:
    """Write a saved adapter in the format of the paper authors' program.

    Args:
        adapter: Folder or Hub name of the adapter.
        output_dir: Folder for the exported adapter.

    Returns:
        The folder.

    Raises:
        UserError: If there is no such adapter, or the format cannot represent it.
    """
    folder, output_dir = adapter_folder(adapter), Path(output_dir)
    if (output_dir / CONFIG_FILE).is_file() and read_authors_config(output_dir) is None:
        raise UserError(f"`output_dir` must not hold an adapter in PEFT's format, got {output_dir}.")
    config = read_adapter_config(folder)
    output_dir.mkdir(parents=True, exist_ok=True)
    write_authors_format(output_dir, config, read_adapter_metadata(folder), _read_weights(folder))
    return output_dir


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Return a saved adapter's tensors under PEFT's names."""
    return load_file(folder / WEIGHTS_FILE) if read_authors_config(folder) is None else to_peft_weights(folder)


def end_tokens(model: PreTrainedModel) -> list[int]:
    """Return the ids of the tokens that end a generation."""
    ids = model.generation_config.eos_token_id
    return [token for token in (ids if isinstance(ids, list) else [ids]) if token is not None]


def add_end_tokens(model: PreTrainedModel, ids: Iterable[int | None]) -> None:
    """Let generation end at further tokens."""
    before = end_tokens(model)
    if new := [token for token in ids if token is not None and token not in before]:
        model.generation_config.eos_token_id = [*before, *new]


@torch.no_grad()
def merged_state_dict(model: PeftModel, scale: float = 1.0) -> dict[str, Tensor]:
    """Return the base model's state dict with the adapter's update added.

    W + scale (alpha / r) B A is summed in float32 and rounded once. A 4-bit W is dequantized first. The model stays unmerged.

    Args:
        model: PEFT model over a looped model.
        scale: Factor of the update. It has the effect of this gate in every loop.

    Raises:
        UserError: If the adapter cannot be merged, or the base weights are sharded, or quantized to other than 4 bits.
    """
    adapter = check_adapter(model)
    base = model.get_base_model()
    skipped = re.compile(r"\.lora_|\.weight\.")  # constants of a quantized weight are named `weight.absmax`, ...
    merged = {name: tensor for name, tensor in base.state_dict().items() if not skipped.search(name)}
    merged |= (dequantized := _dequantized_weights(base))
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
        merged[weight_name] = (weight.float() + scale * update.float()).to(weight.dtype)
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


def merge_and_save(
    model: PeftModel,
    output_dir: str | Path,
    processing_class: PreTrainedTokenizerBase | None = None,
    card: Mapping[str, Any] | None = None,
    repo_id: str | None = None,
    *,
    scale: float = 1.0,
    standalone: bool = False,
) -> Path:
    """Merge the adapter and save an ordinary checkpoint of the base model.

    The folder gets the weights in safetensors under the base model's own names, the configurations, the tokenizer and a model
    card. `model` itself stays unmerged. A 4-bit base model is merged into its dequantized weights.

    Args:
        model: PEFT model over a looped model.
        output_dir: Folder for the merged model.
        processing_class: Tokenizer to save with the model.
        card: Keyword arguments `dataset`, `recipe` and `results` of `write_model_card`. The recipe is saved, too.
        repo_id: Name on the Hub for the model card.
        scale: Factor of the update.
        standalone: Whether to write the code of this package's model class, so that transformers loads the model without this
            package, with `trust_remote_code=True`.

    Returns:
        The folder.

    Raises:
        UserError: If the adapter cannot be merged, or the folder holds an adapter or the base model.
    """
    output_dir, card = Path(output_dir), card or {}
    base = model.get_base_model()
    if (output_dir / CONFIG_FILE).exists() or output_dir.resolve() == Path(base.config.name_or_path or "?").resolve():
        raise UserError(f"`output_dir` must not be the folder of an adapter or of the base model, got {output_dir}.")
    if processing_class is not None:
        add_end_tokens(base, end_token_ids(processing_class))
    weights = merged_state_dict(model, scale)
    saved = base if getattr(base.config, "quantization_config", None) is None else _without_quantization(base)
    saved.save_pretrained(output_dir, state_dict=weights)
    config = json.loads((output_dir / "config.json").read_text(encoding="utf-8"))
    auto_map = config.pop("auto_map", None) or {}
    own_map = write_code(base, output_dir) if standalone else {}
    auto_map = own_map or _copy_code(auto_map, _base_name(model), output_dir)
    config |= {"auto_map": auto_map} if auto_map else {}
    config |= {"use_cache": True} if "use_cache" in config else {}  # training sets it to False
    (output_dir / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if processing_class is not None:
        processing_class.save_pretrained(output_dir)
    if card.get("recipe"):
        (output_dir / RECIPE_FILE).write_text(_without_folders(card["recipe"]), encoding="utf-8")
    write_model_card(output_dir, model, repo_id=repo_id, merged=True, scale=scale, **card)
    return output_dir


def _copy_code(auto_map: Mapping[str, str], base: str | None, folder: Path) -> dict[str, str]:
    """Return the `auto_map` of a merged model, under which other programs find the base model's own code.

    The entries of a base model name Python files next to its `config.json`. A merged model refers to the base model's
    repository (`org/name--file.Class`), or gets copies of the files. They are never run here.
    """
    if _is_hub_name(base):
        return {key: name if "--" in name else f"{base}--{name}" for key, name in auto_map.items()}
    files = {path.name: path for path in Path(base or "?").glob("*.py")}
    found = {key: name for key, name in auto_map.items() if "--" in name or f"{name.split('.')[0]}.py" in files}
    if len(found) < len(auto_map):
        logger.warning(
            "The merged model has no `auto_map`, because the base model's own code was not found next to it. To load the "
            "model without this package, merge with `standalone=True`."
        )
    for file in files.values() if found else ():
        shutil.copy2(file, folder)
    return found


def push_merged_to_hub(
    folder: str | Path, repo_id: str, *, token: str | None = None, private: bool | None = None
) -> str:
    """Upload a merged model to the Hub.

    Args:
        folder: Folder that `merge_and_save` wrote. It is kept if the push fails.
        repo_id: `user/name` of the repository, which is created if it does not exist.
        token: Hub token. Default: the token of the logged-in user.
        private: Whether a new repository is private. Default: the Hub's setting.

    Returns:
        The address of the repository.

    Raises:
        UserError: If the folder does not hold a merged model, or the push fails.
    """
    folder = Path(folder)
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"`folder` must hold a merged model, got {folder}. Call `merge_and_save` first.")
    with explain_push_errors(repo_id, f"The merged model is saved in {folder}", token):
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        card = folder / _CARD
        if card.is_file():
            text = card.read_text(encoding="utf-8").replace('("."', f'("{repo_id}"')
            card.write_text(re.sub(r"^# .*", f"# {repo_id}", text, count=1, flags=re.MULTILINE), encoding="utf-8")
        commit = api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Upload merged model")
    return str(commit.repo_url)


@contextmanager
def explain_push_errors(repo_id: str, saved: str, token: str | None = None) -> Iterator[None]:
    """Turn an error of a push inside the block into one sentence without tokens.

    Args:
        repo_id: Name of the repository.
        saved: Clause that says where the model is saved.
        token: Hub token that the error must not show.
    """
    try:
        yield
    except Exception as error:  # the Hub's client raises the errors of several libraries
        reason = _first_line(error).replace(token or "\0", "***")
        raise UserError(
            f"The push to {repo_id} failed ({type(error).__name__}: {hide_secrets(reason)}). {saved}. Log in with "
            "`hf auth login` or set HF_TOKEN, and push again."
        ) from None


# Model cards

_CARD = "README.md"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def write_model_card(
    folder: str | Path,
    model: PeftModel,
    *,
    repo_id: str | None = None,
    dataset: str | None = None,
    recipe: str | None = None,
    results: Iterable[Mapping[str, Any]] = (),
    merged: bool = False,
    scale: float = 1.0,
) -> Path:
    """Write the model card of an adapter or of a merged model.

    Args:
        folder: Folder of the card. The folder of a merged model already holds the model.
        model: Model with the adapter.
        repo_id: `user/name` on the Hub, from which the card's code loads the model. Default: the card's folder.
        dataset: Name of the training data.
        recipe: YAML text of the training settings.
        results: Rows of `results.jsonl`. The card shows the scores at unit gates next to the base model's scores.
        merged: Whether the folder holds a merged model.
        scale: Factor of the update in a merged model.
    """
    folder = Path(folder)
    adapter, looped = model.active_adapters[0], find_looped_model(model)
    lora, num_loops = model.peft_config[adapter], looped.num_loops
    metadata, base = getattr(looped, "trained_with", {}), _base_name(model)
    rule, depths = metadata.get("rule"), metadata.get("depths") or [num_loops]
    is_quantized = getattr(looped.config, "quantization_config", None) is not None
    on_hub, license_fields = _is_hub_name(base), _license_of(base)
    facts = {
        "Base model": base if on_hub else base and Path(base).name,
        "License of the base model": license_fields.get("license"),
        "Training rule": getattr(RULES.get(rule), "title", rule),
        "Drop probability p": metadata.get("p"),
        "LoRA rank / alpha": f"{lora.r} / {lora.lora_alpha}",
        "Factor of the merged update": None if scale == 1 else scale,
        "Base weights in training": "4-bit, here dequantized" if is_quantized and merged else None,
        "Recurrence depth K": num_loops,
        "Depths in training": " to ".join(map(str, depths)) if depths[0] != depths[-1] else None,
        "Training data": dataset,
    }
    card = ModelCard.from_template(
        ModelCardData(
            library_name="transformers" if merged else "peft",
            pipeline_tag="text-generation",
            base_model=base if on_hub else None,
            tags=["looped-language-model", "lora", "loop-dropout"],
            **license_fields,
        ),
        template_path=str(Path(__file__).with_name("model_card.jinja")),
        title=repo_id or folder.resolve().name,
        name=repo_id if repo_id and _HUB_NAME.fullmatch(repo_id) else ".",
        facts={name: value for name, value in facts.items() if value is not None},
        scores=_scores(results) if scale == 1 else [],
        recipe=recipe and _without_folders(recipe),
        merged=merged,
        shared=not kind_of(model, adapter).one_depth,
        **(_loading_facts(folder) if merged else {}),
    )
    card.save(folder / _CARD)
    return folder / _CARD


def read_card_fields(folder: str | Path) -> dict[str, Any]:
    """Return the arguments `dataset`, `recipe` and `results` of `write_model_card` from the folder of a run."""
    folder = Path(folder)
    recipe = read_recipe(folder)
    names = [str(recipe[name]) for name in ("preparation", "dataset_name") if recipe.get(name)]
    return {
        "dataset": " ".join(names) or None,
        "recipe": (folder / RECIPE_FILE).read_text(encoding="utf-8") if recipe else None,
        "results": [row for row in read_results(folder) if row["folder"] == str(folder)],
    }


def find_adapter(adapter: str, method: str) -> tuple[Path, dict[str, Any]]:
    """Return the folder of an adapter, and the columns `method`, `adapter`, `seed` and `step` of its results.

    Args:
        adapter: Folder or Hub name.
        method: Name of an adapter without results of its training.
    """
    folder = adapter_folder(adapter)
    columns = {"method": method, "adapter": adapter, "seed": None, "step": None}
    for row in read_card_fields(folder)["results"]:
        if row["task"] == "training":
            columns |= {name: row[name] for name in ("method", "seed", "step")}
    return folder, columns


def _scores(results: Iterable[Mapping[str, Any]]) -> list[tuple]:
    """Return (task, depth, score, n, score of the base model) for each task and depth evaluated at unit gates."""
    tasks = [row for row in results if row["metric"] == "accuracy"]
    of_base = [row for row in tasks if row["gates"] == "none" and "model" not in row]
    base = {(row["task"], row["num_loops"]): row["value"] for row in of_base}
    adapted = [row for row in tasks if row["gates"] == "unit"]
    keys = ("task", "num_loops", "value", "n")
    return [(*(row[key] for key in keys), base.get((row["task"], row["num_loops"]))) for row in adapted]


def _loading_facts(folder: Path) -> dict[str, Any]:
    """Return how the files of a merged model can be loaded."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config_class = CONFIG_MAPPING[config["model_type"]] if config["model_type"] in CONFIG_MAPPING else None  # noqa: SIM401
    return {
        "model_type": config["model_type"],
        "has_tokenizer": (folder / "tokenizer_config.json").is_file(),
        "has_code": "AutoModelForCausalLM" in config.get("auto_map", {}),
        "is_standalone": (folder / "looped.py").is_file(),
        "in_transformers": getattr(config_class, "__module__", "").startswith("transformers."),
    }


def _base_name(model: PeftModel) -> str | None:
    """Return the Hub name or folder of the model that an adapter was trained on."""
    config = model.peft_config[model.active_adapters[0]]
    return config.base_model_name_or_path or find_looped_model(model).config.name_or_path or None


def _is_hub_name(name: str | None) -> bool:
    return name is not None and bool(_HUB_NAME.fullmatch(name)) and not Path(name).exists()


@functools.cache
def _license_of(base: str | None) -> dict[str, str]:
    """Return the license fields of a base model's own card, if the card can be read."""
    try:
        data = ModelCard.load(base if _is_hub_name(base) else Path(base or "?", _CARD)).data.to_dict()
    except Exception:  # no card, or no network: the new card does without the license
        return {}
    return {name: str(data[name]) for name in ("license", "license_name", "license_link") if data.get(name)}


def _without_folders(text: str) -> str:
    """Shorten absolute paths to their last part."""
    return re.sub(r"(?<![\w.:/~-])~?/(?:[\w.@ +-]+/)+(?=[\w.@+-])", "", text)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
