"""Bounds on time, memory and nesting for files and chat templates that other people wrote."""

from __future__ import annotations

import codecs
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from loopdropout_trainer.errors import UserError, first_line, short_repr


RENDER_SECONDS = 10
RENDER_MEMORY = 2 << 30
"""Time in seconds and memory in bytes for the text of one conversation. Usual templates take a millisecond."""

MAX_CHARACTERS = 100_000_000
"""Length of the longest text of a conversation, which its tokens take many times the memory of."""

CHUNK = 1 << 20
"""Bytes of a file that are examined at a time."""

MAX_NESTING = 200
"""Most levels of lists and objects in JSON. pyarrow reads one inside the other, and ends Python at some 10,000 levels."""


def render_chat(tokenizer: Any, turns: list[Any], **options: Any) -> str:
    """Return the text of a conversation as the tokenizer's chat template writes it.

    Raises:
        UserError: If the template fails, for example because it does not end or fills the memory.
    """
    from jinja2 import TemplateError

    try:
        return render_text(tokenizer, turns, **options)
    except TemplateError as error:
        raise rendering_error(turns, error) from None


def render_text(tokenizer: Any, turns: list[Any], **options: Any) -> str:
    """Return the text of a conversation, as `render_chat` does.

    Raises:
        TemplateError: If the template itself raises an error, such as "System role not supported".
        UserError: If the template fails in another way.
    """
    with bounded_rendering(turns):
        text = tokenizer.apply_chat_template(turns, tokenize=False, **options)
    check_length(text)
    return text


def rendering_error(turns: Any, error: Exception) -> UserError:
    """Return the error of a conversation that a chat template cannot write."""
    return UserError(f"`chat_template` cannot render the conversation {short_repr(turns)}: {first_line(error)}")


def check_length(text: str) -> None:
    """Raise UserError if a chat template has written a text that is too long for a tokenizer."""
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"`chat_template` makes {len(text):,} characters of the conversation {short_repr(text)}.")


_running = threading.local()
"""The limits of the chat template that a thread runs, as its attribute `limits`."""


@contextmanager
def bounded_rendering(turns: Any) -> Iterator[None]:
    """Bound the time and the memory of a chat template inside the block, until `end_rendering`.

    Signals reach the main thread only, so a template has no limit of time in other threads.

    Args:
        turns: Conversation, for the message.

    Raises:
        UserError: If the template takes too long, fills the memory, or fails with another error than a `TemplateError`.
    """
    from jinja2 import TemplateError

    if getattr(_running, "limits", None) is not None:  # the caller has set them
        yield
        return
    limits = _running.limits = _Limits()
    try:
        yield
    except (TemplateError, UserError):
        raise
    except Exception as error:  # a template is a program, which can raise anything
        if not limits.are_set:  # `end_rendering` has removed them, so this is an error of the tokenizer
            raise
        limits.remove()  # the message needs memory, too
        if isinstance(error, MemoryError):
            error = MemoryError(f"it takes more than {RENDER_MEMORY >> 20:,} MB of memory")
        raise rendering_error(turns, error) from None
    finally:
        limits.remove()
        _running.limits = None


def end_rendering(texts: list[str]) -> None:
    """Remove the limits of `bounded_rendering`, because the texts are written, and a tokenizer may take longer."""
    limits = getattr(_running, "limits", None)
    if limits is not None and limits.are_set:
        limits.remove()
        for text in texts:
            check_length(text)


class _MemoryLimit:
    """The limit of memory of the whole process. Of the threads that need it at a time, the last one removes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_threads = 0

    def add(self) -> None:
        with self._lock:
            if self._num_threads == 0:
                self._former = resource.getrlimit(resource.RLIMIT_AS)
                with suppress(OSError, ValueError):  # systems without such a limit, or with a lower one
                    pages = int(Path("/proc/self/statm").read_text().split()[0])
                    most = pages * resource.getpagesize() + RENDER_MEMORY
                    resource.setrlimit(resource.RLIMIT_AS, (most, self._former[1]))
            self._num_threads += 1

    def remove(self) -> None:
        with self._lock:
            self._num_threads -= 1
            if self._num_threads == 0:
                resource.setrlimit(resource.RLIMIT_AS, self._former)


_memory_limit = _MemoryLimit()


class _Limits:
    """Limits of time and memory, from their creation until `remove`.

    The first raises TimeoutError, again and again, because the libraries of a template may catch it. The second raises
    MemoryError.
    """

    def __init__(self) -> None:
        self.are_set = True
        _memory_limit.add()
        self._is_main = threading.current_thread() is threading.main_thread()
        if self._is_main:
            self._handler = signal.signal(signal.SIGALRM, _raise_timeout)
            self._timer = signal.setitimer(signal.ITIMER_REAL, RENDER_SECONDS, 1)

    def remove(self) -> None:
        """Restore the former limits, if they are not yet restored."""
        if not self.are_set:
            return
        self.are_set = False
        if self._is_main:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._handler)
            signal.setitimer(signal.ITIMER_REAL, *self._timer)  # the caller's own
        _memory_limit.remove()


def _raise_timeout(number: int, frame: Any) -> None:
    raise TimeoutError(f"it takes more than {RENDER_SECONDS} seconds")


class _EncodingCheck:
    """Raises UserError for the first byte of a file that is not UTF-8. The file is read in chunks."""

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._line = 1
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def read(self, chunk: bytes) -> None:
        self._decode(chunk)
        self._line += chunk.count(b"\n")

    def finish(self) -> None:
        """Check the bytes at the end of the file, which can be the first ones of a longer character."""
        self._decode(b"", final=True)

    def _decode(self, chunk: bytes, final: bool = False) -> None:
        try:
            self._decoder.decode(chunk, final)
        except UnicodeDecodeError as error:
            line = self._line + error.object[: error.start].count(b"\n")
            wrong = error.object[error.start]
            source = "from Windows' encoding by `iconv -f CP1252 -t UTF-8 OLD > NEW`"
            if line == 1 and error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                source = "by `iconv -f UTF-16 -t UTF-8 OLD > NEW`"
            raise UserError(
                f"{self._path} must be a text in UTF-8, got the byte {wrong:#x} in line {line:,}. Convert it, for example "
                f"{source}."
            ) from None


def check_encoding(path: str | Path) -> None:
    """Raise UserError if a file (also compressed) is not in UTF-8."""
    import fsspec

    encoding = _EncodingCheck(path)
    with fsspec.open(str(path), "rb", compression="infer") as file:
        while chunk := file.read(CHUNK):
            encoding.read(chunk)
    encoding.finish()


def check_nesting(path: str | Path) -> None:
    """Raise UserError if lists and objects in a JSON file (also compressed) are nested too deeply, or it is not UTF-8.

    Only the brackets outside of texts count. The file is read in chunks, because a line can be longer than the memory.
    """
    import fsspec

    others = bytes(set(range(256)) - set(b'"[]{}'))
    depth, is_in_text, rest = 0, False, b""
    encoding = _EncodingCheck(path)
    with fsspec.open(str(path), "rb", compression="infer") as file:
        while chunk := file.read(CHUNK):
            encoding.read(chunk)
            chunk, rest = _cut_escape(rest + chunk)
            # Without escaped quotes, each quote begins or ends a text.
            marks = chunk.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, others)
            marks = np.frombuffer(marks, dtype=np.uint8)
            num_quotes = np.cumsum(marks == ord('"')) + is_in_text
            is_outside = num_quotes % 2 == 0
            opens = np.isin(marks, list(b"[{")) & is_outside
            closes = np.isin(marks, list(b"]}")) & is_outside
            depths = depth + np.cumsum(opens.astype(int) - closes.astype(int))
            if depths.max(initial=0) > MAX_NESTING:
                raise UserError(f"{path} must be JSON of at most {MAX_NESTING} levels of lists and objects, got more.")
            if len(marks):
                depth, is_in_text = int(depths[-1]), bool(num_quotes[-1] % 2)
    encoding.finish()


def _cut_escape(chunk: bytes) -> tuple[bytes, bytes]:
    """Return a chunk, and a backslash at its end that belongs to the next chunk's first character."""
    num_backslashes = len(chunk) - len(chunk.rstrip(b"\\"))
    if num_backslashes % 2:
        return chunk[:-1], b"\\"
    return chunk, b""
