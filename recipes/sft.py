"""Fine-tune a looped language model with Loop Dropout or another rule.

    loopdropout sft quickstart.yaml
    loopdropout sft gsm8k.yaml --learning_rate 2e-4 --seed 102 \\
        --output_dir outputs/gsm8k_102
    loopdropout sft gsm8k.yaml --dry_run true
    accelerate launch recipes/sft.py recipes/gsm8k.yaml

A recipe sets the fields below, and `--field value` overrides it. The command
trains, evaluates and saves an adapter, and prints its results. The same command
with `--resume_from_checkpoint true` continues an interrupted run.
"""

from __future__ import annotations

from loopdropout_trainer.data import SFTDataArguments, label_example, preview
from loopdropout_trainer.errors import UserError, run_script
from loopdropout_trainer.jobs.job import Job
from loopdropout_trainer.jobs.runs import Run
from loopdropout_trainer.settings.arguments import AdapterArguments, ModelArguments, SFTArguments
from loopdropout_trainer.settings.recipe import build, read_settings
from loopdropout_trainer.training.config import LoopDropoutConfig


ARGUMENTS = (SFTArguments, ModelArguments, AdapterArguments, SFTDataArguments, LoopDropoutConfig)


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
    if script_args.preview is not None:
        examples = job.loaded.find_examples(script_args.preview)
        if not examples:
            most = len(dataset["train"])
            if job.loaded.sources:  # an example has its number in its data set
                most = max(source.num_train for source in job.loaded.sources)
            raise UserError(f"`preview` must be from 0 to {most - 1}, got {script_args.preview}.")
        losses = training_args.completion_only_loss, training_args.assistant_only_loss
        for title, index in examples.items():
            if title:
                print(f"\nExample {script_args.preview} of {title}:")
            print(preview(label_example(dataset["train"][index], tokenizer, *losses), tokenizer))
    if script_args.dry_run:
        job.end_dry_run()
        return

    # These imports take seconds, so they come after the checks.
    from loopdropout_trainer.jobs.progress import SampleCompletionsCallback
    from loopdropout_trainer.training.multipass import LoRADropoutSFTTrainer
    from loopdropout_trainer.training.sft import LoopDropoutSFTTrainer

    def make_trainer(run: Run) -> LoopDropoutSFTTrainer:
        trainer_class = LoRADropoutSFTTrainer if run.args.make_rule().draws_per_batch > 1 else LoopDropoutSFTTrainer
        trainer = trainer_class(
            model=job.load_model(run),
            args=run.args,
            train_dataset=dataset["train"],
            eval_dataset=dataset.get("eval"),
            processing_class=tokenizer,
            peft_config=adapter_args.peft_config,
        )
        if "eval" in dataset and script_args.num_sample_completions:
            trainer.add_callback(SampleCompletionsCallback(trainer, script_args.num_sample_completions))
        return trainer

    job.run(make_trainer, dataset.get("eval"))


if __name__ == "__main__":
    run_script(main)
