"""The frozen reference of DPO and GRPO, which TRL copies from the adapter that is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_utils import EvalLoopOutput

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.lora import GatedLora, find_active_adapter, kind_of


if TYPE_CHECKING:
    from loopdropout_trainer.training.config import GateConfig


def find_reference_fix(args: GateConfig) -> str | None:
    """Return the setting that does without a frozen copy of a given adapter, or None if the training has no such copy."""
    if args.command == "dpo":
        return "Set `ref_model`"
    if args.command == "grpo" and args.beta != 0:
        return "Set `beta` to 0"
    return None


def check_reference(model: str | PreTrainedModel | PeftModel, fix: str) -> None:
    """Raise UserError if TRL cannot copy the adapter that will be trained to the frozen reference "ref".

    Args:
        model: Model of the trainer. Without an adapter, the base model is the reference.
        fix: Setting that does without the copy, for the message.
    """
    if not isinstance(model, PeftModel):
        return
    if "ref" in model.peft_config:
        raise UserError(
            "`model` must have no adapter named 'ref', which is the reference of an earlier trainer. Continue with that "
            "trainer, or call `model.delete_adapter('ref')`, so that the present weights are the new reference."
        )
    adapter = find_active_adapter(model)
    check_copied(kind_of(model, adapter), adapter, fix)


def check_copied(kind: type[GatedLora], adapter: str, fix: str) -> None:
    """Raise UserError if TRL cannot copy an adapter of some kind and name to the reference. `fix`: as above."""
    if adapter != "default" or kind.one_depth:
        raise UserError(
            "The trained adapter must be shared by all loops and be named 'default', because TRL copies it to the "
            f"reference, got {kind.description} named {adapter!r}. {fix}, or start from another one, which `load_adapter` "
            "names 'default'."
        )


def find_copy(model: PeftModel) -> nn.Module | None:
    """Return the first module of the adapter "ref", or None without that adapter. A later adapter "ref" has other modules."""
    for name, module in model.named_modules():
        if name.endswith(".lora_A.ref"):
            return module
    return None


class ReferenceMixin:
    """Keep the reference of a trainer. TRL takes the adapter "ref" whenever the model has one, and else the base model."""

    _copy: nn.Module | None = None
    _knows_copy = False

    def _prepare_gates(self) -> None:
        """Put gates on the adapter, and raise UserError if the reference is another one than in `__init__`."""
        super()._prepare_gates()
        if not self._knows_copy:
            self._copy, self._knows_copy = find_copy(self.model), True
        self._check_same_reference()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate or predict. Raise UserError if the reference is another one than in `__init__`."""
        self._check_same_reference()
        return super().evaluation_loop(*args, **kwargs)

    def _check_same_reference(self) -> None:
        if self.beta == 0 or getattr(self, "ref_model", None) is not None:
            return  # no pass reads the adapter "ref"
        copy = find_copy(self.model)
        if copy is self._copy:
            return
        change = "replaced"
        if self._copy is None:
            change = "added"
        elif copy is None:
            change = "removed"
        raise UserError(
            f"The reference of this trainer must stay the same, but the adapter 'ref' was {change} by another trainer or by "
            "`delete_adapter`. Make a new trainer."
        )
