"""What is Nanbeige's own: its depth fields, the norm between loops, what other programs read."""

import json

import pytest
import torch
from conftest import tiny_nanbeige
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def test_weights_of_losses_set_the_depth_and_a_depth_set_later_wins(tmp_path):
    model = tiny_nanbeige(num_loops=1, loop_loss_weights=[0.1, 0.2])
    assert model.config.num_loops == 3
    for depth, weights in ((3, [0.1, 0.2]), (5, []), (3, [0.1, 0.2])):
        model.config.num_loops = depth
        model.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())
        assert (saved["num_loops"], saved["loop_loss_weights"]) == (depth, weights)
        assert AutoModelForCausalLM.from_pretrained(tmp_path).config.num_loops == depth
    assert AutoModelForCausalLM.from_pretrained(tmp_path, num_loops=2).config.num_loops == 2


@pytest.mark.parametrize("skip", [False, True])
def test_the_norm_belongs_to_the_readout_alone_if_it_is_skipped(skip):
    model = tiny_nanbeige(skip_loop_final_norm=skip).eval()
    model.model.norm.weight.data.mul_(3)
    out = model(torch.tensor([[3, 4, 5]]), output_readouts=True)
    for state, readout in zip(out.loop_states, out.readouts, strict=True):
        assert torch.equal(readout, model.model.norm(state) if skip else state)


# What MLX-LM 0.32.2 (`mlx_lm/models/nanbeige.py`), llama.cpp (`conversion/nanbeige.py` and `llama.py` of llama-cpp-python
# 0.3.36) and SGLang 0.5.23 (`srt/models/nanbeige.py`) read of config.json, in November 2026; SGLang has other defaults than
# the published model. tests/test_hub_elsewhere.py runs the first two.
READ = {
    "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "vocab_size", "max_position_embeddings", "rope_theta", "rope_scaling", "attention_bias",
    "tie_word_embeddings", "num_loops", "loop_loss_weights", "skip_loop_final_norm", "hidden_act", "attention_dropout",
    "bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype",
}  # fmt: skip
PROJECTIONS = {"q": [48, 32], "k": [24, 32], "v": [24, 32], "o": [32, 48]}
LAYER = {
    *(f"self_attn.{name}_proj" for name in PROJECTIONS),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    *("input_layernorm", "post_attention_layernorm"),
}


def test_other_programs_find_the_fields_and_tensors_that_they_read(tmp_path):
    tiny_nanbeige(rope_theta=70_000_000.0).to(torch.bfloat16).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved.keys() >= READ
    want = {"rope_theta": 7e7, "rope_scaling": None, "torch_dtype": "bfloat16", "head_dim": 12, "num_loops": 4}
    assert {name: saved[name] for name in want} == want
    assert saved["architectures"] == ["NanbeigeForCausalLM"] and saved["model_type"] == "nanbeige"
    tensors, outside = load_file(tmp_path / "model.safetensors"), ("model.embed_tokens", "model.norm", "lm_head")
    layers = {f"model.layers.{layer}.{name}" for layer in range(2) for name in LAYER}
    assert set(tensors) == {f"{name}.weight" for name in layers.union(outside)}
    for name, size in PROJECTIONS.items():
        assert list(tensors[f"model.layers.0.self_attn.{name}_proj.weight"].shape) == size
