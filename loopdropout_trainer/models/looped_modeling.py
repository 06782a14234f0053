"""What every looped model does the same way, whatever its layers look like: the driver of its K loops, and its head.

    h_0 = run_prelude(embeddings);  h_t = recurrent_step(h_{t-1}), t = 1..K;  r_t = readout(h_t);  logits = head(r_K)

A family supplies `run_prelude`, `recurrent_step` and `readout`; the driver is `LoopedBackbone.run_loops`.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.looped import LoopedModelMixin, LoopState, check_num_loops
from loopdropout_trainer.models.forward_pass import LoopCacheView, LoopInputs, PlainPass, fit_cache
from loopdropout_trainer.models.layers import Attention
from loopdropout_trainer.models.strict_loading import load_strictly


@dataclass
class LoopedModelOutput(BaseModelOutputWithPast):
    """`last_hidden_state` is the final loop's readout, ready for the head.

    If asked for, `readouts` holds all K of them and `loop_states` the K states carried out of the loops, each [B, S, H].
    """

    readouts: tuple[Tensor, ...] | None = None
    loop_states: tuple[Tensor, ...] | None = None


@dataclass
class LoopedCausalLMOutput(CausalLMOutputWithPast):
    """`loss` and `logits` belong to the final loop; `readouts` and `loop_states` are the backbone's, if asked for."""

    readouts: tuple[Tensor, ...] | None = None
    loop_states: tuple[Tensor, ...] | None = None


class LoopedConfigMixin:
    """Makes `num_loops` a checked name for the family's own depth field (named in `attribute_map`).

    `backprop_depth` is the number of last loops that gradients flow through; None: all of them.
    """

    # TRL reads it when it loads a model by name whose class is not transformers' own; a class attribute is never saved.
    auto_map = {}
    base_model_pp_plan = {}
    # Other programs that read the family's checkpoints, and how, for the card of a merged model: a command with {name}, and
    # {remote} where a name on the Hub needs an option. All of them read the tokenizer.
    served_by: ClassVar[dict[str, str]] = {}
    _left_open: ClassVar[dict[str, Any]] = {}

    def __setattr__(self, name, value):
        depth = name in ("num_loops", self.attribute_map.get("num_loops"))
        if depth or (name == "backprop_depth" and value is not None):
            check_num_loops(value, name)
        super().__setattr__(name, value)

    def complete(self, weight_names: Callable[[], Collection[str] | None]) -> None:
        """Fill in what the hub's fields leave open and the names of the checkpoint's tensors tell; nothing by default."""

    @property
    def num_recurrent_layers(self) -> int:
        """How many of the attention layers are inside the loop; default: all of them."""
        return self.num_hidden_layers

    @property
    def num_layer_runs(self) -> int:
        """How often an attention layer runs in a forward pass."""
        return self.num_hidden_layers + (self.num_loops - 1) * self.num_recurrent_layers

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read what a config.json holds; arguments and result as in transformers."""
        as_read = cls(**copy.deepcopy(config_dict)).to_diff_dict()
        left_open = {name: value for name, value in as_read.items() if name not in {*config_dict, "architectures"}}
        read = super().from_dict(config_dict, **kwargs)
        (read[0] if isinstance(read, tuple) else read)._left_open = left_open
        return read

    def hub_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return what transformers would save under the names, and in the form, of the published config.json."""
        return fields

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().to_dict().items() if name != "_left_open"}

    def to_diff_dict(self) -> dict[str, Any]:
        """Return what is saved, in the published form; of what the file that it was read from left open, only what changed."""
        fields = self.hub_fields(super().to_diff_dict())
        if "dtype" in fields:  # `torch_dtype` before transformers 5; a file that has one of the two names keeps it
            fields["torch_dtype"] = fields["dtype"]
        set_by_running = ("dtype", "torch_dtype", "use_cache")  # whatever the file says
        for name, value in {"backprop_depth": None, **self._left_open}.items():
            if name in set_by_running or fields.get(name) == value:
                fields.pop(name, None)
        return fields


class RecurrentLayer(GradientCheckpointingLayer):
    """A transformer layer that may be part of the loop. A subclass defines `layer_forward`.

    Args of `forward`: the hidden states [B, S, H], what announces the running loop (None outside of the loops), and what
    `layer_forward` takes.
    """

    compiled_forward: Callable[..., Tensor] | None = None  # `layer_forward`, compiled, for training

    def forward(self, hidden_states: Tensor, announce: Callable[[], None] | None = None, **kwargs) -> Tensor:
        # First of all, and nowhere else: checkpoint recomputation re-enters here, in reverse order of the loops.
        if announce is not None:
            announce()
        if self.compiled_forward is not None and self.training:
            return self.compiled_forward(self, hidden_states, **kwargs)
        return self.layer_forward(hidden_states, **kwargs)

    def layer_forward(self, hidden_states: Tensor, **kwargs) -> Tensor:
        raise NotImplementedError


_STATES = OutputRecorder(RecurrentLayer)
_STATES.num_hidden_layers_key = "num_layer_runs"  # no argument in older releases


@load_strictly
class LoopedPreTrainedModel(LoopedModelMixin, PreTrainedModel):
    """A `PreTrainedModel` whose layers run more than once in a forward pass."""

    base_model_prefix = "model"
    # Hidden states and attentions of every run of a layer, not of every layer.
    _can_record_outputs = {"hidden_states": _STATES, "attentions": OutputRecorder(Attention, index=1)}
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    @property
    def can_pack(self) -> bool:
        return self.config._attn_implementation in ("sdpa", "eager")

    def post_init(self) -> None:
        super().post_init()
        self.register_projections()

    def compile_layers(self) -> bool:
        # torch keeps the programs of a function with its code, allows few, and after them runs the function uncompiled. So
        # each model compiles a copy: the trainings of one process, each with its own rule, would use up each other's.
        layers = [module for module in self.modules() if isinstance(module, RecurrentLayer)]
        own = type(layers[0]).layer_forward
        copied = types.FunctionType(own.__code__.replace(), own.__globals__, closure=own.__closure__)
        compiled = torch.compile(copied, dynamic=True)
        for layer in layers:
            layer.compiled_forward = compiled
        return True

    def loop_readouts(self, **inputs) -> tuple[Tensor, ...]:
        return self.base_model(**inputs, use_cache=False, output_readouts=True).readouts


class LoopedBackbone(LoopedPreTrainedModel):
    """The looped model without its head: embeddings, what runs before the loop, K loops, what makes their readouts.

    Class attributes:
        readout_attends: whether `readout` runs attention layers, which hold keys of the final loop only.
    """

    readout_attends = False

    def __init__(self, config) -> None:
        super().__init__(config)
        self.loop_state = LoopState()
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
        self, one_pass: PlainPass, inputs: LoopInputs, cache: Cache | None, use_cache: bool, keep_all: bool
    ) -> list[LoopInputs]:
        """Run `config.num_loops` loops: the one place where any family's loops are run.

        The loops before the last `config.backprop_depth` run without gradient; so do those of packed examples before their
        first active gate, where the micro-batch's optimisations allow it.

        Args:
            one_pass: of this forward pass.
            inputs: of the first loop.
            cache: with one cache layer for every (loop, layer), or None; `use_cache`: whether layers write to it.
            keep_all: whether to return what every loop gives.

        Returns:
            The inputs with the state after each loop, in order; with that after the last one alone unless `keep_all`.
        """
        num_loops, backprop_depth = self.config.num_loops, self.config.backprop_depth
        results = []
        one_pass.start(inputs)
        for loop in range(num_loops):
            view = None if cache is None else LoopCacheView(cache, loop * self.config.num_recurrent_layers)
            recurrent_step = functools.partial(self.recurrent_step, past_key_values=view, use_cache=use_cache)
            has_gradient = backprop_depth is None or loop >= num_loops - backprop_depth
            with torch.set_grad_enabled(torch.is_grad_enabled() and has_gradient):
                one_pass.loop(recurrent_step, loop)
            if keep_all or loop == num_loops - 1:
                results.append(one_pass.result())
        return results

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
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
            past_key_values: cache with one cache layer for every (loop, layer); missing ones are added.
            use_cache: default `config.use_cache`, and False in training or with `output_readouts`.
            initial_state: [B, S, H] that the first loop starts from; default: the family's own.
            output_readouts: also return the K readouts and the K states.

        Raises:
            ValueError: for inputs that exclude each other or do not fit.
        """
        embeddings = self._embed(input_ids, inputs_embeds, initial_state)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and not output_readouts
        cache = self._fit_cache(past_key_values, use_cache, output_readouts)
        one_pass = self._new_pass(embeddings, attention_mask, cache, kwargs)
        if position_ids is None:
            position_ids = _positions(embeddings, attention_mask, 0 if cache is None else cache.get_seq_length())
        rotations = self.rotate(embeddings, position_ids)
        inputs = LoopInputs(embeddings, None, position_ids, rotations, attention_kwargs=kwargs)
        inputs = one_pass.arrange(inputs, attention_mask, cache)

        outside = {"past_key_values": cache, "use_cache": use_cache}
        inputs = self.run_prelude(inputs, None if initial_state is None else one_pass.pack(initial_state), **outside)
        results = self.run_loops(one_pass, inputs, cache, use_cache, output_readouts)
        readouts = tuple(one_pass.unpack(self.readout(result, **outside)) for result in results)
        self.loop_state.announce(self.loop_state.batch.loop(0))  # what belongs to this pass ends with it
        output = LoopedModelOutput(last_hidden_state=readouts[-1], past_key_values=cache)
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
            if self.loop_state.batch.optimisations.lora_parameters is not None and inputs_embeds.is_leaf:
                # PEFT and TRL make the embeddings require a gradient that nothing uses, for reentrant checkpointing.
                inputs_embeds = inputs_embeds.detach()
        if initial_state is not None and initial_state.shape != inputs_embeds.shape:
            shape = f"[B, S, H] = {list(inputs_embeds.shape)} of this call's tokens"
            raise UserError(f"`initial_state` must have the shape {shape}; got {list(initial_state.shape)}.")
        return inputs_embeds

    def _fit_cache(self, cache: Cache | None, use_cache: bool, output_readouts: bool) -> Cache | None:
        """Return the cache to use, with all the layers that the model needs; None: none."""
        if cache is None:
            if not use_cache:
                return None
            cache = DynamicCache()
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
        allowed = cache is None and self.can_pack and self.loop_state.batch.optimisations.packs
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


class LoopedForCausalLM(LoopedPreTrainedModel, GenerationMixin):
    """A looped backbone with its head. Loss and logits are always the final loop's.

    Class attributes:
        backbone_class: of the backbone, which `base_model_prefix` names.
        float32_logits: whether logits are returned in float32 at least, whatever the model's dtype.
    """

    backbone_class: type[LoopedBackbone]
    float32_logits = False

    def __init__(self, config) -> None:
        super().__init__(config)
        setattr(self, self.base_model_prefix, self.backbone_class(config))
        if self.get_output_embeddings() is None:
            size, width = self.get_input_embeddings().weight.shape
            self.lm_head = nn.Linear(width, size, bias=False)
        self.register_load_state_dict_pre_hook(type(self).accept_hub_weights)
        self.post_init()

    def recurrent_layers(self) -> Iterable[nn.Module]:
        return self.base_model.recurrent_layers()

    def hub_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the state dict `weights` as the published code names and completes it: what is saved."""
        return weights

    def accept_hub_weights(self, weights: dict[str, Tensor], prefix: str, *_: Any) -> None:
        """Turn a published state dict, whose keys start with `prefix`, into this model's in place."""

    def save_pretrained(self, save_directory, *args, state_dict: dict | None = None, **kwargs) -> None:
        """Save the model under the hub's own key names; arguments as in transformers."""
        weights = self.hub_weights(self.state_dict() if state_dict is None else state_dict)
        super().save_pretrained(save_directory, *args, state_dict=weights, **kwargs)

    @property
    def loop_state(self) -> LoopState:
        return self.base_model.loop_state

    def init_continuous_batching(self, *args, **kwargs):
        """Refuse what `generate_batch` begins with."""
        raise UserError(
            "Continuous batching has one paged cache for each layer, and a looped model needs one for each loop of it: use "
            "`generate`, or `loopdropout_trainer.evaluation.generate_greedy`, which packs prompts of all lengths."
        )

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> LoopedCausalLMOutput:
        """Run all loops and score with the final one; the other arguments are those of the backbone's `forward`.

        Args:
            labels: [B, S], -100 for tokens without a loss; shifted inside.
            logits_to_keep: number of last positions (0: all), or their indices, to compute logits [B, S', V] for.
        """
        inputs = (input_ids, attention_mask, position_ids, past_key_values, inputs_embeds)
        outputs = self.base_model(*inputs, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.get_output_embeddings()(outputs.last_hidden_state[:, kept, :])
        if self.float32_logits:
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        rest = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return LoopedCausalLMOutput(loss=loss, logits=logits, **rest)
