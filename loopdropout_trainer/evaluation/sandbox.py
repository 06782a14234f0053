"""Run generated programs inside bubblewrap (https://github.com/containers/bubblewrap), with EvalPlus as the judge.

Each program runs in its own sandbox. It has no network, a read-only system, a private /tmp, none of the user's files,
environment variables or processes, and no reference solution. Processes, files, time and mapped memory are limited.

The sandbox does not contain flaws of the kernel, the memory of all processes together, memory that is not mapped (memfds,
System V segments), and the program's own verdict. EvalPlus compares in the process of the program, so a program that finds the
expected outputs there can pass.
"""

from __future__ import annotations

import os
import pickle
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.evaluation.in_sandbox import VERDICTS


SCORER = Path(__file__).with_name("in_sandbox.py")

FIRST_SPARE_USER = 1 << 30
"""First user id that no system uses. If root starts the sandboxes, each one gets its own user."""

LONGEST_CHECK = 240
"""Seconds after which a sandbox is killed. EvalPlus itself stops after 62 seconds for each of the two sets of tests."""

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


def run_scorer(command: str, folder: Path, *arguments: str, seconds: float | None, sandboxed: bool) -> int | None:
    """Run `in_sandbox.py COMMAND FOLDER ...` and end all of its processes. Return the exit code, or None after a timeout.

    Outside of the sandbox, only the limits of in_sandbox.py apply.
    """
    sandbox = _bubblewrap(folder, "--bind" if command == "prepare" else "--ro-bind") if sandboxed else []
    running = subprocess.Popen(
        [*sandbox, sys.executable, "-s", "-B", str(SCORER), command, str(folder), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=None if command == "prepare" else subprocess.DEVNULL,  # the output of a program is not read
        env=ENVIRONMENT,
        start_new_session=True,  # Ctrl-C reaches only this process, which then ends the other one
    )
    try:
        return running.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)  # the end of bubblewrap is the end of every process in the sandbox
        running.wait()


def check_program(folder: Path, number: int, sandboxed: bool) -> str:
    """Run the program in FOLDER/NUMBER.pickle, and return `pass` or the reason of the failure."""
    if not (folder / f"{number}.pickle").is_file():
        return "base: no program can be read"
    user = FIRST_SPARE_USER + secrets.randbelow(1 << 29) if sandboxed else 0
    code = run_scorer("check", folder, str(number), str(user), seconds=LONGEST_CHECK, sandboxed=sandboxed)
    if code is None:
        return "timeout"
    return VERDICTS[code - 10] if code - 10 in range(len(VERDICTS)) else "ended before its verdict"


def _bubblewrap(folder: Path, bind: str) -> list[str]:
    """Return the command line of a sandbox that shows Python, its libraries and `folder`."""
    binds = []
    for path, kind in [*((path, "--ro-bind-try") for path in _shown()), (SCORER, "--ro-bind"), (folder, bind)]:
        for parent in reversed(
            Path(path).parents[:-1]
        ):  # bubblewrap would make folders that only its own user can read
            binds += ["--perms", "0755", "--dir", str(parent)]
        binds += [kind, str(path), str(path)]
    # Limits on processes do not apply to root, so in_sandbox.py changes to a user that exists nowhere else.
    user = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if os.getuid() == 0 else ["--unshare-user"]
    return [
        *("bwrap", "--die-with-parent", "--new-session", "--cap-drop", "ALL", *user),
        *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
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
    paths = [path for path in paths if path not in ("", "/")]
    inside = lambda number: any(Path(paths[number]).is_relative_to(other) for other in paths[:number])
    return [path for number, path in enumerate(paths) if not inside(number)]


@cache
def sandbox_fault() -> str | None:
    """Return why programs cannot be contained on this machine, or None. The function runs a program to find out."""
    if shutil.which("bwrap") is None:
        return "`bwrap` is not installed"
    program = {"dataset": "humaneval", "entry_point": "f", "code": "import numpy\ndef f():\n    return 7"}
    program |= {"inputs": [[]], "expected": [7], "ref_time": [1.0], "atol": 0}
    with tempfile.TemporaryDirectory(prefix="sandbox_") as name:
        folder = Path(name)
        command = [*_bubblewrap(folder, "--ro-bind"), "true"]
        empty = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
        if empty.returncode:
            return " ".join(empty.stderr.split())
        (folder / "0.pickle").write_bytes(pickle.dumps({"base": program, "plus": program}))
        verdict = check_program(folder, 0, sandboxed=True)
    return None if verdict == "pass" else f"a right program gets the verdict `{verdict}` in it"


def check_allowed(task: str, allow_unsafe_code: bool, can_be_sandboxed: bool = True) -> None:
    """Raise `UserError` if the programs of a task cannot be contained, and the user has not allowed them to run anyway.

    Args:
        task: Name of the task.
        allow_unsafe_code: Whether the user allows programs outside of the sandbox.
        can_be_sandboxed: Whether the task runs its programs by `check_program`.
    """
    fault = sandbox_fault() if can_be_sandboxed else "lm-eval runs the programs of this task itself"
    if fault is not None and not allow_unsafe_code:
        raise UserError(
            f"`{task}` runs programs that the model has written, and bubblewrap cannot contain them ({fault}). Install "
            "bubblewrap (`apt-get install bubblewrap`) on a system that allows namespaces, or set `--allow_unsafe_code true` "
            "on the command line to run them with your own rights."
        )
