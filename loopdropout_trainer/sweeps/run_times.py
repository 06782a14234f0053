"""The time that a sweep still takes, from the measured seconds of its runs.

Each kind of run has its own mean, because the kinds can differ by more than ten times: a run that chooses a learning rate is
measured on one task, and a final run on all tasks and at all depths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from loopdropout_trainer.results.run_files import has_trained
from loopdropout_trainer.results.sweep_folder import SweepRun, read_summary
from loopdropout_trainer.sweeps.code import has_other_results


CHOOSING, FINAL, MEASURING = "choosing", "final", "measuring"
"""Kinds of runs: trainings that only choose a learning rate, trainings with all measurements, and measurements alone."""

_NOUNS = {CHOOSING: "run that chooses a learning rate", FINAL: "final training", MEASURING: "measurement"}
_PLURALS = {CHOOSING: "runs that choose a learning rate", FINAL: "final trainings", MEASURING: "measurements"}


def find_kind(sweep: Any, run: SweepRun) -> str:
    """Return the kind of a run of a sweep that is not done."""
    if run.selects:
        return CHOOSING
    return MEASURING if has_trained(sweep.folder(run)) else FINAL


def count_left(sweep: Any) -> dict[str, int]:
    """Return the number of runs of each kind that are not done, also those that wait for a choice.

    Runs that failed, or that keep results of other imported code, are left out, because the sweep does not start them.

    Args:
        sweep: `Sweep` of recipes/sweep.py.
    """
    left: Counter[str] = Counter()
    for method in sweep.recipes:
        pending = sweep.pending_of(method)
        runs = []
        for run in pending:
            if run not in sweep.pool.failures and not has_other_results(sweep.folder(run)):
                runs.append(run)
        left.update(find_kind(sweep, run) for run in runs)
        lacks_scores = len(runs) < len(pending)  # then no learning rate can be chosen
        if runs and not (lacks_scores or sweep.full_grid) and sweep.choice(method).best is None:
            left.update({MEASURING: 1, FINAL: len(sweep.seeds) - 1})
    return dict(left)


class RunTimes:
    """The measured seconds of the runs that have ended, by their kind."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {CHOOSING: [], FINAL: [], MEASURING: []}

    def add(self, kind: str, seconds: float) -> None:
        """Add a run, which took some seconds with its start, training and evaluation."""
        self.seconds[kind].append(seconds)

    def means(self) -> dict[str, float]:
        """Return the mean seconds of a run of each kind that has ended."""
        return {kind: sum(seconds) / len(seconds) for kind, seconds in self.seconds.items() if seconds}


def read_means(sweep: Any) -> dict[str, float]:
    """Return the mean seconds of each kind of run that a sweep has measured. Methods of one sweep have the same ones.

    Args:
        sweep: `Sweep` of recipes/sweep.py.
    """
    saved = read_summary(sweep.output_dir).get("run_seconds", {})
    means: dict[str, float] = {}
    for method in sweep.recipes:
        own: Any = saved.get(method)
        if isinstance(own, dict):  # an older version has one number for all kinds
            means |= own
    return means


def find_means(sweep: Any) -> dict[str, float]:
    """Return the mean seconds of each kind of run: of those since the start of the sweep, else those of a former start.

    The plan and the lines about ended runs both use it, so that they agree on the time that is left.

    Args:
        sweep: `Sweep` of recipes/sweep.py.
    """
    return {**read_means(sweep), **sweep.pool.times.means()}


def describe_left(left: Mapping[str, int], means: Mapping[str, float], speed: float) -> str:
    """Return the time that a sweep still takes, such as "about 0:42:10 left", or "" if it is finished or not known at all.

    Args:
        left: Number of the runs of each kind that are not done.
        means: Mean seconds of a run by kind. The text names the kinds that are left and are not here.
        speed: Number of runs at a time.
    """
    timed = {kind: number for kind, number in left.items() if number and kind in means}
    if not timed:
        return ""
    seconds = sum(means[kind] * number for kind, number in timed.items())
    seconds /= min(speed, sum(timed.values()))  # the last runs leave some workers without a run
    text = f"about {name_time(seconds)} left"
    untimed = [noun for kind, noun in _PLURALS.items() if left.get(kind) and kind not in means]
    if untimed:
        text += f", not counting {' and '.join(untimed)} (none has ended yet)"
    return text


def describe_means(means: Mapping[str, float]) -> str:
    """Return the mean time of a run of each kind, or "" if none is known."""
    if not means:
        return ""
    texts = [f"{name_time(means[kind])} for a {noun}" for kind, noun in _NOUNS.items() if kind in means]
    return f"measured on average, with the start of a run: {', '.join(texts)}"


def name_time(seconds: float) -> str:
    """Return a time in hours, minutes and seconds, such as "0:42:10"."""
    return str(timedelta(seconds=round(seconds)))
