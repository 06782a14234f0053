"""Data: what is trained on, token for token, through the real trainer; what is kept, dropped and refused."""

import functools
import gzip
import hashlib
import json
import os
import re
import runpy
from collections import Counter
from itertools import groupby
from pathlib import Path

import pytest
from conftest import ROOT, SAMPLES, tiny_ouro
from datasets import Dataset
from transformers import AutoTokenizer

from loopdropout_trainer import LoopDropoutSFTTrainer
from loopdropout_trainer.data import DataArguments, chat_template, load_data
from loopdropout_trainer.data.__main__ import main as show
from loopdropout_trainer.data.arithmetic import arithmetic_problems
from loopdropout_trainer.data.preparations import MetaMathGSM
from loopdropout_trainer.errors import SetupError
from loopdropout_trainer.evaluation.benchmarks import load_benchmark
from loopdropout_trainer.settings.arguments import TINY_OURO_PATH


ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Response:"
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache" / "loopdropout_trainer"


@pytest.fixture
def bytes_tokenizer(tokenizer, monkeypatch):
    """One token a byte, so that an example's tokens are its bytes; with Tulu's turns."""
    monkeypatch.setattr(tokenizer, "chat_template", chat_template("tulu2"))
    return tokenizer


@pytest.fixture(scope="module")
def bpe_tokenizer():
    """Byte-pair tokens that cross as many boundaries as those of real models."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_OURO_PATH)
    tokenizer.chat_template = chat_template("tulu2")
    return tokenizer


@pytest.fixture
def write(tmp_path):
    """`write(name, rows)`: a JSONL file."""

    def make(name, rows):
        lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(tmp_path / name)

    return make


@pytest.fixture
def batch_of(config):
    """`batch_of(examples, tokenizer)`: what the real trainer and collator make of examples, a list of (ids, labels)."""

    def make(examples, tokenizer, **fields):
        model = tiny_ouro(vocab_size=max(258, len(tokenizer)))
        args = config(max_length=4096, **fields)
        trainer = LoopDropoutSFTTrainer(model, args, train_dataset=examples, processing_class=tokenizer)
        batch = trainer.data_collator(
            [{key: row[key] for key in ("input_ids", "labels")} for row in trainer.train_dataset]
        )
        sizes = batch["attention_mask"].sum(-1)
        rows = list(zip(batch["input_ids"], batch["labels"], sizes, strict=True))
        assert all((labels[size:] == -100).all() for _, labels, size in rows)
        return [(ids[:size].tolist(), labels[:size].tolist()) for ids, labels, size in rows]

    return make


def samples(name):
    return [json.loads(line) for line in (SAMPLES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def load(preparation, files, tokenizer, max_length=None, **fields):
    files = [files] if isinstance(files, (str, Path)) else files
    return load_data(DataArguments(preparation, train_files=[str(f) for f in files], **fields), tokenizer, max_length)


def spans(ids, labels, tokenizer):
    """Decode into (text, is it trained on?) runs."""
    assert all(label in (token, -100) for token, label in zip(ids, labels, strict=True))
    runs = groupby(zip(ids, labels, strict=True), key=lambda pair: pair[1] != -100)
    return [(tokenizer.decode([token for token, _ in run]), is_trained) for is_trained, run in runs]


def joined(pieces):
    """The same of (text, is it trained on?) pieces, without empty ones."""
    runs = groupby((piece for piece in pieces if piece[0]), key=lambda piece: piece[1])
    return [("".join(text for text, _ in run), is_trained) for is_trained, run in runs]


def turns(messages, end):
    """Tulu's turns, written down a second time: pieces of text, and whether they are trained on."""
    pieces = []
    for index, message in enumerate(messages):
        newline = "\n" if index else ""
        content = message["content"].strip()
        pieces.append((f"{newline}<|{message['role']}|>\n", False))
        pieces.append((content, message["role"] == "assistant"))
        if message["role"] == "assistant":
            pieces.append((end, True))
    return pieces


MADE_UP = [
    [("user", "  Hi \n"), ("assistant", "\n Hello, ünïcode 𝛑 \n\n")],
    [("system", ""), ("user", ""), ("assistant", ""), ("user", "again"), ("assistant", "👩‍👩‍👧‍👦")],
    [("user", "<|assistant|>\nnot a turn"), ("assistant", "a"), ("assistant", "b"), ("user", "thanks")],
]
MADE_UP = [[{"role": role, "content": content} for role, content in turns] for turns in MADE_UP]


def test_tulu_masks_turn_by_turn(write, bytes_tokenizer, bpe_tokenizer, batch_of):
    conversations = [row["messages"] for row in samples("tulu2")] + MADE_UP
    assert {len(messages) for messages in conversations} >= {2, 5, 6}
    path = write("tulu.jsonl", [{"id": str(i), "messages": messages} for i, messages in enumerate(conversations)])
    data = load("tulu2", path, bytes_tokenizer)
    assert list(data.train["messages"]) == conversations  # source order
    for tokenizer in (bytes_tokenizer, bpe_tokenizer):
        batch = batch_of(data.train, tokenizer, assistant_only_loss=True)
        for (ids, labels), messages in zip(batch, conversations, strict=True):
            assert spans(ids, labels, tokenizer) == joined(turns(messages, tokenizer.eos_token))


def test_gsm8k_prompt_and_target(bytes_tokenizer, bpe_tokenizer, batch_of):
    data = load("gsm8k", SAMPLES / "gsm8k.jsonl", bytes_tokenizer, num_eval_examples=0)
    first = data.train[0]
    assert first["prompt"] == (
        "Question: Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
        "How many clips did Natalia sell altogether in April and May?\nAnswer:"
    )
    assert first["completion"] == (
        " Natalia sold 48/2 = 24 clips in May.\nNatalia sold 48+24 = 72 clips altogether in April and May.\n#### 72"
    )
    for raw, row in zip(samples("gsm8k"), data.train, strict=True):
        assert "<<" not in row["completion"]
        assert row["completion"].endswith("\n#### " + raw["answer"].split("#### ")[1])
    for tokenizer in (bytes_tokenizer, bpe_tokenizer):
        for (ids, labels), row in zip(batch_of(data.train, tokenizer), data.train, strict=True):
            expected = [(row["prompt"], False), (row["completion"] + tokenizer.eos_token, True)]
            assert spans(ids, labels, tokenizer) == expected


@pytest.mark.parametrize("prompt_end", ["", "\n ", " Let's think step by step."])
def test_metamath_prompt_and_target(bytes_tokenizer, batch_of, prompt_end):
    fields = {"num_eval_examples": 0, "prompt_end": prompt_end, "example_token_limit": None}
    data = load("metamath_gsm", SAMPLES / "metamath.jsonl", bytes_tokenizer, **fields)
    rows = [row for row in samples("metamath") if row["type"].startswith("GSM")]
    assert any(row["response"].startswith("$") for row in rows)
    for (ids, labels), row in zip(batch_of(data.train, bytes_tokenizer), rows, strict=True):
        pieces = [(ALPACA.format(row["query"]) + prompt_end, False), (row["response"] + "<eos>", True)]
        assert spans(ids, labels, bytes_tokenizer) == pieces


def test_metamath_keeps_short_gsm_rows_in_order(write, bytes_tokenizer, bpe_tokenizer, monkeypatch):
    room = 511 - len(ALPACA.format("Q").encode()) - 1  # of 512 tokens: the prompt, a space and the response
    made_up = [{"type": "GSM_SV", "query": "Q", "response": "x" * size} for size in (room, room + 1)]
    data = load("metamath_gsm", write("m.jsonl", made_up), bytes_tokenizer, num_eval_examples=0)
    assert list(map(len, data.train["answer"])) == [room]

    rows = samples("metamath")
    gsm = [(ALPACA.format(row["query"]), row["response"]) for row in rows if row["type"].startswith("GSM")]
    fitting = [answer for prompt, answer in gsm if len(bpe_tokenizer(f"{prompt} {answer}")["input_ids"]) < 250]
    assert 6 <= len(fitting) < len(gsm)

    short = functools.partial(load, "metamath_gsm", SAMPLES / "metamath.jsonl", bpe_tokenizer, example_token_limit=250)
    monkeypatch.setattr(MetaMathGSM, "num_training_rows", 4)
    data = short(num_eval_examples=2)
    assert list(data.train["answer"]) == fitting[:4]
    assert list(data.eval["answer"]) == fitting[4:6]  # what comes after the training rows
    assert data.report.dropped["type without GSM"] == len(rows) - len(gsm)
    assert data.report.dropped["250 tokens or more"] > 0
    fewer = short(num_eval_examples=2, num_train_examples=1)
    assert list(fewer.eval["answer"]) == list(data.eval["answer"])  # the same for every run

    monkeypatch.setattr(MetaMathGSM, "num_training_rows", 100_000)
    data = short(num_eval_examples=3)
    assert list(data.train["answer"]) + list(data.eval["answer"]) == fitting  # a smaller source: the last rows
    assert data.report.read == len(rows)


def test_the_split_is_fixed_and_no_held_out_row_is_trained_on(write, tokenizer):
    rows = [{"question": f"What is {i}?", "answer": f"It is <<{i}={i}>>{i}.\n#### {i}"} for i in range(7473)]
    data = load("gsm8k", write("a.jsonl", rows), tokenizer)
    assert (len(data.train), len(data.eval)) == (6973, 500)
    held_out = set(data.eval["question"])
    assert not held_out & set(data.train["question"])
    # Another order, fewer rows to train on, a length limit: the same rows are held out.
    again = load("gsm8k", write("b.jsonl", rows[::-1]), tokenizer, max_length=4096, num_train_examples=100)
    assert set(again.eval["question"]) == held_out
    assert again.report.unused == 6873
    assert set(load("gsm8k", write("c.jsonl", rows), tokenizer, split_seed=1).eval["question"]) != held_out

    repeated = [{"prompt": str(i % 20), "completion": "x"} for i in range(60)]
    data = load(None, write("d.jsonl", repeated), tokenizer, num_eval_examples=5)
    assert (len(data.eval), len(data.train)) == (5, 45) and not set(data.eval["prompt"]) & set(data.train["prompt"])
    assert data.report.dropped == {"repeats a held-out row": 10}


def test_tulu_draw_is_fixed(write, bytes_tokenizer):
    chat = lambda i: [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "x"}]
    rows = [{"messages": chat(i)} for i in range(300)]
    path = write("a.jsonl", rows)
    drawn = load("tulu2", path, bytes_tokenizer, num_train_examples=100).train["messages"][:]
    assert len(drawn) == 100 and drawn != [row["messages"] for row in rows[:100]]
    assert drawn == sorted(drawn, key=lambda messages: int(messages[0]["content"]))
    with_eval = load("tulu2", path, bytes_tokenizer, num_train_examples=100, num_eval_examples=10)
    assert list(with_eval.train["messages"]) == drawn
    assert not any(messages in drawn for messages in with_eval.eval["messages"])


TEST_SPLITS = {"easy_test": (1, 3), "medium_test": (2, 4), "test": (3, 5)}


@pytest.mark.parametrize("steps", TEST_SPLITS.values())
def test_arithmetic_of_chosen_steps_is_balanced_and_holds_no_test_problem(tokenizer, steps):
    fields = {"num_eval_examples": 100, "arithmetic_steps": list(steps)}
    generate = lambda number: load_data(DataArguments("arithmetic", num_train_examples=number, **fields), tokenizer)
    data = generate(1400)
    assert data.train[0]["prompt"] == f"Question: {data.train[0]['question']}\nAnswer:"
    assert list(generate(30).eval["question"]) == list(data.eval["question"])
    trained = [*data.train["question"], *data.eval["question"]]
    num_steps = Counter(answer.count("\n") for answer in [*data.train["answer"], *data.eval["answer"]])
    assert len(set(trained)) == 1500
    assert set(num_steps) == {*range(steps[0], steps[1] + 1)} and min(num_steps.values()) > 430  # 500 on average
    for split, wanted in TEST_SPLITS.items():
        test = arithmetic_problems(split, 500)
        assert (min(test["num_steps"]), max(test["num_steps"])) == wanted
        assert not set(test["question"]) & set(trained)
        shown = load_benchmark(f"arithmetic_{split}", limit=500)
        assert shown.prompts == [f"Question: {question}\nAnswer:" for question in test["question"]]


def test_arithmetic_texts_of_old_splits_are_as_they_were():
    splits = ("train", "short", "test", "hard", "larger", "wording")
    text = json.dumps([arithmetic_problems(split, 200, seed).to_list() for split in splits for seed in (0, 3)])
    text += json.dumps(runpy.run_path(str(ROOT / "recipes" / "make_tiny_texts.py"))["pretraining_texts"](200))
    found = hashlib.sha256(text.encode()).hexdigest()
    assert found == "a7c1226f9b1d89c662948e54c02d702cc2f707b1af870cd7b492b6442ab3d801"


def test_long_examples_are_dropped_not_cut(write, bytes_tokenizer, bpe_tokenizer, batch_of):
    rows = [{"prompt": "p" * 10, "completion": "c" * size} for size in (5, 9, 10, 30)]
    data = load(None, write("a.jsonl", rows), bytes_tokenizer, max_length=20)  # 10 + 9 + the end token fit
    assert [len(row) for row in data.train["completion"]] == [5, 9]
    assert data.report.dropped == {"more than 20 tokens": 2}
    assert [len(ids) for ids, _ in batch_of(data.train, bytes_tokenizer)] == [16, 20]
    # Lengths are those of the trainer, for every format and tokenizer.
    gsm8k = load("gsm8k", SAMPLES / "gsm8k.jsonl", bpe_tokenizer, num_eval_examples=0).train
    tulu = load("tulu2", SAMPLES / "tulu2.jsonl", bpe_tokenizer).train
    chats = [{"prompt": row[:-1], "completion": row[-1:]} for row in tulu["messages"]]
    texts = Dataset.from_list([{"text": text} for text in gsm8k["completion"]])
    for examples in (gsm8k, tulu, Dataset.from_list(chats), texts):
        path = write("b.jsonl", list(examples))
        lengths = [len(ids) for ids, _ in batch_of(examples, bpe_tokenizer)]
        for limit in sorted(lengths):
            kept = load(None, path, bpe_tokenizer, max_length=limit).train
            assert len(kept) == sum(length <= limit for length in lengths)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz", "a.csv", "a.csv.gz", "a.parquet"])
def test_local_files_of_every_kind(tmp_path, tokenizer, name):
    rows = [{"prompt": f"q{i}\n,\"'", "completion": f"ä{i}" * 40_000} for i in range(5)]  # cells may be long
    path, plain = tmp_path / name, tmp_path / name.removesuffix(".gz")
    data = Dataset.from_list(rows)
    in_one = lambda path: path.write_text("\n " + json.dumps(rows))
    ways = {".json": in_one, ".jsonl": data.to_json, ".csv": data.to_csv, ".parquet": data.to_parquet}
    ways[plain.suffix](plain)
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(load(None, path, tokenizer).train) == rows


def test_several_files_and_eval_files_and_their_report(write, tokenizer):
    first, second = (write(name, [{"text": name}] * 2) for name in ("a.jsonl", "b.jsonl"))
    data = load(None, [first, second], tokenizer, eval_files=[write("c.jsonl", [{"text": "c"}] * 2)])
    assert list(data.train["text"]) == ["a.jsonl"] * 2 + ["b.jsonl"] * 2
    assert list(data.eval["text"]) == ["c"] * 2
    assert data.description == "a.jsonl, b.jsonl: 4 examples, 2 held out"
    data = load(None, write("a.jsonl", [{"text": "x" * i} for i in range(1, 1201)]), tokenizer, max_length=1000)
    lines = str(data.report).splitlines()
    assert lines[0] == "Rows of a.jsonl" and "dropped: more than 1,000 tokens" in lines[4]
    assert [line.split()[-1] for line in lines[1:]] == ["1,200", "999", "0", "201"]


def test_a_dataset_folder_by_name(tmp_path, tokenizer):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.jsonl").write_text('{"question": "Why?", "answer": "Because."}\n')
    mapping = {"prompt": "question", "completion": "answer"}
    args = DataArguments(dataset_name=str(tmp_path / "mine"), column_mapping=mapping)
    assert load_data(args, tokenizer).train.to_list() == [{"prompt": "Why?", "completion": "Because."}]
    with pytest.raises(SetupError, match="The dataset `.*none` cannot be loaded"):
        load_data(DataArguments(dataset_name=str(tmp_path / "none")), tokenizer)


def test_mapping_and_template(write, tokenizer):
    path = write("a.jsonl", [{"lang": "de", "in": "Haus", "out": "house", "score": 3}])
    template = "{lang}{score}: {in} \\frac{1}{2}? {}"
    fields = {"column_mapping": {"completion": "out", "1": "score", "2": "lang"}, "prompt_template": template}
    row = load(None, path, tokenizer, prompt_end=" ->", **fields).train[0]
    assert row == {"prompt": "de3: Haus \\frac3de? {} ->", "completion": "house"}
    alpaca = {"prompt_template": "alpaca", "column_mapping": {"completion": "out", "instruction": "in"}}
    assert load(None, path, tokenizer, **alpaca).train[0]["prompt"] == ALPACA.format("Haus")


def test_sharegpt_conversations(write, bytes_tokenizer):
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    wanted = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    for column, preparation in (("conversations", None), ("conversations", "tulu2"), ("messages", "tulu2")):
        data = load(preparation, write("a.jsonl", [{column: turns}]), bytes_tokenizer)
        assert data.train["messages"][:] == [wanted]


def test_bad_rows_are_counted_where_that_is_asked_for(write, tokenizer):
    broken = ["[1, 2]", '{"prompt": "p"}', '{"prompt": "p", "completion": null}', '{"prompt": 5, "completion": "c"}']
    good = {"prompt": "p", "completion": "c"}
    data = load(None, write("some.jsonl", [good, "", *broken, good]), tokenizer, bad_rows="skip")
    dropped = {"not an object": 1, "missing field `completion`": 2, "field `prompt` is not text": 1}
    assert (len(data.train), data.report.dropped) == (2, dropped)
    for row, fault in zip((3, 4, 5, 6), ("not an object", "missing", "missing", "not text"), strict=True):
        assert re.search(rf"some.jsonl, row {row}: .*{fault}", str(data.report))


def test_prepared_data_is_cached(write, tokenizer, bpe_tokenizer, cache, monkeypatch):
    path = write("a.jsonl", [{"text": "x" * i} for i in range(1, 9)])
    facts = os.stat(path)
    fields = {"num_eval_examples": 2, "max_length": 6}
    first = load(None, path, tokenizer, **fields)
    with monkeypatch.context() as context:
        context.setattr("loopdropout_trainer.data.load._prepare", None)
        second = load(None, path, tokenizer, **fields)
    assert (second.train.to_list(), second.eval.to_list()) == (first.train.to_list(), first.eval.to_list())
    assert str(second.report) == str(first.report)
    folders = lambda: [entry for entry in cache.iterdir() if entry.is_dir()]
    assert len(folders()) == 1
    (folders()[0] / "train" / "state.json").write_text("{")
    with pytest.raises(SetupError, match=f"{folders()[0].name} cannot be read: remove that folder"):
        load(None, path, tokenizer, **fields)
    for changed in ({"max_length": 7}, {"split_seed": 1}):
        load(None, path, tokenizer, **{**fields, **changed})
    load(None, path, bpe_tokenizer, **fields)
    write("a.jsonl", [{"text": "y" * i} for i in range(1, 9)])
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))  # of the same size and time: its bytes count
    assert set("".join(load(None, path, tokenizer, **fields).train["text"])) == {"y"}
    assert len(folders()) == 5  # settings, tokenizer and content count; nothing unfinished stays


def test_command_shows_the_loss_tokens(tmp_path, write, bytes_tokenizer, capsys):
    bytes_tokenizer.save_pretrained(tmp_path / "model")
    fields = {"preparation": "tulu2", "train_files": [str(SAMPLES / "tulu2.jsonl")], "chat_template": "tulu2"}
    fields |= {"model_name_or_path": str(tmp_path / "model"), "assistant_only_loss": True}
    recipe = write("recipe.yaml", [{**fields, "learning_rate": 1e-4}])  # the last is none of this command's business
    show([recipe, "--index", "5"])
    printed = capsys.readouterr().out
    assert "<|assistant|>\n⟦🐱😻🎉🐾🧸🐈<eos>⟧\n" in printed
    assert "Example 5 of 9" in printed
    with pytest.raises(ValueError, match="`index` must be below 9"):
        show([recipe, "--index", "9"])
