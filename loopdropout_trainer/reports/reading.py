"""The long table: everything that runs, evaluations and diagnostics left in folders, one number in each row.

What a diagnostic's file holds is said by `LAYOUTS`, and one more is one more entry. A row says what was measured (`benchmark`,
`metric`), how (`depth` K, `gates`, `readout`, `loop`, `dose`, `group`, `step`, the settings of the evaluation as
`evaluation.NAME`), on which problems, and holds every setting of the run in columns of their own.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
single_loop_batches single_loop_accuracy live_diagnostics_steps live_diagnostics_rows model_name_or_path
per_device_eval_batch_size gradient_checkpointing dataloader_num_workers adapter_path
"""
# Settings of a training recipe that are about its benchmarks.
_OF_BENCHMARKS = ("max_new_tokens", "apply_chat_template", "system_instruction", "benchmark_limit")
# Fields of an evaluation's settings that stand in columns of their own, or differ with the seed.
_ELSEWHERE = ("benchmark", "adapter", "num_loops", "gates", "readout")

LAYOUTS = {
    "single_loop_generation": {
        **{
            f"*benchmark.only.*loop.{key}": metric
            for key, metric in (("score", "{benchmark}"), ("missing", "missing"))
        },
        **{f"*benchmark.all_on.{key}": metric for key, metric in (("score", "{benchmark}"), ("missing", "missing"))},
    },
    "depth_generation": {
        "relative_compute.*depth": "relative_compute",
        "benchmarks.*benchmark.results.*depth.score": "{benchmark}",
        "benchmarks.*benchmark.results.*depth.missing": "missing",
    },
    "depth": {
        "losses.*depth": "depth_loss",
        "accuracies_percent.*depth": "depth_token_accuracy",
        "relative_compute.*depth": "relative_compute",
    },
    "dose": {"losses.*dose": "dose_loss", "reductions_percent.*dose": "dose_loss_reduction"},
    "readouts": {"losses.*readout": "readout_loss", "accuracies_percent.*readout": "readout_token_accuracy"},
    "answers": {
        "*benchmark.score": "{benchmark}",
        "*benchmark.missing": "missing",
        "*benchmark.groups.*column.*group.score": "by_{column}",
    },
}
"""Where the numbers of a diagnostic are, and the metric of each: `*NAME` is every key of a mapping or place in a list, which
becomes the row's column NAME; depths and doses are named by the lists `depths` and `doses` of the file, other places from 1.
A diagnostic that is not here yields its numbers as metrics `NAME.KEY`, lists by `loop`, matrices by `loop` and `other_loop`.
"""


class ReportError(ValueError):
    """A report that cannot be made, or a file that cannot be read, in one sentence."""


def check_extra() -> None:
    """Raise the sentence that says what to install, where the packages of the extra `reports` are missing."""
    missing = [name for name in ("pandas", "plotnine", "tabulate", "jinja2") if find_spec(name) is None]
    if missing:
        raise ReportError(f'Reports need {", ".join(missing)}: pip install "loopdropout-trainer[reports]"')


# What a value of a file must be, by the words of the error.
MAPPING, LIST, TEXT, NUMBER, COUNT, TOTAL = "a mapping", "a list", "a string", "a number", "a count", "a count above 0"
_KINDS: dict[str, Callable[[Any], bool]] = {
    MAPPING: lambda value: isinstance(value, dict),
    LIST: lambda value: isinstance(value, list),
    TEXT: lambda value: isinstance(value, str),
    NUMBER: lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    COUNT: lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0,
    TOTAL: lambda value: isinstance(value, int) and not isinstance(value, bool) and value > 0,
}
_REQUIRED = object()


def take(content: Any, path: Sequence[Any], kind: str, default: Any = _REQUIRED) -> Any:
    """Return the value at keys and places of a file's content; `default`, if there is one, where it is missing or null.

    Raises:
        ReportError: naming the place, what it must be, and what was found.
    """
    for number, key in enumerate((*path, None)):
        wanted = kind if key is None else LIST if isinstance(key, int) else MAPPING
        if content is None and default is not _REQUIRED:
            return default
        if not _KINDS[wanted](content):
            place, found = ".".join(map(str, path[:number])), repr(content)
            raise ReportError(
                f"{f'`{place}`' if place else 'the file'} must be {wanted}; got "
                f"{found if len(found) < 60 else f'{found[:57]}...'}."
            )
        if key is not None:
            content = content[key] if isinstance(key, int) else content.get(key)
    return content


def gates_text(gates: Sequence[float] | None) -> str:
    """Return gates [K] as the option `--gates` takes them (`1-0-0-0`); `all` for unit gates at any K, `none` for zeros."""
    if gates is None or all(gate == 1 for gate in gates):
        return ALL
    return NONE if not any(gates) else "-".join(f"{gate:g}" for gate in gates)


def only_loop(loop: int, num_loops: int) -> Row:
    """Return the columns of a measurement with the adapter in loop `loop` (from 1) of `num_loops` alone."""
    return {"gates": gates_text([float(each == loop) for each in range(1, num_loops + 1)]), "loop": loop}


# Generators of rows: of each part of a file, at a path of it, without the settings of its run.


def benchmark_rows(content: Any, path: Sequence[Any], name: str, **how: Any) -> Iterator[Row]:
    """Yield a row for each metric of one benchmark's result, and the completions without an answer as metric `missing`.

    `verdicts` [problems] is what each problem counts, from 0 to 1, and `answered` whether its completion holds an answer.
    """
    measured, shared = take(content, path, MAPPING), {"benchmark": name, **how}
    listed = take(content, (*path, "predictions"), LIST, [])
    if listed:
        prompts = [take(listed, (place, "prompt"), TEXT) for place in range(len(listed))]
        shared["problems"] = hashlib.sha256("\0".join(prompts).encode()).hexdigest()[:12]
        shared["answered"] = np.array([each.get("extracted") is not None for each in listed])
        shared["predictions"] = listed
    settings = take(content, (*path, "settings"), MAPPING, {})
    shared |= {f"evaluation.{key}": _plain(value) for key, value in settings.items() if key not in _ELSEWHERE}
    metrics = take(content, (*path, "metrics"), MAPPING, {})
    for place, metric in enumerate(metrics or [name]):
        at = (*path, "metrics", metric) if metrics else path
        total, correct = take(content, (*at, "total"), TOTAL), take(content, (*at, "correct"), COUNT, None)
        value = take(content, (*at, "score"), NUMBER) if correct is None else 100 * correct / total
        of = {"metric": metric, "value": value, "total": total, "correct": correct}
        yield {**shared, **of, "verdicts": _verdicts(listed, metric, place == 0) if len(listed) == total else None}
    for column, groups in take(content, (*path, "groups"), MAPPING, {}).items():
        for group in groups:
            at = (*path, "groups", column, group)
            total, correct = take(content, (*at, "total"), TOTAL), take(content, (*at, "correct"), COUNT)
            of = {"metric": f"by_{column}", "group": group, "value": 100 * correct / total, "total": total}
            yield {**shared, **of, "correct": correct}
    missing = take(content, (*path, "missing"), COUNT, 0)
    if missing or "missing" in measured:
        total = take(content, (*path, "total"), TOTAL)
        yield {**shared, "metric": "missing", "value": 100 * missing / total, "total": total}


def _verdicts(predictions: Sequence[Mapping[str, Any]], metric: str, is_first: bool) -> np.ndarray | None:
    """Return what each problem counts in a metric, [problems]; None where the predictions do not tell."""
    of = lambda each: (each.get("values") or {}).get(metric, each.get("correct") if is_first else None)
    found = [of(each) for each in predictions]
    return None if not found or None in found else np.array(found, dtype=float)


def single_loop_rows(content: Any, path: Sequence[Any], benchmark: str) -> Iterator[Row]:
    """Yield losses with the adapter in one loop, in all and in none, and by how much each reduces the frozen model's loss."""
    frozen, only = take(content, (*path, "frozen"), NUMBER), take(content, (*path, "only"), LIST)
    losses = [
        (take(content, (*path, "only", place), NUMBER), only_loop(place + 1, len(only))) for place in range(len(only))
    ]
    for loss, how in [*losses, (take(content, (*path, "all_on"), NUMBER), {"gates": ALL})]:
        yield {"benchmark": benchmark, "metric": "loss", "value": loss, **how}
        reduction = 100 * (frozen - loss) / frozen if frozen else float("nan")
        yield {"benchmark": benchmark, "metric": "loss_reduction", "value": reduction, **how}
    yield {"benchmark": benchmark, "metric": "loss", "value": frozen, "gates": NONE}


def pattern_rows(content: Any, path: Sequence[Any], benchmark: str, num_loops: int) -> Iterator[Row]:
    """Yield the loss reduction of each set of loops, by its early and its late loops, and as a prefix or suffix."""
    half, text = (num_loops + 1) // 2, lambda loops: "+".join(map(str, loops)) or NONE
    for place in range(len(take(content, (*path, "patterns"), LIST))):
        at = (*path, "patterns", place)
        active, value = take(content, (*at, "loops"), LIST), take(content, (*at, "reduction_percent"), NUMBER)
        gates = gates_text([float(loop in active) for loop in range(1, num_loops + 1)])
        row = {"benchmark": benchmark, "value": value, "gates": gates}
        early, late = (text([loop for loop in active if (loop <= half) == first]) for first in (True, False))
        yield {**row, "metric": "pattern_loss_reduction", "early": early, "late": late}
        for kind in take(content, (*at, "kinds"), LIST):
            yield {**row, "metric": f"{kind}_loss_reduction", "loop": len(active)}


def _found(content: Any, path: tuple, pattern: Sequence[str], how: Row) -> Iterator[tuple[tuple, Row]]:
    """Yield the places that a pattern of `LAYOUTS` matches below a path, with the columns that lead there."""
    value = take(content, path, MAPPING) if pattern and not pattern[0].startswith("*") else take_any(content, path)
    if isinstance(value, dict) and "total" in value:
        how = {**how, "total": take(content, (*path, "total"), TOTAL)}
    if not pattern:
        yield path, how
    elif pattern[0].startswith("*"):
        for key in value if isinstance(value, dict) else range(len(take(content, path, LIST))):
            yield from _found(content, (*path, key), pattern[1:], {**how, pattern[0][1:]: key})
    elif value.get(pattern[0]) is not None:
        yield from _found(content, (*path, pattern[0]), pattern[1:], how)


def take_any(content: Any, path: Sequence[Any]) -> Any:
    """Return the value at a path that is known to be there."""
    for key in path:
        content = content[key]
    return content


def diagnostic_rows(name: str, content: Any, path: tuple, rows: str, num_loops: int) -> Iterator[Row]:
    """Yield what one diagnostic measured of one model (docs/diagnostics.md has the form).

    Args:
        name: of the diagnostic.
        content, path: of the file, and where in it the measurement is.
        rows: name of the rows that losses are measured on.
        num_loops: K of the model.
    """
    if name == "single_loop":
        yield from single_loop_rows(content, path, rows)
    elif name == "patterns":
        yield from pattern_rows(content, path, rows, num_loops)
    elif name not in LAYOUTS:
        for key in take(content, path, MAPPING):
            how = {"benchmark": rows, "metric": f"{name}.{key}"}
            yield from _any_rows(take_any(content, (*path, key)), how, ("loop", "other_loop"))
    for pattern, metric in LAYOUTS.get(name, {}).items():
        for place, row in _found(content, path, pattern.split("."), {"benchmark": rows}):
            for column in {"loop", "readout"} & set(row):
                row[column] += 1
            for column in {"depth", "dose"} & set(row):  # which are named by a list of their own
                row[column] = take(content, (*path, f"{column}s", row[column]), NUMBER)
            row |= {"metric": metric.format_map(row), "value": take(content, place, NUMBER)}
            row |= only_loop(row["loop"], num_loops) if "loop" in row else {}
            row |= {"loop": row["readout"]} if "readout" in row else {}
            if place[-1] == "missing":
                row["value"] *= 100 / row["total"]
            row.pop("column", None)
            yield row


def _any_rows(value: Any, how: Row, columns: Sequence[str]) -> Iterator[Row]:
    if isinstance(value, list) and columns:
        for place, each in enumerate(value, 1):
            yield from _any_rows(each, {**how, columns[0]: place}, columns[1:])
    elif _KINDS[NUMBER](value):
        yield {**how, "value": float(value)}


# Files.


class _Reader:
    """Collects the settings of runs and their rows; runs are known by the folder of their adapter."""

    def __init__(self) -> None:
        self.settings: dict[str, Row] = {}
        self.rows: list[tuple[str, Row]] = []

    def read_training(self, content: Any, path: Path) -> None:
        run, settings = str(path.parent.resolve()), run_settings(content, path.parent)
        depth, rows = settings["num_loops"], []
        how = {f"evaluation.{name}": settings.pop(name) for name in _OF_BENCHMARKS if name in settings} | {
            "depth": depth
        }
        names = list(take(content, ("benchmarks",), MAPPING, {}))
        for name in names:
            rows += benchmark_rows(content, ("benchmarks", name), name, **how)
        for loops in take(content, ("by_depth",), MAPPING, {}):
            if not loops.isdigit():
                raise ReportError(f"`by_depth` must have numbers of loops; got {loops!r}.")
            if int(loops) != depth:  # which is among `benchmarks`
                rows += benchmark_rows(content, ("by_depth", loops), names[0], **how | {"depth": int(loops)})
        for place in range(len(take(content, ("single_loop_benchmarks",), LIST, []))):
            how_one = {**how, **only_loop(place + 1, depth)}
            rows += benchmark_rows(content, ("single_loop_benchmarks", place), names[0], **how_one)
        if content.get("single_loop"):
            rows += single_loop_rows(content, ("single_loop",), "held_out")
        for loop in range(1, 1 + len(take(content, ("readout_losses",), LIST, []))):
            value = take(content, ("readout_losses", loop - 1), NUMBER)
            row = {"benchmark": "held_out", "metric": "readout_loss", "value": value}
            rows.append({**row, "loop": loop, "readout": loop})
        base = f"{run}#{BASE}"
        for name in take(content, ("base_benchmarks",), MAPPING, {}):
            found = benchmark_rows(content, ("base_benchmarks", name), name, gates=NONE, **how)
            self.rows += [(base, row) for row in found]
        self.rows += [(run, row) for row in rows]
        self.settings[run] = settings
        self.settings[base] = {name: settings.get(name) for name in ("model", "num_loops", "sweep")} | {"method": BASE}

    def read_log(self, content: Any, path: Path) -> None:
        """Read the learning curves of a trainer_state.json: every number that was logged, by step."""
        run = str(path.parent.resolve())
        if run not in self.settings:
            return
        for place, entry in enumerate(take(content, ("log_history",), LIST)):
            step = take(content, ("log_history", place, "step"), COUNT)
            for metric, value in entry.items():
                is_curve = isinstance(value, float) and metric != "total_flos" and not metric.startswith("train_")
                if is_curve:
                    row = {"benchmark": TRAINING, "metric": metric, "value": value, "step": step}
                    self.rows.append((run, row))

    def read_evaluation(self, content: Any, path: Path) -> None:
        for name, entry in take(content, ("rows",), MAPPING).items():
            of = ("rows", name)
            adapter = take(content, (*of, "meta_info", "adapter_path"), TEXT, None)
            depth, model = take(content, (*of, "meta_info", "num_loops"), TOTAL), entry["meta_info"].get("model")
            run = self._run_of(adapter, path) or f"{path.resolve()}#{name}"
            if run not in self.settings:
                facts = {"num_loops": depth, **_flat(take(content, (*of, "train_info"), MAPPING, {}))}
                facts |= {"rank": facts.pop("r", None), "model": _model(model), "sweep": _sweep_of(path.parent)}
                facts |= _method(facts) if adapter and facts.get("rule") else {"method": name}
                self.settings[run] = facts
            gates = take(content, (*of, "meta_info", "gates"), LIST, None)
            active = [loop for loop, gate in enumerate(gates or (), 1) if gate]
            how: Row = {"depth": depth, "gates": gates_text(gates) if adapter else NONE}
            if len(active) == 1 and gates[active[0] - 1] == 1:
                how["loop"] = active[0]
            readout = take(content, (*of, "meta_info", "readout"), COUNT, None)
            how |= {"readout": readout} if readout else {}
            for benchmark in take(content, (*of, "benchmarks"), MAPPING, {}):
                found = benchmark_rows(content, (*of, "benchmarks", benchmark), benchmark, **how)
                self.rows += [(run, row) for row in found]

    def _run_of(self, adapter: str | None, file: Path) -> str | None:
        """Return the run whose adapter was evaluated; a folder that was moved with its evaluations in it is known, too."""
        if adapter is None:
            return None
        places = [str(each.resolve()) for each in (Path(adapter), file.parent, file.parent.parent)]
        return next((place for place in places if place in self.settings), places[0])

    def read_diagnostic(self, content: Any, path: Path) -> None:
        name, num_loops = take(content, ("diagnostic",), TEXT), take(content, ("settings", "num_loops"), TOTAL)
        on_rows = take(content, ("settings", "rows"), MAPPING, {})
        how = {f"evaluation.{key}": _plain(value) for key, value in on_rows.items()}
        protocols = take(content, ("settings", "benchmarks"), MAPPING, {})
        seen: dict[str, int] = {}
        for number, entry in enumerate(take(content, ("runs",), LIST)):
            method = take(content, ("runs", number, "method"), TEXT)
            place = seen[method] = seen.get(method, -1) + 1
            run = self._run_of(take(content, ("runs", number, "path"), TEXT, None), path)
            if (
                run not in self.settings
            ):  # of an adapter whose training is not here; without a path the name is all there is
                run = f"{run or f'{path.parent.resolve()}#{place}'}#{method}"
            facts = {key: _plain(entry.get(key)) for key in ("rule", "p", "seed")}
            facts |= {"seed": place if facts["seed"] is None else facts["seed"], "method": method}
            facts |= {
                "num_loops": entry.get("train_num_loops") or num_loops,
                "model": _model(content["settings"].get("model")),
            }
            self.settings.setdefault(run, facts)
            source = str(on_rows.get("source") or "rows")
            for row in diagnostic_rows(name, content, ("runs", number, "measured"), source, num_loops):
                of = protocols.get(row["benchmark"])
                mine = how if of is None else {f"evaluation.{key}": _plain(value) for key, value in of.items()}
                if run.endswith(f"#{BASE}"):
                    row.setdefault("gates", NONE)
                self.rows.append((run, {"depth": num_loops, **mine, **row}))


def run_settings(content: Any, folder: Path) -> Row:
    """Return every setting of a finished training as columns: those that were given, and what is known of its adapter."""
    given, depth = take(content, ("run_info", "settings"), MAPPING), take(content, ("train_info", "num_loops"), TOTAL)
    model = take(content, ("meta_info", "model"), TEXT, given.get("model_name_or_path"))
    settings = {**_flat(given), **_flat(content["train_info"]), "num_loops": depth, "model": _model(model)}
    settings |= {"rank": settings.pop("r", settings.get("lora_r", 16)), "sweep": _sweep_of(folder)}
    data = take(content, ("run", "data"), MAPPING, {})  # what the training rows are: their number and their hash
    settings |= {f"data.{key}": _plain(value) for key, value in data.items()}
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
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": _plain(value)}
    return found


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (list, dict)) else value


def _model(name: Any) -> str | None:
    return None if name is None else str(name).rstrip("/").split("/")[-1]


def _sweep_of(folder: Path) -> str | None:
    """Return the name of the sweep that a run's folder is in: of the nearest parent with a file `sweep.*`."""
    places = (folder.resolve(), *folder.resolve().parents)
    return next((each.name for each in places if any(each.glob("sweep.*"))), None)


_READERS = (  # in this order: trainings first, since the others belong to them
    (lambda path: path.name == "results.json", _Reader.read_training),
    (lambda path: path.name == "trainer_state.json", _Reader.read_log),
    (lambda path: path.name == "evaluation.json", _Reader.read_evaluation),
    (lambda path: path.parent.name == "diagnostics", _Reader.read_diagnostic),
)
_FIRST = [
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


def load_table(folders: Iterable[str | Path]) -> pd.DataFrame:
    """Read everything below the folders into one long table.

    Returns:
        A row for each number (see the top of this file). `attrs["skipped"]`: a sentence about each unreadable file.

    Raises:
        ReportError: if a folder is missing.
    """
    import pandas as pd

    paths: dict[Path, Path] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise ReportError(f"There is no folder {folder}: name folders that training, evaluation or sweeps wrote.")
        for path in sorted(folder.rglob("*.json")):
            inside = path.relative_to(folder).parts[:-1]
            if not any(part.startswith(("checkpoint-", ".")) or part in ("answers", "parts") for part in inside):
                paths.setdefault(path.resolve(), path)
    reader, skipped = _Reader(), []
    for belongs, read in _READERS:
        for path in filter(belongs, paths.values()):
            known, before = len(reader.rows), dict(reader.settings)
            try:
                read(reader, json.loads(path.read_text(encoding="utf-8")), path)
                reader.rows[known:] = [(run, {**row, "source": str(path)}) for run, row in reader.rows[known:]]
                continue
            except ReportError as error:
                fault = f"{path}: {error}"
            except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
                fault = f"{path}: it cannot be read ({' '.join(str(error).split())})."
            del reader.rows[known:]  # nothing of half a file
            reader.settings = before
            skipped.append(fault)
            logger.warning("Left out: %s", fault)
    rows = []
    for run, row in reader.rows:
        settings = reader.settings[run]
        rows.append({**settings, "gates": ALL, "depth": settings.get("num_loops"), **row, "run": run})
    columns = dict.fromkeys([*_FIRST, *(key for row in rows for key in row)])
    table = pd.DataFrame(rows, columns=list(columns), dtype=object)
    table["value"] = table["value"].astype(float)
    table = _without_repeats(table)
    table.attrs["skipped"] = skipped
    return table


def _without_repeats(table: pd.DataFrame) -> pd.DataFrame:
    """Leave out what stands in two files: the base's result beside each adapter, one number in two diagnostics, and what an
    evaluation's file says of the accuracy on as many problems, too, with more about how it was found."""
    if not len(table):
        return table
    names = ("run", "benchmark", "metric", "depth", "gates", "readout", "loop", "total", "group", "step")
    text = lambda value: "" if value is None or value != value else str(value)
    keys = table[[name for name in names if name in table]].map(text).apply(tuple, axis=1)
    is_evaluation, is_training = (table["source"].str.endswith(f"{name}.json") for name in ("evaluation", "results"))
    table = table[~(keys.isin(set(keys[is_evaluation])) & is_training)]
    columns = [name for name in table if name not in OUTCOMES]
    same = table[columns].assign(value=table["value"], run=table["run"].where(table["method"] != BASE, BASE))
    return table[~same.map(text).duplicated()].reset_index(drop=True)
