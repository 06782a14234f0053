"""The models, batches and steps that the benchmarks measure, and the clock and versions that their pages name."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import peft
import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import PreTrainedTokenizerFast, Trainer
from trl import SFTConfig, SFTTrainer

from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer, default_peft_config
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


def versions() -> str:
    modules = (torch, transformers, trl, peft, accelerate)
    return ", ".join(f"{module.__name__} {module.__version__}" for module in modules)


def cpu_name() -> str:
    """Return the processor's model name, or what the system says instead."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
    return named or platform.processor() or os.name
