"""`LoopDropoutDPOTrainer`: TRL's `DPOTrainer` with a gate on every application of the adapter."""

from __future__ import annotations

import math

from datasets import Dataset
from datasets.fingerprint import Hasher
from torch import Tensor
from transformers.utils import logging
from trl import DPOTrainer

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.gates.streams import ExampleId
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.training.checkpoints import CheckpointsMixin
from loopdropout_trainer.training.config import LoopDropoutDPOConfig
from loopdropout_trainer.training.distributed import EqualShares, EvaluationLossMixin, deal_by
from loopdropout_trainer.training.gate_sampling import GateSamplingMixin


logger = logging.get_logger(__name__)


class LoopDropoutDPOTrainer(CheckpointsMixin, GateSamplingMixin, EvaluationLossMixin, DPOTrainer):
    """Preference tuning of a looped language model with a gate on every application of its LoRA adapter.

    Takes what `DPOTrainer` takes. The chosen and the rejected completion of a pair share their gates, so that their rewards
    are those of one and the same thinned model. The reference is never gated: the base model (adapter off), the frozen copy
    of a pretrained adapter at unit gates, or a reference model of its own.

    Args:
        args: `LoopDropoutDPOConfig`; a plain `DPOConfig` gets the paper's default rule.
        others: as for `LoopDropoutSFTTrainer`, which raises the same errors; or under `DPOTrainer`'s names or in its order.
    """

    _tag_names = ["trl", "dpo", "loop-dropout"]
    args_class = LoopDropoutDPOConfig

    @property
    def redraws_states(self) -> bool:
        """Whether policy and reference run side by side; else a random start state is evaluation's for both of them."""
        return not self.precompute_ref_logps and self.ref_model is None

    def compute_ref_log_probs(self, model, inputs):
        return super().compute_ref_log_probs(model, self.looped.complete_batch(inputs))

    def _prepare_dataset(self, dataset, processing_class, args, dataset_name):
        rows = super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        if isinstance(rows, Dataset) and args.max_length is not None:
            _warn_of_cut_pairs(dataset, rows, dataset_name, args.max_length)
            if not len(rows):
                raise UserError(
                    f"No pair of `{dataset_name}_dataset` is left: raise `max_length`, {args.max_length:,}."
                )
        return rows

    def _precompute_ref_logps(self, dataset, name, batch_size):
        if not isinstance(self._precompute_model_hash, tuple):
            # TRL caches the reference by its weights, and a looped model has more that it depends on: depth, start state.
            reference = find_looped_model(self.ref_model or self.model)
            self._precompute_model_hash = (self._precompute_model_hash, Hasher.hash(reference.config.to_dict()))
        return super()._precompute_ref_logps(dataset, name, batch_size)

    def get_eval_dataloader(self, eval_dataset=None):
        loader = super().get_eval_dataloader(eval_dataset)
        deal_by(EqualShares, loader)
        return loader

    def evaluation_loop(self, dataloader, *args, **kwargs):
        self._rows_of_its_own = getattr(getattr(dataloader, "batch_sampler", None), "share", math.inf)
        return super().evaluation_loop(dataloader, *args, **kwargs)

    def evaluated_weight(self, inputs: dict[str, Tensor]) -> int:
        pairs = len(inputs["input_ids"]) // 2
        self._rows_of_its_own -= pairs
        return pairs if self._rows_of_its_own >= 0 or self.accelerator.is_main_process else 0

    @staticmethod
    def dataset_formats(args: LoopDropoutDPOConfig) -> list[set[str]]:
        return [{"chosen", "rejected"}, {"prompt_ids", "chosen_ids", "rejected_ids"}]

    def example_ids_of(self, inputs: dict[str, Tensor]) -> list[ExampleId]:
        """Return the ids of N chosen and then N rejected completions: those of their pairs."""
        pairs = len(inputs["input_ids"]) // 2
        return [(pair, 0) for pair in range(pairs)] * 2


def _warn_of_cut_pairs(before: Dataset, rows: Dataset, name: str, max_length: int) -> None:
    """Say how many pairs TRL will cut at `max_length`, and how many it has left out of the dataset as it was `before`."""
    parts = ("prompt_ids", "chosen_ids", "rejected_ids")
    lengths = [[len(ids) for ids in rows[part]] for part in parts]
    triples = zip(*lengths, strict=True)
    cut = sum(prompt + max(chosen, rejected) > max_length for prompt, chosen, rejected in triples)
    gone = len(before) - len(rows)
    if cut or gone:
        logger.warning(
            f"Of {len(before):,} pairs of `{name}_dataset`, {cut:,} are longer than `max_length`, {max_length:,}, and are "
            f"cut, so that a completion loses its end; {gone:,} are left out, as their prompt alone fills it."
        )
