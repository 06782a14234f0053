"""Train a looped language model by reward (GRPO) with a gate rule.

    loopdropout grpo grpo/arithmetic.yaml
    loopdropout grpo grpo/gsm8k.yaml --learning_rate 1e-5 --seed 102

Completions are sampled at unit gates and rewarded if their answer equals the
reference, which is the `completion` of the example. A recipe sets the fields
below, and `--field value` overrides it.
"""

from __future__ import annotations

from loopdropout_trainer.data import GRPODataArguments
from loopdropout_trainer.data.bars import hide_short_bars
from loopdropout_trainer.errors import UserError, run_script
from loopdropout_trainer.jobs.job import Job
from loopdropout_trainer.jobs.runs import Run
from loopdropout_trainer.settings.arguments import AdapterArguments, ModelArguments, RewardArguments, ScriptArguments
from loopdropout_trainer.settings.recipe import build, read_settings
from loopdropout_trainer.training.config import LoopDropoutGRPOConfig


ARGUMENTS = (
    ScriptArguments,
    ModelArguments,
    AdapterArguments,
    GRPODataArguments,
    LoopDropoutGRPOConfig,
    RewardArguments,
)


def add_answer(example: dict) -> dict[str, str]:
    """Return the completion of an example as the reference `answer`."""
    completion = example["completion"]
    return {"answer": completion if isinstance(completion, str) else completion[-1]["content"]}


def main(argv: list[str] | None = None) -> None:
    # Settings and plan
    settings = read_settings(ARGUMENTS, argv, __doc__)
    script_args, model_args, adapter_args, data_args, training_args, reward_args = build(ARGUMENTS, settings)
    job = Job(
        settings,
        script=script_args,
        model=model_args,
        adapter=adapter_args,
        data=data_args,
        training=training_args,
    )

    # Tokenizer and data
    dataset = job.load_data()
    if dataset is None:  # a dry run without a network, which has printed the plan
        job.end_dry_run()
        return
    tokenizer = job.tokenizer
    if "completion" not in dataset["train"].column_names:
        raise UserError("The examples must have the columns `prompt` and `completion`, which is the reference.")
    with hide_short_bars(num_rows=sum(dataset.num_rows.values())):
        dataset = dataset.map(add_answer).select_columns(["prompt", "answer"])
    if script_args.dry_run:
        job.end_dry_run()
        return

    # These imports take seconds, so they come after the checks.
    from loopdropout_trainer.training.grpo import LoopDropoutGRPOTrainer

    def make_trainer(run: Run) -> LoopDropoutGRPOTrainer:
        return LoopDropoutGRPOTrainer(
            model=job.load_model(run),
            reward_funcs=reward_args.rewards,
            args=run.args,
            train_dataset=dataset["train"],
            eval_dataset=dataset.get("eval"),
            processing_class=tokenizer,
            peft_config=adapter_args.peft_config,
        )

    job.run(make_trainer, dataset.get("eval"))


if __name__ == "__main__":
    run_script(main)
