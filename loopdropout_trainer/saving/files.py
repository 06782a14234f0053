"""Files that are complete or not there, one process in a folder at a time, and one way to hash."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from loopdropout_trainer.errors import one_line, writing


LOCK_FILE = "_run.lock"
PARTIAL = "_partial"  # what begins with an underscore is not pushed to the Hub
_UMASK = os.umask(0o022)  # it can only be read by setting it, so it is read once, before there are threads
os.umask(_UMASK)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_json(value: Any) -> str:
    """Return the SHA-256 of a value as JSON; the order of a mapping's keys does not change it."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def sha256_of_weights(files: Iterable[Path]) -> str:
    """Return a hash of the names and contents of files, whatever their order and folder.

    They may be of many gigabytes: this process reads each but once as long as it is not written to.
    """
    digests = {}
    for file in files:
        facts = file.stat()
        digests[file.name] = _sha256_of_version(file.resolve(), facts.st_size, facts.st_mtime_ns)
    return sha256_of_json(digests)


@functools.cache
def _sha256_of_version(file: Path, size: int, modified: int) -> str:
    return file.name if re.fullmatch("[0-9a-f]{64}", file.name) else sha256(file)  # in the Hub's cache: its name


def write_atomically(path: str | Path, text: str) -> None:
    """Write a file of UTF-8 that survives a crash complete or not at all; a failure leaves the old file as it was.

    Raises:
        OSError: if it cannot be written; it names the file.
    """
    path = Path(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with writing(path):
            partial.write_text(text, encoding="utf-8", newline="")
            flush_to_disk(partial)
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    flush_to_disk(path.parent)


def write_json(path: str | Path, value: Any) -> None:
    """Write a value as a file of JSON, complete or not at all; see `write_atomically`."""
    write_atomically(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Return what a file of JSON holds."""
    return json.loads(path.read_text(encoding="utf-8"))


def flush_to_disk(path: str | Path) -> None:
    """Return when a file's content, or the names in a folder, have reached the disk.

    A file that only its owner may read, as safetensors writes them, gets the mode that `open` gives a new one.
    """
    path = Path(path)
    if os.name != "posix" and path.is_dir():
        return  # only there can a folder be opened
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        if path.is_file() and path.stat().st_mode & 0o777 == 0o600:
            path.chmod(0o666 & ~_UMASK)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class WriteError(RuntimeError):
    """Something could not be written; what was there before is as it was."""


@contextmanager
def staged_files(folder: str | Path, what: str, advice: str = "Free some space and try again.") -> Iterator[Path]:
    """Give a folder to write into, whose files take their places in `folder` when all of them have reached the disk.

    Files of the same name are replaced, all others stay. If the disk refuses, `folder` is as it was, and WriteError begins
    with `what` and ends with `advice`.
    """
    folder = Path(folder)
    partial = folder / PARTIAL
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        files = sorted(file for file in partial.rglob("*") if file.is_file())
        for file in files:
            flush_to_disk(file)
        for file in files:
            place = folder / file.relative_to(partial)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, place)
        flush_to_disk(folder)
    except (OSError, RuntimeError, SafetensorError) as error:
        if not is_about_files(error):
            raise
        reason = f"({one_line(error)}); what was there before is untouched"
        raise WriteError(f"{what} could not be written to {folder} {reason}. {advice}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def is_about_files(error: Exception) -> bool:
    """Return whether an error comes from writing a file: torch and safetensors have their own kinds."""
    is_torchs = re.search("PytorchStreamWriter|failed writing|unexpected pos|file write", str(error))
    return isinstance(error, (OSError, SafetensorError)) or is_torchs is not None


class LockedError(RuntimeError):
    """Another process works in the folder."""


@contextmanager
def folder_lock(folder: str | Path) -> Iterator[None]:
    """Keep other processes out of a folder, which is made if need be; one process may enter it several times.

    The kernel releases the lock when its process ends, however it ends.

    Raises:
        LockedError: if another process holds the folder; it names the process.
    """
    path = Path(folder).resolve() / LOCK_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=0, is_singleton=True, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        holder = path.read_text(encoding="utf-8").strip() if path.exists() else ""
        raise LockedError(
            f"Another run ({holder}) is at work in {folder}: wait for it, stop it, or choose another `output_dir`."
        ) from None
    try:
        if lock.lock_counter == 1:
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n", encoding="utf-8")
        yield
    finally:
        if lock.lock_counter == 1:
            path.unlink(missing_ok=True)  # before it is released: nobody else can hold it yet
        lock.release()


@contextmanager
def folder_lock_for_all(folder: str | Path) -> Iterator[None]:
    """Keep others out of a folder as `folder_lock` does: the first process of this launch does so for all that enter."""
    from loopdropout_trainer.processes import from_main_process

    with ExitStack() as lock:
        from_main_process(lambda: lock.enter_context(folder_lock(folder)))
        yield
