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


MAINS = {name: script(name) for name in ("sft", "evaluate", "merge", "sweep")}
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
    missing = ("wandb", "mlflow", "liger_kernel", "deepspeed")
    for module in ("config", "preflight"):
        patch.setattr(
            f"loopdropout_trainer.training.{module}.find_spec", lambda name: None if name in missing else find(name)
        )


def model(folder, **config):
    """A copy of the packaged model, with other values in its config.json."""
    shutil.copytree(TINY_OURO_PATH, folder / "model")
    path = folder / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder / "model"


def model_with_code(folder, patch):
    path = model(folder, model_type="stranger", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    (path / "evil.py").write_text("open('ran', 'w')\n")
    tokenizer = json.loads((path / "tokenizer_config.json").read_text())
    tokenizer |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.T", None]}}
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    patch.setattr("builtins.input", lambda *args: "y")


def pickled_model(folder, patch):
    path = model(folder)
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


def empty_model(folder, patch):
    (folder / "model").mkdir()


def model_without_loops(folder, patch):
    LlamaConfig(num_hidden_layers=1).save_pretrained(folder / "model")


def broken_config(folder, patch):
    (model(folder) / "config.json").write_text('{"model_type": ')


def config_of_words(folder, patch):
    model(folder, hidden_size="wide")


def config_without_heads(folder, patch):
    model(folder, num_attention_heads=0)


def config_of_a_billion_loops(folder, patch):
    model(folder, total_ut_steps=10**9)


def cut_weights(folder, patch):
    path = model(folder) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def other_weights(folder, patch):
    model(folder, intermediate_size=64)


def no_weights(folder, patch):
    (model(folder) / "model.safetensors").unlink()


def broken_tokenizer(folder, patch):
    (model(folder) / "tokenizer.json").write_text('{"version": ')


def no_tokenizer(folder, patch):
    path = model(folder)
    (path / "tokenizer.json").unlink()
    (path / "tokenizer_config.json").unlink()


def jsonl_of_long_numbers(folder, patch):
    (folder / "a.jsonl").write_text('{"prompt": ' + "9" * 5000 + "}\n")


def jsonl_of_brackets(folder, patch):
    (folder / "a.jsonl").write_text('{"prompt": ' + "[" * 200_000 + "\n")


def jsonl_of_bytes(folder, patch):
    (folder / "a.jsonl").write_bytes(b'{"prompt": "\xff"}\n')


def damaged_gzip(folder, patch):
    content = bytearray(gzip.compress(b'{"prompt": "a", "completion": "b"}\n' * 100))
    content[15:40] = b"\xff" * 25
    (folder / "a.jsonl.gz").write_bytes(content)


def cut_gzip(folder, patch):
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(os.urandom(1000).hex().encode())[:200])


def damaged_parquet(folder, patch):
    path = folder / "a.parquet"
    Dataset.from_list([{"prompt": f"{i}" * 50, "completion": "b"} for i in range(500)]).to_parquet(path)
    content = bytearray(path.read_bytes())
    content[4:200] = b"\x00" * 196
    path.write_bytes(content)


def adapter(folder, patch, **config):
    """An untrained adapter of the packaged model, with other values in its adapter_config.json."""
    base = AutoModelForCausalLM.from_pretrained(TINY_OURO_PATH, dtype=torch.float32)
    get_peft_model(base, default_peft_config(base, r=2)).save_pretrained(folder / "adapter")
    path = folder / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder / "adapter"


def empty_adapter(folder, patch):
    (folder / "adapter").mkdir()


def pickled_adapter(folder, patch):
    path = adapter(folder, patch)
    torch.save(load_file(path / "adapter_model.safetensors"), path / "adapter_model.bin")
    (path / "adapter_model.safetensors").unlink()


def cut_adapter(folder, patch):
    path = adapter(folder, patch) / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:3000])


def adapter_of_words(folder, patch):
    (adapter(folder, patch) / "adapter_config.json").write_text("words")


def adapter_of_rank_zero(folder, patch):
    adapter(folder, patch, r=0)


def adapter_of_alpha_zero(folder, patch):
    adapter(folder, patch, lora_alpha=0)


def adapter_with_slow_pattern(folder, patch):
    adapter(folder, patch, rank_pattern={"(.*)*x": 4})


def adapter_of_another_base(folder, patch):
    path = adapter(folder, patch) / "adapter_model.safetensors"
    save_file({name: torch.zeros(2, 7) for name in load_file(path)}, path)


def prefix_adapter(folder, patch):
    config = json.loads((adapter(folder, patch) / "adapter_config.json").read_text())
    PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM").save_pretrained(folder / "adapter")
    assert config["peft_type"] == "LORA"


def adapter_with_broken_results(folder, patch):
    (adapter(folder, patch) / "results.json").write_text('{"benchmarks": 5}')


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
        globals()[fault["make"]](folder, patch)
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
    assert len(FAULTS) >= 150
    assert len({title(fault) for fault in FAULTS}) > 0.9 * len(FAULTS)


# --- processes ---

ENV = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
}


def test_two_launched_processes_say_it_once(tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**TRAINING, "lora_alpha": 0}))
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--main_process_port", "0"]
    launch += ["--config_file", str(ROOT / "recipes/accelerate/ddp.yaml")]
    done = subprocess.run(
        [*launch, str(ROOT / "recipes/sft.py"), "recipe.yaml"],
        cwd=tmp_path,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode != 0
    assert done.stderr.count("`lora_alpha` must be a number above 0; got 0.") == 1
    assert 'recipes/sft.py", line' not in done.stderr  # no traceback of ours; the launcher has its own words
    assert re.search(r"exitcode\s*: 2", done.stderr)


def test_a_script_ends_with_exit_code_2_and_nothing_else(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "recipes/sweep.py"), "nowhere.yaml"],
        cwd=tmp_path,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "sweep.py: The recipe nowhere.yaml cannot be read: No such file or directory." in done.stderr
    assert "Traceback" not in done.stderr


# --- what the one place lets through, and what it does not ---


def run(main):
    command.run_command(main, "script")


def test_our_own_faults_keep_their_traceback():
    def broken():
        return {}["missing"]

    def of_a_library():
        torch.zeros(2) @ torch.zeros(3)

    def of_a_builtin():
        int("x")

    for fault, kind in ((broken, KeyError), (of_a_library, RuntimeError), (of_a_builtin, ValueError)):
        with pytest.raises(kind):
            run(fault)


def test_ctrl_c_is_one_line(capsys):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stop:
        run(interrupted)
    assert stop.value.code == 130
    assert capsys.readouterr().err == "script: interrupted.\n"


def test_a_full_disk_and_a_missing_package_are_one_line(capsys):
    def full():
        raise OSError(28, "No space left on device", "/data/adapter")

    def missing():
        import a_package_that_nobody_has  # noqa: F401

    for fault, text in (
        (full, "script: /data/adapter cannot be used: No space left on device.\n"),
        (
            missing,
            "script: The Python package `a_package_that_nobody_has` is not installed, which these settings need.\n",
        ),
    ):
        with pytest.raises(SystemExit) as stop:
            run(fault)
        assert stop.value.code == 2
        assert capsys.readouterr().err == text
