"""The key of cached examples: it changes with everything that examples are made from, and with nothing else."""

import copy
import functools
import os
import shutil
import sys
from dataclasses import fields

import pytest

from helpers.files import ROOT, load_script, write_lines
from loopdropout_trainer.data import PREPARATIONS, DataArguments, Preparation, caching, load_datasets
from loopdropout_trainer.data.files import load_rows
from loopdropout_trainer.settings import recipe
from loopdropout_trainer.tokenizers import load_tokenizer, set_chat_template


FILES = {
    "mine.py": (
        "from functools import partial\n"
        "from pathlib import Path\n"
        "import own_helper\n"
        "from loopdropout_trainer.data import PREPARATIONS, Preparation\n\n"
        "ENDINGS = {'prompt': [Path(__file__).with_name('ending.txt').read_text()]}\n"
        "def make(row, args, sign='?'):\n"
        "    import own_late_helper\n"
        "    Path(__file__).with_name('calls.txt').open('a').write('x')\n"
        "    return row['q'], {'prompt': row['q'] + sign + ENDINGS['prompt'][0], 'completion': own_helper.clean(row['a'])}\n"
        "def keep(row, args, tokenizer):\n"
        "    return row['a'] != '9'\n"
        "PREPARATIONS['mine'] = Preparation(partial(make, sign=' ='), ('q', 'a'), keep=keep)\n"
    ),
    "own_helper.py": "def clean(text):\n    return ' ' + text\n",
    "own_late_helper.py": "from own_folder import part\nimport own_folder.inner.part, own_package\n",
    # Folders without __init__.py are packages, too.
    "own_folder/part.py": "",
    "own_folder/inner/part.py": "from . import neighbor\nfrom ..upper import TEXT\n",
    "own_folder/inner/neighbor.py": "",
    "own_folder/upper.py": "TEXT = 'a'\n",
    "own_package/__init__.py": "from .inner import *\n",
    "own_package/inner/__init__.py": "__all__ = ['part']\n",
    "own_package/inner/part.py": "",
    "ending.txt": " Answer:",
    "unrelated.py": "",
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a preparation, the helpers that it imports, and data."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    write_lines(tmp_path / "q.jsonl", [{"q": f"{i} + 1", "a": str(i + 1)} for i in range(10)])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    yield tmp_path
    PREPARATIONS.pop("mine", None)


@pytest.fixture
def arguments(place, monkeypatch):
    """`arguments(**fields)`: arguments, after the user's file has been imported as by a new command."""

    def make(**options):
        monkeypatch.setattr(recipe, "IMPORTED", [])
        for name in [name for name in sys.modules if name.startswith("own_")]:
            sys.modules.pop(name)
        shutil.rmtree(place / "__pycache__", ignore_errors=True)
        recipe.import_files([str(place / "mine.py")])
        return DataArguments(**{"preparation": "mine", "train_files": [str(place / "q.jsonl")], **options})

    return make


@pytest.fixture
def key(arguments):
    """`key(**fields)`: key of the examples in a new command."""

    def make(tokenizer=None, **options):
        args = arguments(**options)
        return caching.examples_key(load_rows(*args.train_sources), args, tokenizer or load_tokenizer("tiny-ouro"))

    return make


EDITS = {
    "example": ("mine.py", "row['q'] + sign", "row['q'] + ' ' + sign"),
    "keep": ("mine.py", "!= '9'", "!= '8'"),
    "bound argument": ("mine.py", "sign=' ='", "sign=' is'"),
    "imported file": ("own_helper.py", "' '", "'  '"),
    "file imported in the function": ("own_late_helper.py", "", "TEXT = 1\n"),
    "file in a folder": ("own_folder/part.py", "", "TEXT = 1"),
    "file in a folder of a folder": ("own_folder/inner/part.py", "", "TEXT = 1\n"),
    "neighbor in a folder": ("own_folder/inner/neighbor.py", "", "TEXT = 1"),
    "file of the folder above": ("own_folder/upper.py", "'a'", "'b'"),
    "package": ("own_package/__init__.py", "", "TEXT = 1\n"),
    "file imported by a star": ("own_package/inner/part.py", "", "TEXT = 1"),
    "text read at the import": ("ending.txt", "Answer", "Solution"),
    "rows": ("q.jsonl", "1 + 1", "2 + 1"),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_key_changes_with_files(place, key, edit):
    name, before, after = edit
    first = key()
    path = place / name
    times = path.stat()
    path.write_text(path.read_text().replace(before, after, 1))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as of a file that was copied with its times
    assert key() != first


OTHER_VALUES = {
    "preparation": "gsm8k",
    "dataset_name": "folder",
    "dataset_config": "main",
    "dataset_revision": "v1",
    "dataset_split": "test",
    "train_files": ["other.jsonl"],
    "datasets": [{"path": "a.jsonl"}],
    "eval_files": ["eval.jsonl"],
    "column_mapping": {"q": "a"},
    "num_train_examples": 3,
    "num_eval_examples": 2,
    "split_seed": 1,
    "prompt_template": "{q}",
    "prompt_end": ":",
    "target_prefix": " ",
    "example_token_limit": None,
    "arithmetic_steps": [1, 2],
}


def test_key_changes_with_each_field(place, arguments):
    assert {*OTHER_VALUES} == {field.name for field in fields(DataArguments)}
    tokenizer, args = load_tokenizer("tiny-ouro"), arguments()
    rows = load_rows(*args.train_sources)
    keys = {caching.examples_key(rows, args, tokenizer)}
    for name, value in OTHER_VALUES.items():
        other = copy.copy(args)
        setattr(other, name, value)
        keys.add(caching.examples_key(rows, other, tokenizer))
    assert len(keys) == len(OTHER_VALUES) + 1


def test_key_changes_with_the_tokenizer(key):
    first, tokenizer = key(), load_tokenizer("tiny-ouro")
    set_chat_template(tokenizer, "tulu2")
    with_template = key(tokenizer)
    tokenizer.add_tokens(["<new>"])
    assert len({first, with_template, key(tokenizer)}) == 3


@pytest.mark.parametrize("file", ["data/tokenizing.py", "data/preparations.py", "arithmetic.py"])
def test_key_changes_with_the_package(tmp_path, monkeypatch, file):
    args, tokenizer = DataArguments("arithmetic"), load_tokenizer("tiny-ouro")
    rows = type("Rows", (), {"cache_files": [], "split": None, "column_names": []})
    first = caching.examples_key(rows, args, tokenizer)
    shutil.copytree(ROOT / "loopdropout_trainer", tmp_path / "loopdropout_trainer")
    monkeypatch.setattr(caching, "PACKAGE", tmp_path / "loopdropout_trainer")
    monkeypatch.setattr(caching, "own_file", lambda module: None)
    assert caching.examples_key(rows, args, tokenizer) == first
    with open(tmp_path / "loopdropout_trainer" / file, "a") as code:
        code.write("# edited\n")
    assert caching.examples_key(rows, args, tokenizer) != first


def test_key_changes_with_versions(key, monkeypatch):
    first = key()
    monkeypatch.setattr(caching, "version", lambda name: "0.0")
    assert key() != first


def test_key_stays(place, key, monkeypatch):
    first, tokenizer = key(), load_tokenizer("tiny-ouro")
    tokenizer(["a", "a longer text"], padding=True, truncation=True, max_length=2)
    monkeypatch.setenv("UNRELATED", "1")
    (place / "unrelated.py").write_text("edited = True\n")
    assert key(tokenizer) == key() == first


def test_unreadable_code_is_not_cached(key, monkeypatch, log):
    class Unpicklable:
        __module__ = "nowhere"

        def __reduce__(self):
            raise TypeError("no")

    first = key()
    monkeypatch.setitem(PREPARATIONS, "other", Preparation(Unpicklable(), ("q", "a")))
    one, other = key(preparation="other"), key(preparation="other")
    assert len({first, one, other}) == 3 and "The examples are not cached" in log.text


def test_notebook_functions_are_compared_by_code(key, monkeypatch):
    keys = set()
    for sign in "+-+":
        make = functools.partial(eval(f"lambda row, args, word: (row['q'], row['q'] + '{sign}' + word)"), word="x")
        monkeypatch.setitem(PREPARATIONS, "other", Preparation(make, ("q", "a")))
        keys.add(key(preparation="other"))
    assert len(keys) == 2


def test_edited_preparation_makes_new_examples(place, arguments):
    tokenizer = load_tokenizer("tiny-ouro")
    first = load_datasets(arguments(), tokenizer, 100)["train"]
    num_calls = len((place / "calls.txt").read_text())
    assert len(first) == 9 and first[0]["prompt"] == "0 + 1 = Answer:"
    again = load_datasets(arguments(), tokenizer, 100)["train"]
    assert again.to_list() == first.to_list()
    assert len((place / "calls.txt").read_text()) == num_calls + 1  # the first example alone, which tells the types
    for old, new in (("'q'] + sign", "'q'] + '!'"), ("!= '9'", "!= '1'")):
        path = place / "mine.py"
        path.write_text(path.read_text().replace(old, new))
        edited = load_datasets(arguments(), tokenizer, 100)["train"]
    assert len(edited) == 9 and edited[0]["prompt"] == "1 + 1! Answer:"


def test_preview_of_an_edited_preparation(place, arguments, capsys):
    main = load_script("recipes/sft.py").main
    command = ["--import", str(place / "mine.py"), "--preparation", "mine", "--train_files", str(place / "q.jsonl")]
    command += ["--model_name_or_path", "tiny-ouro", "--bf16", "false", "--use_cpu", "true", "--max_steps", "1"]
    command += ["--output_dir", str(place / "out"), "--dry_run", "true", "--preview", "0"]
    for text in (" Answer:", " Think step by step:"):
        (place / "ending.txt").write_text(text)
        arguments()
        main(command)
        assert f"0 + 1 ={text}⟦ 1<|endoftext|>⟧" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["data/tokenizing.py", "limits.py", "arithmetic.py"])
def test_key_changes_with_the_code_of_the_package(tmp_path, monkeypatch, name):
    """Of each file that makes an example, also of the one that renders conversations."""
    package = tmp_path / "package"
    shutil.copytree(caching.PACKAGE, package, ignore=shutil.ignore_patterns("tiny_ouro", "__pycache__"))
    monkeypatch.setattr(caching, "PACKAGE", package)
    before = caching.package_code()
    with open(package / name, "a") as file:
        file.write("# changed\n")
    assert caching.package_code() != before
