"""The table of `benchmarks/gpu.py`, from its records; what is not there is "not measured"."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any


Record = dict[str, Any]
OUT_OF_MEMORY = "out of memory"
MISSING = "not measured"


def report(records: dict[tuple[str, str], Record], rows: Sequence[tuple[str, str]], names: dict[str, str]) -> str:
    """Return all tables as Markdown.

    Args:
        records: by part and row.
        rows: part and row of all that is to be measured; those of speed and generation are called `shape: way`.
        names: the rows that others are divided by, as `stock`, `lora` and `generate`; and the `groups` of kernels.
    """
    devices = sorted({f"{record['device']}; {record['versions']}" for record in records.values()})
    lines = ["# On a GPU", "", f"`python benchmarks/gpu.py`: {'; '.join(devices) or MISSING}.", ""]
    of_part = {part: [row for name, row in rows if name == part] for part, _ in rows}
    get = lambda part, row: records.get((part, row))

    rates = [record["flops_per_second"] for row in of_part["rate"] if _is_ok(record := get("rate", row))]
    lines += ["## Rate of products in bfloat16", ""]
    lines += _table(["", "TFLOP/s"], [[row, _cell(get("rate", row), _tflops)] for row in of_part["rate"]])

    lines += ["## Correctness", "", "Distance from float32 without optimisations, relative to the norm."]
    lines += ["The plain computation in the same bfloat16 stands beside it.", ""]
    lines += _table(
        ["", "gradients off by", "plain", "remarks"],
        [[row, *_off(get("correctness", row)), _remark(get("correctness", row))] for row in of_part["correctness"]],
    )

    lines += [
        "## Training",
        "",
        "Median of the steps after those that warm up. The share is that of the best rate above, by",
    ]
    lines += [
        "the formula 4 (K N + M) + 6 K R for a token's work. The bound of Loop Dropout is 1 - w / 2 of our LoRA, with the"
    ]
    lines += ["share w of loops before an example's first active gate.", ""]
    for shape, ways in _by_shape(of_part["speed"]).items():
        record = lambda way, shape=shape: get("speed", f"{shape}: {way}")
        lines += [f"### {shape}", ""]
        lines += _table(
            ["", "Step", "to TRL + PEFT", "to our LoRA", "to the bound", "Tokens/s", "Share of rate", "Memory"],
            [
                [
                    way,
                    _cell(record(way), lambda r: f"{1e3 * _step(r):.0f} ms"),
                    _ratio(record(way), record(names["stock"]), _step),
                    _ratio(record(way), record(names["lora"]), _step),
                    _to_bound(record(way), record(names["lora"])),
                    _cell(record(way), lambda r: f"{r['tokens_per_second']:.0f}"),
                    _cell(record(way), lambda r: f"{r['flops_per_second'] / max(rates):.1%}" if rates else MISSING),
                    _cell(record(way), _memory),
                ]
                for way in ways
            ],
        )

    lines += ["## Generation", ""]
    for shape, ways in _by_shape(of_part["generation"]).items():
        record = lambda way, shape=shape: get("generation", f"{shape}: {way}")
        cells = lambda way, record=record: [
            way,
            _cell(record(way), lambda r: f"{r['seconds']:.1f} s"),
            _ratio(record(way), record(names["generate"]), lambda r: r["seconds"]),
            _cell(record(way), lambda r: f"{r['tokens_per_second']:.0f}"),
            _cell(record(way), _memory),
        ]
        lines += [f"### {shape}", "", *_table(["", "Time", "to `generate`", "Tokens/s", "Memory"], map(cells, ways))]

    groups = names["groups"]
    shown = lambda group: lambda r: f"{1e3 * r['seconds'].get(group, 0):.1f}, {r['counts'].get(group, 0)}"
    lines += [
        "## Profile",
        "",
        "Milliseconds of a step and number of kernels; busy: the share of the step that they take.",
        "",
    ]
    lines += _table(
        ["", "busy", *groups],
        [
            [row, *(_cell(get("profile", row), show) for show in (_busy, *map(shown, groups)))]
            for row in of_part["profile"]
        ],
    )
    return "\n".join(lines)


def _table(heads: Sequence[str], rows: Any) -> list[str]:
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return [*("| " + " | ".join(cells) + " |" for cells in lines), ""]


def _by_shape(rows: Sequence[str]) -> dict[str, list[str]]:
    shapes: dict[str, list[str]] = {}
    for row in rows:
        shape, way = row.split(": ", 1)
        shapes.setdefault(shape, []).append(way)
    return shapes


def _is_ok(record: Record | None) -> bool:
    return record is not None and record["status"] == "ok"


def _cell(record: Record | None, show: Callable[[Record], str]) -> str:
    if _is_ok(record):
        return show(record)
    return MISSING if record is None else OUT_OF_MEMORY if record["status"] == OUT_OF_MEMORY else "failed"


def _ratio(record: Record | None, other: Record | None, quantity: Callable[[Record], float]) -> str:
    return f"{quantity(record) / quantity(other):.2f}" if _is_ok(record) and _is_ok(other) else MISSING


def _to_bound(record: Record | None, lora: Record | None) -> str:
    if not _is_ok(record) or "waiting_share" not in record:
        return ""
    return f"{_step(record) / _step(lora) / (1 - record['waiting_share'] / 2):.2f}" if _is_ok(lora) else MISSING


def _step(record: Record) -> float:
    return statistics.median(record["step_seconds"])


def _tflops(record: Record) -> str:
    return f"{record['flops_per_second'] / 1e12:.3g}"


def _memory(record: Record) -> str:
    return f"{record['memory_bytes'] / 1e9:.1f} GB" if record["memory_bytes"] else MISSING


def _busy(record: Record) -> str:
    return f"{record['busy']:.0%}"


def _off(record: Record | None) -> list[str]:
    return [_cell(record, lambda r, key=key: f"{r[key]:.1e}" if key in r else "") for key in ("off", "plain_off")]


def _remark(record: Record | None) -> str:
    if record is None:
        return ""
    return record.get("remark", "") if _is_ok(record) else record["status"].replace("|", "/")
