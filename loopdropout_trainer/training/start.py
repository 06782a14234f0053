"""What a training starts from: a new adapter, a saved one, or weights trained before. Only this module decides it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers.utils import logging

from loopdropout_trainer.errors import count
from loopdropout_trainer.files import public_name
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.lora.compatibility import describe_high_rank, find_smallest_dimension
from loopdropout_trainer.saving.checkpoints import Checkpoint
from loopdropout_trainer.saving.source import find_source


logger = logging.get_logger(__name__)

START_FIELDS = ("initial_adapter", "earlier_trainings")
"""Settings of a training that say what it started from, as `find_start` returns them."""

_CHANGED_BASE = "after which the base model was changed, as by merging"
"""End of the text of an earlier training whose base model had other weights."""

_ZERO_INITS = (True, "gaussian", "eva")
"""Values of `init_lora_weights` with which the factor B of a new adapter is zero."""


def find_start(
    model: PeftModel, base_weights: str | None = None, checkpoint: Checkpoint | None = None
) -> dict[str, Any]:
    """Return the settings that say what a training starts from, which are saved with its adapter.

    Args:
        model: Model with the adapter that is trained.
        base_weights: Digest of the weights of its base model, from `digest_weights`.
        checkpoint: Checkpoint that the training continues from, or None.

    Returns:
        `initial_adapter`, the folder or Hub name of the saved adapter that the first training started from, and
        `earlier_trainings`, a text for each training whose weights this one starts from. A new adapter has neither.
    """
    looped = find_looped_model(model)
    before = looped.trained_with
    if checkpoint is not None:
        before = find_source(checkpoint).metadata
    kept = {name: before[name] for name in START_FIELDS if name in before}
    if checkpoint is not None:  # the training goes on from what it started from
        return kept
    was_trained = before.get("training_id") is not None
    trained_base = before.get("base_weights")
    if was_trained and None not in (trained_base, base_weights) and trained_base != base_weights:
        # Also for a new adapter, because the base model may hold the former training.
        return _add_training(kept, f"{describe_training(before)}, {_CHANGED_BASE}")
    adapter = model.active_adapters[0]
    has_zero_init = model.peft_config[adapter].init_lora_weights in _ZERO_INITS
    if has_zero_init and _has_no_update(model, adapter):
        return {}  # a new adapter
    if looped.loaded_adapter is not None:
        return {"initial_adapter": looped.loaded_adapter}
    if was_trained and looped.trained_adapter == adapter:  # by an earlier training of this model
        return _add_training(kept, describe_training(before))
    if has_zero_init:  # by a program that says nothing about it
        return _add_training({}, "not known, but the update is not zero")
    return {}  # with another initialization, a new adapter looks like a trained one


def _add_training(start: Mapping[str, Any], training: str) -> dict[str, Any]:
    return {**start, "earlier_trainings": [*start.get("earlier_trainings", ()), training]}


def _has_no_update(model: PeftModel, adapter: str) -> bool:
    """Return whether the factors B of an adapter are all zero, as far as this process has them."""
    factors = [x for name, x in model.named_parameters() if "lora_B" in name and adapter in name.split(".")]
    return not any(bool(factor.detach().any()) for factor in factors)


def describe_training(settings: Mapping[str, Any]) -> str:
    """Return a training in words, from the settings that were saved with it.

    For example "SFT with Loop Dropout (p = 0.5, K = 4, 20 steps, seed 42) on 64 examples (digest ...)".
    """
    method, facts = _describe_method(settings)
    # A training that an error ended before its first step or after its last one has no number of steps unless it was saved.
    facts.append("interrupted" if settings.get("step") is None else count(settings["step"], "step"))
    if settings.get("seed") is not None:
        facts.append(f"seed {settings['seed']}")
    data = settings.get("training_data")
    text = f"{method} ({', '.join(facts)})"
    return f"{text} on {data}" if data else text


def _describe_method(settings: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return the objective with the method, such as "SFT with Loop Dropout", and its facts, such as "p = 0.5" and "K = 4"."""
    facts = [f"{name} = {settings[name]}" for name in ("p", "rule_args") if settings.get(name) is not None]
    if settings.get("num_loops") is not None:
        facts.append(f"K = {settings['num_loops']}")
    method = settings.get("method") or settings.get("rule") or "a training"
    if settings.get("objective") is not None:
        method = f"{settings['objective']} with {method}"
    return method, facts


def describe_what_trains(model: PeftModel, settings: Mapping[str, Any], continues: bool = False) -> str:
    """Return the line that says at the beginning of a training what runs.

    For example "SFT with Loop Dropout (p = 0.5, K = 4) trains a new adapter of tiny-ouro: rank 16 on 14 modules (q_proj,
    k_proj), 39,424 trained parameters."

    Args:
        model: Model with the adapter that is trained.
        settings: Settings of the training, with those of `find_start`.
        continues: Whether it continues from a checkpoint.
    """
    method, facts = _describe_method(settings)
    if settings.get("rule") == "lora":
        method += " without gates"
    low, high = settings["depths"]
    if low != high:
        facts.append(f"depths from {low} to {high} in training")
    if continues:
        action = "continues to train an adapter"
    elif settings.get("earlier_trainings"):  # of the adapter, or of the base model, which `log_start` tells
        action = "trains an adapter"
    elif settings.get("initial_adapter"):
        action = f"trains the adapter {settings['initial_adapter']}"
    else:
        action = "trains a new adapter"
    adapter = model.active_adapters[0]
    ranks, kinds, num_modules = set(), {}, 0
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and adapter in module.r:
            ranks.add(module.r[adapter])
            kinds[name.rpartition(".")[2]] = True  # a set in the order of the modules
            num_modules += 1
    rank = " and ".join(map(str, sorted(ranks)))  # several with a `rank_pattern`
    base = public_name(model.get_base_model().config.name_or_path) or "the model"
    warning = describe_high_rank(ranks, find_smallest_dimension(model))
    line = (
        f"{method} ({', '.join(facts)}) {action} of {base}: rank {rank} on {count(num_modules, 'module')} "
        f"({', '.join(kinds)}), {model.get_nb_trainable_parameters()[0]:,} trained parameters."
    )
    return f"{line} {warning}".rstrip()


def log_start(model: PeftModel, start: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> None:
    """Log which of several adapters trains, and that its weights were trained before.

    Args:
        model: Model with the adapter that is trained.
        start: Settings from `find_start`.
        checkpoint: Checkpoint that the training continues from, or None.
    """
    adapter = model.active_adapters[0]
    others = [name for name in model.peft_config if name not in (adapter, "ref")]  # TRL adds the reference "ref"
    if others:
        names = ", ".join(map(repr, others))
        logger.warning(
            f"The adapter {adapter!r} trains, and {names} stays unchanged. `set_adapter` chooses another one."
        )
    earlier = start.get("earlier_trainings")
    if not earlier:
        return
    if checkpoint is not None:
        logger.warning(
            f"The training of {checkpoint} started from weights that were trained before: {'; '.join(earlier)}. For a fresh "
            "start, train without `resume_from_checkpoint` in another `output_dir`."
        )
    else:
        logger.warning(
            f"The training starts from present weights of the model, which were trained before: {'; '.join(earlier)}. For a "
            "fresh start, load the base model again and make a new trainer."
        )
    if earlier[-1].endswith(_CHANGED_BASE):
        logger.warning("Save the changed base model, too, because the new adapter runs on its weights only.")
