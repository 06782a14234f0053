"""Evaluate looped models on benchmarks: the references' prompts and scorers, results that survive interruption."""

from loopdropout_trainer.evaluation.benchmark import Benchmark as Benchmark
from loopdropout_trainer.evaluation.benchmark import evaluate_subject as evaluate_subject
from loopdropout_trainer.evaluation.benchmarks import BENCHMARKS as BENCHMARKS
from loopdropout_trainer.evaluation.benchmarks import load_benchmark as load_benchmark
from loopdropout_trainer.evaluation.benchmarks.generated import GeneratedBenchmark as GeneratedBenchmark
from loopdropout_trainer.evaluation.benchmarks.generated import score_completions as score_completions
from loopdropout_trainer.evaluation.metrics import load_metric as load_metric
from loopdropout_trainer.evaluation.results import BenchmarkResult as BenchmarkResult
from loopdropout_trainer.evaluation.results import Metric as Metric
from loopdropout_trainer.evaluation.results import Prediction as Prediction
from loopdropout_trainer.evaluation.results import load_results as load_results
from loopdropout_trainer.evaluation.statistics import summarize_seeds as summarize_seeds
from loopdropout_trainer.evaluation.subject import Subject as Subject
from loopdropout_trainer.generation.generation import generate_greedy as generate_greedy
