"""Sealed folders: a manifest is written after the last file, and checked before a checkpoint or a saved training is used.

A process can be killed, or a disk fill up, between any two files of a checkpoint. So the last file to appear, in one
atomic step and only when every process has written its own and all of it has reached the disk, is `manifest.json`: the
SHA-256 of all others, and the identity of the run that they belong to.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from huggingface_hub.dataclasses import type_validator
from transformers.utils import logging

from loopdropout_trainer.record.identity import WHOLE_RUN, Identity, continues, differences, read_identity
from loopdropout_trainer.saving.adapter_files import ADAPTER_METADATA
from loopdropout_trainer.saving.files import PARTIAL, flush_to_disk, read_json, sha256, write_json


logger = logging.get_logger(__name__)

MANIFEST = "manifest.json"
OURS = (MANIFEST, ADAPTER_METADATA, PARTIAL)  # one of them lies beside what a run has saved, or was about to


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or used, or a folder of another run, in one sentence."""


def seal(folder: str | Path, run: Identity | None = None, names: Iterable[str | Path] | None = None) -> None:
    """Write the manifest of a folder whose files are complete.

    Args:
        folder: a checkpoint, or a run's `output_dir` with its trained adapter.
        run: identity of the run.
        names: of the files that belong to it; default: all that are there.
    """
    folder = Path(folder)
    paths = sorted(folder.rglob("*") if names is None else map(folder.joinpath, names))
    files = [path for path in paths if path.is_file() and not path.name.startswith(MANIFEST)]
    for path in (*files, *{file.parent for file in files}):
        flush_to_disk(path)
    hashes = {file.relative_to(folder).as_posix(): sha256(file) for file in files}
    write_json(folder / MANIFEST, {"run": run, "files": hashes})


def unseal(folder: str | Path) -> None:
    """Take the manifest away before files of a folder are written again."""
    (Path(folder) / MANIFEST).unlink(missing_ok=True)


def run_of(folder: str | Path) -> Identity | None:
    """Return the identity of the run that a folder was sealed by, or None if it is not known.

    Raises:
        CheckpointError: if another version of this package has written it.
    """
    try:
        run, _ = _read_manifest(Path(folder))
    except _UNREADABLE:
        return None
    try:
        return None if run is None else read_identity(run)
    except ValueError as error:
        advice = "go on with the version that it was started with, or choose another `output_dir`"
        raise CheckpointError(f"{Path(folder) / MANIFEST} {error}: {advice}.") from None


def is_sealed(folder: str | Path, name: str) -> bool:
    """Return whether a file is the one that its folder was sealed with."""
    folder = Path(folder)
    try:
        return sha256(folder / name) == _read_manifest(folder)[1][name]
    except _UNREADABLE:
        return False


_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)  # what a file of another form raises


def _read_manifest(folder: Path) -> tuple[Identity | None, dict[str, str]]:
    """Return the identity of the run, if it is known, and the hash of each file; one of `_UNREADABLE` for another form."""
    manifest = read_json(folder / MANIFEST)
    run, hashes = manifest.get("run"), manifest["files"]
    type_validator("files", hashes, dict[str, str])
    type_validator("run", run, dict[str, dict] | None)
    type_validator("length", (run or {}).get("length", {}), dict[str, int | float | None])
    return run, hashes


def fault_of(folder: str | Path, sealed: bool = True) -> str | None:
    """Return what is wrong with a sealed folder, as the end of a sentence, or None if it is complete.

    Args:
        folder: a checkpoint, or a run's `output_dir`.
        sealed: whether it must have a manifest; False for a checkpoint that another program wrote.
    """
    folder = Path(folder)
    manifest = folder / MANIFEST
    if not folder.is_dir():
        return "it does not exist"
    if not manifest.exists():
        return f"it has no {MANIFEST}: saving it was interrupted" if sealed else None
    try:
        for name, digest in _read_manifest(folder)[1].items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if sha256(folder / name) != digest:
                return f"{name} has changed since it was written"
    except _UNREADABLE:
        return f"its {MANIFEST} cannot be read"
    return None


def fault_of_checkpoint(folder: str | Path, sealed: bool = True) -> str | None:
    """Return why a run cannot be resumed from a folder, as the end of a sentence, or None if it can."""
    folder = Path(folder)
    if fault := fault_of(folder, sealed):
        return fault
    if not [*folder.glob("optimizer*"), *folder.glob("global_step*")]:  # the second is DeepSpeed's
        return "it holds no optimizer state, as `save_only_model` asks for, and a run cannot go on without"
    return None if (folder / "trainer_state.json").is_file() else "trainer_state.json is missing"


def newest_complete_checkpoint(output_dir: str | Path, run: Identity | None = None) -> Path | None:
    """Return the newest complete checkpoint of a run, or None; each newer one that is passed over is logged with the reason.

    Args:
        output_dir: of the run.
        run: its identity; None: checkpoints of any run.
    """
    for folder in reversed(checkpoints(output_dir)):
        own = run_of(folder)
        if continues(own, run):
            fault = fault_of_checkpoint(folder)
        else:
            fault = f"it belongs to another run ({', '.join(map(str, differences(own, run, WHOLE_RUN)))})"
        if fault is None:
            return folder
        logger.warning(f"Passing over {folder}: {fault}.")
    return None


def rotate(output_dir: str | Path, limit: int | None, keep: Collection[str | Path], run: Identity) -> None:
    """Delete checkpoints of a run until `limit` (if any) are left: first those that were never finished, then the oldest.

    transformers' own rotation keeps the one of the latest step, which may be unfinished or of changed settings, and deletes
    the one just written. Those of other settings are neither counted nor deleted here, nor are those in `keep` deleted.
    """
    kept = {Path(folder).resolve() for folder in keep}
    folders = [folder for folder in checkpoints(output_dir) if continues(run_of(folder), run)]
    excess = max(len(folders) - limit, 0) if limit else 0
    deletable = [folder for folder in folders if folder.resolve() not in kept]
    deletable.sort(key=lambda folder: (folder / MANIFEST).exists())
    for folder in deletable[:excess]:
        unseal(folder)  # killed half-way through, it is not mistaken for a complete one
        shutil.rmtree(folder, ignore_errors=True)


def checkpoints(output_dir: str | Path) -> list[Path]:
    """Return the folders `checkpoint-<step>`, by step."""
    steps = {}
    for folder in Path(output_dir).glob("checkpoint-*"):
        step = folder.name.removeprefix("checkpoint-")
        if folder.is_dir() and step.isdecimal():
            steps[folder] = int(step)
    return sorted(steps, key=steps.get)
