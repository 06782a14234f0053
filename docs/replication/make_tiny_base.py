"""Pretrain a tiny looped model from scratch, on one CPU thread: the Ouro that ships with the package, or another.

    python docs/replication/make_tiny_base.py --output_dir loopdropout_trainer/tiny_ouro
    python docs/replication/make_tiny_base.py --num_layers 2 --hidden_size 256 --output_dir outputs/tiny_ouro_2_layers
    python docs/replication/make_tiny_base.py --family huginn --steps 2400 --output_dir outputs/tiny_huginn

It learns the language of the quickstart's word problems in shorter problems and in other forms (`pretraining_texts`). The same
machine and versions give the same bytes. The SHA-256 of the weights is printed at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

import torch
from rich.progress import track
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from transformers import GenerationConfig, PreTrainedTokenizerFast

from loopdropout_trainer.arithmetic import (
    LARGEST,
    NAMES,
    OBJECTS,
    OTHER_WORDING,
    WORDING,
    Split,
    Step,
    change_sentence,
    is_test_question,
    make_problem,
    random_steps,
)
from loopdropout_trainer.errors import run_script
from loopdropout_trainer.looped import LoopedModelMixin
from loopdropout_trainer.models import HuginnConfig, HuginnForCausalLM, OuroConfig, OuroForCausalLM


# Texts


def pretraining_texts(num_texts: int, seed: int = 0) -> list[str]:
    """Generate texts that teach the language of the word problems, and not the form of the answers.

    - Questions of 1 to 3 steps with a solution in one of 36 styles, or with the answer alone. No style is the task's own.
    - Stories, also in the other wording, that state the new number after each sentence.
    - Sums under a heading, and chains of sums that end with `#### N`.

    No answer to a question ends with `#### N`, and no question is a test question.
    """
    rng = Random(f"arithmetic/pretrain/{seed}")
    kinds = (worked_answer, short_answer, story, sums, chain)
    return [rng.choices(kinds, weights=(55, 20, 10, 8, 7))[0](rng) for _ in range(num_texts)]


def short_problem(rng: Random, most_steps: int) -> tuple[str, list[Step]]:
    """Return a problem that is not a test problem."""
    question, steps = make_problem(rng, rng.randint(1, most_steps), Split())
    return short_problem(rng, most_steps) if is_test_question(question) else (question, steps)


def worked_answer(rng: Random) -> str:
    question, steps = short_problem(rng, 3)
    styles = ("{left} {operator} {right} = {result}", "{left} {operator} {right} is {result}")
    style = rng.choice((*styles, "{left} {word} {right} is {result}"))
    separator = rng.choice(("\n", ". ", ", then "))
    ending = rng.choice(("The answer is {}.", "So the answer is {}.", "Answer: {}", "{} in all."))
    words = {"+": "plus", "-": "minus", "*": "times"}
    working = separator.join(style.format(**step._asdict(), word=words[step.operator]) for step in steps)
    before_ending = "\n" if separator == "\n" else ". "
    return f"Question: {question}\nAnswer: {working}{before_ending}{ending.format(steps[-1].result)}"


def short_answer(rng: Random) -> str:
    question, steps = short_problem(rng, 2)
    return f"Question: {question}\nAnswer: The answer is {steps[-1].result}."


def story(rng: Random) -> str:
    name, friend = rng.sample(NAMES, 2)
    what = rng.choice(OBJECTS)
    start = rng.randint(2, 40)
    words = rng.choice((WORDING, OTHER_WORDING))
    sentences = [words["start"][0].format(name=name, number=start, what=what)]
    for step in random_steps(rng, start, rng.randint(2, 4), "+-*"):
        sentences += [change_sentence(rng, name, friend, what, step, words), f"Now {name} has {step.result} {what}."]
    return " ".join(sentences)


def sums(rng: Random) -> str:
    steps = [random_steps(rng, rng.randint(0, LARGEST), 1, "+-*")[0] for _ in range(rng.randint(3, 6))]
    products = [(rng.randint(2, 6), rng.randint(2, 9)) for _ in range(2)]
    steps += [Step(left, "*", right, left * right) for left, right in products]
    rng.shuffle(steps)
    return "\n".join(["#### Sums", *map(str, steps)])


def chain(rng: Random) -> str:
    steps = random_steps(rng, rng.randint(0, LARGEST), rng.randint(1, 4), "+-*")
    return "\n".join(map(str, steps)) + f"\n#### {steps[-1].result}"


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that reads a number of one or two digits as one token and can write any text."""
    backend = Tokenizer(BPE())
    split = pre_tokenizers.Split(Regex(r" ?\d{1,2}| ?[^\s\d]+|\s"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=768,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|pad|>", model_max_length=512
    )


def make_batches(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Iterator[torch.Tensor]:
    """Yield batches of token ids [32, S] for ever, padded on the right with texts of similar length."""
    for draw in range(1_000_000 * seed, 1_000_000 * (seed + 1)):
        ids = tokenizer(pretraining_texts(4096, draw))["input_ids"]
        ids = sorted(([*row, tokenizer.eos_token_id] for row in ids), key=len)
        batches = [ids[start : start + 32] for start in range(0, len(ids), 32)]
        Random(f"0/{draw}").shuffle(batches)
        for batch in batches:
            width = len(batch[-1])
            yield torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in batch])


# Models and their losses


def make_model(family: str, tokenizer: PreTrainedTokenizerFast, num_layers: int, hidden_size: int) -> LoopedModelMixin:
    """Return an untrained Ouro of 4 loops, or a Huginn of 8 loops with one layer before them and one after them."""
    shared = {
        "vocab_size": len(tokenizer),
        "intermediate_size": hidden_size * 11 // 4,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if family == "ouro":
        config = OuroConfig(
            **shared,
            hidden_size=hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=hidden_size // 32,
            num_loops=4,
            max_position_embeddings=512,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        )
        return OuroForCausalLM(config)
    config = HuginnConfig(
        **shared,
        padded_vocab_size=len(tokenizer),
        n_embd=hidden_size,
        n_heads=hidden_size // 32,
        n_layers_in_prelude=1,
        n_layers_in_recurrent_block=num_layers,
        n_layers_in_coda=1,
        mean_recurrence=8,
        block_size=512,
    )
    return HuginnForCausalLM(config)


def readout_losses(model: LoopedModelMixin, ids: torch.Tensor, loops: list[int]) -> torch.Tensor:
    """Return the cross entropy of the readouts of some loops, counted from 0."""
    targets = ids[:, 1:]
    kept = targets != model.config.pad_token_id
    readouts = model.base_model(ids, output_readouts=True).readouts
    return torch.stack([F.cross_entropy(model.lm_head(readouts[t][:, :-1][kept]), targets[kept]) for t in loops])


def readout_weights(kind: str, num_loops: int, rng: Random) -> list[float]:
    """Return the weight of the loss of each loop's readout in one batch. The weights add up to one."""
    num_late = num_loops - 3
    if kind == "late":
        return [0.05, 0.1, 0.25, *[0.6 / num_late] * num_late]
    if kind == "early":
        return [*[0.6 / num_late] * num_late, 0.25, 0.1, 0.05]
    if kind == "uniform":
        return [1 / num_loops] * num_loops
    chosen = rng.randrange(num_loops) if kind == "random" else num_loops - 1  # else `last`
    return [float(loop == chosen) for loop in range(num_loops)]


def weighted_loss(
    model: LoopedModelMixin, ids: torch.Tensor, done: float, rng: Random, kind: str = "late"
) -> torch.Tensor:
    """Return a weighted loss of the readouts. A quarter of the batches run 5 or 6 loops, the others 4."""
    model.config.num_loops = rng.randint(5, 6) if rng.random() < 0.25 else 4
    weights = readout_weights(kind, model.config.num_loops, rng)
    return (readout_losses(model, ids, list(range(len(weights)))) * torch.tensor(weights)).sum()


def random_depth_loss(model: LoopedModelMixin, ids: torch.Tensor, done: float, rng: Random) -> torch.Tensor:
    """Return the loss at 2 to 16 loops, fewer at the beginning: 2/3 of the last readout, 1/3 of a random earlier one."""
    model.config.num_loops = rng.randint(2, 7 if done < 0.15 else 8 if done < 0.4 else 16)
    model.config.state_seed = rng.randrange(2**31)
    last = model.config.num_loops - 1
    final, earlier = readout_losses(model, ids, [last, rng.randrange(last)])
    return (2 * final + earlier) / 3


def pretrain(model: LoopedModelMixin, batches: Iterator, loss_of: Callable, num_steps: int, seed: int = 0) -> None:
    """Train all weights, the matrices of the layers with Muon.

    Args:
        model: Untrained model.
        batches: Batches without end, in the form that `loss_of` takes.
        loss_of: Function from the model, a batch, the finished part of the training in [0, 1) and a generator to a loss.
        num_steps: Number of optimizer steps.
        seed: Seed of the generator.
    """
    outside = ("embed_tokens", "wte", "lm_head", "early_exit_gate")
    weights = [(w.dim() == 2 and not any(part in name for part in outside), w) for name, w in model.named_parameters()]
    optimizers = [
        torch.optim.Muon([w for is_matrix, w in weights if is_matrix], lr=0.02, weight_decay=0.01),
        torch.optim.AdamW(
            [w for is_matrix, w in weights if not is_matrix], 4e-3, betas=(0.9, 0.98), weight_decay=0.01
        ),
    ]
    factor = lambda step: min((step + 1) / 50, (1 + math.cos(math.pi * (step / num_steps))) / 2)
    schedulers = [LambdaLR(optimizer, factor) for optimizer in optimizers]
    rng, losses = Random(seed), []
    for step in track(range(num_steps), "Pretraining"):
        loss = loss_of(model, next(batches), step / num_steps, rng)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in (*optimizers, *schedulers):
            part.step()
        model.zero_grad()
        losses.append(loss.item())
        if len(losses) % 100 == 0:
            print(f"step {len(losses)}: loss {sum(losses[-100:]) / 100:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--family", choices=("ouro", "huginn"), default="ouro")
    parser.add_argument("--steps", type=int, default=1200, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--num_layers", type=int, default=1, help="of the looped block (default: %(default)s)")
    parser.add_argument("--hidden_size", type=int, default=128, help="default: %(default)s")
    parser.add_argument(
        "--readouts",
        choices=("late", "uniform", "last", "early", "random"),
        default="late",
        help="readouts of Ouro with the largest weights in the loss (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and texts (default: %(default)s)")
    args = parser.parse_args()

    torch.set_num_threads(1)  # sums in one order
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer(pretraining_texts(20_000))
    model = make_model(args.family, tokenizer, args.num_layers, args.hidden_size).train()
    num_loops = model.config.num_loops
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens, {num_loops} loops")
    loss_of = random_depth_loss if args.family == "huginn" else partial(weighted_loss, kind=args.readouts)
    pretrain(model, make_batches(tokenizer, args.seed), loss_of, args.steps, args.seed)

    model.config.num_loops = num_loops
    if args.family == "huginn":
        model.config.state_seed = 0
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(**tokens)
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    digest = hashlib.sha256((args.output_dir / "model.safetensors").read_bytes()).hexdigest()
    print(f"Saved in {args.output_dir}. SHA-256 of model.safetensors: {digest}")


if __name__ == "__main__":
    run_script(main)
