"""Merging at unit gates, the model card, and pushes that lose nothing."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_ouro
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from peft import get_peft_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from loopdropout_trainer import default_peft_config, merge_and_save, push_merged_to_hub, use_gates
from loopdropout_trainer.adapters import add_gates
from loopdropout_trainer.saving.hub import ModelCardFields, PushError


IDS = torch.arange(2, 42).view(4, 10)
TOKEN = "hf_averysecrettokenaverysecrettoken12"


def adapted(dtype=torch.float32, **lora):
    base = tiny_ouro().to(dtype)
    model = get_peft_model(base, default_peft_config(base, **lora))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model.eval()


@pytest.mark.parametrize("lora", [{}, {"use_rslora": True}, {"target_modules": ["q_proj", "down_proj"]}])
@pytest.mark.parametrize("gated", [False, True])
def test_merged_logits_are_those_of_unit_gates_and_the_model_stays_unmerged(tmp_path, lora, gated):
    model = adapted(**lora)
    if gated:
        add_gates(model)
    before = model(IDS).logits
    with use_gates(model, torch.full((4,), 3.0)):  # whatever gates are in force, merging is at unit gates
        merge_and_save(model, tmp_path)
    assert torch.equal(model(IDS).logits, before)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(merged(IDS).logits, before, atol=2e-5, rtol=1e-4)
    assert not torch.equal(merged(IDS).logits, tiny_ouro()(IDS).logits)


def test_bfloat16_weights_are_rounded_once_and_logits_stay_within_their_precision(tmp_path):
    model = adapted(torch.bfloat16)
    base = {name: tensor.float() for name, tensor in tiny_ouro().state_dict().items()}
    merge_and_save(model, tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert merged.dtype == torch.bfloat16
    weight = merged.model.layers[0].self_attn.q_proj.weight
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    exact = (
        base["model.layers.0.self_attn.q_proj.weight"].bfloat16().float() + layer.get_delta_weight("default").float()
    )
    assert torch.equal(weight, exact.bfloat16())
    # Against the same sums in float32, the merged weights cost about as much as bfloat16 arithmetic itself does.
    adapted_logits = model(IDS).logits.float()
    reference = model.float()(IDS).logits
    error = lambda logits: ((logits - reference).norm() / reference.norm()).item()
    assert error(merged(IDS).logits.float()) < 3 * error(adapted_logits) < 0.1


def test_the_folder_is_a_checkpoint_of_the_base_with_tokenizer_and_card(tmp_path, tokenizer):
    facts = ModelCardFields(
        "ByteDance/Ouro-1.4B", "loop_dropout", 0.5, recipe="p: 0.5\n", data="GSM8K", results={"gsm8k": 61.5}
    )
    folder = merge_and_save(adapted(), tmp_path / "merged", tokenizer, facts, repo_id="someone/ouro-gsm8k")
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(tiny_ouro().state_dict())
    assert json.loads((folder / "config.json").read_text())["total_ut_steps"] == 4
    names = {path.name for path in folder.iterdir()}
    assert names >= {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert not [name for name in names if "adapter" in name or name.endswith((".bin", ".pt", ".py"))]
    card = (folder / "README.md").read_text()
    for stated in (
        "base_model: ByteDance/Ouro-1.4B",
        "| Training rule | Loop Dropout |",
        "| Drop probability p | 0.5 |",
        "| LoRA rank / alpha | 16 / 32 |",
        "| Recurrence depth K | 4 |",
        "| Training data | GSM8K |",
        "| gsm8k | 61.5 |",
        "p: 0.5",
        'AutoModelForCausalLM.from_pretrained("someone/ouro-gsm8k"',
    ):
        assert stated in card


def test_the_cards_loading_code_runs_in_a_fresh_process(tmp_path, tokenizer):
    model = adapted()
    folder = merge_and_save(model, tmp_path / "merged", tokenizer, repo_id=str(tmp_path / "merged"))
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    code += "\nimport torch\nprint(model(torch.arange(2, 42).view(4, 10)).logits.double().sum().item())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    assert float(out.split()[-1]) == pytest.approx(model(IDS).logits.double().sum().item(), abs=1e-2)


def test_a_push_uploads_the_merged_folder(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        HfApi, "create_repo", lambda self, repo, **k: calls.append((repo, k)) or SimpleNamespace(repo_id=repo)
    )
    monkeypatch.setattr(
        HfApi, "upload_folder", lambda self, **k: calls.append(k) or SimpleNamespace(repo_url=f"hub/{k['repo_id']}")
    )
    folder = merge_and_save(adapted(), tmp_path / "merged")
    assert push_merged_to_hub(folder, "someone/model", private=True) == "hub/someone/model"
    assert calls[0] == ("someone/model", {"private": True, "exist_ok": True})
    assert (calls[1]["folder_path"], calls[1]["repo_id"]) == (folder, "someone/model")


def test_a_refused_push_is_one_sentence_without_the_token_and_the_model_is_safe(tmp_path, monkeypatch):
    def refuse(self, repo, **kwargs):
        raise HfHubHTTPError(
            f"403 Forbidden for {TOKEN}\nsome more lines", response=SimpleNamespace(headers={}, request=None)
        )

    monkeypatch.setattr(HfApi, "create_repo", refuse)
    folder = merge_and_save(adapted(), tmp_path / "merged")
    with pytest.raises(PushError, match="403 Forbidden") as error:
        push_merged_to_hub(folder, "someone/model", token=TOKEN)
    assert TOKEN not in str(error.value)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)
    AutoModelForCausalLM.from_pretrained(folder)


def test_a_push_offline_is_refused_and_an_empty_folder_too(tmp_path):
    with pytest.raises(FileNotFoundError, match="merge_and_save"):
        push_merged_to_hub(tmp_path, "someone/model")
    folder = merge_and_save(adapted(), tmp_path / "merged")
    with pytest.raises(PushError, match="The merged model is safe"):  # tests run with HF_HUB_OFFLINE=1
        push_merged_to_hub(folder, "someone/model")
