"""GSM8K and its shifted tests as lm-eval's `gsm8k` asks and strictly scores them, zero-shot (Appendix "Prompts")."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from loopdropout_trainer.data.arithmetic import arithmetic_problems
from loopdropout_trainer.data.preparations import text
from loopdropout_trainer.data.templates import PROMPT_TEMPLATES
from loopdropout_trainer.evaluation.benchmarks.generated import GeneratedTask, HubRows, Row
from loopdropout_trainer.evaluation.metrics.gsm8k_strict import ANSWER


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
