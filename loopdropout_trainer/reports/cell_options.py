"""The options of the cells of a table: their types, and which of them go together (docs/reports.md)."""

from __future__ import annotations

from typing import Any

from loopdropout_trainer.errors import UserError, check_type, short_repr


OPTION_TYPES = {
    "minus": (dict | None, "a mapping, such as {method: LoRA}"),
    "part": (str | None, "a text, such as gain_both_answered"),
    "of": (str | None, "a cost, such as train_seconds"),
    "recipe": (str | None, "the name of a recipe"),
    "decimals": (int, "a whole number"),
    "scale": (int | float, "a number"),
}
"""Types of the options of a cell, and their descriptions."""

PARTS = ("gain", "gain_both_answered", "gain_missing_in_either")
"""Values of the option `part`, which `answer_decomposition` returns."""


def check_options(options: dict[str, Any]) -> None:
    """Raise UserError for an option of a cell that is not of its type, or a `part` that is not one of `PARTS`."""
    for name, value in options.items():
        hint, description = OPTION_TYPES[name]
        check_type(f"`{name}` of a cell", value, hint, description)
    if options["decimals"] < 0:
        raise UserError(f"`decimals` of a cell must be a whole number, got {options['decimals']}.")
    part = options["part"]
    if part is not None and part not in PARTS:
        raise UserError(f"`part` of a cell must be one of {', '.join(PARTS)}, got {short_repr(part)}.")
    if part is not None and not options["minus"]:
        raise UserError("`part` of a cell needs `minus`, because it is a part of a difference.")


def check_cell(minus: dict | None, of: str | None, scale: float, wanted: dict) -> None:
    """Raise UserError if the options of a cell do not go together."""
    if minus and (of or scale != 1):
        raise UserError("`minus` must not be set together with `of` or `scale`: it compares accuracies in points.")
    if of and wanted.get("task") == "training" and "metric" not in wanted:
        raise UserError(
            f"`task` must be one with accuracies next to `of`, got training. Leave it out, or set `metric: {of}` for `of`."
        )
