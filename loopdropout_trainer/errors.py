"""User errors, and the handler of the scripts that prints them in one line without secrets."""

from __future__ import annotations

import difflib
import gc
import os
import re
import reprlib
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


_HUB_TOKEN = re.compile(r"hf_[A-Za-z0-9]{6,}")

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80
_repr.maxdict = _repr.maxlist = 6


class UserError(ValueError):
    """A value or file that the user can fix, described in one sentence.

    `run_script` prints the sentence without a traceback.
    """


def short_repr(value: Any) -> str:
    """Return `repr(value)`, shortened to fit into a sentence."""
    return _repr.repr(value)


def closest_match(name: str, choices: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: `" Did you mean 'x'?"`, or `""` if nothing is close."""
    matches = difflib.get_close_matches(str(name), list(choices), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def hide_secrets(text: str) -> str:
    """Replace Hub tokens in a text by `***`."""
    token = os.environ.get("HF_TOKEN", "")
    text = text.replace(token, "***") if len(token) > 3 else text
    return _HUB_TOKEN.sub("***", text)


def run_script(main: Callable[[], None]) -> None:
    """Run a script's `main` and print a `UserError` in one line.

    The exit code is 2 after a `UserError`, 130 after Ctrl-C and 143 after SIGTERM. Other exceptions keep their traceback.

    Args:
        main: function that parses the command line and does the work.
    """
    script = Path(sys.argv[0]).name
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # for users of its next release
    try:
        main()
        sys.stdout.flush()
    except UserError as error:
        _print_from_first_process(f"{script}: {error}")
        sys.exit(2)
    except KeyboardInterrupt as error:
        _print_from_first_process(f"{script}: {str(error) or 'interrupted.'}")
        sys.exit(143 if getattr(error, "signal", None) == "SIGTERM" else 130)
    except BrokenPipeError:  # the reader of standard output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_from_first_process(message: str) -> None:
    """Print to standard error; the other processes wait, because the launcher ends them after the first one."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(30)
    sys.stdout.flush()
    print(hide_secrets(" ".join(message.splitlines())), file=sys.stderr, flush=True)


# Old names. They go with their last users.

_PACKAGE = "loopdropout_trainer"
# Libraries that raise ValueError for what they are given, and not for what is wrong with their caller.
_REFUSING_LIBRARIES = (
    "accelerate",
    "datasets",
    "deepspeed",
    "huggingface_hub",
    "lm_eval",
    "peft",
    "transformers",
    "trl",
)
_EXTRAS = {
    "eval": ("lm_eval", "evalplus", "langdetect", "immutabledict", "nltk"),
    "reports": ("pandas", "plotnine", "jinja2", "tabulate", "statsmodels", "pydantic"),
    "rewards": ("math_verify",),
    "sweeps": ("optuna", "psutil"),
    "deepspeed": ("deepspeed",),
}  # what setup.cfg installs with each
_typed: list[str] = []


def program_name() -> str:
    """Return the command as the user typed it: `loopdropout sft`, or the script's file name."""
    return _typed[0] if _typed else Path(sys.argv[0]).name


class SetupError(UserError):
    """Something of the user's that a library could not work with, in one sentence."""


class RecipeError(UserError):
    """A recipe or command line that cannot be run, in one sentence."""


def run_command(main: Callable[[], None], name: str | None = None, interrupted: str = "interrupted.") -> None:
    """Run a script's `main`, and end the process with one sentence, its last line, after a user error.

    The exit code is 2, 130 if the user interrupted it, or 143 if it was asked to terminate. The sentence goes to standard
    error (once, however many processes were launched), after `name`: what the user typed.
    """
    if not gc.isenabled():  # while the script's imports ran (startup.py)
        gc.freeze()  # what they made stays: nobody need look through it again
        gc.enable()
    name = program_name() if name is None else name
    _typed.append(name)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # of names that TRL still uses
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt as error:  # training raises a subclass for either signal, and says what is saved
        _say_once(f"{name}: {str(error) or interrupted}")
        sys.exit(143 if getattr(error, "signal", None) == "SIGTERM" else 130)  # as of a program that was killed
    except BrokenPipeError:  # the reader of standard output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        if not is_user_error(error):
            raise
        _say_once(f"{name}: {sentence(error)}")
        sys.exit(2)
    finally:
        _typed.remove(name)


@contextmanager
def user_supplied(what: str) -> Iterator[None]:
    """Blame what goes wrong inside on `what`: files or settings of the user's that a library reads, tries and refuses.

    Raises:
        SetupError: `what` and the library's reason, for any error that is not this package's own.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        if _is_own(error):
            raise
        raise SetupError(f"{what}: {sentence(error)}") from error


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Let an error say which file could not be written: where a disk is full the system names none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def is_user_error(error: BaseException) -> bool:
    """Say whether an error is the user's, rather than a fault of this package.

    That is: an error class of this package, a ValueError from inside a library that refuses what it was given, and what the
    system says about files, memory, other processes and missing packages.
    """
    if isinstance(error, ImportError):
        return not (error.name or "").startswith(_PACKAGE)
    is_refusal = isinstance(error, ValueError) and _raised_in(error) in _REFUSING_LIBRARIES
    is_systems = _is_memory(error) or _is_about_processes(error) or isinstance(error, OSError)
    return _is_own(error) or is_refusal or is_systems


def _is_own(error: BaseException) -> bool:
    return type(error).__module__.split(".")[0] == _PACKAGE


def _raised_in(error: BaseException) -> str | None:
    """Return the package whose code was running when an error was raised."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_globals.get("__name__", "").split(".")[0] if frames else None


def _is_memory(error: BaseException) -> bool:
    is_torchs = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)  # a GPU's, a CPU's
    return isinstance(error, MemoryError) or is_torchs


def _is_about_processes(error: BaseException) -> bool:
    """Return whether another process is gone: torch's class of error, gloo's text, or that of a pool of workers."""
    is_gone = any(cls.__name__ in ("DistError", "BrokenExecutor") for cls in type(error).__mro__)
    return is_gone or isinstance(error, RuntimeError) and "third_party/gloo" in str(error)


def sentence(error: BaseException) -> str:
    """Return what an error says on one line, without secrets; of this package's own also the lines that it has as notes."""
    text = str(error) if _is_own(error) else one_line(error)
    if _is_memory(error):
        text = f"Out of memory ({text[:200]}): lower `per_device_train_batch_size`, `benchmark_batch_size` or `max_length`."
    elif _is_about_processes(error):
        text = "Another process of this run ended or did not answer in time; its last line, or the system's log, says why. "
        text += "`--resume_from_checkpoint true` goes on from the newest checkpoint; an evaluation goes on by itself."
    elif isinstance(error, OSError) and error.strerror and error.filename:
        text = f"{error.filename} cannot be used: {error.strerror}."
    elif isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.split(".")[0]
        extra = next((extra for extra, packages in _EXTRAS.items() if package in packages), None)
        text = f"The Python package `{package}` is not installed, which these settings need"
        text += f': pip install "loopdropout-trainer[{extra}]".' if extra else "."
    notes = getattr(error, "__notes__", ()) if _is_own(error) else ()
    return hide_secrets("\n".join([" ".join(text.splitlines()), *notes]))


def one_line(error: BaseException, limit: int = 1000) -> str:
    """Return the text of a library's error on one line, or its kind if it has none."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError):
        text = f"{text} is missing"
    return hide_secrets(text if len(text) <= limit else f"{text[:limit]} ...")


def _say_once(text: str) -> None:
    """Print to standard error; of several launched processes the first speaks, at whose end the launcher ends the others."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(30)  # still here, on however busy a machine: the error was this process's alone
    sys.stdout.flush()  # else what is still in its buffer would come after the error
    print(text, file=sys.stderr, flush=True)


# What no message, file or card may show.


def is_secret(field: str) -> bool:
    """Say whether a field may hold a secret, by its name: `hub_token` or a misspelt `hub_tokn`, not `eos_token`."""
    name = str(field).lower()
    is_text = re.search(r"(eos|pad|bos|unk|sep|cls|mask)_token$", name)
    return not is_text and bool(re.search(r"to?ke?n$|secret|passw|api_?key", name))


def public_settings(settings: Any) -> Any:
    """Return settings without secret fields, and without Hub tokens inside of other values."""
    if isinstance(settings, Mapping):
        return {key: public_settings(value) for key, value in settings.items() if not is_secret(key)}
    if isinstance(settings, (list, tuple)):
        return [public_settings(item) for item in settings]
    return _HUB_TOKEN.sub("***", settings) if isinstance(settings, str) else settings
