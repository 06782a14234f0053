"""The tiny models of the reference implementations, with their weights, inputs and adapters."""

import json

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from helpers.tiny import FOREIGN
from loopdropout_trainer import models


FAMILIES = {
    "ouro": models.OuroForCausalLM, "huginn": models.HuginnForCausalLM, "loopus": models.LoopusForCausalLM,
    "nanbeige": models.NanbeigeForCausalLM, "nanbeige_skip": models.NanbeigeForCausalLM, "parcae": models.ParcaeForCausalLM,
    "raven_llama": models.HuginnForCausalLM, "raven_olmo": models.HuginnForCausalLM,
}  # fmt: skip
LAYOUTS = {"raven_llama": "llama", "raven_olmo": "olmo"}  # what no field of the hub's says


def golden_model(data, **config):
    """The tiny model of the reference with its weights; `data` is what `golden(family)` gives."""
    name = data.meta["name"]
    layout = {"block_layout": LAYOUTS[name]} if name in LAYOUTS else {}
    model_class = {**FAMILIES, **FOREIGN}[name]
    config = model_class.config_class(**{**data.meta["config"], **layout, **config})
    return model_class.from_pretrained(None, config=config, state_dict=dict(data.weights))


def golden_adapted(data, model=None, modules=None):
    """The same with the oracle's adapter on it, or on some of its modules."""
    lora = data.meta["lora"]
    modules = modules or lora["modules"]
    config = LoraConfig(r=lora["r"], lora_alpha=lora["alpha"], target_modules=modules, task_type="CAUSAL_LM")
    model = golden_model(data) if model is None else model
    peft_model = get_peft_model(model, config)
    for name in modules:
        layer = model.get_submodule(submodule_name(data, name))
        layer.lora_A["default"].weight.data.copy_(data.tensors[f"oracle/lora_A/{name}"])
        layer.lora_B["default"].weight.data.copy_(data.tensors[f"oracle/lora_B/{name}"])
    return peft_model


def submodule_name(data, name):
    """The name in our model of what the reference calls `name`; LoopUS has its backbone inside a causal model here."""
    return f"model.{name}" if data.meta["family"] == "loopus" else name


def golden_inputs(data, batch):
    """Inputs, labels, and for Huginn the initial state, of a batch such as `padded` or `oracle/left`."""
    names = ("input_ids", "attention_mask", "labels", "initial_state")
    inputs = {name: data.tensors[f"{batch}/{name}"] for name in names if f"{batch}/{name}" in data.tensors}
    if "initial_state" in inputs:
        inputs["initial_state"] = inputs["initial_state"][:, : inputs["input_ids"].shape[1]]
    return inputs


def assert_close(got, want, atol=1e-4):
    """Compare tensors as closely as the reference implementations round."""
    torch.testing.assert_close(got, want, atol=atol, rtol=0)


def assert_gradients_match(family, peft_model, prefix, gates=None):
    """Compare the gradients of an adapter, and of its gates, with the oracle's."""
    named = dict(peft_model.get_base_model().named_parameters())
    got = {
        f"{factor}/{name}": named[f"{submodule_name(family, name)}.{factor}.default.weight"].grad
        for name in family.meta["lora"]["modules"]
        for factor in ("lora_A", "lora_B")
        if f"{prefix}/{factor}/{name}" in family.tensors
    }
    assert got
    for name, gradient in {**got, **({} if gates is None else {"gates": gates.grad})}.items():
        want = family.tensors[f"{prefix}/{name}"]
        assert (gradient - want).norm() <= max(1e-4 * want.norm(), 1e-6), name


def change_weights(folder, **changes):
    """Change saved tensors. None removes one."""
    file = folder / "model.safetensors"
    weights = {name: x for name, x in {**load_file(file), **changes}.items() if x is not None}
    save_file(weights, file, metadata={"format": "pt"})


def save_published(family, folder, **config):
    """Save the reference model with the published names of weights and fields."""
    golden_model(family).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**family.meta["config"], **config}))
