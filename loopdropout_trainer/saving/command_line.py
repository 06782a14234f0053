"""Command lines that begin with the names of adapters and models."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from loopdropout_trainer.arguments import SourceArguments
from loopdropout_trainer.recipe import name_words
from loopdropout_trainer.results import recipe_path
from loopdropout_trainer.saving.source import find_source


def name_sources(argv: Sequence[str] | None, field: str) -> list[str]:
    """Let a command line begin with `[RECIPE.yaml] NAME ...`.

    Without a recipe, the recipe of the first name's training gives the data and the tasks. Its model does not count, because
    each name has its own. The results of an adapter in a folder go to that folder.

    Args:
        argv: Command line without the script. Default: `sys.argv[1:]`.
        field: Field of the names.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0].startswith("-"):
        return argv
    if argv[0].endswith((".yaml", ".yml")):
        return [argv[0], *name_words(argv[1:], field)]
    words = name_words(argv, field)  # --FIELD FIRST ...
    _, first = split_name(words[1])
    if first == "none":
        return words
    source = find_source(first)
    if not source.recipe:
        return words
    # `null` is the default, instead of the recipe's value.
    model = [f"--{name}=null" for name in SourceArguments.__dataclass_fields__ if name in source.recipe]
    output_dir = []
    if source.is_adapter and source.repository is None:
        output_dir = [f"--output_dir={first}"]
    elif "output_dir" in source.recipe:
        output_dir = ["--output_dir=null"]
    # The depths of the recipe are the ones of its own evaluation. Here the default is each model's own depth.
    return [str(recipe_path(source.results_folder)), *output_dir, "--eval_num_loops=null", *model, *words]


def split_name(text: str) -> tuple[str, str]:
    """Return the name and the path of a word `[NAME=]PATH`. A folder may have "=" in its own name."""
    if "=" not in text or Path(text).expanduser().is_dir():
        return "", text
    name, _, path = text.partition("=")
    return name, path
