"""Runs one command in a box; started by containment.py as a script of its own, with nothing but the standard library.

With namespaces the command has processes, a network without any interface, and a file system of its own: the folders that
it needs, read-only, and one empty folder in memory that it may write to. It has no privileges there and cannot get any.
Without namespaces the box is resource limits, a session of its own and, started by root, a user of its own.

Three processes: this one, which waits outside; `init`, whose end makes the kernel end all that is left in the box; and
the command. What goes wrong before the command runs is written to the results as `E` and a sentence.
"""

import ctypes
import json
import os
import resource
import signal
import stat
import sys


CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8  # as in statvfs
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38

INSIDE = "/box"
"""The folder that the command starts in and may write to."""

FIRST_SPARE_USER = 1 << 30
"""Users from here on exist on no system: root takes one for each box, so that limits and signals hold for it alone."""


def main() -> None:
    order = json.loads(sys.argv[1])
    try:
        linux = sys.platform == "linux"
        if linux:
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            _prctl(PR_SET_CHILD_SUBREAPER, 1)  # what the command leaves behind becomes a child of this process
        order["user"] = FIRST_SPARE_USER + os.getpid() if os.getuid() == 0 else None
        if order["namespaces"]:
            _enter_namespaces()
        elif linux and order["user"] is None:
            order["processes"] += _tasks_of_user()  # the limit counts all that the user runs
        child = os.fork()
        if not child:
            (_init if order["namespaces"] else _execute)(order)
    except Exception as error:
        _fail(order, error)
    signal.signal(signal.SIGTERM, lambda *_: _end_descendants())
    os.waitpid(child, 0)
    _end_descendants()


def _fail(order: dict, error: Exception) -> None:
    os.write(order["results"], f"E{type(error).__name__}: {error}".encode())
    os._exit(1)


def _init(order: dict) -> None:
    """Be the first process of the box: furnish it, start the command, and end with it."""
    try:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _furnish(order)
        _become_user(order)
        _prctl(PR_SET_DUMPABLE, 0)  # the command's user is this process's, and may not look into it
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # changing the user has cleared it
        child = os.fork()
    except Exception as error:
        _fail(order, error)
    if not child:
        _execute(order)
    os.close(order["results"])
    while os.wait()[0] != child:  # orphans come here too
        pass
    os._exit(0)


def _execute(order: dict) -> None:
    """Become the command."""
    try:
        os.chdir(INSIDE if order["namespaces"] else order["folder"])
        if not order["namespaces"]:
            _become_user(order)
        _limit(order)
        if sys.platform == "linux":
            _prctl(PR_SET_NO_NEW_PRIVS, 1)
        place = os.getcwd()
        os.execve(order["command"][0], order["command"], {**order["environment"], "HOME": place, "TMPDIR": place})
    except Exception as error:
        _fail(order, error)


def _enter_namespaces() -> None:
    flags = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    user, group = os.getuid(), os.getgid()
    if user != 0:
        flags |= CLONE_NEWUSER
    _check(_libc.unshare(flags), "unshare")
    if user != 0:  # the same user, who has the right to furnish the box until the command is executed
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")


def _furnish(order: dict) -> None:
    """Make a file system of what the command needs, and change into it."""
    root = order["folder"]
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for folder in order["folders"]:
        _show(root, folder)
    os.mkdir(f"{root}/dev")
    for name in ("null", "zero", "random", "urandom"):
        _write(f"{root}/dev/{name}", "")
        _mount(f"/dev/{name}", f"{root}/dev/{name}", None, MS_BIND)
    os.mkdir(root + INSIDE)
    size = f"size={order['disk_bytes']},nr_inodes=4096,mode=777"
    _mount("tmpfs", root + INSIDE, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, size)
    _mount(None, root, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chroot(root)  # out of which only a privileged process can go, and in which none can get privileges
    os.chdir("/")


def _show(root: str, path: str) -> None:
    """Show a folder or file of the system in the box, read-only and at its own place."""
    if not os.path.exists(path) or os.path.lexists(root + path):
        return
    os.makedirs(os.path.dirname(root + path), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), root + path)
        return
    if stat.S_ISDIR(os.stat(path).st_mode):
        os.mkdir(root + path)
    else:
        _write(root + path, "")
    _mount(path, root + path, None, MS_BIND | MS_REC)
    kept = os.statvfs(path).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)  # a user may not take these off
    _mount(None, root + path, None, MS_REMOUNT | MS_BIND | MS_RDONLY | kept)


def _become_user(order: dict) -> None:
    user = order["user"]
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def _limit(order: dict) -> None:
    seconds, memory = order["cpu_seconds"], order["memory_bytes"]
    wanted = {
        "RLIMIT_CORE": 0,
        "RLIMIT_CPU": seconds,
        "RLIMIT_FSIZE": order["disk_bytes"],
        "RLIMIT_NOFILE": 256,
        "RLIMIT_NPROC": order["processes"],
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_AS": memory,
        "RLIMIT_DATA": memory,
    }
    for name, most in wanted.items():
        if hasattr(resource, name):
            number = getattr(resource, name)
            hard = resource.getrlimit(number)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            try:
                resource.setrlimit(number, (most, most))
            except ValueError:
                if sys.platform == "linux":  # elsewhere some limits cannot be set, which the report says
                    raise


def _tasks_of_user() -> int:
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            pass
    return count


def _end_descendants() -> None:
    """Kill all that the command has left, until there is none."""
    while True:
        try:
            with open("/proc/thread-self/children") as file:
                for child in file.read().split():
                    os.kill(int(child), signal.SIGKILL)
        except OSError:
            pass
        try:
            os.wait()
        except ChildProcessError:
            os._exit(0)


_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), "prctl")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    _check(_libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    main()
