"""The long table: everything that runs, evaluations and diagnostics left in folders, one number in each row.

A file is read by a generator of rows, and one more measurement is one more generator. A row says what was measured
(`benchmark`, `metric`), how (`depth` K, `gates`, `readout`, `loop`, `dose`, `group`, `step`, the settings of the evaluation as
`evaluation.NAME`), on which problems, and holds every setting of the run in columns of their own.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from loopdropout_trainer.settings.methods import method_title


if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)
Row = dict[str, Any]

BASE, ALL, NONE = "base", "all", "none"
"""Method of the model without an adapter; unit gates, and gates of zero, in the column `gates`."""

TRAINING = "training"
"""What stands as the benchmark of a learning curve."""

COSTS = ("train_seconds", "step_seconds", "peak_memory_gb", "tokens_per_second", "trainable_parameters", "train_loss",
         "num_tokens", "num_parameters", "steps", "examples", "rewards")  # fmt: skip
"""What a training cost and came to: facts of a run, as columns, that tell no two settings apart."""

OUTCOMES = ("value", "correct", "verdicts", "answered", "predictions", "run", "source", "seed", "gate_seed", *COSTS)
"""Columns that are no settings: what was found, where, and by which seed. All other columns count as settings."""

# Settings of a run that say where it is, what it prints, saves and measures, and how fast: without effect on its results.
_WITHOUT_EFFECT = """
output_dir run_name logging_dir hub_model_id push_to_hub push_merged_to_hub merge dry_run report_to logging_steps
logging_strategy disable_tqdm resume_from_checkpoint resume_with_changed_settings save_steps save_strategy save_total_limit
eval_strategy eval_steps use_cpu decoding benchmarks benchmark_files benchmark_batch_size evaluate_base compare_with depths
single_loop_batches live_diagnostics_steps live_diagnostics_rows model_name_or_path per_device_eval_batch_size
gradient_checkpointing dataloader_num_workers adapter_path
"""
# Settings of a training recipe that are about its benchmarks.
_OF_BENCHMARKS = ("max_new_tokens", "apply_chat_template", "system_instruction", "benchmark_limit")
# Fields of an evaluation's settings that stand in columns of their own, or differ with the seed.
_ELSEWHERE = ("benchmark", "adapter", "num_loops", "gates", "readout")


class ReportError(ValueError):
    """A report that cannot be made, or a file that cannot be read, in one sentence."""


def check_extra() -> None:
    """Raise the sentence that says what to install, where the packages of the extra `reports` are missing."""
    missing = [name for name in ("pandas", "plotnine", "tabulate", "jinja2") if find_spec(name) is None]
    if missing:
        raise ReportError(f'Reports need {", ".join(missing)}: pip install "loopdropout-trainer[reports]"')


class Field:
    """A value of a JSON file that knows its file and name, so that every fault of a file is one sentence about both."""

    def __init__(self, value: Any, file: Path, name: str = "") -> None:
        self.value, self.file, self.name = value, file, name

    def refuse(self, wanted: str) -> ReportError:
        found = repr(self.value)
        found = found if len(found) < 60 else f"{found[:57]}..."
        return ReportError(
            f"{self.file}: {f'`{self.name}`' if self.name else 'the file'} must be {wanted}; got {found}."
        )

    def _at(self, key: Any, value: Any) -> Field:
        return Field(value, self.file, f"{self.name}.{key}" if self.name else str(key))

    def items(self) -> list[tuple[str, Field]]:
        if not isinstance(self.value, Mapping):
            raise self.refuse("a mapping")
        return [(key, self._at(key, value)) for key, value in self.value.items()]

    def get(self, key: str) -> Field | None:
        """Return a field that may be missing or null."""
        return (
            dict(self.items()).get(key)
            if isinstance(self.value, Mapping) and self.value.get(key) is not None
            else None
        )

    def __getitem__(self, key: str) -> Field:
        return self._at(key, None) if key not in dict(self.items()) else dict(self.items())[key]

    def list(self) -> list[Field]:
        if not isinstance(self.value, list):
            raise self.refuse("a list")
        return [self._at(place, value) for place, value in enumerate(self.value)]

    def number(self) -> float:
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            raise self.refuse("a number")
        return float(self.value)

    def integer(self, least: int = 0) -> int:
        if isinstance(self.value, bool) or not isinstance(self.value, int) or self.value < least:
            raise self.refuse(f"an integer of at least {least}")
        return self.value

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.refuse("a string")
        return self.value


def gates_text(gates: Sequence[float] | None) -> str:
    """Return gates [K] as the option `--gates` takes them (`1-0-0-0`); `all` for unit gates at any K, `none` for zeros."""
    if gates is None or all(gate == 1 for gate in gates):
        return ALL
    return NONE if not any(gates) else "-".join(f"{gate:g}" for gate in gates)


def only_loop(loop: int, num_loops: int) -> Row:
    """Return the columns of a measurement with the adapter in loop `loop` (from 1) of `num_loops` alone."""
    return {"gates": gates_text([float(each == loop) for each in range(1, num_loops + 1)]), "loop": loop}


# Generators of rows: of each part of a file, without the settings of its run.


def benchmark_rows(name: str, measured: Field, **how: Any) -> Iterator[Row]:
    """Yield a row for each metric of one benchmark's result, and the completions without an answer as metric `missing`.

    `verdicts` [problems] is what each problem counts, from 0 to 1, and `answered` whether its completion holds an answer.
    """
    metrics = measured.get("metrics").items() if measured.get("metrics") else [(name, measured)]
    shared: Row = {"benchmark": name, **how}
    listed = measured.get("predictions").list() if measured.get("predictions") else []
    if listed:
        prompts = "\0".join(each["prompt"].text() for each in listed)
        shared["problems"] = hashlib.sha256(prompts.encode()).hexdigest()[:12]
        shared["answered"] = np.array([each["extracted"].value is not None for each in listed])
        shared["predictions"] = [each.value for each in listed]
    for key, value in measured.get("settings").items() if measured.get("settings") else []:
        if key not in _ELSEWHERE:
            shared[f"evaluation.{key}"] = _plain(value.value)
    for place, (metric, field) in enumerate(metrics):
        total, correct, verdicts = field["total"].integer(1), field.get("correct"), None
        if listed and len(listed) == total:
            verdicts = _verdicts(listed, metric, place == 0)
        value = field["score"].number() if correct is None else 100 * correct.integer() / total
        yield {
            **shared, "metric": metric, "value": value, "total": total, "verdicts": verdicts,
            "correct": None if correct is None else correct.value,
        }  # fmt: skip
    missing, total = measured.get("missing"), measured.get("total")
    if missing and total:
        yield {
            **shared,
            "metric": "missing",
            "value": 100 * missing.integer() / total.integer(1),
            "total": total.value,
        }


def _verdicts(predictions: Sequence[Field], metric: str, is_first: bool) -> np.ndarray | None:
    """Return what each problem counts in a metric, [problems]; None where the predictions do not tell."""
    found = []
    for each in predictions:
        value = each.get("values").get(metric) if each.get("values") else None
        if value is None and is_first and isinstance(each["correct"].value, bool):
            value = each["correct"]
        if value is None:
            return None
        found.append(float(value.value) if isinstance(value.value, bool) else value.number())
    return np.array(found)


def single_loop_rows(measured: Field, benchmark: str) -> Iterator[Row]:
    """Yield losses with the adapter in one loop, in all and in none, and by how much each reduces the frozen model's loss."""
    frozen, only = measured["frozen"].number(), [each.number() for each in measured["only"].list()]
    losses = [(loss, only_loop(loop, len(only))) for loop, loss in enumerate(only, 1)]
    losses += [(measured["all_on"].number(), {"gates": ALL})]
    for loss, how in losses:
        yield {"benchmark": benchmark, "metric": "loss", "value": loss, **how}
        reduction = 100 * (frozen - loss) / frozen if frozen else float("nan")
        yield {"benchmark": benchmark, "metric": "loss_reduction", "value": reduction, **how}
    yield {"benchmark": benchmark, "metric": "loss", "value": frozen, "gates": NONE}


def counted_rows(name: str, measured: Field, total: int, **how: Any) -> Iterator[Row]:
    """Yield accuracy and missing answers of one benchmark from the counts that diagnostics keep."""
    for metric, value in ((name, measured["score"].number()), ("missing", measured.get("missing"))):
        if value is not None:
            value = value if metric == name else 100 * value.integer() / total
            yield {"benchmark": name, "metric": metric, "value": value, "total": total, **how}


def listed_rows(values: Field, keys: Iterable[Any], column: str, **how: Any) -> Iterator[Row]:
    """Yield a row for each number of a list, with its key in `column`."""
    for key, value in zip(keys, values.list(), strict=True):
        yield {"value": value.number(), column: key, **how}


def diagnostic_rows(name: str, measured: Field, rows: str, num_loops: int) -> Iterator[Row]:
    """Yield what one diagnostic measured of one model (docs/diagnostics.md has the form of `measured`).

    Args:
        name: of the diagnostic. One that is not known here yields its numbers as metrics `NAME.KEY`, lists by `loop` and
            matrices by `loop` and `other_loop`.
        measured: its entry.
        rows: name of the rows that losses are measured on.
        num_loops: K of the model.
    """
    on_rows = {"benchmark": rows}
    if name == "single_loop":
        yield from single_loop_rows(measured, rows)
    elif name == "single_loop_generation":
        for benchmark, each in measured.items():
            total = each["total"].integer(1)
            for loop, only in enumerate(each["only"].list(), 1):
                yield from counted_rows(benchmark, only, total, **only_loop(loop, num_loops))
            yield from counted_rows(benchmark, each["all_on"], total) if each.get("all_on") else ()
    elif name == "patterns":
        for each in measured["patterns"].list():
            active = [loop.integer(1) for loop in each["loops"].list()]
            gates = gates_text([float(loop in active) for loop in range(1, num_loops + 1)])
            value, half = each["reduction_percent"].number(), (num_loops + 1) // 2
            text = lambda loops: "+".join(map(str, loops)) or NONE
            early, late = (text([loop for loop in active if (loop <= half) == first]) for first in (True, False))
            yield {
                **on_rows,
                "metric": "pattern_loss_reduction",
                "value": value,
                "gates": gates,
                "early": early,
                "late": late,
            }
            for kind in each["kinds"].list():
                metric = f"{kind.text()}_loss_reduction"
                yield {**on_rows, "metric": metric, "value": value, "gates": gates, "loop": len(active)}
    elif name == "dose":
        doses = [dose.number() for dose in measured["doses"].list()]
        for key, metric in (("losses", "dose_loss"), ("reductions_percent", "dose_loss_reduction")):
            yield from listed_rows(measured[key], doses, "dose", **on_rows, metric=metric)
    elif name == "readouts":
        for key, metric in (("losses", "readout_loss"), ("accuracies_percent", "readout_token_accuracy")):
            if measured.get(key):
                for row in listed_rows(measured[key], range(1, num_loops + 1), "loop", **on_rows, metric=metric):
                    yield {**row, "readout": row["loop"]}
    elif name in ("depth", "depth_generation"):
        depths = [depth.integer(1) for depth in measured["depths"].list()]
        for key, metric in (("losses", "depth_loss"), ("accuracies_percent", "depth_token_accuracy"),
                            ("relative_compute", "relative_compute")):  # fmt: skip
            if measured.get(key):
                yield from listed_rows(measured[key], depths, "depth", **on_rows, metric=metric)
        for benchmark, each in measured.get("benchmarks").items() if measured.get("benchmarks") else []:
            for depth, result in zip(depths, each["results"].list(), strict=True):
                yield from counted_rows(benchmark, result, each["total"].integer(1), depth=depth)
    elif name == "answers":
        for benchmark, each in measured.items():
            if each.get("score"):
                yield from counted_rows(benchmark, each, each["total"].integer(1))
            for column, groups in each.get("groups").items() if each.get("groups") else []:
                for group, counts in groups.items():
                    total = counts["total"].integer(1)
                    value = 100 * counts["correct"].integer() / total
                    how = {"benchmark": benchmark, "metric": f"by_{column}", "group": group}
                    yield {**how, "value": value, "correct": counts["correct"].value, "total": total}
    else:
        for key, value in measured.items():
            yield from _any_rows(value, on_rows | {"metric": f"{name}.{key}"}, ("loop", "other_loop"))


def _any_rows(value: Field, how: Row, columns: Sequence[str]) -> Iterator[Row]:
    if isinstance(value.value, list) and columns:
        for place, each in enumerate(value.list(), 1):
            yield from _any_rows(each, {**how, columns[0]: place}, columns[1:])
    elif isinstance(value.value, (int, float)) and not isinstance(value.value, bool):
        yield {**how, "value": value.number()}


def log_rows(state: Field) -> Iterator[Row]:
    """Yield the learning curves of a trainer_state.json: every number that was logged, by step."""
    for entry in state["log_history"].list():
        step = entry["step"].integer()
        for metric, value in entry.items():
            if (
                metric not in ("step", "total_flos")
                and not metric.startswith("train_")
                and isinstance(value.value, float)
            ):
                yield {"benchmark": TRAINING, "metric": metric, "value": value.number(), "step": step}


# Files.


class _Reader:
    """Collects the settings of runs and their rows; runs are known by the folder of their adapter."""

    def __init__(self) -> None:
        self.settings: dict[str, Row] = {}
        self.rows: list[tuple[str, Row]] = []

    def read_training(self, content: Field) -> None:
        folder = content.file.parent
        run, settings = str(folder.resolve()), run_settings(content, folder)
        depth, rows = settings["num_loops"], []
        protocol = {f"evaluation.{name}": settings.pop(name) for name in _OF_BENCHMARKS if name in settings}
        how = {"depth": depth, **protocol}
        for name, measured in _parts(content, "benchmarks"):
            rows += benchmark_rows(name, measured, **how)
        first = next((name for name, _ in _parts(content, "benchmarks")), "")
        for loops, measured in _parts(content, "by_depth"):
            if not loops.isdigit():
                raise measured.refuse("named by a number of loops")
            if int(loops) != depth:  # which is among `benchmarks`
                rows += benchmark_rows(first, measured, **{**how, "depth": int(loops)})
        one_loop = content.get("single_loop_accuracy") or content.get(
            "single_loop_benchmarks"
        )  # the first one's, by loop
        for loop, measured in enumerate(one_loop.list() if one_loop else [], 1):
            rows += benchmark_rows(first, measured, **how, **only_loop(loop, depth))
        if content.get("single_loop"):
            rows += single_loop_rows(content["single_loop"], "held_out")
        if content.get("readouts"):
            losses = [each.number() for each in content["readouts"].list()]
            shared = {"benchmark": "held_out", "metric": "readout_loss"}
            rows += [{**shared, "value": loss, "loop": loop, "readout": loop} for loop, loss in enumerate(losses, 1)]
        base = f"{run}#{BASE}"
        for name, measured in _parts(content, "base_benchmarks"):
            self.rows += [(base, row) for row in benchmark_rows(name, measured, gates=NONE, **how)]
        self.rows += [(run, row) for row in rows]
        self.settings[run] = settings
        self.settings[base] = {name: settings.get(name) for name in ("model", "num_loops", "sweep")} | {"method": BASE}

    def read_log(self, content: Field) -> None:
        run = str(content.file.parent.resolve())
        if run in self.settings:
            self.rows += [(run, row) for row in log_rows(content)]

    def read_evaluation(self, content: Field) -> None:
        for name, entry in content["rows"].items():
            meta, train = entry["meta_info"], entry.get("train_info")
            adapter = meta.get("adapter_path")
            run = self._run_of(adapter and Path(adapter.text()), content.file) or f"{content.file.resolve()}#{name}"
            if run not in self.settings:
                facts = _flat(train.value if train else {})
                facts |= {
                    "rank": facts.pop("r", None),
                    "model": _model(meta["model"].value if meta.get("model") else None),
                }
                facts.setdefault("num_loops", meta["num_loops"].value)
                facts |= _method(facts) if adapter and facts.get("rule") else {"method": name}
                self.settings[run] = {**facts, "sweep": _sweep_of(content.file.parent)}
            how: Row = {"depth": meta["num_loops"].integer(1)}
            gates = [gate.number() for gate in meta["gates"].list()] if meta.get("gates") else None
            active = [loop for loop, gate in enumerate(gates or (), 1) if gate]
            how["gates"] = gates_text(gates) if adapter else NONE
            if len(active) == 1 and gates[active[0] - 1] == 1:
                how["loop"] = active[0]
            if meta.get("readout"):
                how["readout"] = meta["readout"].integer(1)
            for benchmark, measured in _parts(entry, "benchmarks"):
                self.rows += [(run, row) for row in benchmark_rows(benchmark, measured, **how)]

    def _run_of(self, adapter: Path | None, file: Path) -> str | None:
        """Return the run whose adapter was evaluated; a folder that was moved with its evaluations in it is known, too."""
        if adapter is None:
            return None
        places = [str(each.resolve()) for each in (adapter, file.parent, file.parent.parent)]
        return next((place for place in places if place in self.settings), places[0])

    def read_diagnostic(self, content: Field) -> None:
        name, settings = content["diagnostic"].text(), content["settings"]
        num_loops = settings["num_loops"].integer(1)
        on_rows, seen = settings.get("rows"), {}
        how = {"depth": num_loops}
        if on_rows:
            how |= {f"evaluation.{key}": _plain(value.value) for key, value in on_rows.items()}
        protocols = dict(_parts(settings, "benchmarks"))
        for entry in content["runs"].list():
            method = entry["method"].text()
            place = seen[method] = seen.get(method, -1) + 1
            run = self._run_of(Path(entry["path"].text()) if entry.get("path") else None, content.file)
            if (
                run not in self.settings
            ):  # of an adapter whose training is not here; without a path the name is all there is
                run = f"{run or f'{content.file.parent.resolve()}#{place}'}#{method}"
            facts = {key: _plain(entry.value.get(key)) for key in ("rule", "p", "seed")}
            facts["seed"] = place if facts["seed"] is None else facts["seed"]
            depth = entry.value.get("train_num_loops") or num_loops
            model = _model(settings["model"].value if settings.get("model") else None)
            self.settings.setdefault(run, {**facts, "method": method, "num_loops": depth, "model": model})
            source = on_rows["source"].value if on_rows and on_rows.get("source") else "rows"
            for row in diagnostic_rows(name, entry["measured"], str(source), num_loops):
                of = protocols.get(row["benchmark"])
                mine = how if of is None else {f"evaluation.{key}": _plain(each.value) for key, each in of.items()}
                if run.endswith(f"#{BASE}"):
                    row.setdefault("gates", NONE)
                self.rows.append((run, {"depth": num_loops, **mine, **row}))


def run_settings(content: Field, folder: Path) -> Row:
    """Return every setting of a finished training as columns: those that were given, and what is known of its adapter."""
    given, train, meta = content["run_info"]["settings"], content["train_info"], content.get("meta_info")
    settings = {**_flat(dict(given.items())), **_flat(dict(train.items()))}
    settings |= {
        "num_loops": train["num_loops"].integer(1),
        "rank": settings.pop("r", settings.get("lora_r", 16)),
        "model": _model(meta["model"].value if meta and meta.get("model") else settings.get("model_name_or_path")),
        "sweep": _sweep_of(folder),
    }
    facts = content.get("run") and content["run"].get(
        "data"
    )  # what the training rows are: their number and their hash
    settings |= {f"data.{key}": _plain(value.value) for key, value in facts.items()} if facts else {}
    settings |= _method(settings)
    return {key: value for key, value in settings.items() if key not in _WITHOUT_EFFECT.split()}


def _method(settings: Row) -> Row:
    """Return what tables ask for and no setting says: the method's name, and what kind of masks and factors it has."""
    rule, p = settings.get("rule"), settings.get("p")
    noise = settings.get("rule_args.c", 1.0) if "noise" in str(rule) else None
    masked = rule not in ("lora", None) and p not in (None, 0, 0.0)
    return {"method": method_title(settings), "masked": masked, "shared": rule != "independent", "noise_c": noise}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Row:
    """Return nested settings with dotted names, and lists as their JSON: what can be compared, and stand in a CSV."""
    found: Row = {}
    for key, value in settings.items():
        value = value.value if isinstance(value, Field) else value
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": _plain(value)}
    return found


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (list, dict)) else value


def _parts(content: Field, name: str) -> list[tuple[str, Field]]:
    return content.get(name).items() if content.get(name) else []


def _model(name: Any) -> str | None:
    return None if name is None else str(name).rstrip("/").split("/")[-1]


def _sweep_of(folder: Path) -> str | None:
    """Return the name of the sweep that a run's folder is in: of the nearest parent with a file `sweep.*`."""
    return next(
        (each.name for each in (folder.resolve(), *folder.resolve().parents) if any(each.glob("sweep.*"))), None
    )


_READERS = (  # in this order: trainings first, since the others belong to them
    (lambda path: path.name == "results.json", _Reader.read_training),
    (lambda path: path.name == "trainer_state.json", _Reader.read_log),
    (lambda path: path.name == "evaluation.json", _Reader.read_evaluation),
    (lambda path: path.parent.name == "diagnostics", _Reader.read_diagnostic),
)


def load_table(folders: Iterable[str | Path]) -> pd.DataFrame:
    """Read everything below the folders into one long table.

    Returns:
        A row for each number (see the top of this file). `attrs["skipped"]`: a sentence about each unreadable file.

    Raises:
        ReportError: if pandas is not installed, or a folder is missing.
    """
    check_extra()
    import pandas as pd

    paths: dict[Path, Path] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise ReportError(f"There is no folder {folder}: name folders that training, evaluation or sweeps wrote.")
        for path in sorted(folder.rglob("*.json")):
            inside = path.relative_to(folder).parts[:-1]
            if not any(part.startswith(("checkpoint-", ".")) or part in ("answers", "parts") for part in inside):
                paths.setdefault(path.resolve(), path)
    reader, skipped, rows = _Reader(), [], []
    for belongs, read in _READERS:
        for path in filter(belongs, paths.values()):
            known, before = len(reader.rows), dict(reader.settings)
            try:
                read(reader, Field(json.loads(path.read_text(encoding="utf-8")), path))
            except ReportError as error:
                fault = str(error)
            except (OSError, ValueError, RecursionError) as error:
                fault = f"{path}: it cannot be read ({' '.join(str(error).split())})."
            else:
                reader.rows[known:] = [(run, {**row, "source": str(path)}) for run, row in reader.rows[known:]]
                continue
            del reader.rows[known:]  # nothing of half a file
            reader.settings = before
            skipped.append(fault)
            logger.warning("Left out: %s", fault)
    for run, row in reader.rows:
        defaults = {"gates": ALL, "depth": reader.settings[run].get("num_loops")}
        rows.append({**reader.settings[run], **defaults, **row, "run": run})
    first = [
        "run",
        "method",
        "seed",
        "benchmark",
        "metric",
        "value",
        "total",
        "depth",
        "gates",
        "readout",
        "loop",
        "num_loops",
    ]
    table = pd.DataFrame(
        rows, columns=list(dict.fromkeys([*first, *(key for row in rows for key in row)])), dtype=object
    )
    table["value"] = table["value"].astype(float)
    table = _without_repeats(table)
    table.attrs["skipped"] = skipped
    return table


def _without_repeats(table: pd.DataFrame) -> pd.DataFrame:
    """Leave out what stands in two files: the base's result beside each adapter, one number in two diagnostics, and what an
    evaluation's file says of the accuracy on as many problems, too, with more about how it was found."""
    key = ["run", "benchmark", "metric", "depth", "gates", "readout", "loop", "total", "group", "step"]
    key = [name for name in key if name in table]
    rank = table["source"].str.endswith("evaluation.json") if len(table) else []
    is_training = table["source"].str.endswith("results.json") if len(table) else []
    evaluated = set(table[rank][key].astype(str).apply(tuple, axis=1)) if any(rank) else set()
    if evaluated:
        again = table[key].astype(str).apply(tuple, axis=1).isin(evaluated)
        table = table[~(again & is_training)]
    columns = [name for name in table if name not in OUTCOMES]
    same = table[columns].assign(value=table["value"], run=table["run"].where(table["method"] != BASE, BASE))
    return table[~same.astype(str).duplicated()].reset_index(drop=True)
