"""All that has to be measured on a GPU, in one command: what matters most first, each result written as it comes.

    python -m venv gpu && gpu/bin/pip install -e . liger-kernel     # torch from PyPI brings CUDA; Liger's row may be missing
    gpu/bin/python benchmarks/gpu.py                                # 25 minutes on one H100 or H200
    gpu/bin/python benchmarks/gpu.py --minutes 9                    # a part of it; the next call goes on where this one ended
    gpu/bin/python benchmarks/gpu.py --parts speed profile          # rate, correctness, speed, generation, profile
    gpu/bin/python benchmarks/gpu.py --report                       # only the table
    python benchmarks/gpu.py --smoke --out /tmp/gpu                 # everything at tiny sizes on a CPU: do all parts run?

It needs a driver for CUDA 12.6 or later, 40 GB of GPU memory (80 GB for the longest rows), a C compiler for Triton, and no
network once it is installed: weights are random, in the shapes of Ouro-1.4B. A row that fails says so, and the others go on.
Results are lines of JSON in `gpu.jsonl`; a row that stands there is measured again with `--again` only. The table is `gpu.md`.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import json
import re
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import generation
import speed
import torch
import transformers
from datasets import disable_progress_bars
from gpu_report import OUT_OF_MEMORY, report
from torch.profiler import ProfilerActivity, profile

from loopdropout_trainer.generation import decoding
from loopdropout_trainer.models import layers
from loopdropout_trainer.models.layers import rms_norm
from loopdropout_trainer.models.speed import packed_attention


ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
STEP = 7
"""Number of the optimizer step whose gates and examples correctness and profile look at."""

LIGER = f"{speed.STOCK}, Liger kernels"
CHECKPOINTED = f"{speed.STOCK}, checkpointing"
SPEED_ROWS = (
    *(speed.OURS, speed.LORA, CHECKPOINTED, speed.STOCK, f"{speed.OURS}, compiled", f"{speed.LORA}, compiled"),
    *(f"{speed.OURS}, checkpointing", LIGER),
)
CORRECT_ROWS = {
    "plain": "Loop Dropout, no optimisation",
    "no padding": "Loop Dropout, no padding only",
    "fused LoRA": "Loop Dropout, fused LoRA only",
    "frozen prefix, unfused": "Loop Dropout, no padding, frozen prefix",
    "all that is on by default": speed.OURS,
    "gradient_checkpointing": f"{speed.OURS}, checkpointing",
    "compile_layers": f"{speed.OURS}, compiled",
}
"""What is compared with float32 without any optimisation, and which row of `speed.py` runs so."""


@dataclass(frozen=True)
class Sizes:
    """Shapes of a run: those of the paper's recipes on Ouro-1.4B, or tiny ones.

    Attributes:
        recipes: micro-batches of the paper's three recipes, as presets of `speed.py`.
        correct: the model that correctness is looked at on.
        steps: timed in each row.
        generating: presets of `generation.py`.
        matrices: (m, k, n) whose product is timed.
    """

    recipes: dict[str, speed.Preset]
    correct: speed.Preset
    steps: int
    generating: dict[str, generation.Preset]
    matrices: dict[str, tuple[int, int, int]]


_OURO = speed.PRESETS["ouro-1.4b"]
FULL = Sizes(
    recipes={
        "metamath_gsm": _OURO,  # 250 tokens in the mean, fewer than 512
        "gsm8k": replace(_OURO, median_length=170.0),
        "tulu2": replace(_OURO, median_length=120.0, length_spread=0.9, length_scale=4.0),  # up to 2,044 tokens
    },
    correct=replace(_OURO, num_layers=4, vocab_size=4096, batch=4),
    steps=8,
    generating={
        "varying lengths": replace(generation.PRESETS["ouro-1.4b"], num_prompts=96, batch=32),
        "equal lengths": replace(generation.PRESETS["ouro-1.4b"], num_prompts=64, batch=32, answer_tokens=130),
    },
    matrices={"8,192 cubed": (8192,) * 3, "the MLP's, 2,048 tokens": (2048, 2048, 5632)},
)
_TINY = speed.Preset(32, 48, 1, 2, 64, 0.05, "bfloat16", rounds=2, batch=2, num_loops=2)
_TINY_ANSWERS = generation.Preset(32, 48, 1, 2, 64, 0.05, "bfloat16", num_prompts=3, batch=2, rounds=1, num_loops=2)
TINY = Sizes(
    recipes={"metamath_gsm": _TINY},
    correct=_TINY,
    steps=2,
    generating={"varying lengths": _TINY_ANSWERS},
    matrices={"64 cubed": (64,) * 3},
)


# What a row measures.


class SharedWeights:
    """Makes the models of all rows: each of its own modules, over frozen weights that are drawn once, on the device."""

    def __init__(self) -> None:
        self.draw = speed.random_ouro
        self.drawn: tuple[Any, torch.nn.Module] | None = None

    def __call__(self, preset: Any) -> torch.nn.Module:
        fields = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "vocab_size", "num_loops", "dtype")
        shape = tuple(getattr(preset, name) for name in fields)
        if self.drawn is None or self.drawn[0] != shape:
            self.drawn = shape, self.fresh(preset)
        model = self.drawn[1]
        for parameter in model.parameters():
            parameter.requires_grad_(True)  # the row before has frozen them
        return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})

    def fresh(self, preset: Any) -> torch.nn.Module:
        """Return a model with weights of its own, and forget the shared ones, for which there may be no room."""
        self.drawn = None
        with DEVICE:
            return self.draw(preset)


def matmul_rate(shape: tuple[int, int, int]) -> dict[str, float]:
    """Return the FLOP/s of one product in bfloat16, the best of some trials."""
    m, k, n = shape
    a, b = torch.randn(m, k, device=DEVICE).bfloat16(), torch.randn(k, n, device=DEVICE).bfloat16()
    repeats = 50 if ON_GPU else 2
    seconds = []
    for _ in range(4):
        speed.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            a @ b
        speed.synchronize()
        seconds.append(time.perf_counter() - began)
    return {"flops_per_second": 2 * m * k * n * repeats / min(seconds)}


def correctness(row: str, preset: speed.Preset, folder: str) -> dict[str, float]:
    """Return how far loss and gradients in bfloat16 lie from float32 without optimisations, for a row and the plain one.

    Raises:
        RuntimeError: if the row is off by more than twice what rounding alone puts the plain one off.
    """
    reference, scale = _loss_and_gradients(CORRECT_ROWS["plain"], preset, folder, in_float32=True)
    distance = {}
    for name in ("plain", row):
        loss, gradients = _loss_and_gradients(CORRECT_ROWS[name], preset, folder)
        distance[name] = (
            abs(loss - reference) / abs(reference),
            ((gradients - scale).norm() / scale.norm()).item(),
        )
    numbers = {
        "loss_off": distance[row][0],
        "off": distance[row][1],
        "plain_loss_off": distance["plain"][0],
        "plain_off": distance["plain"][1],
    }
    if not distance[row][1] <= 2 * distance["plain"][1] + 1e-3:
        raise RuntimeError(
            f"gradients are off by {distance[row][1]:.2g}, rounding alone by {distance['plain'][1]:.2g}"
        )
    return numbers


@functools.lru_cache(maxsize=3)  # the reference, the plain one, the row
def _loss_and_gradients(
    name: str, preset: speed.Preset, folder: str, in_float32: bool = False
) -> tuple[float, torch.Tensor]:
    row = speed.Row(name, replace(preset, dtype="float32") if in_float32 else preset, folder, DEVICE)
    if in_float32:  # the very weights that the others have
        with torch.random.fork_rng():
            rounded = speed.Row(name, preset, folder, DEVICE)
        weights = dict(rounded.model.named_parameters())
        for key, parameter in row.model.named_parameters():
            parameter.data = weights[key].data.float()
    batch, num_items = row.prepare(speed.draw_examples(preset, STEP), DEVICE)
    loss = speed.backward(row.trainer, batch, num_items, STEP).item()
    return loss, row.gradients()


def varlen_attention(preset: speed.Preset) -> dict[str, float]:
    """Return how far attention of all examples at once is from one by one in float32, and the time of both."""
    lengths = [len(example["input_ids"]) for example in speed.draw_examples(preset, STEP)]
    heads, head_dim = preset.num_heads, preset.hidden_size // preset.num_heads
    packed = packed_attention.Lengths(lengths, DEVICE)
    drawn = torch.randn(4, 1, heads, sum(lengths), head_dim, device=DEVICE)
    forms = {"one by one": packed_attention._one_by_one, "at once": packed_attention._at_once}
    results, seconds = {}, {}
    for name, dtype in (("exact", torch.float32), ("one by one", torch.bfloat16), ("at once", torch.bfloat16)):
        inputs = [x.to(dtype).requires_grad_() for x in drawn[:3]]
        attend = partial(forms.get(name, packed_attention._one_by_one), *inputs, packed, head_dim**-0.5)
        gradient = drawn[3].transpose(1, 2).to(dtype)
        for _ in range(3):
            speed.synchronize()
            began = time.perf_counter()
            output = attend()
            gradients = torch.autograd.grad(output, inputs, gradient)
            speed.synchronize()
            seconds[name] = time.perf_counter() - began
        results[name] = [x.float() for x in (output, *gradients)]
    far = lambda name: max(
        ((got - want).norm() / want.norm()).item() for got, want in zip(results[name], results["exact"], strict=True)
    )
    off, plain = far("at once"), far("one by one")
    if off > 2 * plain + 1e-3:
        raise RuntimeError(f"at once is off by {off:.2g}, one by one by {plain:.2g}")
    milliseconds = {name: 1e3 * seconds[name] for name in forms}
    remark = "{at once:.2f} ms, one by one {one by one:.2f} ms".format_map(milliseconds)
    return {"off": off, "plain_off": plain, "remark": remark}


def norm_under_autocast(preset: speed.Preset) -> dict[str, float]:
    """Return how far a norm in bfloat16 is from float32 under autocast, and the bytes that it keeps for each value."""
    tokens = round(preset.median_length * preset.length_scale * preset.batch)
    x = torch.randn(tokens, preset.hidden_size, device=DEVICE).bfloat16().requires_grad_()
    weight = torch.ones(preset.hidden_size, device=DEVICE, dtype=torch.bfloat16)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        y = rms_norm(x, weight, 1e-6)
    wide = x.detach().float()
    want = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    off = ((y.float() - want).norm() / want.norm()).item()
    if off > 1e-2:
        raise RuntimeError(f"the norm is off by {off:.2g}")
    return {"off": off, "remark": f"keeps {sum(kept.values()) / x.numel():.2f} bytes for each value"}


def training_speed(name: str, preset: speed.Preset, steps: int, folder: str) -> dict[str, Any]:
    """Return the time of a row's optimizer step and the memory that a run of it alone needs."""
    with liger_kernels() if name == LIGER else nullcontext():
        row = speed.Row(speed.STOCK if name == LIGER else name, preset, folder, DEVICE)
        for step in range(1, 5 if "compiled" in name else 3):
            speed.take_step(row.trainer, *row.prepare(speed.draw_examples(preset, step), DEVICE), step)
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        seconds, tokens = [], []
        for step in range(1, steps + 1):
            examples = speed.draw_examples(preset, step)
            seconds.append(speed.take_step(row.trainer, *row.prepare(examples, DEVICE), step))
            tokens.append(sum(len(example["input_ids"]) for example in examples))
    numbers = {
        "step_seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": sum(tokens) / sum(seconds),
        "flops_per_second": speed.flops_per_token(row.model) * sum(tokens) / sum(seconds),
        "memory_bytes": torch.cuda.max_memory_allocated() if ON_GPU else None,
    }
    if name == speed.OURS:
        numbers["waiting_share"] = speed.waiting_share(preset, steps, row)
    return numbers


@contextmanager
def liger_kernels() -> Iterator[None]:
    """Put Liger's kernels in the place of the norm and of SwiGLU in every layer, as its patches for known models do."""
    from liger_kernel.transformers.functional import liger_rms_norm, liger_swiglu

    norm, activation = layers.RMSNorm.forward, layers.GatedMLP.activation
    layers.RMSNorm.forward = lambda self, x: liger_rms_norm(x, self.weight, self.variance_epsilon, in_place=False)
    layers.GatedMLP.activation = lambda self, gate, up: liger_swiglu(gate, up)
    try:
        yield
    finally:
        layers.RMSNorm.forward, layers.GatedMLP.activation = norm, activation


def generating(row: str, preset: generation.Preset) -> dict[str, Any]:
    """Return the time of one way to answer all prompts, after a few that warm up."""
    model = _adapted(preset)
    prompts = generation.draw_prompts(preset)
    few = prompts[: preset.batch // 2]
    generation.make_rows(model, replace(preset, num_prompts=len(few)), few)[row]()
    seconds, memory = generation.timed(answer := _Kept(generation.make_rows(model, preset, prompts)[row]))
    tokens = sum(map(len, answer.answers.values()))
    numbers = {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "memory_bytes": memory or None,
        "tokens": tokens,
    }
    reference = (
        generation.make_rows(model, preset, prompts)[GENERATION_ROWS[0]]() if row != GENERATION_ROWS[0] else None
    )
    if reference is not None:
        numbers["gap"] = generation.largest_gap(model, prompts, reference, answer.answers)
        if numbers["gap"] > 0.1:
            raise RuntimeError(
                f"it chooses other tokens, {numbers['gap']:.1g} standard deviations of the logits apart"
            )
    return numbers


class _Kept:
    """Calls a function, and keeps what it returned."""

    def __init__(self, function: Callable[[], dict]) -> None:
        self.function = function
        self.answers: dict = {}

    def __call__(self) -> None:
        self.answers = self.function()


@functools.lru_cache(maxsize=1)
def _adapted(preset: generation.Preset) -> torch.nn.Module:
    return generation.adapted_ouro(preset, DEVICE)


GENERATION_ROWS = (
    "`generate`, sorted by length",
    "and projections are prepared (what an evaluation does)",
    "without prepared projections, steps are compiled (`compiled`)",
)

KERNELS = {
    "attention": r"flash|fmha|attention|sdpa|softmax",
    "matrix products": r"gemm|gemv|cutlass|cublas|nvjet|xmma|wgmma|matmul|::mm|addmm|::linear|::bmm",
    "norms": r"rms_?norm|layer_?norm|vector_norm",
    "copies, joins and splits": r"memcpy|memset|copy|cat|index|gather|scatter|fill|zero",
    "optimizer": r"multi_tensor|adam|foreach|lpnorm",
    "loss": r"cross_entropy|nll|logprob|_forward_kernel|_backward_kernel",
    "reductions": r"reduce|sum|mean|argmax",
    "pointwise": r"elementwise|vectorized|triton|silu|mul|add|pow|cos|sin|::sub|::div|rsqrt|where",
}
"""Groups of kernels (on a CPU: of operations) by their names; the first that matches."""


def kernel_profile(name: str, preset: speed.Preset, folder: str) -> dict[str, Any]:
    """Return the time of a step by group of kernels, how many there are, and for how much of the step the GPU is at work."""
    row = speed.Row(name, preset, folder, DEVICE)
    for step in (1, 2, 3, STEP):
        batch, num_items = row.prepare(speed.draw_examples(preset, step), DEVICE)
        speed.take_step(row.trainer, batch, num_items, step)
    with profile(activities=[ProfilerActivity.CUDA if ON_GPU else ProfilerActivity.CPU]) as profiler:
        wall = speed.take_step(row.trainer, batch, num_items, STEP)
    seconds, counts = defaultdict(float), defaultdict(int)
    for event in profiler.key_averages():
        own = event.self_device_time_total if ON_GPU else event.self_cpu_time_total
        if own > 0:
            group = next((group for group, names in KERNELS.items() if re.search(names, event.key, re.I)), "other")
            seconds[group] += own / 1e6
            counts[group] += event.count
    return {"step_seconds": wall, "seconds": seconds, "counts": counts, "busy": sum(seconds.values()) / wall}


# The order of what matters most, and the record of what came of it.


def tasks(sizes: Sizes, folder: str) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """Yield the part, the row's name, and what measures it."""
    for name, shape in sizes.matrices.items():
        yield "rate", name, partial(matmul_rate, shape)
    for name in CORRECT_ROWS:
        if name != "plain":
            yield "correctness", name, partial(correctness, name, sizes.correct, folder)
    yield "correctness", "attention for variable lengths", partial(varlen_attention, sizes.correct)
    yield "correctness", "norm under autocast", partial(norm_under_autocast, sizes.correct)
    for recipe, preset in sizes.recipes.items():
        for name in SPEED_ROWS:
            yield "speed", f"{recipe}: {name}", partial(training_speed, name, preset, sizes.steps, folder)
    for kind, preset in sizes.generating.items():
        for name in GENERATION_ROWS:
            yield "generation", f"{kind}: {name}", partial(generating, name, preset)
    for name in (speed.OURS, speed.LORA, speed.STOCK, f"{speed.OURS}, compiled"):
        first = next(iter(sizes.recipes.values()))
        yield "profile", name, partial(kernel_profile, name, first, folder)


NAMES = {
    "stock": speed.STOCK,
    "lora": speed.LORA,
    "generate": GENERATION_ROWS[0],
    "groups": [*KERNELS, "other"],
}
PARTS = ("rate", "correctness", "speed", "generation", "profile")


def attempt(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what was measured, or what went wrong."""
    began = time.perf_counter()
    try:
        numbers = {"status": "ok", **measure()}
    except torch.OutOfMemoryError:
        numbers = {"status": OUT_OF_MEMORY}
    except Exception as error:  # of many kinds: a kernel that is not there, a result that is wrong
        lines = (str(error).strip() or "no message").splitlines()
        numbers = {"status": f"{type(error).__name__}: {lines[0][:300]}"}
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
    return {**numbers, "took_seconds": round(time.perf_counter() - began, 1)}


def read(file: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the last record of each row, in the order of their first."""
    records: dict[tuple[str, str], dict[str, Any]] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        record = json.loads(line)
        records[record["part"], record["row"]] = record
    return records


def run(sizes: Sizes, file: Path, parts: list[str], minutes: float, again: bool, folder: str) -> None:
    """Measure what is not in the file yet, until the time is over."""
    began, measured = time.monotonic(), read(file)
    machine = {
        "device": torch.cuda.get_device_name() if ON_GPU else f"CPU ({speed.cpu_name()})",
        "versions": speed.versions(),
    }
    for part, row, measure in tasks(sizes, folder):
        if part not in parts or ((part, row) in measured and not again):
            continue
        if time.monotonic() - began > 60 * minutes:
            print(f"{minutes:g} minutes are over; the next call goes on with {part}: {row}.")
            return
        if part != "generation":
            _adapted.cache_clear()
        record = {"part": part, "row": row, **attempt(measure), **machine}
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(record) + "\n")
        print(f"{part}: {row}: {record['status']} ({record['took_seconds']} s)", flush=True)
        if "CUDA error" in record["status"]:  # nothing works in this process any more
            raise SystemExit("The GPU's context is broken. The same command goes on with the next row.")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=25.0, help="start no row after so many")
    parser.add_argument("--again", action="store_true", help="measure rows again that have been measured")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on whatever there is")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder")
    options = parser.parse_args(arguments)
    if not (ON_GPU or options.smoke or options.report):
        parser.error("there is no GPU: `--smoke` runs tiny shapes on a CPU")
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    disable_progress_bars()
    sizes = TINY if options.smoke else FULL
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / ("gpu_smoke.jsonl" if options.smoke else "gpu.jsonl")
    if not options.report:
        with tempfile.TemporaryDirectory() as folder, shared_weights(), without_compiler(options.smoke and not ON_GPU):
            run(sizes, file, options.parts, options.minutes, options.again, folder)
    rows = [(part, row) for part, row, _ in tasks(sizes, "")]
    text = report(read(file), rows, NAMES)
    file.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


@contextmanager
def shared_weights() -> Iterator[None]:
    """Let the rows of both benchmarks share their frozen weights."""
    former, shared = speed.random_ouro, SharedWeights()
    speed.random_ouro, generation.random_ouro = shared, shared.fresh  # one that generates is shared by its rows anyway
    try:
        yield
    finally:
        speed.random_ouro = generation.random_ouro = former


@contextmanager
def without_compiler(enabled: bool) -> Iterator[None]:
    """Leave `torch.compile` out, which takes half a minute of a CPU for what is over in a second."""
    compile_ = torch.compile
    if enabled:
        torch.compile = lambda function, **options: function
    try:
        yield
    finally:
        torch.compile = compile_
        decoding._compiled.cache_clear()


if __name__ == "__main__":
    main()
