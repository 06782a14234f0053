"""Runs EvalPlus on programs that nobody has read, inside bubblewrap (https://github.com/containers/bubblewrap).

Each program runs in a sandbox of its own: no network, the system read-only, a private /tmp, none of the user's files,
environment or processes, no reference solution, and limits on processes, files, time and the memory that a process maps.
Not contained are flaws of the kernel, the memory of all processes together, memory that is held without being mapped
(memfds, System V segments), and the program's own verdict: EvalPlus compares in the process that runs a program, so that one
that looks for the expected outputs there can pass.
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
"""Users from here on exist on no system: started by root, each sandbox has one of its own."""

LONGEST_CHECK = 240
"""Seconds after which a sandbox is killed; EvalPlus itself gives up after 62 for each of the two sets of tests."""

TMP_BYTES = 64 << 20
"""Most that the files in the sandbox's /tmp and /dev/shm may hold."""

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/tmp",  # noqa: S108 (the sandbox's own)
    "PYTHONHASHSEED": "0",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONDONTWRITEBYTECODE"), "1"),
}
"""All that a program sees of an environment."""


def run_scorer(command: str, folder: Path, *arguments: str, seconds: float | None, sandboxed: bool) -> int | None:
    """Run `in_sandbox.py COMMAND FOLDER ...`, and end all that it has started; return its exit code, None if time is up.

    If not sandboxed, it has no limits but those that in_sandbox.py sets.
    """
    sandbox = _bubblewrap(folder, "--bind" if command == "prepare" else "--ro-bind") if sandboxed else []
    running = subprocess.Popen(
        [*sandbox, sys.executable, "-s", "-B", str(SCORER), command, str(folder), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=None if command == "prepare" else subprocess.DEVNULL,  # what a program writes is not read
        env=ENVIRONMENT,
        start_new_session=True,  # an interrupt from the keyboard is for this process, which then ends the other
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
    """Run the program in FOLDER/NUMBER.pickle, and return its verdict: `pass`, or why it does not."""
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
        for parent in reversed(Path(path).parents[:-1]):  # bubblewrap's own would be for its user alone
            binds += ["--perms", "0755", "--dir", str(parent)]
        binds += [kind, str(path), str(path)]
    # Started by root, in_sandbox.py becomes a user that exists nowhere else: no limit on processes holds for root.
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
    """Return what a Python program needs of the file system: the interpreter, and where its libraries are installed."""
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
    """Return why programs cannot be contained on this machine, found out by running one; None: they can."""
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
