"""The command `loopdropout`: every script of the recipes folder, and the recipes themselves, after a `pip install`.

    loopdropout sft quickstart.yaml --seed 1
    loopdropout recipes copy my_recipes

A script runs as `python recipes/NAME.py` would. On several GPUs `accelerate launch -m loopdropout_trainer sft RECIPE` is the
same command in every process.
"""

from __future__ import annotations

import ast
import re
import runpy
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from loopdropout_trainer.errors import SetupError, run_command
from loopdropout_trainer.settings.recipe import recipes_folder
from loopdropout_trainer.startup import announce


USAGE = """usage: loopdropout COMMAND [RECIPE.yaml] [--field value ...]
       loopdropout COMMAND --help
       loopdropout recipes [copy FOLDER]
       loopdropout --version

completion of commands and recipes, in bash:
       complete -W "$(loopdropout --words)" loopdropout"""


def commands() -> dict[str, Path]:
    """Return the scripts that are commands by name; those that make what ships with the package are none."""
    scripts = sorted(recipes_folder().glob("*.py"))
    return {path.stem: path for path in scripts if not path.stem.startswith(("make_", "_"))}


def summary(script: Path) -> str:
    """Return the first line of a script's docstring, without running it."""
    return ast.get_docstring(ast.parse(script.read_bytes())).split("\n")[0]


def run_script(script: Path, arguments: Sequence[str]) -> None:
    """Run a script of the recipes folder with a command line."""
    announce(script)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))  # as `python SCRIPT` does
    runpy.run_path(str(script), run_name="__main__")


def recipe_names() -> list[str]:
    """Return the path of every shipped recipe in their folder, those at the top first."""
    folder = recipes_folder()
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*.yaml")]
    return sorted(names, key=lambda name: (name.count("/"), name))


def list_recipes() -> None:
    """Print every shipped recipe, with the first line of its comment that is not a command."""
    for name in recipe_names():
        header = (recipes_folder() / name).read_text(encoding="utf-8").split("\n\n")[0]
        texts = re.findall(r"^# *(?!accelerate |python |loopdropout |pip )(\S.*)", header, re.MULTILINE)
        print(f"{name:<48} {''.join(texts[:1]).rstrip(' :')}".rstrip())


def copy_recipes(destination: Path) -> None:
    """Copy scripts and recipes into a new folder; something of that name is left as it is, with SetupError."""
    try:
        shutil.copytree(recipes_folder(), destination, ignore=shutil.ignore_patterns("__pycache__", "__init__.py"))
    except OSError as error:
        raise SetupError(f"Cannot copy the recipes to {destination}: {error.strerror}.") from error
    print(f"Scripts and recipes are in {destination}")


def run(arguments: Sequence[str]) -> None:
    """Do what a command line asks for; an unknown command raises SetupError."""
    scripts = commands()
    match arguments:
        case [] | ["-h" | "--help" | "help", *_]:
            print(f"{__doc__}\n{USAGE}\n\ncommands:")
            for name, script in scripts.items():
                print(f"  {name:<10} {summary(script)}")
            print(f"  {'recipes':<10} List the recipes that ship with the package, or copy them with the scripts.")
        case ["--version", *_]:
            print(version("loopdropout-trainer"))
        case ["--words"]:
            print(*scripts, "recipes", *recipe_names())
        case ["recipes"]:
            list_recipes()
        case ["recipes", "copy", destination]:
            copy_recipes(Path(destination))
        case [name, *rest] if name in scripts:
            run_script(scripts[name], rest)
        case _:
            valid = ", ".join([*scripts, "recipes"])
            raise SetupError(f"There is no command `{' '.join(arguments[:3])}`; valid are {valid}.")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command `loopdropout`; user errors end the process with one sentence."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    is_script = bool(arguments) and arguments[0] in commands()
    run_command(lambda: run(arguments), f"loopdropout {arguments[0]}" if is_script else "loopdropout")


if __name__ == "__main__":
    main()
