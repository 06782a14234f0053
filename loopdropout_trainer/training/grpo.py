"""Reinforcement learning with Loop Dropout: TRL's `GRPOTrainer` with gates on the policy that is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from peft import PeftConfig, PeftModel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from loopdropout_trainer.files import model_path
from loopdropout_trainer.training.config import LoopDropoutGRPOConfig
from loopdropout_trainer.training.sft import GateSamplingMixin


class LoopDropoutGRPOTrainer(GateSamplingMixin, GRPOTrainer):
    """Trainer for reinforcement learning of a looped language model with Loop Dropout.

    Completions are sampled at unit gates, and each completion is trained on under its own gates. The reference keeps unit
    gates. It takes the arguments of [`~trl.GRPOTrainer`] in the same order, and `peft_config` defaults to the paper's
    adapter. Each batch of completions trains once (`num_iterations=1`), because TRL computes old log-probabilities at unit
    gates and the importance ratio would clip many tokens.
    """

    without_reference = "Set `beta` to 0"
    samples_start_states = False  # as for the completions and the reference

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset
        | IterableDataset
        | DatasetDict
        | IterableDatasetDict
        | dict[str, Dataset | IterableDataset]
        | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Optimizer | None, LambdaLR | None] = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | None = None,
        tools: list[Callable] | None = None,
        rollout_func: Callable | None = None,
        environment_factory: Any = None,
    ) -> None:
        args = LoopDropoutGRPOConfig.from_trl(args, model)
        model = model_path(model)
        if args.beta != 0:
            self.check_reference(model)
        peft_config = self.before_init(model, args, peft_config)
        super().__init__(
            model=model,
            reward_funcs=reward_funcs,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=self.load_tokenizer(model, args, processing_class),
            reward_processing_classes=reward_processing_classes,
            callbacks=[*self.first_callbacks, *(callbacks or [])],
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        self.after_init()

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        """Compute log-probabilities with the further inputs that the model needs, as in generation."""
        completion_mask = attention_mask.clone()
        completion_mask[:, :-logits_to_keep] = 0
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, "completion_mask": completion_mask}
        kwargs |= {name: x for name, x in self.looped.complete_batch(batch).items() if name not in batch}
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )

    def example_ids(self, inputs: dict[str, Any]) -> tuple[list[tuple[int, int]], None]:
        """Return the ids of the completions of a micro-batch."""
        return [(row, 0) for row in range(len(inputs["completion_ids"]))], None
