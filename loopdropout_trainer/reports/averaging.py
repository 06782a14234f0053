"""What is averaged: seeds of runs that are equal in every other setting, and nothing else, by construction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from loopdropout_trainer.reports.reading import OUTCOMES, ReportError


if TYPE_CHECKING:
    import pandas as pd

FIRST = ("model", "sweep", "num_loops", "rank", "p", "learning_rate", "total", "evaluation.num_rows")
"""Settings that runs are told apart by before any others."""

PLACES = ("depth", "loop", "other_loop", "dose", "group", "early", "late", "step")
"""Columns that say where in a measurement a number is, and are drawn along an axis."""

DRAWS = 2000


@dataclass(frozen=True)
class Average:
    """One setting over its seeds: `values` in the order of `seeds`, which is None for runs that had no seed of their own.

    NaN in one seed makes the mean NaN: it is shown, and not left out.
    """

    values: tuple[float, ...]
    seeds: tuple[Any, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def sd(self) -> float:
        """Sample standard deviation over seeds (n - 1), NaN for one seed."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else math.nan

    def text(self, decimals: int) -> str:
        """Return `mean ± SD`, or the mean alone for one seed."""
        return f"{self.mean:.{decimals}f}" + ("" if math.isnan(self.sd) else f" ± {self.sd:.{decimals}f}")


def is_protocol(name: str) -> bool:
    """Say whether a column is about how a benchmark was evaluated, rather than about the run."""
    return name.startswith("evaluation.") or name in ("total", "problems")


def settings_of(rows: pd.DataFrame) -> list[str]:
    """Return the columns that are settings: all but the outcomes."""
    return [name for name in rows if name not in OUTCOMES]


def varying(rows: pd.DataFrame, names: Iterable[str]) -> list[str]:
    """Return those columns that hold more than one value; that a setting is not known counts as a value."""
    return [name for name in names if len(set(_texts(rows[name]))) > 1]


def _texts(values: Iterable[Any]) -> list[str]:
    """Return values as texts that are equal where the values are: 1 and 1.0, None and NaN."""
    return [repr(float(each)) if isinstance(each, (int, float)) else str(each) for each in map(known, values)]


def known(value: Any) -> Any:
    """Return a value, None for the NaN that pandas puts where there is none."""
    return None if value is None or value != value else value


def groups(rows: pd.DataFrame, names: Sequence[str]) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """Yield the parts of rows that are equal in some columns, in their order, with the values of these."""
    if not names or not len(rows):
        yield {}, rows
        return
    for _, part in rows.groupby([_texts(rows[name]) for name in names], sort=False):
        yield {name: known(value) for name, value in part[list(names)].iloc[0].items()}, part


def average(rows: pd.DataFrame, what: str) -> Average:
    """Return mean and SD over seeds of rows that are equal in every other setting.

    Args:
        rows: of the long table.
        what: they are, for the errors.

    Raises:
        ReportError: if they are not, naming the settings that differ; or if two of them are of one seed.
    """
    different = varying(rows, settings_of(rows))
    if different:
        values = "; ".join(
            f"`{name}`: {', '.join(shown(each) for each in _few(rows[name]))}" for name in different[:4]
        )
        raise ReportError(
            f"{what} would average runs of different settings ({values}): filter them, or tell them apart."
        )
    by_seed: dict[Any, Any] = {}
    for place, seed in enumerate(map(known, rows["seed"] if "seed" in rows else [None] * len(rows))):
        if seed in by_seed:
            files = ", ".join(_few(rows["source"].iloc[[by_seed[seed], place]])) if "source" in rows else "two rows"
            raise ReportError(f"{what} has two results of seed {seed} ({files}): leave one of them out.")
        by_seed[seed] = place
    seeds = sorted(by_seed, key=str)
    return Average(tuple(float(rows["value"].iloc[by_seed[seed]]) for seed in seeds), tuple(seeds))


def _few(values: pd.Series) -> list[Any]:
    return list(dict.fromkeys(values.map(str)))[:3]


def telling(rows: pd.DataFrame, names: Iterable[str], beside: Sequence[str] = ()) -> list[str]:
    """Return as few of the columns as tell apart, beside those of `beside`, all rows that all the columns tell apart."""
    order = sorted(varying(rows, names), key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    texts = {name: _texts(rows[name]) for name in (*beside, *order)}
    number = lambda names: len(set(zip(*(texts[name] for name in names), strict=True))) if names else 1
    found: list[str] = []
    for name in order:
        if number([*beside, *found, name]) > number([*beside, *found]):
            found.append(name)
    return found


def shown(value: Any) -> str:
    """Return a value of a column for people: small numbers as 1e-4, long text by its beginning."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(shown, value))
    if value is None or value != value:
        return "–"
    if isinstance(value, float):
        small = 0 < abs(value) < 1e-3
        return np.format_float_scientific(value, precision=3, trim="-", exp_digits=1) if small else f"{value:g}"
    text = " ".join(str(value).split())
    return text if len(text) <= 32 else f"{text[:24]}..."


def select(rows: pd.DataFrame, wanted: Mapping[str, Any]) -> pd.DataFrame:
    """Return the rows whose columns have the wanted values, or one of a list of them; None: not known."""
    for name, value in wanted.items():
        if name not in rows:
            return rows.iloc[:0] if value is not None else rows
        found = [known(each) for each in rows[name]]
        fits = {each: _is(each, value) for each in set(found)}
        rows = rows.loc[[fits[each] for each in found]]
    return rows


def _is(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, list) and found != str(wanted):  # a list in a setting stands in the table as its JSON
        return any(_is(found, each) for each in wanted)
    if isinstance(wanted, float) and isinstance(found, (int, float)):
        return math.isclose(found, wanted, rel_tol=1e-6)
    return found == (str(wanted) if isinstance(wanted, list) else wanted)


@dataclass(frozen=True)
class Difference(Average):
    """b - a by seed, with a 95% interval over seeds and problems (None for a single seed)."""

    low: float | None = None
    high: float | None = None


def difference(b: pd.DataFrame, a: pd.DataFrame, what: str, part: str | None = None) -> Difference:
    """Return the mean of b - a, paired by seed.

    Args:
        b, a: rows of one setting each.
        what: it is, for the errors.
        part: `both_extractable` counts the problems where both completions hold an answer, `missing_in_either` the others; in
            points of all problems. None: all of them.

    Raises:
        ReportError: if either side is not one setting, they have different seeds, or were not evaluated alike.
    """
    import pandas as pd

    mine, other = average(b, what), average(a, what)
    if mine.seeds != other.seeds:
        raise ReportError(f"{what} compares the seeds {shown(mine.seeds)} with {shown(other.seeds)}.")
    both = pd.concat([b.dropna(axis=1, how="all"), a.dropna(axis=1, how="all")])
    check_alike(both, what)
    pairs = []
    for seed in mine.seeds:
        pairs.append([select(side, {"seed": seed}).iloc[0] for side in (b, a)])
    have = all(isinstance(side.get("verdicts"), np.ndarray) for pair in pairs for side in pair)
    if not have and part is not None:
        raise ReportError(f"{what} needs every prediction, which these results do not hold.")
    if not have:
        gains = (np.array(mine.values) - np.array(other.values))[:, None]  # [seeds, 1]
    else:
        gains = 100.0 * np.stack([one["verdicts"] - two["verdicts"] for one, two in pairs])  # [seeds, problems]
    if part is not None:
        answered = np.stack([one["answered"] & two["answered"] for one, two in pairs])
        gains = gains * (answered if part == "both_extractable" else ~answered)
    low, high = interval(gains)
    return Difference(tuple(gains.mean(axis=1).tolist()), mine.seeds, low, high)


def check_alike(rows: pd.DataFrame, what: str) -> None:
    """Refuse results of one metric that were not evaluated alike: problems, tokens, turns, template, anything that is known.

    Raises:
        ReportError: naming what differs.
    """
    models = ("evaluation.model", "evaluation.weights", "evaluation.dtype", "evaluation.attn_implementation")
    for _, part in groups(rows, ["benchmark", "metric"]):
        different = varying(part, [name for name in part if is_protocol(name) and name not in models])
        if different:
            name = next((each for each in different if each != "problems"), "problems")
            text = f"`{name.removeprefix('evaluation.')}`: {', '.join(shown(each) for each in _few(part[name]))}"
            raise ReportError(
                f"{what} would compare results on {part['metric'].iloc[0]} that were evaluated differently ({text})."
            )


def interval(gains: np.ndarray) -> tuple[float | None, float | None]:
    """Return the 95% percentile bootstrap interval of the mean of gains [seeds, problems]; Nones for a single seed.

    Seeds and problems are drawn with replacement, each of their own (crossed), in 2,000 draws: the interval is about the mean
    over other seeds and other problems of the same kind. With one number for each seed, only seeds are drawn.
    """
    from scipy import stats

    seeds, problems = gains.shape
    if seeds < 2 or not np.isfinite(gains).all():
        return None, None
    axes = (np.arange(seeds), np.arange(problems))
    means = lambda chosen, of=None: gains[np.ix_(chosen, np.arange(problems) if of is None else of)].mean()
    found = stats.bootstrap(
        axes if problems > 1 else axes[:1], means, vectorized=False, paired=False, n_resamples=DRAWS, method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    return float(found.low), float(found.high)
