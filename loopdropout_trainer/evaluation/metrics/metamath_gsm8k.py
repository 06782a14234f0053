"""MetaMath's GSM8K score: the number after the last `The answer is: `, rounded to an integer (revision fe667b1)."""

from __future__ import annotations

import re
from fractions import Fraction

from loopdropout_trainer.evaluation.metrics import Verdict


MARKER = "The answer is: "  # with its space: "The answer is:18" has no answer
NUMBER = re.compile(r"[\-+]?\d*[\.,/]?\d+")  # one separator at most: "1,234,567" reads as 1234


def extract_answer(prediction: str) -> int | None:
    """Return the first number after the last marker, rounded half to even; None if there is none.

    n/0 is n; a number beyond the range of floats is none.

    Raises:
        ArithmeticError, ValueError: for what the reference does not survive either, such as `1/00` and negative numbers
            beyond the range of floats.
    """
    _, marker, answer = prediction.rpartition(MARKER)
    match = NUMBER.search(answer) if marker else None
    if match is None:
        return None
    number = match.group().replace(",", "")
    numerator, slash, denominator = number.partition("/")
    if not slash:
        value = float(number)
        return None if value == float("inf") else round(value)
    if not numerator.strip("+-"):
        return None
    if denominator == "0":
        return round(float(numerator))
    fraction = Fraction(number)
    return round(fraction.numerator / fraction.denominator)


def extract_gold(answer: str) -> int:
    """Return the integer after the first `#### ` of a GSM8K answer field.

    Raises:
        ValueError: if there is none.
    """
    parts = answer.split("#### ")
    if len(parts) < 2:
        raise ValueError("The answer has no `#### ` with a number after it.")
    return int(parts[1].replace(",", ""))


def score(prediction: str | None, reference: str | int | None) -> Verdict:
    """Judge a prediction against an integer, which may be given as its digits; both are compared as floats."""
    try:
        extracted = extract_answer(prediction)
        return Verdict(extracted is not None and float(extracted) == float(int(reference)), extracted)
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        return Verdict(False, None, type(error).__name__)
