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
from loopdropout_trainer.saving.cards import name_on_cards
from loopdropout_trainer.saving.checkpoints import Checkpoint
from loopdropout_trainer.saving.source import find_source
from loopdropout_trainer.saving.trainings import describe_method, describe_own_loop, describe_training, has_no_update


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
    if checkpoint is not None:  # the training continues, so it has the start of its first part
        return _read_start(find_source(checkpoint).metadata)
    looped = find_looped_model(model)
    last = looped.last_training
    if _has_other_base(last, base_weights):
        # Also for a new adapter, because the base model may hold the last training.
        return _add_training(_read_start(last), f"{_describe_former(last)}, {_CHANGED_BASE}")
    adapter = model.active_adapters[0]
    has_zero_init = model.peft_config[adapter].init_lora_weights in _ZERO_INITS
    if has_zero_init and has_no_update(model, adapter):
        return {}  # a new adapter
    if looped.loaded_adapter is not None:
        return {"initial_adapter": looped.loaded_adapter}
    former = looped.trained_with  # settings of the last training of this adapter
    if former.get("training_id") is not None:
        return _add_training(_read_start(former), _describe_former(former))
    own_loop = describe_own_loop(former)
    if own_loop is not None:
        return _add_training({}, f"in another training loop with {own_loop}")
    if has_zero_init:  # another program has trained it, or loaded its weights, without a record
        return _add_training({}, "not known, but the update is not zero")
    return {}  # with another initialization, a new adapter looks like a trained one


def _read_start(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings about the start of a training from all of its settings."""
    return {name: settings[name] for name in START_FIELDS if name in settings}


def _describe_former(settings: Mapping[str, Any]) -> str:
    """Return a training in words, with the saved adapter that it started from, which its own recipe names elsewhere."""
    text, adapter = describe_training(settings), settings.get("initial_adapter")
    if adapter is None or settings.get("earlier_trainings"):  # the first of which has named it
        return text
    return f"{text}, from the adapter '{name_on_cards(adapter)}'"


def _has_other_base(settings: Mapping[str, Any], base_weights: str | None) -> bool:
    """Return whether a training had a base model with other weights, as far as both digests are known."""
    trained_base = settings.get("base_weights")
    if trained_base is None or base_weights is None:
        return False
    return trained_base != base_weights


def _add_training(start: Mapping[str, Any], training: str) -> dict[str, Any]:
    """Return the settings of a start with one more earlier training."""
    return {**start, "earlier_trainings": [*start.get("earlier_trainings", ()), training]}


def describe_what_trains(model: PeftModel, settings: Mapping[str, Any], continues: bool = False) -> str:
    """Return the line that says at the beginning of a training what runs.

    For example "SFT with Loop Dropout (p = 0.5, K = 4) trains a new adapter of tiny-ouro: rank 16 on 14 modules (q_proj,
    k_proj), 39,424 trained parameters."

    Args:
        model: Model with the adapter that is trained.
        settings: Settings of the training, with those of `find_start`.
        continues: Whether it continues from a checkpoint.
    """
    method, facts = describe_method(settings)
    if settings.get("rule") == "lora":
        method += " without gates"
    if continues:
        action = "continues to train an adapter"
    elif settings.get("earlier_trainings"):  # of the adapter, or of the base model, which `log_start` tells
        action = "trains an adapter"
    elif settings.get("initial_adapter"):
        action = f"trains the adapter '{settings['initial_adapter']}'"  # a folder may have the name of a word, such as "out"
    else:
        action = "trains a new adapter"
    adapter = model.active_adapters[0]
    ranks, kinds = [], []  # of each adapted module
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and adapter in module.r:
            ranks.append(module.r[adapter])
            kinds.append(name.rpartition(".")[2])
    rank = " and ".join(map(str, sorted({*ranks})))  # several with a `rank_pattern`
    names = ", ".join(dict.fromkeys(kinds))  # each kind once, in the order of the modules
    base = public_name(model.get_base_model().config.name_or_path) or "the model"
    warning = describe_high_rank(ranks, find_smallest_dimension(model))
    line = (
        f"{method} ({', '.join(facts)}) {action} of {base}: rank {rank} on {count(len(kinds), 'module')} "
        f"({names}), {model.get_nb_trainable_parameters()[0]:,} trained parameters."
    )
    return f"{line} {warning}".rstrip()


def log_start(
    model: PeftModel,
    start: Mapping[str, Any],
    checkpoint: Checkpoint | None = None,
    keeps_optimizer: bool = False,
) -> None:
    """Log which of several adapters trains, that its weights were trained before, and if others than the adapter's train.

    Args:
        model: Model with the adapter that is trained.
        start: Settings from `find_start`.
        checkpoint: Checkpoint that the training continues from, or None.
        keeps_optimizer: Whether the optimizer of an earlier training has its momentum still, if there is no checkpoint.
    """
    outside = [name for name, weight in model.named_parameters() if weight.requires_grad and "lora_" not in name]
    if outside:
        logger.warning(
            f"{count(len(outside), 'weight')} outside of the adapter train, too, such as {outside[0]}, but `save_model` saves "
            "the adapter only. Freeze them by `requires_grad_(False)`, or save the whole model yourself."
        )
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
    trainings = f"before: {'; '.join(earlier)}"
    if len(earlier) > 1:  # a notebook's cell that has run several times would fill the screen
        trainings = f"in {len(earlier)} trainings before, the last of which was: {earlier[-1]}"
    if checkpoint is not None:
        logger.warning(
            f"The training of {checkpoint} started from weights that were trained {trainings}. For a fresh "
            "start, train without `resume_from_checkpoint` in another `output_dir`."
        )
    else:
        logger.warning(
            f"The training starts from present weights of the model, which were trained {trainings}. For a "
            "fresh start, load the base model again and make a new trainer."
        )
        if keeps_optimizer:
            logger.warning(
                "The optimizer keeps its momentum and its number of steps, also after a change of the rule or p. For a new "
                "optimizer, make a new trainer of `trainer.model`."
            )
    if earlier[-1].endswith(_CHANGED_BASE):
        logger.warning("Save the changed base model, too, because the new adapter runs on its weights only.")
