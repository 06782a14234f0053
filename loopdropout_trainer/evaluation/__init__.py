"""Evaluate looped models on benchmarks: the references' prompts and scorers, results that survive interruption."""

from loopdropout_trainer.evaluation.benchmark import Benchmark, evaluate_benchmark, evaluate_subject
from loopdropout_trainer.evaluation.benchmarks import BENCHMARKS, load_benchmark, make_benchmark
from loopdropout_trainer.evaluation.benchmarks.generated import GeneratedBenchmark, score_completions
from loopdropout_trainer.evaluation.metrics import load_metric
from loopdropout_trainer.evaluation.results import BenchmarkResult, Metric, Prediction, load_results
from loopdropout_trainer.evaluation.statistics import SeedSummary, decompose_difference, summarize_seeds
from loopdropout_trainer.evaluation.subject import Subject
from loopdropout_trainer.generation.generation import generate_greedy


__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "BenchmarkResult",
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
    "load_results",
    "make_benchmark",
    "score_completions",
    "summarize_seeds",
]
