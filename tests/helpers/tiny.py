"""Tiny random models of each family, over the byte tokenizer, and their adapters."""

import pytest
import torch
import transformers
from peft import get_peft_model
from transformers import HrmTextForCausalLM

from loopdropout_trainer import default_peft_config, models


FOREIGN = {"dory": getattr(transformers, "DoryForCausalLM", None)}  # since transformers 5.24


def tiny(model_class, **fields):
    """A function that makes a random model over the byte tokenizer, with the same weights at every call."""

    def make(**config):
        torch.manual_seed(0)
        return model_class(model_class.config_class(**{**fields, **config}))

    return make


BYTES = {"vocab_size": 258, "pad_token_id": 1, "eos_token_id": 0, "intermediate_size": 48}
DECODER = {
    **BYTES, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip
FRAME = {
    **BYTES, "n_embd": 32, "mean_recurrence": 4, "block_size": 512,
    "n_layers_in_prelude": 1, "n_layers_in_recurrent_block": 1, "n_layers_in_coda": 1,
}  # fmt: skip
FOUR_LAYERS = {**DECODER, "num_hidden_layers": 4}
RAVEN = {**FRAME, "n_heads": 4}
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
INIT = {"std": 0.1, "embed_scale": 1.0}
CONVERTED = {**RAVEN, "tie_embeddings": False, "qk_bias": False, "rope_theta": 500_000.0, "init_values": INIT}
LLAMA = {"block_layout": "llama", "num_key_value_heads": 2, "rope_scaling": {**SCALING, "rope_type": "llama3"}}
OLMO = {"block_layout": "olmo", "num_key_value_heads": 4, "rope_scaling": None, "head_dim": 12}
tiny_ouro = tiny(models.OuroForCausalLM, **DECODER)
tiny_hrm = tiny(HrmTextForCausalLM, **{**DECODER, "num_hidden_layers": 1}, head_dim=8, L_cycles=2, H_cycles=3)


def tiny_dory(**config):
    """A random Dory whose scales differ."""
    fields = {
        **DECODER, "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5,
        "n_input_layers": 1, "n_output_layers": 1, "n_recurrent_loops": 3, "initializer_range": 0.1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }  # fmt: skip
    model = tiny(FOREIGN["dory"], **fields)(**config)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data *= 1 + 0.5 * torch.rand_like(parameter)
    return model


NEEDS_DORY = pytest.mark.skipif(FOREIGN["dory"] is None, reason="transformers has no such model")
DORY = pytest.param(tiny_dory, id="dory", marks=NEEDS_DORY)
TINY = {
    "ouro": tiny_ouro,
    "huginn": tiny(models.HuginnForCausalLM, **RAVEN),
    "loopus": tiny(models.LoopusForCausalLM, **FOUR_LAYERS, num_key_value_heads=2, head_dim=8, N=4),
    "nanbeige": tiny(models.NanbeigeForCausalLM, **DECODER, num_key_value_heads=2, head_dim=12, num_loops=4),
    "raven_llama": tiny(models.HuginnForCausalLM, **CONVERTED, **LLAMA),
    "raven_olmo": tiny(models.HuginnForCausalLM, **CONVERTED, **OLMO),
    "parcae": tiny(models.ParcaeForCausalLM, **{**FRAME, "n_layers_in_recurrent_block": 2}, num_attention_heads=4),
}


def randomise(peft_model, scale=0.3, seed=0):
    """Add random numbers to the factors B and learned gates of a model's adapters; return the model."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in peft_model.named_parameters():
        if "lora_B" in name or "lora_loop_gates" in name:
            parameter.data += scale * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return peft_model


def varied(model, std=0.3):
    """Give a random model weights with which its greedy texts vary."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=std)
    return model.eval()


def adapted(model):
    """Add an adapter that changes the texts."""
    torch.manual_seed(1)
    return with_adapter(model, scale=0.2, r=4).eval()


def steady(**config):
    """A random model without near ties, which the batch size may decide in float32."""
    return varied(tiny_ouro(max_position_embeddings=8192, **config), std=0.1)


def with_adapter(model=None, seed=1, scale=0.05, **config):
    """A PEFT model, by default over a tiny Ouro, whose adapter changes the output."""
    model = tiny_ouro() if model is None else model
    return randomise(get_peft_model(model, default_peft_config(model, **config)), scale, seed)


def trained_parameters(model):
    """The parameters that need a gradient, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def sharp_hrm(**config):
    """A model whose attention is far from uniform."""
    model = tiny_hrm(**config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "self_attn" in name:
                parameter.mul_(20)
    return model
