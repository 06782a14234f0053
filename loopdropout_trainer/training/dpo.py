"""Preference tuning with Loop Dropout: TRL's `DPOTrainer` with gates on the policy and none on the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from peft import PeftConfig, PeftModel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    BitsAndBytesConfig,
    DataCollator,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerCallback,
)
from trl import DPOConfig, DPOTrainer

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.files import model_path
from loopdropout_trainer.looped import attach_looped_model
from loopdropout_trainer.training.config import LoopDropoutDPOConfig
from loopdropout_trainer.training.sft import GateSamplingMixin


class LoopDropoutDPOTrainer(GateSamplingMixin, DPOTrainer):
    """Trainer for preference tuning of a looped language model with Loop Dropout.

    The chosen and the rejected completion of a pair share their gates, so that one thinned model scores both. The reference
    keeps unit gates: the base model, the frozen copy "ref" of a pretrained adapter, or `ref_model`. It takes the arguments of
    [`~trl.DPOTrainer`] in the same order, and `peft_config` defaults to the paper's adapter.
    """

    without_reference = "Set `ref_model`"

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        ref_model: PreTrainedModel | None = None,
        args: DPOConfig | None = None,
        data_collator: DataCollator | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset
        | IterableDataset
        | DatasetDict
        | IterableDatasetDict
        | dict[str, Dataset | IterableDataset]
        | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        compute_metrics: Callable[[EvalPrediction], dict] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Optimizer | None, LambdaLR | None] = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | None = None,
    ) -> None:
        args = LoopDropoutDPOConfig.from_trl(args, model)
        model = model_path(model)
        if args.precompute_ref_log_probs:
            raise UserError(
                "`precompute_ref_log_probs` must be False, because TRL's cache does not depend on `num_loops`."
            )
        if ref_model is None:
            self.check_reference(model)
        peft_config = self.before_init(model, args, peft_config)
        super().__init__(
            model=model,
            ref_model=ref_model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=self.load_tokenizer(model, args, processing_class),
            compute_metrics=compute_metrics,
            callbacks=[*self.first_callbacks, *(callbacks or [])],
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )
        self.after_init()
        if self.ref_model is not None:
            attach_looped_model(self.ref_model).prepare_fused_loss()
        # A separate reference model starts from evaluation's state, so the policy does, too.
        self.samples_start_states = self.ref_model is None

    def example_ids(self, inputs: dict[str, Any]) -> tuple[list[tuple[int, int]], None]:
        """Return the ids of N chosen and N rejected completions, which share the ids of their pairs."""
        return [(pair, 0) for pair in range(len(inputs["input_ids"]) // 2)] * 2, None
