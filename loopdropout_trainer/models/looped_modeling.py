"""Configuration, strict loading, saving and head that all looped models share."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import ModelOutput, can_return_tuple
from transformers.utils.generic import TransformersKwargs
from transformers.utils.output_capturing import OutputRecorder

from loopdropout_trainer.errors import UserError, check_name, first_line, hint_at_login, hint_at_own_file, short_repr
from loopdropout_trainer.gate_state import GateState
from loopdropout_trainer.looped import (
    SUPPORTED,
    LoopedModelMixin,
    NotLoopedError,
    check_num_loops,
    check_supported,
    is_looped_class,
    not_looped,
    refuse_continuous_batching,
)
from loopdropout_trainer.models.layers import Attention, RecurrentLayer


@dataclass
class LoopOutputs(ModelOutput):
    """Outputs of all loops, with `output_readouts`.

    Attributes:
        readouts: The K readouts [B, S, H].
        loop_states: The K states [B, S, H] after the loops.
    """

    readouts: tuple[Tensor, ...] | None = None
    loop_states: tuple[Tensor, ...] | None = None


@dataclass
class LoopedModelOutput(LoopOutputs, BaseModelOutputWithPast):
    """Output of a backbone. `last_hidden_state` is the final loop's readout, ready for the head."""


@dataclass
class LoopedCausalLMOutput(LoopOutputs, CausalLMOutputWithPast):
    """Output of a model with its head. `loss` and `logits` belong to the final loop."""


# Keywords of `forward`.

_CACHE_NAMES = ("cache", "past_key_values")  # before transformers 5.24 only the second one
CACHE = next(name for name in _CACHE_NAMES if name in BaseModelOutputWithPast.__dataclass_fields__)
"""Name of the cache in the installed transformers, as a field of outputs and as an argument."""

# TRL 1.9 adds `_prediction_loss_only` itself.
_PASSED_ON = {"return_dict", "_prediction_loss_only", *TransformersKwargs.__optional_keys__}
# `generate` passes tokenizers to every model, and ids are for the gates only.
_IGNORED = {"tokenizer", "assistant_tokenizer", "example_ids"}


@functools.cache
def _parameters(module_class: type[nn.Module]) -> frozenset[str]:
    return frozenset(inspect.signature(module_class.forward).parameters)


def accept_cache_names(backbone: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Take the cache under both names. It is the first pre-hook of a backbone.

    Raises:
        TypeError: If a keyword is neither known nor passed on by transformers.
    """
    known = _parameters(type(backbone))
    own_name, other_name = _CACHE_NAMES
    if own_name not in known:
        own_name, other_name = other_name, own_name
    kwargs = {name: value for name, value in kwargs.items() if name not in _IGNORED}
    if other_name in kwargs:
        other = kwargs.pop(other_name)
        if kwargs.get(own_name) is None:
            kwargs[own_name] = other
    for name, value in kwargs.items():
        if name not in known and name not in _PASSED_ON:
            hint = hint_at_depth(name, value, backbone.config)
            raise TypeError(f"{type(backbone).__name__}.forward() got an unexpected keyword argument {name!r}.{hint}")
    return args, kwargs


def hint_at_depth(name: str, value: Any, config: PreTrainedConfig) -> str:
    """Return the advice about a keyword that means the depth, or "" for another one. Huginn's own code has `num_steps`."""
    if name not in ("num_loops", "num_steps", config.attribute_map.get("num_loops")):
        return ""
    return f" Run it at another depth in a block `with use_depth(model, {short_repr(value)}):`."


# Configurations.


class LoopedConfigMixin:
    """Gives a configuration the checked field `num_loops`, and the fields of the published config.json when it is saved.

    `attribute_map` names the family's own field of the recurrence depth.
    """

    # TRL reads it when it loads a model by name whose class is not part of transformers. A class attribute is not saved.
    auto_map = {}
    base_model_pp_plan = {}
    _derived: ClassVar[dict[str, Any]] = {}  # fields that the file does not have

    def __setattr__(self, name, value):
        if name in ("num_loops", self.attribute_map.get("num_loops")):
            check_num_loops(value, name)
        super().__setattr__(name, value)

    @property
    def num_recurrent_layers(self) -> int:
        """Number of attention layers in the loop. Default: all of them."""
        return self.num_hidden_layers

    @property
    def num_layer_runs(self) -> int:
        """Number of runs of attention layers in a forward pass."""
        return self.num_hidden_layers + (self.num_loops - 1) * self.num_recurrent_layers

    def check_full_attention(self) -> None:
        """Raise UserError if layers attend to a window only."""
        if self.use_sliding_window or set(self.layer_types) != {"full_attention"}:
            raise UserError(f"`use_sliding_window` must be False for `model_type: {self.model_type}`, got True.")

    def published_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that transformers would save under the names of the published config.json."""
        return fields

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Create a configuration from the content of a config.json, with arguments and result as in transformers."""
        fields = cls(**copy.deepcopy(config_dict)).to_diff_dict()
        result = super().from_dict(config_dict, **kwargs)
        config = result
        if isinstance(result, tuple):  # with the unused keywords
            config, _ = result
        # Values that the class has derived, which the file does not have. `to_diff_dict` writes them only if they were
        # changed, so that a saved config.json has the fields of the published one.
        derived_names = fields.keys() - config_dict.keys() - {"architectures"}
        config._derived = {name: fields[name] for name in derived_names}
        return result

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().to_dict().items() if name != "_derived"}

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the saved fields. A field that the loaded file did not have is saved only if it was changed."""
        fields = self.published_fields(super().to_diff_dict())
        if "dtype" in fields:  # `torch_dtype` before transformers 5
            fields["torch_dtype"] = fields["dtype"]
        unsaved = {name for name, value in self._derived.items() if fields.get(name) == value}
        unsaved |= self._derived.keys() & {"dtype", "torch_dtype", "use_cache"}  # loading and training change them
        return {name: value for name, value in fields.items() if name not in unsaved}


class DecoderConfigMixin(LoopedConfigMixin):
    """Saves RoPE under the names of the published files."""

    def published_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        rope = published_rope(fields.pop("rope_parameters"))
        return {**fields, **rope}


def published_rope(rope_parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of RoPE under the names of transformers 4."""
    scaling = dict(rope_parameters)
    theta = scaling.pop("rope_theta")
    if scaling.get("rope_type", "default") == "default":
        scaling = None
    return {"rope_theta": theta, "rope_scaling": scaling}


# Models.


@contextmanager
def explain_imports(name: str) -> Iterator[None]:
    """Turn the error about a package that a model needs and that is not installed into one sentence."""
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"The model {name} cannot be loaded: {first_line(error).rstrip('.')}. Install the package, or remove the setting "
            "that needs it, such as `attn_implementation` or `quantization_config`."
        ) from error


@contextmanager
def explain_loading(name: str) -> Iterator[None]:
    """Turn the libraries' errors about a model that cannot be loaded inside the block into one sentence."""
    try:
        with explain_imports(name):
            yield
    except StrictDataclassError as error:  # of a field of a configuration, with the reason in a second line
        reason = first_line(error.__cause__ or error)
        raise UserError(f"The model {name} cannot be loaded: {reason}") from None
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"The model {name} cannot be loaded: {first_line(error)}{hint_at_login(error)}") from None


def check_checkpoint(name: str, revision: str | None = None) -> None:
    """Raise UserError for the checkpoint of a looped model that is not supported, by its config.json."""
    check_name(name)
    fields, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
    model_type = fields.get("model_type")
    names = [model_type, *(fields.get("architectures") or ())]
    if model_type not in CONFIG_MAPPING:
        names.append(Path(name).name)  # tells the model if its repository has code of its own
    check_supported(*names)
    if model_type not in CONFIG_MAPPING:
        raise NotLoopedError(
            f"{name} must have a supported `model_type`, got {model_type!r}. Code in a checkpoint is never run. "
            f"{SUPPORTED}{hint_at_own_file()}"
        )
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[model_type], None)
    is_of_transformers = model_class is not None and model_class.__module__.startswith("transformers.")
    if is_of_transformers and not is_looped_class(model_class):  # a user's class may have a looped model inside
        raise not_looped(model_class, model_type, name)
    if model_type == "dory" and "mlp" not in (fields.get("layer_types") or ()):
        raise UserError(
            f'`layer_types` of {name} must list "mlp" after each attention block, as in the published checkpoint, got '
            f"{short_repr(fields.get('layer_types'))}."
        )


def check_weights(model: PreTrainedModel, name: str, info: dict[str, Any]) -> None:
    """Raise UserError unless the checkpoint `name` held exactly the weights of `model`, by the `info` of its loading."""
    ignored = () if model.get_output_embeddings() else ("lm_head.",)  # a backbone has no head
    for kind in ("missing", "unexpected"):
        names = sorted(name for name in info[f"{kind}_keys"] if not name.startswith(ignored))
        if names:
            raise UserError(
                f"The weights of {name} must fit the {type(model).__name__} that its configuration describes, got "
                f"{len(names)} {kind} weights, such as `{names[0]}`."
            )


_STATES = OutputRecorder(RecurrentLayer)
_STATES.num_hidden_layers_key = "num_layer_runs"  # not an argument in older releases


class LoopedPreTrainedModel(LoopedModelMixin, PreTrainedModel):
    """A `PreTrainedModel` whose layers run several times in a forward pass."""

    base_model_prefix = "model"
    # Hidden states and attentions of each run of a layer.
    _can_record_outputs = {"hidden_states": _STATES, "attentions": OutputRecorder(Attention, index=1)}
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["cache", CACHE]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info: bool = False, **kwargs):
        """Load a model, and raise `UserError` unless the checkpoint holds exactly its weights.

        It takes the arguments of transformers, which would initialize missing weights. So a checkpoint of another architecture
        with the same `model_type` would load.
        """
        name = pretrained_model_name_or_path
        model, info = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)
        check_weights(model, name, info)
        if output_loading_info:
            return model, info
        return model

    @property
    def can_pack(self) -> bool:
        return self.config._attn_implementation == "sdpa"

    def post_init(self) -> None:
        super().post_init()
        self.register_projections()

    def loop_readouts(self, **inputs) -> tuple[Tensor, ...]:
        return self.base_model(**inputs, use_cache=False, output_readouts=True).readouts


class LoopedForCausalLM(LoopedPreTrainedModel, GenerationMixin):
    """A looped backbone with its head. Loss and logits belong to the final loop.

    Class attributes:
        backbone_class: Class of the backbone, which is the attribute `base_model_prefix`.
        float32_logits: Whether logits are returned in float32 or float64.
    """

    backbone_class: type[LoopedPreTrainedModel]
    float32_logits = False

    def __init__(self, config) -> None:
        super().__init__(config)
        setattr(self, self.base_model_prefix, self.backbone_class(config))
        if self.get_output_embeddings() is None:
            embeddings = self.get_input_embeddings()  # under ZeRO-3 its weight is partitioned, without a shape
            self.lm_head = nn.Linear(embeddings.embedding_dim, embeddings.num_embeddings, bias=False)
        self.post_init()

    def recurrent_layers(self) -> Iterable[nn.Module]:
        return self.base_model.recurrent_layers()

    def published_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict under the names of the published checkpoint, which is the form that is saved."""
        return weights

    def save_pretrained(self, save_directory, *args, state_dict: dict | None = None, **kwargs) -> None:
        """Save the model under the names of the published checkpoint. It takes the arguments of transformers."""
        weights = self.published_weights(self.state_dict() if state_dict is None else state_dict)
        super().save_pretrained(save_directory, *args, state_dict=weights, **kwargs)

    @property
    def gate_state(self) -> GateState:
        return self.base_model.gate_state

    init_continuous_batching = refuse_continuous_batching

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args, **kwargs):
        for name, value in kwargs.items():
            hint = hint_at_depth(name, value, self.config)
            if hint:
                raise UserError(f"`{name}` is not an argument of `generate`.{hint}")
        return super().generate(*args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        initial_state: Tensor | None = None,
        **kwargs,
    ) -> LoopedCausalLMOutput:
        """Run all loops, and apply the head to the final readout. Other arguments go to the backbone's `forward`.

        Args:
            labels: [B, S] token ids, -100 for tokens without a loss. The model shifts them.
            logits_to_keep: Number of last positions (0: all), or indices of positions, whose logits [B, S', V] are returned.
            initial_state: State before the first loop, as in the backbone's `forward`.
        """
        inputs = (input_ids, attention_mask, position_ids)
        outputs = self.base_model(
            *inputs, cache=cache, inputs_embeds=inputs_embeds, initial_state=initial_state, **kwargs
        )
        kept = logits_to_keep
        if isinstance(logits_to_keep, int):
            kept = slice(-logits_to_keep, None)  # all positions for 0
        logits = self.get_output_embeddings()(outputs.last_hidden_state[:, kept, :])  # [B, S', V]
        if self.float32_logits:
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **kwargs)
        rest = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return LoopedCausalLMOutput(loss=loss, logits=logits, **rest)


class DecoderForCausalLM(LoopedForCausalLM):
    """A decoder with its head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
