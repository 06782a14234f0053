"""Model cards of adapters and of merged models: what was trained on what, and how to load it.

What a card quotes (a recipe, results, names) may come from a stranger's file: it is escaped, so that no Markdown or HTML
of theirs takes effect.
"""

from __future__ import annotations

import functools
import html
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Environment
from peft import PeftModel
from transformers import CONFIG_MAPPING

from loopdropout_trainer.lora import kind_of
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.saving.files import read_json


_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def is_hub_name(name: str | None) -> bool:
    """Say whether a model's name is one on the Hub (`user/model`), and no folder of this machine."""
    return name is not None and bool(_HUB_NAME.fullmatch(name)) and not Path(name).exists()


class CardScore(NamedTuple):
    """A model's score on a benchmark, the number n of problems, and the base model's own score."""

    score: float
    num_problems: int | None = None
    base_score: float | None = None


@dataclass
class ModelCardFields:
    """What a model card states of a run that the model does not tell by itself."""

    recipe: str | None = None  # YAML text of the run's settings
    data: str | None = None  # name of the training data
    results: dict[str, CardScore] = field(default_factory=dict)  # by benchmark


def base_of(model: PeftModel) -> str | None:
    """Return the Hub name or path of the model that an adapter was trained on, if it is known."""
    config = model.peft_config[model.active_adapters[0]]
    return config.base_model_name_or_path or find_looped_model(model).config.name_or_path or None


@functools.cache
def _license_of(base_model: str | None) -> dict[str, str]:
    """Return the fields of a base's own card that name its license; none where there is no card, or none in reach."""
    try:
        card = ModelCard.load(base_model if is_hub_name(base_model) else Path(base_model, "README.md"))
        data = card.data.to_dict()
    except Exception:  # whatever the Hub's client or YAML raises: a card is no reason to stop
        return {}
    return {name: str(data[name]) for name in ("license", "license_name", "license_link") if data.get(name)}


def save_card(
    model: PeftModel,
    folder: str | Path,
    repo_id: str | None = None,
    given: ModelCardFields | None = None,
    title: str | None = None,
    merged: bool = False,
) -> None:
    """Write the card of an adapter or a merged model, over the one of PEFT or TRL, which knows neither base nor rule.

    Args:
        model: with the adapter.
        folder: that the card lies in; of a merged model it holds all files already.
        repo_id: `user/model` that the card's code loads; without a user, or None, that code runs in the card's folder.
        given: beside what `model` itself tells.
        title: where there is no `repo_id`; default: the folder's name.
        merged: whether it is of a merged model.
    """
    fields = given or ModelCardFields()
    folder = Path(folder)
    adapter, looped = model.active_adapters[0], find_looped_model(model)
    lora, num_loops = model.peft_config[adapter], looped.config.num_loops
    trained = looped.trained_with
    base, rule = base_of(model), trained.get("rule")
    license_fields = _license_of(base)
    on_hub = is_hub_name(base)
    metadata = ModelCardData(
        library_name="transformers" if merged else "peft",
        pipeline_tag="text-generation",
        base_model=base if on_hub else None,
        **license_fields,
        tags=["looped-language-model", "lora", "loop-dropout"],
    )
    depths = list(map(str, dict.fromkeys(trained.get("depths") or [num_loops])))
    facts = {
        "Base model": base if base is None or on_hub else Path(base).name,
        "License of the base": license_fields.get("license"),
        "Training rule": "Loop Dropout" if rule == "loop_dropout" else rule,
        "Drop probability p": trained.get("p"),
        "LoRA rank / alpha": f"{lora.r} / {lora.lora_alpha}",
        "Recurrence depth K": num_loops,
        "Trained at depths": None if depths == [str(num_loops)] else " to ".join(depths),
        "Loops in the loss": None if trained.get("loop_loss") == "final" else trained.get("loop_loss"),
        "Training data": _without_folders(fields.data),
    }
    shared = not kind_of(model, adapter).one_depth
    text = _render(
        "card",
        metadata=metadata.to_yaml(),
        title=repo_id or title or folder.resolve().name,
        facts=facts,
        results=fields.results,
        recipe=_without_folders(fields.recipe),
        merged=merged,
        shared=shared,
        loading=merged_loading(folder, repo_id) if merged else _adapter_loading(base, num_loops, repo_id, shared),
    )
    ModelCard(text, ignore_metadata_errors=True).save(folder / "README.md")


def _adapter_loading(base: str | None, num_loops: int, repo_id: str | None, shared: bool) -> str:
    name = _name_to_load(repo_id)
    on_hub = is_hub_name(base)
    base_line = json.dumps(base) if on_hub else None
    if base is not None and Path(base).is_absolute():
        # Its path stands in PEFT's file beside the weights; on the page it would help nobody.
        base_line = f"PeftConfig.from_pretrained({json.dumps(name)}).base_model_name_or_path"
    return _render(
        "adapter_loading", name=name, base_line=base_line, on_hub=on_hub, num_loops=num_loops, shared=shared
    )


def merged_loading(folder: Path, repo_id: str | None) -> str:
    """Return the part of a merged model's card that says how to load it: only what its files make run.

    Args:
        folder: of the model.
        repo_id: as for `save_card`.
    """
    config = read_json(folder / "config.json")
    own_code = config.get("auto_map", {})
    model_type = config["model_type"]
    config_class = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401 (`get` does not load)
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    commands = getattr(config_class, "served_by", {}) if has_tokenizer else {}
    runs = lambda command: "AutoConfig" in own_code or "--trust-remote-code" not in command
    return _render(
        "merged_loading",
        name=_name_to_load(repo_id),
        has_tokenizer=has_tokenizer,
        has_code="AutoModelForCausalLM" in own_code,
        in_transformers=getattr(config_class, "__module__", "").startswith("transformers."),
        programs={program: command for program, command in commands.items() if runs(command)},
    )


def card_on_hub(folder: Path, repo_id: str) -> str:
    """Return the card of a merged model in a folder as it is to stand in a repository on the Hub, other changes kept."""
    card = (folder / "README.md").read_text(encoding="utf-8")
    card = card.replace(f"\n# {_text(folder.resolve().name)}\n", f"\n# {_text(repo_id)}\n", 1)
    return card.replace(merged_loading(folder, None).strip(), merged_loading(folder, repo_id).strip(), 1)


def _name_to_load(repo_id: str | None) -> str:
    return repo_id if repo_id is not None and _HUB_NAME.fullmatch(repo_id) else "."


def _render(template: str, **values: Any) -> str:
    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)  # noqa: S701 (see _text)
    environment.filters["text"] = _text
    text = Path(__file__).with_name(f"{template}.jinja").read_text(encoding="utf-8")
    return environment.from_string(text).render(**values)


def _without_folders(text: str | None) -> str | None:
    """Return a text in which absolute paths are the last of their names: the rest of them would help nobody."""
    return None if text is None else re.sub(r"(?<![\w.:/~-])~?/(?:[\w.@ +-]+/)+(?=[\w.@+-])", "", text)


def _text(value: Any) -> str:
    """Return a value as text of a heading or a table's cell, with nothing in it that Markdown or HTML would act on."""
    text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    text = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*\[\]|!~])", r"\\\1", text)
