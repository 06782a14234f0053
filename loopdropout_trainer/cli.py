"""The command `loopdropout`, which runs the scripts of the recipes folder from any folder.

    loopdropout sft quickstart.yaml --seed 1 --output_dir outputs/quickstart_1
    loopdropout recipes
    loopdropout recipes gsm8k sweep

A recipe is a YAML file of yours, or one that `loopdropout recipes` lists. On several GPUs, `accelerate launch -m
loopdropout_trainer sft RECIPE.yaml` runs the same command in each process.
"""

from __future__ import annotations

import ast
import platform
import re
import runpy
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from loopdropout_trainer.errors import UserError, closest_match, run_script
from loopdropout_trainer.files import describe_version, find_recipes_of_name, recipe_names, recipes_folder
from loopdropout_trainer.hints import recipe_hint
from loopdropout_trainer.terminal import terminal_columns, wrap_for_terminal


def scripts() -> dict[str, Path]:
    """Return the scripts that are commands by name."""
    paths = sorted(recipes_folder().glob("*.py"))
    return {path.stem: path for path in paths if not path.stem.startswith(("make_", "_"))}


HINTS = {
    "train": "sft",
    "finetune": "sft",
    "fine-tune": "sft",
    "eval": "evaluate",
    "generate": "chat",
    "plot": "report",
}
"""Commands of other programs, and the command here that does the same."""

LIBRARIES = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "lm-eval",
    "deepspeed",
    "bitsandbytes",
    "vllm",
)
"""Libraries whose versions a bug report needs, as far as they are installed."""


def print_usage() -> None:
    """Print the commands with the first lines of their docstrings."""
    print(f"{__doc__}\ncommands:")
    for name, script in scripts().items():
        print(f"  {name:<10} {ast.get_docstring(ast.parse(script.read_bytes())).splitlines()[0]}")
    print(f"  {'recipes':<10} List the recipes of the package, those with some words, or print one by its name.")


def print_versions() -> None:
    """Print the versions of the package, of Python and of the installed libraries in one line, for a bug report."""
    parts = [f"loopdropout-trainer {describe_version()}", f"Python {platform.python_version()}"]
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            parts.append(f"{name} {version(name)}")
    print(f"{', '.join(parts)}, {platform.system()} {platform.machine()}")


def command_of(recipe: str, text: str) -> str:
    """Return the command that a recipe belongs to.

    Args:
        recipe: Name of the recipe, such as `dpo/arithmetic.yaml`.
        text: Content of the recipe.
    """
    folder = recipe.split("/")[0]
    if folder in ("dpo", "grpo"):
        return folder
    if folder == "accelerate":
        return "accelerate launch --config_file"
    if folder == "tables":
        return "report --tables"
    if folder == "evaluation":
        return "evaluate"
    if re.search(r"^(methods|learning_rates):", text, re.MULTILINE):
        return "sweep"
    return "sft"


def find_description(recipe: str) -> str:
    """Return the first sentence of the comments of a recipe that is not a command, in one line."""
    words: list[str] = []
    for line in recipe.splitlines():
        is_comment = line.startswith("#")
        text = line.lstrip("# ")
        is_command = text.startswith(("accelerate ", "python ", "loopdropout ", "pip ", "for ", "...", "  "))
        if words and (is_command or not is_comment or not text):
            break
        if is_comment and text and not is_command:
            words.append(text)
    sentence = re.split(r"(?<=[.])\s+(?=[A-Z`])", " ".join(words), maxsplit=1)[0]
    return re.sub(r"[:;.]$", "", sentence) + "." if sentence else ""


def print_recipes(names: Sequence[str]) -> None:
    """Print recipes of the package by command, each with the first sentence of its comments. The quickstart is first."""
    by_command: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(names, key=lambda name: (name != "quickstart.yaml", name)):
        text = _read_recipe(name)
        by_command.setdefault(command_of(name, text), []).append((name, find_description(text)))
    for command in sorted(by_command, key=lambda command: command != "sft"):
        print(command if command.startswith("accelerate") else f"loopdropout {command}")
        for name, description in by_command[command]:
            print(*_list_recipe(name, description), sep="\n")


def _list_recipe(name: str, description: str) -> list[str]:
    """Return the line about a recipe, or several lines in a terminal that is narrower."""
    line = f"  {name:<48} {description}".rstrip()
    columns = terminal_columns()
    if columns is None or len(line) <= columns:
        return [line]
    return [f"  {name}", *(f"      {part}" for part in wrap_for_terminal(description, 6))]


def find_recipes(words: Sequence[str]) -> list[str]:
    """Return the recipes that have all words: as their command, or where words begin in their name, description or fields.

    Case, hyphens and underscores do not count, so `loop_dropout` is "Loop Dropout".
    """
    found = []
    for name, (command, text) in _describe_recipes().items():
        if all(_has_word(command, text, word) for word in words):
            found.append(name)
    return found


@cache
def _describe_recipes() -> dict[str, tuple[str, str]]:
    """Return the command of each recipe, and a text of its name, its description and the values of its fields.

    The fields are those after `extends`, and for a sweep also those of the recipe that its methods start from. It is cached,
    because reading all recipes takes a second.
    """
    from loopdropout_trainer.settings.recipe import load_recipe

    described = {}
    for name in recipe_names():
        text, fields = _read_recipe(name), load_recipe(name)
        start = load_recipe(fields["recipe"]) if "recipe" in fields else {}
        words = [name, find_description(text), *map(str, [*start.values(), *fields.values()])]
        described[name] = command_of(name, text), " ".join(words)
    return described


def _has_word(command: str, described: str, word: str) -> bool:
    """Return whether a recipe has a word. The name of a command selects the recipes of this command only."""
    if word.lower() in scripts():
        return word.lower() == command.split()[0]
    return re.search(rf"(?<!\w){re.escape(_spell_alike(word))}", _spell_alike(described)) is not None


def _spell_alike(text: str) -> str:
    """Return a text in lower case, with spaces in place of hyphens and underscores."""
    return re.sub(r"[\s_-]+", " ", text).strip().lower()


def _read_recipe(name: str) -> str:
    return (recipes_folder() / name).read_text(encoding="utf-8")


def show_recipes(words: Sequence[str]) -> None:
    """Print the recipe of the package with a name, or list all recipes that have all words.

    The name may leave out `.yaml`, or the folder of the recipe if no other recipe has this name.

    Raises:
        UserError: If there is no such recipe.
    """
    names = recipe_names()
    if len(words) == 1:
        (word,) = words
        if word in names:
            print(_read_recipe(word), end="")
            return
        if f"{word}.yaml" in names:
            print(_read_recipe(f"{word}.yaml"), end="")
            _hint_at_others(word)  # a word may mean any of them, while a whole name means one recipe
            return
    found = find_recipes_of_name(" ".join(words))
    if len(found) == 1:
        print(_read_recipe(found[0]), end="")
        return
    found = found or find_recipes(words)
    if not found:
        wanted = " ".join(words)
        raise UserError(f"The package has no recipe {wanted!r}.{recipe_hint(wanted)}")
    print_recipes(found)
    print(f"{len(found)} of {len(names)} recipes match {shlex.join(words)}. `loopdropout recipes NAME` prints one.")


def _hint_at_others(word: str) -> None:
    """Say on the standard error how to list other recipes with a word. The standard output is the recipe alone."""
    others = [name for name in recipe_names() if name != f"{word}.yaml" and _has_word("", name, word)]
    if others:
        print(
            f"More recipes have {word} in their names ({len(others)}). Add a command to list them, as in "
            f"`loopdropout recipes {word} sweep`.",
            file=sys.stderr,
        )


def run(argv: list[str]) -> None:
    """Run a command line of `loopdropout`."""
    match argv:
        case [] | ["-h" | "--help"]:
            print_usage()
        case ["--version"]:
            print_versions()
        case ["recipes"] | ["recipes", "-h" | "--help"]:
            print_recipes(recipe_names())
            print(
                "`loopdropout recipes gsm8k sweep` lists those with these words, and `loopdropout recipes NAME` prints one."
            )
        case ["recipes", *words]:
            show_recipes(words)
        case [name, *arguments] if name in scripts():
            script = scripts()[name]
            sys.argv = [str(script), *arguments]
            runpy.run_path(str(script), run_name="__main__")
        case [name, *_]:
            hint = closest_match(name, [*scripts(), "recipes"])
            if name in HINTS:
                hint = f" Did you mean {HINTS[name]!r}?"
            raise UserError(f"Unknown command {name!r}.{hint} See --help.")


def main() -> None:
    """Run the command line of this process."""
    run_script(lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    main()
