"""The time that a sweep still takes, from the measured seconds of its runs.

Each kind of run of each method has its own mean. The kinds can differ by more than ten times: a run that chooses a learning
rate is measured on one task, and a final run on all tasks and at all depths. Methods differ by their rule, rank or data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from loopdropout_trainer.errors import join_words
from loopdropout_trainer.results.run_files import has_trained
from loopdropout_trainer.results.sweep_folder import SweepRun, read_summary
from loopdropout_trainer.sweeps.code import has_other_results
from loopdropout_trainer.sweeps.counts import name_existing_runs


CHOOSING, FINAL, MEASURING = "choosing", "final", "measuring"
"""Kinds of runs: trainings that only choose a learning rate, trainings with all measurements, and measurements alone."""

_NOUNS = {CHOOSING: "run that chooses a learning rate", FINAL: "final training", MEASURING: "measurement"}
_PLURALS = {CHOOSING: "runs that choose a learning rate", FINAL: "final trainings", MEASURING: "measurements"}


class RunKind(NamedTuple):
    """Runs that take about the same time: a method, and one of the kinds above."""

    method: str
    kind: str


def find_kind(sweep: Any, run: SweepRun) -> RunKind:
    """Return the method and the kind of a run of a sweep that is not done."""
    kind = FINAL
    if run.selects:
        kind = CHOOSING
    elif has_trained(sweep.folder(run)):
        kind = MEASURING
    return RunKind(run.method, kind)


def count_left(sweep: Any) -> dict[RunKind, int]:
    """Return the number of runs of each method and kind that are not done, also those that wait for a choice.

    Runs that failed, or that keep results of other imported code, are left out, because the sweep does not start them.

    Args:
        sweep: `Sweep` of recipes/sweep.py.
    """
    left: Counter[RunKind] = Counter()
    for method in sweep.recipes:
        pending = sweep.pending_of(method)
        runs = []
        for run in pending:
            if run not in sweep.pool.failures and not has_other_results(sweep, sweep.folder(run)):
                runs.append(run)
        left.update(find_kind(sweep, run) for run in runs)
        lacks_scores = len(runs) < len(pending)  # then no learning rate can be chosen
        if runs and not (lacks_scores or sweep.full_grid) and sweep.choice(method).best is None:
            left.update({RunKind(method, MEASURING): 1, RunKind(method, FINAL): len(sweep.seeds) - 1})
    return dict(left)


class RunTimes:
    """The measured seconds of the runs that have ended, by their method and kind."""

    def __init__(self) -> None:
        self.seconds: dict[RunKind, list[float]] = {}

    def add(self, kind: RunKind, seconds: float) -> None:
        """Add a run, which took some seconds with its start, training and evaluation."""
        self.seconds.setdefault(kind, []).append(seconds)

    def means(self) -> dict[RunKind, float]:
        """Return the mean seconds of a run of each method and kind of which one has ended."""
        return {kind: sum(seconds) / len(seconds) for kind, seconds in self.seconds.items()}


def read_means(sweep: Any) -> dict[RunKind, float]:
    """Return the mean seconds of each kind of run that a sweep has measured, by method.

    Args:
        sweep: `Sweep` of recipes/sweep.py.
    """
    saved = read_summary(sweep.output_dir).get("run_seconds", {})
    means = {}
    for method in sweep.recipes:
        own: Any = saved.get(method)
        if isinstance(own, dict):  # an older version has one number for all kinds
            means |= {RunKind(method, kind): seconds for kind, seconds in own.items()}
    return means


def find_means(sweep: Any) -> dict[RunKind, float]:
    """Return the mean seconds of each method's kinds of run: of those since the start of the sweep, else of a former start.

    Args:
        sweep: `Sweep` of recipes/sweep.py.
    """
    return {**read_means(sweep), **sweep.pool.times.means()}


def means_by_method(sweep: Any) -> dict[str, dict[str, float]]:
    """Return `find_means` as mappings of each method, as `summary.json` has them."""
    means: dict[str, dict[str, float]] = {method: {} for method in sweep.recipes}
    for (method, kind), seconds in find_means(sweep).items():
        means[method][kind] = seconds
    return means


def _find_seconds(kind: RunKind, means: Mapping[RunKind, float]) -> float | None:
    """Return the mean seconds of a run, or None if no run of its kind has ended.

    Before a run of its method has ended, the mean of the other methods counts.
    """
    if kind in means:
        return means[kind]
    others = [seconds for other, seconds in means.items() if other.kind == kind.kind]
    if not others:
        return None
    return sum(others) / len(others)


def describe_left(sweep: Any, speed: float) -> str:
    """Return the time that a sweep still takes, such as "about 0:42:10 left", or "" if nothing is left.

    The plan and all lines about the progress have it. It names the kinds of runs that are left and of which none has ended.

    Args:
        sweep: `Sweep` of recipes/sweep.py.
        speed: Number of runs at a time.
    """
    means = find_means(sweep)
    total_seconds, num_timed = 0.0, 0
    timed, untimed = set(), set()  # kinds of runs
    for kind, number in count_left(sweep).items():
        seconds = _find_seconds(kind, means)
        if number and seconds is None:
            untimed.add(kind.kind)
        elif number:
            total_seconds += seconds * number
            num_timed += number
            timed.add(kind.kind)
    if not num_timed and not untimed:
        return ""
    if not means:
        return "the time left is not known yet"
    if not num_timed:
        return f"the time of {_name_kinds(untimed)} is not known yet (none has ended)"
    total_seconds /= min(speed, num_timed)  # the last runs leave some workers without a run
    text = f"about {name_time(total_seconds)} left"
    may_count, _ = name_existing_runs(sweep)
    if may_count and FINAL in timed:  # these runs can take the places of final trainings
        text += ", or less if existing runs count"
    if untimed:
        text += f", not counting {_name_kinds(untimed)} (none has ended yet)"
    return text


def name_numbers(left: Mapping[RunKind, int]) -> str:
    """Return the numbers of runs that are left, such as "3 runs that choose a learning rate and 1 measurement"."""
    texts = []
    for kind in _NOUNS:
        number = sum(of_method for other, of_method in left.items() if other.kind == kind)
        if number:
            noun = _NOUNS[kind] if number == 1 else _PLURALS[kind]
            texts.append(f"{number:,} {noun}")
    return join_words(texts)


def _name_kinds(kinds: Collection[str]) -> str:
    """Return the names of some kinds of runs in words, in the order of a sweep."""
    return join_words([noun for kind, noun in _PLURALS.items() if kind in kinds])


def describe_means(means: Mapping[RunKind, float]) -> str:
    """Return the mean time of a run of each kind, with the methods if they differ, or "" if none is known."""
    texts, differs = [], False
    for kind, noun in _NOUNS.items():
        methods: dict[str, list[str]] = {}  # by their time
        for (method, own_kind), seconds in means.items():
            if own_kind == kind:
                methods.setdefault(name_time(seconds), []).append(method)
        times = [*methods]
        if len(methods) > 1:
            differs = True
            times = [f"{time} ({', '.join(names)})" for time, names in methods.items()]
        if times:
            texts.append(f"{', '.join(times)} for a {noun}")
    if not texts:
        return ""
    title = "measured on average, with the start of a run:"
    if differs:
        return "\n".join([title, *texts])
    return f"{title} {', '.join(texts)}"


def name_time(seconds: float) -> str:
    """Return a time in hours, minutes and seconds, such as "0:42:10"."""
    return str(timedelta(seconds=round(seconds)))
