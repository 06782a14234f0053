"""GSM8K strict match: the number after the first `#### `, compared as text (`gsm8k` of lm-eval, filter `strict-match`)."""

from __future__ import annotations

import re

from loopdropout_trainer.evaluation.metrics import Verdict


ANSWER = re.compile(r"#### (\-?[0-9\.\,]+)")
_MARK = "#### "


def extract_answer(prediction: str) -> str | None:
    """Return the number after the first `#### `, as it is written; None if there is none."""
    match = ANSWER.search(prediction)
    return match.group(1) if match else None


def normalize(text: str) -> str:
    """Return `text` without commas, dollar signs, anything up to the last `#### ` and a final period, in lower case."""
    text = text.replace(",", "").replace("$", "")
    text = text[text.rfind(_MARK) + len(_MARK) :] if _MARK in text else text  # in linear time, unlike `.*#### `
    return re.sub(r"\.$", "", text).lower()


def score(prediction: str | None, reference: str | None) -> Verdict:
    """Judge a prediction against the raw answer field of the dataset, which ends in `#### N`."""
    if prediction is None or reference is None:
        return Verdict(False, None, "TypeError")
    extracted = extract_answer(prediction)
    return Verdict(extracted is not None and normalize(extracted) == normalize(reference), extracted)
