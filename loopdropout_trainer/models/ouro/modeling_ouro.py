"""Ouro: all decoder layers form the recurrent block, applied K times; the normed state is what the next loop starts from.

    x = embed(ids);   for t = 1..K:  x = norm(layers(x));   readout of loop t = x_t;   logits = lm_head(x_K)

A layer normalises before and after each sublayer, inside the residual branch:

    x = x + N2(Attn(N1 x));   x = x + N4(MLP(N3 x))
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.utils import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from loopdropout_trainer.looped import LoopState
from loopdropout_trainer.models.loop_cache import LoopCacheView, fit_cache
from loopdropout_trainer.models.looped_modeling import LoopedCausalLMOutput, LoopedModelOutput, LoopedPreTrainedModel
from loopdropout_trainer.models.ouro.configuration_ouro import OuroConfig


_PROJECTIONS = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
)


class OuroDecoderLayer(GradientCheckpointingLayer):
    """One layer of the recurrent block."""

    def __init__(self, config: OuroConfig, layer_idx: int, loop_state: LoopState) -> None:
        super().__init__()
        self.loop_state = loop_state
        self.self_attn = LlamaAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm_2 = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm_2 = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, loop: int, **kwargs) -> torch.Tensor:
        # First of all, and nowhere else: checkpoint recomputation re-enters here, in reverse order of the loops.
        self.loop_state.loop = loop
        attention, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.input_layernorm_2(attention)
        feed_forward = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + self.post_attention_layernorm_2(feed_forward)


class OuroPreTrainedModel(LoopedPreTrainedModel):
    config: OuroConfig
    config_class = OuroConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["OuroDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": OuroDecoderLayer, "attentions": LlamaAttention}

    def recurrent_linears(self) -> list[str]:
        prefix = "" if self is self.base_model else f"{self.base_model_prefix}."
        return [
            f"{prefix}layers.{layer}.{name}" for layer in range(len(self.base_model.layers)) for name in _PROJECTIONS
        ]


class OuroModel(OuroPreTrainedModel):
    """The looped backbone. `last_hidden_state` is the final loop's readout, ready for the head."""

    def __init__(self, config: OuroConfig) -> None:
        super().__init__(config)
        self.loop_state = LoopState()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            OuroDecoderLayer(config, layer_idx, self.loop_state) for layer_idx in range(config.num_hidden_layers)
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)  # kept for the checkpoint; see exit_distribution
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        output_readouts: bool = False,
        **kwargs,
    ) -> LoopedModelOutput:
        """Run `config.num_loops` loops.

        Args:
            input_ids, inputs_embeds: exactly one of [B, S] token ids and [B, S, H] embeddings.
            attention_mask: [B, cached + S], 0 on padding, on either side.
            position_ids: [B, S]. Without an attention mask, positions that start again at 0 mark packed examples, which
                then attend to themselves only.
            past_key_values: cache with one slot for every (loop, layer); missing slots are added.
            use_cache: default `config.use_cache`, and False in training.
            output_readouts: also return the K per-loop readouts.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of `input_ids` and `inputs_embeds`.")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training

        num_loops, num_layers = self.config.num_loops, len(self.layers)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        if past_key_values is not None:
            fit_cache(past_key_values, num_loops * num_layers)

        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + seen).unsqueeze(0)
        if isinstance(attention_mask, dict):  # compiled generation builds the mask beforehand, by layer type
            causal_mask = attention_mask["full_attention"]
        else:
            causal_mask = create_causal_mask(
                config=self.config,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
            )
        position_embeddings = self.rotary_emb(inputs_embeds, position_ids)

        hidden_states = inputs_embeds
        readouts = []
        for loop in range(num_loops):
            cache = LoopCacheView(past_key_values, loop * num_layers) if past_key_values is not None else None
            for layer in self.layers:
                hidden_states = layer(
                    hidden_states,
                    loop=loop,
                    attention_mask=causal_mask,
                    position_ids=position_ids,
                    position_embeddings=position_embeddings,
                    past_key_values=cache,
                    use_cache=use_cache,
                    **kwargs,
                )
            hidden_states = self.norm(hidden_states)
            if output_readouts:
                readouts.append(hidden_states)

        return LoopedModelOutput(
            last_hidden_state=hidden_states,
            past_key_values=past_key_values,
            readouts=tuple(readouts) if output_readouts else None,
        )

    def exit_distribution(self, readouts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the exit gate's distribution over loops, [B, S, K], for K readouts [B, S, H].

        Nothing in this package exits by it. The published code mixes the loops' losses with it when it is given labels.
        """
        stop = torch.sigmoid(torch.stack([self.early_exit_gate(readout).squeeze(-1) for readout in readouts], dim=-1))
        survived = torch.cumprod(1 - stop, dim=-1)  # probability of not having stopped after loop t
        reached = torch.cat([torch.ones_like(survived[..., :1]), survived[..., :-1]], dim=-1)
        return torch.cat([(reached * stop)[..., :-1], reached[..., -1:]], dim=-1)


class OuroForCausalLM(OuroPreTrainedModel, GenerationMixin):
    """Ouro with its head. Loss and logits are always the final loop's."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: OuroConfig) -> None:
        super().__init__(config)
        self.model = OuroModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @property
    def loop_state(self) -> LoopState:
        return self.model.loop_state

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        output_readouts: bool = False,
        **kwargs,
    ) -> LoopedCausalLMOutput:
        """Run all loops and score with the final one; see `OuroModel.forward` for the arguments.

        Args:
            labels: [B, S], -100 where no loss is wanted; shifted inside.
            logits_to_keep: number of last positions (0: all), or their indices, to compute logits [B, S', V] for.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_readouts=output_readouts,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return LoopedCausalLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            readouts=outputs.readouts,
        )
