"""MetaMath's MATH score: the text after the last `The answer is: `, compared as normalised LaTeX (revision fe667b1).

The normalisation is that of the MATH dataset. It works on text, in a fixed order, and knows no mathematics: `x=3` is `3`,
but `18.0` is not `18`. Where it cannot go on, the two texts are compared as they stand.
"""

from __future__ import annotations

from loopdropout_trainer.evaluation.metrics import answer_metric
from loopdropout_trainer.evaluation.metrics.answer_metric import Verdict


MARKER = "The answer is: "
# In this order. `\\` becomes `\` only once, and words that merely begin so are hit too: `\leftarrow` is left as `arrow`.
_REWRITES = (
    ("\n", ""),
    ("\\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    ("\\left", ""),
    ("\\right", ""),
    ("^{\\circ}", ""),
    ("^\\circ", ""),
    ("\\$", ""),
)


class NormalizationError(ValueError):
    """The text has no normal form."""


def extract_answer(prediction: str) -> str | None:
    """Return the text after the last marker up to a period that ends a line, without a final period; None without marker.

    An empty text is an answer.
    """
    _, marker, answer = prediction.rpartition(MARKER)
    if not marker:
        return None
    return answer.split(".\n")[0].strip().removesuffix(".").strip()


def extract_gold(solution: str) -> str | None:
    r"""Return what stands in the last `\boxed{...}` of a solution; None if there is none or it does not close."""
    start = solution.rfind("\\boxed")
    if not solution.startswith("\\boxed{", start) or start < 0:
        return None
    depth = 0
    for place in range(start, len(solution)):
        depth += {"{": 1, "}": -1}.get(solution[place], 0)
        if solution[place] == "}" and depth == 0:
            return solution[start + len("\\boxed{") : place]
    return None


def equivalent(a: str | None, b: str | None) -> bool:
    """Return whether two answers have the same normal form. None equals only None."""
    if a is None or b is None:
        return a is b
    try:
        return normalize(a) == normalize(b)
    except (NormalizationError, TypeError, AttributeError):
        return a == b


def normalize(text: str) -> str:
    """Return the normal form of a LaTeX answer.

    Raises:
        NormalizationError: for two units, a root or fraction of nothing, and a slash between other things than integers.
    """
    for old, new in _REWRITES:
        text = text.replace(old, new)
    text = _without_unit(text)
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    left, _, right = text.partition("=")
    if text.count("=") == 1 and len(left) <= 2:
        text = right
    text = _with_braced_roots(text).replace(" ", "")
    text = _with_braced_fractions(text)
    return "\\frac{1}{2}" if text == "0.5" else _slash_as_fraction(text)


def _without_unit(text: str) -> str:
    parts = text.split("\\text{ ")
    if len(parts) > 2:
        raise NormalizationError("two units")
    return parts[0]


def _with_braced_roots(text: str) -> str:
    r"""Rewrite `\sqrt3` as `\sqrt{3}`: the next character, whatever it is, goes into the braces."""
    before, *roots = text.split("\\sqrt")
    for root in roots:
        if not root:
            raise NormalizationError("a root of nothing")
        before += "\\sqrt" + (root if root[0] == "{" else f"{{{root[0]}}}{root[1:]}")
    return before


def _with_braced_fractions(text: str) -> str:
    r"""Rewrite `\frac12` and `\frac1{72}` with braces; a fraction that begins with a brace is left as it is."""
    before, *fractions = text.split("\\frac")
    for fraction in fractions:
        if not fraction:
            raise NormalizationError("a fraction of nothing")
        if fraction[0] != "{":
            if len(fraction) < 2:
                return text
            numerator, denominator, rest = fraction[0], fraction[1], fraction[2:]
            fraction = f"{{{numerator}}}" + (denominator if denominator == "{" else f"{{{denominator}}}") + rest
        before += "\\frac" + fraction
    return before


def _slash_as_fraction(text: str) -> str:
    r"""Rewrite a/b as `\frac{a}{b}` if both are integers in plain digits."""
    if text.count("/") != 1:
        return text
    try:
        a, b = map(int, text.split("/"))
    except ValueError as error:
        raise NormalizationError("a slash between other things than integers") from error
    return f"\\frac{{{a}}}{{{b}}}" if text == f"{a}/{b}" else text


def score(prediction: str | None, reference: str | None) -> Verdict:
    """Judge a prediction against a LaTeX answer."""
    try:
        extracted = extract_answer(prediction)
    except AttributeError as error:
        return Verdict(False, None, type(error).__name__)
    return Verdict(extracted is not None and equivalent(extracted, reference), extracted)


class MetaMathMath(answer_metric.AnswerMetric):
    description = (
        "Share of predictions whose text after the last `The answer is: ` is the reference, as normalised LaTeX."
    )
    score = staticmethod(score)
