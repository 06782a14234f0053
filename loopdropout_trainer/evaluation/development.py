"""Checks of the task `development`, the held-out examples of a training."""

from __future__ import annotations

from collections.abc import Sequence

from loopdropout_trainer.data.preparations import SCORED_LIKE
from loopdropout_trainer.errors import UserError, count
from loopdropout_trainer.results.run_files import DEVELOPMENT


def check_development(preparation: str | None, num_held_out: int | None) -> None:
    """Raise UserError if held-out examples cannot be a task. `num_held_out`: None if their number is not known yet."""
    if preparation in SCORED_LIKE and num_held_out != 0:
        return
    got = "examples" if num_held_out is None else count(num_held_out, "example")
    origin = f"of {preparation}" if preparation else "without a preparation"
    raise UserError(
        f"The task `{DEVELOPMENT}` must have held-out examples (`num_eval_examples`) of the preparation "
        f"{', '.join(SCORED_LIKE)}, got {got} {origin}. With your own data, name an own benchmark. The field `select_on` of a "
        "sweep can also be `eval_loss`."
    )


def check_no_development(names: Sequence[str]) -> None:
    """Raise UserError if one of some tasks is the held-out examples of a training, which an evaluation does not have."""
    if DEVELOPMENT not in names:
        return
    others = " ".join(name for name in names if name != DEVELOPMENT)
    raise UserError(
        f"`benchmarks` must not have `{DEVELOPMENT}`, the held-out examples of a training, which only a training measures. "
        "The recipe of a run that only chose a learning rate names no other task. Add "
        f"`--benchmarks {others or 'TASK'}`."
    )
