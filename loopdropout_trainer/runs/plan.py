"""What a training run is about to do: model, depth, rule, parameters, steps, tokens, and an estimate of the work.

Work per token, in floating-point operations (a multiply and an add are two):

    forward   2 (K N + M + K R)
    backward  2 (K N + M) + 4 K R

N weights of the linear layers inside the recurrent block, run K times; M weights of the linear layers outside, run once;
R weights of the adapter. K is the mean over the run's steps where depths are drawn, and M counts once for each loop that is
scored. Frozen weights need no weight gradients, only input gradients: their backward pass costs as much
as their forward pass, that of the adapter twice as much. Left out: attention scores, norms, embeddings, recomputation
by gradient checkpointing, padding, and what loops without an active adapter save. Sampling completions and scoring the
reference are a forward pass each; completions are taken to be as long as the references.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from loopdropout_trainer.data import LoadedData
from loopdropout_trainer.experimental.grpo_config import LoopDropoutGRPOConfig
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.training.config import (
    LoopDropoutArguments,
    LoopDropoutConfig,
    LoopDropoutDPOConfig,
)
from loopdropout_trainer.training.depth import step_uniforms


@dataclass(frozen=True)
class RunPlan:
    """A training run before it starts; `print` shows it as a table.

    Attributes:
        model: name; `num_loops`: recurrence depth K; `parameters`: of the frozen model.
        rule, p: how gates are drawn; `trainable_parameters`: of the adapter.
        examples, tokens: of the training data, each counted once.
        batch_size: examples in an optimizer step, over all processes.
        steps, epochs: of the run.
        flops_per_token: estimate by the formula of this module.
        per_example, completions: how many are sampled of each example, and as words, in reinforcement learning.
    """

    model: str
    num_loops: int
    parameters: int
    rule: str
    p: float | list[float] | None
    trainable_parameters: int
    examples: int
    tokens: int
    batch_size: int
    steps: int
    epochs: float
    learning_rate: float
    seed: int
    flops_per_token: float
    data: str = ""
    per_example: int = 1
    completions: str = ""

    @property
    def flops(self) -> float:
        """Estimated floating-point operations of the whole run."""
        return self.flops_per_token * self.tokens * self.per_example * self.epochs

    @property
    def rule_and_adapter(self) -> str:
        """The two of them in one line."""
        rule = self.rule if self.p is None else f"{self.rule}, p = {self.p}"
        share = 100 * self.trainable_parameters / self.parameters
        return f"{rule}; {self.trainable_parameters:,} trainable parameters ({share:.2f}%)"

    def __str__(self) -> str:
        what = "completions" if self.completions else "examples"
        lines = {
            "model": f"{self.model}, {self.parameters:,} parameters, K = {self.num_loops} loops",
            "rule": self.rule_and_adapter,
            "data": self.data,
            "examples": f"{self.examples:,} with {self.tokens:,} tokens, {self.tokens / self.examples:.0f} in the mean",
            "steps": f"{self.steps:,} of {self.batch_size:,} {what} ({self.epochs:.4g} epochs)",
            "completions": self.completions,
            "learning rate": f"{self.learning_rate:g}, seed {self.seed}",
            "work": f"{_with_unit(self.flops_per_token)} a token, {_with_unit(self.flops)} in all (estimate)",
        }
        width = max(map(len, lines))
        return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items() if text)


def plan_run(
    model: PreTrainedConfig | PreTrainedModel | PeftModel,
    data: LoadedData,
    config: LoopDropoutArguments,
    peft_config: PeftConfig | None = None,
    model_name: str | None = None,
) -> RunPlan:
    """Work out what a run will do, without loading weights or taking a step.

    Args:
        model: looped model with or without its adapter, or only its config with the depth that it will run at.
        data: as loaded for the run.
        config: training arguments.
        peft_config: the adapter; default: the one that `model` has.
        model_name: to be printed; default: the name in its config.
    """
    if isinstance(model, PeftModel):
        peft_config = model.peft_config[model.active_adapter]
    model_config = model if isinstance(model, PreTrainedConfig) else find_looped_model(model).config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
        model = find_looped_model(model if peft_config is None else get_peft_model(model, peft_config))
    adapter = sum(p.numel() for name, p in model.named_parameters() if _is_adapter(name))

    num_loops = model.config.num_loops
    rule = config.make_rule()
    steps_per_epoch, steps = num_steps(len(data.train), config)
    samples = isinstance(config, LoopDropoutGRPOConfig)
    return RunPlan(
        model=model_name or model.config.name_or_path,
        num_loops=num_loops,
        parameters=sum(p.numel() for name, p in model.named_parameters() if not _is_adapter(name)),
        rule=config.rule,
        p=config.p,
        trainable_parameters={"per_loop": num_loops * adapter, "learned": num_loops + adapter}.get(
            rule.adapter, adapter
        ),
        examples=len(data.train),
        tokens=data.report.train_tokens,
        batch_size=config.train_batch_size * config.gradient_accumulation_steps * config.world_size,
        steps=steps,
        epochs=steps / steps_per_epoch,
        learning_rate=config.learning_rate,
        seed=config.seed,
        flops_per_token=work_per_token(model, config, steps),
        data=data.description,
        per_example=config.num_generations if samples else 1,
        completions=_completions(config) if samples else "",
    )


def _completions(config: LoopDropoutGRPOConfig) -> str:
    prompts = config.generation_batch_size // config.num_generations
    steps = config.generates_every / config.gradient_accumulation_steps
    return (
        f"{config.num_generations} for each of {prompts:,} prompts every {'step' if steps == 1 else f'{steps:g} steps'}, "
        f"of at most {config.max_completion_length:,} tokens"
    )


def work_per_token(model: nn.Module, config: LoopDropoutArguments, steps: int) -> float:
    """Return the work that a run does for each token of its data (of each completion, with its prompt), in FLOP."""
    depth, scored = _mean_loops(config, find_looped_model(model).config.num_loops, steps)
    work = config.make_rule().passes * flops_per_token(model, depth, scored)
    forward = forward_flops_per_token(model)
    if isinstance(config, LoopDropoutDPOConfig):
        return work + forward  # the reference
    if isinstance(config, LoopDropoutGRPOConfig):
        return config.num_iterations * work + forward * (1 + (config.beta != 0) + config.scores_old)
    return work


def _mean_loops(config: LoopDropoutArguments, num_loops: int, steps: int) -> tuple[float, float]:
    """Return how many loops run, and how many of them are scored, in the mean over the steps of a run."""
    if not hasattr(config, "loop_loss"):
        return num_loops, 1
    loss, depth = config.make_loop_loss(), num_loops
    if isinstance(config, LoopDropoutConfig):
        sampler, seed = config.make_depth_sampler(), config.seed if config.gate_seed is None else config.gate_seed
        count = min(steps, 10_000)
        draws = [sampler.sample(step_uniforms(seed, "depth", step), num_loops) for step in range(count)]
        runs = [loss.loops_to_run(step_uniforms(seed, "loop loss", step), draw) for step, draw in enumerate(draws)]
        depth = sum(runs) / count
    return depth, depth if loss.scores_all else 1


def flops_per_token(model: nn.Module, num_loops: float | None = None, scored: float = 1) -> float:
    """Return the work of one forward and one backward pass of a looped model with its adapter, in FLOP per token.

    Args:
        num_loops: that run; default: the model's own depth.
        scored: loops whose readout the loss scores.
    """
    inside, outside, adapter = _weights(model)
    num_loops = find_looped_model(model).config.num_loops if num_loops is None else num_loops
    return 4 * (num_loops * inside + scored * outside) + 6 * num_loops * adapter


def forward_flops_per_token(model: nn.Module) -> float:
    """Return the work of one forward pass at the model's own depth, in FLOP per token."""
    inside, outside, adapter = _weights(model)
    return 2 * (find_looped_model(model).config.num_loops * (inside + adapter) + outside)


def _weights(model: nn.Module) -> tuple[int, int, int]:
    """Return the weights of linear layers inside and outside the recurrent block, and those of the adapter."""
    model = find_looped_model(model)
    return *_linear_weights(model), sum(p.numel() for name, p in model.named_parameters() if _is_adapter(name))


def num_steps(num_examples: int, config: LoopDropoutArguments) -> tuple[int, int]:
    """Return the optimizer steps of one epoch and of the whole run, as transformers' Trainer counts them."""
    if isinstance(config, LoopDropoutGRPOConfig):  # whole generations, each of them trained on so many micro-batches
        rounds = num_examples // (config.generation_batch_size // config.num_generations)
        steps_per_epoch = max(1, math.ceil(rounds * config.generates_every / config.gradient_accumulation_steps))
        steps = config.max_steps if config.max_steps > 0 else math.ceil(config.num_train_epochs * steps_per_epoch)
        return steps_per_epoch, steps
    batches = math.ceil(math.ceil(num_examples / config.train_batch_size) / config.world_size)
    steps_per_epoch = math.ceil(batches / config.gradient_accumulation_steps)
    if config.max_steps > 0:
        return steps_per_epoch, config.max_steps
    return steps_per_epoch, math.ceil(config.num_train_epochs * steps_per_epoch)


def _linear_weights(model: nn.Module) -> tuple[int, int]:
    """Return the number of weights in the linear layers inside and outside the recurrent block."""
    recurrent = set(model.recurrent_linears())
    inside = outside = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not _is_adapter(name):
            if name.removesuffix(".base_layer") in recurrent:
                inside += module.weight.numel()
            else:
                outside += module.weight.numel()
    return inside, outside


def _is_adapter(name: str) -> bool:
    return ".lora_" in name


def _with_unit(flops: float) -> str:
    for unit in ("", "k", "M", "G", "T", "P"):
        if flops < 1000:
            return f"{flops:.3g} {unit}FLOP"
        flops /= 1000
    return f"{flops:.3g} EFLOP"
