"""Bounds on time, memory and nesting for files and chat templates that other people wrote."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from loopdropout_trainer.errors import UserError, first_line, short_repr


RENDER_SECONDS = 20
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
    try:
        with _bounded(RENDER_SECONDS, RENDER_MEMORY):
            text = tokenizer.apply_chat_template(turns, tokenize=False, **options)
    except Exception as error:  # a template is a program, which can raise anything
        reason = first_line(error)
        raise UserError(f"`chat_template` cannot render the conversation {short_repr(turns)}: {reason}") from error
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"`chat_template` makes {len(text):,} characters of the conversation {short_repr(turns)}.")
    return text


@contextmanager
def _bounded(seconds: int, memory: int) -> Iterator[None]:
    """Raise TimeoutError or MemoryError if the block takes more time in seconds, or more further memory in bytes.

    Signals reach the main thread only, so that the block has no limit of time in others.
    """
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(OSError, ValueError):  # systems without such a limit, or with a lower one
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, limits[1]))
    is_main = threading.current_thread() is threading.main_thread()
    if is_main:
        previous = signal.signal(signal.SIGALRM, _raise_timeout)
        signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except MemoryError as error:
        raise MemoryError(f"it takes more than {memory >> 20:,} MB of memory") from error
    finally:
        if is_main:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _raise_timeout(number: int, frame: Any) -> None:
    raise TimeoutError(f"it takes more than {RENDER_SECONDS} seconds")


def check_nesting(path: str | Path) -> None:
    """Raise UserError if lists and objects in a JSON file (also compressed) are nested too deeply to be read.

    Only the brackets outside of texts count. The file is read in chunks, because a line can be longer than the memory.
    """
    import fsspec

    others = bytes(set(range(256)) - set(b'"[]{}'))
    depth, is_in_text, rest = 0, False, b""
    with fsspec.open(str(path), "rb", compression="infer") as file:
        while chunk := file.read(CHUNK):
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


def _cut_escape(chunk: bytes) -> tuple[bytes, bytes]:
    """Return a chunk, and a backslash at its end that belongs to the next chunk's first character."""
    num_backslashes = len(chunk) - len(chunk.rstrip(b"\\"))
    if num_backslashes % 2:
        return chunk[:-1], b"\\"
    return chunk, b""
