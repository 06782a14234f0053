"""Time of greedy generation for an evaluation: transformers' `generate`, and each thing that ours does besides.

    python benchmarks/generation.py                        # some minutes on a CPU; writes benchmarks/results/generation.md
    python benchmarks/generation.py --preset ouro-1.4b     # one GPU with 80 GB

All rows continue the same random prompts with one random Ouro and an adapter on it, in one process, and are checked to give
the same answers, up to near ties. How long an answer is depends on its first tokens alone, so that lengths vary as those of
real answers do. In each round every row answers all prompts once, in an order that is turned from round to round.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
import torch._inductor.config
import transformers
from peft import get_peft_model
from speed import clock, cpu_name, random_ouro, report, synchronize, versions

from loopdropout_trainer import default_peft_config
from loopdropout_trainer.lora import PreparedProjections, add_gates
from loopdropout_trainer.generation.generation import DECODINGS


LONGEST_ANSWER = 512


@dataclass(frozen=True)
class Preset:
    """A shape. Prompts and answers have log-normal lengths, times `length_scale`: of 150 and 130 tokens in the median."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    vocab_size: int
    length_scale: float
    dtype: str
    num_prompts: int
    batch: int
    rounds: int
    num_loops: int = 4
    answer_tokens: int | None = None  # the length of every answer; None: lengths vary


PRESETS = {
    "cpu": Preset(256, 704, 1, 4, 1024, 0.2, "float32", num_prompts=48, batch=8, rounds=11),
    "cpu-equal": Preset(256, 704, 1, 4, 1024, 0.2, "float32", num_prompts=16, batch=8, rounds=15, answer_tokens=26),
    "ouro-1.4b": Preset(2048, 5632, 24, 16, 49152, 1.0, "bfloat16", num_prompts=512, batch=64, rounds=2),
}


class DrawnEnds:
    """Ends an answer at a length that is drawn by its first three tokens; takes the place of stop strings."""

    end_ids = ()

    def __init__(self, preset: Preset) -> None:
        self.scale = preset.length_scale
        self.equal = preset.answer_tokens

    def length(self, answer: list[int]) -> int:
        if self.equal is not None:
            return self.equal
        return max(4, round(drawn_length(tuple(answer[:3])) * self.scale))

    def __call__(self, answers: list[list[int]]) -> list[bool]:
        return [len(answer) >= 3 and len(answer) >= self.length(answer) for answer in answers]


@cache  # a draw takes as long as some layers, and is not what is measured
def drawn_length(first: tuple[int, ...]) -> float:
    seed = int.from_bytes(hashlib.blake2b(repr(list(first)).encode(), digest_size=4).digest(), "little")
    return float(np.exp(np.random.default_rng(seed).normal(np.log(130), 0.5)).clip(16, LONGEST_ANSWER))


def draw_prompts(preset: Preset) -> list[list[int]]:
    random = np.random.default_rng(0)
    lengths = np.exp(random.normal(np.log(150), 0.3, preset.num_prompts)).clip(64, 400) * preset.length_scale
    return [random.integers(2, preset.vocab_size, round(length)).tolist() for length in lengths]


def adapted_ouro(preset: Preset, device: torch.device) -> torch.nn.Module:
    """Return a random Ouro with an adapter that changes what it says, in evaluation mode."""
    torch.manual_seed(0)
    model = random_ouro(preset)
    model.generation_config = transformers.GenerationConfig()  # no end tokens
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.05)
    model = get_peft_model(model, default_peft_config(model))
    add_gates(model, in_activation_dtype=True)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    return model.eval().to(device)


Answers = dict[int, list[int]]


def answer(form: str, model: torch.nn.Module, preset: Preset, prompts: list[list[int]], order: list[int]) -> Answers:
    """Answer the prompts in this order; return answers by the prompts' indices."""
    looped, ends = model.get_base_model(), DrawnEnds(preset)
    most = round(LONGEST_ANSWER * preset.length_scale)
    decoder = DECODINGS[form](looped, [prompts[index] for index in order], most, preset.batch, ends)
    answers: Answers = {}
    for finished in decoder:
        for place, tokens in finished:
            answers[order[place]] = tokens[: ends.length(tokens)]  # `generate` goes on with padding
    return answers


def by_batches(model: torch.nn.Module, preset: Preset, prompts: list[list[int]], order: list[int]) -> Answers:
    """Answer a batch at a time, so that nothing is admitted to the slots of rows that end."""
    answers: Answers = {}
    for start in range(0, len(order), preset.batch):
        answers |= answer("eager", model, preset, prompts, order[start : start + preset.batch])
    return answers


def prepared(model: torch.nn.Module, *arguments) -> Answers:
    """Answer with prepared projections, as an evaluation does."""
    with PreparedProjections(model.get_base_model()).in_use():
        return answer("eager", model, *arguments)


class Merged:
    """The model with its adapter merged for good, in the place of a PEFT model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = copy.deepcopy(model).merge_and_unload()

    def get_base_model(self) -> torch.nn.Module:
        return self.model


def make_rows(model: torch.nn.Module, preset: Preset, prompts: list[list[int]]) -> dict[str, Callable[[], Answers]]:
    given = list(range(len(prompts)))
    longest_first = sorted(given, key=lambda index: -len(prompts[index]))
    everything, merged = (model, preset, prompts), Merged(model)
    return {
        "`generate`, batches as given": partial(answer, "generate", *everything, given),
        "`generate`, sorted by length": partial(answer, "generate", *everything, longest_first),
        "rows that end are evicted": partial(by_batches, *everything, longest_first),
        "and waiting prompts are admitted to their slots (`eager`)": partial(
            answer, "eager", *everything, longest_first
        ),
        "and projections are prepared (what an evaluation does)": partial(prepared, *everything, longest_first),
        "adapter merged for good: `generate`, sorted by length": partial(
            answer, "generate", merged, *everything[1:], longest_first
        ),
        "adapter merged for good: what an evaluation does": partial(prepared, merged, *everything[1:], longest_first),
        "without prepared projections, steps are compiled (`compiled`)": partial(
            answer, "compiled", *everything, longest_first
        ),
    }


def timed(row: Callable[[], Answers]) -> tuple[float, int]:
    """Return seconds, and on a GPU the peak memory in bytes."""
    synchronize()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began = clock()
    row()
    synchronize()
    seconds = clock() - began
    return seconds, torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


@torch.no_grad()
def largest_gap(model: torch.nn.Module, prompts: list[list[int]], answers: Answers, others: Answers) -> float:
    """Return how far the logits of the first tokens that differ lie apart at most, in standard deviations of the logits."""
    gaps = [0.0]
    for index, prompt in enumerate(prompts):
        pairs = zip(answers[index], others[index], strict=False)
        place = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        if place is not None:
            ids = torch.tensor([prompt + answers[index][:place]], device=model.device)
            logits = model(input_ids=ids, use_cache=False).logits[0, -1].float()
            gap = logits[answers[index][place]] - logits[others[index][place]]
            gaps.append((gap.abs() / logits.std()).item())
    return max(gaps)


def measure(
    model: torch.nn.Module, preset: Preset, prompts: list[list[int]], rounds: int
) -> tuple[list[dict], Answers]:
    """Return one record for each row, and the answers.

    Raises:
        RuntimeError: if a row gives other answers, and the tokens at which they part are no near tie.
    """
    rows = make_rows(model, preset, prompts)
    rounding = 1e-3 if preset.dtype == "float32" else 0.1
    records = {name: {"row": name, "seconds": [], "memory_bytes": 0} for name in rows}
    reference: Answers = {}
    for name, row in rows.items():  # warms up, too
        began = time.perf_counter()
        answers = row()
        synchronize()
        first_seconds = time.perf_counter() - began
        reference = reference or answers
        agreeing = sum(answers[index] == reference[index] for index in reference) / len(reference)
        gap = largest_gap(model, prompts, reference, answers)
        if gap > rounding:
            raise RuntimeError(f"{name!r} chooses other tokens, {gap:.1g} standard deviations of the logits apart.")
        records[name] |= {"agreeing": agreeing, "largest_gap": gap, "first_seconds": first_seconds}
    for shift in range(rounds):
        names = list(rows)
        for name in names[shift % len(names) :] + names[: shift % len(names)]:
            seconds, memory = timed(rows[name])
            records[name]["seconds"].append(seconds)
            records[name]["memory_bytes"] = max(records[name]["memory_bytes"], memory)
    tokens = sum(map(len, reference.values()))
    base = statistics.median(next(iter(records.values()))["seconds"])
    for record in records.values():
        seconds = statistics.median(record["seconds"])
        record |= {"tokens_per_second": tokens / seconds, "ratio": seconds / base}
    return list(records.values()), reference


def table(details: dict) -> list[str]:
    """Return the lines of one preset's section."""
    shape, records, lengths = details["shape"], details["rows"], details["lengths"]
    lines = [
        f"## {details['preset']}",
        "",
        f"`python benchmarks/generation.py --preset {details['preset']}` on {details['device']}; {details['versions']}.",
        "",
        f"Random Ouro of {shape['num_layers']} layer(s), hidden size {shape['hidden_size']}, {shape['num_loops']} loops, "
        f"{shape['dtype']}, with LoRA of rank 16 on all projections of the recurrent block; {shape['num_prompts']} prompts "
        f"in batches (slots) of {shape['batch']}; answers of {lengths[0]} to {lengths[2]} tokens, {lengths[1]:.0f} in the "
        f"median. Median of {details['rounds']} runs after one that warms up"
        + ("." if details["on_gpu"] else "; time is the process's own, on one thread.")
        + " First runs are by the clock on the wall; that of the compiled row compiles, without any cache.",
        "",
        *([details["note"], ""] if details.get("note") else []),
        "| | Time | to `generate` | Tokens/s | First run | Same answers |"
        + (" Peak memory |" if details["on_gpu"] else ""),
        "|---|---:|---:|---:|---:|---:|" + ("---:|" if details["on_gpu"] else ""),
    ]
    for r in records:
        low, high = min(r["seconds"]), max(r["seconds"])
        lines.append(
            f"| {r['row']} | {statistics.median(r['seconds']):.2f} s ({low:.2f} to {high:.2f}) | {r['ratio']:.2f} | "
            f"{r['tokens_per_second']:.0f} | {r['first_seconds']:.1f} s | {r['agreeing']:.0%} |"
            + (f" {r['memory_bytes'] / 2**30:.1f} GiB |" if details["on_gpu"] else "")
        )
    gap = max(r["largest_gap"] for r in records)
    if gap:
        lines += [
            "",
            f"Answers that differ part at near ties: two tokens whose logits are at most {gap:.0e} standard "
            "deviations apart.",
        ]
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--rounds", type=int, help="runs of each row; default: the preset's")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder")
    parser.add_argument("--note", help="what a reader of the results must know of the machine")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch._inductor.config.force_disable_caches = True
    transformers.logging.set_verbosity_error()
    preset = PRESETS[options.preset]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    began = time.time()
    prompts = draw_prompts(preset)
    rounds = options.rounds or preset.rounds
    records, answers = measure(adapted_ouro(preset, device), preset, prompts, rounds)
    lengths = sorted(map(len, answers.values()))
    details = {
        "preset": options.preset,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"one core of a CPU ({cpu_name()})",
        "on_gpu": device.type == "cuda",
        "versions": versions(),
        "shape": asdict(preset),
        "rounds": rounds,
        "note": options.note,
        "lengths": [lengths[0], statistics.median(lengths), lengths[-1]],
        "rows": records,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"generation_{options.preset}.json"
    file.write_text(json.dumps(details, indent=1) + "\n", encoding="utf-8")
    files = [options.out / f"generation_{name}.json" for name in PRESETS]
    measured = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    text = report("Generation", "generation.py", measured, table)
    (options.out / "generation.md").write_text(text, encoding="utf-8")
    print(f"{text}\n{time.time() - began:.0f} s in all")


if __name__ == "__main__":
    main()
