"""Train a looped language model on preferences (DPO) with a gate rule.

    loopdropout dpo dpo/arithmetic.yaml
    loopdropout dpo dpo/ultrafeedback.yaml --beta 0.05 --seed 102

Each example has a `chosen` and a `rejected` completion, and usually their
`prompt`. A recipe sets the fields below, and `--field value` overrides it.
"""

from __future__ import annotations

from loopdropout_trainer.data import DPODataArguments
from loopdropout_trainer.errors import UserError, run_script
from loopdropout_trainer.jobs.job import Job
from loopdropout_trainer.jobs.runs import Run
from loopdropout_trainer.settings.arguments import AdapterArguments, ModelArguments, ScriptArguments
from loopdropout_trainer.settings.recipe import build, read_settings
from loopdropout_trainer.training.config import LoopDropoutDPOConfig


ARGUMENTS = (ScriptArguments, ModelArguments, AdapterArguments, DPODataArguments, LoopDropoutDPOConfig)


def main(argv: list[str] | None = None) -> None:
    # Settings and plan
    settings = read_settings(ARGUMENTS, argv, __doc__)
    script_args, model_args, adapter_args, data_args, training_args = build(ARGUMENTS, settings)
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
    if "chosen" not in dataset["train"].column_names:
        raise UserError(
            "The examples must have the columns `chosen` and `rejected`. `column_mapping` renames columns."
        )
    if script_args.dry_run:
        job.end_dry_run()
        return

    # These imports take seconds, so they come after the checks.
    from loopdropout_trainer.training.dpo import LoopDropoutDPOTrainer

    def make_trainer(run: Run) -> LoopDropoutDPOTrainer:
        return LoopDropoutDPOTrainer(
            model=job.load_model(run),
            args=run.args,
            train_dataset=dataset["train"],
            eval_dataset=dataset.get("eval"),
            processing_class=tokenizer,
            peft_config=adapter_args.peft_config,
        )

    job.run(make_trainer, dataset.get("eval"))


if __name__ == "__main__":
    run_script(main)
