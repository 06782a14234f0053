"""GSM8K and MATH-500 as MetaMath asks and scores them (Appendix "Prompts, Decoding and Scoring")."""

from __future__ import annotations

from loopdropout_trainer.data.preparations import text
from loopdropout_trainer.data.templates import PROMPT_TEMPLATES
from loopdropout_trainer.evaluation.benchmarks.generated import GeneratedTask, HubRows, Row
from loopdropout_trainer.evaluation.metrics import metamath_gsm8k


PROMPT = PROMPT_TEMPLATES["alpaca"] + " Let's think step by step."
# Each with and without its colon, as the reference has them; those without are the ones that matter.
STOPS = tuple(word + end for word in ("Question", "USER", "ASSISTANT", "Instruction", "Response") for end in (":", ""))


def _boxed_answer(row: Row) -> str | None:
    from loopdropout_trainer.evaluation.metrics import metamath_math  # late: it needs lm-eval

    return metamath_math.extract_gold(text(row, "solution"))


BENCHMARKS = {
    "metamath_gsm8k": GeneratedTask(
        prompt=lambda row: PROMPT.format(instruction=text(row, "question")),
        reference=lambda row: str(metamath_gsm8k.extract_gold(text(row, "answer"))),
        rows=HubRows("openai/gsm8k", "main"),
        metric="metamath_gsm8k",
        max_new_tokens=512,
        stop_strings=STOPS,
    ),
    "metamath_math500": GeneratedTask(
        prompt=lambda row: PROMPT.format(instruction=text(row, "problem")),
        reference=_boxed_answer,
        rows=HubRows("HuggingFaceH4/MATH-500"),
        metric="metamath_math",
        max_new_tokens=2048,
        stop_strings=STOPS,
    ),
}
