"""The hub's own modelling code behind a checkpoint: an `auto_map` that still finds it after the checkpoint moved.

A base model's `auto_map` names files that lie beside its own config.json. In a new repository they are not there: the
entries must then name the base's repository (`org/name--file.Class`), or the files must come along.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig


def is_hub_name(name: str | None) -> bool:
    """Say whether a model's name is one on the Hub (`user/model`), and no folder of this machine."""
    return name is not None and bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name)) and not Path(name).exists()


def portable_auto_map(config: PreTrainedConfig, base_model: str | None) -> dict[str, Any]:
    """Return the `auto_map` under which a copy of the checkpoint finds the base's code; empty if it cannot.

    Args:
        config: of the base model.
        base_model: its hub name, or the folder that it was loaded from.
    """
    entries = dict(getattr(config, "auto_map", None) or {})
    if is_hub_name(base_model):
        return {key: _prefixed(entry, base_model) for key, entry in entries.items()}
    folder = None if base_model is None else Path(base_model)
    return {
        key: entry
        for key, entry in entries.items()
        if all(folder is not None and (folder / file).is_file() for file in _own_files(entry))
    }


def copy_code(auto_map: dict[str, Any], base_model: str | None, output_dir: Path) -> None:
    """Copy the Python files of a local base model that the `auto_map` needs, and those beside them that they may import."""
    if base_model is not None and Path(base_model).is_dir() and any(map(_own_files, auto_map.values())):
        for file in Path(base_model).glob("*.py"):
            shutil.copy2(file, output_dir / file.name)


def _prefixed(entry: Any, repository: str) -> Any:
    if isinstance(entry, (list, tuple)):  # a slow and a fast tokenizer; one may be None
        return [_prefixed(each, repository) for each in entry]
    return entry if entry is None or "--" in entry else f"{repository}--{entry}"


def _own_files(entry: Any) -> list[str]:
    """Return the files beside the config that an entry needs; none where it names a repository."""
    if isinstance(entry, (list, tuple)):
        return [file for each in entry for file in _own_files(each)]
    return [] if entry is None or "--" in entry else [entry.rsplit(".", 1)[0].replace(".", "/") + ".py"]
