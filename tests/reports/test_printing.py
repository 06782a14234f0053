"""Printed results and comparisons of the runs of a training."""

from types import SimpleNamespace

import pandas as pd
import pytest

from helpers.files import load_script, write_lines
from loopdropout_trainer.jobs.shown_results import show_results
from loopdropout_trainer.reports.frames import load_results
from loopdropout_trainer.reports.printing import making_report, print_differences, print_notes
from loopdropout_trainer.results.run_files import write_results


@pytest.fixture
def accuracy(tmp_path):
    """`accuracy(num_problems, *tasks)`: accuracies of two methods at two depths, of which Loop Dropout solves all problems."""

    def make(num_problems, *tasks):
        rows = []
        for method, is_right in (("Loop Dropout", 1), ("LoRA", 0)):
            name = f"{method} {num_problems}.jsonl"
            write_lines(tmp_path / name, [{"correct": is_right, "answered": 1}] * num_problems)
            place = {"method": method, "folder": str(tmp_path), "samples": name}
            rows += [{**place, "task": task, "num_loops": depth} for task in tasks for depth in (2, 4)]
        return pd.DataFrame(rows)

    return make


def test_differences_have_one_line_for_each_depth(accuracy, capsys):
    print_differences(accuracy(20, "quiz"))
    _, title, head, *lines, note = capsys.readouterr().out.splitlines()
    assert title == "Loop Dropout minus LoRA, accuracy on the same n problems of quiz"
    assert head.split() == ["K", "n", "points", "[95%", "interval]"]
    assert [line.split()[:3] for line in lines] == [["2", "20", "+100.0"], ["4", "20", "+100.0"]]
    assert "do not include other training seeds" in note


def test_differences_of_several_tasks_name_the_tasks(accuracy, capsys):
    print_differences(accuracy(20, "quiz", "exam"))
    _, title, head, *lines, _ = capsys.readouterr().out.splitlines()
    assert title == "Loop Dropout minus LoRA, accuracy on the same n problems"
    assert head.split()[:3] == ["task", "K", "n"]
    assert [line.split()[:2] for line in lines] == [["quiz", "2"], ["quiz", "4"], ["exam", "2"], ["exam", "4"]]


def test_differences_of_few_problems_have_no_interval(accuracy, capsys):
    print_differences(accuracy(9, "quiz"))
    assert capsys.readouterr().out.count("+100.0, too few problems\n") == 2
    print_differences(accuracy(10, "quiz"))
    assert "too few" not in capsys.readouterr().out


def test_interval_that_the_exact_test_contradicts_is_explained(tmp_path, capsys):
    """Of 50 problems, one model alone solves 7 and the other one 1: +12.0 [+0.3, +22.8], but p = 0.070. Also in reports."""
    note = "McNemar's exact test alone decides what is significant. Near p = 0.05, an interval over problems can exclude 0"
    for num_better, is_explained in ((7, True), (9, False)):
        rows = []
        for method, correct in (("Loop Dropout", [1] * num_better + [0]), ("LoRA", [0] * num_better + [1])):
            folder = tmp_path / f"{method} {num_better}"
            row = {"method": method, "seed": 1, "step": 2, "num_loops": 4, "gates": "unit", "task": "quiz", "n": 50}
            row |= {"metric": "accuracy", "value": 2.0 * sum(correct), "samples": "s.jsonl", "unit": "%"}
            write_results(folder, [row])
            write_lines(
                folder / "s.jsonl", [{"correct": value, "answered": 1, "target": 1} for value in correct + [0] * 42]
            )
            rows.append({**row, "folder": str(folder)})
        print_differences(pd.DataFrame(rows))
        printed = capsys.readouterr().out
        report = load_script("recipes/report.py")
        results = load_results(*(row["folder"] for row in rows))
        report.report_accuracy(results, tmp_path)
        of_report = capsys.readouterr().out
        report.report_comparison([row["folder"] for row in rows], tmp_path, results)
        of_comparison = capsys.readouterr().out
        for text in (printed, of_report, of_comparison):
            assert (note in text) == ("not significant" in " ".join(text.split()).split(note)[0]) == is_explained


def test_methods_of_a_training_have_the_order_of_reports(tmp_path, capsys):
    """Base model, LoRA, then by name, whatever was trained first. Without LoRA, the last run is the baseline."""
    titles = ["Loop Dropout", "CoTo", "LoRA"]
    runs = []
    for title in titles:
        folder = tmp_path / title
        row = {"method": title, "seed": 1, "step": 2, "num_loops": 4, "gates": "unit"}
        rows = [{**row, "task": "training", "metric": "eval_loss", "value": 2.0}]
        rows += [{**row, "task": "quiz", "metric": "accuracy", "value": 50.0, "n": 20, "samples": "answers.jsonl"}]
        base = {**rows[0], "method": "base model", "gates": "none", "seed": None}
        write_results(folder, [*rows, base])
        write_lines(folder / "answers.jsonl", [{"correct": 1, "answered": 1}] * 20)
        options = SimpleNamespace(eval_num_loops=None, single_loop_accuracy=False)
        runs.append(SimpleNamespace(args=SimpleNamespace(output_dir=str(folder)), script_args=options, title=title))
    for chosen, order, baseline in (
        (runs, ["base", "LoRA", "CoTo", "Loop"], "LoRA"),
        (runs[:2], ["base", "CoTo", "Loop"], "CoTo"),
        (runs[1::-1], ["base", "CoTo", "Loop"], "Loop Dropout"),
        (runs[:0:-1], ["base", "LoRA", "CoTo"], "LoRA"),  # whatever is last
    ):
        show_results(chosen)
        out = capsys.readouterr().out
        table = out[out.index("Training at K = 4") :].split("\n\n")[0].splitlines()
        assert [line.split()[0] for line in table[2:]] == order
        assert f" minus {baseline}, accuracy" in out and out.count(" minus ") == len(chosen) - 1


def test_sentences_of_notes_are_printed_once_for_a_report(tmp_path, capsys):
    """A line that shares some sentences with an earlier one has its new ones, and those that a new one refers to."""
    lines = [
        "Seeds: 1. The losses are at K = 4.",
        "Seeds: 1. A new one. The losses are at K = 4.",
        "A new one. It is by 4.",
    ]
    for _ in range(2):  # a second report begins anew
        with making_report(tmp_path / "report"):
            for line in lines:
                print_notes(line)
        assert capsys.readouterr().out == f"{lines[0]}\nA new one.\n{lines[2]}\n"


def test_whole_numbers_of_a_training_have_all_digits(tmp_path, capsys):
    """As in the lines of its log."""
    row = {"task": "training", "method": "LoRA", "seed": 1, "step": 2, "num_loops": 4, "gates": "unit"}
    values = {"eval_loss": 2.771234, "num_tokens": 1302801.0, "train_seconds": 1234.5678}
    write_results(tmp_path, [{**row, "metric": metric, "value": value} for metric, value in values.items()])
    options = SimpleNamespace(eval_num_loops=None, single_loop_accuracy=False)
    show_results([SimpleNamespace(args=SimpleNamespace(output_dir=str(tmp_path)), script_args=options, title="LoRA")])
    assert " ".join(capsys.readouterr().out.split()).startswith(
        "Training at K = 4 method eval_loss num_tokens train_seconds LoRA 2.7712 1302801 1234.6 Everything"
    )
