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
from loopdropout_trainer.training.config import LoopDropoutArguments, LoopDropoutConfig, LoopDropoutDPOConfig
from loopdropout_trainer.training.depth import step_uniforms


@dataclass(frozen=True)
class RunPlan:
    """A training run before it starts; as a string it is a table.

    Attributes:
        model: name; `num_loops`: recurrence depth K; `parameters`: of the frozen model.
        trainable_parameters: of the adapter.
        examples, tokens: of the training data, each counted once.
        flops_per_token: estimate by the formula of this module.
    """

    model: str
    num_loops: int
    parameters: int
    trainable_parameters: int
    examples: int
    tokens: int
    steps: int
    epochs: float
    flops_per_token: float
    data: str
    config: LoopDropoutArguments

    @property
    def flops(self) -> float:
        """Estimated floating-point operations of the whole run."""
        samples = self.config.num_generations if isinstance(self.config, LoopDropoutGRPOConfig) else 1
        return self.flops_per_token * self.tokens * samples * self.epochs

    @property
    def rule_and_adapter(self) -> str:
        """The two of them in one line."""
        rule = self.config.rule if self.config.p is None else f"{self.config.rule}, p = {self.config.p}"
        share = 100 * self.trainable_parameters / self.parameters
        return f"{rule}; {self.trainable_parameters:,} trainable parameters ({share:.2f}%)"

    def __str__(self) -> str:
        config, completions = self.config, ""
        batch_size = config.train_batch_size * config.gradient_accumulation_steps * config.world_size
        if isinstance(config, LoopDropoutGRPOConfig):
            prompts = config.generation_batch_size // config.num_generations
            every = config.generates_every / config.gradient_accumulation_steps
            completions = f"{config.num_generations} for each of {prompts:,} prompts every "
            completions += "step" if every == 1 else f"{every:g} steps"
            completions += f", of at most {config.max_completion_length:,} tokens"
        lines = {
            "model": f"{self.model}, {self.parameters:,} parameters, K = {self.num_loops} loops",
            "rule": self.rule_and_adapter,
            "data": self.data,
            "examples": f"{self.examples:,} with {self.tokens:,} tokens, {self.tokens / self.examples:.0f} in the mean",
            "steps": f"{self.steps:,} of {batch_size:,} {'completions' if completions else 'examples'} "
            f"({self.epochs:.4g} epochs)",
            "completions": completions,
            "learning rate": f"{config.learning_rate:g}, seed {config.seed}",
            "work": f"{self.flops_per_token / 1e9:.3g} GFLOP a token, {self.flops / 1e15:.3g} PFLOP in all (estimate)",
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
        data, config: as loaded for the run, and its training arguments.
        peft_config, model_name: the adapter, and a name to be printed; default: those that `model` has.
    """
    if isinstance(model, PeftModel):
        peft_config = model.peft_config[model.active_adapter]
    model_config = model if isinstance(model, PreTrainedConfig) else find_looped_model(model).config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
        model = find_looped_model(model if peft_config is None else get_peft_model(model, peft_config))
    adapter = sum(p.numel() for name, p in model.named_parameters() if _is_adapter(name))

    num_loops, rule = model.config.num_loops, config.make_rule().adapter
    steps_per_epoch, steps = num_steps(len(data.train), config)
    return RunPlan(
        model=model_name or model.config.name_or_path,
        num_loops=num_loops,
        parameters=sum(p.numel() for p in model.parameters()) - adapter,
        trainable_parameters={"per_loop": num_loops * adapter, "learned": num_loops + adapter}.get(rule, adapter),
        examples=len(data.train),
        tokens=data.report.train_tokens,
        steps=steps,
        epochs=steps / steps_per_epoch,
        flops_per_token=_work_per_token(model, config, steps),
        data=data.description,
        config=config,
    )


def _work_per_token(model: nn.Module, config: LoopDropoutArguments, steps: int) -> float:
    """Return the work that a run does for each token of its data (of each completion, with its prompt), in FLOP."""
    looped = find_looped_model(model)
    depth, scored = _mean_loops(config, looped.config.num_loops, steps)
    inside, outside, adapter = _weights(looped)
    work = config.make_rule().passes * flops_per_token(looped, depth, scored)
    forward = 2 * (looped.config.num_loops * (inside + adapter) + outside)
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

    `num_loops` run (default: the model's own depth), and the loss scores the readouts of `scored` of them.
    """
    inside, outside, adapter = _weights(model)
    num_loops = find_looped_model(model).config.num_loops if num_loops is None else num_loops
    return 4 * (num_loops * inside + scored * outside) + 6 * num_loops * adapter


def _weights(model: nn.Module) -> tuple[int, int, int]:
    """Return the weights of linear layers inside and outside the recurrent block, and those of the adapter."""
    model = find_looped_model(model)
    recurrent, inside, outside = set(model.recurrent_linears()), 0, 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not _is_adapter(name):
            is_inside = name.removesuffix(".base_layer") in recurrent
            inside += is_inside * module.weight.numel()
            outside += (not is_inside) * module.weight.numel()
    return inside, outside, sum(p.numel() for name, p in model.named_parameters() if _is_adapter(name))


def num_steps(num_examples: int, config: LoopDropoutArguments) -> tuple[int, int]:
    """Return the optimizer steps of one epoch and of the whole run, as transformers' Trainer counts them."""
    if isinstance(config, LoopDropoutGRPOConfig):  # whole generations, each of them trained on so many micro-batches
        rounds = num_examples // (config.generation_batch_size // config.num_generations)
        batches = max(1, rounds * config.generates_every)
    else:
        batches = math.ceil(math.ceil(num_examples / config.train_batch_size) / config.world_size)
    steps_per_epoch = math.ceil(batches / config.gradient_accumulation_steps)
    if config.max_steps > 0:
        return steps_per_epoch, config.max_steps
    return steps_per_epoch, math.ceil(config.num_train_epochs * steps_per_epoch)


def _is_adapter(name: str) -> bool:
    return ".lora_" in name
