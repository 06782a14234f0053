"""Looped models: the recurrent block, the recurrence depth K, and how a model is found inside of wrappers.

`LoopedModelMixin` is the interface that all looped models share. The gates of its loops are in `gate_state.py`.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from loopdropout_trainer.blocks import as_block
from loopdropout_trainer.errors import UserError, join_words, short_repr
from loopdropout_trainer.gate_state import GateState
from loopdropout_trainer.renames import hide_library_warnings, renamed_function


MOST_LOOPS = 1024
"""Largest recurrence depth that is accepted."""


class NotLoopedError(UserError):
    """The model has no recurrent block that sets the running loop."""


class _OfActiveAdapter:
    """An attribute of a looped model with a value for each adapter. It has the value of the active adapter.

    A value that is set before an adapter is put on the model belongs to that adapter. After the only adapter was
    merged, its value still applies. Of several adapters, nobody knows which one was.
    """

    def __init__(self, default: Any) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def values(self, looped: LoopedModelMixin) -> dict[tuple[str, ...], Any]:
        """Return the values by the active adapters when they were set, the last one at the end."""
        return vars(looped).get(self._name, {})

    def __get__(self, looped: LoopedModelMixin | None, owner: type | None = None) -> Any:
        if looped is None:
            return self
        values, adapters = self.values(looped), _active_adapters(looped)
        if len(values) == 1 and not adapters:
            return [*values.values()][0]
        return values.get(adapters, values.get((), self._default))

    def __set__(self, looped: LoopedModelMixin, value: Any) -> None:
        adapters = _active_adapters(looped)
        others = {}
        if adapters:
            others = {name: own for name, own in self.values(looped).items() if name not in (adapters, ())}
        vars(looped)[self._name] = {**others, adapters: value}


def _active_adapters(looped: LoopedModelMixin) -> tuple[str, ...]:
    """Return the names of the active adapters of the recurrent layers, or () without an adapter."""
    for layer in looped.recurrent_layers():
        for module in layer.modules():
            if hasattr(module, "lora_A"):
                return tuple(module.active_adapters)
    return ()


class LoopedModelMixin:
    """Interface of a looped model: its recurrent layers, its running loop, its depth and its readouts.

    The model reads its depth from `num_loops` in every forward call. It sets each loop on `gate_state`, inside the
    checkpointed `forward` of the recurrent layers.

    Attributes:
        gate_state: Current gates, and the running loop.
        can_pack: Whether the model uses `BatchOptions`.
        trains_at_one_depth: Whether the model trains only at the depth that it was built for.
        reads_prompts: Whether the tokens of a prompt attend to each other in both directions, as `mark_prompts` marks them.
        optional_linears: Ends of the names of projections that an adapter has only if you name them.
        trained_with: Training settings of the active adapter, which are saved with it.
        run_folder: Folder with the results of that training, or None if it is not known.
        trained_adapter: Name of the adapter that a trainer has trained last, or None.
        loaded_adapter: Folder or Hub name that the active adapter was loaded from to train it, until it is trained.
        adapter_source: The adapter that the model was loaded with, which knows its tokenizer (`saving.facts.Source`), or None.
        training_tokenizer: Tokenizer of the trainer that the model was given to last, or None.
        base_revision: Commit of the repository on the Hub that the model was loaded from, or None if it is not known.
    """

    gate_state: GateState
    can_pack = False
    trains_at_one_depth = False
    reads_prompts = False
    optional_linears: tuple[str, ...] = ()
    trained_with = _OfActiveAdapter(MappingProxyType({}))
    run_folder = _OfActiveAdapter(None)
    trained_adapter: str | None = None
    loaded_adapter = _OfActiveAdapter(None)
    adapter_source: Any = None
    training_tokenizer: Any = None
    base_revision: str | None = None

    @property
    def num_loops(self) -> int:
        """Recurrence depth K of the next forward passes."""
        return self.config.num_loops

    @num_loops.setter
    def num_loops(self, num_loops: int) -> None:
        self.config.num_loops = num_loops

    @property
    def own_num_loops(self) -> int:
        """Recurrence depth that the model has outside of the blocks of `use_depth` that run."""
        return self.gate_state.blocks.value_outside(self, "num_loops")

    @property
    def last_training(self) -> Mapping[str, Any]:
        """Settings of the last training of the model, also of an adapter that is not active now. {} without one."""
        for settings in reversed(LoopedModelMixin.trained_with.values(self).values()):
            if settings.get("training_id") is not None:
                return settings
        return {}

    def adapter_of_training(self, training_id: str | None) -> str | None:
        """Return the name of the adapter that a training has trained last, or None if its weights are not on the model."""
        for adapters, settings in LoopedModelMixin.trained_with.values(self).items():
            if adapters and training_id is not None and settings.get("training_id") == training_id:
                return adapters[0]
        return None

    def recurrent_layers(self) -> Iterable[nn.Module]:
        """Return the modules that run in every loop."""
        raise NotImplementedError

    def recurrent_linears(self) -> list[str]:
        """Return the full names of the linear projections of the recurrent block, which adapters may have."""
        layers = set(map(id, self.recurrent_layers()))
        prefixes = tuple(f"{name}." for name, module in self.named_modules() if id(module) in layers)
        names = []
        for name, module in self.named_modules():
            is_inside = f"{name}.".startswith(prefixes)
            is_linear = hasattr(module, "in_features")
            is_factor = ".lora_" in name
            if is_inside and is_linear and not is_factor:
                names.append(name.removesuffix(".base_layer"))  # PEFT keeps the model's own layer under this name
        return list(dict.fromkeys(names))  # an adapted projection is there twice

    def default_targets(self) -> list[str]:
        """Return the full names of the projections that an adapter has by default."""
        return [name for name in self.recurrent_linears() if not name.endswith(self.optional_linears)]

    def register_projections(self) -> None:
        """Set PEFT's default targets for models of this type to `default_targets`."""
        try:
            from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING  # takes seconds
        except ImportError:  # in a merged model that is loaded without this package
            return

        names = [name.removeprefix(f"{self.base_model_prefix}.") for name in self.default_targets()]
        patterns = dict.fromkeys(re.sub(r"\b\d+\b", r"\\d+", re.escape(name)) for name in names)  # of any layer
        pattern = rf"(.*\.)?({'|'.join(patterns)})"
        TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.setdefault(self.config.model_type, pattern)

    def loop_readouts(self, **inputs: Any) -> tuple[Tensor, ...]:
        """Return the K head-ready hidden states [B, S, H], one after each loop, for a causal model's inputs."""
        raise NotImplementedError

    def prepare_fused_loss(self) -> None:
        """Let `weight` and `bias` of the head give its logits. TRL computes losses from them. By default they do already."""

    def complete_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a collated batch with further inputs that the model needs. By default there are none."""
        return batch

    def mark_prompts(self, prompt: Tensor) -> dict[str, Any]:
        """Return further inputs for a batch whose prompts are known. By default there are none.

        Args:
            prompt: Whether each token belongs to the prompt, [B, S].
        """
        return {}

    def attach(self) -> None:
        """Put a description and its hooks on its model. A class of this interface has none."""

    def detach(self) -> None:
        """Reverse `attach`."""

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether layers are checkpointed, by the old name that PEFT asks for, about which transformers 5.24 warns."""
        with hide_library_warnings():
            return super().is_gradient_checkpointing

    def enable_input_require_grads(self) -> None:
        """Let the embeddings require a gradient, by a hook that `torch.save` can keep."""
        self._require_grads_hooks = [self.get_input_embeddings().register_forward_hook(_require_gradient)]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, without TRL's `forward`, which would run this very model in the copy."""
        state = dict(self.__dict__)
        if isinstance(state.get("forward"), types.MethodType):
            del state["forward"]
        return state


def _require_gradient(module: nn.Module, args: tuple, output: Tensor) -> None:
    output.requires_grad_(True)


DESCRIPTIONS: dict[type, Callable[[nn.Module], LoopedModelMixin]] = {}
"""Descriptions of external model classes, by class."""


FAMILIES = ("Ouro", "Huginn", "Dory", "LoopUS", "Nanbeige", "Parcae", "HRM-Text")
"""Names of the supported families."""

SUPPORTED = f"The supported families are {join_words(FAMILIES)}."
"""Sentence at the end of errors about other models."""

UNSUPPORTED = {
    "inkling2": ("Inkling-2", "its looped layers are mixtures of experts that also read the pass before"),
    "sensenova": ("SenseNova-Loop", "it has linear attention and hyper-connections"),
    "iquestloop": ("IQuest-Coder-Loop", "its second loop also attends to the keys of the first loop"),
    "iquestplt": ("LoopCoder-V2", "its second loop also attends to the keys of the first loop"),
    "loopie": ("Loopie", "its looped layers are mixtures of experts"),
    "loopedlm-p": ("IFM's LoopedLM", "its checkpoints have the format of xLLM, which transformers cannot read"),
    "looplm": ("LoopLM-135M", "only the code in its repository knows its architecture, and no remote code runs here"),
}
"""Names and reasons of looped models that are not supported, by a part of their model type, class or name in lower case."""


def check_supported(*names: str | None) -> None:
    """Raise NotLoopedError if a model type or a class belongs to a looped model that is not supported."""
    text = " ".join(filter(None, names)).lower()
    for part, (name, reason) in UNSUPPORTED.items():
        if part in text:
            raise NotLoopedError(f"{name} is not supported: {reason}. {SUPPORTED}")


def find_looped_model(model: nn.Module) -> LoopedModelMixin:
    """Return the looped model inside PEFT, DDP or other wrappers, or the description of an external looped model.

    The model stays unchanged. A description that is not attached knows the layers and the depth, and its gates have no effect.
    """
    if isinstance(model, LoopedModelMixin):  # also a description, which is not a module
        return model
    if not isinstance(model, nn.Module):
        hint = ""
        if isinstance(getattr(model, "model", None), nn.Module):  # of a trainer
            hint = " Pass its `model`."
        elif isinstance(model, str | Path):
            hint = f" Load it by `load_model({str(model)!r})`."
        raise NotLoopedError(
            f"`model` must be a looped model, as `load_model` loads it, got {short_repr(model)}.{hint}"
        )
    for module in model.modules():
        if isinstance(module, LoopedModelMixin):
            return module
        for cls in type(module).__mro__:
            if cls in DESCRIPTIONS:
                return vars(module).get("loop_description") or DESCRIPTIONS[cls](module)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # of a PEFT model
    config = getattr(base, "config", None)
    raise not_looped(type(base), getattr(config, "model_type", None), getattr(config, "name_or_path", None))


def not_looped(model_class: type, model_type: str | None = None, name: str | None = None) -> NotLoopedError:
    """Return the error about a model of a class without loops. One that is not supported raises its own error."""
    check_supported(model_class.__name__, model_type)
    place = f" from {name}" if name else ""
    return NotLoopedError(
        f"`model` must be a looped model, such as `model_type: ouro`, got a {model_class.__name__}{place}. {SUPPORTED}"
    )


def is_looped_class(model_class: type) -> bool:
    """Return whether the models of a class are looped, by their own class or by a description."""
    return issubclass(model_class, LoopedModelMixin) or not DESCRIPTIONS.keys().isdisjoint(model_class.__mro__)


def check_not_compiled(model: Any) -> None:
    """Raise UserError for a model that `torch.compile` has returned, whose modules have other names."""
    if hasattr(model, "_orig_mod"):
        raise UserError(
            "`model` must not be compiled. Give the model that `torch.compile` has got, whose gates the compiled one shares. "
            "A trainer compiles it with `torch_compile=True` in `args`."
        )


def attach_looped_model(model: nn.Module) -> LoopedModelMixin:
    """Return the looped model inside wrappers. The description of an external model installs its hooks, if it has not yet."""
    looped = find_looped_model(model)
    looped.attach()
    return looped


def check_num_loops(num_loops: int, name: str = "num_loops") -> None:
    """Raise UserError unless `num_loops` is a usable recurrence depth K, an integer from 1 to `MOST_LOOPS`."""
    if isinstance(num_loops, bool) or not isinstance(num_loops, int) or not 1 <= num_loops <= MOST_LOOPS:
        raise UserError(f"`{name}` must be an integer from 1 to {MOST_LOOPS:,}, got {num_loops!r}.")


def refuse_continuous_batching(*args: Any, **kwargs: Any) -> None:
    """Take the place of transformers' `init_continuous_batching`, whose cache has no layers for each loop."""
    raise UserError(
        "Continuous batching of transformers does not support looped models. Use `generate`, or "
        "`loopdropout_trainer.generation.generate_greedy`."
    )


def check_num_layers(config: Any, num_layers: int | None) -> None:
    """Restore the number of layers of a built model and raise UserError if `assistant_early_exit` has changed it."""
    found = getattr(config, "num_hidden_layers", None)
    if found != num_layers:
        config.num_hidden_layers = num_layers
        raise UserError(
            f"`num_hidden_layers` must stay {num_layers}, got {found}. `assistant_early_exit` does not "
            "support looped models. Use `prompt_lookup_num_tokens` or a smaller `assistant_model`."
        )


@as_block
def use_depth(model: nn.Module, num_loops: int | None) -> Iterator[None]:
    """Run a model at another recurrence depth inside the block.

    Use a model in one thread at a time, and end blocks in the reverse order of their beginnings, also those of `use_gates`.

    Args:
        model: Looped model, with or without wrappers.
        num_loops: Recurrence depth. None: the model's own depth.

    Raises:
        UserError: If the depth is not supported, and at the end of a block inside of which a later one still runs.
    """
    looped = attach_looped_model(model)
    if num_loops is None:
        num_loops = looped.num_loops
    with looped.gate_state.blocks.setting(looped, num_loops=num_loops):
        yield


set_depth = renamed_function("set_depth", use_depth)
