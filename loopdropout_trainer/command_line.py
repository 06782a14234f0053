"""The command `loopdropout`: every script of the recipes folder, and the recipes themselves, after a `pip install`.

    loopdropout sft quickstart.yaml --seed 1
    loopdropout recipes copy my_recipes

A script runs as `python recipes/NAME.py` would. On several GPUs `accelerate launch -m loopdropout_trainer sft RECIPE` is the
same command in every process.
"""

from __future__ import annotations

import ast
import runpy
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from loopdropout_trainer.settings.shipped import recipe_path, recipes_folder


USAGE = """usage: loopdropout COMMAND [RECIPE.yaml] [--field value ...]
       loopdropout COMMAND --help
       loopdropout recipes [copy FOLDER]
       loopdropout --version"""


def commands() -> dict[str, Path]:
    """Return the scripts that are commands by name; those that make what ships with the package are none."""
    scripts = sorted(recipes_folder().glob("*.py"))
    return {path.stem: path for path in scripts if not path.stem.startswith(("make_", "_"))}


def summary(script: Path) -> str:
    """Return the first line of a script's docstring, without running it."""
    return (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").split("\n")[0]


def run_script(script: Path, arguments: Sequence[str]) -> None:
    """Run a script of the recipes folder as the main program."""
    first, *rest = [*arguments, ""]
    if first and not first.startswith("-"):
        arguments = [recipe_path(first), *rest[:-1]]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))  # as `python SCRIPT` does
    runpy.run_path(str(script), run_name="__main__")


def list_recipes() -> None:
    """Print every shipped recipe, with the first sentence of its comment that is not a command."""
    folder = recipes_folder()
    for path in sorted(folder.rglob("*.yaml"), key=lambda path: (len(path.parts), path)):
        about = ""
        for line in path.read_text(encoding="utf-8").splitlines():
            text = line.lstrip("# ").strip()
            if not line.startswith("#"):
                break
            if text and not text.startswith(("accelerate ", "python ", "loopdropout ")):
                about = text.rstrip(":")
                break
        print(f"{path.relative_to(folder).as_posix():<48} {about}".rstrip())


def copy_recipes(destination: Path) -> None:
    """Copy scripts and recipes into a new folder.

    Raises:
        FileExistsError: if there is something of that name, which is left as it is.
    """
    shutil.copytree(recipes_folder(), destination, ignore=shutil.ignore_patterns("__pycache__", "__init__.py"))


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    known = commands()
    match arguments:
        case [] | ["-h" | "--help" | "help", *_]:
            print(f"{__doc__}\n{USAGE}\n\ncommands:")
            for name, script in known.items():
                print(f"  {name:<10} {summary(script)}")
            print(f"  {'recipes':<10} List the recipes that ship with the package, or copy them with the scripts.")
        case ["--version", *_]:
            try:
                print(version("loopdropout-trainer"))
            except PackageNotFoundError:
                sys.exit("loopdropout: the package is not installed; it runs from its source folder.")
        case ["recipes"]:
            list_recipes()
        case ["recipes", "copy", destination]:
            try:
                copy_recipes(Path(destination))
            except OSError as error:
                print(f"loopdropout: cannot copy the recipes to {destination}: {error.strerror}.", file=sys.stderr)
                sys.exit(2)
            print(f"Scripts and recipes are in {destination}")
        case [name, *rest] if name in known:
            run_script(known[name], rest)
        case [name, *_]:
            valid = ", ".join([*known, "recipes"])
            print(f"loopdropout: there is no command `{' '.join(arguments[:3])}`; valid are {valid}.", file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    main()
