"""Step time and memory of TRL with PEFT, of our LoRA, and of Loop Dropout with each of its optimizations, in one run.

    python benchmarks/speed.py                        # two minutes on a CPU, writes benchmarks/results/speed.md
    python benchmarks/speed.py --memory --rounds 8    # also gradient checkpointing
    python benchmarks/speed.py --hidden_size 256 --batch 4 --median_length 120     # any other shape
    python benchmarks/speed.py --preset ouro-1.4b     # one GPU with 40 GB or more

All rows train copies of one random Ouro, whose frozen weights they share, in one process. First they are checked to give the
same losses and gradients. Then, in each round, every row takes one optimizer step on the same micro-batch with the same
gates, in an order that rotates from round to round. Lengths and gates change from round to round. A ratio compares two
steps of the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import peft
import torch
import transformers
import trl
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedTokenizerFast, Trainer
from trl import SFTConfig, SFTTrainer

from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer, default_peft_config
from loopdropout_trainer.costs import PEAK_FLOPS
from loopdropout_trainer.gates import Draw
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.models import OuroConfig, OuroForCausalLM


NOT_OPTIMIZED = {"remove_padding": False, "skip_frozen_loops": False}
CHECKPOINTING = {"gradient_checkpointing": True}
STOCK, LORA, OURS = "TRL + PEFT, LoRA", "LoRA", "Loop Dropout"
ROWS: dict[str, dict[str, Any] | None] = {
    STOCK: None,
    "LoRA, not optimized": {"rule": "lora", **NOT_OPTIMIZED},
    LORA: {"rule": "lora"},
    "Loop Dropout, not optimized": NOT_OPTIMIZED,
    "Loop Dropout, no padding": {"skip_frozen_loops": False},
    OURS: {},
}
"""Fields of each row's config. None: TRL's own trainer."""

MEMORY_ROWS = {
    f"{STOCK}, checkpointing": None,
    f"{LORA}, checkpointing": {"rule": "lora", **CHECKPOINTING},
    f"{OURS}, checkpointing": CHECKPOINTING,
}
"""Rows that trade time for memory, as TRL does by default. `--memory` adds them."""

ALL_ROWS = ROWS | MEMORY_ROWS

SEED = 44
"""With its gates, the share of frozen loops in the measured steps is close to the expected share."""


@dataclass(frozen=True)
class Preset:
    """A shape. Lengths are log-normal around `median_length` with a deviation of `length_spread` in the logarithm.

    They are clipped to 64 and 511 tokens and multiplied by `length_scale`. The default mean is about 250 tokens, as in the
    paper's MetaMath-GSM-100k (25 million tokens in 100,000 examples).
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    vocab_size: int
    length_scale: float
    dtype: str
    rounds: int
    batch: int = 8
    num_loops: int = 4
    median_length: float = 235.0
    length_spread: float = 0.35


PRESETS = {
    "cpu": Preset(512, 1408, 4, 8, 1024, 0.25, "float32", rounds=4),
    "ouro-1.4b": Preset(2048, 5632, 24, 16, 49152, 1.0, "bfloat16", rounds=20),
}


class Row:
    """One trainer, ready to take steps."""

    def __init__(self, name: str, preset: Preset, folder: str, device: torch.device) -> None:
        self.name = name
        arguments_of_all = {
            "output_dir": folder,
            "max_steps": 1000,
            "per_device_train_batch_size": preset.batch,
            "bf16": preset.dtype == "bfloat16",
            "report_to": "none",
            "disable_tqdm": True,
            "seed": SEED,
        }
        torch.manual_seed(0)
        model = random_ouro(preset)
        arguments = {
            "model": model,
            "train_dataset": Dataset.from_list([{"input_ids": [1, 2], "labels": [1, 2]}] * preset.batch),
            "processing_class": word_tokenizer(preset.vocab_size),
            "peft_config": default_peft_config(model),
        }
        if ALL_ROWS[name] is None:
            use_cpu = not torch.accelerator.is_available()
            args = SFTConfig(use_cpu=use_cpu, gradient_checkpointing=name != STOCK, **arguments_of_all)
            self.trainer = SFTTrainer(args=args, **arguments)
        else:
            args = LoopDropoutConfig(**{"gradient_checkpointing": False, **arguments_of_all, **ALL_ROWS[name]})
            self.trainer = LoopDropoutSFTTrainer(args=args, **arguments)
        self.model = self.trainer.model.to(device).train()
        if self.trainer.args.gradient_checkpointing:  # else `train` would switch it on
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        generator = torch.Generator().manual_seed(0)
        for key, parameter in self.model.named_parameters():
            if "lora_B" in key:  # else A has no gradient
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.01)
        self.trainer.callback_handler.optimizer = self.trainer.create_optimizer()
        self.trainer.state.max_steps = 1000

    def share_frozen_weights(self, other: Row) -> None:
        weights = dict(other.model.named_parameters())
        for key, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                parameter.data = weights[key].data

    def prepare(self, examples: list[dict], device: torch.device) -> tuple[dict, torch.Tensor]:
        """Return the micro-batch of this trainer's collator, and the number of its targets."""
        batch = self.trainer.data_collator(examples)
        batch = {key: value.to(device) if torch.is_tensor(value) else value for key, value in batch.items()}
        targets = sum(sum(label != -100 for label in example["labels"][1:]) for example in examples)
        return batch, torch.tensor(targets, device=device)

    def backward(self, batch: dict, num_items: torch.Tensor, step: int) -> torch.Tensor:
        """Run forward and backward pass of optimizer step `step`, and return the loss."""
        return backward(self.trainer, batch, num_items, step)

    def take_step(self, batch: dict, num_items: torch.Tensor, step: int) -> float:
        """Take one optimizer step, and return its seconds."""
        return take_step(self.trainer, batch, num_items, step)

    def gradients(self) -> torch.Tensor:
        """Return the gradients of all adapters in one float32 vector on the CPU, and clear them."""
        grads = [p.grad for p in self.model.parameters() if p.requires_grad]
        flat = torch.cat([grad.detach().float().flatten().cpu() for grad in grads])
        self.trainer.optimizer.zero_grad()
        return flat


def flops_per_token(model: nn.Module) -> float:
    """Return the work of one forward and one backward pass of a looped model with its adapter, in FLOP per token.

    A multiplication and an addition count as two. Frozen weights need input gradients only, so their backward pass costs as
    much as their forward pass. The adapter's backward pass costs twice as much. The count leaves out attention scores, norms,
    embeddings, recomputation and padding.
    """
    model = find_looped_model(model)
    recurrent, inside, outside = set(model.recurrent_linears()), 0, 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".lora_" not in name:
            is_inside = name.removesuffix(".base_layer") in recurrent
            inside += is_inside * module.weight.numel()
            outside += (not is_inside) * module.weight.numel()
    adapter = sum(p.numel() for name, p in model.named_parameters() if ".lora_" in name)
    return 4 * (model.config.num_loops * inside + outside) + 6 * model.config.num_loops * adapter


def backward(trainer: Trainer, batch: dict, num_items: torch.Tensor, step: int) -> torch.Tensor:
    """Run forward and backward pass of optimizer step `step` as a training run does, and return the loss."""
    trainer.state.global_step = step
    trainer.callback_handler.on_step_begin(trainer.args, trainer.state, trainer.control)
    return trainer.training_step(trainer.model, dict(batch), num_items)


def take_step(trainer: Trainer, batch: dict, num_items: torch.Tensor, step: int) -> float:
    """Take one optimizer step of a training run, and return its seconds."""
    synchronize()
    began = clock()
    backward(trainer, batch, num_items, step)
    trainer.callback_handler.on_pre_optimizer_step(trainer.args, trainer.state, trainer.control)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    trainer.callback_handler.on_step_end(trainer.args, trainer.state, trainer.control)
    synchronize()
    return clock() - began


def random_ouro(preset: Preset) -> OuroForCausalLM:
    config = OuroConfig(
        vocab_size=preset.vocab_size,
        hidden_size=preset.hidden_size,
        intermediate_size=preset.intermediate_size,
        num_hidden_layers=preset.num_layers,
        num_attention_heads=preset.num_heads,
        num_loops=preset.num_loops,
        pad_token_id=0,
        dtype=preset.dtype,
    )
    return OuroForCausalLM(config).to(getattr(torch, preset.dtype))


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({str(token): token for token in range(vocab_size)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="0")


def draw_examples(preset: Preset, step: int) -> list[dict[str, list[int]]]:
    """Return a micro-batch of random tokens; the loss is on the second half of each example."""
    random = np.random.default_rng(step)
    lengths = np.exp(random.normal(np.log(preset.median_length), preset.length_spread, preset.batch))
    lengths = lengths.clip(64, 511) * preset.length_scale
    examples = []
    for length in lengths.round().astype(int):
        ids = random.integers(2, preset.vocab_size, length).tolist()
        examples.append({"input_ids": ids, "labels": [-100] * (length // 2) + ids[length // 2 :]})
    return examples


def frozen_share(preset: Preset, rounds: int, row: Row) -> float:
    """Return the share of all loops in the measured steps that come before an example's first active gate."""
    frozen = 0
    for step in range(1, rounds + 1):
        draw = Draw(SEED, step, [(index, 0) for index in range(preset.batch)], preset.num_loops)
        gates = row.trainer.rule.sample(draw)
        active = (gates.reshape(*gates.shape[:2], -1) != 0).any(dim=2)  # [K, N]
        frozen += int((active.cumsum(dim=0) == 0).sum())
    return frozen / (rounds * preset.batch * preset.num_loops)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clock() -> float:
    return time.perf_counter() if torch.cuda.is_available() else time.process_time()


def check_agreement(rows: dict[str, Row], preset: Preset, device: torch.device) -> dict[str, tuple[float, float]]:
    """Return each row's distance of loss and gradients from the first row of its kind, relative to that one's size.

    Raises:
        RuntimeError: if a row computes something else.
    """
    distances, references = {}, {}
    tolerance = 1e-4
    if preset.dtype != "float32":  # in bfloat16, rounding alone moves gradients by some percent
        tolerance = 0.3
    for name, row in rows.items():
        batch, num_items = row.prepare(draw_examples(preset, 0), device)
        loss, grads = row.backward(batch, num_items, 0).item(), row.gradients()
        kind = "LoRA" if name.startswith((STOCK, LORA)) else "Loop Dropout"
        want_loss, want = references.setdefault(kind, (loss, grads))
        distance = (abs(loss - want_loss) / abs(want_loss), ((grads - want).norm() / want.norm()).item())
        if max(distance) > tolerance:
            raise RuntimeError(f"{name!r} is {distance} off in loss and gradients; {tolerance} would be rounding.")
        distances[name] = distance
    return distances


def step_memory(row: Row, batch: dict, num_items: torch.Tensor, step: int) -> int:
    """Return the bytes that a run of this row alone holds at the peak of a step, with its weights and optimizer states."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        row.take_step(batch, num_items, step)
        added = torch.cuda.max_memory_allocated() - before
    else:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            row.take_step(batch, num_items, step)
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        added = max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    states = [t for s in row.trainer.optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    return added + sum(t.numel() * t.element_size() for t in [*row.model.parameters(), *states])


def measure(preset: Preset, rounds: int, rows: dict[str, Row], device: torch.device) -> dict[str, dict[str, list]]:
    """Return the seconds of each row's step in each round, and its memory where that is measured."""
    times = {name: [] for name in rows}
    memory = {name: [] for name in rows}
    tokens = []
    for step in range(-1, rounds):
        number = step % 1000 + 1
        examples = draw_examples(preset, number)
        names = list(rows)
        shift = step * 3 % len(names)
        for name in names[shift:] + names[:shift]:
            batch, num_items = rows[name].prepare(examples, device)
            seconds = rows[name].take_step(batch, num_items, number)
            if step >= 0:  # the first one warms up
                times[name].append(seconds)
        if step >= 0:
            tokens.append(sum(len(example["input_ids"]) for example in examples))
    longest = lambda step: max(len(example["input_ids"]) for example in draw_examples(preset, step))
    steps = range(1, rounds + 1) if device.type == "cuda" else [max(range(1, rounds + 1), key=longest)]
    for step in steps:
        for name, row in rows.items():
            batch, num_items = row.prepare(draw_examples(preset, step), device)
            memory[name].append(step_memory(row, batch, num_items, step))
    return {"times": times, "memory": memory, "tokens": tokens}


def summarize(preset: Preset, rows: dict[str, Row], measured: dict, distances: dict, peak: float | None) -> list[dict]:
    """Return one record for each row of the table."""
    work = flops_per_token(rows[LORA].model)
    tokens = statistics.median(measured["tokens"])
    records = []
    for name in rows:
        times = measured["times"][name]
        ratio = lambda other, times=times: _ratio(times, measured["times"][other])
        low, middle, high = statistics.quantiles(times, n=4)
        per_second = sum(measured["tokens"]) / sum(times)
        memory = measured["memory"][name]
        records.append(
            {
                "row": name,
                "step_seconds": middle,
                "step_seconds_quartiles": [low, high],
                "to_stock": ratio(STOCK),
                "to_lora": ratio(LORA),
                "tokens_per_step": tokens,
                "tokens_per_second": per_second,
                "flops_per_token": work,
                "flops_per_second": work * per_second,
                "share_of_peak": work * per_second / peak if peak else None,
                "memory_bytes": max(memory),  # a run needs that of its worst step
                "memory_to_stock": max(memory) / max(measured["memory"][STOCK]),
                "loss_distance": distances[name][0],
                "gradient_distance": distances[name][1],
            }
        )
    return records


def _ratio(times: list[float], others: list[float]) -> list[float]:
    """Return median and quartiles of the ratios of each round."""
    low, middle, high = statistics.quantiles([mine / theirs for mine, theirs in zip(times, others, strict=True)], n=4)
    return [middle, low, high]


def report(title: str, script: str, details: list[dict], table: Callable[[dict], list[str]]) -> str:
    """Return the tables of a script's presets that have been measured."""
    lines = [f"# {title}", ""]
    for record in details:
        lines += table(record)
    if "ouro-1.4b" not in {record["preset"] for record in details}:
        command = f"python benchmarks/{script} --preset ouro-1.4b"
        lines += ["## ouro-1.4b", "", f"Not yet measured on a GPU: `{command}`.", ""]
    return "\n".join(lines)


def table(details: dict) -> list[str]:
    """Return the lines of one preset's section."""
    shape, records, on_gpu = details["shape"], details["rows"], details["on_gpu"]
    work = "Share of peak" if records[0]["share_of_peak"] else "GFLOP/s"
    lines = [
        f"## {details['preset']}",
        "",
        f"`{details['command']}` on {details['device']}; {details['versions']}.",
        "",
        f"Random Ouro of {shape['num_layers']} layers, hidden size {shape['hidden_size']}, {shape['num_loops']} loops, "
        f"{shape['dtype']}; micro-batches of {shape['batch']} examples, lengths log-normal around "
        f"{shape['median_length'] * shape['length_scale']:.0f} ({records[0]['tokens_per_step']:.0f} tokens a step); "
        f"LoRA of rank 16 on all "
        f"projections of the recurrent block; p = 0.5. {records[0]['flops_per_token'] / 1e9:.3g} GFLOP a token by the "
        "formula 4 (K N + M) + 6 K R, which counts no loop as skipped.",
        "",
        f"Median of {details['rounds']} optimizer steps, with quartiles. A ratio is that of two steps on the same "
        "micro-batch. "
        + ("" if on_gpu else "Time is the process's own, on one thread. ")
        + "Tokens are counted without "
        f"padding. {_frozen(details)}Gradients are compared with those of the first row of the same rule, relative to their "
        "norm.",
        "",
        f"| | Step | to TRL + PEFT | to our LoRA | Tokens/s | {work} | Peak memory | Gradients off by |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in records:
        low, high = r["step_seconds_quartiles"]
        spread = lambda key, r=r: "{:.2f} ({:.2f} to {:.2f})".format(*r[key])
        rate = f"{r['share_of_peak']:.1%}" if r["share_of_peak"] else f"{r['flops_per_second'] / 1e9:.0f}"
        lines.append(
            f"| {r['row']} | {r['step_seconds'] * 1e3:.0f} ms ({low * 1e3:.0f} to {high * 1e3:.0f}) | {spread('to_stock')} "
            f"| {spread('to_lora')} | {r['tokens_per_second']:.0f} | {rate} | {r['memory_bytes'] / 2**20:.0f} MiB, "
            f"{r['memory_to_stock']:.2f} | {r['gradient_distance']:.0e} |"
        )
    return [*lines, ""]


def _frozen(details: dict) -> str:
    if details["frozen_share"] is None:
        return ""
    return (
        f"Of all loops in these steps {details['frozen_share']:.1%} came before an example's first active gate; 23.4% do in "
        "the long run. "
    )


def versions() -> str:
    modules = (torch, transformers, trl, peft, accelerate)
    return ", ".join(f"{module.__name__} {module.__version__}" for module in modules)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    for shape in fields(Preset):  # typed by the preset that they change
        parser.add_argument(
            f"--{shape.name}", help="default: the preset's", type=type(getattr(PRESETS["cpu"], shape.name))
        )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="TRL's and our LoRA always run")
    parser.add_argument("--memory", action="store_true", help="also measure gradient checkpointing")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    disable_progress_bars()
    changed = {f.name: value for f in fields(Preset) if (value := getattr(options, f.name)) is not None}
    preset = replace(PRESETS[options.preset], **changed)
    shape_name = "custom" if changed.keys() - {"rounds"} else options.preset
    rounds = preset.rounds
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    began = time.time()
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"one core of a CPU ({cpu_name()})"
    with tempfile.TemporaryDirectory() as folder:
        wanted = [row for row in ROWS if row in options.rows or row in (STOCK, LORA)]
        wanted += MEMORY_ROWS if options.memory else []
        rows = {row: Row(row, preset, folder, device) for row in wanted}
        for row in rows.values():
            row.share_frozen_weights(rows[STOCK])
        distances = check_agreement(rows, preset, device)
        measured = measure(preset, rounds, rows, device)
        peak = next((flops for chip, flops in PEAK_FLOPS.items() if chip in name), None)
        records = summarize(preset, rows, measured, distances, peak)
        options.out.mkdir(parents=True, exist_ok=True)
    details = {
        "preset": shape_name,
        "command": " ".join(["python benchmarks/speed.py", *sys.argv[1:]]),
        "device": name,
        "on_gpu": device.type == "cuda",
        "versions": versions(),
        "shape": asdict(preset),
        "rounds": rounds,
        "frozen_share": frozen_share(preset, rounds, rows[OURS]) if OURS in rows else None,
        "rows": records,
    }
    (options.out / f"speed_{shape_name}.json").write_text(json.dumps(details, indent=1) + "\n", encoding="utf-8")
    measured_presets = [options.out / f"speed_{preset}.json" for preset in (*PRESETS, "custom")]
    measured_details = [json.loads(file.read_text(encoding="utf-8")) for file in measured_presets if file.exists()]
    text = report("Speed and memory", "speed.py", measured_details, table)
    (options.out / "speed.md").write_text(text, encoding="utf-8")
    print(f"{text}\n{time.time() - began:.0f} s in all")


def cpu_name() -> str:
    """Return the processor's model name, or what the system says instead."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
    return named or platform.processor() or os.name


if __name__ == "__main__":
    main()
