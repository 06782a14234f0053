"""Advice for messages about a file, a folder, a model or a recipe that does not exist: what was probably meant."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from loopdropout_trainer.errors import closest_match, docs_page
from loopdropout_trainer.files import find_recipes_of_name, recipe_names, recipes_folder


USUAL_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "full": "float32",
}
"""Other words for data types, and their names here."""


_ALMOST_USUAL = 0.8
"""Least similarity of a mistyped name to a name by habit, of which there are many."""


def closest_known(name: str, choices: Iterable[str], usual_names: Mapping[str, str]) -> str:
    """Return the end of a message about an unknown name as `closest_match` does, also for a name by habit with a mistake.

    Args:
        name: Unknown name.
        choices: Known names.
        usual_names: Names that people type by habit, and the choices that they mean.
    """
    choices = list(choices)
    usual_names = {usual: meant for usual, meant in usual_names.items() if meant in choices}
    found = closest_match(usual_names.get(name, name), choices)
    if found:
        return found
    mistyped = difflib.get_close_matches(str(name).lower(), usual_names, n=1, cutoff=_ALMOST_USUAL)
    return closest_match(usual_names[mistyped[0]], choices) if mistyped else ""


def list_hint(word: str) -> str:
    """Return the end of a message about a name that does not exist: how to write several names, if it has commas, or ""."""
    names = [name.strip(" \"'") for name in word.strip("[] ").split(",")]
    if len(names) == 1 or "" in names:
        return ""
    return f" Write several names as a list: `[{', '.join(names)}]` in a recipe, and `{' '.join(names)}` on a command line."


def model_hint(name: str) -> str:
    """Return the end of a message about a model that does not exist: the folder or the name that is nearly the same.

    The names are those of the models of the package's recipes. A name with a slash means a folder first.
    """
    found = closest_match(name, ["tiny-ouro"])
    if found:
        return found
    of_recipe = _recipe_of_path(name)
    if of_recipe:
        return of_recipe
    if "/" in name:
        return folder_hint(name) or _known_model_hint(name)
    return _known_model_hint(name) or folder_hint(name)


def _known_model_hint(name: str) -> str:
    """Return the end of a message about a model that does not exist, from the models of the package's recipes, or ""."""
    lines = "\n".join((recipes_folder() / recipe).read_text(encoding="utf-8") for recipe in recipe_names())
    models = set(re.findall(r"^model_name_or_path: ([\w.-]+/[\w.-]+)", lines, re.MULTILINE))
    by_name = {model.split("/")[1].lower(): model for model in models}  # the owner of a repository is often left out
    matches = difflib.get_close_matches(name.rpartition("/")[2].lower(), by_name, n=1, cutoff=0.8)
    if not matches or by_name[matches[0]] == name:
        return ""
    return f" Did you mean {by_name[matches[0]]!r}?"


_SHORT_NAME = 5
"""Number of letters of a short name. A name with two letters more or less is seldom meant, as `p2` for `gpt2`."""


def folder_hint(name: str | Path) -> str:
    """Return the end of a message about a folder that does not exist: the folder whose path is nearly the same, or ""."""
    found = _find_similar_folder(Path(name).expanduser())
    return "" if found is None else f" Did you mean {str(found)!r}?"


def _find_similar_folder(path: Path, cutoff: float = 0.6) -> Path | None:
    """Return the existing folder whose path is nearly the same, or None. Each folder of the path can have a mistake.

    Args:
        path: Path of a folder.
        cutoff: Least similarity of the names of two folders, from 0 to 1. A short name needs about as many letters, too.
    """
    if os.path.isdir(path):  # also of a folder that must not be read
        return path
    if path == path.parent:
        return None
    parent = _find_similar_folder(path.parent, cutoff)
    if parent is None:
        return None
    if os.path.isdir(parent / path.name):
        return parent / path.name
    siblings = [other.name for other in parent.glob("*") if os.path.isdir(other)]
    if len(path.name) <= _SHORT_NAME:
        siblings = [name for name in siblings if abs(len(name) - len(path.name)) <= 1]
    matches = difflib.get_close_matches(path.name, sorted(siblings), n=1, cutoff=cutoff)
    return parent / matches[0] if matches else None


_SIMILAR_FILE = 0.75
"""Least similarity of the names of two files without their endings, of which one can be a mistake for the other."""


def _without_ending(file: str) -> str:
    return str(Path(file.removesuffix(".gz")).with_suffix(""))


def find_similar_file(name: str, others: Iterable[str]) -> str | None:
    """Return the file with nearly the same name, or None. Endings do not count, because they make all names similar."""
    by_stem: dict[str, list[str]] = {}
    for other in others:
        by_stem.setdefault(_without_ending(other), []).append(other)
    stems = difflib.get_close_matches(_without_ending(name), by_stem, n=1, cutoff=_SIMILAR_FILE)
    if not stems:
        return None
    same = sorted(by_stem[stems[0]])
    # The one with the ending that is meant, if there are several.
    nearest = difflib.get_close_matches(name, same, n=1, cutoff=0)
    return nearest[0]


READ_RECIPES: dict[Path, Any] = {}
"""Content of each recipe that this process has read, by its path as it was given."""


def _recipe_of_path(name: str) -> str:
    """Return the end of a message about a relative path of a recipe that leads there from another folder, or ""."""
    if Path(name).is_absolute():
        return ""
    for recipe, content in READ_RECIPES.items():
        if _holds_text(content, name):
            for folder in recipe.absolute().parents:
                if (folder / name).exists():
                    return (
                        f" The recipe {recipe} has this path, which leads to it from {folder}. Run the command there."
                    )
    return ""


def _holds_text(content: Any, text: str) -> bool:
    """Return whether a text is among the values of a recipe, also inside of its lists and mappings."""
    if isinstance(content, dict):
        content = [*content.values()]
    if isinstance(content, list):
        return any(_holds_text(item, text) for item in content)
    return content == text


def own_benchmark_hint(name: str) -> str:
    """Return the end of a message about an unknown task that means an own benchmark of a recipe that does not count, or "".

    The `own_benchmarks` of a recipe do not count if a command line or a recipe on top of it sets the mapping that has them.
    """
    for recipe, content in READ_RECIPES.items():
        names = _find_own_benchmarks(content)
        hint = closest_match(name, names)
        if not hint:
            continue
        if name in names:
            hint = ""
        return (
            f"{hint} The recipe {recipe} has it in `own_benchmarks`, which other settings replace. Repeat these "
            "`own_benchmarks` there."
        )
    return ""


def _find_own_benchmarks(content: Any) -> list[str]:
    """Return the names of the own benchmarks in a recipe, also of those inside of its mappings."""
    if not isinstance(content, dict):
        return []
    names = []
    for field, value in content.items():
        if field == "own_benchmarks" and isinstance(value, dict):
            names += map(str, value)
        else:
            names += _find_own_benchmarks(value)
    return names


def file_hint(path: Path, is_readable: Callable[[str], bool]) -> str:
    """Return the end of a message about a file that does not exist, with a path that is nearly the same, or its recipe.

    Args:
        path: Path of the file.
        is_readable: Function that returns whether a file of a name can be meant.
    """
    of_recipe = _recipe_of_path(str(path))
    if of_recipe:
        return of_recipe
    folder = _find_similar_folder(path.parent, cutoff=_SIMILAR_FILE)
    if folder is None:
        return ""
    others = [other.name for other in folder.glob("*") if is_readable(other.name)]
    found = find_similar_file(path.name, others)
    return "" if found is None else f" Did you mean {str(folder / found)!r}?"


def recipe_hint(name: str, others: Iterable[str] = ()) -> str:
    """Return the end of a message about a recipe that does not exist, from the package's recipes and the names of others.

    The name may lack the folder of the recipe or its ending, or be the name of a folder.
    """
    stem = name.removeprefix("recipes/").rstrip("/").removesuffix(".yaml").removesuffix(".yml")
    file = f"{stem}.yaml"
    recipes, same = recipe_names(), find_recipes_of_name(file)
    if file in recipes:
        return f" Did you mean {file!r}?"
    if len(same) == 1:
        return f" Did you mean {same[0]!r}?"
    if same:
        return f" `loopdropout recipes {file}` lists the recipes of this name."
    folders = {Path(recipe).parent.as_posix() for recipe in recipes if "/" in recipe}
    folders -= {recipe.removesuffix(".yaml") for recipe in recipes}  # a misspelled name then means the recipe
    matches = difflib.get_close_matches(stem, sorted(folders), n=1, cutoff=0.75)
    similar = find_similar_file(file, [*others, *recipes])
    names_file = name.endswith((".yaml", ".yml"))
    if matches and not (names_file and similar is not None):
        return f" Did you mean the folder {matches[0]!r}? `loopdropout recipes {matches[0]}` lists its recipes."
    if similar is not None:
        return f" Did you mean {similar!r}?"
    stems = {Path(recipe).stem for recipe in recipes}
    matches = difflib.get_close_matches(Path(stem).name, sorted(stems), n=1, cutoff=0.8)
    if matches:  # a name without its folder has a mistake
        return recipe_hint(matches[0])
    own = f"{docs_page('own_data')} says how to write your own"
    return f" `loopdropout recipes` lists the recipes of the package, and {own}."
