"""What the methods are called in tables, figures and printed results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


TITLES = {
    "lora": "LoRA",
    "loop_dropout": "Loop Dropout",
    "unscaled": "Unscaled",
    "dose_control": "Dose control",
    "module_wise": "Module-wise",
    "weight_noise": "Low-rank weight noise",
    "parallel_noise": "Parallel noise",
    "coto": "CoTo",
    "lora_dropout": "LoRA Dropout",
    "independent": "Independent",
    "learned": "Learned gates",
    "schedule": "Schedule",
    "adaptive": "Adaptive",
    "exactly_m": "Exactly m loops",
    "random_prefix": "Random prefix",
    "random_suffix": "Random suffix",
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
    if rule in ("independent", "learned") and fields.get("p"):
        return f"{TITLES[rule]} + Loop Dropout"
    return TITLES.get(rule, str(rule))
