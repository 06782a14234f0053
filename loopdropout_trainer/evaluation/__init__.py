"""Benchmarks: greedy generation over all loops, the references' scorers, results that survive interruption."""

from loopdropout_trainer.evaluation.benchmarks import BENCHMARKS, Benchmark, load_benchmark, make_benchmark
from loopdropout_trainer.evaluation.evaluator import evaluate_benchmark
from loopdropout_trainer.evaluation.generation import generate_greedy
from loopdropout_trainer.evaluation.results import BenchmarkResult, Prediction, load_results, score_completions
from loopdropout_trainer.evaluation.scorers import load_metric
from loopdropout_trainer.evaluation.statistics import (
    DifferenceDecomposition,
    SeedSummary,
    decompose_difference,
    summarize_groups,
    summarize_seeds,
)


__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "BenchmarkResult",
    "DifferenceDecomposition",
    "Prediction",
    "SeedSummary",
    "decompose_difference",
    "evaluate_benchmark",
    "generate_greedy",
    "load_benchmark",
    "load_metric",
    "load_results",
    "make_benchmark",
    "score_completions",
    "summarize_groups",
    "summarize_seeds",
]
