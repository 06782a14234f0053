"""One process in a folder at a time: a lock that a killed process gives back by dying."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


LOCK_FILE = "_run.lock"  # what begins with an underscore is not pushed to the Hub


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
