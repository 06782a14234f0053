"""Command lines that begin with the names of adapters and models."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from loopdropout_trainer.results.run_files import recipe_path
from loopdropout_trainer.results.training_results import ALWAYS_SAVED
from loopdropout_trainer.saving.source import find_source
from loopdropout_trainer.settings.arguments import SourceArguments
from loopdropout_trainer.settings.recipe import load_recipe, name_words


def name_sources(argv: Sequence[str] | None, field: str) -> list[str]:
    """Let a command line begin with `[RECIPE.yaml] NAME ...`.

    Without a recipe, the one of the first name that was trained here gives the data and the tasks. Its model does not count,
    because each name has its own. The results of an adapter in a folder go to that folder, also with the recipe of a training.

    Args:
        argv: Command line without the script. Default: `sys.argv[1:]`.
        field: Field of the names.
    """
    if argv is None:
        argv = sys.argv[1:]
    argv = list(argv)
    if not argv or argv[0].startswith("-"):
        return argv
    if argv[0].endswith((".yaml", ".yml")):
        return [argv[0], *_choose_output_dir(argv[0], argv[1:]), *name_words(argv[1:], field)]
    words = name_words(argv, field)
    first = _find_trained(_list_paths(argv))
    if first is None:
        return words
    source = find_source(first)
    # Options with `null` set the default instead of the recipe's value. The depths of the recipe are the ones of its own
    # evaluation. Here the default is each model's own depth.
    options = ["--eval_num_loops=null"]
    options += [f"--{name}=null" for name in SourceArguments.__dataclass_fields__ if name in source.recipe]
    output_dir = _output_dir_of(first)
    if not output_dir and "output_dir" in source.recipe:
        output_dir = ["--output_dir=null"]
    return [str(recipe_path(source.results_folder)), *output_dir, *options, *words]


def _find_trained(paths: Sequence[str]) -> str | None:
    """Return the first path of an adapter or a model with the recipe of its training, or None, as of base models."""
    for path in paths:
        if find_source(path).recipe:
            return path
    return None


def _choose_output_dir(recipe: str, words: Sequence[str]) -> list[str]:
    """Return the option of the folder of results if a recipe of a training comes before names.

    The folder in the recipe is the one of its own training. The results are about the adapter that is named.

    Args:
        recipe: Recipe.
        words: Names and options.
    """
    if not {*ALWAYS_SAVED} & load_recipe(recipe).keys():
        return []
    paths = _list_paths(words)
    return _output_dir_of(paths[0]) if paths else []


def _list_paths(words: Sequence[str]) -> list[str]:
    """Return the paths of the names at the beginning of some words, without the base model `none`."""
    names = itertools.takewhile(lambda word: not word.startswith("-"), words)
    return [path for _, path in map(split_name, names) if path != "none"]


def _output_dir_of(path: str) -> list[str]:
    """Return the option that lets the results of an adapter in a folder go to that folder, or none for another model."""
    source = find_source(path)
    if source.is_adapter and source.repository is None:
        return [f"--output_dir={path}"]
    return []


def split_name(text: str) -> tuple[str, str]:
    """Return the name and the path of a word `[NAME=]PATH`. A folder may have "=" in its own name."""
    if "=" not in text or Path(text).expanduser().is_dir():
        return "", text
    name, _, path = text.partition("=")
    return name, path
