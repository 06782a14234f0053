"""Gate rules: sample gates, with one file for each kind of rule.

`python -m loopdropout_trainer.gates` prints all rules with their fields.
"""

from loopdropout_trainer.gates.loop_dropout import DoseControl, Independent, Learned, LoopDropout, ModuleWise, Unscaled
from loopdropout_trainer.gates.lora import LoRA, LoRADropout
from loopdropout_trainer.gates.noise import ParallelNoise, WeightNoise
from loopdropout_trainer.gates.rule import RULES, Draw, GateRule, change_p, make_rule, register_rule
from loopdropout_trainer.gates.schedule import Adaptive, CoTo, Schedule
from loopdropout_trainer.gates.subsets import ExactlyM, RandomPrefix, RandomSuffix


__all__ = [  # without the files of the rules, of which `loop_dropout` has the name of a function
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
    "RULES",
    "RandomPrefix",
    "RandomSuffix",
    "Schedule",
    "Unscaled",
    "WeightNoise",
    "change_p",
    "make_rule",
    "register_rule",
]
