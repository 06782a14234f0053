"""The native Ouro against the reference's golden tensors, and what the reference's own code cannot do."""

import json

import pytest
import torch
from conftest import golden_ouro
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from loopdropout_trainer import default_peft_config
from loopdropout_trainer.looped import NotLoopedError, find_looped_model
from loopdropout_trainer.models import OuroConfig, OuroForCausalLM


BATCHES = ("unpadded", "padded")


def inputs_of(ouro, batch):
    return {name: ouro.tensors[f"{batch}/{name}"] for name in ("input_ids", "attention_mask", "labels")}


@pytest.mark.parametrize("batch", BATCHES)
def test_the_exit_gate_is_read_as_the_reference_reads_it_and_changes_no_loss(ouro, batch):
    model = golden_ouro(ouro)
    inputs, want = inputs_of(ouro, batch), lambda name: ouro.tensors[f"{batch}/{name}"]
    valid = inputs["attention_mask"].bool()
    with torch.no_grad():
        out = model(**inputs, output_readouts=True)
        readouts = torch.stack(out.readouts)
        exit_pdf = model.model.exit_distribution(out.readouts)
        mixture = torch.einsum("bsk,kbsv->bsv", exit_pdf, model.lm_head(readouts))
        gate_logits = model.model.early_exit_gate(readouts).squeeze(-1)
    torch.testing.assert_close(gate_logits[:, valid], want("gate_logits")[:, valid], atol=1e-4, rtol=0)
    torch.testing.assert_close(exit_pdf[valid], want("exit_pdf")[valid], atol=1e-4, rtol=0)
    torch.testing.assert_close(mixture[valid], want("expected_logits")[valid], atol=1e-4, rtol=0)

    mixture_loss = model.loss_function(logits=mixture, labels=inputs["labels"], vocab_size=97)
    torch.testing.assert_close(mixture_loss, want("expected_exit_loss"), atol=2e-5, rtol=0)
    torch.testing.assert_close(out.loss, want("loss"), atol=2e-5, rtol=0)  # the published code returns the mixture's


def test_raising_the_depth_on_a_filled_cache_is_refused(model):
    model.eval()
    cache = DynamicCache(config=model.config)
    model(torch.tensor([[5, 6]]), past_key_values=cache)
    model.config.num_loops = 6
    with pytest.raises(ValueError, match="number of loops was raised"):
        model(torch.tensor([[7]]), past_key_values=cache)


def test_a_hub_checkpoint_loads_without_remote_code_and_saves_under_its_own_names(ouro, tmp_path):
    model = golden_ouro(ouro)
    model.save_pretrained(tmp_path)
    hub = {**ouro.meta["config"], "auto_map": {"AutoModelForCausalLM": "modeling_ouro.OuroForCausalLM"}}
    (tmp_path / "config.json").write_text(json.dumps(hub))  # as the hub has it: 4.x fields and remote code

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is OuroForCausalLM
    assert loaded.config.rope_parameters["rope_theta"] == 1e6
    loaded.save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    for name, value in ouro.meta["config"].items():
        assert saved[name] == value, name
    with safe_open(tmp_path / "again" / "model.safetensors", "pt") as file:
        assert sorted(file.keys()) == sorted(n[8:] for n in ouro.tensors if n.startswith("weights/"))


def test_num_loops_is_a_keyword_of_from_pretrained_and_changes_on_a_loaded_model(ouro, tmp_path):
    golden_ouro(ouro).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).num_loops == 4
    model = AutoModelForCausalLM.from_pretrained(tmp_path, num_loops=6)
    inputs = inputs_of(ouro, "unpadded")
    torch.testing.assert_close(model(**inputs).loss, ouro.tensors["unpadded/deep/loss"], atol=2e-5, rtol=0)
    model.config.num_loops = 4
    torch.testing.assert_close(model(**inputs).loss, ouro.tensors["unpadded/loss"], atol=2e-5, rtol=0)
    assert model.config.total_ut_steps == 4


@pytest.mark.parametrize("depth", [0, -1, 2.0, True, "4"])
def test_a_depth_that_is_no_depth_is_refused_when_it_is_set(depth):
    with pytest.raises(ValueError, match="num_loops|total_ut_steps"):
        OuroConfig(num_loops=depth)
    config = OuroConfig()
    with pytest.raises(ValueError, match="whole number of at least 1"):
        config.num_loops = depth
    assert config.num_loops == 4


@pytest.mark.parametrize(
    ("num_layers", "parameters", "trainable"), [(24, 1_434_652_673, 15_138_816), (48, 2_667_974_657, 30_277_632)]
)
def test_published_sizes_come_out(num_layers, parameters, trainable):
    from peft import get_peft_model

    config = OuroConfig(num_hidden_layers=num_layers)
    with torch.device("meta"):
        model = OuroForCausalLM(config)
        assert sum(p.numel() for p in model.parameters()) == parameters
        adapted = get_peft_model(model, default_peft_config(config))
    assert sum(p.numel() for p in adapted.parameters() if p.requires_grad) == trainable


def test_a_model_without_loops_is_named_as_such():
    with pytest.raises(NotLoopedError, match="Linear is not a looped model"):
        find_looped_model(torch.nn.Linear(2, 2))


def test_hidden_states_and_attentions_can_be_asked_for(model):
    out = model(torch.tensor([[3, 4, 5]]), output_hidden_states=True, output_attentions=False)
    assert torch.equal(out.hidden_states[-1], model.model(torch.tensor([[3, 4, 5]])).last_hidden_state)
