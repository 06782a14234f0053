"""Whole checkpoints: sealed with a manifest after the last file is written, and checked against it before one is used.

A process can be killed, or a disk fill up, between any two files of a checkpoint. So the last file to appear, in one
atomic step and only when every process has written its own, is `manifest.json`: the size and SHA-256 of all others.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
from collections.abc import Collection
from pathlib import Path

from transformers.utils import logging


logger = logging.get_logger(__name__)

MANIFEST = "manifest.json"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or used, in one sentence."""


def seal_checkpoint(folder: str | Path) -> None:
    """Write the manifest of a finished checkpoint."""
    folder = Path(folder)
    files = {name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for name, file in _files(folder).items()}
    partial = folder / f"{MANIFEST}.partial"
    with partial.open("w", encoding="utf-8") as out:
        json.dump({"files": files}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    os.replace(partial, folder / MANIFEST)


def unseal_checkpoint(folder: str | Path) -> None:
    """Take the manifest away before a checkpoint of the same name is written again."""
    (Path(folder) / MANIFEST).unlink(missing_ok=True)


def why_broken(folder: str | Path, sealed: bool = True) -> str | None:
    """Return what is wrong with a checkpoint, as the end of a sentence, or None if it is whole.

    Args:
        folder: of the checkpoint.
        sealed: whether it must have a manifest. False, for one that another program wrote: JSON and safetensors files are
            checked against what they say about themselves.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return "it does not exist"
    manifest = folder / MANIFEST
    if not manifest.exists():
        return f"it has no {MANIFEST}: saving it was interrupted" if sealed else _why_malformed(folder)
    try:
        expected = json.loads(manifest.read_text(encoding="utf-8"))["files"]
    except (ValueError, KeyError, OSError):
        return f"its {MANIFEST} cannot be read"
    for name, facts in expected.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != facts["bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {facts['bytes']}"
        if _sha256(file) != facts["sha256"]:
            return f"{name} has changed since it was written"
    return _why_not_resumable(folder)


def newest_whole_checkpoint(output_dir: str | Path) -> Path | None:
    """Return the newest checkpoint of a run that is whole, or None; each newer one that is not is logged with the reason."""
    for folder in reversed(_checkpoints(output_dir)):
        reason = why_broken(folder)
        if reason is None:
            return folder
        logger.warning(f"Passing over {folder}: {reason}.")
    return None


def rotate_checkpoints(output_dir: str | Path, limit: int | None, keep: Collection[str | Path]) -> None:
    """Delete checkpoints until `limit` are left: first those that were never finished, then the oldest.

    transformers' own rotation may keep an unfinished checkpoint of a later step and delete the one just written.

    Args:
        output_dir: of the run.
        limit: None or 0: delete nothing.
        keep: never deleted: the checkpoint just written, and the best one.
    """
    if not limit:
        return
    kept = {Path(folder).resolve() for folder in keep}
    folders = sorted(_checkpoints(output_dir), key=lambda folder: (folder / MANIFEST).exists())
    excess = len(folders) - limit
    for folder in [folder for folder in folders if folder.resolve() not in kept][: max(excess, 0)]:
        unseal_checkpoint(folder)  # killed half-way through, it is not mistaken for a whole one
        shutil.rmtree(folder, ignore_errors=True)


def _checkpoints(output_dir: str | Path) -> list[Path]:
    """Return the folders `checkpoint-<step>`, by step."""
    steps = {
        folder: re.fullmatch(r"checkpoint-(\d+)", folder.name) for folder in Path(output_dir).glob("checkpoint-*")
    }
    return sorted(
        (folder for folder, step in steps.items() if step and folder.is_dir()),
        key=lambda folder: int(steps[folder][1]),
    )


def _files(folder: Path) -> dict[str, Path]:
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {file.relative_to(folder).as_posix(): file for file in files if not file.name.startswith(MANIFEST)}


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _why_malformed(folder: Path) -> str | None:
    if not (folder / "trainer_state.json").is_file():
        return "trainer_state.json is missing"
    for name, file in _files(folder).items():
        try:
            if file.suffix == ".json":
                json.loads(file.read_text(encoding="utf-8"))
            elif file.suffix == ".safetensors":
                _check_safetensors(file)
        except (ValueError, KeyError, TypeError, struct.error, OSError) as error:
            return f"{name} is damaged ({error})"
    return _why_not_resumable(folder)


def _why_not_resumable(folder: Path) -> str | None:
    states = ("optimizer*", "global_step*")  # the second of DeepSpeed
    if not any(any(folder.glob(pattern)) for pattern in states):
        return "it holds no optimizer state, as `save_only_model` asks for, and a run cannot go on without"
    return None


def _check_safetensors(file: Path) -> None:
    """Raise ValueError unless the header of a safetensors file can be read and describes exactly the bytes that follow."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > file.stat().st_size:
            raise ValueError("its header is cut off")
        header = json.loads(stream.read(length))
    end = max((tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"), default=0)
    if 8 + length + end != file.stat().st_size:
        raise ValueError(f"it has {file.stat().st_size} bytes instead of {8 + length + end}")
