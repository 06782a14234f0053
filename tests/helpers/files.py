"""Paths of the repository, its scripts as modules, and files of lines."""

import importlib.util
import json
import sys
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
TINY_OURO_PATH = ROOT / "loopdropout_trainer" / "tiny_ouro"
GOLDEN, SAMPLES = ROOT / "tests" / "golden", ROOT / "tests" / "samples"


def load_script(path):
    """A script of the repository, such as `recipes/sft.py`, as a module."""
    name = f"script_{Path(path).stem}"  # a package is called `evaluate`, too
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_lines(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def write_lines(path, rows):
    """Write a JSONL file and return its path as text."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_task(path, rows, **fields):
    """Write a task file of lm-eval over a JSONL file."""
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": rows}}, "test_split": "test"}
    path.write_text(json.dumps({**source, **fields}))
    return str(path)
