"""The callbacks that keep sampled gates inside training steps, and a rule's memory beside the checkpoints."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from loopdropout_trainer.gates import GateRule
from loopdropout_trainer.looped import LoopState
from loopdropout_trainer.saving.files import write_atomically


RULE_STATE = "rule_state.json"


class UnitGatesCallback(TrainerCallback):
    """Switches every gate to 1 when a training step has ended: evaluation, generation, saving and later callbacks see LoRA.

    The trainer does the same when a micro-batch ends, also by an interrupt. The callback also counts the micro-batches of the
    running optimizer step, which say where in the step's global batch an example is, and the time spent in training steps.

    Attributes:
        micro_batch: micro-batches of the running optimizer step that have drawn their gates.
        train_seconds: wall time spent in training steps so far, evaluation and saving left out.
    """

    def __init__(self, loop_state: LoopState) -> None:
        self.loop_state = loop_state
        self.micro_batch = 0
        self.train_seconds = 0.0
        self._step_began = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self.micro_batch = 0
        self._step_began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.loop_state.unit_gates()
        self.train_seconds += time.perf_counter() - self._step_began


class RuleCallback(TrainerCallback):
    """Tells a rule how sensitive the loss was to its gates.

    It also gives the adapters that a step left out the gradient that they have, zero: so that momentum moves them as it
    does in distributed runs, where they take part.
    """

    def __init__(self, rule: GateRule, accelerator: Accelerator) -> None:
        self.rule = rule
        self.accelerator = accelerator
        self._sensitivity: torch.Tensor | float = 0.0

    def add_sensitivity(self, gate_gradients: torch.Tensor) -> None:
        """Take d loss / d g of one micro-batch, [K, N]."""
        self._sensitivity = self._sensitivity + gate_gradients.abs().sum(dim=1)

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    def on_step_end(self, args, state, control, **kwargs):
        if self.rule.wants_sensitivity:
            total = self.accelerator.reduce(self._sensitivity.to(self.accelerator.device), "sum")
            self.rule.observe(total.cpu())
            self._sensitivity = 0.0


def save_rule_state(rule: GateRule, folder: str | Path) -> None:
    """Write what a rule has learned beside the adapter, if it learns anything."""
    memory = rule.state_dict()
    if memory:
        write_atomically(Path(folder) / RULE_STATE, json.dumps(memory))


def load_rule_state(rule: GateRule, checkpoint: str | bool, output_dir: str) -> None:
    """Give a rule its memory back from a checkpoint folder; True: from the last one in `output_dir`.

    Raises:
        ValueError: if the rule has a memory and the checkpoint has not kept it.
    """
    folder = get_last_checkpoint(output_dir) if checkpoint is True else checkpoint
    if folder is None or not rule.state_dict():
        return
    path = Path(folder) / RULE_STATE
    if not path.is_file():
        raise ValueError(f"{folder} holds no {RULE_STATE}, from which the rule {rule.name!r} would go on.")
    rule.load_state_dict(json.loads(path.read_text()))
