"""Processes of a sweep: each training in one of its own, and workers that share the sweep.

Importing torch and TRL takes ten seconds. A fork server imports them once for each worker, and every training starts as a
fork of it: a fresh process, so that a crash ends one run, and without a CUDA context, which a fork cannot inherit.
"""

from __future__ import annotations

import ast
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from loopdropout_trainer.errors import is_user_error, run_command, sentence
from loopdropout_trainer.settings.recipe import RecipeError, settings_yaml


# With it torch asks the driver, not CUDA, whether there are GPUs: forks of a process that has asked CUDA cannot use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def forks(script: Path) -> BaseContext:
    """Return a context whose processes are forks of one that has imported what a sweep and its script import."""
    context = multiprocessing.get_context("forkserver" if os.name == "posix" else "spawn")
    statements = ast.parse(script.read_text(encoding="utf-8")).body
    modules = [statement.module for statement in statements if isinstance(statement, ast.ImportFrom)]
    context.set_forkserver_preload(["loopdropout_trainer.runs.workers", *modules])
    return context


def gpus() -> list[str]:
    """Return the GPUs of this machine as `CUDA_VISIBLE_DEVICES` names them; [""] if there are none."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return given.split(",")
    import torch

    return list(map(str, range(torch.cuda.device_count()))) or [""]


def run_processes(processes: Sequence[BaseProcess]) -> int:
    """Run processes, which are asked to stop when this one is interrupted; return the largest exit status."""
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join()
    except BaseException:
        for process in processes:
            process.terminate()  # a training stops with a checkpoint
        for process in processes:
            process.join()
        raise
    return max(abs(process.exitcode) for process in processes)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Inside the block, SIGTERM, which schedulers send, interrupts this process as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def stop_with_parent() -> None:
    """Ask this process to stop as soon as the one that started it has died, however it died."""

    def stop() -> None:
        wait([multiprocessing.parent_process().sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()


def train(script: str, argv: list[str], launcher: list[str], log: str) -> None:
    """Be a training script, or a launcher such as `accelerate launch` that starts it; `log` gets what is printed."""
    stop_with_parent()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        os.dup2(descriptor, number)
        stream.reconfigure(encoding="utf-8", line_buffering=True)
    if not launcher:
        sys.argv = [script, *argv]
        main = runpy.run_path(script)["main"]
        run_command(lambda: main(argv), Path(script).name)
        return
    process = subprocess.Popen([*launcher, script, *argv], start_new_session=True)
    for number in (signal.SIGTERM, signal.SIGINT):  # to all that the launcher has started
        signal.signal(number, lambda *_: os.killpg(process.pid, signal.SIGTERM))
    status = process.wait()
    sys.exit(status if status >= 0 else 128 - status)


def check_recipes(script: str, recipes: Mapping[str, Any], benchmarks: Sequence[str], with_model: bool) -> None:
    """Read the recipes of methods as their script would, and look up benchmarks by name.

    `with_model`: also against the model's configuration, which must be there or on the Hub.
    """
    from loopdropout_trainer.evaluation.benchmarks import DEVELOPMENT, find_task

    run = runpy.run_path(script)["RUN"]
    what = "`select_on` or `measure`"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "recipe.yaml")
        try:
            for name in {*benchmarks} - {DEVELOPMENT}:
                find_task(name)
            for method, recipe in recipes.items():
                what = f"The method `{method}`"
                path.write_text(settings_yaml(recipe), encoding="utf-8")
                run([str(path)]) if with_model else run.read([str(path)])
        except Exception as error:
            if is_user_error(error):
                raise RecipeError(f"{what}: {sentence(error).replace(f'{folder}/', '')}") from None
            raise
