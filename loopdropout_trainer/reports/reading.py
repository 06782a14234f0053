"""The long table: everything that runs, evaluations and diagnostics left in folders, one number in each row.

A row says what was measured (`benchmark`, `metric`), where (`PLACES`) and how (`evaluation.NAME`, `total`, `problems`), and
holds every setting of its run in columns of their own. What is read of each file stands in forms.yaml.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from loopdropout_trainer.errors import one_line
from loopdropout_trainer.settings.recipe import method_title


logger = logging.getLogger(__name__)
Row = dict[str, Any]
Found = Iterator[tuple[str, Row, Row]]
FORMS = yaml.safe_load((files("loopdropout_trainer.reports") / "forms.yaml").read_text(encoding="utf-8"))

BASE, ALL, NONE, TRAINING = "base", "all", "none", "training"
"""Method of the model without an adapter; unit gates, and gates of zero; what stands as the benchmark of a learning curve."""

PLACES, OUTCOMES = FORMS["places"].split(), FORMS["outcomes"].split()
"""Columns that say where in a measurement a number is, and those of what was found; all others count as settings.

`verdicts` [problems] is what each problem counts, from 0 to 1, and `answered` whether its completion holds an answer.
"""


class ReportError(ValueError):
    """A report that cannot be made, or a file that cannot be read, in one sentence."""


class Missing(ReportError):
    """A number that these results do not hold."""


_NUMBERS = {"*": "", "+": " of one or more", "!": " of one"}
_TYPES = {"a mapping": dict, "a list": list, "a string": str, "true or false": bool}


def _fits(value: Any, kind: str) -> bool:
    if kind != (one := kind.removesuffix(", or a list of such")):
        return all(_fits(each, one) for each in (value if isinstance(value, list) else [value]))
    if of := re.fullmatch(r"an? (number|integer)(?: from (\d+))?(?: to (\d+))?", kind):
        least, most = float(of[2] or -1e300), float(of[3] or 1e300)
        return type(value) in ((int,) if of[1] == "integer" else (int, float)) and least <= value <= most  # NaN: False
    if kind == "a scalar":
        return value is None or isinstance(value, (str, bool)) or _fits(value, "a number")
    if kind in _TYPES:
        return isinstance(value, _TYPES[kind]) and (kind != "a mapping" or all(isinstance(key, str) for key in value))
    if " or " in kind:
        return value in kind.split(" or ")
    return isinstance(value, str) and bool(re.fullmatch(r"[\w:. -]+", value))  # a label, which becomes part of LaTeX


def check(value: Any, form: Any, place: str = "", complete: bool = False) -> None:
    """Compare what a file holds with its form, which has all names if it is complete; ReportError names place and fault."""
    kind = {dict: "a mapping", list: "a list"}.get(type(form), form)
    mark = next((each for each in _NUMBERS if each in form), None) if kind != form else None
    if not _fits(value, kind) or mark == "+" and not value or mark == "!" and len(value) != 1:
        raise ReportError(
            f"{f'`{place}`' if place else 'the file'} must be {kind}{_NUMBERS.get(mark, '')}; got {repr(value)[:60]}"
        )
    if isinstance(form, list):
        form, value, mark = {"*": form[-1]}, dict(enumerate(value)), "*"
    own = {name.strip("()"): each for name, each in form.items() if name != mark} if kind != form else {}
    others = [name for name in value if name not in own] if own or mark else []
    if complete and others and mark is None:
        raise ReportError(f"there is no field `{f'{place}.{others[0]}'.lstrip('.')}`; valid are {', '.join(own)}")
    given = [name for name in own if f"({name})" not in form or value.get(name) is not None]
    for name in [*given, *(others if mark else ())]:
        check(value.get(name), own[name] if name in own else form[mark], f"{place}.{name}".lstrip("."), complete)


@functools.cache
def setting_names() -> set[str]:
    """Return what a column may be called before any dot, beside those that are in a long table."""
    from loopdropout_trainer.data import DataArguments
    from loopdropout_trainer.experimental.grpo_config import LoopDropoutGRPOConfig
    from loopdropout_trainer.settings.arguments import AdapterArguments, ModelArguments, RunArguments
    from loopdropout_trainer.training.config import LoopDropoutConfig, LoopDropoutDPOConfig

    types = (LoopDropoutConfig, LoopDropoutDPOConfig, LoopDropoutGRPOConfig, DataArguments, AdapterArguments)
    known = {*PLACES, *OUTCOMES, *(name.strip("()") for name in FORMS["columns"]), "evaluation", "data"}
    return known.union(*({field.name for field in fields(each)} for each in (*types, ModelArguments, RunArguments)))


def check_column(rows: pd.DataFrame, name: str) -> None:
    """Refuse a name that no column of any long table has."""
    if name in ("verdicts", "answered") or name not in rows and name.split(".")[0] not in setting_names():
        raise ReportError(f"There is no column `{name}`: see docs/reports.md, and long.csv of a report.")


def flat(settings: Mapping[str, Any], prefix: str = "") -> Row:
    """Return nested settings as columns with dotted names: lists as their JSON, numbers and hashes with 12 digits."""
    found: Row = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            value = float(f"{value:.12g}") if isinstance(value, float) else value
            value = value[:12] if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) else value
            found[f"{prefix}{key}"] = json.dumps(value) if isinstance(value, list) else value
    return found


def only_loop(loop: int, num_loops: int) -> Row:
    """Return the columns of a measurement with the adapter in loop `loop` (from 1) of `num_loops` alone."""
    return {"gates": gates_text([float(each == loop) for each in range(1, num_loops + 1)]), "loop": loop}


def gates_text(gates: Sequence[float] | None) -> str:
    """Return gates [K] as the option `--gates` takes them (`1-0-0-0`); `all` for unit gates at any K, `none` for zeros."""
    if gates is None or all(gate == 1 for gate in gates):
        return ALL
    return NONE if not any(gates) else "-".join(f"{gate:g}" for gate in gates)


# Rows of each part of a file, without the settings of its run.


def benchmark_rows(result: Row, name: str, **how: Any) -> Iterator[Row]:
    """Yield a row for each metric of one benchmark's result, and the completions without an answer as metric `missing`.

    Counts and predictions that contradict one another are refused.
    """
    listed, settings, total = result.get("predictions") or [], flat(result.get("settings") or {}), result["total"]
    how |= {"benchmark": name, "total": total}
    how |= {f"evaluation.{key}": settings[key] for key in settings.keys() - FORMS["elsewhere"].split()}
    answered = np.array([each.get("extracted") is not None for each in listed])
    _agree(f"`missing` of {name}", result["missing"], total, sum(~answered) if listed else None)
    if listed:
        _agree(f"`total` of {name}", total, total, len(listed))
        prompts = "\0".join(each["prompt"] for each in listed)
        how |= {"problems": hashlib.sha256(prompts.encode()).hexdigest()[:12], "answered": answered}
    for place, (metric, of) in enumerate(result["metrics"].items()):
        found, verdicts = {"metric": metric, "value": of["score"], "total": of["total"]}, None
        if of.get("sum") is not None:  # a share of the problems
            each = [(each.get("values") or {}).get(metric, None if place else each.get("correct")) for each in listed]
            verdicts = np.array(each, dtype=float) if len(each) == of["total"] and None not in each else None
            _agree(f"`score` of {metric}", of["score"] * of["total"] / 100, of["total"], of["sum"])
            for counted in (of.get("correct"), None if verdicts is None else verdicts.sum()):
                _agree(f"`sum` of {metric}", of["sum"], of["total"], counted)
        yield {**how, **found, "verdicts": verdicts}
    for column, groups in (result.get("groups") or {}).items():
        for group, of in groups.items():
            _agree(f"`correct` of {group}", of["correct"], of["total"])
            value = {"value": 100 * of["correct"] / of["total"], "total": of["total"]}
            yield {**how, "metric": f"by_{column}", "group": group, **value}
    yield {**how, "metric": "missing", "value": 100 * result["missing"] / total}


def _agree(what: str, said: float, most: int, counted: float | None = None) -> None:
    """Refuse a count that is not from 0 to `most`, or not what was counted, if it was."""
    if not 0 <= said <= most or counted is not None and abs(said - counted) > 1e-6 * most:
        wanted = f"from 0 to {most}" if counted is None else f"{counted:g} of {most}, as the file's other numbers say"
        raise ReportError(f"{what} must be {wanted}; got {said:g}")


def pattern_rows(measured: Row, benchmark: str, num_loops: int) -> Iterator[Row]:
    """Yield the loss reduction of each set of loops, by its gates, and of a prefix or suffix by its number of loops."""
    for each in measured["patterns"]:
        gates = gates_text([float(loop in each["loops"]) for loop in range(1, num_loops + 1)])
        row = {"benchmark": benchmark, "value": each["reduction_percent"], "gates": gates}
        yield {**row, "metric": "pattern_loss_reduction"}
        yield from ({**row, "metric": f"{k}_loss_reduction", "loop": len(each["loops"])} for k in each["kinds"])


def matches(value: Any, pattern: Sequence[str], how: Row) -> Iterator[Row]:
    """Yield the values that a pattern of forms.yaml matches, with the columns that lead there."""
    if not pattern:
        yield {**how, "value": value}
    elif isinstance(value, dict if pattern[0] in ("*key", "*group") else list) and pattern[0].startswith("*"):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value, 1):
            yield from matches(each, pattern[1:], {**how, pattern[0][1:]: key})
    elif isinstance(value, dict) and value.get(pattern[0]) is not None:
        yield from matches(value[pattern[0]], pattern[1:], how)


def diagnostic_rows(name: str, measured: Row, rows: str, num_loops: int) -> Iterator[Row]:
    """Yield what diagnostic `name` measured of one model of `num_loops` loops (docs/diagnostics.md), on `rows` if on rows."""
    if name == "patterns":
        yield from pattern_rows(measured, rows, num_loops)
    for pattern, metric in FORMS["diagnostics"].get(name, FORMS["any_diagnostic"]).items():
        for row in matches(measured, pattern.split("."), {"benchmark": rows, "diagnostic": name}):
            if name not in FORMS["diagnostics"] and not _fits(row["value"], "a number"):
                continue  # texts, and lists that another pattern takes apart
            for column in {"depth", "dose"} & set(row):  # which are named by a list of their own
                row[column] = measured[f"{column}s"][row[column] - 1]
            row |= only_loop(row["only"], num_loops) if "only" in row else {}
            row |= {"loop": row["readout"]} if "readout" in row else {}
            row["metric"] = metric.format(**row)
            yield {key: row[key] for key in row if key in ("benchmark", "metric", "value", *PLACES)}


# Files: each number's run, what is known of the run, and the number's row.


def read_training(content: Row, path: Path, runs: Mapping[str, Row]) -> Found:
    run, settings = str(path.parent.resolve()), run_settings(content, path.parent)
    depth, benchmarks = settings["num_loops"], content.get("benchmarks") or {}
    names, first = FORMS["of_benchmarks"].split(), next(iter(benchmarks), "")
    how = {"depth": depth} | {f"evaluation.{name}": settings.pop(name) for name in names if name in settings}
    yield run, settings, {}
    base = {name: settings.get(name) for name in ("model", "num_loops", "sweep")} | {"method": BASE}
    of_base = {**how, "gates": NONE, "base_weights": settings.get("base_weights")}
    for name, result in (content.get("base_benchmarks") or {}).items():
        unadapted = f"{base['sweep']}/{base['model']}#{BASE}"  # the same beside each adapter of a sweep
        yield from ((unadapted, base, row) for row in benchmark_rows(result, name, **of_base))
    found = [(name, result, {}) for name, result in benchmarks.items()]
    depths = {int(loops): result for loops, result in (content.get("by_depth") or {}).items()}
    found += [(first, depths[loops], {"depth": loops}) for loops in depths if loops != depth]
    in_one_loop = enumerate(content.get("single_loop_benchmarks") or (), 1)
    found += [(first, result, only_loop(loop, depth)) for loop, result in in_one_loop]
    rows = [benchmark_rows(result, name, **{**how, **where}) for name, result, where in found]
    rows.append(diagnostic_rows("single_loop", content.get("single_loop") or {}, "held_out", depth))
    rows.append(diagnostic_rows("readouts", {"losses": content.get("readout_losses")}, "held_out", depth))
    yield from ((run, settings, row) for each in rows for row in each)


def read_log(content: Row, path: Path, runs: Mapping[str, Row]) -> Found:
    """Read the learning curves of a trainer_state.json: every number that was logged, by step."""
    run = str(path.parent.resolve())
    for entry in content["log_history"] if run in runs else ():
        for metric, value in entry.items():
            if isinstance(value, float) and isfinite(value) and not metric.startswith(("train_", "total_flos")):
                yield run, {}, {"benchmark": TRAINING, "metric": metric, "value": value, "step": entry["step"]}


def read_evaluation(content: Row, path: Path, runs: Mapping[str, Row]) -> Found:
    for name, entry in content["rows"].items():
        about = entry["meta_info"]
        adapter, gates = about.get("adapter_path"), about.get("gates")
        facts = {"num_loops": about["num_loops"], **flat(entry.get("train_info") or {})}
        facts |= {"rank": facts.pop("r", None), "model": _model(about.get("model")), "sweep": _sweep_of(path.parent)}
        facts |= _method(facts) if adapter and facts.get("rule") else {"method": name}
        facts["checkpoint"] = checkpoint[0] if (checkpoint := re.search(r"checkpoint-\d+$", adapter or "")) else None
        run = run_of(adapter, path, runs) if adapter else f"{facts['sweep']}/{facts['model']}#{name}"
        how = {"depth": about["num_loops"], "readout": about.get("readout") or None}
        how["gates"] = gates_text(gates) if adapter else NONE
        if gates and sorted(gates)[-2:] in ([0, 1], [1]):
            how["loop"] = gates.index(1) + 1
        for benchmark, result in entry["benchmarks"].items():
            yield from ((run, facts, row) for row in benchmark_rows(result, benchmark, **how))


def read_diagnostic(content: Row, path: Path, runs: Mapping[str, Row]) -> Found:
    of = content["settings"]
    how = {"depth": of["num_loops"], **flat({**(of.get("rows") or {}), "weights": of.get("weights")}, "evaluation.")}
    for place, entry in enumerate(content["runs"]):
        method = entry["method"]
        run = run_of(entry["path"], path, runs) if entry.get("path") else f"{path.parent.resolve()}#{place}"
        run = (
            run if run in runs else f"{run}#{method}"
        )  # the training is not here; without a path the name is all there is
        facts = flat({name: entry.get(name) for name in ("rule", "p")}) | {"method": method}
        facts["seed"] = f"unknown {place}" if entry.get("seed") is None else entry["seed"]
        facts |= {"model": _model(of.get("model")), "num_loops": entry.get("train_num_loops") or of["num_loops"]}
        source, gates = str((of.get("rows") or {}).get("source") or "rows"), {"gates": NONE} if method == BASE else {}
        for row in diagnostic_rows(content["diagnostic"], entry["measured"], source, of["num_loops"]):
            yield run, facts, {**how, **gates, **row}


def run_of(adapter: str, file: Path, runs: Mapping[str, Row]) -> str:
    """Return the run whose adapter was measured: its folder; if that is gone, the run of that name that holds the file."""
    own = Path(adapter).resolve()
    for place in () if own.exists() else map(str, (file.parent.resolve(), file.parent.parent.resolve())):
        if place in runs and own.name in (Path(place).name, Path(str(runs[place].get("adapter_path"))).name):
            return place
    return str(own)


def run_settings(content: Row, folder: Path) -> Row:
    """Return every setting of a finished training as columns: those that were given, and what is known of its adapter."""
    given, trained = content["run_info"]["settings"], content["train_info"]
    model = (content.get("meta_info") or {}).get("model") or given.get("model_name_or_path")
    settings = {**flat(given), **flat(trained), "model": _model(model), "sweep": _sweep_of(folder)}
    settings["rank"], identity = settings.pop("r", settings.get("lora_r", 16)), content.get("run") or {}
    weights, path = (identity.get("model") or {}).get("weights"), (content.get("meta_info") or {}).get("adapter_path")
    settings |= flat({"data": identity.get("data") or {}, "base_weights": weights, "adapter_path": path})
    settings |= _method(settings)
    return {key: value for key, value in settings.items() if key not in FORMS["without_effect"].split()}


def _method(settings: Row) -> Row:
    """Return what tables ask for and no setting says: the method's name, and what kind of masks and factors it has."""
    rule, p = settings.get("rule"), settings.get("p")
    noise = settings.get("rule_args.c", 1.0) if "noise" in str(rule) else None
    masked = rule not in ("lora", None) and p not in (None, 0)
    return {"method": method_title(settings), "masked": masked, "shared": rule != "independent", "noise_c": noise}


def _model(name: Any) -> str | None:
    return None if name is None else str(name).rstrip("/").split("/")[-1]


def _sweep_of(folder: Path) -> str | None:
    """Return the name of the sweep that a run's folder is in: of the nearest parent with a file `sweep.*`."""
    places = (folder.resolve(), *folder.resolve().parents)
    return next((each.name for each in places if any(each.glob("sweep.*"))), None)


def load_table(folders: Iterable[str | Path]) -> pd.DataFrame:
    """Read everything below the folders into one long table: a row for each number (see the top of this file).

    `attrs["skipped"]` holds a sentence about each unreadable file. A folder that is missing is a ReportError.
    """
    paths: dict[Path, Path] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise ReportError(f"There is no folder {folder}: name folders that training, evaluation or sweeps wrote.")
        for path in sorted(folder.rglob("*.json")):
            if not any(part.startswith(".") for part in path.relative_to(folder).parts):  # not yet complete
                paths.setdefault(path.resolve(), path)
    readers = {"results.json": read_training, "trainer_state.json": read_log, "evaluation.json": read_evaluation,
               "diagnostics": read_diagnostic}  # fmt: skip
    # Trainings come first, since the others belong to them.
    name_of = lambda path: path.name if path.name in readers else path.parent.name
    readable = [(name, path) for name in readers for path in paths.values() if name == name_of(path)]
    runs: dict[str, Row] = {}
    rows, skipped = [], []
    for name, path in readable:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            check(content, FORMS["files"][name])
            found = list(readers[name](content, path, runs))  # all of a file or nothing
            for _, facts, row in found:
                about = f"{row['metric']} of {row['benchmark']}" if row else "run"
                check({**facts, **row}, FORMS["columns"], about)
        except Exception as error:  # whatever stands in the file
            skipped.append(f"{path} cannot be read: {one_line(error)}.")
            logger.warning("Left out: %s", skipped[-1])
            continue
        for run, facts, row in found:
            known = {"gates": ALL, "depth": facts.get("num_loops"), **runs.setdefault(run, facts)}
            rows += [{**known, **row, "run": run, "source": str(path)}] if row else []
    first = ("run", "method", "seed", "benchmark", "metric", "value", "total", *PLACES, "num_loops", "problems")
    columns = dict.fromkeys([*first, *(key for row in rows for key in row), *OUTCOMES])
    table = pd.DataFrame(rows, columns=list(columns), dtype=object)
    table = table.where(table.notna(), None).astype({"value": float})
    # The same accuracy in an evaluation's file stands there with more about how it was found.
    keys = table[["run", "benchmark", "metric", "total", "value", *PLACES]].round({"value": 9}).apply(tuple, axis=1)
    file = table["source"].map(lambda source: Path(source).name)
    table = table[~((file == "results.json") & keys.isin(set(keys[file == "evaluation.json"])))]
    # The base's result stands beside each adapter, and one number in two diagnostics.
    columns = ["run", "value", *(name for name in table if name not in OUTCOMES)]
    table = table.drop_duplicates(columns, ignore_index=True)
    table.attrs["skipped"] = skipped
    return table
