"""Study A of plan.md: 15 tiny base models that differ in their pretraining, four methods, and shifted test problems.

    python docs/replication/transfer.py pretrain --folder outputs/transfer   # the base models that do not exist yet
    python docs/replication/transfer.py run --folder outputs/transfer        # the runs that do not exist yet
    python docs/replication/transfer.py collect --folder outputs/transfer    # finished runs -> transfer.jsonl.gz
    python docs/replication/transfer.py restore --folder outputs/transfer    # transfer.jsonl.gz -> finished runs
    python docs/replication/transfer.py analyze                              # transfer.jsonl.gz -> transfer.md and its figures

`pretrain` and `run` continue where they stopped, and several processes may work in one folder. A killed process loses one
training. transfer.jsonl.gz has one line for each base model (`base`, `sha256`) and one for each run: the fields of `Run`,
`frozen_loss` and `held_out_loss` in nats, `rho` by loop in percent, `accuracy` in percent by task and depth, `solved` with one
bit for each problem after a leading 1, as hexadecimal digits, and `cpu_seconds`.
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


HERE = Path(__file__).parent
ROWS = HERE / "transfer.jsonl.gz"
KINDS = ("late", "uniform", "last", "early", "random")
BASES = [f"{kind}_{seed}" for seed in (1, 2, 3) for kind in KINDS]
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"rule": "lora"},
    "p_0.5": {"rule": "loop_dropout", "p": 0.5},
    "p_0.25": {"rule": "loop_dropout", "p": 0.25},
    "dose_control": {"rule": "dose_control", "p": 0.5},
}
LEARNING_RATES = (5e-4, 1e-3, 2e-3)
SELECTION_SEED = 20
SEEDS = (21, 22, 23, 24, 25)
TEST = "in_distribution"
SHIFTED = {"larger_numbers": ("larger", (1, 3)), "other_wording": ("wording", (1, 3)), "more_steps": ("test", (4, 5))}
"""Split and steps of `arithmetic_problems`."""
REGISTERED = ("larger_numbers", "other_wording")
"""Shifted problems of the registered test. LoRA on the packaged base model solves only 5% of the third kind."""
NUM_PROBLEMS = 300
DEPTHS = (4, 8)


class Run(NamedTuple):
    """A training. With `SELECTION_SEED` it is measured on held-out problems only."""

    base: str
    method: str
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.base}/{self.method}/lr_{self.learning_rate:g}_seed_{self.seed}"

    def file(self, folder: Path) -> Path:
        return folder / "runs" / f"{self.name}.json"


def pretrain(folder: Path) -> None:
    """Make the base models that do not exist yet."""
    for base in BASES:
        kind, seed = base.split("_")
        target = folder / "bases" / base
        if not (target / "tokenizer.json").exists():
            options = ["--readouts", kind, "--seed", seed, "--output_dir", str(target)]
            subprocess.run([sys.executable, str(HERE / "make_tiny_base.py"), *options], check=True)


# The runs


def planned(folder: Path) -> Iterator[Run]:
    """Yield the runs in their order: one seed of all base models before the next seed, after the choice of the rates."""
    for seed in SEEDS:
        for base in BASES:
            for method in METHODS:
                selection = [Run(base, method, rate, SELECTION_SEED) for rate in LEARNING_RATES]
                yield from selection
                if all(run.file(folder).exists() for run in selection):
                    rate = choose([json.loads(run.file(folder).read_text()) for run in selection])["learning_rate"]
                    yield Run(base, method, rate, seed)


def choose(selection: list[dict]) -> dict:
    """Return the run that solves the most held-out problems, of several the one with the lowest held-out loss."""
    return max(selection, key=lambda row: (row["accuracy"]["development@4"], -row["held_out_loss"]))


def run_all(folder: Path) -> None:
    """Train and measure all missing runs. A run waits for its base model."""
    study = None
    while True:
        missing = [run for run in planned(folder) if not run.file(folder).exists()]
        for run in missing:
            path = run.file(folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path.with_suffix(".lock"), "w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                if not path.exists() and (folder / "bases" / run.base / "tokenizer.json").exists():
                    study = study or Study(folder)
                    path.with_suffix(".part").write_text(json.dumps(study.train(run)))
                    path.with_suffix(".part").rename(path)
                    print(time.strftime("%H:%M:%S"), run.name, flush=True)
                    break
        else:
            if not missing:
                return
            time.sleep(10)


class Study:
    """The data of all runs, and the training and measurement of one."""

    def __init__(self, folder: Path) -> None:
        import torch
        from datasets import disable_progress_bars

        from loopdropout_trainer.arithmetic import arithmetic_problems, is_test_question
        from loopdropout_trainer.data import DataArguments, load_datasets
        from loopdropout_trainer.diagnostics import label_batches
        from loopdropout_trainer.evaluation.loading import development_task, task_of_rows
        from loopdropout_trainer.tokenizers import load_tokenizer

        torch.set_num_threads(1)  # sums in one order
        disable_progress_bars()
        self.folder = folder
        (base, *_) = sorted((folder / "bases").glob("*/tokenizer.json"))
        self.tokenizer = load_tokenizer(base.parent)  # all have the same
        arguments = DataArguments(
            preparation="arithmetic", arithmetic_steps=[1, 3], num_train_examples=256, num_eval_examples=200
        )
        self.data = load_datasets(arguments, self.tokenizer, 256)
        self.batches = label_batches(self.data["eval"], self.tokenizer, 50)
        self.development = {"development": development_task("arithmetic", self.data["eval"])}
        self.tasks = {"training": development_task("arithmetic", self.data["train"])}
        for name, (split, steps) in {TEST: ("easy_test", (1, 3)), **SHIFTED}.items():
            rows = arithmetic_problems(split, 10 * NUM_PROBLEMS, steps=steps)
            rows = rows.filter(lambda row: is_test_question(row["question"]))  # no question that training may have
            self.tasks[name] = task_of_rows(name, "arithmetic_test", rows.select(range(NUM_PROBLEMS)))

    def train(self, run: Run) -> dict:
        """Return the measurements of a run."""
        from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer, load_model
        from loopdropout_trainer.diagnostics import single_loop

        start = time.process_time()
        work = self.folder / "work" / run.name.replace("/", "-")
        args = LoopDropoutConfig(
            str(work),
            **METHODS[run.method],
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
        is_selection = run.seed == SELECTION_SEED
        tasks, depths = (self.development, DEPTHS[:1]) if is_selection else (self.tasks, DEPTHS)
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
        from loopdropout_trainer.results import read_samples

        lm = LoopedLM(model, self.tokenizer, batch_size=100, num_loops=depth)
        rows = evaluate_tasks(lm, [task], output_dir=folder)
        (row,) = (row for row in rows if row["metric"] == "accuracy")
        bits = "".join(f"{line['correct']:.0f}" for line in read_samples({**row, "folder": folder}))
        return row["value"], f"{int('1' + bits, 2):x}"


def collect(folder: Path) -> None:
    """Write the base models and the finished runs to `transfer.jsonl.gz`. Runs that are only there stay."""
    lines = {line_name(line): line for line in read_lines()}
    for path in sorted((folder / "bases").glob("*/tokenizer.json")):
        weights = path.with_name("model.safetensors").read_bytes()
        lines[path.parent.name] = {"base": path.parent.name, "sha256": hashlib.sha256(weights).hexdigest()}
    for path in (folder / "runs").rglob("*.json"):
        line = json.loads(path.read_text())
        lines[line_name(line)] = line
    text = "".join(f"{json.dumps(lines[name])}\n" for name in sorted(lines))
    ROWS.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{sum('seed' in line for line in lines.values())} runs in {ROWS}")


def restore(folder: Path) -> None:
    """Write the runs of `transfer.jsonl.gz` to a folder, in which `run` continues."""
    for line in read_lines():
        if "seed" in line:
            path = as_run(line).file(folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(line))


def read_lines() -> list[dict]:
    if not ROWS.exists():
        return []
    return [json.loads(line) for line in gzip.decompress(ROWS.read_bytes()).decode().splitlines()]


def as_run(line: dict) -> Run:
    return Run(*(line[name] for name in Run._fields))


def line_name(line: dict) -> str:
    return as_run(line).name if "seed" in line else line["base"]


# The registered analysis


class Results:
    """The runs of one or several seeds, each with all four methods on one base model.

    A seed of a base model counts once all its four methods are finished. The late bias comes from the run that chose LoRA's
    learning rate, so that it shares no noise with the gains.

    Attributes:
        gains: Gains over LoRA in points, by base model, method, and task and depth: the means over seeds.
        bias: LoRA's rho_4 - rho_1 in points, by base model.
        lora: LoRA's accuracies in percent, by base model, and task and depth.
        num_seeds: Number of complete seeds by base model.
    """

    def __init__(self, lines: list[dict]) -> None:
        import pandas as pd

        runs = [line for line in lines if "seed" in line]
        compared = [run for run in runs if run["seed"] in SEEDS]
        columns = ["base", "method", "seed"]
        accuracy = pd.DataFrame([{**{name: run[name] for name in columns}, **run["accuracy"]} for run in compared])
        groups = accuracy.groupby(["base", "seed"])["method"]
        complete = accuracy[groups.transform("nunique") == len(METHODS)].set_index(columns)
        means = complete.groupby(["base", "method"]).mean()
        self.lora = means.xs("lora", level="method")
        self.gains = means.drop("lora", level="method").sub(self.lora, level="base")
        self.num_seeds = complete.xs("lora", level="method").groupby("base").size()
        selection = [run for run in runs if run["seed"] == SELECTION_SEED and run["method"] == "lora"]
        chosen = {base: choose([run for run in selection if run["base"] == base]) for base in self.lora.index}
        self.bias = pd.Series({base: run["rho"][3] - run["rho"][0] for base, run in chosen.items()})

    @property
    def is_complete(self) -> bool:
        return list(self.num_seeds.reindex(BASES)) == [len(SEEDS)] * len(BASES)

    def gain(self, place: str, method: str = "p_0.5") -> Any:
        """Return a method's gain by base model at a place such as `more_steps@4`. `shifted@4` is the mean of `REGISTERED`."""
        gains = self.gains.xs(method, level="method")
        task, depth = place.split("@")
        return gains[[f"{name}@{depth}" for name in REGISTERED]].mean(axis=1) if task == "shifted" else gains[place]


def registered_tests(results: Results) -> dict[str, tuple[float, float, float, float]]:
    """Return estimate, 95% interval and p-value of the two registered tests, the p-values adjusted by Holm's method.

    `slope`: of the gain of p = 0.5 in distribution at K = 4 on LoRA's late bias, by least squares over base models.
    `shift`: the mean over base models of the gain on shifted problems minus the gain in distribution, at K = 4.
    """
    from scipy import stats

    gain = results.gain(f"{TEST}@4")
    fit = stats.linregress(results.bias[gain.index], gain)
    half = stats.t.ppf(0.975, len(gain) - 2) * fit.stderr
    test = stats.ttest_1samp(results.gain("shifted@4") - gain, 0)
    smaller, larger = sorted((fit.pvalue, test.pvalue))
    adjusted = {smaller: min(1.0, 2 * smaller), larger: min(1.0, max(2 * smaller, larger))}
    mean = (results.gain("shifted@4") - gain).mean()
    return {
        "slope": (fit.slope, fit.slope - half, fit.slope + half, adjusted[fit.pvalue]),
        "shift": (mean, *test.confidence_interval(0.95), adjusted[test.pvalue]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("pretrain", "run", "collect", "restore", "analyze"))
    parser.add_argument("--folder", type=Path, default=Path("outputs/transfer"), help="default: %(default)s")
    args = parser.parse_args()
    if args.command == "analyze":
        import transfer_page  # it imports this file

        transfer_page.write(read_lines())
    else:
        {"pretrain": pretrain, "run": run_all, "collect": collect, "restore": restore}[args.command](args.folder)


if __name__ == "__main__":
    main()
