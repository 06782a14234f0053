"""The README's first command and the GSM8K recipe, from the command line, a few steps each."""

import hashlib
import json

import pytest
import yaml
from conftest import ROOT, SAMPLES, load_script
from processes import python
from transformers import AutoModelForCausalLM, AutoTokenizer

import loopdropout_trainer  # noqa: F401  (registers Ouro)
from loopdropout_trainer.evaluation import Subject, evaluate_subject, load_benchmark
from loopdropout_trainer.runs.printing import correct_by_last_number
from loopdropout_trainer.settings.arguments import TINY_OURO_PATH


def run(*words, launcher=()):
    return python(*launcher, ROOT / "recipes" / "sft.py", *words, cwd=ROOT)


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
    ours, lora = (json.loads((folder / name / "results.json").read_text()) for name in (".", "lora"))
    trained = ours["train_info"]
    assert (trained["rule"], trained["p"], trained["num_loops"], trained["steps"]) == ("loop_dropout", 0.5, 4, 6)
    assert (lora["train_info"]["rule"], lora["train_info"]["p"]) == ("lora", None)
    # The peak of a process that has trained two adapters is nobody's memory.
    assert trained["peak_memory_gb"] > 0.1 and lora["train_info"]["peak_memory_gb"] is None
    assert ours["base_benchmarks"] == lora["base_benchmarks"]
    for results in (ours, lora):
        assert set(results["benchmarks"]) == {"arithmetic_easy_test"}
        assert all(counts["total"] == 4 for counts in results["benchmarks"].values())
        measured = results["single_loop"]
        rho = [100 * (measured["frozen"] - loss) / measured["frozen"] for loss in measured["only"]]
        assert measured["reductions_percent"] == pytest.approx(rho)
        assert results["run_info"]["versions"]["trl"]
        assert list(results["by_depth"]) == ["1", "2", "3"]
        assert [each["total"] for each in results["single_loop_benchmarks"]] == [4] * 4
        assert len(results["readout_losses"]) == 4
        assert results["readout_losses"][-1] == pytest.approx(measured["all_on"], rel=1e-5)  # the model's loss
    assert ours["single_loop"]["frozen"] == lora["single_loop"]["frozen"]  # the same base and problems
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
    again, before = (json.loads((path / "results.json").read_text()) for path in (tmp_path, folder))
    assert again["single_loop"] == before["single_loop"]
    for key in ("train_loss", "rule", "p", "steps"):
        assert again["train_info"][key] == before["train_info"][key], key


def test_gsm8k_runs_as_it_stands_on_real_problems_with_the_tiny_model(tmp_path):
    words = ("--train_files", SAMPLES / "gsm8k.jsonl", "--model_name_or_path", "tiny-ouro")
    words += ("--num_train_examples", 8, "--num_eval_examples", 2, "--max_length", 1024, "--max_steps", 2)
    run(ROOT / "recipes/gsm8k.yaml", *words, "--output_dir", tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["train_info"]["rule"], results["train_info"]["steps"]) == ("loop_dropout", 2)


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
        correct[model.config.num_loops] = correct_by_last_number(result.as_json())
    assert 60 <= correct[4] <= 90
    assert correct[1] < correct[2] < correct[4] - 5
    assert correct[8] < correct[4] - 10
