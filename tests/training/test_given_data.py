"""Data that `evaluate` and `predict` of a trainer get."""

import pytest
from datasets import Dataset

from helpers.errors import user_error
from helpers.tiny import tiny_ouro
from loopdropout_trainer import LoopDropoutDPOConfig, LoopDropoutDPOTrainer, LoopDropoutSFTTrainer
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
