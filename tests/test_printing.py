"""What a run prints: tables that fit a screen, and a line for each logging interval."""

import io

from rich.console import Console

from loopdropout_trainer.evaluation import BenchmarkResult, Prediction
from loopdropout_trainer.record.identity import identity_key
from loopdropout_trainer.record.measurement import BASE, NONE, Measurement
from loopdropout_trainer.runs.printing import log_line, print_results
from loopdropout_trainer.runs.result import Result


def answers(correct, total=40):
    """A result with `correct` correct answers."""
    rows = [
        Prediction("?", f"1 + 1 = 2\n#### {7 if index < correct else 8}", "5 + 2 = 7\n#### 7", None, index < correct)
        for index in range(total)
    ]
    return BenchmarkResult("arithmetic_test", rows)


def result(method, p, correct, by_depth):
    identity = {"settings": {"p": p}}
    key = identity_key(identity)
    facts = {"writer": "training", "identity": key, "run": key, "method": method, "steps": 12_345, "depth": 4}
    costs = {"trainable_parameters": 1_234_567, "examples": 123_456, "train_loss": 0.1234, "train_seconds": 12345}
    rows = answers(0).measurements(**{**facts, "method": BASE, "gates": NONE})
    for loop, number in [(None, correct), *enumerate((1, 2, 3, correct), start=1)]:
        rows += answers(number).measurements(**facts, loop=loop)
    for depth, number in enumerate(by_depth, start=1):
        rows += answers(number).measurements(**{**facts, "depth": depth}) if depth != 4 else []
    rows += [Measurement(**facts, family="cost", metric=name, value=value) for name, value in costs.items()]
    rows.append(Measurement(**facts, family="curve", metric="train_loss", value=9.0, step=1))
    for loop, value in enumerate((90.0, 55.0, 60.0, 65.0, 50.0)):  # the first: in all loops
        rows.append(
            Measurement(**facts, family="single_loop", metric="loss_reduction", value=value, loop=loop or None)
        )
    rows.append(Measurement(**facts, family="single_loop", metric="frozen_loss", value=2.0, gates=NONE))
    return Result(rows, {key: identity}, {"adapter": "out"})


def test_everything_fits_80_columns():
    ours = result("Loop Dropout", 0.5, 12, (5, 12, 12, 12, 20, 11, 5, 0))
    lora = result("LoRA", None, 30, (0, 5, 30, 30, 20, 10, 5, 0))
    console = Console(file=io.StringIO(), width=80)
    print_results([ours, lora], range(1, 9), console)
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


def test_one_line_for_a_logging_interval():
    logs = {"loss": "0.5", "grad_norm": 3.0, "learning_rate": "0.004"}
    assert log_line(100, 600, logs) == "step 100 of 600: loss 0.5000, learning rate 0.004"
    assert log_line(100, 600, {"eval_loss": 0.25}) == "step 100 of 600: held-out loss 0.2500"
    assert log_line(600, 600, {"train_runtime": 1.0}) is None
