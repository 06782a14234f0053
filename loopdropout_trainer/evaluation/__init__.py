"""Evaluation with lm-eval: looped models at any depth and under any gates, and the paper's tasks."""

from importlib.metadata import version

from packaging.version import Version

from loopdropout_trainer.errors import UserError


if Version(version("lm-eval")) < Version("0.4.13"):
    raise UserError(
        f"`lm-eval` must be 0.4.13 for evaluation, got {version('lm-eval')}, which axolotl pins. Evaluate in an environment "
        "without axolotl."
    )

from loopdropout_trainer.evaluation.harness import asks_in_chat, evaluate_tasks
from loopdropout_trainer.evaluation.loading import (
    DEVELOPMENT,
    development_task,
    load_benchmarks,
    load_task,
    own_benchmark,
)
from loopdropout_trainer.evaluation.looped_lm import LoopedLM
from loopdropout_trainer.evaluation.program_checks import check_programs


__all__ = [
    "DEVELOPMENT",
    "LoopedLM",
    "asks_in_chat",
    "check_programs",
    "development_task",
    "evaluate_tasks",
    "load_benchmarks",
    "load_task",
    "own_benchmark",
]


def __dir__() -> list[str]:
    return sorted(__all__)
