"""Stages of a rehearsal: commands whose CPU seconds and memory are measured from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
MARK = "rehearsal-mark"
"""Word at the beginning of the lines that end a part of a stage."""


@dataclass
class Stage:
    """One command, and what was measured of it.

    Attributes:
        name: of the stage.
        cpu_seconds: of the command's processes, user and system.
        private_gb: peak of the memory that belongs to them alone, in 10^9 bytes.
        mapped_gb: peak of the files that they map, in 10^9 bytes: weights, which the system may drop and read again.
        parts: CPU seconds up to the end of each part, by its name.
    """

    name: str
    cpu_seconds: float = 0.0
    private_gb: float = 0.0
    mapped_gb: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)


class Watch(threading.Thread):
    """Looks ten times a second at how much memory a process and its children hold."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.private, self.mapped = pid, 0, 0
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.1):
            private = mapped = 0
            for pid in (self.pid, *children(self.pid)):
                of_process = memory_of(pid)
                private, mapped = private + of_process[0], mapped + of_process[1]
            self.private, self.mapped = max(self.private, private), max(self.mapped, mapped)


def children(pid: int) -> list[int]:
    """Return the processes that a process has started, and theirs."""
    try:
        pids = [
            int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()
        ]
    except OSError:  # it has ended
        return []
    return [*pids, *(grandchild for child in pids for grandchild in children(child))]


def memory_of(pid: int) -> tuple[int, int]:
    """Return the bytes of a process's private memory, and of the files that it maps; zeros if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    sizes = {
        name: int(rest.split()[0]) * 1024
        for name, _, rest in (line.partition(":") for line in lines)
        if name[:3] == "Rss"
    }
    return sizes.get("RssAnon", 0), sizes.get("RssFile", 0)


def measure(name: str, command: Sequence[str], log: Path, kill_at: str | None = None) -> Stage:
    """Run a command and return what was measured of it.

    Args:
        name: of the stage. command: the program and its arguments. log: file for what it prints.
        kill_at: kill it when this part of it is over.

    Raises:
        SystemExit: if the command fails.
    """
    stage, before = Stage(name), os.times()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, start_new_session=True
    ) as process:
        watch = Watch(process.pid)
        watch.start()
        lines = []
        for line in process.stdout:
            lines.append(line)
            if MARK in line:  # a progress bar may have begun the line
                part, seconds = line.partition(MARK)[2].split()[:2]
                stage.parts[part] = float(seconds)
                if part == kill_at:
                    os.killpg(process.pid, signal.SIGKILL)
    watch.over.set()
    watch.join()
    log.write_text("".join(lines), encoding="utf-8")
    if process.returncode and kill_at is None:
        sys.exit(
            f"{name} failed with exit code {process.returncode}; its last lines, of {log}:\n{''.join(lines[-15:])}"
        )
    after = os.times()
    stage.cpu_seconds = after.children_user + after.children_system - before.children_user - before.children_system
    stage.private_gb, stage.mapped_gb = watch.private / 1e9, watch.mapped / 1e9
    return stage
