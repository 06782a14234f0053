"""Where the scripts and recipes that ship with the package are: inside an installed package, beside it in a clone."""

from __future__ import annotations

from pathlib import Path


PACKAGE = Path(__file__).parents[1]


def recipes_folder() -> Path:
    """Return the folder of scripts and recipes."""
    installed = PACKAGE / "recipes"
    return installed if installed.is_dir() else PACKAGE.parent / "recipes"


def recipe_path(name: str) -> str:
    """Return the path of a recipe: a file of the user's, or one that ships with the package.

    Args:
        name: a path; or a name as `loopdropout recipes` lists them, with or without `recipes/` before it. `./name.yaml` and
            an absolute path are the user's own file or none.
    """
    shipped = recipes_folder() / name.removeprefix("recipes/")
    is_name = not {"", ".", ".."} & set(name.split("/"))
    return str(shipped) if is_name and not Path(name).exists() and shipped.is_file() else name
