"""Paths of the package's own files, and writing that a reader never sees half done."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


PACKAGE = Path(__file__).parent

TINY_OURO_PATH = PACKAGE / "tiny_ouro"
"""A small pretrained Ouro with its tokenizer, for trials without a network. Its name is `tiny-ouro`."""


def model_path(name: Any) -> Any:
    """Return the folder of the model `tiny-ouro`, and other names unchanged."""
    return str(TINY_OURO_PATH) if name == "tiny-ouro" else name


def recipes_folder() -> Path:
    """Return the folder of the scripts and recipes: inside an installed package, or next to it in a clone."""
    installed = PACKAGE / "recipes"
    return installed if installed.is_dir() else PACKAGE.parent / "recipes"


def recipe_names() -> list[str]:
    """Return the names of the package's recipes, such as `gsm8k/lora.yaml`."""
    folder = recipes_folder()
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.yaml"))


def write_file(path: Path, text: str) -> None:
    """Replace a file in one step, so that interrupted writes and other processes never see a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
