"""Recipes: YAML files that set the fields of a script's dataclasses, and the command line that overrides them.

A recipe is flat: one key for each field. `extends: other.yaml` (a path relative to the recipe) names the recipe that it
builds on, so that a variant states only what differs.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from loopdropout_trainer.checks import nested, shown
from loopdropout_trainer.errors import RecipeError as RecipeError
from loopdropout_trainer.errors import one_line, public_settings


PACKAGE = Path(__file__).parents[1]

Settings = Mapping[str, Any]
"""What a recipe or a command line sets, by field."""

SAFE_VALUES = {
    "trust_remote_code": False,  # modules of a model's or tokenizer's repository
    "custom_generate": None,  # the same, for decoding
    "use_kernels": False,  # compiled kernels from the Hub
    "kernel_config": None,
    "allow_all_kernels": False,
    "use_safetensors": True,  # else pickles, which can run code
    "weights_only": True,
    "launcher": None,  # a program that is started
    "imports": None,  # modules of Python
    "confirm_run_unsafe_code": False,  # programs that a model has written
}
"""Fields that can run other people's code, and the value with which they do not.

A recipe may come from a stranger, a command line does not: other values are accepted on the command line alone.
"""


class _Loader(yaml.SafeLoader):
    """Reads YAML with the scalars of version 1.2: `1e-4` is a number, `no` and `12:30` are strings.

    PyYAML, and so TRL's parser, reads 1.1, where `1e-4` is a string and `no` is false, and keeps the last of duplicate keys,
    which are refused here. So are aliases: a few lines of them can stand for more values than fit into memory.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        if self.check_event(yaml.AliasEvent):
            raise ComposerError(None, None, "aliases are not read", self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise ConstructorError(None, None, f"`{key}` stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads back as it was: the string '1e-4' in quotes, and no aliases."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Escape Unicode's line breaks in double quotes: PyYAML reads them as spaces anywhere else."""
        style = '"' if re.search("[\x85\u2028\u2029]", data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


_Dumper.add_representer(str, _Dumper.represent_str)


_FLOAT = r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?"
_SCALARS = {
    "null": "~|null|Null|NULL|",
    "bool": "true|True|TRUE|false|False|FALSE",
    "int": "[-+]?(?:0|[1-9][0-9_]*)",
    "float": rf"{_FLOAT}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    "merge": "<<",
}
for _tag, _pattern in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), None)


def recipes_folder() -> Path:
    """Return the folder of the scripts and recipes that ship with the package: inside it, or beside it in a clone."""
    installed = PACKAGE / "recipes"
    return installed if installed.is_dir() else PACKAGE.parent / "recipes"


def recipe_path(name: str) -> str:
    """Return the path of a recipe: a file of the user's, or one that ships, as `loopdropout recipes` lists it.

    `recipes/` may stand before a shipped name; `./name.yaml` and an absolute path are the user's own file or none.
    """
    shipped = recipes_folder() / name.removeprefix("recipes/")
    is_name = not {"", ".", ".."} & set(name.split("/"))
    return str(shipped) if is_name and not Path(name).exists() and shipped.is_file() else name


def load_recipe(path: str | Path, extending: tuple[Path, ...] = ()) -> Settings:
    """Read a recipe and those that it extends; the extending file's keys win. `extending`: the recipes that led to this one.

    A path that does not exist may name a recipe that ships with the package, as in the sweeps' files; see `recipe_path`.

    Raises:
        RecipeError: if a file is missing, is not a flat YAML mapping, extends itself, or would run a stranger's code.
    """
    path = Path(recipe_path(str(path)))
    place = Path(os.path.realpath(path))  # `resolve` fails where a link leads to itself
    if place in extending:
        raise RecipeError(f"The recipe {path} extends itself.")
    try:
        with path.open(encoding="utf-8") as file:  # PyYAML's errors would quote a string, even a token in it
            recipe = yaml.load(file, Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except Exception as error:  # of the system, of the encoding, and whatever PyYAML makes of `!!int x`
        reason = getattr(error, "strerror", None) or one_line(error)
        raise RecipeError(f"The recipe {path} cannot be read: {reason}.") from error
    if not isinstance(recipe, dict):
        raise RecipeError(f"The recipe {path} must be a mapping `field: value`; got {type(recipe).__name__}.")
    _check_texts(recipe)
    for field, value in nested(recipe):
        if value is not None and _can_run_code(field, value):
            raise RecipeError(
                f"{path} sets `{field}`, which can run code: give it on the command line, if you trust it."
            )
    base = recipe.pop("extends", None)
    if base is None:
        return recipe
    if not isinstance(base, str) or not base.strip():
        raise RecipeError(f"`extends` in {path} must be the path of one recipe; got {shown(base)}.")
    return laid_over(load_recipe(path.parent / base, (*extending, place)), recipe)


def _can_run_code(field: str, value: Any) -> bool:
    if field == "attn_implementation":
        return "/" in str(value)  # a kernel from the Hub
    if field == "chat_template_path":
        return not str(value).endswith((".jinja", ".j2"))  # a tokenizer, of whose repository modules may be run
    return field in SAFE_VALUES and value is not SAFE_VALUES[field]


_INSTEAD_OF = {
    "dataset_name": ["train_files", "dataset_revision"],
    "train_files": ["dataset_name", "dataset_config", "dataset_revision", "dataset_split"],
    "at_depths": ["num_loops"],
    "benchmark_files": ["benchmark_revisions"],
    "model_name_or_path": ["model_revision"],
}


def laid_over(base: Settings, own: Settings) -> Settings:
    """Return a recipe's settings with those that go before them, which also take away what they exclude, or replace.

    A revision belongs to the model or data set that it was given with.
    """
    settings = dict(base)
    for name, value in own.items():
        if value != base.get(name):
            for other in _INSTEAD_OF.get(name, ()):
                settings.pop(other, None)
    return {**settings, **own}


def _check_texts(settings: Settings) -> None:
    """Raise RecipeError for text that no file can hold."""
    for field, value in nested(settings):
        if re.search("[\0\ud800-\udfff]", field + (value if isinstance(value, str) else "")):
            raise RecipeError(f"`{field}` must be valid Unicode without NUL; got {shown(value)}.")


def parse_recipe(
    dataclass_types: Sequence[type],
    argv: Sequence[str] | None = None,
    description: str | None = None,
    unread_types: Sequence[type] = (),
) -> tuple[list[Any], Settings]:
    """Build a script's dataclasses from `[RECIPE.yaml] [--field value ...]`; the command line wins.

    If `--rule` is not the recipe's, the recipe's `p` and `rule_args` count only as far as the new rule has them too. From here
    on torch computes on as many threads as `num_threads` says.

    Args:
        dataclass_types: whose fields are the valid keys; no field name may occur twice.
        argv: arguments after the script's name; default: the process's.
        description: shown by `--help`.
        unread_types: whose fields the recipe may set too, without effect: one recipe serves several scripts.

    Returns:
        One instance for each type, and the settings that were given (recipe and command line together).

    Raises:
        RecipeError: for an unknown key, a wrong type, a missing field, or a value that a dataclass refuses.
    """
    import torch

    from loopdropout_trainer.settings.parser import RecipeParser

    argv = list(sys.argv[1:] if argv is None else argv)
    path = argv.pop(0) if argv and not argv[0].startswith("-") else None
    parser = RecipeParser(dataclass_types, description)
    command_line = parser.read_command_line(argv)
    _check_texts(command_line)
    recipe = load_recipe(path) if path is not None else {}
    unread = {f.name for cls in unread_types for f in dataclasses.fields(cls) if f.init} - parser.hints.keys()
    recipe = parser.read_recipe({key: value for key, value in recipe.items() if key not in unread}, path)
    if "rule" in command_line:
        recipe = for_another_rule(recipe, command_line["rule"])
    settings = laid_over(recipe, command_line)
    arguments = [build(cls, settings) for cls in dataclass_types]
    if settings.get("num_threads") is not None:
        torch.set_num_threads(settings["num_threads"])
    return arguments, settings


def build(cls: type, settings: Settings) -> Any:
    """Return an instance of the dataclass `cls` from those of the settings that are its fields."""
    fields = [f for f in dataclasses.fields(cls) if f.init]
    for f in fields:
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in settings:
            raise RecipeError(f"`{f.name}` is required: {f.metadata.get('help', '')}")
    try:
        return cls(**{f.name: settings[f.name] for f in fields if f.name in settings})
    except Exception as error:  # whatever a library's dataclass does with a value that it did not expect
        raise RecipeError(one_line(error)) from error


def for_another_rule(settings: Settings, rule: str) -> Settings:
    """Return a run's settings without those of `p` and `rule_args` that another rule does not have.

    A `p` of 0 is left out, too: it makes plain LoRA of nearly every rule, which would then go by the rule's name.
    """
    from loopdropout_trainer.gates import RULES

    settings = dict(settings)
    if rule not in RULES or rule == settings.get("rule", "loop_dropout"):  # an unknown one is an error later
        return settings
    taken = [field.name for field in dataclasses.fields(RULES[rule])]
    p = settings.get("p")
    if "p" not in taken or not any(p if isinstance(p, list) else [p]):
        settings.pop("p", None)
    rule_args = settings.get("rule_args")
    if isinstance(rule_args, Mapping):
        settings["rule_args"] = {name: rule_args[name] for name in rule_args if name in taken}
    return settings


def settings_yaml(settings: Settings) -> str:
    """Return the settings of a run as a recipe that repeats it, without anything secret; `load_recipe` reads them back."""
    return yaml.dump(public_settings(settings), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


_TITLES = {  # of rules whose title is not just the name capitalised, as in "Dose control"
    "lora": "LoRA",
    "loop_dropout": "Loop Dropout",
    "module_wise": "Module-wise",
    "weight_noise": "Low-rank weight noise",
    "coto": "CoTo",
    "lora_dropout": "LoRA Dropout",
    "learned": "Learned gates",
    "exactly_m": "Exactly m loops",
}


def method_title(fields: Settings) -> str:
    """Return the title of the method of a run with these settings; a custom rule's is its name."""
    rule = fields.get("rule")
    if rule == "lora":
        if fields.get("loraplus_lr_ratio") not in (None, 1):
            return "LoRA+"
        if fields.get("use_rslora"):
            return "rsLoRA"
        if fields.get("lora_dropout"):
            return "Input dropout"
    title = _TITLES.get(rule, str(rule).replace("_", " ").capitalize())
    return f"{title} + Loop Dropout" if rule in ("independent", "learned") and fields.get("p") else title
