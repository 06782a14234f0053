"""The command `loopdropout`, which runs the scripts of the recipes folder from any folder.

    loopdropout sft quickstart.yaml --seed 1
    loopdropout recipes

A recipe is a YAML file of yours, or one that `loopdropout recipes` lists. On several GPUs, `accelerate launch -m
loopdropout_trainer sft RECIPE.yaml` runs the same command in each process.
"""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

from loopdropout_trainer import __version__
from loopdropout_trainer.errors import UserError, closest_match, run_script
from loopdropout_trainer.files import recipe_names, recipes_folder


def scripts() -> dict[str, Path]:
    """Return the scripts that are commands by name."""
    paths = sorted(recipes_folder().glob("*.py"))
    return {path.stem: path for path in paths if not path.stem.startswith(("make_", "_"))}


def print_usage() -> None:
    """Print the commands with the first lines of their docstrings."""
    print(f"{__doc__}\ncommands:")
    for name, script in scripts().items():
        print(f"  {name:<10} {ast.get_docstring(ast.parse(script.read_bytes())).splitlines()[0]}")
    print(f"  {'recipes':<10} List the recipes of the package.")


def print_recipes() -> None:
    """Print the recipes of the package with the first sentence of their comments."""
    for name in recipe_names():
        text = (recipes_folder() / name).read_text(encoding="utf-8")
        comment = re.search(r"^# *(?!accelerate |python |loopdropout |pip )(\S.*)", text, re.MULTILINE)
        print(f"{name:<48} {comment[1] if comment else ''}".rstrip())


def run(argv: list[str]) -> None:
    """Run a command line of `loopdropout`."""
    match argv:
        case [] | ["-h" | "--help"]:
            print_usage()
        case ["--version"]:
            print(__version__)
        case ["recipes", *_]:
            print_recipes()
        case [name, *arguments] if name in scripts():
            script = scripts()[name]
            sys.argv = [str(script), *arguments]
            sys.path.append(str(script.parent))  # scripts import one another
            runpy.run_path(str(script), run_name="__main__")
        case [name, *_]:
            raise UserError(f"Unknown command {name!r}.{closest_match(name, [*scripts(), 'recipes'])} See --help.")


def main() -> None:
    """Run the command line of this process."""
    run_script(lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    main()
