"""Every row of faults.yaml: a user's mistake is one line on standard error with exit code 2, and never a traceback."""

import importlib.util
import json
import math
import os
import re
import shutil
import sys
import typing
from concurrent.futures.process import BrokenProcessPool
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, load_script, with_adapter
from datasets import Dataset
from processes import Program
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from loopdropout_trainer import LoopDropoutConfig, LoopDropoutDPOConfig, errors
from loopdropout_trainer.checks import RANGES
from loopdropout_trainer.data.__main__ import main as data_main
from loopdropout_trainer.diagnostics.rows import RowArguments
from loopdropout_trainer.evaluation.run import EvaluationArguments
from loopdropout_trainer.experimental.grpo_config import LoopDropoutGRPOConfig
from loopdropout_trainer.gates.__main__ import main as gates_main
from loopdropout_trainer.runs.sweep import SweepArguments
from loopdropout_trainer.settings.arguments import TINY_OURO_PATH, ModelArguments, RunArguments


RECIPES, FAULTS = yaml.safe_load(Path(__file__).with_name("faults.yaml").read_text(encoding="utf-8")).values()
TRAINING = RECIPES["sft"]
TOKEN = "hf_secretsecret"


SCRIPTS = ("sft", "dpo", "grpo", "evaluate", "diagnose", "merge", "export", "sweep")
MAINS = {name: load_script(f"recipes/{name}.py").main for name in SCRIPTS} | {"data": data_main, "gates": gates_main}


def locked_folder(folder, patch):
    (folder / "locked").mkdir()
    access = os.access  # as root, everything may be written
    patch.setattr(os, "access", lambda path, mode: Path(path).name != "locked" and access(path, mode))


def link_to_itself(folder, patch):
    (folder / "loop").symlink_to("loop")


def without_optional_packages(folder, patch):
    find = lambda name, find=importlib.util.find_spec: None if name == "deepspeed" else find(name)
    patch.setattr("loopdropout_trainer.training.config.find_spec", find)


def damaged_parquet(folder, patch):
    path = folder / "a.parquet"
    Dataset.from_list([{"prompt": f"{i}" * 50, "completion": "b"} for i in range(500)]).to_parquet(path)
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\x00" * 196 + content[200:])


def adapter_of_another_base(folder, patch):
    adapter(folder)
    path = folder / "adapter" / "adapter_model.safetensors"
    save_file({name: torch.zeros(2, 7) for name in load_file(path)}, path)


def adapter_of_integers(folder, patch):
    adapter(folder)
    path = folder / "adapter" / "adapter_model.safetensors"
    save_file({name: weight.int() for name, weight in load_file(path).items()}, path)


def token_beyond_the_embedding(folder, patch):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(folder / "model")


def adapter(folder, **config):
    base = AutoModelForCausalLM.from_pretrained(TINY_OURO_PATH, dtype=torch.float32)
    with_adapter(base, r=2).save_pretrained(folder / "adapter")
    write_json(folder / "adapter" / "adapter_config.json", **config)


def write_json(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


MAKE = {
    "deep_recipe": lambda folder, patch: (folder / "recipe.yaml").write_text("seed: " + "[" * 3000),
    "jsonl_of_long_numbers": lambda folder, patch: (folder / "a.jsonl").write_text('{"prompt": ' + "9" * 5000 + "}\n"),
    "jsonl_of_brackets": lambda folder, patch: (folder / "a.jsonl").write_text('{"prompt": ' + "[" * 200_000 + "\n"),
    **{make.__name__: make for make in (locked_folder, link_to_itself, without_optional_packages, damaged_parquet)},
    **{make.__name__: make for make in (adapter_of_another_base, adapter_of_integers, token_beyond_the_embedding)},
}


def arguments_of(fault, folder, patch):
    """Make what a row asks for, and return the script's command line."""
    name = fault.get("script", "sft")
    fields = {**RECIPES[name], **fault.get("set", {})}
    fields = {key: value for key, value in fields.items() if value is not None}
    recipes = {"training.yaml": yaml.safe_dump(TRAINING)}
    recipes["recipe.yaml"] = fault.get("text", yaml.safe_dump(fields, sort_keys=False))
    if "model" in fault:
        shutil.copytree(TINY_OURO_PATH, folder / "model")
        write_json(folder / "model" / "config.json", **fault["model"])
    if "adapter" in fault:
        adapter(folder, **fault["adapter"])
    for path, text in {**recipes, **fault.get("files", {})}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(text.encode("latin-1"))
    if "cut" in fault:
        (folder / fault["cut"]).write_bytes((folder / fault["cut"]).read_bytes()[:3000])
    if "pickle" in fault:
        torch.save(load_file(folder / fault["pickle"]), (folder / fault["pickle"]).with_suffix(".bin"))
    for path in (*fault.get("remove", ()), *({fault["pickle"]} if "pickle" in fault else ())):
        (folder / path).unlink()
    if "make" in fault:
        MAKE[fault["make"]](folder, patch)
    return fault.get("argv_only") or ["recipe.yaml", *fault.get("argv", [])]


def title(fault):
    given = {key: value for key, value in fault.items() if key not in ("says", "script", "files")}
    return f"{fault.get('script', 'sft')}-{json.dumps(given)[:70]}"


@pytest.mark.parametrize("fault", FAULTS, ids=title)
def test_a_mistake_is_one_line_with_exit_code_2(fault, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *args: "y")  # nobody is asked whether a model may run code
    name = fault.get("script", "sft")
    argv = arguments_of(fault, tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "argv", [name, *argv])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        errors.run_command(lambda: MAINS[name](argv), name)
    assert stop.value.code == 2
    said = capsys.readouterr()
    (line,) = [line for line in said.err.splitlines() if line.startswith(f"{name}: ")]
    assert fault["says"] in line
    assert "Traceback" not in said.err and TOKEN not in said.out + said.err
    assert not (tmp_path / "ran").exists()


def launched(folder, *words, **fields):
    """What a command prints to both streams about a recipe, in the order in which it comes, and its exit code."""
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**TRAINING, **fields}))
    program = Program(*words, "recipe.yaml", cwd=folder, output=folder / "said.txt", fresh=True)
    code = program.wait()
    return program.stdout, code


def test_two_launched_processes_say_it_once(tmp_path):
    launch = ["-m", "accelerate.commands.launch", "--num_processes", "2", "--main_process_port", "0"]
    launch += ["--config_file", str(ROOT / "recipes/accelerate/ddp.yaml"), str(ROOT / "recipes/sft.py")]
    said, code = launched(tmp_path, *launch, lora_alpha=0)
    assert code != 0
    assert said.count("`lora_alpha` must be a number above 0; got 0.") == said.count("Loading PyTorch") == 1
    assert 'recipes/sft.py", line' not in said  # no traceback of ours; the launcher has its own words
    assert re.search(r"exitcode\s*: 2", said)


@pytest.mark.parametrize("words", [(str(ROOT / "recipes/sft.py"),), ("-m", "loopdropout_trainer", "sft")])
def test_the_first_line_comes_at_once_and_the_error_last_by_the_name_that_was_typed(tmp_path, words):
    said, code = launched(tmp_path, *words, model_name_or_path="nowhere")
    lines, name = said.splitlines(), "loopdropout sft" if "sft" in words else "sft.py"
    assert (code, lines[0]) == (2, "Loading PyTorch, transformers and TRL ...") and "Traceback" not in said
    assert lines[-1].startswith(f"{name}: The model nowhere cannot be loaded")


CONFIGS = (LoopDropoutConfig, LoopDropoutDPOConfig, LoopDropoutGRPOConfig)


@pytest.mark.parametrize("cls", CONFIGS)
def test_no_number_of_any_configuration_may_be_nan_or_infinite(cls, tmp_path):
    config, hints = cls(str(tmp_path), use_cpu=True), typing.get_type_hints(cls)
    config.check_numbers()
    numeric = [field.name for field in fields(cls) if re.search("int|float", str(hints[field.name])) and field.init]
    assert len(numeric) > 30
    for name in numeric:
        wrap = (lambda number: [number]) if "list" in str(hints[name]) else (lambda number: number)
        for wrong in (math.nan, math.inf, {"a": [math.nan]}):
            before = getattr(config, name)
            setattr(config, name, wrong if isinstance(wrong, dict) else wrap(wrong))
            with pytest.raises(ValueError, match=f"`{name}` must|in `{name}` must"):
                config.check_numbers()
            setattr(config, name, before)
    config.check_numbers()


def test_the_table_of_ranges_names_fields_that_exist():
    own = (ModelArguments, RunArguments, EvaluationArguments, RowArguments, SweepArguments)
    assert set(RANGES) <= {field.name for cls in (*CONFIGS, *own) for field in fields(cls)}


# --- what the one place lets through, and what it does not ---


Terminated = type("Terminated", (KeyboardInterrupt,), {"signal": "SIGTERM"})
ERRORS = [
    (KeyboardInterrupt(), 130, "interrupted."),
    (Terminated("stopped after step 3."), 143, "stopped after step 3."),
    (OSError(28, "No space left on device", "/data"), 2, "/data cannot be used: No space left on device."),
    (ModuleNotFoundError("No module named 'x'", name="x"), 2, "`x` is not installed"),
    (BrokenProcessPool("A process in the pool was terminated"), 2, "Another process of this run ended"),
]


def test_our_own_faults_keep_their_traceback_and_a_signal_a_full_disk_and_a_missing_package_are_one_line(capsys):
    for fault in (lambda: {}["missing"], lambda: torch.zeros(2) @ torch.zeros(3), lambda: int("x")):
        with pytest.raises((KeyError, RuntimeError, ValueError)):
            errors.run_command(fault, "script")
    for error, code, text in ERRORS:
        with pytest.raises(SystemExit) as stop:
            errors.run_command(lambda error=error: (_ for _ in ()).throw(error), "script")
        said = capsys.readouterr().err
        assert stop.value.code == code and said.startswith("script: ") and text in said and said.count("\n") == 1
