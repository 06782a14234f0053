"""Loops of a model class that one does not own: say how it loops, and everything here works on it.

A class of one's own subclasses `LoopedModelMixin` instead, as the families in `models` do; what both have to say is the
same: which modules recur, which loop is running, how deep the model runs, and how a loop's readout is made.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PreTrainedConfig, PreTrainedModel

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.looped import GateState, LoopedModelMixin, NotLoopedError, check_num_loops, find_looped_model


class LoopDescription(LoopedModelMixin):
    """How the models of one class loop. Subclass it, and register the subclass with `register_looped`.

    A described model becomes an instance of its description as well: `self` is the causal language model. Its weights,
    names and behaviour stay what they are.
    """

    # What a subclass says.

    @staticmethod
    def get_num_loops(config: PreTrainedConfig) -> int:
        """Return the recurrence depth K that a model of this configuration runs at."""
        raise NotImplementedError

    @staticmethod
    def set_num_loops(config: PreTrainedConfig, num_loops: int) -> None:
        """Make a model of this configuration, loaded or not, run `num_loops` loops; a positive integer."""
        raise NotImplementedError

    def recurrent_layers(self) -> Iterable[nn.Module]:
        """Return the modules that recur: each call of one belongs to one loop, and is checkpointed in one piece.

        Their linear projections are where adapters go.
        """
        raise NotImplementedError

    def running_loop(self, layer: nn.Module, *args: Any, **kwargs: Any) -> int:
        """Return the 0-based loop that a call of a recurrent layer with these arguments belongs to.

        It is asked again when gradient checkpointing recomputes the call, loops then running backwards: the arguments
        must tell, not a count of calls.
        """
        raise NotImplementedError

    def readout_module(self) -> nn.Module:
        """Return the module that runs once in each loop and gives the state that the loop's readout is made of."""
        raise NotImplementedError(f"{type(self).__name__} must define `readout_module`.")

    def readout(self, output: Any) -> torch.Tensor:
        """Return the head-ready hidden state [B, S, H] for an output of `readout_module`; default: the output itself."""
        return output

    # What follows from it.

    def loop_readouts(self, **inputs: Any) -> tuple[torch.Tensor, ...]:
        readouts: list[torch.Tensor] = []
        hook = self.readout_module().register_forward_hook(
            lambda module, args, output: readouts.append(self.readout(output))
        )
        try:
            self.base_model(**inputs, use_cache=False)
        finally:
            hook.remove()
        if len(readouts) != self.config.num_loops:
            loops = f"once in each of the {self.config.num_loops} loops"
            raise UserError(f"`readout_module` must return a module that runs {loops}; it ran {len(readouts)} times.")
        return tuple(readouts)


DESCRIPTIONS: dict[type, type[LoopDescription]] = {}
"""How the models of registered classes loop."""


@functools.cache
def _both(added: type, own: type) -> type:
    """Return a subclass of both classes that goes by the second one's name, which libraries choose modules by."""
    # What `torch.save` keeps of an instance: no module holds the class under its name.
    reduced = lambda module, protocol: (_empty, (added, own), module.__getstate__())
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    return type(own.__name__, (added, own), {**names, "__reduce_ex__": reduced})


def _empty(added: type, own: type) -> nn.Module:
    return object.__new__(_both(added, own))


class _Announcing:
    """Announces the running loop in `forward`, by inheritance and not by a hook.

    transformers checkpoints the outermost `forward` of a layer, so that this one runs inside the checkpoint and is recomputed
    with it. A hook on the layer would run outside.
    """

    looped_model: tuple[LoopDescription]  # in a tuple: nn.Module would take the model for a part of its layer

    def forward(self, *args, **kwargs):
        (model,) = self.looped_model
        state = model.loop_state
        state.set_loop(state.batch.loop(model.running_loop(self, *args, **kwargs), model.device))
        return super().forward(*args, **kwargs)


def register_looped(model_class: type[PreTrainedModel], description: type[LoopDescription]) -> None:
    """Let Loop Dropout train, evaluate and diagnose models of a class that is not looped by itself.

    Each model of the class that is built from then on is described when it has been built, and nowhere else: its class
    becomes a subclass of both the description and its own, under its own name. The class's configurations get the property
    `num_loops`, so that depth is read and set as for every looped model, also as a keyword of `from_pretrained`.

    Args:
        model_class: causal language model whose `base_model` returns a head-ready `last_hidden_state`.
        description: how it loops.
    """
    if issubclass(model_class, LoopedModelMixin):
        raise UserError(f"{model_class.__name__} is looped by itself; it needs no description.")
    if not model_class.base_model_prefix or not model_class.can_generate():
        raise UserError(f"{model_class.__name__} is not a causal language model around a backbone.")

    def set_num_loops(config: PreTrainedConfig, num_loops: int) -> None:
        description.set_num_loops(config, check_num_loops(num_loops))

    build = model_class.__init__

    @functools.wraps(build)
    def build_described(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        nearest = next((DESCRIPTIONS[cls] for cls in type(self).__mro__ if cls in DESCRIPTIONS), None)
        if nearest is None or isinstance(self, LoopedModelMixin):
            return
        self.__class__ = _both(nearest, type(self))
        self.loop_state = GateState()
        for layer in self.recurrent_layers():
            layer.__class__ = _both(_Announcing, type(layer))
            layer.looped_model = (self,)
        self.register_projections()

    model_class.config_class.num_loops = property(description.get_num_loops, set_num_loops)
    if not hasattr(model_class.config_class, "auto_map"):  # TRL reads it
        model_class.config_class.auto_map = {}
    if model_class not in DESCRIPTIONS:
        model_class.__init__ = build_described
    DESCRIPTIONS[model_class] = description


@torch.no_grad()
def check_loops(model: nn.Module, **inputs: Any) -> None:
    """Run one forward, and check that every projection of the recurrent block runs in every loop, in order.

    Args:
        model: looped model.
        inputs: of the model, without labels.

    Raises NotLoopedError, naming a projection and the loops that were announced when it ran.
    """
    looped = find_looped_model(model)
    announced = {name: [] for name in looped.recurrent_linears()}
    names = {looped.get_submodule(name): name for name in announced}

    def note(module: nn.Module, args: tuple) -> None:
        if module in names:
            announced[names[module]].append(looped.loop_state.loop)

    hook = register_module_forward_pre_hook(note)  # of all modules
    try:
        model(**inputs, use_cache=False)
    finally:
        hook.remove()
    for name, loops in announced.items():
        if sorted(set(loops)) != list(range(looped.config.num_loops)) or loops != sorted(loops):
            raise NotLoopedError(
                f"`{name}` should run in each of the {looped.config.num_loops} loops, in order; those announced were {loops}."
            )
