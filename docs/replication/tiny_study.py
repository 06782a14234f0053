"""A study on tiny base models: pretrain them, train and measure the runs of its plan, and keep its results in one file.

A study is a `Design`, and its script calls `main`:

    python docs/replication/SCRIPT pretrain   # the base models that do not exist yet
    python docs/replication/SCRIPT run        # the runs that do not exist yet
    python docs/replication/SCRIPT collect    # finished runs -> the file of results
    python docs/replication/SCRIPT restore    # the file of results -> finished runs
    python docs/replication/SCRIPT analyze    # the file of results -> the page of the study

`pretrain` and `run` continue where they stopped, and several processes may work in one folder. A killed process loses one
training. The file has one line for each base model (`base`, `sha256` and, in newer studies, the `machine` that made it) and
one line for each run: the fields of `Run`, `frozen_loss` and `held_out_loss` in nats, `rho` by loop in percent, `accuracy` in
percent by task and depth, `solved` with one bit for each problem after a leading 1, as hexadecimal digits, and `cpu_seconds`.

The bytes of a base model depend on the processor. So a base model is compared with its line before each run.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from loopdropout_trainer.errors import UserError, run_script


HERE = Path(__file__).parent
NUM_DEVELOPMENT = 200
"""Number of held-out problems that choose the learning rate."""


class Problems(NamedTuple):
    """Test problems of `arithmetic_problems`: the split, the fewest and most steps, and the part that a study uses."""

    split: str
    steps: tuple[int, int] = (1, 3)
    first: int = 0
    number: int = 300


@dataclass(frozen=True)
class Design:
    """The runs and measurements of a study.

    Attributes:
        results: File of the results, `.jsonl.gz`.
        bases: Base models as KIND_SEED, in their order.
        methods: Fields of the training arguments by method.
        learning_rates: Learning rates, each half of the next one.
        selection_seed: Seed of the runs that choose the learning rates.
        seeds: Seeds of the compared runs.
        problems: Test problems by task.
        depths: Numbers of loops at which a compared run is measured.
        measures_training: Whether the accuracy on the training problems is measured, too.
        most_extensions: Number of learning rates that may be added for a method and base model, one at a time, while the best
            one is the lowest or the highest.
    """

    results: Path
    bases: list[str]
    methods: Mapping[str, Mapping[str, Any]]
    learning_rates: tuple[float, ...]
    selection_seed: int
    seeds: tuple[int, ...]
    problems: Mapping[str, Problems]
    depths: tuple[int, ...]
    measures_training: bool = False
    most_extensions: int = 0

    def read_lines(self) -> list[dict]:
        """Return the lines of the file of results."""
        if not self.results.exists():
            return []
        return [json.loads(line) for line in gzip.decompress(self.results.read_bytes()).decode().splitlines()]


class Run(NamedTuple):
    """A training. With the selection seed of the design it is measured on held-out problems only."""

    base: str
    method: str
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.base}/{self.method}/lr_{self.learning_rate:g}_seed_{self.seed}"

    def file(self, folder: Path) -> Path:
        return folder / "runs" / f"{self.name}.json"


# Base models


def pretrain(design: Design, folder: Path) -> None:
    """Make the base models that do not exist yet, and describe each of them next to its folder."""
    for base in design.bases:
        kind, seed = base.split("_")
        target = folder / "bases" / base
        if not (target / "tokenizer.json").exists():
            options = ["--readouts", kind, "--seed", seed, "--output_dir", str(target)]
            subprocess.run([sys.executable, str(HERE / "make_tiny_base.py"), *options], check=True)
            base_file(folder, base).write_text(json.dumps(describe_base(target)))


def base_file(folder: Path, base: str) -> Path:
    return folder / "bases" / f"{base}.json"


def describe_base(target: Path) -> dict[str, str]:
    """Return the line of a base model that was just made on this machine."""
    import torch

    weights = (target / "model.safetensors").read_bytes()
    return {
        "base": target.name,
        "sha256": hashlib.sha256(weights).hexdigest(),
        "machine": f"{processor_name()}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}",
    }


def processor_name() -> str:
    """Return the name of the processor, or its kind if the system does not tell the name."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def known_bases(design: Design, folder: Path) -> dict[str, dict]:
    """Return the line of each base model, from the file of results or, for a new base model, from its description."""
    lines = {path.stem: json.loads(path.read_text()) for path in (folder / "bases").glob("*.json")}
    return lines | {line["base"]: line for line in design.read_lines() if "seed" not in line}


def check_base(folder: Path, base: str, known: Mapping[str, dict]) -> None:
    """Raise UserError if the weights of a base model are not the weights of its line."""
    path = folder / "bases" / base / "model.safetensors"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if base not in known:
        raise UserError(f"The base model in {path.parent} has no description. Remove its folder and run `pretrain`.")
    if digest != known[base]["sha256"]:
        raise UserError(
            f"The base model in {path.parent} is not the base model of the finished runs: the SHA-256 of its weights is "
            f"{digest}, and {known[base]['sha256']} is expected. Another processor makes other bytes, so copy the folder from "
            f"the machine that made it ({known[base].get('machine', 'unknown')}), or run the whole study again."
        )


# The runs


def planned(design: Design, folder: Path) -> Iterator[Run]:
    """Yield the runs in their order: one seed of all base models before the next seed, after the choice of the rates."""
    for seed in design.seeds:
        for base in design.bases:
            for method in design.methods:
                rates = selection_rates(design, folder, base, method)
                selection = [Run(base, method, rate, design.selection_seed) for rate in rates]
                yield from selection
                if all(run.file(folder).exists() for run in selection):
                    rate = choose([json.loads(run.file(folder).read_text()) for run in selection])["learning_rate"]
                    yield Run(base, method, rate, seed)


def selection_rates(design: Design, folder: Path, base: str, method: str) -> list[float]:
    """Return the learning rates of a method on a base model, extended beyond the best one as far as the runs decide it."""
    rates = list(design.learning_rates)
    for _ in range(design.most_extensions):
        files = [Run(base, method, rate, design.selection_seed).file(folder) for rate in rates]
        if not all(file.exists() for file in files):
            break
        best = choose([json.loads(file.read_text()) for file in files])["learning_rate"]
        if best == rates[-1]:
            rates.append(2 * best)
        elif best == rates[0]:
            rates.insert(0, best / 2)
        else:
            break
    return rates


def choose(selection: list[dict]) -> dict:
    """Return the run that solves the most held-out problems, of several the one with the lowest held-out loss."""
    return max(selection, key=lambda row: (row["accuracy"]["development@4"], -row["held_out_loss"]))


def run_all(design: Design, folder: Path) -> None:
    """Train and measure all missing runs. A run waits for its base model."""
    study = None
    while True:
        missing = [run for run in planned(design, folder) if not run.file(folder).exists()]
        for run in missing:
            path = run.file(folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with FileLock(path.with_suffix(".lock"), timeout=0):
                    if not path.exists() and base_file(folder, run.base).exists():
                        check_base(folder, run.base, known_bases(design, folder))
                        study = study or Study(design, folder)
                        path.with_suffix(".part").write_text(json.dumps(study.train(run)))
                        path.with_suffix(".part").rename(path)
                        print(time.strftime("%H:%M:%S"), run.name, flush=True)
                        break
            except Timeout:  # another process trains it
                continue
        else:
            if not missing:
                return
            time.sleep(10)


class Study:
    """The data of all runs, and the training and measurement of one."""

    def __init__(self, design: Design, folder: Path) -> None:
        import torch
        from datasets import disable_progress_bars

        from loopdropout_trainer.arithmetic import arithmetic_problems, is_test_question
        from loopdropout_trainer.data import DataArguments, load_datasets
        from loopdropout_trainer.diagnostics import label_batches
        from loopdropout_trainer.evaluation.loading import development_task, task_of_rows
        from loopdropout_trainer.tokenizers import load_tokenizer

        torch.set_num_threads(1)  # sums in one order
        disable_progress_bars()
        self.design, self.folder = design, folder
        (base, *_) = sorted((folder / "bases").glob("*/tokenizer.json"))
        self.tokenizer = load_tokenizer(base.parent)  # all have the same
        arguments = DataArguments(
            preparation="arithmetic",
            arithmetic_steps=[1, 3],
            num_train_examples=256,
            num_eval_examples=NUM_DEVELOPMENT,
        )
        self.data = load_datasets(arguments, self.tokenizer, 256)
        self.batches = label_batches(self.data["eval"], self.tokenizer, 50)
        self.development = {"development": development_task("arithmetic", self.data["eval"])}
        self.tasks = {}
        if design.measures_training:
            self.tasks["training"] = development_task("arithmetic", self.data["train"])
        for name, (split, steps, first, number) in design.problems.items():
            rows = arithmetic_problems(split, 10 * (first + number), steps=steps)
            rows = rows.filter(lambda row: is_test_question(row["question"]))  # no question that training may have
            self.tasks[name] = task_of_rows(name, "arithmetic_test", rows.select(range(first, first + number)))

    def train(self, run: Run) -> dict:
        """Return the measurements of a run."""
        from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer, load_model
        from loopdropout_trainer.diagnostics import single_loop

        start = time.process_time()
        work = self.folder / "work" / run.name.replace("/", "-")
        args = LoopDropoutConfig(
            str(work),
            **self.design.methods[run.method],
            seed=run.seed,
            learning_rate=run.learning_rate,
            max_steps=150,
            max_length=256,
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
        model = load_model(self.folder / "bases" / run.base, dtype="float32")
        trainer = LoopDropoutSFTTrainer(model, args, train_dataset=self.data["train"], processing_class=self.tokenizer)
        trainer.train()
        model = trainer.model.eval()
        rows = single_loop(model, self.batches)
        losses = {row["gates"]: row["value"] for row in rows if row["metric"] == "loss"}
        result = {**run._asdict(), "frozen_loss": losses["none"], "held_out_loss": losses["unit"]}
        result["rho"] = [row["value"] for row in rows if row["metric"] == "loss_reduction" and "loop" in row]
        tasks, depths = self.tasks, self.design.depths
        if run.seed == self.design.selection_seed:
            tasks, depths = self.development, (4,)
        result |= {"accuracy": {}, "solved": {}}
        for depth in depths:
            for name, task in tasks.items():
                accuracy, solved = self.measure(model, task, depth, work)
                result["accuracy"][f"{name}@{depth}"] = accuracy
                result["solved"][f"{name}@{depth}"] = solved
        shutil.rmtree(work, ignore_errors=True)
        return result | {"cpu_seconds": round(time.process_time() - start, 1)}

    def measure(self, model: Any, task: Any, depth: int, folder: Path) -> tuple[float, str]:
        """Return the accuracy in percent with `depth` loops, and which problems were solved."""
        from loopdropout_trainer.evaluation import LoopedLM, evaluate_tasks
        from loopdropout_trainer.results.run_files import read_samples

        lm = LoopedLM(model, self.tokenizer, batch_size=100, num_loops=depth)
        rows = evaluate_tasks(lm, [task], output_dir=folder)
        (row,) = (row for row in rows if row["metric"] == "accuracy")
        bits = "".join(f"{line['correct']:.0f}" for line in read_samples({**row, "folder": folder}))
        return row["value"], f"{int('1' + bits, 2):x}"


# The file of results


def collect(design: Design, folder: Path) -> None:
    """Write the base models and the finished runs to the file of results. Runs that are only there stay."""
    known = known_bases(design, folder)
    for path in sorted((folder / "bases").glob("*/tokenizer.json")):
        check_base(folder, path.parent.name, known)
    lines = {line_name(line): line for line in [*known.values(), *design.read_lines()]}
    for path in (folder / "runs").rglob("*.json"):
        line = json.loads(path.read_text())
        lines[line_name(line)] = line
    text = "".join(f"{json.dumps(lines[name])}\n" for name in sorted(lines))
    design.results.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{sum('seed' in line for line in lines.values())} runs in {design.results}")


def restore(design: Design, folder: Path) -> None:
    """Write the runs of the file of results to a folder, in which `run` continues."""
    for line in design.read_lines():
        if "seed" in line:
            path = as_run(line).file(folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(line))


def as_run(line: dict) -> Run:
    return Run(*(line[name] for name in Run._fields))


def line_name(line: dict) -> str:
    return as_run(line).name if "seed" in line else line["base"]


def main(design: Design, description: str, folder: Path, analyze: Callable[[], None]) -> None:
    """Run a command of the script of a study.

    Args:
        design: The study.
        description: Description in the help text.
        folder: Default folder of base models and runs.
        analyze: Function that writes the page of the study.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("pretrain", "run", "collect", "restore", "analyze"))
    parser.add_argument("--folder", type=Path, default=folder, help="default: %(default)s")
    args = parser.parse_args()
    if args.command == "analyze":
        run_script(analyze)
    else:
        command = {"pretrain": pretrain, "run": run_all, "collect": collect, "restore": restore}[args.command]
        run_script(lambda: command(design, args.folder))
