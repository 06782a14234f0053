"""Step time and peak memory of every training rule relative to plain LoRA.

    python benchmarks/rules.py                        # writes benchmarks/results/rules.md
    python benchmarks/rules.py --hidden_size 2048 --num_layers 24 --batch 8 --length 256 --dtype bfloat16   # on a GPU

All rules train copies of one random Ouro in one process. In each round every rule takes one optimizer step, in an order
that is turned from round to round, and its time is divided by LoRA's in the same round: what else the machine does
then falls on all alike. Time is the process's own on a CPU, and the clock's on a GPU. Rounds are also the steps of a run,
so that rules that move over training are seen at all of it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import warnings
from pathlib import Path

import accelerate
import peft
import torch
import transformers
import trl
from datasets import Dataset
from speed import take_step
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedTokenizerFast

from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer, default_peft_config
from loopdropout_trainer.models import OuroConfig, OuroForCausalLM


VARIANTS = {  # row: fields of the config, fields of the adapter
    "LoRA": ({"rule": "lora"}, {}),
    "LoRA with input dropout": ({"rule": "lora"}, {"lora_dropout": 0.1}),
    "rsLoRA": ({"rule": "lora"}, {"use_rslora": True}),
    "LoRA+": ({"rule": "lora", "loraplus_lr_ratio": 4.0}, {}),
    "Loop Dropout": ({"rule": "loop_dropout"}, {}),
    "Unscaled": ({"rule": "unscaled"}, {}),
    "Dose control": ({"rule": "dose_control"}, {}),
    "Module-wise": ({"rule": "module_wise"}, {}),
    "Parallel noise": ({"rule": "parallel_noise"}, {}),
    "Low-rank weight noise": ({"rule": "weight_noise"}, {}),
    "Exactly two loops": ({"rule": "exactly_m"}, {}),
    "Random prefix": ({"rule": "random_prefix"}, {}),
    "Random suffix": ({"rule": "random_suffix"}, {}),
    "Schedule 0.75 to 0": ({"rule": "schedule"}, {}),
    "Adaptive": ({"rule": "adaptive"}, {}),
    "Learned gates": ({"rule": "learned"}, {}),
    "Learned gates + Loop Dropout": ({"rule": "learned", "p": 0.5}, {}),
    "Independent, equal budget": ({"rule": "independent"}, {"r": 4, "lora_alpha": 8}),
    "Independent, equal rank": ({"rule": "independent"}, {}),
    "Independent, equal rank, loop mask": ({"rule": "independent", "p": 0.5}, {}),
    "CoTo-on-Ouro": ({"rule": "coto"}, {}),
    "LoRA Dropout, four masks": ({"rule": "lora_dropout"}, {}),
}
REFERENCE = "LoRA"
MOVING = ("CoTo-on-Ouro",)  # whose cost changes over training: the mean over rounds says what a run costs


def main() -> None:
    options = parse_options()
    warnings.simplefilter("ignore")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trainers = {row: make_trainer(row, options, folder, device) for row in VARIANTS}
        batch, num_items = make_batch(options, device)

        memory = {}
        for row, trainer in trainers.items():
            take_step(trainer, batch, num_items, options.rounds // 2)  # warm, and optimizer states in place
            memory[row] = peak_memory(trainer, batch, num_items, options.rounds // 2)
        times = {row: [] for row in VARIANTS}
        for round_index in range(options.rounds):
            rows = list(VARIANTS)
            shift = round_index * 7 % len(rows)
            for row in rows[shift:] + rows[:shift]:
                times[row].append(take_step(trainers[row], batch, num_items, round_index))
        write_table(options, device, trainers, times, memory)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--num_layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="examples per step")
    parser.add_argument("--length", type=int, default=64, help="tokens per example")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "rules.md"))
    return parser.parse_args()


def make_trainer(row: str, options: argparse.Namespace, folder: str, device: torch.device) -> LoopDropoutSFTTrainer:
    fields, adapter = VARIANTS[row]
    torch.manual_seed(0)
    config = OuroConfig(
        vocab_size=512,
        hidden_size=options.hidden_size,
        intermediate_size=options.hidden_size * 11 // 4,
        num_hidden_layers=options.num_layers,
        num_attention_heads=max(options.hidden_size // 128, 2),
        pad_token_id=0,
    )
    model = OuroForCausalLM(config).to(getattr(torch, options.dtype))
    args = LoopDropoutConfig(
        output_dir=folder,
        max_steps=options.rounds,
        per_device_train_batch_size=options.batch,
        bf16=options.dtype == "bfloat16",
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        seed=101,
        **fields,
    )
    tokenizer = Tokenizer(WordLevel({str(token): token for token in range(512)}, unk_token="0"))
    trainer = LoopDropoutSFTTrainer(
        model,
        args,
        train_dataset=Dataset.from_list([{"input_ids": [1, 2], "labels": [1, 2]}] * options.batch),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="1", pad_token="0"),
        peft_config=default_peft_config(model, **adapter),
    )
    trainer.model.to(device).train()
    trainer.create_optimizer()
    trainer.state.max_steps = options.rounds
    return trainer


def make_batch(options: argparse.Namespace, device: torch.device) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 512, (options.batch, options.length), generator=generator).to(device)
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}, torch.tensor(ids[:, 1:].numel())


def peak_memory(trainer: LoopDropoutSFTTrainer, batch: dict, num_items: torch.Tensor, step: int) -> float:
    """Return the bytes of the model, of its optimizer's states, and of all that is alive at the worst moment of a step."""
    states = [
        tensor for state in trainer.optimizer.state.values() for tensor in state.values() if torch.is_tensor(tensor)
    ]
    resident = sum(tensor.numel() * tensor.element_size() for tensor in [*trainer.model.parameters(), *states])
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        take_step(trainer, batch, num_items, step)
        return resident + torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        take_step(trainer, batch, num_items, step)
    changes = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return resident + peak


def write_table(options, device, trainers, times, memory) -> None:
    name = torch.cuda.get_device_name() if device.type == "cuda" else "one CPU core, in CPU seconds"
    reference = statistics.median(times[REFERENCE])
    lines = [
        "# Cost of every training rule, relative to LoRA",
        "",
        f"`python benchmarks/rules.py` on {name}; torch {torch.__version__}, transformers {transformers.__version__}, "
        f"trl {trl.__version__}, peft {peft.__version__}, accelerate {accelerate.__version__}. Random Ouro of "
        f"{options.num_layers} layers, hidden size {options.hidden_size}, four loops, {options.dtype}; {options.batch} "
        f"examples of {options.length} tokens a step; rank 16 unless a row says otherwise.",
        "",
        f"Time: median over {options.rounds} rounds of a rule's optimizer step divided by LoRA's in the same round "
        f"(LoRA: {reference * 1e3:.0f} ms), with the quartiles; for CoTo the mean over a whole run. Memory: model, optimizer "
        f"states, and what is alive at the worst moment of a step (LoRA: {memory[REFERENCE] / 2**20:.1f} MiB).",
        "",
        "| Rule | Step time | quartiles | Peak memory | Trained parameters |",
        "|---|---:|---:|---:|---:|",
    ]
    for row, trainer in trainers.items():
        ratios = [mine / lora for mine, lora in zip(times[row], times[REFERENCE], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        middle = statistics.fmean(ratios) if row in MOVING else middle
        trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        spread = "" if row == REFERENCE else f"{low:.2f} to {high:.2f}"
        lines.append(f"| {row} | {middle:.2f} | {spread} | {memory[row] / memory[REFERENCE]:.2f} | {trained:,} |")
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join([*lines, ""]), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
