"""Fine-tune looped language models with Loop Dropout (Zhu et al. 2026, arXiv 2609.34218).

The model families register with transformers' Auto classes when transformers is imported, or now if it is imported already.
"""

# ruff: noqa: F401  (handed on)

import logging
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement
from wrapt import register_post_import_hook


if TYPE_CHECKING:  # so that type checkers and editors know the names below
    from loopdropout_trainer.config import LoopDropoutConfig, LoopDropoutDPOConfig, LoopDropoutGRPOConfig
    from loopdropout_trainer.dpo import LoopDropoutDPOTrainer
    from loopdropout_trainer.foreign import LoopDescription, check_loops, register_looped
    from loopdropout_trainer.grpo import LoopDropoutGRPOTrainer
    from loopdropout_trainer.handle import loop_dropout
    from loopdropout_trainer.hub import load_adapter, load_model, merge_and_save, push_merged_to_hub
    from loopdropout_trainer.lora import default_peft_config, use_gates
    from loopdropout_trainer.lora_dropout import LoRADropoutSFTTrainer
    from loopdropout_trainer.trainer import GateSamplingMixin, LoopDropoutSFTTrainer

_HOMES = {
    "GateSamplingMixin": "trainer",
    "LoRADropoutSFTTrainer": "lora_dropout",
    "LoopDescription": "foreign",
    "LoopDropoutConfig": "config",
    "LoopDropoutDPOConfig": "config",
    "LoopDropoutDPOTrainer": "dpo",
    "LoopDropoutGRPOConfig": "config",
    "LoopDropoutGRPOTrainer": "grpo",
    "LoopDropoutSFTTrainer": "trainer",
    "check_loops": "foreign",
    "default_peft_config": "lora",
    "load_adapter": "hub",
    "load_model": "hub",
    "loop_dropout": "handle",
    "merge_and_save": "hub",
    "push_merged_to_hub": "hub",
    "register_looped": "foreign",
    "use_gates": "lora",
}
"""The public names, each with its module. They are imported when they are asked for, since torch takes seconds."""

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


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


__version__ = "0.1.0"

_warn_about_untested_versions()
register_post_import_hook(lambda transformers: import_module("loopdropout_trainer.models"), "transformers")
