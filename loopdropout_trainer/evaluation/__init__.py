"""Evaluation with lm-eval: looped models at any depth and under any gates, and the paper's tasks."""

from loopdropout_trainer.evaluation.evaluate import DEVELOPMENT, development_task, evaluate_tasks, load_task
from loopdropout_trainer.evaluation.looped_lm import LoopedLM


__all__ = ["DEVELOPMENT", "LoopedLM", "development_task", "evaluate_tasks", "load_task"]
