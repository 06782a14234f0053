"""Measure correctness, training speed and generation on a GPU, most important rows first. Every result is written immediately.

    pip install -c constraints.txt -e ".[test]"         # torch from PyPI brings CUDA
    python benchmarks/gpu.py                            # 25 minutes on one H100 or H200
    python benchmarks/gpu.py --minutes 9                # a part of it, and the next call continues
    python benchmarks/gpu.py --smoke --out /tmp/gpu     # tiny sizes on a CPU, to see that every part runs

It needs 40 GB of GPU memory and no network: weights are random, in the shapes of Ouro-1.4B. A row that fails says so, and the
other rows continue. Results are lines of JSON in `gpu.jsonl`, and the tables are in `gpu.md`.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import decoding
import torch
import transformers
import workload
from datasets import disable_progress_bars
from peft import get_peft_model

from loopdropout_trainer import default_peft_config
from loopdropout_trainer.lora import add_gates


ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
PLAIN = "Loop Dropout, not optimized"
STEP = 7
"""Optimizer step whose gates and examples the correctness rows use."""

SPEED_ROWS = (
    *(workload.OURS, workload.LORA, f"{workload.STOCK}, checkpointing", workload.STOCK),
    *(f"{workload.OURS}, checkpointing", f"{workload.LORA}, checkpointing"),
)
CORRECT_ROWS = ("Loop Dropout, no padding", workload.OURS, f"{workload.OURS}, checkpointing")


@dataclass(frozen=True)
class Sizes:
    """Shapes of a run.

    Attributes:
        recipes: Micro-batches of the paper's three recipes.
        correct: Model of the correctness rows.
        generating: Model of the generation rows.
        steps: Number of timed optimizer steps.
        num_prompts, batch, new_tokens: Prompts, rows that run together, and longest answer of the generation rows.
        matrix: Size of the square matrices whose product is timed.
    """

    recipes: dict[str, workload.Preset]
    correct: workload.Preset
    generating: workload.Preset
    steps: int
    num_prompts: int
    batch: int
    new_tokens: int
    matrix: int


_OURO = workload.PRESETS["ouro-1.4b"]
_TINY = workload.Preset(32, 48, 1, 2, 64, 0.05, "bfloat16", rounds=2, batch=2, num_loops=2)
FULL = Sizes(
    recipes={
        "metamath_gsm": _OURO,  # 250 tokens on average, fewer than 512
        "gsm8k": replace(_OURO, median_length=170.0),
        "tulu2": replace(_OURO, median_length=120.0, length_spread=0.9, length_scale=4.0),  # up to 2,044 tokens
    },
    correct=replace(_OURO, num_layers=4, vocab_size=4096, batch=4),
    generating=_OURO,
    steps=8, num_prompts=96, batch=32, new_tokens=256, matrix=8192,
)  # fmt: skip
TINY = Sizes({"metamath_gsm": _TINY}, _TINY, _TINY, steps=2, num_prompts=3, batch=2, new_tokens=4, matrix=64)


def matmul_rate(size: int) -> dict[str, float]:
    """Return the FLOP/s of a product of square bfloat16 matrices, the best of four trials."""
    a, b = (torch.randn(size, size, device=DEVICE).bfloat16() for _ in range(2))
    repeats, seconds = 50 if ON_GPU else 2, []
    for _ in range(4):
        workload.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            a @ b
        workload.synchronize()
        seconds.append(time.perf_counter() - began)
    return {"tflops_per_second": 2 * size**3 * repeats / min(seconds) / 1e12}


def correctness(name: str, preset: workload.Preset, folder: str) -> dict[str, float]:
    """Return the relative distance of a row's bfloat16 gradients from float32 gradients without optimizations.

    Raises:
        RuntimeError: if the distance is more than twice that of the plain bfloat16 computation.
    """
    reference = _gradients(PLAIN, preset, folder, in_float32=True)
    distances = []
    for row in (name, PLAIN):
        distances.append(((_gradients(row, preset, folder) - reference).norm() / reference.norm()).item())
    off, plain = distances
    if off > 2 * plain + 1e-3:
        raise RuntimeError(f"gradients are off by {off:.2g}, those of the plain computation by {plain:.2g}")
    return {"gradients_off": off, "plain_off": plain}


def _gradients(name: str, preset: workload.Preset, folder: str, in_float32: bool = False) -> torch.Tensor:
    row = workload.Row(name, preset, folder, DEVICE)
    if in_float32:
        row.model.float()
        row.trainer.args.bf16 = False
    batch, num_items = row.prepare(workload.draw_examples(preset, STEP), DEVICE)
    with torch.autocast(DEVICE.type, enabled=False) if in_float32 else torch.enable_grad():
        row.backward(batch, num_items, STEP)
    return row.gradients()


def training_speed(name: str, preset: workload.Preset, steps: int, folder: str) -> dict[str, Any]:
    """Return the median time of an optimizer step after two steps of warm-up, and the peak memory of this row alone."""
    row = workload.Row(name, preset, folder, DEVICE)
    for step in (1, 2):
        row.take_step(*row.prepare(workload.draw_examples(preset, step), DEVICE), step)
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    seconds, tokens = [], []
    for step in range(1, steps + 1):
        examples = workload.draw_examples(preset, step)
        seconds.append(row.take_step(*row.prepare(examples, DEVICE), step))
        tokens.append(sum(len(example["input_ids"]) for example in examples))
    per_second = sum(tokens) / sum(seconds)
    return {
        "step_ms": 1e3 * statistics.median(seconds),
        "tokens_per_second": per_second,
        "tflops_per_second": workload.flops_per_token(row.model) * per_second / 1e12,
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9 if ON_GPU else None,
    }


def generation(name: str, sizes: Sizes) -> dict[str, Any]:
    """Return the time of greedy answers of different lengths to all prompts."""
    torch.manual_seed(0)
    base = workload.random_ouro(sizes.generating).to(DEVICE)
    model = get_peft_model(base, default_peft_config(base)).eval()
    add_gates(model)
    prompts = decoding.draw_prompts(sizes.generating.vocab_size, sizes.num_prompts, 150)
    lengths = decoding.draw_lengths(sizes.num_prompts, sizes.new_tokens / 4, 0.5)
    decoding.decode(name, base, prompts[: sizes.batch], [4] * sizes.batch, sizes.batch)  # warm-up
    seconds, answers = decoding.decode(name, base, prompts, lengths, sizes.batch)
    return {"seconds": seconds, "tokens_per_second": sum(map(len, answers)) / seconds}


def tasks(sizes: Sizes, folder: str) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """Yield the part, the row's name, and the measurement."""
    yield "matrix products", f"{sizes.matrix} cubed", partial(matmul_rate, sizes.matrix)
    for name in CORRECT_ROWS:
        yield "correctness", name, partial(correctness, name, sizes.correct, folder)
    for recipe, preset in sizes.recipes.items():
        for name in SPEED_ROWS:
            yield f"training, {recipe}", name, partial(training_speed, name, preset, sizes.steps, folder)
    for name in decoding.ROWS:
        yield "generation", name, partial(generation, name, sizes)


def attempt(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the measured numbers, or the error."""
    try:
        numbers = {"status": "ok", **measure()}
    except torch.OutOfMemoryError:
        numbers = {"status": "out of memory"}
    except Exception as error:  # of any kind, such as a missing kernel: the other rows continue
        numbers = {"status": f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"}
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
    return numbers


def read(file: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the last record of each row by its part and name."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {(record["part"], record["row"]): record for record in map(json.loads, lines)}


def report(records: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Return one Markdown table for each part."""
    machines = sorted({f"{record['device']}, {record['versions']}" for record in records.values()})
    lines = ["# On a GPU", "", f"`python benchmarks/gpu.py`: {' and '.join(machines) or 'not measured'}.", ""]
    for part in dict.fromkeys(part for part, _ in records):
        rows = {row: record for (name, row), record in records.items() if name == part}
        known = {"part", "row", "device", "versions"}
        heads = list(dict.fromkeys(key for record in rows.values() for key in record if key not in known))
        lines += [f"## {part.capitalize()}", "", f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
        for row, record in rows.items():
            lines.append(f"| {row} | {' | '.join(_cell(record.get(head)) for head in heads)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value).replace("|", "/")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25.0, help="time after which no row starts")
    parser.add_argument("--again", action="store_true", help="measure rows again that the file has")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, also on a CPU")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    options = parser.parse_args(argv)
    if not (ON_GPU or options.smoke):
        parser.error("there is no GPU. `--smoke` runs tiny shapes on a CPU.")
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    disable_progress_bars()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / ("gpu_smoke.jsonl" if options.smoke else "gpu.jsonl")
    device = torch.cuda.get_device_name() if ON_GPU else f"CPU ({workload.cpu_name()})"
    began, measured = time.monotonic(), read(file)
    with tempfile.TemporaryDirectory() as folder:
        for part, row, measure in tasks(TINY if options.smoke else FULL, folder):
            if (part, row) in measured and not options.again:
                continue
            if time.monotonic() - began > 60 * options.minutes:
                print(f"{options.minutes:g} minutes are over. The next call continues with {part}: {row}.")
                break
            record = {"part": part, "row": row, **attempt(measure), "device": device, "versions": workload.versions()}
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(record) + "\n")
            print(f"{part}: {row}: {record['status']}", flush=True)
    text = report(read(file))
    file.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
