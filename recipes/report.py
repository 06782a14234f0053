"""Make tables, figures and one page to look through from the folders that runs, sweeps and diagnostics left.

    python recipes/report.py outputs/quickstart
    python recipes/report.py outputs/sweeps --tables math_main mask_controls --output_dir report
    python recipes/report.py outputs --tables all

Without `--tables` it summarises all runs below the folders: accuracy by depth, differences, costs, and every figure that they
have numbers for. A table or figure of the paper is a YAML file in recipes/tables/. Tables are written as Markdown, LaTeX and
CSV, with the paper's numbers in columns of their own, figures as PNG, PDF and SVG. What is missing is listed.
"""

# Columns of results.jsonl that the tables, figures, the summary, sweep.py and docs/replication filter on. Every result has
#   metric, value, unit, task, method, seed, step, num_loops, gates, n
# with these values:
#   method     title of the rule ("LoRA", "Loop Dropout", "LoRA+", "rsLoRA", "CoTo", "Input dropout", ...) or "base model"
#   num_loops  loops that ran in the measurement (results of the training itself: the depth of the training)
#   gates      "unit", "none" (base model), "loop 1" ... "loop K" (only this loop has the adapter), else "1-1-0-0"
#   loop       (optional) the only active loop of gates "loop t", or the loop that is read out
#   group      (optional) subset of a task, for metric "accuracy_by_<column>": "Algebra", "1", ...
#   samples    (optional) file in the folder of the result with one line per problem, in the order of the problems, with the
#              columns `correct` (0 to 1) and `answered` (1 if an answer was extracted), for paired intervals
#   adapter    (optional) folder of the training, if the result is stored elsewhere; its recipe.yaml gives `recipe_*`
#
#   task                               metric
#   metamath_gsm8k, metamath_math500   accuracy (%), missing (% of completions without an answer), accuracy_by_subject,
#                                      accuracy_by_level
#   gsm8k, gsm8k_platinum, gsm_plus_mini, arithmetic_*, development, mmlu, bbh, truthfulqa_mc2, humaneval, humaneval_plus,
#   mbpp, mbpp_plus, ifeval_strict, ifeval_loose, ...     accuracy (%): one task name for each headline number
#                                      (arithmetic_*: also accuracy_by_num_steps)
#   training                           train_seconds, step_seconds, tokens_per_second, peak_memory_gb, trainable_parameters,
#                                      examples, num_tokens, eval_loss (nats, on held-out examples)
#   of the diagnostics (task: "development" for held-out examples, or the name of a task):
#     single loop                      loss (nats) and loss_reduction (%) with gates "loop t" and loop t, or with gates
#                                      "unit"; frozen loss: metric loss, gates "none", method "base model"
#     readouts                         readout_loss (nats), loop t
#
# From recipe.yaml: recipe_learning_rate, recipe_lora_r, recipe_num_loops, recipe_model_name_or_path, recipe_rule, recipe_p,
# recipe_run_name ("SWEEP/METHOD/lr_X/seed_S" for a run of a sweep, which gives the columns `sweep` and `variant`).
#
# recipes/sweep.py starts `sft.py RUN.yaml --output_dir FOLDER` with `resume_from_checkpoint: true`. In a finished folder the
# script trains nothing, evaluates with the new settings, and adds results (the results of the training stay). A loss that is
# not finite ends it with run.json of status "non-finite".

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loopdropout_trainer.errors import run_command
from loopdropout_trainer.settings.recipe import RecipeError


TABLES = Path(__file__).parent / "tables"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="folders of runs; everything below them is read")
    parser.add_argument(
        "--tables",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names in recipes/tables, YAML files of your own, or `all`",
    )
    parser.add_argument("--output_dir", default="report", help="folder for the report (default: %(default)s)")
    parser.add_argument("--title", default="Report", help="of the page")
    arguments = parser.parse_args(argv)
    from loopdropout_trainer.reports.report import write_report
    from loopdropout_trainer.reports.specs import grid, notes

    tables, summary = write_report(
        arguments.folders, table_files(arguments.tables), arguments.output_dir, arguments.title
    )
    screen = Console()
    any_width = Console(width=10_000)
    for cells in tables:
        texts, spec = grid(cells), cells.attrs["spec"]
        out = Table(title=spec.title, title_justify="left", caption="\n".join(notes(cells)), caption_justify="left")
        for place, name in enumerate(texts):
            out.add_column(name, justify="left" if place < len(spec.heads) else "right")
        for row in texts.itertuples(index=False):
            out.add_row(*row)
        narrowest = any_width.measure(out).minimum  # on a narrower screen, too, every word is whole
        Console(width=max(narrowest, screen.width)).print(out)
    screen.print(summary, highlight=False, soft_wrap=True)


def table_files(names: list[str]) -> list[Path]:
    """Return the YAML files of tables given by name or path."""
    tables = {path.stem: path for path in sorted(TABLES.glob("*.yaml"))}
    files = []
    for name in names:
        if name == "all":
            files += tables.values()
        elif name in tables:
            files.append(tables[name])
        elif Path(name).is_file():
            files.append(Path(name))
        else:
            raise RecipeError(f"`--tables` must name a file or one of all, {', '.join(tables)}; got {name!r}.")
    return files


if __name__ == "__main__":
    run_command(main)
