"""The checkpoints of a training: which there are, which of them a training can continue from, and which are deleted."""

from __future__ import annotations

import logging
import math
import os
import shutil
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from loopdropout_trainer.errors import UserError, count, short_repr
from loopdropout_trainer.files import checkpoint_step, is_checkpoint, read_json_object
from loopdropout_trainer.results.training_results import as_trained
from loopdropout_trainer.saving.integrity import find_damage


if TYPE_CHECKING:
    from transformers import TrainerState, TrainingArguments

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
"""Name of the state of a training, which transformers writes last."""

EARLY_STOPPING = "EarlyStopCallback"
"""Name of the callback that stops a training early, under which a checkpoint has its state."""

RESUMPTION = "ResumptionCallback"
"""Name of the callback under which a checkpoint has the facts of its training."""

_RESUMED = ("**/*.safetensors", "optimizer*", "scheduler.pt", "rng_state*")
"""Files of a checkpoint that a training continues from."""


class Checkpoint(str):
    """Folder of a checkpoint that a training can continue from, which is therefore not examined again."""


def load_state(folder: str | Path) -> TrainerState:
    """Return the state of a training, or of its checkpoint."""
    from transformers import TrainerState

    return TrainerState.load_from_json(str(Path(folder, STATE_FILE)))


def count_worse_evaluations(state: TrainerState) -> int:
    """Return the number of evaluations in a row without a better result, at the state of a training with early stopping.

    It is the state of a checkpoint, or the state that a training begins with if it continues from one.
    """
    saved = state.stateful_callbacks.get(EARLY_STOPPING)
    if not state.global_step or not isinstance(saved, dict):
        return 0
    return saved["attributes"]["early_stopping_patience_counter"]


def has_stopped_early(state: TrainerState, patience: int | None) -> bool:
    """Return whether a training stopped at the state of its checkpoint, by its `early_stopping_patience`.

    The state of a checkpoint does not say if the training has ended there. `find_early_stop` tells it of one that has.
    """
    return patience is not None and count_worse_evaluations(state) >= patience


def find_changed_choice(state: TrainerState, args: TrainingArguments) -> str | None:
    """Return the field by which a continued training chooses its best checkpoint by another metric than before, or None.

    Args:
        state: State of the checkpoint that it continues from.
        args: Settings of the training that continues.
    """
    saved = state.stateful_callbacks.get(RESUMPTION)
    before = saved["attributes"].get("settings") if isinstance(saved, dict) else None
    if not before:  # of another program
        return None
    for name in ("metric_for_best_model", "greater_is_better"):
        if name in before and before[name] != getattr(args, name):
            if before.get("load_best_model_at_end") == args.load_best_model_at_end:
                return name
            return "load_best_model_at_end" if args.early_stopping_patience is None else "early_stopping_patience"
    return None


def find_early_stop(state: TrainerState) -> int | None:
    """Return the step after which a training that has ended has stopped early, or None if it took all of its steps.

    It counts the steps, because callbacks of the user can stop a training, too.
    """
    return state.global_step if state.global_step < state.max_steps else None


def describe_steps(state: TrainerState) -> str:
    """Return the number of steps of a training that has ended, such as "30 of 100 steps, stopped early"."""
    if find_early_stop(state) is None:
        return count(state.global_step, "step")
    return f"{state.global_step:,} of {count(state.max_steps, 'step')}, stopped early"


def find_next_patience(folder: str | Path, patience: int) -> int | None:
    """Return an `early_stopping_patience` with which a training that stopped early continues from its newest checkpoint.

    It is None if no checkpoint can be continued from. `patience`: the patience of the training.
    """
    newest = newest_checkpoint(folder)
    if newest is None:
        return None
    return 2 * max(patience, count_worse_evaluations(load_state(newest)))


def describe_lost_steps(folder: str | Path, last_step: int) -> str:
    """Return the end of an advice to continue a training if its newest checkpoint is older than its last step, or "".

    With `save_total_limit: 1`, transformers keeps the best checkpoint alone at the end.
    """
    newest = newest_checkpoint(folder)
    if newest is None:
        return ""
    step = load_state(newest).global_step
    if step >= last_step:
        return ""
    return f", from step {step:,}, whose checkpoint is the newest one that was kept"


def name_metric(metric: str | None) -> str:
    """Return the name of `metric_for_best_model` in sentences."""
    metric = metric or "loss"
    return "held-out loss" if metric.removeprefix("eval_") == "loss" else metric


def describe_score(state: TrainerState, step: int, metric: str | None) -> str:
    """Return the score of an evaluated step, such as " (held-out loss 1.062)", or "" for a step that was not evaluated.

    Args:
        state: State of the training.
        step: Optimizer step.
        metric: The field `metric_for_best_model`.
    """
    key = f"eval_{(metric or 'loss').removeprefix('eval_')}"
    history = as_trained(state.log_history)
    scores = [log[key] for log in history if log["step"] == step and key in log]
    return f" ({name_metric(metric)} {scores[-1]:.4g})" if scores else ""


def describe_unsaved_best(state: TrainerState, metric: str | None) -> str:
    """Return a sentence about the best evaluated step of a training if no checkpoint was saved there, else "".

    transformers then keeps the best one of the saved steps, or the last weights, and does not say so.
    """
    best, kept = state.best_global_step, state.best_model_checkpoint
    if best is None or (kept is not None and checkpoint_step(kept) == best):
        return ""
    return f"The best step {best:,}{describe_score(state, best, metric)} was not saved"


def read_history(folder: str | Path) -> list[dict[str, Any]]:
    """Return the logged values of the training in a folder by step, or an empty list if it has left no readable state.

    Values of evaluations at another depth or under other gates are left out.
    A training that has not ended has left them in its newest checkpoint.
    """
    place = Path(folder)
    if not (place / STATE_FILE).is_file():
        place = newest_checkpoint(folder) or place
    try:
        history = read_json_object(Path(place, STATE_FILE)).get("log_history", [])
    except (OSError, ValueError):
        return []
    logs = [log for log in history if isinstance(log, dict) and isinstance(log.get("step"), int)]
    return as_trained(logs)


def list_checkpoints(output_dir: str | Path) -> list[Path]:
    """Return the folders of all checkpoints of a run, complete or not, from the oldest to the newest.

    A training that began anew in the folder has newer checkpoints than the trainings before it, also of earlier steps.
    """
    folders = [path for path in Path(output_dir).glob("*") if is_checkpoint(path) and path.is_dir()]
    return sorted(folders, key=lambda folder: (_training_number(folder), checkpoint_step(folder)))


def _training_number(checkpoint: str | Path) -> int:
    """Return the number of the training of a checkpoint, as it is saved, or 0 if it is not known.

    The trainings in a folder are numbered in the order in which they began, because the clock may have gone back.
    """
    value = _read_state(checkpoint)
    for name in ("stateful_callbacks", RESUMPTION, "attributes", "training_number"):
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, int) else 0


def _read_state(checkpoint: str | Path) -> dict[str, Any] | None:
    """Return the fields of a checkpoint's state, or None if it cannot be read."""
    try:
        return read_json_object(Path(checkpoint, STATE_FILE))
    except (OSError, ValueError):
        return None


def number_training(output_dir: str | Path, checkpoint: str | Path | None) -> int:
    """Return the number of a training that begins in a folder, or continues from a checkpoint.

    A training has the number of its checkpoint only if that is the newest one in the folder. Otherwise the checkpoints of
    later steps there belong to another training.

    Args:
        output_dir: Folder of the training.
        checkpoint: Checkpoint that it continues from, or None.
    """
    others = list_checkpoints(output_dir)
    if not others:
        return 1
    newest = _training_number(others[-1])
    is_newest = checkpoint is not None and others[-1].resolve() == Path(checkpoint).resolve()
    return newest if is_newest else newest + 1


def complete_checkpoints(output_dir: str | Path) -> Iterator[Checkpoint]:
    """Yield the checkpoints in a folder that a training can continue from, the newest first. The others are logged."""
    folders = list_checkpoints(output_dir)
    # The training of a checkpoint without a readable state is not known, as when its program was killed while it saved. It
    # may be the newest one, so it is logged before the others.
    folders.sort(key=lambda folder: _read_state(folder) is None)
    for folder in reversed(folders):
        fault = find_fault(folder)
        if fault is None:
            yield Checkpoint(folder)
        else:
            warn_once(f"The checkpoint {folder} is not used, because it {fault}.")


def newest_checkpoint(output_dir: str | Path) -> Checkpoint | None:
    """Return the newest checkpoint in a folder that a training can continue from, or None. The others are logged."""
    return next(complete_checkpoints(output_dir), None)


def asks_for_newest(name: str | bool | None) -> bool:
    """Return whether `resume_from_checkpoint` asks for the newest checkpoint, by `True` or by "true" in a recipe."""
    # A `Checkpoint` was found before, so it names one folder, also if that folder is called "true".
    return not isinstance(name, Checkpoint) and str(name).lower() == "true"


def find_checkpoint(name: str | bool | None, output_dir: str | Path) -> Checkpoint | None:
    """Return the checkpoint that `resume_from_checkpoint` names, or None. `true` is the newest complete one in `output_dir`.

    Raises:
        UserError: If a training cannot continue from the named checkpoint.
    """
    if isinstance(name, Checkpoint):
        return name
    if not name:
        return None
    if asks_for_newest(name):
        return newest_checkpoint(output_dir)
    if not isinstance(name, str | os.PathLike):  # such as the number of a step
        raise UserError(
            f"`resume_from_checkpoint` must be true or the folder of a checkpoint, got {short_repr(name)}."
        )
    fault = find_fault(Path(name))
    if fault is None:
        return Checkpoint(name)
    run = Path(name).parent
    if list_checkpoints(name):
        fault, run = "is the folder of a run", Path(name)
    newest = newest_checkpoint(run)
    hint = f" The newest complete checkpoint is {newest}." if newest else ""
    raise UserError(
        f"`resume_from_checkpoint` must be true or the folder of a complete checkpoint, but {name} {fault}.{hint}"
    )


def find_shortening(checkpoint: Checkpoint, args: TrainingArguments) -> str | None:
    """Return the message about a training that would end before the step of its checkpoint, or None.

    transformers would take no step, and the run would be saved as if it had the shorter length. Neither can a training that
    ends at the step of its checkpoint choose a best one by a metric that it did not have before.

    Args:
        checkpoint: Checkpoint to continue from.
        args: Settings of the training that continues.
    """
    state = load_state(checkpoint)
    step, num_steps = state.global_step, args.max_steps
    wanted, got = f"`max_steps` must be at least {step:,}", f"{num_steps:,}"
    if num_steps <= 0:
        if not state.epoch:
            return None
        # An epoch may end with a step of fewer micro-batches, so the quotient is less than one step too small.
        steps_per_epoch = math.ceil(step / state.epoch - 1e-6)
        num_steps = math.ceil(args.num_train_epochs * steps_per_epoch)
        wanted = f"`num_train_epochs` must be at least {step / steps_per_epoch:.4g}"
        got = f"{args.num_train_epochs:g}, which ends at step {num_steps:,}"
    has_ended = num_steps == step or has_stopped_early(state, args.early_stopping_patience)
    field = find_changed_choice(state, args)
    if has_ended and field is not None and args.metric_for_best_model is not None:
        return (
            f"`{field}` changed, and chooses the best checkpoint among the steps after {checkpoint}, but the training ends "
            "there. Train longer, or restore the field."
        )
    if num_steps >= step:
        return None
    return (
        f"{wanted}, because the checkpoint {checkpoint} is at step {step:,}, got {got}. Train longer, or set another "
        "`output_dir` for a shorter training."
    )


def find_fault(checkpoint: Path) -> str | None:
    """Return why a training cannot continue from a checkpoint, as the end of a sentence about it, or None."""
    return find_broken_save(checkpoint) or _find_missing(checkpoint)


def find_broken_save(checkpoint: Path) -> str | None:
    """Return why a checkpoint has not all that was saved there, as the end of a sentence about it, or None.

    Unlike `find_fault`, it accepts a checkpoint that was saved without the state of the optimizer.
    """
    damage = find_damage(checkpoint)
    if damage is None and _read_state(checkpoint) is None:
        return f"has no readable {STATE_FILE}"
    return damage


def _find_missing(checkpoint: Path) -> str | None:
    """Return the fault of a checkpoint by the names and headers of its files, which also tell about other programs' ones."""
    patterns = _RESUMED
    if any(checkpoint.glob("global_step*")):  # of DeepSpeed
        patterns = ("**/*.safetensors", "rng_state*")
    for pattern in patterns:
        files = [*checkpoint.glob(pattern)]
        if not files:
            return f"has no `{pattern.removeprefix('**/')}`, as with `save_only_model`"
        for file in files:
            if not _has_header(file):
                return f"has a damaged {file.name}"
    return None


def _has_header(file: Path) -> bool:
    """Return whether the header of a file of tensors can be read."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, "np"):
                return True
        return not file.is_file() or zipfile.is_zipfile(file)
    except (OSError, SafetensorError):
        return False


def delete_older_checkpoints(newest: str | Path, limit: int | None, best: str | Path | None = None) -> None:
    """Delete checkpoints until `limit` are left, but never the newest and the best one.

    Their steps decide and not the clock, which may have gone back.

    Args:
        newest: Checkpoint that was just saved. It is kept.
        limit: `save_total_limit`.
        best: Best checkpoint, which is kept, too.
    """
    if not limit or limit < 1:
        return
    newest = Path(newest)
    kept = {path.resolve() for path in (newest, Path(best or newest))}
    others = [path for path in list_checkpoints(newest.parent) if path.resolve() not in kept]
    # A checkpoint of a later step is left from a former training in this folder, which the present one replaces. These are
    # deleted first: False sorts before True.
    others.sort(key=lambda path: checkpoint_step(path) < checkpoint_step(newest))
    surplus = len(others) + len(kept) - max(limit, len(kept))
    for path in others[: max(surplus, 0)]:
        shutil.rmtree(path, ignore_errors=True)


@cache
def warn_once(message: str) -> None:
    logger.warning(message)
