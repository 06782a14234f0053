"""Run generated programs inside bubblewrap (https://github.com/containers/bubblewrap), with EvalPlus as the judge.

Each program runs in its own sandbox. It has no network, a read-only system, a private /tmp, none of the user's files,
environment variables, keys or processes, and no reference solution. Processes, files, time and memory are limited. The
program gets the inputs of its problem, and its outputs leave the sandbox as plain values. Another sandbox compares them, so
the program never meets the expected outputs.

The sandbox does not contain flaws of the kernel, and the memory of all processes of all programs together.
"""

from __future__ import annotations

import errno
import os
import platform
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from loopdropout_trainer.errors import UserError, choose_advice
from loopdropout_trainer.evaluation.in_sandbox import write_job


SCORER = Path(__file__).with_name("in_sandbox.py")

FIRST_SPARE_USER = 1 << 30
"""First user id that no system uses. If root starts the sandboxes, each one gets its own user."""

LONGEST_RUN = 240
"""Seconds after which a sandbox is killed. A program gets 62 seconds for each of the two sets of tests, as in EvalPlus."""

TMP_BYTES = 64 << 20
"""Maximum size of /tmp and of /dev/shm in the sandbox."""

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/tmp",  # noqa: S108 (the sandbox's own)
    "PYTHONHASHSEED": "0",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONDONTWRITEBYTECODE"), "1"),
}
"""Environment variables of a program."""


def run_scorer(
    command: str,
    folder: Path,
    *arguments: str,
    seconds: float | None,
    sandboxed: bool,
    output: int = subprocess.DEVNULL,
) -> int | None:
    """Run `in_sandbox.py COMMAND FOLDER ...` and end all of its processes. Return the exit code, or None after a timeout.

    Outside of the sandbox, only the limits of in_sandbox.py apply.

    Args:
        command: `prepare`, `run` or `judge`.
        folder: Folder that the command sees. Only `prepare` can write there.
        *arguments: Further words of the command line.
        seconds: Time limit.
        sandboxed: Whether to run it in a sandbox.
        output: File descriptor of its standard output.
    """
    words = [sys.executable, "-s", "-B", str(SCORER), command, str(folder), *arguments]
    running = _start(
        words,
        sandboxed_folder=folder if sandboxed else None,
        bind="--bind" if command == "prepare" else "--ro-bind",
        stdout=output,
        stderr=subprocess.DEVNULL if command == "run" else None,  # the program's own errors are not read
    )
    try:
        return running.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)  # the end of bubblewrap is the end of every process in the sandbox
        running.wait()


def _start(
    words: Sequence[str], sandboxed_folder: Path | None, bind: str = "--ro-bind", **streams: int | None
) -> subprocess.Popen:
    """Start a command line in a sandbox that shows a folder, or outside of the sandbox."""
    with tempfile.TemporaryFile() as call_filter:
        call_filter.write(forbidden_calls())
        call_filter.seek(0)
        sandbox = [] if sandboxed_folder is None else _bubblewrap(sandboxed_folder, bind, call_filter.fileno())
        return subprocess.Popen(
            [*sandbox, *words],
            stdin=subprocess.DEVNULL,
            env=ENVIRONMENT,
            start_new_session=True,  # Ctrl-C reaches only this process, which then ends the other one
            pass_fds=[call_filter.fileno()] if sandbox else [],
            **streams,
        )


def run_program(folder: Path, number: int, sandboxed: bool) -> None:
    """Run the program in FOLDER/NUMBER/program.pickle, and write its outputs to FOLDER/NUMBER.outputs."""
    own_folder = folder / str(number)
    if own_folder.is_dir():
        user = FIRST_SPARE_USER + secrets.randbelow(1 << 29) if sandboxed else 0
        with open(folder / f"{number}.outputs", "wb") as file:
            run_scorer("run", own_folder, str(user), seconds=LONGEST_RUN, sandboxed=sandboxed, output=file.fileno())


def judge_programs(folder: Path, sandboxed: bool) -> dict[int, str]:
    """Return EvalPlus's verdict on each program in FOLDER that has run, and delete its outputs."""
    with tempfile.TemporaryFile() as file:
        code = run_scorer("judge", folder, seconds=None, sandboxed=sandboxed, output=file.fileno())
        file.seek(0)
        lines = file.read().decode().splitlines()
    if code != 0:
        raise RuntimeError(f"EvalPlus could not compare the outputs of the programs (exit status {code}).")
    verdicts = {}
    for line in lines:
        number, verdict = line.split(" ", 1)
        verdicts[int(number)] = verdict
    for path in folder.glob("*.outputs"):
        path.unlink()
    return verdicts


# Linux filters of system calls (seccomp), as in linux/filter.h and linux/seccomp.h

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_CALL, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in `seccomp_data`
_X32 = 0x40000000  # the bit of calls of a second interface of x86-64, which would go past the numbers below

_NUMBERS = {
    "x86_64": {
        "architecture": 0xC000003E,
        "sockets": (41, 53),  # socket, socketpair
        "forbidden": (248, 249, 250, 425, 319, 447, 29, 68),
    },
    "aarch64": {
        "architecture": 0xC00000B7,
        "sockets": (198, 199),
        "forbidden": (217, 218, 219, 425, 279, 447, 194, 186),
    },
}
"""Numbers of system calls. `forbidden` are add_key, request_key, keyctl, io_uring_setup (it opens sockets, too), and memory
that no limit counts: memfd_create, memfd_secret, shmget and msgget."""


def forbidden_calls() -> bytes:
    """Return a seccomp filter that closes the kernel's keyrings, all sockets except Unix sockets, and uncounted memory.

    An instruction is (operation, number of instructions to skip if true, if false, operand).
    """
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None:
        return b""
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, numbers["architecture"]),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
        (_LOAD, 0, 0, _CALL),
        (_IF_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
    ]
    for number in numbers["forbidden"]:
        program += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)]
    for number in numbers["sockets"]:
        program += [
            (_IF_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, _FIRST_ARGUMENT),
            (_IF_EQUAL, 1, 0, socket.AF_UNIX),
            (_RETURN, 0, 0, _ERROR | errno.EAFNOSUPPORT),
            (_RETURN, 0, 0, _ALLOW),
        ]
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _bubblewrap(folder: Path, bind: str, call_filter: int) -> list[str]:
    """Return the command line of a sandbox that shows Python, its libraries and `folder`.

    Args:
        folder: Folder that it shows.
        bind: Option that shows it, `--bind` or `--ro-bind`.
        call_filter: File descriptor of the filter of system calls.
    """
    binds = []
    for path, kind in [*((path, "--ro-bind-try") for path in _shown()), (SCORER, "--ro-bind"), (folder, bind)]:
        # Without `--dir`, bubblewrap would make folders that only its own user can read.
        for parent in reversed(Path(path).parents[:-1]):
            binds += ["--perms", "0755", "--dir", str(parent)]
        binds += [kind, str(path), str(path)]
    # Limits on processes do not apply to root, so in_sandbox.py changes to a user that exists nowhere else.
    if os.getuid() == 0:
        user = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        user = ["--unshare-user"]
    return [
        # The environment of the sandbox names /usr/bin only.
        *(shutil.which("bwrap"), "--die-with-parent", "--new-session", "--cap-drop", "ALL", *user),
        *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *("--seccomp", str(call_filter)),
        *("--proc", "/proc", "--dev", "/dev"),
        *("--perms", "1777", "--size", str(TMP_BYTES), "--tmpfs", "/dev/shm"),  # noqa: S108
        *("--perms", "1777", "--size", str(TMP_BYTES), "--tmpfs", "/tmp"),  # noqa: S108
        *binds,
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"),  # noqa: S108
    ]


@cache
def _shown() -> list[str]:
    """Return the paths that a Python program needs: the interpreter and its libraries."""
    libraries = [find_spec(name) for name in ("numpy", "psutil", "evalplus")]
    paths = ["/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"]
    paths += [sys.prefix, sys.base_prefix, sys.executable, os.path.realpath(sys.executable)]
    paths += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    paths += [str(Path(spec.origin).parents[1]) for spec in libraries if spec and spec.origin]
    shown: list[str] = []
    for path in paths:
        is_inside = any(Path(path).is_relative_to(other) for other in shown)
        if path not in ("", "/") and not is_inside:
            shown.append(path)
    return shown


@cache
def sandbox_fault() -> str | None:
    """Return why programs cannot be contained on this machine, or None. The function runs a program to find out."""
    if shutil.which("bwrap") is None:
        return "`bwrap` is not installed"
    if not forbidden_calls():
        return f"the system calls of the processor {platform.machine()} are not known"
    part = {"inputs": [[]], "seconds": [1.0]}
    program = {"code": "import numpy\ndef f():\n    return 7", "entry_point": "f", "is_set": False}
    check = {"dataset": "humaneval", "entry_point": "f", "inputs": [[]], "expected": [7], "atol": 0}
    with tempfile.TemporaryDirectory(prefix="sandbox_") as name:
        folder = Path(name)
        write_job(name, 0, {**program, "parts": {"base": part, "plus": part}}, {"base": check, "plus": check})
        empty = _start(["true"], folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        _, errors = empty.communicate()
        if empty.returncode:
            return " ".join(errors.decode(errors="replace").split())
        run_program(folder, 0, sandboxed=True)
        verdict = judge_programs(folder, sandboxed=True)[0]
    return None if verdict == "pass" else f"a right program gets the verdict `{verdict}` in it"


def check_allowed(task: str, allow_unsafe_code: bool, can_be_sandboxed: bool = True) -> None:
    """Raise `UserError` if the programs of a task cannot be contained, and the user has not allowed them to run anyway.

    Args:
        task: Name of the task.
        allow_unsafe_code: Whether the user allows programs outside of the sandbox.
        can_be_sandboxed: Whether the task runs its programs by `run_program`.
    """
    fault = sandbox_fault() if can_be_sandboxed else "lm-eval runs the programs of this task itself"
    if fault is not None and not allow_unsafe_code:
        option = choose_advice("`--allow_unsafe_code true` on the command line", "`allow_unsafe_code=True`")
        raise UserError(
            f"`{task}` runs programs that the model has written, and bubblewrap cannot contain them ({fault}). Install "
            f"bubblewrap (`apt-get install bubblewrap`) on a system that allows namespaces, or set {option} to run them with "
            "your own rights."
        )
