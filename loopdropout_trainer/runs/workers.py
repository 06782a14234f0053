"""Processes that do a sweep's runs: each training in a process of its own, and workers that share a sweep.

Importing torch and TRL takes ten seconds. A fork server imports them once for each worker, and every training starts as a
fork of it: a fresh process, so that a crash ends one run, and without a CUDA context, which a fork cannot inherit.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from loopdropout_trainer.settings.arguments import AdapterArguments, ModelArguments, RunArguments
from loopdropout_trainer.settings.command import run_command
from loopdropout_trainer.settings.recipe import parse_recipe


_LOADED = ("loopdropout_trainer.runs.run", "loopdropout_trainer.evaluation.benchmarks")
_METHODS = multiprocessing.get_all_start_methods()
_CONTEXT = multiprocessing.get_context("forkserver" if "forkserver" in _METHODS else "spawn")


def launch_script(script: Path, argv: Sequence[str], launcher: Sequence[str], log: Path) -> int:
    """Run a script of the recipes folder in a process of its own, and wait for it.

    Args:
        script, argv: what to run.
        launcher: words that start a script, such as `accelerate launch`; none: a fork of the server.
        log: gets what it prints, after what stands there.

    Returns:
        Its exit status.
    """
    if launcher:
        return _in_process(_launch, ([*launcher, str(script), *argv],), log)
    return _in_process(_run_main, (str(script), list(argv)), log)


def check_recipes(
    script: Path, recipes: Sequence[Path], benchmarks: Sequence[str], with_model: bool, log: Path
) -> int:
    """Read recipes as their script would, and look up benchmarks by name, in a process of its own.

    Args:
        script, recipes, benchmarks: what to check.
        with_model: also against the model's configuration, which must be there or on the Hub.
        log: gets what is wrong.

    Returns:
        Its exit status; if that is not 0, the last line of `log` says what is wrong.
    """
    return _in_process(_check, (str(script), [str(path) for path in recipes], list(benchmarks), with_model), log)


def run_workers(number: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> int:
    """Run `work(*arguments)` in several processes, each with one GPU to itself if there are any.

    Returns:
        The largest exit status.
    """
    gpus = visible_gpus()
    context = multiprocessing.get_context("spawn")
    processes = []
    for index in range(number):
        gpu = gpus[index % len(gpus)] if gpus else None
        processes.append(context.Process(target=_worker, args=(gpu, work, arguments)))
        processes[-1].start()
    try:
        for process in processes:
            process.join()
    except BaseException:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
        raise
    return max(abs(process.exitcode) for process in processes)


def visible_gpus() -> list[str]:
    """Return the names of this process's GPUs, as CUDA_VISIBLE_DEVICES takes them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name]
    import torch  # late: the workers of one machine alone ask for it

    return [str(index) for index in range(torch.cuda.device_count())]


def stop_on_sigterm() -> None:
    """Make SIGTERM, which schedulers send, end this process as Ctrl-C does."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _in_process(target: Callable[..., None], arguments: tuple[Any, ...], log: Path) -> int:
    """Call a function in a new process, which is asked to stop when this one is interrupted or dies."""
    # With it torch asks the driver, not CUDA, whether there are GPUs: forks of a process that has asked CUDA cannot use it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if target is not _launch and _CONTEXT.get_start_method() == "forkserver":
        _CONTEXT.set_forkserver_preload(["__main__", *_LOADED])
    process = _CONTEXT.Process(target=_child, args=(target, arguments, str(log)))
    process.start()
    try:
        process.join()
    except BaseException:
        process.terminate()  # a training stops with a checkpoint
        process.join()
        raise
    return process.exitcode


def _child(target: Callable[..., None], arguments: tuple[Any, ...], log: str) -> None:
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115 (for the process's life)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    target(*arguments)


def _stop_with_parent() -> None:
    """Wait until the process that started this one has died, however it died, and stop then."""
    wait([multiprocessing.parent_process().sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


def _worker(gpu: str | None, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    stop_on_sigterm()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    run_command(lambda: work(*arguments))


def _run_main(script: str, argv: list[str]) -> None:
    sys.argv = [script, *argv]
    main = runpy.run_path(script)["main"]
    run_command(lambda: main(argv), Path(script).name)


def _launch(command: list[str]) -> None:
    """Run a command and end with its exit status; a signal to this process stops all that the command has started."""
    process = subprocess.Popen(command, start_new_session=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.killpg(process.pid, signal.SIGTERM))
    status = process.wait()
    sys.exit(status if status >= 0 else 128 - status)


def _check(script: str, recipes: list[str], benchmarks: list[str], with_model: bool) -> None:
    from loopdropout_trainer.data import DataArguments
    from loopdropout_trainer.evaluation.benchmarks import find_task
    from loopdropout_trainer.evaluation.development import DEVELOPMENT

    def check() -> None:
        for name in benchmarks:
            if name != DEVELOPMENT:
                find_task(name)
        run = runpy.run_path(script)["RUN"]
        types = (RunArguments, ModelArguments, AdapterArguments, DataArguments, run.config_class, *run.more_arguments)
        for path in recipes:
            print(path, flush=True)
            run([path]) if with_model else parse_recipe(types, [path])

    run_command(check, Path(script).name)
