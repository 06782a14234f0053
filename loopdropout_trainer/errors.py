"""User errors, and the handler of the scripts that prints them in one line without secrets."""

from __future__ import annotations

import difflib
import errno
import logging
import math
import os
import re
import reprlib
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypedDict, Union, get_args, get_origin

from loopdropout_trainer.own_code import describe_own_error
from loopdropout_trainer.terminal import print_sentences, protect_terminal, wrap_warnings


_HUB_TOKEN = re.compile(r"hf_[A-Za-z0-9]{6,}")

UNWRITABLE = (
    errno.EACCES,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
)
"""Numbers of the errors of a folder or file that cannot be written."""

_UNWRITTEN = re.compile(
    # Rust and C++ libraries raise these errors of the system as types of their own.
    "No space left on device|Disk quota exceeded|Read-only file system|database or disk is full"
    # torch writes an archive, and at its end finds that a part of it was not written.
    "|PytorchStreamWriter failed|inline_container.*unexpected pos|iostream error"
)

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80
_repr.maxdict = _repr.maxlist = 6


_ALMOST_SAME = 0.85
"""Least similarity of a mistyped name to the choice that it means, whatever the other choices are."""

_LEAST_BEGINNING = 4
_SIMILAR_BEGINNING = 0.8
"""Least length of a mistyped name that is compared with the beginnings of longer names, and their least similarity."""


class UserError(ValueError):
    """A value or file that the user can fix, described in one sentence.

    `run_script` prints the sentence without a traceback.
    """


class OwnCodeError(UserError):
    """An error of the user's own code, such as a rule of a file of `--import`, with its function, its file and its line."""


def find_own_error(error: Exception) -> OwnCodeError | None:
    """Return an error of the user's own code as one sentence, or None for an error of other code, or that explains itself."""
    if isinstance(error, OwnCodeError):
        return error
    text = None if isinstance(error, UserError) else describe_own_error(error)
    return None if text is None else OwnCodeError(text)


def short_repr(value: Any) -> str:
    """Return `repr(value)` in one line, shortened to fit into a sentence. A model has the name of its class."""
    if hasattr(value, "named_modules") and not isinstance(value, type):
        return type(value).__name__
    text = _repr.repr(value)
    if "\n" in text:  # of a tensor
        text = " ".join(text.split())
    return text


_commands: list[str] = []
"""Name of the command that `run_script` runs. Empty in a Python program or a notebook of the user."""


def choose_advice(in_command: str, in_python: str) -> str:
    """Return the advice that the reader of a message can follow, who runs a command of this package or Python code."""
    return in_command if _commands else in_python


def hint_at_own_file() -> str:
    """Return the end of a message about an unknown name that code of the user can register."""
    advice = choose_advice(
        "import its file first, by `--import FILE`", "run or import the code that registers it first"
    )
    return f" If it is your own, {advice}."


def join_command(*words: str | Path) -> str:
    """Return a command of this package as a shell reads it: a folder with a space has quotes."""
    return shlex.join(["loopdropout", *map(str, words)])


def count(number: int, noun: str) -> str:
    """Return a number with its noun, which has an s unless the number is one."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def join_words(words: Sequence[str]) -> str:
    """Return words as a list in a sentence, such as "a, b and c", or "" without any."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def count_rows(inputs: Any, name: str) -> int:
    """Return the number of rows of a batch, whose tensor `name` is [B, ...]. Raise UserError for an example of a dataset."""
    rows = inputs.get(name) if isinstance(inputs, Mapping) else None
    if getattr(rows, "ndim", 0) < 2:  # a list has no `ndim`
        raise UserError(
            f"A batch must have a tensor `{name}` [B, S], got {short_repr(inputs)}. A trainer's first batch is "
            "`next(iter(trainer.get_train_dataloader()))`."
        )
    return len(rows)


def find_unusable(text: str) -> str | None:
    """Return a character of a text that neither a file's name nor UTF-8 can have, such as "the character NUL", or None."""
    if "\0" in text:
        return "the character NUL"
    if re.search("[\ud800-\udfff]", text):
        return "half of a UTF-16 pair"
    return None


def closest_match(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the end of a message about an unknown name: `" Did you mean 'x'?"`, or `""` if nothing is close.

    A name that only lacks a further word, such as `x` of `x_test`, means the only choice that has one. A choice that begins
    like the name comes before one that only has its letters elsewhere. Upper and lower case count as the same.

    Args:
        name: Unknown name.
        choices: Known names.
        cutoff: Least similarity of a name that is close, from 0 to 1.
    """
    choices = list(choices)
    if name in choices:  # another name of the choice was given, such as ChatML for `ouro`
        return f" Did you mean {name!r}?"
    longer = [choice for choice in choices if str(choice).startswith(f"{name}_")]
    if len(longer) == 1:  # such as `arithmetic_easy_test`, also if `arithmetic_test` has more letters in common
        return f" Did you mean {longer[0]!r}?"
    in_lower_case = {}
    for choice in choices:
        in_lower_case.setdefault(str(choice).lower(), choice)
    written = str(name).lower()
    matches = difflib.get_close_matches(written, in_lower_case, n=1, cutoff=cutoff)
    if not matches:
        return ""
    closest = matches[0]
    if difflib.SequenceMatcher(None, closest, written).ratio() < _ALMOST_SAME:
        closest = _find_same_beginning(written, in_lower_case) or closest
    return f" Did you mean {in_lower_case[closest]!r}?"


def _find_same_beginning(name: str, choices: Iterable[str]) -> str | None:
    """Return the first choice that begins almost as the whole name does, such as `adamw_torch` for `adamww`, or None."""
    if len(name) < _LEAST_BEGINNING:
        return None
    for choice in choices:
        beginning = choice[: len(name)]
        similarity = difflib.SequenceMatcher(None, beginning, name).ratio()
        if choice[:1] == name[:1] and similarity >= _SIMILAR_BEGINNING:
            return choice
    return None


def find_mistyped(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that a mistyped one almost surely means, such as `p` for `pp` or `P`, or None.

    It is for attributes, of which libraries and users set others with similar names.
    """
    known = [choice for choice in known if not choice.startswith("_")]
    letters = _letters(name)
    for choice in known:
        if _letters(choice) == letters:
            return choice
    for choice in difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.85):
        if abs(len(choice) - len(name)) <= 2:  # a longer name is one of its own
            return choice
    return None


def _letters(name: str) -> str:
    """Return a name in lower case, without underscores and doubled letters."""
    letters = name.lower().replace("_", "")
    return "".join(letter for letter, _ in groupby(letters))


@cache
def _typed_field(hint: Any) -> type:
    """Return the type of a dictionary with one `value`. It is cached, because the validation compiles code for each type."""
    return TypedDict("Field", {"value": hint})


_NOUNS = {
    bool: ("true or false", "true or false"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("a text", "texts"),
    list: ("a list", "lists"),
    set: ("a list", "lists"),
    tuple: ("a list", "lists"),
    dict: ("a mapping", "mappings"),
}
"""Types in words, for one value and for several."""


def describe_type(hint: Any, is_plural: bool = False) -> str:
    """Return a type hint in words, such as "a list of integers" for `list[int] | None`."""
    kind, args = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        kinds = [part for part in args if part is not NoneType and not (part is int and float in args)]
        return " or ".join(dict.fromkeys(describe_type(part, is_plural) for part in kinds))
    if kind is Literal:
        return " or ".join(map(repr, args))
    if kind not in _NOUNS:
        return getattr(kind, "__name__", str(kind))
    noun = _NOUNS[kind][is_plural]
    if kind in (list, set, tuple) and args and args[0] is not Any:
        return f"{noun} of {describe_type(args[0], is_plural=True)}"
    return noun


_SAME = object()


def check_type(name: str, value: Any, hint: Any, kinds: str | None = None, given: Any = _SAME) -> None:
    """Raise UserError if the value of a field does not have the type of a type hint.

    Args:
        name: Name of the field in the message, such as "`r`" or "`r` in FILE".
        value: Value of the field.
        hint: Type, such as `int` or `list[str] | None`.
        kinds: The type in words. Default: from `describe_type`.
        given: Value that the user has given, if `value` was made of it.
    """
    from huggingface_hub.dataclasses import validate_typed_dict  # takes a while
    from huggingface_hub.errors import StrictDataclassFieldValidationError

    try:
        validate_typed_dict(_typed_field(hint), {"value": value})
    except StrictDataclassFieldValidationError:
        got = value if given is _SAME else given
        advice = hint_at_number(got) if _takes_number(hint) else ""
        raise UserError(f"{name} must be {kinds or describe_type(hint)}, got {short_repr(got)}.{advice}") from None


def _takes_number(hint: Any) -> bool:
    """Return whether a type hint is a number, true or false, or has such a type in a list or a union."""
    return hint in (int, float, bool) or any(_takes_number(part) for part in get_args(hint))


def hint_at_number(value: Any) -> str:
    """Return the end of a message about a text instead of a number, or "" unless a number is meant: how to write it.

    Args:
        value: Value that the user has given. In a list, the first text counts.
    """
    items = value if isinstance(value, list | tuple) else [value]
    texts = [item for item in items if isinstance(item, str)]
    if not texts:
        return ""
    text = texts[0].strip()
    if text in ("true", "false") or _is_number(text):
        return f" Write {text} without quotes."
    with_point = text.replace(",", ".")
    if text.count(",") == 1 and _is_number(with_point):
        return f" Write the number with a point, {with_point}."
    return ""


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def as_path(name: str, value: Any) -> Path:
    """Return a folder or file as a path, or raise UserError for a value that is not one."""
    if not isinstance(value, str | os.PathLike) or value == "":
        raise UserError(f"`{name}` must be a path, got {short_repr(value)}.")
    return Path(value)


def docs_page(name: str) -> str:
    """Return how messages name a page of the documentation, which the package does not install."""
    return f"docs/{name}.md in the repository"


def check_name(
    name: str,
    hint: Callable[[], str] = str,  # str() is ""
) -> None:
    """Raise UserError if a name is neither a folder nor of the form of a Hub name. `hint` returns the end of its message."""
    if not Path(name).is_dir() and not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", str(name)):
        raise UserError(f"The folder {name} does not exist.{hint()}")


def hint_at_login(error: BaseException | None) -> str:
    """Return the end of a message about a repository on the Hub that is not there for a person without access, or ""."""
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    for cause in _chain(error):
        response = getattr(cause, "response", None)
        is_forbidden = isinstance(cause, HfHubHTTPError) and getattr(response, "status_code", None) in (401, 403)
        if is_forbidden or isinstance(cause, RepositoryNotFoundError | DatasetNotFoundError):  # also if it is gated
            return " A private or gated repository needs `hf auth login` or HF_TOKEN."
    return ""


def is_unreachable(error: BaseException) -> bool:
    """Return whether an error of the Hub's client says that there is no connection, or that none is allowed."""
    for cause in _chain(error):
        # The Hub's Xet client raises a ConnectionError about an answer of the Hub, too.
        if "HTTP status client error" in str(cause):
            return False
        names = [cls.__name__ for cls in type(cause).__mro__]
        # The library that connects has changed between the releases of the client. Its errors have this base class.
        if isinstance(cause, ConnectionError | TimeoutError) or "TransportError" in names:
            return True
    return False


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and the errors that it comes from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def find_write_error(error: BaseException) -> str | None:
    """Return why a file could not be written, such as "No space left on device", or None for another error."""
    if isinstance(error, UserError):  # which explains itself
        return None
    if isinstance(error, OSError) and error.errno in UNWRITABLE:
        return os.strerror(error.errno)
    match = _UNWRITTEN.search(str(error))
    if match is None:
        return None
    is_from_system = match[0].startswith(("No space", "Disk quota", "Read-only", "database"))
    return match[0] if is_from_system else "torch could not write all of a file, as on a full disk"


def hide_secrets(text: str) -> str:
    """Replace Hub tokens in a text by `***`."""
    token = os.environ.get("HF_TOKEN", "")
    text = text.replace(token, "***") if len(token) > 3 else text
    return _HUB_TOKEN.sub("***", text)


def run_script(main: Callable[[], None]) -> None:
    """Run a script's `main` and print a `UserError`, or an error of `_explain`, in one line.

    The exit code is 2 after such an error, 130 after Ctrl-C and 143 after SIGTERM. Other exceptions keep their traceback.

    Args:
        main: function that parses the command line and does the work.
    """
    script = _command_name(Path(sys.argv[0]))
    _commands.append(script)
    _prepare_process()
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of standard output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except UserError as error:
        _print_from_first_process(f"{script}: {error}")
        sys.exit(2)
    except Exception as error:
        message = _explain(error)
        if message is None:
            raise
        _print_from_first_process(f"{script}: {message}")
        sys.exit(2)
    except KeyboardInterrupt as error:
        # All processes stop after the same step, and a launcher that was stopped, too, waits until all of them have ended.
        _print_from_first_process(f"{script}: {str(error) or 'interrupted.'}", seconds=2, only=True)
        sys.exit(128 + getattr(error, "signal", signal.SIGINT))
    finally:
        _commands.remove(script)


def _explain(error: Exception) -> str | None:
    """Return a sentence about an error that the user can fix although it is no `UserError`, or None for another one."""
    reason = find_write_error(error)
    if isinstance(error, OSError) and reason is not None:
        return str(error)
    if reason is not None:
        return f"A file cannot be written: {reason}."
    own_error = find_own_error(error)
    if own_error is not None:
        return str(own_error)
    is_advice = isinstance(error, ImportError) and error.name is None  # of a library, and not the `import` of a module
    return f"A package is missing. {error}" if is_advice else None


def _prepare_process() -> None:
    """Protect the terminal, wrap warnings there, and keep bars and messages for developers out of the output of a script."""
    protect_terminal()
    wrap_warnings()
    is_in_terminal = sys.stderr is not None and sys.stderr.isatty()
    if not is_in_terminal and "tqdm" not in sys.modules:  # which reads the variable when it is imported
        os.environ.setdefault("TQDM_DISABLE", "1")
    # Python finds the files next to a script first, and recipes/evaluate.py hides a library that tasks of lm-eval import.
    sys.path.sort(key=lambda folder: Path(folder, "evaluate.py").is_file())
    # Warnings about future releases of the libraries concern developers.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft|trl")
    warnings.filterwarnings("ignore", module="plotnine")  # about lines of a single point
    logging.getLogger("DeepSpeed").addFilter(lambda record: not record.getMessage().startswith("Setting accelerator"))


def _command_name(script: Path) -> str:
    """Return the command that a message begins with, such as "loopdropout sft" for `recipes/sft.py`."""
    if script.parent.name == "recipes":
        return f"loopdropout {script.stem}"
    return "loopdropout" if script.name == "__main__.py" else script.name


def _print_from_first_process(message: str, seconds: float = 30, only: bool = False) -> None:
    """Print to standard error. The other processes wait, because the launcher ends all of them as soon as one has ended.

    Args:
        message: Text that is printed without secrets, in one line of a file or a pipe.
        seconds: Time that the first process may need to come here.
        only: Whether the others stay silent, because the first process prints the message in any case.
    """
    is_first = os.environ.get("RANK", "0") == "0"
    if not is_first:
        time.sleep(seconds)
    sys.stdout.flush()
    sentence = hide_secrets(" ".join(message.splitlines()))
    if is_first or not only:
        print_sentences(sentence, file=sys.stderr)
    _tell_launcher(sentence)


def _tell_launcher(sentence: str) -> None:
    """Give a sentence to the launcher of several processes, which ends its report of a failed process with it.

    The report has 40 lines, so nobody finds the sentence in front of it. The launcher names the file in the environment.
    """
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        raise UserError(sentence)
    except UserError as error:
        error.__context__ = None  # the exception that the sentence comes from, whose traceback would be reported, too
        get_error_handler().record_exception(error.with_traceback(None))


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
