"""The looped model without its head: one forward pass over its K loops, with a KV cache, whatever its layers look like.

    h_0 = run_prelude(embeddings);  h_t = recurrent_step(h_{t-1}), t = 1..K;  r_t = readout(h_t);  logits = head(r_K)

A family supplies `run_prelude`, `recurrent_step` and `readout`; the driver is `LoopedBackbone.run_loops`. The cache has a
layer of its own for every (loop, layer), because each loop attends to its own keys.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.masking_utils import create_causal_mask
from transformers.utils import logging
from transformers.utils.output_capturing import capture_outputs

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.looped import GateState, LoopedModelMixin, RunningLoop
from loopdropout_trainer.models.keywords import CACHE, check_keywords
from loopdropout_trainer.models.layers import DecoderLayer, ExactRotaryEmbedding, RMSNorm
from loopdropout_trainer.models.looped_modeling import LoopedModelOutput, LoopedPreTrainedModel


logger = logging.get_logger(__name__)


@dataclass
class LoopInputs:
    """All that a loop reads besides weights and cache: of a batch, row by row, or of examples packed in one row.

    Nothing about the rows of a batch is passed in any other way.

    Attributes:
        state: [B, S, H], carried from loop to loop; [1, T, H] if the examples are packed.
        attention_mask: in the attention kernel's own form: None, [B, 1, S, cached + S], a block mask, or packed lengths.
        position_ids: [B or 1, S].
        position_embeddings: cosines and sines, each [B or 1, S, ...].
        injected: [B, S, H] that every loop mixes in again, or None.
        attention_kwargs: further arguments of the attention kernel.
        tokens: [n] index of the example whose gates each packed token has; None: the batch, row by row.
        announce: says that the running loop runs, as each of its layers does; None before and after the loops.
    """

    state: Tensor
    attention_mask: Any
    position_ids: Tensor
    position_embeddings: tuple[Tensor, Tensor]
    injected: Tensor | None = None
    attention_kwargs: dict[str, Any] = field(default_factory=dict)
    tokens: Tensor | None = None
    announce: Callable[[], None] | None = None

    def run(self, layers: Iterable[nn.Module], **layer_kwargs) -> Tensor:
        """Return the state [B, S, H] after some layers, which are told the loop."""
        state = self.state
        for layer in layers:
            state = layer(
                state,
                attention_mask=self.attention_mask,
                position_ids=self.position_ids,
                position_embeddings=self.position_embeddings,
                announce=self.announce,
                **self.attention_kwargs,
                **layer_kwargs,
            )
        return state


class PlainPass:
    """One forward pass of a backbone, row by row of its batch. `PackedPass` gives the same results in less time and memory."""

    def __init__(self, backbone: LoopedModelMixin) -> None:
        self.backbone = backbone
        self.prepared: dict[Any, Any] = {}  # see `RunningLoop`

    def arrange(self, inputs: LoopInputs, attention_mask: Any, cache: Cache | None) -> LoopInputs:
        """Return inputs [B, S, ...] as the layers of this pass read them, from the prelude on, with their mask."""
        self.backbone.loop_state.set_loop(RunningLoop())
        if isinstance(attention_mask, dict):  # compiled generation builds the mask beforehand, by layer type
            mask = attention_mask["full_attention"]
        else:
            options = {CACHE: cache, "position_ids": inputs.position_ids}
            mask = create_causal_mask(self.backbone.config, inputs.state, attention_mask, **options)
        return replace(inputs, attention_mask=mask)

    def pack(self, x: Tensor) -> Tensor:
        """Return [B, S, ...] as `arrange` returns its inputs; `unpack` is the way back."""
        return x

    unpack = pack

    def start(self, inputs: LoopInputs) -> None:
        """Take the first loop's inputs."""
        self.inputs = inputs

    def loop(self, recurrent_step: Callable[[LoopInputs], Tensor], loop: int) -> None:
        """Run one loop: a function from inputs to the state after it."""
        state = self.backbone.loop_state
        running = state.batch.loop(loop, self.inputs.state.device, prepared=self.prepared)
        announce = functools.partial(state.set_loop, running)
        announce()  # for what runs outside of a layer
        self.inputs = replace(self.inputs, state=recurrent_step(replace(self.inputs, announce=announce)))

    def result(self) -> LoopInputs:
        """Return the inputs with the state after the loops so far."""
        return self.inputs


def fit_cache(cache: Cache, num_layers: int) -> None:
    """Give `cache` one layer of keys and values per (loop, layer) of the model.

    transformers sizes a cache by `config.num_hidden_layers`, which counts a looped layer once. The missing ones are
    copies of the first, still empty ones, so that every kind of cache (dynamic, static, offloaded) keeps its kind.

    Raises:
        ValueError: if the cache already holds tokens of a run with fewer loops.
    """
    held = len(cache.layers)
    first = cache.layers[0] if held else None
    if held < num_layers:
        stale = held > 0 and cache.get_seq_length() > 0
    else:  # a later run may have used fewer of the layers
        stale = type(first) is DynamicLayer and cache.layers[num_layers - 1].get_seq_length() != first.get_seq_length()
    if stale:
        raise UserError(
            f"This cache has {held} layers for (loop, layer) pairs, not all with every token; the model needs {num_layers}: "
            "its number of loops was raised, or it was made for layers that run once, as by prefix tuning."
        )
    if cache.layer_class_to_replicate is None:  # else the cache adds layers by itself
        cache.layers.extend(copy.deepcopy(cache.layers[index % held]) for index in range(held, num_layers))


class LoopCacheView:
    """The part of a cache that belongs to one loop: layer `layer_idx` here is `layer_idx + offset` there.

    It offers what an attention layer uses, so that the attention of any non-looped model runs in a loop unchanged.
    """

    def __init__(self, cache: Cache, offset: int) -> None:
        self.cache = cache
        self.offset = offset

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, heads, S, d] to the layer's; return all that it holds."""
        return self.cache.update(keys, values, layer_idx + self.offset, *args, **kwargs)


class LoopedBackbone(LoopedPreTrainedModel):
    """The looped model without its head: embeddings, what runs before the loop, K loops, what makes their readouts.

    Class attributes:
        readout_attends: whether `readout` runs attention layers, which hold keys of the final loop only.
    """

    readout_attends = False

    def __init__(self, config) -> None:
        super().__init__(config)
        self.loop_state = GateState()
        self.gradient_checkpointing = False
        # Numbers in the block's projections and in their adapter, once `PackedPass` has counted them.
        self.block_sizes: tuple[int, int] | None = None

    # What a family supplies.

    def rotate(self, embeddings: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the positions, in the form that the family's attention takes."""
        return self.rotary_emb(embeddings, position_ids)

    def run_prelude(self, inputs: LoopInputs, initial_state: Tensor | None, **layer_kwargs) -> LoopInputs:
        """Return the first loop's inputs; those given hold the embeddings [B, S, H] as their state."""
        return inputs if initial_state is None else replace(inputs, state=initial_state.to(inputs.state))

    def recurrent_step(self, inputs: LoopInputs, **layer_kwargs) -> Tensor:
        """Return the state [B, S, H] after a loop, from the state before it and what else `inputs` holds."""
        raise NotImplementedError

    def readout(self, inputs: LoopInputs, **layer_kwargs) -> Tensor:
        """Return the head-ready hidden state [B, S, H] of a loop's state; the state carried on is another matter."""
        return inputs.state

    # What all of them do.

    def run_loops(
        self, one_pass: PlainPass, inputs: LoopInputs, cache: Cache | None, keep_all: bool
    ) -> list[LoopInputs]:
        """Run `config.num_loops` loops: the one place where any family's loops are run.

        The loops before the last `config.backprop_depth` run without gradient; so do those of packed examples before their
        first active gate, where the micro-batch's optimisations allow it.

        Args:
            one_pass: of this forward pass.
            inputs: of the first loop.
            cache: with one cache layer for every (loop, layer), or None.
            keep_all: whether to return what every loop gives.

        Returns:
            The inputs with the state after each loop, in order; with that after the last one alone unless `keep_all`.
        """
        num_loops = self.config.num_loops
        backprop_depth = self.config.backprop_depth
        results = []
        one_pass.start(inputs)
        for loop in range(num_loops):
            view = None if cache is None else LoopCacheView(cache, loop * self.config.num_recurrent_layers)
            recurrent_step = functools.partial(self.recurrent_step, cache=view)
            has_gradient = backprop_depth is None or loop >= num_loops - backprop_depth
            with torch.set_grad_enabled(torch.is_grad_enabled() and has_gradient):
                one_pass.loop(recurrent_step, loop)
            if keep_all or loop == num_loops - 1:
                results.append(one_pass.result())
        return results

    @check_keywords()
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
            input_ids, inputs_embeds: exactly one of [B, S] token ids and [B, S, H] embeddings.
            attention_mask: [B, cached + S], 0 on padding, on either side.
            position_ids: [B, S]; default: counted from the first token that is not padding. Without an attention mask,
                positions that do not count on by one mark packed examples, which then attend to themselves only.
            cache: with one cache layer for every (loop, layer); missing layers are added. transformers before 5.24 calls it
                `past_key_values`; both names work with every version.
            use_cache: default `config.use_cache`, and False in training or with `output_readouts`.
            initial_state: [B, S, H] that the first loop starts from; default: the family's own.
            output_readouts: also return the K readouts and the K states.

        Raises:
            ValueError: for inputs that exclude each other or do not fit.
        """
        embeddings = self._embed(input_ids, inputs_embeds, initial_state)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and not output_readouts
        cache = self._fit_cache(cache, use_cache, output_readouts)
        one_pass = self._new_pass(embeddings, attention_mask, cache, kwargs)
        if position_ids is None:
            position_ids = _positions(embeddings, attention_mask, 0 if cache is None else cache.get_seq_length())
        rotations = self.rotate(embeddings, position_ids)
        inputs = LoopInputs(embeddings, None, position_ids, rotations, attention_kwargs=kwargs)
        inputs = one_pass.arrange(inputs, attention_mask, cache)

        packed_state = None if initial_state is None else one_pass.pack(initial_state)
        inputs = self.run_prelude(inputs, packed_state, cache=cache)
        results = self.run_loops(one_pass, inputs, cache, output_readouts)
        readouts = tuple(one_pass.unpack(self.readout(result, cache=cache)) for result in results)
        self.loop_state.set_loop(self.loop_state.batch.loop(0))  # so that nothing of this pass outlives it
        output = LoopedModelOutput(last_hidden_state=readouts[-1], **{CACHE: cache})
        if output_readouts:
            output.readouts = readouts
            output.loop_states = tuple(one_pass.unpack(result.state) for result in results)
        return output

    def _embed(self, input_ids, inputs_embeds, initial_state) -> Tensor:
        """Return the embeddings [B, S, H] of checked inputs."""
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("Give exactly one of `input_ids` and `inputs_embeds`.")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
            if self.loop_state.batch.options.lora_parameters is not None and inputs_embeds.is_leaf:
                # PEFT and TRL make the embeddings require a gradient that nothing uses, for reentrant checkpointing.
                inputs_embeds = inputs_embeds.detach()
        if initial_state is not None and initial_state.shape != inputs_embeds.shape:
            shape = f"[B, S, H] = {list(inputs_embeds.shape)} of this call's tokens"
            raise UserError(f"`initial_state` must have the shape {shape}; got {list(initial_state.shape)}.")
        return inputs_embeds

    def _fit_cache(self, cache: Cache | None, use_cache: bool, output_readouts: bool) -> Cache | None:
        """Return the cache to use, with all the layers that the model needs; None: none."""
        if cache is None and not use_cache:
            return None
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            logger.warning_once("Checkpointed layers cannot write to a cache: training continues without the cache.")
            return None
        cache = DynamicCache() if cache is None else cache
        if output_readouts and self.readout_attends:
            raise UserError(
                f"`output_readouts` cannot be combined with a cache in {type(self).__name__}: the layers behind the loop "
                "cache the final loop's keys only. Set `use_cache=False`, or `config.num_loops` to the loop wanted."
            )
        fit_cache(cache, self.config.num_layer_runs)
        return cache

    def _new_pass(self, embeddings: Tensor, attention_mask: Any, cache: Cache | None, options: dict) -> PlainPass:
        """Return what runs this forward pass: plainly, unless an optimisation is switched on and applies."""
        # Packed examples have no rows: nothing may be asked of these, and a mask must say which tokens are padding.
        records = ("output_hidden_states", "output_attentions")
        shaped = torch.is_tensor(attention_mask) and attention_mask.shape == embeddings.shape[:2]
        allowed = cache is None and self.can_pack and self.loop_state.batch.options.remove_padding
        packs = allowed and (attention_mask is None or shaped)
        if not packs or any(options.get(name, getattr(self.config, name, False)) for name in records):
            return PlainPass(self)
        from loopdropout_trainer.models.speed.packed_pass import PackedPass  # which is made of this module's classes

        return PackedPass(self)


def _positions(embeddings: Tensor, attention_mask: Any, seen: int) -> Tensor:
    """Return positions [B or 1, S]: of a token among its row's tokens, padding not counted."""
    length = embeddings.shape[1]
    if torch.is_tensor(attention_mask) and attention_mask.dim() == 2 and attention_mask.shape[1] == seen + length:
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    return (torch.arange(length, device=embeddings.device) + seen).unsqueeze(0)


class DecoderBackbone(LoopedBackbone):
    """Embeddings, the recurrent layers, and a norm. A subclass names its layers, and calls `post_init`."""

    layer_class: type[DecoderLayer]

    def __init__(self, config) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        layers = (self.layer_class(config, index) for index in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = ExactRotaryEmbedding(config)

    def recurrent_layers(self) -> nn.ModuleList:
        return self.layers
