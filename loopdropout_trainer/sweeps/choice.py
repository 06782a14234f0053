"""The choice of the learning rate of each method of a sweep, by the scores of its first seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from loopdropout_trainer.results.sweep_folder import SweepRun
from loopdropout_trainer.results.sweep_scores import NON_FINITE, describe_edge, describe_other_examples


_MOST_ADDED = 4
"""Number of learning rates that `extend_grid` adds to those of a method at most."""


class Choice(NamedTuple):
    """The learning rates of a method in ascending order, the best one if it is known, and a remark about it."""

    rates: list[float]
    best: float | None
    remark: str = ""


def choose_rate(sweep: Any, method: str, with_other_code: bool = False) -> Choice:
    """Choose the learning rate with the best score of the first seed.

    Ties are broken by the held-out loss, then by the smaller rate. While the best one is at the edge of its grid,
    `extend_grid` adds the next one, in the ratio of the outermost two.

    Args:
        sweep: `Sweep` of recipes/sweep.py.
        method: Name of the method.
        with_other_code: Whether scores of other imported code count, too, as after `ACCEPT`.
    """
    factor = sweep.rate_factors.get(method, 1.0)
    rates = sorted(_rounded(factor * rate) for rate in sweep.learning_rates)
    limit = len(rates)
    if sweep.extend_grid and not sweep.full_grid:
        limit += _MOST_ADDED
    while True:
        scores = {}
        for rate in rates:
            run = SweepRun(method, rate, sweep.seeds[0], True)
            scores[rate] = sweep.read_any_score(run) if with_other_code else sweep.score(run)
        if None in scores.values():
            return Choice(rates, None, "Not every learning rate has a score.")
        if max(scores.values()) == NON_FINITE:
            return Choice(rates, None, "No learning rate has a finite score.")
        best = max(scores, key=scores.get)  # the smallest one of equal scores, because the rates ascend
        if best not in (rates[0], rates[-1]) or len(rates) == limit:
            key = (method, *scores.items())
            if key not in sweep.remarks:  # every worker asks each second, and the results are files
                sweep.remarks[key] = _describe_scores(sweep, method, scores, best)
            return Choice(rates, best, sweep.remarks[key])
        if best == rates[0]:
            outermost, neighbor = rates[0], rates[1]
        else:
            outermost, neighbor = rates[-1], rates[-2]
        rates = sorted([*rates, _rounded(outermost**2 / neighbor)])


def _describe_scores(sweep: Any, method: str, scores: Mapping[float, tuple[float, float]], best: float) -> str:
    """Return remarks about the scores of a method's learning rates, by rate, of which one is the best, or ""."""
    folders = [sweep.folder(SweepRun(method, rate, sweep.seeds[0], True)) for rate in scores]
    remarks = [
        describe_other_examples(folders, sweep.select_on),
        describe_edge(scores, best, sweep.extend_grid, sweep.select_on),
    ]
    return " ".join(filter(None, remarks))


def _rounded(rate: float) -> float:
    return float(f"{rate:.6g}")  # as in the name of the folder
