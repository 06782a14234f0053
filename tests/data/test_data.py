"""Training data: examples, loss masks token by token, the choice of examples, and errors."""

import copy
import gzip
import json
import re
import shlex
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import numpy as np
import pandas as pd
import pytest
import yaml
from datasets import Dataset, are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from trl import SFTTrainer

from helpers.errors import user_error
from helpers.files import ROOT, SAMPLES, TINY_OURO_PATH, load_script, read_lines, write_lines
from helpers.processes import Program, free_port, wait_for
from helpers.tiny import tiny_ouro
from helpers.tokenizer import byte_tokenizer
from loopdropout_trainer import LoopDropoutSFTTrainer
from loopdropout_trainer import data as own_data
from loopdropout_trainer.arithmetic import arithmetic_problems
from loopdropout_trainer.data import (
    DataArguments,
    DPODataArguments,
    SFTDataArguments,
    label_example,
    load_datasets,
    preview,
    tokenize,
)
from loopdropout_trainer.data.files import load_rows, read_files
from loopdropout_trainer.data.formats import TEXTS, check_contents, check_turns
from loopdropout_trainer.data.sources import DataSource
from loopdropout_trainer.saving.source import find_source
from loopdropout_trainer.tokenizers import load_tokenizer, set_chat_template
from loopdropout_trainer.training.row_checks import RowReader, check_rows


ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Response:"
)
PAIR = {"prompt": "p", "completion": "c"}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def bytes_tokenizer(tokenizer):
    """One token per byte, and Tulu's turns."""
    tokenizer = copy.deepcopy(tokenizer)
    set_chat_template(tokenizer, "tulu2")
    return tokenizer


@pytest.fixture(scope="module")
def bpe_tokenizer():
    """Byte-pair tokens, of which some span a prompt and its completion."""
    return load_tokenizer(TINY_OURO_PATH, chat_template="tulu2")


@pytest.fixture(params=["bytes_tokenizer", "bpe_tokenizer"])
def both_tokenizers(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def load(tmp_path):
    """`load(preparation, rows, tokenizer)`: datasets of rows."""

    def make(preparation, rows, tokenizer, max_length=None, **fields):
        path = write_lines(tmp_path / "rows.jsonl", rows)
        return load_datasets(DataArguments(preparation, train_files=[path], **fields), tokenizer, max_length)

    return make


def show(example, tokenizer, **losses):
    """Text of an example with its trained tokens between ⟦ and ⟧."""
    return preview(label_example(example, tokenizer, **losses), tokenizer)


def conversation(*turns):
    return [{"role": role, "content": content} for role, content in turns]


MADE_UP = [
    conversation(("user", "  Hi \n"), ("assistant", "\n Hello, ünïcode 𝛑 \n\n")),
    conversation(("system", ""), ("user", ""), ("assistant", ""), ("user", "again"), ("assistant", "👩‍👩‍👧‍👦")),
    conversation(("user", "<|assistant|>\nnot a turn"), ("assistant", "a"), ("assistant", "b"), ("user", "thanks")),
]


def test_tulu2_trains_assistant_turns(load, both_tokenizers):
    conversations = [row["messages"] for row in read_lines(SAMPLES / "tulu2.jsonl")] + MADE_UP
    data = load("tulu2", [{"id": "x", "messages": messages} for messages in conversations], both_tokenizers)
    end = both_tokenizers.eos_token
    for messages, example in zip(conversations, data["train"], strict=True):
        turns = [(turn["role"], turn["content"].strip()) for turn in messages]
        texts = [f"<|{role}|>\n" + (f"⟦{text}{end}⟧" if role == "assistant" else text) for role, text in turns]
        assert show(example, both_tokenizers, assistant_only_loss=True) == "\n".join(texts)


def test_gsm8k_trains_the_solution(load, both_tokenizers):
    rows = read_lines(SAMPLES / "gsm8k.jsonl")
    data = load("gsm8k", rows, both_tokenizers, num_eval_examples=0)["train"]
    for row, example in zip(rows, data, strict=True):
        solution = re.sub("<<.*?>>", "", row["answer"]) + both_tokenizers.eos_token
        assert show(example, both_tokenizers) == f"Question: {row['question']}\nAnswer:⟦ {solution}⟧"


def test_tokens_span_a_text_but_not_a_pair():
    tokenizer = byte_tokenizer(["<eos>"], [":T", ":Th"], [(":", "T"), (":T", "h")], eos_token="<eos>")
    for is_one_text, tokens, mask in (
        (False, ["A", ":", "T", "h", "e", "<eos>"], [0, 0, 1, 1, 1, 1]),
        (True, ["A", ":Th", "e", "<eos>"], [0, 1, 1, 1]),
    ):
        columns = tokenize({"prompt": "A:", "completion": "The"}, tokenizer, is_one_text=is_one_text)
        assert (tokenizer.convert_ids_to_tokens(columns["input_ids"]), columns["completion_mask"]) == (tokens, mask)


CHAT = {"prompt": conversation(("user", "1+1?")), "completion": conversation(("assistant", "2"))}
TRAINED = {  # in SFTTrainer's formats
    "pair": (PAIR, {}),
    "whole pair": (PAIR, {"completion_only_loss": False}),
    "text": ({"text": "a text"}, {}),
    "messages": ({"messages": MADE_UP[0]}, {}),
    "assistant": ({"messages": MADE_UP[2]}, {"assistant_only_loss": True}),
    "chat pair": (CHAT, {}),
    "assistant of chat pair": (CHAT, {"completion_only_loss": False, "assistant_only_loss": True}),
}


@pytest.mark.parametrize(("row", "losses"), TRAINED.values(), ids=TRAINED)
def test_labels_are_the_trainers(load, config, bytes_tokenizer, row, losses):
    train = load(None, [row] * 2, bytes_tokenizer)["train"]
    args = config(max_length=None, **losses)
    trainer = LoopDropoutSFTTrainer(tiny_ouro(), args, train_dataset=train, processing_class=bytes_tokenizer)
    prepared = trainer.train_dataset[0]
    expected = label_example(row, bytes_tokenizer, **losses)
    assert {name: prepared[name] for name in expected} == expected


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": "int"}}}]
CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
TOOL_TEMPLATE = (
    "{% if tools %}[{{ tools | tojson }}]{% endif %}{{ style }}{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("is_pair", [False, True])
def test_tool_calls_are_trained_as_in_trl(load, bytes_tokenizer, config, is_pair):
    tokenizer = copy.deepcopy(bytes_tokenizer)
    tokenizer.chat_template = TOOL_TEMPLATE
    user, call = {"role": "user", "content": "1"}, {"role": "assistant", "content": None, "tool_calls": CALLS}
    row = {"prompt": [user], "completion": [call]} if is_pair else {"messages": [user, call]}
    row |= {"tools": TOOLS, "chat_template_kwargs": {"style": "!"}}
    (example,) = load(None, [row], tokenizer)["train"]
    ids = label_example(example, tokenizer)["input_ids"]
    assert all(part in tokenizer.decode(ids) for part in ('[[{"type"', "!<user>1", '{"a": 1}'))
    for cls, given in ((SFTTrainer, row), (LoopDropoutSFTTrainer, example)):
        rows = Dataset.from_list([given])
        trainer = cls(tiny_ouro(), config(), train_dataset=rows, processing_class=tokenizer)
        assert trainer.train_dataset[0]["input_ids"] == ids


def test_metamath_holds_out_new_examples_after_100k():
    orders = np.array([*range(100_000), 0, 7, 100_000, 100_001])  # two repeats
    train, held_out = own_data.hold_out_after_100k(orders, 1)
    assert train.tolist() == [*range(100_000)] and held_out.tolist() == [100_002]


def test_held_out_examples_are_the_same_in_each_run(load, tokenizer):
    rows = [{"question": f"What is {i}?", "answer": f"It is <<{i}={i}>>{i}.\n#### {i}"} for i in range(700)]
    data = load("gsm8k", rows, tokenizer)
    held_out, trained = ({*data[split]["question"]} for split in ("eval", "train"))
    assert (len(held_out), len(trained), len(held_out | trained)) == (500, 200, 700)
    again = load("gsm8k", rows[::-1], tokenizer, max_length=4096, num_train_examples=100)
    assert {*again["eval"]["question"]} == held_out and len(again["train"]) == 100
    assert {*load("gsm8k", rows, tokenizer, split_seed=1)["eval"]["question"]} != held_out


@pytest.mark.parametrize("by_files", [False, True])
def test_repeats_of_held_out_examples_are_left_out(load, tmp_path, tokenizer, log, by_files):
    rows = [{"prompt": str(i % 20), "completion": "x", "id": i} for i in range(60)]
    eval_files = [write_lines(tmp_path / "eval.jsonl", rows[:5])] if by_files else None
    data = load(None, rows, tokenizer, eval_files=eval_files, num_eval_examples=None if by_files else 5)
    assert (len(data["eval"]), len(data["train"])) == (5, 45)
    assert {*data["eval"]["prompt"]}.isdisjoint(data["train"]["prompt"])
    assert f"{15 if by_files else 10} examples are left out, because they repeat a held-out example." in log.messages


REPEATS = conversation(("user", "1+1?"), ("assistant", "2"))
SHAREGPT = [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2", "weight": 1}]
OTHER_ANSWER = conversation(("assistant", "3"))
SAME_EXAMPLES = [
    [{"messages": REPEATS}, CHAT, {"conversations": SHAREGPT}],
    [{"prompt": "1+1=", "completion": "2"}, {"text": "1+1=2"}],
    [
        {"chosen": REPEATS, "rejected": [*REPEATS[:1], *OTHER_ANSWER]},
        {"prompt": REPEATS[:1], "chosen": REPEATS[1:], "rejected": OTHER_ANSWER},
    ],
    [{"chosen": "1+1=2", "rejected": "1+1=3"}, {"prompt": "1+1=", "chosen": "2", "rejected": "3"}],
]  # of which the model reads the same
DIFFERENT = [
    {"messages": [*REPEATS[:1], *OTHER_ANSWER]},
    {"text": "1+1=3"},
    {"chosen": [*REPEATS[:1], *OTHER_ANSWER], "rejected": REPEATS},
    {"chosen": "1+1=3", "rejected": "1+1=2"},
]


@pytest.mark.parametrize(("rows", "different"), [*zip(SAME_EXAMPLES, DIFFERENT, strict=True)])
def test_repeats_of_held_out_examples_are_left_out_in_all_formats(tmp_path, bytes_tokenizer, log, rows, different):
    """Also as a data set of a mixture, which is held out of."""
    arguments = DPODataArguments if "chosen" in rows[0] else SFTDataArguments
    other = write_lines(tmp_path / "other.jsonl", [different])
    files = [write_lines(tmp_path / f"{number}.jsonl", [row]) for number, row in enumerate(rows)]
    for train, held_out in zip(files, files[1:] + files[:1], strict=True):
        with user_error("must have an example that is not in `eval_files`"):
            load_datasets(arguments(train_files=[train], eval_files=[held_out]), bytes_tokenizer)
    if arguments is SFTDataArguments:
        items = [{"path": train}, {"path": other}]
        data = load_datasets(arguments(datasets=items, eval_files=[held_out]), bytes_tokenizer)
        assert len(data["train"]) == 1
        assert "1 example is left out, because it repeats a held-out example." in log.messages
        items = [{"path": train}, {"path": held_out}]
        with user_error("must have at least 2 different usable examples"):
            load_datasets(arguments(datasets=items, num_eval_examples=1), bytes_tokenizer)
    data = load_datasets(arguments(train_files=[other], eval_files=[held_out]), bytes_tokenizer)
    assert len(data["train"]) == 1  # the same prompt with another answer


def test_tulu2_draw_does_not_depend_on_held_out_number(load, bytes_tokenizer):
    rows = [{"messages": conversation(("user", f"{i}"), ("assistant", "x"))} for i in range(300)]
    drawn = load("tulu2", rows, bytes_tokenizer, num_train_examples=100)["train"]["messages"][:]
    numbers = [int(messages[0]["content"]) for messages in drawn]
    assert numbers == sorted(numbers) != [*range(100)]
    data = load("tulu2", rows, bytes_tokenizer, num_train_examples=100, num_eval_examples=10)
    assert data["train"]["messages"][:] == drawn
    assert not any(messages in drawn for messages in data["eval"]["messages"])


def test_arithmetic_holds_out_the_first_problems(tokenizer):
    data = load_datasets(DataArguments("arithmetic", num_train_examples=3), tokenizer)
    first = {f"Question: {question}\nAnswer:" for question in arithmetic_problems("train", 200)["question"]}
    assert {*data["eval"]["prompt"]} == first and first.isdisjoint(data["train"]["prompt"])
    pairs = load_datasets(DataArguments("arithmetic_pairs", num_train_examples=3), tokenizer)["train"]
    for pair, example in zip(pairs, data["train"], strict=True):
        assert (pair["prompt"], pair["chosen"]) == (example["prompt"], example["completion"])
        assert pair["rejected"] != pair["chosen"]


FORMATS = [PAIR, CHAT, {"text": "abc"}, {"messages": MADE_UP[1]}, {"prompt": "p", "chosen": "c", "rejected": "longer"}]


@pytest.mark.parametrize("row", FORMATS, ids=["pair", "chat pair", "text", "messages", "preferences"])
def test_long_examples_are_left_out_not_cut(load, bpe_tokenizer, row, log):
    longest = {"prompt": "p", "completion": "longer"} if "rejected" in row else row
    length = len(tokenize(longest, bpe_tokenizer)["input_ids"])
    assert len(load(None, [row], bpe_tokenizer, max_length=length)["train"]) == 1
    few = f"`max_length` must be at least {length}, the number of tokens of the shortest .*row 1 of .*, got {length - 1}.$"
    with user_error(few):
        load(None, [row], bpe_tokenizer, max_length=length - 1)
    with user_error(few):  # not that fewer must be held out
        load(None, [row, {**row, "id": 1}], bpe_tokenizer, max_length=length - 1, num_eval_examples=2)
    text = f"1 example is left out, because it has more than {length - 1} tokens. The longest one is row 1 of "
    assert re.search(f"{text}.*, with {length} tokens.", log.text)


@pytest.mark.parametrize(
    "name",
    ["a.jsonl", "a.jsonl.gz", "a.jsonl.bz2", "a.json", "a.csv", "a.csv.gz", "a.csv.xz", "a.csv.zip", "a.parquet"],
)
def test_files_of_each_format(tmp_path, tokenizer, name):
    rows = [{"prompt": f"q{i}\n,\"'", "completion": f"{i}.0"} for i in range(5)]
    write = getattr(pd.DataFrame(rows), f"to_{re.search('json|csv|parquet', name)[0]}")
    options = {"orient": "records", "lines": "jsonl" in name} if "json" in name else {}
    write(tmp_path / name, **options)
    sources = [{"train_files": [str(tmp_path / name)]}]
    if name in ("a.jsonl", "a.csv"):
        sources.append({"dataset_name": str(tmp_path)})
    if name.endswith((".bz2", ".xz", ".zip")):
        sources.append({"dataset_name": str(tmp_path / name)})
    for source in sources:
        train = load_datasets(DataArguments(**source), tokenizer)["train"]
        assert train.select_columns(["prompt", "completion"]).to_list() == rows


@pytest.mark.parametrize(("name", "message"), [
    ("rows.parquet.gz", "must be a Parquet file that is not compressed again, got the ending .gz. Unpack it."),
    ("rows.csv.7z", "must be compressed as .gz, .bz2, .xz or .zip, or not at all, got the ending .7z. Unpack it."),
    ("rows.csv.tar.gz", "must be a file of examples, and its ending is that of an archive of files. Unpack it."),
    ("rows.tgz", "must be a file of examples, and its ending is that of an archive of files. Unpack it."),
])  # fmt: skip
def test_compression_that_cannot_be_read_is_named(tmp_path, tokenizer, name, message):
    """Before, it seemed to have a wrong encoding, or a name without an ending."""
    (tmp_path / name).write_bytes(b"\x28\xb5")
    with user_error(f"^{tmp_path / name} {message}$"):
        load_datasets(DataArguments(train_files=[str(tmp_path / name)]), tokenizer)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("field", ["train_files", "dataset_name"])
def test_lines_that_are_not_json_are_named(tmp_path, tokenizer, name, field):
    lines = [json.dumps(PAIR)] * 3 + ["", '{"prompt": "p" "completion": "c"}', json.dumps(PAIR)]
    opened = gzip.open if name.endswith(".gz") else open
    with opened(tmp_path / name, "wt") as file:
        file.write("\n".join(lines))
    source = [str(tmp_path / name)] if field == "train_files" else str(tmp_path)
    with user_error(f"Line 5 of .*{name} is not JSON: Expecting ',' delimiter at column 16."):
        load_datasets(DataArguments(**{field: source}), tokenizer)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "a', "Unterminated string starting at column 10"),
        ('{"text": "a\t"}', "control character at column 12"),
    ],
)
def test_broken_line_is_reported_once(tmp_path, tokenizer, caplog, capfd, line, reason):
    """By the package's sentence alone. `datasets` logs its own one before."""
    path = tmp_path / "a.jsonl"
    path.write_text(f"{line}\n")
    with user_error(f"Line 1 of {path} is not JSON: .*{reason}.$"):
        load_datasets(DataArguments(train_files=[str(path)]), tokenizer)
    assert "Failed to load JSON" not in caplog.text + "".join(capfd.readouterr())


def test_prompt_template_fills_columns(load, tokenizer):
    rows = [{"lang": "de", "in word": "Haus", "out": "house", "score": 3}]
    template = "{lang}{score}: {in word} \\frac{1}{2}? {}"
    fields = {"column_mapping": {"completion": "out", "1": "score", "2": "lang"}, "prompt_template": template}
    example = load(None, rows, tokenizer, prompt_end=" ->", **fields)["train"][0]
    assert (example["prompt"], example["completion"]) == ("de3: Haus \\frac3de? {} ->", "house")
    alpaca = {"prompt_template": "alpaca", "column_mapping": {"completion": "out", "instruction": "in word"}}
    assert load(None, rows, tokenizer, **alpaca)["train"][0]["prompt"] == ALPACA.format("Haus")


@pytest.mark.parametrize("preparation", [None, "tulu2"])
def test_sharegpt_conversations(load, bytes_tokenizer, preparation):
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    for column in ("conversations", "messages"):
        data = load(preparation, [{column: turns}], bytes_tokenizer)["train"]
        assert [*data] == [{"messages": conversation(("user", "Hi"), ("assistant", "Hello"))}]


def test_rows_without_target_are_left_out(load, bytes_tokenizer, log):
    rows = [PAIR, {**PAIR, "completion": None}, {**PAIR, "prompt": None}, {**PAIR, "completion": " \n"}]
    chats = [{"messages": messages} for messages in (MADE_UP[0], [], MADE_UP[0][:1])]
    for preparation, examples in ((None, rows), ("tulu2", chats)):
        assert len(load(preparation, examples, bytes_tokenizer)["train"]) == 1
        assert f"{len(examples) - 1} examples are left out, because they have no text to train on" in log.text


@pytest.mark.parametrize(("turns", "found"), [
    (conversation(("system", "Hi"), ("user", "Hello")), "the roles system, user"),
    (None, "no turns in `messages`"),
    ([], "no turns in `messages`"),
])  # fmt: skip
def test_first_conversation_without_answer_is_described(load, bytes_tokenizer, log, turns, found):
    assert len(load(None, [{"messages": MADE_UP[0]}, {"messages": turns}], bytes_tokenizer)["train"]) == 1
    reason = "it has no text to train on (no answer of the assistant)"
    assert f"1 example is left out, because {reason}. The first one is row 2 of " in log.text
    assert f"rows.jsonl, which has {found}." in log.text


def test_first_pair_without_text_is_named(load, tokenizer, log):
    load(None, [PAIR, {**PAIR, "completion": ""}], tokenizer)
    assert re.search(r"is empty\). The first one is row 2 of \S*rows.jsonl\.$", log.messages[-1])


def test_empty_prompts_are_counted(tmp_path, tokenizer, config, log):
    """They can be meant, so they are kept, for the command and in Python."""
    file = tmp_path / "pairs.csv"
    file.write_text("instruction,output\n1 + 1?,2\n,9\n2 + 2?,\n ,8\n")
    mapping = {"prompt": "instruction", "completion": "output"}
    data = load_datasets(DataArguments(train_files=[str(file)], column_mapping=mapping), tokenizer)["train"]
    kept = f"2 of the 3 examples in {file} have an empty `instruction`. Such examples are kept. The first one is row 2 of "
    assert data["completion"][:] == ["2", "9", "8"] and f"{kept}{file}." in log.messages
    assert "(`prompt` is null or `completion` is empty). The first one is row 3 of" in log.text
    rows = Dataset.from_list([PAIR, {**PAIR, "prompt": ""}])
    LoopDropoutSFTTrainer(tiny_ouro(), config(), train_dataset=rows, processing_class=tokenizer)
    kept = (
        "1 of the 2 examples in `train_dataset` has an empty `prompt`. Such examples are kept. The first one is row 2."
    )
    assert kept in log.messages


def test_wrong_roles_raise_with_their_row(tmp_path, bytes_tokenizer):
    good = {"messages": MADE_UP[0]}
    other = write_lines(tmp_path / "other.jsonl", [{"messages": MADE_UP[2]}])
    empty = {"messages": MADE_UP[0][:1]}  # left out, so the later rows move up
    for role, fault in (
        ("assitant", "A role must be .*assistant.*, got 'assitant'. Did you mean 'assistant'?"),
        (
            "humn",
            "A role must be system, user .human., assistant .gpt., tool or .*, got 'humn'. Did you mean 'human'?",
        ),
        ("tool", "`chat_template` cannot render the conversation .*: A role must be .*; got 'tool'."),
    ):
        bad = {"messages": [*MADE_UP[0], {"role": role, "content": "Hi"}]}
        alone = write_lines(tmp_path / "alone.jsonl", [good, empty, good, bad])
        parts = [write_lines(tmp_path / "a.jsonl", [good] * 2), write_lines(tmp_path / "b.jsonl", [empty, bad])]
        for files, place in (([alone], "Row 4 of .*alone.jsonl"), (parts, "Row 2 of [^ ]*b.jsonl")):
            with user_error(f"^{place}: {fault}"):
                load_datasets(DataArguments(train_files=files), bytes_tokenizer, 999)
            with user_error(f"^{place}: {fault}"):
                load_datasets(DataArguments(train_files=[other], eval_files=files), bytes_tokenizer, 999)
        mixture = DataArguments(datasets=[{"path": parts[0]}, {"path": parts[1]}])
        with user_error(f"^Row 2 of [^ ]*b.jsonl: {fault}"):
            load_datasets(mixture, bytes_tokenizer, 999)
        part = DataArguments(datasets=[{"path": alone, "split": "train[2:]"}])
        with user_error(rf"^Row 2 of `train\[2:\]` of [^ ]*alone.jsonl: {fault}"):
            load_datasets(part, bytes_tokenizer, 999)


def test_roles_of_a_prompt_are_checked(load, bytes_tokenizer):
    prompt = conversation(("usr", "Hi"))
    with user_error("Row 1 of .*: A role must be .*, got 'usr'. Did you mean 'user'?"):
        load(None, [{"prompt": prompt, "completion": MADE_UP[0][1:]}], bytes_tokenizer)


def test_roles_that_the_template_names_are_right(load, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    turns = conversation(("critic", "Hi"), ("assistant", "Hello"))
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    with user_error("got 'critic'"):
        load(None, [{"messages": turns}], tokenizer)
    tokenizer.chat_template += "{# user, assistant or critic #}"
    assert len(load(None, [{"messages": turns}], tokenizer)["train"]) == 1


def test_some_conversations_have_tools(load, bytes_tokenizer, config):
    tokenizer = copy.deepcopy(bytes_tokenizer)
    tokenizer.chat_template = TOOL_TEMPLATE
    turns = conversation(("user", "1"), ("assistant", "2"))
    call = {"role": "assistant", "content": None, "tool_calls": CALLS}
    other_tools = [{"type": "function", "function": {"name": "look", "parameters": {"city": "str"}}}]
    rows = [{"messages": turns, "tools": TOOLS, "chat_template_kwargs": {"style": "!"}}]
    rows += [{"messages": turns, "tools": None}, {"messages": turns, "tools": []}, {"messages": [*turns, call]}]
    rows += [{"messages": turns, "tools": other_tools, "chat_template_kwargs": {}}]
    alone = [{"messages": turns, "tools": TOOLS}, *[{"messages": turns}] * 3]
    assert [row["tools"] for row in load(None, alone, tokenizer)["train"]] == [TOOLS, None, None, None]
    for examples in (rows, rows[1:4] * 400 + rows[:1]):  # the tools come after the first 1,000 rows
        train = load(None, examples, tokenizer, max_length=2000)["train"]
        assert len(train) == len(examples)
        for index in (0, 1, 2, 3, -1):
            expected = [{"role": turn["role"], "content": turn["content"]} for turn in examples[index]["messages"]]
            expected[2:] = [call] * (len(expected) > 2)
            shown = show(train[index], tokenizer)
            assert shown == show({**examples[index], "messages": expected}, tokenizer) and "null" not in shown
    trainer = LoopDropoutSFTTrainer(tiny_ouro(), config(), train_dataset=train, processing_class=tokenizer)
    assert trainer.train_dataset[-1]["input_ids"] == tokenize(rows[0], tokenizer)["input_ids"]


@pytest.mark.parametrize("role", ["role", "from"])
@pytest.mark.parametrize("content", ["content", "value"])
def test_roles_of_sharegpt_in_messages(load, bytes_tokenizer, role, content):
    turns = [{role: "human", content: "Hi"}, {role: "gpt", content: "Hello"}]
    data = load(None, [{"messages": turns}], bytes_tokenizer)["train"]
    assert data[:]["messages"] == [conversation(("user", "Hi"), ("assistant", "Hello"))]


def test_files_with_both_spellings_of_turns(tmp_path, bytes_tokenizer):
    turns = conversation(("user", "Hi"), ("assistant", "Hello"))
    sharegpt = [{"from": turn["role"], "value": turn["content"]} for turn in turns]
    for chats in ([turns, sharegpt], [sharegpt, turns], [[turns[0], sharegpt[1]]]):
        path = write_lines(tmp_path / "rows.jsonl", [{"messages": chat} for chat in chats])
        Dataset.from_list([{"messages": chat} for chat in chats]).to_parquet(tmp_path / "rows.parquet")
        for file in (path, str(tmp_path / "rows.parquet")):
            data = load_datasets(DataArguments(train_files=[file]), bytes_tokenizer)["train"]
            assert data[:]["messages"] == [turns] * len(chats)


@pytest.mark.parametrize(("lines", "path"), [
    (['{"prompt": "a", "completion": "1.50"}', '{"prompt": "b", "completion": 7}'], "completion"),
    (['{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": 7}]}'], "messages.content"),
    (['{"prompt": "a", "completion": "1.50"}', '{"prompt": "b", "completion": null}'], None),
])  # fmt: skip
def test_texts_next_to_numbers_are_named(tokenizer, tmp_path, log, lines, path):
    """`datasets` reads a text such as "1.50" as a number if another row has a number."""
    file = tmp_path / f"{path}.jsonl"
    file.write_text("\n".join([*lines, *lines]))
    load_rows(DataSource("json", data_files=[str(file)]))
    said = f"`{path}` of {file} has texts and other values, such as numbers."
    assert (said in log.text) == (path is not None) and ("in quotes" in log.text) == (path is not None)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("rows.tsv", "prompt\tcompletion\na\tb\n", "as JSON .* Give the file an ending that names its kind: .*rows.tsv"),
    ("rows.json", '{"data": [{"prompt": "a", "completion": "b"}]}', "Its rows are in the list `data` of one object"),
])  # fmt: skip
def test_file_of_another_shape_names_the_fix(bytes_tokenizer, tmp_path, name, content, message):
    file = tmp_path / name
    file.write_text(content)
    with user_error(message):
        load_datasets(DataArguments(train_files=[str(file)]), bytes_tokenizer)


def test_saved_dataset_names_the_fix(bytes_tokenizer, tmp_path):
    Dataset.from_list([PAIR]).save_to_disk(tmp_path / "saved")
    with user_error(
        r"must be a folder of files .* `datasets.load_from_disk\(.*\).to_json\('rows.jsonl'\)`, and set `train_files`"
    ):
        load_datasets(DataArguments(dataset_name=str(tmp_path / "saved")), bytes_tokenizer)


def test_files_of_a_folder_that_are_not_read_are_named(bytes_tokenizer, tmp_path, log):
    """`datasets` reads one kind of file, and train.jsonl before other names. A README.md can say which files are meant."""
    folder = tmp_path / "chats"
    (folder / "more").mkdir(parents=True)
    write_lines(folder / "a.jsonl", [PAIR, PAIR])
    arguments = DataArguments(dataset_name=str(folder))
    load_datasets(arguments, bytes_tokenizer)
    (folder / "notes.txt").write_text("not of the data")
    (folder / ".hidden.jsonl").write_text("{}")
    load_datasets(arguments, bytes_tokenizer)
    assert "Not read" not in log.text
    (folder / "more/b.csv").write_text("prompt,completion\na,b\n")
    load_datasets(arguments, bytes_tokenizer)
    assert f"Not read in the folder {folder}: more/b.csv. `datasets` reads files of one kind" in log.text
    write_lines(folder / "train.jsonl", [PAIR])
    assert len(load_datasets(arguments, bytes_tokenizer)["train"]) == 1
    assert f"{folder}: a.jsonl and more/b.csv. " in log.text
    log.clear()
    (folder / "README.md").write_text("It describes the data.")
    load_datasets(arguments, bytes_tokenizer)
    assert "Not read" not in log.text


@pytest.mark.parametrize("number", [24, 400])
@pytest.mark.parametrize("preparation", [None, "tulu2"])
def test_at_least_one_example_is_not_held_out(load, bytes_tokenizer, preparation, number):
    rows = [{"messages": conversation(("user", str(i)), ("assistant", "Hi"))} for i in range(24)]
    assert len(load(preparation, rows, bytes_tokenizer, num_eval_examples=23)["train"]) == 1
    most = "must be at most 23, because the data has 24 different usable examples and one must be left to train on"
    with user_error(f"`num_eval_examples` {most}, got {number}."):
        load(preparation, rows, bytes_tokenizer, num_eval_examples=number)


def test_one_example_cannot_be_held_out(load, tokenizer):
    with user_error("at least 2 different usable examples, .* got 1. Add examples, or set `num_eval_examples` to 0"):
        load(None, [PAIR] * 5, tokenizer, num_eval_examples=1)
    rows = [{"id": number, **PAIR} for number in range(5)]
    with user_error("at least 2 different usable examples, .* got 1. Add"):
        load(None, rows, tokenizer, num_eval_examples=2)


def test_messages_that_are_a_text_raise(load, bytes_tokenizer):
    for rows in ([{"messages": "Hi"}], [{"messages": MADE_UP[0]}, {"messages": "Hi"}]):
        with user_error("Row . of .*: `messages` must be a list of turns with `role` and `content`, got 'Hi'"):
            load(None, rows, bytes_tokenizer)


def test_numbers_are_texts_to_train_on(load, tokenizer):
    rows = [{"question": "1 + 6", "answer": 7}, {"question": "1 + 1", "answer": None}]
    (example,) = load("gsm8k", rows, tokenizer, num_eval_examples=0)["train"]
    assert example["completion"] == " 7"
    pairs = load(None, [{"prompt": "1 + 6 = ", "completion": 7}, {"prompt": "1 + 1 = ", "completion": 2}], tokenizer)
    assert [row["completion"] for row in pairs["train"]] == ["7", "2"]
    fields = {"prompt_template": "{question} =", "column_mapping": {"completion": "answer"}, "target_prefix": " "}
    for answers, texts in (([7, 8], ["7", "8"]), ([7.5, -8], ["7.5", "-8.0"]), ([7, "x"], ["7", "x"])):
        rows = [{"question": "1", "answer": answer} for answer in answers]
        assert [row["completion"][1:] for row in load(None, rows, tokenizer, **fields)["train"]] == texts


def test_numbers_of_turns_are_texts(load, bytes_tokenizer):
    turns = [{"role": "user", "content": 7}, {"role": "assistant", "content": 8}]
    assert load(None, [{"messages": turns}], bytes_tokenizer)["train"]["messages"][0] == [
        {"role": "user", "content": "7"},
        {"role": "assistant", "content": "8"},
    ]


@pytest.mark.parametrize("fields", [{}, {"column_mapping": {"prompt": "images"}}])
def test_images_are_not_ignored_in_silence(load, tokenizer, log, tmp_path, fields):
    load(None, [{"prompt": "1", "completion": "2", "images": "a.png"}] * 2, tokenizer, **fields)
    path = tmp_path / "rows.jsonl"
    message = f"The column `images` of the data of {path} is ignored, because the models read text only."
    assert {text for text in log.messages if "images" in text} == (set() if fields else {message})


def test_system_column_is_not_ignored_in_silence(load, bytes_tokenizer, log):
    load(None, [{"messages": MADE_UP[0], "system": "Add."}] * 2, bytes_tokenizer, max_length=999)
    assert any(
        text.startswith("The column `system` of") and "first turn of `messages`" in text for text in log.messages
    )


@pytest.mark.parametrize(
    ("row", "fields", "message"),
    [
        (
            {},
            {"column_mapping": {"message": "messages"}},
            "as `message`, which changes nothing.* Did you mean 'messages'",
        ),
        ({}, {"target_prefix": " "}, '`target_prefix: " "` changes nothing, .* are made of `messages`.'),
        ({}, {"prompt_end": "!"}, '`prompt_end: "!"` changes nothing'),
        ({"text": "a"}, {}, "has `messages`, which are trained on, so `text` is ignored."),
        ({"text": "a"}, {"column_mapping": {"messages": "messages"}}, None),
        ({"tools": None}, {"column_mapping": {"tools": "tools"}}, None),
        (PAIR, {}, "has `prompt` and `completion`, which are trained on, so `messages` is ignored."),
        (PAIR, {"column_mapping": {"completion": "completion"}, "target_prefix": " "}, None),
    ],
)
def test_settings_without_effect_are_named(load, bytes_tokenizer, log, row, fields, message):
    load(None, [{"messages": MADE_UP[0], **row}] * 2, bytes_tokenizer, max_length=999, **fields)
    found = {text for text in log.messages if "changes nothing" in text or "ignored" in text}
    assert len(found) == (message is not None)
    if message is not None:
        assert re.search(message, found.pop())


@pytest.mark.parametrize("separator", [";", "\t"])
def test_cells_may_be_divided_by_other_marks(tmp_path, separator):
    file = tmp_path / "rows.csv"
    file.write_text(f"prompt{separator}completion\n1,5{separator}2\n")
    assert read_files(str(file))[:] == {"prompt": ["1,5"], "completion": ["2"]}


def test_data_without_text_shows_its_first_value(load, tokenizer):
    with user_error("The data of .* must have an example with text in completion, got True"):
        load(None, [{"prompt": "Is it?", "completion": True}], tokenizer)
    found = "a text of the assistant in messages, got .*'again'.*, which has the roles user"
    with user_error(f"The data of .* must have an example with {found}.$"):
        load(None, [{"messages": conversation(("user", "again"))}], tokenizer)


def test_tools_that_are_not_json_raise(load, bytes_tokenizer):
    with user_error("Row 1 of .*: `tools` must be a list of schemas or its JSON, got 'add'"):
        load(None, [{"messages": MADE_UP[0], "tools": "add"}], bytes_tokenizer, max_length=99)


@pytest.mark.parametrize("turn", ["Hi", {"content": "Hi"}, {"role": "assistant", "content": [{"text": "Hi"}]}])
def test_turns_without_role_or_text_raise(load, bytes_tokenizer, turn):
    with user_error("Row 1 of .*: A turn must have a `role` and a text as `content`, got"):
        load(None, [{"messages": [turn]}], bytes_tokenizer)


USER, ASSISTANT = conversation(("user", "Hi"), ("assistant", "Hello"))
EMPTY_TURNS = [{"role": "assistant", "content": None}, {"role": "assistant", "content": None, "name": "bot"}]
EMPTY_TURNS += [{"role": "user", "content": None}, {"role": "user"}]


@pytest.mark.parametrize("turn", EMPTY_TURNS)
def test_turns_without_content_raise(load, bytes_tokenizer, config, turn):
    """The command and the trainers do not train on them as on empty texts."""
    row = {"messages": [turn, USER, ASSISTANT]}
    fault = "A turn must have a `role` and a text as `content`, .* Write its text, or remove the conversation.$"
    with user_error(f"Row 2 of .*: {fault}"):
        load(None, [{"messages": [USER, ASSISTANT]}, row], bytes_tokenizer)
    with user_error(f"Row 1 of `train_dataset`: {fault}"):
        LoopDropoutSFTTrainer(
            tiny_ouro(), config(), train_dataset=Dataset.from_list([row]), processing_class=bytes_tokenizer
        )


@pytest.mark.parametrize("num_sound", [0, 3])
def test_texts_of_turns_under_another_key_raise(load, bytes_tokenizer, num_sound):
    """All turns have it, or some. Keys that replace the content, and empty ones, are no mistakes."""
    sound, wrong = ([{"role": role, key: "Hi"} for role in ("user", "assistant")] for key in ("content", "text"))
    rows = [{"messages": sound}] * num_sound + [{"messages": wrong}] * 2
    message = "A turn must have `content`, got the keys role, text. Rename `text` to `content`."
    with user_error(f"^Row {num_sound + 1} of .*: {message}$"):
        load(None, rows, bytes_tokenizer)
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    empty = {"role": "assistant", "content": None, "name": "bot"}
    check_contents([*sound, call, empty, {**empty, "thought": "Hm"}], "{{ message.content }}{{ message['thought'] }}")
    with user_error("got the keys role, thought, plan.$"):
        check_contents([{"role": "assistant", "thought": "Hm", "plan": "Hm"}], "{{ message.content }}")


def test_conversations_that_no_template_renders_raise(load):
    tokenizer = load_tokenizer(TINY_OURO_PATH)
    tokenizer.chat_template = "{{ raise_exception('No system turns') }}"
    with user_error("`chat_template` cannot render the conversation .*'Hi'.*: No system turns"):
        load(None, [{"messages": conversation(("user", "Hi"), ("assistant", "Hello"))}], tokenizer, max_length=9)


WRONG = [
    ({}, "`dataset_name` or `train_files` must be set"),
    ({"dataset_name": "x", "train_files": ["y"]}, "Set either `dataset_name: x` or `train_files: .*, not both"),
    ({"preparation": "arithmetic", "dataset_name": "x"}, "`dataset_name: x` or `preparation: arithmetic`, not"),
    ({"eval_files": ["a"], "num_eval_examples": 5}, "either `eval_files` or `num_eval_examples`"),
    ({"prompt_template": "alpacca"}, "`prompt_template` must be alpaca, question or a text with {column}"),
    ({"arithmetic_steps": [4, 6]}, r"`arithmetic_steps` must be two numbers from 1 to 5, got \[4, 6\]"),
    ({"train_files": ["none.jsonl"]}, "^The file none.jsonl does not exist"),
    ({"dataset_name": "rows.jsn"}, "^The file rows.jsn does not exist. Did you mean 'rows.jsonl'?"),
    (
        {"datasets": [{"path": "rows.jsonl"}, {"path": "answers.JSON"}]},
        "^The file answers.JSON .* mean 'answers.jsonl'?",
    ),
    ({"train_files": ["broken.jsonl"]}, "Line 1 of .*broken.jsonl is not JSON: Expecting value at column 7"),
    ({"train_files": ["lists.jsonl"]}, r"Line 1 of .*lists.jsonl must be an object such as .*, got \[1\].$"),
    (
        {"train_files": ["lists.json"]},
        "lists.json must hold objects, got a list of lists. Write each of them as an object ",
    ),
    ({"train_files": ["broken.json"]}, "broken.json cannot be loaded: .*JSON"),
    ({"train_files": ["empty.jsonl"]}, "^empty.jsonl is empty.$"),
    ({"train_files": ["blank.jsonl"]}, "^blank.jsonl is empty.$"),
    ({"train_files": ["blank.csv"]}, "^blank.csv is empty.$"),
    ({"train_files": ["header.csv"]}, "^header.csv is empty.$"),
    ({"train_files": ["none.json"]}, "^none.json is empty.$"),
    (
        {"train_files": ["rows.xlsx"]},
        "^rows.xlsx must be a file of examples, .* spreadsheet. Save it there as CSV in UTF-8.$",
    ),
    ({"train_files": ["damaged.zip"]}, "^damaged.zip cannot be loaded"),
    (
        {"train_files": ["rows.jsonl,lists.jsonl"]},
        r"Write several names as a list: `\[rows.jsonl, lists.jsonl\]` in a recipe, and `rows.jsonl lists.jsonl` on a",
    ),
    ({"train_files": ["['rows.jsonl', lists.jsonl]"]}, r": `\[rows.jsonl, lists.jsonl\]` in a recipe"),
    (
        {"train_files": ["rows.jsonl"], "preparation": "gsm8k"},
        "must have `answer` and `question`, got the columns prompt, c",
    ),
    (
        {"train_files": ["rows.jsonl"], "column_mapping": {"prompt": "x"}},
        "must have `x`, got the columns prompt, completion. `column_mapping` takes `x` as `prompt`. Remove `column_mapping`, "
        "because the data has `prompt` and `completion`.$",
    ),
    (
        {"train_files": ["rows.jsonl"], "column_mapping": {"completion": "x"}, "prompt_template": "Q: {prompt}"},
        "takes `x` as `completion`. Remove `column_mapping`, because the data has `prompt` and `completion`.$",
    ),
    (
        {"train_files": ["rows.jsonl"], "column_mapping": {"completion": "x"}, "prompt_template": "question"},
        "`x` as `completion`. Remove `column_mapping` and `prompt_template`, because the data has `prompt` and `comp",
    ),
    (
        {"train_files": ["answers.jsonl"], "column_mapping": {"answer": "completion"}},
        "`column_mapping` takes `completion` as `answer`. The mapping is reversed. Write `column_mapping: "
        "{completion: answer}`.$",
    ),
    (
        {"train_files": ["answers.jsonl"], "column_mapping": {"completion": "answr"}},
        "must have `answr`, got the columns prompt, answer. `column_mapping` takes `answr` as `completion`. "
        "Did you mean 'answer'\\?$",
    ),
    (
        {"train_files": ["rows.jsonl"], "prompt_template": "Q: {promt} {question}"},
        "must have `promt` and `question`, got the columns prompt, completion. `prompt_template` asks for `promt`. "
        "Did you mean 'prompt'.* `prompt_template` asks for `question`. `column_mapping` renames",
    ),
    (
        {"train_files": ["other.jsonl"]},
        "must have one of: .*`messages`; .*`text`, got the columns a. `column_ma",
    ),
    ({"train_files": ["rows.jsonl"], "num_train_examples": 9}, "`num_train_examples` must be at most 3, .* got 9"),
    (
        {"train_files": ["rows.jsonl"], "eval_files": ["rows.jsonl"]},
        "must have an example that is not in `eval_files`",
    ),
    (
        {"train_files": ["chat.jsonl"]},
        r"`chat_template` must be set, .* one of the templates whose tokens the tokenizer has: tulu2\.",
    ),
]
ROWS = {
    "empty": [],
    "rows": [PAIR] * 3,
    "answers": [{"prompt": "1", "answer": "2"}],
    "other": [{"a": "b"}],
    "chat": [{"messages": MADE_UP[0]}],
}


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_wrong_data_arguments(tokenizer, tmp_path, monkeypatch, fields, message):
    monkeypatch.chdir(tmp_path)
    for name in ("broken.jsonl", "broken.json"):
        Path(name).write_text('{"a": \n')
    for name in ("blank.jsonl", "blank.csv"):
        Path(name).write_text("\n\n  \n")
    Path("header.csv").write_text("prompt,completion\n")
    Path("none.json").write_text("[]\n")
    for name in ("rows.xlsx", "damaged.zip"):
        Path(name).write_bytes(b"PK\x03\x04")
    Path("lists.jsonl").write_text("[1]\n[2]\n")
    Path("lists.json").write_text(
        f" [\n{json.dumps(conversation(('user', 'Hi'), ('assistant', 'Hello')))}]", "utf-8-sig"
    )
    for name, rows in ROWS.items():
        write_lines(Path(f"{name}.jsonl"), rows)
    with user_error(message):
        load_datasets(DataArguments(**fields), tokenizer, max_length=100)


def run(commands):
    """Run commands of a page in this process."""
    for line in commands.splitlines():
        script, *words = shlex.split(line, comments=True)[1:]
        load_script(f"recipes/{script}.py").main(words)


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The blocks of docs/own_data.md in their order. Its files are in the working folder."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/own_data.md").read_text()
    names = (
        "rows recipe dry_run printed training sweep sweeping chosen more mixed mixing mixture chats chat_recipe chatting "
        "turns gpu on_gpu"
    )
    blocks = dict(zip([*names.split(), "snippet"], re.findall(r"(?ms)^```\w*\n(.*?)^```", text), strict=True))
    files = {"questions.jsonl": "rows", "mine.yaml": "recipe", "more.jsonl": "more", "mixed.yaml": "mixed"}
    files |= {"mine_sweep.yaml": "sweep", "chats.jsonl": "chats", "chats.yaml": "chat_recipe", "mine_24gb.yaml": "gpu"}
    for file, name in files.items():
        Path(file).write_text(blocks[name])
    return blocks


def test_own_data_page_trains_with_one_thread_on_a_cpu(page):
    """Several threads wait for each other if other programs run, which takes many times longer."""
    for name in ("recipe", "chat_recipe"):
        recipe = yaml.safe_load(page[name])
        assert recipe["bf16"] is False and recipe["num_threads"] == 1


def test_own_data_page_shows_real_output(page, capsys):
    run(page["dry_run"])
    device = re.compile("(?m)^device .*")  # the page shows a computer without GPU
    assert device.sub("", capsys.readouterr().out) == device.sub("", page["printed"])
    run(page["training"])
    output = capsys.readouterr().out
    assert "LoRA" in output and "eval_loss" in output and Path("outputs/mine/lora").exists()
    exec(page["snippet"], names := {})
    assert names["data"][0]["completion"] == " 3 + 4 = 7\n#### 7" and "train_loss" in capsys.readouterr().out
    Path("mine_24gb.yaml").write_text(page["gpu"].replace("num_eval_examples: 100", "num_eval_examples: 1"))
    run(f"{page['on_gpu'].splitlines()[0]} --model_name_or_path tiny-ouro")
    assert "examples    2, 1 held out" in capsys.readouterr().out


def test_own_data_page_sweeps(page, capsys):
    """The trainings take a minute, so the plan shows that the printed choice is one of this recipe."""
    run(f"{page['sweeping'].rstrip()} --dry_run true")
    output = capsys.readouterr().out
    methods = re.findall(r"(?m)^(\S+): learning rate", page["chosen"])
    rates = re.findall(r"(?m)^  (\S+) +held-out loss", page["chosen"])
    assert f"methods         {', '.join(methods)}\n" in output and output.startswith(f"{len(rates)} trainings\n")
    assert f"learning rates  {', '.join(rates[:2])}\n" in output and "best on eval_loss" in output


def test_own_data_page_mixes_data_sets(page, capsys):
    run(page["mixing"])
    assert f"\n{page['mixture']}" in capsys.readouterr().out


def test_own_data_page_tries_a_chat(page, capsys):
    """Preview, training, chat, merging, and a server's answer to turns with a system turn."""
    pytest.importorskip("fastapi")
    run(page["chatting"])
    output = capsys.readouterr().out
    assert page["turns"] in output and "eval_loss" in output and "adapter" in output
    assert "The merged model is in outputs/chats/merged" in output
    assert "\nNext:\n  loopdropout chat outputs/chats/merged   # ask it\n" in output
    for folder in ("outputs/chats", "outputs/chats/merged"):
        source = find_source(folder)
        assert (
            source.load_tokenizer().chat_template == load_tokenizer("tiny-ouro", chat_template="tulu2").chat_template
        )
    port = free_port()
    server = Program(ROOT / "recipes/serve.py", "outputs/chats", "--port", port)
    turns = read_lines("chats.jsonl")[0]["messages"][:2]
    body = {"model": "outputs/chats", "messages": turns, "max_tokens": 4, "temperature": 0}
    address = f"http://127.0.0.1:{port}/v1/chat/completions"
    answer = wait_for(lambda: _post(address, body), server)
    server.end()
    prompt = load_tokenizer("tiny-ouro", chat_template="tulu2").apply_chat_template(turns, add_generation_prompt=True)[
        "input_ids"
    ]
    assert answer["usage"]["prompt_tokens"] == len(prompt) and answer["choices"][0]["message"]["role"] == "assistant"


def _post(address, body):
    """The answer of a server, or None while it starts."""
    with suppress(URLError):
        request = Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
        return json.load(urlopen(request, timeout=60))


def test_bars_are_for_long_work_only(page, monkeypatch, capfd):
    """A run of a few examples prints its own bar and those of the model, and none of `datasets`."""
    run("loopdropout sft mine.yaml")
    assert "examples/s" not in capfd.readouterr().err
    monkeypatch.setattr("loopdropout_trainer.data.bars.MOST_ROWS", 1)
    run("loopdropout sft mine.yaml --seed 1 --output_dir other --split_seed 1")
    bars = capfd.readouterr().err
    assert "Map: " in bars and "Building labels for train dataset" in bars and "Generating" not in bars
    monkeypatch.setattr("loopdropout_trainer.data.bars.MOST_BYTES", 1)
    run("loopdropout sft mine.yaml --dry_run true --train_files more.jsonl --output_dir third")
    assert "Generating train split" in capfd.readouterr().err


def test_bars_that_a_user_hides_stay_hidden(load, tokenizer):
    disable_progress_bars()
    try:
        load(None, [PAIR], tokenizer)
        assert are_progress_bars_disabled()
    finally:
        enable_progress_bars()
    load(None, [PAIR] * 2, tokenizer)
    assert not are_progress_bars_disabled()


WRONG_CSV = {
    "prompt,completion\na, b,c\n1,2\n": "Line 2 of .* has 3 cells, and the header has 2. Put each text with separators",
    "prompt,completion\n1,2\na,b,c\n": "Line 3 of .* has 3 cells, and the header has 2",
    'prompt;completion\n"1\n2";a\na;"b\nc;d\n': "The row in line 4 of .* is not CSV: unexpected end of data",
    "": "rows.csv is empty",
}


def test_wrong_csv_files_name_the_line(tmp_path, tokenizer):
    for text, message in WRONG_CSV.items():
        (tmp_path / "rows.csv").write_text(text)
        with user_error(message):
            load_datasets(DataArguments(train_files=[str(tmp_path / "rows.csv")]), tokenizer)


def test_csv_file_without_a_header_is_named(tmp_path, tokenizer):
    file = tmp_path / "rows.csv"
    arguments = SFTDataArguments(train_files=[str(file)])
    for first_line in ("What is 1 + 2?,3", "Add 1 and 2,3", f"{'Add 1 and 2 ' * 6},c", "3,3"):
        file.write_text(f"{first_line}\nWhat is 2 + 3?,5\n")
        with user_error(
            "seems to have no header line, .* Add a first line .*, such as `prompt,completion`, and the sep"
        ):
            load_datasets(arguments, tokenizer)
    other = tmp_path / "other.csv"  # the first part of a file that was cut into two
    other.write_text("prompt,completion\nWhat is 1 + 1?,2\n")
    with user_error(
        "got prompt, completion in .*other.csv and 3, 3.1 in .*rows.csv. The file seems .* `prompt,completion`,"
    ):
        load_datasets(SFTDataArguments(train_files=[str(other), str(file)]), tokenizer)
    file.write_text("Question text,Answer 2\nWhat is 2 + 3?,5\n")
    with user_error(r"for example `column_mapping: \{prompt: Question text, completion: Answer 2\}`"):
        load_datasets(arguments, tokenizer)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_csv_files_of_spreadsheets(tmp_path, tokenizer, separator, recwarn):
    """With a mark of UTF-8, quotes over lines of each kind, and an empty cell at the end of each row."""
    rows = [["prompt", "completion"], ['"1\n\r\n\r""2"""', '"a, b; c"', ""], ["3", "4" * 140_000, ""]]
    text = "".join(separator.join(row) + "\n" for row in rows)
    (tmp_path / "rows.csv").write_text(text, encoding="utf-8-sig")
    data = load_datasets(DataArguments(train_files=[str(tmp_path / "rows.csv")]), tokenizer)["train"]
    assert [(row["prompt"], row["completion"]) for row in data] == [('1\n\r\n\r"2"', "a, b; c"), ("3", "4" * 140_000)]
    assert not [warning for warning in recwarn if "Length of header" in str(warning.message)]


def test_chat_in_a_csv_cell_names_the_fix():
    with user_error(
        "`messages` must be a list of turns .* Parse the text by `json.loads`, and save the rows as JSON Lines."
    ):
        check_turns("messages", '[{"role": "user", "content": "Hi"}]')


def test_weights_of_turns_are_ignored_with_a_warning(tmp_path, bytes_tokenizer, log):
    """Also if the first row has none, and in the data of a trainer."""
    question, answer = MADE_UP[0][:2]
    for keys, is_warned in (({}, False), ({"weight": 0}, True)):
        rows = [{"chat": [question, answer]}, {"chat": [question, {**answer, **keys}]}]
        file = write_lines(tmp_path / "rows.jsonl", rows)
        load_datasets(SFTDataArguments(train_files=[file], column_mapping={"messages": "chat"}), bytes_tokenizer)
        weights = "has turns with the key `weight`, which is ignored, so turns of the assistant with the weight 0 are trained"
        assert (f"1 of the 2 examples in {file} {weights} on, too. The first one is row 2 of" in log.text) == is_warned
        own = Dataset.from_list(rows).rename_column("chat", "messages")
        check_rows({"train_dataset": own}, TEXTS, RowReader(bytes_tokenizer.chat_template))
        sentence = f"1 of the 2 examples in `train_dataset` {weights} on, too. The first one is row 2."
        assert (sentence in log.text) == is_warned
    own.to_parquet(tmp_path / "rows.parquet")  # whose types tell that turns can have the key
    arguments = SFTDataArguments(train_files=[str(tmp_path / "rows.parquet")])
    load_datasets(arguments, bytes_tokenizer)
    assert (
        f"1 of the 2 examples in {tmp_path / 'rows.parquet'} {weights} on, too. The first one is row 2 of" in log.text
    )


def test_chat_as_a_mapping_names_its_row_and_the_fix(load, bytes_tokenizer):
    by_key = {"role": ["user", "assistant"], "content": ["Hi", "Ho"]}
    with user_error(
        "^Row 1 of .*: `messages` must be a list of turns .*, got {'.* Write each turn as an item of a list"
    ):
        load(None, [{"messages": by_key}], bytes_tokenizer)
