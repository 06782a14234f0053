"""What every looped model shares around its backbone: its configuration, strict loading and saving, and its head.

Loading is strict: a checkpoint that lacks a weight, or has one too many or in another shape, is an error that says so.
transformers fills in what is missing with fresh weights, and logs it. Of a looped model that is never what was meant: a
checkpoint of another architecture under the same `model_type` would train and answer, wrongly.
"""

from __future__ import annotations

import copy
import json
import re
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file, can_return_tuple
from transformers.utils.loading_report import LoadStateDictInfo
from transformers.utils.output_capturing import OutputRecorder

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.looped import GateState, LoopedModelMixin, check_num_loops
from loopdropout_trainer.models.keywords import CACHE, check_keywords
from loopdropout_trainer.models.layers import Attention, RecurrentLayer


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


class DecoderConfigMixin(LoopedConfigMixin):
    """Saves RoPE under the names that the published files have, and all readers know."""

    def hub_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        rope = dict(fields.pop("rope_parameters"))
        theta = rope.pop("rope_theta")
        return {**fields, "rope_theta": theta, "rope_scaling": None if rope["rope_type"] == "default" else rope}


# Strict loading.


DOWNLOAD_FIELDS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


class WrongWeightsError(ValueError):
    """A checkpoint's weights are not those of the model that its configuration describes."""


def check_weights(model: PreTrainedModel, report: LoadStateDictInfo, source: str, may_reshape: bool = False) -> None:
    """Raise WrongWeightsError, naming weights, if a checkpoint holds others than the model by transformers' `report`, or NaN.

    Tied and ignorable weights are taken out of the report; `may_reshape`: the caller gave `ignore_mismatched_sizes`.
    """
    model._adjust_missing_and_unexpected_keys(report)
    if model.base_model is model:  # a backbone, of whose checkpoint the head is a part
        report.unexpected_keys -= {name for name in report.unexpected_keys if name.startswith("lm_head.")}
    tied = getattr(model, "all_tied_weights_keys", {})
    either = {**tied, **{source: target for target, source in tied.items()}}
    wrong = []
    if absent := {name for name in report.missing_keys if name not in either or either[name] in report.missing_keys}:
        wrong.append(f"it lacks {_listed(absent)}")
    if report.unexpected_keys:
        wrong.append(f"it holds {_listed(report.unexpected_keys)}, which the model does not have")
    if report.mismatched_keys and not may_reshape:
        name, held, wanted = min(report.mismatched_keys)
        wrong.append(f"its `{name}` is {list(held)} instead of {list(wanted)}")
    if wrong:
        raise WrongWeightsError(
            f"The weights of {source} are not those of the {type(model).__name__} that its configuration describes: "
            f"{'; '.join(wrong)}."
        )
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not weight.is_meta and not torch.isfinite(weight).all():
            raise WrongWeightsError(f"{source} holds NaN or infinity in `{name}`.")


def load_strictly(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Let a model class refuse, from now on, checkpoints that do not hold exactly its weights; return the class."""
    finish = model_class._finalize_model_loading

    # Here, since the loading report of `from_pretrained` comes after fresh weights, and not for every way to load.
    def checked(model, load_config, loading_info):
        source = load_config.pretrained_model_name_or_path or "the state dict"
        check_weights(model, loading_info, source, load_config.ignore_mismatched_sizes)
        return finish(model, load_config, loading_info)

    model_class._finalize_model_loading = staticmethod(checked)
    return model_class


def _listed(names: Collection[str]) -> str:
    """Return names with their numbers as stars, and how many each stands for."""
    counts = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in sorted(names))
    listed = [f"`{name}` ({count} times)" if count > 1 else f"`{name}`" for name, count in counts.items()]
    more = f" and {len(listed) - 6} others" if len(listed) > 6 else ""
    return ", ".join(listed[:6]) + more


def checkpoint_names(name_or_path: str, **init_kwargs: Any) -> list[str] | None:
    """Return the names of the tensors in a safetensors checkpoint, without loading them; None if there is none.

    From the Hub the index is read, or the file itself if there is only one; by those keywords in `DOWNLOAD_FIELDS`.
    """
    download = {key: init_kwargs[key] for key in DOWNLOAD_FIELDS if key in init_kwargs}
    optional = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    index = cached_file(name_or_path, SAFE_WEIGHTS_INDEX_NAME, **optional, **download)
    if index is not None:
        return list(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"])
    file = cached_file(name_or_path, SAFE_WEIGHTS_NAME, **optional, **download)
    if file is None:
        return None
    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())


# The model and its head.


_STATES = OutputRecorder(RecurrentLayer)
_STATES.num_hidden_layers_key = "num_layer_runs"  # no argument in older releases


@load_strictly
class LoopedPreTrainedModel(LoopedModelMixin, PreTrainedModel):
    """A `PreTrainedModel` whose layers run more than once in a forward pass."""

    base_model_prefix = "model"
    # Hidden states and attentions of every run of a layer, not of every layer.
    _can_record_outputs = {"hidden_states": _STATES, "attentions": OutputRecorder(Attention, index=1)}
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["cache", CACHE]
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


class LoopedForCausalLM(LoopedPreTrainedModel, GenerationMixin):
    """A looped backbone with its head. Loss and logits are always the final loop's.

    Class attributes:
        backbone_class: of the backbone, which `base_model_prefix` names.
        float32_logits: whether logits are returned in float32 at least, whatever the model's dtype.
    """

    backbone_class: type[LoopedPreTrainedModel]
    float32_logits = False

    def __init__(self, config) -> None:
        super().__init__(config)
        setattr(self, self.base_model_prefix, self.backbone_class(config))
        if self.get_output_embeddings() is None:
            embeddings = self.get_input_embeddings()  # under ZeRO-3 its weight is partitioned, and has no shape
            self.lm_head = nn.Linear(embeddings.embedding_dim, embeddings.num_embeddings, bias=False)
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
    def loop_state(self) -> GateState:
        return self.base_model.loop_state

    def init_continuous_batching(self, *args, **kwargs):
        """Refuse what `generate_batch` begins with."""
        raise UserError(
            "Continuous batching has one paged cache for each layer, and a looped model needs one for each loop of it: use "
            "`generate`, or `loopdropout_trainer.evaluation.generate_greedy`, which packs prompts of all lengths."
        )

    @check_keywords("use_cache", "initial_state", "output_readouts")
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
        **kwargs,
    ) -> LoopedCausalLMOutput:
        """Run all loops and score with the final one; the other arguments are those of the backbone's `forward`.

        Args:
            labels: [B, S], -100 for tokens without a loss; shifted inside.
            logits_to_keep: number of last positions (0: all), or their indices, to compute logits [B, S', V] for.
        """
        inputs = (input_ids, attention_mask, position_ids, cache, inputs_embeds)
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


class DecoderForCausalLM(LoopedForCausalLM):
    """The decoder with its head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
