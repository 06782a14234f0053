"""Whole checkpoints: sealed with a manifest after the last file is written, and checked against it before one is used.

A process can be killed, or a disk fill up, between any two files of a checkpoint. So the last file to appear, in one
atomic step and only when every process has written its own and all of it has reached the disk, is `manifest.json`: the
size and SHA-256 of all others, and the identity of the run that they belong to.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers.utils import logging

from loopdropout_trainer.saving.files import check_safetensors, flush_to_disk, sha256, write_atomically
from loopdropout_trainer.training.identity import differences


logger = logging.get_logger(__name__)

MANIFEST = "manifest.json"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or used, in one sentence."""


def seal_checkpoint(folder: str | Path, run: Mapping[str, Any] | None = None) -> None:
    """Write the manifest of a finished checkpoint.

    Args:
        folder: of the checkpoint.
        run: identity of its run (`run_identity`).
    """
    folder = Path(folder)
    files = _files(folder)
    for file in files.values():
        flush_to_disk(file)
    for inner in {file.parent for file in files.values()}:
        flush_to_disk(inner)
    facts = {name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for name, file in files.items()}
    write_atomically(folder / MANIFEST, json.dumps({"run": run, "files": facts}, indent=1))


def unseal_checkpoint(folder: str | Path) -> None:
    """Take the manifest away before a checkpoint of the same name is written again."""
    (Path(folder) / MANIFEST).unlink(missing_ok=True)


def run_of(folder: str | Path) -> dict[str, Any] | None:
    """Return the identity of the run that a checkpoint belongs to, or None if it is not known."""
    try:
        return json.loads((Path(folder) / MANIFEST).read_text(encoding="utf-8")).get("run")
    except (OSError, ValueError, AttributeError):
        return None


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
        expected = json.loads(manifest.read_text(encoding="utf-8"))["files"].items()
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return f"its {MANIFEST} cannot be read"
    for name, facts in expected:
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != facts["bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {facts['bytes']}"
        if sha256(file) != facts["sha256"]:
            return f"{name} has changed since it was written"
    return _why_not_resumable(folder)


def newest_whole_checkpoint(output_dir: str | Path, run: Mapping[str, Any] | None = None) -> Path | None:
    """Return the newest checkpoint of a run that is whole, or None; each newer one that is not is logged with the reason.

    Args:
        output_dir: of the run.
        run: its identity; None: checkpoints of any run.
    """
    return next(whole_checkpoints(output_dir, run), None)


def whole_checkpoints(output_dir: str | Path, run: Mapping[str, Any] | None = None) -> Iterator[Path]:
    """Yield the whole checkpoints of a run, the newest first; what is passed over is logged with the reason."""
    for folder in reversed(_checkpoints(output_dir)):
        reason = _why_of_another_run(folder, run) or why_broken(folder)
        if reason is None:
            yield folder
        else:
            logger.warning(f"Passing over {folder}: {reason}.")


def rotate_checkpoints(
    output_dir: str | Path, limit: int | None, keep: Collection[str | Path], run: Mapping[str, Any] | None = None
) -> None:
    """Delete checkpoints until `limit` are left: first those that were never finished, then the oldest.

    transformers' own rotation may keep an unfinished checkpoint of a later step and delete the one just written. Those of
    another run are neither counted nor deleted.

    Args:
        output_dir: of the run.
        limit: None or 0: delete nothing.
        keep: never deleted: the checkpoint just written, and the best one.
        run: identity of the run.
    """
    if not limit:
        return
    kept = {Path(folder).resolve() for folder in keep}
    folders = [folder for folder in _checkpoints(output_dir) if _why_of_another_run(folder, run) is None]
    folders.sort(key=lambda folder: (folder / MANIFEST).exists())
    excess = len(folders) - limit
    for folder in [folder for folder in folders if folder.resolve() not in kept][: max(excess, 0)]:
        unseal_checkpoint(folder)  # killed half-way through, it is not mistaken for a whole one
        shutil.rmtree(folder, ignore_errors=True)


def _why_of_another_run(folder: Path, run: Mapping[str, Any] | None) -> str | None:
    changed = differences(run_of(folder), run)
    return f"it belongs to another run ({', '.join(changed)})" if changed else None


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


def _why_malformed(folder: Path) -> str | None:
    if not (folder / "trainer_state.json").is_file():
        return "trainer_state.json is missing"
    for name, file in _files(folder).items():
        try:
            if file.suffix == ".json":
                json.loads(file.read_text(encoding="utf-8"))
            elif file.suffix == ".safetensors":
                check_safetensors(file)
        except (ValueError, OSError) as error:
            return f"{name} is damaged ({error})"
    return _why_not_resumable(folder)


def _why_not_resumable(folder: Path) -> str | None:
    states = ("optimizer*", "global_step*")  # the second of DeepSpeed
    if not any(any(folder.glob(pattern)) for pattern in states):
        return "it holds no optimizer state, as `save_only_model` asks for, and a run cannot go on without"
    return None
