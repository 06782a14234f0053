"""Measurements: one row for each number, in a file of JSON lines, beside the identities of what they depend on.

Whoever measures writes rows (a training, an evaluation, a diagnosis), and whoever shows numbers reads them; nothing else does.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from inspect import formatannotation
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
from filelock import FileLock

from loopdropout_trainer.checks import shown
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.record.identity import Identity, identity_key, read_identity
from loopdropout_trainer.saving.files import sha256_of_json, write_atomically, write_json


MEASUREMENTS_FILE, IDENTITIES_FILE = "measurements.jsonl", "identities.json"

WRITERS_FILE = "writers.json"
"""Holds a hash of each writer's rows, by which it is noticed that one was changed, deleted or added."""

DIVERGED_FILE = "diverged.json"
"""What a training that stopped at NaN leaves in the place of its measurements."""

_REMEDY = "remove it, and the command that wrote it will measure again"

ALL, NONE = "all", "none"
"""Gates: unit gates, and the model without its adapter's update."""

BASE, TRAINING = "base", "training"
"""Method of the model alone; what stands as the benchmark of what a training logged and cost."""


class RecordError(ValueError):
    """A row or a file that holds no measurements, in one sentence."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One number, what it is, and where it was measured.

    Attributes:
        writer: what wrote it, `training`, `evaluation/ROW/BENCHMARK` or `diagnostics/NAME/IDENTITY`; when it writes again, its
            rows are replaced.
        family: what is drawn together, such as `accuracy` or the name of a diagnostic.
        metric, value, unit: the number. Accuracies are in percent, losses in nats for each target token.
        benchmark: what it was measured on: a benchmark, `held_out` rows, or `training`.
        method: what was trained, as people call it; `base` for the model alone.
        seed, steps: of its training: its seed, and the steps that it had taken.
        model: name of the base.
        depth: loops that ran. gates: `all` (1 in each loop), `none`, or one for each, such as `1-0-0-0`.
        loop: the one loop that has the adapter, or is read out. other_loop: the column of a matrix of loops.
        readout: the loop after which the model was read out, if it is not the last one.
        dose: the gate of all loops. group: a part of the benchmark. step: of a learning curve.
        total: number of problems.
        verdicts: [problems] what each problem counts, from 0 to 1. answered: [problems] 1 if its completion holds an answer.
        identity: key of what the number depends on. run: key of the training's identity, if it is known.

    Raises:
        RecordError: for a field of another type, a number that is not finite, a negative count, or text that no file can hold.
    """

    writer: str
    family: str
    metric: str
    value: float | int
    identity: str
    unit: str = ""
    benchmark: str = ""
    method: str = BASE
    model: str | None = None
    seed: int | None = None
    steps: int | None = None
    run: str | None = None
    depth: int | None = None
    gates: str = ALL
    loop: int | None = None
    other_loop: int | None = None
    readout: int | None = None
    dose: float | int | None = None
    group: str | None = None
    step: int | None = None
    total: int | None = None
    verdicts: list | None = None
    answered: list | None = None

    def __post_init__(self) -> None:
        for name, kind in _TYPES.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise RecordError(f"`{name}` must be of type `{formatannotation(kind)}`; got {shown(value)}")
            if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
                raise RecordError(f"`{name}` must be valid Unicode without NUL; got {shown(value)}")
            if kind == int | None and value is not None and value < 0:
                raise RecordError(f"`{name}` must be an integer of at least 0; got {value}")
            if isinstance(value, int | float) and not abs(value) < 1e300:
                raise RecordError(f"`{name}` must be a finite number; got {shown(value)}")
        for name in ("verdicts", "answered"):
            values = getattr(self, name)
            if values is not None and not (len(values) == self.total and all(map(_is_share, values))):
                raise RecordError(f"`{name}` must be a number from 0 to 1 for each of {self.total} problems")
        right = 100 * sum(self.verdicts or ())
        if self.verdicts is not None and not math.isclose(right, self.value * self.total, abs_tol=1e-6):
            raise RecordError(f"`value` must be {right / self.total:g}, as its `verdicts` say; got {self.value:g}")


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1


_TYPES = get_type_hints(Measurement)
PLACES = ("depth", "gates", "loop", "other_loop", "readout", "dose", "group", "step")
"""The fields that say where in a measurement a number is."""


def mean_sd(values: Sequence[float], decimals: int = 2) -> str:
    """Return `mean ± SD` (n - 1) of one value for each training seed, the mean alone for a single one; a NaN makes both NaN.

    Give it rates of counts: of rounded percentages the standard deviation can come out 0.01 off.
    """
    spread = f" ± {np.std(values, ddof=1):.{decimals}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{decimals}f}{spread}"


def gates_text(gates: Sequence[float] | None) -> str:
    """Return gates [K] as rows have them: `1-0-0-0`; None, and ones: `all`."""
    return ALL if gates is None or all(gate == 1 for gate in gates) else "-".join(f"{gate:g}" for gate in gates)


def write_measurements(
    folder: str | Path, rows: Iterable[Measurement], identities: Iterable[Identity | None], writer: str | None = None
) -> None:
    """Write rows into a folder, in the place of those of the same writers, and of `writer`, which may have none now.

    Several processes may write at once. Of identities that no row refers to any more nothing is kept.

    Raises:
        RecordError: if the folder's identities or hashes cannot be read.
    """
    folder = Path(folder)
    new = [as_json(row) for row in rows]
    folder.mkdir(parents=True, exist_ok=True)
    replaced = {writer, *(row["writer"] for row in new)} - {None}
    with FileLock(folder / f".{MEASUREMENTS_FILE}.lock"):
        # Lines that somebody has damaged stay as they are: what was measured for hours is written all the same.
        lines = _text(folder / MEASUREMENTS_FILE).splitlines()
        lines = [line for line in lines if _fields(line).get("writer") not in replaced]
        lines += [json.dumps(row, ensure_ascii=False) for row in new]
        used = {_fields(line).get(name) for line in lines for name in ("identity", "run")}
        named = read_identities(folder)
        named |= {identity_key(identity): identity for identity in identities if identity}
        named = {key: identity for key, identity in named.items() if key in used}
        before = _read_hashes(folder)
        if before is None:  # of an earlier version: from now on they are known
            before = _hashes(map(as_json, read_measurements(folder)[0]))
        kept = {writer: digest for writer, digest in before.items() if writer not in replaced}
        hashes = {**kept, **_hashes(new)}
        write_json(folder / IDENTITIES_FILE, named)
        write_json(folder / WRITERS_FILE, hashes)
        write_atomically(folder / MEASUREMENTS_FILE, "".join(f"{line}\n" for line in lines))


def as_json(row: Measurement) -> dict[str, Any]:
    """Return the fields of a row that are not as by default."""
    return {name: value for name, value in asdict(row).items() if value != _DEFAULTS.get(name, ...)}


_DEFAULTS = {field.name: field.default for field in fields(Measurement)}


def read_measurements(folder: str | Path) -> tuple[list[Measurement], dict[str, Identity], list[str]]:
    """Return a folder's rows, its identities by key, and a sentence about each line and writer that is left out.

    A writer is left out if its rows are not those that it wrote: some were changed, deleted or added.

    Raises:
        RecordError: if a file cannot be read at all.
    """
    folder = Path(folder)
    faults = []
    rows = []
    identities = read_identities(folder)
    for number, text in enumerate(_text(folder / MEASUREMENTS_FILE).splitlines(), start=1):
        try:
            rows.append(_row(_fields(text), identities))
        except RecordError as error:
            faults.append(f"{folder / MEASUREMENTS_FILE}, line {number}: {error}.")
    hashes = _hashes(map(as_json, rows))
    written = _read_hashes(folder)
    if written is None:
        return rows, identities, faults
    changed = [writer for writer in {**written, **hashes} if hashes.get(writer) != written.get(writer)]
    for writer in changed:
        what = "were changed or deleted since they were written" if writer in written else f"are not in {WRITERS_FILE}"
        faults.append(f"{folder / MEASUREMENTS_FILE}: rows of `{writer}` {what}.")
    return [row for row in rows if row.writer not in changed], identities, faults


def _hashes(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return a hash of each writer's rows."""
    by_writer = defaultdict(list)
    for row in rows:
        by_writer[row["writer"]].append(row)
    return {writer: sha256_of_json(of_writer) for writer, of_writer in by_writer.items()}


def _read_hashes(folder: Path) -> dict[str, str] | None:
    """Return the hash of each writer's rows; None where earlier versions wrote, whose rows are taken as they are."""
    path = folder / WRITERS_FILE
    try:
        return dict(json.loads(_text(path))) if path.exists() else None
    except (ValueError, TypeError, RecursionError):
        raise RecordError(f"{path} cannot be read as JSON; {_REMEDY}") from None


def _row(line: Mapping[str, Any], identities: Mapping[str, Identity]) -> Measurement:
    if not line:
        raise RecordError("it is no JSON mapping")
    if strange := sorted(line.keys() - _TYPES.keys()):
        raise RecordError(f"`{strange[0]}` is no field of a measurement")
    if missing := [name for name in ("writer", "family", "metric", "value", "identity") if name not in line]:
        raise RecordError(f"`{missing[0]}` is missing")
    row = Measurement(**line)
    for name in ("identity", "run"):
        key = getattr(row, name)
        if key is not None and key not in identities:
            raise RecordError(f"`{name}` {shown(key)} is not in {IDENTITIES_FILE}")
    return row


def _fields(text: str) -> dict[str, Any]:
    """Return the fields of a line; none if it is no JSON mapping."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return line if isinstance(line, dict) else {}


def read_identities(folder: str | Path) -> dict[str, Identity]:
    """Return the identities of a folder by key; {} without a file of them.

    Raises:
        RecordError: if the file holds none, or one that does not belong to its key.
    """
    path = Path(folder) / IDENTITIES_FILE
    try:
        contents = json.loads(_text(path) or "{}")
        identities = {key: read_identity(content) for key, content in contents.items()}
    except UserError as error:
        raise RecordError(f"{path} {error}; {_REMEDY}") from None
    except (ValueError, AttributeError, RecursionError):
        raise RecordError(f"{path} cannot be read as JSON; {_REMEDY}") from None
    if changed := [key for key, identity in identities.items() if identity_key(identity) != key]:
        raise RecordError(f"{path} has been changed: `{changed[0]}` is not the key of what stands there; {_REMEDY}")
    return identities


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as error:
        raise RecordError(f"{path} is not text ({error.reason}); {_REMEDY}") from None
