"""Recipes: YAML files that set the fields of a script's dataclasses, and the command line that overrides them.

A recipe is flat: one key for each field. `extends: other.yaml` (a path relative to the recipe) names the recipe that it
builds on, so that a variant states only what differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from loopdropout_trainer.settings.command import one_line
from loopdropout_trainer.settings.field_types import (
    described,
    fits,
    json_of,
    shown,
    stands_for_a_list,
    takes_mapping,
)
from loopdropout_trainer.settings.secrets import is_secret, public_settings
from loopdropout_trainer.settings.shipped import recipe_path


__all__ = ["RecipeError", "build", "load_recipe", "parse_recipe", "public_settings", "settings_yaml"]

ONLY_FROM_THE_COMMAND_LINE = ("trust_remote_code", "launcher", "imports")
"""Fields that run other people's code: a recipe may come from a stranger, a command line does not."""


class RecipeError(ValueError):
    """A recipe or command line that cannot be run, in one sentence."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars: `1e-4` is a number, `no` and `on` are words. Repeated keys are errors.

    So are aliases: a few lines of them can stand for more values than fit into memory.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise RecipeError(f"Aliases are not read in recipes; got `*{event.anchor}`{_where(event)}.")
        return super().compose_node(parent, index)


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_regexp = yaml.reader.re.compile
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", _regexp(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    _regexp(
        r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN)$"
    ),
    list("-+0123456789."),
)


def _mapping_without_repeats(loader: _Loader, node: yaml.MappingNode) -> dict:
    keys = [loader.construct_object(key) for key, _ in node.value]
    for key in keys:
        if keys.count(key) > 1:
            raise RecipeError(f"`{key}` stands twice in the recipe{_where(node)}.")
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


def _where(node: yaml.Node | yaml.Event) -> str:
    return f" (near line {node.start_mark.line + 1})"


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_repeats)


def load_recipe(path: str | Path) -> dict[str, Any]:
    """Read a recipe and those that it extends; the extending file's keys win.

    A path `recipes/...` that is not there is one that ships with the package: sweeps name their recipes so.

    Raises:
        RecipeError: if a file is missing, is not a flat YAML mapping, or extends itself.
    """
    path = str(path)
    return _load(Path(recipe_path(path) if path.startswith("recipes/") else path), ())


def _load(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in seen:
        raise RecipeError(f"The recipe {path} extends itself.")
    try:
        recipe = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except OSError as error:
        raise RecipeError(f"The recipe {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"The recipe {path} is not UTF-8 text.") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"The recipe {path} is not valid YAML: {_why_invalid(error)}.") from error
    except RecursionError as error:
        raise RecipeError(f"The recipe {path} is nested too deeply.") from error
    except RecipeError:
        raise
    except ValueError as error:  # of a scalar that looks like a number or a date and is none
        raise RecipeError(f"The recipe {path} is not valid YAML: {one_line(error)}.") from error
    if not isinstance(recipe, dict):
        raise RecipeError(f"The recipe {path} must be a mapping `field: value`; got {type(recipe).__name__}.")
    base = recipe.pop("extends", None)
    if base is None:
        return recipe
    if not isinstance(base, str) or not base.strip():
        raise RecipeError(f"`extends` in {path} must be the path of one recipe; got {shown(base)}.")
    return {**_load(path.parent / base, (*seen, path.resolve())), **recipe}


def _why_invalid(error: yaml.YAMLError) -> str:
    """Return what is wrong and where, without the lines themselves: they may hold a token."""
    mark = getattr(error, "problem_mark", None)
    parts = [getattr(error, name, None) for name in ("context", "problem", "reason")]
    reason = ", ".join(filter(None, parts)) or type(error).__name__
    return one_line(ValueError(reason)) + (f" (line {mark.line + 1}, column {mark.column + 1})" if mark else "")


def parse_recipe(
    dataclass_types: Sequence[type],
    argv: Sequence[str] | None = None,
    description: str | None = None,
    unread_types: Sequence[type] = (),
) -> tuple[list[Any], dict[str, Any]]:
    """Build a script's dataclasses from `[RECIPE.yaml] [--field value ...]`; the command line wins.

    Another `--rule` than the recipe's keeps of the recipe's `p` and `rule_args` what it has as well.

    Args:
        dataclass_types: whose fields are the valid keys; no field name may occur twice.
        argv: arguments after the script's name; default: the process's.
        description: shown by `--help`.
        unread_types: whose fields may stand in the recipe too, without a meaning for this script: one recipe then serves
            several scripts.

    Returns:
        One instance for each type, and the settings that were given (recipe and command line together).

    Raises:
        RecipeError: for an unknown or misspelt key (the nearest valid one is named), a wrong type, a missing field, or a
            value that a dataclass refuses.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    path = argv.pop(0) if argv and not argv[0].startswith("-") else None
    hints = {name: hint for cls in dataclass_types for name, hint in typing.get_type_hints(cls).items()}
    command_line = _parse_command_line(dataclass_types, argv, description)
    for key, value in command_line.items():
        command_line[key] = _json_checked(key, value, hints[key])
    recipe = load_recipe(path) if path is not None else {}
    for name in ONLY_FROM_THE_COMMAND_LINE:
        if _holds(recipe, name):
            raise RecipeError(f"{path} sets `{name}`, which runs code: give it on the command line, if you trust it.")
    if "/" in str(recipe.get("attn_implementation", "")):
        raise RecipeError(
            f"{path} sets `attn_implementation` {shown(recipe['attn_implementation'])}, a kernel from the Hub, which runs "
            "code: give it on the command line, if you trust it."
        )

    valid = [f.name for cls in dataclass_types for f in dataclasses.fields(cls) if f.init]
    unread = {f.name for cls in unread_types for f in dataclasses.fields(cls) if f.init} - set(valid)
    recipe = {key: value for key, value in recipe.items() if key not in unread}
    if isinstance(recipe.get("resume_from_checkpoint"), bool):  # a string to transformers, `true` to everybody else
        recipe["resume_from_checkpoint"] = str(recipe["resume_from_checkpoint"]).lower()
    for key, value in recipe.items():
        if key not in valid:
            raise RecipeError(f"{path} has an unknown key `{key}`{_nearest(str(key), valid)}")
        _check_type(key, value, hints[key], path)
    if "rule" in command_line:
        recipe = for_another_rule(recipe, command_line["rule"])
    settings = {**recipe, **command_line}
    return [build(cls, settings) for cls in dataclass_types], settings


def for_another_rule(settings: Mapping[str, Any], rule: str) -> dict[str, Any]:
    """Return a run's settings without those of `p` and `rule_args` that another rule does not have.

    A `p` of 0 is left out, too: it makes plain LoRA of nearly every rule, which would then go by the rule's name.
    """
    from loopdropout_trainer.gates import RULES  # late, as above

    settings = dict(settings)
    if rule not in RULES or rule == settings.get("rule", "loop_dropout"):  # an unknown one is an error later
        return settings
    taken = {f.name for f in dataclasses.fields(RULES[rule])}
    p = settings.get("p")
    if "p" not in taken or not any(p if isinstance(p, list) else [p]):
        settings.pop("p", None)
    fields = settings.get("rule_args")
    fields = json_of("rule_args", fields, dict) if isinstance(fields, str) else fields
    if isinstance(fields, Mapping):
        settings["rule_args"] = {key: value for key, value in fields.items() if key in taken}
    return settings


def _holds(settings: Any, name: str) -> bool:
    """Say whether a field, at any depth, is set to anything but false."""
    if isinstance(settings, Mapping):
        return any((key == name and value is not False) or _holds(value, name) for key, value in settings.items())
    return isinstance(settings, list) and any(_holds(value, name) for value in settings)


def _json_checked(key: str, value: Any, hint: Any) -> Any:
    """Return a command line's value; for a field that takes a mapping, text that begins like one must be one."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "[") and takes_mapping(hint):
        try:
            value = json_of(key, value, dict)
        except ValueError as error:
            raise RecipeError(str(error)) from None
        if not fits(value, hint):
            raise RecipeError(f"`{key}` must be {described(hint)}; got {shown(value)}.")
    return value


def settings_yaml(settings: Mapping[str, Any]) -> str:
    """Return the settings of a run as a recipe that repeats it, without anything secret."""
    return yaml.safe_dump(public_settings(settings), sort_keys=False, allow_unicode=True)


def _parse_command_line(dataclass_types: Sequence[type], argv: list[str], description: str | None) -> dict[str, Any]:
    from transformers import HfArgumentParser  # takes seconds, which `--help` does not wait for

    parser = HfArgumentParser(
        dataclass_types,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="%(prog)s [RECIPE.yaml] [--field value ...]",
    )
    parser.error = _refuse_command_line
    for action in parser._actions:
        if action.dest != "help":
            action.required = False
            if action.help and action.default not in (None, argparse.SUPPRESS) and "%(default)" not in action.help:
                action.help += f" (default: {str(action.default).replace('%', '%%')})"
            action.default = argparse.SUPPRESS  # so that only what was typed comes back
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        valid = [option for action in parser._actions for option in action.option_strings]
        option = unknown[0].split("=")[0]
        raise RecipeError(f"Unknown option `{option}`{_nearest(option, valid)}")
    return vars(given)


def _refuse_command_line(message: str) -> typing.NoReturn:
    """Raise what argparse would print with a page of usage."""
    about = re.match(r"argument (--\w+)[^:]*: (.*)", message, re.DOTALL)
    if about is None:
        raise RecipeError(f"The command line cannot be read: {message}.")
    option, reason = about.groups()
    raise RecipeError(f"`{option}` cannot be read" + ("." if is_secret(option) else f": {reason}."))


def _nearest(word: str, valid: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, valid, n=1)
    return f"; did you mean `{near[0]}`?" if near else "; `--help` lists the valid ones."


def _check_type(key: str, value: Any, hint: Any, path: str | None) -> None:
    """Check the type of a recipe's value; what the value may be is for the dataclass to say."""
    if value is None and not fits(None, hint):
        raise RecipeError(f"`{key}` in {path} must not be empty.")
    if not fits(value, hint):
        found = f"a {type(value).__name__}" if is_secret(key) else shown(value)
        raise RecipeError(f"`{key}` in {path} must be {described(hint)}; got {found}.")


def build(cls: type, settings: dict[str, Any]) -> Any:
    """Return an instance of the dataclass `cls` from those of the settings that are its fields.

    Raises:
        RecipeError: for a missing field, or a value that the dataclass refuses.
    """
    fields = [f for f in dataclasses.fields(cls) if f.init]
    for f in fields:
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in settings:
            raise RecipeError(f"`{f.name}` is required: {f.metadata.get('help', '')}")
        choices = f.metadata.get("choices")
        if choices and settings.get(f.name) is not None and settings[f.name] not in choices:
            raise RecipeError(f"`{f.name}` must be one of {', '.join(choices)}; got {shown(settings[f.name])}.")
    hints = typing.get_type_hints(cls)
    values = {f.name: settings[f.name] for f in fields if f.name in settings}
    for name, value in values.items():
        if stands_for_a_list(value, hints[name]):  # `p: 0.5`
            values[name] = [value]
    try:
        return cls(**values)
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, OSError, NotImplementedError) as error:
        # Whatever a library's dataclass does with a value that it did not expect.
        raise RecipeError(one_line(error)) from error
