"""The README's first command and the GSM8K recipe, from the command line, a few steps each."""

import hashlib
import math

import pytest
import yaml
from conftest import ROOT, SAMPLES, load_script
from processes import python
from transformers import AutoModelForCausalLM, AutoTokenizer

import loopdropout_trainer  # noqa: F401  (registers Ouro)
from loopdropout_trainer.evaluation import Subject, evaluate_subject, load_benchmark
from loopdropout_trainer.evaluation.results import LAST_NUMBER
from loopdropout_trainer.record.measurement import BASE, read_measurements
from loopdropout_trainer.runs.result import read_run
from loopdropout_trainer.settings.arguments import TINY_OURO_PATH


def run(*words, launcher=()):
    return python(*launcher, ROOT / "recipes" / "sft.py", *words, cwd=ROOT)


def rows_of_base(folder):
    rows, _, faults = read_measurements(folder)
    assert not faults
    rows = [row for row in rows if row.method == BASE]
    assert rows
    return rows


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """The quickstart's folder and what it printed, after a few steps."""
    folder = tmp_path_factory.mktemp("quickstart") / "run"
    short = ("--max_steps", 6, "--num_train_examples", 64, "--num_eval_examples", 8)
    short += ("--benchmark_limit", 4, "--depths", 1, 2, 3)
    launcher = ("-m", "accelerate.commands.launch", "--num_processes", "1", "--cpu")
    return folder, run(ROOT / "recipes/quickstart.yaml", *short, "--output_dir", folder, launcher=launcher)


def test_it_trains_measures_and_saves_both_methods(quickstart):
    folder, printed = quickstart
    runs = [read_run(folder / name) for name in (".", "lora")]
    trained = [run.result.training for run in runs]
    assert [(row.method, row.depth, row.steps) for row in trained] == [("Loop Dropout", 4, 6), ("LoRA", 4, 6)]
    assert [run.identity["settings"]["p"] for run in runs] == [0.5, None]
    # The peak of a process that has trained two adapters is nobody's memory.
    peaks = [run.result.value("peak_memory_gb") for run in runs]
    assert peaks[0] > 0.1 and math.isnan(peaks[1])
    assert rows_of_base(folder) == rows_of_base(folder / "lora")
    for run in runs:
        result = run.result
        assert run.facts["versions"]["trl"]
        frozen = result.value("frozen_loss")
        for loop in (1, 2, 3, 4, None):
            rho = 100 * (frozen - result.value("loss", loop)) / frozen
            assert result.value("loss_reduction", loop) == pytest.approx(rho)
        scores = [result.scores(depth=depth) for depth in (1, 2, 3, 4)]
        scores += [result.scores(loop=loop) for loop in (1, 2, 3, 4)]
        assert all(list(row) == ["arithmetic_easy_test"] for row in scores)
        assert all(row["arithmetic_easy_test"].total == 4 for row in scores)
        last = result.value("readout_loss", 4)  # the model's loss
        assert last == pytest.approx(result.value("loss"), rel=1e-5)
    assert runs[0].result.value("frozen_loss") == runs[1].result.value("frozen_loss")  # the same base and problems
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    words = ("Loop Dropout", "LoRA", "before training", "last number", "loop 4", "K=3", "Accuracy on")
    for said in (*words, str(folder / "merged")):
        assert said in printed


def test_merging_later_gives_the_same_model(quickstart, tmp_path):
    folder, _ = quickstart
    words = ("--adapter", str(folder), "--merged_dir", str(tmp_path / "merged"))
    load_script("recipes/merge.py").main([str(folder / "recipe.yaml"), *words])
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "merged" / name).read_bytes() == (folder / "merged" / name).read_bytes(), name
    card = (folder / "merged" / "README.md").read_text()
    assert "| Training data | arithmetic" in card and "rule: loop_dropout" in card
    assert str(ROOT) not in card  # nobody's folders


def test_the_saved_recipe_repeats_the_run(quickstart, tmp_path):
    folder, _ = quickstart
    recipe = folder / "recipe.yaml"
    assert yaml.safe_load(recipe.read_text())["max_steps"] == 6
    run(recipe, "--output_dir", tmp_path, "--benchmarks", "arithmetic_easy_test", "--compare_with", "lora")
    again, before = (read_run(path) for path in (tmp_path, folder))
    assert again.identity["settings"]["p"] == before.identity["settings"]["p"]
    assert again.result.training.method == before.result.training.method
    for metric in ("train_loss", "frozen_loss", "loss"):
        assert again.result.value(metric) == before.result.value(metric), metric


def test_gsm8k_runs_as_it_stands_on_real_problems_with_the_tiny_model(tmp_path):
    words = ("--train_files", SAMPLES / "gsm8k.jsonl", "--model_name_or_path", "tiny-ouro")
    words += ("--num_train_examples", 8, "--num_eval_examples", 2, "--max_length", 1024, "--max_steps", 2)
    run(ROOT / "recipes/gsm8k.yaml", *words, "--output_dir", tmp_path)
    trained = read_run(tmp_path).result.training
    assert (trained.method, trained.steps) == ("Loop Dropout", 2)


def test_the_tiny_model_is_what_its_card_says():
    """Before fine-tuning it solves most problems, needs its loops, and never writes the task's ending."""
    assert sum(path.stat().st_size for path in TINY_OURO_PATH.iterdir()) < 4e6
    card = (TINY_OURO_PATH / "README.md").read_text(encoding="utf-8")
    assert hashlib.sha256((TINY_OURO_PATH / "model.safetensors").read_bytes()).hexdigest() in card
    model = AutoModelForCausalLM.from_pretrained(TINY_OURO_PATH)
    tokenizer = AutoTokenizer.from_pretrained(TINY_OURO_PATH)
    problems = load_benchmark("arithmetic_easy_test", limit=100)
    correct = {}
    for model.config.num_loops in (1, 2, 4, 8):
        result = evaluate_subject(Subject(model, tokenizer, 100), problems, progress=False)
        assert result.correct <= 2
        rows = result.measurements(writer="test", identity="test")
        correct[model.config.num_loops] = next(sum(row.verdicts) for row in rows if row.family == LAST_NUMBER)
    assert 60 <= correct[4] <= 90
    assert correct[1] < correct[2] < correct[4] - 5
    assert correct[8] < correct[4] - 10
