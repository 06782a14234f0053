"""Checks of the names and the types of a trainer's arguments. Its examples are checked in `examples.py`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from transformers import TrainingArguments
from transformers.trainer_utils import denumpify_detensorize

from loopdropout_trainer.errors import UserError, closest_match, short_repr
from loopdropout_trainer.files import find_unwritable
from loopdropout_trainer.looped import check_not_compiled
from loopdropout_trainer.settings.field_hints import USUAL_NAMES
from loopdropout_trainer.tokenizers import check_tokenizer


if TYPE_CHECKING:
    from loopdropout_trainer.training.config import GateConfig

_Method = TypeVar("_Method", bound=Callable[..., Any])

_USUAL_ARGUMENTS = {
    "tokenizer": "processing_class",
    "dataset": "train_dataset",
    "config": "args",
    "lora_config": "peft_config",
}
"""Names of arguments that people type by habit, and the names that they have now."""

_FUNCTIONS = (
    "data_collator",
    "compute_loss_func",
    "compute_metrics",
    "preprocess_logits_for_metrics",
    "formatting_func",
)
"""Arguments that are functions. The libraries call some of them hours later, or never if no evaluation runs."""


def check_names(trainer: type, given: Iterable[str], arguments: Collection[str], method: str | None = None) -> None:
    """Raise UserError for an unknown argument of a trainer or of its method, with the argument or the field that helps."""
    owner = trainer.__name__ if method is None else f"{trainer.__name__}.{method}"
    config = trainer.config_class
    fields = {own.name for own in dataclasses.fields(config)}
    for name in given:
        if name in arguments:
            continue
        hint = closest_match(_USUAL_ARGUMENTS.get(name, name), arguments)
        meant = name if name in fields else USUAL_NAMES.get(name)
        if meant in arguments:  # such as `resume_from_checkpoint` of `train`, which is a field, too
            hint = closest_match(meant, arguments)
        elif meant in fields:
            hint = f" Set `{meant}` in a `{config.__name__}`, which is the argument `args`."
        raise UserError(f"`{name}` is not an argument of {owner}.{hint}")


def hint_at_arguments(method: _Method) -> _Method:
    """Let a method of a trainer raise the UserError of `check_names` for an unknown argument. Its signature stays the same."""
    arguments = inspect.signature(method).parameters

    @functools.wraps(method)
    def checked(self: Any, *positional: Any, **keywords: Any) -> Any:
        check_names(type(self), keywords, arguments, method.__name__)
        return method(self, *positional, **keywords)

    return checked


def wrong_args(args: Any, config: type[GateConfig]) -> UserError:
    """Return the error about `args` of another type. `config`: class of the arguments of the trainer."""
    hint = ""
    if isinstance(args, dict):
        hint = f" Write it as `{config.__name__}(**fields)`."
    elif isinstance(args, str | Path):
        hint = f" If it is the output folder, write `{config.__name__}({str(args)!r})`. Data are `train_dataset`."
    return UserError(
        f"`args` must be a {config.__name__} or {config.trl_class.__name__}, got a {type(args).__name__}.{hint}"
    )


def check_kinds(arguments: Mapping[str, Any]) -> None:
    """Raise UserError for a model, a tokenizer, a list of callbacks, an optimizer or a function of another type."""
    model, callbacks = arguments["model"], arguments["callbacks"]
    for name, value in arguments.items():
        if name != "args" and isinstance(value, TrainingArguments):
            raise UserError(f"`{name}` must not be a {type(value).__name__}. Pass it as `args=...`.")
    if not isinstance(model, str | Path | nn.Module):
        raise UserError(f"`model` must be a looped model, a PEFT model over one, or a name, got {short_repr(model)}.")
    check_not_compiled(model)
    if callbacks is not None and not isinstance(callbacks, list | tuple):
        raise UserError(f"`callbacks` must be a list of callbacks, got {short_repr(callbacks)}.")
    for callback in callbacks or ():
        if not is_callback(callback):
            raise UserError(f"`callbacks` must be a list of `TrainerCallback`s, got {short_repr(callback)} in it.")
    for name in _FUNCTIONS:
        value = arguments.get(name)
        if value is not None and not callable(value):
            raise UserError(f"`{name}` must be a function, got {short_repr(value)}.")
    reference = arguments.get("ref_model")
    if reference is not None and not isinstance(reference, str | nn.Module):
        raise UserError(f"`ref_model` must be a model or its name, got {short_repr(reference)}.")
    check_tokenizer(arguments["processing_class"], is_optional=True)
    _check_optimizers(arguments.get("optimizers"))


def is_callback(callback: Any) -> bool:
    """Return whether a value is a callback of transformers, or its class."""
    return hasattr(callback, "on_train_begin")


@contextmanager
def checking_metrics(trainer: Any) -> Iterator[None]:
    """Raise UserError if `compute_metrics` of a trainer returns other values in this block than numbers by their names."""
    compute = trainer.compute_metrics
    if compute is None:
        yield
        return

    @functools.wraps(compute)
    def checked(*args: Any, **kwargs: Any) -> Any:
        metrics = compute(*args, **kwargs)
        if kwargs.get("compute_result", True):  # else the batch is not the last one of `batch_eval_metrics`
            _check_metrics(metrics)
        return metrics

    trainer.compute_metrics = checked
    try:
        yield
    finally:
        trainer.compute_metrics = compute


def _check_metrics(metrics: Any) -> None:
    if not isinstance(metrics, Mapping):
        raise UserError(
            "`compute_metrics` must return a dictionary of numbers by their names, such as {'accuracy': 0.5}, got "
            f"{short_repr(metrics)}."
        )
    for name, value in metrics.items():
        try:
            json.dumps(denumpify_detensorize(value))  # as the trainer writes them in its state
        except TypeError:
            raise UserError(
                f"`compute_metrics` must return numbers by their names, got {short_repr(value)} for {name!r}. Return its "
                "mean, or one number for each item."
            ) from None


def _check_optimizers(optimizers: Any) -> None:
    """Raise UserError unless optimizers are a pair of an optimizer and a schedule, as in transformers."""
    if optimizers is not None and not (isinstance(optimizers, list | tuple) and len(optimizers) == 2):
        raise UserError(
            f"`optimizers` must be a pair of an optimizer and its schedule, such as `(optimizer, None)`, got "
            f"{short_repr(optimizers)}."
        )


def check_output(args: TrainingArguments) -> None:
    """Raise UserError if the output folder cannot be made or written to, before anything is loaded."""
    problem = find_unwritable(args.output_dir)
    if args.should_save and problem is not None:
        raise UserError(problem)


def check_trackers(names: list[str]) -> None:
    """Raise UserError for a tracker that is unknown or not installed."""
    if not names:
        return
    from transformers.integrations import get_reporting_integration_callbacks

    try:
        for tracker in get_reporting_integration_callbacks(names):
            tracker()
    except (ValueError, RuntimeError) as error:
        raise UserError(f"`report_to`: {error}") from None
