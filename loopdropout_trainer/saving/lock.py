"""One process in a folder at a time: a lock that a killed process gives back by dying."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.utils import logging


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

logger = logging.get_logger(__name__)

LOCK_FILE = "_run.lock"  # what begins with an underscore is not pushed to the Hub
_held: dict[tuple[int, Path], list] = {}  # by process and folder: the open file, and how often it was asked for


class LockedError(RuntimeError):
    """Another process works in the folder."""


@contextmanager
def only_process_in(folder: str | Path) -> Iterator[None]:
    """Keep other processes out of a folder, which is made if need be; one process may ask several times.

    The kernel releases the lock when its process ends, however it ends. Where files cannot be locked, nothing is.

    Raises:
        LockedError: if another process holds the folder; it names the process.
        OSError: if the folder cannot be made or written to.
    """
    folder = Path(folder)
    key = (os.getpid(), folder.resolve())
    if key not in _held:
        folder.mkdir(parents=True, exist_ok=True)
        _held[key] = [_lock(folder), 0]
    _held[key][1] += 1
    try:
        yield
    finally:
        _held[key][1] -= 1
        if _held[key][1] == 0:
            file = _held.pop(key)[0]
            if file is not None:
                (folder / LOCK_FILE).unlink(missing_ok=True)  # before it is released: nobody else can hold it yet
                file.close()


def _lock(folder: Path):
    """Return the locked file, or None where files cannot be locked."""
    if fcntl is None:
        return None
    path = folder / LOCK_FILE
    while True:
        file = path.open("a+")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = path.read_text().strip() if path.exists() else ""
            file.close()
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise LockedError(
                    f"Another run{f' ({holder})' if holder else ''} is at work in {folder}: wait for it, stop it, or choose "
                    "another `output_dir`."
                ) from None
            logger.warning(f"{folder} cannot be locked ({error.strerror}): see to it that no other run uses it.")
            return None
        if path.exists() and os.fstat(file.fileno()).st_ino == path.stat().st_ino:
            break
        file.close()  # its holder took it away in between
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()
    return file
