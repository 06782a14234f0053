"""See what adapters do in each loop: every diagnostic on the base model and on each adapter, on the same rows.

    python recipes/diagnose.py recipes/quickstart.yaml --adapters LoRA=outputs/quickstart/lora Ours=outputs/quickstart
    accelerate launch recipes/diagnose.py recipes/gsm8k.yaml --adapters LoRA=outputs/gsm8k/lora --diagnostics single_loop

Recipes of sft.py and evaluate.py are taken; their fields that concern only the training are ignored. Tables are printed;
rows, which `loopdropout report` draws, go to `output_dir`/diagnostics. The same command continues a run that was killed.
"""

from __future__ import annotations

import os
from pathlib import Path

from loopdropout_trainer import LoopDropoutConfig
from loopdropout_trainer.diagnostics.rows import RowArguments
from loopdropout_trainer.diagnostics.run import FOLDER, DiagnosticArguments, run_diagnostics
from loopdropout_trainer.errors import run_command
from loopdropout_trainer.evaluation.run import EvaluationArguments
from loopdropout_trainer.processes import show_log
from loopdropout_trainer.settings.arguments import AdapterArguments, ModelArguments, RunArguments
from loopdropout_trainer.settings.recipe import parse_recipe


UNREAD = (RunArguments, EvaluationArguments, AdapterArguments, LoopDropoutConfig)
IS_FIRST = os.environ.get("RANK", "0") == "0"


def main(argv: list[str] | None = None) -> None:
    types = (ModelArguments, RowArguments, DiagnosticArguments)
    (model, rows, arguments), _ = parse_recipe(types, argv, description=__doc__, unread_types=UNREAD)
    show_log()
    run_diagnostics(model, rows, arguments)
    if IS_FIRST:
        folder = Path(arguments.output_dir) / FOLDER
        try:
            from loopdropout_trainer.reports import load_table, save_figure
            from loopdropout_trainer.reports.report import automatic_figures, numbers_by_method

            table = load_table([folder])
            print(numbers_by_method(table).to_string() if len(table) else "Nothing was measured.")
            for name, figure in automatic_figures(table).items():
                save_figure(figure, folder / "figures" / name)
            print(*(f"Left out: {fault}\n" for fault in table.attrs["skipped"]), sep="", end="")
        except (ImportError, ValueError) as error:  # after hours of measuring
            print(f"No figures: {error}")
        print(f"Everything is in {folder}")


if __name__ == "__main__":
    run_command(main)
