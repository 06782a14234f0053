"""Gates as a command or a recipe gives them, such as `1-0-0-0`, `loop 1` or `single_loop`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from loopdropout_trainer.errors import UserError, closest_match, short_repr


SINGLE_LOOP = "single_loop"
"""Word of commands for the gates of each loop alone, one after the other."""


def expand_gates(gates: Sequence[str | None] | None, num_loops: int) -> list[str | None]:
    """Return gates with `single_loop` replaced by "loop 1" to "loop K". Unit gates are None."""
    if not gates:
        return [None]
    expanded = []
    for text in gates:
        if text == SINGLE_LOOP:
            expanded.extend(f"loop {loop}" for loop in range(1, num_loops + 1))
        else:
            expanded.append(text)
    return expanded


def parse_gates(gates: str | float | Sequence[float] | None, num_loops: int) -> list[float] | None:
    """Return the gates [K] from numbers, or from a string such as "1-0-0-0" or "loop 1". Unit gates are None.

    Raises:
        UserError: if there is not one number for each loop.
    """
    if gates is None:
        return None
    single_loops = expand_gates([SINGLE_LOOP], num_loops)
    values = gates
    if gates in single_loops:
        values = [text == gates for text in single_loops]  # True in the named loop only
    elif isinstance(gates, str | int | float):
        values = str(gates).split("-")
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != num_loops:
        example = "-".join("1000"[:num_loops])
        raise UserError(
            f"`gates` must have one number for each loop (K = {num_loops}), such as {example}, got {short_repr(gates)}."
            f"{_name_words(gates, single_loops)}"
        )
    if all(number == 1 for number in numbers):
        return None
    return numbers


def _name_words(gates: str | float | Sequence[float], single_loops: Sequence[str]) -> str:
    """Return a sentence with the names of single loops for gates that are a word, else ""."""
    if not _is_word(gates):
        return ""
    names = repr(single_loops[0])
    if len(single_loops) > 1:
        names += f" to {single_loops[-1]!r}"
    return f" The adapter in one loop alone is {names}."


def _is_word(gates: str | float | Sequence[float] | None) -> bool:
    """Return whether gates are a text with letters."""
    return isinstance(gates, str) and bool(re.search("[A-Za-z]", gates))


def check_gates(text: str, num_loops: int) -> None:
    """Raise UserError unless gates of a command, which may be `single_loop`, have one number for each of K loops."""
    try:
        parse_gates(expand_gates([text], num_loops)[0], num_loops)
    except UserError as error:
        if not _is_word(text):
            raise
        words = f" `{SINGLE_LOOP}` takes each loop in turn.{closest_match(text, [SINGLE_LOOP])}"
        raise UserError(f"{error}{words}") from None


def check_listed_depth(
    text: str, depth: int, gates: Sequence[str | None], depths: Sequence[int], own_depth: int | None
) -> None:
    """Raise UserError, with where K comes from and the fix, if gates do not fit one of the depths of `eval_num_loops`.

    If the depths have that of the model, and they do not fit it, a forgotten number is likely. The error names it first.

    Args:
        text: Gates that are checked, one of `gates`.
        depth: Depth that they must fit, one of `depths`.
        gates: All gates of the evaluation.
        depths: Depths of `eval_num_loops`.
        own_depth: Depth of the model without `eval_num_loops`, if it is known. A command that lists others means those.
    """
    is_unknown_word = _is_word(text) and not re.fullmatch(r"loop \d+", text)
    if is_unknown_word or fit_depth([text], depth):  # a word that no depth fits is no matter of the depth
        return
    fitting = " ".join(str(listed) for listed in depths if fit_depth(gates, listed))
    origin = f"`eval_num_loops` ({', '.join(map(str, depths))}), of the recipe or the command"
    if own_depth in depths and not fit_depth([text], own_depth):
        named = own_depth
        remark = f"The model runs {own_depth} loops. Also add `--eval_num_loops {own_depth}` instead of {origin}."
        if fitting:
            remark += f" Or keep the `gates` and add `--eval_num_loops {fitting}`, which all of them fit."
    else:
        named = depth
        fix = "Set depths that all `gates` fit."
        if fitting:
            fix = f"Add `--eval_num_loops {fitting}`, which all `gates` fit."
        remark = f"K is one of {origin}. {fix}"
    try:
        check_gates(text, named)
    except UserError as error:
        raise UserError(f"{error} {remark}") from None


def fit_depth(gates: Sequence[str | None], num_loops: int) -> bool:
    """Return whether all gates have one number for each of K loops."""
    try:
        for text in expand_gates(gates, num_loops):
            parse_gates(text, num_loops)
    except UserError:
        return False
    return True
