"""Training with several draws of masks for each micro-batch, for the baseline LoRA Dropout (Lin et al. 2024)."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.training.sft import LoopDropoutSFTTrainer


class LoRADropoutSFTTrainer(LoopDropoutSFTTrainer):
    """Trainer for the rule `lora_dropout`, with one forward and backward pass for each of its `num_masks` draws.

    The draws run one after the other in the memory of one. It takes the arguments of `LoopDropoutSFTTrainer`.
    """

    runs_several_draws = True

    def _before_init(self, arguments: dict[str, Any]) -> None:
        """Scale the alpha of a new adapter, so that plain LoRA at inference has the original's expected update."""
        super()._before_init(arguments)
        if self.rule.draws_per_batch == 1 and self.rule.name != "lora_dropout":
            raise UserError(
                f"`rule` must be 'lora_dropout' for a {type(self).__name__}, got {self.rule.name!r}. "
                "`LoopDropoutSFTTrainer` trains the other rules."
            )
        lora = arguments["peft_config"]
        if lora is not None:
            factor = self.rule.alpha_factor
            lora.lora_alpha *= factor
            lora.alpha_pattern = {name: alpha * factor for name, alpha in lora.alpha_pattern.items()}

    def training_step(self, model, inputs, num_items_in_batch=None):
        """Run a forward and a backward pass for each draw, and return the mean of their losses."""
        losses, num_tokens = [], self._total_train_tokens
        for index in range(self.rule.draws_per_batch):
            self.draw_index = index
            self._total_train_tokens = num_tokens  # TRL counts the tokens of each pass
            # DDP adds up the gradients of all processes once, in the last backward pass.
            synchronization = nullcontext()
            if index < self.rule.draws_per_batch - 1:
                synchronization = self.accelerator.no_sync(model)
            with synchronization:
                losses.append(super().training_step(model, copy.copy(inputs), num_items_in_batch))
        return sum(losses)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if not model.training:
            return loss
        num_draws = self.rule.draws_per_batch
        if return_outputs:
            loss, outputs = loss
            return loss / num_draws, outputs
        return loss / num_draws
