"""Other words for the drop probability `p`, by which messages about an unknown name find what is meant.

It imports nothing, so that the fields of recipes, the rules, the trainers and the handle can ask it.
"""

NAMES_OF_P = (
    "prob",
    "probability",
    "rate",
    "dropout",
    "dropout_p",
    "dropout_prob",
    "dropout_rate",
    "drop",
    "drop_p",
    "drop_prob",
    "drop_rate",
    "p_drop",
    "loop_dropout",
    "loop_dropout_p",
)
"""Names that people type for `p`."""

ADVICE_ON_Q = "Set `p` = 1 - q, the probability that a loop is off."


def hint_at_p(name: str) -> str:
    """Return the end of a message about an unknown name, if people call `p` so or mean 1 - p, else ""."""
    if name == "q":
        return f" {ADVICE_ON_Q}"
    return " Did you mean 'p'?" if name in NAMES_OF_P else ""
