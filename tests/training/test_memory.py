"""The estimated memory of a training: published numbers of weights, and the page that prints it."""

import re
from types import SimpleNamespace

import pytest
import yaml

from helpers.files import ROOT, load_script
from loopdropout_trainer.costs.evaluations import count_answers
from loopdropout_trainer.costs.paper import _load_own_recipe, describe_paper_costs, find_paper_cost
from loopdropout_trainer.costs.published import PAPER_COSTS, PUBLISHED_TASKS
from loopdropout_trainer.costs.trainings import ASSUMED_SHARE, MEASURED_SHARE, PEAK_FLOPS
from loopdropout_trainer.memory import count_operations, estimate_memory
from loopdropout_trainer.settings.arguments import ScriptArguments
from loopdropout_trainer.settings.recipe import load_recipe


SHAPES = load_script("benchmarks/memory.py").SHAPES
WEIGHTS = {  # billions in the frozen model, millions in the paper's adapter
    "Ouro-1.4B": (1.4347, 15.139),
    "Ouro-2.6B": (2.6680, 30.278),
    "Nanbeige4.2-3B": (4.1698, 23.970),
    "Dory1.0-4B": (3.9752, 18.022),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_estimate_counts_published_weights(name):
    parts = estimate_memory(SHAPES[name], 0)
    assert parts["frozen weights"] / 2 == pytest.approx(WEIGHTS[name][0], rel=1e-3)
    assert parts["adapter and optimizer"] / 0.016 == pytest.approx(WEIGHTS[name][1], rel=1e-3)
    assert estimate_memory({"model_type": "llama"}, 4096) == estimate_memory({"model_type": "ouro"}, 4096) == {}


@pytest.mark.parametrize("name", SHAPES)
def test_memory_page_shows_estimates(name):
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    cells = next(line for line in page.splitlines() if line.startswith(f"| {name} |")).split(" | ")[2:]
    options = [{}, {"four_bit": True}, {"checkpointing": False}]
    totals = [estimate_memory(SHAPES[name], size, **chosen)["total"] for size in (4096, 16384) for chosen in options]
    assert [cell.strip("| ") for cell in cells] == [f"{total:.0f}" for total in totals]


@pytest.mark.parametrize("name", SHAPES)
def test_memory_page_shows_computed_hours(name):
    """The hours of 10,000 examples of 250 tokens are those that a plan computes."""
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8").partition("## Time")[2]
    cells = next(line for line in page.splitlines() if line.startswith(f"| {name} |")).strip("| ").split(" | ")[1:]
    operations = count_operations(SHAPES[name])
    hours = []
    for card in ("RTX 4090", "L40S", "H100"):
        times = [operations * 2.5e6 / (share * PEAK_FLOPS[card]) / 3600 for share in (ASSUMED_SHARE, MEASURED_SHARE)]
        hours.append(" to ".join(f"{time:.1f}" for time in times))
    assert cells == [f"{operations / 1e9:.0f}", *hours]
    without = count_operations(SHAPES[name], checkpointing=False)
    assert without / operations == pytest.approx(2 / 3, abs=0.04)  # as the page says


def test_share_of_the_peak_is_that_of_the_papers_run():
    """100,000 examples of 250 tokens in 128.9 minutes of an H100, without checkpointing."""
    operations = count_operations(SHAPES["Ouro-1.4B"], checkpointing=False) * 25e6
    assert operations / (128.9 * 60) / PEAK_FLOPS["H100"] == pytest.approx(MEASURED_SHARE, abs=0.005)
    assert count_operations({"model_type": "llama"}) is None


def test_costs_of_the_paper_are_those_of_its_tables_and_recipes(tmp_path, monkeypatch):
    """For its settings only. The learning rate, the seed and the evaluation do not count, nor a file of the user's."""
    _load_own_recipe.cache_clear()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k.yaml").write_text("max_length: 3")
    table = yaml.safe_load((ROOT / "recipes/tables/matched_expansion.yaml").read_text(encoding="utf-8"))
    costs = {(f"{cost.shortest:.1f}", f"{cost.gigabytes:.2f}") for cost in PAPER_COSTS.values() if cost.gigabytes}
    assert costs == {(minutes, gigabytes) for *_, minutes, gigabytes in table["rows"]}
    for name, cost in PAPER_COSTS.items():
        head = (ROOT / "recipes" / name).read_text(encoding="utf-8").replace("\n#", "")
        minutes = re.search(r"Costs: (\d+)(?: to (\d+))? minutes", head).groups()
        assert [round(cost.shortest), round(cost.longest)] == [int(minutes[0]), int(minutes[1] or minutes[0])]
        recipe = {
            **load_recipe(ROOT / "recipes" / name),
            "learning_rate": 1e-3,
            "seed": 3,
            "output_dir": "x",
            "benchmarks": ["gsm8k"],
        }
        assert find_paper_cost(recipe) is cost
        if recipe.get("p") is not None:
            assert find_paper_cost({**recipe, "p": [recipe["p"]]}) is cost  # as a training reads it
    for change in ({"max_length": 512}, {"p": 0.3}, {"gradient_checkpointing": True}, {"lora_r": 4}, {"max_steps": 2}):
        assert find_paper_cost({**load_recipe("metamath_gsm.yaml"), **change}) is None
    args = SimpleNamespace(world_size=2)
    assert describe_paper_costs([(SimpleNamespace(args=args, recipe=load_recipe("metamath_gsm.yaml")), 1)]) == ""


def test_published_tasks_have_the_answers_of_their_files():
    """Numbers of the paper's problems are in no file of the package."""
    folder = ROOT / "loopdropout_trainer/evaluation/tasks"
    lengths = {}
    for path in folder.glob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        while not (found := re.search(r"max_gen_toks: (\d+)", text)):
            text = (folder / re.search(r"^include: (.*)", text, re.MULTILINE)[1]).read_text(encoding="utf-8")
        lengths[path.stem] = int(found[1])
    assert lengths.pop("own") == 256
    assert {name: PUBLISHED_TASKS[name].max_new_tokens for name in lengths} == lengths


@pytest.mark.parametrize(("fields", "recipe", "text"), [
    ({"benchmarks": ["gsm8k", "mmlu"]}, {}, "at most 15,361 problems and 337,664 generated tokens"),
    ({"benchmarks": ["mmlu", "bbh"], "benchmark_limit": 2}, {}, "at most 168 problems and 55,296 generated tokens"),
    ({"benchmarks": ["arithmetic_test"], "benchmark_limit": 900}, {}, "at most 900 problems and 72,000 generated tokens"),
    ({"benchmarks": ["metamath_math500"], "eval_num_loops": [2, 4], "single_loop_accuracy": True}, {},
     "at most 3,000 problems and 6,144,000 generated tokens"),  # K = 4, K = 2, and 4 single loops
    ({"benchmarks": ["gsm8k", "metamath_math500"], "eval_num_loops": [2, 4]}, {},
     "at most 3,138 problems and 1,699,328 generated tokens"),  # the first one at K = 2, too
    ({"benchmarks": ["development"]}, {"preparation": "gsm8k"}, "at most 500 problems and 128,000 generated tokens"),
    ({"benchmarks": ["mine", "gsm8k"], "own_benchmarks": {"mine": {"files": "x"}}}, {},
     "at most 1,319 problems and 337,664 generated tokens\nnot counted before its problems are loaded: mine"),
    ({"benchmarks": ["mine"], "own_benchmarks": {"mine": {"like": "metamath_gsm8k"}}, "benchmark_limit": 3}, {},
     "at most 3 problems and 1,536 generated tokens"),
    ({"benchmarks": ["mine"], "own_benchmarks": {"mine": 3}, "benchmark_limit": 3}, {},
     "not counted before its problems are loaded: mine"),  # loading it raises an error
    ({"benchmarks": ["mine"], "own_benchmarks": {"mine": {"like": ["a"], "max_new_tokens": "b"}}, "benchmark_limit": 3}, {},
     "not counted before its problems are loaded: mine"),
    ({"benchmarks": ["development"]}, {"preparation": ["a"]}, "not counted before its problems are loaded: development"),
    ({"benchmarks": ["gsm8k", "metamath_math500"], "eval_num_loops": [2], "evaluate_base": True}, {},
     "at most 6,276 problems and 3,398,656 generated tokens"),  # the base model at K = 2, too
    ({}, {}, ""),
])  # fmt: skip
def test_answers_of_evaluations_are_counted(fields, recipe, text):
    assert count_answers(ScriptArguments(**{"evaluate_base": False, **fields}), recipe, 4).describe() == text
