"""Data: what is trained on, token for token, through the real trainer; what is kept, dropped and refused."""

import gzip
import hashlib
import json
import runpy
from collections import Counter
from pathlib import Path

import pytest
from conftest import tiny_ouro
from datasets import Dataset
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig

from loopdropout_trainer import LoopDropoutSFTTrainer
from loopdropout_trainer.data import DataArguments, DataError, chat_template, load_data
from loopdropout_trainer.data.__main__ import main as show
from loopdropout_trainer.data.arithmetic import arithmetic_problems
from loopdropout_trainer.data.preparations import MetaMathGSM
from loopdropout_trainer.evaluation.benchmarks import load_benchmark


SAMPLES = Path(__file__).parent / "samples"
RECIPES = Path(__file__).parents[1] / "recipes"
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
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train([str(path) for path in sorted(SAMPLES.glob("*.jsonl"))], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special[0], pad_token=special[0])
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
        rows = [trainer.train_dataset[i] for i in range(len(trainer.train_dataset))]
        batch = trainer.data_collator([{key: row[key] for key in ("input_ids", "labels")} for row in rows])
        sizes = batch["attention_mask"].sum(-1)
        assert all((labels[size:] == -100).all() for labels, size in zip(batch["labels"], sizes, strict=True))
        return [
            (ids[:size].tolist(), labels[:size].tolist())
            for ids, labels, size in zip(batch["input_ids"], batch["labels"], sizes, strict=True)
        ]

    return make


def samples(name):
    return [json.loads(line) for line in (SAMPLES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def load(preparation, files, tokenizer, max_length=None, **fields):
    files = [files] if isinstance(files, (str, Path)) else files
    return load_data(DataArguments(preparation, train_files=[str(f) for f in files], **fields), tokenizer, max_length)


def labelled(pieces, tokenizer):
    """Oracle under the byte tokenizer: ids and labels of (text, is it trained on?) pieces."""
    ids, labels = [], []
    for text, is_trained in pieces:
        piece = [tokenizer.eos_token_id] if text == tokenizer.eos_token else tokenizer(text)["input_ids"]
        ids += piece
        labels += piece if is_trained else [-100] * len(piece)
    return ids, labels


def spans(ids, labels, tokenizer):
    """Decode into (text, is it trained on?) runs."""
    runs = []
    for token, label in zip(ids, labels, strict=True):
        assert label in (token, -100)
        if not runs or runs[-1][1] != (label != -100):
            runs.append(([], label != -100))
        runs[-1][0].append(token)
    return [(tokenizer.decode(tokens), is_trained) for tokens, is_trained in runs]


# Templates and loss masks


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

    for got, messages in zip(
        batch_of(data.train, bytes_tokenizer, assistant_only_loss=True), conversations, strict=True
    ):
        assert got == labelled(turns(messages, "<eos>"), bytes_tokenizer)

    batch = batch_of(data.train, bpe_tokenizer, assistant_only_loss=True)
    for (ids, labels), messages in zip(batch, conversations, strict=True):
        expected = []
        for text, is_trained in turns(messages, "<|endoftext|>"):
            if expected and expected[-1][1] == is_trained:
                expected[-1] = (expected[-1][0] + text, is_trained)
            elif text:
                expected.append((text, is_trained))
        assert spans(ids, labels, bpe_tokenizer) == expected


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
def test_metamath_prompt_and_target(bytes_tokenizer, batch_of, monkeypatch, prompt_end):
    monkeypatch.setattr(MetaMathGSM, "token_limit", 10_000)
    data = load(
        "metamath_gsm", SAMPLES / "metamath.jsonl", bytes_tokenizer, num_eval_examples=0, prompt_end=prompt_end
    )
    rows = [row for row in samples("metamath") if row["type"].startswith("GSM")]
    assert any(row["response"].startswith("$") for row in rows)
    batch = batch_of(data.train, bytes_tokenizer)
    for (ids, labels), row in zip(batch, rows, strict=True):
        prompt = ALPACA.format(row["query"]) + prompt_end
        pieces = [(prompt, False), (row["response"], True), ("<eos>", True)]
        assert (ids, labels) == labelled(pieces, bytes_tokenizer)


# Which rows


def test_metamath_keeps_short_gsm_rows_in_order(bpe_tokenizer, monkeypatch):
    rows = samples("metamath")
    fitting = [
        row["response"]
        for row in rows
        if row["type"].startswith("GSM")
        and len(bpe_tokenizer(ALPACA.format(row["query"]) + " " + row["response"])["input_ids"]) < 250
    ]
    num_gsm = sum(row["type"].startswith("GSM") for row in rows)
    assert 6 <= len(fitting) < num_gsm
    monkeypatch.setattr(MetaMathGSM, "token_limit", 250)

    monkeypatch.setattr(MetaMathGSM, "num_training_rows", 4)
    data = load("metamath_gsm", SAMPLES / "metamath.jsonl", bpe_tokenizer, num_eval_examples=2)
    assert list(data.train["answer"]) == fitting[:4]
    assert list(data.eval["answer"]) == fitting[4:6]  # what comes after the training rows
    assert data.report.dropped["type without GSM"] == len(rows) - num_gsm
    assert data.report.dropped["250 tokens or more"] > 0
    fewer = load("metamath_gsm", SAMPLES / "metamath.jsonl", bpe_tokenizer, num_eval_examples=2, num_train_examples=1)
    assert list(fewer.eval["answer"]) == list(data.eval["answer"])  # the same for every run

    monkeypatch.setattr(MetaMathGSM, "num_training_rows", 100_000)
    data = load("metamath_gsm", SAMPLES / "metamath.jsonl", bpe_tokenizer, num_eval_examples=3)
    assert list(data.train["answer"]) + list(data.eval["answer"]) == fitting  # a smaller source: the last rows
    assert data.report.read == len(rows)


def test_metamath_limit_counts_prompt_space_and_response(write, bytes_tokenizer):
    room = 511 - len(ALPACA.format("Q").encode()) - 1
    rows = [{"type": "GSM_SV", "query": "Q", "response": "x" * size} for size in (room, room + 1)]
    data = load("metamath_gsm", write("m.jsonl", rows), bytes_tokenizer, num_eval_examples=0)
    assert list(map(len, data.train["answer"])) == [room]


def test_gsm8k_split_is_fixed(write, tokenizer):
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


def test_repetitions_of_held_out_rows_are_not_trained_on(write, tokenizer):
    rows = [{"prompt": str(i % 20), "completion": "x"} for i in range(60)]
    data = load(None, write("a.jsonl", rows), tokenizer, num_eval_examples=5)
    assert len(data.eval) == 5
    assert len(data.train) == 45
    assert not set(data.eval["prompt"]) & set(data.train["prompt"])
    assert data.report.dropped == {"repeats a held-out row": 10}


def test_tulu_draw_is_fixed(write, bytes_tokenizer):
    rows = [
        {"messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "x"}]} for i in range(300)
    ]
    path = write("a.jsonl", rows)
    drawn = load("tulu2", path, bytes_tokenizer, num_train_examples=100).train["messages"][:]
    assert len(drawn) == 100 and drawn != [row["messages"] for row in rows[:100]]
    assert drawn == sorted(drawn, key=lambda messages: int(messages[0]["content"]))
    with_eval = load("tulu2", path, bytes_tokenizer, num_train_examples=100, num_eval_examples=10)
    assert list(with_eval.train["messages"]) == drawn
    assert not any(messages in drawn for messages in with_eval.eval["messages"])


def test_arithmetic_problems(tokenizer):
    args = DataArguments("arithmetic", num_train_examples=30, num_eval_examples=10)
    data = load_data(args, tokenizer)
    assert (len(data.train), len(data.eval)) == (30, 10)
    assert data.train[0]["prompt"] == f"Question: {data.train[0]['question']}\nAnswer:"
    more = load_data(DataArguments("arithmetic", num_train_examples=60, num_eval_examples=10), tokenizer)
    assert list(more.eval["question"]) == list(data.eval["question"])
    named = DataArguments("arithmetic", num_train_examples=30, num_eval_examples=10, arithmetic_steps=[3, 5])
    assert load_data(named, tokenizer).train.to_list() == data.train.to_list()


TEST_SPLITS = {"easy_test": (1, 3), "medium_test": (2, 4), "test": (3, 5)}


@pytest.mark.parametrize("steps", TEST_SPLITS.values())
def test_arithmetic_of_chosen_steps_is_balanced_and_holds_no_test_problem(tokenizer, steps):
    args = DataArguments("arithmetic", num_train_examples=1400, num_eval_examples=100, arithmetic_steps=list(steps))
    data = load_data(args, tokenizer)
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
    text += json.dumps(runpy.run_path(str(RECIPES / "make_tiny_texts.py"))["pretraining_texts"](200))
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "a7c1226f9b1d89c662948e54c02d702cc2f707b1af870cd7b492b6442ab3d801"
    )


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


# Data of the user's


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz", "a.csv", "a.csv.gz", "a.parquet"])
def test_local_files_of_every_kind(tmp_path, tokenizer, name):
    rows = [{"prompt": f"q{i}\n,\"'", "completion": f"ä{i}" * 40_000} for i in range(5)]  # cells may be long
    path = tmp_path / name
    dataset = Dataset.from_list(rows)
    plain = tmp_path / name.removesuffix(".gz")
    if ".jsonl" in name:
        dataset.to_json(plain)
    elif ".json" in name:
        plain.write_text("\n " + json.dumps(rows))
    elif ".csv" in name:
        dataset.to_csv(plain)
    else:
        dataset.to_parquet(plain)
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(load(None, path, tokenizer).train) == rows


def test_several_files_and_eval_files(write, tokenizer):
    first, second = (write(name, [{"text": name}] * 2) for name in ("a.jsonl", "b.jsonl"))
    data = load(None, [first, second], tokenizer, eval_files=[write("c.jsonl", [{"text": "c"}] * 2)])
    assert list(data.train["text"]) == ["a.jsonl"] * 2 + ["b.jsonl"] * 2
    assert list(data.eval["text"]) == ["c"] * 2
    assert data.description == "a.jsonl, b.jsonl: 4 examples, 2 held out"


def test_a_dataset_folder_by_name(tmp_path, tokenizer):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.jsonl").write_text('{"question": "Why?", "answer": "Because."}\n')
    args = DataArguments(
        dataset_name=str(tmp_path / "mine"), column_mapping={"prompt": "question", "completion": "answer"}
    )
    assert load_data(args, tokenizer).train.to_list() == [{"prompt": "Why?", "completion": "Because."}]
    with pytest.raises(DataError, match="The dataset `.*none` cannot be loaded"):
        load_data(DataArguments(dataset_name=str(tmp_path / "none")), tokenizer)


def test_mapping_and_template(write, tokenizer):
    path = write("a.jsonl", [{"lang": "de", "in": "Haus", "out": "house", "score": 3}])
    template = "{lang}{score}: {in} \\frac{1}{2}? {}"
    fields = {"column_mapping": {"completion": "out", "1": "score", "2": "lang"}, "prompt_template": template}
    row = load(None, path, tokenizer, prompt_end=" ->", **fields).train[0]
    assert row == {"prompt": "de3: Haus \\frac3de? {} ->", "completion": "house"}
    alpaca = {"prompt_template": "alpaca", "column_mapping": {"completion": "out", "instruction": "in"}}
    assert load(None, path, tokenizer, **alpaca).train[0]["prompt"] == ALPACA.format("Haus")


@pytest.mark.parametrize(
    ("column", "preparation"), [("conversations", None), ("conversations", "tulu2"), ("messages", "tulu2")]
)
def test_sharegpt_conversations(write, bytes_tokenizer, column, preparation):
    row = {column: [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    assert load(preparation, write("a.jsonl", [row]), bytes_tokenizer).train["messages"][:] == [
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    ]


GOOD = {"prompt": "p", "completion": "c"}
CHAT = {"role": "user", "content": "u"}
BROKEN = {
    '{"prompt": "p", "completi': "broken JSON",
    "[1, 2]": "not an object",
    '{"prompt": "p"}': "missing field `completion`",
    '{"completion": "c"}': "missing field `prompt`",
    '{"prompt": "p", "completion": null}': "missing field `completion`",
    '{"prompt": "p", "completion": " \\n"}': "empty target `completion`",
    '{"prompt": 5, "completion": "c"}': "field `prompt` is not text",
    '{"prompt": "p", "completion": "\\ud800"}': "field `completion` is not valid Unicode",
    '{"a": 1}': "no `prompt` and `completion`, `messages`, `text`, or `chosen` and `rejected`",
    '{"messages": []}': "field `messages` is not a list of messages",
    '{"messages": "hi"}': "field `messages` is not a list of messages",
    json.dumps({"messages": [CHAT]}): "empty target: no assistant message with content",
    json.dumps({"messages": [CHAT, {"role": "assistant"}]}): "missing field `content` in a message",
    json.dumps({"messages": [CHAT, {"role": "bot", "content": "x"}]}): "a role is not system, user or assistant",
    json.dumps({"messages": [CHAT, {"role": "assistant", "content": 1}]}): "field `content` is not text in a message",
}


@pytest.mark.parametrize(("line", "fault"), BROKEN.items())
def test_a_bad_row_is_an_error_or_is_counted(write, tokenizer, line, fault):
    path = write("some.jsonl", [GOOD, "", line, GOOD])
    with pytest.raises(DataError, match="some.jsonl, row 3: ") as error:
        load(None, path, tokenizer)
    assert fault in str(error.value)
    data = load(None, path, tokenizer, bad_rows="skip")
    assert len(data.train) == 2
    assert data.report.dropped == {fault: 1}
    assert "some.jsonl, row 3" in str(data.report) and fault in str(data.report)


def test_prepared_data_is_cached(write, tokenizer, bpe_tokenizer, cache, monkeypatch):
    path = write("a.jsonl", [{"text": "x" * i} for i in range(1, 9)])
    fields = {"num_eval_examples": 2, "max_length": 6}
    first = load(None, path, tokenizer, **fields)
    with monkeypatch.context() as context:
        context.setattr("loopdropout_trainer.data.load._prepare", None)
        second = load(None, path, tokenizer, **fields)
    assert (second.train.to_list(), second.eval.to_list()) == (first.train.to_list(), first.eval.to_list())
    assert str(second.report) == str(first.report)

    def folders():
        return sum(entry.is_dir() for entry in cache.iterdir())

    assert folders() == 1
    for changed in ({"max_length": 7}, {"split_seed": 1}):
        load(None, path, tokenizer, **{**fields, **changed})
    load(None, path, bpe_tokenizer, **fields)
    load(None, write("a.jsonl", [{"text": "y" * i} for i in range(1, 9)]), tokenizer, **fields)
    assert folders() == 5  # settings, tokenizer and content count; nothing unfinished stays


def test_no_field_clashes_with_the_trainer():
    assert not DataArguments.__dataclass_fields__.keys() & SFTConfig.__dataclass_fields__.keys()


def test_report_is_a_table(write, tokenizer):
    data = load(None, write("a.jsonl", [{"text": "x" * i} for i in range(1, 1201)]), tokenizer, max_length=1000)
    lines = str(data.report).splitlines()
    assert lines[0] == "Rows of a.jsonl" and "dropped: more than 1,000 tokens" in lines[4]
    assert [line.split()[-1] for line in lines[1:]] == ["1,200", "999", "0", "201"]


def test_command_shows_the_loss_tokens(tmp_path, write, bytes_tokenizer, capsys):
    bytes_tokenizer.save_pretrained(tmp_path / "model")
    recipe = write(
        "recipe.yaml",
        [
            f"model_name_or_path: {tmp_path / 'model'}",
            "preparation: tulu2",
            f"train_files: [{SAMPLES / 'tulu2.jsonl'}]",
            "chat_template: tulu2",
            "assistant_only_loss: true",
            "learning_rate: 1e-4",  # none of this command's business
        ],
    )
    show([recipe, "--index", "5"])
    printed = capsys.readouterr().out
    assert "<|assistant|>\n⟦🐱😻🎉🐾🧸🐈<eos>⟧\n" in printed
    assert "Example 5 of 9" in printed
    with pytest.raises(ValueError, match="`index` must be below 9"):
        show([recipe, "--index", "9"])
