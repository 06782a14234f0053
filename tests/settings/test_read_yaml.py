"""YAML and JSON of other people: it ends in a sentence, in bounded time and memory."""

import os

import pytest

from helpers.errors import user_error
from helpers.files import load_script
from loopdropout_trainer import LoopDropoutConfig
from loopdropout_trainer.settings.read_yaml import LARGEST_FILE, read_yaml
from loopdropout_trainer.settings.recipe import load_recipe


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40))
TEXTS = [
    (LAUGHS, "at most 100,000 values, also with its aliases"),
    (MERGES, "at most 100,000 values, also with its aliases"),
    ("a: &a [*a]", "at most 50 levels"),
    ("a: " + "[" * 100 + "]" * 100, "at most 50 levels"),
    ("[" * 100_000, "at most 50 levels"),
    ('{"a":' * 20_000, "at most 50 levels"),
    ("a: " + "9" * 100_000, "at most 1000 digits, got 100000"),
    ("a: 1" + ":1" * 50_000, "at most 1000 digits"),
    ("a: 2024-13-45", "month must be in 1..12"),
    ("column_mapping: {messages:chat}", "`messages:chat` must have a space after the colon, as in `messages: chat`"),
    ("a: \x00", "special characters are not allowed"),
    ('a: 1\nextends: "a\\0b"', r"line 2 must not have the character NUL, got 'a\\x00b'"),
    (r'datasets: [{path: "a\u0000b"}]', "line 1 must not have the character NUL"),
    (r'a: "\ud800"', "line 1 must not have half of a UTF-16 pair"),
    ("a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
]


@pytest.mark.parametrize(("text", "message"), TEXTS)
def test_dangerous_text_ends_in_a_sentence(text, message, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load_recipe(path)
    assert str(error.value).startswith(f"The recipe {path} is not readable: ") and len(str(error.value)) < 1000
    with pytest.raises(ValueError, match=f"`rule_args` is not readable: (.|\n)*{message}"):
        read_yaml(text, "`rule_args`")


@pytest.mark.parametrize("name", ["pipe", "link", "folder"])
def test_recipe_must_be_a_file(name, tmp_path):
    os.mkfifo(tmp_path / "pipe")  # never opened for writing, so that reading would wait for ever
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    (tmp_path / "own.yaml").write_text(f"extends: {name}\n")
    for path in (tmp_path / name, tmp_path / "own.yaml"):
        with user_error("must be a file"):
            load_recipe(path)


def test_recipe_has_a_largest_size_and_a_longest_chain(tmp_path):
    (tmp_path / "large.yaml").write_text("# " + "x" * LARGEST_FILE)
    with user_error("must have at most 500,000 bytes"):
        load_recipe(tmp_path / "large.yaml")
    for i in range(30):
        (tmp_path / f"{i}.yaml").write_text(f"extends: {i + 1}.yaml\n")
    with user_error("0.yaml must extend at most 20 recipes"):
        load_recipe(tmp_path / "0.yaml")


@pytest.mark.parametrize(
    "field", ["extends", "train_files", "chat_template", "output_dir", "adapter_name_or_path", "model_name_or_path"]
)
def test_names_of_files_in_recipes_are_possible_names(tmp_path, field):
    (tmp_path / "own.yaml").write_text(f'"{field}": "a\\0b"\n')
    with user_error("own.yaml is not readable: line 1 must not have the character NUL"):
        load_script("recipes/sft.py").main([str(tmp_path / "own.yaml")])


def test_names_of_folders_in_python_are_possible_names():
    with user_error(r"`output_dir` must not have the character NUL, got 'a\\x00b'"):
        LoopDropoutConfig("a\0b", bf16=False)


def test_aliases_are_read():
    assert read_yaml("a: &a {x: 1}\nb: {<<: *a, y: 1e-4}\nc: [*a, *a]", "It") == {
        "a": {"x": 1},
        "b": {"x": 1, "y": 1e-4},
        "c": [{"x": 1}, {"x": 1}],
    }
