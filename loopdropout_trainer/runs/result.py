"""What a training leaves in its folder: its numbers as rows, and run.json, which says of what they are (docs/runs.md)."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from loopdropout_trainer.errors import public_settings
from loopdropout_trainer.record.identity import WHOLE_RUN, Identity, differences, identity_key
from loopdropout_trainer.record.measurement import (
    BASE,
    IDENTITIES_FILE,
    MEASUREMENTS_FILE,
    WRITERS_FILE,
    Measurement,
    RecordError,
    read_measurements,
    write_measurements,
)
from loopdropout_trainer.saving.files import read_json, sha256, staged_files, write_json


if TYPE_CHECKING:
    from loopdropout_trainer.saving.cards import CardScore

WRITER = "training"
"""Of the measurements of a training."""

RUN_FILE, EXPECTED_FILE = "run.json", "expected.json"
"""What a complete run ends with; and what its sweep expects of it."""

FORMER_FILE = "results.json"
"""What earlier versions wrote in the place of run.json, with the numbers in it."""

_NOT_ASKED_FOR = {"compare_with", "benchmark_batch_size", "dry_run"}
_SCORES = ("accuracy", "score")


@dataclass
class Result:
    """What was measured of one training, and what was saved of it.

    Attributes:
        rows: its measurements, those of the base among them.
        identities: what they depend on, by key.
        saved: paths by what is there.
    """

    rows: list[Measurement] = field(default_factory=list)
    identities: dict[str, Identity] = field(default_factory=dict)
    saved: dict[str, str] = field(default_factory=dict)

    def keep(self, identity: Identity, rows: Iterable[Measurement]) -> None:
        self.identities[identity_key(identity)] = identity
        self.rows += rows

    def of_base(self) -> Result:
        """Return what was measured before the training: the same for all rules of a command."""
        return Result([row for row in self.rows if row.method == BASE], dict(self.identities))

    @property
    def training(self) -> Measurement | None:
        """A row that tells what all of the trained adapter share: method, depth, seed and steps; None without any."""
        return next((row for row in self.rows if row.family == "cost"), None)

    def value(self, metric: str, loop: int | None = None) -> float:
        """Return a number that is no benchmark's, such as a cost or a loss; NaN if it was not measured."""
        values = (row.value for row in self.rows if row.metric == metric and row.loop == loop and row.step is None)
        return next(values, math.nan)

    def scores(
        self,
        depth: int | None = None,
        loop: int | None = None,
        method: str | None = None,
        families: Iterable[str] = _SCORES,
    ) -> dict[str, Measurement]:
        """Return the first metric of each benchmark, by the benchmark's name.

        Args:
            depth: at which it was measured; default: that of the training.
            loop: the only one that had the adapter; None: all had it.
            method: `base` for the model before training; default: the trained one.
            families: of metrics.
        """
        scores = {}
        place = (depth or self.training.depth, loop, method or self.training.method)
        for row in self.rows:
            if row.family in families and (row.depth, row.loop, row.method) == place:
                scores.setdefault(row.benchmark, row)
        return scores

    def card_scores(self) -> dict[str, CardScore]:
        """Return what a model card says of each benchmark."""
        from loopdropout_trainer.saving.cards import CardScore

        if self.training is None:
            return {}
        before = {name: row.value for name, row in self.scores(method=BASE).items()}
        return {name: CardScore(row.value, row.total, before.get(name)) for name, row in self.scores().items()}


def write_result(result: Result, facts: Mapping[str, Any], run: Identity, output_dir: str | Path) -> None:
    """Write the rows, then run.json with `facts`, and the recipe.yaml that repeats the run.

    Raises:
        WriteError: if the disk refuses; what was there before is untouched.
    """
    from loopdropout_trainer.evaluation.results import ANSWERS_FOLDER, PREDICTIONS_FILE
    from loopdropout_trainer.settings.recipe import settings_yaml

    write_measurements(output_dir, result.rows, result.identities.values(), WRITER)
    output_dir = Path(output_dir)
    # The adapter's other files are in its manifest; the predictions are made again of the answers that they say.
    files = [*output_dir.glob("*.safetensors"), *output_dir.glob(f"{ANSWERS_FOLDER}/**/{PREDICTIONS_FILE}")]
    if "merged model" in result.saved:
        files += Path(result.saved["merged model"]).glob("*")
    hashes = {str(file.relative_to(output_dir)): sha256(file) for file in files if file.suffix != ".md"}
    saved = {what: str(Path(path).relative_to(output_dir)) for what, path in result.saved.items()}  # it may move
    of_run = {"identity": identity_key(run), "saved": saved, "files": hashes}
    with staged_files(output_dir, "The results", "The adapter is safe there; free some space and resume.") as folder:
        (folder / "recipe.yaml").write_text(settings_yaml(facts["settings"]), encoding="utf-8")
        write_json(folder / RUN_FILE, {**facts, **of_run})


class FinishedRun(NamedTuple):
    """What a finished run has left: the content of run.json, what was measured, and the identity of the training."""

    facts: dict[str, Any]
    result: Result
    identity: Identity


def read_run(folder: str | Path) -> FinishedRun | None:
    """Return what a finished run has left in a folder; None if there is none, or its run.json or rows are damaged."""
    try:
        facts = read_json(Path(folder, RUN_FILE))
        facts |= {name: dict(facts[name]) for name in ("settings", "saved", "files")}
        result = training_result(folder)
        result.saved = {what: str(Path(folder, path)) for what, path in facts["saved"].items()}
        return FinishedRun(facts, result, result.identities[facts["identity"]]) if result.rows else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_finished(folder: str | Path) -> bool:
    """Say whether there is something for `read_run` in a folder; it is read again only when its files have changed."""
    files = [Path(folder, name) for name in (RUN_FILE, MEASUREMENTS_FILE, IDENTITIES_FILE, WRITERS_FILE)]
    return _is_finished(folder, tuple(file.stat().st_mtime_ns for file in files if file.exists()))


@functools.cache
def _is_finished(folder: str | Path, modified: tuple[int, ...]) -> bool:
    return read_run(folder) is not None


def finished_result(
    settings: Mapping[str, Any], output_dir: str | Path, identity: Identity, problems: Iterable[Mapping[str, str]] = ()
) -> Result | None:
    """Return the result of a finished run, if it is this one with these benchmarks and nothing is left to do; or None.

    `problems`: of each benchmark, as measurements on it say in the part `data` of their identity.
    """
    from loopdropout_trainer.training.checkpoints.sealing import fault_of

    run = read_run(output_dir)
    folder = Path(output_dir)
    if run is None or differences(run.identity, identity, WHOLE_RUN):
        return None
    if _asked_for(run.facts["settings"]) != _asked_for(public_settings(settings)):
        return None  # before gigabytes of weights are hashed
    measured = [of_row.get("data") for of_row in run.result.identities.values()]
    if any(data not in measured for data in problems):
        return None
    for name, digest in run.facts["files"].items():
        if not (folder / name).is_file() or sha256(folder / name) != digest:
            return None
    return run.result if fault_of(folder) is None else None


def training_result(folder: str | Path) -> Result:
    """Return what the training in a folder has measured, whether or not it was finished; RecordError for damaged files."""
    rows, identities, faults = read_measurements(folder)
    rows = [row for row in rows if row.writer == WRITER]
    if faults and not rows:
        raise RecordError(faults[0])
    return Result(rows, identities)


def is_of_former_version(folder: str | Path) -> bool:
    """Say whether a run was finished by an earlier version of this package, which kept its numbers in results.json."""
    return Path(folder, FORMER_FILE).is_file() and not Path(folder, RUN_FILE).exists()


def _asked_for(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that say what is to be measured and made of a trained adapter."""
    from loopdropout_trainer.settings.arguments import RunArguments

    names = RunArguments.__dataclass_fields__.keys() - _NOT_ASKED_FOR
    given = {name: settings[name] for name in names if settings.get(name) is not None}
    return json.loads(json.dumps(given, default=str))
