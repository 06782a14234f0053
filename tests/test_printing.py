"""What a run prints: tables that fit a screen, and a line for each logging interval."""

import io

from rich.console import Console

from loopdropout_trainer.evaluation import BenchmarkResult, Prediction
from loopdropout_trainer.runs.printing import correct_by_last_number, log_line, print_results


def answers(correct, total=40, start=0):
    """A result with `correct` correct answers, from problem number `start` on."""
    good = [start <= index < start + correct for index in range(total)]
    rows = [Prediction("?", f"1 + 1 = 2\n#### {7 if each else 8}", "5 + 2 = 7\n#### 7", None, each) for each in good]
    return BenchmarkResult("arithmetic_test", rows).as_json()


def results(rule, correct, by_depth):
    return {
        "meta_info": {"num_loops": 4},
        "train_info": {"rule": rule, "p": None if rule == "lora" else 0.5, "trainable_parameters": 1_234_567,
                       "examples": 123_456, "steps": 12_345, "train_loss": 0.1234, "train_seconds": 12345},
        "base_benchmarks": {"arithmetic_test": answers(0)},
        "benchmarks": {"arithmetic_test": answers(correct)},
        "single_loop": {"frozen": 2.0, "all_on": 0.2, "reductions_percent": [55.0, 60.0, 65.0, 50.0]},
        "single_loop_benchmarks": [answers(number) for number in (1, 2, 3, correct)],
        "by_depth": {str(depth): answers(number) for depth, number in enumerate(by_depth, start=1)},
        "saved": {"adapter": "out"},
    }  # fmt: skip


def test_everything_fits_80_columns():
    ours = results("loop_dropout", 12, (5, 12, 12, 12, 20, 11, 5, 0))
    lora = results("lora", 30, (0, 5, 30, 30, 20, 10, 5, 0))
    console = Console(file=io.StringIO(), width=80)
    print_results([ours, lora], console)
    text = console.file.getvalue()
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    assert text.count("Loop Dropout") >= 5  # a method's name is never broken
    rows = [line.split() for line in text.splitlines() if line.startswith(" LoRA ")]
    assert rows[2] == ["LoRA", "0.0", "12.5", "75.0", "75.0", "50.0", "25.0", "12.5", "0.0"]
    assert (
        "Loop Dropout is more accurate than LoRA at K = 1 (+12.5), K = 2 (+17.5), K = 6 (+2.5); less accurate than LoRA at "
        "K = 3 (-45.0), K = 4 (-45.0); as accurate as LoRA at K = 5, K = 7, K = 8 (points, one seed)."
    ) in " ".join(text.split())
    assert rows[4] == ["LoRA", "55.0", "60.0", "65.0", "50.0", "90.0", "2.0000"]


def test_the_last_number_of_any_answer_counts():
    completions = ["The answer is 1,234.", "12 + 3 = 15\n#### 15", "no number", "1234 in all, said 2"]
    references = ["#### 1234", "#### 15", "#### 3", "#### 1234"]
    rows = [{"completion": c, "reference": r} for c, r in zip(completions, references, strict=True)]
    assert correct_by_last_number({"predictions": rows}) == 2


def test_one_line_for_a_logging_interval():
    logs = {"loss": "0.5", "grad_norm": 3.0, "learning_rate": "0.004"}
    assert log_line(100, 600, logs) == "step 100 of 600: loss 0.5000, learning rate 0.004"
    assert log_line(100, 600, {"eval_loss": 0.25}) == "step 100 of 600: held-out loss 0.2500"
    assert log_line(600, 600, {"train_runtime": 1.0}) is None
