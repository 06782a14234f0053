"""Paths of the package's own files, writing that a reader never sees half done, and locks of folders."""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import os
import re
import stat
import subprocess
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout

from loopdropout_trainer import __version__
from loopdropout_trainer.errors import UNWRITABLE, UserError, find_write_error, first_line, short_repr


PACKAGE = Path(__file__).parent

TINY_OURO_PATH = PACKAGE / "tiny_ouro"
"""A small pretrained Ouro with its tokenizer, for trials without a network. Its name is `tiny-ouro`."""


def model_path(name: Any) -> Any:
    """Return the folder of the model `tiny-ouro`, also for its folder in another installation, and other names unchanged."""
    if not isinstance(name, str):
        return name
    is_elsewhere = name.endswith("/loopdropout_trainer/tiny_ouro") and not Path(name).is_dir()
    if name == "tiny-ouro" or is_elsewhere:
        return str(TINY_OURO_PATH)
    return name


@functools.cache
def describe_version() -> str:
    """Return the version of the package, with the commit of a git checkout: "0.1.0, commit 1a2b..., with changes".

    The commit is read from the files of git. Whether tracked files are changed is asked from the program, if it is installed.
    """
    checkout = PACKAGE.parent
    commit = _read_commit(checkout / ".git")
    if commit is None:
        return __version__
    words = ["git", "-C", str(checkout), "status", "--porcelain", "--untracked-files=no"]
    try:
        is_changed = bool(subprocess.run(words, capture_output=True, timeout=20, check=True).stdout)
    except (OSError, subprocess.SubprocessError):
        is_changed = False
    return f"{__version__}, commit {commit}{', with changes' if is_changed else ''}"


def _read_commit(folder: Path) -> str | None:
    """Return the commit of the checkout with a `.git`, which is a folder, or the file of a further worktree, or None."""
    # HEAD holds a commit, or "ref: refs/heads/main". Then the commit is in the file of this name, or in a line "COMMIT NAME"
    # of packed-refs. A further worktree has only HEAD of its own, and `commondir` with the path of the other files.
    try:
        if folder.is_file():
            folder = folder.parent / folder.read_text().removeprefix("gitdir:").strip()
        head = (folder / "HEAD").read_text().strip()
        if not head.startswith("ref:"):
            return head
        name = head.removeprefix("ref:").strip()
        common = folder
        if (folder / "commondir").is_file():
            common = folder / (folder / "commondir").read_text().strip()
        if (common / name).is_file():
            return (common / name).read_text().strip()
        lines = (common / "packed-refs").read_text().splitlines()
        return next((line.split()[0] for line in lines if line.endswith(f" {name}")), None)
    except (OSError, ValueError):
        return None


def public_name(name: str) -> str:
    """Return `tiny-ouro` for the folder of that model, and other names unchanged."""
    return "tiny-ouro" if name == str(TINY_OURO_PATH) else name


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


def find_recipes_of_name(name: str) -> list[str]:
    """Return the package's recipes with a name that may leave out folders, such as `small.yaml` of `studies/small.yaml`."""
    return [recipe for recipe in recipe_names() if f"/{recipe}".endswith(f"/{name}")]


TEMPORARY_FILES = (".*.[0-9]*", "*/.*.[0-9]*")
"""Patterns of the paths of files that `write_file` leaves if its process is killed."""


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


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        OSError: If it cannot be read.
        UserError: If it is not a file, or not a text in UTF-8. A pipe or a device may never end.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path} must be a file, got a folder, a pipe or a device.")
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise UserError(f"{path} must be a text in UTF-8 ({first_line(error)}).") from None


def parse_json(text: str) -> Any:
    """Return the value of a JSON text. Text that is nested too deeply raises ValueError, as other text that is not JSON."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it has too many levels of lists and objects") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        OSError: If it cannot be read.
        UserError: If it does not hold a JSON object.
    """
    text = read_text(path)
    try:
        fields = parse_json(text)
    except ValueError as error:
        raise UserError(f"{path} is not a JSON file ({first_line(error)}). Save it again.") from None
    if not isinstance(fields, dict):
        raise UserError(f"{path} must hold a JSON object, got {short_repr(fields)}. Save it again.")
    return fields


def check_links(folder: str | Path) -> None:
    """Raise UserError if a folder has a link that leaves it, because writing would change its target, a pipe or a device.

    They may come from somebody else, for example in an archive. The folder itself may be a link.
    """
    root = os.path.realpath(folder)
    for parent, folders, files in os.walk(root):
        if "wandb" in folders:
            folders.remove("wandb")  # W&B itself links its logs, and this package writes nothing there
        for name in (*folders, *files):
            check_link(Path(parent, name), root)


_SYSTEM_FOLDERS = ("/proc", "/sys")
"""Folders in which Linux shows its state. Their permissions allow root to write, and no folder can be made there."""


def find_unwritable(folder: str | Path) -> str | None:
    """Return the message about an `output_dir` that cannot be made or written to, or None. Nothing is written to find out."""
    existing = Path(os.path.realpath(folder))
    while not os.path.exists(existing):  # also False in a folder of another user, whose permissions decide then
        existing = existing.parent
    if not existing.is_dir():
        return f"`output_dir` must be a folder, got {folder}, but {existing} is a file. Set another `output_dir`."
    for system_folder in _SYSTEM_FOLDERS:
        if existing.is_relative_to(system_folder):
            return (
                f"`output_dir` must be a folder that can be written, got {folder}, but {system_folder} takes no files. Set "
                "another `output_dir`."
            )
    if os.access(existing, os.W_OK | os.X_OK):
        return None
    return (
        f"`output_dir` must be a folder that can be written, got {folder}, but {existing} is read-only. Set another "
        "`output_dir`, or change its permissions."
    )


@contextmanager
def explain_unwritable(folder: str | Path, continuation: str) -> Iterator[None]:
    """Raise UserError if `output_dir` cannot be written in the block, as on a full disk, with a sentence how to continue."""
    try:
        yield
    except OSError as error:
        reason = find_write_error(error)
        if reason is None:
            raise
        raise UserError(f"`output_dir` {folder} cannot be written: {reason}. {continuation}") from error


def check_link(path: Path, folder: str | Path) -> None:
    """Raise UserError if a path inside a folder is a link that leaves the folder, a pipe or a device."""
    try:
        mode = path.lstat().st_mode
    except OSError:  # another process may have deleted it since the folder was listed
        return
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode):  # in which writing may never end
        raise UserError(f"{path} must not be a pipe or a device, because files of the folder are replaced. Delete it.")
    if not stat.S_ISLNK(mode):
        return
    target = os.path.realpath(path)
    if not Path(target).is_relative_to(os.path.realpath(folder)):
        raise UserError(
            f"{path} must not be a link to {target}, outside of the folder that is written. Delete the link, or replace it by "
            "a copy."
        )


@contextmanager
def lock_folder(folder: str | Path) -> Iterator[None]:
    """Keep other processes out of a folder inside the block. A process can lock a folder several times.

    Raises:
        UserError: If another process has locked the folder, a link leaves it, or it cannot be made.
        OSError: If the folder cannot be written now, as on a full disk. The caller knows how to continue then.
    """
    path = Path(folder).resolve()
    try:
        path.mkdir(parents=True, exist_ok=True)
        check_links(path)
        lock = _make_lock(path, "folder", timeout=1, thread_local=False, is_singleton=True)
        acquired = _acquire(lock)
    except Timeout:
        raise UserError(
            f"Another process writes to `output_dir` {folder}. Wait until it has finished, or set another `output_dir`."
        ) from None
    except OSError as error:
        problem = find_unwritable(folder)
        if problem is None and find_write_error(error) is not None:
            raise
        if problem is None:
            problem = f"`output_dir` {folder} cannot be made ({error.strerror}). Set another `output_dir`."
        raise UserError(problem) from error
    with acquired:
        yield


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Let one process at a time read a file and replace it by `write_file`. The others wait."""
    with _acquire(_make_lock(path.parent, path.name)):
        yield


def is_locked(path: Path) -> bool:
    """Return whether a process holds an exclusive lock on a file. The file is not made, and without locks nobody holds one."""
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it is missing, it is another user's, or the file system has no locks
        return False
    return False


def lock_path(folder: Path, name: str) -> Path:
    """Return the path of a lock in a folder, inside its `.cache/huggingface`, which uploads to the Hub leave out."""
    return folder / ".cache" / "huggingface" / "locks" / f"{name}.lock"


def _make_lock(folder: Path, name: str, **options: Any) -> BaseFileLock:
    """Return a lock in a folder, whose `lock_path` is made. `options`: those of `FileLock`."""
    path = lock_path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path, **options)


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
