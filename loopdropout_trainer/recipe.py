"""Recipes: flat YAML files that set the fields of a script's dataclasses, and command lines that override them.

    python recipes/sft.py recipes/gsm8k.yaml --learning_rate 3e-4 --merge true

`extends: other.yaml` names the recipe that a recipe builds on: a file relative to its own folder, or a recipe of the package.
`field: null` resets an inherited field.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import yaml

from loopdropout_trainer.errors import UserError, closest_match, hide_secrets
from loopdropout_trainer.files import recipe_names, recipes_folder, write_file


if TYPE_CHECKING:
    from transformers import HfArgumentParser

IMPORTED: list[str] = []
"""Absolute paths of the files of `--import`."""

SAFE_VALUES = {
    "trust_remote_code": False,
    "custom_generate": None,
    "use_kernels": False,
    "kernel_config": None,
    "allow_all_kernels": False,
    "use_safetensors": True,
    "weights_only": True,
    "allow_unsafe_code": False,
}
"""Fields that can run code of other people, with their safe values. Other values are accepted on the command line only."""

REPLACED_TOGETHER = {
    "model_name_or_path": ["model_revision"],
    "dataset_name": ["dataset_config", "dataset_revision", "dataset_split", "train_files"],
    "train_files": ["dataset_name", "dataset_config", "dataset_revision", "dataset_split"],
}
"""Fields that describe another field. They are not inherited where that other field changes."""

HELP_GROUPS = ("Model", "Data", "Method", "Adapter", "Training")
"""Titles of the first groups of fields in `--help`. The classes of the fields have their titles as `help_title`."""

TRAINING_FIELDS = {
    "output_dir", "learning_rate", "num_train_epochs", "max_steps", "max_length", "packing", "assistant_only_loss",
    "per_device_train_batch_size", "gradient_accumulation_steps", "lr_scheduler_type", "warmup_steps", "seed", "bf16",
    "gradient_checkpointing", "use_cpu", "eval_strategy", "logging_steps", "save_steps", "report_to", "push_to_hub",
    "resume_from_checkpoint", "hub_model_id", "beta", "num_generations", "max_completion_length",
}  # fmt: skip
"""Fields of TRL and transformers that `--help` shows."""

_EPILOG = """Trainings take all fields of TRL's configuration, too. `--field null` resets an
inherited field. `--import FILE ...` first runs Python files, which can register
rules, models and rewards, and allows task files of lm-eval."""


class _Loader(yaml.SafeLoader):
    """Read YAML without duplicate fields."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"`{name}` is set twice.")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(  # `1e-4` is a number, as in YAML 1.2
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d.]*[eE][-+]?\d+$"), list("-+0123456789")
)


def load_recipe(path: str | Path, extended_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a recipe and the recipes that it extends.

    Args:
        path: YAML file of the user, or the name of one of the package's recipes.
        extended_by: recipes that led to this one.

    Raises:
        UserError: if a file does not exist or is not a flat YAML mapping.
    """
    name = str(path).removeprefix("recipes/")
    path = recipes_folder() / name if not Path(path).exists() and name in recipe_names() else Path(path).resolve()
    if path in extended_by:
        raise UserError(f"The recipe {path} extends itself.")
    try:
        recipe = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except FileNotFoundError:
        raise UserError(f"The recipe {path} does not exist.{closest_match(name, recipe_names())}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"The recipe {path} is not readable: {error}") from error
    if not isinstance(recipe, dict):
        raise UserError(f"The recipe {path} must be a mapping `field: value`.")
    base = recipe.pop("extends", None)
    if base is None:
        return recipe
    base = path.parent / base if (path.parent / base).exists() else base
    return override(load_recipe(base, (*extended_by, path)), recipe)


def import_files(paths: Sequence[str]) -> None:
    """Run Python files of the user, and allow task files of lm-eval (.yaml), which can run code.

    A Python file registers rules, looped models, or rewards.
    """
    for path in map(Path, paths):
        if not path.is_file():
            raise UserError(f"`--import` must be given Python files or task files, got {path}.")
        absolute = str(path.resolve())
        if absolute in IMPORTED:
            continue
        IMPORTED.append(absolute)
        if path.suffix == ".py":
            spec = spec_from_file_location(f"imported_{path.stem}", absolute)
            module = sys.modules[spec.name] = module_from_spec(spec)
            spec.loader.exec_module(module)


def _nested(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        yield name, value
        if isinstance(value, dict):
            yield from _nested(value)


def override(recipe: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe with changes.

    A changed model, dataset or rule drops the inherited settings that describe the old one: its revision, or fields of the
    rule that the new rule does not have.
    """
    from loopdropout_trainer.gates import RULES

    recipe = dict(recipe)
    for name, value in changes.items():
        if value != recipe.get(name):
            for dependent in REPLACED_TOGETHER.get(name, ()):
                recipe.pop(dependent, None)
            if name == "rule" and value in RULES:
                fields = RULES[value].__dataclass_fields__
                if "p" not in fields or recipe.get("p") in (0, [0]):  # p = 0 makes plain LoRA of most rules
                    recipe.pop("p", None)
                if recipe.get("rule_args"):
                    recipe["rule_args"] = {key: kept for key, kept in recipe["rule_args"].items() if key in fields}
    return {**recipe, **changes}


def parse(
    dataclass_types: Sequence[type],
    argv: Sequence[str] | None = None,
    description: str | None = None,
    unread_types: Sequence[type] = (),
) -> tuple[Any, ...]:
    """Build dataclasses from `[RECIPE.yaml] [--field value ...]`.

    Args:
        dataclass_types: dataclasses with the valid fields.
        argv: command line without the script. Default: `sys.argv[1:]`.
        description: text at the top of `--help`.
        unread_types: dataclasses whose fields a recipe may set too, without an effect on this script.

    Returns:
        One instance of each dataclass. `recipe_dict` returns the settings that they were made from.

    Raises:
        UserError: for an unknown field, a value of the wrong type, a value that a dataclass rejects, or a recipe that sets
            a field that can run code.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    path = argv.pop(0) if argv and not argv[0].startswith("-") else None
    hints = {name: hint for cls in dataclass_types for name, hint in get_type_hints(cls).items()}
    if {"-h", "--help"} & {*argv}:
        _print_help(_parser(dataclass_types, description, hints), dataclass_types)
    changes = _options(argv)
    import_files(_words(changes.pop("import", ())))
    recipe = load_recipe(path) if path else {}
    for name, value in _nested(recipe):
        is_kernel = name == "attn_implementation" and "/" in str(value)
        if is_kernel or value not in (None, SAFE_VALUES.get(name, value)):
            raise UserError(f"{path} sets `{name}`, which can run code. Set it on the command line instead.")
    parser = _parser(dataclass_types, description, hints)
    fields = [action.dest for action in parser._actions]
    unread = {name for cls in unread_types for name in cls.__dataclass_fields__} - {*fields, *changes}
    words, settings = [], {}
    for name, value in override(recipe, changes).items():
        if name in unread:
            continue
        if name not in fields:
            raise UserError(f"`{name}` is not a field of this script.{closest_match(name, fields)}")
        if value in (None, "null"):
            if type(None) in get_args(hints[name]):
                settings[name] = None
        elif value == []:
            settings[name] = value
        else:
            values = [item if isinstance(item, str) else json.dumps(item) for item in _words(value)]
            words += [f"--{name}={values[0]}"] if len(values) == 1 else [f"--{name}", *values]
    return build(dataclass_types, {**settings, **vars(parser.parse_args(words))})


def name_words(argv: Sequence[str] | None, *names: str) -> list[str]:
    """Let a command line begin with values of fields: `A B --x 1` becomes `--first A --second B --x 1`.

    Args:
        argv: Command line without the script. Default: `sys.argv[1:]`.
        *names: Fields of the words before the first option. The last field takes all further words.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    named = []
    for name in names:
        if argv and not argv[0].startswith("-"):
            named += [f"--{name}", argv.pop(0)]
    return named + argv


def name_folders(argv: Sequence[str] | None, name: str) -> list[str]:
    """Let a command line begin with `[RECIPE.yaml] FOLDER ...`.

    Without a recipe, `FOLDER/recipe.yaml` of an adapter is the recipe, and `FOLDER` is the `output_dir`.

    Args:
        argv: Command line without the script. Default: `sys.argv[1:]`.
        name: Field of the folders.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    first = argv[0] if argv else "--"
    if all(Path(first, file).is_file() for file in ("recipe.yaml", "adapter_config.json")):
        return [f"{first}/recipe.yaml", f"--output_dir={first}", *name_words(argv, name)]
    recipe = argv[: first.endswith((".yaml", ".yml"))]
    return [*recipe, *name_words(argv[len(recipe) :], name)]


def build(dataclass_types: Sequence[type], settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return one instance of each dataclass, made from the settings that are its fields."""
    instances = []
    for cls in dataclass_types:
        given = {name: value for name, value in settings.items() if name in cls.__dataclass_fields__}
        try:
            instances.append(cls(**given))
        except ValueError as error:  # of TRL and transformers
            raise UserError(str(error)) from error
        instances[-1]._settings = {name: value for name, value in given.items() if name != "hub_token"}
    return tuple(instances)


def recipe_dict(*instances: Any) -> dict[str, Any]:
    """Return the settings that `parse` made dataclasses from, as a recipe without the Hub token."""
    return {name: value for instance in instances for name, value in instance._settings.items()}


def dump_recipe(settings: Mapping[str, Any], path: str | Path) -> None:
    """Write settings as a recipe that repeats the run, without secrets."""
    public = json.loads(hide_secrets(json.dumps({**settings, "hub_token": None})))
    public.pop("hub_token")
    write_file(Path(path), yaml.safe_dump(public, sort_keys=False, allow_unicode=True))


def _words(value: Any) -> list[Any]:
    """Return the items of a field's value."""
    return list(value) if isinstance(value, list | tuple) else [value]


def _options(argv: Sequence[str]) -> dict[str, str | tuple[str, ...]]:
    """Return the word after each `--field` of a command line, or a tuple of no or several words."""
    options: dict[str, list[str]] = {}
    for word in argv:
        if word.startswith("--"):
            name, *values = word[2:].split("=", 1)
            options[name.replace("-", "_")] = values
        elif options:
            values.append(word)
        else:
            raise UserError(f"Options must be given as `--field value`, got {word!r}.")
    return {name: values[0] if len(values) == 1 else tuple(values) for name, values in options.items()}


def _parser(dataclass_types: Sequence[type], description: str | None, hints: Mapping[str, Any]) -> HfArgumentParser:
    """Return a parser that returns only the fields that are set."""
    from transformers import HfArgumentParser

    first_words = getattr(dataclass_types[0], "first_words", "[RECIPE.yaml]")
    usage = f"loopdropout {Path(sys.argv[0]).stem} {first_words} [--field value ...]"
    formatter = argparse.RawDescriptionHelpFormatter
    parser = HfArgumentParser(dataclass_types, description=description, usage=usage, formatter_class=formatter)
    for action in parser._actions[1:]:  # the first one is `--help`
        if "dict" in str(hints[action.dest]):
            action.type = _mapping
        if action.dest == "report_to":  # HfArgumentParser takes one word of `str | list[str]`
            action.nargs = "+"
        if action.choices:
            action.help = f"{action.help or ''} One of {', '.join(map(str, action.choices))}."
        if action.help and action.default not in (None, [], ""):
            action.help += f" (default: {str(action.default).replace('%', '%%')})"
        action.default = argparse.SUPPRESS
    parser.error = functools.partial(_raise_user_error, first_words)
    return parser


def _print_help(parser: HfArgumentParser, dataclass_types: Sequence[type]) -> None:
    """Print the fields in groups, and exit."""
    titles = {}
    for cls in dataclass_types:
        from_trl = getattr(getattr(cls, "trl_class", None), "__dataclass_fields__", ())
        own_title = getattr(cls, "help_title", cls.__doc__.split(".")[0])
        for name in cls.__dataclass_fields__:
            if name not in from_trl or name in TRAINING_FIELDS:
                titles[name] = "Training" if name in from_trl else own_title
    parser._action_groups.clear()
    groups = {title: parser.add_argument_group(title) for title in dict.fromkeys((*HELP_GROUPS, *titles.values()))}
    for action in parser._actions:
        if action.dest in titles and not action.option_strings[0].startswith("--no_"):
            action.option_strings, action.metavar = action.option_strings[:1], "VALUE"
            groups[titles[action.dest]]._group_actions.append(action)
    parser.epilog = _EPILOG
    parser.print_help()
    sys.exit(0)


def _mapping(text: str) -> Any:
    return json.loads(text) if text.startswith("{") else text


_mapping.__name__ = "JSON"  # the name of the type in error messages


def _raise_user_error(first_words: str, message: str) -> None:
    message = message.replace(
        "unrecognized arguments:", f"Words without `--field` must come first, {first_words}, got"
    )
    raise UserError(re.sub(r"^argument --(\w+)\S*:", r"`\1`:", message) + ".")
