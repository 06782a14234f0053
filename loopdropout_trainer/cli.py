"""The command `loopdropout`, which runs the scripts of the recipes folder from any folder.

    loopdropout sft quickstart.yaml --seed 1
    loopdropout recipes

A recipe is a YAML file of yours, or one that `loopdropout recipes` lists. On several GPUs, `accelerate launch -m
loopdropout_trainer sft RECIPE.yaml` runs the same command in each process.
"""

from __future__ import annotations

import ast
import platform
import re
import runpy
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from loopdropout_trainer.errors import UserError, closest_match, run_script
from loopdropout_trainer.files import describe_version, recipe_hint, recipe_names, recipes_folder


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
    print(f"  {'recipes':<10} List the recipes of the package, or print one by its name.")


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


def print_recipes() -> None:
    """Print the recipes of the package by command, each with the first sentence of its comments. The quickstart is first."""
    by_command: dict[str, list[str]] = {"sft": []}
    for name in sorted(recipe_names(), key=lambda name: (name != "quickstart.yaml", name)):
        text = (recipes_folder() / name).read_text(encoding="utf-8")
        line = f"{name:<48} {find_description(text)}".rstrip()
        by_command.setdefault(command_of(name, text), []).append(line)
    for command, lines in by_command.items():
        print(command if command.startswith("accelerate") else f"loopdropout {command}")
        for line in lines:
            print(f"  {line}")


def print_recipe(name: str) -> None:
    """Print a recipe of the package, whose name may leave out `.yaml`.

    Raises:
        UserError: If there is no such recipe.
    """
    names = recipe_names()
    for found in (name, f"{name}.yaml"):
        if found in names:
            print((recipes_folder() / found).read_text(encoding="utf-8"), end="")
            return
    raise UserError(f"The package has no recipe {name!r}.{recipe_hint(f'{name}.yaml')}")


def run(argv: list[str]) -> None:
    """Run a command line of `loopdropout`."""
    match argv:
        case [] | ["-h" | "--help"]:
            print_usage()
        case ["--version"]:
            print_versions()
        case ["recipes"] | ["recipes", "-h" | "--help"]:
            print_recipes()
        case ["recipes", name, *_]:
            print_recipe(name)
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
