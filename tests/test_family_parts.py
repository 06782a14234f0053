"""What is Ouro's, LoopUS's and Nanbeige's own: gates and heads, nested and old fields, what other programs read."""

import json

import pytest
import torch
from conftest import golden_inputs, golden_model, tiny_loopus, tiny_nanbeige
from safetensors.torch import load_file, save_file
from test_families import assert_close
from transformers import AutoModel, AutoModelForCausalLM

from loopdropout_trainer.looped import NotLoopedError, find_looped_model
from loopdropout_trainer.models import LoopusConfig, LoopusForCausalLM, OuroConfig


@pytest.fixture(scope="module")
def loopus(golden):
    return golden("loopus")


def test_a_depth_that_is_no_depth_is_refused_when_it_is_set():
    config = OuroConfig()
    for depth in (0, -1, 2.0, True, "4"):
        for set_depth in (
            lambda depth: OuroConfig(num_loops=depth),
            lambda depth: setattr(config, "num_loops", depth),
        ):
            with pytest.raises(ValueError, match="num_loops|total_ut_steps"):
                set_depth(depth)
    assert config.num_loops == 4
    with pytest.raises(NotLoopedError, match="Linear is not a looped model"):
        find_looped_model(torch.nn.Linear(2, 2))


# Ouro


def test_scaled_positions_are_saved_in_the_published_form():
    scaling = {"rope_type": "linear", "factor": 2.0}
    saved = OuroConfig(rope_theta=5e5, rope_scaling=dict(scaling)).to_diff_dict()
    assert (saved["rope_theta"], saved["rope_scaling"]) == (5e5, scaling) and "rope_parameters" not in saved
    assert OuroConfig.from_dict(saved).rope_parameters == {**scaling, "rope_theta": 5e5}


@pytest.mark.parametrize("batch", ["unpadded", "padded"])
def test_the_exit_gate_agrees_with_the_reference_and_is_not_read(ouro, batch):
    model, inputs = golden_model(ouro), golden_inputs(ouro, batch)
    want, valid = (lambda name: ouro.tensors[f"{batch}/{name}"]), inputs["attention_mask"].bool()
    with torch.no_grad():
        out = model(**inputs, output_readouts=True)
        readouts = torch.stack(out.readouts)
        exit_pdf = model.model.exit_distribution(out.readouts)
        gate_logits = model.model.early_exit_gate(readouts).squeeze(-1)
        mixture = torch.einsum("bsk,kbsv->bsv", exit_pdf, model.lm_head(readouts))
    assert_close(gate_logits[:, valid], want("gate_logits")[:, valid], atol=1e-4)
    assert_close(exit_pdf[valid], want("exit_pdf")[valid], atol=1e-4)
    assert_close(mixture[valid], want("expected_logits")[valid], atol=1e-4)
    loss = model.loss_function(logits=mixture, labels=inputs["labels"], vocab_size=97)
    assert_close(loss, want("expected_exit_loss"), atol=2e-5)
    for parameter in model.model.early_exit_gate.parameters():
        parameter.data.fill_(float("nan"))
    assert_close(model(**inputs).loss, want("loss"), atol=2e-5)


# LoopUS


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
    assert full == {name for name in model.state_dict() if name.startswith(("model.reasoning.gate.", "model.q_head."))}
    seen = []
    model.model.reasoning.gate.delta_proj.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.tensor([[3, 4]])).logits.dtype == torch.bfloat16
    assert set(seen) == {torch.float32}
    model.save_pretrained(tmp_path / "again")
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert {f"model.{name}" for name, tensor in saved.items() if tensor.dtype == torch.float32} == full
    with torch.device("meta"):  # of the published 1.7B: hidden size 2048
        large = LoopusForCausalLM(LoopusConfig(hidden_size=2048, num_hidden_layers=4)).model
    assert sum(p.numel() for p in [*large.reasoning.gate.parameters(), *large.q_head.parameters()]) == 534_529


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


# Nanbeige


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


@pytest.mark.parametrize("width", ["head_dim", "kv_channels"])
def test_heads_may_have_any_width(tmp_path, width):
    model = tiny_nanbeige(hidden_size=30, **{"head_dim": None, width: 12}).eval()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.model.layers[0].self_attn.q_proj.weight.shape == (48, 30)
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(again(ids).logits, model(ids).logits)


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
    *(f"self_attn.{name}_proj" for name in PROJECTIONS), *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    *("input_layernorm", "post_attention_layernorm"),
}  # fmt: skip


def test_other_programs_find_the_fields_and_tensors_of_a_nanbeige_that_they_read(tmp_path):
    tiny_nanbeige(rope_theta=70_000_000.0).to(torch.bfloat16).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved.keys() >= READ
    want = {"rope_theta": 7e7, "rope_scaling": None, "torch_dtype": "bfloat16", "head_dim": 12, "num_loops": 4}
    want |= {"architectures": ["NanbeigeForCausalLM"], "model_type": "nanbeige"}
    assert {name: saved[name] for name in want} == want
    tensors, outside = load_file(tmp_path / "model.safetensors"), ("model.embed_tokens", "model.norm", "lm_head")
    layers = {f"model.layers.{layer}.{name}" for layer in range(2) for name in LAYER}
    assert set(tensors) == {f"{name}.weight" for name in layers.union(outside)}
    for name, size in PROJECTIONS.items():
        assert list(tensors[f"model.layers.0.self_attn.{name}_proj.weight"].shape) == size
