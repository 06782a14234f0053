"""Train the same tiny run in every layout, on two CPU cores, and compare what each promises.

    python benchmarks/layouts.py                      # writes benchmarks/results/layouts.md
    python benchmarks/layouts.py --layouts ddp zero3

A run trains a random two-layer Ouro of four loops on eight examples a step. The reference is one process with batch 8.
Each process of a layout writes what it saw (`rank<r>.json`), and the first one the adapter; only these files are judged,
since a process group over gloo sometimes aborts at exit. ZeRO needs deepspeed and a C++ compiler.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path


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
    "one process, accumulation 2x4": Layout("one_gpu", 1, 4, 2, distributed_type="NO"),
    "ddp": Layout("ddp", 2, 4),
    "ddp, accumulation": Layout("ddp", 2, 2, 2),
    "ddp, four processes": Layout("ddp", 4, 2),
    "zero2": Layout("zero2", 2, 4, distributed_type="DEEPSPEED"),
    "zero2_offload": Layout("zero2_offload", 2, 4, distributed_type="DEEPSPEED"),
    "zero3": Layout("zero3", 2, 4, distributed_type="DEEPSPEED"),
    "zero3_offload": Layout("zero3_offload", 2, 4, distributed_type="DEEPSPEED"),
    "fsdp2": Layout("fsdp2", 2, 4, distributed_type="FSDP"),
}
REFERENCE = "one process, batch 8"


@dataclass
class Outcome:
    """What a launch left behind: one record for each process, the adapter's weights, and the launcher's last words."""

    records: list[dict]
    adapter: dict = field(default_factory=dict)
    log: str = ""

    @property
    def gates(self) -> dict[str, list[float]]:
        """Gates of each example of each step, from all processes."""
        return {key: gates for record in self.records for key, gates in record["gates"].items()}


def launch(layout: Layout, folder: Path, fields: dict | None = None, timeout: float = 240, **options) -> Outcome:
    """Run a layout in processes of its own and read what it wrote.

    Args:
        folder: for its files; a run that finds checkpoints there can resume with `resume=True`.
        fields: of `LoopDropoutConfig`.
        options: `resume`, `packing`, `dtype`, see `work`.

    Raises:
        RuntimeError: with the end of the log, if a process left no record.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("rank*.json"):
        old.unlink()
    spec = folder / "spec.json"
    batch = {"per_device_train_batch_size": layout.batch, "gradient_accumulation_steps": layout.accumulation}
    spec.write_text(
        json.dumps(
            {"layout": layout.launch_file, "folder": str(folder), "fields": {**batch, **(fields or {})}, **options}
        )
    )
    command = [sys.executable]
    if layout.launch_file is not None:
        command += [
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            str(LAUNCH_FILES / f"{layout.launch_file}.yaml"),
        ]
        command += ["--num_processes", str(layout.processes), "--main_process_port", str(_free_port())]
    command += [str(Path(__file__).resolve()), "--work", str(spec)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    log = folder / "log.txt"
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
    text = log.read_text()
    files = [folder / f"rank{rank}.json" for rank in range(layout.processes)]
    if not all(file.exists() for file in files):
        raise RuntimeError(f"{layout} left {sum(f.exists() for f in files)} of {len(files)} records:\n{text[-4000:]}")
    return Outcome([json.loads(file.read_text()) for file in files], _adapter(folder / "adapter"), text)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _adapter(folder: Path) -> dict:
    from safetensors.torch import load_file

    file = folder / "adapter_model.safetensors"
    return load_file(file) if file.exists() else {}


def work(spec: dict) -> None:
    """Train in this process, one of a layout's, and write its record."""
    if spec["layout"] == "fsdp2":
        _fsdp_on_a_cpu()
    import torch
    from accelerate.utils import DistributedType  # noqa: F401
    from safetensors.torch import save_file  # noqa: F401

    from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer

    torch.set_num_threads(1)
    folder = Path(spec["folder"])
    args = LoopDropoutConfig(**{**_FIELDS, "output_dir": str(folder / "run"), **spec["fields"]})

    gates = {}

    class RecordingTrainer(LoopDropoutSFTTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            rows = inputs["input_ids"].tolist()
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            if self.model.training and self.loop_state.segments is None:
                drawn = self.loop_state.gates
                for index, row in enumerate(rows):
                    name = f"{self.state.global_step}:{''.join(chr(t) for t in row if t > 1)}"
                    gates[name] = [1.0] * self.num_loops if drawn is None else drawn[:, index].tolist()
            return loss

    trainer = RecordingTrainer(
        tiny_model(getattr(torch, spec.get("dtype", "float32"))),
        args,
        train_dataset=examples(),
        processing_class=byte_tokenizer(),
    )
    plugin = trainer.accelerator.state.deepspeed_plugin if trainer.is_deepspeed_enabled else None
    if plugin is not None and plugin.zero_stage == 3:  # else nothing of a tiny model is divided
        plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    trainer.train(resume_from_checkpoint=spec.get("resume", False))
    trainer.save_model(str(folder / "adapter"))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    record = {
        "distributed_type": trainer.accelerator.distributed_type.value,
        "world_size": trainer.accelerator.num_processes,
        "losses": losses,
        "gates": gates,
        "first_step": min((int(name.split(":")[0]) for name in gates), default=None),
    }
    rank = trainer.accelerator.process_index
    (folder / f"rank{rank}.tmp").write_text(json.dumps(record))
    os.replace(folder / f"rank{rank}.tmp", folder / f"rank{rank}.json")


_FIELDS = {
    "max_steps": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "bf16": False,
    "use_cpu": True,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


def tiny_model(dtype):
    """Return a random Ouro of two layers and four loops."""
    import torch

    from loopdropout_trainer.models import OuroConfig, OuroForCausalLM

    torch.manual_seed(0)
    config = OuroConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        pad_token_id=1,
    )
    return OuroForCausalLM(config).to(dtype)


def examples():
    """Return 48 prompts with completions of different lengths."""
    from datasets import Dataset

    return Dataset.from_list([{"prompt": f"{i}+{i % 7}", "completion": "=" + "x" * (i % 5 + 1)} for i in range(48)])


def byte_tokenizer():
    """Return a tokenizer with one token for each byte; it needs no file."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    vocab = {"<eos>": 0, "<pad>": 1}
    vocab.update({byte: index + 2 for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))})
    backend = Tokenizer(BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


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


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(json.loads(Path(sys.argv[2]).read_text()))
        sys.stdout.flush()
        os._exit(0)  # tearing down gloo sometimes aborts
