"""Merge the adapter into the base model at unit gates, save the result with its card, and push it to the Hub.

At unit gates the adapter is ordinary LoRA, so that W + (alpha / r) B A is an ordinary checkpoint of the base model.
"""

from __future__ import annotations

import dataclasses
import html
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, ModelCard, ModelCardData
from peft import PeftModel
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraLayer
from transformers import PreTrainedTokenizerBase

from loopdropout_trainer.adapters import check_adapter, merged_update


class PushError(RuntimeError):
    """The Hub did not take the model; it is on disk all the same."""


@dataclass
class ModelCardFields:
    """What a model card states about the run behind a model; unknown facts are left out of the card.

    Attributes:
        base_model: hub name or path of the model that was fine-tuned.
        rule, p: gate rule and drop probability; rank, alpha: of the adapter; num_loops: recurrence depth K.
        recipe: YAML text of the run's settings.
        data: name of the training data.
        results: measured numbers by name.
    """

    base_model: str | None = None
    rule: str | None = None
    p: float | list[float] | None = None
    rank: int | None = None
    alpha: int | None = None
    num_loops: int | None = None
    recipe: str | None = None
    data: str | None = None
    results: dict[str, Any] = field(default_factory=dict)


@torch.no_grad()
def merged_state_dict(model: PeftModel) -> dict[str, torch.Tensor]:
    """Return the base model's state dict with the adapter added at unit gates; the model is left as it is.

    W + Delta is summed in float32 and rounded once to the base's dtype.

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
        elif any(
            f".lora_{part}." in f".{name}" for part in ("A", "B", "embedding_A", "embedding_B", "magnitude_vector")
        ):
            continue
        merged[f"{module_name}.{parameter}"] = tensor
    return merged


def _merged_weight(name: str, layer: LoraLayer, adapter: str, weight: torch.Tensor) -> torch.Tensor:
    if type(layer) is not LoraLinear or not weight.is_floating_point():
        raise ValueError(
            f"`{name}` is a {type(layer).__name__} over {weight.dtype} weights: load the base model unquantised, put the "
            "saved adapter on it with `PeftModel.from_pretrained`, and merge that."
        )
    delta = merged_update(layer, adapter)
    if weight.shape != delta.shape:
        raise ValueError(
            f"`{name}` holds {list(weight.shape)} of a {list(delta.shape)} weight: it is sharded over processes. Save the "
            "adapter, and merge it in one process."
        )
    return (weight.float() + delta.float()).to(weight.dtype)


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
        ValueError: if the adapter cannot be merged.
    """
    output_dir = Path(output_dir)
    weights = merged_state_dict(model)
    base = model.get_base_model()
    use_cache, base.config.use_cache = base.config.use_cache, True  # off for training only
    try:
        base.save_pretrained(output_dir, state_dict=weights)
    finally:
        base.config.use_cache = use_cache
    if tokenizer is not None:
        tokenizer.save_pretrained(output_dir)
    model_card(facts_of(model, facts), repo_id or output_dir.name).save(output_dir / "README.md")
    return output_dir


def facts_of(model: PeftModel, facts: ModelCardFields | None = None) -> ModelCardFields:
    """Return `facts` with what `model` itself tells filled in."""
    lora = model.peft_config[model.active_adapters[0]]
    config = model.get_base_model().config
    known = {
        "base_model": lora.base_model_name_or_path or config.name_or_path or None,
        "rank": lora.r,
        "alpha": lora.lora_alpha,
        "num_loops": config.num_loops,
    }
    given = {key: value for key, value in dataclasses.asdict(facts or ModelCardFields()).items() if value is not None}
    return ModelCardFields(**{**known, **given})


def push_merged_to_hub(
    folder: str | Path, repo_id: str, *, token: str | None = None, private: bool | None = None
) -> str:
    """Upload a folder written by `merge_and_save` to the Hub.

    Args:
        folder: of the merged model; it must hold the weights already, so that a refused push loses nothing.
        repo_id: `user/name`; created if it does not exist.
        token: default: the one of the logged-in user.
        private: of a newly created repository.

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
        return str(
            api.upload_folder(folder_path=folder, repo_id=repo_id, commit_message="Upload merged model").repo_url
        )
    except Exception as error:  # whatever the Hub's client raises, offline or refused: nothing may be lost here
        raise push_error(error, repo_id, f"The merged model is safe in {folder}", token) from None


def push_error(error: Exception, repo_id: str, safe: str, *tokens: str | None) -> PushError:
    """Say in one sentence, without any of the tokens, why the Hub did not take a model, and what is `safe`."""
    reason = " ".join(str(error).split())
    for token in filter(None, tokens):
        reason = reason.replace(token, "***")
    return PushError(
        f"The Hub did not take {repo_id!r} ({type(error).__name__}: {reason}). {safe}; log in with `hf auth login` or set "
        "HF_TOKEN, then push it again."
    )


def model_card(facts: ModelCardFields, name: str) -> ModelCard:
    """Write the card of a merged model."""
    is_hub_name = facts.base_model is not None and not Path(facts.base_model).is_absolute()
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=facts.base_model if is_hub_name else None,
        tags=["looped-language-model", "lora", "loop-dropout"],
    )
    method = "Loop Dropout" if facts.rule == "loop_dropout" else facts.rule
    rows = {
        "Base model": facts.base_model,
        "Training rule": method,
        "Drop probability p": facts.p,
        "LoRA rank / alpha": None if facts.rank is None else f"{facts.rank} / {facts.alpha}",
        "Recurrence depth K": facts.num_loops,
        "Training data": facts.data,
    }
    table = "\n".join(f"| {key} | {_cell(value)} |" for key, value in rows.items() if value is not None)
    parts = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {_text(name)}",
        "A looped language model, fine-tuned with LoRA on its recurrent block and merged at unit gates: an ordinary "
        "checkpoint of its base model, without extra parameters or inference cost.",
        f"| | |\n|---|---|\n{table}",
    ]
    if facts.results:
        results = "\n".join(f"| {_cell(key)} | {_cell(value)} |" for key, value in facts.results.items())
        parts.append(f"## Results\n\n| | |\n|---|---|\n{results}")
    parts.append(
        "## Loading\n\n```python\n"
        "import loopdropout_trainer  # registers the model family with transformers\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained({json.dumps(name)}, dtype="auto")\n'
        f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(name)})\n```"
    )
    if facts.recipe:
        parts.append(f"## Recipe\n\n{_fenced(facts.recipe.strip(), 'yaml')}")
    return ModelCard("\n\n".join(parts) + "\n", ignore_metadata_errors=True)


def _cell(value: Any) -> str:
    return _text(f"{value:.4g}" if isinstance(value, float) else str(value))


def _text(value: str) -> str:
    """Return text for a line of Markdown: no HTML, links, code or table cells of its own come out of it."""
    value = html.escape(" ".join(value.split()), quote=False)
    return re.sub(r"([\\`|\[\]])", r"\\\1", value)


def _fenced(text: str, language: str) -> str:
    """Return text as a block of code that no line of the text can close."""
    longest = max((len(ticks) for ticks in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
