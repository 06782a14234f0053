"""Train the same tiny run in every layout, on two CPU cores, and compare what each promises.

    python benchmarks/layouts.py                      # writes benchmarks/results/layouts.md
    python benchmarks/layouts.py --layouts ddp zero3

A run trains a random two-layer Ouro of four loops for four steps of eight examples. The reference is one process with
batch 8. Each process of a layout writes what it saw (`rank<r>.json`), and the first one the adapter; only these files are
judged, since a process group over gloo sometimes aborts at exit. ZeRO needs deepspeed and a C++ compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil


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
"""Runs of the rules that do more than draw one gate for each example and loop; not part of the table."""

DEPTHS = {
    "random depth": {"depth_sampling": "weighted", "depth_sampling_args": {"depths": [2, 5]}},
    "random depth, all loops": {
        "depth_sampling": "weighted",
        "depth_sampling_args": {"depths": [2, 5]},
        "loop_loss": "exit",
    },
}
"""Runs whose depth is drawn for each step; not part of the table."""

_TWO_EPOCHS = {"max_steps": -1, "num_train_epochs": 2}
UNEVEN = {
    "5 of 8": {**_TWO_EPOCHS, "num_examples": 21},
    "1 of 8": {**_TWO_EPOCHS, "num_examples": 17},
    "packing, uneven": {**_TWO_EPOCHS, "num_examples": 70, "packing": True, "max_length": 40},
}
"""Runs whose epochs end with a step of fewer rows; not part of the table."""

_ONE_STEP = {"max_steps": 1, "learning_rate": 0.0}
EVALUATIONS = {
    "evaluation": {**_ONE_STEP, "eval_rows": 7},
    "padding-free evaluation": {**_ONE_STEP, "eval_rows": 7, "padding_free": True, "max_length": None},
}
"""Runs whose last step is an evaluation on so many rows; not part of the table."""

PREFERENCES = "evaluation of pairs"
"""A run of DPO with a random adapter, of which nothing but the evaluation counts; not part of the table."""


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


def launch(
    layout: Layout, folder: Path, runs: Sequence[str] = tuple(RUNS), timeout: float = 300, **fields
) -> dict[str, Run]:
    """Make runs in a layout, in processes of its own, and read what they wrote.

    Args:
        folder: for its files; emptied first.
        runs: keys of `RUNS`.
        timeout: in seconds, for all runs together.
        fields: of `LoopDropoutConfig`, for all runs; `dtype` for that of the base model.

    Raises:
        RuntimeError: with the end of the log, if a process did not finish all runs.
    """
    process = start(layout, folder, runs, **fields)
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        kill(process)
    return read(layout, folder, runs)


def read(layout: Layout, folder: Path, runs: Sequence[str]) -> dict[str, Run]:
    """Read what the processes of a launch wrote; RuntimeError as there."""
    files = [folder / f"rank{rank}.json" for rank in range(layout.processes)]
    if not all(file.exists() for file in files):
        finished = sum(file.exists() for file in files)
        raise RuntimeError(
            f"{finished} of {len(files)} processes finished:\n{(folder / 'log.txt').read_text()[-6000:]}"
        )
    records = [json.loads(file.read_text()) for file in files]
    return {name: Run([record[name] for record in records], _adapter(folder / name)) for name in runs}


def start(layout: Layout, folder: Path, runs: Sequence[str], **fields) -> subprocess.Popen:
    """Start the processes of `launch`; with `resume_from_checkpoint` in `fields` they go on with what is in `folder`."""
    spec = write_spec(layout, folder, runs, **fields)
    command = [sys.executable]
    if layout.launch_file is not None:
        command += ["-m", "accelerate.commands.launch"]
        command += ["--config_file", str(LAUNCH_FILES / f"{layout.launch_file}.yaml")]
        command += ["--num_processes", str(layout.processes), "--main_process_port", str(_free_port())]
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


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _adapter(folder: Path) -> dict:
    from safetensors.torch import load_file

    file = folder / "adapter_model.safetensors"
    return load_file(file) if file.exists() else {}


def work(spec: dict) -> None:
    """Make the runs of one of a layout's processes, and write its record."""
    if spec["layout"] == "fsdp2":
        _fsdp_on_a_cpu()
    import torch
    from accelerate import PartialState

    torch.set_num_threads(1)
    folder = Path(spec["folder"])
    record = {name: train(folder, name, **spec["fields"]) for name in spec["runs"]}
    file = folder / f"rank{PartialState().process_index}.json"
    file.with_suffix(".partial").write_text(json.dumps(record))
    os.replace(file.with_suffix(".partial"), file)


def train(folder: Path, name: str, dtype: str = "float32", **fields) -> dict:
    """Train `folder / "model"` in this process, save its adapter in `folder / name`, and return what to record."""
    from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer

    if name == PREFERENCES:
        return evaluate_pairs(folder, **fields)
    steps, gates = [], {}

    class RecordingTrainer(LoopDropoutSFTTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            steps.append(self.state.global_step)
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            state = self.loop_state
            if self.model.training and state.gates is not None:  # None: all ones, in the whole micro-batch
                rows = inputs["input_ids"]
                texts = rows.tolist() if state.batch.segments is None else _texts(rows, state.batch.segments)
                by_example = state.gates.transpose(0, 1).expand(len(texts), *[-1] * (state.gates.dim() - 1))
                for text, drawn in zip(texts, by_example.tolist(), strict=True):
                    gates[f"{self.state.global_step}: {''.join(map(chr, (t for t in text if t > 1)))}"] = drawn
            return loss

    run_dir = folder / ("saving" if name == "resuming" else name) / "run"
    fields = {
        **_FIELDS,
        "output_dir": str(run_dir),
        **{**RUNS, **RULES, **DEPTHS, **UNEVEN, **EVALUATIONS}[name],
        **fields,
    }
    rows = examples().select(range(fields.pop("num_examples", 192)))
    eval_rows = examples().select(range(100, 100 + fields.pop("eval_rows", 1)))
    args = LoopDropoutConfig(**fields)
    args.model_init_kwargs = {"dtype": dtype}
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
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "eval_loss": trainer.evaluate()["eval_loss"] if name in EVALUATIONS else None,
        "gates": gates,
    }


def evaluate_pairs(folder: Path, **fields) -> dict:
    """Evaluate a random adapter on seven pairs by `LoopDropoutDPOTrainer`, and return its loss."""
    import torch

    from loopdropout_trainer import LoopDropoutDPOConfig, LoopDropoutDPOTrainer, default_peft_config
    from loopdropout_trainer.models import OuroForCausalLM

    rows = examples().select(range(7)).rename_column("completion", "chosen")
    pairs = rows.map(lambda row: {"rejected": row["chosen"][::-1] + "y"})
    model = OuroForCausalLM.from_pretrained(folder / "model")
    adapter = default_peft_config(model, init_lora_weights=False)
    torch.manual_seed(0)
    args = LoopDropoutDPOConfig(str(folder / PREFERENCES), **{**_FIELDS, **fields})
    trainer = LoopDropoutDPOTrainer(model, args=args, train_dataset=pairs, eval_dataset=pairs, peft_config=adapter)
    return {"eval_loss": trainer.evaluate()["eval_loss"]}


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
    import torch
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

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
    OuroForCausalLM(config).save_pretrained(folder)
    vocab = {"<eos>": 0, "<pad>": 1}
    vocab.update({byte: index + 2 for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))})
    backend = Tokenizer(BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)


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


def measure(name: str, folder: Path, reference: dict[str, Run] | None) -> tuple[dict[str, Run], list[str]]:
    """Launch a layout and return its runs and its row of the table."""
    layout = LAYOUTS[name]
    began = time.time()
    try:
        runs = launch(layout, folder, timeout=900)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return {}, [name, "did not finish", *[""] * 7]
    seconds = time.time() - began
    reference = reference or runs
    records = runs["plain"].records
    kinds = {(record["distributed_type"], record["world_size"]) for record in records}
    as_asked = kinds == {(layout.distributed_type, layout.processes)}
    far = lambda run, other: f"{runs[run].distance(other):.0e}"
    same_gates = all(runs[run].gates == reference[run].gates for run in runs)
    return runs, [
        name,
        f"{layout.distributed_type} x {layout.processes}" if as_asked else f"WRONG: {kinds}",
        f"{'yes' if same_gates else 'NO'} ({sum(len(run.gates) for run in runs.values())})",
        far("plain", reference["plain"]),
        far("checkpointing", runs["plain"]),
        far("reentrant asked for", runs["plain"]),
        far("packing", reference["packing"]),
        far("resuming", runs["saving"]),
        f"{seconds:.0f} s",
    ]


_HEADER = [
    "layout",
    "processes found",
    "same gates (examples)",
    "weights: reference",
    "checkpointing: without",
    "reentrant asked for: without",
    "packing: reference, packed",
    "resumed at step 2: uninterrupted",
    "time",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "layouts.md")
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    rows, reference = [], None
    with tempfile.TemporaryDirectory() as folder:
        control = launch(LAYOUTS[REFERENCE], Path(folder) / "control", ["plain"], gate_seed=1)["plain"]
        for name in dict.fromkeys([REFERENCE, *options.layouts]):
            runs, row = measure(name, Path(folder) / name.replace(" ", "_"), reference)
            reference = reference or runs
            rows.append(row)
            print(" | ".join(row), flush=True)
            options.output.write_text(_report(rows, control.distance(reference["plain"])))


def _report(rows: list[list[str]], control: float) -> str:
    import accelerate
    import torch
    import transformers
    import trl

    try:
        import deepspeed

        zero = f", deepspeed {deepspeed.__version__}"
    except ImportError:
        zero = ""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, trl {trl.__version__}, "
    versions += f"accelerate {accelerate.__version__}{zero}"
    table = "\n".join(f"| {' | '.join(row)} |" for row in [_HEADER, ["---"] * len(_HEADER), *rows])
    return (
        "# The same run in every layout\n\nWritten by `python benchmarks/layouts.py`: processes over gloo on a CPU "
        f"({versions}). A random two-layer Ouro of four loops is trained for four steps of eight examples with Loop Dropout, "
        "AdamW and TRL's token-weighted loss. Numbers are the largest difference of an adapter weight from the run that is "
        "named after the colon, relative to the largest weight; rounding alone gives about 1e-5, "
        f'and other gates {control:.0e}. "Same gates" compares the gates of every '
        "example, step and run with the reference's.\n\n"
        f"{table}\n\nFSDP2 runs on a CPU through a patch of accelerate that only this script makes; CUDA was not measured.\n"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(json.loads(Path(sys.argv[2]).read_text()))
        sys.stdout.flush()
        os._exit(0)  # tearing down gloo sometimes aborts
    main()
