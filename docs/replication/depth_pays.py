"""The pilot of plan.md on a task where depth pays: does fine-tuning at 4 loops lose what 8 loops can do?

    python docs/replication/depth_pays.py pretrain SEED   # a base model, 6 minutes of one CPU core
    python docs/replication/depth_pays.py run SEED        # its missing runs, 10 minutes of one CPU core
    python docs/replication/depth_pays.py analyze         # the table in plan.md, from depth_pays.jsonl

A program is a start value and lines such as `3 +2 *4 +5`, modulo 7, and the completion is its result alone. A line needs the
result of the line before it. A model that executes one line in each loop thus follows as many lines as it runs loops.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from make_tiny_base import pretrain
from tiny_study import describe_base
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from loopdropout_trainer.errors import run_script
from loopdropout_trainer.looped import LoopedModelMixin, use_depth
from loopdropout_trainer.models import OuroConfig, OuroForCausalLM


RESULTS = Path(__file__).parent / "depth_pays.jsonl"
FOLDER = Path("outputs/depth_pays")
MODULUS = 7
DIGITS, LETTERS = "0123456", "abcdefg"
NEGATION = "not"
"""The line that turns x into 6 - x. It is not in the pretraining."""
KNOWN_LINES = [*(f"+{n}" for n in range(1, MODULUS)), *(f"*{n}" for n in range(2, MODULUS))]
WORDS = [*DIGITS, *LETTERS, *KNOWN_LINES, NEGATION, "<pad>"]
MOST_LINES = 12
TASKS = ("letters", "negation")
METHODS = {
    "lora": {"rule": "lora"},
    "p_0.5": {"rule": "loop_dropout", "p": 0.5},
    "lora_random_depth": {
        "rule": "lora",
        "depth_sampling": "uniform",
        "depth_sampling_args": {"low": 1, "high": 8},
    },
}
METHOD_NAMES = {"-": "-", "lora": "LoRA", "p_0.5": "Loop Dropout", "lora_random_depth": "LoRA, random depth"}
LEARNING_RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
PILOT = {"steps": 300, "programs": 512}
MORE_STEPS = {"steps": 1200, "programs": 512}
MORE_PROGRAMS = {"steps": 300, "programs": 4800}
SELECTION_SEED = 50
SEEDS = (51, 52)
DEPTHS = (2, 4, 6, 8)
TRAINED_LINES = range(1, 5)
DEEP_LINES = range(5, 9)
"""Numbers of lines that need more loops than the 4 of the training."""


# Programs


def make_program(rng: Random, num_lines: int, task: str) -> tuple[list[int], list[int]]:
    """Return the ids of a program, and the ids of its results after each of its words.

    `known` is the task of the pretraining: a program that starts with a digit has digits as results, and one that starts with
    a letter has letters. In `letters`, it starts with a digit and the results are letters. In `negation`, which has digits, a
    third of the lines is the new line.
    """
    starts = rng.choice((DIGITS, LETTERS)) if task == "known" else DIGITS
    ends = LETTERS if task == "letters" else starts
    value = rng.randrange(MODULUS)
    words, results = [starts[value]], [ends[value]]
    for _ in range(num_lines):
        line = NEGATION if task == "negation" and rng.random() < 1 / 3 else rng.choice(KNOWN_LINES)
        if line == NEGATION:
            value = MODULUS - 1 - value
        elif line[0] == "+":
            value = (value + int(line[1:])) % MODULUS
        else:
            value = (value * int(line[1:])) % MODULUS
        words.append(line)
        results.append(ends[value])
    return [WORDS.index(word) for word in words], [WORDS.index(word) for word in results]


def make_batch(rng: Random, size: int, task: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return programs of `MOST_LINES` lines and their results, both [size, MOST_LINES + 1]."""
    programs = [make_program(rng, MOST_LINES, task) for _ in range(size)]
    return torch.tensor([ids for ids, _ in programs]), torch.tensor([results for _, results in programs])


def make_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<pad>")


# Base models


def program_batches(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    rng = Random(f"programs/{seed}")
    while True:
        yield make_batch(rng, 64, "known")


def random_depth_loss(model: LoopedModelMixin, batch: tuple, done: float, rng: Random) -> torch.Tensor:
    """Return the mean loss of all readouts at 1 to 8 loops. Each start of a program is a prompt, its result the completion."""
    ids, results = batch
    with use_depth(model, rng.randint(1, 8)):
        readouts = model.base_model(ids, output_readouts=True).readouts
    logits = model.lm_head(torch.stack(readouts))
    return F.cross_entropy(logits.flatten(0, 2), results.expand(len(readouts), -1, -1).flatten())


def make_base(seed: int) -> None:
    """Pretrain a base model, and write its line of the results."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    config = OuroConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_loops=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    start = time.process_time()
    model = OuroForCausalLM(config).train()
    pretrain(model, program_batches(seed), random_depth_loss, 3000, seed)
    target = FOLDER / "bases" / f"programs_{seed}"
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    seconds = round(time.process_time() - start, 1)
    append({**describe_base(target), "accuracy": measure(model, "known", "test"), "cpu_seconds": seconds})


# Runs


@torch.no_grad()
def measure(
    model: LoopedModelMixin, task: str, split: str, depths: tuple[int, ...] = DEPTHS
) -> dict[str, list[float]]:
    """Return the accuracy in percent on 1,000 programs by depth, after 1 to `MOST_LINES` lines."""
    ids, results = make_batch(Random(f"{split}/{task}"), 1000, task)
    accuracies = {}
    for depth in depths:
        with use_depth(model.eval(), depth):
            solved = model(input_ids=ids).logits.argmax(-1) == results
        accuracies[str(depth)] = [round(100 * value, 1) for value in solved.float().mean(0)[1:].tolist()]
    return accuracies


def training_examples(task: str, seed: int, number: int):
    """Return programs of 1 to 4 lines with their result, which alone has a loss."""
    from datasets import Dataset

    rng = Random(f"training/{task}/{seed}")
    rows = []
    for _ in range(number):
        ids, results = make_program(rng, rng.choice(TRAINED_LINES), task)
        rows.append({"input_ids": [*ids, results[-1]], "completion_mask": [0] * len(ids) + [1]})
    return Dataset.from_list(rows)


def train(base: str, task: str, method: str, learning_rate: float, seed: int, size: dict) -> dict:
    """Fine-tune at 4 loops, or at random depth, and return the line of the run."""
    from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer, load_model

    start = time.process_time()
    work = FOLDER / "work" / f"{base}-{task}-{method}"
    args = LoopDropoutConfig(
        str(work),
        **METHODS[method],
        seed=seed,
        learning_rate=learning_rate,
        max_steps=size["steps"],
        per_device_train_batch_size=16,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=0.05,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = load_model(FOLDER / "bases" / base, dtype="float32")
    data = training_examples(task, seed, size["programs"])
    trainer = LoopDropoutSFTTrainer(model, args, train_dataset=data, processing_class=make_tokenizer())
    trainer.train()
    shutil.rmtree(work, ignore_errors=True)
    line = {"base": base, "task": task, "method": method, **size, "learning_rate": learning_rate, "seed": seed}
    if seed == SELECTION_SEED:  # the accuracy with 8 loops chooses nothing
        development = measure(trainer.model, task, "development", (4,))
        line["development"] = round(mean_over(development, 4, TRAINED_LINES), 2)
        line["accuracy"] = measure(trainer.model, task, "test", (8,))
    else:
        line["accuracy"] = measure(trainer.model, task, "test")
        line["known"] = measure(trainer.model, "known", "test")
    return line | {"cpu_seconds": round(time.process_time() - start, 1)}


def run(seed: int) -> None:
    """Train the missing runs of a base model: the learning rates, the compared seeds, and the additions."""
    base = f"programs_{seed}"
    for task in TASKS:
        for method in METHODS:
            for rate in LEARNING_RATES:
                train_if_missing(base, task, method, rate, SELECTION_SEED)
            for compared_seed in SEEDS:
                train_if_missing(base, task, method, choose_rate(base, task, method), compared_seed)
    for compared_seed in SEEDS:
        train_if_missing(base, "letters", "lora", choose_rate(base, "letters", "lora"), compared_seed, MORE_STEPS)
    for task in TASKS:
        for method in METHODS:
            train_if_missing(base, task, method, choose_rate(base, task, method), SEEDS[0], MORE_PROGRAMS)


def choose_rate(base: str, task: str, method: str) -> float:
    """Return the learning rate that solves the most held-out programs, of several the lowest."""
    selection = [line for line in find_lines(base, task, method) if line["seed"] == SELECTION_SEED]
    return max(selection, key=lambda line: (line["development"], -line["learning_rate"]))["learning_rate"]


def train_if_missing(base: str, task: str, method: str, rate: float, seed: int, size: dict = PILOT) -> None:
    run = (rate, seed, size["steps"], size["programs"])
    finished = [
        (line["learning_rate"], line["seed"], line["steps"], line["programs"])
        for line in find_lines(base, task, method)
    ]
    if run not in finished:
        append(train(base, task, method, rate, seed, size))


# Results


def read_lines() -> list[dict]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def find_lines(base: str, task: str, method: str) -> list[dict]:
    return [
        line for line in read_lines() if (line["base"], line.get("task"), line.get("method")) == (base, task, method)
    ]


def append(line: dict) -> None:
    with RESULTS.open("a") as file:
        file.write(f"{json.dumps(line)}\n")
    print(json.dumps(line), flush=True)


def mean_over(accuracies: dict[str, list[float]], depth: int, lines: range) -> float:
    """Return the mean accuracy with `depth` loops over some numbers of lines."""
    return sum(accuracies[str(depth)][number - 1] for number in lines) / len(lines)


def make_table(lines: list[dict]) -> str:
    """Return the accuracies of the base models and the means over the compared seeds as a table in Markdown."""
    columns = ["task", "steps", "programs", "base model", "method", "rate"]
    columns += [f"{numbers}, K = {depth}" for numbers in ("1-4", "5-8") for depth in (4, 8)]
    table = [
        f"| {' | '.join([*columns, 'known, 5-8, K = 8'])} |",
        "|---|---:|---:|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    groups = {}
    for line in lines:
        if line.get("seed") != SELECTION_SEED:
            size = (line.get("steps", 0), line.get("programs", 0))
            key = (line.get("task", "known"), *size, line["base"], line.get("method", "-"))
            groups.setdefault(key, []).append(line)
    for (task, steps, programs, base, method), group in sorted(groups.items()):
        cells = [f"`{task}`", f"{steps:,}", f"{programs:,}", base, METHOD_NAMES[method]]
        cells.append(str(group[0].get("learning_rate", "-")))
        for numbers in (TRAINED_LINES, DEEP_LINES):
            for depth in (4, 8):
                cells.append(mean_and_seeds([mean_over(line["accuracy"], depth, numbers) for line in group]))
        known = [mean_over(line.get("known", line["accuracy"]), 8, DEEP_LINES) for line in group]
        table.append(f"| {' | '.join([*cells, mean_and_seeds(known)])} |")
    return "\n".join(table)


def mean_and_seeds(values: list[float]) -> str:
    """Return the mean in percent, with the seeds in parentheses if there are several."""
    mean = f"{sum(values) / len(values):.1f}"
    return f"{mean} ({', '.join(f'{value:.1f}' for value in values)})" if len(values) > 1 else mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("pretrain", "run", "analyze"))
    parser.add_argument("seed", type=int, nargs="?", default=1, help="of the base model (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order
    if args.command == "analyze":
        print(make_table(read_lines()))
    elif args.command == "pretrain":
        make_base(args.seed)
    else:
        run(args.seed)


if __name__ == "__main__":
    run_script(main)
