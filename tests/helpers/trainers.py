"""Trainers that record their micro-batches, and comparisons of trainers."""

from types import SimpleNamespace

import torch
from peft import get_peft_model_state_dict
from torch.nn import functional as F

from helpers.tiny import trained_parameters
from loopdropout_trainer import LoopDropoutSFTTrainer
from loopdropout_trainer.training.evaluation_fields import list_metrics


SHORT_RUN = {
    "max_steps": 4, "per_device_train_batch_size": 4, "bf16": False, "learning_rate": 1e-2, "logging_steps": 1,
    "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False,
}  # fmt: skip
"""Arguments of a short float32 run that logs every step."""


class Recording:
    """Keeps each micro-batch of a trainer: inputs, gates, depth, loss, gradients, and the weights before."""

    seen = ()

    def compute_loss(self, model, inputs, *args, **kwargs):
        kept = SimpleNamespace(step=self.state.global_step)
        kept.weights = {name: p.detach().clone() for name, p in trained_parameters(self.model).items()}
        kept.batch = {name: x.clone() for name, x in inputs.items() if torch.is_tensor(x)}
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        kept.gated, kept.gates, kept.depth = self.gate_state.batch, self.gate_state.gates, self.num_loops
        kept.loss = (loss[0] if isinstance(loss, tuple) else loss).detach()  # a tuple with `return_outputs`
        self.seen = [*self.seen, kept]
        return loss

    def training_step(self, *args, **kwargs):
        """Keep the gradients after the backward pass, with zeros where the loss does not depend on a weight."""
        loss = super().training_step(*args, **kwargs)
        trained = trained_parameters(self.model).items()
        self.seen[-1].gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in trained}
        return loss


class Recorder(Recording, LoopDropoutSFTTrainer):
    pass


def example_nll(logits, labels):
    """Sums of the cross entropy over each row's targets, [B]."""
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2).float(), labels[:, 1:], reduction="none")
    return losses.sum(dim=1)


def logged(trainer, name):
    """All values that a trainer has logged under a name."""
    return [log[name] for log in trainer.state.log_history if name in log]


def unlisted_metrics(trainer):
    """Names of metrics that an evaluation has logged and `list_metrics` lacks, except the groups of GRPO."""
    names = {
        name.removeprefix("eval_") for log in trainer.state.log_history for name in log if name.startswith("eval_")
    }
    costs = {"runtime", "samples_per_second", "steps_per_second", "num_tokens", "model_preparation_time"}
    listed = {*list_metrics(trainer.args.command), *costs}
    return {name for name in names - listed if trainer.args.command != "grpo" or "/" not in name}


def assert_same_weights(one, other, **close):
    """Compare the adapters of two trainers: bit for bit, or as closely as `rtol` and `atol` say."""
    got, want = (get_peft_model_state_dict(trainer.model) for trainer in (one, other))
    torch.testing.assert_close(got, want, **(close or {"rtol": 0, "atol": 0}))
