"""What a training run is about to do: model, depth, rule, parameters, steps and tokens."""

from __future__ import annotations

from dataclasses import dataclass

from peft import PeftConfig
from transformers import PreTrainedConfig

from loopdropout_trainer.data import LoadedData
from loopdropout_trainer.experimental.grpo_config import LoopDropoutGRPOConfig
from loopdropout_trainer.training.config import LoopDropoutArguments
from loopdropout_trainer.training.preflight import model_to_train


@dataclass(frozen=True)
class RunPlan:
    """A training run before it starts; as a string it is a table. Examples and tokens are counted once each."""

    model: str
    num_loops: int
    parameters: int
    trainable_parameters: int
    steps: int
    epochs: float
    data: LoadedData
    config: LoopDropoutArguments

    @property
    def rule_and_adapter(self) -> str:
        """The two of them in one line."""
        rule = self.config.rule if self.config.p is None else f"{self.config.rule}, p = {self.config.p}"
        share = 100 * self.trainable_parameters / self.parameters
        return f"{rule}; {self.trainable_parameters:,} trainable parameters ({share:.2f}%)"

    @property
    def precision(self) -> str:
        """In how many bits the base's linear layers are loaded, if they are quantised."""
        quantised = (self.config.model_init_kwargs or {}).get("quantization_config") or {}
        bits = [bits for bits in (4, 8) if quantised.get(f"load_in_{bits}bit")]
        return f" in {bits[0]} bits" if bits else ""

    def __str__(self) -> str:
        config = self.config
        completions = ""
        examples = len(self.data.train)
        tokens = self.data.report.train_tokens
        if isinstance(config, LoopDropoutGRPOConfig):
            prompts = config.generation_batch_size // config.num_generations
            every = config.generates_every / config.gradient_accumulation_steps
            completions = f"{config.num_generations} for each of {prompts:,} prompts every "
            completions += "step" if every == 1 else f"{every:g} steps"
            completions += f", of at most {config.max_completion_length:,} tokens"
        lines = {
            "model": f"{self.model}, {self.parameters:,} parameters{self.precision}, K = {self.num_loops} loops",
            "rule": self.rule_and_adapter,
            "data": self.data.description,
            "examples": f"{examples:,} with {tokens:,} tokens, {tokens / examples:.0f} in the mean",
            "steps": f"{self.steps:,} of {config.examples_per_step:,} {'completions' if completions else 'examples'} "
            f"({self.epochs:.4g} epochs)",
            "completions": completions,
            "learning rate": f"{config.learning_rate:g}, seed {config.seed}",
        }
        width = max(map(len, lines))
        return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items() if text)


def plan_run(
    model: PreTrainedConfig, data: LoadedData, config: LoopDropoutArguments, peft_config: PeftConfig, model_name: str
) -> RunPlan:
    """Work out what a run will do, without loading weights or taking a step.

    Args:
        model: configuration of the base, with the depth that it will run at; model_name: to be printed.
        data, config, peft_config: as loaded for the run, its training arguments and its adapter.
    """
    trainable, total = model_to_train(model, peft_config, config.make_rule()).get_nb_trainable_parameters()
    steps_per_epoch, steps = config.num_steps(config.num_rows(data.report.lengths))
    epochs = steps / steps_per_epoch
    return RunPlan(model_name, model.num_loops, total - trainable, trainable, steps, epochs, data, config)
