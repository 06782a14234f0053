"""Gates as a command or a recipe gives them, such as `1-0-0-0`, `loop 1` or `single_loop`."""

from __future__ import annotations

from collections.abc import Sequence

from loopdropout_trainer.errors import UserError, short_repr


def expand_gates(gates: Sequence[str | None] | None, num_loops: int) -> list[str | None]:
    """Return gates with `single_loop` replaced by "loop 1" to "loop K". Unit gates are None."""
    if not gates:
        return [None]
    expanded = []
    for text in gates:
        if text == "single_loop":
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
    single_loops = expand_gates(["single_loop"], num_loops)
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
        )
    if all(number == 1 for number in numbers):
        return None
    return numbers


def describe_listed_depths(gates: Sequence[str | None], depths: Sequence[int] | None) -> str:
    """Return where K comes from if gates do not fit one of the depths of `eval_num_loops`, with the fix.

    Args:
        gates: All gates of the evaluation.
        depths: Depths of `eval_num_loops`, or None if it is not set, for which the text is "".
    """
    if not depths:
        return ""
    fitting = [str(depth) for depth in depths if _fit(gates, depth)]
    fix = "Set depths that all `gates` fit."
    if fitting:
        fix = f"Add `--eval_num_loops {' '.join(fitting)}`, which all `gates` fit."
    return f" K is one of `eval_num_loops` ({', '.join(map(str, depths))}), of the recipe or the command. {fix}"


def _fit(gates: Sequence[str | None], num_loops: int) -> bool:
    """Return whether all gates have one number for each of K loops."""
    try:
        for text in expand_gates(gates, num_loops):
            parse_gates(text, num_loops)
    except UserError:
        return False
    return True
