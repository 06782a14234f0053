"""Which gates: pure sampling, one file per rule. A new rule is one file here and one YAML."""

from loopdropout_trainer.gates.loop_dropout import LoopDropout
from loopdropout_trainer.gates.lora import LoRA
from loopdropout_trainer.gates.rule import RULES, Draw, GateRule, make_rule, register_rule


__all__ = ["RULES", "Draw", "GateRule", "LoRA", "LoopDropout", "make_rule", "register_rule"]
