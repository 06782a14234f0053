"""The frozen reference of DPO and GRPO, which TRL copies from the adapter that is trained."""

from __future__ import annotations

from peft import PeftModel
from transformers import PreTrainedModel

from loopdropout_trainer.errors import UserError
from loopdropout_trainer.lora import find_active_adapter, kind_of


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
    kind = kind_of(model, adapter)
    if adapter != "default" or kind.one_depth:
        raise UserError(
            "The trained adapter must be shared by all loops and be named 'default', because TRL copies it to the "
            f"reference, got {kind.description} named {adapter!r}. {fix}, or start from another one, which `load_adapter` "
            "names 'default'."
        )
