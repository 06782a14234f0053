"""MetaMath's MATH score: the text after the last `The answer is: `, compared as normalised LaTeX (revision fe667b1).

The normalisation is that of the MATH dataset, which lm-eval ships. It works on text, in a fixed order, and knows no
mathematics: `x=3` is `3`, but `18.0` is not `18`. Where it cannot go on, the two texts are compared as they stand.
"""

from __future__ import annotations

from lm_eval.tasks.hendrycks_math import utils

from loopdropout_trainer.evaluation.metrics import Verdict


MARKER = "The answer is: "


def extract_answer(prediction: str) -> str | None:
    """Return the text after the last marker up to a period that ends a line, without a final period; None without marker.

    An empty text is an answer.
    """
    _, marker, answer = prediction.rpartition(MARKER)
    return answer.split(".\n")[0].strip().removesuffix(".").strip() if marker else None


def extract_gold(solution: str) -> str | None:
    r"""Return what stands in the last `\boxed{...}` of a solution; None if there is none or it does not close."""
    boxed = utils.last_boxed_only_string(solution) or ""
    return utils.remove_boxed(boxed) if boxed.startswith("\\boxed{") else None


def score(prediction: str | None, reference: str | None) -> Verdict:
    """Judge a prediction against a LaTeX answer."""
    try:
        extracted = extract_answer(prediction)
    except AttributeError as error:
        return Verdict(False, None, type(error).__name__)
    return Verdict(extracted is not None and utils.is_equiv(extracted, reference), extracted)
