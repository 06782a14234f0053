"""Which gates: pure sampling, one file per rule. A new rule is one file here and one YAML.

`python -m loopdropout_trainer.gates` prints all rules with their fields.
"""

from loopdropout_trainer.gates.adaptive import Adaptive
from loopdropout_trainer.gates.coto import CoTo
from loopdropout_trainer.gates.dose_control import DoseControl
from loopdropout_trainer.gates.independent import Independent
from loopdropout_trainer.gates.learned import Learned
from loopdropout_trainer.gates.loop_dropout import LoopDropout
from loopdropout_trainer.gates.lora import LoRA
from loopdropout_trainer.gates.lora_dropout import LoRADropout
from loopdropout_trainer.gates.module_wise import ModuleWise
from loopdropout_trainer.gates.noise import ParallelNoise, WeightNoise
from loopdropout_trainer.gates.rule import RULES, Draw, GateRule, field_names, make_rule, register_rule
from loopdropout_trainer.gates.schedule import Schedule
from loopdropout_trainer.gates.subsets import ExactlyM, RandomPrefix, RandomSuffix
from loopdropout_trainer.gates.unscaled import Unscaled


__all__ = [
    "RULES",
    "Adaptive",
    "CoTo",
    "DoseControl",
    "Draw",
    "ExactlyM",
    "GateRule",
    "Independent",
    "Learned",
    "LoRA",
    "LoRADropout",
    "LoopDropout",
    "ModuleWise",
    "ParallelNoise",
    "RandomPrefix",
    "RandomSuffix",
    "Schedule",
    "Unscaled",
    "WeightNoise",
    "field_names",
    "make_rule",
    "register_rule",
]
