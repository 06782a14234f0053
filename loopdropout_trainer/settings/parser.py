"""TRL's parser of dataclasses, for recipes too, with errors of one sentence."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import inspect
import json
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from huggingface_hub.dataclasses import type_validator
from trl import TrlParser

from loopdropout_trainer.checks import shown
from loopdropout_trainer.errors import RecipeError, is_secret, program_name


USUAL_FIELDS = """
output_dir seed use_cpu bf16 report_to logging_steps eval_strategy save_strategy save_steps
learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps num_train_epochs max_steps
per_device_train_batch_size gradient_accumulation_steps optim weight_decay max_grad_norm
max_length completion_only_loss assistant_only_loss packing resume_from_checkpoint hub_model_id push_to_hub
beta loss_type precompute_ref_log_probs
num_generations max_completion_length temperature top_p top_k num_iterations steps_per_generation
epsilon scale_rewards reward_weights log_completions use_vllm
"""
"""The fields of TRL's and transformers' training arguments that `--help` lists; `--help_all` lists all."""

_MAPPING_OR_PATH = ("deepspeed", "fsdp_config", "accelerator_config")


class RecipeParser(TrlParser):
    """Reads the fields of dataclasses from a command line and from a recipe.

    Of the command line TRL's parser knows names, types, choices and lists, to which mappings as JSON are added. The values
    of a YAML file TRL hands on as they are; here they are checked against the fields' types and choices.

    Attributes:
        hints: the type of each field, by its name.
    """

    def __init__(self, dataclass_types: Sequence[type], description: str | None = None) -> None:
        super().__init__(
            dataclass_types,
            prog=program_name(),
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            usage="%(prog)s [RECIPE.yaml] [--field value ...]",
            epilog="`--help_all` lists all fields, with TRL's and transformers' own.",
        )
        self.hints: dict[str, Any] = {}
        listed = {*USUAL_FIELDS.split()}
        for cls in dataclass_types:
            hints = typing.get_type_hints(cls)
            self.hints |= {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}
            for base in cls.__mro__:
                if not base.__module__.startswith(("trl.", "transformers.")):
                    listed |= vars(base).get("__annotations__", {}).keys()
        self.choices: dict[str, list[Any]] = {}
        for action in self._actions[1:]:  # the first is `--help`
            is_negation = isinstance(action, argparse._StoreFalseAction)  # `--no_field`
            if is_negation or (action.dest not in listed and "--help_all" not in sys.argv):
                action.help = argparse.SUPPRESS
            elif action.help and action.default not in (None, argparse.SUPPRESS):
                action.help += f" (default: {str(action.default).replace('%', '%%')})"
            action.required = False  # so that only what was typed comes back
            action.default = argparse.SUPPRESS
            if action.choices:
                self.choices[action.dest] = list(action.choices)
            if action.nargs == "+":
                action.type = _list_item(action.type)
            elif _takes_mapping(self.hints[action.dest]):
                action.type = _json
        self.add_argument("--help_all", action="help", help=argparse.SUPPRESS)

    def read_command_line(self, argv: Sequence[str]) -> dict[str, Any]:
        """Return the fields that a command line sets; RecipeError for an unknown option or a value of another type."""
        given, unknown = self.parse_known_args(argv)
        if unknown:
            option = unknown[0].split("=")[0]
            valid = [option for action in self._actions for option in action.option_strings]
            raise RecipeError(f"Unknown option `{option}`{_nearest(option, valid)}")
        for name, value in vars(given).items():
            if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):  # one word, such as `[]`
                (value,) = value
            setattr(given, name, self._typed(name, value, f"`--{name}`"))
        return vars(given)

    def read_recipe(self, recipe: Mapping[str, Any], path: str | None) -> dict[str, Any]:
        """Return the fields that a recipe sets; RecipeError, which names `path`, for an unknown one or one of another type."""
        settings = {}
        for name, value in recipe.items():
            if name not in self.hints:
                raise RecipeError(f"{path} has an unknown key `{name}`{_nearest(str(name), list(self.hints))}")
            if name == "resume_from_checkpoint" and isinstance(value, bool):  # a string to transformers
                value = str(value).lower()
            settings[name] = self._typed(name, value, f"`{name}` in {path}")
        return settings

    def _typed(self, name: str, value: Any, where: str) -> Any:
        """Return a value as the field's type has it; RecipeError if it is not of that type, or not among its choices."""
        hint = self.hints[name]
        value = _as_typed(value, hint)
        given = f"a {type(value).__name__}" if is_secret(name) else shown(value)
        if value is not None and name in self.choices and value not in self.choices[name]:
            raise RecipeError(f"{where} must be one of {', '.join(self.choices[name])}; got {given}.")
        try:
            type_validator(name, value, hint)
            if isinstance(value, str) and _takes_mapping(hint) and name not in _MAPPING_OR_PATH:
                raise TypeError  # TRL's hints allow text for the command line's sake
        except TypeError:
            # typing's own names of types: `float`, `list[str] | None`
            raise RecipeError(f"{where} must be of type `{inspect.formatannotation(hint)}`; got {given}.") from None
        return value

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print with a page of usage."""
        raise RecipeError(f"{message}.")


def _nearest(word: str, valid: Sequence[str]) -> str:
    """Return the end of a sentence about an unknown word: the valid one that was probably meant."""
    near = difflib.get_close_matches(word, valid, n=1)
    return f"; did you mean `{near[0]}`?" if near else "; `--help` lists the valid ones."


def _options(hint: Any) -> list[Any]:
    """Return the members of a union, or the type itself, but None."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return [member for member in members if member is not type(None)]


def _takes_mapping(hint: Any) -> bool:
    return any((typing.get_origin(option) or option) is dict for option in _options(hint))


def _as_typed(value: Any, hint: Any) -> Any:
    """Return a value of YAML as the field's type has it: 1.0 for 1, and [0.5] for 0.5 where only a list is taken."""
    options = _options(hint)
    if len(options) == 1 and typing.get_origin(options[0]) is list and isinstance(value, (str, int, float)):
        value = [value]
    for option in options:
        kinds = typing.get_args(option)
        if isinstance(value, list) and typing.get_origin(option) is list:
            return [_as_typed(item, kinds[0]) for item in value]
        if isinstance(value, dict) and typing.get_origin(option) is dict:
            return {key: _as_typed(item, kinds[1]) for key, item in value.items()}
    return float(value) if options == [float] and type(value) is int else value


def _list_item(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return what reads a word of a list as `convert` does, or a whole list that is given as JSON."""

    @functools.wraps(convert)  # argparse names it in errors
    def item(text: str) -> Any:
        value = _json(text)
        return value if isinstance(value, list) else convert(text)

    return item


def _json(text: str) -> Any:
    """Return a mapping that is given as JSON on the command line; other text as it is: a path, or a mistake."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
