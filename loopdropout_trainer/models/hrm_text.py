"""HRM-Text of transformers: its slow stack runs `H_cycles` times, and its fast stack `L_cycles` times before each.

One loop is one slow cycle. With `config.prefix_lm`, the tokens of a prompt attend to each other in both directions, and the
tokens of an answer to all tokens before them. transformers marks the prompt by `token_type_ids` of 1. Here batches with labels
get them, and `generate` marks all of its input.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from transformers import HrmTextForCausalLM, PreTrainedConfig

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.models.external import LoopDescription, register_looped
from loopdropout_trainer.models.looped_modeling import accept_cache_names


class HrmTextLoops(LoopDescription):
    """Loops of HRM-Text."""

    depth_field = "H_cycles"
    trains_at_one_depth = True

    def add_hooks(self) -> None:
        super().add_hooks()
        self.add_hook(self.base_model, accept_cache_names, prepend=True)
        # Instances of `partial` can be copied and pickled with the model.
        self.model.generate = functools.partial(_generate, self.model)
        self.model._update_model_kwargs_for_generation = functools.partial(_update_model_kwargs, self.model)

    def detach(self) -> None:
        super().detach()
        del self.model.generate, self.model._update_model_kwargs_for_generation

    @classmethod
    def depth_fields(cls, config: PreTrainedConfig, num_loops: int) -> dict[str, int]:
        num_layers = num_loops * (config.L_cycles + 1) * config.num_layers_per_stack
        return {"H_cycles": num_loops, "num_hidden_layers": num_layers}  # the second one sizes the cache

    def recurrent_layers(self) -> list[nn.Module]:
        return [*self.base_model.L_module.layers, *self.base_model.H_module.layers]

    def running_loop(self, cycle_offset: int, **kwargs: Any) -> int:
        config = self.config
        backbone = self.base_model
        if backbone.training and len(backbone.L_bp_cycles_padded) != max(config.H_cycles, len(config.L_bp_cycles)):
            raise UserError(
                "HRM-Text trains only at the depth that it was loaded with. To train at another depth, load it with "
                "`num_loops`."
            )
        return cycle_offset // ((config.L_cycles + 1) * config.num_layers_per_stack)

    def complete_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Mark the tokens before the first token with a loss as the prompt."""
        trained = batch["labels"] != -100 if "labels" in batch else batch.get("completion_mask")
        if "completion_ids" in batch:  # of GRPO, which joins them to `prompt_ids` later
            return batch
        if not self.config.prefix_lm or trained is None or "token_type_ids" in batch:
            return batch
        if "position_ids" in batch:
            raise UserError(
                "`packing` and `padding_free` must be False for HRM-Text, because the prompts of several examples in a row "
                "would attend to each other."
            )
        answered = trained.cumsum(dim=1) > 0  # [B, S], from the first trained token on
        prompt = ~answered & answered.any(dim=1, keepdim=True)
        if "attention_mask" in batch:
            prompt = prompt & (batch["attention_mask"] != 0)
        return {**batch, "token_type_ids": prompt.long()}


def _generate(model: HrmTextForCausalLM, inputs: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """Generate from a prompt. It takes the arguments of transformers. `token_type_ids` default to 1 on the input."""
    ids = kwargs.get("input_ids") if inputs is None else inputs
    if model.config.prefix_lm and ids is not None and kwargs.get("token_type_ids") is None:
        mask = kwargs.get("attention_mask")
        kwargs["token_type_ids"] = torch.ones_like(ids) if mask is None else (mask != 0).long()
    return type(model).generate(model, inputs, *args, **kwargs)


def _update_model_kwargs(
    model: HrmTextForCausalLM, outputs: Any, model_kwargs: dict, *args: Any, **kwargs: Any
) -> dict:
    before = model_kwargs.get("token_type_ids")
    model_kwargs = type(model)._update_model_kwargs_for_generation(model, outputs, model_kwargs, *args, **kwargs)
    if before is not None:  # generated tokens are not part of the prompt, but transformers repeats the last column
        model_kwargs["token_type_ids"][:, before.shape[1] :] = 0
    return model_kwargs


register_looped(HrmTextForCausalLM, HrmTextLoops)
