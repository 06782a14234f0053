"""How time and memory of a training step grow with loops, length and micro-batch: straight lines, for LoRA and Loop Dropout.

    python benchmarks/scaling.py             # five minutes on one CPU core; benchmarks/results/scaling.{json,md,png}
    python benchmarks/scaling.py --report    # only the table and the figure, from scaling.json

One of the three is varied at a time, on a small random Ouro. A point is the mean over the same few steps for both rules, after
one that warms up: seconds are the process's own, on one thread; memory is what autograd keeps for the backward pass.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import speed
import torch
import transformers
from datasets import disable_progress_bars

from loopdropout_trainer.reports import line_plot, save_figure


BASE = speed.Preset(
    hidden_size=128,
    intermediate_size=352,
    num_layers=2,
    num_heads=4,
    vocab_size=512,
    length_scale=1.0,
    dtype="float32",
    rounds=4,
    batch=4,
    median_length=128.0,
    length_spread=0.0,
)
AXES = {
    "loops K": ("num_loops", (2, 4, 8, 16, 32)),
    "tokens of an example": ("median_length", (64, 128, 192, 256, 384, 511)),
    "examples of a micro-batch": ("batch", (1, 2, 4, 8, 16)),
}
"""What is varied: the field of the preset, and its values."""

RULES = (speed.LORA, speed.OURS)
QUANTITIES = {"seconds": ("time of a step (s)", 1.0), "kept_bytes": ("kept for the backward pass (MB)", 1e-6)}
STRAIGHT = 0.99
"""R^2 from which a line is called straight."""


def measure(preset: speed.Preset, rule: str, folder: str) -> dict[str, float]:
    """Return seconds and kept bytes of a step."""
    row = speed.Row(rule, preset, folder, torch.device("cpu"))
    seconds, kept = [], []
    for step in range(preset.rounds + 1):
        batch = row.prepare(speed.draw_examples(preset, step), torch.device("cpu"))
        seconds.append(speed.take_step(row.trainer, *batch, step))
        if step:
            kept.append(kept_bytes(row, batch, step))
    return {"seconds": statistics.fmean(seconds[1:]), "kept_bytes": statistics.fmean(kept)}


def kept_bytes(row: speed.Row, batch: tuple, step: int) -> int:
    """Return what autograd keeps of one forward pass, each storage once, weights left out."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in row.model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        speed.backward(row.trainer, *batch, step)
    row.trainer.optimizer.zero_grad()
    return sum(storage.nbytes() for storage in kept.values())


def line(values: list[float], measured: list[float]) -> dict[str, float]:
    """Return slope and intercept of the least-squares line, and R^2."""
    slope, intercept = np.polyfit(values, measured, 1)
    rest = np.asarray(measured) - (slope * np.asarray(values) + intercept)
    return {
        "slope": float(slope),
        "intercept": float(intercept),
        "r_squared": float(1 - rest.var() / np.var(measured)),
    }


def measure_all(axes: dict[str, tuple[str, tuple[int, ...]]], preset: speed.Preset) -> dict[str, Any]:
    """Return the points of every axis, quantity and rule, with their lines."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for axis, (field, values) in axes.items():
            points = {rule: [] for rule in RULES}
            for value in values:
                for rule in RULES:
                    kind = type(getattr(preset, field))
                    points[rule].append(measure(replace(preset, **{field: kind(value)}), rule, folder))
                    print(axis, value, rule, points[rule][-1], flush=True)
            results[axis] = {"values": list(values)}
            for rule in RULES:
                series = {name: [point[name] for point in points[rule]] for name in QUANTITIES}
                lines = {name: line(list(values), series[name]) for name in QUANTITIES}
                results[axis][rule] = {**series, "lines": lines}
    return results


def table(details: dict[str, Any]) -> str:
    """Return the lines that were fitted, as Markdown."""
    shape = details["shape"]
    lines = [
        "# Scaling",
        "",
        f"`python benchmarks/scaling.py` on {details['device']}; {details['versions']}.",
        *(["", details["note"]] if details["note"] else []),
        "",
        f"Random Ouro of {shape['num_layers']} layers, hidden size {shape['hidden_size']}, {shape['dtype']}; where it is not "
        f"varied: {shape['num_loops']} loops, {shape['batch']} examples of {shape['median_length']:.0f} tokens. "
        f"Mean of {shape['rounds']} steps; time is the process's own, on one thread. Memory is what autograd keeps for the "
        "backward pass.",
        "",
        "![time and memory](scaling.png)",
        "",
        "| | rule | time: each more | at none | R² | memory: each more | at none | R² |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    bent = []
    for axis, result in details["axes"].items():
        for rule in RULES:
            time, kept = (result[rule]["lines"][name] for name in QUANTITIES)
            lines.append(
                f"| {axis} | {rule} | {1e3 * time['slope']:.3g} ms | {1e3 * time['intercept']:.3g} ms | "
                f"{time['r_squared']:.4f} | {kept['slope'] / 1e6:.3g} MB | {kept['intercept'] / 1e6:.3g} MB | "
                f"{kept['r_squared']:.4f} |"
            )
            bent += [
                f"{what} of {rule} against {axis}"
                for what, fit in (("time", time), ("memory", kept))
                if fit["r_squared"] < STRAIGHT
            ]
    reasons = (
        "Attention's work grows with the square of an example's length, all other work with the length. How many loops "
        "wait is drawn anew for each example, so that Loop Dropout's points scatter around their line by the gates of the "
        "steps that are measured: the fewer examples, the more."
    )
    lines += ["", f"Not straight (R² below {STRAIGHT}): {'; '.join(bent) or 'none'}. {reasons}", ""]
    return "\n".join(lines)


def draw(details: dict[str, Any], path: Path) -> None:
    """Draw the points of both rules: a row of panels for each quantity, a panel for each axis."""
    rows = [
        {"method": rule, "seed": 0, "panel": f"{label}\nby {axis}", "x": float(x), "value": scale * value}
        for name, (label, scale) in QUANTITIES.items()
        for axis, result in details["axes"].items()
        for rule in RULES
        for x, value in zip(result["values"], result[rule][name], strict=True)
    ]
    save_figure(line_plot(pd.DataFrame(rows), "x", "", panel="panel", x_label=""), path.with_suffix(""))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--smoke", action="store_true", help="two points of each axis, tiny")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder")
    parser.add_argument("--note", default="", help="what a reader of the results must know of the machine")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    disable_progress_bars()
    file = options.out / "scaling.json"
    if not options.report:
        torch.set_num_threads(1)
        preset, axes = BASE, AXES
        if options.smoke:
            preset = replace(
                BASE, hidden_size=32, intermediate_size=48, num_layers=1, vocab_size=64, batch=2, rounds=1
            )
            axes = {axis: (field, values[:2]) for axis, (field, values) in AXES.items()}
        details = {
            "device": f"one core of a CPU ({speed.cpu_name()})",
            "versions": speed.versions(),
            "note": options.note,
            "shape": asdict(preset),
            "axes": measure_all(axes, preset),
        }
        options.out.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(details, indent=1) + "\n", encoding="utf-8")
    details = json.loads(file.read_text(encoding="utf-8"))
    (options.out / "scaling.md").write_text(table(details), encoding="utf-8")
    draw(details, options.out / "scaling.png")


if __name__ == "__main__":
    main()
