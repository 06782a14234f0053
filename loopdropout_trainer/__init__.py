"""Fine-tune looped language models with Loop Dropout (Zhu et al. 2026, arXiv 2609.34218).

These are the public names. `help(loopdropout_trainer.load_model)`, for example, shows one of them in full.

- check_loops: Run a forward pass and check that each projection of the recurrent block runs in every loop, in order, under
  its gates.
- default_peft_config: Return the configuration of an adapter on the recurrent block, by default the paper's: rank 16 and
  alpha 32.
- GateRule: Base of all rules.
- GateSamplingMixin: Gate sampling for a TRL trainer.
- load_adapter: Put a saved adapter on its base model, at the depth that the model is set to.
- load_model: Load a base model, a merged model or an adapter for inference.
- load_tokenizer: Load a tokenizer from its `tokenizer.json`.
- loop_dropout: Draw gates in each training pass of a PEFT model over a looped model, in any training loop.
- LoopDescription: The loops of the models of one class.
- LoopDropoutConfig: Configuration class for the [`LoopDropoutSFTTrainer`].
- LoopDropoutDPOConfig: Configuration class for the [`LoopDropoutDPOTrainer`].
- LoopDropoutDPOTrainer: Trainer for preference tuning of a looped language model with Loop Dropout.
- LoopDropoutGRPOConfig: Configuration class for the [`LoopDropoutGRPOTrainer`].
- LoopDropoutGRPOTrainer: Trainer for reinforcement learning of a looped language model with Loop Dropout.
- LoopDropoutSFTTrainer: Trainer for supervised fine-tuning of a looped language model with Loop Dropout.
- LoRADropoutSFTTrainer: Trainer for the rule `lora_dropout`, with one forward and backward pass for each of its `num_masks`
  draws.
- merge_and_save: Merge the adapter and save an ordinary checkpoint of the base model.
- push_merged_to_hub: Upload a merged model to the Hub, with the card that `merge_and_save` wrote.
- register_looped: Let the package treat models of an external class as looped models.
- register_rule: Add a rule to the registry under its `name`.
- use_depth: Run a model at another recurrence depth inside the block.
- use_gates: Apply given gates to a PEFT model over a looped model, with or without a trainer.

The model families register with transformers' Auto classes before `AutoConfig` looks up its first configuration. Families of
transformers itself are described as soon as their classes are imported.
"""

# ruff: noqa: F401  (handed on)

import logging
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from types import ModuleType
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement
from wrapt import register_post_import_hook


if TYPE_CHECKING:  # so that type checkers and editors know the names below
    from loopdropout_trainer.gates.rule import GateRule, register_rule
    from loopdropout_trainer.handle import loop_dropout
    from loopdropout_trainer.looped import use_depth
    from loopdropout_trainer.lora import default_peft_config, use_gates
    from loopdropout_trainer.models.external import LoopDescription, check_loops, register_looped
    from loopdropout_trainer.saving.loading import load_adapter, load_model
    from loopdropout_trainer.saving.merging import merge_and_save, push_merged_to_hub
    from loopdropout_trainer.tokenizers import load_tokenizer
    from loopdropout_trainer.training.config import LoopDropoutConfig, LoopDropoutDPOConfig, LoopDropoutGRPOConfig
    from loopdropout_trainer.training.dpo import LoopDropoutDPOTrainer
    from loopdropout_trainer.training.grpo import LoopDropoutGRPOTrainer
    from loopdropout_trainer.training.multipass import LoRADropoutSFTTrainer
    from loopdropout_trainer.training.sft import GateSamplingMixin, LoopDropoutSFTTrainer

_HOMES = {
    "GateRule": "gates.rule",
    "GateSamplingMixin": "training.sft",
    "LoRADropoutSFTTrainer": "training.multipass",
    "LoopDescription": "models.external",
    "LoopDropoutConfig": "training.config",
    "LoopDropoutDPOConfig": "training.config",
    "LoopDropoutDPOTrainer": "training.dpo",
    "LoopDropoutGRPOConfig": "training.config",
    "LoopDropoutGRPOTrainer": "training.grpo",
    "LoopDropoutSFTTrainer": "training.sft",
    "check_loops": "models.external",
    "default_peft_config": "lora",
    "load_adapter": "saving.loading",
    "load_model": "saving.loading",
    "load_tokenizer": "tokenizers",
    "loop_dropout": "handle",
    "merge_and_save": "saving.merging",
    "push_merged_to_hub": "saving.merging",
    "register_looped": "models.external",
    "register_rule": "gates.rule",
    "use_depth": "looped",
    "use_gates": "lora",
}
"""The public names, each with its module. They are imported when they are asked for, since torch takes seconds."""

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def _warn_about_untested_versions() -> None:
    """Log a warning for each dependency whose installed version is outside the range of `setup.cfg`.

    pip keeps to these ranges. An installation with `--no-deps`, or a later upgrade of one library, does not.
    """
    try:
        requirements = requires("loopdropout-trainer") or []
    except PackageNotFoundError:  # a source tree on the path, without an installation
        return
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None:  # an extra
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            logging.getLogger(__name__).warning(
                "%s %s is installed, and this package is tested with %s%s. Results may be wrong: see constraints.txt.",
                requirement.name,
                installed,
                requirement.name,
                ",".join(sorted(map(str, requirement.specifier), reverse=True)),
            )


def _register_families_when_used(configuration_auto: ModuleType) -> None:
    """Let `AutoConfig` register the families before it looks up a configuration, since their modules take seconds."""

    def register_first(method: Callable) -> classmethod:
        @wraps(method)
        def register_and_call(cls, *args, **kwargs):
            import_module("loopdropout_trainer.models")
            return method(cls, *args, **kwargs)

        return classmethod(register_and_call)

    auto_class = configuration_auto.AutoConfig
    for name in ("for_model", "from_pretrained"):
        setattr(auto_class, name, register_first(getattr(auto_class, name).__func__))


__version__ = "0.1.0"

_warn_about_untested_versions()
register_post_import_hook(_register_families_when_used, "transformers.models.auto.configuration_auto")
for _family in ("hrm_text", "dory"):
    register_post_import_hook(
        lambda modeling: import_module("loopdropout_trainer.models"),
        f"transformers.models.{_family}.modeling_{_family}",
    )
