"""Model cards of adapters and of merged models: what was trained on what, and how to load it.

What a card quotes (a recipe, results, names) may come from a stranger's file: it is escaped, so that no Markdown or HTML
of theirs takes effect.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import ModelCard, ModelCardData
from peft import PeftModel
from transformers import PreTrainedConfig

from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.saving.hub_code import is_hub_name


class CardScore(NamedTuple):
    """A model's score on a benchmark, the number n of problems, and the base model's own score."""

    score: float
    num_problems: int | None = None
    base_score: float | None = None


@dataclass
class ModelCardFields:
    """What a model card states about the run behind a model; unknown facts are left out of the card.

    Attributes:
        base_model: hub name or path of the model that was fine-tuned; license: the base's, as its own card names it.
        rule, p: gate rule and drop probability; rank, alpha: of the adapter; num_loops: recurrence depth K.
        depths: least and greatest depth of a training step; loop_loss: which loops the training loss scored.
        recipe: YAML text of the run's settings.
        data: name of the training data.
        results: scores by benchmark.
    """

    base_model: str | None = None
    rule: str | None = None
    p: float | list[float] | None = None
    rank: int | None = None
    alpha: int | None = None
    num_loops: int | None = None
    depths: Sequence[int] | None = None
    loop_loss: str | None = None
    recipe: str | None = None
    data: str | None = None
    license: Mapping[str, str] | None = None
    results: dict[str, CardScore] = field(default_factory=dict)


def card_fields(model: PeftModel, given: ModelCardFields | None = None) -> ModelCardFields:
    """Return `given` with what `model` itself tells filled in: base, depth, adapter, and the rule that trained it."""
    adapter = model.active_adapters[0]
    lora, looped = model.peft_config[adapter], find_looped_model(model)
    base_model = lora.base_model_name_or_path or looped.config.name_or_path or None
    known = {
        **looped.trained_with,
        "base_model": base_model,
        "license": _license_of(base_model),
        "rank": lora.r,
        "alpha": lora.lora_alpha,
        "num_loops": looped.config.num_loops,
    }
    stated = {key: value for key, value in vars(given or ModelCardFields()).items() if value is not None}
    names = {f.name for f in dataclasses.fields(ModelCardFields)}
    return ModelCardFields(**{key: value for key, value in {**known, **stated}.items() if key in names})


@functools.cache
def _license_of(base_model: str | None) -> dict[str, str]:
    """Return the fields of a base's own card that name its license; none where there is no card, or none in reach."""
    if base_model is None or not (is_hub_name(base_model) or (Path(base_model) / "README.md").is_file()):
        return {}
    path = base_model if is_hub_name(base_model) else Path(base_model) / "README.md"
    try:
        data = ModelCard.load(path, ignore_metadata_errors=True).data.to_dict()
    except Exception:  # whatever the Hub's client or YAML raises: a card is no reason to stop
        return {}
    return {name: str(data[name]) for name in ("license", "license_name", "license_link") if data.get(name)}


def merged_card(fields: ModelCardFields, name: str, config: PreTrainedConfig) -> ModelCard:
    """Write the card of a merged model.

    Args:
        fields: of the run.
        name: hub name or folder that the card's code loads.
        config: of the merged model: it says which other programs read it.
    """
    loading = [
        "With this package, on transformers 5:\n\n```python\n"
        "import loopdropout_trainer  # registers the model family with transformers\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained({_string(name)}, dtype="auto")\n'
        f"tokenizer = AutoTokenizer.from_pretrained({_string(name)})\n```"
    ]
    if getattr(config, "auto_map", None):
        loading.append(
            "Without it, by the base model's own code, on the transformers release that this code was written for:\n\n"
            "```python\n"
            "from transformers import AutoModelForCausalLM\n\n"
            f"model = AutoModelForCausalLM.from_pretrained({_string(name)}, trust_remote_code=True)\n```"
        )
    elif type(config).__module__.startswith("transformers."):
        loading.append("Without it: transformers has the class itself, so that the first line may be left out.")
    else:
        loading.append("There is no code of the base model behind this checkpoint: it needs the package.")
    for program, command in getattr(config, "served_by", {}).items():
        loading.append(f"{program}:\n\n```bash\n{command.format(name=_word(name))}\n```")
    return _card(
        fields,
        name,
        "transformers",
        "A looped language model, fine-tuned with LoRA on its recurrent block and merged at unit gates: an ordinary "
        "checkpoint of its base model, without extra parameters or inference cost.",
        loading,
    )


def adapter_card(fields: ModelCardFields, name: str, config: PreTrainedConfig) -> ModelCard:
    """Write the card of an adapter; see `merged_card` for the arguments."""
    base, import_peft = _string(fields.base_model or "BASE_MODEL"), ""
    if fields.base_model is not None and not is_hub_name(fields.base_model):
        # The path of a local base stands in PEFT's file beside the weights; on the page it would help nobody.
        base, import_peft = (
            "PeftConfig.from_pretrained(folder).base_model_name_or_path",
            "from peft import PeftConfig\n",
        )
    loading = [
        "```python\n"
        "from loopdropout_trainer import load_adapter, merge_and_save\n"
        f"{import_peft}"
        "from transformers import AutoModelForCausalLM\n\n"
        f"folder = {_string(name)}\n"
        f"base = AutoModelForCausalLM.from_pretrained({base}, num_loops={config.num_loops})\n"
        "model = load_adapter(base, folder)\n"
        'merge_and_save(model, "merged")  # optional: an ordinary checkpoint of the base model\n```'
    ]
    return _card(
        fields,
        name,
        "peft",
        "A LoRA adapter on the recurrent block of a looped language model: one shared update that every loop applies. At "
        "inference all gates are one, so that it is ordinary LoRA under PEFT's names.",
        loading,
    )


def _card(fields: ModelCardFields, name: str, library: str, what: str, loading: list[str]) -> ModelCard:
    base = fields.base_model
    metadata = ModelCardData(
        library_name=library,
        pipeline_tag="text-generation",
        base_model=base if is_hub_name(base) else None,
        **fields.license or {},
        tags=["looped-language-model", "lora", "loop-dropout"],
    )
    rows = {
        "Base model": base if base is None or is_hub_name(base) else Path(base).name,
        "License of the base": (fields.license or {}).get("license"),
        "Training rule": "Loop Dropout" if fields.rule == "loop_dropout" else fields.rule,
        "Drop probability p": fields.p,
        "LoRA rank / alpha": None if fields.rank is None else f"{fields.rank} / {fields.alpha}",
        "Recurrence depth K": fields.num_loops,
        "Trained at depths": _depths(fields),
        "Loops in the loss": None if fields.loop_loss == "final" else fields.loop_loss,
        "Training data": fields.data,
    }
    parts = [f"---\n{metadata.to_yaml()}\n---", f"# {_text(name)}", what]
    parts.append(_table(["", ""], ((name, value) for name, value in rows.items() if value is not None)))
    if fields.results:
        scores = ((name, *score) for name, score in fields.results.items())
        parts.append(f"## Results\n\n{_table(['Benchmark', 'Score', 'n', 'Base model'], scores)}")
    parts.append("## Loading\n\n" + "\n\n".join(loading))
    if fields.recipe:
        parts.append(f"## Recipe\n\n{_fenced(fields.recipe, 'yaml')}")
    return ModelCard("\n\n".join(parts) + "\n", ignore_metadata_errors=True)


def _depths(fields: ModelCardFields) -> str | None:
    """Return the depths of training where they are not just the depth that the card states already."""
    if fields.depths is None or set(fields.depths) == {fields.num_loops}:
        return None
    return " to ".join(map(str, dict.fromkeys(fields.depths)))


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *([_text(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(value: Any) -> str:
    """Return a value as text of a heading or a table's cell, with nothing in it that Markdown or HTML would act on."""
    text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    text = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*\[\]|!~])", r"\\\1", text)


def _fenced(text: str, language: str) -> str:
    """Return a code block whose fence is longer than any in the text, so that none of it breaks out."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.strip()}\n{fence}"


def _string(name: str) -> str:
    """Return a Python string literal that stays inside its code block."""
    return json.dumps(name).replace("`", "\\u0060")


def _word(name: str) -> str:
    """Return one word of a shell command."""
    return name if re.fullmatch(r"[\w./-]+", name) else "MODEL"
