"""What may come from a stranger, or be half right, and is used: safely, and as it was meant."""

import json
import re
import sys
import time

import pytest
from conftest import tiny_ouro, with_adapter
from datasets import Dataset
from peft import LoraConfig

from loopdropout_trainer import load_adapter
from loopdropout_trainer.errors import hide_secrets, public_settings
from loopdropout_trainer.evaluation.benchmarks.gsm8k import gsm8k_strict, normalize
from loopdropout_trainer.settings.recipe import settings_yaml


TOKEN = "hf_averysecrettokenofsomeone"


@pytest.mark.parametrize("targets", [None, "all-linear"])
def test_an_adapter_without_named_layers_goes_on_the_recurrent_block(make_sft, model, targets):
    mine = LoraConfig(r=3, target_modules=targets)
    trainer = make_sft(model, peft_config=mine)
    adapted = {name.split(".lora_A")[0] for name, _ in trainer.model.named_parameters() if "lora_A" in name}
    assert adapted == {f"base_model.model.{name}" for name in model.recurrent_linears()}
    assert {p.shape[0] for name, p in trainer.model.named_parameters() if "lora_A" in name} == {3}
    assert mine.target_modules == targets  # the user's own is left alone


@pytest.mark.parametrize(
    ("fault", "message"), [("frozen", "adapter is frozen"), ("masked", "`train_dataset` has no token")]
)
def test_a_run_that_trains_nothing_is_refused(make_sft, dataset, fault, message):
    masked = Dataset.from_list([{"input_ids": [5, 6, 7], "labels": [-100] * 3}] * 4)
    with pytest.raises(ValueError, match=message):
        make_sft(with_adapter().requires_grad_(fault != "frozen"), rows=masked if fault == "masked" else dataset)


def test_a_pattern_that_takes_for_ever_is_not_matched(tmp_path):
    with_adapter(r=2).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "target_modules": r"(([a-z_]+)*\.?)*!"}))
    began = time.process_time()
    adapted = load_adapter(tiny_ouro(), tmp_path)
    assert time.process_time() - began < 20
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
    began = time.process_time()
    assert normalize("#### " + "\n7" * 500_000) == "\n7" * 500_000
    assert gsm8k_strict("#### 7", "x" * 1_000_000 + "#### 7").correct
    assert time.process_time() - began < 5
    for text, answer in (("#### $1,000.", "1000"), ("a #### b #### C.", "c"), ("5.\n", "5\n"), ("..", ".")):
        assert normalize(text) == answer
