"""Step time and memory of TRL with PEFT, of our LoRA, and of Loop Dropout with each of its optimizations, in one run.

    python benchmarks/speed.py                        # two minutes on a CPU, writes benchmarks/results/speed.md
    python benchmarks/speed.py --memory --rounds 8    # also gradient checkpointing
    python benchmarks/speed.py --hidden_size 256 --batch 4 --median_length 120     # any other shape
    python benchmarks/speed.py --preset ouro-1.4b     # one GPU with 40 GB or more

All rows train copies of one random Ouro, whose frozen weights they share, in one process. First they are checked to give the
same losses and gradients. Then, in each round, every row takes one optimizer step on the same micro-batch with the same
gates, in an order that rotates from round to round. Lengths and gates change from round to round. A ratio compares two
steps of the same round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from itertools import accumulate
from pathlib import Path

import torch
import transformers
from datasets import disable_progress_bars
from torch.profiler import ProfilerActivity, profile
from workload import (
    LORA,
    MEMORY_ROWS,
    OURS,
    PRESETS,
    ROWS,
    STOCK,
    Preset,
    Row,
    cpu_name,
    draw_examples,
    flops_per_token,
    frozen_share,
    versions,
)

from loopdropout_trainer.costs.trainings import PEAK_FLOPS


def check_agreement(rows: dict[str, Row], preset: Preset, device: torch.device) -> dict[str, tuple[float, float]]:
    """Return each row's distance of loss and gradients from the first row of its kind, relative to that one's size.

    Raises:
        RuntimeError: if a row computes something else.
    """
    distances, references = {}, {}
    tolerance = 1e-4
    if preset.dtype != "float32":  # in bfloat16, rounding alone moves gradients by some percent
        tolerance = 0.3
    for name, row in rows.items():
        batch, num_items = row.prepare(draw_examples(preset, 0), device)
        loss, grads = row.backward(batch, num_items, 0).item(), row.gradients()
        kind = "LoRA" if name.startswith((STOCK, LORA)) else "Loop Dropout"
        want_loss, want = references.setdefault(kind, (loss, grads))
        distance = (abs(loss - want_loss) / abs(want_loss), ((grads - want).norm() / want.norm()).item())
        if max(distance) > tolerance:
            raise RuntimeError(f"{name!r} is {distance} off in loss and gradients; {tolerance} would be rounding.")
        distances[name] = distance
    return distances


def step_memory(row: Row, batch: dict, num_items: torch.Tensor, step: int) -> int:
    """Return the bytes that a run of this row alone holds at the peak of a step, with its weights and optimizer states."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        row.take_step(batch, num_items, step)
        added = torch.cuda.max_memory_allocated() - before
    else:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            row.take_step(batch, num_items, step)
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        added = max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    states = [t for s in row.trainer.optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    return added + sum(t.numel() * t.element_size() for t in [*row.model.parameters(), *states])


def measure(preset: Preset, rounds: int, rows: dict[str, Row], device: torch.device) -> dict[str, dict[str, list]]:
    """Return the seconds of each row's step in each round, and its memory where that is measured."""
    times = {name: [] for name in rows}
    memory = {name: [] for name in rows}
    tokens = []
    for step in range(-1, rounds):
        number = step % 1000 + 1
        examples = draw_examples(preset, number)
        names = list(rows)
        shift = step * 3 % len(names)
        for name in names[shift:] + names[:shift]:
            batch, num_items = rows[name].prepare(examples, device)
            seconds = rows[name].take_step(batch, num_items, number)
            if step >= 0:  # the first one warms up
                times[name].append(seconds)
        if step >= 0:
            tokens.append(sum(len(example["input_ids"]) for example in examples))
    longest = lambda step: max(len(example["input_ids"]) for example in draw_examples(preset, step))
    steps = range(1, rounds + 1) if device.type == "cuda" else [max(range(1, rounds + 1), key=longest)]
    for step in steps:
        for name, row in rows.items():
            batch, num_items = row.prepare(draw_examples(preset, step), device)
            memory[name].append(step_memory(row, batch, num_items, step))
    return {"times": times, "memory": memory, "tokens": tokens}


def summarize(preset: Preset, rows: dict[str, Row], measured: dict, distances: dict, peak: float | None) -> list[dict]:
    """Return one record for each row of the table."""
    work = flops_per_token(rows[LORA].model)
    tokens = statistics.median(measured["tokens"])
    records = []
    for name in rows:
        times = measured["times"][name]
        ratio = lambda other, times=times: _ratio(times, measured["times"][other])
        low, middle, high = statistics.quantiles(times, n=4)
        per_second = sum(measured["tokens"]) / sum(times)
        memory = measured["memory"][name]
        records.append(
            {
                "row": name,
                "step_seconds": middle,
                "step_seconds_quartiles": [low, high],
                "to_stock": ratio(STOCK),
                "to_lora": ratio(LORA),
                "tokens_per_step": tokens,
                "tokens_per_second": per_second,
                "flops_per_token": work,
                "flops_per_second": work * per_second,
                "share_of_peak": work * per_second / peak if peak else None,
                "memory_bytes": max(memory),  # a run needs that of its worst step
                "memory_to_stock": max(memory) / max(measured["memory"][STOCK]),
                "loss_distance": distances[name][0],
                "gradient_distance": distances[name][1],
            }
        )
    return records


def _ratio(times: list[float], others: list[float]) -> list[float]:
    """Return median and quartiles of the ratios of each round."""
    low, middle, high = statistics.quantiles([mine / theirs for mine, theirs in zip(times, others, strict=True)], n=4)
    return [middle, low, high]


def report(title: str, script: str, details: list[dict], table: Callable[[dict], list[str]]) -> str:
    """Return the tables of a script's presets that have been measured."""
    lines = [f"# {title}", ""]
    for record in details:
        lines += table(record)
    if "ouro-1.4b" not in {record["preset"] for record in details}:
        command = f"python benchmarks/{script} --preset ouro-1.4b"
        lines += ["## ouro-1.4b", "", f"Not yet measured on a GPU: `{command}`.", ""]
    return "\n".join(lines)


def table(details: dict) -> list[str]:
    """Return the lines of one preset's section."""
    shape, records, on_gpu = details["shape"], details["rows"], details["on_gpu"]
    work = "Share of peak" if records[0]["share_of_peak"] else "GFLOP/s"
    lines = [
        f"## {details['preset']}",
        "",
        f"`{details['command']}` on {details['device']}; {details['versions']}.",
        "",
        f"Random Ouro of {shape['num_layers']} layers, hidden size {shape['hidden_size']}, {shape['num_loops']} loops, "
        f"{shape['dtype']}; micro-batches of {shape['batch']} examples, lengths log-normal around "
        f"{shape['median_length'] * shape['length_scale']:.0f} ({records[0]['tokens_per_step']:.0f} tokens a step); "
        f"LoRA of rank 16 on all "
        f"projections of the recurrent block; p = 0.5. {records[0]['flops_per_token'] / 1e9:.3g} GFLOP a token by the "
        "formula 4 (K N + M) + 6 K R, which counts no loop as skipped.",
        "",
        f"Median of {details['rounds']} optimizer steps, with quartiles. A ratio is that of two steps on the same "
        "micro-batch. "
        + ("" if on_gpu else "Time is the process's own, on one thread. ")
        + "Tokens are counted without "
        f"padding. {_frozen(details)}Gradients are compared with those of the first row of the same rule, relative to their "
        "norm.",
        "",
        f"| | Step | to TRL + PEFT | to our LoRA | Tokens/s | {work} | Peak memory | Gradients off by |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in records:
        low, high = r["step_seconds_quartiles"]
        spread = lambda key, r=r: "{:.2f} ({:.2f} to {:.2f})".format(*r[key])
        rate = f"{r['share_of_peak']:.1%}" if r["share_of_peak"] else f"{r['flops_per_second'] / 1e9:.0f}"
        lines.append(
            f"| {r['row']} | {r['step_seconds'] * 1e3:.0f} ms ({low * 1e3:.0f} to {high * 1e3:.0f}) | {spread('to_stock')} "
            f"| {spread('to_lora')} | {r['tokens_per_second']:.0f} | {rate} | {r['memory_bytes'] / 2**20:.0f} MiB, "
            f"{r['memory_to_stock']:.2f} | {r['gradient_distance']:.0e} |"
        )
    return [*lines, ""]


def _frozen(details: dict) -> str:
    if details["frozen_share"] is None:
        return ""
    return (
        f"Of all loops in these steps {details['frozen_share']:.1%} came before an example's first active gate; 23.4% do in "
        "the long run. "
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    for shape in fields(Preset):  # typed by the preset that they change
        parser.add_argument(
            f"--{shape.name}", help="default: the preset's", type=type(getattr(PRESETS["cpu"], shape.name))
        )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="TRL's and our LoRA always run")
    parser.add_argument("--memory", action="store_true", help="also measure gradient checkpointing")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    disable_progress_bars()
    changed = {f.name: value for f in fields(Preset) if (value := getattr(options, f.name)) is not None}
    preset = replace(PRESETS[options.preset], **changed)
    shape_name = "custom" if changed.keys() - {"rounds"} else options.preset
    rounds = preset.rounds
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    began = time.time()
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"one core of a CPU ({cpu_name()})"
    with tempfile.TemporaryDirectory() as folder:
        wanted = [row for row in ROWS if row in options.rows or row in (STOCK, LORA)]
        wanted += MEMORY_ROWS if options.memory else []
        rows = {row: Row(row, preset, folder, device) for row in wanted}
        for row in rows.values():
            row.share_frozen_weights(rows[STOCK])
        distances = check_agreement(rows, preset, device)
        measured = measure(preset, rounds, rows, device)
        peak = next((flops for chip, flops in PEAK_FLOPS.items() if chip in name), None)
        records = summarize(preset, rows, measured, distances, peak)
        options.out.mkdir(parents=True, exist_ok=True)
    details = {
        "preset": shape_name,
        "command": " ".join(["python benchmarks/speed.py", *sys.argv[1:]]),
        "device": name,
        "on_gpu": device.type == "cuda",
        "versions": versions(),
        "shape": asdict(preset),
        "rounds": rounds,
        "frozen_share": frozen_share(preset, rounds, rows[OURS]) if OURS in rows else None,
        "rows": records,
    }
    (options.out / f"speed_{shape_name}.json").write_text(json.dumps(details, indent=1) + "\n", encoding="utf-8")
    measured_presets = [options.out / f"speed_{preset}.json" for preset in (*PRESETS, "custom")]
    measured_details = [json.loads(file.read_text(encoding="utf-8")) for file in measured_presets if file.exists()]
    text = report("Speed and memory", "speed.py", measured_details, table)
    (options.out / "speed.md").write_text(text, encoding="utf-8")
    print(f"{text}\n{time.time() - began:.0f} s in all")


if __name__ == "__main__":
    main()
