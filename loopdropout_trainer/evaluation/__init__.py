"""Evaluate looped models on benchmarks: the references' prompts and scorers, results that survive interruption."""

from loopdropout_trainer.evaluation.benchmark import Benchmark
from loopdropout_trainer.evaluation.benchmarks import BENCHMARKS, load_benchmark, make_benchmark
from loopdropout_trainer.evaluation.benchmarks.generated import GeneratedBenchmark, score_completions
from loopdropout_trainer.evaluation.evaluator import evaluate_benchmark, evaluate_subject
from loopdropout_trainer.evaluation.results import BenchmarkResult, Metric, Prediction, load_result_rows, load_results
from loopdropout_trainer.evaluation.scorers import load_metric
from loopdropout_trainer.evaluation.statistics import (
    DifferenceDecomposition,
    SeedSummary,
    decompose_difference,
    summarize_groups,
    summarize_seeds,
)
from loopdropout_trainer.evaluation.subject import Subject
from loopdropout_trainer.generation.generation import generate_greedy


__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "BenchmarkResult",
    "DifferenceDecomposition",
    "GeneratedBenchmark",
    "Metric",
    "Prediction",
    "SeedSummary",
    "Subject",
    "decompose_difference",
    "evaluate_benchmark",
    "evaluate_subject",
    "generate_greedy",
    "load_benchmark",
    "load_metric",
    "load_result_rows",
    "load_results",
    "make_benchmark",
    "score_completions",
    "summarize_groups",
    "summarize_seeds",
]
