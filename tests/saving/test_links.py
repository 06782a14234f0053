"""Links in a folder of somebody else: nothing is written outside of the folder that a command names."""

import os

import pytest

from helpers.errors import user_error
from helpers.files import GOLDEN, load_script, write_lines
from helpers.tiny import with_adapter
from loopdropout_trainer import load_model
from loopdropout_trainer.files import check_links, lock_folder
from loopdropout_trainer.saving.integrity import saving


RESULT = {"metric": "accuracy", "value": 1.0, "unit": "%", "task": "b", "method": "LoRA", "seed": 0, "step": 1}
RECIPE = "model_name_or_path: tiny-ouro\npreparation: arithmetic\nnum_train_examples: 8\nnum_eval_examples: 2\nmax_steps: 1\n"


def lock(folder):
    with lock_folder(folder):
        pass


def save(folder):
    with saving(folder):
        (folder / "adapter_model.safetensors").write_text("new")


def train(folder):
    (folder.parent / "recipe.yaml").write_text(RECIPE)
    load_script("recipes/sft.py").main([str(folder.parent / "recipe.yaml"), "--output_dir", str(folder)])


def sweep(folder):
    (folder.parent / "recipe.yaml").write_text(RECIPE)
    (folder.parent / "sweep.yaml").write_text(
        f"recipe: {folder.parent}/recipe.yaml\nlearning_rates: [1e-3]\nseeds: [1]\n"
    )
    load_script("recipes/sweep.py").main([str(folder.parent / "sweep.yaml"), "--output_dir", str(folder)])


def export(folder):
    adapter = str(GOLDEN / "authors" / "adapter")
    load_script("recipes/export.py").main(["--adapter", adapter, "--output_dir", str(folder)])


def measure(folder):
    words = ["none", "--model_name_or_path", "tiny-ouro", "--benchmarks", "arithmetic_test"]
    load_script("recipes/evaluate.py").main([*words, "--output_dir", str(folder)])


def diagnose(folder):
    words = ["--model_name_or_path", "tiny-ouro", "--preparation", "arithmetic", "--output_dir", str(folder)]
    words += ["--num_train_examples", "8", "--num_eval_examples", "4"]
    load_script("recipes/diagnose.py").main(words)


def make_adapter(folder):
    with_adapter(load_model("tiny-ouro")).save_pretrained(folder)
    return str(folder)


def merge(folder):
    words = ["--adapter", make_adapter(folder.parent / "adapter"), "--output_dir", str(folder)]
    load_script("recipes/merge.py").main(words)


def merge_in_place(folder):
    load_script("recipes/merge.py").main(["--adapter", make_adapter(folder)])


def report(folder):
    (folder.parent / "run").mkdir()
    write_lines(folder.parent / "run" / "results.jsonl", [{**RESULT, "num_loops": 4, "gates": "unit", "n": 1}])
    load_script("recipes/report.py").main([str(folder.parent / "run"), "--output_dir", str(folder)])


WRITERS = [
    (train, "adapter_model.safetensors"),
    (train, "checkpoint-1/adapter_model.safetensors"),
    (lock, "results.jsonl"),
    (lock, "samples"),
    (lock, "to_a_missing_file"),
    (save, "adapter_model.safetensors"),
    (sweep, "loop_dropout/lr_0.0002/seed_42/log.txt"),
    (export, "adapter_model.safetensors"),
    (merge, "model.safetensors"),
    (merge, "config.json"),
    (merge, "README.md"),
    (merge_in_place, "merged"),
    (merge_in_place, "merged/tokenizer.json"),
    (report, "costs.md"),
    (report, "overview.png"),
    (measure, "results.jsonl"),
    (measure, "recipe.yaml"),
    (measure, "samples"),
    (measure, "cache"),
    (diagnose, "results.jsonl"),
]


@pytest.mark.parametrize(("write", "name"), WRITERS, ids=lambda value: getattr(value, "__name__", value))
def test_writing_does_not_follow_links(write, name, tmp_path):
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    (folder / name).parent.mkdir(parents=True)
    outside.mkdir()
    if name not in ("samples", "cache", "merged"):
        outside /= "victim"
        if name != "to_a_missing_file":
            outside.write_text("mine")
    (folder / name).symlink_to(outside)
    with user_error(f"{folder}/{name} must not be a link to {outside}, outside of the folder"):
        write(folder)
    assert outside.is_dir() and not any(outside.iterdir()) or not outside.exists() or outside.read_text() == "mine"


@pytest.mark.parametrize("write", [train, lock, save, export, merge, report, measure])
def test_pipes_are_not_written(write, tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "adapter_config.json")
    with user_error("adapter_config.json must not be a pipe or a device"):
        write(tmp_path / "folder")


def test_links_inside_a_folder_are_allowed(tmp_path):
    folder = tmp_path / "folder"
    (folder / "checkpoint-2" / "wandb").mkdir(parents=True)
    (folder / "newest").symlink_to("checkpoint-2")
    (folder / "checkpoint-2" / "wandb" / "debug.log").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to(folder)
    check_links(tmp_path / "link")
    check_links(tmp_path / "missing")
