"""What the methods are called in tables, figures and printed results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


_TITLES = {  # where it is not the rule's name as a sentence begins: "Dose control"
    "lora": "LoRA",
    "loop_dropout": "Loop Dropout",
    "module_wise": "Module-wise",
    "weight_noise": "Low-rank weight noise",
    "coto": "CoTo",
    "lora_dropout": "LoRA Dropout",
    "learned": "Learned gates",
    "exactly_m": "Exactly m loops",
}


def method_title(fields: Mapping[str, Any]) -> str:
    """Return what people call the method of a run with these settings; a rule of one's own goes by its own name."""
    rule = fields.get("rule")
    if rule == "lora":
        if fields.get("loraplus_lr_ratio") not in (None, 1):
            return "LoRA+"
        if fields.get("use_rslora"):
            return "rsLoRA"
        if fields.get("lora_dropout"):
            return "Input dropout"
    title = _TITLES.get(rule, str(rule).replace("_", " ").capitalize())
    return f"{title} + Loop Dropout" if rule in ("independent", "learned") and fields.get("p") else title
