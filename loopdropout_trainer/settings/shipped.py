"""Where the scripts and recipes that ship with the package are: inside an installed package, beside it in a clone."""

from __future__ import annotations

from pathlib import Path


PACKAGE = Path(__file__).parents[1]


def recipes_folder() -> Path:
    """Return the folder of scripts and recipes."""
    installed = PACKAGE / "recipes"
    return installed if installed.is_dir() else PACKAGE.parent / "recipes"


def recipe_path(name: str) -> str:
    """Return the path of a recipe: a file of the user's, or one that ships with the package, with or without `recipes/`."""
    shipped = recipes_folder() / name.removeprefix("recipes/")
    return name if Path(name).exists() or not shipped.is_file() else str(shipped)
