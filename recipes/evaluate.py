"""Evaluate a base model, a merged model or adapters on benchmarks, and write the rows of a table.

    accelerate launch recipes/evaluate.py recipes/evaluation/metamath.yaml --adapter outputs/metamath_gsm
    accelerate launch recipes/evaluate.py recipes/evaluation/tulu2.yaml --adapter none lora=outputs/tulu2_lora outputs/tulu2
    python recipes/evaluate.py recipes/quickstart.yaml --adapter outputs/quickstart --at_depths 2 4 8
    python recipes/evaluate.py recipes/quickstart.yaml --adapter outputs/quickstart --gates 1-1-1-1 single_loop

Recipes of sft.py are taken as well; their fields that concern only the training are ignored. `output_dir` gets a row for each
number, and every prediction (docs/evaluation.md). The same command continues an evaluation that was killed.
"""

from __future__ import annotations

import os
from pathlib import Path

from loopdropout_trainer import LoopDropoutConfig
from loopdropout_trainer.data import DataArguments
from loopdropout_trainer.errors import run_command
from loopdropout_trainer.evaluation.results import ANSWERS_FOLDER, results_table
from loopdropout_trainer.evaluation.run import EvaluationArguments, run_evaluation
from loopdropout_trainer.processes import show_log
from loopdropout_trainer.record.measurement import MEASUREMENTS_FILE, read_measurements
from loopdropout_trainer.settings.arguments import AdapterArguments, ModelArguments, RunArguments
from loopdropout_trainer.settings.recipe import parse_recipe


OF_TRAINING = (RunArguments, AdapterArguments, DataArguments, LoopDropoutConfig)
IS_FIRST = os.environ.get("RANK", "0") == "0"


def main(argv: list[str] | None = None) -> None:
    (model, arguments), _ = parse_recipe(
        (ModelArguments, EvaluationArguments), argv, description=__doc__, unread_types=OF_TRAINING
    )
    show_log()
    results = run_evaluation(model, arguments)
    if IS_FIRST:
        for row, benchmarks in results.items():
            for result in benchmarks:
                missing, errors = 100 * result.missing / result.total, result.errors
                print(
                    f"{row}, {result.name}: {result.score:.2f} on {result.total} problems, {missing:.2f}% without an answer, "
                    f"{errors} that the scorer cannot read"
                )
        rows, _, _ = read_measurements(arguments.output_dir)
        print(f"\n{results_table(rows, list(results), arguments.averages)}\n")
        folder = Path(arguments.output_dir)
        print(f"Rows are in {folder / MEASUREMENTS_FILE}, predictions in {folder / ANSWERS_FOLDER}")


if __name__ == "__main__":
    run_command(main)
