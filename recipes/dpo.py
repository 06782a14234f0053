"""Train a looped language model on preferences (DPO) with a gate rule.

    loopdropout dpo dpo/arithmetic.yaml
    loopdropout dpo dpo/ultrafeedback.yaml --beta 0.05 --seed 102

Each example has a `chosen` and a `rejected` completion, and usually their
`prompt`. A recipe sets the fields below, and `--field value` overrides it.
"""

from __future__ import annotations

from sft import evaluate, evaluate_base, finish, load_base, load_tasks, plan_runs, save, train

from loopdropout_trainer.arguments import AdapterArguments, ModelArguments, ScriptArguments
from loopdropout_trainer.data import DataArguments, load_datasets
from loopdropout_trainer.errors import UserError, run_script
from loopdropout_trainer.recipe import parse, recipe_dict
from loopdropout_trainer.tokenizers import load_tokenizer
from loopdropout_trainer.training.config import LoopDropoutDPOConfig
from loopdropout_trainer.training.dpo import LoopDropoutDPOTrainer


def main(argv: list[str] | None = None) -> None:
    types = (ScriptArguments, ModelArguments, AdapterArguments, DataArguments, LoopDropoutDPOConfig)
    arguments = script_args, model_args, adapter_args, data_args, training_args = parse(types, argv, __doc__)
    runs = plan_runs(script_args, training_args, recipe_dict(*arguments))

    # Tokenizer and data
    tokenizer = load_tokenizer(model_args.model_name_or_path, model_args.model_revision, model_args.chat_template)
    dataset = load_datasets(data_args, tokenizer, training_args.max_length)
    if "chosen" not in dataset["train"].column_names:
        raise UserError(
            "The examples must have the columns `chosen` and `rejected`. `column_mapping` renames columns."
        )
    tasks = load_tasks(runs[0], dataset)
    if script_args.dry_run:
        return

    for run in runs:
        if run.is_complete:
            continue

        # Training
        trainer = LoopDropoutDPOTrainer(
            model=load_base(model_args, run),
            args=run.args,
            train_dataset=dataset["train"],
            eval_dataset=dataset.get("eval"),
            processing_class=tokenizer,
            peft_config=adapter_args.peft_config,
        )
        evaluate_base(trainer, run, tasks)
        train(trainer, run)

        # Evaluation and merging
        evaluate(trainer, run, tasks)
        save(trainer, run)

    finish(runs)


if __name__ == "__main__":
    run_script(main)
