"""Checks of the settings of a job, before it makes its runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from loopdropout_trainer.costs.published import PUBLISHED_TASKS
from loopdropout_trainer.data.arguments import count_held_out, has_held_out
from loopdropout_trainer.data.files import check_files
from loopdropout_trainer.data.preparations import SCORED_LIKE
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.gates import RULES, LoopDropout
from loopdropout_trainer.results.run_files import DEVELOPMENT
from loopdropout_trainer.saving.pushing import check_repository
from loopdropout_trainer.settings.arguments import ScriptArguments
from loopdropout_trainer.training.argument_checks import check_trackers
from loopdropout_trainer.training.distributed import check_devices
from loopdropout_trainer.training.unused_fields import warn_of_unused_pushes


if TYPE_CHECKING:
    from loopdropout_trainer.data import DataArguments
    from loopdropout_trainer.training.config import GateConfig


def check_settings(script: ScriptArguments, data: DataArguments, training: GateConfig) -> None:
    """Raise UserError for settings that no training can have, for missing libraries or devices, and for missing files."""
    _check_pushes(script, training)
    template = getattr(training, "chat_template_path", None)  # of SFT in Python
    if template is not None:
        raise UserError(f"`chat_template` must be set instead of `chat_template_path`, got {template!r}.")
    check_trackers(training.report_to)
    check_devices(training)
    check_files(data.files)


def _check_pushes(script: ScriptArguments, training: GateConfig) -> None:
    """Raise UserError for a name that the Hub refuses, or a merged model without a repository of its own."""
    warn_of_unused_pushes(training, pushes_merged=script.push_merged_to_hub)
    if script.push_merged_to_hub or training.push_to_hub:
        check_repository(training.hub_model_id)
    if not script.push_merged_to_hub:
        return
    if not training.hub_model_id:
        raise UserError("`hub_model_id` must be set if `push_merged_to_hub` is set.")
    if training.push_to_hub:
        raise UserError(
            "Set either `push_to_hub` or `push_merged_to_hub`, not both, because both push to `hub_model_id`. Push the "
            "merged model to another repository by `loopdropout merge`."
        )


def check_measurements(options: ScriptArguments, recipe: Mapping[str, Any]) -> None:
    """Raise UserError for settings that the measurements after a training would refuse, without loading problems.

    A plan and the start of a training or a sweep check them, so that a mistyped name does not cost the trainings before.

    Args:
        options: Steps after the training.
        recipe: Recipe of the training.
    """
    _check_tasks(options, recipe)
    uses_all_depths = options.merge or options.eval_num_loops
    rule = recipe.get("rule", LoopDropout.name)
    if uses_all_depths and not RULES[rule].mergeable:
        raise UserError(
            f"`merge` and `eval_num_loops` must not be set for {rule!r}, whose update differs between loops."
        )
    if getattr(options, "single_loop_batches", 0) and not has_held_out(recipe):  # only `sft` has the field
        raise UserError("`num_eval_examples` must be at least 1 if `single_loop_batches` is set.")


def _check_tasks(options: ScriptArguments, recipe: Mapping[str, Any]) -> None:
    """Raise UserError for a task that does not exist or cannot be made."""
    names = [*(options.benchmarks or ())]
    diagnosed = getattr(options, "diagnose_task", None)  # only `sft` has the field
    if diagnosed:
        names.append(diagnosed)
    own_benchmarks, preparation = options.own_benchmarks or {}, recipe.get("preparation")
    num_held_out = None if recipe.get("eval_files") else count_held_out(recipe)
    has_development = preparation in SCORED_LIKE and num_held_out != 0
    unsure = []  # apart from them, lm-eval, which takes seconds to import, stays out of a plan
    for name in names:
        if name == DEVELOPMENT and has_development:
            continue
        is_known = name in PUBLISHED_TASKS and not PUBLISHED_TASKS[name].runs_programs
        if name in own_benchmarks or not is_known:
            unsure.append(name)
    if unsure:
        from loopdropout_trainer.evaluation.loading import check_benchmarks

        check_benchmarks(unsure, own_benchmarks, preparation, num_held_out, options.allow_unsafe_code)
    revisions = options.benchmark_revisions or {}
    if not revisions.keys() <= PUBLISHED_TASKS.keys():
        from loopdropout_trainer.evaluation.loading import check_revisions

        check_revisions(revisions, names)


def check_scored_loops(options: ScriptArguments, datasets: Mapping[str, Any]) -> None:
    """Raise UserError if losses of each loop are asked for after the training, but no held-out example is short enough."""
    number = getattr(options, "single_loop_batches", 0)  # only `sft` has the field
    if number and "eval" not in datasets:
        raise UserError(
            f"`single_loop_batches` must be 0, got {number}, because all held-out examples are longer than `max_length`. "
            "Raise `max_length`, or hold out shorter examples."
        )
