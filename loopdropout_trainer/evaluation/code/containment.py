"""Run programs that nobody has read: what a box keeps them from, what it does not, and what a program returned.

A program runs in a process tree of its own (see box.py), never in this process. What it writes to its results is data; a
program that is killed, or writes nonsense, has no results.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path


STARTING_SECONDS = 60
"""Most time from the start of a box to the start of the program in it, on a busy machine."""

READY, FAILED = b"R", b"E"
"""The first byte of the results: written by our own code, before the program runs."""


class ContainmentError(RuntimeError):
    """The box could not be set up as announced; the program did not run."""


@dataclass(frozen=True)
class Limits:
    """What one run of a program may use.

    Attributes:
        memory_bytes: address space of each process; 4 GiB is EvalPlus's limit.
        disk_bytes: of each file; with namespaces, of all files.
        processes: processes and threads at a time, with two of the box.
        result_bytes: longest results.
    """

    memory_bytes: int = 4 << 30
    disk_bytes: int = 64 << 20
    processes: int = 10
    result_bytes: int = 64 << 20


@dataclass(frozen=True)
class Outcome:
    """What came of a run: its results, or None and the reason."""

    results: bytes | None
    why: str = ""


def run_contained(
    command: Sequence[str],
    given: bytes,
    seconds: float,
    limits: Limits = Limits(),  # noqa: B008
    namespaces: bool | None = None,
) -> Outcome:
    """Run a command in a box until it ends or its time is up, and end all that it started.

    Args:
        command: of our own; its first argument is an absolute path. It writes `R` to the file descriptor whose number is
            in the environment variable RESULTS, runs the program, and writes the results there.
        given: its standard input.
        seconds: most time from `R` to the end of the results.
        limits: see there.
        namespaces: whether the box has them; default: if the system allows it.

    Raises:
        ContainmentError: if the box cannot be set up.
    """
    if namespaces is None:
        namespaces = has_namespaces()
    reader, writer = os.pipe()
    with tempfile.TemporaryDirectory(prefix="box_") as folder, tempfile.TemporaryFile() as stdin:
        os.chmod(folder, 0o777)  # of a box without namespaces, for its own user
        stdin.write(given)
        stdin.seek(0)
        order = {
            "command": list(command),
            "folder": folder,
            "folders": _folders(),
            "environment": _environment(writer),
            "results": writer,
            "namespaces": namespaces,
            "cpu_seconds": int(seconds) + STARTING_SECONDS,
            "memory_bytes": limits.memory_bytes,
            "disk_bytes": limits.disk_bytes,
            "processes": limits.processes,
        }
        try:
            box = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(__file__).with_name("box.py")), json.dumps(order)],
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[writer],
                start_new_session=True,
                env={},
                cwd="/",
            )
        finally:
            os.close(writer)
        try:
            return _read(reader, seconds, limits.result_bytes)
        finally:
            os.close(reader)
            _end(box, namespaces)


def _read(reader: int, seconds: float, most_bytes: int) -> Outcome:
    """Read results up to their end."""
    read, deadline = bytearray(), time.monotonic() + STARTING_SECONDS
    os.set_blocking(reader, False)
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while len(read) <= most_bytes:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                if not read:
                    raise ContainmentError(f"The box of a program did not start within {STARTING_SECONDS} seconds.")
                return Outcome(None, "timeout")
            piece = os.read(reader, 1 << 20)
            if not read and piece[:1] == READY:
                deadline = time.monotonic() + seconds
            read += piece
            if not piece:
                break
    if read[:1] != READY:
        reason = read[1:].decode(errors="replace") if read[:1] == FAILED else "it ended at once"
        raise ContainmentError(f"The box of a program cannot be set up: {reason}")
    if len(read) > most_bytes:
        return Outcome(None, f"more than {most_bytes} bytes of results")
    return Outcome(bytes(read[1:])) if len(read) > 1 else Outcome(None, "ended without results")


def _end(box: subprocess.Popen, namespaces: bool) -> None:
    """End a box and all that is in it."""
    if not namespaces:
        box.terminate()  # it then ends what has left its process group
        with suppress(subprocess.TimeoutExpired):
            box.wait(timeout=10)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(box.pid, signal.SIGKILL)  # the first process of the namespace with it, and so all of it
    box.wait()


@cache
def has_namespaces() -> bool:
    """Return whether the system lets a box have namespaces: found out by making one."""
    if sys.platform != "linux":
        return False
    try:
        return probe(namespaces=True)
    except ContainmentError:
        return False


def probe(namespaces: bool) -> bool:
    """Return whether an empty program runs in such a box.

    Raises:
        ContainmentError: if the box cannot be set up.
    """
    program = "import os; os.write(int(os.environ['RESULTS']), b'Rdone')"
    return run_contained([sys.executable, "-c", program], b"", 30, namespaces=namespaces).results == b"done"


def containment_report() -> str:
    """Say what a program that is run here is kept from, and what it is not kept from.

    Raises:
        ContainmentError: if programs cannot be run here at all.
    """
    if os.name != "posix":
        raise ContainmentError("Generated programs can only be run on Linux or macOS, where processes can be limited.")
    limited = "time, memory of each process, sizes of files, number of processes"
    if has_namespaces():
        return (
            f"Generated programs run in processes of their own, with limits ({limited}, disk), without network, without your "
            "environment, files and processes. Not contained: flaws of the system's kernel, and memory of all processes "
            f"together ({Limits().processes - 1} times the limit of one)."
        )
    probe(namespaces=False)
    open_to = ["the network", "reading every file that may be read", "many small files on the disk"]
    if os.getuid() != 0:
        open_to += ["changing your own files", "ending your own processes, this one too"]
    return (
        f"Generated programs run in processes of their own, with limits ({limited}), without your environment"
        f"{', as a user without rights' if os.getuid() == 0 else ''}. NOT contained here, because the system allows no "
        f"namespaces: {', '.join(open_to)}. Run this in a container or a virtual machine if that matters."
    )


@cache
def _folders() -> list[str]:
    """Return what a Python program needs of the file system: the interpreter, its libraries, and this folder."""
    system = ["/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime"]
    python = [sys.prefix, sys.base_prefix, sys.executable, os.path.realpath(sys.executable)]
    python += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    folders = [*system, *python, *library_folders(), str(Path(__file__).parent)]
    shown: list[str] = []
    for folder in folders:
        inside = any(Path(folder).is_relative_to(other) for other in shown)
        if folder not in ("", "/") and not inside:
            shown.append(folder)
    return shown


def library_folders() -> list[str]:
    """Return the folders of the libraries that checked programs may import, wherever they are installed."""
    specs = [find_spec(name) for name in ("numpy", "psutil", "evalplus")]
    return list(dict.fromkeys(str(Path(spec.origin).parent.parent) for spec in specs if spec and spec.origin))


def _environment(results: int) -> dict[str, str]:
    """Return the whole environment of a program: nothing of this process's own."""
    return {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "RESULTS": str(results),
    }
