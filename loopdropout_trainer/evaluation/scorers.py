"""Filters and scorers of the tasks in tasks/*.yaml that lm-eval does not have.

A filter returns the answer that it reads from each completion, or None. A scorer compares the answer with the problem.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from datasets import Dataset
from lm_eval.tasks.hendrycks_math.utils import is_equiv, last_boxed_only_string, remove_boxed

from loopdropout_trainer.arithmetic import arithmetic_problems
from loopdropout_trainer.errors import UserError


Problem = Mapping[str, Any]
Responses = Sequence[Sequence[str]]

MARKER = "The answer is: "  # with its space, so that "The answer is:18" has no answer
NUMBER = re.compile(r"[\-+]?\d*[\.,/]?\d+")  # one separator, so that "1,234,567" reads as 1234


def load_arithmetic(split: str, num_examples: int = 500, **metadata: Any) -> dict[str, Dataset]:
    """Return generated arithmetic problems as the split `test`."""
    return {"test": arithmetic_problems(split, num_examples)}


# MetaMath (meta-math/MetaMath at fe667b1)


def extract_number(completion: str) -> int | None:
    """Return the first number after the last marker, rounded half to even; None if there is none.

    n/0 is n. A number beyond the range of floats is None, as is a number that MetaMath's scorer fails on.
    """
    _, marker, answer = completion.rpartition(MARKER)
    match = NUMBER.search(answer) if marker else None
    if match is None:
        return None
    number = match.group().replace(",", "")
    numerator, slash, denominator = number.partition("/")
    try:
        if not slash:
            return round(float(number))
        if not numerator.strip("+-"):
            return None
        if denominator == "0":
            return round(float(numerator))
        fraction = Fraction(number)
        return round(fraction.numerator / fraction.denominator)
    except (ArithmeticError, ValueError):
        return None


def extract_text(completion: str) -> str | None:
    """Return the text after the last marker, up to a period that ends a line; None without a marker."""
    _, marker, answer = completion.rpartition(MARKER)
    return answer.split(".\n")[0].strip().removesuffix(".").strip() if marker else None


def _filter(extract: Callable[[str], Any]) -> Callable[[Responses, Sequence[Problem]], list[Any]]:
    """Return the filter that reads each completion with `extract`."""
    return lambda responses, problems: [extract(completions[0]) for completions in responses]


filter_numbers, filter_texts = _filter(extract_number), _filter(extract_text)


def gsm8k_gold(problem: Problem) -> int | None:
    """Return the integer after `#### ` in GSM8K's answer, or the number of an answer in MetaMath's form."""
    answer = problem["answer"]
    return extract_number(answer) if MARKER in answer else int(answer.split("#### ")[1].replace(",", ""))


def math_gold(problem: Problem) -> str | None:
    r"""Return the content of the last `\boxed{...}` of a solution; None if there is none or it does not close."""
    boxed = last_boxed_only_string(problem["solution"]) or ""
    return remove_boxed(boxed) if boxed.startswith("\\boxed{") else None


def score_metamath_gsm8k(problem: Problem, answers: Sequence[int | None]) -> dict[str, bool]:
    """Compare numbers."""
    (answer,), gold = answers, gsm8k_gold(problem)
    return {"acc": answer is not None and gold is not None and float(answer) == float(gold)}


def score_metamath_math(problem: Problem, answers: Sequence[str | None]) -> dict[str, bool]:
    """Compare LaTeX texts as the MATH dataset normalizes them. `x=3` is `3`, but `18.0` is not `18`."""
    (answer,) = answers
    return {"acc": answer is not None and is_equiv(answer, math_gold(problem))}


# IFEval


def require_punkt(problems: Dataset) -> Dataset:
    """Raise `UserError` before the generation if IFEval's scorer lacks its data. Importing the scorer tries to download it."""
    import lm_eval.tasks.ifeval.instructions_util  # noqa: F401
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        raise UserError(
            "`ifeval_strict` and `ifeval_loose` need NLTK's data `punkt_tab`. Download it with `python -m nltk.downloader "
            "punkt_tab`, or set NLTK_DATA to its folder."
        ) from None
    return problems


def _score_ifeval(level: str) -> Callable[[Problem, Sequence[str]], dict[str, bool]]:
    """Return the scorer of a level.

    The seed of each problem is 0, because some checks draw random letters or guess languages.
    """

    def score(problem: Problem, responses: Sequence[str]) -> dict[str, bool]:
        from langdetect import DetectorFactory
        from lm_eval.tasks.ifeval.utils import process_results

        DetectorFactory.seed = 0
        random.seed(0)
        return {"acc": process_results(problem, responses)[f"prompt_level_{level}_acc"]}

    return score


score_ifeval_strict = _score_ifeval("strict")
score_ifeval_loose = _score_ifeval("loose")
