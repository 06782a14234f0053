"""HRM-Text of transformers: its slow stack runs `H_cycles` times, and its fast stack `L_cycles` times before each.

One loop is one slow cycle. With `config.prefix_lm`, the tokens of a prompt attend to each other in both directions, and the
tokens of an answer to all tokens before them. transformers marks the prompt by `token_type_ids` of 1. `mark_prompts` sets
them: in training for all tokens before an answer, in `generate` for all of its input, and in log-likelihoods for the context.
So the marks agree only if an example begins with a prompt and has one answer. Other examples raise an error.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
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
        trains = backbone.training and torch.is_grad_enabled()
        if trains and len(backbone.L_bp_cycles_padded) != max(config.H_cycles, len(config.L_bp_cycles)):
            raise UserError(
                "HRM-Text trains only at the depth that it was loaded with. To train at another depth, load it with "
                "`num_loops`."
            )
        return cycle_offset // ((config.L_cycles + 1) * config.num_layers_per_stack)

    def complete_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Mark the tokens before the first token with a loss as the prompt."""
        if not self.reads_prompts or "token_type_ids" in batch:
            return batch
        if "completion_ids" in batch:  # of GRPO, which joins them to `prompt_ids` later
            return batch
        if "labels" in batch:
            trained = batch["labels"] != -100
        elif "completion_mask" in batch:
            trained = batch["completion_mask"] != 0
        else:
            return batch
        if "position_ids" in batch:
            raise UserError(
                "`packing` and `padding_free` must be False for HRM-Text, because the prompts of several examples in a row "
                "would attend to each other."
            )
        answered = trained.cumsum(dim=1) > 0  # [B, S], from the first trained token on
        has_answer = answered.any(dim=1, keepdim=True)  # [B, 1]
        prompt = ~answered & has_answer
        if "attention_mask" in batch:
            prompt &= batch["attention_mask"] != 0  # without padding on the left
        self._check_examples(trained, answered, prompt)
        return {**batch, **self.mark_prompts(prompt)}

    def _check_examples(self, trained: Tensor, answered: Tensor, prompt: Tensor) -> None:
        """Raise UserError if generation would mark other tokens than the training, [B, S] each."""
        begins = trained[:, 1:] & ~trained[:, :-1]  # the first token of an answer after other tokens
        if (answered[:, -1] & ~prompt.any(dim=1)).any():
            fault = "begin with a prompt without a loss, but one has a loss on its first token"
        elif (begins.sum(dim=1) > 1).any():
            fault = "have one answer, but one has several"
        else:
            return
        raise UserError(
            f"The examples of HRM-Text must {fault}. Its prompts attend in both directions, so train on `prompt` and "
            "`completion`, or on conversations of two turns with `assistant_only_loss: true`, or load the model with "
            "`prefix_lm: false` in `model_init_kwargs`."
        )

    @property
    def reads_prompts(self) -> bool:
        return self.config.prefix_lm

    def mark_prompts(self, prompt: Tensor) -> dict[str, Tensor]:
        return {"token_type_ids": prompt.long()} if self.reads_prompts else {}


def _generate(model: HrmTextForCausalLM, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """Generate from a prompt. It takes the arguments of transformers. `token_type_ids` default to 1 on the input."""
    ids = kwargs.get("input_ids") if inputs is None else inputs
    if model.loop_description.reads_prompts:
        _refuse_drafts(model, inspect.signature(type(model).generate).bind(model, inputs, *args, **kwargs))
    if ids is not None and kwargs.get("token_type_ids") is None:
        mask = kwargs.get("attention_mask")
        prompt = torch.ones_like(ids) if mask is None else mask != 0
        kwargs |= model.loop_description.mark_prompts(prompt)
    return type(model).generate(model, inputs, *args, **kwargs)


def _refuse_drafts(model: HrmTextForCausalLM, call: inspect.BoundArguments) -> None:
    """Raise UserError if other tokens than the model's own are proposed, which transformers would mark as prompt."""
    named = {**call.arguments, **call.arguments.get("kwargs", {})}
    settings = named.get("generation_config") or model.generation_config
    for name in ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit"):
        if named.get(name, getattr(settings, name, None)) is not None:
            raise UserError(f"`{name}` must not be set for HRM-Text, because proposed tokens would count as prompt.")


def _update_model_kwargs(
    model: HrmTextForCausalLM, outputs: Any, model_kwargs: dict, *args: Any, **kwargs: Any
) -> dict:
    before = model_kwargs.get("token_type_ids")
    model_kwargs = type(model)._update_model_kwargs_for_generation(model, outputs, model_kwargs, *args, **kwargs)
    if before is not None:  # generated tokens are not part of the prompt, but transformers repeats the last column
        model_kwargs["token_type_ids"][:, before.shape[1] :] = 0
    return model_kwargs


register_looped(HrmTextForCausalLM, HrmTextLoops)
