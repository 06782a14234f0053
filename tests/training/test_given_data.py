"""Data that `evaluate` and `predict` of a trainer get."""

import pytest
from datasets import Dataset

from helpers.errors import user_error
from helpers.tiny import tiny_ouro
from loopdropout_trainer import LoopDropoutDPOConfig, LoopDropoutDPOTrainer, LoopDropoutSFTTrainer
from loopdropout_trainer.tokenizers import load_tokenizer
from loopdropout_trainer.training.given_data import prepare_given


@pytest.mark.parametrize("packing", [False, True])
def test_raw_data_is_prepared_as_in_training(make_sft, dataset, packing, capsys):
    trainer = make_sft(rows=dataset, packing=packing, max_length=32, shuffle_dataset=True)
    raw = dataset.select(range(4))  # the trainer's own held-out data
    own = trainer.evaluate()["eval_loss"]
    assert trainer.evaluate(raw)["eval_loss"] == own
    assert trainer.evaluate({"a": raw})["eval_a_loss"] == own
    # TRL would pack the rows again.
    assert trainer.evaluate(trainer.eval_dataset)["eval_loss"] == pytest.approx(own, rel=1e-5)
    assert trainer.predict(raw).metrics["test_loss"] == pytest.approx(own, rel=1e-2)
    assert "examples/s" not in capsys.readouterr().err  # bars of short work


def test_predictions_have_the_order_of_the_examples(make_sft, dataset):
    trainer = make_sft(shuffle_dataset=True)
    rows = dataset.select(range(8))
    labels = trainer.predict(rows).label_ids
    lengths = [sum(label != -100 for label in row) for row in labels]
    assert lengths == [len(row["completion"]) + 1 for row in rows]  # with the end token


def test_formatting_function_prepares_raw_data(config, dataset, tokenizer):
    held_out = dataset.select(range(4))
    data = {"train_dataset": dataset, "eval_dataset": held_out, "processing_class": tokenizer}
    args = config(completion_only_loss=False)
    trainer = LoopDropoutSFTTrainer(tiny_ouro(), args, formatting_func=lambda row: row["prompt"], **data)
    own = trainer.evaluate()["eval_loss"]
    assert trainer.predict(held_out).metrics["test_loss"] == pytest.approx(own, rel=1e-5)


def test_prepared_data_stays_as_it_is(make_sft):
    """Also for `predict`, and without a check of columns that TRL does not read then."""
    tokens = Dataset.from_list([{"input_ids": [2, 5], "labels": [2, 5], "text": 5}] * 4)
    trainer = make_sft(rows=tokens, dataset_kwargs={"skip_prepare_dataset": True})
    assert prepare_given(trainer, "test_dataset", tokens) is tokens


def test_pairs_are_prepared_for_predict(config, tokenizer):
    pairs = Dataset.from_list([{"prompt": "1", "chosen": "2", "rejected": "3"}] * 4)
    args = config(LoopDropoutDPOConfig)
    trainer = LoopDropoutDPOTrainer(tiny_ouro(), args=args, train_dataset=pairs, processing_class=tokenizer)
    assert trainer.predict(pairs).metrics["test_loss"] == pytest.approx(trainer.evaluate(pairs)["eval_loss"])


WRONG = [
    ("predict", [{"prompt": "1", "completion": "2"}], "`test_dataset` must be .*, got a list. Convert it"),
    ("predict", "data.jsonl", "`test_dataset` must be .*, got 'data.jsonl'. Load a file by `datasets.load_dataset"),
    ("predict", 5, "`test_dataset` must be a `Dataset` or an `IterableDataset`, got 5"),
    ("evaluate", "data.jsonl", "`eval_dataset` must be .* the name of a held-out dataset .* which has no names"),
    ("evaluate", Dataset.from_list([{"question": "1", "answer": "2"}]), "`eval_dataset` must have one of: `prompt`"),
    ("predict", Dataset.from_list([{"input_ids": [2, 258]}]), "Row 1 of `test_dataset`: `input_ids` must be from 0"),
    (
        "evaluate",
        Dataset.from_list([{"prompt": "1", "completion": "2"}, {"prompt": "1", "completion": None}]),
        "Row 2 of `eval_dataset`: `completion` must be a text",
    ),
]


def test_wrong_data_of_evaluate_and_predict_raises(make_sft):
    trainer = make_sft()
    for method, data, message in WRONG:
        with user_error(message):
            getattr(trainer, method)(data)


TURNS = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
SHAREGPT = [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]
CHAT = Dataset.from_list([{"messages": TURNS}] * 2)
SPELLINGS = [Dataset.from_list([{name: SHAREGPT}] * 2) for name in ("conversations", "messages")]
BROKEN_CHATS = [
    ([{"role": "user", "content": "1 + 1?"}], "`messages` must have a turn of the assistant, because"),
    ([{"role": "assitant", "content": "2"}], "A role must be .* 'assitant'. Did you mean 'assistant'?"),
    ([{"role": "tool", "content": "2"}, TURNS[1]], "`chat_template` cannot render the conversation"),
]


def list_readers(trainer):
    """The ways in which a trainer gets further examples, each with the name of its argument."""
    yield trainer.evaluate, "`eval_dataset`"
    yield trainer.predict, "`test_dataset`"
    yield lambda data: list(trainer.get_eval_dataloader(data)), "`eval_dataset`"
    yield lambda data: list(trainer.get_test_dataloader(data)), "`test_dataset`"
    yield lambda data: trainer.evaluate({"new": data}), r"`eval_dataset\['new'\]`"


@pytest.fixture
def chat_trainer(config):
    tokenizer = load_tokenizer("tiny-ouro")
    args = config(chat_template_path="tulu2", assistant_only_loss=True)
    return LoopDropoutSFTTrainer("tiny-ouro", args, train_dataset=CHAT, eval_dataset=CHAT, processing_class=tokenizer)


def test_further_conversations_are_read_as_those_of_the_training(chat_trainer):
    """With a chat template of `chat_template_path`."""
    own = chat_trainer.evaluate()["eval_loss"]
    (own_batch,) = chat_trainer.get_eval_dataloader()
    for rows in SPELLINGS:
        for data in (rows, rows.to_iterable_dataset()):
            assert chat_trainer.evaluate(data)["eval_loss"] == pytest.approx(own)
            assert chat_trainer.evaluate({"new": data})["eval_new_loss"] == pytest.approx(own)
            assert chat_trainer.predict(data).metrics["test_loss"] == pytest.approx(own)
            for loader in (chat_trainer.get_eval_dataloader(data), chat_trainer.get_test_dataloader(data)):
                (batch,) = loader
                assert batch["input_ids"].tolist() == own_batch["input_ids"].tolist()
                assert batch["labels"].tolist() == own_batch["labels"].tolist()


def test_broken_further_conversations_are_named(chat_trainer):
    """With the sentence that they have as training data."""
    for turns, message in BROKEN_CHATS:
        rows = Dataset.from_list([{"messages": TURNS}, {"messages": turns}])
        for read, title in list_readers(chat_trainer):
            with user_error(f"^Row 2 of {title}: {message}"):
                read(rows)
    stream = Dataset.from_list([{"messages": TURNS}, {"messages": BROKEN_CHATS[1][0]}]).to_iterable_dataset()
    for read, title in list_readers(chat_trainer):
        with user_error(f"^Row 2 of {title}: {BROKEN_CHATS[1][1]}"):
            read(stream)


def test_rows_are_checked_with_the_template_of_another_tokenizer(config, tmp_path):
    """`chat_template_path` names a tokenizer, whose template TRL copies."""
    source = load_tokenizer("tiny-ouro")
    args = config(chat_template_path=str(tmp_path))
    source.save_pretrained(tmp_path)
    with user_error("`chat_template_path` must name a tokenizer with a chat template, got .* which has none"):
        LoopDropoutSFTTrainer("tiny-ouro", args, train_dataset=CHAT, processing_class=load_tokenizer("tiny-ouro"))
    load_tokenizer("tiny-ouro", chat_template="tulu2").save_pretrained(tmp_path)
    rows = Dataset.from_list([{"messages": TURNS}, {"messages": BROKEN_CHATS[1][0]}])
    with user_error("^Row 2 of `train_dataset`: A role must be .* 'assitant'"):
        LoopDropoutSFTTrainer("tiny-ouro", args, train_dataset=rows, processing_class=load_tokenizer("tiny-ouro"))


def test_further_pairs_are_read_as_those_of_the_training(config):
    tokenizer = load_tokenizer("tiny-ouro", chat_template="tulu2")
    pairs = Dataset.from_list([{"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": TURNS[1:]}] * 2)
    args = config(LoopDropoutDPOConfig)
    trainer = LoopDropoutDPOTrainer("tiny-ouro", args=args, train_dataset=pairs, processing_class=tokenizer)
    spelled = {"prompt": SHAREGPT[:1], "chosen": SHAREGPT[1:], "rejected": SHAREGPT[1:]}
    others = Dataset.from_list([spelled] * 2)
    broken = Dataset.from_list([pairs[0], {**pairs[0], "rejected": [{"role": "assitant", "content": "2"}]}])
    for read, title in list_readers(trainer):
        read(others)
        with user_error(f"^Row 2 of {title}: A role must be .* 'assitant'. Did you mean 'assistant'?"):
            read(broken)
