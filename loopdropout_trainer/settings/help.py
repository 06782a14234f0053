"""The help page of a script: the fields of its dataclasses in groups."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from loopdropout_trainer.bounds import Bounds
from loopdropout_trainer.settings.fields import default_of, metadata_of


GROUPS = ("Model", "Data", "Method", "Adapter", "Training")
"""Titles of the first groups. A class has its title as `help_title`. The fields of TRL's classes are in `Training`."""

_INDENT = 26

_EPILOG = """Trainings take all fields of TRL's configuration, too. `--field null` resets an
inherited field. `--import FILE ...` first runs Python files, which can register
rules, models and rewards, and allows task files of lm-eval."""


def print_help(dataclass_types: Sequence[type], description: str | None, first_words: str) -> None:
    """Print the help page of a script.

    Args:
        dataclass_types: Dataclasses with the fields of the script.
        description: Text at the top.
        first_words: Words of the command line before the fields, such as `[RECIPE.yaml]`.
    """
    width = min(shutil.get_terminal_size().columns - 2, 118)
    groups: dict[str, list[str]] = {title: [] for title in GROUPS}
    for cls in dataclass_types:
        trl_class = getattr(cls, "trl_class", None)
        inherited = {field.name for field in dataclasses.fields(trl_class)} if trl_class else set()
        own_title = getattr(cls, "help_title", cls.__doc__.split(".")[0])
        for field in dataclasses.fields(cls):
            is_own = field.name not in inherited
            text = describe(field)
            if text is None:
                continue
            head = f"  --{field.name} ".ljust(_INDENT)
            lines = textwrap.wrap(head + text, width, subsequent_indent=" " * _INDENT, break_on_hyphens=False)
            title = own_title if is_own else "Training"
            groups.setdefault(field.metadata.get("group", title), []).extend(lines)
    print(f"usage: loopdropout {Path(sys.argv[0]).stem} {first_words} [--field value ...]")
    print(f"\n{(description or '').strip()}")
    for title, lines in groups.items():
        if lines:
            print("", f"{title}:", *lines, sep="\n")
    print("", _EPILOG, sep="\n")


def describe(field: dataclasses.Field) -> str | None:
    """Return a field's help with its choices, bounds and default, or None if the page leaves it out."""
    metadata = metadata_of(field)
    text = metadata.get("help")
    if text is None:
        return None
    parts = [text or field.metadata["help"].replace("%%", "%")]  # "" stands for the library's text
    choices = [str(choice) for choice in field.metadata.get("choices") or () if choice]
    if choices:
        parts.append(f"One of {', '.join(choices)}.")
    if metadata["bounds"] != Bounds():
        bounds = str(metadata["bounds"])
        parts.append(f"{bounds[0].upper()}{bounds[1:]}.")
    default = default_of(field)
    if default not in (None, [], ""):
        parts.append(f"(default: {default})")
    return " ".join(parts)
