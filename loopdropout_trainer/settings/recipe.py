"""Recipes: flat YAML files that set the fields of a script's dataclasses, and command lines that override them.

    loopdropout sft gsm8k.yaml --learning_rate 3e-4 --merge true

`extends: other.yaml` names the recipe that a recipe builds on: a file relative to its own folder, or a recipe of the package.
`field: null` resets an inherited field. A recipe that a training has written begins with `command: sft`, or `dpo` or `grpo`,
which other commands for trainings refuse.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import yaml

from loopdropout_trainer.errors import UserError, find_own_error, hide_secrets
from loopdropout_trainer.files import check_links, recipe_names, recipes_folder, write_file
from loopdropout_trainer.hints import file_hint, recipe_hint
from loopdropout_trainer.own_code import IMPORTED
from loopdropout_trainer.settings.command_fields import TRAININGS, find_command_fields, find_fields
from loopdropout_trainer.settings.field_hints import (
    InnerFields,
    check_advice,
    drop_replaced,
    field_hint,
    list_fields,
    warn_of_replaced_mappings,
    warn_of_unused_epochs,
)
from loopdropout_trainer.settings.field_values import is_optional, option_value, read_value
from loopdropout_trainer.settings.fields import items_of
from loopdropout_trainer.settings.help import print_help
from loopdropout_trainer.settings.library_fields import unsafe_names
from loopdropout_trainer.settings.read_yaml import read_yaml_file
from loopdropout_trainer.settings.recipe_folders import hint_at_folder


MOST_EXTENDED = 20
"""Largest number of recipes that a recipe builds on."""

REPLACED_TOGETHER = {
    "model_name_or_path": ["model_revision"],
    "dataset_name": ["dataset_config", "dataset_revision", "dataset_split", "train_files", "datasets"],
    "train_files": ["dataset_name", "dataset_config", "dataset_revision", "dataset_split", "datasets"],
    "datasets": ["dataset_name", "dataset_config", "dataset_revision", "dataset_split", "train_files"],
}
"""Fields that describe another field. They are not inherited where that other field changes. The list is made by hand, because
recipes are read before the classes of the fields are known."""


def load_recipe(path: str | Path, extended_by: tuple[Path, ...] = (), command: str | None = None) -> dict[str, Any]:
    """Read a recipe and the recipes that it extends.

    Args:
        path: YAML file of the user, or the name of one of the package's recipes.
        extended_by: recipes that led to this one.
        command: Command that reads the recipe, if it trains.

    Raises:
        UserError: if a file does not exist or is not a flat YAML mapping, or its line `command` names another command that
            trains.
    """
    path = _find_recipe(path)
    if path in extended_by:
        raise UserError(f"The recipe {path} extends itself.")
    if len(extended_by) > MOST_EXTENDED:
        raise UserError(f"The recipe {extended_by[0]} must extend at most {MOST_EXTENDED} recipes.")
    recipe = read_yaml_file(path, f"The recipe {path}")
    if not isinstance(recipe, dict):
        raise UserError(f"The recipe {path} must be a mapping `field: value`.")
    for name in recipe:
        if not isinstance(name, str):
            raise UserError(
                f'The fields of the recipe {path} must be texts, got {name!r}. Quote the name, as in "on".'
            )
    written_by = recipe.pop("command", None)
    if None not in (command, written_by) and command != written_by:
        raise UserError(
            f"The recipe {path} must be used with `loopdropout {written_by}` (in a sweep: `script: {written_by}`), as its "
            f"line `command` says, got `{command}`."
        )
    base = recipe.pop("extends", None)
    if base is None:
        return recipe
    if not isinstance(base, str):
        raise UserError(f"`extends` must be the name of one recipe, got {base!r} in {path}.")
    return override(load_recipe(_find_recipe(base, path.parent), (*extended_by, path), command), recipe)


def _find_recipe(name: str | Path, folder: Path = Path()) -> Path:
    """Return the path of a recipe: a file relative to a folder, or a recipe of the package."""
    path = folder / name
    if path.is_dir():
        raise UserError(f"The recipe {path} must be a file, and it is a folder.{hint_at_folder(path)}")
    if path.exists():
        return path.resolve()
    name = str(name).removeprefix("recipes/")
    if name in recipe_names():
        return recipes_folder() / name
    neighbors = [str(Path(name).with_name(file.name)) for file in path.parent.glob("*.y*ml")]
    raise UserError(f"The recipe {path.resolve()} does not exist.{recipe_hint(name, neighbors)}")


def import_files(paths: Sequence[str]) -> None:
    """Run Python files of the user, and allow task files of lm-eval (.yaml), which can run code.

    A Python file registers rules, looped models, or rewards.
    """
    for path in map(Path, paths):
        _check_import(path)
        absolute = str(path.resolve())
        if absolute in IMPORTED:
            continue
        IMPORTED.append(absolute)
        if path.suffix == ".py":
            spec = spec_from_file_location(imported_name(path), absolute)
            module = sys.modules[spec.name] = module_from_spec(spec)
            spec.loader.exec_module(module)


def _check_import(path: Path) -> None:
    """Raise UserError unless the path of `--import` is a file."""
    if path.is_file():
        return
    if path.is_dir():
        found = f"and {path} is a folder."
    else:
        hint = file_hint(path, is_readable=_can_import)
        if not hint and not path.is_absolute():
            hint = f" Relative paths start in the present folder, {Path.cwd()}."
        found = f"and there is no file {path}.{hint}"
    raise UserError(f"`--import` must be given Python files (.py) or task files (.yaml), {found}")


def _can_import(file: str) -> bool:
    return file.endswith((".py", ".yaml"))


def imported_name(path: str | Path) -> str:
    """Return the name of the module that a Python file of `--import` becomes."""
    return f"imported_{Path(path).stem}"


def override(recipe: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe with changes.

    A changed model, dataset or rule drops the inherited settings that describe the old one: its revision, or fields of the
    rule that the new rule does not have.
    """
    from loopdropout_trainer.gates import RULES

    recipe = dict(recipe)
    for name, value in changes.items():
        if value == recipe.get(name):
            continue
        for dependent in REPLACED_TOGETHER.get(name, ()):
            recipe.pop(dependent, None)
        if name == "rule" and isinstance(value, str) and value in RULES:
            _drop_rule_fields(recipe, RULES[value].__dataclass_fields__)
    return {**recipe, **changes}


def _drop_rule_fields(recipe: dict[str, Any], fields: Collection[str]) -> None:
    """Remove the settings of the old rule from a recipe that a new rule with some fields does not take over."""
    is_off = recipe.get("p") in (0, [0])  # p = 0 makes plain LoRA of most rules
    if is_off or "p" not in fields:
        recipe.pop("p", None)
    if recipe.get("rule_args"):
        recipe["rule_args"] = {key: value for key, value in recipe["rule_args"].items() if key in fields}


def read_settings(
    dataclass_types: Sequence[type],
    argv: Sequence[str] | None = None,
    description: str | None = None,
    unread_types: Sequence[type] = (),
) -> dict[str, Any]:
    """Return the settings of a command line `[RECIPE.yaml] [--field value ...]`. They are also the recipe of the run.

    Args:
        dataclass_types: Dataclasses with the valid fields.
        argv: Command line without the script. Default: `sys.argv[1:]`.
        description: Text at the top of `--help`.
        unread_types: Dataclasses whose fields a recipe, but not the command line, may set too, without an effect here.

    Raises:
        UserError: For an unknown field, a value of the wrong type or out of bounds, or a recipe that sets a field that can
            run code.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    _check_words(argv)
    first_words = getattr(dataclass_types[0], "first_words", "[RECIPE.yaml]")
    if "-h" in argv or "--help" in argv:
        print_help(dataclass_types, description, first_words)
        sys.exit(0)
    path = None
    if argv and not argv[0].startswith("-"):
        path = argv.pop(0)
    fields, hints = find_fields(dataclass_types)
    changes = _options(argv, hints, first_words)
    import_files(items_of(changes.pop("import", ())))
    recipe = {}
    if path is not None:
        recipe = load_recipe(path, command=_find_command(dataclass_types))
        _check_safe({name: value for name, value in recipe.items() if name not in changes}, path)
    unread = {name for cls in unread_types for name in cls.__dataclass_fields__} - fields.keys()
    for name in changes:
        if name in unread:
            raise UserError(f"`{name}` is a field of trainings, which has no effect on this script. Remove it.")
    drop_replaced(recipe, changes, getattr(dataclass_types[0], "replaces", {}))
    warn_of_unused_epochs(recipe, changes)
    warn_of_replaced_mappings(recipe, changes)
    given = {name: value for name, value in override(recipe, changes).items() if name not in unread}
    check_advice(given, fields, getattr(dataclass_types[0], "advice", {}))
    return _read_values(given, fields, hints, getattr(dataclass_types[0], "inner_fields", None))


def _find_command(dataclass_types: Sequence[type]) -> str | None:
    """Return the command that trains with some dataclasses, or None for those of another command."""
    for cls in dataclass_types:
        if hasattr(cls, "command"):
            return cls.command
    return None


def _read_values(
    given: Mapping[str, Any],
    fields: Mapping[str, dataclasses.Field],
    hints: Mapping[str, Any],
    inner: Mapping[str, InnerFields] | None = None,
) -> dict[str, Any]:
    """Return given values as their fields take them. A field that takes no None has its default for one.

    Args:
        given: Values by name.
        fields: Fields by name. hints: Types of the fields.
        inner: Fields inside of a field, for the message about an unknown one.

    Raises:
        UserError: For an unknown field, a wrong value, or a missing value.
    """
    for name, value in given.items():
        if name not in fields:
            raise UserError(f"`{name}` is not a field of this script.{_describe_unknown(name, value, fields, inner)}")
    settings = {}
    for name, value in given.items():
        if value is not None or is_optional(hints[name]):
            settings[name] = read_value(fields[name], value, hints[name])
    for name, field in fields.items():
        if name not in settings and not _has_default(field):
            raise UserError(f"`{name}` must be set. {field.metadata.get('help', '')}".strip())
    return settings


def _has_default(field: dataclasses.Field) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _describe_unknown(
    name: str, value: Any, fields: Collection[str], inner: Mapping[str, InnerFields] | None = None
) -> str:
    """Return the end of the message about a field that is not one of `fields`. Other arguments: `field_hint`."""
    return _name_commands(name, fields) or field_hint(name, fields, value, inner) or list_fields(fields)


def check_names(settings: Mapping[str, Any], command: str, place: str, of_sweep: Collection[str]) -> None:
    """Raise UserError for the first setting that is not a field of a command that trains.

    Args:
        settings: Settings of a sweep's trainings by name.
        command: Command, one of `TRAININGS`.
        place: Where the settings are, for the message, such as "in `settings`".
        of_sweep: Fields of the sweep itself.
    """
    fields = find_command_fields(command)
    for name, value in settings.items():
        if name not in fields:
            hint = _describe_unknown(str(name), value, fields)
            if name in of_sweep:
                hint = " It is a field of the sweep, outside of `methods` and `settings`."
            raise UserError(f"`{name}` {place} is not a field of `loopdropout {command}`.{hint}")


def _name_commands(name: str, fields: Collection[str]) -> str:
    """Return a sentence with the other commands of trainings that have a field, or "" if the script is no training."""
    if "learning_rate" not in fields:  # which all trainings have, and nothing else
        return ""
    commands = []
    for command in TRAININGS:
        if name in find_command_fields(command):
            commands.append(f"`loopdropout {command}`")
    return f" It is a field of {' and '.join(commands)}." if commands else ""


def parse(
    dataclass_types: Sequence[type],
    argv: Sequence[str] | None = None,
    description: str | None = None,
    unread_types: Sequence[type] = (),
) -> tuple[Any, ...]:
    """Return one instance of each dataclass, made from a command line as `read_settings` reads it.

    Raises:
        UserError: As in `read_settings` and `build`.
    """
    return build(dataclass_types, read_settings(dataclass_types, argv, description, unread_types))


def _check_words(argv: Sequence[str]) -> None:
    """Raise UserError for a word that is not a text. Python reads each byte of it that is not UTF-8 as a surrogate."""
    for word in argv:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UserError(f"Words of the command line must be texts in UTF-8, got {word!r}.") from None


def _check_safe(recipe: Mapping[str, Any], path: str) -> None:
    """Raise UserError if a recipe sets a field that can run code, such as a kernel or a file of another person."""
    for field, value in recipe.items():
        for name in unsafe_names({field: value}):
            where = "it" if name == field else f"`{field}`"
            raise UserError(
                f"{path} sets `{name}`, which can run code. Set {where} on the command line instead, by `--{field}`."
            )


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
    options = {_name_option(word) for word in argv}
    for name in names:
        if f"--{name}" in named and name in options:
            raise UserError(f"`{name}` must be given once, by the first words or by `--{name}`.")
    return named + argv


def without_option(words: Sequence[str], name: str) -> list[str]:
    """Return a command line without an option and its values."""
    kept = []
    option = None  # the one that the next words belong to
    for word in words:
        option = _name_option(word) or option
        if option != name:
            kept.append(word)
    return kept


def _name_option(word: str) -> str | None:
    """Return the field that a word `--field`, `--field=value` or `--other-field` sets, or None for another word."""
    if not word.startswith("--"):
        return None
    return word[2:].partition("=")[0].replace("-", "_")


def build(dataclass_types: Sequence[type], settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return one instance of each dataclass, made from the settings that are its fields.

    Raises:
        UserError: For settings that a dataclass rejects, or an `output_dir` with a link that leaves it.
    """
    instances = []
    for cls in dataclass_types:
        names = {field.name for field in dataclasses.fields(cls) if field.init}
        try:
            instance = cls(**{name: value for name, value in settings.items() if name in names})
        except ValueError as error:  # of TRL and transformers
            raise find_own_error(error) or UserError(str(error)) from None
        if folder := getattr(instance, "output_dir", None):
            check_links(folder)  # here, because every command writes into such a folder
        instances.append(instance)
    return tuple(instances)


def build_part(dataclass_types: Sequence[type], recipe: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return one instance of each dataclass from a recipe that has also other fields, whose values are left out unread.

    Raises:
        UserError: As in `build`, and for a wrong or missing value.
    """
    return build(dataclass_types, read_part(dataclass_types, recipe))


def read_part(dataclass_types: Sequence[type], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the dataclasses' fields in a recipe as a training reads them: for a list, also one item is a list.

    Raises:
        UserError: For a wrong or missing value.
    """
    fields, hints = find_fields(dataclass_types)
    given = {name: value for name, value in recipe.items() if name in fields}
    return _read_values(given, fields, hints)


def dump_recipe(
    settings: Mapping[str, Any],
    path: str | Path,
    comments: Iterable[str] = (),
    used_imports: Collection[str] | None = None,
) -> None:
    """Write settings as a recipe that repeats the run, without secrets. A comment names the files of `--import`.

    They are no field, because a recipe must not run code.

    Args:
        settings: Fields of the recipe.
        path: File that is written.
        comments: Further lines in front of the fields.
        used_imports: Python files of `--import` that the run depends on. Default: all of them. A task file (.yaml) is always
            named, because it holds the tasks of `benchmarks`.
    """
    public = {name: _as_written(_without_secrets(value)) for name, value in settings.items() if name != "hub_token"}
    imports = []
    for file in IMPORTED:
        is_unused = used_imports is not None and file not in used_imports
        if file.endswith(".py") and is_unused:
            continue
        imports.append(f"It needs `--import {file}`.")
    lines = [f"# {' '.join(comment.splitlines())}\n" for comment in (*imports, *comments)]
    write_file(Path(path), "".join(lines) + yaml.safe_dump(public, sort_keys=False, allow_unicode=True))


def _as_written(value: Any) -> Any:
    """Return the value of a field as people write it: 5 instead of 5.0, which a field of floats makes of it."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e6:
        return int(value)
    return value


def _without_secrets(value: Any) -> Any:
    """Return a value of a recipe with its texts as `hide_secrets` returns them."""
    if isinstance(value, Mapping):
        return {key: _without_secrets(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_secrets(item) for item in value]
    if isinstance(value, str):
        return hide_secrets(value)
    return value


def _options(argv: Sequence[str], hints: Mapping[str, Any], first_words: str) -> dict[str, Any]:
    """Return the value of each `--field` of a command line. Words of a field that is not a text are read as in YAML."""
    options: dict[str, list[str]] = {}
    name = None
    for word in argv:
        begun = _name_option(word)
        if begun is not None:
            name = begun
            if name != "import" or name not in options:  # which adds files. Of other fields, the last value counts.
                options[name] = []
            _, equals, value = word.partition("=")
            if equals:
                options[name].append(value)
        elif name is not None:
            options[name].append(word)
        else:
            raise UserError(f"Options must be given as `--field value`, got {word!r}.")
    values = {}
    for name, words in options.items():
        values[name] = option_value(name, words, hints.get(name, list[str]), first_words)
    return values
