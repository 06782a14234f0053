"""Train the same tiny run in a layout of processes. `test_distributed.py` compares it with one process.

A run trains a random two-layer Ouro of four loops for four steps of eight examples. Each process writes a record
(`rank<r>.json`), and the first process writes the adapter. Only these files count, since a process group over gloo sometimes
aborts at exit.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from processes import free_port


ROOT = Path(__file__).resolve().parents[1]
LAUNCH_FILES = ROOT / "recipes" / "accelerate"


@dataclass(frozen=True)
class Layout:
    """How the eight examples of a step are spread.

    Attributes:
        launch_file: in recipes/accelerate, or None for a plain process.
        processes, batch, accumulation: their product is 8.
        distributed_type: what accelerate must call it.
    """

    launch_file: str | None
    processes: int
    batch: int
    accumulation: int = 1
    distributed_type: str = "MULTI_CPU"


LAYOUTS = {
    "one process, batch 8": Layout(None, 1, 8, distributed_type="NO"),
    "ddp": Layout("ddp", 2, 4),
    "ddp, accumulation": Layout("ddp", 2, 2, 2),
    "ddp, four processes": Layout("ddp", 4, 2),
    "zero2": Layout("zero2", 2, 4, distributed_type="DEEPSPEED"),
    "zero2_offload": Layout("zero2_offload", 2, 4, distributed_type="DEEPSPEED"),
    "zero3": Layout("zero3", 2, 4, distributed_type="DEEPSPEED"),
    "zero3_offload": Layout("zero3_offload", 2, 4, distributed_type="DEEPSPEED"),
    "fsdp2": Layout("fsdp2", 2, 4, distributed_type="FSDP"),
}


RUNS = {
    "plain": {"gradient_checkpointing": False},
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant asked for": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "packing": {"packing": True, "max_length": 32},
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

_TWO_EPOCHS = {"max_steps": -1, "num_train_epochs": 2}
UNEVEN = {
    "5 of 8": {**_TWO_EPOCHS, "num_examples": 13},
    "1 of 8": {**_TWO_EPOCHS, "num_examples": 9},
    "packing, uneven": {**_TWO_EPOCHS, "num_examples": 70, "packing": True, "max_length": 40},
}
"""Runs whose epochs end with a step of fewer rows."""

_ONE_STEP = {"max_steps": 1, "learning_rate": 0.0}
EVALUATIONS = {
    "evaluation": {**_ONE_STEP, "eval_rows": 7},
    "padding-free evaluation": {**_ONE_STEP, "eval_rows": 7, "padding_free": True, "max_length": None},
}
"""Runs whose last step is an evaluation on so many rows."""


@dataclass
class Run:
    """What the processes of one run recorded, and its adapter.

    Attributes:
        records: of each process: distributed_type, world_size, first_step, losses, gates.
        adapter: the saved weights by name.
    """

    records: list[dict]
    adapter: dict

    @property
    def gates(self) -> dict[str, list[float]]:
        """Gates [K] of each example of each step, from all processes."""
        return {name: gates for record in self.records for name, gates in record["gates"].items()}

    def distance(self, other: Run) -> float:
        """Largest difference of a weight, relative to the largest weight."""
        scale = max(tensor.abs().max().item() for tensor in other.adapter.values())
        return max((self.adapter[n].float() - t.float()).abs().max().item() for n, t in other.adapter.items()) / scale


def read(layout: Layout, folder: Path, runs: Sequence[str]) -> dict[str, Run]:
    """Read the records and adapters of a layout. The end of the log explains a missing record."""
    files = [folder / f"rank{rank}.json" for rank in range(layout.processes)]
    assert all(file.exists() for file in files), (folder / "log.txt").read_text()[-6000:]
    records = [json.loads(file.read_text()) for file in files]
    return {name: Run([record[name] for record in records], _adapter(folder / name)) for name in runs}


def start(layout: Layout, folder: Path, runs: Sequence[str], **fields) -> subprocess.Popen:
    """Start the processes of a layout; with `resume_from_checkpoint` in `fields` they go on with what is in `folder`."""
    spec = write_spec(layout, folder, runs, **fields)
    command = [sys.executable]
    if layout.launch_file is not None:
        command += ["-m", "accelerate.commands.launch"]
        command += ["--config_file", str(LAUNCH_FILES / f"{layout.launch_file}.yaml")]
        command += ["--num_processes", str(layout.processes), "--main_process_port", str(free_port())]
    command += [str(Path(__file__).resolve()), "--work", str(spec)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    with (folder / "log.txt").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def write_spec(layout: Layout, folder: Path, runs: Sequence[str], **fields) -> Path:
    """Write the model, unless it is there to resume, and what each process is to do; return the file that `--work` reads."""
    if not fields.get("resume_from_checkpoint"):
        shutil.rmtree(folder, ignore_errors=True)
        save_model(folder / "model")
    batch = {"per_device_train_batch_size": layout.batch, "gradient_accumulation_steps": layout.accumulation}
    spec = {"layout": layout.launch_file, "folder": str(folder), "runs": list(runs), "fields": {**batch, **fields}}
    (folder / "spec.json").write_text(json.dumps(spec))
    return folder / "spec.json"


def kill(process: subprocess.Popen) -> None:
    """Kill a launch, workers first: they are in process groups of their own."""
    for worker in psutil.Process(process.pid).children(recursive=True):
        worker.kill()
    process.kill()
    process.wait()


def _adapter(folder: Path) -> dict:
    from safetensors.torch import load_file

    file = folder / "adapter_model.safetensors"
    return load_file(file) if file.exists() else {}


def work(spec: dict) -> None:
    """Make the runs of one of a layout's processes, and write its record."""
    if spec["layout"] == "fsdp2":
        _fsdp_on_a_cpu()
    if spec["layout"] and spec["layout"].startswith("zero"):
        _deepspeed_over_gloo()
    import torch
    from accelerate import PartialState

    torch.set_num_threads(1)
    folder = Path(spec["folder"])
    record = {name: train(folder, name, **spec["fields"]) for name in spec["runs"]}
    file = folder / f"rank{PartialState().process_index}.json"
    file.with_suffix(".partial").write_text(json.dumps(record))
    os.replace(file.with_suffix(".partial"), file)


def train(folder: Path, name: str, dtype: str = "float32", num_loops: int = 4, **fields) -> dict:
    """Train `folder / "model"` in this process, save its adapter in `folder / name`, and return what to record."""
    from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer
    from loopdropout_trainer.lora_dropout import LoRADropoutSFTTrainer

    steps, gates = [], {}

    trainer_class = LoRADropoutSFTTrainer if name == "lora_dropout" else LoopDropoutSFTTrainer

    class RecordingTrainer(trainer_class):
        def draw_gates(self, inputs):
            super().draw_gates(inputs)
            steps.append(self.state.global_step)
            batch, rows = self.gates.batch, inputs["input_ids"]
            if batch.gates is not None:  # None: all gates of the micro-batch are one
                texts = rows.tolist() if batch.segments is None else _texts(rows, batch.segments)
                by_example = batch.gates.transpose(0, 1).expand(len(texts), *[-1] * (batch.gates.dim() - 1))
                for text, drawn in zip(texts, by_example.tolist(), strict=True):
                    gates[f"{self.state.global_step}: {''.join(map(chr, (t for t in text if t > 1)))}"] = drawn

    run_dir = folder / ("saving" if name == "resuming" else name) / "run"
    fields = {
        **_FIELDS,
        "output_dir": str(run_dir),
        **{**RUNS, **RULES, **UNEVEN, **EVALUATIONS}[name],
        **fields,
    }
    rows = examples().select(range(fields.pop("num_examples", 192)))
    eval_rows = examples().select(range(100, 100 + fields.pop("eval_rows", 1)))
    args = LoopDropoutConfig(**fields)
    # TRL 1.9 sets the device map "auto", which ZeRO-3 does not support.
    args.model_init_kwargs = {"dtype": dtype, "num_loops": num_loops, "device_map": None}
    trainer = RecordingTrainer(str(folder / "model"), args, train_dataset=rows, eval_dataset=eval_rows)
    if trainer.is_deepspeed_enabled:  # else ZeRO-3 divides nothing of a tiny model
        zero = trainer.accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        zero["stage3_param_persistence_threshold"] = 0
    resume = str(run_dir / "checkpoint-2") if name == "resuming" else bool(args.resume_from_checkpoint)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / name))
    return {
        "distributed_type": trainer.accelerator.distributed_type.value,
        "world_size": trainer.accelerator.num_processes,
        "first_step": steps[0],
        "share_of_weights": _held(trainer.model),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "train_loss": trainer.state.log_history[-1]["train_loss"],
        "eval_loss": trainer.evaluate()["eval_loss"] if name in EVALUATIONS else None,
        "gates": gates,
    }


def _held(model) -> float:
    """Return the share of a model's parameters that this process holds; under ZeRO-3 a part of each."""
    held = sum(p.ds_tensor.numel() if hasattr(p, "ds_tensor") else p.numel() for p in model.parameters())
    return held / sum(p.ds_numel if hasattr(p, "ds_numel") else p.numel() for p in model.parameters())


def _texts(rows, segments) -> list[list[int]]:
    """Return the tokens of each example packed in `rows` [1, S]."""
    return [rows[segments == index].tolist() for index in range(int(segments.max()) + 1)]


_FIELDS = {
    "max_steps": 4,
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-4,  # AdamW divides a gradient by its own size: rounding would become a step of full length
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "bf16": False,
    "use_cpu": True,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


def save_model(folder: Path) -> None:
    """Write a random Ouro of two layers and four loops, and a tokenizer with one token for each byte."""
    from conftest import byte_tokenizer, tiny_ouro

    tiny_ouro().save_pretrained(folder)
    byte_tokenizer(["<eos>", "<pad>"], eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)


def examples():
    """Return 192 prompts, no two alike, with completions of different lengths: enough for four steps when packed."""
    from datasets import Dataset

    return Dataset.from_list([{"prompt": f"{i}+{i % 7}", "completion": "=" + "x" * (i % 5 + 1)} for i in range(192)])


def _fsdp_on_a_cpu() -> None:
    """Make accelerate run FSDP on a CPU, which it ignores otherwise; for measurements only."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    original = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = init


def _deepspeed_over_gloo() -> None:
    """Keep DeepSpeed from compiling an operator for sums in shared memory, which training over gloo does not use."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


if __name__ == "__main__":
    work(json.loads(Path(sys.argv[2]).read_text()))
    sys.stdout.flush()
    os._exit(0)  # because gloo sometimes aborts at the end
