"""Benchmarks: greedy generation over all loops, the references' scorers, results that survive interruption."""

from loopdropout_trainer.evaluation.benchmarks import BENCHMARKS, Benchmark, load_benchmark
from loopdropout_trainer.evaluation.evaluator import evaluate_benchmark
from loopdropout_trainer.evaluation.generation import generate_greedy
from loopdropout_trainer.evaluation.results import BenchmarkResult, Prediction, score_completions
from loopdropout_trainer.evaluation.scorers import load_metric


__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "BenchmarkResult",
    "Prediction",
    "evaluate_benchmark",
    "generate_greedy",
    "load_benchmark",
    "load_metric",
    "score_completions",
]
