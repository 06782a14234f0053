"""Train the same tiny run in a layout of processes. `test_distributed.py` compares it with one process.

A run trains a random Ouro of two loops for three steps of eight examples. Each process writes a record
(`rank<r>.json`), and the first process writes the adapter. Only these files count, since a process group over gloo sometimes
aborts at exit.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from accelerate.commands import launch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from safetensors.torch import load_file
from transformers import TrainerCallback

from helpers.files import ROOT
from helpers.processes import CPU, ENVIRONMENT, Program, free_port, ranks
from helpers.tiny import tiny_ouro
from helpers.tokenizer import make_tokenizer
from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer, LoRADropoutSFTTrainer


ADAPTER = "adapter_model.safetensors"


@dataclass(frozen=True)
class Layout:
    """How the eight examples of a step are spread: the product of processes, batch and accumulation is 8."""

    launch_file: str  # in recipes/accelerate
    processes: int
    batch: int
    accumulation: int = 1
    distributed_type: str = "MULTI_CPU"  # accelerate's name


ZERO = ("zero2", "zero2_offload", "zero3", "zero3_offload")
LAYOUTS = {
    "ddp": Layout("ddp", 2, 4),
    "ddp, accumulation": Layout("ddp", 2, 2, 2),
    "ddp, four processes": Layout("ddp", 4, 2),
    "fsdp2": Layout("fsdp2", 2, 4, distributed_type="FSDP"),
    **{name: Layout(name, 2, 4, distributed_type="DEEPSPEED") for name in ZERO},
}


RUNS = {
    "plain": {"gradient_checkpointing": False},
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant asked for": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "packing": {"packing": True, "max_length": 32, "logging_steps": 2},  # the last step is not a logging step
    "saving": {"save_strategy": "steps", "save_steps": 2},
    "resuming": {},
}
"""Fields of each run of a launch. The last resumes the one before from its checkpoint of step 2."""

RULES = {
    "module_wise": {"rule": "module_wise"},
    "adaptive": {"rule": "adaptive", "rule_args": {"decay": 0.5}},
    "learned": {"rule": "learned", "p": 0.5},
    "independent": {"rule": "independent", "p": 0.5},
    "coto": {"rule": "coto", "rule_args": {"keep_start": 0.3}},
    "weight_noise": {"rule": "weight_noise"},
    "lora_dropout": {"rule": "lora_dropout", "rule_args": {"num_masks": 2}},
}
"""Runs of the rules that do more than draw one gate for each example and loop."""

_TWO_EPOCHS = {"max_steps": -1, "num_train_epochs": 2, "optim": "sgd", "learning_rate": 0.1}
UNEVEN = {
    "7 examples": {**_TWO_EPOCHS, "num_examples": 7},
    "5 examples": {**_TWO_EPOCHS, "num_examples": 5},
    "5 examples, micro-batches": {**_TWO_EPOCHS, "num_examples": 5, "loss_average": "micro_batches"},
    "packing, uneven": {**_TWO_EPOCHS, "num_examples": 30, "packing": True, "max_length": 40},
}
"""Runs whose epochs end with a step of fewer rows."""


@dataclass
class Run:
    """The record that `train` returned in each process of one run, and the saved weights."""

    records: list[dict]
    adapter: dict

    def distance(self, other: Run) -> float:
        """Largest difference of a weight, relative to the largest weight."""
        scale = max(tensor.abs().max().item() for tensor in other.adapter.values())
        return max((self.adapter[n].float() - t.float()).abs().max().item() for n, t in other.adapter.items()) / scale


def alone(folder: Path, runs: Sequence[str], **fields) -> dict[str, Run]:
    """Make runs in this process."""
    save_model(folder / "model", runs)
    records = {name: train(folder, name, **fields) for name in runs}
    return {name: Run([record], load_file(folder / name / ADAPTER)) for name, record in records.items()}


def launched(layout: Layout, folder: Path, runs: Sequence[str] = tuple(RUNS), **fields) -> dict[str, Run]:
    """Make runs in the processes of a layout. The end of the log explains a missing record."""
    for program in start(layout, folder, runs, **fields):
        program.wait()
    files = [folder / f"rank{rank}.json" for rank in range(layout.processes)]
    assert all(file.exists() for file in files), (folder / "log.txt").read_text()[-6000:]
    records = [json.loads(file.read_text()) for file in files]
    return {name: Run([record[name] for record in records], load_file(folder / name / ADAPTER)) for name in runs}


def start(layout: Layout, folder: Path, runs: Sequence[str], fresh: bool = False, **fields) -> list[Program]:
    """Start the processes of a layout. With `resume_from_checkpoint` in `fields` they continue from `folder`.

    They are forks with the environment that `accelerate launch` sets, or its new interpreters if `fresh`.
    """
    save_model(folder / "model", runs)
    batch = {"per_device_train_batch_size": layout.batch, "gradient_accumulation_steps": layout.accumulation}
    spec = {"layout": layout.launch_file, "folder": str(folder), "runs": list(runs), "fields": {**batch, **fields}}
    (folder / "spec.json").write_text(json.dumps(spec))
    program, output = ["-m", "helpers.layouts", "--work", str(folder / "spec.json")], folder / "log.txt"
    words = ["--config_file", str(ROOT / "recipes" / "accelerate" / f"{layout.launch_file}.yaml")]
    words += ["--num_processes", str(layout.processes), "--main_process_port", str(free_port()), *program]
    if fresh:
        env = {**ENVIRONMENT, "PYTHONPATH": os.environ["PYTHONPATH"]}  # where `helpers` is
        return [Program("-m", "accelerate.commands.launch", *words, output=output, env=env)]
    with patch("torch.distributed.run.run") as run:
        run.side_effect = lambda args: environments.extend(ranks(layout.processes, {**os.environ, **CPU}))
        environments = []
        launch.launch_command(launch.launch_command_parser().parse_args(words))
    return [Program(*program, output=output, env=env) for env in environments]


def work(spec: dict) -> None:
    """Make the runs of one of a layout's processes, and write its record."""
    if spec["layout"] == "fsdp2":
        _fsdp_on_a_cpu()
    if spec["layout"].startswith("zero"):
        import deepspeed

        # Do not compile an operator for sums in shared memory, which training over gloo does not use.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    folder = Path(spec["folder"])
    *names, last = spec["runs"]
    # Before the other trainers, as `compare_with` makes them.
    last_args = make_arguments(folder, last, **spec["fields"])
    record = {name: train(folder, name, **spec["fields"]) for name in names}
    record[last] = train(folder, last, last_args, **spec["fields"])
    (folder / f"rank{PartialState().process_index}.json").write_text(json.dumps(record))


class StepCounter(TrainerCallback):
    steps = 0  # without those before a checkpoint

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1


def make_arguments(folder: Path, name: str, **fields) -> LoopDropoutConfig:
    """Return the configuration of a run."""
    run_dir = folder / ("saving" if name == "resuming" else name) / "run"
    fields = {**_FIELDS, "output_dir": str(run_dir), **{**RUNS, **RULES, **UNEVEN}[name], **fields}
    fields.pop("num_examples", None)
    args = LoopDropoutConfig(**fields)
    # TRL 1.9 sets the device map "auto", which ZeRO-3 does not support.
    args.model_init_kwargs = {"dtype": "float32", "num_loops": 2, "device_map": None}
    return args


def train(folder: Path, name: str, args: LoopDropoutConfig | None = None, **fields) -> dict:
    """Train `folder / "model"` in this process, save its adapter in `folder / name`, and return what to record."""
    if args is None:
        args = make_arguments(folder, name, **fields)
    num_examples = {**RUNS, **RULES, **UNEVEN}[name].get("num_examples", 96)
    rows, held_out = examples().select(range(num_examples)), examples().select(range(80, 89))
    trainer_class = LoRADropoutSFTTrainer if name == "lora_dropout" else LoopDropoutSFTTrainer
    trainer = trainer_class(str(folder / "model"), args, train_dataset=rows, eval_dataset=held_out)
    if trainer.is_deepspeed_enabled:  # else ZeRO-3 divides nothing of a tiny model; norms stay whole
        zero = trainer.accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        zero["stage3_param_persistence_threshold"] = 100
    trainer.add_callback(counter := StepCounter())
    resume = str(Path(args.output_dir, "checkpoint-2")) if name == "resuming" else bool(args.resume_from_checkpoint)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / name))
    parameters = list(trainer.model.parameters())  # under ZeRO-3 each process holds a part of each
    held = sum(getattr(parameter, "ds_tensor", parameter).numel() for parameter in parameters)
    record = {
        "distributed_type": trainer.accelerator.distributed_type.value,
        "world_size": trainer.accelerator.num_processes,
        "share_of_weights": held / sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "train_loss": trainer.state.log_history[-1]["train_loss"],
        "steps": counter.steps,
        "gate_mean": [entry["gate_mean"] for entry in trainer.state.log_history if "gate_mean" in entry],
        "num_tokens": [entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry],
    }
    metrics = trainer.evaluate()
    return record | {name: metrics[name] for name in ("eval_loss", "eval_mean_token_accuracy")}


_FIELDS = {
    "adam_epsilon": 1e-4,  # AdamW divides a gradient by its own size: rounding would become a step of full length
    "max_steps": 3, "learning_rate": 1e-2, "per_device_eval_batch_size": 2, "logging_steps": 1, "save_strategy": "no",
    "report_to": "none", "bf16": False, "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False,
}  # fmt: skip


def save_model(folder: Path, runs: Sequence[str]) -> None:
    """Write a random Ouro, which has two layers for the rules that tell layers apart, and a tokenizer of bytes."""
    layers = 2 if RULES.keys() & {*runs} else 1
    tiny_ouro(num_hidden_layers=layers).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def examples():
    """Return 96 prompts, no two alike, with completions of different lengths: enough for three steps when packed."""
    return Dataset.from_list([{"prompt": f"{i}+{i % 7}", "completion": "=" + "x" * (i % 5 + 1)} for i in range(96)])


def _fsdp_on_a_cpu() -> None:
    """Make accelerate run FSDP on a CPU, which it ignores otherwise; for measurements only."""
    original = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = init


if __name__ == "__main__":
    work(json.loads(Path(sys.argv[2]).read_text()))
    sys.stdout.flush()
    os._exit(0)  # because gloo sometimes aborts at the end
