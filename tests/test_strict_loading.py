"""Checkpoints and adapters that do not hold exactly what their configuration describes are refused, in every family."""

import json
import re

import pytest
import torch
from conftest import tiny_huginn, tiny_olmo_conversion
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from test_families import hub_folder
from transformers import AutoModel, AutoModelForCausalLM

from loopdropout_trainer import default_peft_config, load_adapter
from loopdropout_trainer.models import HuginnConfig, HuginnForCausalLM
from loopdropout_trainer.models.looped_modeling import WrongWeightsError


IDS = torch.arange(2, 12).view(2, 5)


@pytest.fixture
def saved(make_tiny, tmp_path):
    """Folder of a saved tiny model of each family in turn, and the model."""
    model = make_tiny().eval()
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model", model


def change(folder, function):
    """Apply `function` to the saved tensors of a model or adapter."""
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    function(weights)
    save_file(weights, file, metadata={"format": "pt"})


def recurrent_weight(model):
    """The name on disk of a weight in the recurrent block."""
    name = f"{model.recurrent_linears()[-1]}.weight"
    return next(key for key in model.hub_weights(model.state_dict()) if name.endswith(key))


def test_what_is_missing_unexpected_or_reshaped_is_named(saved):
    folder, model = saved
    name, weights = recurrent_weight(model), model.hub_weights(model.state_dict())
    starred, (rows, columns) = re.escape(re.sub(r"\.\d+\.", ".*.", name)), weights[name].shape
    damages = {
        rf"it lacks `[a-z.]*{starred}`": {name: None},
        r"it holds `.*\.bias`": {name.replace(".weight", ".bias"): torch.zeros(3)},
        rf"is \[{rows + 1}, {columns}\] instead of \[{rows}, {columns}\]": {name: torch.zeros(rows + 1, columns)},
    }
    file = folder / "model.safetensors"
    whole = load_file(file)
    for message, changes in damages.items():
        held = {key: x for key, x in {**whole, **changes}.items() if x is not None}
        save_file(held, file, metadata={"format": "pt"})
        for options in ({}, {"ignore_mismatched_sizes": True} if "lacks" in message else {}):
            with pytest.raises(WrongWeightsError, match=message):
                AutoModelForCausalLM.from_pretrained(folder, **options)
    loaded = AutoModelForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True)  # reshaped, as was asked for
    assert loaded.state_dict().keys() == model.state_dict().keys()


def test_stored_rotary_frequencies_are_passed_over(saved):
    folder, model = saved
    prefix = recurrent_weight(model).rsplit(".", 3)[0]
    change(folder, lambda weights: weights.update({f"{prefix}.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(IDS).logits, model(IDS).logits)


def test_a_backbone_loads_from_a_models_checkpoint_and_not_the_other_way_round(saved, tmp_path):
    folder, model = saved
    backbone = AutoModel.from_pretrained(folder)
    assert torch.equal(backbone(IDS).last_hidden_state, model.base_model(IDS).last_hidden_state)
    backbone.save_pretrained(tmp_path / "backbone")
    if any("lm_head" in name for name in backbone.state_dict()) or model.config.tie_word_embeddings:
        return  # LoopUS keeps its head there, and Huginn's is the embedding
    with pytest.raises(WrongWeightsError, match=r"it lacks `lm_head.weight`\."):
        AutoModelForCausalLM.from_pretrained(tmp_path / "backbone")


# The three layouts of `huginn_raven`, which the hub's fields do not tell apart


@pytest.mark.parametrize(("name", "layout"), [("huginn", "huginn"), ("raven_llama", "llama"), ("raven_olmo", "olmo")])
def test_the_names_of_the_weights_tell_whose_blocks_they_are(golden, name, layout, tmp_path):
    data = golden(name)
    hub_folder(data, tmp_path)
    for load in (AutoModelForCausalLM, HuginnForCausalLM):
        model = load.from_pretrained(tmp_path, dtype=torch.float32)
        assert model.config.block_layout == layout
    model.save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    assert saved.get("block_layout", "huginn") == layout  # which the published file need not say
    weights = load_file(tmp_path / "model.safetensors")
    state = HuginnForCausalLM.from_pretrained(None, config=HuginnConfig(**data.meta["config"]), state_dict=weights)
    assert state.config.block_layout == layout


def test_mixed_blocks_are_refused_and_a_conversion_is_never_taken_for_huginn(golden, tmp_path):
    hub_folder(golden("raven_olmo"), tmp_path)
    with pytest.raises(ValueError, match="does not say of which: set `block_layout` to 'llama' or 'olmo'"):
        HuginnForCausalLM(HuginnConfig(**golden("raven_olmo").meta["config"]))
    with pytest.raises(WrongWeightsError, match=r"it holds `transformer.*q_norm.weight`"):
        AutoModelForCausalLM.from_pretrained(tmp_path, block_layout="llama")
    change(tmp_path, lambda weights: weights.update({"transformer.core_block.0.norm_3.weight": torch.ones(48)}))
    with pytest.raises(WrongWeightsError, match=r"it holds `transformer.core_block.\*.norm_3.weight`"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_special_ids_left_over_from_huginn_are_dropped(tmp_path):
    stale = {"bos_token_id": 65504, "eos_token_id": 65505, "pad_token_id": 65509}
    tiny_olmo_conversion().save_pretrained(tmp_path)
    for file in ("config.json", "generation_config.json"):
        fields = json.loads((tmp_path / file).read_text())
        (tmp_path / file).write_text(json.dumps({**fields, **stale}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    for config in (model.config, model.generation_config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, None, None)


def test_a_head_untied_by_hand_is_saved_as_such(tmp_path):
    model = tiny_huginn().eval()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, model(IDS).logits)


# Adapters


@pytest.fixture
def adapter(make_tiny, tmp_path):
    """Folder of a saved adapter, and its base."""
    model = make_tiny()
    get_peft_model(model, default_peft_config(model)).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", make_tiny


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda weights: weights.clear(), "has no tensors"),
        (lambda weights: weights.pop(min(weights)), r"it lacks `.*lora_A.weight`\."),
        (lambda weights: weights[min(weights)].fill_(float("nan")), "`.*lora_A.weight` .* NaN"),
        (lambda weights: weights[max(weights)][:1].fill_(float("inf")), "`.*lora_B.weight` .* infinite"),
        (lambda weights: [weights.pop(name) for name in list(weights) if "lora_B" in name], "lacks `.*` and .* more"),
    ],
)
def test_a_damaged_adapter_is_refused(adapter, damage, message):
    folder, make = adapter
    assert load_adapter(make(), folder)(IDS).logits.shape == (2, 5, 258)
    change(folder, damage)
    with pytest.raises(ValueError, match=message):
        load_adapter(make(), folder)
