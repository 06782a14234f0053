"""What a run prints at its end: tables that fit a screen, and sentences that are true of them."""

import io
import math

import pytest
from rich.console import Console

from loopdropout_trainer.diagnostics import SingleLoopActivation
from loopdropout_trainer.evaluation import BenchmarkResult, Prediction
from loopdropout_trainer.runs import printing
from loopdropout_trainer.runs.printing import about_accuracy, about_depths, correct_by_last_number, print_results
from loopdropout_trainer.runs.progress import log_line
from loopdropout_trainer.runs.result import RunResult


def answers(right, total=40, start=0):
    """A result whose answers are right for `right` problems from number `start` on."""
    good = [start <= index < start + right for index in range(total)]
    rows = [Prediction("?", f"1 + 1 = 2\n#### {7 if each else 8}", "5 + 2 = 7\n#### 7", None, each) for each in good]
    return BenchmarkResult("arithmetic_test", rows)


def outcome(rule, right, only, by_depth):
    return RunResult(
        *(rule, 0.5 if rule == "loop_dropout" else None, 4, 1_234_567, 12_345, 123_456, 0.1234, 12345),
        base_benchmarks=[answers(0)],
        benchmarks=[answers(right)],
        single_loop=SingleLoopActivation(frozen=2.0, only=only, all_on=0.2),
        single_loop_benchmarks=[answers(number) for number in (1, 2, 3, right)],
        by_depth={depth: answers(number) for depth, number in enumerate(by_depth, start=1)},
    )


def two():
    lora = outcome("lora", 30, (1.0, 1.5, 1.8, 0.5), (0, 5, 30, 30, 20, 10, 5, 0))
    return [outcome("loop_dropout", 12, (0.9, 0.8, 0.7, 1.0), (5, 12, 12, 12, 20, 11, 5, 0)), lora]


def printed(outcomes, width):
    console = Console(file=io.StringIO(), width=width)
    print_results(outcomes, console)
    return console.file.getvalue()


def test_everything_fits_80_columns():
    text = printed(two(), 80)
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    assert text.count("Loop Dropout") >= 4  # a method's name is never broken


def test_sentences_are_true_of_the_numbers():
    ours, lora = two()
    assert "LoRA is 45.0 points more accurate than Loop Dropout" in about_accuracy([ours, lora])
    assert about_depths([ours, lora]) == (
        "Loop Dropout is more accurate at K = 1, 2, 6; LoRA is more accurate at K = 3, 4; they are level at K = 5, 7, 8 "
        "(trained at K = 4; one seed)."
    )
    lora.benchmarks = [answers(13)]
    assert "LoRA is 2.5 points more accurate than Loop Dropout" in about_accuracy([ours, lora])
    lora.benchmarks = [answers(12, start=20)]
    assert "the same accuracy" in about_accuracy([ours, lora])
    text = printed([ours, lora], 200)
    assert "Loop Dropout -5.0, LoRA +25.0." in text  # rho_4 - rho_1: 50 - 55, 75 - 50
    assert "with the adapter in one loop only, in %" in text


@pytest.mark.parametrize(("right", "other", "start"), [(30, 12, 0), (12, 13, 20), (12, 12, 5), (5, 5, 0)])
def test_the_sign_test_counts_coin_tosses(right, other, start):
    one, two = answers(right), answers(other, start=start)
    pairs = list(zip(one.predictions, two.predictions, strict=True))
    wins = sum(a.correct and not b.correct for a, b in pairs)
    losses = sum(b.correct and not a.correct for a, b in pairs)
    tosses = wins + losses
    unlikely = sum(math.comb(tosses, k) for k in range(tosses + 1) if abs(2 * k - tosses) >= abs(wins - losses))
    assert printing.paired_sign_test(one, two) == pytest.approx(unlikely / 2**tosses)


def test_the_last_number_of_any_answer_counts():
    completions = ["The answer is 1,234.", "12 + 3 = 15\n#### 15", "no number", "1234 in all, said 2"]
    references = ["#### 1234", "#### 15", "#### 3", "#### 1234"]
    predictions = [Prediction("?", c, r, None, False) for c, r in zip(completions, references, strict=True)]
    assert correct_by_last_number(BenchmarkResult("x", predictions)) == 2


def test_one_line_for_a_logging_interval():
    logs = {"loss": "0.5", "grad_norm": 3.0, "learning_rate": "0.004"}
    assert log_line(100, 600, logs) == "step 100 of 600: loss 0.5000, learning rate 0.004"
    assert log_line(100, 600, {"eval_loss": 0.25}) == "step 100 of 600: held-out loss 0.2500"
    assert log_line(600, 600, {"train_runtime": 1.0}) is None
