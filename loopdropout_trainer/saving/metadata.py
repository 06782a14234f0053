"""The settings of a training that later commands need, in `loop_dropout.json` next to its adapter and its merged model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loopdropout_trainer.errors import UserError, check_type, short_repr
from loopdropout_trainer.files import read_json_object, write_file


METADATA_FILE = "loop_dropout.json"
METADATA_VERSION = 1
"""Version of the fields of `METADATA_FILE`. A file without a version is older than version 1."""

MERGED_FOLDER = "merged"
"""Folder in that of an adapter with its merged model, unless the user names another one."""

_TYPES = {
    "version": int | None,
    "kind": str | None,
    "rule": str | None,
    "num_loops": int | None,
    "depths": list[int] | None,
    "eos_token_id": list[int] | None,
    "prompt_template": str | None,
    "is_chat": bool | None,
    "has_plain_texts": bool | None,
    "system_turn": str | None,
    "has_system_turns": bool | None,
    "base_model": str | None,
    "base_revision": str | None,
    "base_weights": str | None,
    "dtype": str | None,
    "quantization": dict[str, Any] | None,
    "training_id": str | None,
    "training_data": str | None,
    "initial_adapter": str | None,
    "earlier_trainings": list[str] | None,
    "method": str | None,
    "objective": str | None,
    "learning_rate": int | float | None,
    "seed": int | None,
    "step": int | None,
    "stopped": str | None,
    "p": int | float | list[int | float] | None,
    "own_loop": dict[str, Any] | None,
}
"""Types of the fields that commands read."""

_DTYPES = ("bfloat16", "float16", "float32", "float64")


def read_metadata(folder: Path) -> dict[str, Any]:
    """Return the settings that were saved with an adapter or a merged model; an empty dict if there are none.

    Raises:
        UserError: If the file is damaged, or a newer release of this package wrote it.
    """
    path = folder / METADATA_FILE
    if not path.is_file():
        return {}
    metadata = read_json_object(path)
    version = metadata.get("version") or 0
    check_type(f"`version` in {path}", version, int)
    if version > METADATA_VERSION:
        raise UserError(
            f"{path} has version {version}, but this release reads versions up to {METADATA_VERSION}. Update the package."
        )
    for name, hint in _TYPES.items():
        check_type(f"`{name}` in {path}", metadata.get(name), hint)
    if metadata.get("depths") == []:
        raise UserError(f"`depths` in {path} must have at least one depth.")
    if metadata.get("dtype") not in (None, *_DTYPES):
        raise UserError(f"`dtype` in {path} must be one of {', '.join(_DTYPES)}, got {short_repr(metadata['dtype'])}.")
    return metadata


def describe_system_turn(metadata: Mapping[str, Any]) -> str:
    """Return a sentence about the system turn of the conversations of a training, or "" if they have none."""
    if text := metadata.get("system_turn"):
        return f"The training data had the system turn {short_repr(text)}."
    if metadata.get("has_system_turns"):
        return "Some conversations of the training data had a system turn."
    return ""


def describe_plain_texts(metadata: Mapping[str, Any]) -> str:
    """Return a sentence about the plain texts of a training on conversations and texts, or "" for other trainings."""
    if not metadata.get("has_plain_texts"):
        return ""
    return "The training data also had plain texts, such as pairs of a prompt and a completion, without the chat template."


def write_metadata(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Write the settings of a training next to its adapter or merged model."""
    write_file(folder / METADATA_FILE, json.dumps({"version": METADATA_VERSION, **metadata}, indent=1) + "\n")
