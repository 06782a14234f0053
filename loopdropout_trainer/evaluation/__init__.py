"""Evaluate looped models on benchmarks: the references' prompts and scorers, results that survive interruption."""

# ruff: noqa: F401  (handed on)
from loopdropout_trainer.evaluation.benchmark import Benchmark, evaluate_subject
from loopdropout_trainer.evaluation.benchmarks import BENCHMARKS, load_benchmark
from loopdropout_trainer.evaluation.benchmarks.generated import GeneratedBenchmark, score_completions
from loopdropout_trainer.evaluation.results import BenchmarkResult, Metric, Prediction, load_predictions
from loopdropout_trainer.evaluation.subject import Subject
from loopdropout_trainer.generation.generation import generate_greedy
from loopdropout_trainer.record.measurement import mean_sd
