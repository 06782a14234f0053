"""Every row of faults.yaml: a user's mistake is one line on standard error with exit code 2, and never a traceback."""

import gzip
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from peft import PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from loopdropout_trainer import default_peft_config
from loopdropout_trainer.data.__main__ import main as data_main
from loopdropout_trainer.gates.__main__ import main as gates_main
from loopdropout_trainer.settings import command
from loopdropout_trainer.settings.arguments import TINY_OURO_PATH


ROOT = Path(__file__).parents[1]
FAULTS = yaml.safe_load(Path(__file__).with_name("faults.yaml").read_text(encoding="utf-8"))
TOKEN = "hf_secretsecret"
TRAINING = {
    "model_name_or_path": "tiny-ouro",
    "dtype": "float32",
    "preparation": "arithmetic",
    "num_train_examples": 8,
    "num_eval_examples": 2,
    "max_steps": 1,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,
    "output_dir": "out",
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}
RECIPES = {
    "sft": TRAINING,
    "dpo": {**TRAINING, "preparation": "arithmetic_pairs"},
    "grpo": {**TRAINING, "num_generations": 2},
    "data": TRAINING,
    "evaluate": {
        "model_name_or_path": "tiny-ouro",
        "dtype": "float32",
        "benchmarks": ["arithmetic_test"],
        "benchmark_limit": 1,
        "output_dir": "out",
    },
    "merge": {"model_name_or_path": "tiny-ouro", "dtype": "float32", "adapter": "adapter"},
    "sweep": {
        "recipe": "training.yaml",
        "learning_rates": [1e-3],
        "methods": ["lora"],
        "measure": {"benchmarks": ["arithmetic_test"]},
        "print_commands": True,
        "output_dir": "out",
    },
    "gates": {},
}


def script(name):
    spec = importlib.util.spec_from_file_location(f"recipes_{name}", ROOT / "recipes" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.main


MAINS = {name: script(name) for name in ("sft", "dpo", "grpo", "evaluate", "merge", "sweep")}
MAINS |= {"data": data_main, "gates": gates_main}


# --- what the rows ask to be made ---


def binary_recipe(folder, patch):
    (folder / "recipe.yaml").write_bytes(b"seed: \xff\xfe\n")


def deep_recipe(folder, patch):
    (folder / "recipe.yaml").write_text("seed: " + "[" * 3000)


def locked_folder(folder, patch):
    (folder / "locked").mkdir()
    access = os.access  # as root, everything may be written
    patch.setattr(os, "access", lambda path, mode: Path(path).name != "locked" and access(path, mode))


def without_optional_packages(folder, patch):
    find = importlib.util.find_spec
    patch.setattr(
        "loopdropout_trainer.training.config.find_spec", lambda name: None if name == "deepspeed" else find(name)
    )


def model(folder, patch=None, **config):
    """A copy of the packaged model, with other values in its config.json."""
    shutil.copytree(TINY_OURO_PATH, folder / "model")
    write_json(folder / "model" / "config.json", **config)
    return folder / "model"


def adapter(folder, patch=None, **config):
    """An untrained adapter of the packaged model, with other values in its adapter_config.json."""
    base = AutoModelForCausalLM.from_pretrained(TINY_OURO_PATH, dtype=torch.float32)
    get_peft_model(base, default_peft_config(base, r=2)).save_pretrained(folder / "adapter")
    write_json(folder / "adapter" / "adapter_config.json", **config)
    return folder / "adapter"


def write_json(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def cut(path, length):
    path.write_bytes(path.read_bytes()[:length])


def pickled(path):
    torch.save(load_file(path), path.with_suffix(".bin"))
    path.unlink()


def model_with_code(folder, patch):
    path = model(folder, model_type="stranger", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    (path / "evil.py").write_text("open('ran', 'w')\n")
    write_json(path / "tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.T", None]})
    patch.setattr("builtins.input", lambda *args: "y")


def no_tokenizer(folder, patch):
    path = model(folder)
    (path / "tokenizer.json").unlink()
    (path / "tokenizer_config.json").unlink()


def damaged_gzip(folder, patch):
    content = bytearray(gzip.compress(b'{"prompt": "a", "completion": "b"}\n' * 100))
    content[15:40] = b"\xff" * 25
    (folder / "a.jsonl.gz").write_bytes(content)


def damaged_parquet(folder, patch):
    path = folder / "a.parquet"
    Dataset.from_list([{"prompt": f"{i}" * 50, "completion": "b"} for i in range(500)]).to_parquet(path)
    content = bytearray(path.read_bytes())
    content[4:200] = b"\x00" * 196
    path.write_bytes(content)


def adapter_of_another_base(folder, patch):
    path = adapter(folder) / "adapter_model.safetensors"
    save_file({name: torch.zeros(2, 7) for name in load_file(path)}, path)


def prefix_adapter(folder, patch):
    PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM").save_pretrained(adapter(folder))


MAKE = {
    "empty_model": lambda folder, patch: (folder / "model").mkdir(),
    "model_without_loops": lambda folder, patch: LlamaConfig(num_hidden_layers=1).save_pretrained(folder / "model"),
    "broken_config": lambda folder, patch: (model(folder) / "config.json").write_text('{"model_type": '),
    "config_of_words": lambda folder, patch: model(folder, hidden_size="wide"),
    "config_without_heads": lambda folder, patch: model(folder, num_attention_heads=0),
    "config_of_a_billion_loops": lambda folder, patch: model(folder, total_ut_steps=10**9),
    "pickled_model": lambda folder, patch: pickled(model(folder) / "model.safetensors"),
    "cut_weights": lambda folder, patch: cut(model(folder) / "model.safetensors", 5000),
    "other_weights": lambda folder, patch: model(folder, intermediate_size=64),
    "no_weights": lambda folder, patch: (model(folder) / "model.safetensors").unlink(),
    "broken_tokenizer": lambda folder, patch: (model(folder) / "tokenizer.json").write_text('{"version": '),
    "jsonl_of_long_numbers": lambda folder, patch: (folder / "a.jsonl").write_text('{"prompt": ' + "9" * 5000 + "}\n"),
    "jsonl_of_brackets": lambda folder, patch: (folder / "a.jsonl").write_text('{"prompt": ' + "[" * 200_000 + "\n"),
    "jsonl_of_bytes": lambda folder, patch: (folder / "a.jsonl").write_bytes(b'{"prompt": "\xff"}\n'),
    "cut_gzip": lambda folder, patch: (folder / "a.jsonl.gz").write_bytes(gzip.compress(os.urandom(2000))[:200]),
    "empty_adapter": lambda folder, patch: (folder / "adapter").mkdir(),
    "pickled_adapter": lambda folder, patch: pickled(adapter(folder) / "adapter_model.safetensors"),
    "cut_adapter": lambda folder, patch: cut(adapter(folder) / "adapter_model.safetensors", 3000),
    "adapter_of_words": lambda folder, patch: (adapter(folder) / "adapter_config.json").write_text("words"),
    "adapter_of_rank_zero": lambda folder, patch: adapter(folder, r=0),
    "adapter_of_alpha_zero": lambda folder, patch: adapter(folder, lora_alpha=0),
    "adapter_with_slow_pattern": lambda folder, patch: adapter(folder, rank_pattern={"(.*)*x": 4}),
    "adapter_with_broken_results": lambda folder, patch: (adapter(folder) / "results.json").write_text(
        '{"benchmarks": 5}'
    ),
}


# --- walking the list ---


def arguments_of(fault, folder, patch):
    """Make what a row asks for, and return the script's command line."""
    name = fault.get("script", "sft")
    (folder / "training.yaml").write_text(yaml.safe_dump(TRAINING))
    fields = {**RECIPES[name], **fault.get("set", {})}
    fields = {key: value for key, value in fields.items() if value is not None}
    (folder / "recipe.yaml").write_text(fault.get("text", yaml.safe_dump(fields, sort_keys=False)))
    for path, text in fault.get("files", {}).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    if "make" in fault:
        (MAKE.get(fault["make"]) or globals()[fault["make"]])(folder, patch)
    return fault.get("argv_only") or ["recipe.yaml", *fault.get("argv", [])]


def title(fault):
    given = {key: value for key, value in fault.items() if key not in ("says", "script", "files")}
    return f"{fault.get('script', 'sft')}-{json.dumps(given)[:70]}"


@pytest.mark.parametrize("fault", FAULTS, ids=title)
def test_a_mistake_is_one_line_with_exit_code_2(fault, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = fault.get("script", "sft")
    argv = arguments_of(fault, tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "argv", [name, *argv])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        command.run_command(lambda: MAINS[name](argv), name)
    assert stop.value.code == 2
    said = capsys.readouterr()
    lines = [line for line in said.err.splitlines() if line.startswith(f"{name}: ")]
    assert len(lines) == 1
    assert fault["says"] in lines[0]
    assert "Traceback" not in said.err
    assert TOKEN not in said.out + said.err
    assert not (tmp_path / "ran").exists()


def test_the_list_is_long():
    assert len({title(fault) for fault in FAULTS}) >= 300


# --- processes ---


def launched(folder, *command):
    """What a command prints to both streams, in the order in which it comes, and its exit code."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    keywords = {"cwd": folder, "env": env, "text": True, "timeout": 240}
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **keywords)
    return done.stdout, done.returncode


def test_two_launched_processes_say_it_once(tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**TRAINING, "lora_alpha": 0}))
    launch = ["-m", "accelerate.commands.launch", "--num_processes", "2", "--main_process_port", "0"]
    launch += ["--config_file", str(ROOT / "recipes/accelerate/ddp.yaml"), str(ROOT / "recipes/sft.py"), "recipe.yaml"]
    said, code = launched(tmp_path, *launch)
    assert code != 0
    assert said.count("`lora_alpha` must be a number above 0; got 0.") == said.count("Loading ...") == 1
    assert 'recipes/sft.py", line' not in said  # no traceback of ours; the launcher has its own words
    assert re.search(r"exitcode\s*: 2", said)


@pytest.mark.parametrize(
    ("command", "name"),
    [([str(ROOT / "recipes/sft.py")], "sft.py"), (["-m", "loopdropout_trainer", "sft"], "loopdropout sft")],
)
def test_the_first_line_comes_at_once_and_the_error_last_by_the_name_that_was_typed(tmp_path, command, name):
    Path(tmp_path, "recipe.yaml").write_text(yaml.safe_dump({**TRAINING, "model_name_or_path": "nowhere"}))
    said, code = launched(tmp_path, *command, "recipe.yaml")
    lines = said.splitlines()
    assert (code, lines[0]) == (2, "Loading ...")
    assert lines[-1].startswith(f"{name}: The model nowhere cannot be loaded")
    assert "Traceback" not in said


# --- what the one place lets through, and what it does not ---


def raises(error):
    def main():
        raise error

    return main


def test_our_own_faults_keep_their_traceback():
    for fault in (lambda: {}["missing"], lambda: torch.zeros(2) @ torch.zeros(3), lambda: int("x")):
        with pytest.raises((KeyError, RuntimeError, ValueError)):
            command.run_command(fault, "script")


class Terminated(KeyboardInterrupt):
    signal = "SIGTERM"


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (KeyboardInterrupt(), 130, "interrupted."),
        (Terminated("stopped after step 3."), 143, "stopped after step 3."),
        (OSError(28, "No space left on device", "/data"), 2, "/data cannot be used: No space left on device."),
        (
            ModuleNotFoundError("No module named 'x'", name="x"),
            2,
            "The Python package `x` is not installed, which these settings need.",
        ),
    ],
)
def test_a_signal_a_full_disk_and_a_missing_package_are_one_line(capsys, error, code, text):
    with pytest.raises(SystemExit) as stop:
        command.run_command(raises(error), "script")
    assert (stop.value.code, capsys.readouterr().err) == (code, f"script: {text}\n")
