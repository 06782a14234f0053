"""Paths of the package's own files, writing that a reader never sees half done, and locks of folders."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout

from loopdropout_trainer.errors import UNWRITABLE, UserError, first_line, short_repr


PACKAGE = Path(__file__).parent

TINY_OURO_PATH = PACKAGE / "tiny_ouro"
"""A small pretrained Ouro with its tokenizer, for trials without a network. Its name is `tiny-ouro`."""


def model_path(name: Any) -> Any:
    """Return the folder of the model `tiny-ouro`, also for its folder in another installation, and other names unchanged."""
    is_elsewhere = (
        isinstance(name, str) and name.endswith("/loopdropout_trainer/tiny_ouro") and not Path(name).is_dir()
    )
    return str(TINY_OURO_PATH) if name == "tiny-ouro" or is_elsewhere else name


def checkpoint_step(folder: str | Path) -> int | None:
    """Return the step of a checkpoint by the name of its folder, `checkpoint-STEP`, or None for another folder."""
    match = re.fullmatch(r"checkpoint-(\d+)", Path(folder).name)
    return int(match[1]) if match else None


def is_checkpoint(folder: str | Path) -> bool:
    """Return whether a folder has the name of a checkpoint that a training wrote."""
    return checkpoint_step(folder) is not None


def recipes_folder() -> Path:
    """Return the folder of the scripts and recipes: inside an installed package, or next to it in a clone."""
    installed = PACKAGE / "recipes"
    return installed if installed.is_dir() else PACKAGE.parent / "recipes"


def recipe_names() -> list[str]:
    """Return the names of the package's recipes, such as `gsm8k/lora.yaml`."""
    folder = recipes_folder()
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.yaml"))


def write_file(path: Path, text: str) -> None:
    """Replace a file in one step, so that interrupted writes and other processes never see a part of it.

    Its content reaches the disk before its name, so that a power failure leaves the former file or the new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        _sync(temporary)
        temporary.replace(path)
    except OSError:  # such as a full disk
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def sync_files(files: Iterable[Path]) -> None:
    """Wait until files have reached the disk, with the folders that name them, so that a power failure cannot undo them."""
    files = list(files)
    folders = {parent for path in files for parent in (path.parent, path.parent.parent)}
    with ThreadPoolExecutor(8) as pool:  # the disk writes several files in about the time of one
        list(pool.map(_sync, files))
        list(pool.map(_sync, folders))


def _sync(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # another user's file, which this process has not written
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system without folders that can be synced
            raise
    finally:
        os.close(descriptor)


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        UserError: If the file does not hold a JSON object.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a JSON file ({first_line(error)}). Save it again.") from error
    if not isinstance(fields, dict):
        raise UserError(f"{path} must hold a JSON object, got {short_repr(fields)}. Save it again.")
    return fields


def check_links(folder: str | Path) -> None:
    """Raise UserError if a file or folder in a folder is a link that leaves it, because writing would change its target.

    Such a link may come from somebody else, for example in an archive. The folder itself may be a link.
    """
    root = os.path.realpath(folder)
    for parent, folders, files in os.walk(root):
        if "wandb" in folders:
            folders.remove("wandb")  # W&B itself links its logs, and this package writes nothing there
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
                raise UserError(
                    f"{path} must not be a link to {os.path.realpath(path)}, outside of the folder that is written. "
                    "Delete the link, or replace it by a copy."
                )


@contextmanager
def lock_folder(folder: str | Path) -> Iterator[None]:
    """Keep other processes out of a folder inside the block. A process can lock a folder several times.

    Raises:
        UserError: If another process has locked the folder, or a link leaves it.
    """
    path = Path(folder).resolve()
    path.mkdir(parents=True, exist_ok=True)
    check_links(path)
    lock = FileLock(lock_path(path, "folder"), timeout=1, thread_local=False, is_singleton=True)
    try:
        acquired = _acquire(lock)
    except Timeout:
        raise UserError(
            f"Another process writes to `output_dir` {folder}. Wait until it has finished, or set another `output_dir`."
        ) from None
    with acquired:
        yield


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Let one process at a time read a file and replace it by `write_file`. The others wait."""
    with _acquire(FileLock(lock_path(path.parent, path.name))):
        yield


def lock_path(folder: Path, name: str) -> Path:
    """Return the path of a lock in a folder, inside its `.cache/huggingface`, which uploads to the Hub leave out."""
    locks = folder / ".cache" / "huggingface" / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    return locks / f"{name}.lock"


def _acquire(lock: BaseFileLock) -> AbstractContextManager:
    """Acquire a lock, and return a context that releases it. On a file system without locks, nothing is locked."""
    try:
        return lock.acquire()
    except Timeout:
        raise
    except OSError as error:
        if error.errno in UNWRITABLE:
            raise
        return nullcontext()
