"""Compare the memory estimate with the tensors that one layer run keeps for the backward pass, at the models' real widths.

    python benchmarks/memory.py   # a few minutes of one CPU core, 6 GB; writes benchmarks/results/memory.md

Models of one and of two recurrent layers run one loop under autocast in bfloat16. The difference of the kept bytes belongs to
one run of a layer. No GPU is needed, because shapes and dtypes decide what is kept. Allocators and kernels add to it.
"""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import loopdropout_trainer.models  # noqa: F401  (registers the families)
from loopdropout_trainer import default_peft_config
from loopdropout_trainer.memory import FAMILIES, estimate_memory
from loopdropout_trainer.published_sizes import PUBLISHED, QWEN


NUM_TOKENS = 128
SHAPES = {
    "Ouro-1.4B": PUBLISHED["ByteDance/Ouro-1.4B"],
    "Ouro-2.6B": PUBLISHED["ByteDance/Ouro-2.6B"],
    "Huginn": PUBLISHED["tomg-group-umd/huginn-0125"],
    "Nanbeige4.2-3B": PUBLISHED["Nanbeige/Nanbeige4.2-3B"],
    "Dory1.0-4B": PUBLISHED["nvidia/NVIDIA-Nemotron-Labs-Dory1.0-4B-BF16"],
    "LoopUS-Qwen3-4B": PUBLISHED["Thrillcrazyer/Qwen3-4B_LoopUS"],
}


def small_fields(fields: dict, num_layers: int) -> dict:
    """Return the fields of a model with the widths of `fields`, `num_layers` recurrent layers and one loop."""
    small = {**fields, "vocab_size": 256, "num_hidden_layers": num_layers}
    kind = fields["model_type"]
    if kind == "huginn_raven":
        small |= {"n_layers_in_prelude": 1, "n_layers_in_recurrent_block": num_layers, "n_layers_in_coda": 1}
        small |= {"padded_vocab_size": 256}
        del small["num_hidden_layers"]
    if kind == "lds":
        looped = [*range(1, num_layers + 1)]
        small |= {"encoder_layer_indices": [0], "reasoning_layer_indices": looped}
        small |= {"decoder_layer_indices": [num_layers + 1]}
        small["base_config_dict"] = {**QWEN, "vocab_size": 256, "num_hidden_layers": num_layers + 2}
        del small["num_hidden_layers"]
    if kind == "dory":
        small |= {"n_input_layers": 2, "n_recurrent_layers": 2 * num_layers, "n_output_layers": 2}
        small |= {
            "num_hidden_layers": 4 + 2 * num_layers,
            "layer_types": ["sliding_attention", "mlp"] * (num_layers + 2),
        }
    return {**small, FAMILIES[kind].num_loops: 1}


def small_model(fields: dict) -> torch.nn.Module:
    """Return a random model with the fields of its config.json, with the paper's adapter."""
    kind = fields["model_type"]
    others = {name: value for name, value in fields.items() if name != "model_type"}
    if kind == "dory":
        from transformers import DoryConfig  # not in older releases

        config = DoryConfig.from_dict(fields)
    else:
        config = AutoConfig.for_model(kind, **others)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return get_peft_model(model, default_peft_config(model)).train()


def kept_bytes(model: torch.nn.Module) -> float:
    """Return the bytes for each token that a forward pass of the backbone keeps, apart from weights."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # and no other tensor takes its place
        return tensor

    ids = torch.randint(0, 256, (1, NUM_TOKENS))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        output = model.get_base_model().base_model(input_ids=ids, use_cache=False).last_hidden_state
    total = sum(storage.nbytes() for storage in kept.values()) / NUM_TOKENS
    del output
    return total


def main() -> None:
    rows = []
    for name, fields in SHAPES.items():
        if name != "Ouro-2.6B":  # the same layer as Ouro-1.4B
            torch.manual_seed(0)
            kept, estimates = [], []
            for num_layers in (1, 2):
                small = small_fields(fields, num_layers)
                kept.append(kept_bytes(small_model(small)))
                estimates.append(estimate_memory(small, 1, checkpointing=False)["activations"])
                gc.collect()
            counted, estimate = (kept[1] - kept[0]) / 1e3, (estimates[1] - estimates[0]) * 1e6
            rows.append(f"| {name} | {counted:.1f} | {estimate:.1f} | {estimate / counted - 1:+.0%} |")
    page = [
        "# Kept tensors of a layer run",
        "",
        "`python benchmarks/memory.py` counts the bytes that one run of a recurrent layer keeps for a token, in kB, at the",
        f"real widths, with the paper's adapter, without gradient checkpointing (torch {torch.__version__}, CPU).",
        "",
        "| model | counted | estimate | difference |",
        "|---|---:|---:|---:|",
        *rows,
    ]
    Path(__file__).with_name("results").joinpath("memory.md").write_text("\n".join(page) + "\n", encoding="utf-8")
    print("\n".join(page))


if __name__ == "__main__":
    main()
