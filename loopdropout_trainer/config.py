"""`LoopDropoutConfig`: TRL's `SFTConfig` with the gate rule and its fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments
from trl import SFTConfig

from loopdropout_trainer.gates import GateRule, make_rule


@dataclass
class LoopDropoutConfig(SFTConfig):
    """Training arguments of `LoopDropoutSFTTrainer`: everything that `SFTConfig` has, and how gates are drawn.

    The defaults are the paper's method: Loop Dropout with p = 0.5 and inverse-survival rescaling.

    Raises:
        ValueError: for an unknown rule, a field that it does not take, or a value that it refuses.
    """

    _VALID_DICT_FIELDS = [*SFTConfig._VALID_DICT_FIELDS, "rule_args"]

    rule: str = field(
        default="loop_dropout",
        metadata={
            "help": "How gates are drawn in training: `loop_dropout` (the paper's method), `lora` (unit gates), or another; "
            "`python -m loopdropout_trainer.gates` lists them with their fields."
        },
    )
    p: list[float] | None = field(
        default=None,
        metadata={
            "help": "Drop probability of an adapter application: one number in [0, 1), or one for each loop. "
            "Default: the rule's own (0.5 for `loop_dropout`).",
            "nargs": "+",
        },
    )
    rule_args: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Further fields of the rule, as a mapping (JSON on the command line)."}
    )
    gate_seed: int | None = field(
        default=None,
        metadata={"help": "Seed of the gate draws, which never touch the global random stream. Default: `seed`."},
    )

    loraplus_lr_ratio: float | None = field(
        default=None,
        metadata={
            "help": "LoRA+: learning rate of B as a multiple of A's, which is `learning_rate`. The paper uses 4."
        },
    )

    def __post_init__(self):
        if self.loraplus_lr_ratio is not None and not self.loraplus_lr_ratio >= 1:
            raise ValueError(
                f"`loraplus_lr_ratio` must be a number of at least 1, or empty; got {self.loraplus_lr_ratio!r}."
            )
        if isinstance(self.p, list) and len(self.p) == 1:
            self.p = self.p[0]
        if isinstance(self.rule_args, str):
            self.rule_args = json.loads(self.rule_args)
        rule = self.make_rule()
        self.p = list(rule.p) if isinstance(getattr(rule, "p", None), tuple) else getattr(rule, "p", None)
        # TRL asks for bfloat16 by default, which transformers refuses on a machine without an accelerator unless told so.
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        super().__post_init__()

    def make_rule(self) -> GateRule:
        """Build the gate rule that these arguments describe."""
        fields = self.rule_args or {}
        if not isinstance(fields, Mapping):
            raise ValueError(f"`rule_args` must be a mapping of the rule's fields; got {fields!r}.")
        if "p" in fields:
            raise ValueError("Give `p` as a field of its own, not inside `rule_args`.")
        if self.p is not None:
            fields = {"p": self.p, **fields}
        return make_rule(self.rule, **fields)

    @classmethod
    def from_arguments(cls, args: TrainingArguments | None, output_dir: str) -> LoopDropoutConfig:
        """Return `args` as a `LoopDropoutConfig`; a plain `SFTConfig` or `TrainingArguments` gets the paper's defaults."""
        if args is None:
            return cls(output_dir)
        if isinstance(args, cls):
            return args
        fields = args.to_dict()
        fields["hub_token"] = args.hub_token  # to_dict hides tokens
        return cls(**fields)
