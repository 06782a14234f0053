"""GSM8K and its shifted tests as lm-eval's `gsm8k` asks and strictly scores them, zero-shot (Appendix "Prompts")."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from loopdropout_trainer.data.arithmetic import arithmetic_problems
from loopdropout_trainer.data.preparations import PROMPT_TEMPLATES
from loopdropout_trainer.data.rows import text
from loopdropout_trainer.evaluation.benchmarks.generated import GeneratedTask, HubRows, Row
from loopdropout_trainer.evaluation.results import Verdict, scorer


ANSWER = re.compile(r"#### (\-?[0-9\.\,]+)")
_MARK = "#### "


def extract_answer(completion: str) -> str | None:
    """Return the number after the first `#### `, as it is written; None if there is none."""
    match = ANSWER.search(completion)
    return match.group(1) if match else None


def normalize(text: str) -> str:
    """Return `text` without commas, dollar signs, anything up to the last `#### ` and a final period, in lower case."""
    text = text.replace(",", "").replace("$", "")
    text = text[text.rfind(_MARK) + len(_MARK) :] if _MARK in text else text  # in linear time, unlike `.*#### `
    return re.sub(r"\.$", "", text).lower()


@scorer
def gsm8k_strict(completion: str | None, reference: str | None) -> Verdict:
    """Compare the number after the first `#### `, as text, with the raw answer field of the dataset, which ends in `#### N`.

    It is lm-eval's `gsm8k`, filter `strict-match`.
    """
    if completion is None or reference is None:
        return Verdict(False, None, "TypeError")
    extracted = extract_answer(completion)
    return Verdict(extracted is not None and normalize(extracted) == normalize(reference), extracted)


STOPS = ("Question:", "</s>", "<|im_end|>")
ARITHMETIC_PROBLEMS = 500


def _task(rows: Callable[[int | None], Iterable[Row]], answer: str = "answer", max_new_tokens: int = 256):
    return GeneratedTask(
        prompt=lambda row: PROMPT_TEMPLATES["question"].format(question=text(row, "question")),
        # None if completions cannot be compared with it, unless it says so, as GSM-Plus does where nothing follows.
        reference=lambda row: text(row, answer) if re.search(rf"{ANSWER.pattern}|#### None$", row[answer]) else None,
        rows=rows,
        metric="gsm8k_strict",
        max_new_tokens=max_new_tokens,
        stop_strings=STOPS,
    )


BENCHMARKS = {
    "gsm8k": _task(HubRows("openai/gsm8k", "main")),
    "gsm8k_platinum": _task(HubRows("madrylab/gsm8k-platinum", "main")),
    "gsm_plus_mini": _task(HubRows("qintongli/GSM-Plus", split="testmini"), answer="solution"),
    **{
        f"arithmetic_{split}": _task(
            lambda limit, split=split: arithmetic_problems(split, limit or ARITHMETIC_PROBLEMS), max_new_tokens=80
        )
        for split in ("test", "easy_test", "medium_test", "hard", "larger", "wording")
    },
}
