"""Several data sets or files in one recipe: their shares, what is held out, errors, and what the plan and the card say."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from datasets import Dataset
from trl import pack_dataset

from helpers.errors import user_error
from helpers.files import load_script, read_lines, write_lines
from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer
from loopdropout_trainer.data import (
    DataArguments,
    GRPODataArguments,
    SFTDataArguments,
    label_example,
    load_datasets,
    read_files,
)
from loopdropout_trainer.data.holding_out import interleave
from loopdropout_trainer.data.mixing import Losses
from loopdropout_trainer.data.saved_prompts import find_prompts
from loopdropout_trainer.data.sources import describe_data
from loopdropout_trainer.jobs.example_plan import count_packed_rows
from loopdropout_trainer.results.run_files import read_recipe, read_results, read_run
from loopdropout_trainer.saving.source import find_source
from loopdropout_trainer.tokenizers import load_tokenizer


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """The files a.jsonl with 40 examples, b.jsonl with 10, and others, in the working folder."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    for name, number in (("a", 40), ("b", 10)):
        rows = [{"prompt": f"{name}{i} =", "completion": f" {i}"} for i in range(number)]
        write_lines(Path(f"{name}.jsonl"), rows)
        turns = [{"role": "user", "content": f"{name}?"}, {"role": "assistant", "content": "yes"}]
        write_lines(Path(f"{name}_chat.jsonl"), [{"messages": turns, **({"tools": TOOLS} if name == "a" else {})}] * 3)
    write_lines(Path("other.jsonl"), [{"question": "1", "answer": "2"}])
    write_lines(Path("empty.jsonl"), [{"prompt": "1", "completion": " "}])
    # Of no other file, because repeats of held-out examples are left out.
    question = [{"role": "user", "content": "c?"}]
    write_lines(Path("turns.jsonl"), [{"prompt": question, "completion": turns[1:]}])
    write_lines(Path("text.jsonl"), [{"text": "1"}])
    write_lines(Path("chosen.jsonl"), [{"prompt": "1", "chosen": "2", "rejected": "3"}])


TOOLS = [{"type": "function", "function": {"name": "add"}}]


@pytest.fixture(scope="module")
def ouro_tokenizer():
    return load_tokenizer("tiny-ouro", chat_template="tulu2")


def names(examples):
    return [re.match("[ab]", prompt)[0] for prompt in examples["prompt"]]


def load(tokenizer, *datasets, **fields):
    return load_datasets(DataArguments(datasets=[*datasets], **fields), tokenizer, 100)


def test_interleaved_beginnings_have_the_shares():
    for sizes, shares, numbers in (
        ([40, 10], None, [40, 10]),
        ([40, 10], [0.5, 0.5], [10, 10]),
        ([30, 40, 20], [0.2, 0.5, 0.3], [13, 33, 20]),
    ):
        indices = interleave(sizes, shares)
        starts = np.cumsum([0, *sizes])
        for start, size, number in zip(starts, sizes, numbers, strict=False):
            own = indices[(indices >= start) & (indices < start + size)]
            assert own.tolist() == [*range(start, start + number)]  # the first ones, each of them once
        shares = shares or [size / sum(sizes) for size in sizes]
        for length in range(1, len(indices) + 1):
            own = np.histogram(indices[:length], starts)[0]
            assert np.abs(own - np.array(shares) * length).max() <= 1


def test_fractions_are_those_of_trl(tokenizer):
    from trl import DatasetMixtureConfig, get_dataset
    from trl.scripts.utils import DatasetConfig

    for fractions in ((0.5, 0.5), (3, 1), (0.9, 0.3), (None, None)):
        items = [
            {"path": "json", "data_files": f"{name}.jsonl", "fraction": fraction}
            for name, fraction in zip("ab", fractions, strict=True)
        ]
        theirs = get_dataset(DatasetMixtureConfig(datasets=[DatasetConfig(**item) for item in items]))["train"]
        ours = load(tokenizer, *items)["train"]
        assert sorted(ours["prompt"]) == sorted(theirs["prompt"])


def test_held_out_and_first_examples_are_of_all(tokenizer):
    half = [{"path": "a.jsonl", "fraction": 1}, {"path": "b.jsonl", "fraction": 1}]
    data = load(tokenizer, *half, num_eval_examples=6, num_train_examples=8)
    assert len(data["train"]) == 8 and len(data["eval"]) == 6 and {*names(data["eval"])} == {"a", "b"}
    assert 3 <= names(data["train"]).count("b") <= 5 and {*data["train"]["prompt"]}.isdisjoint(data["eval"]["prompt"])
    again = load(tokenizer, *half, num_eval_examples=6)
    assert again["eval"]["prompt"][:] == data["eval"]["prompt"][:]


def test_an_item_names_files_splits_and_columns(tokenizer):
    Path("folder").mkdir()
    write_lines(Path("folder/train.jsonl"), [{"prompt": f"b{i} =", "completion": " 1", "id": i} for i in range(3)])
    items = [
        {"path": "a.jsonl", "split": "train[:2]"},
        {"path": "folder", "columns": ["prompt", "completion"]},
        {"path": "json", "data_files": ["b.jsonl", "b.jsonl"], "split": "train[5:15]"},
    ]
    train = load(tokenizer, *items)["train"]
    assert sorted(train["prompt"]) == sorted(
        ["a0 =", "a1 =", "b0 =", "b1 =", "b2 =", *(f"b{i} =" for i in (*range(5, 10), *range(5)))]
    )


def test_a_mapping_holds_for_all_parts_or_for_its_own(tokenizer):
    for name, question, answer in (
        ("q1", "question", "answer"),
        ("q2", "question", "answer"),
        ("r", "input", "output"),
    ):
        rows = [{question: f"{name}_{i}", answer: i} for i in range(3)]
        write_lines(Path(f"{name}.jsonl"), rows)
    shared = {"prompt_template": "{question} =", "target_prefix": " ", "column_mapping": {"completion": "answer"}}
    same = [{"path": "q1.jsonl"}, {"path": "q2.jsonl"}]
    other = {"path": "r.jsonl", "column_mapping": {"question": "input", "completion": "output"}}
    train = load(tokenizer, *same, other, **shared)["train"]
    expected = {(f"{name}_{i} =", f" {i}") for name in ("q1", "q2", "r") for i in range(3)}
    assert {*zip(train["prompt"], train["completion"], strict=True)} == expected
    without = [{"path": "a.jsonl", "column_mapping": {}}, {"path": "q1.jsonl"}]  # the columns have their names already
    mapping = {"prompt": "question", "completion": "answer"}
    assert {*load(tokenizer, *without, column_mapping=mapping)["train"]["prompt"]} >= {"a0 =", "q1_0"}


def test_parts_of_a_file_have_their_own_usable_rows(tokenizer):
    """The cache of the first part's usable rows is not taken for the second part's."""
    rows = [{"prompt": f"a{i} =", "completion": f" {i}" if i >= 3 else " ", "text": f"b{i}"} for i in range(20)]
    write_lines(Path("a.jsonl"), rows)
    pairs = {"path": "a.jsonl", "columns": ["prompt", "completion"]}
    train = load(tokenizer, {**pairs, "split": "train[:5]"}, {**pairs, "split": "train[10:]"})["train"]
    assert sorted(train["prompt"]) == sorted(f"a{i} =" for i in (3, 4, *range(10, 20)))


def test_tools_of_some_conversations(ouro_tokenizer):
    train = load(ouro_tokenizer, {"path": "a_chat.jsonl"}, {"path": "b_chat.jsonl"})["train"]
    assert [row["tools"] for row in train] == [TOOLS, None] * 3


A, B = {"path": "a.jsonl"}, {"path": "b.jsonl"}
WRONG = [
    ([A, {**B, "fraction": 0.5}], "`fraction` must be set for all of the 2 `datasets` or for none, got 1"),
    ([{**A, "fraction": -1}, {**B, "fraction": 2}], "`fraction` of a.jsonl must be a number above 0, got -1"),
    ([{**A, "fraction": 0}, {**B, "fraction": 1}], "`fraction` of a.jsonl must be a number above 0, got 0"),
    ([{**A, "fraction": "half"}], "`fraction` of a.jsonl must be a number above 0, got 'half'"),
    ([{**A, "weight": 1}], "`weight` is not a field of an item of `datasets`. Did you mean 'fraction'"),
    ([{**A, "weigth": 1}], "`weigth` is not a field of an item of `datasets`. Did you mean 'fraction'"),
    ([{**A, "split": 3}], "`split` in `datasets` must be a text, got 3"),
    ([{"split": "train"}], "`path` must be set for each item of `datasets`"),
    ([{"path": "json"}], "`data_files` must be set if `path` is json"),
    ([{**A, "column_mapping": ["prompt"]}], "`column_mapping` in `datasets` must be a mapping"),
    (
        [A, {**B, "column_mapping": {"prompt": "x"}}],
        "The data of b.jsonl must have `x`, got the columns prompt, completion",
    ),
    (["a.jsonl"], r"An item of `datasets` must be a mapping such as {path: a.jsonl}, got 'a.jsonl'"),
    ([A, {"path": "none.jsonl"}], "The file none.jsonl does not exist"),
    ([A, {**B, "columns": ["prompt", "x"]}], "`columns` of b.jsonl must be among prompt, completion, got x"),
    (
        [A, {"path": "other.jsonl"}],
        "The data of other.jsonl must have .*`prompt` and `completion`;.* got the columns question, answer. `column_mapping` "
        "renames columns .for one data set, in its item of `datasets`., for example `column_mapping: {prompt: question, "
        "completion: answer}`, and",
    ),
    ([A, {"path": "empty.jsonl"}], "The data of empty.jsonl must have an example with text in completion, got ' '"),
    (None, "`dataset_name` or `train_files` must be set, or `datasets` for several"),
]


def test_mapping_that_other_data_needs_is_not_to_be_removed(tokenizer):
    """The advice is followed, and then the data of both files is read."""
    write_lines(Path("own.jsonl"), [{"instruction": f"{i} =", "output": f" {i}"} for i in range(4)])
    mapping = {"prompt": "instruction", "completion": "output"}
    own, pairs = {"path": "own.jsonl"}, {"path": "a.jsonl"}
    reason = "because the data has `prompt` and `completion`.$"
    with user_error(f"Set `column_mapping: {{}}` in the item of a.jsonl in `datasets`, {reason}"):
        load(tokenizer, own, pairs, column_mapping=mapping)
    assert load(tokenizer, own, {**pairs, "column_mapping": {}}, column_mapping=mapping)
    with user_error(
        f"`prompt_template`. Remove it, {reason[:-2]}, and write the prompts of the other data into its files"
    ):
        load(tokenizer, own, pairs, prompt_template="{instruction}", column_mapping={"completion": "output"})
    with user_error(f"`x` as `completion`. Remove `column_mapping`, {reason}"):
        load(tokenizer, pairs, column_mapping={"completion": "x"})
    held_out = {"eval_files": ["a.jsonl"]}
    with user_error(f"Move `column_mapping` into the items of `datasets`, {reason}"):
        load(tokenizer, own, column_mapping=mapping, **held_out)
    assert load(tokenizer, {**own, "column_mapping": mapping}, **held_out)


@pytest.mark.parametrize(("datasets", "message"), WRONG)
def test_wrong_mixtures_raise(ouro_tokenizer, datasets, message):
    with user_error(message):
        load_datasets(DataArguments(datasets=datasets), ouro_tokenizer, 100)


PAIR = {"prompt": "1 =", "completion": " 1"}
TURNS = {name: [{"role": "user", "content": text}] for name, text in PAIR.items()}
FORMATS = ["a.jsonl", "a_chat.jsonl", "turns.jsonl", "text.jsonl"]


def labeled(examples):
    return sorted((example["input_ids"], example["labels"]) for example in examples)


@pytest.mark.parametrize(("files", "losses"), [
    (FORMATS, (None, False)), (FORMATS, (False, False)), (FORMATS[:3], (None, True)), (FORMATS[1:3], (False, True)),
])  # fmt: skip
def test_formats_in_a_mixture_are_trained_as_alone(ouro_tokenizer, files, losses):
    """TRL would read all examples in the format of the first one."""
    items = [{"path": file} for file in files]
    mixed = load_datasets(DataArguments(datasets=items), ouro_tokenizer, 100, *losses)["train"]
    assert mixed.column_names == ["input_ids", "labels"]
    alone = []
    for file in files:
        rows = load_datasets(DataArguments(train_files=[file]), ouro_tokenizer, 100)["train"]
        alone += [label_example(row, ouro_tokenizer, *losses) for row in rows]
    assert labeled(mixed) == labeled(alone)
    assert label_example(mixed[0], ouro_tokenizer) == mixed[0]


def test_prefix_of_pairs_in_a_mixture_is_tokenized_as_alone(ouro_tokenizer):
    """Together with the prompt, whose last token has the prefix in it here."""
    one = write_lines(Path("one.jsonl"), [{"prompt": "a1", "completion": "3"}])
    items = [{"path": one}, {"path": "b_chat.jsonl"}]
    mixed = load_datasets(DataArguments(datasets=items, target_prefix="2"), ouro_tokenizer, 100)["train"]
    (alone,) = load_datasets(DataArguments(train_files=[one], target_prefix="2"), ouro_tokenizer, 100)["train"]
    assert alone["input_ids"] in [*mixed["input_ids"]]


def test_mixed_formats_have_the_tokens_and_labels_of_trl(ouro_tokenizer, tmp_path):
    args = {"max_length": 100, "bf16": False, "report_to": "none", "assistant_only_loss": True}
    datasets = {}
    for name, files, changes in (
        ("mixed", ["b.jsonl", "b_chat.jsonl"], {}),
        ("pairs", ["b.jsonl"], {"assistant_only_loss": False}),
        ("chats", ["b_chat.jsonl"], {}),
    ):
        data = DataArguments(datasets=[{"path": file} for file in files])
        rows = load_datasets(data, ouro_tokenizer, 100, assistant_only_loss=True)["train"]
        config = LoopDropoutConfig(str(tmp_path), **{**args, **changes})
        trainer = LoopDropoutSFTTrainer("tiny-ouro", config, train_dataset=rows, processing_class=ouro_tokenizer)
        datasets[name] = [*trainer.train_dataset]
        assert trainer.args.assistant_only_loss is {**args, **changes}["assistant_only_loss"]
    assert labeled(datasets["mixed"]) == labeled(datasets["pairs"] + datasets["chats"])


def test_held_out_file_of_another_format_has_its_own_labels(ouro_tokenizer):
    for train, held_out in (("a.jsonl", "b_chat.jsonl"), ("b_chat.jsonl", "b.jsonl"), ("a.jsonl", "turns.jsonl")):
        data = load_datasets(DataArguments(train_files=[train], eval_files=[held_out]), ouro_tokenizer, 100)
        alone = load_datasets(DataArguments(train_files=[held_out]), ouro_tokenizer, 100)["train"]
        assert labeled(data["eval"]) == labeled([label_example(row, ouro_tokenizer) for row in alone])
        assert "labels" not in data["train"].column_names
    args = DataArguments(train_files=["b_chat.jsonl"], eval_files=["text.jsonl"])
    with user_error(
        "`assistant_only_loss` must be false for the examples of `eval_files`, which are texts without turns"
    ):
        load_datasets(args, ouro_tokenizer, 100, assistant_only_loss=True)


def test_held_out_preferences_are_not_mixed_with_other_formats(ouro_tokenizer):
    for train, held_out in (("a.jsonl", "chosen.jsonl"), ("chosen.jsonl", "b.jsonl")):
        data = load_datasets(DataArguments(train_files=[train], eval_files=[held_out]), ouro_tokenizer, 100)
        for name, file in (("train", train), ("eval", held_out)):
            alone = load_datasets(DataArguments(train_files=[file]), ouro_tokenizer, 100)["train"]
            assert data[name].to_list() == alone.to_list()
    with user_error(
        r"examples of `eval_files` must have a format of SFT, .*, got prompt \(text\), chosen \(text\), rejected"
    ):
        load(ouro_tokenizer, {"path": "a.jsonl"}, {"path": "b_chat.jsonl"}, eval_files=["chosen.jsonl"])


@pytest.mark.parametrize(("row", "losses", "text"), [
    (TURNS, (None, False), "the completion"), (TURNS, (None, True), "the assistant's turns of the completion"),
    (TURNS, (False, True), "the assistant's turns of the prompt and the completion"), (TURNS, (False, False), "all tokens"),
    (PAIR, (None, True), "the completion"), (PAIR, (False, True), "all tokens"),
])  # fmt: skip
def test_losses_of_pairs_are_named(row, losses, text):
    features = Dataset.from_list([row]).features
    assert Losses(*losses).describe(features, "a.jsonl") == text
    how = ", as plain text, without the chat template" if row is PAIR else ""
    assert Losses(*losses).describe(features, "a.jsonl", has_template=True) == text + how


@pytest.mark.parametrize(("kind", "files", "losses", "message"), [
    (GRPODataArguments, ["a.jsonl", "turns.jsonl"], (), r"must have the same columns, got prompt \(text\), completion .text. "
     r"in a.jsonl, and prompt \(messages\), completion \(messages\) in turns.jsonl.$"),
    (DataArguments, ["a.jsonl", "chosen.jsonl"], (), r"must have the same columns, got .*, and prompt .text., chosen"),
    (SFTDataArguments, ["a_chat.jsonl", "text.jsonl"], (None, True), "`assistant_only_loss` must be false for the examples of "
     "text.jsonl, which are texts without turns."),
])  # fmt: skip
def test_formats_that_do_not_mix_raise(ouro_tokenizer, kind, files, losses, message):
    with user_error(message):
        load_datasets(kind(datasets=[{"path": file} for file in files]), ouro_tokenizer, 100, *losses)


@pytest.mark.parametrize("assistant_only_loss", [False, True])
@pytest.mark.parametrize("rarer", ["chats", "pairs"])
def test_rows_of_another_format_in_a_file_are_named(ouro_tokenizer, log, assistant_only_loss, rarer):
    pairs, chats = read_lines(Path("a.jsonl"))[:7], read_lines(Path("b_chat.jsonl")) * 2
    rows, formats = (
        [*pairs[:2], *chats[:4]],
        "`prompt` and `completion` instead of `messages` in row 1 of {0}, row 2 of {0}",
    )
    if rarer == "chats":
        rows = [*pairs, *chats]
        formats = (
            "`messages` instead of `prompt` and `completion` in row 8 of {0}, row 9 of {0}, row 10 of {0} and 3 more"
        )
    data = DataArguments(train_files=[write_lines(Path("both.jsonl"), rows)])
    got = f"must have rows of one format, got {formats}. Put the rows of each format into a file of their own, and list the "
    got += "files in `datasets` of a"
    with user_error("The data of both.jsonl " + got.format("both.jsonl")):
        load_datasets(data, ouro_tokenizer, 100, assistant_only_loss=assistant_only_loss)
    args = LoopDropoutConfig("run", assistant_only_loss=assistant_only_loss)
    with user_error("`train_dataset` " + got.format("`train_dataset`")):
        LoopDropoutSFTTrainer(
            "tiny-ouro", args, train_dataset=read_files("both.jsonl"), processing_class=ouro_tokenizer
        )
    assert "left out" not in log.text and "ignored" not in log.text


@pytest.mark.parametrize(("name", "hint"), [("message", " Did you mean 'messages'.$"), ("dialog", "$")])
def test_rows_with_a_mistyped_column_are_named(ouro_tokenizer, name, hint):
    """Unless other rows have such a column, too, which is then no mistake."""
    (chat, *_) = read_lines(Path("b_chat.jsonl"))
    other = {name: chat["messages"]}
    data = DataArguments(train_files=[write_lines(Path("both.jsonl"), [chat, other, {"messages": []}])])
    with user_error(f"must have `messages` in each row, got `{name}` instead in row 2 of both.jsonl.{hint}"):
        load_datasets(data, ouro_tokenizer, 100)
    data = DataArguments(train_files=[write_lines(Path("both.jsonl"), [{**chat, **other}, other])])
    assert len(load_datasets(data, ouro_tokenizer, 100)["train"]) == 1
    rows = [{"prompt": "1", "reply": "2"}, {"prompt": "1", "replly": "2"}]
    data = DataArguments(train_files=[write_lines(Path("both.jsonl"), rows)], column_mapping={"completion": "reply"})
    with user_error(
        "must have `reply` in each row, got `replly` instead in row 2 of both.jsonl. Did you mean 'reply'.$"
    ):
        load_datasets(data, ouro_tokenizer, 100)


def test_first_row_without_text_is_named(ouro_tokenizer, log):
    rows = [*read_lines(Path("a.jsonl"))[:2], {"prompt": "1", "completion": " "}]
    data = DataArguments(train_files=[write_lines(Path("both.jsonl"), rows)])
    load_datasets(data, ouro_tokenizer, 100)
    assert "The first one is row 3 of" in log.text and "which has" not in log.text


def test_long_examples_of_a_mixture_are_left_out(ouro_tokenizer):
    """By the tokens of each format, of which those of chats are more."""
    items = DataArguments(datasets=[{"path": "b.jsonl"}, {"path": "b_chat.jsonl"}])
    lengths = [*map(len, load_datasets(items, ouro_tokenizer, 100)["train"]["input_ids"])]
    for longest in {*lengths}:
        rows = load_datasets(items, ouro_tokenizer, longest)["train"]
        assert [*map(len, rows["input_ids"])] == [length for length in lengths if length <= longest]


SYSTEM = {"role": "system", "content": "Add."}
CHAT = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize(("examples", "settings"), [
    ([{"messages": [SYSTEM, *CHAT]}, {"prompt": "1", "completion": "2"}],
     {"is_chat": True, "has_plain_texts": True, "system_turn": "Add."}),
    ([{"messages": CHAT}, {"prompt": [SYSTEM, *CHAT[:1]], "completion": CHAT[1:]}],
     {"is_chat": True, "has_system_turns": True}),
    ([{"text": "1"}, {"prompt": "1", "completion": "2"}], {"is_chat": False}),
])  # fmt: skip
def test_prompts_of_a_mixture_are_saved(examples, settings):
    """They decide the format of `chat`, which cannot see it in tokens."""
    assert find_prompts(examples) == settings


def test_prompts_of_a_mixture_in_python_are_saved(ouro_tokenizer):
    """As by the command, also of a shuffled part."""
    data = load_datasets(DataArguments(datasets=[{"path": "b.jsonl"}, {"path": "b_chat.jsonl"}]), ouro_tokenizer)
    rows = data["train"].shuffle(seed=0).select(range(8))
    args = LoopDropoutConfig("run", use_cpu=True, bf16=False)
    trainer = LoopDropoutSFTTrainer("tiny-ouro", args, train_dataset=rows, processing_class=ouro_tokenizer)
    settings = trainer.saved_settings()
    assert settings["is_chat"] and settings["has_plain_texts"]


def test_plan_says_which_loss_each_format_gets(capsys):
    chats = {
        "chat_template": "tulu2",
        "datasets": [{"path": "b.jsonl"}, {"path": "b_chat.jsonl"}, {"path": "turns.jsonl"}],
        "num_eval_examples": 9,
    }
    sft({**RECIPE, **chats}, "--dry_run", "true", "--completion_only_loss", "false")
    printed = capsys.readouterr().out
    assert re.search(
        r"of the 10 examples of b.jsonl, \d held out, loss on all tokens, as plain text, without the chat template\n",
        printed,
    )
    assert re.search(
        r"b_chat.jsonl, \d held out, loss on all tokens \(`assistant_only_loss: true`: the ass.* turns\)\n", printed
    )
    sft({**RECIPE, **chats}, "--assistant_only_loss", "true", "--max_steps", "1")
    printed = capsys.readouterr().out
    assert re.search(r"b_chat.jsonl, \d held out, loss on the assistant's turns\n", printed)
    assert re.search(
        r"of the 10 examples of b.jsonl, \d held out, loss on the completion, as plain text, without the chat template\n",
        printed,
    )
    source = find_source("run")
    assert source.choose_prompt_format(load_tokenizer("tiny-ouro", chat_template="tulu2")).text is None
    assert source.is_chat and source.metadata["has_plain_texts"] and "system_turn" not in source.metadata
    # The base model has no chat template of its own.
    load_script("recipes/diagnose.py").main(["run", "--diagnostics", "single_loop", "--use_cpu", "true"])
    measured = read_results(Path("run/diagnostics"))
    assert {row["method"] for row in measured} == {"base model", "Loop Dropout"}
    args = DataArguments(
        datasets=chats["datasets"], num_eval_examples=9, split_seed=read_recipe("run").get("split_seed", 0)
    )
    data = load_datasets(args, load_tokenizer("tiny-ouro", chat_template="tulu2"), None, assistant_only_loss=True)
    num_tokens = sum(label != -100 for example in data["eval"] for label in example["labels"][1:])
    assert {row["n"] for row in measured} == {num_tokens}
    assert any(len(example["labels"]) > 9 for example in data["eval"])  # a chat


def test_plan_names_the_loss_of_held_out_files(capsys):
    """Where their format is another one, the loss of the training does not compare with it."""
    own = {"chat_template": "tulu2", "datasets": None, "num_eval_examples": 0}
    pairs = "loss on the completion, as plain text, without the chat template"
    chats = "loss on all tokens (`assistant_only_loss: true`: the assistant's turns)"
    for train, held_out, lines in (
        (["a.jsonl"], "b_chat.jsonl", [f"training: {pairs}", f"`eval_files`: {chats}"]),
        (["b_chat.jsonl"], "turns.jsonl", [f"training: {chats}", "`eval_files`: loss on the completion"]),
        (["a.jsonl"], "b.jsonl", []),
    ):
        sft({**RECIPE, **own, "train_files": train, "eval_files": [held_out]}, "--dry_run", "true")
        printed = capsys.readouterr().out.splitlines()
        assert [line.strip() for line in printed if "loss on" in line] == lines
    mixed = {"datasets": [{"path": "a.jsonl"}, {"path": "a_chat.jsonl"}], "eval_files": ["b.jsonl"]}
    sft({**RECIPE, **own, **mixed}, "--dry_run", "true")
    assert f"            `eval_files`: {pairs}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["a.jsonl", "other.jsonl"], "same columns .*got prompt, completion in {} and question, answer in {}"),
        (["b.jsonl", "sharegpt.json"], "same columns .*got prompt, completion in {} and conversations in {}"),
        (["sharegpt.json", "b.jsonl"], "same columns .*got conversations in {} and prompt, completion in {}"),
        (["b_chat.jsonl", "turn.jsonl"], "same columns .*another type of `messages` in {1} than in {0}"),
        (["a_chat.jsonl", "pairs.csv"], r"one kind, got {} .json. and {} .csv."),
        (["pairs.csv", "a_chat.jsonl"], r"one kind, got {} .csv. and {} .json."),
    ],
)
def test_files_with_other_columns_raise(tokenizer, files, found):
    """In each order, and with files of several kinds."""
    Path("sharegpt.json").write_text('[{"conversations": [{"from": "human", "value": "a"}]}]')
    Path("turn.jsonl").write_text('{"messages": "a"}')
    Path("pairs.csv").write_text("prompt,completion\na,b\n")
    message = f"{found.format(*files)}. Give each file an item of `datasets` instead, such as `- path: {files[1]}`."
    with user_error(message):
        load_datasets(DataArguments(train_files=files), tokenizer, 100)


def test_rows_of_a_pattern_have_their_file(tokenizer, log):
    """A row is counted in its own file, however the file is named."""
    for number in (1, 2):
        Path(f"part{number}.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 2)
    with open("part2.jsonl", "a") as file:
        file.write('{"prompt": "a", "completion": ""}\n')
    for name in ("part*.jsonl", f"{Path.cwd()}/part*.jsonl"):
        load_datasets(DataArguments(train_files=[name]), tokenizer, 100)
        assert f"row 3 of {name.replace('*', '2')}." in log.text
        log.clear()


def test_paths_of_a_mixture_may_begin_with_a_tilde(tokenizer, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(load(tokenizer, {"path": "~/a.jsonl"}, {"path": "~/b.jsonl"})["train"]) == 50


def test_mixtures_exclude_other_sources():
    with user_error("Set either `train_files: .*` or `datasets: .*, not both"):
        DataArguments(datasets=[A], train_files=["b.jsonl"])


RECIPE = {
    "model_name_or_path": "tiny-ouro", "dtype": "float32", "bf16": False, "use_cpu": True, "report_to": "none",
    "per_device_train_batch_size": 2, "max_steps": 3, "save_steps": 1, "save_total_limit": 3, "num_eval_examples": 2,
    "output_dir": "run", "learning_rate": 1e-3, "max_length": 64, "num_sample_completions": 0,
    "datasets": [{"path": "a.jsonl", "fraction": 0.75}, {"path": "b.jsonl", "fraction": 0.25}],
}  # fmt: skip


def sft(recipe, *words):
    Path("mixed.yaml").write_text(yaml.safe_dump(recipe))
    load_script("recipes/sft.py").main(["mixed.yaml", *words])


def test_plan_and_card_show_the_mixture(capsys):
    sft(RECIPE, "--dry_run", "true", "--preview", "0")
    printed = capsys.readouterr().out
    assert "data        75% a.jsonl, 25% b.jsonl\n" in printed
    mixed = re.search(
        r"38, 2 held out, 3 .* epochs\n +(\d+) of the 40 .* a.jsonl \((.*) instead of 75%\), (\d) held out\n"
        r" +(\d+) of the 10 .* b.jsonl \((.*) instead of 25%\), (\d) held out\n",
        printed,
    )
    share_a, share_b = mixed[2], mixed[5]
    num_a, held_out_a, num_b, held_out_b = map(int, mixed.group(1, 3, 4, 6))
    assert [share_a, share_b] == [f"{100 * number / 38:.3g}%" for number in (num_a, num_b)]
    assert (num_a + num_b, held_out_a + held_out_b, num_a + held_out_a) == (38, 2, 30)
    assert "left out" not in printed and "a0 =⟦ 0" in printed
    for name in ("a", "b"):
        assert re.search(rf"\nExample 0 of {name}.jsonl:\n{name}\d =⟦ ", printed)
    with user_error(f"`preview` must be from 0 to {num_a - 1}, got {num_a}."):
        sft(RECIPE, "--dry_run", "true", "--preview", str(num_a))
    sft(RECIPE, "--num_sample_completions", "2")
    assert len(re.findall("(?m)^completion: ", capsys.readouterr().out)) == 2
    data = f"75% a.jsonl ({share_a} of the examples), 25% b.jsonl ({share_b} of the examples)"
    assert f"| Training data | {data} |" in Path("run/README.md").read_text()
    assert read_recipe("run")["datasets"] == RECIPE["datasets"]
    public = {"path": "user/data", "fraction": 1}
    assert describe_data({"datasets": [public, {**A, "path": "/home/me/a.jsonl", "fraction": 3}]}, True) == (
        "25% user/data, 75% a.jsonl"
    )


def test_mixture_resumes_exactly_and_only_as_it_was(capsys):
    sft(RECIPE, "--num_sample_completions", "1")
    weights = Path("run/adapter_model.safetensors").read_bytes()
    for name in ("run.json", "adapter_model.safetensors", "results.jsonl", "checkpoint-3"):
        path = Path("run", name)
        path.rename(path.with_name(f"old_{name}"))
    assert "\ncompletion: " in capsys.readouterr().out
    sft(RECIPE, "--resume_from_checkpoint", "true")
    assert "completion: " not in capsys.readouterr().out
    assert Path("run/adapter_model.safetensors").read_bytes() == weights
    other = {**RECIPE, "datasets": [{"path": "a.jsonl", "fraction": 0.5}, {"path": "b.jsonl", "fraction": 0.5}]}
    with user_error("`datasets` changed from"):
        sft(other, "--resume_from_checkpoint", "true")


def test_recipe_replaces_the_inherited_data(capsys):
    Path("base.yaml").write_text(yaml.safe_dump({**RECIPE, "datasets": None, "train_files": ["a.jsonl"]}))
    sft({"extends": "base.yaml", "datasets": RECIPE["datasets"], "dry_run": True})
    assert "75% a.jsonl" in capsys.readouterr().out
    load_script("recipes/sft.py").main(
        [
            "base.yaml",
            "--dry_run",
            "true",
            "--datasets",
            "{path: a.jsonl, fraction: 1}",
            "{path: b.jsonl, fraction: 1}",
        ]
    )
    assert "data        50% a.jsonl, 50% b.jsonl" in capsys.readouterr().out


def test_plan_counts_repeated_examples(capsys):
    """Also those that differ in a column that is not trained on."""
    rows = [{"id": f"row {i}", "prompt": f"{i % 4} =", "completion": " 1"} for i in range(9)]
    write_lines(Path("c.jsonl"), rows)
    sft({**RECIPE, "datasets": None, "train_files": ["c.jsonl"], "num_eval_examples": 0}, "--dry_run", "true")
    assert "\n            5 of the 9 examples repeat another one\n" in capsys.readouterr().out


def test_plan_shows_what_is_left_out(capsys):
    rows = [{"prompt": f"{i} =", "completion": " 1"} for i in range(20)]
    rows += [{"prompt": "1", "completion": " " + "2" * 200}] * 3 + [{"prompt": "3", "completion": ""}] * 2
    write_lines(Path("c.jsonl"), [*rows, rows[0]])
    recipe = {**RECIPE, "datasets": None, "train_files": ["c.jsonl"], "num_eval_examples": 15, "max_steps": -1}
    sft({**recipe, "num_train_epochs": 4}, "--dry_run", "true")
    plan = capsys.readouterr().out
    examples, warning, *left_out = plan[plan.index("examples  ") : plan.index("training  ")].splitlines()
    assert warning.strip() == "more examples are held out than trained on (`num_eval_examples`)"
    pattern = r"examples +(\d+), (\d+) held out.*, (\d+) optimizer steps, 4 epochs"
    number, held_out, steps = map(int, re.search(pattern, examples).groups())
    assert steps == 4 * math.ceil(number / 2)
    first_row = ". The first one is row 24 of c.jsonl"
    assert sum(line.endswith(first_row) for line in left_out) == 1
    left_out = [
        re.sub(r"\. The (first|longest) one is row \d+ of c.jsonl(, with \d+ tokens)?$", "", line) for line in left_out
    ]
    left = {reason: int(count) for line in left_out for count, reason in [re.search(r"(\d+) (.*)", line).groups()]}
    assert left.pop("examples, because they have no text to train on (`prompt` is null or `completion` is empty)") == 2
    too_long = [
        left.pop(f"{noun}s, because they have more than 64 tokens", 0)
        or left.pop(f"{noun}, because it has more than 64 tokens", 0)
        for noun in ("example", "held-out example")
    ]
    assert sum(too_long) == 3 and held_out == 15 - too_long[1]
    repeats = left.pop("examples, because they repeat a held-out example", 0)
    repeats += left.pop("example, because it repeats a held-out example", 0)
    assert not left and number + held_out + sum(too_long) + repeats == 24
    if held_out < 15:
        assert f"{held_out} held out of the 15 asked for, because the others have more than 64 tokens" in examples


@pytest.mark.parametrize("kind", ["pairs", "chats"])
def test_plan_counts_rows_of_packed_examples(capsys, kind):
    """It has the numbers of the training, also of few rows, which packing does not fill."""
    recipe = {**RECIPE, "packing": True, "max_steps": -1, "num_train_epochs": 2}
    if kind == "chats":
        rows = []
        for length in (9, 1, 12, 5, 2, 12, 1, 30, 3, 6, 8, 9, 4, 5, 6, 11):
            answer = {"role": "assistant", "content": "x 1" * length}
            rows.append({"messages": [{"role": "user", "content": "a?"}, answer]})
        write_lines(Path("chats.jsonl"), rows)
        recipe |= {"datasets": None, "train_files": ["chats.jsonl"], "chat_template": "tulu2"}
        recipe |= {"assistant_only_loss": True, "max_length": 128}
    sft(recipe, "--dry_run", "true")
    printed = capsys.readouterr().out
    plan = re.search(r"(\d+) in (\d+) packed rows, 2 held out, (\d+) optimizer steps, 2 epochs", printed)
    assert re.search(r"training .* \d packed rows? per step,", printed)
    num_examples, num_rows, steps = map(int, plan.groups())
    sft(recipe)
    values = {row["metric"]: row["value"] for row in read_results("run")}
    assert (values["examples"], values["packed_rows"]) == (num_examples, num_rows)
    saved = read_run("run")["training_data"]
    assert (saved["examples"], saved["packed_rows"]) == (num_examples, num_rows)
    assert json.loads(Path("run/trainer_state.json").read_text())["max_steps"] == steps


def test_plan_counts_tokens_of_small_batches(capsys):
    """The only batch of an epoch has fewer examples than a full one."""
    recipe = {**RECIPE, "per_device_train_batch_size": 64, "max_steps": 3}
    sft(recipe, "--dry_run", "true")
    (about,) = re.findall(r"(?m)^tokens +about ([\d,]+)$", capsys.readouterr().out)
    sft(recipe)
    values = {row["metric"]: row["value"] for row in read_results("run")}
    assert int(about.replace(",", "")) == values["num_tokens"]


@pytest.mark.parametrize("most", [3, 20, 64])
def test_packed_rows_are_those_of_trl(most):
    lengths = np.random.default_rng(most).integers(1, most + 1, size=2500).tolist()
    examples = Dataset.from_dict({"input_ids": [[0] * length for length in lengths]})
    assert count_packed_rows(lengths, 64) == len(pack_dataset(examples, 64, "bfd"))
