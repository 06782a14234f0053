"""Train a looped language model by reward (GRPO) with a gate rule.

    loopdropout grpo grpo/arithmetic.yaml
    loopdropout grpo grpo/gsm8k.yaml --learning_rate 1e-5 --seed 102

Completions are sampled at unit gates and rewarded if their answer equals the
reference, which is the `completion` of the example. A recipe sets the fields
below, and `--field value` overrides it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sft import (
    AdapterArguments,
    ScriptArguments,
    evaluate,
    evaluate_base,
    is_complete,
    is_trained,
    load_tasks,
    plan_runs,
    print_data,
    print_results,
    save,
    train,
)

from loopdropout_trainer.config import LoopDropoutGRPOConfig
from loopdropout_trainer.data import DataArguments, load_datasets
from loopdropout_trainer.errors import UserError, closest_match, run_script
from loopdropout_trainer.grpo import LoopDropoutGRPOTrainer
from loopdropout_trainer.hub import load_model
from loopdropout_trainer.progress import JobProgressCallback
from loopdropout_trainer.recipe import ModelArguments, parse, recipe_dict
from loopdropout_trainer.rewards import REWARDS
from loopdropout_trainer.tokenizers import load_tokenizer


@dataclass
class RewardArguments:
    """Rewards of completions."""

    rewards: list[str] = field(
        default_factory=lambda: ["gsm8k_strict"],
        metadata={"help": f"Names among {', '.join(REWARDS)}, which are added by `reward_weights`."},
    )

    def __post_init__(self):
        for name in self.rewards:
            if name not in REWARDS:
                raise UserError(
                    f"`rewards` must be among {', '.join(REWARDS)}, got {name!r}.{closest_match(name, REWARDS)}"
                )


def add_answer(example: dict[str, Any]) -> dict[str, str]:
    """Return the completion of an example as the reference `answer`."""
    completion = example["completion"]
    return {"answer": completion if isinstance(completion, str) else completion[-1]["content"]}


def main(argv: list[str] | None = None) -> None:
    types = (ScriptArguments, ModelArguments, AdapterArguments, DataArguments, LoopDropoutGRPOConfig, RewardArguments)
    arguments = parse(types, argv, __doc__)
    script_args, model_args, adapter_args, data_args, training_args, reward_args = arguments
    runs = plan_runs(script_args, training_args, recipe_dict(*arguments))

    # Tokenizer and data
    tokenizer = load_tokenizer(model_args.model_name_or_path, model_args.model_revision, model_args.chat_template)
    dataset = load_datasets(data_args, tokenizer)
    if not {"prompt", "completion"} <= {*dataset["train"].column_names}:
        raise UserError("The examples must have the columns `prompt` and `completion`, which is the reference.")
    dataset = dataset.map(add_answer).select_columns(["prompt", "answer"])
    print_data(dataset, training_args)
    tasks = load_tasks(script_args, data_args.preparation, dataset.get("eval"))
    if script_args.dry_run:
        return

    progress = JobProgressCallback(sum(not is_trained(args) for args, _ in runs))
    for args, recipe in runs:
        if is_complete(args, recipe):
            continue

        # Training
        load_kwargs = {**model_args.load_kwargs, **(args.model_init_kwargs or {})}
        model = load_model(model_args.model_name_or_path, **load_kwargs)
        trainer = LoopDropoutGRPOTrainer(
            model=model,
            reward_funcs=[REWARDS[name] for name in reward_args.rewards],
            args=args,
            train_dataset=dataset["train"],
            eval_dataset=dataset.get("eval"),
            processing_class=tokenizer,
            peft_config=adapter_args.peft_config,
        )
        progress.attach(trainer)
        if script_args.evaluate_base and args is training_args:
            evaluate_base(trainer, script_args, recipe, tasks)
        train(trainer, recipe)

        # Evaluation and merging
        evaluate(trainer, script_args, recipe, tasks)
        save(trainer, recipe, merge=script_args.merge and args is training_args)

    if training_args.process_index == 0:
        print_results([args.output_dir for args, _ in runs])


if __name__ == "__main__":
    run_script(main)
