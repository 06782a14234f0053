"""HRM-Text of transformers, described: its slow stack runs `H_cycles` times, its fast one `L_cycles` times before each.

One loop is one slow cycle. With `config.prefix_lm`, as it was trained, the tokens of a prompt attend to each other in both
directions, and an answer's to what is before them. transformers asks for that by `token_type_ids`, 1 on the prompt; here
batches with labels get them, and `generate` takes all of its input for the prompt.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from transformers import HrmTextForCausalLM, PreTrainedConfig

from loopdropout_trainer.described import LoopDescription, register_looped
from loopdropout_trainer.errors import UserError
from loopdropout_trainer.models.keywords import check_keywords
from loopdropout_trainer.models.looped_modeling import load_strictly


class HrmTextLoops(LoopDescription):
    """How HRM-Text loops."""

    trains_at_one_depth = True

    @staticmethod
    def get_num_loops(config: PreTrainedConfig) -> int:
        return config.H_cycles

    @staticmethod
    def set_num_loops(config: PreTrainedConfig, num_loops: int) -> None:
        config.H_cycles = num_loops
        config.num_hidden_layers = num_loops * (config.L_cycles + 1) * config.num_layers_per_stack  # sizes the cache

    def recurrent_layers(self) -> list[nn.Module]:
        return [*self.model.L_module.layers, *self.model.H_module.layers]

    def running_loop(self, layer: nn.Module, *args: Any, cycle_offset: int, **kwargs: Any) -> int:
        config = self.config
        backbone = self.model
        if layer.training and len(backbone.L_bp_cycles_padded) != max(config.H_cycles, len(config.L_bp_cycles)):
            raise UserError(
                "Which of HRM-Text's steps take gradients is fixed when it is built, and its depth was changed since: to "
                "train at another depth, load it with `num_loops`."
            )
        return cycle_offset // ((config.L_cycles + 1) * config.num_layers_per_stack)

    def readout_module(self) -> nn.Module:
        return self.model.H_module

    @check_keywords()
    @functools.wraps(HrmTextForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)

    # The prefix mask.

    def complete_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Mark as prompt what comes before the first token that a row is trained on, by labels or by a completion mask.

        Raises:
            ValueError: for rows that hold several examples, whose prompts would see each other.
        """
        trained = batch["labels"] != -100 if "labels" in batch else batch.get("completion_mask")
        if not self.config.prefix_lm or trained is None or "token_type_ids" in batch:
            return batch
        if "position_ids" in batch:
            raise UserError(
                "HRM-Text's prompts attend in both directions, which is not possible for several examples in a row: set "
                "`packing` and `padding_free` to false."
            )
        answered = trained.cumsum(dim=1) > 0  # [B, S], from the first trained token on
        prompt = ~answered & answered.any(dim=1, keepdim=True)
        if "attention_mask" in batch:
            prompt = prompt & (batch["attention_mask"] != 0)
        return {**batch, "token_type_ids": prompt.long()}

    def generate(self, inputs: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Generate, the input being the prompt unless `token_type_ids` say something else; arguments as in transformers."""
        ids = kwargs.get("input_ids") if inputs is None else inputs
        if self.config.prefix_lm and ids is not None and kwargs.get("token_type_ids") is None:
            mask = kwargs.get("attention_mask")
            kwargs["token_type_ids"] = torch.ones_like(ids) if mask is None else (mask != 0).long()
        return super().generate(inputs, *args, **kwargs)

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs):
        before = model_kwargs.get("token_type_ids")
        model_kwargs = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)
        if before is not None:  # what was generated is no prompt; transformers repeats the last column
            model_kwargs["token_type_ids"][:, before.shape[1] :] = 0
        return model_kwargs


register_looped(load_strictly(HrmTextForCausalLM), HrmTextLoops)
