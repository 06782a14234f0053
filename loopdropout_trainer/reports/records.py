"""Finished runs as their folders tell them: a training's results.json, evaluations and diagnostics of its adapter."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loopdropout_trainer.evaluation.results import BenchmarkResult
from loopdropout_trainer.settings.methods import method_title


TRAINING, EVALUATION, SWEEP = "results.json", "evaluation.json", "sweep.json"


class ReportError(ValueError):
    """A report that cannot be made, in one sentence."""


@dataclass(frozen=True)
class Score:
    """One benchmark, answered once with one adapter.

    Attributes:
        benchmark: its name.
        depth: recurrence depth K of the evaluation.
        gates: [K] of the evaluation; None: unit gates.
        metrics: by name, each with `score` in percent and, where it is a share of the problems, `correct` and `total`.
        missing_rate: completions without an answer, in percent.
        result: every prediction; None where only counts were kept.
        settings: what the answers depend on, beside the model.
        source: file.
    """

    benchmark: str
    depth: int | None
    gates: tuple[float, ...] | None
    metrics: Mapping[str, Mapping[str, Any]]
    missing_rate: float | None
    result: BenchmarkResult | None
    settings: Mapping[str, Any]
    source: str

    def percent(self, metric: str | None = None) -> float | None:
        """Return a metric in percent, from counts where there are counts; None if it was not measured."""
        entry = next(iter(self.metrics.values()), None) if metric is None else self.metrics.get(metric)
        if entry is None:
            return None
        total, correct = entry.get("total"), entry.get("correct")
        return 100 * correct / total if total and correct is not None else entry["score"]


@dataclass
class Record:
    """One trained adapter, or a model without one, and what was measured of it.

    Attributes:
        path: folder of the adapter.
        fields: what tells runs apart: `method`, `rule`, `p`, `rank`, `model`, `learning_rate`, `seed`, `num_loops` of the
            training, `sweep` that it belongs to, and every other setting of the recipe.
        scores: of evaluations.
        cost: `seconds`, `peak_memory_gb`, `tokens_per_second`, `parameters` of the training, where they are known.
        diagnostics: what was measured, by diagnostic.
        info: the training's own record: settings, versions, device.
    """

    path: str
    fields: dict[str, Any]
    scores: list[Score] = field(default_factory=list)
    cost: dict[str, Any] = field(default_factory=dict)
    diagnostics: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """What people call the method."""
        return self.fields["method"]

    def matches(self, wanted: Mapping[str, Any]) -> bool:
        """Return whether every field has the wanted value, or one of a list of them."""
        return all(_is(self.fields.get(name), value) for name, value in wanted.items())


def _is(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, float) and isinstance(found, (int, float)) and not isinstance(found, bool):
        return abs(found - wanted) <= 1e-9 * max(1.0, abs(wanted)) or abs(found - wanted) <= 1e-6 * abs(wanted)
    if found == wanted:
        return True
    return isinstance(wanted, list) and not isinstance(found, list) and any(_is(found, each) for each in wanted)


def read_records(folders: Iterable[str | Path]) -> list[Record]:
    """Read every run below the folders.

    Returns:
        One record for each adapter, in the order of their paths.

    Raises:
        ReportError: if a folder is missing, or a file in one is no longer readable.
    """
    records: dict[str, Record] = {}
    evaluations, diagnostics = [], []
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise ReportError(f"There is no folder {folder}: name folders that training, evaluation or sweeps wrote.")
        for path in _files(folder):
            if path.name == TRAINING:
                record = _training(path)
                records[record.path] = record
            elif path.name == EVALUATION:
                evaluations.append(path)
            elif path.parent.name == "diagnostics":
                diagnostics.append(path)
    for path in evaluations:
        _add_evaluation(records, path)
    for path in diagnostics:
        _add_diagnostic(records, path)
    return [records[path] for path in sorted(records)]


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.json")):
        inside = path.relative_to(folder).parts[:-1]
        if not any(part.startswith(("checkpoint-", ".")) or part in ("answers", "parts") for part in inside):
            yield path


def _load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReportError(f"{path} cannot be read ({error}): make it again, or move it away.") from None
    if not isinstance(content, dict):
        raise ReportError(f"{path} is not a results file: it holds a {type(content).__name__}.")
    return content


def _training(path: Path) -> Record:
    content = _load(path)
    settings = dict(content.get("settings") or content.get("run_info", {}).get("settings") or {})
    train = {**content, **content.get("train_info", {})}
    fields = {
        **settings,
        "rule": train.get("rule", settings.get("rule", "loop_dropout")),
        "p": train.get("p"),
        "num_loops": train.get("num_loops"),
        "rank": settings.get("lora_r", 16),
        "alpha": settings.get("lora_alpha", 32),
        "model": _model_name(settings.get("model_name_or_path")),
        "sweep": _sweep_of(path.parent),
    }
    fields |= derived_fields(fields)
    record = Record(_key(path.parent), fields, info=content)
    seconds = train.get("train_seconds")
    record.cost = {
        "seconds": seconds,
        "peak_memory_gb": train.get("peak_memory_gb"),
        "tokens_per_second": train.get("tokens_per_second"),
        "parameters": train.get("trainable_parameters"),
    }
    for name, measured in (content.get("benchmarks") or {}).items():
        record.scores.append(_score(name, measured, fields["num_loops"], None, path))
    if content.get("single_loop"):
        single = content["single_loop"]
        record.diagnostics["single_loop"] = {**single, "only": single.get("only", single.get("single"))}
    return record


def derived_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what tables ask for and no setting says: the method's name, and what kind of masks and factors it has."""
    rule = fields.get("rule")
    return {
        "method": method_title(fields),
        "masked": rule not in ("lora", None) and fields.get("p") not in (None, 0, 0.0),
        "shared": rule != "independent",
        "noise_c": (fields.get("rule_args") or {}).get("c", 1.0) if "noise" in str(rule) else None,
    }


def _score(
    name: str, measured: Mapping[str, Any], depth: int | None, gates: Sequence[float] | None, source: Path
) -> Score:
    metrics = measured.get("metrics") or {name: {key: measured.get(key) for key in ("score", "correct", "total")}}
    predictions = measured.get("predictions")
    return Score(
        name,
        depth,
        None if gates is None else tuple(gates),
        metrics,
        measured.get("missing_rate", _rate(measured.get("missing"), measured.get("total"))),
        BenchmarkResult.from_json(name, {"predictions": predictions, "metrics": {}}) if predictions else None,
        measured.get("settings") or {},
        str(source),
    )


def _rate(count: int | None, total: int | None) -> float | None:
    return 100 * count / total if count is not None and total else None


def _add_evaluation(records: dict[str, Record], path: Path) -> None:
    for name, row in (_load(path).get("rows") or {}).items():
        meta, train = row.get("meta_info", {}), row.get("train_info", {})
        record = _record_of(records, meta.get("adapter_path"), path, name, meta, train)
        gates = meta.get("gates")
        if gates is not None and all(gate == 1 for gate in gates):
            gates = None
        if meta.get("readout") is not None:  # not the model's own answer
            continue
        measured_with = {"weights": meta.get("weights"), "dtype": meta.get("dtype")}
        for benchmark, measured in row.get("benchmarks", {}).items():
            score = _score(benchmark, measured, meta.get("num_loops"), gates, path)
            score = Score(**{**vars(score), "settings": {**score.settings, **measured_with}})
            key = (score.benchmark, score.depth, score.gates)
            record.scores = [each for each in record.scores if (each.benchmark, each.depth, each.gates) != key]
            record.scores.append(score)


def _record_of(
    records: dict[str, Record],
    adapter: str | None,
    path: Path,
    name: str,
    meta: Mapping[str, Any],
    train: Mapping[str, Any],
) -> Record:
    """Return the record of an evaluated adapter: its training's, if that was read, else one made of what the row tells."""
    candidates = [_key(Path(adapter))] if adapter else []
    if adapter:  # a folder that was moved as a whole: RUN/test/evaluation.json
        candidates += [_key(path.parent), _key(path.parent.parent)]
    for candidate in candidates:
        if candidate in records:
            return records[candidate]
    key = candidates[0] if candidates else f"{_key(path.parent)}#{name}"
    fields = {
        **train,
        "rule": train.get("rule"),
        "rank": train.get("r"),
        "alpha": train.get("lora_alpha"),
        "model": _model_name(meta.get("model")),
        "num_loops": train.get("num_loops", meta.get("num_loops")),
        "sweep": _sweep_of(path.parent),
    }
    fields |= derived_fields(fields) if adapter and fields["rule"] else {"method": name}
    records[key] = Record(key, fields, info={"meta_info": dict(meta), "train_info": dict(train)})
    return records[key]


def _add_diagnostic(records: dict[str, Record], path: Path) -> None:
    content = _load(path)
    for run in content.get("runs", []):
        where = run.get("path")
        key = _key(Path(where)) if where else f"{_key(path.parent)}#{run['method']}"
        if key not in records:
            fields = {
                "rule": run.get("rule"),
                "p": run.get("p"),
                "seed": run.get("seed"),
                "num_loops": run.get("train_num_loops"),
                "model": _model_name(content.get("settings", {}).get("model")),
                "sweep": _sweep_of(path.parent),
                "method": run["method"],
            }
            records[key] = Record(key, fields, info={"settings": content.get("settings", {})})
        records[key].diagnostics[content["diagnostic"]] = run["measured"]


def _key(folder: Path) -> str:
    return str(folder.resolve())


def _model_name(name: str | None) -> str | None:
    return None if name is None else name.rstrip("/").split("/")[-1]


def _sweep_of(folder: Path) -> str | None:
    """Return the name of the sweep that a run's folder is in: of the nearest parent that holds a sweep.json."""
    for parent in (folder, *folder.resolve().parents):
        if (parent / SWEEP).is_file():
            return parent.resolve().name
    return None
