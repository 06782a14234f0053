"""Preference tuning with Loop Dropout: TRL's `DPOTrainer` with gates on the policy and none on the reference."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Sized
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from trl import DPOTrainer

from loopdropout_trainer.data.formats import PREFERENCES
from loopdropout_trainer.errors import UserError, count_rows
from loopdropout_trainer.looped import attach_looped_model
from loopdropout_trainer.training.config import LoopDropoutDPOConfig
from loopdropout_trainer.training.example_counts import warn_of_cut_pairs
from loopdropout_trainer.training.examples import name_datasets
from loopdropout_trainer.training.reference import ReferenceMixin, check_reference, find_reference_fix
from loopdropout_trainer.training.setup import with_gates
from loopdropout_trainer.training.sft import GateSamplingMixin


class LoopDropoutDPOTrainer(ReferenceMixin, GateSamplingMixin, DPOTrainer):
    """Trainer for preference tuning of a looped language model with Loop Dropout.

    The chosen and the rejected completion of a pair share their gates, so that one thinned model scores both. The reference
    keeps unit gates: the base model, the frozen copy "ref" of a pretrained adapter, or `ref_model`. It takes the arguments of
    [`~trl.DPOTrainer`] in the same order, and `peft_config` defaults to the paper's adapter. A [`~trl.DPOConfig`] as `args`
    keeps its values and gets the fields of the method, with p = 0.5.
    """

    config_class = LoopDropoutDPOConfig
    objective = "DPO"
    if not TYPE_CHECKING:  # type checkers see the same signature in DPOTrainer
        __init__ = with_gates(DPOTrainer.__init__)

    def formats(self, args: LoopDropoutDPOConfig) -> Collection[Sequence[str]]:
        return PREFERENCES

    def _before_init(self, arguments: dict[str, Any]) -> None:
        super()._before_init(arguments)
        arguments["args"].check_reference_cache()  # the field may have changed since the configuration was made
        if arguments["ref_model"] is None:
            check_reference(arguments["model"], find_reference_fix(arguments["args"]))

    def _after_init(self) -> None:
        super()._after_init()
        for title, dataset in name_datasets(vars(self)):
            if isinstance(dataset, Sized) and len(dataset) == 0:
                raise UserError(
                    f"`max_length` must be larger, because TRL leaves out all examples of {title}, got {self.args.max_length}."
                )
        if self.ref_model is not None:
            attach_looped_model(self.ref_model).prepare_fused_loss()
        # A separate reference model starts from evaluation's state, so the policy does, too.
        self._samples_start_states = self.ref_model is None

    def _prepare_dataset(self, dataset, processing_class, args, dataset_name):
        """Prepare pairs as TRL does, and log which ones are cut or left out, of which TRL says nothing."""
        prepared = super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        if isinstance(prepared, Dataset) and args.max_length is not None:
            warn_of_cut_pairs(dataset, prepared, args, dataset_name)
        return prepared

    def _prepare_rows(self, dataset, name, keeps_order):
        return self._prepare_dataset(dataset, self.processing_class, self.args, name)

    def example_ids(self, inputs: dict[str, Any]) -> tuple[list[tuple[int, int]], None]:
        """Return the ids of N chosen and N rejected completions, which share the ids of their pairs."""
        return [(pair, 0) for pair in range(count_rows(inputs, "input_ids") // 2)] * 2, None
