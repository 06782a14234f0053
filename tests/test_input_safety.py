"""What may come from a stranger, or be half right, and is used: safely, and as it was meant."""

import json
import re
import sys
import time

import pytest
from conftest import tiny_ouro
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from test_data import bpe_tokenizer  # noqa: F401  (a fixture)
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from loopdropout_trainer import LoopDropoutSFTTrainer, default_peft_config, load_adapter
from loopdropout_trainer.data.boundary import prompt_completion_ids, token_lengths
from loopdropout_trainer.evaluation.metrics.gsm8k_strict import normalize, score
from loopdropout_trainer.settings.recipe import settings_yaml
from loopdropout_trainer.settings.secrets import hide_secrets, public_settings


TOKEN = "hf_averysecrettokenofsomeone"
IGNORED = -100


@pytest.fixture
def merging_tokenizer():
    """Splits a text nowhere, and has a token for the end of a prompt with the start of an answer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<eos>", "<pad>", *alphabet, "Th", "The", ":The"])}
    backend = Tokenizer(BPE(vocab, [("T", "h"), ("Th", "e"), (":", "The")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


def test_no_trained_token_holds_the_end_of_a_prompt(config, merging_tokenizer):
    tokenizer = merging_tokenizer
    row = {"prompt": "Answer:", "completion": "The end"}
    assert ":The" in tokenizer.tokenize(row["prompt"] + row["completion"])
    rows = Dataset.from_list([row] * 4)
    trainer = LoopDropoutSFTTrainer(
        tiny_ouro(vocab_size=300), config(), train_dataset=rows, processing_class=tokenizer
    )
    example = trainer.train_dataset[0]
    seen = [token for token, label in zip(example["input_ids"], example["labels"], strict=True) if label == IGNORED]
    trained = [label for label in example["labels"] if label != IGNORED]
    assert seen == tokenizer(row["prompt"])["input_ids"]  # what evaluation gives the model
    assert tokenizer.convert_ids_to_tokens(trained[:1]) == ["The"]
    assert tokenizer.decode(trained) == "The end<eos>"
    assert token_lengths(rows, tokenizer).tolist() == [len(example["input_ids"])] * 4


def test_a_boundary_that_holds_by_itself_changes_nothing(bpe_tokenizer):  # noqa: F811
    prompts, completions = ["Question: 1+1?\nAnswer:", "a b"], [" 2", " c<|endoftext|>"]
    ids, lengths = prompt_completion_ids(bpe_tokenizer, prompts, completions)
    texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    assert ids == bpe_tokenizer(texts)["input_ids"]
    assert lengths == [len(row) for row in bpe_tokenizer(prompts)["input_ids"]]
    assert prompt_completion_ids(bpe_tokenizer, [], []) == ([], [])


@pytest.mark.parametrize("targets", [None, "all-linear"])
def test_an_adapter_without_named_layers_goes_on_the_recurrent_block(config, dataset, tokenizer, targets):
    mine = LoraConfig(r=3, target_modules=targets)
    model = tiny_ouro()
    trainer = LoopDropoutSFTTrainer(
        model, config(), train_dataset=dataset, processing_class=tokenizer, peft_config=mine
    )
    adapted = {name.split(".lora_A")[0] for name, _ in trainer.model.named_parameters() if "lora_A" in name}
    assert adapted == {f"base_model.model.{name}" for name in model.recurrent_linears()}
    assert {p.shape[0] for name, p in trainer.model.named_parameters() if "lora_A" in name} == {3}
    assert mine.target_modules == targets  # the user's own is left alone


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 0}, "`r`"),
        ({"lora_alpha": float("nan")}, "`lora_alpha` .*; got nan"),
        ({"lora_dropout": 1.0}, "`lora_dropout` .*; got 1.0"),
        ({"target_modules": ["nothing"]}, "recurrent block .*; got 'nothing'"),
        ("frozen", "The adapter is frozen, so nothing would be trained"),
        ("masked", "`train_dataset` has no token to train on"),
    ],
)
def test_a_run_that_trains_nothing_is_refused(config, dataset, tokenizer, fields, message):
    model = tiny_ouro()
    if fields == "frozen":
        model = get_peft_model(model, default_peft_config(model)).requires_grad_(False)
    if fields == "masked":
        dataset = Dataset.from_list([{"input_ids": [5, 6, 7], "labels": [IGNORED] * 3}] * 4)
    lora = LoraConfig(**fields) if isinstance(fields, dict) else None
    with pytest.raises(ValueError, match=message):
        LoopDropoutSFTTrainer(model, config(), train_dataset=dataset, processing_class=tokenizer, peft_config=lora)


def test_a_pattern_that_takes_for_ever_is_not_matched(tmp_path):
    model = tiny_ouro()
    get_peft_model(model, default_peft_config(model, r=2)).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "target_modules": r"(([a-z_]+)*\.?)*!"}))
    began = time.monotonic()
    adapted = load_adapter(tiny_ouro(), tmp_path)
    assert time.monotonic() - began < 20
    names = {name.split(".lora_A")[0] for name, _ in adapted.named_parameters() if "lora_A" in name}
    assert len(names) == len(tiny_ouro().recurrent_linears())


def test_tokens_of_text_are_kept_and_those_of_the_hub_are_not(monkeypatch):
    kept = {"eos_token": "<end>", "include_num_input_tokens_seen": "no", "max_new_tokens": 5}
    secret = {"hub_token": "secret", "push_to_hub_token": "secret", "hub_tokn": "secret", "api_passwort": "secret"}
    mixed = {
        "model_init_kwargs": {"token": "secret", "pad_token_id": 0},
        "run_name": f"of {TOKEN}",
        "report_to": [TOKEN],
    }
    public = {"model_init_kwargs": {"pad_token_id": 0}, "run_name": "of ***", "report_to": ["***"]}
    assert public_settings({**kept, **secret, **mixed}) == {**kept, **public}
    assert "eos_token: <end>" in settings_yaml(kept)
    words = "--hub_token secret1 --hub_token=secret2 --eos_token <end> --hub_tokn secret3 --seed 12345"
    monkeypatch.setattr(sys, "argv", words.split())
    assert hide_secrets(words) == re.sub(r"secret\d", "***", words)


def test_a_long_answer_is_scored_in_linear_time():
    began = time.monotonic()
    assert normalize("#### " + "\n7" * 500_000) == "\n7" * 500_000
    assert score("#### 7", "x" * 1_000_000 + "#### 7").correct
    assert time.monotonic() - began < 5
    for text, answer in (("#### $1,000.", "1000"), ("a #### b #### C.", "c"), ("5.\n", "5\n"), ("..", ".")):
        assert normalize(text) == answer
