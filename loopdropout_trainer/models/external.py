"""Looped models of external classes: a description tells which modules recur and how the running loop is known.

`attach_looped_model` attaches a description to a model. Neither the class nor its layers change. A pre-hook on
the backbone passes the gates of the pass on as a keyword, which gradient checkpointing stores with the layer's arguments. A
pre-hook inside each recurrent layer takes it out again and sets the running loop, also when the layer is recomputed. A hook on
the layer itself would run outside of the checkpoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from loopdropout_trainer.errors import UserError, join_words, short_repr
from loopdropout_trainer.gate_state import REMOVED_EARLY, UNIT_GATES, GateState, applied_gates, cut_gates
from loopdropout_trainer.looped import (
    DESCRIPTIONS,
    LoopedModelMixin,
    NotLoopedError,
    attach_looped_model,
    check_num_layers,
    check_num_loops,
    refuse_continuous_batching,
    use_depth,
)


if TYPE_CHECKING:  # importing transformers imports the families, which import this module
    from transformers import PreTrainedConfig, PreTrainedModel


PASS_GATES = "loop_gates"
"""Keyword of the gates between the backbone and its recurrent layers."""


class LoopDescription(LoopedModelMixin, ABC):
    """The loops of the models of one class. Subclass it, and register the subclass with `register_looped`.

    All other attributes are the model's.

    Class attributes:
        depth_field: Field of the configuration with the recurrence depth K.
        loop_module: Name of the submodule of a recurrent layer that runs before every adapted projection and gets the keywords
            that tell the loop.

    Attributes:
        model: Causal language model. The class of its `base_model` must pass unknown keywords on to its layers.
    """

    depth_field: str
    loop_module = "self_attn"

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.gate_state = GateState()
        self.hooks: list[Any] = []
        self.num_layers = getattr(model.config, "num_hidden_layers", None)

    def attach(self) -> None:
        """Put the description and its hooks on the model, unless they are there."""
        if "loop_description" not in vars(self.model):
            check_num_loops(self.num_loops, getattr(type(self), "depth_field", "num_loops"))
            self.model.loop_description = self
            self.add_hooks()

    def add_hooks(self) -> None:
        """Add hooks to the model."""
        self.model.init_continuous_batching = refuse_continuous_batching
        self.add_hook(self.base_model, self._pass_gates)
        recurrent = [layer.get_submodule(self.loop_module) for layer in self.recurrent_layers()]
        for module in self.base_model.modules():
            if module in recurrent:
                # This hook removes the keyword of the gates, which other hooks do not know. So it comes first.
                self.add_hook(module, self._set_loop, prepend=True)
            elif isinstance(module, tuple(map(type, recurrent))):  # other layers get the keyword, too
                self.add_hook(module, _drop_gates)

    def add_hook(self, module: nn.Module, hook: Callable, prepend: bool = False) -> None:
        """Add a pre-hook with keywords to a module, which `detach` removes."""
        self.hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=prepend))

    def _pass_gates(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Pass the current gates from the backbone on to its layers."""
        check_num_layers(self.config, self.num_layers)
        self.gate_state.begin_pass(self.num_loops, _find_shape(args, kwargs))
        batch = self.gate_state.batch
        if batch.is_set:
            kwargs = {**kwargs, PASS_GATES: batch}
        return args, kwargs

    def _set_loop(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Set the running loop with the gates of its pass, inside of a recurrent layer."""
        batch = kwargs.get(PASS_GATES, UNIT_GATES)
        args, kwargs = _drop_gates(module, args, kwargs)
        device = next(x.device for x in (*args, *kwargs.values()) if torch.is_tensor(x))
        self.gate_state.set_loop(batch.loop(self.running_loop(**kwargs), device))
        return args, kwargs

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "model" not in vars(self):  # while it is copied
            raise AttributeError(name)
        return getattr(self.model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = "model" not in vars(self) or name in vars(self) or hasattr(type(self), name)
        if not is_own and hasattr(self.model, name):
            setattr(self.model, name, value)
        else:
            super().__setattr__(name, value)

    def detach(self) -> None:
        """Remove the description and its hooks from the model."""
        for hook in self.hooks:
            hook.remove()
        for layer in self.recurrent_layers():
            module = layer.get_submodule(self.loop_module)
            may_run_again = getattr(layer, "gradient_checkpointing", False)  # in a later backward pass
            if may_run_again and not hasattr(module, "refuses_gates"):
                module.register_forward_pre_hook(_refuse_gates, with_kwargs=True)
                module.refuses_gates = True
        del self.model.loop_description, self.model.init_continuous_batching

    # A subclass defines the first two methods, and the third one if the depth takes several fields.

    @abstractmethod
    def recurrent_layers(self) -> list[nn.Module]:
        """Return the layers that recur. Gradient checkpointing recomputes each of them as one piece."""

    @abstractmethod
    def running_loop(self, **kwargs: Any) -> int:
        """Return the loop of a call, counted from 0, from the keywords that its `loop_module` gets.

        The keywords must tell, not a count of calls: gradient checkpointing recomputes the loops in reverse order.
        """

    @classmethod
    def depth_fields(cls, config: PreTrainedConfig, num_loops: int) -> dict[str, int]:
        """Return the fields of a configuration that make a model run `num_loops` loops, loaded or not."""
        return {cls.depth_field: num_loops}

    @property
    def num_loops(self) -> int:
        config, field = self.model.config, getattr(type(self), "depth_field", "")
        if not hasattr(config, field):
            raise UserError(
                f"`depth_field` of {type(self).__name__} must name the field of {type(config).__name__} with the depth, got "
                f"{field!r}."
            )
        return getattr(config, field)

    @num_loops.setter
    def num_loops(self, num_loops: int) -> None:
        check_num_loops(num_loops)
        for name, value in self.depth_fields(self.model.config, num_loops).items():
            setattr(self.model.config, name, value)
        self.num_layers = getattr(self.model.config, "num_hidden_layers", None)

    def loop_readouts(self, **inputs: Any) -> tuple[Tensor, ...]:
        """Return the outputs of runs with 1 to K loops."""
        readouts = []
        for depth in range(1, self.num_loops + 1):
            with use_depth(self.model, depth), cut_gates(self.gate_state, depth):
                readouts.append(self.base_model(**inputs, use_cache=False).last_hidden_state)
        return tuple(readouts)


def _find_shape(args: tuple, kwargs: Mapping[str, Any]) -> Sequence[int] | None:
    """Return the shape (B, S) of the batch of a pass, or None without a batch, about which the backbone raises an error."""
    for value in (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")):
        if torch.is_tensor(value):
            return value.shape[:2]
    return None


def _drop_gates(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    return args, {name: value for name, value in kwargs.items() if name != PASS_GATES}


def _refuse_gates(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    if PASS_GATES in kwargs:
        raise UserError(REMOVED_EARLY)


def register_looped(model_class: type[PreTrainedModel], description: type[LoopDescription]) -> None:
    """Let the package treat models of an external class as looped models. The class stays unchanged.

    Args:
        model_class: Class of causal language models whose `base_model` returns a head-ready `last_hidden_state`.
        description: Description of its loops.
    """
    if not isinstance(model_class, type) or not hasattr(model_class, "base_model_prefix"):
        raise UserError(f"`model_class` must be a class of causal language models, got {short_repr(model_class)}.")
    if not isinstance(description, type) or not issubclass(description, LoopDescription):
        raise UserError(f"`description` must be a subclass of `LoopDescription`, got {short_repr(description)}.")
    missing = sorted(getattr(description, "__abstractmethods__", ()))
    if missing:
        names = join_words([f"`{name}`" for name in missing])
        raise UserError(f"`description` must define {names}, which {description.__name__} does not.")
    if not model_class.base_model_prefix or not model_class.can_generate():
        raise UserError(f"`model_class` must be a causal language model, got {model_class.__name__}.")
    if not hasattr(model_class.config_class, "auto_map"):
        model_class.config_class.auto_map = {}  # TRL reads it when it loads a class that is not part of transformers
    DESCRIPTIONS[model_class] = description


def loading_fields(name_or_path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of `from_pretrained` with `num_loops` under the names that an external configuration has."""
    num_loops = fields.get("num_loops")
    if num_loops is None:
        return dict(fields)
    found = _find_external(name_or_path, fields.get("revision"))
    if found is None:
        return dict(fields)
    check_num_loops(num_loops)
    model_class, config = found
    renamed = {name: value for name, value in fields.items() if name != "num_loops"}
    renamed.update(DESCRIPTIONS[model_class].depth_fields(config, num_loops))
    return renamed


def external_skeleton(name_or_path: str, revision: str | None = None) -> LoopDescription | None:
    """Return the description of an external model without weights, or None for a model of another class."""
    found = _find_external(name_or_path, revision)
    if found is None:
        return None
    model_class, config = found
    with torch.device("meta"):
        return DESCRIPTIONS[model_class](model_class(config))


def _find_external(name_or_path: str, revision: str | None) -> tuple[type[PreTrainedModel], PreTrainedConfig] | None:
    """Return the class and the configuration of an external model, or None for a model of another class."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(name_or_path, revision=revision, trust_remote_code=False)
    for model_class in DESCRIPTIONS:
        if isinstance(config, model_class.config_class):
            return model_class, config
    return None


@torch.no_grad()
def check_loops(model: nn.Module, **inputs: Any) -> None:
    """Run a forward pass and check that each projection of the recurrent block runs in every loop, in order, under its gates.

    Args:
        model: Looped model.
        **inputs: Inputs of the model, without labels.

    Raises:
        NotLoopedError: If a projection did not run in every loop, or not under the gates. The message names it.
    """
    looped = attach_looped_model(model)
    for name, value in inputs.items():
        if name in ("input_ids", "inputs_embeds", "attention_mask") and not isinstance(value, Tensor):
            raise UserError(f"`{name}` must be a tensor of a batch, got {short_repr(value)}.")
    state = looped.gate_state
    loops: dict[str, list[int]] = {name: [] for name in looped.recurrent_linears()}
    names = {looped.get_submodule(name): name for name in loops}

    def note(module: nn.Module, args: tuple) -> None:
        if module in names:
            loops[names[module]].append(state.loop)
            if not state.running.batch.is_set:
                raise NotLoopedError(
                    f"`{names[module]}` must run under the current gates. The backbone must pass unknown keywords on to its "
                    "layers, and a layer to its `loop_module`."
                )

    hook = register_module_forward_pre_hook(note)  # of all modules
    try:
        with applied_gates(state, torch.ones(looped.num_loops, 1)):
            model(**inputs, use_cache=False)
    finally:
        hook.remove()
    for name, found in loops.items():
        runs_in_each_loop = sorted(set(found)) == list(range(looped.num_loops))
        if not runs_in_each_loop or found != sorted(found):
            raise NotLoopedError(
                f"`{name}` must run in each of the {looped.num_loops} loops, in order, got loops {found}."
            )
