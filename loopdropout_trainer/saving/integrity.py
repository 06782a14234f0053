"""Decide if the files of a checkpoint, an adapter or a model are complete and undamaged, by digests that are saved with them.

`checksums.json` in the folder has a digest of each file. It is empty while the files are written. Its digests come last, after
the files have reached the disk, so they also tell that a power failure did not cut the save short. A folder of another program
has no such file, and nothing is known about it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from loopdropout_trainer.errors import UserError, find_write_error, short_repr
from loopdropout_trainer.files import check_links, parse_json, read_json_object, read_text, sync_files, write_file
from loopdropout_trainer.saving.saved_adapter import adapter_folder


logger = logging.getLogger(__name__)

CHECKSUMS_FILE = "checksums.json"

_ADAPTER_FILES = ("*.safetensors", "adapter_config.json", "loop_dropout.json", "*token*", "chat_template.jinja")
"""Files of an adapter in the folder of a run, which holds other files, too."""

MODEL_FILES = ("*.safetensors", "*.json", "*token*", "chat_template.jinja", "*.py")
"""Files of a merged model, which may stand next to results of its evaluation."""

_EDITABLE = (
    "adapter_config.json",
    "loop_dropout.json",
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
"""Files that people edit, for example to name another folder of the base model."""

_UNRECORDED = ("README.md", CHECKSUMS_FILE)

_MODEL_WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")
"""Weights of a whole model, in one file or in several with their index. A loader reads the one file first."""


@contextmanager
def saving(folder: str | Path, patterns: Iterable[str] = ("**/*",)) -> Iterator[None]:
    """Write the files of a folder inside the block. It is complete only if the block ends without an error.

    Args:
        folder: Folder of a checkpoint, an adapter or a model.
        patterns: Patterns of its files, relative to it.

    Raises:
        UserError: If the folder cannot be written, or the disk is full.
    """
    with _explain_write_errors(folder):
        begin(folder)
        yield
        record(folder, patterns)


@contextmanager
def replacing_model(folder: str | Path) -> Iterator[Path]:
    """Yield a new folder for the files of a model, which replace those of a former model only after the block.

    If the block raises an exception or is interrupted, the former model stays. The disk must have space for both.

    Args:
        folder: Folder of the model, which may hold other files, too.

    Raises:
        UserError: If the folder cannot be written, or the disk is full.
    """
    folder = Path(folder)
    new = folder / f".new.{os.getpid()}"  # on the same disk, and with a name in `TEMPORARY_FILES`
    with _explain_write_errors(folder):
        check_links(folder)
        for left in folder.glob(".new.[0-9]*"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        try:
            begin(new)
            yield new
            record(new, MODEL_FILES)
            _move_model(new, folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def _move_model(new: Path, folder: Path) -> None:
    """Move the files of a complete model into another folder, in place of the model there."""
    begin(folder)
    files = [path for path in new.rglob("*") if path.is_file() and path.name != CHECKSUMS_FILE]
    former = {path for pattern in _MODEL_WEIGHTS for path in folder.glob(pattern)}
    moved = [folder / path.relative_to(new) for path in files]
    for path in former.difference(moved):
        path.unlink()
    for path, target in zip(files, moved, strict=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)
    sync_files(moved)
    write_file(folder / CHECKSUMS_FILE, read_text(new / CHECKSUMS_FILE))


@contextmanager
def _explain_write_errors(folder: str | Path) -> Iterator[None]:
    """Raise UserError if a folder cannot be written inside the block."""
    try:
        yield
    except Exception as error:
        reason = find_write_error(error)
        if reason is None:
            raise
        raise UserError(f"The folder {folder} cannot be written: {reason}.") from error


def adapter_patterns(adapters: Iterable[str] = ()) -> list[str]:
    """Return the patterns of the files of adapters in the folder of a run, relative to it. `default` is one of them."""
    folders = [adapter_folder(".", adapter) for adapter in ("default", *adapters)]
    return [(folder / pattern).as_posix() for folder in dict.fromkeys(folders) for pattern in _ADAPTER_FILES]


def begin(folder: str | Path) -> None:
    """Mark a folder as incomplete, before its first file is written or replaced.

    Raises:
        UserError: If a link in the folder leaves it.
    """
    check_links(folder)
    write_file(Path(folder, CHECKSUMS_FILE), "{}\n")


def record(folder: str | Path, patterns: Iterable[str] = ("**/*",)) -> None:
    """Mark a folder as complete: bring its files to the disk, and then write their digests.

    Args:
        folder: Folder whose files are written.
        patterns: Patterns of the files, relative to the folder.
    """
    folder = Path(folder)
    found = {path for pattern in patterns for path in folder.glob(pattern)}
    files = sorted(path for path in found if path.is_file() and path.name not in _UNRECORDED)
    sync_files(files)
    digests = {path.relative_to(folder).as_posix(): _digest(path) for path in files}
    write_file(folder / CHECKSUMS_FILE, json.dumps({"xxh3_128": digests}, indent=1) + "\n")


def is_saved(folder: str | Path) -> bool:
    """Return whether a folder holds files that this package has saved, or has begun to save."""
    return Path(folder, CHECKSUMS_FILE).exists()


def find_damage(folder: str | Path) -> str | None:
    """Return why the files in a folder must not be used, as the end of a sentence about it, such as "has a damaged x.pt".

    Returns:
        The fault, or None for an undamaged folder, and for a folder without digests.
    """
    folder = Path(folder)
    try:
        digests = _read_digests(folder)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return f"has a damaged {CHECKSUMS_FILE}"
    if not digests:
        return "was not saved completely"
    for name, digest in digests.items():
        path = folder / name
        try:
            if path.exists() and not path.is_file():  # a pipe or a device, which may never end
                return f"has a {name} that is not a file"
            is_same = _digest(path) == digest
        except FileNotFoundError:
            return f"has no {name}, which was saved with it"
        except (OSError, ValueError):  # of a broken disk, or a name that no file has
            return f"has an unreadable {short_repr(name)}"
        if not is_same and not _is_edited(path):
            return f"has a damaged {name}"
    return None


def check(folder: str | Path) -> None:
    """Raise UserError if the files in a folder are incomplete or damaged."""
    if fault := find_damage(folder):
        raise UserError(f"The folder {folder} {fault}. Save it again, or restore it from a copy.")


def _read_digests(folder: Path) -> dict[str, str]:
    """Return the digests of files by name. They are empty if the files are still being written."""
    digests = read_json_object(folder / CHECKSUMS_FILE).get("xxh3_128", {})
    if not isinstance(digests, dict):
        raise ValueError(f"{CHECKSUMS_FILE} has no digests.")
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in digests):
        raise ValueError(f"{CHECKSUMS_FILE} names files outside of its folder.")
    return digests


def _digest(path: Path) -> str:
    """Return the digest of a file, which is read in pieces of 4 MiB."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def _is_edited(path: Path) -> bool:
    """Return whether a changed file is a text that somebody may have edited, and not a damaged one. It is logged then."""
    if path.name not in _EDITABLE:
        return False
    try:
        text = read_text(path)
        if path.suffix == ".json":
            parse_json(text)
    except ValueError:
        return False
    if not text.strip() or "\0" in text:
        return False
    logger.warning("%s has been edited since it was saved.", path)
    return True
