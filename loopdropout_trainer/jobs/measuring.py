"""What the recipe of a run measures: losses of each loop and readout, accuracies, and the base model's held-out loss."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from loopdropout_trainer.jobs.runs import Run
from loopdropout_trainer.results.run_files import BASE_MODEL, is_of_base, write_results, write_run
from loopdropout_trainer.results.training_results import UNITS, describe_held_out_examples, result_columns
from loopdropout_trainer.saving.metadata import describe_system_turn
from loopdropout_trainer.settings.arguments import SFTArguments
from loopdropout_trainer.training.distributed import shards_weights


if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task
    from transformers import Trainer

logger = logging.get_logger(__name__)


def measure(trainer: Trainer, run: Run, tasks: list[Task | Group], references: list[dict[str, str]]) -> None:
    """Measure a trained adapter as the recipe says, and write the results: losses, accuracies, and the base model's loss.

    Args:
        trainer: Trainer with the trained adapter.
        run: Run, whose recipe says what is measured.
        tasks: Tasks to evaluate.
        references: Problems of `diagnose_task` with their solutions.
    """
    import torch

    _diagnose(trainer, run, references)
    # The accuracies come after the adapter's losses, because a sweep chooses as soon as it finds an accuracy, and breaks ties
    # by the loss.
    evaluate_at_depths(trainer, run, tasks)
    if run.script_args.single_loop_accuracy:
        for gates in torch.eye(trainer.num_loops).tolist():
            evaluate(trainer, run, tasks[:1], gates=gates)
    # The base model's loss is ln 2 in DPO by construction, and GRPO has no held-out loss.
    if run.script_args.evaluate_base and isinstance(run.script_args, SFTArguments):
        _measure_base_loss(trainer, run)


def _measure_base_loss(trainer: Trainer, run: Run) -> None:
    """Write the held-out loss of the base model, if the training has measured the loss of its adapter there.

    The same loop of the trainer measures both. It runs here without the callbacks of an evaluation, which would log the
    loss as one of the training.
    """
    has_losses = any("eval_loss" in log for log in trainer.state.log_history)
    if not has_losses or shards_weights(trainer.args):
        return
    batches = trainer.get_eval_dataloader()
    with trainer.model.disable_adapter():
        output = trainer.evaluation_loop(batches, "Base model", prediction_loss_only=True)
    metrics = output.metrics
    trainer.callback_handler.on_predict(trainer.args, trainer.state, trainer.control, metrics)  # ends the bar
    row = {"metric": "eval_loss", "value": metrics["eval_loss"], "unit": UNITS["eval_loss"], "gates": "none"}
    record(trainer, run, [row | describe_held_out_examples(trainer)], task="training")


def _diagnose(trainer: Trainer, run: Run, references: list[dict[str, str]]) -> None:
    """Write the loss of reference solutions and held-out examples with the adapter in one loop, and of each readout."""
    from torch.utils.data import DataLoader

    from loopdropout_trainer.diagnostics import label_batches, readouts, single_loop
    from loopdropout_trainer.evaluation import DEVELOPMENT

    batch_size = trainer.args.per_device_eval_batch_size
    batches_by_task = {}
    if references:
        batches = label_batches(references, trainer.processing_class, batch_size)
        batches_by_task[run.script_args.diagnose_task] = batches
    num_batches = getattr(run.script_args, "single_loop_batches", 0)  # only `sft` has the field
    if num_batches:
        loader = DataLoader(trainer.eval_dataset, batch_size, collate_fn=trainer.data_collator)
        batches_by_task[DEVELOPMENT] = list(islice(loader, num_batches))
    for task, batches in batches_by_task.items():
        results = single_loop(trainer.model, batches) + readouts(trainer.model, batches)
        record(trainer, run, results, task=task)
    if num_batches and trainer.is_world_process_zero():
        # A sweep chooses by these losses only if all of its runs have measured on the same number of batches.
        write_run(trainer.args.output_dir, status="trained", loss_batches=num_batches)


def evaluate_at_depths(trainer: Trainer, run: Run, tasks: list[Task | Group]) -> None:
    """Write the results of all tasks at the trained depth, and of the first one at the other depths of `eval_num_loops`."""
    evaluate(trainer, run, tasks)
    for depth in run.script_args.eval_num_loops or ():
        if depth != trainer.num_loops:
            evaluate(trainer, run, tasks[:1], num_loops=depth)


def evaluate(trainer: Trainer, run: Run, tasks: list[Task | Group], **place: Any) -> None:
    """Write the results of tasks. `place`: `num_loops` or `gates` [K] of the evaluation."""
    from loopdropout_trainer.evaluation import LoopedLM, evaluate_tasks

    if not tasks:
        return
    _hint_at_system_turn(trainer, tasks)
    folder, options = Path(trainer.args.output_dir), run.script_args
    lm = LoopedLM(trainer.model, trainer.processing_class, batch_size=options.benchmark_batch_size, **place)
    results = evaluate_tasks(
        lm,
        tasks,
        limit=options.benchmark_limit,
        cache_dir=folder / "cache",
        output_dir=folder,
        allow_unsafe_code=options.allow_unsafe_code,
    )
    record(trainer, run, results)


def _hint_at_system_turn(trainer: Trainer, tasks: list[Task | Group]) -> None:
    """Log once that tasks ask in a chat without the system turn that all conversations of the training have."""
    from loopdropout_trainer.evaluation import asks_in_chat

    system_turn = describe_system_turn(trainer.saved_facts)
    if system_turn and any(map(asks_in_chat, tasks)) and trainer.is_world_process_zero():
        logger.warning_once(
            f"{system_turn} The benchmarks of a training ask without it. `loopdropout evaluate` with `--system_instruction` "
            "asks with it."
        )


def record(trainer: Trainer, run: Run, rows: Iterable[dict], **facts: Any) -> None:
    """Write results of a trainer's model, with the columns that they share."""
    facts |= result_columns(trainer, run.title)
    of_base = {"method": BASE_MODEL, "seed": None, "step": None, "training": None}
    results = []
    for row in rows:
        result = {**facts, **row}
        if is_of_base(row):
            result |= of_base
        results.append(result)
    if trainer.is_world_process_zero():
        write_results(trainer.args.output_dir, results, facts["step"], facts["training"])
