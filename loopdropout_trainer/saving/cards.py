"""Model cards of adapters and merged models."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from peft import PeftModel
from transformers import CONFIG_MAPPING, PreTrainedConfig

from loopdropout_trainer.data.sources import describe_data, read_sources
from loopdropout_trainer.errors import UserError, closest_match, count, short_repr
from loopdropout_trainer.files import checkpoint_step, is_checkpoint, public_name, read_text
from loopdropout_trainer.gates import RULES
from loopdropout_trainer.hub import is_hub_name
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.lora import kind_of
from loopdropout_trainer.results.problems import find_comparable
from loopdropout_trainer.results.run_files import (
    is_of_base,
    is_of_training,
    read_recipe,
    read_run_results,
    read_trained_shares,
    read_version,
    recipe_path,
    weights_of,
)
from loopdropout_trainer.results.sweep_folder import folder_of_run
from loopdropout_trainer.results.sweep_scores import unit_of_objective
from loopdropout_trainer.saving.checkpoints import (
    STATE_FILE,
    describe_score,
    describe_steps,
    describe_unsaved_best,
    load_state,
)
from loopdropout_trainer.saving.trainings import describe_own_loop, is_untrained


CARD_FILE = "README.md"


@dataclass(frozen=True)
class CardFields:
    """Fields of a model card that the model with its adapter does not tell.

    Attributes:
        title: Title of the card. Default: `repo_id`, or the name of the folder.
        tags: Further tags of the card.
        repo_id: `user/name` on the Hub, from which the card's code loads the model. Default: the card's folder.
        revision: Branch of the repository.
        dataset: Name of the training data, or names, of which the ones on the Hub become links.
        data_description: Text about the training data. Default: the names.
        recipe: YAML text of the training settings.
        program: Version of this package in the training, with its commit.
        results: Rows of `results.jsonl`. The card shows the held-out loss, and the scores at unit gates next to the base
            model's scores.
        kept_checkpoint: Text about the best checkpoint, if its weights were kept.
    """

    title: str | None = None
    tags: str | Iterable[str] = ()
    repo_id: str | None = None
    revision: str | None = None
    dataset: str | Sequence[str] | None = None
    data_description: str | None = None
    recipe: str | None = None
    program: str | None = None
    results: Sequence[Mapping[str, Any]] = ()
    kept_checkpoint: str | None = None

    @property
    def dataset_names(self) -> list[str]:
        """Names of the training data."""
        return _as_list(self.dataset)


def make_card_fields(card: Any) -> CardFields:
    """Return the fields of a card from a mapping of them. Raise UserError for anything else."""
    if isinstance(card, CardFields):
        return card
    if not isinstance(card, Mapping):
        raise UserError(f"`card` must be a mapping, or from `read_card_fields`, got {short_repr(card)}.")
    names = [field.name for field in dataclasses.fields(CardFields)]
    for name in card:
        if name not in names:
            hint = closest_match(name, names)
            raise UserError(f"`card` must have fields of `CardFields`, such as `dataset`, got {name!r}.{hint}")
    return CardFields(**card)


def write_model_card(
    folder: str | Path, model: PeftModel, fields: CardFields | None = None, *, merged_scale: float | None = None
) -> Path:
    """Write the model card of an adapter or of a merged model.

    Args:
        folder: Folder of the card. The folder of a merged model already holds the model.
        model: Model with the adapter.
        fields: Title, repository and training on the card. Default: none are known.
        merged_scale: Factor of the update in a merged model, or None for the card of an adapter.
    """
    folder, fields = Path(folder), fields or CardFields()
    is_merged = merged_scale is not None
    scores = []
    if merged_scale in (None, 1):  # the results are those of the update as it was trained
        scores = _scores(fields.results)
    values = {
        "title": fields.title or fields.repo_id or name_folder(folder.resolve()),
        "facts": _describe_training(model, fields, merged_scale),
        "scores": scores,
        "recipe": fields.recipe and without_folders(fields.recipe),
        "merged": is_merged,
        "untrained": is_untrained(model),
        "shared": not kind_of(model, model.active_adapters[0]).one_depth,
    }
    if is_merged:
        values |= _loading_facts(folder)
    template = str(Path(__file__).with_name("model_card.jinja"))
    card = ModelCard.from_template(_make_metadata(model, fields, is_merged), template_path=template, **values)
    if is_hub_name(fields.repo_id):
        card.text = _name_repository(card.text, fields.repo_id, fields.revision, keeps_title=fields.title is not None)
    card.save(folder / CARD_FILE)
    return folder / CARD_FILE


def _make_metadata(model: PeftModel, fields: CardFields, is_merged: bool) -> ModelCardData:
    """Return the metadata of a card, which the Hub reads."""
    base = base_name(model)
    tags = ["looped-language-model", "lora", "loop-dropout"]
    objective = _training_settings(model).get("objective")
    if objective is not None:
        tags.append(objective.lower())  # as in TRL's cards
    tags += _as_list(fields.tags)
    return ModelCardData(
        library_name="transformers" if is_merged else "peft",
        pipeline_tag="text-generation",
        base_model=base if is_hub_name(base) else None,
        datasets=[name for name in fields.dataset_names if is_hub_name(name)] or None,
        tags=[*dict.fromkeys(tags)],
        **_license_of(base),
    )


def _describe_training(model: PeftModel, fields: CardFields, merged_scale: float | None) -> dict[str, Any]:
    """Return the known facts about an adapter and its training, by their names in the table of the card."""
    looped, settings = find_looped_model(model), _training_settings(model)
    adapter = model.active_adapters[0]
    lora, trained_loops = model.peft_config[adapter], settings.get("num_loops", looped.num_loops)
    # An adapter is loaded at its depth of training, and a merged model at the depth that its configuration has got now.
    num_loops = trained_loops if merged_scale is None else looped.num_loops
    rule, depths = settings.get("rule"), settings.get("depths") or [trained_loops]
    is_quantized = getattr(looped.config, "quantization_config", None) is not None
    is_dequantized = is_quantized and merged_scale is not None
    is_scaled = merged_scale not in (None, 1)
    loss = f"Held-out loss ({unit_of_objective(settings.get('objective'))})"
    public_names = ", ".join(str(name_on_cards(name)) for name in fields.dataset_names)
    is_in_subfolder = merged_scale is None and adapter != "default"
    facts = {
        "Subfolder of the adapter": f"`{adapter}`" if is_in_subfolder else None,
        "Base model": public_base_name(model),
        "Commit of the base model": getattr(looped, "base_revision", None),
        "License of the base model": _license_of(base_name(model)).get("license"),
        "Training objective": settings.get("objective"),
        "Training rule": getattr(RULES.get(rule), "title", rule),
        "Drop probability p": settings.get("p"),
        "Gates of another training loop": describe_own_loop(settings),
        "Trained from the adapter": name_on_cards(settings.get("initial_adapter")),
        "Trained before": "; ".join(settings.get("earlier_trainings") or ()) or None,
        "LoRA rank / alpha": f"{lora.r} / {lora.lora_alpha}",
        "Factor of the merged update": merged_scale if is_scaled else None,
        "Base weights in training": "4-bit, here dequantized" if is_dequantized else None,
        "Recurrence depth K": num_loops,
        "Depths in training": None if {*depths} == {num_loops} else " to ".join(map(str, dict.fromkeys(depths))),
        "Version of loopdropout-trainer": fields.program,
        "Training data": fields.data_description or public_names or settings.get("training_data"),
        "Training": _describe_end(model),
        "Kept weights": fields.kept_checkpoint,
        # A scaled update has another loss than the trained one.
        loss: None if is_scaled else _held_out_loss(fields.results, False, num_loops),
        f"{loss}, base model": _held_out_loss(fields.results, True, num_loops),
    }
    return {name: value for name, value in facts.items() if value is not None}


def _describe_end(model: PeftModel) -> str | None:
    """Return that no training has changed an adapter, or where its training was stopped, or None after a whole training."""
    if is_untrained(model):
        return "none"
    stopped = _training_settings(model).get("stopped")
    return f"stopped {stopped}" if stopped else None


def _training_settings(model: PeftModel) -> dict[str, Any]:
    """Return the saved settings of an adapter's training, or none for another adapter."""
    return getattr(find_looped_model(model), "trained_with", {})


def _as_list(texts: str | Iterable[str] | None) -> list[str]:
    """Return a list of one text, of several texts, or of none."""
    if texts is None:
        return []
    if isinstance(texts, str):
        return [texts]
    return [*texts]


def name_folder(folder: Path) -> str:
    """Return the name of a folder, and of the run of a sweep the path in the sweep, such as "mine/lora/lr_0.001/seed_1"."""
    sweep = folder_of_run(folder)
    return folder.name if sweep is None else str(folder.relative_to(sweep.parent))


def read_card_fields(folder: str | Path, weights: Mapping[str, Any] | None = None) -> CardFields:
    """Return the fields of a card about the training in a folder: its data, recipe, results and best checkpoint.

    Args:
        folder: Folder of a run or of a checkpoint.
        weights: Argument of `read_run_results`.
    """
    folder = Path(folder)
    recipe, run_folder = read_recipe(folder), recipe_path(folder).parent
    return CardFields(
        dataset=[source.path for source in read_sources(recipe) if not source.files],
        data_description=describe_data(recipe, True, read_trained_shares(run_folder)) or None,
        recipe=read_text(recipe_path(folder)) if recipe else None,
        program=read_version(run_folder),
        results=read_run_results(folder, weights),
        kept_checkpoint=describe_kept_checkpoint(folder),
    )


def read_card_of(model: PeftModel) -> CardFields:
    """Return the fields of a card about the training of the adapter on a model, which are empty without its results."""
    settings, folder = _training_settings(model), getattr(find_looped_model(model), "run_folder", None)
    if folder is None or not Path(folder).is_dir():
        return CardFields()
    fields = read_card_fields(folder)
    trainings = [weights_of(row) for row in fields.results if is_of_training(row)]
    own_training = (settings.get("training_id"), settings.get("step"))
    if own_training not in trainings:  # a later training in the folder has replaced the results
        return CardFields()
    return fields


def describe_kept_checkpoint(folder: str | Path) -> str | None:
    """Return the kept checkpoint of a run, its score and the trained steps, or None for a run that keeps the last weights.

    A better step that no checkpoint has is named, too, also if the last weights are kept because of it. A checkpoint of such
    a run has its own weights, so there is none, either.
    """
    recipe = read_recipe(folder)
    keeps_best = recipe.get("load_best_model_at_end") or recipe.get("early_stopping_patience")
    if not keeps_best or is_checkpoint(Path(folder).resolve()) or not Path(folder, STATE_FILE).is_file():
        return None
    state, metric = load_state(folder), recipe.get("metric_for_best_model")
    unsaved = describe_unsaved_best(state, metric)
    if state.best_model_checkpoint is not None:
        step = checkpoint_step(state.best_model_checkpoint)
        kept = f"checkpoint-{step}{describe_score(state, step, metric)}, trained {describe_steps(state)}"
    elif unsaved:
        kept = f"the last step, {state.global_step:,}{describe_score(state, state.global_step, metric)}"
    else:
        return None
    return f"{kept}. {unsaved}".removesuffix(". ")


def _scores(results: Iterable[Mapping[str, Any]]) -> list[tuple]:
    """Return (task, depth, score, n, score of the base model) for each task and depth evaluated at unit gates.

    Of several results of `evaluate` with other limits, it is the one on most problems.
    """
    accuracies = [row for row in results if row["metric"] == "accuracy"]
    of_base = [row for row in accuracies if is_of_base(row)]
    by_place: dict[tuple, dict[str, Any]] = {}
    for row in accuracies:
        if row["gates"] == "unit":
            place = row["task"], row["num_loops"]
            by_place[place] = max(by_place.get(place, row), row, key=itemgetter("n"))
    scores = []
    for place, row in by_place.items():
        other = find_comparable(row, of_base)
        base_score = None if other is None else other["value"]
        scores.append((*place, row["value"], row["n"], base_score))
    return scores


def _held_out_loss(results: Iterable[Mapping[str, Any]], of_base: bool, num_loops: int) -> str | None:
    """Return the loss of the held-out examples at the end with their number, of the adapter or of the base model.

    A loss at another depth than `num_loops`, the one of the card, has its depth.
    """
    losses = [row for row in results if row["metric"] == "eval_loss" and is_of_base(row) == of_base]
    if not losses:
        return None
    loss, remarks = losses[-1], []
    if loss.get("n") is not None:  # else of a stream, or a result of an earlier version
        remarks.append(count(loss["n"], "example"))
    if loss.get("num_loops", num_loops) != num_loops:
        remarks.append(f"at K = {loss['num_loops']}")
    text = f"{loss['value']:.4f}"
    return f"{text} ({', '.join(remarks)})" if remarks else text


def name_repository(folder: str | Path, repo_id: str, revision: str | None = None) -> bool:
    """Name a repository in the title and the commands of a card that was written for a folder.

    Args:
        folder: Folder of the card.
        repo_id: `user/name` on the Hub.
        revision: Branch of the repository. Default: `main`.

    Returns:
        Whether the card names the repository now.
    """
    file = Path(folder, CARD_FILE)
    if not file.is_file():
        return True
    text = read_text(file)
    named = _name_repository(text, repo_id, revision)
    if named != text:
        file.write_text(named, encoding="utf-8")
    return repo_id in _RECIPE.sub("", named)


_COMMANDS = re.compile(r"(?ms)^```(?:python|bash)\n.*?^```$")
"""Blocks of a card with commands."""

_RECIPE = re.compile(r"(?ms)^```yaml\n.*?^```$")
"""Block of a card with the recipe, which names the repository of its own pushes in `hub_model_id`."""


def _is_in_commands(repo_id: str, text: str) -> bool:
    return any(repo_id in block for block in _COMMANDS.findall(text))


def _name_repository(text: str, repo_id: str, revision: str | None, keeps_title: bool = False) -> str:
    """Return the text of a card with a repository in its commands, if it has commands, and by default in its title."""
    name = lambda block: _name_in_commands(block[0], repo_id, revision)
    named = _COMMANDS.sub(name, text)
    is_new = _is_in_commands(repo_id, named) and not _is_in_commands(repo_id, text)
    if is_new and not keeps_title:
        named = re.sub(r"(?m)^# .*$", f"# {repo_id}", named, count=1)
    return named


def _name_in_commands(block: str, repo_id: str, revision: str | None) -> str:
    """Return a block of code with a repository in place of the folder `.`, or of the repository of an earlier push.

    The main branch is written `user/name` everywhere, and another branch as each program reads it:

        AutoTokenizer.from_pretrained("user/name", revision="branch")
        vllm serve user/name --revision branch
        loopdropout chat user/name@branch
        hf download user/name --revision branch --local-dir model     # before the line of a program that reads no branches
        mlx_lm.generate --model model
    """
    # `.` or the repository, between a quote or space and a quote, space or end, as in `from_pretrained(".")`
    place = re.compile(rf"""(?<=["' ])(?:\.|{re.escape(repo_id)})(?=["'\s]|$)""")
    lines = []
    for line in _without_branch(block, repo_id).splitlines():
        named = place.sub(repo_id, line)
        # A user may have written a line with a branch that `_without_branch` does not know, such as a variable.
        if not place.search(line) or "revision" in line:
            lines.append(line)
        elif revision is None:  # the program of llama.cpp reads a repository only after `--remote`
            lines.append(
                named.replace(f"convert_hf_to_gguf.py {repo_id}", f"convert_hf_to_gguf.py --remote {repo_id}")
            )
        elif "from_pretrained(" in line:
            lines.append(named.replace(f'"{repo_id}"', f'"{repo_id}", revision="{revision}"'))
        elif line.startswith("vllm "):
            lines.append(f"{named} --revision {revision}")
        elif line.startswith(("loopdropout ", "model = load_model(")):
            lines.append(place.sub(f"{repo_id}@{revision}", line))
        else:
            lines.append(f"hf download {repo_id} --revision {revision} --local-dir model")
            lines.append(place.sub("model", line).replace("--remote ", ""))
    return "\n".join(lines)


def _without_branch(block: str, repo_id: str) -> str:
    """Return a block of code without the branch of the repository that an earlier push has named in it."""
    name = re.escape(repo_id)
    block = re.sub(rf'("{name}"), revision="[^"]*"', r"\1", block)
    block = re.sub(rf"""{name}@[^\s"']+""", repo_id, block)
    block = re.sub(rf"(?m)^(vllm .*{name}.*) --revision \S+$", r"\1", block)
    download = rf"^hf download {name} --revision \S+ --local-dir model\n"
    return re.sub(rf"(?m){download}(.* )model ", rf"\g<1>{repo_id} ", block)


def _loading_facts(folder: Path) -> dict[str, Any]:
    """Return how the files of a merged model can be loaded."""
    config, _ = PreTrainedConfig.get_config_dict(folder)
    model_type = config["model_type"]
    in_transformers = False
    if model_type in CONFIG_MAPPING:  # which has the families of this package, too
        in_transformers = CONFIG_MAPPING[model_type].__module__.startswith("transformers.")
    return {
        "model_type": model_type,
        "has_tokenizer": (folder / "tokenizer_config.json").is_file(),
        "has_code": "AutoModelForCausalLM" in config.get("auto_map", {}),
        "is_standalone": (folder / "looped.py").is_file(),
        "in_transformers": in_transformers,
    }


def base_name(model: PeftModel) -> str | None:
    """Return the Hub name or folder of the model that an adapter was trained on."""
    config = model.peft_config[model.active_adapters[0]]
    return config.base_model_name_or_path or find_looped_model(model).config.name_or_path or None


def public_base_name(model: PeftModel) -> str | None:
    """Return the name of the model that an adapter was trained on, without the folders of this computer."""
    return name_on_cards(base_name(model))


def name_on_cards(name: str | None) -> str | None:
    """Return the name of a model, an adapter or a dataset without the folders of this computer."""
    if name is None or is_hub_name(name):
        return name
    return Path(public_name(name)).name


@functools.cache
def _license_of(base: str | None) -> dict[str, str]:
    """Return the license fields of a base model's own card, if the card can be read."""
    try:
        data = ModelCard.load(base if is_hub_name(base) else Path(base or "?", CARD_FILE)).data.to_dict()
    except Exception:  # no card, or no network: the new card does without the license
        return {}
    return {name: str(data[name]) for name in ("license", "license_name", "license_link") if data.get(name)}


def without_folders(text: str) -> str:
    """Shorten absolute paths to their last part."""
    return re.sub(r"(?<![\w.:/~-])~?/(?:[\w.@ +-]+/)+(?=[\w.@+-])", "", text)
