"""Code benchmarks: programs that a model has written run contained, and EvalPlus scores what they return."""

from loopdropout_trainer.evaluation.code.containment import ContainmentError, Limits, containment_report
from loopdropout_trainer.evaluation.code.scoring import (
    ANSWER_BEGINNING,
    MAX_NEW_TOKENS,
    STOP_STRINGS,
    CodeExecutionError,
    prompts,
    score,
)


__all__ = [
    "ANSWER_BEGINNING",
    "MAX_NEW_TOKENS",
    "STOP_STRINGS",
    "CodeExecutionError",
    "ContainmentError",
    "Limits",
    "containment_report",
    "prompts",
    "score",
]
