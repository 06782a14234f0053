"""Checks of the settings of a job, before it makes its runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopdropout_trainer.data.files import check_files
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.saving.pushing import check_repository
from loopdropout_trainer.settings.arguments import ScriptArguments
from loopdropout_trainer.training.argument_checks import check_trackers
from loopdropout_trainer.training.distributed import check_devices


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
