"""Model cards of adapters and of merged models: what was trained on what, and how to load it.

What a card quotes (a recipe, results, names) may come from a stranger's file: it is escaped, so that no Markdown or HTML
of theirs takes effect.
"""

from __future__ import annotations

import functools
import html
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Environment
from peft import PeftModel

from loopdropout_trainer.looped import find_looped_model


def is_hub_name(name: str | None) -> bool:
    """Say whether a model's name is one on the Hub (`user/model`), and no folder of this machine."""
    return name is not None and bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name)) and not Path(name).exists()


class CardScore(NamedTuple):
    """A model's score on a benchmark, the number n of problems, and the base model's own score."""

    score: float
    num_problems: int | None = None
    base_score: float | None = None


@dataclass
class ModelCardFields:
    """What a model card states about the run behind a model; unknown facts are left out of the card."""

    base_model: str | None = None  # hub name or path of the model that was fine-tuned
    rule: str | None = None
    p: float | list[float] | None = None
    rank: int | None = None
    alpha: int | None = None
    num_loops: int | None = None  # recurrence depth K
    depths: Sequence[int] | None = None  # least and greatest depth of a training step
    loop_loss: str | None = None  # which loops the training loss scored
    recipe: str | None = None  # YAML text of the run's settings
    data: str | None = None  # name of the training data
    results: dict[str, CardScore] = field(default_factory=dict)  # by benchmark


def card_fields(model: PeftModel, given: ModelCardFields | None = None) -> ModelCardFields:
    """Return `given` with what `model` itself tells filled in: base, depth, adapter, and the rule that trained it."""
    adapter = model.active_adapters[0]
    lora, looped = model.peft_config[adapter], find_looped_model(model)
    facts = ModelCardFields(
        base_model=lora.base_model_name_or_path or looped.config.name_or_path or None,
        rank=lora.r,
        alpha=lora.lora_alpha,
        num_loops=looped.config.num_loops,
        **{key: looped.trained_with.get(key) for key in ("rule", "p", "depths", "loop_loss")},
    )
    return replace(facts, **{key: value for key, value in vars(given or facts).items() if value is not None})


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
    model: PeftModel, folder: str | Path, name: str | None = None, given: ModelCardFields | None = None,
    merged: bool = False, has_code: bool = False,
) -> None:  # fmt: skip
    """Write the card of an adapter or a merged model, over the one of PEFT or TRL, which knows neither base nor rule.

    Args:
        model: with the adapter.
        folder: that the card lies in.
        name: hub name or folder that the card's code loads; default: `folder`.
        given: beside what `model` itself tells.
        merged, has_code: whether it is of a merged model, and one that finds its base's own code.
    """
    fields, config = card_fields(model, given), find_looped_model(model).config
    base, license_fields = fields.base_model, _license_of(fields.base_model)
    on_hub = is_hub_name(base)
    metadata = ModelCardData(
        library_name="transformers" if merged else "peft",
        pipeline_tag="text-generation",
        base_model=base if on_hub else None,
        **license_fields,
        tags=["looped-language-model", "lora", "loop-dropout"],
    )
    depths = list(map(str, dict.fromkeys(fields.depths or [fields.num_loops])))
    facts = {
        "Base model": base if base is None or on_hub else Path(base).name,
        "License of the base": license_fields.get("license"),
        "Training rule": "Loop Dropout" if fields.rule == "loop_dropout" else fields.rule,
        "Drop probability p": fields.p,
        "LoRA rank / alpha": None if fields.rank is None else f"{fields.rank} / {fields.alpha}",
        "Recurrence depth K": fields.num_loops,
        "Trained at depths": None if depths == [str(fields.num_loops)] else " to ".join(depths),
        "Loops in the loss": None if fields.loop_loss == "final" else fields.loop_loss,
        "Training data": fields.data,
    }
    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)  # noqa: S701 (see _text)
    environment.filters |= {"text": _text, "shell_word": lambda name: shlex.quote(" ".join(name.split()))}
    template = environment.from_string(Path(__file__).with_name("card.jinja").read_text(encoding="utf-8"))
    text = template.render(
        metadata=metadata.to_yaml(),
        fields=fields,
        facts=facts,
        name=name or str(folder),
        config=config,
        merged=merged,
        has_code=has_code,
        in_transformers=type(config).__module__.startswith("transformers."),
        local_base=base is not None and not on_hub,
    )
    ModelCard(text, ignore_metadata_errors=True).save(Path(folder) / "README.md")


def _text(value: Any) -> str:
    """Return a value as text of a heading or a table's cell, with nothing in it that Markdown or HTML would act on."""
    text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    text = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*\[\]|!~])", r"\\\1", text)
