"""The sentence about differences that leave out seeds which only one of two methods has."""

from __future__ import annotations

import pandas as pd

from loopdropout_trainer.errors import count
from loopdropout_trainer.reports.comparing import PAIRED_SEEDS


def explain_unpaired(numbers: pd.DataFrame, names: pd.Series | pd.Index) -> list[str]:
    """Return a line about the differences that leave out seeds, as after a failed run, or no line if there are none.

    Args:
        numbers: Table with the columns `NUMBERS`.
        names: Name of each line of the table. Lines of one name that leave out the same seeds share a sentence. It has their
            tasks and depths if it is not true of the others.
    """
    keys = ["name", "num_pairs", "unpaired"]
    named = numbers.assign(name=[*names])[keys]
    named = named[named["num_pairs"].notna()]
    is_unpaired = named["unpaired"].map(bool, na_action="ignore").eq(True)
    sentences = []
    for (name, num_pairs, seeds), own in named[is_unpaired].groupby(keys, sort=False):
        title = f"{name}{_name_places(own.index, named.index[named['name'] == name])}"
        left_out = f"seed {seeds}" if seeds.isdecimal() else f"seeds {seeds}"
        if num_pairs:
            sentences.append(f"{title} over {count(int(num_pairs), 'common seed')}, without {left_out}")
        else:
            sentences.append(f"{title} has none, because no seed is common ({left_out})")
    if not sentences:
        return []
    return [f"{PAIRED_SEEDS}: {'; '.join(sentences)}."]


def _name_places(places: pd.Index, all_places: pd.Index) -> str:
    """Return the tasks and depths of some lines of a method, such as " at K = 2, 4", or "" if they are all of its lines."""
    if len(places) == len(all_places):
        return ""
    tasks = all_places.get_level_values("task")
    texts = []
    for task in places.get_level_values("task").unique():
        own = places[places.get_level_values("task") == task]
        text = f" on {task}" if tasks.nunique() > 1 else ""
        if len(own) < (tasks == task).sum():
            text += f" at K = {', '.join(own.get_level_values('K'))}"
        texts.append(text)
    return " and".join(texts)
