"""Callbacks: unit gates between training passes, logs of the gates and sampled depths."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from loopdropout_trainer.gate_state import GateState
from loopdropout_trainer.gates import GateRule
from loopdropout_trainer.gates.depth import FixedDepth, sample_depth
from loopdropout_trainer.saving.integrity import adapter_patterns, saving
from loopdropout_trainer.training.config import GateConfig


class UnitGatesCallback(TrainerCallback):
    """Set all gates to one after the backward pass of each micro-batch.

    It comes before the user's callbacks, so that they log, evaluate and save at unit gates.

    Attributes:
        gate_state: Gates of the model.
        micro_batch: Number of micro-batches of the current optimizer step that are done.
    """

    gate_state: GateState
    micro_batch = 0

    def on_step_begin(self, args, state, control, **kwargs):
        self.micro_batch = 0

    def on_substep_end(self, args, state, control, **kwargs):
        self.micro_batch += 1
        self.gate_state.reset()

    def on_step_end(self, args, state, control, **kwargs):
        self.micro_batch = 0
        self.gate_state.reset()

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gate_state.reset()
        # A parameter that no gate of the step let through has a gradient of None, and torch's optimizers skip it. In several
        # processes its gradient is zero (`GatedLora._unused`), by which its momentum moves it. Zero makes both train alike.
        if args.distributed_state.distributed_type == DistributedType.NO:
            for parameter in model.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)


class PushCallback(TrainerCallback):
    """Bring the adapter of the newest checkpoint into `output_dir` before it is pushed, with the settings of its training.

    transformers brings only the files there that it knows. Without `loop_dropout.json`, an adapter runs at another depth.
    """

    def on_push_begin(self, args, state, control, model=None, **kwargs):
        checkpoint = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if not args.should_save or not checkpoint.is_dir():
            return
        patterns = adapter_patterns()
        with saving(args.output_dir, patterns):
            files = {file for pattern in patterns for file in checkpoint.glob(pattern)}
            for file in files:
                shutil.copy2(file, args.output_dir)


class GatedStepCallback(TrainerCallback):
    """Base of the callbacks that read the gates of a micro-batch after its backward pass, before they are reset.

    Attributes:
        trainer: Trainer with a `GateSamplingMixin`, set with its rule once it is built.
    """

    trainer: Trainer
    rule: GateRule

    def on_micro_batch_end(self) -> None:
        """Read the gates."""

    def on_substep_end(self, args, state, control, **kwargs):
        self.on_micro_batch_end()

    def on_step_end(self, args, state, control, **kwargs):
        self.on_micro_batch_end()


class GateLoggingCallback(GatedStepCallback):
    """Log the mean gate (`gate_mean`) and the share of examples with an active gate in loop t (`active_loop_t`).

    Both are means over the examples that all processes really train on. TRL's count of tokens (`num_tokens`) continues in a
    resumed training and in a further call of `train`.
    """

    totals: torch.Tensor | float = 0.0
    """Number of examples of the running step, and sums over them of the logged values, [2 + K]."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.totals = 0.0
        counts = [log["num_tokens"] for log in state.log_history if "num_tokens" in log]
        self.trainer._step_metrics.clear()  # of an interrupted training
        self.trainer.num_tokens = int(max(counts, default=self.trainer.resumption.tokens_before))

    def on_micro_batch_end(self) -> None:
        trainer = self.trainer
        if trainer.last_gates is None:  # the user's own loss with the rule `lora`
            return
        gates = trainer.last_gates.sampled.detach()  # [K, N] or [K, N, M]
        active = (gates != 0).float().flatten(1).mean(dim=1)  # [K]
        # Weighted by their number of examples, because the last batches of an epoch are smaller. A one in front sums to the
        # number of examples, so that one reduction over the processes has the sums and their divisor.
        means = torch.stack([torch.ones(()), gates.mean().cpu(), *active.cpu()])  # [2 + K]
        self.totals += trainer.num_trained * means.double()

    def on_step_end(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control, **kwargs)
        totals, trainer = self.totals, self.trainer
        self.totals = 0.0
        if not torch.is_tensor(totals):
            return
        if trainer.accelerator.num_processes > 1:
            totals = trainer.accelerator.reduce(totals.to(trainer.accelerator.device), "sum")
        num_examples, *sums = totals.tolist()
        names = ["gate_mean", *(f"active_loop_{loop}" for loop in range(1, len(sums)))]
        for name, total in zip(names, sums, strict=True):
            if num_examples:
                trainer._step_metrics[name].append(total / num_examples)


class SensitivityCallback(GatedStepCallback, ExportableState):
    """Tell the adaptive rule how sensitive the loss is to the gate of each loop, and keep its estimate in checkpoints."""

    total: torch.Tensor | float = 0.0  # [K] sum of |d loss / d g| over the examples of the running step

    def __init__(self, rule: GateRule) -> None:
        self.rule = rule

    def on_train_begin(self, args, state, control, **kwargs):
        self.total = 0.0  # also after an interrupted step
        saved = state.stateful_callbacks.get(type(self).__name__)
        if isinstance(saved, dict):
            self.rule.load_state_dict(saved["attributes"])

    def on_micro_batch_end(self) -> None:
        gradient = self.trainer.last_gates.sampled.grad  # [K, N], because the rule lets its gates require gradients
        self.total += gradient.abs().sum(dim=1)

    def on_step_end(self, args, state, control, **kwargs):
        self.on_micro_batch_end()
        accelerator = self.trainer.accelerator
        self.rule.observe(accelerator.reduce(self.total.to(accelerator.device), "sum").cpu())
        self.total = 0.0

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint keeps."""
        return {"args": {}, "attributes": self.rule.state_dict()}


class DepthCallback(GatedStepCallback):
    """Run each optimizer step at a sampled depth, and log it as `depth`."""

    def __init__(self, sampler: FixedDepth) -> None:
        self.sampler = sampler

    def on_train_begin(self, args, state, control, **kwargs):
        # `auto_find_batch_size` begins again in the middle of a step.
        self.trainer.looped.num_loops = self.trainer.looped.trained_with["num_loops"]

    def on_step_begin(self, args, state, control, **kwargs):
        trainer = self.trainer
        self.num_loops = trainer.num_loops
        depth = sample_depth(self.sampler, trainer.gate_seed, state.global_step, self.num_loops)
        trainer.looped.num_loops = depth

    def on_micro_batch_end(self) -> None:
        self.trainer._step_metrics["depth"].append(float(self.trainer.num_loops))

    def on_step_end(self, args, state, control, **kwargs):
        self.on_micro_batch_end()
        self.trainer.looped.num_loops = self.num_loops


def make_step_callbacks(args: GateConfig, rule: GateRule) -> list[TrainerCallback]:
    """Return the callbacks that read the gates of a step before they are reset."""
    callbacks = [GateLoggingCallback()]
    if rule.wants_sensitivity:
        callbacks.append(SensitivityCallback(rule))
    sampler = args.make_depth_sampler()
    if sampler != FixedDepth():
        callbacks.append(DepthCallback(sampler))
    return callbacks
