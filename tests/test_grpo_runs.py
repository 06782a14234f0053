"""`recipes/grpo.py` and `recipes/dpo.py` from settings to results; GRPO killed and continued, and in two processes."""

import json
import re
import signal

import pytest
import yaml
from conftest import ROOT, load_script
from processes import Program, python, wait_for
from safetensors.torch import load_file

from loopdropout_trainer.data.arithmetic import arithmetic_problems, with_a_mistake
from loopdropout_trainer.runs.result import read_run
from loopdropout_trainer.settings.recipe import load_recipe


grpo, dpo = load_script("recipes/grpo.py"), load_script("recipes/dpo.py")
BOTH = {
    "dtype": "float32", "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none",
    "disable_tqdm": True, "num_eval_examples": 2, "max_steps": 3, "learning_rate": 1e-2, "logging_steps": 1,
    "save_strategy": "steps", "save_steps": 1,
}  # fmt: skip
GRPO = {
    "preparation": "arithmetic", "num_train_examples": 8, "rewards": ["last_number", "gsm8k_format"], "num_generations": 2,
    "max_completion_length": 6, "per_device_train_batch_size": 4, "num_iterations": 2, "benchmarks": ["development"],
    "benchmark_limit": 2, "max_new_tokens": 8,
}  # fmt: skip
DPO = {"preparation": "arithmetic_pairs", "num_train_examples": 12, "per_device_train_batch_size": 2}


def command(folder, model, fields, *words):
    folder.mkdir(exist_ok=True)
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        yaml.safe_dump({**BOTH, "model_name_or_path": str(model), "output_dir": str(folder / "out"), **fields})
    )
    return [str(recipe), *words]


def test_grpo_trains_measures_and_reads_a_finished_run_back(tmp_path, tiny_folder, capsys):
    words = command(tmp_path, tiny_folder, GRPO, "--compare_with", "lora")
    grpo.main([*words, "--dry_run", "true"])
    said = capsys.readouterr().out
    assert "2 for each of 2 prompts every 2 steps, of at most 6 tokens" in said and not (tmp_path / "out").exists()
    grpo.main(words)
    for name, method in (("", "Loop Dropout"), ("lora", "LoRA")):
        result = read_run(tmp_path / "out" / name).result
        assert (result.training.method, result.training.steps) == (method, 3)
        rewards = [row.value for row in result.rows if row.metric == "reward" and row.family == "curve"]
        assert (result.value("reward_first"), result.value("reward_last")) == (rewards[0], rewards[-1])
        assert result.value("num_tokens") > 3 * 4 * 20 and result.value("tokens_per_second") > 0
    assert {"reward,", "first", "last"} <= {*capsys.readouterr().out.split()}
    grpo.main([*words, "--resume_from_checkpoint", "true"])
    assert capsys.readouterr().out.count("is finished: its results are read from") == 2


def test_dpo_trains_on_pairs(tmp_path, tiny_folder):
    dpo.main(
        command(tmp_path, tiny_folder, {**DPO, "eval_strategy": "steps", "eval_steps": 3, "loss_type": "sigmoid"})
    )
    assert (
        read_run(tmp_path / "out").result.training.steps == 3
        and (tmp_path / "out" / "adapter_model.safetensors").is_file()
    )
    log = json.loads((tmp_path / "out" / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    assert {"rewards/margins", "gate_mean"} <= {key for entry in log for key in entry}
    assert any("eval_loss" in entry for entry in log)


def test_a_wrong_answer_goes_wrong_once_and_goes_on_from_there():
    for row in arithmetic_problems("train", 50):
        wrong = with_a_mistake(row["answer"], 7)
        lines, right = wrong.splitlines(), row["answer"].splitlines()
        assert len(lines) == len(right) and lines[-1] == f"#### {lines[-2].split()[-1]}"
        value, errors = int(right[0].split()[0]), 0
        for line, model_line in zip(lines[:-1], right, strict=False):
            left, operator, number, _, result = line.split()
            assert (int(left), operator, number) == (value, *model_line.split()[1:3])
            errors += eval(f"{left} {operator} {number}") != int(result)
            value = int(result)
        assert errors == 1


RECIPES = [*(ROOT / "recipes" / "grpo").glob("*.yaml"), *(ROOT / "recipes" / "dpo").glob("*.yaml")]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_shipped_recipes_name_themselves_and_are_listed(path):
    name = f"{path.parent.name}/{path.stem}"
    assert f"accelerate launch recipes/{path.parent.name}.py recipes/{name}.yaml" in path.read_text()
    assert load_recipe(path)["output_dir"] == f"outputs/{name}"
    assert re.search(f"`{name}.yaml`", (ROOT / "recipes" / "README.md").read_text())


# Processes


@pytest.mark.slow
def test_killed_at_any_step_a_run_ends_with_the_same_bits(tmp_path, tiny_folder):
    """SIGKILL when a checkpoint is complete, also in the middle of the completions' uses; the same command goes on."""
    fields = {**GRPO, "max_steps": 5, "benchmarks": None, "save_total_limit": 1}
    grpo.main(command(tmp_path / "straight", tiny_folder, fields))
    words = command(tmp_path / "killed", tiny_folder, fields, "--resume_from_checkpoint", "true")
    run = [ROOT / "recipes" / "grpo.py", *words]
    for step in (1, 3):
        program, checkpoint = Program(*run), tmp_path / "killed" / "out" / f"checkpoint-{step}"
        wait_for((checkpoint / "manifest.json").exists, program)
        assert program.end() == -signal.SIGKILL
    python(*run)
    files = [tmp_path / name / "out" / "adapter_model.safetensors" for name in ("straight", "killed")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "zero2"])
def test_two_processes_train_as_one_does(tmp_path, tiny_folder, layout):
    if layout == "zero2":
        pytest.importorskip("deepspeed")
    fields = {**GRPO, "max_steps": 2, "benchmarks": None, "save_strategy": "no", "adam_epsilon": 1e-3, "beta": 0.1}
    weights, logs = [], []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        words = command(folder, tiny_folder, {**fields, "per_device_train_batch_size": 4 // processes})
        config = ROOT / "recipes/accelerate" / f"{layout}.yaml"
        launch = ["-m", "accelerate.commands.launch", "--num_processes", "2", "--config_file", config]
        python(*(launch if processes == 2 else ()), ROOT / "recipes" / "grpo.py", *words)
        weights.append(load_file(folder / "out" / "adapter_model.safetensors"))
        run = read_run(folder / "out")
        assert run.facts["num_processes"] == processes
        logs.append([run.result.value(metric) for metric in ("reward_first", "reward_last", "num_tokens")])
    assert logs[0] == logs[1]
    scale = max(weight.abs().max() for weight in weights[0].values())
    for name, weight in weights[0].items():
        assert (weight - weights[1][name]).abs().max() / scale < 2e-4, name
