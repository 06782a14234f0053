"""Texts of a terminal: control characters of strangers, which are shown and never obeyed, numbers, and titled lines.

Names, fields of recipes and data sets, and answers of models can hold escape sequences, which clear a terminal, set its title
or make a message look like another one. Every command prints by way of a `PrintableStream`.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, TextIO


_CONTROLS = re.compile(
    r"\x1b\[[0-9;:]*m"  # a color, which is left out
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"  # all control characters except tab and newline
    r"|[\u202a-\u202e\u2066-\u2069]"  # other directions of writing, which change the visible order of a text
    r"|[\ud800-\udfff]"  # halves of characters, which cannot be printed
)

_MOVES_OF_BARS = re.compile(r"(?:\n|\x1b\[A)+\Z|\r")
"""Moves of the cursor by tqdm: a text of nothing else, or the start of a bar."""


def show_controls(text: str) -> str:
    r"""Return a text whose control characters are written as in Python, such as `\x1b`, and whose colors are left out."""
    return _CONTROLS.sub(_write_out, text)


def _write_out(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode() if len(match[0]) == 1 else ""


class PrintableStream:
    """A text stream that shows control characters.

    Args:
        terminal: Stream that it writes to.
        has_bars: Whether tqdm's progress bars may move the cursor.
    """

    def __init__(self, terminal: TextIO, has_bars: bool) -> None:
        self.terminal = terminal
        self._moves = _MOVES_OF_BARS if has_bars else re.compile("")

    def write(self, text: str) -> int:
        """Write a text without its control characters."""
        moves = self._moves.match(text)
        start = moves.end() if moves else 0
        self.terminal.write(text[:start] + show_controls(text[start:]))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)


def protect_terminal() -> None:
    """Show control characters in everything that this process prints from now on. Do it once, at the start of a command."""
    for name, has_bars in (("stdout", False), ("stderr", True)):
        terminal = getattr(sys, name)
        if terminal is None or isinstance(terminal, PrintableStream):
            continue
        stream = PrintableStream(terminal, has_bars)
        setattr(sys, name, stream)
        # Libraries keep the stream of their import.
        for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
            for handler in getattr(logger, "handlers", ()):
                if isinstance(handler, logging.StreamHandler) and handler.stream is terminal:
                    handler.setStream(stream)


def raw_terminal() -> TextIO:
    """Return the standard output for a program that moves the cursor itself. Apply `show_controls` to texts that it shows."""
    return getattr(sys.stdout, "terminal", sys.stdout)


def join_numbers(text: str) -> str:
    """Return a text with spaces that do not end a line in numbers and settings: "+2.2 [-0.2, +4.5]", "lr 0.001", "p = 0.5"."""
    inner = r" (?=±|\[|=)|(?<=±) |(?<==) |(?<=\d,) (?=[-+]\d)|(?<=\blr) (?=\d)"
    return re.sub(inner, "\N{NO-BREAK SPACE}", text)


def format_value(value: Any, digits: int = 4) -> Any:
    """Return a measured number as a short text, and a whole one, such as a number of tokens, with all of its digits."""
    if not isinstance(value, float):
        return value
    return f"{value:.0f}" if value.is_integer() else f"{value:.{digits}g}"


def format_fixed(value: float, decimals: int, sign: bool = False) -> str:
    """Return a result with a number of decimals, rounded as by hand: a half goes away from zero, as 1.25 to "1.3".

    Python's own formats take the even digit, "1.2", and see the binary fraction, which can be just below a decimal half. All
    tables and figures of results have this rounding, so that readers find the same means and differences.

    Args:
        value: Number. One that is not finite or very large has Python's format.
        decimals: Digits after the decimal point.
        sign: Whether a positive number has a plus.
    """
    plus = "+" if sign else ""
    if not abs(value) < 1e12:
        return f"{value:{plus}.{decimals}f}"
    as_decimal = Decimal(repr(round(float(value), 10)))  # without the noise of sums and of the binary fraction
    rounded = as_decimal.quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP)
    if rounded == 0:
        rounded = abs(rounded)  # no minus in front of zero
    return f"{rounded:{plus}.{decimals}f}"


def titled(title: str, lines: Iterable[str], width: int = 12) -> str:
    """Return lines of a plan next to their title, which has `width` characters with the space behind it.

    In a terminal, long lines are wrapped between words. A file or a pipe has whole lines, which other programs can find.
    """
    indent = " " * width
    wrapped: list[str] = []
    for line in lines:
        wrapped += wrap_for_terminal(line, width, "  ")
    return f"{title:<{width}}" + f"\n{indent}".join(wrapped)


def wrap_for_terminal(line: str, indent: int, further: str = "", stream: TextIO | None = None) -> list[str]:
    """Return the parts of a line that fit into the terminal behind `indent` columns, or the whole line without a terminal.

    Further parts begin below the first word, with the spaces `further` in front. Numbers and settings stay in one part
    (`join_numbers`), and so does a command in backquotes, which could not be copied from two lines. `stream`: another stream
    than the standard output.
    """
    columns = terminal_columns(stream)
    if columns is None:
        return [line]
    start = " " * (len(line) - len(line.lstrip())) + further
    options = {"subsequent_indent": start, "break_long_words": False, "break_on_hyphens": False}
    joined = re.sub(r"`[^`]+`", _join_words, join_numbers(line))
    parts = textwrap.wrap(joined, max(20, columns - indent), **options)
    return [part.replace("\N{NO-BREAK SPACE}", " ") for part in parts] or [line]


def _join_words(match: re.Match[str]) -> str:
    return match[0].replace(" ", "\N{NO-BREAK SPACE}")


def print_sentences(*lines: str, file: TextIO | None = None) -> None:
    """Print lines of sentences, which a terminal shows in its width, and a file or a pipe at once and each of them whole.

    Args:
        *lines: Lines, of which an empty one is printed, too.
        file: Another stream than the standard output.
    """
    parts = []
    for line in lines:
        parts += wrap_for_terminal(line, 0, stream=file)
    text = "".join(f"{part}\n" for part in parts)
    print(text, end="", file=file, flush=True)  # one text, because several threads may print


class _SentenceFormatter(logging.Formatter):
    """Format of log messages whose lines fit into the terminal, as those of `print_sentences` do."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a message, with a traceback unchanged."""
        text = super().format(record)
        if record.exc_info:
            return text
        parts = []
        for line in text.splitlines():
            parts += wrap_for_terminal(line, 0, stream=sys.stderr)
        return "\n".join(parts)


def wrap_warnings() -> None:
    """Let warnings fit into the terminal from now on, unless a library or the user handles them. Do it once, in a command."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_SentenceFormatter())


def terminal_columns(stream: TextIO | None = None) -> int | None:
    """Return the number of columns of the terminal that shows a stream, or None for a file or a pipe.

    Args:
        stream: Stream. Default: the standard output.
    """
    shown = sys.stdout if stream is None else stream
    if shown is None or not shown.isatty():
        return None
    return shutil.get_terminal_size().columns
