"""Trainings in words, and adapters that no training has changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from loopdropout_trainer.errors import UserError, count, join_command
from loopdropout_trainer.gates import RULES
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.saving.metadata import MERGED_FOLDER, read_metadata
from loopdropout_trainer.saving.source import find_source


if TYPE_CHECKING:
    from peft import PeftModel

logger = logging.get_logger(__name__)


def describe_training(settings: Mapping[str, Any]) -> str:
    """Return a training in words, from the settings that were saved with it.

    For example "SFT with Loop Dropout (p = 0.5, K = 4, 20 steps, learning rate 0.0001, seed 42) on 64 examples (digest ...)".
    """
    method, facts = describe_method(settings)
    # A training that an error ended before its first step or after its last one has no number of steps unless it was saved.
    facts.append("interrupted" if settings.get("step") is None else count(settings["step"], "step"))
    if settings.get("learning_rate") is not None:
        facts.append(f"learning rate {settings['learning_rate']:g}")
    if settings.get("seed") is not None:
        facts.append(f"seed {settings['seed']}")
    text = f"{method} ({', '.join(facts)})"
    if settings.get("training_data"):
        text = f"{text} on {settings['training_data']}"
    own_loop = describe_own_loop(settings)
    return text if own_loop is None else f"{text}, and then in another training loop with {own_loop}"


def describe_own_loop(settings: Mapping[str, Any]) -> str | None:
    """Return the gates of a training loop with `loop_dropout`, such as "Loop Dropout (p = 0.3)", or None without one."""
    own_loop = settings.get("own_loop")
    if own_loop is None:
        return None
    name = own_loop.get("rule")
    title, facts = describe_method({**own_loop, "method": getattr(RULES.get(name), "title", name)})
    return f"{title} ({', '.join(facts)})" if facts else title


def describe_method(settings: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return the objective with the method, such as "SFT with Loop Dropout", and its facts, such as "p = 0.5" and "K = 4"."""
    facts = [f"{name} = {settings[name]}" for name in ("p", "rule_args") if settings.get(name) is not None]
    if settings.get("num_loops") is not None:
        facts.append(f"K = {settings['num_loops']}")
    depths = settings.get("depths")
    if depths and depths[0] != depths[-1]:
        facts.append(f"depths from {depths[0]} to {depths[-1]} in training")
    method = settings.get("method") or settings.get("rule") or "a training"
    if settings.get("objective") is not None:
        method = f"{settings['objective']} with {method}"
    return method, facts


def has_no_update(model: PeftModel, adapter: str) -> bool:
    """Return whether the factors B of an adapter are all zero, as far as this process has them."""
    for name, parameter in model.named_parameters():
        is_factor = "lora_B" in name and adapter in name.split(".")
        if is_factor and bool(parameter.detach().any()):
            return False
    return True


def is_untrained(model: PeftModel) -> bool:
    """Return whether no training has changed the active adapter, so that its update is zero."""
    was_trained = getattr(find_looped_model(model), "trained_with", {}).get("training_id") is not None
    return not was_trained and has_no_update(model, model.active_adapters[0])


def warn_of_untrained(model: PeftModel, folder: str | Path, *, merges: bool) -> None:
    """Warn if an adapter that nobody has trained is merged, or replaces a trained one, or its merged model, in a folder.

    Args:
        model: Model with the adapter.
        folder: Folder of the adapter or of the merged model.
        merges: Whether `merge_and_save` writes the merged model there, and not `save_model` the adapter.
    """
    if merges and is_untrained(model):
        logger.warning(
            f"The merged model in {folder} is the base model, because no training has changed the adapter, whose update is "
            "zero. Train it first, or merge the model of the trainer that has trained."
        )
    if find_looped_model(model).trained_with.get("training_id") is not None:
        return
    try:
        source = find_source(folder)
    except UserError:  # a folder without a usable adapter or model
        return
    if source.metadata.get("training_id") is None:
        return
    article, function, kind = "an", "save_model", "adapter"
    if merges:
        article, function, kind = "a", "merge_and_save", "model"
    logger.warning(
        f"{folder} has {article} {source.kind} from {describe_training(source.metadata)}. `{function}` replaces it by one "
        f"that no `train()` has trained. To keep a trained {kind}, save into another folder."
    )


def describe_old_merge(folder: str | Path, *, is_command: bool) -> str:
    """Return a sentence if the merged model in the folder of an adapter is of an earlier step, else "".

    Args:
        folder: Folder of the adapter.
        is_command: Whether a command trains, and not a program or a notebook, which renews the merged model in Python.
    """
    merged = Path(folder, MERGED_FOLDER)
    try:
        model = read_metadata(merged)
        if model.get("step") is None:
            return ""
        adapter = find_source(folder, accept=("adapter",)).metadata
    except UserError:  # a damaged file, which the commands that read the model name
        return ""
    is_same_training = model.get("training_id") == adapter.get("training_id")
    if is_same_training and model["step"] == adapter.get("step"):
        return ""
    words = ["merge", folder]
    arguments = ["trainer.model", repr(str(merged))]
    if model.get("scale", 1) != 1:
        words += ["--scale", f"{model['scale']:g}"]
        arguments.append(f"scale={model['scale']:g}")
    if model.get("kind") == "standalone model":
        words += ["--standalone", "true"]
        arguments.append("standalone=True")
    of_step = f"step {model['step']:,}"
    if not is_same_training:
        of_step += " of another training"
    renewing = f"merge_and_save({', '.join(arguments)})"
    if is_command:
        renewing = join_command(*words)
    return f"{merged} holds the merged model of {of_step}. `{renewing}` renews it."
