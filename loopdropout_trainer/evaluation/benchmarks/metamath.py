"""GSM8K and MATH-500 as MetaMath asks and scores them (Appendix "Prompts, Decoding and Scoring"; revision fe667b1).

Both scores are of what follows the last `The answer is: `: of GSM8K a number, rounded to an integer; of MATH a text, compared
as normalised LaTeX. That normalisation is the MATH dataset's, which lm-eval ships. It works on text, in a fixed order, and
knows no mathematics: `x=3` is `3`, but `18.0` is not `18`. Where it cannot go on, the two texts are compared as they stand.
"""

from __future__ import annotations

import re
from fractions import Fraction

from loopdropout_trainer.data.preparations import PROMPT_TEMPLATES
from loopdropout_trainer.data.rows import text
from loopdropout_trainer.evaluation.benchmarks.generated import GeneratedTask, HubRows
from loopdropout_trainer.evaluation.results import Verdict, scorer


PROMPT = PROMPT_TEMPLATES["alpaca"] + " Let's think step by step."
# Each with and without its colon, as the reference has them; those without are the ones that matter.
STOPS = tuple(word + end for word in ("Question", "USER", "ASSISTANT", "Instruction", "Response") for end in (":", ""))


MARKER = "The answer is: "  # with its space: "The answer is:18" has no answer
NUMBER = re.compile(r"[\-+]?\d*[\.,/]?\d+")  # one separator at most: "1,234,567" reads as 1234


def extract_number(completion: str) -> int | None:
    """Return the first number after the last marker, rounded half to even; None if there is none.

    n/0 is n; a number beyond the range of floats is none.

    Raises:
        ArithmeticError, ValueError: for what the reference does not survive either, such as `1/00` and negative numbers
            beyond the range of floats.
    """
    _, marker, answer = completion.rpartition(MARKER)
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


def gold_number(answer: str) -> int:
    """Return the integer after the first `#### ` of a GSM8K answer field; ValueError if there is none."""
    parts = answer.split("#### ")
    if len(parts) < 2:
        raise ValueError("The answer has no `#### ` with a number after it.")
    return int(parts[1].replace(",", ""))


@scorer
def metamath_gsm8k(completion: str | None, reference: str | int | None) -> Verdict:
    """Compare the extracted number with an integer, which may be given as its digits; both as floats."""
    try:
        extracted = extract_number(completion)
        return Verdict(extracted is not None and float(extracted) == float(int(reference)), extracted)
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        return Verdict(False, None, type(error).__name__)


def gold_latex(solution: str) -> str | None:
    r"""Return what stands in the last `\boxed{...}` of a solution; None if there is none or it does not close."""
    from lm_eval.tasks.hendrycks_math import utils  # late: it is an extra

    boxed = utils.last_boxed_only_string(solution) or ""
    return utils.remove_boxed(boxed) if boxed.startswith("\\boxed{") else None


@scorer
def metamath_math(completion: str | None, reference: str | None) -> Verdict:
    """Compare the text after the last marker up to a period that ends a line; an empty text is an answer."""
    from lm_eval.tasks.hendrycks_math.utils import is_equiv

    if completion is None:
        return Verdict(False, None, "AttributeError")
    _, marker, answer = completion.rpartition(MARKER)
    extracted = answer.split(".\n")[0].strip().removesuffix(".").strip() if marker else None
    return Verdict(extracted is not None and is_equiv(extracted, reference), extracted)


BENCHMARKS = {
    "metamath_gsm8k": GeneratedTask(
        prompt=lambda row: PROMPT.format(instruction=text(row, "question")),
        reference=lambda row: str(gold_number(text(row, "answer"))),
        rows=HubRows("openai/gsm8k", "main"),
        metric="metamath_gsm8k",
        max_new_tokens=512,
        stop_strings=STOPS,
    ),
    "metamath_math500": GeneratedTask(
        prompt=lambda row: PROMPT.format(instruction=text(row, "problem")),
        reference=lambda row: gold_latex(text(row, "solution")),
        rows=HubRows("HuggingFaceH4/MATH-500"),
        metric="metamath_math",
        max_new_tokens=2048,
        stop_strings=STOPS,
    ),
}
