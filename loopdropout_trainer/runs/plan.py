"""What a training run is about to do: model, depth, rule, parameters, steps and tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from loopdropout_trainer.data import LoadedData
from loopdropout_trainer.experimental.grpo_config import LoopDropoutGRPOConfig
from loopdropout_trainer.looped import find_looped_model
from loopdropout_trainer.training.config import LoopDropoutArguments


@dataclass(frozen=True)
class RunPlan:
    """A training run before it starts; as a string it is a table. Examples and tokens are counted once each."""

    model: str
    num_loops: int
    parameters: int
    trainable_parameters: int
    examples: int
    tokens: int
    steps: int
    epochs: float
    data: str
    config: LoopDropoutArguments

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
    with torch.device("meta"):
        is_config = isinstance(model, PreTrainedConfig)
        model = AutoModelForCausalLM.from_config(model if is_config else find_looped_model(model).config)
        model = find_looped_model(model if peft_config is None else get_peft_model(model, peft_config))
    adapter = sum(p.numel() for name, p in model.named_parameters() if ".lora_" in name)

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
        data=data.description,
        config=config,
    )


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
