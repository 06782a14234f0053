"""Files of a folder of somebody else end in a sentence, in bounded time, whatever stands in them."""

import json
import os
import re
import shutil

import pytest

from helpers.errors import user_error
from helpers.files import load_script, write_lines
from helpers.tiny import with_adapter
from loopdropout_trainer import load_model
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.files import read_json_object
from loopdropout_trainer.reports.frames import load_results
from loopdropout_trainer.results.run_files import read_run
from loopdropout_trainer.saving.checkpoints import newest_checkpoint
from loopdropout_trainer.saving.integrity import CHECKSUMS_FILE, find_damage, saving
from loopdropout_trainer.saving.metadata import write_metadata
from loopdropout_trainer.saving.source import find_source
from loopdropout_trainer.tokenizers import load_tokenizer


DEEP = '{"a": ' * 200_000 + "1" + "}" * 200_000
RESULT = {"metric": "accuracy", "value": 1.0, "unit": "%", "task": "b", "method": "LoRA", "seed": 0, "step": 1}
FILES = ("results.jsonl", "run.json", CHECKSUMS_FILE, "loop_dropout.json", "adapter_config.json", "recipe.yaml")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter") / "run"
    with saving(folder):
        with_adapter(load_model("tiny-ouro")).save_pretrained(folder)
        load_tokenizer("tiny-ouro").save_pretrained(folder)
    write_lines(folder / "results.jsonl", [{**RESULT, "num_loops": 4, "gates": "unit", "n": 1}])
    return folder


def read_all(folder):
    """Read a folder as the commands do, and return the sentences of the errors."""
    sentences = []
    for read in (find_source, load_model, find_damage, read_run, newest_checkpoint, load_results):
        try:
            read(folder)
        except UserError as error:
            sentences.append(str(error))
    return sentences


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["deep", "pipe", "device", "bytes", "empty"])
def test_files_of_strangers_end_in_a_sentence(adapter, tmp_path, name, kind):
    folder = shutil.copytree(adapter, tmp_path / "run")
    (folder / "checkpoint-2").mkdir()
    for path in (folder / name, folder / "checkpoint-2" / "trainer_state.json"):
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            path.write_bytes({"deep": DEEP.encode(), "bytes": b"\xff\0\x80", "empty": b""}[kind])
    sentences = read_all(folder)
    assert all("\n" not in sentence and len(sentence) < 600 for sentence in sentences)
    is_no_file = kind in ("pipe", "device")
    is_unread = name == "run.json" or is_no_file and name in ("recipe.yaml", "loop_dropout.json")
    assert bool(sentences) != is_unread or kind == "empty", sentences


@pytest.mark.parametrize("name", ["/dev/zero", "../../../../../../../../dev/zero", "a/../../b"])
def test_digests_of_files_elsewhere_are_not_read(adapter, tmp_path, name):
    folder = shutil.copytree(adapter, tmp_path / "run")
    (folder / CHECKSUMS_FILE).write_text(json.dumps({"xxh3_128": {name: "0"}}))
    assert find_damage(folder) == f"has a damaged {CHECKSUMS_FILE}"


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b"])
def test_digests_of_impossible_names_are_not_read(adapter, tmp_path, name):
    folder = shutil.copytree(adapter, tmp_path / "run")
    (folder / CHECKSUMS_FILE).write_text(json.dumps({"xxh3_128": {name: "0"}}))
    assert re.fullmatch("has (an unreadable|no) '?a.*", find_damage(folder))


FIELDS = [
    ("depths", []),
    ("dtype", "evil"),
    ("initial_adapter", 5),
    ("seed", {"a": 1}),
    ("step", "x"),
    ("method", [1]),
]


@pytest.mark.parametrize(("field", "value"), FIELDS, ids=str)
def test_metadata_of_strangers_ends_in_a_sentence(adapter, tmp_path, field, value):
    folder = shutil.copytree(adapter, tmp_path / "run")
    write_metadata(folder, {field: value})
    with user_error(f"`{field}` in .*loop_dropout.json must"):
        find_source(folder)


def test_long_prompt_of_a_stranger_ends_in_a_sentence(adapter, tmp_path):
    folder = shutil.copytree(adapter, tmp_path / "run")
    write_metadata(folder, {"prompt_template": "x " * 10**5 + "{question}"})
    with user_error("prompt must have fewer tokens than the context of the model, 512, got 200,002"):
        load_script("recipes/chat.py").main([str(folder), "Hi"])


def test_digests_of_pipes_are_not_read(adapter, tmp_path):
    folder = shutil.copytree(adapter, tmp_path / "run")
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    assert find_damage(folder) == "has a tokenizer.json that is not a file"


def test_json_object_names_the_fault(tmp_path):
    path = tmp_path / "a.json"
    for text, fault in (("[1]", "must hold a JSON object"), (DEEP, "too many levels"), ("{", "is not a JSON file")):
        path.write_text(text)
        with pytest.raises(UserError, match=fault):
            read_json_object(path)
