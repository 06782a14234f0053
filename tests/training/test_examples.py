"""Examples and chat templates that a program gives a trainer: each mistake is one sentence before TRL tokenizes anything."""

import pytest
from datasets import Dataset, IterableDataset
from trl import SFTTrainer

from helpers.errors import user_error
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
from loopdropout_trainer.tokenizers import CHAT_TEMPLATES, load_tokenizer
from loopdropout_trainer.training.setup import with_gates


TURNS = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
CHAT = Dataset.from_list([{"messages": TURNS}] * 4)
QUESTIONS = Dataset.from_list([{"question": "1 + 1?", "answer": "2"}] * 4)
PROMPTS = Dataset.from_list([{"prompt": TURNS[:1]}] * 4)
PAIRS = Dataset.from_list([{"chosen": TURNS, "rejected": TURNS}] * 4)

SET_TEMPLATE = (
    r'`chat_template` must be set, .* or one of .*ouro .*`processing_class=load_tokenizer\(name, chat_template="ouro"'
)


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
    ("cls", "columns"),
    [
        (SFT, "one of: `prompt` and `completion`; `messages`; `text`"),
        (DPO, "one of: `prompt`, `chosen` and `rejected`; `chosen` and `rejected`"),
        (GRPO, "`prompt`"),
    ],
)
def test_wrong_columns_are_one_sentence(make, cls, columns):
    with user_error(f"`train_dataset` must have {columns}, got the columns question, answer. Rename columns by"):
        make(cls, QUESTIONS)


def test_wrong_columns_of_streams_and_held_out_examples(make):
    stream = IterableDataset.from_generator(lambda: iter(QUESTIONS))
    with user_error("`train_dataset` must have .*, got the columns question, answer"):
        make(SFT, stream)
    with user_error("`train_dataset` must have `prompt` and `completion`, got the columns prompt, text"):
        make(SFT, Dataset.from_list([{"prompt": "a", "text": "b"}]))
    with user_error(r"`eval_dataset\['one'\]` must have .*; `story`, got the columns question, answer"):
        make(SFT, Dataset.from_list([{"story": "b"}]), {"one": QUESTIONS}, dataset_text_field="story")


def test_own_preparations_read_any_columns(make):
    make(SFT, QUESTIONS, formatting_func=lambda row: row["question"] + row["answer"])
    make(OwnPreparation, QUESTIONS)


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


@pytest.mark.parametrize(("cls", "rows"), [(SFT, CHAT), (DPO, PAIRS), (GRPO, PROMPTS)])
def test_missing_template_names_the_packages_ones(make, cls, rows):
    with user_error(SET_TEMPLATE):
        make(cls, rows)


def test_missing_template_of_assistant_only_loss(make):
    with user_error(SET_TEMPLATE):
        make(SFT, CHAT, assistant_only_loss=True)


@pytest.mark.parametrize("name", ["tulu2", str(CHAT_TEMPLATES["tulu2"])])
def test_template_path_takes_names_and_files(config, name):
    tokenizer = load_tokenizer("tiny-ouro")
    trainer = SFT("tiny-ouro", config(chat_template_path=name), train_dataset=CHAT, processing_class=tokenizer)
    assert "<|user|>" in tokenizer.decode(trainer.train_dataset[0]["input_ids"])
    assert trainer.args.chat_template_path == name


def test_unknown_template_path_names_the_known_ones(make):
    with user_error("`chat_template_path` must be huginn, .*, got 'tulu'. Did you mean 'tulu2'?"):
        make(SFT, CHAT, chat_template_path="tulu")


def test_model_without_name_needs_its_tokenizer(config, dataset):
    with user_error("`processing_class` must be set, because the model has no name"):
        SFT(tiny_ouro(), config(), train_dataset=dataset)


def test_loss_of_turns_needs_turns(make_sft, dataset):
    """TRL raises a long error after it has loaded the model."""
    with user_error(
        "`assistant_only_loss` must be false for examples without turns of an assistant, got the text `prompt`"
    ):
        make_sft(rows=dataset, assistant_only_loss=True)
