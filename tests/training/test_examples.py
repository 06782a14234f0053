"""Examples and chat templates that a program gives a trainer: each mistake is one sentence before TRL tokenizes anything."""

import logging
import re

import pytest
from datasets import Dataset, DatasetDict, IterableDataset, concatenate_datasets
from trl import SFTTrainer

from helpers.errors import user_error
from helpers.files import write_lines
from helpers.tiny import tiny_ouro
from loopdropout_trainer import (
    GateSamplingMixin,
    LoopDropoutConfig,
    LoopDropoutDPOConfig,
    LoopDropoutDPOTrainer,
    LoopDropoutGRPOConfig,
    LoopDropoutGRPOTrainer,
    LoopDropoutSFTTrainer,
)
from loopdropout_trainer.data import DataArguments, DPODataArguments, load_datasets, preview, read_files
from loopdropout_trainer.data.formats import PREFERENCES, TEXTS
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.tokenizers import CHAT_TEMPLATES, load_tokenizer
from loopdropout_trainer.training.example_counts import describe_repeated
from loopdropout_trainer.training.row_checks import RowReader, check_rows
from loopdropout_trainer.training.setup import with_gates


TURNS = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
CHAT = Dataset.from_list([{"messages": TURNS}] * 4)
QUESTIONS = Dataset.from_list([{"question": "1 + 1?", "answer": "2"}] * 4)
SHORT = Dataset.from_list([{"prompt": "1 + 1?", "completion": " 2"}] * 4)
PROMPTS = Dataset.from_list([{"prompt": TURNS[:1]}] * 4)
PAIRS = Dataset.from_list([{"chosen": TURNS, "rejected": TURNS}] * 4)

SET_TEMPLATE = (
    r"`chat_template_path` must be set, .* or one of the templates whose tokens the tokenizer has: tulu2. Or pass "
    r'`processing_class=load_tokenizer\(name, chat_template="tulu2"'
)


QUESTION, ANSWER = TURNS
WRITES_NO_CRITIC = (
    "{% for m in messages %}{% if m.role == 'critic' %}{{ raise_exception('no critic') }}{% endif %}{{ m.content }}"
    "{% endfor %}"
)
BROKEN = {
    "role": (
        {"messages": [QUESTION, {"role": "assitant", "content": "2"}]},
        "A role must be .* 'assitant'. Did you mean 'assistant'?",
    ),
    "role of ShareGPT": (
        {"messages": [{"role": "Human", "content": "2"}]},
        "A role must be .* got 'Human'. Did you mean 'user'?",
    ),
    "template": (
        {"messages": [{"role": "critic", "content": "2"}, ANSWER]},
        "`chat_template` cannot render the conversation .*: no critic",
    ),
    "no role": ({"messages": [{"content": "2", "role": None}]}, "A role must be .* got None"),
    "no content": (
        {"messages": [QUESTION, {"role": "assistant", "content": None}]},
        "A turn must have a `role` and a text as `content`",
    ),
    "wrong key": (
        {"messages": [{"role": "user", "text": "1"}, {"role": "assistant", "text": "2"}]},
        "A turn must have `content`, got the keys role, text. Rename `text` to `content`.",
    ),
    "no turns": ({"messages": []}, r"`messages` must be a text or a list of turns .*, got \[\]"),
    "nothing": ({"messages": None}, "`messages` must be a text or a list of turns .*, got None"),
    "no completion": (
        {"prompt": "1", "completion": None},
        "`completion` must be a text or a list of turns .*, got None",
    ),
    "no text": ({"text": None}, "`text` must be a text or a list of turns .*, got None"),
    "unknown token": (
        {"input_ids": [2, 258]},
        "`input_ids` must be from 0 to 257, got 258. Use the model's own tokenizer",
    ),
}
SOUND = {"messages": TURNS, "prompt": "1", "completion": "2", "text": "1", "input_ids": [2, 3]}


class OwnPreparation(LoopDropoutSFTTrainer):
    def _prepare_dataset(self, dataset, *args, **kwargs):
        return dataset.map(lambda row: {"input_ids": [2, 3], "labels": [2, 3]})


@pytest.fixture
def make(config, tokenizer):
    """`make(cls, train_dataset, held_out, formatting_func, **fields)`: a trainer over a tiny Ouro."""

    def trainer(cls, train_dataset, held_out=None, formatting_func=None, **fields):
        data = {"train_dataset": train_dataset, "eval_dataset": held_out, "processing_class": tokenizer}
        if cls is LoopDropoutDPOTrainer:
            return cls(tiny_ouro(), args=config(LoopDropoutDPOConfig, **fields), **data)
        if cls is LoopDropoutGRPOTrainer:
            args = config(LoopDropoutGRPOConfig, num_generations=2, **fields)
            return cls(tiny_ouro(), lambda completions, **columns: [0.0] * len(completions), args, **data)
        return cls(tiny_ouro(), config(**fields), formatting_func=formatting_func, **data)

    return trainer


SFT, DPO, GRPO = LoopDropoutSFTTrainer, LoopDropoutDPOTrainer, LoopDropoutGRPOTrainer


@pytest.mark.parametrize(
    ("cls", "columns", "renamed"),
    [
        (
            SFT,
            "one of: `prompt` and `completion`; `messages`; `conversations`; `text`",
            "{'question': 'prompt', 'answer': 'completion'}",
        ),
        (
            DPO,
            "one of: `prompt`, `chosen` and `rejected`; `chosen` and `rejected`",
            "{'question': 'chosen', 'answer': 'rejected'}",
        ),
        (GRPO, "`prompt`", "{'question': 'prompt'}"),
    ],
)
def test_wrong_columns_are_one_sentence(make, cls, columns, renamed):
    fix = rf"Rename columns by `rename_columns\({renamed}\)`"
    with user_error(f"`train_dataset` must have {columns}, got the columns question, answer. {fix}, or make"):
        make(cls, QUESTIONS)


def test_columns_of_alpaca_name_its_template(make, tokenizer, tmp_path):
    columns = {"instruction": "Add.", "input": "1 and 1", "output": "2"}
    rows = Dataset.from_list([columns, {**columns, "input": ""}])
    message = 'got the columns instruction, input, output. Make .* `SFTDataArguments` take `prompt_template="alpaca"`'
    with user_error(message):
        make(SFT, rows)
    file = write_lines(tmp_path / "a.jsonl", [*rows])
    with user_error("Set `prompt_template: alpaca` and `column_mapping: {completion: output}`"):
        load_datasets(DataArguments(train_files=[file]), tokenizer)
    args = DataArguments(train_files=[file], prompt_template="alpaca", column_mapping={"completion": "output"})
    prompts = load_datasets(args, tokenizer)["train"]["prompt"]
    assert "### Instruction:\nAdd.\n\n### Input:\n1 and 1\n\n### Response:" in prompts[0]
    assert "### Instruction:\nAdd.\n\n### Response:" in prompts[1] and "Input" not in prompts[1]


def test_column_of_texts_is_renamed_to_the_field(make):
    rows = Dataset.from_list([{"text": "1 + 1 = 2"}] * 2)
    with user_error(
        r"must have .*; `body`, got the columns text. Rename columns by `rename_columns\(\{'text': 'body'\}\)`"
    ):
        make(SFT, rows, dataset_text_field="body")


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rows_are_named(make, tokenizer, monkeypatch, name):
    monkeypatch.setattr(tokenizer, "chat_template", WRITES_NO_CRITIC)
    row, message = BROKEN[name]
    rows = Dataset.from_list([{column: SOUND[column] for column in row}] * 3 + [row])
    with user_error(f"^Row 4 of `train_dataset`: {message}"):
        make(SFT, rows)
    with user_error(f"^Row 2 of `eval_dataset`: {message}"):
        make(SFT, rows.select([0, 1, 2]), rows.select([2, 3]))


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("number", [7, 7.5])
@pytest.mark.parametrize("num_texts", [0, 2])
def test_numbers_of_turns_become_texts(tmp_path, num_texts, number, is_stream):
    """As in the examples of a recipe, whose template gets no numbers: in all rows of a file or in one."""
    turns = [[{**QUESTION, "content": content}, {**ANSWER, "content": "7"}] for content in (number, "two", "two")]
    rows = read_files(
        write_lines(tmp_path / "a.jsonl", [{"messages": turns[0]}] + [{"messages": turns[1]}] * num_texts)
    )
    own = load_datasets(
        DataArguments(train_files=[str(tmp_path / "a.jsonl")]), load_tokenizer("tiny-ouro", chat_template="tulu2")
    )["train"]
    arguments = {"train_dataset": rows.to_iterable_dataset() if is_stream else rows, "eval_dataset": rows}
    check_rows(arguments, TEXTS, RowReader(None))
    for dataset in arguments.values():
        assert [row["messages"] for row in dataset] == own["messages"]
        assert next(iter(dataset))["messages"][0]["content"] == str(number)


def test_rows_in_the_spelling_of_trl_stay():
    """Also if the name of a key has the name of a type of numbers."""
    rows = Dataset.from_list([{"messages": [{**QUESTION, "points": "x", "floats": None}, ANSWER]}] * 2)
    arguments = {"train_dataset": rows, "eval_dataset": None}
    check_rows(arguments, TEXTS, RowReader(None))
    assert arguments["train_dataset"] is rows


SHAREGPT = [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]
PARTS = [{**turn, "content": [{"type": "text", "text": text} for text in turn["content"]]} for turn in TURNS]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("row", [
    {"conversations": SHAREGPT}, {"conversations": TURNS}, {"messages": SHAREGPT}, {"messages": PARTS}
], ids=["ShareGPT", "keys of TRL", "messages of ShareGPT", "parts"])  # fmt: skip
def test_conversations_in_other_spellings(config, tmp_path, row, is_stream):
    """In Python as in a recipe, which also reads parts that are texts for a template without parts."""
    tokenizer = load_tokenizer("tiny-ouro", chat_template="tulu2")
    data = DataArguments(train_files=[write_lines(tmp_path / "a.jsonl", [{"id": 1, **row}] * 4)])
    assert [*load_datasets(data, tokenizer)["train"]] == [{"messages": TURNS}] * 4
    rows = read_files(str(tmp_path / "a.jsonl"))
    args = config(max_steps=1, assistant_only_loss=True)
    train_dataset = rows.to_iterable_dataset() if is_stream else rows
    trainer = SFT("tiny-ouro", args, train_dataset=train_dataset, eval_dataset=rows, processing_class=tokenizer)
    assert trainer.saved_facts["is_chat"]
    for dataset in (trainer.train_dataset, trainer.eval_dataset):
        assert preview(next(iter(dataset)), tokenizer) == "<|user|>\n1 + 1?\n<|assistant|>\n⟦2<|endoftext|>⟧"


def test_parts_of_a_turn_need_a_template_that_reads_them(make, tokenizer, monkeypatch, tmp_path):
    """Another template would write them as Python's list."""
    question = {"role": "user", "content": [{"type": "image", "text": "2"}]}
    write_lines(tmp_path / "parts.jsonl", [{"messages": [question, {**ANSWER, "content": "two"}]}] * 2)
    rows = read_files(str(tmp_path / "parts.jsonl"))
    args, message = (
        DataArguments(train_files=[str(tmp_path / "parts.jsonl")]),
        "A turn must have .* The chat template reads no parts",
    )
    monkeypatch.setattr(tokenizer, "chat_template", WRITES_NO_CRITIC)
    with user_error(f"^Row 1 of `train_dataset`: {message}"):
        make(SFT, rows)
    with user_error(f"^Row 1 of .*parts.jsonl: {message}"):
        load_datasets(args, tokenizer)
    reads = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", reads)
    assert len(make(SFT, rows).train_dataset) == len(load_datasets(args, tokenizer)["train"]) == 2
    answer = {**ANSWER, "content": [{"type": "text", "text": "two"}]}  # of the assistant, too
    write_lines(tmp_path / "parts.jsonl", [{"messages": [question, answer]}] * 2)
    assert len(load_datasets(args, tokenizer)["train"]) == 2


@pytest.mark.parametrize("name", ["role", "no completion", "no text"])
def test_broken_rows_of_streams_are_named(make, tokenizer, monkeypatch, name):
    """When the training reads them, with the sentence of a `Dataset`."""
    monkeypatch.setattr(tokenizer, "chat_template", WRITES_NO_CRITIC)
    row, message = BROKEN[name]
    rows = Dataset.from_list([{column: SOUND[column] for column in row}] * 9 + [row])
    trainer = make(SFT, rows.to_iterable_dataset())
    with user_error(f"^Row 10 of `train_dataset`: {message}"):
        trainer.train()
    assert trainer.state.global_step == 1
    stream = rows.select([8, 9]).to_iterable_dataset()
    trainer = make(SFT, rows.select([0, 1, 2, 3]), {"new": rows.select([0]), "old": stream})
    with user_error(rf"^Row 2 of `eval_dataset\['old'\]`: {message}"):
        trainer.evaluate()


def test_broken_rows_have_the_sentence_of_a_recipe(make, tokenizer, monkeypatch, tmp_path):
    """The place of the row is the only difference."""
    monkeypatch.setattr(tokenizer, "chat_template", WRITES_NO_CRITIC)
    for name in ("role", "template"):
        rows = Dataset.from_list([CHAT[0], BROKEN[name][0]])
        file = str(tmp_path / f"{name}.jsonl")
        rows.to_json(file)
        with pytest.raises(UserError) as of_python:
            make(SFT, rows)
        with pytest.raises(UserError) as of_recipe:
            load_datasets(DataArguments(train_files=[file]), tokenizer, max_length=99)
        assert str(of_python.value) == str(of_recipe.value).replace(file, "`train_dataset`")


@pytest.mark.parametrize(("cls", "column"), [(DPO, "chosen"), (DPO, "rejected"), (GRPO, "prompt")])
def test_broken_rows_of_other_trainers_are_named(make, tokenizer, monkeypatch, cls, column):
    monkeypatch.setattr(tokenizer, "chat_template", WRITES_NO_CRITIC)
    sound = PAIRS[0] if cls is DPO else PROMPTS[0]
    with user_error("^Row 2 of `train_dataset`: A role must be .* 'assitant'. Did you mean 'assistant'?"):
        make(cls, Dataset.from_list([sound, {**sound, column: [{"role": "assitant", "content": "2"}]}]))


SYSTEM = [{"role": "system", "content": "Add."}]


def test_shared_system_turn_is_saved(make, tokenizer, monkeypatch):
    """It is the turn that `chat` names. If not all conversations have it, only this fact is saved."""
    monkeypatch.setattr(tokenizer, "chat_template", WRITES_NO_CRITIC)
    other = [{"role": "system", "content": "Subtract."}]
    for second, saved, differs in ((SYSTEM, "Add.", None), ([], None, True), (other, None, True)):
        for format_row in (
            lambda start: {"messages": [*start, *TURNS]},
            lambda start: {"prompt": [*start, QUESTION], "completion": [ANSWER]},
        ):
            rows = Dataset.from_list([format_row(SYSTEM), format_row(second), format_row(SYSTEM)])
            settings = make(SFT, rows).saved_settings()
            assert (settings.get("system_turn"), settings.get("has_system_turns")) == (saved, differs)


def test_text_with_a_conversation_raises(make, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", WRITES_NO_CRITIC)
    with user_error("^Row 1 of .*: `prompt` and `completion` must be all texts .* a list as `prompt` and a text as"):
        make(SFT, Dataset.from_list([{"prompt": TURNS[:1], "completion": "2"}]))


SHAREGPT = [{"from": "human", "value": "1 + 1"}, {"from": "gpt", "value": "2"}]


@pytest.mark.parametrize(("columns", "target"), [
    ({"conversations": SHAREGPT, "text": "other"}, "1 + 1"),
    ({"conversations": SHAREGPT, "messages": None}, "1 + 1"),
    ({"conversations": SHAREGPT, "messages": [QUESTION, ANSWER]}, QUESTION["content"]),
])  # fmt: skip
def test_sharegpt_next_to_other_formats_is_read_as_in_a_recipe(make, tokenizer, monkeypatch, columns, target):
    monkeypatch.setattr(tokenizer, "chat_template", CHAT_TEMPLATES["tulu2"].read_text())
    trainer = make(SFT, Dataset.from_list([columns] * 2))
    assert target in tokenizer.decode(trainer.train_dataset[0]["input_ids"])


@pytest.mark.parametrize(("columns", "message"), [
    ({"question": "1", "reply": "2"}, "must have one of: .*; `conversations`; `text`, got the columns question, reply"),
    ({"conversations": "[]"}, "Row 1 of `train_dataset`: `conversations` must be a list of turns .* Parse the text"),
    ({"conversations": SHAREGPT, "prompt": "1"}, "To train on `conversations`, remove the prompt by `remove_columns"),
    ({"conversations": [{**SHAREGPT[0], "from": "bing"}]}, "got 'bing'. Did you mean 'assistant'"),
    ({"conversations": [{**SHAREGPT[0], "from": "function_call"}]}, "Write a call of a function as `tool_calls`"),
])  # fmt: skip
def test_wrong_sharegpt_is_named(make, tokenizer, monkeypatch, columns, message):
    monkeypatch.setattr(tokenizer, "chat_template", CHAT_TEMPLATES["tulu2"].read_text())
    with user_error(message):
        make(SFT, Dataset.from_list([columns] * 2))


def test_examples_longer_than_max_length_are_counted(make, log):
    rows = [{"prompt": "1 + 1 =" * length, "completion": "2"} for length in (1, 1, 9)]
    assert len(make(SFT, Dataset.from_list(rows), max_length=10).train_dataset) == 2
    assert (
        "1 example of the 3 in `train_dataset` is left out, because it has no token to train on among the first 10 "
        "(`max_length`).\n"
    ) in log.text


def test_empty_answers_are_counted(log, tmp_path):
    """TRL trains on the end token of such an answer. A recipe leaves the examples out in the same words."""
    tokenizer = load_tokenizer("tiny-ouro", chat_template="tulu2")
    rows = [{"messages": [QUESTION, {**ANSWER, "content": content}]} for content in ("2", " ", "")]
    check_rows({"train_dataset": Dataset.from_list(rows)}, TEXTS, RowReader(tokenizer.chat_template, True))
    words = "no text to train on (no answer of the assistant). The first one is row 2"
    assert f"2 of the 3 examples in `train_dataset` have {words}. A recipe leaves such examples out." in log.text
    load_datasets(DataArguments(train_files=[write_lines(tmp_path / "a.jsonl", rows)]), tokenizer)
    assert f"2 examples are left out, because they have {words}" in log.text


def test_pairs_of_equal_answers_are_counted(log, tmp_path):
    """DPO has no gradient on them."""
    tokenizer = load_tokenizer("tiny-ouro", chat_template="tulu2")
    turns = [{"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": text}]} for text in "32"]
    texts = [{"prompt": "1+1=", "chosen": "2", "rejected": rejected} for rejected in "32"]
    for rows in (turns, texts):
        log.clear()
        check_rows({"train_dataset": Dataset.from_list(rows)}, PREFERENCES, RowReader(tokenizer.chat_template))
        words = "has the same answer as `chosen` and as `rejected`, from which the model learns nothing"
        assert (
            f"1 of the 2 examples in `train_dataset` {words}. Such examples are kept. The first one is row 2."
            in log.text
        )
        file = write_lines(tmp_path / "pairs.jsonl", rows)
        load_datasets(DPODataArguments(train_files=[file]), tokenizer)
        assert f"1 of the 2 examples in {file} {words}. Such examples are kept. The first one is row 2" in log.text


def test_conversations_with_an_empty_answer_are_counted(log, tmp_path):
    """They have another answer, so they are kept, for a recipe and in Python."""
    tokenizer = load_tokenizer("tiny-ouro", chat_template="tulu2")
    whole, empty = [QUESTION, ANSWER], [QUESTION, {**ANSWER, "content": ""}]
    rows = [{"messages": turns} for turns in (whole, whole + empty, empty, empty + whole)]
    check_rows({"train_dataset": Dataset.from_list(rows)}, TEXTS, RowReader(tokenizer.chat_template, True))
    words = "have a turn of the assistant without text, from which .* The first one is row 2"
    assert re.search(rf"2 of the 4 examples in `train_dataset` {words}\.", log.text)
    file = write_lines(tmp_path / "a.jsonl", rows)
    assert len(load_datasets(DataArguments(train_files=[file]), tokenizer)["train"]) == 3
    assert re.search(rf"2 of the 3 examples in {file} {words} of {file}\.", log.text)


@pytest.mark.parametrize("packing", [False, True])
def test_cut_and_repeated_examples_are_counted(make, log, packing):
    """TRL trains on them without a word. A repeat of a held-out example is a third kind, and streams are not read."""
    texts = ["1 + 1 = 2", "1 + 1 = 2", "2 + 2 = 4", "3 + 3 = 6" * 9, "3 + 3 = 6" * 8]
    rows = Dataset.from_list([{"text": text} for text in texts])
    pair = Dataset.from_list([{"prompt": "2 + 2 =", "completion": " 4"}])
    held_out = {"new": rows.select([2, 3]), "short": Dataset.from_list([{"text": "9"}]), "pair": pair}
    trainer = make(SFT, rows, held_out, max_length=20, max_steps=1, packing=packing)
    cut = "because {} more than 20 tokens (`max_length`). A recipe and `load_datasets` leave such examples out"
    assert f"2 of the 5 examples in `train_dataset` are cut, {cut.format('they have')}" in log.text
    assert f"1 of the 2 examples in `eval_dataset['new']` is cut, {cut.format('it has')}" in log.text
    assert "short" not in log.text and max(map(len, trainer.train_dataset["input_ids"])) == 20
    repeated = [
        "2 of the 5 examples in `train_dataset` repeat another one.",  # of the cut ones, too
        "3 of the 5 examples in `train_dataset` repeat a held-out example of `eval_dataset['new']`, so the held-out loss is "
        "too low. A recipe leaves such examples out.",
        "1 of the 5 examples in `train_dataset` repeats a held-out example of `eval_dataset['pair']`, so the held-out loss is "
        "too low. A recipe leaves such examples out.",
    ]
    assert describe_repeated(trainer) == repeated
    trainer.train()
    assert all(sentence in log.text for sentence in repeated)
    trainer.train_dataset = rows.to_iterable_dataset().map(lambda row: {"input_ids": [2], "labels": [2]})
    assert describe_repeated(trainer) == []


@pytest.mark.parametrize("is_stream", [False, True])
def test_cut_texts_cause_no_warning(make, tokenizer, monkeypatch, log, is_stream):
    """The warning says that long texts end in errors, which is wrong for texts that are cut."""
    monkeypatch.setattr(tokenizer, "model_max_length", 8)
    monkeypatch.setattr(tokenizer, "deprecation_warnings", {})
    transformers_logger = logging.getLogger("transformers")
    transformers_logger.addHandler(log.handler)
    for max_length, warns in ((8, False), (None, True)):
        rows = Dataset.from_list([{"text": f"{max_length} + 1 =" * 9}] * 4)  # each text is tokenized once
        data = rows.to_iterable_dataset() if is_stream else rows
        tokenizer.deprecation_warnings.clear()  # which say that it has warned
        trainer = make(SFT, data, max_length=max_length, max_steps=1)
        if is_stream:
            trainer.train()
        else:
            trainer.predict(rows.select([0]))
        assert ("Token indices sequence length is longer" in log.text) == warns
    transformers_logger.removeHandler(log.handler)


@pytest.mark.parametrize("name", ["eos_token", "pad_token"])
def test_special_tokens_must_be_known(make, name):
    with user_error(f"`{name}` must be a token of the tokenizer .*, got '<missing>'."):
        make(SFT, Dataset.from_list([{"text": "1"}] * 2), **{name: "<missing>"})


LONG = [{"prompt": "1 + 1 =" * 9, "completion": "2"}] * 2


@pytest.mark.parametrize(("rows", "fields"), [(LONG, {}), (LONG, {"packing": True}), ([{"text": ""}] * 2, {})])
def test_data_without_a_trained_token_raises(make, rows, fields):
    """The loss would be zero in each step."""
    rows, sound = Dataset.from_list(rows), Dataset.from_list([dict.fromkeys(rows[0], "1")])
    message = r"must have a token to train on, got 2 examples without one, because .* 10 tokens \(`max_length`\)"
    with user_error(f"`train_dataset` {message}"):
        make(SFT, rows, max_length=10, **fields)
    with user_error(f"`eval_dataset` {message}"):
        make(SFT, sound, rows, max_length=10, **fields)
    with user_error("got 2 examples without one, because their texts are empty."):
        make(SFT, Dataset.from_list([{"text": ""}] * 2), max_length=None)
    with user_error(r"`eval_dataset\['one'\]` must have at least one example"):
        make(SFT, sound, {"one": sound.select([])})


def test_more_examples_in_a_batch_than_there_are_raises(make):
    with user_error("`per_device_train_batch_size` must be at most 2, .* if `dataloader_drop_last` is true, got 4"):
        make(SFT, Dataset.from_list([{"text": "1"}] * 2), dataloader_drop_last=True)


def test_tokenizer_without_end_token_raises(make, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "_special_tokens_map", {**tokenizer._special_tokens_map, "eos_token": None})
    with user_error("`eos_token` must be set, because the tokenizer of .* has no end token"):
        make(SFT, Dataset.from_list([{"text": "1"}]))


def test_wrong_columns_of_streams_and_held_out_examples(make):
    stream = IterableDataset.from_generator(lambda: iter(QUESTIONS))
    with user_error("`train_dataset` must have .*, got the columns question, answer"):
        make(SFT, stream)
    with user_error("`train_dataset` must have `prompt` and `completion`, got the columns prompt, text"):
        make(SFT, Dataset.from_list([{"prompt": "a", "text": "b"}]))
    with user_error(r"`eval_dataset\['one'\]` must have .*; `story`, got the columns question, answer"):
        make(SFT, Dataset.from_list([{"story": "b"}]), {"one": QUESTIONS}, dataset_text_field="story")


def test_own_preparations_read_any_columns(make, log):
    make(SFT, QUESTIONS, formatting_func=lambda row: row["question"] + row["answer"])
    make(OwnPreparation, QUESTIONS)
    assert "no effect" not in log.text


def test_formatting_function_must_return_a_text(make):
    turns = lambda row: [{"role": "user", "content": row["question"]}]
    with user_error(
        "`formatting_func` must return a text for each row, got .*Make conversations before, by `dataset.map"
    ):
        make(SFT, QUESTIONS, formatting_func=turns)
    with user_error("`formatting_func` must return a text for each row, got None.$"):
        make(SFT, QUESTIONS, formatting_func=lambda row: None)


@pytest.mark.parametrize(("rows", "column"), [(CHAT, "messages"), (SHORT, "prompt")])
def test_formatting_function_without_effect_warns(config, log, rows, column):
    data = {"train_dataset": rows, "processing_class": load_tokenizer("tiny-ouro", chat_template="tulu2")}
    SFT("tiny-ouro", config(completion_only_loss=False), formatting_func=lambda row: "text", **data)
    says = f"`formatting_func` has no effect on `train_dataset`, because TRL reads the column `{column}` first."
    assert says in log.text


class OtherTrainer(GateSamplingMixin, SFTTrainer):
    """Another trainer of TRL, whose formats of examples this package does not know."""

    config_class = LoopDropoutConfig
    __init__ = with_gates(SFTTrainer.__init__)


def test_columns_of_other_trainers_are_left_to_trl(make):
    assert len(make(OtherTrainer, Dataset.from_list([{"text": "a"}] * 4)).train_dataset) == 4
    with pytest.raises(KeyError, match="text"):
        make(OtherTrainer, QUESTIONS)


@pytest.mark.parametrize("cls", [SFT, DPO, GRPO])
@pytest.mark.parametrize(("convert", "function"), [(list, "from_list"), (Dataset.to_pandas, "from_pandas")])
def test_other_containers_name_the_conversion(make, cls, convert, function):
    with user_error(f"`train_dataset` must be a `Dataset` .*, got a .*. Convert it by `datasets.Dataset.{function}`"):
        make(cls, convert(QUESTIONS))
    with user_error("got a list of them. Join them by `datasets.concatenate_datasets`"):
        make(cls, [QUESTIONS, QUESTIONS])
    with user_error("got a dict. Convert it by `datasets.Dataset.from_dict`"):
        make(cls, QUESTIONS.to_dict())


@pytest.mark.parametrize("is_reversed", [False, True])
def test_joined_spellings_of_conversations_name_the_other_column(make, is_reversed):
    """`concatenate_datasets` fills the column that a data set lacks with None."""
    sharegpt = [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]
    parts = [CHAT, Dataset.from_list([{"conversations": sharegpt}] * 4)]
    first, other = "messages", "conversations"
    if is_reversed:
        first, other = other, first
        parts.reverse()
    with user_error(f"rows of one format, got `{other}` instead of `{first}` in row 5 of `train_dataset`"):
        make(SFT, concatenate_datasets(parts))


def test_generator_and_stream_without_steps_name_the_fix(make):
    with user_error("got a generator. Give the function that makes it to `datasets.IterableDataset.from_generator`"):
        make(SFT, (row for row in QUESTIONS))
    with user_error("`max_steps` must be at least 1 if `train_dataset` is a stream, .* got -1"):
        make(SFT, IterableDataset.from_generator(lambda: iter(QUESTIONS)), max_steps=-1)


@pytest.mark.parametrize(("cls", "rows"), [(SFT, CHAT), (DPO, PAIRS), (GRPO, PROMPTS)])
def test_missing_template_names_the_packages_ones(make, cls, rows):
    with user_error(SET_TEMPLATE):
        make(cls, rows)


@pytest.mark.parametrize("cls", [SFT, DPO, GRPO])
def test_splits_of_a_dataset_are_named(make, cls):
    splits = DatasetDict({"train": CHAT, "test": CHAT})
    with user_error(r"`train_dataset` must be .*, got a DatasetDict with the splits train, test. .* `\['train'\]`"):
        make(cls, splits)
    with user_error(r"`train_dataset` must be .*, got a dict with the splits en. .* `\['en'\]`"):
        make(cls, {"en": CHAT})


def test_template_without_its_tokens_is_named_by_its_field(config):
    tokenizer = load_tokenizer("tiny-ouro")
    needs = "must be one whose tokens the tokenizer tiny-ouro has, got 'huginn'"
    with user_error(f"`chat_template_path` {needs}"):
        SFT("tiny-ouro", config(chat_template_path="huginn"), train_dataset=CHAT, processing_class=tokenizer)
    with user_error(f"`chat_template` {needs}"):
        load_tokenizer("tiny-ouro", chat_template="huginn")
    with user_error("`eos_token` must be a token of the tokenizer tiny-ouro, got"):
        load_tokenizer("tiny-ouro", eos_token="<missing>")


def test_missing_template_of_assistant_only_loss(make):
    with user_error(SET_TEMPLATE):
        make(SFT, CHAT, assistant_only_loss=True)


@pytest.mark.parametrize("name", ["tulu2", str(CHAT_TEMPLATES["tulu2"])])
def test_template_path_takes_names_and_files(config, name):
    tokenizer = load_tokenizer("tiny-ouro")
    args = config(chat_template_path=name, assistant_only_loss=True)  # the template of the path marks the turns
    trainer = SFT("tiny-ouro", args, train_dataset=CHAT, processing_class=tokenizer)
    assert "<|user|>" in tokenizer.decode(trainer.train_dataset[0]["input_ids"])
    assert trainer.args.chat_template_path == name


def test_unknown_template_path_names_the_known_ones(make, monkeypatch):
    asked = []  # of the Hub, which is asked several times without a network
    monkeypatch.setattr("loopdropout_trainer.training.chat_templates.cached_file", lambda *names: asked.append(names))
    with user_error("`chat_template_path` must be huginn, .*, got 'tulu'. Did you mean 'tulu2'?"):
        make(SFT, CHAT, chat_template_path="tulu")
    with user_error("got 'chatml'. Did you mean 'ouro'?"):  # another name of the template
        make(SFT, CHAT, chat_template_path="chatml")
    assert not asked


def test_model_without_name_needs_its_tokenizer(config, dataset):
    with user_error("`processing_class` must be set, because the model has no name"):
        SFT(tiny_ouro(), config(), train_dataset=dataset)


def test_loss_of_turns_needs_turns(make, make_sft, tokenizer, monkeypatch, dataset):
    """TRL raises a long error after it has loaded the model, and names no row. Of held-out texts it says nothing."""
    monkeypatch.setattr(tokenizer, "chat_template", CHAT_TEMPLATES["tulu2"].read_text())
    message = (
        "`assistant_only_loss` must be false for examples without turns of an assistant, got the text `prompt` in"
    )
    with user_error(f"{message} `train_dataset`. Of a pair"):
        make_sft(rows=dataset, assistant_only_loss=True)
    with user_error(f"{message} `eval_dataset`"):
        make(SFT, CHAT, dataset, assistant_only_loss=True, eval_strategy="epoch")
    make(SFT, CHAT, dataset, assistant_only_loss=True, eval_strategy="no")
    for row in ({"messages": TURNS[:1]}, {"prompt": TURNS, "completion": TURNS[:1]}):
        target = [*row][-1]
        sound = {"prompt": TURNS[:1], "completion": TURNS[1:], "messages": TURNS}
        rows = Dataset.from_list([{name: sound[name] for name in row}, row])
        for data, place in (
            ((rows,), "Row 2 of `train_dataset`"),
            ((rows.select([0]), rows), "Row 2 of `eval_dataset`"),
        ):
            with user_error(
                f"^{place}: `{target}` must have a turn of the assistant, .* got the roles user. Remove the"
            ):
                make(SFT, *data, assistant_only_loss=True)
    own = [
        {"messages": [QUESTION, {"role": "model", "content": "2"}]}
    ] * 2  # a role that the template marks as an answer
    template = (
        "{% for m in messages %}{% generation %}{{ m.content if m.role == 'model' }}{% endgeneration %}{% endfor %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    check_rows({"train_dataset": Dataset.from_list(own)}, TEXTS, RowReader(template, assistant_only_loss=True))
