"""Pretrain a tiny looped model from scratch, on one CPU thread: the Ouro that ships with the package, or another.

    python recipes/make_tiny_base.py --output_dir loopdropout_trainer/tiny_ouro
    python recipes/make_tiny_base.py --family huginn --num_loops 8 --design random --steps 2400 --output_dir outputs/tiny_h

It learns the language of the quickstart's word problems in shorter problems and in other forms (`pretraining_texts`).
The same machine and versions give the same bytes, whose SHA-256 is printed at the end. `--steps 2400` makes the Huginn of
docs/replication.md.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from make_tiny_texts import pretraining_texts
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedTokenizerFast

from loopdropout_trainer.errors import run_script
from loopdropout_trainer.looped import LoopedModelMixin
from loopdropout_trainer.models import HuginnConfig, HuginnForCausalLM, OuroConfig, OuroForCausalLM


VOCAB_SIZE = 768
TEXTS_PER_DRAW = 4096
WARMUP_STEPS = 50


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that reads a number of one or two digits as one token and can write any text."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\d{1,2}| ?[^\s\d]+|\s"), "isolated"),
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


def make_ouro(
    tokenizer: PreTrainedTokenizerFast, num_loops: int, num_layers: int, hidden_size: int
) -> OuroForCausalLM:
    """Return an untrained Ouro: all of its layers are looped."""
    return OuroForCausalLM(
        OuroConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=hidden_size * 11 // 4,
            num_hidden_layers=num_layers,
            num_attention_heads=hidden_size // 32,
            num_loops=num_loops,
            max_position_embeddings=512,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def make_huginn(
    tokenizer: PreTrainedTokenizerFast, num_loops: int, num_layers: int, hidden_size: int
) -> HuginnForCausalLM:
    """Return an untrained Huginn: one layer before the loop and one after it, and loops that start from random states."""
    return HuginnForCausalLM(
        HuginnConfig(
            vocab_size=len(tokenizer),
            padded_vocab_size=len(tokenizer),
            n_embd=hidden_size,
            intermediate_size=hidden_size * 11 // 4,
            n_heads=hidden_size // 32,
            n_layers_in_prelude=1,
            n_layers_in_recurrent_block=num_layers,
            n_layers_in_coda=1,
            mean_recurrence=num_loops,
            block_size=512,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


FAMILIES = {"ouro": make_ouro, "huginn": make_huginn}


def batches_of(tokenizer: PreTrainedTokenizerFast, batch_size: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield batches of token ids [B, S] for ever, padded on the right with texts of similar length."""
    for draw in range(1_000_000):
        ids = tokenizer(pretraining_texts(TEXTS_PER_DRAW, 1_000_000 * seed + draw))["input_ids"]
        ids = sorted(([*row, tokenizer.eos_token_id] for row in ids), key=len)
        batches = [ids[start : start + batch_size] for start in range(0, len(ids), batch_size)]
        Random(f"{seed}/{draw}").shuffle(batches)
        for batch in batches:
            width = max(map(len, batch))
            yield torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in batch])


def losses_of(model: LoopedModelMixin, ids: torch.Tensor, loops: list[int]) -> torch.Tensor:
    """Return the cross entropy of the readouts of some loops, counted from 0."""
    targets = ids[:, 1:]
    kept = targets != model.config.pad_token_id
    readouts = model.base_model(ids, output_readouts=True).readouts
    return torch.stack([F.cross_entropy(model.lm_head(readouts[t][:, :-1][kept]), targets[kept]) for t in loops])


@dataclass(frozen=True)
class Design:
    """What a step of pretraining at a fixed number of loops minimises, or at one or two loops more.

    Attributes:
        weights: of the losses of the loops' readouts, four of them.
        deeper: share of the batches that run five or six loops; the readouts from the fourth on share the last weight.
    """

    weights: tuple[float, ...]
    deeper: float = 0.0

    def loss(self, model: LoopedModelMixin, ids: torch.Tensor, done: float, rng: Random, own: int) -> torch.Tensor:
        """Return the weighted loss of one batch, of which the part `done` of the training has gone before."""
        *early, late = self.weights
        loops = len(self.weights)
        model.config.num_loops = rng.randint(loops + 1, loops + 2) if rng.random() < self.deeper else loops
        shared = model.config.num_loops - len(early)
        weights = {t: weight for t, weight in enumerate([*early, *[late / shared] * shared]) if weight}
        return (losses_of(model, ids, list(weights)) * torch.tensor(list(weights.values()))).sum()


def loss_at_random_depth(
    model: LoopedModelMixin, ids: torch.Tensor, done: float, rng: Random, own: int
) -> torch.Tensor:
    """Return the loss at a depth drawn for the batch: 2/3 of its last readout, 1/3 of a random earlier one.

    Depths of 2 to twice the model's own, `own`, and less at the beginning. Random start states are drawn again for every
    batch.
    """
    most = own - 1 if done < 0.15 else own if done < 0.4 else 2 * own
    model.config.num_loops = rng.randint(2, most)
    if hasattr(model.config, "state_seed"):
        model.config.state_seed = rng.randrange(2**31)
    last = model.config.num_loops - 1
    final, earlier = losses_of(model, ids, [last, rng.randrange(last)])
    return (2 * final + earlier) / 3


DESIGNS = {
    "late": Design((0.05, 0.1, 0.25, 0.6), deeper=0.25).loss,
    "last": Design((0.0, 0.0, 0.0, 1.0), deeper=0.25).loss,
    "mean": Design((0.25, 0.25, 0.25, 0.25)).loss,  # the uniform form of Ouro's expected loss
    "random": loss_at_random_depth,
}
"""Pretraining losses by name; a model of `late` needs all of its loops most clearly."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--family", choices=FAMILIES, default="ouro", help="of the model (default: %(default)s)")
    parser.add_argument("--design", choices=DESIGNS, default="late", help="of the loss (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1200, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=32, help="texts in a batch (default: %(default)s)")
    parser.add_argument(
        "--num_loops", type=int, default=4, help="K; other than 4 with `random` (default: %(default)s)"
    )
    parser.add_argument("--num_layers", type=int, default=1, help="of the looped block (default: %(default)s)")
    parser.add_argument("--hidden_size", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--muon_rate", type=float, default=0.02, help="peak, for matrices (default: %(default)s)")
    parser.add_argument("--adam_rate", type=float, default=4e-3, help="peak, for the rest (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and texts (default: %(default)s)")
    args = parser.parse_args()
    if args.num_loops != 4 and args.design != "random":
        parser.error(
            f"--design {args.design} weights the readouts of 4 loops; --num_loops {args.num_loops} needs random"
        )

    torch.set_num_threads(1)  # sums in one order
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer(pretraining_texts(20_000, seed=0))
    model = FAMILIES[args.family](tokenizer, args.num_loops, args.num_layers, args.hidden_size).train()
    outside = ("embed_tokens", "wte", "lm_head", "early_exit_gate")
    matrices = [
        w for name, w in model.named_parameters() if w.dim() == 2 and not any(part in name for part in outside)
    ]
    chosen = set(map(id, matrices))
    others = [weight for weight in model.parameters() if id(weight) not in chosen]
    optimizers = [
        torch.optim.Muon(matrices, lr=args.muon_rate, weight_decay=0.01),
        torch.optim.AdamW(others, args.adam_rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]
    peaks = [args.muon_rate, args.adam_rate]
    loss_of = DESIGNS[args.design]
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens, {model.config.num_loops} loops")

    rng, batches = Random(args.seed), batches_of(tokenizer, args.batch_size, args.seed)
    began, tokens, total = time.process_time(), 0, 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("pretraining", total=args.steps)
        for step in range(args.steps):
            done = step / args.steps
            for optimizer, peak in zip(optimizers, peaks, strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = peak * min((step + 1) / WARMUP_STEPS, (1 + math.cos(math.pi * done)) / 2)
            ids = next(batches)
            tokens += ids.numel()
            loss = loss_of(model, ids, done, rng, args.num_loops)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            total += loss.item()
            progress.advance(task)
            if (step + 1) % 100 == 0:
                seconds = time.process_time() - began
                progress.console.print(
                    f"step {step + 1}: loss {total / 100:.4f}, {tokens:,} tokens, {seconds:.0f} CPU seconds"
                )
                total = 0.0

    model.eval()
    model.config.num_loops = args.num_loops
    if args.family == "huginn":
        model.config.state_seed = 0
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    digest = hashlib.sha256((args.output_dir / "model.safetensors").read_bytes()).hexdigest()
    print(f"Saved in {args.output_dir}; SHA-256 of model.safetensors: {digest}")


if __name__ == "__main__":
    run_script(main)
