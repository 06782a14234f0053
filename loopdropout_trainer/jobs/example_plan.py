"""The lines of a plan about loaded examples: their numbers, losses and tokens, and the steps and epochs that follow."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import TYPE_CHECKING

from loopdropout_trainer.costs.trainings import (
    Training,
    count_epochs,
    count_step_rows,
    count_steps,
    describe_costs,
    name_epochs,
    name_trainings,
)
from loopdropout_trainer.data import DataArguments, LeftOut, LoadedExamples
from loopdropout_trainer.data.repeats import describe_repeats
from loopdropout_trainer.data.sources import describe_other_share, differ_in_text
from loopdropout_trainer.errors import count
from loopdropout_trainer.jobs.plan import describe_settings
from loopdropout_trainer.terminal import titled


if TYPE_CHECKING:
    from loopdropout_trainer.training.config import GateConfig


def list_examples(loaded: LoadedExamples, num_rows: int, data: DataArguments, args: GateConfig) -> list[str]:
    """Return the lines about the examples that are trained on, the optimizer steps and the epochs.

    If fewer examples are held out than the recipe asks for, the rest was too long, and the line says so. A mixture has a
    line for each data set, with the numbers of its examples that are trained on and held out, and with its share if it
    differs from the share of the recipe.
    """
    num_examples, num_held_out = len(loaded.datasets["train"]), len(loaded.datasets.get("eval") or ())
    held_out = f"{num_held_out:,} held out"
    if num_held_out < data.num_held_out:
        held_out += (
            f" of the {data.num_held_out:,} asked for, because the others have more than {args.max_length:,} tokens"
        )
    about, packed = "", ""
    if _is_packed(loaded, args):
        if not _has_exact_packing(num_examples, args):
            about = "about "
        packed = f" in {about}{count(num_rows, 'packed row')}"
    steps = count(count_steps(args, num_rows), "optimizer step")
    epochs = name_epochs(float(f"{count_epochs(args, num_rows):.3g}"))  # of three digits
    length = f"{about}{steps}, {epochs}"
    if args.max_steps > 0:  # then the epochs depend on the number of rows
        length = f"{steps}, {about}{epochs}"
    lines = [f"{num_examples:,}{packed}, {held_out}, {length}"]
    lines += _describe_small_step(args, num_rows)
    if num_examples < num_held_out and not data.eval_files:
        lines.append("more examples are held out than trained on (`num_eval_examples`)")
    if loaded.num_repeats:
        lines.append(describe_repeats(loaded.num_repeats, num_examples))
    for source, trained_share in zip(loaded.sources, loaded.trained_shares, strict=True):
        line = f"{source.num_train:,} of the {source.size:,} examples of {source.title}"
        if source.share is not None and differ_in_text(source.share, trained_share):
            line += f" ({describe_other_share(source.share, trained_share)})"
        if data.num_held_out:
            line += f", {source.num_held_out:,} held out"
        lines.append(f"{line}, loss on {source.loss}" if source.loss else line)
    return lines + _describe_held_out_loss(loaded)


def _describe_small_step(args: GateConfig, num_rows: int) -> list[str]:
    """Return the line about an optimizer step that has all rows of the data, and fewer than asked for."""
    step_rows = count_step_rows(args, num_rows)
    if step_rows == args.examples_per_step:
        return []
    return [f"a step has {step_rows:,} of the {args.examples_per_step:,} asked for, because the data have no more"]


def _describe_held_out_loss(loaded: LoadedExamples) -> list[str]:
    """Return the lines about the losses of a training whose `eval_files` have another format, which do not compare."""
    lines = []
    if loaded.train_loss:
        lines.append(f"training: loss on {loaded.train_loss}")
    if loaded.held_out_loss:
        lines.append(f"`eval_files`: loss on {loaded.held_out_loss}")
    return lines


def _is_packed(loaded: LoadedExamples, args: GateConfig) -> bool:
    """Return whether a training packs examples into rows, whose number is known from the lengths of the examples."""
    return getattr(args, "packing", False) and loaded.lengths is not None


def _has_exact_packing(num_examples: int, args: GateConfig) -> bool:
    """Return whether `count_packed_rows` packs the same examples together as TRL.

    TRL packs other ones together if it divides the examples between processes, or shuffles more than one group of them.
    """
    if (args.dataset_num_proc or 1) > 1:
        return False
    return num_examples <= _PACKED_TOGETHER or not args.shuffle_dataset


_PACKED_TOGETHER = 1000
"""Number of examples that TRL packs together, which is the default number of rows of a batch in `Dataset.map`."""


def count_packed_rows(lengths: Sequence[int], row_length: int) -> int:
    """Return the number of rows into which TRL packs examples with these lengths (the strategy `bfd`).

    The longest example comes first. Each one goes into the row with the least space that is enough for it.
    """
    num_rows = 0
    for start in range(0, len(lengths), _PACKED_TOGETHER):
        spaces: list[int] = []  # left in each row, sorted
        for length in sorted(lengths[start : start + _PACKED_TOGETHER], reverse=True):
            place = bisect_left(spaces, length)
            if place < len(spaces):
                space = spaces.pop(place)
            else:
                space = row_length
                num_rows += 1
            insort(spaces, space - length)
    return num_rows


def describe_loaded(
    loaded: LoadedExamples,
    left_out: Sequence[LeftOut],
    data: DataArguments,
    args: GateConfig,
    trainings: Sequence[Training],
) -> dict[str, str]:
    """Return the texts of a training's plan that are known after its data are loaded, or exact then, by their titles.

    Args:
        loaded: Examples of all trainings.
        left_out: Examples that are left out.
        data: Source of the examples.
        args: Settings of the first training.
        trainings: The trainings of the job.
    """
    num_rows = count_rows(loaded, args)  # the same for all trainings, of which only the rules differ
    counted = [add_counts(training, loaded, num_rows) for training in trainings]
    costs = describe_costs([(training, 1) for training in counted], name_trainings(len(counted)))
    return {
        "training": describe_settings(args, trainings[0].recipe.get("num_train_examples"), num_rows),
        "examples": "\n".join(list_examples(loaded, num_rows, data, args)),
        "left out": "\n".join(map(str, left_out)),
        **costs,
    }


def add_counts(training: Training, loaded: LoadedExamples, num_rows: int) -> Training:
    """Return a training with the numbers of its rows (`count_rows`) and tokens, which its loaded examples tell."""
    return training._replace(num_rows=num_rows, num_tokens=count_tokens(loaded, num_rows, training))


def count_tokens(loaded: LoadedExamples, num_rows: int, training: Training) -> int | None:
    """Return about how many tokens a training takes, or None if they were not counted or are not read once in an epoch."""
    if loaded.lengths is None or not training.is_supervised:
        return None
    return round(count_epochs(training.args, num_rows) * loaded.lengths.sum())


def count_rows(loaded: LoadedExamples, args: GateConfig) -> int:
    """Return the number of rows of a training: of its examples, or those that they are packed into."""
    if _is_packed(loaded, args):
        return count_packed_rows(loaded.lengths.tolist(), args.max_length)
    return len(loaded.datasets["train"])


def describe_left_out(left_out: Sequence[LeftOut]) -> list[str]:
    """Return the lines about examples that are left out, each with its number and the reason."""
    return [titled("left out", map(str, left_out))] if left_out else []
