"""The looped model without its head: one forward pass over K loops, with a cache of keys and values.

    h_0 = run_prelude(embeddings),  h_t = recurrent_step(h_{t-1}), t = 1..K,  r_t = readout(h_t),  logits = head(r_K)

A family defines `run_prelude`, `recurrent_step` and `readout`. The cache has one layer for each (loop, layer), because each
loop attends to its own keys.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache
from transformers.utils import logging
from transformers.utils.output_capturing import capture_outputs

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.gate_state import GateState
from loopdropout_trainer.looped import check_num_layers
from loopdropout_trainer.models.layers import DecoderLayer, ExactRotaryEmbedding, RMSNorm
from loopdropout_trainer.models.looped_modeling import (
    CACHE,
    LoopedModelOutput,
    LoopedPreTrainedModel,
    accept_cache_names,
)
from loopdropout_trainer.models.passes import BatchPass, LoopInputs, PackedPass


logger = logging.get_logger(__name__)

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
"""Engines with an attention of their own, by the first word of its name in `config._attn_implementation`."""


class LoopedBackbone(LoopedPreTrainedModel):
    """Embeddings, the layers before the loops, K loops, and the layers that make their readouts."""

    def __init__(self, config) -> None:
        super().__init__(config)
        _check_engine(config)
        self.register_forward_pre_hook(accept_cache_names, with_kwargs=True)
        self.gate_state = GateState()
        self.gradient_checkpointing = False
        self.num_layers = config.num_hidden_layers

    @functools.cached_property
    def num_block_weights(self) -> int:
        """Number of weights in the linear layers of the recurrent block."""
        linears = map(self.get_submodule, self.recurrent_linears())
        return sum(linear.in_features * linear.out_features for linear in linears)

    def attention_inputs(
        self, embeddings: Tensor, position_ids: Tensor, input_ids: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return tensors [B or 1, S, ...] that the family's attention reads for each token: first cosines and sines."""
        return self.rotary_emb(embeddings, position_ids)

    def run_prelude(self, inputs: LoopInputs) -> LoopInputs:
        """Return the first loop's inputs. The state of the given inputs is the embeddings [B, S, H]."""
        return inputs

    def recurrent_step(self, inputs: LoopInputs) -> Tensor:
        """Return the state [B, S, H] after a loop."""
        raise NotImplementedError

    def readout(self, inputs: LoopInputs) -> Tensor:
        """Return the head-ready hidden state [B, S, H] for the state after a loop."""
        return inputs.state

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        initial_state: Tensor | None = None,
        output_readouts: bool = False,
        **kwargs,
    ) -> LoopedModelOutput:
        """Run `config.num_loops` loops.

        Args:
            input_ids: [B, S] token ids. Give either them or `inputs_embeds`.
            attention_mask: [B, cached + S], 0 on padding, on either side.
            position_ids: [B, S]. Default: counted from the first token that is not padding. Without an attention mask, an
                example of a packed row begins where a position is not the previous position plus 1.
            cache: Cache with one layer for each (loop, layer). Missing layers are added. Its other name is
                `past_key_values`, as in transformers before 5.24.
            inputs_embeds: [B, S, H] embeddings.
            use_cache: Whether to return a cache. Default: `config.use_cache`, and False in training or with
                `output_readouts`.
            initial_state: [B, S', H] state of the first S' tokens of the text, with the cached ones, before the first loop.
                Further tokens start from the family's own state, which is the default.
            output_readouts: Whether to return the K readouts and the K states.
        """
        embeddings = self._embed(input_ids, inputs_embeds)
        self.gate_state.begin_pass(self.config.num_loops, embeddings.shape[:2])
        check_num_layers(self.config, self.num_layers)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and not output_readouts
        cache = self._fit_cache(cache, use_cache, output_readouts)
        cached = 0 if cache is None else cache.get_seq_length()  # tokens of earlier calls
        if initial_state is not None:
            initial_state = self._select_states(initial_state, embeddings, int(cached))
        if position_ids is None:
            position_ids = _positions(embeddings, attention_mask, cached)
        inputs = LoopInputs(
            state=embeddings,
            attention_mask=None,  # the pass sets it
            position_ids=position_ids,
            position_embeddings=self.attention_inputs(embeddings, position_ids, input_ids),
            cache=cache,
            attention_kwargs=kwargs,
        )

        # From here to `unpack`, tensors have the form of the pass: rows [B, S, ...], or packed examples [1, T, ...].
        forward_pass = self._new_pass(inputs, attention_mask)
        inputs = forward_pass.prepare(inputs, attention_mask)
        inputs = self.run_prelude(inputs)
        if initial_state is not None:
            own = forward_pass.unpack(inputs.state)[:, initial_state.shape[1] :]
            inputs = replace(inputs, state=forward_pass.pack(torch.cat([initial_state.to(own), own], dim=1)))
        results = forward_pass.run_loops(inputs)
        read = results[-1:]
        if output_readouts:
            read = results
        readouts = [forward_pass.unpack(self.readout(result)) for result in read]
        self.gate_state.set_loop(self.gate_state.batch.loop(0))  # so that no tensor of this pass is kept

        output = LoopedModelOutput(last_hidden_state=readouts[-1], **{CACHE: cache})
        if output_readouts:
            output.readouts = tuple(readouts)
            output.loop_states = tuple(forward_pass.unpack(result.state) for result in results)
        return output

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("Set either `input_ids` or `inputs_embeds`.")
        if inputs_embeds is not None:
            return inputs_embeds
        embeddings = self.get_input_embeddings()(input_ids)
        # PEFT and TRL make the embeddings require a gradient for reentrant checkpointing, and nothing uses it.
        # A state that requires a gradient would have one in every loop, so that no loop could run without.
        is_frozen = self.gate_state.batch.options.lora_parameters is not None and embeddings.is_leaf
        if is_frozen:
            embeddings = embeddings.detach()
        return embeddings

    def _select_states(self, initial_state: Tensor, embeddings: Tensor, cached: int) -> Tensor:
        """Return the given initial states of the tokens that run."""
        rows, columns = embeddings.shape[:2]
        size = self.config.hidden_size
        given = list(initial_state.shape)
        if len(given) != 3 or given[0] != rows or given[2] != size:
            raise UserError(f"`initial_state` must have shape [{rows}, number of tokens, {size}], got {given}.")
        return initial_state[:, cached : cached + columns]

    def _fit_cache(self, cache: Cache | None, use_cache: bool, output_readouts: bool) -> Cache | None:
        """Return a cache with one layer for each (loop, layer), or None.

        transformers creates one layer for each of `config.num_hidden_layers`. The missing layers are copies of the first
        layers, which are still empty, so that they have the same kind.
        """
        if cache is None and not use_cache:
            return None
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            logger.warning_once("Layers with gradient checkpointing cannot write to a cache. The cache is not used.")
            return None
        if output_readouts:
            raise UserError("`use_cache` must be False with `output_readouts`.")
        if cache is None:
            cache = DynamicCache()
        needed = self.config.num_layer_runs
        size = len(cache.layers)
        if 0 < size < needed and cache.get_seq_length() > 0:
            raise UserError(
                f"`cache` must have {needed} layers, one for each (loop, layer), got {size}. The number of loops was raised, "
                "or the cache was made for a model without loops, as in prefix tuning."
            )
        if cache.layer_class_to_replicate is None:  # otherwise the cache adds layers by itself
            for index in range(size, needed):
                cache.layers.append(copy.deepcopy(cache.layers[index % size]))
        return cache

    def _new_pass(self, inputs: LoopInputs, attention_mask: Any) -> BatchPass:
        """Return a pass over packed examples if that is allowed, otherwise a pass over the rows of the batch."""
        # Recorded states have rows, and packed examples do not.
        records = ("output_hidden_states", "output_attentions")
        is_recorded = any(inputs.attention_kwargs.get(name, getattr(self.config, name, False)) for name in records)
        if is_recorded or inputs.cache is not None:
            return BatchPass(self)
        if not self.can_pack or not self.gate_state.batch.options.remove_padding:
            return BatchPass(self)
        if attention_mask is None:
            return PackedPass(self)
        # Padding that is left out has outputs of zero. So nobody may read them, and the mask must only mark padding.
        marks_padding = torch.is_tensor(attention_mask) and attention_mask.shape == inputs.state.shape[:2]
        if marks_padding and self.gate_state.ignores_padding:
            return PackedPass(self)
        return BatchPass(self)


def _check_engine(config: PreTrainedConfig) -> None:
    """Raise UserError if an engine's attention has one cache for each layer, which the loops would overwrite."""
    engine = str(config._attn_implementation).partition("_")[0]
    if engine in ENGINES and config.num_loops > 1 and not getattr(config, "caches_by_loop", False):
        raise UserError(
            f"{ENGINES[engine]} keeps one cache of keys and values for each layer, but this model runs each layer in "
            f"{config.num_loops} loops. Install loopdropout-trainer next to vLLM, whose plugin loop_dropout adds the other "
            "caches, name the plugin in `VLLM_PLUGINS` if you set it, and do not set `model_impl`. Other engines cannot serve "
            "the model."
        )


def _positions(embeddings: Tensor, attention_mask: Any, cached: int) -> Tensor:
    """Return the [B or 1, S] position of each token among its row's tokens, without padding."""
    length = embeddings.shape[1]
    if torch.is_tensor(attention_mask) and attention_mask.dim() == 2 and attention_mask.shape[1] == cached + length:
        return count_positions(attention_mask, length)
    return (torch.arange(length, device=embeddings.device) + cached).unsqueeze(0)


def count_positions(attention_mask: Tensor, length: int) -> Tensor:
    """Return the [B, S] positions of the last S = `length` columns of a mask among the tokens that are not padding."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]


class DecoderBackbone(LoopedBackbone):
    """Embeddings, the recurrent layers, and a norm. A subclass names its layer class, and calls `post_init`."""

    layer_class: type[DecoderLayer]

    def __init__(self, config) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(self.layer_class(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = ExactRotaryEmbedding(config)

    def recurrent_layers(self) -> nn.ModuleList:
        return self.layers
