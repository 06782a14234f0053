"""Pretrain the tiny Ouro that ships with the package, from scratch, on a CPU.

    python recipes/make_tiny_ouro.py --output_dir loopdropout_trainer/tiny_ouro

It learns sums and stories (`pretraining_texts`), the neighbours of the quickstart's word problems, with the loss of every
loop's readout, as Ouro itself was pretrained with a loss over its loops. About an hour on a CPU.

The one in the package took 78 minutes of one busy CPU core in three runs of 2,828, 8,614 and 4,264 steps, each but the
first with `--start_from` and a seed of its own, the first two on texts without worked answers. The schedule follows the
clock, so that another run gives a model like it and not the same one.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from random import Random

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch.nn import functional as F
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from loopdropout_trainer.data.arithmetic import pretraining_texts
from loopdropout_trainer.models import OuroConfig, OuroForCausalLM
from loopdropout_trainer.settings.command import run_command


VOCAB_SIZE = 512
TEXTS_PER_DRAW = 8192


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that splits numbers into digits and can write any text."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d| ?[^\s\d]+|\s"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|pad|>", model_max_length=512
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> OuroForCausalLM:
    """Return an untrained Ouro of about half a million parameters, four loops over two layers."""
    return OuroForCausalLM(
        OuroConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=512,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def batches_of(tokenizer: PreTrainedTokenizerFast, batch_size: int, seed: int):
    """Yield batches of token ids [B, S] for ever, padded on the right with texts of similar length."""
    while True:
        ids = tokenizer(pretraining_texts(TEXTS_PER_DRAW, seed))["input_ids"]
        ids = sorted(([*row, tokenizer.eos_token_id] for row in ids), key=len)
        batches = [ids[start : start + batch_size] for start in range(0, len(ids), batch_size)]
        Random(seed).shuffle(batches)
        for batch in batches:
            width = max(map(len, batch))
            yield torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in batch])
        seed += 1


def loss_over_loops(model: OuroForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each loop's readout, [K]."""
    targets = ids[:, 1:]
    kept = targets != model.config.pad_token_id
    readouts = model.model(ids, output_readouts=True).readouts
    return torch.stack([F.cross_entropy(model.lm_head(readout[:, :-1][kept]), targets[kept]) for readout in readouts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=60, help="wall time of the training (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=16, help="texts in a batch (default: %(default)s)")
    parser.add_argument("--learning_rate", type=float, default=1.5e-3, help="peak (default: %(default)s)")
    parser.add_argument("--start_from", type=Path, help="folder of an earlier run to train further")
    parser.add_argument("--seed", type=int, default=0, help="of weights and texts (default: %(default)s)")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    if args.start_from is None:
        tokenizer = make_tokenizer(pretraining_texts(20_000, args.seed))
        model = make_model(tokenizer).train()
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.start_from)
        model = OuroForCausalLM.from_pretrained(args.start_from).train()
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, betas=(0.9, 0.98), weight_decay=0.05)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens, {model.config.num_loops} loops")

    began, step, budget = time.perf_counter(), 0, args.minutes * 60
    columns = (BarColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("pretraining (seconds)", total=int(budget))
        for ids in batches_of(tokenizer, args.batch_size, args.seed):
            elapsed = time.perf_counter() - began
            done = elapsed / budget
            if done >= 1:
                break
            for group in optimizer.param_groups:  # 50 steps of warm-up, then a cosine over the time that is given
                group["lr"] = args.learning_rate * min((step + 1) / 50, (1 + math.cos(math.pi * done)) / 2)
            losses = loss_over_loops(model, ids)
            losses.mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            progress.update(task, completed=int(elapsed))
            if step % 200 == 0:
                by_loop = " ".join(f"{loss:.3f}" for loss in losses.tolist())
                progress.console.print(f"step {step}: loss by loop {by_loop}")

    model.eval()
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    print(f"{step} steps; saved in {args.output_dir}")


if __name__ == "__main__":
    run_command(main, "make_tiny_ouro.py")
