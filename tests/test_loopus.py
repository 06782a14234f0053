"""What is LoopUS's own: its selective gate, its unread halting head, its nested config, its old key names."""

import json

import pytest
import torch
from conftest import golden_inputs, golden_model, tiny_loopus
from safetensors.torch import load_file, save_file
from test_families import assert_close
from transformers import AutoModel, AutoModelForCausalLM

from loopdropout_trainer.models import LoopusConfig, LoopusForCausalLM


@pytest.fixture(scope="module")
def loopus(golden):
    return golden("loopus")


@pytest.mark.parametrize("batch", ["unpadded", "padded"])
def test_encoder_selective_gate_and_halting_head_agree_with_the_reference(loopus, batch):
    model, inputs = golden_model(loopus), golden_inputs(loopus, batch)
    valid, calls = inputs["attention_mask"].bool(), []
    model.model.reasoning.gate.register_forward_pre_hook(lambda module, args: calls.append(args))
    with torch.no_grad():
        states = torch.stack(model(**inputs, output_readouts=True).loop_states)  # [K, B, S, H]
        last = (inputs["attention_mask"] * torch.arange(states.shape[2])).argmax(-1)  # each row's last token
        q = model.model.q_head(states[:, torch.arange(len(last)), last]).squeeze(-1).sigmoid()
    answers, befores = zip(*calls, strict=True)
    assert_close(befores[0][valid], loopus.tensors[f"{batch}/encoder_state"][valid], atol=1e-4)
    assert_close(torch.stack(answers)[:, valid], loopus.tensors[f"{batch}/pre_gate_state"][:, valid], atol=1e-4)
    assert_close(q, loopus.tensors[f"{batch}/q_values"], atol=1e-4)


@pytest.mark.parametrize("training", [False, True])
def test_the_halting_head_is_never_read(loopus, training):
    model = golden_model(loopus, q_threshold=0.0, halting_strategy="cdf").train(training)
    for parameter in model.model.q_head.parameters():
        parameter.data.fill_(float("nan"))
    assert_close(model(**golden_inputs(loopus, "padded")).loss, loopus.tensors["padded/loss"], atol=2e-5)


def test_the_selective_gate_stays_in_float32(tmp_path):
    tiny_loopus().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    full = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    parts = ("A_log", "dt_input_proj.weight", "delta_proj.weight", "delta_proj.bias")
    heads = ("0.weight", "0.bias", "1.weight", "1.bias")
    assert full == {f"model.reasoning.gate.{part}" for part in parts} | {f"model.q_head.{part}" for part in heads}
    seen = []
    model.model.reasoning.gate.delta_proj.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.tensor([[3, 4]])).logits.dtype == torch.bfloat16
    assert set(seen) == {torch.float32}
    model.save_pretrained(tmp_path / "again")
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert {f"model.{name}" for name, tensor in saved.items() if tensor.dtype == torch.float32} == full


@pytest.mark.parametrize(("new", "old"), [("reasoning.", "plateau."), (".layers.", ".module.layers.")])
@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForCausalLM])
def test_old_key_names_load_and_new_ones_are_saved(loopus, auto_class, new, old, tmp_path):
    weights = {name[8:]: tensor for name, tensor in loopus.tensors.items() if name.startswith("weights/")}
    old_weights = {name.replace(new, old): tensor for name, tensor in weights.items()}
    save_file(old_weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(loopus.meta["config"]))
    auto_class.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in saved.items()} == {n: t.tolist() for n, t in weights.items()}
    golden_model(loopus).load_state_dict(old_weights)


def test_both_styles_of_rope_base_are_read(loopus):
    base = {name: value for name, value in loopus.meta["config"]["base_config_dict"].items() if name[:4] != "rope"}
    config = LoopusConfig(**{**loopus.meta["config"], "base_config_dict": {**base, "rope_theta": 12345.0}})
    assert config.rope_parameters["rope_theta"] == 12345.0
    saved = config.to_diff_dict()
    assert saved["base_config_dict"]["rope_theta"] == 12345.0
    assert saved["architectures"] == ["LDSForCausalLM"]  # the published class
    assert (config.num_hidden_layers, config.num_loops, config.tie_word_embeddings) == (5, 4, False)


def test_an_empty_encoder_or_decoder_runs_with_a_cache():
    split = {"encoder_layer_indices": [], "reasoning_layer_indices": [0, 1, 2, 3], "decoder_layer_indices": []}
    model = tiny_loopus(**split).eval()
    ids = torch.tensor([[1, 1, 5, 6], [2, 3, 4, 5]])
    options = {"attention_mask": (ids != 1).long(), "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))


def test_the_published_float32_part_comes_out():
    with torch.device("meta"):  # of the 1.7B: hidden size 2048
        small = LoopusForCausalLM(LoopusConfig(hidden_size=2048, num_hidden_layers=4)).model
    assert sum(p.numel() for p in [*small.reasoning.gate.parameters(), *small.q_head.parameters()]) == 534_529
